"""Blocks that change after they were traced: what makes MXNet run other code makes us trace anew, and nothing else."""

import functools
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core import trace as trace_function
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import signature

nn = gluon.nn


class Net(gluon.HybridBlock):
    scale = 1

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.shifts, self.seen = [0.5], 0
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(4, in_units=3, activation="tanh"), nn.Dropout(0.5))
            self.out = nn.Dense(2, in_units=4)

    def hybrid_forward(self, F, x):
        self.seen += 1
        return self.out(self.body(x)) * self.scale + sum(self.shifts)


def new_dense(units):
    made = nn.Dense(units, in_units=4)
    made.initialize(mx.init.One())
    return made


def make_net(hybridized, marked):
    mx.random.seed(3)
    net = Net(prefix="net_")
    net.initialize(mx.init.Normal(1))
    if marked:
        gdb.vertex(net)
    if hybridized:
        net.hybridize()
    return net


def set_all(net, *, hybridize=None, **attributes):
    for name, value in attributes.items():
        setattr(net, name, value)
    if hybridize is not None:
        net.hybridize(**hybridize)


CHANGES = {
    "another layer": lambda net: set_all(net, out=new_dense(5)),
    "another layer of the same shape": lambda net: set_all(net, out=new_dense(2)),
    "one more layer, deep inside": lambda net: net.body.add(new_dense(4)),
    "one more layer, then hybridize": lambda net: (net.body.add(new_dense(4)), net.hybridize()),
    "an attribute": lambda net: set_all(net, scale=3),
    "an attribute, then hybridize": lambda net: set_all(net, scale=3, hybridize={}),
    "an attribute, then hybridize without clearing": lambda net: set_all(net, scale=3, hybridize={"clear": False}),
    "an attribute, not hybridized any more": lambda net: set_all(net, scale=3, hybridize={"active": False}),
    "the same, without clearing": lambda net: set_all(net, scale=3, hybridize={"active": False, "clear": False}),
    "an attribute of a child": lambda net: set_all(net.body[0], act=nn.Activation("relu")),
    "a list that grows": lambda net: (net.shifts.append(0.25), set_all(net, shifts=net.shifts[:])),
    "cast there and back": lambda net: (net.cast("float64"), net.cast("float32")),
    "reset_ctx": lambda net: net.collect_params().reset_ctx(mx.current_context()),
    "new values": lambda net: net.initialize(mx.init.One(), force_reinit=True),
}
kinds_of_nets = pytest.mark.parametrize("hybridized, marked", [(True, False), (False, True), (True, True)])


def check_change(change, hybridized, marked, in_scope, ctx, **options):
    x = mx.nd.array([[1.0, -2.0, 3.0]], ctx=ctx)
    plain, net = make_net(hybridized, marked), make_net(hybridized, marked)
    expected = [plain(x)]
    change(plain)
    expected.append(plain(x))
    with gdb.batching(**options):
        made = [net(x), net(x)]
        if in_scope:
            change(net)
            made += [net(x), net(x)]
    if not in_scope:
        change(net)
        with gdb.batching(**options):
            made += [net(x), net(x)]
    for got, want in zip(made, (expected[0], expected[0], expected[1], expected[1])):
        assert got.shape == want.shape
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_scope", [False, True])
@kinds_of_nets
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_is_as_in_the_loop(change, hybridized, marked, in_scope, ctx, variant):
    check_change(CHANGES[change], hybridized, marked, in_scope, ctx)


@pytest.mark.parametrize("change", ["another layer", "one more layer, deep inside", "an attribute, then hybridize"])
def test_a_changed_block_on_the_native_backend(change, ctx):
    if ctx.device_type != "cpu":
        pytest.skip("the native backend runs on the CPU")
    check_change(CHANGES[change], True, False, False, ctx, backend="native")


STEPS = st.lists(st.sampled_from([*CHANGES, "call", "scope"]), min_size=2, max_size=8)


