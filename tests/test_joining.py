"""Joined launches: what runs as one and what does not, on recordings by hand and drawn; and undecorated models."""

from functools import partial

import gluon_models
import gluon_sequences
import numpy as np
import pytest
from gluon_check import check_same_as_loop, make_net
from hypothesis import given
from hypothesis import strategies as st
from test_analyzer import info, recording

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import merging
from gluon_dynbatch.analyzer import problem_of, scan
from gluon_dynbatch.coarse import INSIDE, Face, coarsen, compositions_of, merged
from gluon_dynbatch.compositions import COMPOSED
from gluon_dynbatch.joining import MOST_PARTS, Habits, find_groups
from gluon_dynbatch.logs import RECORDINGS
from gluon_dynbatch.members import MOST_REPEATS, MOST_ROLES
from gluon_dynbatch.merging import FORMS
from gluon_dynbatch.planning import PLANS
from gluon_dynbatch.policies import POLICIES, check_plan

nn, rnn = gluon.nn, gluon.rnn
MODELS = {**gluon_models.MODELS, **gluon_sequences.MODELS}


# ---- recordings by hand ----------------------------------------------------------------------


class Joined:
    """A recording, its launches by a policy, and the coarse recording that has them joined."""

    def __init__(self, classes, calls, num_leaves=3, heads=(), policy="depth", launch=None, heavy=(), joinable=None,
                 viewed=(), habits=None):
        self.r = recording(classes, calls, num_leaves, heads=heads)
        self.s, flags = scan(self.r), np.arange(len(classes))
        problem = problem_of(self.r, self.s, np.ones(len(classes)), np.ones(len(classes)))
        self.launch = POLICIES[policy].plan(problem) if launch is None else np.array(launch)
        check_plan(problem, self.launch)
        self.groups = find_groups(self.r, self.s, self.launch, np.ones(len(classes), bool) if joinable is None
                                  else np.isin(flags, joinable), np.isin(flags, heavy), flags.tolist(),
                                  Habits() if habits is None else habits)
        self.coarse = self.found = None
        if self.groups is not None:
            looks = np.array([split for c in classes for split in c.split], np.int64)
            held = np.array([*heads, *viewed], np.int64)
            self.found = compositions_of(self.r, self.s, self.groups, held, looks)
            by_rows = [all(any(classes[c].split) and all(s for s, read in zip(classes[c].split, reads) if read)
                           for c, reads in zip(q.classes, q.reads)) for q in self.found.all]
            self.coarse = coarsen(self.r, self.s, self.groups, self.found, self.found.faces, by_rows)

    @property
    def num_launches(self):
        """Before and after."""
        before = int(self.launch.max(initial=-1)) + 1
        return before, before if self.coarse is None else int(self.coarse.launch.max()) + 1

    @property
    def parts(self):
        """The classes of the parts of each composition."""
        return [] if self.found is None else [q.classes for q in self.found.all]

    def check(self):
        """The coarse recording computes what the recording does, in an order that a policy may have given."""
        want = [value for made in self._run(self.r, self.s, lambda c, xs: _call(self.r, c, xs)) for value in made]
        if self.coarse is None:
            return
        r = self.coarse.recording
        s = scan(r)
        check_plan(problem_of(r, s, np.ones(len(r.classes)), np.ones(len(r.classes))), self.coarse.launch)
        got = [value for made in self._run(r, s, self._coarse_call) for value in made]
        value_of = self.coarse.value_of.tolist()
        assert sorted(v for v in value_of if v >= 0) == list(range(len(got)))
        assert all(got[new] == want[old] for old, new in enumerate(value_of) if new >= 0)
        assert all(value_of[v] >= 0 for v in self.r.heads.tolist())
        assert r.heads.tolist() == [value_of[v] for v in self.r.heads.tolist()]

    def _run(self, r, s, call):
        values = []
        for i, c in enumerate(r.call_class.tolist()):
            tokens = r.operands[s.operand_offsets[i]:s.operand_offsets[i + 1]].tolist()
            assert all(t < len(values) for t in tokens), "an operand is made before it is read"
            made = call(c, [        # (hash(-1) is hash(-2))
                        values[t] if t >= 0 else 10 - t for t in tokens])
            values += made
            yield made

    def _coarse_call(self, c, operands):
        origin = self.coarse.origins[c]
        if origin >= 0:
            return _call(self.r, origin, operands)
        q, face = self.found.all[-1 - origin], self.found.faces[-1 - origin]
        outside, at, made = dict(zip(face.operands, operands)), 0, []
        for part, reads in zip(q.classes, q.reads):
            xs = [outside[face.same[at + k]] if read is None else made[read[0]][read[1]]
                  for k, read in enumerate(reads)]
            made.append(_call(self.r, part, xs))
            at += len(reads)
        return [x for x, out in zip([x for xs in made for x in xs], face.exported) if out]


