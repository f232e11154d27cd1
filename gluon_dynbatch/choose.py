"""How a flush is planned.

Its method is as the scope says, or with policy "auto" as it has learned from the model's flushes before; and calls that
repeat others are left out where that pays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from .analyzer import scan
from .auto import Auto, Sample
from .costs.cost_model import Device
from .costs.devices import NATIVE
from .costs.weigh import cost_model, row_cost, use_measured_costs
from .last_used import LastUsed
from .methods import Method
from .plan_cache import PlanCache
from .planning import make_problem, plan_launches
from .policies import predicted_us
from .repeats import Distinct, find_repeats
from .tables import Tables

__all__ = ["AUTO", "IDLE", "REPEATS", "SEEN", "choose_method", "without_repeats"]

AUTO = Auto()           # of the whole process
IDLE = LastUsed(256)    # model -> flushes in a row where leaving out repeats did not pay
PATIENCE, AGAIN = 4, 16
REPEATS = PlanCache(16 << 20)       # Structure and looked up numbers -> what is left; None if that does not pay
SEEN = LastUsed(256)    # checksum of a structure -> True: it came before, so that its plan is known if it runs as it is
# About what a new plan costs, with its layout and its tables, in µs; what the device's constants say is grouping alone.
NEW_PLAN_US, NEW_PLAN_US_PER_CALL = 300.0, 0.2


def without_repeats(tables: Tables) -> Tables:
    """The tables without calls that repeat others, if running those on a CPU takes longer than planning the others.

    (Which calls repeat others depends on the words of a mini-batch, so that plans are seldom known. Samples of one
    structure have a known plan without that, and then a new one must be worth its price.) Where it has not paid in the
    last flushes of a model, only every so many flushes are looked at.
    """
    model = tuple([id(cls.signature) for cls in tables.classes])
    idle = IDLE.get(model, 0)
    found = _distinct(tables) if idle < PATIENCE or idle % AGAIN == 0 else None
    IDLE.put(model, 0 if found is not None else idle + 1)
    return tables if found is None else found


def _distinct(tables: Tables) -> Tables | None:
    """The tables without repeats; None if that does not pay."""
    structure, facts, device = tables.structure, tables.repeat_facts(), cost_model(NATIVE).device
    key = (structure, device, facts.lookups.ids.tobytes())
    known = REPEATS.get(key, ())
    if known is None:
        left = find_repeats(facts, tables.recording)
        seen = SEEN.get(structure.checksum, False)
        SEEN.put(structure.checksum, True)
        found = structure.without_repeats(left, tables.num_dropped(left)) if _pays(tables, left, device, seen) else None
        REPEATS.put(key, (), found, num_bytes=structure.num_bytes + (found.num_bytes if found is not None else 0))
    else:
        _, found = known
    return None if found is None else tables.with_structure(found)


def _pays(tables: Tables, left: Distinct, device: Device, seen: bool) -> bool:
    price = (NEW_PLAN_US + NEW_PLAN_US_PER_CALL * len(left.entries) if seen else
             device.analysis_us + device.analysis_us_per_call * len(left.entries))
    for count, cls in sorted(zip(left.dropped.tolist(), tables.classes), key=itemgetter(0), reverse=True):
        if not count:
            break
        price -= count * row_cost(cls, NATIVE)
        if price < 0:                           # as a rule by what is repeated most
            return True
    return False


def choose_method(config: Any, recorded: Sequence[Any], tables: Any, runs: Any, place: str) -> Sample:
    """What a flush is planned with, in a sample that it fills in.

    Parameters
    ----------
    recorded : classes as they were recorded, by which a model is known
    tables, runs : what would run, without repeats and with them
    place : whose costs count
    """
    grain = "vertex" if config.granularity == "auto" else config.granularity
    if config.policy != "auto":
        if config.policy == "cost":
            use_measured_costs(place)
        return Sample(Method(config.policy, grain))
    # The same code with another number of children, or on longer inputs, is the same model.
    model = frozenset((id(cls.identity[0]) if cls.identity else 0, cls.signature.title)
                      for cls in recorded if cls.signature.alias < 0)
    first = Method("depth", grain)
    others = [Method("cost", grain), Method("agenda", grain)]
    if config.granularity == "auto":
        others += [Method("depth", "graph"), Method("cost", "graph")]
    return AUTO.choose((config.granularity, config.analysis_budget, place, model), first, lambda us: _worth_trying(
        first, others, config.analysis_budget * us, tables, runs, place))


def _worth_trying(first: Method, others: Sequence[Method], budget_us: float, tables: Any, runs: Any,
                  place: str) -> list[Method]:
    """Methods whose plan of this flush is predicted to be faster than the first's, planning included; best first.

    Parameters
    ----------
    budget_us : what planning may take, a call
    """
    # (Without repeats samples read each other, and would be one structure.)
    parts = [tables if method.drops_repeats else runs for method in (first, *others)]
    problems = {part: make_problem(part.classes, part.recording, scan(part.recording), place)
                for part in dict.fromkeys(parts)}
    plan_launches(problems[parts[1]], others[0])    # compiled and warm
    limit = predicted_us(problems[parts[0]], plan_launches(problems[parts[0]], first))
    found = []
    for part, method in zip(parts[1:], others):
        problem, start = problems[part], time.perf_counter()
        launch = plan_launches(problem, method)
        took_us = (time.perf_counter() - start) * 1e6
        total_us = predicted_us(problem, launch) + took_us
        if took_us <= budget_us * len(launch) and total_us < limit:
            found.append((total_us, method))
    return [method for _, method in sorted(found)]
