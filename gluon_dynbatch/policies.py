"""Which calls share a launch, and in what order launches run. Pure: arrays in, arrays out; no device, no MXNet.

A call takes its rows to whatever launch it joins, so plans differ in price by their launches alone. They are found as a
row of *slots*, the class of each launch in the order of the run; a slot runs all calls of its class that are ready.

    none     every call alone
    depth    one slot for each depth and class (TensorFlow Fold)
    agenda   next the class whose calls have the lowest mean depth (DyNet)
    cost     the slots of depth or agenda, without those that no call is in need of; then others are tried
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from cavs_core import compiled

__all__ = ["Problem", "Policy", "Unbatched", "Depth", "Agenda", "Cost", "POLICIES", "by_depth", "predicted_us",
           "check_plan"]

SEARCH_SHARE = 0.2              # of what a plan may still save, for the search: longer, and it finds less than it takes
STEP_US = 0.015                 # of a round of the search, for each call and producer; measured with 1,000 to 5,000
MOST_CHAIN_ENTRIES = 1 << 23    # calls x classes: beyond 32 MB the bound is not worth its table


@dataclass(frozen=True, eq=False)       # arrays have no truth value, so problems are compared by identity
class Problem:
    """What a policy sees of a flush: calls in recorded order, what they wait for, and what a launch costs.

    Parameters
    ----------
    call_class : int64 array, shape (calls,)
        -1: the call runs nowhere (it only names part of a value), and nobody waits for it.
    call_rows : int64 array, shape (calls,)
        Rows that the call adds to its launch.
    indptr, producers : int64 arrays, shapes (calls + 1,) and (edges,)
        Call i reads results of the earlier calls producers[indptr[i]:indptr[i + 1]]; one may be there twice.
    launch_us, row_us : float64 arrays, shape (classes,)
        Predicted cost of one launch of the class, whatever its rows, and of one more row.
    """

    call_class: Any
    call_rows: Any
    indptr: Any
    producers: Any
    launch_us: Any
    row_us: Any

    @cached_property
    def depth(self) -> Any:
        """int64 array, shape (calls,): 0, or 1 + the largest of the producers'."""
        return _depth(self.indptr, self.producers)

    @cached_property
    def twins(self) -> tuple[Any, Any]:
        """Which call of the graph each call is (-1: none), and the graph: the calls that run, twins as one.

        Twins, of one class and with the same producers, are ready together. The graph is a tuple, because compiled code
        that is stored for a class needs that class to be loaded again: (number of classes, class of each call, how many
        calls each is, its depth, indptr, producers, reader_indptr, readers), the last two like indptr and producers.
        """
        twin, members, call_class, indptr, producers = _merge(self.call_class, self.indptr, self.producers)
        depth, readers = _depth(indptr, producers), _readers(indptr, producers)
        return twin, (len(self.launch_us), call_class, members, depth, indptr, producers, *readers)


class Policy(Protocol):
    """A way to plan."""

    @property
    def name(self) -> str: ...

    def plan(self, problem: Problem) -> Any:
        """The launch of each call, 0, 1, .. in the order of the run; -1 for class -1. int64 array, shape (calls,)."""


def predicted_us(problem: Problem, launch: Any) -> float:
    """What a plan costs: launch_us for each launch, row_us for each row."""
    runs = problem.call_class >= 0
    rows_us = problem.call_rows[runs] * problem.row_us[problem.call_class[runs]]
    return float(_slots_us(_slots_of(problem.call_class, launch), problem.launch_us) + rows_us.sum())


