"""Calls that repeat others, on hand-made and random recordings."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_analyzer import info, recording

from gluon_dynbatch.repeats import Facts, Lookups, find_repeats


def distinct(calls, classes=None, heads=(), numbers=(), num_data=3, pure=None, kinds=None, firsts=(), lookups=None,
             names_row=(), viewed=()):
    """The first of each call, and what is left, as (class, tokens), with its numbers.

    lookups : {call: (table, numbers)}
    """
    classes = classes or [info(), info(operands=2)]
    r = recording(classes, calls, num_data + len(numbers), heads=heads, firsts=firsts)
    kinds = r.call_class if kinds is None else np.array(kinds, np.int64)
    pure = np.array([1] * (int(kinds.max(initial=0)) + 1) if pure is None else pure, np.int64)
    starts, counts, tables = np.zeros((3, len(calls) if lookups else 0), np.int64)
    ids = []
    for i, (table, part) in (lookups or {}).items():
        starts[i], counts[i], tables[i] = len(ids), len(part), table
        ids += part
    looked_up = Lookups(starts, counts, tables, np.array(names_row, np.int64), np.array(ids, np.int64))
    specs = np.arange(r.offsets[1][-1])
    left = find_repeats(Facts(kinds, pure, np.array(numbers, np.int64), num_data, np.array(viewed, np.int64), specs,
                              looked_up), r)
    rest = left.recording(r, num_data + len(left.numbers))
    ends = rest.offsets[0]
    new = [(c, rest.operands[a:b].tolist()) for c, a, b in zip(rest.call_class.tolist(), ends, ends[1:])]
    assert rest.heads.tolist() == left.value_of[list(heads)].tolist()
    made = left.value_of[r.offsets[1][:-1]].tolist()                # of each call, its first value
    first = [made.index(value) for value in made]                   # the call whose results it has
    calls_left = sorted(set(first))
    for mine, whole in [(left.entries, kinds), (rest.call_class, r.call_class), (rest.call_width, r.call_width),
                        (rest.call_count, r.call_count), (rest.call_first, r.call_first)]:
        assert mine.tolist() == whole[calls_left].tolist()
    again = replace(rest)                                           # which does not know them
    assert all(map(np.array_equal, rest.offsets, again.offsets))
    assert left.value_specs.tolist() == [v for i in calls_left for v in range(*r.offsets[1][i:i + 2])]
    gone = np.delete(np.arange(len(calls)), calls_left)
    assert left.dropped.tolist() == np.bincount(r.call_class[gone], minlength=len(classes)).tolist()
    assert left.terms.tolist() == [int((r.call_count[gone] - 1)[r.call_class[gone] == c].sum())
                                   for c in range(len(classes))]
    return first, new, left


def test_what_reads_the_same_is_the_same():
    calls = [(0, 1, [-1]), (0, 1, [-2]), (0, 1, [-1]), (1, 1, [0, 1]), (1, 1, [2, 1]), (0, 1, [4])]
    first, new, left = distinct(calls, heads=[5])
    assert first == [0, 1, 0, 3, 3, 5]
    assert new == [(0, [-1]), (0, [-2]), (1, [0, 1]), (0, [2])]
    assert left.value_of.tolist() == [0, 1, 0, 2, 2, 3] and left.dropped.tolist() == [1, 1]


def test_the_order_of_operands_and_the_kind_count():
    assert distinct([(0, 1, [-1]), (1, 1, [0, -1]), (1, 1, [-1, 0])])[0] == [0, 1, 2]
    assert distinct([(0, 1, [-1]), (0, 1, [-1])], kinds=[0, 1])[0] == [0, 1]


def test_equal_numbers_are_one_operand_and_those_that_are_left_are_numbered_anew():
    calls = [(0, 1, [-4]), (0, 1, [-5]), (0, 1, [-6]), (0, 1, [-7])]
    first, new, left = distinct(calls, numbers=[7, 5, 7, 6])
    assert first == [0, 1, 0, 3] and new == [(0, [-4]), (0, [-5]), (0, [-6])]
    assert left.numbers.tolist() == [7, 5, 6]


def test_a_number_is_not_the_value_or_array_of_that_number():
    calls = [(0, 1, [-1]), (0, 1, [0]), (0, 1, [-4]), (0, 1, [-5])]
    assert distinct(calls, numbers=[0, -1], kinds=[0, 0, 1, 1])[0] == [0, 1, 2, 3]


def test_what_is_held_runs_for_itself_and_what_draws_too():
    calls = [(0, 1, [-1]), (0, 1, [-1]), (0, 1, [-1]), (0, 1, [1])]
    assert distinct(calls, heads=[1, 3])[0] == [0, 1, 0, 3]
    assert distinct(calls, heads=[0, 3])[0] == [0, 0, 0, 3]       # what reads a held value may stand for others
    assert distinct(calls, heads=[3], viewed=[1])[0] == [0, 1, 0, 3]
    assert distinct(calls, pure=[0])[0] == [0, 1, 2, 3]
    assert distinct(calls, pure=[])[0] == [0, 0, 0, 3]              # what nobody recorded draws nothing


def test_lists_of_different_length():
    classes = [info(), info(operands=2, slots=1)]
    calls = [(0, 1, [-1]), (1, 1, [-1, 0]), (1, 1, [-1, 0, 0]), (1, 1, [-1, 0]), (1, 1, [-1])]
    assert distinct(calls, classes)[0] == [0, 1, 2, 1, 4]


def test_rows_that_were_looked_up_are_known_by_table_and_number():
    """Two sentences of three words and one of one; kinds 1 to 4 name rows (each one of them), kind 5 reads one."""
    lookup, row, other = info(operands=2, split=(True, False)), info(alias=True), info()
    classes = [lookup, row, other]
    calls = [(0, 3, [-1, -2]), (0, 3, [-3, -2]), (0, 1, [-4, -2]), (0, 3, [-3, -5]),
             (1, 1, [0]), (1, 1, [1]), (1, 1, [0]), (1, 1, [3]), (1, 1, [1]), (2, 1, [4]), (2, 1, [5]), (2, 1, [2])]
    found = dict(classes=classes, num_data=5, firsts=[0, 0, 0, 0, 0, 2, 1, 2, 2, 0, 0, 0],
                 kinds=[0, 0, 0, 0, 1, 2, 3, 2, 4, 5, 5, 5],
                 lookups={0: (0, [7, 8, 9]), 1: (0, [8, 5, 7]), 2: (0, [7]), 3: (1, [8, 5, 7])})
    # rows: 7 of sentence 0, 7 of sentence 1, 8 of sentence 0, 7 of another table, 7 of sentence 1 in another shape
    names_row = [-1, 1, 1, 1, 2, -1]
    first = distinct(calls, names_row=names_row, **found)[0]
    assert first == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 9, 11]
    # not where nothing is known of the numbers, or of the shapes
    assert distinct(calls, names_row=[-1] * 6, **found)[0] == list(range(12))
    assert distinct(calls, names_row=names_row, **{**found, "lookups": {0: (0, [7, 8, 9])}})[0] == list(range(12))


def test_single_rows_that_were_looked_up():
    lookup = info(operands=2, split=(True, False))
    calls = [(0, 1, [-1, -2]), (0, 1, [-3, -2]), (0, 1, [-4, -2]), (0, 1, [-5, -2])]     # the last one a row of words
    found = distinct(calls, [lookup], num_data=5, lookups={0: (0, [4]), 1: (0, [4]), 2: (0, [5]), 3: (0, [4, 4])})
    assert found[0] == [0, 0, 2, 3]


def test_nothing_to_find():
    assert distinct([])[0] == [] and distinct([(0, 1, [-1])])[0] == [0]


@st.composite
def recordings(draw):
    """Calls of a few kinds on few leaves and values, so that many repeat others; kind 0 takes a number."""
    classes = [info(), info(operands=2, outputs=2), info(operands=2, slots=1)]
    calls, numbers, values, made = [], [], 0, []
    for _ in range(draw(st.integers(0, 60))):
        kind = draw(st.integers(0, 3)) if values else 0
        token = st.integers(max(-3, -values), values - 1) if values else st.just(-1)
        if kind == 0:
            numbers.append(draw(st.integers(0, 3)))
            tokens = [-3 - len(numbers)]
        else:
            tokens = [draw(token) for _ in range({1: 1, 2: 2, 3: 1 + draw(st.integers(0, 2))}[kind])]
        made.append(kind)
        calls.append(((0, 0, 1, 2)[kind], 1, tokens))
        values += 2 if kind == 2 else 1
    heads = draw(st.lists(st.integers(0, values - 1), max_size=5, unique=True)) if values else []
    return classes, calls, numbers, made, sorted(heads)


def meanings(classes, calls, kinds, numbers):
    """What every value is, as a number of an expression that is there once."""
    table, values = {}, []
    for kind, (c, _, tokens) in zip(kinds, calls):
        words = tuple(("value", values[t]) if t >= 0 else ("number", numbers[-4 - t]) if t < -3 else ("leaf", t)
                      for t in tokens)
        for k in range(len(classes[c].output_widths)):
            values.append(table.setdefault((kind, words, k), len(table)))
    return values


@given(recordings())
def test_every_value_keeps_its_meaning_and_only_held_ones_are_there_twice(drawn):
    classes, calls, numbers, kinds, heads = drawn
    first, new, left = distinct(calls, classes, heads, numbers, kinds=kinds)
    want = meanings(classes, calls, kinds, numbers)
    got = meanings(classes, [(c, 1, tokens) for c, tokens in new], left.entries.tolist(),
                   left.numbers.tolist())
    # The tables of both number expressions as they come, and an expression comes first in a call that is left.
    assert [got[v] for v in left.value_of] == want
    assert len({int(left.value_of[v]) for v in heads}) == len(heads)
    makers = np.repeat(np.arange(len(calls)), [len(classes[c].output_widths) for c, _, _ in calls])
    apart = {int(makers[v]) for v in heads}
    seen = {}
    for i in range(len(calls)):
        meaning = want[int(np.searchsorted(makers, i))]
        assert i in apart or meaning not in seen or first[i] != i
        if first[i] == i:
            seen.setdefault(meaning, i)
