"""The cost model at work: what the classes of a flush cost, what a flush is predicted to take, and what it took."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .cost_model import CostModel
from .devices import NATIVE, built_in, load
from .work import Work, started_work_of, work_of

__all__ = ["class_costs", "cost_model", "predict_ms", "row_cost", "use_measured_costs"]

_NEUTRAL = (10.0, 1.0)          # us of a launch and of a row, of a class that has never been planned
_lock = threading.Lock()
_models: dict[str, CostModel] = {}      # by place, once somebody asks


def cost_model(place: str) -> CostModel:
    """The model of a place, with the constants that were measured there before, else typical ones."""
    with _lock:
        if place not in _models:
            _models[place] = CostModel(load(place) or built_in(place))
        return _models[place]


def use_measured_costs(place: str) -> CostModel:
    """The model with the constants of this machine; they are measured now if they never were."""
    model = cost_model(place)
    if model.device is not built_in(place):
        return model
    from .calibrate import load_or_calibrate  # it runs scopes, which weigh

    device = load_or_calibrate(place)
    with _lock:
        _models[place] = CostModel(device)
        return _models[place]


def class_costs(classes: Sequence[Any], place: str) -> tuple[Any, Any]:
    """Microseconds of a launch and of a row of each class, by its last plan: float64 arrays, shape (classes,)."""
    model = cost_model(place)
    costs = [_cost_of(cls, model, place) for cls in classes]
    return np.array([launch for launch, _ in costs]), np.array([row for _, row in costs])


def row_cost(cls: Any, place: str) -> float:
    """Microseconds of a row of a class."""
    return _cost_of(cls, cost_model(place), place)[1]


def _cost_of(cls: Any, model: CostModel, place: str) -> tuple[float, float]:
    plan = cls.signature.last_plan
    return _NEUTRAL if plan is None else _launch_cost(plan, model, place)


def _launch_cost(plan: Any, model: CostModel, place: str) -> tuple[float, float]:
    """What a plan costs, worked out once for a model and each of the plan's work."""
    work, known = _work_of(plan, place), plan.compiled.get("launch_cost")
    if known is None or known[0] is not model:
        known = plan.compiled["launch_cost"] = model, {}
    costs: dict[int, tuple[float, float]] = known[1]
    if id(work) not in costs:                   # (the plan holds all of its work)
        costs[id(work)] = model.launch_cost(*work)
    return costs[id(work)]


def predict_ms(plans: Sequence[Any], layout: Any, place: str) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward pass of a flush."""
    model, total, busy = cost_model(place), [0.0, 0.0], [False, False]
    for plan, part in zip(plans, layout.classes):
        if not part.launches:
            continue
        children = round(part.whole.num_edges / part.whole.num_rows, 1)
        known = plan.compiled.setdefault(("parts_us", model.device), {})
        if children not in known:
            known[children] = [work and model.parts_us(work) for work in _work_of(plan, place, children)]
        for k, parts_us in enumerate(known[children]):
            if parts_us is not None:
                launch_us, row_us, once_us = parts_us
                total[k] += len(part.launches) * launch_us + part.whole.num_rows * row_us + once_us
                busy[k] = True
    forward, backward = ((us + model.device.flush_us * some) / 1e3 for us, some in zip(total, busy))
    return forward, backward


def _work_of(plan: Any, place: str, children: float = 0.0) -> tuple[Work, Work | None]:
    """The work of a plan whose rows have so many children on average; 0: as many as when it was last asked."""
    if place != NATIVE:
        if "started work" not in plan.compiled:
            plan.compiled["started work"] = started_work_of(plan)
        return plan.compiled["started work"]
    known = plan.compiled.setdefault("work", {})
    children = children or next(reversed(known), 1.0)
    if children not in known:
        known[children] = work_of(plan, children)
    return known[children]
