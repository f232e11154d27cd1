"""The comparison of policies: figures from hand-made steps, bars, what is printed and stored, and wrong losses."""

import json
from dataclasses import replace

import pytest
from bench_check import TINY

from benchmarks import bench_policies as bench
from benchmarks import workloads
from benchmarks.bench_policies import AUTO, Case, Memory, Runner, Step, bars_of, compare, error, median, mismatches
from gluon_dynbatch import choose, planning
from gluon_dynbatch.report import Stats

DEPTH, COST, NONE = "depth at vertex grain", "cost at vertex grain", "none at vertex grain"


@pytest.fixture
def small(monkeypatch):
    """Short warm-ups, in this process."""
    numbers = {"WARM_UP": 2, "MOST_WARM_UP": 6, "CALM": 2, "MOST": 1e9}
    for name, value in {**numbers, "measure": bench.run_case}.items():
        monkeypatch.setattr(bench, name, value)


def case(name="treelstm-sick", variant="vertex", steps=2, backend="native"):
    return Case(name, variant, workloads.options_of(name, **TINY[name]), steps, backend=backend)


def step(ms, *, compiled=False, method=DEPTH, **stats):
    facts = {"launches": 4, "flushes": 1, "analyze_ms": 2.0, "methods": {method: 1}, **stats}
    return Step(1.0, ms, 12, Stats(**facts), compiled)


def entry(name, *, to_best=1.0, to_depth=1.0, share=0.01, error=0.1):
    auto = {"to_best": to_best, "to_depth": to_depth, "analyze_share": share, "forward_error": error,
            "backward_error": None}
    return {"workload": name, "model": name.replace("-op", ""),
            "regimes": {regime: {"settings": {AUTO: auto}} for regime in bench.REGIMES}}


# ---- figures ---------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_mini_batches():
    found = compare({DEPTH: [step(10), step(100), step(40)], COST: [step(5), step(90), step(20)],
                     AUTO: [step(6, method=COST), step(45, method=COST), step(30, method=COST)]}, DEPTH, batch=8)
    assert found["best"] == COST
    cost, auto = found["settings"][COST], found["settings"][AUTO]
    assert cost["to_depth"] == 0.5 and cost["to_best"] == 1.0
    assert auto["to_depth"] == 0.6 and auto["to_best"] == pytest.approx(1.2)        # of 1.2, 0.5 and 1.5
    assert (auto["ms"], auto["ms_quartiles"], auto["steps"]) == (30, [18, 37.5], 3)
    assert auto["methods"] == {COST: 3}
    assert (cost["launches"], cost["rows"], cost["analyze_ms"], cost["analyze_share"]) == (4, 3.0, 2.0, 0.1)


def test_auto_is_not_a_fixed_setting():
    found = compare({DEPTH: [step(10)], COST: [step(20)], AUTO: [step(1)]}, DEPTH, 8)
    assert found["best"] == DEPTH and found["settings"][AUTO]["to_best"] == 0.1


def test_a_turn_in_which_somebody_compiled_counts_for_nobody():
    found = compare({DEPTH: [step(10), step(10)], COST: [step(900, compiled=True), step(5)]}, DEPTH, 8)
    assert [f["steps"] for f in found["settings"].values()] == [1, 1]
    assert found["settings"][COST]["ms"] == 5
    assert compare({DEPTH: [step(10, compiled=True)]}, DEPTH, 8) == {"best": None, "settings": {}}


def test_errors_of_predictions():
    steps = [step(9, predicted_execute_ms=p, execute_ms=2.0, backward_ms=2.0) for p in (1.0, 2.0, 8.0)]
    found = compare({DEPTH: steps}, DEPTH, 8)["settings"][DEPTH]
    assert found["forward_error"] == 0.5 and found["backward_error"] is None
    assert error(3.0, 2.0) == 0.5 and error(0.0, 2.0) is None
    assert median([None, 1.0, 3.0]) == 2.0 and median([None]) is None


