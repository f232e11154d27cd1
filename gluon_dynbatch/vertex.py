"""The decorator: mark a HybridBlock, or a function f(F, *arrays), as one vertex of the dynamic graph."""

from __future__ import annotations

import functools
import types
from typing import Any

from cavs_core import thread_state
from cavs_core.mxnet_compat import gluon, mx

from .fastpath import compiled
from .known_vertices import vertex_key
from .recorder import Recorder
from .values import as_arrays

__all__ = ["vertex"]


def vertex(target: Any = None, *, name: str | None = None) -> Any:
    """Mark what is called once per vertex: inside `gdb.batching()` a call of it is recorded as one.

    Works bare and with arguments, on

    - a HybridBlock class: every instance is a vertex;
    - a HybridBlock instance: this one is;
    - a method or function ``f(F, *arrays)`` whose first argument is ``mx.nd``: so a plain Block whose `forward` walks a
      tree marks just the function of one node.

    Arguments are arrays, Python numbers or numpy arrays (taken as data, a number as an array of shape (1,)), and lists
    and tuples of them of any length. Outside a scope everything behaves as before.

    Parameters
    ----------
    name : str, optional
        What reports call it. Default: the name of the class or function.

    Examples
    --------
    >>> @vertex
    ... class Cell(gluon.HybridBlock):
    ...     def hybrid_forward(self, F, x, h):
    ...         return F.tanh(x + h)
    """
    if target is None:
        return functools.partial(vertex, name=name)
    if isinstance(target, type) and issubclass(target, gluon.HybridBlock):
        _mark(target, name)
        return target
    if isinstance(target, gluon.HybridBlock):
        old = type(target)
        members = {"__module__": old.__module__, "__qualname__": old.__qualname__, "__doc__": old.__doc__}
        new = type(old.__name__, (old,), members)
        _mark(new, name)
        target.__class__ = new
        return target
    if isinstance(target, gluon.Block) or (isinstance(target, type) and issubclass(target, gluon.Block)):
        kind = target if isinstance(target, type) else type(target)
        raise TypeError(f"@gdb.vertex on {kind.__name__}: it is a plain Block, whose code may differ from call to "
                        "call. Make it a HybridBlock, or mark the method that computes one node: `@gdb.vertex` on "
                        "def node(self, F, *arrays).")
    if callable(target):
        made = _VertexFunction(target, name)
        return made if compiled is None else functools.update_wrapper(
            compiled.Call(made, made, mx.nd), target)
    raise TypeError(f"@gdb.vertex: expected a HybridBlock or a function f(F, *arrays), got {target!r}")


def _mark(cls: Any, name: str | None) -> None:
    cls.__call__ = _make_call(cls, name)
    if compiled is not None:
        compiled.shorten(cls)


def _make_call(cls: type, name: str | None) -> Any:
    own = cls.__dict__.get("__call__")

    def plain(self, *args):
        return own(self, *args) if own is not None else super(cls, self).__call__(*args)

    @functools.wraps(own or gluon.Block.__call__)
    def __call__(self, *args):
        listener = thread_state.listener
        if listener is not None and not self._forward_hooks and not self._forward_pre_hooks:
            record = listener.vertices.get(id(self))
            if record is not None:
                return record(args)
            if type(listener) is Recorder and listener.records_vertices:
                return listener.record_vertex(self, None, plain, name or self, args)
        return plain(self, *as_arrays(args))

    if compiled is None:
        return __call__
    return functools.update_wrapper(compiled.Call(__call__), __call__)


class _VertexFunction:
    """A function f(F, *arrays), or a method f(self, F, *arrays) of an object."""

    def __init__(self, function: Any, name: str | None):
        @functools.wraps(function)
        def method(obj: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(obj, self._run_method, (obj,), args, kwargs)

        functools.update_wrapper(self, function)
        self._function, self._name, self._method = function, name or function.__qualname__, method
        code = getattr(function, "__code__", None)
        self._takes_object = code is not None and code.co_varnames[:1] == ("self",)

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else types.MethodType(self._method, obj)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the function; or of the method, as its class has it: the object comes first."""
        if args and args[0] is not mx.nd and (self._takes_object or (len(args) > 1 and args[1] is mx.nd)):
            return self._method(*args, **kwargs)
        return self._call(self, self._run_function, (), args, kwargs)

    def _call(self, identity: Any, run: Any, before: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(f"{self._name}: a vertex function takes its arguments by position, got {sorted(kwargs)}")
        if not args or args[0] is not mx.nd:
            raise TypeError(f"{self._name}: the first argument of a vertex function is F = mx.nd, got "
                            f"{args[0] if args else 'nothing'!r}")
        listener = thread_state.listener
        if listener is not None:
            record = listener.vertices.get(vertex_key(identity, self))
            if record is not None:
                return record(args[1:])
            if type(listener) is Recorder and listener.records_vertices:
                return listener.record_vertex(identity, self, run, self._name, args[1:])
        return self._function(*before, mx.nd, *as_arrays(args[1:]))

    def _run_function(self, _: Any, *arrays: Any) -> Any:
        return self._function(mx.nd, *arrays)

    def _run_method(self, obj: Any, *arrays: Any) -> Any:
        return self._function(obj, mx.nd, *arrays)
