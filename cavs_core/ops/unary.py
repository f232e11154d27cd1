"""Elementwise maths of one array, without attributes; and identities whose gradient is another."""

from __future__ import annotations

import math

import numpy as np

from . import special
from .base import FEW_AXES, Op, Required, register


class Unary(Op):
    """y = f(x). `slope(b, x, y)` is dy/dx as a value; None where it is zero everywhere."""

    rowwise = True

    def __init__(self, name, body, slope=None):
        super().__init__(name)
        self.body, self.slope, self.integers = body, slope, name in _ON_INTEGERS

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(dys[0], self.slope(b, xs[0], ys[0]))] if self.slope else [None]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            return np.asarray(self.body(x), dtype=x.dtype)


#: what MXNet computes on integers as on numbers: by rings, orders and copies
_ON_INTEGERS = ("relu", "square", "abs", "sign", "logical_not", "zeros_like", "ones_like", "negative", "_copy",
                "BlockGrad", "make_loss")


def _one_minus_square(b, x):        # 1 - x^2
    return b.emit("_rminus_scalar", b.emit("square", x), scalar=1.0)


def _round(x):                      # halves go away from zero
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.sign(x), 0)


_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
_LN2, _LN10 = math.log(2), math.log(10)


def _erf_slope(b, x, y):
    return b.scale(b.emit("exp", b.emit("negative", b.emit("square", x))), _TWO_OVER_SQRT_PI)


def _erfinv_slope(b, x, y):
    return b.scale(b.emit("exp", b.emit("square", y)), 1 / _TWO_OVER_SQRT_PI)


def _rcbrt_slope(b, x, y):
    return b.scale(b.emit("reciprocal", b.mul(x, b.emit("cbrt", x))), -1 / 3)


def _tan_slope(b, x, y):
    return b.shift(b.emit("square", y), 1.0)


_UNARY = [
    # name, numpy body, slope(b, x, y)
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), lambda b, x, y: b.mul(y, b.emit("_rminus_scalar", y, scalar=1.0))),
    ("tanh", np.tanh, lambda b, x, y: _one_minus_square(b, y)),
    ("softsign", lambda x: x / (1 + np.abs(x)),
     lambda b, x, y: b.emit("reciprocal", b.emit("square", b.shift(b.emit("abs", x), 1.0)))),
    ("exp", np.exp, lambda b, x, y: y),
    ("expm1", np.expm1, lambda b, x, y: b.emit("exp", x)),
    ("log", np.log, lambda b, x, y: b.emit("reciprocal", x)),
    ("log2", np.log2, lambda b, x, y: b.scale(b.emit("reciprocal", x), 1 / _LN2)),
    ("log10", np.log10, lambda b, x, y: b.scale(b.emit("reciprocal", x), 1 / _LN10)),
    ("log1p", np.log1p, lambda b, x, y: b.emit("reciprocal", b.shift(x, 1.0))),
    ("sqrt", np.sqrt, lambda b, x, y: b.scale(b.emit("reciprocal", y), 0.5)),
    ("rsqrt", lambda x: 1 / np.sqrt(x), lambda b, x, y: b.scale(b.div(y, x), -0.5)),
    ("cbrt", np.cbrt, lambda b, x, y: b.scale(b.emit("reciprocal", b.emit("square", y)), 1 / 3)),
    ("rcbrt", lambda x: 1 / np.cbrt(x), _rcbrt_slope),
    ("square", np.square, lambda b, x, y: b.scale(x, 2.0)),
    ("reciprocal", lambda x: 1 / x, lambda b, x, y: b.emit("negative", b.emit("square", y))),
    ("abs", np.abs, lambda b, x, y: b.emit("sign", x)),
    ("sin", np.sin, lambda b, x, y: b.emit("cos", x)),
    ("cos", np.cos, lambda b, x, y: b.emit("negative", b.emit("sin", x))),
    ("tan", np.tan, _tan_slope),
    ("arcsin", np.arcsin, lambda b, x, y: b.emit("rsqrt", _one_minus_square(b, x))),
    ("arccos", np.arccos, lambda b, x, y: b.emit("negative", b.emit("rsqrt", _one_minus_square(b, x)))),
    ("arctan", np.arctan, lambda b, x, y: b.emit("reciprocal", b.shift(b.emit("square", x), 1.0))),
    ("sinh", np.sinh, lambda b, x, y: b.emit("cosh", x)),
    ("cosh", np.cosh, lambda b, x, y: b.emit("sinh", x)),
    ("arcsinh", np.arcsinh, lambda b, x, y: b.emit("reciprocal", b.emit("_hypot_scalar", x, scalar=1.0))),
    ("arccosh", np.arccosh, lambda b, x, y: b.emit("rsqrt", b.shift(b.emit("square", x), -1.0))),
    ("arctanh", np.arctanh, lambda b, x, y: b.emit("reciprocal", _one_minus_square(b, x))),
    ("erf", special.erf, _erf_slope),
    ("erfinv", special.erfinv, _erfinv_slope),
    ("gamma", special.gamma, lambda b, x, y: b.mul(y, b.emit("digamma", x))),
    ("gammaln", special.gammaln, lambda b, x, y: b.emit("digamma", x)),
    ("sign", lambda x: np.nan_to_num(np.sign(x)), lambda b, x, y: b.emit("zeros_like", y)),
    ("floor", np.floor, None),
    ("ceil", np.ceil, None),
    ("round", _round, None),
    ("rint", lambda x: np.where(x - np.floor(x) <= 0.5, np.floor(x), np.ceil(x)), None),
    ("fix", np.trunc, None),
    ("trunc", np.trunc, None),
    ("logical_not", lambda x: x == 0, None),
    ("zeros_like", np.zeros_like, None),
    ("ones_like", np.ones_like, None),
]