def check_plan(problem: Problem, launch: Any) -> None:
    """Raise ValueError unless the plan runs every call once, after its producers, with calls of its class alone."""
    call_class = problem.call_class
    if launch.shape != call_class.shape:
        raise ValueError(f"expected a launch for each of {len(call_class)} calls, got an array of shape {launch.shape}")
    wrong = np.flatnonzero(np.where(call_class < 0, launch != -1, launch < 0))
    if len(wrong):
        raise ValueError(f"call {wrong[0]} of class {call_class[wrong[0]]} has launch {launch[wrong[0]]}; "
                         "calls of class -1 have -1, all others a launch from 0 on")
    used, first_call, of_used = np.unique(launch, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(np.diff(used, prepend=-1) > 1)
    if len(wrong):
        raise ValueError(f"call {first_call[wrong[0]]} has launch {used[wrong[0]]}, but no call has "
                         f"{used[wrong[0]] - 1}; number launches without gaps")
    wrong = np.flatnonzero(call_class != call_class[first_call][of_used])
    if len(wrong):
        raise ValueError(f"call {wrong[0]} of class {call_class[wrong[0]]} has launch {launch[wrong[0]]}, which runs "
                         f"call {first_call[of_used[wrong[0]]]} of class {call_class[first_call[of_used[wrong[0]]]]}")
    reader = np.repeat(np.arange(len(launch)), np.diff(problem.indptr))
    wrong = np.flatnonzero((launch[problem.producers] >= launch[reader]) & (launch[reader] >= 0))
    if len(wrong):
        call, producer = reader[wrong[0]], problem.producers[wrong[0]]
        raise ValueError(f"call {call} has launch {launch[call]}, but it reads call {producer}, which has launch "
                         f"{launch[producer]}; it must run later")


# ---- the policies -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Unbatched:
    """Every call is a launch, in recorded order."""

    name = "none"

    def plan(self, problem: Problem) -> Any:
        runs = problem.call_class >= 0
        return np.where(runs, np.cumsum(runs) - 1, -1)


@dataclass(frozen=True)
class Depth:
    """A launch for each depth and class: by depth, then by class."""

    name = "depth"

    def plan(self, problem: Problem) -> Any:
        return by_depth(problem.call_class, problem.depth)


@dataclass(frozen=True)
class Agenda:
    """Next is the class whose calls that have not run have the lowest mean depth; it runs all that are ready.

    Among equals it is the cheaper one, so that heavy ones wait and grow, then the one with the lower number. DyNet
    takes the mean once, over all calls, which suits sequences and is worse for most other graphs.
    """

    name = "agenda"

    def plan(self, problem: Problem) -> Any:
        return _run(problem, _agenda(problem.twins[1], problem.launch_us + problem.row_us))


@dataclass(frozen=True)
class Cost:
    """Few and cheap launches. Never predicted slower than depth's or agenda's: it leaves some of theirs out.

    1. *Leave out.* Take the slots of depth, and of agenda, and find the last slot that each call may have. Now run the
       slots in order: one whose ready calls may all wait for a later slot of their class is left out, and they join
       that one. No slot of what remains can be left out by itself.
    2. *Offer.* Take one class after the other, the cheapest first, put a slot of it into every gap, and leave out
       again: what these make superfluous goes, and so do they where they were no help. Keep what is not dearer. The
       first time through the classes slots are left out from the front, the second time from the back.

    No plan has fewer launches of a class than there are calls of it on a path. A plan that has no more is the best
    there is, and ends the search; else it goes on for a small share of the predicted time above that bound, and for
    `search_us` at most. Time is counted in steps, not read from a clock, so that equal problems have equal plans.

    Parameters
    ----------
    search_us : the most that step 2 may take
    """

    search_us: float = 400.0
    name = "cost"

    def plan(self, problem: Problem) -> Any:
        launch_us, graph = problem.launch_us, problem.twins[1]
        _, call_class, _, depth, *_ = graph
        fewest = _longest_chains(graph)
        slots = _leave_out(graph, _slots_of(call_class, by_depth(call_class, depth)), False)
        if len(slots) > fewest.sum():
            slots = _cheaper(slots, _leave_out(graph, _agenda(graph, launch_us + problem.row_us), False), launch_us)
            present = np.flatnonzero(fewest)
            order = present[np.argsort(launch_us[present], kind="stable")]
            slots = _offer(graph, slots, launch_us, order, fewest, self.search_us)
        return _run(problem, slots)


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Unbatched(), Depth(), Agenda(), Cost())}


def _run(problem: Problem, slots: Any) -> Any:
    """The launch of each call, when every slot runs all that is ready of its class."""
    twin, graph = problem.twins
    launch, _ = _walk(graph, slots, np.zeros(len(graph[1]), np.int64), False)
    return np.append(launch, -1)[twin]              # who runs nowhere has twin -1: the last entry


# ---- passes over the calls ----------------------------------------------------------------------------------------

@compiled
def _depth(indptr, producers):  # type: ignore[no-untyped-def]
    depth = np.zeros(len(indptr) - 1, np.int64)
    for i in range(len(depth)):
        for j in range(indptr[i], indptr[i + 1]):
            depth[i] = max(depth[i], depth[producers[j]] + 1)
    return depth


@compiled
def _readers(indptr, producers):  # type: ignore[no-untyped-def]
    offsets = np.zeros(len(indptr), np.int64)
    for p in producers:
        offsets[p + 1] += 1
    offsets = np.cumsum(offsets)
    readers, at = np.empty_like(producers), offsets.copy()
    for i in range(len(indptr) - 1):
        for j in range(indptr[i], indptr[i + 1]):
            readers[at[producers[j]]] = i
            at[producers[j]] += 1
    return offsets, readers


