"""A mini-batch that comes again is known by its log: nothing is read anew. Whatever else decides is compared too."""

import gc

import numpy as np
import pytest
from gluon_check import repeats_always_pay

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import logs
from gluon_dynbatch.plan_cache import PlanCache

nd = mx.nd


class Cell(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embed, self.fc = gluon.nn.Embedding(9, 4), gluon.nn.Dense(4, in_units=4, flatten=False)

    def hybrid_forward(self, F, word, h):
        return F.tanh(self.fc(self.embed(word)) + h)


def make_cell(marked=True):
    mx.random.seed(5)
    cell = Cell()
    cell.initialize(mx.init.Normal(0.5))
    return gdb.vertex(cell) if marked else cell


WORDS = [[1, 2, 3], [1, 2], [4, 1, 2]]


@pytest.fixture
def read(monkeypatch):
    """The logs that were read, and not known; the table of those that are is new. Leaving out repeats always pays."""
    repeats_always_pay(monkeypatch)
    found, whole = [], logs._read
    monkeypatch.setattr(logs, "RECORDINGS", PlanCache())
    monkeypatch.setattr(logs, "_read", lambda log, *rest: found.append(log) or whole(log, *rest))
    return found


def run(cell, first, words=WORDS, hold=False, **scope):
    """Losses, gradients, the states of all words if they are held, and the scope."""
    states = []
    with autograd.record(), gdb.batching(policy="depth", **scope) as batched:
        losses = []
        for sentence in words:
            h = first
            for word in sentence:
                h = cell(word, h)
                if hold:
                    states.append(h)
            losses.append(h.sum())
        del h
    autograd.backward(losses)
    grads = {k: p.grad().asnumpy() for k, p in cell.collect_params().items() if p.grad_req != "null"}
    return [x.asscalar() for x in losses], grads, [x.asnumpy() for x in states], batched


def check(cell, first, words=WORDS, hold=False, **scope):
    """The same as the loop, by MXNet alone; the scope."""
    got = run(cell, first, words, hold, **scope)
    losses, states = [], []
    with autograd.record():
        for sentence in words:
            h = first
            for word in sentence:
                h = cell(nd.array([word]) if isinstance(word, int) else word, h)
                states.append(h)
            losses.append(h.sum())
    autograd.backward(losses)
    np.testing.assert_allclose(got[0], [x.asscalar() for x in losses], rtol=1e-4)
    for name, p in cell.collect_params().items():
        if p.grad_req != "null":
            np.testing.assert_allclose(got[1][name], p.grad().asnumpy(), rtol=1e-4, atol=1e-6)
    for x, want in zip(got[2], states if hold else ()):
        np.testing.assert_allclose(x, want.asnumpy(), rtol=1e-4)
    return got[3]


def test_a_known_log_is_not_read_again(read):
    cell, first = make_cell(), nd.ones((1, 4))
    for _ in range(2):                  # (the first scope traces the cell)
        check(cell, first)
    read.clear()
    scope = check(cell, first)
    assert not read and scope.stats.cache_hits == 1


def test_another_word_is_another_log(read):
    """Which calls repeat others hangs on the words."""
    cell, first = make_cell(), nd.ones((1, 4))
    many = [sentence for sentence in WORDS for _ in range(4)]
    few = [[k % 9 for k in range(j, j + len(s))] for j, s in enumerate(many)]
    repeats = [check(cell, first, words).stats.repeats for words in (many, few, many, few)]
    assert repeats[0] == repeats[2] > repeats[1] > 0 and repeats[1] == repeats[3]
    changed = [list(s) for s in many]
    changed[-1][-1] = 8                 # one word
    assert check(cell, first, changed).stats.repeats == repeats[0] - 1


def test_numbers_in_arrays_decide_beside_the_log(read):
    """The log of plain operators names the arrays alone; what is in them is compared as well."""
    cell, first = make_cell(marked=False), nd.ones((1, 4))
    arrays = [[nd.array([w]) for w in sentence] for sentence in WORDS for _ in range(4)]
    check(cell, first, arrays)          # (from then on the arrays look as if they were on the tape)
    before = check(cell, first, arrays).stats.repeats
    read.clear()
    assert check(cell, first, arrays).stats.repeats == before > 10 and not read
    arrays[-1][-1][:] = 8
    after = check(cell, first, arrays).stats.repeats
    assert 0 < before - after < 10 and not read


def test_another_array_in_the_same_place(read):
    cell = make_cell()
    check(cell, nd.ones((1, 4)))
    check(cell, nd.ones((1, 4)))
    read.clear()
    check(cell, 3 * nd.ones((1, 4)))
    assert not read
    wanted = nd.ones((1, 4))
    wanted.attach_grad()
    check(cell, wanted)                 # a gradient flows into it: another structure
    assert len(read) == 1
    got = wanted.grad.asnumpy()
    run(cell, wanted)
    np.testing.assert_allclose(wanted.grad.asnumpy(), got, rtol=1e-4)
    assert np.abs(got).sum() > 0 and len(read) == 1


def test_other_held_results(read):
    cell, first = make_cell(), nd.ones((1, 4))
    for hold in (False, True, False, True):
        check(cell, first, hold=hold)
    read.clear()
    check(cell, first, hold=True)
    check(cell, first, hold=False)
    assert not read


def test_another_grad_req(read):
    cell, first = make_cell(), nd.ones((1, 4))
    for _ in range(2):
        check(cell, first)
    weight = cell.fc.weight
    weight.grad_req = "null"
    assert weight.name not in run(cell, first)[1]
    weight.grad_req = "write"
    check(cell, first)
    read.clear()
    check(cell, first)
    assert not read


def test_a_view_is_not_the_same_as_a_slice(read):
    """Both are recorded alike, but what is written into a view is written into its base."""
    base = nd.ones((2, 3))
    for make, want in ((lambda x: x[0:1], 7.0), (lambda x: nd.slice(x, begin=(0,), end=(1,)), 2.0)) * 2:
        with gdb.batching(policy="depth"):
            whole = base * 2
            part = make(whole)
            gdb.flush()
            part[:] = 7
        assert whole.asnumpy()[0, 0] == want and whole.asnumpy()[1, 0] == 2.0


def test_what_is_remembered_is_bounded(monkeypatch):
    cell, first = make_cell(), nd.ones((1, 4))
    monkeypatch.setattr(logs, "RECORDINGS", PlanCache(max_bytes=20_000))
    for k in range(40):
        run(cell, first, [[k % 9] * (1 + k)])
    assert 0 < len(logs.RECORDINGS) < 40 and logs.RECORDINGS.num_bytes <= 20_000


def test_a_structure_counts_what_it_holds(read):
    run(make_cell(), nd.ones((1, 4)), WORDS * 50)
    (arrays, known, size, _), = logs.RECORDINGS._plans.values()
    structure = known.structure
    held = [*arrays, *structure.arrays, structure.call_entry, structure.numbers, structure.leaf_specs]
    held += [*structure.recording.offsets, *[a for a in (*structure.facts, *structure.facts.lookups)
                                             if hasattr(a, "nbytes") and not any(a is b for b in held)]]
    assert sum(a.nbytes for a in held) <= size


def test_recordings_go_with_their_blocks(read):
    cell = make_cell()
    for _ in range(2):
        run(cell, nd.ones((1, 4)))
    assert len(logs.RECORDINGS)
    del cell
    gc.collect()
    assert len(logs.RECORDINGS) == 0 and logs.RECORDINGS.num_bytes == 0


def test_an_equal_structure_is_compared_once(read):
    """Other words, but the same structure: the plan is known, and from then on by the very arrays of it."""
    cell, first = make_cell(), nd.ones((1, 4))
    run(cell, first, drop_repeats=False)
    run(cell, first, drop_repeats=False)
    other = [[5, 6, 7], [8, 0], [3, 3, 3]]
    assert run(cell, first, other, drop_repeats=False)[3].stats.cache_hits == 1
    known = [known.members.structure for _, known, _, _ in logs.RECORDINGS._plans.values()][-2:]
    assert known[0] is not known[1]
    assert all(a is b for a, b in zip(known[0].arrays, known[1].arrays))


def test_a_number_in_the_log_is_not_one_among_the_data():
    """Their plans look the same, but the numbers are found elsewhere."""
    class Scale(gluon.HybridBlock):
        def hybrid_forward(self, F, x, factor):
            return F.broadcast_mul(x, factor)

    scale, x = gdb.vertex(Scale()), nd.ones((1, 4))
    for factors in ([2, 3, 4], [2.5, 3.5, 4.5], [5, 6, 7], [0.5, 1.5, 2.5]):
        for _ in range(2):
            with gdb.batching(policy="depth"):
                made = [scale(x, factor) for factor in factors]
            assert [y.asnumpy()[0, 0] for y in made] == factors
