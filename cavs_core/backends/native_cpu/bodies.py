"""Native bodies of the op table: a line an op.

A pointwise op is an expression of its operands {0}, {1}, .., its dtype {t} and its scalar {s}; any other is a function
of the graph, the attributes and the operands. The meaning is that of the numpy body in cavs_core/ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .nodes import Graph, Ref

__all__ = ["BODIES", "DTYPES", "Pointwise", "unsupported"]

DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8")


@dataclass(frozen=True)
class Pointwise:
    expression: str
    cost: int = 1
    exact: bool = True          # also on integers; others compute in double precision there

    def __call__(self, g: Graph, a: dict[str, Any], *xs: Ref) -> Ref:
        shape = np.broadcast_shapes(*[x.shape for x in xs])
        return self.on(g, a.get("dtype", xs[-1].dtype), [x.broadcast(shape) for x in xs], a)

    def on(self, g: Graph, dtype: str, xs: Sequence[Ref], a: dict[str, Any]) -> Ref:
        text, inner = self.expression, dtype
        if not dtype.startswith("float"):
            if not self.exact:
                inner = "float64"
                for i in range(len(xs)):
                    text = text.replace(f"{{{i}}}", f"float64({{{i}}})")
            text = f"{dtype}({text})"           # numba computes integers with 64 bits
        scalar = constant(a.get("scalar", 0.0), dtype)
        text = text.replace("{s}", scalar if inner == dtype else f"{inner}({scalar})").replace("{t}", inner)
        return g.point(text, dtype, xs, self.cost)


def constant(value: Any, dtype: str) -> str:
    """A number as source text."""
    if not dtype.startswith("float"):
        limits = np.iinfo(dtype)
        return f"{dtype}({int(np.clip(value, int(limits.min), int(limits.max)))})"
    return f"{dtype}({float(value)!r})"


BODIES: dict[str, Callable[..., Ref | list[Ref]]] = {}


def body(*names: str):
    """Register a function as the body of ops."""
    def put(function):
        BODIES.update(dict.fromkeys(names, function))
        return function

    return put


# ---- pointwise -------------------------------------------------------------------------------------------------------

_UNARY = [
    ("negative", "(-{0})"), ("abs", "abs({0})"), ("square", "({0} * {0})"), ("relu", "larger({0}, {t}(0))"),
    ("relu_or_zero", "({0} if {0} > {t}(0) else {t}(0))"),
    ("sign", "({t}({0} > {t}(0)) - {t}({0} < {t}(0)))"), ("logical_not", "{t}({0} == {t}(0))"),
    ("Cast", "{t}({0})"),
]
_UNARY_FLOAT = [
    ("sigmoid", "sigmoid_{t}({0})", 20), ("tanh", "tanh_{t}({0})", 20), ("exp", "exp_{t}({0})", 20),
    ("expm1", "expm1_{t}({0})", 20), ("log", "log_{t}({0})", 20), ("log1p", "log1p_{t}({0})", 30),
    ("gelu", "({t}(0.5) * {0} * ({t}(1) + erf_{t}({0} * {t}(0.7071067811865476))))", 24),
    ("softrelu", "softrelu_{t}({0})", 50), ("selu", "selu_{t}({0})", 30), ("erf", "erf_{t}({0})", 20),
    ("softsign", "({0} / ({t}(1) + abs({0})))", 4), ("reciprocal", "({t}(1) / {0})", 4),
    ("sqrt", "sqrt({0})", 4), ("rsqrt", "({t}(1) / sqrt({0}))", 8),
    ("degrees", "({0} * {t}(180 / pi))", 1), ("radians", "({0} * {t}(pi / 180))", 1),
    ("floor", "floor({0})", 1), ("ceil", "ceil({0})", 1), ("trunc", "trunc({0})", 1), ("fix", "trunc({0})", 1),
    ("round", "round_half_away({0})", 4), ("rint", "round_half_down({0})", 4),
    *((name, f"{{t}}({call})", 50) for name, call in [
        ("log2", "log2({0})"), ("log10", "log10({0})"), ("sin", "sin({0})"), ("cos", "cos({0})"), ("tan", "tan({0})"),
        ("arcsin", "asin({0})"), ("arccos", "acos({0})"), ("arctan", "atan({0})"), ("sinh", "sinh({0})"),
        ("cosh", "cosh({0})"), ("arcsinh", "asinh({0})"), ("arccosh", "acosh({0})"), ("arctanh", "atanh({0})"),
        ("cbrt", "cbrt({0})"), ("rcbrt", "(1.0 / cbrt({0}))"), ("erfinv", "erfinv({0})"), ("gamma", "gamma({0})"),
        ("gammaln", "lgamma(float64({0}))"), ("digamma", "digamma({0})")]),
]
_BINARY = [
    # the op of two arrays, of an array and a scalar, of a scalar and an array
    ("broadcast_add", "_plus_scalar", None, Pointwise("({0} + {1})")),
    ("broadcast_sub", "_minus_scalar", "_rminus_scalar", Pointwise("({0} - {1})")),
    ("broadcast_mul", "_mul_scalar", None, Pointwise("({0} * {1})")),
    ("broadcast_div", "_div_scalar", "_rdiv_scalar", Pointwise("({0} / {1})", 4, exact=False)),
    ("broadcast_mod", "_mod_scalar", "_rmod_scalar", Pointwise("modulo({0}, {1})", 50)),
    ("broadcast_power", "_power_scalar", "_rpower_scalar", Pointwise("({0} ** {1})", 50, exact=False)),
    ("broadcast_maximum", "_maximum_scalar", None, Pointwise("larger({0}, {1})")),
    ("broadcast_minimum", "_minimum_scalar", None, Pointwise("smaller({0}, {1})")),
    ("broadcast_hypot", "_hypot_scalar", None, Pointwise("{t}(hypot({0}, {1}))", 50, exact=False)),
    ("broadcast_equal", "_equal_scalar", None, Pointwise("{t}({0} == {1})")),
    ("broadcast_not_equal", "_not_equal_scalar", None, Pointwise("{t}({0} != {1})")),
    ("broadcast_greater", "_greater_scalar", None, Pointwise("{t}({0} > {1})")),
    ("broadcast_greater_equal", "_greater_equal_scalar", None, Pointwise("{t}({0} >= {1})")),
    ("broadcast_lesser", "_lesser_scalar", None, Pointwise("{t}({0} < {1})")),
    ("broadcast_lesser_equal", "_lesser_equal_scalar", None, Pointwise("{t}({0} <= {1})")),
    ("broadcast_logical_and", "_logical_and_scalar", None, Pointwise("{t}(({0} != {t}(0)) & ({1} != {t}(0)))")),
    ("broadcast_logical_or", "_logical_or_scalar", None, Pointwise("{t}(({0} != {t}(0)) | ({1} != {t}(0)))")),
    ("broadcast_logical_xor", "_logical_xor_scalar", None, Pointwise("{t}(({0} != {t}(0)) ^ ({1} != {t}(0)))")),
]

BODIES.update({name: Pointwise(text) for name, text in _UNARY})
BODIES.update({name: Pointwise(text, cost, exact=False) for name, text, cost in _UNARY_FLOAT})
for _both, _right, _left, _op in _BINARY:
    BODIES[_both] = _op
    BODIES[_right] = Pointwise(_op.expression.replace("{1}", "{s}"), _op.cost, _op.exact)
    if _left:
        swapped = _op.expression.replace("{0}", "{s}").replace("{1}", "{0}")
        BODIES[_left] = Pointwise(swapped, _op.cost, _op.exact)


@body("_copy", "BlockGrad", "_detach", "MakeLoss", "make_loss")
def _same(g, a, x):
    return x


@body("zeros_like")
def _zeros(g, a, x):
    return _fill(g, 0.0, x.dtype, x.shape)


@body("ones_like")
def _ones(g, a, x):
    return _fill(g, 1.0, x.dtype, x.shape)


def _fill(g, value, dtype, shape):
    return g.point(constant(value, dtype), dtype, (), 0, shape)


@body("_power_scalar")
def _power_scalar(g, a, x):
    """Whole powers up to 3 need no call."""
    texts = {1.0: "{0}", 2.0: "({0} * {0})", 3.0: "({0} * {0} * {0})", -1.0: "({t}(1) / {0})"}
    text = texts.get(a["scalar"], "({0} ** {s})")
    return Pointwise(text, 50 if "**" in text else 2, exact=False)(g, a, x)


@body("smooth_l1")
def _smooth_l1(g, a, x):
    s = np.dtype(x.dtype).type(a["scalar"])
    bound, shift = constant(1 / (s * s), x.dtype), constant(0.5 / (s * s), x.dtype)
    text = f"(abs({{0}}) - {shift} if abs({{0}}) > {bound} else {{t}}(0.5) * ({{0}} * {{s}}) * ({{0}} * {{s}}))"
    return Pointwise(text, 3, exact=False)(g, a, x)


@body("relu_grad")
def _relu_grad(g, a, dy, y):
    return Pointwise("({0} * ({t}(1) if {1} > {t}(0) else {1}))")(g, a, dy, y)


@body("elu")
def _elu(g, a, x):
    low = constant(a["slope"], x.dtype)
    return Pointwise(f"({{0}} if {{0}} > {{t}}(0) else {low} * expm1_{{t}}(smaller({{0}}, {{t}}(0))))", 24)(g, {}, x)


@body("rrelu_mean")
def _rrelu_mean(g, a, x):
    return Pointwise(f"({{0}} if {{0}} > {{t}}(0) else {{0}} * {constant(a['slope'], x.dtype)})", 2)(g, {}, x)


@body("clip_grad")
def _clip_grad(g, a, dy, x):
    low, high = constant(a["a_min"], x.dtype), constant(a["a_max"], x.dtype)
    return Pointwise(f"({{t}}(0) if ({{1}} < {low}) | ({{1}} > {high}) else {{0}})", 2)(g, {}, dy, x)


@body("clip")
def _clip(g, a, x):
    low, high = constant(a["a_min"], x.dtype), constant(a["a_max"], x.dtype)
    return Pointwise(f"smaller(larger({{0}}, {low}), {high})", 2)(g, {}, x)


@body("select")
def _select(g, a, condition, x, y):
    return Pointwise(f"({{1}} if {{0}} != {constant(0, condition.dtype)} else {{2}})")(g, a, condition, x, y)


# ---- views and parts -------------------------------------------------------------------------------------------------

@body("Reshape")
def _reshape(g, a, x):
    return g.reshape(x, a["shape"])


@body("transpose")
def _transpose(g, a, x):
    return x.transpose(a["axes"])


@body("broadcast_to")
def _broadcast_to(g, a, x):
    return x.broadcast(a["shape"])


def _ranges(a, shape):
    return [range(n)[slice(*part)] for n, *part in zip(shape, a["begin"], a["end"], a["step"])]


@body("slice")
def _slice(g, a, x):
    ranges = _ranges(a, x.shape)
    return g.slice(x, [r.start for r in ranges], [r.step for r in ranges], [len(r) for r in ranges])


@body("reverse")
def _reverse(g, a, x):
    back = [i in a["axis"] for i in range(len(x.shape))]
    return g.slice(x, [n - 1 if b else 0 for n, b in zip(x.shape, back)], [-1 if b else 1 for b in back], x.shape)


@body("SliceChannel")
def _split(g, a, x):
    axis, count = a["axis"], a["num_outputs"]
    shape = tuple(n // count if i == axis else n for i, n in enumerate(x.shape))
    return [g.slice(x, [k * shape[axis] if i == axis else 0 for i in range(len(shape))], [1] * len(shape), shape)
            for k in range(count)]


@body("Concat")
def _concat(g, a, *xs):
    axis = a["dim"]
    shape = tuple(sum(x.shape[axis] for x in xs) if i == axis else n for i, n in enumerate(xs[0].shape))
    strides = _all_strides(shape)
    starts = itertools.accumulate((x.shape[axis] for x in xs), initial=0)
    return g.pieces(shape, xs[0].dtype, [(x, start * strides[axis], strides) for x, start in zip(xs, starts)])


def _all_strides(shape):
    """Of contiguous elements, axes of size one included."""
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


@body("slice_assign")
def _slice_assign(g, a, x, y):
    """y's place, and around it what is left of x: for each axis, what lies outside there and inside before."""
    strides, inside = _all_strides(x.shape), _ranges(a, x.shape)

    def at(part, ranges):
        return (part, sum(r.start * s for r, s in zip(ranges, strides)),
                tuple(r.step * s for r, s in zip(ranges, strides)))

    parts = [at(y, inside)]
    for axis, n in enumerate(x.shape):
        for outside in _complement(inside[axis], n):
            ranges = [*inside[:axis], outside, *(range(m) for m in x.shape[axis + 1:])]
            part = g.slice(x, [r.start for r in ranges], [r.step for r in ranges], [len(r) for r in ranges])
            parts.append(at(part, ranges))
    return g.pieces(x.shape, x.dtype, parts)


