"""TapeBridge: a run as a node on MXNet's autograd tape.

MXNet's own `autograd.Function` loses gradients (with grad_req "add", and after a "null" input), so the node is recorded
with a callback of ours. The callback runs on a thread of MXNet's engine after `backward()` has returned; if it
reads a weight that `Trainer.step` is already waiting to write, both wait for ever. While a node is alive, `backward`
and `grad` therefore wait until all callbacks are done. That is also how an error in a callback reaches the caller.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .array_memory import address_of_data, view_of_data
from .backends.mxnet_ops import MXNetBackend
from .backends.targets import WRITTEN, Target
from .errors import RunError
from .gradients import write_gradient
from .lazy import LazyArray
from .mxnet_compat import MXNetError, autograd, mx
from .tape_graph import begun_outputs, name_of_node
from .tape_state import needs_gradient, node_of, off_tape, on_tape

__all__ = ["TapeBridge", "UNTOUCHED", "wrap_backward"]

UNTOUCHED = object()

NDArray = mx.nd.NDArray
_LIB, check_call, NDArrayHandle = mx.base._LIB, mx.base.check_call, mx.base.NDArrayHandle
_NULL, _ADD = 0, 3                      # MXNet's OpReqType; 1 and 2 (in place) both mean write

_BACKWARD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
                             ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_void_p)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_lock = threading.Lock()
_nodes: dict[int, TapeBridge] = {}      # alive nodes; the tape holds only C pointers to their callbacks
_called: list[TapeBridge] = []          # nodes whose callback ran; a node may be deleted before its pass returns
_passes: dict[int, int] = {}            # thread -> number of backward passes that it is in


class TapeBridge:
    """One node.

    Parameters
    ----------
    inputs : NDArrays that may need a gradient
    outputs : a list of NDArrays that the run made; what the user gets takes their places (a node that held it would
        never die)
    backward : callable
        (output gradients, targets, begun) -> gradients. `targets[i]` is the Target that takes the gradient of input i,
        None if that is not asked for; `begun[k]` is False where the pass is known not to begin at output k. A gradient
        may be None for zero, WRITTEN if it stands in its target already, or UNTOUCHED where nothing that the pass began
        at depends on the input: MXNet would not touch its gradient. Behind those of the inputs come the gradients of
        `past_tape`.
    release : callable
        Frees what the run kept for backward.
    touches : callable
        begun -> for each input, whether what the pass begins at depends on it
    past_tape : (array, parameter) pairs
        What is no input because MXNet takes no sparse gradient from a node like this. Their gradients, as
        `write_gradient` takes them, are written when the pass is over: another node may bring more of them.
    after : callable
        Called when a pass that came to the node is over, on the thread that began it.
    """

    def __init__(self, inputs: Sequence[Any], outputs: list[Any],
                 backward: Callable[[list[Any], list[Target | None], list[bool]], Sequence[Any]],
                 release: Callable[[], None], touches: Callable[[list[bool]], Sequence[bool]],
                 past_tape: Sequence[tuple[Any, Any]] = (), after: Callable[[], None] = lambda: None):
        wrap_backward()
        self._backward, self._release, self._touches, self._after = backward, release, touches, after
        self.past_tape = list(past_tape)
        self.brought: list[Any] = []            # their gradients, while a pass is under way
        self.expected = False                   # whether somebody waits for the pass, and writes them
        self._error: BaseException | None = None
        self._inputs = list(inputs)
        self._begun = [True] * len(outputs)
        self._thread = threading.get_ident()
        self._callbacks = (_BACKWARD(self._on_backward), _DELETE(self._on_delete))
        functions = (ctypes.CFUNCTYPE(ctypes.c_int) * 2)(
            *[ctypes.cast(f, ctypes.CFUNCTYPE(ctypes.c_int)) for f in self._callbacks])
        contexts = (ctypes.c_void_p * 2)()
        self._list = mx.base.MXCallbackList(
            2, ctypes.cast(functions, ctypes.POINTER(ctypes.CFUNCTYPE(ctypes.c_int))),
            ctypes.cast(contexts, ctypes.POINTER(ctypes.c_void_p)))
        self._held = (functions, contexts)
        recording = autograd.set_recording(True)        # a run may be put on the tape after record() was left
        try:
            check_call(_LIB.MXCustomFunctionRecord(
                ctypes.c_int(len(inputs)), mx.base.c_handle_array(inputs),
                ctypes.c_int(len(outputs)), mx.base.c_handle_array(outputs), ctypes.byref(self._list)))
            self._node = node_of(outputs[0]) if outputs else None
            self._name = name_of_node(outputs[0]) if outputs and on_tape(outputs[0]) else ""
            held = [_take_any_gradient(outputs, k) for k in range(len(outputs))]
        finally:
            autograd.set_recording(recording)
        self._outputs = {x.handle.value: memory for x, memory in zip(outputs, held)}
        with _lock:
            _nodes[id(self)] = self     # last: another thread may ask it at once

    def begins_at(self, heads: Sequence[Any]) -> list[bool] | None:
        """Which outputs a pass begins at, if it begins nowhere else; None if that is not known.

        An output that has died leaves its handle to another array, so that a handle alone does not tell whose it is.
        """
        begun = {x.handle.value for x in heads}
        if not begun <= self._outputs.keys() or not all(self._made(x, self._outputs[x.handle.value]) for x in heads):
            return None
        return [handle in begun for handle in self._outputs]

    def _made(self, array: Any, memory: Any) -> bool:
        """Whether an array is the output that has its handle: by its node, or by its memory, which is held."""
        if memory is None:
            return node_of(array) == self._node
        return address_of_data(array) == address_of_data(memory)

    def touches(self, outputs: set[int]) -> Sequence[bool]:
        """Of each input, whether some outputs depend on it."""
        return self._touches([k in outputs for k in range(len(self._outputs))])

    def expect(self, begins: list[bool]) -> None:
        """A pass is about to come to these outputs."""
        self.expected = True
        self._begun = begins

    def _on_backward(self, num_ograds, num_igrads, pointers, reqs, is_train, _):
        try:
            with off_tape():
                self._write_gradients(num_ograds, num_igrads, pointers, reqs)
            return 1
        except BaseException as error:      # no exception may leave a C callback: the waiting caller raises it again
            self._error = error
            return 0
        finally:
            with _lock:
                _called.append(self)

    def _write_gradients(self, num_ograds, num_igrads, pointers, reqs):
        # these handles are ours to free, which the NDArrays do
        arrays = [NDArray(ctypes.cast(pointers[i], NDArrayHandle)) for i in range(num_ograds + num_igrads)]
        reqs = [reqs[i] for i in range(num_igrads)]
        targets = [None if req == _NULL else Target(x, req == _ADD) for x, req in zip(arrays[num_ograds:], reqs)]
        grads = self._backward(arrays[:num_ograds], targets, self._begun)
        self.brought = list(grads[num_igrads:])
        if not self.expected:
            _write_past_tape([self], {}, in_use=True)
        for target, grad, req in zip(arrays[num_ograds:], grads, reqs):
            if grad is WRITTEN:
                continue
            if grad is UNTOUCHED:
                grad = None             # (what the array's gradient was is put back when the pass is over)
            if req == _NULL or (req == _ADD and grad is None):
                continue
            if isinstance(grad, np.ndarray):
                memory = view_of_data(target)       # ours to write while the callback runs
                memory[...] = memory + grad.reshape(memory.shape) if req == _ADD else grad.reshape(memory.shape)
            elif req == _ADD:
                target += grad.reshape(target.shape)
            else:
                target[:] = 0 if grad is None else grad.reshape(target.shape)

    def _on_delete(self, _):
        with _lock:
            _nodes.pop(id(self), None)
        return 1


def _take_any_gradient(outputs: list[Any], k: int) -> Any:
    """Let gradients of any storage type come to an output; an array that holds its memory, if that takes another one.

    A node takes dense gradients alone. Where an operator may bring a sparse one, a reshape that changes nothing stands
    between: MXNet makes a dense gradient for it.
    """
    shape = outputs[k].shape
    if len(shape) < 2:
        return None
    memory = outputs[k].detach()
    outputs[k] = MXNetBackend.reshape(outputs[k], shape)
    return memory


def _before_fork() -> None:
    """Let nodes that are about to die do so.

    MXNet stops its threads before a fork, which holds the GIL. A thread that is deleting a node calls `_on_delete`,
    which needs the GIL: both would wait for ever.
    """
    if _nodes:
        mx.nd.waitall()
        time.sleep(0.01)        # what remains is the end of a callback: microseconds


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


# ---- backward, wrapped -----------------------------------------------------------------------

_originals: dict[str, Any] = {}


def wrap_backward() -> None:
    """Wrap MXNet's backward functions, once for the life of the process."""
    with _lock:
        if _originals:
            return
        _originals.update(backward=autograd.backward, grad=autograd.grad, method=NDArray.backward)

    @functools.wraps(_originals["backward"])
    def backward(heads, head_grads=None, retain_graph=False, train_mode=True):
        if not _begun_by_owner(heads, head_grads, retain_graph, train_mode):
            _waited(lambda keep: _originals["backward"](heads, head_grads, keep, train_mode), heads, retain_graph)

    @functools.wraps(_originals["grad"])
    def grad(heads, variables, head_grads=None, retain_graph=None, create_graph=False, train_mode=True):
        retain_graph = create_graph if retain_graph is None else retain_graph
        called: list[TapeBridge] = []
        grads = _waited(lambda keep: _originals["grad"](heads, variables, head_grads, keep, create_graph, train_mode),
                        heads, retain_graph, only_named=True, called=called)
        return _without_second_order(grads, called, variables, head_grads) if create_graph and called else grads

    @functools.wraps(_originals["method"])
    def method(self, out_grad=None, retain_graph=False, train_mode=True):
        if not _begun_by_owner(self, None if out_grad is None else [out_grad], retain_graph, train_mode):
            _waited(lambda keep: _originals["method"](self, out_grad, keep, train_mode), self, retain_graph)

    autograd.backward, autograd.grad, NDArray.backward = backward, grad, method


