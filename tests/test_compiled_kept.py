"""What the C extension keeps and uses again, tokens and dead arrays, and what it changes in classes."""

import gc
import sys
import threading

import numpy as np
import pytest
from recorder_check import (
    VARIANTS,
    Calls,
    Harness,
    Plain,
    described,
    fails,
    in_thread,
    make_cell,
    needs_compiled,
    recorded_by,
)

import gluon_dynbatch as gdb
from cavs_core import LazyArray, become_array
from cavs_core.mxnet_compat import mx
from gluon_dynbatch import fastpath
from gluon_dynbatch.fastpath import FIRST, find_held

nd = mx.nd
compiled = fastpath.compiled
LARGEST = (1 << 30) - 1


# ---- the log -----------------------------------------------------------------------------------------


def log_of(variant, disturb):
    with recorded_by(variant):
        harness = Harness()
        for k in range(3000):
            harness.append([harness.a, harness.b])
            if k % 500 == 7:
                disturb(harness.calls.log)
        return bytes(harness.calls.log), list(harness.calls.made)


@needs_compiled
@pytest.mark.parametrize("disturb", [lambda log: None, lambda log: log.__delitem__(slice(0, 40)), bytearray.clear,
                                     lambda log: log.__delitem__(slice(8, None)), lambda log: log.extend(bytes(999))],
                         ids=["as it is", "cut in front", "cleared", "cut behind", "extended"])
def test_the_log_is_a_bytearray_like_others(disturb):
    got, want = (log_of(variant, disturb) for variant in VARIANTS)
    if want[0]:
        assert got == want
    assert got[1] == want[1]


# ---- tokens come again ---------------------------------------------------------------------------------


def test_tokens_of_living_arrays_are_nobody_elses(variant):
    """The next flush counts from the same number on. Whether its arrays live must not depend on those of the last."""
    cell, x = make_cell(), nd.array([0.5])
    with gdb.batching() as scope:
        kept = [cell(x, x), cell(x, x)]
        cell(x, x)
        scope.flush()
        numbers = [y.token - FIRST for y in kept]
        for _ in range(3):
            first, last = cell(x, x), cell(x, x)
            assert cell(x, x).token == FIRST + 2
            made = scope.recorder.calls.made
            assert made == [FIRST, FIRST + 1, FIRST + 2] and find_held(made).tolist() == [True, True, False]
            assert not {id(y.token) for y in kept} & set(map(id, made))
            del first
            assert find_held(made).tolist() == [False, True, False]
            scope.flush()
            assert last.asscalar() == pytest.approx(np.tanh(0.5) + 0.5)
    assert numbers == [0, 1] and {y.asscalar() for y in kept} == {last.asscalar()}


@needs_compiled
def test_only_tokens_that_nobody_holds_are_kept():
    h = Harness()
    results = [h.append([h.a, h.b]) for _ in range(3)]          # two tokens each, behind those of a and b
    made = h.calls.made
    assert find_held(made).all() and len(made) == 8
    del results[1]
    strange = [int(str(FIRST + 5000)), int(str(FIRST + 1)), None, "token"]
    made += strange
    living = [id(x.token) for x in (h.a, h.b, results[0][0], results[1][0])]
    assert find_held(made, recycles=True).tolist() == [True] * 4 + [False] * 2 + [True] * 6
    assert [k for k, x in enumerate(made[:8]) if x is None] == [4, 5] and made[8:] == strange
    assert [id(made[k]) for k in (0, 1, 2, 6)] == living
    assert described(results) == [[("out", 2), (("own", 3), None)], [("out", 6), (("own", 7), None)]]
    for wrong in ((), None, b""):
        with pytest.raises(TypeError):
            compiled.is_held(wrong, True)