def _complement(taken: range, n: int) -> list[range]:
    """What `taken` leaves of range(n), as ranges."""
    taken = taken if taken.step > 0 else taken[::-1]
    between = [range(taken.start + k, taken[-1], taken.step) for k in range(1, taken.step)]
    return [r for r in (range(taken.start), *between, range(taken[-1] + 1, n)) if r]


# ---- reductions ------------------------------------------------------------------------------------------------------

for _kind in ("sum", "max", "min", "prod"):
    BODIES["reduce_" + _kind] = lambda g, a, x, kind=_kind: g.reduce(kind, x, a["axis"])


@body("l2_norm")
def _l2_norm(g, a, x):
    """Added up in double precision; what may overflow there is divided by the largest number first."""
    if x.dtype == "float32":
        squares = g.point("(float64({0}) * float64({0}))", "float64", [x], 2)
        return g.point("float32(sqrt({0}))", "float32", [g.reduce("sum", squares, a["axis"])], 4)
    top = g.reduce("max", _call(g, "abs", x), a["axis"])
    total = g.reduce("sum", _call(g, "square", _call(g, "broadcast_div", x, top)), a["axis"])
    text = "({0} if ({0} == {t}(0)) | ({0} == {t}(inf)) else {0} * sqrt({1}))"
    return Pointwise(text, 4)(g, {}, top, total)


