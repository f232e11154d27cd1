"""Axes and rows: what only names rows is named rightly, and what rows mean does not depend on how many there are."""

import numpy as np
import pytest
from drawn_moves import Moves, drawn_program
from hypothesis import given, settings
from hypothesis import strategies as st
from scope_check import check_scope

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import mx

nd = mx.nd


def numbers(*shape):
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape)


# ---- what only names rows --------------------------------------------------------------------------------------------

REVERSED = {
    "operator": lambda x: nd.slice(x, begin=(None,), end=(None,), step=(-1,)),
    "vector": lambda x: (x.reshape((-1,)) * 1)[::-1],
    "rows": lambda x: (x * 1)[::-1],
    "last axis": lambda x: (x * 1)[:, ::-1],
    "both": lambda x: (x * 1)[::-1, ::-1],
    "of a leaf": lambda x: x[::-1] + 1,
    "a part, from its end": lambda x: (x * 1)[2:0:-1],
    "every second": lambda x: (x * 1)[:, ::2],
    "every second from the end": lambda x: (x * 1)[::-2, 1],
    "behind a reshape": lambda x: (x * 1).reshape((4, 3))[::-1].reshape((-1,)),
    "in front of a reshape": lambda x: (x * 1)[::-1].reshape((4, 3)),
    "column": lambda x: (x * 1).reshape((-1, 1))[::-1],
    "twice": lambda x: (x * 1)[::-1][::-1],
    "column as a vector": lambda x: (x * 1).reshape((-1, 1))[::-1, 0],
}


@pytest.mark.parametrize("name", REVERSED)
def test_reversed_axes_are_reversed(name):
    check_scope(REVERSED[name], numbers(3, 4), backends=["mxnet"])
    check_scope(lambda x: REVERSED[name](x) * 2, numbers(3, 4))


NAMED = {
    "rows": lambda x: x[1:3], "a row": lambda x: x[1], "an entry of rows": lambda x: x[1, 2], "all": lambda x: x[:],
    "reshaped": lambda x: x.reshape((2, 3, 4))[1, 1:], "whole axes behind one": lambda x: x[2:4, :, None],
    "new axis": lambda x: x.expand_dims(0)[0, 1:],
}


@pytest.mark.parametrize("name", NAMED)
def test_stretches_of_memory_are_named(name):
    """No launch makes them, but where a part of a row is read."""
    (scope,) = check_scope(lambda x: NAMED[name](x * 2) + 1, numbers(6, 4), backends=["mxnet"])
    titles = [launch.title for launch in scope.flushes[0].launches]
    assert ("slice" in " ".join(titles)) == (name == "an entry of rows")


# ---- how many rows there are -----------------------------------------------------------------------------------------

DEPENDS_ON_ONES = {
    "squeeze": ((2, 2, 1), lambda x: x.squeeze()),
    "squeeze of an axis": ((2, 1), lambda x: x.squeeze(1)),
    "squeeze of a leaf": ((2, 3, 1), lambda x: nd.squeeze(x) * 2),
    "reshape codes": ((2, 3), lambda x: x.reshape((-1, 0)) * 2),
    "sum": ((2, 3), lambda x: nd.sum(x, axis=1)),
    "sum of all": ((2, 1), lambda x: nd.sum(x)),
    "softmax of a column": ((2, 1), lambda x: nd.softmax(x)),
    "softmax of rows": ((2, 1), lambda x: nd.softmax(x, axis=0)),
    "argmax": ((2, 3), lambda x: nd.argmax(x, axis=1, keepdims=True)),
    "pick": ((2, 3), lambda x: nd.pick(x, nd.ones(x.shape[:1]))),
    "dot": ((2, 1), lambda x: nd.dot(x, nd.ones((1, 3)))),
    "dot of vectors": ((2,), lambda x: nd.dot(x, x)),
    "FullyConnected": ((2, 3), lambda x: nd.FullyConnected(x, nd.ones((2, 3)), no_bias=True, num_hidden=2)),
    "FullyConnected, flat": ((2, 3, 1), lambda x: nd.FullyConnected(x, nd.ones((2, 3)), no_bias=True, num_hidden=2)),
    "L2Normalization": ((2, 1), lambda x: nd.L2Normalization(x)),
    "broadcast_axis": ((2, 1), lambda x: nd.broadcast_axis(x, axis=1, size=3)),
    "broadcast_to": ((2, 1), lambda x: nd.broadcast_to(x, shape=(0, 3))),
    "broadcast with a column": ((2,), lambda x: nd.broadcast_add(x, nd.arange(x.shape[0]).reshape((-1, 1)))),
    "broadcast of losses": ((2, 3), lambda x: nd.broadcast_mul(nd.pick(x, nd.ones(x.shape[:1])), nd.sum(
        x, axis=1, keepdims=True))),
    "split": ((2, 3), lambda x: nd.split(x, num_outputs=3, axis=1, squeeze_axis=True)[1]),
    "swapaxes": ((2, 1), lambda x: x.swapaxes(0, 1)),
    "reshape_like": ((2, 1), lambda x: nd.reshape_like(x, nd.ones(x.shape[::-1]))),
    "slice_like": ((2, 3), lambda x: nd.slice_like(x, nd.ones((1, 2)), axes=(1,))),
    "norm": ((2, 1), lambda x: nd.norm(x, axis=1)),
    "one_hot": ((2,), lambda x: nd.one_hot(x * 1, depth=3)),
}


@pytest.mark.parametrize("name", DEPENDS_ON_ONES)
def test_calls_of_one_row_and_of_many_in_one_scope(name):
    shape, fn = DEPENDS_ON_ONES[name]
    data = [numbers(rows, *shape[1:]) for rows in (*shape[:1], 1, 3, 1, 5)]
    check_scope(lambda *xs: [fn(x * 1) for x in xs], *data)
    check_scope(lambda *xs: [fn(x) * 2 for x in xs], *data, backends=["mxnet"])


@given(st.data())
@settings(max_examples=60)
def test_chains_of_moves_on_mxnet(data):
    _check_chain(Moves(data), 5, ["mxnet"])


@given(st.data())
@settings(max_examples=6)
def test_chains_of_moves_on_native_code(data):
    _check_chain(Moves(data), 3, ["native"])


def _check_chain(m, length, backends):
    program, shape, other = drawn_program(m, length)
    rng = np.random.RandomState(m.integer(0, 99))
    try:
        check_scope(program, *[rng.normal(size=s).astype("float32") for s in (shape, other, shape)], backends=backends)
    except AssertionError as error:
        raise AssertionError(f"{shape}, {other}: {m.text}") from error


def test_views_of_what_an_operator_by_itself_has_read():
    """It got its value while it was indexed: MXNet's own view of it, not a copy."""
    with gdb.batching(backend="mxnet"):
        x = nd.ones((3, 3, 3, 3, 3)) * 1
        part = x[:2, ::2, :2, ::2, :2]          # no more axes can be merged: it runs alone
        first = x[0]
        first[:] = 5
    assert x[0].asnumpy().min() == 5 and part.asnumpy().max() == 1
