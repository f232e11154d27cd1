"""`gluon.Trainer.step` with all updates at once.

MXNet's Trainer, Updater and Optimizer together take longer in Python than the updates of a small network. Where a
step is plain, one function does the same for all parameters; it counts updates and asks for learning rates by the
optimizer's own methods. Any other step is left to MXNet as it is.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from typing import Any

from .backends.native_cpu.update_loops import ADAM, MULTI_SGD, NUM_NUMBERS, SGD, SGD_MOM
from .backends.native_cpu.update_push import Updates
from .lazy import thread_state
from .mxnet_compat import gluon, mx

__all__ = ["install_steps"]

_NDArray, _GRADS = mx.nd.NDArray, (mx.nd.NDArray, mx.nd.sparse.RowSparseNDArray)
_Parameter, _Updater = gluon.Parameter, mx.optimizer.Updater
_LABEL = ctypes.create_string_buffer(b"trainer_step")
# What is called on the way from Trainer to the operators; who gives an optimizer one of its own gets it called.
_METHODS = {"update", "update_multi_precision", "_update_impl", "_set_current_context", "_update_count", "_get_lr",
            "_get_lrs", "_get_wd", "_get_wds"}


# ---- optimizers ------------------------------------------------------------------------------------------------------

class _Sgd:
    @staticmethod
    def num_states(optimizer: Any) -> int:
        return 1 if optimizer.momentum > 0 else 0

    @staticmethod
    def own(optimizer: Any) -> tuple[float, ...]:
        return (optimizer.momentum,) if optimizer.momentum > 0 else (0.0,)

    @staticmethod
    def groups(updater: Any, updates: Updates) -> list[tuple[int, list[int]]] | None:
        """Rules and their parameters. MXNet takes some of one dtype at once, if all are dense; its bits differ then."""
        size = updater.optimizer.aggregate_num if updater.aggregate_updates else 1
        if size < 1:
            return None
        momentum, rows, by_dtype = updater.optimizer.momentum > 0, updates.rows, {}
        for k, dtype in enumerate(updates.dtypes):
            by_dtype.setdefault(dtype, []).append(k)
        groups = []
        for members in by_dtype.values():
            for start in range(0, len(members), size):
                group = members[start:start + size]
                dense = all([rows[k] > 0 for k in group])
                groups.append((SGD_MOM if momentum else MULTI_SGD if dense else SGD, group))
        return groups

    @staticmethod
    def rates(optimizer: Any, indices: list[int], lrs: list[float]) -> list[float]:
        return lrs


class _Adam:
    @staticmethod
    def num_states(optimizer: Any) -> int:
        return 2

    @staticmethod
    def own(optimizer: Any) -> tuple[float, ...]:
        return optimizer.beta1, optimizer.beta2, optimizer.epsilon

    @staticmethod
    def groups(updater: Any, updates: Updates) -> list[tuple[int, list[int]]] | None:
        return None if updater.aggregate_updates else [(ADAM, [k]) for k in range(len(updates))]

    @staticmethod
    def rates(optimizer: Any, indices: list[int], lrs: list[float]) -> list[float]:
        """Larger in the first steps, when the means are small."""
        counts, beta1, beta2 = optimizer._index_update_count, optimizer.beta1, optimizer.beta2
        return [lr * (math.sqrt(1. - beta2**counts[i]) / (1. - beta1**counts[i])) for i, lr in zip(indices, lrs)]


_KINDS = {mx.optimizer.SGD: _Sgd, mx.optimizer.Adam: _Adam}     # (their children may do anything)


# ---- a step ----------------------------------------------------------------------------------------------------------

_expected: dict[str, Any] = {}          # the operators of MXNet's optimizers that this stands for, by name


def install_steps(operators: dict[str, Any]) -> None:
    """Put our function into MXNet's Trainer; for as long as its optimizers would call these operators."""
    _expected.update(operators)
    original = gluon.Trainer._update

    @functools.wraps(original)
    def update(self: Any, ignore_stale_grad: bool = False) -> None:
        if not _updated_at_once(self, ignore_stale_grad):
            original(self, ignore_stale_grad)

    gluon.Trainer._update = update