def _call(r, c, operands):
    """The results of a call by itself; one that only names rows looks at its first operand alone."""
    if r.classes[c].alias:
        operands = operands[:1]
    return [hash((c, k, *operands)) for k in range(len(r.classes[c].output_widths))]


ROW, PAIR = info(split=(True,)), info(operands=2, split=(True, True))


def two_samples(*steps):
    """The same calls for two samples; step: (class, operands), -1: the sample's own leaf, 0, 1, ..: its results."""
    calls = []
    for sample in range(2):
        first = len(calls)
        calls += [(c, 1, [t - sample if t < 0 else first + t for t in tokens]) for c, tokens in steps]
    return calls


def test_a_chain_of_different_operators_is_one_launch():
    done = Joined([ROW] * 3, two_samples((0, [-1]), (1, [0]), (2, [1])), heads=[2, 5])
    done.check()
    assert done.num_launches == (3, 1) and done.parts == [(0, 1, 2)]
    assert done.found.faces == [Face((False, False, True), (0, INSIDE, INSIDE))]
    assert done.coarse.value_of.tolist() == [-1, -1, 0, -1, -1, 1]
    assert done.coarse.recording.operands.tolist() == [-1, -2]
    assert done.coarse.recording.classes == [ROW]


def test_branches_meet_in_one_launch():
    """x -> f(x), g(x) -> sum: the operand that both read is there once."""
    done = Joined([ROW, ROW, PAIR], two_samples((0, [-1]), (1, [-1]), (2, [0, 1])), heads=[2, 5])
    done.check()
    assert done.num_launches == (3, 1)
    assert sorted(done.parts[0]) == [0, 1, 2] and len(done.coarse.recording.classes[0].operand_widths) == 1


def test_a_member_may_have_several_calls_of_a_launch():
    """Three gates: their sigmoids are one launch of three calls for each sample, and have three roles."""
    gates = info(outputs=3, split=(True,))
    done = Joined([gates, ROW, info(operands=3, split=(True,) * 3)],
                  [(0, 1, [-1]), (0, 1, [-2]),
                   *[(1, 1, [t]) for t in range(6)], (2, 1, [6, 7, 8]), (2, 1, [9, 10, 11])], heads=[12, 13])
    done.check()
    assert done.num_launches == (3, 1) and done.parts == [(0, 1, 1, 1, 2)]
    many = Joined([info(outputs=MOST_ROLES + 1, split=(True,)), ROW],
                  [(0, 1, [-1])] + [(1, 1, [t]) for t in range(MOST_ROLES + 1)])
    assert many.groups is None


def test_members_may_come_in_another_order():
    done = Joined([ROW, ROW], [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [1]), (1, 1, [0])], heads=[2, 3])
    done.check()
    assert done.num_launches == (2, 1) and done.coarse.value_of.tolist() == [-1, -1, 1, 0]


def test_another_number_of_members_does_not_join():
    done = Joined([ROW, ROW], [(0, 1, [-1]), (0, 1, [-2]), (0, 1, [-3]), (1, 1, [0]), (1, 1, [1])])
    assert done.groups is None


def test_who_reads_two_members_does_not_join():
    done = Joined([ROW, PAIR], [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [0, 1]), (1, 1, [1, 0])])
    assert done.groups is None


def test_who_reads_other_results_than_the_others_does_not_join():
    two = info(outputs=2, split=(True,))
    done = Joined([two, ROW], [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [0]), (1, 1, [3])])
    assert done.groups is None


def test_a_launch_in_between_keeps_two_apart():
    """0 -> 1 -> 2, and 2 reads 0 as well; 1 must not join, so 2 cannot join 0 either: neither place is free."""
    done = Joined([ROW, info(), PAIR], two_samples((0, [-1]), (1, [0]), (2, [0, 1])), joinable=[0, 2])
    assert done.groups is None


