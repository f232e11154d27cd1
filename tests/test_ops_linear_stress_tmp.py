"""Matrix products, against MXNet: each operand stacked or shared, transposed or not."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import dtypes, operator, rows, seeds, shapes, subsets
from op_check import check_op, trace_rows

from cavs_core import ProgramError
from cavs_core.mxnet_compat import gluon, mx
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = ("FullyConnected", "dot", "batch_dot", "_linalg_gemm2", "_linalg_gemm",
          "matmul", "batch_matmul")          # what the others are made of
flags = st.fixed_dictionaries({"transpose_a": st.booleans(), "transpose_b": st.booleans()})
sizes = st.integers(1, 5)
some = settings(max_examples=400, derandomize=False)


def matrices(lead, m, k, n, attrs):
    """Shapes of two stacks of matrices whose product is (*lead, m, n)."""
    return ((*lead, k, m) if attrs["transpose_a"] else (*lead, m, k),
            (*lead, n, k) if attrs["transpose_b"] else (*lead, k, n))


def ops_of(program):
    return {instr.op for instr in program.instrs} - {"Reshape"}


# ---- dot -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes_y", [1, 2, 3, 4])
@pytest.mark.parametrize("axes_x", [1, 2, 3, 4])
@settings(max_examples=100, derandomize=False)
@given(attrs=flags, k=sizes, data=st.data(), dtype=dtypes, shared=subsets(2), seed=seeds)
def test_dot(axes_x, axes_y, attrs, k, data, dtype, shared, seed):
    """The last axis of x with the first of y; transposed, the first of x, the last of y."""
    if axes_x == axes_y == 1:
        attrs = {}
    x = list(data.draw(shapes(axes_x, axes_x, 3)))
    y = list(data.draw(shapes(axes_y, axes_y, 3)))
    x[0 if attrs.get("transpose_a") else -1] = k
    y[-1 if attrs.get("transpose_b") else 0] = k
    arrays = rows(seed, tuple(x), tuple(y), dtype=dtype, shared=shared)
    program = check_op(lambda F, x, y: F.dot(x, y, **attrs), *arrays, shared=shared)
    assert ops_of(program) == {"matmul"}


@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1)])
def test_products_inside_larger_functions(shared):
    """The sum over rows of a shared operand's gradient is made at once only if nobody else wants the product."""
    def fn(F, x, y):
        z = F.dot(x, y)
        w = F.dot(z, y, transpose_b=True) * x
        return w, F.dot(F.tanh(w), y) + z

    check_op(fn, *rows(5, (4, 4), (4, 4), shared=shared, low=-1, high=1), shared=shared)


# ---- stacks of matrices ----------------------------------------------------------------------


@some
@given(lead=shapes(1, 3, 3), m=sizes, k=sizes, n=sizes, attrs=flags, dtype=dtypes, shared=subsets(2), seed=seeds)
def test_batch_dot(lead, m, k, n, attrs, dtype, shared, seed):
    arrays = rows(seed, *matrices(lead, m, k, n, attrs), dtype=dtype, shared=shared)
    program = check_op(lambda F, x, y: F.batch_dot(x, y, **attrs), *arrays, shared=shared)
    assert ops_of(program) == {"batch_matmul"}


@pytest.mark.parametrize("name", ["linalg_gemm2", "linalg.gemm2"])
@some
@given(lead=shapes(0, 2, 3), m=sizes, k=sizes, n=sizes, attrs=flags, alpha=st.sampled_from([1.0, -0.5]), dtype=dtypes,
       shared=subsets(2), seed=seeds)
def test_gemm2(name, lead, m, k, n, attrs, alpha, dtype, shared, seed):
    arrays = rows(seed, *matrices(lead, m, k, n, attrs), dtype=dtype, shared=shared)

    def fn(F, x, y):
        return (F.linalg_gemm2 if name == "linalg_gemm2" else F.linalg.gemm2)(x, y, alpha=alpha, **attrs)

    check_op(fn, *arrays, shared=shared)


@some
@given(lead=shapes(0, 2, 3), m=sizes, k=sizes, n=sizes, attrs=flags, alpha=st.sampled_from([1.0, -0.5]),
       beta=st.sampled_from([0.0, 1.0, 2.5]), dtype=dtypes, shared=subsets(3), seed=seeds)
def test_gemm(lead, m, k, n, attrs, alpha, beta, dtype, shared, seed):
    arrays = rows(seed, *matrices(lead, m, k, n, attrs), (*lead, m, n), dtype=dtype, shared=shared)
    check_op(lambda F, x, y, c: F.linalg_gemm(x, y, c, alpha=alpha, beta=beta, **attrs), *arrays, shared=shared)


