"""The log of a flush becomes tables: calls, operands, leaves and heads as the analyzer reads them."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import LazyArray, RunError, copy_arrays, need_gradient, offsets_of, view_of_data

from .analyzer import ClassInfo, Recording
from .fastpath import FIRST, find_held
from .plan_cache import PlanCache, checksum
from .repeats import Distinct, Facts, Lookups
from .values import BUFFERS, SPECS, WIDTHS, as_array

__all__ = ["RECORDINGS", "Leaves", "Members", "Structure", "Tables", "class_info", "read_calls", "recorded_bytes"]


class Leaves:
    """What recorded calls take from outside: first arrays and other data, then the numbers that stood in the log."""

    def __init__(self, data: list[Any], numbers: Any, specs: Any, parameters: dict[int, Any]):
        self.data, self.numbers, self.specs = data, numbers, specs
        self.parameters = parameters            # leaf -> the parameter whose array it is

    def ids(self, leaves: Sequence[int]) -> Any:
        """The elements of some leaves, one behind the other, as int64 that are equal where they are."""
        arrays = [as_array(self.data[leaf]) for leaf in leaves]
        specs = self.specs[leaves].tolist()
        dtypes = {SPECS[s].dtype for s in specs}
        if len(dtypes) == 1:
            sizes = _array([math.prod(SPECS[s].shape) for s in specs])
            elements = np.empty(int(sizes.sum()), dtypes.pop())
            copy_arrays(arrays, sizes * elements.itemsize, elements)
        else:
            elements = np.concatenate([view_of_data(x).ravel().astype(np.float64) for x in arrays])
        return elements.astype(np.float64).view(np.int64)

    def array(self, leaf: int, context: Any = None) -> Any:
        """A leaf as an NDArray."""
        known = len(self.data)
        return as_array(self.data[leaf] if leaf < known else int(self.numbers[leaf - known]), context)


class Structure:
    """What was recorded, as arrays: one and the same object for all flushes that recorded the same.

    It holds nothing of a model, which may die.

    Attributes
    ----------
    recording : what the analyzer reads
    buffers : process-wide number of each buffer
    value_specs : int64 array, spec number of each value
    call_entry : int64 array, the number of each call's entry
    numbers : int64 array, the values of the last leaves, which stood in the log
    leaf_specs : int64 array, spec number of each leaf
    viewed : int64 array, values that others share their memory with
    value_of : the number of each recorded value in these tables, -1 if it is gone; None if they have all calls
    arrays : what a plan is worked out from; or equal ones, of a flush that has the same plan
    facts, looked_up : what decides which calls repeat others, but for the numbers that rows were looked up by, and the
        leaves that have these; None until somebody asks
    num_repeats : recorded calls that were left out
    """

    def __init__(self, recording: Recording, buffers: list[int], value_specs: Any, call_entry: Any, numbers: Any,
                 leaf_specs: Any, viewed: Any, value_of: Any = None):
        self.recording, self.buffers, self.value_specs, self.call_entry = recording, buffers, value_specs, call_entry
        self.numbers, self.leaf_specs, self.viewed, self.value_of = numbers, leaf_specs, viewed, value_of
        r = recording
        self.arrays = [r.call_class, r.call_width, r.call_count, r.call_first, r.operands, r.leaf_buffers,
                       r.leaf_widths, r.leaf_wanted, r.heads, value_specs, viewed]
        self.facts: Facts | None = None
        self.looked_up: list[int] = []
        self.num_repeats = 0

    @cached_property
    def checksum(self) -> int:
        """By which plans are found."""
        return int(checksum(self.recording.call_class, self.recording.operands, self.recording.heads))

    @property
    def num_bytes(self) -> int:
        """What the arrays take, with those that are made when somebody looks for repeats."""
        own = (self.call_entry, self.numbers, self.leaf_specs, *(() if self.value_of is None else (self.value_of,)))
        return sum(a.nbytes for a in (*self.arrays, *own)) + 3 * self.call_entry.nbytes

    def without_repeats(self, left: Distinct, num_repeats: int) -> Structure:
        """The structure of the calls that are left; the others are so many recorded ones."""
        numbers = self.numbers[left.numbers]
        num_leaves = len(self.leaf_specs) - len(self.numbers) + len(numbers)
        value_specs = np.empty(int(left.value_of.max()) + 1, np.int64)
        value_specs[left.value_of] = self.value_specs
        value_of = left.value_of if self.value_of is None else np.append(left.value_of, -1)[self.value_of]
        found = Structure(left.recording(self.recording, num_leaves), self.buffers, value_specs,
                          self.call_entry[left.calls], numbers, self.leaf_specs[:num_leaves],
                          left.value_of[self.viewed], value_of)
        found.num_repeats = num_repeats
        return found


class Members(NamedTuple):
    """What runs of a structure, where operators are joined.

    Attributes
    ----------
    structure : Structure
    origins : of each class: its number among those that were recorded, or -1 - its place in `made`
    made : classes that were not recorded; as entries, they come behind the recorded ones
    """

    structure: Structure
    origins: list[int]
    made: list[Any]


class Tables:
    """What was recorded: its structure, and what it was recorded of.

    Attributes
    ----------
    structure : Structure; its arrays are here as well
    classes : CallClass of each class
    wanted_params : for each class and each of its parameters, whether it asks for a gradient
    entries : Entry of each kind of calls
    leaves : Leaves
    """

    def __init__(self, structure: Structure, classes: list[Any], wanted_params: Any, entries: list[Any],
                 data: list[Any], parameters: dict[int, Any]):
        self.structure, self.classes, self.wanted_params, self.entries = structure, classes, wanted_params, entries
        self.recording, self.buffers, self.value_specs = structure.recording, structure.buffers, structure.value_specs
        self.call_entry, self.viewed, self.value_of = structure.call_entry, structure.viewed, structure.value_of
        self.leaves = Leaves(data, structure.numbers, structure.leaf_specs, parameters)

    def with_structure(self, structure: Structure) -> Tables:
        """The tables of some of the calls."""
        return Tables(structure, self.classes, self.wanted_params, self.entries, self.leaves.data,
                      self.leaves.parameters)

    def with_members(self, members: Members) -> Tables:
        """The tables of what runs, where operators are joined."""
        classes = [self.classes[c] if c >= 0 else members.made[-1 - c] for c in members.origins]
        wanted = tuple([self.wanted_params[c] if c >= 0 else () for c in members.origins])
        return Tables(members.structure, classes, wanted, [*self.entries, *members.made], self.leaves.data,
                      self.leaves.parameters)

    def num_recorded(self, calls: Any) -> int:
        """How many recorded calls some calls stand for."""
        parts = np.array([cls.num_parts for cls in self.classes], np.int64)[self.recording.call_class[calls]]
        return int(np.where(parts, parts, self.recording.call_count[calls] - 1).sum())      # 0: a sum of several terms

    @property
    def extra_bytes(self) -> int:
        """What these tables take besides those of all calls; 0 if they are these."""
        if self.value_of is None:
            return 0
        return _table_bytes(self.recording) + sum(a.nbytes for a in (self.value_of, self.value_specs, self.call_entry))

    def repeat_facts(self) -> Facts:
        """What decides which calls repeat others."""
        known = self.structure
        if known.facts is None:
            r, pure = self.recording, np.array([not e.signature.draws for e in self.entries], bool)
            lookups, known.looked_up = self._lookups()
            known.facts = Facts(self.call_entry, pure, r.call_count, r.call_first, r.operands, self.leaves.numbers,
                                len(self.leaves.data), np.concatenate([r.heads, self.viewed]), lookups)
        if not known.looked_up:
            return known.facts
        ids = self.leaves.ids(known.looked_up)
        return known.facts._replace(lookups=known.facts.lookups._replace(ids=ids))

    def _lookups(self) -> tuple[Lookups, list[int]]:
        """The calls that look up one row for each number in an outside array; without the numbers, and these arrays."""
        r, specs = self.recording, self.leaves.specs
        starts, counts, tables = np.zeros((3, len(self.call_entry)), np.int64)
        names_row = np.full(len(self.entries), -1, np.int64)
        looks_up = np.array([e.signature.looks_up for e in self.entries], bool)
        if not looks_up.any():
            return Lookups(starts, counts, tables, np.zeros(0, np.int64), names_row), []
        calls = np.flatnonzero(looks_up[self.call_entry])
        index, table = (r.operands[r.offsets[0][calls] + k] for k in (0, 1))
        calls = calls[(index < 0) & (index >= -len(self.leaves.data)) & (table < 0)]
        index, table = (r.operands[r.offsets[0][calls] + k] for k in (0, 1))
        sizes = _array([math.prod(SPECS[s].shape) for s in specs[-1 - index].tolist()])
        whole = sizes == [WIDTHS[self.entries[e].owners[0].spec] for e in self.call_entry[calls].tolist()]
        calls, index, table, sizes = (part[whole] for part in (calls, index, table, sizes))
        known: dict[Any, int] = {}
        pairs = zip(r.call_class[calls].tolist(), table.tolist())
        starts[calls], counts[calls] = np.cumsum(sizes) - sizes, sizes
        tables[calls] = [known.setdefault(pair, len(known)) for pair in pairs]
        leaves = (-1 - index).tolist()
        looks: dict[Any, int] = {}
        for k, e in enumerate(self.entries):
            if leaves and e.signature.alias >= 0 and WIDTHS[e.owners[0].spec] == 1:
                names_row[k] = looks.setdefault((e.owners[0].spec, e.cls.number), 1 + len(looks))
        return Lookups(starts, counts, tables, np.zeros(0, np.int64), names_row), leaves


RECORDINGS = PlanCache(32 << 20)        # logs -> Structure


def read_calls(calls: Any) -> Tables:
    """Take the calls that are in the log by now; what only recording needs is dropped."""
    # Copies, the log first: another thread may record one more call right now, which is not taken.
    log = np.frombuffer(calls.log[:], np.int64)
    held = find_held(calls.made)
    entries, classes, specs = list(calls.entries), list(calls.classes), tuple(calls.leaf_spec)
    data, viewed = calls.leaves[:len(specs)], frozenset(calls.viewed)
    wanted_params = tuple([tuple([p.parameter.grad_req != "null" for p in cls.signature.params]) for cls in classes])
    wanted = need_gradient(data) if any([cls.recorded for cls in classes]) else [False] * len(data)
    # All that a structure depends on. (An owner's spec follows from the signature and the number of rows.)
    key = (tuple([(e.signature, e.cls.number, e.rows, e.numbers) for e in entries]),
           tuple([(cls.signature, cls.recorded) for cls in classes]), wanted_params, specs, calls.recorder.number_spec,
           bytes(wanted), held.tobytes(), viewed, checksum(log))
    known = RECORDINGS.get(key, [log])
    if known is not None:
        structure = known[1]
    else:
        structure = _read_structure(log, held, entries, classes, wanted_params, specs, calls.recorder.number_spec,
                                    wanted, viewed)
        if len(held) == len(structure.value_specs):
            RECORDINGS.put(key, [log], structure, [cls.identity[0] for cls in classes if cls.identity is not None],
                           2 * log.nbytes + structure.num_bytes)
        elif threading.get_ident() == calls.recorder.thread:
            # (On another thread it only means that one more call is being recorded right now.)
            raise RunError("an exception (a signal's, a timeout's) interrupted the recording of a call and was caught "
                           "inside the batching scope; let it leave the scope.")
    calls.num_taken = len(structure.value_specs)
    calls.forget()
    of_parameters = calls.recorder.parameters
    parameters = {k: of_parameters[id(x)][0] for k, x in enumerate(data) if id(x) in of_parameters}
    return Tables(structure, classes, wanted_params, entries, data, parameters)


def _read_structure(log: Any, held: Any, entries: list[Any], known: list[Any], wanted_params: Any,
                    specs: Sequence[int], number_spec: int, wanted: list[bool], viewed: Iterable[int]) -> Structure:
    num_data = len(specs)
    call_entry, call_class, call_width, call_first, call_count, operands, numbers, value_specs = _read(
        log, *_joined([e.numbers for e in entries]), _array([e.signature.slots for e in entries]),
        *_joined([[o.spec for o in e.owners] for e in entries]), _array([e.cls.number for e in entries]),
        _array([e.rows for e in entries]), _array([e.signature.alias for e in entries]), FIRST, num_data)
    heads = np.flatnonzero(held[:len(value_specs)])
    buffers: dict[int, int] = {}
    classes = [class_info(cls, any(params), buffers) for cls, params in zip(known, wanted_params)]
    leaf_specs = sorted(set(specs)) + [number_spec]         # numbers have one, the last
    place = np.full(num_data + len(numbers), len(leaf_specs) - 1)
    place[:num_data] = np.searchsorted(_array(leaf_specs[:-1]), specs)
    leaf_wanted = np.zeros(len(place), bool)
    leaf_wanted[:num_data] = wanted
    recording = Recording(
        classes, call_class, call_width, operands, _array([_buffer(BUFFERS[s], buffers) for s in leaf_specs])[place],
        _array([WIDTHS[s] for s in leaf_specs])[place], leaf_wanted, heads, call_count, call_first)
    return Structure(recording, list(buffers), value_specs, call_entry, numbers, _array(leaf_specs)[place],
                     _array(sorted(v for v in viewed if v < len(value_specs))))


def recorded_bytes(r: Recording) -> int:
    """About what recording takes: the log with its spare room, the one that is remembered, tokens, results, tables."""
    log = len(r.call_class) + len(r.operands)
    values = int(r.per_class(lambda c: len(c.output_widths))[r.call_class].sum())
    return _table_bytes(r) + 32 * log + (_TOKEN + _RESULT) * values


def _table_bytes(r: Recording) -> int:
    return sum(a.nbytes for a in (r.call_class, r.call_width, r.call_count, r.call_first, r.operands, r.leaf_buffers,
                                  r.leaf_widths, r.heads))


_TOKEN = sys.getsizeof(1 << 32) + 8             # an int, and its place in a list
_RESULT = sys.getsizeof(LazyArray()) + 16       # an array that stands for a result, and the collector's part


def class_info(cls: Any, owns_wanted: bool, buffers: dict[int, int]) -> ClassInfo:
    """What the analyzer knows of a class; buffers are numbered as they come."""
    signature = cls.signature
    operand_widths, output_widths, numbers = signature.rows
    return ClassInfo(
        operand_widths, signature.split, output_widths, tuple([_buffer(n, buffers) for n in numbers]),
        signature.alias >= 0, cls.recorded, cls.recorded and owns_wanted, signature.slots)


def _buffer(number: int, buffers: dict[int, int]) -> int:
    """The place of a buffer among those of the flush, by its number in the process."""
    return buffers.setdefault(number, len(buffers))


def _array(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)


def _joined(parts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Parts one behind the other, and where each begins."""
    return _array([x for part in parts for x in part]), offsets_of(_array([len(part) for part in parts]))


