"""The values of a planned class: which are views, which are loads, which are sums, and where each stands in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...layout import ClassLayout
from ...plan import ClassPlan, Phases
from ...program import SHARED, GatherSum, Instr, OutputGrad, Pull, Spec, StateGrad, Zeros
from .ir import LOCAL, MAX_EDGES, ONE, ROW_AT, SUM, SUM_EDGES, TAKE, Access, Op, Ref

__all__ = ["CHANGES", "Lowered", "Owned", "Values", "size_of"]

#: changes of kind: no work, only another way to read memory
CHANGES = ("spread", "child_sum", "child_max", "stack_rows")
#: work that is better done for all rows at once
_STAYS = ("matmul", "batch_matmul", "lookup", "uniform_like", "sum_rows")


@dataclass(frozen=True)
class Owned:
    """Memory that belongs to the class: a row for each position, edge, or one in all; or for one launch's."""

    spec: Spec
    local: bool
    backward: bool


@dataclass
class Lowered:
    """One class of vertices, ready to be given addresses."""

    forward: list[list[list[Op]]]                   # eager, critical, lazy: stages of operations
    backward: list[list[list[Op]]]
    owned: dict[int, Owned]
    draws: list[tuple[int, dict[str, Any], int]]    # value, attributes, phase (0 to 5)
    # shared source -> what is added to its gradient: the value whose memory holds it, and its shape
    grad_values: dict[Any, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)


