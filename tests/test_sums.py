"""Chains of additions as lists: on hand-made and random recordings, then in whole models."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_analyzer import info, recording

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch.analyzer import scan
from gluon_dynbatch.joining import ENOUGH, Habits
from gluon_dynbatch.sums import LONG, SumRoles, find_chains, fold_chains

ADD = info(operands=2, split=(True, True))
OTHER = info()
CLASSES = [OTHER, ADD]
ADDS = np.array([False, True])


def chains_of(calls, heads=(), viewed=(), classes=CLASSES, num_leaves=9):
    r = recording(classes, calls, num_leaves, heads=heads)
    held = np.array([*heads, *viewed], np.int64)
    return r, scan(r), find_chains(r, scan(r), held, ADDS[:len(classes)])


def makers(count):
    """Calls that make the values 0, 1, .."""
    return [(0, 1, [-1 - k]) for k in range(count)]


def folded(calls, heads=()):
    """The calls with all chains of more than two terms as lists, as (class, tokens), and the numbers of the values."""
    r, s, chains = chains_of(calls, heads)
    assert chains is not None
    new, value_of = fold_chains(r, s, chains, chains.lengths > 2, np.array([-1, 2]))
    ends = scan(new).operand_offsets
    return [(c, new.operands[a:b].tolist()) for c, a, b in zip(new.call_class.tolist(), ends, ends[1:])], value_of, new


def test_a_chain_becomes_a_list_in_its_order():
    calls, value_of, new = folded([*makers(4), (1, 1, [0, 1]), (1, 1, [4, 2]), (1, 1, [3, 5]), (0, 1, [6])], heads=[7])
    assert calls == [(0, [-1]), (0, [-2]), (0, [-3]), (0, [-4]), (2, [0, 1, 2, 3]), (0, [4])]
    assert value_of.tolist() == [0, 1, 2, 3, -1, -1, 4, 5]
    assert new.call_count.tolist() == [0, 0, 0, 0, 4, 0] and new.heads.tolist() == [5]
    assert new.classes[2].slots == 1 and new.classes[2].output_buffers == ADD.output_buffers


def test_lengths_and_roles():
    calls = [*makers(3), (1, 1, [0, -1]), (1, 1, [3, 1]), (1, 1, [4, 2]), (1, 1, [0, 1])]
    _, _, chains = chains_of(calls)
    assert chains.ends.tolist() == [5, 6] and chains.lengths.tolist() == [4, 2]
    assert chains.roles.tolist() == [[1, 0, -1], [1, 0, 0]]


@pytest.mark.parametrize("more, what", [
    ([(0, 1, [3])], "is read by others"), ([(1, 1, [3, 3])], "is added to itself")])
def test_a_sum_that_others_want_stays(more, what):
    _, _, chains = chains_of([*makers(3), (1, 1, [0, 1]), (1, 1, [3, 2]), *more])
    assert (chains.lengths == 2).all(), what


def test_a_sum_that_is_held_or_has_views_stays():
    calls = [*makers(3), (1, 1, [0, 1]), (1, 1, [3, 2])]
    assert chains_of(calls, heads=[4])[2].lengths.tolist() == [3]
    assert chains_of(calls, heads=[3, 4])[2].lengths.tolist() == [2, 2]
    assert chains_of(calls, heads=[4], viewed=[3])[2].lengths.tolist() == [2, 2]


def test_a_sum_of_two_sums_has_one_of_them_as_a_term():
    calls, _, _ = folded([*makers(4), (1, 1, [0, 1]), (1, 1, [2, 3]), (1, 1, [4, 5])])
    assert calls[4:] == [(1, [2, 3]), (2, [0, 1, 4])]           # (0 + 1) + (2 + 3)


def test_wide_calls_and_a_shared_operand_stay():
    """A call on several rows has no single row to list; what all calls add is a weight."""
    wide = [(0, 2, [-1]), (0, 2, [-2]), (1, 2, [0, 1]), (1, 2, [2, 0])]
    assert chains_of(wide, classes=[info(split=(True,)), ADD])[2] is None
    weight = [(0, 1, [-1]), (0, 1, [-2]), (1, 1, [0, -3]), (1, 1, [2, -3]), (1, 1, [3, -3])]
    assert chains_of(weight)[2] is None


def test_no_additions_no_chains():
    assert chains_of(makers(3))[2] is None and chains_of([])[2] is None


@st.composite
def recordings(draw):
    """Calls that read leaves and values at random, among them many additions of what was made last."""
    calls = makers(2)
    for _ in range(draw(st.integers(0, 40))):
        token = st.integers(max(-9, -len(calls)), len(calls) - 1)
        near = st.integers(max(0, len(calls) - 3), len(calls) - 1)
        if draw(st.integers(0, 3)):
            pair = [draw(near), draw(token)]
            calls.append((1, 1, pair if draw(st.booleans()) else pair[::-1]))
        else:
            calls.append((0, 1, [draw(token)]))
    heads = draw(st.lists(st.integers(0, len(calls) - 1), max_size=4, unique=True))
    return calls, sorted({*heads, len(calls) - 1})


def bits(calls):
    """The value of every call in float32, where the order of additions shows in the last bits."""
    leaves, values = np.random.RandomState(0).normal(size=9).astype(np.float32), []
    for c, tokens in calls:
        terms = [values[t] if t >= 0 else leaves[-1 - t] for t in tokens]
        total = terms[0]
        for term in terms[1:]:
            total = np.float32(total + term)
        values.append(np.float32(total * np.float32(1.1)) if c == 0 else total)
    return values


@given(recordings())
def test_every_value_that_is_left_is_the_same_to_the_bit(drawn):
    calls, heads = drawn
    if chains_of(calls, heads)[2] is None:
        return
    new, value_of, r = folded(calls, heads)
    want, got = bits([(c, tokens) for c, _, tokens in calls]), bits(new)
    assert len(got) == (value_of >= 0).sum() and (value_of[heads] >= 0).all()
    for v, at in enumerate(value_of.tolist()):
        assert at < 0 or got[at] == want[v]
    assert r.heads.tolist() == value_of[heads].tolist()


# ---- which chains ----------------------------------------------------------------------------------------------------

def of_lengths(*lengths):
    """Sums of the results of class 0, one of each length."""
    calls = []
    for n in lengths:
        first = len(calls)
        calls += makers(1) * n + [(1, 1, [first, first + 1])]
        for k in range(2, n):
            calls.append((1, 1, [len(calls) - 1, first + k]))
    return chains_of(calls)[2]


def test_sums_of_several_lengths_and_long_ones_become_lists():
    names = ["other", "add"]
    assert SumRoles().chosen(of_lengths(2, 3, 4, 4), names).tolist() == [True] * 4      # short ones keep step with them
    assert SumRoles().chosen(of_lengths(2, 3, 3, 2), names).tolist() == [False] * 4
    assert SumRoles().chosen(of_lengths(LONG + 1), names).tolist() == [True]


def test_a_role_is_remembered():
    roles, few = SumRoles(most=2), of_lengths(2, 3)
    assert not roles.chosen(few, ["x", "add"]).any() and len(roles) == 0
    roles.chosen(of_lengths(2, 3, 4), ["x", "add"])
    assert roles.chosen(few, ["x", "add"]).tolist() == [True, True]
    assert not roles.chosen(few, ["y", "add"]).any()
    for name in "abc":
        roles.chosen(of_lengths(2, 3, 4), [name, "add"])
    assert len(roles) == 2 and not roles.chosen(few, ["x", "add"]).any()
    roles.clear()
    assert len(roles) == 0


# ---- whole models ----------------------------------------------------------------------------------------------------

class Summing(gluon.HybridBlock):
    """Sums of any number of terms, in two layers; nothing is marked."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.below, self.above = gluon.nn.Dense(5, in_units=4), gluon.nn.Dense(1, in_units=5)

    def forward(self, rows):
        total = self.below(rows[0])
        for row in rows[1:]:
            total = total + self.below(row).tanh()
        hidden, loss = total.tanh(), self.above(total)
        for row in rows[1:]:
            loss = loss + self.above(hidden * self.below(row))
        return loss.sum()


