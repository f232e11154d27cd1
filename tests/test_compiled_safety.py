"""The C extension leaks nothing, and cannot be used so that it crashes."""

import gc
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from recorder_check import NO_ARRAY, Calls, Harness, Owner, Vertex, described, fails, needs_compiled

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import mx
from gluon_dynbatch import fastpath
from gluon_dynbatch.fastpath import (
    FIRST,
    RETRY,
    common_owner,
    find_held,
    make_append,
    make_operators,
    make_recorder,
    structure_of,
)

nd = mx.nd
ARRAYS = [nd.ones((1,)), nd.zeros((1,)), nd.ones((1, 3))]


# ---- nothing leaks -------------------------------------------------------------------------------


def late(h):
    h.calls.watchers[:], h.calls.late = ["a test"], True
    h.record(h.args())
    assert h.calls.asked


def late_operator(h):
    h.calls.watchers[:], h.calls.late = ["a test"], True
    h.call_operator()
    assert h.calls.asked


def late_list_operator(h):
    h.calls.watchers[:], h.calls.late = ["a test"], True
    h.call_list_operator(h.a, h.b)
    assert h.calls.asked


def fail_in_too_late(h):
    h.calls.watchers[:], h.calls.too_late = ["a test"], fails
    h.record(h.args())


def fail_in_data(h):
    h.calls.data = fails
    h.record = make_recorder(h.FORMS, 0, 1)(h.calls, {}, fails, fails, ())
    h.record(h.args())


def fail_in_an_element(h):
    h.calls.outside = fails
    h.record_list = make_recorder(("n", (list, ((tuple, ("a", "a")),))), 0, 1, 1)(
        h.calls, {(h.own, h.own): (0, h.own)}, fails, fails, h.lengths)
    h.record_list((1.5, [h.pairs[0], (h.a, h.array)]))


def export_the_log(h):
    with memoryview(h.calls.log):
        h.record(h.args())


HANDED_ON = {
    "fewer arguments": lambda h: h.record(h.args()[1:]),
    "a word too large": lambda h: h.record(h.args(word=1 << 30)),
    "no word": lambda h: h.record(h.args(word="word")),
    "no list": lambda h: h.record(h.args(pair=(h.b, 2.5))),
    "a list too long": lambda h: h.record(h.args(pair=[h.b, 2.5, 3])),
    "no float": lambda h: h.record(h.args(pair=[h.b, 2])),
    "no numpy array": lambda h: h.record(h.args(data=3)),
    "not None": lambda h: h.record(h.args(none=True)),
    "no array": lambda h: h.record(h.args(array="array")),
    "no entry": lambda h: h.record(h.args(pair=[h.array, 2.5])),
    "an array without owner": lambda h: h.record(h.args(array=LazyArray())),
    "another length": lambda h: h.record_list((1.5, h.pairs * 2)),
    "an empty list": lambda h: h.record_list((1.5, [])),
    "a tuple for a list": lambda h: h.record_list((1.5, tuple(h.pairs))),
    "elements unlike the first": lambda h: h.record_list((1.5, [h.pairs[0], (h.a, h.array)])),
    "another element": lambda h: h.record_list((1.5, [h.pairs[0], [h.a, h.b]])),
    "another first element": lambda h: h.record_list((1.5, [(h.a,), h.pairs[0]])),
    "another operator": lambda h: h.call_operator("add"),
    "other attributes": lambda h: h.call_operator(values=[2, (3, 5)]),
    "an attribute that is a list": lambda h: h.call_operator(values=[2, [3, 4]]),
    "fewer values than names": lambda h: h.call_operator(values=[2]),
    "an outside array that is new": lambda h: h.call_operator(arrays=[nd.ones((1,)), h.b]),
    "operands of others": lambda h: h.call_operator(arrays=[h.b, h.array]),
    "no operands": lambda h: h.call_operator(arrays=[]),
    "too many operands": lambda h: h.call_operator(arrays=[h.a] * 33),
    "an operand without owner": lambda h: h.call_operator(arrays=[LazyArray(), h.b]),
    "no operand": lambda h: h.call_operator(arrays=["array", h.b]),
    "an operator too late": late_operator,
    "arguments of others": lambda h: h.call_list_operator(h.a, h.array),
    "arguments that are no arrays": lambda h: h.call_list_operator(h.a, "array"),
    "an argument without owner": lambda h: h.call_list_operator(LazyArray(), h.a),
    "no arguments": lambda h: h.call_list_operator(),
    "arguments too late": late_list_operator,
    "too late": late,
}
PATHS = {
    "recorded": (None, lambda h: h.record(h.args())),
    "a numpy integer": (None, lambda h: h.record(h.args(word=np.int32(5)))),
    "an outside array": (None, lambda h: h.record(h.args(array=h.array))),
    "a list": (None, lambda h: h.record_list((h.number, h.pairs))),
    "a long list": (None, lambda h: h.record_list((h.number, h.pairs * 30))),
    "an operator": (None, lambda h: h.call_operator()),
    "an operator on an outside array": (None, lambda h: (h.calls.outside(h.array), h.call_operator(
        arrays=[h.array, h.b]))),
    "an operator's arguments": (None, lambda h: h.call_operator(arrays=(h.a, h.b))),
    "any number of arguments": (None, lambda h: h.call_list_operator(*[h.a, h.b] * 30)),
    "no array stands for an operand": (TypeError, lambda h: h.calls.leaf_of.update({id(h.data): 3}) or h.call_operator(
        arrays=[h.data, h.b])),
    "an operator with fewer arguments": (TypeError, lambda h: h.operator("FC", [h.a, h.b], [])),
    "append": (None, lambda h: h.append([h.a, h.b])),
    "append an array with a value": (None, lambda h: h.append([h.a, h.array])),
    "append a number": (TypeError, lambda h: h.append([h.a, 1])),
    "append too few": (ValueError, lambda h: h.append([h.a])),
    "record no tuple": (TypeError, lambda h: h.record([h.a])),
    "an error in too_late": (ZeroDivisionError, fail_in_too_late),
    "an error in data": (ZeroDivisionError, fail_in_data),
    "an error in an element": (ZeroDivisionError, fail_in_an_element),
    "no room in the log": (BufferError, export_the_log),
    **{name: (None, path) for name, path in HANDED_ON.items()},
}


