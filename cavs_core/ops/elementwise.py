"""Elementwise maths with a scalar and of two arrays; where, clip, cast. Of one array: see unary.py."""

from __future__ import annotations

import math

import numpy as np

from ..errors import ProgramError
from .base import Composite, Op, Required, register

# ---- cast, clip ------------------------------------------------------------------------------


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
        with np.errstate(all="ignore"):
            return x.astype(a["dtype"])


register(Cast("Cast"))


class Clip(Op):
    attrs = {"a_min": Required, "a_max": Required}
    rowwise = True

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def grad(self, b, a, xs, ys, dys):
        low, high, dtype = a["a_min"], a["a_max"], np.dtype(b.specs[xs[0]].dtype)
        if dtype.kind in "iu":          # MXNet compares with the bounds themselves, not with what is left of them
            low, high = max(math.ceil(low), np.iinfo(dtype).min), min(math.floor(high), np.iinfo(dtype).max)
        return [b.emit("clip_grad", dys[0], xs[0], a_min=low, a_max=high)]

    def numpy(self, a, x):
        return np.clip(x, a["a_min"], a["a_max"]).astype(x.dtype)


class ClipGrad(Op):
    """dy, but 0 where x is outside: whatever dy is there. NaN is not outside."""

    attrs = Clip.attrs

    def infer(self, a, dy, x):
        return [(x.shape, x.dtype)]

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs], **a)

    def numpy(self, a, dy, x):
        return np.where((x < a["a_min"]) | (x > a["a_max"]), x.dtype.type(0), dy)

    def mxnet(self, F, a, dy, x):
        below = F._internal._lesser_scalar(x, scalar=a["a_min"])
        above = F._internal._greater_scalar(x, scalar=a["a_max"])
        return F.where(F.elemwise_add(below, above), F.zeros_like(dy), dy)


register(Clip("clip"))
register(ClipGrad("clip_grad"))


def _is_on_integers(name):
    """Whether an op of two operands is on integers what it is on numbers: quotients and powers are not."""
    return not any(part in name for part in ("broadcast_div", "rdiv", "broadcast_power", "rpower", "hypot", "smooth"))


# ---- with a scalar ---------------------------------------------------------------------------


class Scalar(Op):
    """y = f(x, s). `grad_rule(b, s, x, y, dy)` gives dx."""

    attrs = {"scalar": 1.0}
    ignored = ("is_int", "reverse")
    rowwise = True

    def __init__(self, name, body, grad_rule=None):
        super().__init__(name)
        self.body, self.grad_rule, self.integers = body, grad_rule, _is_on_integers(name)

    def build(self, b, a, xs):
        if self.name == "_power_scalar" and not b.specs[xs[0]].is_float and a["scalar"] not in range(1, 64):
            raise ProgramError(f"{self.name}: such a power of {b.specs[xs[0]].dtype} is MXNet's own")
        return super().build(b, a, xs)

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
    if s == 1:
        return dy
    return b.mul(dy, b.scale(b.emit("_power_scalar", x, scalar=s - 1), s))


def _rpower_grad(b, s, x, y, dy):
    return b.mul(dy, b.scale(y, math.log(s) if s > 0 else -math.inf if s == 0 else math.nan))


def _rdiv_grad(b, s, x, y, dy):
    return b.mul(dy, b.scale(b.emit("reciprocal", b.emit("square", x)), -s))


def _rmod_grad(b, s, x, y, dy):     # d(s mod x)/dx = -floor(s / x), on integers 0
    if not b.specs[x].is_float:
        return b.emit("zeros_like", dy)
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
    ("_mod_scalar", _mod, lambda b, s, x, y, dy: dy if b.specs[x].is_float else b.emit("zeros_like", dy)),
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
    register(Scalar(_name, _body, _rule))


# ---- of two arrays ---------------------------------------------------------------------------


