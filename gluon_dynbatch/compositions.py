"""Signatures of compositions: what the members of joined launches do, as one program; remembered across flushes.

A composition is known by the signatures of its parts and by what they read of each other. What a flush needs of it (its
face) is added to what earlier ones needed, so that after a few steps all flushes have the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import Arg, Builder, Program

from .coarse import Composition, Face, merged
from .last_used import LastUsed
from .signature import Signature

__all__ = ["COMPOSED", "Composed", "is_by_rows"]


class Composed(LastUsed):
    """The signatures of compositions, each with its face."""

    def __init__(self, most: int = 1024):
        super().__init__(most)

    def signature(self, parts: Sequence[Signature], composition: Composition, face: Face) -> tuple[Face, Signature]:
        """A face that serves for this flush and for those before, and the signature with that face."""
        key = self.key(parts, composition)
        with self.lock:
            known: tuple[Face, Signature] | None = self.get(key)
            wider = face if known is None else merged(known[0], face)
            if known is None or wider != known[0]:
                known = wider, _signature(parts, composition, wider)
            self.put(key, known)
            return known

    def key(self, parts: Sequence[Signature], composition: Composition) -> Any:
        """By which a composition is known in all flushes."""
        return tuple(parts), composition.reads

    def current(self, key: Any) -> Signature | None:
        """The signature that a composition has now."""
        known: tuple[Face, Signature] | None = self.get(key)
        return None if known is None else known[1]


COMPOSED = Composed()       # of the whole process


def is_by_rows(parts: Sequence[Signature], composition: Composition) -> bool:
    """Whether calls have a position for each of their rows: so have those of all parts, also where they read others."""
    return all(part.ragged and all(split for split, read in zip(part.split, reads) if read is not None)
               for part, reads in zip(parts, composition.reads))


def _signature(parts: Sequence[Signature], composition: Composition, face: Face) -> Signature:
    by_rows = is_by_rows(parts, composition)
    places = {k: number for number, k in enumerate(face.operands)}
    builder = Builder(Program(name=_title(parts)))
    inputs: dict[int, int] = {}                 # operand of the composition -> value
    made: list[list[int]] = []
    first = 0
    for part, reads in zip(parts, composition.reads):
        program = part.vertex.program
        values: dict[int, int] = {}
        for value, source in program.inputs.items():
            if not isinstance(source, Arg):
                values[value] = builder.input(program.specs[value], source)
                continue
            read = reads[source.index]
            if read is not None:
                values[value] = made[read[0]][read[1]]
                continue
            place = places[face.same[first + source.index]]
            if place not in inputs:
                inputs[place] = builder.input(program.specs[value], Arg(place))
            values[value] = inputs[place]
        for instr in program.instrs:
            builder.origin = instr.origin
            values.update(zip(instr.outputs, builder.call(instr.op, [values[v] for v in instr.inputs],
                                                          dict(instr.attrs))))
        made.append([values[v] for v in program.outputs])
        first += len(reads)
    outputs = [value for values_of_part in made for value in values_of_part]
    builder.program.outputs = [value for value, out in zip(outputs, face.exported) if out]
    specs = [spec for part in parts for spec in part.operand_specs]
    split = [part for signature in parts for part in signature.split]
    made_of = Signature(
        builder.program.name, builder.program, [specs[k] for k in face.operands], parts[0].context,
        list(range(len(builder.program.outputs))), _not_alone, [split[k] for k in face.operands] if by_rows else ())
    made_of.touches = _touches(parts, composition, face)
    return made_of


def _touches(parts: Sequence[Signature], composition: Composition, face: Face) -> Any:
    """The operands that each output touches, through what the parts read of each other."""
    places = {k: number for number, k in enumerate(face.operands)}
    of_parts: list[Any] = []
    first = 0
    for part, reads in zip(parts, composition.reads):
        behind = np.zeros((len(reads), len(places)), bool)      # what lies behind each operand
        for k, read in enumerate(reads):
            if read is None:
                behind[k, places[face.same[first + k]]] = True
            else:
                behind[k] = of_parts[read[0]][read[1]]
        of_parts.append(part.touches @ behind)
        first += len(reads)
    found: Any = np.concatenate(of_parts)[np.array(face.exported, bool)]
    return found


def _not_alone(block: Any, operands: list[Any]) -> list[Any]:
    raise AssertionError("the calls of a composition are run alone one by one")


_TITLES = 3


def _title(parts: Sequence[Signature]) -> str:
    titles = [part.title for part in parts]
    more = [f"{len(titles) - _TITLES} more"] if len(titles) > _TITLES + 1 else titles[_TITLES:]
    return " + ".join(titles[:_TITLES] + more)
