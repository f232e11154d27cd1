"""Recording keeps MXNet's meaning: what answers without a flush, what flushes, writes, views, exceptions, threads."""

import gc
import io
import pickle
import threading

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd


def rows(n=3, size=2):
    return [nd.array(np.arange(size) + 10 * k + 1) for k in range(n)]


def is_lazy(x):
    return type(x) is LazyArray


# ---- an NDArray like any other ---------------------------------------------------------------


def test_answers_without_a_flush():
    with gdb.batching() as scope:
        y = nd.array([[1, 2, 3]]) * 2
        assert isinstance(y, nd.NDArray) and is_lazy(y)
        assert (y.shape, y.dtype, y.size, y.ndim, y.stype) == ((1, 3), np.float32, 3, 2, "default")
        assert y.context == y.ctx == mx.current_context() and len(y) == 1
        assert scope.stats.flushes == 0
    assert y.asnumpy().tolist() == [[2, 4, 6]]


READERS = {
    "asnumpy": lambda y: y.asnumpy().tolist(),
    "asscalar": lambda y: y[0, 0].asscalar(),
    "bool": lambda y: bool(y[0, 0] > 0),
    "print": lambda y: str(y.asnumpy()),
    "str": lambda y: str(y),
    "wait": lambda y: y.wait_to_read(),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)).asnumpy().tolist(),
    "numpy": lambda y: np.asarray(y.asnumpy()).tolist(),
    "copyto": lambda y: y.copyto(mx.current_context()).asnumpy().tolist(),
    "as_in_context": lambda y: y.as_in_context(mx.current_context()).asnumpy().tolist(),
    "dlpack": lambda y: nd.from_dlpack(y.to_dlpack_for_read()).asnumpy().tolist(),
    "int": lambda y: int(y[0, 0].asscalar()),
    "iteration": lambda y: [r.asnumpy().tolist() for r in y],
    "nd.array": lambda y: nd.array(y).asnumpy().tolist(),
    "concatenate": lambda y: nd.concatenate([y, y]).asnumpy().tolist(),
    "list index": lambda y: y[[0, 1]].asnumpy().tolist(),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_needs_the_value_gets_it(name):
    x = nd.array([[1, 2, 3], [4, 5, 6]])
    want = READERS[name](x * 2)
    with gdb.batching() as scope:
        y = x * 2
        got = READERS[name](y)
        assert scope.stats.flushes >= 1
    assert got == want


def test_saving_a_lazy_array(tmp_path):
    with gdb.batching():
        y = nd.array([1.0, 2.0]) + 1
        nd.save(str(tmp_path / "y"), [y])
    assert nd.load(str(tmp_path / "y"))[0].asnumpy().tolist() == [2, 3]


def test_every_method_of_an_ndarray_works():
    """Methods without arguments, on a lazy array and on a plain one."""
    names = ["abs", "sqrt", "exp", "log", "tanh", "sum", "mean", "max", "min", "prod", "norm", "argmax", "flatten",
             "sigmoid", "square", "relu", "sign", "round", "floor", "ceil", "rint", "fix", "trunc", "sin", "cos",
             "degrees", "radians", "sinh", "cosh", "arctan", "expm1", "log1p", "log2", "log10", "rsqrt", "cbrt",
             "reciprocal", "zeros_like", "ones_like", "softmax", "log_softmax", "argmin", "argsort", "sort", "topk",
             "nansum", "nanprod", "transpose", "copy", "detach", "squeeze", "shape_array", "size_array"]
    base = nd.array([[1.5, 2.25, 0.5]])
    for name in names:
        want = getattr(base * 1, name)()
        with gdb.batching():
            got = getattr(base * 1, name)()
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-5, err_msg=name)


def test_after_the_value_exists_it_is_a_plain_ndarray():
    with gdb.batching():
        y = nd.array([1.0]) + 1
    assert is_lazy(y)
    y.asnumpy()
    assert type(y) is nd.NDArray
    y[:] = 5
    assert y.asscalar() == 5


# ---- batching --------------------------------------------------------------------------------


def test_equal_calls_of_many_samples_are_one_launch():
    with gdb.batching() as scope:
        out = [nd.tanh(x * 2) for x in rows(50)]
    assert (scope.stats.calls, scope.stats.launches) == (100, 2)
    for x, y in zip(rows(50), out):
        np.testing.assert_allclose(y.asnumpy(), np.tanh(x.asnumpy() * 2), rtol=1e-6)


