"""The C extension records as generated Python code does, also where another thread flushes in the middle of a call."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder_check import VARIANTS, Calls, Harness, Vertex, described, fails, needs_compiled, recorded_by

import gluon_dynbatch as gdb
import gluon_dynbatch.calls
from cavs_core import LazyArray
from cavs_core.mxnet_compat import gluon, mx
from gluon_dynbatch import fastpath
from gluon_dynbatch.fastpath import find_held, make_recorder, structure_of

nd = mx.nd
LARGEST = (1 << 30) - 1
ARRAYS = [nd.ones((1,)), nd.zeros((1,)), nd.ones((1, 3))]
DATA = [np.ones(3), np.zeros((2, 2)), np.float32(1), np.int8(-3), np.uint8(200), np.int64(7), np.uint64(1 << 63),
        np.int64(LARGEST), np.int64(-LARGEST - 1), np.bool_(True), np.timedelta64(5)]


# ---- the same as generated code ------------------------------------------------------------------


class Earlier(int):
    """Stands for a result of an earlier call, the newest is 0; for an outside array if there is none."""


def filled(nested, results):
    if isinstance(nested, (list, tuple)):
        return type(nested)(filled(part, results) for part in nested)
    if type(nested) is Earlier:
        return results[-1 - nested] if nested < len(results) else ARRAYS[nested % len(ARRAYS)]
    return nested


def run_calls(variant, calls, structure=0, num_outputs=1):
    """What is recorded, and what calls return."""
    with recorded_by(variant):
        vertex, results, returned = Vertex(structure, num_outputs), [], []
        for args in calls:
            result = vertex(*filled(args, results))
            results += [x for x in itertools.chain(*_nested(result)) if type(x) is LazyArray]
            returned.append(described(result))
        return returned, vertex.state(), find_held(vertex.calls.made).tolist(), vertex.general_calls


def _nested(result):
    yield [result] if not isinstance(result, (list, tuple)) else [x for part in result for x in itertools.chain(
        *_nested(part))]


def assert_same(calls, structure=0, num_outputs=1):
    got, want = (run_calls(variant, calls, structure, num_outputs) for variant in VARIANTS)
    assert got == want
    return got


PAIRS = [(Earlier(0), Earlier(1)), (Earlier(1), Earlier(0))]


@needs_compiled
@pytest.mark.parametrize("args", [
    (), (1,), (1, 2.5, None, True, False), (ARRAYS[0], ARRAYS[2]), (Earlier(0), ARRAYS[0], Earlier(2)),
    (DATA[0], 1.5, DATA[1]), ([], (), [()], ([1, (2.0, [Earlier(0)])],)), tuple(DATA[3:9]), (DATA[2],), (DATA[9],),
    (DATA[10],), ("word",), (1 << 70,), (-(1 << 63), LARGEST), (LARGEST, -LARGEST), (LARGEST + 1,), (Earlier(0),) * 32,
    (1,) * 33, ([[[[[1]]]]],) * 32, ([],) * 300, ([Earlier(0)] * 60, 1, 2.5), (1.5, tuple(PAIRS) * 30),
    (ARRAYS[0], PAIRS[:1], DATA[0], 0.5), ([[Earlier(0)] * 3] * 7,), ([ARRAYS[0], Earlier(0)], 1)],
    ids=lambda args: repr(args)[:40])
def test_calls_of_one_form(args):
    *_, general_calls = assert_same([args] * 5)
    assert general_calls <= 3 or fastpath.form_of(filled(args, [])) is None


@needs_compiled
@pytest.mark.parametrize("template", [
    0, [0], (0,), [0, 1], (1, 0, None), [[0, 0], (1, [None, (2,)])], [], None, list(range(17)),
    [(k,) for k in range(40)]],
    ids=lambda template: repr(template)[:30])
def test_results_of_every_structure(template):
    numbers = [int(x) for x in repr(template).replace("None", "").translate(str.maketrans("[](),", "     ")).split()]
    num_outputs = 1 + max(numbers, default=0)
    returned, state, held, _ = assert_same([(1, ARRAYS[0])] * 4, structure_of(template), num_outputs)
    assert len(held) == 4 * num_outputs == len(state[1])


def test_a_structure_has_no_kinds_but_list_and_tuple():
    kinds = type("Lists", (list,), {}), type("Tuples", (tuple,), {})
    assert structure_of(kinds[0]([kinds[1]([0]), None])) == (list, ((tuple, (0,)), None))


NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(1 << 70), 1 << 70), st.floats(), st.none(), st.booleans(), st.sampled_from(DATA),
    st.sampled_from([LARGEST, -LARGEST, LARGEST + 1, -LARGEST - 1, (1 << 63) - 1, -(1 << 63)]), st.text(max_size=1))
SOME_ARRAY = st.one_of(st.builds(Earlier, st.integers(0, 4)), st.sampled_from(ARRAYS))
ARGUMENT = st.recursive(
    st.one_of(SOME_ARRAY, NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)), max_leaves=8)
ELEMENT = st.one_of(SOME_ARRAY, st.tuples(SOME_ARRAY, SOME_ARRAY), st.tuples(SOME_ARRAY, SOME_ARRAY).map(list))
LIST = st.one_of(
    st.builds(lambda element, n: [element] * n, ELEMENT, st.sampled_from([0, 1, 2, 3, 4, 7, 60])),
    st.lists(ELEMENT, max_size=8), st.lists(ELEMENT, max_size=3).map(tuple))
ARGUMENTS = st.lists(st.one_of(ARGUMENT, LIST), max_size=5).map(tuple)
TEMPLATE = st.recursive(
    st.one_of(st.none(), st.integers(0, 3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)), max_leaves=5)


@needs_compiled
@settings(max_examples=100)
@given(st.lists(ARGUMENTS, min_size=1, max_size=4), TEMPLATE, st.lists(st.integers(0, 3), max_size=8))
def test_random_calls(forms, template, order):
    """Each form three times, so that it goes the short way; then in turn."""
    calls = [args for args in forms for _ in range(3)] + [forms[k % len(forms)] for k in order]
    assert_same(calls, structure_of(template), 4)


@gdb.vertex
def total(F, *args):
    out = 0

    def add(x):
        nonlocal out
        if isinstance(x, (list, tuple)):
            for part in x:
                add(part)
        elif x is not None and x is not False:
            out = out + (1 if x is True else x)

    add(args)
    return out, [F.tanh(out), None]


def log_of(variant, calls):
    with recorded_by(variant), gdb.batching() as scope:
        results = []
        made = [total(nd, *filled(args, results)) for args in calls if not results.extend([ARRAYS[0] * 2])]
        seen = scope.recorder.calls
        log, tokens = bytes(seen.log), list(seen.made)
    return log, tokens, [(float(a.asscalar()), float(b.asscalar()), nothing) for a, (b, nothing) in made]


@needs_compiled
@pytest.mark.parametrize("args", [
    (1,), (1, 2.5), (ARRAYS[0], np.ones(1)), ([Earlier(0), ARRAYS[1]], None, True), ([Earlier(0)], 1.5),
    ((Earlier(0),) * 9, 1), ([(Earlier(0), ARRAYS[0])] * 3, np.int64(4)), (1 << 40, [[]])], ids=lambda a: repr(a)[:30])
def test_a_real_vertex(args):
    got, want = (log_of(variant, [args, (1.0, *args)] * 4) for variant in VARIANTS)
    assert got == want


# ---- another thread, and other code that runs meanwhile --------------------------------------------


@gdb.vertex
class Cell(gluon.HybridBlock):
    """A cell."""

    def hybrid_forward(self, F, x, *states):
        for state in states:
            x = x + (F.tanh(state) * 2 if not isinstance(state, list) else state[0] - state[1])
        return x


@pytest.fixture
def meanwhile(monkeypatch):
    """{name of a method of Calls: what runs once at the end of it}."""
    todo = {}

    def wrap(name, plain):
        def method(self, value):
            leaf = plain(self, value)
            todo.pop(name, int)()
            return leaf

        monkeypatch.setattr(gluon_dynbatch.calls.Calls, name, method)

    for name in ("outside", "data"):
        wrap(name, getattr(gluon_dynbatch.calls.Calls, name))
    return todo


@pytest.mark.parametrize("method, args", [
    ("data", lambda y, new: (1.5, y, y)), ("data", lambda y, new: (y, y, np.array([1.5]))),
    ("outside", lambda y, new: (ARRAYS[0], y, new)), ("outside", lambda y, new: (y, [ARRAYS[0], y], new)),
    ("outside", lambda y, new: (y, [y, new, ARRAYS[0]], ARRAYS[0]))],
    ids=["a number", "a numpy array", "a new array", "a new array behind a list", "a new array in a list"])
def test_another_thread_flushes_in_the_middle_of_a_call(variant, meanwhile, method, args):
    """What stood for one operand is gone, or has its value, when the next one is looked at."""
    cell = Cell()

    def flush():
        thread = threading.Thread(target=lambda: y.wait_to_read())
        thread.start()
        thread.join()
        assert type(y) is not LazyArray and not calls.leaf_of

    with gdb.batching() as scope:
        y = cell(ARRAYS[0], ARRAYS[1])
        calls = scope.recorder.calls
        for _ in range(3):
            cell(*args(y, nd.ones((1,))))
        meanwhile[method] = flush
        late = cell(*args(y, nd.ones((1,))))
        assert not meanwhile and scope.recorder.calls is not calls
    want = cell(*args(y, nd.ones((1,))))
    np.testing.assert_allclose(late.asscalar(), want.asscalar(), rtol=1e-5)


@needs_compiled
def test_lists_that_change_while_they_are_read():
    """The call is handed on: whoever takes it looks at the list as it is then."""
    harness, seen = Harness(), []

    class Word(np.int64):
        def __int__(self):
            words.clear()
            return 1

    words = [Word(1), 2, 3]
    make_recorder(((list, ("i",) * 3),), 0, 1)(harness.calls, {}, seen.append, fails, ())((words,))
    new, pairs = nd.ones((2,)), list(harness.pairs)
    for args in [(new, pairs), (harness.a, [(harness.a, new), harness.pairs[0]])]:
        calls = Calls()
        calls.outside = lambda array, pairs=args[1]: pairs.clear() or harness.a
        make_recorder(("a", (list, ((tuple, ("a", "a")),))), 0, 1, 1)(
            calls, {(harness.own,) * 3: (0, harness.own)}, seen.append, fails, {2})(args)
        assert not calls.log
    assert seen == [([],), (new, []), (harness.a, [])]


@needs_compiled
def test_an_operator_that_was_met_before():
    """It is found by its name, its attributes and who owns its operands; the rest is as with `append`."""
    harness, other = Harness(), Harness()
    for arrays in ("a", "b"), ("array", "a"):           # the array is known since the harness was made
        made = harness.call_operator(arrays=[getattr(harness, x) for x in arrays])
        wanted = other.append([x if type(x) is LazyArray else other.calls.outside(x)
                               for x in (getattr(other, name) for name in arrays)])
        assert described(made) == described(wanted) and harness.calls.log == other.calls.log
    assert harness.calls.made == other.calls.made and not harness.handed_on
    assert harness.operator("FC", [harness.a] * 2, ["units"], [2]) is NotImplemented