def _begun_by_owner(heads: Any, head_grads: Any, retain_graph: bool, train_mode: bool) -> bool:
    """Let the owner of lazy heads run the pass by itself, if they are all its own; whether it did.

    The owner's `backward(heads, head_grads, retain_graph, over_tape)` may decline. It calls `over_tape(arrays,
    gradients, retain_graph, may_end)` to go on below arrays that are on the tape; `may_end` allows that nothing below
    them asks for a gradient.
    """
    heads = list(heads) if isinstance(heads, (list, tuple)) else [heads]
    if not heads or not all([type(x) is LazyArray for x in heads]):
        return False
    head_grads = [None] * len(heads) if head_grads is None else (
        list(head_grads) if isinstance(head_grads, (list, tuple)) else [head_grads])
    if len(head_grads) != len(heads):
        return False                    # MXNet says what is wrong

    def over_tape(arrays: list[Any], grads: list[Any], retain_graph: bool, may_end: bool) -> None:
        try:
            _waited(lambda keep: _originals["backward"](arrays, grads, keep, train_mode), arrays, retain_graph)
        except MXNetError as error:
            if not may_end or "no inputs in computation graph that require gradients" not in str(error):
                raise                   # (then all of it was made of data)

    begin = getattr(heads[0].owner, "backward", None)       # an owner without values has none
    return begin is not None and begin(heads, head_grads, retain_graph, over_tape)


