"""A log, cut into samples. Pure: arrays in, arrays out; no device, no MXNet.

A sample is a stretch of calls that read nothing of what was recorded before, and that nobody behind it reads. What it
does is written down as its *code*, without a trace of where it stands: values are numbered from its first one, outside
arrays by first appearance. Samples with the same code do the same, in whatever flush.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled

from .kinds import FIRST_SPEC, KIND, NUM_NUMBERS, NUM_OPERANDS, NUM_OUTPUTS, SLOTS, KindTable

__all__ = ["Cut", "cut_log"]

BITS = 30           # of a word, that say which results somebody holds


class Cut(NamedTuple):
    """A log, cut into samples: of each array, where the part of every sample begins and the last one ends.

    Attributes
    ----------
    starts, values, numbers : int64 arrays, shape (samples + 1,)
        Its calls, its values, and those of its operands that are numbers.
    codes, code_offsets : int32 array; int64 array, shape (samples + 1,)
    checksums : int64 array, shape (samples,)
        Of the codes.
    leaves, leaf_offsets : int64 arrays
        The other leaves that a sample reads, by first appearance.
    """

    starts: Any
    values: Any
    numbers: Any
    codes: Any
    code_offsets: Any
    checksums: Any
    leaves: Any
    leaf_offsets: Any

    def keys(self) -> list[bytes]:
        """The codes, each by itself."""
        data, ends = memoryview(self.codes), self.code_offsets.tolist()
        return [data[a:b].tobytes() for a, b in zip(ends, ends[1:])]


def cut_log(log: Any, kinds: KindTable, first: int, leaf_specs: Any, held: Any, viewed: Any) -> tuple[Cut, Any]:
    """The samples of a log, and all numbers in it.

    Parameters
    ----------
    log : int64 array, calls: the entry, the length of a list if it takes one, and a token for each operand
    kinds : of the entries
    first : the token of the first value
    leaf_specs : int64 array, what each leaf looks like that is no number
    held : bool array
        Of each value, whether somebody needs it for himself.
    viewed : int64 array, values of which this is so as well
    """
    *cut, numbers = _cut(log, kinds.facts, kinds.starts, first, leaf_specs, held, viewed)
    return Cut(*cut), numbers


@compiled
def _cut(log, facts, entries, first, leaf_specs, is_held, viewed):  # type: ignore[no-untyped-def]
    held = is_held.copy()
    for v in viewed:
        if v < len(held):
            held[v] = True
    # Where samples begin: in the log, as calls, as values, and as numbers. Who reads a sample is part of it, and so is
    # all that stands between.
    begins = np.empty((len(log) + 1, 4), np.int64)
    at = count = calls = values = num_numbers = 0
    while at < len(log):
        begins[count, 0], begins[count, 1], begins[count, 2], begins[count, 3] = at, calls, values, num_numbers
        kind = entries[log[at]]
        end = at + 1 + facts[kind + NUM_OPERANDS]
        if facts[kind + SLOTS]:
            end += 1 + facts[kind + SLOTS] * log[at + 1]
        lowest = values
        for j in range(at + 1, end):
            if log[j] >= first and log[j] - first < lowest:     # (a number is never as large as a token)
                lowest = log[j] - first
        count += 1
        while begins[count - 1, 2] > lowest:
            count -= 1
        calls += 1
        values += facts[kind + NUM_OUTPUTS]
        num_numbers += facts[kind + NUM_NUMBERS]
        at = end
    begins[count, 0], begins[count, 1], begins[count, 2], begins[count, 3] = at, calls, values, num_numbers

    numbers = np.empty(num_numbers, np.int64)
    code_offsets, leaf_offsets = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    codes, leaves = np.empty(2 * len(log) + values, np.int32), np.empty(len(log), np.int64)
    seen, place = np.full(len(leaf_specs), -1, np.int64), np.empty(len(leaf_specs), np.int64)
    checksums = np.empty(count, np.int64)
    at = end = v = num_numbers = num_leaves = 0
    for k in range(count):
        first_value, first_leaf = first + begins[k, 2], num_leaves
        while at < begins[k + 1, 0]:
            kind = entries[log[at]]
            num_outputs, num_operands = facts[kind + NUM_OUTPUTS], facts[kind + NUM_OPERANDS]
            at += 1
            some = False
            for n in range(v, v + num_outputs):
                some |= held[n]
            codes[end] = -1 - facts[kind + KIND] if some else facts[kind + KIND]
            end += 1
            if some:
                word = 0
                for n in range(num_outputs):
                    word |= np.int64(held[v + n]) << (n % BITS)
                    if n % BITS == BITS - 1 or n + 1 == num_outputs:
                        codes[end], word = word, 0
                        end += 1
            v += num_outputs
            all_operands = num_operands
            if facts[kind + SLOTS]:
                codes[end] = log[at]
                end += 1
                all_operands += facts[kind + SLOTS] * log[at]
                at += 1
            is_number, has_numbers = kind + FIRST_SPEC + num_outputs, facts[kind + NUM_NUMBERS] > 0
            for j in range(all_operands):
                token = log[at + j]
                if has_numbers and j < num_operands and facts[is_number + j]:
                    numbers[num_numbers] = token
                    num_numbers += 1
                elif token >= 0:
                    codes[end] = token - first_value
                    end += 1
                else:
                    leaf = -1 - token
                    if seen[leaf] != k:
                        seen[leaf], place[leaf], leaves[num_leaves] = k, num_leaves - first_leaf, leaf
                        num_leaves += 1
                        codes[end] = -1 - place[leaf]
                        end += 1
                        codes[end] = leaf_specs[leaf]
                    else:
                        codes[end] = -1 - place[leaf]
                    end += 1
            at += all_operands
        code_offsets[k + 1], leaf_offsets[k + 1] = end, num_leaves
        total = np.int64(0)
        for n in range(code_offsets[k], end):           # (no word waits for the one before)
            mixed = (codes[n] ^ ((n - code_offsets[k]) * np.int64(0x2545F4914F6CDD1D))) * np.int64(0x1B873593CC9E2D51)
            total += mixed ^ (mixed >> 29)
        checksums[k] = total
    begins = begins[:count + 1]
    return (begins[:, 1].copy(), begins[:, 2].copy(), begins[:, 3].copy(), codes[:end], code_offsets, checksums,
            leaves[:num_leaves], leaf_offsets, numbers)
