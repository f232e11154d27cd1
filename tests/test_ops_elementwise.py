"""Elementwise ops, activations, where, clip and casts, against MXNet."""

import operator as python
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import broadcast_pairs, dtypes, operator, rows, seeds, shapes, subsets
from op_check import ROWS, check_op, trace_rows

from cavs_core import ProgramError, TraceError
from cavs_core.mxnet_compat import mx

# MXNet holds a constant or an attribute of these in single precision, whatever the dtype.
SINGLE = dict(rtol=3e-5, atol=3e-6)
few = settings(max_examples=8)

NICE = np.arange(-3, 3.5, 0.5)              # halves and integers: ties, and both sides of every step
NONZERO = NICE[NICE != 0]
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 0.49999997, 3, 20.5,
                -20.5, 1e-30, 1e30, -1e30])
NUMBERS = ODD[1:]

# name -> where to draw from: an interval, or some numbers
UNARY = {
    "sigmoid": (-4, 4), "tanh": (-3, 3), "relu": NICE, "softsign": (-3, 3), "exp": (-3, 3), "expm1": (-3, 3),
    "log": (0.1, 5), "log2": (0.1, 5), "log10": (0.1, 5), "log1p": (-0.8, 5), "sqrt": (0.1, 5), "rsqrt": (0.1, 5),
    "cbrt": (0.1, 5), "rcbrt": (0.1, 5), "square": (-3, 3), "reciprocal": (-3, -0.2), "negative": (-3, 3),
    "abs": NICE, "sin": (-4, 4), "cos": (-4, 4), "tan": (-1.2, 1.2), "arcsin": (-0.9, 0.9), "arccos": (-0.9, 0.9),
    "arctan": (-3, 3), "sinh": (-3, 3), "cosh": (-3, 3), "arcsinh": (-3, 3), "arccosh": (1.1, 5),
    "arctanh": (-0.9, 0.9), "degrees": (-4, 4), "radians": (-400, 400), "erf": (-2.5, 2.5), "erfinv": (-0.95, 0.95),
    "gamma": (-0.9, 6), "gammaln": (-0.9, 6), "sign": NICE, "floor": NICE, "ceil": NICE, "round": NICE, "rint": NICE,
    "fix": NICE, "trunc": NICE, "logical_not": NICE, "zeros_like": NICE, "ones_like": NICE, "_copy": NICE,
    "BlockGrad": NICE, "make_loss": NICE,
}
IN_SINGLE = {"degrees", "radians", "erf", "erfinv", "gamma", "gammaln"}
SCALAR = {
    "_plus_scalar": (-3, 3), "_minus_scalar": (-3, 3), "_rminus_scalar": (-3, 3), "_mul_scalar": (-3, 3),
    "_div_scalar": (-3, 3), "_rdiv_scalar": (0.2, 3), "_mod_scalar": NONZERO, "_rmod_scalar": NONZERO,
    "_power_scalar": (0.2, 3), "_rpower_scalar": (-2, 2), "_maximum_scalar": NICE, "_minimum_scalar": NICE,
    "_hypot_scalar": (-3, 3), "_equal_scalar": NICE, "_not_equal_scalar": NICE, "_greater_scalar": NICE,
    "_greater_equal_scalar": NICE, "_lesser_scalar": NICE, "_lesser_equal_scalar": NICE,
    "_logical_and_scalar": NICE, "_logical_or_scalar": NICE, "_logical_xor_scalar": NICE, "smooth_l1": (-3, 3),
}
# name -> the name that wants equal shapes, where to draw from
BINARY = {
    "broadcast_add": ("elemwise_add", (-3, 3)), "broadcast_sub": ("elemwise_sub", (-3, 3)),
    "broadcast_mul": ("elemwise_mul", (-3, 3)), "broadcast_div": ("elemwise_div", (0.2, 3)),
    "broadcast_mod": ("_mod", NONZERO), "broadcast_power": ("_power", (0.2, 3)),
    "broadcast_maximum": ("_maximum", NICE), "broadcast_minimum": ("_minimum", NICE),
    "broadcast_hypot": ("_hypot", (-3, 3)), "broadcast_equal": ("_equal", NICE),
    "broadcast_not_equal": ("_not_equal", NICE), "broadcast_greater": ("_greater", NICE),
    "broadcast_greater_equal": ("_greater_equal", NICE), "broadcast_lesser": ("_lesser", NICE),
    "broadcast_lesser_equal": ("_lesser_equal", NICE), "broadcast_logical_and": ("_logical_and", NICE),
    "broadcast_logical_or": ("_logical_or", NICE), "broadcast_logical_xor": ("_logical_xor", NICE),
}
COVERS = (
    *UNARY, *SCALAR, *BINARY, *[same_shape for same_shape, _ in BINARY.values()],
    "MakeLoss", "Cast", "clip", "where", "select", "add_n", "Activation", "hard_sigmoid", "LeakyReLU",
    # what Activation and LeakyReLU are made of, and gradients
    "softrelu", "selu", "elu", "gelu", "rrelu_mean", "relu_or_zero", "relu_grad", "clip_grad", "digamma",
)


