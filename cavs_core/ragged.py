"""Programs whose first axis is one of independent rows: calls with different numbers of rows may share a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ops import lookup
from .program import Program

__all__ = ["one_row_program"]

# Two numbers of rows that no real shape has: what depends on the number of rows differs between the two programs.
_MANY, _OTHER = 7919, 7907


def one_row_program(build: Callable[[int], Program]) -> Program | None:
    """The program of a single row, if the rows of a call are independent; else None.

    Parameters
    ----------
    build : callable
        Number of rows -> program; the inputs that have the rows have them as their first axis.
    """
    many, other = build(_MANY), build(_OTHER)
    if _without(many, _MANY) != _without(other, _OTHER):
        return None
    split = {v for v in many.inputs if many.specs[v].shape[0] == _MANY}
    for instr in many.instrs:
        parts = [v in split for v in instr.inputs]
        if any(parts):
            specs = [many.specs[v] for v in instr.inputs]
            if not lookup(instr.op).splits_rows(dict(instr.attrs), specs, parts):
                return None
            if any(many.specs[v].shape[0] % _MANY for v in instr.outputs):
                return None
            split.update(instr.outputs)
    whole = all(v in split and many.specs[v].shape[0] == _MANY for v in many.outputs)
    return build(1) if whole else None


def _without(program: Program, number: int) -> list[Any]:
    """The instructions with one size left open."""
    def opened(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(opened(v) for v in value)
        return ("rows", value // number) if type(value) is int and value and value % number == 0 else value

    return [(i.op, opened(i.attrs), i.inputs, i.outputs) for i in program.instrs]
