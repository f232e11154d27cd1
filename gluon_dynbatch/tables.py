"""What runs in a flush as tables: calls, operands, leaves and heads as the analyzer reads them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import LazyArray, copy_arrays, view_of_data

from .analyzer import Recording
from .classes import Classes, ClassInfo
from .kinds import FIRST_WIDTH, LOOKS_UP, PURE, ROW_SPEC, KindTable
from .last_used import LastUsed
from .plan_cache import checksum
from .repeats import Distinct, Facts, Lookups
from .values import BUFFERS, SPECS, WIDTHS, as_array

__all__ = ["Leaves", "Members", "Structure", "Tables", "make_structure", "recorded_bytes"]


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
            sizes = _array([_size(s) for s in specs])
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
    origins: Sequence[int]
    made: Sequence[Any]

    def classes_of(self, classes: Sequence[Any], wanted_params: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """The classes, and which of their parameters ask for a gradient, by what was recorded."""
        return ([classes[c] if c >= 0 else self.made[-1 - c] for c in self.origins],
                tuple([wanted_params[c] if c >= 0 else () for c in self.origins]))


class Tables:
    """What was recorded: its structure, and what it was recorded of.

    Attributes
    ----------
    structure : Structure; its arrays are here as well
    classes : CallClass of each class
    wanted_params : for each class and each of its parameters, whether it asks for a gradient
    kinds : of the entries that were recorded
    made : classes that were not recorded; as entries, they come behind the recorded ones
    leaves : Leaves
    """

    def __init__(self, structure: Structure, classes: list[Any], wanted_params: Any, kinds: KindTable, data: list[Any],
                 parameters: dict[int, Any], made: Sequence[Any] = ()):
        self.structure, self.classes, self.wanted_params = structure, classes, wanted_params
        self.kinds, self.made = kinds, made
        self.recording, self.buffers, self.value_specs = structure.recording, structure.buffers, structure.value_specs
        self.call_entry, self.viewed, self.value_of = structure.call_entry, structure.viewed, structure.value_of
        self.leaves = Leaves(data, structure.numbers, structure.leaf_specs, parameters)

    def with_structure(self, structure: Structure) -> Tables:
        """The tables of some of the calls."""
        return Tables(structure, self.classes, self.wanted_params, self.kinds, self.leaves.data, self.leaves.parameters,
                      self.made)

    def num_recorded(self, calls: Any) -> int:
        """How many recorded calls some calls stand for."""
        parts = np.array([cls.num_parts for cls in self.classes], np.int64)[self.recording.call_class[calls]]
        return int(np.where(parts, parts, self.recording.call_count[calls] - 1).sum())      # 0: a sum of several terms

    @property
    def num_bytes(self) -> int:
        """What these tables take."""
        own = (self.value_specs, self.call_entry, *(() if self.value_of is None else (self.value_of,)))
        return _table_bytes(self.recording) + sum(a.nbytes for a in own)

    def repeat_facts(self) -> Facts:
        """What decides which calls repeat others."""
        known = self.structure
        if known.facts is None:
            r = self.recording
            pure = np.append(self.kinds.of(PURE), [not cls.signature.draws for cls in self.made]).astype(bool)
            lookups, known.looked_up = self._lookups()
            known.facts = Facts(self.call_entry, pure, r.call_count, r.call_first, r.operands, self.leaves.numbers,
                                len(self.leaves.data), np.concatenate([r.heads, self.viewed]), lookups)
        if not known.looked_up:
            return known.facts
        ids = self.leaves.ids(known.looked_up)
        return known.facts._replace(lookups=known.facts.lookups._replace(ids=ids))

    def _lookups(self) -> tuple[Lookups, list[int]]:
        """The calls that look up one row for each number in an outside array; without the numbers, and these arrays."""
        r, kinds, num_calls = self.recording, self.kinds, len(self.call_entry)
        looks_up, names_row = kinds.of(LOOKS_UP), np.full(len(kinds.starts) + len(self.made), -1, np.int64)
        if not looks_up.any():
            return Lookups(*np.zeros((3, num_calls), np.int64), _NOTHING, names_row), []
        sizes = _array([_size(s) for s in self.leaves.specs[:len(self.leaves.data)].tolist()])
        # (What was made looks nothing up by itself.)
        starts, counts, tables, leaves = _look_up(self.call_entry, r.call_class, r.offsets[0], r.operands, looks_up,
                                                  kinds.of(FIRST_WIDTH), sizes, len(r.classes))
        if len(leaves):
            row_spec = kinds.of(ROW_SPEC)
            named = np.flatnonzero(row_spec >= 0)
            names_row[named] = 1 + row_spec[named] * (1 + kinds.classes.max()) + kinds.classes[named]
        return Lookups(starts, counts, tables, _NOTHING, names_row), leaves.tolist()


_NOTHING = np.zeros(0, np.int64)


@njit(cache=True, nogil=True)
def _look_up(call_entry, call_class, operand_offsets, operands, looks_up, widths, sizes, num_classes):
    starts, counts = np.zeros(len(call_entry), np.int64), np.zeros(len(call_entry), np.int64)
    tables, leaves = np.zeros(len(call_entry), np.int64), np.empty(len(call_entry), np.int64)
    found = at = 0
    for i in range(len(call_entry)):
        if call_entry[i] >= len(looks_up) or not looks_up[call_entry[i]]:
            continue
        index, table = -1 - operands[operand_offsets[i]], -1 - operands[operand_offsets[i] + 1]
        if index < 0 or index >= len(sizes) or table < 0 or sizes[index] != widths[call_entry[i]]:
            continue
        starts[i], counts[i], tables[i], leaves[found] = at, sizes[index], table * num_classes + call_class[i], index
        at += sizes[index]
        found += 1
    return starts, counts, tables, leaves[:found]


@cache
def _size(spec: int) -> int:
    """How many elements such an array has."""
    return math.prod(SPECS[spec].shape)


def make_structure(classes: Sequence[Any], owns_wanted: Sequence[bool], calls: Sequence[Any], heads: Any, viewed: Any,
                   value_of: Any, specs: Any, wanted: list[bool], numbers: Any, number_spec: int) -> Structure:
    """The structure of some calls.

    Parameters
    ----------
    classes, owns_wanted : of each class, CallClass and `ClassInfo.owns_wanted`
    calls : entry, class, width, length of the list and first row of each; operands; spec of each value
    heads, viewed, value_of : see `Recording` and `Structure`
    specs, wanted : of the leaves that are no numbers
    numbers, number_spec : those that stood in the log, and what they look like
    """
    call_entry, call_class, call_width, call_count, call_first, operands, value_specs = calls
    infos, buffers = _class_infos(classes, owns_wanted)
    num_data = len(specs)
    leaf_specs = np.full(num_data + len(numbers), number_spec)
    leaf_specs[:num_data] = specs
    looks = sorted({*specs.tolist(), number_spec})
    place = np.searchsorted(_array(looks), leaf_specs)
    leaf_wanted = np.zeros(len(leaf_specs), bool)
    leaf_wanted[:num_data] = wanted
    recording = Recording(
        infos, call_class, call_width, operands, _array([_buffer(BUFFERS[s], buffers) for s in looks])[place],
        _array([WIDTHS[s] for s in looks])[place], leaf_wanted, heads, call_count, call_first)
    return Structure(recording, list(buffers), value_specs, call_entry, numbers, leaf_specs, viewed, value_of)


def recorded_bytes(num_words: int, num_values: int) -> int:
    """About what recording takes: the log with its spare room, the one that is remembered, tokens and results."""
    return 32 * num_words + (_TOKEN + _RESULT) * num_values


def _table_bytes(r: Recording) -> int:
    return sum(a.nbytes for a in (r.call_class, r.call_width, r.call_count, r.call_first, r.operands, r.leaf_buffers,
                                  r.leaf_widths, r.heads))


_TOKEN = sys.getsizeof(1 << 32) + 8             # an int, and its place in a list
_RESULT = sys.getsizeof(LazyArray()) + 16       # an array that stands for a result, and the collector's part


def _class_infos(classes: Sequence[Any], owns_wanted: Sequence[bool]) -> tuple[Classes, dict[int, int]]:
    """What the analyzer knows of classes, and their buffers, numbered as they come."""
    key = tuple([(cls.signature.number, cls.recorded, owns) for cls, owns in zip(classes, owns_wanted)])
    known = _INFOS.get(key)
    if known is None:
        buffers: dict[int, int] = {}
        known = Classes([_class_info(cls, wants, buffers) for cls, wants in zip(classes, owns_wanted)]), buffers
        _INFOS.put(key, known)
    return known[0], dict(known[1])


_INFOS = LastUsed(256)          # what classes are in all flushes -> ..


def _class_info(cls: Any, owns_wanted: bool, buffers: dict[int, int]) -> ClassInfo:
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
