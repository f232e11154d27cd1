"""A flush: recorded calls are analyzed, laid out, run by cavs_core, and put on the tape as one node."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from cavs_core import (
    UNTOUCHED,
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
    copy_arrays,
    needs_gradient,
    plan_messages,
)
from cavs_core.mxnet_compat import autograd, mx

from .analyzer import ClassInfo, Grouping, Recording, group, reached, scan
from .check import check_calls
from .report import FlushReport
from .signature import operand_source
from .values import BUFFERS, DEVICES, ROW_SPECS, SPECS, WIDTHS, as_array

__all__ = ["Flushed", "run_calls"]

NDArray = mx.nd.NDArray


class LeafName:
    """The name of a leaf inside one run; the classes' own sources for it differ."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Flushed:
    """The results of a flush, while somebody may ask for them."""

    def __init__(self, run: Run, grouping: Grouping, specs: list[int], only_names_rows: Any):
        self.run, self.grouping, self.specs, self.only_names_rows = run, grouping, specs, only_names_rows
        self.heads: dict[int, Any] = {}         # value -> NDArray on the tape
        self.bases: dict[int, Any] = {}         # value -> NDArray whose views share its memory

    def row(self, value: int) -> Any:
        """A value, by its number, as an NDArray: a view of its rows."""
        buffer = self.run.buffers[int(self.grouping.value_buffers[value])]
        start, spec = int(self.grouping.value_rows[value]), self.specs[value]
        return buffer._slice(start, start + WIDTHS[spec]).reshape(SPECS[spec].shape)

    def array_of(self, token: int, calls: Any) -> Any:
        if token in self.heads:
            return self.heads[token]
        if token in calls.views:                # shares memory with its base, as in MXNet
            base, make = calls.views[token]
            with autograd.pause(train_mode=autograd.is_training()):
                return make(self.base_of(base, calls))
        value = token - calls.first_token
        row = self.row(value)
        return row.copy() if self.only_names_rows[value] else row      # an operator's result has memory of its own

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
    specs = list(calls.value_spec.values())
    recording, buffers = _recording(calls)
    scanned = scan(recording)
    grouping = group(recording, scanned, len(buffers), unbatched=scope.config.policy == "none")
    layout, plans, names, kinds = _lay_out(calls, recording, scanned, grouping, buffers, specs)
    analyzed = time.perf_counter()
    context = DEVICES[specs[0]]
    with autograd.pause(train_mode=autograd.is_training()):
        arrays = _bind(plans, names, calls, context)
        stacking = time.perf_counter()
        fills = _fills(calls, grouping, recording, buffers)
        stats.leaves_ms += (time.perf_counter() - stacking) * 1e3
        run = Run(layout, plans, MXNetBackend(context), arrays, fills)
        run.forward()
    naming = recording.per_class(lambda c: c.alias >= 0, bool)
    flushed = Flushed(run, grouping, specs, naming[recording.call_class[scanned.maker]])
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
    """The calls as the analyzer reads them, and the buffers of this flush by their process-wide numbers."""
    buffers: dict[int, int] = {}

    def buffer_of(spec: int) -> int:
        return buffers.setdefault(BUFFERS[spec], len(buffers))

    classes = []
    for cls in calls.classes:
        signature = cls.signature
        outputs = signature.output_specs()
        classes.append(ClassInfo(
            tuple(WIDTHS[s] for s in signature.operand_specs), signature.split, tuple(WIDTHS[s] for s in outputs),
            tuple(buffer_of(s) for s in outputs), signature.alias, cls.recorded,
            cls.recorded and any(p.parameter.grad_req != "null" for p in signature.params)))
    num_calls, num_leaves = len(calls.call_class), len(calls.leaves)
    leaf_wanted = np.zeros(num_leaves, bool)
    if any(c.recorded for c in classes):
        leaf_wanted[:] = [isinstance(x, NDArray) and needs_gradient(x) for x in calls.leaves]
    specs, spec_of_leaf = np.unique(np.fromiter(calls.leaf_spec, np.int64, num_leaves), return_inverse=True)
    operands = np.fromiter(itertools.chain.from_iterable(calls.operand_tokens), np.int64)
    operands[operands >= 0] -= calls.first_token
    alive = np.ones(len(calls.value_spec), bool)
    alive[np.array(calls.dropped, np.int64) - calls.first_token] = False
    recording = Recording(
        classes, np.fromiter(calls.call_class, np.int64, num_calls), np.fromiter(calls.call_rows, np.int64, num_calls),
        operands, np.array([buffer_of(s) for s in specs.tolist()], np.int64)[spec_of_leaf],
        np.array([WIDTHS[s] for s in specs.tolist()], np.int64)[spec_of_leaf], leaf_wanted, np.flatnonzero(alive))
    return recording, list(buffers)


