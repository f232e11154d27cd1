"""Elementwise maths: unary, with a scalar, of two arrays; activations; where, clip, cast."""

from __future__ import annotations

import math

import numpy as np

from ..errors import ProgramError
from .base import Builder, Composite, Op, Required, register

# ---- unary -----------------------------------------------------------------------------------


class Unary(Op):
    """y = f(x). `slope(b, x, y)` is dy/dx as a value; None where it is zero everywhere."""

    rowwise = True

    def __init__(self, name, body, slope=None):
        super().__init__(name)
        self.body, self.slope = body, slope

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(dys[0], self.slope(b, xs[0], ys[0]))] if self.slope else [None]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            return np.asarray(self.body(x), dtype=x.dtype)


def _power(exponent):
    return lambda b, x: b.emit("_power_scalar", x, scalar=exponent)


def _unary(b: Builder, op, x):
    return b.emit(op, x)


def _one_minus_square(b, x):        # 1 - x^2
    return b.emit("_rminus_scalar", b.emit("square", x), scalar=1.0)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_gammaln = np.vectorize(lambda v: math.lgamma(v) if v > 0 or v != math.floor(v) else math.inf, otypes=[np.float64])


def _gamma(x):
    return np.vectorize(lambda v: math.gamma(v) if v > 0 or v != math.floor(v) else math.nan,
                        otypes=[np.float64])(x)


def digamma(x):
    """d/dx ln gamma(x): recurrence up to 6, then the asymptotic series."""
    x = np.array(x, dtype=np.float64)
    negative = x <= 0
    reflected = np.where(negative, 1 - x, x)
    shift = np.zeros_like(reflected)
    for _ in range(8):
        small = reflected < 8
        shift -= np.where(small, 1 / reflected, 0)
        reflected = np.where(small, reflected + 1, reflected)
    inv2 = 1 / (reflected * reflected)
    series = inv2 * (1 / 12 - inv2 * (1 / 120 - inv2 * (1 / 252 - inv2 * (1 / 240 - inv2 / 132))))
    out = shift + np.log(reflected) - 0.5 / reflected - series
    return np.where(negative, out - np.pi / np.tan(np.pi * x), out)


def erfinv(x):
    """Winitzki's estimate, polished by Newton steps."""
    x = np.asarray(x, dtype=np.float64)
    ln = np.log1p(-x * x)
    t = 2 / (np.pi * 0.147) + ln / 2
    y = np.sign(x) * np.sqrt(np.sqrt(t * t - ln / 0.147) - t)
    for _ in range(4):
        y = y - (_erf(y) - x) / (2 / math.sqrt(math.pi) * np.exp(-y * y))
    return np.where(np.abs(x) == 1, np.sign(x) * np.inf, y)


