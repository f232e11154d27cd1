"""An op is one object; the table maps MXNet's operator names to them; a Builder makes programs of them.

A plain op states five things:

    infer    shape rule      per-sample shapes and dtypes of the outputs
    rows     row rule        the same call on whole arrays with a new leading axis, as array instructions
    grad     gradient        as instructions of this table
    numpy    body            on whole arrays
    mxnet    body            on whole arrays; `F` is mx.sym when a region is compiled

A composite op states only `expand`: how it is written in plain ops; the five follow.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import KindError, ProgramError, UnsupportedOpError
from ..program import CHILD, ROW, SHARED, Instr, Program, Spec

__all__ = ["FEW_AXES", "TABLE", "Op", "Composite", "Builder", "register", "lookup", "Required", "normal_axis",
           "num_merged_axes", "axes_of", "mxnet_function"]

TABLE: dict[str, Op] = {}
#: MXNet runs some operators on float32 arrays of fewer axes, or as many, by oneDNN; which differs at NaN and infinities
FEW_AXES = 5


class Required:
    """Marks an attribute without a default."""


class Op:
    """A plain op. Subclasses or instances fill in the five rules."""

    #: attribute name -> default; values arrive as Python objects or as MXNet's strings
    attrs: dict[str, Any] = {}
    #: attributes that MXNet takes and that change nothing here
    ignored: tuple[str, ...] = ()
    #: a new row axis changes nothing: the call on whole arrays is the call on one sample
    rowwise = False
    #: a backward pass ends here: for what lies behind, the call does not exist
    leaves_tape = False
    #: how many axes MXNet's operators take here, and in the gradient; None if any number
    max_axes: int | None = None
    #: the same, where neighbours along which the same operands and results are 1 count as one axis
    max_merged_axes: int | None = None
    #: value and gradient are MXNet's on integers too
    integers = True

    def __init__(self, name: str):
        self.name = name

    def normalise(self, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in defaults and turn MXNet's attribute strings into Python values."""
        full = dict(self.attrs)
        for key, value in given.items():
            if key in full:
                full[key] = literal(value)
            elif self.attrs and key not in self.ignored and not key.startswith("__"):
                # an operator without any attributes takes no notice of them, as in MXNet
                raise ProgramError(f"{self.name}: unknown attribute {key}={value!r}; known: {sorted(self.attrs)}")
        for key, value in full.items():
            if value is Required:
                raise ProgramError(f"{self.name}: attribute {key!r} is missing")
        return full

    def why_apart(self, specs: Sequence[Spec]) -> str:
        """Why MXNet must compute a call on such operands by itself; empty if it need not."""
        own = not self.integers and not specs[0].is_float
        return f"{self.name}: the arithmetic of {specs[0].dtype} is MXNet's own" if own else ""

    def infer(self, a: dict[str, Any], *specs: Spec) -> list[tuple[tuple[int, ...], str]]:
        raise NotImplementedError(self.name)

    def kind(self, specs: Sequence[Spec]) -> str:
        """The kind of the outputs: that of the inputs, SHARED giving way."""
        kinds = {s.kind for s in specs} - {SHARED}
        if kinds == {ROW, CHILD}:
            raise KindError(
                f"`{self.name}` mixes a value of the vertex with a value of its children (from gather_all). "
                "Use v.spread(x) to show x to every child, or reduce the children with .sum(), .max() or .mean().")
        return kinds.pop() if kinds else SHARED

    def check_axes(self, shapes: Sequence[tuple[int, ...]], kind: str) -> None:
        """Refuse what MXNet's operators cannot do on rows of operands and results of these shapes."""
        for most, count_axes in ((self.max_axes, _widest), (self.max_merged_axes, num_merged_axes)):
            if most is not None and (count := count_axes(shapes) + (kind != SHARED)) > most:
                raise ProgramError(f"{self.name}: {count} axes, with that of the rows; MXNet takes {most} at most")

    def rows(self, e, a: dict[str, Any], *xs):
        """Default: the call itself, shared operands seen by every row as a leading axis of one."""
        if not self.rowwise:
            raise NotImplementedError(self.name)
        return e.emit(self.name, *[x.lift() for x in xs], **a)

    def splits_rows(self, a: dict[str, Any], specs: Sequence[Spec], split: Sequence[bool]) -> bool:
        """Whether the first axis of the operands in `split` is one of independent rows, in them and in the outputs."""
        return self.rowwise and all(part or s.shape[0] == 1 for s, part in zip(specs, split))

    def can_sum_rows(self, specs: Sequence[Spec]) -> bool:
        """Whether `summed_rows` makes the sum over all rows of the result without making the rows."""
        return False

    def summed_rows(self, e, a: dict[str, Any], *xs):
        raise NotImplementedError(self.name)

    def grad(self, b: Builder, a: dict[str, Any], xs: list[int], ys: list[int],
             dys: list[int | None]) -> list[int | None]:
        """Gradients of the inputs; an output that nobody reads has no gradient in `dys`."""
        return [None] * len(xs)

    def numpy(self, a: dict[str, Any], *xs):
        raise NotImplementedError(self.name)

    def mxnet(self, F, a: dict[str, Any], *xs):
        return mxnet_function(F, self.name)(*xs, **a)

    def alone(self, F, name: str, attrs: dict[str, Any], xs: Sequence[Any]) -> Any:
        """The call that was recorded, by MXNet itself: its name, attributes as they were given, and real arrays."""
        return mxnet_function(F, name)(*xs, **attrs)

    def build(self, b: Builder, a: dict[str, Any], xs: Sequence[int]) -> list[int]:
        specs = [b.specs[x] for x in xs]
        return b.append(self, a, xs, self.infer(a, *specs), self.kind(specs))


