"""Recording keeps MXNet's meaning: what answers without a flush, what flushes, writes, views, what runs alone."""

import pickle

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import recorder

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


def test_reading_a_value_makes_no_ndarray_and_using_it_does():
    with gdb.batching():
        y = nd.array([1.0]) + 1
    assert y.asscalar() == 2 and is_lazy(y)
    y.wait_to_read()
    assert type(y) is nd.NDArray
    y[:] = 5
    assert y.asscalar() == 5


# ---- batching --------------------------------------------------------------------------------


def test_equal_calls_of_many_samples_are_one_launch():
    with gdb.batching() as scope:
        out = [nd.tanh(x * 2) for x in rows(50)]
    assert (scope.stats.calls, scope.stats.launches, scope.stats.joined) == (100, 1, 1)
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
    assert len(kept[0].owner.calls.flushed.heads.values) == 4
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
    assert not scope.stats.fallbacks


def test_mxnets_own_error_for_wrong_shapes():
    with gdb.batching(), pytest.raises(mx.base.MXNetError):
        (nd.ones((2, 3)) + nd.ones((4, 5))).wait_to_read()


# ---- operators that were met before ----------------------------------------------------------


def test_an_operator_goes_the_short_way_the_second_time(variant, monkeypatch):
    asked = []
    original = recorder.Recorder.on_operator
    monkeypatch.setattr(recorder.Recorder, "on_operator", lambda self, name, *rest: asked.append(name) or original(
        self, name, *rest))
    x, w = nd.array([[1.0, 2.0]]), nd.array([[1.0, 0.5], [2.0, 1.0]])
    with gdb.batching(granularity="op"):
        made = [nd.FullyConnected(nd.tanh(x), w, no_bias=True, num_hidden=2) for _ in range(3)]
        made.append(nd.FullyConnected(nd.tanh(x), w, no_bias=True, num_hidden=2, flatten=False))
    times = 2 if variant == "compiled" else 4
    assert asked.count("FullyConnected") == times and asked.count("tanh") == (1 if variant == "compiled" else 4)
    want = nd.dot(nd.tanh(x), w, transpose_b=True).asnumpy()
    for y in made:
        np.testing.assert_allclose(y.asnumpy(), want, rtol=1e-6)


def test_arrays_of_numpy_are_refused_by_legacy_operators_as_ever():
    legacy, of_numpy = nd.ones((2,)), mx.np.ones((2,))
    for arrays in ([of_numpy], [legacy, of_numpy]):
        with pytest.raises(TypeError) as outside:
            nd.add_n(*arrays)
        with gdb.batching(), pytest.raises(TypeError) as inside:
            nd.add_n(*arrays)
        assert str(inside.value) == str(outside.value)
