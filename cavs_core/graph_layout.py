"""Rows and buffers for a schedule of graphs: the classes of its vertices, and where their values stand.

State k lives in buffer k: row 0 is the initial state, and the vertex of number i owns row i + 1. Vertices are numbered
class after class, in each class in the order of the run, so that a launch is a range of rows. Pushed values that are no
states follow in buffers of their own, with a row for each vertex that pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from .graph import InputGraph, IntArray
from .layout import ClassLayout, Frame, Layout, Messages, Place, Read, RowIndex, Segments, offsets_of, plan_messages
from .program import Gather, GatherAll, GatherSum
from .schedule import Schedule

__all__ = ["GraphLayout", "Interface", "lay_out_graphs"]

Port = Union[Gather, GatherSum, GatherAll]


class Interface(NamedTuple):
    """What a class of vertices reads and leaves behind.

    Attributes
    ----------
    ports : the ways in which a vertex reads its children
    answered : of these, the ones that send a gradient back
    num_states : how many states it scatters; all or none
    pushed : for each pushed value, the state that it is, or None if it has a buffer of its own. Empty if the class
        pushes nothing; all others push alike.
    """

    ports: Sequence[Port]
    answered: Sequence[Port]
    num_states: int
    pushed: Sequence[int | None]


class GraphLayout(NamedTuple):
    """A layout, and where the vertices are in it.

    Attributes
    ----------
    layout : Layout
    position : int64 array, the number of each vertex
    pushing : int64 array, the vertices that push, ascending
    pushed : (buffer, rows) of each pushed value: of those vertices, in that order
    """

    layout: Layout
    position: IntArray
    pushing: IntArray
    pushed: list[tuple[int, IntArray]]


class _Members:
    """The vertices of one class, in the order of the run."""

    def __init__(self, graph: InputGraph, schedule: Schedule, vertices: IntArray):
        self.vertices = vertices
        depth = schedule.depth[vertices]
        starts = np.flatnonzero(np.diff(depth, prepend=-1))
        self.depths: list[int] = depth[starts].tolist()             # of its launches
        self.bounds = np.append(starts, len(vertices))
        self.arity = graph.arity[vertices]
        indptr, self.children = graph.children_of_each(vertices)
        self.edges = Segments(indptr, self.bounds)

    def frame(self, start: int, stop: int) -> Frame:
        return Frame(start, stop, *self.edges.range_of(start, stop))

    def frames(self) -> list[Frame]:
        ends = self.edges.indptr[self.bounds].tolist()
        bounds = self.bounds.tolist()
        return [Frame(*frame) for frame in zip(bounds, bounds[1:], ends, ends[1:])]


def lay_out_graphs(graph: InputGraph, schedule: Schedule, class_of: IntArray, classes: Sequence[Interface],
                   sources: IntArray | None = None) -> GraphLayout:
    """Lay out a schedule.

    Parameters
    ----------
    graph, schedule
    class_of : int64 array, the class of each vertex
    classes : an Interface for each
    sources : int64 array, the row of each vertex in the pulled inputs; None: its number
    """
    of_order = class_of[schedule.order]
    members = [_Members(graph, schedule, schedule.order[of_order == c]) for c in range(len(classes))]
    firsts = offsets_of(np.array([len(m.vertices) for m in members], np.int64))
    position = np.empty(graph.num_vertices, np.int64)
    for m, first in zip(members, firsts):
        position[m.vertices] = np.arange(first, first + len(m.vertices))
    reads = [_reads(interface.ports, m, position) for interface, m in zip(classes, members)]
    num_states = max((interface.num_states for interface in classes), default=0)
    # launches as rows; the initial state is a launch of its own
    launch_rows = np.concatenate([[0], *[1 + first + m.bounds[:-1] for m, first in zip(members, firsts)],
                                  [1 + graph.num_vertices]]).astype(np.int64)
    sends: list[dict[Any, Place]] = [{} for _ in classes]
    messages = [_plan_state(k, classes, members, reads, sends, graph.num_vertices, launch_rows)
                for k in range(num_states)]
    places = _Pushed(classes, members, num_states)
    rank = np.full(graph.num_vertices, -1, np.int64)
    rank[places.vertices] = np.arange(len(places.vertices))
    parts = []
    for c, (interface, m) in enumerate(zip(classes, members)):
        states = [Place(k, 1 + int(firsts[c])) for k in range(interface.num_states)]
        external = RowIndex(m.vertices if sources is None else sources[m.vertices])
        edges = m.edges if len(m.children) or interface.ports else None
        parts.append(ClassLayout(m.frame(0, len(m.vertices)), m.frames(), reads[c], states + places.of(c, states),
                                 sends[c], external, edges, pushed=RowIndex(rank[m.vertices])))
    in_order = sorted((depth, c, k) for c, m in enumerate(members) for k, depth in enumerate(m.depths))
    nothing = plan_messages(0, [], [], 1, np.zeros(1, np.int64))
    layout = Layout(parts, [(c, k) for _, c, k in in_order],
                    [graph.num_vertices + 1] * num_states + [len(places.vertices)] * places.num_own,
                    messages + [nothing] * places.num_own)
    return GraphLayout(layout, position, places.vertices, places.rows(position))


class _Pushed:
    """Where pushed values stand: states where they are anyway, others in buffers behind all states."""

    def __init__(self, classes: Sequence[Interface], members: Sequence[_Members], num_states: int):
        pushing = [c for c, interface in enumerate(classes) if interface.pushed]
        self._values: Sequence[int | None] = classes[pushing[0]].pushed if pushing else ()
        own = [k for k, state in enumerate(self._values) if state is None]
        self._buffers = {k: num_states + i for i, k in enumerate(own)}
        self.num_own = len(own)
        ordered = [members[c].vertices for c in pushing]
        counts = offsets_of(np.array([len(v) for v in ordered], np.int64)).tolist()
        self._first = dict(zip(pushing, counts))            # class -> its first row in those buffers
        self._vertices = np.concatenate([*ordered, np.zeros(0, np.int64)]).astype(np.int64)     # row after row
        self._by_vertex = np.argsort(self._vertices)
        self.vertices = self._vertices[self._by_vertex]

    def of(self, c: int, states: Sequence[Place]) -> list[Place]:
        """The places of a class's pushed values."""
        if c not in self._first:
            return []
        return [Place(self._buffers[k], self._first[c]) if state is None else states[state]
                for k, state in enumerate(self._values)]

    def rows(self, position: IntArray) -> list[tuple[int, IntArray]]:
        """The buffer of each pushed value, and its rows there in the order of the vertices."""
        return [(self._buffers[k], self._by_vertex) if state is None else (state, 1 + position[self.vertices])
                for k, state in enumerate(self._values)]


