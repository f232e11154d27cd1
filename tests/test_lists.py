"""Vertices that take lists: calls with lists of all lengths are one class where their programs allow it."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn
H = 6
pytestmark = pytest.mark.usefixtures("variant")


class Net(gluon.Block):
    """A tree of (word, children); subclasses say what a node does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(20, H)
            self.inp, self.rec, self.gate = nn.Dense(H, in_units=H), nn.Dense(H, in_units=H), nn.Dense(H, in_units=H)

    def forward(self, tree):
        word, children = tree
        return self.node(mx.nd, word, [self(child) for child in children])


class ChildSum(Net):
    """Elements are pairs; with and without children the code differs."""

    @gdb.vertex
    def node(self, F, word, children):
        x = self.embed(word)
        c = F.tanh(self.inp(x))
        if children:
            c = c + self.rec(F.add_n(*[h for h, _ in children]))
        for h, below in children:
            c = c + F.sigmoid(x + self.gate(h)) * below
        return F.tanh(c), c

    def loss(self, tree):
        h, c = self(tree)
        return (h * h).sum() + c.sum()


class Mean(Net):
    """Divides by the number of children: every length is a class of its own."""

    @gdb.vertex
    def node(self, F, word, children):
        x = self.embed(word)
        return F.tanh(self.inp(x) + (self.rec(F.add_n(*children) / len(children)) if children else 0))

    def loss(self, tree):
        return self(tree).sum()


class Odd(Net):
    """The first of three children is special: only that length is told apart."""

    @gdb.vertex
    def node(self, F, word, children):
        x = self.inp(self.embed(word))
        for child in children:
            x = x + self.rec(child)
        return F.tanh(x + children[0] if len(children) == 3 else x)

    def loss(self, tree):
        return self(tree).sum()


def trees(rng, count=12, depth=4):
    def tree(left):
        return int(rng.randint(20)), [tree(left - 1) for _ in range(rng.randint(0, 6) if left else 0)]

    return [tree(depth) for _ in range(count)]


def run(kind, dtype, batched, backend="mxnet", check=False):
    mx.random.seed(1)
    net = kind(prefix="net_")
    net.initialize(mx.init.Normal(0.3))
    net.cast(dtype)
    samples, scope, losses = trees(np.random.RandomState(0)), None, []
    with autograd.record():
        if batched:
            with gdb.batching(backend=backend, check=check) as scope:
                losses = [net.loss(t) for t in samples]
        else:
            losses = [net.loss(t) for t in samples]
    autograd.backward(losses)
    return ([loss.asscalar() for loss in losses],
            {name: p.grad().asnumpy() for name, p in net.collect_params().items()}, scope)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("kind", [ChildSum, Mean, Odd])
def test_same_as_the_loop(kind, backend, dtype):
    want, want_grads, _ = run(kind, dtype, False)
    got, grads, scope = run(kind, dtype, True, backend)
    tolerance = dict(rtol=2e-4, atol=2e-5) if dtype == "float32" else dict(rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got, want, **tolerance)
    for name, grad in want_grads.items():
        np.testing.assert_allclose(grads[name], grad, err_msg=name, **tolerance)
    assert not scope.stats.fallbacks


def node_classes(scope):
    """The different operands of node launches, and launches at depth 1 and above."""
    launches = [x for x in scope.flushes[0].launches if "node" in x.title]
    return {x.operands for x in launches if x.depth}, len([x for x in launches if x.depth])


def test_all_lengths_are_one_class():
    _, _, scope = run(ChildSum, "float32", True)
    operands, launches = node_classes(scope)
    assert operands == {"leaf list list"} and launches == 4         # one launch a level above the leaves


def test_a_length_that_differs_has_a_class_of_its_own():
    _, _, scope = run(Odd, "float32", True)
    operands, launches = node_classes(scope)
    assert operands == {"leaf list", "leaf value value value"} and launches <= 8


