"""What does not lead to a head takes no part in a backward pass: call by call, instruction by instruction, row by row.

A gradient of zero in its place would be wrong in two ways: zero times infinity, and operators that take no notice of
the gradient that comes to them. And gradients that a pass does not touch stay as they are, and stale.
"""

import contextlib

import numpy as np
import pytest

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn = mx.nd, gluon.nn
BACKENDS = ("native", "mxnet")
DATA = np.array([[[0.0, 2.0]], [[0.0, 3.0]], [[1.0, 0.0]]], "float32")


def scope_or_none(backend):
    return contextlib.nullcontext() if backend is None else gdb.batching(backend=backend)


def variables(req="write", data=DATA):
    made = [nd.array(x) for x in data]
    for x in made:
        x.attach_grad(req)
        x.grad[:] = 7
    return made


def looks(arrays):
    return [(x.grad.asnumpy(), bool(x._fresh_grad)) for x in arrays]


def assert_same(got, want):
    for (grad, fresh), (wanted, want_fresh) in zip(got, want):
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)
        assert fresh == want_fresh


def check(run, backend):
    """`run(backend)` returns arrays with gradients; None: without a scope."""
    assert_same(looks(run(backend)), looks(run(None)))


# ---- values that the loss does not use ---------------------------------------------------------------------------

def held_root(x):
    y = x * 3
    return nd.sqrt(nd.relu(y)), (y * y).sum()


def held_loss_layer(x):
    return nd.make_loss(x * 5), x.sum()


def held_softmax_output(x):
    return nd.SoftmaxOutput(x * 5, nd.array([1])), x.sum()


def held_behind_a_slice(x):
    y = nd.relu(x)
    return nd.sqrt(y[:, :1] * 1), (y * 2).sum()


def held_behind_held(x):
    y = nd.log(x)
    return nd.MakeLoss(nd.sqrt(y)), nd.log(x + 1).sum()


@gdb.vertex
def two_results(F, x):
    y = F.relu(x)
    return F.sqrt(y), (y * y).sum()