def run(lengths, dtype="float32", batched=True, **options):
    net = Summing()
    net.initialize(mx.init.Normal(0.5))
    net.cast(dtype)
    rng, scope = np.random.RandomState(1), None
    for p in net.collect_params().values():
        p.set_data(mx.nd.array(rng.normal(size=p.shape), dtype=dtype))
    samples = [[mx.nd.array(rng.normal(size=(1, 4)), dtype=dtype) for _ in range(n)] for n in lengths]
    with autograd.record():
        if batched:
            with gdb.batching(**options) as scope:
                losses = [net(rows) for rows in samples]
        else:
            losses = [net(rows) for rows in samples]
    autograd.backward(losses)
    return [x.asscalar() for x in losses], [p.grad().asnumpy() for p in net.collect_params().values()], scope


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("policy", ["depth", "cost", "agenda"])
def test_same_as_the_loop(policy, backend, dtype):
    lengths = [3, 1, 6, 2, 11, 4, 4]
    want, want_grads, _ = run(lengths, dtype, batched=False)
    got, grads, scope = run(lengths, dtype, policy=policy, backend=backend)
    tolerance = dict(rtol=2e-4, atol=2e-5) if dtype == "float32" else dict(rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got, want, **tolerance)
    for grad, want_grad in zip(grads, want_grads):
        np.testing.assert_allclose(grad, want_grad, **tolerance)
    assert not scope.stats.fallbacks
    assert any(x.title == "add_n" and x.operands == "list" for x in scope.flushes[0].launches)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "int8", "uint8"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_sums_of_every_dtype(backend, dtype):
    """Numbers that are exact in all of them; sums of bytes stay chains, because MXNet adds up no lists of them."""
    def sums():
        found = []
        for n in (1, 2, 3, 5, 12):
            rows = [mx.nd.array([[k, 1, 2]], dtype=dtype) for k in range(n)]
            doubled = [x + x for x in rows]
            total = doubled[0]
            for x in doubled[1:]:
                total = total + x
            found += [total, mx.nd.add_n(*doubled)]
        return found

    want = [x.asnumpy() for x in sums()]
    with gdb.batching(backend=backend, policy="depth") as scope:
        got = sums()
    for x, y in zip(got, want):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.asnumpy(), y)
    assert any(x.operands == "list" for x in scope.flushes[0].launches) == (dtype not in ("int8", "uint8"))


