"""The policies on hand-made, drawn and random problems: pure arrays, no device."""

import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gluon_dynbatch.policies import POLICIES, Agenda, Cost, Depth, Problem, Unbatched, check_plan, predicted_us

SEEDS = range(20)


def problem(calls, launch_us=(10.0,) * 10, row_us=None, rows=None):
    """calls: (class, producers)."""
    producers = [p for _, p in calls]
    return Problem(
        np.array([c for c, _ in calls], np.int64), np.array([1] * len(calls) if rows is None else rows, np.int64),
        np.cumsum([0, *map(len, producers)], dtype=np.int64), np.array([i for p in producers for i in p], np.int64),
        np.array(launch_us, float), np.array([1.0] * len(launch_us) if row_us is None else row_us, float))


def producers_of(p, call):
    return p.producers[p.indptr[call]:p.indptr[call + 1]].tolist()


def launches_of(p, policy):
    """Launches of each class."""
    launch = policy.plan(p)
    check_plan(p, launch)
    return Counter(c for c, _ in sorted(set(zip(p.call_class.tolist(), launch.tolist()))) if c >= 0)


def mean_us(problems, policy):
    return np.mean([predicted_us(p, policy.plan(p)) for p in problems])


# ---- families of problems -----------------------------------------------------------------------------------------

@st.composite
def problems(draw):
    num_classes = draw(st.integers(1, 5))
    calls, running = [], []
    for i in range(draw(st.integers(0, 30))):
        reads = draw(st.lists(st.sampled_from(running), max_size=3)) if running else []
        calls.append((draw(st.integers(-1, num_classes - 1)), reads))
        running += [i] if calls[-1][0] >= 0 else []
    us = st.lists(st.sampled_from([0.0, 0.1, 0.3, 3.0, 7.7, 50.0]), min_size=num_classes, max_size=num_classes)
    rows = draw(st.lists(st.integers(0, 5), min_size=len(calls), max_size=len(calls)))
    return problem(calls, draw(us), draw(us), rows)


def random_dag(seed, num_calls=120, num_classes=5):
    rng = np.random.default_rng(seed)
    calls = [(int(rng.integers(num_classes)), rng.integers(max(0, i - 15), i, rng.integers(3) if i else 0).tolist())
             for i in range(num_calls)]
    return problem(calls, rng.uniform(2, 20, num_classes))


def sequences(lengths, loss_at_every_step=False):
    """An RNN (class 0) over sequences, and a loss (class 1), which costs more, at the last step or at all of them."""
    calls = []
    for length in lengths:
        steps = range(len(calls), len(calls) + length)
        calls += [(0, [i - 1] if i > steps[0] else []) for i in steps]
        calls += [(1, [i]) for i in (steps if loss_at_every_step else steps[-1:])]
    return problem(calls, [10.0, 10.0], [1.0, 2.0])


def trees(seed, num_trees=12, max_children=2, class_of=lambda children: 1 if children else 0, loss=None):
    """Random trees, children first; the class comes from the number of children. Class `loss` reads every node."""
    rng = np.random.default_rng(seed)
    calls = []
    for _ in range(num_trees):
        roots = []
        for leaf in range(int(rng.integers(3, 15))):
            roots.append(len(calls))
            calls.append((class_of(0), []))
            while len(roots) > 1 and (leaf % 3 == 2 or rng.random() < 0.4):
                arity = int(rng.integers(min(2, max_children), 1 + min(max_children, len(roots))))
                children, roots = roots[-arity:], roots[:-arity] + [len(calls)]
                calls.append((class_of(arity), children))
    if loss is not None:
        calls += [(loss, [i]) for i in range(len(calls))]
    return problem(calls, [8.0, 20.0, 5.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0])


# ---- every policy, drawn problems ---------------------------------------------------------------------------------

@settings(max_examples=100)
@given(problems())
def test_every_call_runs_once_after_its_producers_with_its_class_alone(p):
    for policy in POLICIES.values():
        launch = policy.plan(p)
        assert launch.dtype == np.int64 and launch.shape == p.call_class.shape
        assert ((launch == -1) == (p.call_class == -1)).all()
        used = sorted(set(launch.tolist()) - {-1})
        assert used == list(range(len(used)))
        assert len({(launch[i], p.call_class[i]) for i in range(len(launch)) if launch[i] >= 0}) == len(used)
        for i in np.flatnonzero(launch >= 0):
            assert all(launch[producer] < launch[i] for producer in producers_of(p, i))
        check_plan(p, launch)


@given(problems())
def test_equal_problems_have_equal_plans_and_are_left_alone(p):
    fields = ("call_class", "call_rows", "indptr", "producers", "launch_us", "row_us")
    copy = Problem(*(getattr(p, name).copy() for name in fields))
    for policy in POLICIES.values():
        assert policy.plan(p).tolist() == policy.plan(copy).tolist() == policy.plan(p).tolist()
    assert all(np.array_equal(getattr(p, name), getattr(copy, name)) for name in fields)


