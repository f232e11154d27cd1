"""MXNet's C functions for compiled code, and questions about NDArrays.

From Python each question would cost as much as a small update.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding
from numba import njit, types

from ...mxnet_compat import mx
from .intrinsics import words_at

__all__ = ["ANSWER", "CONTEXT", "CPU", "DENSE", "FLOAT32", "FLOAT64", "HELPER", "INT64", "MOST_AXES", "NUM_SCRATCH",
           "ROW_SPARSE", "SHAPE", "SHAPE_AT", "address_of", "axes_of", "bound", "context_of", "dtype_of",
           "index_dtype_of", "let_go", "storage_of", "wait_for"]

HELPER = dict(error_model="numpy", boundscheck=False)
FLOAT32, FLOAT64, INT64 = 0, 1, 6               # MXNet's numbers
CPU, DENSE, ROW_SPARSE = 1, 0, 1
# Scratch words: what takes answers, and the shape of an array.
ANSWER, SHAPE_AT, CONTEXT, SHAPE, MOST_AXES = 0, 1, 2, 3, 32
NUM_SCRATCH = SHAPE + MOST_AXES


def bound(name: str, *args: Any) -> Any:
    """A C function of MXNet, by address: numba can keep what calls it on disk."""
    llvmlite.binding.add_symbol("cavs_" + name, ctypes.cast(getattr(mx.base._LIB, name), ctypes.c_void_p).value)
    return types.ExternalFunction("cavs_" + name, types.int32(*args))


_i8 = types.int64
_get_context = bound("MXNDArrayGetContext", _i8, _i8, _i8)
_get_dtype = bound("MXNDArrayGetDType", _i8, _i8)
_get_storage = bound("MXNDArrayGetStorageType", _i8, _i8)
_get_shape = bound("MXNDArrayGetShapeEx64", _i8, _i8, _i8)
_get_index_dtype = bound("MXNDArrayGetAuxType", _i8, _i8, _i8)
_get_data = bound("MXNDArrayGetData", _i8, _i8)
wait_for = bound("MXNDArrayWaitToRead", _i8)
let_go = bound("MXNDArrayFree", _i8)


# ---- questions: (handle, address of scratch words) -> answer, -1 if there is none ------------------------------------

@njit(**HELPER)
def dtype_of(handle, scratch):
    words_at(scratch)[ANSWER] = 0               # MXNet writes half of the word
    return words_at(scratch)[ANSWER] if _get_dtype(handle, scratch) == 0 else -1


@njit(**HELPER)
def storage_of(handle, scratch):
    words_at(scratch)[ANSWER] = 0
    return words_at(scratch)[ANSWER] if _get_storage(handle, scratch) == 0 else -1


@njit(**HELPER)
def index_dtype_of(handle, scratch):
    words_at(scratch)[ANSWER] = 0
    return words_at(scratch)[ANSWER] if _get_index_dtype(handle, 0, scratch) == 0 else -1


@njit(**HELPER)
def context_of(handle, scratch):
    """The kind of device in the lower half, its number in the upper one; the word stays where the engine reads it."""
    at = scratch + 8 * CONTEXT
    return words_at(at)[0] if _get_context(handle, at, at + 4) == 0 else -1


@njit(**HELPER)
def axes_of(handle, scratch):
    """The number of axes; their sizes can be read until the next question."""
    words_at(scratch)[ANSWER] = 0
    failed = _get_shape(handle, scratch, scratch + 8 * SHAPE_AT)
    axes = words_at(scratch)[ANSWER]
    return axes if failed == 0 and 0 < axes <= MOST_AXES else -1


@njit(**HELPER)
def address_of(handle, scratch):
    """Where the elements are, once they are there; 0 if what should have written them failed."""
    return words_at(scratch)[ANSWER] if wait_for(handle) == 0 and _get_data(handle, scratch) == 0 else 0