def _lay_out(calls: Any, r: Recording, s: Any, g: Grouping, buffers: list[int], specs: list[int]) -> Any:
    """A layout for the executor, a plan for each class, names of shared leaves, and the kinds of all operands."""
    local = {number: k for k, number in enumerate(buffers)}
    active = np.zeros(len(calls.classes), bool)
    np.logical_or.at(active, r.call_class, s.active)
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
    messages = _messages(r, s, g, plans, classes, specs)
    layout = Layout(classes, g.order, g.buffer_rows, messages, [ROW_SPECS[number] for number in buffers])
    return layout, plans, leaf_names, all_kinds


_NO_ROWS = RowIndex(np.zeros(0, np.int64))      # recorded calls pull nothing by vertex


def _messages(r: Recording, s: Any, g: Grouping, plans: list[Any], classes: list[ClassLayout],
              specs: list[int]) -> list[Any]:
    """Who answers whom: readers' messages first, then one for each head."""
    count = len(g.buffer_rows)
    read: list[list[Any]] = [[] for _ in range(count)]
    sent: list[list[Any]] = [[] for _ in range(count)]
    free = [1] * count
    for plan, part in zip(plans, classes):
        for source in plan.grads:
            if source in part.reads:
                place = part.reads[source]
                part.sends[source] = Place(place.buffer, free[place.buffer], place.width)
                read[place.buffer].append(place.rows.rows)
                sent[place.buffer].append(free[place.buffer] + np.arange(len(place.rows.rows)))
                free[place.buffer] += len(place.rows.rows)
    for buffer, mine in enumerate(_heads_by_buffer(_tape_heads(r, s), g)):
        widths = np.array([WIDTHS[specs[t]] for t in mine], np.int64)
        rows = np.repeat(g.value_rows[mine], widths) + _within(widths)
        read[buffer].append(rows)
        sent[buffer].append(free[buffer] + np.arange(len(rows)))
        free[buffer] += len(rows)
    return [plan_messages(g.buffer_rows[b], read[b], sent[b], free[b], g.chunks[b]) for b in range(count)]


def _tape_heads(r: Recording, s: Any) -> Any:
    """Values that somebody holds and through which a gradient may flow."""
    return r.heads[s.active[s.maker[r.heads]]] if len(r.heads) else r.heads


def _heads_by_buffer(heads: Any, g: Grouping) -> list[Any]:
    return [heads[g.value_buffers[heads] == b] if len(heads) else heads for b in range(len(g.buffer_rows))]


