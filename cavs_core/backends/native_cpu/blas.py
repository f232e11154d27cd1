"""numpy's BLAS, by address: the products of compiled code, and how many threads they may use.

numpy carries the library with it; looking a name up in numpy's own extension module finds it. The sizes are int64
(names with `64_`) or int32 (distributions, MKL). Both are called with int64: on the machines that MXNet runs on an
integer argument fills a register or 8 bytes of the stack, of which an int32 function reads the lower half.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

__all__ = ["available", "reason", "gemm_address", "num_threads", "set_num_threads", "thread_setter", "one_thread"]

_LETTERS = {"float32": "s", "float64": "d"}
_GEMM = ("cblas_{}gemm64_", "scipy_cblas_{}gemm64_", "cblas_{}gemm")
#: setter and getter of the number of threads
_THREADS = (("openblas_set_num_threads64_", "openblas_get_num_threads64_"),
            ("scipy_openblas_set_num_threads64_", "scipy_openblas_get_num_threads64_"),
            ("openblas_set_num_threads", "openblas_get_num_threads"),
            ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"))


@cache
def _library() -> ctypes.CDLL | None:
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        with contextlib.suppress(ImportError, OSError):
            return ctypes.CDLL(importlib.import_module(module).__file__)
    return None


@cache
def gemm_address(dtype: str) -> int:
    """The address of cblas_sgemm or cblas_dgemm; 0 if there is none."""
    for name in _GEMM:
        function = getattr(_library(), name.format(_LETTERS[dtype]), None)
        if function is not None:
            return _address(function)
    return 0


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _thread_functions():
    for setter, getter in _THREADS:
        if hasattr(_library(), setter) and hasattr(_library(), getter):
            return getattr(_library(), setter), getattr(_library(), getter)
    return None


def available() -> bool:
    """Whether compiled code can call numpy's BLAS."""
    return bool(gemm_address("float32") and gemm_address("float64"))


def reason() -> str:
    """Why BLAS is not available; empty if it is."""
    if available():
        return ""
    return "numpy's extension module could not be opened" if _library() is None else \
        f"numpy's BLAS offers none of {', '.join(name.format('s') for name in _GEMM)}"


def num_threads() -> int:
    """How many threads a product of numpy's BLAS uses; 1 if it cannot be asked."""
    functions = _thread_functions()
    return functions[1]() if functions else 1


@cache
def thread_setter() -> int:
    """The address of the function that sets the number of threads; 0 if there is none."""
    functions = _thread_functions()
    return _address(functions[0]) if functions else 0


def set_num_threads(count: int) -> None:
    functions = _thread_functions()
    if functions:
        functions[0](count)


class _OneThread:
    """How many scopes want BLAS at one thread, and what the first of them found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before = 1

    def enter(self) -> None:
        with self.lock:
            if self.depth == 0:
                self.before = num_threads()
                if self.before != 1:
                    set_num_threads(1)
            self.depth += 1

    def leave(self) -> None:
        with self.lock:
            self.depth = max(self.depth - 1, 0)     # 0 already: this scope was entered before a fork
            if self.depth == 0 and self.before != 1:
                set_num_threads(self.before)

    def after_fork(self) -> None:
        """The scopes of other threads do not exist in a child."""
        held, self.lock, self.depth = self.depth, threading.Lock(), 0
        if held and self.before != 1:
            set_num_threads(self.before)


_scopes = _OneThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_scopes.after_fork)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """BLAS at one thread for all threads of the process; the last of several scopes to end restores it."""
    _scopes.enter()
    try:
        yield
    finally:
        _scopes.leave()
