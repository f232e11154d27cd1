"""The device of all tests comes from DYNBATCH_TEST_CTX (default cpu(0)); hypothesis draws the same cases every time.

Tests that name no backend run on MXNet's operators, which need no compiler; DYNBATCH_BACKEND=native runs all of them on
the native one (the first time it compiles a thousand kernels). `test_native_*.py` name it themselves.
"""

import os
import signal
import sys

import hypothesis
import numpy as np
import pytest

from cavs_core.mxnet_compat import mx

os.environ.setdefault("DYNBATCH_BACKEND", "mxnet")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:       # a shell starts what it puts into the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Every test starts from the same seeds on the test device, with a policy "auto" that has seen no step (which
    method it would try depends on the clock) and a planner that has seen no flush, and ends with nothing under way."""
    if "gluon_dynbatch.choose" in sys.modules:
        sys.modules["gluon_dynbatch.choose"].AUTO.forget()
        sys.modules["gluon_dynbatch.choose"].IDLE.clear()
        sys.modules["gluon_dynbatch.choose"].REPEATS.clear()
        sys.modules["gluon_dynbatch.choose"].SEEN.clear()
        sys.modules["gluon_dynbatch.joining"].HABITS.clear()
        sys.modules["gluon_dynbatch.sums"].SUM_ROLES.clear()
        sys.modules["gluon_dynbatch.merging"].FORMS.clear()
        sys.modules["gluon_dynbatch.logs"].RECORDINGS.clear()
    mx.random.seed(7)
    np.random.seed(7)
    with test_context():
        yield
    mx.nd.waitall()


@pytest.fixture(params=["compiled", "generated"])
def variant(request):
    """Calls are recorded by the C extension, then by generated Python code."""
    from recorder_check import recorded_by
    with recorded_by(request.param):
        yield request.param
