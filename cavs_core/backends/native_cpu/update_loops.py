"""The arithmetic of parameter updates, as a loop over memory: what MXNet's operators compute, in the same order.

Results have the bits of MXNet's (nothing is reordered or contracted), but for one thing: MXNet reads numbers such as a
learning rate from text, and where the text has an exponent its reader may miss the nearest float32 by one unit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .compiled import Compiled, compile_function
from .intrinsics import words_at
from .mxnet_calls import FLOAT32
from .pointers import pointer

__all__ = ["ADAM", "COUNT", "DTYPE", "GRAD", "HEAD", "INDEX", "MULTI_SGD", "NUMBERS", "NUM_NUMBERS", "NUM_WORDS",
           "ROWS", "RULE", "SGD", "SGD_MOM", "STATES", "WEIGHT", "WIDTH", "update_loop"]

SGD, MULTI_SGD, SGD_MOM, ADAM = range(4)                # the rules
# A table: the number of parameters, then ten words for each. A dense gradient is one row without an index.
COUNT, HEAD = range(2)
NUM_WORDS = 10
WEIGHT, GRAD, STATES, INDEX, ROWS, WIDTH, NUMBERS, RULE, DTYPE = 0, 1, 2, 4, 5, 6, 7, 8, 9
# What NUMBERS points at, in float64; from _OWN on what a rule has for itself.
_LR, _WD, _RESCALE, _CLIP, _OWN = range(5)
NUM_NUMBERS = 7

_BUFFERS = "weight grad first second index numbers"     # of different memory, see `update_push`
_EXACT = dict(error_model="numpy", boundscheck=False, forceinline=True)


@intrinsic
def _as_element(typingctx, rows, value):
    """A number in the dtype of what a pointer points at."""
    def codegen(context, builder, sig, args):
        return args[1] if rows.dtype == types.float64 else builder.fptrunc(args[1], ir.FloatType())

    return rows.dtype(rows, types.float64), codegen


@njit(**_EXACT)
def _number(weight, numbers, k):
    """MXNet's attributes are float32, whatever the weight is."""
    return _as_element(weight, types.float32(numbers[k]))


@njit(**_EXACT)
def _scales(weight, numbers):
    """What the gradient is multiplied with, its bound, and what it is multiplied with then.

    Without a bound MXNet multiplies both factors first, which gives other bits.
    """
    lr, rescale = _number(weight, numbers, _LR), _number(weight, numbers, _RESCALE)
    if numbers[_CLIP] >= 0:
        return rescale, _number(weight, numbers, _CLIP), lr
    return _as_element(weight, 1.0), _as_element(weight, math.inf), lr * rescale


@njit(**_EXACT)
def _clip(x, bound):
    """nan stays."""
    return bound if x > bound else (-bound if x < -bound else x)


@njit(**_EXACT)
def _sgd(weight, grad, size, numbers):
    scale, bound, rate = _scales(weight, numbers)
    keep = _as_element(weight, 1.0) - _number(weight, numbers, _LR) * _number(weight, numbers, _WD)
    for j in range(size):
        weight[j] = keep * weight[j] - rate * _clip(scale * grad[j], bound)


@njit(**_EXACT)
def _multi_sgd(weight, grad, size, numbers):
    scale, bound, rate = _scales(weight, numbers)
    decay = _number(weight, numbers, _LR) * _number(weight, numbers, _WD)
    for j in range(size):
        weight[j] = weight[j] + (-(decay * weight[j]) - rate * _clip(scale * grad[j], bound))


@njit(**_EXACT)
def _sgd_mom(weight, grad, velocity, size, numbers):
    scale, bound, rate = _scales(weight, numbers)
    momentum = _number(weight, numbers, _OWN)
    decay = _number(weight, numbers, _LR) * _number(weight, numbers, _WD)
    for j in range(size):
        moved = momentum * velocity[j] - decay * weight[j] - rate * _clip(scale * grad[j], bound)
        velocity[j] = moved
        weight[j] = weight[j] + moved


@njit(**_EXACT)
def _adam(weight, grad, mean, var, size, numbers, sparse):
    one, bound = _as_element(weight, 1.0), _scales(weight, numbers)[1]
    lr, wd, rescale = _number(weight, numbers, _LR), _number(weight, numbers, _WD), _number(weight, numbers, _RESCALE)
    beta1, beta2 = _number(weight, numbers, _OWN), _number(weight, numbers, _OWN + 1)
    epsilon = _number(weight, numbers, _OWN + 2)
    square_first = sparse and numbers[_CLIP] >= 0       # so MXNet does it there, which gives other bits
    for j in range(size):
        g = _clip(rescale * grad[j] + wd * weight[j], bound)
        m = beta1 * mean[j] + (one - beta1) * g
        v = beta2 * var[j] + ((one - beta2) * (g * g) if square_first else (one - beta2) * g * g)
        mean[j], var[j] = m, v
        weight[j] = weight[j] - lr * m / (math.sqrt(v) + epsilon)


def _update_of(dtype: str) -> Any:
    """The update of one parameter of a dtype, by the address of its words."""

    @njit(**_EXACT)
    def update(at):
        words = words_at(at)
        rule, width = words[RULE], words[WIDTH]
        numbers = pointer(at, NUMBERS, "float64", "numbers", _BUFFERS)
        index = pointer(at, INDEX, "int64", "index", _BUFFERS)
        for row in range(words[ROWS]):
            begin = index[row] * width if words[INDEX] != 0 else 0
            weight = pointer(at, WEIGHT, dtype, "weight", _BUFFERS) + begin
            grad = pointer(at, GRAD, dtype, "grad", _BUFFERS) + row * width
            first = pointer(at, STATES, dtype, "first", _BUFFERS) + begin
            second = pointer(at, STATES + 1, dtype, "second", _BUFFERS) + begin
            if rule == SGD:
                _sgd(weight, grad, width, numbers)
            elif rule == MULTI_SGD:
                _multi_sgd(weight, grad, width, numbers)
            elif rule == SGD_MOM:
                _sgd_mom(weight, grad, first, width, numbers)
            else:
                _adam(weight, grad, first, second, width, numbers, words[INDEX] != 0)

    return update


_update_float32, _update_float64 = _update_of("float32"), _update_of("float64")


def update(context, table):
    for k in range(words_at(table)[COUNT]):
        at = table + 8 * (HEAD + NUM_WORDS * k)
        if words_at(at)[DTYPE] == FLOAT32:
            _update_float32(at)
        else:
            _update_float64(at)


@lru_cache(maxsize=1)
def update_loop() -> Compiled:
    """A function for MXNet's engine, (its context, a table) -> nothing; compiled, or loaded from disk."""
    return compile_function(update, types.void(types.int64, types.int64))
