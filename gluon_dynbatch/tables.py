"""What runs in a flush as tables: calls, operands, leaves and heads as the analyzer reads them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cavs_core import LazyArray, compiled, copy_arrays, view_of_data
from cavs_core.mxnet_compat import mx

from .analyzer import Recording
from .classes import Classes, ClassInfo
from .kinds import FIRST_WIDTH, LOOKS_UP, PURE, ROW_SPEC, KindTable
from .last_used import LastUsed
from .plan_cache import checksum
from .repeats import Distinct, Facts, Lookups
from .values import BUFFERS, SPECS, WIDTHS, as_array

__all__ = ["Leaves", "Members", "Structure", "Tables", "make_structure", "recorded_bytes"]

NDArray = mx.nd.NDArray


class Leaves:
    """What recorded calls take from outside: first arrays and other data, then the numbers that stood in the log."""

    def __init__(self, data: list[Any], numbers: Any, specs: Any, parameters: dict[int, Any]):
        self.data, self.numbers, self.specs = data, numbers, specs
        self.parameters = parameters            # leaf -> the parameter whose array it is

    def ids(self, leaves: Sequence[int]) -> Any:
        """The elements of some leaves, one behind the other, as int64 that are equal where they are."""
        arrays = [x if type(x) is NDArray else as_array(x) for x in map(self.data.__getitem__, leaves)]
        specs = self.specs[leaves]
        dtypes = {SPECS[s].dtype for s in set(specs.tolist())}
        if len(dtypes) == 1:
            sizes = _sizes()[specs]
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

    @cached_property
    def num_bytes(self) -> int:
        """What the arrays take, with offsets and with those that are made when somebody looks for repeats."""
        own = (self.call_entry, self.numbers, self.leaf_specs, *(() if self.value_of is None else (self.value_of,)))
        return sum(a.nbytes for a in (*self.arrays, *own)) + 5 * self.call_entry.nbytes + 16

    def without_repeats(self, left: Distinct, num_repeats: int) -> Structure:
        """The structure of the calls that are left; the others are so many recorded ones."""
        num_leaves = len(self.leaf_specs) - len(self.numbers) + len(left.numbers)
        value_of = left.value_of if self.value_of is None else _composed(self.value_of, left.value_of)
        found = Structure(left.recording(self.recording, num_leaves), self.buffers, left.value_specs, left.entries,
                          left.numbers, self.leaf_specs[:num_leaves], left.value_of[self.viewed], value_of)
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

    def num_dropped(self, left: Distinct) -> int:
        """How many recorded calls those stand for that repeat others."""
        return sum([cls.num_parts * count or terms              # 0 parts: a sum of several terms
                    for cls, count, terms in zip(self.classes, left.dropped.tolist(), left.terms.tolist()) if count])

    @property
    def num_bytes(self) -> int:
        """What these tables take."""
        own = (self.value_specs, self.call_entry, *(() if self.value_of is None else (self.value_of,)))
        return _table_bytes(self.recording) + sum(a.nbytes for a in own)

    def repeat_facts(self) -> Facts:
        """What decides which calls repeat others."""
        known = self.structure
        if known.facts is None:
            lookups, known.looked_up = self._lookups()
            known.facts = Facts(self.call_entry, self.kinds.of(PURE), self.leaves.numbers, len(self.leaves.data),
                                self.viewed, self.value_specs, lookups)
        if not known.looked_up:
            return known.facts
        *facts, lookups = known.facts
        return Facts(*facts, Lookups(*lookups[:-1], self.leaves.ids(known.looked_up)))

    def _lookups(self) -> tuple[Lookups, list[int]]:
        """The calls that look up one row for each number in an outside array; without the numbers, and these arrays."""
        if not any([cls.signature.looks_up for cls in self.classes]):
            return _NO_LOOKUPS, []
        r = self.recording
        *lookups, leaves = _look_up(self.call_entry, r.call_class, r.offsets[0], r.operands, *self.kinds,
                                    self.leaves.specs, _sizes(), len(self.leaves.data), len(r.classes))
        return Lookups(*lookups, leaves[:0]), leaves.tolist()


_NO_LOOKUPS = Lookups(*np.zeros((5, 0), np.int64))


@compiled
def _look_up(call_entry, call_class, operand_offsets, operands, facts, kinds, classes, specs, sizes, num_data,
             num_classes):
    num_entries, num_calls = len(kinds), len(call_entry)
    names_row = np.full(num_entries, -1, np.int64)
    starts, counts = np.zeros(num_calls, np.int64), np.zeros(num_calls, np.int64)
    tables, leaves = np.zeros(num_calls, np.int64), np.empty(num_calls, np.int64)
    found = at = 0
    for i in range(num_calls):
        if call_entry[i] >= num_entries:            # (what was made looks nothing up by itself)
            continue
        kind = kinds[call_entry[i]]
        if not facts[kind + LOOKS_UP]:
            continue
        index, table = -1 - operands[operand_offsets[i]], -1 - operands[operand_offsets[i] + 1]
        if index < 0 or index >= num_data or table < 0 or sizes[specs[index]] != facts[kind + FIRST_WIDTH]:
            continue
        starts[i], counts[i] = at, sizes[specs[index]]
        tables[i], leaves[found] = table * num_classes + call_class[i], index
        at += counts[i]
        found += 1
    if found:
        last = classes.max()
        for e in range(num_entries):
            if facts[kinds[e] + ROW_SPEC] >= 0:
                names_row[e] = 1 + facts[kinds[e] + ROW_SPEC] * (1 + last) + classes[e]
    return starts, counts, tables, names_row, leaves[:found].copy()


@compiled
def _composed(first, second):
    """The number by the second table of what has a number by the first; -1 stays."""
    found = np.empty(len(first), np.int64)
    for k in range(len(first)):
        found[k] = second[first[k]] if first[k] >= 0 else -1
    return found


_known_sizes = np.zeros(0, np.int64)


def _sizes() -> Any:
    """How many elements arrays of each spec have."""
    global _known_sizes
    known, count = _known_sizes, len(SPECS)
    if len(known) < count:                      # (specs only ever become more)
        known = np.append(known, [math.prod(spec.shape) for spec in SPECS[len(known):count]])
        _known_sizes = known
    return known


def make_structure(classes: Sequence[Any], owns_wanted: Sequence[bool], calls: Sequence[Any], heads: Any, viewed: Any,
                   value_of: Any, specs: Any, wanted: Any, numbers: Any, number_spec: int) -> Structure:
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
    looks = [(s, _buffer(BUFFERS[s], buffers), WIDTHS[s]) for s in sorted({*specs.tolist(), number_spec})]
    leaf_specs, leaf_buffers, leaf_widths, leaf_wanted = _leaf_tables(specs, wanted, len(numbers), number_spec,
                                                                      _array(looks))
    recording = Recording(infos, call_class, call_width, operands, leaf_buffers, leaf_widths, leaf_wanted, heads,
                          call_count, call_first)
    return Structure(recording, list(buffers), value_specs, call_entry, numbers, leaf_specs, viewed, value_of)


@compiled
def _leaf_tables(specs, wanted, num_numbers, number_spec, looks):
    """Spec, buffer, rows and whether a gradient may flow there, of each leaf; `looks` has the first three of each spec.
    """
    buffers, widths = np.empty(looks[-1, 0] + 1, np.int64), np.empty(looks[-1, 0] + 1, np.int64)
    for k in range(len(looks)):
        buffers[looks[k, 0]], widths[looks[k, 0]] = looks[k, 1], looks[k, 2]
    num_data = len(specs)
    num_leaves = num_data + num_numbers
    leaf_specs, leaf_wanted = np.empty(num_leaves, np.int64), np.zeros(num_leaves, np.bool_)
    leaf_buffers, leaf_widths = np.empty(num_leaves, np.int64), np.empty(num_leaves, np.int64)
    for k in range(num_leaves):
        spec = specs[k] if k < num_data else number_spec
        leaf_specs[k], leaf_buffers[k], leaf_widths[k] = spec, buffers[spec], widths[spec]
        if k < num_data:
            leaf_wanted[k] = wanted[k]
    return leaf_specs, leaf_buffers, leaf_widths, leaf_wanted


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


def _array(values: Sequence[Any]) -> Any:
    return np.array(values, np.int64)
