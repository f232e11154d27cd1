"""Rows and buffers for a schedule of graphs: the classes of its vertices, and where their values stand.

State k lives in buffer k: row 0 is the initial state, and the vertex of number i owns row i + 1. Vertices are numbered
class after class, in each class in the order of the run, so that a launch is a range of rows. Pushed values that are no
states follow in buffers of their own, with a row for each vertex that pushes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from .compiling import compiled
from .graph import InputGraph, IntArray
from .layout import ClassLayout, Layout, Messages, Place, Read, RowIndex, Segments, no_messages
from .program import Gather, GatherAll, GatherSum, Spec
from .schedule import Schedule

__all__ = ["GraphLayout", "Interface", "Interfaces", "lay_out_graphs"]

Port = Union[Gather, GatherSum, GatherAll]
_SLOT, _SUM, _ALL = range(3)        # kinds of ports


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


class Interfaces:
    """The interfaces of all classes, and what follows from them for every graph.

    Attributes
    ----------
    classes : list of Interface
    num_states : of the classes that have some
    pushes : bool array, whether a class pushes
    pushed_at : the buffer of each pushed value
    num_own : pushed values that have a buffer of their own
    reads : for each class (port, slot, whether it is a sum), one after the other; -1 where all children are read
    slots : int64 array, (class, slot) of all that is read by number, once each, class after class
    answered : for each state an int64 array with a row for each answered port: kind, slot, class
    """

    def __init__(self, classes: Sequence[Interface]):
        self.classes = list(classes)
        self.num_states = max((interface.num_states for interface in classes), default=0)
        self.pushes = np.array([bool(interface.pushed) for interface in classes], bool)
        pushed = next((interface.pushed for interface in classes if interface.pushed), ())
        self.num_own = sum(state is None for state in pushed)
        own = iter(range(self.num_states, self.num_states + self.num_own))
        self.pushed_at = [next(own) if state is None else state for state in pushed]
        self.reads = [[(port, port.slot if isinstance(port, Gather) else -1, isinstance(port, GatherSum))
                       for port in interface.ports] for interface in classes]
        self.slots = np.array(list(dict.fromkeys((c, slot) for c, reads in enumerate(self.reads) for _, slot, _ in reads
                                                 if slot >= 0)), np.int64).reshape(-1, 2)
        self.answered = [np.array([(*_kind_of(port), c) for c, interface in enumerate(classes)
                                   for port in interface.answered if port.state == k], np.int64).reshape(-1, 3)
                         for k in range(self.num_states)]


def _kind_of(port: Port) -> tuple[int, int]:
    if isinstance(port, Gather):
        return _SLOT, port.slot
    return (_SUM if isinstance(port, GatherSum) else _ALL), 0


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


class _Numbered(NamedTuple):
    """Vertices numbered class after class; what belongs to a class stands behind that of the classes before it.

    Attributes
    ----------
    vertices, position : the vertex of each number, and the number of each vertex
    firsts : the first number of each class, and behind the last one
    indptr, children : the edges of each class's vertices, counted from 0 in each class, and the rows of their children
    first_edges : the first edge of each class, and behind the last one
    slot_rows, first_slots : the rows that are read by number (see `Interfaces.slots`), and where each begins
    frames, first_frames : the frames of each class (see `frames_of`), and where they begin
    bounds : where launches begin and end, as numbers inside the class; as many a class as it has frames
    order : class and launch, in the order of the run
    rows : where launches begin and end, as rows; the initial state is a launch of its own
    pushing : the vertices that push, ascending
    own_rows, state_rows : their rows in buffers of their own, and in those of states
    rank : for each number its place among these
    first_own : the first row of each class in buffers of their own
    """

    vertices: IntArray
    position: IntArray
    firsts: IntArray
    indptr: IntArray
    children: IntArray
    first_edges: IntArray
    slot_rows: IntArray
    first_slots: IntArray
    frames: IntArray
    first_frames: IntArray
    bounds: IntArray
    order: IntArray
    rows: IntArray
    pushing: IntArray
    own_rows: IntArray
    state_rows: IntArray
    rank: IntArray
    first_own: IntArray


def lay_out_graphs(graph: InputGraph, schedule: Schedule, class_of: IntArray, interfaces: Interfaces,
                   row_specs: list[Spec], sources: IntArray | None = None) -> GraphLayout:
    """Lay out a schedule.

    Parameters
    ----------
    graph, schedule
    class_of : int64 array, the class of each vertex
    interfaces : of the classes
    row_specs : of each buffer
    sources : int64 array, the row of each vertex in the pulled inputs; None: its number
    """
    made = _Numbered(*_number(schedule.order, schedule.depth, class_of, graph.child_indptr, graph.child_index,
                              interfaces.pushes, interfaces.slots))
    firsts, edges, frames, first_own, slots = (array.tolist() for array in (
        made.firsts, made.first_edges, made.first_frames, made.first_own, made.first_slots))
    slot_rows = (RowIndex(made.slot_rows[begin:end]) for begin, end in zip(slots, slots[1:]))
    messages, bases = _messages(made, interfaces)
    external = made.vertices if sources is None else sources[made.vertices]
    parts = []
    for c, interface in enumerate(interfaces.classes):
        mine = slice(firsts[c], firsts[c + 1])
        indptr = made.indptr[firsts[c] + c:firsts[c + 1] + c + 1]
        children = made.children[edges[c]:edges[c + 1]]
        of_class = slice(frames[c], frames[c + 1])
        states = [Place(k, 1 + firsts[c]) for k in range(interface.num_states)]
        pushed = [Place(at, first_own[c]) if at >= interfaces.num_states else states[at]
                  for at in (interfaces.pushed_at if interface.pushed else ())]
        parts.append(ClassLayout(
            made.frames[of_class], _reads(interfaces.reads[c], children, slot_rows), states + pushed,
            {port: Place(port.state, next(bases[port.state])) for port in interface.answered},
            RowIndex(external[mine]),
            Segments(indptr, made.bounds[of_class]) if len(children) or interface.ports else None,
            pushed=RowIndex(made.rank[mine])))
    layout = Layout(parts, made.order,
                    [graph.num_vertices + 1] * interfaces.num_states + [len(made.pushing)] * interfaces.num_own,
                    messages + [no_messages()] * interfaces.num_own, row_specs)
    pushed_rows = [(at, made.own_rows if at >= interfaces.num_states else made.state_rows)
                   for at in interfaces.pushed_at]
    return GraphLayout(layout, made.position, made.pushing, pushed_rows)


def _reads(ports: Sequence[tuple[Port, int, bool]], children: IntArray,
           slot_rows: Iterator[RowIndex]) -> dict[Any, Read]:
    """What a class reads; several states of one child stand in the same rows."""
    rows: dict[int, RowIndex] = {}
    found: dict[Any, Read] = {}
    for port, slot, summed in ports:
        if slot not in rows:
            rows[slot] = next(slot_rows) if slot >= 0 else RowIndex(children)
        found[port] = Read(port.state, rows[slot], 1, slot < 0, summed)
    return found


def _messages(made: _Numbered, interfaces: Interfaces) -> tuple[list[Messages], list[Any]]:
    """The messages of each state, and where those of its answered ports begin, one port after the other."""
    found: dict[bytes, tuple[Messages, list[int]]] = {}     # states that are read alike are answered alike
    states = []
    for ports in interfaces.answered:
        key = ports.tobytes()
        if key not in found:
            bases, indptr, pull = _pull(ports, made.firsts, made.first_edges, made.indptr, made.children)
            *begin, total = bases.tolist()
            found[key] = Messages(total, RowIndex(pull), Segments(indptr, made.rows)), begin
        states.append(found[key])
    return [messages for messages, _ in states], [iter(begin) for _, begin in states]


# ---- compiled walks --------------------------------------------------------------------------------------------

@compiled
def _number(run_order, depth, class_of, child_indptr, child_index, pushes, slots):  # type: ignore[no-untyped-def]
    """See _Numbered."""
    n, num_classes = len(run_order), len(pushes)
    firsts, first_own = np.zeros(num_classes + 1, np.int64), np.zeros(num_classes + 1, np.int64)
    for v in run_order:
        firsts[class_of[v] + 1] += 1
    for c in range(num_classes):
        first_own[c + 1] = first_own[c] + (firsts[c + 1] if pushes[c] else 0)
        firsts[c + 1] += firsts[c]
    vertices, position = np.empty(n, np.int64), np.empty(n, np.int64)
    free = firsts[:-1].copy()
    for v in run_order:
        at = free[class_of[v]]
        vertices[at], position[v] = v, at
        free[class_of[v]] += 1

    indptr, children = np.zeros(n + num_classes, np.int64), np.empty(len(child_index), np.int64)
    first_edges, first_frames = np.zeros(num_classes + 1, np.int64), np.zeros(num_classes + 1, np.int64)
    filled = num_launches = 0
    for c in range(num_classes):
        before = -1
        for at in range(firsts[c], firsts[c + 1]):
            v = vertices[at]
            for e in range(child_indptr[v], child_indptr[v + 1]):
                children[filled] = position[child_index[e]] + 1
                filled += 1
            indptr[at + c + 1] = filled - first_edges[c]
            if depth[v] != before:
                before = depth[v]
                num_launches += 1
        first_edges[c + 1] = filled
        first_frames[c + 1] = num_launches + c + 1

    first_slots = np.zeros(len(slots) + 1, np.int64)
    for i in range(len(slots)):
        c = slots[i, 0]
        first_slots[i + 1] = first_slots[i] + firsts[c + 1] - firsts[c]
    slot_rows = np.zeros(first_slots[-1], np.int64)         # the initial state where a child is missing
    for i in range(len(slots)):
        c, slot = slots[i]
        for at in range(firsts[c], firsts[c + 1]):
            if indptr[at + c] + slot < indptr[at + c + 1]:
                slot_rows[first_slots[i] + at - firsts[c]] = children[first_edges[c] + indptr[at + c] + slot]

    frames, bounds = np.zeros((num_launches + num_classes, 4), np.int64), np.zeros(num_launches + num_classes, np.int64)
    rows, launch_depth = np.zeros(num_launches + 2, np.int64), np.empty(num_launches + num_classes, np.int64)
    k = launch = 0
    for c in range(num_classes):
        mine, whole = indptr[firsts[c] + c:], first_frames[c]
        frames[whole, 1], frames[whole, 3] = firsts[c + 1] - firsts[c], first_edges[c + 1] - first_edges[c]
        k, before = whole, -1
        for at in range(firsts[c], firsts[c + 1]):
            start = at - firsts[c]
            if depth[vertices[at]] != before:
                before = depth[vertices[at]]
                bounds[k] = start
                k += 1
                launch += 1
                frames[k, 0], frames[k, 2] = start, mine[start]
                launch_depth[k], rows[launch] = before, 1 + at
            frames[k, 1], frames[k, 3] = start + 1, mine[start + 1]
        bounds[k] = firsts[c + 1] - firsts[c]
    rows[num_launches + 1] = n + 1

    order = np.empty((num_launches, 2), np.int64)
    ready, filled, now = first_frames[:-1] + 1, 0, 0
    while filled < num_launches:
        for c in range(num_classes):
            if ready[c] < first_frames[c + 1] and launch_depth[ready[c]] == now:
                order[filled, 0], order[filled, 1] = c, ready[c] - first_frames[c] - 1
                filled += 1
                ready[c] += 1
        now += 1

    pushing, own_rows = np.empty(first_own[-1], np.int64), np.empty(first_own[-1], np.int64)
    state_rows, rank = np.empty(first_own[-1], np.int64), np.full(n, -1, np.int64)
    filled = 0
    for v in range(n):
        c, at = class_of[v], position[v]
        if pushes[c]:
            pushing[filled], own_rows[filled] = v, first_own[c] + at - firsts[c]
            state_rows[filled], rank[at] = at + 1, filled
            filled += 1
    return (vertices, position, firsts, indptr, children, first_edges, slot_rows, first_slots, frames, first_frames,
            bounds, order, rows, pushing, own_rows, state_rows, rank, first_own)


@compiled
def _pull(ports, firsts, first_edges, indptr, children):  # type: ignore[no-untyped-def]
    """Where the messages of each port begin and the last ones end, and which of them each row pulls.

    All children of a vertex pull the same message of a sum, and each its own of the other kinds.
    """
    bases = np.empty(len(ports) + 1, np.int64)
    num_rows = firsts[-1] + 1
    bounds, free = np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int64)
    pull = free
    for filling in (False, True):               # messages are counted, then noted
        base = 1
        for i in range(len(ports)):
            kind, slot, c = ports[i]
            bases[i] = base
            for at in range(firsts[c], firsts[c + 1]):
                begin, end, message = indptr[at + c], indptr[at + c + 1], base + at - firsts[c]
                if kind == _SLOT:
                    row = children[first_edges[c] + begin + slot] if begin + slot < end else 0
                    if filling:
                        pull[free[row]] = message
                        free[row] += 1
                    else:
                        bounds[row + 1] += 1
                    continue
                for e in range(begin, end):
                    row = children[first_edges[c] + e]
                    if filling:
                        pull[free[row]] = base + e if kind == _ALL else message
                        free[row] += 1
                    else:
                        bounds[row + 1] += 1
            base += first_edges[c + 1] - first_edges[c] if kind == _ALL else firsts[c + 1] - firsts[c]
        bases[-1] = base
        if not filling:
            for r in range(num_rows):
                bounds[r + 1] += bounds[r]
            free, pull = bounds[:-1].copy(), np.empty(bounds[-1], np.int64)
    return bases, bounds, pull
