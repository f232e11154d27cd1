"""The table of one direction of a layout: everything but the addresses, which every run puts in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import ops
from .memory import address_of
from .stages import Stage, Sum
from .workers import WORKERS

__all__ = ["Table"]


class Table:
    """Operations, and the launches that run them; memory has the numbers of a whole layout."""

    def __init__(self) -> None:
        self.num_ops = self._num_words = self.started = 0
        self._ops: list[Any] = []
        self._places: list[Any] = []            # where in the operations addresses go ..
        self._refs: list[Any] = []              # .. and of which memory
        self._words: list[Any] = []             # memory that all kernels' own tables name
        self._kernels: list[Any] = []           # where the addresses of these tables go ..
        self._first_words: list[Any] = []       # .. and where each begins among the words
        self._launches: list[Any] = []

    def add(self, stage: Stage, first: int) -> None:
        """Append the operations of a stage, without its sums; its memory is numbered from `first` on."""
        if not len(stage.rows):
            return
        self._places.append(stage.places + self.num_ops * ops.OP_WIDTH)
        self._refs.append(stage.refs + first)
        if len(stage.kernels):
            self._kernels.append(stage.kernels + self.num_ops * ops.OP_WIDTH)
            self._first_words.append(stage.first_words + self._num_words)
            self._words.append(stage.words + first)
            self._num_words += len(stage.words)
        self._ops.append(stage.rows)
        self.num_ops += len(stage.rows)

    def add_sum(self, part: Sum, first: int) -> int:
        """Append a sum; its number."""
        number = self.num_ops
        reads, places = [*part.reads, part.own], [*part.places, ops.C]      # (a gradient's address is put in by `run`)
        self._places.append(np.array(places, np.int64) + number * ops.OP_WIDTH)
        self._refs.append(np.array(reads, np.int64) + first)
        self._ops.append(part.rows)
        self.num_ops += 1
        return number

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

    def finish(self) -> None:
        """Nothing more is added."""
        for name in ("_ops", "_places", "_refs", "_words", "_kernels", "_first_words", "_launches"):
            parts = getattr(self, name)
            setattr(self, name, np.concatenate(parts) if parts else np.zeros(0, np.int64))
        if len(self._launches):
            self.started = int((self._launches[:, ops.OP_END] - self._launches[:, ops.OP_BEGIN]).sum())

    def run(self, addresses: Any, targets: Iterable[tuple[int, int, bool]]) -> int:
        """Hand the table to the workers; the number of operations that they start.

        Parameters
        ----------
        addresses : int64 array, of the memory
        targets : number of a sum, where it goes, and whether it is added to what is there
        """
        if not len(self._launches):
            return 0
        made = self._ops.copy()
        flat = made.reshape(-1)
        flat[self._places] = addresses[self._refs]
        words = addresses[self._words]
        flat[self._kernels] = self._first_words * 8 + address_of(words)
        for number, address, accumulate in targets:
            made[number, ops.C], made[number, ops.ACCUMULATE] = address, accumulate
        WORKERS.execute(self._launches, made)
        return self.started