def broadcast_shape(name, x, y):
    if any(n != m and 1 not in (n, m) for n, m in zip(x, y)):
        raise ProgramError(f"{name}: shapes {x} and {y} do not broadcast")
    return tuple(max(n, m) for n, m in zip(x, y))


class Binary(Op):
    """z = f(x, y) with broadcasting. `grad_rule(b, x, y, z, dz)` gives (dx, dy) before un-broadcasting."""

    rowwise = True
    max_merged_axes = 5

    def __init__(self, name, body, grad_rule=None):
        super().__init__(name)
        self.body, self.grad_rule, self.integers = body, grad_rule, _is_on_integers(name)

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
    return b.mul(dz, b.emit("reciprocal", y)), b.mul(dz, b.div(b.emit("negative", x), b.emit("square", y)))


def _mod_rule(b, x, y, z, dz):
    if not b.specs[x].is_float:
        return (b.emit("zeros_like", dz),) * 2
    return dz, b.mul(dz, b.emit("negative", b.emit("floor", b.div(x, y))))


def _power_rule(b, x, y, z, dz):
    return (b.mul(dz, b.mul(y, b.emit("broadcast_power", x, b.shift(y, -1.0)))),
            b.mul(dz, b.mul(z, b.emit("log", x))))


def _pick_side(op_x, op_y):
    return lambda b, x, y, z, dz: (b.mul(dz, b.emit(op_x, x, y)), b.mul(dz, b.emit(op_y, x, y)))


_BINARY = [
    # name, the name that wants equal shapes, numpy body, gradient rule
    ("broadcast_add", "elemwise_add", np.add, lambda b, x, y, z, dz: (dz, dz)),
    ("broadcast_sub", "elemwise_sub", np.subtract, lambda b, x, y, z, dz: (dz, b.emit("negative", dz))),
    ("broadcast_mul", "elemwise_mul", np.multiply, lambda b, x, y, z, dz: (b.mul(dz, y), b.mul(dz, x))),
    ("broadcast_div", "elemwise_div", np.divide, _div_rule),
    ("broadcast_mod", "_mod", _mod, _mod_rule),
    ("broadcast_power", "_power", np.power, _power_rule),
    ("broadcast_maximum", "_maximum", np.maximum, _pick_side("broadcast_greater_equal", "broadcast_lesser")),
    ("broadcast_minimum", "_minimum", np.minimum, _pick_side("broadcast_lesser_equal", "broadcast_greater")),
    ("broadcast_hypot", "_hypot", np.hypot,
     lambda b, x, y, z, dz: (b.mul(dz, b.div(x, z)), b.mul(dz, b.div(y, z)))),
    ("broadcast_equal", "_equal", np.equal, None),
    ("broadcast_not_equal", "_not_equal", np.not_equal, None),
    ("broadcast_greater", "_greater", np.greater, None),
    ("broadcast_greater_equal", "_greater_equal", np.greater_equal, None),
    ("broadcast_lesser", "_lesser", np.less, None),
    ("broadcast_lesser_equal", "_lesser_equal", np.less_equal, None),
    ("broadcast_logical_and", "_logical_and", np.logical_and, None),
    ("broadcast_logical_or", "_logical_or", np.logical_or, None),
    ("broadcast_logical_xor", "_logical_xor", np.logical_xor, None),
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


for _name, _same_shape, _body, _rule in _BINARY:
    register(Binary(_name, _body, _rule))
    register(Elemwise(_same_shape, _name))


# ---- of more arrays --------------------------------------------------------------------------


class Where(Op):
    """condition ? x : y, all of one shape; `where` below brings operands to it."""

    def infer(self, a, c, x, y):
        return [(x.shape, x.dtype)]

    def splits_rows(self, a, specs, split):
        return all(split)

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
        if b.shape(y) != shape or b.specs[y].dtype != b.specs[x].dtype:
            raise ProgramError(f"where: x is {b.specs[x]}, y is {b.specs[y]}; shapes and dtypes must be equal")
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


register(AddN("add_n"))
