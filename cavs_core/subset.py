"""The part of a layout that takes part in a backward pass. Pure: arrays in, arrays out; no device, no MXNet.

A pass may begin at some results of a run only. What does not lead to them takes no part in it: a gradient of zero would
not do, because zero times infinity is no zero, and some operators take no notice of the gradient that comes to them. So
the pass has a layout of its own. Positions of a class to whose outputs the same gradients come are a class there, with
the plan of just these gradients; all other positions are absent. Rows that the pass reads are numbered anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .graph import IntArray
from .layout import (
    ClassLayout,
    Layout,
    Place,
    Read,
    RowIndex,
    Segments,
    answer_reads,
    frames_of,
    offsets_of,
)
from .plan import ClassPlan

__all__ = ["Begun", "Origin", "Subset", "begins_everywhere", "begun_from", "stretches", "subset_of"]


class Begun(NamedTuple):
    """To which of the outputs of a class gradients come.

    Attributes
    ----------
    patterns : for each combination that occurs, whether one comes to each output
    which : int64 array, the pattern of each position; -1: no gradient flows there
    """

    patterns: Sequence[tuple[bool, ...]]
    which: IntArray


class Origin(NamedTuple):
    """Where the positions of a class, and their edges, are in the whole layout."""

    number: int
    positions: IntArray
    edges: IntArray


class Subset(NamedTuple):
    """A layout of its own, for one backward pass.

    Attributes
    ----------
    layout, plans : as a run takes them
    origins : of each class
    rows : of each buffer, the row of the whole that each row is
    number : of each buffer and row of the whole, its row; -1 where it is absent
    heads : where the messages of each head begin
    """

    layout: Layout
    plans: list[ClassPlan]
    origins: list[Origin]
    rows: list[IntArray]
    number: list[IntArray]
    heads: list[int]


def begins_everywhere(plans: Sequence[ClassPlan], begun: Iterable[tuple[int, tuple[bool, ...]]]) -> bool:
    """Whether a pass in which these (class, pattern) occur is that of the whole layout."""
    return all(plans[c].begun_at(pattern) is plans[c] for c, pattern in begun)


def subset_of(layout: Layout, plans: Sequence[ClassPlan], begun: Sequence[Begun],
              heads: Sequence[tuple[int, IntArray]] = (), kept: Sequence[tuple[int, IntArray]] = ()) -> Subset:
    """The part of a layout that takes part.

    Parameters
    ----------
    begun : of each class
    heads : (buffer, rows) that gradients come to from outside the run
    kept : (buffer, rows) that the caller asks about afterwards, whether or not they are read; rows that stand one
        behind the other stay so, unless the layout writes them
    """
    free = _Rows(layout)
    classes = []
    for c, (plan, whole, (patterns, which)) in enumerate(zip(plans, layout.classes, begun)):
        for k, pattern in enumerate(patterns):
            variant = plan.begun_at(pattern)
            if variant.grads:
                classes.append(_Class(c, variant, whole, np.flatnonzero(which == k)))
    for cls in classes:
        cls.write(free)
    for cls in classes:
        for source, read in cls.whole.reads.items():
            free.need(read.buffer, cls.rows_of(source))
    for buffer, rows in (*heads, *kept):
        free.need(buffer, rows)
    number = free.numbers()
    for cls in classes:
        cls.read(number)
    parts, sizes = [cls.layout() for cls in classes], [len(rows) for rows in free.rows]
    messages, first = answer_reads([cls.plan.grads for cls in classes], parts,
                                   [(b, number[b][rows]) for b, rows in heads], sizes,
                                   [np.array([0, size]) for size in sizes])
    of_class: dict[int, list[int]] = {}
    for new, cls in enumerate(classes):
        of_class.setdefault(cls.origin.number, []).append(new)
    order = [(new, classes[new].launch_of[k]) for c, k in layout.order.tolist() for new in of_class.get(c, ())
             if classes[new].launch_of[k] >= 0]
    round_of = None
    if layout.round_of is not None:     # (without those that no class is left of)
        round_of = np.unique(layout.round_of[[cls.origin.number for cls in classes]], return_inverse=True)[1]
    made = Layout(parts, np.array(order, np.int64).reshape(-1, 2), sizes, messages, layout.row_specs, round_of)
    return Subset(made, [cls.plan for cls in classes], [cls.origin for cls in classes], free.rows, number, first)


def begun_from(layout: Layout, plans: Sequence[ClassPlan], pushed: Sequence[bool]) -> list[Begun] | None:
    """To which outputs gradients come where a pass begins at pushed values; None: it is the pass of the whole layout.

    Parameters
    ----------
    pushed : for each pushed value, whether the pass begins there
    """
    begins = [(*[False] * plan.vertex.num_states, *(pushed if plan.vertex.pushed else ())) for plan in plans]
    busy = [c for c, part in enumerate(layout.classes) if part.has_rows]
    if all(plans[c].vertex.pushed and plans[c].begun_at(begins[c]) is plans[c] for c in busy):
        return None                     # whether or not a state is read as well
    # If it is, gradients come to the rows that messages answer, and nothing is found that does not take part.
    if begins_everywhere(plans, [(c, pattern) for c in busy for pattern in _answered(layout, c, begins[c])]):
        return None
    gets = [np.zeros(size, bool) for size in layout.buffer_rows]
    known: list[dict[tuple[bool, ...], int]] = [{} for _ in plans]
    which = [np.full(part.whole.num_rows, -1, np.int64) for part in layout.classes]
    for _, order in layout.backward_rounds:
        for c, launch in order:
            plan, part = plans[c], layout.classes[c]
            start, stop = part.launches[launch][:2]
            outputs = np.empty((stop - start, len(begins[c])), bool)
            for k, (begin, place) in enumerate(zip(begins[c], part.writes)):
                first = place.base + start * place.width
                own = gets[place.buffer][first:first + len(outputs) * place.width]
                outputs[:, k] = begin or (k < plan.vertex.num_states and own.reshape(len(outputs), -1).any(axis=1))
            patterns, mine = np.unique(outputs, axis=0, return_inverse=True)
            for k, pattern in enumerate(map(tuple, patterns.tolist())):
                positions = start + np.flatnonzero(mine.reshape(-1) == k)
                which[c][positions] = known[c].setdefault(pattern, len(known[c]))
                for source in plan.begun_at(pattern).grads:
                    if source in part.reads:
                        gets[part.reads[source].buffer][_rows_read(part, source, positions)] = True
    return None if begins_everywhere(plans, [(c, pattern) for c in busy for pattern in known[c]]) else [
        Begun(list(patterns), rows) for patterns, rows in zip(known, which)]


def _answered(layout: Layout, c: int, begins: Sequence[bool]) -> list[tuple[bool, ...]]:
    """To which outputs of a class gradients come, each combination that occurs, if all messages are sent."""
    part = layout.classes[c]
    number = np.zeros(part.whole.num_rows, np.int64)        # of each position: one bit for each output
    for k, (begin, place) in enumerate(zip(begins, part.writes)):
        number |= int(begin) << k
        if not begin and layout.messages:
            bounds = layout.messages[place.buffer].segments.indptr
            if len(bounds) > 1:         # (else no class reads the buffer)
                rows = place.base + np.arange(0, len(number) * place.width + 1, place.width)
                number |= (bounds[rows[1:]] > bounds[rows[:-1]]).astype(np.int64) << k
    return [tuple(bool(bits >> k & 1) for k in range(len(begins))) for bits in np.unique(number).tolist()]


def _rows_read(part: ClassLayout, source: Any, positions: IntArray) -> IntArray:
    """The rows that some positions of a class read."""
    read = part.reads[source]
    if not read.per_edge:
        return read.rows.rows[stretches(positions * read.width, read.width)]
    return read.rows.rows[_edges_of(part, positions)]


def _edges_of(part: ClassLayout, positions: IntArray) -> IntArray:
    """The edges of some positions of a class."""
    assert part.edges is not None
    bounds = part.edges.indptr
    return stretches(bounds[positions], bounds[positions + 1] - bounds[positions])


class _Rows:
    """The rows of all buffers that are needed: first those that classes write, then what else is read."""

    def __init__(self, layout: Layout):
        self._sizes = layout.buffer_rows
        self._written: list[list[IntArray]] = [[] for _ in layout.buffer_rows]
        self._needed: list[list[IntArray]] = [[] for _ in layout.buffer_rows]
        self.count = [0] * len(layout.buffer_rows)
        self.rows: list[IntArray] = []

    def add(self, buffer: int, rows: IntArray) -> int:
        """Rows that are written; where they begin."""
        first = self.count[buffer]
        self._written[buffer].append(rows)
        self.count[buffer] += len(rows)
        return first

    def need(self, buffer: int, rows: IntArray) -> None:
        self._needed[buffer].append(rows)

    def numbers(self) -> list[IntArray]:
        """Of each buffer and row of the whole, its row; -1 where it is absent."""
        found = []
        for size, written, needed in zip(self._sizes, self._written, self._needed):
            rows, number = np.concatenate([_NOTHING, *written]), np.full(size, -1, np.int64)
            number[rows] = np.arange(len(rows))
            is_needed = np.zeros(size, bool)
            is_needed[np.concatenate([_NOTHING, *needed])] = True
            others = np.flatnonzero(is_needed & (number < 0))
            number[others] = np.arange(len(rows), len(rows) + len(others))
            self.rows.append(np.concatenate([rows, others]))
            found.append(number)
        return found


class _Class:
    """One class of the part: some positions of a class of the whole."""

    def __init__(self, number: int, plan: ClassPlan, whole: ClassLayout, positions: IntArray):
        self.plan, self.whole, self.positions = plan, whole, positions
        bounds = np.searchsorted(positions, np.append(whole.frames[1:, 0], whole.frames[0, 1]))
        sizes = np.diff(bounds)
        self.launch_of = np.where(sizes > 0, np.cumsum(sizes > 0) - 1, -1).tolist()
        self.bounds = offsets_of(sizes[sizes > 0])
        edges, self.edges = _NOTHING, None
        if whole.edges is not None:
            edges = _edges_of(whole, positions)
            self.edges = Segments(offsets_of(np.diff(whole.edges.indptr)[positions]), self.bounds)
        self.origin = Origin(number, positions, edges)
        self.reads: dict[Any, Read] = {}
        self.writes: list[Place] = []

    def write(self, free: _Rows) -> None:
        """Give the outputs rows; equal outputs have equal places."""
        places: dict[Place, Place] = {}
        for place in self.whole.writes:
            if place not in places:
                rows = stretches(place.base + self.positions * place.width, place.width)
                places[place] = Place(place.buffer, free.add(place.buffer, rows), place.width)
            self.writes.append(places[place])

    def rows_of(self, source: Any) -> IntArray:
        """The rows of the whole that a read takes."""
        return _rows_read(self.whole, source, self.positions)

    def read(self, number: Sequence[IntArray]) -> None:
        for source, read in self.whole.reads.items():
            self.reads[source] = read._replace(rows=RowIndex(number[read.buffer][self.rows_of(source)]))

    def layout(self) -> ClassLayout:
        whole = self.whole
        external, pushed = (rows if rows is None or not len(rows.rows) else RowIndex(rows.rows[self.positions])
                            for rows in (whole.external, whole.pushed))
        assert external is not None
        return ClassLayout(frames_of(self.bounds, None if self.edges is None else self.edges.indptr), self.reads,
                           self.writes, {}, external, self.edges, whole.names, pushed)


_NOTHING = np.zeros(0, np.int64)


def stretches(starts: IntArray, widths: Any) -> IntArray:
    """starts[0], starts[0] + 1, .. (widths[0] of them), starts[1], ..; `widths` may be one number for all."""
    if isinstance(widths, int):
        return starts if widths == 1 else (starts[:, None] + np.arange(widths)).reshape(-1)
    ends = np.cumsum(widths)
    made: IntArray = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - widths), widths)
    return made
