"""From times to what is read: figures of each system, bars, a table, a JSON file and a plot."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .harness import Job, Result
from .systems import SYSTEMS

__all__ = ["Bar", "bars_of", "entry_of", "plot", "table", "title_of", "write_json"]

OURS, CAVS, LIMIT = "ours-vertex", "ours-cavs", "limit"


# ---- figures ---------------------------------------------------------------------------------


def ratio(slower: Result, faster: Result) -> float | None:
    """How many times as long the first needs, on the mini-batches that both did; a median."""
    both = slower.ms.keys() & faster.ms.keys()
    return statistics.median(slower.ms[k] / faster.ms[k] for k in both) if both else None


def figures(result: Result, batch: int) -> dict[str, Any]:
    """Median and quartiles of the milliseconds of a step, and samples a second."""
    spent = sorted(result.ms.values())
    low, middle, high = statistics.quantiles(spent, n=4, method="inclusive") if len(spent) > 1 else spent * 3
    return {"ms": middle, "ms_quartiles": [low, high], "steps": len(spent), "samples_per_second": batch / middle * 1e3}


def entry_of(job: Job, results: dict[str, Result]) -> dict[str, Any]:
    """One job as it stands in the JSON file."""
    systems = {}
    for name, result in results.items():
        if not result.ms:
            systems[name] = {"absent": result.absent or "it was not timed", "mismatch": result.mismatch}
            continue
        systems[name] = {**figures(result, job.options["batch"]), "versions": result.versions,
                         "times_ours": _against(result, results.get(OURS)),
                         "times_limit": _against(result, results.get(LIMIT))}
    return {"workload": job.workload, "options": job.options, "training": job.training,
            "data": "real" if any(result.real for result in results.values()) else "generated", "systems": systems,
            "bars": [asdict(bar) for bar in bars_of(job, results)]}


def _against(result: Result, other: Result | None) -> float | None:
    return None if other is None else ratio(result, other)


# ---- bars ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A ratio to reach: how many times as long `slower` needs as `faster`, at least or at most."""

    slower: str
    faster: str
    bound: float
    at_least: bool = True
    found: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        word = {True: "reached", False: "NOT REACHED", None: "not measured"}[self.reached]
        found = "" if self.found is None else f": {self.found:.2f}"
        if self.faster == LIMIT:
            what = f"{self.slower} needs at most {self.bound:g} times the limit"
        else:
            what = f"{self.faster} is at least {self.bound:g} times as fast as {self.slower}"
        return f"{what}{found} ({word})"


_BARS = {face: {
    "treelstm-sst": [Bar("dynet-autobatch", face, 2.7), Bar("torch-batched", face, 2.2), Bar("mxnet-loop", face, 100),
                     Bar(face, LIMIT, 1.6, at_least=False)],
    "treelstm-sick": [Bar("dynet-autobatch", face, 2.5), Bar("mxnet-loop", face, 60)],
    "": [Bar("dynet-autobatch", face, 1.5), Bar("torch-batched", face, 1.0)],       # all others
} for face in (OURS, CAVS)}
_OP_BARS = {"treelstm-sick": [Bar("mxnet-loop", "ours-op", 6.25)]}


def bars_of(job: Job, results: dict[str, Result]) -> list[Bar]:
    """The bars of a job with what was found: of training with the first options of its workload."""
    from .workloads import options_of

    if not job.training or job.options != options_of(job.workload):
        return []
    filled = []
    wanted = [bar for bars in _BARS.values() for bar in bars.get(job.workload, bars[""])]
    for bar in wanted + _OP_BARS.get(job.workload, []):
        if bar.slower in results and bar.faster in results:
            found = ratio(results[bar.slower], results[bar.faster])
            filled.append(Bar(bar.slower, bar.faster, bar.bound, bar.at_least, found))
    return filled


# ---- what is read ----------------------------------------------------------------------------


def title_of(entry: dict[str, Any]) -> str:
    options = ", ".join(f"{name} {value}" for name, value in entry["options"].items())
    return f"{entry['workload']}, {'training' if entry['training'] else 'inference'} ({options}; {entry['data']} data)"


def table(entry: dict[str, Any]) -> str:
    """A job as a markdown table, with its bars below."""
    lines = [f"### {title_of(entry)}", "",
             "| system | ms a step | quartiles | n | samples/s | ÷ ours | ÷ limit |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    notes = []
    for name, facts in entry["systems"].items():
        title = f"{SYSTEMS[name].title} (`{name}`)"
        if "absent" in facts:
            lines.append(f"| {title} | absent | | | | | |")
            notes.append(f"{name} is absent: {facts['absent']}")
            continue
        low, high = facts["ms_quartiles"]
        times = ["" if facts[key] is None else f"{facts[key]:.2f}" for key in ("times_ours", "times_limit")]
        lines.append(f"| {title} | {facts['ms']:.4g} | {low:.4g} to {high:.4g} | {facts['steps']} "
                     f"| {facts['samples_per_second']:,.0f} | {' | '.join(times)} |")
    bars = [Bar(**bar) for bar in entry["bars"]]
    lines += [""] * bool(notes or bars) + [f"- {text}" for text in notes] + [f"- {bar}" for bar in bars]
    return "\n".join(lines) + "\n"


def write_json(path: Path, entries: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "jobs": entries}, indent=1) + "\n")


def plot(entry: dict[str, Any], path: Path) -> None:
    """Bars with the samples a second of every system, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    present = {name: facts for name, facts in entry["systems"].items() if "absent" not in facts}
    if not present:
        return
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(present) + 1.5))
    colours = ["tab:orange" if name.startswith("ours") else "tab:grey" if name == LIMIT else "tab:blue"
               for name in present]
    bars = axes.barh(list(present), [facts["samples_per_second"] for facts in present.values()], color=colours)
    axes.bar_label(bars, labels=[f"{facts['samples_per_second']:,.0f}" for facts in present.values()], padding=3)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("samples a second (logarithmic)")
    axes.set_title(title_of(entry), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
