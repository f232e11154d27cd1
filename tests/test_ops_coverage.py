"""Every op of the table has a test: each tests/test_ops_*.py names in COVERS what it tests."""

import importlib
from pathlib import Path

import pytest

from cavs_core.ops import TABLE

# Between vertices, children and shared values: they need a graph, and are tested with whole runs (test_models.py,
# test_executor.py).
EXEMPT = ("spread", "child_sum", "child_max", "child_mean", "stack_rows", "sum_rows",
          "_detach")                    # no operator of MXNet: see test_takes_part.py
MODULES = sorted(path.stem for path in Path(__file__).parent.glob("test_ops_*.py") if path.stem != Path(__file__).stem)


@pytest.fixture(scope="module")
def covers():
    return {module: importlib.import_module(module).COVERS for module in MODULES}


def test_every_op_has_a_test(covers):
    assert set(TABLE) - {name for names in covers.values() for name in names} - set(EXEMPT) == set()


def test_what_is_named_is_in_the_table(covers):
    assert {name for names in (*covers.values(), EXEMPT) for name in names} - set(TABLE) == set()


def test_each_op_has_one_place(covers):
    names = [name for named in (*covers.values(), EXEMPT) for name in named]
    assert [name for name in set(names) if names.count(name) > 1] == []