def test_other_losses_are_found():
    assert mismatches({DEPTH: [1.0, 2.0], COST: [1.00001, 2.0]}, DEPTH) == {}
    found = mismatches({DEPTH: [1.0, 2.0], COST: [1.0, 2.001], AUTO: [float("nan"), 2.0]}, DEPTH)
    assert found[COST] == {"absent": f"loss 1 is 2.001, that of {DEPTH} is 2", "mismatch": True}
    assert set(found) == {COST, AUTO}


# ---- bars ------------------------------------------------------------------------------------


def test_bars_that_are_reached():
    told = bars_of([entry("treefc", to_depth=0.8), entry("varlstm", to_best=1.05, to_depth=0.9, share=0.049, error=0.5),
                    entry("graphconv", to_depth=1.1)])
    assert told == [
        *(text for title in ("new mini-batches", "warm plan cache") for text in (
            f"{title}: auto within 5% of the best fixed setting on every workload: reached, "
            "treefc 1.000, graphconv 1.000, varlstm 1.050",
            f"{title}: auto at least 10% better than depth on two workloads: reached, "
            "treefc 0.800, varlstm 0.900, graphconv 1.100")),
        "analysis with auto under 5% of a steady step with the cache warm: reached, "
        "treefc 1.0%, graphconv 1.0%, varlstm 4.9%",
        "median prediction error under 30%: reached, treefc 10%, graphconv 10%, all workloads 10%, varlstm 50%"]


def test_bars_that_are_not_reached_or_not_measured():
    told = bars_of([entry("treelstm-sick", to_best=1.051, to_depth=0.5, share=0.05, error=0.3),
                    entry("treelstm-sick-op", to_depth=0.5, error=None)])      # one workload, twice
    assert [": NOT REACHED, " in text for text in told] == [True] * 6
    assert all(text.endswith(": not measured") for text in bars_of([]))


# ---- settings --------------------------------------------------------------------------------


def test_every_policy_and_grain_is_a_setting():
    assert list(case().settings) == [f"{policy} at {grain} grain" for grain in ("vertex", "graph")
                                     for policy in ("depth", "agenda", "cost")] + [NONE, AUTO]
    assert case().settings[AUTO] == {"policy": "auto", "granularity": "auto"}
    plain = case(variant="op")
    assert case(variant="op", backend="mxnet").name == "treelstm-sick-op-mxnet"
    assert plain.name == "treelstm-sick-op" and plain.settings[AUTO] == {"policy": "auto", "granularity": "op"}
    assert list(plain.settings) == [f"{policy} at op grain" for policy in ("depth", "agenda", "cost", "none")] + [AUTO]


def test_new_mini_batches_come_once_and_warm_ones_again_and_again():
    before, timed = case(steps=30).batches("new")
    assert len({0, 1, *before, *timed}) == 2 + len(before) + len(timed) and len(timed) == 30
    before, timed = case(steps=30).batches("warm")
    assert set(before) == set(timed) == set(range(bench.REPEATED))


def test_a_setting_finds_no_plan_of_another():
    runner, one, other = Runner(case(steps=1)), Memory(), Memory()
    plans, auto = planning.PLANS, choose.AUTO
    runner.step(DEPTH, Memory(), 0)             # the first one traces, and numbers its values in another order
    hits = [runner.step(DEPTH, memory, 0).stats.cache_hits for memory in (one, one, other)]
    assert hits == [0, 1, 0]
    assert planning.PLANS is plans and choose.AUTO is auto


# ---- a run -----------------------------------------------------------------------------------


