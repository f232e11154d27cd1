"""Batches of graphs that come again: nothing is worked out twice, and nothing is kept for ever."""

import copy
import gc
import weakref

import numpy as np
import pytest
from test_roles import TREES, assert_same, gradients, make, sample_inputs

import cavs_core as cavs
from cavs_core import batches
from cavs_core.mxnet_compat import autograd


def losses(cell, graphs, inputs, backend="mxnet"):
    with autograd.record():
        out = cavs.run(cell, graphs, inputs, backend=backend)
    out.pushed.backward()
    return out.pushed.asnumpy()


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_a_batch_that_comes_again_is_not_laid_out_again(backend, monkeypatch):
    cell, inputs = make(), sample_inputs(words=range(5))
    want, grads = losses(cell, TREES, inputs, backend), gradients(cell)
    monkeypatch.setattr("cavs_core.graph_run._WORTH", 2.0)              # repeats have layouts of their own
    losses(cell, TREES, inputs, backend)
    monkeypatch.setattr("cavs_core.graph_run.schedule", lambda *args: pytest.fail("it was"))
    np.testing.assert_allclose(losses(cell, list(TREES), inputs, backend), want, rtol=1e-6)
    assert_same(gradients(cell), grads)
    with pytest.raises(pytest.fail.Exception):
        losses(cell, TREES[::-1], inputs, backend)


def test_other_words_on_known_graphs_have_their_own_repeats():
    cell = make()
    for words in ((1, 1, 1), (1, 2, 3), (4, 5, 0), (1, 1, 2)):
        inputs = sample_inputs(words=words)
        again = losses(cell, TREES, inputs, "native")
        np.testing.assert_allclose(again, losses(cell, TREES, inputs), rtol=1e-5)


def test_an_arity_that_is_wrong_is_wrong_again():
    cell, bad = make(), cavs.InputGraph.from_parents([2, 2, 3, -1])
    for _ in range(2):
        with pytest.raises(cavs.ArityError):
            cavs.run(cell, [bad], sample_inputs([bad]))


def test_one_graph_is_a_batch_without_a_copy():
    """What runs work out is kept by the cell, not with the graph; its depths are."""
    cell, graph = make(), TREES[0]
    known = cell._batches.batch([graph])
    assert known == graph and known.child_index is graph.child_index and known.kept is not graph.kept
    before = len(graph.kept)
    want = losses(cell, [graph], sample_inputs([graph]))
    assert len(known.kept) == 1 and len(graph.kept) == before
    assert graph.known_depth is not None and cell._batches.batch([graph]) is known
    np.testing.assert_allclose(losses(cell, graph, sample_inputs([graph])), want, rtol=1e-6)


def test_few_batches_are_remembered(monkeypatch):
    monkeypatch.setattr(batches, "_MOST_VERTICES", 12)
    known = batches.Batches()
    graphs = [cavs.InputGraph.chain(5) for _ in range(4)]
    made = [known.batch([g]) for g in graphs]
    assert known.num_vertices == 10
    assert known.batch([graphs[3]]) is made[3] and known.batch([graphs[0]]) is not made[0]
    large = cavs.InputGraph.chain(13)
    assert known.batch([large]) is not known.batch([large])


def test_what_was_worked_out_goes_with_the_cell_and_with_the_graph():
    cell, graph = make(), cavs.InputGraph.batch(TREES)
    cavs.run(cell, graph, sample_inputs())
    (classes,) = map(weakref.ref, graph.kept.values())
    del cell
    gc.collect()
    assert classes() is None and not graph.kept


def test_a_cell_can_be_copied_after_a_run():
    cell = make()
    cavs.run(cell, TREES, sample_inputs())
    assert isinstance(copy.copy(cell._batches), batches.Batches)
    copy.deepcopy(cell._batches)
