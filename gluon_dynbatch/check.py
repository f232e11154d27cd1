"""check=True: every recorded call once more by itself, compared with what the batched launch gave.

What the calls gave is kept for backward passes, which are compared in the same way (see `check_gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .check_gradients import GradientCheck
from .errors import BatchingMismatchError
from .values import SPECS

__all__ = ["check_calls"]

_TOLERANCE = {"float64": (1e-7, 1e-9), "float16": (1e-2, 1e-2)}


def check_calls(flushed: Any, tables: Any, entries: Sequence[Any]) -> None:
    """Run all recorded calls one by one in their order, each on the values that the loop would give it."""
    values: dict[int, Any] = {}
    recording, leaves = tables.recording, tables.leaves
    operand_offsets, value_offsets = recording.offsets
    for i, number in enumerate(tables.call_entry.tolist()):
        signature, cls = entries[number].signature, entries[number].cls
        tokens = recording.operands[operand_offsets[i]:operand_offsets[i + 1]].tolist()
        operands = [values[t] if t >= 0 else leaves.array(-1 - t) for t in tokens]
        first = int(value_offsets[i])
        if signature.draws:             # random: there is no value to compare with
            made = [flushed.row(flushed.number(first + k)) for k in range(len(signature.output_specs()))]
        else:
            made = signature.run_alone(cls.identity and cls.identity[0], operands)
        for k, want in enumerate(made):
            values[first + k] = want
            if not flushed.has(flushed.number(first + k)):  # it was inside a program, which is judged by its results
                continue
            got = flushed.row(flushed.number(first + k))
            _compare(got.asnumpy(), want.asnumpy(), SPECS[signature.output_specs()[k]].dtype, i, signature.title,
                     cls.where, k, operands)
    flushed.check = GradientCheck(tables, entries, values)


def _compare(got: Any, want: Any, dtype: str, number: int, title: str, where: str, output: int,
             operands: list[Any]) -> None:
    rtol, atol = _TOLERANCE.get(dtype, (1e-3, 1e-5))
    if got.shape == want.shape and np.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
        return
    worst = float(np.max(np.abs(got - want))) if got.shape == want.shape else float("nan")
    shapes = ", ".join(str(x.shape) for x in operands)
    where = f", called by {where}" if where else ""
    raise BatchingMismatchError(
        f"batching(check=True): call {number} ({title}{where}) on operands of shapes {shapes}: output "
        f"{output} of the batched launch differs from the call by itself by up to {worst:g} (shapes {got.shape} and "
        f"{want.shape}). Please report it; policy='none' or granularity='op' may avoid it.")
