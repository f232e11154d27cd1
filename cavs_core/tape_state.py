"""What is on MXNet's tape, and how to work beside it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .backends.native_cpu.intrinsics import words_at
from .compiling import compiled
from .lazy import listening
from .mxnet_compat import autograd, mx

__all__ = ["need_gradient", "needs_gradient", "node_of", "off_tape", "on_tape"]

NDArray = mx.nd.NDArray
_LIB, check_call = mx.base._LIB, mx.base.check_call


@contextlib.contextmanager
def off_tape():
    """The engine works: no listener sees what it runs, and nothing of it gets on the tape of the caller."""
    with listening(None), autograd.pause(train_mode=autograd.is_training()):
        yield


def on_tape(array: Any) -> bool:
    """Whether an array was computed on the tape, or is a marked variable."""
    handle = ctypes.c_void_p()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)) != 0:
        return False
    check_call(_LIB.MXSymbolFree(handle))
    return True


def needs_gradient(array: Any) -> bool:
    """Whether a gradient may flow into an array: a marked variable, or a result on the tape."""
    offset = _entry_offset()
    if offset is None:
        return array.grad is not None or on_tape(array)
    return ctypes.c_void_p.from_address(array.handle.value + offset).value is not None


def need_gradient(values: Sequence[Any]) -> np.ndarray:
    """`needs_gradient` of many arrays, as a bool array; of what is no NDArray it is False."""
    offset = _entry_offset()
    if offset is None:
        return np.array([isinstance(x, NDArray) and needs_gradient(x) for x in values], bool)
    handles = [x.handle.value if isinstance(x, NDArray) else 0 for x in values]
    return _are_set(np.array(handles, np.int64), offset)


@compiled
def _are_set(handles, offset):  # type: ignore[no-untyped-def]
    """Whether there is a pointer at an offset, for each array; False where there is no array."""
    found = np.zeros(len(handles), np.bool_)
    for k in range(len(handles)):
        if handles[k]:
            found[k] = words_at(handles[k] + offset)[0] != 0
    return found


def node_of(array: Any) -> Any:
    """What names the node on the tape that made an array, for as long as the node lives; None if that is not known."""
    offset = _entry_offset()
    return None if offset is None else _word(array, offset)


@functools.lru_cache(maxsize=1)
def _entry_offset() -> int | None:
    """Where an NDArray keeps the pointer to its node on the tape.

    MXNet has no function that answers quickly for an array that is not on the tape: MXAutogradGetSymbol throws, which
    costs 9 microseconds for every leaf of a flush. The pointer is found by looking at arrays of both kinds; where it is
    not found beyond doubt, None, and the slow question is asked.
    """
    plain, taped = [], []
    for shape in ((1,), (3, 4), (2, 3, 4, 5, 6, 7)):
        for dtype in ("float32", "float64"):
            variable = mx.nd.ones(shape, dtype=dtype)
            variable.attach_grad()
            with autograd.record():
                result = variable * 2
            taped += [variable, result, result.reshape((-1,))]
            plain += [mx.nd.ones(shape, dtype=dtype), result.detach(), mx.nd.ones(shape, dtype=dtype) * 2,
                      mx.nd.empty(shape, dtype=dtype)[0:1]]
    if any(on_tape(x) for x in plain) or not all(on_tape(x) for x in taped[::3] + taped[1::3]):
        return None
    fitting = [offset for offset in range(0, 160, 8)
               if all(_word(x, offset) is None for x in plain) and all(_word(x, offset) is not None for x in taped[::3])
               and all(_word(x, offset) is not None for x in taped[1::3])]
    return fitting[0] if fitting else None


def _word(array: Any, offset: int) -> int | None:
    return ctypes.c_void_p.from_address(array.handle.value + offset).value
