"""Heads: the values of a flush that gradients may come from, and their messages. No device, no MXNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import compiled, stretches

from .analyzer import Grouping, Scan
from .values import WIDTHS

__all__ = ["Heads"]


class Heads:
    """The values that somebody holds and through which a gradient may flow, buffer after buffer.

    Each has a stretch of messages, behind all those of readers in its buffer.
    """

    def __init__(self, held: Any, s: Scan, g: Grouping, specs: Any):
        widths = np.array([WIDTHS[spec] for spec in specs[held].tolist()], np.int64)
        self.values, self.buffers, self.widths, self.offsets, self._rows, ends, row_ends = _place_heads(
            held, widths, s.active, s.maker, g.value_buffers, g.value_rows, len(g.buffer_rows))
        self._ends, self._row_ends = ends.tolist(), row_ends.tolist()

    @property
    def in_buffers(self) -> list[int]:
        """The buffers that have heads."""
        return [b for b in range(len(self._ends) - 1) if self._ends[b] < self._ends[b + 1]]

    def of(self, buffer: int) -> range:
        """The heads in a buffer."""
        return range(self._ends[buffer], self._ends[buffer + 1])

    def rows(self, buffer: int) -> Any:
        """The buffer's rows that the heads in it occupy, head after head."""
        return self._rows[self._row_ends[buffer]:self._row_ends[buffer + 1]]

    def places(self, buffer: int, heads: Any) -> Any:
        """The places of some of the heads among the rows of the heads in a buffer."""
        chosen = np.unique(heads[self.buffers[heads] == buffer])        # (one may come twice)
        return stretches(self.offsets[chosen], self.widths[chosen])

    def messages(self, buffer: int, row_shape: tuple[int, ...], dtype: Any, heads: Any, grads: Sequence[Any]) -> Any:
        """Gradients of some of the heads (None: ones) as messages of a buffer; zeros for the others."""
        part = np.zeros((len(self.rows(buffer)), *row_shape), dtype)
        if all([g is None for g in grads]):
            part[self.places(buffer, heads)] = 1
            return part
        chosen = self.buffers[heads] == buffer
        for k in np.flatnonzero(chosen):        # (of one that comes twice the last counts, as in MXNet)
            start = int(self.offsets[heads[k]])
            stretch = part[start:start + int(self.widths[heads[k]])]
            stretch[...] = 1 if grads[k] is None else grads[k].reshape(stretch.shape)
        return part


@compiled
def _place_heads(held, held_widths, active, maker, value_buffers, value_rows, num_buffers):  # type: ignore[no-untyped-def]
    """Those of the held values through which a gradient may flow, by buffer.

    Returns
    -------
    values, buffers, widths : of these heads
    offsets : where the stretch of each begins among those of its buffer
    rows : the rows of all heads
    ends, row_ends : where heads and rows of each buffer begin, and the last ones end
    """
    ends, row_ends = np.zeros(num_buffers + 1, np.int64), np.zeros(num_buffers + 1, np.int64)
    for n in range(len(held)):
        if active[maker[held[n]]]:
            ends[value_buffers[held[n]] + 1] += 1
            row_ends[value_buffers[held[n]] + 1] += held_widths[n]
    for b in range(num_buffers):
        ends[b + 1] += ends[b]
        row_ends[b + 1] += row_ends[b]
    values, buffers = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    widths, offsets = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    rows, free, free_row = np.empty(row_ends[-1], np.int64), ends.copy(), row_ends.copy()
    for n in range(len(held)):
        v, b = held[n], value_buffers[held[n]]
        if active[maker[v]]:
            k = free[b]
            values[k], buffers[k], widths[k], offsets[k] = v, b, held_widths[n], free_row[b] - row_ends[b]
            for row in range(held_widths[n]):
                rows[free_row[b] + row] = value_rows[v] + row
            free[b] += 1
            free_row[b] += held_widths[n]
    return values, buffers, widths, offsets, rows, ends, row_ends
