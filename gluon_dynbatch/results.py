"""What a flush leaves behind: values for whoever asks, and gradients for whoever calls backward.

A backward pass that begins at results nobody has turned into arrays yet runs at once, without the tape: gradients go
straight into the memory of the parameters, and on over the tape only where an operand was computed on it. A result
that becomes an array does so together with all others of its flush: they are the outputs of one node on the tape.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cavs_core import (
    UNTOUCHED,
    Begun,
    LazyArray,
    RunError,
    TapeBridge,
    as_arrays_like,
    become_array,
    begins_everywhere,
    is_sparse,
    on_tape,
    subset_of,
    target_of,
    write_gradient,
)
from cavs_core.mxnet_compat import autograd, mx

from .fastpath import FIRST
from .reach import Reached, reached
from .values import SPECS, WIDTHS

__all__ = ["Flushed", "LeafName"]

NDArray = mx.nd.NDArray


class LeafName:
    """The name of a leaf inside one run; the classes' own sources for it differ."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Flushed:
    """The results of a flush, while somebody may ask for them.

    Parameters
    ----------
    run : the run, whose forward pass is done
    calls : what was recorded
    tables : the same as arrays
    planned : Planned
    note_backward : called with the milliseconds of each backward pass

    Values are numbered as in the tables.
    """

    def __init__(self, run: Any, calls: Any, tables: Any, planned: Any, note_backward: Callable[[float], None]):
        self.run, self.r, self.s, self.g = run, tables.recording, planned.scan, planned.grouping
        # (Not the calls themselves: they hold this object, and a ring would keep its memory until the collector comes.)
        self.stats, self._value_of = calls.recorder.scope.stats, tables.value_of
        self.views, self.viewed = calls.views, calls.viewed
        if tables.value_of is not None:
            number = tables.value_of.tolist() if self.viewed else []
            taken = len(number)                     # (another thread may record more)
            self.viewed = {number[v] for v in list(self.viewed) if v < taken}
            self.views = {number[v]: (number[base], make) for v, (base, make) in list(self.views.items()) if v < taken}
        self.plans, self.leaf_names, self.heads = planned.plans, planned.names, planned.heads
        self.layout, self.classes = planned.layout, planned.classes
        self._note_backward = note_backward
        self.specs, self.leaves = tables.value_specs, tables.leaves
        self.taped: dict[int, Any] | None = None    # value -> NDArray on the tape, once they are there
        self.bases: dict[int, Any] = {}             # value -> NDArray whose views share its memory
        self.freed = False
        self.check: Any = None                      # GradientCheck, if passes are to be compared
        self._passed: Any = None                    # the last pass, while it is to be compared
        self._part: Any = None                      # the run of the last pass that only part of the flush took part in
        # Whether somebody holds a value that stands where another one stands.
        self._shares_rows = bool(self.r.facts.alias[self.r.call_class[self.s.maker[self.r.heads]]].any())
        self._numbers: dict[int, Any] = {}          # value -> numpy array, of those that nobody has read yet
        self._taken: set[int] = set()               # specs that these are of

    # ---- values ------------------------------------------------------------------------------

    def number(self, recorded: int) -> int:
        """The number of a recorded value; -1 if it was only made on the way to others."""
        return recorded if self._value_of is None else int(self._value_of[recorded])

    def numbers(self, tokens: Sequence[int]) -> Any:
        """The numbers of values by their tokens: int64 array."""
        recorded = np.array(tokens, np.int64) - FIRST
        return recorded if self._value_of is None else self._value_of[recorded]

    def has(self, value: int) -> bool:
        """Whether a value is in a buffer; not where it was only made on the way to others."""
        return value >= 0

    def row(self, value: int) -> Any:
        """A value, by its number, as an NDArray."""
        start, spec = int(self.g.value_rows[value]), self.specs[value]
        return self.run.array(int(self.g.value_buffers[value]), start, start + WIDTHS[spec], SPECS[spec].shape)

    def numpy(self, value: int) -> Any:
        """A value as a numpy array; None if it shares memory with others, so that it must become an NDArray."""
        if self.taped or value in self.bases or value in self.views or value in self.viewed:
            return None
        taken = self._numbers.pop(value, None)
        if taken is not None:
            return taken
        start, spec = int(self.g.value_rows[value]), self.specs[value]
        buffer, shape = int(self.g.value_buffers[value]), SPECS[spec].shape
        if shape == (1,) and spec not in self._taken and len(self.r.heads) > 1:
            self._taken.add(spec)               # a loss, as a rule: all of them are read, one by one
            mine = self.r.heads[self.specs[self.r.heads] == spec]
            self._numbers.update(zip(mine.tolist(), self.run.numpy_rows(buffer, self.g.value_rows[mine])))
            return self.numpy(value)
        return self.run.numpy(buffer, start, start + WIDTHS[spec]).reshape(shape)

    def array_of(self, value: int) -> Any:
        if self.taped is None:
            self.taped = self._put_on_tape()
        if value in self.taped:
            return self.taped[value]
        if value in self.views:          # shares memory with its base, as in MXNet
            base, make = self.views[value]
            with autograd.pause(train_mode=autograd.is_training()):
                return make(self.base_of(base))
        row = self.row(value)
        return row.copy() if self._shares_rows else row     # an operator's result has memory of its own

    def base_of(self, value: int) -> Any:
        if value not in self.bases:
            self.bases[value] = self.array_of(value)
        return self.bases[value]

    def materialise(self, array: LazyArray) -> Any:
        """Let a LazyArray become an NDArray; its handle."""
        value = self.number(array.token - FIRST)
        if value in self.bases:                # somebody has a view of it: another handle on the same memory
            made = self.bases[value].reshape(self.bases[value].shape)
        else:
            made = self.array_of(value)
            if value in self.viewed:
                self.bases[value] = made
                made = made.reshape(made.shape)
        if self.taped:
            self.taped.pop(value, None)
        return become_array(array, made)

    # ---- backward ----------------------------------------------------------------------------

    def backward(self, values: Any, head_grads: Sequence[Any], retain_graph: bool,
                 over_tape: Callable[[list[Any], list[Any], bool, bool], None]) -> bool:
        """A pass that begins at results of this flush alone; False if it must go over the tape.

        Parameters
        ----------
        values : int64 array
        head_grads : a numpy array for each, or None for ones
        retain_graph : whether another pass may follow
        over_tape : called with arrays that are on the tape, their gradients, whether the tape must stay, and whether
            the pass may end there
        """
        if not self.s.active[self.s.maker[values]].all():
            return False
        # The results may be the losses of many samples, each with a pass of its own: all of them end what is kept.
        last = not retain_graph and len(set(values.tolist())) == len(self.heads.values)
        found = self._reached(values)
        leaves, params = self._wanted(found)
        variables = self._variables(leaves, params)
        # (An array that an operator on the tape has read looks like one on the tape from afar.)
        leaves = [k for k in leaves if k not in variables
                  and (self.leaves.data[k].grad is not None or on_tape(self.leaves.data[k]))]
        order = np.argsort(self.heads.values)
        begun = order[np.searchsorted(self.heads.values[order], values)]
        names = [*leaves, *variables]
        targets = {} if leaves or self.check else self._targets(variables)
        grads = dict(zip(names, self._gradients(found, begun, head_grads, names, targets)))
        self._compare_passed()
        if leaves:
            for data, _ in variables.values():
                data._fresh_grad = False        # to see which ones the pass over the tape reaches
            arrays = [self.leaves.data[k] for k in leaves]
            over_tape(arrays, as_arrays_like([grads[k] for k in leaves], arrays), not last, bool(variables))
            mx.nd.waitall()                     # nobody may still be using what is written now
        written = set()
        for name, (data, parameter) in variables.items():
            write_gradient(data, parameter, grads[name],
                           add=id(data) in written or (bool(leaves) and data._fresh_grad))
            written.add(id(data))
        for data, _ in variables.values():
            data._fresh_grad = True
        if last:
            self.free()
        return True

    def _variables(self, leaves: Sequence[int], params: Sequence[Any]) -> dict[Any, tuple[Any, Any]]:
        """What takes its gradient from us, not from the tape: leaf or source -> array and parameter."""
        found = {k: (self.leaves.data[k], self.leaves.parameters[k]) for k in leaves if k in self.leaves.parameters}
        found.update({p: (self.run.arrays[p], p.parameter) for p in params})
        return {name: pair for name, pair in found.items() if pair[1].grad_req != "null"}

    def _targets(self, variables: dict[Any, tuple[Any, Any]]) -> dict[Any, Any]:
        """The memory of gradients that the run may write by itself: dense ones that come from one side only."""
        mx.nd.waitall()                         # nobody may still be reading what is written now
        count = Counter([id(data) for data, _ in variables.values()])
        return {self._name(name): target_of(data, parameter) for name, (data, parameter) in variables.items()
                if count[id(data)] == 1 and not is_sparse(parameter) and not self._has_rows(name)}

    def _name(self, variable: Any) -> Any:
        """A leaf's name in the run, where all calls of a class share it; a source is its own."""
        return self.leaf_names.get(variable) if isinstance(variable, int) else variable

    def _has_rows(self, variable: Any) -> bool:
        return isinstance(variable, int) and int(self.g.leaf_rows[variable]) >= 0

    def free(self) -> None:
        """Forget what only another backward pass would need."""
        self.freed, self._part = True, None
        self.run.free()

    def _reached(self, values: Any) -> Reached:
        return reached(self.r, self.s, values, [cls.signature for cls in self.classes])

    def _wanted(self, found: Reached) -> tuple[list[int], list[Any]]:
        """The leaves and parameters that ask for a gradient, among those that a pass touches."""
        params = dict.fromkeys(p for cls, touched in zip(self.classes, found.params)
                               for p, is_touched in zip(cls.signature.params, touched) if is_touched)
        return (np.flatnonzero(self.r.leaf_wanted & found.leaves).tolist(),
                [p for p in params if p.parameter.grad_req != "null"])

    def _touched(self, found: Reached) -> set[Any]:
        """The same, both in one."""
        leaves, params = self._wanted(found)
        return {*leaves, *params}

    def _gradients(self, found: Reached, begun: Any, head_grads: Sequence[Any], variables: Sequence[Any],
                   targets: dict[Any, Any]) -> list[Any]:
        """Gradients of leaves and parameters, where the pass begins at the heads of numbers `begun`."""
        if self.freed:
            raise RunError("backward through a batch whose memory was freed by an earlier backward; "
                           "pass retain_graph=True to the earlier one")
        stats, heads, start = self.stats, self.heads, time.perf_counter()
        run, number, firsts = self.run, None, []
        if not begins_everywhere(self.plans, found.patterns):
            part = self._subset(found, begun, variables)
            run, number, firsts = self.run.subset(part), part.number, part.heads
            self._part = run                    # (the rows of sparse gradients stand in its memory)
        before, messages = self.run.launched, []
        for k, b in enumerate(heads.in_buffers):
            buffer = self.run.buffers[b]
            rows = heads.messages(b, tuple(buffer.shape[1:]), buffer.dtype, begun, head_grads)
            if number is None:
                messages.append((b, run.layout.messages[b].num_rows - len(rows), rows))
            elif len(heads.places(b, begun)):
                messages.append((b, firsts[k], rows[heads.places(b, begun)]))
        names = {v: self._name(v) for v in variables}
        sparse = [names[v] for v in variables if self._is_sparse(v)]
        grads = run.backward([], [n for n in names.values() if n is not None], messages, targets, sparse)
        made = [self._leaf_grad(run, number, grads, v) if isinstance(v, int) else grads.get(v) for v in variables]
        stats.backward_ops += run.launched - before
        took = (time.perf_counter() - start) * 1e3
        stats.backward_ms += took
        self._note_backward(took)
        if self.check:
            self._passed = run, number, found, begun, head_grads, dict(zip(variables, made))
        return made

    def _compare_passed(self) -> None:
        """check=True: compare the last pass with one call by call."""
        if self._passed is None:
            return
        run, number, found, begun, head_grads, made = self._passed
        self._passed = None
        numbers = np.arange(len(self.specs)) if self._value_of is None else self._value_of
        shapes = [SPECS[self.specs[v]].shape for v in self.heads.values[begun].tolist()]
        heads = {int(np.argmax(numbers == v)): np.ones(shape) if grad is None else grad
                 for v, grad, shape in zip(self.heads.values[begun].tolist(), head_grads, shapes)}
        count = np.bincount(numbers[numbers >= 0], minlength=len(self.specs))

        def ours(recorded: int) -> Any:
            v = int(numbers[recorded])
            maker = self.s.maker[v]
            cls = self.classes[self.r.call_class[maker]]
            if (v < 0 or count[v] > 1 or not self.s.active[maker] or cls.signature.alias >= 0 or cls.num_parts > 1
                    or cls.signature.looks_up):
                return None     # (it is that of others, or of all calls or rows that repeat one, or inside a program)
            buffer, row, width = int(self.g.value_buffers[v]), int(self.g.value_rows[v]), WIDTHS[self.specs[v]]
            row = row if number is None else int(number[buffer][row])
            return None if row < 0 else run.pulled(buffer, row, row + width)

        leaves, params = self._wanted(found)
        self.check.compare(heads, ours, {v: made.get(v, UNTOUCHED) for v in leaves},
                           {p.parameter: made.get(p, UNTOUCHED) for p in params if not self._is_sparse(p)})

    def _subset(self, found: Reached, begun: Any, variables: Sequence[Any]) -> Any:
        """The part of the flush that takes part in a pass."""
        patterns, which = [], []
        for c, rows in enumerate(self.g.classes):
            mine = [k for k, (of_class, _) in enumerate(found.patterns) if of_class == c]
            place = np.full(len(found.patterns) + 1, -1)        # (the last one is that of -1)
            place[mine] = np.arange(len(mine))
            patterns.append([found.patterns[k][1] for k in mine])
            which.append(np.repeat(place[found.pattern_of[rows.calls]], self.r.call_width[rows.calls]))
        heads = [(b, self.heads.rows(b)[self.heads.places(b, begun)]) for b in self.heads.in_buffers]
        leaves = [(int(self.r.leaf_buffers[v]), int(self.g.leaf_rows[v]), int(self.r.leaf_widths[v]))
                  for v in variables if isinstance(v, int)]
        return subset_of(self.layout, self.plans, [Begun(*pair) for pair in zip(patterns, which)], heads,
                         [(b, np.arange(row, row + width)) for b, row, width in leaves if row >= 0])

    def _is_sparse(self, variable: Any) -> bool:
        parameter = self.leaves.parameters.get(variable) if isinstance(variable, int) else variable.parameter
        return parameter is not None and is_sparse(parameter)

    def _leaf_grad(self, run: Any, number: Any, grads: dict[Any, Any], leaf: int) -> Any:
        """The gradient of a leaf: as a shared operand, and as rows that somebody read; `number` says which rows of a
        part these are."""
        shared = grads.get(self.leaf_names[leaf]) if leaf in self.leaf_names else None
        row, buffer = int(self.g.leaf_rows[leaf]), int(self.r.leaf_buffers[leaf])
        if row < 0:
            return shared
        if number is not None:
            row = int(number[buffer][row])
        pulled = run.pulled(buffer, row, row + int(self.r.leaf_widths[leaf]))
        return run.total(shared if shared is None else shared.reshape(pulled.shape), pulled)

    # ---- the tape ----------------------------------------------------------------------------

    def _put_on_tape(self) -> dict[int, Any]:
        """One node: inputs are leaves and parameters that want a gradient, outputs the values that somebody holds."""
        heads = self.heads
        if not len(heads.values):
            return {}
        # what no head depends on is no input: MXNet would not touch its gradient
        leaves, params = self._wanted(self._reached(heads.values))
        dense = [v for v in (*leaves, *params) if not self._is_sparse(v)]
        sparse = self._variables([k for k in leaves if self._is_sparse(k)], [p for p in params if self._is_sparse(p)])
        inputs = [self.leaves.data[v] if isinstance(v, int) else self.run.arrays[v] for v in dense]
        outputs = []
        for b in heads.in_buffers:
            stacked = self.run.take(b, heads.rows(b))
            for k in heads.of(b):
                start = int(heads.offsets[k])
                shape = SPECS[self.specs[int(heads.values[k])]].shape
                outputs.append(stacked._slice(start, start + int(heads.widths[k])).reshape(shape))

        def touches(begun: list[bool]) -> list[bool]:
            touched = self._touched(self._reached(heads.values[np.flatnonzero(begun)]))
            return [v in touched for v in dense]

        def backward(output_grads: list[Any], targets: list[Any], begun: list[bool]) -> list[Any]:
            chosen = np.flatnonzero(begun)
            if not len(chosen):
                return [UNTOUCHED] * len((*dense, *sparse))
            found = self._reached(heads.values[chosen])
            touched = self._touched(found)
            asked = [v for v, target in zip(dense, targets) if target is not None and v in touched]
            asked += [v for v in sparse if v in touched]
            made = dict(zip(asked, self._gradients(found, chosen, [output_grads[k].asnumpy() for k in chosen.tolist()],
                                                   asked, {})))
            grads = [*as_arrays_like([made.get(v) for v in dense], inputs), *[made.get(v) for v in sparse]]
            return [g if v in touched else UNTOUCHED for v, g in zip((*dense, *sparse), grads)]

        TapeBridge(inputs, outputs, backward, self.free, touches, list(sparse.values()), self._compare_passed)
        return {int(v): out for v, out in zip(heads.values, outputs)}
