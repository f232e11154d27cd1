"""The short way of recording: who still holds a result, forms of arguments, and flushes from another thread."""

import contextlib
import gc
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import calls as calls_module
from gluon_dynbatch.fastpath import FIRST, RETRY, form_of

nd = mx.nd
pytestmark = pytest.mark.usefixtures("variant")


@gdb.vertex
class Cell(gluon.HybridBlock):
    """A word id and the states of children."""

    def hybrid_forward(self, F, word, *children):
        total = F.tanh(word * 0.1)
        for h, c in children:
            total = total + F.broadcast_mul(h, c)
        return total, total * 0.5


def heads_of(work):
    """The values of one flush that count as held when it happens."""
    x = nd.array([1.0])
    x.attach_grad()
    with autograd.record(), gdb.batching(policy="none") as scope:        # joined calls have other numbers
        kept = work(x)
    return kept, held_in(scope)


def held_in(scope):
    (report,) = scope.flushes
    return report._arrays[0].heads.tolist()


# ---- who holds a result ----------------------------------------------------------------------


def test_a_result_that_died_is_no_output():
    def work(x):
        y = x * 2
        z = y * 3
        del y
        return z

    assert heads_of(work)[1] == [1]


@pytest.mark.parametrize("hold", [
    lambda y: [y], lambda y: {"y": y}, lambda y: (lambda: y), lambda y: type("Holder", (), {"y": y}), lambda y: (y, y)])
def test_a_result_that_anything_holds_is_an_output(hold):
    kept, heads = heads_of(lambda x: hold(x * 2))
    assert heads == [0] and kept


def test_results_of_a_vertex_die_one_by_one():
    cell = Cell()

    def work(x):
        state = cell(1)
        for word in range(5):
            state = cell(word, state, state)
        return state[1], cell(7)[0]

    x = nd.array([1.0])
    with gdb.batching() as scope:
        kept = work(x)
        calls = scope.recorder.calls
    assert held_in(scope) == [11, 12]
    assert len(kept) == 2 and calls.num_taken == 14


def test_an_in_place_write_lets_the_old_value_die():
    """Not under record, where MXNet refuses to write into an array on its tape."""
    def work(x):
        y = x * 2                   # 0
        z = y * 3                   # 1 reads it
        y += z                      # 2
        y *= x                      # 3
        return y, z

    with gdb.batching(policy="none") as scope:
        y, z = work(nd.array([1.0]))
    assert held_in(scope) == [1, 3]
    assert (y.asscalar(), z.asscalar()) == (8, 6)


def test_an_operand_that_is_rebound_was_read_with_its_old_value():
    cell = Cell()
    with gdb.batching():
        h, c = cell(1)
        first = cell(2, (h, c))
        h += 10
        second = cell(2, (h, c))
    one = np.tanh(0.1)
    np.testing.assert_allclose(first[0].asscalar(), np.tanh(0.2) + one * one / 2, rtol=1e-5)
    np.testing.assert_allclose(second[0].asscalar(), np.tanh(0.2) + (one + 10) * one / 2, rtol=1e-5)


def test_a_view_does_not_keep_its_base_alive():
    def work(x):
        base = x.reshape((1, 1)) * 2
        return base[0]

    assert len(heads_of(work)[1]) == 1


def test_a_result_held_only_by_a_cycle_counts_as_held():
    def work(x):
        ring = [x * 2]
        ring.append(ring)

    assert heads_of(work)[1] == [0]


def test_what_only_recording_needs_is_dropped_at_the_flush():
    """Owners and generated functions hold their calls, and with them the buffers of the run."""
    cell = Cell()
    with gdb.batching() as scope:
        out = cell(1, cell(2), cell(3))
        calls = scope.recorder.calls
    assert out[0].shape == (1,) and calls.flushed is not None
    with pytest.raises(ZeroDivisionError), gdb.batching() as scope:
        cell(1, cell(2))
        discarded = scope.recorder.calls
        raise ZeroDivisionError
    for over in (calls, discarded):
        assert not any((over.log, over.made, over.entries, over.by_key, over.owners, over.short, over.forms,
                        over.leaf_of))
    alive = weakref.ref(calls)
    del out, calls, discarded, over, scope
    gc.collect()
    assert alive() is None


