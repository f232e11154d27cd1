"""Who joins whom: the steps in which `joining` finds groups. Pure: arrays in, arrays out; no device, no MXNet.

`state` is (group, follows, place, starts, stops, times, launch, order, member, role). The launches of a group are a
linked list: it begins with its name, follows[launch] is the next, -1 the end. Invariants: the calls of launch k are
order[starts[k]:stops[k]], by member, then by role; and place[group of a call] < place[group of its reader], so that
what is in one place may run in any order.
"""

from __future__ import annotations

import numpy as np

from cavs_core import compiled

__all__ = ["MOST_REPEATS", "MOST_ROLES", "calls_of", "classes_fit", "enter", "fold", "groups_read", "is_read_only_by",
           "place_of", "rename", "split_off", "take_partners", "take_roles"]

MOST_ROLES = 8          # calls that a member has in one launch
MOST_REPEATS = 4        # launches of one class in a group


@compiled
def groups_read(call, state, joinable, calls, candidates):  # type: ignore[no-untyped-def]
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


@compiled
def classes_fit(g, new, state, call_class, classes, seen):  # type: ignore[no-untyped-def]
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


@compiled
def is_read_only_by(k, g, state, readers):  # type: ignore[no-untyped-def]
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


@compiled
def place_of(g, newcomers, place_new, mine, state, calls, readers):  # type: ignore[no-untyped-def]
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


@compiled
def take_roles(g, k, state, calls, classes, counts, chosen):  # type: ignore[no-untyped-def]
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


@compiled
def take_partners(g, new, state, calls, classes, partner, counts):  # type: ignore[no-untyped-def]
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


@compiled
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


@compiled
def split_off(k, new, chosen, state, scratch):  # type: ignore[no-untyped-def]
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


@compiled
def enter(g, new, chosen, state):  # type: ignore[no-untyped-def]
    """The calls of a launch, which have members and roles by now, become part of a group."""
    group, _, _, starts, _, times, _, order, member, role = state
    group[new] = g
    for i in chosen:
        order[starts[new] + member[i] * times[new] + role[i]] = i


@compiled
def rename(g, new, partner, scratch, state):  # type: ignore[no-untyped-def]
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


@compiled
def calls_of(g, state, found):  # type: ignore[no-untyped-def]
    _, follows, _, starts, stops, _, _, order, _, _ = state
    count, at = 0, g
    while at >= 0:
        found[count:count + stops[at] - starts[at]] = order[starts[at]:stops[at]]
        count += stops[at] - starts[at]
        at = follows[at]
    return count


@compiled
def fold(k, foldable, state, calls, counts, number):  # type: ignore[no-untyped-def]
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
