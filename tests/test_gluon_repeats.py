"""Calls that repeat others run once: whole models against the loop, and when it pays."""

import contextlib

import numpy as np
import pytest
from gluon_check import repeats_always_pay

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import choose
from gluon_dynbatch.repeats import find_repeats

nd = mx.nd


@pytest.fixture
def always(monkeypatch):
    repeats_always_pay(monkeypatch)


class Leaf(gluon.HybridBlock):
    def __init__(self, sparse=False):
        super().__init__()
        with self.name_scope():
            self.embed = gluon.nn.Embedding(6, 5, sparse_grad=sparse)
            self.fc = gluon.nn.Dense(4, in_units=5)

    def hybrid_forward(self, F, word):
        return F.tanh(self.fc(self.embed(word)))


class Node(gluon.HybridBlock):
    def __init__(self, drop=0.0):
        super().__init__()
        with self.name_scope():
            self.fc, self.drop = gluon.nn.Dense(4, in_units=8), gluon.nn.Dropout(drop)

    def hybrid_forward(self, F, left, right):
        return self.drop(F.tanh(self.fc(F.concat(left, right, dim=1))))


class Net(gluon.Block):
    """A tree is a word, or a pair of trees; `marked`: cells are vertices, else every operator is recorded."""

    def __init__(self, marked=True, sparse=False, drop=0.0):
        super().__init__()
        with self.name_scope():
            self.leaf, self.node, self.out = Leaf(sparse), Node(drop), gluon.nn.Dense(1, in_units=4)
        if marked:
            for block in (self.leaf, self.node, self.out):
                gdb.vertex(block)
        self.word = (lambda w: w) if marked else {w: nd.array([w]) for w in range(6)}.__getitem__

    def state(self, tree):
        return self.leaf(self.word(tree)) if isinstance(tree, int) else self.node(*map(self.state, tree))

    def forward(self, tree):
        return self.out(self.state(tree)).sum()


TREES = [((0, 1), 2), ((0, 1), (2, 3)), (4, (0, 1)), ((2, 3), (0, 1)), 5, (0, 0), ((0, 1), 2)]


def train(batched, net=None, dtype="float32", grad_req="write", passes=1, trees=TREES, fixed=False, **options):
    """Losses and gradients, and the scope of the last pass."""
    mx.random.seed(3)
    net = net or Net()
    net.initialize(mx.init.Normal(0.5), force_reinit=True)
    if np.dtype(net.leaf.fc.weight.dtype) != dtype:      # (a cast has the blocks traced anew)
        net.cast(dtype)
    for p in net.collect_params().values():
        p.grad_req = grad_req
    if fixed:
        net.leaf.fc.collect_params().setattr("grad_req", "null")
    if grad_req == "add":
        net.collect_params().zero_grad()
    scope = None
    for _ in range(passes):
        with autograd.record():
            if batched:
                with gdb.batching(**options) as scope:
                    losses = [net(tree) for tree in trees]
            else:
                losses = [net(tree) for tree in trees]
        autograd.backward(losses)
    grads = {name: p.grad().asnumpy() for name, p in net.collect_params().items() if p.grad_req != "null"}
    return [x.asscalar() for x in losses], grads, scope


def plain(**options):
    """The loop over a net that is not marked: a word is an array there."""
    net = Net(marked=False, **options.pop("net", {}))
    if options.get("dtype", "float32") != "float32":
        net.word = {w: nd.array([w], dtype=options["dtype"]) for w in range(6)}.__getitem__
    return train(False, net, **options)


