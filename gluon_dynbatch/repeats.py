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

from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled

from .analyzer import Recording

__all__ = ["Distinct", "Facts", "Lookups", "find_repeats"]


class Distinct(NamedTuple):
    """What is left of a recording without repeats.

    Attributes
    ----------
    entries, call_class, call_width, call_count, call_first, operands : int64 arrays
        Of the calls that are left; operands with the numbers that values and leaves have then.
    operand_offsets, value_offsets : see `Recording.offsets`
    value_specs : int64 array, of the values that are left
    numbers : int64 array, the numbers that are left; they are the last leaves as before
    value_of : int64 array
        For each value of the whole recording, its number then; that of the first call for repeats.
    dropped, terms : int64 arrays, shape (classes,)
        How many calls of each class repeat others; and how long the lists are that these take, less one for each.
    """

    entries: Any
    call_class: Any
    call_width: Any
    call_count: Any
    call_first: Any
    operands: Any
    operand_offsets: Any
    value_offsets: Any
    value_specs: Any
    numbers: Any
    value_of: Any
    dropped: Any
    terms: Any

    def recording(self, r: Recording, num_leaves: int) -> Recording:
        """What is left of the whole recording, with so many leaves."""
        left = Recording(r.classes, self.call_class, self.call_width, self.operands, r.leaf_buffers[:num_leaves],
                         r.leaf_widths[:num_leaves], r.leaf_wanted[:num_leaves], self.value_of[r.heads],
                         self.call_count, self.call_first)
        left.offsets = self.operand_offsets, self.value_offsets
        return left


class Lookups(NamedTuple):
    """Calls that look up rows of a table, one for each of some known numbers: rows of equal numbers are the same.

    Attributes
    ----------
    starts, counts : int64 arrays, shape (calls,)
        Where in `ids` the numbers of a call begin, and how many there are; 0 for all other calls. Empty if there is no
        such call.
    tables : int64 array, shape (calls,)
        The number of its table.
    names_row : int64 array, shape (kinds,)
        For kinds of calls that name a single row: the same number, from 1 on, where shape, dtype and the state of
        autograd are the same; -1 for all others.
    ids : int64 array
    """

    starts: Any
    counts: Any
    tables: Any
    names_row: Any
    ids: Any


class Facts(NamedTuple):
    """All that decides which calls repeat others, beside the recording.

    Attributes
    ----------
    kinds : int64 array, shape (calls,)
        Calls of one kind on the same operands have the same results ..
    pure : int64 array, shape (kinds,)
        .. if this is not 0. Kinds behind these are of calls that nobody recorded: they draw no random numbers, and look
        nothing up.
    numbers : int64 array
        The values of the last leaves: each is read by one call, all have one spec, and equal ones are the same operand.
    num_data : the number of the other leaves
    viewed : int64 array
        Values that somebody needs for himself, beside the heads: their calls repeat no other.
    value_specs : int64 array
    lookups : Lookups
    """

    kinds: Any
    pure: Any
    numbers: Any
    num_data: int
    viewed: Any
    value_specs: Any
    lookups: Lookups


def find_repeats(facts: Facts, r: Recording) -> Distinct:
    """Leave out the calls that repeat others."""
    return Distinct(*_find(*facts, r.call_class, r.call_width, r.call_count, r.call_first, *r.offsets, r.operands,
                           r.heads, len(r.classes)))


