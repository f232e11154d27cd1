"""Normalisations and SoftmaxOutput on many rows at once, against MXNet sample by sample."""

import numpy as np
import pytest
from drawn_op import Case, check_aliases
from hypothesis import given
from hypothesis import strategies as st
from op_check import ROWS, check_op

from cavs_core.errors import ProgramError
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = ("LayerNorm", "BatchNorm", "InstanceNorm", "GroupNorm", "L2Normalization", "SoftmaxOutput", "Softmax",
          "softmax_loss")

EPS = (1e-5, 1e-3, 0.1)
SINGLE = dict(rtol=2e-5, atol=2e-6)         # MXNet keeps the attributes in single precision
TOLERANCE = dict(rtol=2e-3, atol=2e-4)      # small variances: the two orders of summation differ


def test_aliases_are_mxnets():
    check_aliases(COVERS)


@given(st.data())
def test_layer_norm(data):
    case = Case(data)
    shape = case.operand(case.shape())
    axis, eps = case.axis(shape), case.pick(*EPS)
    case.operand((shape[axis],))
    case.operand((shape[axis],))
    case.check(lambda F, x, g, b: F.LayerNorm(x, g, b, axis=axis, eps=eps), tol=TOLERANCE)


@given(st.data())
def test_batch_norm_with_running_statistics(data):
    case = Case(data)
    train_mode = case.pick(True, False)
    shape = case.operand(case.shape(2))
    a = dict(axis=case.axis(shape), eps=case.pick(*EPS), fix_gamma=case.pick(True, False), momentum=0.5,
             use_global_stats=train_mode or case.pick(True, False))
    for _ in range(3):
        case.operand((shape[a["axis"]],))
    case.operand((shape[a["axis"]],), values="positive")
    case.fixed += [3, 4]
    case.check(lambda F, *xs: F.BatchNorm(*xs, **a), tol=SINGLE, train_mode=train_mode)


@given(st.data())
def test_instance_norm(data):
    case = Case(data, dtypes=("float32",))          # the only one that MXNet has
    shape, eps = case.operand(case.shape(3)), case.pick(*EPS)
    case.operand(shape[1:2])
    case.operand(shape[1:2])
    case.check(lambda F, x, g, b: F.InstanceNorm(x, g, b, eps=eps), tol=TOLERANCE)


@given(st.data())
def test_group_norm(data):
    case = Case(data)
    groups, eps = case.integer(1, 3), case.pick(*EPS)
    samples, channels, *rest = case.shape(3)
    case.operand((samples, channels * groups, *rest))
    case.operand((groups,))
    case.operand((groups,))
    case.check(lambda F, x, g, b: F.GroupNorm(x, g, b, num_groups=groups, eps=eps), tol=TOLERANCE)


@given(st.data())
def test_l2_normalization(data):
    case = Case(data)
    mode, eps = case.pick("instance", "channel", "spatial"), case.pick(1e-10, 1e-3)
    case.operand(case.shape(1 if mode == "instance" else 3))
    # Where a norm is small, the two terms of the gradient are large and cancel: in float32 that costs digits.
    tol = dict(rtol=2e-3, atol=3e-4) if case.dtype == "float32" else dict(rtol=2e-4, atol=2e-5)
    case.check(lambda F, x: F.L2Normalization(x, mode=mode, eps=eps), tol=tol)


@pytest.mark.parametrize("call", [
    lambda F, x, g: F.LayerNorm(x, g, g, output_mean_var=True),
    lambda F, x, g: F.BatchNorm(x, g, g, g, g, output_mean_var=True), lambda F, x, g: F.InstanceNorm(x, g, g),
    lambda F, x, g: F.GroupNorm(x, g, g, num_groups=2), lambda F, x, g: F.L2Normalization(x, mode="channel"),
    lambda F, x, g: F.SoftmaxOutput(x, g, out_grad=True), lambda F, x, g: F.SoftmaxOutput(x.expand_dims(2), g)])
def test_what_is_not_supported(call):
    with pytest.raises(ProgramError, match="not support|wants|does not fit|want multi"):
        trace(call, Spec((2, 3), "float32"), Spec((3,), "float32"))


# ---- SoftmaxOutput ---------------------------------------------------------------------------


def softmax_output_attributes(case):
    return dict(grad_scale=case.pick(1.0, 0.5), normalization=case.pick("null", "batch", "valid"),
                use_ignore=case.pick(True, False), ignore_label=case.pick(-1, 1), smooth_alpha=case.pick(0.0, 0.125))


@given(st.data())
def test_softmax_output(data):
    """The gradient is softmax - target, whatever comes from above."""
    case = Case(data)
    samples, classes = case.operand([n + 1 for n in case.shape(2, 2)])
    case.index((samples,), -1, classes - 1, dtypes=(case.dtype,))
    a = softmax_output_attributes(case)
    case.check(case.pick(lambda F, x, y: F.SoftmaxOutput(x, y, **a), lambda F, x, y: F.Softmax(x, y, **a)), tol=SINGLE)


@given(st.data())
def test_softmax_output_with_many_labels_a_sample(data):
    case = Case(data)
    samples, classes, *rest = case.operand([n + 1 for n in case.shape(2, 4, size=3)])
    case.index((samples, *rest), -1, classes - 1, dtypes=(case.dtype,))
    a = {**softmax_output_attributes(case), "multi_output": True, "preserve_shape": case.pick(True, False)}
    case.check(lambda F, x, y: F.SoftmaxOutput(x, y, **a), tol=SINGLE)


@given(st.data())
def test_softmax_output_over_the_last_axis(data):
    case = Case(data)
    *rest, classes = case.operand([n + 1 for n in case.shape(2, 4, size=3)])
    case.index(rest, -1, classes - 1, dtypes=(case.dtype,))
    a = {**softmax_output_attributes(case), "preserve_shape": True}
    case.check(lambda F, x, y: F.SoftmaxOutput(x, y, **a), tol=SINGLE)


@given(st.data())
def test_softmax_output_of_probabilities(data):
    case = Case(data)
    shape = case.operand(case.shape(2))
    case.operand(shape, values="positive")
    case.fixed.append(1)
    a = {**softmax_output_attributes(case), "multi_output": case.pick(True, False),
         "preserve_shape": case.pick(True, False)}
    case.check(lambda F, x, y: F.SoftmaxOutput(x, y, **a), tol=SINGLE)


def test_softmax_output_where_all_labels_are_ignored():
    x, y = np.random.randn(ROWS, 2, 3).astype("float32"), np.full((ROWS, 2), 1, "float32")
    check_op(lambda F, x, y: F.SoftmaxOutput(x, y, use_ignore=True, ignore_label=1, normalization="valid"), x, y,
             fixed=(1,))
