"""Concat, split, slices and indexing on many rows at once, against MXNet sample by sample."""

import math

import numpy as np
import pytest
from drawn_op import Case, check_aliases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from op_check import ROWS, check_op

from cavs_core.errors import ProgramError
from cavs_core.lazy import LazyArray
from cavs_core.mxnet_compat import autograd
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = (
    "Concat", "concat", "_rnn_param_concat", "stack", "SliceChannel", "split", "_split_v2", "slice", "crop",
    "slice_assign", "_slice_assign", "_crop_assign", "_slice_assign_scalar", "_crop_assign_scalar", "slice_axis",
    "slice_like", "reverse", "flip",
)


def test_aliases_are_mxnets():
    check_aliases(COVERS)


# ---- concat and split ------------------------------------------------------------------------


@given(st.data())
def test_concat(data):
    case = Case(data)
    shape = case.shape()
    dim = case.axis(shape)
    for _ in range(case.integer(1, 3)):
        part = list(shape)
        part[dim] = case.integer(1, 3)
        case.operand(part)
    case.check(case.pick(lambda F, *xs: F.concat(*xs, dim=dim), lambda F, *xs: F.Concat(*xs, dim=dim)))


@given(st.data())
def test_concat_of_rnn_parameters(data):
    case = Case(data)
    for _ in range(case.integer(2, 3)):
        case.operand(case.shape(1, 1))
    case.check(lambda F, *xs: F._internal._rnn_param_concat(*xs, dim=0))


def test_concat_of_operands_that_do_not_fit():
    with pytest.raises(ProgramError, match="Concat along 1"):
        trace(lambda F, x, y: F.concat(x, y, dim=1), Spec((2, 3), "float32"), Spec((3, 3), "float32"))
    with pytest.raises(ProgramError, match="Concat along 0"):
        trace(lambda F, x, y: F.concat(x, y, dim=0), Spec((2,), "float32"), Spec((2,), "float64"))


@given(st.data())
def test_stack(data):
    case = Case(data)
    shape = case.shape(1, 3)
    for _ in range(case.integer(1, 3)):
        case.operand(shape)
    axis = case.integer(-len(shape) - 1, len(shape))
    case.check(lambda F, *xs: F.stack(*xs, axis=axis))


@given(st.data())
def test_split(data):
    case = Case(data)
    shape = list(case.shape())
    axis, parts, squeeze = case.axis(shape), case.integer(1, 3), len(shape) > 1 and case.pick(True, False)
    shape[axis] = parts * (1 if squeeze else case.integer(1, 2))
    case.operand(shape)
    case.check(case.pick(
        lambda F, x: F.split(x, num_outputs=parts, axis=axis, squeeze_axis=squeeze),
        lambda F, x: F.SliceChannel(x, num_outputs=parts, axis=axis, squeeze_axis=squeeze),
        lambda F, x: x.split(num_outputs=parts, axis=axis, squeeze_axis=squeeze),
        lambda F, x: F.split_v2(x, parts, axis=axis, squeeze_axis=squeeze)))


def test_only_some_parts_of_a_split_are_used():
    x = np.random.randn(ROWS, 2, 6).astype("float32")
    check_op(lambda F, x: F.split(x, num_outputs=3, axis=1)[1], x)


def test_a_split_into_one_part_is_an_array():
    """As in MXNet, which gives a list only for two parts and more."""
    for split in (lambda F, x: F.split(x, num_outputs=1, axis=0)[1], lambda F, x: F.split_v2(x, 1, axis=0)[1]):
        check_op(split, np.random.randn(ROWS, 2, 3).astype("float32"))


@given(st.data())
def test_split_at_indices(data):
    case = Case(data)
    shape = list(case.shape())
    axis = case.axis(shape)
    shape[axis] = case.integer(2, 5)
    case.operand(shape)
    at = tuple(sorted(case.draw(st.lists(st.integers(1, shape[axis] - 1), unique=True, min_size=1))))
    case.check(case.pick(lambda F, x: F.split_v2(x, at, axis=axis), lambda F, x: x.split_v2(at, axis=axis)))


