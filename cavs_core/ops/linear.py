"""Matrix products. Everything is written in two plain ops: `matmul` of two matrices, and `batch_matmul`."""

from __future__ import annotations

import numpy as np

from ..errors import ProgramError
from .base import Composite, Op, Required, normal_axis, register


def _matrix(shape, transposed):
    return shape[:-2] + (shape[-1], shape[-2]) if transposed else shape


class Matmul(Op):
    """(m, k) x (k, n), each operand transposed on demand.

    Rows with a shared matrix are one product of all rows; rows with rows are a batched product.
    """

    attrs = {"transpose_a": False, "transpose_b": False}
    integers = False

    def infer(self, a, x, y):
        (*lead, m, k), (*lead_y, k_y, n) = _matrix(x.shape, a["transpose_a"]), _matrix(y.shape, a["transpose_b"])
        if k != k_y or lead != lead_y or x.dtype != y.dtype:
            raise ProgramError(f"a product of {x.dtype}{list(x.shape)} (transposed: {a['transpose_a']}) and "
                               f"{y.dtype}{list(y.shape)} (transposed: {a['transpose_b']}) does not fit")
        return [((*lead, m, n), x.dtype)]

    def splits_rows(self, a, specs, split):
        return tuple(split) == (True, False) and not a["transpose_a"]

    def rows(self, e, a, x, y):
        ta, tb = a["transpose_a"], a["transpose_b"]
        if x.stacked and y.stacked:
            return e.emit("batch_matmul", x.array, y.array, transpose_a=ta, transpose_b=tb)
        if y.stacked:       # x y = (y' x')' : the rows lead, so that all of them are one product
            flipped = self._rows_times_shared(e, y, not tb, x, not ta)
            (m, _), (_, n) = _matrix(x.shape, ta), _matrix(y.shape, tb)
            return _swap(e, flipped, (n, m))
        return self._rows_times_shared(e, x, ta, y, tb)

    @staticmethod
    def _rows_times_shared(e, x, ta, y, tb):
        left, (m, k) = x.array, _matrix(x.shape, ta)
        if ta:
            left = _swap(e, left, x.shape)
        left = e.emit("Reshape", left, shape=(-1, k))
        n = _matrix(y.shape, tb)[1]
        product = e.emit("matmul", left, y.array, transpose_a=False, transpose_b=tb)
        return e.emit("Reshape", product, shape=(-1, m, n))

    def can_sum_rows(self, specs):
        return specs[0].kind == specs[1].kind

    def summed_rows(self, e, a, x, y):
        """The sum over rows of x_i y_i is one product over all rows: how parameter gradients are made."""
        left = x.array if a["transpose_a"] else _swap(e, x.array, x.shape)
        right = y.array if not a["transpose_b"] else _swap(e, y.array, y.shape)
        m, n = _matrix(x.shape, a["transpose_a"])[0], _matrix(y.shape, a["transpose_b"])[1]
        return e.emit("matmul", e.emit("Reshape", left, shape=(-1, m)), e.emit("Reshape", right, shape=(-1, n)),
                      transpose_a=True, transpose_b=False)

    def grad(self, b, a, xs, ys, dys):
        (x, y), (dz,), ta, tb = xs, dys, a["transpose_a"], a["transpose_b"]

        def product(u, v, tu, tv):
            return b.emit(self.name, u, v, transpose_a=tu, transpose_b=tv)

        dx = product(y, dz, tb, True) if ta else product(dz, y, False, not tb)
        dy = product(dz, x, True, ta) if tb else product(x, dz, not ta, False)
        return [dx, dy]

    def numpy(self, a, x, y):
        return np.matmul(np.swapaxes(x, -1, -2) if a["transpose_a"] else x,
                         np.swapaxes(y, -1, -2) if a["transpose_b"] else y)

    def mxnet(self, F, a, x, y):
        return F.dot(x, y, **a)


def _swap(e, array, shape):
    """Transpose the last two axes of rows; of a vector-like matrix that is a change of shape only."""
    m, n = shape
    if 1 in (m, n):
        return e.emit("Reshape", array, shape=(-1, n, m))
    return e.emit("transpose", array, axes=(0, 2, 1))


class BatchMatmul(Matmul):
    """(b, m, k) x (b, k, n)."""

    def splits_rows(self, a, specs, split):
        return all(split)

    def rows(self, e, a, *xs):
        flat = [e.emit("Reshape", x.stack(xs), shape=(-3, 0, 0)) for x in xs]
        product = e.emit(self.name, *flat, **a)
        return e.emit("Reshape", product, shape=(-4, -1, xs[0].shape[0], 0, 0))

    def can_sum_rows(self, specs):
        return False

    def mxnet(self, F, a, x, y):
        return F.batch_dot(x, y, **a)


