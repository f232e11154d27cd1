"""The tables of one direction: operations, which depend on the classes alone, and the launches of a layout.

Everything is there but the addresses, which every run puts in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import ops
from .memory import address_of
from .prepare import Prepared
from .stages import Stage, Sum
from .workers import WORKERS

__all__ = ["Operations", "Round", "launches_of", "run_table"]

#: the classes of a round that have rows, and those that have launches in order
Round = tuple[tuple[int, ...], tuple[int, ...]]


class Operations:
    """The operations of all classes; their memory is numbered through, each class's from `first[c]` on.

    Attributes
    ----------
    spans : for each round and phase: class -> (begin, end) of the operations of each stage that has some
    own : numbers of the memory that classes have for themselves
    in_buffers, in_messages, fixed, asked : (number, class, name) of all other memory, by where it is
    sums : number of the operation, class, and Sum, where the target is a gradient or must be zero first
    looked_up : class and Sum, where the rows of a gradient are given as they are
    """

    def __init__(self, prepared: Sequence[Prepared], first: Sequence[int], rounds: Sequence[Round], backward: bool,
                 skipped: set[tuple[int, Any]], as_rows: set[tuple[int, Any]]):
        """`skipped` and `as_rows` name gradients by class and source: nobody asks for them, or for their rows alone."""
        self._prepared, self._first = prepared, first
        self._skipped, self._as_rows = skipped, as_rows
        self._num_ops = self._num_words = 0
        self._ops: Any = []
        self._places: Any = []                  # where in the operations addresses go ..
        self._refs: Any = []                    # .. and of which memory
        self._words: Any = []                   # memory that all kernels' own tables name
        self._kernels: Any = []                 # where the addresses of these tables go ..
        self._first_words: Any = []             # .. and where each begins among the words
        self._named: dict[int, tuple[int, Any]] = {}
        self.sums: list[tuple[int, int, Sum]] = []
        self.looked_up: list[tuple[int, Sum]] = []
        self.spans = [[{c: [span for stage in prepared[c].stages[backward][phase]
                            for span in [self._add(c, stage)] if span[0] < span[1]] for c in members}
                       for phase, members in ((0, busy), (1, in_order), (2, busy))] for busy, in_order in rounds]
        for name in ("_ops", "_places", "_refs", "_words", "_kernels", "_first_words"):
            parts = getattr(self, name)
            setattr(self, name, np.concatenate(parts) if parts else np.zeros(0, np.int64))
        busy_ones = {c for busy, _ in rounds for c in busy}
        self.own = np.array([first[c] + number for c in range(len(prepared)) if c in busy_ones
                             for number in prepared[c].memory[backward].numbers], np.int64)
        self._sort_out()

    def _add(self, c: int, stage: Stage) -> tuple[int, int]:
        """Append the operations of a stage; their numbers."""
        begin, first = self._num_ops, self._first[c]
        self._name(c, stage.reads)
        if len(stage.rows):
            self._append(stage.rows, stage.places, stage.refs + first)
        if len(stage.kernels):
            self._kernels.append(stage.kernels + begin * ops.OP_WIDTH)
            self._first_words.append(stage.first_words + self._num_words)
            self._words.append(stage.words + first)
            self._num_words += len(stage.words)
        for part in stage.sums:
            self._add_sum(c, part)
        return begin, self._num_ops

    def _add_sum(self, c: int, part: Sum) -> None:
        if not part.own and (c, part.source) in self._skipped:
            return
        self._name(c, part.reads)
        if not part.own and (c, part.source) in self._as_rows:
            self.looked_up.append((c, part))
            return
        if part.own:
            self._name(c, [part.own])
        if not part.own or part.adds_into_zeros:
            self.sums.append((self._num_ops, c, part))
        # (The address of a gradient is put in by each run.)
        reads, places = [*part.reads, part.own], [*part.places, ops.C]
        self._append(part.rows, np.array(places, np.int64), np.array(reads, np.int64) + self._first[c])

    def _append(self, rows: Any, places: Any, refs: Any) -> None:
        self._places.append(places + self._num_ops * ops.OP_WIDTH)
        self._refs.append(refs)
        self._ops.append(rows)
        self._num_ops += len(rows)

    def _name(self, c: int, refs: Iterable[int]) -> None:
        names, first = self._prepared[c].refs.list, self._first[c]
        for ref in refs:
            self._named[first + ref] = c, names[ref]

    def _sort_out(self) -> None:
        """Memory by where it is; none at all stays at 0, and a class's own has its block."""
        kinds: dict[str, list[tuple[int, int, Any]]] = {}
        for number, (c, name) in self._named.items():
            kinds.setdefault(name[0] if name is not None else "", []).append((number, c, name))
        for kind in ("", "value"):
            kinds.pop(kind, None)

        def taken(*names: str) -> list[tuple[int, int, Any]]:
            return [one for kind in names for one in kinds.pop(kind, ())]

        self.in_buffers, self.in_messages = taken("output", "buffer"), taken("messages", "send")
        self.asked = taken("shared", "external", "output_grad", "pull_grad")
        self.fixed = taken(*list(kinds))
        del self._named, self._skipped, self._as_rows, self._prepared       # (they may die)

    def with_addresses(self, addresses: Any, targets: Iterable[tuple[int, int, bool]]) -> tuple[Any, Any]:
        """The rows of the op table, and the kernels' own tables, which must live as long.

        Parameters
        ----------
        addresses : int64 array, of the memory
        targets : number of a sum, where it goes, and whether it is added to what is there
        """
        made = self._ops.copy()
        flat = made.reshape(-1)
        flat[self._places] = addresses[self._refs]
        words = addresses[self._words]
        flat[self._kernels] = self._first_words * 8 + address_of(words)
        for number, address, accumulate in targets:
            made[number, ops.C], made[number, ops.ACCUMULATE] = address, accumulate
        return made, words


