"""Recording in one step: generated code for what is called thousands of times.

A recorded call is a stretch of one row of numbers (int64, as bytes), the log: the number of its entry, the length of
the list that it takes if its class takes lists of any length, then its operands, those of such a list last. An operand
is the token of an array, or a word id as it is; the entry knows which. Results are numbered in recorded order, and
their tokens count from FIRST. A token is an int object that nobody has but the array that carries it and the list
`made`, so that a flush can see by its reference count whether the array still lives.

For the calls of a vertex with arguments of one form a function is generated that does everything: it looks whether the
arguments are of its form, finds the entry by the owners of the arrays, makes the results, appends to the log. What is
not its case it hands on to `other`: the function of another form, and at last the general way.

`_fastpath.c` does the same in a small part of the time, where it was compiled when the package was installed. Without
it Python code is generated, here, and everything else is the same.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from cavs_core import LazyArray, let_change, tell
from cavs_core.mxnet_compat import mx

INTERFACE = 7                   # of `_fastpath.c`: whoever changes what it offers counts up, here and there

compiled: ModuleType | None
try:
    import gluon_dynbatch._fastpath as compiled
except ImportError:             # there was no C compiler
    compiled = None
if getattr(compiled, "INTERFACE", 0) != INTERFACE:      # compiled from an older source
    compiled = None

__all__ = ["FIRST", "RETRY", "KEYED", "common_owner", "compiled", "find_held", "form_of", "make_append",
           "make_operators", "make_recorder", "make_table", "operand_form", "structure_of"]

FIRST = 1 << 32                 # the first token; far from the small ints, which Python makes only once
RETRY = object()                # a call came too late for the calls that it was meant for
_LARGEST = (1 << 30) - 1        # of the word ids that stand in the log as they are
_MANY = 32                      # arguments; calls with more of them have no generated function


def _word_id(x: Any) -> int:
    """A numpy integer as an int; what is none, as an int that is too large."""
    return int(x) if isinstance(x, np.integer) else _LARGEST + 1


class _Packs(dict):
    """Number of ints -> a function that makes bytes of so many."""

    def __missing__(self, count: int) -> Callable[..., bytes]:
        self[count] = struct.Struct(f"{count}q").pack
        return self[count]


_packs = _Packs()
_BOUND = "log=calls.log, made=calls.made, watchers=calls.watchers"      # what a generated function has at hand
_NAMES = {"packs": _packs, "FIRST": FIRST, "RETRY": RETRY, "LARGEST": _LARGEST, "LazyArray": LazyArray,
          "ndarray": np.ndarray, "word_id": _word_id}


if compiled is not None:
    compiled.bind(LazyArray, np.ndarray, np.integer, RETRY, FIRST, _LARGEST)
    let_change(compiled.become)
    tell(compiled.listen)


#: the reference count of an object that only a list holds, as `map` sees it
_HELD_ONCE = next(map(sys.getrefcount, [object()]))


def find_held(made: list[int], recycles: bool = False) -> Any:
    """For each token, whether its array still lives: then two hold it, the array and the list.

    With `recycles` nobody asks again, and the next flushes may take the tokens that only the list holds.
    """
    if compiled is not None:
        return np.frombuffer(compiled.is_held(made, recycles), bool)
    return np.fromiter(map(sys.getrefcount, made), np.int64, len(made)) > _HELD_ONCE


def common_owner(arrays: Any) -> Any:
    """Who owns all of these arrays; None if some are from outside, or of another spec."""
    if compiled is not None:
        return compiled.common_owner(arrays)
    owners = {x.owner if type(x) is LazyArray else None for x in arrays}
    return owners.pop() if len(owners) == 1 else None


def structure_of(template: Any) -> Any:
    """The structure of results, of `template`, nested lists and tuples of None and result numbers.

    Of a list or tuple it is (list or tuple, the structures of its parts), of all else itself.
    """
    if isinstance(template, (list, tuple)):
        return (list if isinstance(template, list) else tuple, tuple(map(structure_of, template)))
    return template


def _structure_code(structure: Any) -> str:
    """Code that makes what a call returns of its results r0, r1, .."""
    if isinstance(structure, tuple):
        kind, parts = structure
        inside = "".join(_structure_code(part) + ", " for part in parts)
        return f"[{inside}]" if kind is list else f"({inside})"
    return "None" if structure is None else f"r{structure}"


def form_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The form of arguments, if it is one of those that a function can be generated for.

    Of a word id it is "i", of another number "n", of an array "a", of a numpy array "d", of None, True and False their
    names, and of a list or tuple (list or tuple, the forms of its parts).
    """
    forms = tuple(map(_form, args))
    flat = list(_flat_form(forms))
    return None if "?" in flat or len(flat) > _MANY else forms


def _form(x: Any) -> Any:
    kind = type(x)
    if kind is list or kind is tuple:
        return (kind, tuple(map(_form, x)))
    return repr(x) if x is None or kind is bool else operand_form(x)


