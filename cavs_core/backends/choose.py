"""Which backend runs a layout: the native one on the CPU, once its kernels are worth compiling; MXNet's elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import RunError
from ..executor import Run
from ..layout import Layout
from ..plan import ClassPlan
from ..updates import install_updates
from .mxnet_ops import MXNetBackend
from .native_cpu.assembly import is_assembled
from .native_cpu.prepare import seconds_to_compile, why_not
from .native_cpu.run import NativeRun

__all__ = ["BACKENDS", "have_run", "make_run", "note_seconds", "runs_in_the_end", "runs_natively"]

BACKENDS = ("auto", "native", "mxnet")


def runs_in_the_end(ctx: Any, backend: str) -> str:
    """What runs a model that runs on, if it has only operators that are native: "native" or "mxnet"."""
    asked = _asked(backend)
    return "mxnet" if asked == "mxnet" or (asked == "auto" and ctx.device_type != "cpu") else "native"


def _asked(backend: str) -> str:
    """The environment variable DYNBATCH_BACKEND says what "auto" is."""
    return os.environ.get("DYNBATCH_BACKEND", "auto") if backend == "auto" else backend


def runs_natively(layout: Layout, plans: Sequence[ClassPlan], ctx: Any, backend: str) -> tuple[bool, str]:
    """Whether the native backend runs a layout, and the reason if it cannot.

    "auto" compiles missing kernels when one of the plans has run for as long as compiling them takes: a model that runs
    a few times does not wait for a compiler, and one that runs on has lost little. Kernels that are on disk are used at
    once.
    """
    if runs_in_the_end(ctx, backend) == "mxnet":
        return False, ""
    if ctx.device_type != "cpu":
        raise RunError(f"backend='native' runs on the CPU, but the arrays are on {ctx}; use backend='auto'")
    if is_assembled(layout, plans):     # it ran before: nothing is missing
        return True, ""
    busy = [(plan, part) for plan, part in zip(plans, layout.classes) if part.has_rows]
    reason = next((r for r in (why_not(plan) for plan, _ in busy) if r), "")
    if reason:
        return False, f"native backend: {reason}"
    if _asked(backend) == "native":
        return True, ""
    spent = max((plan.compiled.get("seconds", 0.0) for plan, _ in busy), default=0.0)
    return sum(seconds_to_compile(plan, part) for plan, part in busy) <= spent, ""


def have_run(plans: Sequence[ClassPlan], layout: Layout) -> bool:
    """Whether all classes that have rows ran before: MXNet has made its operators."""
    return all("seconds" in plan.compiled for plan, part in zip(plans, layout.classes) if part.has_rows)


def note_seconds(plans: Sequence[ClassPlan], seconds: float) -> None:
    """Remember how long plans ran."""
    for plan in plans:
        plan.compiled["seconds"] = plan.compiled.get("seconds", 0.0) + seconds


def make_run(native: bool, layout: Layout, plans: Sequence[ClassPlan], ctx: Any, arrays: dict[Any, Any],
             fills: Sequence[tuple[int, int, Any]]) -> Any:
    """A Run, or a NativeRun, which offers the same. From the first NativeRun on parameters are updated natively too."""
    if native:
        install_updates()
        return NativeRun(layout, plans, arrays, fills)
    return Run(layout, plans, MXNetBackend(ctx), arrays, fills)
