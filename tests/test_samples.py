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
from gluon_dynbatch import logs, merging
from gluon_dynbatch.analyzer import scan
from gluon_dynbatch.cutting import cut_log
from gluon_dynbatch.kinds import KindTable
from gluon_dynbatch.samples import HEADER, NUM_KINDS, Form, Forms, Parts, forms_of, made_of, merge_forms, take_samples

MOST_LEAVES = 4         # of a sample
FIRST = 1 << 32         # token of the first value


# ---- recordings by hand and drawn ------------------------------------------------------------


def kinds_of(classes, numbers=()):
    """Each class as an entry; `numbers` are for each class the operands that are numbers."""
    words, starts = [], []
    for c, info_ in enumerate(classes):
        fixed, outputs = len(info_.operand_widths) - info_.slots, len(info_.output_widths)
        are_numbers = [k in (numbers[c] if numbers else ()) for k in range(fixed)]
        mine = [fixed, info_.slots, sum(are_numbers), outputs, 1, 0 if info_.alias else -1, 1, 0, -1, 1,
                *[0] * outputs, *are_numbers]
        starts.append(len(words))
        words += [7 + c, *mine]
    return KindTable(np.array(words, np.int64), np.array(starts, np.int64), np.arange(len(classes)))


def log_of(classes, calls):
    """Calls, (class, tokens) each, as they stand in a log."""
    words = []
    for c, tokens in calls:
        fixed = len(classes[c].operand_widths) - classes[c].slots
        count = [(len(tokens) - fixed) // classes[c].slots] if classes[c].slots else []
        words += [c, *count, *[t + FIRST if t >= 0 else t for t in tokens]]
    return np.array(words, np.int64)


def cut_calls(classes, calls, num_leaves, heads, specs=None):
    num_values = sum(len(classes[c].output_widths) for c, _ in calls)
    specs = np.zeros(num_leaves, np.int64) if specs is None else np.array(specs)
    return cut_log(log_of(classes, calls), kinds_of(classes), FIRST, specs, np.isin(np.arange(num_values), heads),
                   np.zeros(0, np.int64))[0]


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
        self.kinds = kinds_of(classes)
        self.cut = self.cut_of(self.r)

    def cut_of(self, r):
        ends = r.offsets[0].tolist()
        tokens = [r.operands[a:b].tolist() for a, b in zip(ends, ends[1:])]
        return cut_calls(self.classes, list(zip(r.call_class.tolist(), tokens)), self.num_leaves, r.heads)

    def as_recorded(self, r):
        """What `forms_of` asks of recorded calls."""
        return r.call_class, r.call_width, r.offsets[1], np.zeros(int(r.offsets[1][-1]), np.int64)

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
        return forms_of(batch.cut, parts, batch.as_recorded(batch.r), batch.kinds, batch.num_leaves, [])
    r, origins = done.coarse.recording, np.array(done.coarse.origins)
    made = []
    for c in np.flatnonzero(origins < 0).tolist():
        made.append(lambda xs, c=c: done._coarse_call(c, xs))
        made[-1].count, made[-1].num_outputs = len(r.classes[c].operand_widths), len(r.classes[c].output_widths)
    parts = Parts(np.where(origins < 0, -1 - origins, -1)[r.call_class], *r.offsets, r.operands, done.coarse.value_of)
    return forms_of(batch.cut, parts, batch.as_recorded(batch.r), batch.kinds, batch.num_leaves, made)


def merge(batch, forms):
    """The merged calls, and the functions that were made for some of them."""
    made, num_classes = made_of(forms), len(batch.classes)
    facts = [(num_classes + k, 0, m.num_outputs) for k, m in enumerate(made)]
    return merge_forms(batch.cut, forms, batch.kinds, batch.num_leaves, num_classes, made, facts), made


def run_merged(batch, merged, functions):
    """What the merged calls make."""
    made, at, num_classes = [], 0, len(batch.classes)
    assert len(np.unique(merged.call_class)) == len(merged.used) and (np.diff(merged.used) > 0).all()
    operand_offsets, value_offsets = merged.operand_offsets.tolist(), merged.value_offsets.tolist()
    assert len(operand_offsets) == len(value_offsets) == len(merged.call_class) + 1
    for c, entry, count in zip(merged.used[merged.call_class].tolist(), merged.call_entry.tolist(),
                               merged.call_count.tolist()):
        assert c == entry and (at, len(made)) == (operand_offsets.pop(0), value_offsets.pop(0))
        info_ = batch.classes[c] if c < num_classes else None
        rest, start = merged.operands[at:], len(made)
        # (A made class has as many operands as its function takes: found by what is behind it.)
        count = functions[c - num_classes].count if info_ is None else (
            len(info_.operand_widths) - info_.slots + count * info_.slots)
        tokens = rest[:count].tolist()
        assert all(t < start for t in tokens), "an operand is made before it is read"
        xs = [made[t] if t >= 0 else 10 - t for t in tokens]
        made += functions[c - num_classes](xs) if info_ is None else _call(batch.r, c, xs)
        at += count
    assert at == len(merged.operands) == operand_offsets[0] and len(made) == len(merged.value_specs) == value_offsets[0]
    return made


def check_merged(batch, forms):
    want, (merged, functions) = batch.values(), merge(batch, forms)
    got = run_merged(batch, merged, functions)
    value_of = np.arange(len(want)) if merged.value_of is None else merged.value_of
    assert all(got[new] == want[old] for old, new in enumerate(value_of.tolist()) if new >= 0)
    assert (value_of[batch.heads] >= 0).all()


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
        return cut_calls(CLASSES, [(0, [-2])] * 40 + [(4, list(range(terms)))], 5, held)
    assert key(3).keys() != key(4).keys()
    wide = [info(outputs=70, split=(True,))]
    codes = {bytes(Batch(wide, [([(0, [-1])], held)]).cut.codes) for held in ([], [0], [29], [30], [60], [0, 69])}
    assert len(codes) == 6


def test_leaves_of_other_looks_are_other_leaves():
    keys = [cut_calls([ROW], [(0, [-1])], 1, [], [spec]).keys() for spec in (5, 6)]
    assert keys[0] != keys[1]


def test_numbers_of_a_sample_are_found_again():
    """Numbers stand in the log as they are; as leaves they come behind the data, in recorded order."""
    classes = [ROW, PAIR]
    kinds = kinds_of(classes, [(0,), (1,)])
    log = np.array([0, 30, 1, FIRST, -4, 0, 5, 1, FIRST + 2, 6], np.int64)
    held = np.array([False, True, False, True])
    cut, numbers = cut_log(log, kinds, FIRST, np.zeros(1, np.int64), held, np.array([4]))
    assert cut.keys()[0] == cut.keys()[1] and cut.numbers.tolist() == [0, 2, 4] and numbers.tolist() == [30, -4, 5, 6]
    r = recording(classes, [(0, 1, [-2]), (1, 1, [0, -3]), (0, 1, [-4]), (1, 1, [2, -5])], 5)
    parts = Parts(np.full(4, -1), *r.offsets, r.operands, np.arange(4))
    known = forms_of(cut, parts, (r.call_class, r.call_width, r.offsets[1], np.zeros(4, np.int64)), kinds, 1, [])
    assert known[0] == known[1] and known[0].is_recorded
    assert merge_forms(cut, known, kinds, 1, 2, [], []).operands.tolist() == r.operands.tolist()


def test_a_sample_is_all_that_stands_between_what_reads_each_other():
    calls = [(0, [-2]), (0, [-3]), (0, [-2]), (1, [0, 2]), (0, [-1]), (0, [4])]
    assert cut_calls(CLASSES, calls, 4, []).starts.tolist() == [0, 4, 6]


def test_forms_with_one_checksum_are_told_apart():
    forms, a, b = Forms(10_000), Form(b"a", (), True), Form(b"b", (), True)
    forms.put([(5, b"code of a", a)])
    assert forms.get([5, 5], [b"code of a", b"code of b"]) == [a, None]
    forms.put([(5, b"code of b", b)])
    assert forms.get([5, 5], [b"code of a", b"code of b"]) == [None, b] and len(forms) == 1
    before = forms.num_bytes
    forms.put([(5, b"code of b", b), (6, bytes(20_000), a)])        # the second is too large to be kept
    assert forms.num_bytes == before and len(forms) == 1
    forms.clear()
    assert forms.num_bytes == len(forms) == 0


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
        for k, form in zip(new, forms_of(cut, parts, second.as_recorded(r), second.kinds, second.num_leaves, [])):
            found[k] = form
    check_merged(second, found)


def test_the_property_catches_a_wrong_form():
    batch, known = whole([(CHAIN, [2]), (FORK, [4])])
    forms = [known[key] for key in batch.cut.keys()]
    check_merged(batch, forms)
    words = np.frombuffer(forms[1].words, np.int32).copy()
    words[HEADER + words[NUM_KINDS] + 3 * words[0]] = -2       # its first operand: a number, of which there are none
    forms[1] = forms[1]._replace(words=words.tobytes())
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
        logs.RECORDINGS.clear()
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
        logs.RECORDINGS.clear()
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
        logs.RECORDINGS.clear()


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
    monkeypatch.setattr(merging, "FORMS", Forms(4000))
    net = Mlp()
    net.initialize(mx.init.Normal(0.4))
    for n in range(1, 12):
        for x, in rows(1, 6) * 5:
            with gdb.batching(granularity="op", policy="depth"):
                for _ in range(n):
                    x = mx.nd.tanh(x) * 2 + n
            logs.RECORDINGS.clear()
    assert 0 < len(merging.FORMS) < 11 and merging.FORMS.num_bytes <= 4000


# ---- marked cells ----------------------------------------------------------------------------


class Chain(mx.gluon.Block):
    """A marked cell along the words of a sample: word ids stand in the log as they are."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = gdb.vertex(Step())

    def forward(self, words, first):
        h = first
        for word in words:
            h = self.cell(word, h)
        return h.sum()


class Step(mx.gluon.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = mx.gluon.nn.Embedding(20, 4)
            self.dense = mx.gluon.nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, word, h):
        return F.tanh(self.embed(word).reshape((1, 4)) + self.dense(h))


def marked_step(net, samples, **scope):
    first = mx.nd.ones((1, 4))
    with autograd.record(), gdb.batching(policy="depth", **scope) if scope else autograd.pause(True) as done:
        with autograd.record():
            losses = [net(words, first) for words in samples]
    autograd.backward(losses)
    return [x.asnumpy() for x in losses] + [p.grad().asnumpy() for p in net.collect_params().values()], done


def make_chain():
    net = Chain()
    net.initialize(mx.init.Normal(0.4))
    return net


def test_samples_of_marked_cells_are_not_looked_for():
    """Reading their log takes less."""
    scope = marked_step(make_chain(), [[1, 2], [3]], granularity="vertex")[1]
    assert scope.stats.sample_hits == scope.stats.sample_misses == 0 and "samples known" not in scope.explain()


@pytest.fixture
def looked_for(monkeypatch):
    """Samples of marked cells are looked for, too."""
    monkeypatch.setattr(logs.Log, "joins", True)


@pytest.mark.parametrize("drop_repeats", [True, False])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_known_samples_of_marked_cells_are_merged(backend, drop_repeats, monkeypatch, looked_for):
    """Also with other words, and wherever a sample stands: the first call of a flush is recorded like all others."""
    net, rng = make_chain(), random.Random(5)
    marked_step(net, [[1, 2, 3], [4], [5, 6]], backend=backend, drop_repeats=drop_repeats)
    monkeypatch.setattr(merging, "_analyze", None)
    monkeypatch.setattr(logs, "_read", None)
    for _ in range(6):
        samples = [[rng.randrange(20) for _ in range(rng.choice((1, 2, 3)))] for _ in range(5)]
        got, scope = marked_step(net, samples, backend=backend, drop_repeats=drop_repeats)
        for x, y in zip(got, marked_step(net, samples)[0]):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        assert (scope.stats.sample_hits, scope.stats.sample_misses) == (5, 0)
        assert "5 of 5 samples known" in scope.explain()


def test_merged_tables_are_those_that_reading_gives(monkeypatch, looked_for):
    net, found = make_chain(), []
    monkeypatch.setattr(merging, "_merged", lambda log, forms, whole=merging._merged: found.append(
        (log, whole(log, forms))) or found[-1][1])
    for samples in ([[1, 2], [3]], [[4], [5, 6], [7]]):
        marked_step(net, samples, granularity="vertex")
    (log, members), = found
    read = log.recorded().structure
    assert read is not members.structure and read.buffers == members.structure.buffers
    for a, b in zip((*read.arrays, read.call_entry, *read.recording.offsets),
                    (*members.structure.arrays, members.structure.call_entry, *members.structure.recording.offsets)):
        np.testing.assert_array_equal(a, b)
    assert read.recording.classes == members.structure.recording.classes and members.structure.value_of is None


def test_samples_that_share_a_value_are_one(looked_for):
    net, first = make_chain(), mx.nd.ones((1, 4))
    with gdb.batching(policy="depth") as scope:
        shared = net.cell(1, first)
        losses = [net([word], shared) for word in (2, 3)] + [net([4], first)]
    assert scope.stats.sample_misses == 2
    want = [net([word], net.cell(1, first)) for word in (2, 3)] + [net([4], first)]
    for x, y in zip(losses, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), rtol=1e-5)


def test_a_check_reads_the_calls_of_known_samples(looked_for):
    net = make_chain()
    for samples in ([[1, 2], [3]], [[4], [5, 6]], [[4], [5, 6]]):
        scope = marked_step(net, samples, check=True)[1]
    assert scope.stats.sample_misses == scope.stats.sample_hits == 0        # a log that comes again is known before
