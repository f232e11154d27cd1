"""Rows and buffers for a schedule: where every value lives, and which rows each launch reads.

Vertices that run the same program are a class; a class's vertices are numbered by position, in the order in which
they run, so that a launch is a range of positions. What vertices send to each other lives in buffers; the value of the
vertex at position p stands in row base + p.

Gradients travel by pulling. What a reader sends back for one of its reads is a row of the buffer's messages (row 0:
zeros), and the vertex that was read adds up the rows of all its readers. So every row has one writer, on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from .compiling import compiled
from .graph import IntArray
from .program import Spec

__all__ = ["Frame", "Place", "Read", "RowIndex", "Segments", "Messages", "ClassLayout", "Layout", "answer_reads",
           "frames_of", "no_messages", "offsets_of", "plan_messages"]


class Frame(NamedTuple):
    """The rows that one step runs over: a launch, or all launches of a class."""

    start: int              # positions start:stop
    stop: int
    edge_start: int = 0     # edges (of the children of those vertices) edge_start:edge_stop
    edge_stop: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def num_edges(self) -> int:
        return self.edge_stop - self.edge_start


class Place(NamedTuple):
    """Where a value of a class is written: position p (or edge e) in `width` rows from base + p * width on."""

    buffer: int
    base: int
    width: int = 1


class RowIndex:
    """Rows to read, entry by entry; a contiguous stretch is a range, which costs no copy."""

    def __init__(self, rows: IntArray):
        self.rows = rows

    @cached_property
    def _breaks(self) -> IntArray:
        """Invariant: rows[i:j] is contiguous if no break lies strictly between i and j."""
        return np.flatnonzero(np.diff(self.rows) != 1) + 1

    def range_of(self, start: int, stop: int) -> tuple[int, int] | None:
        """The rows of entries start:stop as a range (first, last + 1), or None if they are scattered."""
        k = int(np.searchsorted(self._breaks, start, side="right"))
        if k < len(self._breaks) and self._breaks[k] < stop:
            return None
        first = int(self.rows[start])
        return first, first + stop - start


class Segments:
    """Entries grouped by the row that they belong to.

    Parameters
    ----------
    indptr : int64 array, shape (rows + 1,)
        The entries of row r are indptr[r]:indptr[r + 1].
    offsets : int64 array
        Where launches begin and end, as rows: `in_launch` counts rows from the start of their launch.
    """

    def __init__(self, indptr: IntArray, offsets: IntArray):
        self.indptr, self._offsets = indptr, offsets

    # Made when somebody asks: the native backend needs only the bounds.

    @cached_property
    def row(self) -> IntArray:
        """The row of each entry."""
        counts = np.diff(self.indptr)
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def in_launch(self) -> IntArray:
        """The row of each entry, counted from the start of its launch."""
        launch_start = np.repeat(self._offsets[:-1], np.diff(self._offsets))
        return self.row - launch_start[self.row] if len(self.row) else self.row

    @cached_property
    def _ends(self) -> dict[int, int]:
        return dict(zip(self._offsets[:-1].tolist(), self._offsets[1:].tolist()))

    @cached_property
    def _odd(self) -> IntArray:
        return np.concatenate([[0], np.cumsum(np.diff(self.indptr) != 1)])

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        return int(self.indptr[start]), int(self.indptr[stop])

    def is_launch(self, start: int, stop: int) -> bool:
        """Whether `in_launch` counts the rows start:stop from `start`."""
        return self._ends.get(start, -1) >= stop

    def one_each(self, start: int, stop: int) -> bool:
        """Whether every row of start:stop has exactly one entry."""
        return bool(self._odd[stop] == self._odd[start])


class Read(NamedTuple):
    """How a class reads a buffer: a row for each position or each edge, or the sum of each position's edges."""

    buffer: int
    rows: RowIndex
    width: int = 1          # rows that belong to one position
    per_edge: bool = False
    summed: bool = False


