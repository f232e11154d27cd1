"""The demo and the examples run from the command line with tiny settings, and print what they promise."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_example(name, *args):
    """Run a script as a user does, in a process of its own; what it prints."""
    env = {**os.environ, "PYTHONIOENCODING": "utf-8",
           "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name), *map(str, args)], env=env,
                          capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, f"{name} {args} failed:\n{done.stdout}\n{done.stderr}"
    return done


def test_demo():
    printed = " ".join(run_example("demo.py", "--samples", 6, "--epochs", 2, "--hidden", 8).stdout.split())
    launches = {way: int(count) for way, count in re.findall(
        r"(plain loop|hybridized|batched) +[\d.]+ +[\d.]+ times +(\d+)", printed)}
    assert launches["batched"] * 10 < launches["plain loop"] and launches["batched"] < launches["hybridized"]
    assert "The losses are equal at all 2 steps" in printed and "float32 rounding" in printed
    falls = re.search(r"it was ([\d.]+) at the first step of all, then ([\d.]+) -> ([\d.]+)", printed)
    first, *means = map(float, falls.groups())
    assert means[1] < means[0] < first
    assert "On 500 unseen trees" in printed


def test_tree_fc():
    printed = run_example("tree_fc.py", "--hidden", 8, "--depth", 3, "--repeats", 1).stdout
    assert "Tree-FC, 8 leaves a tree, 8 hidden units" in printed
    counts = re.findall(r"batched, +(\d+) a run +[\d.]+ +[\d.]+ +(\d+) +\d+ +\d+", printed)
    assert counts == [("1", "4"), ("4", "4"), ("16", "4"), ("64", "4")]         # levels do not grow with the batch
    assert "values and gradients of all runs equal those of the plain loop" in printed


def epochs(printed):
    """Loss and measure of each epoch."""
    return [tuple(map(float, pair)) for pair in re.findall(r"epoch \d+: loss ([\d.]+), test \D+ (-?[\d.]+),", printed)]


def test_tree_lstm():
    printed = run_example("tree_lstm.py", "--cpu-small", "--samples", 300, "--epochs", 3).stdout
    (first, _), _, (last, accuracy) = epochs(printed)
    assert last < first and accuracy > 0.5
    assert "before training: test accuracy" in printed


def test_tree_lstm_without_sick_says_so(tmp_path):
    done = run_example("tree_lstm.py", "--sick", tmp_path)
    assert "SICK was not found" in done.stderr and "train/a.toks" in done.stderr


def test_tree_lstm_reads_the_layout_of_sick(tmp_path):
    """A made-up set in the same layout: pairs of sentences are the more related, the more words they share."""
    rng = np.random.RandomState(0)
    for part in ("train", "dev"):
        (tmp_path / part).mkdir()
        lines = {"a.toks": [], "a.parents": [], "b.toks": [], "b.parents": [], "sim.txt": []}
        for _ in range(40):
            words = rng.randint(0, 9, (2, 4))
            for side, sentence in zip("ab", words):
                lines[f"{side}.toks"].append(" ".join(f"Word{w}" for w in sentence))
                lines[f"{side}.parents"].append("2 0 2 3")
            lines["sim.txt"].append(str(1 + len(set(words[0]) & set(words[1]))))
        for name, rows in lines.items():
            (tmp_path / part / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    printed = run_example("tree_lstm.py", "--cpu-small", "--sick", tmp_path, "--epochs", 2).stdout
    assert "SICK: 40 pairs to train on, 40 to test on, 9 words" in printed
    assert len(epochs(printed)) == 2 and "Pearson's r" in printed


# ---- the same model before and after -----------------------------------------------------------

BEFORE, AFTER = "gluon_tree_before.py", "gluon_tree_after.py"


def test_gluon_tree_before_and_after_print_the_same_losses():
    losses = {}
    for name in (BEFORE, AFTER):
        printed = run_example(name, "--trees", 6, "--hidden", 8, "--epochs", 1).stdout
        losses[name] = re.findall(r"epoch (\d+): loss ([\d.]+), [\d.]+ trees a second", printed)
    assert len(losses[BEFORE]) == 1 and losses[AFTER] == losses[BEFORE]


def without_docstring(name):
    """The lines of an example behind its docstring."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    return text.split('"""', 2)[2].splitlines()


def changed_lines(before, after):
    """Lines that only the first has, lines that only the second has."""
    marked = list(difflib.ndiff(before, after))
    return ([line[2:].strip() for line in marked if line.startswith("- ")],
            [line[2:].strip() for line in marked if line.startswith("+ ")])


def test_gluon_tree_before_and_after_differ_by_two_lines():
    """The README shows this difference; it is all that a user has to write."""
    old, new = changed_lines(without_docstring(BEFORE), without_docstring(AFTER))
    assert old == ["with autograd.record():"]
    assert new == ["import gluon_dynbatch as gdb", "with autograd.record(), gdb.batching():"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```diff\n(.*?)^```", readme, re.MULTILINE | re.DOTALL).group(1).splitlines()
    assert [line[1:].strip() for line in shown if line.startswith("-")] == old
    assert [line[1:].strip() for line in shown if line.startswith("+")] == new


def test_checker_finds_a_third_line():
    assert changed_lines(["a", "b"], ["a", "c", "d"]) == (["b"], ["c", "d"])


@pytest.mark.parametrize("name", ["demo.py", BEFORE, AFTER, "tree_fc.py", "tree_lstm.py"])
def test_help(name):
    assert "usage:" in run_example(name, "--help").stdout
