"""A planned class -> kernels, products and sums over named memory; no address yet.

Every phase of a plan becomes stages; workers meet after each stage. Inside a stage a worker goes through all operations
with its own share of the rows, so one operation may read what an earlier one wrote for the same rows.

An instruction is one of
    a load       an input of the program, or a change of kind (spread, child_sum, ..): no work, a way to read memory
    a view       Reshape: the same memory; repeated in every kernel that reads it
    a product    of rows with a shared matrix
    a sum        over all rows, with the product or the scatter that feeds it alone
    a draw       random numbers, made before the phase runs
    anything else, which joins a kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...layout import ClassLayout
from ...plan import ClassPlan
from ...program import CHILD, ROW, SHARED, Instr
from .ir import ColumnSumOp, Kernel, KernelOp, Op, ProductOp, ScatterOp, SumOp, SumProductOp
from .values import CHANGES, Lowered, Values, size_of

__all__ = ["lower_class"]

ONCE = SHARED               # the domain of what is computed once: (ROW, CHILD, ONCE)


def lower_class(plan: ClassPlan, layout: ClassLayout) -> Lowered:
    return _Lowering(plan, layout).run()


@dataclass
class _Item:
    """Something to schedule: an instruction, or a load that must be copied into memory."""

    kind: str                   # ROW, CHILD, ONCE (kernels), "product", "sum"
    domain: str
    instr: Instr | None
    makes: tuple[int, ...]
    beside: set[int]            # values that an earlier instruction of the same kernel may make
    before: set[int]            # values that must be in memory
    op: Any = None


class _Lowering(Values):
    """Schedules the instructions of each phase."""

    def run(self) -> Lowered:
        stages = [self._lower_phase(p) for p in range(6)]
        self.lowered.forward, self.lowered.backward = stages[:3], stages[3:]
        return self.lowered

    # ---- phases ------------------------------------------------------------------------------

    def _lower_phase(self, p: int) -> list[list[Op]]:
        items = self._items(p)
        producer = {v: item for item in items for v in item.makes}
        for item in items:
            item.before = {v for v in item.before if v in producer and producer[v] is not item}
            for v in list(item.beside):
                if v not in producer or producer[v] is item:
                    item.beside.discard(v)
                elif producer[v].kind != item.kind:
                    item.beside.discard(v)
                    item.before.add(v)
        groups = self._groups(items)
        stages: list[list[Op]] = [[]]
        shared, rows = set(), set()                 # made in the current stage
        for group in groups:
            reads = set().union(*[item.before | item.beside for item in group])
            is_sum = group[0].kind == "sum"
            if reads & shared or (is_sum and (reads & rows or self._mixed(stages[-1], group))):
                stages.append([])
                shared, rows = set(), set()
            stages[-1] += self._emit(group, p)
            made = {v for item in group for v in item.makes}
            (shared if is_sum or group[0].domain == ONCE else rows).update(made)
        return [stage for stage in stages if stage]

    @staticmethod
    def _mixed(stage: Sequence[Op], group: Sequence[_Item]) -> bool:
        """Whether a stage holds a sum of another form for the same target: workers would share it out differently."""
        forms = {op.target: (type(op), getattr(op, "n", 0)) for op in stage if isinstance(op, SumOp)}
        return any(forms.get(item.op.target, form) != form for item in group
                   for form in [(type(item.op), getattr(item.op, "n", 0))])

    def _items(self, p: int) -> list[_Item]:
        items = [_Item(self.specs[v].kind, self.specs[v].kind, None, (v,), set(), {b} if b is not None else set())
                 for v, phase in self.copies.items() if phase == p for b in [self.base_of(v)]]
        for instr in self.phases[p]:
            out = instr.outputs[0]
            spec = self.specs[out]
            if out in self.fused or out in self.skipped or (instr.op == "Reshape" and out not in self.pinned):
                continue
            if instr.op in CHANGES and out not in self.pinned:
                continue
            if instr.op == "uniform_like":
                self.lowered.draws.append((out, dict(instr.attrs), p))
                self._own(out, p)
                continue
            direct, bases = self._operands(instr)
            if instr.op == "sum_rows":
                op = self._sum_op(instr, p)
                items.append(_Item("sum", op.domain, instr, (out,), set(), direct | bases, op))
            elif self._product_of(instr) is not None:
                items.append(_Item("product", spec.kind, instr, (out,), set(), direct | bases))
            else:
                items.append(_Item(spec.kind, spec.kind, instr, instr.outputs, direct, bases))
        return items

    def _operands(self, instr: Instr) -> tuple[set[int], set[int]]:
        """The values that an instruction reads: directly, and as what its loads are made of."""
        read = self._memory_operands(instr) or instr.inputs
        direct, bases = set(), set()
        for v in read:
            r = self.root(v)
            direct.add(r)
            if self.is_load(r):
                base = self.base_of(r)
                if base is not None:
                    bases.add(base)
        if instr.op in CHANGES:                    # pinned: it reads its operand's memory
            return set(), direct
        return direct, bases

    @staticmethod
    def _groups(items: Sequence[_Item]) -> list[list[_Item]]:
        """Products as soon as they can run; kernels as large as they can be; sums last."""
        waiting, groups = list(items), []
        pending = {v for item in items for v in item.makes}

        def closure(kind: str) -> list[_Item]:
            inside: set[int] = set()
            found = []
            for item in waiting:
                if item.kind == kind and pending.isdisjoint(item.before) and not (item.beside & pending) - inside:
                    found.append(item)
                    inside.update(item.makes)
            return found

        while waiting:
            for kind in (ONCE, "product", CHILD, ROW, "sum"):
                group = closure(kind)
                if group:
                    break
            else:
                raise AssertionError(f"nothing can run: {[str(item.instr) for item in waiting]}")
            if kind in ("product", "sum"):
                groups += [[item] for item in group]
            else:
                groups.append(group)
            chosen = {id(item) for item in group}
            waiting = [item for item in waiting if id(item) not in chosen]
            pending.difference_update(v for item in group for v in item.makes)
        return groups

    # ---- operations --------------------------------------------------------------------------

    def _emit(self, group: Sequence[_Item], p: int) -> list[Op]:
        first = group[0]
        if first.kind == "sum":
            return [first.op]
        if first.kind == "product":
            assert first.instr is not None
            return [self._product_op(first.instr, p)]
        return [self._kernel_op(group, p)]

    def _product_op(self, instr: Instr, p: int) -> ProductOp:
        found = self._product_of(instr)
        assert found is not None
        a, w, transposed, n, k, rows = found
        out = instr.outputs[0]
        self._own(out, p)
        ra, rw = self.root(a), self.root(w)
        return ProductOp(self.specs[out].kind, self._ref(ra), self._is_local(ra), self._ref(rw), transposed,
                         self._ref(out), self._is_local(out), n, k, rows, self.specs[out].dtype)

    def _sum_op(self, instr: Instr, p: int) -> Op:
        x, out = instr.inputs[0], instr.outputs[0]
        target = self.targets.get(out, ("value", out))
        if target[0] == "value":
            self._own(out, p)
        spec = self.specs[x]
        if x not in self.fused:
            return ColumnSumOp(spec.kind, self._ref(self.root(x)), size_of(spec), spec.dtype, target)
        made = self.maker[x]
        left, right = made.inputs
        if made.op == "scatter_rows":
            index, a = self.specs[left], dict(made.attrs)
            return ScatterOp(spec.kind, self._ref(self.root(left)), index.dtype, self._ref(self.root(right)),
                             a["size"], int(np.prod(a["rest"], dtype=int)), size_of(index), spec.dtype, target)
        n, k = spec.shape
        return SumProductOp(spec.kind, self._ref(self.root(left)), self._ref(self.root(right)), n, k,
                            size_of(self.specs[left]) // n, spec.dtype, target)

    def _kernel_op(self, group: Sequence[_Item], p: int) -> KernelOp:
        instrs, made = [], {v for item in group for v in item.makes}
        views: dict[int, None] = {}
        inputs: dict[int, None] = {}
        changes = [item.instr for item in group if item.instr is not None and item.instr.op in CHANGES]
        for item in group:
            if item.instr is None:
                inputs[item.makes[0]] = None
            elif item.instr in changes:             # a pinned load: an input that is an output
                inputs[item.makes[0]] = None
            else:
                for v in item.instr.inputs:
                    r = self._with_views(v, views)
                    if r not in made or self.is_load(r) or (r in self.maker and self.maker[r] in changes):
                        inputs[r] = None
                instrs.append(item.instr)
        instrs += [self.maker[v] for v in views]
        instrs.sort(key=lambda instr: instr.outputs[0])
        outside = self._read_outside(group)
        outputs = []
        for item in group:
            for v in item.makes:
                if v in self.pinned or v in outside or item.instr is None:
                    self._own(v, p)
                    outputs.append(v)
        accesses = [(v, *self._load(v, {item.makes[0] for item in group if item.instr is None})) for v in inputs]
        written = [(v, self._access(v), (self._ref(v), None, None)) for v in outputs]
        values = sorted({v for instr in instrs for v in (*instr.inputs, *instr.outputs)} | set(inputs) | set(outputs))
        kernel = Kernel(tuple(instrs), tuple((v, self.specs[v]) for v in values),
                        tuple((v, access) for v, access, _ in accesses), tuple((v, access) for v, access, _ in written))
        slots = tuple(ref for _, _, refs in (*accesses, *written) for ref in refs)
        return KernelOp(group[0].domain, kernel, slots)

    def _with_views(self, v: int, views: dict[int, None]) -> int:
        """The root of a value; the views on the way to it are noted."""
        while v in self.maker and self.maker[v].op == "Reshape" and v not in self.pinned:
            views[v] = None
            v = self.maker[v].inputs[0]
        return v

    def _read_outside(self, group: Sequence[_Item]) -> set[int]:
        """Values of a group that an instruction outside it reads."""
        inside = {id(item.instr) for item in group if item.instr is not None}
        found = set()
        for phase in self.phases:
            for instr in phase:
                if id(instr) in inside or (instr.op == "Reshape" and instr.outputs[0] not in self.pinned):
                    continue
                found.update(self.root(v) for v in instr.inputs)
        found.update(v for values in self.lowered.grad_values.values() for v, _ in values)
        return found
