"""Which inputs of a program a backward pass comes to, from which of its outputs. Pure; no device, no MXNet.

Two questions, because MXNet's tape knows two kinds of nothing. An input that an operator only looks at (an index, the
operand of BlockGrad) is *touched*: its gradient is zero, and counts as fresh. A gradient *flows* where an operator
computes one. What lies behind `detach` is not even touched.

The answers are bool arrays, shape (outputs, inputs), with the inputs in the order of `Program.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .autodiff import differentiate
from .ops import lookup
from .program import Program

__all__ = ["flows_of", "touches_of"]


def flows_of(program: Program) -> Any:
    """The inputs that outputs send a gradient to."""
    sends = differentiate(program, list(program.inputs), [object() for _ in program.outputs]).sends
    return _inputs_reached(program, lambda place: sends.get(place, []))


def touches_of(program: Program) -> Any:
    """The inputs that outputs touch; those of operands whose values do not matter only before a program is pruned."""
    def step(place: int) -> list[int]:
        instr = program.instrs[place]
        if lookup(instr.op).leaves_tape:
            return []
        return [*instr.inputs, *[x for y in instr.outputs for x in program.unread.get(y, ())]]

    return _inputs_reached(program, step)


def _inputs_reached(program: Program, step: Callable[[int], list[int]]) -> Any:
    """The inputs that each output leads to; `step` gives the values that an instruction leads to, by its place."""
    place_of = {v: k for k, v in enumerate(program.inputs)}
    found = np.zeros((len(program.outputs), len(place_of)), bool)
    steps = [step(place) for place in range(len(program.instrs))]
    for k, output in enumerate(program.outputs):
        reached = {output}
        for instr, leads_to in zip(reversed(program.instrs), reversed(steps)):
            if not reached.isdisjoint(instr.outputs):
                reached.update(leads_to)
        found[k, [place_of[v] for v in reached if v in place_of]] = True
    return found
