"""A flush: recorded calls are analyzed, laid out, and run by cavs_core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import (
    are_ready,
    copy_arrays,
    have_run,
    kernel_sources,
    make_run,
    note_seconds,
    runs_in_the_end,
    runs_natively,
    view_of_data,
)
from cavs_core.mxnet_compat import mx

from .check import check_calls
from .choose import choose_method, without_repeats
from .costs.devices import place_of
from .costs.weigh import cost_model, predict_ms
from .logs import take_log
from .merging import with_members
from .methods import Method
from .planning import Fill, plan_flush
from .report import FlushReport
from .results import Flushed, LeafName
from .tables import Leaves, recorded_bytes
from .values import DEVICES, ROW_SPECS, WIDTHS, as_array

__all__ = ["run_calls"]

NDArray = mx.nd.NDArray


def run_calls(calls: Any, reason: str) -> Flushed:
    """Run everything that was recorded."""
    scope = calls.recorder.scope
    stats = scope.stats
    start = time.perf_counter()
    log = take_log(calls)
    context = log.classes[0].signature.context
    later = place_of(runs_in_the_end(context, scope.config.backend), context)
    # On other devices a row more in a launch costs next to nothing.
    drops = (scope.config.drop_repeats and context.device_type == "cpu"
             and Method(scope.config.policy, scope.config.granularity).drops_repeats)
    # Policy "none" is there to see what every call by itself costs.
    runs = with_members(log, drops, stats) if scope.config.policy != "none" else log.recorded()
    tables = without_repeats(runs) if drops else runs
    sample = choose_method(scope.config, log.classes, tables, runs, later)
    if not sample.method.drops_repeats:         # (what auto tries)
        tables = runs
    planned, sample.known = plan_flush(tables, sample.method, later)
    leaves = tables.leaves
    layout, plans, grouping = planned.layout, planned.plans, planned.grouping
    analyzed = time.perf_counter()
    native, fallback = runs_natively(layout, plans, context, scope.config.backend)
    if fallback:
        stats.fallbacks[fallback] = stats.fallbacks.get(fallback, 0) + 1
    backend = "native" if native else "mxnet"
    place = place_of(backend, context)
    device = cost_model(place).device
    if device not in planned.predicted:
        planned.predicted[device] = predict_ms(plans, layout, place)
    forward_ms, backward_ms = planned.predicted[device]
    ready = are_ready(plans, layout) if native else have_run(plans, layout)
    sample.counts = ready and (place == later or bool(fallback))        # else MXNet runs it until it is compiled
    arrays = _bind(plans, planned.names, leaves, context)
    stacking = time.perf_counter()
    fills = _fills(leaves, planned.fills, tables.buffers, native)
    stats.leaves_ms += (time.perf_counter() - stacking) * 1e3
    run = make_run(native, layout, plans, context, arrays, fills)
    # (Not the tables, which would be a ring.)
    of_run, extra = run.estimate(), recorded_bytes(len(log.words), log.known.num_values) + tables.num_bytes
    extra += runs.num_bytes if runs is not tables else 0
    stats.estimates.append(lambda: of_run() + extra + planned.num_bytes)
    sample.calls, checked = log.known.num_calls, (log.recorded(), log.entries) if scope.config.check else ()
    del log                                 # a long one takes as much memory as its tables
    run.forward()
    finished = time.perf_counter()
    note_seconds(plans, finished - analyzed)

    def note_backward(ms: float) -> None:
        sample.ms += ms
        stats.predicted_backward_ms += cost_model(place).corrected("backward", backward_ms)
        if ready:
            cost_model(place).observe("backward", backward_ms, ms)

    flushed = Flushed(run, calls, tables, planned, note_backward)
    if checked:
        check_calls(flushed, *checked)
    sample.analyze_ms = (analyzed - start) * 1e3
    sample.ms += (finished - start) * 1e3
    stats.flushes += 1
    stats.calls += sample.calls
    stats.repeats += tables.structure.num_repeats
    stats.launches += len(grouping.order)
    stats.ops += run.launched
    stats.record_ms += (start - calls.started) * 1e3
    stats.analyze_ms += sample.analyze_ms
    stats.execute_ms += (finished - analyzed) * 1e3
    stats.predicted_execute_ms += cost_model(place).corrected("forward", forward_ms)
    stats.cache_hits += sample.known
    stats.cache_misses += not sample.known
    stats.methods[str(sample.method)] = stats.methods.get(str(sample.method), 0) + 1
    if ready:
        cost_model(place).observe("forward", forward_ms, (finished - analyzed) * 1e3)
    stats.joined += planned.joined
    titles = [cls.signature.title for cls in planned.classes]
    scope.flushes.append(FlushReport(reason, planned.classes, tables.recording, planned.scan, grouping, planned.kinds,
                                     backend, lambda: list(zip(titles, map(kernel_sources, plans))),
                                     str(sample.method)))
    return flushed


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


def _fills(leaves: Leaves, wanted: Sequence[Fill], buffers: list[int], native: bool) -> list[tuple[int, int, Any]]:
    """The leaves of every buffer, one below the other; numbers stay numpy's for the native backend."""
    fills = []
    for b, data, numbers, first in wanted:
        row = ROW_SPECS[buffers[b]]
        if data:
            fills.append((b, 0, _stacked(leaves, data, row, native)))
        if len(numbers):
            rows = leaves.numbers[numbers].astype(row.dtype)[:, None]
            fills.append((b, first, rows if native else mx.nd.array(
                rows, ctx=DEVICES[leaves.specs[len(leaves.data) + numbers[0]]], dtype=rows.dtype)))
    return fills


_MANY = 8           # from so many arrays on, the compiled copy is worth its first call


def _stacked(leaves: Leaves, mine: list[int], row: Any, native: bool) -> Any:
    """The rows of leaves, in the order in which the analyzer placed them."""
    context = DEVICES[leaves.specs[mine[0]]]
    values = [leaves.data[k] for k in mine]
    if not any(isinstance(x, NDArray) for x in values):
        flat = np.concatenate([np.ravel(x) for x in values]).astype(row.dtype).reshape((-1, *row.shape))
        return flat if native else mx.nd.array(flat, ctx=context, dtype=row.dtype)
    arrays = [as_array(x, context) for x in values]
    if native and len(arrays) < _MANY:
        return np.concatenate([_elements(x) for x in arrays]).reshape((-1, *row.shape))
    if context.device_type != "cpu" or len(arrays) < _MANY:
        return mx.nd.concat(*[x.reshape((-1, *row.shape)) for x in arrays], dim=0)
    widths = np.array([WIDTHS[s] for s in leaves.specs[mine].tolist()], np.int64)
    target = mx.nd.empty((int(widths.sum()), *row.shape), ctx=context, dtype=row.dtype)
    copy_arrays(arrays, widths * int(np.prod(row.shape)) * np.dtype(row.dtype).itemsize, target)
    return target


def _elements(array: Any) -> Any:
    """The elements of an NDArray on the CPU, once they are there."""
    return view_of_data(array).ravel()