@body("reduce_argmax")
def _argmax(g, a, x, kind="argmax"):
    last = len(x.shape) - 1
    order = [i for i in range(last + 1) if i != a["axis"]] + [a["axis"]]
    found = g.reduce(kind, x.transpose(order), (last,))
    return found.transpose([order.index(i) for i in range(last + 1)])


@body("reduce_argmin")
def _argmin(g, a, x):
    return _argmax(g, a, x, "argmin")


def _call(g, op, *xs):
    return BODIES[op](g, {}, *xs)


def _below_the_top(g, a, x):
    """How far the elements of a softmax are below the largest; what is too far to be told is -inf."""
    z = _call(g, "broadcast_sub", x, g.reduce("max", x, (a["axis"],)))
    return z if a["temperature"] == 1 else Pointwise("({0} * {s})")(g, {"scalar": 1 / a["temperature"]}, z)


def _softmax_exp(g, a, x):
    """e^x, in float32 with e^NaN = inf where oneDNN has it so (which vectors of doubles never do)."""
    return Pointwise("exp_or_inf_{t}({0})" if a["fast"] else "exp_{t}({0})", 20)(g, {}, x)


@body("softmax_plain")
def _softmax(g, a, x):
    e = _softmax_exp(g, a, _below_the_top(g, a, x))
    return _call(g, "broadcast_div", e, g.reduce("sum", e, (a["axis"],)))


