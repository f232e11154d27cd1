"""`run`: graphs and inputs through a vertex function, forward at once and backward through MXNet's tape."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from .backends.choose import BACKENDS, make_run, note_seconds, runs_in_the_end, runs_natively
from .cell_plan import CellPlan, Classes, Vertices
from .errors import RunError
from .graph import InputGraph, IntArray
from .graph_run import lay_out
from .mxnet_compat import autograd, mx
from .program import Pull, Spec, Zeros
from .recorded_run import RecordedRun
from .tape_state import needs_gradient, off_tape
from .vertex import VertexFunction

__all__ = ["run", "RunOutput", "RunStats"]

NDArray = mx.nd.NDArray


@dataclass
class RunStats:
    """What a run did."""

    samples: int = 0
    vertices: int = 0
    edges: int = 0
    launches: int = 0               # one a level: the leaves, then every level above them
    repeats: int = 0                # vertices that did not run, because others do the same
    forward_ops: int = 0            # operators and compiled regions that the forward pass started
    backward_ops: int = 0           # the same for the last backward pass
    schedule_ms: float = 0.0
    forward_ms: float = 0.0         # until the work was handed to the device
    backward_ms: float = 0.0
    fallback: str = ""              # why the native backend could not run it
    estimate: Callable[[], int] = field(default=lambda: 0, repr=False)

    @cached_property
    def peak_bytes(self) -> int:
        """An estimate of the memory that the run holds at its peak, from shapes alone."""
        return self.estimate()


class RunOutput:
    """The pushed values of a run.

    Attributes
    ----------
    pushed : NDArray, shape (vertices that push, ...)
        Rows sample after sample, in the order of each graph's vertices; a list if the function pushes several values.
    roots : NDArray, shape (roots that push, ...)
        The rows of the vertices that nobody gathers, in that order.
    stats : RunStats
    """

    def __init__(self, pushed: list[Any], graph: InputGraph, pushing: IntArray, stats: RunStats, recorded: bool):
        self._pushed, self.graph, self._pushing, self.stats, self._recorded = pushed, graph, pushing, stats, recorded

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
        is_root = np.zeros(self.graph.num_vertices, bool)
        is_root[self.graph.roots] = True
        rows = np.flatnonzero(is_root[self._pushing])
        if len(rows) == len(self._pushing):
            return self.pushed
        return self._rows(len(rows), lambda p: mx.nd.take(p, mx.nd.array(rows, ctx=p.context, dtype="int32")))

    def of(self, sample: int) -> Any:
        """The rows of one sample."""
        count = self.graph.num_samples
        if not isinstance(sample, (int, np.integer)):
            raise RunError(f"RunOutput.of({sample!r}): a sample is named by its number, an integer")
        if not -count <= sample < count:
            raise IndexError(f"RunOutput.of({sample}): the run has {count} samples")
        start, stop = np.searchsorted(self._pushing, self.graph.sample_offsets[sample % count:][:2]).tolist()
        return self._rows(stop - start, lambda p: mx.nd.slice_axis(p, axis=0, begin=start, end=stop))

    def _rows(self, count: int, select: Any) -> Any:
        return self._each(select if count else lambda p: _no_rows(p.shape[1:], p.dtype, p.context))

    def __repr__(self) -> str:
        shapes = ", ".join("x".join(map(str, p.shape)) for p in self._pushed)
        return f"RunOutput({self.graph.num_samples} samples, {self.stats.launches} launches, pushed {shapes})"


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
    if not isinstance(graphs, (InputGraph, Iterable)) or isinstance(graphs, (str, Mapping, NDArray)):
        raise RunError(f"{name}: graphs is a {type(graphs).__name__}; expected an InputGraph, or a list with one per "
                       "sample. Make them with from_parents, from_edges or from_networkx")
    inputs = {} if inputs is None else inputs
    if not isinstance(inputs, Mapping):
        raise RunError(f"{name}: inputs is a {type(inputs).__name__}; expected a dict from the name of each pulled "
                       'input to its rows, as in {"x": rows}')
    graph = graphs if isinstance(graphs, InputGraph) else cell._batches.batch(list(graphs))
    parameters = _parameters(cell)
    ctx = _context(parameters, inputs)
    floats = _dtype_of(parameters)
    arrays = {key: _rows(value, key, graph, name, ctx, floats) for key, value in inputs.items()}
    plan, vertices = _plan(cell, parameters, graph, arrays, ctx)
    classes = vertices.classes
    rows = lay_out(plan, vertices, graph, arrays, runs_in_the_end(ctx, backend) == "native")
    stats = RunStats(graph.num_samples, graph.num_vertices, graph.num_edges, rows.num_launches, rows.num_repeats)
    stats.schedule_ms = (time.perf_counter() - start) * 1e3
    specs, plans, layout = classes.pushed_specs, classes.plans, rows.layout
    if graph.num_vertices == 0:
        nothing = [_no_rows(shape, spec.dtype, ctx) for shape, spec in zip(classes.pushed_shapes, specs)]
        return RunOutput(nothing, graph, rows.pushing, stats, False)
    start = time.perf_counter()
    native, stats.fallback = runs_natively(layout, plans, ctx, backend)
    with off_tape():
        bound = _bind(classes, arrays, ctx, native)
        initial = plan.initial if plan.allow_missing and rows.reads_initial else []
        fills = [(k, 0, None if isinstance(s, Zeros) else bound[s].expand_dims(0)) for k, s in enumerate(initial)]
        execution = make_run(native, layout, plans, ctx, bound, fills)
        inside, recording = execution.estimate(), plan.recording
        stats.estimate = lambda: inside() + rows.outside_bytes(specs, recording)
        shapes = [(len(rows.pushing), *shape) for shape in classes.pushed_shapes]
        wanted = classes.wanted if recording else []
        execution.forward()
        if wanted:
            owner = RecordedRun(execution, rows, wanted, initial, arrays,
                                [(shape, spec.dtype) for shape, spec in zip(shapes, specs)],
                                [spec.shape for spec in specs], ctx, native, stats, classes.touched)
            pushed: list[Any] = list(owner.pushed())
        else:
            pushed = [execution.take(buffer, index).reshape(shape)
                      for (buffer, index), shape in zip(rows.pushed, shapes)]
    stats.forward_ops = execution.launched
    stats.forward_ms = (time.perf_counter() - start) * 1e3
    note_seconds(plans, stats.forward_ms / 1e3)
    return RunOutput(pushed, graph, rows.pushing, stats, bool(wanted))


# ---- planning --------------------------------------------------------------------------------

def _plan(cell: VertexFunction, parameters: Sequence[Any], graph: InputGraph, arrays: dict[str, Any],
          ctx: Any) -> tuple[CellPlan, Vertices]:
    """What was planned for the same signature before, or a new plan; and the vertices with their classes."""
    recording = autograd.is_recording()
    wanted_pulls = tuple(sorted(k for k, x in arrays.items() if isinstance(x, NDArray) and needs_gradient(x))
                         ) if recording else ()
    looks = tuple([(k, x.shape[1:], x.dtype) for k, x in sorted(arrays.items())])
    signature = (looks, recording, wanted_pulls, autograd.is_training())
    plan = cell._plans.get((signature, _looks(parameters)))
    if plan is not None and not plan.is_current():      # a layer was replaced, an attribute was set
        cell._plans.clear()
        plan = None
    if plan is None:
        pulls = {k: Spec((1, *x.shape[1:]), _name_of(x.dtype)) for k, x in arrays.items()}
        # the states have the dtype of the parameters, else of the first floating input
        dtype = _dtype_of(parameters) or next((s.dtype for s in pulls.values() if s.is_float), "float32")
        plan = CellPlan(cell, pulls, dtype, ctx, recording, wanted_pulls)
    vertices = plan.vertices(graph)
    # A deferred parameter got its shape while it was traced: the signature of the next run has that shape.
    cell._plans[signature, _looks(parameters)] = plan
    return plan, vertices


def _looks(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """What a plan depends on; read past the properties, which ask MXNet what a zero in a shape means."""
    return tuple([(p._grad_req, p._shape, p.dtype) for p in parameters])


def _bind(classes: Classes, arrays: dict[str, Any], ctx: Any, native: bool) -> dict[Any, Any]:
    """All arrays of a run, by source."""
    bound: dict[Any, Any] = {}
    for key, x in arrays.items():
        if isinstance(x, np.ndarray) and not native:
            x = _in_mxnet(x, ctx, None)
        bound[Pull(key)] = x.reshape((x.shape[0], 1, *x.shape[1:]))
    bound.update({source: source.parameter.data(ctx) for source in classes.params})
    bound.update({source: source.array for source in classes.consts})
    return bound


def _parameters(cell: VertexFunction) -> list[Any]:
    """What `collect_params` finds, without its search for blocks in lists, which takes a tenth of a small run."""
    found: dict[Any, None] = {}
    blocks = [cell]
    while blocks:
        block = blocks.pop()
        found.update(dict.fromkeys(block.params.values()))
        blocks.extend(block._children.values())
    return list(found)


def _dtype_of(parameters: Sequence[Any]) -> str | None:
    """That of the first floating one."""
    return next((dtype for dtype in (_name_of(p.dtype) for p in parameters) if dtype.startswith("float")), None)


@cache
def _name_of(dtype: Any) -> str:
    return np.dtype(dtype).name


# ---- inputs ----------------------------------------------------------------------------------

def _context(parameters: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
    for value in inputs.values():
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, NDArray):
            return first.context
    for parameter in parameters:
        if parameter._data is not None or parameter._deferred_init:
            return parameter.list_ctx()[0]
    return mx.current_context()


def _rows(value: Any, key: str, graph: InputGraph, name: str, ctx: Any, floats: str | None) -> Any:
    """The rows of one input, as `_as_array` gives them; a list of per-sample rows is joined."""
    if isinstance(value, (list, tuple)):
        if len(value) != graph.num_samples:
            raise RunError(f"{name}: input {key!r} is a list of {len(value)} arrays, but there are "
                           f"{graph.num_samples} samples")
        parts = [_as_rows(part, f"{name}: input {key!r} of sample {i}") for i, part in enumerate(value)]
        for i, (part, count) in enumerate(zip(parts, np.diff(graph.sample_offsets))):
            if len(part) != count:
                raise RunError(f"{name}: input {key!r} of sample {i} has {len(part)} rows, but the sample has "
                               f"{count} vertices")
        parts = [part for part in parts if len(part)]
        if len({part.shape[1:] for part in parts}) > 1:
            raise RunError(f"{name}: input {key!r} has rows of shape {parts[0].shape[1:]} in one sample and of "
                           f"{next(p.shape[1:] for p in parts if p.shape[1:] != parts[0].shape[1:])} in another; all "
                           "vertices of a run pull rows of one shape")
        value = _joined(parts, ctx, floats)
    if isinstance(value, NDArray) and value.stype != "default":
        raise RunError(f"{name}: input {key!r} is stored as {value.stype}; expected a dense array. Pass "
                       'x.tostype("default")')
    if not isinstance(value, NDArray):
        value = _as_rows(value, f"{name}: input {key!r}")
        if value.shape[0] == 0:
            return _no_rows(value.shape[1:], value.dtype, ctx)
        value = _as_array(value, ctx, floats)
    if 0 in value.shape[1:]:
        raise RunError(f"{name}: input {key!r} has the shape {value.shape}: its rows have no elements")
    if value.shape[0] != graph.num_vertices:
        raise RunError(f"{name}: input {key!r} has {value.shape[0]} rows, but the graphs have {graph.num_vertices} "
                       "vertices; pass one row per vertex, sample after sample")
    return value


def _as_rows(given: Any, what: str) -> Any:
    """An array, from what the caller gave for one."""
    wanted = "expected an array of numbers with one row per vertex"
    try:
        value = given if isinstance(given, NDArray) else np.asarray(given)
    except ValueError as error:                 # lists of different lengths; an object that is none of ours
        raise RunError(f"{what} is {reprlib.repr(given)}, which is no array ({error}); {wanted}") from error
    if value.ndim == 0 or (isinstance(value, np.ndarray) and value.dtype.kind not in "fiub"):
        raise RunError(f"{what} is {reprlib.repr(given)}; {wanted}")
    return value


def _joined(parts: list[Any], ctx: Any, floats: str | None) -> Any:
    if not parts:
        return np.zeros((0, 1), "float32")
    if not any(isinstance(part, NDArray) for part in parts):
        return np.concatenate(parts)
    parts = [part if isinstance(part, NDArray) else _in_mxnet(np.asarray(part), ctx, floats) for part in parts]
    return mx.nd.concat(*parts, dim=0) if len(parts) > 1 else parts[0]


def _as_array(value: Any, ctx: Any, floats: str | None) -> Any:
    """Integers stay numpy's, so that they can be compared; the caller may change his array before the backward pass.

    All else becomes an NDArray; floats of dtype `floats`.
    """
    return np.array(value, order="C") if value.dtype in (np.int32, np.int64) else _in_mxnet(value, ctx, floats)


def _in_mxnet(value: Any, ctx: Any, floats: str | None) -> Any:
    return mx.nd.array(value, ctx=ctx, dtype=floats if floats and value.dtype.kind == "f" else value.dtype)


def _no_rows(shape: Sequence[int], dtype: Any, ctx: Any) -> Any:
    """An array of zero rows, which MXNet makes only with numpy's meaning of a zero in a shape."""
    with mx.util.np_shape(True):
        return mx.nd.zeros((0, *shape), dtype=dtype, ctx=ctx)
