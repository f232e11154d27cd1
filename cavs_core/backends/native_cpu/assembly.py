"""What is known of a run before it has any memory: its tables, and where each address comes from.

It depends on the layout alone, and is remembered for as long as the layout lives: a run of a known plan only takes
memory and puts the addresses in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...layout import ClassLayout, Layout
from ...plan import ClassPlan, buffer_specs
from ...program import CHILD, Spec
from .ir import ScatterOp
from .memory import ARENA, Block, address_of
from .prepare import Prepared, prepare, size_of
from .stages import Stage, Sum
from .table import Table

__all__ = ["Assembly", "Blocks", "Direction", "LookedUp", "assembly_of"]


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
    """The table of one direction, and where the memory that it names comes from.

    Attributes
    ----------
    table : Table
    own, own_bytes : (numbers of memory, where they begin in the block of the direction), and the size of that block
    fixed : (numbers, addresses): what belongs to the layout
    of_buffers, of_messages : (numbers, which buffer, bytes behind its beginning)
    asked : number, class and name of the memory that every run brings along
    sums : number of the operation, class, and Sum, where the target is a gradient
    looked_up : list of LookedUp
    """

    def __init__(self, assembly: Assembly, layout: Layout, backward: bool, wanted: frozenset[Any],
                 sparse: frozenset[Any]):
        self.wanted, self.sparse = wanted, sparse
        self._assembly, self._layout, self._backward = assembly, layout, backward
        self.table = Table()
        self.sums: list[tuple[int, int, Sum]] = []
        self.looked_up: list[LookedUp] = []
        self._named: dict[int, tuple[int, Any]] = {}            # number -> class and name
        self._hold_zeros: list[Any] = []
        self._fill_table()
        self._take_own()
        self._sort_out()
        del self._assembly, self._layout, self._named           # (the layout lets this go, not the other way round)

    def _fill_table(self) -> None:
        """In every round: eager parts of its classes, its launches in order, lazy parts of its classes."""
        layout, table = self._layout, self.table
        for classes, order in layout.backward_rounds if self._backward else layout.rounds:
            busy = [c for c in classes if layout.classes[c].whole.num_rows]
            in_order = list(dict.fromkeys(c for c, _ in order))
            for phase, members in ((0, busy), (1, in_order), (2, busy)):
                spans = {}
                for c in members:
                    made = [self._emit(c, s) for s in self._assembly.prepared[c].stages[self._backward][phase]]
                    spans[c] = [span for span in made if span[0] < span[1]]
                    if phase != 1 and spans[c]:
                        table.launch(layout.classes[c].frames[:1], spans[c], self._bounds(c))
                if phase == 1:
                    table.launch_in_order(order, {c: (layout.classes[c].frames[1:], spans[c], self._bounds(c))
                                                  for c in in_order})
        table.finish()

    def _bounds(self, c: int) -> int:
        edges = self._layout.classes[c].edges
        return address_of(edges.indptr) if edges is not None else 0

    def _emit(self, c: int, stage: Stage) -> tuple[int, int]:
        """Add the operations of a stage; their numbers."""
        begin, first, refs = self.table.num_ops, self._assembly.first[c], self._assembly.prepared[c].refs.list
        for ref in stage.reads:
            self._named[first + ref] = c, refs[ref]
        self.table.add(stage, first)
        for part in stage.sums:
            self._emit_sum(c, part, first, refs)
        return begin, self.table.num_ops

    def _emit_sum(self, c: int, part: Sum, first: int, refs: list[Any]) -> None:
        layout, op = self._layout.classes[c], part.op
        name = layout.names.get(part.source, part.source)
        if not part.own and name not in self.wanted:
            return
        for ref in (*part.reads, *([part.own] if part.own else [])):
            self._named[first + ref] = c, refs[ref]
        if not part.own and name in self.sparse:
            assert isinstance(op, ScatterOp)
            rows = (layout.whole.num_edges if op.domain == CHILD else layout.whole.num_rows) * op.count
            self.looked_up.append(LookedUp(name, op, rows, [first + ref for ref in part.reads]))
            return
        number = self.table.add_sum(part, first)
        if not part.own or isinstance(op, ScatterOp):
            self.sums.append((number, c, part))

    def _take_own(self) -> None:
        """The memory of the classes for this direction, in one block."""
        numbers, sizes = [], [0]
        for prepared, first, part in zip(self._assembly.prepared, self._assembly.first, self._layout.classes):
            memory = prepared.memory[self._backward]
            mine = memory.sizes(part)
            numbers += [first + number for number in memory.numbers[:len(mine)]]
            sizes += mine
        offsets = np.cumsum(sizes)
        self.own, self.own_bytes = (np.array(numbers, np.int64), offsets[:-1]), int(offsets[-1])

    def _sort_out(self) -> None:
        fixed, of_buffers, of_messages = ([[], []], [[], [], []], [[], [], []])     # type: ignore[var-annotated]
        self.asked: list[tuple[int, int, Any]] = []
        bytes_of, classes = self._assembly.row_bytes, self._layout.classes
        for number, (c, ref) in self._named.items():
            if ref is None or ref[0] == "value":        # none at all; the class's own
                continue
            part, (kind, what) = classes[c], ref
            if kind in ("output", "buffer", "messages", "send"):
                place = part.writes[what] if kind in ("output", "messages") else \
                    part.reads[what] if kind == "buffer" else part.sends[what]
                behind = place.base * bytes_of[place.buffer] if kind in ("output", "send") else 0
                _append(of_buffers if kind in ("output", "buffer") else of_messages, number, place.buffer, behind)
            elif kind in ("shared", "external", "pull_grad"):
                self.asked.append((number, c, ref))
            else:
                _append(fixed, number, self._fixed(part, kind, what))
        self.fixed, self.of_buffers, self.of_messages = (
            tuple([np.array(column, np.int64) for column in columns]) for columns in (fixed, of_buffers, of_messages))

    def _fixed(self, part: ClassLayout, kind: str, what: Any) -> int:
        """The address of what the layout has."""
        if kind == "zeros":
            self._hold_zeros.append(np.zeros(what.shape, what.dtype))
            return address_of(self._hold_zeros[-1])
        if kind == "rows":
            return address_of(part.reads[what].rows.rows)
        if kind == "external_rows":
            return address_of(part.external.rows)
        if kind in ("pull", "pull_bounds"):
            place = part.writes[what]
            messages = self._layout.messages[place.buffer]
            return (address_of(messages.pull.rows) if kind == "pull" else
                    address_of(messages.segments.indptr) + 8 * place.base)
        assert part.edges is not None and kind in ("bounds", "edge_row")
        return address_of(part.edges.indptr if kind == "bounds" else part.edges.row)


def _append(columns: Sequence[list[int]], *values: int) -> None:
    for column, value in zip(columns, values):
        column.append(value)


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
        specs = buffer_specs(plans, layout)
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


_assemblies: dict[int, Assembly] = {}       # id of a layout, while it lives


def assembly_of(layout: Layout, plans: Sequence[ClassPlan]) -> Assembly:
    """What is known of the runs of a layout with these plans."""
    known = _assemblies.get(id(layout))
    if known is None:
        weakref.finalize(layout, _assemblies.pop, id(layout), None)
    elif all(a is b for a, b in zip(known.plans, plans)):
        return known
    made = _assemblies[id(layout)] = Assembly(layout, plans)
    return made
