"""Who computes it: each system trains a workload's model in its own framework and in its own process.

A system is a class with

    System(workload, variant)       builds the model with the workload's parameters; what is done once a sample
                                    (parsing, making graphs) may be done here
    loss(k), step(k)                the loss of mini-batch k, without and with an update; both wait for their end
    parameters()                    the parameters as numpy arrays, by the names of the workload
    versions()                      {package: version}
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["REFERENCE", "SYSTEMS", "SystemInfo", "load"]


@dataclass(frozen=True)
class SystemInfo:
    """One line of the results table, and what runs it."""

    title: str
    module: str
    variant: str = ""
    peer: bool = False          # runs in the peers' environment
    slow: bool = False          # gets fewer steps, and in a quick run only where a bar asks for it
    learns: bool = True         # on its first mini-batches, which are not timed: it traces, compiles or tunes
    checked: bool = True        # has a loss that must equal that of the others
    env: tuple[tuple[str, str], ...] = ()       # what its process finds in the environment


SYSTEMS = {
    # (The loop is fastest with OpenMP's threads awake; ours puts them to sleep.)
    "mxnet-loop": SystemInfo("MXNet, one sample at a time", "gluon", "loop", slow=True, learns=False,
                             env=(("OMP_WAIT_POLICY", "ACTIVE"),)),
    "ours-op": SystemInfo("ours, op grain", "gluon", "op", slow=True),
    "ours-vertex": SystemInfo("ours, vertex grain", "gluon", "vertex"),
    "ours-cavs": SystemInfo("ours, Cavs face", "gluon", "cavs"),
    "dynet": SystemInfo("DyNet", "dynet", "plain", peer=True, slow=True, learns=False),
    "dynet-autobatch": SystemInfo("DyNet, autobatch", "dynet", "autobatch", peer=True),
    "torch-loop": SystemInfo("PyTorch, one sample at a time", "pytorch", "loop", peer=True, slow=True, learns=False),
    "torch-batched": SystemInfo("PyTorch, batched by hand", "pytorch", "batched", peer=True),
    "limit": SystemInfo("the limit: products alone, in BLAS", "limit", checked=False),
}
REFERENCE = "mxnet-loop"        # the others are compared with this one, if it takes part


def load(name: str) -> Any:
    """The class of a system. Imports its framework."""
    return importlib.import_module(f"{__name__}.{SYSTEMS[name].module}").System
