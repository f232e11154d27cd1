"""The command `dynbatch`: it runs, and mistakes are told in one line."""

import json

import pytest

from gluon_dynbatch import cli


def error_of(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_bench_runs_one_workload(tmp_path, capsys):
    path = tmp_path / "figures.json"
    arguments = ["bench", "--workload", "treefc", "--systems", "limit", "--batch", "2", "--hidden", "8", "--quick",
                 "--generated", "--json", str(path)]
    assert cli.main(arguments) == 0
    (job,) = json.loads(path.read_text())["jobs"]
    assert job["options"]["hidden"] == 8 and list(job["systems"]) == ["limit"]
    assert "### treefc, training (batch 2, hidden 8" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, told", [
    ([], "required: command"),
    (["bench"], "required: --workload"),
    (["bench", "--workload", "tree"], "invalid choice: 'tree'"),
    (["bench", "--workload", "treefc", "--systems", "limit,tensorflow"], "there is no system tensorflow; there are"),
    (["bench", "--workload", "treefc", "--batch", "0"], "options are positive numbers"),
    (["bench", "--workload", "treefc", "--data", "/no/such/folder"], "there is no data folder /no/such/folder"),
])
def test_mistakes_are_told(arguments, told, capsys):
    assert told in error_of(arguments, capsys)


def test_without_a_clone_bench_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "gluon_dynbatch" / "cli.py"))
    assert "clone the repository" in error_of(["bench", "--workload", "treefc"], capsys)