@given(steps=STEPS, hybridized=st.booleans(), marked=st.booleans())
def test_any_order_of_changes_and_calls(steps, hybridized, marked):
    """Also gradients: those of the layers that are there, and of no others."""
    nets = [make_net(hybridized, marked) for _ in range(2)]
    x = mx.nd.array([[1.0, -2.0, 3.0]])
    results = []
    for net, batching in zip(nets, (False, True)):
        made, scope = [], gdb.batching() if batching else None
        if scope:
            scope.__enter__()
        for step in [*steps, "call"]:
            if step == "scope" and scope:
                scope.__exit__(None, None, None)
                scope = gdb.batching()
                scope.__enter__()
            elif step == "call":
                with autograd.record(train_mode=False):
                    made.append(net(x).sum())
            elif step != "scope":
                CHANGES[step](net)
        if scope:
            scope.__exit__(None, None, None)
        made[-1].backward()
        grads = [p.grad().asnumpy() for p in net.collect_params().values()]
        results.append(([y.asnumpy() for y in made], grads))
    for made, expected in zip(results[1], results[0]):
        for got, want in zip(made, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_child_of_a_hybridized_net_stays_in_its_graph(ctx):
    """MXNet clears the graph of the block that changed, and not that of the net that it is in."""
    x = mx.nd.ones((1, 3), ctx=ctx)
    plain, net = make_net(True, False), make_net(True, False)
    before = plain(x).asnumpy()
    with gdb.batching():
        net(x)
    for each in (plain, net):
        each.body.add(new_dense(4))
    np.testing.assert_array_equal(plain(x).asnumpy(), before)
    with gdb.batching():
        whole, part = net(x), net.body(x)
    np.testing.assert_allclose(whole.asnumpy(), before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(part.asnumpy(), plain.body(x).asnumpy(), rtol=1e-5, atol=1e-6)


# ---- what is no change -------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """The titles of what is traced."""
    found = []

    def counting(fn, *args, **kwargs):
        found.append(kwargs["name"])
        return trace_function(fn, *args, **kwargs)

    monkeypatch.setattr(signature, "trace", counting)
    return found


def test_counters_ask_for_no_new_trace(traces, ctx):
    """What the code itself changes, what it never reads, and values that are set again as they were."""
    net, cell = make_net(False, True), gluon.rnn.LSTMCell(4, input_size=4)
    cell.initialize()
    gdb.vertex(cell)
    x, rows = mx.nd.ones((1, 3), ctx=ctx), mx.nd.ones((1, 2, 4), ctx=ctx)
    for _ in range(3):
        with gdb.batching() as scope:
            for k in range(3):
                net.seen, net.scale, net.unread = 100 * k, float("2.5"), object()
                net(x)
                cell.unroll(2, rows)
                cell.begin_state(1)
        assert scope.stats.flushes == 1
    assert len(traces) == 2


def test_a_watched_block_dies(ctx):
    """Also one that its own attributes know."""
    class Knot(gluon.HybridBlock):
        factor = 2

        def hybrid_forward(self, F, x):
            return x * self.parts[0].factor + self.shift()

    net = gdb.vertex(Knot())
    vars(net).update(parts=[net], shift=functools.partial(getattr, net, "factor"))
    with gdb.batching() as scope:
        net(mx.nd.ones((1, 3), ctx=ctx))
    assert not scope.stats.fallbacks
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


def test_attributes_are_read_as_ever_behind_a_trace(ctx):
    make_net(False, True)(mx.nd.ones((1, 3), ctx=ctx))
    assert "__getattribute__" not in vars(gluon.Block)


# ---- the Cavs face -----------------------------------------------------------------------------


class Cell(cavs.VertexFunction):
    scale = 1

    def __init__(self, **kwargs):
        super().__init__(state_shapes=[(4,)], **kwargs)
        with self.name_scope():
            self.inp = nn.Dense(4, in_units=3)
            self.out = nn.Dense(4, in_units=4)

    def vertex(self, F, v):
        h = F.tanh(self.inp(v.pull("x")) + v.gather_sum()[0])
        v.scatter(h)
        v.push(self.out(h) * self.scale)


@pytest.mark.parametrize("change", [
    lambda cell: set_all(cell, scale=3), lambda cell: set_all(cell, out=new_dense(4)),
    lambda cell: set_all(cell, out=new_dense(5)), lambda cell: set_all(cell.inp, act=nn.Activation("relu"))])
def test_a_changed_vertex_function(change, ctx):
    cell, fresh = Cell(prefix="cell_"), Cell(prefix="cell_")
    tree, x = cavs.InputGraph.from_parents([2, 2, -1]), {"x": np.arange(9, dtype="float32").reshape(3, 3) / 9}
    for each in (cell, fresh):
        mx.random.seed(3)
        each.initialize(mx.init.Normal(1))
    before = cavs.run(cell, [tree], x).pushed.asnumpy()
    for each in (cell, fresh):
        change(each)
    with autograd.record():
        pushed = cavs.run(cell, [tree], x).pushed
    pushed.backward()
    expected = cavs.run(fresh, [tree], x).pushed.asnumpy()
    assert before.shape != expected.shape or abs(before - expected).max() > 0.01
    np.testing.assert_allclose(pushed.asnumpy(), expected, rtol=1e-5, atol=1e-6)
    assert abs(cell.out.weight.grad().asnumpy()).sum() > 0
