"""Products by panels: three vectors of columns of W beside each other, row after row, whichever way W is stored.

A tile reads a panel from its beginning to its end. A class with many rows copies its whole matrix into panels, once a
pass (`pack_nt`, `pack_nn`, `product_packed`). Where a matrix is used once, a panel is copied right before its use
(`product_by_panels`): so the gradient of a matrix, a sum over rows, is made, since there both operands are new.

With 32 registers of 64 bytes (AVX-512) a tile holds 24 sums beside its operands, else 12; measured on AMD Zen 4, which
multiplies as many numbers a cycle either way, GFLOP/s of one core, of 113: packed weights 107 to 112 against 103 to
109, gradients of 750 x 300 over 1,200 rows 102 against 92, BLAS 91.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .intrinsics import VECTOR_BYTES, WIDE_BYTES, as_element, lanes_of, scratch, shift, wide_lanes_of
from .tiles import axpy_tile, transpose_tile

__all__ = ["even_part", "pack_nn", "pack_nt", "packed_elements", "panel_columns", "product_by_panels", "product_packed"]

_VECTORS = 3                # of a panel, but for the last one, which has as many as its columns need
_A_ROWS = 128               # rows of A that are used with one panel after the other
_A_BYTES = 1 << 18          # .. if they stay in the second cache
_EDGE_BYTES = _A_ROWS * _VECTORS * WIDE_BYTES
_COPY_BYTES = 72 << 10      # of a panel that is copied for one product: it stays in the second cache
_DEPTH = _COPY_BYTES // (_VECTORS * WIDE_BYTES)
_WORTH_A_COPY = 24          # rows of C; for fewer a tile reads W where it stands
_C_ROWS = 512               # rows of C for which a panel is used: so much of A stays in the second cache


@njit
def even_part(count, most):
    """The size of equal parts of at most so many."""
    return -(-count // -(-count // most))


# ---- the rows of one panel -------------------------------------------------------------------------------------------

def _rows_of_panel(vectors):
    """A function: C (+)= A W for all rows of A and the columns of one panel, the first `skip` of which stay."""
    one, two, three, four, six, eight = (axpy_tile(rows, vectors, WIDE_BYTES) for rows in (1, 2, 3, 4, 6, 8))
    tall = WIDE_BYTES > VECTOR_BYTES            # whether there are registers for eight rows
    whole = vectors == _VECTORS                 # else there is one such panel: fewer tiles are compiled sooner

    @njit
    def panel_rows(a, row_step, step, w, ldw, c, ldc, rows, k, skip, accumulate):
        i = 0
        while i < rows:         # (a tile of one row has too few sums to keep a core busy)
            left, a_tile, c_tile = rows - i, shift(a, i * row_step), shift(c, i * ldc)
            if tall and left >= 8 and left != 9:
                eight(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 8
            elif tall and whole and (left == 6 or left == 9):
                six(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 6
            elif left >= 4 and left != 5:
                four(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 4
            elif whole and (left == 3 or left == 5):
                three(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 3
            elif left >= 2:
                two(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 2
            else:
                one(a_tile, row_step, step, w, ldw, c_tile, ldc, k, skip, accumulate)
                i += 1

    return panel_rows


_by_one, _by_two, _by_three = map(_rows_of_panel, (1, 2, 3))


@njit
def _panel_rows(vectors, a, row_step, step, w, ldw, c, ldc, rows, k, skip, accumulate):
    if vectors == 3:
        _by_three(a, row_step, step, w, ldw, c, ldc, rows, k, skip, accumulate)
    elif vectors == 2:
        _by_two(a, row_step, step, w, ldw, c, ldc, rows, k, skip, accumulate)
    else:
        _by_one(a, row_step, step, w, ldw, c, ldc, rows, k, skip, accumulate)


# ---- packed weights --------------------------------------------------------------------------------------------------

def panel_columns(dtype: str) -> int:
    """The columns of a panel."""
    return _VECTORS * WIDE_BYTES // np.dtype(dtype).itemsize


def packed_elements(n: int, k: int, dtype: str) -> int:
    """How many numbers a packed W has: the last vector of columns is filled up with zeros."""
    lanes = WIDE_BYTES // np.dtype(dtype).itemsize
    return -(-n // lanes) * lanes * k


@njit
def _width(columns, lanes):
    """How wide the panel is that such a number of columns begins with."""
    return min(_VECTORS, -(-columns // lanes)) * lanes


def pack_nt(w, ldw, c, n, k, low, high):
    """Panels low:high of W[n, k]^T."""
    some, lanes = lanes_of(w), wide_lanes_of(w)
    for p in range(low, high):
        begin = p * _VECTORS * lanes
        panel, first, wide = shift(c, begin * k), shift(w, begin * ldw), _width(n - begin, lanes)
        there = min(wide, n - begin)
        for part in range(0, wide, some):       # few rows of W at a time: they may all have one place in the cache
            end, x = min(there, part + some), 0
            while end == part + some and x + some <= k:
                transpose_tile(shift(first, part * ldw + x), ldw, shift(panel, x * wide + part), wide)
                x += some
            for z in range(x, k):
                for y in range(part, end):
                    panel[z * wide + y] = first[y * ldw + z]
                for y in range(max(part, end), part + some):
                    panel[z * wide + y] = as_element(c, 0)


@njit
def _copy_columns(w, ldw, panel, wide, there, k):
    """Columns of W, beside each other; zeros in those that are not there."""
    for x in range(k):
        for y in range(there):
            panel[x * wide + y] = w[x * ldw + y]
        for y in range(there, wide):
            panel[x * wide + y] = as_element(panel, 0)


def pack_nn(w, ldw, c, n, k, low, high):
    """Panels low:high of W[k, n]."""
    lanes = wide_lanes_of(w)
    for p in range(low, high):
        begin = p * _VECTORS * lanes
        wide = _width(n - begin, lanes)
        _copy_columns(shift(w, begin), ldw, shift(c, begin * k), wide, min(wide, n - begin), k)


def product_packed(a, lda, w, ldw, c, ldc, rows, n, k, accumulate, gemm, most_own):
    """C[rows, n] (+)= A[rows, k] W, for a packed W (whose stride, BLAS and limit nobody needs)."""
    lanes, edge = wide_lanes_of(a), scratch(a, _EDGE_BYTES)
    chunk = max(8, min(_A_ROWS, _A_BYTES // (WIDE_BYTES // lanes) // k // 8 * 8))
    for i in range(0, rows, chunk):
        some, mine, j = shift(a, i * lda), min(chunk, rows - i), 0
        while j < n:
            panel, target, wide = shift(w, j * k), shift(c, i * ldc + j), _width(n - j, lanes)
            beyond = j + wide > n               # columns behind n belong to somebody else
            out, ldo, adds = (edge, wide, 0) if beyond else (target, ldc, accumulate)
            _panel_rows(wide // lanes, some, lda, 1, panel, wide, out, ldo, mine, k, 0, adds)
            if beyond:
                for x in range(mine):
                    for y in range(n - j):
                        value = edge[x * wide + y]
                        target[x * ldc + y] = target[x * ldc + y] + value if accumulate else value
            j += wide


# ---- a matrix that is used once --------------------------------------------------------------------------------------

@njit
def product_by_panels(a, row_step, step, w, ldw, c, ldc, rows, n, k, accumulate):
    """C (+)= A W for W[k, n], n at least a wide vector. A's entry (i, x) stands at i * row_step + x * step."""
    lanes, copy = wide_lanes_of(a), scratch(w, _COPY_BYTES)
    depth, chunk = even_part(k, _DEPTH), even_part(rows, _C_ROWS)
    for x in range(0, k, depth):
        deep = min(depth, k - x)
        for i in range(0, rows, chunk):
            some, mine, j = shift(a, x * step + i * row_step), min(chunk, rows - i), 0
            while j < n:
                wide = min(_width(n - j, lanes), n // lanes * lanes)
                begin = min(j, n - wide)        # the last panel may overlap the one before
                panel, ldp = shift(w, x * ldw + begin), ldw
                if mine >= _WORTH_A_COPY:
                    _copy_columns(panel, ldw, copy, wide, wide, deep)
                    panel, ldp = copy, wide
                _panel_rows(wide // lanes, some, row_step, step, panel, ldp, shift(c, i * ldc + begin), ldc, mine, deep,
                            j - begin, accumulate or x > 0)
                j = begin + wide
