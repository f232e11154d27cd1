"""What runs of a recording: operators that are joined are one call, and long sums are lists.

Worked out once for each sample, and remembered as its form (see `samples`). A mini-batch of known samples is their
forms, merged; one with new samples is analyzed as a whole, because launches of many samples show what belongs together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit

from .analyzer import Recording, Scan, problem_of, scan
from .coarse import Coarse, coarsen, compositions_of, depends_on
from .compositions import COMPOSED, is_by_rows
from .joining import HABITS, Groups, find_groups
from .last_used import LastUsed
from .plan_cache import PlanCache
from .policies import POLICIES
from .repeats import find_repeats
from .samples import Cut, Form, Parts, any_reads, cut_samples, forms_of, merge_forms, take_samples
from .signature import CallClass, Signature, any_number_signature
from .sums import SUM_ROLES, find_chains, fold_chains
from .tables import Members, Structure, Tables, class_info

__all__ = ["FORMS", "MEMBERS", "with_members"]

FORMS = PlanCache(64 << 20)         # code of a sample -> its form
MEMBERS = PlanCache(32 << 20)       # Structure -> its Members; None if it runs as it was recorded
MADE = LastUsed(4096)               # signature, .. -> Made: one and the same object in all forms


class Kinds(LastUsed):
    """What entries and classes are in all flushes -> a number, which is never that of something else."""

    def __init__(self, most: int = 1 << 16):
        super().__init__(most)
        self._numbers = itertools.count()

    def number(self, look: Any) -> int:
        number: int | None = self.get(look)
        if number is None:
            number = next(self._numbers)
            self.put(look, number)
        return number


KINDS = Kinds()             # of the whole process, as the others


class Made(CallClass):
    """A class that nobody recorded: of joined operators, or of sums as lists. It holds nothing of a model.

    Attributes
    ----------
    num_parts : how many recorded calls are one of its calls; 0 for sums, where it is one less than there are terms
    num_launches : how many launches were joined to one of it
    parts : signatures of the parts and what they read of each other, by which `COMPOSED` knows it; None for sums
    depends : which outputs depend on which operands; see `depends_on`
    """

    __slots__ = ("num_parts", "num_launches", "parts", "depends")

    def __init__(self, signature: Signature, recorded: bool, where: str, num_parts: int = 0, num_launches: int = 1,
                 parts: Any = None, depends: Any = None):
        super().__init__(-1, signature, recorded, where, None)
        self.num_parts, self.num_launches, self.parts, self.depends = num_parts, num_launches, parts, depends

    def is_current(self) -> bool:
        """Whether operators are still joined to this very program; not when others need more of its results."""
        return self.parts is None or COMPOSED.current(self.parts) is self.signature


def with_members(recorded: Tables, drops: bool, stats: Any) -> Tables:
    """The tables of what runs; counts known and new samples.

    Parameters
    ----------
    drops : whether calls that repeat others are left out then
    stats : Stats, where it counts
    """
    structure = recorded.structure
    known = MEMBERS.get(structure, ())
    if known is None:
        members = _members(recorded, drops, stats)
        size = structure.num_bytes + (0 if members is None else members.structure.num_bytes)
        MEMBERS.put(structure, (), members, num_bytes=size)
    else:
        _, members = known
    return recorded if members is None else recorded.with_members(members)


def _members(recorded: Tables, drops: bool, stats: Any) -> Members | None:
    """What runs of a structure that was not seen before; None if that is what was recorded."""
    r, num_data, offsets = recorded.recording, len(recorded.leaves.data), recorded.recording.offsets
    joinable = _joinable(recorded.classes, r)
    if not joinable.any() or not any_reads(r.call_class, *offsets, r.operands, joinable):
        return None                         # marked blocks: reading the log was the merge
    kinds, ids = _kinds(recorded)
    slots = np.array([e.signature.slots for e in recorded.entries], np.int64)
    cut = cut_samples(recorded.call_entry, offsets, r.operands, kinds, slots, num_data, recorded.structure.leaf_specs,
                      np.concatenate([r.heads, recorded.viewed]))
    keys = cut.keys()
    known = [FORMS.get(key, ()) for key in keys]
    forms = [None if found is None else found[1] for found in known]
    stale = {cls for cls in {cls for form in forms if form is not None for cls in form.made} if not cls.is_current()}
    new = [k for k, form in enumerate(forms) if form is None or not stale.isdisjoint(form.made)]
    stats.sample_hits += len(forms) - len(new)
    stats.sample_misses += len(new)
    if new:
        found, settled = _analyze(recorded, cut, np.array(new), offsets, ids, drops)
        for k, form in zip(new, found):
            forms[k] = form
            if settled:
                FORMS.put(keys[k], (), form, num_bytes=len(keys[k]) + form.num_bytes)
    return _merged(recorded, cut, forms)


def _joinable(classes: Sequence[CallClass], r: Recording) -> Any:
    """Which classes may be joined with others: operators.

    Not where words are looked up one by one: such rows are known by their number, and run once.
    """
    found = np.array([cls.identity is None and cls.signature.alias < 0 and not cls.signature.draws for cls in classes],
                     bool)
    for c in [c for c, cls in enumerate(classes) if cls.signature.looks_up]:
        found[c] &= bool((r.call_width[r.call_class == c] > 1).any())
    return found


def _kinds(recorded: Tables) -> tuple[Any, list[int]]:
    """Numbers that entries and classes have in all flushes.

    The same operator with another weight is another class; such classes are told apart by the order in which they came.
    """
    count: Counter[Any] = Counter()
    ids = []
    with KINDS.lock:
        for cls in recorded.classes:
            signature = cls.signature
            # Of those that only name rows, whose class has the signature of any of them, nothing else counts.
            look = (signature.number if signature.alias < 0 else -len(signature.operand_specs), cls.recorded)
            ids.append(KINDS.number((*look, count[look])))
            count[look] += 1
        spec = int(recorded.structure.leaf_specs[-1]) if len(recorded.leaves.numbers) else -1
        kinds = [KINDS.number((ids[e.cls.number], e.signature.number, e.rows, e.numbers, spec))
                 for e in recorded.entries]
    return np.array(kinds, np.int64), ids


# ---- analysis ----------------------------------------------------------------------------------------------------

def _analyze(recorded: Tables, cut: Cut, new: Any, offsets: tuple[Any, Any], ids: Sequence[int],
             drops: bool) -> tuple[list[Form], bool]:
    """The forms of new samples, which are looked at together, and whether others would look like them from now on."""
    classes, r, viewed = recorded.classes, recorded.recording, recorded.viewed
    recorded_values = offsets[1]
    if len(new) < len(cut.starts) - 1:
        cut, calls, operands, number = take_samples(cut, new, r.operands, offsets)
        r, viewed = r.of_calls(calls, operands, number), number[viewed]
        viewed, recorded_values = viewed[viewed >= 0], r.offsets[1]

    def teach() -> None:
        """What is read by more calls than there are of it, without repeats, is better made once and for all."""
        left = recorded.structure.without_repeats(find_repeats(recorded.repeat_facts(), offsets), 0)
        _groups(*_fold(recorded.classes, left.recording, left.viewed)[:3])

    classes, r, s, viewed, value_of = _fold(classes, r, viewed)
    made: list[Made] = list(classes[len(ids):])
    call_made = np.maximum(r.call_class - len(ids), -1)
    groups = _groups(classes, r, s, teach if drops else None)
    if groups is not None:
        coarse, composed = _join(classes, r, s, viewed, groups, [*ids, *[-1] * len(made)])
        origins = np.array(coarse.origins, np.int64)
        of_class = np.where(origins >= 0, np.maximum(origins - len(ids), -1), len(made) - 1 - origins)
        made += composed
        r, call_made, value_of = coarse.recording, of_class[coarse.recording.call_class], np.append(
            coarse.value_of, -1)[value_of]
    forms = forms_of(cut, Parts(call_made, *r.offsets, r.operands, value_of), recorded_values,
                     len(recorded.leaves.data), made)
    return forms, groups is None or groups.settled


def _fold(classes: Sequence[CallClass], r: Recording, viewed: Any) -> tuple[Any, Recording, Scan, Any, Any]:
    """Let long sums be lists: classes, recording, scan and viewed values then, and the numbers that values have there.
    """
    s = scan(r)
    adds = np.array([cls.identity is None and cls.signature.adds_rows for cls in classes], bool)
    chains = find_chains(r, s, np.concatenate([r.heads, viewed]), adds) if adds.any() else None
    num_roles = len(SUM_ROLES)
    chosen = np.zeros(0, bool) if chains is None else SUM_ROLES.chosen(chains, _names(classes))
    if len(SUM_ROLES) > num_roles:
        FORMS.clear()                       # there, such sums are no lists
    if chains is None or not chosen.any():
        return classes, r, s, viewed, np.arange(s.value_offsets[-1])
    known: dict[Any, int] = {}
    classes, list_of = list(classes), np.full(len(classes), -1, np.int64)
    for c in np.unique(chains.roles[chosen, 0]).tolist():
        signature, recorded = any_number_signature("add_n", classes[c].signature.operand_specs[0]), classes[c].recorded
        if (signature, recorded) not in known:
            known[signature, recorded] = len(classes)
            classes.append(_made(signature, recorded, (), classes[c].where))
        list_of[c] = known[signature, recorded]
    r, value_of = fold_chains(r, s, chains, chosen, list_of)
    return classes, r, scan(r), value_of[viewed], value_of


def _groups(classes: Sequence[CallClass], r: Recording, s: Scan, teach: Any = None) -> Groups | None:
    """The launches that have the same members."""
    launch = POLICIES["depth"].plan(problem_of(r, s, *np.zeros((2, len(r.classes)))))
    heavy = np.array([cls.signature.has_product for cls in classes], bool)
    return find_groups(r, s, launch, _joinable(classes, r), heavy, _names(classes), HABITS, teach)


def _join(classes: Sequence[CallClass], r: Recording, s: Scan, viewed: Any, groups: Groups,
          ids: Sequence[int]) -> tuple[Coarse, list[Made]]:
    """Join these launches: the coarse recording, and the classes that were made."""
    numbers: dict[Any, int] = {}
    looks = np.array([numbers.setdefault(look, len(numbers)) for cls in classes
                      for look in zip(cls.signature.operand_specs, cls.signature.split)], np.int64)
    found = compositions_of(r, s, groups, np.concatenate([r.heads, viewed]), looks)
    faces, made, by_rows = [], [], []
    for k, (q, needed) in enumerate(zip(found.all, found.faces)):
        parts = [classes[c] for c in q.classes]
        signatures = [cls.signature for cls in parts]
        face, signature = COMPOSED.signature(signatures, q, needed)
        where = parts[0].where if len({cls.where for cls in parts}) == 1 else ""
        depends = depends_on(q, face, [len(r.classes[c].output_widths) for c in q.classes])
        # How many launches the first group consists of: other groups of the composition are like it.
        num_launches = int(np.count_nonzero(groups.of_launch == np.argmax(found.of_launch == k)))
        made.append(_made(signature, parts[0].recorded, tuple([ids[c] for c in q.classes]), where, len(parts),
                          num_launches, COMPOSED.key(signatures, q), depends))
        faces.append(face)
        by_rows.append(is_by_rows(signatures, q))
    return coarsen(r, s, groups, found, faces, by_rows), made


def _made(signature: Signature, recorded: bool, ids: tuple[int, ...], *facts: Any) -> Made:
    """The class of such calls: parts with another weight, as `ids` says, are another one."""
    with MADE.lock:
        made: Made = MADE.get((signature, recorded, ids)) or Made(signature, recorded, *facts)
        MADE.put((signature, recorded, ids), made)
        return made


def _names(classes: Sequence[CallClass]) -> list[Any]:
    """What classes are called in all flushes.

    Not by blocks and weights, which may die; nor by a block's name: a loss that is made for every sample has new ones.
    """
    count: Counter[Any] = Counter()
    names = []
    for cls in classes:
        look = (cls.signature if cls.identity is None else None, cls.recorded, cls.where.partition(" ")[0])
        names.append((*look, count[look]))      # the same operator with another weight is another class
        count[look] += 1
    return names


# ---- merge -------------------------------------------------------------------------------------------------------

def _merged(recorded: Tables, cut: Cut, forms: Sequence[Form]) -> Members:
    """The forms of all samples as tables."""
    r, old, num_classes = recorded.recording, recorded.structure, len(recorded.classes)
    m = merge_forms(cut, forms, len(recorded.leaves.data))
    lists = {(cls.signature, cls.recorded): c for c, cls in enumerate(recorded.classes) if cls.signature.slots}
    of_made = [lists.get((cls.signature, cls.recorded), num_classes + k) for k, cls in enumerate(m.made)]
    is_list = np.array([cls.signature.slots > 0 for cls in m.made], bool)
    call_class, call_entry, call_width, call_count, call_first, value_specs = _describe(
        m.call_of, m.call_made, m.num_operands, m.value_of, m.num_values, np.array(of_made, np.int64), is_list,
        len(recorded.entries), r.call_class, old.call_entry, r.call_width, r.call_count, r.call_first, old.value_specs)
    used = np.flatnonzero(np.bincount(call_class, minlength=1))
    number = np.zeros(num_classes + len(m.made), np.int64)
    number[used] = np.arange(len(used))
    buffers = {b: k for k, b in enumerate(old.buffers)}
    origins = [c if c < num_classes else num_classes - 1 - c for c in used.tolist()]
    infos = [r.classes[c] if c >= 0 else class_info(m.made[-1 - c], False, buffers) for c in origins]
    recording = replace(r, classes=infos, call_class=number[call_class], call_width=call_width, operands=m.operands,
                        heads=m.value_of[r.heads], call_count=call_count, call_first=call_first)
    structure = Structure(recording, list(buffers), value_specs, call_entry, old.numbers, old.leaf_specs,
                          m.value_of[old.viewed], m.value_of)
    return Members(structure, origins, m.made)


@njit(cache=True, nogil=True)
def _describe(call_of, call_made, num_operands, value_of, num_values, of_made, is_list,  # type: ignore[no-untyped-def]
              num_entries, old_class, old_entry, old_width, old_count, old_first, old_specs):
    """Class, entry, width, length of the list and first row of each call, and the spec of each value."""
    count = len(call_of)
    call_class, call_entry = np.empty(count, np.int64), np.empty(count, np.int64)
    call_width, call_count, call_first = old_width[call_of], old_count[call_of], old_first[call_of]
    for i in range(count):
        m = call_made[i]
        if m < 0:
            call_class[i], call_entry[i] = old_class[call_of[i]], old_entry[call_of[i]]
        else:
            call_class[i], call_entry[i], call_first[i] = of_made[m], num_entries + m, 0
            call_count[i] = num_operands[i] if is_list[m] else 0
    value_specs = np.empty(num_values, np.int64)
    for v in range(len(value_of)):
        if value_of[v] >= 0:
            value_specs[value_of[v]] = old_specs[v]
    return call_class, call_entry, call_width, call_count, call_first, value_specs
