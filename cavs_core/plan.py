"""A vertex program made ready to run: its phases and steps, forward and backward, and what must be kept.

A vertex program is planned twice. Leaves gather nothing but the initial state, which all of them share: in
`leaf_program` their gathers are shared values, so that a product with the initial state is made once, not once a leaf.
All other vertices run the program as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .autodiff import Backward, differentiate
from .layout import Layout
from .ops import Builder
from .partition import Parts, Step, make_steps, partition
from .paths import touches_of
from .program import (
    CHILD,
    SHARED,
    Gather,
    GatherAll,
    GatherSum,
    Instr,
    OutputGrad,
    Program,
    Spec,
    StateGrad,
    Zeros,
)

__all__ = ["VertexProgram", "Phases", "ClassPlan", "buffer_bytes", "leaf_program", "own_outputs",
           "peak_bytes", "place_outputs", "plan_class", "respecified"]

_RECURRENT = (Gather, GatherSum, GatherAll)     # sources that wait for another vertex


@dataclass
class VertexProgram:
    """A traced vertex function: `program.outputs` are the scattered states, then the pushed values."""

    program: Program
    num_states: int
    asked: dict[str, bool] = field(default_factory=dict)    # what it asked about its vertex, and the answers

    @property
    def scattered(self) -> list[int]:
        return self.program.outputs[:self.num_states]

    @property
    def pushed(self) -> list[int]:
        return self.program.outputs[self.num_states:]

    @property
    def pushed_states(self) -> list[int | None]:
        """For each pushed value, the number of the state that it is, if any."""
        return [self.scattered.index(v) if v in self.scattered else None for v in self.pushed]

    @property
    def ports(self) -> list[Any]:
        """The ways in which the program reads its children."""
        return [s for s in self.program.inputs.values() if isinstance(s, _RECURRENT)]


@dataclass(frozen=True)
class Phases:
    eager: list[Step]
    critical: list[Step]
    lazy: list[Step]


@dataclass
class ClassPlan:
    """How one class of vertices (the leaves, or all others) runs."""

    vertex: VertexProgram
    specs: list[Spec]                               # of forward and backward values
    forward: Phases
    backward: Phases | None
    grads: dict[Any, list[int]]                     # source of a forward input -> the values of its gradient
    backward_inputs: dict[int, Any]
    kept: frozenset[int]                            # made in a launch, needed after it
    sends: dict[int, list[int]]                     # see Backward
    again: Callable[[Sequence[bool]], ClassPlan]    # the same class, where gradients come to these outputs only
    compiled: dict[Any, Any] = field(default_factory=dict)     # (backend, id of a step) -> function, and more
    _begun: dict[tuple[bool, ...], ClassPlan] = field(default_factory=dict)     # see `begun_at`

    @property
    def inputs(self) -> dict[int, Any]:
        return self.vertex.program.inputs

    @property
    def outputs(self) -> list[int]:
        return self.vertex.program.outputs

    @cached_property
    def touches(self) -> Any:
        """The inputs that outputs touch in a backward pass; see `paths`."""
        return touches_of(self.vertex.program)

    @cached_property
    def read_again(self) -> frozenset[int]:
        """The values that the backward pass reads."""
        phases = self.backward or Phases([], [], [])
        return frozenset(v for steps in (phases.eager, phases.critical, phases.lazy) for step in steps
                         for v in step.inputs)

    @property
    def answered_ports(self) -> list[Any]:
        """The ports that send a gradient back."""
        return [s for s in self.grads if isinstance(s, _RECURRENT)]

    def begun_at(self, outputs: tuple[bool, ...]) -> ClassPlan:
        """The plan of a backward pass in which gradients come to some of the outputs only.

        What does not lead to them takes no part. Where all that the plan does leads to them, that is the plan itself:
        zeros may then stand for the gradients that are missing.
        """
        known = self._begun.get(outputs)
        if known is None:
            every = self._takes_part([True] * len(outputs))
            known = self._begun[outputs] = self if self._takes_part(outputs) == every else self.again(outputs)
        return known

    def _takes_part(self, outputs: Sequence[bool]) -> set[int]:
        """The places of the instructions that gradients of some outputs come to, and that send some on."""
        instrs, found = self.vertex.program.instrs, set()
        reached = {v for v, begins in zip(self.outputs, outputs) if begins}
        for place in range(len(instrs) - 1, -1, -1):
            if place in self.sends and not reached.isdisjoint(instrs[place].outputs):
                found.add(place)
                reached.update(self.sends[place])
        return found


def own_outputs(builder: Builder, values: Sequence[int], others: Collection[int] = ()) -> list[int]:
    """Values as rows with a place of their own: made by an instruction, no two the same and none of the `others`."""
    own: list[int] = []
    for value in values:
        if builder.specs[value].kind == SHARED:
            value = builder.emit("stack_rows", value)
        elif value in builder.program.inputs or value in own or value in others:
            value = builder.emit("_copy", value)
        own.append(value)
    return own


def place_outputs(builder: Builder, scattered: Sequence[int], pushed: Sequence[int],
                  values: Mapping[int, int] | None = None, aliasing: bool = True) -> list[int]:
    """Scattered states, then pushed values, each with a place of its own.

    Parameters
    ----------
    values : what each of them is in the builder's program; None: itself
    aliasing : whether a pushed state is read where the state stands
    """
    def value_of(v: int) -> int:
        return v if values is None else values[v]

    places = own_outputs(builder, [value_of(v) for v in scattered])
    aliases = dict(zip(scattered, places)) if aliasing else {}
    for v in pushed:
        places.append(aliases[v] if v in aliases else own_outputs(builder, [value_of(v)], places)[0])
    return places


def leaf_program(vertex: VertexProgram, initial: Sequence[Any]) -> VertexProgram:
    """The program of a vertex without children; `initial[k]` is the source of state k's initial value.

    Where the initial state is zeros, a reduction over children is zero. A learned one is seen as a single child.
    """
    old = vertex.program
    new = Builder(Program(name=f"{old.name} (leaf)"))
    values: dict[int, int] = {}
    shared: dict[int, int] = {}
    zeros: dict[tuple[tuple[int, ...], str], int] = {}

    def zero(spec: Spec) -> int:
        key = (spec.shape, spec.dtype)
        if key not in zeros:
            zeros[key] = new.input(Spec(spec.shape, spec.dtype, SHARED), Zeros())
        return zeros[key]

    for v, source in old.inputs.items():
        spec = old.specs[v]
        if not isinstance(source, _RECURRENT):
            values[v] = new.input(spec, source)
        elif isinstance(initial[source.state], Zeros):
            values[v] = zero(spec)
        else:
            if source.state not in shared:
                shared[source.state] = new.input(Spec(spec.shape, spec.dtype, SHARED), initial[source.state])
            values[v] = shared[source.state]

    childless = all(isinstance(source, Zeros) for source in initial)
    for instr in old.instrs:
        new.origin = instr.origin
        if instr.op in ("spread", "child_sum", "child_max"):
            if instr.op != "spread" and childless:
                values[instr.outputs[0]] = zero(old.specs[instr.outputs[0]])
            else:
                values[instr.outputs[0]] = values[instr.inputs[0]]
            continue
        made = new.call(instr.op, [values[v] for v in instr.inputs], dict(instr.attrs))
        values.update(zip(instr.outputs, made))
    program = new.program
    program.outputs = place_outputs(new, vertex.scattered, vertex.pushed, values)
    program.prune()
    return VertexProgram(program, vertex.num_states, vertex.asked)


def respecified(vertex: VertexProgram, inputs: Mapping[int, tuple[Spec, Any]]) -> VertexProgram:
    """The same program with other kinds and sources of some inputs; kinds are worked out anew."""
    old = vertex.program
    new = Builder(Program(name=old.name))
    values = {v: new.input(*inputs.get(v, (old.specs[v], source))) for v, source in old.inputs.items()}
    for instr in old.instrs:
        new.origin = instr.origin
        operands = [values[v] for v in instr.inputs]
        if instr.op == "spread" and new.specs[operands[0]].kind == SHARED:      # children see it as it is
            values[instr.outputs[0]] = operands[0]
            continue
        values.update(zip(instr.outputs, new.call(instr.op, operands, dict(instr.attrs))))
    new.program.outputs = own_outputs(new, [values[v] for v in vertex.program.outputs])
    new.program.prune()
    return VertexProgram(new.program, vertex.num_states)


def plan_class(vertex: VertexProgram, wanted: Collection[Any], recording: bool, in_one_launch: bool,
               recurrent: Collection[int] | None = None, begun: Sequence[bool] | None = None) -> ClassPlan:
    """Plan one class of vertices.

    Parameters
    ----------
    vertex : the program of the class
    wanted : sources (parameters, pulls, gathers) whose gradient is asked for
    recording : whether a backward pass will follow
    in_one_launch : the class runs all its rows in one launch: nothing is gained by an eager or a lazy part
    recurrent : the states that other launches of the round read; default: all. The others can wait for the last launch
    begun : of each output, whether a gradient comes to it; default: to all
    """
    program = vertex.program
    states = range(vertex.num_states) if recurrent is None else recurrent
    gathers = [v for v, s in program.inputs.items() if isinstance(s, _RECURRENT)]
    parts = partition(program.instrs, gathers, [vertex.scattered[k] for k in states])

    def again(begun: Sequence[bool]) -> ClassPlan:
        return plan_class(vertex, wanted, recording, in_one_launch, recurrent, begun)

    if not recording:
        return _assemble(vertex, program.specs, parts, None, {}, in_one_launch, states, again)
    sources: list[Any] = [StateGrad(k) for k in range(vertex.num_states)]
    sources += [OutputGrad(i) for i in range(len(vertex.pushed))]
    if begun is not None:
        sources = [source if begins else None for source, begins in zip(sources, begun)]
    backward = differentiate(program, [v for v, s in program.inputs.items() if s in wanted], sources)
    grads: dict[Any, list[int]] = {}
    for v, grad in backward.grads.items():
        grads.setdefault(program.inputs[v], []).append(grad)
    return _assemble(vertex, backward.program.specs, parts, backward, grads, in_one_launch, states, again)


def _assemble(vertex: VertexProgram, specs: list[Spec], parts: Parts, backward: Backward | None,
              grads: dict[Any, list[int]], in_one_launch: bool, recurrent: Collection[int],
              again: Callable[[Sequence[bool]], ClassPlan]) -> ClassPlan:
    outputs = set(vertex.program.outputs)
    back_parts = Parts([], [], [])
    inputs: dict[int, Any] = {}
    if backward is not None:
        inputs = backward.program.inputs
        senders = [grad for source, values in grads.items() for grad in values if isinstance(source, _RECURRENT)]
        readers = [v for v, s in inputs.items() if isinstance(s, StateGrad) and s.state in recurrent]
        back_parts = partition(backward.program.instrs, readers, senders)
        outputs.update(backward.program.outputs)
    if in_one_launch:
        parts, back_parts = (Parts([], _in_order(p.eager + p.critical + p.lazy), []) for p in (parts, back_parts))
    phases = [parts.eager, parts.critical, parts.lazy, back_parts.eager, back_parts.critical, back_parts.lazy]
    reads = [{v for instr in phase for v in instr.inputs} for phase in phases]
    steps = []
    for k, phase in enumerate(phases):
        elsewhere = set().union(*[r for j, r in enumerate(reads) if j != k])
        steps.append(make_steps(phase, elsewhere | outputs))
    kept = frozenset(v for k in (1, 4) for step in steps[k] for v in step.outputs
                     if v in outputs or any(v in r for j, r in enumerate(reads) if j != k))
    return ClassPlan(vertex, specs, Phases(*steps[:3]), Phases(*steps[3:]) if backward else None,
                     grads, inputs, kept, backward.sends if backward else {}, again)


def _in_order(instrs: Sequence[Instr]) -> list[Instr]:
    """Instructions by the numbers of their results, which are in the order of the trace."""
    return sorted(instrs, key=lambda instr: instr.outputs[0])




# ---- memory ----------------------------------------------------------------------------------

def peak_bytes(plans: Sequence[ClassPlan], layout: Layout) -> int:
    """An estimate of the memory that a run by MXNet's operators will hold at its peak, from shapes alone.

    Counted: the buffers and their messages, every value that is kept over all rows of its class, and the numbers of
    rows. Not counted: parameters and inputs, which exist already, and what a region uses inside itself.
    """
    total = layout.index_bytes
    for plan, part in zip(plans, layout.classes):
        phases = [plan.forward] + ([plan.backward] if plan.backward is not None else [])
        whole = {v for p in phases for step in (*p.eager, *p.lazy) for v in step.outputs}
        for v in (whole | plan.kept) - set(plan.outputs):
            spec, frame = plan.specs[v], part.whole
            rows = 1 if spec.kind == SHARED else frame.num_edges if spec.kind == CHILD else frame.num_rows
            total += rows * _bytes_of(spec)
    return total + buffer_bytes(plans, layout)


def buffer_bytes(plans: Sequence[ClassPlan], layout: Layout) -> int:
    """What the buffers take, and their messages if there is a backward pass."""
    backward = any(plan.backward is not None for plan in plans)
    return sum((layout.buffer_rows[k] + (layout.messages[k].num_rows if backward else 0)) * _bytes_of(spec)
               for k, spec in enumerate(layout.row_specs))


def _bytes_of(spec: Spec) -> int:
    return int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
