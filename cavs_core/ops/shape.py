"""Shapes: reshape and its relatives, transpose, broadcasting."""

from __future__ import annotations

import itertools

import numpy as np

from ..errors import ProgramError
from .base import Composite, Op, Required, axes_of, normal_axis, num_merged_axes, register


def resolve_reshape(shape, codes, reverse=False):
    """MXNet's reshape codes: 0 copy, -1 infer, -2 copy the rest, -3 merge two, -4 split one."""
    if reverse:                             # read from the right: the factors of -4 then stand before it
        return resolve_reshape(shape[::-1], codes[::-1])[::-1]
    out, i, infer, j = [], 0, None, 0
    while j < len(codes):
        code = codes[j]
        if code == 0:
            out.append(shape[i])
            i += 1
        elif code == -1:
            if infer is not None:
                raise ProgramError(f"reshape to {tuple(codes)}: only one -1 can be inferred")
            infer = len(out)
            out.append(1)
            i += 1
        elif code == -2:
            out.extend(shape[i:])
            i = len(shape)
        elif code == -3:
            out.append(shape[i] * shape[i + 1])
            i += 2
        elif code == -4:
            first, second = codes[j + 1], codes[j + 2]
            first = shape[i] // second if first == -1 else first
            second = shape[i] // first if second == -1 else second
            if first * second != shape[i]:
                raise ProgramError(f"reshape: {shape[i]} does not split into {first} and {second}")
            out.extend((first, second))
            i, j = i + 1, j + 2
        else:
            out.append(code)
            i += 1
        j += 1
    size = int(np.prod(shape))
    if infer is not None:
        out[infer] = size // max(1, int(np.prod(out)))
    if int(np.prod(out)) != size:
        raise ProgramError(f"cannot reshape {tuple(shape)} to {tuple(codes)}")
    return tuple(out)


class Reshape(Op):
    attrs = {"shape": (), "reverse": False}
    ignored = ("target_shape", "keep_highest")

    def infer(self, a, x):
        return [(a["shape"], x.dtype)]

    def build(self, b, a, xs):
        shape = a["shape"]
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        target = resolve_reshape(b.shape(xs[0]), shape, a["reverse"])
        return super().build(b, {"shape": target}, xs)

    def splits_rows(self, a, specs, split):
        # a row may become several, or several one: each keeps its own stretch of memory
        few, many = sorted((a["shape"][0], specs[0].shape[0]))
        return many % few == 0

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, shape=(0, *a["shape"]))

    def grad(self, b, a, xs, ys, dys):
        return [b.reshape(dys[0], b.shape(xs[0]))]

    def numpy(self, a, x):
        return x.reshape(resolve_reshape(x.shape, a["shape"]))

    def mxnet(self, F, a, x):
        if len(a["shape"]) > 6:             # then oneDNN cannot reshape what no operator of the region has made
            x = F.identity(x)
        return F.reshape(x, shape=a["shape"])


register(Reshape("Reshape"), "reshape")


class Reshaping(Composite):
    """Ops that only rename the axes of the same memory: `target(shape, attrs)` gives the new shape."""

    def __init__(self, name, attrs, target):
        super().__init__(name)
        self.attrs, self.target = attrs, target

    def expand(self, b, a, x, *like):
        shape = self.target(b.shape(x), a, *[b.shape(v) for v in like])
        return b.reshape(x, shape) if b.shape(x) != shape else b.emit("_copy", x)


def _expanded(shape, a):
    axis = normal_axis(a["axis"], len(shape) + 1)
    return shape[:axis] + (1,) + shape[axis:]


def _squeezed(shape, a):
    if a["axis"] is None:
        return tuple(n for n in shape if n != 1) or (1,)
    axes = axes_of(a["axis"], len(shape)) if a["axis"] != () else ()
    if any(shape[i] != 1 for i in axes):
        raise ProgramError(f"squeeze: axis {a['axis']} of shape {shape} is not 1")
    return tuple(n for i, n in enumerate(shape) if i not in axes) or (1,)


def _like(shape, a, other):
    if a["lhs_begin"] is None and a["lhs_end"] is None and a["rhs_begin"] is None and a["rhs_end"] is None:
        return other
    lb, le, _ = slice(a["lhs_begin"], a["lhs_end"]).indices(len(shape))
    rb, re, _ = slice(a["rhs_begin"], a["rhs_end"]).indices(len(other))
    return shape[:lb] + other[rb:re] + shape[le:]


register(Reshaping("expand_dims", {"axis": Required}, _expanded))
register(Reshaping("squeeze", {"axis": None}, _squeezed))
register(Reshaping("Flatten", {}, lambda shape, a: (shape[0], int(np.prod(shape[1:])))), "flatten")
register(Reshaping("reshape_like", dict.fromkeys(("lhs_begin", "lhs_end", "rhs_begin", "rhs_end")), _like))


class Transpose(Op):
    attrs = {"axes": ()}
    max_axes = 6

    def build(self, b, a, xs):
        ndim = len(b.shape(xs[0]))
        axes = tuple(normal_axis(i, ndim) for i in a["axes"]) if a["axes"] else tuple(range(ndim))[::-1]
        if sorted(axes) != list(range(ndim)):
            raise ProgramError(f"transpose: axes {a['axes']} do not name each of {ndim} axes once")
        return super().build(b, {"axes": axes}, xs)

    def infer(self, a, x):
        return [(tuple(x.shape[i] for i in a["axes"]), x.dtype)]

    def splits_rows(self, a, specs, split):
        return a["axes"][0] == 0

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, axes=(0, *[i + 1 for i in a["axes"]]))

    def grad(self, b, a, xs, ys, dys):
        return [b.emit(self.name, dys[0], axes=tuple(int(i) for i in np.argsort(a["axes"])))]

    def numpy(self, a, x):
        return np.transpose(x, a["axes"])


