"""Layout: rows, ranges and messages, against the naive reading of the graph. No device is needed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from models import random_binary_tree, random_dag

from cavs_core.graph import InputGraph
from cavs_core.graph_layout import Interface, Interfaces, lay_out_graphs
from cavs_core.layout import Frame, Place, RowIndex, Segments, frames_of, plan_messages
from cavs_core.program import Gather, GatherAll, GatherSum
from cavs_core.schedule import schedule


def lay_out(graphs, ports, by_slot=True, pushed=()):
    """Leaves are class 0, all others class 1."""
    graph = InputGraph.batch(graphs)
    scheduled = schedule(graph, by_slot)
    classes = Interfaces([Interface([], [], 1, pushed), Interface(ports, ports, 1, pushed)])
    laid = lay_out_graphs(graph, scheduled, (graph.arity > 0).astype(int), classes, [])
    np.testing.assert_array_equal(laid.position, scheduled.position)
    return graph, scheduled, laid.layout


def inner_vertices(layout):
    return layout.classes[1].external.rows.tolist()


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
    cut = data.draw(st.integers(1, len(counts)))
    offsets = np.unique([0, cut, len(counts)])
    segments = Segments(np.concatenate([[0], np.cumsum(counts)]), offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    assert segments.row.tolist() == rows.tolist()
    assert segments.in_launch.tolist() == [r - (cut if r >= cut else 0) for r in rows]
    assert segments.is_launch(0, cut) and not segments.is_launch(1, len(counts) + 1)
    start = data.draw(st.integers(0, len(counts)))
    stop = data.draw(st.integers(start, len(counts)))
    assert segments.one_each(start, stop) == all(c == 1 for c in counts[start:stop])


@given(st.integers(0, 10_000), st.booleans())
def test_every_gather_reads_the_right_row(seed, by_slot):
    rng = np.random.RandomState(seed)
    graphs = [random_dag(int(n), rng) for n in rng.randint(1, 12, 3)]
    ports = [Gather(0, 0), Gather(2, 0), GatherAll(0)]
    graph, scheduled, layout = lay_out(graphs, ports, by_slot)
    inner = layout.classes[1]
    for p, v in enumerate(inner_vertices(layout)):
        children = (scheduled.position[graph.children_of(v)] + 1).tolist()
        start, stop = inner.edges.range_of(p, p + 1)
        assert inner.reads[GatherAll(0)].rows.rows[start:stop].tolist() == children
        for slot in (0, 2):
            assert inner.reads[Gather(slot, 0)].rows.rows[p] == (children[slot] if slot < len(children) else 0)


@given(st.integers(0, 10_000))
def test_messages_reach_whom_they_were_read_from(seed):
    """Send 1 through every port of every vertex: each row gets as many as it has readings."""
    rng = np.random.RandomState(seed)
    graphs = [random_dag(int(n), rng) for n in rng.randint(1, 12, 3)]
    ports = [Gather(0, 0), Gather(1, 0), GatherSum(0), GatherAll(0)]
    graph, scheduled, layout = lay_out(graphs, ports)
    messages = layout.messages[0]
    naive = np.zeros(graph.num_vertices + 1, int)       # row 0: the initial state
    for v in range(graph.num_vertices):
        children = scheduled.position[graph.children_of(v)] + 1
        if len(children):
            np.add.at(naive, children, 2)               # gather_sum and gather_all
            for slot in (0, 1):
                naive[children[slot] if slot < len(children) else 0] += 1
    assert np.diff(messages.segments.indptr).tolist() == naive.tolist()
    num_inner = len(inner_vertices(layout))
    assert messages.num_rows == 1 + 3 * num_inner + graph.num_edges
    sends = layout.classes[1].sends
    assert [sends[p].base for p in ports] == [1, 1 + num_inner, 1 + 2 * num_inner, 1 + 3 * num_inner]
    assert messages.pull.rows.min(initial=1) >= 1 and messages.pull.rows.max(initial=1) < messages.num_rows


def test_a_tree_pulls_one_row_a_vertex():
    graph, scheduled, layout = lay_out([random_binary_tree(6, np.random.RandomState(0))],
                                       [Gather(0, 0), Gather(1, 0)])
    single = layout.messages[0].single
    assert single is not None
    assert single.rows[scheduled.position[graph.roots[0]] + 1] == 0     # nobody reads the root: the zero row
    assert len(set(single.rows.tolist())) == graph.num_vertices


def test_shared_children_pull_several_rows():
    _, _, layout = lay_out([InputGraph.from_edges(3, [(0, 1), (0, 2)])], [GatherSum(0)])
    assert layout.messages[0].single is None


def test_frames_cover_all_positions_once():
    graph, _, layout = lay_out([random_dag(20, np.random.RandomState(1))], [GatherSum(0)])
    leaves, inner = layout.classes
    assert leaves.whole.num_rows + inner.whole.num_rows == graph.num_vertices
    assert [f.start for f in inner.launches] == [0] + [f.stop for f in inner.launches[:-1]]
    assert inner.launches[-1].stop == inner.whole.stop
    assert sum(f.num_edges for f in inner.launches) == graph.num_edges == inner.whole.num_edges
    assert layout.order.tolist() == [[0, 0]] + [[1, k] for k in range(len(inner.launches))]


def test_pushed_states_share_the_buffer_of_the_state():
    _, _, layout = lay_out([InputGraph.chain(3)], [Gather(0, 0)], pushed=[0, None])
    leaf, inner = layout.classes
    assert leaf.writes == [Place(0, 1), Place(0, 1), Place(1, 0)]
    assert inner.writes == [Place(0, 2), Place(0, 2), Place(1, 1)]
    assert layout.buffer_rows == [4, 3]


def test_no_vertices():
    _, _, layout = lay_out([], [Gather(0, 0), GatherAll(0)])
    assert len(layout.order) == 0 and all(c.whole.num_rows == 0 for c in layout.classes)


@given(st.lists(st.integers(1, 4), max_size=5), st.booleans())
def test_frames_of_launches(sizes, with_edges):
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    edges = np.cumsum(np.arange(bounds[-1] + 1)) if with_edges else None
    at = [0] * (bounds[-1] + 1) if edges is None else edges.tolist()
    frames = [Frame(*frame) for frame in frames_of(bounds, edges).tolist()]
    assert frames == [Frame(a, b, at[a], at[b]) for a, b in [(0, bounds[-1]), *zip(bounds[:-1], bounds[1:])]]


@given(st.integers(0, 10_000))
def test_classes_that_read_other_slots_of_several_states(seed):
    """Three classes, two states, in any mixture: against the graph, and messages that are put together by hand."""
    rng = np.random.RandomState(seed)
    graph = InputGraph.batch([random_dag(int(n), rng) for n in rng.randint(1, 12, 3)])
    class_of = np.where(graph.arity == 0, 0, rng.randint(1, 3, graph.num_vertices))
    ports = [[], [Gather(1, 0), Gather(1, 1), Gather(0, 1)], [GatherSum(1), Gather(2, 0), GatherAll(0), Gather(1, 1)]]
    answered = [[], ports[1][:2], ports[2]]
    laid = lay_out_graphs(graph, schedule(graph), class_of, Interfaces(
        [Interface(p, a, 2, [1, None] if c != 1 else []) for c, (p, a) in enumerate(zip(ports, answered))]), [])
    layout, row = laid.layout, laid.position + 1
    read, sent, free = [[], []], [[], []], [1, 1]
    for c, part in enumerate(layout.classes):
        vertices = part.external.rows.tolist()
        assert sorted(vertices) == np.flatnonzero(class_of == c).tolist()
        assert np.diff(laid.position[vertices]).tolist() == [1] * (len(vertices) - 1)
        children = [row[graph.children_of(v)].tolist() for v in vertices]
        every = [r for rows in children for r in rows]
        for port in ports[c]:
            by_slot = isinstance(port, Gather)
            want = [rows[port.slot] if port.slot < len(rows) else 0 for rows in children] if by_slot else every
            assert part.reads[port].rows.rows.tolist() == want and part.reads[port].buffer == port.state
            if port in answered[c]:
                assert part.sends[port] == Place(port.state, free[port.state])
                numbers = [p for p, rows in enumerate(children) for _ in rows] if isinstance(port, GatherSum) \
                    else list(range(len(want)))
                read[port.state].append(np.array(want, np.int64))
                sent[port.state].append(free[port.state] + np.array(numbers, np.int64))
                free[port.state] += len(every) if isinstance(port, GatherAll) else len(vertices)
    for state in range(2):
        want = plan_messages(graph.num_vertices + 1, read[state], sent[state], free[state], np.zeros(1, np.int64))
        got = layout.messages[state]
        assert got.num_rows == want.num_rows
        assert got.pull.rows.tolist() == want.pull.rows.tolist()
        assert got.segments.indptr.tolist() == want.segments.indptr.tolist()
    pushing = np.flatnonzero(class_of != 1)
    assert laid.pushing.tolist() == pushing.tolist()
    (state, state_rows), (own, own_rows) = laid.pushed
    assert (state, own) == (1, 2) and state_rows.tolist() == row[pushing].tolist()
    for c in (0, 2):
        mine = class_of[pushing] == c
        first = layout.classes[c].writes[3].base
        assert sorted(own_rows[mine].tolist()) == list(range(first, first + int(mine.sum())))
        assert layout.classes[c].pushed.rows.tolist() == [
            pushing.tolist().index(v) for v in layout.classes[c].external.rows.tolist()]


def test_states_that_are_read_alike_share_their_messages():
    graph = InputGraph.complete_binary_tree(3)
    ports = [Gather(0, 0), Gather(0, 1), Gather(1, 0), Gather(1, 1)]
    layout = lay_out_graphs(graph, schedule(graph), (graph.arity > 0).astype(int), Interfaces(
        [Interface([], [], 2, [0]), Interface(ports, ports, 2, [0])]), []).layout
    assert layout.messages[0] is layout.messages[1]
    reads = layout.classes[1].reads
    assert reads[ports[0]].rows is reads[ports[1]].rows is not reads[ports[2]].rows
