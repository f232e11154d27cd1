"""Launches that run as one. Pure: arrays in, arrays out; no device, no MXNet.

Operators that are recorded one by one have launches one by one, but what a sample does to its value it does without
asking others: the i-th call of a launch reads what the i-th call of another has made. Such launches are a *group*, and
their calls for one sample are a *member* of it, which can run as one call of one program.

A group begins as one launch, each of its calls a member. Launches are taken in the order of the run. One joins the group
that it reads if every call of it reads one member and no other, and does to it what the others do to theirs; a member
may have several calls of it (three gates are three sigmoids). The call's number among them is its *role*.

All launches of a group run in one place, where the first of them ran or where the last did: in the first place, if what
the newcomer reads elsewhere is made before; in the last, if nobody else reads the group before.

A recurrent net would become one long program, another one for each length. So a group has a product with one weight
once, what has no product ends where what it began with comes again, and no class is there more than a few times.
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


class Groups(NamedTuple):
    """Which launches run as one.

    Attributes
    ----------
    of_launch : int64 array, shape (launches,)
        The group of each launch, named by one of its launches.
    follows : int64 array, shape (launches,)
        The next launch of the group, in an order in which they can run; -1 behind the last. It begins with the name.
    place : int64 array, shape (launches,)
        Of each group: where it runs, among the launches.
    times : int64 array, shape (launches,)
        How many roles the launch has.
    first : int64 array, shape (launches, MOST_ROLES)
        A call of each role.
    member, role : int64 arrays, shape (calls,)
    order, offsets : the calls of launch k are order[offsets[k]:offsets[k + 1]], in recorded order
    source, output : int64 arrays, shape (operands,)
        The call that makes the operand (-1: an outside array), and which output of it; of what it is part of, where
        calls only name rows.
    """

    of_launch: Any
    follows: Any
    place: Any
    times: Any
    first: Any
    member: Any
    role: Any
    order: Any
    offsets: Any
    source: Any
    output: Any

    @property
    def num_joined(self) -> int:
        """Launches that are now part of others."""
        return int((self.of_launch != np.arange(len(self.of_launch))).sum())


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
    num_launches = int(launch.max()) + 1
    order = np.argsort(launch, kind="stable")[int((launch < 0).sum()):]
    offsets = offsets_of(np.bincount(launch[order], minlength=num_launches))
    source, through, output = _sources(s.operand_offsets, r.operands, s.maker, s.value_offsets, aliases[r.call_class])
    split = np.array([part for c in r.classes for part in c.split], bool)
    calls = (launch, r.call_class, r.call_width, s.operand_offsets, source, through, output)
    classes = (joinable, r.per_class(lambda c: c.recorded, bool), heavy, r.per_class(lambda c: any(c.split), bool),
               s.column_offsets, split)
    edges = _launch_edges(launch, order, offsets, s.operand_offsets, source)
    found = _grow(order, offsets, calls, classes, edges)
    groups = Groups(*found, order, offsets, source, output)
    return groups if groups.num_joined else None


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
def _launch_edges(launch, order, offsets, operand_offsets, source):  # type: ignore[no-untyped-def]
    """The launches that each launch reads, and those that read it, each once."""
    num_launches = len(offsets) - 1
    indptr, counts = np.zeros(num_launches + 1, np.int64), np.zeros(num_launches + 1, np.int64)
    producers, seen = np.empty(len(source), np.int64), np.full(num_launches, -1, np.int64)
    end = 0
    for k in range(num_launches):
        for i in order[offsets[k]:offsets[k + 1]]:
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if source[j] >= 0 and seen[launch[source[j]]] != k:
                    producers[end] = launch[source[j]]
                    seen[producers[end]] = k
                    counts[producers[end] + 1] += 1
                    end += 1
        indptr[k + 1] = end
    reader_indptr = np.cumsum(counts)
    readers, at = np.empty(end, np.int64), reader_indptr.copy()
    for k in range(num_launches):
        for j in range(indptr[k], indptr[k + 1]):
            readers[at[producers[j]]] = k
            at[producers[j]] += 1
    return indptr, producers[:end], reader_indptr, readers


# ---- growing groups ------------------------------------------------------------------------------------------------
# The launches of a group are a linked list: it begins with its name, follows[launch] is the next, -1 the end.

@njit(cache=True, nogil=True)
def _grow(order, offsets, calls, classes, edges):  # type: ignore[no-untyped-def]
    launch, call_class, call_width, operand_offsets, source, _, _ = calls
    joinable, _, _, ragged, _, _ = classes
    num_launches, num_calls = len(offsets) - 1, len(launch)
    group, place = np.arange(num_launches), np.arange(num_launches)
    follows, last = np.full(num_launches, -1, np.int64), np.arange(num_launches)
    size, parts = offsets[1:] - offsets[:-1], np.ones(num_launches, np.int64)
    by_rows, widest = np.zeros(num_launches, np.bool_), np.ones(num_launches, np.int64)
    times, first = np.ones(num_launches, np.int64), np.full((num_launches, MOST_ROLES), -1, np.int64)
    member, role = np.zeros(num_calls, np.int64), np.zeros(num_calls, np.int64)
    state = (group, follows, place, times, first, member, role)
    seen, partner = np.zeros(len(joinable), np.int64), np.zeros(num_calls, np.int64)
    counts, candidates = np.zeros(num_calls, np.int64), np.empty(MOST_ROLES + 1, np.int64)
    for k in range(num_launches):
        mine = order[offsets[k]:offsets[k + 1]]
        c = call_class[mine[0]]
        first[k, 0], by_rows[k] = mine[0], ragged[c]
        for m in range(len(mine)):
            member[mine[m]] = m
            widest[k] = max(widest[k], call_width[mine[m]])
        if not joinable[c]:
            continue
        for g in candidates[:_groups_read(mine[0], state, joinable, calls, candidates)]:
            new = group[k]                  # not k, if it has joined a group by now: then all of that may join another
            roles = size[k] // size[g] if new == k else 1
            if g == new or roles * size[g] != size[new] or roles > MOST_ROLES or \
                    parts[g] + roles * parts[new] > MOST_PARTS:
                continue
            if not _classes_fit(g, new, follows, first, call_class, classes, seen):
                continue
            where = _place_of(g, new, group, follows, place, edges)
            if where < 0:
                continue
            if new == k:
                fits, rows = _take_roles(g, k, roles, size[g], state, order, offsets, calls, classes, counts)
            else:
                fits, rows = _take_partners(g, new, size[g], state, order, offsets, calls, classes, partner, counts)
            rows = rows and by_rows[g] and by_rows[new]
            if not fits or (not rows and max(widest[g], widest[new]) > 1):
                if new == k:                # as it was
                    for m in range(len(mine)):
                        member[mine[m]], role[mine[m]] = m, 0
                    first[k, 0] = mine[0]
                continue
            at = new
            while at >= 0:
                group[at] = g
                if new != k:
                    for i in order[offsets[at]:offsets[at + 1]]:
                        member[i] = partner[member[i]]
                at = follows[at]
            if new == k:
                times[k] = roles
            parts[g] += roles * parts[new]
            follows[last[g]], last[g] = new, last[new]
            place[g], by_rows[g], widest[g] = where, rows, max(widest[g], widest[new])
    return state


@njit(cache=True, nogil=True)
def _groups_read(call, state, joinable, calls, candidates):  # type: ignore[no-untyped-def]
    """The groups that a call reads: those that run last come first, because nothing lies between them and the call."""
    launch, call_class, _, operand_offsets, source, _, _ = calls
    group, _, place, _, first, _, _ = state
    found = 0
    for j in range(operand_offsets[call], operand_offsets[call + 1]):
        if source[j] < 0 or found == MOST_ROLES:
            continue
        g = group[launch[source[j]]]
        at = found
        while at > 0 and place[candidates[at - 1]] < place[g]:
            at -= 1
        if joinable[call_class[first[g, 0]]] and (at == 0 or candidates[at - 1] != g):
            candidates[at + 1:found + 1] = candidates[at:found].copy()
            candidates[at] = g
            found += 1
    return found


@njit(cache=True, nogil=True)
def _classes_fit(g, new, follows, first, call_class, classes, seen):  # type: ignore[no-untyped-def]
    """Whether two groups may be one by what they consist of: no product twice, nothing very often, no second round."""
    _, recorded, heavy, _, _, _ = classes
    begins, has_product, fits = call_class[first[g, 0]], False, True
    at = g
    while at >= 0:
        c = call_class[first[at, 0]]
        seen[c] += 1
        has_product |= heavy[c]
        at = follows[at]
    at = new
    while at >= 0:
        c = call_class[first[at, 0]]
        seen[c] += 1
        again = (heavy[c] and seen[c] > 1) or seen[c] > MOST_REPEATS or (c == begins and not has_product)
        fits = fits and not again and recorded[c] == recorded[begins]
        at = follows[at]
    for at in (g, new):
        while at >= 0:
            seen[call_class[first[at, 0]]] = 0
            at = follows[at]
    return fits


@njit(cache=True, nogil=True)
def _place_of(g, new, group, follows, place, edges):  # type: ignore[no-untyped-def]
    """Where two groups could run as one; -1: nowhere.

    Everybody runs behind what he reads, before and after. In the place of the newcomer: if all other readers of the
    group run later. In the place of the group: if all else that the newcomer reads runs earlier.
    """
    indptr, producers, reader_indptr, readers = edges
    late, at = True, g
    while at >= 0 and late:
        for j in range(reader_indptr[at], reader_indptr[at + 1]):
            reader = group[readers[j]]
            if reader != g and reader != new and place[reader] < place[new]:
                late = False
                break
        at = follows[at]
    if late:
        return place[new]
    at = new
    while at >= 0:
        for j in range(indptr[at], indptr[at + 1]):
            producer = group[producers[j]]
            if producer != g and producer != new and place[producer] > place[g]:
                return -1
        at = follows[at]
    return place[g]


@njit(cache=True, nogil=True)
def _take_roles(g, k, roles, size, state, order, offsets, calls, classes, counts):  # type: ignore[no-untyped-def]
    """Give each call of a launch its member of a group and its role there; whether all fit, and all by rows."""
    launch, call_class, call_width, operand_offsets, source, through, _ = calls
    group, _, _, _, first, member, role = state
    _, _, _, _, column_offsets, split = classes
    counts[:size] = 0
    rows = True
    for i in order[offsets[k]:offsets[k + 1]]:
        m, column = -1, column_offsets[call_class[i]] - operand_offsets[i]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if source[j] >= 0 and group[launch[source[j]]] == g:
                if through[j] or (m >= 0 and member[source[j]] != m):
                    return False, False
                m = member[source[j]]
                rows = rows and split[column + j]
        if m < 0 or counts[m] == roles or call_width[i] != call_width[order[offsets[g] + m]]:
            return False, False
        member[i], role[i] = m, counts[m]
        counts[m] += 1
    for i in order[offsets[k]:offsets[k + 1]]:
        if member[i] == 0:
            first[k, role[i]] = i
    for i in order[offsets[k]:offsets[k + 1]]:
        if not _reads_alike(i, first[k, role[i]], g, state, calls):
            return False, False
    return True, rows


@njit(cache=True, nogil=True)
def _take_partners(g, new, size, state, order, offsets, calls, classes, partner, counts):  # type: ignore[no-untyped-def]
    """Find for each member of a group the member of another that it reads; whether all fit, and all by rows."""
    launch, call_class, call_width, operand_offsets, source, through, _ = calls
    group, follows, _, _, first, member, role = state
    _, _, _, _, column_offsets, split = classes
    partner[:size], counts[:size] = -1, 0
    rows, at, met = True, new, 0
    while at >= 0:
        for i in order[offsets[at]:offsets[at + 1]]:
            m, column = member[i], column_offsets[call_class[i]] - operand_offsets[i]
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                if source[j] >= 0 and group[launch[source[j]]] == g:
                    other = member[source[j]]
                    if through[j] or (partner[m] >= 0 and partner[m] != other):
                        return False, False
                    if partner[m] < 0:
                        if counts[other] > 0 or call_width[i] != call_width[source[j]]:
                            return False, False
                        partner[m], counts[other] = other, 1
                        met += 1
                    rows = rows and split[column + j]
            if not _reads_alike(i, first[at, role[i]], g, state, calls):
                return False, False
        at = follows[at]
    return met == size, rows


@njit(cache=True, nogil=True)
def _reads_alike(i, other, g, state, calls):  # type: ignore[no-untyped-def]
    """Whether two calls of a class read the same values of their members of a group."""
    launch, _, _, operand_offsets, source, _, output = calls
    group, _, _, _, _, _, role = state
    for k in range(operand_offsets[i + 1] - operand_offsets[i]):
        a, b = operand_offsets[i] + k, operand_offsets[other] + k
        inside = source[a] >= 0 and group[launch[source[a]]] == g
        if inside != (source[b] >= 0 and group[launch[source[b]]] == g):
            return False
        if inside and (launch[source[a]] != launch[source[b]] or role[source[a]] != role[source[b]]
                       or output[a] != output[b]):
            return False
    return True
