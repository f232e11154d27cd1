"""Plans of flushes: the cache by structure, the grain "graph", and the policies at work in a scope."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gluon_dynbatch as gdb
from cavs_core.backends.native_cpu.run import NativeRun
from cavs_core.executor import Run
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import plan_cache
from gluon_dynbatch.choose import AUTO
from gluon_dynbatch.graphs import plan_graphs, samples_of
from gluon_dynbatch.methods import Method
from gluon_dynbatch.plan_cache import PATIENCE
from gluon_dynbatch.planning import PLANS, PlanCache
from gluon_dynbatch.policies import POLICIES, Problem, check_plan

nn = gluon.nn
POLICY_NAMES = ("none", "depth", "agenda", "cost", "auto")


# ---- problems --------------------------------------------------------------------------------


def problem(calls, num_classes=3):
    """calls: (class, calls that it reads)."""
    indptr = np.cumsum([0] + [len(read) for _, read in calls])
    return Problem(np.array([c for c, _ in calls], np.int64), np.ones(len(calls), np.int64), indptr.astype(np.int64),
                   np.array([p for _, read in calls for p in read], np.int64), np.full(num_classes, 5.0),
                   np.ones(num_classes))


def tree(start):
    """Two leaves (class 0) and a node (class 1)."""
    return [(0, []), (0, []), (1, [start, start + 1])]


def chain(start, length):
    return [(0, [])] + [(2, [start + k]) for k in range(length)]


def batch(*makers):
    calls = []
    for make in makers:
        calls += make(len(calls))
    return calls


def test_samples_are_found():
    calls = batch(tree, lambda s: chain(s, 3), tree)
    # the two leaves of a tree are joined by their node; every sample begins where nothing behind reads before
    assert samples_of(problem(calls)).tolist() == [0, 3, 7, 10]


def test_a_call_that_reads_all_samples_makes_one_of_them():
    calls = batch(tree, tree) + [(2, [2, 5])]
    assert samples_of(problem(calls)).tolist() == [0, 7]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equal_structures_share_their_launches_and_others_do_not(policy):
    calls = batch(tree, lambda s: chain(s, 2), tree, lambda s: chain(s, 3), tree)
    p = problem(calls)
    launch = plan_graphs(p, POLICIES[policy])
    check_plan(p, launch)
    assert launch[0:3].tolist() == launch[6:9].tolist() == launch[13:16].tolist()
    assert set(launch[3:6].tolist()).isdisjoint(launch[9:13].tolist())
    each = 3 if policy == "none" else 2
    assert launch.max() + 1 == each + 3 + 4


def test_no_calls():
    assert len(plan_graphs(problem([]), POLICIES["depth"])) == 0


@st.composite
def batches(draw):
    shapes = [draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 3)), min_size=1, max_size=6))
              for _ in range(draw(st.integers(1, 3)))]
    calls = []
    for _ in range(draw(st.integers(0, 8))):
        start, made = len(calls), []
        for k, (c, reads) in enumerate(shapes[draw(st.integers(0, len(shapes) - 1))]):
            runs = [start + j for j in range(k) if made[j] >= 0]
            calls.append((c, runs[-reads:] if c >= 0 and reads else []))
            made.append(c)
    return calls


@given(batches(), st.sampled_from(sorted(POLICIES)))
def test_graph_plans_are_plans(calls, policy):
    p = problem(calls)
    check_plan(p, plan_graphs(p, POLICIES[policy]))


# ---- the cache -------------------------------------------------------------------------------


def test_the_cache_compares_exactly():
    cache = PlanCache()
    a, b = np.arange(4), np.arange(4) * 2
    cache.put("key", [a], "plan of a")
    arrays, plan = cache.get("key", [a.copy()])
    assert arrays[0] is a and plan == "plan of a"
    assert cache.get("key", [b]) is None and cache.get("other", [a]) is None      # an equal checksum is not enough


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    cache = PlanCache(max_bytes=4 * 8 * 30)
    arrays = [[np.full(10, k)] for k in range(5)]
    for k in range(3):
        cache.put(k, arrays[k], k)
    assert cache.get(0, arrays[0])[1] == 0
    cache.put(3, arrays[3], 3)
    assert cache.get(1, arrays[1]) is None and cache.get(0, arrays[0])[1] == 0 and len(cache) == 3
    cache.put(4, [np.zeros(1000)], 4)           # larger than all of it
    assert len(cache) == 3 and cache.num_bytes <= cache.max_bytes


def test_what_never_comes_again_is_not_kept():
    cache, arrays = PlanCache(), [np.arange(3)]
    for k in range(3 * PATIENCE):
        assert cache.get(k, arrays) is None
        cache.put(k, arrays, k)
    assert len(cache) == PATIENCE
    cache.put("again", arrays, 1)
    assert cache.get("again", arrays) is None
    cache.put("again", arrays, 2)               # the second time it is
    assert cache.get("again", arrays)[1] == 2
    for k in range(PATIENCE):                   # somebody asked: all is kept for a while
        cache.put(-1 - k, arrays, k)
    assert len(cache) == 2 * PATIENCE + 1
    cache.put(0, arrays, "another")             # what is there may be replaced
    assert cache.get(0, arrays)[1] == "another"
    cache.clear()
    cache.put("new", arrays, 1)
    assert cache.get("new", arrays)[1] == 1


def test_keys_without_a_plan_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST", 4)
    cache = PlanCache()
    for k in range(PATIENCE + 5):
        cache.put(k, [], k)
    for k in (PATIENCE, PATIENCE + 4):          # met five and one puts ago
        cache.put(k, [], k)
    assert cache.get(PATIENCE, []) is None and cache.get(PATIENCE + 4, [])[1] == PATIENCE + 4


# ---- in a scope ------------------------------------------------------------------------------


class Net(gluon.Block):
    """A chain of cells and an output at its end."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = gdb.vertex(nn.Dense(4, in_units=4, activation="tanh", prefix="cell_"))
            self.out = gdb.vertex(nn.Dense(2, in_units=4, prefix="out_"))

    def forward(self, x, length):
        for _ in range(length):
            x = self.cell(x)
        return self.out(x).sum()


