"""Vertices that repeat others, in the Cavs face: compared with a table of expressions, and never seen in results."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import random_dag
from test_roles import BACKENDS, TREES, assert_same, gradients, looped, make, sample_inputs

import cavs_core as cavs
from cavs_core import graph_run
from cavs_core.distinct import find_distinct
from cavs_core.mxnet_compat import autograd, gluon, mx
from cavs_core.schedule import depths_of

nn = gluon.nn
InputGraph = cavs.InputGraph


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Repeats are left out however few they are."""
    monkeypatch.setattr(graph_run, "_WORTH", 0.0)


# ---- pure ------------------------------------------------------------------------------------


def expressions(graph, class_of, may_repeat, keys, asks):
    """What each vertex computes, written out; one that may not repeat others is its own."""
    text = {}
    for v in np.argsort(depths_of(graph), kind="stable").tolist():
        below = tuple(text[c] for c in graph.children_of(v).tolist())
        own = () if may_repeat[class_of[v]] else (v,)
        text[v] = (int(class_of[v]), below, tuple(keys[v][asks[class_of[v]]].tolist()), own)
    return text


@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 2))
def test_vertices_that_are_left_are_the_different_expressions(seed, num_classes, columns):
    rng = np.random.RandomState(seed)
    graph = InputGraph.batch([random_dag(int(n), rng) for n in rng.randint(1, 9, 4)])
    class_of = rng.randint(0, num_classes, graph.num_vertices)
    may_repeat = rng.rand(num_classes) < 0.8
    keys = rng.randint(-1, 2, (graph.num_vertices, columns))
    asks = rng.rand(num_classes, columns) < 0.7
    text = expressions(graph, class_of, may_repeat, keys, asks)
    found = find_distinct(graph, class_of, may_repeat, keys, asks)
    assert found.depth.tolist() == depths_of(found.graph).tolist()
    assert found.graph.num_vertices == len(found.vertices) == len(set(text.values()))
    for v in range(graph.num_vertices):
        first = int(found.vertices[found.number[v]])
        assert text[first] == text[v]
        children = [int(found.vertices[c]) for c in found.graph.children_of(int(found.number[v]))]
        assert [text[c] for c in children] == [text[c] for c in graph.children_of(v).tolist()]


def test_a_cycle_is_an_error_here_too():
    ring = InputGraph.from_edges(3, [(0, 1), (1, 2), (2, 0)])
    with pytest.raises(cavs.CycleError, match="its own ancestor"):
        find_distinct(ring, np.zeros(3, int), np.array([True]), np.zeros((3, 0), int), np.zeros((1, 0), bool))


# ---- through the face ------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("begin", ["pushed", "sum"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_repeats_change_nothing(backend, begin, sparse, dtype, monkeypatch):
    """(MXNet's operators run a model until it is compiled, so they meet repeats too.)"""
    monkeypatch.setattr("cavs_core.face.runs_in_the_end", lambda ctx, asked: "native")
    cell, inputs = make(sparse, dtype), sample_inputs()
    with autograd.record():
        want = looped(cell, TREES, inputs, dtype)
    autograd.backward(want)
    want_grads = gradients(cell)
    with autograd.record():
        out = cavs.run(cell, TREES, inputs, backend=backend)
        head = out.pushed if begin == "pushed" else out.pushed.sum()
    head.backward()
    assert out.stats.repeats > 3
    np.testing.assert_allclose(out.pushed.asnumpy(), np.concatenate([x.asnumpy() for x in want]), rtol=1e-5)
    assert_same(gradients(cell), want_grads, dtype)


def test_head_gradients_of_repeats_are_added_up():
    cell = make()
    graphs, words = [TREES[1]] * 3, {"word": np.array([1, 2, 0] * 3), "label": np.zeros(9, int)}
    weight = mx.nd.array([1.0, -2.0, 5.0])
    found = []
    for backend, begin in (("mxnet", "tape"), ("native", "tape"), ("native", "direct")):
        with autograd.record():
            out = cavs.run(cell, graphs, words, backend=backend)
            head = (out.pushed * weight).sum() if begin == "tape" else out.pushed
        head.backward(*([weight] if begin == "direct" else []))
        assert out.stats.repeats == (6 if backend == "native" else 0)
        found.append(gradients(cell))
    for other in found[1:]:
        assert_same(other, found[0])


def test_what_is_drawn_or_floating_repeats_nothing():
    def setup(self):
        self.embed, self.drop = nn.Embedding(4, 3), nn.Dropout(0.5)
        self.own = nn.Dense(3, in_units=3)

    from small_cells import function

    def drawing(self, F, v):
        v.push(self.own(self.drop(self.embed(v.pull("word")))))

    def floating(self, F, v):
        v.push(self.own(self.embed(v.pull("word")) + v.pull("x")))

    words = np.zeros(5, int)
    with autograd.record():
        drawn = cavs.run(function(drawing, states=[], setup=setup), [TREES[0]], {"word": words}, backend="native")
        added = cavs.run(function(floating, states=[], setup=setup), [TREES[0]],
                         {"word": words, "x": np.ones((5, 3), "float32")}, backend="native")
    assert drawn.stats.repeats == added.stats.repeats == 0
    quiet = cavs.run(function(drawing, states=[], setup=setup), [TREES[0]], {"word": words}, backend="native")
    assert quiet.stats.repeats > 0                  # outside of training nothing is drawn


def test_repeats_are_looked_for_seldom_where_there_are_none(monkeypatch):
    monkeypatch.undo()
    looked = []
    original = graph_run.find_distinct
    monkeypatch.setattr(graph_run, "find_distinct", lambda *args: looked.append(1) or original(*args))
    cell, inputs = make(), sample_inputs([TREES[0]], words=range(5))
    for _ in range(40):
        out = cavs.run(cell, [TREES[0]], inputs, backend="native")
    assert out.stats.repeats == 0
    assert len(looked) == graph_run._PATIENCE + 2           # the first few, then every 16th


def test_integers_may_change_before_the_backward_pass():
    cell, inputs = make(), sample_inputs()
    want = None
    for change in (False, True):
        with autograd.record():
            out = cavs.run(cell, TREES, inputs, backend="native")
        if change:
            inputs["word"][:] = 0
            inputs["label"][:] = 0
        out.pushed.backward()
        want = want or gradients(cell)
    assert_same(gradients(cell), want)
