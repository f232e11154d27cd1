"""Programs whose first axis is one of independent rows: calls with different numbers of rows may share a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .ops import lookup
from .program import Program, Spec

__all__ = ["one_row_program"]

# Two numbers of rows that no real shape has: what depends on the number of rows differs between the two programs.
_MANY, _OTHER = 7919, 7907


def one_row_program(build: Callable[[int], Program], call: Program | None = None) -> Program | None:
    """The program of a single row, if the rows of a call are independent; else None.

    It is what the program of many rows does to one of them. That need not be what the operator does to an array of one
    row: `squeeze` drops an axis of one.

    Parameters
    ----------
    build : callable
        Number of rows -> program; the inputs that have the rows have them as their first axis.
    call : the program of a call; if its number of rows (one, as a rule) makes it mean something else, None is returned
    """
    many, other = build(_MANY), build(_OTHER)
    if _without(many, _MANY) != _without(other, _OTHER):
        return None
    inputs = [v for v in many.inputs if many.specs[v].shape[:1] == (_MANY,)]
    split = set(inputs)
    for instr in many.instrs:
        parts = [v in split for v in instr.inputs]
        if any(parts):
            specs = [many.specs[v] for v in instr.inputs]
            if not lookup(instr.op).splits_rows(dict(instr.attrs), specs, parts):
                return None
            split.update(instr.outputs)
    if not all(_has_rows(spec, v in split) for v, spec in enumerate(many.specs)):
        return None
    if any(many.specs[v].shape[0] != _MANY for v in many.outputs):
        return None
    if call is not None:
        rows = call.specs[inputs[0]].shape[0]
        if [call.specs[v] for v in call.outputs] != [_with_rows(many.specs[v], rows) for v in many.outputs]:
            return None
    return replace(many, specs=[_with_rows(s, 1) for s in many.specs],
                   instrs=[replace(i, attrs=_with_rows(i.attrs, 1)) for i in many.instrs])


def _has_rows(spec: Spec, split: bool) -> bool:
    """Whether the rows are where they belong: along the first axis of what is split, and nowhere else."""
    return [k for k, n in enumerate(spec.shape) if n % _MANY == 0] == [0] * split


def _with_rows(value: Any, rows: int, many: int = _MANY) -> Any:
    """A spec or a (nested) tuple with another number of rows."""
    if isinstance(value, Spec):
        return replace(value, shape=_with_rows(value.shape, rows))
    if isinstance(value, tuple):
        return tuple(_with_rows(v, rows, many) for v in value)
    return value // many * rows if type(value) is int and value % many == 0 else value


def _without(program: Program, number: int) -> list[Any]:
    """The instructions with one size left open."""
    return [(i.op, _with_rows(i.attrs, 1, number), i.inputs, i.outputs) for i in program.instrs]
