"""Rows of the op table: what a launch does, as 25 integers a step, and the functions that write them.

`interpreter.py` reads the columns. Addresses are bytes; strides (`lda`, ..) count elements. A row or edge of a launch
is a position; an operand may have `m` rows a position, which stand one behind the other. A local operand belongs to
one launch: position r stands at the place r - first.
"""

from __future__ import annotations

import numpy as np

from . import blas, panels, products
from .panels import panel_columns
from .products import own_rows, own_sum_rows, routine

__all__ = ["LAUNCH_WIDTH", "OP_WIDTH", "ROWS", "EDGES", "ONCE", "launch", "kernel_op", "pack_op", "product_op",
           "sum_product_op", "column_sum_op", "scatter_add_op", "fill_op", "table"]

LAUNCH_WIDTH = 7
#: columns of a launch
OP_BEGIN, OP_END, START, STOP, EDGE_START, EDGE_STOP, BOUNDS = range(LAUNCH_WIDTH)

OP_WIDTH = 25
#: columns of an op; A, B and C are operands: address, bytes from position to position, whether local, row stride;
#: B_COLUMN: bytes in W from what one column of C needs to the next; UNIT: columns that only one worker takes
(KIND, DOMAIN, ROUTINE, COST, A, A_STEP, A_LOCAL, LDA, B, B_STEP, B_LOCAL, LDB, C, C_STEP, C_LOCAL, LDC, N, K, M,
 ACCUMULATE, GEMM, MOST_OWN, ITEM, B_COLUMN, UNIT) = range(OP_WIDTH)
KERNEL, PRODUCT, SUM_PRODUCT, COLUMN_SUM, SCATTER_ADD, FILL, PACK = range(7)
#: what an op runs over: the rows of the launch, its edges, or one position that worker 0 does
ROWS, EDGES, ONCE = range(3)

