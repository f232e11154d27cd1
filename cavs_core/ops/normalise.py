"""Normalisations, and the output layer whose gradient is not the derivative of its value."""

from __future__ import annotations

import numpy as np

from ..errors import ProgramError
from ..program import SHARED
from .base import TABLE, Composite, Op, normal_axis, register


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
    integers = False
    attrs = {"axis": -1, "eps": 1e-5, "output_mean_var": False}

    def expand(self, b, a, x, gamma, beta):
        if a["output_mean_var"]:
            raise ProgramError("LayerNorm: output_mean_var=True is not supported")
        ndim = len(b.shape(x))
        axis = normal_axis(a["axis"], ndim)
        y = _standardise(b, x, (axis,), a["eps"])
        return b.add(b.mul(y, _along(b, gamma, ndim, axis)), _along(b, beta, ndim, axis))


class BatchNorm(Composite):
    """With the running statistics. Those of a batch couple the samples: they have no program."""

    integers = False
    attrs = {"eps": 1e-3, "fix_gamma": True, "use_global_stats": False, "output_mean_var": False, "axis": 1,
             "training": False}
    ignored = ("momentum", "cudnn_off", "min_calib_range", "max_calib_range")

    def expand(self, b, a, x, gamma, beta, mean, variance):
        if a["output_mean_var"] or (a["training"] and not a["use_global_stats"]):
            raise ProgramError("BatchNorm: in training its statistics couple the samples, and output_mean_var=True is "
                               "not supported")
        ndim = len(b.shape(x))
        axis = normal_axis(a["axis"], ndim)
        scale = b.emit("rsqrt", b.shift(b.emit("BlockGrad", variance), a["eps"]))
        if not a["fix_gamma"]:
            scale = b.mul(scale, gamma)
        centred = b.sub(x, _along(b, b.emit("BlockGrad", mean), ndim, axis))
        return b.add(b.mul(centred, _along(b, scale, ndim, axis)), _along(b, beta, ndim, axis))


class InstanceNorm(Composite):
    integers = False
    attrs = {"eps": 1e-3}

    def expand(self, b, a, x, gamma, beta):
        ndim = len(b.shape(x))
        if ndim < 3:
            raise ProgramError(f"InstanceNorm wants (batch, channel, ...), got {b.shape(x)}")
        y = _standardise(b, x, tuple(range(2, ndim)), a["eps"])
        return b.add(b.mul(y, _along(b, gamma, ndim, 1)), _along(b, beta, ndim, 1))


