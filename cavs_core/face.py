"""`run`: graphs and inputs through a vertex function, forward at once and backward through MXNet's tape."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .backends.choose import BACKENDS, make_run, note_seconds, runs_natively
from .errors import RunError
from .graph import InputGraph
from .layout import Place, RowIndex, lay_out_graphs
from .mxnet_compat import autograd, mx
from .plan import ClassPlan, VertexProgram, leaf_program, plan_class
from .program import Const, Gather, GatherAll, GatherSum, Param, Pull, Spec, Zeros
from .schedule import Schedule, check_arity, schedule
from .tape import TapeBridge, needs_gradient
from .vertex import VertexFunction, trace_vertex

__all__ = ["run", "RunOutput", "RunStats"]

NDArray = mx.nd.NDArray


@dataclass
class RunStats:
    """What a run did."""

    samples: int = 0
    vertices: int = 0
    edges: int = 0
    launches: int = 0               # one a level: the leaves, then every level above them
    forward_ops: int = 0            # operators and compiled regions that the forward pass started
    backward_ops: int = 0           # the same for the last backward pass
    peak_bytes: int = 0             # estimate, made before anything is allocated
    schedule_ms: float = 0.0
    forward_ms: float = 0.0         # until the work was handed to the device
    backward_ms: float = 0.0
    fallback: str = ""              # why the native backend could not run it


class RunOutput:
    """The pushed values of a run.

    Attributes
    ----------
    pushed : NDArray, shape (all vertices, ...)
        Rows sample after sample, in the order of each graph's vertices; a list if the function pushes several values.
    roots : NDArray, shape (roots, ...)
        The rows of the vertices that nobody gathers, in that order.
    stats : RunStats
    """

    def __init__(self, pushed: list[Any], graph: InputGraph, stats: RunStats, recorded: bool):
        self._pushed, self.graph, self.stats, self._recorded = pushed, graph, stats, recorded

    def _each(self, select: Any) -> Any:
        # A value of a recorded run stays on the tape, also where it is picked after record() was left.
        before = autograd.set_recording(True) if self._recorded else autograd.is_recording()
        try:
            parts = [select(p) for p in self._pushed]
        finally:
            autograd.set_recording(before)
        return parts[0] if len(parts) == 1 else parts

    @property
    def pushed(self) -> Any:
        return self._pushed[0] if len(self._pushed) == 1 else self._pushed

    @cached_property
    def roots(self) -> Any:
        roots = self.graph.roots
        if not len(roots):
            return self.pushed
        return self._each(lambda p: mx.nd.take(p, mx.nd.array(roots, ctx=p.context, dtype="int32")))

    def of(self, sample: int) -> Any:
        """The rows of one sample."""
        count = self.graph.num_samples
        if not -count <= sample < count:
            raise IndexError(f"RunOutput.of({sample}): the run has {count} samples")
        start, stop = self.graph.sample_offsets[sample % count:][:2].tolist()
        if start == stop:
            return self._each(lambda p: _no_rows(p.shape[1:], p.dtype, p.context))
        return self._each(lambda p: mx.nd.slice_axis(p, axis=0, begin=start, end=stop))

    def __repr__(self) -> str:
        shapes = ", ".join("x".join(map(str, p.shape)) for p in self._pushed)
        return f"RunOutput({self.graph.num_samples} samples, {self.stats.launches} launches, pushed {shapes})"


@dataclass
class _Planned:
    """A vertex function planned for one signature."""

    plans: list[ClassPlan]          # the leaves, all other vertices
    initial: list[Any]
    parameters: list[Param]
    constants: list[Const]
    wanted: list[Any]

    @property
    def vertex(self) -> VertexProgram:
        return self.plans[1].vertex


def run(cell: VertexFunction, graphs: InputGraph | Sequence[InputGraph], inputs: Mapping[str, Any] | None = None,
        backend: str = "auto") -> RunOutput:
    """Run a vertex function over graphs, batched level by level.

    Parameters
    ----------
    cell : VertexFunction
    graphs : InputGraph or list of InputGraph
    inputs : dict of name -> rows
        For each pulled name an array with one row per vertex, sample after sample; or a list with one such array per
        sample. numpy arrays are taken too.
    backend : "auto", "native" or "mxnet"
        What runs the launches: "native" on the CPU (generated kernels and BLAS), "mxnet" anywhere. "auto" takes the
        native one on the CPU, once the cell has run for as long as compiling its kernels takes.

    Returns
    -------
    RunOutput
    """
    name = f"run({type(cell).__name__})"
    if not isinstance(cell, VertexFunction):
        raise RunError(f"cavs_core.run: expected a VertexFunction, got {type(cell).__name__}")
    if backend not in BACKENDS:
        raise RunError(f"{name}: backend={backend!r}; expected one of {', '.join(BACKENDS)}")
    start = time.perf_counter()
    graph = graphs if isinstance(graphs, InputGraph) else InputGraph.batch(list(graphs))
    ctx = _context(cell, inputs or {})
    floats = _parameter_dtype(cell)
    arrays = {key: _rows(value, key, graph, name, ctx, floats) for key, value in (inputs or {}).items()}
    recording = autograd.is_recording()
    wanted_pulls = tuple(sorted(k for k, x in arrays.items() if recording and needs_gradient(x))) if recording else ()
    planned = _plan(cell, arrays, recording, wanted_pulls, ctx)
    _check_arity(cell, graph, planned)
    vertex = planned.vertex
    by_slot = not any(isinstance(p, GatherAll) for p in vertex.ports)
    scheduled = schedule(graph, by_slot)
    layout = lay_out_graphs(graph, scheduled, vertex.ports, planned.plans[1].answered_ports, vertex.pushed_states)
    stats = RunStats(graph.num_samples, graph.num_vertices, graph.num_edges, scheduled.num_launches)
    stats.schedule_ms = (time.perf_counter() - start) * 1e3
    if graph.num_vertices == 0:
        specs = vertex.program.specs
        empty = [_no_rows(_outer(specs[v]), specs[v].dtype, ctx) for v in vertex.pushed]
        return RunOutput(empty, graph, stats, False)
    start = time.perf_counter()
    bound: dict[Any, Any] = {Pull(k): x.reshape((x.shape[0], 1, *x.shape[1:])) for k, x in arrays.items()}
    bound.update({source: source.parameter.data(ctx) for source in planned.parameters})
    bound.update({source: source.array for source in planned.constants})
    reading_initial = any((r.rows.rows == 0).any() for r in layout.classes[1].reads.values() if not r.per_edge)
    initial = planned.initial if reading_initial else []
    fills = [(k, 0, None if isinstance(s, Zeros) else bound[s].expand_dims(0)) for k, s in enumerate(initial)]
    native, stats.fallback = runs_natively(layout, planned.plans, ctx, backend)
    execution = make_run(native, layout, planned.plans, ctx, bound, fills)
    position = RowIndex(scheduled.position)
    stats.peak_bytes = execution.estimate()() + _outside_bytes(graph, scheduled, vertex, recording)
    with autograd.pause(train_mode=autograd.is_training()):
        execution.forward()
        pushed = [_in_vertex_order(execution, place, position, vertex.program.specs[v])
                  for place, v in zip(layout.classes[0].writes[vertex.num_states:], vertex.pushed)]
    stats.forward_ops = execution.launched
    stats.forward_ms = (time.perf_counter() - start) * 1e3
    note_seconds(planned.plans, stats.forward_ms / 1e3)
    recorded = recording and bool(planned.wanted)
    if recorded:
        _record(planned, execution, position, arrays, bound, pushed, stats)
    return RunOutput(pushed, graph, stats, recorded)


def _outside_bytes(graph: InputGraph, scheduled: Schedule, vertex: VertexProgram, recording: bool) -> int:
    """What a run takes outside the engine: the batch of graphs, its schedule, pushed values, and their gradients."""
    arrays = (graph.child_indptr, graph.child_index, scheduled.order, scheduled.position, scheduled.depth)
    specs = [vertex.program.specs[v] for v in vertex.pushed]
    row = sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in specs)
    return sum(a.nbytes for a in arrays) + (2 if recording else 1) * row * graph.num_vertices


def _in_vertex_order(execution: Any, place: Place, position: RowIndex, spec: Spec) -> Any:
    """A pushed value, a row per vertex in the order of the vertices."""
    rows = execution.take(place.buffer, place.base + position.rows)
    return rows.reshape((len(position.rows), *_outer(spec)))


def _record(planned: _Planned, execution: Any, position: RowIndex, arrays: dict[str, Any], bound: dict[Any, Any],
            pushed: list[Any], stats: RunStats) -> None:
    """Put the run on the tape."""
    inputs = [arrays[s.name] if isinstance(s, Pull) else bound[s] for s in planned.wanted]
    held: list[Any] = [execution]
    specs = planned.vertex.program.specs
    shapes = [(p.shape[0], *specs[v].shape) for p, v in zip(pushed, planned.vertex.pushed)]

    def backward(output_grads: list[Any], wanted: list[bool], begun: list[bool]) -> list[Any]:
        if not held:
            raise RunError("backward through a run whose memory was freed by an earlier backward; "
                           "pass retain_graph=True to the earlier one")
        run, start, before = held[0], time.perf_counter(), held[0].launched
        sources = [s for s, want in zip(planned.wanted, wanted) if want]
        grads = run.backward([g.reshape(shape) for g, shape in zip(output_grads, shapes)], sources)
        for (k, row, _), source in zip(run.fills, planned.initial):     # what missing children send back
            if source in sources:
                grads[source] = run.total(grads.get(source), run.pulled(k, row, row + 1).reshape(bound[source].shape))
        found = [grads.get(s) if want else None for s, want in zip(planned.wanted, wanted)]
        found = [run.rows_of(g, position, 0, len(position.rows)) if isinstance(s, Pull) and g is not None else g
                 for s, g in zip(planned.wanted, found)]
        stats.backward_ops = run.launched - before
        stats.backward_ms = (time.perf_counter() - start) * 1e3
        return found

    def release() -> None:
        while held:
            held.pop().free()

    TapeBridge(inputs, pushed, backward, release)


# ---- planning --------------------------------------------------------------------------------

def _plan(cell: VertexFunction, arrays: dict[str, Any], recording: bool, wanted_pulls: tuple[str, ...],
          ctx: Any) -> _Planned:
    """Trace and plan the cell, or find what was planned for the same signature before."""
    pulls = {k: Spec((1, *x.shape[1:]), np.dtype(x.dtype).name) for k, x in arrays.items()}
    dtype = _state_dtype(cell, pulls)
    parameters = tuple(cell.collect_params().values())
    signature = (tuple(sorted(pulls.items())), dtype, recording, wanted_pulls, autograd.is_training(),
                 tuple((p.grad_req, p.shape) for p in parameters))
    if signature in cell._plans:
        return cell._plans[signature]
    vertex, initial = trace_vertex(cell, pulls, dtype, ctx)
    leaf = leaf_program(vertex, initial)
    sources = dict.fromkeys([*vertex.program.inputs.values(), *leaf.program.inputs.values()])
    used = [s for s in sources if isinstance(s, Param)]
    used += [s for s in initial if isinstance(s, Param) and s not in used]
    wanted: list[Any] = [s for s in used if s.parameter.grad_req != "null"]
    for source in wanted if recording else ():
        if source.parameter._grad_stype != "default":
            raise RunError(
                f"{type(cell).__name__}: parameter {source.name} asks for a {source.parameter._grad_stype} gradient, "
                "which a vertex function cannot give. Look the rows up before the run and pull them, or use "
                "sparse_grad=False.")
    wanted += [Pull(k) for k in wanted_pulls if Pull(k) in sources]
    constants = [s for s in sources if isinstance(s, Const)]
    plans = [plan_class(leaf, wanted, recording, in_one_launch=True),
             plan_class(vertex, [*wanted, *vertex.ports], recording, in_one_launch=False)]
    planned = _Planned(plans, initial, used, constants, wanted)
    # A deferred parameter got its shape while it was traced: the signature of the next run has that shape.
    signature = (*signature[:-1], tuple((p.grad_req, p.shape) for p in parameters))
    cell._plans[signature] = planned
    return planned


def _state_dtype(cell: VertexFunction, pulls: Mapping[str, Spec]) -> str:
    """The dtype of the states: that of the parameters, else of the first floating input."""
    return _parameter_dtype(cell) or next((s.dtype for s in pulls.values() if s.is_float), "float32")


def _parameter_dtype(cell: VertexFunction) -> str | None:
    dtypes = (np.dtype(p.dtype).name for p in cell.collect_params().values())
    return next((dtype for dtype in dtypes if dtype.startswith("float")), None)


def _check_arity(cell: VertexFunction, graph: InputGraph, planned: _Planned) -> None:
    """A vertex that is no leaf must have every child that the function gathers by number."""
    ports = planned.vertex.ports
    slots = [p.slot for p in ports if isinstance(p, Gather)]
    if not slots or cell.allow_missing:
        return
    needed = max(slots) + 1
    if any(isinstance(p, (GatherAll, GatherSum)) for p in ports):
        check_arity(graph, at_least=needed)
    else:
        check_arity(graph, exact=needed)


# ---- inputs ----------------------------------------------------------------------------------

def _context(cell: VertexFunction, inputs: Mapping[str, Any]) -> Any:
    for value in inputs.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, NDArray):
            return first.context
    for parameter in cell.collect_params().values():
        if parameter._data is not None or parameter._deferred_init:
            return parameter.list_ctx()[0]
    return mx.current_context()


def _rows(value: Any, key: str, graph: InputGraph, name: str, ctx: Any, floats: str | None) -> Any:
    """The rows of one input as an NDArray; a list of per-sample rows is joined. numpy's floats become `floats`."""
    if isinstance(value, (list, tuple)):
        if len(value) != graph.num_samples:
            raise RunError(f"{name}: input {key!r} is a list of {len(value)} arrays, but there are "
                           f"{graph.num_samples} samples")
        for i, (part, count) in enumerate(zip(value, np.diff(graph.sample_offsets))):
            if len(part) != count:
                raise RunError(f"{name}: input {key!r} of sample {i} has {len(part)} rows, but the sample has "
                               f"{count} vertices")
        parts = [part if isinstance(part, NDArray) else _as_array(part, ctx, floats) for part in value if len(part)]
        value = mx.nd.concat(*parts, dim=0) if len(parts) > 1 else parts[0] if parts else np.zeros((0, 1), "float32")
    if not isinstance(value, NDArray):
        value = np.asarray(value)
        if value.ndim == 0 or value.dtype.kind not in "fiub":
            raise RunError(f"{name}: input {key!r} is {value!r}; expected an array of numbers with one row per vertex")
        if value.shape[0] == 0:
            return _no_rows(value.shape[1:], value.dtype, ctx)
        value = _as_array(value, ctx, floats)
    if value.shape[0] != graph.num_vertices:
        raise RunError(f"{name}: input {key!r} has {value.shape[0]} rows, but the graphs have {graph.num_vertices} "
                       "vertices; pass one row per vertex, sample after sample")
    return value


def _as_array(value: Any, ctx: Any, floats: str | None) -> Any:
    value = np.asarray(value)
    return mx.nd.array(value, ctx=ctx, dtype=floats if floats and value.dtype.kind == "f" else value.dtype)


def _no_rows(shape: Sequence[int], dtype: Any, ctx: Any) -> Any:
    """An array of zero rows, which MXNet makes only with numpy's meaning of a zero in a shape."""
    with mx.util.np_shape(True):
        return mx.nd.zeros((0, *shape), dtype=dtype, ctx=ctx)


def _outer(spec: Spec) -> tuple[int, ...]:
    """The shape of a pushed value outside: without the axis of one."""
    return spec.shape[1:] if spec.shape[0] == 1 else spec.shape