def _reads(ports: Sequence[Port], members: _Members, position: IntArray) -> dict[Any, Read]:
    children = position[members.children] + 1
    every = RowIndex(children)
    found: dict[Any, Read] = {}
    for port in ports:
        if isinstance(port, Gather):
            found[port] = Read(port.state, RowIndex(_slot_rows(port.slot, members, children)))
        else:
            found[port] = Read(port.state, every, per_edge=True, summed=isinstance(port, GatherSum))
    return found


def _slot_rows(slot: int, members: _Members, children: IntArray) -> IntArray:
    """The state row of one child of every vertex; the initial state where it is missing."""
    rows = np.zeros(len(members.arity), np.int64)
    has = members.arity > slot
    rows[has] = children[members.edges.indptr[:-1][has] + slot]
    return rows


def _plan_state(state: int, classes: Sequence[Interface], members: Sequence[_Members],
                reads: Sequence[dict[Any, Read]], sends: Sequence[dict[Any, Place]], total: int,
                launch_rows: IntArray) -> Messages:
    """Number the messages of one state, class after class and port after port; note in `sends` where they begin."""
    read, sent, free = [], [], 1
    for interface, m, mine, out in zip(classes, members, reads, sends):
        for port in interface.answered:
            if port.state != state:
                continue
            out[port] = Place(state, free)
            read.append(mine[port].rows.rows)
            if isinstance(port, GatherSum):                 # all children of a vertex pull the same message
                sent.append(free + m.edges.row)
            else:
                sent.append(free + np.arange(len(read[-1])))
            free += len(m.children) if isinstance(port, GatherAll) else len(m.vertices)
    return plan_messages(total + 1, read, sent, free, launch_rows)
