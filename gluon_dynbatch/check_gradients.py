"""check=True: the gradients of a backward pass, call by call, compared with those of the batched pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cavs_core import UNTOUCHED, is_computed, is_sparse
from cavs_core.mxnet_compat import autograd, mx

from .errors import BatchingMismatchError

__all__ = ["GradientCheck"]

_TOLERANCE = {"float64": (1e-6, 1e-8), "float16": (2e-2, 2e-2)}
_TOUCHED = object()         # in place of a gradient: zero, because an operator computes none


class GradientCheck:
    """The calls of a flush by themselves, for as long as passes may begin at their results.

    Parameters
    ----------
    tables, entries : what was recorded, and what the calls are
    values : recorded value -> what the call by itself gave
    """

    def __init__(self, tables: Any, entries: Sequence[Any], values: Mapping[int, Any]):
        self._tables, self._entries, self._values = tables, entries, values
        self._wanting: set[int] = set()

    def compare(self, heads: Mapping[int, Any], ours: Any, leaves: Mapping[int, Any],
                params: Mapping[Any, Any]) -> None:
        """Run a pass call by call, and compare.

        Parameters
        ----------
        heads : recorded value that the pass begins at -> its gradient
        ours : (recorded value) -> its gradient in the batched pass; None where it has none of its own
        leaves, params : leaf, and parameter -> its gradient in the batched pass, for all that the pass touched and that
            ask for one; None stands for zero, UNTOUCHED for one that MXNet has no use for
        """
        self._wanting = self._find_wanting()            # (asked now: arrays come to the tape, and leave it)
        grads: dict[int, Any] = dict(heads)             # of values, and of leaves by their tokens
        of_params: dict[Any, Any] = {}
        readers: dict[Any, list[str]] = {}
        operand_offsets, value_offsets = self._tables.recording.offsets
        for i in range(len(self._tables.call_entry) - 1, -1, -1):
            entry = self._entries[self._tables.call_entry[i]]
            made = range(int(value_offsets[i]), int(value_offsets[i + 1]))
            title = f"call {i} ({entry.signature.title}{f', called by {entry.cls.where}' if entry.cls.where else ''})"
            for v in made:
                if v in grads and grads[v] is not _TOUCHED:
                    _compare(grads[v], ours(v), f"the result of {title}", readers.get(v, ["a head"]))
            if not entry.cls.recorded or not any(v in grads for v in made):
                continue
            tokens = self._tables.recording.operands[operand_offsets[i]:operand_offsets[i + 1]].tolist()
            for key, grad in self._backward(entry, tokens, [grads.get(v) for v in made]):
                found = of_params if not isinstance(key, int) else grads
                found[key] = grad if found.get(key, _TOUCHED) is _TOUCHED else (
                    found[key] if grad is _TOUCHED else found[key] + grad)
                readers.setdefault(key, []).append(title)
        self._compare_all({t: g for t, g in grads.items() if t < 0}, {-1 - k: g for k, g in leaves.items()}, readers,
                          lambda t: t in self._wanting, lambda t: f"outside array {-1 - t}")
        self._compare_all(of_params, params, readers, lambda p: p.grad_req != "null" and not is_sparse(p),
                          lambda p: f"parameter {p.name}")

    def _find_wanting(self) -> set[int]:
        """The values, and leaves by their tokens, that the loop would have on the tape."""
        r, data = self._tables.recording, self._tables.leaves.data
        found = {-1 - leaf for leaf in np.flatnonzero(r.leaf_wanted).tolist()
                 if data[leaf].grad is not None or is_computed(data[leaf])}
        operand_offsets, value_offsets = r.offsets
        for i, number in enumerate(self._tables.call_entry.tolist()):
            entry = self._entries[number]
            tokens = r.operands[operand_offsets[i]:operand_offsets[i + 1]].tolist()
            owns = any(p.parameter.grad_req != "null" for p in entry.signature.params)
            if entry.cls.recorded and (owns or not found.isdisjoint(tokens)):
                found.update(range(int(value_offsets[i]), int(value_offsets[i + 1])))
        return found

    def _compare_all(self, want: Mapping[Any, Any], got: Mapping[Any, Any], readers: Any, counts: Any,
                     name: Any) -> None:
        """Leaves or parameters: their gradients, and which of them are touched."""
        for key in [key for key in {**want, **got} if counts(key)]:
            if (key in want) != (key in got):
                told, fresh = ("touches", "fresh") if key in got else ("does not touch", "stale")
                raise BatchingMismatchError(
                    f"batching(check=True): the batched backward pass {told} {name(key)}, unlike the pass call by call"
                    f"{_read_by(readers.get(key))}. Its gradient would be {fresh}. {_ADVICE}")
            none = want[key] is _TOUCHED, got[key] is None
            if got[key] is not UNTOUCHED and not all(none):
                _compare(np.zeros(got[key].shape) if none[0] else want[key],
                         np.zeros(want[key].shape) if none[1] else got[key], name(key), readers.get(key))

    def _backward(self, entry: Any, tokens: Sequence[int], grads: Sequence[Any]) -> list[tuple[Any, Any]]:
        """What a call by itself sends to its operands and parameters."""
        signature, arrays = entry.signature, {t: self._array(t).copy() for t in dict.fromkeys(tokens)}
        params = [(p.parameter, p.parameter.data(signature.context)) for p in signature.params
                  if p.parameter.grad_req != "null" and not is_sparse(p.parameter)]
        kept = [(data.grad.copy(), data._fresh_grad) for _, data in params]
        for array in [array for t, array in arrays.items() if t in self._wanting]:
            array.attach_grad()
        for _, data in params:
            data._fresh_grad = False
            data.grad[:] = 0
        with autograd.record(train_mode=autograd.is_training()):
            made = signature.run_alone(entry.cls.identity and entry.cls.identity[0], [arrays[t] for t in tokens])
        begun = [k for k, grad in enumerate(grads) if grad is not None]
        flows = any(grads[k] is not _TOUCHED for k in begun)
        found: list[tuple[Any, Any]] = []
        try:
            _BACKWARD([made[k] for k in begun], [mx.nd.zeros_like(made[k]) if grads[k] is _TOUCHED else mx.nd.array(
                np.reshape(grads[k], made[k].shape), dtype=made[k].dtype) for k in begun])
        except mx.base.MXNetError:              # it is not on the tape: the result was detached
            pass
        flowing = {t for t, column in zip(tokens, _columns(signature, len(tokens))) if column[begun].any()}
        for t, array in arrays.items():
            if array._fresh_grad:
                found.append((t, array.grad.asnumpy() if flows and t in flowing else _TOUCHED))
        for (parameter, data), (grad, fresh) in zip(params, kept):
            if data._fresh_grad:
                found.append((parameter, data.grad.asnumpy() if flows else _TOUCHED))
            data.grad[:] = grad
            data._fresh_grad = fresh
        return found

    def _array(self, token: int) -> Any:
        return self._values[token] if token >= 0 else self._tables.leaves.array(-1 - token)


_BACKWARD = autograd.backward       # MXNet's own: no scope has to be asked here
_ADVICE = "Please report it; policy='none' or granularity='op' may avoid it."


def _columns(signature: Any, count: int) -> list[Any]:
    """For each operand whether gradients flow to it from each output; a list has its last columns again and again."""
    columns, slots = list(signature.flows.T), signature.slots
    while len(columns) < count:
        columns.append(columns[len(columns) - slots])
    return columns


def _compare(want: Any, got: Any, what: str, readers: Sequence[str] | None) -> None:
    if got is None:
        return
    got = np.asarray(got.asnumpy() if isinstance(got, mx.nd.NDArray) else got).reshape(want.shape)
    rtol, atol = _TOLERANCE.get(want.dtype.name, (1e-3, 1e-5))
    finite = np.abs(want[np.isfinite(want)])
    if np.allclose(got, want, rtol=rtol, atol=atol * max(1.0, float(finite.max(initial=0))), equal_nan=True):
        return
    raise BatchingMismatchError(
        f"batching(check=True): the gradient of {what} differs in the batched backward pass from that of the pass call "
        f"by call by up to {float(np.max(np.abs(got - want))):g} (shape {want.shape}){_read_by(readers)}. {_ADVICE}")


_MOST = 3


def _read_by(readers: Sequence[str] | None) -> str:
    if not readers:
        return ""
    more = f" and {len(readers) - _MOST} more" if len(readers) > _MOST else ""
    return f"; it is read by {', '.join(readers[:_MOST])}{more}"
