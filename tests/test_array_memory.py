"""The address of an array, asked for while the array is still being computed."""

import numpy as np
import pytest

from cavs_core.array_memory import address_of_data, array_at, view_of_data
from cavs_core.mxnet_compat import mx


@pytest.fixture
def later():
    """A function: an array of ones, computed after half a second of other work."""
    large = mx.nd.ones((1500, 1500)) / 1500
    large.wait_to_read()

    def make(size=5):
        x = large
        for _ in range(6):
            x = mx.nd.dot(x, large)
        return x[0, 0] * mx.nd.ones((size,))

    return make


def test_an_address_is_that_of_a_value_that_is_there(later):
    x = later()
    memory = array_at(address_of_data(x), (5,), "float32").copy()       # (at once: nothing waits after the question)
    np.testing.assert_allclose(memory, x.asnumpy())


def test_a_view_shows_a_value_that_is_there(later):
    x = later()
    np.testing.assert_allclose(view_of_data(x).copy(), x.asnumpy())


def test_an_address_stays_the_same(later):
    x = later()
    address = address_of_data(x)
    x.wait_to_read()
    assert address_of_data(x) == address