# ---- forms of arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("args, form", [
    ((1, np.int64(2), np.uint8(3)), ("i", "i", "i")), ((1.5,), ("n",)), ((None, True), ("None", "True")),
    (([], (1, [2.0])), ((list, ()), (tuple, ("i", (list, ("n",)))))),
    ((1 << 30,), None), (("word",), None), ((np.float32(1),), None), (([np.zeros(2)],), ((list, ("d",)),)),
    ((1,) * 33, None)])
def test_forms(args, form):
    assert form_of(args) == form


def test_arrays_of_every_origin_have_one_form():
    with gdb.batching():
        lazy = nd.ones((1,)) + 1
        assert form_of((lazy, [nd.ones((1,))])) == ("a", (list, ("a",)))


@pytest.mark.parametrize("words", [
    [1, 2, 3], [np.int32(1), 2, np.int64(3)], [1, 2.5, 3], [1, 1 << 40, -(1 << 30)], [1.5, np.float32(2.5), 3],
    [1, nd.array([2.0]), np.array([3.0])]])
def test_numbers_of_every_kind(words):
    cell = Cell()
    want = [cell(w)[0].asscalar() for w in words for _ in range(3)]
    with gdb.batching() as scope:
        got = [cell(w)[0] for w in words for _ in range(3)]
    assert [y.asscalar() for y in got] == want
    assert scope.stats.launches == 1 and not scope.stats.fallbacks


def test_calls_of_many_forms_in_turn():
    """Leaves and values, more and fewer children, training and not: each call finds its own entry."""
    cell = Cell()
    zero = (nd.zeros((1,)), nd.ones((1,)))

    def work():
        made = [cell(1, zero)]
        for k in range(40):
            mode = autograd.train_mode() if k % 5 == 0 else autograd.predict_mode()
            with mode:
                made.append(cell(k, *(made[-(k % 4):] if k % 4 else [zero, (made[-1][0], zero[1])])))
        return made

    want = [(h.asscalar(), c.asscalar()) for h, c in work()]
    with gdb.batching() as scope:
        got = work()
    np.testing.assert_allclose([(h.asscalar(), c.asscalar()) for h, c in got], want, rtol=1e-4)
    assert scope.stats.calls == 41


def test_what_returns_another_structure_for_other_shapes():
    @gdb.vertex
    def split(F, x):
        return x * 2 if x.shape[0] == 1 else [x[:1] * 2, (x[1:], None)]

    xs = [nd.array([1.0]), nd.array([2.0, 3.0])] * 3
    with gdb.batching():
        out = [split(nd, x) for x in xs]
    assert [type(y) for y in out[::2]] == [LazyArray] * 3
    for first, (second, nothing) in out[1::2]:
        assert (first.asscalar(), second.asscalar(), nothing) == (4, 3, None)


def test_a_sparse_argument_records_operator_by_operator():
    @gdb.vertex
    def product(F, x, y):
        return F.dot(x, y)

    sparse, dense = nd.array([[1.0, 0.0]]).tostype("csr"), nd.array([[1.0], [2.0]])
    with gdb.batching() as scope:
        product(nd, dense.T, dense)
        out = product(nd, sparse, dense)
    assert out.asscalar() == 1
    assert any("sparse" in reason for reason in scope.stats.fallbacks)


# ---- another thread --------------------------------------------------------------------------


