"""A recording with the members of groups as single calls. Pure: arrays in, arrays out; no device, no MXNet.

Groups (see `joining`) whose launches do the same are one *composition*: the classes of its parts in the order of the
run, and which part reads what of which. From outside it looks like any class. Its operands are what its parts read
elsewhere, each once; its outputs are what somebody else reads or holds. Both are those of all groups with the
composition together, so that it is one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled, offsets_of

from .analyzer import Recording, Scan
from .classes import ClassInfo
from .joining import Groups

__all__ = ["Coarse", "Composition", "Face", "Compositions", "coarsen", "compositions_of", "merged"]

INSIDE = -1


class Composition(NamedTuple):
    """What the members of some groups do.

    Attributes
    ----------
    classes : of each part
    reads : of each part's operands: (part, output) that makes it, or None where it comes from outside
    """

    classes: tuple[int, ...]
    reads: tuple[tuple[tuple[int, int] | None, ...], ...]


class Face(NamedTuple):
    """What a composition looks like from outside.

    Attributes
    ----------
    exported : of each output of each part, whether somebody else needs it
    same : of each operand of each part, the first one that is always the same; INSIDE for those of other parts
    """

    exported: tuple[bool, ...]
    same: tuple[int, ...]

    @property
    def operands(self) -> list[int]:
        """Which of all the parts' operands are operands of the composition."""
        return [k for k, first in enumerate(self.same) if first == k]


def merged(a: Face, b: Face) -> Face:
    """The face that serves for both: what either exports, and what is the same in both."""
    first: dict[tuple[int, int], int] = {}
    same = tuple(INSIDE if x == INSIDE else first.setdefault((x, y), k) for k, (x, y) in enumerate(zip(a.same, b.same)))
    return Face(tuple(x or y for x, y in zip(a.exported, b.exported)), same)


class Compositions(NamedTuple):
    """All compositions of a flush.

    Attributes
    ----------
    all : the compositions
    faces : of each, what this flush needs
    of_launch : int64 array, shape (launches,)
        By the name of a group: its composition, or -1.
    part : int64 array, shape (calls,)
        Which part of its member a call is.
    call_of, member_offsets : int64 arrays
        The calls of the members of group g: call_of[member_offsets[g] + member * parts + part].
    """

    all: list[Composition]
    faces: list[Face]
    of_launch: Any
    part: Any
    call_of: Any
    member_offsets: Any


class Coarse(NamedTuple):
    """A recording in which members are calls.

    Attributes
    ----------
    recording, launch : the recording, and the launch of each of its calls
    value_of : int64 array
        Value of the old recording -> value of the new one, -1 where it is gone.
    origins : of each class: its number in the old recording, or -1 - its composition
    """

    recording: Recording
    launch: Any
    value_of: Any
    origins: list[int]


# ---- compositions --------------------------------------------------------------------------------------------------

def compositions_of(r: Recording, s: Scan, groups: Groups, held: Any, looks: Any) -> Compositions:
    """The compositions of groups and their faces.

    Parameters
    ----------
    held : int64 array
        Values that must stay: somebody holds them, or something that shares their memory.
    looks : int64 array, shape (columns,)
        A number for what the operands of a column look like; only those that look alike can be one operand.
    """
    num_outputs = r.facts.num_outputs
    most = int(num_outputs.max())
    part, num_parts, call_of, member_offsets, codes, code_offsets = _describe(
        groups.of_launch, groups.follows, groups.times, groups.member, groups.role, groups.order, groups.offsets,
        r.call_class, s.operand_offsets, s.source, s.output, most)
    numbers: dict[bytes, int] = {}
    of_launch = np.full(len(num_parts), -1, np.int64)
    found: list[Composition] = []
    for g in np.flatnonzero(num_parts).tolist():
        code = codes[code_offsets[g]:code_offsets[g + 1]]
        of_launch[g] = numbers.setdefault(code.tobytes(), len(found))
        if of_launch[g] == len(found):
            found.append(_decoded(code.tolist(), r, most))
    parts, classes, outputs, operands = _flat(found, num_outputs, r)
    inside = np.array([read is not None for q in found for reads in q.reads for read in reads], bool)
    columns = np.array([r.facts.column_offsets[c] + k for q in found for c, reads in zip(q.classes, q.reads)
                        for k in range(len(reads))], np.int64)
    same = np.where(inside, INSIDE, _first_alike(operands, parts, looks[columns]))
    exported = np.zeros(int(outputs[-1]), bool)
    _survey(r.call_class, s.operand_offsets, r.operands, s.value_offsets, s.maker, s.source, groups.of_launch,
            _launches(r, groups), part, of_launch, parts, outputs, operands, held,
            r.facts.alias, call_of, member_offsets, num_parts, exported, same)
    for a, b in zip(outputs[parts], outputs[parts[1:]]):
        exported[b - 1] |= not exported[a:b].any()          # a program has a result, also if nobody wants it
    faces = [Face(tuple(exported[outputs[a]:outputs[b]].tolist()), tuple(same[operands[a]:operands[b]].tolist()))
             for a, b in zip(parts.tolist(), parts[1:].tolist())]
    return Compositions(found, faces, of_launch, part, call_of, member_offsets)


