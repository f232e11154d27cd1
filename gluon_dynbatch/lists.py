"""Vertices that take a list of any length: one signature for all lengths, where the program allows it.

A vertex is traced for every length that occurs. If the programs differ only in how often they do the same thing to an
element, and add up the results (`cavs_core.roll`), the calls of all lengths are one class: elements are then rows of
their own, as the children of a vertex are in the Cavs face.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cavs_core import agrees, flatten, map_nested, roll

from .fastpath import form_of
from .signature import Signature
from .values import WIDTHS

__all__ = ["ListCall", "list_calls", "join_lengths"]


class ListCall(NamedTuple):
    """One way to see a call: an argument is a list of equal elements.

    Attributes
    ----------
    place : which argument
    forms : of the arguments, with a list of one element; see `fastpath.form_of`
    elements : operand numbers of each element
    order : operand numbers, those outside the list first
    """

    place: int
    forms: tuple[Any, ...]
    elements: list[list[int]]
    order: list[int]


def list_calls(args: tuple[Any, ...], numbered: Any, specs: Sequence[int]) -> Iterator[ListCall]:
    """The ways to see a call whose arguments have the operand numbers `numbered` and operands the specs `specs`."""
    for place, (arg, numbers) in enumerate(zip(args, numbered)):
        if type(arg) not in (list, tuple) or not arg:
            continue
        forms = form_of((*args[:place], arg[:1], *args[place + 1:]))
        elements = [flatten(part) for part in numbers]
        looks = {(form_of((part,)), tuple(specs[k] for k in element)) for part, element in zip(arg, elements)}
        if forms is None or len(looks) > 1 or any(WIDTHS[specs[k]] != 1 for k in elements[0]) \
                or not only_arrays(forms[place]):
            continue
        inside = {k for element in elements for k in element}
        order = [k for k in range(len(specs)) if k not in inside] + [k for element in elements for k in element]
        yield ListCall(place, forms, elements, order)


def only_arrays(form: Any) -> bool:
    """Whether the form of a list has arrays, or tuples and lists of arrays, as elements."""
    (element,) = form[1]
    return element == "a" or (not isinstance(element, str) and len(element[1]) > 0 and set(element[1]) == {"a"})


class _Joined:
    """The signature of all lengths, once one of them has a program that can be rolled, and what is known of each."""

    def __init__(self) -> None:
        self.signature: Signature | None = None
        self.agreed: set[int] = set()
        self.refused: set[int] = set()


_TRIALS = 4         # lengths whose programs could not be rolled; then nobody looks at others


def join_lengths(known: dict[Any, Any], key: Any, call: ListCall, signature: Signature, specs: Sequence[int],
                 run_nested: Callable[[Any, Any], Any], numbered: Any) -> tuple[Signature, set[int]] | None:
    """The signature of calls with lists of all lengths, and the lengths that are its; None if there is none.

    Parameters
    ----------
    known : where joined signatures are kept
    key : part of the vertex, training, ..: what makes it another vertex
    call : the call, seen as one that takes a list
    signature : of this length, as traced
    specs : of its operands
    run_nested : (block, arguments) -> results, the call by itself
    numbered : operand numbers of the arguments
    """
    fixed = len(specs) - sum(map(len, call.elements))
    row = [specs[k] for k in call.order[:fixed + len(call.elements[0])]]
    key = ("list", key, call.place, call.forms, tuple(row), signature.structure)
    joined, length = known.get(key), len(call.elements)
    if joined is None or (joined.signature is not None and not joined.signature.is_current()):
        joined = known[key] = _Joined()
    if joined.signature is None:
        if length == 1 or len(joined.refused) >= _TRIALS:       # one element does not tell what happens to a second
            return None
        program = roll(signature.vertex.program, call.elements, len(specs))
        if program is not None:
            joined.signature = Signature(
                signature.title, program, row, signature.context, signature.template,
                _run_alone(run_nested, numbered, call.place, fixed), slots=len(call.elements[0]))
    if length not in joined.agreed and length not in joined.refused:
        fits = joined.signature is not None and agrees(
            joined.signature.vertex.program, signature.vertex.program, call.elements, len(specs))
        (joined.agreed if fits else joined.refused).add(length)
    return (joined.signature, joined.agreed) if length in joined.agreed else None


def _run_alone(run_nested: Callable[[Any, Any], Any], numbered: Any, place: int, fixed: int) -> Any:
    """A function (block, operands) -> results for lists of any length; operands outside the list come first."""
    element, kind = numbered[place][0], type(numbered[place])
    slots = len(flatten([element]))

    def run_alone(block: Any, operands: list[Any]) -> list[Any]:
        outside = iter(operands[:fixed])
        args = [map_nested(lambda k: next(outside) if type(k) is int else k, arg) if at != place else None
                for at, arg in enumerate(numbered)]
        parts = [iter(operands[at:at + slots]) for at in range(fixed, len(operands), slots)]
        args[place] = kind(map_nested(lambda _, part=part: next(part), element) for part in parts)
        return flatten(run_nested(block, args))

    return run_alone
