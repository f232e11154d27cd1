"""NaN, infinities, zeros, and numbers too large or too small to square: values and gradients are those of MXNet.

All cases of the op table run on three samples: ordinary numbers, special ones, and these backwards. So nothing special
may reach another sample.
"""

import numpy as np
import pytest
from value_cases import BINARY, CASES, SCALAR, UNARY
from value_check import differences, run

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-30, -1e-42, 1e30, -1e38, 40.0, -80.0, 2.0, 5.0)
#: float32 alone: MXNet has no others for these
SINGLE = ("SoftmaxActivation", "SoftmaxOutput")
#: rows that hold a NaN: what stands beside it depends on the length of the row (see docs/limitations.md)
FAST_SOFTMAX = tuple(name for name in CASES if name.startswith(("softmax", "log_softmax")) and "temperature" not in name
                     and not name.endswith(" 0")) + ("SoftmaxOutput",)
#: so many infinities in a row make its norm NaN (one, if it does not stand last), not infinite
NORMS = {"norm of ord 1": 1, "norm 1": 2}
#: the order of additions shows where infinities meet, and where small numbers are flushed to zero
ORDER = ("LayerNorm", "LeakyReLU elu of a matrix")
#: gradients of rows that a sample looks up in a table of its own go through a product, where 0 times infinity is NaN
PRODUCTS = ("take", "Embedding", "gather_nd")


def special(dtype):
    def operands(name, sample):
        rng = np.random.RandomState(7)
        values = np.array(SPECIAL, dtype)
        if dtype == "float64":          # MXNet's attributes have single precision, and so has what it makes of them
            values[values == -1e-42] = -1e-37
        if sample == 0:
            values = rng.uniform(-2, 2, values.size).astype(dtype)
        elif sample == 2:
            values = values[::-1].copy()
        made = {"v": lambda k: np.roll(values, 5 * k), "p": lambda k: np.repeat(values, values.size),
                "q": lambda k: np.tile(values, values.size), "m": lambda k: matrix(values, rng),
                "n": lambda k: rng.uniform(-2, 2, values.size), "i": lambda k: rng.randint(0, 4, 7)}
        return [made[letter](k).astype(dtype) for k, letter in enumerate(CASES[name].operands)]

    return operands


def matrix(values, rng):
    """Rows with one special number at each place, with two, and with nothing else."""
    n = values.size
    rows = rng.uniform(-2, 2, (2 * n + 7, 5))
    for r in range(n):
        rows[r, r % 5] = values[r]
        rows[n + r, (r + 2) % 5] = values[r]
        rows[n + r, (3 * r + 1) % 5] = values[(7 * r + 3) % n]
    rows[2 * n:] = [[*values[:3], 0, 1], [values[0]] * 5, [values[1]] * 5, [values[2]] * 5,
                    [values[2], values[2], 0, 1, 2], [values[1], values[1], 0, 1, 2], [0] * 5]
    return rows


def ones(shape, dtype, rng):
    return np.ones(shape)


def drawn(shape, dtype, rng):
    return rng.uniform(-2, 2, shape)


def wild(shape, dtype, rng):
    return np.where(rng.uniform(0, 1, shape) < 0.5, drawn(shape, dtype, rng),
                    rng.choice([np.inf, -np.inf, np.nan, 0.0, 1e30], shape))


def compared(operands, dtype):
    """What is compared: rows where MXNet agrees with itself."""
    def rows(name, sample):
        x = operands(name, sample)[0]
        if name in FAST_SOFTMAX and dtype == "float32":
            return np.broadcast_to(~np.isnan(x).any(axis=-1, keepdims=True), x.shape)
        if name in NORMS:
            return np.broadcast_to(np.isinf(x).sum(axis=-1, keepdims=True) < NORMS[name], x.shape)
        return None

    return rows


def names_for(dtype, left_out=()):
    return [name for name in CASES if name not in left_out and (dtype == "float32" or name not in SINGLE)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("heads, left_out", [(ones, ()), (drawn, ()), (wild, ORDER + PRODUCTS)])
def test_special_values_on_mxnets_operators(dtype, heads, left_out):
    names, operands = names_for(dtype, left_out), special(dtype)
    want = run(names, operands, heads)
    got = run(names, operands, heads, "mxnet")
    assert got.scope.stats.fallbacks == {} and got.scope.stats.launches < 1.5 * len(names)
    assert differences(got, want, compared(operands, dtype)) == []


def groups(names, size=24):
    return [names[k:k + size] for k in range(0, len(names), size)]


#: each compiles dozens of kernels; float64 has the same code but for the polynomials, so one group in five will do
NATIVE = [(dtype, group) for dtype in ("float32", "float64") for group in range(len(groups(list(CASES))))
          if dtype == "float32" or group % 5 == 0]


@pytest.mark.parametrize("dtype, group", NATIVE)
def test_special_values_in_native_kernels(dtype, group):
    """Gradients of integers have no native kernels (see test_integer_values.py)."""
    parts, operands = groups(names_for(dtype, ["Cast int32"])), special(dtype)
    names = parts[group] if group < len(parts) else parts[0]
    want = run(names, operands, drawn)
    got = run(names, operands, drawn, "native", grouped=True)
    assert [flush.backend for flush in got.scope.flushes] == ["native"]
    assert differences(got, want, compared(operands, dtype)) == []


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("name", ["softmax 1", "log_softmax 1", "softmin 1"])
def test_a_nan_makes_a_softmax_nan_where_it_stands_and_reaches_no_other_row(name, backend):
    """What stands beside it in float32 is not MXNet's to say: with oneDNN that depends on the length of the row."""
    def operands(_, sample):
        x = np.random.RandomState(sample).uniform(-1, 1, (4, 16 + sample)).astype("float32")
        x[sample, 3 * sample] = np.nan
        return [x]

    found = run([name], operands, drawn, backend).arrays
    for sample in range(3):
        y, = operands(name, sample)
        nan = np.isnan(found[name, sample, "y"])
        assert nan[sample, 3 * sample] and not np.delete(nan, sample, axis=0).any(), (sample, y)


def test_every_elementwise_op_is_a_case():
    assert {name.partition(" ")[0] for name in CASES} >= {*UNARY, *SCALAR, *("broadcast_" + name for name in BINARY)}
