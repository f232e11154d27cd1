"""The Cavs face: a static vertex function, and graphs of any shape to run it over."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .batches import Batches
from .errors import ProgramError, TraceError
from .mxnet_compat import gluon, mx
from .ops import Builder
from .plan import VertexProgram, place_outputs
from .program import CHILD, ROW, Gather, GatherAll, GatherSum, Param, Pull, Spec, Zeros
from .trace import Tracer

__all__ = ["Role", "VertexFunction", "Vertex", "trace_vertex"]


class Role(NamedTuple):
    """What a vertex function may ask about its vertex: the answer is the same for all vertices of a class."""

    is_leaf: bool = False       # it has no children
    is_root: bool = False       # nobody gathers from it


INNER = Role()


class VertexFunction(gluon.HybridBlock):
    """A HybridBlock whose `vertex(F, v)` says what one vertex computes from its children and its inputs.

    Parameters
    ----------
    state_shapes : list of tuples
        What `scatter` sends to the parents and `gather` receives: one shape per state, without the axis of one
        that every value of a vertex has.
    initial_state : "zeros" or "learned"
        What a leaf gathers. A learned initial state is a parameter per state; reductions over children see it as a
        leaf's only child.
    allow_missing : bool
        With `gather(k)`, whether a vertex may have fewer children than the function gathers. The missing ones
        then read the initial state. Default: every vertex that is not a leaf has all of them.

    Examples
    --------
    >>> class TreeFC(VertexFunction):
    ...     def __init__(self, hidden, **kwargs):
    ...         super().__init__(state_shapes=[(hidden,)], **kwargs)
    ...         with self.name_scope():
    ...             self.fc = gluon.nn.Dense(hidden, in_units=2 * hidden)
    ...     def vertex(self, F, v):
    ...         (left,), (right,) = v.gather(0), v.gather(1)        # (1, hidden) each
    ...         h = F.relu(self.fc(F.concat(left, right, dim=1)) + v.pull("x"))
    ...         v.scatter(h)
    ...         v.push(h)
    """

    def __init__(self, state_shapes: Sequence[Sequence[int]], initial_state: str = "zeros",
                 allow_missing: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        if initial_state not in ("zeros", "learned"):
            raise ValueError(f"{type(self).__name__}(initial_state={initial_state!r}): expected 'zeros' or 'learned'")
        self.state_shapes = _checked_shapes(state_shapes, f"{type(self).__name__}(state_shapes={state_shapes!r})")
        self.allow_missing = allow_missing
        self.initial_states: list[Any] = []
        if initial_state == "learned":
            with self.name_scope():
                for k, shape in enumerate(self.state_shapes):
                    parameter = self.params.get(f"initial_state{k}", shape=(1, *shape), init="zeros")
                    setattr(self, f"initial_state{k}", parameter)
                    self.initial_states.append(parameter)
        self._plans: dict[Any, Any] = {}        # signature -> planned program; filled by cavs_core.run
        self._batches = Batches()

    def vertex(self, F: Any, v: Vertex) -> None:
        """What one vertex computes. Values are a batch of one: ``v.pull("x")`` is (1, ...)."""
        raise NotImplementedError(f"{type(self).__name__} must define vertex(self, F, v)")

    def forward(self, graphs: Any, inputs: Any = None) -> Any:
        """Same as ``cavs_core.run(self, graphs, inputs)``."""
        from .face import run
        return run(self, graphs, inputs)

    def cast(self, dtype: Any) -> None:
        self._plans.clear()
        super().cast(dtype)


def _checked_shapes(shapes: Any, call: str) -> list[tuple[int, ...]]:
    """State shapes as tuples of ints."""
    try:
        found = [tuple(operator.index(n) for n in shape) for shape in shapes]
    except TypeError as error:
        raise ValueError(f"{call}: expected a list with one shape per state, as in [(128,), (128,)]; [] for a function "
                         f"that sends nothing to its parents ({error})") from error
    if any(n < 1 for shape in found for n in shape):
        raise ValueError(f"{call}: every axis of a state has one element or more")
    return found


class Vertex:
    """What `vertex(F, v)` sees of its vertex."""

    def __init__(self, tracer: Tracer, cell: VertexFunction, pulls: dict[str, Spec], dtype: str, role: Role):
        self._tracer, self._cell, self._pulls, self._dtype, self._role = tracer, cell, pulls, dtype, role
        self._inputs: dict[Any, Any] = {}
        self.scattered: list[Any] | None = None
        self.pushed: list[Any] = []
        self.pulled: set[str] = set()
        self.asked: dict[str, bool] = {}

    # ---- what it is --------------------------------------------------------------------------

    @property
    def is_leaf(self) -> bool:
        """Whether it has no children. The function is traced once for each answer that vertices have."""
        return self._answer("is_leaf")

    @property
    def is_root(self) -> bool:
        """Whether nobody gathers from it. Such a vertex need not scatter, once the function has asked."""
        return self._answer("is_root")

    # ---- what comes in -----------------------------------------------------------------------

    def gather(self, slot: int) -> tuple[Any, ...]:
        """The states of child number `slot`, as a tuple with one (1, ...) array per state."""
        if not isinstance(slot, (int, np.integer)) or slot < 0:
            raise TraceError(f"{self._tracer.name}: gather({slot!r}): the slot is the number of a child, 0 or more")
        return self._gathered(lambda k: Gather(int(slot), k), ROW)

    def gather_sum(self) -> tuple[Any, ...]:
        """The states summed over all children; at a leaf the initial state (zeros, or as learned)."""
        return self._gathered(GatherSum, ROW)

    def gather_all(self) -> tuple[Any, ...]:
        """The states of every child, one row per child.

        Operators apply to each child. `spread` brings a value of the vertex beside them; without arguments, the
        methods ``.sum()``, ``.max()`` and ``.mean()`` reduce over the children (zeros at a leaf).
        """
        return self._gathered(GatherAll, CHILD)

    def pull(self, name: str) -> Any:
        """The external input `name` of this vertex: (1, ...)."""
        if name not in self._pulls:
            raise TraceError(f"{self._tracer.name}: pull({name!r}), but the run was given {sorted(self._pulls)}")
        self.pulled.add(name)
        return self._input(self._pulls[name], Pull(name))

    def spread(self, value: Any) -> Any:
        """A value of the vertex as each of its children sees it."""
        return self._tracer.emit("spread", value)

    # ---- what goes out -----------------------------------------------------------------------

    def scatter(self, *states: Any) -> None:
        """Send the states to the parents: one value per entry of `state_shapes`."""
        name, shapes = self._tracer.name, self._cell.state_shapes
        if self.scattered is not None:
            raise TraceError(f"{name}: scatter was called twice; pass all states to one call")
        if len(states) != len(shapes):
            raise TraceError(f"{name}: scatter got {len(states)} values, but state_shapes has {len(shapes)}")
        for k, (state, shape) in enumerate(zip(states, shapes)):
            self._check_vertex_value(state, f"state {k} given to scatter")
            dtype = np.dtype(state.dtype).name
            if state.shape != (1, *shape) or dtype != self._dtype:
                raise ProgramError(f"{name}: state {k} given to scatter is {dtype}{list(state.shape)}; state_shapes "
                                   f"and the parameters' dtype say {self._dtype}{[1, *shape]}")
        self.scattered = list(states)

    def push(self, *values: Any) -> None:
        """Emit values to the outside: `out.pushed` has a row for every vertex that does."""
        for value in values:
            self._check_vertex_value(value, "a value given to push")
        self.pushed.extend(values)

    # ---- inside ------------------------------------------------------------------------------

    def _answer(self, question: str) -> bool:
        self.asked[question] = getattr(self._role, question)
        return self.asked[question]

    def _check_vertex_value(self, value: Any, what: str) -> None:
        kind = self._tracer.builder.specs[self._tracer.value_for(value, "scatter or push")].kind
        if kind == CHILD:
            raise TraceError(f"{self._tracer.name}: {what} is a value of the children (from gather_all); "
                             "reduce it first with .sum(), .max() or .mean()")

    def _input(self, spec: Spec, source: Any) -> Any:
        if source not in self._inputs:
            self._inputs[source] = self._tracer.builder.input(spec, source)
        return self._tracer.array(self._inputs[source])

    def _gathered(self, source: Any, kind: str) -> tuple[Any, ...]:
        return tuple(self._input(Spec((1, *shape), self._dtype, kind), source(k))
                     for k, shape in enumerate(self._cell.state_shapes))


def trace_vertex(cell: VertexFunction, pulls: dict[str, Spec], dtype: str, ctx: Any,
                 role: Role = INNER, pulled: set[str] | None = None) -> tuple[VertexProgram, list[Any]]:
    """Trace a vertex function once, for vertices of one role; the names that it pulls are added to `pulled`.

    Returns the program, and for each state the source of its initial value.
    """
    name = f"{type(cell).__name__} {cell.name}"
    tracer = Tracer(name, ctx)
    vertex = Vertex(tracer, cell, pulls, dtype, role)
    with tracer.running(cell), ctx:
        cell.vertex(mx.nd, vertex)
    if pulled is not None:
        pulled.update(vertex.pulled)
    if vertex.scattered is None:
        if cell.state_shapes and not vertex.asked.get("is_root"):
            raise TraceError(f"{name}: vertex() never called v.scatter, but state_shapes has "
                             f"{len(cell.state_shapes)} entries")
        vertex.scattered = []
    if not vertex.pushed and not vertex.asked:
        raise TraceError(f"{name}: vertex() never called v.push, so a run would have no result")
    builder: Builder = tracer.builder
    states = [tracer.value_for(x, "scatter") for x in vertex.scattered]
    pushed = [tracer.value_for(x, "push") for x in vertex.pushed]
    # Where all vertices do the same, a pushed state is read where it stands. Else others may push something else in
    # its place, and it is copied to where theirs is.
    builder.program.outputs = place_outputs(builder, states, pushed, aliasing=not vertex.asked)
    builder.program.prune()
    builder.program.reads = tracer.reads
    initial: list[Any] = [Param(p, p.name) for p in cell.initial_states]
    initial = initial or [Zeros()] * len(cell.state_shapes)
    return VertexProgram(builder.program, len(states), vertex.asked), initial