@settings(max_examples=100)
@given(problems())
def test_cost_is_never_predicted_slower(p):
    us = {name: predicted_us(p, policy.plan(p)) for name, policy in POLICIES.items()}
    assert us["cost"] <= min(us["depth"], us["agenda"])
    assert us["cost"] <= predicted_us(p, Cost(search_us=0).plan(p))


def run_slots(p, slots):
    """Whether all calls run, when each slot runs what is ready of its class."""
    left = set(np.flatnonzero(p.call_class >= 0).tolist())
    for c in slots:
        left -= {i for i in left if p.call_class[i] == c and left.isdisjoint(producers_of(p, i))}
    return not left


@given(problems())
def test_no_launch_of_cost_can_be_left_out(p):
    classes = {k: c for k, c in zip(Cost().plan(p).tolist(), p.call_class.tolist()) if k >= 0}
    slots = [classes[k] for k in range(len(classes))]
    assert run_slots(p, slots)
    assert not any(run_slots(p, slots[:k] + slots[k + 1:]) for k in range(len(slots)))


@given(problems())
def test_predicted_us(p):
    for policy in POLICIES.values():
        launch = policy.plan(p).tolist()
        classes = {k: c for k, c in zip(launch, p.call_class) if k >= 0}
        expected = sum(p.launch_us[c] for c in classes.values())
        expected += sum(rows * p.row_us[c] for rows, c in zip(p.call_rows, p.call_class) if c >= 0)
        assert predicted_us(p, np.array(launch, np.int64)) == pytest.approx(expected)


@given(problems())
def test_depth(p):
    depth = [0] * len(p.call_class)
    for i in range(len(depth)):
        depth[i] = max((1 + depth[producer] for producer in producers_of(p, i)), default=0)
    assert p.depth.tolist() == depth
    keys = [(d, c) for d, c in zip(depth, p.call_class.tolist())]
    order = sorted({key for key in keys if key[1] >= 0})
    assert Depth().plan(p).tolist() == [order.index(key) if key[1] >= 0 else -1 for key in keys]


@settings(max_examples=100)
@given(problems())
def test_agenda(p):
    """The rule, word for word."""
    left = np.flatnonzero(p.call_class >= 0).tolist()
    launch = [-1] * len(p.call_class)
    for k in range(len(left)):
        ready = [i for i in left if not set(producers_of(p, i)) & set(left)]
        if not ready:
            break

        def priority(c, left=tuple(left)):
            return np.mean([p.depth[i] for i in left if p.call_class[i] == c]), p.launch_us[c] + p.row_us[c], c

        best = min({p.call_class[i] for i in ready}, key=priority)
        for i in ready:
            if p.call_class[i] == best:
                launch[i] = k
                left.remove(i)
    assert Agenda().plan(p).tolist() == launch


def test_unbatched():
    p = problem([(0, []), (-1, [0]), (0, []), (1, [0, 2])])
    assert Unbatched().plan(p).tolist() == [0, -1, 1, 2]


# ---- how many launches --------------------------------------------------------------------------------------------

def test_losses_at_different_depths():
    """The example of DyNet's paper: depth runs losses as the sequences end, the others wait until all have."""
    p = sequences([3, 4, 5])
    assert launches_of(p, Unbatched()) == {0: 12, 1: 3}
    assert launches_of(p, Depth()) == {0: 5, 1: 3}
    assert launches_of(p, Agenda()) == launches_of(p, Cost()) == {0: 5, 1: 1}


@pytest.mark.parametrize("lengths, at_every_step, agenda_losses", [([2, 9, 9], False, 2), ([3, 5, 8], True, 4)])
def test_agenda_does_not_always_wait_but_cost_does(lengths, at_every_step, agenda_losses):
    """The mean depth of the steps that are left grows, and passes that of the losses."""
    p = sequences(lengths, at_every_step)
    assert launches_of(p, Agenda()) == {0: max(lengths), 1: agenda_losses}
    assert launches_of(p, Cost()) == {0: max(lengths), 1: 1}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_at_every_node_of_a_tree_is_one_launch(seed):
    p = trees(seed, loss=2)
    height = int(p.depth[p.call_class == 1].max())
    assert launches_of(p, Cost()) == {0: 1, 1: height, 2: 1}


def test_cheap_work_waits_for_dear_work():
    """a b and b a: three launches are enough, and the cheap class is the one that runs twice, whichever it is."""
    calls = [(0, []), (1, [0]), (1, []), (0, [2])]
    assert launches_of(problem(calls, [10.0, 30.0]), Cost()) == {0: 2, 1: 1}
    assert launches_of(problem(calls, [30.0, 10.0]), Cost()) == {0: 1, 1: 2}