def test_lengths_that_all_differ_are_classes_of_their_own():
    _, _, scope = run(Mean, "float32", True)
    assert len(node_classes(scope)[0]) == 5         # one for each number of children from 1 to 5


@pytest.mark.parametrize("kind", [ChildSum, Odd])
def test_check_compares_every_call(kind):
    run(kind, "float32", True, check=True)


def pool_function(title):
    @gdb.vertex(name=title)
    def pool(F, xs, scale):
        return F.add_n(*[F.tanh(x) for x in xs]) * scale

    return pool


def test_the_list_may_be_any_argument_and_a_tuple():
    pool = pool_function("pool")
    xs = [mx.nd.array([[k + 0.5, 1.0]]) for k in range(7)]
    scale = mx.nd.array([[2.0, 3.0]])
    want = [sum(np.tanh(x.asnumpy()) for x in xs[:n]) * scale.asnumpy() for n in range(1, 8)]
    for kind in (list, tuple):
        with gdb.batching() as scope:
            got = [pool(mx.nd, kind(xs[:n]), scale) for n in (2, 3, 1, 4, 5, 6, 7)]
        got = [got[k].asnumpy() for k in (2, 0, 1, 3, 4, 5, 6)]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert scope.stats.launches == 1 and scope.flushes[0].launches[0].operands == "shared list"


def test_outside_arrays_in_a_list_get_their_gradients():
    pool = pool_function("pool grads")
    xs = [mx.nd.array([[k * 0.1, 1.0]]) for k in range(4)]
    for x in xs:
        x.attach_grad()
    with autograd.record(), gdb.batching():
        ys = [pool(mx.nd, xs[:n], mx.nd.array([[1.0, 1.0]])) for n in (2, 3, 4)]
    autograd.backward(ys)
    for k, x in enumerate(xs):
        uses = sum(n > k for n in (2, 3, 4))
        np.testing.assert_allclose(x.grad.asnumpy(), uses * (1 - np.tanh(x.asnumpy()) ** 2), rtol=1e-5)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_what_all_calls_share_is_seen_by_all_elements(backend):
    @gdb.vertex
    def gated(F, x, xs):
        total = x
        for y in xs:
            total = total + F.sigmoid(x * y) * y
        return total

    x, ys = mx.nd.array([[0.5, -1.0]]), [mx.nd.array([[k + 0.5, 1.0]]) for k in range(4)]
    x.attach_grad()
    with autograd.record():
        want = [gated(mx.nd, x, ys[:n]) for n in (2, 3, 1)]
    autograd.backward(want)
    want_grad = x.grad.asnumpy()
    with autograd.record(), gdb.batching(backend=backend) as scope:
        got = [gated(mx.nd, x, ys[:n]) for n in (2, 3, 1)]
    autograd.backward(got)
    assert [launch.operands for launch in scope.flushes[0].launches] == ["shared list"]
    np.testing.assert_allclose([y.asnumpy() for y in got], [y.asnumpy() for y in want], rtol=1e-5)
    np.testing.assert_allclose(x.grad.asnumpy(), want_grad, rtol=1e-5)


def test_elements_of_different_shapes_or_forms_are_no_such_list():
    @gdb.vertex
    def first_of(F, xs):
        return xs[0] * 2 + F.sum(xs[1])

    a, b = mx.nd.ones((1, 3)), mx.nd.ones((1, 5))
    with gdb.batching() as scope:
        y = first_of(mx.nd, [a, b])
    assert y.asnumpy().tolist() == [[7.0, 7.0, 7.0]] and not scope.stats.fallbacks


def test_a_very_long_list():
    pool = pool_function("long pool")
    x = mx.nd.array([[0.5, 1.0]])
    with gdb.batching():
        ys = [pool(mx.nd, [x] * n, x) for n in (300, 2, 300)]
    np.testing.assert_allclose(ys[0].asnumpy(), 300 * np.tanh(x.asnumpy()) * x.asnumpy(), rtol=1e-4)
    np.testing.assert_allclose(ys[0].asnumpy(), ys[2].asnumpy())
