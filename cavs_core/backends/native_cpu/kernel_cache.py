"""Compiled kernels, kept on disk from process to process.

A kernel is a file of its own, whose name is the hash of all that it is made of: its source, the functions that it
calls, and the versions of numba and of this package. numba keeps the machine code beside it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from tqdm import tqdm

from ...compiling import cache_folder

__all__ = ["compile_kernels", "counts", "missing"]

_PACKAGE = "gluon_dynbatch"
_HELPERS = ("mathlib.py", "pointers.py")        # what kernels import
_MTIME = 1_000_000_000                          # older numba compares times, not contents
_lock = threading.RLock()
_kernels: dict[str, Any] = {}                   # source -> compiled function, for good: others hold its address
_counts = {"compiled": 0, "loaded": 0}


def counts() -> dict[str, int]:
    """How many kernels this process compiled, and how many it found on disk."""
    with _lock:
        return dict(_counts)


def compile_kernels(sources: Sequence[str], quiet: bool = False) -> list[int]:
    """The addresses of kernels: compiled, loaded from disk, or in this process already."""
    with _lock:
        new = [source for source in dict.fromkeys(sources) if source not in _kernels]
        missing = [source for source in new if not _machine_code(_path_of(source))]
        if missing:
            for source in tqdm(missing, f"compiling {len(missing)} kernels", file=sys.stderr, disable=quiet):
                _load(source)
        for source in new:
            if source not in _kernels:
                _load(source)
        return [_kernels[source].address for source in sources]


def missing(sources: Sequence[str]) -> int:
    """How many of these kernels would have to be compiled."""
    with _lock:
        return sum(source not in _kernels and not _machine_code(_path_of(source)) for source in dict.fromkeys(sources))


# ---- files -----------------------------------------------------------------------------------------------------------

@cache
def _common_hash() -> bytes:
    """Of what all kernels share."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:     # run from a checkout
        version = ""
    digest = hashlib.sha256(f"{numba.__version__} {version}".encode())
    for name in _HELPERS:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.digest()


def _path_of(source: str) -> Path:
    return cache_folder() / f"kernel_{hashlib.sha256(_common_hash() + source.encode()).hexdigest()[:24]}.py"


def _machine_code(path: Path) -> list[Path]:
    """What numba wrote for a kernel."""
    folder = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else path.parent
    return list(folder.rglob(f"{path.stem}.*.nb?"))


def _write(path: Path, source: str) -> None:
    """Put the file there in one step: another process may do the same."""
    if path.is_file() and path.read_text(encoding="utf-8") == source:
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(source)
    os.utime(name, (_MTIME, _MTIME))
    os.replace(name, path)


def _load(source: str) -> None:
    path = _path_of(source)
    _write(path, source)
    try:
        kernel = _compiled(path, source)
    except Exception:
        leftovers = _machine_code(path)         # damaged, perhaps: once more without them
        if not leftovers:
            raise
        for file in leftovers:
            file.unlink(missing_ok=True)
        kernel = _compiled(path, source)
    _kernels[source] = kernel
    _counts["loaded" if kernel.cache_hits else "compiled"] += 1


def _compiled(path: Path, source: str) -> Any:
    module = sys.modules[path.stem] = ModuleType(path.stem)     # numba looks a function's module up by its name
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module.kernel
