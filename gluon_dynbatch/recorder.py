"""Recording: every operator and every vertex call inside a scope becomes a call; nothing runs until somebody asks."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from cavs_core import CodeReads, LazyArray, Listener, ProgramError, TraceError, inactive, listening, supports
from cavs_core.mxnet_compat import MXNetError, autograd, gluon, mx

from .calls import CHECKED, NO_ARRAY, BaseSparseNDArray, Calls, Entry, Owner, owner_of
from .fastpath import KEYED, RETRY, common_owner, make_recorder, operand_form
from .known_vertices import KnownVertex, find_vertex, fit_graph, note_call, title_of, vertex_key
from .signature import (
    ANY_NUMBER,
    INDEX_OPERANDS,
    Signature,
    any_number_signature,
    operator_signature,
    takes_any_number,
)
from .values import DEVICES, SPECS, WIDTHS, as_arrays, data_spec, zeros

__all__ = ["Recorder"]

NDArray = mx.nd.NDArray
_PLAIN = {LazyArray, NDArray, list, tuple, type(None), bool, int, float, str}
_DATA = (int, float, np.ndarray, np.generic)
_signatures: dict[Any, Signature] = {}          # operators, for the life of the process


class Recorder(Listener):
    """Listens to one scope: decides what is recorded, what runs alone, and what makes everything run."""

    __slots__ = ("vertices",)       # (beside the dict that it inherits: C finds it without asking for an attribute)

    def __init__(self, scope: Any):
        self.scope = scope
        self.thread = threading.get_ident()     # that records; others may flush
        self.records_vertices = scope.config.granularity != "op"
        self.context = mx.current_context()     # of numbers, which have no device of their own
        self.number_spec = data_spec(0, self.context)
        self.recording, self.training = autograd.is_recording(), autograd.is_training()
        self._sparse_grads: dict[int, Any] = {}     # arrays of parameters whose gradient is row_sparse
        self._updated: dict[int, Any] = {}          # arrays that backward passes write
        self._refused: dict[Any, str] = {}      # vertex key -> why it has no program
        self._symbolic: dict[int, Any] = {}     # id of a hybridized block -> it, and why only MXNet can run it
        self.parameters: dict[int, Any] = {}        # id of an array -> the parameter that it is of, and the array
        self._where: list[Any] = []              # the blocks that are being called, the innermost last
        self.calls = Calls(self)
        self._choose_short_ways()

    def start_new_calls(self, old: Calls) -> None:
        if self.calls is old:
            self.calls = Calls(self)
            self._choose_short_ways()

    def switch(self, what: str, on: bool) -> None:
        """Autograd begins or ends "recording" or "training"."""
        setattr(self, what, on)
        self._choose_short_ways()

    def _choose_short_ways(self) -> None:
        self.vertices, self._operators, self.short_operator = self.calls.ways((self.recording, self.training))

    def why_apart(self, array: Any) -> str:
        """Why no recorded call may read an array; empty if it may."""
        if isinstance(array, BaseSparseNDArray):
            return "is sparse"
        if isinstance(array, mx.np.ndarray):
            return "is of mx.np"
        return ("has a sparse gradient" if id(array) in self._sparse_grads else
                "is updated by backward passes" if id(array) in self._updated else "")

    def alone(self, reason: str) -> None:
        """Count a call that runs by itself."""
        fallbacks = self.scope.stats.fallbacks
        fallbacks[reason] = fallbacks.get(reason, 0) + 1

    # ---- operators ---------------------------------------------------------------------------

    def on_operator(self, name, arrays, attrs, out, call):
        if out is not None:
            return self._on_write(name, arrays, attrs, out, call)
        if not arrays:                          # makes an array from nothing: a leaf
            return zeros(attrs, call) if name == "_zeros" else call()
        if name in ANY_NUMBER:
            entry = self._list_entry(name, attrs, common_owner(arrays), len(arrays))
            if entry is not None:
                result = entry.append(arrays)
                if result is not RETRY:
                    return result
            if name == "add_n" and len(arrays) > _TERMS and not self._are_rows(arrays):
                return _add_in_parts(arrays)
        if name in _NEVER_SHORT or not supports(name):
            return self._record_operator(name, arrays, attrs, call)
        outside = self.calls.outside
        operands = [x if type(x) is LazyArray else outside(x) for x in arrays]
        try:
            entry = self._operators.get((name, *attrs.items(), *[x.owner for x in operands]))
        except (TypeError, AttributeError):     # an attribute that is a list; an operand that gets its value right now
            entry = None
        if entry is not None:
            result = entry.append(operands)
            if result is not RETRY:
                return result
        return self._record_operator(name, arrays, attrs, call)

    def _list_entry(self, name: str, attrs: dict[str, Any], owner: Any, count: int) -> Entry | None:
        """What an operator call on any number of rows of one owner is; None if it is none."""
        calls, short, key = self.calls, self._operators, _list_key(name, attrs, owner, count)
        entry = short.get(key)
        if entry is None and isinstance(owner, Owner) and owner.calls is calls and (
                takes_any_number(name, attrs, (owner.spec,) * count)):
            entry = self._operator_entry(calls, name, attrs, [owner] * count)
            if entry is not None:
                short[key] = entry
        return entry

    def _are_rows(self, arrays: Any) -> bool:
        """Whether all arrays are single rows of one spec."""
        owners = {owner_of(self.calls.operand(x)) for x in arrays}
        specs = {owner.spec for owner in owners if owner is not None}
        return None not in owners and len(specs) == 1 and WIDTHS[max(specs)] == 1

    def _record_operator(self, name, arrays, attrs, call):
        """The general way: operands of every origin."""
        calls, short = self.calls, self._operators
        if name in _UPDATED and (self.training or self.recording) and str(attrs.get("use_global_stats")) not in _TRUE:
            # On the tape also in predict mode: MXNet's backward pass does not know how its forward pass ran.
            for k in _UPDATED[name]:
                self.before_write(arrays[k])
                self._updated[id(arrays[k])] = arrays[k]
            self.alone(f"operator {name} is trained: its statistics couple the samples")
            return call()
        operands = self._operands(name, arrays, calls)
        if operands is None:
            self.alone(self._why_alone(name, arrays))
            if name in _READS_NO_VIEW and self.recording:
                with listening(None):
                    arrays[:] = [x.copy() for x in arrays]
            return call()
        owners = [owner_of(x) for x in operands]
        if None in owners:                      # an operand gets its value right now: it comes from outside then
            return self._record_operator(name, arrays, attrs, call)
        entry = self._operator_entry(calls, name, attrs, owners)
        if entry is None:
            return call()
        result = entry.append(operands)
        if result is RETRY:
            return self._record_operator(name, arrays, attrs, call)
        if name == CHECKED:
            calls.checks.append((operands[1], arrays[1], operands[0].shape))
        if name not in _NEVER_SHORT:
            with contextlib.suppress(TypeError):        # an attribute that is a list
                short[(name, *attrs.items(), *owners)] = entry
        if entry.signature.slots and len(set(owners)) == 1:
            short[_list_key(name, attrs, owners[0], len(owners))] = entry
        return result

    def _why_alone(self, name: str, arrays: Any) -> str:
        if not supports(name):
            return f"operator {name} is not in the op table"
        return f"operator {name}: an operand {next(filter(None, map(self.why_apart, arrays)), 'has no rows')}"

    def on_parameter(self, parameter, array):
        self.parameters[id(array)] = parameter, array
        if parameter._grad_stype != "default":
            self._sparse_grads[id(array)] = array
        return array

    def _operands(self, name: str, arrays: Any, calls: Calls) -> list[LazyArray] | None:
        """What stands for the operands of an operator call, or None if it cannot be batched."""
        if not supports(name):
            return None
        by_rows = INDEX_OPERANDS.get(name, ())
        operands = [calls.operand(x, k in by_rows) for k, x in enumerate(arrays)]
        if name == "Embedding" and operands[1] is NO_ARRAY and id(arrays[1]) in self._sparse_grads:
            operands[1] = calls.table(arrays[1])        # its gradient is made of the rows that are looked up
        if any(x is NO_ARRAY for x in operands):
            return None
        return operands

    def _operator_entry(self, calls: Calls, name: str, attrs: dict[str, Any], owners: list[Any]) -> Entry | None:
        """What an operator call on operands of these owners is, or None if it must run alone."""
        specs = tuple([owner.spec for owner in owners])
        parameters = tuple([owner.parameter for owner in owners])
        listed = takes_any_number(name, attrs, specs)
        look: Any = "any number" if listed else tuple(attrs.items())
        try:
            exact = (name, look, specs[:1] if listed else specs, self.training)
            signature = _signatures.get(exact)
        except TypeError:                       # an attribute that is a list
            look = str(attrs)
            exact = (name, look, specs, self.training)
            signature = _signatures.get(exact)
        if signature is None:
            try:
                signature = (any_number_signature(name, specs[0]) if listed else
                             operator_signature(name, attrs, specs, self.training))
            except ProgramError as error:
                self.alone(f"operator {name}: {_first_line(error)}")
                return None
            if signature.ragged and not listed:     # one signature for every number of rows
                general = (name, look, signature.operand_specs, signature.split, self.training)
                signature = _signatures.setdefault(general, signature)
            _signatures[exact] = signature
        rows = 1 if not signature.ragged else len(specs) if listed else SPECS[specs[0]].shape[0]
        parameters = parameters if not listed else ()
        key = (signature, self.recording, rows, parameters)     # (small: as many are freed as there are entries)
        entry = calls.by_key.get(key)
        if entry is None:
            where = title_of(self._where[-1]) if self._where else ""
            entry = calls.by_key[key] = calls.new_entry(signature, self.recording, rows, where, parameters=parameters)
        return entry

    def _on_write(self, name, arrays, attrs, out, call):
        """An operator that writes into an array that exists: x += y only gives x a new value, all else runs now.

        Under `record` it runs now as well: MXNet refuses to write into an array that is on its tape.
        """
        calls = self.calls
        operands = self._operands(name, arrays, calls) if arrays and not self.recording else None
        owners = [owner_of(x) for x in operands or ()]
        if (operands is not None and None not in owners and type(out) is LazyArray and calls.operand(out) is out
                and not calls.shares_memory(out)):
            entry = self._operator_entry(calls, name, attrs, owners)
            if entry is not None and entry.owners == (owner_of(out),):
                new = entry.append(operands)
                if new is not RETRY:
                    out.token = new.token       # the old value dies, unless a recorded call reads it
                    return out
        for target in out if isinstance(out, (list, tuple)) else (out,):
            self.before_write(target)
        return call()

    def before_write(self, target: Any) -> None:
        """Run what still has to read an array that is about to be written."""
        calls = self.calls
        if isinstance(target, LazyArray):
            target.wait_to_read()
        elif calls.log and calls.reads_memory_of(target):
            calls.flush("an array was written that recorded calls read")

    def before_change(self, block: Any, name: str, value: Any) -> None:
        """Run the calls of a block whose code reads an attribute that is about to get another value."""
        if (id(block), name) in self.calls.reads and CodeReads.is_change(block, name, value):
            self.calls.flush("an attribute was set that the code of recorded calls reads")

    # ---- blocks ------------------------------------------------------------------------------

    def on_block(self, block, args, call):
        if block._forward_hooks or block._forward_pre_hooks:
            return call()
        if isinstance(block, gluon.HybridBlock) and block._active and self.records_vertices:
            record = self.vertices.get(id(block))
            if record is not None:
                return record(args)
            if not fit_graph(args):            # MXNet has its own words for that
                return call()
            return self.record_vertex(block, None, type(block).forward, block, args)
        self._where.append(block)
        try:
            return self.on_forward(block, args, call) if type(block).forward is gluon.HybridBlock.forward else call()
        finally:
            self._where.pop()

    def on_forward(self, block, args, call):
        """MXNet first looks for all arrays and symbols in the arguments. For these there is nothing to be found."""
        if block._active or not args or not _PLAIN.issuperset(map(type, args)):
            return call()
        owner, ctx, params = owner_of(args[0]), mx.current_context(), block._reg_params
        if not isinstance(owner, Owner) or DEVICES[owner.spec] != ctx or None in [p._data for p in params.values()]:
            return call()
        return block.hybrid_forward(mx.nd, *args, **{name: p.data(ctx) for name, p in params.items()})

    def on_hybrid_call(self, block, args, call):
        """A hybridized block that could not be a vertex: operator by operator, through its own code."""
        if isinstance(block, gluon.SymbolBlock):
            return self._by_graph(block, "is a stored graph without code", call)
        if not fit_graph(args):
            return self._by_graph(block, "has arguments that a hybridized block does not take", call)
        if id(block) not in self._symbolic:
            try:
                with inactive(block):
                    made = block.forward(*args)
                note_call(block, args)
                return made
            except MXNetError:
                raise
            except Exception as error:          # what is hybridized may be written for symbols alone
                self._symbolic[id(block)] = block, f"has code for symbols alone ({_first_line(error)})"
        return self._by_graph(block, self._symbolic[id(block)][1], call)

    def _by_graph(self, block: Any, reason: str, call: Any) -> Any:
        """Let MXNet run the cached graph of a hybridized block."""
        statistics = [p for p in block.collect_params().values() if not p._differentiable and p._data is not None]
        if statistics and (self.training or self.recording):        # a forward or a backward pass may write them
            for array in (array for p in statistics for array in p.list_data()):
                self.before_write(array)
                self._updated[id(array)] = array
        self.alone(f"{title_of(block)} {reason}")
        with listening(None):
            return call()

    def record_vertex(self, identity: Any, part: Any, fn: Any, title: Any, args: tuple[Any, ...]) -> Any:
        """Record one call of a vertex; the general way, for arguments of any form.

        Parameters
        ----------
        identity : the block (or function) that is called
        part : which of its functions, if it has several
        fn : its code, as fn(identity, *args)
        title : its name in reports, or the block that has one
        args : arrays, numbers, numpy arrays, and lists and tuples of them
        """
        calls, state = self.calls, (self.recording, self.training)
        operands: list[LazyArray] = []
        specs: list[Any] = [id(identity), id(part), *state]
        kinds: list[str] = []
        try:
            for x in args:
                self._collect(x, calls, operands, specs, kinds)
        except (TypeError, RecursionError) as error:
            return self._by_operators(f"{title_of(title)} records operator by operator: {error}", identity, fn, args)
        if not operands:
            return self._by_operators(f"{title_of(title)} records operator by operator: no argument is an array",
                                      identity, fn, args)
        key = (*specs, *kinds)
        known = calls.by_key.get(key)
        if known is None:
            if key in self._refused:
                return self._by_operators(self._refused[key], identity, fn, args)
            try:
                known = calls.by_key[key] = self._vertex_entry(calls, specs, kinds, identity, part, fn, title, args)
            except Exception as error:
                if not (isinstance(error, (TraceError, ProgramError, RecursionError)) or (
                        not isinstance(error, MXNetError) and getattr(identity, "_active", False))):
                    raise                       # (a hybridized block runs, if need be, as the graph that MXNet keeps)
                self._refused[key] = f"{title_of(title)} records operator by operator: {_first_line(error)}"
                return self._by_operators(self._refused[key], identity, fn, args)
        entry, vertex = known
        if vertex.listed is not None:
            operands = [operands[k] for k in vertex.listed.order]
        result = entry.append(operands)
        if result is RETRY:
            return self.record_vertex(identity, part, fn, title, args)
        if vertex.forms is not None and calls is self.calls:
            def general(args: tuple[Any, ...]) -> Any:
                return self.record_vertex(identity, part, fn, title, args)

            hooks = (identity._forward_hooks, identity._forward_pre_hooks) if part is None else ()
            self._go_short(calls, state, vertex_key(identity, part), vertex, entry, operands, general, hooks)
        return result

    def _vertex_entry(self, calls: Calls, specs: list[Any], kinds: list[str], identity: Any, part: Any, fn: Any,
                      title: Any, args: tuple[Any, ...]) -> tuple[Entry, KnownVertex]:
        """What a vertex call is, in these calls and by itself."""
        vertex = find_vertex(tuple(specs[4:]), kinds, identity, part, fn, title, args, self.recording, self.training)
        signature = vertex.signature
        for p in signature.params:
            if not p.parameter._differentiable and (    # running statistics
                    self.recording or id(p.parameter.data(signature.context)) in self._updated):
                raise ProgramError(f"{p.name} is updated by backward passes")
        if signature.reads is not None:
            calls.reads.update(signature.reads.names())
        key = (vertex.runs, self.recording, *vertex.kinds)
        entry = calls.by_key.get(key)           # (calls with lists of all lengths have one)
        if entry is None:
            numbers = tuple([kind == "i" for kind in vertex.kinds])
            entry = calls.by_key[key] = calls.new_entry(vertex.runs, self.recording, identity=(identity, part),
                                                        numbers=numbers)
        return entry, vertex

    def _go_short(self, calls: Calls, state: Any, name: Any, vertex: KnownVertex, entry: Entry,
                  operands: list[LazyArray], general: Any, hooks: tuple[Any, ...]) -> None:
        """Let the next call of this vertex with such arguments go the short way."""
        signature, place = vertex.runs, -1 if vertex.listed is None else vertex.listed.place
        key = (state, name, vertex.forms, signature.structure, len(entry.owners), place)
        entries = calls.forms.get(key)
        if entries is None:
            entries = calls.forms[key] = {}
            table = calls.ways(state)[0]
            record = make_recorder(*key[2:])(calls, entries, table.get(name, general), general, vertex.lengths, hooks)
            if calls.sealed:                    # asked behind it: it may be bound to a log that nobody reads
                return
            table[name] = record
        count = len(vertex.kinds)
        owners = [owner_of(x) for x, kind in zip(operands, vertex.kinds) if kind in KEYED]
        owners += [owner_of(x) for x in operands[count:count + signature.slots]]
        entries[tuple(owners)] = (entry.number, *entry.owners)

    def _collect(self, x: Any, calls: Calls, operands: list[LazyArray], specs: list[Any], kinds: list[str]) -> None:
        """Append what stands for an argument; to `specs` what makes the signature: specs, nesting, constants; and to
        `kinds` the form of each operand."""
        if isinstance(x, (list, tuple)):
            specs.append(type(x))
            specs.append(-1 - len(x))
            for y in x:
                self._collect(y, calls, operands, specs, kinds)
        elif x is None or isinstance(x, (bool, str)):
            specs.append((x, "static"))
        elif isinstance(x, (NDArray, *_DATA)):
            kind = operand_form(x)
            operand = calls.operand(x) if kind == "a" else calls.word(x) if kind == "i" else calls.data(x)
            if operand is NO_ARRAY:
                raise TypeError(f"an argument {self.why_apart(x) or 'has no rows'}")
            owner = owner_of(operand)
            if owner is None:                   # it gets its value right now, and comes from outside then
                return self._collect(x, calls, operands, specs, kinds)
            operands.append(operand)
            specs.append(owner.spec)
            kinds.append(kind)
        else:
            raise TypeError(f"an argument is a {type(x).__name__}; a vertex takes arrays, numbers, and lists of them")

    def _by_operators(self, reason: str, identity: Any, fn: Any, args: tuple[Any, ...]) -> Any:
        """Run the code of a vertex that has no program; its operators are recorded one by one."""
        self.alone(reason)
        return fn(identity, *as_arrays(args))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


_UPDATED = {"BatchNorm": (3, 4)}                # operands that the backward pass of a trained operator writes
_READS_NO_VIEW = {"Pooling"}    # MXNet's gradient of max pooling is wrong for a part of a buffer, as our values are
# What stands for their operands depends on more than the owners; what is checked is noted in the general way.
_NEVER_SHORT = {*INDEX_OPERANDS, *_UPDATED, CHECKED}
_TRUE = ("True", "1")
_TERMS = 8              # sums of more matrices are made of sums of so many, so that those of all lengths share launches


def _list_key(name: str, attrs: dict[str, Any], owner: Any, count: int) -> Any:
    """The short way to an operator on any number of rows of one owner; how many are joined is part of the result."""
    return (name, owner, None) if name == "add_n" else (name, str(attrs.get("dim")), owner, count)


def _add_in_parts(arrays: Any) -> Any:
    while len(arrays) > 1:
        parts = [arrays[k:k + _TERMS] for k in range(0, len(arrays), _TERMS)]
        arrays = [mx.nd.add_n(*part) if len(part) > 1 else part[0] for part in parts]
    return arrays[0]
