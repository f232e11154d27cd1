"""What the native backend is made of: kernels over rows, and how their operands stand in memory.

A kernel runs instructions of one sample for every row of a range. It is called with the address of a table of
int64, three for each operand (inputs, then outputs): the base address, the address of an index, the address of
segment bounds; unused ones are 0. What does not change from run to run (shapes, strides) is part of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

from ...program import Instr, Spec

__all__ = ["Access", "Kernel", "ROW_AT", "LOCAL", "ONE", "TAKE", "SUM", "SUM_EDGES", "MAX_EDGES", "SLOTS",
           "Ref", "KernelOp", "PackOp", "ProductOp", "SumProductOp", "ColumnSumOp", "ScatterOp", "SumOp", "Op"]

#: words of a kernel's table that belong to one operand: base, index, bounds
SLOTS = 3

ROW_AT = "row"              # row r at base + r * stride
LOCAL = "local"             # row r at base + (r - first) * stride: memory of one launch, whose first row is `first`
ONE = "one"                 # at base, the same for every row
TAKE = "take"               # row r at base + index[r * step] * stride
SUM = "sum"                 # part k of row r: the stretches at base + index[e] * stride added up, for e from
                            # bounds[r * parts + k] to bounds[r * parts + k + 1]
SUM_EDGES = "sum_edges"     # the same without an index: entry e stands at base + e * stride
MAX_EDGES = "max_edges"     # the maximum instead of the sum; no segment is empty


@dataclass(frozen=True)
class Access:
    """How one operand of a kernel stands in memory. Strides count elements; a row's own elements are contiguous."""

    how: str
    dtype: str
    shape: tuple[int, ...]      # of one row
    stride: int = 0
    step: int = 1               # TAKE: entries of the index that belong to one row; the first is read
    parts: int = 1              # SUM: equal stretches of a row, each with a segment of its own


@dataclass(frozen=True)
class Kernel:
    """Instructions of one sample, run for each row of a range.

    An output may be an input as it is (a kernel without instructions copies, gathers or adds up segments).
    """

    instrs: tuple[Instr, ...]
    specs: tuple[tuple[int, Spec], ...]             # of every value that occurs
    inputs: tuple[tuple[int, Access], ...]
    outputs: tuple[tuple[int, Access], ...]         # ROW_AT, LOCAL or ONE


# ---- operations: what a worker does with its share of the rows -----------------------------------

#: names memory: ("value", v), ("output", k), ("shared", source), ("send", source), ..; see `NativeRun` for all of them
Ref = tuple[str, Any]


@dataclass(frozen=True)
class KernelOp:
    domain: str             # ROW, CHILD, or SHARED: computed once
    kernel: Kernel
    slots: tuple[Ref | None, ...]           # three for each operand


@dataclass(frozen=True)
class PackOp:
    """A shared matrix (k, n), stored (n, k) if transposed, copied into panels of columns; see `packing.py`."""

    w: Ref
    transposed: bool
    n: int
    k: int
    dtype: str

    @property
    def target(self) -> Ref:
        """The memory of the panels."""
        return "packed", (self.w, self.transposed)


@dataclass(frozen=True)
class ProductOp:
    """c = a w: `rows` rows of each position with a shared matrix (k, n), stored (n, k) if transposed, or packed."""

    domain: str
    a: Ref
    a_local: bool
    w: Ref
    transposed: bool
    c: Ref
    c_local: bool
    n: int
    k: int
    rows: int
    dtype: str


@dataclass(frozen=True)
class SumProductOp:
    """target (n, k) = the sum over all rows of a' b; each position has `rows` of them."""

    domain: str
    a: Ref
    b: Ref
    n: int
    k: int
    rows: int
    dtype: str
    target: Ref


@dataclass(frozen=True)
class ColumnSumOp:
    domain: str
    a: Ref
    n: int
    dtype: str
    target: Ref


@dataclass(frozen=True)
class ScatterOp:
    """Rows of `values` are added to those rows of the target that `index` names; `count` of them a position."""

    domain: str
    index: Ref
    index_dtype: str
    values: Ref
    size: int               # rows of the target
    width: int
    count: int
    dtype: str
    target: Ref


SumOp = (SumProductOp, ColumnSumOp, ScatterOp)
Op = Union[KernelOp, PackOp, ProductOp, SumProductOp, ColumnSumOp, ScatterOp]
