"""Parameter updates handed to MXNet's engine, which runs them when the arrays are free, as it does its own operators.

Everything about the arrays is asked by compiled code, for all parameters of a step at once.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from typing import Any

from numba import njit, types

from ...mxnet_compat import mx
from .compiled import Compiled, compile_function
from .intrinsics import words_at
from .mxnet_calls import (
    ANSWER,
    CONTEXT,
    CPU,
    DENSE,
    FLOAT32,
    FLOAT64,
    HELPER,
    INT64,
    NUM_SCRATCH,
    ROW_SPARSE,
    SHAPE,
    SHAPE_AT,
    address_of,
    axes_of,
    bound,
    context_of,
    dtype_of,
    index_dtype_of,
    let_go,
    storage_of,
    wait_for,
)
from .sparse_memory import can_look_inside, rows_inside
from .update_loops import (
    COUNT,
    DTYPE,
    GRAD,
    HEAD,
    INDEX,
    NUM_NUMBERS,
    NUM_WORDS,
    NUMBERS,
    ROWS,
    RULE,
    WIDTH,
    update_loop,
)

__all__ = ["NUM_ARRAYS", "Updates"]

_i4, _i8 = types.int32, types.int64
_is_recording = bound("MXAutogradIsRecording", _i8)
_get_fresh = bound("MXNDArrayGetGradState", _i8, _i8)
_set_fresh = bound("MXNDArraySetGradState", _i8, _i4)
_get_index = bound("MXNDArrayGetAuxNDArray", _i8, _i8, _i8)
_push = bound("MXEnginePushSyncND", _i8, _i8, _i8, _i8, _i8, _i4, _i8, _i4, _i8, _i4, _i8)
_malloc = types.ExternalFunction("malloc", _i8(_i8))
_free = types.ExternalFunction("free", types.void(_i8))

NUM_ARRAYS = 4                  # of a parameter: weight, gradient, up to two states
# What is known of a parameter: the handles of its arrays (0: none), what the caller says, what the arrays say.
_RULE, _DTYPE, _ROWS, _WIDTH, _FRESH, _MADE, _NUM_KNOWN = range(NUM_ARRAYS, NUM_ARRAYS + 7)
# Behind NUM_SCRATCH words: how the engine runs an update, and the arrays that an update reads and writes.
_HOW, _LISTS = NUM_SCRATCH, NUM_SCRATCH + 1
_AT_ONCE = 4                    # MXNet's FnProperty::kAsync: on the pushing thread, if nothing has to be waited for
_MOST = 16                      # parameters of one update: each is compared with each
# What a thread of the engine takes to wake up is enough for so many elements; it pays where they are more.
_FEW_ELEMENTS = 1 << 19
_NUM_WORK = _LISTS + (NUM_ARRAYS + 1) * _MOST
_PUSHED, _FAILED = range(2)
_UNKNOWN = (0,) * (_NUM_KNOWN - NUM_ARRAYS)


# ---- are they plain? -------------------------------------------------------------------------------------------------

@njit(**HELPER)
def _share_memory(known, count):
    """Whether two arrays are the same or views of the same: the engine would wait for itself, for ever.

    An NDArray begins with the pointer to what it is a view of.
    """
    for i in range(count * NUM_ARRAYS):
        mine = words_at(known)[i // NUM_ARRAYS * _NUM_KNOWN + i % NUM_ARRAYS]
        for j in range(i if mine != 0 else 0):
            other = words_at(known)[j // NUM_ARRAYS * _NUM_KNOWN + j % NUM_ARRAYS]
            if other != 0 and words_at(mine)[0] == words_at(other)[0]:
                return True
    return False


@njit(**HELPER)
def _same_shape(handle, axes, scratch):
    """Whether an array has the shape of the weight, which stands in the scratch words."""
    if axes_of(handle, scratch) != axes:
        return False
    words = words_at(scratch)
    for k in range(axes):
        if words_at(words[SHAPE_AT])[k] != words[SHAPE + k]:
            return False
    return True


@njit(**HELPER)
def _fits(mine, context, lazy, scratch):
    """Whether the arrays of one parameter are plain; what they say becomes known (-1 rows: a sparse gradient)."""
    axes, size, asked = axes_of(mine[0], scratch), 1, words_at(scratch)
    for k in range(axes):
        asked[SHAPE + k] = words_at(asked[SHAPE_AT])[k]
        size *= asked[SHAPE + k]
    dtype = dtype_of(mine[0], scratch)
    if axes < 0 or size <= 0 or not (dtype == FLOAT32 or dtype == FLOAT64):
        return False
    for i in range(NUM_ARRAYS):
        if mine[i] == 0:
            continue
        storage = storage_of(mine[i], scratch)
        sparse = i == GRAD and lazy != 0 and storage == ROW_SPARSE and index_dtype_of(mine[i], scratch) == INT64
        if not (sparse or storage == DENSE) or dtype_of(mine[i], scratch) != dtype or (
                context_of(mine[i], scratch) != context) or not _same_shape(mine[i], axes, scratch):
            return False
        if i == GRAD:
            mine[_ROWS], mine[_WIDTH] = (-1, size // asked[SHAPE]) if sparse else (1, size)
    mine[_DTYPE], asked[ANSWER] = dtype, 0
    if _get_fresh(mine[0], scratch) != 0:
        return False
    mine[_FRESH] = asked[ANSWER]
    return True


def look(known, count, lazy, work):
    """Whether all parameters are plain, so that `submit` can update them."""
    context = context_of(words_at(known)[0], work)
    words_at(work)[ANSWER] = 0
    if _is_recording(work) != 0 or words_at(work)[ANSWER] != 0 or (context & 0xffffffff) != CPU:
        return 0
    for k in range(count):
        if not _fits(words_at(known + 8 * _NUM_KNOWN * k), context, lazy, work):
            return 0
    for k in range(0, count, _MOST):
        if _share_memory(known + 8 * _NUM_KNOWN * k, min(_MOST, count - k)):
            return 0
    return 1


def used(known, count):
    """From now on the gradients are stale."""
    failed = 0
    for k in range(count):
        failed |= _set_fresh(words_at(known)[_NUM_KNOWN * k], 0)
    return failed


# ---- where are they? -------------------------------------------------------------------------------------------------

@njit(**HELPER)
def _find_rows(grad, mine, words, inside, scratch):
    """The number of rows of a row_sparse gradient, and their index: a copy, if MXNet's own is not found."""
    if wait_for(grad) != 0:
        return False
    rows = rows_inside(grad, scratch) if inside != 0 else -1
    if rows >= 0:
        words[ROWS], words[INDEX] = rows, words_at(scratch)[ANSWER]
        return rows == 0 or words[INDEX] != 0
    if _get_index(grad, 0, scratch) != 0:
        return False
    index = mine[_MADE] = words_at(scratch)[ANSWER]
    words[ROWS] = words_at(words_at(scratch)[SHAPE_AT])[0] if axes_of(index, scratch) == 1 else 0
    if words[ROWS] > 0:
        words[INDEX] = address_of(index, scratch)
    return words[ROWS] == 0 or words[INDEX] != 0