def _softrelu(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _stable_sigmoid(x):
    return 1 / (1 + np.exp(-x))


_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
_LN2, _LN10 = math.log(2), math.log(10)


def _erf_slope(b, x, y):
    return b.scale(b.emit("exp", b.emit("negative", b.emit("square", x))), _TWO_OVER_SQRT_PI)


def _erfinv_slope(b, x, y):
    return b.scale(b.emit("exp", b.emit("square", y)), 1 / _TWO_OVER_SQRT_PI)


def _tan_slope(b, x, y):
    return b.shift(b.emit("square", y), 1.0)


def _over(b, y, by):                # y / x, for slopes written through the result
    return b.div(y, by)


_UNARY = [
    # name, numpy body, slope(b, x, y)
    ("sigmoid", _stable_sigmoid, lambda b, x, y: b.mul(y, b.emit("_rminus_scalar", y, scalar=1.0))),
    ("tanh", np.tanh, lambda b, x, y: _one_minus_square(b, y)),
    ("relu", lambda x: np.where(x > 0, x, np.where(np.isnan(x), x, 0)),
     lambda b, x, y: b.emit("_greater_scalar", y, scalar=0.0)),
    ("softsign", lambda x: x / (1 + np.abs(x)),
     lambda b, x, y: b.emit("reciprocal", b.emit("square", b.shift(b.emit("abs", x), 1.0)))),
    ("softrelu", _softrelu, lambda b, x, y: b.emit("sigmoid", x)),
    ("exp", np.exp, lambda b, x, y: y),
    ("expm1", np.expm1, lambda b, x, y: b.emit("exp", x)),
    ("log", np.log, lambda b, x, y: b.emit("reciprocal", x)),
    ("log2", np.log2, lambda b, x, y: b.scale(b.emit("reciprocal", x), 1 / _LN2)),
    ("log10", np.log10, lambda b, x, y: b.scale(b.emit("reciprocal", x), 1 / _LN10)),
    ("log1p", np.log1p, lambda b, x, y: b.emit("reciprocal", b.shift(x, 1.0))),
    ("sqrt", np.sqrt, lambda b, x, y: b.scale(b.emit("reciprocal", y), 0.5)),
    ("rsqrt", lambda x: 1 / np.sqrt(x), lambda b, x, y: b.scale(_over(b, y, x), -0.5)),
    ("cbrt", np.cbrt, lambda b, x, y: b.scale(b.emit("reciprocal", b.emit("square", y)), 1 / 3)),
    ("rcbrt", lambda x: 1 / np.cbrt(x), lambda b, x, y: b.scale(_over(b, y, x), -1 / 3)),
    ("square", np.square, lambda b, x, y: b.scale(x, 2.0)),
    ("reciprocal", lambda x: 1 / x, lambda b, x, y: b.emit("negative", b.emit("square", y))),
    ("negative", np.negative, None),            # its gradient is below: it has no factor
    ("abs", np.abs, lambda b, x, y: b.emit("sign", x)),
    ("sin", np.sin, lambda b, x, y: b.emit("cos", x)),
    ("cos", np.cos, lambda b, x, y: b.emit("negative", b.emit("sin", x))),
    ("tan", np.tan, _tan_slope),
    ("arcsin", np.arcsin, lambda b, x, y: b.emit("rsqrt", _one_minus_square(b, x))),
    ("arccos", np.arccos, lambda b, x, y: b.emit("negative", b.emit("rsqrt", _one_minus_square(b, x)))),
    ("arctan", np.arctan, lambda b, x, y: b.emit("reciprocal", b.shift(b.emit("square", x), 1.0))),
    ("sinh", np.sinh, lambda b, x, y: b.emit("cosh", x)),
    ("cosh", np.cosh, lambda b, x, y: b.emit("sinh", x)),
    ("arcsinh", np.arcsinh, lambda b, x, y: b.emit("rsqrt", b.shift(b.emit("square", x), 1.0))),
    ("arccosh", np.arccosh, lambda b, x, y: b.emit("rsqrt", b.shift(b.emit("square", x), -1.0))),
    ("arctanh", np.arctanh, lambda b, x, y: b.emit("reciprocal", _one_minus_square(b, x))),
    ("degrees", np.degrees, lambda b, x, y: b.scale(b.emit("ones_like", x), 180 / math.pi)),
    ("radians", np.radians, lambda b, x, y: b.scale(b.emit("ones_like", x), math.pi / 180)),
    ("erf", _erf, _erf_slope),
    ("erfinv", erfinv, _erfinv_slope),
    ("gamma", _gamma, lambda b, x, y: b.mul(y, b.emit("digamma", x))),
    ("gammaln", _gammaln, lambda b, x, y: b.emit("digamma", x)),
    ("sign", np.sign, None),
    ("floor", np.floor, None),
    ("ceil", np.ceil, None),
    ("round", lambda x: np.where(x >= 0, np.floor(x + 0.5), np.ceil(x - 0.5)), None),
    ("rint", lambda x: np.where(x - np.floor(x) <= 0.5, np.floor(x), np.ceil(x)), None),
    ("fix", np.trunc, None),
    ("trunc", np.trunc, None),
    ("logical_not", lambda x: x == 0, None),
    ("zeros_like", np.zeros_like, None),
    ("ones_like", np.ones_like, None),
]


class _PassThrough(Unary):
    """y = +-x: the gradient needs neither x nor y."""

    def grad(self, b, a, xs, ys, dys):
        return [b.emit(self.name, dys[0])]


class _Digamma(Unary):
    """MXNet has it only as the gradient of gammaln."""

    def mxnet(self, F, a, x):
        return F._internal._backward_gammaln(F.ones_like(x), x)


class _Softrelu(Unary):
    def mxnet(self, F, a, x):
        return F.Activation(x, act_type="softrelu")


class _Stop(Unary):
    """Identity forward, no gradient."""


for _name, _body, _slope in _UNARY:
    _kind = {"negative": _PassThrough, "softrelu": _Softrelu}.get(_name, Unary)
    register(_kind(_name, _body, _slope))
register(_PassThrough("_copy", lambda x: x), "identity")
register(_Stop("BlockGrad", lambda x: x), "stop_gradient")
register(_Digamma("digamma", digamma))


class MakeLoss(Unary):
    """Identity; as the head of a graph its gradient is `grad_scale`, whatever comes from above."""

    attrs = {"grad_scale": 1.0, "valid_thresh": 0.0, "normalization": "null"}

    def mxnet(self, F, a, x):
        return F.identity(x)

    def grad(self, b, a, xs, ys, dys):
        return [b.scale(b.emit("ones_like", xs[0]), a["grad_scale"])]


register(MakeLoss("MakeLoss", lambda x: x), "make_loss")


class Cast(Op):
    attrs = {"dtype": Required}
    rowwise = True

    def normalise(self, given):
        a = super().normalise(given)
        return {"dtype": np.dtype(a["dtype"]).name}

    def infer(self, a, x):
        return [(x.shape, a["dtype"])]

    def grad(self, b, a, xs, ys, dys):
        return [b.emit("Cast", dys[0], dtype=b.specs[xs[0]].dtype)]

    def numpy(self, a, x):
        return x.astype(a["dtype"])


register(Cast("Cast"), "cast")


class Clip(Op):
    attrs = {"a_min": Required, "a_max": Required}
    rowwise = True

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        inside = b.mul(b.emit("_greater_equal_scalar", xs[0], scalar=a["a_min"]),
                       b.emit("_lesser_equal_scalar", xs[0], scalar=a["a_max"]))
        return [b.mul(dys[0], inside)]

    def numpy(self, a, x):
        return np.clip(x, a["a_min"], a["a_max"]).astype(x.dtype)


register(Clip("clip"))


# ---- with a scalar ---------------------------------------------------------------------------


class Scalar(Op):
    """y = f(x, s). `grad_rule(b, s, x, y, dy)` gives dx."""

    attrs = {"scalar": 1.0}
    ignored = ("is_int", "reverse")
    rowwise = True

    def __init__(self, name, body, grad_rule=None):
        super().__init__(name)
        self.body, self.grad_rule = body, grad_rule

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        return [self.grad_rule(b, a["scalar"], xs[0], ys[0], dys[0]) if self.grad_rule else None]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            return np.asarray(self.body(x, x.dtype.type(a["scalar"])), dtype=x.dtype)


def _with(op):
    """dx = dy * [x op s]."""
    return lambda b, s, x, y, dy: b.mul(dy, b.emit(op, x, scalar=s))


def _power_grad(b, s, x, y, dy):
    return b.mul(dy, b.scale(b.emit("_power_scalar", x, scalar=s - 1), s))


def _rpower_grad(b, s, x, y, dy):
    return b.mul(dy, b.scale(y, math.log(s) if s > 0 else math.nan))


def _rdiv_grad(b, s, x, y, dy):
    return b.mul(dy, b.scale(b.emit("reciprocal", b.emit("square", x)), -s))


def _rmod_grad(b, s, x, y, dy):     # d(s mod x)/dx = -floor(s / x)
    return b.mul(dy, b.emit("negative", b.emit("floor", b.emit("_rdiv_scalar", x, scalar=s))))


def _smooth_l1_grad(b, s, x, y, dy):
    return b.mul(dy, b.emit("clip", b.scale(x, s * s), a_min=-1.0, a_max=1.0))


def _smooth_l1(x, s):
    big = np.abs(x) - 0.5 / (s * s)
    return np.where(np.abs(x) > 1 / (s * s), big, 0.5 * np.square(x * s))


def _mod(x, y):
    return np.where(y == 0, 0, np.mod(x, y))


_SCALAR = [
    ("_plus_scalar", np.add, lambda b, s, x, y, dy: dy),
    ("_minus_scalar", np.subtract, lambda b, s, x, y, dy: dy),
    ("_rminus_scalar", lambda x, s: s - x, lambda b, s, x, y, dy: b.emit("negative", dy)),
    ("_mul_scalar", np.multiply, lambda b, s, x, y, dy: b.scale(dy, s)),
    ("_div_scalar", np.divide, lambda b, s, x, y, dy: b.emit("_div_scalar", dy, scalar=s)),
    ("_rdiv_scalar", lambda x, s: s / x, _rdiv_grad),
    ("_mod_scalar", _mod, lambda b, s, x, y, dy: dy),
    ("_rmod_scalar", lambda x, s: _mod(s, x), _rmod_grad),
    ("_power_scalar", np.power, _power_grad),
    ("_rpower_scalar", lambda x, s: np.power(s, x), _rpower_grad),
    ("_maximum_scalar", np.maximum, _with("_greater_equal_scalar")),
    ("_minimum_scalar", np.minimum, _with("_lesser_equal_scalar")),
    ("_hypot_scalar", np.hypot, lambda b, s, x, y, dy: b.mul(dy, b.div(x, y))),
    ("_equal_scalar", np.equal, None),
    ("_not_equal_scalar", np.not_equal, None),
    ("_greater_scalar", np.greater, None),
    ("_greater_equal_scalar", np.greater_equal, None),
    ("_lesser_scalar", np.less, None),
    ("_lesser_equal_scalar", np.less_equal, None),
    ("_logical_and_scalar", np.logical_and, None),
    ("_logical_or_scalar", np.logical_or, None),
    ("_logical_xor_scalar", np.logical_xor, None),
    ("smooth_l1", _smooth_l1, _smooth_l1_grad),
]
for _name, _body, _rule in _SCALAR:
    _camel = "_" + "".join(part.capitalize() for part in _name.strip("_").split("_"))
    _aliases = () if _name == "smooth_l1" else (_camel.replace("Rm", "RM").replace("Rd", "RD").replace("Rp", "RP"),)
    register(Scalar(_name, _body, _rule), *_aliases)


# ---- of two arrays ---------------------------------------------------------------------------


def broadcast_shape(name, x, y):
    if any(n != m and 1 not in (n, m) for n, m in zip(x, y)):
        raise ProgramError(f"{name}: shapes {x} and {y} do not broadcast")
    return tuple(max(n, m) for n, m in zip(x, y))


class Binary(Op):
    """z = f(x, y) with broadcasting. `grad_rule(b, x, y, z, dz)` gives (dx, dy) before un-broadcasting."""

    rowwise = True

    def __init__(self, name, body, grad_rule=None):
        super().__init__(name)
        self.body, self.grad_rule = body, grad_rule

    def build(self, b, a, xs):
        # axes line up from the right; with equal counts a row axis may stand before them
        ndim = max(len(b.shape(x)) for x in xs)
        return super().build(b, a, [b.reshape(x, (1,) * (ndim - len(b.shape(x))) + b.shape(x)) for x in xs])

    def infer(self, a, x, y):
        if x.dtype != y.dtype:
            raise ProgramError(f"{self.name}: operands of dtype {x.dtype} and {y.dtype}; cast one of them")
        return [(broadcast_shape(self.name, x.shape, y.shape), x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        if self.grad_rule is None:
            return [None, None]
        grads = self.grad_rule(b, xs[0], xs[1], ys[0], dys[0])
        return [b.sum_to(g, b.shape(x)) for g, x in zip(grads, xs)]

    def numpy(self, a, x, y):
        with np.errstate(all="ignore"):
            return np.asarray(self.body(x, y), dtype=x.dtype)


def _div_rule(b, x, y, z, dz):
    dx = b.div(dz, y)
    return dx, b.emit("negative", b.mul(dx, z))


def _mod_rule(b, x, y, z, dz):
    return dz, b.mul(dz, b.emit("negative", b.emit("floor", b.div(x, y))))


def _power_rule(b, x, y, z, dz):
    return (b.mul(dz, b.mul(y, b.emit("broadcast_power", x, b.shift(y, -1.0)))),
            b.mul(dz, b.mul(z, b.emit("log", x))))


def _pick_side(op_x, op_y):
    return lambda b, x, y, z, dz: (b.mul(dz, b.emit(op_x, x, y)), b.mul(dz, b.emit(op_y, x, y)))


_BINARY = [
    # name, other names, elementwise names, numpy body, gradient rule
    ("broadcast_add", ("broadcast_plus",), ("elemwise_add", "_plus", "_Plus", "_add", "_grad_add"), np.add,
     lambda b, x, y, z, dz: (dz, dz)),
    ("broadcast_sub", ("broadcast_minus",), ("elemwise_sub", "_minus", "_Minus", "_sub"), np.subtract,
     lambda b, x, y, z, dz: (dz, b.emit("negative", dz))),
    ("broadcast_mul", (), ("elemwise_mul", "_mul", "_Mul"), np.multiply,
     lambda b, x, y, z, dz: (b.mul(dz, y), b.mul(dz, x))),
    ("broadcast_div", (), ("elemwise_div", "_div", "_Div"), np.divide, _div_rule),
    ("broadcast_mod", (), ("_mod", "_Mod"), _mod, _mod_rule),
    ("broadcast_power", (), ("_power", "_Power"), np.power, _power_rule),
    ("broadcast_maximum", (), ("_maximum", "_Maximum"), np.maximum,
     _pick_side("broadcast_greater_equal", "broadcast_lesser")),
    ("broadcast_minimum", (), ("_minimum", "_Minimum"), np.minimum,
     _pick_side("broadcast_lesser_equal", "broadcast_greater")),
    ("broadcast_hypot", (), ("_hypot", "_Hypot"), np.hypot,
     lambda b, x, y, z, dz: (b.mul(dz, b.div(x, z)), b.mul(dz, b.div(y, z)))),
    ("broadcast_equal", (), ("_equal", "_Equal"), np.equal, None),
    ("broadcast_not_equal", (), ("_not_equal", "_Not_Equal"), np.not_equal, None),
    ("broadcast_greater", (), ("_greater", "_Greater"), np.greater, None),
    ("broadcast_greater_equal", (), ("_greater_equal", "_Greater_Equal"), np.greater_equal, None),
    ("broadcast_lesser", (), ("_lesser", "_Lesser"), np.less, None),
    ("broadcast_lesser_equal", (), ("_lesser_equal", "_Lesser_Equal"), np.less_equal, None),
    ("broadcast_logical_and", (), ("_logical_and", "_Logical_And"), np.logical_and, None),
    ("broadcast_logical_or", (), ("_logical_or", "_Logical_Or"), np.logical_or, None),
    ("broadcast_logical_xor", (), ("_logical_xor", "_Logical_Xor"), np.logical_xor, None),
]


class Elemwise(Composite):
    """The form of a binary op that wants equal shapes."""

    def __init__(self, name, broadcast_name):
        super().__init__(name)
        self.broadcast_name = broadcast_name

    def expand(self, b, a, x, y):
        if b.shape(x) != b.shape(y):
            raise ProgramError(f"{self.name}: shapes {b.shape(x)} and {b.shape(y)} differ; "
                               f"use {self.broadcast_name} to broadcast")
        return b.emit(self.broadcast_name, x, y)


for _name, _others, _same_shape, _body, _rule in _BINARY:
    register(Binary(_name, _body, _rule), *_others)
    register(Elemwise(_same_shape[0], _name), *_same_shape[1:])


class Where(Op):
    """condition ? x : y, all of one shape; `where` below brings operands to it."""

    def infer(self, a, c, x, y):
        return [(x.shape, x.dtype)]

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs])

    def grad(self, b, a, xs, ys, dys):
        zeros = b.emit("zeros_like", dys[0])
        return [None, b.emit(self.name, xs[0], dys[0], zeros), b.emit(self.name, xs[0], zeros, dys[0])]

    def numpy(self, a, c, x, y):
        return np.where(c != 0, x, y)

    def mxnet(self, F, a, c, x, y):
        return F.where(c, x, y)


class WhereFront(Composite):
    def expand(self, b, a, c, x, y):
        shape = b.shape(x)
        if b.shape(y) != shape:
            raise ProgramError(f"where: x has shape {shape}, y has {b.shape(y)}; they must be equal")
        if b.shape(c) != shape:
            if b.shape(c) != shape[:1]:
                raise ProgramError(f"where: the condition has shape {b.shape(c)}; it wants {shape} or {shape[:1]}")
            c = b.reshape(c, shape[:1] + (1,) * (len(shape) - 1))
            c = b.emit("broadcast_to", c, shape=shape)
        return b.emit("select", c, x, y)


register(Where("select"))
register(WhereFront("where"))


class AddN(Composite):
    ignored = ("num_args",)

    def expand(self, b, a, *xs):
        total = xs[0]
        for x in xs[1:]:
            total = b.emit("elemwise_add", total, x)
        return total if len(xs) > 1 else b.emit("_copy", total)


register(AddN("add_n"), "ElementWiseSum")


# ---- activations -----------------------------------------------------------------------------


class Activation(Composite):
    attrs = {"act_type": Required}
    KINDS = ("relu", "sigmoid", "tanh", "softrelu", "softsign")

    def expand(self, b, a, x):
        if a["act_type"] not in self.KINDS:
            raise ProgramError(f"Activation: act_type {a['act_type']!r} is none of {self.KINDS}")
        return b.emit(a["act_type"], x)


class HardSigmoid(Composite):
    attrs = {"alpha": 0.2, "beta": 0.5}

    def expand(self, b, a, x):
        return b.emit("clip", b.shift(b.scale(x, a["alpha"]), a["beta"]), a_min=0.0, a_max=1.0)


class LeakyReLU(Composite):
    """leaky, prelu, elu, selu, gelu, rrelu (a random slope per element while training)."""

    attrs = {"act_type": "leaky", "slope": 0.25, "lower_bound": 0.125, "upper_bound": 0.334, "training": False}
    SELU_ALPHA, SELU_LAMBDA = 1.6732632423543772, 1.0507009873554805

    def expand(self, b, a, x, gamma=None):
        kind = a["act_type"]
        if kind == "gelu":
            half = b.scale(b.shift(b.emit("erf", b.scale(x, 1 / math.sqrt(2))), 1.0), 0.5)
            return b.mul(x, half)
        if kind == "leaky":
            return self._select(b, x, b.scale(x, a["slope"]))
        if kind == "elu":
            return self._select(b, x, b.scale(b.emit("expm1", b.emit("_minimum_scalar", x, scalar=0.0)), a["slope"]))
        if kind == "selu":
            low = b.scale(b.emit("expm1", b.emit("_minimum_scalar", x, scalar=0.0)), self.SELU_ALPHA)
            return b.scale(self._select(b, x, low), self.SELU_LAMBDA)
        if kind == "prelu":
            return self._select(b, x, b.mul(x, self._align(b, gamma, b.shape(x))))
        if kind == "rrelu":
            if not a["training"]:
                return self._select(b, x, b.scale(x, (a["lower_bound"] + a["upper_bound"]) / 2))
            slope = b.emit("uniform_like", x, low=a["lower_bound"], high=a["upper_bound"])
            return self._select(b, x, b.mul(x, slope))
        raise ProgramError(f"LeakyReLU: act_type {kind!r} is none of leaky, prelu, elu, selu, gelu, rrelu")

    @staticmethod
    def _select(b, x, low):
        return b.emit("select", b.emit("_greater_scalar", x, scalar=0.0), x, low)

    @staticmethod
    def _align(b, gamma, shape):
        """A slope per channel (axis 1), or one for all."""
        size = b.shape(gamma)
        if len(size) == 1 and len(shape) > 1:
            gamma = b.reshape(gamma, (1, size[0]) + (1,) * (len(shape) - 2))
        return gamma


register(Activation("Activation"))
register(HardSigmoid("hard_sigmoid"))
register(LeakyReLU("LeakyReLU"))
