"""The scope: `with gdb.batching():`, its statistics, and the hooks that belong to it."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

from cavs_core import CodeHook, Hooks, listening, thread_state, to_super_hook, wrap_backward
from cavs_core.mxnet_compat import autograd, mx

from .config import Config
from .known_vertices import let_export
from .recorder import Recorder
from .report import FlushReport, Stats, draw_launches, explain, launch_graph
from .studies.profiles import load_profile

__all__ = ["Scope", "batching", "flush"]


class _Local(threading.local):
    scope: Any = None


_local = _Local()


class Scope:
    """One `with gdb.batching()` block: what it recorded and what became of it."""

    def __init__(self, config: Config):
        self.config = config
        self.stats = Stats()
        self.flushes: list[FlushReport] = []
        self.recorder = Recorder(self)

    def flush(self) -> None:
        """Run everything that was recorded so far."""
        self.recorder.calls.flush("flush() was called")

    def explain(self, kernels: bool = False) -> str:
        """A readable plan: every launch with its rows, where it came from, and what was not batched and why.

        With `kernels` the source of every kernel that the native backend generated follows.
        """
        return explain(self.stats, self.flushes, kernels)

    def to_networkx(self) -> Any:
        """The launches as a networkx DiGraph."""
        return launch_graph(self.flushes)

    def draw(self, path: str) -> None:
        """Draw the launches; the ending of `path` chooses SVG, PNG or PDF."""
        draw_launches(self.flushes, path)


def flush() -> None:
    """Run everything that the scope of this thread has recorded so far."""
    if _local.scope is not None:
        _local.scope.flush()


@contextlib.contextmanager
def batching(policy: str = "auto", granularity: str = "auto", backend: str = "auto", check: bool = False,
             max_pending: int | None = None, analysis_budget: float = 0.05, profile: Any = None,
             drop_repeats: bool = True):
    """Record what is called inside, and run it batched: when a value is needed, and at the end of the scope.

    Values and gradients equal those of the same code without the scope. See `Config` for the options; `profile` names a
    file with those that `tune` found best, which stand for the ones that are not given. A scope inside a scope joins
    the outer one.

    Examples
    --------
    >>> with autograd.record(), batching() as scope:        # doctest: +SKIP
    ...     losses = [net(tree) for tree in batch]
    >>> autograd.backward(losses)                           # doctest: +SKIP
    """
    options = {"policy": policy, "granularity": granularity, "backend": backend}
    if profile is not None:
        found = load_profile(profile)
        options = {name: found.get(name, value) if value == "auto" else value for name, value in options.items()}
    config = Config(**options, check=check, max_pending=max_pending, analysis_budget=analysis_budget,
                    drop_repeats=drop_repeats)
    outer = _local.scope
    if outer is not None:                       # nested scopes join the outer one
        yield outer
        return
    wrap_backward()
    let_export()
    scope = _local.scope = Scope(config)
    collecting = gc.isenabled()
    gc.disable()                                # the collector would walk every recorded call, again and again
    try:
        with listening(scope.recorder), _watching(scope.recorder):
            yield scope
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


@contextlib.contextmanager
def _watching(recorder: Recorder):
    """Tell the recorder of this thread when autograd's state is switched, and before arrays are written past the
    operators."""
    global _watchers
    with _watch_lock:
        if _watchers == 0:
            for hooks in _all_hooks:
                hooks.install()
        _watchers += 1
    recorder.switch("recording", autograd.is_recording())
    recorder.switch("training", autograd.is_training())
    try:
        yield
    finally:
        with _watch_lock:
            _watchers -= 1
            if _watchers == 0:
                for hooks in _all_hooks:
                    hooks.remove()


def _setter(what: str) -> Any:
    def make(original: Any) -> Any:
        def switch(state):
            # (Not where nobody listens: a flush pauses autograd for itself, and lets it go on.)
            if _local.scope is not None and thread_state.listener is not None:
                _local.scope.recorder.switch(what, bool(state))
            return original(state)
        return switch
    return make


def _copying(original: Any) -> Any:
    def copy_from(self, source):
        if _local.scope is not None:
            _local.scope.recorder.before_write(self)
        return original(self, source)
    return copy_from


def _storing(original: Any) -> Any:
    def store(self, *args, **kwargs):
        if _local.scope is not None:
            _local.scope.flush()
        return original(self, *args, **kwargs)
    return store


def _replacing(original: Any) -> Any:
    def replace_arrays(self, *args, **kwargs):
        if _local.scope is not None and _local.scope.recorder.calls.uses_parameter(self):
            _local.scope.flush()
        return original(self, *args, **kwargs)
    return replace_arrays


def _setting(original: Any) -> Any:
    def set_attribute(self, name, value):
        if _local.scope is not None and thread_state.listener is _local.scope.recorder:
            _local.scope.recorder.before_change(self, name, value)
        return original(self, name, value)
    return set_attribute


def _attaching(original: Any) -> Any:
    def attach_grad(self, *args, **kwargs):
        if _local.scope is None:
            return original(self, *args, **kwargs)
        self.wait_to_read()
        with listening(None):                   # a gradient has memory of its own, not a row of some buffer
            return original(self, *args, **kwargs)
    return attach_grad


_all_hooks = (
    CodeHook(mx.gluon.Block, "__setattr__", to_super_hook, _setting, Hooks((mx.gluon.Block, "__setattr__", _setting))),
    Hooks((mx.nd.NDArray, "attach_grad", _attaching),
          *[(mx.gluon.Parameter, name, _replacing) for name in ("initialize", "_init_impl", "cast")],
          (autograd, "set_recording", _setter("recording")),
          (autograd, "set_training", _setter("training")),
          (mx.nd.NDArray, "_sync_copyfrom", _copying),
          *[(mx.kvstore.KVStore, name, _storing) for name in ("pull", "pushpull", "row_sparse_pull", "broadcast")]))
