"""A vertex function planned for one signature: a class for each role that its vertices have.

A role is what the function may ask about its vertex (`v.is_leaf`, `v.is_root`). The function is traced for the roles
that occur, once for each set of answers that it asked for: one that asks nothing is traced once.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .errors import RunError, TraceError
from .graph import InputGraph
from .graph_layout import Interface, Interfaces
from .plan import ClassPlan, VertexProgram, leaf_program, plan_class
from .program import Const, Gather, GatherAll, GatherSum, Param, Pull, Spec
from .schedule import IS_LEAF, IS_ROOT, check_arity, roles_of
from .vertex import INNER, Role, VertexFunction, trace_vertex

__all__ = ["CellClass", "CellPlan", "Classes", "Vertices"]


@dataclass
class CellClass:
    """The vertices of one or several roles that run the same program."""

    is_leaf: bool
    traced: VertexProgram
    plan: ClassPlan

    @cached_property
    def interface(self) -> Interface:
        vertex = self.plan.vertex
        return Interface(vertex.ports, self.plan.answered_ports, vertex.num_states, vertex.pushed_states)

    @cached_property
    def slots(self) -> tuple[int, bool]:
        """How many children are gathered by number, and whether there may be others."""
        ports = self.interface.ports
        return (max((p.slot + 1 for p in ports if isinstance(p, Gather)), default=0),
                any(not isinstance(p, Gather) for p in ports))

    @cached_property
    def sources(self) -> list[Any]:
        """Where the inputs come from, also those that leaves do without."""
        return list(dict.fromkeys([*self.traced.program.inputs.values(), *self.plan.inputs.values()]))

    @cached_property
    def draws(self) -> bool:
        return any(instr.op == "uniform_like" for instr in self.plan.vertex.program.instrs)

    @cached_property
    def multiplies(self) -> bool:
        """Whether a vertex costs more than to move it."""
        return any(instr.op == "matmul" for instr in self.plan.vertex.program.instrs)


class Classes:
    """The classes of some roles, leaves first, and what follows from them for all graphs.

    Parameters
    ----------
    every : list of CellClass
    by_role : role -> the one it has
    initial : for each state the source of its initial value
    wanted_pulls : the inputs that want a gradient
    """

    def __init__(self, every: list[CellClass], by_role: dict[int, CellClass], initial: list[Any],
                 wanted_pulls: Sequence[Pull]):
        self.all = every
        self.plans = [cls.plan for cls in every]
        self.number = np.zeros(4, np.int64)             # of the class of each role
        for role, cls in by_role.items():
            self.number[role] = every.index(cls)
        self.interfaces = Interfaces([cls.interface for cls in every])
        self.pushing = next(cls.plan.vertex for cls in every if cls.plan.vertex.pushed)     # all others push alike
        self.pushed_specs = [self.pushing.program.specs[v] for v in self.pushing.pushed]
        # outside they have no axis of one
        self.pushed_shapes = [s.shape[1:] if s.shape[0] == 1 else s.shape for s in self.pushed_specs]
        self.by_slot = not any(isinstance(port, GatherAll) for cls in every for port in cls.interface.ports)
        self.multiplies = np.array([cls.multiplies for cls in every])
        self._compared_by: dict[frozenset[str], tuple[Any, list[str], Any]] = {}
        self._touched: dict[tuple[bool, ...], frozenset[Any]] = {}
        self.consts = self._sources(Const)
        self.params = list(dict.fromkeys([*self._sources(Param), *[s for s in initial if isinstance(s, Param)]]))
        pulls = self._sources(Pull)
        self.wanted: list[Any] = [s for s in self.params if s.parameter.grad_req != "null"]
        self.wanted += [s for s in wanted_pulls if s in pulls]

    def _sources(self, kind: type) -> list[Any]:
        """All inputs of one kind, once each."""
        return list(dict.fromkeys(s for cls in self.all for s in cls.sources if isinstance(s, kind)))

    @cached_property
    def row_specs(self) -> list[Spec]:
        """What a row of each buffer is: states, then pushed values that are none."""
        found = {at: cls.plan.specs[v] for cls in self.all
                 for v, at in zip(cls.plan.outputs, [*range(cls.interface.num_states), *self.interfaces.pushed_at])}
        return [found[at] for at in range(self.interfaces.num_states + self.interfaces.num_own)]

    def touched(self, begun: Sequence[bool]) -> frozenset[Any]:
        """The sources of inputs that a pass touches which begins at some pushed values; see `paths`."""
        key = tuple(begun)
        if key not in self._touched:
            self._touched[key] = self._find_touched(begun)
        return self._touched[key]

    def _find_touched(self, begun: Sequence[bool]) -> frozenset[Any]:
        found: set[Any] = set()
        states: set[int] = set()                # that gradients come to, in some class
        while True:
            for plan in self.plans:
                outputs = [*[k in states for k in range(plan.vertex.num_states)],
                           *(begun if plan.vertex.pushed else ())]
                touched = plan.touches[np.array(outputs, bool)].any(axis=0)
                found.update(source for source, is_touched in zip(plan.inputs.values(), touched) if is_touched)
            before, states = states, {s.state for s in found if isinstance(s, (Gather, GatherAll, GatherSum))}
            if states == before:
                return frozenset(found)

    def compared_by(self, integers: frozenset[str]) -> tuple[Any, list[str], Any]:
        """What tells vertices apart, if these inputs are integers.

        Returns
        -------
        bool array, whether vertices of a class may repeat others; the names of the inputs that they are compared by;
        and which of these a class has: bool array, shape (classes, names)
        """
        if integers not in self._compared_by:
            pulls = [{s.name for s in cls.plan.inputs.values() if isinstance(s, Pull)} for cls in self.all]
            may_repeat = [mine <= integers and not cls.draws for mine, cls in zip(pulls, self.all)]
            names = sorted(set().union(*(mine for mine, may in zip(pulls, may_repeat) if may)))
            asks = np.array([[name in mine for name in names] for mine in pulls], bool).reshape(len(pulls), -1)
            self._compared_by[integers] = np.array(may_repeat), names, asks
        return self._compared_by[integers]


@dataclass
class Vertices:
    """The vertices of some graphs."""

    classes: Classes
    of_vertex: Any                  # int64 array, the number of its class
    rows: Any = None                # where the vertices are, once that was worked out; see graph_run.py


_ROLES = [Role(is_leaf, is_root) for is_leaf in (False, True) for is_root in (False, True)]


def _answers(traced: VertexProgram, role: Role) -> bool:
    """Whether a trace is that of a role: it was given the same answers to what it asked."""
    return all(getattr(role, question) == answer for question, answer in traced.asked.items())


class CellPlan:
    """A vertex function for one signature.

    Parameters
    ----------
    cell : VertexFunction
    pulls : name -> Spec of a row of each input
    dtype : of the states
    ctx : the device
    recording : whether a backward pass may follow
    wanted_pulls : names of the inputs that want a gradient
    """

    def __init__(self, cell: VertexFunction, pulls: dict[str, Spec], dtype: str, ctx: Any, recording: bool,
                 wanted_pulls: Sequence[str]):
        self._given, self._pulled = set(pulls), set[str]()      # names of the inputs; those that a trace has pulled
        self._trace = lambda role: trace_vertex(cell, pulls, dtype, ctx, role, self._pulled)
        self.name, self.recording = type(cell).__name__, recording
        self.allow_missing = cell.allow_missing
        self.wanted_pulls = [Pull(name) for name in wanted_pulls]
        self.initial: list[Any] = []            # for each state the source of its initial value
        self.idle = 0                           # runs in a row in which no vertices repeated others
        self._traced: list[VertexProgram] = []
        self._made: dict[tuple[bool, int], CellClass] = {}
        self._classes: dict[tuple[int, ...], Classes] = {}      # by the roles that occur

    def vertices(self, graph: InputGraph) -> Vertices:
        """The vertices of a graph with their classes; the same object for the same graph."""
        known = graph.kept.get(self)
        if known is None:
            role, fewest, most = roles_of(graph)
            found = tuple([r for r in range(4) if most[r] >= 0])
            classes = self._classes.get(found)
            if classes is None:
                classes = self._classes[found] = self._find_classes(found)
            known = Vertices(classes, classes.number[role])
            self._check_arity(graph, known, found, fewest, most)
            graph.kept[self] = known
        return known

    def _find_classes(self, roles: Sequence[int]) -> Classes:
        by_role = {r: self._class_of(Role(bool(r & IS_LEAF), bool(r & IS_ROOT))) for r in roles}
        every = list({id(cls): cls for cls in by_role.values()}.values()) or self._any_that_pushes()
        self._check_pulled()
        every.sort(key=lambda cls: not cls.is_leaf)
        if not any(cls.plan.vertex.pushed for cls in every):
            raise TraceError(f"{self.name}: vertex() called v.push for no vertex of these graphs, so the run would "
                             "have no result")
        return Classes(every, by_role, self.initial, self.wanted_pulls)

    def _check_pulled(self) -> None:
        """Every input is pulled, as far as is known: graphs need not have vertices of every role that is asked for."""
        idle = sorted(self._given - self._pulled)
        if not idle or not all(any(_answers(traced, role) for traced in self._traced) for role in _ROLES):
            return
        near = difflib.get_close_matches(idle[0], self._pulled, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise RunError(f"run({self.name}): no vertex pulls the input {idle[0]!r}{hint}; vertex() pulls "
                       f"{', '.join(map(repr, sorted(self._pulled))) or 'nothing'}. Leave the input out, or call "
                       f"v.pull({idle[0]!r})")

    def _check_arity(self, graph: InputGraph, vertices: Vertices, roles: Sequence[int], fewest: Sequence[int],
                     most: Sequence[int]) -> None:
        """A vertex that is no leaf must have every child that its program gathers by number."""
        for role in roles:
            c = int(vertices.classes.number[role])
            needed, others = vertices.classes.all[c].slots
            if self.allow_missing or role & IS_LEAF or not needed:
                continue
            if fewest[role] < needed or (most[role] > needed and not others):
                check_arity(graph, at_least=needed if others else None, exact=None if others else needed,
                            among=vertices.of_vertex == c)

    def is_current(self) -> bool:
        """Whether the blocks still are what was traced."""
        return all(traced.program.reads.are_current() for traced in self._traced)

    # ---- inside ------------------------------------------------------------------------------

    def _any_that_pushes(self) -> list[CellClass]:
        """For graphs without vertices: what the results would look like."""
        found = map(self._class_of, _ROLES)
        return [next((cls for cls in found if cls.plan.vertex.pushed), self._class_of(INNER))]

    def _class_of(self, role: Role) -> CellClass:
        number = self._number_of(role)
        key = (role.is_leaf, number)
        if key not in self._made:
            traced = self._traced[number]
            vertex = leaf_program(traced, self.initial) if role.is_leaf else traced
            params = [s for s in (*traced.program.inputs.values(), *self.initial) if isinstance(s, Param)]
            wanted = [*[s for s in params if s.parameter.grad_req != "null"], *self.wanted_pulls, *vertex.ports]
            # The states of a root are read by nobody: all of it can wait, and runs once for all roots.
            plan = plan_class(vertex, wanted, self.recording, in_one_launch=role.is_leaf,
                              recurrent=() if traced.asked.get("is_root") else None)
            self._made[key] = CellClass(role.is_leaf, traced, plan)
        return self._made[key]

    def _number_of(self, role: Role) -> int:
        """The trace for a role: one that was given the same answers to what it asked."""
        for number, traced in enumerate(self._traced):
            if _answers(traced, role):
                return number
        traced, self.initial = self._trace(role)
        for other in self._traced:
            self._check_alike(traced, other)
        self._traced.append(traced)
        return len(self._traced) - 1

    def _check_alike(self, one: VertexProgram, other: VertexProgram) -> None:
        """Vertices of all roles push the same number of values, of the same shapes; or nothing."""
        looks = [[(p.program.specs[v].shape, p.program.specs[v].dtype) for v in p.pushed] for p in (one, other)]
        if all(looks) and looks[0] != looks[1]:
            texts = [f"{', '.join(f'{dtype}{list(shape)}' for shape, dtype in look)} where {_told(p)}"
                     for look, p in zip(looks, (one, other))]
            raise TraceError(f"{self.name}: vertex() pushes {texts[0]}, but {texts[1]}; what is pushed has one shape "
                             "for all vertices that push")


def _told(program: VertexProgram) -> str:
    return " and ".join(f"v.{question} is {answer}" for question, answer in program.asked.items())
