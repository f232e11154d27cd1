"""Activations with attributes, written in elementwise ops."""

from __future__ import annotations

from ..errors import ProgramError
from .base import FEW_AXES, Composite, Required, register


def _is_fast(b, x):
    """Whether MXNet runs an activation of x by oneDNN."""
    return b.specs[x].dtype == "float32" and len(b.shape(x)) <= FEW_AXES


class Activation(Composite):
    attrs = {"act_type": Required}
    KINDS = ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    integers = False

    def expand(self, b, a, x):
        if a["act_type"] not in self.KINDS:
            raise ProgramError(f"Activation: act_type {a['act_type']!r} is none of {self.KINDS}")
        return b.emit("relu_or_zero" if a["act_type"] == "relu" and _is_fast(b, x) else a["act_type"], x)


class HardSigmoid(Composite):
    """clip(alpha x + beta, 0, 1), whose gradient, unlike clip's, is zero where a bound is met exactly."""

    attrs = {"alpha": 0.2, "beta": 0.5}
    integers = False

    def expand(self, b, a, x):
        z = b.shift(b.scale(x, a["alpha"]), a["beta"])
        inside = b.mul(b.emit("_greater_scalar", z, scalar=0.0), b.emit("_lesser_scalar", z, scalar=1.0))
        return b.emit("select", inside, z, b.emit("clip", b.emit("BlockGrad", z), a_min=0.0, a_max=1.0))


class LeakyReLU(Composite):
    """leaky, prelu, elu, selu, gelu; rrelu, which draws a slope per element while training and returns it too."""

    attrs = {"act_type": "leaky", "slope": 0.25, "lower_bound": 0.125, "upper_bound": 0.334, "training": False}
    integers = False

    def expand(self, b, a, x, gamma=None):
        kind = a["act_type"]
        if (gamma is not None) != (kind == "prelu"):
            raise ProgramError(f"LeakyReLU: act_type {kind!r} with {2 - (gamma is None)} operands; "
                               "prelu alone takes a second one, its slopes")
        if kind == "leaky":
            low = b.scale(x, a["slope"])
            if _is_fast(b, x):          # NaN is not below
                return b.emit("select", b.emit("_lesser_equal_scalar", x, scalar=0.0), low, x)
            return _where_positive(b, x, low)
        if kind == "prelu":
            return _where_positive(b, x, b.mul(x, b.reshape(gamma, _slope_shape(b.shape(gamma), b.shape(x)))))
        if kind == "elu":
            return b.emit("elu", x, slope=a["slope"], fast=_is_fast(b, x))
        if kind in ("selu", "gelu"):
            return b.emit(kind, x)
        if kind == "rrelu":
            low, high = a["lower_bound"], a["upper_bound"]
            if not a["training"]:
                mean = (low + high) / 2
                return [b.emit("rrelu_mean", x, slope=mean), b.scale(b.emit("ones_like", x), mean)]
            slope = b.emit("uniform_like", x, low=low, high=high)
            return [_where_positive(b, x, b.mul(x, slope)), slope]
        raise ProgramError(f"LeakyReLU: act_type {kind!r} is none of leaky, prelu, elu, selu, gelu, rrelu")


def _where_positive(b, x, low):
    return b.emit("select", b.emit("_greater_scalar", x, scalar=0.0), x, low)


def _slope_shape(slopes, shape):
    """MXNet lays the axes of prelu's slopes along axes 1 and 0, from the right, wherever they fit."""
    left, out = list(slopes), []
    for axis in reversed(range(len(shape))):
        fits = left and axis <= 1 and left[-1] in (1, shape[axis])
        out.append(left.pop() if fits else 1)
    if left:
        raise ProgramError(f"LeakyReLU: slopes of shape {slopes} do not broadcast to data of shape {shape}")
    return tuple(out[::-1])


register(Activation("Activation"))
register(HardSigmoid("hard_sigmoid"))
register(LeakyReLU("LeakyReLU"))
