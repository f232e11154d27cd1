"""The checker of values: cases of the op table on three samples in a scope, against MXNet's loop over them."""

import contextlib
import zlib

import numpy as np
from value_cases import CASES

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, mx

SAMPLES = 3


class Found:
    """What a run of cases gave: (case, sample, "y" or the number of an operand) -> array; and the scope."""

    def __init__(self, arrays, scope):
        self.arrays, self.scope = arrays, scope


def run(names, operands, heads=None, backend=None, grouped=False):
    """Values and gradients of cases.

    Parameters
    ----------
    operands : (case, sample) -> numpy arrays
    heads : (shape, dtype, generator) -> gradients of a result; None: values alone
    backend : that of a scope; None for the loop
    grouped : whether all cases are one vertex; else they are operators
    """
    arrays = {(name, s): [mx.nd.array(a, dtype=a.dtype) for a in operands(name, s)]
              for name in names for s in range(SAMPLES)}
    for (name, _), xs in arrays.items():
        for letter, x in zip(CASES[name].operands, xs):
            if letter != "i" and heads:
                x.attach_grad()
    group = _vertex(names) if grouped and backend else _plain(names)
    with autograd.record(train_mode=False):
        with gdb.batching(backend=backend) if backend else contextlib.nullcontext() as scope:
            made = [group(mx.nd, *[x for name in names for x in arrays[name, s]]) for s in range(SAMPLES)]
    outputs = {(name, s): y for s in range(SAMPLES) for name, y in zip(names, made[s])}
    if heads is None:
        return Found({(name, s, "y"): y.asnumpy() for (name, s), y in outputs.items()}, scope)
    given = []
    for name, s in outputs:
        rng = np.random.RandomState(zlib.crc32(f"{name} {s}".encode()) % 2 ** 31)
        y = outputs[name, s]
        with np.errstate(all="ignore"):
            given.append(mx.nd.array(heads(y.shape, y.dtype, rng).astype(y.dtype), dtype=y.dtype))
    autograd.backward(list(outputs.values()), given, train_mode=False)
    found = {(name, s, "y"): y.asnumpy() for (name, s), y in outputs.items()}
    found.update({(name, s, k): x.grad.asnumpy() for (name, s), xs in arrays.items()
                  for k, (letter, x) in enumerate(zip(CASES[name].operands, xs)) if letter != "i"})
    return Found(found, scope)


def _plain(names):
    def group(F, *xs):
        xs = iter(xs)
        return [CASES[name].fn(F, *[next(xs) for _ in CASES[name].operands]) for name in names]

    return group


def _vertex(names):
    return gdb.vertex(_plain(names))


def differences(got, want, compared=lambda name, s: None, rtol=None):
    """What differs, as text. NaN equals NaN, and 0 equals -0.

    Parameters
    ----------
    compared : (case, sample) -> None, or for each element of the first operand whether it, or all of its row, counts
    rtol : dtype -> relative tolerance
    """
    rtol = rtol or {"float32": 1e-3, "float64": 1e-5, "float16": 3e-2}
    found = []
    for (name, s, what), w in want.arrays.items():
        g = got.arrays[name, s, what]
        assert (g.dtype, g.shape) == (w.dtype, w.shape), (name, s, what, g.dtype, g.shape, w.dtype, w.shape)
        tol = rtol.get(w.dtype.name, 0)
        least = tol / 3 if w.dtype == "float16" else tol / 100
        with np.errstate(all="ignore"):
            g, w = [x.astype("float64") if x.dtype.kind == "f" else x for x in (g, w)]
            same = (g == w) | ((g != g) & (w != w)) | (abs(g - w) <= tol * abs(w) + least)
        mask = compared(name, s)
        if mask is not None and mask.size == w.size:
            same |= ~mask.reshape(w.shape)
        elif mask is not None and len(mask) == w.size:
            same |= ~mask.all(axis=-1)
        for at in np.argwhere(~same)[:3]:
            found.append(f"{name}, sample {s}, {what}{at.tolist()}: {g[tuple(at)]} instead of {w[tuple(at)]}")
    return found
