"""Planned classes -> compiled ones: lowered, their kernels compiled; remembered with the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...layout import Layout
from ...plan import ClassPlan
from . import codegen, kernel_cache
from .ir import KernelOp
from .lower import lower_class
from .values import Lowered, size_of

__all__ = ["Prepared", "prepare", "is_prepared", "why_not", "size_of"]


class Prepared:
    """A class whose kernels are compiled."""

    def __init__(self, lowered: Lowered):
        self.lowered = lowered
        self.kernels: dict[int, tuple[int, int]] = {}       # id of a KernelOp -> its address, and ns a row

    @property
    def kernel_ops(self) -> list[KernelOp]:
        return [op for op in self._ops() if isinstance(op, KernelOp)]

    @property
    def sources(self) -> list[str]:
        """The source of each kernel."""
        return [codegen.source_of(op.kernel) for op in self.kernel_ops]

    def _ops(self) -> Iterable[Any]:
        for phase in (*self.lowered.forward, *self.lowered.backward):
            for stage in phase:
                yield from stage


def why_not(plan: ClassPlan) -> str:
    """Why a class cannot run natively; empty if it can."""
    if "native reason" not in plan.compiled:
        phases = [plan.forward] + ([plan.backward] if plan.backward is not None else [])
        reasons = (codegen.supports(instr.op, dict(instr.attrs),
                                    [plan.specs[v] for v in (*instr.inputs, *instr.outputs)])
                   for p in phases for step in (*p.eager, *p.critical, *p.lazy) for instr in step.instrs
                   if instr.op not in _NOT_IN_KERNELS)
        plan.compiled["native reason"] = next((r for r in reasons if r), "")
    return plan.compiled["native reason"]


_NOT_IN_KERNELS = ("spread", "child_sum", "child_max", "stack_rows", "sum_rows", "uniform_like")


def is_prepared(plan: ClassPlan) -> bool:
    return "native" in plan.compiled


def prepare(plans: Sequence[ClassPlan], layout: Layout) -> list[Prepared]:
    """Lower and compile the classes that are not ready yet; one without rows has nothing to run."""
    new = []
    for plan, part in zip(plans, layout.classes):
        if "native" not in plan.compiled and part.whole.num_rows:
            plan.compiled["native"] = Prepared(lower_class(plan, part))
            new.append(plan.compiled["native"])
    kernels = [op for prepared in new for op in prepared.kernel_ops]
    if kernels:
        addresses = kernel_cache.compile_kernels([codegen.source_of(op.kernel) for op in kernels])
        found = dict(zip(map(id, kernels), addresses))
        for prepared in new:
            prepared.kernels = {id(op): (found[id(op)], _cost(op)) for op in prepared.kernel_ops}
    return [plan.compiled["native"] if part.whole.num_rows else _IDLE for plan, part in zip(plans, layout.classes)]


_IDLE = Prepared(Lowered([[], [], []], [[], [], []], {}, []))


def _cost(op: KernelOp) -> int:
    """About how many ns a row takes."""
    specs = dict(op.kernel.specs)
    return 5 + sum(size_of(specs[v]) for instr in op.kernel.instrs for v in instr.outputs) // 2
