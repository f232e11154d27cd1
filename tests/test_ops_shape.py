"""Ops of shapes and parts on many rows at once, against MXNet sample by sample."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from op_cases import Case, check_aliases
from op_check import ROWS, check_op

from cavs_core.errors import ProgramError
from cavs_core.lazy import LazyArray
from cavs_core.mxnet_compat import autograd, mx
from cavs_core.ops.shape import resolve_reshape
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = (
    "Reshape", "reshape", "expand_dims", "squeeze", "Flatten", "flatten", "reshape_like", "transpose", "SwapAxis",
    "swapaxes", "Concat", "concat", "_rnn_param_concat", "stack", "SliceChannel", "split", "_split_v2", "slice", "crop",
    "slice_assign", "_slice_assign", "_crop_assign", "_slice_assign_scalar", "_crop_assign_scalar", "slice_axis",
    "slice_like", "reverse", "flip", "broadcast_to", "broadcast_axis", "broadcast_axes", "broadcast_like", "tile",
    "repeat", "rows_like",
)


def test_aliases_are_mxnets():
    check_aliases(COVERS)


# ---- reshape and its relatives ---------------------------------------------------------------


def reshape_codes(case, shape):
    """Codes that MXNet reads right: it loses its place when -1 comes after -2 or -4."""
    codes, i, inferred = [], 0, False
    while i < len(shape):
        rest = len(shape) - i
        infers = not inferred and -4 not in codes
        code = case.pick("copy", "same", "split", "rest", *["merge"] * (rest > 1), *["infer"] * infers)
        if code == "merge":
            codes.append(-3)
            i += 2
            continue
        if code == "rest":
            codes.append(-2)
            break
        if code == "split":
            first = case.pick(*[n for n in range(1, shape[i] + 1) if shape[i] % n == 0])
            codes += case.pick((-4, first, shape[i] // first), (-4, -1, shape[i] // first), (-4, first, -1))
        elif code == "infer":
            codes.append(-1)
            inferred = True
        else:
            codes.append(0 if code == "copy" else shape[i])
        i += 1
    return codes


@given(st.data())
def test_reshape_with_codes(data):
    case = Case(data)
    shape = case.operand(case.shape())
    reverse = case.pick(False, True)
    codes = tuple(reshape_codes(case, shape[::-1])[::-1] if reverse else reshape_codes(case, shape))
    call = case.pick(lambda F, x: F.reshape(x, shape=codes, reverse=reverse),
                     lambda F, x: F.Reshape(x, shape=str(codes), reverse=str(reverse)),
                     lambda F, x: x.reshape(codes, reverse=reverse),
                     lambda F, x: x.reshape(list(codes), reverse=reverse),
                     lambda F, x: x.reshape(*codes, reverse=reverse),
                     lambda F, x: x.reshape(shape=codes, reverse=reverse))
    case.check(call)


@given(st.data())
def test_reshape_to_any_shape_of_the_same_size(data):
    case = Case(data)
    size = math.prod(case.operand(case.shape()))
    first = case.pick(*[n for n in range(1, size + 1) if size % n == 0])
    target = case.pick((first, size // first), (first, -1), (-1, first), (1, size), (size, 1, 1), (-1,))
    case.check(lambda F, x: x.reshape(target))


@pytest.mark.parametrize("shape, codes, reverse, want", [
    ((2, 3, 4), (0, -3), False, (2, 12)), ((2, 3, 4), (-3, 0), False, (6, 4)), ((2, 3, 4), (-2, 1), False, (2, 3, 4, 1)),
    ((2, 3, 4), (-4, 1, 2, -2), False, (1, 2, 3, 4)), ((2, 3, 4), (2, -4, -1, 3, -2), False, (2, 1, 3, 4)),
    ((10, 5, 4), (-1, 0), False, (40, 5)), ((10, 5, 4), (-1, 0), True, (50, 4)),     # from MXNet's documentation
    ((2, 3, 4), (0, 0, -1, 2, -4), True, (2, 3, 2, 2)),                               # factors before -4
])
def test_reshape_codes_as_documented(shape, codes, reverse, want):
    assert resolve_reshape(shape, codes, reverse) == want
    assert mx.nd.zeros(shape).reshape(codes, reverse=reverse).shape == want


@pytest.mark.parametrize("codes", [(5, 5), (0, 0), (-1, -1), (0, 0, 0, 0), (-3, -3), (-4, 2, 2, -2), (7, -1), (-4, 2)])
def test_reshape_that_does_not_fit(codes):
    with pytest.raises(ProgramError):
        trace(lambda F, x: F.reshape(x, shape=codes), Spec((2, 3, 4), "float32"))


@given(st.data())
def test_expand_dims(data):
    case = Case(data)
    shape = case.operand(case.shape(1, 3))
    axis = case.integer(-len(shape) - 1, len(shape))
    case.check(case.pick(lambda F, x: F.expand_dims(x, axis=axis), lambda F, x: x.expand_dims(axis)))


@given(st.data())
def test_squeeze(data):
    case = Case(data)
    shape = case.operand(case.shape(1, 4, size=2))
    ones = [i for i, n in enumerate(shape) if n == 1]
    chosen = tuple(case.draw(st.lists(st.sampled_from(ones), unique=True))) if ones else ()
    axis = case.pick(None, chosen, *[i - len(shape) for i in ones])
    case.check(case.pick(lambda F, x: F.squeeze(x, axis=axis), lambda F, x: x.squeeze(axis)))


def test_squeeze_of_an_axis_that_is_not_one():
    with pytest.raises(ProgramError, match="squeeze"):
        trace(lambda F, x: F.squeeze(x, axis=0), Spec((2, 1), "float32"))


@given(st.data())
def test_flatten(data):
    case = Case(data)
    case.operand(case.shape())
    case.check(case.pick(lambda F, x: F.flatten(x), lambda F, x: F.Flatten(x), lambda F, x: x.flatten()))


@given(st.data())
def test_reshape_like(data):
    """The axes lhs_begin:lhs_end of x take the sizes of the axes rhs_begin:rhs_end of y."""
    case = Case(data)
    shape = case.operand(case.shape())
    begin = case.integer(0, len(shape) - 1)
    end = case.integer(begin + 1, len(shape))
    before, behind = case.shape(0, 1), case.shape(0, 1)
    merged = (math.prod(shape[begin:end]),)
    case.operand(before + merged + behind)
    ends = {"lhs_begin": begin, "lhs_end": end, "rhs_begin": len(before), "rhs_end": len(before) + 1}
    if begin == 0 and not before and case.pick(True, False):
        ends.update(lhs_begin=None, rhs_begin=None)
    if end < len(shape) and behind and case.pick(True, False):
        ends.update(lhs_end=end - len(shape), rhs_end=-len(behind))
    case.check(case.pick(lambda F, x, y: F.reshape_like(x, y, **ends), lambda F, x, y: x.reshape_like(y, **ends)))


@given(st.data())
def test_reshape_like_of_a_whole(data):
    case = Case(data)
    shape = case.operand(case.shape())
    case.operand(case.pick(shape, shape[::-1], (math.prod(shape),)))
    case.check(lambda F, x, y: F.reshape_like(x, y))


# ---- transpose -------------------------------------------------------------------------------


@given(st.data())
def test_transpose(data):
    case = Case(data)
    axes = tuple(case.draw(st.permutations(range(len(case.operand(case.shape()))))))
    case.check(case.pick(
        lambda F, x: F.transpose(x, axes=axes), lambda F, x: x.transpose(axes), lambda F, x: F.transpose(x),
        lambda F, x: x.T, lambda F, x: F.moveaxis(x, axes[0], -1)))


@given(st.data())
def test_swapaxes(data):
    case = Case(data)
    shape = case.operand(case.shape(2))
    i, j = case.draw(st.permutations(range(len(shape))))[:2]       # MXNet crashes when they are the same
    i -= case.pick(0, len(shape))
    case.check(case.pick(lambda F, x: F.swapaxes(x, dim1=i, dim2=j), lambda F, x: F.SwapAxis(x, dim1=i, dim2=j),
                         lambda F, x: x.swapaxes(i, j)))


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
    shape = case.operand(case.shape(2))
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


# ---- broadcasting ----------------------------------------------------------------------------


def narrowed(case, shape):
    """The same shape with some axes of one."""
    return tuple(case.pick(1, n) for n in shape)


@given(st.data())
def test_broadcast_to_and_like(data):
    case = Case(data)
    shape = case.shape()
    small = case.operand(narrowed(case, shape))
    case.operand(shape)
    zeros = tuple(0 if n == m and case.pick(True, False) else m for n, m in zip(small, shape))
    case.check(case.pick(
        lambda F, x, y: F.broadcast_to(x, shape=zeros), lambda F, x, y: x.broadcast_to(shape),
        lambda F, x, y: F.broadcast_like(x, y), lambda F, x, y: x.broadcast_like(y)))


@given(st.data())
def test_broadcast_to_more_axes(data):
    """The method of an NDArray adds axes in front; the operator does not."""
    case = Case(data)
    shape = case.shape(2)
    case.operand(narrowed(case, shape)[1:])
    case.check(lambda F, x: x.broadcast_to(shape))


@given(st.data())
def test_broadcast_axis(data):
    case = Case(data)
    shape = list(case.shape())
    axes = case.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    for i in axes:
        shape[i] = 1
    sizes = [case.integer(1, 4) for _ in axes]
    case.operand(shape)
    axis, size = case.pick((tuple(axes), tuple(sizes)), (axes[0], sizes[0]))
    case.check(case.pick(lambda F, x: F.broadcast_axis(x, axis=axis, size=size),
                         lambda F, x: F.broadcast_axes(x, axis=axis, size=size),
                         lambda F, x: x.broadcast_axes(axis, size)))


@given(st.data())
def test_broadcast_like_along_axes(data):
    case = Case(data)
    shape, other = list(case.shape()), case.shape()
    i, j = case.axis(shape), case.axis(other)
    shape[i] = 1
    case.operand(shape)
    case.operand(other)
    case.check(lambda F, x, y: F.broadcast_like(x, y, lhs_axes=(i,), rhs_axes=(j,)))


@given(st.data())
def test_tile(data):
    case = Case(data)
    case.operand(case.shape(1, 3))
    reps = case.pick(case.shape(1, 4, size=3), case.integer(1, 3))
    case.check(case.pick(lambda F, x: F.tile(x, reps=reps), lambda F, x: x.tile(reps)))


@given(st.data())
def test_repeat(data):
    case = Case(data)
    shape = case.operand(case.shape())
    axis, times = case.pick(None, case.axis(shape)), case.integer(1, 3)
    case.check(case.pick(lambda F, x: F.repeat(x, repeats=times, axis=axis), lambda F, x: x.repeat(times, axis=axis)))


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


@pytest.mark.parametrize("key, error", [(3, IndexError), (-4, IndexError), ((0, 4), IndexError), ((0, 0, 0), IndexError),
                                        ("a", TypeError), (1.5, TypeError), (slice(2, 2), ProgramError)])
def test_indexing_that_does_not_fit(key, error):
    with pytest.raises(error):
        trace(lambda F, x: x[key], Spec((3, 4), "float32"))