def drawn(where, seed, *sizes, **options):
    if isinstance(where, tuple):
        return rows(seed, *sizes, low=where[0], high=where[1], **options)
    return rows(seed, *sizes, among=where, **options)


# ---- one array -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds)
def test_unary(name, shape, dtype, shared, seed):
    x, = drawn(UNARY[name], seed, shape, dtype=dtype, shared=shared)
    check_op(lambda F, x: operator(F, name)(x), x, shared=shared, tol=SINGLE if name in IN_SINGLE else None)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_unary_of_odd_numbers(name, dtype):
    """Values everywhere; gradients where the operand is a number: at nan MXNet's own kernels differ."""
    tol = SINGLE if dtype == "float32" or name in IN_SINGLE else None

    def fn(F, x):
        return operator(F, name)(x)

    check_op(fn, np.stack([ODD] * ROWS).astype(dtype), grad=False, tol=tol)
    check_op(fn, np.stack([NUMBERS] * ROWS).astype(dtype), tol=tol)


@pytest.mark.parametrize("name", [name for name in UNARY if hasattr(mx.nd.NDArray, name)])
def test_unary_as_a_method(name):
    x, = drawn(UNARY[name], 1, (2, 3))
    check_op(lambda F, x: getattr(x, name)(), x)


@few
@given(shape=shapes(), shared=subsets(1), seed=seeds, scale=st.sampled_from([1.0, 2.5]),
       thresh=st.sampled_from([-1.0, 0.0, 0.5, 3.0]), normalization=st.sampled_from(["null", "batch", "valid"]))
def test_make_loss(shape, shared, seed, scale, thresh, normalization):
    """The gradient is the scale, whatever head gradient comes; `valid` counts in each sample."""
    x, = rows(seed, shape, shared=shared)
    check_op(lambda F, x: F.MakeLoss(x, grad_scale=scale, valid_thresh=thresh, normalization=normalization), x,
             shared=shared)


# ---- an array and a number -------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALAR)
@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds, scalar=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]))
def test_scalar(name, shape, dtype, shared, seed, scalar):
    x, = drawn(SCALAR[name], seed, shape, dtype=dtype, shared=shared)
    check_op(lambda F, x: operator(F, name)(x, scalar=scalar), x, shared=shared)


@pytest.mark.parametrize("scalar", [0.0, -1.0, -1.5, 2.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", [name for name in SCALAR if name != "smooth_l1"])
def test_odd_scalars_and_odd_numbers(name, scalar):
    x = np.stack([ODD] * ROWS).astype("float32")
    check_op(lambda F, x: operator(F, name)(x, scalar=scalar), x)


# ---- two arrays ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BINARY)
@few
@given(pair=broadcast_pairs(), dtype=dtypes, shared=subsets(2), seed=seeds)
def test_broadcast(name, pair, dtype, shared, seed):
    x, y = drawn(BINARY[name][1], seed, *pair, dtype=dtype, shared=shared)
    check_op(lambda F, x, y: operator(F, name)(x, y), x, y, shared=shared)


@pytest.mark.parametrize("name, where", BINARY.values())
@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(2), seed=seeds)
def test_of_equal_shapes(name, where, shape, dtype, shared, seed):
    x, y = drawn(where, seed, shape, shape, dtype=dtype, shared=shared)
    check_op(lambda F, x, y: operator(F, name)(x, y), x, y, shared=shared)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BINARY)
def test_broadcast_of_odd_numbers(name, dtype):
    odd = ODD[:-3]      # without the numbers whose squares over- or underflow
    x, y = (np.stack([v] * ROWS).astype(dtype) for v in np.meshgrid(odd, odd))
    check_op(lambda F, x, y: operator(F, name)(x, y), x, y)


