"""Drawn operators that move, name or drop axes and rows of an array; each fits the shape that it was drawn for."""

import math

import numpy as np
from hypothesis import strategies as st

from cavs_core.mxnet_compat import mx

nd = mx.nd


class Moves:
    """Draws functions of one array. `text` says which were drawn."""

    def __init__(self, data):
        self.draw, self.text = data.draw, []

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def shape(self, low=1, high=4):
        return tuple(self.pick(1, 1, 2, 2, 3, 4) for _ in range(self.integer(low, high)))

    def move(self, shape):
        """A function of an array of this shape; of other shapes it may be an error."""
        name = self.pick(*_MOVES)
        fn, what = _MOVES[name](self, shape, self.integer(0, len(shape) - 1))
        self.text.append(f"{name} {what}")
        return fn


def _index(m, shape, axis):
    """Integers, slices, None and Ellipsis."""
    count = m.integer(0, len(shape))
    dots = m.integer(0, count) if m.pick(False, True) else None
    key = []
    for k in range(count + 1):
        if k == dots:
            key.append(Ellipsis)
        if m.pick(*[False] * 4, True):
            key.append(None)
        if k < count:
            key.append(_part(m, shape[k if dots is None or k < dots else len(shape) - count + k]))
    key = key[0] if len(key) == 1 and m.pick(True, False) else tuple(key)
    return lambda x: x[key], key


def _part(m, n):
    kind = m.pick("integer", "stretch", "stretch", "steps", "all", "reversed")
    if kind == "integer":
        return m.integer(-n, n - 1)
    if kind == "stretch":
        start, stop = _stretch(m, n)
        return slice(m.pick(start, start - n, None), m.pick(stop, stop - n if stop < n else None, None))
    if kind == "steps":
        start = m.integer(-n, n - 1)
        behind = m.pick(None, start + n * (start < 0) + 1)
        return slice(start, behind, 2) if m.pick(False, True) else slice(start, None, m.pick(-1, -2, 3))
    return slice(None, None, None if kind == "all" else -1)


def _stretch(m, n):
    start = m.integer(0, n - 1)
    return start, m.integer(start + 1, n)


def _slice(m, shape, axis):
    begin, end, step = [], [], []
    for n in shape[:axis + 1]:
        start, stop = _stretch(m, n)
        if m.pick(False, False, True):
            start, stop, stride = m.pick(None, start), None, m.pick(-1, -2)
        else:
            stride = m.pick(None, 1, 2)
        begin.append(start), end.append(stop), step.append(stride)
    a = {"begin": tuple(begin), "end": tuple(end), "step": tuple(step)}
    return lambda x: nd.slice(x, **a), a


def _slice_axis(m, shape, axis):
    start, stop = _stretch(m, shape[axis])
    a = {"axis": m.pick(axis, axis - len(shape)), "begin": m.pick(start, start - shape[axis]), "end": stop}
    return lambda x: nd.slice_axis(x, **a), a