def test_a_group_may_wait_for_its_newcomer():
    """2 reads 0 and what runs between them; nobody else reads 0, so it can run as late as 2 does."""
    done = Joined([ROW, info(), PAIR], two_samples((0, [-1]), (1, [-1]), (2, [0, 1])), joinable=[0, 2], heads=[2, 5])
    done.check()
    assert done.num_launches == (3, 2) and done.parts == [(0, 2)]


def test_a_newcomer_may_run_where_the_group_ran():
    """Another reader of 0 runs before 2, but 2 has all that it reads by then."""
    done = Joined([ROW, info(), ROW], two_samples((0, [-1]), (1, [0]), (2, [0])), joinable=[0, 2], heads=[1, 2, 4, 5])
    done.check()
    assert done.num_launches == (3, 2) and done.coarse.launch.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("other", [
    info(), info(split=(True,), recorded=False), info(split=(True,), slots=1), info(split=(True,), alias=True)],
    ids=["vertex", "not recorded", "list", "alias"])
def test_what_never_joins(other):
    calls = two_samples((0, [-1]), (1, [0]))
    assert Joined([ROW, ROW], calls).groups is not None
    assert Joined([ROW, other], calls, joinable=[0] if other == info() else None).groups is None


def test_a_part_of_a_result_keeps_its_reader_apart():
    """x -> x[0] -> y: what only names rows has no program, and x must have rows."""
    done = Joined([ROW, info(alias=True), ROW], two_samples((0, [-1]), (1, [0]), (2, [1])))
    assert done.groups is None
    beside = Joined([ROW, info(alias=True), ROW, ROW], two_samples((0, [-1]), (1, [0]), (2, [0]), (3, [1])),
                    heads=[2, 3, 6, 7])
    beside.check()
    assert beside.parts == [(0, 2)] and (beside.coarse.value_of >= 0).all()


def test_ragged_calls_join_if_their_rows_do():
    calls = [(0, 2, [-1]), (0, 3, [-2]), (1, 2, [0, -3]), (1, 3, [1, -3])]
    done = Joined([ROW, info(operands=2, split=(True, False))], calls, heads=[2, 3])
    done.check()
    assert done.coarse.recording.call_width.tolist() == [2, 3]
    assert done.coarse.recording.classes[0].split == (True, False)


@pytest.mark.parametrize("reader, widths, joins", [
    (info(operands=2, split=(False, True)), (2, 2), False),     # every row reads the whole value
    (info(operands=2, split=(False, True)), (1, 1), True),      # which is one row
    (info(operands=2), (1, 1), True), (info(operands=2), (2, 1), False),
    (PAIR, (2, 2), True), (PAIR, (2, 1), False)])
def test_rows_of_ragged_calls(reader, widths, joins):
    calls = [(0, widths[0], [-1]), (0, widths[0], [-2]), (1, widths[1], [0, -3]), (1, widths[1], [1, -3])]
    done = Joined([ROW, reader], calls)
    done.check()
    assert (done.groups is not None) == joins
    if joins:
        assert any(done.coarse.recording.classes[0].split) == (reader == PAIR)


def test_a_product_with_one_weight_is_in_a_group_once():
    """h = f(W h): one launch for each step, whatever the number of steps."""
    chain = [(k % 2, [k - 1]) for k in range(8)]
    done = Joined([ROW, ROW], two_samples(*chain), heavy=[0], heads=[7, 15])
    done.check()
    assert done.num_launches == (8, 4) and done.parts == [(0, 1)]


def test_a_round_without_product_ends_where_it_began():
    done = Joined([ROW, ROW, ROW], two_samples(*[(k % 3, [k - 1]) for k in range(9)]), heads=[8, 17])
    done.check()
    assert done.num_launches == (9, 3) and done.parts == [(0, 1, 2)]


def test_programs_stay_small():
    chain = [(0, [-1])] + [(1, [k]) for k in range(MOST_REPEATS + 2)]
    done = Joined([ROW, ROW], two_samples(*chain), heavy=[0])
    assert max(len(parts) for parts in done.parts) == 1 + MOST_REPEATS
    long = Joined([ROW] * 150, two_samples(*[(k, [k - 1]) for k in range(150)]))
    long.check()
    assert sorted(map(len, long.parts)) == [150 % MOST_PARTS, MOST_PARTS, MOST_PARTS]


