"""Equal rows of a sparse gradient, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

__all__ = ["add_equal_rows"]


def add_equal_rows(parts: Sequence[tuple[Any, Any]], size: int, make: Any) -> Any:
    """Rows with their numbers; those of equal numbers are added up.

    Parameters
    ----------
    parts : (row numbers, rows) of each part
    size : of the table; numbers outside of it count as its first or last, as a lookup takes them
    make : n -> an array of n rows that takes the sums

    Returns
    -------
    int64 array, the numbers that occur, ascending
    """
    numbers = [np.ravel(n) for n, _ in parts]
    place = np.zeros(size, np.int32)
    for part in numbers:
        _mark(place, part)
    kept = _kept(place)
    target = make(len(kept))
    width = int(np.prod(target.shape[1:]))
    for part, (_, values) in zip(numbers, parts):
        _add_rows(target.reshape(-1, width), place, part, values.reshape(-1, width))
    return kept


@njit(cache=True, nogil=True)
def _row(number, size):  # type: ignore[no-untyped-def]
    return min(max(int(number), 0), size - 1)


@njit(cache=True, nogil=True)
def _mark(place, numbers):  # type: ignore[no-untyped-def]
    for e in range(len(numbers)):
        place[_row(numbers[e], len(place))] = 1


@njit(cache=True, nogil=True)
def _kept(place):  # type: ignore[no-untyped-def]
    """The marked numbers; `place` becomes -1 - the place of each among them, which says that its row is still empty."""
    count = 0
    for k in range(len(place)):
        count += place[k]
    kept, count = np.empty(count, np.int64), 0
    for k in range(len(place)):
        if place[k]:
            kept[count] = k
            count += 1
            place[k] = -count
    return kept


@njit(cache=True, nogil=True)
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
