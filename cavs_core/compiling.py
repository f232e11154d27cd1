"""Compiled loops, kept on disk; and where that is."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

__all__ = ["cache_folder", "compiled", "kept_on_disk"]

_PACKAGE = "gluon_dynbatch"
_lock = threading.RLock()

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile a function at its first call, or load it from disk; it runs without the GIL.

    numba compiles anew when the function's own file has changed, and only then. But compiled code has the constants
    and functions of other files in it: so they are part of the name that it is kept by.
    """
    stamp = _stamp(function.__globals__)
    if stamp:
        function.__qualname__ += f"_{stamp:08x}"
    made: _F = kept_on_disk(lambda: njit(cache=True, nogil=True)(function))
    return made


def kept_on_disk(make: Callable[[], Any]) -> Any:
    """What `make` gives: a function that numba is told to keep on disk. As a rule it lies beside its source.

    numba refuses where neither that folder nor the user's cache can be written; then it lies in ours.
    """
    try:
        return make()
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
    with _lock:
        before, config.CACHE_DIR = config.CACHE_DIR, str(cache_folder())
        try:
            return make()
        finally:
            config.CACHE_DIR = before


def cache_folder() -> Path:
    """Where compiled code and measurements are kept: DYNBATCH_CACHE, or the user's cache folder, or a temporary one if
    that cannot be written."""
    given = os.environ.get("DYNBATCH_CACHE")
    if given:
        return _writable(Path(given))
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")      # (as it is, if the user has no home)
    return _writable(Path(user) / _PACKAGE)


@cache
def _writable(folder: Path) -> Path:
    try:
        if not folder.is_absolute() and str(folder).startswith("~"):
            raise OSError("there is no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        return _temporary(f"{folder} cannot be written ({error.strerror or error})")


_made: list[Path] = []          # the temporary folder of this process, once it has one


def _temporary(reason: str) -> Path:
    with _lock:
        if not _made:
            _made.append(Path(tempfile.mkdtemp(prefix=f"{_PACKAGE}-")))
            atexit.register(shutil.rmtree, _made[0], ignore_errors=True)
            print(f"{_PACKAGE}: {reason}; what is compiled is kept in {_made[0]} until this process ends. Set "
                  "DYNBATCH_CACHE to a folder that can be written to keep it for good", file=sys.stderr, flush=True)
        return _made[0]


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
