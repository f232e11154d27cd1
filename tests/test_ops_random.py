"""Ops that draw: the statistics of what they draw, and that gradients see the same draw."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import dtypes, rows, seeds, shapes, subsets
from op_check import BODIES, ROWS, check_op, run_rows, trace_rows

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx

COVERS = ("Dropout", "uniform_like")
SHAPE = (20, 30)
both_bodies = pytest.mark.parametrize("body", BODIES)


def drawn(body, fn, *arrays, shared=(), train_mode=True):
    """Outputs, head gradients and gradients of a function that draws."""
    program = trace_rows(fn, *arrays, shared=shared, train_mode=train_mode)
    rng = np.random.RandomState(5)
    heads = [rng.uniform(1, 2, (ROWS, *program.specs[v].shape)).astype(program.specs[v].dtype)
             for v in program.outputs]
    outputs, grads = run_rows(body, program, arrays, heads)
    return outputs, heads, grads


def dropout(**attrs):
    return lambda F, x: F.Dropout(x, **attrs)


def masks(body, x, shared=(), train_mode=True, **attrs):
    """What Dropout multiplied each row by; its gradient must say the same."""
    (out,), (head,), grads = drawn(body, dropout(**attrs), x, shared=shared, train_mode=train_mode)
    mask = out / x
    np.testing.assert_allclose(grads[0], (mask * head).sum(0) if shared else mask * head, rtol=1e-5)
    return mask


def all_differ(parts):
    return len({part.tobytes() for part in parts}) == len(parts)


# ---- dropout ---------------------------------------------------------------------------------


@settings(max_examples=15)
@given(shape=shapes(), dtype=dtypes, shared=subsets(1), seed=seeds, p=st.sampled_from([0, 0.3, 1]), data=st.data())
def test_dropout_does_nothing_when_predicting(shape, dtype, shared, seed, p, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)).map(tuple))
    check_op(dropout(p=p, axes=axes), *rows(seed, shape, dtype=dtype, shared=shared), shared=shared, train_mode=False)


@pytest.mark.parametrize("mode", ["training", "always"])
def test_dropout_of_nothing_and_of_everything(mode):
    """p = 1 makes nan of everything, as in MXNet."""
    x, = rows(0, (2, 3))
    check_op(dropout(p=0, mode=mode), x)
    check_op(dropout(p=1, mode=mode), x)


@both_bodies
@pytest.mark.parametrize("shared", [(), (0,)])
@pytest.mark.parametrize("p, dtype", [(0.1, "float32"), (0.5, "float32"), (0.5, "float64"), (0.8, "float32")])
def test_dropout_keeps_some_and_scales_them(body, shared, p, dtype):
    """Each row has a mask of its own, also of an operand that all rows share."""
    x, = rows(1, SHAPE, dtype=dtype, shared=shared, low=1, high=2)
    mask = masks(body, x, shared=shared, p=p)
    assert mask.shape == (ROWS, *SHAPE) and mask.dtype == dtype
    kept = mask != 0
    np.testing.assert_allclose(mask[kept], 1 / (1 - p), rtol=1e-5)
    spread = 5 * np.sqrt(p * (1 - p) / kept.size)
    assert abs(kept.mean() - (1 - p)) < spread
    assert all_differ(kept)


@both_bodies
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (-1,)])
def test_along_axes_one_draw_serves_all(body, axes):
    x, = rows(2, (8, 9, 10), low=1, high=2)
    mask = np.round(masks(body, x, p=0.5, axes=axes), 3)
    chosen = [axis % 3 for axis in axes]
    np.testing.assert_array_equal(mask, np.broadcast_to(
        mask[(slice(None), *[slice(0, 1) if i in chosen else slice(None) for i in range(3)])], mask.shape))
    for axis in set(range(3)) - set(chosen):
        assert not all((part == mask.take(0, axis + 1)).all() for part in np.moveaxis(mask, axis + 1, 0))
    assert all_differ(mask)


@both_bodies
def test_dropout_always_draws_when_predicting_too(body):
    x, = rows(3, SHAPE, low=1, high=2)
    assert 0.3 < (masks(body, x, train_mode=False, mode="always") != 0).mean() < 0.7


@both_bodies
@pytest.mark.parametrize("fn", [dropout(p=0.5), lambda F, x: F.LeakyReLU(-x, act_type="rrelu")[0]])
def test_the_seed_decides(body, fn):
    x, = rows(4, SHAPE, low=1, high=2)

    def run():
        return drawn(body, fn, x)[0][0]

    mx.random.seed(11)
    first, second = run(), run()
    mx.random.seed(11)
    np.testing.assert_array_equal(run(), first)
    np.testing.assert_array_equal(run(), second)
    mx.random.seed(12)
    assert all_differ([first, second, run()])


@both_bodies
def test_two_dropouts_draw_twice(body):
    x, = rows(5, SHAPE, low=1, high=2)
    (one, two), _, _ = drawn(body, lambda F, x: [F.Dropout(x), F.Dropout(x)], x)
    assert all_differ([*(one != 0), *(two != 0)])


def test_dropout_block_follows_the_mode():
    block, x = gluon.nn.Dropout(0.5), rows(6, SHAPE)[0]
    for train_mode, ops in ((True, {"uniform_like", "broadcast_mul"}), (False, {"_copy"})):
        program = trace_rows(lambda F, x: block(x), x, train_mode=train_mode)
        assert ops <= {instr.op for instr in program.instrs}, program


def test_dropout_of_a_parameter_in_a_vertex_function():
    """DropConnect: every vertex sees a weight of its own; the weight's gradient is the sum of what they saw."""
    class Cell(cavs.VertexFunction):
        def __init__(self):
            super().__init__(state_shapes=[(50,)])
            with self.name_scope():
                self.weight = self.params.get("weight", shape=(1, 50), init="ones")

        def vertex(self, F, v):
            below, = v.gather_sum()
            weight = F.Dropout(self.weight.data(), p=0.5)
            v.scatter(weight + 0 * below)
            v.push(weight)

    cell = Cell()
    cell.initialize()
    with autograd.record():
        out = cavs.run(cell, [cavs.InputGraph.chain(4), cavs.InputGraph.chain(2)])
    out.pushed.backward()
    seen = out.pushed.asnumpy()
    assert set(np.unique(seen)) == {0, 2} and all_differ(seen)
    np.testing.assert_allclose(cell.weight.grad().asnumpy().ravel(), seen.sum(0))