HELD = [held_root, held_loss_layer, held_softmax_output, held_behind_a_slice, held_behind_held,
        lambda x: two_results(mx.nd, x)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", HELD)
def test_a_value_that_the_loss_does_not_use_changes_no_gradient(model, backend):
    def run(backend):
        xs = variables()
        with autograd.record(), scope_or_none(backend):
            made = [model(x) for x in xs]
        autograd.backward([loss for _, loss in made])
        return xs

    check(run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("req", ["write", "add"])
def test_a_row_that_takes_no_part_in_a_launch_with_rows_that_do(req, behind, backend):
    """Of three calls of one launch one leads to the loss, and the others would send infinities."""
    def run(backend):
        xs, weight = variables(req), nd.array([[1.0, 2.0]])
        weight.attach_grad(req)
        with autograd.record():
            with scope_or_none(backend):
                roots = [nd.sqrt(nd.relu(x) * weight) for x in xs]
                losses = [(x * x).sum() + 0 * k for k, x in enumerate(xs)]
                losses[1] = losses[1] + roots[1][:, 1:].sum()
            total = losses[0] + losses[1] if behind else None
        autograd.backward(total if behind else losses[:2])
        return [*xs, weight]

    check(run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_result_of_a_vertex_of_two(backend):
    """Other samples use the other result: the same launch, instructions that take part here and not there."""
    def run(backend):
        xs = variables()
        with autograd.record(), scope_or_none(backend):
            made = [two_results(mx.nd, x) for x in xs]
            losses = [made[0][1], made[1][0].sum() + made[1][1], made[2][1]]
        autograd.backward(losses)
        return xs

    check(run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_for_each_loss_in_turn(backend):
    """With retain_graph each pass begins anew; what it does not touch keeps what the one before left."""
    def run(backend):
        xs, weight = variables(), nd.array([[1.0, 2.0]])
        weight.attach_grad()
        with autograd.record(), scope_or_none(backend):
            losses = [(nd.log(nd.relu(x) + weight) * x).sum() for x in xs]
        for loss in losses:
            loss.backward(retain_graph=True)
        losses[0].backward()
        return [*xs, weight]

    check(run, backend)


# ---- touched or not ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", ["detach", "BlockGrad", "pause", "floor", "index"])
@pytest.mark.parametrize("marked", [False, True])
def test_what_lies_behind_a_cut(cut, marked, backend):
    """`detach` and `pause` leave the tape: stale. BlockGrad and others do not: zeros, which are fresh."""
    def cut_off(F, h):
        if cut == "pause":
            with autograd.pause():
                return h * 2
        return {"detach": lambda: h.detach(), "BlockGrad": lambda: F.BlockGrad(h), "floor": lambda: F.floor(h),
                "index": lambda: F.one_hot(h, depth=3)}[cut]()

    if marked and cut != "pause":
        cut_off = gdb.vertex(cut_off)

    def run(backend):
        lower, upper = (nn.Dense(2, in_units=2, prefix=name) for name in ("lower_", "upper_"))
        mx.random.seed(3)
        for net in (lower, upper):
            net.initialize(mx.init.Uniform(0.4), force_reinit=True)
        trainer = gluon.Trainer([*lower.collect_params().values(), *upper.collect_params().values()], "sgd",
                                {"learning_rate": 0.1, "wd": 0.5})
        with autograd.record(), scope_or_none(backend):
            losses = [upper(cut_off(mx.nd, lower(nd.array(x))).reshape((-1, 2))).sum() for x in DATA]
        autograd.backward(losses)
        trainer.step(1, ignore_stale_grad=True)     # decays weights, but not stale ones
        data = [p.data() for net in (lower, upper) for p in net.collect_params().values()]
        return data, [x.asnumpy() for x in data]

    (got, got_data), (want, want_data) = run(backend), run(None)
    for x, y in zip(got_data, want_data):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert_same(looks(got), looks(want))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_shape_of_an_operand_is_touched(backend):
    """Operands whose values do not matter get zeros on MXNet's tape."""
    def run(backend):
        xs = variables()
        with autograd.record(), scope_or_none(backend):
            ones = nd.ones((2, 1))
            losses = [nd.reshape_like(ones, xs[0]).sum() + nd.broadcast_like(nd.ones((1, 1)), xs[1]).sum(),
                      nd.slice_like(nd.ones((3, 4)), xs[2]).sum()]
        autograd.backward(losses)
        return xs

    def run_used(backend):
        xs = variables()
        with autograd.record(), scope_or_none(backend):
            losses = [(nd.reshape_like(x * 2, y.reshape((2,))) * 3).sum() for x, y in zip(xs, xs[1:])]
        autograd.backward(losses[:1])
        return xs

    check(run_used, backend)
    assert all(fresh for _, fresh in looks(run(None)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", ["sum", "list", "products"])
@pytest.mark.parametrize("flushed", [False, True])
def test_gradients_of_samples_that_a_pass_behind_the_scope_does_not_come_through(flushed, head, backend):
    def run(backend):
        xs, weights = variables(), variables()
        with autograd.record():
            with scope_or_none(backend):
                losses = []
                for x, w in zip(xs, weights):
                    losses.append((x * w).sum())
                    if flushed:
                        losses[-1].asnumpy()
            heads = {"sum": lambda: losses[0] + losses[2], "list": lambda: [losses[0] * 2, losses[2] * 3],
                     "products": lambda: (losses[0] * losses[0]) * 2}[head]()
        autograd.backward(heads)
        return [*xs, *weights]

    check(run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_scopes_in_a_row(backend):
    """The second one reads results of the first; a pass comes to some of them only."""
    def run(backend):
        xs, weights = variables(), variables()
        with autograd.record():
            with scope_or_none(backend):
                hidden = [nd.tanh(x * w) for x, w in zip(xs, weights)]
            [h.wait_to_read() for h in hidden]
            with scope_or_none(backend):
                losses = [(h * h).sum() for h in hidden]
            total = losses[0] * 2 + losses[1]
        total.backward()
        return [*xs, *weights]

    check(run, backend)


# ---- the Cavs face -----------------------------------------------------------------------------------------------

class TwoPushes(cavs.VertexFunction):
    """Its second state would send infinities from a root, where nobody reads it."""

    def __init__(self, **kwargs):
        super().__init__(state_shapes=[(2,), (2,)], **kwargs)
        with self.name_scope():
            self.first = nn.Dense(2, in_units=2, use_bias=False)
            self.second = nn.Dense(2, in_units=2, use_bias=False)

    def vertex(self, F, v):
        h, c = v.gather_sum()
        h = F.tanh(self.first(v.pull("x")) + h + c)
        v.scatter(h, F.sqrt(F.relu(v.pull("x"))))
        v.push(h)
        v.push(self.second(h))


def loop_of(cell, graphs, xs):
    """The same, vertex by vertex; pushed values sample after sample."""
    pushed, first = [], 0
    for graph in graphs:
        states = {}
        for v in range(graph.num_vertices):         # (children come before their parents here)
            x = xs[first + v]
            below = [states[child] for child in graph.children_of(v)]
            h, c = (nd.add_n(*[s[k] for s in below]) if below else nd.zeros((1, 2)) for k in range(2))
            h = nd.tanh(cell.first(x) + h + c)
            states[v] = h, nd.sqrt(nd.relu(x))
            pushed.append((h, cell.second(h)))
        first += graph.num_vertices
    return pushed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("wants_input", [False, True])
def test_states_of_roots_and_pushed_values_that_the_pass_does_not_begin_at(wants_input, behind, which, backend):
    graphs = [cavs.InputGraph.from_parents(p) for p in ([1, -1], [2, 2, -1], [-1])]
    rows = np.array([[1, 2], [0, 3], [2, 1], [1, 1], [0, 0], [3, 0]], "float32")

    def run(backend):
        mx.random.seed(1)
        cell = TwoPushes(prefix="cell_")
        cell.initialize(mx.init.Uniform(0.5), force_reinit=True)
        params = [p.data() for p in cell.collect_params().values()]
        for data in params:
            data.grad[:] = 7
        if backend is None:
            xs = variables(data=rows[:, None])
            with autograd.record():
                losses = [made[which].sum() for made in loop_of(cell, graphs, xs)]
            autograd.backward(losses)
            return params, np.stack([x.grad.asnumpy()[0] for x in xs])
        x = nd.array(rows)
        if wants_input:
            x.attach_grad()
        with autograd.record():
            out = cavs.run(cell, graphs, {"x": x}, backend=backend)
            loss = (out.pushed[which] * 1).sum() if behind else out.pushed[which]
        loss.backward()
        return params, x.grad.asnumpy() if wants_input else None

    (got, got_input), (want, want_input) = run(backend), run(None)
    assert_same(looks(got), looks(want))
    if wants_input:
        np.testing.assert_allclose(got_input, want_input, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vertices_that_lead_to_nothing_that_is_pushed(backend):
    """Roots that push nothing: nobody reads what they compute, and their rows share a launch with others."""
    class OnlyLeavesPush(cavs.VertexFunction):
        def vertex(self, F, v):
            if v.is_leaf:
                h = F.tanh(v.pull("x"))
                v.push(h)
            else:
                h = F.sqrt(F.relu(v.pull("x"))) + v.gather_sum()[0]
            v.scatter(h)

    graphs = [cavs.InputGraph.from_parents(p) for p in ([1, 2, -1], [1, -1], [-1])]
    x = nd.array([[1.0, 2], [0, 3], [0, 4], [5, 0], [0, 1], [2, 2]])
    x.attach_grad()
    with autograd.record():
        out = cavs.run(OnlyLeavesPush([(2,)]), graphs, {"x": x}, backend=backend)
    out.pushed.backward()
    want = np.where(np.array([1, 0, 0, 1, 0, 1])[:, None], 1 - np.tanh(x.asnumpy()) ** 2, 0)
    np.testing.assert_allclose(x.grad.asnumpy(), want, rtol=1e-5, atol=1e-6)


# ---- gradients that are copies of others -------------------------------------------------------------------------

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((1, 2), (1, 2)), ((1,), (1, 1))])
def test_two_outside_arrays_that_get_the_same_gradient(shapes, backend):
    """The only call of its class: both are shared operands, and the gradient of one is a copy of the other's."""
    def run(backend):
        x, y = variables(data=[np.ones(shape, "float32") for shape in shapes])
        with autograd.record(), scope_or_none(backend):
            total = nd.broadcast_add(x, y.reshape(x.shape))
        total.backward()
        return x, y

    check(run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduce", ["sum", "max", "mean"])
def test_a_leaf_has_no_children_that_a_value_could_be_spread_to(reduce, backend):
    class Spread(cavs.VertexFunction):
        def vertex(self, F, v):
            x = v.pull("x")
            v.scatter(F.tanh(x))
            v.push(getattr(v.spread(x), reduce)() + v.gather_sum()[0])

    x = nd.array([[1.0, 2], [3, 4]])
    x.attach_grad()
    with autograd.record():
        out = cavs.run(Spread([(2,)]), [cavs.InputGraph.from_parents([1, -1])], {"x": x}, backend=backend)
    out.pushed.backward()
    np.testing.assert_allclose(out.pushed.asnumpy(), [[0, 0], np.array([3, 4]) + np.tanh([1, 2])], rtol=1e-5)
    np.testing.assert_allclose(x.grad.asnumpy(), [1 - np.tanh([1, 2]) ** 2, [1, 1]], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_initial_state_that_nobody_reads_is_stale(backend):
    class OnlySecond(cavs.VertexFunction):
        def vertex(self, F, v):
            _, second = v.gather(0)
            v.scatter(second, second * v.pull("x"))
            v.push(second)

    cell = OnlySecond([(2,), (2,)], initial_state="learned", prefix="only_")
    cell.initialize(mx.init.One())
    with autograd.record():
        out = cavs.run(cell, [cavs.InputGraph.chain(3)], {"x": nd.ones((3, 2))}, backend=backend)
    out.pushed.backward()
    assert [bool(p.data()._fresh_grad) for p in cell.initial_states] == [False, True]
    np.testing.assert_allclose(cell.initial_states[1].grad().asnumpy(), [[3, 3]])
