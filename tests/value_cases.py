"""The op table as functions of one sample: what the tests of special values and of integers go over.

A case is a function of (F, *operands). Its operands are told by letters:

    v       a vector
    p, q    two vectors in which every value meets every other one
    m       a matrix of short rows
    n       a vector of ordinary numbers
    i       row numbers, 0 to 3; they get no gradient
"""

from collections.abc import Callable
from typing import NamedTuple

from op_cases import operator

__all__ = ["CASES", "Case", "UNARY", "SCALAR", "BINARY", "REDUCTIONS"]


class Case(NamedTuple):
    operands: str
    fn: Callable


UNARY = (
    "sigmoid tanh relu softsign exp expm1 log log2 log10 log1p sqrt rsqrt cbrt rcbrt square reciprocal abs sin cos tan "
    "arcsin arccos arctan sinh cosh arcsinh arccosh arctanh erf erfinv gamma gammaln sign floor ceil round rint fix "
    "trunc logical_not zeros_like ones_like negative degrees radians BlockGrad make_loss MakeLoss hard_sigmoid").split()
SCALAR = {name: (0.0, 0.7, -2.0) for name in (
    "_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _rdiv_scalar _mod_scalar _rmod_scalar "
    "_power_scalar _rpower_scalar _maximum_scalar _minimum_scalar _hypot_scalar _equal_scalar _not_equal_scalar "
    "_greater_scalar _greater_equal_scalar _lesser_scalar _lesser_equal_scalar _logical_and_scalar _logical_or_scalar "
    "_logical_xor_scalar").split()}
SCALAR["_power_scalar"] = (-1.0, 0.5, 1.0, 2.0, 3.0, 0.0)
SCALAR["_rpower_scalar"] = (0.7, 2.0)
BINARY = ("add sub mul div mod power maximum minimum hypot equal not_equal greater greater_equal lesser lesser_equal "
          "logical_and logical_or logical_xor").split()
REDUCTIONS = "sum mean prod max min norm argmax argmin".split()


def _named(name, **attrs):
    return lambda F, *xs: operator(F, name)(*xs, **attrs)


def _cases():
    for name in UNARY:
        yield name, "v", _named(name)
    for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
        yield f"Activation {kind}", "v", _named("Activation", act_type=kind)
        yield f"Activation {kind} of a matrix", "m", _named("Activation", act_type=kind)
    for kind in ("leaky", "elu", "selu", "gelu"):
        yield f"LeakyReLU {kind}", "v", _named("LeakyReLU", act_type=kind)
        yield f"LeakyReLU {kind} of a matrix", "m", _named("LeakyReLU", act_type=kind)
    yield "LeakyReLU rrelu", "v", lambda F, x: F.LeakyReLU(x, act_type="rrelu")[0]
    yield "LeakyReLU prelu", "mv", lambda F, x, slope: F.LeakyReLU(x, F.slice_axis(slope, axis=0, begin=0, end=1),
                                                                   act_type="prelu")
    yield "clip", "v", lambda F, x: F.clip(x, -1, 1)
    yield "smooth_l1", "v", lambda F, x: F.smooth_l1(x, scalar=2.0)
    for name, scalars in SCALAR.items():
        for scalar in scalars:
            yield f"{name} {scalar}", "v", _named(name, scalar=scalar)
    for name in BINARY:
        yield f"broadcast_{name}", "pq", _named("broadcast_" + name)
    for name in ("elemwise_add", "elemwise_sub", "elemwise_mul", "elemwise_div", "add_n"):
        yield name, "pq", _named(name)
    yield "broadcast_mul of rows", "mv", lambda F, x, y: F.broadcast_mul(x, F.slice_axis(y, axis=0, begin=0, end=1))
    yield "broadcast_maximum of rows", "mv", lambda F, x, y: F.broadcast_maximum(
        x, F.slice_axis(y, axis=0, begin=1, end=2))
    yield "where", "vvv", lambda F, c, x, y: F.where(c, x, y)
    yield "where of rows", "mm", lambda F, x, y: F.where(F.sum(x, axis=1) > 0, x, y)
    for dtype in ("float32", "float64", "int32"):
        yield f"Cast {dtype}", "v", _named("Cast", dtype=dtype)
    for name in REDUCTIONS:
        for axis in (None, 0, 1):
            yield f"{name} {axis}", "m", _named(name, **({} if axis is None else {"axis": axis}))
    yield "norm of ord 1", "m", lambda F, x: F.norm(x, ord=1, axis=1)
    for name in ("softmax", "log_softmax", "softmin"):
        for axis in (0, 1):
            yield f"{name} {axis}", "m", _named(name, axis=axis)
        yield f"{name} of a vector", "v", _named(name)
        yield f"{name} of three axes", "m", lambda F, x, name=name: operator(F, name)(F.expand_dims(x, axis=0), axis=-1)
    yield "softmax of temperature 2", "m", lambda F, x: F.softmax(x, temperature=2.0)
    yield "SoftmaxActivation", "m", _named("SoftmaxActivation")
    yield "SoftmaxOutput", "mi", lambda F, x, i: F.SoftmaxOutput(x, F.slice_like(F.tile(i, reps=(20,)), x, axes=(0,)))
    yield "pick", "mi", lambda F, x, i: F.pick(x, F.slice_like(F.tile(i, reps=(20,)), x, axes=(0,)))
    yield "take", "mi", lambda F, x, i: F.take(x, i)
    yield "Embedding", "im", lambda F, i, x: F.Embedding(i, F.slice_axis(x, axis=0, begin=0, end=4), input_dim=4,
                                                         output_dim=5)
    yield "gather_nd", "mi", lambda F, x, i: F.gather_nd(x, F.expand_dims(i, axis=0))
    yield "one_hot", "v", lambda F, x: F.one_hot(x, depth=3)
    yield "LayerNorm", "mn", lambda F, x, g: F.LayerNorm(x, F.slice_axis(g, axis=0, begin=0, end=5),
                                                         F.slice_axis(g, axis=0, begin=3, end=8))
    yield "L2Normalization", "m", _named("L2Normalization")
    yield "FullyConnected", "mm", lambda F, x, w: F.FullyConnected(
        x, F.slice_axis(w, axis=0, begin=0, end=2), num_hidden=2, no_bias=True)
    yield "dot", "mm", lambda F, x, w: F.dot(x, w, transpose_b=True)
    yield "batch_dot", "mm", lambda F, x, w: F.batch_dot(
        F.expand_dims(x, axis=0), F.expand_dims(w, axis=0), transpose_b=True)
    yield "Concat", "mm", lambda F, x, y: F.concat(x, y, dim=1)
    yield "split", "m", lambda F, x: F.split(x, num_outputs=5, axis=1)[1]
    yield "transpose", "m", _named("transpose")
    yield "Reshape", "m", lambda F, x: F.reshape(x, shape=(-1,))
    yield "tile", "m", lambda F, x: F.tile(x, reps=(2, 1))
    yield "repeat", "m", lambda F, x: F.repeat(x, repeats=2, axis=1)
    yield "broadcast_to", "v", lambda F, x: F.broadcast_axis(F.expand_dims(x, axis=0), axis=0, size=3)
    yield "reverse", "m", lambda F, x: F.reverse(x, axis=1)
    yield "Dropout in predict mode", "v", lambda F, x: F.Dropout(x, p=0.5, mode="training")


CASES = {name: Case(operands, fn) for name, operands, fn in _cases()}
