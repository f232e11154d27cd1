"""Where an NDArray on the CPU keeps its elements."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .mxnet_compat import mx

__all__ = ["address_of_data", "view_of_data"]


def address_of_data(array: Any) -> int:
    """The address of the first element; whoever reads there waits for the array first."""
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


def view_of_data(array: Any) -> np.ndarray:
    """The memory itself as a numpy array that keeps the NDArray alive; it waits for nothing."""
    dtype = np.dtype(array.dtype)
    memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address_of_data(array))
    memory.owner = array        # numpy holds `memory`, and so the NDArray
    return np.frombuffer(memory, dtype).reshape(array.shape)
