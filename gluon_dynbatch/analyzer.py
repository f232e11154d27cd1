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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import offsets_of

from .policies import Problem

__all__ = ["ClassInfo", "Recording", "Scan", "ClassRows", "Grouping", "column_of", "scan", "group", "problem_of",
           "reached"]


class ClassInfo(NamedTuple):
    """What the analyzer knows of a class.

    Parameters
    ----------
    operand_widths : rows that one position reads of each operand
    split : for each operand, whether it is split over the positions of a ragged call (all False: not ragged)
    output_widths : rows that one position writes of each output
    output_buffers : the buffer of each output
    alias : -1, or the first row of the operand that the call's result is
    recorded : whether its calls were made under autograd.record
    owns_wanted : whether it has a parameter of its own whose gradient is asked for
    slots : columns that are the parts of each element of a list, the last ones
    """

    operand_widths: tuple[int, ...]
    split: tuple[bool, ...]
    output_widths: tuple[int, ...]
    output_buffers: tuple[int, ...]
    alias: int
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

    def per_class(self, what: Any, dtype: type = np.int64) -> Any:
        return np.array([what(c) for c in self.classes], dtype)


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
    num_columns, slots = r.per_class(lambda c: len(c.operand_widths)), r.per_class(lambda c: c.slots)
    num_outputs = r.per_class(lambda c: len(c.output_widths))
    operand_offsets = offsets_of((num_columns - slots)[r.call_class] + r.call_count * slots[r.call_class])
    value_offsets = offsets_of(num_outputs[r.call_class])
    column_offsets = offsets_of(num_columns)
    depth, active, first, same, pending, wanted, maker, source, output = _scan(
        r.call_class, operand_offsets, value_offsets, column_offsets, slots, r.operands,
        r.per_class(lambda c: c.recorded, bool), r.per_class(lambda c: c.owns_wanted, bool),
        r.per_class(lambda c: c.alias), r.leaf_wanted)
    return Scan(depth, active, first, same, pending, wanted, column_offsets, operand_offsets, value_offsets, maker,
                source, output)


@njit(cache=True, nogil=True)
def column_of(number, num_columns, slots):  # type: ignore[no-untyped-def]
    """The column of an operand of a call, by its number among them."""
    return number if number < num_columns else num_columns - slots + (number - num_columns) % slots


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
        d, flows = (0 if alias[c] < 0 else -1), owns_wanted[c]      # part of a leaf is as early as the leaf
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
                if alias[call_class[producer]] >= 0:        # part of its first operand; of others it knows the shape
                    whole = operand_offsets[producer]
                    source[j], output[j] = source[whole], output[whole]
                d = max(d, depth[producer] + (1 if alias[c] < 0 else 0))
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


def reached(r: Recording, s: Scan, values: Any) -> tuple[Any, Any]:
    """The leaves and the classes that some values depend on."""
    return _reached(r.call_class, s.operand_offsets, r.operands, s.maker, values, len(r.leaf_buffers), len(r.classes))


@njit(cache=True, nogil=True)
def _reached(call_class, operand_offsets, operands, maker, values, num_leaves, num_classes):  # type: ignore[no-untyped-def]
    calls = np.zeros(len(call_class), np.bool_)
    leaves = np.zeros(num_leaves, np.bool_)
    classes = np.zeros(num_classes, np.bool_)
    for v in values:
        calls[maker[v]] = True
    for i in range(len(call_class) - 1, -1, -1):        # readers come behind what they read
        if calls[i]:
            classes[call_class[i]] = True
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if operands[j] >= 0:
                    calls[maker[operands[j]]] = True
                else:
                    leaves[-1 - operands[j]] = True
    return leaves, classes


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
    aliases = r.per_class(lambda c: c.alias >= 0, bool)[r.call_class]
    reader = np.repeat(np.arange(len(aliases)), np.diff(s.operand_offsets))
    waits = (s.source >= 0) & ~aliases[reader]
    indptr = offsets_of(np.bincount(reader[waits], minlength=len(aliases)))
    return Problem(np.where(aliases, -1, r.call_class), r.call_width, indptr, s.source[waits], launch_us, row_us)


