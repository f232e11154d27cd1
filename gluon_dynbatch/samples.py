"""What runs for a sample: its form, known again and put together. Pure: arrays in, arrays out; no device, no MXNet.

What runs for a sample (see `cutting`), once its operators are joined, is its *form*. A flush of samples whose forms are
known is these forms one behind the other: a merge, with no look at its calls but to compare them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled, offsets_of

from .cutting import Cut
from .kinds import KIND, NAMED, NUM_OPERANDS, NUM_OUTPUTS, ROWS, SLOTS, KindTable

__all__ = ["Form", "Forms", "Merged", "Parts", "any_reads", "forms_of", "made_of", "merge_forms",
           "take_samples"]

# What a form begins with; then its kinds, its calls, their operands, the specs of its values, and where those are.
NUM_CALLS, NUM_TOKENS, NUM_VALUES, NUM_RECORDED, NUM_KINDS, NUM_MADE, HEADER = range(7)


class Form(NamedTuple):
    """What runs for a sample, without a trace of where the sample stands.

    Attributes
    ----------
    words : int32 numbers as bytes, so that forms are put together in one step
        Counts; the kinds of its recorded calls; of each call its kind by its place among these (or -1 - the place of
        its class in `made`), its rows, and the number of its operands; the operands: values by their number in the
        form, then (-1, ..) the sample's leaves by first appearance, and its numbers; the spec of each value; and for
        each value of the sample the value of the form, -1 where it is gone. The last part is missing where values are
        what was recorded.
    made : classes that were not recorded
    is_recorded : whether calls run as they were recorded
    """

    words: bytes
    made: tuple[Any, ...]
    is_recorded: bool


class Forms:
    """Forms by the code of their samples: the last used ones, as many as fit into `max_bytes`.

    Found by a checksum, and compared exactly.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._forms: OrderedDict[int, tuple[bytes, Form, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._forms)

    def get(self, checksums: Sequence[int], codes: Sequence[bytes]) -> list[Form | None]:
        """The form of each sample; None where it is not known."""
        found: list[Form | None] = []
        with self._lock:
            for checksum, code in zip(checksums, codes):
                known = self._forms.get(checksum)
                if known is None or known[0] != code:
                    found.append(None)
                else:
                    found.append(known[1])
                    self._forms.move_to_end(checksum)
        return found

    def put(self, samples: Iterable[tuple[int, bytes, Form]]) -> None:
        """Remember forms by checksum and code."""
        with self._lock:
            for checksum, code, form in samples:
                size = 400 + len(code) + len(form.words) + 8 * len(form.made)
                before = self._forms.pop(checksum, None)
                if before is not None:
                    self.num_bytes -= before[2]
                if size <= self.max_bytes:
                    self._forms[checksum] = code, form, size
                    self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._forms.popitem(last=False)[1][2]

    def clear(self) -> None:
        with self._lock:
            self._forms.clear()
            self.num_bytes = 0


@compiled
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


# ---- some of the samples -----------------------------------------------------------------------------------------

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
    part = Cut(starts, values, cut.numbers[chosen], cut.codes[:0], cut.code_offsets[:1], cut.checksums[chosen],
               cut.leaves[places], leaf_offsets)
    return part, calls, tokens, value_of


@compiled
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


def forms_of(cut: Cut, parts: Parts, recorded: tuple[Any, Any, Any, Any], kinds: KindTable, num_data: int,
             made: Sequence[Any]) -> list[Form]:
    """The form of each sample.

    Parameters
    ----------
    recorded : int64 arrays, of the recorded calls: entry and rows of each, where its values begin; and their specs
    kinds : of the entries
    made : the classes that were made
    """
    words, ends, made_lists, made_ends, differs = _forms(
        (cut.starts, cut.values, cut.numbers, cut.leaves, cut.leaf_offsets), tuple(parts), recorded, kinds.of(KIND),
        num_data, len(made))
    data, ends, differs = words.tobytes(), (4 * ends).tolist(), differs.tolist()
    if not made:
        return [Form(data[a:b], (), not other) for a, b, other in zip(ends, ends[1:], differs)]
    made_ends, made_lists = made_ends.tolist(), made_lists.tolist()
    lists = [tuple([made[m] for m in made_lists[a:b]]) for a, b in zip(made_ends, made_ends[1:])]
    return [Form(data[a:b], mine, not other) for a, b, mine, other in zip(ends, ends[1:], lists, differs)]


@compiled
def _forms(cut, parts, recorded, kinds, num_data, num_made):  # type: ignore[no-untyped-def]
    starts, values, numbers, leaves, leaf_offsets = cut
    call_made, operand_offsets, value_offsets, operands, value_of = parts
    old_entry, old_width, old_values, old_specs = recorded
    num_samples, num_calls, num_values = len(starts) - 1, len(call_made), value_offsets[-1]
    maker, specs = np.empty(num_values, np.int64), np.empty(num_values, np.int64)
    for i in range(num_calls):
        for v in range(value_offsets[i], value_offsets[i + 1]):
            maker[v] = i
    call_of, sample_of = np.empty(num_calls, np.int64), np.full(num_calls, -1, np.int64)
    call_ends = np.zeros(num_samples + 1, np.int64)
    for k in range(num_samples):
        for i in range(starts[k], starts[k + 1]):
            for v in range(old_values[i], old_values[i + 1]):
                if value_of[v] >= 0:
                    call = maker[value_of[v]]
                    if sample_of[call] < 0:
                        call_ends[k + 1] += 1
                    call_of[call], sample_of[call], specs[value_of[v]] = i, k, old_specs[v]
    call_ends = np.cumsum(call_ends)
    at, by_sample = call_ends.copy(), np.empty(num_calls, np.int64)
    for i in range(num_calls):                      # by sample, in each as they run
        by_sample[at[sample_of[i]]] = i
        at[sample_of[i]] += 1

    words = np.empty(HEADER * num_samples + 4 * num_calls + len(operands) + num_values + values[-1], np.int32)
    ends, made_ends = np.zeros(num_samples + 1, np.int64), np.zeros(num_samples + 1, np.int64)
    made_lists, new_value = np.empty(num_calls, np.int64), np.empty(num_values, np.int64)
    leaf_place = np.empty(num_data, np.int64)
    seen_made, made_place = np.full(num_made, -1, np.int64), np.empty(num_made, np.int64)
    seen_entry, entry_place = np.full(len(kinds), -1, np.int64), np.empty(len(kinds), np.int64)
    end, num_lists, differs = 0, 0, np.empty(num_samples, np.bool_)
    for k in range(num_samples):
        header, first_made, count, num_leaves = end, num_lists, 0, leaf_offsets[k + 1] - leaf_offsets[k]
        for n in range(num_leaves):
            leaf_place[leaves[leaf_offsets[k] + n]] = n
        end += HEADER
        for row in range(call_ends[k], call_ends[k + 1]):
            m, entry = call_made[by_sample[row]], old_entry[call_of[by_sample[row]]]
            if m >= 0:
                if seen_made[m] != k:
                    seen_made[m], made_place[m], made_lists[num_lists] = k, num_lists - first_made, m
                    num_lists += 1
            elif seen_entry[entry] != k:
                seen_entry[entry], entry_place[entry] = k, end - header - HEADER
                words[end] = kinds[entry]
                end += 1
        words[header + NUM_KINDS], words[header + NUM_MADE] = end - header - HEADER, num_lists - first_made
        tokens = end + 3 * (call_ends[k + 1] - call_ends[k])
        for row in range(call_ends[k], call_ends[k + 1]):
            i = by_sample[row]
            m = call_made[i]
            words[end] = -1 - made_place[m] if m >= 0 else entry_place[old_entry[call_of[i]]]
            words[end + 1], words[end + 2] = old_width[call_of[i]], operand_offsets[i + 1] - operand_offsets[i]
            end += 3
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                token = operands[j]
                if token >= 0:
                    words[tokens] = new_value[token]
                elif -1 - token >= num_data:
                    words[tokens] = -1 - num_leaves - (-1 - token - num_data - numbers[k])
                else:
                    words[tokens] = -1 - leaf_place[-1 - token]
                tokens += 1
            for v in range(value_offsets[i], value_offsets[i + 1]):
                new_value[v] = count
                count += 1
        words[header + NUM_CALLS], words[header + NUM_TOKENS] = call_ends[k + 1] - call_ends[k], tokens - end
        words[header + NUM_VALUES] = count
        end = tokens
        for row in range(call_ends[k], call_ends[k + 1]):
            for v in range(value_offsets[by_sample[row]], value_offsets[by_sample[row] + 1]):
                words[end] = specs[v]
                end += 1
        same = count == values[k + 1] - values[k]
        for v in range(values[k], values[k + 1]):
            words[end + v - values[k]] = new_value[value_of[v]] if value_of[v] >= 0 else -1
            same &= words[end + v - values[k]] == v - values[k]
        differs[k] = not same or num_lists > first_made
        words[header + NUM_RECORDED] = 0 if same else values[k + 1] - values[k]
        end += words[header + NUM_RECORDED]
        ends[k + 1], made_ends[k + 1] = end, num_lists
    return words[:end], ends, made_lists, made_ends, differs


class Merged(NamedTuple):
    """Forms one behind the other.

    Attributes
    ----------
    call_entry, call_class, call_width, call_count, call_first : int64 arrays, shape (calls,)
        As in a structure; classes by their place in `used`. Entries of what was made come behind those that were
        recorded.
    operands : int64 array, tokens
    value_specs : int64 array
    used : int64 array
        The classes that there are calls of. Those that were made come behind those that were recorded.
    operand_offsets, value_offsets : see `Recording.offsets`
    value_of : int64 array
        Recorded value -> value, -1 where it is gone. None if all are what was recorded.
    """

    call_entry: Any
    call_class: Any
    call_width: Any
    call_count: Any
    call_first: Any
    operands: Any
    value_specs: Any
    used: Any
    operand_offsets: Any
    value_offsets: Any
    value_of: Any


def made_of(forms: Iterable[Form]) -> list[Any]:
    """The classes that were made for forms, as they come."""
    lists = dict.fromkeys([form.made for form in forms])        # (samples of one model have mostly the same)
    return list(dict.fromkeys([cls for made in lists for cls in made]))


def merge_forms(cut: Cut, forms: Sequence[Form], kinds: KindTable, num_data: int, num_classes: int,
                made: Sequence[Any], made_facts: Sequence[tuple[int, int, int]]) -> Merged:
    """The calls of all samples, in their order.

    Parameters
    ----------
    kinds : of the entries
    num_data : leaves that are not numbers
    num_classes : those that were recorded
    made : `made_of` the forms
    made_facts : of each of these: the number of its class in the flush, `ClassInfo.slots`, and the number of outputs
    """
    words = np.frombuffer(b"".join([form.words for form in forms]), np.int32)
    place = {cls: k for k, cls in enumerate(made)}
    lists: dict[tuple[Any, ...], int] = {}          # classes that a form has made -> where they stand in `flat`
    flat: list[int] = []
    starts = []
    for form in forms:
        start = lists.get(form.made)
        if start is None:
            start = lists[form.made] = len(flat)
            flat += [place[cls] for cls in form.made]
        starts.append(start)
    *merged, value_of, same = _merge(
        words, (cut.values, cut.numbers, cut.leaves, cut.leaf_offsets), *kinds, np.array(starts, np.int64),
        np.array(flat, np.int64), np.array(made_facts, np.int64).reshape(-1, 3), num_data, num_classes)
    return Merged(*merged, None if same else value_of)


@compiled
def _entry_table(facts, entries):  # type: ignore[no-untyped-def]
    """Kinds -> entries: each stands where its number says, or at the next free place."""
    size = 16
    while size < 2 * len(entries):
        size *= 2
    table = np.full(size, -1, np.int32)
    for e in range(len(entries)):
        at = facts[entries[e] + KIND] & (size - 1)
        while table[at] >= 0:
            at = (at + 1) & (size - 1)
        table[at] = e
    return table


@compiled
def _merge(words, cut, facts, entries, classes, made_starts, made, made_facts,  # type: ignore[no-untyped-def]
           num_data, num_classes):
    values, numbers, leaves, leaf_offsets = cut
    at = num_calls = num_tokens = num_values = 0
    while at < len(words):
        num_calls += words[at + NUM_CALLS]
        num_tokens += words[at + NUM_TOKENS]
        num_values += words[at + NUM_VALUES]
        at += (HEADER + words[at + NUM_KINDS] + 3 * words[at + NUM_CALLS] + words[at + NUM_TOKENS]
               + words[at + NUM_VALUES] + words[at + NUM_RECORDED])
    call_entry, call_class = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    call_width, call_count = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    call_first, operands = np.empty(num_calls, np.int64), np.empty(num_tokens, np.int64)
    specs, value_of = np.empty(num_values, np.int64), np.empty(values[-1], np.int64)
    operand_offsets, value_offsets = np.empty(num_calls + 1, np.int64), np.empty(num_calls + 1, np.int64)
    number = np.zeros(num_classes + len(made_facts), np.int64)
    of_form, table = np.empty(len(entries), np.int64), _entry_table(facts, entries)
    at = call = operand = first_value = operand_offsets[0] = value_offsets[0] = 0
    same = True
    for k in range(len(values) - 1):
        header, num_leaves = at, leaf_offsets[k + 1] - leaf_offsets[k]
        at += HEADER
        for n in range(words[header + NUM_KINDS]):
            place = words[at + n] & (len(table) - 1)
            while facts[entries[table[place]] + KIND] != words[at + n]:
                place = (place + 1) & (len(table) - 1)
            of_form[n] = table[place]
        at += words[header + NUM_KINDS]
        for _ in range(words[header + NUM_CALLS]):
            if words[at] >= 0:
                entry = of_form[words[at]]
                kind = entries[entry]
                call_entry[call], call_class[call], call_width[call] = entry, classes[entry], facts[kind + ROWS]
                call_first[call], call_count[call], num_outputs = facts[kind + NAMED], 0, facts[kind + NUM_OUTPUTS]
                if facts[kind + SLOTS]:
                    call_count[call] = (words[at + 2] - facts[kind + NUM_OPERANDS]) // facts[kind + SLOTS]
            else:
                m = made[made_starts[k] - 1 - words[at]]
                call_entry[call], call_width[call] = len(entries) + m, words[at + 1]
                call_first[call], call_count[call] = 0, 0
                call_class[call], slots, num_outputs = made_facts[m, 0], made_facts[m, 1], made_facts[m, 2]
                if slots:
                    call_count[call] = words[at + 2] // slots
            number[call_class[call]] = 1
            operand_offsets[call + 1] = operand_offsets[call] + words[at + 2]
            value_offsets[call + 1] = value_offsets[call] + num_outputs
            at += 3
            call += 1
        for n in range(at, at + words[header + NUM_TOKENS]):
            token = words[n]
            if token >= 0:
                operands[operand] = first_value + token
            elif -1 - token < num_leaves:
                operands[operand] = -1 - leaves[leaf_offsets[k] - 1 - token]
            else:
                operands[operand] = -1 - num_data - numbers[k] - (-1 - token - num_leaves)
            operand += 1
        at += words[header + NUM_TOKENS]
        for n in range(words[header + NUM_VALUES]):
            specs[first_value + n] = words[at + n]
        at += words[header + NUM_VALUES]
        if words[header + NUM_RECORDED]:
            same = False
            for n in range(words[header + NUM_RECORDED]):
                value_of[values[k] + n] = first_value + words[at + n] if words[at + n] >= 0 else -1
            at += words[header + NUM_RECORDED]
        else:
            for n in range(words[header + NUM_VALUES]):
                value_of[values[k] + n] = first_value + n
        first_value += words[header + NUM_VALUES]
    used = np.flatnonzero(number)
    for n in range(len(used)):
        number[used[n]] = n
    for i in range(num_calls):
        call_class[i] = number[call_class[i]]
    return (call_entry, call_class, call_width, call_count, call_first, operands, specs, used, operand_offsets,
            value_offsets, value_of, same)
