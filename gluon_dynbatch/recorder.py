"""Recording: every operator and every vertex call inside a scope becomes a call; nothing runs until somebody asks."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from cavs_core import LazyArray, Listener, ProgramError, TraceError, inactive, owner_of, supports, token_of
from cavs_core.mxnet_compat import autograd, gluon, mx

from .calls import RETRY, Calls, Entry
from .fastpath import make_collector, pattern_of
from .signature import INDEX_OPERANDS, Signature, operator_signature, vertex_signature
from .values import SPECS, as_arrays, data_spec

__all__ = ["Recorder"]

NDArray = mx.nd.NDArray
_DATA = (int, float, np.ndarray, np.generic)
BaseSparseNDArray = mx.nd.sparse.BaseSparseNDArray
_collectors: dict[Any, Any] = {}                # pattern of arguments -> collector
_signatures: dict[Any, Signature] = {}          # operators, for the life of the process


class Recorder(Listener):
    """Listens to one scope: decides what is recorded, what runs alone, and what makes everything run."""

    def __init__(self, scope: Any):
        self.scope = scope
        self.records_vertices = scope.config.granularity != "op"
        self.calls = Calls(self)
        self.recording, self.training = autograd.is_recording(), autograd.is_training()
        self.context = mx.current_context()     # of numbers, which have no device of their own
        self.number_spec = data_spec(0.0, self.context)
        self._sparse_grads: dict[int, Any] = {}     # arrays of parameters whose gradient is row_sparse
        self._collectors: dict[tuple[int, int], Any] = {}       # vertex -> collector of the form of its last call
        self._refused: dict[Any, str] = {}      # vertex key -> why it has no program
        self._where: list[str] = []

    def start_new_calls(self, old: Calls) -> None:
        if self.calls is old:
            self.calls = Calls(self)

    def alone(self, reason: str) -> None:
        """Count a call that runs by itself."""
        fallbacks = self.scope.stats.fallbacks
        fallbacks[reason] = fallbacks.get(reason, 0) + 1

    # ---- operators ---------------------------------------------------------------------------

    def on_operator(self, name, arrays, attrs, out, call):
        if out is not None:
            return self._on_write(name, arrays, attrs, out, call)
        if not arrays:
            return call()                       # makes an array from nothing: a leaf
        calls = self.calls
        tokens = self._tokens(name, arrays, calls)
        if tokens is None:
            self.alone(self._why_alone(name))
            return call()
        entry = self._operator_entry(calls, name, attrs, tokens)
        if entry is None:
            return call()
        result = calls.append(entry, tokens)
        return self.on_operator(name, arrays, attrs, out, call) if result is RETRY else result

    @staticmethod
    def _why_alone(name: str) -> str:
        if not supports(name):
            return f"operator {name} is not in the op table"
        return f"operator {name}: an operand or its gradient is sparse"

    def on_parameter(self, parameter, array):
        if parameter._grad_stype != "default":
            self._sparse_grads[id(array)] = array
        return array

    def _tokens(self, name: str, arrays: Any, calls: Calls) -> list[int] | None:
        """The operands of an operator call, or None if it cannot be batched."""
        if not supports(name):
            return None
        tokens = []
        for x in arrays:
            if type(x) is LazyArray and owner_of(x) is calls:
                tokens.append(token_of(x))
                continue
            token = calls.leaf_tokens.get(id(x))
            if token is None:
                if isinstance(x, BaseSparseNDArray) or id(x) in self._sparse_grads:
                    return None
                token = calls.leaf_token(x)
            tokens.append(token)
        if name in INDEX_OPERANDS:
            for k in INDEX_OPERANDS[name]:
                if tokens[k] < 0:
                    tokens[k] = calls.index_token(arrays[k])
        return tokens

    def _operator_entry(self, calls: Calls, name: str, attrs: dict[str, Any], tokens: list[int]) -> Entry | None:
        """What an operator call is, or None if it must run alone."""
        value_spec, leaf_spec = calls.value_spec, calls.leaf_spec
        specs = tuple([value_spec[t] if t >= 0 else leaf_spec[-1 - t] for t in tokens])
        try:
            key = (name, tuple(attrs.items()), specs, self.recording, self.training)
            entry = calls.by_key.get(key)
        except TypeError:                       # an attribute that is a list
            key = (name, str(attrs), specs, self.recording, self.training)
            entry = calls.by_key.get(key)
        if entry is not None:
            return entry
        exact = (key[:3], self.training)
        signature = _signatures.get(exact)
        if signature is None:
            try:
                signature = operator_signature(name, attrs, specs, self.training, name in _LISTS)
            except ProgramError as error:
                self.alone(f"operator {name}: {str(error).splitlines()[0]}")
                return None
            if signature.ragged:                # one signature for every number of rows
                general = ((*key[:2], signature.operand_specs, signature.split), self.training)
                signature = _signatures.setdefault(general, signature)
            _signatures[exact] = signature
        rows = SPECS[specs[0]].shape[0] if signature.ragged else 1
        return calls.new_entry(key, signature, rows, self.recording, self._where[-1] if self._where else "")

    def _on_write(self, name, arrays, attrs, out, call):
        """An operator that writes into an array that exists: x += y only gives x a new value, all else runs now."""
        calls = self.calls
        tokens = self._tokens(name, arrays, calls) if arrays else None
        if (tokens is not None and type(out) is LazyArray and out.owner is calls
                and out.token not in calls.views and out.token not in calls.viewed):
            entry = self._operator_entry(calls, name, attrs, tokens)
            if entry is not None and entry.output_specs == [calls.value_spec[out.token]]:
                new = calls.append(entry, tokens)
                if new is not RETRY:
                    token = new.token
                    new.rebind(out.token)       # the temporary dies with the old value
                    out.rebind(token)
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

    # ---- blocks ------------------------------------------------------------------------------

    def on_block(self, block, args, call):
        if block._forward_hooks or block._forward_pre_hooks:
            return call()
        if isinstance(block, gluon.HybridBlock) and block._active and self.records_vertices:
            return self.record_vertex(block, None, type(block).forward, block, args)
        self._where.append(_title(block))
        try:
            return call()
        finally:
            self._where.pop()

    def on_hybrid_call(self, block, args, call):
        """A hybridized block that could not be a vertex: operator by operator, through its own code."""
        if isinstance(block, gluon.SymbolBlock):
            self.alone(f"{_title(block)} is a stored graph without code")
            return call()
        with inactive(block):
            return block.forward(*args)

    def record_vertex(self, identity: Any, part: Any, fn: Any, title: Any, args: tuple[Any, ...]) -> Any:
        """Record one call of a vertex.

        Parameters
        ----------
        identity : the block (or function) that is called
        part : which of its functions, if it has several
        fn : its code, as fn(identity, *args)
        title : its name in reports, or the block that has one
        args : arrays, numbers, numpy arrays, and lists and tuples of them
        """
        calls = self.calls
        fast = self._collectors.get((id(identity), id(part)))
        if fast is not None:
            try:
                tokens, specs = fast(args, calls.leaves, calls.leaf_spec, self.number_spec, calls.value_spec.get)
            except (TypeError, ValueError):     # arguments of another form
                return self._record_vertex(identity, part, fn, title, args)
            entry = calls.by_pattern.get((fast, id(identity), id(part), specs, self.recording, self.training))
            if entry is not None:
                result = calls.append(entry, tokens)
                if result is not RETRY:
                    return result
        return self._record_vertex(identity, part, fn, title, args)

    def _record_vertex(self, identity: Any, part: Any, fn: Any, title: Any, args: tuple[Any, ...]) -> Any:
        """The general way: arguments of any form."""
        calls = self.calls
        value_spec = calls.value_spec
        tokens: list[int] = []
        specs: list[Any] = [id(identity), id(part), self.recording, self.training]
        try:
            for x in args:
                self._collect(x, calls, tokens, specs)
        except TypeError as error:
            return self._by_operators(f"{_title(title)} records operator by operator: {error}", identity, fn, args)
        key = tuple(specs)
        entry = calls.by_key.get(key)
        if entry is None:
            if key in self._refused:
                return self._by_operators(self._refused[key], identity, fn, args)
            try:
                entry = self._vertex_entry(calls, key, identity, part, fn, _title(title), args)
            except (TraceError, ProgramError) as error:
                self._refused[key] = f"{_title(title)} records operator by operator: {str(error).splitlines()[0]}"
                return self._by_operators(self._refused[key], identity, fn, args)
        result = calls.append(entry, tokens)
        if result is RETRY:
            return self._record_vertex(identity, part, fn, title, args)
        pattern = pattern_of(args)
        if pattern is not None:                 # the next call of this form goes the short way
            collector = _collectors.get(pattern) or _collectors.setdefault(pattern, make_collector(pattern))
            self._collectors[id(identity), id(part)] = collector
            array_specs = tuple([value_spec[t] for t in tokens if t >= 0])
            calls.by_pattern[collector, id(identity), id(part), array_specs, self.recording, self.training] = entry
        return result

    def _collect(self, x: Any, calls: Calls, tokens: list[int], specs: list[Any]) -> None:
        """Append the tokens of an argument, and to `specs` what makes the signature: specs, nesting, constants."""
        if isinstance(x, (list, tuple)):
            specs.append(type(x))
            specs.append(-1 - len(x))
            for y in x:
                self._collect(y, calls, tokens, specs)
        elif isinstance(x, NDArray):
            token = token_of(x) if type(x) is LazyArray and owner_of(x) is calls else calls.leaf_token(x)
            tokens.append(token)
            specs.append(calls.value_spec[token] if token >= 0 else calls.leaf_spec[-1 - token])
        elif x is None or isinstance(x, (bool, str)):
            specs.append((x, "static"))
        elif isinstance(x, _DATA):
            tokens.append(calls.data_token(x, self.context))
            specs.append(calls.leaf_spec[-1])
        else:
            raise TypeError(f"an argument is a {type(x).__name__}; a vertex takes arrays, numbers, and lists of them")

    def _by_operators(self, reason: str, identity: Any, fn: Any, args: tuple[Any, ...]) -> Any:
        """Run the code of a vertex that has no program; its operators are recorded one by one."""
        self.alone(reason)
        return fn(identity, *as_arrays(args))

    def _vertex_entry(self, calls: Calls, key: Any, identity: Any, part: Any, fn: Any, title: str, args: Any) -> Entry:
        known = _signatures_of(identity)
        signature_key = (key[1], self.training, key[4:])
        if signature_key not in known or not known[signature_key].is_current():
            specs = [s for s in key[4:] if type(s) is int and s >= 0]
            signature = vertex_signature(fn, identity, title, _numbered(args), specs, self.training)
            sparse = [p.name for p in signature.params if p.parameter._grad_stype != "default"]
            if sparse and self.recording:
                raise ProgramError(f"the gradient of {sparse[0]} is row_sparse")
            known[signature_key] = signature
        return calls.new_entry(key, known[signature_key], 1, self.recording, identity=(identity, part))


_vertex_signatures: dict[int, tuple[Any, dict[Any, Signature]]] = {}     # id of a block or function -> its signatures


def _signatures_of(identity: Any) -> dict[Any, Signature]:
    """The signatures of this very object (equal ones have their own), for as long as it lives."""
    number = id(identity)
    if number not in _vertex_signatures:
        alive = weakref.ref(identity, lambda _, table=_vertex_signatures: table.pop(number, None))
        _vertex_signatures[number] = (alive, {})
    return _vertex_signatures[number][1]


_LISTS = ("SliceChannel", "_split_v2")          # operators that return a list even of one


def _title(of: Any) -> str:
    return of if isinstance(of, str) else f"{type(of).__name__} {of.name}"


def _numbered(nested: Any) -> Any:
    """The same nesting with operand numbers."""
    count = iter(range(1 << 30))

    def number(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return type(part)(number(p) for p in part)
        return part if part is None or isinstance(part, (bool, str)) else next(count)

    return number(nested)
