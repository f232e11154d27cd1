"""The usual call of a vertex, recorded quickly: generated code for one pattern of arguments.

A vertex is called thousands of times with arguments of one form: word ids, arrays of this scope, tuples and lists of
such. For each form a small function is generated that takes the tokens out of the arguments without asking what they
are; where they are something else, the key that it makes is not known, and the call is recorded the general way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cavs_core import LazyArray, token_of

__all__ = ["pattern_of", "make_collector"]


def pattern_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The form of arguments that a collector can be made for: "i", "a", or (list or tuple, length); else None."""
    pattern: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is int:
            pattern.append("i")
        elif kind is LazyArray:
            pattern.append("a")
        elif (kind is list or kind is tuple) and x and all(type(y) is LazyArray for y in x):
            pattern.append((kind, len(x)))
        else:
            return None
    return tuple(pattern) if any(part != "i" for part in pattern) else None


def make_collector(pattern: tuple[Any, ...]) -> Callable[..., Any]:
    """A function (args, leaves, leaf_spec, number_spec, spec_of) -> (tokens, specs of the arrays) for one pattern.

    It raises ValueError or TypeError, or gives a spec None, for arguments of another form; then no leaf was added.
    """
    names, arrays, checks, tokens, unpack = [], [], [], [], []
    for k, part in enumerate(pattern):
        name = f"a{k}"
        names.append(name)
        if part == "i":
            checks.append(f"type({name}) is not int")
            tokens.append(name)
        elif part == "a":
            tokens.append(len(arrays))
            arrays.append(name)
        else:
            kind, length = part
            items = [f"{name}_{j}" for j in range(length)]
            checks.append(f"type({name}) is not {kind.__name__}")
            unpack.append(f"    {', '.join(items)}, = {name}")
            tokens += range(len(arrays), len(arrays) + length)
            arrays += items
    numbers = [t for t in tokens if isinstance(t, str)]
    lines = ["def collect(args, leaves, leaf_spec, number_spec, spec_of):", f"    {', '.join(names)}, = args"]
    if checks:
        lines.append(f"    if {' or '.join(checks)}: raise TypeError")
    lines += unpack
    lines.append(f"    t = list(map(token_of, ({', '.join(arrays)},)))")
    lines.append("    specs = tuple(map(spec_of, t))")
    if numbers:
        lines += ["    if None in specs: raise TypeError", f"    leaves += ({', '.join(numbers)},)",
                  f"    leaf_spec += (number_spec,) * {len(numbers)}", "    n = len(leaves)"]
        # the j-th of m numbers is leaf n - m + j, whose token is -1 - that
        count = iter(range(len(numbers)))
        made = [f"{len(numbers) - 1 - next(count)} - n" if isinstance(t, str) else f"t[{t}]" for t in tokens]
        lines.append(f"    return [{', '.join(made)}], specs")
    else:
        lines.append("    return t, specs")
    names_in = {"token_of": token_of}
    exec("\n".join(lines), names_in)
    return names_in["collect"]
