"""Parameter updates handed to MXNet's engine, which runs them when the arrays are free, as it does its own operators.

Everything about the arrays is asked by compiled code: from Python each question would cost as much as a small update.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import llvmlite.binding
import numpy as np
from numba import njit, types

from ...mxnet_compat import mx
from .compiled import Compiled, compile_function
from .intrinsics import words_at
from .update_loops import (
    COUNT,
    GRAD,
    HEAD,
    INDEX,
    NUM_NUMBERS,
    NUM_WORDS,
    NUMBERS,
    ROWS,
    RULE,
    WIDTH,
    loop_for,
)

__all__ = ["push_update"]

_DTYPES = {np.float32: ("float32", 0), np.float64: ("float64", 1)}       # MXNet's numbers of them
_INT64, _CPU, _DENSE, _ROW_SPARSE = 6, 1, 0, 1
_PUSHED, _ASIDE, _FAILED = range(3)


def _bound(name: str, *args: Any) -> Any:
    """A C function of MXNet, by address: numba can keep what calls it on disk."""
    llvmlite.binding.add_symbol("cavs_" + name, ctypes.cast(getattr(mx.base._LIB, name), ctypes.c_void_p).value)
    return types.ExternalFunction("cavs_" + name, types.int32(*args))


_i4, _i8 = types.int32, types.int64
_is_recording = _bound("MXAutogradIsRecording", _i8)
_get_context = _bound("MXNDArrayGetContext", _i8, _i8, _i8)
_get_dtype = _bound("MXNDArrayGetDType", _i8, _i8)
_get_storage = _bound("MXNDArrayGetStorageType", _i8, _i8)
_get_shape = _bound("MXNDArrayGetShapeEx64", _i8, _i8, _i8)
_get_index_dtype = _bound("MXNDArrayGetAuxType", _i8, _i8, _i8)
_get_index = _bound("MXNDArrayGetAuxNDArray", _i8, _i8, _i8)
_wait = _bound("MXNDArrayWaitToRead", _i8)
_get_data = _bound("MXNDArrayGetData", _i8, _i8)
_let_go = _bound("MXNDArrayFree", _i8)
_push = _bound("MXEnginePushSyncND", _i8, _i8, _i8, _i8, _i8, _i4, _i8, _i4, _i8, _i4, _i8)
_malloc = types.ExternalFunction("malloc", _i8(_i8))
_free = types.ExternalFunction("free", types.void(_i8))

_HELPER = dict(error_model="numpy", boundscheck=False)
# Words that take answers, and the shape of a weight.
_ANSWER, _SHAPE_AT, _CONTEXT, _SHAPE, _MOST_AXES = 0, 1, 2, 3, 32
_NUM_SCRATCH = _SHAPE + _MOST_AXES


# ---- questions: (handle, address of scratch words) -> answer, -1 if there is none ------------------------------------

@njit(**_HELPER)
def _dtype_of(handle, scratch):
    words_at(scratch)[_ANSWER] = 0              # MXNet writes half of the word
    return words_at(scratch)[_ANSWER] if _get_dtype(handle, scratch) == 0 else -1


@njit(**_HELPER)
def _storage_of(handle, scratch):
    words_at(scratch)[_ANSWER] = 0
    return words_at(scratch)[_ANSWER] if _get_storage(handle, scratch) == 0 else -1


@njit(**_HELPER)
def _index_dtype_of(handle, scratch):
    words_at(scratch)[_ANSWER] = 0
    return words_at(scratch)[_ANSWER] if _get_index_dtype(handle, 0, scratch) == 0 else -1


@njit(**_HELPER)
def _context_of(handle, scratch):
    """The kind of device in the lower half, its number in the upper one; the word stays where the engine reads it."""
    at = scratch + 8 * _CONTEXT
    return words_at(at)[0] if _get_context(handle, at, at + 4) == 0 else -1


@njit(**_HELPER)
def _axes_of(handle, scratch):
    """The number of axes; their sizes can be read until the next question."""
    words_at(scratch)[_ANSWER] = 0
    failed = _get_shape(handle, scratch, scratch + 8 * _SHAPE_AT)
    axes = words_at(scratch)[_ANSWER]
    return axes if failed == 0 and 0 < axes <= _MOST_AXES else -1


@njit(**_HELPER)
def _address_of(handle, scratch):
    """Where the elements are, once they are there; 0 if what should have written them failed."""
    return words_at(scratch)[_ANSWER] if _wait(handle) == 0 and _get_data(handle, scratch) == 0 else 0


# ---- are they plain? -------------------------------------------------------------------------------------------------

@njit(**_HELPER)
def _share_memory(handles, count):
    """Whether two arrays are the same or views of the same: the engine would wait for itself, for ever.

    An NDArray begins with the pointer to what it is a view of.
    """
    for i in range(count):
        for j in range(i):
            if words_at(handles[i])[0] == words_at(handles[j])[0]:
                return True
    return False


@njit(**_HELPER)
def _same_shape(handle, axes, scratch):
    """Whether an array has the shape of the weight, which stands in the scratch words."""
    if _axes_of(handle, scratch) != axes:
        return False
    words = words_at(scratch)
    for k in range(axes):
        if words_at(words[_SHAPE_AT])[k] != words[_SHAPE + k]:
            return False
    return True


@njit(**_HELPER)
def _fits(mine, arity, dtype, context, lazy, words, scratch):
    """Whether the arrays of one parameter are plain; the rows of its gradient (-1: sparse) go into the table."""
    axes, size, asked = _axes_of(mine[0], scratch), 1, words_at(scratch)
    for k in range(axes):
        asked[_SHAPE + k] = words_at(asked[_SHAPE_AT])[k]
        size *= asked[_SHAPE + k]
    if axes < 0 or size <= 0:
        return False
    for i in range(arity):
        storage = _storage_of(mine[i], scratch)
        sparse = i == GRAD and lazy != 0 and storage == _ROW_SPARSE and _index_dtype_of(mine[i], scratch) == _INT64
        if not (sparse or storage == _DENSE) or _dtype_of(mine[i], scratch) != dtype or (
                _context_of(mine[i], scratch) != context) or not _same_shape(mine[i], axes, scratch):
            return False
        if i == GRAD:
            words[ROWS], words[WIDTH] = (-1, size // asked[_SHAPE]) if sparse else (1, size)
    return True


# ---- where are they? -------------------------------------------------------------------------------------------------

@njit(**_HELPER)
def _find_rows(grad, words, made, scratch):
    """The number of rows of a row_sparse gradient, and their index: a copy, since MXNet gives no address of its own."""
    if _wait(grad) != 0 or _get_index(grad, 0, made) != 0:
        return False
    index = words_at(made)[0]
    words[ROWS] = words_at(words_at(scratch)[_SHAPE_AT])[0] if _axes_of(index, scratch) == 1 else 0
    if words[ROWS] > 0:
        words[INDEX] = _address_of(index, scratch)
    return words[ROWS] == 0 or words[INDEX] != 0


@njit(**_HELPER)
def _find_memory(mine, arity, words, made, scratch):
    """Put the addresses of one parameter into the table; whether that went well."""
    if words[ROWS] < 0 and not _find_rows(mine[GRAD], words, made, scratch):
        return False
    for i in range(arity):
        if i != GRAD or words[ROWS] > 0:        # no rows have no memory
            words[i] = _address_of(mine[i], scratch)
            if words[i] == 0:
                return False
    return True


@njit(**_HELPER)
def _list_arrays(handles, made, count, arity, reads, writes):
    """What the engine has to know: the arrays that are read, and those that are written. Their numbers."""
    num_reads, num_writes = 0, 0
    for i in range(count * arity):
        if i % arity == GRAD:
            reads[num_reads] = handles[i]
            num_reads += 1
        else:
            writes[num_writes] = handles[i]
            num_writes += 1
    for k in range(count):
        if made[k] != 0:
            reads[num_reads] = made[k]
            num_reads += 1
    return num_reads, num_writes


# ---- all of it -------------------------------------------------------------------------------------------------------

def submit(rule, dtype, lazy, handles, count, arity, numbers, work, loop, release, name):
    """See `push_update`; `work` is the address of `_num_work_words` words."""
    made, reads, writes = work, work + 8 * count, work + 24 * count
    scratch = writes + 8 * count * arity
    arrays, context = words_at(handles), _context_of(words_at(handles)[0], scratch)
    words_at(scratch)[_ANSWER] = 0
    if _is_recording(scratch) != 0 or words_at(scratch)[_ANSWER] != 0 or (context & 0xffffffff) != _CPU or (
            _share_memory(arrays, count * arity)):
        return _ASIDE
    table = _malloc(8 * (HEAD + (NUM_WORDS + NUM_NUMBERS) * count))
    words_at(table)[RULE], words_at(table)[COUNT] = rule, count
    first_number = table + 8 * (HEAD + NUM_WORDS * count)
    for k in range(NUM_NUMBERS * count):
        words_at(first_number)[k] = words_at(numbers)[k]
    outcome = _PUSHED
    for k in range(count):
        words, mine = words_at(table + 8 * (HEAD + NUM_WORDS * k)), words_at(handles + 8 * arity * k)
        words[NUMBERS], words[INDEX] = first_number + 8 * NUM_NUMBERS * k, 0
        if outcome == _PUSHED and not _fits(mine, arity, dtype, context, lazy, words, scratch):
            outcome = _ASIDE
    for k in range(count):
        words, mine = words_at(table + 8 * (HEAD + NUM_WORDS * k)), words_at(handles + 8 * arity * k)
        if outcome == _PUSHED and not _find_memory(mine, arity, words, made + 8 * k, scratch):
            outcome = _FAILED
    if outcome == _PUSHED:
        num_reads, num_writes = _list_arrays(arrays, words_at(made), count, arity, words_at(reads), words_at(writes))
        if _push(loop, table, release, scratch + 8 * _CONTEXT, reads, num_reads, writes, num_writes, 0, 0, name) != 0:
            outcome = _FAILED
    else:
        _free(table)                            # else the engine frees it
    for k in range(count):
        if words_at(made)[k] != 0:
            _let_go(words_at(made)[k])          # the memory stays until the engine has run what reads it
    return outcome


def _num_work_words(count: int, arity: int) -> int:
    return 3 * count + count * arity + _NUM_SCRATCH


@lru_cache(maxsize=1)
def _submit() -> Compiled:
    return compile_function(submit, types.int64(*(types.int64,) * submit.__code__.co_argcount))


@lru_cache(maxsize=1)
def _release() -> int:
    """The address of C's free."""
    return ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0


