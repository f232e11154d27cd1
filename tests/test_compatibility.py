"""The `conftest.py` that docs/compatibility.md shows runs tests of the make of MXNet's, in a scope and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")

# The imports, decorators and old names of MXNet's files; what a scope changes is that a result waits.
STRANGERS = '''
import numpy as np
import mxnet as mx
from nose.tools import assert_raises, make_decorator, ok_, raises


def with_seed(test):
    @make_decorator(test)
    def seeded(*args, **kwargs):
        mx.random.seed(17)
        test(*args, **kwargs)
    return seeded


@with_seed
def test_one_waits(dtype=np.int):
    y = mx.nd.ones((2, 3), dtype="float32") * 2
    print("WAITS" if type(y) is not mx.nd.NDArray else "IS THERE")
    ok_((y.asnumpy() == 2).all() and np.bool is bool and np.isnan(np.NaN))


@raises(mx.MXNetError, ValueError)
def test_two_raises():
    mx.nd.ones((2, 3)).reshape((4, 5)).asnumpy()


@with_seed
def test_three_fails():
    assert_raises(mx.MXNetError, lambda: mx.nd.ones((2, 3)).reshape((4, 5)).asnumpy())
    assert (mx.nd.ones((1,)) * 3).asscalar() == 4


def test_four_is_not_spoiled():
    assert (mx.nd.ones((1,)) * 3).asscalar() == 3
'''


@pytest.mark.parametrize("backend, word", [("none", "IS THERE"), ("mxnet", "WAITS")])
def test_the_conftest_of_the_page_runs_tests_of_the_make_of_mxnets(backend, word, tmp_path):
    (tmp_path / "conftest.py").write_text(re.search(r"^```py\n(.*?)^```$", PAGE, re.M | re.S).group(1))
    (tmp_path / "test_strangers.py").write_text(STRANGERS)
    command = [sys.executable, "-m", "pytest", "-vs", "-p", "no:cacheprovider", "-W", "ignore", "test_strangers.py"]
    run = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=300,
                         env={**os.environ, "BACKEND": backend, "PYTHONPATH": str(ROOT)})
    results = dict(re.findall(r"::(\w+) .*?(PASSED|FAILED)", run.stdout, re.S))
    assert results == {"test_one_waits": "PASSED", "test_two_raises": "PASSED", "test_three_fails": "FAILED",
                       "test_four_is_not_spoiled": "PASSED"}, run.stdout + run.stderr
    assert word in run.stdout and "1 failed, 3 passed" in run.stdout
