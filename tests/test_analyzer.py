"""The analyzer on hand-made and random recordings: pure arrays, no device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluon_dynbatch.analyzer import Recording, group, launches_by_depth, problem_of, scan
from gluon_dynbatch.classes import ClassInfo
from gluon_dynbatch.policies import POLICIES


def info(operands=1, outputs=1, buffer=0, split=None, alias=False, recorded=True, owns=False, widths=None, slots=0):
    return ClassInfo((widths or (1,) * operands), split or (False,) * operands, (1,) * outputs, (buffer,) * outputs,
                     alias, recorded, owns, slots)


def recording(classes, calls, num_leaves=0, wanted=(), heads=(), firsts=()):
    """calls: (class, positions, tokens); more tokens than the class has columns are those of a list."""
    call_class, width, tokens = zip(*calls) if calls else ((), (), ())
    slots = [classes[c].slots for c in call_class]
    counts = [(len(t) - len(classes[c].operand_widths) + n) // n if n else 0
              for c, t, n in zip(call_class, tokens, slots)]
    return Recording(
        classes, np.array(call_class, np.int64), np.array(width, np.int64),
        np.array([t for part in tokens for t in part], np.int64), np.zeros(num_leaves, np.int64),
        np.ones(num_leaves, np.int64), np.isin(np.arange(num_leaves), wanted), np.array(heads, np.int64),
        np.array(counts, np.int64), np.array(firsts or [0] * len(calls), np.int64))


def analyze(classes, calls, num_leaves=0, wanted=(), policy="depth", firsts=()):
    r = recording(classes, calls, num_leaves, wanted, firsts=firsts)
    s = scan(r)
    problem = problem_of(r, s, np.ones(len(classes)), np.ones(len(classes)))
    return r, s, group(r, s, 1, POLICIES[policy].plan(problem))


def test_depths_and_launches():
    """Two chains of different length: equal calls of one depth share a launch."""
    _, s, g = analyze([info()], [(0, 1, [-1]), (0, 1, [0]), (0, 1, [-2]), (0, 1, [2]), (0, 1, [3])], num_leaves=2)
    assert s.depth.tolist() == [0, 1, 0, 1, 2]
    assert g.order == [(0, 0), (0, 1), (0, 2)]
    assert g.classes[0].calls.tolist() == [0, 2, 1, 3, 4]
    assert g.classes[0].offsets.tolist() == [0, 2, 4, 5]
    # leaves own rows 0 and 1, the calls follow in the order of the run
    assert g.leaf_rows.tolist() == [0, 1]
    assert g.value_rows.tolist() == [2, 4, 3, 5, 6]
    assert g.classes[0].columns[0].tolist() == [0, 1, 2, 3, 5]


def test_a_leaf_in_every_call_is_shared():
    _, s, g = analyze([info(operands=2)], [(0, 1, [-1, -3]), (0, 1, [-2, -3])], num_leaves=3)
    assert g.classes[0].shared == {1: 2} and list(g.classes[0].columns) == [0]
    assert g.leaf_rows.tolist() == [0, 1, -1]           # what is only shared has no row


def test_a_recorded_value_in_every_call_is_not_shared():
    _, s, g = analyze([info(), info(operands=2)], [(0, 1, [-1]), (1, 1, [0, -1]), (1, 1, [0, -2])], num_leaves=2)
    assert 0 not in g.classes[1].shared
    assert g.classes[1].columns[0].tolist() == [g.value_rows[0]] * 2


def test_gradients_flow_only_where_they_are_wanted():
    classes = [info(), info(recorded=False), info(owns=True)]
    calls = [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [0]), (2, 1, [2]), (0, 1, [1])]
    _, s, _ = analyze(classes, calls, num_leaves=2, wanted=[0])
    assert s.active.tolist() == [True, False, False, True, False]
    assert s.wanted.tolist() == [True, False, False]    # column of class 2: its operand was made under pause


def test_an_alias_runs_nowhere_and_names_rows():
    """x is three rows; x[1] is row 1 of it, and a reader of x[1] is one deeper than x, not two."""
    three = ClassInfo((1,), (False,), (3,), (0,), False, True, False)
    _, s, g = analyze([three, info(alias=True), info()], [(0, 1, [-1]), (1, 1, [0]), (2, 1, [1])], num_leaves=1,
                      firsts=[0, 1, 0])
    assert s.depth.tolist() == [0, 0, 1]
    assert [c for c, _ in g.order] == [0, 2]
    assert g.value_rows.tolist() == [0, 1, 3]
    assert g.classes[2].columns[0].tolist() == [1]
    assert len(g.classes[1].depths) == 0


def test_part_of_a_leaf_waits_for_nobody():
    _, s, g = analyze([info(alias=True), info()], [(0, 1, [-1]), (1, 1, [0]), (0, 1, [-1]), (1, 1, [2])], num_leaves=1)
    assert s.depth.tolist() == [-1, 0, -1, 0]
    assert g.order == [(1, 0)] and g.classes[1].columns[0].tolist() == [0, 0]
    assert g.leaf_rows.tolist() == [0]


def test_ragged_calls_share_a_launch():
    """Calls on 2, 1 and 3 rows are six positions; the other operand is repeated for each."""
    maker = ClassInfo((1,), (False,), (1,), (0,), False, True, False)
    ragged = info(operands=2, split=(True, False))
    calls = [(0, 1, [-1]), (1, 2, [0, -2]), (1, 1, [0, -3]), (1, 3, [0, -2])]
    _, s, g = analyze([maker, ragged], calls, num_leaves=3)
    rows = g.classes[1]
    assert rows.offsets.tolist() == [0, 6] and rows.call_offsets.tolist() == [0, 3]
    start = int(g.value_rows[0])
    assert rows.columns[0].tolist() == [start, start + 1, start, start, start + 1, start + 2]
    assert rows.columns[1].tolist() == [g.leaf_rows[1]] * 2 + [g.leaf_rows[2]] + [g.leaf_rows[1]] * 3
    assert np.diff(g.value_rows[1:]).tolist() == [2, 1]


def test_wide_values_are_several_rows():
    wide = ClassInfo((2,), (False,), (2,), (0,), False, True, False)
    _, _, g = analyze([info(outputs=1), wide], [(0, 1, [-1]), (1, 1, [0]), (1, 1, [1])], num_leaves=1)
    assert g.classes[1].columns[0].tolist() == [0, 1, 1, 2]
    assert g.buffer_rows == [1 + 2 * 2]


def test_unbatched_gives_every_call_a_launch():
    _, _, g = analyze([info()], [(0, 1, [-1]), (0, 1, [-2]), (0, 1, [0])], num_leaves=2, policy="none")
    assert len(g.order) == 3 and g.classes[0].depths.tolist() == [0, 0, 1]


def test_nothing_recorded():
    r, s, g = analyze([], [])
    assert g.order == [] and len(s.depth) == 0


@st.composite
def recordings(draw):
    num_classes, num_leaves = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    classes = [info(operands=draw(st.integers(1, 3)), outputs=draw(st.integers(1, 2)), slots=draw(st.integers(0, 1)),
                    owns=draw(st.booleans()), recorded=draw(st.booleans())) for _ in range(num_classes)]
    calls, values = [], 0
    for _ in range(draw(st.integers(0, 25))):
        c = draw(st.integers(0, num_classes - 1))
        more = draw(st.integers(-1, 3)) if classes[c].slots else 0
        tokens = [draw(st.integers(-num_leaves, values - 1)) for _ in range(len(classes[c].operand_widths) + more)]
        calls.append((c, 1, tokens))
        values += len(classes[c].output_widths)
    return classes, calls, num_leaves


@given(recordings(), st.sampled_from(sorted(POLICIES)))
def test_every_plan_runs_each_call_once_after_its_operands_and_mixes_only_one_class(drawn, policy):
    classes, calls, num_leaves = drawn
    r, s, g = analyze(classes, calls, num_leaves, wanted=[0], policy=policy)
    when = {}
    for time, (c, k) in enumerate(g.order):
        rows = g.classes[c]
        for call in rows.calls[rows.call_offsets[k]:rows.call_offsets[k + 1]].tolist():
            assert call not in when and calls[call][0] == c
            when[call] = time
    assert sorted(when) == list(range(len(calls)))
    for i, (_, _, tokens) in enumerate(calls):
        assert all(when[int(s.maker[t])] < when[i] for t in tokens if t >= 0)
    taken = g.value_rows.tolist() + [row for row in g.leaf_rows.tolist() if row >= 0]
    assert len(set(taken)) == len(taken) == g.buffer_rows[0]        # every row has one owner


@given(recordings())
def test_columns_read_the_rows_of_their_tokens(drawn):
    classes, calls, num_leaves = drawn
    _, s, g = analyze(classes, calls, num_leaves)
    for c, rows in enumerate(g.classes):
        fixed, slots = len(classes[c].operand_widths) - classes[c].slots, classes[c].slots
        for k in range(fixed + slots):
            tokens = [t for i in rows.calls.tolist() for t in (calls[i][2][k:k + 1] if k < fixed else
                                                               calls[i][2][k::slots])]
            if tokens and k in rows.shared:
                assert set(tokens) == {-1 - rows.shared[k]}
            elif tokens:
                want = [g.value_rows[t] if t >= 0 else g.leaf_rows[-1 - t] for t in tokens]
                assert rows.columns[k].tolist() == [int(w) for w in want]
        if slots:
            assert np.diff(rows.edge_offsets).tolist() == [len(calls[i][2]) - fixed for i in rows.calls.tolist()]


def test_sources_are_found_through_parts_of_values():
    """A part of a part of the second output of call 0; and a part of a leaf."""
    classes = [info(outputs=2), info(alias=True), info(operands=2, alias=True), info(operands=2)]
    calls = [(0, 1, [-1]), (1, 1, [1]), (2, 1, [2, 0]), (1, 1, [-1]), (3, 1, [3, 4])]
    s = scan(recording(classes, calls, num_leaves=1))
    assert s.source.tolist() == [-1, 0, 0, 0, -1, 0, -1] and s.output[[1, 2, 3, 5]].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("length", [100_000])
def test_a_long_chain_is_scanned_without_recursion(length):
    calls = [(0, 1, [-1])] + [(0, 1, [k]) for k in range(length - 1)]
    _, s, g = analyze([info()], calls, num_leaves=1)
    assert s.depth[-1] == length - 1 and len(g.order) == length


@given(recordings(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_launches_by_depth_are_those_of_the_policy(drawn, aliases):
    """The scan knows the depths: the shortcut is the policy. Classes that only name rows run nowhere in both."""
    classes, calls, num_leaves = drawn
    named = [alias and len(c.output_widths) == 1 and not c.slots and len(c.operand_widths) > 0
             for c, alias in zip(classes, aliases)]
    r = recording([c._replace(alias=True) if name else c for c, name in zip(classes, named)], calls, num_leaves)
    s = scan(r)
    want = POLICIES["depth"].plan(problem_of(r, s, np.ones(len(classes)), np.ones(len(classes))))
    assert launches_by_depth(r, s).tolist() == want.tolist()


def test_part_of_a_value_is_as_deep_as_that_value():
    """Of its other operands a reshape_like only knows the shape: who reads it does not wait for them."""
    classes = [info(), info(operands=2, alias=True), info()]
    calls = [(0, 1, [-1]), (0, 1, [0]), (0, 1, [1]), (1, 1, [0, 2]), (2, 1, [3]), (2, 1, [0])]
    r = recording(classes, calls, num_leaves=1)
    s = scan(r)
    assert s.depth.tolist() == [0, 1, 2, 0, 1, 1]
    launch = launches_by_depth(r, s)
    assert launch[4] == launch[5] and launch[3] == -1
