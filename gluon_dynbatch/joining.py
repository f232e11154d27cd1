"""Launches that run as one. Pure: arrays in, arrays out; no device, no MXNet.

Operators that are recorded one by one have launches one by one, but what a sample does to its value it does without
asking others: the i-th call of a launch reads what the i-th call of another has made. Such launches are a *group*, and
their calls for one sample are a *member* of it, which can run as one call of one program.

Launches are taken in the order of the run. The calls of a launch that read a group join it if each of them reads one
member and no other, and all members are read alike. They need not be all calls of the launch: the others may join other
groups, or stay. (A product stays whole: its rows are cheaper together.) A member may have several calls of a launch:
three gates are three sigmoids. Their numbers among them are their *roles*. What joins nobody is a new group; calls that
read one member of an older one are one member of it too.

All of a group runs in one place, where the first of it ran or where the last did: in the first place, if what the
newcomers read elsewhere is made before; in the last, if nobody else reads the group before.

A recurrent net would become one long program, another one for each length. So a product joins what only it reads (a
layer and the next one, but not a state and one of the cells that it goes to), a group has a product with one weight
once, what has no product ends where what it began with comes again, and no class is there more than a few times. Where
few samples are left, launches fit by chance, in ever new ways. So groups are found twice, and the second time a call
joins what it reads only if most of its class, reading the same class there, did. What classes mostly do is remembered:
after a few flushes groups are found once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled

from .analyzer import Recording, Scan
from .last_used import LastUsed
from .members import (
    MOST_ROLES,
    calls_of,
    classes_fit,
    enter,
    fold,
    groups_read,
    is_read_only_by,
    place_of,
    rename,
    split_off,
    take_partners,
    take_roles,
)

__all__ = ["HABITS", "Groups", "Habits", "find_groups"]

MOST_PARTS = 64         # calls of a member
MOST_TRIALS = 32        # groups that one launch may try to join
MOST_PAIRS = 1 << 24    # classes x columns: beyond 16 MB the table is not worth its room, and nothing is joined


class Groups(NamedTuple):
    """Which launches run as one. Launches that were split count as several, so there may be more than before.

    Attributes
    ----------
    of_launch : int64 array, shape (launches,)
        The group of each launch, named by one of its launches.
    follows : int64 array, shape (launches,)
        The next launch of the group, in an order in which they can run; -1 behind the last. It begins with the name.
    place : int64 array, shape (launches,)
        Of each group: where it runs. Those in the same place do not read each other.
    times : int64 array, shape (launches,)
        How many calls of the launch each member has.
    member, role : int64 arrays, shape (calls,)
    order, offsets : the calls of launch k are order[offsets[k]:offsets[k + 1]], by member, then by role
    num_joined : launches of before that are now part of others
    settled : whether classes were joined as enough flushes before have shown
    """

    of_launch: Any
    follows: Any
    place: Any
    times: Any
    member: Any
    role: Any
    order: Any
    offsets: Any
    num_joined: int
    settled: bool


class Habits(LastUsed):
    """How often calls are in one group with what they read, by the two classes and the column.

    An entry is the number of calls together less those apart, and that of flushes.
    """

    def __init__(self, most: int = 4096):
        super().__init__(most)

    def apart(self, pairs: Sequence[Any]) -> list[bool] | None:
        """Which pairs are mostly apart; None if some of them were seen in few flushes."""
        known = [self.get(pair, (0, 0)) for pair in pairs]
        return [balance < 0 for balance, _ in known] if all(n >= ENOUGH for _, n in known) else None

    def taught(self, pairs: Sequence[Any], teach: Callable[[], None]) -> list[bool]:
        """Which pairs are mostly apart, once others have told; pairs that these do not have were seen in vain."""
        before = [self.get(pair) for pair in pairs]
        teach()
        unknown = [pair for pair, known in zip(pairs, before) if self.get(pair) == known]
        self.learn(unknown, [0] * len(unknown))
        return [self.get(pair, (0, 0))[0] < 0 for pair in pairs]

    def learn(self, pairs: Sequence[Any], balances: Sequence[int]) -> list[bool]:
        """Take in one flush; which pairs are mostly apart now."""
        found = []
        with self.lock:
            for pair, balance in zip(pairs, balances):
                before, flushes = self.get(pair, (0, 0))
                self.put(pair, (before + balance, flushes + 1))
                found.append(before + balance < 0)
        return found


HABITS = Habits()           # of the whole process
ENOUGH = 4                  # flushes


def find_groups(r: Recording, s: Scan, launch: Any, joinable: Any, heavy: Any, names: Sequence[Hashable],
                habits: Habits, teach: Callable[[], None] | None = None) -> Groups | None:
    """The groups of a plan; None if every launch stays alone.

    Parameters
    ----------
    r, s : what was recorded
    launch : int64 array, shape (calls,)
        The launch of each call; -1 for those that only name rows.
    joinable, heavy : bool arrays, shape (classes,)
        Whether launches of the class may join others, and whether it is a product with a weight.
    names : of each class, what it is called in all flushes
    habits : what was learned from other flushes
    teach : called where that is not enough: lets habits learn from what is more telling than these calls
    """
    column_offsets, split, aliases = r.facts.column_offsets, r.facts.split, r.facts.alias
    joinable = joinable & ~aliases & (r.facts.slots == 0)
    if not len(launch) or not joinable[r.call_class].any():
        return None
    if len(r.classes) * int(column_offsets[-1]) > MOST_PAIRS:
        return None
    num_launches = int(launch.max()) + 1
    order, bounds = _by_launch(launch, num_launches)
    through = r.operands >= 0                           # .. by way of a call that only names rows
    through[through] = aliases[r.call_class[s.maker[r.operands[through]]]]
    calls = (r.call_class, r.call_width, s.operand_offsets, s.source, through, s.output)
    ragged = np.array([any(info.split) for info in r.classes], bool)
    classes = (joinable, r.facts.recorded, heavy, ragged, column_offsets, split)
    readers = _readers(s.operand_offsets, s.source)
    apart = np.zeros((len(r.classes), len(split)), bool)
    producers, columns = np.nonzero(_reads(launch, calls, joinable, column_offsets))
    of_column = np.repeat(np.arange(len(r.classes)), np.diff(column_offsets))[columns]
    pairs = [(names[a], names[b], k) for a, b, k in zip(producers.tolist(), of_column.tolist(),
                                                        (columns - column_offsets[of_column]).tolist())]
    known = habits.apart(pairs)
    settled = known is not None
    if known is None and teach is not None:
        known = habits.taught(pairs, teach)
    if known is None:
        first_order = order.copy()
        found = _grow(first_order, bounds, launch.copy(), calls, (*classes, apart), readers)
        balance = _balance(launch, calls, joinable, column_offsets, found[0], first_order, found[-1])
        known = habits.learn(pairs, balance[producers, columns].tolist())
    apart[producers, columns] = known
    found = _grow(order, bounds, launch.copy(), calls, (*classes, apart), readers)
    group, follows, place, times, member, role, starts = found
    if (follows < 0).all():
        return None
    by_start = np.argsort(starts, kind="stable")
    number = np.append(np.empty_like(by_start), -1)             # what comes after the last stays -1
    number[by_start] = np.arange(len(by_start))
    num_joined = num_launches - int((group == np.arange(len(group))).sum())
    return Groups(number[group[by_start]], number[follows[by_start]], place[by_start], times[by_start], member, role,
                  order, np.append(starts[by_start], len(order)), num_joined, settled)


@compiled
def _by_launch(launch, num_launches):  # type: ignore[no-untyped-def]
    """The calls by launch, in each as recorded, and where those of each launch begin."""
    bounds = np.zeros(num_launches + 1, np.int64)
    for k in launch:
        if k >= 0:
            bounds[k + 1] += 1
    bounds = np.cumsum(bounds)
    order, at = np.empty(bounds[-1], np.int64), bounds.copy()
    for i in range(len(launch)):
        if launch[i] >= 0:
            order[at[launch[i]]] = i
            at[launch[i]] += 1
    return order, bounds


@compiled
def _reads(launch, calls, joinable, column_offsets):  # type: ignore[no-untyped-def]
    """Of each class and each column: whether some call that may join others reads the class there."""
    call_class, _, operand_offsets, source, _, _ = calls
    reads = np.zeros((len(column_offsets) - 1, column_offsets[-1]), np.bool_)
    for i in range(len(launch)):
        if launch[i] >= 0 and joinable[call_class[i]]:
            column = column_offsets[call_class[i]] - operand_offsets[i]
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if source[j] >= 0:
                    reads[call_class[source[j]], column + j] = True
    return reads


@compiled
def _readers(operand_offsets, source):  # type: ignore[no-untyped-def]
    """The calls that read each call, once for every operand."""
    offsets = np.zeros(len(operand_offsets), np.int64)
    for producer in source:
        if producer >= 0:
            offsets[producer + 1] += 1
    offsets = np.cumsum(offsets)
    readers, at = np.empty(offsets[-1], np.int64), offsets.copy()
    for i in range(len(operand_offsets) - 1):
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0:
                readers[at[source[j]]] = i
                at[source[j]] += 1
    return offsets, readers


@compiled
def _balance(launch, calls, joinable, column_offsets, group, order, starts):  # type: ignore[no-untyped-def]
    """Of each class and each column: how many calls that read the class there are in a group with it, less those not.
    """
    call_class, _, operand_offsets, source, _, _ = calls
    group_of = np.full(len(launch), -1, np.int64)
    by_start = np.argsort(starts, kind="mergesort")
    for k in range(len(by_start)):
        stop = starts[by_start[k + 1]] if k + 1 < len(by_start) else len(order)
        group_of[order[starts[by_start[k]]:stop]] = group[by_start[k]]
    balance = np.zeros((len(column_offsets) - 1, column_offsets[-1]), np.int64)
    for i in range(len(launch)):
        if launch[i] < 0 or not joinable[call_class[i]]:
            continue
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0:
                together = group_of[i] == group_of[source[j]]
                column = column_offsets[call_class[i]] + j - operand_offsets[i]
                balance[call_class[source[j]], column] += 1 if together else -1
    return balance


# ---- growing groups ------------------------------------------------------------------------------------------------
@compiled
def _grow(order, bounds, launch, calls, classes, readers):  # type: ignore[no-untyped-def]
    """`order` and `launch` are written: launches that are split get new numbers behind all others."""
    call_class, call_width, _, _, _, _ = calls
    joinable, _, heavy, ragged, _, _, _ = classes
    num_launches, num_calls = len(bounds) - 1, len(call_class)
    most = num_launches + len(order)
    starts, stops = np.zeros(most, np.int64), np.zeros(most, np.int64)
    starts[:num_launches], stops[:num_launches] = bounds[:-1], bounds[1:]
    group, place = np.arange(most), np.arange(most)
    follows, last = np.full(most, -1, np.int64), np.arange(most)
    times, parts = np.ones(most, np.int64), np.ones(most, np.int64)
    by_rows, widest = np.zeros(most, np.bool_), np.ones(most, np.int64)
    member, role = np.zeros(num_calls, np.int64), np.zeros(num_calls, np.int64)
    state = (group, follows, place, starts, stops, times, launch, order, member, role)
    seen, partner = np.zeros(len(joinable), np.int64), np.zeros(num_calls, np.int64)
    counts, tried = np.zeros(num_calls, np.int64), np.full(most, -1, np.int64)
    candidates, chosen = np.empty(MOST_ROLES + 1, np.int64), np.empty(num_calls, np.int64)
    count = num_launches
    for k in range(num_launches):
        c = call_class[order[starts[k]]]
        by_rows[k] = ragged[c]
        for i in order[starts[k]:stops[k]]:
            widest[k] = max(widest[k], call_width[i])
        at, trials = starts[k], 0
        while joinable[c] and at < stops[k] and trials < MOST_TRIALS:
            joined = False
            for g in candidates[:groups_read(order[at], state, joinable, calls, candidates)]:
                if tried[g] == k:
                    continue
                tried[g] = k
                trials += 1
                found, roles, rows = take_roles(g, k, state, calls, classes, counts, chosen)
                if found == 0 or parts[g] + roles > MOST_PARTS:
                    continue
                if heavy[c] and (found < stops[k] - starts[k] or not is_read_only_by(k, g, state, readers)):
                    continue
                rows = rows and by_rows[g] and ragged[c]
                if not rows and max(widest[g], widest[k]) > 1:
                    continue
                if not classes_fit(g, k, state, call_class, classes, seen):
                    continue
                where = place_of(g, chosen[:found], place[k], k, state, calls, readers)
                if where < 0:
                    continue
                new = k
                if found < stops[k] - starts[k]:            # the others stay where they are
                    new, count = count, count + 1
                    split_off(k, new, chosen[:found], state, partner)
                times[new] = parts[new] = roles
                enter(g, new, chosen[:found], state)
                follows[last[g]], last[g] = new, new
                parts[g] += roles
                place[g], by_rows[g], widest[g] = where, rows, max(widest[g], widest[k])
                joined = True
                # Other groups that it reads may be of the same members: then all are one.
                for other in candidates[:groups_read(order[starts[new]], state, joinable, calls, candidates)]:
                    mine = group[new]
                    if other == mine or parts[other] + parts[mine] > MOST_PARTS:
                        continue
                    fits, rows = take_partners(other, mine, state, calls, classes, partner, counts)
                    rows = rows and by_rows[other] and by_rows[mine]
                    if not fits or (not rows and max(widest[other], widest[mine]) > 1) or \
                            not classes_fit(other, mine, state, call_class, classes, seen):
                        continue
                    found = calls_of(mine, state, chosen)
                    where = place_of(other, chosen[:found], place[mine], mine, state, calls, readers)
                    if where < 0:
                        continue
                    rename(other, mine, partner, counts, state)
                    follows[last[other]], last[other] = mine, last[mine]
                    parts[other] += parts[mine]
                    place[other], by_rows[other] = where, rows
                    widest[other] = max(widest[other], widest[mine])
                break
            if not joined:
                at += 1
            elif group[k] != k:
                break
            else:
                at = starts[k]
        if group[k] == k:
            times[k] = parts[k] = fold(k, joinable[c] and not heavy[c], state, calls, counts, partner)
    for k in range(count):
        if group[k] == k and follows[k] < 0:        # alone: in recorded order, as it was
            times[k] = 1
            order[starts[k]:stops[k]].sort()
    return group[:count], follows[:count], place[:count], times[:count], member, role, starts[:count]
