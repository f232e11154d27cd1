"""Gradients that a run writes to memory that exists already."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Target", "WRITTEN"]

WRITTEN = object()          # in place of a gradient: it stands in its target already


class Target(NamedTuple):
    """An array that takes a gradient."""

    array: Any              # an NDArray
    add: bool               # whether the gradient is added to what is there
