"""The tables of one direction: operations, which depend on the classes alone, and the launches of a layout.

Everything is there but the addresses, which every run puts in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...compiling import compiled
from ...layout import offsets_of
from . import ops
from .memory import address_of
from .prepare import Prepared
from .stages import NUM_COUNTS, Stage, Sum
from .workers import WORKERS

__all__ = ["Operations", "Round", "launches_of", "run_table"]

#: the classes of a round that have rows
Round = tuple[int, ...]
#: where a memory's place is counted from
_NOTHING, _BUFFERS, _MESSAGES = range(3)


class Operations:
    """The operations of all classes; their memory is numbered through, each class's from `first[c]` on.

    Attributes
    ----------
    script : int64 array; a row (class, begin, end): operations that run once over all rows of a class; a row
        (-1 - r, 0, 0): then the launches of round r run, in their order
    first_spans, spans : int64 arrays; (begin, end) of the operations that a launch of class c runs, stage after stage,
        are spans[first_spans[c]:first_spans[c + 1]]
    own : numbers of the memory that classes have for themselves
    own_counts, own_row_bytes : of that memory, see OwnMemory; counts are numbered through
    zeros : addresses of zeros
    fixed : (class, kind, what) of memory that belongs to the layout
    reads, outputs, messages, sends : (class, what) of memory in buffers, and in their messages
    asked : (class, kind, source) of memory that each run is given
    sums : number of the operation, class, and Sum, where the target is a gradient or must be zero first
    looked_up : class and Sum, where the rows of a gradient are given as they are
    """

    def __init__(self, prepared: Sequence[Prepared], first: Sequence[int], rounds: Sequence[Round], backward: bool,
                 packed: Sequence[bool], skipped: frozenset[tuple[int, Any]], as_rows: frozenset[tuple[int, Any]]):
        """
        Parameters
        ----------
        packed : of each class, whether it packs its weights
        skipped, as_rows : gradients, by class and source, that nobody asks for, and whose rows alone are asked for
        """
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
        forms = [p.forms[packs] for p, packs in zip(prepared, packed)]
        script = [(c, *span) for busy in rounds for c in busy for span in self._added(c, forms[c].packs[backward])]
        critical: list[list[tuple[int, int]]] = [[] for _ in prepared]
        for number, busy in enumerate(rounds):
            for c in busy:
                script += [(c, *span) for span in self._added(c, forms[c].stages[backward][0])]
            script.append((-1 - (len(rounds) - 1 - number if backward else number), 0, 0))
            for c in busy:
                critical[c] = self._added(c, forms[c].stages[backward][1])
            for c in busy:
                script += [(c, *span) for span in self._added(c, forms[c].stages[backward][2])]
        self.script = np.array(script, np.int64).reshape(-1, 3)
        self.first_spans = offsets_of(np.array([len(spans) for spans in critical], np.int64))
        self.spans = np.array([span for spans in critical for span in spans], np.int64).reshape(-1, 2)
        for name in ("_places", "_refs", "_words", "_kernels", "_first_words"):
            setattr(self, name, np.concatenate([*getattr(self, name), np.zeros(0, np.int64)]).astype(np.int64))
        self._ops = np.concatenate([*self._ops, np.zeros((0, ops.OP_WIDTH), np.int64)])
        memory = [(c, forms[c].memory[backward]) for c in sorted(c for busy in rounds for c in busy)]
        self.own, self.own_counts, self.own_row_bytes = (np.array(column, np.int64) for column in (
            [first[c] + number for c, own in memory for number in own.numbers],
            [NUM_COUNTS * c + count for c, own in memory for count in own.counts],
            [row_bytes for _, own in memory for row_bytes in own.row_bytes]))
        self._sort_out()

    def _added(self, c: int, stages: Sequence[Stage]) -> list[tuple[int, int]]:
        """Append the operations of stages; (begin, end) of each stage that has some."""
        return [span for stage in stages for span in [self._add(c, stage)] if span[0] < span[1]]

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
            kind, what = name if name is not None else ("value", None)
            kinds.setdefault(kind, []).append((number, c, what))
        for own in ("value", "packed"):
            kinds.pop(own, None)
        asked = [(number, (c, kind, source)) for kind in ("shared", "external", "output_grad", "pull_grad")
                 for number, c, source in kinds.pop(kind, ())]
        self.asked = [memory for _, memory in asked]
        self._asked_numbers = np.array([number for number, _ in asked], np.int64)
        placed = [kinds.pop(kind, []) for kind in ("zeros", "buffer", "output", "messages", "send")]
        zeros, *in_blocks = placed
        self._zeros = [np.zeros(spec.shape, spec.dtype) for _, _, spec in zeros]
        self.zeros = [address_of(memory) for memory in self._zeros]
        self.fixed = [(c, kind, what) for kind, named in kinds.items() for _, c, what in named]
        self.reads, self.outputs, self.messages, self.sends = (
            [(c, what) for _, c, what in named] for named in in_blocks)
        numbers = [number for named in (*kinds.values(), *placed) for number, _, _ in named]
        bases = [_NOTHING] * len(self.fixed + self.zeros) + [_BUFFERS] * len(self.reads + self.outputs)
        self._numbers = np.array(numbers, np.int64)
        self._bases = np.array(bases + [_MESSAGES] * (len(numbers) - len(bases)), np.int64)
        del self._named, self._skipped, self._as_rows, self._prepared       # (they may die)

    def with_addresses(self, addresses: Any, places: Any, own_offsets: Any, asked: Sequence[int],
                       blocks: tuple[int, int, int]) -> tuple[Any, Any]:
        """The rows of the op table, and the kernels' own tables, which must live as long.

        Parameters
        ----------
        addresses : int64 array, takes the addresses of all memory
        places : int64 array: of fixed memory and zeros the addresses; of reads, outputs, messages and sends how far
            behind the beginning of their block they are
        own_offsets : int64 array, the same for the classes' own memory
        asked : addresses
        blocks : the addresses of the blocks of buffers, of messages and of own memory
        """
        words = np.empty(len(self._words), np.int64)
        made = _with_addresses(self._ops, self._places, self._refs, self._words, self._kernels, self._first_words,
                               self._numbers, self._bases, places, self.own, own_offsets, self._asked_numbers,
                               np.array(asked, np.int64), *blocks, addresses, words, address_of(words))
        return made, words


@compiled
def _with_addresses(table, op_places, refs, words, kernels, first_words, numbers, bases, places, own, own_offsets,
                    asked_numbers, asked, buffers, messages, own_block, addresses, made_words, at_words):
    for i in range(len(numbers)):
        base = buffers if bases[i] == _BUFFERS else messages if bases[i] == _MESSAGES else 0
        addresses[numbers[i]] = base + places[i]
    for i in range(len(own)):
        addresses[own[i]] = own_block + own_offsets[i]
    for i in range(len(asked_numbers)):
        addresses[asked_numbers[i]] = asked[i]
    made = table.copy()
    flat = made.reshape(-1)
    for i in range(len(op_places)):
        flat[op_places[i]] = addresses[refs[i]]
    for i in range(len(words)):
        made_words[i] = addresses[words[i]]
    for i in range(len(kernels)):
        flat[kernels[i]] = at_words + 8 * first_words[i]
    return made


@compiled
def launches_of(script, first_spans, spans, order, round_of, backward, frames, first_frames, bounds):
    """In every round: eager parts of its classes, its launches in order, lazy parts of its classes.

    Parameters
    ----------
    script, first_spans, spans : see Operations
    order : (class, launch), a row each
    round_of : class -> its round
    backward : whether launches run from the last to the first
    frames, first_frames : the frames of all classes, each of all of it and of its launches, and where they begin
    bounds : class -> address of where the edges of each row begin, or 0

    Returns
    -------
    the table, and how many operations its launches start
    """
    # launches by their round, in order
    begins = np.zeros(len(round_of) + 2, np.int64)
    for i in range(len(order)):
        begins[round_of[order[i, 0]] + 2] += 1
    for r in range(len(round_of)):
        begins[r + 2] += begins[r + 1]
    by_round = np.empty(len(order), np.int64)
    count = len(script)
    for k in range(len(order)):
        i = len(order) - 1 - k if backward else k
        c = order[i, 0]
        by_round[begins[round_of[c] + 1]] = i
        begins[round_of[c] + 1] += 1
        count += first_spans[c + 1] - first_spans[c]

    made, filled, started = np.empty((count, ops.LAUNCH_WIDTH), np.int64), 0, 0
    for s in range(len(script)):
        c = script[s, 0]
        for i in range(begins[-1 - c], begins[-c]) if c < 0 else range(1):
            if c < 0:
                mine = order[by_round[i], 0]
                frame, first, last = first_frames[mine] + 1 + order[by_round[i], 1], first_spans[mine], \
                    first_spans[mine + 1]
            else:
                mine, frame, first, last = c, first_frames[c], 0, 1
            for j in range(first, last):
                begin, end = (spans[j, 0], spans[j, 1]) if c < 0 else (script[s, 1], script[s, 2])
                made[filled, ops.OP_BEGIN], made[filled, ops.OP_END] = begin, end
                for k in range(4):
                    made[filled, ops.START + k] = frames[frame, k]
                made[filled, ops.BOUNDS] = bounds[mine]
                filled += 1
                started += end - begin
    return made[:filled], started


def run_table(launches: Any, table: Any) -> None:
    """Hand launches and operations with their addresses to the workers."""
    if len(launches):
        WORKERS.execute(launches, table)
