"""Corners of Gluon inside a scope."""

import dataclasses

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn = mx.nd, gluon.nn


def dense():
    net = nn.Dense(2, in_units=3)
    net.initialize()
    return net


def vectors(count=4):
    rng = np.random.RandomState(0)
    return [nd.array(rng.normal(size=(1, 3))) for _ in range(count)]


# ---- leaves ----------------------------------------------------------------------------------

NAMES = {
    "expand_dims 0": lambda x: x.expand_dims(0),
    "expand_dims 1": lambda x: x.expand_dims(1),
    "squeeze": lambda x: nd.squeeze(x.expand_dims(0), axis=0),
    "Flatten": lambda x: nd.Flatten(x),
    "reshape": lambda x: nd.reshape(x, (3, 2)),
    "slice": lambda x: nd.slice(x, begin=(0, 0), end=(1, 3)),
    "slice_axis": lambda x: nd.slice_axis(x, axis=0, begin=1, end=2),
    "identity": lambda x: nd.identity(x),
}


@pytest.mark.parametrize("shared", [False, True], ids=["own leaves", "one leaf"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_only_names_rows_of_a_leaf(name, shared):
    """Nothing runs for such a call; its operand is an array from outside, which nobody else may have asked for."""
    arrays = [nd.array(np.arange(6).reshape(2, 3) + 100 * k) for k in range(3)]
    arrays = arrays[:1] * 3 if shared else arrays
    for read in (lambda y: y, lambda y: nd.square(y)):          # held as it is; read by a launch
        grads = []
        for batched in (False, True):
            for x in arrays:
                x.attach_grad()
            with autograd.record():
                if batched:
                    with gdb.batching():
                        out = [read(NAMES[name](x)) for x in arrays]
                else:
                    out = [read(NAMES[name](x)) for x in arrays]
            autograd.backward(out)
            grads.append([y.asnumpy() for y in out] + [x.grad.asnumpy() for x in arrays])
        for got, want in zip(*grads[::-1]):
            np.testing.assert_array_equal(got, want)


def test_attach_grad_on_a_value_of_the_scope():
    """A value that is made a variable gets a gradient, and nothing flows beyond it."""
    net, other = nn.Dense(3, in_units=3), nn.Dense(3, in_units=3)
    net.initialize()
    other.initialize()
    found = []
    for batched in (False, True):
        def run():
            weight = other(nd.ones((3, 3)))
            weight.attach_grad()
            return weight, [nd.dot(net(x), weight).sum() for x in vectors()]

        with autograd.record():
            if batched:
                with gdb.batching():
                    weight, losses = run()
            else:
                weight, losses = run()
        autograd.backward(losses)
        found.append([weight.grad.asnumpy(), net.weight.grad().asnumpy()])
        assert (other.weight.grad().asnumpy() == 0).all()
    for got, want in zip(*found[::-1]):
        np.testing.assert_allclose(got, want, rtol=1e-5)


# ---- what a signature depends on -------------------------------------------------------------


def test_a_net_that_is_cast_after_a_run():
    net = nn.HybridSequential()
    net.add(nn.Embedding(5, 3), nn.Dense(2))
    net.initialize()
    gdb.vertex(net)
    for dtype in ("float32", "float64"):
        net.cast(dtype)
        with autograd.record(), gdb.batching():
            outs = [net(word) for word in (1, 2, 3)]
        autograd.backward(outs)
        for word, out in zip((1, 2, 3), outs):
            assert out.dtype == np.dtype(dtype).type
            np.testing.assert_allclose(out.asnumpy(), net(nd.array([word])).asnumpy(), rtol=1e-5)


def test_parameters_that_are_replaced_while_calls_wait():
    net = dense()
    net.hybridize()
    x = vectors()[0]
    want = net(x).asnumpy()
    with gdb.batching():
        before = net(x)
        net.initialize(mx.init.Zero(), force_reinit=True)
        after = net(x)
    np.testing.assert_allclose(before.asnumpy(), want, rtol=1e-5)
    assert (after.asnumpy() == 0).all()


def test_methods_of_objects_that_compare_equal():
    @dataclasses.dataclass(frozen=True)
    class Cell:
        size: int
        scale: float = dataclasses.field(compare=False)

        @gdb.vertex
        def node(self, F, x):
            return x * self.scale

    cells = [Cell(1, 2.0), Cell(1, 3.0)]
    with gdb.batching():
        outs = [cell.node(nd, nd.ones((1, 2))) for cell in cells]
    assert [float(out[0, 0].asscalar()) for out in outs] == [2.0, 3.0]


def test_methods_of_objects_without_a_hash():
    @dataclasses.dataclass
    class Cell:
        scale: float

        @gdb.vertex
        def node(self, F, x):
            return x * self.scale

    with gdb.batching():
        outs = [Cell(scale).node(nd, nd.ones((1, 2))) for scale in (2.0, 3.0)]
    assert [float(out[0, 0].asscalar()) for out in outs] == [2.0, 3.0]


# ---- around the scope ------------------------------------------------------------------------


def test_two_devices_in_one_scope():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = nn.Dense(2, in_units=3)
    net.initialize(ctx=devices)
    xs = [x.as_in_context(devices[k % 2]) for k, x in enumerate(vectors())]
    found = []
    for batched in (False, True):
        with autograd.record():
            if batched:
                with gdb.batching():
                    losses = [net(x).sum() for x in xs]
            else:
                losses = [net(x).sum() for x in xs]
        autograd.backward(losses)
        assert [loss.context for loss in losses] == [x.context for x in xs]
        found.append([a.asnumpy() for a in losses + net.weight.list_grad()])
    for got, want in zip(*found):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_parameters_that_the_losses_do_not_need_stay_stale():
    """Trainer.step(ignore_stale_grad=True) leaves such parameters alone; weight decay would change them."""
    used, unused = dense(), dense()
    before = unused.weight.data().asnumpy()
    params = [*used.collect_params().values(), *unused.collect_params().values()]
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1, "wd": 0.1})
    with autograd.record(), gdb.batching():
        losses = [used(x).sum() for x in vectors()]
        extra = [unused(x).sum() for x in vectors()]
    autograd.backward(losses)
    trainer.step(4, ignore_stale_grad=True)
    np.testing.assert_array_equal(unused.weight.data().asnumpy(), before)
    assert len(extra) == 4