def test_split_that_does_not_divide():
    with pytest.raises(ProgramError, match="not divisible by 2"):
        trace(lambda F, x: F.split(x, num_outputs=2, axis=1), Spec((2, 3), "float32"))
    with pytest.raises(ProgramError, match="squeeze"):
        trace(lambda F, x: F.split(x, num_outputs=2, axis=1, squeeze_axis=True), Spec((2, 4), "float32"))


# ---- slices ----------------------------------------------------------------------------------


def range_of(case, size):
    """begin, end, step of a part that is not empty; each may be None, negative, or beyond the end."""
    step = case.pick(None, 1, 2, -1, -2)
    begin, end = sorted((case.integer(0, size - 1), case.integer(0, size - 1)))
    if step is not None and step < 0:
        begin, end = case.pick(end, end - size, None), case.pick(None, *[begin - 1] * (begin > 0))
    else:
        begin = case.pick(begin, begin - size, None)
        end = case.pick(end + 1, None, size + 3, *[end + 1 - size] * (end + 1 < size))
    return begin, end, step


@given(st.data())
def test_slice(data):
    case = Case(data)
    shape = case.operand(case.shape())
    ranges = [range_of(case, n) for n in shape[:case.integer(1, len(shape))]]
    begin, end, step = zip(*ranges)
    case.check(case.pick(lambda F, x: F.slice(x, begin=begin, end=end, step=step),
                         lambda F, x: F.crop(x, begin=begin, end=end, step=step),
                         lambda F, x: x.slice(begin=begin, end=end, step=step)))


@pytest.mark.parametrize("begin, end, step", [((1,), (1,), ()), ((0, 0, 0), (1, 1, 1), ()), ((0, 0), (1,), ()),
                                              ((0,), (2,), (0,)), ((5,), (9,), ())])
def test_slice_that_does_not_fit(begin, end, step):
    with pytest.raises(ProgramError, match="slice of"):
        trace(lambda F, x: F.slice(x, begin=begin, end=end, step=step), Spec((2, 3), "float32"))


@given(st.data())
def test_slice_axis(data):
    case = Case(data)
    shape = case.operand(case.shape())
    axis = case.axis(shape)
    begin = case.integer(0, shape[axis] - 1)
    end = case.integer(begin + 1, shape[axis])
    begin -= case.pick(0, shape[axis])
    end = case.pick(end, *[end - shape[axis]] * (end < shape[axis]), *[None] * (end == shape[axis]))
    case.check(case.pick(lambda F, x: F.slice_axis(x, axis=axis, begin=begin, end=end),
                         lambda F, x: x.slice_axis(axis, begin, end)))


@given(st.data())
def test_slice_like(data):
    case = Case(data)
    shape = case.operand(case.shape())
    like = case.operand([case.integer(1, n) for n in shape])
    axes = tuple(case.draw(st.lists(st.integers(-len(like), -1), unique=True)))
    case.check(case.pick(lambda F, x, y: F.slice_like(x, y, axes=axes), lambda F, x, y: x.slice_like(y, axes=axes)))


def test_slice_like_that_does_not_fit():
    for like, axes in (((3, 3), ()), ((2,), ()), ((2, 3, 1), ()), ((2,), (1,))):
        with pytest.raises(ProgramError, match="slice_like"):
            trace(lambda F, x, y, a=axes: F.slice_like(x, y, axes=a), Spec((2, 3), "float32"), Spec(like, "float32"))


@given(st.data())
def test_slice_assign(data):
    """MXNet has no gradient for it; written with a mask and scatter_nd it has one."""
    case = Case(data)
    shape = case.operand(case.shape())
    begin, end, step = zip(*[range_of(case, n) for n in shape])
    where = dict(begin=begin, end=end, step=step)
    at = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(*r) for r in zip(begin, end, step))]
    case.operand(at.shape)
    outside = np.ones(math.prod(shape))
    outside[at] = 0

    def assign(F, x, y):
        if isinstance(x, LazyArray):
            return F._internal._slice_assign(x, y, **where)
        index = F.array(at.reshape(1, -1), dtype="int32")
        placed = F.scatter_nd(y.reshape(-1), index, shape=(x.size,)) + x.reshape(-1) * F.array(outside, dtype=x.dtype)
        return placed.reshape(x.shape)
    case.check(assign)
    case.check(case.pick(lambda F, x, y: F._internal._slice_assign_scalar(x, scalar=2.5, **where),
                         lambda F, x, y: F._internal._crop_assign_scalar(x, scalar=2.5, **where),
                         lambda F, x, y: F._internal._crop_assign(x, y, **where)), grad=False)


