"""Samples that are known again: cut from a recording, put together in new mixtures, the same as if analyzed anew."""

import gc
import random
import weakref

import gluon_models
import numpy as np
import pytest
from gluon_check import make_net
from hypothesis import given
from hypothesis import strategies as st
from test_analyzer import info, recording
from test_joining import Joined, Mlp, _call, rows

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, mx
from gluon_dynbatch import merging
from gluon_dynbatch.analyzer import scan
from gluon_dynbatch.samples import Parts, cut_samples, forms_of, merge_forms, take_samples

MOST_LEAVES = 4         # of a sample


# ---- recordings by hand and drawn ------------------------------------------------------------


class Batch:
    """Samples one behind the other.

    A sample is (calls, held): calls are (class, tokens) with values numbered from its first one, leaves -1, -2, ..;
    `held` are some of its values. Leaf -1 is the same array in all samples, a weight.
    """

    def __init__(self, classes, samples):
        self.classes, self.samples = classes, samples
        calls, heads, values = [], [], 0
        for k, (steps, held) in enumerate(samples):
            leaf = {-1: -1, **{-1 - n: -1 - n - k * MOST_LEAVES for n in range(1, MOST_LEAVES)}}
            calls += [(c, 1, [t + values if t >= 0 else leaf[t] for t in tokens]) for c, tokens in steps]
            heads += [v + values for v in held]
            values += sum(len(classes[c].output_widths) for c, _ in steps)
        self.calls, self.heads, self.num_leaves = calls, heads, 1 + MOST_LEAVES * len(samples)
        self.r = recording(classes, calls, self.num_leaves, heads=heads)
        self.kinds = 7 + np.arange(len(classes))
        self.cut = self.cut_of(self.r)

    def cut_of(self, r):
        return cut_samples(r.call_class, r.offsets, r.operands, self.kinds, r.per_class(lambda c: c.slots),
                           self.num_leaves, np.zeros(self.num_leaves, np.int64), r.heads)

    def values(self):
        """What every call makes, from the recording."""
        made, s = [], scan(self.r)
        for i, c in enumerate(self.r.call_class.tolist()):
            tokens = self.r.operands[s.operand_offsets[i]:s.operand_offsets[i + 1]].tolist()
            made += _call(self.r, c, [made[t] if t >= 0 else 10 - t for t in tokens])
        return made


def joined_forms(batch):
    """The forms of a batch, as analysis finds them; a made class is a function of its operands."""
    done = Joined(batch.classes, batch.calls, batch.num_leaves, batch.heads)
    if done.coarse is None:
        whole = np.arange(batch.r.offsets[1][-1])
        parts = Parts(np.full(len(batch.calls), -1), *batch.r.offsets, batch.r.operands, whole)
        return forms_of(batch.cut, parts, batch.r.offsets[1], batch.num_leaves, [])
    r, origins = done.coarse.recording, np.array(done.coarse.origins)
    made = [lambda xs, c=c: done._coarse_call(c, xs) for c in np.flatnonzero(origins < 0).tolist()]
    parts = Parts(np.where(origins < 0, -1 - origins, -1)[r.call_class], *r.offsets, r.operands, done.coarse.value_of)
    return forms_of(batch.cut, parts, batch.r.offsets[1], batch.num_leaves, made)


def run_merged(batch, merged):
    """What the merged calls make."""
    made, at = [], 0
    for call, m, count in zip(merged.call_of.tolist(), merged.call_made.tolist(), merged.num_operands.tolist()):
        tokens = merged.operands[at:at + count].tolist()
        assert all(t < len(made) for t in tokens), "an operand is made before it is read"
        xs = [made[t] if t >= 0 else 10 - t for t in tokens]
        made += merged.made[m](xs) if m >= 0 else _call(batch.r, int(batch.r.call_class[call]), xs)
        at += count
    assert at == len(merged.operands) and len(made) == merged.num_values
    return made


def check_merged(batch, forms):
    want, merged = batch.values(), merge_forms(batch.cut, forms, batch.num_leaves)
    got = run_merged(batch, merged)
    assert all(got[new] == want[old] for old, new in enumerate(merged.value_of.tolist()) if new >= 0)
    assert (merged.value_of[batch.heads] >= 0).all()


ROW, PAIR, TWO = info(split=(True,)), info(operands=2, split=(True, True)), info(outputs=2, split=(True,))
NAMES, LIST = info(alias=True), info(split=(False,), slots=1)
CLASSES = [ROW, PAIR, TWO, NAMES, LIST]
CHAIN = [(0, [-2]), (1, [0, -1]), (0, [1])]
FORK = [(2, [-2]), (0, [0]), (0, [1]), (1, [2, 3])]


