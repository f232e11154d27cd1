"""Rounds: rings of classes that read each other, what is read inside them, and the launches that follow from it."""

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_analyzer import info, recording, recordings

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch.analyzer import problem_of, scan
from gluon_dynbatch.rounds import _rings, find_rounds

nn = gluon.nn


def rounds_of(classes, calls, num_leaves=1):
    r = recording(classes, calls, num_leaves)
    return find_rounds(r, scan(r))


def test_a_chain_and_what_comes_before_and_behind_it():
    """Class 0 is read by the chain of class 1, whose ends class 2 reads."""
    classes = [info(), info(operands=2), info()]
    calls = [(0, 1, [-1]), (0, 1, [-1]), (1, 1, [0, -1]), (1, 1, [1, 2]), (2, 1, [3])]
    found = rounds_of(classes, calls)
    assert found.of_class.tolist() == [0, 1, 2]
    assert found.columns.tolist() == [False, False, True, False]        # only the chain's own state
    assert found.outputs.tolist() == [False, True, False]


def test_classes_that_read_each_other_are_one_ring():
    classes = [info(outputs=2), info()]
    calls = [(0, 1, [-1]), (1, 1, [0]), (0, 1, [2]), (1, 1, [3])]       # 0 gives values 0, 1 and 3, 4
    found = rounds_of(classes, calls)
    assert found.of_class.tolist() == [0, 0] and found.columns.tolist() == [True, True]
    assert found.outputs.tolist() == [True, False, True]


def test_a_part_of_a_value_is_read_as_the_value():
    classes = [info(), info(alias=True), info()]
    found = rounds_of(classes, [(0, 1, [-1]), (1, 1, [0]), (0, 1, [1]), (1, 1, [2]), (2, 1, [3])])
    assert found.columns[0] and not found.columns[2] and found.outputs[0]
    assert found.of_class[2] > found.of_class[0]


def test_reshape_like_is_part_of_its_first_operand():
    classes = [info(), info(operands=2, alias=True), info()]
    calls = [(0, 1, [-1]), (0, 1, [-1]), (1, 1, [0, 1]), (2, 1, [2])]
    r = recording(classes, calls, 1)
    s = scan(r)
    problem = problem_of(r, s, np.ones(3), np.ones(3))
    assert problem.producers.tolist() == [0] and problem.call_class.tolist() == [0, 0, -1, 2]
    assert find_rounds(r, s).of_class.tolist()[2] == 1


@given(st.integers(0, 9), st.data())
def test_rings_are_those_of_networkx(count, data):
    reads = np.array(data.draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count)),
                     bool).reshape(count, count)
    ring, of_class = _rings(reads)
    graph = networkx.from_numpy_array(reads, create_using=networkx.DiGraph)
    want = {frozenset(part) for part in networkx.strongly_connected_components(graph)}
    assert {frozenset(np.flatnonzero(ring == k).tolist()) for k in set(ring.tolist())} == want
    for a, b in zip(*np.nonzero(reads)):
        assert of_class[a] < of_class[b] or ring[a] == ring[b]


@given(recordings())
def test_every_class_runs_after_what_it_reads(drawn):
    classes, calls, num_leaves = drawn
    r = recording(classes, calls, num_leaves)
    s = scan(r)
    found = find_rounds(r, s)
    for c, _, tokens in calls:
        for t in tokens:
            if t >= 0:
                assert found.of_class[r.call_class[s.maker[t]]] <= found.of_class[c]


class Tagger(gluon.Block):
    """Words are projected, a chain runs over them, and an output reads both."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = gdb.vertex(nn.Embedding(9, 4, prefix="embed_"))
            self.cell = gdb.vertex(gluon.rnn.LSTMCell(4, input_size=4, prefix="cell_"))
            self.head = gdb.vertex(nn.Dense(3, in_units=4, prefix="head_"))

    def forward(self, words):
        state, found = [mx.nd.zeros((1, 4))] * 2, []
        for word in words:
            h, state = self.cell(self.embed(word), state)
            found.append(self.head(h))
        return mx.nd.add_n(*found)


@pytest.mark.parametrize("policy", ["depth", "cost"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_what_waits_for_no_launch_runs_once(backend, policy):
    """The projection of all words and the product of all outputs are one product each; results are the loop's."""
    mx.random.seed(4)
    net = Tagger(prefix="tagger_")
    net.initialize(mx.init.Normal(0.5))
    samples = [[1, 2, 3], [4, 5], [6], [7, 8, 1, 2]]
    with autograd.record():
        want = [net(words) for words in samples]
    autograd.backward(want)
    want_grads = {name: p.grad().asnumpy() for name, p in net.collect_params().items()}
    with autograd.record(), gdb.batching(policy=policy, backend=backend) as scope:
        got = [net(words) for words in samples]
    autograd.backward(got)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.asnumpy(), w.asnumpy(), rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        np.testing.assert_allclose(net.collect_params()[name].grad().asnumpy(), grad, rtol=1e-3, atol=1e-5,
                                   err_msg=name)
    titles = [launch.title for launch in scope.flushes[0].launches]
    cells = [k for k, title in enumerate(titles) if title.startswith("LSTMCell")]
    heads = [k for k, title in enumerate(titles) if title.startswith("Dense")]
    assert max(cells) < min(heads)              # the ring of the cell is over before its readers begin
