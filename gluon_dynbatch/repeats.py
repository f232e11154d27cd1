"""Calls that repeat an earlier one. Pure: arrays in, arrays out; no device, no MXNet.

Two calls of the same kind on the same operands have the same results: a word that stands in two sentences, a phrase
that stands in two trees, an atom whose surroundings are those of another one. The first of them runs, and whoever reads
a later one reads the first. Gradients meet there: they are added up before they go on, instead of behind it.

Rows of a table that were looked up by the same number are the same as well, also where a whole sentence was looked up
at once: what names a single row of such a result is known by table and number.

Calls whose results somebody holds are left as they are, since each has memory of its own; so are those that draw random
numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .analyzer import Recording

__all__ = ["Distinct", "Facts", "Lookups", "find_repeats"]


class Distinct(NamedTuple):
    """A recording without repeats.

    Attributes
    ----------
    calls : int64 array, those that are left
    repeats : int64 array, the others
    operands : int64 array, of the calls that are left, with the numbers that values and leaves have then
    numbers : int64 array, which of the numbers are left; they are the last leaves as before
    value_of : int64 array
        For each value of the whole recording, its number then; that of the first call for repeats.
    """

    calls: Any
    repeats: Any
    operands: Any
    numbers: Any
    value_of: Any

    def recording(self, r: Recording, num_leaves: int) -> Recording:
        """What is left of the whole recording, with so many leaves."""
        return replace(r.of_calls(self.calls, self.operands, self.value_of), leaf_buffers=r.leaf_buffers[:num_leaves],
                       leaf_widths=r.leaf_widths[:num_leaves], leaf_wanted=r.leaf_wanted[:num_leaves])


class Lookups(NamedTuple):
    """Calls that look up rows of a table, one for each of some known numbers: rows of equal numbers are the same.

    Attributes
    ----------
    starts, counts : int64 arrays, shape (calls,)
        Where in `ids` the numbers of a call begin, and how many there are; 0 for all other calls.
    tables : int64 array, shape (calls,)
        The number of its table.
    ids : int64 array
    names_row : int64 array, shape (kinds,)
        For kinds of calls that name a single row: the same number, from 1 on, where shape, dtype and the state of
        autograd are the same; -1 for all others.
    """

    starts: Any
    counts: Any
    tables: Any
    ids: Any
    names_row: Any


class Facts(NamedTuple):
    """All that decides which calls repeat others.

    Attributes
    ----------
    kinds : int64 array, shape (calls,)
        Calls of one kind on the same operands have the same results ..
    pure : bool array, shape (kinds,)
        .. if this is so.
    counts, firsts, operands : of the recording
    numbers : int64 array
        The values of the last leaves: each is read by one call, all have one spec, and equal ones are the same operand.
    num_data : the number of the other leaves
    held : int64 array
        Values that somebody needs for himself: their calls repeat no other.
    lookups : Lookups
    """

    kinds: Any
    pure: Any
    counts: Any
    firsts: Any
    operands: Any
    numbers: Any
    num_data: int
    held: Any
    lookups: Lookups


def find_repeats(facts: Facts, offsets: tuple[Any, Any]) -> Distinct:
    """Leave out the calls that repeat others.

    Parameters
    ----------
    offsets : of operands and values, `Recording.offsets`
    """
    f = facts
    first, repeats = _find(f.kinds, f.counts, f.firsts, *offsets, f.operands, f.pure, f.numbers, f.num_data, f.held,
                           *f.lookups)
    calls, operands, numbers, value_of = _drop(first, *offsets, f.operands, f.num_data, len(f.numbers))
    return Distinct(calls, repeats, operands, numbers, value_of)


@njit(cache=True, nogil=True)
def _find(kinds, call_count, call_first, operand_offsets, value_offsets, operands,  # type: ignore[no-untyped-def]
          pure, numbers, num_data, held, starts, counts, tables, ids, names_row):
    num_calls, num_kinds, num_looks = len(kinds), len(pure), 1
    for look in names_row:
        num_looks = max(num_looks, look + 1)
    maker, all_kinds = np.empty(value_offsets[-1], np.int64), kinds.copy()
    value_of = np.arange(value_offsets[-1])             # the value itself, or that of the first call
    is_held = np.zeros(value_offsets[-1], np.bool_)
    is_held[held] = True
    first, repeats, count = np.arange(num_calls), np.empty(num_calls, np.int64), 0
    names, codes = np.empty(len(operands), np.int64), np.empty(num_calls, np.uint64)
    size = 16
    while size < 2 * num_calls:
        size *= 2
    table, mask = np.full(size, -1, np.int64), np.uint64(size - 1)
    for i in range(num_calls):
        begin, end = operand_offsets[i], operand_offsets[i + 1]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            maker[v] = i
        for j in range(begin, end):
            token = operands[j]
            # (Whether an operand is a number is the same in all calls of a kind.)
            names[j] = value_of[token] if token >= 0 else numbers[-1 - token - num_data] if -1 - token >= num_data \
                else token
        if counts[i] == 1:                                      # a row of a table, whatever array has its number
            all_kinds[i], names[begin:end] = num_kinds + tables[i] * num_looks, 0
            names[begin] = ids[starts[i]]
        elif names_row[kinds[i]] >= 0 and end == begin + 1 and operands[begin] >= 0:
            source = maker[operands[begin]]
            if counts[source]:
                all_kinds[i] = num_kinds + tables[source] * num_looks + names_row[kinds[i]]
                names[begin] = ids[starts[source] + call_first[i]]
        code = np.uint64(all_kinds[i]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(call_count[i])
        for j in range(begin, end):
            code = (code ^ np.uint64(names[j])) * np.uint64(0xFF51AFD7ED558CCD)
            code ^= code >> np.uint64(32)
        codes[i] = code
        if not pure[kinds[i]]:
            continue
        at = code & mask
        while table[at] >= 0:
            k = table[at]
            if codes[k] == code and all_kinds[k] == all_kinds[i] and call_count[k] == call_count[i]:
                same = True
                for j in range(end - begin):
                    if names[operand_offsets[k] + j] != names[begin + j]:
                        same = False
                        break
                if same:
                    break
            at = (at + np.uint64(1)) & mask
        if table[at] < 0:
            table[at] = i
            continue
        stays = False
        for v in range(value_offsets[i], value_offsets[i + 1]):
            stays |= is_held[v]
        if not stays:
            first[i], repeats[count] = table[at], i
            count += 1
            for v in range(value_offsets[i], value_offsets[i + 1]):
                value_of[v] = value_offsets[first[i]] + v - value_offsets[i]
    return first, repeats[:count]


@njit(cache=True, nogil=True)
def _drop(first, operand_offsets, value_offsets, operands, num_data, num_numbers):  # type: ignore[no-untyped-def]
    calls = np.empty(len(first), np.int64)
    tokens, value_of = np.empty(len(operands), np.int64), np.empty(value_offsets[-1], np.int64)
    numbers = np.empty(num_numbers, np.int64)
    count = end = values = num_left = 0
    for i in range(len(first)):
        if first[i] != i:
            for v in range(value_offsets[i], value_offsets[i + 1]):
                value_of[v] = value_of[value_offsets[first[i]] + v - value_offsets[i]]
            continue
        calls[count] = i
        count += 1
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            token = operands[j]
            if token >= 0:
                token = value_of[token]
            elif -1 - token >= num_data:
                numbers[num_left] = -1 - token - num_data
                token = -1 - num_data - num_left
                num_left += 1
            tokens[end] = token
            end += 1
        for v in range(value_offsets[i], value_offsets[i + 1]):
            value_of[v] = values
            values += 1
    return calls[:count], tokens[:end], numbers[:num_left], value_of