def launches_of(spans: Sequence[Sequence[dict[int, Any]]], orders: Sequence[Sequence[tuple[int, int]]], frames: Any,
                bounds: Any) -> Any:
    """In every round: eager parts of its classes, its launches in order, lazy parts of its classes.

    Parameters
    ----------
    spans : see Operations
    orders : of each round: (class, launch)
    frames : class -> the frame of all of it, and of each launch
    bounds : class -> address of where the edges of each row begin, or 0
    """
    found: list[Any] = []
    for (eager, critical, lazy), order in zip(spans, orders):
        found += [_rows(frames[c][:1], mine, bounds[c]) for c, mine in eager.items() if mine]
        found += _in_order(order, {c: (frames[c][1:], mine, bounds[c]) for c, mine in critical.items()})
        found += [_rows(frames[c][:1], mine, bounds[c]) for c, mine in lazy.items() if mine]
    return np.concatenate([rows.reshape(-1, ops.LAUNCH_WIDTH) for rows in found]) if found else \
        np.zeros((0, ops.LAUNCH_WIDTH), np.int64)


def _in_order(order: Sequence[tuple[int, int]], classes: dict[int, Any]) -> list[Any]:
    """The launches of several classes, as `order` names them."""
    if len(classes) == 1:
        ((frames, spans, bounds),) = classes.values()
        return [_rows(frames[[k for _, k in order]], spans, bounds)] if spans else []
    blocks = {c: _rows(*parts) for c, parts in classes.items()}
    if len({block.shape[1] for block in blocks.values()}) == 1 and order:      # as a rule: one stage each
        offsets = dict(zip(blocks, np.cumsum([0, *[len(b) for b in blocks.values()]]).tolist()))
        pairs = np.array(order, np.int64)
        first = np.zeros(max(blocks) + 1, np.int64)
        first[list(offsets)] = list(offsets.values())
        every = np.concatenate(list(blocks.values()))
        return [every[first[pairs[:, 0]] + pairs[:, 1]]]
    return [blocks[c][k] for c, k in order]


def _rows(frames: Any, spans: Sequence[tuple[int, int]], bounds: int) -> Any:
    """Every frame with every span of operations."""
    rows = np.zeros((len(frames), len(spans), ops.LAUNCH_WIDTH), np.int64)
    rows[:, :, ops.START:ops.EDGE_STOP + 1] = frames[:, None, :]
    if spans:
        rows[:, :, ops.OP_BEGIN:ops.OP_END + 1] = spans
    rows[:, :, ops.BOUNDS] = bounds
    return rows


def run_table(launches: Any, made: tuple[Any, Any]) -> None:
    """Hand launches and operations with their addresses to the workers."""
    if len(launches):
        WORKERS.execute(launches, made[0])