def run_path(harness, path):
    error, run = PATHS[path]
    if error is None:
        run(harness)
    else:
        with pytest.raises(error):
            run(harness)


@needs_compiled
@pytest.mark.parametrize("path", PATHS)
def test_no_reference_is_left_or_lost(path):
    harness = Harness()

    def counts():
        harness.calls.forget()
        harness.handed_on.clear()
        gc.collect()
        return np.array([sys.getrefcount(x) for x in harness.tracked()])

    run_path(harness, path)
    before = counts()
    for _ in range(2000):
        run_path(harness, path)
    grown = np.abs(counts() - before)
    # What other tests and threads left may die meanwhile, and the whole process holds None and True
    of_all = np.array([x is None or x is True or x is NotImplemented for x in harness.tracked()])
    assert (grown[~of_all] < 20).all(), grown
    assert (grown[of_all] < 200).all(), grown


@needs_compiled
@pytest.mark.parametrize("path", PATHS)
def test_no_memory_is_left(path):
    harness = Harness()

    def traced():
        harness.calls.forget()
        harness.handed_on.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        seen = [traced()]
        for _ in range(2):                      # the first time Python's own caches grow
            for _ in range(1000):
                run_path(harness, path)
            seen.append(traced())
        assert seen[2] - seen[1] < 10_000       # the smallest object is larger than ten bytes
    finally:
        tracemalloc.stop()


@needs_compiled
@pytest.mark.parametrize("path", HANDED_ON)
def test_what_is_handed_on_leaves_no_call(path):
    harness = Harness()
    log, made = len(harness.calls.log), len(harness.calls.made)
    PATHS[path][1](harness)
    (args,) = harness.handed_on
    assert type(args) is tuple
    if "too late" not in path:                  # then the log is nobody's any more
        assert (len(harness.calls.log), len(harness.calls.made)) == (log, made)


@needs_compiled
def test_a_call_that_does_not_get_into_the_log_has_no_results():
    harness = Harness()
    before = bytes(harness.calls.log), list(harness.calls.made)
    run_path(harness, "no room in the log")
    assert (bytes(harness.calls.log), harness.calls.made) == before
    assert described(harness.record(harness.args())) == [("out", 2), (("own", 3), None)]


def living():
    gc.collect()
    return sum(type(x) is LazyArray for x in gc.get_objects())


