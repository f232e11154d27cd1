"""Block or function -> Program: its code runs once on placeholders with F = mx.nd, children included."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import ProgramError, TraceError
from .lazy import LazyArray, Listener, listening
from .mxnet_compat import autograd, gluon, mx
from .ops import TABLE, Builder
from .program import ROW, SHARED, Arg, Const, Param, Program, Spec

__all__ = ["Tracer", "ChildArray", "trace"]

NDArray = mx.nd.NDArray
_VIEWS = ("Reshape", "slice")           # in MXNet these may share memory with their operand


class ChildArray(LazyArray):
    """A value of every child: without arguments, `sum`, `max` and `mean` reduce over the children."""

    __slots__ = ()

    def _reduce(self, name, args, kwargs):
        if args or kwargs:
            return getattr(LazyArray, name)(self, *args, **kwargs)
        return self.owner.emit("child_" + name, self)

    def sum(self, *args, **kwargs):
        return self._reduce("sum", args, kwargs)

    def max(self, *args, **kwargs):
        return self._reduce("max", args, kwargs)

    def mean(self, *args, **kwargs):
        return self._reduce("mean", args, kwargs)


class Tracer(Listener):
    """Turns the operator calls that it hears into instructions. It owns the placeholders that stand for values."""

    def __init__(self, name: str, ctx):
        self.builder = Builder(Program(name=name))
        self.context = ctx
        self.name = name
        self._outside: dict[int, tuple[Any, int]] = {}      # id of an array -> (the array, its value)
        self._parameters: dict[int, tuple[Any, Any]] = {}   # id of an array -> (the array, its parameter)
        self._views: set[int] = set()                       # values that share memory with another
        self._blocks: list[str] = []

    # ---- the owner of LazyArrays -------------------------------------------------------------

    def spec_of(self, value: int):
        spec = self.builder.specs[value]
        return spec.shape, spec.dtype

    def value_of(self, array: LazyArray):
        raise TraceError(
            f"{self.name}: the code asks for the value of an array (asnumpy, asscalar, bool, print, ...) while it is "
            "traced; a vertex function is static. Take the decision outside, or use F.where.")

    def released(self, value: int) -> None:
        pass

    def array(self, value: int) -> LazyArray:
        kind = self.builder.specs[value].kind
        return (ChildArray if kind == "child" else LazyArray)(self, value)

    def input(self, spec: Spec, source: Any) -> LazyArray:
        return self.array(self.builder.input(spec, source))

    def emit(self, name: str, *arrays: NDArray, **attrs: Any) -> LazyArray:
        values = self.builder.call(name, [self.value_for(x, name) for x in arrays], attrs)
        return self.array(values[0])

    # ---- the listener ------------------------------------------------------------------------

    def on_parameter(self, parameter, array) -> None:
        self._parameters[id(array)] = (array, parameter)

    def on_hybrid_call(self, block, args, call):
        """A hybridized child is traced through its own code, not through its cached graph."""
        with _inactive(block):
            return block.forward(*args)

    def on_operator(self, name, arrays, attrs, out, call):
        # An operator on outside arrays alone makes a constant, and runs; on a parameter it is part of the program.
        if not any(isinstance(x, LazyArray) or id(x) in self._parameters for x in arrays):
            if name.startswith(("_random_", "_sample_", "_shuffle", "_npi_", "sample_")):
                raise TraceError(f"{self.name}: `{name}` draws numbers without an operand while it is traced; they "
                                 "would be the same in every run. Pull them as an input, or use Dropout.")
            return call()
        if not any(isinstance(x, LazyArray) for x in arrays) and out is not None and not isinstance(out, LazyArray):
            return call()               # e.g. an initializer writing a parameter
        op = TABLE.get(name)
        if op is not None and "training" in op.attrs:
            attrs = {**attrs, "training": autograd.is_training()}
        self.builder.origin = self._where()
        values = self.builder.call(name, [self.value_for(x, name) for x in arrays], attrs)
        if name in _VIEWS:
            self._views.update((*values, self.value_for(arrays[0], name)))
        if out is not None:
            return self._rebound(name, out, values)
        made = [self.array(v) for v in values]
        return made[0] if len(made) == 1 and name not in ("SliceChannel", "_split_v2") else made

    def _rebound(self, name: str, out: Any, values: Sequence[int]) -> Any:
        """`x += y` makes x stand for the sum; views of x would have to follow, which a static program cannot say."""
        if not isinstance(out, LazyArray) or len(values) != 1:
            raise TraceError(f"{self.name}: `{name}` writes into an outside array (out=) while it is traced; "
                             "return the value instead.")
        if out.token in self._views:
            raise TraceError(f"{self.name}: `{name}` writes in place into an array that shares memory with another "
                             "(a slice or a reshape); write x = x + y instead.")
        if out.shape != self.builder.shape(values[0]):
            raise ProgramError(f"{name}: cannot write shape {self.builder.shape(values[0])} into {out.shape}")
        out.rebind(values[0])
        return out

    def value_for(self, array: NDArray, used_by: str) -> int:
        """The value that an operand stands for."""
        if isinstance(array, LazyArray):
            if array.owner is not self:
                raise TraceError(f"{self.name}: `{used_by}` gets an array that belongs to another recording.")
            return array.token
        if id(array) not in self._outside:
            spec = Spec(array.shape, np.dtype(array.dtype).name, SHARED)
            if id(array) in self._parameters:
                parameter = self._parameters[id(array)][1]
                source: Any = Param(parameter, parameter.name)
            else:
                if array.stype != "default":
                    raise TraceError(f"{self.name}: `{used_by}` gets an array with storage {array.stype!r}; "
                                     "only dense arrays can be traced.")
                if array.grad is not None:
                    raise TraceError(
                        f"{self.name}: `{used_by}` uses an outside array of shape {array.shape} that needs a gradient. "
                        "Make it a Parameter of the block, or pass it as an argument.")
                source = Const(array)
            # The same parameter is one value, whichever array object brought it.
            known = [v for v, s in self.builder.program.inputs.items() if s == source]
            self._outside[id(array)] = (array, known[0] if known else self.builder.input(spec, source))
        return self._outside[id(array)][1]

    # ---- where the code is -------------------------------------------------------------------

    def _where(self) -> str:
        return self._blocks[-1] if self._blocks else self.name

    def on_block(self, block, args, call):
        self._blocks.append(f"{type(block).__name__} {block.name}")
        try:
            return call()
        finally:
            self._blocks.pop()

    @contextlib.contextmanager
    def running(self, root: Any = None):
        """Listen to the code of `root`, and check that it kept none of the placeholders."""
        with listening(self), autograd.pause(train_mode=autograd.is_training()):
            yield
        if isinstance(root, gluon.Block):
            _check_no_leftovers(root, self.name)


def trace(fn: Any, *args: Any, name: str | None = None) -> Program:
    """Trace a block, or a function ``f(F, *arrays)``, on placeholders.

    Parameters
    ----------
    fn : Block or callable
    args : NDArrays, Specs, or nested lists and tuples of them
        What one sample passes. Only shape, dtype and context are read. None is passed on.
    name : str, optional

    Returns
    -------
    Program whose inputs of source Arg(i) are the flattened arguments; its outputs are the flattened results.
    """
    is_block = isinstance(fn, gluon.Block)
    name = name or (f"{type(fn).__name__} {fn.name}" if is_block else getattr(fn, "__name__", type(fn).__name__))
    flat = _flatten(args)
    arrays = [x for x in flat if isinstance(x, NDArray)]
    tracer = Tracer(name, arrays[0].context if arrays else mx.current_context())
    count = iter(range(len(flat)))

    def placeholder(x):
        if x is None:
            return None
        spec = x if isinstance(x, Spec) else Spec(x.shape, np.dtype(x.dtype).name, ROW)
        return tracer.input(spec, Arg(next(count)))

    placeholders = _map_nested(placeholder, args)
    with tracer.running(fn):
        out = fn(*placeholders) if is_block else fn(mx.nd, *placeholders)
    results = _flatten(out)
    if not results or not all(isinstance(r, NDArray) for r in results):
        raise TraceError(f"{name}: returned {out!r}; a traced function returns arrays, or lists of arrays.")
    program = tracer.builder.program
    program.outputs = [tracer.value_for(r, "return") for r in results]
    return program


# ---- helpers ---------------------------------------------------------------------------------


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, (list, tuple)):
        return [leaf for part in nested for leaf in _flatten(part)]
    return [] if nested is None else [nested]


def _map_nested(fn: Any, nested: Any) -> Any:
    if isinstance(nested, (list, tuple)):
        return type(nested)(_map_nested(fn, part) for part in nested)
    return fn(nested)


@contextlib.contextmanager
def _inactive(block: Any):
    """Run a hybridized block as if it were not."""
    block._active = False
    try:
        yield
    finally:
        block._active = True


def _check_no_leftovers(root: Any, name: str) -> None:
    """A block that keeps an array for its next call (zoneout, variational dropout) is not static."""
    todo = [root]
    while todo:
        block = todo.pop()
        todo.extend(block._children.values())
        for key, value in vars(block).items():
            if isinstance(value, LazyArray) or (isinstance(value, (list, tuple))
                                                and any(isinstance(v, LazyArray) for v in value)):
                raise TraceError(f"{name}: {type(block).__name__} {block.name} keeps an array in its attribute "
                                 f"`{key}` for its next call; such a block has no static program.")