class _Linear(Unary):
    """y = c x: the gradient is the op itself, and needs neither x nor y."""

    def grad(self, b, a, xs, ys, dys):
        return [b.emit(self.name, dys[0])]


class _Digamma(Unary):
    """MXNet has it only as the gradient of gammaln."""

    def mxnet(self, F, a, x):
        return F.BlockGrad(F._internal._backward_gammaln(F.ones_like(x), x))    # MXNet has no gradient of it


class _Softrelu(Unary):
    """MXNet has it only as a kind of Activation."""

    def mxnet(self, F, a, x):
        return F.Activation(x, act_type="softrelu")


class _Selu(Unary):
    """MXNet has it only as a kind of LeakyReLU."""

    alpha, scale = 1.6732632423543772, 1.0507009873554805

    def __init__(self, name):
        super().__init__(name, lambda x: self.scale * np.where(x > 0, x, self.alpha * np.expm1(np.minimum(x, 0))))

    def grad(self, b, a, xs, ys, dys):
        # Below zero the slope is scale * (y / scale + alpha); MXNet forgets to divide, and is followed.
        y, = ys
        slope = b.emit("select", b.emit("_greater_scalar", y, scalar=0.0), b.emit("ones_like", y),
                       b.shift(y, self.alpha))
        return [b.mul(dys[0], b.scale(slope, self.scale))]

    def mxnet(self, F, a, x):
        return F.LeakyReLU(x, act_type="selu")


class _Relu(Unary):
    """A NaN stays, in the value and in the gradient."""

    def grad(self, b, a, xs, ys, dys):
        return [b.emit("relu_grad", dys[0], ys[0])]


class _ReluOrZero(Unary):
    """The relu of oneDNN: NaN gives 0."""

    def rows(self, e, a, x):
        if len(x.shape) < FEW_AXES:
            return super().rows(e, a, x)
        made = e.emit(self.name, e.emit("Reshape", x.array, shape=(-1, *x.shape[1:])))
        return e.emit("Reshape", made, shape=(-1, *x.shape))

    def mxnet(self, F, a, x):
        return F.Activation(x, act_type="relu")


class ReluGrad(Op):
    """dy times the slope at y: 1 above zero, else y, which is 0 or NaN."""

    def infer(self, a, dy, y):
        return [(y.shape, y.dtype)]

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs])

    def numpy(self, a, dy, y):
        with np.errstate(all="ignore"):
            return dy * np.where(y > 0, y.dtype.type(1), y)

    def mxnet(self, F, a, dy, y):
        return F.BlockGrad(F._internal._backward_relu(dy, y))