def make_net():
    mx.random.seed(5)
    net = Net(prefix="net_")
    net.initialize(mx.init.Normal(0.5))
    return net


def step(net, lengths, seed=0, **options):
    rng = np.random.RandomState(seed)
    xs = [mx.nd.array(rng.normal(size=(1, 4))) for _ in lengths]
    with autograd.record(), gdb.batching(**options) as scope:
        losses = [net(x, n) for x, n in zip(xs, lengths)]
    autograd.backward(losses)
    return [loss.asscalar() for loss in losses], {
        n: p.grad().asnumpy() for n, p in net.collect_params().items() if p.grad_req != "null"}, scope


LENGTHS = [3, 1, 4, 1, 3, 2, 4]


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("granularity", ["auto", "op", "vertex", "graph"])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_setting_gives_the_same(policy, granularity, backend):
    net = make_net()
    rng = np.random.RandomState(0)
    xs = [mx.nd.array(rng.normal(size=(1, 4))) for _ in LENGTHS]
    with autograd.record():
        want = [net(x, n) for x, n in zip(xs, LENGTHS)]
    autograd.backward(want)
    want_grads = {n: p.grad().asnumpy() for n, p in net.collect_params().items()}
    got, grads, _ = step(net, LENGTHS, policy=policy, granularity=granularity, backend=backend)
    np.testing.assert_allclose(got, [w.asscalar() for w in want], rtol=1e-4)
    for name, grad in want_grads.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-3, atol=1e-5, err_msg=name)


def test_launches_by_policy_and_grain():
    net = make_net()

    def launches(**options):
        return step(net, LENGTHS, **options)[2].stats.launches

    # vertices and `sum`, which is an operator: depth meets `out` and `sum` at each of four depths
    assert launches(policy="depth") == 4 + 4 + 4
    assert launches(policy="cost") == 4 + 1 + 1
    assert launches(policy="agenda") == 8               # it meets the short chains' ends first
    assert launches(policy="none") == sum(LENGTHS) + 2 * len(LENGTHS)
    assert launches(policy="none", granularity="graph") == launches(policy="none")
    assert launches(policy="depth", granularity="graph") == sum(n + 2 for n in {3, 1, 4, 2})


def test_a_known_structure_is_not_planned_again():
    PLANS.clear()
    net = make_net()
    _, _, first = step(net, LENGTHS, policy="depth")
    want, want_grads, second = step(net, LENGTHS, seed=1, policy="depth")
    assert (first.stats.cache_hits, first.stats.cache_misses) == (0, 1)
    assert (second.stats.cache_hits, second.stats.cache_misses) == (1, 0)
    PLANS.clear()
    got, grads, third = step(net, LENGTHS, seed=1, policy="depth")         # planned anew: the same values
    assert third.stats.cache_misses == 1 and got == want
    for name, grad in want_grads.items():
        np.testing.assert_array_equal(grads[name], grad)


