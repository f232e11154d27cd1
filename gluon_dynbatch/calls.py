"""The calls of one flush: what a recorder appends to, and what owns the arrays that stand for their results."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from cavs_core import LazyArray, listening, needs_gradient, off_tape, thread_state
from cavs_core.mxnet_compat import mx

from .errors import DiscardedError
from .fastpath import FIRST, RETRY, common_owner, find_held, make_append, make_operators, make_table
from .kinds import class_kind, entry_kind
from .results import Flushed
from .runtime import run_calls
from .signature import CallClass, Signature
from .values import DEVICES, NO_ROWS, SPECS, Stretches, array_spec, data_spec, memory_of

__all__ = ["CHECKED", "NO_ARRAY", "BaseSparseNDArray", "Calls", "Entry", "Owner", "owner_of"]

CHECKED = "gather_nd"           # the operator that raises for indices out of range; others bring them into range
NDArray = mx.nd.NDArray
BaseSparseNDArray = mx.nd.sparse.BaseSparseNDArray


class Owner:
    """What owns the LazyArrays of one spec in one flush: arrays with one owner look the same to a signature.

    The array of a parameter has an owner of its own (`parameter` is its id, else 0): calls with another weight are
    calls of another class, so that every class has one weight, and one product for all its rows.
    """

    __slots__ = ("calls", "spec", "parameter")
    has_values = True

    def __init__(self, calls: Calls, spec: int, parameter: int = 0):
        self.calls, self.spec, self.parameter = calls, spec, parameter

    @property
    def settled(self) -> bool:
        return self.calls.flushed is not None

    def spec_of(self, token: int) -> tuple[tuple[int, ...], str]:
        spec = SPECS[self.spec]
        return spec.shape, spec.dtype

    def context_of(self, token: int) -> Any:
        return DEVICES[self.spec]

    def value_of(self, array: LazyArray) -> Any:
        return self.calls.value_of(array)

    def numpy_of(self, array: LazyArray) -> Any:
        return self.calls.numpy_of(array)

    def backward(self, heads: list[LazyArray], head_grads: list[Any], retain_graph: bool, over_tape: Any) -> bool:
        return self.calls.backward(heads, head_grads, retain_graph, over_tape)

    def note_view(self, view: LazyArray, base: LazyArray, make: Any) -> None:
        self.calls.note_view(view, base, make)


class Entry(NamedTuple):
    """What a call on operands of known specs is.

    Attributes
    ----------
    number : its name in the log
    signature : of the call; calls that only name rows share their class with others
    rows : the positions that a call occupies
    numbers : for each operand, whether it stands in the log as it is and not by its token
    owners : of the results
    append : (operands) -> results; records a call. RETRY if the calls were flushed from another thread meanwhile
    """

    number: int
    signature: Signature
    cls: CallClass
    rows: int
    numbers: tuple[bool, ...]
    owners: tuple[Owner, ...]
    append: Callable[[list[LazyArray]], Any]


NO_ARRAY = LazyArray()          # stands for what cannot be an operand: no entry is known for its owner
NO_ARRAY.owner = None


def owner_of(array: Any) -> Any:
    """Who owns a LazyArray; None for others, and for one that another thread gives its value right now."""
    try:
        return array.owner if type(array) is LazyArray else None
    except AttributeError:
        return None


def _check_indices(indices: Any, shape: tuple[int, ...]) -> None:
    """Raise where MXNet does."""
    with listening(None):
        numbers = indices.asnumpy()
    for axis, (size, part) in enumerate(zip(shape, numbers)):
        outside = part[(part < -size) | (part > size - 1)]
        if len(outside):
            raise IndexError(f"{CHECKED}: index {outside[0]} is out of bounds for axis {axis} with size {size} of an "
                             f"array of shape {shape}")


def _has_gradient(array: Any) -> bool:
    with listening(None):           # the first time it takes operators to find out
        return needs_gradient(array)


class Calls:
    """The calls since the last flush.

    They are appended to by one thread, without a lock, and may be flushed by another. A flush first is one of the
    `watchers`, then takes the log; a call that finds a watcher asks whether it is among those that were taken.
    """

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.most = recorder.scope.config.max_pending
        self.classes: list[CallClass] = []
        self.by_signature: dict[Any, CallClass] = {}
        self.num_alike: Counter[Any] = Counter()        # see `class_kind`
        self.entries: list[Entry] = []
        self.kinds: list[bytes] = []            # what they are in all flushes, see kinds.py ..
        self.entry_classes: list[int] = []      # .. and the number of the class of each
        self.by_key: dict[Any, Any] = {}        # exact specs of the operands -> what the call is
        self.owners: dict[int, Owner] = {}      # spec -> who owns the arrays
        self.short: dict[Any, tuple[Any, dict[Any, Entry], Any]] = {}        # see `ways`
        self.forms: dict[Any, dict[Any, Any]] = {}          # (state, vertex, form ..) -> the entries of its function
        self.reads: set[tuple[int, str]] = set()            # attributes that the code of vertices reads: block, name
        self.log = bytearray()                  # see fastpath.py
        self.made: list[int] = []               # all tokens of results
        self.num_taken = 0                      # values of the calls that were flushed
        # Who has to be asked behind every call. (A list that functions are bound to: none has to look for it here.)
        self.watchers: list[str] = [] if self.most is None else ["max_pending"]
        self.num_watched = 0
        self.leaves: list[Any] = []             # arrays and numbers
        self.leaf_spec: list[int] = []
        self.leaf_of: dict[Any, LazyArray] = {}             # id of an array -> what stands for it
        self.memory = Stretches()               # of the arrays that recorded calls read, as far as somebody asked
        self.num_leaves_seen = self.num_classes_seen = 0
        self.checks: list[tuple[LazyArray, Any, tuple[int, ...]]] = []      # indices, and what they are of: its shape
        self.views: dict[int, tuple[int, Any]] = {}         # value -> (the value it is a view of, how to make it)
        self.viewed: set[int] = set()
        self.started = time.perf_counter()
        self.lock = threading.RLock()
        self.sealed = False
        self.flushed: Flushed | None = None
        self.failure: BaseException | None = None

    # ---- values ------------------------------------------------------------------------------

    def value_of(self, array: LazyArray) -> Any:
        """The handle of an array that somebody needs now: everything recorded so far runs."""
        self.flush("a value was needed")
        assert self.flushed is not None
        with self.lock, listening(None):
            if type(array) is not LazyArray:    # another thread was faster
                return array.handle
            return self.flushed.materialise(array)

    def numpy_of(self, array: LazyArray) -> Any:
        """The value of an array for whoever only reads it; None if the array must become an NDArray."""
        if self.flushed is None:
            self.flush("a value was needed")
        flushed = self.flushed
        assert flushed is not None
        with self.lock:
            if type(array) is not LazyArray:
                return None
            value = flushed.number(array.token - FIRST)
            if thread_state.listener is None:   # as a rule: losses are read behind the scope
                return flushed.numpy(value)
            with listening(None):
                return flushed.numpy(value)

    def backward(self, heads: list[LazyArray], head_grads: list[Any], retain_graph: bool, over_tape: Any) -> bool:
        """A backward pass from these arrays alone; False if it must go over the tape."""
        if common_owner(heads) is None and any(    # (else it is the one who was asked)
                not isinstance(x.owner, Owner) or x.owner.calls is not self for x in heads):
            return False
        self.flush("backward was called")
        assert self.flushed is not None
        with self.lock, off_tape():
            values = self.flushed.numbers([x.token for x in heads])
            grads = [None if g is None else g.asnumpy() for g in head_grads]
            return self.flushed.backward(values, grads, retain_graph, over_tape)

    def flush(self, reason: str) -> None:
        with self.lock:
            if self.failure is not None:
                raise self.failure
            if self.flushed is None and self.log:
                self.recorder.start_new_calls(self)     # first: who finds these sealed goes on with the new ones
                self.sealed = True
                self.watchers.append("a flush")
                try:
                    with off_tape():
                        checks, self.checks = self.checks, []       # (with the indices, so that they live)
                        self.flushed = run_calls(self, reason)
                        for operand, array, shape in checks:
                            _check_indices(array if operand.token < 0 else operand, shape)
                except BaseException as error:
                    self.failure, self.flushed = error, None        # nobody shall read what came of wrong indices
                    raise

    def forget(self) -> None:
        """Drop what only recording needs, and with it the ring of owners and calls that would keep all alive."""
        self.log, self.made, self.entries = bytearray(), [], []
        for table in (self.by_key, self.owners, self.short, self.forms, self.leaf_of):
            table.clear()

    def discard(self) -> None:
        """Forget the calls: an exception left the scope."""
        with self.lock:
            if self.flushed is None:
                self.failure = DiscardedError(
                    "this array was recorded in a batching scope that an exception left before it was computed")
                self.checks = []
                find_held(self.made, recycles=True)
                self.forget()

    def too_late(self, token: int) -> bool:
        """Whether the call that made `token` is not among those that another thread has flushed."""
        with self.lock:
            if self.sealed:
                return token - FIRST >= self.num_taken
            self.num_watched += 1
            if self.num_watched == self.most:
                self.flush("max_pending calls were recorded")
            return False

    # ---- operands ----------------------------------------------------------------------------

    def operand(self, array: Any, by_rows: bool = False) -> LazyArray:
        """The array itself, if it stands for a value of these calls, else what stands for it."""
        owner = owner_of(array)
        if isinstance(owner, Owner) and owner.calls is self:
            return array
        return self.index(array) if by_rows else self.outside(array)

    def outside(self, array: Any) -> LazyArray:
        """What stands for an outside array, one and the same each time; NO_ARRAY if it cannot be an operand."""
        known = self.leaf_of.get(id(array))
        if known is not None:
            return known
        if not isinstance(array, NDArray) or self.recorder.why_apart(array):
            return NO_ARRAY
        spec = array_spec(array)
        if spec == NO_ROWS:
            return NO_ARRAY
        known = self.leaf_of.get((id(array), "by rows"))
        if known is None or not _has_gradient(array):       # (an array has one gradient, and so it is one leaf)
            known = self._leaf(array, spec)
        self.leaf_of[id(array)] = known
        if id(array) in self.recorder.parameters:
            known.owner = Owner(self, known.owner.spec, id(array))
        return known

    def table(self, array: Any) -> LazyArray:
        """What stands for the array of a parameter that is only looked up, whose gradient is sparse."""
        key = (id(array), "looked up")
        leaf = self.leaf_of.get(key)
        if leaf is None:
            leaf = self.leaf_of[key] = self._leaf(array, array_spec(array))
            leaf.owner = Owner(self, leaf.owner.spec, id(array))
        return leaf

    def index(self, array: Any) -> LazyArray:
        """What stands for an outside array that is stored by rows, unless it is known and asks for a gradient."""
        key = (id(array), "by rows")
        leaf = self.leaf_of.get(key)
        if leaf is not None:
            return leaf
        if not isinstance(array, NDArray) or self.recorder.why_apart(array):
            return NO_ARRAY
        leaf, spec = self.leaf_of.get(id(array)), array_spec(array, by_rows=True)
        if spec == NO_ROWS:
            return NO_ARRAY
        if leaf is None or (leaf.owner.spec != spec and not _has_gradient(array)):
            leaf = self._leaf(array, spec)
        self.leaf_of[key] = leaf
        return leaf

    def word(self, number: Any) -> LazyArray:
        """What stands for a word id, which gets into the log as it is: no leaf."""
        made = LazyArray()
        made.owner, made.token = self.owner(self.recorder.number_spec), int(number)
        return made

    def data(self, value: Any) -> LazyArray:
        """What stands for a Python number or numpy array; NO_ARRAY if it cannot be an operand."""
        recorder = self.recorder
        spec = recorder.number_spec if type(value) is float else data_spec(value, recorder.context)
        return NO_ARRAY if spec == NO_ROWS else self._leaf(value, spec)

    def _leaf(self, value: Any, spec: int) -> LazyArray:
        self.leaves.append(value)
        self.leaf_spec.append(spec)
        leaf = LazyArray()
        leaf.owner, leaf.token = self.owner(spec), -len(self.leaves)
        return leaf

    def owner(self, spec: int) -> Owner:
        owner = self.owners.get(spec)
        if owner is None:                       # (never asked for twice: another thread may empty the table)
            owner = self.owners[spec] = Owner(self, spec)
        return owner

    def note_view(self, view: LazyArray, base: LazyArray, make: Any) -> None:
        if view.owner.calls is base.owner.calls:
            # Not by their tokens, which must be nobody's but their arrays'.
            self.views[view.token - FIRST] = (base.token - FIRST, make)
            self.viewed.add(base.token - FIRST)

    def shares_memory(self, array: LazyArray) -> bool:
        """Whether an array of these calls is a view, or has one."""
        value = array.token - FIRST
        return value in self.views or value in self.viewed

    def uses_parameter(self, parameter: Any) -> bool:
        """Whether a recorded vertex will ask the parameter for its array."""
        return any(p.parameter is parameter for c in self.classes for p in c.signature.params)

    def reads_memory_of(self, array: Any) -> bool:
        """Whether an array overlaps one that recorded calls read: itself, a view of it, or what it is a view of."""
        if isinstance(array, BaseSparseNDArray):        # no recorded call reads one
            return False
        if self.num_classes_seen < len(self.classes):   # (who replaces the array of a parameter flushes before)
            for cls in self.classes[self.num_classes_seen:]:
                self.memory.add(memory_of(p.parameter.data(cls.signature.context)) for p in cls.signature.params)
            self.num_classes_seen = len(self.classes)
        self.memory.add(memory_of(leaf) for leaf in self.leaves[self.num_leaves_seen:] if isinstance(leaf, NDArray))
        self.num_leaves_seen = len(self.leaves)
        return self.memory.overlaps(*memory_of(array))

    # ---- entries -----------------------------------------------------------------------------

    def ways(self, state: Any) -> tuple[Any, dict[Any, Entry], Any]:
        """The short ways of a state of autograd: vertex -> function of its arguments, operator -> entry, and what
        records such an operator."""
        found = self.short.get(state)           # (never asked for twice: another thread may empty the table)
        if found is None:
            entries: dict[Any, Entry] = {}
            found = self.short[state] = make_table(), entries, make_operators(self, entries)
        return found

    def new_entry(self, signature: Signature, recorded: bool, rows: int = 1, where: str = "", identity: Any = None,
                  numbers: tuple[bool, ...] = (), parameters: tuple[int, ...] = ()) -> Entry:
        key = (signature, recorded, parameters)
        if signature.alias >= 0:                # slices of any length and place are one class: nobody runs them
            key = ("names rows", recorded, len(signature.operand_specs))
        cls = self.by_signature.get(key)
        if cls is None:
            kind = class_kind(signature, recorded, self.num_alike)
            cls = CallClass(len(self.classes), kind, signature, recorded, where, identity)
            if self.classes and self.classes[0].signature.context != signature.context:
                # A flush runs on one device. After it, the caller records the call anew.
                self.flush("a call on another device was recorded")
                return _sealed_entry(signature, cls)
            if cls.number < len(self.classes):  # the collector has run code that records: another class has the number
                return self.new_entry(signature, recorded, rows, where, identity, numbers, parameters)
            self.by_signature[key] = cls
            self.classes.append(cls)
        number, num_operands = len(self.entries), len(signature.operand_specs) - signature.slots
        specs, numbers = signature.output_specs(rows), numbers or (False,) * num_operands
        owners = tuple(map(self.owner, specs))
        append = make_append(num_operands, signature.structure, len(owners), signature.slots)(self, number, owners)
        if self.sealed:                 # asked behind it: it may be bound to a log that nobody reads
            return _sealed_entry(signature, cls)
        entry = Entry(number, signature, cls, rows, numbers, owners, append)
        kind = [entry_kind(cls.kind, signature, rows, numbers, specs, self.recorder.number_spec)]
        of_class = [cls.number]
        if number < len(self.entries):  # as above
            return self.new_entry(signature, recorded, rows, where, identity, numbers, parameters)
        # By its place: an interrupt may have left something of an entry that nobody got.
        self.kinds[number:] = kind
        self.entry_classes[number:] = of_class
        self.entries.append(entry)      # (if another thread flushes now, whoever appends to the entry has to try again)
        return entry


def _sealed_entry(signature: Signature, cls: CallClass) -> Entry:
    """Of calls that are being flushed: whoever appends to it has to try again."""
    return Entry(-1, signature, cls, 1, (), (), lambda operands: RETRY)