def assert_same(got, want, dtype="float32"):
    tolerance = dict(rtol=2e-4, atol=2e-5) if dtype == "float32" else dict(rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got[0], want[0], **tolerance)
    for (name, grad), want_grad in zip(got[1].items(), want[1].values()):
        np.testing.assert_allclose(grad, want_grad, err_msg=name, **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("grad_req, passes, sparse, fixed", [       # (MXNet's loop adds up no row_sparse gradients)
    ("write", 1, False, False), ("write", 1, True, False), ("add", 2, False, False), ("write", 1, False, True)])
def test_same_as_the_loop(always, backend, grad_req, passes, sparse, fixed, dtype):
    """`fixed`: the layer at the words has no gradient."""
    setting = dict(grad_req=grad_req, passes=passes, fixed=fixed, dtype=dtype)
    want = plain(net=dict(sparse=sparse), **setting)
    got = train(True, Net(sparse=sparse), backend=backend, policy="depth", **setting)
    assert_same(got, want, dtype)
    assert len(got[1]) == (5 if fixed else 7)
    # Words 0 to 5 and (0, 1), (2, 3), ((0, 1), 2), ((0, 1), (2, 3)), (4, (0, 1)), ((2, 3), (0, 1)), (0, 0). The first
    # tree comes twice, and its output is made once.
    nodes, leaves = ([x.rows for x in got[2].flushes[0].launches if x.title.startswith(t)] for t in ("Node", "Leaf"))
    assert sum(leaves) == 6 and sum(nodes) == 7
    assert got[2].stats.repeats == got[2].stats.calls - sum(nodes) - sum(leaves) - 2 * len(TREES) + 1 > 5


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_same_as_the_loop_in_float64_and_undecorated(always, backend):
    want = plain(dtype="float64")
    net = Net(marked=False)
    net.word = {w: nd.array([w], dtype="float64") for w in range(6)}.__getitem__
    got = train(True, net, dtype="float64", backend=backend, granularity="op", policy="depth")
    assert_same(got, want, "float64")
    assert got[2].stats.repeats > 20                # the same array, so the same lookup, and all that follows


class Sentences(gluon.Block):
    """Plain Gluon: a sentence is looked up at once, then goes word by word."""

    def __init__(self, sparse=False):
        super().__init__()
        with self.name_scope():
            self.embed, self.other = gluon.nn.Embedding(6, 5, sparse_grad=sparse), gluon.nn.Embedding(6, 5)
            self.fc, self.out = gluon.nn.Dense(4, in_units=5), gluon.nn.Dense(1, in_units=4)

    def forward(self, words):
        x, y = self.embed(words), self.other(words)
        first = [self.fc(x[k:k + 1]).tanh() for k in range(len(words))]         # (1, 5)
        second = [self.fc(y[k].reshape((1, -1))).tanh() for k in range(len(words))]
        pairs = [self.fc(x[k:k + 2]).sum(axis=0, keepdims=True) for k in range(len(words) - 1)]
        return self.out(nd.add_n(*first, *second, *pairs)).sum()


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "row_sparse"])
def test_rows_of_a_sentence_that_was_looked_up_at_once(always, backend, sparse):
    """Also numbers outside of the table, which count as its first or last (with a sparse gradient they are errors)."""
    net = Sentences(sparse)
    net.initialize(mx.init.Normal(0.5))
    over, under = (4, 3) if sparse else (9, -3)
    words = [nd.array(s) for s in ([0, 1, 2, 3], [2, 1], [over, 0, 1], [5, 5, under], [2], [1, 2, 0])]

    def run(batched):
        scope = None
        with autograd.record():
            if batched:
                with gdb.batching(granularity="op", policy="depth", backend=backend) as scope:
                    losses = [net(s) for s in words]
            else:
                losses = [net(s) for s in words]
        autograd.backward(losses)
        return [x.asscalar() for x in losses], {k: p.grad().asnumpy() for k, p in net.collect_params().items()}, scope

    want, got = run(False), run(True)
    assert_same(got, want)
    assert got[2].stats.repeats >= 16               # 16 words, 7 of them for the first time, in two tables


def test_lookups_of_whole_rows_of_words_and_in_deep_tables(always):
    """One position that looks up several numbers, and a number that stands for several rows, are known by no number."""
    table, deep = nd.array(np.arange(12).reshape(6, 2)), nd.array(np.arange(24).reshape(6, 2, 2))

    def work():
        found = []
        for words in ([[1, 2]], [[1, 3]], [[4, 2]]):
            x, y = nd.Embedding(nd.array(words), table, input_dim=6, output_dim=2), nd.take(deep, nd.array(words[0]))
            found += [x[0, k] * 2 for k in range(2)] + [y[k] * 2 for k in range(2)] + [y[0, k] * 2 for k in range(2)]
        return found

    want = [x.asnumpy() for x in work()]
    with gdb.batching(policy="depth"):
        got = work()
    for x, y in zip(got, want):
        np.testing.assert_array_equal(x.asnumpy(), y)


