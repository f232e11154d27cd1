"""The scope: `with gdb.batching():`, its statistics, and the hooks that belong to it."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from dataclasses import dataclass, field
from typing import Any

from cavs_core import listening
from cavs_core.mxnet_compat import autograd, mx

from .recorder import Recorder

__all__ = ["Stats", "Scope", "batching", "current_scope", "flush"]


class _Local(threading.local):
    scope: Any = None


_local = _Local()


@dataclass
class Stats:
    """What a scope did. Times are milliseconds until work was handed to the device."""

    calls: int = 0
    launches: int = 0
    flushes: int = 0
    ops: int = 0                                            # operators and regions that forward started
    backward_ops: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)     # reason -> number of calls that ran alone
    analyze_ms: float = 0.0
    execute_ms: float = 0.0
    backward_ms: float = 0.0

    def note_flush(self, calls, reason, recording, scanned, grouping, plans, run, analyze_ms, execute_ms) -> None:
        self.flushes += 1
        self.calls += len(calls.call_class)
        self.launches += len(grouping.order)
        self.ops += run.launched
        self.analyze_ms += analyze_ms
        self.execute_ms += execute_ms

    def note_backward(self, ops: int, ms: float) -> None:
        self.backward_ops += ops
        self.backward_ms += ms


class Scope:
    """One `with gdb.batching()` block."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.recorder = Recorder(self)

    def flush(self) -> None:
        """Run everything that was recorded so far."""
        if self.recorder.calls.call_class:
            self.recorder.calls.flush("flush() was called")


def current_scope() -> Scope | None:
    return _local.scope


def flush() -> None:
    """Run everything that the scope of this thread has recorded so far."""
    if _local.scope is not None:
        _local.scope.flush()


@contextlib.contextmanager
def batching():
    """Record what is called inside, and run it batched."""
    outer = _local.scope
    if outer is not None:                       # nested scopes join the outer one
        yield outer
        return
    scope = _local.scope = Scope()
    collecting = gc.isenabled()
    gc.disable()                                # the collector would walk every recorded call, again and again
    try:
        with listening(scope.recorder), _watching(scope.recorder):
            yield scope
            if scope.recorder.calls.call_class:
                scope.recorder.calls.flush("the scope ended")
    except BaseException:
        scope.recorder.calls.discard()
        raise
    finally:
        _local.scope = None
        if collecting:
            gc.enable()


# ---- hooks of a scope, beside those of the listener -------------------------------------------

_watchers = 0
_watch_lock = threading.Lock()
_originals: dict[tuple[Any, str], Any] = {}
_WRITING = ("pull", "pushpull", "row_sparse_pull", "broadcast")     # methods of a KVStore that write their `out`


@contextlib.contextmanager
def _watching(recorder: Recorder):
    """Tell the recorder of this thread when autograd's state is switched, and before arrays are written past the
    operators."""
    global _watchers
    with _watch_lock:
        if _watchers == 0:
            _install()
        _watchers += 1
    recorder.recording, recorder.training = autograd.is_recording(), autograd.is_training()
    try:
        yield
    finally:
        with _watch_lock:
            _watchers -= 1
            if _watchers == 0:
                for (owner, name), original in _originals.items():
                    setattr(owner, name, original)
                _originals.clear()


def _install() -> None:
    def replace(owner: Any, name: str, make: Any) -> None:
        if name in vars(owner):
            _originals[owner, name] = vars(owner)[name]
            setattr(owner, name, functools.wraps(vars(owner)[name])(make(vars(owner)[name])))

    def setter(what: str) -> Any:
        def make(original: Any) -> Any:
            def switch(state):
                if _local.scope is not None:
                    setattr(_local.scope.recorder, what, bool(state))
                return original(state)
            return switch
        return make

    def copying(original: Any) -> Any:
        def copy_from(self, source):
            if _local.scope is not None:
                _local.scope.recorder.before_write(self)
            return original(self, source)
        return copy_from

    def storing(original: Any) -> Any:
        def store(self, *args, **kwargs):
            if _local.scope is not None:
                _local.scope.flush()
            return original(self, *args, **kwargs)
        return store

    replace(autograd, "set_recording", setter("recording"))
    replace(autograd, "set_training", setter("training"))
    replace(mx.nd.NDArray, "_sync_copyfrom", copying)
    for name in _WRITING:
        replace(mx.kvstore.KVStore, name, storing)
