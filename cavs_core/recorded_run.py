"""A run that a gradient may flow back through, and the owner of what it pushed.

As long as nobody needs the pushed values as arrays, they stay in the run. A backward pass that begins at them then runs
at once, without MXNet's tape: gradients go straight into the memory of the parameters. Whoever computes with them gets
arrays, which are the outputs of one node on the tape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from .backends.targets import WRITTEN, Target
from .errors import RunError
from .gradients import is_sparse, target_of, write_gradient
from .graph_run import GraphRows
from .layout import RowIndex, offsets_of
from .lazy import LazyArray, become_array
from .mxnet_compat import mx
from .program import Gather, GatherAll, GatherSum, Param, Pull
from .subset import Subset, begun_from, subset_of
from .tape import UNTOUCHED, TapeBridge, wrap_backward
from .tape_state import off_tape

__all__ = ["RecordedRun"]


class RecordedRun:
    """A run whose forward pass is done; the owner of its pushed values.

    Parameters
    ----------
    execution : the run
    rows : GraphRows
    wanted : the sources (Param, Pull) that ask for a gradient
    initial : the sources of the initial states that were filled in
    arrays : name -> pulled input
    specs : (shape, dtype) of each pushed value as the user sees it
    row_shapes : what a row of each is inside the run
    context : the device
    native : whether the run takes numpy's arrays
    stats : RunStats
    touched : for each pushed value whether a pass begins there -> the sources that it touches
    """

    has_values = settled = True

    def __init__(self, execution: Any, rows: GraphRows, wanted: Sequence[Any], initial: Sequence[Any],
                 arrays: dict[str, Any], specs: Sequence[tuple[tuple[int, ...], str]],
                 row_shapes: Sequence[tuple[int, ...]], context: Any, native: bool, stats: Any,
                 touched: Callable[[Sequence[bool]], Collection[Any]]):
        wrap_backward()
        self._run: Any = execution              # None once its memory was freed
        self._rows, self._initial, self._arrays = rows, initial, arrays
        self._bound, self._touches = execution.arrays, touched
        self._specs, self._row_shapes, self._context, self._native = specs, row_shapes, context, native
        self._stats = stats
        # MXNet takes no sparse gradient from a node of ours: those are written past the tape.
        of_all = self._touched([True] * len(specs))
        self._sparse = [s for s in wanted if s in of_all and isinstance(s, Param) and is_sparse(s.parameter)]
        self._dense = [s for s in wanted if s in of_all and s not in self._sparse]
        self._part: Any = None                  # the run of the last pass that only part of it took part in
        self._values: list[Any] | None = None   # of the pushed values, once the run is gone
        self._taped: list[Any] | None = None    # arrays, once somebody needed one
        self._lock = threading.RLock()

    def pushed(self) -> list[LazyArray]:
        """What stands for the pushed values."""
        made = []
        for token in range(len(self._specs)):
            array = LazyArray()
            array.owner, array.token = self, token
            made.append(array)
        return made

    # ---- what a LazyArray asks its owner -----------------------------------------------------

    def spec_of(self, token: int) -> tuple[tuple[int, ...], str]:
        return self._specs[token]

    def context_of(self, token: int) -> Any:
        return self._context

    def value_of(self, array: LazyArray) -> Any:
        with self._lock:
            if type(array) is not LazyArray:                    # another thread was first
                return array.handle
            if self._taped is None:
                with off_tape():
                    self._taped = self._put_on_tape()
            return become_array(array, self._taped[array.token])

    def numpy_of(self, array: LazyArray) -> Any:
        with self._lock:
            if self._taped is not None or type(array) is not LazyArray:
                return None
            if self._values is not None:
                return self._values[array.token].copy()
            with off_tape():
                return self._numpy(array.token)

    # ---- backward ----------------------------------------------------------------------------

    def backward(self, heads: list[LazyArray], head_grads: list[Any], retain_graph: bool, over_tape: Any) -> bool:
        """A pass that begins at pushed values, all of them still here; False if it must go over the tape."""
        if self._taped is not None or any(x.owner is not self for x in heads) \
                or any(isinstance(s, Pull) for s in self._dense):
            return False
        grads: list[Any] = [np.zeros(*spec) for spec in self._specs]
        for x, grad in zip(heads, head_grads):
            grads[x.token] += 1 if grad is None else grad.asnumpy().reshape(grads[x.token].shape)
        begun = [any(x.token == token for x in heads) for token in range(len(self._specs))]
        mx.nd.waitall()                         # nobody may still be reading what is written now
        with off_tape():
            touched = self._touched(begun)
            targets = {s: target_of(self._bound[s], s.parameter) for s in self._dense if s in touched}
            made = self._gradients(begun, grads, targets)
            for source in [s for s in (*self._dense, *self._sparse) if s in touched]:
                data, grad = self._bound[source], made.get(source)
                if grad is not WRITTEN:
                    write_gradient(data, source.parameter, grad, add=False)
                data._fresh_grad = True
            if not retain_graph:
                self._release()
        return True

    def _touched(self, begun: Sequence[bool]) -> Collection[Any]:
        """The sources that a pass touches which begins at some pushed values; also what stands for missing children."""
        found = self._touches(begun)
        if not self._initial:
            return found
        return {*found, *[self._initial[s.state] for s in found if isinstance(s, (Gather, GatherAll, GatherSum))]}

    def _touched_inputs(self, begun: Sequence[bool]) -> list[bool]:
        """Of each input of the node on the tape, whether a pass touches it that begins at some pushed values."""
        touched = self._touched(begun)
        return [s in touched for s in self._dense] or [True]

    def _gradients(self, begun: Sequence[bool], output_grads: Sequence[Any],
                   targets: dict[Any, Target]) -> dict[Any, Any]:
        """Gradients of the sources that have a target, WRITTEN where they are there, and of the sparse ones."""
        if self._run is None:
            raise RunError("backward through a run whose memory was freed by an earlier backward; "
                           "pass retain_graph=True to the earlier one")
        run, start, before, part = self._run, time.perf_counter(), self._run.launched, None
        of_classes = begun_from(run.layout, run.plans, begun)
        if of_classes is not None:
            part = subset_of(run.layout, run.plans, of_classes, kept=[(k, np.array([row])) for k, row, _ in run.fills])
            self._part = run = run.subset(part)     # (the rows of sparse gradients stand in its memory)
        answers = [self._rows.answers(g, shape) for g, shape in zip(output_grads, self._row_shapes)]
        if not self._native:
            answers = [mx.nd.array(g, ctx=self._context, dtype=g.dtype) if isinstance(g, np.ndarray) else g
                       for g in answers]
        direct = {s: t for s, t in targets.items() if isinstance(s, Param) and s not in self._initial}
        grads = run.backward(answers, [*targets, *self._sparse], targets=direct, sparse=self._sparse)
        for (k, row, _), source in zip(self._run.fills, self._initial):     # what missing children send back
            if source in targets:
                at = row if part is None else int(part.number[k][row])
                sent = run.pulled(k, at, at + 1).reshape(self._bound[source].shape)
                grads[source] = run.total(grads.get(source), sent)
        for source in targets:
            if isinstance(source, Pull) and source in grads:
                grads[source] = self._by_vertex(grads[source], part)
        self._stats.backward_ops = run.launched - before
        self._stats.backward_ms = (time.perf_counter() - start) * 1e3
        return grads

    def _by_vertex(self, grad: Any, part: Subset | None) -> Any:
        """The gradient of a pulled input, whose rows are in the order of positions, a row for each vertex."""
        rows = self._rows.position
        if part is not None:                    # zeros, in row 0, where a vertex has no part in the pass
            sizes = [cls.whole.num_rows for cls in self._rows.layout.classes]
            first, place = offsets_of(np.array(sizes)), np.zeros(sum(sizes), np.int64)
            place[np.concatenate([first[origin.number] + origin.positions for origin in part.origins])] = np.arange(
                1, len(grad) + 1)
            rows = place[rows]
            zeros = (np if isinstance(grad, np.ndarray) else mx.nd).zeros((1, *grad.shape[1:]), dtype=grad.dtype)
            grad = (np.concatenate([zeros, grad]) if isinstance(grad, np.ndarray) else
                    mx.nd.concat(zeros.as_in_context(grad.context), grad, dim=0))
        return self._run.rows_of(grad, RowIndex(rows), 0, len(rows))

    def _release(self) -> None:
        """Give the run's memory back; what it pushed stays."""
        with self._lock:
            if self._run is not None:
                if self._taped is None:
                    self._values = [self._numpy(token) for token in range(len(self._specs))]
                self._run.free()
                self._run = self._part = None

    def _numpy(self, token: int) -> Any:
        buffer, index = self._rows.pushed[token]
        return self._run.numpy_rows(buffer, index).reshape(self._specs[token][0])

    # ---- the tape ----------------------------------------------------------------------------

    def _taken(self, token: int) -> Any:
        """A pushed value as a new array."""
        buffer, index = self._rows.pushed[token]
        return self._run.take(buffer, index).reshape(self._specs[token][0])

    def _put_on_tape(self) -> list[Any]:
        if self._values is not None:            # a pass has freed the run
            outputs = [mx.nd.array(x, ctx=self._context, dtype=x.dtype) for x in self._values]
        else:
            outputs = [self._taken(token) for token in range(len(self._specs))]
        inputs = [self._arrays[s.name] if isinstance(s, Pull) else self._bound[s] for s in self._dense]
        TapeBridge(inputs or [_any_variable()], outputs, _over_tape(self), self._release, self._touched_inputs,
                   [(self._bound[s], s.parameter) for s in self._sparse])
        return outputs


def _over_tape(owner: RecordedRun) -> Callable[[list[Any], list[Target | None], list[bool]], list[Any]]:
    """What MXNet calls in its backward pass: gradients of the node's inputs."""
    def backward(output_grads: list[Any], targets: list[Target | None], begun: list[bool]) -> list[Any]:
        dense, touched = owner._dense, owner._touched(begun)
        if not any(begun):
            return [UNTOUCHED] * (len(dense) + len(owner._sparse))
        grads = owner._gradients(begun, output_grads, {s: t for s, t in zip(dense, targets)
                                                       if t is not None and s in touched})
        found = [UNTOUCHED if s not in touched else None if t is None else grads.get(s)
                 for s, t in zip(dense, targets)]
        return [*(found or [None]), *[grads.get(s) if s in touched else UNTOUCHED for s in owner._sparse]]

    return backward


def _any_variable() -> Any:
    """For a node whose gradients all go past the tape: MXNet asks a node only if one of its inputs wants a gradient."""
    variable = mx.nd.zeros((1,))
    variable.attach_grad()
    return variable
