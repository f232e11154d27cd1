"""The checker finds every kind of wrong op; and what is said of an operator that the table does not have."""

import numpy as np
import pytest
from op_cases import rows
from op_check import check_op, trace_rows

from cavs_core import ProgramError, UnsupportedOpError
from cavs_core.mxnet_compat import gluon
from cavs_core.ops import TABLE
from cavs_core.ops.elementwise import Binary
from cavs_core.ops.linear import FullyConnected, Matmul
from cavs_core.ops.unary import Unary
from cavs_core.program import Spec
from cavs_core.trace import trace

# ---- the checker -----------------------------------------------------------------------------


def _tanh(numpy_body=np.tanh, slope=TABLE["tanh"].slope, mxnet_body=None, **rules):
    op = Unary("tanh", numpy_body, slope)
    if mxnet_body:
        rules["mxnet"] = lambda F, a, x: mxnet_body(F, x)
    vars(op).update(rules)
    return op


class UnsummedBroadcast(Binary):
    def grad(self, b, a, xs, ys, dys):
        return dys * 2


class ForgetsToTranspose(Matmul):
    def _rows_times_shared(self, e, x, ta, y, tb):
        return super()._rows_times_shared(e, x, False, y, tb)


class SumsTransposed(Matmul):
    def summed_rows(self, e, a, x, y):
        return super().summed_rows(e, a, y, x)


class ForgetsTheBias(FullyConnected):
    def expand(self, b, a, x, weight, bias=None):
        return super().expand(b, {**a, "no_bias": True}, x, weight)


def tanh(F, x):
    return F.tanh(x)


def square(F, x, y):
    return F.dot(x, y, transpose_a=True)


WRONG = {
    "numpy value": (_tanh(numpy_body=np.sin), tanh, (), "numpy body, output 0"),
    "MXNet value": (_tanh(mxnet_body=lambda F, x: F.sin(x)), tanh, (), "mxnet body, output 0"),
    "gradient": (_tanh(slope=lambda b, x, y: y), tanh, (), "mxnet body, gradient of argument 0"),
    "no gradient": (_tanh(slope=None), tanh, (), "mxnet body, gradient of argument 0"),
    "gradient of a shared operand": (_tanh(slope=lambda b, x, y: y), tanh, (0,), "gradient of argument 0"),
    "row rule": (_tanh(rows=lambda e, a, x: e.emit("reverse", e.emit("tanh", x.array), axis=(0,))), tanh, (),
                 "mxnet body, output 0"),
    "shape rule": (_tanh(infer=lambda a, x: [(x.shape[::-1], x.dtype)]), lambda F, x: F.reshape(F.tanh(x), (-1, 4)), (),
                   "shape"),
    "dtype": (_tanh(numpy=lambda a, x: np.tanh(x).astype("float64")), tanh, (), "numpy body, output 0: dtype float64"),
    "un-broadcasting": (UnsummedBroadcast("broadcast_add", np.add), lambda F, x, y: x + y[:, :1], (), ""),
    "row rule with a shared operand": (ForgetsToTranspose("matmul"), square, (1,), "output 0"),
    "sum over rows": (SumsTransposed("matmul"), lambda F, x, y: F.dot(x, y), (1,), "gradient of argument 1"),
    "expansion": (ForgetsTheBias("FullyConnected"),
                  lambda F, x, y: F.FullyConnected(x, y, y[0], num_hidden=3, flatten=False), (), "output 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_checker_finds_a_wrong(what, monkeypatch):
    op, fn, shared, said = WRONG[what]
    arrays = rows(1, *[(3, 3) if what != "shape rule" else (2, 4)] * fn.__code__.co_argcount, shared=shared)[1:]
    if shared == (1,):
        arrays = rows(1, (3, 3), (3, 3), shared=shared)
    monkeypatch.setitem(TABLE, op.name, op)
    with pytest.raises(AssertionError, match=said):
        check_op(fn, *arrays, shared=shared)
    monkeypatch.undo()
    check_op(fn, *arrays, shared=shared)
