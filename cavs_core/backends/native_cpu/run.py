"""One run on the CPU: gives every operation its addresses and hands the workers one table for each direction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...array_memory import address_of_data, array_at, view_of_data
from ...layout import ClassLayout, Layout, RowIndex
from ...mxnet_compat import mx
from ...plan import ClassPlan, buffer_bytes, buffer_specs
from ...program import CHILD, SHARED, Pull, Spec
from ..targets import WRITTEN, Target
from .ir import ScatterOp
from .memory import ARENA, Block, address_of
from .prepare import prepare, size_of
from .products import segment_sum
from .stages import Stage, Sum
from .table import Table

__all__ = ["NativeRun"]


class NativeRun:
    """The same offers as `Run`, on memory of our own; arrays that come and go are numpy's, or MXNet's by address."""

    def __init__(self, layout: Layout, plans: Sequence[ClassPlan], arrays: dict[Any, Any],
                 fills: Sequence[tuple[int, int, Any]] = ()):
        self.layout, self.plans, self.arrays, self.fills = layout, plans, arrays, fills
        self.launched = 0
        self.buffers: list[Any] = []
        self.messages: list[Any] = []
        self._prepared = prepare(plans, layout)
        # the address of each memory that a class names; -1: not asked for yet
        self._addresses = [np.full(len(p.refs.list), -1, np.int64) for p in self._prepared]
        self._held: list[Any] = []              # arrays whose addresses are in use
        self._kept: list[Block] = []            # memory of the results
        self._saved: list[Block] = []           # memory that backward passes read
        self._passing: list[Block] = []         # memory of the last backward pass
        weakref.finalize(self, _give_back, self._kept, self._saved, self._passing)

    def estimate(self) -> Callable[[], int]:
        """A function that estimates the memory that the run holds at its peak; it does not hold the run."""
        return partial(_peak_bytes, self._prepared, self.plans, self.layout)

    def free(self) -> None:
        """Give back what only a backward pass needs."""
        _give_back(self._saved, self._passing)

    # ---- results -----------------------------------------------------------------------------

    def numpy(self, buffer: int, start: int, stop: int) -> Any:
        """A copy of rows of a buffer."""
        return self.buffers[buffer][start:stop].copy()

    def array(self, buffer: int, start: int, stop: int, shape: tuple[int, ...]) -> Any:
        """A copy of rows of a buffer, as an NDArray of a shape."""
        return self._taken(buffer, slice(start, stop), stop - start).reshape(shape)

    def take(self, buffer: int, rows: Any) -> Any:
        """Some rows of a buffer, as an NDArray."""
        return self._taken(buffer, rows, len(rows))

    def _taken(self, buffer: int, rows: Any, count: int) -> Any:
        """Rows of a buffer, written straight into an NDArray's memory."""
        source = self.buffers[buffer]
        made = mx.nd.empty((count, *source.shape[1:]), ctx=mx.cpu(), dtype=source.dtype)
        if count:
            if isinstance(rows, slice):
                view_of_data(made)[...] = source[rows]
            else:
                np.take(source, rows, axis=0, out=view_of_data(made), mode="clip")
        return made

    def pulled(self, buffer: int, start: int, stop: int) -> Any:
        """What all readers of each row sent back, added up."""
        messages, array = self.layout.messages[buffer], self.messages[buffer]
        out = np.empty((stop - start, *array.shape[1:]), array.dtype)
        segment_sum(array, messages.pull.rows, messages.segments.indptr[start:stop + 1], out)
        return out

    @staticmethod
    def total(x: Any, y: Any) -> Any:
        """x + y, where x may be missing."""
        return y if x is None else x + y

    @staticmethod
    def rows_of(array: Any, index: RowIndex, start: int, stop: int) -> Any:
        """Rows index[start:stop] of an array."""
        return np.take(array, index.rows[start:stop], axis=0)

    # ---- forward -----------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """Run everything; the buffers."""
        rows = [max(n, 1) for n in self.layout.buffer_rows]
        self.buffers = self._blocks(self._kept, rows, buffer_specs(self.plans, self.layout))
        for buffer, row, array in self.fills:
            _fill(self.buffers[buffer], row, array)
        self._own(0)
        self._draw(range(0, 3))
        self._execute(0, self.layout.rounds)
        return self.buffers

    def _draw(self, phases: range) -> None:
        for c, prepared in enumerate(self._prepared):
            for v, a, phase in prepared.lowered.draws:
                if phase in phases and self.layout.classes[c].whole.num_rows:
                    out = self._view(c, v)
                    out[...] = mx.nd.random.uniform(a["low"], a["high"], out.shape, dtype=out.dtype.name,
                                                    ctx=mx.cpu()).asnumpy()

    # ---- backward ----------------------------------------------------------------------------

    def backward(self, output_grads: Sequence[Any], wanted: Iterable[Any],
                 heads: Sequence[tuple[int, int, Any]] = (), targets: dict[Any, Target] | None = None,
                 sparse: Iterable[Any] = ()) -> dict[Any, Any]:
        """Gradients of the wanted sources, as `Run.backward` gives them.

        Parameters
        ----------
        output_grads, wanted, heads : see `Run.backward`
        targets : source -> Target
            Memory that takes a gradient, and that nobody else reads or writes now; its entry in the result is WRITTEN.
        sparse : sources whose gradient is given as a list of (row numbers, rows), still to be added up
        """
        for array in self.arrays.values():
            if isinstance(array, mx.nd.NDArray):
                array.wait_to_read()
        _give_back(self._passing)
        forward, held = [known.copy() for known in self._addresses], len(self._held)
        self._output_grads = output_grads
        self._wanted, self._targets, self._sparse = set(wanted), targets or {}, set(sparse)
        self.messages = self._blocks(self._passing, [m.num_rows for m in self.layout.messages],
                                     buffer_specs(self.plans, self.layout))
        for array in self.messages:
            array[0] = 0
        for k, row, array in heads:
            _fill(self.messages[k], row, array)
        self._grads: dict[Any, Any] = {s: self._pull_buffer(s) for s in self._wanted
                                       if isinstance(s, Pull) and self._having(s)}
        self._own(1)
        self._draw(range(3, 6))
        self._execute(1, self.layout.backward_rounds)
        self._add_values()
        self._addresses = forward
        del self._held[held:]
        return self._grads

    def _having(self, source: Any) -> list[ClassPlan]:
        return [plan for plan, part in zip(self.plans, self.layout.classes)
                if source in plan.grads and part.whole.num_rows]

    def _pull_buffer(self, source: Any) -> Any:
        """A row per vertex for the gradient of a pulled input; zeros where a class has none."""
        plan = self._having(source)[0]
        spec = plan.specs[plan.grads[source][0]]
        return np.zeros((sum(p.whole.num_rows for p in self.layout.classes), *spec.shape), spec.dtype)

    def _add_values(self) -> None:
        """Gradients of shared sources that are no plain sums."""
        for c, (prepared, part) in enumerate(zip(self._prepared, self.layout.classes)):
            for source, values in prepared.lowered.grad_values.items() if part.whole.num_rows else ():
                name = part.names.get(source, source)
                for root, shape in values if name in self._wanted else ():
                    self._add_to(name, self._view(c, root).reshape(shape))

    def _add_to(self, name: Any, value: Any) -> None:
        target = self._targets.get(name)
        if name in self._sparse:
            self._grads.setdefault(name, []).append((np.arange(len(value)), value.copy()))
        elif target is not None:
            memory = view_of_data(target.array).reshape(value.shape)
            memory[...] = memory + value if target.add or name in self._grads else value
            self._grads[name] = WRITTEN
        else:
            self._grads[name] = self.total(self._grads.get(name), value.copy())

    # ---- tables ------------------------------------------------------------------------------

    def _execute(self, direction: int, rounds: Iterable[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> None:
        """In every round: eager parts of its classes, its launches in order, lazy parts of its classes."""
        table = Table()
        self._looked_up: list[Any] = []
        for classes, order in rounds:
            busy = [c for c in classes if self.layout.classes[c].whole.num_rows]
            in_order = list(dict.fromkeys(c for c, _ in order))
            for phase, members in ((0, busy), (1, in_order), (2, busy)):
                spans = {}
                for c in members:
                    made = [self._emit(c, stage, table) for stage in self._prepared[c].stages[direction][phase]]
                    spans[c] = [span for span in made if span[0] < span[1]]
                    if phase != 1 and spans[c]:
                        table.launch(self.layout.classes[c].frames[:1], spans[c], self._bounds(c))
                if phase == 1:
                    table.launch_in_order(order, {c: (self.layout.classes[c].frames[1:], spans[c], self._bounds(c))
                                                  for c in in_order})
        self.launched += table.run()
        for name, op, rows, (index, values) in self._looked_up:
            self._grads.setdefault(name, []).append(
                (array_at(index, (rows,), op.index_dtype), array_at(values, (rows, op.width), op.dtype)))

    def _bounds(self, c: int) -> int:
        edges = self.layout.classes[c].edges
        return self._hold(edges.indptr) if edges is not None else 0

    def _emit(self, c: int, stage: Stage, table: Table) -> tuple[int, int]:
        """Add the operations of a stage; their numbers."""
        first, known = table.num_ops, self._addresses[c]
        for ref in stage.reads:
            if known[ref] < 0:
                known[ref] = self._find(c, ref)
        table.add(stage.rows(known), known[stage.words], stage.tables)
        for part in stage.sums:
            self._emit_sum(c, part, table)
        return first, table.num_ops

    def _emit_sum(self, c: int, part: Sum, table: Table) -> None:
        reads = [self._address(c, ref) for ref in part.reads]
        if part.own:
            target, accumulate = self._address(c, part.own), False
        else:
            layout, op = self.layout.classes[c], part.op
            name = layout.names.get(part.source, part.source)
            if name not in self._wanted:
                return
            if name in self._sparse:
                assert isinstance(op, ScatterOp)
                rows = (layout.whole.num_edges if op.domain == CHILD else layout.whole.num_rows) * op.count
                self._looked_up.append((name, op, rows, reads))
                return
            target, accumulate = self._grad_memory(c, name, part.source)
        if isinstance(part.op, ScatterOp) and not accumulate:
            array_at(target, (part.op.size * part.op.width,), part.op.dtype)[:] = 0
        table.add(part.with_addresses(reads, target, accumulate))

    def _grad_memory(self, c: int, name: Any, source: Any) -> tuple[int, bool]:
        """Where the gradient of a shared source goes, and whether it is added to what is there."""
        target = self._targets.get(name)
        if target is not None:
            accumulate = target.add or name in self._grads
            self._grads[name] = WRITTEN
            return address_of_data(target.array), accumulate
        accumulate = name in self._grads
        if not accumulate:
            spec = self.plans[c].specs[self.plans[c].grads[source][0]]
            self._grads[name] = np.empty(spec.shape, spec.dtype)
        return address_of(self._grads[name]), accumulate

    # ---- memory ------------------------------------------------------------------------------

    @staticmethod
    def _blocks(held: list[Block], rows: Sequence[int], specs: Sequence[Spec]) -> list[Any]:
        """Arrays of so many rows each, in one block."""
        offsets = [0]
        for n, spec in zip(rows, specs):
            offsets.append(offsets[-1] + _aligned(n * size_of(spec) * np.dtype(spec.dtype).itemsize))
        held.append(ARENA.take(offsets[-1]))
        return [held[-1].array((n, *spec.shape), spec.dtype, offset) for n, spec, offset in zip(rows, specs, offsets)]

    def _own(self, direction: int) -> None:
        """Memory of the classes for one direction, in one block."""
        memory = [prepared.memory[direction] for prepared in self._prepared]
        sizes = [m.sizes(part) for m, part in zip(memory, self.layout.classes)]
        block = ARENA.take(sum(map(sum, sizes)))
        (self._passing if direction else self._saved).append(block)
        address = block.address
        for known, m, mine in zip(self._addresses, memory, sizes):
            for number, size in zip(m.numbers, mine):
                known[number] = address
                address += size

    def _view(self, c: int, v: int) -> Any:
        """The memory of a value of a class, as an array."""
        part, spec = self.layout.classes[c].whole, self.plans[c].specs[v]
        rows = 1 if spec.kind == SHARED else part.num_edges if spec.kind == CHILD else part.num_rows
        number = self._prepared[c].refs.number(("value", v))
        return array_at(int(self._addresses[c][number]), (rows, *spec.shape), spec.dtype)

    def _address(self, c: int, ref: int) -> int:
        known = self._addresses[c]
        if known[ref] < 0:
            known[ref] = self._find(c, ref)
        return int(known[ref])

    def _find(self, c: int, number: int) -> int:
        ref = self._prepared[c].refs.list[number]
        return 0 if ref is None else getattr(self, "_at_" + ref[0])(self.layout.classes[c], ref[1])

    def _hold(self, array: Any) -> int:
        """The address of an array, which is kept alive."""
        self._held.append(array)
        return address_of(array) if isinstance(array, np.ndarray) else address_of_data(array)

    # Each kind of memory that operations name.

    def _at_output(self, part: ClassLayout, k: int) -> int:
        return _row_address(self.buffers[part.writes[k].buffer], part.writes[k].base)

    def _at_shared(self, part: ClassLayout, source: Any) -> int:
        return self._hold(self.arrays[part.names.get(source, source)])

    def _at_zeros(self, part: ClassLayout, spec: Spec) -> int:
        return self._hold(np.zeros(spec.shape, spec.dtype))

    def _at_buffer(self, part: ClassLayout, source: Any) -> int:
        return address_of(self.buffers[part.reads[source].buffer])

    def _at_rows(self, part: ClassLayout, source: Any) -> int:
        return self._hold(part.reads[source].rows.rows)

    def _at_bounds(self, part: ClassLayout, _: Any) -> int:
        assert part.edges is not None
        return self._hold(part.edges.indptr)

    def _at_edge_row(self, part: ClassLayout, _: Any) -> int:
        assert part.edges is not None
        return self._hold(part.edges.row)

    def _at_external(self, part: ClassLayout, source: Any) -> int:
        return self._hold(self.arrays[source])

    def _at_external_rows(self, part: ClassLayout, _: Any) -> int:
        return self._hold(part.external.rows)

    def _at_output_grad(self, part: ClassLayout, source: Any) -> int:
        return self._hold(self._output_grads[source.index])

    def _at_pushed_rows(self, part: ClassLayout, _: Any) -> int:
        assert part.pushed is not None
        return self._hold(part.pushed.rows)

    def _at_messages(self, part: ClassLayout, state: int) -> int:
        return address_of(self.messages[part.writes[state].buffer])

    def _at_pull(self, part: ClassLayout, state: int) -> int:
        return self._hold(self.layout.messages[part.writes[state].buffer].pull.rows)

    def _at_pull_bounds(self, part: ClassLayout, state: int) -> int:
        place = part.writes[state]
        return self._hold(self.layout.messages[place.buffer].segments.indptr) + 8 * place.base

    def _at_send(self, part: ClassLayout, source: Any) -> int:
        return _row_address(self.messages[part.sends[source].buffer], part.sends[source].base)

    def _at_pull_grad(self, part: ClassLayout, source: Any) -> int:
        first = sum(p.whole.num_rows for p in self.layout.classes[:self.layout.classes.index(part)])
        if source in self._grads:
            return _row_address(self._grads[source], first)
        unasked = self._pull_buffer(source)
        self._held.append(unasked)
        return _row_address(unasked, first)


def _peak_bytes(prepared: Sequence[Any], plans: Sequence[ClassPlan], layout: Layout) -> int:
    own = sum(sum(memory.sizes(part)) for p, part in zip(prepared, layout.classes) for memory in p.memory)
    return own + buffer_bytes(plans, layout) + layout.index_bytes


def _give_back(*lists: list[Block]) -> None:
    for blocks in lists:
        while blocks:
            ARENA.give_back(blocks.pop())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _row_address(array: Any, row: int) -> int:
    return address_of(array) + row * array.strides[0]


def _fill(array: Any, row: int, values: Any) -> None:
    """Write rows from `row` on; None: one row of zeros."""
    if values is None:
        array[row] = 0
    else:
        values = view_of_data(values) if isinstance(values, mx.nd.NDArray) else values
        array[row:row + len(values)] = values.reshape(-1, *array.shape[1:])
