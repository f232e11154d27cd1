"""What a backward pass that begins at some values comes to. Pure: arrays in, arrays out; no device, no MXNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled, offsets_of

from .analyzer import Recording, Scan

__all__ = ["Reached", "reached"]


class Reached(NamedTuple):
    """Where a backward pass goes.

    Attributes
    ----------
    leaves : bool array, the leaves that it touches; see `cavs_core/paths.py`
    params : of each class, whether it touches each of its parameters
    patterns : (class, of each output whether a gradient comes to it), each combination that occurs
    pattern_of : int64 array, the pattern of each call; -1 where no gradient may flow
    """

    leaves: Any
    params: list[Any]
    patterns: list[tuple[int, tuple[bool, ...]]]
    pattern_of: Any


def reached(r: Recording, s: Scan, values: Any, signatures: Sequence[Any]) -> Reached:
    """What a pass that begins at these values comes to; `signatures` has `flows` and `touches` of each class."""
    k = r.facts
    begins = offsets_of(np.array([signature.touches.size for signature in signatures], np.int64))
    flows, touches = (np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0, bool)
                      for parts in ([x.flows for x in signatures], [x.touches for x in signatures]))
    leaves, outputs, gets, pattern_of, first = _reached(
        r.call_class, s.active, k.alias, k.slots, s.operand_offsets, r.operands, s.value_offsets, k.column_offsets,
        k.output_offsets, begins, flows, touches, values, len(r.leaf_buffers))
    ends = k.output_offsets.tolist()
    params = [(x.param_touches & outputs[a:b, None]).any(axis=0) for x, a, b in zip(signatures, ends, ends[1:])]
    bounds = s.value_offsets
    patterns = [(int(r.call_class[i]), tuple(gets[bounds[i]:bounds[i + 1]].tolist())) for i in first.tolist()]
    return Reached(leaves, params, patterns, pattern_of)


@compiled
def _reached(call_class, active, alias, slots, operand_offsets, operands, value_offsets,  # type: ignore[no-untyped-def]
             column_offsets, output_offsets, begins, flows, touches, values, num_leaves):
    """Leaves, and outputs of classes, that are touched; values that get a gradient; the pattern of each call, and the
    first call of each pattern."""
    num_calls, num_classes = len(call_class), len(alias)
    gets, touched = np.zeros(value_offsets[-1], np.bool_), np.zeros(value_offsets[-1], np.bool_)
    leaves, outputs = np.zeros(num_leaves, np.bool_), np.zeros(output_offsets[-1], np.bool_)
    pattern_of, first, count = np.full(num_calls, -1, np.int64), np.empty(num_calls, np.int64), 0
    last_of, before = np.full(num_classes, -1, np.int64), np.empty(num_calls, np.int64)     # patterns of a class
    for v in values:
        gets[v] = touched[v] = True
    for i in range(num_calls - 1, -1, -1):              # readers come behind what they read
        if not active[i]:
            continue
        c, begin, end = call_class[i], value_offsets[i], value_offsets[i + 1]
        num_columns = column_offsets[c + 1] - column_offsets[c]
        for v in range(begin, end):
            if not touched[v]:
                continue
            outputs[output_offsets[c] + v - begin] = True
            at, column = begins[c] + (v - begin) * num_columns, 0
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if column == num_columns:               # the next element of a list
                    column -= slots[c]
                token = operands[j]
                if touches[at + column]:
                    if token >= 0:
                        touched[token] = True
                        gets[token] |= gets[v] and flows[at + column]
                    else:
                        leaves[-1 - token] = True
                column += 1
        if alias[c]:
            continue
        p = last_of[c]
        while p >= 0:
            other, same = value_offsets[first[p]], True
            for n in range(end - begin):
                if gets[begin + n] != gets[other + n]:
                    same = False
            if same:
                break
            p = before[p]
        if p < 0:
            p, count = count, count + 1
            first[p], before[p] = i, last_of[c]
            last_of[c] = p
        pattern_of[i] = p
    return leaves, outputs, gets, pattern_of, first[:count].copy()
