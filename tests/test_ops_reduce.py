"""Reductions and softmax on many rows at once, against MXNet sample by sample."""

import numpy as np
import pytest
from drawn_op import Case, check_aliases
from hypothesis import given
from hypothesis import strategies as st
from op_check import ROWS, check_op

from cavs_core.errors import ProgramError
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = (
    "sum", "sum_axis", "mean", "max", "max_axis", "min", "min_axis", "prod", "norm", "argmax", "argmin", "softmax",
    "log_softmax", "softmin", "SoftmaxActivation",
    # what these are written in
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "l2_norm", "reduce_argmax", "reduce_argmin",
    "softmax_plain", "log_softmax_plain", "log_softmax_grad",
)


def test_aliases_are_mxnets():
    check_aliases(COVERS)


# ---- reductions ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "sum_axis", "max_axis", "min_axis"])
@given(st.data())
def test_reduction(name, data):
    case = Case(data)
    shape = case.operand(case.shape(), values="positive" if name == "prod" else case.pick("normal", "ties"))
    a = dict(axis=case.pick(case.axes(shape), ()), keepdims=case.pick(True, False), exclude=case.pick(True, False))
    calls = [lambda F, x: getattr(F, name)(x, **a)]
    if not name.endswith("_axis"):
        calls.append(lambda F, x: getattr(x, name)(**a))
    case.check(case.pick(*calls))


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reduction_of_whole_numbers(name):
    x = np.random.randint(-5, 5, (ROWS, 2, 3)).astype("int32")
    check_op(lambda F, x: getattr(F, name)(x, axis=1), x, grad=False)


def test_every_element_that_equals_the_extreme_gets_the_gradient():
    x = np.array([[[1, 2, 2], [3, 3, 3]]] * ROWS, "float32")
    for name in ("max", "min"):
        check_op(lambda F, x, name=name: getattr(F, name)(x, axis=1), x)


def test_product_with_a_zero_has_mxnets_gradient():
    """MXNet divides the product by the element: not a number at the zero itself."""
    x = np.array([[[1, 0, 2], [3, 3, 3]]] * ROWS, "float32")
    check_op(lambda F, x: F.prod(x, axis=1), x)


def test_chained_reductions():
    x = np.random.randn(ROWS, 2, 3, 4).astype("float32")
    check_op(lambda F, x: (x - x.mean(axis=(0, 2), keepdims=True)).square().sum(axis=1).max(), x)


@given(st.data())
def test_norm(data):
    case = Case(data)
    shape = case.operand(case.shape())
    a = dict(ord=case.pick(1, 2), axis=case.axes(shape), keepdims=case.pick(True, False))
    case.check(case.pick(lambda F, x: F.norm(x, **a), lambda F, x: x.norm(**a)))


def test_norm_of_zeros_has_mxnets_gradient():
    x = np.array([[[0, 0, 0], [3, 0, 4]]] * ROWS, "float32")
    for order in (1, 2):
        check_op(lambda F, x, order=order: F.norm(x, ord=order, axis=1), x)


def test_norm_that_mxnet_cannot_compute_either():
    for attributes in (dict(ord=3), dict(out_dtype="float64")):
        with pytest.raises(ProgramError, match="norm: ord=.* is not supported"):
            trace(lambda F, x, a=attributes: F.norm(x, axis=0, **a), Spec((2, 3), "float32"))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@given(st.data())
def test_index_of_the_extreme(name, data):
    case = Case(data, dtypes=("float32", "float64", "int32"))
    shape = case.operand(case.shape(), values=case.pick("normal", "ties"))
    a = dict(axis=case.pick(None, case.axis(shape)), keepdims=case.pick(True, False))
    case.check(case.pick(lambda F, x: getattr(F, name)(x, **a), lambda F, x: getattr(x, name)(**a)),
               grad=case.dtype != "int32")


def test_axis_that_is_not_there():
    for call in (lambda F, x: F.sum(x, axis=2), lambda F, x: F.argmax(x, axis=-3), lambda F, x: F.softmax(x, axis=2)):
        with pytest.raises(ProgramError, match="axis .* is out of range for 2 dimensions"):
            trace(call, Spec((2, 3), "float32"))


# ---- softmax ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
@given(st.data())
def test_softmax(name, data):
    case = Case(data)
    shape = case.operand(case.shape())
    a = dict(axis=case.axis(shape), temperature=case.pick(None, 0.5, 1.0, 2.0))
    case.check(case.pick(lambda F, x: getattr(F, name)(x, **a), lambda F, x: getattr(x, name)(**a)))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin"])
def test_softmax_of_large_numbers(name):
    x = (np.random.randn(ROWS, 2, 5) * 1000).astype("float32")
    check_op(lambda F, x: getattr(F, name)(x), x)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_in_another_dtype(name):
    x = np.random.randn(ROWS, 2, 5).astype("float32")
    check_op(lambda F, x: getattr(F, name)(x, dtype="float64"), x, tol=dict(rtol=1e-5, atol=1e-6))


def test_softmax_with_lengths_is_refused():
    with pytest.raises(ProgramError, match="use_length=True is not supported; mask"):
        trace(lambda F, x, n: F.softmax(x, n, use_length=True), Spec((2, 3), "float32"), Spec((2,), "int32"))


@given(st.data())
def test_softmax_activation(data):
    case = Case(data, dtypes=("float32",))          # the only one that MXNet has
    mode = case.pick("instance", "channel")
    case.operand(case.shape(3) if mode == "channel" else case.shape(2, 2))
    case.check(lambda F, x: F.SoftmaxActivation(x, mode=mode))


def test_softmax_activation_with_a_gradient_that_is_not_its_own():
    """Over more than two axes MXNet's gradient is not that of its value; such a call is left to MXNet."""
    with pytest.raises(ProgramError, match="use softmax"):
        trace(lambda F, x: F.SoftmaxActivation(x), Spec((2, 3, 4), "float32"))
