"""Sparse gradients, which are written past the tape: several nodes of one pass bring them, and MXNet itself."""

import numpy as np
import pytest

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn


class Scores(gluon.Block):
    def __init__(self):
        super().__init__(prefix="scores_")
        with self.name_scope():
            self.embed = nn.Embedding(6, 2, sparse_grad=True)
            self.out = nn.Dense(1, in_units=2)

    @gdb.vertex
    def score(self, F, word):
        return self.out(self.embed(word))


class Lookup(cavs.VertexFunction):
    def __init__(self, scores):
        super().__init__(state_shapes=[], prefix="")
        self.embed, self.out = scores.embed, scores.out

    def vertex(self, F, v):
        v.push(self.out(self.embed(v.pull("word"))))


def plainly(net, words):
    return [net.out(net.embed(mx.nd.array([w]))) for w in words]


def in_a_scope(net, words):
    with gdb.batching():
        return [net.score(mx.nd, w) for w in words]


def over_graphs(net, words):
    graph = cavs.InputGraph.from_parents([-1] * len(words))
    return [cavs.run(Lookup(net), [graph], {"word": np.array(words)}).pushed]


WAYS = {"scope": in_a_scope, "graphs": over_graphs, "plain": plainly}


@pytest.fixture
def net():
    net = Scores()
    net.initialize(mx.init.Uniform(0.5))
    return net


def gradients(net, ways, passes=1):
    """Of a loss that is made of the words 1 2, then 2 3, each in its own way."""
    for _ in range(passes):
        with autograd.record():
            parts = [x for way, words in zip(ways, ([1, 2], [2, 3])) for x in WAYS[way](net, words)]
            loss = mx.nd.add_n(*[(x * x).sum() for x in parts])
        loss.backward()
    return {name: p.grad().asnumpy() for name, p in net.collect_params().items()}


# (With "add" MXNet's own operators do not add sparse gradients up: there is nothing to compare with.)
@pytest.mark.parametrize("first, grad_req", [("scope", "write"), ("graphs", "write"), ("plain", "write"),
                                             ("scope", "add"), ("graphs", "add")])
@pytest.mark.parametrize("second", ["scope", "graphs"])
def test_all_parts_of_a_sparse_gradient_are_added_up(net, first, second, grad_req):
    want = gradients(net, ("plain", "plain"))
    net.embed.weight.grad_req = grad_req
    net.embed.weight.zero_grad()
    got = gradients(net, (first, second), passes=2)
    want[net.embed.weight.name] *= 2 if grad_req == "add" else 1
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("way", ["scope", "graphs"])
def test_autograd_grad_leaves_the_gradients_of_parameters_alone(net, way):
    before = gradients(net, (way, way))
    with autograd.record():
        parts = WAYS[way](net, [4, 5])
        loss = mx.nd.add_n(*[(x * x).sum() for x in parts])
    (bias,) = autograd.grad(loss, [net.out.bias.data()])
    assert abs(bias.asscalar()) > 0
    for name, p in net.collect_params().items():
        np.testing.assert_array_equal(p.grad().asnumpy(), before[name], err_msg=name)


@pytest.mark.parametrize("way", ["scope", "graphs"])
def test_a_gradient_that_a_pass_does_not_reach_stays_as_fresh_as_it_was(net, way):
    other = Scores()
    other.initialize()
    with autograd.record():
        kept = [(x * x).sum() for x in WAYS[way](net, [1, 2])]
        loss = mx.nd.add_n(*[(x * x).sum() for x in WAYS[way](other, [3])])
    loss.backward()
    assert other.embed.weight.data()._fresh_grad and not net.embed.weight.data()._fresh_grad
    mx.nd.add_n(*kept).asscalar()
