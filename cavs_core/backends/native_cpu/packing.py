"""Weights that are copied before a direction runs, so that every product reads them as its tiles do.

A tile holds 3 vectors of columns. In a packed matrix the columns of a tile stand beside each other, row after row (a
panel), whichever way the matrix is stored. BLAS copies the matrix at every call, which costs more than the product of
few rows; our other products read it where it stands, which costs 10 to 30%. A class with many rows copies it once.
"""

from __future__ import annotations

from dataclasses import replace

from .ir import Op, PackOp, ProductOp

__all__ = ["packed", "packs_weights"]

_ENOUGH = 64                # rows (or edges) of a class that are worth the copy
_SMALL = 1 << 13            # elements of a matrix that stays in the first cache as it is
_NARROW = 40                # columns; fewer leave much of a tile empty

Phases = list[list[list[Op]]]


def packs_weights(num_rows: int, num_edges: int) -> bool:
    """Whether a class of so many rows packs its weights."""
    return max(num_rows, num_edges) >= _ENOUGH


def packed(phases: Phases) -> tuple[list[PackOp], Phases]:
    """The copies of one direction, and its operations with them."""
    packs: dict[PackOp, None] = {}

    def with_panels(op: Op) -> Op:
        if not isinstance(op, ProductOp) or op.w[0] != "shared" or op.n < _NARROW or op.n * op.k <= _SMALL:
            return op
        pack = PackOp(op.w, op.transposed, op.n, op.k, op.dtype)
        packs[pack] = None
        return replace(op, w=pack.target)

    changed = [[[with_panels(op) for op in stage] for stage in phase] for phase in phases]
    return list(packs), changed
