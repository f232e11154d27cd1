"""What is known of a run before it has any memory: its tables, and where each address comes from.

It depends on the layout alone, and is remembered for as long as the layout lives: a run of a known plan only takes
memory and puts the addresses in.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...layout import ClassLayout, Layout, Place, offsets_of
from ...plan import ClassPlan
from ...program import CHILD, Spec
from .ir import ScatterOp
from .memory import ARENA, address_of
from .packing import packs_weights
from .prepare import Prepared, prepare, size_of
from .stages import Sum, counts_of, own_offsets
from .table import Operations, Round, launches_of

__all__ = ["Arrays", "Assembly", "Blocks", "Direction", "LookedUp", "assembly_of", "is_assembled"]


@cache
def _look_of(spec: Spec) -> tuple[tuple[int, ...], np.dtype, int]:
    """The shape of a row, its dtype, and the bytes that it takes."""
    dtype = np.dtype(spec.dtype)
    return spec.shape, dtype, size_of(spec) * dtype.itemsize


class Blocks:
    """Arrays in one block of memory; `offsets` says where each begins."""

    def __init__(self, rows: Sequence[int], specs: Sequence[Spec]):
        self.looks, self.offsets, self.num_bytes = [], [], 0
        for count, spec in zip(rows, specs):
            shape, dtype, row_bytes = _look_of(spec)
            self.looks.append(((count, *shape), dtype, self.num_bytes))
            self.offsets.append(self.num_bytes)
            self.num_bytes += -(-count * row_bytes // 64) * 64


class Arrays:
    """The arrays of Blocks in memory; each is made when somebody asks for it."""

    def __init__(self, blocks: Blocks):
        self.block, self._looks = ARENA.take(blocks.num_bytes), blocks.looks

    def __getitem__(self, k: int) -> Any:
        return self.block.array(*self._looks[k])


class LookedUp(NamedTuple):
    """Rows of a gradient that is given as they are: who takes them, and where their numbers and they themselves are."""

    name: Any
    op: ScatterOp
    num_rows: int
    refs: list[int]


class Direction:
    """The tables of one direction of a layout, and where the memory that they name comes from.

    Attributes
    ----------
    operations : Operations
    launches : int64 array, with the numbers of operations
    started : how many operations the launches start
    own_offsets, own_bytes : where the classes' own memory begins in the block of the direction, and the size of that
    places : int64 array, where all other memory is that is not asked for, see `Operations.with_addresses`
    looked_up : list of LookedUp
    """

    def __init__(self, assembly: Assembly, layout: Layout, backward: bool, wanted: frozenset[Any],
                 sparse: frozenset[Any]):
        self.wanted, self.sparse = wanted, sparse
        parts, row_bytes = layout.classes, assembly.row_bytes
        made = self.operations = assembly.operations(parts, backward, wanted, sparse)
        self.launches, self.started = launches_of(
            made.script, made.first_spans, made.spans, layout.order, assembly.round_of, backward, assembly.frames,
            assembly.first_frames, assembly.bounds)
        self.own_offsets = own_offsets(assembly.counts, made.own_counts, made.own_row_bytes)
        self.own_bytes = int(self.own_offsets[-1])
        in_buffers, in_messages = assembly.buffers.offsets, assembly.messages.offsets
        places = [_fixed(layout, parts[c], kind, what) for c, kind, what in made.fixed] + made.zeros
        places += [in_buffers[parts[c].reads[port].buffer] for c, port in made.reads]
        places += [_within(in_buffers, parts[c].writes[k], row_bytes) for c, k in made.outputs]
        places += [in_messages[parts[c].writes[k].buffer] for c, k in made.messages]
        places += [_within(in_messages, parts[c].sends[port], row_bytes) for c, port in made.sends]
        self.places = np.array(places, np.int64)
        self.looked_up = [_looked_up(c, parts[c], part, assembly.first[c]) for c, part in made.looked_up]


def _fixed(layout: Layout, part: ClassLayout, kind: str, what: Any) -> int:
    """The address of what the layout has."""
    if kind == "rows":
        return address_of(part.reads[what].rows.rows)
    if kind == "pull":
        return address_of(layout.messages[part.writes[what].buffer].pull.rows)
    if kind == "pull_bounds":
        at = part.writes[what]
        return address_of(layout.messages[at.buffer].segments.indptr) + 8 * at.base
    if kind == "external_rows":
        return address_of(part.external.rows)
    if kind == "pushed_rows":
        assert part.pushed is not None
        return address_of(part.pushed.rows)
    assert part.edges is not None and kind in ("bounds", "edge_row")
    return address_of(part.edges.indptr if kind == "bounds" else part.edges.row)


def _within(offsets: Sequence[int], at: Place, row_bytes: Sequence[int]) -> int:
    return offsets[at.buffer] + at.base * row_bytes[at.buffer]


def _looked_up(c: int, part: ClassLayout, looked: Sum, first: int) -> LookedUp:
    op = looked.op
    assert isinstance(op, ScatterOp)
    rows = (part.whole.num_edges if op.domain == CHILD else part.whole.num_rows) * op.count
    return LookedUp(part.names.get(looked.source, looked.source), op, rows, [first + ref for ref in looked.reads])


class Assembly:
    """What is known of the runs of a layout.

    Attributes
    ----------
    prepared : Prepared of each class
    first : the first number of each class's memory among that of all
    frames, first_frames : the frames of all classes, and where those of each begin
    counts : what memory of classes has rows for, see `counts_of`
    bounds : class -> address of where the edges of each row begin, or 0
    round_of : class -> its round
    buffers, messages : Blocks
    """

    def __init__(self, layout: Layout, plans: Sequence[ClassPlan]):
        self.plans = list(plans)
        parts = layout.classes
        self.prepared: list[Prepared] = prepare(plans, layout)
        counts = [len(p.refs.list) for p in self.prepared]
        self.first = [sum(counts[:c]) for c in range(len(counts))]      # of each class it is none at all, at 0
        self.num_refs = sum(counts)
        self.frames = np.concatenate([np.zeros((0, 4), np.int64), *[part.frames for part in parts]])
        self.first_frames = offsets_of(np.array([len(part.frames) for part in parts], np.int64))
        self.counts = counts_of(self.frames, self.first_frames)
        self._packed = tuple([packs_weights(rows, edges) for rows, edges in self.counts[:, :2].tolist()])
        self.bounds = np.array([0 if part.edges is None else address_of(part.edges.indptr) for part in parts], np.int64)
        self.round_of = np.zeros(len(parts), np.int64) if layout.round_of is None else layout.round_of
        self._rounds = _rounds(layout)
        self._named = any(part.names for part in parts)
        specs = layout.row_specs
        self.row_bytes = [_look_of(spec)[2] for spec in specs]
        self.buffers = Blocks([max(n, 1) for n in layout.buffer_rows], specs)
        self.messages = Blocks([m.num_rows for m in layout.messages], specs)
        self._directions: dict[bool, Direction] = {}

    def direction(self, layout: Layout, backward: bool, wanted: Iterable[Any] = (),
                  sparse: Iterable[Any] = ()) -> Direction:
        """The table of a direction; of a backward pass for the gradients that are asked for."""
        asked = frozenset(wanted), frozenset(sparse)
        known = self._directions.get(backward)
        if known is None or (known.wanted, known.sparse) != asked:
            known = self._directions[backward] = Direction(self, layout, backward, *asked)
        return known

    def operations(self, parts: Sequence[ClassLayout], backward: bool, wanted: frozenset[Any],
                   sparse: frozenset[Any]) -> Operations:
        """Of all classes that have rows. They are remembered: mini-batches of a model differ in the layout alone."""
        rounds = self._rounds[backward]
        # Where classes have their own names for what they share, the same names may stand for something else next time.
        asked = self._asked(parts, wanted, sparse) if self._named and backward else (wanted, sparse)
        key = (tuple(map(id, self.prepared)), rounds, backward, self._packed, self._named, asked)
        known = _operations.get(key)
        if known is None:
            known = Operations(self.prepared, self.first, rounds, backward, self._packed,
                               *self._asked(parts, wanted, sparse))
            for prepared in self.prepared:
                if id(prepared) not in _watched:
                    _watched.add(id(prepared))
                    weakref.finalize(prepared, _forget, id(prepared))
            while len(_operations) >= _MOST:
                _operations.pop(next(iter(_operations)), None)
            _operations[key] = known
        return known

    def _asked(self, parts: Sequence[ClassLayout], wanted: frozenset[Any],
               sparse: frozenset[Any]) -> tuple[frozenset[Any], frozenset[Any]]:
        """The gradients, by class and source, that nobody asks for, and those that are asked for as rows."""
        skipped, as_rows = set(), set()
        for c, prepared in enumerate(self.prepared):
            for source in prepared.grad_sources:
                name = parts[c].names.get(source, source)
                if name not in wanted:
                    skipped.add((c, source))
                elif name in sparse:
                    as_rows.add((c, source))
        return frozenset(skipped), frozenset(as_rows)


def _rounds(layout: Layout) -> tuple[tuple[Round, ...], tuple[Round, ...]]:
    """Of each round the classes that have rows, in the order in which they run first, round after round; backward, too.

    (Several may add to one gradient: the first one sets it.)
    """
    busy = [c for c, part in enumerate(layout.classes) if part.has_rows]
    launched = layout.order[:, 0].tolist()
    round_of = [0] * len(layout.classes) if layout.round_of is None else layout.round_of.tolist()
    both = []
    for order in (launched, launched[::-1]):
        found: list[list[int]] = [[] for _ in range(max(round_of, default=0) + 1)]
        for c in {**dict.fromkeys(order), **dict.fromkeys(busy)}:
            if layout.classes[c].has_rows:
                found[round_of[c]].append(c)
        both.append(tuple(map(tuple, found)))
    return both[0], both[1][::-1]


_MOST = 256
_operations: dict[Any, Operations] = {}     # the last made; they hold parameters, and go with the classes they are of
_watched: set[int] = set()                  # ids of Prepared


def _forget(prepared: int) -> None:
    _watched.discard(prepared)
    for key in list(_operations):
        if prepared in key[0]:
            _operations.pop(key, None)


_assemblies: dict[int, Assembly] = {}       # id of a layout, while it lives


def assembly_of(layout: Layout, plans: Sequence[ClassPlan]) -> Assembly:
    """What is known of the runs of a layout with these plans."""
    if is_assembled(layout, plans):
        return _assemblies[id(layout)]
    if id(layout) not in _assemblies:
        weakref.finalize(layout, _assemblies.pop, id(layout), None)
    made = _assemblies[id(layout)] = Assembly(layout, plans)
    return made


def is_assembled(layout: Layout, plans: Sequence[ClassPlan]) -> bool:
    """Whether a layout has run with these plans: all its kernels are compiled."""
    known = _assemblies.get(id(layout))
    return known is not None and all(map(operator.is_, known.plans, plans))
