"""A flush: recorded calls are analyzed, laid out, run by cavs_core, and put on the tape as one node."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cavs_core import (
    ClassLayout,
    Frame,
    Layout,
    LazyArray,
    MXNetBackend,
    Place,
    Read,
    RowIndex,
    Run,
    RunError,
    TapeBridge,
    become_array,
    needs_gradient,
    plan_messages,
)
from cavs_core.mxnet_compat import autograd, mx

from .analyzer import Grouping, Recording, group, scan
from .check import check_calls
from .report import FlushReport
from .signature import operand_source
from .values import DEVICES, SPECS

__all__ = ["Flushed", "run_calls"]

NDArray = mx.nd.NDArray


class LeafName:
    """The name of a leaf inside one run; the classes' own sources for it differ."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Flushed:
    """The results of a flush, while somebody may ask for them."""

    def __init__(self, run: Run, grouping: Grouping):
        self.run, self.grouping = run, grouping
        self.heads: dict[int, Any] = {}         # value -> NDArray on the tape
        self.bases: dict[int, Any] = {}         # value -> NDArray whose views share its memory

    def row(self, token: int) -> Any:
        """The value as an NDArray: a view of its row."""
        grouping = self.grouping
        return self.run.buffers[int(grouping.value_buffers[token])]._at(int(grouping.value_rows[token]))

    def array_of(self, token: int, calls: Any) -> Any:
        if token in self.heads:
            return self.heads[token]
        if token in calls.views:                # shares memory with its base, as in MXNet
            base, make = calls.views[token]
            with autograd.pause(train_mode=autograd.is_training()):
                return make(self.base_of(base, calls))
        return self.row(token)

    def base_of(self, token: int, calls: Any) -> Any:
        if token not in self.bases:
            self.bases[token] = self.array_of(token, calls)
        return self.bases[token]

    def materialise(self, array: LazyArray, calls: Any) -> Any:
        """Let a LazyArray become an NDArray; its handle."""
        token = array.token
        if token in self.bases:                 # somebody has a view of it: another handle on the same memory
            made = self.bases[token].reshape(self.bases[token].shape)
        else:
            made = self.array_of(token, calls)
            if token in calls.viewed:
                self.bases[token] = made
                made = made.reshape(made.shape)
        self.heads.pop(token, None)
        return become_array(array, made)


def run_calls(calls: Any, reason: str) -> Flushed:
    """Run everything that was recorded."""
    scope = calls.recorder.scope
    stats = scope.stats
    start = time.perf_counter()
    recording, buffer_specs = _recording(calls)
    scanned = scan(recording)
    grouping = group(recording, scanned, len(buffer_specs), unbatched=scope.config.policy == "none")
    layout, plans, names, kinds = _lay_out(calls, recording, scanned, grouping, buffer_specs)
    analyzed = time.perf_counter()
    context = DEVICES[buffer_specs[0]]
    with autograd.pause(train_mode=autograd.is_training()):
        arrays = _bind(plans, names, calls, context)
        run = Run(layout, plans, MXNetBackend(context), arrays, _fills(calls, grouping, buffer_specs))
        run.forward()
    flushed = Flushed(run, grouping)
    if scope.config.check:
        check_calls(calls, flushed, recording, scanned)
    _put_on_tape(flushed, calls, recording, scanned, plans, names, layout)
    stats.flushes += 1
    stats.calls += len(calls.call_class)
    stats.launches += len(grouping.order)
    stats.ops += run.launched
    stats.record_ms += (start - calls.started) * 1e3
    stats.analyze_ms += (analyzed - start) * 1e3
    stats.execute_ms += (time.perf_counter() - analyzed) * 1e3
    scope.flushes.append(FlushReport(reason, calls, recording, scanned, grouping, kinds))
    return flushed


# ---- calls as arrays -------------------------------------------------------------------------

def _recording(calls: Any) -> tuple[Recording, list[int]]:
    """The calls as the analyzer reads them, and the spec of each buffer."""
    classes = calls.classes
    buffers: dict[int, int] = {}

    def buffer_of(spec: int) -> int:
        return buffers.setdefault(spec, len(buffers))

    outputs = [[buffer_of(s) for s in c.signature.output_specs] for c in classes]
    leaf_buffers = np.array([buffer_of(s) for s in calls.leaf_spec], np.int64)
    recorded = np.array([c.recorded for c in classes], bool)
    owns_wanted = np.array([c.recorded and any(p.parameter.grad_req != "null" for p in c.signature.params)
                            for c in classes], bool)
    leaf_wanted = np.zeros(len(calls.leaves), bool)
    if recorded.any():
        leaf_wanted[:] = [isinstance(x, NDArray) and needs_gradient(x) for x in calls.leaves]
    alive = np.ones(len(calls.value_spec), bool)
    alive[calls.dropped] = False
    recording = Recording(
        np.array(calls.call_class, np.int64), np.array(calls.operands, np.int64),
        np.array([len(c.signature.operand_specs) for c in classes], np.int64),
        np.array([len(c.signature.output_specs) for c in classes], np.int64),
        outputs, recorded, owns_wanted, leaf_buffers, leaf_wanted, np.flatnonzero(alive))
    return recording, list(buffers)


