"""Layout: rows, ranges and messages, against the naive reading of the graph. No device is needed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from models import random_binary_tree, random_dag

from cavs_core.graph import InputGraph
from cavs_core.layout import RowIndex, Segments, plan_layout
from cavs_core.program import Gather, GatherAll, GatherSum

schedule = __import__("importlib").import_module("cavs_core.schedule").schedule


def lay_out(graphs, ports, by_slot=True):
    graph = InputGraph.batch(graphs)
    return graph, plan_layout(graph, schedule(graph, by_slot), ports, [ports])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.data())
def test_row_index_finds_ranges(rows, data):
    rows = np.array(rows)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    part = rows[start:stop]
    contiguous = (np.diff(part) == 1).all()
    assert RowIndex(rows).range_of(start, stop) == ((part[0], part[-1] + 1) if contiguous else None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_segments_count_from_their_launch(counts, data):
    cut = data.draw(st.integers(0, len(counts)))
    offsets = np.array([0, cut, len(counts)])
    segments = Segments(np.concatenate([[0], np.cumsum(counts)]), offsets)
    positions = np.repeat(np.arange(len(counts)), counts)
    assert segments.position.tolist() == positions.tolist()
    assert segments.in_launch.tolist() == [p - (cut if p >= cut else 0) for p in positions]
    start = data.draw(st.integers(0, len(counts)))
    stop = data.draw(st.integers(start, len(counts)))
    assert segments.one_each(start, stop) == all(c == 1 for c in counts[start:stop])


@given(st.integers(0, 10_000), st.booleans())
def test_every_gather_reads_the_right_row(seed, by_slot):
    rng = np.random.RandomState(seed)
    graphs = [random_dag(int(n), rng) for n in rng.randint(1, 12, 3)]
    graph, layout = lay_out(graphs, [Gather(0, 0), Gather(2, 0), GatherAll(0)], by_slot)
    order = layout.schedule.order
    for p, v in enumerate(order):
        children = (layout.schedule.position[graph.children_of(int(v))] + 1).tolist()
        start, stop = layout.edges.range_of(p, p + 1)
        assert layout.edge_rows.rows[start:stop].tolist() == children
        for slot in (0, 2):
            assert layout.slots[slot].rows[p] == (children[slot] if slot < len(children) else 0)


@given(st.integers(0, 10_000))
def test_messages_reach_whom_they_were_read_from(seed):
    """Send 1 through every port of every vertex: each vertex gets as many as it has readings."""
    rng = np.random.RandomState(seed)
    graphs = [random_dag(int(n), rng) for n in rng.randint(1, 12, 3)]
    ports = [Gather(0, 0), Gather(1, 0), GatherSum(0), GatherAll(0)]
    graph, layout = lay_out(graphs, ports)
    messages = layout.messages[0]
    naive = np.zeros(graph.num_vertices + 1, int)       # entry 0: the initial state
    for v in range(graph.num_vertices):
        children = layout.schedule.position[graph.children_of(v)] + 1
        if len(children):
            np.add.at(naive, children, 2)               # gather_sum and gather_all
            for slot in (0, 1):
                naive[children[slot] if slot < len(children) else 0] += 1
    assert np.diff(messages.segments.indptr).tolist() == naive[1:].tolist()
    assert len(messages.initial) == naive[0]
    sent = np.concatenate([messages.pull.rows, messages.initial])
    inner = graph.num_vertices - layout.num_leaves
    assert messages.num_rows == 1 + 3 * inner + graph.num_edges
    assert sent.min(initial=1) >= 1 and sent.max(initial=1) < messages.num_rows


def test_a_tree_pulls_one_row_a_vertex():
    graph, layout = lay_out([random_binary_tree(6, np.random.RandomState(0))], [Gather(0, 0), Gather(1, 0)])
    single = layout.messages[0].single
    assert single is not None
    assert single.rows[layout.schedule.position[graph.roots[0]]] == 0       # nobody reads the root: the zero row
    assert len(set(single.rows.tolist())) == graph.num_vertices


def test_shared_children_pull_several_rows():
    _, layout = lay_out([InputGraph.from_edges(3, [(0, 1), (0, 2)])], [GatherSum(0)])
    assert layout.messages[0].single is None


def test_frames_cover_all_positions_once():
    graph, layout = lay_out([random_dag(20, np.random.RandomState(1))], [GatherSum(0)])
    frames = [layout.leaves, *layout.launches]
    assert [f.start for f in frames[1:]] == [f.stop for f in frames[:-1]]
    assert frames[-1].stop == graph.num_vertices and frames[-1].edge_stop == graph.num_edges
    assert (layout.inner.start, layout.inner.stop) == (layout.num_leaves, graph.num_vertices)
    assert sum(f.num_edges for f in frames) == graph.num_edges


def test_no_vertices():
    _, layout = lay_out([], [Gather(0, 0), GatherAll(0)])
    assert layout.launches == [] and layout.leaves.num_rows == 0 and not layout.has_missing