def test_samples_are_cut_and_known_again():
    batch = Batch(CLASSES, [(CHAIN, [2]), (FORK, [4]), (CHAIN, [2]), (CHAIN, [1, 2])])
    assert batch.cut.starts.tolist() == [0, 3, 7, 10, 13] and batch.cut.values.tolist() == [0, 3, 8, 11, 14]
    a, b, c, d = batch.cut.keys()
    assert a == c and len({a, b, d}) == 3           # where it stands does not count; which results are held does
    assert Batch(CLASSES, [(FORK, [4]), (CHAIN, [2])]).cut.keys() == [b, a]


@pytest.mark.parametrize("other", [
    [(0, [-2]), (1, [0, -2]), (0, [1])], [(0, [-2]), (1, [0, 0]), (0, [1])], [(0, [-2]), (1, [-1, 0]), (0, [1])],
    [(2, [-2]), (1, [0, -1]), (0, [2])], [(3, [-2]), (1, [0, -1]), (0, [1])], [*CHAIN, (0, [2])]])
def test_another_structure_has_another_code(other):
    (a,), (b,) = Batch(CLASSES, [(CHAIN, [1])]).cut.keys(), Batch(CLASSES, [(other, [1])]).cut.keys()
    assert a != b


def test_lists_of_other_lengths_and_many_held_results():
    def key(terms, held=()):
        calls = [(0, [-2])] * 40 + [(4, list(range(terms)))]
        r = recording(CLASSES, [(c, 1, tokens) for c, tokens in calls], 5, heads=held)
        return Batch(CLASSES, [(CHAIN, [])]).cut_of(r)
    assert key(3).keys() != key(4).keys()
    wide = [info(outputs=70, split=(True,))]
    codes = {bytes(Batch(wide, [([(0, [-1])], held)]).cut.codes) for held in ([], [0], [29], [30], [60], [0, 69])}
    assert len(codes) == 6


def test_leaves_of_other_looks_are_other_leaves():
    r = recording([ROW], [(0, 1, [-1])], 1)
    keys = [cut_samples(r.call_class, r.offsets, r.operands, np.array([3]), np.array([0]), 1, np.array([spec]),
                        r.heads).keys() for spec in (5, 6)]
    assert keys[0] != keys[1]


def test_numbers_of_a_sample_are_found_again():
    """Leaves behind the data are numbers, each read once, in recorded order."""
    r = recording([ROW, PAIR], [(0, 1, [-2]), (1, 1, [0, -3]), (0, 1, [-4]), (1, 1, [2, -5])], 5)
    cut = cut_samples(r.call_class, r.offsets, r.operands, np.array([0, 1]), np.zeros(2, np.int64), 1,
                      np.zeros(5, np.int64), np.array([1, 3]))
    assert cut.keys()[0] == cut.keys()[1] and cut.numbers.tolist() == [0, 2, 4]
    parts = Parts(np.full(4, -1), *r.offsets, r.operands, np.arange(4))
    first, second = forms_of(cut, parts, r.offsets[1], 1, [])
    assert first.operands.tolist() == second.operands.tolist() == [-1, 0, -2]
    assert merge_forms(cut, [first, first], 1).operands.tolist() == r.operands.tolist()


def test_no_calls():
    batch = Batch(CLASSES, [])
    assert batch.cut.keys() == []


