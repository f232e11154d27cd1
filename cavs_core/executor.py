"""Runs planned programs over a layout, forward and backward, on a backend. It makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .backends.targets import WRITTEN, Target
from .layout import ClassLayout, Frame, Layout, Place, Read, RowIndex, Segments
from .partition import Step
from .plan import ClassPlan, Phases, peak_bytes
from .program import CHILD, SHARED, Leaf, OutputGrad, Pull, Spec, StateGrad, Zeros
from .subset import Subset

__all__ = ["Run"]


_NOTHING = Phases([], [], [])            # the backward of a class through which no gradient flows


class _Class:
    """One class of vertices in one run: its plan, its layout, and its values so far."""

    def __init__(self, plan: ClassPlan, layout: ClassLayout):
        self.plan, self.layout = plan, layout
        self.shared: dict[int, Any] = {}
        self.stored: dict[int, tuple[Any, int, int]] = {}   # value -> (array, row of position or edge 0, rows of each)


class _Rows(NamedTuple):
    """The gradient of a table that was not made: rows, and the numbers that they have in it."""

    numbers: Any
    rows: Any


class Run:
    """One run. `forward` fills the buffers; `backward` may follow it, once or several times.

    Parameters
    ----------
    layout : Layout
    plans : one ClassPlan per class of the layout
    backend : the backend
    arrays : dict
        Source (Param, Const, Pull) -> array. The rows of pulled arrays are those that `ClassLayout.external` names.
    fills : list of (buffer, row, array)
        Rows that stand in the buffers before the first launch. None fills one row with zeros.
    """

    def __init__(self, layout: Layout, plans: Sequence[ClassPlan], backend: Any, arrays: dict[Any, Any],
                 fills: Sequence[tuple[int, int, Any]] = ()):
        self.layout, self.plans, self.backend, self.arrays, self.fills = layout, plans, backend, arrays, fills
        self.launched = 0               # operators and regions started so far
        self.buffers: list[Any] = []
        self._all = [_Class(plan, part) for plan, part in zip(plans, layout.classes)]
        self.classes = [c for c in self._all if c.layout.whole.num_rows]
        self._row_shapes: list[tuple[int, ...]] = []        # of the buffers
        self._indices: dict[int, Any] = {}
        self._scattered: set[tuple[int, int]] = set()
        self._reshaped: dict[Any, Any] = {}

    def estimate(self) -> Callable[[], int]:
        """A function that estimates the memory that the run holds at its peak; it does not hold the run."""
        return partial(peak_bytes, [c.plan for c in self._all], self.layout)

    # ---- forward -----------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """Run everything; the buffers."""
        specs = self.layout.row_specs
        self._row_shapes = [tuple(spec.shape) for spec in specs]
        self.buffers = [self.backend.empty((max(rows, 1), *spec.shape), spec.dtype)
                        for rows, spec in zip(self.layout.buffer_rows, specs)]
        for buffer, row, array in self.fills:
            self.backend.fill_rows(self.buffers[buffer], row, array)
        for cls in self.classes:
            for value, place in zip(cls.plan.outputs, cls.layout.writes):
                cls.stored[value] = self._place(cls, value, self.buffers[place.buffer], place)
        self._run_phases([c.plan.forward for c in self._all], [c.plan.inputs for c in self._all], self.layout.rounds)
        return self.buffers

    # ---- results -----------------------------------------------------------------------------

    def numpy(self, buffer: int, start: int, stop: int) -> Any:
        """Rows of a buffer as a numpy array."""
        return self.backend.rows(self.buffers[buffer], start, stop).asnumpy()

    def numpy_rows(self, buffer: int, rows: Any) -> Any:
        """Some rows of a buffer as a numpy array."""
        return self.take(buffer, rows).asnumpy()

    def array(self, buffer: int, start: int, stop: int, shape: tuple[int, ...]) -> Any:
        """Rows of a buffer as an array of a shape: a view."""
        return self.backend.reshape(self.backend.rows(self.buffers[buffer], start, stop), shape)

    def take(self, buffer: int, rows: Any) -> Any:
        """Some rows of a buffer, copied."""
        self.launched += 1
        return self.backend.take(self.buffers[buffer], self.backend.index(rows))

    def subset(self, subset: Subset) -> Run:
        """A run of its own for a backward pass that part of the layout takes part in, with copies of the values."""
        run = Run(subset.layout, subset.plans, self.backend, self.arrays)
        run._row_shapes = [tuple(spec.shape) for spec in subset.layout.row_specs]
        run.buffers = [self.take(b, rows) if len(rows) else self.backend.empty((1, *spec.shape), spec.dtype)
                       for b, (rows, spec) in enumerate(zip(subset.rows, subset.layout.row_specs))]
        for cls, origin in zip(run._all, subset.origins):
            whole, read = self._all[origin.number], cls.plan.read_again
            for value, place in zip(cls.plan.outputs, cls.layout.writes):
                cls.stored[value] = run._place(cls, value, run.buffers[place.buffer], place)
            for value, (array, first, _) in whole.stored.items():
                if value in read and value not in cls.stored and value not in cls.plan.inputs:
                    rows = origin.edges if cls.plan.specs[value].kind == CHILD else origin.positions
                    cls.stored[value] = self.backend.take(array, self.backend.index(first + rows)), 0, 1
            cls.shared = dict(whole.shared)
        run.launched = self.launched
        return run

    def free(self) -> None:
        """Forget what only a backward pass needs."""
        for cls in self._all:
            cls.stored.clear()
            cls.shared.clear()
        self._indices.clear()

    # ---- backward ----------------------------------------------------------------------------

    def backward(self, output_grads: Sequence[Any], wanted: Iterable[Any],
                 heads: Sequence[tuple[int, int, Any]] = (), targets: dict[Any, Target] | None = None,
                 sparse: Iterable[Any] = ()) -> dict[Any, Any]:
        """Gradients of the wanted sources.

        Parameters
        ----------
        output_grads : arrays that inputs of source OutputGrad(i) read, rows as `ClassLayout.pushed` names them
        wanted : sources (Param, Pull); a source that nothing depends on has no entry in the result. The rows of a
            pulled input's gradient are in the order of `ClassLayout.external`, class after class.
        heads : (buffer, message, array)
            Messages that come from outside: gradients of values that left the run.
        targets : source -> Target
            Arrays that take a gradient; its entry in the result is WRITTEN.
        sparse : sources whose gradient is given as a list of (row numbers, rows), still to be added up, where it
            comes from nothing but lookups
        """
        self.output_grads = output_grads
        self._scattered = self._found_by_rows(set(sparse))
        self.messages = []
        for messages, buffer in zip(self.layout.messages, self.buffers):
            array = self.backend.empty((messages.num_rows, *buffer.shape[1:]), buffer.dtype)
            self.backend.fill_rows(array, 0, None)
            self.messages.append(array)
        for k, row, array in heads:
            self.backend.fill_rows(self.messages[k], row, array)
        wanted = set(wanted)
        pulls = self._pull_buffers(wanted)
        forward_values = [dict(cls.stored) for cls in self.classes]
        forward_reshaped = dict(self._reshaped)
        first = 0
        for cls in self.classes:
            for source, values in cls.plan.grads.items():
                place = cls.layout.sends.get(source)
                for value in values:
                    if place is not None:
                        cls.stored[value] = self._place(cls, value, self.messages[place.buffer], place)
                    elif source in pulls:
                        cls.stored[value] = (pulls[source], first, 1)
            first += cls.layout.whole.num_rows
        self._run_phases([c.plan.backward or _NOTHING for c in self._all],
                         [c.plan.backward_inputs for c in self._all], self.layout.backward_rounds)
        grads = self._shared_grads(wanted)
        for source, target in (targets or {}).items():
            if source in grads:
                made = self.backend.reshape(grads[source], target.array.shape)
                target.array[:] = target.array + made if target.add else made
                grads[source] = WRITTEN
        grads.update(pulls)
        for cls, values in zip(self.classes, forward_values):
            cls.stored = values
        self._reshaped = forward_reshaped
        return grads

    def _pull_buffers(self, wanted: set[Any]) -> dict[Any, Any]:
        """A row per vertex for the gradient of each pulled input; zeros where a class has none."""
        buffers = {}
        rows = sum(c.layout.whole.num_rows for c in self.classes)
        for source in wanted:
            having = [c for c in self.classes if source in c.plan.grads]
            if isinstance(source, Pull) and having:
                spec = having[0].plan.specs[having[0].plan.grads[source][0]]
                make = self.backend.empty if len(having) == len(self.classes) else self.backend.zeros
                buffers[source] = make((rows, *spec.shape), spec.dtype)
        return buffers

    def _shared_grads(self, wanted: set[Any]) -> dict[Any, Any]:
        """Gradients of shared sources, added up over the classes."""
        grads: dict[Any, Any] = {}
        for cls in self.classes:
            for source, values in cls.plan.grads.items():
                name = cls.layout.names.get(source, source)
                if name in wanted and not isinstance(source, Pull) and source not in cls.layout.sends:
                    for value in values:
                        made = cls.shared[value]
                        if isinstance(made, _Rows):
                            grads.setdefault(name, []).append((made.numbers, made.rows))
                        else:
                            grads[name] = self.total(grads.get(name), made)
        return grads

    def _found_by_rows(self, sparse: set[Any]) -> set[tuple[int, int]]:
        """Gradients that are not made as tables: (id of a class, value)."""
        found: dict[Any, list[tuple[int, int]]] = {name: [] for name in sparse}
        for cls in self.classes if sparse else ():
            steps = cls.plan.backward or _NOTHING
            scattered = {step.outputs[0] for part in (steps.eager, steps.critical, steps.lazy) for step in part
                         if step.scatters and step.outputs}
            for source, values in cls.plan.grads.items():
                name = cls.layout.names.get(source, source)
                if name in found and scattered.issuperset(values):
                    found[name] += [(id(cls), v) for v in values]       # (classes may share a plan)
                else:
                    found.pop(name, None)           # part of it is a table
        return {pair for pairs in found.values() for pair in pairs}

    def total(self, x: Any, y: Any) -> Any:
        """x + y, where x may be missing."""
        if x is None:
            return y
        self.launched += 1
        return self.backend.add(x, y)

    # ---- phases and steps --------------------------------------------------------------------

    def _run_phases(self, phases: Sequence[Phases], inputs: Sequence[dict[int, Any]],
                    rounds: Iterable[tuple[Sequence[int], Iterable[tuple[int, int]]]]) -> None:
        """In every round: eager parts of its classes, its launches in order, lazy parts of its classes."""
        for classes, order in rounds:
            busy = [c for c in classes if self._all[c].layout.whole.num_rows]
            for c in busy:
                cls = self._all[c]
                self._run_steps(cls, phases[c].eager, inputs[c], cls.layout.whole, keep_all=True)
                self._make_kept(cls, phases[c].critical)
            for c, launch in order:
                cls = self._all[c]
                self._run_steps(cls, phases[c].critical, inputs[c], cls.layout.launches[launch], keep_all=False)
            for c in busy:
                cls = self._all[c]
                self._run_steps(cls, phases[c].lazy, inputs[c], cls.layout.whole, keep_all=True)

    def _make_kept(self, cls: _Class, steps: Sequence[Step]) -> None:
        """Buffers, over all launches, for what the launches make and somebody needs later."""
        whole = cls.layout.whole
        for value in (v for step in steps for v in step.outputs):
            spec = cls.plan.specs[value]
            if value in cls.plan.kept and value not in cls.stored and spec.kind != SHARED:
                rows = whole.num_edges if spec.kind == CHILD else whole.num_rows
                cls.stored[value] = (self.backend.empty((rows, *spec.shape), spec.dtype), 0, 1)

    def _run_steps(self, cls: _Class, steps: Sequence[Step], inputs: dict[int, Any], frame: Frame,
                   keep_all: bool) -> None:
        """Run steps over one frame; what has no place yet is kept for the class (`keep_all`) or for this frame."""
        local: dict[int, Any] = {}
        for step in steps:
            operands = [self._operand(cls, v, inputs, frame, local) for v in step.inputs]
            outs = [self._view(cls, v, frame) if v in cls.stored else None for v in step.outputs]
            made = self._run_step(cls, step, operands, outs, frame)
            for value, array, out in zip(step.outputs, made, outs):
                if cls.plan.specs[value].kind == SHARED:
                    cls.shared[value] = array
                elif out is None and keep_all:
                    cls.stored[value] = (array, 0, 1)
                elif out is None:
                    local[value] = array

    def _run_step(self, cls: _Class, step: Step, operands: list[Any], outs: list[Any], frame: Frame) -> Sequence[Any]:
        if step.scatters and (id(cls), step.outputs[0]) in self._scattered:
            return [_Rows(*operands)]
        self.launched += 1
        if step.segmented:
            return [self._run_segmented(cls, step.instrs[0].op, operands[0], outs[0], frame)]
        if any(out is not None for out in outs):
            specs = [cls.plan.specs[v] for v in step.outputs]
            outs = [self._new(spec, frame) if out is None else out for spec, out in zip(specs, outs)]
        key = (type(self.backend), id(step))        # the plan holds its steps
        if key not in cls.plan.compiled:
            cls.plan.compiled[key] = self.backend.compile_region(step, cls.plan.specs)
        return cls.plan.compiled[key](operands, outs if outs[0] is not None else None)

    def _run_segmented(self, cls: _Class, op: str, operand: Any, out: Any, frame: Frame) -> Any:
        edges = cls.layout.edges
        if op == "stack_rows":
            return self.backend.repeat(operand, frame.num_rows, out)
        assert edges is not None
        if op == "spread":
            return self.backend.take(operand, self._segment_ids(edges, frame.start, frame.stop), out)
        if op == "child_sum":
            segments = self._segment_ids(edges, frame.start, frame.stop)
            return self.backend.segment_sum(operand, segments, frame.num_rows, out)
        indptr = edges.indptr[frame.start:frame.stop + 1] - frame.edge_start
        return self.backend.segment_max(operand, indptr, out)

    def _new(self, spec: Spec, frame: Frame) -> Any:
        if spec.kind == SHARED:
            return self.backend.empty(spec.shape, spec.dtype)
        return self.backend.empty((frame.num_edges if spec.kind == CHILD else frame.num_rows, *spec.shape), spec.dtype)

    def _view(self, cls: _Class, value: int, frame: Frame) -> Any:
        """The rows of a stored value that belong to a frame."""
        array, base, width = cls.stored[value]
        spec = cls.plan.specs[value]
        start, stop = (frame.edge_start, frame.edge_stop) if spec.kind == CHILD else (frame.start, frame.stop)
        rows = self.backend.rows(array, base + start * width, base + stop * width)
        return rows if width == 1 else self.backend.reshape(rows, (stop - start, *spec.shape))

    def _place(self, cls: _Class, value: int, buffer: Any, place: Place) -> tuple[Any, int, int]:
        """A place in a buffer as an entry of `stored`."""
        return self._as_rows(buffer, cls.plan.specs[value].shape, place.width), place.base, place.width

    def _as_rows(self, buffer: Any, shape: tuple[int, ...], width: int) -> Any:
        """A buffer whose rows have the shape of a value, where one row is one value."""
        if width != 1:
            return buffer
        key = (id(buffer), shape)
        if key not in self._reshaped:       # with the buffer itself: its id must stay its own
            same = tuple(buffer.shape[1:]) == shape
            self._reshaped[key] = (buffer, buffer if same else self.backend.reshape(buffer, (buffer.shape[0], *shape)))
        return self._reshaped[key][1]

    # ---- operands ----------------------------------------------------------------------------

    def _operand(self, cls: _Class, value: int, inputs: dict[int, Any], frame: Frame, local: dict[int, Any]) -> Any:
        if cls.plan.specs[value].kind == SHARED:
            if value not in cls.shared:
                cls.shared[value] = self._shared_input(cls, value)
            return cls.shared[value]
        if value in local:
            return local[value]
        if value in cls.stored:
            return self._view(cls, value, frame)
        source = inputs[value] if value in inputs else cls.plan.inputs[value]
        if isinstance(source, (Pull, Leaf, OutputGrad)):        # waits for no launch: fetched once for all of them
            cls.stored[value] = (self._fetch_whole(cls, source, cls.plan.specs[value].shape), 0, 1)
            return self._view(cls, value, frame)
        local[value] = self._fetch(cls, source, frame, cls.plan.specs[value].shape)
        return local[value]

    def _shared_input(self, cls: _Class, value: int) -> Any:
        source = cls.plan.inputs[value]
        if isinstance(source, Zeros):
            spec = cls.plan.specs[value]
            return self.backend.zeros(spec.shape, spec.dtype)
        return self.arrays[cls.layout.names.get(source, source)]

    def _fetch_whole(self, cls: _Class, source: Any, shape: tuple[int, ...]) -> Any:
        """All rows of an external input, in the order of positions."""
        rows = cls.layout.whole.num_rows
        if isinstance(source, Leaf):
            return self._read(cls.layout.reads[source], 0, rows, shape)
        if isinstance(source, Pull):
            return self.rows_of(self.arrays[source], cls.layout.external, 0, rows)
        return self.rows_of(self.output_grads[source.index], cls.layout.pushed, 0, rows)

    def _read(self, read: Read, start: int, stop: int, shape: tuple[int, ...]) -> Any:
        """What positions start:stop read of a buffer."""
        width = read.width
        buffer = self._as_rows(self.buffers[read.buffer], shape, width)
        rows = self.rows_of(buffer, read.rows, start * width, stop * width)
        return rows if width == 1 else self.backend.reshape(rows, (stop - start, *shape))

    def _fetch(self, cls: _Class, source: Any, frame: Frame, shape: tuple[int, ...]) -> Any:
        """The rows of a recurrent input for one frame."""
        if isinstance(source, StateGrad):
            place = cls.layout.writes[source.state]
            width = place.width
            rows = self.pulled(place.buffer, place.base + frame.start * width, place.base + frame.stop * width)
            same = self._row_shapes[place.buffer] == shape
            return rows if same else self.backend.reshape(rows, (frame.num_rows, *shape))
        read = cls.layout.reads[source]
        if not read.per_edge:
            return self._read(read, frame.start, frame.stop, shape)
        buffer = self._as_rows(self.buffers[read.buffer], shape, read.width)
        rows = self.rows_of(buffer, read.rows, frame.edge_start, frame.edge_stop)
        if not read.summed:
            return rows
        assert cls.layout.edges is not None
        return self._segment_total(rows, cls.layout.edges, frame.start, frame.stop)

    def pulled(self, buffer: int, start: int, stop: int) -> Any:
        """What all readers of each row sent back, added up."""
        messages, array = self.layout.messages[buffer], self.messages[buffer]
        if messages.single is not None:
            return self.rows_of(array, messages.single, start, stop)
        first, last = messages.segments.range_of(start, stop)
        if first == last:               # nobody reads these rows
            return self.backend.zeros((stop - start, *array.shape[1:]), array.dtype)
        return self._segment_total(self.rows_of(array, messages.pull, first, last), messages.segments, start, stop)

    def _segment_total(self, rows: Any, segments: Segments, start: int, stop: int) -> Any:
        if segments.one_each(start, stop):
            return rows
        self.launched += 1
        return self.backend.segment_sum(rows, self._segment_ids(segments, start, stop), stop - start)

    def rows_of(self, array: Any, index: RowIndex, start: int, stop: int) -> Any:
        """Rows index[start:stop] of an array: a view if they are contiguous."""
        stretch = index.range_of(start, stop)
        if stretch is not None:
            return self.backend.rows(array, *stretch)
        self.launched += 1
        return self.backend.take(array, self.backend.rows(self._on_device(index.rows), start, stop))

    def _segment_ids(self, segments: Segments, start: int, stop: int) -> Any:
        """For each entry of rows start:stop, which of these rows it belongs to."""
        first, last = segments.range_of(start, stop)
        if segments.is_launch(start, stop):
            return self.backend.rows(self._on_device(segments.in_launch), first, last)
        return self.backend.index(segments.row[first:last] - start)

    def _on_device(self, rows: Any) -> Any:
        """An index of the layout, uploaded once a run."""
        if id(rows) not in self._indices:
            self._indices[id(rows)] = self.backend.index(rows)
        return self._indices[id(rows)]
