"""Recorded calls -> launches, buffers and rows. Pure: arrays in, arrays out; no device, no MXNet.

A token names an operand: a value of a recorded call (0, 1, ..), or an outside array, a leaf (-1, -2, ..).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

__all__ = ["Recording", "Scan", "ClassRows", "Grouping", "scan", "group"]


@dataclass
class Recording:
    """What was recorded. A class is a signature; its calls have the same operands and outputs, apart from values.

    Parameters
    ----------
    call_class : int64 array, shape (calls,)
        The class of each call, in recorded order.
    operands : int64 array
        The tokens of all calls, one after the other.
    num_operands, num_outputs : int64 arrays, shape (classes,)
    output_buffers : list of lists
        For each class, the buffer of each output. A buffer holds all values of one shape and dtype.
    recorded : bool array, shape (classes,)
        Whether the calls of the class were made under autograd.record.
    owns_wanted : bool array, shape (classes,)
        Whether the class itself has a parameter whose gradient is asked for.
    leaf_buffers : int64 array, shape (leaves,)
    leaf_wanted : bool array, shape (leaves,)
        Whether a gradient may flow into the leaf.
    heads : int64 array
        Values that somebody outside still holds.
    """

    call_class: Any
    operands: Any
    num_operands: Any
    num_outputs: Any
    output_buffers: list[list[int]]
    recorded: Any
    owns_wanted: Any
    leaf_buffers: Any
    leaf_wanted: Any
    heads: Any


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


def _offsets(counts: Any) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def scan(r: Recording) -> Scan:
    """One pass in recorded order: an operand is always recorded before its reader."""
    operand_offsets = _offsets(r.num_operands[r.call_class])
    value_offsets = _offsets(r.num_outputs[r.call_class])
    column_offsets = _offsets(r.num_operands)
    depth, active, first, same, pending, wanted = _scan(
        r.call_class, operand_offsets, value_offsets, column_offsets, r.operands, r.recorded, r.owns_wanted,
        r.leaf_wanted)
    return Scan(depth, active, first, same, pending, wanted, column_offsets, operand_offsets, value_offsets)


@njit(cache=True, nogil=True)
def _scan(call_class, operand_offsets, value_offsets, column_offsets, operands, recorded, owns_wanted,  # type: ignore[no-untyped-def]
          leaf_wanted):
    num_calls, num_columns = len(call_class), column_offsets[-1]
    depth = np.zeros(num_calls, np.int64)
    active = np.zeros(num_calls, np.bool_)
    maker = np.empty(value_offsets[-1], np.int64)
    first = np.zeros(num_columns, np.int64)
    seen = np.zeros(num_columns, np.bool_)
    same = np.ones(num_columns, np.bool_)
    pending = np.zeros(num_columns, np.bool_)
    wanted = np.zeros(num_columns, np.bool_)
    for i in range(num_calls):
        c = call_class[i]
        d, flows = 0, owns_wanted[c]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            token = operands[j]
            column = column_offsets[c] + j - operand_offsets[i]
            if not seen[column]:
                seen[column], first[column] = True, token
            elif first[column] != token:
                same[column] = False
            if token >= 0:
                producer = maker[token]
                d = max(d, depth[producer] + 1)
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
    return depth, active, first, same, pending, wanted


@dataclass
class ClassRows:
    """One class, grouped: its calls in the order of the run, and the rows that they read and write."""

    calls: Any                          # call numbers, by depth
    offsets: Any                        # launch k runs calls[offsets[k]:offsets[k + 1]]
    depths: Any                         # of each launch
    columns: dict[int, Any]             # operand -> buffer row of each call; shared operands are absent
    shared: dict[int, int]              # operand -> leaf
    bases: list[int]                    # of each output: call number p of the class writes row base + p


@dataclass
class Grouping:
    """All classes, and the buffers that they share."""

    classes: list[ClassRows]
    order: list[tuple[int, int]]        # (class, launch) by depth
    buffer_rows: list[int]
    leaf_rows: Any                      # row of each leaf in its buffer, or -1 where it is only shared
    leaf_counts: list[int]              # leaves at the start of each buffer
    value_rows: Any                     # row of each value in its buffer
    value_buffers: Any
    chunks: list[Any]                   # per buffer: where the rows of one (class, launch) begin and end


def group(r: Recording, s: Scan, num_buffers: int, unbatched: bool = False) -> Grouping:
    """Group calls by class and depth, and give every value and leaf a row.

    A buffer's rows are: the leaves, then class after class the values of its calls, by depth. With `unbatched` every
    call is a launch of its own.
    """
    num_classes = len(r.num_operands)
    key = r.call_class * (int(s.depth.max(initial=0)) + 1) + s.depth
    by_key = np.argsort(key, kind="stable")
    class_offsets = _offsets(np.bincount(r.call_class, minlength=num_classes))
    position = np.empty(len(by_key), np.int64)
    position[by_key] = np.arange(len(by_key)) - class_offsets[r.call_class[by_key]]

    shared = [{k: int(-1 - s.first[col]) for k, col in enumerate(range(*s.column_offsets[c:c + 2]))
               if s.same[col] and not s.pending[col]} for c in range(num_classes)]
    tokens = [_class_tokens(r, s, by_key[class_offsets[c]:class_offsets[c + 1]], c) for c in range(num_classes)]
    leaf_rows, leaf_counts = _place_leaves(r, tokens, shared, num_buffers)

    rows, bases, chunks = list(leaf_counts), [], [[0, n] if n else [0] for n in leaf_counts]
    launches = []
    for c in range(num_classes):
        calls = by_key[class_offsets[c]:class_offsets[c + 1]]
        depths, starts = np.unique(s.depth[calls], return_index=True)
        if unbatched:
            depths, starts = s.depth[calls], np.arange(len(calls))
        offsets = np.append(starts, len(calls))
        launches.append((calls, offsets, depths))
        bases.append([])
        for buffer in r.output_buffers[c]:
            bases[c].append(rows[buffer])
            chunks[buffer].extend((rows[buffer] + offsets[1:]).tolist())
            rows[buffer] += len(calls)

    value_rows, value_buffers = _place_values(r, s, position, bases)
    classes = []
    for c in range(num_classes):
        columns = {k: _rows_of_tokens(tokens[c][:, k], value_rows, leaf_rows)
                   for k in range(int(r.num_operands[c])) if k not in shared[c]}
        classes.append(ClassRows(*launches[c], columns, shared[c], bases[c]))
    in_order = sorted((int(d), c, k) for c, (_, _, depths) in enumerate(launches) for k, d in enumerate(depths))
    return Grouping(classes, [(c, k) for _, c, k in in_order], rows, leaf_rows, leaf_counts, value_rows, value_buffers,
                    [np.array(c, np.int64) for c in chunks])


def _class_tokens(r: Recording, s: Scan, calls: Any, c: int) -> Any:
    """Tokens of a class's calls, shape (calls, operands)."""
    return r.operands[s.operand_offsets[calls][:, None] + np.arange(int(r.num_operands[c]))]