@pytest.mark.parametrize("axis", [0, 1, 2, -4, -3, -2])
@settings(max_examples=60, derandomize=False)
@given(m=sizes, k=sizes, n=sizes, attrs=flags, shared=subsets(3), seed=seeds)
def test_rows_of_the_matrices_on_another_axis(axis, m, k, n, attrs, shared, seed):
    def moved(shape):
        return tuple(np.moveaxis(np.empty(shape), -2, axis).shape)

    x, y = matrices((2, 3), m, k, n, attrs)
    arrays = rows(seed, moved(x), moved(y), moved((2, 3, m, n)), shared=shared)
    check_op(lambda F, x, y, c: F.linalg_gemm(x, y, c, axis=axis, **attrs), *arrays, shared=shared)
    if 2 not in shared:
        check_op(lambda F, x, y: F.linalg_gemm2(x, y, axis=axis, **attrs), *arrays[:2], shared=shared)


# ---- FullyConnected --------------------------------------------------------------------------


@some
@given(shape=shapes(2, 4), flatten=st.booleans(), bias=st.booleans(), units=sizes, dtype=dtypes, shared=subsets(3),
       seed=seeds)
def test_fully_connected(shape, flatten, bias, units, dtype, shared, seed):
    weight = (units, int(np.prod(shape[1:])) if flatten else shape[-1])
    arrays = rows(seed, shape, weight, (units,), dtype=dtype, shared=shared)
    shared = tuple(i for i in shared if i < 2 or bias)
    check_op(lambda F, *xs: F.FullyConnected(*xs, num_hidden=units, no_bias=not bias, flatten=flatten),
             *arrays[:2 + bias], shared=shared)


@settings(max_examples=100, derandomize=False)
@given(size=sizes, units=sizes, shared=subsets(3), seed=seeds)
def test_fully_connected_of_a_vector(size, units, shared, seed):
    arrays = rows(seed, (size,), (units, size), (units,), shared=shared)
    check_op(lambda F, *xs: F.FullyConnected(*xs, num_hidden=units, flatten=False), *arrays, shared=shared)


def test_dense_is_one_product():
    """All rows and one weight: one product forward, whatever the number of rows."""
    dense = gluon.nn.Dense(4, in_units=3, activation="tanh")
    dense.initialize()
    program = trace(dense, Spec((1, 3), "float32"))
    assert [instr.op for instr in program.instrs] == ["matmul", "Reshape", "broadcast_add", "tanh"]


# ---- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, sizes, attrs, said", [
    ("dot", [(2, 3), (4, 2)], {}, "a product of float32[2, 3] (transposed: False) and float32[4, 2]"),
    ("dot", [(2, 3), (3, 2)], {"transpose_a": True}, "a product of float32[2, 3] (transposed: True)"),
    ("batch_dot", [(2, 3), (3, 2)], {}, "batch_dot: shapes (2, 3) and (3, 2) do not fit"),
    ("batch_dot", [(4, 2, 3), (5, 3, 2)], {}, "batch_dot: shapes (4, 2, 3) and (5, 3, 2) do not fit"),
    ("batch_dot", [(4, 2, 3), (4, 2, 3)], {}, "a product of float32[4, 2, 3]"),
    ("linalg_gemm2", [(3,), (3, 2)], {}, "_linalg_gemm2(row float32[3], row float32[3, 2]; {})"),
    ("linalg_gemm", [(2, 3), (3, 2), (2, 1)], {}, "C has shape (2, 1), the product (2, 2)"),
    ("FullyConnected", [(2, 3), (4, 2), (4,)], {"num_hidden": 4}, "weight (4, 2) does not fit input (2, 3)"),
    ("FullyConnected", [(2, 3), (4, 3), (3,)], {"num_hidden": 4}, "with bias (3,)"),
    ("FullyConnected", [(2, 3), (4, 3)], {"num_hidden": 4}, "no_bias=False with bias None"),
    ("FullyConnected", [(2, 3), (4, 3), (4,)], {"num_hidden": 4, "no_bias": True}, "no_bias=True with bias (4,)"),
])
def test_what_does_not_fit(name, sizes, attrs, said):
    with pytest.raises(ProgramError, match=re.escape(said)):
        trace_rows(lambda F, *xs: operator(F, name)(*xs, **attrs), *rows(0, *sizes))


def test_dtypes_must_be_equal():
    with pytest.raises(ProgramError, match=re.escape("float32[2, 2] (transposed: False) and float64[2, 2]")):
        trace_rows(lambda F, x: mx.nd.dot(x, x.astype("float64")), *rows(0, (2, 2)))