@few
@given(shape=shapes(), dtype=dtypes, count=st.integers(1, 4), data=st.data(), seed=seeds)
def test_add_n(shape, dtype, count, data, seed):
    shared = data.draw(subsets(count))
    arrays = rows(seed, *[shape] * count, dtype=dtype, shared=shared)
    check_op(lambda F, *xs: F.add_n(*xs), *arrays, shared=shared)


# ---- Python's operators, mx.nd's functions and NDArray's methods -----------------------------

EXPRESSIONS = [
    "x + y", "x - y", "x * y", "x / y", "x % y", "x ** y", "-x", "abs(x)",
    "x == y", "x != y", "x > y", "x >= y", "x < y", "x <= y",
    *[f"x {op} 1.5" for op in ("+", "-", "*", "/", "%", "**", "==", "!=", ">", ">=", "<", "<=")],
    *[f"1.5 {op} x" for op in ("+", "-", "*", "/", "%", "**", "==", "!=", ">", ">=", "<", "<=")],
    "x ** 2", "2 * x + 1", "x * np.float32(2)", "x / np.int64(2)",
    *[f"F.{name}({operands})" for name in
      ("add", "subtract", "multiply", "divide", "modulo", "power", "maximum", "minimum", "equal", "not_equal",
       "greater", "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or", "logical_xor")
      for operands in ("x, y", "x, 1.5", "1.5, x")],
    "F.true_divide(x, y)", "x.astype('float64')", "x.astype('float32', copy=False)", "x.clip(0.5, 1.5)",
    "x.copy()", "x.detach() * x", "x.as_in_context(x.context)", "F.identity(x)", "F.stop_gradient(x) * x",
    "F.cast(x, dtype='float64')", "F.ElementWiseSum(x, y, x)",
]


@pytest.mark.parametrize("shared", [(), (1,)])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression(expression, shared):
    x, y = rows(2, (2, 3), (1, 3) if "ElementWiseSum" not in expression else (2, 3), shared=shared,
                among=[0.5, 1, 1.5, 2, 2.5])
    check_op(eval(f"lambda F, x, y: {expression}"), x, y, shared=shared)


@pytest.mark.parametrize("operand", ["array", 1.5])
@pytest.mark.parametrize("update", [python.iadd, python.isub, python.imul, python.itruediv, python.imod])
def test_in_place(update, operand):
    """Every name of the array sees the change. MXNet has no in-place gradients."""
    def fn(F, x, y):
        z = x * 2
        other_name = z
        update(z, y if operand == "array" else operand)
        return other_name * x, z

    x, y = rows(2, (2, 3), (1, 3), among=[0.5, 1, 1.5, 2, 2.5])
    check_op(fn, x, y, fixed=(0, 1), grad=False)


# ---- MXNet's other names ---------------------------------------------------------------------

CAMEL = ("Plus Minus RMinus Mul Div RDiv Mod RMod Power RPower Maximum Minimum Hypot Equal NotEqual Greater "
         "GreaterEqual Lesser LesserEqual LogicalAnd LogicalOr LogicalXor").split()
ALIASES = {
    "identity": "_copy", "stop_gradient": "BlockGrad", "cast": "Cast", "ElementWiseSum": "add_n",
    "broadcast_plus": "broadcast_add", "broadcast_minus": "broadcast_sub",
    "_plus": "elemwise_add", "_Plus": "elemwise_add", "_add": "elemwise_add",
    "_minus": "elemwise_sub", "_Minus": "elemwise_sub", "_sub": "elemwise_sub",
    "_mul": "elemwise_mul", "_Mul": "elemwise_mul", "_div": "elemwise_div", "_Div": "elemwise_div",
    **{f"_{name.strip('_').title()}": name for name, _ in BINARY.values() if name.startswith("_")},
    **{f"_{camel}Scalar": name for camel, name in zip(CAMEL, SCALAR)},
}


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_alias_is_the_same_operator(alias, name):
    attrs = {"Cast": {"dtype": "int32"}}.get(name, {"scalar": 2.0} if name in SCALAR else {})
    count = 2 if name not in (*UNARY, *SCALAR, "Cast") else 1
    arrays = rows(1, *[(2, 3)] * count, low=0.5, high=2.5)

    def fn(called):
        return lambda F, *xs: operator(F, called)(*xs, **attrs)

    assert trace_rows(fn(alias), *arrays).instrs == trace_rows(fn(name), *arrays).instrs
    check_op(fn(alias), *arrays)


