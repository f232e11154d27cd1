"""Vertices: what their calls are, remembered from flush to flush for as long as the block lives."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from cavs_core import ProgramError, listening, map_nested, sequence_like
from cavs_core.mxnet_compat import gluon, mx

from .fastpath import form_of
from .lists import ListCall, join_lengths, list_calls
from .signature import Signature, mode_of, vertex_signature

__all__ = ["KnownVertex", "find_vertex", "fit_graph", "let_export", "note_call", "title_of", "vertex_key"]


class KnownVertex(NamedTuple):
    """What calls of a vertex with such arguments are, in every flush.

    Attributes
    ----------
    signature : as traced
    runs : what is recorded: the same, or the signature of calls with lists of all lengths
    listed, lengths : how the call is one of these, and the lengths that they have; None if it is none
    forms : of the arguments, if there is a short way for them; see `fastpath.form_of`
    kinds : forms of the operands, but for those in the list
    is_final : whether nothing can come out differently the next time
    """

    signature: Signature
    runs: Signature
    listed: ListCall | None
    lengths: Any
    forms: Any
    kinds: list[str]
    is_final: bool

    def is_current(self) -> bool:
        """Whether the blocks and parameters still are what was traced."""
        return self.signature.is_current() and (self.runs is self.signature or self.runs.is_current())


def find_vertex(specs: tuple[Any, ...], kinds: list[str], identity: Any, part: Any, fn: Any, title: Any,
                args: tuple[Any, ...], recording: bool, training: bool) -> KnownVertex:
    """What a call of a vertex is; raises TraceError or ProgramError where it has no program.

    Parameters
    ----------
    specs : what makes the signature: spec numbers of the operands, nesting, constants
    kinds : forms of the operands
    identity, part, fn, title, args : see `Recorder.record_vertex`
    """
    known, key = _known_of(identity), ("call", id(part), training, *specs, *kinds)
    vertex = known.get(key)
    if vertex is not None and not vertex.is_current():
        known.clear()                           # all that was traced of the block: lists of other lengths, too
        vertex = None
    if vertex is None:
        vertex = _look_at(known, specs, kinds, identity, part, fn, title, args, recording, training)
        if vertex.is_final:
            known[key] = vertex
        if part is None:
            note_call(identity, args)
    return vertex


def _look_at(known: dict[Any, Any], specs: tuple[Any, ...], kinds: list[str], identity: Any, part: Any, fn: Any,
             title: Any, args: tuple[Any, ...], recording: bool, training: bool) -> KnownVertex:
    """Trace a call, or take the trace of such a call; and see whether calls with lists of all lengths are one."""
    numbered, of_operands = _numbered(args), [s for s in specs if type(s) is int and s >= 0]
    key, tried = (id(part), training, specs), False
    if key not in known or not known[key].is_current():
        made = vertex_signature(fn, identity, title_of(title), numbered, of_operands, training)
        sparse = [p.name for p in made.params if p.parameter._grad_stype != "default" and not made.only_looks_up(p)]
        if sparse and recording:
            raise ProgramError(f"the gradient of {sparse[0]} is row_sparse, and it is not only looked up")
        known[key] = made
    signature = known[key]

    def run_nested(block: Any, arguments: Any) -> Any:
        with mode_of(training):
            return fn(block, *arguments)

    for listed in list_calls(args, numbered, of_operands):
        tried = True
        joined = join_lengths(known, (id(part), training), listed, signature, of_operands, run_nested, numbered)
        if joined is not None:
            fixed = listed.order[:len(of_operands) - sum(map(len, listed.elements))]
            return KnownVertex(signature, joined[0], listed, joined[1], listed.forms, [kinds[k] for k in fixed], True)
    return KnownVertex(signature, signature, None, None, form_of(args), kinds, not tried)


def vertex_key(identity: Any, part: Any) -> Any:
    """The name of a vertex in the table of short ways; whoever is there holds both, so that the ids are their own."""
    return id(identity) if part is None else (id(identity), id(part))


def title_of(vertex: Any) -> str:
    """A name, or the block that has one, as reports show it."""
    return vertex if isinstance(vertex, str) else f"{type(vertex).__name__} {vertex.name}"


_known: dict[int, tuple[Any, dict[Any, Any]]] = {}      # id of a block or function -> what is known of it


def _known_of(identity: Any) -> dict[Any, Any]:
    """Signatures and vertices of this very object (equal ones have their own), for as long as it lives."""
    number = id(identity)
    if number not in _known:
        alive = weakref.ref(identity, lambda _, table=_known: table.pop(number, None))
        _known[number] = (alive, {})
    return _known[number][1]


def note_call(block: Any, args: tuple[Any, ...]) -> None:
    """A hybridized block was called: MXNet would keep a graph of it from now on, which `export` writes."""
    if getattr(block, "_active", False):
        array = mx.nd.zeros((1,), ctx=mx.cpu())
        example = map_nested(lambda x: x if x is None else array, args)
        _known_of(block)["called"] = block._cached_op_args, example


def let_export() -> None:
    """Give hybridized blocks that only a scope has called their graph when they are exported; for the life of the
    process."""
    export = gluon.HybridBlock.export
    if hasattr(export, "_dynbatch_builds_graphs"):
        return

    @functools.wraps(export)
    def build_and_export(self: Any, *args: Any, **kwargs: Any) -> Any:
        # MXNet begins a new list where it clears a graph.
        cleared, example = _known_of(self).get("called", (None, ()))
        if not self._cached_graph and self._active and cleared is self._cached_op_args:
            with listening(None):
                self._build_cache(*example)
        return export(self, *args, **kwargs)

    build_and_export._dynbatch_builds_graphs = True         # type: ignore[attr-defined]
    gluon.HybridBlock.export = build_and_export


def _numbered(nested: Any) -> Any:
    """The same nesting with operand numbers."""
    count = iter(range(1 << 30))

    def number(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return sequence_like(part, (number(p) for p in part))
        return part if part is None or isinstance(part, (bool, str)) else next(count)

    return number(nested)


def fit_graph(args: Any) -> bool:
    """Whether MXNet's graph of a hybridized block takes such arguments: arrays, None, and lists of them."""
    return all(x is None or isinstance(x, mx.nd.NDArray) or (isinstance(x, (list, tuple)) and fit_graph(x))
               for x in args)
