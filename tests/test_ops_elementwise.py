"""Elementwise ops, activations, where, clip and casts, against MXNet."""

import operator as python

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import broadcast_pairs, dtypes, operator, rows, seeds, shapes, subsets
from op_check import ROWS, check_op

from cavs_core.mxnet_compat import mx

# MXNet holds a constant or an attribute of these in single precision, whatever the dtype.
SINGLE = dict(rtol=3e-5, atol=3e-6)
few = settings(max_examples=100)

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
    "softrelu", "selu", "digamma",          # what Activation, LeakyReLU and the gradient of gammaln are made of
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
@given(shape=shapes(), shared=subsets(1), seed=seeds, scale=st.sampled_from([1.0, 2.5]), thresh=st.sampled_from([-1.0, 0.0, 0.5, 3.0]),
       normalization=st.sampled_from(["null", "batch", "valid"]))
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
      ("add", "subtract", "multiply", "divide", "modulo", "power", "maximum", "minimum", "equal", "not_equal", "greater",
       "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or", "logical_xor")
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

ALIASES = {
    "identity": "_copy", "stop_gradient": "BlockGrad", "cast": "Cast", "ElementWiseSum": "add_n",
    "broadcast_plus": "broadcast_add", "broadcast_minus": "broadcast_sub",
    **{alias: name for name, (alias, _) in ()},
}
