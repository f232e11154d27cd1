"""Rows of a sparse gradient, written into the memory that MXNet gave it."""

import numpy as np
import pytest

from cavs_core import gradients
from cavs_core.backends.native_cpu import sparse_memory
from cavs_core.gradients import write_gradient
from cavs_core.mxnet_compat import gluon, mx

nd = mx.nd


def table(shape=(30, 4), dtype="float32", grad_req="write"):
    parameter = gluon.Parameter("table", shape=shape, dtype=dtype, grad_stype="row_sparse", grad_req=grad_req)
    parameter.initialize(mx.init.One())
    return parameter


def drawn_part(numbers, parameter, seed):
    rows = np.random.RandomState(seed).normal(size=(len(numbers), *parameter.shape[1:]))
    return np.array(numbers), rows.astype(parameter.dtype)


def dense(parts, parameter):
    want = np.zeros(parameter.shape, parameter.dtype)
    for numbers, rows in parts:
        np.add.at(want, numbers, rows)
    return want


@pytest.fixture
def in_place(monkeypatch):
    """Whether gradients were written in place, one after the other."""
    found, write = [], gradients._written_in_place
    monkeypatch.setattr(gradients, "_written_in_place", lambda *args: found.append(write(*args)) or found[-1])
    return found


def test_mxnet_keeps_rows_where_we_look_for_them():
    assert sparse_memory.can_look_inside()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(30, 4), (30,), (30, 2, 1, 3), (30, 1, 2, 1, 2)], ids=len)
def test_rows_are_what_mxnet_reads(shape, dtype, in_place):
    parameter = table(shape, dtype)
    words = [[1, 4, 1, 29], [7], [3, 2, 1, 0], [5, 5, 5], list(range(30)), [9, 9], [2, 28]]
    for step, numbers in enumerate(words):
        parts = [drawn_part(numbers, parameter, step), drawn_part([numbers[-1], 0], parameter, 50 + step)]
        write_gradient(parameter.data(), parameter, parts, add=False)
        grad, kept = parameter.grad(), sorted({*numbers, 0})
        assert grad.indices.asnumpy().tolist() == kept and grad.data.shape == (len(kept), *shape[1:])
        np.testing.assert_allclose(grad.asnumpy(), dense(parts, parameter), rtol=1e-5, atol=1e-6)
        # MXNet's own operators, which copy, add and keep rows of it
        np.testing.assert_array_equal((grad + grad).asnumpy(), 2 * grad.asnumpy())
        np.testing.assert_array_equal(grad.copy().asnumpy(), grad.asnumpy())
        first = nd.sparse.retain(grad, nd.array([0], dtype="int64"))
        np.testing.assert_array_equal(first.asnumpy()[0], grad.asnumpy()[0])
    many_axes = len(shape) > 4
    assert in_place == [False] * 7 if many_axes else in_place == [False, True, True, True, False, True, True]


def test_mxnet_may_write_in_between(in_place):
    parameter = table()
    for step in range(6):
        part = drawn_part([step, 3, 8], parameter, step)
        write_gradient(parameter.data(), parameter, [part], add=False)
        np.testing.assert_allclose(parameter.grad().asnumpy(), dense([part], parameter), rtol=1e-6)
        if step == 1:
            parameter.zero_grad()
        if step == 3:
            nd.sparse.row_sparse_array((np.ones((1, 4)), [2]), shape=(30, 4)).copyto(parameter.grad())
            assert parameter.grad().asnumpy().sum() == 4
        if step == 4:
            gluon.utils.clip_global_norm([parameter.grad()], 0.1)
    assert in_place.count(True) >= 3


@pytest.mark.parametrize("grad_req, add, in_use",
                         [("add", False, False), ("write", True, False), ("write", False, True)])
def test_what_is_left_to_mxnet(grad_req, add, in_use, in_place):
    parameter = table(grad_req=grad_req)
    total = 0
    for step in range(3):
        part = drawn_part([step, 3], parameter, step)
        write_gradient(parameter.data(), parameter, [part], add=add, in_use=in_use)
        total = dense([part], parameter) + (0 if in_use else total)
        np.testing.assert_allclose(parameter.grad().asnumpy(), total, rtol=1e-6)
    assert not any(in_place)


def test_no_rows(in_place):
    parameter = table()
    write_gradient(parameter.data(), parameter, [drawn_part([1, 2], parameter, 0)], add=False)
    for nothing in ([], [(np.zeros(0, np.int64), np.zeros((0, 4), "float32"))], None):
        write_gradient(parameter.data(), parameter, nothing, add=False)
        assert parameter.grad().asnumpy().sum() == 0 and parameter.grad().indices.shape in ((0,), ())


def test_without_knowing_where_rows_are_kept(monkeypatch, in_place):
    monkeypatch.setattr(gradients, "can_look_inside", lambda: False)
    parameter = table()
    for step in range(3):
        part = drawn_part([step, 3], parameter, step)
        write_gradient(parameter.data(), parameter, [part], add=False)
        np.testing.assert_allclose(parameter.grad().asnumpy(), dense([part], parameter), rtol=1e-6)
    assert in_place == [False] * 3


@pytest.mark.parametrize("word, value", [(sparse_memory._NUM_ROWS, 99), (sparse_memory._NUM_AXES, 7),
                                         (sparse_memory._INDEX_BLOCKS, 8), (sparse_memory._INDEX_SHAPES, 8)])
def test_another_layout_is_noticed(word, value, monkeypatch):
    """Nothing is followed that may be no address."""
    array = sparse_memory._made((1, 4), (9, 3), "float32")
    nd.waitall()
    assert sparse_memory._is_as_expected(array, (1, 4), 12)
    words = sparse_memory._words

    def changed(address, count):
        found = words(address, count)
        return found[:word] + [value] + found[word + 1:] if count > 20 else found

    monkeypatch.setattr(sparse_memory, "_words", changed)
    assert not sparse_memory._is_as_expected(array, (1, 4), 12)
