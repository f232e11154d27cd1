"""Gradients that reach a parameter without MXNet's tape."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .array_memory import array_at, view_of_data
from .backends.native_cpu.memory import ARENA
from .backends.native_cpu.row_sums import add_equal_rows
from .backends.native_cpu.sparse_memory import can_look_inside, make_room
from .backends.targets import WRITTEN, Target
from .mxnet_compat import mx

__all__ = ["as_arrays_like", "is_sparse", "on_device", "row_sparse", "target_of", "write_gradient"]


def is_sparse(parameter: Any) -> bool:
    """Whether a parameter asks for the rows of its gradient that are not zero, and for no others."""
    return parameter._grad_stype != "default"


def target_of(data: Any, parameter: Any) -> Target:
    """The memory of a parameter's gradient, which is dense."""
    handle = mx.base.NDArrayHandle()            # (`data.grad` asks how it is stored, too)
    mx.base.check_call(mx.base._LIB.MXNDArrayGetGrad(data.handle, ctypes.byref(handle)))
    return Target(mx.nd.NDArray(handle), parameter.grad_req == "add")


def write_gradient(data: Any, parameter: Any, grad: Any, add: bool, in_use: bool = False) -> None:
    """Write a gradient as `grad_req` says, or add it to what this pass has brought already.

    Parameters
    ----------
    data, parameter : the parameter's array, and the parameter
    grad : an array; for a sparse gradient a list of (row numbers, rows); WRITTEN if it is there already; None for zero
    add : whether part of the gradient has come another way
    in_use : whether the engine may still be reading or writing what the gradient was before
    """
    if grad is WRITTEN:
        return
    add = add or parameter.grad_req == "add"
    if isinstance(grad, list) and grad and not (add or in_use) and _written_in_place(grad, data, parameter):
        return
    have = data.grad
    if is_sparse(parameter):
        new = grad.tostype("row_sparse") if isinstance(grad, mx.nd.NDArray) else row_sparse(grad or [], have)
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


def row_sparse(parts: Sequence[tuple[Any, Any]], like: Any) -> Any:
    """Rows with their numbers, equal ones added up, as a row_sparse array; numpy's arrays, or MXNet's on its device."""
    if parts and like.context.device_type == "cpu":
        return _on_cpu(_as_numpy(parts), like)
    return on_device(parts, like)


def on_device(parts: Sequence[tuple[Any, Any]], like: Any) -> Any:
    """Rows stay where they are; which of them are the same is found on the CPU, from their numbers."""
    if not parts:
        return mx.nd.sparse.zeros("row_sparse", like.shape, ctx=like.context, dtype=like.dtype)
    numbers = np.concatenate([x.asnumpy().ravel().astype(np.int64) for x, _ in parts]).clip(0, like.shape[0] - 1)
    rows = mx.nd.concat(*[x.reshape((-1, *like.shape[1:])) for _, x in parts], dim=0)
    kept, place = np.unique(numbers, return_inverse=True)
    index = mx.nd.array(place.reshape(1, -1), ctx=like.context, dtype=np.int64)
    total = mx.nd._internal._backward_gather_nd(rows, index, shape=(len(kept), *like.shape[1:]))
    return mx.nd.sparse.row_sparse_array((total, mx.nd.array(kept, ctx=like.context, dtype=np.int64)), shape=like.shape,
                                         ctx=like.context, dtype=like.dtype)


def _written_in_place(parts: Sequence[tuple[Any, Any]], data: Any, parameter: Any) -> bool:
    """Add rows up in the memory that a row_sparse gradient has already; whether it has enough."""
    if not can_look_inside() or not all(isinstance(x, np.ndarray) or x.context.device_type == "cpu" for _, x in parts):
        return False
    shape, dtype, room = parameter.shape, np.dtype(parameter.dtype), None

    def rows(count: int) -> Any:
        nonlocal room
        room = make_room(data, shape, dtype, count)
        return None if room is None else array_at(room[0], (count, *shape[1:]), dtype)

    kept = add_equal_rows(_as_numpy(parts), shape[0], rows)
    if room is None:
        return False
    array_at(room[1], kept.shape, np.int64)[:] = kept
    return True


def _as_numpy(parts: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Arrays on the CPU as numpy's."""
    numbers, rows = [[view_of_data(x) if isinstance(x, mx.nd.NDArray) else x for x in some] for some in zip(*parts)]
    return list(zip(numbers, rows))


def _on_cpu(parts: Sequence[tuple[Any, Any]], like: Any) -> Any:
    """Rows are added up inside the bytes of a stored array, which MXNet reads at once.

    (To make an array of its parts MXNet lets its engine copy the row numbers, and waits for that thread to wake up.)
    """
    shape, dtype = like.shape, np.dtype(like.dtype)
    if not sum(np.size(n) for n, _ in parts):
        return mx.nd.sparse.zeros("row_sparse", shape, ctx=like.context, dtype=like.dtype)
    stored, blocks = np.zeros(0, np.uint8), []

    def rows(count: int) -> Any:
        nonlocal stored
        head, num_bytes = _stored_head(shape, dtype, count), count * math.prod(shape[1:]) * dtype.itemsize
        first = -(-len(head) // 64) * 64        # of the rows, so that they are aligned
        blocks.append(ARENA.take(first + num_bytes + 8 * count))        # memory of the step before, most of the time
        stored = blocks[0].array((first + num_bytes + 8 * count,), np.uint8, 0)[first - len(head):]
        stored[:len(head)] = np.frombuffer(head, np.uint8)
        return stored[len(head):len(head) + num_bytes].view(dtype).reshape(count, *shape[1:])

    try:
        kept = add_equal_rows(parts, shape[0], rows)
        stored[len(stored) - kept.nbytes:] = kept.view(np.uint8)
        handle = mx.base.NDArrayHandle()
        mx.base.check_call(mx.base._LIB.MXNDArrayLoadFromRawBytes(
            ctypes.c_void_p(stored.ctypes.data), ctypes.c_size_t(len(stored)), ctypes.byref(handle)))
    finally:
        for block in blocks:
            ARENA.give_back(block)
    return mx.nd.sparse.RowSparseNDArray(handle)


def _stored_head(shape: tuple[int, ...], dtype: np.dtype, count: int) -> bytes:
    """What MXNet stores of a row_sparse array before its rows and their numbers (int64): see NDArray::Save."""
    sizes = f"i{len(shape)}q"
    codes = mx.ndarray.ndarray._DTYPE_NP_TO_MX
    return struct.pack(f"=Ii{sizes}{sizes}5iq", 0xF993FAC9, 1, len(shape), count, *shape[1:], len(shape), *shape, 1, 0,
                       codes[dtype.type], codes[np.int64], 1, count)