# A layout is made in every run: what follows is not frozen, which would make it three times as dear.

@dataclass(eq=False)
class Messages:
    """The backward side of one buffer: which messages each row pulls."""

    num_rows: int                       # messages, the zero row included
    pull: RowIndex                      # messages to add up, row after row
    segments: Segments

    @cached_property
    def single(self) -> RowIndex | None:
        """One message a row (the zero row where nobody reads), if nobody has two readers."""
        counts = np.diff(self.segments.indptr)
        if counts.max(initial=0) > 1:
            return None
        rows = np.zeros(len(counts), np.int64)
        rows[counts == 1] = self.pull.rows
        return RowIndex(rows)


@dataclass(eq=False)
class ClassLayout:
    """One class: its frames, what it reads, and where its outputs and messages go."""

    frames: IntArray                    # see `frames_of`
    reads: dict[Any, Read]              # source of a program input -> rows
    writes: list[Place]                 # of each program output; equal outputs have equal places
    sends: dict[Any, Place]             # source of a program input -> where its gradient goes
    external: RowIndex                  # position -> row of pulled inputs
    edges: Segments | None = None       # edges grouped by position, for reductions over children
    names: dict[Any, Any] = field(default_factory=dict)     # source of a shared input -> its name in the whole run
    pushed: RowIndex | None = None      # position -> row of the gradients of outputs; None: it has no such outputs

    @property
    def has_rows(self) -> bool:
        return len(self.frames) > 1

    @cached_property
    def whole(self) -> Frame:
        return Frame(*self.frames[0].tolist())

    @cached_property
    def launches(self) -> list[Frame]:
        return [Frame(*frame) for frame in self.frames[1:].tolist()]


@dataclass(eq=False)
class Layout:
    """Everything about a schedule that a run needs, as arrays."""

    classes: list[ClassLayout]
    order: IntArray                     # class and launch, a row each, in the order of the run
    buffer_rows: list[int]
    messages: list[Messages]            # one per buffer
    row_specs: list[Spec] = field(default_factory=list)     # of each buffer
    round_of: IntArray | None = None    # of each class; None: there is one round

    @cached_property
    def rounds(self) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Round after round: its classes, and its part of `order`. A round begins when the one before it has ended."""
        round_of = [0] * len(self.classes) if self.round_of is None else self.round_of.tolist()
        found: list[tuple[list[int], list[tuple[int, int]]]] = [([], []) for _ in range(max(round_of, default=-1) + 1)]
        for c, number in enumerate(round_of):
            found[number][0].append(c)
        for c, k in self.order.tolist():
            found[round_of[c]][1].append((c, k))
        return found

    @property
    def backward_rounds(self) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The same for a backward pass: all from the last to the first."""
        return [(classes, order[::-1]) for classes, order in reversed(self.rounds)]

    @property
    def index_bytes(self) -> int:
        """What the numbers of rows take: reads, edges and messages."""
        arrays = [read.rows.rows for part in self.classes for read in part.reads.values()]
        arrays += [rows.rows for part in self.classes for rows in (part.external, part.pushed) if rows is not None]
        arrays += [part.edges.indptr for part in self.classes if part.edges is not None]
        arrays += [a for m in self.messages for a in (m.pull.rows, m.segments.indptr)]
        edges = 8 * sum(part.whole.num_edges for part in self.classes)      # the row of each, which may not exist yet
        return edges + sum(a.nbytes for a in {id(a): a for a in arrays}.values())


