"""The grain of batching, without running a network: how much can be batched, and what finding it out costs.

The finer the grain, the more calls there are that can share launches, and the more there is to analyze ("Just-in-Time
Dynamic-Batching", 2019). Here real policies plan real trees (`simulated_samples.py`), cut into calls at each grain
(`simulated_models.py`), and are timed; what the launches take is predicted by the cost model.

A step is recording and analysis, then the forward and the backward pass. With policy "none" every call runs as soon as
it is made: it records and analyzes nothing, and shares nothing with others. Input projections and gradients of
parameters, which a flush makes once for all calls of a class, are then made by every call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ..costs.cost_model import CostModel, Device, gpu
from ..costs.devices import DEFAULT, load
from ..graphs import plan_graphs
from ..policies import POLICIES, Problem, check_plan, predicted_us
from .simulated_models import GRAINS, MODELS, Calls, Grain, Model
from .simulated_samples import SHAPES, Sample, generate, read_sick, read_sst

__all__ = ["Row", "add_arguments", "plot", "run", "simulate", "table", "write_json"]

DATA_VARIABLE = "DYNBATCH_BENCH_DATA"
_BATCH = {"sick": 25, "sst": 64, "trees": 32}       # as in the benchmarks
_BATCHES = 8                                        # mini-batches, unless --samples says something else
_REPEATS = 3                                        # the fastest counts: a machine is only ever disturbed upwards


@dataclass(frozen=True)
class Row:
    """A grain and a policy on a device: means over mini-batches."""

    device: str
    grain: str
    policy: str
    samples: int                # a mini-batch
    calls: float
    launches: float
    remaining: float            # launches, as a share of those of policy "none"
    mean_rows: float            # a launch
    median_rows: float
    policy_ms: float            # of planning alone, as it was on this machine
    analysis_ms: float          # with recording and grouping, by the constants of the device
    compute_ms: float           # forward and backward pass, predicted
    step_ms: float
    times_alone: float          # how many times as fast as policy "none" at the same grain
    times_operators: float      # how many times as fast as policy "none" at operator grain

    @property
    def analysis_us_per_sample(self) -> float:
        return self.analysis_ms * 1e3 / self.samples


# ---- simulation --------------------------------------------------------------------------------------------------

def simulate(samples: Sequence[Sample], model: Model, grains: Sequence[str] | None = None,
             policies: Sequence[str] = tuple(POLICIES), batch: int = 25, devices: Sequence[Device] = (DEFAULT,),
             progress: bool = False) -> list[Row]:
    """Plan mini-batches at every grain, by every policy and for every device.

    The time of a policy is that of this machine, with all compiled; at grain "graph" also with all structures known, as
    they are from the second epoch on. The constants of the device for recording and grouping calls come on top.

    Parameters
    ----------
    samples : mini-batches of `batch` are taken one after the other; a rest is left out
    model : Model
    grains : by default all that the model has
    policies : names of policies
    devices : what is predicted for; names must differ
    progress : show a line on stderr

    Returns
    -------
    Row for every device, grain and policy, in this order
    """
    grains = model.grains if grains is None else grains
    _check_names("grain", grains, model.grains)
    _check_names("policy", policies, tuple(POLICIES))
    batches = [samples[k:k + batch] for k in range(0, len(samples) - batch + 1, batch)] if batch > 0 else []
    if not batches:
        raise ValueError(f"{len(samples)} samples in mini-batches of {batch}: expected at least one mini-batch")
    children = [len(reads) for part in batches for sample in part for reads in sample.reads if reads]
    cut = {}
    for name in dict.fromkeys(["operator", *grains]):           # operators run one by one are what all is compared with
        grain = Grain(model, name, float(np.mean(children)) if children else 1.0)
        cut[name] = grain, [grain.calls(part) for part in batches]
    rows = []
    with tqdm(total=len(devices) * len(grains) * len(policies), desc="simulating", file=sys.stderr,
              disable=not progress) as bar:
        for device in devices:
            costs = {name: _costs_of(grain, device) for name, (grain, _) in cut.items()}
            alone = {name: _figures(name, "none", calls, costs[name]) for name, (_, calls) in cut.items()}
            for name in grains:
                for policy in policies:
                    found = alone[name] if policy == "none" else _figures(name, policy, cut[name][1], costs[name])
                    rows.append(_row(device, name, policy, batch, found, alone[name], alone["operator"]))
                    bar.update()
    return rows


def _check_names(what: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise ValueError(f"{what} {unknown[0]!r}: expected some of {', '.join(allowed)}" if unknown else
                         f"expected at least one {what}")


class _Costs(NamedTuple):
    """Microseconds of each class, both directions together: float64 arrays, shape (classes,)."""

    device: Device
    launch_us: Any
    row_us: Any
    once_us: Any                # what a flush does once for all calls of the class
    class_us: Any               # of having the class in a flush at all


def _costs_of(grain: Grain, device: Device) -> _Costs:
    model = CostModel(device)
    works = [[work for work in both if work is not None] for both in grain.works]
    parts = np.array([np.sum([model.parts_us(work) for work in both], axis=0) for both in works])
    class_us = device.class_us * np.array([len(both) for both in works])
    launch_us, row_us, once_us = parts.T.copy()         # rows of their own: the policies want them contiguous
    return _Costs(device, launch_us, row_us, once_us - class_us, class_us)


class _Figures(NamedTuple):
    """Of each mini-batch: float64 arrays; but `rows` are those of all launches together."""

    calls: Any
    launches: Any
    rows: Any
    policy_us: Any
    analysis_us: Any
    compute_us: Any


def _figures(grain: str, policy: str, batches: Sequence[Calls], costs: _Costs) -> _Figures:
    device, per_batch, rows = costs.device, [], []
    for calls in batches:
        num_calls = len(calls.call_class)
        problem, launch, policy_us = _timed_plan(grain, policy, calls, costs)
        check_plan(problem, launch)             # else its launches would mean nothing
        counts = np.bincount(calls.call_class, minlength=len(costs.once_us))
        once = counts if policy == "none" else np.minimum(counts, 1)
        compute_us = (predicted_us(problem, launch) + 2 * device.flush_us + np.sum(costs.once_us * once)
                      + np.sum(costs.class_us[counts > 0]))
        analysis_us = 0.0 if policy == "none" else policy_us + device.analysis_us + num_calls * (
            device.analysis_us_per_call + device.record_us_per_call)
        rows.append(np.bincount(launch))
        per_batch.append((num_calls, len(rows[-1]), policy_us, analysis_us, compute_us))
    calls_each, launches, *times = np.array(per_batch, np.float64).T
    return _Figures(calls_each, launches, np.concatenate(rows), *times)


def _timed_plan(grain: str, policy: str, calls: Calls, costs: _Costs) -> tuple[Problem, Any, float]:
    """The problem, the launch of each call, and the microseconds that the policy took to find it."""
    times, rows = [], np.ones_like(calls.call_class)
    for _ in range(1 + _REPEATS):               # the first may compile, or meet new structures
        # anew each time: a problem remembers what policies find out about it
        problem = Problem(calls.call_class, rows, calls.indptr, calls.producers, costs.launch_us, costs.row_us)
        if policy == "none":                    # also at grain "graph" nothing is shared
            return problem, POLICIES[policy].plan(problem), 0.0
        start = time.perf_counter()
        launch = plan_graphs(problem, POLICIES[policy]) if grain == "graph" else POLICIES[policy].plan(problem)
        times.append(time.perf_counter() - start)
    return problem, launch, min(times) * 1e6


def _row(device: Device, grain: str, policy: str, batch: int, found: _Figures, alone: _Figures,
         operators: _Figures) -> Row:
    def step_ms(figures: _Figures) -> float:
        return float(np.mean(figures.analysis_us + figures.compute_us)) / 1e3

    calls, launches, policy_us, analysis_us, compute_us = (
        float(np.mean(part)) for part in (found.calls, found.launches, *found[3:]))
    return Row(device.name, grain, policy, batch, calls, launches, remaining=launches / float(alone.launches.mean()),
               mean_rows=float(found.rows.mean()), median_rows=float(np.median(found.rows)),
               policy_ms=policy_us / 1e3, analysis_ms=analysis_us / 1e3, compute_ms=compute_us / 1e3,
               step_ms=step_ms(found), times_alone=step_ms(alone) / step_ms(found),
               times_operators=step_ms(operators) / step_ms(found))


# ---- what is read ------------------------------------------------------------------------------------------------

_COLUMNS = (        # title, field, format
    ("grain", "grain", ""), ("policy", "policy", ""), ("calls", "calls", ",.0f"), ("launches", "launches", ",.1f"),
    ("remaining", "remaining", ".2%"), ("rows/launch", "mean_rows", ",.1f"), ("median", "median_rows", ",g"),
    ("policy ms", "policy_ms", ",.3f"), ("analysis ms", "analysis_ms", ",.2f"), ("compute ms", "compute_ms", ",.2f"),
    ("step ms", "step_ms", ",.2f"), ("x alone", "times_alone", ",.2f"), ("x operators", "times_operators", ",.2f"))


_LEGEND = """\
Means of a mini-batch. remaining: launches, as a share of those of policy none at the same grain. policy: planning, as
timed here; analysis: with recording and grouping calls, by the constants of the device. compute: forward and backward
pass, predicted by the cost model. x alone, x operators: times as fast as policy none at the same grain, and at operator
grain. * is the fastest step."""


def table(rows: Sequence[Row], title: str = "") -> str:
    """The rows as text, device after device; the fastest step of each has a star."""
    lines = [title] if title else []
    for device, group in groupby(rows, key=lambda row: row.device):
        part = list(group)
        cells = [[name for name, _, _ in _COLUMNS]]
        cells += [[format(getattr(row, field), form) for _, field, form in _COLUMNS] for row in part]
        widths = [max(len(line[k]) for line in cells) for k in range(len(_COLUMNS))]
        best = min(part, key=lambda row: row.step_ms)
        lines += ["", device]
        for row, line in zip([None, *part], cells):
            words = [cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths))]
            lines.append(("* " if row is best else "  ") + "  ".join(words).rstrip())
    return "\n".join([*lines, "", _LEGEND])


def write_json(path: str | os.PathLike[str], rows: Sequence[Row], settings: dict[str, Any],
               devices: Sequence[Device]) -> None:
    """The settings, the constants of the devices, and the rows."""
    content = {"settings": settings, "devices": [device.to_dict() for device in devices],
               "rows": [asdict(row) for row in rows]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_COLOURS = dict(zip(GRAINS, ("tab:red", "tab:orange", "tab:cyan", "tab:blue", "tab:green")))
_MARKERS = {"none": "<", "depth": "o", "agenda": "s", "cost": "D"}
_LABELS = {"none": "none (no analysis)"}
#: where the name of a grain stands: the three coarse ones are close together, and so are the two fine ones
_NAME_AT = {"kernel": ((9, 0), "left", "center"), "operator": ((-9, 0), "right", "center"),
            "subgraph-any": ((0, 8), "center", "bottom"), "subgraph": ((-9, 0), "right", "center"),
            "graph": ((0, -8), "center", "top")}


def plot(rows: Sequence[Row], path: str | os.PathLike[str], title: str = "") -> list[str]:
    """Draw what analysis costs against what it brings; the ending names the format, without one PNG and SVG.

    The first panel has the rows a launch, for the first device; then one panel a device has the speed of a step. Policy
    "none" analyzes nothing; on a logarithmic axis it stands at the left edge.

    Returns
    -------
    the files that were written
    """
    from matplotlib.figure import Figure

    name = os.fspath(path)
    names = [name] if Path(name).suffix else [f"{name}.png", f"{name}.svg"]
    by_device = {device: list(part) for device, part in groupby(rows, key=lambda row: row.device)}
    panels = [("what shares a launch", "mean_rows", next(iter(by_device.values())))]
    panels += [(f"a step on {device}", "times_operators", part) for device, part in by_device.items()]
    height = -(-len(panels) // 2)
    figure = Figure(figsize=(12, 4.5 * height), layout="constrained")
    for k, (what, field, part) in enumerate(panels):
        axes = figure.add_subplot(height, 2, k + 1)
        _draw_panel(axes, part, field)
        axes.set(title=what, xlabel="analysis, us a sample (logarithmic)",
                 ylabel="rows a launch" if field == "mean_rows" else "times as fast as operators one by one")
    handles = [axes.plot([], [], "s", color=_COLOURS[grain], label=grain)[0]
               for grain in dict.fromkeys(row.grain for row in rows)]
    handles += [axes.plot([], [], _MARKERS[policy], color="0.3", label=_LABELS.get(policy, policy))[0]
                for policy in dict.fromkeys(row.policy for row in rows)]
    handles += axes.plot([], [], "-", color="0.6", label="best policy of each grain")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(title, fontsize=10)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    for file in names:
        figure.savefig(file, dpi=120)
    return names


def _draw_panel(axes: Any, rows: Sequence[Row], field: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    spent = [row.analysis_us_per_sample for row in rows if row.policy != "none"]
    edge = min(spent, default=1.0) / 2
    best: dict[str, Row] = {}
    for row in rows:
        axes.plot(row.analysis_us_per_sample or edge, getattr(row, field), _MARKERS[row.policy],
                  color=_COLOURS[row.grain], alpha=0.8)
        if row.policy != "none" and (row.grain not in best or getattr(row, field) > getattr(best[row.grain], field)):
            best[row.grain] = row
    points = [(best[grain].analysis_us_per_sample, getattr(best[grain], field)) for grain in GRAINS if grain in best]
    axes.plot([x for x, _ in points], [y for _, y in points], "-", color="0.6", zorder=1)
    for grain, point in zip([grain for grain in GRAINS if grain in best], points):
        offset, ha, va = _NAME_AT[grain]
        axes.annotate(grain, point, offset, textcoords="offset points", ha=ha, va=va, fontsize=8, zorder=1.5,
                      color=_COLOURS[grain], bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(edge / 1.5, 2.5 * max(spent, default=edge))       # room for the names at the right
    axes.margins(y=0.1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)


# ---- the command -------------------------------------------------------------------------------------------------

def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynbatch simulate`."""
    parser.add_argument("--model", choices=list(MODELS), default="sick", help="default: sick")
    parser.add_argument("--data", metavar="DIR", help="folder with sick/ and sst/; else that of "
                        f"{DATA_VARIABLE}, or shared/data beside the clone, or generated trees")
    parser.add_argument("--shape", choices=list(SHAPES), default="binary", help="of --model trees; default: binary")
    parser.add_argument("--batch", type=int, metavar="N", help="samples a mini-batch; default: "
                        + ", ".join(f"{size} ({name})" for name, size in _BATCH.items()))
    parser.add_argument("--samples", type=int, metavar="N", help=f"default: {_BATCHES} mini-batches")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples and their order")
    parser.add_argument("--hidden", type=int, default=150, metavar="N", help="size of the states; default: 150")
    parser.add_argument("--embed", type=int, default=300, metavar="N", help="size of the word vectors; default: 300")
    parser.add_argument("--grains", metavar="A,B", help=f"some of {', '.join(GRAINS)}")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B", help="some of %(default)s")
    parser.add_argument("--gpu-launch-us", default="5,10", metavar="X,Y",
                        help="of described GPUs: microseconds to start a kernel; default: %(default)s")
    parser.add_argument("--plot", metavar="PATH", help="draw it; without an ending PATH.png and PATH.svg")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")