def test_a_longer_sum_takes_no_more_launches():
    few, many = (run([2, 3, 4, n], policy="depth")[2].stats.launches for n in (12, 40))
    assert few == many
    alone = run([2, 3, 4, 12], policy="none")[2]                # every call by itself: no lists either
    assert not any(x.operands == "list" for x in alone.flushes[0].launches)


def test_check_sees_every_sum():
    want, _, _ = run([3, 1, 6, 2], batched=False)
    got, _, scope = run([3, 1, 6, 2], check=True, policy="depth")
    np.testing.assert_allclose(got, want, rtol=2e-4)
    assert any(x.operands == "list" for x in scope.flushes[0].launches)


def test_sums_on_the_way_that_are_kept_have_their_values():
    rows = [mx.nd.array([[k, 1.0]]) for k in range(24)]
    with gdb.batching(policy="depth") as scope:
        doubled = [row * 2 for row in rows]
        total, kept = doubled[0], []
        for k, row in enumerate(doubled[1:]):
            total = total + row
            if k == 9:
                kept.append(total)
    assert kept[0].asnumpy().tolist() == [[110.0, 22.0]] and total.asnumpy().tolist() == [[552.0, 48.0]]
    assert sum(x.operands == "list" for x in scope.flushes[0].launches) == 2


def test_a_very_long_sum():
    count = 20_000
    one = mx.nd.ones((1, 2))
    with gdb.batching(policy="depth", max_pending=None) as scope:
        x = one * 1
        total = x + x
        for _ in range(count - 2):
            total += x
    assert total.asnumpy().tolist() == [[count, count]]
    assert scope.stats.launches == 2


def test_sums_of_one_run_with_the_others():
    rows = [mx.nd.array([[k, 1.0]]) for k in range(6)]
    with gdb.batching(policy="depth") as scope:
        doubled = [row * 2 for row in rows]
        found = [mx.nd.add_n(*doubled[:n]) for n in (1, 2, 6)]
    assert scope.stats.launches == 2
    assert [x.asnumpy().tolist() for x in found] == [[[0.0, 2.0]], [[2.0, 4.0]], [[30.0, 12.0]]]


def test_a_copy_only_names_rows():
    """As does dropout outside of training: no launch, and yet memory of its own."""
    row = mx.nd.array([[1.0, 2.0]])
    with gdb.batching() as scope:
        x = row + 1
        found = [x.copy(), mx.nd.Dropout(x, p=0.5)]
    assert scope.stats.launches == 1 and scope.flushes[0].aliases == 2
    found[0][:] = 9
    assert [y.asnumpy().tolist() for y in [x, *found]] == [[[2.0, 3.0]], [[9.0, 9.0]], [[2.0, 3.0]]]


def test_the_sum_of_many_losses_is_one_launch():
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    rows = [mx.nd.array([[k, 1.0]]) for k in range(20)]
    with autograd.record():
        with gdb.batching(policy="depth") as scope:
            total = sum(net(row).square() for row in rows)
    total.backward()
    assert sum("add" in x.title for x in scope.flushes[0].launches) == 1
    want = sum((k + 1.0) ** 2 for k in range(20))
    assert total.asscalar() == want and net.weight.grad().asnumpy()[0, 1] == sum(2 * (k + 1.0) for k in range(20))


# ---- what is remembered ----------------------------------------------------------------------------------------------

def test_habits_are_known_after_some_flushes_and_the_oldest_are_forgotten():
    habits = Habits(most=2)
    for flush in range(ENOUGH):
        assert habits.apart(["a", "b"]) is None
        assert habits.learn(["a", "b"], [3, -1]) == [False, True], flush
    assert habits.apart(["a", "b"]) == [False, True] and habits.apart(["a", "c"]) is None
    habits.learn(["c", "b"], [1, 1])            # in the order of use: a is the oldest
    assert len(habits) == 2 and habits.get("a") is None
    habits.clear()
    assert len(habits) == 0
