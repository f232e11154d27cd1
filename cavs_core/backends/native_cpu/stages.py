"""Stages as rows of the op table: everything but the addresses, which are put in at every run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...compiling import compiled
from ...program import CHILD, ROW, SHARED
from . import ops
from .ir import ColumnSumOp, KernelOp, Op, PackOp, ProductOp, Ref, ScatterOp, SumOp, SumProductOp
from .panels import packed_elements
from .values import Owned, size_of

__all__ = ["NUM_COUNTS", "OwnMemory", "Refs", "Stage", "Sum", "counts_of", "own_offsets"]

_DOMAINS = {ROW: ops.ROWS, CHILD: ops.EDGES, SHARED: ops.ONCE}


class Refs:
    """The memory that the operations of a class name, numbered; 0 is none at all."""

    def __init__(self) -> None:
        self.list: list[Ref | None] = [None]
        self._numbers: dict[Ref | None, int] = {None: 0}

    def number(self, ref: Ref | None) -> int:
        if ref not in self._numbers:
            self._numbers[ref] = len(self.list)
            self.list.append(ref)
        return self._numbers[ref]


#: what the memory of a value has room for: a row for each of these numbers of a class, see `counts_of`
NUM_COUNTS = 5
_COUNTS = {(ROW, False): 0, (CHILD, False): 1, (SHARED, False): 2, (ROW, True): 3, (CHILD, True): 4}


class OwnMemory:
    """The values of a class that have memory of their own, for one direction.

    Attributes
    ----------
    numbers : of the memory
    counts : which number of the class each has rows for
    row_bytes : of each
    """

    def __init__(self, owned: dict[int, Owned], backward: bool, packs: Sequence[PackOp], refs: Refs):
        mine = {v: o for v, o in owned.items() if o.backward == backward}
        self.numbers = [refs.number(("value", v)) for v in mine] + [refs.number(pack.target) for pack in packs]
        self.counts = [_COUNTS[o.spec.kind, o.local] for o in mine.values()] + [_COUNTS[SHARED, False]] * len(packs)
        self.row_bytes = [size_of(o.spec) * np.dtype(o.spec.dtype).itemsize for o in mine.values()] + [
            packed_elements(pack.n, pack.k, pack.dtype) * np.dtype(pack.dtype).itemsize for pack in packs]


@compiled
def counts_of(frames, first_frames):
    """Of each class: rows, edges, one, and the most rows and edges of a launch; all 0 if there are no rows."""
    counts = np.zeros((len(first_frames) - 1, NUM_COUNTS), np.int64)
    for c in range(len(counts)):
        whole = first_frames[c]
        counts[c, 0], counts[c, 1] = frames[whole, 1], frames[whole, 3]
        counts[c, 2] = min(counts[c, 0], 1)
        for k in range(whole + 1, first_frames[c + 1]):
            counts[c, 3] = max(counts[c, 3], frames[k, 1] - frames[k, 0])
            counts[c, 4] = max(counts[c, 4], frames[k, 3] - frames[k, 2])
    return counts


@compiled
def own_offsets(counts, which, row_bytes):
    """Where the memory of each value begins in a block, in cache lines, and where the last one ends."""
    offsets = np.zeros(len(which) + 1, np.int64)
    for i in range(len(which)):
        rows = counts[which[i] // NUM_COUNTS, which[i] % NUM_COUNTS]
        offsets[i + 1] = offsets[i] + -(-rows * row_bytes[i] // 64) * 64
    return offsets


class Sum:
    """A sum over rows, whose target is known only in a run."""

    def __init__(self, op: SumProductOp | ColumnSumOp | ScatterOp, refs: Refs):
        self.op = op
        domain = _DOMAINS[op.domain]
        if isinstance(op, SumProductOp):
            row = ops.sum_product_op(0, op.n, 0, op.k, 0, op.k, op.n, op.k, dtype=op.dtype, m=op.rows,
                                          domain=domain)
            read: Sequence[Ref] = (op.a, op.b)
        elif isinstance(op, ColumnSumOp):
            row = ops.column_sum_op(0, op.n, 0, op.n, dtype=op.dtype, domain=domain)
            read = (op.a,)
        else:
            row = ops.scatter_add_op(0, op.index_dtype, 0, op.width, 0, op.width, op.width, dtype=op.dtype,
                                          m=op.count, domain=domain)
            read = (op.index, op.values)
        self.rows = ops.table([row])
        self.reads = [refs.number(ref) for ref in read]
        self.places = [ops.A, ops.B][:len(read)]            # where in the row their addresses go
        kind, self.source = op.target
        self.own = 0 if kind == "grad" else refs.number(op.target)     # memory of the class, if it is no gradient
        self.adds_into_zeros = isinstance(op, ScatterOp)


class Stage:
    """The operations of a stage: rows without addresses, where these go, and the sums.

    Attributes
    ----------
    rows : int64 array, rows of the op table
    places, refs : int64 arrays, where in them (counted through) which memory's address goes
    words : int64 array, the memory that the kernels' own tables name
    kernels, first_words : int64 arrays, where in `rows` the address of such a table goes, and its first word
    reads : all the memory that is named
    """

    def __init__(self, stage: Sequence[Op], kernels: dict[int, tuple[int, int]], refs: Refs):
        rows, patches, words, tables = [], [], [], []
        for op in stage:
            if isinstance(op, KernelOp):
                address, cost = kernels[id(op)]
                tables.append((len(rows), len(words)))
                words += [refs.number(ref) for ref in op.slots]
                rows.append(ops.kernel_op(address, 0, _DOMAINS[op.domain], cost))
            elif isinstance(op, PackOp):
                patches += [(len(rows), ops.A, refs.number(op.w)), (len(rows), ops.C, refs.number(op.target))]
                rows.append(ops.pack_op(0, op.k if op.transposed else op.n, 0, op.n, op.k, transposed=op.transposed,
                                        dtype=op.dtype))
            elif isinstance(op, ProductOp):
                patches += [(len(rows), column, refs.number(ref))
                            for column, ref in ((ops.A, op.a), (ops.B, op.w), (ops.C, op.c))]
                rows.append(ops.product_op(
                    0, op.k, 0, op.k if op.transposed else op.n, 0, op.n, op.n, op.k, transposed=op.transposed,
                    dtype=op.dtype, m=op.rows, domain=_DOMAINS[op.domain], a_local=op.a_local, c_local=op.c_local,
                    packed=op.w[0] == "packed"))
        self.sums = [Sum(op, refs) for op in stage if isinstance(op, SumOp)]
        self.rows = ops.table(rows)
        self.places = np.array([row * ops.OP_WIDTH + column for row, column, _ in patches], np.int64)
        self.refs = np.array([ref for _, _, ref in patches], np.int64)
        self.words = np.array(words, np.int64)
        self.kernels = np.array([row * ops.OP_WIDTH + ops.A for row, _ in tables], np.int64)
        self.first_words = np.array([first for _, first in tables], np.int64)
        self.reads = sorted({*words, *self.refs.tolist()})
