"""policy="auto" in a scope: which steps it learns from, and whose costs count."""

from types import SimpleNamespace

import pytest
from gluon_check import repeats_always_pay

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import choose, planning, runtime
from gluon_dynbatch.auto import Auto
from gluon_dynbatch.costs import weigh
from gluon_dynbatch.costs.devices import NATIVE, place_of
from gluon_dynbatch.costs.weigh import cost_model

ON_CPU = place_of("mxnet", mx.cpu())


@pytest.fixture
def auto(monkeypatch):
    """One that knows nothing yet, with no plans known."""
    fresh = Auto()
    monkeypatch.setattr(choose, "AUTO", fresh)
    monkeypatch.setattr(planning, "PLANS", planning.PlanCache())
    return fresh


@pytest.fixture
def cell():
    made = gdb.vertex(gluon.rnn.GRUCell(4, input_size=4))
    made.initialize()
    return made


def train(cell, steps, **options):
    """Chains of several lengths; the scopes."""
    scopes = []
    for _ in range(steps):
        with autograd.record(), gdb.batching(**options) as scope:
            ends = []
            for length in (1, 3, 2):
                h = mx.nd.ones((1, 4))
                for _ in range(length):
                    h, _ = cell(h, [h])
                ends.append(h)
        autograd.backward(ends)
        mx.nd.waitall()
        scopes.append(scope)
    return scopes


def test_graph_grain_is_judged_by_what_would_run_there(auto, cell, monkeypatch):
    """It runs repeats. Without them samples read each other, look like one structure, and like a good plan."""
    repeats_always_pay(monkeypatch)
    found, judge = [], choose._worth_trying
    monkeypatch.setattr(choose, "_worth_trying", lambda *args: found.append(judge(*args)) or found[-1])
    embed, other = gdb.vertex(gluon.nn.Embedding(5, 4)), gdb.vertex(gluon.rnn.GRUCell(4, input_size=4))
    for block in (embed, other):
        block.initialize()
    start = mx.nd.ones((1, 4))
    for _ in range(12):
        with gdb.batching(policy="auto", backend="mxnet", analysis_budget=1.0) as scope:
            ends = []
            for words in ([0, 1, 1, 1, 2, 2, 2], [0, 2, 1, 1, 1], [0, 1, 1, 1, 2], [0, 2, 2, 2, 1, 1, 1], [0]):
                h = start
                for word in words:
                    h, _ = (cell if word % 2 else other)(embed(word), [h])
                ends.append(h)
        mx.nd.waitall()
        assert scope.stats.repeats or "graph" in str(scope.stats.methods)
    (methods,) = found
    assert methods and {method.granularity for method in methods} == {"vertex"}


def settles(auto, cell, **options):
    """Whether it chooses a method at some step; later on the clock may make it begin anew."""
    for _ in range(60):
        train(cell, 1, policy="auto", **options)
        if auto.is_settled(auto.models[0]):
            return True
    return False


def test_it_settles_where_mxnet_runs_the_launches(auto, cell):
    """So a GPU has it, too."""
    assert settles(auto, cell, backend="mxnet")
    (model,) = auto.models
    assert ON_CPU in model


def test_each_backend_is_learned_by_itself(auto, cell):
    for backend in ("mxnet", "native"):
        train(cell, 5, policy="auto", backend=backend)
    assert {place for model in auto.models for place in (NATIVE, ON_CPU) if place in model} == {NATIVE, ON_CPU}
    assert len(auto.models) == 2


@pytest.mark.parametrize("reason, learned", [("", False), ("native backend: no such operator", True)])
def test_steps_on_the_way_to_the_native_backend_do_not_count(reason, learned, auto, cell, monkeypatch):
    """MXNet runs them until kernels are compiled; unless there is something that cannot be."""
    monkeypatch.delenv("DYNBATCH_BACKEND", raising=False)
    monkeypatch.setattr(runtime, "runs_natively", lambda *arguments: (False, reason))
    assert settles(auto, cell) == learned


def test_what_mxnet_takes_is_predicted(cell):
    train(cell, 8, backend="mxnet")
    (scope,) = train(cell, 1, backend="mxnet")
    assert scope.stats.predicted_execute_ms > 0 and scope.stats.predicted_backward_ms > 0
    assert {"forward", "backward"} <= set(cost_model(ON_CPU).errors)


def test_a_plan_by_the_costs_of_one_backend_is_not_used_for_another(auto, cell, monkeypatch):
    monkeypatch.setattr(choose, "use_measured_costs", lambda place: None)
    hits = [train(cell, 1, policy="cost", backend=backend)[0].stats.cache_hits
            for backend in ("mxnet", "native", "mxnet", "native")]
    assert hits == [0, 0, 1, 1]


def test_what_a_class_costs_is_worked_out_once_for_each_work_and_model(monkeypatch):
    """The work of a plan is that of its last flush, whose rows have another number of children every time."""
    works, asked, plan = [(1.0,), (2.0,)], [], SimpleNamespace(compiled={})
    cls = SimpleNamespace(signature=SimpleNamespace(last_plan=plan))
    for model in (SimpleNamespace(launch_cost=lambda us, k=k: asked.append(us) or (k, k * us)) for k in (1, 10)):
        monkeypatch.setattr(weigh, "cost_model", lambda place, model=model: model)
        for work in works * 3:
            monkeypatch.setattr(weigh, "_work_of", lambda plan, place, work=work: work)
            launch_us, row_us = weigh.class_costs([cls], NATIVE)
            assert row_us.tolist() == [weigh.row_cost(cls, NATIVE)] == [launch_us[0] * work[0]]
    assert asked == [1.0, 2.0] * 2