@needs_compiled
def test_two_threads_share_what_is_kept():
    cell, x, failed = make_cell(), nd.array([0.5]), []
    want = cell(cell(x, x), x).asscalar()

    def work():
        for _ in range(20):
            with gdb.batching():
                out = [cell(cell(x, x), x) for _ in range(30)]
                kept = out[::3]
                del out
            failed.extend(y for y in kept if abs(y.asscalar() - want) > 1e-5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


# ---- arrays that stand for results ---------------------------------------------------------------------


def test_dead_arrays_come_again_as_new_ones():
    """Nothing of the old one is seen; the type counts those that live."""
    h = Harness()
    gc.collect()
    before = sys.getrefcount(LazyArray)
    for _ in range(3):
        some = [LazyArray() for _ in range(5000)] + [h.append([h.a, h.b]) for _ in range(2500)]
        assert sys.getrefcount(LazyArray) == before + 10_000
        assert all(gc.is_tracked(x) for x in some)
        for x in some[:5000]:
            with pytest.raises(AttributeError):
                x.owner  # noqa: B018
            with pytest.raises(AttributeError):
                x.token  # noqa: B018
        x.owner, x.token = h.own, 5
        del some, x
        assert sys.getrefcount(LazyArray) == before


def test_classes_derived_from_lazy_arrays():
    class Named(LazyArray):
        __slots__ = ("name", "__weakref__")

    class Free(LazyArray):
        pass

    calls, before = Calls(), sys.getrefcount(Named)
    for cls in (Named, Free):
        some = [cls() for _ in range(100)]
        for x in some:
            x.owner, x.token, x.name = calls, 1 << 40, [x]      # a ring
        held = sys.getrefcount(calls)
        del some, x
        gc.collect()
        assert sys.getrefcount(calls) == held - 100
    assert sys.getrefcount(Named) == before


def test_a_long_chain_of_arrays_and_owners():
    """It ends by a loop: a small stack is enough."""
    class Link:
        __slots__ = ("array",)

    def work():
        last = None
        for _ in range(100_000):
            owner = Link()
            owner.array, last = last, LazyArray()
            last.owner = owner
        del last, owner
        done.append(True)

    done, before = [], threading.stack_size(1 << 18)
    try:
        in_thread(work)
    finally:
        threading.stack_size(before)
    assert done


def test_an_array_gets_its_value():
    lazy, array = LazyArray(), nd.array([1.0, 2.0])
    lazy.owner, lazy.token = None, 1
    types = sys.getrefcount(LazyArray)
    handle = become_array(lazy, array)
    assert type(lazy) is mx.nd.NDArray and lazy.handle is handle and lazy.asnumpy().tolist() == [1, 2]
    assert sys.getrefcount(LazyArray) == types - 1 and gc.is_tracked(lazy)
    lazy += 1
    assert lazy.asnumpy().tolist() == [2, 3]


@needs_compiled
def test_wrong_changes_of_class():
    lazy, array = LazyArray(), nd.ones((1,))
    for wrong in ((), (lazy,), (lazy, 1), (lazy, object), (lazy, int), (lazy, Plain), (array, LazyArray), (1, int),
                  (array, mx.nd.NDArray)):
        with pytest.raises(TypeError):
            compiled.become(*wrong)
    assert type(lazy) is LazyArray
    fresh = type("Fresh", (mx.nd.NDArray,), {"__slots__": (), "owner": LazyArray.owner, "token": LazyArray.token})
    with pytest.raises(TypeError, match="not the first one"):
        compiled.bind(fresh, np.ndarray, np.integer, fastpath.RETRY, FIRST, LARGEST)


# ---- classes whose calls come to C directly --------------------------------------------------------------


def recorded_calls(block):
    x = nd.array([1.0])
    with gdb.batching() as scope:
        for _ in range(3):
            y = block(x, x)
    assert y.asscalar() == pytest.approx(np.tanh(1) + 1)
    return scope.stats.calls


def test_a_class_gets_another_call(variant):
    block, seen = make_cell(), []
    cls = type(block)
    marked = cls.__call__
    assert recorded_calls(block) == 3

    def call(self, *args):
        seen.append(len(args))
        return marked(self, *args)

    cls.__call__ = call
    assert recorded_calls(block) == 3 and seen == [2] * 3
    cls.__call__ = marked
    assert recorded_calls(block) == 3 and seen == [2] * 3
    del cls.__call__
    assert recorded_calls(block) == 6           # its two operators
    gdb.vertex(gdb.vertex(cls))
    assert recorded_calls(block) == 3


def test_classes_derived_from_a_marked_one(variant):
    base, seen = type(make_cell()), []
    child, other = type("Child", (base,), {})(), type("Other", (base,), {
        "__call__": lambda self, *args: seen.append(1) or base.__call__(self, *args)})()
    assert recorded_calls(child) == recorded_calls(other) == 3 and len(seen) == 3
    type(child).__call__ = lambda self, *args: seen.append(2) or base.__call__(self, *args)
    assert recorded_calls(child) == 3 and seen[3:] == [2] * 3
    del base.__call__
    assert recorded_calls(other) == 6 and seen[6:] == [1] * 3


def test_arguments_by_name_reach_the_own_call(variant):
    class Own(Plain):
        def __call__(self, x, y, *, scale=1):
            return super().__call__(x, y) * scale

    block, x = Own(), nd.array([1.0])
    plain = block(x, x, scale=3).asscalar()
    assert plain == pytest.approx(3 * (np.tanh(1) + 1))
    gdb.vertex(Own)
    with gdb.batching():
        block(x, x), block(x, x)
        with pytest.raises(TypeError, match="scale"):
            block(x, x, scale=3)


@needs_compiled
def test_wrong_classes_to_shorten():
    for wrong in (None, 1, int, Plain, type("Own", (), {"__call__": fails}),
                  type("Part", (), {"__call__": compiled.Call(fails, 1, 2)})):
        with pytest.raises(TypeError, match="shorten takes"):
            compiled.shorten(wrong)
