"""Compiled kernels on disk: found again by the next process, safe against others, and against damage."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

from cavs_core import compiling
from cavs_core.backends.native_cpu import kernel_cache

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """\
from numba import cfunc, types
from cavs_core.backends.native_cpu.pointers import OPTIONS, pointer


@cfunc(types.void(types.int64, types.int64, types.int64, types.int64), cache=True, **OPTIONS)
def kernel(table, first, start, stop):
    y = pointer(table, 0, "float64", "y", "y")
    for r in range(start, stop):
        y[r] = %d
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and a way to forget what this process knows."""
    monkeypatch.setenv("DYNBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")      # (NUMBA_CACHE_DIR of the machine)
    monkeypatch.setattr(kernel_cache, "_counts", {"compiled": 0, "loaded": 0})

    def forget():
        monkeypatch.setattr(kernel_cache, "_kernels", {})

    forget()
    return forget


def test_compiled_then_remembered_then_loaded(fresh, tmp_path, capfd):
    sources = [SOURCE % 1, SOURCE % 2]
    addresses = kernel_cache.compile_kernels([*sources, sources[0]])
    assert addresses[0] == addresses[2] != addresses[1]
    assert kernel_cache.counts() == {"compiled": 2, "loaded": 0}
    assert "compiling 2 kernels" in capfd.readouterr().err
    assert len(list(tmp_path.glob("*.py"))) == 2
    assert kernel_cache.compile_kernels(sources) == addresses[:2]
    fresh()
    kernel_cache.compile_kernels(sources)
    assert kernel_cache.counts() == {"compiled": 2, "loaded": 2}
    assert capfd.readouterr().err == ""


def test_damaged_files_are_made_again(fresh, tmp_path):
    kernel_cache.compile_kernels([SOURCE % 3], quiet=True)
    for damaged in ("*.py", "*.nbi", "*.nbc"):
        fresh()
        file, = tmp_path.rglob(damaged)
        file.write_bytes(b"damaged")
        assert kernel_cache.compile_kernels([SOURCE % 3], quiet=True)[0] > 0
    fresh()
    kernel_cache.compile_kernels([SOURCE % 3], quiet=True)
    assert kernel_cache.counts() == {"compiled": 3, "loaded": 2}        # a damaged source leaves the machine code


def test_other_helpers_are_another_kernel(fresh, tmp_path, monkeypatch):
    kernel_cache.compile_kernels([SOURCE % 4], quiet=True)
    fresh()
    monkeypatch.setattr(kernel_cache, "_common_hash", lambda: b"other helpers, or another numba")
    kernel_cache.compile_kernels([SOURCE % 4], quiet=True)
    assert len(list(tmp_path.glob("*.py"))) == 2 and kernel_cache.counts()["compiled"] == 2


def test_threads_compile_one_after_the_other(fresh):
    found = []
    threads = [threading.Thread(target=lambda: found.append(kernel_cache.compile_kernels([SOURCE % 5], quiet=True)))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and found[0] == found[1] == found[2] and kernel_cache.counts()["compiled"] == 1


def test_a_folder_that_cannot_be_written(fresh, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("DYNBATCH_CACHE", str(file / "below"))
    assert kernel_cache.compile_kernels([SOURCE % 6], quiet=True)[0] > 0
    assert tmp_path not in compiling.cache_folder().parents


PROCESS = f"""\
from cavs_core import compiling
from cavs_core.backends.native_cpu import kernel_cache
kernel_cache.compile_kernels([{SOURCE % 7!r}], quiet=True)
print(kernel_cache.counts())
"""


def test_two_processes_at_once_and_one_later(tmp_path):
    environment = {**os.environ, "DYNBATCH_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start():
        return subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True, env=environment)

    both = [start(), start()]
    for process in both:
        assert "compiled" in process.communicate()[0] and process.returncode == 0
    assert start().communicate()[0] == "{'compiled': 0, 'loaded': 1}\n"


def test_the_engine_says_that_it_is_compiled(tmp_path):
    """Once, however many functions there are; and the next process loads them without a word."""
    code = ("from cavs_core.backends.native_cpu import products\n"
            "for function in (products.fill, products.column_sum):\n"
            "    products.routine(function, 'float32')\n")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    said = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stderr
            for _ in range(2)]
    assert [text.count("compiling the engine") for text in said] == [1, 0]