def test_a_row_that_was_taken_without_recording_is_another_one(always):
    net = gluon.nn.Embedding(4, 3)
    net.initialize()

    def grads(batched):
        with autograd.record():
            with gdb.batching(policy="depth") if batched else contextlib.nullcontext():
                x, y = net(nd.array([1, 2])), net(nd.array([2, 1]))
                with autograd.pause():
                    plain = x[0:1] * 3
                loss = (y[1:2] * 3).sum() + plain.sum()
        loss.backward()
        return net.weight.grad().asnumpy()

    want = grads(False)
    assert want[1].any()
    np.testing.assert_allclose(grads(True), want)


def test_parameters_without_a_gradient(always):
    net = Net()
    train(True, net, policy="depth")
    net.leaf.fc.collect_params().setattr("grad_req", "null")
    with autograd.record(), gdb.batching(policy="depth") as scope:
        losses = [net(tree) for tree in TREES]
    autograd.backward(losses)
    assert scope.stats.repeats
    want = {name: p.grad().asnumpy() for name, p in net.collect_params().items() if p.grad_req != "null"}
    with autograd.record(), gdb.batching(policy="none") as scope:
        losses = [net(tree) for tree in TREES]
    autograd.backward(losses)
    assert not scope.stats.repeats
    for name, grad in want.items():
        np.testing.assert_allclose(grad, net.collect_params()[name].grad().asnumpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("options", [{"policy": "none"}, {"policy": "depth", "granularity": "graph"},
                                     {"drop_repeats": False}])
def test_settings_that_are_about_every_call_keep_every_call(always, options):
    assert train(True, **options)[2].stats.repeats == 0


def test_results_that_are_held_have_memory_of_their_own(always):
    net = Net()
    train(True, net, policy="depth")
    with gdb.batching(policy="depth") as scope:
        kept = [net.state(tree) for tree in TREES]
    assert scope.stats.repeats                      # the words and phrases inside
    first, last = kept[0], kept[-1]                 # the same tree
    np.testing.assert_array_equal(first.asnumpy(), last.asnumpy())
    first[:] = 0
    assert not np.array_equal(first.asnumpy(), last.asnumpy())


def test_gradients_that_begin_at_two_held_results(always):
    net = Net()
    train(True, net, policy="depth")

    def grads(**options):
        with autograd.record(), gdb.batching(**options):
            a, b, c = net.state((0, 1)), net.state((0, 1)), net((0, 1))
        autograd.backward([a, b, c], [nd.ones((1, 4)), 3 * nd.ones((1, 4)), None])
        return {name: p.grad().asnumpy() for name, p in net.collect_params().items()}

    for (name, got), want in zip(grads(policy="depth").items(), grads(policy="none").values()):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=name)


def test_views_of_repeated_calls(always):
    """A view shares the memory of its base, and of nothing else."""
    x = nd.array([[1., 2.], [3., 4.]])
    with gdb.batching(policy="depth"):
        a, b = x * 2, x * 2
        first, second = a[0], b[0]
        c = (x * 2) + 1
    first[:] = 7
    np.testing.assert_array_equal(a.asnumpy(), [[7, 7], [6, 8]])
    np.testing.assert_array_equal(b.asnumpy(), [[2, 4], [6, 8]])
    np.testing.assert_array_equal(second.asnumpy(), [2, 4])
    np.testing.assert_array_equal(c.asnumpy(), [[3, 5], [7, 9]])


