"""Block or function -> Program: its code runs once on placeholders with F = mx.nd, children included."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .code_reads import CodeReads
from .errors import ProgramError, TraceError
from .lazy import LazyArray, Listener, listening
from .mxnet_compat import autograd, gluon, mx
from .ops import TABLE, Builder
from .program import ROW, SHARED, Arg, Const, Param, Program, Spec
from .tape_state import needs_gradient

__all__ = ["Tracer", "ChildArray", "flatten", "inactive", "map_nested", "sequence_like", "trace"]

NDArray = mx.nd.NDArray
_DRAWS = ("_random_", "_sample_", "_shuffle", "_npi_uniform", "_npi_normal")     # how such operators' names begin


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

    has_values = settled = False

    def __init__(self, name: str, ctx):
        self.builder = Builder(Program(name=name))
        self.context = ctx
        self.name = name
        self.reads = CodeReads()
        self._outside: dict[int, tuple[Any, int]] = {}      # id of an array -> (the array, its value)
        self._views: set[int] = set()                       # values that share memory with another
        self._blocks: list[str] = []                        # the blocks whose code is running
        self._seen: dict[int, tuple[Any, dict]] = {}        # id of a block -> (the block, its attributes before)

    # ---- the owner of LazyArrays -------------------------------------------------------------

    def spec_of(self, value: int):
        spec = self.builder.specs[value]
        return spec.shape, spec.dtype

    def context_of(self, value: int):
        return self.context

    def numpy_of(self, array: LazyArray):
        return None                     # ask for the value itself, and hear why there is none

    def value_of(self, array: LazyArray):
        raise TraceError(
            f"{self.name}: the code asks for the value of an array (asnumpy, asscalar, bool, x[:] = ...) while it is "
            "traced; a vertex function is static. Take the decision outside, or use F.where.")

    def note_view(self, view: LazyArray, base: LazyArray, make: Any) -> None:
        self._views.update((view.token, base.token))

    def array(self, value: int) -> LazyArray:
        kind = self.builder.specs[value].kind
        array = (ChildArray if kind == "child" else LazyArray)()
        array.owner, array.token = self, value
        return array

    def input(self, spec: Spec, source: Any) -> LazyArray:
        return self.array(self.builder.input(spec, source))

    def emit(self, name: str, *arrays: NDArray, **attrs: Any) -> LazyArray:
        values = self.builder.call(name, [self.value_for(x, name) for x in arrays], attrs)
        return self.array(values[0])

    # ---- the listener ------------------------------------------------------------------------

    def on_parameter(self, parameter, array) -> LazyArray:
        """A placeholder, so that slices and reshapes of a parameter are heard too. One parameter is one value."""
        known = [v for v in self.builder.program.inputs_of(Param)
                 if self.builder.program.inputs[v].parameter is parameter]
        if known:
            return self.array(known[0])
        return self.input(self._shared_spec(array, parameter.name), Param(parameter, parameter.name))

    def on_hybrid_call(self, block, args, call):
        """A hybridized child is traced through its own code, not through its cached graph."""
        if isinstance(block, gluon.SymbolBlock):
            raise TraceError(f"{self.name}: {_title(block)} is a SymbolBlock: a stored graph without code to trace.")
        with self.reads.inside(block), inactive(block):
            return block.forward(*args)

    def on_operator(self, name, arrays, attrs, out, call):
        # An operator on outside arrays alone makes a constant, and runs.
        if not any(isinstance(x, LazyArray) for x in arrays):
            if name.startswith(_DRAWS) or (name == "Dropout" and autograd.is_training()):
                raise TraceError(f"{self.name}: `{name}` draws numbers without an operand while it is traced; they "
                                 "would be the same in every run. Pull them as an input, or use Dropout.")
            if any(id(x) in self._outside for x in flatten(out)):
                raise TraceError(f"{self.name}: `{name}` writes into an outside array that was read before while it is "
                                 "traced; write x = x + y instead.")
            return call()
        op = TABLE.get(name)
        if op is not None and "training" in op.attrs:
            attrs = {**attrs, "training": autograd.is_training()}
        self.builder.origin = self._where()
        values = self.builder.call(name, [self.value_for(x, name) for x in arrays], attrs)
        if out is not None:
            return self._rebound(name, out, values)
        made = [self.array(v) for v in values]
        return made[0] if len(made) == 1 else made

    def _rebound(self, name: str, out: Any, values: Sequence[int]) -> Any:
        """`x += y` makes x stand for the sum; views of x would have to follow, which a static program cannot say."""
        if not isinstance(out, LazyArray) or len(values) != 1:
            raise TraceError(f"{self.name}: `{name}` writes into an outside array (out=) while it is traced; "
                             "return the value instead.")
        if out.token in self._views or isinstance(self.builder.program.inputs.get(out.token), (Arg, Param)):
            raise TraceError(f"{self.name}: `{name}` writes in place into an argument, a parameter, or an array that "
                             "shares memory with another (a slice or a reshape); write x = x + y instead.")
        if out.shape != self.builder.shape(values[0]):
            raise ProgramError(f"{name}: cannot write shape {self.builder.shape(values[0])} into {out.shape}")
        out.token = values[0]
        return out

    def value_for(self, array: NDArray, used_by: str) -> int:
        """The value that an operand stands for."""
        if isinstance(array, LazyArray):
            if array.owner is not self:
                raise TraceError(f"{self.name}: `{used_by}` gets an array that belongs to another recording.")
            return array.token
        if id(array) not in self._outside:
            spec = self._shared_spec(array, used_by)
            if needs_gradient(array):
                raise TraceError(
                    f"{self.name}: `{used_by}` uses an outside array of shape {array.shape} that needs a gradient. "
                    "Make it a Parameter of the block, or pass it as an argument.")
            self._outside[id(array)] = (array, self.builder.input(spec, Const(array)))
        return self._outside[id(array)][1]

    def _shared_spec(self, array: NDArray, used_by: str) -> Spec:
        if array.stype != "default":
            raise TraceError(f"{self.name}: `{used_by}` has an array with storage {array.stype!r}; "
                             "only dense arrays can be traced.")
        return Spec(array.shape, np.dtype(array.dtype).name, SHARED)

    # ---- where the code is -------------------------------------------------------------------

    def _where(self) -> str:
        return self._blocks[-1] if self._blocks else self.name

    def on_block(self, block, args, call):
        self._see(block)
        self._blocks.append(_title(block))
        try:
            return call()
        finally:
            self._blocks.pop()

    @contextlib.contextmanager
    def running(self, root: Any = None):
        """Listen to the code of `root`, and check that no block kept one of the placeholders."""
        if isinstance(root, gluon.Block):
            self._see(root)
        try:
            # Recording, so that what is computed from outside arrays alone still tells that it needs a gradient.
            with listening(self), autograd.record(train_mode=autograd.is_training()), self.reads.noting():
                yield
        finally:
            kept = [f"`{key}` of {_title(block)}" for block, before in self._seen.values()
                    for key in _forget_placeholders(block, before)]
        if kept:
            raise TraceError(f"{self.name}: the attribute {kept[0]} keeps an array for the next call; "
                             "such a block has no static program.")

    def _see(self, root: Any) -> None:
        """Note the attributes of a block and its children before they run."""
        todo = [root]
        while todo:
            block = todo.pop()
            if id(block) not in self._seen:
                self._seen[id(block)] = (block, {k: (v, copy.copy(v) if isinstance(v, (list, dict)) else None)
                                                 for k, v in vars(block).items()})
                todo.extend(vars(block)["_children"].values())


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
    name = name or (_title(fn) if is_block else getattr(fn, "__name__", type(fn).__name__))
    flat = flatten(args)
    arrays = [x for x in flat if isinstance(x, NDArray)]
    tracer = Tracer(name, arrays[0].context if arrays else mx.current_context())
    count = iter(range(len(flat)))

    def placeholder(x):
        if x is None:
            return None
        if not isinstance(x, (Spec, NDArray)):
            raise TraceError(f"{name}: the argument {x!r} is neither an array nor a Spec; only arrays can be traced.")
        spec = x if isinstance(x, Spec) else Spec(x.shape, np.dtype(x.dtype).name, ROW)
        return tracer.input(spec, Arg(next(count)))

    placeholders = map_nested(placeholder, args)
    with tracer.running(fn):
        out = fn(*placeholders) if is_block else fn(mx.nd, *placeholders)
    results = flatten(out)
    if not results or not all(isinstance(r, NDArray) for r in results):
        raise TraceError(f"{name}: returned {out!r}; a traced function returns arrays, or lists of arrays.")
    program = tracer.builder.program
    program.outputs = [tracer.value_for(r, "return") for r in results]
    program.reads = tracer.reads
    return program


# ---- helpers ---------------------------------------------------------------------------------


def flatten(nested: Any) -> list[Any]:
    """The leaves of nested lists and tuples, without None."""
    if isinstance(nested, (list, tuple)):
        return [leaf for part in nested for leaf in flatten(part)]
    return [] if nested is None else [nested]


def map_nested(fn: Any, nested: Any) -> Any:
    """The same nesting of lists and tuples with fn(leaf) for every leaf."""
    if isinstance(nested, (list, tuple)):
        return sequence_like(nested, (map_nested(fn, part) for part in nested))
    return fn(nested)


def sequence_like(example: Any, parts: Iterable[Any]) -> Any:
    """A list or tuple of the type of `example`, which may be a named tuple."""
    make = getattr(type(example), "_make", type(example))
    return make(parts)


@contextlib.contextmanager
def inactive(block: Any):
    """Run a hybridized block as if it were not."""
    attributes = vars(block)            # (past MXNet, which takes an attribute for a change of the block)
    attributes["_active"] = False
    try:
        yield
    finally:
        attributes["_active"] = True


def _title(block: Any) -> str:
    return f"{type(block).__name__} {block.name}"


def _holds_placeholder(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_placeholder(v) for v in value)
    return isinstance(value, LazyArray)


def _forget_placeholders(block: Any, before: dict[str, Any]) -> list[str]:
    """Give attributes that hold placeholders (zoneout, variational dropout) what they held before; their names."""
    attributes = vars(block)
    kept = [key for key, value in attributes.items() if _holds_placeholder(value)]
    for key in kept:
        if key not in before:
            del attributes[key]
            continue
        attributes[key], contents = before[key]
        if isinstance(contents, list):
            attributes[key][:] = contents
        elif contents is not None:
            attributes[key].clear()
            attributes[key].update(contents)
    return kept