def test_what_makes_another_structure():
    PLANS.clear()
    net = make_net()
    step(net, [2, 3], policy="depth")

    def misses(lengths=(2, 3), **options):
        return step(net, list(lengths), **{"policy": "depth", **options})[2].stats.cache_misses

    assert misses() == 0
    assert misses([3, 2]) == 1 and misses([2, 3, 3]) == 1 and misses(policy="cost") == 1
    net.out.collect_params().setattr("grad_req", "null")
    assert misses() == 1


def test_gradients_follow_grad_req_also_with_a_known_plan():
    net = make_net()
    step(net, [2, 3])
    for p in net.collect_params().values():
        p.grad_req = "add"
        p.zero_grad()
    once = step(net, [2, 3])[1]
    twice = step(net, [2, 3])[1]
    for name, grad in once.items():
        np.testing.assert_allclose(twice[name], 2 * grad, rtol=1e-5)


def test_stats_name_the_method_and_show_predictions():
    net = make_net()
    step(net, LENGTHS, policy="cost", backend="native")
    _, _, scope = step(net, LENGTHS, policy="cost", backend="native")
    assert scope.stats.methods == {"cost at vertex grain": 1}
    assert "cost at vertex grain" in scope.explain()
    assert scope.stats.predicted_execute_ms > 0 and scope.stats.predicted_backward_ms > 0
    assert "predicted" in str(scope.stats)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_memory_estimate_grows_with_the_calls_and_does_not_hold_the_run(backend):
    net = make_net()
    few, many = (step(net, [5] * n, policy="depth", backend=backend)[2].stats for n in (50, 100))
    assert 1.8 < many.peak_bytes / few.peak_bytes < 2.2
    held = gc.get_referents(*[cell.cell_contents for cell in many.estimates[0].__closure__])
    assert not any(isinstance(x, (Run, NativeRun)) for x in held)


@pytest.mark.parametrize("wrong", [dict(policy="fast"), dict(granularity="kernel"), dict(analysis_budget=0),
                                   dict(analysis_budget=1.5)])
def test_wrong_options_are_refused_by_name(wrong):
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"), gdb.batching(**wrong):
        pass


def test_auto_learns_a_model_over_its_steps():
    AUTO.forget()
    net = make_net()
    settled = []
    for k in range(60):
        scope = step(net, [1 + (j * 7 + k) % 9 for j in range(20)], seed=k, backend="native")[2]
        (model,) = AUTO.models
        assert scope.stats.methods == {str(AUTO.method_of(model)): 1}
        settled.append(AUTO.is_settled(model))
    assert not settled[0] and any(settled)


def test_auto_learns_at_op_grain_too():
    """There some calls only name rows, and nothing is compiled for them."""
    AUTO.forget()
    net = make_net()
    for k in range(4):
        x = mx.nd.array(np.random.RandomState(k).normal(size=(1, 4)))
        with autograd.record(), gdb.batching(granularity="op", backend="native") as scope:
            losses = [net((x * 2)[0:1], 1 + j % 3) for j in range(6)]
        autograd.backward(losses)
    assert scope.flushes[0].aliases
    (model,) = AUTO.models
    assert len(AUTO._models[model].us_a_call[Method("depth", "op")]) >= 2


def test_what_is_known_of_a_block_does_not_grow_with_the_steps():
    """In training every mini-batch is a new structure: its plan goes some day, and its key with it."""
    class Block:
        pass

    cache, block = PlanCache(max_bytes=4 * 8 * 30), Block()
    for k in range(PATIENCE):
        cache.put(k, [np.full(10, k)], k, [block])
    assert len(cache) == 3 and cache._of_block[id(block)] == {PATIENCE - 3, PATIENCE - 2, PATIENCE - 1}
    del block
    gc.collect()
    assert len(cache) == 0 and not cache._of_block


def test_plans_go_with_their_blocks():
    PLANS.clear()
    net = make_net()
    step(net, LENGTHS, policy="depth")
    assert len(PLANS) == 1
    del net
    gc.collect()
    assert len(PLANS) == 0 and PLANS.num_bytes == 0