class GroupNorm(Composite):
    integers = False
    attrs = {"num_groups": 1, "eps": 1e-5, "output_mean_var": False}

    def expand(self, b, a, x, gamma, beta):
        shape, groups = b.shape(x), a["num_groups"]
        if len(shape) < 3 or shape[1] % groups or a["output_mean_var"]:
            raise ProgramError(f"GroupNorm: shape {shape} in {groups} groups, "
                               f"output_mean_var={a['output_mean_var']} is not supported")
        y = _standardise(b, b.reshape(x, (shape[0], groups, int(np.prod(shape[1:])) // groups)), (2,), a["eps"])
        y = b.add(b.mul(y, _along(b, gamma, 3, 1)), _along(b, beta, 3, 1))     # one gamma a group, not a channel
        return b.reshape(y, shape)


class L2Normalization(Composite):
    integers = False
    attrs = {"eps": 1e-10, "mode": "instance"}

    def expand(self, b, a, x):
        ndim = len(b.shape(x))
        axes = {"instance": tuple(range(1, ndim)), "channel": (1,), "spatial": tuple(range(2, ndim))}.get(a["mode"])
        if axes is None or (ndim < 3 and a["mode"] != "instance"):
            raise ProgramError(f"L2Normalization: mode {a['mode']!r} does not fit shape {b.shape(x)}")
        total = b.emit("square", x)
        if axes:                            # a vector is a batch of numbers
            total = b.emit("reduce_sum", total, axis=axes)
        return b.mul(x, b.emit("rsqrt", b.shift(total, a["eps"])))


class SoftmaxLoss(Op):
    """softmax along axis 1; the gradient is (softmax - target) * weight, whatever comes from above."""

    attrs = {"fast": False}             # see SoftmaxOp

    def infer(self, a, x, target, weight):
        return [(x.shape, x.dtype)]

    def splits_rows(self, a, specs, split):
        return all(split)

    def rows(self, e, a, x, target, weight):
        return e.emit("softmax_plain", x.stack([target, weight]), axis=2, temperature=1.0, fast=a["fast"])

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.sub(ys[0], xs[1]), xs[2]), None, None]

    def numpy(self, a, x, target, weight):
        return TABLE["softmax_plain"].numpy({"axis": 1, "temperature": 1.0, **a}, x)

    def mxnet(self, F, a, x, target, weight):
        return TABLE["softmax_plain"].mxnet(F, {"axis": 1, "temperature": 1.0, **a}, x)


class SoftmaxOutput(Composite):
    attrs = {"grad_scale": 1.0, "ignore_label": -1.0, "multi_output": False, "use_ignore": False,
             "preserve_shape": False, "normalization": "null", "out_grad": False, "smooth_alpha": 0.0,
             "training": False}
    integers = False

    def expand(self, b, a, x, label):
        shape = b.shape(x)
        fast = (b.specs[x].dtype == "float32" and len(shape) == 2
                and not (a["training"] or a["multi_output"] or a["preserve_shape"]))
        if a["out_grad"] or len(shape) < 2:
            raise ProgramError(f"SoftmaxOutput: shape {shape} with out_grad={a['out_grad']} is not supported; "
                               "use softmax and a loss")
        view = self._view(a, shape)
        if b.shape(label) == shape:         # probabilities as labels: MXNet ignores and normalises nothing then
            target = b.reshape(label, view)
            weight = b.scale(b.emit("ones_like", target), a["grad_scale"])
        elif len(shape) > 2 and not (a["multi_output"] or a["preserve_shape"]):
            raise ProgramError(f"SoftmaxOutput: labels for shape {shape} want multi_output or preserve_shape")
        else:
            label = b.reshape(label, (view[0], 1, *view[2:]))
            target, weight = self._target(b, a, x, label, view), self._weight(b, a, label)
        x = b.reshape(x, view)
        if b.specs[label].kind == SHARED:   # every row adds its gradient, though all rows are the same
            x = b.per_row(x)
        return b.reshape(b.emit("softmax_loss", x, target, weight, fast=fast), shape)

    @staticmethod
    def _view(a, shape):
        """(samples, classes) or, where each sample has many labels, (samples, classes, positions)."""
        if a["multi_output"]:
            return shape if len(shape) == 2 else (*shape[:2], int(np.prod(shape[2:])))
        if a["preserve_shape"]:
            return (int(np.prod(shape[:-1])), shape[-1])
        return (shape[0], int(np.prod(shape[1:])))

    @staticmethod
    def _target(b, a, x, label, view):
        alpha = 0.0 if a["multi_output"] else a["smooth_alpha"]        # MXNet smooths only single labels
        hot = b.emit("one_hot", b.reshape(label, (view[0], *view[2:])), depth=view[1], on_value=1.0 - alpha,
                     off_value=alpha / max(1, view[1] - 1), dtype=b.specs[x].dtype)
        return hot if len(view) == 2 else b.emit("transpose", hot, axes=(0, 2, 1))

    @staticmethod
    def _weight(b, a, label):
        """The factor of each label: its share, none if it is ignored."""
        samples, _, *positions = b.shape(label)
        weight = b.emit("_not_equal_scalar", label, scalar=a["ignore_label"])
        count = b.emit("reduce_sum", weight, axis=tuple(range(len(b.shape(label)))))
        weight = b.scale(weight if a["use_ignore"] else b.emit("ones_like", label), a["grad_scale"])
        if a["normalization"] == "valid":   # counted whether or not use_ignore is set
            return b.div(weight, b.emit("_maximum_scalar", count, scalar=1.0))
        share = 1.0 / int(np.prod(positions))
        return b.scale(weight, share / samples if a["normalization"] == "batch" else share)


register(LayerNorm("LayerNorm"))
register(BatchNorm("BatchNorm"))
register(InstanceNorm("InstanceNorm"))
register(GroupNorm("GroupNorm"))
register(L2Normalization("L2Normalization"))
register(SoftmaxLoss("softmax_loss"))
register(SoftmaxOutput("SoftmaxOutput"), "Softmax")
