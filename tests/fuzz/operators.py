"""How the fuzzer calls every operator of the table: a drawing gives the text of one call on a value, or None.

A drawing gets the writer `g` (names, draws, other operands) and the value `x`. What it writes may be refused by MXNet;
the writer then forgets it.
"""

from cavs_core.mxnet_compat import mx
from cavs_core.ops import TABLE

MODULES = {"_linalg_": "linalg", "_contrib_": "contrib", "_sparse_": "sparse"}
DRAWN = {}  # operator -> its drawing


def path_of(name):
    """Where MXNet's Python interface has an operator: 'tanh', '_internal._plus_scalar'; None if nowhere."""
    if hasattr(mx.nd, name):
        return name
    for prefix, module in MODULES.items():
        if name.startswith(prefix) and hasattr(getattr(mx.nd, module), name[len(prefix) :]):
            return f"{module}.{name[len(prefix) :]}"
    return f"_internal.{name}" if hasattr(mx.nd._internal, name) else None


def call(g, name, *operands, **attrs):
    texts = [str(x) for x in operands] + [f"{key}={value!r}" for key, value in attrs.items()]
    return f"{g.ns}.{path_of(name)}({', '.join(texts)})"


def drawing(*names):
    def keep(fn):
        for name in names:
            DRAWN[name] = lambda g, x, name=name: fn(g, x, name)
        return fn

    return keep


# ---- one array -------------------------------------------------------------------------------

ANYWHERE = (
    "abs arctan arcsinh cbrt ceil cos degrees erf fix floor hard_sigmoid logical_not negative ones_like radians relu "
    "rint round selu sigmoid sign sin softsign square tanh trunc zeros_like _copy Flatten flatten softrelu"
).split()
POSITIVE = "digamma gamma gammaln log log10 log1p log2 rcbrt reciprocal rsqrt sqrt".split()
SMALL = "arccos arcsin arctanh erfinv tan exp expm1 sinh cosh".split()


@drawing(*ANYWHERE, "BlockGrad")
def _anywhere(g, x, name):
    return call(g, name, x)


@drawing(*POSITIVE)
def _positive(g, x, name):
    return call(g, name, x if g.wild() else f"({g.ns}.abs({x}) + 0.5)")


@drawing(*SMALL)
def _small(g, x, name):
    return call(g, name, x if g.wild() else f"({g.ns}.tanh({x}) * 0.9)")


@drawing("arccosh")
def _arccosh(g, x, name):
    return call(g, name, f"({g.ns}.abs({x}) + 1.5)")


@drawing("softrelu")
def _softrelu(g, x, name):
    return call(g, "Activation", x, act_type="softrelu")


@drawing("Cast")
def _cast(g, x, name):
    return call(g, name, x, dtype=g.draw.pick(*g.dtypes()))


@drawing("clip")
def _clip(g, x, name):
    low = g.draw.pick(-1.0, -0.5, 0.0, 0.1)
    return call(g, name, x, a_min=low, a_max=low + g.draw.pick(0.5, 1.0, 0.0))


@drawing("Activation")
def _activation(g, x, name):
    return call(g, name, x, act_type=g.draw.pick("relu", "sigmoid", "tanh", "softrelu", "softsign"))


@drawing("LeakyReLU")
def _leaky(g, x, name):
    kind = g.draw.pick("leaky", "elu", "selu", "gelu", "prelu")
    if kind == "prelu":
        slope = g.weight(g.draw.pick((1,), x.shape[1:2])) if len(x.shape) > 1 else None
        return slope and call(g, name, x, slope, act_type="prelu")
    return call(g, name, x, act_type=kind, slope=g.draw.pick(0.25, 0.1, 1.0))


@drawing("Dropout")
def _dropout(g, x, name):
    return call(g, name, x, p=0.0, mode=g.draw.pick("training", "always"))


@drawing("MakeLoss", "make_loss")
def _make_loss(g, x, name):
    return call(g, name, x, grad_scale=g.draw.pick(1.0, 0.5)) if name == "MakeLoss" else call(g, name, x)


# ---- with a number ---------------------------------------------------------------------------

SYMBOLS = {
    "_plus_scalar": "{x} + {k}",
    "_minus_scalar": "{x} - {k}",
    "_rminus_scalar": "{k} - {x}",
    "_mul_scalar": "{x} * {k}",
    "_div_scalar": "{x} / {k}",
    "_greater_scalar": "{x} > {k}",
    "_lesser_equal_scalar": "{x} <= {k}",
    "_equal_scalar": "{x} == {k}",
}
SCALARS = [name for name in TABLE if name.endswith("_scalar") and "assign" not in name]