def _without_second_order(grads: list[Any], called: list[TapeBridge], *depends: Any) -> list[Any]:
    """Gradients that came through nodes of ours, for whoever goes on with them: a pass that comes to them fails.

    MXNet does not know what such gradients depend on (the inputs of the nodes, and what else the caller has named). On
    its own tape they would be constants, and a pass that goes on behind them would be silently wrong.
    """
    def refuse(*_: Any) -> Any:
        raise RunError(
            "a gradient of a gradient (autograd.grad with create_graph=True) is asked for through a gdb.batching() "
            "scope or a cavs_core.run, which have first order gradients only. Compute what it goes through outside of "
            "the scope, or by a plain loop over the vertices.")

    inputs = [x for node in called for x in node._inputs]
    for arrays in depends:
        inputs += arrays if isinstance(arrays, (list, tuple)) else [arrays]
    inputs = [x for x in inputs if x is not None and needs_gradient(x)]
    with off_tape():
        made = [grad.detach() for grad in grads]
    TapeBridge(inputs, made, refuse, lambda: None, lambda begun: [True] * len(inputs))
    return made


def _waited(call: Callable[[bool], Any], heads: Any, retain_graph: bool, only_named: bool = False,
            called: list[TapeBridge] | None = None) -> Any:
    """Run a backward pass and, while nodes of ours are alive, wait for their callbacks and raise their errors.

    `call(retain_graph)` is MXNet's own function. It would end a node after one pass, but the outputs of one node may be
    the losses of many samples, each with a pass of its own. So MXNet keeps the graph of such a node, and the memory of
    the run is freed when a pass began at all its outputs, or when they die. With `only_named` no gradient is written
    but those that the caller has named. `called` takes the nodes of ours that the pass came through.
    """
    heads = list(heads) if isinstance(heads, (list, tuple)) else [heads]
    for x in heads:
        if type(x) is LazyArray:
            x.wait_to_read()            # which puts it on the tape: a node that is there must be waited for
    if not _nodes or isinstance(threading.current_thread(), threading._DummyThread):
        # Nothing of ours; or a pass inside somebody's callback on an engine thread, where waiting would never end.
        return call(retain_graph)
    with _lock:
        nodes = list(_nodes.values())
    keep, complete = retain_graph, set()
    begun, untouched = _find_begun(nodes, heads)
    for node, begins in zip(nodes, begun):
        if begins is not None:          # (another pass may be coming to the others, on another thread)
            node.expect(begins)
            if all(begins):
                complete.add(id(node))
            keep = keep or not all(begins)
    me = threading.get_ident()
    with _lock:
        _passes[me] = _passes.get(me, 0) + 1
    result, failure = None, None
    fresh, kept = _mark_stale(nodes), [(x, x._fresh_grad, x.grad.copy()) for x in untouched]
    try:
        result = call(keep)
        mx.nd.waitall()
    except MXNetError as error:         # MXNet's own nameless report of a failed callback, or a real error
        failure = error
    finally:
        with _lock:
            _passes[me] -= 1
            if not _passes[me]:
                del _passes[me]
            # Ours are the nodes that this thread recorded, and those of threads that run no pass of their own.
            ours = [n for n in _called if n._thread == me or n._thread not in _passes]
            _called[:] = [n for n in _called if n not in ours]
    errors = [n._error for n in ours if n._error is not None]
    if called is not None:
        called += ours
    if only_named:
        for node in ours:
            node.brought = []
    with off_tape():
        _write_past_tape(ours, fresh)
        for x, is_fresh, grad in kept:
            grad.copyto(x.grad)
            x._fresh_grad = is_fresh
    for node in ours if not errors and failure is None else ():
        node._after()
    for node in ours:
        node._error = None
        if not retain_graph and (len(node._outputs) == 1 or id(node) in complete):
            node._release()
    if errors:
        raise errors[0] from failure
    if failure is not None:
        raise failure
    return result


