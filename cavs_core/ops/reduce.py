"""Reductions and softmax. The plain reductions keep their axes; the MXNet names drop them where asked to."""

from __future__ import annotations

import numpy as np

from ..errors import ProgramError
from .base import FEW_AXES, Composite, Op, Required, axes_of, normal_axis, register


class Reduce(Op):
    """f over the given axes, which stay as size 1."""

    attrs = {"axis": Required}
    max_merged_axes = 5

    def __init__(self, name, body, mxnet_name):
        super().__init__(name)
        self.body, self.mxnet_name = body, mxnet_name

    def infer(self, a, x):
        return [(tuple(1 if i in a["axis"] else n for i, n in enumerate(x.shape)), x.dtype)]

    def splits_rows(self, a, specs, split):
        return 0 not in a["axis"]

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, axis=tuple(i + 1 for i in a["axis"]))

    def numpy(self, a, x):
        return self.body(x, axis=a["axis"], keepdims=True).astype(x.dtype)

    def mxnet(self, F, a, x):
        return getattr(F, self.mxnet_name)(x, axis=a["axis"], keepdims=True)


class ReduceSum(Reduce):
    def grad(self, b, a, xs, ys, dys):
        return [b.emit("broadcast_to", dys[0], shape=b.shape(xs[0]))]

    def can_sum_rows(self, specs):
        return True

    def summed_rows(self, e, a, x):
        total = e.emit(self.name, x.array, axis=(0, *[i + 1 for i in a["axis"]]))
        shape = tuple(1 if i in a["axis"] else n for i, n in enumerate(x.shape))
        return e.emit("Reshape", total, shape=shape)


class ReduceExtreme(Reduce):
    """Every element that equals the extreme gets its gradient, as in MXNet."""

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.emit("broadcast_equal", xs[0], ys[0]), dys[0])]


class ReduceProd(Reduce):
    integers = False

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.div(ys[0], xs[0]), dys[0])]


register(ReduceSum("reduce_sum", np.sum, "sum"))
register(ReduceExtreme("reduce_max", np.max, "max"))
register(ReduceExtreme("reduce_min", np.min, "min"))
register(ReduceProd("reduce_prod", np.prod, "prod"))


def _reduced_shape(shape, axes, keepdims):
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes) or (1,)


class Reduction(Composite):
    """An MXNet reduction: axis None, int or tuple; keepdims; exclude."""

    attrs = {"axis": None, "keepdims": False, "exclude": False}

    def reduce(self, b, a, x, axes):
        return b.emit("reduce_" + self.name, x, axis=axes)

    def expand(self, b, a, x):
        shape = b.shape(x)
        everything = a["axis"] is None or a["axis"] == ()       # then MXNet does not look at `exclude`
        axes = axes_of(a["axis"], len(shape), not everything and a.get("exclude", False))
        if not axes:
            return b.emit("_copy", x)
        return b.reshape(self.reduce(b, a, x, axes), _reduced_shape(shape, axes, a["keepdims"]))


class Mean(Reduction):
    integers = False

    def reduce(self, b, a, x, axes):
        count = int(np.prod([b.shape(x)[i] for i in axes]))
        return b.scale(b.emit("reduce_sum", x, axis=axes), 1.0 / count)


class Norm(Reduction):
    integers = False
    attrs = {"ord": 2, "axis": None, "keepdims": False, "out_dtype": None}

    def reduce(self, b, a, x, axes):
        if a["ord"] == 1:
            return b.emit("reduce_sum", b.emit("abs", x), axis=axes)
        if a["ord"] != 2 or a["out_dtype"] not in (None, b.specs[x].dtype):
            raise ProgramError(f"norm: ord={a['ord']}, out_dtype={a['out_dtype']} is not supported")
        return b.emit("l2_norm", x, axis=axes)


