"""MXNet imports on old and new numpy, numpy stays as it was, and what is missing is said clearly."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cavs_core import mxnet_compat
from cavs_core.mxnet_compat import MXNetError, attr_str, autograd, gluon, mx, nd

COMPAT = Path(mxnet_compat.__file__)
# The file is loaded alone: cavs_core/__init__ would import far more than what is tested here.
LOAD = f"""
import importlib.util, sys
def load():
    spec = importlib.util.spec_from_file_location("compat_alone", {str(COMPAT)!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
OLD_NAMES = ("bool", "int", "object", "PZERO", "NaN", "Inf", "alltrue", "npv", "msort", "trapz")


def run(code, *flags):
    return subprocess.run([sys.executable, *flags, "-c", LOAD + code], capture_output=True, text=True, timeout=120)


def run_ok(code, *flags):
    done = run(code, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def message_of(code):
    """The text of the ImportError that loading raises after `code` took something away."""
    return run_ok(code + "\ntry: load()\nexcept ImportError as err: print(err)\nelse: sys.exit('no ImportError')")


# ---- numpy is untouched -------------------------------------------------------------------------------------------

def test_numpy_is_the_same_after_the_import():
    run_ok(f"""
import warnings
import numpy as np
def look():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {{name: hasattr(np, name) for name in {OLD_NAMES}}}
answer, seen, filters = np.__getattr__, look(), list(warnings.filters)
assert np.linspace(0, 1, 3).sum() == 1.5          # the user's own numpy work comes first
nd = load().nd
assert np.__getattr__ is answer and look() == seen and warnings.filters == filters
assert nd.array(np.ones(3)).sum().asscalar() == 3
""")


def test_import_gives_no_warning_even_when_warnings_are_errors():
    assert "3.0" in run_ok("import numpy\nprint(load().nd.ones(3).sum().asscalar())", "-W", "error")


def test_only_mxnet_sees_the_old_names_and_only_inside():
    asked = {"__name__": "mxnet.somewhere", "np": np}
    before = np.__getattr__
    with mxnet_compat._old_numpy_for_mxnet({"gone": 7}):
        assert not hasattr(np, "gone")
        assert eval("np.gone", asked) == 7
        assert not eval("hasattr(np, 'never_was')", asked)
        assert not eval("hasattr(np, 'gone')", {"__name__": "mxnetic", "np": np})
    assert np.__getattr__ is before and not eval("hasattr(np, 'gone')", asked)


def test_numpy_is_restored_when_the_import_fails():
    before = np.__getattr__
    with pytest.raises(KeyError), mxnet_compat._old_numpy_for_mxnet({}):
        raise KeyError("inside")
    assert np.__getattr__ is before


def test_removed_function_says_so_when_called():
    with pytest.raises(NotImplementedError, match="numpy.npv"):
        mxnet_compat._make_stub("npv")(1, 2)


def test_mxnet_imported_earlier_is_used():
    run_ok("first = load().mx\nassert sys.modules['mxnet'] is first\nassert load().mx is first")


def test_works_after_the_users_own_import_failed():
    """On numpy 1.24 and later a plain `import mxnet` fails half-way and leaves modules behind."""
    run_ok("""
try: import mxnet
except Exception: assert any(name.startswith("mxnet.") for name in sys.modules)
compat = load()
with compat.autograd.record():
    loss = compat.gluon.loss.L2Loss()(compat.nd.ones(3), compat.nd.zeros(3))
assert loss.asnumpy().tolist() == [0.5] * 3 and compat.mx.metric.Accuracy and compat.mx.optimizer.Adam()
""")


# ---- scipy --------------------------------------------------------------------------------------------------------

def test_works_without_scipy():
    run_ok("sys.modules['scipy'] = None\nassert load().nd.array([1.0, 2.0]).sum().asscalar() == 3")


def test_works_with_scipy():
    if importlib.util.find_spec("scipy") is None:
        pytest.skip("scipy is not installed; with it, its own hasattr tests on numpy meet the import")
    run_ok("""
compat = load()
import scipy.sparse, scipy.stats
assert compat.nd.array([1.0, 2.0]).sum().asscalar() == 3         # read scipy.sparse.csr, which warns
assert (compat.nd.array(scipy.sparse.eye(2).tocsr()).asscipy() != scipy.sparse.eye(2)).nnz == 0
""", "-W", "error")


# ---- errors for missing parts -------------------------------------------------------------------------------------

def test_mxnet_missing():
    assert "pip install 'mxnet>=1.9.1,<2'" in message_of("sys.modules['mxnet'] = None")


def test_a_folder_called_mxnet_is_not_mxnet(tmp_path):
    (tmp_path / "mxnet").mkdir()
    assert "not installed" in message_of(f"""
import numpy
sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if "site-packages" not in p)]
""")


@pytest.mark.parametrize("how", ["installed", "imported"])
def test_mxnet_2_is_refused(tmp_path, how):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("from .libinfo import __version__\n")
    (tmp_path / "mxnet" / "libinfo.py").write_text("__version__ = '2.0.0'\n")
    first = "import mxnet" if how == "imported" else ""
    said = message_of(f"sys.path.insert(0, {str(tmp_path)!r})\n{first}")
    assert "needs mxnet 1.9.1, but mxnet 2.0.0 is installed" in said


def test_libgomp_missing_and_a_second_try():
    said = message_of("""
import ctypes, numpy
real = ctypes.CDLL
class NoGomp(real):
    def __init__(self, name, *args, **kw):
        if "libmxnet" in str(name):
            raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kw)
ctypes.CDLL = NoGomp
answer = numpy.__getattr__
try: load()
except ImportError as err: print(err)
assert numpy.__getattr__ is answer and not [m for m in sys.modules if m.split(".")[0] == "mxnet"]
""")
    lines = said.splitlines()
    assert lines[0] == lines[1] and "libgomp.so.1" in lines[0] and "apt-get install libgomp1" in lines[0]


def test_any_other_failure_names_the_versions(tmp_path):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("import numpy\nnumpy.never_was\n")
    said = message_of(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert f"numpy {np.__version__}" in said and "never_was" in said


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python before 3.12 has its own distutils")
def test_distutils_missing():
    assert "pip install setuptools" in message_of("sys.modules['setuptools'] = None")


# ---- MXNet works at run time --------------------------------------------------------------------------------------

def test_training_step():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh"), gluon.nn.Dense(2))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    x, y = nd.random.normal(shape=(16, 4)), nd.array(np.arange(16) % 2)
    loss_of, accuracy, losses = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy(), []
    for _ in range(30):
        with autograd.record():
            out = net(x)
            loss = loss_of(out, y)
        loss.backward()
        trainer.step(16)
        losses.append(loss.mean().asscalar())
    accuracy.update([y], [out])
    assert losses[-1] < losses[0] and accuracy.get()[1] > 0.5


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "rmsprop", "adadelta", "ftrl", "lamb", "signum"])
def test_optimizers_take_a_step(name):
    weight, grad = nd.ones((2, 3)), nd.ones((2, 3))
    rule = mx.optimizer.create(name)
    rule.update(0, weight, grad, rule.create_state(0, weight))
    assert (weight.asnumpy() < 1).all()


@pytest.mark.parametrize("rule", [mx.init.Xavier(), mx.init.Orthogonal(), mx.init.MSRAPrelu(), mx.init.Bilinear()],
                         ids=lambda rule: type(rule).__name__)
def test_initializers(rule):
    weight = nd.zeros((4, 4, 2, 2))
    rule(mx.init.InitDesc("w_weight"), weight)
    assert np.isfinite(weight.asnumpy()).all() and weight.abs().sum().asscalar() > 0


def test_metrics_losses_iterators_and_estimator_handlers():
    label, pred = nd.array([0, 1, 1]), nd.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    for metric in (mx.metric.F1(), mx.metric.MCC(), mx.metric.TopKAccuracy(2), mx.metric.CrossEntropy(),
                   mx.metric.Perplexity(None)):
        metric.update([label], [pred])
        assert np.isfinite(metric.get()[1])
    rows = mx.io.NDArrayIter(np.arange(10.0).reshape(5, 2), np.arange(5), batch_size=2, last_batch_handle="discard")
    assert [batch.data[0].shape for batch in rows] == [(2, 2), (2, 2)]
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(np.eye(4, dtype="float32")), batch_size=2)
    assert [batch.shape for batch in loader] == [(2, 4), (2, 4)]
    handler = gluon.contrib.estimator.EarlyStoppingHandler(mx.metric.Accuracy(), mode="max")
    handler.train_begin(None)                     # reads numpy.Inf
    assert mx.image.random_size_crop(nd.zeros((8, 8, 3)), (4, 4), (0.5, 1.0), (1, 1))[0].shape == (4, 4, 3)


def test_names_that_numpy_removed_are_read_at_run_time():
    x = nd.zeros((2, 3, 4))
    assert nd.moveaxis(x, 0, 2).shape == (3, 4, 2)                 # numpy.core
    values = mx.np.array([1.0, 2.0, 3.0])
    assert values[values > 1].shape == (2,)                        # numpy.bool
    assert mx.np.full((2,), True).shape == (2,)


def test_attributes_of_numpy_integers():
    """numpy 2 prints np.int64(2) inside a tuple, which MXNet's C side cannot read."""
    shape = tuple(np.array([2, 3]))
    assert attr_str(shape) == "(2, 3)" and attr_str((1, [np.float32(0.5)])) == "(1, [0.5])"
    assert attr_str("same") == "same" and attr_str(None) == "None" and attr_str(np.int64(4)) == "4"
    assert nd.zeros(shape).shape == (2, 3)
    assert nd.transpose(nd.zeros(shape), axes=(np.int64(1), np.int64(0))).shape == (3, 2)
    assert mx.sym.zeros(shape=shape).infer_shape()[1] == [(2, 3)]


def test_errors_are_mxnets():
    with pytest.raises(MXNetError):
        nd.dot(nd.zeros((2, 3)), nd.zeros((2, 3))).wait_to_read()


# ---- OpenMP's threads sleep ----------------------------------------------------------------------------------------

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting(code, **environment):
    """What a process prints, and how OpenMP said that its threads wait."""
    inherited = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", LOAD + code], capture_output=True, text=True, timeout=120,
                          env={**inherited, "OMP_DISPLAY_ENV": "TRUE", **environment})
    assert done.returncode == 0, done.stderr
    said = re.search("OMP_WAIT_POLICY = '([A-Z]+)'", done.stderr)
    if said is None:
        pytest.skip("this OpenMP does not show its environment")
    return done.stdout.split(), said.group(1)


SHOW = """
import os
module = load()
print("OMP_WAIT_POLICY" in os.environ, module.openmp_spins)
"""


def test_openmp_sleeps_and_the_environment_is_as_it_was():
    assert waiting(SHOW, OMP_NUM_THREADS="2") == (["False", "False"], "PASSIVE")


def test_the_user_says_how_openmp_waits():
    assert waiting(SHOW, OMP_WAIT_POLICY="ACTIVE") == (["True", "False"], "ACTIVE")


@pytest.mark.parametrize("environment, spins", [
    ({"OMP_NUM_THREADS": "2"}, "True"), ({"OMP_NUM_THREADS": "1"}, "False"),
    ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, "False")])
def test_it_is_too_late_once_mxnet_is_there(environment, spins):
    (_, said), _ = waiting("load()\n" + SHOW, **environment)        # (whoever loaded it first)
    assert said == spins
