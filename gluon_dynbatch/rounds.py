"""Which classes run after which. Pure: arrays in, arrays out; no device, no MXNet.

Classes whose calls read each other, around and around (a cell along a chain), are one *ring*; all others stand by
themselves. Between rings there is an order, so a flush runs in rounds: a ring begins when all that it reads of other
rings is there. What a class reads of earlier rounds waits for no launch of its own: it is eager, one product for all
rows. And what only later rounds read of it can wait for its last launch: it is lazy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cavs_core import compiled

from .analyzer import Recording, Scan

__all__ = ["Rounds", "find_rounds"]


@dataclass(frozen=True)
class Rounds:
    """What is known of the classes of a flush.

    Attributes
    ----------
    of_class : int64 array, shape (classes,)
        The round of each class.
    columns : bool array, shape (columns,)
        Whether some call's operand is made by a class of the same ring.
    outputs : bool array, shape (outputs,)
        Of the outputs of all classes, which are read by a class of the same ring.
    """

    of_class: Any
    columns: Any
    outputs: Any


def find_rounds(r: Recording, s: Scan) -> Rounds:
    """Rings and rounds of what was recorded."""
    return Rounds(*_rounds(s.reads, r.facts.column_offsets, r.facts.output_offsets))


@compiled
def _rounds(reads, column_offsets, output_offsets):  # type: ignore[no-untyped-def]
    num_classes = len(column_offsets) - 1
    of_column, of_output = np.empty(len(reads), np.int64), np.empty(reads.shape[1], np.int64)
    for c in range(num_classes):
        of_column[column_offsets[c]:column_offsets[c + 1]] = c
        of_output[output_offsets[c]:output_offsets[c + 1]] = c
    by_class = np.zeros((num_classes, num_classes), np.bool_)       # [a, b]: calls of class b read values of class a
    for column in range(len(reads)):
        for k in range(reads.shape[1]):
            by_class[of_output[k], of_column[column]] |= reads[column, k]
    ring, of_class = _rings(by_class)
    columns, outputs = np.zeros(len(reads), np.bool_), np.zeros(reads.shape[1], np.bool_)
    for column in range(len(reads)):
        for k in range(reads.shape[1]):
            if reads[column, k] and ring[of_output[k]] == ring[of_column[column]]:
                columns[column] = outputs[k] = True
    return of_class, columns, outputs


@compiled
def _rings(reads):  # type: ignore[no-untyped-def]
    """The ring of each class (Tarjan's algorithm, without recursion), and its round: the longest way to it."""
    count = len(reads)
    index = np.full(count, -1, np.int64)
    low, ring, at = np.zeros(count, np.int64), np.full(count, -1, np.int64), np.zeros(count, np.int64)
    stack, path = np.empty(count, np.int64), np.empty(count, np.int64)
    stacked = num_seen = num_rings = 0
    for start in range(count):
        if index[start] >= 0:
            continue
        depth = 0
        path[0] = start
        while depth >= 0:
            v = path[depth]
            if index[v] < 0:
                index[v] = low[v] = num_seen
                num_seen += 1
                stack[stacked] = v
                stacked += 1
            deeper = False
            while at[v] < count:
                w = at[v]
                at[v] += 1
                if not reads[v, w]:
                    continue
                if index[w] < 0:
                    depth += 1
                    path[depth] = w
                    deeper = True
                    break
                if ring[w] < 0:
                    low[v] = min(low[v], index[w])
            if deeper:
                continue
            if low[v] == index[v]:
                while True:
                    stacked -= 1
                    ring[stack[stacked]] = num_rings
                    if stack[stacked] == v:
                        break
                num_rings += 1
            depth -= 1
            if depth >= 0:
                low[path[depth]] = min(low[path[depth]], low[v])
    # Tarjan finds a ring after all rings that read it: from the last to the first, every reader comes later.
    of_ring = np.zeros(num_rings, np.int64)
    for k in range(num_rings - 1, -1, -1):
        for v in range(count):
            if ring[v] == k:
                for w in range(count):
                    if reads[v, w] and ring[w] != k:
                        of_ring[ring[w]] = max(of_ring[ring[w]], of_ring[k] + 1)
    return ring, of_ring[ring] if count else np.zeros(0, np.int64)
