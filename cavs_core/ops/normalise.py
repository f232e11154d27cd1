"""Normalisations, and the output layer whose gradient is not the derivative of its value."""

from __future__ import annotations

import numpy as np

from ..errors import ProgramError
from .base import Composite, Op, normal_axis, register


def _standardise(b, x, axes, eps):
    """(x - mean) / sqrt(variance + eps) over `axes`."""
    scale = 1.0 / int(np.prod([b.shape(x)[i] for i in axes]))
    centred = b.sub(x, b.scale(b.emit("reduce_sum", x, axis=axes), scale))
    variance = b.scale(b.emit("reduce_sum", b.emit("square", centred), axis=axes), scale)
    return b.mul(centred, b.emit("rsqrt", b.shift(variance, eps)))


def _along(b, x, ndim, axis):
    """A vector laid along one axis of ndim."""
    return b.reshape(x, tuple(b.shape(x)[0] if i == axis else 1 for i in range(ndim)))


class LayerNorm(Composite):
    attrs = {"axis": -1, "eps": 1e-5, "output_mean_var": False}

    def expand(self, b, a, x, gamma, beta):
        if a["output_mean_var"]:
            raise ProgramError("LayerNorm: output_mean_var=True is not supported")
        ndim = len(b.shape(x))
        axis = normal_axis(a["axis"], ndim)
        y = _standardise(b, x, (axis,), a["eps"])
        return b.add(b.mul(y, _along(b, gamma, ndim, axis)), _along(b, beta, ndim, axis))


class InstanceNorm(Composite):
    attrs = {"eps": 1e-3}

    def expand(self, b, a, x, gamma, beta):
        ndim = len(b.shape(x))
        if ndim < 3:
            raise ProgramError(f"InstanceNorm wants (batch, channel, ...), got {b.shape(x)}")
        y = _standardise(b, x, tuple(range(2, ndim)), a["eps"])
        return b.add(b.mul(y, _along(b, gamma, ndim, 1)), _along(b, beta, ndim, 1))


class GroupNorm(Composite):
    attrs = {"num_groups": 1, "eps": 1e-5, "output_mean_var": False}

    def expand(self, b, a, x, gamma, beta):
        shape, groups = b.shape(x), a["num_groups"]
        if shape[1] % groups or a["output_mean_var"]:
            raise ProgramError(f"GroupNorm: {shape[1]} channels in {groups} groups, "
                               f"output_mean_var={a['output_mean_var']} is not supported")
        grouped = b.reshape(x, (shape[0] * groups, int(np.prod(shape[1:])) // groups))
        y = b.reshape(_standardise(b, grouped, (1,), a["eps"]), shape)
        return b.add(b.mul(y, _along(b, gamma, len(shape), 1)), _along(b, beta, len(shape), 1))


class L2Normalization(Composite):
    attrs = {"eps": 1e-10, "mode": "instance"}

    def expand(self, b, a, x):
        ndim = len(b.shape(x))
        axes = {"instance": tuple(range(1, ndim)), "channel": (1,), "spatial": tuple(range(2, ndim))}.get(a["mode"])
        if not axes:
            raise ProgramError(f"L2Normalization: mode {a['mode']!r} does not fit shape {b.shape(x)}")
        total = b.emit("reduce_sum", b.emit("square", x), axis=axes)
        return b.mul(x, b.emit("rsqrt", b.shift(total, a["eps"])))


class SoftmaxLoss(Op):
    """softmax along `axis`; the gradient is (softmax - target) * weight, whatever comes from above."""

    attrs = {"axis": 1}

    def infer(self, a, x, target, weight):
        return [(x.shape, x.dtype)]

    def rows(self, e, a, x, target, weight):
        return e.emit("softmax_plain", x.stack([target, weight]), axis=a["axis"] + 1)

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.sub(ys[0], xs[1]), xs[2]), None, None]

    def numpy(self, a, x, target, weight):
        e = np.exp(x - x.max(axis=a["axis"], keepdims=True))
        return e / e.sum(axis=a["axis"], keepdims=True)

    def mxnet(self, F, a, x, target, weight):
        return F.softmax(x, axis=a["axis"])


class SoftmaxOutput(Composite):
    attrs = {"grad_scale": 1.0, "ignore_label": -1.0, "multi_output": False, "use_ignore": False,
             "preserve_shape": False, "normalization": "null", "out_grad": False, "smooth_alpha": 0.0}

    def expand(self, b, a, x, label):
        if a["out_grad"]:
            raise ProgramError("SoftmaxOutput: out_grad=True is not supported; use softmax and a loss")
        shape, axis = b.shape(x), 1
        if a["preserve_shape"]:
            axis = len(shape) - 1
        elif not a["multi_output"]:
            x = b.reshape(x, (shape[0], int(np.prod(shape[1:]))))
        classes = b.shape(x)[axis]
        if b.shape(label) == b.shape(x):                   # probabilities as labels
            target, weight = label, b.emit("ones_like", label)
        else:
            target, weight = self._one_hot_target(b, a, x, label, axis, classes)
        weight = self._normalised(b, a, weight, b.shape(x), axis)
        y = b.emit("softmax_loss", x, target, weight, axis=axis)
        return b.reshape(y, shape)

    @staticmethod
    def _one_hot_target(b, a, x, label, axis, classes):
        kept = tuple(1 if i == axis else n for i, n in enumerate(b.shape(x)))
        label = b.reshape(label, kept)
        off = a["smooth_alpha"] / (classes - 1) if a["smooth_alpha"] else 0.0
        hot = b.emit("one_hot", b.reshape(label, kept[:axis] + kept[axis + 1:]), depth=classes,
                     on_value=1.0 - a["smooth_alpha"], off_value=off, dtype=b.specs[x].dtype)
        last = len(kept) - 1
        if axis != last:
            hot = b.emit("transpose", hot, axes=(*range(axis), last, *range(axis, last)))
        weight = b.emit("ones_like", label)
        if a["use_ignore"]:
            weight = b.emit("_not_equal_scalar", label, scalar=a["ignore_label"])
        return hot, weight

    @staticmethod
    def _normalised(b, a, weight, shape, axis):
        scaled = b.scale(weight, a["grad_scale"])
        if a["normalization"] == "batch":
            return b.scale(scaled, 1.0 / shape[0])
        if a["normalization"] == "valid":
            count = b.emit("reduce_sum", weight, axis=tuple(range(len(b.shape(weight)))))
            if b.shape(weight) == shape:
                count = b.scale(count, 1.0 / shape[axis])
            return b.div(scaled, b.emit("_maximum_scalar", count, scalar=1.0))
        if a["multi_output"] and a["normalization"] == "null":
            return b.scale(scaled, 1.0)
        return scaled


register(LayerNorm("LayerNorm"))
register(InstanceNorm("InstanceNorm"))
register(GroupNorm("GroupNorm"))
register(L2Normalization("L2Normalization"))
register(SoftmaxLoss("softmax_loss"))
register(SoftmaxOutput("SoftmaxOutput"), "Softmax")
