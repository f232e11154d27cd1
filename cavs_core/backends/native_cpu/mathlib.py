"""Elementary functions that LLVM can vectorise, for the kernels. Each keeps inf and nan.

`FUNCTIONS["exp", "float32"]` and so on; generated code calls them `exp_float32`. Relative errors of ours: float32 below
3e-7, float64 below 1e-15; the rare functions are the C library's.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .pointers import HELPER, larger

__all__ = ["FUNCTIONS", "digamma", "erfinv", "gamma", "modulo", "round_half_away", "round_half_down"]

_define = njit(**HELPER)
_WORDS = {types.float32: (32, 23, 127), types.float64: (64, 52, 1023)}       # bits, mantissa, bias


@intrinsic
def _half_power_of_two(typingctx, t):
    """2 ** (n - 1) for t = n + 1.5 * 2 ** mantissa, whose last bits are the whole number n; 0 if n - 1 = -bias."""
    bits, mantissa, bias = _WORDS[t]

    def codegen(context, builder, sig, args):
        word = ir.IntType(bits)
        shifted = builder.shl(builder.bitcast(args[0], word), word(mantissa))
        return builder.bitcast(builder.add(shifted, word((bias - 1) << mantissa)), args[0].type)

    return t(t), codegen


@intrinsic
def _exponent(typingctx, x):
    """n of a normal x = m * 2 ** n, 1 <= m < 2."""
    bits, mantissa, bias = _WORDS[x]

    def codegen(context, builder, sig, args):
        word = ir.IntType(bits)
        power = builder.sub(builder.lshr(builder.bitcast(args[0], word), word(mantissa)), word(bias))
        power = power if bits == 32 else builder.trunc(power, ir.IntType(32))
        return builder.sitofp(power, context.get_value_type(x))

    return x(x), codegen


@intrinsic
def _mantissa(typingctx, x):
    """m of a normal x = m * 2 ** n, 1 <= m < 2."""
    bits, mantissa, bias = _WORDS[x]

    def codegen(context, builder, sig, args):
        word = ir.IntType(bits)
        part = builder.and_(builder.bitcast(args[0], word), word((1 << mantissa) - 1))
        return builder.bitcast(builder.or_(part, word(bias << mantissa)), context.get_value_type(x))

    return x(x), codegen


def _polynomial(dtype, coefficients):
    """c0 x^k + c1 x^(k-1) + ... + ck. The function unrolls: kernels see multiply-adds only."""
    names = {f"c{i}": np.dtype(dtype).type(c) for i, c in enumerate(coefficients)}
    text = "c0"
    for i in range(1, len(coefficients)):
        text = f"({text} * x + c{i})"
    return _define(eval(f"lambda x: {text}", names))


def _common(dtype, exp_part, log_part, ln2, low, high, large, scale_power):
    """The functions that both precisions compute alike.

    Parameters
    ----------
    exp_part, log_part : exp(r) - 1 for |r| <= ln(2) / 2; log(1 + f) - f for 1 + f between sqrt(1/2) and sqrt(2)
    ln2 : ln(2) in two parts, the first of few bits
    low, high : where exp is 0, its results being no longer normal, and where it is inf
    large : from here on exp(x) - 1 is exp(x)
    scale_power : 2 ** scale_power makes any denormal number normal
    """
    c = np.dtype(dtype).type
    low, high, large, ln2_high, ln2_low = c(low), c(high), c(large), c(ln2[0]), c(ln2[1])
    zero, half, one, two, inf, nan = c(0), c(0.5), c(1), c(2), c(np.inf), c(np.nan)
    log2_e, sqrt2, normal = c(math.log2(math.e)), c(math.sqrt(2)), c(np.finfo(dtype).tiny)
    whole = c(1.5 * 2 ** np.finfo(dtype).nmant)         # adding it leaves no bits for fractions
    scale, scale_power, log_ln2_high, log_ln2_low = (c(v) for v in (
        2.0 ** scale_power, scale_power, 0.693359375, -2.121944400546905827679e-4))
    selu_alpha, selu_scale = c(1.6732632423543772), c(1.0507009873554805)

    @_define
    def split(x):
        """p, s: exp(x) = 2 * (1 + p) * s. At the ends of the range s or the product is 0 or inf by itself."""
        x = low if x < low else x
        x = high if x > high else x
        t = x * log2_e + whole
        n = t - whole
        return exp_part((x - n * ln2_high) - n * ln2_low), _half_power_of_two(t)

    @_define
    def exp(x):
        p, s = split(x)
        return (two + two * p) * s

    @_define
    def exp_or_inf(x):
        """inf where x is nan."""
        return exp(x if x < high else high)

    @_define
    def expm1(x):
        p, s = split(x)
        many, few = (two + two * p) * s, two * p * s + (two * s - one)
        return many if x > large else few

    @_define
    def log(x):
        small = x < normal
        v = x * scale if small else x
        n, m = _exponent(v), _mantissa(v)
        big = m > sqrt2
        n = n + one if big else n
        n = n - scale_power if small else n
        f = (m * half if big else m) - one
        y = log_part(f) + n * log_ln2_low
        y = (f + y) + n * log_ln2_high
        y = y if x < inf else x             # inf, nan
        y = -inf if x == zero else y
        return nan if x < zero else y

    @_define
    def log1p(x):
        u = one + x
        y = log(u) + (x - (u - one)) / u
        y = -inf if u == zero else y
        return y if u < inf else u

    @_define
    def sigmoid(x):
        return one / (one + exp(-x))

    @_define
    def softrelu(x):
        return larger(x, zero) + log1p(exp(-abs(x)))

    @_define
    def selu(x):
        below = selu_alpha * expm1(zero if x > zero else x)
        return selu_scale * (x if x > zero else below)

    return {"exp": exp, "exp_or_inf": exp_or_inf, "expm1": expm1, "log": log, "log1p": log1p, "sigmoid": sigmoid,
            "softrelu": softrelu, "selu": selu}


def _single():
    """float32: the polynomials of cephes; tanh and erf as one quotient."""
    exp_poly = _polynomial("float32", (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                       1.6666665459e-1, 5.0000001201e-1))
    log_poly = _polynomial("float32", (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1,
                                       1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1,
                                       3.3333331174e-1))
    tanh_p = _polynomial("float32", (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11,
                                     5.12229709037114e-08, 1.48572235717979e-05, 6.37261928875436e-04,
                                     4.89352455891786e-03))
    tanh_q = _polynomial("float32", (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03,
                                     4.89352518554385e-03))
    erf_p = _polynomial("float32", (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06,
                                    -5.69250639462346e-05, -7.34990630326855e-04, -2.95459980854025e-03,
                                    -1.60960333262415e-02))
    erf_q = _polynomial("float32", (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
                                    -7.37332916720468e-03, -1.42647390514189e-02))
    half = np.float32(0.5)

    @_define
    def exp_part(r):
        return exp_poly(r) * (r * r) + r

    @_define
    def log_part(f):
        return f * (f * f) * log_poly(f) - half * (f * f)

    def quotient(p, q, end):
        """An odd function as x p(x^2) / q(x^2), constant outside of -end : end."""
        end = np.float32(end)

        @_define
        def f(x):
            x = end if x > end else x
            x = -end if x < -end else x
            return x * p(x * x) / q(x * x)

        return f

    common = _common("float32", exp_part, log_part, (0.693359375, -2.12194440e-4), -87.3, 89.0, 20.0, 24)
    return {**common, "tanh": quotient(tanh_p, tanh_q, 7.90531110763549805), "erf": quotient(erf_p, erf_q, 4.0)}


def _double():
    """float64: the quotients of cephes."""
    exp_p = _polynomial("float64", (1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1))
    exp_q = _polynomial("float64", (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1,
                                    2.00000000000000000009e0))
    log_p = _polynomial("float64", (1.01875663804580931796e-4, 4.97494994976747001425e-1, 4.70579119878881725854e0,
                                    1.44989225341610930846e1, 1.79368678507819816313e1, 7.70838733755885391666e0))
    log_q = _polynomial("float64", (1.0, 1.12873587189167450590e1, 4.52279145837532221105e1, 8.29875266912776603211e1,
                                    7.11544750618563894466e1, 2.31251620126765340583e1))
    tanh_p = _polynomial("float64", (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3))
    tanh_q = _polynomial("float64", (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
                                     4.84406305325125486048e3))

    @_define
    def exp_part(r):
        p = r * exp_p(r * r)
        return 2.0 * (p / (exp_q(r * r) - p))

    @_define
    def log_part(f):
        return f * (f * f * log_p(f) / log_q(f)) - 0.5 * (f * f)

    common = _common("float64", exp_part, log_part, (6.93145751953125e-1, 1.42860682030941723212e-6),
                     -708.39, 710.0, 40.0, 54)
    exp = common["exp"]

    @_define
    def tanh(x):
        size, z = abs(x), x * x
        large = 1.0 - 2.0 / (exp(2.0 * size) + 1.0)
        small = x + x * z * tanh_p(z) / tanh_q(z)
        return small if size < 0.625 else (large if x > 0.0 else -large)

    @_define
    def erf(x):
        return math.erf(x)

    return {**common, "tanh": tanh, "erf": erf}


# ---- rare ones -------------------------------------------------------------------------------------------------------

@_define
def digamma(x):
    """As in cavs_core/ops/special.py."""
    if x <= 0.0 and x == np.floor(x):
        return np.finfo(np.float64).max
    z = 1.0 - x if x <= 0.0 else x
    y = 0.0
    for _ in range(8):
        if z < 8.0:
            y -= 1.0 / z
            z += 1.0
    w = 1.0 / (z * z)
    y += math.log(z) - 0.5 / z - w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w / 132))))
    return y - math.pi / math.tan(math.pi * x) if x <= 0.0 else y


@_define
def erfinv(x):
    """As in cavs_core/ops/special.py."""
    if abs(x) == 1.0:
        return x * math.inf
    ln = math.log1p(-x * x)
    t = 2.0 / (math.pi * 0.147) + ln / 2.0
    y = math.copysign(math.sqrt(math.sqrt(t * t - ln / 0.147) - t), x)
    for _ in range(4):
        y -= (math.erf(y) - x) / (2.0 / math.sqrt(math.pi) * math.exp(-y * y))
    return y


@_define
def gamma(x):
    return math.nan if x < 0.0 and x == np.floor(x) else math.gamma(x)


@_define
def modulo(x, y):
    """With the sign of y; 0 where y is 0."""
    return y if y == 0 else np.mod(x, y)


@_define
def round_half_away(x):
    whole = np.trunc(x)
    return whole + np.sign(x) if abs(x - whole) >= 0.5 else whole


@_define
def round_half_down(x):
    below = np.floor(x)
    return below if x - below <= 0.5 else np.ceil(x)


#: (name, dtype) -> function
FUNCTIONS = {(name, dtype): f for dtype, made in (("float32", _single()), ("float64", _double()))
             for name, f in made.items()}
