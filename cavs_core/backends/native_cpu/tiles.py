"""Tiles of small products, in vectors of 32 bytes: each is an intrinsic that holds a block of C in registers.

Written as LLVM instructions because a loop over scalars leaves the choice of the block to the compiler. A machine with
16 vector registers holds 12 sums beside the operands; 8 sums or more hide the latency of a multiplication.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .intrinsics import VECTOR_BYTES

__all__ = ["dot_tile", "axpy_tile", "transpose_tile"]

_SIZE = ir.IntType(64)
_CONTRACT = ("contract",)


class _Emitter:
    """Vectors of one dtype: loads, stores, products and sums."""

    def __init__(self, context: Any, builder: ir.IRBuilder, dtype: types.Float, nbytes: int = VECTOR_BYTES) -> None:
        self.builder = builder
        self.scalar = context.get_value_type(dtype)
        self.align = dtype.bitwidth // 8
        self.lanes = nbytes // self.align
        self.vector = ir.VectorType(self.scalar, self.lanes)

    def at(self, pointer, *offsets):
        """`pointer` moved by the sum of some element counts."""
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def load(self, pointer, lanes: int | None = None):
        kind = ir.VectorType(self.scalar, lanes) if lanes else self.vector
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=self.align)

    def load_scalar(self, pointer):
        return self.builder.load(pointer, align=self.align)

    def store(self, value, pointer) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=self.align)

    def splat(self, value):
        """A vector with the same number in every lane."""
        kind = ir.VectorType(value.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, first, [0] * self.lanes)

    def shuffle(self, a, b, order):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), [ir.Constant(ir.IntType(32), i) for i in order])
        return self.builder.shuffle_vector(a, b, mask)

    def numbers(self):
        """0, 1, 2, .. of the lanes."""
        return ir.Constant(ir.VectorType(_SIZE, self.lanes), [ir.Constant(_SIZE, i) for i in range(self.lanes)])

    def multiply_add(self, a, b, total):
        return self.builder.fadd(total, self.builder.fmul(a, b, flags=_CONTRACT), flags=_CONTRACT)

    def sums(self, vectors):
        """The sums of 4 vectors, as a vector of 4; neighbours are added inside each 16 bytes, where it is cheap."""
        lane = 16 // self.align
        order = [base + i for base in range(0, self.lanes, lane) for i in range(0, lane, 2)]
        order = [i + side for base in range(0, len(order), lane // 2) for side in (0, self.lanes)
                 for i in order[base:base + lane // 2]]
        while len(vectors) > 4 // lane:
            vectors = [self.builder.fadd(self.shuffle(a, b, order), self.shuffle(a, b, [i + 1 for i in order]))
                       for a, b in zip(vectors[::2], vectors[1::2])]
        low = [i + side for side in (0, self.lanes) for i in range(lane)][:4]
        return self.builder.fadd(self.shuffle(vectors[0], vectors[-1], low),
                                 self.shuffle(vectors[0], vectors[-1], [i + lane for i in low]))


def _count(value: int):
    return ir.Constant(_SIZE, value)


def dot_tile(rows: int, groups: int):
    """An intrinsic: C[rows, cols] (+)= A[rows, k] W[cols, k]^T, where cols is 4 * groups or fewer.

    k is at least the lanes of a vector (8 float32, 4 float64). Columns that are not there are computed from the last
    row of W and not stored.
    """
    width = 4 * groups

    @intrinsic
    def tile(typingctx, a, lda, w, ldw, c, ldc, k, cols, accumulate):
        def codegen(context, builder, signature, values):
            a_, lda_, w_, ldw_, c_, ldc_, k_, cols_, accumulate_ = values
            emit = _Emitter(context, builder, a.dtype)
            zero = ir.Constant(emit.vector, None)
            last = builder.sub(cols_, _count(1))
            a_rows = [emit.at(a_, builder.mul(lda_, _count(i))) for i in range(rows)]
            w_rows = [emit.at(w_, builder.mul(ldw_, _smaller(builder, _count(j), last))) for j in range(width)]
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in w_rows] for _ in a_rows]

            def step(offset, keep=lambda x: x):
                xs = [keep(emit.load(emit.at(p, offset))) for p in a_rows]
                for j, p in enumerate(w_rows):
                    y = keep(emit.load(emit.at(p, offset)))
                    for x, row in zip(xs, totals):
                        builder.store(emit.multiply_add(x, y, builder.load(row[j])), row[j])

            lanes = _count(emit.lanes)
            with cgutils.for_range(builder, builder.udiv(k_, lanes)) as loop:
                step(builder.mul(loop.index, lanes))
            rest = builder.urem(k_, lanes)
            with builder.if_then(builder.icmp_unsigned("!=", rest, _count(0))):
                # The last full vector of the row, without the entries that were already taken.
                new = builder.icmp_unsigned(">=", emit.numbers(), emit.splat(builder.sub(lanes, rest)))
                step(builder.sub(k_, lanes), lambda x: builder.select(new, x, zero))

            adds = builder.icmp_signed("!=", accumulate_, _count(0))
            full = builder.icmp_signed(">=", cols_, _count(width))
            for i, row in enumerate(totals):
                for g in range(groups):
                    value = emit.sums([builder.load(t) for t in row[4 * g:4 * g + 4]])
                    place = emit.at(c_, builder.mul(ldc_, _count(i)), _count(4 * g))
                    with builder.if_else(full) as (whole, part):
                        with whole:
                            old = emit.load(place, lanes=4)
                            base = builder.select(adds, old, ir.Constant(old.type, None))
                            emit.store(builder.fadd(value, base), place)
                        with part:
                            for j in range(4):
                                with builder.if_then(builder.icmp_signed("<", _count(4 * g + j), cols_)):
                                    cell = emit.at(place, _count(j))
                                    base = builder.select(adds, emit.load_scalar(cell), ir.Constant(emit.scalar, 0))
                                    new = builder.extract_element(value, ir.Constant(ir.IntType(32), j))
                                    emit.store(builder.fadd(new, base), cell)
            return context.get_dummy_value()

        size = types.int64
        return types.void(a, size, w, size, c, size, size, size, size), codegen

    return tile


def _smaller(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def axpy_tile(rows: int, vectors: int, nbytes: int = VECTOR_BYTES):
    """An intrinsic: C[rows, cols] (+)= A W[k, cols], cols being `vectors` vectors of `nbytes`; the first `skip` stay.

    A's entry (i, l) stands at i * row_step + l * step, so that A may also be the transpose of what is stored.
    """
    @intrinsic
    def tile(typingctx, a, row_step, step, w, ldw, c, ldc, k, skip, accumulate):
        def codegen(context, builder, signature, values):
            a_, row_step_, step_, w_, ldw_, c_, ldc_, k_, skip_, accumulate_ = values
            emit = _Emitter(context, builder, a.dtype, nbytes)
            zero = ir.Constant(emit.vector, None)
            a_rows = [emit.at(a_, builder.mul(row_step_, _count(i))) for i in range(rows)]
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in a_rows]
            with cgutils.for_range(builder, k_) as loop:
                w_row = emit.at(w_, builder.mul(loop.index, ldw_))
                ys = [emit.load(emit.at(w_row, _count(v * emit.lanes))) for v in range(vectors)]
                offset = builder.mul(loop.index, step_)
                for p, row in zip(a_rows, totals):
                    x = emit.splat(emit.load_scalar(emit.at(p, offset)))
                    for y, total in zip(ys, row):
                        builder.store(emit.multiply_add(x, y, builder.load(total)), total)

            adds = builder.icmp_signed("!=", accumulate_, _count(0))
            for v in range(vectors):
                numbers = builder.add(emit.numbers(), emit.splat(_count(v * emit.lanes)))
                new = builder.icmp_signed(">=", numbers, emit.splat(skip_))
                for i, row in enumerate(totals):
                    place = emit.at(c_, builder.mul(ldc_, _count(i)), _count(v * emit.lanes))
                    old = emit.load(place)
                    value = builder.fadd(builder.load(row[v]), builder.select(adds, old, zero))
                    emit.store(builder.select(new, value, old), place)
            return context.get_dummy_value()

        size = types.int64
        return types.void(a, size, size, w, size, c, size, size, size, size), codegen

    return tile


@intrinsic
def transpose_tile(typingctx, w, ldw, c, ldc):
    """C = W^T for a square of as many rows and columns as a vector has lanes."""
    def codegen(context, builder, signature, values):
        w_, ldw_, c_, ldc_ = values
        emit = _Emitter(context, builder, w.dtype)
        rows = [emit.load(emit.at(w_, builder.mul(ldw_, _count(i)))) for i in range(emit.lanes)]
        half = emit.lanes // 2
        while half:             # each pair of rows exchanges the squares of size `half` off its diagonal
            take = [[i + emit.lanes - half if i & half else i for i in range(emit.lanes)],
                    [i + emit.lanes if i & half else i + half for i in range(emit.lanes)]]
            for i in range(emit.lanes):
                if not i & half:
                    pair = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (emit.shuffle(*pair, order) for order in take)
            half //= 2
        for i, row in enumerate(rows):
            emit.store(row, emit.at(c_, builder.mul(ldc_, _count(i))))
        return context.get_dummy_value()

    return types.void(w, types.int64, c, types.int64), codegen