class Places(gluon.HybridBlock):
    """Makes an array from nothing, on whatever device is current, and takes arguments of several kinds."""

    def hybrid_forward(self, F, x, *others):
        self.made = F.zeros((1, 3))
        return F.broadcast_add(x * others[0] if others else x, self.made)


def test_code_of_a_block_on_a_device_that_is_not_current():
    block, x = Places(), vectors(1)[0]
    with mx.cpu(1), gdb.batching():
        y = block((x * 2), 3)
    assert block.made.context == y.context == mx.cpu(0)
    np.testing.assert_allclose(y.asnumpy(), 6 * x.asnumpy(), rtol=1e-6)


def test_parameters_that_get_their_shapes_inside_a_scope():
    net, rows = nn.Dense(2), vectors()
    net.initialize()
    with gdb.batching(granularity="op") as scope:
        found = [net(x * 1) for x in rows]
    for x, y in zip(rows, found):
        np.testing.assert_allclose(y.asnumpy(), net(x).asnumpy(), rtol=1e-5)
    assert net.weight.shape == (2, 3) and not scope.stats.fallbacks


def test_hooks_of_a_block_are_called_once_for_every_call():
    net, seen = dense(), []
    net.register_forward_pre_hook(lambda block, args: seen.append("before"))
    net.register_forward_hook(lambda block, args, out: seen.append(out.shape))
    with gdb.batching(granularity="op"):
        for x in vectors(2):
            net(x * 1)
    assert seen == ["before", (1, 2)] * 2


def test_arrays_and_symbols_in_one_call_are_refused_as_ever():
    with gdb.batching(), pytest.raises(ValueError, match="mixed NDArrays and Symbols"):
        Places()(vectors(1)[0] * 2, mx.sym.var("y"))


