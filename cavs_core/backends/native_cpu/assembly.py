"""What is known of a run before it has any memory: its tables, and where each address comes from.

It depends on the layout alone, and is remembered for as long as the layout lives: a run of a known plan only takes
memory and puts the addresses in.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...layout import ClassLayout, Layout
from ...plan import ClassPlan
from ...program import CHILD, Spec
from .ir import ScatterOp
from .memory import ARENA, Block, address_of
from .ops import OP_BEGIN, OP_END
from .prepare import Prepared, prepare, size_of
from .stages import Sum
from .table import Operations, launches_of

__all__ = ["Assembly", "Blocks", "Direction", "LookedUp", "assembly_of", "is_assembled"]


class Blocks:
    """Arrays in one block of memory."""

    def __init__(self, rows: Sequence[int], specs: Sequence[Spec]):
        self.looks, offsets = [], [0]
        for count, spec in zip(rows, specs):
            dtype = np.dtype(spec.dtype)
            self.looks.append(((count, *spec.shape), dtype, offsets[-1]))
            offsets.append(offsets[-1] + -(-count * size_of(spec) * dtype.itemsize // 64) * 64)
        self.offsets, self.num_bytes = np.array(offsets[:-1], np.int64), offsets[-1]

    def take(self) -> tuple[Block, list[Any], Any]:
        """The block, the arrays, and the address of each."""
        block = ARENA.take(self.num_bytes)
        return block, [block.array(*look) for look in self.looks], self.offsets + block.address


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
    own, own_bytes : (numbers of memory, where they begin in the block of the direction), and the size of that block
    fixed : (numbers, addresses): what belongs to the layout
    in_buffers, in_messages : (numbers, which buffer, bytes behind its beginning)
    looked_up : list of LookedUp
    """

    def __init__(self, assembly: Assembly, layout: Layout, backward: bool, wanted: frozenset[Any],
                 sparse: frozenset[Any]):
        self.wanted, self.sparse = wanted, sparse
        parts, prepared, first = layout.classes, assembly.prepared, assembly.first
        rounds = layout.backward_rounds if backward else layout.rounds
        made = self.operations = assembly.operations(layout, rounds, backward, wanted, sparse)
        frames, bounds = [part.frames for part in parts], [_bounds(part) for part in parts]
        self.launches = launches_of(made.spans, [order for _, order in rounds], frames, bounds)
        self.started = int((self.launches[:, OP_END] - self.launches[:, OP_BEGIN]).sum())
        sizes = [size for p, part in zip(prepared, parts) for size in p.memory[backward].sizes(part)]
        offsets = np.cumsum([0, *sizes])
        self.own, self.own_bytes = (made.own, offsets[:-1]), int(offsets[-1])
        self._zeros: list[Any] = []
        self.fixed = _columns([(number, self._fixed(layout, parts[c], *name)) for number, c, name in made.fixed], 2)
        bytes_of = assembly.row_bytes
        self.in_buffers, self.in_messages = (
            _columns([(number, *_place(parts[c], bytes_of, *name)) for number, c, name in named], 3)
            for named in (made.in_buffers, made.in_messages))
        self.looked_up = [_looked_up(c, parts[c], part, first[c]) for c, part in made.looked_up]

    def _fixed(self, layout: Layout, part: ClassLayout, kind: str, what: Any) -> int:
        """The address of what the layout has."""
        if kind == "rows":
            return address_of(part.reads[what].rows.rows)
        if kind in ("pull", "pull_bounds"):
            place = part.writes[what]
            messages = layout.messages[place.buffer]
            return (address_of(messages.pull.rows) if kind == "pull" else
                    address_of(messages.segments.indptr) + 8 * place.base)
        if kind == "zeros":
            self._zeros.append(np.zeros(what.shape, what.dtype))
            return address_of(self._zeros[-1])
        if kind == "external_rows":
            return address_of(part.external.rows)
        if kind == "pushed_rows":
            assert part.pushed is not None
            return address_of(part.pushed.rows)
        assert part.edges is not None and kind in ("bounds", "edge_row")
        return address_of(part.edges.indptr if kind == "bounds" else part.edges.row)


def _bounds(part: ClassLayout) -> int:
    return address_of(part.edges.indptr) if part.edges is not None else 0


def _place(part: ClassLayout, bytes_of: Sequence[int], kind: str, what: Any) -> tuple[int, int]:
    """Which buffer a memory is in, and how many bytes behind its beginning."""
    if kind == "buffer":
        return part.reads[what].buffer, 0
    place = part.sends[what] if kind == "send" else part.writes[what]
    return place.buffer, 0 if kind == "messages" else place.base * bytes_of[place.buffer]


def _looked_up(c: int, part: ClassLayout, looked: Sum, first: int) -> LookedUp:
    op = looked.op
    assert isinstance(op, ScatterOp)
    rows = (part.whole.num_edges if op.domain == CHILD else part.whole.num_rows) * op.count
    return LookedUp(part.names.get(looked.source, looked.source), op, rows, [first + ref for ref in looked.reads])


def _columns(rows: list[tuple[int, ...]], count: int) -> Any:
    return np.array(rows, np.int64).reshape(-1, count).T


class Assembly:
    """What is known of the runs of a layout.

    Attributes
    ----------
    prepared : Prepared of each class
    first : the first number of each class's memory among that of all
    buffers, messages : Blocks
    """

    def __init__(self, layout: Layout, plans: Sequence[ClassPlan]):
        self.plans = list(plans)
        self.prepared: list[Prepared] = prepare(plans, layout)
        counts = [len(p.refs.list) for p in self.prepared]
        self.first = [sum(counts[:c]) for c in range(len(counts))]      # of each class it is none at all, at 0
        self.num_refs = sum(counts)
        specs = layout.row_specs
        self.row_bytes = [size_of(spec) * np.dtype(spec.dtype).itemsize for spec in specs]
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

    def operations(self, layout: Layout, rounds: Any, backward: bool, wanted: frozenset[Any],
                   sparse: frozenset[Any]) -> Operations:
        """Of all classes that have rows. They are remembered: mini-batches of a model differ in the layout alone."""
        parts = layout.classes
        shape = tuple([(tuple([c for c in classes if parts[c].whole.num_rows]),
                        tuple(dict.fromkeys([c for c, _ in order]))) for classes, order in rounds])
        skipped, as_rows = set(), set()
        for c, prepared in enumerate(self.prepared) if backward else ():
            for source in prepared.grad_sources if parts[c].whole.num_rows else ():
                name = parts[c].names.get(source, source)
                if name not in wanted:
                    skipped.add((c, source))
                elif name in sparse:
                    as_rows.add((c, source))
        key = (tuple(map(id, self.prepared)), shape, backward, frozenset(skipped), frozenset(as_rows))
        known = _operations.get(key)
        if known is None:
            known = Operations(self.prepared, self.first, shape, backward, skipped, as_rows)
            for prepared in self.prepared:
                if id(prepared) not in _watched:
                    _watched.add(id(prepared))
                    weakref.finalize(prepared, _forget, id(prepared))
            while len(_operations) >= _MOST:
                _operations.pop(next(iter(_operations)), None)
            _operations[key] = known
        return known


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
