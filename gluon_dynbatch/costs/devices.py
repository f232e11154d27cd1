"""The constants of this machine on disk, beside the compiled kernels; and those to use before it was measured."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import numba
import numpy as np

from cavs_core import cache_folder

from .cost_model import Device

__all__ = ["DEFAULT", "MXNET", "NATIVE", "built_in", "device_path", "fingerprint", "load", "place_of", "store"]

NATIVE = "native"       # a place: where launches run. The others are MXNet on a kind of device, see `place_of`

#: measured on 2 cores of an AMD EPYC (Zen 4) and rounded: for use before this machine is measured
DEFAULT = Device("2 cores of an AMD EPYC", launch_us=3.0, op_us=0.07, gflops=200.0, rows_half=2.0, depth_half=75.0,
                 element_ns=0.01, transcendental_ns=0.13, gather_ns_per_byte=0.033, flush_us=430.0, class_us=90.0,
                 analysis_us=200.0, analysis_us_per_call=0.1, record_us_per_call=0.6, compile_s_per_kernel=0.3)

#: the same for MXNet's operators: what Python takes to start them, on any device. Nothing else is counted in their work
MXNET = Device("MXNet's operators, started by an AMD EPYC", launch_us=40.0, op_us=6.0, gflops=1.0, rows_half=0.0,
               depth_half=0.0, element_ns=0.0, transcendental_ns=0.0, gather_ns_per_byte=0.0, flush_us=240.0,
               class_us=0.0, analysis_us=200.0, analysis_us_per_call=0.1, record_us_per_call=0.6,
               compile_s_per_kernel=0.0)


def place_of(backend: str, ctx: Any) -> str:
    """Where launches run; each place has constants of its own."""
    return NATIVE if backend == "native" else f"MXNet on a {ctx.device_type.upper()}"


def built_in(place: str) -> Device:
    """The constants of a place before it was measured."""
    return DEFAULT if place == NATIVE else MXNET


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


def device_path(place: str = NATIVE) -> Path:
    name = hashlib.sha256(fingerprint().encode()).hexdigest()[:16]
    return cache_folder() / f"{'' if place == NATIVE else place.lower().replace(' ', '_') + '_'}device_{name}.json"


def load(place: str = NATIVE) -> Device | None:
    """The constants of a place on disk; None if there are none of this machine that can be read."""
    try:
        device = Device.from_dict(json.loads(device_path(place).read_text(encoding="utf-8")))
    except (OSError, ValueError):       # missing, or damaged: what is no text, no JSON or no device is a ValueError
        return None
    return device if device.fingerprint == fingerprint() else None


def store(device: Device, place: str = NATIVE) -> None:
    """Put the file there in one step: another process may do the same."""
    path = device_path(place)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(device.to_dict(), file, indent=1)
    os.replace(name, path)