def _updated_at_once(trainer: Any, ignore_stale_grad: bool) -> bool:
    """Update all parameters; False if the step is MXNet's to make, and then nothing has changed."""
    # Where somebody listens, recorded calls may still have to read the weights; operators tell the listener.
    if thread_state.listener is not None or trainer._kvstore or len(trainer._updaters) != 1 or (
            getattr(trainer, "_amp_loss_scaler", None) is not None):
        return False
    updater = trainer._updaters[0]
    optimizer = updater.optimizer
    kind = _KINDS.get(type(optimizer))
    if kind is None or type(updater) is not _Updater or not _METHODS.isdisjoint(vars(optimizer)):
        return False
    current = vars(mx.optimizer.optimizer)
    if any([current.get(name) is not operator for name, operator in _expected.items()]):
        return False
    found = _find_arrays(trainer._params, updater, kind.num_states(optimizer))
    if found is None:
        return False
    indices, updates = found
    if not updates.are_plain(optimizer.lazy_update is True):
        return False
    device, fresh = updates.device, updates.fresh
    if not all(fresh):
        if not ignore_stale_grad:
            return False                        # MXNet says which
        chosen = [k for k, is_fresh in enumerate(fresh) if is_fresh]
        if not chosen:
            return True
        indices, updates = [indices[k] for k in chosen], updates.only(chosen)
    return _make_step(kind, updater, indices, updates, device)


def _find_arrays(parameters: Any, updater: Any, num_states: int) -> tuple[list[int], Updates] | None:
    """The numbers of the parameters that are trained, and their arrays; None if some are not as expected."""
    indices, arrays, missing = [], [], (None,) * (2 - num_states)
    states, synced = updater.states, updater.states_synced
    for i, parameter in enumerate(parameters):
        if parameter._grad_req == "null":
            continue
        data, grads = parameter._data, parameter._grad
        if type(parameter) is not _Parameter or not data or not grads or len(data) != 1 or not synced.get(i):
            return None                         # (states are made by MXNet)
        weight, grad, state = data[0], grads[0], states[i]
        if num_states < 2:
            state = () if state is None else (state,)
        if len(state) != num_states or type(weight) is not _NDArray or type(grad) not in _GRADS:
            return None
        if any([type(x) is not _NDArray for x in state]):
            return None
        arrays += weight, grad, *state, *missing
        indices.append(i)
    return (indices, Updates(arrays)) if indices else None


def _make_step(kind: Any, updater: Any, indices: list[int], updates: Updates, device: int) -> bool:
    """What MXNet does, in its order: a schedule of learning rates sees the same counts."""
    optimizer, clip = updater.optimizer, updater.optimizer.clip_gradient
    groups = kind.groups(updater, updates)
    try:
        common = array("d", (optimizer.rescale_grad, clip if clip else -1.0, *kind.own(optimizer)))
    except TypeError:                           # texts, which MXNet reads
        return False
    if groups is None:
        return False
    common.extend((0.0,) * (NUM_NUMBERS - 2 - len(common)))
    updates.use()
    optimizer._set_current_context(device)
    rules, numbers = [0] * len(updates), [common] * len(updates)
    for rule, members in groups:
        for k in members:
            rules[k] = rule
    # Without a schedule learning rates do not depend on what is counted in between.
    for members in [range(len(indices))] if optimizer.lr_scheduler is None else [members for _, members in groups]:
        chosen = [indices[k] for k in members]
        optimizer._update_count(chosen)
        lrs, wds = kind.rates(optimizer, chosen, optimizer._get_lrs(chosen)), optimizer._get_wds(chosen)
        for k, lr, wd in zip(members, lrs, wds):
            numbers[k] = array("d", (lr, wd)) + common
    updates.push(rules, sum(numbers, array("d")), _LABEL)
    return True