@drawing(*SCALARS, "smooth_l1")
def _scalar(g, x, name):
    k = g.draw.number()
    if not g.floating(x):
        k = float(g.draw.pick(1, 2, 3))
    if name in ("_rdiv_scalar", "_rmod_scalar", "_power_scalar") and not g.wild():
        return call(g, name, f"({g.ns}.abs({x}) + 0.5)", scalar=k)
    if name == "_rpower_scalar":
        k = abs(k)
    if name in SYMBOLS and g.draw.chance(0.5):
        return f"({SYMBOLS[name].format(x=x, k=k)})"
    return call(g, name, x, scalar=k)


# ---- of two and more arrays ------------------------------------------------------------------

PAIR = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
BROADCAST = [
    name
    for name in TABLE
    if name.startswith("broadcast_")
    and name not in ("broadcast_to", "broadcast_axis", "broadcast_axes", "broadcast_like")
]
SAME = [name for name in ("_" + b[len("broadcast_") :] for b in BROADCAST) if name in TABLE] + [
    f"elemwise_{word}" for word in PAIR
]


@drawing(*BROADCAST, *SAME)
def _binary(g, x, name):
    word = name.split("_", 1)[1]
    y = g.broad(x) if name.startswith("broadcast") else g.same(x)
    if y is None:
        return None
    if word in ("div", "mod") or word == "power":
        y = y if g.wild() and g.floating(x) else f"({g.ns}.abs({y}) + {'0.5' if g.floating(x) else 1})"
    if word == "power" and not g.wild():
        return call(g, name, f"({g.ns}.abs({x}) + 0.5)", y)
    if word in PAIR and g.draw.chance(0.5) and (g.ns == "nd" or not name.startswith("broadcast")):
        return f"({x} {PAIR[word]} {y})"
    x, y = (x, y) if g.draw.chance(0.7) else (y, x) if word not in ("div", "mod", "power") else (x, y)
    return call(g, name, x, y)


@drawing("where", "select")
def _where(g, x, name):
    return call(g, name, f"({x} > {g.draw.pick(0.0, 0.3)})", x if g.draw.chance(0.5) else g.same(x), g.same(x))


@drawing("add_n")
def _add_n(g, x, name):
    return call(g, name, x, *[g.same(x) for _ in range(g.draw.integer(0, 3))])


# ---- reductions ------------------------------------------------------------------------------


@drawing("sum", "sum_axis", "mean", "max", "max_axis", "min", "min_axis", "prod")
def _reduce(g, x, name):
    axis = g.draw.axes(x.shape)
    attrs = {"axis": axis, "keepdims": g.draw.chance(0.5)}
    if axis is not None and g.draw.chance(0.2):
        attrs["exclude"] = True
    if name in ("sum", "mean", "max", "min", "prod") and g.draw.chance(0.4):
        return f"{x}.{name}({', '.join(f'{k}={v!r}' for k, v in attrs.items())})"
    return call(g, name, x, **attrs)


@drawing("norm")
def _norm(g, x, name):
    axis = g.draw.pick(None, g.draw.axis(x.shape))
    return call(g, name, x, ord=g.draw.pick(1, 2) if axis is not None else 2, axis=axis, keepdims=g.draw.chance(0.5))


@drawing("argmax", "argmin")
def _arg(g, x, name):
    return call(g, name, x, axis=g.draw.axis(x.shape), keepdims=g.draw.chance(0.5))


@drawing("softmax", "log_softmax", "softmin")
def _softmax(g, x, name):
    attrs = {"axis": g.draw.axis(x.shape)}
    if g.draw.chance(0.3):
        attrs["temperature"] = g.draw.pick(0.5, 2.0)
    return call(g, name, x, **attrs)


@drawing("SoftmaxActivation")
def _softmax_activation(g, x, name):
    if len(x.shape) == 1 and not g.allowed("one axis"):
        return None
    return call(g, name, x, mode=g.draw.pick("instance", "channel") if len(x.shape) > 2 else "instance")


@drawing("softmax_loss", "SoftmaxOutput", "Softmax")
def _softmax_output(g, x, name):
    if path_of(name) is None or len(x.shape) != 2:
        return None
    label = g.indices((x.shape[0],), x.shape[1])
    attrs = {"grad_scale": g.draw.pick(1.0, 0.5)} if g.draw.chance(0.5) else {}
    if g.draw.chance(0.3):
        attrs["normalization"] = g.draw.pick("batch", "valid", "null")
    return label and call(g, name, x, label, **attrs)


#: Operators of the table that MXNet's Python interface does not have: words of the engine's own rules.
OWN = [name for name in TABLE if path_of(name) is None]

#: How often an operator is drawn; others 1. Elementwise ones are many.
WEIGHTS = {name: 0.35 for name in (*ANYWHERE, *POSITIVE, *SMALL, *SCALARS, *BROADCAST, *SAME)} | {
    name: 3.0
    for name in (
        "FullyConnected",
        "dot",
        "softmax",
        "take",
        "concat",
        "split",
        "slice_axis",
        "slice",
        "sum",
        "mean",
        "reshape",
        "transpose",
        "Embedding",
        "pick",
        "broadcast_add",
        "broadcast_mul",
        "tanh",
        "sigmoid",
    )
}