@pytest.mark.parametrize("key", [slice(1, 3), slice(None, 2), slice(2, None), slice(-2, None), slice(0, 4),
                                 slice(0, None, 2), slice(1, 100), 2, (slice(1, 2), slice(0, 2))], ids=str)
def test_rows_of_an_array(key):
    x = nd.array(np.arange(12.0).reshape(4, 3))
    with gdb.batching():
        part = (x * 2)[key]
        again = part + 1
    np.testing.assert_allclose(part.asnumpy(), 2 * x[key].asnumpy())
    assert again.shape == x[key].shape


def test_rows_of_an_array_that_are_none():
    with gdb.batching():
        y = vectors(1)[0] * 2
        assert y[1:1].shape == (0, 3)


def test_a_symbol_block_runs_alone():
    data = mx.sym.var("data", dtype="float32")
    net = gluon.SymbolBlock(mx.sym.FullyConnected(data, num_hidden=2, name="fc"), data)
    net.initialize()
    want = [net(x).asnumpy() for x in vectors()]
    with autograd.record(), gdb.batching() as scope:
        outs = [net(nd.identity(x)) for x in vectors()]
    autograd.backward(outs)
    for got, value in zip(outs, want):
        np.testing.assert_allclose(got.asnumpy(), value, rtol=1e-5)
    assert any("SymbolBlock" in reason for reason in scope.stats.fallbacks)


def test_a_value_that_no_parameter_reaches_gets_no_tape():
    """Losses of data alone have no gradient, in the loop as in a scope."""
    with autograd.record(), gdb.batching():
        out = nd.tanh(vectors()[0]).sum()
    with pytest.raises(mx.base.MXNetError, match="computational graph"):
        out.backward()


# ---- running statistics ----------------------------------------------------------------------


def norm(**options):
    net = nn.BatchNorm(in_channels=3, momentum=0.5, prefix="norm_", **options)
    net.initialize()
    net.running_mean.set_data(nd.array([1.0, -1.0, 0.5]))
    net.running_var.set_data(nd.array([2.0, 0.5, 1.0]))
    return net


