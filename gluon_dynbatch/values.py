"""Specs by number, and a quick look at outside arrays: what recording a leaf costs is decided here.

A spec says what a value looks like and how it is stored: as `WIDTHS[n]` rows of the shape `ROW_SPECS[BUFFERS[n]]`. A
value of shape (.., H) is rows of length H; a vector is one row, or, where it holds one number per entry of something
(`by_rows`: word ids, labels, losses), one row per number. An array without elements, or without axes, has no rows: its
number is NO_ROWS, and what reads it runs alone.
"""

from __future__ import annotations

import ctypes
import math
import threading

import numpy as np

from cavs_core import Spec, address_of_data, sequence_like
from cavs_core.mxnet_compat import mx

__all__ = ["SPECS", "DEVICES", "BUFFERS", "WIDTHS", "ROW_SPECS", "spec_number", "array_spec", "data_spec", "memory_of",
           "Stretches", "is_by_rows", "as_array", "as_arrays", "zeros", "NO_ROWS", "has_rows"]

_LIB = mx.base._LIB
SPECS: list[Spec] = []              # number -> shape and dtype
DEVICES: list[object] = []          # number -> context
BUFFERS: list[int] = []             # number -> number of the buffer that holds its rows
WIDTHS: list[int] = []              # number -> rows
ROW_SPECS: list[Spec] = []          # buffer number -> shape and dtype of a row
NO_ROWS = -1
_numbers: dict[tuple, int] = {}
_buffer_numbers: dict[tuple, int] = {}
_lock = threading.Lock()

_ndim, _sizes, _dtype = ctypes.c_int(), ctypes.POINTER(ctypes.c_int)(), ctypes.c_int()
_kind, _device = ctypes.c_int(), ctypes.c_int()
_DTYPES = {code: np.dtype(t).name for t, code in mx.ndarray.ndarray._DTYPE_NP_TO_MX.items() if t is not None}
_get_shape, _get_dtype = _LIB.MXNDArrayGetShapeEx, _LIB.MXNDArrayGetDType
_get_context = _LIB.MXNDArrayGetContext
_by_ref = tuple(ctypes.byref(x) for x in (_ndim, _sizes, _dtype, _kind, _device))
_cells = threading.Lock()           # the C calls write into the cells above: one thread at a time


def spec_number(shape, dtype, context, by_rows: bool = False) -> int:
    """The number of a spec on a device; equal specs have one number for the life of the process."""
    shape = tuple(shape)
    return _number((shape, dtype, context.device_typeid, context.device_id, by_rows and _is_vector(shape)))


def _number(key) -> int:
    try:
        return _numbers[key]
    except KeyError:
        pass
    with _lock:
        if not has_rows(key[0]):
            _numbers[key] = NO_ROWS
        if key not in _numbers:
            shape, dtype, kind, device, by_rows = key
            row = (1,) if by_rows else shape[-1:]
            width = int(np.prod(shape)) // row[0]
            SPECS.append(Spec(shape, dtype))
            DEVICES.append(mx.Context(mx.Context.devtype2str[kind], device))
            WIDTHS.append(width)
            buffer = _buffer_numbers.setdefault((row, dtype, kind, device), len(ROW_SPECS))
            if buffer == len(ROW_SPECS):
                ROW_SPECS.append(Spec(row, dtype))
            BUFFERS.append(buffer)
            _numbers[key] = len(SPECS) - 1
        return _numbers[key]


def has_rows(shape) -> bool:
    """Whether arrays of a shape have rows: only MXNet's NumPy shapes allow others, without elements or without axes."""
    return len(shape) > 0 and 0 not in shape


def _is_vector(shape) -> bool:
    return len(shape) == 1 and shape[0] > 1


def is_by_rows(number: int) -> bool:
    """Whether the entries of a value's first axis are rows of their own."""
    return len(SPECS[number].shape) > 1 or ROW_SPECS[BUFFERS[number]].shape == (1,)


def array_spec(array, by_rows: bool = False) -> int:
    """The spec number of an NDArray, by three bare C calls (its properties cost four times as much)."""
    handle = array.handle
    with _cells:
        if _get_shape(handle, _by_ref[0], _by_ref[1]) or _get_dtype(handle, _by_ref[2]) \
                or _get_context(handle, _by_ref[3], _by_ref[4]):
            raise mx.base.get_last_ffi_error()
        shape = tuple(_sizes[:_ndim.value])
        return _number((shape, _DTYPES[_dtype.value], _kind.value, _device.value, by_rows and _is_vector(shape)))


def memory_of(array) -> tuple[int, int]:
    """Where an array's memory begins and ends."""
    start = address_of_data(array)
    return start, start + array.size * np.dtype(array.dtype).itemsize


class Stretches:
    """Stretches of memory; asked for every array that is written, so all are compared at once."""

    def __init__(self) -> None:
        self._bounds, self._count = np.zeros((2, 64), np.int64), 0      # starts and stops

    def add(self, stretches) -> None:
        for start, stop in stretches:
            if self._count == self._bounds.shape[1]:
                self._bounds = np.concatenate([self._bounds, np.zeros_like(self._bounds)], axis=1)
            self._bounds[:, self._count] = start, stop
            self._count += 1

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether one of them shares memory with the stretch from start to stop."""
        starts, stops = self._bounds[:, :self._count]
        return bool(((starts < stop) & (start < stops)).any())


def as_arrays(args):
    """(Nested) arguments with numbers and numpy arrays as arrays, as a recorded vertex takes them."""
    try:
        return _as_arrays(args)
    except RecursionError:
        return _deep_as_arrays(args)


def _as_arrays(args):
    if isinstance(args, (list, tuple)):
        return sequence_like(args, map(_as_arrays, args))
    if isinstance(args, (int, float, np.ndarray, np.generic)) and not isinstance(args, (bool, np.bool_)):
        return as_array(args)
    return args


def _deep_as_arrays(args):
    """The same for lists in lists in lists, without recursion; a list that contains itself has no end."""
    opened, inside = [(args, iter(args), [])], {id(args)}
    while True:
        source, rest, made = opened[-1]
        for part in rest:
            if isinstance(part, (list, tuple)):
                if id(part) in inside:
                    raise RecursionError("an argument of a vertex is a list that contains itself")
                opened.append((part, iter(part), []))
                inside.add(id(part))
                break
            made.append(_as_arrays(part))
        else:
            opened.pop()
            inside.discard(id(source))
            done = sequence_like(source, made)
            if not opened:
                return done
            opened[-1][2].append(done)


def as_array(value, context=None):
    """A Python number or numpy array as a recorded call takes it; an NDArray as it is."""
    if isinstance(value, mx.nd.NDArray):
        return value
    return mx.nd.array(np.reshape(value, np.shape(value) or (1,)), ctx=context, dtype="float32")


def data_spec(value, context) -> int:
    """The spec number of a Python number or a numpy array, as mx.nd.array would make it."""
    shape = np.shape(value) or (1,)
    return spec_number(shape, "float32", context)


_SMALL = 1 << 14        # bytes


def zeros(attrs, make):
    """What the operator for zeros makes, `make()`; small arrays on a CPU (a cell's first state) without its queue."""
    shape, context, dtype = attrs.get("shape"), attrs.get("ctx"), attrs.get("dtype")
    if type(shape) is not tuple or not has_rows(shape) or type(dtype) is not str or not isinstance(context, mx.Context):
        return make()
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if context.device_type != "cpu" or size > _SMALL:
        return make()
    made = mx.nd.empty(shape, ctx=context, dtype=dtype)
    ctypes.memset(address_of_data(made), 0, size)       # nobody else has it
    return made
