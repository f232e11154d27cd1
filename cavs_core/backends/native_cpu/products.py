"""Products and sums over rows, as compiled functions that the interpreter calls by address.

BLAS packs the whole of W at every call, which costs more than the product of a few rows. Up to `own_rows` rows a
product is therefore made by the tiles of `tiles.py`, which read W where it stands. All functions here take pointers
to elements, and strides in elements.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from .compiled import Compiled, compile_function
from .intrinsics import VECTOR_BYTES, WIDE_BYTES, as_element, call_address, lanes_of, shift, wide_lanes_of
from .memory import address_of
from .panels import even_part, product_by_panels
from .tiles import axpy_tile, dot_tile

__all__ = ["product_nt", "product_nn", "sum_product", "column_sum", "scatter_add", "gather_sum", "fill", "routine",
           "segment_sum", "own_rows", "own_sum_rows", "ALWAYS"]

ALWAYS = 1 << 40        # more rows than there are
_WIDE = WIDE_BYTES > VECTOR_BYTES

_ROW_MAJOR, _PLAIN, _TRANSPOSED = (np.int32(code) for code in (101, 111, 112))      # of cblas
_L1_BYTES = 20480       # rows of A that are used together: they stay in the first cache (32 KiB) beside a tile of W

_dot_1, _dot_2, _dot_3 = dot_tile(1, 2), dot_tile(2, 1), dot_tile(3, 1)
_axpy_1, _axpy_edge = axpy_tile(1, 4), axpy_tile(1, 1)


def own_rows(n: int, k: int, transposed: bool) -> int:
    """Up to how many rows our own product is faster than BLAS with one thread.

    Measured by benchmarks/bench_products.py (AMD Zen 3, other work on the machine, float32, GFLOP/s of one core, own /
    BLAS):

        rows               1       4       16      64      96      128     192     256
        transposed
        k  50, n  250    7/ 2   20/ 9   36/26   44/49   45/54   45/57   46/61   46/62
        k 100, n  250   13/ 3   33/10   51/30   60/57   61/63   61/66   62/70   62/72
        k 300, n  750   21/ 3   56/12   77/35   78/66   77/73   74/76   77/81   71/83
        k 512, n 2560   27/ 3   63/12   75/34   73/64   66/71   54/71   69/74   22/40
        k 750, n  150   25/ 3   58/12   76/33   82/61   83/68   65/60   66/64   71/64
        not transposed
        k  50, n  250    8/ 2   23/ 9   43/25   54/49   55/54   48/51   57/61   57/62
        k 100, n  250   13/ 3   36/10   58/29   67/57   69/63   70/66   71/70   72/72
        k 300, n  750   21/ 3   48/12   64/35   82/65   84/73   86/77   85/81   86/84
        k 750, n  300   21/ 3   43/11   63/34   85/65   87/73   88/76   86/77   89/83

    With wide vectors (AMD Zen 4) what is not transposed is always faster or equal: 64 rows 94 to 106 against 80 to 99,
    256 rows 101 to 113 against 86 to 101.
    """
    if k < 8 if transposed else n < 24:         # less than the tiles are made for
        return 4
    if not transposed:
        return ALWAYS if _WIDE else min(192, 2 * min(n, k))
    return ALWAYS if n <= 64 else 400 if n <= 160 else min(128, 24 + k // 3)


def own_sum_rows(n: int, k: int, dtype: str) -> int:
    """The same for `sum_product`.

    BLAS copies both operands, which costs much beside a small C. GFLOP/s of two cores, own / BLAS: C of 12 x 300 in
    float32 151/83, 64 x 128 122/107, 128 x 256 146/123, 256 x 512 170/134, but 2048 x 512 176/193,
    and 750 x 300 in float64 79/88 (in float32 they are equal). With wide vectors one core does 750 x 300 with 106/92,
    64 x 32 with 85/53, 40 x 24 with 54/64, 750 x 300 in float64 with 52/47.
    """
    if _WIDE:
        return ALWAYS if k * np.dtype(dtype).itemsize >= 2 * WIDE_BYTES else 0
    few, small = n <= 32 and k >= 48, dtype == "float32" and k >= 24 and n * k <= 1 << 17
    return ALWAYS if few or small else 0


# ---- own products ---------------------------------------------------------------------------------------------------

@njit
def _plain_product(a, row_step, step, w, w_row, w_col, c, ldc, rows, n, k, accumulate):
    """Any shape, one number at a time: for less than a vector."""
    for i in range(rows):
        for j in range(n):
            total = a[i * row_step] * w[j * w_col]
            for x in range(1, k):
                total += a[i * row_step + x * step] * w[x * w_row + j * w_col]
            c[i * ldc + j] = c[i * ldc + j] + total if accumulate else total


@njit
def _dot_rows(a, lda, w, ldw, c, ldc, rows, n, k, accumulate):
    """C (+)= A W^T for W of shape (n, k), with k at least a vector."""
    if rows == 1:
        for j in range(0, n, 8):
            _dot_1(a, lda, shift(w, j * ldw), ldw, shift(c, j), ldc, k, min(8, n - j), accumulate)
        return
    for j in range(0, n, 4):
        w_tile, cols, i = shift(w, j * ldw), min(4, n - j), 0
        while rows - i > 4 or rows - i == 3:
            _dot_3(shift(a, i * lda), lda, w_tile, ldw, shift(c, i * ldc + j), ldc, k, cols, accumulate)
            i += 3
        while i < rows:
            _dot_2(shift(a, i * lda), lda, w_tile, ldw, shift(c, i * ldc + j), ldc, k, cols, accumulate)
            i += 2


@njit
def _own_nt(a, lda, w, ldw, c, ldc, rows, n, k, accumulate):
    if k < lanes_of(a):
        _plain_product(a, lda, 1, w, 1, ldw, c, ldc, rows, n, k, accumulate)
        return
    chunk = even_part(rows, max(6, _L1_BYTES // (VECTOR_BYTES // lanes_of(a)) // k))
    for i in range(0, rows, chunk):
        _dot_rows(shift(a, i * lda), lda, w, ldw, shift(c, i * ldc), ldc, min(chunk, rows - i), n, k, accumulate)


@njit
def _axpy_row(a, step, w, ldw, c, n, k, accumulate):
    """One row of C (+)= A W for W of shape (k, n), with n at least a vector."""
    j, lanes = 0, lanes_of(a)
    while j < n:
        left = n - j
        if left >= 4 * lanes:
            _axpy_1(a, 0, step, shift(w, j), ldw, shift(c, j), 0, k, 0, accumulate)
            j += 4 * lanes
        else:
            place = min(j, n - lanes)
            _axpy_edge(a, 0, step, shift(w, place), ldw, shift(c, place), 0, k, j - place, accumulate)
            j = place + lanes


@njit
def _own_nn(a, row_step, step, w, ldw, c, ldc, rows, n, k, accumulate):
    if n < lanes_of(a):
        _plain_product(a, row_step, step, w, ldw, 1, c, ldc, rows, n, k, accumulate)
    elif rows == 1 or n < wide_lanes_of(a):
        for i in range(rows):
            _axpy_row(shift(a, i * row_step), step, w, ldw, shift(c, i * ldc), n, k, accumulate)
    else:
        product_by_panels(a, row_step, step, w, ldw, c, ldc, rows, n, k, accumulate)


# ---- routines -------------------------------------------------------------------------------------------------------

def product_nt(a, lda, w, ldw, c, ldc, rows, n, k, accumulate, gemm, most_own):
    """C[rows, n] (+)= A[rows, k] W[n, k]^T; by BLAS (at `gemm`, if not 0) for more than `most_own` rows."""
    if gemm == 0 or rows <= most_own:
        _own_nt(a, lda, w, ldw, c, ldc, rows, n, k, accumulate)
    else:
        call_address(gemm, (_ROW_MAJOR, _PLAIN, _TRANSPOSED, rows, n, k, as_element(a, 1), a, lda, w, ldw,
                            as_element(a, accumulate), c, ldc))


def product_nn(a, lda, w, ldw, c, ldc, rows, n, k, accumulate, gemm, most_own):
    """C[rows, n] (+)= A[rows, k] W[k, n]."""
    if gemm == 0 or rows <= most_own:
        _own_nn(a, lda, 1, w, ldw, c, ldc, rows, n, k, accumulate)
    else:
        call_address(gemm, (_ROW_MAJOR, _PLAIN, _PLAIN, rows, n, k, as_element(a, 1), a, lda, w, ldw,
                            as_element(a, accumulate), c, ldc))


def sum_product(a, lda, b, ldb, c, ldc, rows, n, k, accumulate, gemm, most_own):
    """C[n, k] (+)= A[rows, n]^T B[rows, k]: the gradient of a matrix."""
    if gemm == 0 or rows <= most_own:
        _own_nn(a, 1, lda, b, ldb, c, ldc, n, k, rows, accumulate)
    else:
        call_address(gemm, (_ROW_MAJOR, _TRANSPOSED, _PLAIN, n, k, rows, as_element(a, 1), a, lda, b, ldb,
                            as_element(a, accumulate), c, ldc))


def column_sum(a, lda, c, rows, n, accumulate):
    """C[n] (+)= the sum of the rows of A[rows, n]."""
    if not accumulate:
        for j in range(n):
            c[j] = as_element(c, 0)
    i = 0
    while i + 4 <= rows:
        first, second, third, fourth = (shift(a, i * lda), shift(a, (i + 1) * lda), shift(a, (i + 2) * lda),
                                        shift(a, (i + 3) * lda))
        for j in range(n):
            c[j] += (first[j] + second[j]) + (third[j] + fourth[j])
        i += 4
    for r in range(i, rows):
        row = shift(a, r * lda)
        for j in range(n):
            c[j] += row[j]


def scatter_add(index, index_step, values, ldv, table, ldt, rows, n):
    """Add row r of values[rows, n] to the row index[r * index_step] of a table."""
    for r in range(rows):
        row, target = shift(values, r * ldv), shift(table, np.int64(index[r * index_step]) * ldt)
        for j in range(n):
            target[j] += row[j]


def gather_sum(index, bounds, values, ldv, target, rows, n):
    """Row r of target[rows, n] = the sum of the rows index[bounds[r]:bounds[r + 1]] of the values."""
    for r in range(rows):
        out = shift(target, r * n)
        for j in range(n):
            out[j] = as_element(target, 0)
        for e in range(bounds[r], bounds[r + 1]):
            row = shift(values, index[e] * ldv)
            for j in range(n):
                out[j] += row[j]


def fill(target, count):
    """Zeros."""
    for j in range(count):
        target[j] = as_element(target, 0)


@cache
def routine(function: Any, dtype: str, index_dtype: str = "") -> Compiled:
    """One of the functions above, compiled for elements of a dtype (and an index of another)."""
    pointer, size = types.CPointer(getattr(types, dtype)), types.int64
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    kinds = {**dict.fromkeys(("a", "b", "c", "w", "values", "table", "target"), pointer),
             "index": types.CPointer(getattr(types, index_dtype or "int64")), "bounds": types.CPointer(size)}
    return compile_function(function, types.void(*(kinds.get(name, size) for name in names)), dtype + index_dtype)


def segment_sum(values: np.ndarray, index: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> None:
    """out[r] = the sum of values[index[bounds[r]:bounds[r + 1]]]; all are contiguous, index and bounds int64."""
    assert values.flags.c_contiguous and out.flags.c_contiguous and values.dtype == out.dtype
    assert index.dtype == bounds.dtype == np.int64 and index.strides == bounds.strides == (8,)
    width = out[0].size if len(out) else 0
    routine(gather_sum, values.dtype.name).call(*map(address_of, (index, bounds, values)), width, address_of(out),
                                                len(out), width)
