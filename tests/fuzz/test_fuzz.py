"""A slice of the fuzzer's cases, the same every time; and the fuzzer itself: it finds planted bugs, and makes them small."""

import contextlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import mx
from cavs_core.ops import TABLE

from . import oracle
from .families import FAMILIES, NOT_YET
from .notes import observe
from .operators import DRAWN, OWN
from .oracle import Case, compare, differences_of, manner_of
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

def check(seeds, face, backend):
    for seed in seeds:
        case = Case(seed, face, backend, HELD)
        found = case.run()
        if found:
            kind, name, want, got = found[0]
            pytest.fail(f"case {seed} ({face}, {backend}): {name}: loop {want}, scope {got}\n"
                        f"{pasted(case.source, case.options)}")


@pytest.mark.parametrize("block", range(8))
def test_random_programs_do_what_the_loop_does(block):
    check(range(block * 20, block * 20 + 20), "gluon", "mxnet")


@pytest.mark.parametrize("block", range(3))
def test_random_vertex_functions_do_what_the_loop_over_vertices_does(block):
    check(range(block * 20, block * 20 + 20), "cavs", "mxnet")


@pytest.mark.parametrize("face", ["gluon", "cavs"])
def test_some_of_them_on_generated_kernels(face):
    check(range(1000, 1003), face, "native")


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
    assert not any(word in text for word in ("@gdb.vertex\n    def", "autograd.pause", "gdb.flush", "BlockGrad", "detach"))


# ---- what counts as a difference -------------------------------------------------------------

def test_nan_equals_nan_and_rounding_is_no_difference():
    want = {"value, a": np.array([1.0, np.nan, np.inf], "float32"), "fresh, x": np.array(True)}
    assert not compare(want, {**want, "value, a": np.array([1.00001, np.nan, np.inf], "float32")})
    for other in ([1.1, np.nan, np.inf], [1.0, 0.0, np.inf], [1.0, np.nan, -np.inf]):
        assert [d[0] for d in compare(want, {**want, "value, a": np.array(other, "float32")})] == ["value"]
    assert [d[0] for d in compare(want, {**want, "fresh, x": np.array(False)})] == ["fresh"]
    assert [d[0] for d in compare(want, {**want, "value, a": want["value, a"].astype("float64")})] == ["value shape or dtype"]


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
    y.backward()
    note.grads('step', {{'x': x}})
"""


def test_what_rounding_decides_is_no_difference(monkeypatch):
    """The difference of two nearly equal numbers is made of rounding; a wrong scope of the same size is not found, a larger one is."""
    source = ILL.format("((x + 1e6) - 1e6) * 1e4")
    noisy = observe(oracle.compiled(source), contextlib.nullcontext, make_data)
    assert not differences_of(source, {"backend": "mxnet"}, noisy)


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
    monkeypatch.setattr(type(TABLE["clip"]), "mxnet", lambda self, F, a, x: F.clip(x, a_min=a["a_min"], a_max=a["a_max"] + 0.1))
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
    path.write_text(pasted(case.source.replace("def program", "import os\ndef program"), case.options))
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=".", env=None, check=False)
    assert run.returncode == 0, run.stderr
    assert "grad, step" in run.stdout and "LOOP" not in run.stdout
    assert gdb is not None and mx is not None


def test_the_command_runs_cases_and_goes_on_behind_the_last(tmp_path):
    words = [sys.executable, "-m", "fuzz", "--count", "4", "--seed", "20", "--without", "not yet", "--jobs", "2"]
    run = subprocess.run(words, capture_output=True, text=True, cwd="tests", check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 cases from 20" in run.stdout
