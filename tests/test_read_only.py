"""A machine on which neither the home folder nor the packages can be written."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """\
from numba import cfunc, types
from cavs_core.backends.native_cpu.pointers import OPTIONS, pointer


@cfunc(types.void(types.int64, types.int64, types.int64, types.int64), cache=True, **OPTIONS)
def kernel(table, first, start, stop):
    y = pointer(table, 0, "float64", "y", "y")
    for r in range(start, stop):
        y[r] = 1
"""
PROCESS = f"""\
import os, warnings
warnings.simplefilter("error")
import gluon_dynbatch as gdb
from cavs_core import InputGraph, cache_folder
from cavs_core.backends.native_cpu import kernel_cache, products
from gluon_dynbatch.costs.devices import built_in, device_path, store
assert not os.access(os.path.dirname(gdb.__file__), os.W_OK)
assert InputGraph.batch([InputGraph.chain(3)] * 2).num_edges == 4    # a loop that numba keeps beside its source
assert products.routine(products.fill, "float32").address           # a part of the engine
kernel_cache.compile_kernels([{SOURCE!r}], quiet=True)              # a kernel
store(built_in("native"), "native")                                 # what calibration keeps
assert device_path("native").is_relative_to(cache_folder())
print(cache_folder())
"""
DROP_FROM_BOUNDING_SET, OVERRIDE_PERMISSIONS = 24, 1        # prctl, and the capability that lets root write everywhere


def obey_permissions():
    if os.getuid() == 0:
        ctypes.CDLL(None).prctl(DROP_FROM_BOUNDING_SET, OVERRIDE_PERMISSIONS, 0, 0, 0)


@pytest.fixture
def packages(tmp_path):
    """A copy of the packages that nobody can write, without compiled code."""
    for name in ("cavs_core", "gluon_dynbatch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [folder for folder, _, _ in os.walk(tmp_path)]
    for folder in folders:
        os.chmod(folder, 0o555)
    yield tmp_path
    for folder in folders:
        os.chmod(folder, 0o755)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="root obeys permissions only there")
@pytest.mark.parametrize("home", [
    {"HOME": "/dev/null/none"}, {"HOME": "/dev/null", "XDG_CACHE_HOME": "/proc/none"},
    {"HOME": "/dev/null", "DYNBATCH_CACHE": "/dev/null/here"}], ids=str)
def test_a_machine_that_can_be_written_nowhere(packages, home, tmp_path_factory):
    temporary = tmp_path_factory.mktemp("temporary")
    done = subprocess.run([sys.executable, "-B", "-c", PROCESS], cwd="/", preexec_fn=obey_permissions, timeout=600,
                          capture_output=True, text=True, env={
                              **home, "PATH": os.environ["PATH"], "PYTHONPATH": str(packages),
                              "TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == temporary
    said = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(said) == 1 and "DYNBATCH_CACHE" in said[0] and done.stdout.strip() in said[0]
    assert list(temporary.iterdir()) == []                  # it is gone with the process
