"""Samples of a flush: found, known again, and put together. Pure: arrays in, arrays out; no device, no MXNet.

A sample is a stretch of calls that read nothing of what was recorded before, and that nobody behind it reads. What it
does is written down as its *code*, without a trace of where it stands: values are numbered from its first one, outside
arrays by first appearance. Samples with the same code do the same, in whatever flush.

What runs for a sample, once its operators are joined, is its *form*. A flush of samples whose forms are known is these
forms one behind the other: a merge, with no look at its calls but to compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import offsets_of

__all__ = ["Cut", "Form", "Merged", "Parts", "any_reads", "cut_samples", "forms_of", "merge_forms", "starts_of_samples",
           "take_samples"]

BITS = 30           # of a word, that say which results somebody holds


@njit(cache=True, nogil=True)
def starts_of_samples(indptr, producers):  # type: ignore[no-untyped-def]
    """Where samples begin, and where the last one ends: int64 array, shape (samples + 1,).

    Call i reads results of the earlier calls producers[indptr[i]:indptr[i + 1]], or of nobody (-1).
    """
    num_calls = len(indptr) - 1
    starts = np.empty(num_calls + 1, np.int64)
    count, lowest = 0, num_calls
    starts[0] = num_calls
    for i in range(num_calls - 1, -1, -1):          # what calls from i on read begins at `lowest`
        for j in range(indptr[i], indptr[i + 1]):
            if producers[j] >= 0:
                lowest = min(lowest, producers[j])
        if lowest >= i:
            count += 1
            starts[count] = i
    return starts[:count + 1][::-1].copy()


@njit(cache=True, nogil=True)
def any_reads(call_class, operand_offsets, value_offsets, operands, chosen):  # type: ignore[no-untyped-def]
    """Whether a call of some chosen class reads a call of one."""
    is_chosen = np.zeros(value_offsets[-1], np.bool_)
    for i in range(len(call_class)):
        if chosen[call_class[i]]:
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if operands[j] >= 0 and is_chosen[operands[j]]:
                    return True
            is_chosen[value_offsets[i]:value_offsets[i + 1]] = True
    return False


class Cut(NamedTuple):
    """A recording, cut into samples: of each array, where the part of every sample begins and the last one ends.

    Attributes
    ----------
    starts, values, numbers : int64 arrays, shape (samples + 1,)
        Its calls, its values, and those of its operands that are numbers.
    codes, code_offsets : int32 array; int64 array, shape (samples + 1,)
    leaves, leaf_offsets : int64 arrays
        The other leaves that a sample reads, by first appearance.
    """

    starts: Any
    values: Any
    numbers: Any
    codes: Any
    code_offsets: Any
    leaves: Any
    leaf_offsets: Any

    def keys(self) -> list[bytes]:
        """The codes as keys of a table."""
        data, ends = self.codes.tobytes(), (4 * self.code_offsets).tolist()
        return [data[a:b] for a, b in zip(ends, ends[1:])]


def cut_samples(call_entry: Any, offsets: tuple[Any, Any], operands: Any, kinds: Any, slots: Any, num_data: int,
                leaf_specs: Any, held: Any) -> Cut:
    """Find the samples, and write down what they do.

    Parameters
    ----------
    call_entry : int64 array, the entry of each call
    offsets : where the operands and the values of each call begin, `Recording.offsets`
    operands : int64 array, tokens
    kinds, slots : int64 arrays, shape (entries,)
        A number that stands for the entry in all flushes; and how many operands an element of its list has, or 0.
    num_data : leaves that are not numbers
    leaf_specs : int64 array, what each leaf looks like
    held : int64 array
        Values that somebody needs for himself.
    """
    return Cut(*_cut(call_entry, *offsets, operands, kinds, slots, num_data, leaf_specs, held))


@njit(cache=True, nogil=True)
def _cut(call_entry, operand_offsets, value_offsets, operands, kinds, slots, num_data,  # type: ignore[no-untyped-def]
         leaf_specs, held):
    num_calls, num_values = len(call_entry), value_offsets[-1]
    maker = np.empty(num_values, np.int64)
    for i in range(num_calls):
        for v in range(value_offsets[i], value_offsets[i + 1]):
            maker[v] = i
    producers = np.empty(len(operands), np.int64)
    for j in range(len(operands)):
        producers[j] = maker[operands[j]] if operands[j] >= 0 else -1
    starts = starts_of_samples(operand_offsets, producers)
    is_held = np.zeros(num_values, np.bool_)
    is_held[held] = True
    count = len(starts) - 1
    numbers, code_offsets = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    leaves, leaf_offsets = np.empty(len(operands), np.int64), np.zeros(count + 1, np.int64)
    codes = np.empty(2 * num_calls + 2 * len(operands) + num_values, np.int32)
    seen, place = np.full(num_data, -1, np.int64), np.empty(num_data, np.int64)
    end = num_leaves = num_numbers = 0
    for k in range(count):
        first_value, first_leaf = value_offsets[starts[k]], num_leaves
        for i in range(starts[k], starts[k + 1]):
            entry, some = call_entry[i], False
            for v in range(value_offsets[i], value_offsets[i + 1]):
                some |= is_held[v]
            codes[end] = -1 - kinds[entry] if some else kinds[entry]
            end += 1
            if some:
                word = 0
                for v in range(value_offsets[i], value_offsets[i + 1]):
                    bit = (v - value_offsets[i]) % BITS
                    word |= np.int64(is_held[v]) << bit
                    if bit == BITS - 1 or v + 1 == value_offsets[i + 1]:
                        codes[end], word = word, 0
                        end += 1
            if slots[entry]:
                codes[end] = operand_offsets[i + 1] - operand_offsets[i]
                end += 1
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                token = operands[j]
                if token >= 0:
                    codes[end] = token - first_value
                elif -1 - token >= num_data:        # (Which operands are numbers is the same in all calls of a kind.)
                    num_numbers += 1
                    continue
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
        code_offsets[k + 1], leaf_offsets[k + 1], numbers[k + 1] = end, num_leaves, num_numbers
    return starts, value_offsets[starts], numbers, codes[:end], code_offsets, leaves[:num_leaves], leaf_offsets


def take_samples(cut: Cut, chosen: Any, operands: Any, offsets: tuple[Any, Any]) -> tuple[Cut, Any, Any, Any]:
    """Some of the samples by themselves: cut, their calls, their operands with values numbered anew, and these numbers.

    Parameters
    ----------
    chosen : int64 array, which samples
    operands, offsets : of the recording
    """
    starts, values, calls, tokens, value_of = _take(cut.starts, cut.values, chosen, operands, *offsets)
    # (Codes are not asked for again; where leaves and numbers of a sample stand does not change.)
    leaf_counts = np.diff(cut.leaf_offsets)[chosen]
    leaf_offsets = offsets_of(leaf_counts)
    places = np.arange(leaf_offsets[-1]) + np.repeat(cut.leaf_offsets[chosen] - leaf_offsets[:-1], leaf_counts)
    part = Cut(starts, values, cut.numbers[chosen], cut.codes[:0], cut.code_offsets[:1], cut.leaves[places],
               leaf_offsets)
    return part, calls, tokens, value_of


@njit(cache=True, nogil=True)
def _take(starts, values, chosen, operands, operand_offsets, value_offsets):  # type: ignore[no-untyped-def]
    new_starts, new_values = np.zeros(len(chosen) + 1, np.int64), np.zeros(len(chosen) + 1, np.int64)
    for n in range(len(chosen)):
        k = chosen[n]
        new_starts[n + 1] = new_starts[n] + starts[k + 1] - starts[k]
        new_values[n + 1] = new_values[n] + values[k + 1] - values[k]
    calls, tokens = np.empty(new_starts[-1], np.int64), np.empty(len(operands), np.int64)
    value_of, end = np.full(value_offsets[-1], -1, np.int64), 0
    for n in range(len(chosen)):
        k = chosen[n]
        for i in range(starts[k], starts[k + 1]):
            calls[new_starts[n] + i - starts[k]] = i
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                tokens[end] = operands[j] - values[k] + new_values[n] if operands[j] >= 0 else operands[j]
                end += 1
        for v in range(values[k], values[k + 1]):
            value_of[v] = new_values[n] + v - values[k]
    return new_starts, new_values, calls, tokens[:end], value_of


# ---- forms -------------------------------------------------------------------------------------------------------

class Form(NamedTuple):
    """What runs for a sample, without a trace of where the sample stands.

    Attributes
    ----------
    calls : int32 array, shape (calls, 3)
        A recorded call (of several, one of them), by its number in the sample; the class that was made for it, by its
        place in `made`, or -1 if the recorded call runs as it is; and the number of its operands.
    operands : int32 array
        Values by their number in the form; then the sample's leaves (-1, ..), by first appearance, and its numbers.
    value_of : int32 array
        Value of the sample -> value of the form, -1 where it is gone.
    num_values : of the form
    made : classes that were not recorded
    """

    calls: Any
    operands: Any
    value_of: Any
    num_values: int
    made: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        return 400 + sum(a.nbytes for a in (self.calls, self.operands, self.value_of)) + 8 * len(self.made)


class Parts(NamedTuple):
    """What runs for a flush, in an order of the run: what forms are cut from.

    Attributes
    ----------
    call_made : int64 array, shape (calls,)
        The class that was made for each call, by its place among these; -1 for recorded ones.
    operand_offsets, value_offsets, operands : of these calls
    value_of : int64 array
        Recorded value -> value, -1 where it is gone.
    """

    call_made: Any
    operand_offsets: Any
    value_offsets: Any
    operands: Any
    value_of: Any


def forms_of(cut: Cut, parts: Parts, recorded_values: Any, num_data: int, made: Sequence[Any]) -> list[Form]:
    """The form of each sample.

    Parameters
    ----------
    recorded_values : int64 array, where the values of each recorded call begin
    made : the classes that were made
    """
    calls, operands, value_of, made_lists, *ends = _forms(
        tuple(cut), tuple(parts), recorded_values, num_data, len(made))
    call_ends, operand_ends, value_ends, made_ends = (part.tolist() for part in ends)
    old_ends, made_lists, found = cut.values.tolist(), made_lists.tolist(), []
    for k in range(len(cut.starts) - 1):            # (copies: a form shall not keep a whole flush)
        found.append(Form(
            calls[call_ends[k]:call_ends[k + 1]].copy(), operands[operand_ends[k]:operand_ends[k + 1]].copy(),
            value_of[old_ends[k]:old_ends[k + 1]].copy(), value_ends[k + 1] - value_ends[k],
            tuple([made[m] for m in made_lists[made_ends[k]:made_ends[k + 1]]])))
    return found


@njit(cache=True, nogil=True)
def _forms(cut, parts, recorded_values, num_data, num_made):  # type: ignore[no-untyped-def]
    starts, values, numbers, _, _, leaves, leaf_offsets = cut
    call_made, operand_offsets, value_offsets, operands, value_of = parts
    num_samples, num_calls = len(starts) - 1, len(call_made)
    maker = np.empty(value_offsets[-1], np.int64)
    for i in range(num_calls):
        for v in range(value_offsets[i], value_offsets[i + 1]):
            maker[v] = i
    call_of, sample_of = np.empty(num_calls, np.int64), np.full(num_calls, -1, np.int64)
    call_ends = np.zeros(num_samples + 1, np.int64)
    for k in range(num_samples):
        for i in range(starts[k], starts[k + 1]):
            for v in range(recorded_values[i], recorded_values[i + 1]):
                if value_of[v] >= 0:
                    call = maker[value_of[v]]
                    if sample_of[call] < 0:
                        call_ends[k + 1] += 1
                    call_of[call], sample_of[call] = i, k
    call_ends = np.cumsum(call_ends)
    at, by_sample = call_ends.copy(), np.empty(num_calls, np.int64)
    for i in range(num_calls):                      # by sample, in each as they run
        by_sample[at[sample_of[i]]] = i
        at[sample_of[i]] += 1

    calls, tokens = np.empty((num_calls, 3), np.int32), np.empty(len(operands), np.int32)
    new_value, new_value_of = np.empty(value_offsets[-1], np.int64), np.full(len(value_of), -1, np.int32)
    made_lists, leaf_place = np.empty(num_calls, np.int64), np.empty(num_data, np.int64)
    seen, place = np.full(num_made, -1, np.int64), np.empty(num_made, np.int64)
    operand_ends, value_ends = np.zeros(num_samples + 1, np.int64), np.zeros(num_samples + 1, np.int64)
    made_ends = np.zeros(num_samples + 1, np.int64)
    end = all_values = num_lists = 0
    for k in range(num_samples):
        first_made, num_values, num_leaves = num_lists, 0, leaf_offsets[k + 1] - leaf_offsets[k]
        for n in range(num_leaves):
            leaf_place[leaves[leaf_offsets[k] + n]] = n
        for row in range(call_ends[k], call_ends[k + 1]):
            i = by_sample[row]
            m = call_made[i]
            if m >= 0 and seen[m] != k:
                seen[m], place[m], made_lists[num_lists] = k, num_lists - first_made, m
                num_lists += 1
            calls[row, 0], calls[row, 1] = call_of[i] - starts[k], place[m] if m >= 0 else -1
            calls[row, 2] = operand_offsets[i + 1] - operand_offsets[i]
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                token = operands[j]
                if token >= 0:
                    tokens[end] = new_value[token]
                elif -1 - token >= num_data:
                    tokens[end] = -1 - num_leaves - (-1 - token - num_data - numbers[k])
                else:
                    tokens[end] = -1 - leaf_place[-1 - token]
                end += 1
            for v in range(value_offsets[i], value_offsets[i + 1]):
                new_value[v] = num_values
                num_values += 1
        for v in range(values[k], values[k + 1]):
            if value_of[v] >= 0:
                new_value_of[v] = new_value[value_of[v]]
        all_values += num_values
        operand_ends[k + 1], value_ends[k + 1], made_ends[k + 1] = end, all_values, num_lists
    return calls, tokens, new_value_of, made_lists, call_ends, operand_ends, value_ends, made_ends


class Merged(NamedTuple):
    """Forms one behind the other.

    Attributes
    ----------
    call_of, call_made : int64 arrays, shape (calls,)
        The recorded call of each, and the class that was made for it, by its place in `made`; -1 if there is none.
    num_operands : int64 array, shape (calls,)
    operands : int64 array, tokens
    value_of : int64 array
        Recorded value -> value, -1 where it is gone.
    num_values : of all forms
    made : classes that were not recorded, each once
    """

    call_of: Any
    call_made: Any
    num_operands: Any
    operands: Any
    value_of: Any
    num_values: int
    made: list[Any]


def merge_forms(cut: Cut, forms: Sequence[Form], num_data: int) -> Merged:
    """The calls of all samples, in their order."""
    place: dict[Any, int] = {}
    made = [place.setdefault(m, len(place)) for form in forms for m in form.made]
    sizes = [(len(form.calls), len(form.operands), form.num_values, len(form.made)) for form in forms]
    offsets = np.zeros((len(forms) + 1, 4), np.int64)
    np.cumsum(np.array(sizes, np.int64).reshape(-1, 4), axis=0, out=offsets[1:])
    calls, operands, value_of = (np.concatenate(part) for part in list(zip(*forms))[:3])
    return Merged(*_merge(tuple(cut), offsets, calls, operands, value_of, np.array(made, np.int64), num_data),
                  int(offsets[-1, 2]), list(place))


@njit(cache=True, nogil=True)
def _merge(cut, offsets, calls, operands, value_of, made, num_data):  # type: ignore[no-untyped-def]
    starts, values, numbers, _, _, leaves, leaf_offsets = cut
    call_of, call_made = np.empty(len(calls), np.int64), np.empty(len(calls), np.int64)
    num_operands = np.empty(len(calls), np.int64)
    tokens, new_value_of = np.empty(len(operands), np.int64), np.empty(len(value_of), np.int64)
    for k in range(len(starts) - 1):
        for i in range(offsets[k, 0], offsets[k + 1, 0]):
            call_of[i], num_operands[i] = starts[k] + calls[i, 0], calls[i, 2]
            call_made[i] = made[offsets[k, 3] + calls[i, 1]] if calls[i, 1] >= 0 else -1
        num_leaves = leaf_offsets[k + 1] - leaf_offsets[k]
        for j in range(offsets[k, 1], offsets[k + 1, 1]):
            token = operands[j]
            if token >= 0:
                tokens[j] = offsets[k, 2] + token
            elif -1 - token < num_leaves:
                tokens[j] = -1 - leaves[leaf_offsets[k] - 1 - token]
            else:
                tokens[j] = -1 - num_data - numbers[k] - (-1 - token - num_leaves)
        for v in range(values[k], values[k + 1]):
            new_value_of[v] = offsets[k, 2] + value_of[v] if value_of[v] >= 0 else -1
    return call_of, call_made, num_operands, tokens, new_value_of
