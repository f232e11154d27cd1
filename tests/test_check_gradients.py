"""check=True compares gradients and their freshness too, and names the call."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from cavs_core.ops import TABLE

nd, nn = mx.nd, gluon.nn
XS = [np.array([[0.5, -1.0, k]], "float32") for k in range(4)]


def train(dense, behind=False, part=False, **options):
    """A backward pass over a few samples: from the losses, or from arithmetic behind the scope; or only from some."""
    xs = [nd.array(x) for x in XS]
    for x in xs:
        x.attach_grad()
    with autograd.record():
        with gdb.batching(check=True, **options):
            losses, held = [], []
            for x in xs:
                h = nd.tanh(dense(x))
                held.append(nd.sqrt(nd.relu(h)))
                losses.append((nd.log_softmax(h) * h.detach())[0, 1] + 0 * nd.floor(x).sum())
        heads = losses[:2] if part else losses
        heads = nd.add_n(*heads) if behind else heads
    autograd.backward(heads)
    return xs


@pytest.fixture
def dense():
    net = nn.Dense(2, in_units=3)
    net.initialize(mx.init.Uniform(0.5))
    return net


@pytest.mark.parametrize("backend", ["native", "mxnet"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("granularity", ["op", "vertex"])
def test_passes_that_are_right_pass(dense, granularity, part, behind, backend):
    dense.hybridize()
    xs = train(dense, behind, part, granularity=granularity, backend=backend)
    assert [bool(x._fresh_grad) for x in xs] == [True, True, not part, not part]
    assert all(p.data()._fresh_grad for p in dense.collect_params().values())


@pytest.mark.parametrize("behind", [False, True])
def test_a_wrong_gradient_is_named_with_its_call(dense, behind, monkeypatch):
    right = TABLE["log_softmax_plain"].grad
    monkeypatch.setattr(TABLE["log_softmax_plain"], "grad", lambda b, a, xs, ys, dys: [
        b.scale(right(b, a, xs, ys, dys)[0], 1.1)])

    @gdb.vertex
    def fresh_vertex(F, h):             # (traced anew, with the wrong rule)
        return F.log_softmax(h)

    x = nd.array(XS[0])
    x.attach_grad()
    with autograd.record():
        with gdb.batching(check=True, backend="mxnet"):
            loss = fresh_vertex(mx.nd, nd.tanh(x))[0, 1]
        loss = loss * 2 if behind else loss
    with pytest.raises(gdb.BatchingMismatchError, match="gradient of .* differs .*read by call 1 .*fresh_vertex"):
        loss.backward()


def test_a_wrong_freshness_is_named(monkeypatch):
    monkeypatch.setattr(type(TABLE["_detach"]), "leaves_tape", False)

    @gdb.vertex
    def fresh_vertex(F, x):
        return F.tanh(x.detach())

    x, y = nd.array(XS[0]), nd.array(XS[1])
    for z in (x, y):
        z.attach_grad()
    with autograd.record(), gdb.batching(check=True, backend="mxnet"):
        loss = (fresh_vertex(mx.nd, x) * y).sum()
    with pytest.raises(gdb.BatchingMismatchError, match="touches outside array .*fresh"):
        loss.backward()


def test_gradients_and_freshness_of_parameters_are_as_before_the_check(dense):
    """The check runs blocks by themselves, on the tape: it leaves no trace in their gradients."""
    for p in dense.collect_params().values():
        p.data().grad[:] = 7
    other = nn.Dense(2, in_units=3, prefix="other_")
    other.initialize()
    other.hybridize()
    with autograd.record(), gdb.batching(check=True, backend="mxnet"):
        held = other(nd.array(XS[0]))
        loss = dense(nd.array(XS[0])).sum()
    loss.backward()
    assert held.shape == (1, 2)
    assert [bool(p.data()._fresh_grad) for p in other.collect_params().values()] == [False, False]
    np.testing.assert_allclose(dense.bias.grad().asnumpy(), [1, 1])