class L2Norm(Reduce):
    """sqrt(sum x^2), which overflows only where the result does."""

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.div(xs[0], ys[0]), dys[0])]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            top = np.max(np.abs(x), axis=a["axis"], keepdims=True)
            norm = top * np.sqrt(np.sum(np.square(x / top), axis=a["axis"], keepdims=True))
        return np.where((top == 0) | np.isinf(top), top, norm)

    def mxnet(self, F, a, x):
        if len(a["axis"]) > 2:
            return F.sqrt(F.sum(F.square(x), axis=a["axis"], keepdims=True))
        return F.BlockGrad(F.norm(x, ord=2, axis=a["axis"], keepdims=True))


register(Reduction("sum"), "sum_axis")
register(Mean("mean"))
register(Reduction("max"), "max_axis")
register(Reduction("min"), "min_axis")
register(Reduction("prod"))
register(Norm("norm"))
register(L2Norm("l2_norm", None, "norm"))


class ArgReduce(Op):
    """Index of the extreme along one axis, as numbers of the operand's own dtype; not differentiable."""

    attrs = {"axis": Required}

    def __init__(self, name, body, mxnet_name):
        super().__init__(name)
        self.body, self.mxnet_name = body, mxnet_name

    def infer(self, a, x):
        return [(tuple(1 if i == a["axis"] else n for i, n in enumerate(x.shape)), x.dtype)]

    def splits_rows(self, a, specs, split):
        return a["axis"] != 0

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, axis=a["axis"] + 1)

    def numpy(self, a, x):
        return np.expand_dims(self.body(x, axis=a["axis"]), a["axis"]).astype(x.dtype)

    def mxnet(self, F, a, x):
        return getattr(F, self.mxnet_name)(x, axis=a["axis"], keepdims=True)


class ArgReduction(Composite):
    attrs = {"axis": None, "keepdims": False}

    def expand(self, b, a, x):
        shape = b.shape(x)
        if a["axis"] is None:
            flat = b.reshape(x, (int(np.prod(shape)),))
            index = b.emit("reduce_" + self.name, flat, axis=0)
            return b.reshape(index, (1,) * len(shape) if a["keepdims"] else (1,))
        axis = normal_axis(a["axis"], len(shape))
        index = b.emit("reduce_" + self.name, x, axis=axis)
        return b.reshape(index, _reduced_shape(shape, (axis,), a["keepdims"]))


register(ArgReduce("reduce_argmax", np.argmax, "argmax"))
register(ArgReduce("reduce_argmin", np.argmin, "argmin"))
register(ArgReduction("argmax"))
register(ArgReduction("argmin"))


# ---- softmax ---------------------------------------------------------------------------------


class SoftmaxOp(Op):
    """`fast`: as oneDNN computes it for MXNet, where e^NaN is infinite; so the infinities of a row are NaN, and all
    else in it is not. MXNet's own code makes all of the row NaN."""

    attrs = {"axis": Required, "temperature": 1.0, "fast": False}
    integers = False

    def infer(self, a, x, *others):
        return [(x.shape, x.dtype)]

    def splits_rows(self, a, specs, split):
        return a["axis"] != 0 and all(split)

    def rows(self, e, a, *xs):
        arrays, shape = [x.stack(xs) for x in xs], xs[0].shape
        if a["fast"] and len(shape) == FEW_AXES - 1:        # one axis more, and MXNet would not call oneDNN
            arrays = [e.emit("Reshape", x, shape=(-1, *shape[1:])) for x in arrays]
            return e.emit("Reshape", e.emit(self.name, *arrays, **a), shape=(-1, *shape))
        return e.emit(self.name, *arrays, **{**a, "axis": a["axis"] + 1})

    @staticmethod
    def told(a):
        """The attributes as MXNet's operators take them; oneDNN knows no temperature."""
        return {"axis": a["axis"]} if a["fast"] else {"axis": a["axis"], "temperature": a["temperature"]}

    @staticmethod
    def exp(a, x):
        return np.where(np.isnan(x) & a["fast"], x.dtype.type(np.inf), np.exp(x))