@body("softmax_loss")
def _softmax_loss(g, a, x, target, weight):
    return _softmax(g, {"axis": 1, "temperature": 1.0, "fast": a["fast"]}, x)


@body("log_softmax_plain")
def _log_softmax(g, a, x):
    z = _below_the_top(g, a, x)
    total = g.reduce("sum", _softmax_exp(g, a, z), (a["axis"],))
    return _call(g, "broadcast_sub", z, _call(g, "log", total))


@body("log_softmax_grad")
def _log_softmax_grad(g, a, dy, y):
    share = _call(g, "broadcast_mul", _softmax_exp(g, a, y), g.reduce("sum", dy, (a["axis"],)))
    grad = _call(g, "broadcast_sub", dy, share)
    return grad if a["temperature"] == 1 else Pointwise("({0} * {s})")(g, {"scalar": 1 / a["temperature"]}, grad)


# ---- looking up, products --------------------------------------------------------------------------------------------

def _taken(g, source, index, stride):
    """Elements of `source`, `index` times `stride` further."""
    if source.node.size == 1:
        return source
    return g.point("", source.dtype, (source, index), 2, stride=stride)


@body("lookup")
def _lookup(g, a, table, index):
    table = g.memory(table)
    rest, source = table.shape[1:], table.drop(0)
    for n in reversed(index.shape):
        source = source.insert(0, n)
    for n in rest:
        index = index.insert(len(index.shape), n)
    return _taken(g, source, index, table.strides[0])


