"""Planned classes -> compiled ones: lowered, their kernels compiled; remembered with the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from ...layout import ClassLayout, Layout
from ...plan import ClassPlan
from ...program import Instr
from . import codegen, kernel_cache
from .ir import KernelOp
from .lower import lower_class
from .packing import packed
from .stages import OwnMemory, Refs, Stage
from .values import Lowered, size_of

__all__ = ["Prepared", "are_ready", "kernel_sources", "prepare", "seconds_to_compile", "size_of", "why_not"]


class Form:
    """The operations of a class, with its weights as they stand or packed.

    Attributes
    ----------
    stages : forward and backward: phase, stage
    packs : forward and backward: the Stage that runs before all others, if weights are packed
    memory : forward and backward: OwnMemory
    """

    def __init__(self, lowered: Lowered, kernels: dict[int, tuple[int, int]], refs: Refs, packs_weights: bool):
        self.stages: list[list[list[Stage]]] = []
        self.packs: list[list[Stage]] = []
        self.memory: list[OwnMemory] = []
        for backward, phases in enumerate((lowered.forward, lowered.backward)):
            packs, phases = packed(phases) if packs_weights else ([], phases)
            self.stages.append([[Stage(stage, kernels, refs) for stage in phase] for phase in phases])
            self.packs.append([Stage(packs, kernels, refs)] if packs else [])
            self.memory.append(OwnMemory(lowered.owned, bool(backward), packs, refs))


class Prepared:
    """A class that is lowered, and once it is ready, compiled."""

    def __init__(self, lowered: Lowered):
        self.lowered, self.ready = lowered, False
        self.refs = Refs()
        self.forms: list[Form] = [Form(Lowered([[], [], []], [[], [], []], {}, []), {}, self.refs, False)] * 2
        self.grad_sources: list[Any] = []       # whose gradients are sums over rows

    def finish(self, kernels: dict[int, tuple[int, int]]) -> None:
        """Take the kernels: id of a KernelOp -> its address, and ns a row."""
        self.forms = [Form(self.lowered, kernels, self.refs, packs_weights) for packs_weights in (False, True)]
        self.grad_sources = list(dict.fromkeys(part.source for phase in self.forms[0].stages[1] for stage in phase
                                               for part in stage.sums if not part.own))
        self.ready = True

    @property
    def kernel_ops(self) -> list[KernelOp]:
        return [op for op in self._ops() if isinstance(op, KernelOp)]

    @cached_property
    def sources(self) -> list[str]:
        """The source of each kernel."""
        return [codegen.source_of(op.kernel) for op in self.kernel_ops]

    @cached_property
    def num_missing(self) -> int:
        """How many kernels were not on disk when somebody asked first."""
        return kernel_cache.missing(self.sources)

    def _ops(self) -> Iterable[Any]:
        for phase in (*self.lowered.forward, *self.lowered.backward):
            for stage in phase:
                yield from stage


def why_not(plan: ClassPlan) -> str:
    """Why a class cannot run natively; empty if it can."""
    if "native reason" not in plan.compiled:
        phases = [plan.forward] + ([plan.backward] if plan.backward is not None else [])
        instrs = [instr for p in phases for step in (*p.eager, *p.critical, *p.lazy) for instr in step.instrs]
        reasons = (codegen.supports(instr.op, dict(instr.attrs),
                                    [plan.specs[v] for v in (*instr.inputs, *instr.outputs)])
                   for instr in instrs if instr.op not in _NOT_IN_KERNELS)
        plan.compiled["native reason"] = _sums_of_integers(plan, instrs) or next((r for r in reasons if r), "")
    return plan.compiled["native reason"]


def _sums_of_integers(plan: ClassPlan, instrs: Sequence[Instr]) -> str:
    """Why the sums over rows of a class cannot run natively: gradients, and what is added up over children."""
    summed = [v for instr in instrs if instr.op in _SUMS for v in instr.inputs]
    grads = [*plan.backward_inputs, *(v for values in plan.grads.values() for v in values)]
    found = next((plan.specs[v].dtype for v in (*grads, *summed) if not plan.specs[v].is_float), "")
    return f"sums over rows of {found} have no native kernels" if found else ""


_SUMS = ("child_sum", "child_max", "sum_rows")
_NOT_IN_KERNELS = ("spread", *_SUMS, "stack_rows", "uniform_like")


def are_ready(plans: Iterable[ClassPlan], layout: Layout) -> bool:
    """Whether all classes that have rows are compiled: a run does nothing but run."""
    return all("native" in plan.compiled and plan.compiled["native"].ready
               for plan, part in zip(plans, layout.classes) if part.has_rows)


def kernel_sources(plan: ClassPlan) -> list[str]:
    """The source of each kernel of a class; empty if it never ran natively."""
    prepared = plan.compiled.get("native")
    return prepared.sources if prepared is not None and prepared.ready else []


def seconds_to_compile(plan: ClassPlan, part: ClassLayout) -> float:
    """About how long the kernels of a class would take to compile; those on disk take no time."""
    prepared = _lowered(plan, part)
    return 0.0 if prepared.ready else _SECONDS_A_KERNEL * prepared.num_missing


def prepare(plans: Sequence[ClassPlan], layout: Layout) -> list[Prepared]:
    """Lower and compile the classes that are not ready yet; one without rows has nothing to run."""
    found = [_lowered(plan, part) if part.has_rows else _IDLE for plan, part in zip(plans, layout.classes)]
    new = [prepared for prepared in dict.fromkeys(found) if not prepared.ready]
    kernels = [op for prepared in new for op in prepared.kernel_ops]
    addresses = kernel_cache.compile_kernels([source for prepared in new for source in prepared.sources])
    compiled = dict(zip(map(id, kernels), addresses))
    for prepared in new:
        prepared.finish({id(op): (compiled[id(op)], _cost(op)) for op in prepared.kernel_ops})
    return found


def _lowered(plan: ClassPlan, part: ClassLayout) -> Prepared:
    if "native" not in plan.compiled:
        plan.compiled["native"] = Prepared(lower_class(plan, part))
    return plan.compiled["native"]


_IDLE = Prepared(Lowered([[], [], []], [[], [], []], {}, []))
_SECONDS_A_KERNEL = 0.4


def _cost(op: KernelOp) -> int:
    """About how many ns a row takes."""
    specs = dict(op.kernel.specs)
    return 5 + sum(size_of(specs[v]) for instr in op.kernel.instrs for v in instr.outputs) // 2