class _Elu(Unary):
    """alpha (exp(x) - 1) below zero, by MXNet's own code or (`fast`) by oneDNN, which differ at NaN and near zero."""

    attrs = {"slope": 0.25, "fast": False}

    def grad(self, b, a, xs, ys, dys):
        x, = xs
        below = b.scale(b.emit("exp", b.emit("_minimum_scalar", x, scalar=0.0)), a["slope"])
        ones = b.emit("ones_like", x)
        if a["fast"]:                   # where exp(x) is more than 1 in single precision, and at NaN
            return [b.mul(dys[0], b.emit("select", b.emit("_lesser_equal_scalar", x, scalar=2.0 ** -24), below, ones))]
        return [b.mul(dys[0], b.emit("select", b.emit("_greater_scalar", x, scalar=0.0), ones, below))]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            return np.where(x > 0, x, a["slope"] * np.expm1(np.minimum(x, 0))).astype(x.dtype)

    def mxnet(self, F, a, x):
        return F.LeakyReLU(x, act_type="elu", slope=a["slope"])


class _Gelu(Unary):
    """x times the normal distribution's share below x; MXNet has it only as a kind of LeakyReLU."""

    def mxnet(self, F, a, x):
        return F.LeakyReLU(x, act_type="gelu")


def _gelu_slope(b, x, y):
    share = b.scale(b.shift(b.emit("erf", b.scale(x, 1 / math.sqrt(2))), 1.0), 0.5)
    density = b.scale(b.emit("exp", b.scale(b.emit("square", x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.add(share, b.mul(x, density))


class _RreluMean(Unary):
    """x, below zero times `slope`: rrelu where it draws nothing. MXNet's gradient there is y, and is followed."""

    attrs = {"slope": Required}

    def grad(self, b, a, xs, ys, dys):
        y, = ys
        slope = b.emit("select", b.emit("_greater_scalar", y, scalar=0.0), b.emit("ones_like", y), y)
        return [b.mul(dys[0], slope)]

    def numpy(self, a, x):
        return np.where(x > 0, x, x * x.dtype.type(a["slope"]))

    def mxnet(self, F, a, x):
        return F.LeakyReLU(x, act_type="leaky", slope=a["slope"])


for _name, _body, _slope in _UNARY:
    register(Unary(_name, _body, _slope))
register(_Relu("relu", lambda x: np.maximum(x, 0)))
register(_ReluOrZero("relu_or_zero", lambda x: np.where(x > 0, x, 0),
                     lambda b, x, y: b.emit("_greater_scalar", y, scalar=0.0)))
register(ReluGrad("relu_grad"))
register(_Elu("elu", None))
register(_Gelu("gelu", lambda x: 0.5 * x * (1 + special.erf(x / math.sqrt(2))), _gelu_slope))
register(_RreluMean("rrelu_mean", None))
for _name, _body in (("_copy", lambda x: x), ("negative", np.negative), ("degrees", np.degrees),
                     ("radians", np.radians)):
    register(_Linear(_name, _body))
register(_Softrelu("softrelu", lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
                   lambda b, x, y: b.emit("sigmoid", x)))
register(_Selu("selu"))
register(_Digamma("digamma", special.digamma))
register(Unary("BlockGrad", lambda x: x))


class Detach(Unary):
    """`array.detach()`, which is no operator of MXNet: what it returns is not on the tape."""

    leaves_tape = True

    def alone(self, F, name, attrs, xs):
        return xs[0].detach()

    def mxnet(self, F, a, x):
        return F.BlockGrad(x)


register(Detach("_detach", lambda x: x))


class MakeLoss(Unary):
    """Identity; its gradient is `grad_scale`, whatever comes from above, over the number of rows or of valid elements.

    MXNet counts as rows all axes but the last.
    """

    attrs = {"grad_scale": 1.0, "valid_thresh": 0.0, "normalization": "null"}

    def build(self, b, a, xs):
        return super().build(b, a, [b.per_row(x) for x in xs])      # every sample adds a gradient of its own

    def mxnet(self, F, a, x):
        return F.identity(x)

    def grad(self, b, a, xs, ys, dys):
        x, shape = xs[0], b.shape(xs[0])
        count = int(np.prod(shape[:-1])) if a["normalization"] == "batch" else 1
        scale = b.scale(b.emit("ones_like", x), a["grad_scale"] / count)
        if a["normalization"] != "valid":
            return [scale]
        valid = b.emit("_greater_scalar", x, scalar=a["valid_thresh"])
        total = b.emit("reduce_sum", valid, axis=tuple(range(len(shape))))
        return [b.div(scale, b.emit("_maximum_scalar", total, scalar=1.0))]


register(MakeLoss("MakeLoss", lambda x: x))
register(MakeLoss("make_loss", lambda x: x))
