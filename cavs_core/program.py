"""Program: the static vertex function, a small SSA list of instructions over row shapes.

A value is a number; `specs[value]` says what one sample sees: its shape, its dtype and its kind.
The kind says how many copies a launch holds:

    SHARED   one for everybody       a parameter, a constant, and what is computed from them alone
    ROW      one per vertex          rows (n, *shape) in a launch of n vertices
    CHILD    one per child           rows (m, *shape) in a launch whose vertices have m children together
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

__all__ = ["SHARED", "ROW", "CHILD", "Spec", "Instr", "Program", "Arg", "Param", "Const", "Zeros", "Shared", "Leaf",
           "Pull", "Gather", "GatherSum", "GatherAll", "StateGrad", "OutputGrad", "live_instrs"]

SHARED, ROW, CHILD = "shared", "row", "child"
_S = TypeVar("_S")


@dataclass(frozen=True)
class Spec:
    """What one sample sees of a value."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = ROW

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)}"


# ---- where the inputs of a program come from -------------------------------------------------

class _OneForEach(type):
    """Calls with the same arguments give the same object."""

    _known: ClassVar[dict[Any, Any]] = {}

    def __call__(cls: type[_S], *args: Any) -> _S:
        known = _OneForEach._known.get((cls, args))
        return known if known is not None else _OneForEach._known.setdefault((cls, args), type.__call__(cls, *args))


class Source(metaclass=_OneForEach):
    """A place that inputs come from, one object for each: tables of every run are keyed by them."""

    def __reduce__(self) -> Any:
        return type(self), tuple(vars(self).values())


@dataclass(frozen=True, eq=False)
class Arg(Source):
    """The index-th (flattened) argument of a traced call."""

    index: int


class _OneForEachParameter(_OneForEach):
    """The same, without keeping parameters alive."""

    _living: ClassVar[weakref.WeakValueDictionary[Any, Any]] = weakref.WeakValueDictionary()

    def __call__(cls: type[_S], *args: Any) -> _S:
        parameter, name = args
        living = _OneForEachParameter._living
        known = living.get((id(parameter), name))       # (as long as there is one, the id is this parameter's)
        return known if known is not None else living.setdefault((id(parameter), name), type.__call__(cls, *args))


@dataclass(frozen=True, eq=False)
class Param(Source, metaclass=_OneForEachParameter):
    """A Gluon Parameter; its array is fetched again at every run."""

    parameter: Any
    name: str


@dataclass(frozen=True, eq=False)
class Const:
    """An outside array that needs no gradient; held by reference."""

    array: Any


@dataclass(frozen=True)
class Zeros:
    """Zeros of the input's own shape, made by the backend."""


@dataclass(frozen=True, eq=False)
class Shared(Source):
    """The index-th argument, the same array in every call of a launch."""

    index: int


@dataclass(frozen=True, eq=False)
class Leaf(Source):
    """The index-th argument, an outside array of its own for every call: it waits for nobody."""

    index: int


@dataclass(frozen=True, eq=False)
class Pull(Source):
    """The external input of each vertex."""

    name: str


@dataclass(frozen=True, eq=False)
class Gather(Source):
    """State number `state` of the `slot`-th child."""

    slot: int
    state: int


@dataclass(frozen=True, eq=False)
class GatherSum(Source):
    """State number `state`, summed over all children."""

    state: int


@dataclass(frozen=True, eq=False)
class GatherAll(Source):
    """State number `state` of every child: a CHILD value."""

    state: int


@dataclass(frozen=True, eq=False)
class StateGrad(Source):
    """Backward programs: the gradient that a vertex's readers send back for one of its states."""

    state: int


@dataclass(frozen=True, eq=False)
class OutputGrad(Source):
    """Backward programs: the gradient of the index-th output."""

    index: int


# ---- the program -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Instr:
    """One operator call. `attrs` are normalised and hold every attribute of the op."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origin: str = field(default="", compare=False)      # the block whose code made it, for messages

    def __str__(self) -> str:
        left = ", ".join(f"%{v}" for v in self.outputs)
        right = [f"%{v}" for v in self.inputs] + [f"{k}={v}" for k, v in self.attrs]
        return f"{left} = {self.op}({', '.join(right)})"


@dataclass
class Program:
    """Instructions in an order in which they can run.

    Invariant: an instruction's inputs are program inputs or outputs of earlier instructions, and no value
    is written twice.
    """

    specs: list[Spec] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    inputs: dict[int, Any] = field(default_factory=dict)     # value -> source, in the order of creation
    outputs: list[int] = field(default_factory=list)
    name: str = "program"
    checks: bool = False        # whether MXNet would look at indices, and raise for those out of range
    reads: Any = field(default=None, repr=False, compare=False)     # of blocks, by the code that was traced: CodeReads
    unread: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)   # see `Builder.call`

    def inputs_of(self, source_type: type | tuple[type, ...]) -> list[int]:
        return [v for v, source in self.inputs.items() if isinstance(source, source_type)]

    def prune(self) -> None:
        """Drop the instructions and inputs that no output depends on."""
        self.instrs = live_instrs(self.instrs, self.outputs)
        read = {v for instr in self.instrs for v in instr.inputs}.union(self.outputs)
        self.inputs = {v: source for v, source in self.inputs.items() if v in read}

    def __str__(self) -> str:
        lines = [f"program {self.name}"]
        lines += [f"  %{v} = input {_source_name(s)}: {self.specs[v]}" for v, s in self.inputs.items()]
        for instr in self.instrs:
            kinds = ", ".join(str(self.specs[v]) for v in instr.outputs)
            lines.append(f"  {instr}: {kinds}")
        lines.append("  return " + ", ".join(f"%{v}" for v in self.outputs))
        return "\n".join(lines)


def _source_name(source: Any) -> str:
    if isinstance(source, Param):
        return f"Param({source.name})"
    if isinstance(source, Const):
        return "Const"
    return repr(source)


def live_instrs(instrs: Iterable[Instr], wanted: Iterable[int]) -> list[Instr]:
    """The instructions that `wanted` values depend on, in their order."""
    needed = set(wanted)
    kept = []
    for instr in reversed(list(instrs)):
        if not needed.isdisjoint(instr.outputs):
            kept.append(instr)
            needed.update(instr.inputs)
    return kept[::-1]
