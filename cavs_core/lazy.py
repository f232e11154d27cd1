"""LazyArray: an NDArray whose value comes later; and the hook that shows every operator call to a listener.

A LazyArray belongs to an owner and carries a token; the owner alone knows what the token means. A listener sees
the calls of its own thread while it is installed; other threads are untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import types
from typing import Any

import numpy as np

from .hooks import CodeHook, Hooks, to_list_hook, to_method_hook
from .mxnet_compat import mx

__all__ = ["LazyArray", "Listener", "become_array", "let_change", "listening", "operator_name", "tell", "thread_state"]

NDArray = mx.nd.NDArray
_Base = NDArray.__mro__[1]                      # NDArrayBase: the class that has the slots
_HANDLE = _Base.__dict__["handle"]
_ADVANCED = (NDArray, np.ndarray, list, tuple, range)      # indices that pick single elements


class _LazyType(type(NDArray)):
    """Three places of mxnet/ndarray.py test `type(x) == NDArray`; a LazyArray must pass or they recurse for ever."""

    def __eq__(cls, other):
        return cls is other or other is NDArray

    __hash__ = type.__hash__


class LazyArray(NDArray, metaclass=_LazyType):
    """An NDArray without a value yet. Shape, dtype and context answer at once; the owner supplies the rest.

    The owner offers `spec_of(token) -> (shape, dtype)`, `context_of(token)`, `value_of(array) -> handle` for whoever
    needs the value, `numpy_of(array)` for whoever only reads it (None: through the handle), and `note_view(view, base,
    make)`. `has_values` says whether values can be had at all, `settled` whether they exist already. Whoever makes a
    LazyArray sets its owner and its token; another token lets it stand for another value, as an in-place operator does.
    """

    __slots__ = ()
    # The two slots of NDArray's base, under other names until the value exists. (As slots, because a recorded call
    # reads and writes them for every array: a property costs ten times as much.)
    owner, token = _HANDLE, _Base.__dict__["writable"]

    # NDArray's own would read `handle`, which asks for the value. These two do nothing, and no Python code runs for
    # them: a type is no method, so that Python calls `tuple()`.
    __init__ = object.__init__
    __del__ = tuple

    @property
    def handle(self):
        owner = _HANDLE.__get__(self)       # the handle, if another thread gives the array its value right now
        return owner if isinstance(owner, ctypes.c_void_p) else owner.value_of(self)

    writable = property(lambda self: True)
    shape = property(lambda self: self.owner.spec_of(self.token)[0])
    dtype = property(lambda self: np.dtype(self.owner.spec_of(self.token)[1]).type)
    # (One of its own each time, as in MXNet: `with x.context:` notes the device before in it.)
    context = property(lambda self: mx.Context(self.owner.context_of(self.token)))
    ctx = context
    stype = property(lambda self: "default")
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))

    def __repr__(self):
        if self.owner.has_values:
            self.wait_to_read()
            return repr(self)
        return f"<LazyArray {'x'.join(map(str, self.shape))} @{self.context}>"

    def __len__(self):
        return self.shape[0]

    def __float__(self):
        return float(self.asscalar())

    def __int__(self):
        return int(self.asscalar())

    def __array__(self, dtype=None, copy=None):     # else numpy would read element by element, and never end
        return np.asarray(self.asnumpy(), dtype)

    def asnumpy(self):
        owner = _HANDLE.__get__(self)
        value = None if isinstance(owner, ctypes.c_void_p) else owner.numpy_of(self)
        return NDArray.asnumpy(self) if value is None else value

    # ---- methods that MXNet writes without operators -----------------------------------------

    def astype(self, dtype, copy=True):
        dtype = np.dtype(dtype)
        return self if not copy and dtype == self.dtype else mx.nd.cast(self, dtype=dtype.name)

    def copy(self):
        return mx.nd.identity(self)

    def detach(self):
        def alone():
            self.wait_to_read()
            return NDArray.detach(self)

        listener = _local.listener
        if self.owner.settled or listener is None:
            return alone()
        # (No operator of MXNet: that of BlockGrad would stay on the tape.)
        return _view_of(self, listener.on_operator("_detach", [self], {}, None, alone), lambda array: array.detach())

    def reshape(self, *shape, **kwargs):
        if self.owner.settled:
            return NDArray.reshape(self, *shape, **kwargs)
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        arguments = {"shape": shape, **kwargs}
        return _view_of(self, mx.nd.reshape(self, **arguments), lambda array: array.reshape(**arguments))

    def __getitem__(self, key):
        """Basic indexing as operators: a slice, then a reshape for dropped and new axes."""
        if self.owner.settled:
            return NDArray.__getitem__(self, key)
        if type(key) is slice and key.step is None:     # what a loop over rows asks for
            shape = self.shape
            start, stop, _ = key.indices(shape[0])
            if start < stop and (start or stop < shape[0]):
                part = mx.nd.slice(self, begin=(start,), end=(stop,), step=(1,))
                return _view_of(self, part, lambda array: array[key])
        key = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, _ADVANCED) for k in key):
            return super().__getitem__(key)         # MXNet's own, which is written in operators
        begin, end, step, shape = _basic_index(self.shape, key)
        if (0 in shape or not shape) and self.owner.has_values:     # no operator makes nothing, or a number
            self.wait_to_read()
            return self[key]
        part = self
        if (begin, end) != ((0,) * self.ndim, self.shape) or set(step) != {1}:
            if self.ndim > _MANY_AXES:
                merged, begin, end, step = _merged_axes(self.shape, begin, end, step)
                part = mx.nd.reshape(part, shape=merged)
            part = mx.nd.slice(part, begin=begin, end=end, step=step)
        if part.shape != shape or part is self:
            part = mx.nd.reshape(part, shape=shape)
        return _view_of(self, part, lambda array: array[key])

    def __iter__(self):
        return (self[i] for i in range(self.shape[0]))


def _view_of(base, made, make):
    """Tell the owner that MXNet would give a view of an array here: `make(array)` would make it."""
    if type(base) is not LazyArray:         # the operator ran by itself, so that the array has its value
        return make(base)
    if isinstance(made, LazyArray):
        base.owner.note_view(made, base, make)
    return made


def _change_class(lazy, cls):
    lazy.__class__ = cls


def let_change(function):
    """Let `function(array, class)` change the class of LazyArrays: that of whoever lets them end in another way than
    Python does, which then refuses to change it."""
    global _change_class
    _change_class = function


class _OwnHandle(ctypes.c_void_p):
    """A handle that is freed with its last reference."""

    def __del__(self):
        mx.base._LIB.MXNDArrayFree(self)


def become_array(lazy, array):
    """Turn a LazyArray into an NDArray that takes over the handle of `array`; the handle."""
    handle = array.handle
    array.handle = None                 # freeing nothing is allowed
    if gc.is_finalized(lazy):           # the __del__ of another object asks, and its own was called already
        handle = _OwnHandle(handle.value)
    _change_class(lazy, NDArray)
    lazy.handle, lazy.writable = handle, True
    return handle


def _basic_index(shape, key):
    """Begin, end and step of every axis, and the shape that remains."""
    named = [k for k in key if k is not None and k is not Ellipsis]
    if len(named) > len(shape):
        raise IndexError(f"too many indices ({len(named)}) for an array of shape {shape}")
    if not any(k is Ellipsis for k in key):
        key = (*key, Ellipsis)
    at = next(i for i, k in enumerate(key) if k is Ellipsis)
    key = key[:at] + (slice(None),) * (len(shape) - len(named)) + key[at + 1:]
    begin, end, step, kept, axis = [], [], [], [], 0
    for k in key:
        if k is None:
            kept.append(1)
            continue
        n = shape[axis]
        if isinstance(k, slice):
            start, stop, stride = k.indices(n)
            kept.append(len(range(start, stop, stride)))
            begin.append(start), end.append(stop if stop >= 0 else None), step.append(stride)
        elif isinstance(k, (int, np.integer)):
            if not -n <= k < n:
                raise IndexError(f"index {k} is out of bounds for axis {axis} with size {n}")
            begin.append(int(k) % n), end.append(int(k) % n + 1), step.append(1)
        else:
            raise TypeError(f"an array cannot be indexed by {k!r}")
        axis += 1
    return tuple(begin), tuple(end), tuple(step), tuple(kept) or (() if mx.util.is_np_shape() else (1,))


_MANY_AXES = 4          # MXNet slices no more than one axis more, that of rows


def _merged_axes(shape, begin, end, step):
    """The same elements of the same memory by fewer axes: its shape, and begin, end and step of each axis."""
    sizes, parts = [], []
    for n, *part in zip(shape, begin, end, step):
        part = range(n)[slice(*part)]
        if parts and len(parts[-1]) == 1:           # a single entry: a stretch of the axis that both make
            first = parts[-1][0] * n
            sizes[-1], parts[-1] = sizes[-1] * n, range(first + part.start, first + part.stop, part.step)
        elif parts and parts[-1].step == 1 and part == range(n):
            sizes[-1], parts[-1] = sizes[-1] * n, range(parts[-1].start * n, parts[-1].stop * n)
        else:
            sizes.append(n), parts.append(part)
    return (tuple(sizes), tuple(r.start for r in parts), tuple(r.stop if r.stop >= 0 else None for r in parts),
            tuple(r.step for r in parts))


# ---- the hook --------------------------------------------------------------------------------


class Listener:
    """What a listener may override; each method sees calls of the thread that installed it.

    `vertices` is a table of short ways: id of a block (or what else a face marks) -> function of its arguments.
    `short_operator` is one for operators, (name, arrays, names and values of attributes) -> results, if it is not None;
    what it answers with NotImplemented goes to `on_operator`. Operators that take any number of arrays ask it first
    with a tuple of all that they were given.
    """

    vertices: Any = types.MappingProxyType({})
    short_operator: Any = None

    def on_operator(self, name, arrays, attrs, out, call):
        """An operator call; `call()` runs it as MXNet would. Returns what the caller gets."""
        return call()

    def on_parameter(self, parameter, array):
        """`Parameter.data` returns an array. Returns what the caller gets."""
        return array

    def on_block(self, block, args, call):
        """A block is called; `call()` runs it."""
        return call()

    def on_forward(self, block, args, call):
        """A hybrid block hands its arguments to its code, with its parameters; `call()` does that."""
        return call()

    def on_hybrid_call(self, block, args, call):
        """A hybridized block would run its cached graph; `call()` does that."""
        return call()


class _Local(threading.local):
    listener = None         # a class default: cheaper than getattr with a default on a missing name


_local = thread_state = _Local()         # thread_state.listener: who listens on this thread
_told = []                               # functions that are told, on the thread itself, who listens there from now on
_lock = threading.Lock()
_installed = 0
_register = mx.ndarray.register
_names: dict[int, str] = {}
_ARRAYS = frozenset((LazyArray, NDArray))
_NO_ATTRS = frozenset(("out", "name"))      # what MXNet's functions for operators take beside attributes


def tell(function):
    """Let a function know who listens on a thread, whenever that changes; it is called on the thread itself."""
    _told.append(function)


def _let_listen(listener):
    _local.listener = listener
    for function in _told:
        function(listener)


@contextlib.contextmanager
def listening(listener):
    """Show the operator calls of this thread to `listener` (None: to nobody)."""
    global _installed
    if listener is None and _local.listener is None:
        yield None                      # nobody listens as it is
        return
    with _lock:
        if _installed == 0:
            for hooks in (_hooks, *_code_hooks):
                hooks.install()
        _installed += 1
    before = _local.listener
    _let_listen(listener)
    try:
        yield listener
    finally:
        _let_listen(before)
        with _lock:
            _installed -= 1
            if _installed == 0:
                for hooks in (_hooks, *_code_hooks):
                    hooks.remove()


def _hooked_invoke(invoke):
    def hooked_invoke(handle, ndargs, keys, vals, out, is_np_op, output_is_list):
        listener = _local.listener
        if listener is None:
            return invoke(handle, ndargs, keys, vals, out, is_np_op, output_is_list)
        name = _names.get(handle) or operator_name(handle)
        if out is None and listener.short_operator is not None:
            made = listener.short_operator(name, ndargs, keys, vals)
            if made is not NotImplemented:
                return made
        return listener.on_operator(name, ndargs, dict(zip(keys, vals)), out,
                                    lambda: invoke(handle, ndargs, keys, vals, out, is_np_op, output_is_list))

    return hooked_invoke


def _hooked_verify(verify):
    def hooked_verify(op_name, func_name, args, out):
        """The same for arrays of every kind but numpy's; these two are none, and MXNet's way takes longer."""
        if out is not None or not _ARRAYS.issuperset(map(type, args)):
            verify(op_name, func_name, args, out)

    return hooked_verify


def _hooked_block_call(block_call):
    def hooked_block_call(self, *args):
        listener = _local.listener
        if listener is None:
            return block_call(self, *args)
        return listener.on_block(self, args, lambda: block_call(self, *args))

    return hooked_block_call


def _hooked_list(name):
    def make(function):
        def hooked_list(arrays, attrs):
            """An operator on any number of arrays, before MXNet looks at each of them."""
            listener = _local.listener
            if listener is not None and listener.short_operator is not None and _NO_ATTRS.isdisjoint(attrs):
                made = listener.short_operator(name, arrays, [*attrs], [*attrs.values()])
                if made is not NotImplemented:
                    return made
            return function(*arrays, **attrs)

        return hooked_list

    return make


def _hooked_forward(forward):
    def hooked_forward(self, x, *args):
        listener = _local.listener
        if listener is None:
            return forward(self, x, *args)
        return listener.on_forward(self, (x, *args), lambda: forward(self, x, *args))

    return hooked_forward


def _hooked_data(data):
    def hooked_data(self, ctx=None):
        array = data(self, ctx)
        listener = _local.listener
        return array if listener is None else listener.on_parameter(self, array)

    return hooked_data


def _hooked_cached(cached):
    def hooked_cached(self, *args):
        listener = _local.listener
        if listener is None:
            return cached(self, *args)
        return listener.on_hybrid_call(self, args, lambda: cached(self, *args))

    return hooked_cached


def _hooked_finish_init(finish_init):
    def hooked_finish_init(self):
        with listening(None):           # an initializer's operators are nobody's program
            return finish_init(self)

    return hooked_finish_init


# All but one ask for the listener of their own thread.
_hooks = Hooks((_register, "_imperative_invoke", _hooked_invoke),
               (_register, "_verify_all_legacy_ndarrays", _hooked_verify),
               (mx.gluon.HybridBlock, "forward", _hooked_forward),
               (mx.gluon.Parameter, "data", _hooked_data),
               (mx.gluon.Parameter, "_finish_deferred_init", _hooked_finish_init),
               (mx.gluon.HybridBlock, "_call_cached_op", _hooked_cached))
_code_hooks = (
    CodeHook(mx.gluon.Block, "__call__", to_method_hook, _hooked_block_call,
              Hooks((mx.gluon.Block, "__call__", _hooked_block_call))),
    *[CodeHook(mx.nd, name, to_list_hook, _hooked_list(real)) for name, real in
      (("add_n", "add_n"), ("ElementWiseSum", "add_n"), ("concat", "Concat"), ("Concat", "Concat"))])


def operator_name(handle):
    """MXNet's name of the operator behind a handle."""
    if handle not in _names:
        name = ctypes.c_char_p()
        mx.base.check_call(mx.base._LIB.MXSymbolGetAtomicSymbolName(ctypes.c_void_p(handle), ctypes.byref(name)))
        _names[handle] = name.value.decode()
    return _names[handle]
