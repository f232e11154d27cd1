"""Calibration: constants that make sense, and a file that survives damage, other machines and other processes."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import make_run
from cavs_core.mxnet_compat import autograd, mx
from gluon_dynbatch import runtime
from gluon_dynbatch.costs import calibrate as module
from gluon_dynbatch.costs.calibrate import calibrate, load_or_calibrate, run_calibrate
from gluon_dynbatch.costs.cost_model import Device
from gluon_dynbatch.costs.devices import DEFAULT, NATIVE, built_in, fingerprint, load, place_of
from gluon_dynbatch.costs.work import started_work_of, work_of

ON_CPU = place_of("mxnet", mx.cpu())
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and a calibration that takes no time."""
    monkeypatch.setenv("DYNBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "calibrate", lambda place: replace(
        built_in(place), launch_us=7.0 if place == NATIVE else 70.0, fingerprint=fingerprint()))
    return tmp_path


# ---- measuring -----------------------------------------------------------------------------------------------------

def test_constants_are_positive_and_a_scope_around_it_is_left_alone(monkeypatch, capsys):
    monkeypatch.setattr(module, "_ROUNDS", 2)
    with autograd.record(), gdb.batching() as scope:
        y = mx.nd.ones((1, 3)) * 2
        device = calibrate()
        assert scope.stats.flushes == 0
    assert y.asnumpy().tolist() == [[2.0, 2.0, 2.0]]
    numbers = {name: value for name, value in device.to_dict().items() if not isinstance(value, str)}
    assert all(math.isfinite(value) and value > 0 for value in numbers.values()), numbers
    assert device.fingerprint == fingerprint()
    assert "measuring this machine" in capsys.readouterr().err


def test_starting_operators_of_mxnet_takes_time_and_nothing_else_does(monkeypatch, capsys):
    monkeypatch.setattr(module, "_ROUNDS", 2)
    device = calibrate(ON_CPU)
    assert min(device.launch_us, device.op_us, device.flush_us) > 0 and device.fingerprint == fingerprint()
    assert device.element_ns == device.transcendental_ns == device.gather_ns_per_byte == 0
    assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert "measuring this machine (MXNet on a CPU)" in capsys.readouterr().err


def test_prices_are_found():
    draw = np.random.default_rng(3)
    counts = draw.integers(1, 1000, (12, 3)).astype(float)
    assert module._prices(counts, counts @ [5.0, 0.02, 1.5]) == pytest.approx([5.0, 0.02, 1.5], rel=1e-3)
    assert min(module._prices(counts, counts @ [5.0, 0.0, 1.5])) > 0


def test_the_model_counts_the_operations_that_run(monkeypatch):
    """The launches of a flush, by the counts of their class, are what the native backend started."""
    found, original = [], runtime.make_run

    def make_run(native, layout, plans, *rest):
        found.extend((work_of(plan), len(part.launches)) for plan, part in zip(plans, layout.classes))
        return original(native, layout, plans, *rest)

    monkeypatch.setattr(runtime, "make_run", make_run)
    flush = module._Flush(2, 3, 4)
    flush.measure()
    forward, backward = ([works[k].ops * launches + works[k].once_ops for works, launches in found] for k in (0, 1))
    assert sum(forward) == flush.counts[0]["op"]
    # An eager kernel for each class, 1 - h^2: the native backend moves such work into its launches.
    assert sum(backward) == flush.counts[1]["op"] + 2


def test_the_model_counts_what_python_starts():
    """Launches that read through an index: what their counts say, less the index, is what the executor started."""
    for table in module._started_tables(mx.cpu()):
        run = make_run(False, table.layout, [table.plan], mx.cpu(), table.arrays, table.fills)
        run.forward()
        forward, _ = started_work_of(table.plan)
        assert run.launched == len(table.part.launches) * forward.starts
        assert table.counts["launch"] == run.launched + 1 == len(table.part.launches) * forward.starts + \
            forward.once_starts


# ---- the file ------------------------------------------------------------------------------------------------------

def test_measured_once(folder, monkeypatch):
    device = load_or_calibrate()
    assert device.launch_us == 7.0 and len(list(folder.glob("device_*.json"))) == 1
    monkeypatch.setattr(module, "calibrate", lambda place: pytest.fail("measured again"))
    assert load_or_calibrate() == device


def test_each_place_has_its_own_constants(folder):
    assert (load_or_calibrate().launch_us, load_or_calibrate(ON_CPU).launch_us) == (7.0, 70.0)
    assert (load().launch_us, load(ON_CPU).launch_us) == (7.0, 70.0)
    assert load(place_of("mxnet", mx.gpu())) is None and len(list(folder.glob("*device_*.json"))) == 2


def test_another_number_of_threads_is_another_machine(folder, monkeypatch):
    load_or_calibrate()
    monkeypatch.setenv("DYNBATCH_THREADS", "5")
    load_or_calibrate()
    assert len(list(folder.glob("device_*.json"))) == 2


@pytest.mark.parametrize("content", [
    b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"name": "x"}',
    json.dumps({**DEFAULT.to_dict(), "gflops": 0}).encode(),
    json.dumps({**DEFAULT.to_dict(), "op_us": float("nan")}).encode(),
    json.dumps({**DEFAULT.to_dict(), "fingerprint": "another machine"}).encode()],
    ids=["empty", "cut", "binary", "list", "null", "constants missing", "no rate", "no number", "another machine"])
def test_a_damaged_or_foreign_file_is_measured_anew(folder, content):
    device = load_or_calibrate()
    path, = folder.glob("device_*.json")
    path.write_bytes(content)
    assert load_or_calibrate() == device
    assert json.loads(path.read_text())["launch_us"] == 7.0


WRITER = """
import sys
from dataclasses import replace
from gluon_dynbatch.costs.devices import DEFAULT, fingerprint, store
print("ready", flush=True)
sys.stdin.readline()
for k in range(300):
    store(replace(DEFAULT, name=sys.argv[1] * (k % 50), fingerprint=fingerprint()))
"""


def test_processes_that_write_at_once_leave_a_whole_file(folder):
    load_or_calibrate()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name], env=environment, text=True, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE) for name in "ab"]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        assert load() is not None
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert set(load().name) <= {"a"} or set(load().name) <= {"b"}
    assert [path.suffix for path in folder.iterdir()] == [".json"]


# ---- the command ---------------------------------------------------------------------------------------------------

def test_the_command_shows_what_is_kept(folder, capsys):
    assert run_calibrate(SimpleNamespace(show=True)) == 0
    assert capsys.readouterr().out.count("not measured yet") >= 2 and not list(folder.iterdir())
    assert run_calibrate(SimpleNamespace(show=False)) == 0
    measured = capsys.readouterr().out
    assert run_calibrate(SimpleNamespace(show=True)) == 0
    shown = capsys.readouterr().out
    assert measured.replace("measured, and kept", "kept") == shown
    assert "  launch_us             7\n" in shown and f"  fingerprint           {fingerprint()}\n" in shown
    assert "MXNet on a CPU: kept in" in shown and "  launch_us             70\n" in shown
