"""The cost model at work: what the classes of a flush cost, what a flush is predicted to take, and what it took."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .cost_model import CostModel, Work, work_of

__all__ = ["class_costs", "cost_model", "predict_ms", "use_measured_costs"]

_NEUTRAL = (10.0, 1.0)          # us of a launch and of a row, of a class that has never been planned
_lock = threading.Lock()
_models: list[CostModel] = []   # one, once somebody asks


def cost_model() -> CostModel:
    """The model of this process, with this machine's constants if they were measured before, else typical ones."""
    with _lock:
        if not _models:
            from .calibrate import DEFAULT, _load
            _models.append(CostModel(_load() or DEFAULT))
        return _models[0]


def use_measured_costs() -> CostModel:
    """The model with the constants of this machine; they are measured now if they never were."""
    from .calibrate import load_or_calibrate
    device = load_or_calibrate()
    with _lock:
        if not _models or _models[0].device != device:
            _models[:] = [CostModel(device)]
        return _models[0]


def class_costs(classes: Sequence[Any]) -> tuple[Any, Any]:
    """Microseconds of a launch and of a row of each class, by its last plan: float64 arrays, shape (classes,)."""
    model = cost_model()
    costs = []
    for cls in classes:
        plan = cls.signature.last_plan
        costs.append(_NEUTRAL if plan is None else model.launch_cost(*_work_of(plan)))
    return np.array([launch for launch, _ in costs]), np.array([row for _, row in costs])


def predict_ms(plans: Sequence[Any], layout: Any) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward pass of a flush, as corrected by what earlier ones took."""
    model, total, busy = cost_model(), [0.0, 0.0], [False, False]
    for plan, part in zip(plans, layout.classes):
        if not part.launches:
            continue
        for k, work in enumerate(_work_of(plan)):
            if work is not None:
                launch_us, row_us, once_us = model._launch_us(work), model._row_us(work), model._once_us(work)
                total[k] += len(part.launches) * launch_us + part.whole.num_rows * row_us + once_us
                busy[k] = True
    forward, backward = ((us + model.device.flush_us * some) / 1e3 for us, some in zip(total, busy))
    return forward, backward


def _work_of(plan: Any) -> tuple[Work, Work | None]:
    if "work" not in plan.compiled:
        plan.compiled["work"] = work_of(plan)
    return plan.compiled["work"]