def test_what_is_held_or_viewed_stays():
    calls = two_samples((0, [-1]), (1, [0]), (2, [1]))
    assert (Joined([ROW] * 3, calls, heads=[0, 5]).coarse.value_of >= 0).tolist() == [True, False, True] * 2
    assert (Joined([ROW] * 3, calls, viewed=[1]).coarse.value_of >= 0).tolist() == [False, True, False] * 2
    assert (Joined([ROW] * 3, calls).coarse.value_of >= 0).tolist() == [False, False, True] * 2   # nobody wants any


def test_operands_are_one_only_where_they_always_are():
    """Both operands of the first sample are one array, those of the second are not."""
    done = Joined([PAIR, ROW], [(0, 1, [-1, -1]), (0, 1, [-1, -2]), (1, 1, [0]), (1, 1, [1])])
    done.check()
    assert done.found.faces[0].same == (0, 1, INSIDE)
    done = Joined([PAIR, ROW], [(0, 1, [-1, -1]), (0, 1, [-2, -2]), (1, 1, [0]), (1, 1, [1])])
    done.check()
    assert done.found.faces[0].same == (0, 0, INSIDE)


def test_faces_merge():
    a, b = Face((True, False, False), (0, 0, INSIDE, 0)), Face((False, False, True), (0, 0, INSIDE, 3))
    assert merged(a, b) == Face((True, False, True), (0, 0, INSIDE, 3))
    assert merged(Face((), (0, 1, 0, 1)), Face((), (0, 0, 2, 2))) == Face((), (0, 1, 2, 3))


def test_a_long_chain():
    length = 100_000
    calls = [(k % 2, 1, [k - 1]) for k in range(length)]
    done = Joined([ROW, ROW], calls, heads=[length - 1], num_leaves=1)
    done.check()
    assert done.num_launches == (length, length // 2)


@st.composite
def alike_samples(draw):
    """Samples that do the same for a while, each on its own values and on those of others; and some that do not."""
    outputs = [draw(st.integers(1, 2)) for _ in range(draw(st.integers(2, 5)))]
    classes = []
    for n in outputs:
        operands = draw(st.integers(1, 3))
        split = draw(st.sampled_from([(True,) * operands, (True,) + (False,) * (operands - 1), (False,) * operands]))
        classes.append(info(operands=operands, outputs=n, split=split,
                            recorded=draw(st.sampled_from([True] * 5 + [False])),
                            alias=draw(st.sampled_from([False] * 5 + [True])) if n == 1 else False,
                            slots=draw(st.sampled_from([0] * 5 + [1]))))
    steps = []
    for k in range(draw(st.integers(1, 9))):
        c = draw(st.integers(0, len(classes) - 1))
        steps.append((c, [draw(st.integers(-1, k - 1)) for _ in classes[c].operand_widths],
                      draw(st.integers(0, 1))))
    calls, results, values, num_leaves = [], [], 0, 6
    for sample in range(draw(st.integers(1, 4))):
        mine = []
        for c, reads, output in steps[:draw(st.sampled_from([len(steps)] * 3 + list(range(len(steps)))))]:
            if draw(st.integers(0, 15)) == 0:
                c = draw(st.integers(0, len(classes) - 1))
            tokens = []
            for k in range(len(classes[c].operand_widths)):
                read = reads[k] if k < len(reads) else -1
                token = mine[read][min(output, len(mine[read]) - 1)] if 0 <= read < len(mine) else -1 - sample
                if draw(st.integers(0, 15)) == 0:
                    token = draw(st.sampled_from([-6, *range(values)]))
                tokens.append(token)
            width = draw(st.sampled_from([1] * 6 + [2])) if any(classes[c].split) and not classes[c].slots else 1
            calls.append((c, width, tokens))
            mine.append(list(range(values, values + outputs[c])))
            values += outputs[c]
        results += mine
    heads = [v for v in range(values) if draw(st.integers(0, 5)) == 0]
    return classes, calls, num_leaves, heads, [c for c in range(len(classes)) if draw(st.integers(0, 3)) == 0]


@given(alike_samples(), st.sampled_from(sorted(POLICIES)))
def test_joined_recordings_compute_the_same(drawn, policy):
    classes, calls, num_leaves, heads, heavy = drawn
    Joined(classes, calls, num_leaves, heads, policy, heavy=heavy).check()


def test_the_property_catches_a_wrong_join():
    """A group that reads another sample's value is seen by the interpreter."""
    done = Joined([ROW, ROW], two_samples((0, [-1]), (1, [0])), heads=[1, 3])
    done.coarse.recording.operands[:] = done.coarse.recording.operands[::-1].copy()
    with pytest.raises(AssertionError):
        done.check()


def test_a_reader_of_a_reshaped_value_waits_for_it_and_not_for_what_it_looks_like():
    """reshape_like(x, y) is rows of x; y was made long before, x just now."""
    like = info(operands=2, alias=True)
    r = recording([ROW, like], [(0, 1, [-1]), (0, 1, [0]), (1, 1, [1, 0]), (0, 1, [2])], 1)
    problem = problem_of(r, scan(r), np.ones(2), np.ones(2))
    assert problem.producers.tolist() == [0, 1]
    assert POLICIES["depth"].plan(problem).tolist() == [0, 1, -1, 2]


# ---- launches of a part of a launch ----------------------------------------------------------


def test_a_launch_may_be_split_between_groups():
    """Two layers of different size, and one sigmoid for all of their results: each takes its own."""
    first, second = info(split=(True,)), info(outputs=2, split=(True,))
    calls = [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [-3]), (2, 1, [0]), (2, 1, [1]), (2, 1, [2]), (2, 1, [3])]
    done = Joined([first, second, ROW], calls, heads=[4, 5, 6, 7])
    done.check()
    assert done.num_launches == (3, 2) and sorted(done.parts) == [(0, 2), (1, 2, 2)]
    assert done.groups.num_joined == 1


