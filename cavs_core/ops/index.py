"""Looking things up: take, Embedding, pick, one_hot, gather_nd."""

from __future__ import annotations

import numpy as np

from ..errors import ProgramError
from ..program import SHARED
from .base import Composite, Op, Required, normal_axis, register


def _clipped(b, index, size, mode):
    """Indices brought into range as `mode` says."""
    if mode == "wrap":
        if b.specs[index].is_float:         # -0.5 is index 0, not size - 0.5
            index = b.emit("Cast", index, dtype="int32")
        return b.emit("_mod_scalar", index, scalar=float(size))
    if mode != "clip":
        raise ProgramError(f"take mode {mode!r} is not supported; use 'clip' or 'wrap'")
    return b.emit("clip", index, a_min=0.0, a_max=float(size - 1))


class Lookup(Op):
    """Rows of `table` (size, *rest) at `index` (any shape), all in range."""

    def why_apart(self, specs):
        small = specs[0].dtype in ("int8", "uint8")
        return f"{self.name}: MXNet cannot add up rows of {specs[0].dtype}" if small else ""

    def infer(self, a, table, index):
        return [(index.shape + table.shape[1:], table.dtype)]

    def splits_rows(self, a, specs, split):
        return tuple(split) == (False, True)

    def rows(self, e, a, table, index):
        if not table.stacked:
            return e.emit(self.name, table.array, index.array)
        return e.emit("lookup_per_row", table.array, index.stack([table]))

    def grad(self, b, a, xs, ys, dys):
        table, index = xs
        return [b.emit("scatter_rows", index, dys[0], size=b.shape(table)[0]), None]

    def numpy(self, a, table, index):
        return table[index.astype(np.int64)]

    def mxnet(self, F, a, table, index):
        return F.take(table, index, mode="clip")


class LookupPerRow(Op):
    """Array level only: each row has a table of its own."""

    def numpy(self, a, table, index):
        rows = np.arange(len(table)).reshape((-1,) + (1,) * (index.ndim - 1))
        return table[rows, index.astype(np.int64)]

    def mxnet(self, F, a, table, index):
        # gather_nd wants (coordinates, n, ...): the row's own number, then the index
        index = F.Cast(F.expand_dims(index, axis=0), dtype="int64")
        row = F.squeeze(F.contrib.index_array(index, axes=(1,)), axis=-1)
        return F.gather_nd(table, F.Concat(row, index, dim=0))


class ScatterRows(Op):
    """A table (size, *rest) of zeros to whose rows `index` the rows of `values` were added."""

    attrs = {"size": Required, "rest": ()}

    def build(self, b, a, xs):
        index, values = (b.shape(x) for x in xs)
        return super().build(b, {"size": a["size"], "rest": values[len(index):]}, xs)

    def infer(self, a, index, values):
        return [((a["size"], *a["rest"]), values.dtype)]

    def rows(self, e, a, index, values):
        # a table per row: ones at the index, times the values
        rest, count, dtype = a["rest"], int(np.prod(index.shape)), values.spec.dtype
        product = dtype if dtype in ("float32", "float64") else "float32" if dtype == "float16" else "float64"
        hot = e.emit("one_hot", e.emit("Reshape", index.stack([values]), shape=(-1, count)),
                     depth=a["size"], on_value=1.0, off_value=0.0, dtype=product)
        flat = e.emit("Reshape", values.stack([index]), shape=(-1, count, int(np.prod(rest))))
        if product != dtype:            # MXNet has no products of it
            flat = e.emit("Cast", flat, dtype=product)
        table = e.emit("batch_matmul", hot, flat, transpose_a=True, transpose_b=False)
        if product != dtype:
            table = e.emit("Cast", table, dtype=dtype)
        return e.emit("Reshape", table, shape=(-1, a["size"], *rest))

    def can_sum_rows(self, specs):
        return SHARED not in (specs[0].kind, specs[1].kind)

    def summed_rows(self, e, a, index, values):
        return e.emit(self.name, index.array, values.array, **a)      # all rows at once are one longer index

    def numpy(self, a, index, values):
        out = np.zeros((a["size"], *a["rest"]), values.dtype)
        np.add.at(out, index.reshape(-1).astype(np.int64), values.reshape(-1, *a["rest"]))
        return out

    def mxnet(self, F, a, index, values):
        # scatter_nd overwrites where an index comes twice; the gradient of gather_nd adds
        flat = F.reshape(values, shape=(-1, *a["rest"]))
        return F._internal._backward_gather_nd(flat, F.reshape(index, shape=(1, -1)), shape=(a["size"], *a["rest"]))


class TakeFront(Composite):
    attrs = {"axis": 0, "mode": "clip"}

    def expand(self, b, a, x, index):
        axis = normal_axis(a["axis"], len(b.shape(x)))
        index = _clipped(b, index, b.shape(x)[axis], a["mode"])
        if axis == 0:
            return b.emit("lookup", x, index)
        ndim, width = len(b.shape(x)), len(b.shape(index))
        front = b.emit("transpose", x, axes=(axis, *[i for i in range(ndim) if i != axis]))
        found = b.emit("lookup", front, index)              # (index axes, axes before, axes behind)
        before = tuple(range(width, width + axis))
        behind = tuple(range(width + axis, width + ndim - 1))
        return b.emit("transpose", found, axes=before + tuple(range(width)) + behind)


