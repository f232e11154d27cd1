"""Arrays of `mx.np` inside a scope: MXNet runs what reads them, and the scope counts it."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

npx, nn = mx.npx, gluon.nn


@pytest.fixture(autouse=True)
def numpy_semantics():
    with mx.util.np_shape(), mx.util.np_array():
        yield


def layer(make):
    block = make()
    block.initialize(mx.init.Normal(0.5))
    return block


OPERATORS = {
    "split": lambda x: mx.np.split(x, 3, axis=1)[1],
    "softmax": lambda x: npx.softmax(x),
    "one_hot": lambda x: npx.one_hot(x, 4),
    "pick": lambda x: npx.pick(x, mx.np.array([0, 1, 2, 0])),
    "clip": lambda x: x.clip(0.2, 0.5),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "index": lambda x: x[1:3, 2],
    "expand_dims": lambda x: mx.np.expand_dims(x, 0),
    "tile": lambda x: mx.np.tile(x, 2),
    "loss": lambda x: gluon.loss.SoftmaxCELoss()(x, mx.np.array([0, 1, 2, 3])),
    "arithmetic": lambda x: (x * 2 + x).sum(),
}
BLOCKS = {
    "Dense": lambda: nn.Dense(3, in_units=6), "LayerNorm": lambda: nn.LayerNorm(in_channels=6),
    "PReLU": nn.PReLU, "Dropout": lambda: nn.Dropout(0.0),
}


def run(code, x):
    """What the code makes of the array, and its gradient."""
    x.attach_grad()
    with autograd.record():
        y = code(x)
    y.backward()
    return type(y), y.asnumpy(), x.grad.asnumpy()


def check_same(code):
    x = mx.np.array(np.random.RandomState(0).uniform(size=(4, 6)).astype("float32"))
    kind, value, grad = run(code, x)
    with gdb.batching() as scope:
        got = run(code, x)
    assert got[0] is kind is mx.np.ndarray and scope.stats.launches == 0
    np.testing.assert_allclose(got[1], value, rtol=1e-6)
    np.testing.assert_allclose(got[2], grad, rtol=1e-6)
    return scope


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    check_same(OPERATORS[name])


@pytest.mark.parametrize("hybrid", [False, True], ids=["plain", "hybridized"])
@pytest.mark.parametrize("name", BLOCKS)
def test_layers(name, hybrid):
    block = layer(BLOCKS[name])
    block.hybridize(hybrid)
    check_same(block)


def test_the_reason_is_counted():
    assert any("is of mx.np" in reason for reason in check_same(lambda x: npx.softmax(x)).stats.fallbacks)
