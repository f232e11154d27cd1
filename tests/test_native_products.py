"""The compiled products against numpy: every number of rows, odd shapes, strides, accumulation, both routes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.codegen import get_host_cpu_features

from cavs_core.backends.native_cpu import blas, panels, products
from cavs_core.backends.native_cpu.memory import address_of

DTYPES = ("float32", "float64")
SHAPES = [(1, 1), (3, 5), (7, 30), (8, 8), (9, 25), (33, 24), (20, 40), (50, 47), (12, 97), (101, 75)]     # (k, n)
OWN, BLAS = 1000, 0         # up to how many rows our own product is used
BLAS_ONLY = pytest.mark.skipif(not blas.available(), reason=blas.reason())


def call(function, dtype, *args, index_dtype=""):
    """Arrays are passed as pointers to their first element."""
    products.routine(function, dtype, index_dtype).call(
        *(address_of(x) if isinstance(x, np.ndarray) else x for x in args))


def draw(dtype, *shape):
    return np.random.standard_normal(shape).astype(dtype)


def assert_close(got, want, terms):
    """`terms` products of about size 1 were added."""
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * terms * np.finfo(got.dtype).eps + 1e-300)


def check_product(function, dtype, rows, k, n, accumulate, most_own):
    transposed = function is products.product_nt
    a, c = draw(dtype, rows, k + 3), draw(dtype, rows, n + 5)
    w = draw(dtype, n, k + 1) if transposed else draw(dtype, k, n + 2)
    want = c.astype("float64")
    want[:, :n] = a[:, :k].astype("float64") @ (w[:, :k].T if transposed else w[:, :n]) + accumulate * want[:, :n]
    call(function, dtype, a, k + 3, w, w.shape[1], c, n + 5, rows, n, k, accumulate, blas.gemm_address(dtype), most_own)
    assert_close(c, want, 2 + k)        # columns behind n are as they were


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [products.product_nt, products.product_nn], ids=lambda f: f.__name__)
class TestProducts:
    def test_every_number_of_rows(self, function, dtype):
        for rows in range(1, 71):
            check_product(function, dtype, rows, 33, 29, rows % 2, OWN)

    @pytest.mark.parametrize("k, n", SHAPES)
    def test_odd_shapes(self, function, dtype, k, n):
        for rows in (1, 2, 3, 4, 5, 11):
            for accumulate in (0, 1):
                check_product(function, dtype, rows, k, n, accumulate, OWN)

    @BLAS_ONLY
    @pytest.mark.parametrize("rows", [1, 6])
    def test_through_blas(self, function, dtype, rows):
        for accumulate in (0, 1):
            check_product(function, dtype, rows, 20, 30, accumulate, BLAS)

    def test_infinities_stay_where_they_are(self, function, dtype):
        """The last vector of a row overlaps the one before; what it takes twice must not become nan."""
        k, n = 13, 27
        a, c = np.ones((4, k), dtype), np.full((4, n), np.nan, dtype)
        w = np.ones((n, k) if function is products.product_nt else (k, n), dtype)
        a[1, 7] = np.inf
        call(function, dtype, a, k, w, w.shape[1], c, n, 4, n, k, 0, 0, OWN)
        assert (c[[0, 2, 3]] == k).all() and (c[1] == np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False], ids=["nt", "nn"])
class TestPackedProducts:
    """The panels are made by several calls, as by several workers, in memory that holds anything."""

    def check(self, dtype, transposed, rows, k, n, accumulate):
        wide = panels.panel_columns(dtype)
        a, c = draw(dtype, rows, k + 3), draw(dtype, rows, n + 5)
        w = draw(dtype, n, k + 1) if transposed else draw(dtype, k, n + 2)
        packed, num_panels = np.full(panels.packed_elements(n, k, dtype), np.nan, dtype), -(-n // wide)
        for low, high in ((0, num_panels // 2), (num_panels // 2, num_panels)):
            call(panels.pack_nt if transposed else panels.pack_nn, dtype, w, w.shape[1], packed, n, k, low, high)
        plain, end = w[:, :k].T if transposed else w[:, :n], packed.size // k
        for begin in range(0, n, wide):         # the last panel is as wide as what is left
            there = plain[:, begin:begin + wide]
            panel = packed[begin * k:min(begin + wide, end) * k].reshape(k, -1)
            assert (panel[:, :there.shape[1]] == there).all() and (panel[:, there.shape[1]:] == 0).all()
        want = c.astype("float64")
        want[:, :n] = a[:, :k].astype("float64") @ plain + accumulate * want[:, :n]
        call(panels.product_packed, dtype, a, k + 3, packed, 0, c, n + 5, rows, n, k, accumulate, 0, 0)
        assert_close(c, want, 2 + k)        # columns behind n are as they were

    def test_every_number_of_rows(self, dtype, transposed):
        for rows in (*range(1, 30), 127, 128, 129, 261):
            self.check(dtype, transposed, rows, 33, 29, rows % 2)

    @pytest.mark.parametrize("k, n", [*SHAPES, (20000, 25)])        # (so long that few rows are used at a time)
    def test_odd_shapes(self, dtype, transposed, k, n):
        for rows in (1, 2, 3, 5, 11):
            for accumulate in (0, 1):
                self.check(dtype, transposed, rows, k, n, accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most_own", [OWN, pytest.param(BLAS, marks=BLAS_ONLY)], ids=["own", "blas"])
@pytest.mark.parametrize("rows", [1, 2, 5, 70, 900])
def test_sum_product(dtype, most_own, rows):
    for n, k in SHAPES:
        for accumulate in (0, 1):
            a, b, c = draw(dtype, rows, n + 1), draw(dtype, rows, k + 2), draw(dtype, n, k + 3)
            want = c.astype("float64")
            want[:, :k] = a[:, :n].astype("float64").T @ b[:, :k] + accumulate * want[:, :k]
            call(products.sum_product, dtype, a, n + 1, b, k + 2, c, k + 3, rows, n, k, accumulate,
                 blas.gemm_address(dtype), most_own)
            assert_close(c, want, 2 + rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("accumulate", [0, 1])
def test_column_sum(dtype, rows, accumulate):
    a, c = draw(dtype, rows, 40), draw(dtype, 38)
    want = a[:, :37].astype("float64").sum(0) + accumulate * c[:37]
    last = c[37]
    call(products.column_sum, dtype, a, 40, c, rows, 37, accumulate)
    assert_close(c[:37], want, 2 + rows)
    assert c[37] == last


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", ["float32", "float64", "int32", "int64"])
def test_scatter_add(dtype, index_dtype):
    index = np.array([[2, 9], [0, 9], [2, 9], [3, 9]], index_dtype)        # every second entry is read
    values, target = draw(dtype, 4, 7), draw(dtype, 5, 8)
    want = target.copy()
    np.add.at(want[:, :6], [2, 0, 2, 3], values[:, :6])
    call(products.scatter_add, dtype, index, 2, values, 7, target, 8, 4, 6, index_dtype=index_dtype)
    assert_close(target, want, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_sum(dtype):
    values, out = draw(dtype, 6, 2, 3), draw(dtype, 4, 2, 3)
    index, bounds = np.array([5, 0, 0, 2, 1]), np.array([0, 2, 2, 5, 5])
    products.segment_sum(values, index, bounds, out)
    for r in range(4):
        assert_close(out[r], values[index[bounds[r]:bounds[r + 1]]].sum(0), 3)
    products.segment_sum(values, index, bounds[:1], out[:0])


def test_fill():
    x = np.ones(50, "float32")
    call(products.fill, "float32", x, 33)
    assert (x[:33] == 0).all() and (x[33:] == 1).all()


@BLAS_ONLY
class TestBlas:
    def test_one_thread_nests_and_restores(self):
        before = blas.num_threads()
        with blas.one_thread():
            with blas.one_thread():
                assert blas.num_threads() == 1
            assert blas.num_threads() == 1
        assert blas.num_threads() == before

    def test_restored_after_an_error(self):
        before = blas.num_threads()
        with pytest.raises(KeyError), blas.one_thread():
            raise KeyError
        assert blas.num_threads() == before

    def test_without_blas_there_is_a_reason(self, monkeypatch):
        monkeypatch.setattr(blas, "gemm_address", lambda dtype: 0)
        assert not blas.available() and "cblas_sgemm" in blas.reason()


@pytest.mark.skipif("+avx512f" not in get_host_cpu_features().split(","), reason="this processor has no wide vectors")
def test_without_wide_vectors():
    """Told that the processor has none, numba compiles other tiles; in a process of its own, since it asks once."""
    code = """
import numpy as np
from cavs_core.backends.native_cpu.intrinsics import WIDE_BYTES
assert WIDE_BYTES == 32
import test_native_products as t
for rows in (1, 5, 9, 70):
    t.TestPackedProducts().check("float32", True, rows, 33, 29, rows % 2)
t.test_sum_product("float32", t.OWN, 900)
"""
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"}
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told, "PYTHONPATH": path},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
