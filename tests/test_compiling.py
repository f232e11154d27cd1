"""What is compiled and kept on disk: it notices when a file that it takes something from has changed."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cavs_core import compiling

MODULES = {
    "deep": "WORD = {word}\n",
    "below": """
        from compiling import compiled
        from deep import WORD

        @compiled
        def plus(x):
            return x + {extra} + WORD
        """,
    "above": """
        from compiling import compiled
        from below import plus
        from numbers_of import FACTOR

        @compiled
        def run(x):
            return _twice(plus(x)) * FACTOR

        @compiled
        def _twice(x):
            return 2 * x
        """,
    "numbers_of": "FACTOR = {factor}\n",
    "main": """
        from above import run
        print(run(1), sum(run.stats.cache_hits.values()))
        """,
}


@pytest.fixture
def ran(tmp_path):
    (tmp_path / "compiling.py").write_text(Path(compiling.__file__).read_text())      # without the rest

    def run(**values):
        for name, text in MODULES.items():
            path, now = tmp_path / f"{name}.py", textwrap.dedent(text).format(**values)
            if not path.exists() or path.read_text() != now:        # what did not change is not touched
                path.write_text(now)
        done = subprocess.run([sys.executable, "-B", "main.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [int(word) for word in done.stdout.split()]

    return run


def test_constants_and_functions_of_other_files_count(ran):
    start = {"word": 0, "extra": 10, "factor": 3}
    assert ran(**start) == [66, 0]
    assert ran(**start) == [66, 1]                              # from disk
    assert ran(**{**start, "factor": 5}) == [110, 0]            # a constant that was imported
    assert ran(**{**start, "extra": 20}) == [126, 0]            # a function that was imported
    assert ran(**{**start, "word": 100}) == [666, 0]            # a constant that an imported function imports
    assert ran(**start) == [66, 1]