def test_signatures_are_exact():
    """Same operator, other attribute, dtype, shape or scalar: another launch."""
    x, y = nd.array([[1.0, 2.0]]), nd.array([[3.0, 4.0]], dtype="float64")
    with gdb.batching() as scope:
        a = [x + 1, x + 2, y + 1, nd.sum(x, axis=0), nd.sum(x, axis=1)]
    assert scope.stats.launches == 5
    assert [v.asnumpy().ravel().tolist() for v in a] == [[2, 3], [3, 4], [4, 5], [1, 2], [3]]


def test_shared_and_stacked_operands():
    weight = nd.array([[1.0, 0.0], [0.0, 2.0]])
    own = [nd.array([[float(k), 0.0], [0.0, 1.0]]) for k in range(3)]
    with gdb.batching() as scope:
        shared = [nd.dot(weight, x) for x in rows()]
        stacked = [nd.dot(w, x) for w, x in zip(own, rows())]
    assert scope.stats.launches == 1            # the matrix is in some calls the same: one class, stacked
    for x, w, s, t in zip(rows(), own, shared, stacked):
        np.testing.assert_allclose(s.asnumpy(), weight.asnumpy() @ x.asnumpy())
        np.testing.assert_allclose(t.asnumpy(), w.asnumpy() @ x.asnumpy())


def test_dropped_results_are_not_outputs():
    x = nd.array([1.0])
    x.attach_grad()
    with autograd.record(), gdb.batching():
        kept = []
        for k in range(4):
            y = x * k
            kept.append((y * y) + 1)
        del y
    assert len(kept[0].owner.flushed.heads) == 4
    autograd.backward(kept)
    assert x.grad.asscalar() == sum(2 * k * k for k in range(4))


def test_max_depth_chain():
    x = nd.array([0.0])
    with gdb.batching() as scope:
        for _ in range(300):
            x = x + 1
    assert x.asscalar() == 300 and scope.stats.launches == 300


# ---- writes ----------------------------------------------------------------------------------


def test_in_place_arithmetic_gives_the_name_a_new_value():
    with gdb.batching() as scope:
        out = []
        for x in rows():
            total = x * 1
            other = total
            total += x
            total *= 2
            out.append((total, other))
        assert scope.stats.flushes == 0
    for x, (total, other) in zip(rows(), out):
        assert total is other
        np.testing.assert_array_equal(total.asnumpy(), x.asnumpy() * 4)


def test_a_result_read_before_an_in_place_write_keeps_the_old_value():
    with gdb.batching():
        a = nd.array([1.0]) * 1
        b = a + 0
        a += 5
        c = a + 0
    assert (a.asscalar(), b.asscalar(), c.asscalar()) == (6, 1, 6)


@pytest.mark.parametrize("write", [
    lambda buf: buf.__setitem__(slice(None), 7.0),
    lambda buf: buf.__setitem__(slice(None), np.array([7.0, 7.0], "float32")),
    lambda buf: buf.__setitem__(slice(None), nd.array([7.0, 7.0])),
    lambda buf: buf.__setitem__(0, 7.0),
    lambda buf: buf[0:1].__setitem__(slice(None), 7.0),
    lambda buf: buf.__iadd__(6.0),
    lambda buf: nd.elemwise_add(buf, buf * 6, out=buf),
    lambda buf: nd.random.uniform(7, 8, shape=(2,), out=buf),
    lambda buf: buf._sync_copyfrom(np.array([7.0, 7.0], "float32")),
])
def test_writing_an_input_that_is_still_to_be_read(write):
    buffer = nd.array([1.0, 2.0])
    with gdb.batching():
        y = buffer * 10
        write(buffer)
        z = buffer * 1
    assert y.asnumpy().tolist() == [10, 20]
    assert z.asnumpy().tolist() == buffer.asnumpy().tolist() and buffer[0].asscalar() >= 7 - 5


def test_making_arrays_does_not_flush():
    with gdb.batching() as scope:
        y = [nd.array([float(k)]) + nd.ones((1,)) for k in range(5)]
        assert scope.stats.flushes == 0
    assert [v.asscalar() for v in y] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("view", [lambda x: x[0], lambda x: x[0:1], lambda x: x.reshape((-1,)), lambda x: x[0][1:2],
                                  lambda x: x.T.T, lambda x: x[:, 1:]])
