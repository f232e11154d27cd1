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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cavs_core import compiled, offsets_of

from .classes import Classes, ClassInfo
from .placing import place
from .policies import Problem, by_depth

__all__ = ["Recording", "Scan", "ClassRows", "Grouping", "scan", "group", "launches_by_depth", "problem_of"]


@dataclass
class Recording:
    """What was recorded.

    Parameters
    ----------
    classes : ClassInfo of each
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

    classes: Sequence[ClassInfo]
    call_class: Any
    call_width: Any
    operands: Any
    leaf_buffers: Any
    leaf_widths: Any
    leaf_wanted: Any
    heads: Any
    call_count: Any
    call_first: Any

    @cached_property
    def facts(self) -> Classes:
        """The classes as arrays."""
        return self.classes if isinstance(self.classes, Classes) else Classes(self.classes)

    @cached_property
    def offsets(self) -> tuple[Any, Any]:
        """Where the operands of each call begin, and its values."""
        k = self.facts
        offsets: tuple[Any, Any] = _offsets(self.call_class, self.call_count, k.column_offsets, k.slots, k.num_outputs)
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

    depth: Any                  # of each call: 0, or 1 + the largest of its operands'; of an alias that of its value
    active: Any                 # whether a gradient may flow through the call
    class_active: Any           # per class: through some call
    first: Any                  # per class and operand ("column"): the token of its first call
    same: Any                   # per column: all calls have that token
    pending: Any                # per column: some call's operand is a recorded value
    wanted: Any                 # per column: a gradient may flow into some call's operand
    reads: Any                  # per column and output: some call reads (part of) it there; not of aliases
    operand_offsets: Any        # operands of call i: operand_offsets[i]:operand_offsets[i + 1]
    value_offsets: Any          # values of call i: value_offsets[i]:value_offsets[i + 1]
    maker: Any                  # of each value: the call that made it
    source: Any                 # of each operand: the call that made what it is (part of), through aliases; -1: a leaf
    output: Any                 # of each operand: which output of that call


def scan(r: Recording) -> Scan:
    """One pass in recorded order: an operand is always recorded before its reader."""
    k, offsets = r.facts, r.offsets
    depth, active, class_active, first, same, pending, wanted, reads, maker, source, output = _scan(
        r.call_class, *offsets, k.column_offsets, k.output_offsets, k.slots, r.operands, k.recorded, k.owns_wanted,
        k.alias, r.leaf_wanted)
    return Scan(depth, active, class_active, first, same, pending, wanted, reads, *offsets, maker, source, output)


@compiled
def _offsets(call_class, call_count, column_offsets, slots, num_outputs):  # type: ignore[no-untyped-def]
    operands, values = np.zeros(len(call_class) + 1, np.int64), np.zeros(len(call_class) + 1, np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        fixed = column_offsets[c + 1] - column_offsets[c] - slots[c]
        operands[i + 1] = operands[i] + fixed + call_count[i] * slots[c]
        values[i + 1] = values[i] + num_outputs[c]
    return operands, values


@compiled
def _scan(call_class, operand_offsets, value_offsets, column_offsets, output_offsets, slots,  # type: ignore[no-untyped-def]
          operands, recorded, owns_wanted, alias, leaf_wanted):
    num_calls, num_columns = len(call_class), column_offsets[-1]
    depth = np.zeros(num_calls, np.int64)
    active, class_active = np.zeros(num_calls, np.bool_), np.zeros(len(alias), np.bool_)
    maker = np.empty(value_offsets[-1], np.int64)
    first = np.zeros(num_columns, np.int64)
    seen = np.zeros(num_columns, np.bool_)
    same = np.ones(num_columns, np.bool_)
    pending = np.zeros(num_columns, np.bool_)
    wanted = np.zeros(num_columns, np.bool_)
    reads = np.zeros((num_columns, output_offsets[-1]), np.bool_)
    source, output = np.empty(len(operands), np.int64), np.empty(len(operands), np.int64)
    # Of each value: the call that made it, or what it is part of; which of that call's outputs, and of all outputs.
    made_by, made_as, column_read = (np.empty(value_offsets[-1], np.int64), np.empty(value_offsets[-1], np.int64),
                                     np.empty(value_offsets[-1], np.int64))
    begin = first_value = 0
    for i in range(num_calls):
        c, end = call_class[i], operand_offsets[i + 1]
        is_alias, records, column, last_column = alias[c], recorded[c], column_offsets[c], column_offsets[c + 1]
        d, flows = (-1 if is_alias else 0), owns_wanted[c]      # part of a leaf is as early as the leaf
        for j in range(begin, end):
            token = operands[j]
            if column == last_column:                           # the next element of a list
                column -= slots[c]
            if not seen[column]:
                seen[column], first[column] = True, token
            elif first[column] != token:
                same[column] = False
            if token >= 0:
                producer = made_by[token]
                source[j], output[j] = producer, made_as[token]
                if producer >= 0 and not is_alias:
                    d = max(d, depth[producer] + 1)
                    reads[column, column_read[token]] = True
                elif producer >= 0 and j == begin:
                    d = depth[producer]
                pending[column] = True
                arrives = active[maker[token]]
            else:
                source[j], output[j] = -1, 0
                arrives = leaf_wanted[-1 - token]
            if arrives and records:
                flows = True
                wanted[column] = True
            column += 1
        depth[i] = d
        active[i] = flows and records
        class_active[c] |= active[i]
        first_output, last_value = output_offsets[c] - first_value, value_offsets[i + 1]
        for v in range(first_value, last_value):
            maker[v], made_by[v], made_as[v], column_read[v] = i, i, v - first_value, first_output + v
            if is_alias:                                        # part of its first operand: of others it has the shape
                made_by[v], made_as[v] = source[begin], output[begin]
                if source[begin] >= 0:
                    column_read[v] = column_read[operands[begin]]
        begin, first_value = end, last_value
    return depth, active, class_active, first, same, pending, wanted, reads, maker, source, output


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
    value_rows: Any                     # first row of each value in its buffer
    value_buffers: Any
    chunks: list[Any]                   # per buffer: where the rows of one (class, launch) begin and end
    shared: Any                         # per column: all calls read one leaf there


def problem_of(r: Recording, s: Scan, launch_us: Any, row_us: Any) -> Problem:
    """What a policy needs to know; launch_us and row_us: float64 arrays, shape (classes,)."""
    call_class, indptr, producers = _waits(r.call_class, r.facts.alias, s.operand_offsets, s.source)
    return Problem(call_class, r.call_width, indptr, producers, launch_us, row_us)


def launches_by_depth(r: Recording, s: Scan) -> Any:
    """What policy "depth" makes of the problem, which need not be made for that."""
    k = r.facts
    return by_depth(np.where(k.alias[r.call_class], -1, r.call_class) if k.has_aliases else r.call_class, s.depth)


@compiled
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
    k = r.facts
    calls = (r.call_class, r.call_width, r.call_count, r.call_first, r.operands, s.operand_offsets, s.value_offsets)
    (arranged, is_shared, read, starts, bases, chunks, chunk_offsets, buffer_rows, leaf_rows, value_rows,
     value_buffers) = place(
        calls, launch, s.depth, s.same, s.pending, (r.leaf_buffers, r.leaf_widths), num_buffers,
        (k.column_offsets, k.slots, k.alias, k.widths, k.split, k.may_share),
        (k.output_offsets, k.output_widths, k.output_buffers))
    (by_class, class_offsets, launch_class, launch_rank, launch_offsets, row_offsets, call_offsets,
     launch_depth) = arranged
    classes = []
    columns_of, outputs_of, starts, bases = (a.tolist() for a in (k.column_offsets, k.output_offsets, starts, bases))
    shares, first = is_shared.tolist(), s.first.tolist()
    calls_of, launches_of = class_offsets.tolist(), launch_offsets.tolist()
    for c, info in enumerate(k):
        columns, shared = {}, {}
        for n, col in enumerate(range(columns_of[c], columns_of[c + 1]) if not info.alias else ()):
            if shares[col]:
                shared[n] = -1 - first[col]
            else:
                columns[n] = read[starts[col]:starts[col + 1]]
        mine, begin, end = by_class[calls_of[c]:calls_of[c + 1]], launches_of[c], launches_of[c + 1]
        classes.append(ClassRows(
            mine, row_offsets[begin + c:end + c + 1], call_offsets[begin + c:end + c + 1],      # one more than launches
            launch_depth[begin:end], columns, shared,
            bases[outputs_of[c]:outputs_of[c + 1]] if not info.alias else [],
            offsets_of(r.call_count[mine]) if info.slots and not info.split[-1] else None))
    ends = chunk_offsets.tolist()
    return Grouping(classes, list(zip(launch_class.tolist(), launch_rank.tolist())), buffer_rows.tolist(), leaf_rows,
                    value_rows, value_buffers, [chunks[a:b] for a, b in zip(ends, ends[1:])], is_shared)