@body("pick_plain")
def _pick(g, a, x, index):
    x, axis = g.memory(x), a["axis"]
    return _taken(g, x.drop(axis).insert(axis), index, x.strides[axis])


@body("one_hot")
def _one_hot(g, a, x):
    wide = x.insert(len(x.shape), a["depth"])
    on, off = constant(a["on_value"], a["dtype"]), constant(a["off_value"], a["dtype"])
    place = g.iota(a["depth"])
    for n in reversed(x.shape):
        place = place.insert(0, n)
    return g.point(f"({on} if int64({{0}}) == {{1}} else {off})", a["dtype"], (wide, place), 2)


@body("scatter_rows")
def _scatter(g, a, index, values):
    rest = tuple(a["rest"])
    index = g.reshape(index, (index.size,))
    flat = g.reshape(values, (index.size, math.prod(rest)))
    table = g.scatter(flat, index.insert(1, flat.shape[1]), a["size"])
    return g.reshape(table, (a["size"], *rest))


@body("matmul", "batch_matmul")
def _matmul(g, a, x, y):
    rank = len(x.shape)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    x = g.memory(x.transpose(swap) if a["transpose_a"] else x)
    y = g.memory(y.transpose(swap) if a["transpose_b"] else y)
    out = (*x.shape[:-1], y.shape[-1])
    wide = _call(g, "broadcast_mul", x.insert(rank, out[-1]), y.insert(rank - 2, out[-2]))      # (.., m, k, n)
    axis = rank - 1
    if abs(y.strides[-1]) > abs(y.strides[-2]) > 0:        # its columns lie in memory: a dot product for each element
        wide, axis = wide.transpose([*range(axis), rank, axis]), rank
    return g.reshape(g.reduce("sum", wide, (axis,)), out)


def unsupported(op: str, a: dict[str, Any], dtypes: Sequence[str]) -> str | None:
    """Why an op has no native body for these attributes and operands of these dtypes; None if it has one."""
    if op not in BODIES:
        return f"`{op}` has no native body"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"`{op}`: dtype {dtype} has no native kernels"
        if not dtype.startswith("float") and op != "one_hot":
            made = BODIES[op]
            numbers = [a[name] for name in _NUMBERS if name in a]
            if isinstance(made, Pointwise) and not made.exact or op in ("_power_scalar", "smooth_l1"):
                return f"`{op}` of {dtype} has no native body"
            if any(x != int(x) or not np.iinfo(dtype).min <= x <= np.iinfo(dtype).max for x in numbers):
                return f"`{op}` of {dtype} with a number that is none has no native body"
    return None


_NUMBERS = ("scalar", "a_min", "a_max")