@pytest.mark.parametrize("wrap", [lambda net: net, gdb.vertex], ids=["operator", "vertex"])
def test_batch_norm_that_predicts_is_batched(wrap):
    want = [norm()(x).asnumpy() for x in vectors()]
    net = wrap(norm())
    with gdb.batching() as scope:
        got = [net(x) for x in vectors()]
    assert scope.stats.launches == 1 and not scope.stats.fallbacks
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.asnumpy(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda net: net, gdb.vertex], ids=["operator", "vertex"])
@pytest.mark.parametrize("options, alone", [({}, True), ({"use_global_stats": True}, False)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_on_the_tape(training, options, alone, wrap):
    """MXNet's backward pass takes a batch norm for a trained one, however it ran; not so with global statistics."""
    def work(net):
        xs = vectors()
        for x in xs:
            x.attach_grad()
        with autograd.record(train_mode=training):
            out = [(net(x) ** 2).sum() for x in xs]
        autograd.backward(out)
        return [y.asnumpy() for y in out] + [x.grad.asnumpy() for x in xs] + [
            p.data().asnumpy() if p.grad_req == "null" else p.grad().asnumpy() for p in net.collect_params().values()]

    want = work(norm(**options))
    net = wrap(norm(**options))
    with gdb.batching() as scope:
        got = work(net)
    assert any("couple the samples" in reason for reason in scope.stats.fallbacks) == alone
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [lambda net: net, gdb.vertex], ids=["operator", "vertex"])
def test_running_statistics_are_read_before_they_are_updated(wrap):
    """In one scope a batch norm predicts, trains, predicts, is updated by the backward pass, and predicts again."""
    def work(net):
        x = nd.array(np.arange(12).reshape(4, 3))
        before = net(x)
        with autograd.record():
            trained = net(x)
        between = net(x)
        trained.backward()
        after = net(x)
        return [y.asnumpy() for y in (before, trained, between, after)] + [net.running_mean.data().asnumpy()]

    want = work(norm())
    with gdb.batching() as scope:
        got = work(wrap(norm()))
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
    reasons = list(scope.stats.fallbacks)
    assert any("couple the samples" in reason for reason in reasons)
    assert any("is updated by backward passes" in reason for reason in reasons)


def test_a_trained_batch_norm_on_outside_arrays_flushes_nothing():
    net, other = norm(), dense()
    with autograd.record(), gdb.batching() as scope:
        out = [other(net(x)) for x in vectors()]
    assert len(out) == 4 and scope.stats.flushes == 1


# ---- operators that run alone ----------------------------------------------------------------

@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("read", [False, True], ids=["pending", "had its value"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_max_pooling_of_values_of_the_scope_has_the_gradient_of_the_loop(axes, read, backend):
    """Values of a scope are parts of buffers, of which MXNet's own max pooling has wrong gradients."""
    rng, sides = np.random.RandomState(0), (2, 8, 4, 4)[:axes + 1]
    xs = [nd.array(rng.permutation(np.prod(sides)).reshape(1, *sides)) for _ in range(4)]
    net = gluon.nn.HybridSequential()
    net.add(nn.HybridLambda("relu"), (nn.MaxPool1D, nn.MaxPool2D, nn.MaxPool3D)[axes - 1](2))

    def gradients():
        with autograd.record():
            losses = []
            for k, x in enumerate(xs):
                h = x * 0.5
                if read:
                    h.wait_to_read()
                y = net(h)
                losses.append((y * nd.arange(y.size).reshape(y.shape)).sum() * (k + 1))
            autograd.backward(losses)
        return [x.grad.asnumpy() for x in xs]

    for x in xs:
        x.attach_grad()
    want = [pooled_gradient(x.asnumpy(), axes) * 0.5 * (k + 1) for k, x in enumerate(xs)]
    for hybrid in (False, True):
        net.hybridize(hybrid)
        with gdb.batching(backend=backend):
            got = gradients()
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, rtol=1e-5)


def pooled_gradient(x, axes):
    """Where the largest of each window of two is: the number of the window."""
    found, count = np.zeros_like(x), 0
    for window in np.ndindex(x.shape[:2] + tuple(n // 2 for n in x.shape[2:])):
        part = window[:2] + tuple(slice(2 * k, 2 * k + 2) for k in window[2:])
        found[part] = (x[part] == x[part].max()) * count
        count += 1
    return found


# ---- arrays from nothing ---------------------------------------------------------------------

@pytest.mark.parametrize("make", [
    lambda: nd.zeros((2, 3)), lambda: nd.zeros((2, 3), dtype="float64"), lambda: nd.zeros(4, dtype="int32"),
    lambda: nd.zeros((1, 2), ctx=mx.cpu(1)), lambda: nd.zeros((100, 100)), lambda: nd.ones((2, 3)),
    lambda: gluon.rnn.LSTMCell(4, input_size=3).begin_state(batch_size=1)[0]], ids=list("abcdefg"))
def test_arrays_from_nothing_are_as_ever(make):
    want = make()
    with gdb.batching():
        got = [make() for _ in range(3)]
        got[0][:] = 7                       # memory of its own
        got[1] += 1
    for k, array in enumerate(got):
        assert type(array) is nd.NDArray and array.shape == want.shape and array.context == want.context
        np.testing.assert_array_equal(array.asnumpy(), [7, want.asnumpy() + 1, want.asnumpy()][k])
        assert array.dtype == want.dtype


def test_an_rnn_cell_reaches_its_code_as_ever():
    """Its forward is its own and goes on to that of all hybrid blocks."""
    cell, rows = gluon.rnn.LSTMCell(4, input_size=3, prefix="lstm_"), vectors(5)
    cell.initialize(mx.init.Normal(0.5))

    def outputs():
        found = []
        for n in (5, 2):
            states = cell.begin_state(batch_size=1)
            for x in rows[:n]:
                out, states = cell(x, states)
            found.append(out)
        return found

    want, counted = [x.asnumpy() for x in outputs()], cell._counter
    with gdb.batching(granularity="op") as scope:
        got = outputs()
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.asnumpy(), y, rtol=1e-5)
    assert not scope.stats.fallbacks
    assert cell._counter == counted + 7         # its own forward counts calls
