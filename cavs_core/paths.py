"""Which inputs of a program a backward pass comes to, from which of its outputs. Pure; no device, no MXNet.

Two questions, because MXNet's tape knows two kinds of nothing. An input that an operator only looks at (an index, the
operand of BlockGrad) is *touched*: its gradient is zero, and counts as fresh. A gradient *flows* where an operator
computes one. What lies behind `detach` is not even touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .autodiff import differentiate
from .ops import lookup
from .program import Program

__all__ = ["Paths", "paths_of"]


class Paths(NamedTuple):
    """Of each output and each input of a program.

    Attributes
    ----------
    inputs : the sources of the inputs, in their order
    flows, touches : bool arrays, shape (outputs, inputs)
    """

    inputs: list[Any]
    flows: Any
    touches: Any


def paths_of(program: Program) -> Paths:
    """The paths through a program whose outputs are values of their own."""
    backward = differentiate(program, list(program.inputs), [object() for _ in program.outputs])
    unread = program.unread

    def flowing(place: int) -> list[int]:
        return backward.sends.get(place, [])

    def touching(place: int) -> list[int]:
        instr = program.instrs[place]
        if lookup(instr.op).leaves_tape:
            return []
        return [*instr.inputs, *[x for y in instr.outputs for x in unread.get(y, ())]]

    sources = list(program.inputs.values())
    place_of = {v: k for k, v in enumerate(program.inputs)}
    flows, touches = (np.zeros((len(program.outputs), len(sources)), bool) for _ in range(2))
    for k, output in enumerate(program.outputs):
        for found, step in ((flows, flowing), (touches, touching)):
            for v in _reached(program, output, step):
                if v in place_of:
                    found[k, place_of[v]] = True
    return Paths(sources, flows, touches)


def _reached(program: Program, output: int, step: Callable[[int], list[int]]) -> set[int]:
    """The values that are reached from an output; `step` gives the inputs that an instruction leads to."""
    reached = {output}
    for place in range(len(program.instrs) - 1, -1, -1):
        if not reached.isdisjoint(program.instrs[place].outputs):
            reached.update(step(place))
    return reached