# ---- cast, clip, where -----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"])
@pytest.mark.parametrize("source", ["float16", "float32", "float64", "uint8", "int8", "int32", "int64"])
def test_cast(source, target):
    x, = rows(3, (2, 3), dtype=source, low=0 if "uint8" in (source, target) else -100, high=100)
    check_op(lambda F, x: F.cast(x, dtype=target), x, grad="int" not in source + target,
             tol=dict(rtol=2e-3, atol=1e-3) if "16" in source + target else None)


@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds, low=st.sampled_from([-2.0, -0.5, 0.0]),
       width=st.sampled_from([0.0, 0.5, 2.0]))
def test_clip(shape, dtype, shared, seed, low, width):
    x, = rows(seed, shape, dtype=dtype, shared=shared, among=NICE)
    check_op(lambda F, x: F.clip(x, low, low + width), x, shared=shared)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clip_of_odd_numbers(dtype):
    def fn(F, x):
        return F.clip(x, -1.5, 1.0)

    check_op(fn, np.stack([ODD] * ROWS).astype(dtype), grad=False)
    check_op(fn, np.stack([NUMBERS] * ROWS).astype(dtype))


@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(3), seed=seeds, whole=st.booleans(),
       condition_dtype=st.sampled_from(["float32", "float64", "int32"]))
def test_where(shape, dtype, shared, seed, whole, condition_dtype):
    """The condition has the shape of the data, or is a vector along its first axis."""
    c, x, y = rows(seed, shape if whole else shape[:1], shape, shape, dtype=dtype, shared=shared, among=[-1, 0, 0, 0.5])
    check_op(lambda F, c, x, y: F.where(c, x, y), np.ceil(c).astype(condition_dtype), x, y, shared=shared)


def test_where_takes_nothing_from_the_other_side():
    """Neither values nor gradients of the side that was not chosen get through, not even nan; nan chooses as true."""
    c, x, y = (np.stack([v] * ROWS).astype("float32")
               for v in ([1, 0, np.nan, -np.inf], [1, np.nan, 2, 3], [np.inf, 2, np.nan, np.nan]))
    check_op(lambda F, c, x, y: F.where(c, x, y), c, x, y)


# ---- activations -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh", "softrelu", "softsign"])
@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds)
def test_activation(kind, shape, dtype, shared, seed):
    x, = rows(seed, shape, dtype=dtype, shared=shared, low=-4, high=4)
    check_op(lambda F, x: F.Activation(x, act_type=kind), x, shared=shared)


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh", "softrelu", "softsign"])
def test_activation_of_odd_numbers(kind):
    """Without nan: of it MXNet's relu makes 0 in float32 and nan in float64."""
    check_op(lambda F, x: F.Activation(x, act_type=kind), np.stack([NUMBERS] * ROWS).astype("float32"))


@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds,
       alpha_beta=st.sampled_from([(0.2, 0.5), (0.5, 0.5), (0.25, 0.0)]))
def test_hard_sigmoid(shape, dtype, shared, seed, alpha_beta):
    x, = rows(seed, shape, dtype=dtype, shared=shared, among=2 * NICE)      # many meet a bound exactly
    alpha, beta = alpha_beta
    check_op(lambda F, x: F.hard_sigmoid(x, alpha=alpha, beta=beta), x, shared=shared, tol=SINGLE)


@pytest.mark.parametrize("kind", ["leaky", "elu", "selu", "gelu"])
@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds, slope=st.sampled_from([0.0, 0.01, 0.25, 1.0]))
def test_leaky_relu(kind, shape, dtype, shared, seed, slope):
    x, = rows(seed, shape, dtype=dtype, shared=shared, among=NICE)
    check_op(lambda F, x: F.LeakyReLU(x, act_type=kind, slope=slope), x, shared=shared, tol=SINGLE)


@pytest.mark.parametrize("kind", ["leaky", "elu", "selu", "gelu"])
def test_leaky_relu_of_odd_numbers(kind):
    x = np.stack([NUMBERS[NUMBERS != 1e-30]] * ROWS)        # of that one MXNet's float32 elu takes the wrong slope
    for dtype in ("float32", "float64"):
        check_op(lambda F, x: F.LeakyReLU(x, act_type=kind), x.astype(dtype), tol=SINGLE)


