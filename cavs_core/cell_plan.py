"""A vertex function planned for one signature: a class for each role that its vertices have.

A role is what the function may ask about its vertex (`v.is_leaf`, `v.is_root`). The function is traced for the roles
that occur, once for each set of answers that it asked for: one that asks nothing is traced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .errors import TraceError
from .graph import InputGraph
from .graph_layout import Interface
from .plan import ClassPlan, VertexProgram, leaf_program, plan_class
from .program import Gather, GatherAll, GatherSum, Param, Pull, Spec
from .schedule import check_arity
from .vertex import INNER, Role, VertexFunction, trace_vertex

__all__ = ["CellClass", "CellPlan", "Classes"]


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


@dataclass
class Classes:
    """The classes of the vertices of some graphs: leaves first."""

    all: list[CellClass]
    of_vertex: Any                  # int64 array, the number of its class
    rows: Any = None                # where the vertices are, once that was worked out; see graph_run.py

    def sources(self, kind: type) -> list[Any]:
        """All inputs of one kind, once each."""
        return list(dict.fromkeys(s for cls in self.all for s in cls.sources if isinstance(s, kind)))

    @property
    def pushing(self) -> VertexProgram:
        """A program that pushes; all others push alike."""
        return next(cls.plan.vertex for cls in self.all if cls.plan.vertex.pushed)

    @property
    def by_slot(self) -> bool:
        return not any(isinstance(port, GatherAll) for cls in self.all for port in cls.interface.ports)


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
        self._trace = lambda role: trace_vertex(cell, pulls, dtype, ctx, role)
        self.name, self.recording = type(cell).__name__, recording
        self.allow_missing = cell.allow_missing
        self.wanted_pulls = [Pull(name) for name in wanted_pulls]
        self.initial: list[Any] = []            # for each state the source of its initial value
        self.idle = 0                           # runs in a row in which no vertices repeated others
        self._traced: list[VertexProgram] = []
        self._classes: dict[tuple[bool, int], CellClass] = {}

    def classes(self, graph: InputGraph) -> Classes:
        """The classes of a graph's vertices; the same object for the same graph."""
        known = graph.kept.get(self)
        if known is None:
            known = self._find_classes(graph)
            self._check_arity(graph, known)
            graph.kept[self] = known
        return known

    def _find_classes(self, graph: InputGraph) -> Classes:
        code = (graph.arity == 0).astype(np.int64)
        code[graph.roots] += 2
        found = np.flatnonzero(np.bincount(code, minlength=4)).tolist()
        by_code = {c: self._class_of(Role(bool(c & 1), bool(c & 2))) for c in found}
        every = list({id(cls): cls for cls in by_code.values()}.values()) or self._any_that_pushes()
        every.sort(key=lambda cls: not cls.is_leaf)
        if not any(cls.plan.vertex.pushed for cls in every):
            raise TraceError(f"{self.name}: vertex() called v.push for no vertex of these graphs, so the run would "
                             "have no result")
        number = np.zeros(4, np.int64)
        for c, cls in by_code.items():
            number[c] = every.index(cls)
        return Classes(every, number[code])

    def _check_arity(self, graph: InputGraph, classes: Classes) -> None:
        """A vertex that is no leaf must have every child that its program gathers by number."""
        for c, cls in enumerate(classes.all):
            ports = cls.interface.ports
            slots = [p.slot for p in ports if isinstance(p, Gather)]
            if not slots or self.allow_missing:
                continue
            needed = max(slots) + 1
            among = classes.of_vertex == c
            if any(isinstance(p, (GatherAll, GatherSum)) for p in ports):
                check_arity(graph, at_least=needed, among=among)
            else:
                check_arity(graph, exact=needed, among=among)

    def wanted(self, classes: Classes) -> list[Any]:
        """The parameters and inputs that want a gradient."""
        params = [s for s in self.parameters(classes) if s.parameter.grad_req != "null"]
        pulls = classes.sources(Pull)
        return params + [s for s in self.wanted_pulls if s in pulls]

    def parameters(self, classes: Classes) -> list[Param]:
        initial = [s for s in self.initial if isinstance(s, Param)]
        return list(dict.fromkeys([*classes.sources(Param), *initial]))

    # ---- inside ------------------------------------------------------------------------------

    def _any_that_pushes(self) -> list[CellClass]:
        """For graphs without vertices: what the results would look like."""
        found = (self._class_of(Role(is_leaf, is_root)) for is_leaf in (False, True) for is_root in (False, True))
        return [next((cls for cls in found if cls.plan.vertex.pushed), self._class_of(INNER))]

    def _class_of(self, role: Role) -> CellClass:
        number = self._number_of(role)
        key = (role.is_leaf, number)
        if key not in self._classes:
            traced = self._traced[number]
            vertex = leaf_program(traced, self.initial) if role.is_leaf else traced
            params = [s for s in (*traced.program.inputs.values(), *self.initial) if isinstance(s, Param)]
            wanted = [*[s for s in params if s.parameter.grad_req != "null"], *self.wanted_pulls, *vertex.ports]
            # The states of a root are read by nobody: all of it can wait, and runs once for all roots.
            plan = plan_class(vertex, wanted, self.recording, in_one_launch=role.is_leaf,
                              recurrent=() if traced.asked.get("is_root") else None)
            self._classes[key] = CellClass(role.is_leaf, traced, plan)
        return self._classes[key]

    def _number_of(self, role: Role) -> int:
        """The trace for a role: one that was given the same answers to what it asked."""
        for number, traced in enumerate(self._traced):
            if all(getattr(role, question) == answer for question, answer in traced.asked.items()):
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
