"""Where MXNet keeps the rows of a row_sparse array, and their numbers.

MXNet has no function that tells: it copies the numbers, on a thread of its engine that has to wake up first, and makes
an array of rows by copying them twice. So we look into the array. What stands where was read in MXNet's source
(NDArray::Chunk), and is looked for once in arrays that we know; where it is not found, MXNet's functions are used.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, types

from ...mxnet_compat import mx
from .compiled import Compiled, compile_function
from .intrinsics import words_at
from .mxnet_calls import (
    ANSWER,
    CPU,
    HELPER,
    INT64,
    NUM_SCRATCH,
    ROW_SPARSE,
    bound,
    context_of,
    dtype_of,
    index_dtype_of,
    let_go,
    storage_of,
)

__all__ = ["can_look_inside", "make_room", "rows_inside"]

# Words of a chunk. A block of memory is its address, its size in bytes, and two words more; a list its first and its
# last address; a shape the number of axes and, if these are few, their lengths.
_ROWS_AT, _ROWS_BYTES, _INDEX_BLOCKS, _NUM_AXES, _NUM_ROWS, _INDEX_SHAPES = 0, 1, 4, 15, 16, 21
_BLOCK_BYTES, _SHAPE_BYTES, _FEW_AXES = 32, 48, 4
_LEAST_BYTES = 224                              # of a chunk

_get_grad = bound("MXNDArrayGetGrad", types.int64, types.int64)


# ---- reading ---------------------------------------------------------------------------------------------------------

@njit(**HELPER)
def rows_inside(handle, index_at):
    """The number of rows of a row_sparse array; the address of their numbers goes to a word. -1 if nobody knows."""
    chunk = words_at(words_at(handle)[0])
    if not 0 < chunk[_NUM_AXES] <= _FEW_AXES:
        return -1
    words_at(index_at)[0] = words_at(chunk[_INDEX_BLOCKS])[0]
    return chunk[_NUM_ROWS]


@lru_cache(maxsize=1)
def can_look_inside() -> bool:
    """Whether all stands where it should, in arrays that differ in all that may move it."""
    arrays = [(numbers, _made(numbers, shape, dtype), math.prod(shape[1:]) * np.dtype(dtype).itemsize)
              for numbers, shape in (((1, 4, 30), (37, 11)), ((0, 2), (9, 5, 7)), ((3,), (5, 1, 2, 3)), ((), (6, 3)))
              for dtype in ("float32", "float64")]
    mx.nd.waitall()
    return all(_is_as_expected(x, numbers, width) for numbers, x, width in arrays)


def _made(numbers: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> Any:
    if not numbers:
        return mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)
    return mx.nd.sparse.row_sparse_array((np.ones((len(numbers), *shape[1:])), list(numbers)), shape=shape, dtype=dtype)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _is_as_expected(x: Any, numbers: tuple[int, ...], width: int) -> bool:
    """Nothing is followed that is no address for sure: a list is known by its length."""
    count, shape = len(numbers), x.shape
    chunk = _words(_words(x.handle.value, 1)[0], _LEAST_BYTES // 8)
    lists = chunk[_INDEX_BLOCKS:_INDEX_BLOCKS + 2], chunk[_INDEX_SHAPES:_INDEX_SHAPES + 2]
    if [last - first for first, last in lists] != [_BLOCK_BYTES, _SHAPE_BYTES]:
        return False
    if chunk[_NUM_AXES:_NUM_AXES + len(shape) + 1] != [len(shape), count, *shape[1:]]:
        return False
    address, nbytes = _words(lists[0][0], 2)
    if _words(lists[1][0], 2) != [1, count] or nbytes < 8 * count or chunk[_ROWS_BYTES] < width * count:
        return False
    data = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(x.handle, ctypes.byref(data)))
    return not count or (tuple(_words(address, count)) == numbers and data.value == chunk[_ROWS_AT])


# ---- writing ---------------------------------------------------------------------------------------------------------

def room(variable, count, num_axes, width_bytes, dtype, work):
    """See `make_room`; whether there is room. The addresses of the rows and of their numbers go to two words."""
    found, scratch = words_at(work), work + 16
    words_at(scratch)[ANSWER] = 0
    if _get_grad(variable, scratch) != 0 or words_at(scratch)[ANSWER] == 0:
        return 0
    grad = words_at(scratch)[ANSWER]
    plain = storage_of(grad, scratch) == ROW_SPARSE and dtype_of(grad, scratch) == dtype and (
        index_dtype_of(grad, scratch) == INT64) and (context_of(grad, scratch) & 0xffffffff) == CPU
    chunk = words_at(words_at(grad)[0])
    let_go(grad)                                # (the variable keeps it)
    if not plain or chunk[_NUM_AXES] != num_axes or num_axes > _FEW_AXES:
        return 0
    index, shape = words_at(chunk[_INDEX_BLOCKS]), words_at(chunk[_INDEX_SHAPES])
    if chunk[_ROWS_AT] == 0 or chunk[_ROWS_BYTES] < count * width_bytes or index[_ROWS_BYTES] < 8 * count or (
            shape[0] != 1):
        return 0
    found[0], found[1] = chunk[_ROWS_AT], index[_ROWS_AT]
    chunk[_NUM_ROWS], shape[1] = count, count
    return 1


@lru_cache(maxsize=1)
def _room() -> Compiled:
    return compile_function(room, types.int64(*(types.int64,) * room.__code__.co_argcount))


def make_room(variable: Any, shape: tuple[int, ...], dtype: np.dtype, count: int) -> tuple[int, int] | None:
    """Let the row_sparse gradient of a variable have `count` rows, which the caller writes: addresses of the rows and
    of their numbers (int64). None if it has not enough memory for them.

    Nobody else may be using the gradient, and it must be one that we can look inside of.
    """
    if count == 0:
        return None
    work = array("q", bytes(8 * (2 + NUM_SCRATCH)))
    width_bytes = math.prod(shape[1:]) * dtype.itemsize
    code = mx.ndarray.ndarray._DTYPE_NP_TO_MX[dtype.type]
    if not _room().call(variable.handle.value, count, len(shape), width_bytes, code, work.buffer_info()[0]):
        return None
    return work[0], work[1]
