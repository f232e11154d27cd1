"""A flush, planned: launches, rows and messages; remembered from flush to flush.

A plan depends on what was recorded and not on any value, so a flush of the same structure takes the plan of the last
one: nothing is analyzed or laid out. Structures are found by a checksum and compared exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cavs_core import ClassLayout, Layout, Place, Read, RowIndex, Segments, frames_of, plan_messages

from .analyzer import Grouping, Recording, Scan, group, problem_of, scan
from .coarse import coarsen, compositions_of
from .compositions import COMPOSED, is_by_rows
from .costs.weigh import class_costs
from .graphs import plan_graphs
from .joining import HABITS, find_groups
from .methods import Method
from .plan_cache import PlanCache
from .policies import POLICIES, Problem
from .results import Heads, LeafName
from .rounds import Rounds, find_rounds
from .signature import CallClass, any_number_signature, operand_source
from .sums import SUM_ROLES, find_chains, fold_chains
from .values import BUFFERS, ROW_SPECS, SPECS

__all__ = ["PLANS", "Fill", "PlanCache", "Planned", "find_fills", "make_problem", "plan_flush", "plan_launches"]


class ClassName(NamedTuple):
    """What a plan remembers of a class: not the block that its calls are of, which may die."""

    signature: Any
    where: str
    num_parts: int = 1


@dataclass
class Ran:
    """What runs: the recording itself, or one that is coarser, where launches were joined.

    Attributes
    ----------
    classes : ClassName of each class
    recording, scan, launch : the recording, what the analyzer found in it, and the launch of each call
    origins : of each class: its number among those that were recorded; negative for joined ones
    joined : launches that became part of others
    """

    classes: Sequence[ClassName]
    recording: Recording
    scan: Scan
    launch: Any
    origins: Sequence[int]
    joined: int = 0


class Fill(NamedTuple):
    """Leaves that are rows of a buffer: data from its first row on, and numbers (by their place among these) behind."""

    buffer: int
    data: list[int]
    numbers: Any
    first_number: int


@dataclass
class Planned:
    """Everything that a run needs to know beforehand.

    Attributes
    ----------
    scan : what the analyzer found in the recording
    ran : what runs, where launches were joined
    grouping : of what runs; but values have the numbers of the recording, and those that are gone the row -1
    heads : the values that gradients may come from
    layout, plans : for the executor, a ClassPlan per class that runs
    names : leaf -> its name in the run, for those that all calls of a class share
    kinds : of the operands of each class, see `Signature.plan`
    fills : which leaves are the rows of buffers; see `find_fills`
    predicted : constants of a device -> milliseconds of both directions there, once somebody asked
    """

    scan: Scan
    ran: Ran
    grouping: Grouping
    heads: Heads
    layout: Layout
    plans: list[Any]
    names: dict[int, LeafName]
    kinds: list[list[str]]
    fills: list[Fill]
    predicted: dict[Any, tuple[float, float]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What the analyzer's arrays take; those of the layout are the run's."""
        g, scans = self.grouping, [self.scan, *[s for s in [self.ran.scan] if s is not self.scan]]
        arrays = (*[a for s in scans for a in (
                      s.depth, s.active, s.operand_offsets, s.value_offsets, s.maker, s.source, s.output)],
                  g.value_rows, g.value_buffers, g.leaf_rows, *[rows.calls for rows in g.classes])
        return sum(a.nbytes for a in arrays)


PLANS = PlanCache()         # of the whole process


def plan_flush(tables: Any, method: Method, place: str) -> tuple[Planned, bool]:
    """The plan of what was recorded, and whether it was known already.

    Parameters
    ----------
    tables : what was recorded, as arrays
    method : Method
    place : whose costs count, where the method looks at costs
    """
    structure, classes = tables.structure, tables.classes
    weighed = place if method.policy in ("agenda", "cost") else None
    key = (method, weighed, tuple(tables.buffers), tuple([(cls.signature, cls.recorded) for cls in classes]),
           tables.wanted_params, len(tables.leaves.data), structure.checksum)
    known = PLANS.get(key, structure.arrays)
    if known is not None:
        structure.arrays, planned = known
        return planned, True
    planned = _plan(tables, method, weighed)
    PLANS.put(key, structure.arrays, planned, [cls.identity[0] for cls in classes if cls.identity is not None])
    return planned, False


