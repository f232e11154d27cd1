"""Specs by number, and a quick look at outside arrays: what recording a leaf costs is decided here."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from cavs_core import Spec
from cavs_core.mxnet_compat import mx

__all__ = ["SPECS", "DEVICES", "spec_number", "array_spec", "data_spec", "memory_of"]

_LIB = mx.base._LIB
SPECS: list[Spec] = []              # number -> shape and dtype
DEVICES: list[object] = []          # number -> context
_numbers: dict[tuple, int] = {}
_lock = threading.Lock()

_ndim, _sizes, _dtype = ctypes.c_int(), ctypes.POINTER(ctypes.c_int)(), ctypes.c_int()
_kind, _device = ctypes.c_int(), ctypes.c_int()
_DTYPES = {code: np.dtype(t).name for t, code in mx.ndarray.ndarray._DTYPE_NP_TO_MX.items() if t is not None}
_get_shape, _get_dtype = _LIB.MXNDArrayGetShapeEx, _LIB.MXNDArrayGetDType
_get_context = _LIB.MXNDArrayGetContext
_by_ref = tuple(ctypes.byref(x) for x in (_ndim, _sizes, _dtype, _kind, _device))
_cells = threading.Lock()           # the C calls write into the cells above: one thread at a time


def spec_number(shape, dtype, context) -> int:
    """The number of a spec on a device; equal specs have one number for the life of the process."""
    return _number((tuple(shape), dtype, context.device_typeid, context.device_id))


def _number(key) -> int:
    try:
        return _numbers[key]
    except KeyError:
        pass
    with _lock:
        if key not in _numbers:
            SPECS.append(Spec(key[0], key[1]))
            DEVICES.append(mx.Context(mx.Context.devtype2str[key[2]], key[3]))
            _numbers[key] = len(SPECS) - 1
        return _numbers[key]


def array_spec(array) -> int:
    """The spec number of an NDArray, by three bare C calls (its properties cost four times as much)."""
    handle = array.handle
    with _cells:
        if _get_shape(handle, _by_ref[0], _by_ref[1]) or _get_dtype(handle, _by_ref[2]) \
                or _get_context(handle, _by_ref[3], _by_ref[4]):
            raise mx.base.get_last_ffi_error()
        return _number((tuple(_sizes[:_ndim.value]), _DTYPES[_dtype.value], _kind.value, _device.value))


def memory_of(array) -> tuple[int, int]:
    """Where an array's memory begins and ends."""
    pointer = ctypes.c_void_p()
    mx.base.check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    start = pointer.value or 0
    return start, start + array.size * np.dtype(array.dtype).itemsize


def data_spec(value, context) -> int:
    """The spec number of a Python number or a numpy array, as mx.nd.array would make it."""
    shape = np.shape(value) or (1,)
    return spec_number(shape, "float32", context)

