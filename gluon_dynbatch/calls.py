"""The calls of one flush: what a recorder appends to, and what owns the arrays that stand for their results."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, NamedTuple

from cavs_core import LazyArray, listening
from cavs_core.mxnet_compat import mx

from .errors import DiscardedError
from .runtime import Flushed, run_calls
from .signature import Signature
from .values import DEVICES, SPECS, array_spec, data_spec, memory_of

__all__ = ["RETRY", "CallClass", "Calls", "Entry"]

NDArray = mx.nd.NDArray
RETRY = object()                                # a call came too late for the calls that it was meant for
_first_tokens = itertools.count(1 << 32, 1 << 32)


class CallClass:
    """Calls with one signature, recorded under one state of autograd: they may share launches."""

    __slots__ = ("number", "signature", "recorded", "where", "identity")

    def __init__(self, number: int, signature: Signature, recorded: bool, where: str, identity: Any):
        self.number, self.signature, self.recorded, self.where = number, signature, recorded, where
        self.identity = identity                # held, so that its id stays its own while the class exists


class Entry(NamedTuple):
    """What a call with known operands is: its class, the positions that it occupies, and what it gives."""

    class_number: int
    rows: int
    output_specs: list[int]
    signature: Signature


class Calls:
    """The calls since the last flush. It owns the LazyArrays that stand for their results."""

    has_values = True

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.most = recorder.scope.config.max_pending or float("inf")
        self.classes: list[CallClass] = []
        self.by_key: dict[Any, Entry] = {}      # exact specs of the operands -> what the call is
        self.by_signature: dict[Any, CallClass] = {}
        # The log is appended to in one step, so that a flush from another thread sees whole calls; the three
        # columns exist once it is sealed.
        self.log: list[tuple[int, int, list[int]]] = []     # (class, positions, operand tokens)
        self.sealed = False
        self.call_class: tuple[int, ...] = ()
        self.call_rows: tuple[int, ...] = ()
        self.operand_tokens: tuple[list[int], ...] = ()
        # Tokens of one flush are those of no other: a token that `value_spec` does not know is no value of these calls.
        self.first_token = self.next_token = next(_first_tokens)
        self.value_spec: dict[int, int] = {}    # token -> spec number, in the order of the tokens
        self.by_pattern: dict[Any, Entry] = {}
        self.leaves: list[Any] = []             # arrays and numbers
        self.leaf_spec: list[int] = []
        self.leaf_tokens: dict[Any, int] = {}
        self.leaf_memory: list[tuple[int, int]] = []
        self.views: dict[int, tuple[int, Any]] = {}         # value -> (the value it is a view of, how to make it)
        self.viewed: set[int] = set()
        self.dropped: list[int] = []
        self.released = self.dropped.append     # called by LazyArray.__del__
        self.started = time.perf_counter()
        self.lock = threading.RLock()
        self.flushed: Flushed | None = None
        self.failure: BaseException | None = None

    # ---- the owner of LazyArrays -------------------------------------------------------------

    @property
    def settled(self) -> bool:
        return self.flushed is not None

    def spec_of(self, token: int) -> tuple[tuple[int, ...], str]:
        spec = SPECS[self.value_spec[token]]
        return spec.shape, spec.dtype

    def context_of(self, token: int) -> Any:
        return DEVICES[self.value_spec[token]]

    def value_of(self, array: LazyArray) -> Any:
        """The handle of an array that somebody needs now: everything recorded so far runs."""
        self.flush("a value was needed")
        assert self.flushed is not None
        with self.lock, listening(None):
            return self.flushed.materialise(array, self)

    def flush(self, reason: str) -> None:
        with self.lock:
            if self.failure is not None:
                raise self.failure
            if self.flushed is None and self.log:
                self.sealed = True
                self.recorder.start_new_calls(self)
                self.call_class, self.call_rows, self.operand_tokens = zip(*self.log)
                try:
                    with listening(None):       # what the engine runs is nobody's call
                        self.flushed = run_calls(self, reason)
                except BaseException as error:
                    self.failure = error
                    raise

    def discard(self) -> None:
        """Forget the calls: an exception left the scope."""
        with self.lock:
            if self.flushed is None:
                self.failure = DiscardedError(
                    "this array was recorded in a batching scope that an exception left before it was computed")

    # ---- recording ---------------------------------------------------------------------------

    def leaf_token(self, array: Any) -> int:
        """The token of an outside array; the same array has one token."""
        token = self.leaf_tokens.get(id(array))
        if token is None:
            self.leaves.append(array)
            self.leaf_spec.append(array_spec(array))
            token = self.leaf_tokens[id(array)] = -len(self.leaves)
        return token

    def index_token(self, array: Any) -> int:
        """The token of an outside array that is stored by rows."""
        key = (id(array), "by rows")
        if key not in self.leaf_tokens:
            self.leaves.append(array)
            self.leaf_spec.append(array_spec(array, by_rows=True))
            self.leaf_tokens[key] = -len(self.leaves)
        return self.leaf_tokens[key]

    def note_view(self, view: LazyArray, base: LazyArray, make: Any) -> None:
        if view.owner is self and base.owner is self:
            self.views[view.token] = (base.token, make)
            self.viewed.add(base.token)

    def uses_parameter(self, parameter: Any) -> bool:
        """Whether a recorded vertex will ask the parameter for its array."""
        return any(p.parameter is parameter for c in self.classes for p in c.signature.params)

    def reads_memory_of(self, array: Any) -> bool:
        """Whether an array overlaps one that recorded calls read: itself, a view of it, or what it is a view of."""
        for leaf in self.leaves[len(self.leaf_memory):]:
            self.leaf_memory.append(memory_of(leaf) if isinstance(leaf, NDArray) else (0, 0))
        start, stop = memory_of(array)
        params = [memory_of(p.parameter.data(c.signature.context)) for c in self.classes for p in c.signature.params]
        return any(start < other_stop and other_start < stop for other_start, other_stop in self.leaf_memory + params)

    def data_token(self, value: Any, context: Any) -> int:
        """The token of a Python number or numpy array."""
        self.leaves.append(value)
        self.leaf_spec.append(data_spec(value, context))
        return -len(self.leaves)

    def append(self, entry: Entry, tokens: list[int]) -> Any:
        """Record one call; its result, or RETRY if the calls were flushed from another thread meanwhile."""
        number, rows, output_specs, signature = entry
        token = self.next_token
        self.next_token = token + len(output_specs)
        self.log.append((number, rows, tokens))
        if self.sealed and self._came_too_late():
            return RETRY
        result = signature.results(self, token, self.value_spec, output_specs)
        if len(self.log) >= self.most:
            self.flush("max_pending calls were recorded")
        return result

    def _came_too_late(self) -> bool:
        """Whether the last call is not among those that another thread is flushing."""
        with self.lock:
            return len(self.log) > len(self.call_class)

    def new_entry(self, key: Any, signature: Signature, rows: int, recorded: bool, where: str = "",
                  identity: Any = None) -> Entry:
        cls = self.by_signature.get((signature, recorded))
        if cls is None:
            if self.classes and self.classes[0].signature.context != signature.context:
                # A flush runs on one device. After it, `append` tells the caller to record the call anew.
                self.flush("a call on another device was recorded")
            cls = self.by_signature[signature, recorded] = CallClass(
                len(self.classes), signature, recorded, where, identity)
            self.classes.append(cls)
        entry = self.by_key[key] = Entry(cls.number, rows, signature.output_specs(rows), signature)
        return entry