def _lay_out(calls: Any, r: Recording, s: Any, g: Grouping, buffer_specs: list[int]) -> Any:
    """A layout for the executor, a plan for each class, names of shared leaves, and the kinds of all operands."""
    plans, classes, names, all_kinds = [], [], [], []
    buffer_of = {spec: b for b, spec in enumerate(buffer_specs)}
    active = np.zeros(len(calls.classes), bool)
    np.logical_or.at(active, r.call_class, s.active)
    for c, rows in enumerate(g.classes):
        signature = calls.classes[c].signature
        columns = range(*s.column_offsets[c:c + 2])
        kinds = ["S" if k in rows.shared else "G" if s.pending[col] else "L" for k, col in enumerate(columns)]
        wanted = [bool(active[c] and s.wanted[col] and SPECS[signature.operand_specs[k]].is_float)
                  for k, col in enumerate(columns)]
        wanted_params = tuple(bool(active[c]) and p.parameter.grad_req != "null" for p in signature.params)
        plan = signature.plan(kinds, wanted, wanted_params, bool(active[c]), len(rows.offsets) == 2)
        reads = {operand_source(k, kinds[k]): Read(buffer_of[signature.operand_specs[k]], RowIndex(column))
                 for k, column in rows.columns.items()}
        bounds = rows.offsets.tolist()
        launches = [Frame(a, b) for a, b in zip(bounds, bounds[1:])]
        writes = [Place(b, base) for b, base in zip(r.output_buffers[c], rows.bases)]
        names.append({operand_source(k, "S"): leaf for k, leaf in rows.shared.items()})
        plans.append(plan)
        all_kinds.append(kinds)
        classes.append(ClassLayout(Frame(0, bounds[-1]), launches, reads, writes, {}, RowIndex(np.zeros(0, np.int64))))
    messages = _messages(r, s, g, plans, classes)
    leaf_names: dict[int, LeafName] = {}
    aliases = [{source: leaf_names.setdefault(leaf, LeafName(leaf)) for source, leaf in part.items()} for part in names]
    classes = [ClassLayout(c.whole, c.launches, c.reads, c.writes, c.sends, c.external, names=part)
               for c, part in zip(classes, aliases)]
    return Layout(classes, g.order, g.buffer_rows, messages), plans, leaf_names, all_kinds


def _messages(r: Recording, s: Any, g: Grouping, plans: list[Any], classes: list[ClassLayout]) -> list[Any]:
    """Who answers whom: readers' messages first, then one for each head."""
    count = len(g.buffer_rows)
    read: list[list[Any]] = [[] for _ in range(count)]
    sent: list[list[Any]] = [[] for _ in range(count)]
    free = [1] * count
    for plan, part in zip(plans, classes):
        for source in plan.grads:
            if source in part.reads:
                place = part.reads[source]
                part.sends[source] = Place(place.buffer, free[place.buffer])
                read[place.buffer].append(place.rows.rows)
                sent[place.buffer].append(free[place.buffer] + np.arange(len(place.rows.rows)))
                free[place.buffer] += len(place.rows.rows)
    heads = _tape_heads(r, s)
    for buffer in range(count):
        mine = heads[g.value_buffers[heads] == buffer] if len(heads) else heads
        read[buffer].append(g.value_rows[mine])
        sent[buffer].append(free[buffer] + np.arange(len(mine)))
        free[buffer] += len(mine)
    return [plan_messages(g.buffer_rows[b], read[b], sent[b], free[b], g.chunks[b]) for b in range(count)]


def _tape_heads(r: Recording, s: Any) -> Any:
    """Values that somebody holds and through which a gradient may flow."""
    if not len(r.heads):
        return r.heads
    maker = np.repeat(np.arange(len(r.call_class)), r.num_outputs[r.call_class])
    return r.heads[s.active[maker[r.heads]]]


# ---- arrays ----------------------------------------------------------------------------------