def _within(counts: Any) -> Any:
    """0, 1, .. for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


# ---- arrays ----------------------------------------------------------------------------------

def _bind(plans: list[Any], leaf_names: dict[int, LeafName], calls: Any, context: Any) -> dict[Any, Any]:
    bound: dict[Any, Any] = {name: as_array(calls.leaves[leaf], context) for leaf, name in leaf_names.items()}
    for plan in plans:
        for source in plan.inputs.values():
            if hasattr(source, "parameter"):
                bound[source] = source.parameter.data(context)
            elif hasattr(source, "array"):
                bound[source] = source.array
    return bound


def _fills(calls: Any, g: Grouping, r: Recording, buffers: list[int]) -> list[tuple[int, int, Any]]:
    """The leaves of every buffer, one below the other."""
    by_buffer: list[list[int]] = [[] for _ in buffers]
    for leaf in np.flatnonzero(g.leaf_rows >= 0).tolist():
        by_buffer[r.leaf_buffers[leaf]].append(leaf)
    return [(b, 0, _stacked(calls, leaves, ROW_SPECS[buffers[b]])) for b, leaves in enumerate(by_buffer) if leaves]


_MANY = 32          # from so many arrays on, the compiled copy is worth its first call


def _stacked(calls: Any, leaves: list[int], row: Any) -> Any:
    """The rows of leaves, in the order in which the analyzer placed them."""
    context = DEVICES[calls.leaf_spec[leaves[0]]]
    values = [calls.leaves[k] for k in leaves]
    if not any(isinstance(x, NDArray) for x in values):
        flat = np.concatenate([np.ravel(x) for x in values]).astype(row.dtype)
        return mx.nd.array(flat.reshape((-1, *row.shape)), ctx=context, dtype=row.dtype)
    arrays = [as_array(x, context) for x in values]
    if context.device_type != "cpu" or len(arrays) < _MANY:
        return mx.nd.concat(*[x.reshape((-1, *row.shape)) for x in arrays], dim=0)
    widths = np.array([WIDTHS[calls.leaf_spec[k]] for k in leaves], np.int64)
    target = mx.nd.empty((int(widths.sum()), *row.shape), ctx=context, dtype=row.dtype)
    copy_arrays(arrays, widths * int(np.prod(row.shape)) * np.dtype(row.dtype).itemsize, target)
    return target


# ---- the tape --------------------------------------------------------------------------------

def _put_on_tape(flushed: Flushed, calls: Any, r: Recording, s: Any, plans: list[Any],
                 leaf_names: dict[int, LeafName], layout: Layout) -> None:
    """One node: inputs are leaves and parameters that want a gradient, outputs the values that somebody holds."""
    heads = _tape_heads(r, s)
    if not len(heads):
        return
    g, run = flushed.grouping, flushed.run
    # what no head depends on is no input: MXNet would not touch its gradient
    reached_leaves, reached_classes = reached(r, s, heads)
    params = list(dict.fromkeys(source for c, plan in enumerate(plans) if reached_classes[c]
                                for source in plan.grads if hasattr(source, "parameter")))
    leaves = np.flatnonzero(r.leaf_wanted & reached_leaves).tolist()
    inputs = [calls.leaves[k] for k in leaves] + [run.arrays[p] for p in params]
    heads = np.concatenate(_heads_by_buffer(heads, g))          # in the order of their messages
    outputs = [flushed.row(int(t)) for t in heads]
    counts = [len(part) for part in _heads_by_buffer(heads, g)]
    head_rows = [sum(WIDTHS[flushed.specs[v]] for v in part) for part in _heads_by_buffer(heads, g)]
    held = [run]
    stats = calls.recorder.scope.stats

    def backward(output_grads: list[Any], wanted: list[bool], begun: list[bool]) -> list[Any]:
        if not held:
            raise RunError("backward through a batch whose memory was freed by an earlier backward; "
                           "pass retain_graph=True to the earlier one")
        start, before = time.perf_counter(), run.launched
        asked = [leaf_names[k] for k, want in zip(leaves, wanted) if want and k in leaf_names]
        asked += [p for p, want in zip(params, wanted[len(leaves):]) if want]
        incoming, taken = [], 0
        for b, (count, rows) in enumerate(zip(counts, head_rows)):
            if count:
                shape = (-1, *run.buffers[b].shape[1:])
                parts = [grad.reshape(shape) for grad in output_grads[taken:taken + count]]
                joined = mx.nd.concat(*parts, dim=0) if count > 1 else parts[0]
                incoming.append((b, layout.messages[b].num_rows - rows, joined))
                taken += count
        grads = run.backward([], asked, incoming)
        found = [_leaf_grad(run, g, r, grads, leaf_names, k) if want else None for k, want in zip(leaves, wanted)]
        found += [grads.get(p) for p in params]
        if not all(begun):
            found = _only_reached(found, leaves, params, calls, reached(r, s, heads[np.array(begun)]))
        stats.backward_ops += run.launched - before
        stats.backward_ms += (time.perf_counter() - start) * 1e3
        return found

    TapeBridge(inputs, outputs, backward, held.clear)
    flushed.heads = {int(v) + calls.first_token: out for v, out in zip(heads, outputs)}


def _only_reached(grads: list[Any], leaves: list[int], params: list[Any], calls: Any, found: Any) -> list[Any]:
    """Gradients of what the pass did not begin above are left as they are."""
    reached_leaves, reached_classes = found
    used = {p for c in np.flatnonzero(reached_classes) for p in calls.classes[c].signature.params}
    touched = [reached_leaves[k] for k in leaves] + [p in used for p in params]
    return [grad if touch else UNTOUCHED for grad, touch in zip(grads, touched)]


def _leaf_grad(run: Run, g: Grouping, r: Recording, grads: dict[Any, Any], names: dict[int, LeafName],
               leaf: int) -> Any:
    """The gradient of a leaf: as a shared operand, and as a row that somebody read."""
    shared = grads.get(names[leaf]) if leaf in names else None
    row = int(g.leaf_rows[leaf])
    if row < 0:
        return shared
    pulled = run.pulled(int(r.leaf_buffers[leaf]), row, row + int(r.leaf_widths[leaf]))
    return run.total(shared if shared is None else shared.reshape(pulled.shape), pulled)