def _place_leaves(r: Recording, tokens: list[Any], shared: list[dict[int, int]], num_buffers: int) -> Any:
    """Rows for the leaves that some call reads as a row of its own."""
    used = np.zeros(len(r.leaf_buffers), bool)
    for part, fixed in zip(tokens, shared):
        for k in range(part.shape[1]):
            if k not in fixed:
                column = part[:, k]
                used[-1 - column[column < 0]] = True
    rows = np.full(len(used), -1, np.int64)
    counts = []
    for buffer in range(num_buffers):
        mine = np.flatnonzero(used & (r.leaf_buffers == buffer))
        rows[mine] = np.arange(len(mine))
        counts.append(len(mine))
    return rows, counts


def _place_values(r: Recording, s: Scan, position: Any, bases: list[list[int]]) -> Any:
    """Row and buffer of every recorded value."""
    maker = np.repeat(np.arange(len(r.call_class)), r.num_outputs[r.call_class])
    output = np.arange(len(maker)) - s.value_offsets[maker]
    output_offsets = _offsets(r.num_outputs)
    flat = output_offsets[r.call_class[maker]] + output if len(maker) else maker
    base = np.array([b for part in bases for b in part], np.int64)
    buffers = np.array([b for part in r.output_buffers for b in part], np.int64)
    if not len(maker):
        return maker, maker
    return base[flat] + position[maker], buffers[flat]


def _rows_of_tokens(tokens: Any, value_rows: Any, leaf_rows: Any) -> Any:
    rows = np.empty(len(tokens), np.int64)
    recorded = tokens >= 0
    rows[recorded] = value_rows[tokens[recorded]]
    rows[~recorded] = leaf_rows[-1 - tokens[~recorded]]
    return rows