def run(options: argparse.Namespace) -> int:
    """`dynbatch simulate`: print the table; write the plot and the numbers where they are asked for."""
    model = Model(options.model, options.hidden, options.embed)
    batch = _BATCH[model.name] if options.batch is None else options.batch
    count = _BATCHES * batch if options.samples is None else options.samples
    devices = [load() or DEFAULT, *map(_described_gpu, options.gpu_launch_us.split(","))]
    if devices[0] is DEFAULT:
        print("this machine was not measured yet (`dynbatch calibrate` does it): typical constants are used",
              file=sys.stderr)
    samples, origin = _samples(options, count)
    rows = simulate(samples, model, options.grains.split(",") if options.grains else None, options.policies.split(","),
                    batch, devices, progress=True)
    settings = {"model": model.name, "data": origin, "batch": batch, "mini-batches": len(samples) // batch,
                "hidden": model.hidden, "embed": model.embed, "seed": options.seed}
    title = "simulated: " + ", ".join(f"{name} {value}" for name, value in settings.items())
    print(table(rows, title))
    if options.json:
        write_json(options.json, rows, settings, devices)
    for file in plot(rows, options.plot, title) if options.plot else ():
        print(f"drawn: {file}", file=sys.stderr)
    return 0


def _described_gpu(text: str) -> Device:
    try:
        return replace(gpu(float(text)), name=f"described GPU, {float(text):g} us to start a kernel")
    except ValueError as err:
        raise ValueError(f"--gpu-launch-us {text}: expected microseconds, such as 5 or 5,10") from err


def _samples(options: argparse.Namespace, count: int) -> tuple[list[Sample], str]:
    """The samples, and where they are from."""
    if options.model == "trees":
        return generate("trees", count, options.seed, options.shape), f"generated {options.shape} trees"
    named = options.data or os.environ.get(DATA_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    if named and not folder.is_dir():
        raise ValueError(f"there is no data folder {named}; without --data and {DATA_VARIABLE} trees are generated")
    if not folder.is_dir():
        print(f"no data folder was found (--data DIR or {DATA_VARIABLE} names one): trees that look like those of "
              f"{options.model} are generated", file=sys.stderr)
        return generate(options.model, count, options.seed), "generated look-alikes"
    return (read_sick if options.model == "sick" else read_sst)(folder, count, options.seed), "real"