def _widest(shapes: Sequence[tuple[int, ...]]) -> int:
    return max(map(len, shapes))


def num_merged_axes(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many axes shapes of one length have when neighbours along which the same ones are broadcast are one."""
    return sum(1 for _ in itertools.groupby(zip(*shapes), lambda sizes: [n < max(sizes) for n in sizes]))


def mxnet_function(F, name: str) -> Any:
    """MXNet's function for an operator, by the operator's own name; `F` is mx.nd or mx.sym."""
    prefix, _, rest = name[1:].partition("_")
    for module, key in ((F, name), (F._internal, name), (getattr(F, prefix, None), rest)):
        if hasattr(module, key):
            return getattr(module, key)
    raise AttributeError(f"MXNet has no function for the operator {name}")


class Composite(Op):
    """An op that is written in other ops: `expand(b, a, *xs)` returns its output value(s)."""

    def expand(self, b: Builder, a: dict[str, Any], *xs: int):
        raise NotImplementedError(self.name)

    def build(self, b: Builder, a: dict[str, Any], xs: Sequence[int]) -> list[int]:
        out = self.expand(b, a, *xs)
        return list(out) if isinstance(out, (list, tuple)) else [out]


def register(op: Op, *aliases: str) -> Op:
    for name in (op.name, *aliases):
        if name in TABLE:
            raise AssertionError(f"op {name} is registered twice")
        TABLE[name] = op
    return op


def lookup(name: str, origin: str = "") -> Op:
    try:
        return TABLE[name]
    except KeyError:
        where = f" (called by {origin})" if origin else ""
        raise UnsupportedOpError(
            f"operator `{name}`{where} is not in the op table. Call it outside the vertex function, "
            f"or add it in cavs_core/ops/ ({len(TABLE)} operators are known).") from None


def literal(value: Any) -> Any:
    """MXNet's textual attributes as Python values; anything else as it is."""
    if isinstance(value, str):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return tuple(value)
    return value


class Builder:
    """Appends instructions to a program; shapes are inferred and checked on the way."""

    def __init__(self, program: Program | None = None):
        self.program = program if program is not None else Program()
        self.specs = self.program.specs
        self.origin = ""

    def input(self, spec: Spec, source: Any) -> int:
        self.specs.append(spec)
        value = len(self.specs) - 1
        self.program.inputs[value] = source
        return value

    def append(self, op: Op, a: dict[str, Any], xs: Sequence[int], outs, kind: str) -> list[int]:
        first = len(self.specs)
        op.check_axes([*(self.specs[x].shape for x in xs), *(shape for shape, _ in outs)], kind)
        self.specs.extend(Spec(tuple(shape), dtype, kind) for shape, dtype in outs)
        values = list(range(first, len(self.specs)))
        self.program.instrs.append(
            Instr(op.name, tuple(sorted(a.items())), tuple(xs), tuple(values), self.origin))
        return values

    def call(self, name: str, xs: Sequence[int], attrs: dict[str, Any]) -> list[int]:
        """Append one call with raw attributes; the outputs' values.

        Operands whose values do not matter (the one that `reshape_like` only has the shape of) are noted: on MXNet's
        tape they get a gradient of zero.
        """
        op, first = lookup(name, self.origin), len(self.program.instrs)
        apart = op.why_apart([self.specs[x] for x in xs])
        if apart:
            raise ProgramError(apart)
        try:
            made = op.build(self, op.normalise(attrs), xs)
            if isinstance(op, Composite):
                self._note_unread(first, xs, made)
            return made
        except ProgramError as err:
            if not self.origin or self.origin in str(err):      # said already: a composite calls from inside
                raise
            raise type(err)(f"{err} (called by {self.origin})") from err
        except (ValueError, TypeError, IndexError, ArithmeticError) as err:
            shapes = ", ".join(str(self.specs[x]) for x in xs)
            where = f" (called by {self.origin})" if self.origin else ""
            raise ProgramError(f"{name}({shapes}; {attrs}){where}: {err}") from err

    def _note_unread(self, first: int, xs: Sequence[int], made: Sequence[int]) -> None:
        """Note the operands that the instructions from `first` on do not read."""
        read = set(made)
        for instr in reversed(self.program.instrs[first:]):
            if not read.isdisjoint(instr.outputs):
                read.update(instr.inputs)
        unread = [x for x in xs if x not in read]
        for y in made if unread else ():
            self.program.unread.setdefault(y, []).extend(unread)

    def emit(self, name: str, *xs: int, **attrs: Any) -> int:
        """Append one call; its only output."""
        out = self.call(name, xs, attrs)
        assert len(out) == 1, name
        return out[0]

    # ---- short words for rules ---------------------------------------------------------------

    def shape(self, x: int) -> tuple[int, ...]:
        return self.specs[x].shape

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        return x if self.shape(x) == tuple(shape) else self.emit("Reshape", x, shape=tuple(shape))

    def add(self, x: int, y: int) -> int:
        return self.emit("broadcast_add", x, y)

    def sub(self, x: int, y: int) -> int:
        return self.emit("broadcast_sub", x, y)

    def mul(self, x: int, y: int) -> int:
        return self.emit("broadcast_mul", x, y)

    def div(self, x: int, y: int) -> int:
        return self.emit("broadcast_div", x, y)

    def scale(self, x: int, scalar: float) -> int:
        return self.emit("_mul_scalar", x, scalar=float(scalar))

    def shift(self, x: int, scalar: float) -> int:
        return self.emit("_plus_scalar", x, scalar=float(scalar))

    def per_row(self, x: int) -> int:
        """A shared value as a row of every vertex, for ops that must run once a row; other values as they are."""
        return self.emit("stack_rows", x) if self.specs[x].kind == SHARED else x

    def sum_to(self, x: int, shape: tuple[int, ...]) -> int:
        """Undo broadcasting: add up the axes along which a value of `shape` was repeated."""
        have = self.shape(x)
        axes = tuple(i for i, (n, m) in enumerate(zip(have, shape)) if n != m)
        return self.emit("reduce_sum", x, axis=axes) if axes else x


def normal_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is out of range for {ndim} dimensions")
    return axis % ndim


def axes_of(axis: Any, ndim: int, exclude: bool = False) -> tuple[int, ...]:
    """MXNet's axis attribute (None, int or tuple; empty means all) as a sorted tuple."""
    if axis is None or axis == ():
        axes: tuple[int, ...] = tuple(range(ndim))
        return () if exclude else axes
    axes = tuple(sorted({normal_axis(i, ndim) for i in ((axis,) if isinstance(axis, int) else axis)}))
    return tuple(i for i in range(ndim) if i not in axes) if exclude else axes
