"""What entries are in all flushes: their kinds, as numbers, with what compiled loops have to know of them.

An entry belongs to one flush, and what it calls may die. Its kind is a number that stands for signature, state of
autograd and rows in the whole process, so that what was found out about calls of one flush can be said of another's.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .last_used import LastUsed
from .values import WIDTHS

__all__ = ["FIRST_SPEC", "FIRST_WIDTH", "KIND", "KINDS", "LOOKS_UP", "NAMED", "NUM_NUMBERS", "NUM_OPERANDS",
           "NUM_OUTPUTS", "PURE", "ROWS", "ROW_SPEC", "SLOTS", "Kinds", "KindTable", "class_kind", "entry_kind",
           "kinds_of"]

# What a kind is, word by word; then the specs of its outputs, and of each operand whether it is a number.
(KIND, NUM_OPERANDS, SLOTS, NUM_NUMBERS, NUM_OUTPUTS, ROWS, NAMED, PURE, LOOKS_UP, ROW_SPEC, FIRST_WIDTH,
 FIRST_SPEC) = range(12)


class KindTable(NamedTuple):
    """The kinds of the entries of a flush.

    Attributes
    ----------
    facts : int64 array
        The words of all kinds, one behind the other.
    starts : int64 array, shape (entries,)
        Where those of each entry begin.
    classes : int64 array, shape (entries,)
        The class of each entry, by its number in the flush.
    """

    facts: Any
    starts: Any
    classes: Any

    def of(self, what: int) -> Any:
        """One of the facts of every entry."""
        return self.facts[self.starts + what]


class Kinds(LastUsed):
    """What something is in all flushes -> a number, which is never that of something else."""

    def __init__(self, most: int = 1 << 16):
        super().__init__(most)
        self._numbers = itertools.count()

    def new_number(self) -> int:
        return next(self._numbers)

    def number(self, look: Any) -> int:
        with self.lock:
            number: int | None = self.get(look)
            if number is None:
                number = self.new_number()
                self.put(look, number)
            return number


KINDS = Kinds()             # of entries and classes, in the whole process


def class_kind(signature: Any, recorded: bool, count: Counter[Any]) -> int:
    """The number that a class has in all flushes.

    The same operator with another weight is another class; such classes are told apart by the order in which they come.

    Parameters
    ----------
    count : how many classes of each look the flush has by now; counted up
    """
    # Of those that only name rows, whose class has the signature of any of them, nothing else counts.
    look = (signature.number if signature.alias < 0 else -len(signature.operand_specs), recorded)
    count[look] += 1
    return KINDS.number((*look, count[look]))


def entry_kind(of_class: int, signature: Any, rows: int, numbers: tuple[bool, ...], specs: Sequence[int],
               number_spec: int) -> bytes:
    """What an entry is in all flushes, as words.

    Parameters
    ----------
    of_class : the kind of its class
    rows, numbers : see `Entry`
    specs : of its outputs
    number_spec : what operands look like that are numbers
    """
    look = (of_class, signature.number, rows, numbers, number_spec)
    known: bytes | None = KINDS.get(look)
    if known is None:
        single = signature.alias >= 0 and WIDTHS[specs[0]] == 1
        facts = (len(numbers), signature.slots, sum(numbers), len(specs), rows, signature.alias, not signature.draws,
                 signature.looks_up, specs[0] if single else -1, WIDTHS[specs[0]], *specs, *numbers)
        with KINDS.lock:
            known = KINDS.get(look)
            if known is None:
                known = struct.pack(f"{1 + len(facts)}q", KINDS.new_number(), *facts)
                KINDS.put(look, known)
    return known


def kinds_of(words: list[bytes], classes: list[int]) -> KindTable:
    """The kinds of the entries of a flush, and the class of each, as a table."""
    ends = list(itertools.accumulate(map(len, words), initial=0))
    return KindTable(np.frombuffer(b"".join(words), np.int64), np.array(ends[:-1], np.int64) // 8,
                     np.array(classes, np.int64))