@njit(**HELPER)
def _find_memory(mine, words, inside, scratch):
    """Put the addresses of one parameter into the table; whether that went well."""
    words[RULE], words[DTYPE], words[ROWS], words[WIDTH] = mine[_RULE], mine[_DTYPE], mine[_ROWS], mine[_WIDTH]
    if words[ROWS] < 0 and not _find_rows(mine[GRAD], mine, words, inside, scratch):
        return False
    for i in range(NUM_ARRAYS):
        if mine[i] != 0 and (i != GRAD or words[ROWS] > 0):         # no rows have no memory
            words[i] = address_of(mine[i], scratch)
            if words[i] == 0:
                return False
    return True


# ---- all of it -------------------------------------------------------------------------------------------------------

@njit(**HELPER)
def _submit_some(known, count, numbers, inside, work, loop, release, name):
    """One update of the engine; see `submit`."""
    table = _malloc(8 * (HEAD + (NUM_WORDS + NUM_NUMBERS) * count))
    words_at(table)[COUNT] = count
    first_number = table + 8 * (HEAD + NUM_WORDS * count)
    for k in range(NUM_NUMBERS * count):
        words_at(first_number)[k] = words_at(numbers)[k]
    outcome, elements = _PUSHED, 0
    reads, writes = work + 8 * _LISTS, work + 8 * (_LISTS + 2 * count)
    num_reads, num_writes = 0, 0
    for k in range(count):
        words, mine = words_at(table + 8 * (HEAD + NUM_WORDS * k)), words_at(known + 8 * _NUM_KNOWN * k)
        words[NUMBERS], words[INDEX], mine[_MADE] = first_number + 8 * NUM_NUMBERS * k, 0, 0
        if outcome == _PUSHED and not _find_memory(mine, words, inside, work):
            outcome = _FAILED
        elements += words[ROWS] * words[WIDTH]
        for i in range(NUM_ARRAYS):
            if i == GRAD:
                words_at(reads)[num_reads] = mine[i]
                num_reads += 1
            elif mine[i] != 0:
                words_at(writes)[num_writes] = mine[i]
                num_writes += 1
        if mine[_MADE] != 0:
            words_at(reads)[num_reads] = mine[_MADE]
            num_reads += 1
    if outcome == _PUSHED:
        context_of(words_at(known)[0], work)
        words_at(work)[_HOW] = _AT_ONCE
        how = work + 8 * _HOW if elements <= _FEW_ELEMENTS else 0
        if _push(loop, table, release, work + 8 * CONTEXT, reads, num_reads, writes, num_writes, how, 0, name) != 0:
            outcome = _FAILED
    else:
        _free(table)                            # else the engine frees it
    for k in range(count):
        made = words_at(known)[_NUM_KNOWN * k + _MADE]
        if made != 0:
            let_go(made)                        # the memory stays until the engine has run what reads it
    return outcome


