"""The options of a scope, checked in one place."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import numpy as np

from cavs_core import BACKENDS

from .methods import GRANULARITIES, POLICY_NAMES

__all__ = ["Config"]

@dataclass(frozen=True)
class Config:
    """Options of `gdb.batching`.

    Parameters
    ----------
    policy : "auto", "none", "depth", "agenda" or "cost"
        How calls are grouped. "depth": equal calls of the same depth share a launch. "agenda": equal calls that are
        ready, those first whose class has the lowest mean depth. "cost": the fewest and cheapest launches that a short
        search finds. "none": every call is a launch of its own (to measure what batching gains). "auto" begins with
        depth, tries the others, and keeps what is fastest for the model.
    granularity : "auto", "op", "vertex" or "graph"
        What is one call. "vertex": a decorated or hybridized block. "op": every operator. "graph": calls as with
        "vertex", but samples of the same structure are planned once and run together, and others share nothing with
        them. "auto" is "vertex"; with policy "auto", "vertex" or "graph", whatever is faster.
    backend : "auto", "native" or "mxnet"
        What runs the launches: "native" on the CPU (generated kernels and BLAS), "mxnet" anywhere. "auto" takes the
        native one on the CPU, once a model has run for as long as compiling its kernels takes.
    check : bool
        Run every call once more by itself and raise BatchingMismatchError at the first that differs. Slow.
    max_pending : int, optional
        Flush when so many calls are pending, to bound memory.
    analysis_budget : float
        With policy "auto": the share of a step that planning may take, 0.05 for 5 percent.
    drop_repeats : bool
        Whether a call on the same operands as an earlier one is left out, where that is predicted to pay. False: every
        call runs (to measure what that gains).
    """

    policy: str = "auto"
    granularity: str = "auto"
    backend: str = "auto"
    check: bool = False
    max_pending: int | None = None
    analysis_budget: float = 0.05
    drop_repeats: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("policy", POLICY_NAMES), ("granularity", GRANULARITIES), ("backend", BACKENDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"batching({name}={getattr(self, name)!r}): expected one of {', '.join(allowed)}")
        most, share = self.max_pending, self.analysis_budget
        if most is not None and (not isinstance(most, numbers.Integral) or isinstance(most, bool) or most < 1):
            raise ValueError(f"batching(max_pending={self.max_pending!r}): expected a positive number or None")
        for name in ("check", "drop_repeats"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"batching({name}={getattr(self, name)!r}): expected True or False")
        if not isinstance(share, numbers.Real) or not 0 < share <= 1:
            raise ValueError(f"batching(analysis_budget={self.analysis_budget!r}): expected a share of a step, above 0 "
                             "and at most 1")
