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


def tanh_with(body=np.tanh, slope=TABLE["tanh"].slope, **rules):
    op = Unary("tanh", body, slope)
    vars(op).update(rules)
    return op


class ForgetsToUnbroadcast(Binary):
    def grad(self, b, a, xs, ys, dys):
        return dys * 2


class ForgetsToTranspose(Matmul):
    def _rows_times_shared(self, e, x, ta, y, tb):
        return super()._rows_times_shared(e, x, False, y, tb)


class SumsTheWrongWayRound(Matmul):
    def summed_rows(self, e, a, x, y):
        return super().summed_rows(e, a, y, x)


class ForgetsTheBias(FullyConnected):
    def expand(self, b, a, x, weight, bias):
        return super().expand(b, {**a, "no_bias": True}, x, weight)


def tanh(F, x):
    return F.tanh(x)


# what is wrong -> the op, a function that calls it, which operands are shared, what the checker says
WRONG = {
    "numpy body": (tanh_with(body=np.sin), tanh, (), "numpy body, output 0"),
    "MXNet body": (tanh_with(mxnet=lambda F, a, x: F.sin(x)), tanh, (), "mxnet body, output 0"),
    "dtype of a body": (tanh_with(numpy=lambda a, x: np.tanh(x).astype("float64")), tanh, (),
                        "numpy body, output 0: dtype float64 instead of float32"),
    "shape rule": (tanh_with(infer=lambda a, x: [((1, *x.shape), x.dtype)]), tanh, (), "the shape rule says"),
    "dtype rule": (tanh_with(infer=lambda a, x: [(x.shape, "float64")]), tanh, (), "the shape rule says"),
    "gradient": (tanh_with(slope=lambda b, x, y: y), tanh, (), "mxnet body, gradient of argument 0"),
    "missing gradient": (tanh_with(slope=None), tanh, (), "mxnet body, gradient of argument 0"),
    "gradient of a shared operand": (tanh_with(slope=lambda b, x, y: y), tanh, (0,), "gradient of argument 0"),
    "gradient of a broadcast": (ForgetsToUnbroadcast("broadcast_add", np.add), lambda F, x, y: x + y[:1], (), None),
    "row rule": (tanh_with(rows=lambda e, a, x: e.emit("reverse", e.emit("tanh", x.array), axis=(0,))), tanh, (),
                 "mxnet body, output 0"),
    "row rule with a shared operand": (ForgetsToTranspose("matmul"), lambda F, x, y: F.dot(x, y, transpose_a=True),
                                       (1,), "mxnet body, output 0"),
    "sum over rows": (SumsTheWrongWayRound("matmul"), lambda F, x, y: F.dot(x, y), (1,), "gradient of argument 1"),
    "expansion": (ForgetsTheBias("FullyConnected"), lambda F, x, y: F.FullyConnected(x, y, y[0], num_hidden=3), (),
                  "mxnet body, output 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_checker_finds_a_wrong(what, monkeypatch):
    op, fn, shared, said = WRONG[what]
    arrays = rows(1, *[(3, 3)] * (fn.__code__.co_argcount - 1), shared=shared)
    check_op(fn, *arrays, shared=shared)
    monkeypatch.setitem(TABLE, op.name, op)
    with pytest.raises(AssertionError, match=said):
        check_op(fn, *arrays, shared=shared)


def test_checker_looks_at_each_of_several_outputs(monkeypatch):
    monkeypatch.setitem(TABLE, "tanh", tanh_with(body=np.sin))
    with pytest.raises(AssertionError, match="numpy body, output 1"):
        check_op(lambda F, x: [F.sin(x), F.tanh(x)], *rows(1, (3,)))


def test_checker_compares_gradients_only_where_asked(monkeypatch):
    monkeypatch.setitem(TABLE, "tanh", tanh_with(slope=lambda b, x, y: y))
    x, = rows(1, (3,))
    check_op(tanh, x, grad=False)
    check_op(lambda F, x, y: F.tanh(x) + y, x, x, fixed=(0,))


# ---- what the table does not have ------------------------------------------------------------


class Sorter(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.sort(x)


class Outer(gluon.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.sorter = Sorter()

    def hybrid_forward(self, F, x):
        return self.sorter(F.relu(x)) + x


@pytest.mark.parametrize("hybridize", [False, True])
def test_an_unknown_operator_is_named_with_its_block(hybridize):
    block = Outer(prefix="outer_")
    block.hybridize(hybridize)
    with pytest.raises(UnsupportedOpError, match=r"`sort` \(called by Sorter outer_sorter0\) is not in the op table"):
        trace(block, Spec((3,), "float32"))


def test_an_unknown_operator_is_named_with_its_function():
    with pytest.raises(UnsupportedOpError, match=r"operator `topk` \(called by op under test\)"):
        trace_rows(lambda F, x: F.topk(x), *rows(0, (3,)))


def test_an_unknown_attribute_is_named(monkeypatch):
    monkeypatch.setattr(TABLE["clip"], "attrs", {"a_min": 0.0})
    with pytest.raises(ProgramError, match="clip: unknown attribute a_max=1"):
        trace_rows(lambda F, x: F.clip(x, 0, 1), *rows(0, (3,)))


@pytest.mark.parametrize("call, said", [
    (lambda F, x: F.transpose(x, axes=(0, 5)), r"transpose\(row float32\[2, 3\]; .*\): axis 5 is out of range"),
    (lambda F, x: x + F.transpose(x), r"shapes \(2, 3\) and \(3, 2\) do not broadcast"),
    (lambda F, x: F.FullyConnected(x, x, num_hidden=4, no_bias=True), r"weight \(2, 3\) does not fit input \(2, 3\)"),
])
def test_a_shape_error_names_shapes_and_block(call, said):
    class Splitter(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return call(F, x)

    with pytest.raises(ProgramError, match=said) as caught:
        trace(Splitter(prefix="splitter_"), Spec((2, 3), "float32"))
    assert str(caught.value).count("called by Splitter splitter") == 1