def operand_form(x: Any) -> str:
    """The form of an argument that is one operand; "?" if it has none."""
    kind = type(x)
    if isinstance(x, mx.nd.NDArray):
        return "a"
    if kind is float:
        return "n"
    if kind is np.ndarray:
        return "d"
    return "i" if -_LARGEST <= (x if kind is int else _word_id(x)) <= _LARGEST else "?"


def _flat_form(forms: tuple[Any, ...]) -> Iterator[str]:
    """The forms inside lists and tuples, one after the other."""
    for form in forms:
        yield from (form,) if isinstance(form, str) else _flat_form(form[1])


@cache
def make_append(num_operands: int, structure: Any, num_outputs: int, slots: int = 0) -> Callable[..., Any]:
    """A function (calls, number, owners) -> append(operands) -> results or RETRY: for operands of every origin.

    With `slots` a list of any length follows `num_operands` others, so many operands an element.
    """
    if compiled is not None:
        return partial(compiled.Append, structure, num_operands, slots)
    operands = [f"x{k}" for k in range(num_operands)]
    unpacked, tokens, pack = f"{_listed(operands)} = operands", [f"{x}.token" for x in operands], "pack"
    if slots:
        unpacked, pack = "count = len(operands)", "packs[2 + count]"
        tokens = [f"(count - {num_operands}) // {slots}", "*[x.token for x in operands]"]
    lines = [
        "def make(calls, number, owners):",
        f"    {_listed(_outputs('o', num_outputs))} = owners",
        f"    def append(operands, {_BOUND}, pack=packs[{1 + num_operands}]):",
        f"        {unpacked}" if operands or slots else "        pass",
        *_record(_call(pack, tokens, "RETRY"), structure, num_outputs, "RETRY"),
        "    return append"]
    return _compiled(lines)


def make_operators(calls: Any, entries: dict[Any, Any]) -> Callable[..., Any] | None:
    """A function (name, arrays, names and values of attributes) -> results of an operator that was met before.

    It finds the entry by (name, (attribute, value) .., owner of each operand ..). What is not its case, such as an
    outside array that no call has read yet, is NotImplemented. None without the compiled module: it would save nothing.
    """
    return None if compiled is None else compiled.Operators(calls, entries)


def make_table() -> Any:
    """A table of the functions that record the calls of vertices, by `vertex_key`."""
    return {} if compiled is None else compiled.Table()


@cache
def make_recorder(forms: tuple[Any, ...], structure: Any, num_outputs: int, place: int = -1) -> Callable[..., Any]:
    """A function (calls, entries, other, general, lengths, hooks) -> record(args) -> results: for one form of them.

    `entries` gives for the owners of the arrays the number of the entry and the owners of the results. `other` takes
    arguments of other forms, `general` those of a call that came too late. The argument at `place`, if it is not -1, is
    a list of any of the `lengths`, whose elements have the form of the first; its owners come last. `hooks` are the
    dicts of a block's hooks, () if it is no block: the compiled `Call` looks into them.
    """
    if compiled is not None:
        return partial(compiled.Record, forms, structure, num_outputs, place)
    lines = [
        "def make(calls, entries, other, general, lengths, hooks=()):",
        "    outside, data = calls.outside, calls.data"]
    body = [f"        if len(args) != {len(forms)}: return other(args)"]
    operands: list[tuple[str, str]] = []
    _unpack("args", forms, body, operands, place)
    if place >= 0:
        body += _check_list(f"args_{place}", forms[place])
    lines += [f"    def record(args, {_BOUND}, pack=packs[{1 + len(operands)}]):", *body]
    arrays = [x for x, form in operands if form in KEYED]
    made = {"a": "if type({0}) is not LazyArray: {0} = outside({0})", "d": "{0} = data({0})"}
    lines += ["        " + made[form].format(x) for x, form in operands if form in KEYED]
    owners, tokens = [f"{x}.owner" for x in arrays], [_TOKENS[form].format(x) for x, form in operands]
    collect: list[str] = []
    pack = "pack"
    if place >= 0:
        parts = _element_parts(forms[place])
        pack = f"packs[{2 + len(operands)} + {parts or 1} * count]"
        owners += [f"w{k}" for k in range(parts or 1)]
        tokens = ["count", *tokens, "*elements"]
        lines += _first_element(f"args_{place}", forms[place], parts)
        collect = _collect_elements(f"args_{place}", forms[place], parts)
    lines += [
        # (Like a token, it has no owner any more.)
        f"        try: entry = entries.get(({_listed(owners)}))",
        "        except AttributeError: entry = None",
        "        if entry is None: return other(args)",
        f"        {_listed(['number', *_outputs('o', num_outputs)])} = entry",
        *collect,
        *_record(_call(pack, tokens, "general(args)"), structure, num_outputs, "general(args)"),
        "    return record"]
    return _compiled(lines)


def _element_parts(form: Any) -> int:
    """How many arrays an element of a list is; 0 if it is one by itself."""
    (element,) = form[1]
    return 0 if isinstance(element, str) else len(element[1])


