"""Memory for compiled code: blocks that are reused, and views of MXNet's arrays."""

import gc
import threading
import time

import numpy as np
import pytest

from cavs_core import address_of_data, view_of_data
from cavs_core.backends.native_cpu.memory import Arena, address_of
from cavs_core.mxnet_compat import mx


class TestArena:
    def test_blocks_are_aligned_and_reused(self):
        arena = Arena()
        block = arena.take(10_000)
        assert block.address % 64 == 0 and block.nbytes >= 10_000
        x = block.array((10, 20), "float64", offset=64)
        x[:] = 3
        assert address_of(x) == block.address + 64
        other = arena.take(10_000)
        assert other is not block
        arena.give_back(block)
        assert arena.take(9_900) is block
        assert arena.stats() == {"taken": 3, "made": 2, "free_blocks": 0, "free_bytes": 0}

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 5000, 10**6, 2**24, 2**24 + 1])
    def test_a_new_block_has_room_to_grow(self, nbytes):
        size = Arena().take(nbytes).nbytes
        assert nbytes <= size <= max(5120, nbytes * 1.5 + 1024)

    def test_a_larger_block_serves_a_smaller_wish_but_not_a_much_smaller_one(self):
        arena = Arena()
        block = arena.take(100_000)
        arena.give_back(block)
        assert arena.take(60_000) is block
        arena.give_back(block)
        assert arena.take(20_000) is not block

    def test_what_nobody_wants_is_let_go(self):
        arena = Arena(patience=100)
        big = arena.take(10**6)
        arena.give_back(big)
        for _ in range(300):
            arena.give_back(arena.take(100))
        assert arena.stats()["free_blocks"] == 1 and arena.stats()["made"] == 2

    def test_threads_never_share_a_block(self):
        arena, errors = Arena(patience=5), []

        def work(mark):
            for _ in range(2000):
                block = arena.take(5000)
                block.memory[:8] = mark
                time.sleep(0)
                if not (block.memory[:8] == mark).all():
                    errors.append(mark)
                arena.give_back(block)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


class TestArrays:
    def test_a_view_is_the_memory_itself(self):
        x = mx.nd.array(np.arange(6).reshape(2, 3), dtype="float64", ctx=mx.cpu())
        view = view_of_data(x)
        assert view.shape == (2, 3) and view.dtype == np.float64 and address_of(view) == address_of_data(x)
        view[1, 2] = 9
        assert x.asnumpy()[1, 2] == 9

    def test_a_view_keeps_its_array(self):
        view = view_of_data(mx.nd.ones((1000, 1000), ctx=mx.cpu()))
        gc.collect()
        mx.nd.zeros((1000, 1000), ctx=mx.cpu()).wait_to_read()
        assert view.sum() == 10**6
