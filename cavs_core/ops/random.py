"""Ops that draw. Every row draws its own numbers, from MXNet's generator (seeded by mx.random.seed)."""

from __future__ import annotations

from ..errors import ProgramError
from ..mxnet_compat import mx
from .base import Composite, Op, normal_axis, register


class UniformLike(Op):
    """Numbers between low and high, as many as the operand has; of a shared operand too, each row draws its own."""

    attrs = {"low": 0.0, "high": 1.0}
    rowwise = True

    def build(self, b, a, xs):
        return super().build(b, a, [b.per_row(x) for x in xs])

    def infer(self, a, x):
        if not x.is_float:
            raise ProgramError(f"only arrays of floating type can be drawn, not {x.dtype}")
        return [(x.shape, x.dtype)]

    def numpy(self, a, x):
        return mx.nd.random.uniform(a["low"], a["high"], x.shape, dtype=x.dtype.name, ctx=mx.cpu()).asnumpy()

    def mxnet(self, F, a, x):
        return F.random.uniform_like(x, **a)


class Dropout(Composite):
    """Zero with probability p, else divided by 1 - p; along `axes` one draw serves all."""

    attrs = {"p": 0.5, "mode": "training", "axes": (), "training": False}
    ignored = ("cudnn_off",)
    integers = False

    def expand(self, b, a, x):
        p, shape = a["p"], b.shape(x)
        if not 0 <= p <= 1:
            raise ProgramError(f"Dropout: p={p} is no probability")
        if p == 0 or (a["mode"] == "training" and not a["training"]):
            return b.emit("_copy", x)
        template = x
        if a["axes"]:
            axes = [normal_axis(i, len(shape)) for i in a["axes"]]
            template = b.emit("slice", x, begin=(0,) * len(shape),
                              end=tuple(1 if i in axes else n for i, n in enumerate(shape)))
        keep = b.emit("_lesser_scalar", b.emit("uniform_like", template), scalar=1.0 - p)
        return b.mul(x, b.emit("_div_scalar", keep, scalar=1.0 - p))


register(UniformLike("uniform_like"))
register(Dropout("Dropout"))
