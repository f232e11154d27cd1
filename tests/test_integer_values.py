"""Arrays of integers, and of half precision: values, gradients and errors are those of MXNet.

MXNet lets gradients flow through integers: x * x has the gradient 2 x, and what comes back through a cast is cut off.
What is no ring, order or copy runs alone; sums over rows never run in native kernels.
"""

import contextlib

import numpy as np
import pytest
from value_cases import CASES
from value_check import differences, run

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, mx

nd = mx.nd
INTEGERS = ("int32", "int64", "int8", "uint8")
#: MXNet divides integers by zero, and the process dies
DEADLY = ("_div_scalar 0.0", "_div_scalar 0.7", "_rdiv_scalar 0.0", "_mod_scalar 0.7")
DIVIDES = ("mod", "div", "reciprocal")


def whole(dtype):
    """Small whole numbers."""
    low = 0 if dtype == "uint8" else -3

    def operands(name, sample):
        rng, every = np.random.RandomState(sample), np.arange(low, 4)
        made = {"v": lambda: rng.randint(low, 4, 17), "n": lambda: rng.randint(low, 4, 17),
                "p": lambda: np.repeat(every, every.size), "q": lambda: np.tile(every, every.size),
                "m": lambda: rng.randint(low, 4, (8, 5)), "i": lambda: rng.randint(0, 4, 7)}
        found = [made[letter]().astype(dtype) for letter in CASES[name].operands]
        return [np.where(x == 0, 1, x).astype(dtype) for x in found] if any(d in name for d in DIVIDES) else found

    return operands


def heads(shape, dtype, rng):
    return rng.randint(0 if np.dtype(dtype).kind == "u" else -3, 4, shape)


def is_refused(name, operands, backend=None, grads=heads):
    """Whether a case is an error. MXNet tells of it once more, to whoever waits next."""
    try:
        run([name], operands, grads, backend)
        return False
    except mx.base.MXNetError:
        with contextlib.suppress(mx.base.MXNetError):
            nd.waitall()
        return True


_kept = {}


def kept(dtype):
    """The cases that MXNet computes, and those that it refuses."""
    if dtype not in _kept:
        operands = whole(dtype)
        names = [name for name in CASES if not (name in DEADLY and dtype in INTEGERS)]
        refused = [name for name in names if is_refused(name, operands)]
        _kept[dtype] = [name for name in names if name not in refused], refused
    return _kept[dtype]


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_values_and_gradients_of_integers(dtype, backend):
    names, operands = kept(dtype)[0], whole(dtype)
    want = run(names, operands, heads)
    got = run(names, operands, heads, backend)
    assert differences(got, want) == []
    assert any(np.any(g) for (name, _, what), g in got.arrays.items() if name == "broadcast_mul" and what == 0)
    reasons = got.scope.stats.fallbacks
    assert any("sqrt" in reason for reason in reasons) and not any("broadcast_mul" in reason for reason in reasons)
    if backend == "native":
        assert f"native backend: sums over rows of {dtype} have no native kernels" in reasons


@pytest.mark.parametrize("dtype", ["int32", "uint8"])          # (each compiles dozens of kernels)
def test_values_of_integers_in_native_kernels(dtype):
    """What native kernels cannot compute (a scalar that the dtype does not have; lists) MXNet's operators compute."""
    names, operands = kept(dtype)[0], whole(dtype)
    exact = [name for name in names if not name.endswith(("0.7", "-2.0")) and name not in ("clip", "add_n")
             and not name.startswith(("_power_scalar", "_div_scalar"))]
    for part in (exact, names):
        want, got = run(part, operands), run(part, operands, backend="native")
        assert differences(got, want) == []
        native = [flush.backend == "native" for flush in got.scope.flushes]
        assert all(native) if part is exact else not all(native)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_half_precision(backend):
    """It is batched by MXNet's operators, whatever the backend."""
    names, operands = kept("float16")[0], whole("float16")
    want = run(names, operands, heads)
    got = run(names, operands, heads, backend)
    assert differences(got, want) == []
    assert [flush.backend for flush in got.scope.flushes] == ["mxnet"]
    assert any("float16" in reason for reason in got.scope.stats.fallbacks) == (backend == "native")


@pytest.mark.parametrize("dtype", [*INTEGERS, "float16"])
def test_what_mxnet_refuses_is_refused(dtype):
    names, operands = kept(dtype)[1], whole(dtype)
    assert "dot" in names
    assert [name for name in names if not is_refused(name, operands, "mxnet")] == []


# ---- on the way through integers -------------------------------------------------------------


def grad(fn, backend, dtype="float32", values=(-2.5, -1.0, 0.0, 1.5, 2.0, 3.7)):
    xs = [nd.array([v + k for v in values], dtype=dtype) for k in range(3)]
    for x in xs:
        x.attach_grad()
    with autograd.record():
        if backend:
            with gdb.batching(backend=backend):
                ys = [fn(x) for x in xs]
        else:
            ys = [fn(x) for x in xs]
    autograd.backward(ys)
    return [y.asnumpy().tolist() for y in ys], [(x.grad.asnumpy().tolist(), x._fresh_grad) for x in xs]


WAYS = {
    "cast and back": lambda x: x.astype("int32").astype("float32") * x,
    "arithmetic between casts": lambda x: (x.astype("int32") * x.astype("int32") * 3).astype("float32"),
    "half a head is none": lambda x: (x.astype("int32") + 1).astype("float32") * 0.5,
    "a sum": lambda x: x.astype("int64").sum().astype("float32") * x,
    "a product with a cast": lambda x: x * (x.astype("int8").astype("float32") > 1),
    "choices": lambda x: nd.where(x > 0, x.astype("int32"), -x.astype("int32")).astype("float32"),
    "a part": lambda x: x.astype("int32")[1:3].astype("float32"),
    "joined": lambda x: nd.concat(x.astype("int32"), x.astype("int32") * 2, dim=0).astype("float32"),
    "through bytes": lambda x: (x.astype("uint8") + x.astype("uint8")).astype("float32"),
    "an index that is a number too": lambda x: nd.one_hot(x.astype("int32"), depth=3).sum(axis=1) + x,
    "the largest": lambda x: nd.max(x.astype("int32")).astype("float32") * x,
    "no ring": lambda x: nd.sqrt(nd.abs(x.astype("int32"))).astype("float32"),
    "rows looked up": lambda x: nd.take(x.astype("int32"), nd.array([0, 1, 1, 5])).astype("float32"),
}


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_on_the_way_through_integers(way, backend):
    assert repr(grad(WAYS[way], backend)) == repr(grad(WAYS[way], None))


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_python_scalars_with_integers(dtype, backend):
    def fn(x):
        return nd.concat(*[y.astype("float32").reshape((-1,)) for y in (
            x * 0.5, x + 1, x / 2, x > 1, x - 3, 7 - x, x * 3, x == 2, x ** 2, -x, x.mean(), x.sum(), x.max(), x >= 0.5,
            x + 0.5, 2 - x / 3, x % 2, abs(x), x != 1.5)], dim=0)

    values = (1.0, 2.0, 3.0, 5.0)
    assert repr(grad(fn, backend, dtype, values)) == repr(grad(fn, None, dtype, values))
