"""Which backend runs a layout: the native one on the CPU, once its kernels are worth compiling; MXNet's elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import RunError
from ..executor import Run
from ..layout import Layout
from ..plan import ClassPlan
from .mxnet_ops import MXNetBackend

__all__ = ["BACKENDS", "make_run", "note_seconds", "runs_natively"]

BACKENDS = ("auto", "native", "mxnet")


def runs_natively(layout: Layout, plans: Sequence[ClassPlan], ctx: Any, backend: str) -> tuple[bool, str]:
    """Whether the native backend runs a layout, and the reason if it cannot.

    "auto" compiles missing kernels when one of the plans has run for as long as compiling them takes: a model that runs
    a few times does not wait for a compiler, and one that runs on has lost little. Kernels that are on disk are used at
    once. The environment variable DYNBATCH_BACKEND says what "auto" is.
    """
    if backend == "auto":
        backend = os.environ.get("DYNBATCH_BACKEND", "auto")
    if backend == "mxnet":
        return False, ""
    if ctx.device_type != "cpu":
        if backend == "native":
            raise RunError(f"backend='native' runs on the CPU, but the arrays are on {ctx}; use backend='auto'")
        return False, ""
    from .native_cpu.prepare import seconds_to_compile, why_not

    busy = [(plan, part) for plan, part in zip(plans, layout.classes) if part.whole.num_rows]
    reason = next((r for r in (why_not(plan) for plan, _ in busy) if r), "")
    if reason:
        return False, f"native backend: {reason}"
    if backend == "native":
        return True, ""
    spent = max((plan.compiled.get("seconds", 0.0) for plan, _ in busy), default=0.0)
    return sum(seconds_to_compile(plan, part) for plan, part in busy) <= spent, ""


def note_seconds(plans: Sequence[ClassPlan], seconds: float) -> None:
    """Remember how long plans ran."""
    for plan in plans:
        plan.compiled["seconds"] = plan.compiled.get("seconds", 0.0) + seconds


def make_run(native: bool, layout: Layout, plans: Sequence[ClassPlan], ctx: Any, arrays: dict[Any, Any],
             fills: Sequence[tuple[int, int, Any]]) -> Any:
    """A Run, or a NativeRun, which offers the same."""
    if native:
        from .native_cpu.run import NativeRun

        return NativeRun(layout, plans, arrays, fills)
    return Run(layout, plans, MXNetBackend(ctx), arrays, fills)