@compiled
def _merge(call_class, indptr, producers):  # type: ignore[no-untyped-def]
    """Calls of one class whose producers are the same, or twins in the same order, become one.

    Returns which of the merged calls each call is, how many each of those is, their classes, indptr and producers.
    """
    size = 2
    while size < 2 * len(call_class):
        size *= 2
    table = np.full(size, -1, np.int64)                 # hash -> merged call; or in the next place that was free
    twin, members = np.full(len(call_class), -1, np.int64), np.zeros(len(call_class), np.int64)
    classes, offsets, reads = np.empty_like(call_class), np.zeros_like(indptr), np.empty_like(producers)
    merged = 0
    for i in range(len(call_class)):
        if call_class[i] < 0:
            continue
        classes[merged], end = call_class[i], offsets[merged]
        key = np.uint64(call_class[i] + 1)
        for j in range(indptr[i], indptr[i + 1]):
            reads[end] = twin[producers[j]]
            key = (key ^ np.uint64(reads[end] + 1)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)                 # the upper bits of a product are the mixed ones
            end += 1
        offsets[merged + 1] = end
        at = np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & (size - 1)
        while table[at] >= 0 and not _are_equal(classes, offsets, reads, table[at], merged):
            at = (at + 1) & (size - 1)
        if table[at] < 0:
            table[at] = merged
            merged += 1
        twin[i] = table[at]
        members[twin[i]] += 1
    return twin, members[:merged], classes[:merged], offsets[:merged + 1], reads[:offsets[merged]]


@compiled
def _are_equal(classes, offsets, reads, a, b):  # type: ignore[no-untyped-def]
    if classes[a] != classes[b] or offsets[a + 1] - offsets[a] != offsets[b + 1] - offsets[b]:
        return False
    for j in range(offsets[a + 1] - offsets[a]):
        if reads[offsets[a] + j] != reads[offsets[b] + j]:
            return False
    return True


@compiled
def by_depth(call_class, depth):  # type: ignore[no-untyped-def]
    """A launch for each depth and class."""
    order = _sorted_by(np.flatnonzero(call_class >= 0), call_class)
    order = _sorted_by(order, depth)                    # stable: by class among equals
    launch = np.full(len(call_class), -1, np.int64)
    last, before = -1, -1
    for i in order:
        if before < 0 or depth[i] != depth[before] or call_class[i] != call_class[before]:
            last += 1
        launch[i], before = last, i
    return launch


@compiled
def _sorted_by(calls, keys):  # type: ignore[no-untyped-def]
    """The calls in the order of their keys (0, 1, ..); equal ones stay in order."""
    at = np.zeros(keys.max() + 2 if len(keys) else 1, np.int64)
    for i in calls:
        at[keys[i] + 1] += 1
    at = np.cumsum(at)
    by_key = np.empty_like(calls)
    for i in calls:
        by_key[at[keys[i]]] = i
        at[keys[i]] += 1
    return by_key


@compiled
def _longest_chains(graph):  # type: ignore[no-untyped-def]
    """For each class the most calls of it on a path: no plan has fewer launches of it. 1 where that takes too long."""
    num_classes, call_class, _, _, indptr, producers, _, _ = graph
    longest = np.zeros(num_classes, np.int32)
    if len(call_class) * num_classes > MOST_CHAIN_ENTRIES:
        longest[call_class] = 1
        return longest
    chains = np.zeros((len(call_class), num_classes), np.int32)     # on paths that end with the call
    for i in range(len(call_class)):
        mine, own = chains[i], call_class[i]
        for j in range(indptr[i], indptr[i + 1]):
            theirs = chains[producers[j]]
            for c in range(num_classes):
                mine[c] = max(mine[c], theirs[c])
        mine[own] += 1
        longest[own] = max(longest[own], mine[own])
    return longest


# ---- slots --------------------------------------------------------------------------------------------------------
# Ready calls of a class are a linked list: head[class] is the first, link[call] the next, -1 the end.

@compiled
def _slots_of(call_class, launch):  # type: ignore[no-untyped-def]
    slots = np.empty(launch.max() + 1 if len(launch) else 0, np.int64)
    for i in range(len(launch)):
        if launch[i] >= 0:
            slots[launch[i]] = call_class[i]
    return slots


@compiled
def _slots_us(slots, launch_us):  # type: ignore[no-untyped-def]
    """Class by class, so that fewer launches never cost more by rounding, whatever their order."""
    launches = np.zeros(len(launch_us), np.int64)
    for c in slots:
        launches[c] += 1
    return np.sum(launches * launch_us)


@compiled
def _cheaper(slots, other, launch_us):  # type: ignore[no-untyped-def]
    """Of two rows of slots; the other among equals."""
    us, other_us = _slots_us(slots, launch_us), _slots_us(other, launch_us)
    return other if other_us < us or (other_us == us and len(other) <= len(slots)) else slots


