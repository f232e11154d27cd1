"""Lookups on many rows at once, against MXNet sample by sample. Repeated indices add up in the gradient."""

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
    "take", "Embedding", "_contrib_SparseEmbedding", "_sparse_Embedding", "gather_nd", "one_hot", "pick",
    "choose_element_0index", "batch_take",
    # what these are written in
    "lookup", "lookup_per_row", "scatter_rows", "pick_plain",
)


def test_aliases_are_mxnets():
    check_aliases(COVERS)


@given(st.data())
def test_take(data):
    """Indices of any number of axes, beyond both ends."""
    case = Case(data)
    shape = case.operand(case.shape())
    axis, mode = case.axis(shape), case.pick("clip", "wrap")
    size = shape[axis]
    case.index(case.shape(1, 2), -size - 2, 2 * size + 2, dtypes=("int32", case.dtype))
    case.check(case.pick(lambda F, x, i: F.take(x, i, axis=axis, mode=mode),
                         lambda F, x, i: x.take(i, axis=axis, mode=mode)))


def test_take_of_repeated_indices_adds_up_the_gradients():
    x = np.random.randn(ROWS, 4, 2).astype("float32")
    index = np.array([[0, 0, 3, 0, 3]] * ROWS, "float32")
    for shared in ((), (0,), (1,), (0, 1)):
        args = [a[0] if i in shared else a for i, a in enumerate((x, index))]
        check_op(lambda F, x, i: F.take(x, i), *args, shared=shared, fixed=(1,))


@pytest.mark.parametrize("mode", ["clip", "wrap"])
def test_take_cuts_off_fractions(mode):
    x = np.random.randn(ROWS, 4).astype("float32")
    index = np.array([[-1.5, -0.5, 0.5, 1.9, 3.9, 4.1]] * ROWS, "float32")
    check_op(lambda F, x, i: F.take(x, i, mode=mode), x, index, fixed=(1,))
    check_op(lambda F, x, i: F.pick(x, i[:1], axis=0, mode=mode), x, index, fixed=(1,))


def test_take_in_mode_raise_is_refused():
    with pytest.raises(ProgramError, match="'raise' is not supported; use 'clip' or 'wrap'"):
        trace(lambda F, x, i: F.take(x, i, mode="raise"), Spec((3,), "float32"), Spec((2,), "int32"))


@given(st.data())
def test_embedding(data):
    case = Case(data)
    size, width = case.integer(1, 5), case.integer(1, 4)
    case.index(case.shape(1, 3), -2, size + 1, dtypes=("int32", case.dtype))
    case.operand((size, width))
    a = dict(input_dim=size, output_dim=width, dtype=case.dtype)
    case.check(case.pick(lambda F, i, w: F.Embedding(i, w, **a), lambda F, i, w: F.sparse.Embedding(i, w, **a)))


def test_embedding_with_a_sparse_gradient():
    """The gradient is the same; MXNet stores it sparse."""
    index, table = np.array([[0, 2, 2]] * ROWS, "float32"), np.random.randn(4, 3).astype("float32")
    check_op(lambda F, i, w: F.Embedding(i, w, input_dim=4, output_dim=3, sparse_grad=True),
             index, table, shared=(1,), fixed=(0,), grad=False)
    check_op(lambda F, i, w: F.contrib.SparseEmbedding(i, w, input_dim=4, output_dim=3),
             index, table, shared=(1,), fixed=(0,), grad=False)


def test_embedding_whose_weight_does_not_fit():
    with pytest.raises(ProgramError, match=r"weight \(4, 3\) is not \(5, 3\)"):
        trace(lambda F, i, w: F.Embedding(i, w, 5, 3), Spec((2,), "int32"), Spec((4, 3), "float32"))


@given(st.data())
def test_gather_nd(data):
    case = Case(data)
    shape = case.operand(case.shape())
    coordinates = case.integer(1, len(shape))
    rest = case.shape(1, 2)
    low = case.pick(0, -min(shape))
    case.index((coordinates, *rest), low, min(shape) - 1, dtypes=("int32", "int64", "float32"))
    case.check(lambda F, x, i: F.gather_nd(x, i), grad=low == 0)       # MXNet crashes in the gradient of negative ones


def test_gather_nd_that_does_not_fit():
    for index in ((3, 2), (2,)):
        with pytest.raises(ProgramError, match="gather_nd"):
            trace(lambda F, x, i: F.gather_nd(x, i), Spec((4, 3), "float32"), Spec(index, "int32"))


@given(st.data())
def test_one_hot(data):
    """Indices out of range give a row of off values."""
    case = Case(data)
    depth = case.integer(1, 4)
    case.index(case.shape(1, 3), -2, depth + 1, dtypes=("int32", "int64", "float32"))
    a = dict(depth=depth, on_value=case.pick(1.0, 2.5), off_value=case.pick(0.0, -1.0),
             dtype=case.pick("float32", "float64", "int32"))
    case.check(case.pick(lambda F, i: F.one_hot(i, **a), lambda F, i: i.one_hot(**a)), grad=False)


def test_one_hot_cuts_off_fractions():
    check_op(lambda F, i: F.one_hot(i, depth=3), np.array([[-0.5, 0.7, 2.9, 3.0]] * ROWS, "float32"))


@given(st.data())
def test_pick(data):
    case = Case(data)
    shape = case.operand(case.shape())
    axis, keepdims, mode = case.axis(shape), case.pick(True, False), case.pick("clip", "wrap")
    kept = list(shape)
    kept[axis] = 1
    dropped = tuple(n for i, n in enumerate(shape) if i != axis % len(shape)) or (1,)
    case.index(case.pick(dropped, kept), -shape[axis] - 1, 2 * shape[axis], dtypes=("int32", "int64", "float32"))
    a = dict(axis=axis, keepdims=keepdims, mode=mode)
    case.check(case.pick(lambda F, x, i: F.pick(x, i, **a), lambda F, x, i: x.pick(i, **a),
                         lambda F, x, i: F.choose_element_0index(x, i, **a)))


def test_pick_that_does_not_fit():
    with pytest.raises(ProgramError, match="does not fit data"):
        trace(lambda F, x, i: F.pick(x, i), Spec((2, 3), "float32"), Spec((3,), "int32"))


@given(st.data())
def test_batch_take(data):
    """MXNet has no gradient for it; written as a pick it has one."""
    case = Case(data)
    rows, columns = case.operand(case.shape(2, 2))
    case.index((rows,), -2, columns + 1)
    case.check(lambda F, x, i: F.batch_take(x, i), grad=False)