class EmbeddingFront(Composite):
    attrs = {"input_dim": Required, "output_dim": Required, "dtype": "float32", "sparse_grad": False}

    def expand(self, b, a, index, table):
        if b.shape(table) != (a["input_dim"], a["output_dim"]):
            raise ProgramError(f"Embedding: weight {b.shape(table)} is not {(a['input_dim'], a['output_dim'])}")
        return b.emit("take", table, index, mode="clip")


class GatherNd(Composite):
    """data[index[0], index[1], ...] with index of shape (coordinates, ...).

    Negative indices count from the end. MXNet raises for those out of range, once it has their values. Here they wrap:
    the face that runs the program looks at them.
    """

    def expand(self, b, a, x, index):
        shape, coordinates = b.shape(x), b.shape(index)[0]
        rest = b.shape(index)[1:]
        if coordinates > len(shape) or not rest:
            raise ProgramError(f"gather_nd: an index of shape {b.shape(index)} for an array of shape {shape}")
        b.program.checks = True
        flat_index, stride = None, 1
        for axis in reversed(range(coordinates)):
            part = b.reshape(b.emit("slice_axis", index, axis=0, begin=axis, end=axis + 1), rest)
            part = b.emit("Cast", b.shift(part, shape[axis]), dtype="int32")        # fractions are cut off behind that
            part = b.emit("_mod_scalar", part, scalar=float(shape[axis]))
            part = b.scale(part, stride) if stride > 1 else part
            flat_index = part if flat_index is None else b.add(flat_index, part)
            stride *= shape[axis]
        return b.emit("lookup", b.reshape(x, (stride, *shape[coordinates:])), flat_index)


class OneHot(Op):
    attrs = {"depth": Required, "on_value": 1.0, "off_value": 0.0, "dtype": "float32"}
    rowwise = True

    def infer(self, a, x):
        return [(x.shape + (a["depth"],), np.dtype(a["dtype"]).name)]

    def numpy(self, a, x):
        hot = x.astype(np.int64)[..., None] == np.arange(a["depth"])
        return np.where(hot, a["on_value"], a["off_value"]).astype(a["dtype"])


class Pick(Op):
    """One element along `axis` for every other position; the axis stays as size 1."""

    attrs = {"axis": Required}
    max_axes = 6            # its gradient brings the axis to its place

    def infer(self, a, x, index):
        return [(tuple(1 if i == a["axis"] else n for i, n in enumerate(x.shape)), x.dtype)]

    def splits_rows(self, a, specs, split):
        return a["axis"] != 0 and all(split)

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs], axis=a["axis"] + 1)

    def grad(self, b, a, xs, ys, dys):
        (x, index), axis = xs, a["axis"]
        shape = b.shape(x)
        flat = b.reshape(index, shape[:axis] + shape[axis + 1:] or (1,))
        hot = b.emit("one_hot", flat, depth=shape[axis], dtype=b.specs[x].dtype)
        if len(shape) == 1:
            hot = b.reshape(hot, shape)
        elif axis != len(shape) - 1:
            last = len(shape) - 1
            hot = b.emit("transpose", hot, axes=(*range(axis), last, *range(axis, last)))
        dy = b.emit("broadcast_to", dys[0], shape=shape)        # (a product would make NaN of 0 and infinity)
        return [b.emit("select", hot, dy, b.emit("zeros_like", dy)), None]

    def numpy(self, a, x, index):
        return np.take_along_axis(x, index.astype(np.int64), axis=a["axis"])

    def mxnet(self, F, a, x, index):
        return F.pick(x, index, axis=a["axis"], keepdims=True)


class PickFront(Composite):
    attrs = {"axis": -1, "keepdims": False, "mode": "clip"}

    def expand(self, b, a, x, index):
        shape = b.shape(x)
        if a["axis"] is None:
            x, shape = b.reshape(x, (int(np.prod(shape)),)), (int(np.prod(shape)),)
        axis = normal_axis(-1 if a["axis"] is None else a["axis"], len(shape))
        kept = tuple(1 if i == axis else n for i, n in enumerate(shape))
        if int(np.prod(b.shape(index))) != int(np.prod(kept)):
            raise ProgramError(f"pick: index of shape {b.shape(index)} does not fit data {shape} along axis {axis}")
        index = _clipped(b, b.reshape(index, kept), shape[axis], a["mode"])
        y = b.emit("pick_plain", x, index, axis=axis)
        return y if a["keepdims"] else b.reshape(y, tuple(n for i, n in enumerate(shape) if i != axis) or (1,))


class BatchTake(Composite):
    def expand(self, b, a, x, index):
        return b.emit("pick", x, index, axis=1)


register(Lookup("lookup"))
register(LookupPerRow("lookup_per_row"))
register(ScatterRows("scatter_rows"))
register(TakeFront("take"))
register(EmbeddingFront("Embedding"), "_contrib_SparseEmbedding", "_sparse_Embedding")
register(GatherNd("gather_nd"))
register(OneHot("one_hot"))
register(Pick("pick_plain"))
register(PickFront("pick"), "choose_element_0index")
register(BatchTake("batch_take"))
