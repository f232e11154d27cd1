"""The short ways to record calls in C: tables of vertices, calls like the newest one. Nothing is ever stale."""

import gc
import random

import numpy as np
import pytest
from recorder_check import (
    VARIANTS,
    Harness,
    Vertex,
    described,
    fails,
    in_thread,
    make_cell,
    needs_compiled,
    recorded_by,
)

import gluon_dynbatch as gdb
from cavs_core import Listener, become_array, listening
from cavs_core.mxnet_compat import autograd, mx
from gluon_dynbatch.fastpath import find_held, make_append, make_recorder, make_table

nd = mx.nd


# ---- the table of vertices -----------------------------------------------------------------------


def test_a_table_is_a_dict_of_ids(variant):
    table, want, rng = make_table(), {}, random.Random(0)
    keys = [16 * k for k in range(1, 40)] + [(16 * k, 4096 * k) for k in range(1, 40)] + [(16, 16), (1 << 47, 16)]
    for _ in range(2000):
        key, way = rng.choice(keys), object()
        assert table.get(key) is want.get(key) and table.get(key, way) is want.get(key, way)
        if rng.random() < 0.3:
            table[key] = want[key] = way
        assert len(table) == len(want)
    assert [table[key] for key in want] == list(want.values())
    with pytest.raises(KeyError):
        table[5]


@needs_compiled
def test_wrong_keys_of_a_table():
    table = make_table()
    for key in (None, "key", (), (1,), (1, 2, 3), (1, None), 1 << 80, -1 << 80, 1.5):
        for use in (table.get, table.__getitem__, lambda key: table.__setitem__(key, 1)):
            with pytest.raises((TypeError, OverflowError, SystemError)):
                use(key)
    with pytest.raises(TypeError, match="stay in their table"):
        del table[1]
    with pytest.raises(TypeError):
        type(table)(1)
    assert len(table) == 0 and table.get(0) is None


@needs_compiled
def test_code_that_runs_when_a_table_drops_a_function():
    """It may look into the table, and fill it."""
    table, seen = make_table(), []

    class Way:
        def __del__(self):
            seen.append(table.get(16))
            for k in range(100):
                table[16 * (2 + k)] = k

    table[16] = Way()
    table[16] = "another"
    assert seen == ["another"] and table[16] == "another" and len(table) == 101


@needs_compiled
def test_a_table_in_a_ring_is_collected():
    class Way:
        died = 0

        def __init__(self, table):
            self.table = table

        def __del__(self):
            Way.died += 1
            assert len(self.table) in (0, 50)   # nobody finds what is about to end
            assert self.table.get(16) is None or self.table[16].table is self.table

    for _ in range(3):
        table = make_table()
        for k in range(50):
            table[16 * (1 + k)] = Way(table)
    del table
    gc.collect()
    assert Way.died == 150


# ---- another flush, another state, another table -------------------------------------------------------


def test_calls_behind_a_flush_from_another_thread(variant):
    """Each flush has functions of its own: what was found for the one is nothing to the next."""
    cell, x = make_cell(), nd.array([0.5])
    with gdb.batching() as scope:
        out = [cell(x, x)]
        for _ in range(5):
            out.append(cell(out[-1], x))
            out.append(cell(out[-1], x))
            before = scope.recorder.calls
            in_thread(scope.flush)
            assert scope.recorder.calls is not before and not len(scope.recorder.vertices)
            out.append(cell(out[-1], x))
            assert out[-1].owner.calls is scope.recorder.calls
    want = [cell(x, x)]
    for _ in range(15):
        want.append(cell(want[-1], x))
    assert scope.stats.calls == 16 and scope.stats.flushes == 6
    np.testing.assert_allclose([y.asscalar() for y in out], [y.asscalar() for y in want], rtol=1e-5)


def test_calls_behind_a_switch_of_autograd(variant):
    """Each state of autograd has functions of its own, and takes them up again."""
    cell, x = make_cell(), nd.array([0.5])
    x.attach_grad()
    with autograd.record(), gdb.batching() as scope:
        for _ in range(3):
            y = cell(x, x)
            with autograd.pause():
                cell(x, x)
            y = cell(y, x)
        recorded = [cls.recorded for cls in scope.recorder.calls.classes]
    assert recorded == [True, False] and scope.stats.calls == 9


def test_blocks_of_one_class_are_told_apart(variant):
    cells = [make_cell() for _ in range(3)]
    cells += [type(cells[0])() for _ in range(40)]
    x = nd.array([0.5])
    with gdb.batching() as scope:
        out = [cell(x, x) for _ in range(3) for cell in cells]
    assert scope.stats.calls == len(out) == 3 * 43
    assert len({float(y.asscalar()) for y in out}) == 1


@pytest.mark.parametrize("slots", [(), ("vertices",)])
def test_tables_of_other_listeners(variant, slots):
    """A dict is as good as a table, an attribute as good as a slot; what changes there counts from the next call on."""
    class Ears(Listener):
        __slots__ = slots

    cell, other, ears = make_cell(), make_cell(), Ears()
    x = nd.array([1.0])
    ears.vertices = {id(cell): lambda args: ("first", len(args))}
    with listening(ears):
        assert cell(x, x) == ("first", 2) and other(x, x).shape == (1,)
        ears.vertices[id(cell)] = lambda args: ("second", len(args))
        assert cell(x) == ("second", 1)
        ears.vertices = make_table()
        assert cell(x, x).shape == (1,)
        ears.vertices[id(cell)] = lambda args: ("third", len(args))
        assert cell() == ("third", 0)
        in_thread(lambda: setattr(ears, "vertices", {}))
        assert cell(x, x).shape == (1,)
        if slots:
            del ears.vertices
            with pytest.raises(AttributeError):
                cell(x, x)
    assert cell(x, x).shape == (1,)