def _open_element(element: str, form: Any, parts: int, indent: str) -> list[str]:
    """Code that names the arrays of an element e0, e1, ..; or returns other(args)."""
    if not parts:
        return [f"{indent}e0 = {element}", f"{indent}if type(e0) is not LazyArray: e0 = outside(e0)"]
    names = _outputs("e", parts)
    kind = form[1][0][0].__name__
    return [f"{indent}if type({element}) is not {kind} or len({element}) != {parts}: return other(args)",
            f"{indent}{_listed(names)} = {element}",
            *[f"{indent}if type({x}) is not LazyArray: {x} = outside({x})" for x in names]]


def _check_list(name: str, form: Any) -> list[str]:
    return [f"        if type({name}) is not {form[0].__name__}: return other(args)",
            f"        count = len({name})",
            "        if count not in lengths: return other(args)"]


def _first_element(name: str, form: Any, parts: int) -> list[str]:
    """Code that takes the owners w0, w1, .. of the first element of a list."""
    return [f"        first = {name}[0]",
            *_open_element("first", form, parts, "        "),
            *[f"        w{k} = e{k}.owner" for k in range(parts or 1)]]


def _collect_elements(name: str, form: Any, parts: int) -> list[str]:
    """Code that collects the tokens of all elements, whose owners must be those of the first."""
    names = _outputs("e", parts or 1)
    unlike = " or ".join(f"{x}.owner is not w{k}" for k, x in enumerate(names))
    put = f"append({names[0]}.token)" if not parts else f"extend(({_listed([f'{x}.token' for x in names])}))"
    return ["        elements = []",
            f"        for element in {name}:",
            *_open_element("element", form, parts, "            "),
            f"            if {unlike}: return other(args)",
            f"            elements.{put}"]


KEYED = ("a", "d")              # what owners find the entry by
_TOKENS = {"a": "{}.token", "d": "{}.token", "i": "{}", "n": "data({}).token"}     # how an operand gets into the log


def _unpack(name: str, forms: tuple[Any, ...], lines: list[str], operands: list[tuple[str, str]],
            skipped: int = -1) -> None:
    """Code that takes the parts out of a tuple or list of known length, or returns other(args)."""
    parts = [f"{name}_{k}" for k in range(len(forms))]
    if parts:
        lines.append(f"        {_listed(parts)} = {name}")
    for k, (part, form) in enumerate(zip(parts, forms)):
        if k == skipped:
            continue
        if not isinstance(form, str):
            kind, inner = form
            lines.append(f"        if type({part}) is not {kind.__name__} or len({part}) != {len(inner)}: "
                         "return other(args)")
            _unpack(part, inner, lines, operands)
            continue
        if form == "i":
            lines += [f"        if type({part}) is not int: {part} = word_id({part})",
                      f"        if not -LARGEST <= {part} <= LARGEST: return other(args)"]
        elif form == "n":
            lines.append(f"        if type({part}) is not float: return other(args)")
        elif form == "d":
            lines.append(f"        if type({part}) is not ndarray: return other(args)")
        elif form != "a":
            lines.append(f"        if {part} is not {form}: return other(args)")
        if form in _TOKENS:
            operands.append((part, form))


def _call(pack: str, tokens: list[str], too_late: str) -> list[str]:
    """Code that makes a call of tokens; an array has none any more once another thread has given it its value."""
    return [f"try: call = {pack}({', '.join(['number', *tokens])})", f"except AttributeError: return {too_late}"]


def _record(call: list[str], structure: Any, num_outputs: int, too_late: str) -> list[str]:
    """Code that makes the results and appends to the log what `call` names so.

    `made` grows before the log, so that whoever sees a call in the log finds the tokens of its results; and by `+=`,
    so that no interrupt comes between the two: Python looks for one where it calls a function. Where it makes an object
    the collector may run, and with it code that records: then the tokens are taken, and the call is recorded anew.
    """
    lines = [f"        r{k} = LazyArray()" for k in range(num_outputs)]
    lines += ["        t0 = FIRST + len(made)", *[f"        t{k} = t0 + {k}" for k in range(1, num_outputs)]]
    for k in range(num_outputs):
        lines += [f"        r{k}.owner = o{k}", f"        r{k}.token = t{k}"]
    return lines + [
        *["        " + line for line in call],
        f"        tokens = ({_listed(_outputs('t', num_outputs))})",
        f"        if len(made) + FIRST != t0: return {too_late}",
        "        made += tokens",
        "        log += call",
        f"        if watchers and calls.too_late(t0): return {too_late}",
        f"        return {_structure_code(structure)}"]


def _outputs(letter: str, count: int) -> list[str]:
    return [f"{letter}{k}" for k in range(count)]


def _listed(names: list[str]) -> str:
    """Names as the inside of a tuple, of one too."""
    return "".join(name + ", " for name in names).rstrip() if len(names) == 1 else ", ".join(names)


def _compiled(lines: list[str]) -> Callable[..., Any]:
    names: dict[str, Any] = dict(_NAMES)
    exec("\n".join(lines), names)
    return names["make"]
