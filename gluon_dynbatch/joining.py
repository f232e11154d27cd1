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
joins what it reads only if most of its class, reading the same class there, did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cavs_core import offsets_of

from .analyzer import Recording, Scan

__all__ = ["Groups", "find_groups"]

MOST_PARTS = 64         # calls of a member
MOST_ROLES = 8          # of them, in one launch
MOST_REPEATS = 4        # launches of one class
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
    source, output : int64 arrays, shape (operands,)
        The call that makes the operand (-1: an outside array), and which output of it; of what it is part of, where
        calls only name rows.
    num_joined : launches of before that are now part of others
    """

    of_launch: Any
    follows: Any
    place: Any
    times: Any
    member: Any
    role: Any
    order: Any
    offsets: Any
    source: Any
    output: Any
    num_joined: int


def find_groups(r: Recording, s: Scan, launch: Any, joinable: Any, heavy: Any) -> Groups | None:
    """The groups of a plan; None if every launch stays alone.

    Parameters
    ----------
    r, s : what was recorded
    launch : int64 array, shape (calls,)
        The launch of each call; -1 for those that only name rows.
    joinable, heavy : bool arrays, shape (classes,)
        Whether launches of the class may join others, and whether it is a product with a weight.
    """
    aliases = r.per_class(lambda c: c.alias >= 0, bool)
    joinable = joinable & ~aliases & (r.per_class(lambda c: c.slots) == 0)
    if not len(launch) or not joinable[r.call_class].any():
        return None
    if len(r.classes) * int(s.column_offsets[-1]) > MOST_PAIRS:
        return None
    num_launches = int(launch.max()) + 1
    order = np.argsort(launch, kind="stable")[int((launch < 0).sum()):]
    bounds = offsets_of(np.bincount(launch[order], minlength=num_launches))
    source, through, output = _sources(s.operand_offsets, r.operands, s.maker, s.value_offsets, aliases[r.call_class])
    split = np.array([part for c in r.classes for part in c.split], bool)
    calls = (r.call_class, r.call_width, s.operand_offsets, source, through, output)
    classes = (joinable, r.per_class(lambda c: c.recorded, bool), heavy, r.per_class(lambda c: any(c.split), bool),
               s.column_offsets, split)
    readers, first_order = _readers(s.operand_offsets, source), order.copy()
    apart = np.zeros((len(r.classes), len(split)), bool)
    found = _grow(order, bounds, launch.copy(), calls, (*classes, apart), readers)
    if (found[1] >= 0).any():
        apart = _mostly_apart(launch, calls, joinable, s.column_offsets, found[0], order, found[-1])
        order = first_order
        found = _grow(order, bounds, launch.copy(), calls, (*classes, apart), readers)
    group, follows, place, times, member, role, starts = found
    if (follows < 0).all():
        return None
    by_start = np.argsort(starts, kind="stable")
    number = np.append(np.empty_like(by_start), -1)             # what comes after the last stays -1
    number[by_start] = np.arange(len(by_start))
    num_joined = num_launches - int((group == np.arange(len(group))).sum())
    return Groups(number[group[by_start]], number[follows[by_start]], place[by_start], times[by_start], member, role,
                  order, np.append(starts[by_start], len(order)), source, output, num_joined)


@njit(cache=True, nogil=True)
def _sources(operand_offsets, operands, maker, value_offsets, aliases):  # type: ignore[no-untyped-def]
    """Of each operand: the call that makes it, whether others name part of that in between, and which output it is."""
    num_calls = len(aliases)
    runs, made = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    source, output = np.full(len(operands), -1, np.int64), np.zeros(len(operands), np.int64)
    through = np.zeros(len(operands), np.bool_)
    for i in range(num_calls):
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if operands[j] >= 0:
                producer = maker[operands[j]]
                through[j] = aliases[producer]
                source[j] = runs[producer] if aliases[producer] else producer
                output[j] = made[producer] if aliases[producer] else operands[j] - value_offsets[producer]
        if aliases[i]:
            runs[i], made[i] = source[operand_offsets[i]], output[operand_offsets[i]]
    return source, through, output


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _mostly_apart(launch, calls, joinable, column_offsets, group, order, starts):  # type: ignore[no-untyped-def]
    """Of each class and each column: whether calls that read the class there are mostly not in a group with it."""
    call_class, _, operand_offsets, source, _, _ = calls
    group_of = np.full(len(launch), -1, np.int64)
    by_start = np.argsort(starts, kind="mergesort")
    for k in range(len(by_start)):
        stop = starts[by_start[k + 1]] if k + 1 < len(by_start) else len(order)
        group_of[order[starts[by_start[k]]:stop]] = group[by_start[k]]
    balance = np.zeros((len(column_offsets) - 1, column_offsets[-1]), np.int32)
    for i in range(len(launch)):
        if launch[i] < 0 or not joinable[call_class[i]]:
            continue
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0:
                together = group_of[i] == group_of[source[j]]
                column = column_offsets[call_class[i]] + j - operand_offsets[i]
                balance[call_class[source[j]], column] += 1 if together else -1
    return balance < 0


# ---- growing groups ------------------------------------------------------------------------------------------------
# The launches of a group are a linked list: it begins with its name, follows[launch] is the next, -1 the end.
# Invariant: the calls of launch k are order[starts[k]:stops[k]], by member, then by role; and place[group of a
# producer] < place[group of its reader], so that what is in one place may run in any order.

@njit(cache=True, nogil=True)
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
            for g in candidates[:_groups_read(order[at], state, joinable, calls, candidates)]:
                if tried[g] == k:
                    continue
                tried[g] = k
                trials += 1
                found, roles, rows = _take_roles(g, k, state, calls, classes, counts, chosen)
                if found == 0 or parts[g] + roles > MOST_PARTS:
                    continue
                if heavy[c] and (found < stops[k] - starts[k] or not _is_read_only_by(k, g, state, readers)):
                    continue
                rows = rows and by_rows[g] and ragged[c]
                if not rows and max(widest[g], widest[k]) > 1:
                    continue
                if not _classes_fit(g, k, state, call_class, classes, seen):
                    continue
                where = _place_of(g, chosen[:found], place[k], k, state, calls, readers)
                if where < 0:
                    continue
                new = k
                if found < stops[k] - starts[k]:            # the others stay where they are
                    new, count = count, count + 1
                    _split_off(k, new, chosen[:found], state, partner)
                times[new] = parts[new] = roles
                _enter(g, new, chosen[:found], state)
                follows[last[g]], last[g] = new, new
                parts[g] += roles
                place[g], by_rows[g], widest[g] = where, rows, max(widest[g], widest[k])
                joined = True
                # Other groups that it reads may be of the same members: then all are one.
                for other in candidates[:_groups_read(order[starts[new]], state, joinable, calls, candidates)]:
                    mine = group[new]
                    if other == mine or parts[other] + parts[mine] > MOST_PARTS:
                        continue
                    fits, rows = _take_partners(other, mine, state, calls, classes, partner, counts)
                    rows = rows and by_rows[other] and by_rows[mine]
                    if not fits or (not rows and max(widest[other], widest[mine]) > 1) or \
                            not _classes_fit(other, mine, state, call_class, classes, seen):
                        continue
                    found = _calls_of(mine, state, chosen)
                    where = _place_of(other, chosen[:found], place[mine], mine, state, calls, readers)
                    if where < 0:
                        continue
                    _rename(other, mine, partner, counts, state)
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
            times[k] = parts[k] = _fold(k, joinable[c] and not heavy[c], state, calls, counts, partner)
    for k in range(count):
        if group[k] == k and follows[k] < 0:        # alone: in recorded order, as it was
            times[k] = 1
            order[starts[k]:stops[k]].sort()
    return group[:count], follows[:count], place[:count], times[:count], member, role, starts[:count]


@njit(cache=True, nogil=True)
def _groups_read(call, state, joinable, calls, candidates):  # type: ignore[no-untyped-def]
    """The groups that a call reads: those that run last come first, because nothing lies between them and the call."""
    call_class, _, operand_offsets, source, _, _ = calls
    group, _, place, starts, _, _, launch, order, _, _ = state
    found = 0
    for j in range(operand_offsets[call], operand_offsets[call + 1]):
        if source[j] < 0 or found == MOST_ROLES:
            continue
        g = group[launch[source[j]]]
        known = not joinable[call_class[order[starts[g]]]]
        for other in candidates[:found]:
            known = known or other == g
        if known:
            continue
        at = found
        while at > 0 and place[candidates[at - 1]] < place[g]:
            candidates[at] = candidates[at - 1]
            at -= 1
        candidates[at] = g
        found += 1
    return found


@njit(cache=True, nogil=True)
def _classes_fit(g, new, state, call_class, classes, seen):  # type: ignore[no-untyped-def]
    """Whether two groups may be one by what they consist of: no product twice, nothing very often, no second round."""
    _, recorded, heavy, _, _, _, _ = classes
    _, follows, _, starts, _, _, _, order, _, _ = state
    begins, has_product, fits = call_class[order[starts[g]]], False, True
    at = g
    while at >= 0:
        c = call_class[order[starts[at]]]
        seen[c] += 1
        has_product |= heavy[c]
        at = follows[at]
    at = new
    while at >= 0:
        c = call_class[order[starts[at]]]
        seen[c] += 1
        again = (heavy[c] and seen[c] > 1) or seen[c] > MOST_REPEATS or (c == begins and not has_product)
        fits = fits and not again and recorded[c] == recorded[begins]
        at = follows[at]
    for at in (g, new):
        while at >= 0:
            seen[call_class[order[starts[at]]]] = 0
            at = follows[at]
    return fits


@njit(cache=True, nogil=True)
def _is_read_only_by(k, g, state, readers):  # type: ignore[no-untyped-def]
    """Whether nobody but a launch reads a group."""
    _, follows, _, starts, stops, _, launch, order, _, _ = state
    group = state[0]
    reader_offsets, reader = readers
    at = g
    while at >= 0:
        for i in order[starts[at]:stops[at]]:
            for j in range(reader_offsets[i], reader_offsets[i + 1]):
                other = launch[reader[j]]
                if other != k and (other < 0 or group[other] != g):
                    return False
        at = follows[at]
    return True


@njit(cache=True, nogil=True)
def _place_of(g, newcomers, place_new, mine, state, calls, readers):  # type: ignore[no-untyped-def]
    """Where a group and newcomers (calls of the group `mine`) could run as one; -1: nowhere.

    In the place of the newcomers: if all other readers of the group run later. In the place of the group: if all else
    that the newcomers read runs earlier.
    """
    _, _, operand_offsets, source, _, _ = calls
    group, follows, place, starts, stops, _, launch, order, _, _ = state
    reader_offsets, reader = readers
    late, at = True, g
    while at >= 0 and late:
        for i in order[starts[at]:stops[at]]:
            for j in range(reader_offsets[i], reader_offsets[i + 1]):
                other = launch[reader[j]]
                if other >= 0:                  # who only names rows runs nowhere
                    other = group[other]
                    late = late and (other == g or other == mine or place[other] > place_new)
        at = follows[at]
    if late:
        return place_new
    for i in newcomers:
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0:
                other = group[launch[source[j]]]
                if other != g and other != mine and place[other] >= place[g]:
                    return -1
    return place[g]


@njit(cache=True, nogil=True)
def _take_roles(g, k, state, calls, classes, counts, chosen):  # type: ignore[no-untyped-def]
    """Find the calls of a launch that read a group, and give each its member and its role there.

    Returns how many there are (0 if they do not fit), how many a member has, and whether all read by rows.
    """
    call_class, call_width, operand_offsets, source, through, _ = calls
    group, _, _, starts, stops, times, launch, order, member, role = state
    _, _, _, _, column_offsets, split, apart = classes
    size = (stops[g] - starts[g]) // times[g]
    if stops[k] - starts[k] < size:
        return 0, 0, False
    counts[:size] = 0
    rows, found = True, 0
    for i in order[starts[k]:stops[k]]:
        m, column = -1, column_offsets[call_class[i]] - operand_offsets[i]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0 and group[launch[source[j]]] == g:
                if through[j] or apart[call_class[source[j]], column + j] or (m >= 0 and member[source[j]] != m):
                    return 0, 0, False
                m = member[source[j]]
                rows = rows and split[column + j]
        if m < 0:
            continue
        if counts[m] == MOST_ROLES or call_width[i] != call_width[order[starts[g] + m * times[g]]]:
            return 0, 0, False
        member[i], role[i] = m, counts[m]
        counts[m] += 1
        chosen[found] = i
        found += 1
    roles = found // size
    for m in range(size):
        if counts[m] != roles:
            return 0, 0, False
    first = np.empty(MOST_ROLES, np.int64)
    for i in chosen[:found]:
        if member[i] == 0:
            first[role[i]] = i
    for i in chosen[:found]:
        if not _reads_alike(i, first[role[i]], g, state, calls):
            return 0, 0, False
    return found, roles, rows


@njit(cache=True, nogil=True)
def _take_partners(g, new, state, calls, classes, partner, counts):  # type: ignore[no-untyped-def]
    """Find for each member of a group the member of another that it reads; whether all fit, and all by rows."""
    call_class, call_width, operand_offsets, source, through, _ = calls
    group, follows, _, starts, stops, times, launch, order, member, role = state
    _, _, _, _, column_offsets, split, apart = classes
    size = (stops[g] - starts[g]) // times[g]
    if size != (stops[new] - starts[new]) // times[new]:
        return False, False
    partner[:size], counts[:size] = -1, 0
    rows, at, met = True, new, 0
    while at >= 0:
        for i in order[starts[at]:stops[at]]:
            m, column = member[i], column_offsets[call_class[i]] - operand_offsets[i]
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if source[j] >= 0 and group[launch[source[j]]] == g:
                    other = member[source[j]]
                    if through[j] or apart[call_class[source[j]], column + j] or (
                            partner[m] >= 0 and partner[m] != other):
                        return False, False
                    if partner[m] < 0:
                        if counts[other] > 0 or call_width[i] != call_width[source[j]]:
                            return False, False
                        partner[m], counts[other] = other, 1
                        met += 1
                    rows = rows and split[column + j]
            if not _reads_alike(i, order[starts[at] + role[i]], g, state, calls):
                return False, False
        at = follows[at]
    return met == size, rows


@njit(cache=True, nogil=True)
def _reads_alike(i, other, g, state, calls):  # type: ignore[no-untyped-def]
    """Whether two calls of a class read the same values of their members of a group."""
    _, _, operand_offsets, source, _, output = calls
    group, _, _, _, _, _, launch, _, _, role = state
    for k in range(operand_offsets[i + 1] - operand_offsets[i]):
        a, b = operand_offsets[i] + k, operand_offsets[other] + k
        inside = source[a] >= 0 and group[launch[source[a]]] == g
        if inside != (source[b] >= 0 and group[launch[source[b]]] == g):
            return False
        if inside and (launch[source[a]] != launch[source[b]] or role[source[a]] != role[source[b]]
                       or output[a] != output[b]):
            return False
    return True


@njit(cache=True, nogil=True)
def _split_off(k, new, chosen, state, scratch):  # type: ignore[no-untyped-def]
    """Make some calls of a launch, in its order, a launch of their own."""
    _, _, place, starts, stops, _, launch, order, _, _ = state
    launch[chosen] = new
    end = starts[k]
    rest = 0
    for i in order[starts[k]:stops[k]]:
        if launch[i] != new:
            scratch[rest] = i
            rest += 1
    order[end:end + len(chosen)] = chosen
    order[end + len(chosen):stops[k]] = scratch[:rest]
    place[new], starts[new], stops[new] = place[k], starts[k], starts[k] + len(chosen)
    starts[k] += len(chosen)


@njit(cache=True, nogil=True)
def _enter(g, new, chosen, state):  # type: ignore[no-untyped-def]
    """The calls of a launch, which have members and roles by now, become part of a group."""
    group, _, _, starts, _, times, _, order, member, role = state
    group[new] = g
    for i in chosen:
        order[starts[new] + member[i] * times[new] + role[i]] = i


@njit(cache=True, nogil=True)
def _rename(g, new, partner, scratch, state):  # type: ignore[no-untyped-def]
    """A group becomes part of another, whose members its own become."""
    group, follows, _, starts, stops, times, _, order, member, role = state
    at = new
    while at >= 0:
        group[at] = g
        count = stops[at] - starts[at]
        scratch[:count] = order[starts[at]:stops[at]]
        for i in scratch[:count]:
            member[i] = partner[member[i]]
            order[starts[at] + member[i] * times[at] + role[i]] = i
        at = follows[at]


@njit(cache=True, nogil=True)
def _calls_of(g, state, found):  # type: ignore[no-untyped-def]
    _, follows, _, starts, stops, _, _, order, _, _ = state
    count, at = 0, g
    while at >= 0:
        found[count:count + stops[at] - starts[at]] = order[starts[at]:stops[at]]
        count += stops[at] - starts[at]
        at = follows[at]
    return count


@njit(cache=True, nogil=True)
def _fold(k, foldable, state, calls, counts, number):  # type: ignore[no-untyped-def]
    """Give the calls of a new group their members: those that read results of one call are one; how many each has."""
    _, call_width, operand_offsets, source, through, _ = calls
    _, _, _, starts, stops, _, _, order, member, role = state
    mine = order[starts[k]:stops[k]].copy()
    for m in range(len(mine)):
        member[mine[m]], role[mine[m]] = m, 0
    if not foldable:
        return 1
    for i in mine:
        j = operand_offsets[i]
        if j == operand_offsets[i + 1] or source[j] < 0 or through[j]:
            return 1
        number[source[j]] = -1
    size = 0
    for i in mine:
        key = source[operand_offsets[i]]
        if number[key] < 0:
            number[key], counts[size] = size, 0
            size += 1
        counts[number[key]] += 1
    roles = len(mine) // size
    if roles == 1 or roles > MOST_ROLES:
        return 1
    for m in range(size):
        if counts[m] != roles:
            return 1
    counts[:size] = 0
    for i in mine:
        m = number[source[operand_offsets[i]]]
        member[i], role[i] = m, counts[m]
        order[starts[k] + m * roles + counts[m]] = i
        counts[m] += 1
    for m in range(0, len(mine), roles):
        for i in order[starts[k] + m:starts[k] + m + roles]:
            if call_width[i] != call_width[order[starts[k] + m]]:
                order[starts[k]:stops[k]] = mine
                for n in range(len(mine)):
                    member[mine[n]], role[mine[n]] = n, 0
                return 1
    return roles
