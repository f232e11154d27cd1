"""Equal rows of a sparse gradient, added up."""

from __future__ import annotations

from typing import Any

from numba import njit

__all__ = ["add_rows"]


def add_rows(target: Any, index: Any, values: Any) -> None:
    """target[index[e]] += values[e], also where an index comes twice."""
    _add_rows(target.reshape(len(target), -1), index, values.reshape(len(values), -1))


@njit(cache=True, nogil=True)
def _add_rows(target, index, values):  # type: ignore[no-untyped-def]
    for e in range(len(index)):
        for j in range(target.shape[1]):
            target[index[e], j] += values[e, j]
