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
from numba import njit

from .last_used import LastUsed
from .values import WIDTHS

__all__ = ["FIRST_SPEC", "FIRST_WIDTH", "KIND", "KINDS", "LOOKS_UP", "NAMED", "NUM_NUMBERS", "NUM_OPERANDS",
           "NUM_OUTPUTS", "PURE", "ROWS", "ROW_SPEC", "SLOTS", "Kinds", "KindTable", "kinds_of"]

# What a kind is, word by word; then the specs of its outputs, and of each operand whether it is a number.
(KIND, SIZE, NUM_OPERANDS, SLOTS, NUM_NUMBERS, NUM_OUTPUTS, ROWS, NAMED, PURE, LOOKS_UP, ROW_SPEC, FIRST_WIDTH,
 FIRST_SPEC) = range(13)


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


def kinds_of(entries: Sequence[Any], classes: Sequence[Any], number_spec: int) -> tuple[KindTable, list[int]]:
    """The kinds of entries, and numbers that classes have in all flushes.

    The same operator with another weight is another class; such classes are told apart by the order in which they came.

    Parameters
    ----------
    number_spec : what operands look like that are numbers
    """
    count: Counter[Any] = Counter()
    ids = []
    for cls in classes:
        signature = cls.signature
        # Of those that only name rows, whose class has the signature of any of them, nothing else counts.
        look = (signature.number if signature.alias < 0 else -len(signature.operand_specs), cls.recorded)
        ids.append(KINDS.number((*look, count[look])))
        count[look] += 1
    of_class = [e.cls.number for e in entries]
    looks = [(ids[c], e.signature.number, e.rows, e.numbers, number_spec) for c, e in zip(of_class, entries)]
    words = list(map(KINDS.get, looks))
    if None in words:
        words = [_words(look, e) if known is None else known for known, look, e in zip(words, looks, entries)]
    facts = np.frombuffer(b"".join(words), np.int64)
    return KindTable(facts, _starts(facts, len(words)), np.array(of_class, np.int64)), ids


def _words(look: Any, entry: Any) -> bytes:
    """What a new kind is."""
    signature, specs = entry.signature, [owner.spec for owner in entry.owners]
    single = signature.alias >= 0 and WIDTHS[specs[0]] == 1
    facts = (len(entry.numbers), signature.slots, sum(entry.numbers), len(specs), entry.rows, signature.alias,
             not signature.draws, signature.looks_up, specs[0] if single else -1, WIDTHS[specs[0]], *specs,
             *entry.numbers)
    with KINDS.lock:
        known: bytes | None = KINDS.get(look)
        if known is None:
            known = struct.pack(f"{2 + len(facts)}q", KINDS.new_number(), 2 + len(facts), *facts)
            KINDS.put(look, known)
        return known


@njit(cache=True, nogil=True)
def _starts(facts, count):  # type: ignore[no-untyped-def]
    starts = np.empty(count, np.int64)
    at = 0
    for k in range(count):
        starts[k] = at
        at += facts[at + SIZE]
    return starts
