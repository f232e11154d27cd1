"""A slice of the fuzzer's cases, the same every time; and the fuzzer itself finds planted bugs, made small."""

import contextlib
import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

from cavs_core.ops import TABLE

from . import oracle
from .families import FAMILIES, NOT_YET
from .notes import observe
from .operators import OWN
from .oracle import Case, compare, differences_of, manner_of
from .shapes import DRAWN
from .shrink import pasted, shrink
from .writer import make_data

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
    [
        ("gluon", "mxnet", 110, 60),
        ("gluon", "mxnet", 170, 50),
        ("cavs", "mxnet", 0, 100),
        ("cavs", "native", 1000, 3),
        ("gluon", "native", 1000, 2),
    ],
)
def test_random_programs_do_what_the_loop_does(face, backend, seed, count):
    code, text = fuzz("--face", face, "--backend", backend, "--seed", str(seed), "--count", str(count))
    assert code == 0, text
    assert f"{count} cases from {seed} on {backend}, {face}" in text


# ---- what is drawn ---------------------------------------------------------------------------


def test_every_operator_of_the_table_is_drawn():
    assert set(DRAWN) | set(OWN) == set(TABLE)


def test_a_case_is_known_by_its_number():
    first, again = Case(3), Case(3)
    assert first.source == again.source and first.options == again.options
    assert Case(4).source != first.source


def test_families_that_are_left_out_are_not_drawn():
    without = [family for family in FAMILIES if family not in ("vertices", "pause", "flushes", "detach")]
    text = "".join(Case(seed, families=without).source for seed in range(25))
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


ILL = """def program(scope, data, note):
    x = data([1.0, 3.0], 'float32')
    x.attach_grad()
    with autograd.record():
        with scope():
            y = {}
    note.hold('y', y)
"""


def test_what_rounding_decides_is_no_difference(monkeypatch):
    """The difference of two nearly equal numbers is made of rounding: only an exact one counts."""
    wrong = {"_minus_scalar": lambda self, F, a, x: F._internal._minus_scalar(x, scalar=a["scalar"]) + 0.03}
    for number, differs in ((1e6, False), (1.0, True)):
        source = ILL.format(f"((x + {number}) - {number}) * 10")
        loop = observe(oracle.compiled(source), contextlib.nullcontext, make_data)
        monkeypatch.setattr(type(TABLE["_minus_scalar"]), "mxnet", wrong["_minus_scalar"])
        assert bool(differences_of(source, {"backend": "mxnet", "granularity": "op"}, loop)) == differs
        monkeypatch.undo()


# ---- planted bugs ----------------------------------------------------------------------------


def first_difference(monkeypatch, seeds, families=HELD, face="gluon"):
    for seed in seeds:
        case = Case(seed, face, "mxnet", families)
        found = case.run()
        if found:
            return case, found[0]
    raise AssertionError("no case found the planted bug")


def made_small(case, found):
    source, options = shrink(case.source, case.options, found, case.differences, seconds=20.0)
    again = case.differences(source, options)
    assert manner_of(found) in [manner_of(d) for d in again]
    return source, options


def test_a_wrong_gradient_rule_is_found_and_made_small(monkeypatch):
    monkeypatch.setattr(TABLE["tanh"], "grad", lambda b, a, xs, ys, dys: [dys[0]])
    source, options = made_small(*first_difference(monkeypatch, range(200)))
    assert "tanh" in source
    assert len(source.splitlines()) <= 25, source


def test_a_wrong_value_is_found(monkeypatch):
    monkeypatch.setattr(
        type(TABLE["clip"]), "mxnet", lambda self, F, a, x: F.clip(x, a_min=a["a_min"], a_max=a["a_max"] + 0.1)
    )
    source, options = made_small(*first_difference(monkeypatch, range(400)))
    assert "clip" in source


def test_a_bug_in_the_cavs_face_is_found(monkeypatch):
    monkeypatch.setattr(TABLE["child_sum"], "grad", lambda b, a, xs, ys, dys: [b.scale(b.emit("spread", dys[0]), 2.0)])
    case, found = first_difference(monkeypatch, range(200), face="cavs")
    assert "grad" in found[0]


def test_a_printed_program_runs_alone_and_shows_what_differs(tmp_path):
    """Imports, data, code and comparison: nothing of the fuzzer is needed."""
    case = Case(2, "gluon", "mxnet", HELD)
    path = tmp_path / "program.py"
    path.write_text(pasted(case.source, case.options))
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