def test_dropout_draws_for_every_call(always):
    net = Net(drop=0.5)
    net.initialize()
    with autograd.record(), gdb.batching(policy="depth") as scope:
        states = [net.node(net.leaf(0), net.leaf(1)) for _ in range(40)]
    assert scope.stats.repeats >= 70                # the words
    assert len({x.asnumpy().tobytes() for x in states}) > 5


def test_check_looks_at_calls_that_did_not_run(always, monkeypatch):
    got = train(True, policy="depth", check=True)
    assert got[2].stats.repeats
    choose.REPEATS.clear()

    def wrong(facts, recording):
        left = find_repeats(facts, recording)
        value = max(v for v in range(len(left.value_of)) if left.value_of[v] in left.value_of[:v])
        left.value_of[value] = (left.value_of[value] + 1) % len(left.value_specs)
        return left

    monkeypatch.setattr(choose, "find_repeats", wrong)
    with pytest.raises(gdb.BatchingMismatchError, match="batching\\(check=True\\): call"):
        train(True, policy="depth", check=True)


def test_values_are_read_in_between(always):
    net = Net()
    train(True, net, policy="depth")
    want = [net.state(tree).asnumpy() for tree in TREES]
    with gdb.batching(policy="depth"):
        for tree, value in zip(TREES * 2, want * 2):
            np.testing.assert_allclose(net.state(tree).asnumpy(), value, rtol=2e-4)


# ---- whether it pays -------------------------------------------------------------------------------------------------

def test_few_cheap_repeats_stay_and_are_looked_for_seldom(monkeypatch):
    looked = []
    find = choose.Tables.repeat_facts
    monkeypatch.setattr(choose.Tables, "repeat_facts", lambda tables: looked.append(1) or find(tables))
    net = Net()
    for _ in range(choose.AGAIN + 4):
        got = train(True, net, policy="depth")
        assert got[2].stats.repeats == 0
    assert len(looked) == choose.PATIENCE + 1


def test_many_repeats_pay():
    """A class that never ran is taken to cost a microsecond a row."""
    got = train(True, policy="depth", trees=TREES * 200)
    assert got[2].stats.repeats > 2000
    assert f"{got[2].stats.calls} calls, {got[2].stats.repeats} of them repeats," in got[2].explain()


def test_the_same_mini_batch_is_looked_through_once(always, monkeypatch):
    looked = []
    monkeypatch.setattr(choose, "find_repeats", lambda *given: looked.append(1) or find_repeats(*given))
    net, other = Net(), [(5, 4), (4, (5, 3))]
    repeats = [train(True, net, policy="depth", trees=trees)[2].stats.repeats for trees in (TREES, TREES, other, TREES)]
    assert len(looked) <= 3 and repeats[1] == repeats[3] > 5            # (a first scope traces, and may flush before)
    changed = [(0, 1) if tree == 5 else tree for tree in TREES]         # the same number of calls, other words
    before = len(looked)
    assert_same(train(True, net, policy="depth", trees=changed), plain(trees=changed))
    assert len(looked) > before


def test_a_known_plan_is_used_again(always):
    net = Net()
    train(True, net, policy="depth")
    hits = [train(True, net, policy="depth")[2].stats.cache_hits for _ in range(2)]
    assert hits == [1, 1]
    other = [tuple(5 - w if isinstance(w, int) else w for w in tree) if isinstance(tree, tuple) else tree
             for tree in TREES]
    assert train(True, net, policy="depth", trees=other)[2].stats.cache_hits == 0       # other words repeat


def test_samples_of_one_structure_keep_their_known_plan():
    """Leaving out a few cheap calls would cost a new plan for every mini-batch."""
    @gdb.vertex
    def cheap(F, word, x):
        return x + word

    x, known = mx.nd.ones((1, 64)), []
    for words in ([1, 1, 2], [3, 3, 4], [5, 5, 6], [7, 7, 8]):
        with gdb.batching(policy="depth") as scope:
            total = mx.nd.add_n(*[cheap(mx.nd, w, x) for w in words * 100])
        assert total.asnumpy().mean() == 300 + 100 * sum(words)
        known.append((scope.stats.repeats > 0, scope.stats.cache_hits))
    assert known[-1] == (False, 1)
