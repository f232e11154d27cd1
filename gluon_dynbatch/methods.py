"""Method: how launches are found; the words that people use for it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Method", "POLICY_NAMES", "GRANULARITIES"]

POLICY_NAMES = ("auto", "none", "depth", "agenda", "cost")
GRANULARITIES = ("auto", "op", "vertex", "graph")


class Method(NamedTuple):
    """A policy, and the grain at which it works: all calls together, or ("graph") each structure by itself."""

    policy: str
    granularity: str

    @property
    def drops_repeats(self) -> bool:
        """Whether calls that repeat others are left out: not where every call, or every structure, is by itself."""
        return self.policy != "none" and self.granularity != "graph"

    def __str__(self) -> str:
        return f"{self.policy} at {self.granularity} grain"
