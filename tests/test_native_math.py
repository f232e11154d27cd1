"""The functions that kernels call: how exact they are, and what they make of inf and nan."""

import math

import numpy as np
import pytest
from numba import njit

from cavs_core.backends.native_cpu import mathlib
from cavs_core.backends.native_cpu.pointers import OPTIONS
from cavs_core.ops import TABLE, special

WANTED = {
    # what numpy gives in more bits; the range in which the relative error counts
    "exp": (np.exp, -86.9, 88), "expm1": (np.expm1, -87, 88), "log": (np.log, 1e-44, 1e38),
    "log1p": (np.log1p, -0.99, 1e38), "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -87, 100), "tanh": (np.tanh, -20, 20),
    "softrelu": (lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), -80, 100),
    "selu": (TABLE["selu"].body, -80, 80),
    "erf": (lambda x: special.erf(np.asarray(x, "float64")), -6, 6),
}
BOUND = {"float32": 4e-7, "float64": 1e-15}


def values_of(name, dtype, xs):
    """The function on every element, in a loop as a kernel has it."""
    f = mathlib.FUNCTIONS[name, dtype]

    @njit(**OPTIONS)
    def run(xs, ys):
        for j in range(xs.size):
            ys[j] = f(xs[j])

    ys = np.empty_like(xs)
    run(xs, ys)
    return ys


def points(low, high):
    """Even steps, and powers of ten on both sides of zero."""
    powers = 10.0 ** np.linspace(-30, 38, 3000)
    xs = np.concatenate([np.linspace(max(low, -1e3), min(high, 1e3), 20001), powers, -powers])
    return xs[(xs >= low) & (xs <= high)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WANTED)
def test_relative_error_and_ends(name, dtype):
    wanted, low, high = WANTED[name]
    xs = points(low, high).astype(dtype)
    ends = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0], dtype)
    ys = values_of(name, dtype, np.concatenate([xs, ends]))
    with np.errstate(all="ignore"):
        want = wanted(np.concatenate([xs, ends]).astype(np.longdouble)).astype(np.longdouble)
    inside = want[:xs.size]
    error = np.abs(ys[:xs.size] - inside) / np.maximum(np.abs(inside), np.finfo(dtype).tiny)
    assert error.max() < BOUND[dtype], f"{name}({xs[error.argmax()]}) is off by {error.max():.2e}"
    np.testing.assert_allclose(ys[xs.size:], want[xs.size:].astype(dtype), rtol=4e-7)


def test_exp_of_what_is_too_small_is_zero():
    for dtype, low in (("float32", -88.0), ("float64", -709.0)):
        assert values_of("exp", dtype, np.array([low, 10 * low], dtype)).tolist() == [0, 0]


def test_rare_functions():
    xs = np.array([-2.5, -1.5, -0.5, 0.3, 0.9, 1.0, 4.5, 12.0])
    for x in xs:
        assert math.isclose(mathlib.digamma(x), float(special.digamma(x)), rel_tol=1e-9)
        assert math.isclose(mathlib.gamma(x), math.gamma(x), rel_tol=1e-12)
    assert mathlib.erfinv(0.0) == 0
    for x in (-0.99, -0.2, 0.7):
        assert math.isclose(mathlib.erfinv(x), float(special.erfinv(x)), rel_tol=1e-12)
    assert mathlib.erfinv(1.0) == math.inf and mathlib.erfinv(-1.0) == -math.inf
    assert math.isnan(mathlib.gamma(-2.0)) and mathlib.gamma(0.0) == math.inf and mathlib.gamma(200.0) == math.inf
    assert mathlib.digamma(-2.0) == float(special.digamma(-2.0))
    assert mathlib.modulo(-7.5, 2.0) == 0.5 and mathlib.modulo(7, -4) == -1 and mathlib.modulo(3.0, 0.0) == 0.0