@st.composite
def mixtures(draw):
    """Samples of a few kinds, and the same ones in another mixture."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        steps, values = [], 0
        for _ in range(draw(st.integers(1, 7))):
            c = draw(st.integers(0, len(CLASSES) - 1))
            count = draw(st.integers(1, 3)) if CLASSES[c].slots else len(CLASSES[c].operand_widths)
            near = st.integers(max(-MOST_LEAVES, values - 4), values - 1)
            steps.append((c, [draw(near) for _ in range(count)]))
            values += len(CLASSES[c].output_widths)
        kinds.append((steps, [v for v in range(values) if draw(st.integers(0, 3)) == 0]))
    some = st.lists(st.sampled_from(kinds), min_size=1, max_size=6)
    return draw(some), draw(some)


def whole(samples):
    """As the cut sees them: what nobody connects is several samples."""
    batch = Batch(CLASSES, samples)
    return batch, dict(zip(batch.cut.keys(), joined_forms(batch)))


@given(mixtures())
def test_a_new_mixture_of_known_samples_computes_the_same(drawn):
    (first, known), (second, _) = whole(drawn[0]), whole(drawn[1])
    check_merged(first, [known[key] for key in first.cut.keys()])
    found = [known.get(key) for key in second.cut.keys()]
    new = [k for k, form in enumerate(found) if form is None]
    if new:                                     # of these alone, as analysis sees them
        cut, calls, operands, number = take_samples(second.cut, np.array(new), second.r.operands, second.r.offsets)
        r = second.r.of_calls(calls, operands, number)
        assert second.cut_of(r).keys() == [second.cut.keys()[k] for k in new]
        parts = Parts(np.full(len(calls), -1), *r.offsets, r.operands, np.arange(r.offsets[1][-1]))
        for k, form in zip(new, forms_of(cut, parts, r.offsets[1], second.num_leaves, [])):
            found[k] = form
    check_merged(second, found)


def test_the_property_catches_a_wrong_form():
    batch, known = whole([(CHAIN, [2]), (FORK, [4])])
    forms = [known[key] for key in batch.cut.keys()]
    check_merged(batch, forms)
    forms[1].operands[0] = -2               # a number, of which there are none
    with pytest.raises((AssertionError, IndexError)):
        check_merged(batch, forms)


# ---- models ----------------------------------------------------------------------------------

MODELS = {name: gluon_models.MODELS[name] for name in ("similarity tree", "graph network")}


def train(net, loss, samples, **scope):
    """Losses and gradients of a step, and the scope."""
    with autograd.record(), gdb.batching(**scope) if scope else autograd.record() as done:
        losses = [loss(net, *sample)[1] for sample in samples]
    autograd.backward(losses)
    grads = [p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]
    return [x.asnumpy() for x in losses] + grads, done


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_known_samples_in_new_mixtures_same_as_loop(name, dtype, backend, monkeypatch):
    case = MODELS[name]
    net = make_net(case, dtype)
    known = [sample for seed in (1, 2) for sample in case.samples(np.random.RandomState(seed), dtype)]
    rng, size = random.Random(3), max(2, len(known) // 2)
    for policy in ("depth", "agenda", "cost", "auto", "depth", "cost"):         # habits are learned on the way
        train(net, case.loss, known, granularity="op", policy=policy, backend=backend)
        merging.MEMBERS.clear()
    monkeypatch.setattr(merging, "_analyze", None)
    for policy in ("depth", "agenda", "cost", "auto"):
        mixture = rng.sample(known, size)
        got, scope = train(net, case.loss, mixture, granularity="op", policy=policy, backend=backend,
                           check=policy == "agenda")
        want, _ = train(net, case.loss, mixture)
        tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-8, "atol": 1e-10}
        for x, y in zip(got, want):
            np.testing.assert_allclose(x, y, **tolerance)
        stats = scope.stats
        assert stats.sample_hits >= size and stats.sample_misses == 0 and stats.joined > 0
        assert f"{stats.sample_hits} of {stats.sample_hits} samples known" in scope.explain()


def settle(net, samples, count=5):
    for _ in range(count):
        with autograd.record(), gdb.batching(granularity="op", policy="depth") as scope:
            losses = [net(*sample).sum() for sample in samples]
        autograd.backward(losses)
        merging.MEMBERS.clear()
    return scope


def test_results_that_are_held_make_another_sample():
    """The second time somebody keeps a result on the way, which the known program does not have."""
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    samples = rows(4, 6)
    settle(net, samples)
    for hold in (True, False, True):
        held = []
        with autograd.record(), gdb.batching(granularity="op", policy="depth") as scope:
            losses = []
            for x, in samples[:3]:
                y = net.layers[0](x)
                if hold:
                    held.append(y)
                losses.append(net.layers[2](net.layers[1](y)).sum())
        autograd.backward(losses)
        for (x,), y in zip(samples, held):
            np.testing.assert_allclose(y.asnumpy(), net.layers[0](x).asnumpy(), rtol=1e-5, atol=1e-6)
        for (x,), loss in zip(samples, losses):
            np.testing.assert_allclose(loss.asnumpy(), net(x).sum().asnumpy(), rtol=1e-5, atol=1e-6)
        assert scope.stats.sample_hits + scope.stats.sample_misses == 3
        merging.MEMBERS.clear()


def test_forms_hold_no_model():
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    settle(net, rows(3, 6))
    assert len(merging.FORMS) == 1
    gone = weakref.ref(net.layers[0].weight)
    del net
    gc.collect()
    assert gone() is None


def test_a_new_model_of_the_same_kind_takes_the_forms_of_the_old_one():
    for k in range(2):
        net = Mlp()
        net.initialize(mx.init.Normal(0.4))
        scope = settle(net, rows(3, 6), 5 - 4 * k)
    assert (scope.stats.sample_hits, scope.stats.sample_misses) == (3, 0)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(merging, "FORMS", merging.PlanCache(4000))
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    for n in range(1, 12):
        for x, in rows(1, 6) * 5:
            with gdb.batching(granularity="op", policy="depth"):
                for _ in range(n):
                    x = mx.nd.tanh(x) * 2 + n
            merging.MEMBERS.clear()
    assert 0 < len(merging.FORMS) < 11 and merging.FORMS.num_bytes <= 4000


def test_marked_blocks_alone_are_not_cut():
    cell = gdb.vertex(mx.gluon.nn.Dense(4, in_units=4))
    cell.initialize()
    with gdb.batching(policy="depth") as scope:
        results = [cell(cell(mx.nd.ones((1, 4)))) for _ in range(3)]
    assert len(results) == 3 and scope.stats.sample_hits == scope.stats.sample_misses == 0
    assert "samples known" not in scope.explain()