def push_update(rule: int, arrays: Sequence[Any], arity: int, numbers: array[float], lazy: bool, name: Any) -> bool:
    """Update parameters, as soon as MXNet's engine has done what was pushed before; whether they are plain enough.

    It waits for what is still being computed (MXNet's arrays have no address before), but not for the update.

    Parameters
    ----------
    rule : of `update_loops`
    arrays : NDArrays: weight, gradient, states of the first parameter, then those of the next
    arity : the number of arrays of a parameter
    numbers : float64, NUM_NUMBERS for each parameter
    lazy : whether a row_sparse gradient updates its own rows only
    name : a ctypes string that lives for ever, for MXNet's profiler
    """
    if arrays[0].dtype not in _DTYPES:
        return False
    (dtype, number), count = _DTYPES[arrays[0].dtype], len(arrays) // arity
    handles = array("q", [x.handle.value for x in arrays])
    work = array("q", bytes(8 * _num_work_words(count, arity)))
    outcome = _submit().call(rule, number, lazy, handles.buffer_info()[0], count, arity,
                             numbers.buffer_info()[0], work.buffer_info()[0], loop_for(dtype).address, _release(),
                             ctypes.addressof(name))
    if outcome == _FAILED:
        raise mx.base.get_last_ffi_error()
    return outcome == _PUSHED