def _bind(plans: list[Any], leaf_names: dict[int, LeafName], calls: Any, context: Any) -> dict[Any, Any]:
    bound: dict[Any, Any] = {name: _as_array(calls.leaves[leaf], context) for leaf, name in leaf_names.items()}
    for plan in plans:
        for source in plan.inputs.values():
            if hasattr(source, "parameter"):
                bound[source] = source.parameter.data(context)
            elif hasattr(source, "array"):
                bound[source] = source.array
    return bound


def _as_array(leaf: Any, context: Any) -> Any:
    if isinstance(leaf, NDArray):
        return leaf
    return mx.nd.array(np.reshape(leaf, np.shape(leaf) or (1,)), ctx=context, dtype="float32")


def _fills(calls: Any, g: Grouping, buffer_specs: list[int]) -> list[tuple[int, int, Any]]:
    """The leaves of every buffer, stacked."""
    fills = []
    buffer_of = {spec: b for b, spec in enumerate(buffer_specs)}
    rows: list[list[Any]] = [[None] * n for n in g.leaf_counts]
    for leaf, row in enumerate(g.leaf_rows.tolist()):
        if row >= 0:
            rows[buffer_of[calls.leaf_spec[leaf]]][row] = calls.leaves[leaf]
    for b, leaves in enumerate(rows):
        if leaves:
            fills.append((b, 0, _stacked(leaves, SPECS[buffer_specs[b]], DEVICES[buffer_specs[b]])))
    return fills


def _stacked(leaves: list[Any], spec: Any, context: Any) -> Any:
    data = [x for x in leaves if not isinstance(x, NDArray)]
    if len(data) == len(leaves):
        values = np.array(leaves, dtype=spec.dtype).reshape((len(leaves), *spec.shape))
        return mx.nd.array(values, ctx=context, dtype=spec.dtype)
    return mx.nd.stack(*[_as_array(x, context) for x in leaves], axis=0)


# ---- the tape --------------------------------------------------------------------------------

def _put_on_tape(flushed: Flushed, calls: Any, r: Recording, s: Any, plans: list[Any],
                 leaf_names: dict[int, LeafName], layout: Layout) -> None:
    """One node: inputs are leaves and parameters that want a gradient, outputs the values that somebody holds."""
    heads = _tape_heads(r, s)
    if not len(heads):
        return
    g, run = flushed.grouping, flushed.run
    params = list(dict.fromkeys(source for plan in plans for source in plan.grads if hasattr(source, "parameter")))
    leaves = [k for k in np.flatnonzero(r.leaf_wanted).tolist()]
    inputs = [calls.leaves[k] for k in leaves] + [run.arrays[p] for p in params]
    outputs = [flushed.row(int(t)) for t in heads]
    starts = []
    for b, messages in enumerate(layout.messages):
        mine = np.flatnonzero(g.value_buffers[heads] == b)
        starts.append((messages.num_rows - len(mine), mine.tolist()))
    held = [run]
    stats = calls.recorder.scope.stats

    def backward(output_grads: list[Any], wanted: list[bool]) -> list[Any]:
        if not held:
            raise RunError("backward through a batch whose memory was freed by an earlier backward; "
                           "pass retain_graph=True to the earlier one")
        start, before = time.perf_counter(), run.launched
        asked = [leaf_names[k] for k, want in zip(leaves, wanted) if want and k in leaf_names]
        asked += [p for p, want in zip(params, wanted[len(leaves):]) if want]
        incoming = [(b, first, mx.nd.stack(*[output_grads[i] for i in mine], axis=0))
                    for b, (first, mine) in enumerate(starts) if mine]
        grads = run.backward([], asked, incoming)
        found = [_leaf_grad(run, g, r, grads, leaf_names, k) if want else None for k, want in zip(leaves, wanted)]
        found += [grads.get(p) for p in params]
        stats.backward_ops += run.launched - before
        stats.backward_ms += (time.perf_counter() - start) * 1e3
        return found

    TapeBridge(inputs, outputs, backward, held.clear)
    flushed.heads = {int(t): out for t, out in zip(heads, outputs)}


def _leaf_grad(run: Run, g: Grouping, r: Recording, grads: dict[Any, Any], names: dict[int, LeafName],
               leaf: int) -> Any:
    """The gradient of a leaf: as a shared operand, and as a row that somebody read."""
    shared = grads.get(names[leaf]) if leaf in names else None
    row = int(g.leaf_rows[leaf])
    if row < 0:
        return shared
    pulled = run.pulled(int(r.leaf_buffers[leaf]), row, row + 1)
    pulled = pulled.reshape(pulled.shape[1:])
    return run.total(shared, pulled)