@njit(cache=True, nogil=True)
def _read(log, is_number, operand_offsets, slots, output_specs, output_offsets, classes, rows, aliases, first,
          num_data):
    """Go through the log once to count, and once more to read it."""
    num_calls = num_numbers = num_values = num_operands = at = 0
    while at < len(log):
        entry = log[at]
        num_calls += 1
        num_values += output_offsets[entry + 1] - output_offsets[entry]
        for k in range(operand_offsets[entry], operand_offsets[entry + 1]):
            num_numbers += is_number[k]
        of_call = operand_offsets[entry + 1] - operand_offsets[entry]
        at += 1
        if slots[entry]:                # the length of a list stands before the operands
            of_call += slots[entry] * log[at]
            at += 1
        num_operands += of_call
        at += of_call
    call_entry, call_count = np.empty(num_calls, np.int64), np.zeros(num_calls, np.int64)
    call_class, call_width = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    call_first = np.empty(num_calls, np.int64)
    operands = np.empty(num_operands, np.int64)
    numbers = np.empty(num_numbers, np.int64)
    value_specs = np.empty(num_values, np.int64)
    at = value = operand = number = 0
    for i in range(num_calls):
        entry = call_entry[i] = log[at]
        call_class[i], call_width[i], call_first[i] = classes[entry], rows[entry], aliases[entry]
        at += 1
        if slots[entry]:
            call_count[i] = log[at]
            at += 1
        for k in range(operand_offsets[entry], operand_offsets[entry + 1]):
            x = log[at]
            if is_number[k]:
                numbers[number] = x
                operands[operand] = -1 - num_data - number
                number += 1
            else:
                operands[operand] = x - first if x >= 0 else x
            operand += 1
            at += 1
        for _ in range(call_count[i] * slots[entry]):
            x = log[at]
            operands[operand] = x - first if x >= 0 else x
            operand += 1
            at += 1
        for k in range(output_offsets[entry], output_offsets[entry + 1]):
            value_specs[value] = output_specs[k]
            value += 1
    return call_entry, call_class, call_width, call_first, call_count, operands, numbers, value_specs
