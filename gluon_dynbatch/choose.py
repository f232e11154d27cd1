"""The method of a flush: as the scope says, or with policy "auto" as it has learned from the model's flushes before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .analyzer import scan
from .auto import Auto, Sample
from .costs.weigh import use_measured_costs
from .methods import Method
from .planning import make_problem, plan_launches
from .policies import predicted_us

__all__ = ["AUTO", "choose_method"]

AUTO = Auto()           # of the whole process


def choose_method(config: Any, tables: Any, place: str) -> Sample:
    """What a flush is planned with, in a sample that it fills in.

    Parameters
    ----------
    place : whose costs count
    """
    grain = "vertex" if config.granularity == "auto" else config.granularity
    if config.policy != "auto":
        if config.policy == "cost":
            use_measured_costs(place)
        return Sample(Method(config.policy, grain))
    # The same code with another number of children, or on longer inputs, is the same model.
    model = frozenset((id(cls.identity[0]) if cls.identity else 0, cls.signature.title)
                      for cls in tables.classes if cls.signature.alias < 0)
    first = Method("depth", grain)
    others = [Method("cost", grain), Method("agenda", grain)]
    if config.granularity == "auto":
        others += [Method("depth", "graph"), Method("cost", "graph")]
    return AUTO.choose((config.granularity, config.analysis_budget, place, model), first, lambda us: _worth_trying(
        first, others, config.analysis_budget * us, tables, place))


def _worth_trying(first: Method, others: Sequence[Method], budget_us: float, tables: Any, place: str) -> list[Method]:
    """Methods whose plan of this flush is predicted to be faster than the first's, planning included; best first.

    Parameters
    ----------
    budget_us : what planning may take, a call
    """
    problem = make_problem(tables.classes, tables.recording, scan(tables.recording), place)
    plan_launches(problem, others[0])               # compiled and warm
    limit = predicted_us(problem, plan_launches(problem, first))
    found = []
    for method in others:
        start = time.perf_counter()
        launch = plan_launches(problem, method)
        took_us = (time.perf_counter() - start) * 1e6
        total_us = predicted_us(problem, launch) + took_us
        if took_us <= budget_us * len(launch) and total_us < limit:
            found.append((total_us, method))
    return [method for _, method in sorted(found)]