@given(st.data())
def test_setting_parts_in_place(data):
    case = Case(data)
    shape = case.operand([n + 1 for n in case.shape(2)])
    case.operand(shape[1:])

    def fn(F, x, y):
        with autograd.pause():          # MXNet cannot write in place while it records
            z = x + 1
            z[-1] = y
            z[:, :1] = 3.0
        return z
    case.check(fn, grad=False)


@given(st.data())
def test_flip(data):
    case = Case(data)
    shape = case.operand(case.shape())
    chosen = tuple(case.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1)))
    axis = case.pick(chosen, chosen[0])
    case.check(case.pick(lambda F, x: F.flip(x, axis=axis), lambda F, x: F.reverse(x, axis=axis),
                         lambda F, x: x.flip(axis)))


# ---- indexing --------------------------------------------------------------------------------


@given(st.data())
def test_basic_indexing(data):
    case = Case(data)
    shape = case.operand(case.shape())
    key = case.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=5).filter(
        lambda k: np.empty(shape)[k].size > 0))
    case.check(lambda F, x: x[key] * 2)


@pytest.mark.parametrize("key", [1, -1, np.int64(1), slice(1, 3), (slice(None), slice(1, 3)), (Ellipsis, 0), None,
                                 (None, 1), (0, None, -1), (slice(None, None, -1), 1), (slice(-2, None), Ellipsis),
                                 (1, 2), (), Ellipsis, (1, slice(3, 0, -2))], ids=str)
def test_basic_indexing_by_example(key):
    check_op(lambda F, x: x[key] + 0, np.random.randn(ROWS, 3, 4).astype("float32"))


@given(st.data())
def test_advanced_indexing_with_numbers(data):
    """Lists, arrays and ranges, beside slices and new axes. MXNet crashes in the gradient of negative ones."""
    case = Case(data)
    m, n = case.operand(case.shape(2, 2))
    rows, columns = case.rng.randint(0, m, 3), case.rng.randint(0, n, 3)
    key = case.pick(rows.tolist(), rows, (slice(None), columns.tolist()), (rows.tolist(), columns.tolist()),
                    (rows, slice(0, 1)), (None, rows), range(m), (rows, int(columns[0])), (rows.tolist(), None))
    case.check(lambda F, x: x[key] * 2)


@given(st.data())
def test_advanced_indexing_with_arrays(data):
    case = Case(data)
    m, n = case.operand(case.shape(2, 2))
    case.index(case.shape(1, 2), 0, m - 1, dtypes=("int32", "float32"))
    case.index((1,), 0, n - 1)
    case.check(case.pick(lambda F, x, i, j: x[i], lambda F, x, i, j: x[i, j], lambda F, x, i, j: x[:, i % n],
                         lambda F, x, i, j: x[i, 0], lambda F, x, i, j: x[j % m, :, None]))


@given(st.data())
def test_advanced_indexing_from_the_end(data):
    case = Case(data)
    (size,) = case.operand(case.shape(1, 1))
    case.index((4,), -size, size - 1)
    case.check(case.pick(lambda F, x, i: x[i], lambda F, x, i: x[[-1, 0]]), grad=False)


def test_iteration_and_length():
    def fn(F, x):
        assert len(x) == 3 and x.size == 12 and x.ndim == 2
        return sum(row * (i + 1) for i, row in enumerate(x))
    check_op(fn, np.random.randn(ROWS, 3, 4).astype("float32"))


@pytest.mark.parametrize("key, error", [(3, IndexError), (-4, IndexError), ((0, 4), IndexError), ("a", TypeError),
                                        ((0, 0, 0), IndexError), (1.5, TypeError), (slice(2, 2), ProgramError)])
def test_indexing_that_does_not_fit(key, error):
    with pytest.raises(error):
        trace(lambda F, x: x[key], Spec((3, 4), "float32"))
