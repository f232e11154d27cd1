"""The only file of the project that imports MXNet; all others take `mx` from here.

MXNet 1.9.1 reads numpy names that newer numpys have removed. They are supplied to MXNet alone: numpy is the same
object with the same attributes after the import, for everybody else and for every other thread during it.

MXNet brings OpenMP, whose threads by default spin for some 10 ms after each operator, on the cores that batched code
runs on next: a training step was seen to take 1.5 times as long. So they are told to sleep, unless the user's
environment says how they wait. That is possible only while MXNet is loaded for the first time.
"""

import contextlib
import importlib.util
import os
import re
import sys
import types
import warnings

import numpy as np

__all__ = ["MXNetError", "attr_str", "autograd", "gluon", "mx", "nd", "openmp_spins"]

_OLD_CONSTANTS = {
    "bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str,
    "PZERO": 0.0, "NZERO": -0.0, "PINF": np.inf, "NINF": -np.inf, "Inf": np.inf, "NAN": np.nan, "NaN": np.nan,
}
# Removed functions that live on under another name keep working in mx.np; the others are stubs that raise when called.
_RENAMED = {
    "alltrue": "all", "sometrue": "any", "round_": "round", "product": "prod", "cumproduct": "cumprod",
    "in1d": "isin", "trapz": "trapezoid", "row_stack": "vstack",
}
_REMOVED = ("mirr", "msort", "npv", "pmt", "ppmt", "pv", "rate")
# MXNet modules whose functions read removed names when they are called, not only when they are imported.
_READ_AT_RUN_TIME = (
    "mxnet.ndarray.ndarray", "mxnet.ndarray.numpy._op", "mxnet.symbol.numpy._symbol", "mxnet.numpy.multiarray",
    "mxnet.gluon.contrib.estimator.event_handler", "mxnet.test_utils",
)


def _make_stub(name):
    def removed(*args, **kwargs):
        raise NotImplementedError(f"numpy {np.__version__} no longer has numpy.{name}, so mxnet cannot offer it")
    removed.__name__ = name
    return removed


def _old_names():
    """Every name MXNet may ask for that this numpy lacks, or answers with a deprecation warning."""
    names = {**_OLD_CONSTANTS, **{old: getattr(np, new) for old, new in _RENAMED.items() if hasattr(np, new)},
             **{name: _make_stub(name) for name in _REMOVED}}
    return {name: value for name, value in names.items() if name not in vars(np)}


@contextlib.contextmanager
def _old_numpy_for_mxnet(names):
    before = vars(np).get("__getattr__")

    def answer(name):
        # scipy and others test hasattr(np, ...) while MXNet imports them; they must see the real numpy.
        asker = sys._getframe(1).f_globals.get("__name__") or ""
        if name in names and (asker == "mxnet" or asker.startswith("mxnet.")):
            return names[name]
        if before is None:
            raise AttributeError(f"module 'numpy' has no attribute {name!r}")
        return before(name)

    np.__getattr__ = answer
    try:
        yield
    finally:
        if before is None:
            del np.__getattr__
        else:
            np.__getattr__ = before


def _check_version(version):
    if not re.match(r"1\.9\.[1-9]", version):
        raise ImportError(f"cavs_core needs mxnet 1.9.1, but mxnet {version} is installed. "
                          "Install it with: pip install 'mxnet>=1.9.1,<2'")