def group(r: Recording, s: Scan, num_buffers: int, launch: Any) -> Grouping:
    """Give every value and leaf its rows.

    A buffer's rows are: the leaves, then class after class the values of its calls, launch after launch.

    Parameters
    ----------
    launch : int64 array, shape (calls,)
        The launch that runs each call, in the order of the run, as a policy gives it; -1 for aliases.
    """
    num_classes = len(r.classes)
    by_key = np.argsort(r.call_class * (len(launch) + 1) + launch, kind="stable")
    class_offsets = offsets_of(np.bincount(r.call_class, minlength=num_classes))
    calls = [by_key[class_offsets[c]:class_offsets[c + 1]] for c in range(num_classes)]
    position = np.empty(len(by_key), np.int64)          # of each call, inside its class
    for mine in calls:
        position[mine] = offsets_of(r.call_width[mine])[:-1]

    shared = [{k: int(-1 - s.first[col]) for k, col in enumerate(range(*s.column_offsets[c:c + 2]))
               if s.same[col] and not s.pending[col] and not r.classes[c].split[k] and r.classes[c].alias < 0
               and k < len(r.classes[c].operand_widths) - r.classes[c].slots}
              for c in range(num_classes)]
    leaf_rows, leaf_counts = _place_leaves(r, s, shared, num_buffers)

    rows, launches = list(leaf_counts), []
    bases: list[list[int]] = []
    chunks = [[0, n] if n else [0] for n in leaf_counts]
    for mine, info in zip(calls, r.classes):
        launches.append(_launches(r, launch[mine], mine, info))
        bases.append([])
        for buffer, width in zip(info.output_buffers, info.output_widths) if info.alias < 0 else ():
            bases[-1].append(rows[buffer])
            chunks[buffer].extend((rows[buffer] + launches[-1][0][1:] * width).tolist())
            rows[buffer] += int(launches[-1][0][-1]) * width

    value_rows, value_buffers, operand_rows = _place_values(r, s, position, bases, leaf_rows)
    classes = []
    for c, info in enumerate(r.classes):
        operands, fixed = s.operand_offsets[calls[c]], len(info.operand_widths) - info.slots
        columns = {k: _column_rows(operand_rows[operands + k], width, info.split[k], r.call_width[calls[c]],
                                   any(info.split))
                   for k, width in enumerate(info.operand_widths[:fixed]) if k not in shared[c] and info.alias < 0}
        edges = None
        if info.slots:
            count = r.call_count[calls[c]]
            edges = offsets_of(count)
            first = np.repeat(operands + fixed - edges[:-1] * info.slots, count) + np.arange(edges[-1]) * info.slots
            columns.update({fixed + k: operand_rows[first + k] for k in range(info.slots)})
            edges = None if info.split[-1] else edges
        offsets, call_offsets, _ = launches[c]
        depths = s.depth[calls[c][call_offsets[:-1]]]
        classes.append(ClassRows(calls[c], offsets, call_offsets, depths, columns, shared[c], bases[c], edges))
    in_order = sorted((number, c, k) for c, (_, _, numbers) in enumerate(launches) for k, number in enumerate(numbers))
    return Grouping(classes, [(c, k) for _, c, k in in_order], rows, leaf_rows, leaf_counts, value_rows, value_buffers,
                    [np.array(c, np.int64) for c in chunks])


def _launches(r: Recording, launch: Any, calls: Any, info: ClassInfo) -> Any:
    """Launch offsets of a class as positions and as calls, and the number of each launch. Aliases have none."""
    if info.alias >= 0:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), []
    starts = np.flatnonzero(np.diff(launch, prepend=-1))
    call_offsets = np.append(starts, len(calls))
    return offsets_of(r.call_width[calls])[call_offsets], call_offsets, launch[starts].tolist()


def _place_leaves(r: Recording, s: Scan, shared: list[dict[int, int]], num_buffers: int) -> Any:
    """Rows for the leaves that some call reads as rows of its own."""
    own = np.ones(len(s.same), bool)
    own[[s.column_offsets[c] + k for c, fixed in enumerate(shared) for k in fixed]] = False
    used = _used(r.call_class, s.operand_offsets, s.column_offsets, r.per_class(lambda c: c.slots), r.operands, own,
                 len(r.leaf_buffers))
    rows = np.full(len(used), -1, np.int64)
    counts = []
    for buffer in range(num_buffers):
        mine = np.flatnonzero(used & (r.leaf_buffers == buffer))
        offsets = offsets_of(r.leaf_widths[mine])
        rows[mine] = offsets[:-1]
        counts.append(int(offsets[-1]))
    return rows, counts


@njit(cache=True, nogil=True)
def _used(call_class, operand_offsets, column_offsets, slots, operands, own,  # type: ignore[no-untyped-def]
          num_leaves):
    used = np.zeros(num_leaves, np.bool_)
    for i in range(len(call_class)):
        c = call_class[i]
        num_columns = column_offsets[c + 1] - column_offsets[c]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if operands[j] < 0 and own[column_offsets[c] + column_of(j - operand_offsets[i], num_columns, slots[c])]:
                used[-1 - operands[j]] = True
    return used


def _place_values(r: Recording, s: Scan, position: Any, bases: list[list[int]], leaf_rows: Any) -> Any:
    """First row and buffer of every recorded value, and the first row of every operand."""
    output_offsets = offsets_of(r.per_class(lambda c: len(c.output_widths)))
    base = np.array([b for part, info in zip(bases, r.classes) for b in (part or [0] * len(info.output_widths))],
                    np.int64)
    widths = np.array([w for info in r.classes for w in info.output_widths], np.int64)
    buffers = np.array([b for info in r.classes for b in info.output_buffers], np.int64)
    return _place(r.call_class, s.value_offsets, s.operand_offsets, r.operands, output_offsets, base, widths, buffers,
                  position, r.per_class(lambda c: c.alias), leaf_rows, r.leaf_buffers)


@njit(cache=True, nogil=True)
def _place(call_class, value_offsets, operand_offsets, operands, output_offsets, base, widths,  # type: ignore[no-untyped-def]
           buffers, position, alias, leaf_rows, leaf_buffers):
    rows = np.empty(value_offsets[-1], np.int64)
    where = np.empty(value_offsets[-1], np.int64)
    operand_rows = np.empty(len(operands), np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            operand_rows[j] = rows[operands[j]] if operands[j] >= 0 else leaf_rows[-1 - operands[j]]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            if alias[c] >= 0:
                whole = operands[operand_offsets[i]]
                rows[v] = operand_rows[operand_offsets[i]] + alias[c]
                where[v] = where[whole] if whole >= 0 else leaf_buffers[-1 - whole]
            else:
                output = output_offsets[c] + v - value_offsets[i]
                rows[v], where[v] = base[output] + position[i] * widths[output], buffers[output]
    return rows, where, operand_rows


def _column_rows(starts: Any, width: int, split: bool, call_width: Any, ragged: bool) -> Any:
    """All rows that a column reads, position after position."""
    if split:                   # a call's rows, shared out among its positions
        count = call_width * width
        offsets = offsets_of(count)
        return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], count)
    if ragged:                  # every position of a call reads the same rows
        starts = np.repeat(starts, call_width)
    return starts if width == 1 else (starts[:, None] + np.arange(width)).ravel()