def _plan(tables: Any, method: Method, place: str | None) -> Planned:
    r, classes = tables.recording, tables.classes
    scanned = of_sums = scan(r)
    value_of = None                                 # of what runs, the number of each recorded value
    if method.policy != "none":                     # which is there to see what every call by itself costs
        classes, r, value_of = _fold(classes, r, scanned, tables.viewed)
        of_sums = scanned if value_of is None else scan(r)
    launch = plan_launches(make_problem(classes, r, of_sums, place), method)
    names = [ClassName(cls.signature, cls.where) for cls in classes]
    ran = Ran(names, r, of_sums, launch, [c if c < len(tables.classes) else -1 for c in range(len(classes))])
    if method.policy != "none":
        viewed = tables.viewed if value_of is None else value_of[tables.viewed]
        ran, joined = _join(classes, ran, viewed)
        if joined is not None:
            value_of = joined if value_of is None else _looked_up(joined, value_of)
    rounds = find_rounds(ran.recording, ran.scan)
    grouping = group(ran.recording, ran.scan, len(tables.buffers), ran.launch)
    grouping.order.sort(key=lambda pair: rounds.of_class[pair[0]])      # a round after the other, each in its order
    if value_of is not None:
        grouping = replace(grouping, value_rows=_looked_up(grouping.value_rows, value_of),
                           value_buffers=_looked_up(grouping.value_buffers, value_of))
    heads = Heads(tables.recording.heads, scanned, grouping, tables.value_specs)
    wanted_params = [tables.wanted_params[c] if c >= 0 else () for c in ran.origins]
    layout, plans, leaf_names, kinds = _lay_out(ran.classes, ran.recording, ran.scan, grouping, rounds, tables.buffers,
                                                heads, wanted_params)
    fills = find_fills(tables.recording.leaf_buffers, grouping.leaf_rows, len(tables.leaves.data))
    return Planned(scanned, ran, grouping, heads, layout, plans, leaf_names, kinds, fills)


def find_fills(leaf_buffers: Any, leaf_rows: Any, num_data: int) -> list[Fill]:
    """The leaves that are rows of each buffer, in the order in which the analyzer placed them: data, then numbers."""
    found = []
    placed = np.flatnonzero(leaf_rows >= 0)
    for b in np.unique(leaf_buffers[placed]).tolist():
        mine = placed[leaf_buffers[placed] == b]
        count = int(np.searchsorted(mine, num_data))
        numbers = mine[count:]
        first = int(leaf_rows[numbers[0]]) if len(numbers) else 0
        found.append(Fill(b, mine[:count].tolist(), numbers - num_data, first))
    return found


def _fold(classes: Sequence[CallClass], r: Recording, s: Scan, viewed: Any) -> Any:
    """Let long sums be lists: the classes and the recording with them, and its numbers of the values (None: as before).
    """
    adds = np.array([cls.identity is None and cls.signature.adds_rows for cls in classes], bool)
    chains = find_chains(r, s, np.concatenate([r.heads, viewed]), adds) if adds.any() else None
    if chains is None:
        return classes, r, None
    chosen = SUM_ROLES.chosen(chains, _names(classes))
    if not chosen.any():
        return classes, r, None
    known = {(cls.signature, cls.recorded): c for c, cls in enumerate(classes)}
    classes, list_of = list(classes), np.full(len(classes), -1, np.int64)
    for c in np.unique(chains.roles[chosen, 0]).tolist():
        signature, recorded = any_number_signature("add_n", classes[c].signature.operand_specs[0]), classes[c].recorded
        if (signature, recorded) not in known:
            known[signature, recorded] = len(classes)
            classes.append(CallClass(len(classes), signature, recorded, classes[c].where, None))
        list_of[c] = known[signature, recorded]
    return classes, *fold_chains(r, s, chains, chosen, list_of)


def _join(classes: Sequence[Any], ran: Ran, viewed: Any) -> tuple[Ran, Any]:
    """Join launches that have the same members; what runs then, and its numbers of the values."""
    r, s = ran.recording, ran.scan
    joinable = np.array([cls.identity is None and not cls.signature.draws for cls in classes], bool)
    heavy = np.array([cls.signature.has_product for cls in classes], bool)
    groups = find_groups(r, s, ran.launch, joinable, heavy, _names(classes), HABITS)
    if groups is None:
        return ran, None
    numbers: dict[Any, int] = {}
    looks = np.array([numbers.setdefault(look, len(numbers)) for cls in classes
                      for look in zip(cls.signature.operand_specs, cls.signature.split)], np.int64)
    found = compositions_of(r, s, groups, np.concatenate([r.heads, viewed]), looks)
    faces, joined, by_rows = [], [], []
    for q, needed in zip(found.all, found.faces):
        parts = [classes[c] for c in q.classes]
        signatures = [cls.signature for cls in parts]
        face, signature = COMPOSED.signature(signatures, q, needed)
        where = parts[0].where if len({cls.where for cls in parts}) == 1 else ""
        faces.append(face)
        joined.append(ClassName(signature, where, len(parts)))
        by_rows.append(is_by_rows(signatures, q))
    coarse = coarsen(r, s, groups, found, faces, by_rows)
    kept = [ran.classes[c] for c in coarse.origins if c >= 0]
    origins = [ran.origins[c] if c >= 0 else c for c in coarse.origins]
    return Ran(kept + joined, coarse.recording, scan(coarse.recording), coarse.launch, origins,
               groups.num_joined), coarse.value_of


