"""Ops that draw. Every row draws its own numbers, from MXNet's generator (seeded by mx.random.seed)."""

from __future__ import annotations

import numpy as np

from .base import Composite, Op, normal_axis, register


class UniformLike(Op):
    attrs = {"low": 0.0, "high": 1.0}
    rowwise = True

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def numpy(self, a, x):
        return np.random.uniform(a["low"], a["high"], x.shape).astype(x.dtype)

    def mxnet(self, F, a, x):
        return F.random.uniform_like(x, **a)


class Dropout(Composite):
    """Zero with probability p, else scaled by 1 / (1 - p); along `axes` one draw serves all."""

    attrs = {"p": 0.5, "mode": "training", "axes": (), "training": False}
    ignored = ("cudnn_off",)

    def expand(self, b, a, x):
        p = a["p"]
        if p == 0 or (a["mode"] == "training" and not a["training"]):
            return b.emit("_copy", x)
        shape = b.shape(x)
        template = x
        if a["axes"]:
            axes = [normal_axis(i, len(shape)) for i in a["axes"]]
            template = b.emit("slice", x, begin=(0,) * len(shape),
                              end=tuple(1 if i in axes else n for i, n in enumerate(shape)))
        keep = b.emit("_lesser_scalar", b.emit("uniform_like", template), scalar=1.0 - p)
        return b.mul(x, b.scale(keep, 1.0 / (1.0 - p)))


register(UniformLike("uniform_like"))
register(Dropout("Dropout"))
