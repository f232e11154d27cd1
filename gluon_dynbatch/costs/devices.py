"""The constants of this machine on disk, beside the compiled kernels; and those to use before it was measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path

import numba
import numpy as np

from cavs_core import cache_folder

from .cost_model import Device

__all__ = ["DEFAULT", "device_path", "fingerprint", "load", "store"]

#: measured on 2 cores of an AMD EPYC (Zen 4) and rounded: for use before this machine is measured
DEFAULT = Device("2 cores of an AMD EPYC", launch_us=3.0, op_us=0.07, gflops=200.0, rows_half=2.0, depth_half=75.0,
                 element_ns=0.01, transcendental_ns=0.13, gather_ns_per_byte=0.033, flush_us=430.0, class_us=90.0,
                 analysis_us=530.0, analysis_us_per_call=0.3, record_us_per_call=1.1, compile_s_per_kernel=0.3)


def fingerprint() -> str:
    """What the constants depend on: another machine, another number of threads or another version is measured anew."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        version = importlib.metadata.version("gluon_dynbatch")
    except importlib.metadata.PackageNotFoundError:     # run from a checkout
        version = "unknown"
    threads = os.environ.get("DYNBATCH_THREADS") or cores
    return (f"{_cpu_model()}, {cores} cores, {threads} threads, numpy {np.__version__}, numba {numba.__version__}, "
            f"gluon_dynbatch {version}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:                     # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_path() -> Path:
    return cache_folder() / f"device_{hashlib.sha256(fingerprint().encode()).hexdigest()[:16]}.json"


def load() -> Device | None:
    """The constants on disk; None if there are none of this machine that can be read."""
    try:
        device = Device.from_dict(json.loads(device_path().read_text(encoding="utf-8")))
    except (OSError, ValueError):       # missing, or damaged: what is no text, no JSON or no device is a ValueError
        return None
    return device if device.fingerprint == fingerprint() else None


def store(device: Device) -> None:
    """Put the file there in one step: another process may do the same."""
    path = device_path()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(device.to_dict(), file, indent=1)
    os.replace(name, path)