class FullyConnected(Composite):
    """y = x W' + bias, over the last axis or over everything behind the first."""

    attrs = {"num_hidden": Required, "no_bias": False, "flatten": True}
    ignored = ("cudnn_off",)

    def expand(self, b, a, x, weight, bias=None):
        shape = b.shape(x)
        if a["flatten"]:
            outer, units = shape[:1], int(np.prod(shape[1:]))
        else:
            outer, units = shape[:-1], shape[-1]
        if b.shape(weight) != (a["num_hidden"], units):
            raise ProgramError(f"FullyConnected: weight {b.shape(weight)} does not fit input {shape}; "
                               f"expected {(a['num_hidden'], units)}")
        have, want = (None if bias is None else b.shape(bias)), (None if a["no_bias"] else (a["num_hidden"],))
        if have != want:
            raise ProgramError(f"FullyConnected: no_bias={a['no_bias']} with bias {have}; expected {want}")
        y = b.emit("matmul", b.reshape(x, (int(np.prod(outer)), units)), weight, transpose_b=True)
        if bias is not None:
            y = b.add(y, b.reshape(bias, (1, a["num_hidden"])))
        return b.reshape(y, (*outer, a["num_hidden"]))


class Dot(Composite):
    """MXNet's dot: the last axis of x with the first of y (transposed: the other end), for any dimensions."""

    attrs = {"transpose_a": False, "transpose_b": False}
    ignored = ("forward_stype",)

    def expand(self, b, a, x, y):
        xs, ys = b.shape(x), b.shape(y)
        if len(xs) == 1 and len(ys) == 1:
            return b.reshape(b.emit("matmul", b.reshape(x, (1, xs[0])), b.reshape(y, (ys[0], 1))), (1,))
        ta, tb = a["transpose_a"] and len(xs) > 1, a["transpose_b"] and len(ys) > 1
        # one axis against the product of the others
        left = (xs[0], int(np.prod(xs[1:]))) if ta else (int(np.prod(xs[:-1])), xs[-1])
        right = (int(np.prod(ys[:-1])), ys[-1]) if tb else (ys[0], int(np.prod(ys[1:])))
        outer = (xs[1:] if ta else xs[:-1]) + (ys[:-1] if tb else ys[1:])
        z = b.emit("matmul", b.reshape(x, left), b.reshape(y, right), transpose_a=ta, transpose_b=tb)
        return b.reshape(z, outer or (1,))


class BatchDot(Composite):
    """op(x) op(y) over the last two axes; the axes before them are equal."""

    attrs = {"transpose_a": False, "transpose_b": False}
    ignored = ("forward_stype",)
    min_axes = 3

    def expand(self, b, a, x, y):
        xs, ys = b.shape(x), b.shape(y)
        if min(len(xs), len(ys)) < self.min_axes or xs[:-2] != ys[:-2]:
            raise ProgramError(f"{self.name}: shapes {xs} and {ys} do not fit; it wants at least {self.min_axes} axes, "
                               "all but the last two equal")
        if len(xs) == 2:
            return b.emit("matmul", x, y, **a)
        count = int(np.prod(xs[:-2]))
        z = b.emit("batch_matmul", b.reshape(x, (count, *xs[-2:])), b.reshape(y, (count, *ys[-2:])), **a)
        return b.reshape(z, xs[:-2] + b.shape(z)[1:])


class Gemm2(BatchDot):
    """alpha op(A) op(B); `axis` says which axis holds the rows of the matrices, the last one their columns."""

    attrs = {"transpose_a": False, "transpose_b": False, "alpha": 1.0, "axis": -2}
    ignored = ()
    min_axes = 2

    def expand(self, b, a, x, y, *c):
        alpha, axis, beta = a.pop("alpha"), a.pop("axis"), a.pop("beta", None)
        x, y, *c = (_move_axis(b, v, axis, -2) for v in (x, y, *c))
        z = _scaled(b, super().expand(b, a, x, y), alpha)
        for v in c:
            if b.shape(v) != b.shape(z):
                raise ProgramError(f"{self.name}: C has shape {b.shape(v)}, the product {b.shape(z)}")
            z = b.add(z, _scaled(b, v, beta))
        return _move_axis(b, z, -2, axis)


class Gemm(Gemm2):
    """alpha op(A) op(B) + beta C."""

    attrs = {**Gemm2.attrs, "beta": 1.0}


def _scaled(b, x, scalar):
    return x if scalar == 1.0 else b.scale(x, scalar)


def _move_axis(b, x, source, target):
    ndim = len(b.shape(x))
    source, target = normal_axis(source, ndim), normal_axis(target, ndim)
    axes = [i for i in range(ndim) if i != source]
    axes.insert(target, source)
    return x if source == target else b.emit("transpose", x, axes=tuple(axes))


register(Matmul("matmul"))
register(BatchMatmul("batch_matmul"))
register(FullyConnected("FullyConnected"))
register(Dot("dot"))
register(BatchDot("batch_dot"))
register(Gemm2("_linalg_gemm2"))
register(Gemm("_linalg_gemm"))