def test_views_alias_their_base_as_in_mxnet(view):
    def work():
        x = nd.array([[1.0, 2.0], [3.0, 4.0]]) * 1
        v = view(x)
        before = v + 0
        v[:] = 9
        return before.asnumpy().tolist(), v.asnumpy().tolist(), x.asnumpy().tolist()

    want = work()
    with gdb.batching():
        got = work()
    assert got == want


def test_writing_the_base_shows_in_the_view():
    def work():
        x = nd.array([[1.0, 2.0], [3.0, 4.0]]) * 1
        v = x[1]
        x[:] = 9
        return v.asnumpy().tolist()

    want = work()
    with gdb.batching():
        assert work() == want


def test_functional_reshape_is_a_copy():
    with gdb.batching():
        x = nd.array([1.0, 2.0]) * 1
        y = nd.reshape(x, shape=(1, 2))
        y[:] = 9
        assert x.asnumpy().tolist() == [1, 2] and y.asnumpy().tolist() == [[9, 9]]


def test_kvstore_pull_into_a_buffer_that_is_still_to_be_read():
    store = mx.kv.create("local")
    store.init(0, nd.array([5.0]))
    buffer = nd.array([1.0])
    with gdb.batching():
        y = buffer * 10
        store.pull(0, out=buffer)
    assert y.asscalar() == 10 and buffer.asscalar() == 5


def test_trainer_step_inside_the_scope_reads_first():
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    with gdb.batching():
        with autograd.record():
            loss = net(nd.array([[2.0]]))
        before = net(nd.array([[1.0]]))
        loss.backward()
        trainer.step(1)
        after = net(nd.array([[1.0]]))
    assert (before.asscalar(), after.asscalar()) == (1.0, -1.0)


# ---- what runs alone -------------------------------------------------------------------------


def test_an_operator_outside_the_table_runs_alone_and_is_counted():
    with gdb.batching() as scope:
        out = [nd.sort(x * -1) for x in rows()]
    assert scope.stats.fallbacks == {"operator sort is not in the op table": 3}
    for x, y in zip(rows(), out):
        assert y.asnumpy().tolist() == sorted(-x.asnumpy())


def test_sparse_and_custom_and_numpy_arrays_run_alone():
    sparse = nd.array([[1.0, 0.0]]).tostype("csr")
    with gdb.batching() as scope:
        y = nd.sparse.dot(sparse, nd.array([[1.0], [2.0]]))
        z = mx.np.tanh(mx.np.array([0.5]))
        assert y.asscalar() == 1 and abs(float(z.item()) - np.tanh(0.5)) < 1e-6
    assert any("sparse" in reason for reason in scope.stats.fallbacks)


def test_row_sparse_gradients_stay_row_sparse():
    def work():
        embed = gluon.nn.Embedding(6, 2, sparse_grad=True, prefix="e_")
        embed.initialize(mx.init.One())
        with autograd.record():
            losses = [(embed(nd.array([k])) * (k + 1)).sum() for k in (1, 3, 1)]
        autograd.backward(losses)
        return embed.weight.grad()

    want = work()
    with gdb.batching() as scope:
        got = work()
    assert got.stype == "row_sparse"
    np.testing.assert_array_equal(got.asnumpy(), want.asnumpy())
    assert any("sparse" in reason for reason in scope.stats.fallbacks)


def test_mxnets_own_error_for_wrong_shapes():
    with gdb.batching(), pytest.raises(mx.base.MXNetError):
        (nd.ones((2, 3)) + nd.ones((4, 5))).wait_to_read()


# ---- scopes ----------------------------------------------------------------------------------


def test_nested_scopes_join():
    with gdb.batching() as outer:
        a = nd.array([1.0]) + 1
        with gdb.batching() as inner:
            b = nd.array([2.0]) + 1
        assert inner is outer and is_lazy(b) and outer.stats.flushes == 0
    assert outer.stats.launches == 1 and (a + b).asscalar() == 5


def test_flush_by_hand():
    gdb.flush()                                 # outside a scope: nothing to do
    with gdb.batching() as scope:
        nd.array([1.0]) + 1
        gdb.flush()
        assert scope.stats.flushes == 1


def test_an_exception_discards_restores_and_re_raises():
    collecting = gc.isenabled()
    with pytest.raises(ZeroDivisionError, match="mine"):
        with gdb.batching():
            y = nd.array([1.0]) + 1
            raise ZeroDivisionError("mine")
    assert gc.isenabled() == collecting
    assert type(nd.array([1.0]) + 1) is nd.NDArray
    with pytest.raises(gdb.DynBatchError, match="exception left"):
        y.asnumpy()


