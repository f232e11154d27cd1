"""policy="auto" on made-up steps: what it tries, when it settles, and when it begins anew."""

import random

from gluon_dynbatch.auto import KNOWN, RECENT, TRIALS, Auto
from gluon_dynbatch.methods import Method

DEPTH, COST, AGENDA, GRAPH = (Method("depth", "vertex"), Method("cost", "vertex"), Method("agenda", "vertex"),
                              Method("depth", "graph"))


def run(auto, steps, us, others=(COST, AGENDA, GRAPH), model="m", counts=True, sizes=lambda k: 100):
    """Steps whose calls take us[method] each; the methods that were used."""
    used = []
    for k in range(steps):
        sample = auto.choose(model, DEPTH, lambda us: list(others))
        used.append(sample.method)
        sample.calls, sample.counts = sizes(k), counts
        sample.ms = us[sample.method] * sample.calls / 1e3
    return used


def test_it_starts_with_depth_then_methods_take_turns():
    used = run(Auto(), 12, {DEPTH: 3.0, COST: 2.9, AGENDA: 2.8, GRAPH: 3.1})
    assert used[:KNOWN] == [DEPTH] * KNOWN
    assert used[KNOWN:KNOWN + 8] == [DEPTH, COST, AGENDA, GRAPH] * 2


def test_it_settles_on_the_fastest_within_twenty_steps():
    for best in (DEPTH, COST, AGENDA, GRAPH):
        us = dict.fromkeys((DEPTH, COST, AGENDA, GRAPH), 3.0)
        us[best] = 2.5
        auto = Auto()
        used = run(auto, 20, us)
        assert auto.is_settled("m") and auto.method_of("m") == best
        assert len(used) == 20 and run(auto, 30, us) == [best] * 30


def test_steps_of_different_size_are_compared_by_the_call():
    us = {DEPTH: 3.0, COST: 2.5, AGENDA: 3.0, GRAPH: 3.0}
    auto = Auto()
    run(auto, 25, us, sizes=lambda k: 50 + 37 * k % 400)
    assert auto.method_of("m") == COST


def test_a_small_gain_is_not_worth_leaving_depth():
    auto = Auto()
    run(auto, 25, {DEPTH: 3.0, COST: 2.97, AGENDA: 3.0, GRAPH: 3.0})
    assert auto.method_of("m") == DEPTH


def test_a_method_that_is_much_slower_is_given_up_early():
    used = run(Auto(), 25, {DEPTH: 3.0, COST: 2.9, AGENDA: 3.0, GRAPH: 9.0})
    assert used.count(GRAPH) == 2


def test_where_nothing_is_worth_trying_depth_stays():
    auto = Auto()
    assert run(auto, 20, {DEPTH: 3.0}, others=()) == [DEPTH] * 20 and auto.is_settled("m")


def test_steps_that_compiled_do_not_count():
    auto = Auto()
    assert run(auto, 30, {DEPTH: 3.0}, counts=False) == [DEPTH] * 30 and not auto.is_settled("m")


def test_it_notices_drift_and_tries_again():
    auto = Auto()
    run(auto, 25, {DEPTH: 3.0, COST: 2.0, AGENDA: 3.0, GRAPH: 3.0})
    assert auto.method_of("m") == COST
    changed = {DEPTH: 3.0, COST: 4.0, AGENDA: 2.5, GRAPH: 3.0}
    run(auto, RECENT + KNOWN + 4 * TRIALS + 2, changed)
    assert auto.is_settled("m") and auto.method_of("m") == AGENDA


def test_one_slow_step_is_no_drift():
    auto, us = Auto(), {DEPTH: 3.0, COST: 2.0, AGENDA: 3.0, GRAPH: 3.0}
    run(auto, 25, us)
    for _ in range(5):
        run(auto, 1, {COST: 20.0})
        assert run(auto, 8, us) == [COST] * 8


def test_noise_is_no_drift():
    """Steps that differ by half, as they do where MXNet's threads run beside Python: what was chosen stays."""
    auto, rng, us = Auto(), random.Random(5), {DEPTH: 3.0, COST: 2.0, AGENDA: 3.0, GRAPH: 3.0}
    run(auto, 25, us)
    for _ in range(300):
        assert run(auto, 1, {COST: rng.uniform(1.2, 2.8)}) == [COST]


def test_models_are_told_apart():
    auto = Auto()
    run(auto, 25, {DEPTH: 3.0, COST: 2.0, AGENDA: 3.0, GRAPH: 3.0}, model="a")
    run(auto, 25, {DEPTH: 3.0, COST: 3.5, AGENDA: 2.0, GRAPH: 3.0}, model="b")
    assert (auto.method_of("a"), auto.method_of("b")) == (COST, AGENDA)


def test_noise_seldom_costs_more_than_five_percent():
    """Steps disturbed by up to a third, always upwards: what it settles on is nearly the best."""
    wrong, rng = 0, random.Random(3)
    for _ in range(100):
        us = {m: rng.uniform(2.0, 4.0) for m in (DEPTH, COST, AGENDA, GRAPH)}
        auto = Auto()
        for _ in range(30):
            sample = auto.choose("m", DEPTH, lambda us: [COST, AGENDA, GRAPH])
            sample.calls = 1000
            sample.ms = us[sample.method] * (1 + rng.expovariate(20) + (0.33 if rng.random() < 0.1 else 0))
        wrong += us[auto.method_of("m")] > 1.05 * min(us.values())
    assert wrong <= 12