@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(2), seed=seeds, data=st.data())
def test_prelu(shape, dtype, shared, seed, data):
    """A slope for all, one per channel (axis 1), or a matrix of them."""
    options = [(1,), shape[1:2] or shape]
    if len(shape) == 2:
        options += [shape, (1, shape[1]), (shape[0], 1), shape[:1]]
    x, gamma = rows(seed, shape, data.draw(st.sampled_from(options)), dtype=dtype, shared=shared)
    check_op(lambda F, x, gamma: F.LeakyReLU(x, gamma, act_type="prelu"), x, gamma, shared=shared, tol=SINGLE)


@few
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds)
def test_rrelu_predicts_with_the_mean_slope(shape, dtype, shared, seed):
    """In training MXNet itself dies of it on a CPU: see test_ops_random.py."""
    x, = rows(seed, shape, dtype=dtype, shared=shared)
    check_op(lambda F, x: F.LeakyReLU(x, act_type="rrelu", lower_bound=0.1, upper_bound=0.4)[0], x, shared=shared,
             grad=False, train_mode=False, tol=SINGLE)


# ---- whole numbers ---------------------------------------------------------------------------

INTEGER = [
    "x + y", "x - y", "x * y", "x % y", "x > y", "x == y", "F.maximum(x, y)", "F.minimum(x, y)", "x + 2", "x - 1.5",
    "3 - x", "x * 1.5", "x / 2", "x % 2", "x > 1.5", "x <= 2", "-x", "abs(x)", "x ** 2", "F.clip(x, -1.5, 2.5)",
    "F.sign(x)", "F.where(x > 0, x, y)", "F.add_n(x, y, x)", "F.square(x)", "F.relu(x)", "x.ones_like()",
]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("expression", INTEGER)
def test_whole_numbers_stay_whole(expression, dtype):
    """The result has the operands' dtype; a fraction in a scalar is cut off."""
    x, y = rows(4, (2, 3), (2, 3), dtype=dtype, among=[-3, -2, -1, 1, 2, 5])
    check_op(eval(f"lambda F, x, y: {expression}"), x, y, fixed=(0, 1), grad=False)


# ---- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fn, sizes, said", [
    (lambda F, x, y: x + y, [(2, 3), (3, 2)], "broadcast_add: shapes (2, 3) and (3, 2) do not broadcast"),
    (lambda F, x, y: F.elemwise_mul(x, y), [(2, 3), (1, 3)], "elemwise_mul: shapes (2, 3) and (1, 3) differ"),
    (lambda F, x, y: x + y.astype("float64"), [(2,), (2,)], "operands of dtype float32 and float64"),
    (lambda F, x, y: F.where(x, x, y), [(2, 3), (2, 2)], "where: x is row float32[2, 3], y is row float32[2, 2]"),
    (lambda F, x, y: F.where(x, x, y.astype("int32")), [(2,), (2,)], "y is row int32[2]"),
    (lambda F, x, y: F.where(x, y, y), [(3,), (2, 3)], "the condition has shape (3,); it wants (2, 3) or (2,)"),
    (lambda F, x, y: F.add_n(x, y), [(2, 3), (3,)], "shapes (2, 3) and (3,) differ"),
    (lambda F, x: F.Activation(x, act_type="mish"), [(2,)], "act_type 'mish' is none of"),
    (lambda F, x: F.LeakyReLU(x, act_type="mish"), [(2,)], "act_type 'mish' is none of"),
    (lambda F, x, y: F.LeakyReLU(x, y, act_type="elu"), [(2,), (1,)], "act_type 'elu' with 2 operands"),
    (lambda F, x: F.LeakyReLU(x, act_type="prelu"), [(2,)], "act_type 'prelu' with 1 operands"),
    (lambda F, x, y: F.LeakyReLU(x, y, act_type="prelu"), [(2, 3, 4), (4,)], "slopes of shape (4,) do not broadcast"),
    (lambda F, x: F.Activation(x), [(2,)], "Activation: attribute 'act_type' is missing"),
])
def test_what_does_not_fit(fn, sizes, said):
    with pytest.raises(ProgramError, match=re.escape(said)):
        trace_rows(fn, *rows(0, *sizes))


def test_in_place_must_keep_the_shape():
    def fn(F, x, y):
        z = x * 1
        z += y
        return z

    with pytest.raises(ProgramError, match=re.escape("cannot write shape (2, 3) into (3,)")):
        trace_rows(fn, *rows(0, (3,), (2, 3)))


def test_out_must_be_an_array_of_the_trace():
    target = mx.nd.zeros((3,))
    with pytest.raises(TraceError, match="writes into an outside array"):
        trace_rows(lambda F, x: F.relu(x, out=target), *rows(0, (3,)))