LINE = 64           # bytes of a cache line
_BYTES = {"float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}


def launch(op_begin: int, op_end: int, start: int, stop: int, edge_start: int = 0, edge_stop: int = 0,
           bounds: int = 0) -> list[int]:
    """Run ops[op_begin:op_end] on the rows start:stop.

    Parameters
    ----------
    bounds : address of int64; the edges of row r are bounds[r]:bounds[r + 1]. 0: edges are shared evenly
    """
    return [op_begin, op_end, start, stop, edge_start, edge_stop, bounds]


def kernel_op(kernel: int, arguments: int, domain: int = ROWS, cost: int = 100) -> list[int]:
    """Call the kernel at an address: void(arguments, first, start, stop), with ONCE (arguments, 0, 0, 1).

    Parameters
    ----------
    arguments : address of the kernel's own table
    cost : about how many ns it takes a position; decides whether a table is worth sharing
    """
    return _row({KIND: KERNEL, DOMAIN: domain, ROUTINE: kernel, COST: cost, A: arguments})


def product_op(a: int, lda: int, w: int, ldw: int, c: int, ldc: int, n: int, k: int, *, transposed: bool,
               dtype: str = "float32", m: int = 1, domain: int = ROWS, a_local: bool = False, c_local: bool = False,
               accumulate: bool = False, most_own: int | None = None, packed: bool = False) -> list[int]:
    """C[rows, n] (+)= A[rows, k] W, for W of shape (k, n), or `transposed` (n, k), or `packed`.

    Parameters
    ----------
    most_own : up to how many rows a worker our own product is used instead of BLAS; default: as measured
    """
    if packed:
        return _row({**_gemm_columns(PRODUCT, domain, panels.product_packed, dtype, n, k, m, accumulate),
                     **_operand(A, a, lda, m, dtype, a_local), B: w, **_operand(C, c, ldc, m, dtype, c_local),
                     B_COLUMN: k * _BYTES[dtype], UNIT: panel_columns(dtype)})
    form = products.product_nt if transposed else products.product_nn
    return _row({**_gemm_columns(PRODUCT, domain, form, dtype, n, k, m, accumulate),
                 **_operand(A, a, lda, m, dtype, a_local), B: w, LDB: ldw, **_operand(C, c, ldc, m, dtype, c_local),
                 MOST_OWN: own_rows(n, k, transposed) if most_own is None else most_own,
                 B_COLUMN: (ldw if transposed else 1) * _BYTES[dtype], UNIT: LINE // _BYTES[dtype]})


def pack_op(w: int, ldw: int, c: int, n: int, k: int, *, transposed: bool, dtype: str = "float32") -> list[int]:
    """Copy W into panels; the workers share these."""
    form = panels.pack_nt if transposed else panels.pack_nn
    return _row({KIND: PACK, DOMAIN: ONCE, ROUTINE: routine(form, dtype).address, COST: n * k // 3, A: w, LDA: ldw,
                 C: c, N: n, K: k, ITEM: _BYTES[dtype], UNIT: panel_columns(dtype)})


def sum_product_op(a: int, lda: int, b: int, ldb: int, c: int, ldc: int, n: int, k: int, *, dtype: str = "float32",
                   m: int = 1, domain: int = ROWS, a_local: bool = False, b_local: bool = False,
                   accumulate: bool = False) -> list[int]:
    """C[n, k] (+)= A[rows, n]^T B[rows, k] over all rows of the launch, which earlier launches wrote."""
    return _row({**_gemm_columns(SUM_PRODUCT, domain, products.sum_product, dtype, n, k, m, accumulate),
                 **_operand(A, a, lda, m, dtype, a_local), **_operand(B, b, ldb, m, dtype, b_local), C: c, LDC: ldc,
                 MOST_OWN: own_sum_rows(n, k, dtype)})


def column_sum_op(a: int, lda: int, c: int, n: int, *, dtype: str = "float32", m: int = 1, domain: int = ROWS,
                  a_local: bool = False, accumulate: bool = False) -> list[int]:
    """C[n] (+)= the sum of A[rows, n] over all rows of the launch, which earlier launches wrote."""
    return _row({KIND: COLUMN_SUM, DOMAIN: domain, ROUTINE: routine(products.column_sum, dtype).address,
                 COST: m * n // 8, **_operand(A, a, lda, m, dtype, a_local), C: c, N: n, M: m, ACCUMULATE: accumulate,
                 ITEM: _BYTES[dtype]})


def scatter_add_op(index: int, index_dtype: str, values: int, ldv: int, target: int, ldt: int, n: int, *,
                   index_step: int = 1, dtype: str = "float32", m: int = 1, domain: int = ROWS,
                   values_local: bool = False) -> list[int]:
    """Add row r of the values to row index[r * index_step] of the target, for all rows of the launch."""
    return _row({KIND: SCATTER_ADD, DOMAIN: domain, COST: m * n // 4,
                 ROUTINE: routine(products.scatter_add, dtype, index_dtype).address,
                 **_operand(A, index, index_step, m, index_dtype, False),
                 **_operand(B, values, ldv, m, dtype, values_local), C: target, LDC: ldt, N: n, M: m,
                 ITEM: _BYTES[dtype]})


def fill_op(target: int, count: int, dtype: str = "float32") -> list[int]:
    """Zeros at an address; the workers share them."""
    return _row({KIND: FILL, DOMAIN: ONCE, ROUTINE: routine(products.fill, dtype).address, COST: count // 8,
                 C: target, N: count, ITEM: _BYTES[dtype]})


def table(rows: list[list[int]], width: int = OP_WIDTH) -> np.ndarray:
    """Rows as the int64 table that the workers take."""
    return np.array(rows, np.int64).reshape(-1, width)


def _gemm_columns(kind, domain, function, dtype, n, k, m, accumulate) -> dict[int, int]:
    return {KIND: kind, DOMAIN: domain, ROUTINE: routine(function, dtype).address, COST: m * n * k // 25,
            GEMM: blas.gemm_address(dtype), N: n, K: k, M: m, ACCUMULATE: accumulate, ITEM: _BYTES[dtype]}


def _operand(column: int, address: int, stride: int, m: int, dtype: str, local: bool) -> dict[int, int]:
    """The four columns of an operand."""
    return {column: address, column + 1: m * stride * _BYTES[dtype], column + 2: local, column + 3: stride}


def _row(columns: dict[int, int]) -> list[int]:
    return [int(columns.get(i, 0)) for i in range(OP_WIDTH)]
