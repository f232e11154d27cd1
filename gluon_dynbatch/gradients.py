"""Gradients that reach a parameter without MXNet's tape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import WRITTEN, Target, add_equal_rows, address_of_data, array_at, view_of_data
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
    """Rows with their numbers, equal ones added up, as a row_sparse array on the CPU."""
    sparse, shape, dtype = mx.nd.sparse, like.shape, like.dtype
    made: list[Any] = []

    def rows(count: int) -> Any:
        # What mx.nd.sparse.row_sparse_array does, without its checks and copies: rows are written where they belong.
        made.append(sparse.RowSparseNDArray(
            sparse._new_alloc_handle("row_sparse", shape, mx.cpu(), False, dtype, [np.int64], [(count,)])))
        return array_at(address_of_data(made[0]), (count, *shape[1:]), dtype)

    if not sum(np.size(n) for n, _ in parts):
        return sparse.zeros("row_sparse", shape, ctx=like.context, dtype=dtype)
    kept = add_equal_rows(parts, shape[0], rows)
    numbers = mx.nd.empty(kept.shape, ctx=mx.cpu(), dtype=np.int64)
    view_of_data(numbers)[...] = kept
    mx.base.check_call(mx.base._LIB.MXNDArraySyncCopyFromNDArray(made[0].handle, numbers.handle, ctypes.c_int(0)))
    return made[0]