def test_results_die_in_silence(variant, monkeypatch):
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    vertex, before = Vertex(structure_of([0, [1]]), 2), living()
    results = [vertex(k, ARRAYS[0]) for k in range(1000)]
    assert living() == before + 2001            # and what stands for the outside array
    assert find_held(vertex.calls.made).all()
    ring = results[:500]
    ring.append(ring)                           # dies by the garbage collector
    owners = [sys.getrefcount(owner) for owner in vertex.owners]
    del results, ring
    assert living() == before + 1 and not find_held(vertex.calls.made).any()
    assert [sys.getrefcount(owner) for owner in vertex.owners] == [n - 1000 for n in owners]
    assert not complaints


@needs_compiled
def test_functions_in_a_ring_are_collected():
    class Mortal(Calls):
        died = 0

        def __del__(self):
            Mortal.died += 1

    for _ in range(3):
        calls = Mortal()
        entries = {}
        record = make_recorder(("a",), 0, 1)(calls, entries, fails, fails, ())
        owner = Owner("x")
        owner.calls = calls
        append = make_append(1, 0, 1)(calls, 0, (owner,))
        call = fastpath.compiled.Call(fails, calls, calls)
        operators = make_operators(calls, entries)
        calls.ring = entries["ring"] = call.ring = [record, append, call, operators, calls]
    del calls, entries, owner, record, append, call, operators
    gc.collect()
    assert Mortal.died == 3


@needs_compiled
def test_a_long_chain_of_functions():
    """They hand on a call, and are freed, by loops: a small stack is enough."""
    calls, seen = Calls(), []

    def work():
        record = seen.append
        for _ in range(100_000):
            record = make_recorder(("a",), 0, 1)(calls, {}, record, fails, ())
        record((1, 2))

    before = threading.stack_size(1 << 18)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert seen == [(1, 2)]


# ---- wrong use -----------------------------------------------------------------------------------


def without(name):
    calls = Calls()
    delattr(calls, name)
    return calls


def with_wrong(name):
    calls = Calls()
    setattr(calls, name, ())
    return calls


NESTED = (list, ("a",))
WRONG_FORMS = [["a"], "a", ("?",), ("",), ("aa",), (5,), ((),), ((list,),), ((dict, ()),), ((list, ["a"]),),
               ((list, ("a",), 1),), (NESTED, (list, (None,))), ("a",) * 33, ((list, ("i",) * 33),)]
WRONG_STRUCTURES = [1, -1, 1 << 80, True, "r0", [], (), (list, [0]), (set, (0,)), (list, (0, (list, (1,)))), 0.0]
PARTS = ("log", "made", "watchers", "leaf_of")
WRONG_CALLS = [*map(with_wrong, PARTS), *map(without, PARTS), None]
WRONG_LISTS = ["a", "i", (list, ()), (list, ("a", "a")), (list, ("i",)), (list, ((list, ()),)),
               (list, ((list, ("d",)),)), (list, ((tuple, ("a", NESTED)),))]
WRONG = [
    *[("Record", 0, x) for x in WRONG_FORMS], *[("Record", 1, x) for x in WRONG_STRUCTURES],
    *[("Record", 2, x) for x in (0, -1, "1", None, 1 << 80)], *[("Record", 3, x) for x in (-2, 1, 0, "0", None)],
    *[("Record", 4, x) for x in WRONG_CALLS], *[("Record", 5, x) for x in ([], None)],
    *[("Operators", 0, x) for x in WRONG_CALLS], *[("Operators", 1, x) for x in ([], None)],
    *[("Append", 0, x) for x in WRONG_STRUCTURES], *[("Append", 1, x) for x in (-1, None)],
    *[("Append", 2, x) for x in (-1, None)], *[("Append", 3, x) for x in WRONG_CALLS],
    *[("Append", 4, x) for x in (None, "0", 1 << 80)], *[("Append", 5, x) for x in ((), [Owner("x")], None)]]


def right_arguments(kind):
    calls, owners = Calls(), (Owner("x"),)
    return {"Record": [("a",), 0, 1, -1, calls, {}, fails, fails, ()], "Operators": [calls, {}],
            "Append": [0, 1, 0, calls, 0, owners]}[kind]


@needs_compiled
@pytest.mark.parametrize("kind, place, value", WRONG, ids=lambda x: "calls" if isinstance(x, Calls) else repr(x)[:25])
def test_wrong_arguments_of_makers(kind, place, value):
    args = right_arguments(kind)
    make = getattr(fastpath.compiled, kind)
    assert make(*args)
    args[place] = value
    with pytest.raises((TypeError, ValueError, OverflowError, AttributeError)):
        make(*args)
    for few_or_named in ({}, {"names": 1}):
        with pytest.raises(TypeError):
            make(*right_arguments(kind)[:-1], **few_or_named)
    with pytest.raises(TypeError):
        make(*right_arguments(kind), names=1)


