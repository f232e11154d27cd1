"""Equal rows of a sparse gradient, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

__all__ = ["add_equal_rows"]


def add_equal_rows(parts: Sequence[tuple[Any, Any]], make: Any) -> Any:
    """Rows with their numbers; those of equal numbers are added up.

    Parameters
    ----------
    parts : (row numbers, rows) of each part
    make : n -> an array of n rows that takes the sums

    Returns
    -------
    int64 array, the numbers that occur, ascending
    """
    numbers = np.concatenate([np.ravel(n).astype(np.int64) for n, _ in parts] or [np.zeros(0, np.int64)])
    order = np.argsort(numbers, kind="stable")
    place, kept = _places(numbers, order)
    target = make(len(kept))
    target[...] = 0
    target, start = target.reshape(len(kept), -1), 0
    for n, values in parts:
        _add_rows(target, place[start:start + np.size(n)], values.reshape(np.size(n), -1))
        start += np.size(n)
    return kept


@njit(cache=True, nogil=True)
def _places(numbers, order):  # type: ignore[no-untyped-def]
    """For each number its place among the different ones, and these; `order` sorts the numbers."""
    place, kept = np.empty_like(numbers), np.empty_like(numbers)
    count = 0
    for k in range(len(order)):
        number = numbers[order[k]]
        if k == 0 or number != kept[count - 1]:
            kept[count] = number
            count += 1
        place[order[k]] = count - 1
    return place, kept[:count]


@njit(cache=True, nogil=True)
def _add_rows(target, index, values):  # type: ignore[no-untyped-def]
    for e in range(len(index)):
        for j in range(target.shape[1]):
            target[index[e], j] += values[e, j]
