"""A flush: recorded calls are analyzed, laid out, and run by cavs_core."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cavs_core import (
    ClassLayout,
    Frame,
    Layout,
    Place,
    Read,
    RowIndex,
    copy_arrays,
    kernel_sources,
    make_run,
    note_seconds,
    plan_messages,
    runs_natively,
)
from cavs_core.mxnet_compat import autograd, mx

from .analyzer import Grouping, Recording, group, scan
from .check import check_calls
from .report import FlushReport
from .results import Flushed, Heads, LeafName
from .signature import operand_source
from .tables import Leaves, read_calls
from .values import BUFFERS, DEVICES, ROW_SPECS, SPECS, WIDTHS, as_array

__all__ = ["run_calls"]

NDArray = mx.nd.NDArray


def run_calls(calls: Any, reason: str) -> Flushed:
    """Run everything that was recorded."""
    scope = calls.recorder.scope
    stats = scope.stats
    start = time.perf_counter()
    tables = read_calls(calls)
    recording, buffers, leaves = tables.recording, tables.buffers, tables.leaves
    scanned = scan(recording)
    grouping = group(recording, scanned, len(buffers), unbatched=scope.config.policy == "none")
    heads = Heads(recording, scanned, grouping, tables.value_specs)
    layout, plans, names, kinds = _lay_out(calls, recording, scanned, grouping, buffers, heads)
    analyzed = time.perf_counter()
    context = DEVICES[tables.value_specs[0]]
    native, fallback = runs_natively(layout, plans, context, scope.config.backend)
    if fallback:
        stats.fallbacks[fallback] = stats.fallbacks.get(fallback, 0) + 1
    with autograd.pause(train_mode=autograd.is_training()):
        arrays = _bind(plans, names, leaves, context)
        stacking = time.perf_counter()
        fills = _fills(leaves, grouping, recording, buffers, native)
        stats.leaves_ms += (time.perf_counter() - stacking) * 1e3
        run = make_run(native, layout, plans, context, arrays, fills)
        run.forward()
    note_seconds(plans, time.perf_counter() - analyzed)
    flushed = Flushed(run, calls, tables, scanned, grouping, plans, names, heads)
    if scope.config.check:
        check_calls(calls, flushed, tables, scanned)
    stats.flushes += 1
    stats.calls += len(recording.call_class)
    stats.launches += len(grouping.order)
    stats.ops += run.launched
    stats.record_ms += (start - calls.started) * 1e3
    stats.analyze_ms += (analyzed - start) * 1e3
    stats.execute_ms += (time.perf_counter() - analyzed) * 1e3
    titles = [cls.signature.title for cls in calls.classes]
    scope.flushes.append(FlushReport(reason, calls, recording, scanned, grouping, kinds,
                                     "native" if native else "mxnet",
                                     lambda: list(zip(titles, map(kernel_sources, plans)))))
    return flushed


def _lay_out(calls: Any, r: Recording, s: Any, g: Grouping, buffers: list[int], heads: Heads) -> Any:
    """A layout for the executor, a plan for each class, names of shared leaves, and the kinds of all operands."""
    local = {number: k for k, number in enumerate(buffers)}
    active = np.bincount(r.call_class[s.active], minlength=len(r.classes)) > 0
    leaf_names: dict[int, LeafName] = {}
    plans, classes, all_kinds = [], [], []
    for c, rows in enumerate(g.classes):
        signature, info = calls.classes[c].signature, r.classes[c]
        columns = range(*s.column_offsets[c:c + 2])
        kinds = ["S" if k in rows.shared else "G" if s.pending[col] else "L" for k, col in enumerate(columns)]
        wanted = [bool(active[c] and s.wanted[col] and SPECS[signature.operand_specs[k]].is_float)
                  for k, col in enumerate(columns)]
        wanted_params = tuple(bool(active[c]) and p.parameter.grad_req != "null" for p in signature.params)
        flows = bool(active[c]) and info.alias < 0
        plans.append(signature.plan(kinds, wanted, wanted_params, flows, len(rows.offsets) == 2))
        all_kinds.append(kinds)
        reads = {operand_source(k, kinds[k]): Read(local[BUFFERS[signature.operand_specs[k]]], RowIndex(column),
                                                   info.operand_widths[k]) for k, column in rows.columns.items()}
        bounds = rows.offsets.tolist()
        names = {operand_source(k, "S"): leaf_names.setdefault(leaf, LeafName(leaf))
                 for k, leaf in rows.shared.items()}
        writes = [Place(*place) for place in zip(info.output_buffers, rows.bases, info.output_widths)]
        classes.append(ClassLayout(
            Frame(0, bounds[-1]), [Frame(a, b) for a, b in zip(bounds, bounds[1:])], reads, writes, {}, _NO_ROWS,
            names=names))
    messages = _messages(g, plans, classes, heads) if active.any() else []          # none: no backward pass
    layout = Layout(classes, g.order, g.buffer_rows, messages, [ROW_SPECS[number] for number in buffers])
    return layout, plans, leaf_names, all_kinds


_NO_ROWS = RowIndex(np.zeros(0, np.int64))      # recorded calls pull nothing by vertex


def _messages(g: Grouping, plans: list[Any], classes: list[ClassLayout], heads: Heads) -> list[Any]:
    """Who answers whom: readers' messages first, then one for each head."""
    count = len(g.buffer_rows)
    read: list[list[Any]] = [[] for _ in range(count)]
    sent: list[list[Any]] = [[] for _ in range(count)]
    free = [1] * count

    def answer(buffer: int, rows: Any) -> None:
        read[buffer].append(rows)
        sent[buffer].append(free[buffer] + np.arange(len(rows)))
        free[buffer] += len(rows)

    for plan, part in zip(plans, classes):
        for source in plan.grads:
            if source in part.reads:
                place = part.reads[source]
                part.sends[source] = Place(place.buffer, free[place.buffer], place.width)
                answer(place.buffer, place.rows.rows)
    for buffer in range(count):
        answer(buffer, heads.rows(buffer))
    return [plan_messages(g.buffer_rows[b], read[b], sent[b], free[b], g.chunks[b]) for b in range(count)]