@compiled
def _find(kinds, pure, numbers, num_data, viewed, value_specs, lookups, call_class,  # type: ignore[no-untyped-def]
          call_width, call_count, call_first, operand_offsets, value_offsets, operands, heads, num_classes):
    starts, counts, tables, names_row, ids = lookups
    num_calls, num_kinds, num_looks, looks_up = len(kinds), 0, 1, len(counts) > 0
    if looks_up:                        # rows of tables have kinds behind all others
        for kind in kinds:
            num_kinds = max(num_kinds, kind + 1)
        for look in names_row:
            num_looks = max(num_looks, look + 1)
    num_values = value_offsets[-1]
    is_held, value_of = np.zeros(num_values, np.bool_), np.empty(num_values, np.int64)
    for v in heads:
        is_held[v] = True
    for v in viewed:
        is_held[v] = True
    maker = np.empty(num_values if looks_up else 0, np.int64)
    # Of the calls that are left, and what they are compared by.
    entry, left_class = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    width, length = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    first, tokens = np.empty(num_calls, np.int64), np.empty(len(operands), np.int64)
    ends, value_ends = np.empty(num_calls + 1, np.int64), np.empty(num_calls + 1, np.int64)
    specs, left_numbers = np.empty(num_values, np.int64), np.empty(len(numbers), np.int64)
    all_kinds, codes = np.empty(num_calls, np.int64), np.empty(num_calls, np.uint64)
    names = np.empty(len(operands), np.int64)
    dropped, terms = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
    size = 16
    while size < 2 * num_calls:
        size *= 2
    table, mask = np.full(size, -1, np.int32), np.uint64(size - 1)
    left = end = values = num_left = ends[0] = value_ends[0] = 0
    for i in range(num_calls):
        begin, kind, count = operand_offsets[i], kinds[i], call_count[i]
        num_operands, num_outputs = operand_offsets[i + 1] - begin, value_offsets[i + 1] - value_offsets[i]
        named, num_numbers = kind, 0
        for j in range(num_operands):
            token = operands[begin + j]
            if token >= 0:
                token = value_of[token]
            tokens[end + j] = names[end + j] = token
            if -1 - token >= num_data:          # (whether an operand is a number is the same in all calls of a kind)
                names[end + j] = numbers[-1 - token - num_data]
                num_numbers += 1
        if looks_up:
            for v in range(value_offsets[i], value_offsets[i + 1]):
                maker[v] = i
            if counts[i] == 1:                                  # a row of a table, whatever array has its number
                named, names[end:end + num_operands] = num_kinds + tables[i] * num_looks, 0
                names[end] = ids[starts[i]]
            elif kind < len(names_row) and names_row[kind] >= 0 and num_operands == 1 and operands[begin] >= 0:
                source = maker[operands[begin]]
                if counts[source]:
                    named = num_kinds + tables[source] * num_looks + names_row[kind]
                    names[end] = ids[starts[source] + call_first[i]]
        same = -1
        if kind >= len(pure) or pure[kind]:
            code = np.uint64(named) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(count)
            for j in range(end, end + num_operands):
                code = (code ^ np.uint64(names[j])) * np.uint64(0xFF51AFD7ED558CCD)
                code ^= code >> np.uint64(32)
            at = code & mask
            while table[at] >= 0:
                k = table[at]
                if codes[k] == code and all_kinds[k] == named and length[k] == count:
                    same = k
                    for j in range(num_operands):
                        if names[ends[k] + j] != names[end + j]:
                            same = -1
                            break
                    if same >= 0:
                        break
                at = (at + np.uint64(1)) & mask
            if same < 0:
                table[at], codes[left], all_kinds[left] = left, code, named
            else:
                for v in range(value_offsets[i], value_offsets[i + 1]):
                    if is_held[v]:
                        same = -1
        if same >= 0:
            for n in range(num_outputs):
                value_of[value_offsets[i] + n] = value_ends[same] + n
            dropped[call_class[i]] += 1
            terms[call_class[i]] += count - 1
            continue
        if num_numbers:
            for j in range(end, end + num_operands):
                if -1 - tokens[j] >= num_data:
                    left_numbers[num_left] = numbers[-1 - tokens[j] - num_data]
                    tokens[j] = -1 - num_data - num_left
                    num_left += 1
        for n in range(num_outputs):
            value_of[value_offsets[i] + n] = values + n
            specs[values + n] = value_specs[value_offsets[i] + n]
        entry[left], left_class[left], width[left] = kind, call_class[i], call_width[i]
        length[left], first[left] = count, call_first[i]
        left, end, values = left + 1, end + num_operands, values + num_outputs
        ends[left], value_ends[left] = end, values
    # (Copies: they are remembered, and all calls may be one.)
    return (entry[:left].copy(), left_class[:left].copy(), width[:left].copy(), length[:left].copy(),
            first[:left].copy(), tokens[:end].copy(), ends[:left + 1].copy(), value_ends[:left + 1].copy(),
            specs[:values].copy(), left_numbers[:num_left].copy(), value_of, dropped, terms)