class Values:
    """What the instructions of all phases (numbered 0 to 5) make of the values; `lower.py` schedules them."""

    def __init__(self, plan: ClassPlan, layout: ClassLayout):
        self.plan, self.layout, self.specs = plan, layout, plan.specs
        phases = [plan.forward, plan.backward or Phases([], [], [])]
        self.phases = [[i for step in steps for i in step.instrs]
                       for p in phases for steps in (p.eager, p.critical, p.lazy)]
        self._delay_cheap_work()
        self.inputs = {**plan.backward_inputs, **plan.inputs}
        self.maker = {v: instr for phase in self.phases for instr in phase for v in instr.outputs}
        self.pinned = self._places()
        self.lowered = Lowered([], [], {}, [])
        self.fused: dict[int, Instr] = {}           # product or scatter -> the sum that it feeds alone
        self.targets: dict[int, Ref] = {}           # result of a sum -> the gradient that it is added to
        self.skipped: set[int] = set()              # additions of gradients that the sums make by themselves
        self._find_sums()
        self.copies: dict[int, int] = {}            # load -> the phase that copies it
        self._find_copies()
        self.readers = self._find_readers()

    def _delay_cheap_work(self) -> None:
        """Move pointwise work that only the launches read from the eager part into them: it saves its way to memory."""
        for eager, critical in ((0, 1), (3, 4)):
            outside = {v for p, phase in enumerate(self.phases) if p not in (eager, critical)
                       for instr in phase for v in instr.inputs} | set(self.plan.outputs)
            outside.update(v for values in self.plan.grads.values() for v in values)
            launched = {v for instr in self.phases[critical] for v in instr.inputs}
            kept: list[Instr] = []
            for instr in reversed(self.phases[eager]):
                rows = self.specs[instr.outputs[0]].kind != SHARED
                if rows and instr.op not in _STAYS and outside.isdisjoint(instr.outputs) \
                        and not launched.isdisjoint(instr.outputs):
                    self.phases[critical].insert(0, instr)
                    launched.update(instr.inputs)
                else:
                    kept.append(instr)
                    outside.update(instr.inputs)
            self.phases[eager] = kept[::-1]

    # ---- values ------------------------------------------------------------------------------

    def _places(self) -> dict[int, Ref]:
        """Values that are written to a place outside the class."""
        places: dict[int, Ref] = {}
        for source, values in self.plan.grads.items():
            for v in values:
                if source in self.layout.sends:
                    places[v] = ("send", source)
                elif isinstance(source, Pull):
                    places[v] = ("pull_grad", source)
        places.update({v: ("output", k) for k, v in enumerate(self.plan.outputs)})
        return places

    def root(self, v: int) -> int:
        """The value whose memory a view shows."""
        while v in self.maker and self.maker[v].op == "Reshape" and v not in self.pinned:
            v = self.maker[v].inputs[0]
        return v

    def is_load(self, v: int) -> bool:
        if self.specs[v].kind == SHARED:
            return False
        return v not in self.maker or (self.maker[v].op in CHANGES and v not in self.pinned)

    def base_of(self, load: int) -> int | None:
        """The value that a change of kind reads."""
        return self.root(self.maker[load].inputs[0]) if load in self.maker else None

    def _uses(self) -> dict[int, int]:
        uses: dict[int, int] = dict.fromkeys(self.pinned, 1)
        for phase in self.phases:
            for instr in phase:
                for v in instr.inputs:
                    uses[v] = uses.get(v, 0) + 1
        return uses

    # ---- sums --------------------------------------------------------------------------------

    def _find_sums(self) -> None:
        uses = self._uses()
        for phase in self.phases:
            for instr in phase:
                if instr.op == "sum_rows":
                    made = self.maker.get(instr.inputs[0])
                    if made is not None and uses[instr.inputs[0]] == 1 and self._sums_alone(made):
                        self.fused[made.outputs[0]] = instr
        shared = {source: values for source, values in self.plan.grads.items()
                  if source not in self.layout.sends and all(self.specs[v].kind == SHARED for v in values)}
        for v in [v for values in shared.values() for v in values]:
            uses[v] = uses.get(v, 0) + 1        # (what another gradient is a copy of must stay)
        for source, values in shared.items():
            for v in values:
                chain: list[int] = []
                terms = self._terms(v, uses, chain)
                if terms is None:
                    self.lowered.grad_values.setdefault(source, []).append((self.root(v), self.specs[v].shape))
                else:
                    self.targets.update(dict.fromkeys(terms, ("grad", source)))
                    self.skipped.update(chain)

    def _sums_alone(self, instr: Instr) -> bool:
        kinds = {self.specs[v].kind for v in instr.inputs}
        if len(kinds) > 1 or SHARED in kinds:
            return False
        if instr.op == "matmul":
            a = dict(instr.attrs)
            left, right = (self.specs[v].shape for v in instr.inputs)
            return (a["transpose_a"] or 1 in left) and (not a["transpose_b"] or 1 in right)
        return instr.op == "scatter_rows"

    def _terms(self, v: int, uses: dict[int, int], chain: list[int]) -> list[int] | None:
        """The sums that a gradient is the total of; None if it is anything else. `chain`: what adds them up."""
        instr = self.maker.get(v)
        if instr is None or uses.get(v, 0) > 1:
            return None
        if instr.op == "sum_rows":
            return [v]
        if instr.op in ("Reshape", "_copy") or (instr.op == "broadcast_add" and all(
                self.specs[x].shape == self.specs[v].shape for x in instr.inputs)):
            chain.append(v)
            found: list[int] = []
            for x in instr.inputs:
                part = self._terms(x, uses, chain)
                if part is None or self.specs[x].kind != SHARED:
                    return None
                found += part
            return found
        return None

    # ---- loads that must be memory -----------------------------------------------------------

    def _find_copies(self) -> None:
        """Loads that products, sums and other loads read: copied in the first phase that needs them."""
        for p, phase in enumerate(self.phases):
            for instr in phase:
                for v in self._memory_operands(instr):
                    r = self.root(v)
                    if self.is_load(r) and r not in self.copies:
                        self.copies[r] = p

    def _memory_operands(self, instr: Instr) -> Sequence[int]:
        if instr.op in CHANGES:
            return instr.inputs
        if instr.op == "sum_rows":
            made = self.maker.get(instr.inputs[0])
            return made.inputs if made is not None and made.outputs[0] in self.fused else instr.inputs
        if instr.outputs[0] not in self.fused and self._product_of(instr) is not None:
            return instr.inputs
        return ()

    def _find_readers(self) -> dict[int, set[int]]:
        """The phases that read each value: a view's reader reads its root, and who reads a load reads its base too."""
        readers: dict[int, set[int]] = {}
        for p, phase in enumerate(self.phases):
            for instr in phase:
                if instr.op in ("Reshape", *CHANGES) and instr.outputs[0] not in self.pinned:
                    continue
                for v in instr.inputs:
                    r: int | None = self.root(v)
                    while r is not None:
                        readers.setdefault(r, set()).add(p)
                        r = self.base_of(r) if self.is_load(r) else None
        return readers

    # ---- products ----------------------------------------------------------------------------

    def _product_of(self, instr: Instr) -> tuple[int, int, bool, int, int, int] | None:
        """(rows operand, matrix, matrix is stored (n, k), n, k, rows a position), or None."""
        if instr.op != "matmul":
            return None
        a, (x, y) = dict(instr.attrs), instr.inputs
        ta, tb = a["transpose_a"], a["transpose_b"]
        xs, ys = self.specs[x], self.specs[y]
        p, k = xs.shape[::-1] if ta else xs.shape
        n = (ys.shape[::-1] if tb else ys.shape)[1]
        if ys.kind == SHARED and (not ta or 1 in xs.shape):
            return x, y, tb, n, k, p
        if xs.kind == SHARED and n == 1:
            return y, x, not ta, p, k, 1
        return None

    # ---- memory ------------------------------------------------------------------------------

    def _own(self, v: int, p: int) -> None:
        """Give a value memory of the class, unless it has a place outside."""
        if v in self.pinned or v in self.lowered.owned:
            return
        spec = self.specs[v]
        local = (spec.kind != SHARED and p in (1, 4) and self.readers.get(v, set()) <= {p}
                 and not self._read_as_base(v) and v not in {drawn for drawn, _, _ in self.lowered.draws})
        self.lowered.owned[v] = Owned(spec, local, p >= 3)

    def _read_as_base(self, v: int) -> bool:
        """Whether a change of kind reads the value: its rows are then found by absolute number."""
        return any(instr.op in CHANGES and self.root(instr.inputs[0]) == v for phase in self.phases for instr in phase)

    def _ref(self, v: int) -> Ref:
        if v in self.pinned:
            return self.pinned[v]
        if v not in self.maker and self.specs[v].kind == SHARED:
            source = self.inputs[v]
            return ("zeros", self.specs[v]) if isinstance(source, Zeros) else ("shared", source)
        return ("value", v)

    def _is_local(self, v: int) -> bool:
        return v in self.lowered.owned and self.lowered.owned[v].local

    def _access(self, v: int) -> Access:
        spec = self.specs[v]
        if spec.kind == SHARED:
            return Access(ONE, spec.dtype, spec.shape)
        return Access(LOCAL if self._is_local(v) else ROW_AT, spec.dtype, spec.shape, size_of(spec))

    def _load(self, v: int, copying: Iterable[int]) -> tuple[Access, tuple[Ref | None, Ref | None, Ref | None]]:
        """How a kernel reads a value, and the memory that it needs for it."""
        spec = self.specs[v]
        pinned_change = v in self.maker and self.maker[v].op in CHANGES and v in self.pinned
        if not pinned_change and (not self.is_load(v) or (v in self.lowered.owned and v not in copying)):
            return self._access(v), (self._ref(v), None, None)
        size = size_of(spec)
        if v in self.maker:
            return self._load_change(self.maker[v], spec, size)
        source = self.inputs[v]
        if isinstance(source, StateGrad):
            width = self.layout.writes[source.state].width
            return (Access(SUM, spec.dtype, spec.shape, size // width, parts=width),
                    (("messages", source.state), ("pull", source.state), ("pull_bounds", source.state)))
        if isinstance(source, Pull):
            return Access(TAKE, spec.dtype, spec.shape, size), (("external", source), ("external_rows", None), None)
        if isinstance(source, OutputGrad):
            return Access(TAKE, spec.dtype, spec.shape, size), (("output_grad", source), ("pushed_rows", None), None)
        read = self.layout.reads[source]
        if isinstance(source, GatherSum):
            return (Access(SUM, spec.dtype, spec.shape, size),
                    (("buffer", source), ("rows", source), ("bounds", None)))
        return (Access(TAKE, spec.dtype, spec.shape, size // read.width, step=read.width),
                (("buffer", source), ("rows", source), None))

    def _load_change(self, instr: Instr, spec: Spec, size: int) -> Any:
        base = self._ref(self.root(instr.inputs[0]))
        if instr.op == "stack_rows":
            return Access(ONE, spec.dtype, spec.shape), (base, None, None)
        if instr.op == "spread":
            return Access(TAKE, spec.dtype, spec.shape, size), (base, ("edge_row", None), None)
        how = SUM_EDGES if instr.op == "child_sum" else MAX_EDGES
        return Access(how, spec.dtype, spec.shape, size), (base, None, ("bounds", None))


def size_of(spec: Spec) -> int:
    return math.prod(spec.shape)
