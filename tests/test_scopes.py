"""Scopes: nesting, exceptions, threads, and the states of autograd inside them."""

import gc
import io
import threading

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd


# ---- scopes ----------------------------------------------------------------------------------


def test_nested_scopes_join():
    with gdb.batching() as outer:
        a = nd.array([1.0]) + 1
        with gdb.batching() as inner:
            b = nd.array([2.0]) + 1
        assert inner is outer and type(b) is LazyArray and outer.stats.flushes == 0
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
              gluon.Block.__call__, mx.kvstore.KVStore.pull, mx.ndarray.register._verify_all_legacy_ndarrays)
    with gdb.batching():
        assert mx.ndarray.register._imperative_invoke is not before[0]
    assert before == (mx.ndarray.register._imperative_invoke, autograd.set_recording, nd.NDArray._sync_copyfrom,
                      gluon.Block.__call__, mx.kvstore.KVStore.pull,
                      mx.ndarray.register._verify_all_legacy_ndarrays)


def test_blocks_are_called_as_before_behind_a_scope():
    """Their `__call__` keeps its place in the class: it is its code that a scope exchanges."""
    function, code = vars(gluon.Block)["__call__"], gluon.Block.__call__.__code__
    with gdb.batching():
        assert vars(gluon.Block)["__call__"] is function and function.__code__ is not code
    assert function.__code__ is code
    with pytest.raises(ZeroDivisionError), gdb.batching():
        raise ZeroDivisionError
    assert function.__code__ is code


def test_somebody_else_may_have_hooked_the_calls_of_blocks(monkeypatch):
    called, original = [], gluon.Block.__call__

    def hooked(self, *args):
        called.append(type(self).__name__)
        return original(self, *args)

    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    x = nd.ones((1, 3))
    want = net(x).asnumpy()
    monkeypatch.setattr(gluon.Block, "__call__", hooked)
    for _ in range(2):
        with gdb.batching() as scope:
            ys = [net(x) for _ in range(3)]
        assert gluon.Block.__call__ is hooked and scope.stats.calls
        np.testing.assert_allclose(ys[0].asnumpy(), want, rtol=1e-6)
    assert called == ["Dense"] * 6
    monkeypatch.undo()
    with gdb.batching():
        y = net(x)
    np.testing.assert_allclose(y.asnumpy(), want, rtol=1e-6)
    assert len(called) == 6


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
        assert type(z) is LazyArray
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


def test_layers_of_one_shape_keep_their_weights_apart():
    """Stacking two weights, one for each row, would cost far more than a launch for each layer."""
    layers = [gluon.nn.Dense(3, in_units=3) for _ in range(2)]
    for layer in layers:
        layer.initialize()
    xs = [nd.array([[float(k), 1.0, 2.0]]) for k in range(5)]
    with gdb.batching() as scope:
        out = [layer(x) for x in xs for layer in layers]
    assert scope.stats.launches == 2
    assert all("shared" in launch.operands for launch in scope.flushes[0].launches)
    want = [layer(x) for x in xs for layer in layers]
    for x, y in zip(out, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), rtol=1e-5)


def test_sums_of_many_terms_share_launches_whatever_their_length():
    x = nd.array([[1.0, 2.0]])
    x.attach_grad()
    with autograd.record(), gdb.batching() as scope:
        sums = [nd.add_n(*[x * k for k in range(count)]) for count in (9, 17, 40, 64, 65, 100)]
    autograd.backward(sums)
    want = [sum(range(count)) for count in (9, 17, 40, 64, 65, 100)]
    for got, total in zip(sums, want):
        np.testing.assert_allclose(got.asnumpy(), [[total, 2 * total]], rtol=1e-6)
    np.testing.assert_allclose(x.grad.asnumpy(), [[sum(want)] * 2], rtol=1e-6)
    assert sum(launch.title == "add_n" for launch in scope.flushes[0].launches) < 12


def test_the_device_of_a_recorded_array_is_one_of_its_own_each_time():
    """MXNet notes the device before in the one that is entered: if all arrays gave the same one, it would stay."""
    before = mx.current_context()
    with gdb.batching():
        y = mx.nd.ones((1, 2)) * 2
        with mx.cpu(1):
            with y.context, y.context:
                assert mx.current_context() == y.context
            assert mx.current_context() == mx.cpu(1)
    assert mx.current_context() == before
