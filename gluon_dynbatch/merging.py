"""What runs of a recording: operators that are joined are one call, and long sums are lists.

Worked out once for each sample, and remembered as its form (see `samples`). A mini-batch of known samples is their
forms, merged; one with new samples is analyzed as a whole, because launches of many samples show what belongs together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .analyzer import Recording, Scan, launches_by_depth, scan
from .coarse import Coarse, coarsen, compositions_of
from .compositions import COMPOSED, is_by_rows
from .joining import HABITS, Groups, find_groups
from .last_used import LastUsed
from .logs import Log
from .repeats import find_repeats
from .samples import Form, Forms, Parts, any_reads, forms_of, made_of, merge_forms, take_samples
from .signature import CallClass, Signature, any_number_signature
from .sums import SUM_ROLES, find_chains, fold_chains
from .tables import Members, Tables

__all__ = ["FORMS", "with_members"]

FORMS = Forms(64 << 20)
MADE = LastUsed(4096)               # signature, .. -> Made: one and the same object in all forms


class Made(CallClass):
    """A class that nobody recorded: of joined operators, or of sums as lists. It holds nothing of a model.

    Attributes
    ----------
    num_parts : how many recorded calls are one of its calls; 0 for sums, where it is one less than there are terms
    num_launches : how many launches were joined to one of it
    parts : signatures of the parts and what they read of each other, by which `COMPOSED` knows it; None for sums
    """

    __slots__ = ("num_parts", "num_launches", "parts", "_seen")

    def __init__(self, signature: Signature, recorded: bool, where: str, num_parts: int = 0, num_launches: int = 1,
                 parts: Any = None):
        super().__init__(-1, -1, signature, recorded, where, None)
        self.num_parts, self.num_launches, self.parts = num_parts, num_launches, parts
        self._seen = -1                         # `COMPOSED.changes` when it was current

    def is_current(self) -> bool:
        """Whether operators are still joined to this very program; not when others need more of its results."""
        changes = COMPOSED.changes              # (read first: another thread may change it)
        if self.parts is not None and self._seen != changes:
            if COMPOSED.current(self.parts) is not self.signature:
                return False
            self._seen = changes
        return True


def with_members(log: Log, drops: bool, stats: Any) -> Tables:
    """The tables of what runs; counts known and new samples.

    Parameters
    ----------
    drops : whether calls that repeat others are left out then
    stats : Stats, where it counts
    """
    if log.known.members is None:
        if log.joins:
            log.let_run(_members(log, drops, stats))
        else:
            log.let_all_run()
    return log.joined()


def _members(log: Log, drops: bool, stats: Any) -> Members:
    """What runs of a log that was not seen before."""
    cut = log.cut
    checksums, codes = cut.checksums.tolist(), cut.keys()
    forms: list[Any] = FORMS.get(checksums, codes)
    made = {form.made for form in forms if form is not None}            # (mostly one and the same)
    stale = {cls for cls in set().union(*made) if not cls.is_current()}
    new = [k for k, form in enumerate(forms) if form is None or (stale and not stale.isdisjoint(form.made))]
    stats.sample_hits += len(forms) - len(new)
    stats.sample_misses += len(new)
    if new:
        found, settled = _analyze(log, np.array(new), drops)
        for k, form in zip(new, found):
            forms[k] = form
        if settled:
            FORMS.put([(checksums[k], codes[k], forms[k]) for k in new])
        if all([form.is_recorded for form in forms]):
            return Members(log.recorded().structure, range(len(log.classes)), ())
    return _merged(log, forms)


def _joinable(classes: Sequence[CallClass], r: Recording) -> Any:
    """Which classes may be joined with others: operators.

    Not where words are looked up one by one: such rows are known by their number, and run once.
    """
    found = np.array([cls.identity is None and cls.signature.alias < 0 and not cls.signature.draws for cls in classes],
                     bool)
    for c in [c for c, cls in enumerate(classes) if cls.signature.looks_up]:
        found[c] &= bool((r.call_width[r.call_class == c] > 1).any())
    return found


# ---- analysis ----------------------------------------------------------------------------------------------------

def _analyze(log: Log, new: Any, drops: bool) -> tuple[list[Form], bool]:
    """The forms of new samples, which are looked at together, and whether others would look like them from now on."""
    recorded, ids, cut = log.recorded(), [cls.kind for cls in log.classes], log.cut
    classes, r, viewed = recorded.classes, recorded.recording, recorded.viewed
    offsets, entry, specs = r.offsets, recorded.call_entry, recorded.value_specs
    if len(new) < len(cut.starts) - 1:
        cut, calls, operands, number = take_samples(cut, new, r.operands, offsets)
        r, viewed = r.of_calls(calls, operands, number), number[viewed]
        viewed, entry, specs = viewed[viewed >= 0], entry[calls], specs[number >= 0]
    as_recorded = (entry, r.call_width, r.offsets[1], specs)

    def teach() -> None:
        """What is read by more calls than there are of it, without repeats, is better made once and for all."""
        left = recorded.structure.without_repeats(find_repeats(recorded.repeat_facts(), recorded.recording), 0)
        _groups(*_fold(recorded.classes, left.recording, left.viewed)[:3])

    made: list[Made] = []
    groups, call_made, value_of = None, np.full(len(entry), -1), np.arange(len(specs))
    joinable = _joinable(classes, r)
    if joinable.any() and any_reads(r.call_class, *r.offsets, r.operands, joinable):
        classes, r, s, viewed, value_of = _fold(classes, r, viewed)
        made, call_made = list(classes[len(ids):]), np.maximum(r.call_class - len(ids), -1)
        groups = _groups(classes, r, s, teach if drops else None)
    if groups is not None:
        coarse, composed = _join(classes, r, s, viewed, groups, [*ids, *[-1] * len(made)])
        origins = np.array(coarse.origins, np.int64)
        of_class = np.where(origins >= 0, np.maximum(origins - len(ids), -1), len(made) - 1 - origins)
        made += composed
        r, call_made, value_of = coarse.recording, of_class[coarse.recording.call_class], np.append(
            coarse.value_of, -1)[value_of]
    forms = forms_of(cut, Parts(call_made, *r.offsets, r.operands, value_of), as_recorded, log.kinds, len(log.specs),
                     made)
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
    heavy = np.array([cls.signature.has_product for cls in classes], bool)
    return find_groups(r, s, launches_by_depth(r, s), _joinable(classes, r), heavy, _names(classes), HABITS, teach)


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
        # How many launches the first group consists of: other groups of the composition are like it.
        num_launches = int(np.count_nonzero(groups.of_launch == np.argmax(found.of_launch == k)))
        made.append(_made(signature, parts[0].recorded, tuple([ids[c] for c in q.classes]), where, len(parts),
                          num_launches, COMPOSED.key(signatures, q)))
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

def _merged(log: Log, forms: Sequence[Form]) -> Members:
    """The forms of all samples as tables."""
    num_classes, all_made = len(log.classes), made_of(forms)
    lists = {(cls.signature, cls.recorded): c for c, cls in enumerate(log.classes) if cls.signature.slots}
    facts = [(lists.get((signature, cls.recorded), num_classes + k), signature.slots, len(signature.rows[1]))
             for k, (cls, signature) in enumerate([(cls, cls.signature) for cls in all_made])]
    m = merge_forms(log.cut, forms, log.kinds, len(log.specs), num_classes, all_made, facts)
    origins = [c if c < num_classes else num_classes - 1 - c for c in m.used.tolist()]
    structure = log.structure_of(origins, all_made, m[:7], (m.operand_offsets, m.value_offsets), m.value_of)
    return Members(structure, origins, all_made)
