"""Compiled loops, kept on disk."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

__all__ = ["compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile a function at its first call, or load it from disk; it runs without the GIL.

    numba compiles anew when the function's own file has changed, and only then. But compiled code has the constants
    and functions of other files in it: so they are part of the name that it is kept by.
    """
    stamp = _stamp(function.__globals__)
    if stamp:
        function.__qualname__ += f"_{stamp:08x}"
    made: _F = njit(cache=True, nogil=True)(function)
    return made


@cache
def _checksum(path: str) -> int:
    """Of a file, which does not change while it is imported."""
    return zlib.crc32(Path(path).read_bytes())


def _stamp(names: dict[str, Any]) -> int:
    """A checksum of the numbers that a file knows, and of the compiled functions that it has from others; 0: none."""
    found = 0
    for name, value in sorted(names.items()):
        what = b""
        if type(value) in (bool, int, float):
            what = repr(value).encode()
        elif isinstance(value, (Dispatcher, _Intrinsic)):
            source = value.py_func if isinstance(value, Dispatcher) else value._defn
            if source.__globals__ is not names:
                what = f"{_checksum(source.__code__.co_filename)} {source.__qualname__}".encode()
        if what:
            found = zlib.crc32(name.encode() + what, found)
    return found
