"""A slice of the fuzzer's cases, the same every time; and the fuzzer itself finds planted bugs, made small."""

import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

from cavs_core.ops import TABLE

from .families import FAMILIES, NOT_YET
from .operators import OWN
from .oracle import Case, compare, differences_of, doubtful, manner_of, write_program
from .shapes import DRAWN
from .shrink import pasted, shrink
from .values import Draw

HELD = [family for family in FAMILIES if family not in NOT_YET]


@pytest.fixture(autouse=True)
def _quiet():
    """Programs may leave parameters unused, and take means of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- the slice -------------------------------------------------------------------------------


def fuzz(*words):
    """Run the command: a case that makes MXNet itself end the process is then no more than a line."""
    run = subprocess.run(
        [sys.executable, "-m", "fuzz", "--without", "not yet", "--jobs", "1", "--shrink", "5", *words],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize(
    "face, backend, seed, count",
    [("gluon", "mxnet", 110, 60), ("cavs", "mxnet", 0, 70), ("cavs", "native", 1000, 1), ("gluon", "native", 1000, 1)],
)
def test_random_programs_do_what_the_loop_does(face, backend, seed, count):
    code, text = fuzz("--face", face, "--backend", backend, "--seed", str(seed), "--count", str(count))
    assert code == 0, text
    assert f"{count} cases from {seed} on {backend}, {face}" in text


# ---- what is drawn ---------------------------------------------------------------------------


def test_every_operator_of_the_table_is_drawn():
    assert set(DRAWN) | set(OWN) == set(TABLE)


def test_a_case_is_known_by_its_number():
    first, again = Case(3, "cavs"), Case(3, "cavs")
    assert first.source == again.source and first.options == again.options
    assert write_program("gluon", Draw(4), set(HELD)) == write_program("gluon", Draw(4), set(HELD))
    assert write_program("gluon", Draw(5), set(HELD)) != write_program("gluon", Draw(4), set(HELD))


def test_families_that_are_left_out_are_not_drawn():
    without = [family for family in FAMILIES if family not in ("vertices", "pause", "flushes", "detach")]
    text = "".join(write_program("gluon", Draw(seed), set(without)) for seed in range(25))
    assert not any(
        word in text for word in ("@gdb.vertex\n    def", "autograd.pause", "gdb.flush", "BlockGrad", "detach")
    )


# ---- what counts as a difference -------------------------------------------------------------


def test_nan_equals_nan_and_rounding_is_no_difference():
    want = {"value, a": np.array([1.0, np.nan, np.inf], "float32"), "fresh, x": np.array(True)}
    assert not compare(want, {**want, "value, a": np.array([1.00001, np.nan, np.inf], "float32")})
    for other in ([1.1, np.nan, np.inf], [1.0, 0.0, np.inf], [1.0, np.nan, -np.inf]):
        assert [d[0] for d in compare(want, {**want, "value, a": np.array(other, "float32")})] == ["value"]
    assert [d[0] for d in compare(want, {**want, "fresh, x": np.array(False)})] == ["fresh"]
    assert [d[0] for d in compare(want, {**want, "value, a": want["value, a"].astype("float64")})] == [
        "value shape or dtype"
    ]


def test_an_error_must_be_raised_both_ways():
    error = {"error": ValueError("no")}
    assert not compare(error, {"error": RuntimeError("other")})
    assert compare(error, {})[0][0] == compare({}, error)[0][0] == "error"


def test_what_rounding_decides_is_no_difference():
    """Where the loop itself moves as much when its data is off by rounding, nothing was decided."""
    want, got = np.array([1.0, 5.0], "float32"), np.array([1.2, 5.0], "float32")
    difference = ("value", "v", want, got)
    assert doubtful(difference, [{"v": np.array([1.15, 5.0], "float32")}])
    assert not doubtful(difference, [{"v": np.array([1.0, 5.1], "float32")}])
    assert not doubtful(difference, [{"v": want}])


# ---- planted bugs ----------------------------------------------------------------------------


def first_difference(seeds, wanted):
    """The first case of the Cavs face that finds it: of 50 Gluon programs one makes MXNet end the process."""
    for seed in seeds:
        case = Case(seed, "cavs", "mxnet", HELD)
        found = [d for d in case.run() if wanted in case.source]
        if found:
            return case, found[0]
    raise AssertionError("no case found the planted bug")


def test_a_wrong_gradient_rule_is_found(monkeypatch):
    monkeypatch.setattr(TABLE["sigmoid"], "grad", lambda b, a, xs, ys, dys: [dys[0]])
    case, found = first_difference(range(100), "sigmoid")
    assert "grad" in found[0]


def test_a_bug_in_sums_over_children_is_found(monkeypatch):
    monkeypatch.setattr(TABLE["child_sum"], "grad", lambda b, a, xs, ys, dys: [b.scale(b.emit("spread", dys[0]), 2.0)])
    case, found = first_difference(range(100), ".sum()")
    assert "grad" in found[0]


# Its shapes and its operator are its own: the library remembers what it made of a planted bug.
LONG = """def program(scope, data, note):
    x1 = data([[0.5, -1.0, 0.3, 0.2, 0.6, -0.4, 0.8]], 'float32')
    x1.attach_grad('write')
    x1.grad[:] = 7
    x2 = data([[0.1, 0.7, 0.9, 0.4, 0.2, -0.3, 1.1]], 'float32')
    x2.attach_grad('add')
    def f3(F, a4, a5):
        v6 = F.broadcast_mul(a4, a5)
        v7 = F.arctan(v6)
        v8 = F.sigmoid(v6 * 2.0)
        return v7 + v8
    def sample9(s10, s11):
        v12 = f3(nd, s10, s11)
        v13 = f3(nd, v12, s10)
        with autograd.pause():
            v14 = nd.softmax(v13)
        v15 = v13[0:1]
        return (v13 * v13).sum() + v15.mean(), [v12, v14]
    for step in range(2):
        with autograd.record():
            with scope():
                l0, held0 = sample9(x1, x2)
                l1, held1 = sample9(x2, x1)
                note.hold('held', *held0, *held1)
                gdb.flush()
        autograd.backward([l0, l1])
        note.grads('step', {'x1': x1, 'x2': x2})
"""
OPTIONS = {"backend": "mxnet", "policy": "cost", "granularity": "graph", "max_pending": 5, "drop_repeats": False}


def test_a_program_that_differs_is_made_small(monkeypatch):
    monkeypatch.setattr(TABLE["arctan"], "grad", lambda b, a, xs, ys, dys: [dys[0]])
    found = differences_of(LONG, OPTIONS)
    source, options = shrink(LONG, OPTIONS, found[0], seconds=15.0)
    assert manner_of(found[0]) in [manner_of(d) for d in differences_of(source, options)]
    assert "arctan" in source and "sigmoid" not in source and len(source.splitlines()) <= 20, source
    assert options == {"backend": "mxnet", "policy": "depth", "granularity": "op"}


def test_a_printed_program_runs_alone_and_shows_what_differs(tmp_path):
    """Imports, data, code and comparison: nothing of the fuzzer is needed."""
    path = tmp_path / "program.py"
    path.write_text(pasted(LONG, OPTIONS))
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert run.returncode == 0, run.stderr
    assert "grad, step" in run.stdout and "LOOP" not in run.stdout
