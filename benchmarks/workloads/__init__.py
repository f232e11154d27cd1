"""What is computed: samples, mini-batches and parameters as numpy arrays and Python structures, without any framework.

A workload is a module with `DEFAULTS` (its options) and `make(options, num_batches, data) -> Workload`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .base import Workload

__all__ = ["ALL", "NAMES", "Workload", "make", "options_of"]

NAMES = ("treelstm-sst", "treelstm-sick", "treefc", "varlstm", "bilstm-char-tagger", "graphconv")
ALL = (*NAMES, "spinn")     # that one is written for ours and MXNet's loop alone: it compares settings, not systems


def _module(name: str) -> Any:
    if name not in ALL:
        raise ValueError(f"there is no workload {name!r}; there are {', '.join(ALL)}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def options_of(name: str, **changes: int | None) -> dict[str, int]:
    """The options of a workload: its defaults, with those of `changes` that are not None."""
    defaults = _module(name).DEFAULTS
    given = {key: value for key, value in changes.items() if value is not None}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(defaults)}")
    if min(given.values(), default=1) < 1:
        raise ValueError(f"{name}: options are positive numbers, got {given}")
    return {**defaults, **given}


def make(name: str, options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    """The workload with so many different mini-batches, from the files below `data`, or generated if it is None."""
    workload = _module(name).make(options, num_batches, data)
    workload.name, workload.options = name, options
    return workload
