"""Program -> backward program.

The backward program goes on with the forward program's value numbers: it reads forward values by their own
number (`saved`), and its new values begin where the forward program ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .ops import Builder, lookup
from .program import SHARED, Program

__all__ = ["Backward", "differentiate"]


@dataclass
class Backward:
    """What `differentiate` returns."""

    program: Program                # specs: forward and backward values; inputs: the output gradients
    grads: dict[int, int]           # wanted forward input -> its gradient
    saved: list[int]                # forward values that the backward instructions read
    sends: dict[int, list[int]]     # place of a forward instruction -> the inputs that it sends a gradient to


def differentiate(program: Program, wanted: Collection[int], sources: Sequence[Any | None]) -> Backward:
    """Gradients of the `wanted` inputs.

    Parameters
    ----------
    program : Program
    wanted : values of `program.inputs` whose gradient is asked for
    sources : for each output of the program, where its gradient comes from (kept as the source of a program
        input), or None where no gradient arrives

    Returns
    -------
    Backward; an input that no output depends on has no entry in `grads`.
    """
    builder = Builder(Program(specs=list(program.specs), name=f"{program.name} backward"))
    active = _active_values(program, wanted)
    grads: dict[int, int] = {}

    def accumulate(value: int, grad: int) -> None:
        if builder.specs[value].kind == SHARED and builder.specs[grad].kind != SHARED:
            grad = builder.emit("sum_rows", grad)
        assert builder.shape(grad) == builder.shape(value), (program, value, grad)
        grads[value] = builder.add(grads[value], grad) if value in grads else grad

    for value, source in zip(program.outputs, sources):
        if source is not None and value in active:
            accumulate(value, builder.input(program.specs[value], source))

    sends: dict[int, list[int]] = {}
    for place in range(len(program.instrs) - 1, -1, -1):
        instr = program.instrs[place]
        dys = [grads.get(v) for v in instr.outputs]
        if all(dy is None for dy in dys) or active.isdisjoint(instr.inputs):
            continue
        builder.origin = instr.origin
        made = lookup(instr.op).grad(builder, dict(instr.attrs), list(instr.inputs), list(instr.outputs), dys)
        answered = [(value, grad) for value, grad in zip(instr.inputs, made) if grad is not None and value in active]
        for value, grad in answered:
            accumulate(value, grad)
        if answered:
            sends[place] = [value for value, _ in answered]

    found = {v: grads[v] for v in wanted if v in grads}
    found = _own_values(builder, found, len(program.specs))
    backward = builder.program
    backward.outputs = list(found.values())
    backward.prune()
    read = {v for instr in backward.instrs for v in instr.inputs}
    saved = sorted(v for v in read if v < len(program.specs))
    return Backward(backward, found, saved, sends)


def _active_values(program: Program, wanted: Collection[int]) -> set[int]:
    """Values that depend on a wanted input. Integers pass gradients on, too: those have the dtype of the value."""
    active = set(wanted)
    for instr in program.instrs:
        if not active.isdisjoint(instr.inputs):
            active.update(instr.outputs)
    return active


def _own_values(builder: Builder, grads: dict[int, int], first: int) -> dict[int, int]:
    """Every result a value of its own, made by a backward instruction: each has its own place in memory."""
    taken = set(builder.program.inputs)
    own = {}
    for value, grad in grads.items():
        if grad in taken or grad < first:
            grad = builder.emit("_copy", grad)
        taken.add(grad)
        own[value] = grad
    return own
