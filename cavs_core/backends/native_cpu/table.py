"""The table of one direction of a run, while it is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import ops
from .memory import address_of
from .workers import WORKERS

__all__ = ["Table"]


class Table:
    """Operations, and the launches that run them."""

    def __init__(self) -> None:
        self.num_ops = 0
        self._ops: list[Any] = []
        self._words: list[Any] = []             # of all kernels' own tables
        self._num_words = 0
        self._kernels: list[Any] = []           # (op, its first word)
        self._launches: list[Any] = []

    def add(self, rows: Any, words: Any = (), kernels: Any = ()) -> None:
        """Append operations; those of `kernels` (row, first word) get the address of their words."""
        if len(kernels):
            self._kernels.append(kernels + np.array([self.num_ops, self._num_words]))
            self._words.append(words)
            self._num_words += len(words)
        self._ops.append(rows)
        self.num_ops += len(rows)

    def launch(self, frames: Any, spans: Sequence[tuple[int, int]], bounds: int) -> None:
        """Every frame with every span of operations."""
        if spans and len(frames):
            self._launches.append(self._rows(frames, spans, bounds).reshape(-1, ops.LAUNCH_WIDTH))

    def launch_in_order(self, order: Sequence[tuple[int, int]], classes: dict[int, Any]) -> None:
        """The launches of several classes, as `order` names them."""
        if len(classes) == 1:
            ((frames, spans, bounds),) = classes.values()
            self.launch(frames[[k for _, k in order]], spans, bounds)
            return
        blocks = {c: self._rows(*parts) for c, parts in classes.items()}
        if len({block.shape[1] for block in blocks.values()}) == 1 and order:      # as a rule: one stage each
            offsets = dict(zip(blocks, np.cumsum([0, *[len(b) for b in blocks.values()]]).tolist()))
            pairs = np.array(order, np.int64)
            first = np.zeros(max(blocks) + 1, np.int64)
            first[list(offsets)] = list(offsets.values())
            every = np.concatenate(list(blocks.values()))
            self._launches.append(every[first[pairs[:, 0]] + pairs[:, 1]].reshape(-1, ops.LAUNCH_WIDTH))
        else:
            self._launches += [blocks[c][k] for c, k in order]

    @staticmethod
    def _rows(frames: Any, spans: Sequence[tuple[int, int]], bounds: int) -> Any:
        rows = np.zeros((len(frames), len(spans), ops.LAUNCH_WIDTH), np.int64)
        rows[:, :, ops.START:ops.EDGE_STOP + 1] = frames[:, None, :]
        rows[:, :, ops.OP_BEGIN:ops.OP_END + 1] = np.array(spans, np.int64).reshape(-1, 2)
        rows[:, :, ops.BOUNDS] = bounds
        return rows

    def run(self) -> int:
        """Hand the table to the workers; the number of operations that they start."""
        if not self._launches:
            return 0
        launches, table = np.concatenate(self._launches), np.concatenate(self._ops)
        words = np.concatenate([*self._words, np.zeros(0, np.int64)])
        if self._kernels:
            number, first = np.concatenate(self._kernels).T
            table[number, ops.A] = address_of(words) + 8 * first
        WORKERS.execute(launches, table)
        return int((launches[:, ops.OP_END] - launches[:, ops.OP_BEGIN]).sum())
