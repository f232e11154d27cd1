"""Where an NDArray on the CPU keeps its elements.

Asking is only safe once the array is there. MXNet gives the result of an operator its memory when the operator starts,
or when somebody asks for the address, whichever comes first, without a lock: where both come at once there are two
memories, and what the operator writes is lost. So everybody waits for the array first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .mxnet_compat import mx

__all__ = ["address_of_data", "array_at", "view_of_data"]


class _Memory:
    """What numpy makes an array of: an address, and what keeps the memory there."""

    __slots__ = ("__array_interface__", "keeper")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, keeper: Any):
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}
        self.keeper = keeper


def array_at(address: int, shape: tuple[int, ...], dtype: Any, keeper: Any = None) -> np.ndarray:
    """The memory at an address as a numpy array; it keeps `keeper` alive."""
    dtype = np.dtype(dtype)
    if 0 in shape:                  # numpy takes no address of nothing
        return np.empty(shape, dtype)
    return np.asarray(_Memory(address, shape, dtype, keeper))


_wait_to_read, _get_data = mx.base._LIB.MXNDArrayWaitToRead, mx.base._LIB.MXNDArrayGetData


def address_of_data(array: Any) -> int:
    """The address of the first element, once what is written to the array is there."""
    handle, pointer = array.handle, ctypes.c_void_p()
    mx.base.check_call(_wait_to_read(handle) or _get_data(handle, ctypes.byref(pointer)))
    return pointer.value or 0


def view_of_data(array: Any) -> np.ndarray:
    """The memory itself as a numpy array that keeps the NDArray alive, once what is written to the array is there."""
    return array_at(address_of_data(array), array.shape, array.dtype, array)