class SoftmaxPlain(SoftmaxOp):
    def grad(self, b, a, xs, ys, dys):
        weighted = b.mul(dys[0], ys[0])
        grad = b.sub(weighted, b.mul(ys[0], b.emit("reduce_sum", weighted, axis=(a["axis"],))))
        return [grad if a["temperature"] == 1 else b.emit("_div_scalar", grad, scalar=a["temperature"])]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            e = self.exp(a, (x - x.max(axis=a["axis"], keepdims=True)) / x.dtype.type(a["temperature"]))
            return e / e.sum(axis=a["axis"], keepdims=True)

    def mxnet(self, F, a, x):
        return F.softmax(x, **self.told(a))


class LogSoftmaxPlain(SoftmaxOp):
    def grad(self, b, a, xs, ys, dys):
        return [b.emit("log_softmax_grad", dys[0], ys[0], **a)]

    def numpy(self, a, x):
        with np.errstate(all="ignore"):
            x = (x - x.max(axis=a["axis"], keepdims=True)) / x.dtype.type(a["temperature"])
            return x - np.log(self.exp(a, x).sum(axis=a["axis"], keepdims=True))

    def mxnet(self, F, a, x):
        return F.log_softmax(x, **self.told(a))


class LogSoftmaxGrad(SoftmaxOp):
    """(dy - e^y sum dy) / temperature."""

    def numpy(self, a, dy, y):
        with np.errstate(all="ignore"):
            grad = dy - self.exp(a, y) * dy.sum(axis=a["axis"], keepdims=True)
            return grad / y.dtype.type(a["temperature"])

    def mxnet(self, F, a, dy, y):
        return F.BlockGrad(F._internal._backward_log_softmax(dy, y, **self.told(a)))


class SoftmaxFront(Composite):
    attrs = {"axis": -1, "temperature": None, "dtype": None, "use_length": False}
    integers = False

    def __init__(self, name, plain):
        super().__init__(name)
        self.plain = plain

    def expand(self, b, a, x, *length):
        if a["use_length"]:
            raise ProgramError(f"{self.name}: use_length=True is not supported; mask with where() instead")
        shape, cast = b.shape(x), a["dtype"] not in (None, "None")
        axis = normal_axis(a["axis"], len(shape))
        if a["temperature"] == 0:
            raise ProgramError(f"{self.name}: a temperature of 0 is no number to divide by")
        fast = (self.name != "softmin" and a["temperature"] is None and not cast and axis == len(shape) - 1
                and len(shape) < FEW_AXES and b.specs[x].dtype == "float32")
        if self.name == "softmin":
            x = b.emit("negative", x)
        y = b.emit(self.plain, x, axis=axis, temperature=float(a["temperature"] or 1.0), fast=fast)
        return b.emit("Cast", y, dtype=a["dtype"]) if cast else y


class SoftmaxActivation(Composite):
    attrs = {"mode": "instance"}
    integers = False

    def expand(self, b, a, x):
        shape = b.shape(x)
        if b.specs[x].dtype != "float32":
            raise ProgramError(f"SoftmaxActivation: {b.specs[x].dtype} is MXNet's to refuse")
        if len(shape) < 2 or (a["mode"] != "channel" and len(shape) > 2):
            # MXNet takes the softmax over all axes then, but the gradient over axis 1
            raise ProgramError(f"SoftmaxActivation: mode {a['mode']!r} is not supported for shape {shape}; use softmax")
        return b.emit("softmax_plain", x, axis=1)


register(SoftmaxPlain("softmax_plain"))
register(LogSoftmaxPlain("log_softmax_plain"))
register(LogSoftmaxGrad("log_softmax_grad"))
register(SoftmaxFront("softmax", "softmax_plain"))
register(SoftmaxFront("log_softmax", "log_softmax_plain"))
register(SoftmaxFront("softmin", "softmax_plain"))
register(SoftmaxActivation("SoftmaxActivation"))