def test_listeners_in_turn_keep_their_tables_where_they_like(variant):
    first = type("First", (Listener,), {"__slots__": ("vertices",)})()
    second = type("Second", (Listener,), {"__slots__": ("before", "between", "vertices")})()
    third, fourth, cell, x = Listener(), Listener(), make_cell(), nd.array([1.0])
    for number, ears in enumerate((first, second, third)):
        ears.vertices = {id(cell): lambda args, number=number: number}
    second.before = second.between = make_table()
    second.before[id(cell)] = fails
    with gdb.batching() as scope:
        cell(x, x)
        for number, ears in ((0, first), (1, second), (2, third), (0, first), (2, third), (1, second)):
            with listening(ears):
                assert cell(x, x) == number
                with listening(None), listening(fourth):
                    assert cell(x, x).asscalar() == pytest.approx(np.tanh(1) + 1)
            assert cell(x, x).owner.calls is scope.recorder.calls
    assert scope.stats.calls == 7


# ---- the quick way ---------------------------------------------------------------------------------


def trace_of(variant, calls, structure=0, num_outputs=1):
    """`calls(v, a, b)` makes calls of a vertex v; a and b are arrays of two owners. What is recorded."""
    with recorded_by(variant):
        vertex = Vertex(structure, num_outputs)
        vertex.lengths = set(range(1, 100))
        a, b = (make_append(0, 0, 1)(vertex.calls, 0, (vertex.calls.owner(name),))([]) for name in "ab")
        returned = [described(made) for made in calls(vertex, a, b)]
        return returned, vertex.state(), find_held(vertex.calls.made).tolist()


LARGEST = (1 << 30) - 1
OUTSIDE = [nd.ones((1,)), nd.zeros((1,))]
CALLS = {
    "owners in turn": lambda v, a, b: [v(x, y, k) for k in range(4) for x in (a, b) for y in (a, b)],
    "words": lambda v, a, b: [v(k, a) for k in (1, 0, -1, LARGEST, -LARGEST, LARGEST + 1, 2, -LARGEST - 1, 1 << 70,
                                                True, np.int64(5), 6, None, "word", 1.5, 7)],
    "lengths": lambda v, a, b: [v(a, [b] * n) for n in (2, 2, 3, 3, 62, 63, 64, 65, 99, 100, 64, 63, 2, 0, 1, 1)],
    "a list first": lambda v, a, b: [v([(a, b)] * n, k, b) for k in range(3) for n in (1, 2, 31, 32, 33, 34)],
    "elements in turn": lambda v, a, b: [v(a, [x, y]) for _ in range(3) for x in (a, b) for y in (b, a)],
    "nested": lambda v, a, b: [v((a, [k, (b, None)]), x) for k in range(3) for x in (True, False, a, b)],
    "another kind": lambda v, a, b: [v(x) for _ in range(3) for x in ([a, b], (a, b), [a], (a,), a, ([a], b))],
    "other lengths": lambda v, a, b: [v(*[a] * n) for _ in range(2) for n in (0, 1, 2, 31, 32, 33)],
    "outside arrays": lambda v, a, b: [v(x, b) for x in (a, a, OUTSIDE[0], a, OUTSIDE[1], OUTSIDE[0], a)],
}


@needs_compiled
@pytest.mark.parametrize("calls", CALLS)
def test_calls_like_the_newest_one_and_others_in_turn(calls):
    got, want = (trace_of(variant, CALLS[calls]) for variant in VARIANTS)
    assert got == want


@needs_compiled
def test_an_array_that_lost_its_token_goes_the_long_way():
    """It is handed on: another thread gives it its value, and then it comes from outside."""
    h, others = Harness(), []
    record = make_recorder(("a",), 0, 1)(h.calls, {(h.own,): (3, h.out)}, others.append, fails, ())
    for array in (h.a, h.b, h.a):
        assert described(record((array,)))[0] == "out"
    log = bytes(h.calls.log)
    del h.b.token
    assert record((h.b,)) is None and others.pop()[0] is h.b and h.calls.log == log
    h.b.token = 1 << 61                         # more than two digits
    assert described(record((h.b,)))[0] == "out" and np.frombuffer(h.calls.log, np.int64)[-1] == 1 << 61
    become_array(h.b, nd.ones((1,)))
    assert record((h.b,)) is None and others.pop()[0] is h.b and not others


def test_the_collector_records_and_flushes_in_the_middle_of_calls(variant):
    cell, x, seen = make_cell(), nd.array([0.5]), []

    class Garbage:
        def __init__(self, what):
            self.ring, self.what = self, what

        def __del__(self):
            seen.append(self.what())

    def flush():
        return out[-1].asscalar()

    want = cell(cell(x, x), x).asscalar()
    thresholds = gc.get_threshold()
    with gdb.batching() as scope:
        out = [cell(cell(x, x), x)]
        gc.set_threshold(1)
        gc.enable()
        try:
            for k in range(60):
                Garbage(flush if k % 10 == 9 else lambda: cell(cell(x, x), x))
                out.append(cell(cell(x, x), x))
                out += [cell(y, x) for y in [cell(x, x)]]
        finally:
            gc.disable()
            gc.set_threshold(*thresholds)
    assert len(seen) > 50 and scope.stats.flushes > 3
    values = [float(y if isinstance(y, (float, np.floating)) else y.asscalar()) for y in [*out, *seen]]
    np.testing.assert_allclose(values, want, rtol=1e-5)