def _find_begun(nodes: Sequence[TapeBridge], heads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """For each node, whether a pass that begins at `heads` comes to each of its outputs; None if MXNet leaves it alone.

    And the variables that the pass does not touch, though they are inputs of nodes that MXNet runs: it takes them for
    touched, and writes zeros.
    """
    if len(nodes) == 1:
        begins = nodes[0].begins_at(heads)
        if begins is not None and all(begins):          # at its outputs, and so nowhere else
            return [begins], []
    found = begun_outputs(heads, {node._name: node.touches for node in nodes})
    if found is None:                   # MXNet will say what is wrong
        return [[True] * len(node._outputs) for node in nodes], []
    outputs, variables = found
    come_to = [outputs.get(node._name) for node in nodes]
    untouched = {id(x): x for node, some in zip(nodes, come_to) if some is not None
                 for x, is_touched in zip(node._inputs, node.touches(some))
                 if not is_touched and x.grad is not None and name_of_node(x) not in variables}
    return ([None if some is None else [k in some for k in range(len(node._outputs))]
             for node, some in zip(nodes, come_to)], list(untouched.values()))


def _mark_stale(nodes: Sequence[TapeBridge]) -> dict[int, tuple[Any, bool]]:
    """Arrays that nodes may bring gradients of: id -> the array, and whether its gradient was fresh before the pass."""
    found = {id(data): data for node in nodes for data, _ in node.past_tape}
    before = {key: (data, data._fresh_grad) for key, data in found.items()}
    for data in found.values():
        data._fresh_grad = False                # to see whether the pass over the tape brings part of it
    return before


def _write_past_tape(nodes: Sequence[TapeBridge], before: dict[int, tuple[Any, bool]], in_use: bool = False) -> None:
    """Write what nodes brought; added to what the tape or another node has brought in the same pass."""
    for node in nodes:
        for (data, parameter), grad in zip(node.past_tape, node.brought):
            if grad is not UNTOUCHED:
                write_gradient(data, parameter, grad, add=data._fresh_grad, in_use=in_use)
                data._fresh_grad = True
        node.brought, node.expected = [], False
    for data, fresh in before.values():
        data._fresh_grad = data._fresh_grad or fresh
