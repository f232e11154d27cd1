"""Recorded calls -> launches, buffers and rows. Pure: arrays in, arrays out; no device, no MXNet.

A token names an operand: a value of a recorded call (0, 1, ..), or an outside array, a leaf (-1, -2, ..).

Rows: a value of shape (.., H) is a stretch of rows of length H in the buffer of all such rows. So a part of it, x[i],
is there already: a call that only names part of a value (an alias) runs nowhere. An operator that treats the first axis
of its operands as independent takes the entries of all calls as its positions, however many each has; its class is
ragged, and a call with L entries occupies L positions. A call of any other class occupies one.

Operands of a call are its columns. A class may take a list of any length: then its last columns (`slots` of them) are
the parts of each element, and a call has their tokens once for every element. If such a column is split, each element
is read by a position of its own: so are rows joined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import offsets_of

from .placing import column_of, place_leaves, place_values, read_rows
from .policies import Problem

__all__ = ["ClassInfo", "Recording", "Scan", "ClassRows", "Grouping", "scan", "group", "problem_of"]


class ClassInfo(NamedTuple):
    """What the analyzer knows of a class.

    Parameters
    ----------
    operand_widths : rows that one position reads of each operand
    split : for each operand, whether it is split over the positions of a ragged call (all False: not ragged)
    output_widths : rows that one position writes of each output
    output_buffers : the buffer of each output
    alias : whether calls only name rows of their first operand
    recorded : whether its calls were made under autograd.record
    owns_wanted : whether it has a parameter of its own whose gradient is asked for
    slots : columns that are the parts of each element of a list, the last ones
    """

    operand_widths: tuple[int, ...]
    split: tuple[bool, ...]
    output_widths: tuple[int, ...]
    output_buffers: tuple[int, ...]
    alias: bool
    recorded: bool
    owns_wanted: bool
    slots: int = 0


@dataclass
class Recording:
    """What was recorded.

    Parameters
    ----------
    classes : list of ClassInfo
    call_class, call_width : int64 arrays, shape (calls,)
        The class of each call in recorded order, and the number of positions that it occupies.
    operands : int64 array
        The tokens of all calls, one after the other.
    leaf_buffers, leaf_widths : int64 arrays, shape (leaves,)
    leaf_wanted : bool array, shape (leaves,)
        Whether a gradient may flow into the leaf.
    heads : int64 array
        Values that somebody outside still holds.
    call_count : int64 array, shape (calls,)
        The length of the list that a call takes; 0 where its class takes none.
    call_first : int64 array, shape (calls,)
        Where its class only names rows: the first of them, in the operand.
    """

    classes: list[ClassInfo]
    call_class: Any
    call_width: Any
    operands: Any
    leaf_buffers: Any
    leaf_widths: Any
    leaf_wanted: Any
    heads: Any
    call_count: Any
    call_first: Any

    def per_class(self, what: Any, dtype: type = np.int64) -> Any:
        return np.array([what(c) for c in self.classes], dtype)

    @cached_property
    def offsets(self) -> tuple[Any, Any]:
        """Where the operands of each call begin, and its values."""
        offsets: tuple[Any, Any] = _offsets(
            self.call_class, self.call_count, self.per_class(lambda c: len(c.operand_widths) - c.slots),
            self.per_class(lambda c: c.slots), self.per_class(lambda c: len(c.output_widths)))
        return offsets

    def of_calls(self, calls: Any, operands: Any, value_of: Any) -> Recording:
        """What is left of it with some of the calls, their operands, and numbers of the values; -1: a value is gone."""
        heads = value_of[self.heads]
        return replace(self, call_class=self.call_class[calls], call_width=self.call_width[calls],
                       call_count=self.call_count[calls], call_first=self.call_first[calls], operands=operands,
                       heads=heads[heads >= 0])


@dataclass
class Scan:
    """What one pass over the calls finds."""

    depth: Any                  # of each call: 0, or 1 + the largest of its operands'
    active: Any                 # whether a gradient may flow through the call
    first: Any                  # per class and operand ("column"): the token of its first call
    same: Any                   # per column: all calls have that token
    pending: Any                # per column: some call's operand is a recorded value
    wanted: Any                 # per column: a gradient may flow into some call's operand
    column_offsets: Any         # columns of class c: column_offsets[c]:column_offsets[c + 1]
    operand_offsets: Any        # operands of call i: operand_offsets[i]:operand_offsets[i + 1]
    value_offsets: Any          # values of call i: value_offsets[i]:value_offsets[i + 1]
    maker: Any                  # of each value: the call that made it
    source: Any                 # of each operand: the call that made what it is (part of), through aliases; -1: a leaf
    output: Any                 # of each operand: which output of that call


def scan(r: Recording) -> Scan:
    """One pass in recorded order: an operand is always recorded before its reader."""
    operand_offsets, value_offsets = r.offsets
    column_offsets, slots = offsets_of(r.per_class(lambda c: len(c.operand_widths))), r.per_class(lambda c: c.slots)
    depth, active, first, same, pending, wanted, maker, source, output = _scan(
        r.call_class, operand_offsets, value_offsets, column_offsets, slots, r.operands,
        r.per_class(lambda c: c.recorded, bool), r.per_class(lambda c: c.owns_wanted, bool),
        r.per_class(lambda c: c.alias, bool), r.leaf_wanted)
    return Scan(depth, active, first, same, pending, wanted, column_offsets, operand_offsets, value_offsets, maker,
                source, output)


@njit(cache=True, nogil=True)
def _offsets(call_class, call_count, fixed, slots, num_outputs):  # type: ignore[no-untyped-def]
    operands, values = np.zeros(len(call_class) + 1, np.int64), np.zeros(len(call_class) + 1, np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        operands[i + 1] = operands[i] + fixed[c] + call_count[i] * slots[c]
        values[i + 1] = values[i] + num_outputs[c]
    return operands, values


@njit(cache=True, nogil=True)
def _scan(call_class, operand_offsets, value_offsets, column_offsets, slots, operands,  # type: ignore[no-untyped-def]
          recorded, owns_wanted, alias, leaf_wanted):
    num_calls, num_columns = len(call_class), column_offsets[-1]
    depth = np.zeros(num_calls, np.int64)
    active = np.zeros(num_calls, np.bool_)
    maker = np.empty(value_offsets[-1], np.int64)
    first = np.zeros(num_columns, np.int64)
    seen = np.zeros(num_columns, np.bool_)
    same = np.ones(num_columns, np.bool_)
    pending = np.zeros(num_columns, np.bool_)
    wanted = np.zeros(num_columns, np.bool_)
    source, output = np.full(len(operands), -1, np.int64), np.zeros(len(operands), np.int64)
    for i in range(num_calls):
        c = call_class[i]
        d, flows = (-1 if alias[c] else 0), owns_wanted[c]      # part of a leaf is as early as the leaf
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            token = operands[j]
            column = column_offsets[c] + column_of(j - operand_offsets[i], column_offsets[c + 1] - column_offsets[c],
                                                 slots[c])
            if not seen[column]:
                seen[column], first[column] = True, token
            elif first[column] != token:
                same[column] = False
            if token >= 0:
                producer = maker[token]
                source[j], output[j] = producer, token - value_offsets[producer]
                if alias[call_class[producer]]:             # part of its first operand; of others it knows the shape
                    whole = operand_offsets[producer]
                    source[j], output[j] = source[whole], output[whole]
                d = max(d, depth[producer] + (0 if alias[c] else 1))
                pending[column] = True
                arrives = active[producer]
            else:
                arrives = leaf_wanted[-1 - token]
            if arrives and recorded[c]:
                flows = True
                wanted[column] = True
        depth[i] = d
        active[i] = flows and recorded[c]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            maker[v] = i
    return depth, active, first, same, pending, wanted, maker, source, output


@dataclass
class ClassRows:
    """One class, grouped: its calls in the order of the run, and the rows that they read and write."""

    calls: Any                          # call numbers, launch after launch
    offsets: Any                        # launch k runs positions offsets[k]:offsets[k + 1]
    call_offsets: Any                   # launch k runs calls[call_offsets[k]:call_offsets[k + 1]]
    depths: Any                         # of each launch: that of its first call
    columns: dict[int, Any]             # operand -> buffer rows, position after position; shared operands are absent
    shared: dict[int, int]              # operand -> leaf
    bases: list[int]                    # of each output: position p writes rows from base + p * width on
    edge_offsets: Any = None            # the elements of position p's list: edge_offsets[p]:edge_offsets[p + 1]


@dataclass
class Grouping:
    """All classes, and the buffers that they share."""

    classes: list[ClassRows]
    order: list[tuple[int, int]]        # (class, launch) in the order of the run
    buffer_rows: list[int]
    leaf_rows: Any                      # first row of each leaf in its buffer, or -1 where it is only shared
    leaf_counts: list[int]              # rows of leaves at the start of each buffer
    value_rows: Any                     # first row of each value in its buffer
    value_buffers: Any
    chunks: list[Any]                   # per buffer: where the rows of one (class, launch) begin and end


def problem_of(r: Recording, s: Scan, launch_us: Any, row_us: Any) -> Problem:
    """What a policy needs to know; launch_us and row_us: float64 arrays, shape (classes,)."""
    call_class, indptr, producers = _waits(r.call_class, r.per_class(lambda c: c.alias, bool), s.operand_offsets,
                                           s.source)
    return Problem(call_class, r.call_width, indptr, producers, launch_us, row_us)


@njit(cache=True, nogil=True)
def _waits(call_class, alias, operand_offsets, source):  # type: ignore[no-untyped-def]
    """The class of each call, -1 for aliases, and the calls that it waits for."""
    runs, indptr = np.full(len(call_class), -1, np.int64), np.zeros(len(call_class) + 1, np.int64)
    producers, count = np.empty(len(source), np.int64), 0
    for i in range(len(call_class)):
        if not alias[call_class[i]]:
            runs[i] = call_class[i]
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if source[j] >= 0:
                    producers[count] = source[j]
                    count += 1
        indptr[i + 1] = count
    return runs, indptr, producers[:count]


def group(r: Recording, s: Scan, num_buffers: int, launch: Any) -> Grouping:
    """Give every value and leaf its rows.

    A buffer's rows are: the leaves, then class after class the values of its calls, launch after launch.

    Parameters
    ----------
    launch : int64 array, shape (calls,)
        The launch that runs each call, in the order of the run, as a policy gives it; -1 for aliases.
    """
    slots = r.per_class(lambda c: c.slots)
    (by_class, class_offsets, position, launch_class, launch_rank, launch_offsets, row_offsets, call_offsets,
     launch_depth) = _arrange(r.call_class, r.call_width, launch, s.depth, len(r.classes))
    ends = class_offsets.tolist()
    calls = [by_class[start:stop] for start, stop in zip(ends, ends[1:])]
    ends = launch_offsets.tolist()          # a class has one offset more than launches
    offsets, call_offsets = ([part[start + c:stop + c + 1] for c, (start, stop) in enumerate(zip(ends, ends[1:]))]
                             for part in (row_offsets, call_offsets))
    depths = [launch_depth[start:stop] for start, stop in zip(ends, ends[1:])]

    may_share = np.array([not info.alias and not split and k < len(info.split) - info.slots
                          for info in r.classes for k, split in enumerate(info.split)], bool)
    is_shared = s.same & ~s.pending & may_share
    shared: list[dict[int, int]] = [{} for _ in r.classes]
    for col, c in zip(np.flatnonzero(is_shared).tolist(),
                      (np.searchsorted(s.column_offsets, np.flatnonzero(is_shared), "right") - 1).tolist()):
        shared[c][col - int(s.column_offsets[c])] = int(-1 - s.first[col])
    leaf_rows, counts = place_leaves(r.call_class, s.operand_offsets, s.column_offsets, slots, r.operands, ~is_shared,
                                     r.leaf_buffers, r.leaf_widths, num_buffers)
    leaf_counts = counts.tolist()

    rows = list(leaf_counts)
    bases: list[list[int]] = []
    chunks = [[0, n] if n else [0] for n in leaf_counts]
    for mine, info in zip(offsets, r.classes):
        bases.append([])
        for buffer, width in zip(info.output_buffers, info.output_widths) if not info.alias else ():
            bases[-1].append(rows[buffer])
            chunks[buffer].extend((rows[buffer] + mine[1:] * width).tolist())
            rows[buffer] += int(mine[-1]) * width

    value_rows, value_buffers, operand_rows = _place_values(r, s, position, bases, leaf_rows)
    widths = np.array([width for info in r.classes for width in info.operand_widths], np.int64)
    split = np.array([part for info in r.classes for part in info.split], bool)
    read = ~is_shared & ~np.repeat(r.per_class(lambda c: c.alias, bool), np.diff(s.column_offsets))
    rows_read, starts = read_rows(by_class, class_offsets, r.call_width, r.call_count, s.operand_offsets, operand_rows,
                                  s.column_offsets, slots, widths, split, read)
    starts, reads, first = starts.tolist(), read.tolist(), s.column_offsets.tolist()
    classes = []
    for c, info in enumerate(r.classes):
        columns = {k: rows_read[starts[col]:starts[col + 1]] for k, col in enumerate(range(first[c], first[c + 1]))
                   if reads[col]}
        edges = offsets_of(r.call_count[calls[c]]) if info.slots and not info.split[-1] else None
        classes.append(ClassRows(calls[c], offsets[c], call_offsets[c], depths[c], columns, shared[c], bases[c], edges))
    order = list(zip(launch_class.tolist(), launch_rank.tolist()))
    return Grouping(classes, order, rows, leaf_rows, leaf_counts, value_rows, value_buffers,
                    [np.array(c, np.int64) for c in chunks])


@njit(cache=True, nogil=True)
def _arrange(call_class, call_width, launch, depth, num_classes):  # type: ignore[no-untyped-def]
    """Calls by class, in each by launch, in each as recorded; all by counting.

    Returns
    -------
    by_class, class_offsets : the calls, and where those of each class begin
    position : of each call, its first row among those of its class
    launch_class, launch_rank : of each launch, its class and its number among the class's launches
    launch_offsets : how many launches all classes before each have
    row_offsets, call_offsets : for each class where its launches begin and the last one ends, as rows and as calls
    launch_depth : for each class that of its launches' first calls
    """
    num_calls, num_launches = len(call_class), 0
    for i in range(num_calls):
        num_launches = max(num_launches, launch[i] + 1)
    class_offsets, launch_offsets = np.zeros(num_classes + 1, np.int64), np.zeros(num_classes + 1, np.int64)
    launch_class, size = np.zeros(num_launches, np.int64), np.zeros(num_launches, np.int64)
    for i in range(num_calls):
        class_offsets[call_class[i] + 1] += 1
        if launch[i] >= 0:
            launch_class[launch[i]] = call_class[i]
            size[launch[i]] += 1
    launch_rank = np.zeros(num_launches, np.int64)
    for k in range(num_launches):
        launch_rank[k] = launch_offsets[launch_class[k] + 1]
        launch_offsets[launch_class[k] + 1] += 1
    for c in range(num_classes):
        class_offsets[c + 1] += class_offsets[c]
        launch_offsets[c + 1] += launch_offsets[c]
    row_offsets = np.zeros(num_launches + num_classes, np.int64)
    call_offsets = np.zeros(num_launches + num_classes, np.int64)
    free = class_offsets[:-1].copy()            # of each class: where its next launch begins
    at = np.zeros(num_launches, np.int64)
    for k in range(num_launches):
        c = launch_class[k]
        at[k] = free[c]
        free[c] += size[k]
        call_offsets[launch_offsets[c] + c + launch_rank[k] + 1] = free[c] - class_offsets[c]
    by_class, position = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    for i in range(num_calls):
        if launch[i] >= 0:
            by_class[at[launch[i]]] = i
            at[launch[i]] += 1
        else:
            by_class[free[call_class[i]]] = i
            free[call_class[i]] += 1
    launch_depth = np.empty(num_launches, np.int64)
    for c in range(num_classes):
        row, last = 0, -1
        for j in range(class_offsets[c], class_offsets[c + 1]):
            i = by_class[j]
            position[i] = row
            row += call_width[i]
            if launch[i] >= 0:
                k = launch_offsets[c] + launch_rank[launch[i]]
                row_offsets[k + c + 1] = row
                if launch[i] != last:
                    launch_depth[k], last = depth[i], launch[i]
    return (by_class, class_offsets, position, launch_class, launch_rank, launch_offsets, row_offsets, call_offsets,
            launch_depth)


def _place_values(r: Recording, s: Scan, position: Any, bases: list[list[int]], leaf_rows: Any) -> Any:
    """First row and buffer of every recorded value, and the first row of every operand."""
    output_offsets = offsets_of(r.per_class(lambda c: len(c.output_widths)))
    base = np.array([b for part, info in zip(bases, r.classes) for b in (part or [0] * len(info.output_widths))],
                    np.int64)
    widths = np.array([w for info in r.classes for w in info.output_widths], np.int64)
    buffers = np.array([b for info in r.classes for b in info.output_buffers], np.int64)
    return place_values(r.call_class, s.value_offsets, s.operand_offsets, r.operands, output_offsets, base, widths,
                        buffers, position, r.per_class(lambda c: c.alias, bool), r.call_first, leaf_rows,
                        r.leaf_buffers)
