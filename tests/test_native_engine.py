"""The interpreter and its workers: tables of launches against numpy, whoever runs them."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from numba import carray, cfunc, types

from cavs_core.backends.native_cpu import blas, panels, workers
from cavs_core.backends.native_cpu.memory import address_of
from cavs_core.backends.native_cpu.ops import (
    EDGES,
    LAUNCH_WIDTH,
    ONCE,
    column_sum_op,
    fill_op,
    kernel_op,
    launch,
    pack_op,
    product_op,
    scatter_add_op,
    sum_product_op,
    table,
)
from cavs_core.backends.native_cpu.workers import WORKERS, Workers

COUNTS = (1, 2, 3, 5)
H = 5           # row length of the kernels below
_pointer = types.CPointer(types.float64)
_kernel = cfunc(types.void(types.CPointer(_pointer), types.int64, types.int64, types.int64))


@_kernel
def tanh_kernel(table, first, start, stop):
    """out[r] = tanh(local[r - first] + bias)"""
    local, bias, out = carray(table[0], (1 << 20,)), carray(table[1], (H,)), carray(table[2], (1 << 20,))
    for r in range(start, stop):
        for j in range(H):
            out[r * H + j] = np.tanh(local[(r - first) * H + j] + bias[j])


@_kernel
def count_kernel(table, first, start, stop):
    """out[p] += 1 + first"""
    out = carray(table[0], (1 << 20,))
    for p in range(start, stop):
        out[p] += 1 + first


@pytest.fixture(params=COUNTS)
def crew(request):
    made = Workers(request.param, worth_sharing=0)
    yield made
    made.close()


def run(crew, launches, ops):
    crew.execute(table(launches, LAUNCH_WIDTH), table(ops))


def pointers(*arrays):
    return np.array([address_of(x) for x in arrays], np.int64)


def draw(*shape):
    return np.random.standard_normal(shape)


class Chain:
    """h[rows of level l] = tanh(h[rows of level l - 1, as many] W^T + b), and sums over all of it."""

    def __init__(self, sizes=(40, 40, 17, 9, 4, 3, 1, 1)):
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        rows = self.offsets[-1]
        self.h, self.w, self.b, self.local = draw(rows, H), draw(H, H), draw(H), draw(max(sizes), H)
        self.start = self.h[:sizes[0]].copy()
        self.sums, self.products = draw(H), draw(H, H)
        arguments = pointers(self.local, self.b, self.h)
        self.keep = arguments
        ops, self.launches = [], []
        for k in range(1, len(sizes)):
            # Level k reads the first rows of level k - 1, which stand so many rows before its own.
            before = int(self.offsets[k] - self.offsets[k - 1])
            ops += [product_op(address_of(self.h) - before * H * 8, H, address_of(self.w), H, address_of(self.local), H,
                               H, H, transposed=True, dtype="float64", c_local=True),
                    kernel_op(tanh_kernel.address, address_of(arguments))]
            self.launches.append(launch(len(ops) - 2, len(ops), int(self.offsets[k]), int(self.offsets[k + 1])))
        ops += [column_sum_op(address_of(self.h), H, address_of(self.sums), H, dtype="float64"),
                sum_product_op(address_of(self.h), H, address_of(self.h), H, address_of(self.products), H, H, H,
                               dtype="float64")]
        self.launches.append(launch(len(ops) - 2, len(ops), 0, int(rows)))
        self.ops = ops

    def run(self, crew):
        run(crew, self.launches, self.ops)

    def check(self):
        want = np.empty_like(self.h)
        for k, (start, stop) in enumerate(zip(self.offsets, self.offsets[1:])):
            before = self.offsets[k - 1]
            want[start:stop] = self.start if k == 0 else np.tanh(want[before:before + stop - start] @ self.w.T + self.b)
        np.testing.assert_allclose(self.h, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(self.sums, want.sum(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(self.products, want.T @ want, rtol=1e-12, atol=1e-12)


class TestTables:
    def test_launches_that_read_earlier_ones(self, crew):
        chain = Chain()
        for _ in range(20):
            chain.h[40:] = chain.sums[:] = np.nan
            chain.run(crew)
            chain.check()

    def test_the_number_of_workers_changes_no_bit(self):
        """Up to which worker does a row: here every worker has the same kind of tile for each."""
        results = []
        for count in COUNTS:
            np.random.seed(3)
            crew, chain = Workers(count, worth_sharing=0), Chain()
            chain.run(crew)
            crew.close()
            results.append(chain.h)
        assert all(np.allclose(results[0], other, rtol=1e-14, atol=1e-15) for other in results[1:])

    @pytest.mark.parametrize("rows", [0, 1, 2, 7, 100])
    def test_every_position_once(self, crew, rows):
        """Rows 3:3 + rows; row r has r % 3 edges; `first` is that of the launch, whoever works.

        The second launch shares the edges differently: it must find what the other workers wrote.
        """
        bounds = np.concatenate([[0, 0, 0, 0], np.cumsum(np.arange(3, 3 + rows) % 3)])
        by_row, by_edge, once = np.zeros(3 + rows), np.zeros(bounds[-1] + 1), np.zeros(2)
        tables = [pointers(x) for x in (by_row, by_edge, once)]
        ops = [kernel_op(count_kernel.address, address_of(tables[0])),
               kernel_op(count_kernel.address, address_of(tables[1]), EDGES),
               kernel_op(count_kernel.address, address_of(tables[2]), ONCE)]
        edges = int(bounds[-1])
        run(crew, [launch(0, 3, 3, 3 + rows, 0, edges, address_of(bounds)),
                   launch(1, 2, 0, 0, 0, edges)], ops)
        assert (by_row[3:] == 4).all() and (by_row[:3] == 0).all()
        assert (by_edge[:-1] == 2).all() and by_edge[-1] == 0
        assert once.tolist() == [1, 0]

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_several_rows_a_position(self, crew, dtype):
        """m = 3; A local, C not, and C is added to; a launch that begins at position 2."""
        a, w, c = (x.astype(dtype) for x in (draw(9 * 3, 7), draw(6, 4), draw(11 * 3, 5)))
        want = c.copy()
        want[6:, :4] += a[:, :6] @ w
        run(crew, [launch(0, 1, 2, 11)],
            [product_op(address_of(a), 7, address_of(w), 4, address_of(c), 5, 4, 6, transposed=False, dtype=dtype, m=3,
                        a_local=True, accumulate=True)])
        np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("rows", [1, 2, 4, 5, 30])
    def test_few_rows_with_a_large_matrix(self, crew, rows):
        """Such products are shared by columns: between them, what the others made must be there."""
        wide = 260
        x, large, small, last = draw(rows + 3, wide), draw(wide, wide), draw(wide, 7), draw(7, 10000)
        local, between, out = draw(rows, wide), draw(rows + 3, 7), draw(rows + 3, 10000)
        want = out.copy()
        want[3:] += x[3:] @ large.T @ small @ last
        options = dict(dtype="float64")
        ops = [product_op(address_of(x), wide, address_of(large), wide, address_of(local), wide, wide, wide,
                          transposed=True, c_local=True, **options),
               product_op(address_of(local), wide, address_of(small), 7, address_of(between), 7, 7, wide,
                          transposed=False, a_local=True, **options),
               product_op(address_of(between), 7, address_of(last), 10000, address_of(out), 10000, 10000, 7,
                          transposed=False, accumulate=True, **options)]
        run(crew, [launch(0, 3, 3, 3 + rows)], ops)
        np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize("rows", [1, 4, 30])
    def test_packed_weights(self, crew, rows, transposed):
        """All workers pack, and all read what the others packed; few rows are shared by columns, in whole panels."""
        n, k = 290, 260
        x, w, out = draw(rows + 3, k), draw(n, k) if transposed else draw(k, n), draw(rows + 3, n)
        packed = np.full(panels.packed_elements(n, k, "float64"), np.nan)
        want = out.copy()
        want[3:] = x[3:] @ (w.T if transposed else w)
        ops = [pack_op(address_of(w), w.shape[1], address_of(packed), n, k, transposed=transposed, dtype="float64"),
               product_op(address_of(x), k, address_of(packed), 0, address_of(out), n, n, k, transposed=transposed,
                          dtype="float64", packed=True)]
        run(crew, [launch(0, 1, 0, 1), launch(1, 2, 3, 3 + rows)], ops)
        np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("n, k", [(70, 3), (3, 70), (33, 33)])
    def test_sums_over_rows(self, crew, n, k):
        """Positions 1:6 of two rows each; local operands begin at the launch's first row."""
        a, b, c, sums = (x.astype("float32") for x in (draw(12, n), draw(10, k), draw(n, k), draw(n)))
        want = c + a[2:].T @ b, a[2:].sum(0)
        run(crew, [launch(0, 2, 1, 6)],
            [sum_product_op(address_of(a), n, address_of(b), k, address_of(c), k, n, k, m=2, b_local=True,
                            accumulate=True),
             column_sum_op(address_of(a), n, address_of(sums), n, m=2)])
        np.testing.assert_allclose(c, want[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sums, want[1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("index_dtype", ["float32", "int64"])
    def test_fill_and_scatter(self, crew, index_dtype):
        target, values = draw(6, 50).astype("float32"), draw(8, 50).astype("float32")
        index = np.array([0, 0, 3, 5, 3, 3, 1, 0], index_dtype)
        want = np.zeros_like(target)
        np.add.at(want, index[2:].astype(int), values[2:])
        run(crew, [launch(0, 1, 0, 0), launch(1, 2, 1, 4)],
            [fill_op(address_of(target), target.size),
             scatter_add_op(address_of(index), index_dtype, address_of(values), 50, address_of(target), 50, 50, m=2)])
        np.testing.assert_allclose(target, want, rtol=1e-6, atol=1e-6)


class TestWorkers:
    def test_threads_wait_for_each_other(self):
        """Several threads that run tables at once, as MXNet's callbacks do."""
        chains, errors = [Chain() for _ in range(4)], []

        def work(chain):
            try:
                for _ in range(30):
                    chain.run(crew)
                    chain.check()
            except BaseException as error:
                errors.append(error)

        crew = Workers(2, worth_sharing=0)
        threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        crew.close()
        assert not errors

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
    def test_a_forked_child_has_workers_of_its_own(self):
        crew, chain = Workers(2, worth_sharing=0), Chain()
        chain.run(crew)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                chain.h[40:] = np.nan
                chain.run(crew)
                chain.check()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        chain.run(crew)
        crew.close()
        chain.check()

    def test_an_interrupt_comes_between_tables(self):
        """Ctrl-C while tables run: the interrupt is raised, and the workers are ready for the next one."""
        crew, chain = Workers(2, worth_sharing=0), Chain()
        chain.run(crew)
        for delay in (0.01, 0.02, 0.03):
            timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
            with pytest.raises(KeyboardInterrupt):      # noqa: PT012 - it may come anywhere in here
                timer.start()
                while True:
                    chain.run(crew)
            timer.join()
        chain.run(crew)
        crew.close()
        chain.check()

    def test_small_tables_wake_nobody(self):
        crew, chain = Workers(2, worth_sharing=10**12), Chain()
        chain.run(crew)
        chain.check()
        crew.close()

    def test_idle_workers_sleep(self):
        crew, chain = Workers(3, worth_sharing=0), Chain()
        chain.run(crew)
        before = _other_threads_time()
        time.sleep(0.2)
        assert _other_threads_time() - before < 0.1      # two spinning workers would use 0.4 s, or what there is
        crew.close()

    def test_closing_ends_the_threads(self):
        crew, chain = Workers(3, worth_sharing=0), Chain()
        for _ in range(2):
            chain.run(crew)
            crew.close()
            chain.check()
        crew.close()

    def test_blas_is_as_before(self):
        before = blas.num_threads()
        Chain().run(WORKERS)
        assert blas.num_threads() == before

    @pytest.mark.parametrize("value, count", [("1", 1), ("3", 3), ("100", 8)])
    def test_threads_by_environment(self, monkeypatch, value, count):
        monkeypatch.setenv("DYNBATCH_THREADS", value)
        assert workers.default_count() == count

    def test_a_bad_number_of_threads(self, monkeypatch):
        monkeypatch.setenv("DYNBATCH_THREADS", "two")
        with pytest.raises(ValueError, match="DYNBATCH_THREADS is 'two'"):
            workers.default_count()
        monkeypatch.delenv("DYNBATCH_THREADS")
        assert 1 <= workers.default_count() <= 8


def _other_threads_time():
    return time.process_time() - time.thread_time()