def test_hooks_are_removed_after_the_scope():
    before = (mx.ndarray.register._imperative_invoke, autograd.set_recording, nd.NDArray._sync_copyfrom,
              gluon.Block.__call__, mx.kvstore.KVStore.pull)
    with gdb.batching():
        assert mx.ndarray.register._imperative_invoke is not before[0]
    assert before == (mx.ndarray.register._imperative_invoke, autograd.set_recording, nd.NDArray._sync_copyfrom,
                      gluon.Block.__call__, mx.kvstore.KVStore.pull)


def test_other_threads_are_untouched():
    seen = []

    def work():
        y = nd.array([1.0]) + 1
        seen.append((type(y), y.asscalar()))

    with gdb.batching():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        z = nd.array([1.0]) + 1
        assert is_lazy(z)
    assert seen == [(nd.NDArray, 2.0)]


def test_scopes_of_several_threads_at_once():
    problems = []

    def work(seed):
        try:
            rng = np.random.RandomState(seed)
            for _ in range(10):
                data = [rng.normal(size=3).astype("float32") for _ in range(5)]
                with gdb.batching():
                    out = [nd.tanh(nd.array(d) * seed) for d in data]
                for d, y in zip(data, out):
                    np.testing.assert_allclose(y.asnumpy(), np.tanh(d * seed), rtol=1e-5)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(k + 1,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems[0]


def test_a_lazy_array_travels_to_another_thread():
    got = []
    with gdb.batching():
        y = nd.array([20.0]) + 1
        thread = threading.Thread(target=lambda: got.append(y.asscalar()))
        thread.start()
        thread.join()
        z = y + 1
    assert got == [21.0] and z.asscalar() == 22


def test_an_empty_scope():
    with gdb.batching() as scope:
        pass
    assert scope.stats.calls == scope.stats.flushes == 0


def test_a_dropped_lazy_array_does_not_flush():
    with gdb.batching() as scope:
        y = nd.array([1.0]) + 1
        del y
        gc.collect()
        assert scope.stats.flushes == 0


def test_printing_a_lazy_array_shows_its_value(capsys):
    with gdb.batching():
        y = nd.array([1.0]) + 1
        stream = io.StringIO()
        print(y, file=stream)
    assert "2." in stream.getvalue()


# ---- autograd --------------------------------------------------------------------------------


def test_pause_and_modes_inside_the_scope():
    def work():
        x = nd.array([3.0])
        x.attach_grad()
        with autograd.record():
            y = x * x
            with autograd.pause():
                z = x * 10
            with autograd.predict_mode():
                d = nd.Dropout(x, p=0.9)
            loss = y + z + d
        loss.backward()
        return loss.asscalar(), x.grad.asscalar()

    want = work()
    with gdb.batching():
        got = work()
    assert got == want == (9 + 30 + 3, 7.0)


def test_values_of_one_flush_feed_the_next_on_the_tape():
    x = nd.array([2.0])
    x.attach_grad()
    with autograd.record(), gdb.batching() as scope:
        a = x * x
        assert a.asscalar() == 4                # flushes here
        b = a * x
        c = b + a
    c.backward()
    assert scope.stats.flushes == 2
    assert x.grad.asscalar() == 3 * 4 + 2 * 2


@pytest.mark.parametrize("req", ["write", "add"])
def test_one_pass_per_loss_touches_only_what_the_loss_depends_on(req):
    def work():
        xs = [nd.array([float(k)]) for k in range(4)]
        shared, other = nd.array([2.0]), nd.array([3.0])
        for x in (*xs, shared, other):
            x.attach_grad(req)
            x.grad[:] = 100
        with autograd.record():
            losses = [x * x * shared for x in xs]
            losses[1] = losses[1] * other
        for loss in losses[:3]:
            loss.backward()
        autograd.backward(losses[3:])
        return [x.grad.asscalar() for x in (*xs, shared, other)]

    want = work()
    with gdb.batching():
        got = work()
    assert got == want


def test_backward_inside_the_scope():
    x = nd.array([2.0])
    x.attach_grad()
    with gdb.batching():
        with autograd.record():
            y = x * x * x
        y.backward()
        assert x.grad.asscalar() == 12