def _launches(r: Recording, groups: Groups) -> Any:
    """The launch of each call; -1 for those that only name rows."""
    launch = np.full(len(r.call_class), -1, np.int64)
    launch[groups.order] = np.repeat(np.arange(len(groups.of_launch)), np.diff(groups.offsets))
    return launch


@compiled
def _describe(of_launch, follows, times, member, role, order, offsets,  # type: ignore[no-untyped-def]
              call_class, operand_offsets, source, output, most):
    """Number the parts of all calls, and write down what each group does."""
    num_launches, num_calls = len(of_launch), len(call_class)
    part, launch_of = np.zeros(num_calls, np.int64), np.full(num_calls, -1, np.int64)
    num_parts, member_offsets = np.zeros(num_launches, np.int64), np.zeros(num_launches + 1, np.int64)
    code_offsets = np.zeros(num_launches + 1, np.int64)
    base = np.zeros(num_launches, np.int64)
    for g in range(num_launches):
        for i in order[offsets[g]:offsets[g + 1]]:
            launch_of[i] = g
        if of_launch[g] == g and follows[g] >= 0:
            at, size = g, 0
            while at >= 0:
                base[at] = num_parts[g]
                num_parts[g] += times[at]
                call = order[offsets[at]]
                size += times[at] * (2 + operand_offsets[call + 1] - operand_offsets[call])
                at = follows[at]
            member_offsets[g + 1] = num_parts[g] * ((offsets[g + 1] - offsets[g]) // times[g])
            code_offsets[g + 1] = size
    member_offsets, code_offsets = np.cumsum(member_offsets), np.cumsum(code_offsets)
    call_of, codes = np.empty(member_offsets[-1], np.int64), np.empty(code_offsets[-1], np.int64)
    for g in range(num_launches):
        if num_parts[g] == 0:
            continue
        at, end = g, code_offsets[g]
        while at >= 0:
            for i in order[offsets[at]:offsets[at + 1]]:
                part[i] = base[at] + role[i]
                call_of[member_offsets[g] + member[i] * num_parts[g] + part[i]] = i
            for k in range(times[at]):
                call = order[offsets[at] + k]
                codes[end] = call_class[call]
                codes[end + 1] = operand_offsets[call + 1] - operand_offsets[call]
                end += 2
                for j in range(operand_offsets[call], operand_offsets[call + 1]):
                    inside = source[j] >= 0 and of_launch[launch_of[source[j]]] == g
                    codes[end] = -1
                    if inside:
                        codes[end] = (base[launch_of[source[j]]] + role[source[j]]) * most + output[j]
                    end += 1
            at = follows[at]
    return part, num_parts, call_of, member_offsets, codes, code_offsets


def _decoded(code: list[int], r: Recording, most: int) -> Composition:
    classes, reads, at = [], [], 0
    while at < len(code):
        classes.append(code[at])
        tokens = code[at + 2:at + 2 + code[at + 1]]
        reads.append(tuple(None if t < 0 else divmod(t, most) for t in tokens))
        at += 2 + len(tokens)
    return Composition(tuple(classes), tuple(reads))


def _flat(found: Sequence[Composition], num_outputs: Any, r: Recording) -> Any:
    """Parts of all compositions one behind the other: where each composition, the outputs and the operands begin."""
    parts = offsets_of(np.array([len(q.classes) for q in found], np.int64))
    classes = np.array([c for q in found for c in q.classes], np.int64)
    outputs = offsets_of(num_outputs[classes])
    operands = offsets_of(np.array([len(reads) for q in found for reads in q.reads], np.int64))
    return parts, classes, outputs, operands


def _first_alike(operands: Any, parts: Any, looks: Any) -> Any:
    """Of each operand of a composition, the first that looks alike, counted from the composition's first."""
    same = np.empty(len(looks), np.int64)
    for a, b in zip(operands[parts].tolist(), operands[parts[1:]].tolist()):
        first: dict[int, int] = {}
        same[a:b] = [first.setdefault(look, k) for k, look in enumerate(looks[a:b].tolist())]
    return same


@compiled
def _survey(call_class, operand_offsets, operands, value_offsets, maker, source,  # type: ignore[no-untyped-def]
            of_group, launch, part, of_launch, parts, output_starts, operand_starts, held, aliases, call_of,
            member_offsets, num_parts, exported, same):
    """Find what is needed outside of its member, and which operands are the same in all members."""
    for i in range(len(call_class)):
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if operands[j] < 0:
                continue
            producer = maker[operands[j]]
            if aliases[call_class[producer]] or of_launch[of_group[launch[producer]]] < 0:
                continue
            if aliases[call_class[i]] or of_group[launch[i]] != of_group[launch[producer]]:
                p = parts[of_launch[of_group[launch[producer]]]] + part[producer]
                exported[output_starts[p] + operands[j] - value_offsets[producer]] = True
    for v in held:
        producer = maker[v]
        if not aliases[call_class[producer]] and of_launch[of_group[launch[producer]]] >= 0:
            p = parts[of_launch[of_group[launch[producer]]]] + part[producer]
            exported[output_starts[p] + v - value_offsets[producer]] = True

    tokens, before = np.empty(len(same), np.int64), np.empty(len(same), np.int64)
    for g in range(len(of_launch)):
        q = of_launch[g]
        if q < 0:
            continue
        begin, end = operand_starts[parts[q]], operand_starts[parts[q + 1]]
        count = end - begin
        for at in range(member_offsets[g], member_offsets[g + 1], num_parts[g]):
            differs = False
            for p in range(num_parts[g]):
                i = call_of[at + p]
                k = operand_starts[parts[q] + p] - begin
                for j in range(operand_offsets[i], operand_offsets[i + 1]):
                    tokens[k] = operands[j]
                    if same[begin + k] >= 0 and tokens[same[begin + k]] != tokens[k]:
                        differs = True
                    k += 1
            if differs:
                before[:count] = same[begin:end]
                for k in range(count):
                    first = before[k]
                    if first < 0 or tokens[first] == tokens[k]:
                        continue
                    for other in range(first + 1, k + 1):       # k itself is the last resort
                        if before[other] == first and tokens[other] == tokens[k]:
                            same[begin + k] = other
                            break


# ---- the coarse recording ------------------------------------------------------------------------------------------

def coarsen(r: Recording, s: Scan, groups: Groups, compositions: Compositions, faces: Sequence[Face],
            by_rows: Sequence[bool]) -> Coarse:
    """The recording with members as calls, in the order of the run.

    Parameters
    ----------
    faces : of each composition; they export at least what is needed, and name no operands the same that differ
    by_rows : of each composition, whether its calls have a position for every row
    """
    found, num_outputs = compositions.all, r.facts.num_outputs
    parts, _, outputs, operands = _flat(found, num_outputs, r)
    launch = _launches(r, groups)
    joined = np.where(launch >= 0, compositions.of_launch[groups.of_launch[launch]] >= 0, False)
    kept = np.flatnonzero(np.bincount(r.call_class[~joined], minlength=len(r.classes)))
    number = np.full(len(r.classes), -1, np.int64)
    number[kept] = np.arange(len(kept))
    exported = np.array([x for face in faces for x in face.exported], bool)
    chosen = np.array([first == k for face in faces for k, first in enumerate(face.same)], bool)
    call_class, call_width, call_count, call_first, tokens, new_launch, value_of = _coarsen(
        r.call_class, r.call_width, r.call_count, s.operand_offsets, r.operands, s.value_offsets, launch,
        groups.of_launch, groups.place, groups.order, groups.offsets, s.source,
        r.facts.alias, r.call_first, number, len(kept), compositions.of_launch,
        compositions.call_of, compositions.member_offsets, parts, outputs, operands, exported, chosen)
    classes = [r.classes[c] for c in kept.tolist()]
    classes += [_class_info(r, *both) for both in zip(found, faces, by_rows)]
    recording = replace(r, classes=classes, call_class=call_class, call_width=call_width, call_count=call_count,
                        call_first=call_first, operands=tokens, heads=value_of[r.heads])
    return Coarse(recording, new_launch, value_of, kept.tolist() + [-1 - q for q in range(len(found))])


def _class_info(r: Recording, q: Composition, face: Face, by_rows: bool) -> ClassInfo:
    infos = [r.classes[c] for c in q.classes]
    widths = [width for info in infos for width in info.operand_widths]
    split = [part and by_rows for info in infos for part in info.split]
    places = [place for info in infos for place in zip(info.output_widths, info.output_buffers)]
    outputs = [place for place, out in zip(places, face.exported) if out]
    return ClassInfo(tuple(widths[k] for k in face.operands), tuple(split[k] for k in face.operands),
                     tuple(width for width, _ in outputs), tuple(buffer for _, buffer in outputs), False,
                     infos[0].recorded, any(info.owns_wanted for info in infos))


@compiled
def _coarsen(call_class, call_width, call_count, operand_offsets, operands, value_offsets,  # type: ignore[no-untyped-def]
             launch, of_group, place, order, offsets, source, aliases, call_first, number, num_kept, of_launch, call_of,
             member_offsets, parts, output_starts, operand_starts, exported, chosen):
    num_calls, num_launches = len(call_class), len(of_group)
    names_of_groups = np.flatnonzero(of_group == np.arange(num_launches))
    by_place = names_of_groups[np.argsort(place[names_of_groups], kind="mergesort")]        # in the order of the run
    rank = np.zeros(num_launches, np.int64)
    rank[by_place] = np.arange(len(by_place))
    # Calls that only name rows come right behind what they name: at[k]:at[k + 1] are those behind launch k - 1.
    behind, at = np.full(num_calls, -1, np.int64), np.zeros(len(by_place) + 2, np.int64)
    for i in range(num_calls):
        if aliases[call_class[i]]:
            whole = source[operand_offsets[i]]
            behind[i] = rank[of_group[launch[whole]]] + 1 if whole >= 0 else 0
            at[behind[i] + 1] += 1
    at = np.cumsum(at)
    names, free = np.empty(at[-1], np.int64), at.copy()
    for i in range(num_calls):
        if behind[i] >= 0:
            names[free[behind[i]]] = i
            free[behind[i]] += 1

    new_class, new_width = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    new_count, new_launch = np.zeros(num_calls, np.int64), np.empty(num_calls, np.int64)
    new_first = np.zeros(num_calls, np.int64)
    tokens, value_of = np.empty(len(operands), np.int64), np.full(value_offsets[-1], -1, np.int64)
    count = end = values = 0
    for k in range(-1, len(by_place)):
        g = by_place[k] if k >= 0 else -1
        q = of_launch[g] if k >= 0 else -1
        if q >= 0:
            num_parts = parts[q + 1] - parts[q]
            for first in range(member_offsets[g], member_offsets[g + 1], num_parts):
                new_class[count], new_width[count], new_launch[count] = num_kept + q, call_width[call_of[first]], k
                count += 1
                for p in range(num_parts):
                    i = call_of[first + p]
                    column = operand_starts[parts[q] + p] - operand_offsets[i]
                    for j in range(operand_offsets[i], operand_offsets[i + 1]):
                        if chosen[column + j]:
                            tokens[end] = value_of[operands[j]] if operands[j] >= 0 else operands[j]
                            end += 1
                    output = output_starts[parts[q] + p] - value_offsets[i]
                    for v in range(value_offsets[i], value_offsets[i + 1]):
                        if exported[output + v]:
                            value_of[v] = values
                            values += 1
        for turn in range(2):                   # a launch that is as it was, then who only names rows
            plain = names[at[k + 1]:at[k + 2]]
            if turn == 0:
                plain = order[offsets[g]:offsets[g + 1]] if k >= 0 and q < 0 else order[:0]
            for i in plain:
                new_class[count], new_width[count] = number[call_class[i]], call_width[i]
                new_count[count], new_first[count] = call_count[i], call_first[i]
                new_launch[count] = k if turn == 0 else -1
                count += 1
                for j in range(operand_offsets[i], operand_offsets[i + 1]):
                    token = operands[j if turn == 0 else operand_offsets[i]]    # what else is there is only looked at
                    tokens[end] = value_of[token] if token >= 0 else token
                    end += 1
                for v in range(value_offsets[i], value_offsets[i + 1]):
                    value_of[v] = values
                    values += 1
    return (new_class[:count], new_width[:count], new_count[:count], new_first[:count], tokens[:end],
            new_launch[:count], value_of)
