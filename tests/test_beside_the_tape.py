"""The engine works beside the tape: passes inside `record()`, gradients of any storage type, second order."""

import contextlib

import numpy as np
import pytest

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import MXNetError, autograd, gluon, mx

nd, nn = mx.nd, gluon.nn
BACKENDS = ["mxnet", "native"]


@pytest.fixture(params=BACKENDS)
def scope(request):
    return lambda: gdb.batching(backend=request.param)


def both(step, scope):
    """What a step gives in the plain loop and in a scope."""
    want, got = step(contextlib.nullcontext), step(scope)
    assert len(want) == len(got)
    for x, y in zip(want, got):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


def variable(*shape, req="write"):
    x = nd.array(np.arange(np.prod(shape)).reshape(shape) - 3.5)
    x.attach_grad(grad_req=req)
    return x


# ---- parts of parts --------------------------------------------------------------------------

PARTS = {
    "elu": lambda x: nd.LeakyReLU(x, act_type="elu")[:, 1:],
    "take": lambda x: nd.take(x, nd.array([0, 2]))[:, 1:],
    "where": lambda x: nd.where(x > 0, x, x * 2)[:, 1:],
    "pick": lambda x: nd.pick(x, nd.array([0, 1, 2]))[1:],
    "Embedding": lambda x: nd.Embedding(nd.array([0, 2]), x, input_dim=3, output_dim=4)[:, 1:],
    "split": lambda x: nd.split(x, num_outputs=3, axis=0, squeeze_axis=True)[1][2],
    "slice of slice": lambda x: nd.take(x[1:], nd.array([0, 1, 0]))[1:, :2],
    "digamma": lambda x: nd.take(nd.gammaln(x + 4), nd.array([0, 1]))[:, 1:],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_what_operators_make_have_gradients(name, scope):
    def step(scope):
        x = variable(3, 4)
        with autograd.record(), scope():
            loss = (PARTS[name](x) * 2).sum()
        loss.backward()
        return [x.grad.asnumpy()]

    both(step, scope)


class Part(cavs.VertexFunction):
    """Looks rows up and reads parts of them, in one program."""

    def __init__(self, **kwargs):
        super().__init__(state_shapes=[(3,)], **kwargs)
        with self.name_scope():
            self.table = self.params.get("table", shape=(5, 4))

    def vertex(self, F, v):
        (h,) = v.gather_sum()
        x = F.take(self.table.data(), v.pull("word"))[:, 1:]
        h = F.LeakyReLU(x + h, act_type="elu")
        v.scatter(h)
        v.push(F.concat(h[:, 1:], h[:, :1], dim=1))


def test_parts_of_what_operators_make_have_gradients_in_a_vertex_function():
    graphs, words = [cavs.InputGraph.chain(3), cavs.InputGraph.from_parents([2, 2, -1])], np.array([0, 1, 2, 3, 0, 1])
    cell = Part()
    cell.initialize(mx.init.Normal(1.0))
    found = []
    for backend in BACKENDS:
        with autograd.record():
            loss = cavs.run(cell, graphs, {"word": words}, backend=backend).pushed.square().sum()
        loss.backward()
        found.append(cell.table.grad().asnumpy().copy())
    assert np.abs(found[0]).max() > 0
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


# ---- passes inside record() ------------------------------------------------------------------

def by_method(losses, **options):
    for loss in losses:
        loss.backward(**options)


def by_sum(losses, **options):
    sum(losses[1:], losses[0]).backward(**options)


def over_the_tape(losses, **options):
    for loss in losses:
        loss.wait_to_read()
    autograd.backward(losses, **options)


PASSES = {"each": by_method, "all": autograd.backward, "sum": by_sum, "over the tape": over_the_tape}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("req", ["write", "add"])
@pytest.mark.parametrize("name", PASSES)
def test_passes_inside_record_inside_the_scope(name, req, retain, scope):
    def step(scope):
        net = nn.HybridSequential()
        net.add(nn.Dense(3, in_units=4), nn.Dense(2, in_units=3))
        net.collect_params().setattr("grad_req", req)
        if name != "each":      # MXNet's own second pass fails where it meets an array without a gradient again
            net[0].bias.grad_req = "null"
        net.initialize(mx.init.One())
        x, found = variable(3, 4, req=req), []
        with autograd.record():
            with scope():
                for _ in range(2):
                    losses = [nd.tanh(net(x[i:i + 1] * 0.1)).sum() for i in range(3)]
                    PASSES[name](losses, retain_graph=retain)
                    if retain:
                        PASSES[name](losses)
                    found.append(x.grad.asnumpy())
            loss = (net(x) ** 2).sum()          # recording goes on
        loss.backward()
        return [*found, x.grad.asnumpy(), *[p.grad().asnumpy() for p in net.collect_params().values()
                                            if p.grad_req != "null"]]

    both(step, scope)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_nothing_asks_for_is_an_error(name, scope):
    x = variable(3, 4, req="null")
    with pytest.raises(MXNetError), autograd.record(), scope():
        PASSES[name]([(x[i] * 2).sum() for i in range(3)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("req", ["write", "add"])
@pytest.mark.parametrize("name", ["all", "over the tape"])
def test_passes_inside_record_through_a_run(name, req, backend):
    cell = Part()
    cell.initialize(mx.init.Normal(1.0))
    cell.table.grad_req = req
    graphs, words = [cavs.InputGraph.chain(3)], np.array([0, 1, 2])
    found = []
    for steps in (1, 2):
        cell.table.zero_grad()
        with autograd.record():
            for _ in range(steps):
                PASSES[name]([cavs.run(cell, graphs, {"word": words}, backend=backend).pushed])
        found.append(cell.table.grad().asnumpy().copy())
    np.testing.assert_allclose(found[1], found[0] * (2 if req == "add" else 1), rtol=1e-5)


def test_nothing_that_a_run_does_is_recorded_by_the_scope_around_it():
    cell = Part()
    cell.initialize()
    with gdb.batching(backend="mxnet") as scope:
        with autograd.record():
            out = cavs.run(cell, [cavs.InputGraph.chain(3)], {"word": np.array([0, 1, 2])}, backend="mxnet").pushed
        out.backward()
    assert scope.stats.calls == 0 and scope.stats.fallbacks == {}


# ---- gradients of any storage type ------------------------------------------------------------

CSR = np.array([[0, 1, 0], [2, 0, 0]], "float32")
SPARSE = {
    "dot": lambda h: nd.sparse.dot(nd.sparse.csr_matrix(CSR), h),
    "Embedding": lambda h: nd.Embedding(nd.array([0, 2, 0]), h, input_dim=3, output_dim=2, sparse_grad=True),
    "dot, and another reader": lambda h: nd.sparse.dot(nd.sparse.csr_matrix(CSR), h) + h[:2],
    "cast_storage": lambda h: nd.sparse.cast_storage(h, stype="row_sparse").tostype("default"),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_come_to_results_of_a_scope(name, inside, scope):
    def step(scope):
        x = variable(3, 2)
        with autograd.record():
            with scope():
                h, other = x * 2, x * 3
                loss = SPARSE[name](h).sum() + other.sum() if inside else None
            loss = SPARSE[name](h).sum() + other.sum() if loss is None else loss
        loss.backward()
        return [x.grad.asnumpy()]

    both(step, scope)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_gradients_come_to_results_of_a_run(backend):
    cell = Part()
    cell.initialize(mx.init.Normal(1.0))
    graphs, words = [cavs.InputGraph.chain(3)], np.array([0, 1, 2])
    found = []
    for product in (nd.dot, nd.sparse.dot):
        left = nd.array(CSR) if product is nd.dot else nd.sparse.csr_matrix(CSR)
        with autograd.record():
            loss = product(left, cavs.run(cell, graphs, {"word": words}, backend=backend).pushed).sum()
        loss.backward()
        found.append(cell.table.grad().asnumpy().copy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


# ---- second order ----------------------------------------------------------------------------

def gradient_of(y, x, **options):
    return autograd.grad(y, [x], create_graph=True, retain_graph=True, **options)[0]


def behind(x, w, scope):
    with scope():
        y = x * x * w
    return (gradient_of(y, x) ** 2).sum()


def inside(x, w, scope):
    with scope():
        return (gradient_of((x * x * w).sum(), x) ** 2).sum()


def beside_a_parameter(x, w, scope):
    with scope():
        return (gradient_of(x * x * w, x) * w).sum()


def beside_itself(x, w, scope):
    with scope():
        return (gradient_of(x * x * w, x) ** 2).sum() + (x * w).sum()


def head_gradients_on_the_tape(x, w, scope):
    with scope():
        return gradient_of(x * 2, x, head_grads=[x * w]).sum()


def norm(x, w, scope):
    with scope():
        return gradient_of((x * x * w).sum(), x).norm()


@pytest.mark.parametrize("ask", ["backward", "function", "gradient", "of the other one"])
@pytest.mark.parametrize("loss", [behind, inside, beside_a_parameter, beside_itself, head_gradients_on_the_tape, norm])
def test_second_order_is_refused_by_name(loss, ask, scope):
    x, w = variable(2, 3), gluon.Parameter("w", shape=(2, 3))
    w.initialize(mx.init.One())
    with pytest.raises(cavs.DynBatchError, match=r"gdb\.batching.*first order gradients only.*outside of the scope"):
        with autograd.record():
            z = loss(x, w.data(), scope)
        if ask == "backward":
            z.backward()
        elif ask == "function":
            autograd.backward([z])
        else:
            autograd.grad(z, [x if ask == "gradient" else w.data()])


def test_gradients_with_a_graph_can_be_read(scope):
    def step(scope):
        x = variable(2, 3)
        with autograd.record(), scope():
            grad = gradient_of(x * x * x, x)
        return [grad.asnumpy()]

    both(step, scope)


def test_first_order_outside_of_the_scope_is_the_way_out(scope):
    """`log` has a second order in MXNet."""
    def step(scope):
        x = variable(2, 3)
        with autograd.record():
            y = nd.log(x + 5)
            grad = gradient_of(y, x)
            with scope():
                loss = (grad * 3).sum()
        loss.backward()
        return [x.grad.asnumpy()]

    both(step, scope)


def test_a_pass_from_lazy_heads_waits_for_its_callbacks(scope):
    """The node is put on the tape by the pass itself, and must be one of those that it waits for."""
    x = variable(2, 3)
    with autograd.record():
        with scope():
            y = x * x
        (grad,) = autograd.grad(y, [x])
    assert cavs.tape._called == [] and grad.asnumpy().tolist() == (2 * x).asnumpy().tolist()


@pytest.mark.parametrize("scope", [contextlib.nullcontext, gdb.batching])
def test_writing_into_an_array_on_the_tape_is_refused_as_in_the_loop(scope):
    x = nd.ones((1, 2))
    x.attach_grad()
    with autograd.record(), scope():
        y, count = x * 2, nd.zeros((1, 2))
        count += 1                      # not on the tape
        with pytest.raises(MXNetError, match="already in a computational graph"):
            y += 1
            y.wait_to_read()
        loss = (x * count).sum()
    loss.backward()
    np.testing.assert_allclose(x.grad.asnumpy(), [[1, 1]])