class SwapAxis(Composite):
    attrs = {"dim1": 0, "dim2": 0}

    def expand(self, b, a, x):
        axes = list(range(len(b.shape(x))))
        i, j = (normal_axis(a[k], len(axes)) for k in ("dim1", "dim2"))
        axes[i], axes[j] = axes[j], axes[i]
        return b.emit("transpose", x, axes=tuple(axes))


register(Transpose("transpose"))
register(SwapAxis("SwapAxis"), "swapaxes")


# ---- broadcasting ----------------------------------------------------------------------------


class BroadcastTo(Op):
    attrs = {"shape": Required}
    max_merged_axes = 5

    def build(self, b, a, xs):
        shape = b.shape(xs[0])
        target = a["shape"] if not isinstance(a["shape"], int) else (a["shape"],)
        if len(target) != len(shape) or any(m not in (0, n) and n != 1 for n, m in zip(shape, target)):
            raise ProgramError(f"broadcast_to: shape {shape} does not broadcast to {target}")
        return super().build(b, {"shape": tuple(m or n for n, m in zip(shape, target))}, xs)

    def infer(self, a, x):
        return [(a["shape"], x.dtype)]

    def splits_rows(self, a, specs, split):
        return a["shape"][0] == specs[0].shape[0]

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, shape=(0, *a["shape"]))

    def grad(self, b, a, xs, ys, dys):
        return [b.sum_to(dys[0], b.shape(xs[0]))]

    def numpy(self, a, x):
        return np.broadcast_to(x, tuple(m or n for n, m in zip(x.shape, a["shape"]))).copy()


class BroadcastAxis(Composite):
    attrs = {"axis": (), "size": ()}

    def expand(self, b, a, x):
        axes, sizes = ((v,) if isinstance(v, int) else v for v in (a["axis"], a["size"]))
        shape = list(b.shape(x))
        for i, n in zip(axes, sizes):
            i = normal_axis(i, len(shape))
            if shape[i] != 1:
                raise ProgramError(f"broadcast_axis: axis {i} of shape {b.shape(x)} is not 1")
            shape[i] = n
        return b.emit("broadcast_to", x, shape=tuple(shape))


class BroadcastLike(Composite):
    attrs = {"lhs_axes": None, "rhs_axes": None}

    def expand(self, b, a, x, like):
        if a["lhs_axes"] is None:
            return b.emit("broadcast_to", x, shape=b.shape(like))
        shape = list(b.shape(x))
        for i, j in zip(a["lhs_axes"], a["rhs_axes"]):
            shape[i] = b.shape(like)[j]
        return b.emit("broadcast_to", x, shape=tuple(shape))


def _repeated(b, x, axis, count, whole):
    """Axis `axis` repeated `count` times, as a whole (tile) or element by element (repeat), by broadcasting."""
    if count == 1:
        return x
    if count < 1:
        raise ProgramError(f"an axis repeated {count} times has no elements")
    shape = b.shape(x)
    cut = axis if whole else axis + 1
    before, behind = int(np.prod(shape[:cut])), int(np.prod(shape[cut:]))
    blocks = b.emit("broadcast_to", b.reshape(x, (before, 1, behind)), shape=(before, count, behind))
    return b.reshape(blocks, shape[:axis] + (shape[axis] * count,) + shape[axis + 1:])


class Tile(Composite):
    attrs = {"reps": Required}

    def expand(self, b, a, x):
        reps = (a["reps"],) if isinstance(a["reps"], int) else tuple(a["reps"])
        shape = b.shape(x)
        width = max(len(reps), len(shape))
        y = b.reshape(x, (1,) * (width - len(shape)) + shape)
        reps = (1,) * (width - len(reps)) + reps
        # what MXNet does: a new axis of 1 before each axis is broadcast
        wide = [tuple(itertools.chain(*zip(counts, b.shape(y)))) for counts in ((1,) * width, reps)]
        if num_merged_axes(wide) > BroadcastTo.max_merged_axes:
            raise ProgramError(f"tile: {a['reps']} times {shape} is more than MXNet can do at once")
        for axis, count in enumerate(reps):
            y = _repeated(b, y, axis, count, whole=True)
        return b.emit("_copy", x) if y == x else y


class Repeat(Composite):
    attrs = {"repeats": Required, "axis": None}

    def expand(self, b, a, x):
        flat = x if a["axis"] is not None else b.reshape(x, (int(np.prod(b.shape(x))),))
        y = _repeated(b, flat, normal_axis(a["axis"] or 0, len(b.shape(flat))), a["repeats"], whole=False)
        return b.emit("_copy", x) if y == x else y


class RowsLike(Op):
    """Array level only: (1, *shape) repeated for every row of a reference."""

    def numpy(self, a, x, like):
        return np.broadcast_to(x, (len(like), *x.shape[1:])).copy()

    def mxnet(self, F, a, x, like):
        return F.broadcast_like(x, like, lhs_axes=(0,), rhs_axes=(0,))


register(BroadcastTo("broadcast_to"))
register(BroadcastAxis("broadcast_axis"), "broadcast_axes")
register(BroadcastLike("broadcast_like"))
register(Tile("tile"))
register(Repeat("repeat"))
register(RowsLike("rows_like"))
