"""Parameter updates of MXNet's optimizers as compiled loops.

MXNet's update operators take 2 ns an element on a CPU, ten times as long as a vectorised loop. Its optimizers find them
by name in their own module; there we put functions that take the plain cases, and hand the others to the operators.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import threading
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from .backends.native_cpu.update_loops import ADAM, MULTI_SGD, NUM_NUMBERS, SGD, SGD_MOM
from .backends.native_cpu.update_push import NUM_ARRAYS, Updates
from .lazy import thread_state
from .mxnet_compat import MXNetError, mx
from .trainer_steps import install_steps

__all__ = ["install_updates"]

_ARRAYS = (mx.nd.NDArray, mx.nd.sparse.RowSparseNDArray)


class _Operator(NamedTuple):
    rule: int
    arity: int                              # weight, gradient, states
    many: bool                              # parameters, with lists of learning rates and decays
    own: tuple[tuple[str, float], ...]      # attributes of the rule, with MXNet's defaults


_MOMENTUM = (("momentum", 0.0),)
_OPERATORS = {
    "sgd_update": _Operator(SGD, 2, False, ()),
    "sgd_mom_update": _Operator(SGD_MOM, 3, False, _MOMENTUM),
    "multi_sgd_update": _Operator(MULTI_SGD, 2, True, ()),
    "multi_sgd_mom_update": _Operator(SGD_MOM, 3, True, _MOMENTUM),
    "adam_update": _Operator(ADAM, 4, False, (("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-8))),
}
_lock = threading.Lock()
_originals: dict[str, Callable[..., Any]] = {}


def install_updates() -> None:
    """Put our functions where MXNet's optimizers and its Trainer look, once for the life of the process."""
    with _lock:
        if _originals:
            return
        module = mx.optimizer.optimizer
        for name, operator in _OPERATORS.items():
            _originals[name] = getattr(module, name)
            setattr(module, name, _in_place_of(_originals[name], name, operator))
        install_steps({name: getattr(module, name) for name in _OPERATORS})
        atexit.register(_finish)


def _finish() -> None:
    """The engine must not run compiled code that an ending process has let go."""
    with contextlib.suppress(MXNetError):
        mx.nd.waitall()


def _in_place_of(original: Callable[..., Any], name: str, operator: _Operator) -> Callable[..., Any]:
    label = ctypes.create_string_buffer(name.encode())

    @functools.wraps(original)
    def update(*arrays: Any, **attrs: Any) -> Any:
        # Where somebody listens, recorded calls may still have to read the weight; the operator tells the listener.
        if thread_state.listener is None:
            numbers = _numbers(operator, arrays, attrs)
            if numbers:
                updates = Updates(_filled_up(operator, arrays))
                if updates.are_plain(not operator.many and attrs.get("lazy_update", True) is True):
                    updates.push([operator.rule] * len(updates), numbers, label)
                    return attrs["out"]
        return original(*arrays, **attrs)

    return update


def _filled_up(operator: _Operator, arrays: tuple[Any, ...]) -> list[Any]:
    """NUM_ARRAYS for each parameter."""
    missing, found = (None,) * (NUM_ARRAYS - operator.arity), []
    for k in range(0, len(arrays), operator.arity):
        found += arrays[k:k + operator.arity] + missing
    return found


def _numbers(operator: _Operator, arrays: tuple[Any, ...], attrs: dict[str, Any]) -> array[float] | None:
    """The numbers of an update, parameter by parameter; None if it is not written as MXNet's optimizers write it."""
    left = dict(attrs)
    if operator.many:
        out, lrs, wds = (left.pop(key, ()) for key in ("out", "lrs", "wds"))
        if not all(isinstance(x, (list, tuple)) for x in (out, lrs, wds)) or left.pop("num_weights", 1) != len(out):
            return None
    else:
        out, lrs, wds = (left.pop("out", None),), (left.pop("lr", None),), (left.pop("wd", 0.0),)
        left.pop("lazy_update", True)
    weights = arrays[::operator.arity]
    if len(arrays) != operator.arity * len(out) or not len(out) == len(lrs) == len(wds) or any(
            x is not weight for x, weight in zip(out, weights)) or any(type(x) not in _ARRAYS for x in arrays):
        return None
    common = [left.pop("rescale_grad", 1.0), left.pop("clip_gradient", -1.0),
              *[left.pop(key, default) for key, default in operator.own]]
    common += [0.0] * (NUM_NUMBERS - 2 - len(common))
    if left:
        return None
    try:
        return array("d", [number for lr, wd in zip(lrs, wds) for number in (lr, wd, *common)])
    except TypeError:
        return None
