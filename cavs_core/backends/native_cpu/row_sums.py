"""Equal rows of a sparse gradient, added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...compiling import compiled
from .memory import ARENA

__all__ = ["add_equal_rows"]


def add_equal_rows(parts: Sequence[tuple[Any, Any]], size: int, make: Any) -> Any:
    """Rows with their numbers; those of equal numbers are added up.

    Parameters
    ----------
    parts : (row numbers, rows) of each part
    size : of the table; numbers outside of it count as its first or last, as a lookup takes them
    make : n -> an array of n rows that takes the sums, or None to have it no further

    Returns
    -------
    int64 array, the numbers that occur, ascending; None if nothing was added up
    """
    numbers = [np.ravel(n) for n, _ in parts]
    numbers = [n.astype(np.float32) if n.dtype == np.float16 else n for n in numbers]   # compiled code has no halves
    marks = np.zeros(-(-size // 8), np.int64)
    block = ARENA.take(4 * size)                # memory that nobody has touched yet is slow
    try:
        place = block.array((size,), np.int32)
        kept = _kept(numbers[0] if len(numbers) == 1 else np.concatenate(numbers), marks, marks.view(np.uint8), place)
        target = make(len(kept))
        if target is None:
            return None
        width = math.prod(target.shape[1:])
        for part, (_, values) in zip(numbers, parts):
            _add_rows(target.reshape(-1, width), place, part, values.reshape(-1, width))
    finally:
        ARENA.give_back(block)
    return kept


@compiled
def _row(number, size):  # type: ignore[no-untyped-def]
    return min(max(int(number), 0), size - 1)


@compiled
def _kept(numbers, words, marks, place):  # type: ignore[no-untyped-def]
    """The numbers that occur, ascending. They are marked, and looked for in words of eight marks.

    The place of each of them becomes -1 - where it is among them, which says that its row is still empty.
    """
    for e in range(len(numbers)):
        marks[_row(numbers[e], len(place))] = 1
    kept, count = np.empty(min(len(numbers), len(place)), np.int64), 0
    for w in range(len(words)):
        if words[w] != 0:
            for k in range(8 * w, min(8 * w + 8, len(place))):
                if marks[k]:
                    kept[count] = k
                    count += 1
                    place[k] = -count
    return kept[:count]


@compiled
def _add_rows(target, place, numbers, values):  # type: ignore[no-untyped-def]
    # (Element by element: a whole row as a slice is not vectorised.)
    for e in range(len(numbers)):
        number = _row(numbers[e], len(place))
        at = place[number]
        if at < 0:
            place[number] = -at
            for j in range(target.shape[1]):
                target[-at - 1, j] = values[e, j]
        else:
            for j in range(target.shape[1]):
                target[at - 1, j] += values[e, j]