@compiled
def _agenda(graph, price):  # type: ignore[no-untyped-def]
    num_classes, call_class, members, depth, indptr, _, reader_indptr, readers = graph
    waiting = indptr[1:] - indptr[:-1]
    head, link = np.full(num_classes, -1, np.int64), np.empty_like(waiting)
    left, depth_left = np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
    for i in range(len(waiting)):
        c = call_class[i]
        left[c] += members[i]
        depth_left[c] += depth[i] * members[i]
        if waiting[i] == 0:
            link[i], head[c] = head[c], i
    mean = depth_left / np.maximum(left, 1)
    slots, num_slots = np.empty_like(waiting), 0
    while True:
        best = -1
        for c in range(num_classes):
            if head[c] >= 0 and (best < 0 or (mean[c], price[c]) < (mean[best], price[best])):
                best = c
        if best < 0:
            return slots[:num_slots]
        slots[num_slots] = best
        num_slots += 1
        i, head[best] = head[best], -1
        while i >= 0:
            left[best] -= members[i]
            depth_left[best] -= depth[i] * members[i]
            for r in readers[reader_indptr[i]:reader_indptr[i + 1]]:
                waiting[r] -= 1
                if waiting[r] == 0:
                    link[r], head[call_class[r]] = head[call_class[r]], r
            i = link[i]
        mean[best] = depth_left[best] / max(left[best], 1)


@compiled
def _walk(graph, slots, due, backward):  # type: ignore[no-untyped-def]
    """Run slots in order: each runs what is ready of its class, if any of that is due by now.

    Backward, calls wait for their readers: with the slots from last to first, each runs as late as it can. Returns the
    slot of each call, and whether each slot ran.
    """
    num_classes, call_class, _, _, wait_indptr, producers, then_indptr, then = graph
    if backward:
        wait_indptr, then_indptr, then = then_indptr, wait_indptr, producers
    waiting = wait_indptr[1:] - wait_indptr[:-1]
    head, link = np.full(num_classes, -1, np.int64), np.empty_like(waiting)
    first_due = np.full(num_classes, len(slots), np.int64)        # of the ready calls
    slot_of, ran = np.full(len(waiting), -1, np.int64), np.zeros(len(slots), np.bool_)
    for i in range(len(waiting)):
        if waiting[i] == 0:
            c = call_class[i]
            link[i], head[c] = head[c], i
            first_due[c] = min(first_due[c], due[i])
    for s in range(len(slots)):
        c = slots[s]
        if first_due[c] > s:
            continue
        ran[s] = True
        i, head[c], first_due[c] = head[c], -1, len(slots)
        while i >= 0:
            slot_of[i] = s
            for j in range(then_indptr[i], then_indptr[i + 1]):
                r = then[j]
                waiting[r] -= 1
                if waiting[r] == 0:
                    q = call_class[r]
                    link[r], head[q] = head[q], r
                    first_due[q] = min(first_due[q], due[r])
            i = link[i]
    return slot_of, ran


@compiled
def _leave_out(graph, slots, from_back):  # type: ignore[no-untyped-def]
    """The slots without those that no call is in need of.

    A call is due in the last slot that it may have. What it reads is due earlier, so it is ready by then, and is run:
    leaving a slot out when none of its ready calls is due makes nobody late.
    """
    if from_back:
        slots = slots[::-1].copy()
    last, _ = _walk(graph, slots[::-1].copy(), np.zeros(len(graph[1]), np.int64), not from_back)
    _, ran = _walk(graph, slots, len(slots) - 1 - last, from_back)
    return slots[ran][::-1].copy() if from_back else slots[ran]


@compiled
def _offer(graph, slots, launch_us, order, fewest, search_us):  # type: ignore[no-untyped-def]
    """Step 2 of `Cost`."""
    bound_us = np.sum(fewest * launch_us)
    _, call_class, _, _, _, producers, _, _ = graph
    round_us = STEP_US * (len(call_class) + len(producers))
    idle = turn = 0
    while idle < 2 * len(order) and len(slots) > np.sum(fewest):
        before_us = _slots_us(slots, launch_us)
        if (turn + 1) * round_us > min(search_us, SEARCH_SHARE * (before_us - bound_us)):
            break
        offered = np.full(2 * len(slots) + 1, order[turn % len(order)])
        offered[1::2] = slots
        slots = _cheaper(slots, _leave_out(graph, offered, turn // len(order) % 2 == 1), launch_us)
        idle = 0 if _slots_us(slots, launch_us) < before_us else idle + 1
        turn += 1
    return slots
