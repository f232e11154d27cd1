"""Sums of rows outside of a run: what the readers of a leaf sent back, and equal rows of a sparse gradient."""

from __future__ import annotations

from typing import Any

from numba import njit

__all__ = ["segment_sum", "add_rows"]


def segment_sum(values: Any, index: Any, bounds: Any, out: Any) -> None:
    """out[r] = the sum of values[index[e]] over e in bounds[r]:bounds[r + 1]."""
    _segment_sum(values.reshape(len(values), -1), index, bounds, out.reshape(len(out), -1))


def add_rows(target: Any, index: Any, values: Any) -> None:
    """target[index[e]] += values[e], also where an index comes twice."""
    _add_rows(target.reshape(len(target), -1), index, values.reshape(len(values), -1))


@njit(cache=True, nogil=True)
def _segment_sum(values, index, bounds, out):  # type: ignore[no-untyped-def]
    for r in range(len(out)):
        out[r] = 0
        for e in range(bounds[r], bounds[r + 1]):
            for j in range(out.shape[1]):
                out[r, j] += values[index[e], j]


@njit(cache=True, nogil=True)
def _add_rows(target, index, values):  # type: ignore[no-untyped-def]
    for e in range(len(index)):
        for j in range(target.shape[1]):
            target[index[e], j] += values[e, j]