def test_a_product_is_not_split():
    calls = [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [-3]), (2, 1, [0]), (2, 1, [1]), (2, 1, [2])]
    assert Joined([ROW, ROW, ROW], calls).num_launches == (3, 2)
    assert Joined([ROW, ROW, ROW], calls, heavy=[2]).groups is None


def test_a_product_joins_only_what_nobody_else_reads():
    """A layer reads a layer; but a state that goes to several cells belongs to none of them."""
    layers = two_samples((0, [-1]), (1, [0]), (2, [1]))
    assert Joined([ROW] * 3, layers, heavy=[0, 2]).num_launches == (3, 1)
    shared = two_samples((0, [-1]), (1, [0]), (2, [1]), (3, [1]))
    assert Joined([ROW] * 4, shared, heavy=[0, 2, 3]).num_launches == (4, 3)


def test_calls_that_read_results_of_one_call_are_one_member():
    """Only some samples go on with their gates: three calls each, which the next launch reads together."""
    gates, three = info(outputs=3, split=(True,)), info(operands=3, split=(True,) * 3)
    calls = [(0, 1, [-1]), (0, 1, [-2]), (0, 1, [-3]), *[(1, 1, [t]) for t in range(6)],
             (2, 1, [9, 10, 11]), (2, 1, [12, 13, 14])]
    done = Joined([gates, ROW, three], calls, heads=[15, 16])
    done.check()
    assert done.num_launches == (3, 2) and done.parts == [(1, 1, 1, 2)]


def test_what_fits_by_chance_stays_apart():
    """Three samples sum up two of theirs, so they do not join; that the fourth could is no reason for a program."""
    calls = [(0, 1, [-1])] * 3 + [(1, 1, [0, 1]), (1, 1, [1, 2]), (1, 1, [2, 0]), (0, 1, [5]), (1, 1, [6, 6])]
    done = Joined([ROW, PAIR], calls, num_leaves=1)
    assert done.num_launches == (4, 4)


# ---- models ----------------------------------------------------------------------------------