def test_random_dags_need_fewer_launches():
    drawn = [random_dag(seed) for seed in SEEDS]
    depth, agenda, cost = (np.mean([policy.plan(p).max() for p in drawn]) for policy in (Depth(), Agenda(), Cost()))
    assert cost < agenda < depth


@pytest.mark.parametrize("make", [
    random_dag,
    lambda seed: trees(seed, max_children=8, class_of=lambda children: children),       # child-sum: a class per arity
    lambda seed: trees(seed, loss=2),
    lambda seed: sequences([5 + seed, 9, 12], True),
])
def test_cost_is_predicted_faster_than_both(make):
    drawn = [make(seed) for seed in SEEDS]
    assert mean_us(drawn, Cost()) < min(mean_us(drawn, Depth()), mean_us(drawn, Agenda()))


def test_searching_pays():
    drawn = [random_dag(seed) for seed in SEEDS]
    assert mean_us(drawn, Cost()) < mean_us(drawn, Cost(search_us=0))


def cheapest_us(p):
    """Of all plans, by Dijkstra's algorithm over sets of calls that ran. Running all that is ready is never worse."""
    num_calls = len(p.call_class)
    need = [sum(1 << producer for producer in set(producers_of(p, i))) for i in range(num_calls)]
    best, todo = {0: 0.0}, [(0.0, 0)]
    while todo:
        us, ran = heapq.heappop(todo)
        if ran == (1 << num_calls) - 1:
            return us
        after = {}
        for i in range(num_calls):
            if not ran >> i & 1 and need[i] & ran == need[i]:
                after[p.call_class[i]] = after.get(p.call_class[i], ran) | 1 << i
        for c, ran_then in after.items():
            if us + p.launch_us[c] < best.get(ran_then, np.inf):
                best[ran_then] = us + p.launch_us[c]
                heapq.heappush(todo, (best[ran_then], ran_then))
    return 0.0


def test_cost_is_near_the_best_plan():
    ratios = []
    for seed in range(60):
        p = random_dag(seed, num_calls=14, num_classes=3)
        ratios.append((predicted_us(p, Cost().plan(p)) - p.call_rows.sum()) / cheapest_us(p))
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.05


# ---- extremes -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_long_chain(policy):
    length = 100_000
    p = Problem(np.arange(length) % 3, np.ones(length, np.int64), np.maximum(np.arange(length + 1) - 1, 0),
                np.arange(length - 1), np.ones(3), np.ones(3))
    assert (policy.plan(p) == np.arange(length)).all()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_to_run(policy):
    for p in (problem([]), problem([], []), problem([(-1, []), (-1, [])])):
        launch = policy.plan(p)
        check_plan(p, launch)
        assert launch.dtype == np.int64 and (launch == -1).all() and predicted_us(p, launch) == 0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_as_many_classes_as_calls(policy):
    """More than Cost makes a table for."""
    p = problem([(i, [i - 1] if i % 2 else []) for i in range(3000)], np.ones(3000))
    launch = policy.plan(p)
    check_plan(p, launch)
    assert launch.max() == 2999


def test_policies_have_their_names():
    assert list(POLICIES) == [policy.name for policy in POLICIES.values()] == ["none", "depth", "agenda", "cost"]


# ---- the checker itself -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("launch, said", [
    ([0, 0, -1, 1, 1, 2], None),
    ([0, 1, -1, 2, 3, 4], None),
    ([1, 1, -1, 0, 2, 3], "call 3 has launch 0, but it reads call 0, which has launch 1"),
    ([0, 2, -1, 1, 2, 3], "call 4 of class 1 has launch 2, which runs call 1 of class 0"),
    ([0, 0, -1, -1, 1, 2], "call 3 of class 1 has launch -1"),
    ([0, 0, 0, 1, 1, 2], "call 2 of class -1 has launch 0"),
    ([0, 0, -2, 1, 1, 2], "call 2 of class -1 has launch -2"),
    ([0, 0, -1, 1, 1, 3], "call 5 has launch 3, but no call has 2"),
    ([1, 1, -1, 2, 2, 3], "call 0 has launch 1, but no call has 0"),
    ([0, 0, -1, 1, 1, 1], "call 5 has launch 1, but it reads call 4, which has launch 1"),
    ([0, 0, -1, 1, 1], "a launch for each of 6 calls"),
])
def test_checker(launch, said):
    p = problem([(0, []), (0, []), (-1, [1]), (1, [0]), (1, [1]), (1, [4, 4])])
    if said is None:
        check_plan(p, np.array(launch))
    else:
        with pytest.raises(ValueError, match=said):
            check_plan(p, np.array(launch))