def offsets_of(counts: IntArray) -> IntArray:
    """Where each of some stretches begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.add.accumulate(counts, out=offsets[1:])
    return offsets


def frames_of(bounds: IntArray, edges: IntArray | None = None) -> IntArray:
    """The frame of a class and of each of its launches, a Frame a row.

    Parameters
    ----------
    bounds : int64 array, where launches begin and end
    edges : int64 array, where the edges of each row begin and the last ones end; None: there are none
    """
    return _frames_of(bounds, _NOTHING if edges is None else edges)


_NOTHING = np.zeros(0, np.int64)


@compiled
def _frames_of(bounds, edges):  # type: ignore[no-untyped-def]
    frames = np.zeros((len(bounds), 4), np.int64)
    for k in range(len(bounds)):
        start, stop = (bounds[k - 1], bounds[k]) if k else (0, bounds[-1])
        frames[k, 0], frames[k, 1] = start, stop
        if len(edges):
            frames[k, 2], frames[k, 3] = edges[start], edges[stop]
    return frames


def plan_messages(num_rows: int, read: Sequence[IntArray], sent: Sequence[IntArray] | None, num_messages: int,
                  offsets: IntArray) -> Messages:
    """Group messages by the row that they answer: message sent[k][i] answers a read of row read[k][i].

    Where nothing is said of `sent`, messages are 1, 2, .. in the order of the reads.
    """
    rows = np.concatenate([*read, _NOTHING])
    indptr, by_row = _group_by_row(rows, _NOTHING if sent is None else np.concatenate([*sent, _NOTHING]), num_rows)
    return Messages(num_messages, RowIndex(by_row), Segments(indptr, offsets))


def answer_reads(answered: Sequence[Iterable[Any]], parts: Sequence[ClassLayout],
                 heads: Sequence[tuple[int, IntArray]], sizes: Sequence[int],
                 offsets: Sequence[IntArray]) -> tuple[list[Messages], list[int]]:
    """Who answers whom: the messages of each buffer, first those of readers, then those of heads.

    What a class sends is noted in its `sends`.

    Parameters
    ----------
    answered : of each class, the sources that may send a gradient
    heads : (buffer, rows) that gradients come to from outside the run
    sizes, offsets : of each buffer: its rows, and where launches begin and end among them

    Returns
    -------
    the messages, and where those of each head begin
    """
    read: list[list[IntArray]] = [[] for _ in sizes]
    sent: list[list[tuple[int, IntArray | None]]] = [[] for _ in sizes]
    free = [1] * len(sizes)

    def answer(buffer: int, rows: IntArray, messages: IntArray | None, count: int) -> int:
        first = free[buffer]
        read[buffer].append(rows)
        sent[buffer].append((first, messages))
        free[buffer] += count
        return first

    for sources, part in zip(answered, parts):
        for source in sources:
            if source in part.reads:
                taken = part.reads[source]
                rows, messages, count = taken.rows.rows, None, len(taken.rows.rows)
                if taken.summed and part.edges is not None:     # answered once: one message for all rows of a position
                    messages, count = part.edges.row, part.whole.num_rows
                part.sends[source] = Place(taken.buffer, answer(taken.buffer, rows, messages, count), taken.width)
    begins = [answer(buffer, rows, None, len(rows)) for buffer, rows in heads]

    def numbers(b: int) -> list[IntArray] | None:
        if all(messages is None for _, messages in sent[b]):    # (what answers then stands one behind the other)
            return None
        return [first + (np.arange(len(rows)) if messages is None else messages)
                for (first, messages), rows in zip(sent[b], read[b])]

    return [plan_messages(size, read[b], numbers(b), free[b], offsets[b]) if size else no_messages()
            for b, size in enumerate(sizes)], begins


@cache
def no_messages() -> Messages:
    """Those of a buffer without rows."""
    return plan_messages(0, [], None, 1, np.zeros(1, np.int64))


@compiled
def _group_by_row(rows, messages, num_rows):  # type: ignore[no-untyped-def]
    """Where the messages of each row begin, and the messages, row after row in their order."""
    indptr = np.zeros(num_rows + 1, np.int64)
    for r in rows:
        indptr[r + 1] += 1
    for r in range(num_rows):
        indptr[r + 1] += indptr[r]
    free = indptr[:-1].copy()
    by_row = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        by_row[free[rows[i]]] = messages[i] if len(messages) else i + 1
        free[rows[i]] += 1
    return indptr, by_row
