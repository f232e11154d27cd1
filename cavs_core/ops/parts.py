"""Parts of arrays: concat and split, slices, flip."""

from __future__ import annotations

import itertools

import numpy as np

from ..errors import ProgramError
from .base import Composite, Op, Required, axes_of, normal_axis, register


class Concat(Op):
    attrs = {"dim": 1}
    max_axes = 5            # its gradient is made of slices
    ignored = ("num_args",)

    def build(self, b, a, xs):
        return super().build(b, {"dim": normal_axis(a["dim"], len(b.shape(xs[0])))}, xs)

    def infer(self, a, *xs):
        dim, first = a["dim"], xs[0]
        rest = {x.shape[:dim] + x.shape[dim + 1:] for x in xs}
        if len(rest) > 1 or len({x.dtype for x in xs}) > 1:
            raise ProgramError(f"Concat along {dim}: operands {[str(x) for x in xs]} do not fit")
        total = sum(x.shape[dim] for x in xs)
        return [(first.shape[:dim] + (total,) + first.shape[dim + 1:], first.dtype)]

    def splits_rows(self, a, specs, split):
        return a["dim"] != 0 and all(split)

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs], dim=a["dim"] + 1)

    def grad(self, b, a, xs, ys, dys):
        dim, start, grads = a["dim"], 0, []
        for x in xs:
            stop = start + b.shape(x)[dim]
            grads.append(b.emit("slice_axis", dys[0], axis=dim, begin=start, end=stop))
            start = stop
        return grads

    def numpy(self, a, *xs):
        return np.concatenate(xs, axis=a["dim"])


class Stack(Composite):
    attrs = {"axis": 0}
    ignored = ("num_args",)

    def expand(self, b, a, *xs):
        axis = normal_axis(a["axis"], len(b.shape(xs[0])) + 1)
        return b.emit("Concat", *[b.emit("expand_dims", x, axis=axis) for x in xs], dim=axis)


register(Concat("Concat"), "concat", "_rnn_param_concat")
register(Stack("stack"))


class SliceChannel(Op):
    """Equal parts along an axis."""

    attrs = {"num_outputs": Required, "axis": 1, "squeeze_axis": False}
    max_axes = 5            # its gradient joins parts

    def build(self, b, a, xs):
        shape = b.shape(xs[0])
        axis = normal_axis(a["axis"], len(shape))
        if shape[axis] % a["num_outputs"]:
            raise ProgramError(f"split: axis {axis} of shape {shape} is not divisible by {a['num_outputs']}")
        if a["num_outputs"] == 1:
            parts = [b.emit("_copy", xs[0])]
        else:
            parts = super().build(b, {"num_outputs": a["num_outputs"], "axis": axis}, xs)
        return [b.emit("squeeze", p, axis=axis) for p in parts] if a["squeeze_axis"] else parts

    def infer(self, a, x):
        part = list(x.shape)
        part[a["axis"]] //= a["num_outputs"]
        return [(tuple(part), x.dtype)] * a["num_outputs"]

    def splits_rows(self, a, specs, split):
        return a["axis"] != 0

    def rows(self, e, a, x):
        return e.emit_many(self.name, a["num_outputs"], x.array, num_outputs=a["num_outputs"], axis=a["axis"] + 1)

    def grad(self, b, a, xs, ys, dys):
        like = next(dy for dy in dys if dy is not None)         # (all parts look alike)
        parts = [dy if dy is not None else b.emit("zeros_like", like) for dy in dys]
        return [b.emit("Concat", *parts, dim=a["axis"])]

    def numpy(self, a, x):
        return np.split(x, a["num_outputs"], axis=a["axis"])


class SplitV2(Composite):
    """Parts that begin at given indices, or equal ones."""

    attrs = {"indices": (), "axis": 1, "squeeze_axis": False, "sections": 0}

    def expand(self, b, a, x):
        shape = b.shape(x)
        axis = normal_axis(a["axis"], len(shape))
        if a["sections"] > 0:
            return b.call("SliceChannel", [x], {"num_outputs": a["sections"], "axis": axis,
                                                "squeeze_axis": a["squeeze_axis"]})
        starts = [*a["indices"]] if a["indices"] and a["indices"][0] == 0 else [0, *a["indices"]]
        stops = [*starts[1:], shape[axis]]
        parts = [b.emit("slice_axis", x, axis=axis, begin=i, end=j) for i, j in zip(starts, stops)]
        return [b.emit("squeeze", p, axis=axis) for p in parts] if a["squeeze_axis"] else parts


register(SliceChannel("SliceChannel"), "split")
register(SplitV2("_split_v2"))


def _full_slice(shape, a):
    """Begin, end and step for every axis, ends clipped as MXNet does; and the shape of that part."""
    a = {k: (v,) if isinstance(v, int) else tuple(v or ()) for k, v in a.items()}
    if len(a["begin"]) != len(a["end"]) or len(a["begin"]) > len(shape) or 0 in a["step"]:
        raise ProgramError(f"slice of {shape}: begin {a['begin']}, end {a['end']}, step {a['step']} do not fit")
    given = itertools.zip_longest(a["begin"], a["end"], a["step"][:len(shape)], shape)
    ranges = [range(*slice(i, j, s).indices(n)) for i, j, s, n in given]
    if not all(ranges) or any(i is not None and i < -n for i, n in zip(a["begin"], shape)):
        raise ProgramError(f"slice of shape {shape} from {a['begin']} to {a['end']} is empty, or begins before it")
    full = {"begin": tuple(r.start for r in ranges), "step": tuple(r.step for r in ranges),
            "end": tuple(r.stop if r.stop >= 0 else None for r in ranges)}
    return full, tuple(len(r) for r in ranges)


