"""Runs a planned vertex function over a layout, forward and backward, on a backend. It makes no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .layout import Frame, Layout, RowIndex, Segments
from .partition import Step
from .plan import ClassPlan
from .program import (
    CHILD,
    SHARED,
    Gather,
    GatherAll,
    GatherSum,
    OutputGrad,
    Pull,
    StateGrad,
    Zeros,
)

__all__ = ["Run"]


class _Class:
    """One class of vertices in one run: its plan, its frames, and its values so far."""

    def __init__(self, plan: ClassPlan, whole: Frame, launches: Sequence[Frame]):
        self.plan, self.whole, self.launches = plan, whole, launches
        self.shared: dict[int, Any] = {}
        self.stored: dict[int, tuple[Any, int]] = {}    # value -> (array, row of position 0 or of edge 0)


class Run:
    """One run. `forward` returns the pushed values; `backward` may follow it, once or several times.

    Parameters
    ----------
    layout : Layout
    leaf, inner : ClassPlan
    backend : the backend
    arrays : dict
        Source (Param, Const, Pull) -> array. Pulled arrays have a row per vertex, in the order of the vertices.
    initial : list
        The source of each state's initial value: Zeros() or a parameter's.
    """

    def __init__(self, layout: Layout, leaf: ClassPlan, inner: ClassPlan, backend: Any, arrays: dict[Any, Any],
                 initial: Sequence[Any]):
        self.layout, self.backend, self.arrays, self.initial = layout, backend, arrays, initial
        self.launched = 0               # operators and regions started so far
        self.leaf_first = [_Class(leaf, layout.leaves, []), _Class(inner, layout.inner, layout.launches)]
        self.classes = [c for c in self.leaf_first if c.whole.num_rows]
        self._indices: dict[int, Any] = {}

    # ---- forward -----------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """Run all launches; the pushed values, a row per vertex in the order of the vertices."""
        layout, backend = self.layout, self.backend
        vertex = self.classes[-1].plan.vertex
        specs = vertex.program.specs
        self.states = [backend.empty((layout.num_vertices + 1, *specs[v].shape), specs[v].dtype)
                       for v in vertex.scattered]
        if layout.has_missing:
            for state, source in zip(self.states, self.initial):
                backend.fill_row(state, 0, None if isinstance(source, Zeros) else self.arrays[source])
        alias = {v: k for k, v in enumerate(vertex.scattered)}
        pushes = [None if v in alias else backend.empty((layout.num_vertices, *specs[v].shape), specs[v].dtype)
                  for v in vertex.pushed]
        for cls in self.classes:
            places = {v: (state, 1) for v, state in zip(cls.plan.vertex.scattered, self.states)}
            places.update({v: (push, 0) for v, push in zip(cls.plan.vertex.pushed, pushes) if push is not None})
            cls.stored.update(places)
            self._run_phases(cls, cls.plan.forward, cls.plan.vertex.program.inputs, cls.launches)
        n = layout.num_vertices
        return [self._rows_of(self.backend.rows(self.states[alias[v]], 1, n + 1) if push is None else push,
                              layout.inverse, 0, n) for v, push in zip(vertex.pushed, pushes)]

    # ---- backward ----------------------------------------------------------------------------

    def backward(self, output_grads: Sequence[Any], wanted: Iterable[Any]) -> dict[Any, Any]:
        """Gradients of the wanted sources (Param, Pull), from those of the pushed values.

        A source that nothing depends on has no entry.
        """
        layout, backend = self.layout, self.backend
        self.output_grads = output_grads
        self.message_buffers = []
        for messages, state in zip(layout.messages, self.states):
            buffer = backend.empty((messages.num_rows, *state.shape[1:]), state.dtype)
            backend.fill_row(buffer, 0)
            self.message_buffers.append(buffer)
        wanted = set(wanted)
        pulls = self._pull_buffers(wanted)
        grads: dict[Any, Any] = {}
        for cls in reversed(self.classes):
            forward_values = dict(cls.stored)
            for source, values in cls.plan.grads.items():
                for value in values:
                    if isinstance(source, Pull) and source in pulls:
                        cls.stored[value] = (pulls[source], 0)
                    elif isinstance(source, (Gather, GatherSum, GatherAll)):
                        base = layout.messages[source.state].base[source]
                        cls.stored[value] = (self.message_buffers[source.state], base)
            self._run_phases(cls, cls.plan.backward, cls.plan.backward_inputs, cls.launches[::-1])
            for source, values in cls.plan.grads.items():
                if source in wanted and not isinstance(source, Pull):
                    for value in values:
                        self._accumulate(grads, source, cls.shared[value])
            cls.stored = forward_values
        self._initial_grads(grads, wanted)
        grads.update({source: self._rows_of(buffer, layout.inverse, 0, layout.num_vertices)
                      for source, buffer in pulls.items()})
        return grads

    def _pull_buffers(self, wanted: set[Any]) -> dict[Any, Any]:
        """A row per vertex for the gradient of each pulled input; zeros where a class of vertices has none."""
        buffers = {}
        for source in wanted:
            having = [c for c in self.classes if source in c.plan.grads]
            if isinstance(source, Pull) and having:
                spec = having[0].plan.specs[having[0].plan.grads[source][0]]
                make = self.backend.empty if len(having) == len(self.classes) else self.backend.zeros
                buffers[source] = make((self.layout.num_vertices, *spec.shape), spec.dtype)
        return buffers

    def _initial_grads(self, grads: dict[Any, Any], wanted: set[Any]) -> None:
        """What vertices with a missing child send back to a learned initial state."""
        for source, messages, buffer in zip(self.initial, self.layout.messages, self.message_buffers):
            if source in wanted and len(messages.initial):
                sent = self.backend.take(buffer, self.backend.index(messages.initial))
                segment = self.backend.index(messages.initial * 0)
                total = self.backend.segment_sum(sent, segment, 1)
                self.launched += 2
                self._accumulate(grads, source, self.backend.reshape(total, buffer.shape[1:]))

    def _accumulate(self, grads: dict[Any, Any], source: Any, grad: Any) -> None:
        if source in grads:
            self.launched += 1
            grad = self.backend.add(grads[source], grad)
        grads[source] = grad

    # ---- phases and steps --------------------------------------------------------------------

    def _run_phases(self, cls: _Class, phases: Any, inputs: dict[int, Any], launches: Sequence[Frame]) -> None:
        self._run_steps(cls, phases.eager, inputs, cls.whole, keep_all=True)
        if phases.critical and launches:
            self._make_kept(cls, phases.critical)
            for frame in launches:
                self._run_steps(cls, phases.critical, inputs, frame, keep_all=False)
        self._run_steps(cls, phases.lazy, inputs, cls.whole, keep_all=True)

    def _make_kept(self, cls: _Class, steps: Sequence[Step]) -> None:
        """Buffers, over all launches, for what the launches make and somebody needs later."""
        for value in (v for step in steps for v in step.outputs):
            if value in cls.plan.kept and value not in cls.stored:
                spec, whole = cls.plan.specs[value], cls.whole
                start, rows = ((whole.edge_start, whole.num_edges) if spec.kind == CHILD
                               else (whole.start, whole.num_rows))
                cls.stored[value] = (self.backend.empty((rows, *spec.shape), spec.dtype), -start)

    def _run_steps(self, cls: _Class, steps: Sequence[Step], inputs: dict[int, Any], frame: Frame,
                   keep_all: bool) -> None:
        """Run steps over one frame; what has no place yet is kept for the class (`keep_all`) or for this frame."""
        local: dict[int, Any] = {}
        for step in steps:
            operands = [self._operand(cls, v, inputs, frame, local) for v in step.inputs]
            outs = [self._place(cls, v, frame) for v in step.outputs]
            made = self._run_step(cls, step, operands, outs, frame)
            for value, array, out in zip(step.outputs, made, outs):
                spec = cls.plan.specs[value]
                if spec.kind == SHARED:
                    cls.shared[value] = array
                elif out is None and keep_all:
                    cls.stored[value] = (array, -(frame.edge_start if spec.kind == CHILD else frame.start))
                elif out is None:
                    local[value] = array

    def _run_step(self, cls: _Class, step: Step, operands: list[Any], outs: list[Any], frame: Frame) -> Sequence[Any]:
        self.launched += 1
        if step.segmented:
            return [self._run_segmented(step.instrs[0].op, operands[0], outs[0], frame)]
        if any(out is not None for out in outs):
            specs = [cls.plan.specs[v] for v in step.outputs]
            outs = [self._new(spec, frame) if out is None else out for spec, out in zip(specs, outs)]
        key = (type(self.backend), step)
        if key not in cls.plan.compiled:
            cls.plan.compiled[key] = self.backend.compile_region(step, cls.plan.specs)
        return cls.plan.compiled[key](operands, outs if outs[0] is not None else None)

    def _run_segmented(self, op: str, operand: Any, out: Any, frame: Frame) -> Any:
        edges = self.layout.edges
        if op == "stack_rows":
            return self.backend.repeat(operand, frame.num_rows, out)
        if op == "spread":
            return self.backend.take(operand, self._segment_ids(edges, frame), out)
        if op == "child_sum":
            return self.backend.segment_sum(operand, self._segment_ids(edges, frame), frame.num_rows, out)
        indptr = edges.indptr[frame.start:frame.stop + 1] - frame.edge_start
        return self.backend.segment_max(operand, indptr, out)

    def _new(self, spec: Any, frame: Frame) -> Any:
        if spec.kind == SHARED:
            return self.backend.empty(spec.shape, spec.dtype)
        return self.backend.empty((frame.num_edges if spec.kind == CHILD else frame.num_rows, *spec.shape), spec.dtype)

    def _place(self, cls: _Class, value: int, frame: Frame) -> Any:
        """The rows that a value is written to, if it has a place."""
        return self._view(cls, value, frame) if value in cls.stored else None

    def _view(self, cls: _Class, value: int, frame: Frame) -> Any:
        array, base = cls.stored[value]
        start, stop = ((frame.edge_start, frame.edge_stop) if cls.plan.specs[value].kind == CHILD
                       else (frame.start, frame.stop))
        return self.backend.rows(array, base + start, base + stop)

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
        source = inputs[value] if value in inputs else cls.plan.vertex.program.inputs[value]
        if isinstance(source, (Pull, OutputGrad)):      # in the order of positions, once for all launches
            cls.stored[value] = (self._fetch(source, cls.whole), -cls.whole.start)
            return self._view(cls, value, frame)
        local[value] = self._fetch(source, frame)
        return local[value]

    def _shared_input(self, cls: _Class, value: int) -> Any:
        source = cls.plan.vertex.program.inputs[value]
        if isinstance(source, Zeros):
            spec = cls.plan.specs[value]
            return self.backend.zeros(spec.shape, spec.dtype)
        return self.arrays[source]

    def _fetch(self, source: Any, frame: Frame) -> Any:
        """The rows of an input for one frame."""
        layout = self.layout
        if isinstance(source, Pull):
            return self._rows_of(self.arrays[source], layout.order, frame.start, frame.stop)
        if isinstance(source, OutputGrad):
            return self._rows_of(self.output_grads[source.index], layout.order, frame.start, frame.stop)
        if isinstance(source, Gather):
            return self._rows_of(self.states[source.state], layout.slots[source.slot], frame.start, frame.stop)
        if isinstance(source, StateGrad):
            return self._pulled(source.state, frame)
        rows = self._rows_of(self.states[source.state], layout.edge_rows, frame.edge_start, frame.edge_stop)
        if isinstance(source, GatherAll):
            return rows
        return self._segment_total(rows, layout.edges, frame)

    def _pulled(self, state: int, frame: Frame) -> Any:
        """What all readers of each vertex sent back, added up."""
        messages, buffer = self.layout.messages[state], self.message_buffers[state]
        if messages.single is not None:
            return self._rows_of(buffer, messages.single, frame.start, frame.stop)
        start, stop = messages.segments.range_of(frame.start, frame.stop)
        if start == stop:               # nobody reads these vertices
            return self.backend.zeros((frame.num_rows, *buffer.shape[1:]), buffer.dtype)
        return self._segment_total(self._rows_of(buffer, messages.pull, start, stop), messages.segments, frame)

    def _segment_total(self, rows: Any, segments: Segments, frame: Frame) -> Any:
        if segments.one_each(frame.start, frame.stop):
            return rows
        self.launched += 1
        return self.backend.segment_sum(rows, self._segment_ids(segments, frame), frame.num_rows)

    def _rows_of(self, array: Any, index: RowIndex, start: int, stop: int) -> Any:
        """Rows index[start:stop] of an array: a view if they are contiguous."""
        stretch = index.range_of(start, stop)
        if stretch is not None:
            return self.backend.rows(array, *stretch)
        self.launched += 1
        return self.backend.take(array, self.backend.rows(self._on_device(index.rows), start, stop))

    def _segment_ids(self, segments: Segments, frame: Frame) -> Any:
        start, stop = segments.range_of(frame.start, frame.stop)
        if frame.is_launch:
            return self.backend.rows(self._on_device(segments.in_launch), start, stop)
        return self.backend.index(segments.position[start:stop] - frame.start)

    def _on_device(self, rows: Any) -> Any:
        """An index of the layout, uploaded once a run."""
        if id(rows) not in self._indices:
            self._indices[id(rows)] = self.backend.index(rows)
        return self._indices[id(rows)]
