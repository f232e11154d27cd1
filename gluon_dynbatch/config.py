"""The options of a scope, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from cavs_core import BACKENDS

__all__ = ["Config"]

_POLICIES = ("auto", "depth", "none")
_GRANULARITIES = ("auto", "vertex", "op")


@dataclass(frozen=True)
class Config:
    """Options of `gdb.batching`.

    Parameters
    ----------
    policy : "auto", "depth" or "none"
        How calls are grouped. "depth": equal calls of the same depth share a launch. "none": every call is a launch of
        its own (to measure what batching gains). "auto" is "depth".
    granularity : "auto", "vertex" or "op"
        What is one call. "vertex": a decorated or hybridized block. "op": every operator. "auto" is "vertex".
    backend : "auto", "native" or "mxnet"
        What runs the launches: "native" on the CPU (generated kernels and BLAS), "mxnet" anywhere. "auto" takes the
        native one on the CPU, once a model has run for as long as compiling its kernels takes.
    check : bool
        Run every call once more by itself and raise BatchingMismatchError at the first that differs. Slow.
    max_pending : int, optional
        Flush when so many calls are pending, to bound memory.
    """

    policy: str = "auto"
    granularity: str = "auto"
    backend: str = "auto"
    check: bool = False
    max_pending: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("policy", _POLICIES), ("granularity", _GRANULARITIES), ("backend", BACKENDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"batching({name}={getattr(self, name)!r}): expected one of {', '.join(allowed)}")
        if self.max_pending is not None and self.max_pending < 1:
            raise ValueError(f"batching(max_pending={self.max_pending!r}): expected a positive number or None")
