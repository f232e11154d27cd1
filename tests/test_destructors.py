"""Destructors that use arrays, called by the collector in a scope and behind it: nothing is printed or lost."""

import gc
import sys

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import mx

nd = mx.nd
USES = {
    "read": lambda keeper: keeper.array.asnumpy(),
    "compute": lambda keeper: (keeper.array * 2).asnumpy(),
    "keep a result": lambda keeper: setattr(keeper, "other", keeper.array * 2),
    "write": lambda keeper: keeper.array.__setitem__(slice(None), 0),
    "show": lambda keeper: repr(keeper.array),
    "sum": lambda keeper: keeper.array.sum().asscalar(),
    "save": lambda keeper: saved.append(keeper.array),
}
saved = []


class Keeper:
    def __init__(self, array, use):
        self.array, self.use, self.myself = array, use, self        # a ring: only the collector ends it

    def __del__(self):
        USES[self.use](self)


@pytest.fixture
def unraisable(monkeypatch):
    """What destructors raise, which Python only prints."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_destructor_may_use_arrays(use, inside, backend, unraisable):
    x = nd.ones((2, 3))
    with gdb.batching(backend=backend):
        arrays = [x * k for k in range(6)]
        keepers = [Keeper(y + 1, use) for y in arrays]
        if inside:
            del keepers
            gc.collect()
        later = [nd.exp(y) for y in arrays]
    keepers = None
    gc.collect()
    for k, (y, z) in enumerate(zip(arrays, later)):
        np.testing.assert_array_equal(y.asnumpy(), np.full((2, 3), k))
        np.testing.assert_allclose(z.asnumpy(), np.exp(np.full((2, 3), k)), rtol=1e-6)
    values = [float(array.sum().asscalar()) for array in saved]
    saved.clear()
    gc.collect()
    assert sorted(values) == ([6.0 * (k + 1) for k in range(6)] if use == "save" else [])
    assert unraisable == []


def test_the_end_of_arrays_flushes_and_records_nothing(unraisable):
    x = nd.ones((2, 3))
    with gdb.batching() as scope:
        rings = [[x * k] for k in range(6)]
        for ring in rings:
            ring.append(ring)
        kept = x * 7
        del ring, rings
        gc.collect()
        assert scope.flushes == [] and scope.stats.fallbacks == {}
    assert kept.asnumpy().max() == 7 and len(scope.flushes) == 1 and unraisable == []


def test_an_array_that_becomes_one_in_a_destructor_frees_its_memory(monkeypatch):
    """Where the collector asked the array first, its own destructor is not called any more."""
    freed, free = [], mx.base._LIB.MXNDArrayFree
    ends = sys.modules["cavs_core.lazy"]._OwnHandle
    monkeypatch.setattr(ends, "__del__", lambda self: freed.append(free(self)))
    with gdb.batching():
        keepers = [Keeper(nd.ones((2,)) * k, "write") for k in range(5)]
    assert type(keepers[0].array) is LazyArray
    del keepers
    gc.collect()
    assert set(freed) == {0} and len(freed) <= 5
