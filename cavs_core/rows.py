"""Row rules applied: instructions on one sample -> array instructions on all rows of a launch.

Array instructions keep MXNet's meaning and never name the number of rows, so that one compiled region serves
launches of every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .ops.base import TABLE
from .program import SHARED, Instr, Spec

__all__ = ["ArrayInstr", "RowValue", "RowEmitter", "lower"]


@dataclass(frozen=True)
class ArrayInstr:
    """One call on whole arrays; inputs and outputs are array numbers."""

    op: str
    attrs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class RowValue:
    """An operand of a row rule: an array, and what one sample sees of it."""

    def __init__(self, emitter: RowEmitter, array: int, spec: Spec):
        self.emitter, self.array, self.spec = emitter, array, spec

    @property
    def stacked(self) -> bool:
        return self.spec.kind != SHARED

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def lift(self) -> int:
        """Rows as they are; a shared operand with a leading axis of one, which broadcasts."""
        if self.stacked:
            return self.array
        return self.emitter.emit("Reshape", self.array, shape=(1, *self.shape))

    def stack(self, like: Sequence[RowValue]) -> int:
        """Rows as they are; a shared operand repeated for every row of one of `like`."""
        if self.stacked:
            return self.array
        reference = next(x for x in like if x.stacked)
        return self.emitter.emit("rows_like", self.lift(), reference.array)


class RowEmitter:
    """Collects array instructions."""

    def __init__(self) -> None:
        self.instrs: list[ArrayInstr] = []
        self.num_arrays = 0

    def new_array(self) -> int:
        self.num_arrays += 1
        return self.num_arrays - 1

    def emit_many(self, op: str, count: int, /, *inputs: int, **attrs: Any) -> list[int]:
        outputs = [self.new_array() for _ in range(count)]
        self.instrs.append(ArrayInstr(op, attrs, inputs, tuple(outputs)))
        return outputs

    def emit(self, op: str, /, *inputs: int, **attrs: Any) -> int:
        return self.emit_many(op, 1, *inputs, **attrs)[0]


@dataclass(frozen=True)
class Lowered:
    """A straight list of array instructions with its input and output arrays."""

    instrs: list[ArrayInstr]
    inputs: list[int]
    outputs: list[int]
    num_arrays: int


def lower(instrs: Sequence[Instr], specs: Sequence[Spec], inputs: Sequence[int], outputs: Iterable[int]) -> Lowered:
    """Lower a run of instructions; `inputs` and `outputs` are program values."""
    outputs = list(outputs)
    emitter = RowEmitter()
    arrays = {v: emitter.new_array() for v in inputs}
    fused = _fusable_sums(instrs, specs, outputs)

    def operands(instr: Instr) -> list[RowValue]:
        return [RowValue(emitter, arrays[v], specs[v]) for v in instr.inputs]

    for instr in instrs:
        if instr.outputs[0] in fused:
            continue                    # the product of each row is never made; sum_rows below makes their sum
        op, attrs = TABLE[instr.op], dict(instr.attrs)
        if instr.op == "sum_rows" and instr.inputs[0] in fused:
            product = fused[instr.inputs[0]]
            made = TABLE[product.op].summed_rows(emitter, dict(product.attrs), *operands(product))
        elif specs[instr.outputs[0]].kind == SHARED and instr.op != "sum_rows":
            made = emitter.emit_many(instr.op, len(instr.outputs), *[arrays[v] for v in instr.inputs], **attrs)
        else:
            made = op.rows(emitter, attrs, *operands(instr))
        made = made if isinstance(made, (list, tuple)) else [made]
        arrays.update(zip(instr.outputs, made))
    return Lowered(emitter.instrs, [arrays[v] for v in inputs], [arrays[v] for v in outputs], emitter.num_arrays)


def _fusable_sums(instrs: Sequence[Instr], specs: Sequence[Spec], outputs: Iterable[int]) -> dict[int, Instr]:
    """Values that exist only to be summed over rows, whose op knows how to make that sum at once."""
    uses: dict[int, int] = dict.fromkeys(outputs, 2)
    summed = set()
    for instr in instrs:
        for v in instr.inputs:
            uses[v] = uses.get(v, 0) + 1
        if instr.op == "sum_rows":
            summed.add(instr.inputs[0])
    return {i.outputs[0]: i for i in instrs
            if i.outputs[0] in summed and uses[i.outputs[0]] == 1 and specs[i.outputs[0]].kind != SHARED
            and TABLE[i.op].can_sum_rows([specs[v] for v in i.inputs])}