def _reshape(m, shape, axis):
    """By codes."""
    codes, i, infers = [], 0, True
    while i < len(shape):
        code = m.pick("copy", "same", "split", "rest", "one", *["merge"] * (i + 1 < len(shape)), *["infer"] * infers)
        if code == "rest":
            codes.append(-2)
            break
        if code in ("split", "one"):
            first = m.pick(*[n for n in range(1, shape[i] + 1) if shape[i] % n == 0]) if code == "split" else 1
            codes += m.pick((-4, first, shape[i] // first), (-4, -1, shape[i] // first), (-4, first, -1))
            infers = False              # MXNet loses its place behind a -4
        else:
            codes.append({"copy": 0, "same": shape[i], "merge": -3, "infer": -1}[code])
            infers = infers and code != "infer"
        i += 2 if code == "merge" else 1
    codes = tuple(codes)
    return _of_shape(shape, lambda x: x.reshape(codes)), codes


def _reshape_to_any(m, shape, axis):
    size = math.prod(shape)
    first = m.pick(*[n for n in range(1, size + 1) if size % n == 0])
    target = m.pick((first, -1), (-1, first), (-1,), (1, size), (size, 1, 1), (first, size // first, 1))
    return _of_shape(shape, lambda x: nd.reshape(x, shape=target)), target


def _of_shape(shape, fn):
    """For this size only: MXNet reads beyond the end of an array that is too small, and corrupts its memory."""
    def checked(x):
        if x.size != math.prod(shape):
            raise ValueError("another size")
        return fn(x)
    return checked


def _squeeze(m, shape, axis):
    axes = m.pick(None, *[i for i, n in enumerate(shape) if n == 1])
    return lambda x: x.squeeze(axes), axes


def _transpose(m, shape, axis):
    axes = tuple(m.draw(st.permutations(range(len(shape)))))
    return lambda x: x.transpose(axes), axes


def _tile(m, shape, axis):
    reps = tuple(m.pick(1, 1, 2) for _ in range(m.integer(1, len(shape) + 1)))
    return lambda x: nd.tile(x, reps=reps), reps


def _split(m, shape, axis):
    count = m.pick(*[k for k in range(1, shape[axis] + 1) if shape[axis] % k == 0])
    k, squeezed = m.integer(0, count - 1), count == shape[axis] and m.pick(True, False)

    def part(x):
        parts = nd.split(x, num_outputs=count, axis=axis, squeeze_axis=squeezed)
        return parts[k] if count > 1 else parts
    return part, (count, axis, squeezed, k)


def _take(m, shape, axis):
    numbers = [m.integer(-1, shape[axis]) for _ in range(m.integer(1, 3))]
    dtype, mode = m.pick("float32", "int32"), m.pick("clip", "wrap")
    return lambda x: nd.take(x, nd.array(numbers, dtype=dtype), axis=axis, mode=mode), (numbers, axis, mode)


def _broadcast_axis(m, shape, axis):
    axes = [i for i, n in enumerate(shape) if n == 1]
    if not axes:
        return lambda x: x + 1, "of none"
    axis = m.pick(*axes)
    return lambda x: nd.broadcast_axis(x, axis=axis, size=3), axis


def _broadcast_like(m, shape, axis):
    target = tuple(m.pick(1, 3) if n == 1 else n for n in shape)
    return lambda x: nd.broadcast_like(x, nd.ones(target) * 2), target


def _slice_like(m, shape, axis):
    target = tuple(m.integer(1, n) for n in shape)
    return lambda x: nd.slice_like(x, nd.ones(target)), target


def _reduce(m, shape, axis):
    name, keepdims = m.pick("sum", "mean", "max", "norm"), m.pick(True, False)
    return lambda x: getattr(nd, name)(x, axis=axis, keepdims=keepdims), (name, axis, keepdims)


def _pick(m, shape, axis):
    kept, keepdims = tuple(1 if i == axis else n for i, n in enumerate(shape)), m.pick(True, False)
    return lambda x: nd.pick(x, nd.ones(kept), axis=axis, keepdims=keepdims), (axis, keepdims)


def _weighted(m, shape, axis):
    """Each element with a factor of its own."""
    return lambda x: x * nd.arange(1, x.size + 1).reshape(x.shape), ""


_MOVES = {
    "index": _index, "index ": _index, "slice": _slice, "slice_axis": _slice_axis, "reshape": _reshape,
    "reshape to": _reshape_to_any, "squeeze": _squeeze, "squeeze ": _squeeze, "transpose": _transpose, "tile": _tile,
    "split": _split, "take": _take, "broadcast_axis": _broadcast_axis, "broadcast_like": _broadcast_like,
    "slice_like": _slice_like, "reduce": _reduce, "pick": _pick, "weighted": _weighted,
    "expand_dims": lambda m, shape, axis: (lambda x: x.expand_dims(axis - len(shape)), axis - len(shape)),
    "flip": lambda m, shape, axis: (lambda x: x.flip(axis), axis),
    "swapaxes": lambda m, shape, axis: (lambda x: x.swapaxes(axis, 0), axis),
    "repeat": lambda m, shape, axis: (lambda x: nd.repeat(x, repeats=2, axis=axis), axis),
    "stack": lambda m, shape, axis: (lambda x: nd.stack(x, x * 2, axis=axis), axis),
    "concat": lambda m, shape, axis: (lambda x: nd.concat(x, x * 2, x, dim=axis), axis),
    "flatten": lambda m, shape, axis: (lambda x: x.flatten(), ""),
    "softmax": lambda m, shape, axis: (lambda x: nd.softmax(x, axis=axis), axis),
    "L2Normalization": lambda m, shape, axis: (lambda x: nd.L2Normalization(x), ""),
    "rows": lambda m, shape, axis: (lambda x: [row * 2 for row in x][-1], ""),
}


def drawn_program(m, length, max_axes=4, max_size=500):
    """(function, shape, shape of another number of rows): a chain of moves that MXNet can run on the first shape."""
    shape = m.shape(1, max_axes)
    first = m.pick(lambda x: x, lambda x: x * 1, nd.tanh)
    moves, x = [], nd.ones(shape)
    for _ in range(m.integer(1, length)):
        move = m.move(x.shape)
        try:
            made = move(x)
            made.wait_to_read()
        except (mx.base.MXNetError, IndexError, ValueError):
            m.text.pop()
            continue
        if 0 in made.shape or made.size > max_size or made.ndim > max_axes:
            m.text.pop()
            continue
        moves.append(move)
        x = made

    def program(*arrays):
        found = []
        for x in arrays:
            x = first(x)
            half = None
            for k, move in enumerate(moves):
                x = move(x)
                half = x if k == len(moves) // 2 else half
            found += [x] if half is None else [x, half * 2]
        return found

    other = (m.pick(1, 2, 5), *shape[1:])
    try:
        for y in program(nd.ones(other)):
            assert np.isfinite(y.asnumpy()).all()
    except (mx.base.MXNetError, IndexError, ValueError):
        other = shape
    return program, shape, other