@pytest.fixture
def hasty():
    """Threads take turns after every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def read_by_another_thread(latest, read):
    """Another thread does `read` with what is in `latest`, again and again."""
    seen, stop = [], threading.Event()

    def go_on():
        while not stop.is_set():
            if latest[0] is not None:
                try:
                    seen.append(read(latest[0]))
                except Exception as error:      # pytest would only warn
                    seen.append(error)

    reader = threading.Thread(target=go_on)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()
    assert seen and not [x for x in seen if isinstance(x, Exception)]


def test_another_thread_reads_while_this_one_records(hasty):
    cell, latest = Cell(), [None]

    def chain():
        state = cell(1)
        for k in range(300):
            state = cell(k % 7, state)
            latest[0] = state[0]
            if k % 50 == 0:
                time.sleep(1e-4)            # recording is so quick that the other thread would not get in
        return state[0].asscalar()

    want = chain()
    latest[0] = None
    with gdb.batching() as scope, read_by_another_thread(latest, nd.NDArray.asscalar):
        for _ in range(5):
            np.testing.assert_allclose(chain(), want, rtol=1e-4)
    assert scope.stats.flushes > 5


def test_another_thread_reads_while_this_one_records_operators(hasty):
    latest = [None]

    def chain():
        h = c = nd.ones((1,))
        for k in range(60):
            h = nd.tanh(h * 0.5 + c)
            c = nd.add_n(h, h, c) * 0.3
            latest[0] = h
            if k % 10 == 0:
                time.sleep(1e-4)            # see above
        return h.asscalar()

    want = chain()
    latest[0] = None
    with gdb.batching(backend="mxnet") as scope, read_by_another_thread(latest, nd.NDArray.wait_to_read):
        for _ in range(10):
            np.testing.assert_allclose(chain(), want, rtol=1e-4)
    assert scope.stats.flushes > 10


def test_an_entry_that_is_made_behind_a_flush_records_nothing_there():
    """Its log is a new one, whose numbers would be those of calls that were flushed."""
    with gdb.batching() as scope:
        x = nd.ones((1,))
        y = x * 2
        calls, owner = scope.recorder.calls, y.owner
        calls.flush("a test")
        z = nd.tanh(x)
        entry = calls.new_entry(scope.recorder.calls.classes[0].signature, False)
        assert entry.append([z]) is RETRY
        assert owner.calls is calls and (y.asscalar(), z.asscalar()) == (2, pytest.approx(np.tanh(1)))


def other_calls(x):
    """Two calls that nobody else here records."""
    return nd.exp(x) - nd.sqrt(x)


@pytest.mark.parametrize("step", ["class_kind", "make_append", "entry_kind"])
def test_what_the_collector_records_while_an_entry_is_made_has_entries_of_its_own(step, monkeypatch):
    """It runs wherever an object is made, and finalizers may call anything."""
    x, found, whole = nd.array([4.0]), [], getattr(calls_module, step)

    def collecting(*given):
        if not found:
            found.append(None)
            found[0] = other_calls(x)
        return whole(*given)

    with gdb.batching():
        first = x * 2
        monkeypatch.setattr(calls_module, step, collecting)
        second = nd.tanh(first) + first
    want = [8, 8 + np.tanh(8), np.exp(4) - 2]
    np.testing.assert_allclose([y.asscalar() for y in (first, second, found[0])], want, rtol=1e-5)


def test_an_entry_that_an_interrupt_ended_leaves_nothing_behind(monkeypatch):
    class Interrupted(list):
        def append(self, entry):
            raise KeyboardInterrupt

    x = nd.array([4.0])
    with gdb.batching() as scope:
        first, calls = x * 2, scope.recorder.calls
        entries = calls.entries
        calls.entries = Interrupted(entries)
        with pytest.raises(KeyboardInterrupt):
            nd.split(nd.array([[1, 2, 3]]), 3)          # three results
        assert len(calls.kinds) == len(calls.entry_classes) == len(entries) + 1
        calls.entries = entries
        second = other_calls(first)
    np.testing.assert_allclose([first.asscalar(), second.asscalar()], [8, np.exp(8) - np.sqrt(8)], rtol=1e-5)


def test_calls_that_come_too_late_are_recorded_anew():
    """What a flush from another thread meets in the middle of a call: its tokens are there, its numbers are not."""
    cell = Cell()
    with gdb.batching() as scope:
        state = cell(1)
        cell(2, state)
        calls = scope.recorder.calls
        record = scope.recorder.vertices[id(cell)]
        flusher = threading.Thread(target=calls.flush, args=("a test",))
        calls.made.append(FIRST + len(calls.made))
        flusher.start()
        flusher.join()
        assert calls.flushed is not None and scope.recorder.calls is not calls
        late = record((3, state))           # a function of the old calls
        assert late[0].owner.calls is scope.recorder.calls
    want = np.tanh(0.3) + np.tanh(0.1) ** 2 / 2
    np.testing.assert_allclose(late[0].asscalar(), want, rtol=1e-5)


def test_an_interrupted_call_is_an_error_and_not_a_wrong_value():
    cell = Cell()
    with pytest.raises(gdb.DynBatchError, match="interrupted the recording"), gdb.batching() as scope:
        cell(1)
        scope.recorder.calls.made.append(FIRST + len(scope.recorder.calls.made))
        cell(2)
