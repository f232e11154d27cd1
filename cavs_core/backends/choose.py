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

__all__ = ["BACKENDS", "runs_natively", "make_run"]

BACKENDS = ("auto", "native", "mxnet")
_TRIALS = 2         # runs of a plan on MXNet's operators before its kernels are compiled


def runs_natively(layout: Layout, plans: Sequence[ClassPlan], ctx: Any, backend: str) -> tuple[bool, str]:
    """Whether the native backend runs a layout, and the reason if it cannot.

    "auto" compiles the kernels of a plan when it comes for the third time: a model that runs once should not wait for
    a compiler. The environment variable DYNBATCH_BACKEND says what "auto" is.
    """
    if backend == "auto":
        backend = os.environ.get("DYNBATCH_BACKEND", "auto")
    if backend == "mxnet":
        return False, ""
    if ctx.device_type != "cpu":
        if backend == "native":
            raise RunError(f"backend='native' runs on the CPU, but the arrays are on {ctx}; use backend='auto'")
        return False, ""
    from .native_cpu.prepare import is_prepared, why_not

    busy = [plan for plan, part in zip(plans, layout.classes) if part.whole.num_rows]
    reason = next((r for r in map(why_not, busy) if r), "")
    if reason:
        return False, f"native backend: {reason}"
    new = [plan for plan in busy if not is_prepared(plan)]
    for plan in new:
        plan.compiled["runs"] = plan.compiled.get("runs", 0) + 1
    return backend == "native" or all(plan.compiled["runs"] > _TRIALS for plan in new), ""


def make_run(native: bool, layout: Layout, plans: Sequence[ClassPlan], ctx: Any, arrays: dict[Any, Any],
             fills: Sequence[tuple[int, int, Any]]) -> Any:
    """A Run, or a NativeRun, which offers the same."""
    if native:
        from .native_cpu.run import NativeRun

        return NativeRun(layout, plans, arrays, fills)
    return Run(layout, plans, MXNetBackend(ctx), arrays, fills)
