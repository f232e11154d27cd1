"""What tests of parameter updates share: our functions, arrays for them, and MXNet's own operators."""

import numpy as np

from cavs_core import updates
from cavs_core.mxnet_compat import mx

nd = mx.nd
updates.install_updates()
ORIGINALS = updates._originals          # MXNet's operators, by name


def ours(name, stepped_aside=None):
    """One of our functions; operators that it calls are added to a list."""
    def spy(*args, **attrs):
        stepped_aside.append(name)
        return ORIGINALS[name](*args, **attrs)

    return updates._in_place_of(ORIGINALS[name] if stepped_aside is None else spy, name,
                                updates._OPERATORS[name])


def never(name):
    """One of our functions, which must not need the operator."""
    def fail(*args, **attrs):
        raise AssertionError(f"{name} stepped aside")

    return updates._in_place_of(fail, name, updates._OPERATORS[name])


def drawn(shape, dtype="float32", seed=0, positive=False):
    values = np.random.RandomState(seed).normal(size=shape).astype(dtype)
    return nd.array(np.abs(values) if positive else values, dtype=dtype)


def arrays_for(name, shape, dtype="float32", seed=0):
    """Weight, gradient, states."""
    count = updates._OPERATORS[name].arity
    return [drawn(shape, dtype, seed + 10 * k, positive=k == 3) for k in range(count)]


def sparse_like(grad, rows):
    """Some rows of a gradient, as a row_sparse array."""
    if not len(rows):
        return nd.sparse.zeros("row_sparse", grad.shape, dtype=grad.dtype)
    return nd.sparse.row_sparse_array((grad.asnumpy()[rows], rows), shape=grad.shape, dtype=grad.dtype)


def same(xs, ys):
    """Arrays have the same bits."""
    for x, y in zip(xs, ys):
        np.testing.assert_array_equal(x.asnumpy(), y.asnumpy())


def use_mxnet(monkeypatch):
    """Give MXNet's optimizers the operators back, for the rest of a test."""
    for name, original in ORIGINALS.items():
        monkeypatch.setattr(mx.optimizer.optimizer, name, original)
