"""Reading results: what is read one by one is taken at once, and everybody has memory of their own."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, mx

nd = mx.nd
XS = [np.array([[k, -k, 0.5]], "float32") for k in range(5)]
WANT = [np.tanh(x).sum(axis=1) for x in XS]


def losses(dtype="float32"):
    return [nd.tanh(nd.array(x, dtype=dtype)).sum(axis=1) for x in XS]


@pytest.mark.parametrize("backend", ["native", "mxnet"])
@pytest.mark.parametrize("recording", [False, True])
def test_numbers_that_are_read_again_and_changed(backend, recording):
    with autograd.record() if recording else autograd.pause():
        with gdb.batching(backend=backend):
            made = losses()
    for _ in range(2):
        for y, want in zip(made, WANT):
            got = y.asnumpy()
            np.testing.assert_allclose(got, want, rtol=1e-6)
            assert got.shape == (1,) and got.flags.writeable
            got[:] = 7                          # nobody else sees it
    made[0] += 1
    np.testing.assert_allclose(made[0].asnumpy(), WANT[0] + 1, rtol=1e-6)
    np.testing.assert_allclose([y.asscalar() for y in made[1:]], np.ravel(WANT[1:]), rtol=1e-6)


def test_numbers_of_two_dtypes_inside_the_scope():
    with gdb.batching():
        single, double = losses(), losses("float64")
        for y, z, want in zip(single, double, WANT):
            assert (y.asnumpy().dtype, z.asnumpy().dtype) == (np.float32, np.float64)
            np.testing.assert_allclose(y.asnumpy() + z.asnumpy(), 2 * want, rtol=1e-6)


def test_numbers_whose_memory_others_share():
    with gdb.batching():
        made = losses()
        views = [y.reshape((1, 1)) for y in made[:2]]
    views[0][:] = 9
    np.testing.assert_allclose(made[0].asnumpy(), 9)
    np.testing.assert_allclose(views[1].asnumpy(), WANT[1][None], rtol=1e-6)
    np.testing.assert_allclose(made[3].asnumpy(), WANT[3], rtol=1e-6)


def test_numbers_before_and_after_backward():
    x = nd.ones((1, 3))
    x.attach_grad()
    with autograd.record(), gdb.batching():
        made = [(x * k).sum() for k in range(1, 4)]
    first = made[0].asnumpy()
    autograd.backward(made)
    np.testing.assert_allclose([first[0], made[1].asscalar(), made[2].asnumpy()[0]], [3, 6, 9])
    np.testing.assert_allclose(x.grad.asnumpy(), 6)
