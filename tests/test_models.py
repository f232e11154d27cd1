"""Every model of the Cavs face gives the plain loop's values and gradients; launches are counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_check import check_same_as_loop
from models import (
    MODEL_NAMES,
    BinaryTreeLSTM,
    ChainLSTM,
    ChildSumLSTM,
    DagNet,
    TreeFC,
    features,
    model_cases,
    random_binary_tree,
    random_dag,
    random_tree,
    words,
)

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, mx


def make(name, dtype="float32", seed=1):
    rng = np.random.RandomState(seed)
    cell, graphs, inputs = model_cases(rng)[name]
    cell.initialize(mx.init.Normal(0.5))
    for p in cell.initial_states:
        p.set_data(mx.nd.random.normal(shape=p.shape))
    cell.cast(dtype)
    return cell, graphs, (features(graphs, rng, dtype) if inputs is features else inputs(graphs, rng))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_same_as_loop(name, dtype):
    cell, graphs, inputs = make(name, dtype)
    check_same_as_loop(cell, graphs, inputs, dtype)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_same_without_recording(name):
    """Inference plans no backward; its values are the same."""
    cell, graphs, inputs = make(name)
    with autograd.record(train_mode=False):
        want = cavs.run(cell, graphs, inputs).pushed
    got = cavs.run(cell, graphs, inputs).pushed
    for w, g in zip(*[x if isinstance(x, list) else [x] for x in (want, got)]):
        np.testing.assert_array_equal(g.asnumpy(), w.asnumpy())


def test_checker_rejects_a_wrong_gradient(monkeypatch):
    cell, graphs, inputs = make("treefc")
    from cavs_core.ops import TABLE
    right = TABLE["relu"].grad
    monkeypatch.setattr(TABLE["relu"], "grad", lambda b, *rest: [b.scale(right(b, *rest)[0], 1.01)])
    with pytest.raises(AssertionError, match="grad of"):
        check_same_as_loop(cell, graphs, inputs)


def test_checker_rejects_a_wrong_value():
    cell, graphs, inputs = make("treefc")
    wrong = cavs.InputGraph.batch([cavs.InputGraph.from_edges(g.num_vertices, [
        (int(c), v) for v in range(g.num_vertices) for c in g.children_of(v)[::-1]]) for g in graphs])
    with pytest.raises(AssertionError, match="pushed 0"):
        check_same_as_loop(cell, graphs, inputs, run=lambda cell, _, x: cavs.run(cell, wrong, x))


@settings(max_examples=8)
@given(st.integers(0, 10_000))
def test_random_structures_same_as_loop(seed):
    rng = np.random.RandomState(seed)
    cell = DagNet()
    cell.initialize(mx.init.Normal(0.5))
    graphs = [random_dag(int(rng.randint(1, 12)), rng) for _ in range(rng.randint(1, 4))]
    check_same_as_loop(cell, graphs, features(graphs, rng))


def test_one_vertex_with_many_children():
    rng = np.random.RandomState(0)
    star = cavs.InputGraph.from_parents([300] * 300 + [-1])
    for cell in (ChildSumLSTM(), DagNet()):
        cell.initialize(mx.init.Normal(0.1))
        check_same_as_loop(cell, [star, random_tree(4, rng)], features([star, cavs.InputGraph.chain(4)], rng))


def test_one_child_gathered_twice():
    graph = cavs.InputGraph.from_edges(2, [(0, 1), (0, 1)])
    cell = TreeFC()
    cell.initialize(mx.init.Normal(0.5))
    check_same_as_loop(cell, [graph], features([graph], np.random.RandomState(0)))


# ---- launches --------------------------------------------------------------------------------


def launches(cell, graphs, inputs):
    with autograd.record():
        out = cavs.run(cell, graphs, inputs, backend="mxnet")      # regions of MXNet operators are counted
        total = out.roots.sum() if not isinstance(out.roots, list) else out.roots[0].sum()
    total.backward()
    return out.stats


@pytest.mark.parametrize("samples", [1, 16])
def test_balanced_trees_need_one_launch_a_level_whatever_the_batch(samples):
    """8 leaves are 4 levels. A level above the leaves is one region; its gathers are views."""
    cell = TreeFC()
    cell.initialize()
    graphs = [cavs.InputGraph.complete_binary_tree(3)] * samples
    stats = launches(cell, graphs, features(graphs, np.random.RandomState(0)))
    assert stats.launches == 4
    per_level = []
    for depth in (3, 4, 5):
        graphs = [cavs.InputGraph.complete_binary_tree(depth)] * samples
        deeper = launches(cell, graphs, features(graphs, np.random.RandomState(0)))
        per_level.append((deeper.forward_ops, deeper.backward_ops))
    forward = np.diff([f for f, _ in per_level])
    backward = np.diff([b for _, b in per_level])
    assert set(forward) == {1}                  # one region
    assert set(backward) == {2}                 # one region, one gather of what the two readers sent back


def test_launches_do_not_depend_on_the_number_of_samples():
    cell = BinaryTreeLSTM()
    cell.initialize()
    tree = random_binary_tree(9, np.random.RandomState(3))
    counts = set()
    for samples in (2, 8, 32):
        stats = launches(cell, [tree] * samples, features([tree] * samples, np.random.RandomState(0)))
        counts.add((stats.launches, stats.forward_ops, stats.backward_ops))
    assert len(counts) == 1


def test_chains_gather_by_views():
    """64 chains: every step is one region forward; nothing is copied to gather."""
    cell = ChainLSTM()
    cell.initialize()
    ops = []
    for length in (10, 11):
        graphs = [cavs.InputGraph.chain(length)] * 64
        ops.append(launches(cell, graphs, words(graphs, np.random.RandomState(0))).forward_ops)
    assert ops[1] - ops[0] == 1


def test_input_projection_is_eager_and_parameter_gradients_are_lazy():
    """The number of products does not grow with the depth: only the recurrent one runs in every launch."""
    from cavs_core.partition import partition
    from cavs_core.program import Gather, Spec
    from cavs_core.vertex import trace_vertex
    cell = BinaryTreeLSTM()
    cell.initialize()
    vertex, _ = trace_vertex(cell, {"x": Spec((1, 4), "float32")}, "float32", mx.current_context())
    gathers = [v for v, s in vertex.program.inputs.items() if isinstance(s, Gather)]
    parts = partition(vertex.program.instrs, gathers, vertex.scattered)
    products = [[i.op for i in part].count("matmul") for part in (parts.eager, parts.critical, parts.lazy)]
    assert products == [1, 1, 1]                # x projection; recurrent product; class scores