@pytest.mark.parametrize("attrs, dtype, said", [
    ({"p": 1.5}, "float32", "Dropout: p=1.5 is no probability"),
    ({"p": -0.5}, "float32", "Dropout: p=-0.5 is no probability"),
    ({"axes": (2,)}, "float32", "axis 2 is out of range for 2 dimensions"),
    ({}, "int32", "the arithmetic of int32"),
])
def test_what_does_not_fit(attrs, dtype, said):
    with pytest.raises(cavs.ProgramError, match=re.escape(said)):
        trace_rows(dropout(**attrs), *rows(0, (2, 3), dtype=dtype))


# ---- rrelu -----------------------------------------------------------------------------------


@both_bodies
@pytest.mark.parametrize("shared", [(), (0,)])
@pytest.mark.parametrize("low, high, dtype",
                         [(0.125, 0.334, "float32"), (0.25, 0.75, "float64"), (0.5, 0.5, "float32")])
def test_rrelu_draws_a_slope_per_element(body, shared, low, high, dtype):
    """The documentation's words, and the mask as second output: MXNet's own kernel crashes when training on a CPU."""
    x, = rows(7, SHAPE, dtype=dtype, shared=shared)
    attrs = dict(act_type="rrelu", lower_bound=low, upper_bound=high)
    (out, slope), (head, _), grads = drawn(body, lambda F, x: F.LeakyReLU(x, **attrs), x, shared=shared)
    assert low <= slope.min() and slope.max() <= high + 1e-6
    assert abs(slope.mean() - (low + high) / 2) <= 5 * (high - low) / np.sqrt(12 * slope.size) + 1e-6
    assert low == high or all_differ(slope)
    factor = np.where(x > 0, 1, slope)
    np.testing.assert_allclose(out, factor * x, rtol=1e-5)
    np.testing.assert_allclose(grads[0], (factor * head).sum(0) if shared else factor * head, rtol=1e-5)
