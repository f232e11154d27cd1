"""The log of a flush: taken, known again, and read into tables.

A log that comes again is known, with all that was worked out from it. Of others the samples are known, or some of them
(see `merging`); only where there are new ones, or somebody wants every call by itself, is a log read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cavs_core import RunError, compiled, need_gradient

from .cutting import Cut, cut_log
from .fastpath import FIRST, find_held
from .kinds import (
    FIRST_SPEC,
    KIND,
    LOOKS_UP,
    NAMED,
    NUM_NUMBERS,
    NUM_OPERANDS,
    NUM_OUTPUTS,
    PURE,
    ROWS,
    SLOTS,
    kinds_of,
)
from .plan_cache import PlanCache, checksum
from .tables import Members, Structure, Tables, make_structure

__all__ = ["RECORDINGS", "Log", "take_log"]

RECORDINGS = PlanCache(32 << 20)        # logs -> Known


class Known:
    """What is remembered of a log: one and the same object for all flushes that recorded the same.

    Attributes
    ----------
    num_calls, num_values : int
    structure : what was recorded; None until somebody reads it
    members : what runs of it, where operators are joined; None until somebody asks
    """

    def __init__(self, num_calls: int, num_values: int):
        self.num_calls, self.num_values = num_calls, num_values
        self.structure: Structure | None = None
        self.members: Members | None = None

    @property
    def num_bytes(self) -> int:
        both = {id(s): s for s in (self.structure, self.members and self.members.structure) if s is not None}
        return sum(structure.num_bytes for structure in both.values())


class Log:
    """What a flush recorded.

    Attributes
    ----------
    words : int64 array; see fastpath.py
    entries, classes : Entry and CallClass of each number
    wanted_params : for each class and each of its parameters, whether it asks for a gradient
    data, specs, wanted : what the calls took from outside, but for numbers that stand in the log; what each looks like,
        and whether a gradient may flow into it
    parameters : leaf -> the parameter whose array it is
    number_spec : what numbers in the log look like
    held : bool array, for each value whether somebody holds it
    viewed : int64 array, values that others share their memory with, in order
    kinds : of the entries
    known : what is remembered of such a log
    """

    def __init__(self, calls: Any):
        # Copies, in the opposite order of recording: another thread may record one more call right now, which is not
        # taken.
        self.words = np.frombuffer(calls.log[:], np.int64)
        self.held = find_held(calls.made, recycles=True)
        self.entries = list(calls.entries)
        count = len(self.entries)
        self.kinds = kinds_of(calls.kinds[:count], calls.entry_classes[:count])
        self.classes, specs = list(calls.classes), tuple(calls.leaf_spec)
        self.data, self.viewed = calls.leaves[:len(specs)], np.array(sorted(set(calls.viewed)), np.int64)
        self.specs, self.number_spec = np.array(specs, np.int64), calls.recorder.number_spec
        self.wanted_params = tuple([tuple([p.parameter.grad_req != "null" for p in params]) if params else ()
                                    for params in [cls.signature.params for cls in self.classes]])
        records = any([cls.recorded for cls in self.classes])
        self.wanted = need_gradient(self.data) if records else np.zeros(len(self.data), bool)
        of_parameters = calls.recorder.parameters
        self.parameters = {k: of_parameters[id(x)][0] for k, x in enumerate(self.data) if id(x) in of_parameters}
        # All that a structure depends on. (An owner's spec follows from the signature and the number of rows.)
        # (As bytes, as far as may be: they are hashed once.)
        self._key = (self.kinds.of(KIND).tobytes(), tuple([cls.signature for cls in self.classes]),
                     bytes([cls.recorded for cls in self.classes]), self.wanted_params, self.specs.tobytes(),
                     self.wanted.tobytes(), self.held.tobytes(), self.viewed.tobytes(), checksum(self.words))
        known = RECORDINGS.get(self._key, [self.words])
        self.known = Known(*self._counts()) if known is None else known[1]

    @cached_property
    def _walked(self) -> tuple[bool, int]:
        """Whether operators read each other; if not, the number of calls, -1 if nobody has counted them."""
        operators = np.array([cls.identity is None for cls in self.classes], bool)
        joins, num_calls = _walk(self.words, *self.kinds, operators, FIRST, len(self.held))
        return joins, num_calls

    @property
    def joins(self) -> bool:
        """Whether operators read each other, so that some may be joined. If not, reading the log takes less than
        looking for its samples among known ones."""
        return self._walked[0]

    @cached_property
    def _calls(self) -> Any:
        """All calls, read."""
        count = int(self.cut.starts[-1]) if self.joins else self._walked[1]
        # (Every call has a value, and a word that is no operand.)
        room = (count, len(self.words) - count) if count >= 0 else (len(self.held), len(self.words))
        return _read(self.words, *self.kinds, FIRST, len(self.specs), *room, len(self.held))

    def _counts(self) -> tuple[int, int]:
        """The number of calls, and of values."""
        if self.joins:
            return int(self.cut.starts[-1]), int(self.cut.values[-1])
        return len(self._calls[0]), len(self._calls[6])

    @cached_property
    def _cut(self) -> tuple[Cut, Any]:
        return cut_log(self.words, self.kinds, FIRST, self.specs, self.held, self.viewed)

    @property
    def cut(self) -> Cut:
        """Its samples."""
        return self._cut[0]

    @property
    def numbers(self) -> Any:
        """The numbers that stand in it."""
        return self._cut[1] if self.joins else self._calls[-1]

    @property
    def is_whole(self) -> bool:
        """Whether all calls were taken whose results there are."""
        return len(self.held) == self.known.num_values

    def recorded(self) -> Tables:
        """The tables of all calls, as they were recorded."""
        if self.known.structure is None:
            self.known.structure = self._read()
            self._remember()
        return Tables(self.known.structure, self.classes, self.wanted_params, self.kinds, self.data, self.parameters)

    def let_all_run(self) -> None:
        """Say that all calls run as they were recorded."""
        if self.known.structure is None:
            self.known.structure = self._read()
        self.let_run(Members(self.known.structure, range(len(self.classes)), ()))

    def joined(self) -> Tables:
        """The tables of what runs, once somebody has said what that is."""
        assert self.known.members is not None
        return Tables(self.known.members.structure, *self.known.members.classes_of(self.classes, self.wanted_params),
                      self.kinds, self.data, self.parameters, self.known.members.made)

    def let_run(self, members: Members) -> None:
        """Say what runs, now and whenever such a log comes again."""
        self.known.members = members
        self._remember()

    def _remember(self) -> None:
        if self.is_whole:
            RECORDINGS.put(self._key, [self.words], self.known,
                           [cls.identity[0] for cls in self.classes if cls.identity is not None],
                           2 * self.words.nbytes + self.known.num_bytes)

    def _read(self) -> Structure:
        """Read the calls."""
        return self.structure_of(range(len(self.classes)), [], self._calls[:7], self._calls[7:9])

    def structure_of(self, origins: Any, made: Any, calls: Sequence[Any], offsets: tuple[Any, Any],
                     value_of: Any = None) -> Structure:
        """Tables of calls as a structure.

        Parameters
        ----------
        origins, made : of the classes, see `Members`
        calls : entry, class, width, length of the list and first row of each; operands; spec of each value
        offsets : `Recording.offsets`
        value_of : see `Structure`
        """
        used = [self.classes[c] if c >= 0 else made[-1 - c] for c in origins]
        owns = [c >= 0 and any(self.wanted_params[c]) for c in origins]
        num_values = self.known.num_values
        heads, viewed = self.held[:num_values].nonzero()[0], self.viewed
        if not self.is_whole:
            viewed = viewed[viewed < num_values]
        if value_of is not None:
            heads, viewed = value_of[heads], value_of[viewed]
        structure = make_structure(used, owns, calls, heads, viewed, value_of, self.specs, self.wanted, self.numbers,
                                   self.number_spec)
        structure.recording.offsets = tuple(offsets)
        return structure


def take_log(calls: Any) -> Log:
    """Take the calls that are in the log by now; what only recording needs is dropped."""
    log = Log(calls)
    if not log.is_whole and threading.get_ident() == calls.recorder.thread:
        # (On another thread it only means that one more call is being recorded right now.)
        raise RunError("an exception (a signal's, a timeout's) interrupted the recording of a call and was caught "
                       "inside the batching scope; let it leave the scope.")
    calls.num_taken = log.known.num_values
    calls.forget()
    return log


@compiled
def _walk(log, facts, entries, classes, operators, first, num_values):
    num_entries, some = len(entries), False
    chosen, several = np.zeros(num_entries, np.bool_), np.zeros(len(operators), np.bool_)
    for e in range(num_entries):
        several[classes[e]] |= facts[entries[e] + ROWS] > 1
    for e in range(num_entries):        # words that are looked up one by one are known by their number, and run once
        kind = entries[e]
        chosen[e] = (operators[classes[e]] and facts[kind + NAMED] < 0 and facts[kind + PURE]
                     and (not facts[kind + LOOKS_UP] or several[classes[e]]))
        some |= chosen[e]
    if not some:
        return False, -1
    is_chosen = np.zeros(num_values, np.bool_)
    at = calls = value = 0
    while at < len(log):
        entry = log[at]
        kind = entries[entry]
        num_outputs = facts[kind + NUM_OUTPUTS]
        end = at + 1 + facts[kind + NUM_OPERANDS]
        if facts[kind + SLOTS]:         # the length of a list stands before the operands
            end += 1 + facts[kind + SLOTS] * log[at + 1]
        if chosen[entry]:
            for j in range(at + 1, end):
                if log[j] >= first and is_chosen[log[j] - first]:       # (a number is never as large as a token)
                    return True, 0
            is_chosen[value:value + num_outputs] = True
        at = end
        calls += 1
        value += num_outputs
    return False, calls


@compiled
def _read(log, facts, entries, classes, first, num_data, most_calls, most_operands, most_values):
    """Of all calls: entry, class, width, length of the list and first row; operands, spec of each value, offsets of
    both, and the numbers."""
    call_entry, call_class = np.empty(most_calls, np.int64), np.empty(most_calls, np.int64)
    call_width, call_count = np.empty(most_calls, np.int64), np.empty(most_calls, np.int64)
    call_first, operands = np.empty(most_calls, np.int64), np.empty(most_operands, np.int64)
    value_specs, numbers = np.empty(most_values, np.int64), np.empty(len(log), np.int64)
    operand_offsets, value_offsets = np.empty(most_calls + 1, np.int64), np.empty(most_calls + 1, np.int64)
    at = i = value = operand = number = operand_offsets[0] = value_offsets[0] = 0
    while at < len(log):
        entry = log[at]
        kind = entries[entry]
        at += 1
        call_entry[i], call_class[i], call_width[i] = entry, classes[entry], facts[kind + ROWS]
        call_first[i], call_count[i] = facts[kind + NAMED], 0
        num_operands, num_outputs = facts[kind + NUM_OPERANDS], facts[kind + NUM_OUTPUTS]
        count = num_operands
        if facts[kind + SLOTS]:         # the length of a list stands before the operands
            call_count[i] = log[at]
            count += facts[kind + SLOTS] * log[at]
            at += 1
        for j in range(count):
            token = log[at + j]
            operands[operand + j] = token - first if token >= 0 else token
        if facts[kind + NUM_NUMBERS]:
            for j in range(num_operands):
                if facts[kind + FIRST_SPEC + num_outputs + j]:
                    operands[operand + j], numbers[number] = -1 - num_data - number, log[at + j]
                    number += 1
        for k in range(num_outputs):
            value_specs[value + k] = facts[kind + FIRST_SPEC + k]
        at, i, operand, value = at + count, i + 1, operand + count, value + num_outputs
        operand_offsets[i], value_offsets[i] = operand, value
    value_specs, numbers = value_specs[:value], numbers[:number].copy()
    if operand < most_operands:         # (copies, so that nothing is remembered that nobody counts)
        operands = operands[:operand].copy()
    if i < most_calls:
        call_entry, call_class, call_width = call_entry[:i].copy(), call_class[:i].copy(), call_width[:i].copy()
        call_count, call_first = call_count[:i].copy(), call_first[:i].copy()
        operand_offsets, value_offsets = operand_offsets[:i + 1].copy(), value_offsets[:i + 1].copy()
    return (call_entry, call_class, call_width, call_count, call_first, operands, value_specs, operand_offsets,
            value_offsets, numbers)
