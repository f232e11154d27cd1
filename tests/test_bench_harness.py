"""The harness: requests and answers, systems that fail, turns, figures, tables and files."""

import contextlib
import io
import json
import sys
import time
from pathlib import Path

import pytest
from bench_check import TINY

from benchmarks import harness, report, run, workloads
from benchmarks.harness import Job, Plan, Result, WorkerError, WorkerProcess
from benchmarks.worker import serve

FAST = Plan(rounds=2, seconds=0.1, turn_steps=2, least_turns=1)


def job(*systems, name="treelstm-sst", **changes):
    return Job(name, workloads.options_of(name, **{**TINY[name], **changes}), list(systems))


# ---- the protocol ----------------------------------------------------------------------------


def answers_to(worker, *requests):
    written = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), written, worker)
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_failed_request_is_an_answer(capsys):
    class Half:
        def loss(self, batch):
            return {"loss": 1 / batch}

    failed, fine = answers_to(Half(), {"do": "loss", "batch": 0}, {"do": "loss", "batch": 2})
    assert failed == {"error": "ZeroDivisionError: division by zero"} and fine == {"loss": 0.5}
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("code, reason", [
    ("import sys; sys.exit('no such package')", "ended with code 1: no such package"),
    ("pass", "ended with code 0: it printed nothing"),
    ("input(); print('hello')", "'hello', which is not JSON"),
    ("input(); print('{\"error\": \"MemoryError: full\"}')", "MemoryError: full"),
])
def test_a_worker_that_fails_says_why(code, reason):
    worker = WorkerProcess("fake", 1, [sys.executable, "-c", code])
    try:
        with pytest.raises(WorkerError, match=reason):
            worker.ask("load")
            worker.ask("load")
    finally:
        worker.close()


def test_systems_without_their_environment_are_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNBATCH_BENCH_PEERS", str(tmp_path / "nothing"))
    results = harness.run(job("torch-loop"), FAST)
    assert results["torch-loop"].absent == "no environment nothing: `make peers` makes it"
    assert "absent" in report.table(report.entry_of(job("torch-loop"), results))


# ---- a real run ------------------------------------------------------------------------------


def test_a_run_checks_times_and_reports(tmp_path, capsys):
    """The plain loop, ours and the limit on tiny trees, each in its own process."""
    path = tmp_path / "out" / "figures.json"
    code = run.run_jobs([job("mxnet-loop", "ours-vertex", "limit")], FAST, path, plots=tmp_path)
    assert code == 0
    written = json.loads(path.read_text())
    assert {"cpu", "cores", "commit", "date", "python"} <= set(written["machine"])
    (entry,) = written["jobs"]
    assert entry["data"] == "generated" and entry["bars"] == []         # bars belong to the full size
    assert entry["systems"]["mxnet-loop"]["times_ours"] > 0
    assert entry["systems"]["ours-vertex"]["versions"]["mxnet"]
    assert entry["systems"]["limit"]["steps"] == 4
    assert "| ours, vertex grain (`ours-vertex`) |" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.png"))) == 1


SPINNING = """
import sys, threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
for line in sys.stdin: print("{}", flush=True)
"""


def test_a_system_runs_only_in_its_turns():
    """One whose threads spin on would take a core from the others."""
    worker = WorkerProcess("a system", 1, [sys.executable, "-c", SPINNING])
    try:
        with worker.awake():
            assert worker.ask("anything") == {}
        state = Path(f"/proc/{worker._process.pid}/stat")
        if not state.exists():
            pytest.skip("this system shows no states of processes")
        for _ in range(100):                            # a signal takes its time
            if state.read_text().rpartition(")")[2].split()[0] == "T":
                break
            time.sleep(0.05)
        else:
            pytest.fail("it was not stopped")
        with worker.awake():
            assert worker.ask("anything") == {}         # and goes on
    finally:
        worker.close()


def test_a_system_that_computes_something_else_is_an_error(monkeypatch, tmp_path, capsys):
    class Fake:
        def __init__(self, name, threads):
            self.loss = 2.0 if name == "ours-vertex" else 1.0

        def send(self, do, **arguments):
            pass

        def receive(self):
            return {"versions": {}, "real": False}

        def ask(self, do, **arguments):
            return {"loss": self.loss, "moved": {}, "ms": [1.0] * len(arguments.get("batches", ()))}

        def close(self):
            pass

        stop, awake = close, lambda self: contextlib.nullcontext()

    monkeypatch.setattr(harness, "WorkerProcess", Fake)
    monkeypatch.setattr(harness, "PAUSE", 0)
    assert run.run_jobs([job("mxnet-loop", "ours-vertex")], FAST, tmp_path / "figures.json") == 1
    assert "ERROR: treelstm-sst: ours-vertex: loss 0 of the check is 2" in capsys.readouterr().err


# ---- figures and bars ------------------------------------------------------------------------


def test_ratios_are_of_the_same_mini_batches():
    slow, fast = Result({2: 10.0, 4: 1000.0}), Result({2: 5.0, 3: 1.0})
    assert report.ratio(slow, fast) == 2.0
    assert report.ratio(slow, Result({9: 1.0})) is None


def test_bars_are_read_off_the_results():
    full = Job("treelstm-sst", workloads.options_of("treelstm-sst"), [])
    results = {"dynet-autobatch": Result({2: 90.0}), "ours-vertex": Result({2: 30.0}), "limit": Result({2: 15.0}),
               "torch-batched": Result(absent="no")}
    told = [str(bar) for bar in report.bars_of(full, results)]
    assert told == ["ours-vertex is at least 2.7 times as fast as dynet-autobatch: 3.00 (reached)",
                    "ours-vertex is at least 2.2 times as fast as torch-batched (not measured)",
                    "ours-vertex needs at most 1.6 times the limit: 2.00 (NOT REACHED)"]
    assert report.bars_of(job("limit"), results) == []


def test_the_whole_run_has_all_variants_and_the_quick_one_every_workload():
    whole = run.all_jobs(workloads.NAMES, None, quick=False, data=None)
    quick = run.all_jobs(workloads.NAMES, None, quick=True, data=None)
    assert [j.workload for j in quick] == list(workloads.NAMES) and all(j.training for j in quick)
    sst = [j for j in whole if j.workload == "treelstm-sst"]
    assert {j.options["batch"] for j in sst} == {1, 16, 64, 256}
    assert {j.options["hidden"] for j in sst} == {50, 150, 512}
    assert [j.workload for j in whole if not j.training] == ["treelstm-sst", "treelstm-sick"]
