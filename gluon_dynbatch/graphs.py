"""Granularity "graph": samples of the same structure are planned once, and run as one.

A sample is a stretch of calls that read nothing of what was recorded before, and that nobody behind it reads. Two
samples have the same structure if their calls are of the same classes and read each other in the same places. The plan
of a structure is made once and remembered, so that a mini-batch of known structures is planned without a look at its
calls; but samples of different structures share no launch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from cavs_core import compiled

from .policies import Policy, Problem

__all__ = ["plan_graphs", "samples_of"]

_known: OrderedDict[Any, Any] = OrderedDict()       # structure -> launch of each of its calls
_MOST_KNOWN = 4096


def samples_of(problem: Problem) -> Any:
    """Where samples begin, and where the last one ends: int64 array, shape (samples + 1,)."""
    return _starts(problem.indptr, problem.producers)


@compiled
def _starts(indptr, producers):  # type: ignore[no-untyped-def]
    num_calls = len(indptr) - 1
    starts = np.empty(num_calls + 1, np.int64)
    count, lowest = 0, num_calls
    starts[0] = num_calls
    for i in range(num_calls - 1, -1, -1):          # what calls from i on read begins at `lowest`
        for j in range(indptr[i], indptr[i + 1]):
            if producers[j] >= 0:
                lowest = min(lowest, producers[j])
        if lowest >= i:
            count += 1
            starts[count] = i
    return starts[:count + 1][::-1].copy()


def plan_graphs(problem: Problem, policy: Policy) -> Any:
    """The launch of each call: samples of one structure share their launches, in the order of first appearance."""
    bounds = samples_of(problem).tolist()
    launch = np.empty(len(problem.call_class), np.int64)
    first: dict[Any, int] = {}                      # structure -> its first launch
    num_launches = 0
    for start, stop in zip(bounds, bounds[1:]):
        first_edge, last_edge = problem.indptr[start], problem.indptr[stop]
        arrays = (problem.call_class[start:stop], problem.call_rows[start:stop],
                  problem.indptr[start:stop + 1] - first_edge, problem.producers[first_edge:last_edge] - start,
                  problem.launch_us, problem.row_us)
        structure = (policy.name, *[array.tobytes() for array in arrays])
        plan = _known.get(structure)
        if plan is None:
            plan = _known[structure] = policy.plan(Problem(*arrays))
            while len(_known) > _MOST_KNOWN:
                _known.popitem(last=False)
        if structure not in first:
            first[structure] = num_launches
            num_launches += int(plan.max(initial=-1)) + 1
        launch[start:stop] = np.where(plan < 0, -1, plan + first[structure])
    return launch