# ---- arrays ----------------------------------------------------------------------------------

def _bind(plans: list[Any], leaf_names: dict[int, LeafName], leaves: Leaves, context: Any) -> dict[Any, Any]:
    bound: dict[Any, Any] = {name: leaves.array(leaf, context) for leaf, name in leaf_names.items()}
    for plan in plans:
        for source in plan.inputs.values():
            if hasattr(source, "parameter"):
                bound[source] = source.parameter.data(context)
            elif hasattr(source, "array"):
                bound[source] = source.array
    return bound


def _fills(leaves: Leaves, g: Grouping, r: Recording, buffers: list[int], native: bool) -> list[tuple[int, int, Any]]:
    """The leaves of every buffer, one below the other; numbers stay numpy's for the native backend."""
    fills = []
    placed = np.flatnonzero(g.leaf_rows >= 0)
    for b, number in enumerate(buffers):
        mine = placed[r.leaf_buffers[placed] == b]
        data, numbers = np.split(mine, [np.searchsorted(mine, len(leaves.data))])
        if len(data):
            fills.append((b, 0, _stacked(leaves, data.tolist(), ROW_SPECS[number], native)))
        if len(numbers):
            rows = leaves.numbers[numbers - len(leaves.data)].astype(ROW_SPECS[number].dtype)
            fills.append((b, int(g.leaf_rows[numbers[0]]), rows[:, None] if native else mx.nd.array(
                rows[:, None], ctx=DEVICES[leaves.specs[numbers[0]]], dtype=rows.dtype)))
    return fills


_MANY = 32          # from so many arrays on, the compiled copy is worth its first call


def _stacked(leaves: Leaves, mine: list[int], row: Any, native: bool) -> Any:
    """The rows of leaves, in the order in which the analyzer placed them."""
    context = DEVICES[leaves.specs[mine[0]]]
    values = [leaves.data[k] for k in mine]
    if not any(isinstance(x, NDArray) for x in values):
        flat = np.concatenate([np.ravel(x) for x in values]).astype(row.dtype).reshape((-1, *row.shape))
        return flat if native else mx.nd.array(flat, ctx=context, dtype=row.dtype)
    arrays = [as_array(x, context) for x in values]
    if context.device_type != "cpu" or len(arrays) < _MANY:
        return mx.nd.concat(*[x.reshape((-1, *row.shape)) for x in arrays], dim=0)
    widths = np.array([WIDTHS[s] for s in leaves.specs[mine].tolist()], np.int64)
    target = mx.nd.empty((int(widths.sum()), *row.shape), ctx=context, dtype=row.dtype)
    copy_arrays(arrays, widths * int(np.prod(row.shape)) * np.dtype(row.dtype).itemsize, target)
    return target
