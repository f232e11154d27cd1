"""What traced code read of blocks: a program stands for the code as long as that stays the same.

Code that is not hybridized runs anew in every call, as MXNet has it, so every attribute that it reads counts. A
hybridized block runs a cached graph, which stays as it is until MXNet clears it (`hybridize()`, `cast`, another child):
of such a block and of all blocks inside only that counts.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from .mxnet_compat import gluon

__all__ = ["CodeReads"]

_CLEARED = ("_active", "_cached_op_args")       # MXNet sets these when it clears a cached graph, to a new list
_MISSING = object()
_SCALARS = (bool, int, float, str)
_DEPTH = 3                                      # of lists in lists that are looked into


class CodeReads:
    """The attributes of blocks that some code read, and what they were."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[Any, Any]] = {}        # while the code runs: (block, value)
        self._inside = 0                                # hybridized blocks whose code is running
        self._kept: list[tuple[Any, str, Any]] = []     # (weak reference to a block, attribute, print of its value)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what code reads on this thread, but for what it changes itself (a counter): no program depends on it."""
        before, _local.reads = _local.reads, self
        _count(1)
        try:
            yield
        finally:
            _count(-1)
            _local.reads = before
            self._kept = [(weakref.ref(block), name, value if name in _CLEARED else _print_of(value))
                          for (_, name), (block, value) in self._found.items() if _attribute(block, name) is value]
            self._found = {}

    @contextlib.contextmanager
    def inside(self, block: Any) -> Iterator[None]:
        """The code of a hybridized block runs."""
        self.note(block, "_active")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def note(self, block: Any, name: str) -> None:
        if self._inside:
            return
        for attribute in (name, *_CLEARED):
            if (id(block), attribute) not in self._found:
                value = _attribute(block, attribute)
                if value is not _MISSING:
                    self._found[id(block), attribute] = block, value

    def are_current(self) -> bool:
        """Whether all attributes still are what they were."""
        for alive, name, was in self._kept:
            block = alive()
            if block is None or not _is_print_of(was, _attribute(block, name)):
                return False
        return True

    @staticmethod
    def is_change(block: Any, name: str, value: Any) -> bool:
        """Whether an attribute of a block would be another one. (A list always is.)"""
        return not _is_print_of(_attribute(block, name), value)

    def names(self) -> Iterator[tuple[int, str]]:
        """The attributes: ids of blocks, and names."""
        for alive, name, _ in self._kept:
            yield id(alive()), name


def _attribute(block: Any, name: str) -> Any:
    """An attribute of a block, or a constant of its class; no method and no property: their code reads for itself."""
    value = block.__dict__.get(name, _MISSING)
    if value is _MISSING:
        value = getattr(type(block), name, _MISSING)
        if hasattr(type(value), "__get__"):
            return _MISSING
    return value


class _Parts(list):
    """The prints of the parts of a list, tuple or dict, which may change in place."""


def _print_of(value: Any, depth: int = _DEPTH) -> Any:
    """What a value is known by. It is held only where it must be: it may hold the block that it was read from."""
    if depth and isinstance(value, (list, tuple, dict)):
        return _Parts([_print_of(part, depth - 1) for part in _parts_of(value)])
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_print_of(was: Any, value: Any) -> bool:
    if was is value:
        return True
    if type(was) is weakref.ref:
        return was() is value
    if type(was) is not _Parts:                 # (not by ==: 0.0 and -0.0 are two values, and NaN is one)
        return type(was) is type(value) and type(was) in _SCALARS and repr(was) == repr(value)
    parts = _parts_of(value) if isinstance(value, (list, tuple, dict)) else ()
    return len(was) == len(parts) and all(map(_is_print_of, was, parts))


def _parts_of(value: Any) -> Any:
    return [*value, *value.values()] if isinstance(value, dict) else value


# ---- attributes of blocks, as they are read ----------------------------------------------------


class _Local(threading.local):
    reads: CodeReads | None = None


_local = _Local()
_lock = threading.Lock()
_num_noting = 0                                 # on all threads


def _read(block: Any, name: str) -> Any:
    if _local.reads is not None and name[:2] != "__":
        _local.reads.note(block, name)
    return object.__getattribute__(block, name)


def _count(change: int) -> None:
    """Blocks tell what is read of them while a trace notes it."""
    global _num_noting
    with _lock:
        _num_noting += change
        if _num_noting == 1 and change == 1:
            gluon.Block.__getattribute__ = _read
        elif _num_noting == 0:
            del gluon.Block.__getattribute__