def submit(known, count, numbers, inside, work, loop, release, name):
    """See `Updates.push`; `work` is the address of _NUM_WORK words."""
    for k in range(0, count, _MOST):
        outcome = _submit_some(known + 8 * _NUM_KNOWN * k, min(_MOST, count - k), numbers + 8 * NUM_NUMBERS * k, inside,
                               work, loop, release, name)
        if outcome != _PUSHED:
            return outcome
    return _PUSHED


def _compiled(function: Any) -> Compiled:
    return compile_function(function, types.int64(*(types.int64,) * function.__code__.co_argcount))


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any, Any, int, int, bool]:
    """look, used, submit; the addresses of the loop and of C's free; whether we may look inside of sparse arrays."""
    release = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value or 0
    return (_compiled(look).call, _compiled(used).call, _compiled(submit).call, update_loop().address, release,
            can_look_inside())


class Updates:
    """Parameters that are updated together.

    Parameters
    ----------
    arrays : NUM_ARRAYS for each parameter: its weight, its gradient and its states; None where it has no more
    """

    __slots__ = ("_arrays", "_known", "_work")

    def __init__(self, arrays: list[Any]):
        self._arrays = arrays           # (another thread may let a parameter have others)
        handles = [0 if x is None else x.handle.value for x in arrays]
        self._known = array("q")
        for k in range(0, len(handles), NUM_ARRAYS):
            self._known.extend(handles[k:k + NUM_ARRAYS])
            self._known.extend(_UNKNOWN)
        self._work = array("q", bytes(8 * _NUM_WORK))

    def __len__(self) -> int:
        return len(self._known) // _NUM_KNOWN

    def are_plain(self, lazy: bool) -> bool:
        """Whether they can be updated here. With `lazy` a row_sparse gradient is one that updates its own rows only."""
        return bool(_functions()[0](*self._where(), lazy, self._work.buffer_info()[0]))

    # What is known of each parameter then.
    dtypes = property(lambda self: self._known[_DTYPE::_NUM_KNOWN])
    rows = property(lambda self: self._known[_ROWS::_NUM_KNOWN])            # of its gradient; -1: it is sparse
    fresh = property(lambda self: self._known[_FRESH::_NUM_KNOWN])          # whether a pass has written its gradient

    @property
    def device(self) -> int:
        """The number of the device that they are all on."""
        return self._work[CONTEXT] >> 32

    def only(self, chosen: list[int]) -> Updates:
        """Some of them."""
        some = Updates([])
        some._arrays = self._arrays
        for k in chosen:
            some._known.extend(self._known[k * _NUM_KNOWN:(k + 1) * _NUM_KNOWN])
        return some

    def use(self) -> None:
        """Note that the gradients are used: they are stale until another pass."""
        if _functions()[1](*self._where()) != 0:
            raise mx.base.get_last_ffi_error()

    def push(self, rules: list[int], numbers: array[float], name: Any) -> None:
        """Update them, as soon as MXNet's engine has done what was pushed before.

        It waits for what is still being computed (MXNet's arrays have no address before), but not for the update; a
        short one runs right here, if nobody is using the arrays.

        Parameters
        ----------
        rules : of `update_loops`, one for each parameter
        numbers : float64, NUM_NUMBERS for each parameter
        name : a ctypes string that lives for ever, for MXNet's profiler
        """
        self._known[_RULE::_NUM_KNOWN] = array("q", rules)
        _, _, submit, loop, release, inside = _functions()
        if submit(*self._where(), numbers.buffer_info()[0], inside, self._work.buffer_info()[0], loop, release,
                  ctypes.addressof(name)) != _PUSHED:
            raise mx.base.get_last_ffi_error()

    def _where(self) -> tuple[int, int]:
        return self._known.buffer_info()[0], len(self)