class Mlp(gluon.Block):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.layers = [nn.Dense(6, activation="relu", in_units=6) for _ in range(2)] + [nn.Dense(3, in_units=6)]
        for layer in self.layers:
            self.register_child(layer)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def steps(make_scope, net, samples, count=1):
    """Losses and gradients of the last step, and the scope."""
    for _ in range(count):
        with autograd.record(), make_scope() as scope:
            losses = [net(*sample).sum() for sample in samples]
        autograd.backward(losses)
    return [loss.asnumpy() for loss in losses] + [
        p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"], scope


def rows(count, width, seed=0):
    return [(mx.nd.array(x[None]),) for x in np.random.RandomState(seed).normal(size=(count, width))]


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_an_undecorated_net_is_one_launch(backend):
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    samples = rows(5, 6)
    got, scope = steps(partial(gdb.batching, granularity="op", backend=backend, policy="depth"), net, samples)
    want, alone = steps(partial(gdb.batching, policy="none", backend="mxnet"), net, samples)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert scope.stats.launches == 1 and scope.stats.joined == 5 and alone.stats.joined == 0
    assert scope.flushes[0].launches[0].title == "FullyConnected + Activation + FullyConnected + 3 more"
    assert scope.flushes[0].launches[0].calls == scope.stats.calls == 30
    assert ", 5 joined" in scope.explain()


class Sequence(gluon.Block):
    def __init__(self, cell, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = cell(4, input_size=3)

    def forward(self, *inputs):
        states = self.cell.begin_state(1)
        for x in inputs:
            out, states = self.cell(x, states)
        return out


@pytest.mark.parametrize("cell", [rnn.LSTMCell, rnn.GRUCell, rnn.RNNCell])
def test_an_undecorated_cell_is_one_launch_a_step(cell):
    net = Sequence(cell)
    net.initialize(mx.init.Normal(0.4))
    samples = [[x for x, in rows(n, 3, n)] for n in (2, 5, 3, 5)]
    got, scope = steps(partial(gdb.batching, granularity="op", policy="depth"), net, samples)
    want, _ = steps(partial(gdb.batching, policy="none"), net, samples)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    # What the inputs give is one launch for all steps; then one a step; the losses come with the ends of sequences.
    cells = [launch for launch in scope.flushes[0].launches if launch.calls > launch.rows]
    assert scope.stats.launches <= 1 + 5 + 3 + 1, scope.explain()
    assert len({launch.title for launch in cells}) <= 3


def test_a_tree_needs_far_fewer_launches():
    case = MODELS["similarity tree"]
    net = make_net(case)
    with autograd.record(), gdb.batching(granularity="op", policy="depth") as scope:
        for sample in case.samples(np.random.RandomState(11), "float32"):
            case.loss(net, *sample)
    assert scope.stats.launches * 3 < scope.stats.launches + scope.stats.joined


@pytest.mark.slow
def test_joined_launches_need_fewer_kernels(monkeypatch):
    net, found = Sequence(rnn.LSTMCell), []
    net.initialize(mx.init.Normal(0.4))
    samples = [[x for x, in rows(n, 3, n)] for n in (2, 5, 3)]
    for joins in (True, False):
        if not joins:
            monkeypatch.setattr(merging, "find_groups", lambda *_: None)
            for table in (PLANS, RECORDINGS, FORMS):
                table.clear()
        _, scope = steps(partial(gdb.batching, granularity="op", policy="depth", backend="native"), net, samples)
        found.append(len({source for _, part in scope.flushes[0].kernels() for source in part}))
    for table in (PLANS, RECORDINGS, FORMS):
        table.clear()           # of what is not joined
    assert 0 < found[0] < found[1]


def test_compositions_are_remembered():
    """The second step, of other samples of the same kind, makes no new program."""
    net = Sequence(rnn.LSTMCell)
    net.initialize(mx.init.Normal(0.4))
    scope = partial(gdb.batching, granularity="op", policy="depth")
    steps(scope, net, [[x for x, in rows(n, 3, n)] for n in (2, 5, 3, 5)])
    PLANS.clear()
    before = {key: value for key, value in COMPOSED._entries.items()}
    _, second = steps(scope, net, [[x for x, in rows(n, 3, n)] for n in (2, 5, 3, 5)])
    assert second.stats.cache_misses == 1 and second.stats.joined > 0
    assert dict(COMPOSED._entries) == before


def test_results_inside_of_programs_can_be_held_and_viewed():
    """Results that were made on the way, and a view of one that died."""
    x = mx.nd.array([[1.0, -2.0, 3.0, 4.0]])
    x.attach_grad()

    def run():
        with autograd.record():
            a = x * 2
            b = mx.nd.tanh(a)
            c = b.reshape((2, 2))
            d = mx.nd.relu(c) + 1
            e = mx.nd.sigmoid(d)
        return a, c, d, e

    want = run()
    with autograd.record(), gdb.batching(policy="depth", check=True):
        got = run()
    for p, q in zip(got, want):
        np.testing.assert_allclose(p.asnumpy(), q.asnumpy(), rtol=1e-6)
    for k in (0, 2, 3):
        grads = []
        for held in (want, got):
            held[k].backward(retain_graph=True)
            grads.append(x.grad.asnumpy().copy())
        np.testing.assert_allclose(*grads, rtol=1e-5)


def test_rebound_results_are_read_as_they_were():
    x = mx.nd.array([[1.0, -2.0, 3.0, 4.0]])
    with gdb.batching(policy="depth", check=True) as scope:
        a = mx.nd.tanh(x)
        b = a * 2
        a += b
        c = mx.nd.sigmoid(a)
    tanh = np.tanh(x.asnumpy())
    np.testing.assert_allclose(a.asnumpy(), 3 * tanh, rtol=1e-6)
    np.testing.assert_allclose(c.asnumpy(), 1 / (1 + np.exp(-3 * tanh)), rtol=1e-6)
    assert scope.stats.launches == 1


def test_a_gradient_goes_where_the_loss_depends_on_it_and_nowhere_else():
    """One program makes both results; the backward pass of one leaves the other's operand alone, as MXNet does."""
    x, y = mx.nd.array([[1.0, 2.0]]), mx.nd.array([[3.0, 4.0]])
    for leaf in (x, y):
        leaf.attach_grad()
        leaf.grad[:] = 7
    with autograd.record(), gdb.batching(policy="depth") as scope:
        a = mx.nd.tanh(x)
        b = a * y
        loss = mx.nd.sigmoid(a)
    assert scope.stats.joined > 0
    loss.backward()
    assert (y.grad.asnumpy() == 7).all() and (x.grad.asnumpy() != 7).all()
    del b


@pytest.mark.parametrize("policy", ["depth", "agenda", "cost"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_models_at_op_grain_same_as_loop(name, dtype, policy, monkeypatch):
    import gluon_check
    monkeypatch.setattr(gluon_check.gdb, "batching", partial(gdb.batching, granularity="op", policy=policy,
                                                             check=policy == "agenda"))
    stats = check_same_as_loop(MODELS[name], dtype, steps=2)
    assert stats.joined > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["similarity tree", "tagger", "graph network"])
def test_models_at_op_grain_on_the_native_backend(name, monkeypatch):
    import gluon_check
    monkeypatch.setattr(gluon_check.gdb, "batching", partial(gdb.batching, granularity="op", policy="depth",
                                                             backend="native"))
    assert check_same_as_loop(MODELS[name], "float32", steps=1).joined > 0


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_a_sparse_gradient_of_a_joined_lookup(backend):
    embed, dense = nn.Embedding(7, 4, sparse_grad=True), nn.Dense(3, in_units=4)
    for layer in (embed, dense):
        layer.initialize(mx.init.Normal(0.4))
    words = [mx.nd.array([k]) for k in (1, 5, 1, 3)]
    found = []
    for scope in (partial(gdb.batching, granularity="op", policy="depth", backend=backend), partial(gdb.batching,
                                                                                                  policy="none")):
        with autograd.record(), scope() as done:
            losses = [mx.nd.tanh(dense(embed(word))).sum() for word in words]
        autograd.backward(losses)
        found.append([embed.weight.grad().asnumpy(), dense.weight.grad().asnumpy()])
        assert embed.weight.grad().indices.asnumpy().tolist() == [1, 3, 5]
        assert (done.stats.joined > 0) == (scope.keywords["policy"] == "depth")
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_parameters_that_want_no_gradient_or_add_to_it():
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    net.layers[0].weight.grad_req, net.layers[1].weight.grad_req = "null", "add"
    found = []
    for policy in ("depth", "none"):
        net.layers[1].weight.zero_grad()
        got, scope = steps(partial(gdb.batching, policy=policy), net, rows(4, 6), count=2)
        found.append(got)
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_recorded_and_paused_calls_stay_apart():
    x = mx.nd.array([[1.0, 2.0]])
    x.attach_grad()
    with gdb.batching(policy="depth", granularity="op") as scope:
        y = mx.nd.tanh(x)
        with autograd.record():
            z = mx.nd.sigmoid(y) * x
    assert (scope.stats.launches, scope.stats.joined) == (2, 1)
    z.backward()
    np.testing.assert_allclose(x.grad.asnumpy(), 1 / (1 + np.exp(-np.tanh(x.asnumpy()))), rtol=1e-6)