def _check_installed():
    """Find what would make `import mxnet` fail, before it half happens."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:
        raise ImportError("cavs_core needs mxnet, which is not installed. Install it with: "
                          "pip install 'mxnet>=1.9.1,<2' (CPU) or pip install mxnet-cu112 (GPU)")
    with contextlib.suppress(OSError):
        with open(os.path.join(os.path.dirname(spec.origin), "libinfo.py"), encoding="utf-8") as libinfo:
            found = re.search(r"""^__version__\s*=\s*["']([^"']+)""", libinfo.read(), re.MULTILINE)
        if found:
            _check_version(found.group(1))
    if sys.version_info >= (3, 12):
        try:  # setuptools brings the distutils that Python 3.12 removed and MXNet imports
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import setuptools  # noqa: F401
        except ImportError as err:
            raise ImportError("mxnet 1.9.1 needs distutils, which Python 3.12 no longer has. "
                              "Install it with: pip install setuptools") from err


def _explain(err):
    """Turn what `import mxnet` raised into an ImportError that says what to do."""
    if "cannot open shared object file" in str(err):
        library = str(err).partition(":")[0]
        cure = ("apt-get install libgomp1 libquadmath0 (Debian, Ubuntu) or dnf install libgomp libquadmath (Fedora)"
                if library.startswith(("libgomp", "libquadmath")) else "mxnet-cu112 needs CUDA 11.2 and its cuDNN")
        return ImportError(f"mxnet needs the system library {library}, which was not found. Install it: {cure}")
    return ImportError(f"mxnet failed to import on Python {sys.version.split()[0]} with numpy {np.__version__}: "
                       f"{type(err).__name__}: {err}")


def _forget_half_made():
    """An `import mxnet` that failed, ours or the user's own, leaves submodules that spoil the next attempt."""
    for name in [name for name in sys.modules if name.startswith("mxnet.")]:
        del sys.modules[name]


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@contextlib.contextmanager
def _openmp_that_sleeps():
    """While OpenMP is loaded it reads the environment, once and for all; afterwards that is as it was."""
    if any(name in os.environ for name in _WAITING):
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        os.environ.pop("OMP_WAIT_POLICY", None)


def _may_spin():
    """Whether OpenMP's threads may spin: MXNet, loaded by somebody else, has more than one and was told nothing."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    several = int(threads) > 1 if threads.isdigit() else (os.cpu_count() or 1) > 2      # MXNet takes half of the cores
    return several and sys.modules.get("mxnet") is not None and not any(name in os.environ for name in _WAITING)


def _import_mxnet(names):
    if sys.modules.get("mxnet") is not None:
        return sys.modules["mxnet"]
    _check_installed()
    _forget_half_made()
    try:
        # MXNet's own deprecation warnings (distutils, escapes in its docstrings) are nobody's concern here.
        with warnings.catch_warnings(), _old_numpy_for_mxnet(names), _openmp_that_sleeps():
            warnings.simplefilter("ignore")
            import mxnet
    except Exception as err:
        _forget_half_made()
        if isinstance(err, ImportError):
            raise
        raise _explain(err) from err
    return mxnet


def _plain(value):
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def attr_str(value):
    """Write an operator attribute as MXNet's C side reads it; numpy 2 would write "(np.int64(2),)" for "(2,)"."""
    return str(_plain(value)) if type(value) in (tuple, list) else str(value)


def _view(module, **extra):
    """Copy a module's namespace and add to it; as quick to read as the module itself, which stays as it is."""
    view = types.ModuleType(module.__name__, module.__doc__)
    vars(view).update(vars(module), **extra)
    return view


def _mend(mxnet, names):
    """Give MXNet's own modules what their functions read from numpy and scipy at run time."""
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        # numpy 2 made np.core private; nd.moveaxis reads one function of it.
        from numpy.lib.array_utils import normalize_axis_tuple
        numeric = types.SimpleNamespace(normalize_axis_tuple=normalize_axis_tuple)
        names = {**names, "core": types.SimpleNamespace(numeric=numeric)}
        for module in (mxnet._ctypes.ndarray, mxnet._ctypes.symbol):
            module.str = attr_str
    old_numpy = _view(np, **names)
    for module in filter(None, map(sys.modules.get, _READ_AT_RUN_TIME)):
        for name in ("np", "_np", "onp"):
            if vars(module).get(name) is np:
                setattr(module, name, old_numpy)
    # Every nd.array() reads scipy.sparse.csr.csr_matrix, which warns since scipy 1.8.
    for module in (mxnet.ndarray.utils, mxnet.ndarray.sparse):
        if getattr(module, "spsp", None) is not None:
            module.spsp = _view(module.spsp, csr=types.SimpleNamespace(csr_matrix=module.spsp.csr_matrix))


openmp_spins = _may_spin()
_names = _old_names()
mx = _import_mxnet(_names)
_check_version(mx.__version__)
_mend(mx, _names)

MXNetError, autograd, gluon, nd = mx.MXNetError, mx.autograd, mx.gluon, mx.nd