def _names(classes: Sequence[CallClass]) -> list[Any]:
    """What classes are called in all flushes; without blocks and weights, which may die."""
    count: Counter[Any] = Counter()
    names = []
    for cls in classes:
        look = (cls.signature if cls.identity is None else None, cls.recorded, cls.where)
        names.append((*look, count[look]))      # the same operator with another weight is another class
        count[look] += 1
    return names


def _looked_up(of_value: Any, value_of: Any) -> Any:
    """What there is for each value of the recording; -1 for those that are gone."""
    return np.append(of_value, -1)[value_of]


def make_problem(classes: Sequence[Any], r: Recording, s: Scan, place: str | None) -> Problem:
    """What a policy sees; with the costs of launches in a place, unless it does not look at them."""
    launch_us, row_us = class_costs(classes, place) if place else (np.zeros(len(r.classes)),) * 2
    return problem_of(r, s, launch_us, row_us)


def plan_launches(problem: Problem, method: Method) -> Any:
    """The launch of each call, as the policy says; with granularity "graph" it plans each structure by itself."""
    policy = POLICIES[method.policy]
    if method.granularity == "graph" and method.policy != "none":       # "none" shares nothing, whatever the grain
        return plan_graphs(problem, policy)
    return policy.plan(problem)


# ---- layout ----------------------------------------------------------------------------------

def _lay_out(calls: Sequence[Any], r: Recording, s: Scan, g: Grouping, rounds: Rounds, buffers: list[int],
             heads: Heads, wanted_params: Any) -> Any:
    """A layout for the executor, a plan for each class, names of shared leaves, and the kinds of all operands."""
    local = {number: k for k, number in enumerate(buffers)}
    active = (np.bincount(r.call_class[s.active], minlength=len(r.classes)) > 0).tolist()
    column_wanted, pending, inside = s.wanted.tolist(), s.pending.tolist(), rounds.columns.tolist()
    leaf_names: dict[int, LeafName] = {}
    plans, classes, all_kinds = [], [], []
    for c, rows in enumerate(g.classes):
        signature, info = calls[c].signature, r.classes[c]
        first, fixed = int(s.column_offsets[c]), len(info.operand_widths) - info.slots
        columns = range(first, first + fixed + info.slots)
        listed = [k >= fixed and not info.split[k] for k in range(len(columns))]
        kinds = ["E" if listed[k] else "S" if k in rows.shared else
                 "G" if inside[col] else "P" if pending[col] else "L" for k, col in enumerate(columns)]
        wanted = [active[c] and column_wanted[col] and SPECS[signature.operand_specs[k]].is_float
                  for k, col in enumerate(columns)]
        flows = active[c] and not info.alias
        plans.append(signature.plan(kinds, wanted, tuple(active[c] and want for want in wanted_params[c]), flows,
                                    len(rows.offsets) == 2, tuple(np.flatnonzero(rounds.outputs[c]).tolist())))
        all_kinds.append(kinds)
        reads = {operand_source(k, kinds[k]): Read(local[BUFFERS[signature.operand_specs[k]]], RowIndex(column),
                                                   info.operand_widths[k], per_edge=listed[k])
                 for k, column in rows.columns.items()}
        names = {operand_source(k, "S"): leaf_names.setdefault(leaf, LeafName(leaf))
                 for k, leaf in rows.shared.items()}
        writes = [Place(*place) for place in zip(info.output_buffers, rows.bases, info.output_widths)]
        edges = None if rows.edge_offsets is None else Segments(rows.edge_offsets, rows.offsets)
        frames = frames_of(rows.offsets, rows.edge_offsets)
        classes.append(ClassLayout(frames, reads, writes, {}, _NO_ROWS, edges, names))
    messages = _messages(g, plans, classes, heads) if any(active) else []          # none: no backward pass
    layout = Layout(classes, np.array(g.order, np.int64).reshape(-1, 2), g.buffer_rows, messages,
                    [ROW_SPECS[number] for number in buffers], rounds.of_class)
    return layout, plans, leaf_names, all_kinds


_NO_ROWS = RowIndex(np.zeros(0, np.int64))      # recorded calls pull nothing by vertex


def _messages(g: Grouping, plans: list[Any], classes: list[ClassLayout], heads: Heads) -> list[Any]:
    """Who answers whom: readers' messages first, then one for each head."""
    count = len(g.buffer_rows)
    read: list[list[Any]] = [[] for _ in range(count)]
    sent: list[list[Any]] = [[] for _ in range(count)]
    free = [1] * count

    def answer(buffer: int, rows: Any) -> None:
        read[buffer].append(rows)
        sent[buffer].append(free[buffer] + np.arange(len(rows)))
        free[buffer] += len(rows)

    for plan, part in zip(plans, classes):
        for source in plan.grads:
            if source in part.reads:
                place = part.reads[source]
                part.sends[source] = Place(place.buffer, free[place.buffer], place.width)
                answer(place.buffer, place.rows.rows)
    for buffer in np.unique(heads.buffers).tolist():
        answer(buffer, heads.rows(buffer))
    return [plan_messages(g.buffer_rows[b], read[b], sent[b], free[b], g.chunks[b]) for b in range(count)]
