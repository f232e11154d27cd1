"""The device of all tests comes from DYNBATCH_TEST_CTX (default cpu(0)); hypothesis draws the same cases every time."""

import os

import hypothesis
import numpy as np
import pytest

from cavs_core.mxnet_compat import mx

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=25, print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large])
hypothesis.settings.load_profile("default")


def test_context():
    """The device named by DYNBATCH_TEST_CTX, such as cpu(0) or gpu(0)."""
    name = os.environ.get("DYNBATCH_TEST_CTX", "cpu(0)")
    kind, _, index = name.rstrip(")").partition("(")
    return mx.Context(kind, int(index or 0))


test_context.__test__ = False


@pytest.fixture
def ctx():
    return test_context()


@pytest.fixture(autouse=True)
def _fresh_seed_and_device():
    """Every test starts from the same seeds on the test device, and ends with nothing under way."""
    mx.random.seed(7)
    np.random.seed(7)
    with test_context():
        yield
    mx.nd.waitall()