def test_the_tables_and_the_file_hold_every_setting(small, tmp_path, capsys):
    path = tmp_path / "out" / "policies.json"
    cases = [case(), case(variant="op")]
    assert bench.run_cases(cases, path) == 0
    told, stored = capsys.readouterr().out, json.loads(path.read_text())
    assert stored["machine"]["cores"] > 0 and path.with_suffix(".png").stat().st_size > 10_000
    for one, job in zip(cases, stored["jobs"]):
        assert job["workload"] == one.name and job["data"] == "generated" and job["absent"] == {}
        assert set(job["regimes"]) == {"new", "warm"}
        for part in job["regimes"].values():
            assert list(part["settings"]) == list(one.settings) and part["best"] in one.settings
        for name, facts in job["regimes"]["warm"]["settings"].items():
            assert facts["steps"] == 2 and facts["launches"] > 0
            assert facts["known"] == 1.0 or name == AUTO            # which still tries methods
            assert told.count(f"| {name} | {facts['launches']:.0f} |") >= 1
    depth, alone = (stored["jobs"][0]["regimes"]["new"]["settings"][name] for name in (DEPTH, NONE))
    assert depth["launches"] < alone["launches"] and alone["rows"] == 1.0 and depth["known"] == 0.0
    assert "- auto HAD NOT SETTLED and ran " in told
    assert all(f"- {bar}" in told for bar in stored["bars"]) and len(stored["bars"]) == 6
    assert "cores, commit" in told and "load before the run" in told


def test_a_setting_is_left_out_where_it_takes_too_long(small, monkeypatch):
    monkeypatch.setattr(bench, "MOST", 1.0)
    ran, times = Runner.step, {DEPTH: 10.0, NONE: 11.0}
    monkeypatch.setattr(Runner, "step", lambda self, name, memory, k: replace(
        ran(self, name, memory, k), ms=times.get(name, 9.0)))
    found = bench.run_case(case("treefc", steps=1))
    assert list(found["absent"]) == [NONE] and "mismatch" not in found["absent"][NONE]
    assert NONE not in found["regimes"]["new"]["settings"]
    assert f"- {NONE} is absent: it was not timed, because a step takes" in bench.table(found)


@pytest.mark.parametrize("first_wrong", [0, 8])
def test_a_wrong_loss_is_an_error(first_wrong, small, tmp_path, monkeypatch, capsys):
    """In the check, or only later."""
    taken = []

    class Wrong(bench.Watched):
        def step(self, k):
            loss = super().step(k)
            taken.append(self.scope["policy"])
            return loss * 1.001 if taken.count("agenda") > first_wrong and taken[-1] == "agenda" else loss

    monkeypatch.setattr(bench, "Watched", Wrong)
    assert bench.run_cases([case("treefc", steps=1)], tmp_path / "policies.json") == 1
    told = capsys.readouterr()
    assert "ERROR: treefc: agenda at vertex grain: loss 0 is " in told.err
    assert "- agenda at vertex grain is absent: loss 0 is " in told.out
    assert "| cost at vertex grain |" in told.out and "| agenda at vertex grain |" not in told.out


def test_the_command_line_runs_every_workload_once(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(bench, "run_cases", lambda cases, path: ran.append((cases, path)) or 0)
    assert bench.main(["--quick"]) == 0
    given = tmp_path / "a.json"
    assert bench.main(["--workload", "treefc", "--backend", "mxnet", "--steps", "3", "--json", str(given)]) == 0
    (every, path), (chosen, used) = ran
    names = [*workloads.ALL[:2], "treelstm-sick-op", *workloads.ALL[2:]]
    assert [one.name for one in every] == [*names, *(f"{name}-mxnet" for name in names)]
    assert path.name == "policies-quick.json" and {one.steps for one in every} == {bench.QUICK_STEPS}
    assert [(one.name, one.steps) for one in chosen] == [("treefc-mxnet", 3)] and used == given
    with pytest.raises(SystemExit):
        bench.main(["--steps", "0"])


def test_a_workload_runs_in_its_own_process(monkeypatch, capsys):
    """What the child prints is what the parent reads."""
    monkeypatch.setattr(bench, "run_case", lambda one: {"workload": one.name})
    asked = []

    class Done:
        stdout = "something else\n" + json.dumps({"workload": "treefc"}) + "\n"

    monkeypatch.setattr(bench.subprocess, "run", lambda command, **options: asked.append((command, options)) or Done)
    for backend in bench.BACKENDS:
        assert bench.measure(case("treefc", backend=backend)) == {"workload": "treefc"}
    assert [options["env"]["DYNBATCH_BACKEND"] for _, options in asked] == list(bench.BACKENDS)
    command, _ = asked[0]
    assert bench.main(command[2:]) == 0
    assert json.loads(capsys.readouterr().out) == {"workload": "treefc"}
