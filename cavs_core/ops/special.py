"""Special functions that numpy lacks, for the numpy bodies. They compute in double precision."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["digamma", "erf", "erfinv", "gamma", "gammaln"]


def _gamma(v: float) -> float:
    try:
        return math.gamma(v)
    except OverflowError:
        return math.inf
    except ValueError:                  # a pole: zero has a side, the negative integers have none
        return math.copysign(math.inf, v) if v == 0 else math.nan


def _gammaln(v: float) -> float:
    try:
        return math.lgamma(v)
    except (OverflowError, ValueError):
        return math.inf


erf = np.vectorize(math.erf, otypes=[np.float64])
gamma = np.vectorize(_gamma, otypes=[np.float64])
gammaln = np.vectorize(_gammaln, otypes=[np.float64])


def digamma(x):
    """d/dx ln gamma(x): recurrence up to 8, then the asymptotic series; reflected where x is negative."""
    x = np.array(x, dtype=np.float64)
    negative = x <= 0
    z = np.where(negative, 1 - x, x)
    shift = np.zeros_like(z)
    for _ in range(8):
        small = z < 8
        shift -= np.where(small, 1 / z, 0)
        z = np.where(small, z + 1, z)
    inv2 = 1 / (z * z)
    series = inv2 * (1 / 12 - inv2 * (1 / 120 - inv2 * (1 / 252 - inv2 * (1 / 240 - inv2 / 132))))
    out = shift + np.log(z) - 0.5 / z - series
    out = np.where(negative, out - np.pi / np.tan(np.pi * x), out)
    return np.where(negative & (x == np.floor(x)), np.finfo(np.float64).max, out)      # MXNet's value at a pole


def erfinv(x):
    """Winitzki's estimate, polished by Newton steps."""
    x = np.asarray(x, dtype=np.float64)
    ln = np.log1p(-x * x)
    t = 2 / (np.pi * 0.147) + ln / 2
    y = np.sign(x) * np.sqrt(np.sqrt(t * t - ln / 0.147) - t)
    for _ in range(4):
        y = y - (erf(y) - x) / (2 / math.sqrt(math.pi) * np.exp(-y * y))
    return np.where(np.abs(x) == 1, np.sign(x) * np.inf, y)
