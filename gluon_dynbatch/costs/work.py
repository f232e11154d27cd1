"""The work of a planned class: what its launches do, counted. Pure: records in, numbers out.

The native backend takes the time that its kernels and products take. MXNet's operators run behind the caller's back, on
a GPU or in threads of MXNet, and starting them takes longer than small ones run: their work is to be started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = ["Product", "Work", "started_work_of", "work_of"]

Product = tuple[float, int, int]        # rows a position, n, k


@dataclass(frozen=True)
class Work:
    """What one direction (forward or backward) of a class does.

    Parameters
    ----------
    ops : operations of the launch table in every launch: kernels and products
    once_ops : operations that run once a flush: eager and lazy parts, sums over all rows
    products : (rows a position, n, k) of each product with a (k, n) matrix, in launches
    once_products : the same for those made once over all rows: eager projections, gradients of matrices
    elements : numbers that pointwise instructions make, a row
    transcendental : of these, through exp, tanh, log and their like
    gathered : bytes a row that are read through an index, or copied
    once_bytes : bytes written once a flush, however few the rows: the dense gradient of a table
    starts, once_starts : times that Python starts something, in every launch and once a flush
    """

    ops: int
    once_ops: int
    products: tuple[Product, ...]
    once_products: tuple[Product, ...]
    elements: int
    transcendental: int
    gathered: int
    once_bytes: int = 0
    starts: int = 1
    once_starts: int = 0


def work_of(plan: Any, children: float = 1.0) -> tuple[Work, Work | None]:
    """The forward and the backward work of a class; the second is None if there is no backward pass.

    Pointwise instructions that can run together are one kernel, reshapes and slices are views, and a product that is
    only added up over all rows is one product over all of them: so the native backend runs a plan. (It also moves
    eager pointwise work into the launches; here that is a kernel that runs once.)

    Parameters
    ----------
    plan : cavs_core.ClassPlan
    children : children a row, on average; they count where a class has values of each child
    """
    counter = _Counter(plan, children)
    return counter.work(plan.forward), counter.work(plan.backward) if plan.backward is not None else None


def started_work_of(plan: Any) -> tuple[Work, Work | None]:
    """The same for the executor that starts MXNet's operators one after the other.

    Each step of a plan is started by itself, and so is every gather before it, whose index goes to the device once.
    (Rows that lie side by side need no gather, which depends on the mini-batch: here all are counted.)
    """
    there: set[int] = set()
    forward = _started(plan, plan.forward, plan.inputs, there)
    if plan.backward is None:
        return forward, None
    there -= {v for v in there if _waits(plan.inputs.get(v))}       # what other vertices made is gathered again
    return forward, _started(plan, plan.backward, {**plan.inputs, **plan.backward_inputs}, there)


def _started(plan: Any, phases: Any, inputs: Any, there: set[int]) -> Work:
    """Of one direction; `there` are the values that need no gather, those that come to be so are added."""
    ops, starts = [0, 0], [0, 0]                    # in launches, once
    for once, steps in ((1, phases.eager), (0, phases.critical), (1, phases.lazy)):
        for step in steps:
            ops[once] += len(step.instrs)
            starts[once] += 1
            for v in step.inputs:
                if v not in there and plan.specs[v].kind != "shared":
                    starts[1] += 1
                    starts[0] += _waits(inputs.get(v)) and not once
            there.update((*step.inputs, *step.outputs))
    return Work(ops[0], ops[1], (), (), 0, 0, 0, starts=starts[0], once_starts=starts[1])


def _waits(source: Any) -> bool:
    """Whether a source is fetched in every launch; the others are fetched once for all of them."""
    return source is not None and type(source).__name__ not in ("Pull", "Leaf", "OutputGrad")


_TRANSCENDENTAL = frozenset("""
    sigmoid tanh softrelu selu exp expm1 log log2 log10 log1p sqrt rsqrt cbrt rcbrt sin cos tan arcsin arccos arctan
    sinh cosh arcsinh arccosh arctanh erf erfinv gamma gammaln digamma softmax_plain log_softmax_plain l2_norm
    _power_scalar _rpower_scalar broadcast_power uniform_like""".split())
_LOADS = ("spread", "child_sum", "child_max", "stack_rows")     # another way to read memory
_PARTS = ("slice", "SliceChannel")                              # arithmetic on addresses inside a kernel

#: kinds of operations, in the order in which the backend takes those that can run
_SHARED, _PRODUCT, _CHILD, _ROW, _SUM = range(5)
_RANKS = {"shared": _SHARED, "child": _CHILD, "row": _ROW}


class _Counter:
    """Goes through the instructions of a plan, first forward, then backward."""

    def __init__(self, plan: Any, children: float):
        self.specs, self.children = plan.specs, children
        both = [plan.forward] + ([plan.backward] if plan.backward is not None else [])
        instrs = [i for part in both for phase in (part.eager, part.critical, part.lazy) for i in _instrs(phase)]
        self.maker = {v: i for i in instrs for v in i.outputs}
        grads = [v for values in plan.grads.values() for v in values]
        uses = Counter([v for i in instrs for v in i.inputs] + grads + plan.outputs)
        self.summed = {i.inputs[0] for i in instrs if i.op == "sum_rows" and uses[i.inputs[0]] == 1
                       and self._sums_alone(self.maker.get(i.inputs[0]))}
        self.sparse = self._sums([v for source, values in plan.grads.items() for v in values if _is_sparse(source)])
        self.copied: set[int] = set()               # loads that are in memory by now

    def _sums_alone(self, instr: Any) -> bool:
        """Whether the sum of an instruction's result over all rows needs no memory for the rows."""
        return (instr is not None and instr.op in ("matmul", "scatter_rows")
                and all(self.specs[v].kind != "shared" for v in instr.inputs))

    def _sums(self, values: list[int]) -> set[int]:
        """The sums over rows that gradients are totals of."""
        found, waiting = set(), list(values)
        while waiting:
            v = waiting.pop()
            op = self.maker[v].op if v in self.maker else ""
            if op == "sum_rows":
                found.add(v)
            elif op in ("Reshape", "_copy", "broadcast_add"):
                waiting.extend(self.maker[v].inputs)
        return found

    # ---- one direction -----------------------------------------------------------------------

    def work(self, phases: Any) -> Work:
        self.ops = [0, 0]                           # in launches, once
        self.products: tuple[list[Product], list[Product]] = [], []
        self.elements = self.transcendental = self.gathered = self.once_bytes = 0.0
        self.loads: set[int] = set()
        for once, steps in ((1, phases.eager), (0, phases.critical), (1, phases.lazy)):
            self._count_phase(_instrs(steps), once)
        self.gathered += sum(map(self._bytes, self.loads))
        return Work(self.ops[0], self.ops[1], tuple(self.products[0]), tuple(self.products[1]), round(self.elements),
                    round(self.transcendental), round(self.gathered), round(self.once_bytes))

    def _count_phase(self, instrs: Sequence[Any], once: int) -> None:
        # In a round the backend takes all that can run, rank after rank. An instruction joins the round of what it
        # reads, unless its rank was taken before; a kernel is all instructions of one round and rank.
        place: dict[int, tuple[int, int]] = {}      # value -> round, rank
        kernels: set[tuple[int, int]] = set()
        for instr in instrs:
            reads = instr.inputs
            if instr.op == "sum_rows" and reads[0] in self.summed:
                reads = self.maker[reads[0]].inputs
            rank = self._rank(instr, [place[v] for v in reads if v in place])
            for v in reads if rank is not None else ():
                if self._note_load(v, in_memory=rank in (_PRODUCT, _SUM)):
                    place[v] = (0, _RANKS[self.specs[v].kind])
                    kernels.add(place[v])
            before = [place[v] for v in reads if v in place]
            if rank is None:
                place.update(dict.fromkeys(instr.outputs, max(before)) if before else {})
                continue
            made = max([r if k <= rank else r + 1 for r, k in before], default=0), rank
            place.update(dict.fromkeys(instr.outputs, made))
            if rank == _SUM:                        # also a class with a single launch makes its sums once
                if instr.outputs[0] not in self.sparse:
                    self.ops[1] += 1
                    self._count_sum(instr.inputs[0])
            elif rank == _PRODUCT:
                self.ops[once] += 1
                self._count_product(instr, once)
            else:
                kernels.add(made)
                self._count_pointwise(instr, once)
        self.ops[once] += len(kernels)

    def _rank(self, instr: Any, before: Sequence[tuple[int, int]]) -> int | None:
        """What kind of operation runs an instruction; None if it needs none."""
        out = instr.outputs[0]
        kind = self.specs[out].kind
        adds_sums = (kind == "shared" and instr.op in ("broadcast_add", "_copy") and len(before) > 0
                     and all(rank == _SUM for _, rank in before))       # sums write to one place by themselves
        if instr.op in ("Reshape", *_LOADS) or out in self.summed or adds_sums:
            return None
        if instr.op == "sum_rows":
            return _SUM
        shared = any(self.specs[v].kind == "shared" for v in instr.inputs)
        return _PRODUCT if instr.op == "matmul" and shared else _RANKS[kind]

    def _note_load(self, v: int, in_memory: bool) -> bool:
        """Count what is read through an index. Whether it is copied now, for an operation that wants it in memory."""
        ops = set()
        while v in self.maker and self.maker[v].op in ("Reshape", *_LOADS):
            ops.add(self.maker[v].op)
            v = self.maker[v].inputs[0]
        if self.specs[v].kind == "shared" or v in self.copied or (v in self.maker and ops.isdisjoint(_LOADS)):
            return False
        self.loads.add(v)
        if in_memory:
            self.copied.add(v)
            self.gathered += self._bytes(v)         # written, besides being read
        return in_memory

    # ---- single instructions -----------------------------------------------------------------

    def _count_sum(self, x: int) -> None:
        if x not in self.summed:
            self.elements += self._size(x)
            return
        instr = self.maker[x]
        if instr.op == "matmul":
            n, k = self.specs[x].shape
            self.products[1].append((self._size(instr.inputs[0]) / n, n, k))
        else:
            self.gathered += 2 * self._bytes(instr.inputs[1])       # read, and added to what is there
            self.once_bytes += prod(self.specs[x].shape) * _item(self.specs[x])

    def _count_product(self, instr: Any, once: int) -> None:
        left, out, attrs = self.specs[instr.inputs[0]], instr.outputs[0], dict(instr.attrs)
        if self.specs[out].kind != "shared":        # else it is of one row in all
            k = left.shape[-2 if attrs["transpose_a"] else -1]
            n = self.specs[out].shape[-2 if left.kind == "shared" else -1]
            self.products[once].append((self._size(out) / n, n, k))

    def _count_pointwise(self, instr: Any, once: int) -> None:
        if self.specs[instr.outputs[0]].kind == "shared" or instr.op in _PARTS:
            return
        if instr.op in ("lookup", "_copy"):
            self.gathered += self._bytes(instr.outputs[0])
        elif instr.op in ("matmul", "batch_matmul"):            # of rows with rows
            self._count_product(instr, once)
        else:
            size = sum(map(self._size, instr.inputs[:1] if instr.op.startswith("reduce_") else instr.outputs))
            self.elements += size
            self.transcendental += size if instr.op in _TRANSCENDENTAL else 0

    def _size(self, v: int) -> float:
        """Numbers of a value, a row."""
        return prod(self.specs[v].shape) * (self.children if self.specs[v].kind == "child" else 1)

    def _bytes(self, v: int) -> float:
        return self._size(v) * _item(self.specs[v])


def _instrs(steps: Sequence[Any]) -> list[Any]:
    return [instr for step in steps for instr in step.instrs]


def _item(spec: Any) -> int:
    return 8 if spec.dtype.endswith("64") else 4


def _is_sparse(source: Any) -> bool:
    """Whether a source is a parameter whose gradient is the rows that were looked up."""
    return getattr(getattr(source, "parameter", None), "_grad_stype", "default") != "default"