@needs_compiled
@pytest.mark.parametrize("form", WRONG_LISTS, ids=repr)
def test_wrong_forms_of_lists(form):
    with pytest.raises(ValueError, match="a list"):
        make_recorder((form,), 0, 1, 0)(Calls(), {}, fails, fails, {1})


@needs_compiled
@pytest.mark.parametrize("args, names", [((), {}), (([],), {}), (((), ()), {}), ((None,), {}), ((), {"args": ()}),
                                         (((),), {"more": 1})], ids=repr)
def test_wrong_calls_of_functions(args, names):
    harness = Harness()
    for function in (harness.record, harness.record_list):
        with pytest.raises(TypeError, match="a tuple of arguments"):
            function(*args, **names)
    with pytest.raises((TypeError, ValueError)):
        harness.append(*args, **names)


@needs_compiled
@pytest.mark.parametrize("entry", [(), (0,), (0, 1, 2), [0, 1], ("0", 1), (None, 1), (1 << 80, 1), None], ids=repr)
def test_wrong_entries(entry):
    with pytest.raises((ValueError, OverflowError)):
        make_recorder((), 0, 1)(Calls(), {(): entry}, fails, fails, ())(())


@needs_compiled
@pytest.mark.parametrize("answer", [None, 1, ARRAYS[0]], ids=repr)
def test_wrong_answers_of_calls(answer):
    calls, a = Calls(), Harness().a
    calls.outside = calls.data = lambda x: answer
    for form, value in [("a", ARRAYS[0]), ("d", np.ones(3)), ("n", 1.5)]:
        with pytest.raises(TypeError, match="stands for an array"):
            make_recorder((form,), 0, 1)(calls, {(): (0, 1)}, fails, fails, ())((value,))
    with pytest.raises(TypeError, match="stands for an array"):
        make_recorder(((list, ("a",)),), 0, 1, 0)(calls, {(a.owner,): (0, 1)}, fails, fails, {2})(([a, ARRAYS[0]],))
    assert not calls.log and not calls.made


@needs_compiled
def test_wrong_arguments_of_module_functions():
    compiled = fastpath.compiled
    mixed = type("Mixed", (), {"owner": LazyArray.owner, "token": LazyArray.token})
    plain = type("Plain", (), {"owner": 1, "token": 2})
    rest = (np.ndarray, np.integer, RETRY, FIRST, (1 << 30) - 1)
    for wrong in [(), (1, *rest), (int, *rest), (mixed, *rest), (plain, *rest), (LazyArray, *rest[:-1]),
                  (LazyArray, np.ndarray, 1, *rest[2:])]:
        with pytest.raises((TypeError, AttributeError)):
            compiled.bind(*wrong)
    for wrong in ((), None, b""):
        with pytest.raises(TypeError):
            compiled.is_held(wrong, False)
    with pytest.raises(TypeError):
        compiled.Call()
    with pytest.raises(TypeError, match="hooks are dicts"):
        compiled.Record((), 0, 1, -1, Calls(), {}, fails, fails, (), (1,))
    assert compiled.is_held([], False) == b"" and described(Harness().a) == ("own", 0)


def test_the_owner_of_all(variant):
    with gdb.batching():
        a, b = ARRAYS[0] * 2, ARRAYS[1] * 3
        wide = ARRAYS[2] * 2
    assert common_owner([a, b]) is common_owner((a,)) is a.owner
    assert common_owner([a, wide]) is common_owner([a, ARRAYS[0]]) is common_owner([]) is None
    assert common_owner([NO_ARRAY, NO_ARRAY]) is None


@needs_compiled
def test_nothing_is_made_before_bind():
    code = ("import sys; from importlib.machinery import ExtensionFileLoader as L; from importlib.util import *; "
            "spec = spec_from_loader('_fastpath', L('_fastpath', sys.argv[1])); m = module_from_spec(spec); "
            "spec.loader.exec_module(m)\n"
            "for kind in (m.Record, m.Append, m.Operators, m.Call):\n"
            "    try: kind()\n    except TypeError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", code, fastpath.compiled.__file__], capture_output=True, text=True)
    assert done.stdout == "bind comes first\n" * 4, done.stderr
