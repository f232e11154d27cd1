"""Compiled functions with an address, kept on disk.

numba notices a change of the file that a function stands in, but not of the files it uses; so the names under which
our functions are kept hold a checksum of what they share.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from numba import cfunc, types

from ...compiling import kept_on_disk

__all__ = ["Compiled", "compile_function"]

_SOURCES = ("intrinsics.py", "tiles.py", "panels.py", "ops.py", "pointers.py", "mxnet_calls.py", "sparse_memory.py",
            "update_loops.py")


@lru_cache(maxsize=1)
def _checksum() -> str:
    folder = Path(__file__).parent
    return f"{zlib.crc32(b''.join((folder / name).read_bytes() for name in _SOURCES)):08x}"


class Compiled(NamedTuple):
    """A function for compiled code (by address) and for Python (numbers and addresses; without the GIL)."""

    address: int
    call: Callable[..., Any]
    keeper: Any                 # of the machine code


def compile_function(function: FunctionType, signature: Any, variant: str = "") -> Compiled:
    """Compile a function of integers and pointers, or load it from disk.

    A function that is compiled for several signatures needs a `variant` name for each: then each has a cache file of
    its own, and processes that start at once cannot mix them up.
    """
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__,
                        function.__closure__)
    twin.__module__ = function.__module__
    twin.__qualname__ = "_".join(filter(None, (function.__name__, variant, _checksum())))
    made = kept_on_disk(lambda: cfunc(signature, cache=True, error_model="numpy")(twin))
    if not made.cache_hits:
        _say_so()
    result = None if signature.return_type is types.void else ctypes.c_int64
    return Compiled(made.address, ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * len(signature.args))(made.address), made)


@lru_cache(maxsize=1)
def _say_so() -> None:
    """The first function that is not on disk is small; large ones follow."""
    print("gluon_dynbatch: compiling the engine for this processor, about 20 s; then it is kept on disk",
          file=sys.stderr, flush=True)
