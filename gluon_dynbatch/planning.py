"""A flush, planned: launches, rows and messages; remembered from flush to flush.

A plan depends on what was recorded and not on any value, so a flush of the same structure takes the plan of the last
one: nothing is analyzed or laid out. Structures are found by a checksum and compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cavs_core import (
    ClassLayout,
    Layout,
    Place,
    Read,
    RowIndex,
    Segments,
    answer_reads,
    compiled,
    frames_of,
)

from .analyzer import Grouping, Recording, Scan, group, launches_by_depth, problem_of, scan
from .costs.weigh import class_costs
from .graphs import plan_graphs
from .heads import Heads
from .methods import Method
from .plan_cache import PlanCache
from .policies import POLICIES, Problem
from .results import LeafName
from .rounds import Rounds, find_rounds
from .values import ROW_SPECS

__all__ = ["PLANS", "Fill", "PlanCache", "Planned", "find_fills", "make_problem", "plan_flush", "plan_launches"]


class ClassName(NamedTuple):
    """What a plan remembers of a class: not the block that its calls are of, which may die."""

    signature: Any
    where: str
    num_parts: int


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
    classes : ClassName of each class
    scan : what the analyzer found in the recording
    grouping : launches and rows
    heads : the values that gradients may come from
    layout, plans : for the executor, a ClassPlan per class
    names : leaf -> its name in the run, for those that all calls of a class share
    kinds : of the operands of each class, see `Signature.face`
    fills : which leaves are the rows of buffers; see `find_fills`
    joined : launches that became part of others
    predicted : constants of a device -> milliseconds of both directions there, once somebody asked
    """

    classes: list[ClassName]
    scan: Scan
    grouping: Grouping
    heads: Heads
    layout: Layout
    plans: list[Any]
    names: dict[int, LeafName]
    kinds: list[str]
    fills: list[Fill]
    joined: int
    predicted: dict[Any, tuple[float, float]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What the analyzer's arrays take; those of the layout are the run's."""
        g, s = self.grouping, self.scan
        arrays = (s.depth, s.active, s.operand_offsets, s.value_offsets, s.maker, s.source, s.output, g.value_rows,
                  g.value_buffers, g.leaf_rows, *[rows.calls for rows in g.classes])
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
    scanned = scan(r)
    launch = (launches_by_depth(r, scanned) if method.policy == "depth" and method.granularity != "graph" else
              plan_launches(make_problem(classes, r, scanned, place), method))
    rounds = find_rounds(r, scanned)
    grouping = group(r, scanned, len(tables.buffers), launch)
    grouping.order.sort(key=lambda pair: rounds.of_class[pair[0]])      # a round after the other, each in its order
    heads = Heads(r.heads, scanned, grouping, tables.value_specs)
    names = [ClassName(cls.signature, cls.where, cls.num_parts or 1) for cls in classes]
    layout, plans, leaf_names, kinds = _lay_out(names, r, scanned, grouping, rounds, tables.buffers, heads,
                                                tables.wanted_params)
    fills = find_fills(r.leaf_buffers, grouping.leaf_rows, len(tables.leaves.data), len(tables.buffers))
    joined = sum(classes[c].num_launches - 1 for c, _ in grouping.order)
    return Planned(names, scanned, grouping, heads, layout, plans, leaf_names, kinds, fills, joined)


def find_fills(leaf_buffers: Any, leaf_rows: Any, num_data: int, num_buffers: int) -> list[Fill]:
    """The leaves that are rows of each buffer, in the order in which the analyzer placed them: data, then numbers."""
    leaves, ends = _fills(leaf_buffers, leaf_rows, num_data, num_buffers)
    found, begin = [], 0
    for b, (middle, end) in enumerate(ends.tolist()):
        if end > begin:
            numbers = leaves[middle:end]
            first = int(leaf_rows[numbers[0]]) if end > middle else 0
            found.append(Fill(b, leaves[begin:middle].tolist(), numbers - num_data, first))
        begin = end
    return found


@compiled
def _fills(leaf_buffers, leaf_rows, num_data, num_buffers):  # type: ignore[no-untyped-def]
    """The leaves that have rows, by buffer; where the data of each buffer end, and its numbers."""
    counts = np.zeros((num_buffers, 2), np.int64)
    for leaf in range(len(leaf_rows)):
        if leaf_rows[leaf] >= 0:
            counts[leaf_buffers[leaf], int(leaf >= num_data)] += 1
    free, total = np.empty((num_buffers, 2), np.int64), 0
    for b in range(num_buffers):
        for k in range(2):
            free[b, k] = total
            total += counts[b, k]
    leaves = np.empty(total, np.int64)
    for leaf in range(len(leaf_rows)):
        if leaf_rows[leaf] >= 0:
            b, k = leaf_buffers[leaf], int(leaf >= num_data)
            leaves[free[b, k]] = leaf
            free[b, k] += 1
    return leaves, free


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
    local, facts = {number: k for k, number in enumerate(buffers)}, r.facts
    columns_of, outputs_of = facts.column_offsets.tolist(), facts.output_offsets.tolist()
    active, wanted, is_read = s.class_active.tolist(), s.wanted.tobytes(), rounds.outputs.tobytes()
    all_kinds = _kinds(facts.listed, g.shared, rounds.columns, s.pending).tobytes().decode()
    leaf_names: dict[int, LeafName] = {}
    plans, classes, kinds = [], [], []
    for c, rows in enumerate(g.classes):
        signature, info, begin, end = calls[c].signature, facts[c], columns_of[c], columns_of[c + 1]
        kinds.append(all_kinds[begin:end])
        plan, reads, shared = signature.face(kinds[c], wanted[begin:end], is_read[outputs_of[c]:outputs_of[c + 1]],
                                             wanted_params[c], active[c], len(rows.offsets) == 2)
        plans.append(plan)
        classes.append(ClassLayout(
            frames_of(rows.offsets, rows.edge_offsets),
            {source: Read(local[buffer], RowIndex(rows.columns[k]), width, listed)
             for k, source, buffer, width, listed in reads} if rows.columns else {},
            [Place(*place) for place in zip(info.output_buffers, rows.bases, info.output_widths)], {}, _NO_ROWS,
            None if rows.edge_offsets is None else Segments(rows.edge_offsets, rows.offsets),
            {source: leaf_names.setdefault(rows.shared[k], LeafName(rows.shared[k])) for k, source in shared}))
    messages: list[Any] = []            # none: no backward pass
    if any(active):
        messages, _ = answer_reads([plan.grads for plan in plans], classes,
                                   [(b, heads.rows(b)) for b in heads.in_buffers], g.buffer_rows, g.chunks)
    layout = Layout(classes, np.array(g.order, np.int64).reshape(-1, 2), g.buffer_rows, messages,
                    [ROW_SPECS[number] for number in buffers], rounds.of_class)
    return layout, plans, leaf_names, kinds


@compiled
def _kinds(listed, shared, inside, pending):  # type: ignore[no-untyped-def]
    """What operands are, a letter for each column; see `Signature.face`."""
    kinds = np.empty(len(listed), np.uint8)
    for k in range(len(listed)):
        kinds[k] = (ord("E") if listed[k] else ord("S") if shared[k] else ord("G") if inside[k] else
                    ord("P") if pending[k] else ord("L"))
    return kinds


_NO_ROWS = RowIndex(np.zeros(0, np.int64))      # recorded calls pull nothing by vertex