class Slice(Op):
    attrs = {"begin": Required, "end": Required, "step": ()}
    max_axes = 5

    def build(self, b, a, xs):
        return super().build(b, _full_slice(b.shape(xs[0]), a)[0], xs)

    def infer(self, a, x):
        return [(_full_slice(x.shape, a)[1], x.dtype)]

    @staticmethod
    def _behind_rows(a):
        return {k: (None, *v) for k, v in a.items()}

    def splits_rows(self, a, specs, split):
        return range(specs[0].shape[0])[slice(a["begin"][0], a["end"][0], a["step"][0])] == range(specs[0].shape[0])

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, **self._behind_rows(a))

    def grad(self, b, a, xs, ys, dys):
        return [b.emit("slice_assign", b.emit("zeros_like", xs[0]), dys[0], **a)]

    def numpy(self, a, x):
        return x[tuple(slice(*ijs) for ijs in zip(a["begin"], a["end"], a["step"]))]


class SliceAssign(Slice):
    """A copy of x whose slice is replaced by y."""

    def infer(self, a, x, y):
        shape = _full_slice(x.shape, a)[1]
        if y.shape != shape or y.dtype != x.dtype:
            raise ProgramError(f"{self.name}: {y} does not fit a part of shape {shape} of {x}")
        return [(x.shape, x.dtype)]

    def splits_rows(self, a, specs, split):
        return super().splits_rows(a, specs, split) and all(split)

    def rows(self, e, a, *xs):
        return e.emit(self.name, *[x.stack(xs) for x in xs], **self._behind_rows(a))

    def grad(self, b, a, xs, ys, dys):
        kept = b.emit(self.name, dys[0], b.emit("zeros_like", xs[1]), **a)
        return [kept, b.emit("slice", dys[0], **a)]

    def numpy(self, a, x, y):
        out = x.copy()
        out[tuple(slice(*ijs) for ijs in zip(a["begin"], a["end"], a["step"]))] = y
        return out

    def mxnet(self, F, a, x, y):
        return F.BlockGrad(F._internal._slice_assign(x, y, **a))       # MXNet has no gradient of it


class SliceAssignScalar(Composite):
    attrs = {**Slice.attrs, "scalar": 0.0}

    def expand(self, b, a, x):
        scalar = a.pop("scalar")
        part = b.emit("slice", x, **a)
        return b.emit("slice_assign", x, b.shift(b.emit("zeros_like", part), scalar), **a)


class SliceAxis(Composite):
    attrs = {"axis": Required, "begin": Required, "end": Required}

    def expand(self, b, a, x):
        axis = normal_axis(a["axis"], len(b.shape(x)))
        n, begin, end = b.shape(x)[axis], a["begin"], a["end"]
        begin, end = (n if i is None else i + n if i < 0 else i for i in (begin, end))
        if not 0 <= begin < end <= n:           # unlike `slice`, which cuts off what is beyond the end
            raise ProgramError(f"slice_axis: {a['begin']} to {a['end']} is not within axis {axis} of {b.shape(x)}")
        return b.emit("slice", x, begin=(None,) * axis + (begin,), end=(None,) * axis + (end,))


class SliceLike(Composite):
    attrs = {"axes": ()}

    def expand(self, b, a, x, like):
        shape, limits = b.shape(x), b.shape(like)
        axes = axes_of(a["axes"], len(shape))
        ends = tuple(limits[i] if i in axes else None for i in range(len(shape)))
        if (not a["axes"] and len(shape) != len(limits)) or any(m is not None and m > n for n, m in zip(shape, ends)):
            raise ProgramError(f"slice_like: {shape} has nothing of shape {limits} along axes {a['axes'] or 'all'}")
        return b.emit("slice", x, begin=(None,) * len(ends), end=ends)


class Reverse(Op):
    attrs = {"axis": Required}

    def build(self, b, a, xs):
        axes = (a["axis"],) if isinstance(a["axis"], int) else a["axis"]
        if not all(0 <= i < len(b.shape(xs[0])) for i in axes):         # MXNet does not count these from the end
            raise ProgramError(f"reverse: axis {a['axis']} is none of shape {b.shape(xs[0])}")
        return super().build(b, {"axis": axes_of(axes, len(b.shape(xs[0])))}, xs)

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def splits_rows(self, a, specs, split):
        return 0 not in a["axis"]

    def rows(self, e, a, x):
        return e.emit(self.name, x.array, axis=tuple(i + 1 for i in a["axis"]))

    def grad(self, b, a, xs, ys, dys):
        return [b.emit(self.name, dys[0], **a)]

    def numpy(self, a, x):
        return np.flip(x, a["axis"])


register(Slice("slice"), "crop")
register(SliceAssign("slice_assign"), "_slice_assign", "_crop_assign")
register(SliceAssignScalar("_slice_assign_scalar"), "_crop_assign_scalar")
register(SliceAxis("slice_axis"))
register(SliceLike("slice_like"))
register(Reverse("reverse"), "flip")
