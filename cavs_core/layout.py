"""Rows and buffers for a schedule: where every vertex lives, and which rows each launch reads.

Vertices are numbered by position (schedule order), so that a launch is a range of positions. Row 0 of a state
buffer is the initial state; the vertex at position p owns row p + 1. Gradients travel by pulling: what a reader
sends back for one of its gathers stands in a row of the state's message buffer (row 0: zeros), and the vertex that
was read adds up the rows of all its readers. So every row has one writer, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Union

import numpy as np

from .graph import InputGraph, IntArray
from .program import Gather, GatherAll, GatherSum
from .schedule import Schedule

__all__ = ["Frame", "RowIndex", "Segments", "Messages", "Layout", "plan_layout"]

Port = Union[Gather, GatherSum, GatherAll]


@dataclass(frozen=True)
class Frame:
    """The rows that one step runs over: a launch, or all launches of a class of vertices."""

    start: int              # positions start:stop
    stop: int
    edge_start: int         # edges (of the children of those vertices) edge_start:edge_stop
    edge_stop: int
    is_launch: bool = True

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_edges(self) -> int:
        return self.edge_stop - self.edge_start


class RowIndex:
    """Rows to read, entry by entry; a contiguous stretch is a range, which costs no copy."""

    def __init__(self, rows: IntArray):
        self.rows = rows
        # Invariant: rows[i:j] is contiguous if no break lies strictly between i and j.
        self._breaks = np.flatnonzero(np.diff(rows) != 1) + 1

    def range_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """The rows of entries start:stop as a range (first, last + 1), or None if they are scattered."""
        k = int(np.searchsorted(self._breaks, start, side="right"))
        if k < len(self._breaks) and self._breaks[k] < stop:
            return None
        first = int(self.rows[start])
        return first, first + stop - start


class Segments:
    """Entries grouped by the position that they belong to.

    Parameters
    ----------
    indptr : int64 array, shape (positions + 1,)
        The entries of position p are indptr[p]:indptr[p + 1].
    offsets : int64 array
        Launch boundaries, as positions: `in_launch` counts positions from the start of their launch.
    """

    def __init__(self, indptr: IntArray, offsets: IntArray):
        self.indptr = indptr
        counts = np.diff(indptr)
        self.position = np.repeat(np.arange(len(counts)), counts)
        launch_start = np.repeat(offsets[:-1], np.diff(offsets))
        self.in_launch = self.position - launch_start[self.position] if len(self.position) else self.position
        self._odd = np.concatenate([[0], np.cumsum(counts != 1)])

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        return int(self.indptr[start]), int(self.indptr[stop])

    def one_each(self, start: int, stop: int) -> bool:
        """Whether every position of start:stop has exactly one entry."""
        return bool(self._odd[stop] == self._odd[start])


@dataclass(frozen=True)
class Messages:
    """The backward side of one state: the rows of its message buffer, and who pulls which."""

    num_rows: int                       # the zero row included
    base: dict[Port, int]               # the message of position p (GatherAll: edge e) is row base[port] + p (+ e)
    pull: RowIndex                      # rows to add up, position after position
    segments: Segments
    initial: IntArray                   # rows sent to the initial state

    @cached_property
    def single(self) -> RowIndex | None:
        """One row a position (the zero row where nobody reads), if nobody has two readers."""
        counts = np.diff(self.segments.indptr)
        if counts.max(initial=0) > 1:
            return None
        rows = np.zeros(len(counts), np.int64)
        rows[counts == 1] = self.pull.rows
        return RowIndex(rows)


@dataclass(frozen=True)
class Layout:
    """Everything about a schedule that a run needs, as arrays."""

    graph: InputGraph
    schedule: Schedule
    order: RowIndex                     # position -> vertex: rows of outside inputs
    inverse: RowIndex                   # vertex -> position: rows of pushed values
    edge_rows: RowIndex                 # state rows of all children, edge after edge
    edges: Segments                     # edges grouped by position
    slots: dict[int, RowIndex]          # slot -> state row of that child, position after position
    messages: list[Messages]            # one per state
    has_missing: bool                   # whether a vertex that is no leaf reads the initial state

    @property
    def num_vertices(self) -> int:
        return self.graph.num_vertices

    @property
    def num_leaves(self) -> int:
        return int(self.schedule.offsets[1]) if self.schedule.num_launches else 0

    def frame(self, start: int, stop: int, is_launch: bool) -> Frame:
        return Frame(start, stop, *self.edges.range_of(start, stop), is_launch)

    @cached_property
    def launches(self) -> list[Frame]:
        """The frames of launches 1, 2, ..; launch 0 is the leaves."""
        offsets = self.schedule.offsets.tolist()
        return [self.frame(a, b, True) for a, b in zip(offsets[1:-1], offsets[2:])]

    @cached_property
    def leaves(self) -> Frame:
        return self.frame(0, self.num_leaves, True)

    @cached_property
    def inner(self) -> Frame:
        return self.frame(self.num_leaves, self.num_vertices, False)


def plan_layout(graph: InputGraph, schedule: Schedule, ports: Sequence[Port],
                answered: Sequence[Sequence[Port]]) -> Layout:
    """Lay out a schedule.

    Parameters
    ----------
    graph, schedule
    ports : the ways in which a vertex reads its children
    answered : for each state, the ports that send a gradient back; empty lists where no backward pass follows
    """
    order, position = schedule.order, schedule.position
    arity = np.diff(graph.child_indptr)[order]
    edge_indptr = _offsets(arity)
    # child entries of the vertices, in the order of positions
    entry = np.arange(edge_indptr[-1]) + np.repeat(graph.child_indptr[order] - edge_indptr[:-1], arity)
    edge_rows = position[graph.child_index[entry]] + 1 if len(entry) else np.zeros(0, np.int64)
    edges = Segments(edge_indptr, schedule.offsets)

    slots: dict[int, RowIndex] = {}
    for slot in sorted({p.slot for p in ports if isinstance(p, Gather)}):
        rows = np.zeros(graph.num_vertices, np.int64)
        has = arity > slot
        rows[has] = edge_rows[edge_indptr[:-1][has] + slot]
        slots[slot] = RowIndex(rows)

    num_leaves = int(schedule.offsets[1]) if schedule.num_launches else 0
    messages = [_plan_messages(state, num_leaves, edge_rows, edges, slots, schedule.offsets) for state in answered]
    missing = any((index.rows[num_leaves:] == 0).any() for index in slots.values())
    return Layout(graph, schedule, RowIndex(order), RowIndex(position), RowIndex(edge_rows), edges, slots, messages,
                  missing)


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _plan_messages(ports: Sequence[Port], num_leaves: int, edge_rows: IntArray, edges: Segments,
                   slots: dict[int, RowIndex], offsets: IntArray) -> Messages:
    """Number the messages port after port, then group them by the row that was read."""
    num_vertices = len(edges.indptr) - 1
    inner = np.arange(num_leaves, num_vertices)         # leaves read nobody
    base: dict[Port, int] = {}
    read, sent, free = [], [], 1
    for port in ports:
        if isinstance(port, Gather):
            base[port] = free - num_leaves
            read.append(slots[port.slot].rows[num_leaves:])
            sent.append(base[port] + inner)
            free += len(inner)
        elif isinstance(port, GatherSum):
            base[port] = free - num_leaves
            read.append(edge_rows)
            sent.append(base[port] + edges.position)
            free += len(inner)
        else:
            base[port] = free
            read.append(edge_rows)
            sent.append(free + np.arange(len(edge_rows)))
            free += len(edge_rows)
    rows = np.concatenate(read) if read else np.zeros(0, np.int64)
    rows_sent = np.concatenate(sent) if sent else np.zeros(0, np.int64)
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_vertices + 1)
    pulls = rows_sent[by_row]
    num_initial = int(counts[0])
    return Messages(num_rows=free, base=base, pull=RowIndex(pulls[num_initial:]),
                    segments=Segments(_offsets(counts[1:]), offsets), initial=pulls[:num_initial])
