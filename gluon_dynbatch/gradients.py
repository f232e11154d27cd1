"""Gradients that reach a parameter without MXNet's tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import WRITTEN, Target, add_rows
from cavs_core.mxnet_compat import mx

__all__ = ["as_arrays_like", "is_sparse", "target_of", "write_gradient"]


def is_sparse(parameter: Any) -> bool:
    """Whether a parameter asks for the rows of its gradient that are not zero, and for no others."""
    return parameter._grad_stype != "default"


def target_of(data: Any, parameter: Any) -> Target:
    """The memory of a parameter's gradient."""
    return Target(data.grad, parameter.grad_req == "add")


def write_gradient(data: Any, parameter: Any, grad: Any, add: bool) -> None:
    """Write a gradient as `grad_req` says, or add it to what this pass has brought already.

    Parameters
    ----------
    data, parameter : the parameter's array, and the parameter
    grad : an array; for a sparse gradient a list of (row numbers, rows); WRITTEN if it is there already; None for zero
    add : whether part of the gradient has come another way
    """
    if grad is WRITTEN:
        return
    have, add = data.grad, add or parameter.grad_req == "add"
    if is_sparse(parameter):
        new = grad.tostype("row_sparse") if isinstance(grad, mx.nd.NDArray) else _row_sparse(grad or [], have)
        (mx.nd.elemwise_add(have, new) if add else new).copyto(have)
    elif grad is None:
        if not add:
            have[:] = 0
    elif add:
        have += _as_array(grad, have)
    else:
        have[:] = _as_array(grad, have)


def as_arrays_like(grads: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Gradients as NDArrays; zeros where there is none."""
    return [mx.nd.zeros_like(x) if g is None else _as_array(g, x) for g, x in zip(grads, arrays)]


def _as_array(grad: Any, like: Any) -> Any:
    if isinstance(grad, mx.nd.NDArray):
        return grad.reshape(like.shape)
    return mx.nd.array(grad.reshape(like.shape), ctx=like.context, dtype=like.dtype)


def _row_sparse(parts: Sequence[tuple[Any, Any]], like: Any) -> Any:
    """Rows with their numbers, equal ones added up, as a row_sparse array."""
    numbers = np.concatenate([np.asarray(n).ravel().astype(np.int64) for n, _ in parts] or [np.zeros(0, np.int64)])
    kept, place = np.unique(numbers, return_inverse=True)
    rows = np.zeros((len(kept), *like.shape[1:]), like.dtype)
    start = 0
    for n, values in parts:
        count = int(np.size(n))
        add_rows(rows, place[start:start + count], values.reshape(count, *like.shape[1:]))
        start += count
    if not len(kept):
        return mx.nd.sparse.zeros("row_sparse", like.shape, ctx=like.context, dtype=like.dtype)
    made = mx.nd.from_numpy(rows), mx.nd.from_numpy(kept)       # nobody else has them
    return mx.nd.sparse.row_sparse_array(made, shape=like.shape, ctx=like.context, dtype=like.dtype)
