"""One run on the CPU: gives every operation its addresses and hands the workers one table for each direction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...array_memory import address_of_data, array_at, view_of_data
from ...layout import Layout, RowIndex
from ...mxnet_compat import mx
from ...plan import ClassPlan, buffer_bytes
from ...program import CHILD, SHARED, Pull
from ...subset import Subset
from ..targets import WRITTEN, Target
from .assembly import Arrays, Direction, assembly_of
from .memory import ARENA, Block, address_of
from .ops import ACCUMULATE, C
from .packing import packs_weights
from .products import segment_sum
from .stages import counts_of, own_offsets
from .table import run_table

__all__ = ["NativeRun"]


class NativeRun:
    """The same offers as `Run`, on memory of our own; arrays that come and go are numpy's, or MXNet's by address."""

    def __init__(self, layout: Layout, plans: Sequence[ClassPlan], arrays: dict[Any, Any],
                 fills: Sequence[tuple[int, int, Any]] = ()):
        self.layout, self.plans, self.arrays, self.fills = layout, plans, arrays, fills
        self.launched = 0
        self.buffers: Any = ()                  # Arrays
        self.messages: Any = ()
        self._assembly = assembly_of(layout, plans)
        self._prepared = self._assembly.prepared
        self._addresses = np.zeros(0, np.int64)     # of the memory that classes name
        self._asked: dict[Any, int] = {}        # those of arrays that are not ours, by name
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

    def subset(self, subset: Subset) -> NativeRun:
        """A run of its own for a backward pass that part of the layout takes part in, with copies of the values."""
        run = NativeRun(subset.layout, subset.plans, self.arrays)
        direction = run._take_memory()
        for b, rows in enumerate(subset.rows):
            np.take(self.buffers[b], rows, axis=0, out=run.buffers[b][:len(rows)], mode="clip")
        run._place(direction, run._saved)
        for c, (prepared, origin) in enumerate(zip(run._prepared, subset.origins)):
            whole = self._prepared[origin.number].lowered.owned
            for v, owned in prepared.lowered.owned.items():
                if v in whole and not (owned.backward or owned.local or whole[v].backward or whole[v].local):
                    kind = run.plans[c].specs[v].kind
                    rows = origin.edges if kind == CHILD else origin.positions
                    values = self._view(origin.number, v)
                    run._view(c, v)[...] = values if kind == SHARED else values[rows]
        run.launched = self.launched
        return run

    # ---- results -----------------------------------------------------------------------------

    def numpy(self, buffer: int, start: int, stop: int) -> Any:
        """A copy of rows of a buffer."""
        return self.buffers[buffer][start:stop].copy()

    def numpy_rows(self, buffer: int, rows: Any) -> Any:
        """Some rows of a buffer, copied."""
        return self.buffers[buffer][rows]

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

    def forward(self) -> Any:
        """Run everything; the buffers."""
        direction = self._take_memory()
        for buffer, row, array in self.fills:
            _fill(self.buffers[buffer], row, array)
        self._run(direction, self._saved, range(0, 3))
        return self.buffers

    def _take_memory(self) -> Direction:
        """Take the memory of the buffers; the forward direction."""
        direction = self._assembly.direction(self.layout, False)
        self.buffers = Arrays(self._assembly.buffers)
        self._kept.append(self.buffers.block)
        self._addresses = np.zeros(self._assembly.num_refs, np.int64)
        return direction

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
        forward, asked, held = self._addresses, self._asked, len(self._held)
        self._addresses, self._asked = forward.copy(), asked.copy()
        self._output_grads = output_grads
        self._wanted, self._targets, self._sparse = set(wanted), targets or {}, set(sparse)
        self._begun: dict[Any, int] = {}        # gradients of shared sources that have something: where they are
        direction = self._assembly.direction(self.layout, True, self._wanted, self._sparse)
        self.messages = Arrays(self._assembly.messages)     # (nobody reads the row of zeros here)
        self._passing.append(self.messages.block)
        for k, row, array in heads:
            _fill(self.messages[k], row, array)
        self._grads: dict[Any, Any] = {s: self._pull_buffer(s) for s in self._wanted
                                       if isinstance(s, Pull) and self._having(s)}
        self._run(direction, self._passing, range(3, 6), self.messages.block.address)
        self._add_values()
        self._addresses, self._asked = forward, asked
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

    def _run(self, direction: Direction, blocks: list[Block], phases: range, at_messages: int = 0) -> None:
        """Run a direction; `blocks` takes the memory of its own."""
        table, words = self._place(direction, blocks, at_messages)
        made = direction.operations
        self._draw(phases)
        for number, c, part in made.sums:
            if part.own:
                target, accumulate = int(table[number, C]), False
            else:
                target, accumulate = self._grad_memory(c, part.source)
                table[number, C], table[number, ACCUMULATE] = target, accumulate
            if part.adds_into_zeros and not accumulate:
                array_at(target, (part.op.size * part.op.width,), part.op.dtype)[:] = 0
        run_table(direction.launches, table)
        del words                               # (what the table has the addresses of)
        self.launched += direction.started
        for name, op, rows, refs in direction.looked_up:
            index, values = self._addresses[refs].tolist()
            self._grads.setdefault(name, []).append(
                (array_at(index, (rows,), op.index_dtype), array_at(values, (rows, op.width), op.dtype)))

    def _place(self, direction: Direction, blocks: list[Block], at_messages: int = 0) -> tuple[Any, Any]:
        """Take the classes' own memory; the table of a direction, and what it has the addresses of."""
        block = ARENA.take(direction.own_bytes)
        blocks.append(block)
        at = (self.buffers.block.address, at_messages, block.address)
        asked = [self._asked_address(*memory) for memory in direction.operations.asked]
        return direction.operations.with_addresses(self._addresses, direction.places, direction.own_offsets, asked, at)

    def _grad_memory(self, c: int, source: Any) -> tuple[int, bool]:
        """Where the gradient of a shared source goes, and whether it is added to what is there."""
        name = self.layout.classes[c].names.get(source, source)
        if name in self._begun:
            return self._begun[name], True
        target = self._targets.get(name)
        if target is not None:
            at, self._grads[name] = address_of_data(target.array), WRITTEN
        else:
            spec = self.plans[c].specs[self.plans[c].grads[source][0]]
            self._grads[name] = np.empty(spec.shape, spec.dtype)
            at = address_of(self._grads[name])
        self._begun[name] = at
        return at, target is not None and target.add

    # ---- memory ------------------------------------------------------------------------------

    def _view(self, c: int, v: int) -> Any:
        """The memory of a value of a class, as an array."""
        part, spec = self.layout.classes[c].whole, self.plans[c].specs[v]
        rows = 1 if spec.kind == SHARED else part.num_edges if spec.kind == CHILD else part.num_rows
        number = self._prepared[c].refs.number(("value", v))
        address = int(self._addresses[self._assembly.first[c] + number])
        return array_at(address, (rows, *spec.shape), spec.dtype)

    def _asked_address(self, c: int, kind: str, source: Any) -> int:
        """Where an array of this run is; classes may name the same one."""
        if kind == "pull_grad":                 # it has a row for every vertex, class after class
            grad = self._grads.get(source)
            if grad is None:                    # nobody asked for it
                grad = self._pull_buffer(source)
            first = sum(p.whole.num_rows for p in self.layout.classes[:c])
            return self._hold(grad) + first * grad.strides[0]
        name = self.layout.classes[c].names.get(source, source)
        at = self._asked.get(name)
        if at is None:
            array = self._output_grads[source.index] if kind == "output_grad" else self.arrays[name]
            at = self._asked[name] = self._hold(array)
        return at

    def _hold(self, array: Any) -> int:
        """The address of an array, which is kept alive."""
        self._held.append(array)
        return address_of(array) if isinstance(array, np.ndarray) else address_of_data(array)


def _peak_bytes(prepared: Sequence[Any], plans: Sequence[ClassPlan], layout: Layout) -> int:
    own = 0
    for p, part in zip(prepared, layout.classes):
        counts = counts_of(part.frames, np.array([0, len(part.frames)]))
        form = p.forms[packs_weights(part.whole.num_rows, part.whole.num_edges)]
        own += sum(int(own_offsets(counts, *map(np.array, (m.counts, m.row_bytes)))[-1])
                   for m in form.memory if m.numbers)
    return own + buffer_bytes(plans, layout) + layout.index_bytes


def _give_back(*lists: list[Block]) -> None:
    for blocks in lists:
        while blocks:
            ARENA.give_back(blocks.pop())


def _fill(array: Any, row: int, values: Any) -> None:
    """Write rows from `row` on; None: one row of zeros."""
    if values is None:
        array[row] = 0
    else:
        values = view_of_data(values) if isinstance(values, mx.nd.NDArray) else values
        array[row:row + len(values)] = values.reshape(-1, *array.shape[1:])
