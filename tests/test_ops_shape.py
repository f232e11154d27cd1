"""Reshapes, transposes and broadcasts on many rows at once, against MXNet sample by sample."""

import math

import pytest
from drawn_op import Case, check_aliases
from hypothesis import given
from hypothesis import strategies as st

from cavs_core.errors import ProgramError
from cavs_core.mxnet_compat import mx
from cavs_core.ops.shape import resolve_reshape
from cavs_core.program import Spec
from cavs_core.trace import trace

COVERS = (
    "Reshape", "reshape", "expand_dims", "squeeze", "Flatten", "flatten", "reshape_like", "transpose", "SwapAxis",
    "swapaxes", "broadcast_to", "broadcast_axis", "broadcast_axes", "broadcast_like", "tile", "repeat", "rows_like",
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
    ((2, 3, 4), (0, -3), False, (2, 12)), ((2, 3, 4), (-3, 0), False, (6, 4)), ((2, 3), (-2, 1), False, (2, 3, 1)),
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
    reps = case.pick(case.shape(1, 2), (2, 1, *case.shape(1, 1)), case.integer(1, 3))   # along three axes MXNet fails
    case.check(case.pick(lambda F, x: F.tile(x, reps=reps), lambda F, x: x.tile(reps)))


@given(st.data())
def test_repeat(data):
    case = Case(data)
    shape = case.operand(case.shape())
    axis, times = case.pick(None, case.axis(shape)), case.integer(1, 3)
    case.check(case.pick(lambda F, x: F.repeat(x, repeats=times, axis=axis), lambda F, x: x.repeat(times, axis=axis)))
