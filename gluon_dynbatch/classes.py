"""What the analyzer knows of the classes of a flush. Pure: no device, no MXNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cavs_core import offsets_of

__all__ = ["ClassInfo", "Classes"]


class ClassInfo(NamedTuple):
    """What the analyzer knows of a class.

    Parameters
    ----------
    operand_widths : rows that one position reads of each operand
    split : for each operand, whether it is split over the positions of a ragged call (all False: not ragged)
    output_widths : rows that one position writes of each output
    output_buffers : the buffer of each output
    alias : whether calls only name rows of their first operand
    recorded : whether its calls were made under autograd.record
    owns_wanted : whether it has a parameter of its own whose gradient is asked for
    slots : columns that are the parts of each element of a list, the last ones
    """

    operand_widths: tuple[int, ...]
    split: tuple[bool, ...]
    output_widths: tuple[int, ...]
    output_buffers: tuple[int, ...]
    alias: bool
    recorded: bool
    owns_wanted: bool
    slots: int = 0


class Classes(tuple[ClassInfo, ...]):
    """All classes of a flush, also as arrays for compiled loops: operands (columns) and outputs class after class.

    Attributes
    ----------
    alias, recorded, owns_wanted : bool arrays, shape (classes,)
    has_aliases : bool
    slots, num_outputs : int64 arrays, shape (classes,)
    column_offsets : int64 array, the columns of class c are column_offsets[c]:column_offsets[c + 1]
    widths : int64 array, shape (columns,)
    split : bool array, shape (columns,)
    may_share, listed : bool arrays, shape (columns,)
        Whether one leaf may stand for the operand of all calls; whether it is part of the elements of a list, which
        one position reads.
    output_offsets : int64 array, like column_offsets
    output_widths, output_buffers : int64 arrays, shape (outputs,)
    """

    alias: Any
    has_aliases: bool
    recorded: Any
    owns_wanted: Any
    slots: Any
    num_outputs: Any
    column_offsets: Any
    widths: Any
    split: Any
    may_share: Any
    listed: Any
    output_offsets: Any
    output_widths: Any
    output_buffers: Any

    def __new__(cls, infos: Iterable[ClassInfo]) -> Classes:
        made = super().__new__(cls, infos)
        made.alias = np.array([c.alias for c in made], bool)
        made.has_aliases = bool(made.alias.any())
        made.recorded = np.array([c.recorded for c in made], bool)
        made.owns_wanted = np.array([c.owns_wanted for c in made], bool)
        made.slots = np.array([c.slots for c in made], np.int64)
        made.num_outputs = np.array([len(c.output_widths) for c in made], np.int64)
        made.column_offsets = offsets_of(np.array([len(c.operand_widths) for c in made], np.int64))
        made.widths = np.array([width for c in made for width in c.operand_widths], np.int64)
        made.split = np.array([part for c in made for part in c.split], bool)
        made.may_share = np.array([not c.alias and not part and k < len(c.split) - c.slots
                                   for c in made for k, part in enumerate(c.split)], bool)
        made.listed = np.array([not part and k >= len(c.split) - c.slots for c in made
                                for k, part in enumerate(c.split)], bool)
        made.output_offsets = offsets_of(made.num_outputs)
        made.output_widths = np.array([width for c in made for width in c.output_widths], np.int64)
        made.output_buffers = np.array([buffer for c in made for buffer in c.output_buffers], np.int64)
        return made
