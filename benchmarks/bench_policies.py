"""Which policy and grain is fastest, and does policy="auto" find it?

    python benchmarks/bench_policies.py [--workload NAME ..] [--backend NAME ..] [--steps N] [--quick] [--json FILE]

Whole training steps (record, analysis, forward, backward, update, wait) of every workload with our library alone, on
the native backend and with MXNet's operators (which a GPU runs, too: a launch costs much more there), with every fixed
setting and with "auto". All settings of a workload take turns in one process, on the same mini-batches, so that a
machine that changes its speed disturbs all alike. Two regimes:

    new     no mini-batch comes twice, so plans are made anew (unless all mini-batches have the same structure)
    warm    the same few mini-batches again and again: plans come from the cache

Tables go to standard output, figures and a plot to benchmarks/results. The exit code is 1 if two settings computed
different losses from the same parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gluon_dynbatch as gdb
from benchmarks import machine, workloads
from benchmarks.harness import LOSS_TOLERANCE, ROOT, Plan, Result
from benchmarks.report import figures, title_of
from benchmarks.run import QUIET, RESULTS
from benchmarks.systems.gluon import System
from benchmarks.workloads.base import data_folder
from cavs_core.mxnet_compat import mx
from gluon_dynbatch import choose, graphs, joining, logs, merging, planning, samples, sums
from gluon_dynbatch.auto import Auto
from gluon_dynbatch.costs import weigh
from gluon_dynbatch.costs.devices import load, place_of
from gluon_dynbatch.last_used import LastUsed
from gluon_dynbatch.methods import Method
from gluon_dynbatch.report import Stats

REGIMES = {"new": "new mini-batches", "warm": "warm plan cache"}
STEPS, QUICK_STEPS = 40, 16     # timed, of each setting in each regime
WARM_UP, MOST_WARM_UP = 25, 60  # steps before: "auto" tries methods for about 20, more if something is compiled
CALM = 6                        # steps at the end of the warm-up with "auto" settled and nothing compiled
CHECKED, REPEATED = 2, 4        # mini-batches of the check, and of the warm regime
MOST = 3.0                      # a setting is timed if its steps take at most so many times depth's
BACKENDS = ("native", "mxnet")
AUTO = "auto"


# ---- one workload, in its own process ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Case:
    """A workload with its options, and the variant of its model: marked cells ("vertex"), or plain Gluon ("op")."""

    workload: str
    variant: str
    options: dict[str, int]
    steps: int
    data: str | None = None         # folder of the real data; None: generated
    backend: str = "native"

    @property
    def name(self) -> str:
        variant, backend = self.variant.replace("vertex", ""), self.backend.replace("native", "")
        return "-".join(filter(None, (self.workload, variant, backend)))

    @property
    def settings(self) -> dict[str, dict[str, str]]:
        """Options of the scope by name."""
        grains = ("vertex", "graph") if self.variant == "vertex" else (self.variant,)
        methods = [Method(policy, grain) for grain in grains for policy in ("depth", "agenda", "cost")]
        options = {str(method): method._asdict() for method in (*methods, Method("none", self.variant))}
        return {**options, AUTO: {"policy": AUTO, "granularity": AUTO if self.variant == "vertex" else self.variant}}

    def batches(self, regime: str) -> tuple[list[int], list[int]]:
        """The mini-batches of the warm-up, of which the last may be left out, and those of the timed steps."""
        if regime == "warm":
            return [k % REPEATED for k in range(MOST_WARM_UP)], [k % REPEATED for k in range(self.steps)]
        first = CHECKED + MOST_WARM_UP
        return list(range(CHECKED, first)), list(range(first, first + self.steps))


@dataclass(frozen=True)
class Step:
    """What a step took and did."""

    loss: float
    ms: float
    rows: int
    stats: Stats
    compiled: bool = False          # whether kernels were met for the first time
    settled: bool = True            # whether "auto" has chosen a method


class Memory:
    """What the library remembers from step to step, for one setting alone.

    So a setting runs as if in a process of its own: it finds no plan that another one made, and its cost model and its
    "auto" learn from its own steps. Parameters and kernels are shared: they are the same for all, and a copy for each
    setting would only push those of the others out of the processor's caches.
    """

    def __init__(self) -> None:
        self.auto = Auto()
        self._own: list[tuple[Any, str, Any]] = [
            (planning, "PLANS", planning.PlanCache()), (merging, "HABITS", joining.Habits()),
            (merging, "SUM_ROLES", sums.SumRoles()), (merging, "FORMS", samples.Forms(merging.FORMS.max_bytes)),
            (weigh, "_models", {}), (graphs, "_known", OrderedDict()),
            (choose, "AUTO", self.auto), (choose, "IDLE", LastUsed(choose.IDLE.most)),
            (choose, "REPEATS", planning.PlanCache(choose.REPEATS.max_bytes)),
            (choose, "SEEN", LastUsed(choose.SEEN.most)),
            (logs, "RECORDINGS", planning.PlanCache(logs.RECORDINGS.max_bytes))]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name, own in self._own:
                stack.enter_context(mock.patch.object(module, name, own))
            yield


class Watched(System):
    """A system that keeps its last scope."""

    def _losses(self, k: int) -> Any:
        batch = self.batches[k % len(self.batches)]
        with gdb.batching(**self.scope) as self.last:
            return self.model.losses(batch), len(batch)


class Runner:
    """One model that takes steps with any setting."""

    def __init__(self, case: Case):
        num_batches = CHECKED + MOST_WARM_UP + case.steps
        made = workloads.make(case.workload, case.options, num_batches, Path(case.data) if case.data else None)
        self.case, self.real, self.first = case, made.real, made.params
        self.system: Any = Watched(made, case.variant)
        self._kernels: set[str] = set()

    def reset(self) -> None:
        for name, value in self.first.items():
            self.system.params[name].set_data(mx.nd.array(value))

    def step(self, setting: str, memory: Memory, k: int) -> Step:
        """A step on mini-batch k."""
        self.system.scope = self.case.settings[setting]
        with memory.used():
            start = time.perf_counter()
            loss = self.system.step(k)
            ms = (time.perf_counter() - start) * 1e3
        scope, self.system.last = self.system.last, None
        kernels = {source for flush in scope.flushes for _, sources in flush.kernels() for source in sources}
        compiled = not kernels <= self._kernels
        self._kernels |= kernels
        rows = sum(launch.rows for flush in scope.flushes for launch in flush.launches)
        settled = setting != AUTO or any(map(memory.auto.is_settled, memory.auto.models))
        return Step(loss, ms, rows, scope.stats, compiled, settled)

    def check(self, setting: str) -> list[float]:
        """From the first parameters: the loss of the first mini-batch, and after an update that of the second."""
        self.reset()
        memory = Memory()
        first = self.step(setting, memory, 0).loss
        with memory.used():
            return [first, self.system.loss(1)]

    def time(self, settings: Sequence[str], regime: str, bar: Any) -> dict[str, list[Step]]:
        """The timed steps of each setting. They take turns in an order drawn for each mini-batch: the first is slower.
        """
        warm_up, timed = self.case.batches(regime)
        memories = {name: Memory() for name in settings}
        for name, memory in memories.items():
            done: list[Step] = []
            for k in warm_up:
                done.append(self.step(name, memory, k))
                bar.update()
                least = WARM_UP if name == AUTO else CALM
                if len(done) >= least and all(step.settled and not step.compiled for step in done[-CALM:]):
                    break
        steps: dict[str, list[Step]] = {name: [] for name in settings}
        gc.collect()
        gc.freeze()                 # what all settings together hold is more than a training has for the collector
        for turn, k in enumerate(timed):
            for name in random.Random(turn).sample(list(settings), len(settings)):
                steps[name].append(self.step(name, memories[name], k))
                bar.update()
        gc.unfreeze()
        return steps


def run_case(case: Case) -> dict[str, Any]:
    """Check and time all settings of a workload."""
    runner, depth = Runner(case), str(Method("depth", case.variant))
    absent = mismatches({name: runner.check(name) for name in case.settings}, depth)
    runner.reset()
    # Parameters stay as they are from here on, for an update does the same work with any rate. So all steps on a
    # mini-batch compute the same, whoever is first and however often it comes.
    runner.system.trainer.set_learning_rate(0.0)
    ms = {name: min(runner.step(name, Memory(), k).ms for k in range(CHECKED)) for name in case.settings}
    for name, spent in ms.items():
        if spent > MOST * ms[depth]:
            absent.setdefault(name, {"absent": f"it was not timed, because a step takes {spent:.0f} ms, "
                                               f"{spent / ms[depth]:.0f} times as long as with depth"})
    settings = [name for name in case.settings if name not in absent]
    steps: dict[str, dict[str, list[Step]]] = {}
    with tqdm(total=len(REGIMES) * (WARM_UP + len(settings) * (CALM + case.steps)), desc=case.name, unit="step",
              file=sys.stderr) as bar:
        for regime in REGIMES:
            steps[regime] = runner.time(settings, regime, bar)
            absent.update(mismatches({name: [s.loss for s in done] for name, done in steps[regime].items()}, depth))
    regimes = {regime: compare({name: s for name, s in done.items() if name not in absent}, depth,
                               case.options["batch"]) for regime, done in steps.items()}
    return {"workload": case.name, "model": case.workload, "options": case.options, "training": True,
            "data": "real" if runner.real else "generated", "regimes": regimes, "absent": absent,
            "costs": "measured on this machine" if load(place_of(case.backend, mx.cpu())) else "built in"}


# ---- figures -----------------------------------------------------------------------------------------------------

def mismatches(losses: Mapping[str, Sequence[float]], reference: str) -> dict[str, dict[str, Any]]:
    """Settings whose losses differ from the reference's by more than float32 rounding, and how."""
    found: dict[str, dict[str, Any]] = {}
    for name, mine in losses.items():
        for k, (loss, wanted) in enumerate(zip(mine, losses[reference])):
            if not abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted):          # also if one is no number
                text = f"loss {k} is {loss:.7g}, that of {reference} is {wanted:.7g}"
                found.setdefault(name, {"absent": text, "mismatch": True})
    return found


def error(predicted: float, measured: float) -> float | None:
    """Relative; None where nothing was predicted."""
    return abs(predicted - measured) / measured if predicted > 0 and measured > 0 else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare(steps: Mapping[str, Sequence[Step]], depth: str, batch: int) -> dict[str, Any]:
    """The figures of each setting in one regime, and which fixed one is the best.

    A ratio is the median of the ratios on each mini-batch. Turns in which kernels were met for the first time do not
    count: a training that goes on has no such steps.
    """
    turns = [turn for turn in zip(*steps.values()) if not any(step.compiled for step in turn)]
    if depth not in steps or not turns:
        return {"best": None, "settings": {}}
    counted = dict(zip(steps, zip(*turns)))

    def ratio(name: str, other: str) -> float:
        return statistics.median(a.ms / b.ms for a, b in zip(counted[name], counted[other]))

    best, found = min((name for name in counted if name != AUTO), key=lambda name: ratio(name, depth)), {}
    for name, done in counted.items():
        stats = [step.stats for step in done]
        found[name] = {
            **figures(Result({k: step.ms for k, step in enumerate(done)}), batch),
            "to_best": ratio(name, best), "to_depth": ratio(name, depth),
            "launches": median(s.launches for s in stats), "rows": median(s.rows / s.stats.launches for s in done),
            "analyze_ms": median(s.analyze_ms for s in stats),
            "analyze_share": median(s.stats.analyze_ms / s.ms for s in done),
            "settled": done[0].settled, "known": sum(s.cache_hits for s in stats) / sum(s.flushes for s in stats),
            "methods": dict(Counter(method for s in stats for method in s.methods)),
            "forward_error": median(error(s.predicted_execute_ms, s.execute_ms) for s in stats),
            "backward_error": median(error(s.predicted_backward_ms, s.backward_ms) for s in stats)}
    return {"best": best, "settings": found}


def bars_of(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What "auto" and the cost model are to reach, whether they did, and the figure of each workload."""
    def told(text: str, form: str, found: dict[str, float], reached: bool) -> str:
        word = "not measured" if not found else "reached" if reached else "NOT REACHED"
        by_value = sorted(found.items(), key=lambda item: item[1])
        return ", ".join([f"{text}: {word}", *(f"{name} {value:{form}}" for name, value in by_value)])

    def of_auto(regime: str, key: str) -> dict[str, float]:
        autos = {entry["workload"]: entry["regimes"][regime]["settings"].get(AUTO) for entry in entries}
        return {name: auto[key] for name, auto in autos.items() if auto is not None}

    bars = []
    for regime, title in REGIMES.items():
        to_best, to_depth = of_auto(regime, "to_best"), of_auto(regime, "to_depth")
        better = {entry["model"] for entry in entries if to_depth.get(entry["workload"], 1.0) <= 0.9}
        bars += [told(f"{title}: auto within 5% of the best fixed setting on every workload", ".3f", to_best,
                      max(to_best.values(), default=0.0) <= 1.05),
                 told(f"{title}: auto at least 10% better than depth on two workloads", ".3f", to_depth,
                      len(better) >= 2)]
    shares = of_auto("warm", "analyze_share")
    errors = {entry["workload"]: median(f[key] for part in entry["regimes"].values() for f in part["settings"].values()
                                        for key in ("forward_error", "backward_error")) for entry in entries}
    known = {name: value for name, value in errors.items() if value is not None}
    middle = statistics.median(known.values()) if known else 0.0
    return [*bars, told("analysis with auto under 5% of a steady step with the cache warm", ".1%", shares,
                        max(shares.values(), default=0.0) < 0.05),
            told("median prediction error under 30%", ".0%", {**known, "all workloads": middle} if known else {},
                 middle < 0.3)]


# ---- what is read ------------------------------------------------------------------------------------------------

HEADS = ("setting", "launches", "rows a launch", "analysis ms", "of the step", "plans known", "ms a step", "quartiles",
         "n", "÷ best fixed", "÷ depth", "error forward", "error backward")


def table(entry: Mapping[str, Any]) -> str:
    """A workload as markdown: a table for each regime, what "auto" settled on, and what is absent."""
    lines = [f"### {title_of(dict(entry))}, costs {entry['costs']}"]
    for regime, part in entry["regimes"].items():
        lines += ["", f"{REGIMES[regime]}; the best fixed setting is {part['best']}", "",
                  f"| {' | '.join(HEADS)} |", f"| --- |{' ---: |' * (len(HEADS) - 1)}"]
        for name, f in part["settings"].items():
            low, high = f["ms_quartiles"]
            errors = ["" if f[key] is None else f"{f[key]:.0%}" for key in ("forward_error", "backward_error")]
            lines.append(f"| {name} | {f['launches']:.0f} | {f['rows']:.1f} | {f['analyze_ms']:.2f} "
                         f"| {f['analyze_share']:.1%} | {f['known']:.0%} | {f['ms']:.4g} | {low:.4g} to {high:.4g} "
                         f"| {f['steps']} | {f['to_best']:.3f} | {f['to_depth']:.3f} | {' | '.join(errors)} |")
        auto = part["settings"].get(AUTO, {"settled": False, "methods": {}})
        word = "settled on" if auto["settled"] else "HAD NOT SETTLED and ran"
        lines += ["", *(f"- auto {word} {method}: {count} steps" for method, count in auto["methods"].items())]
    return "\n".join([*lines, *(f"- {name} is absent: {f['absent']}" for name, f in entry["absent"].items())]) + "\n"


def plot(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The time of a step relative to depth's: a row for each workload, a column for each regime."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.4 * len(entries)))
    for row, entry in zip(figure.subplots(len(entries), len(REGIMES), squeeze=False), entries):
        for axes, (regime, title) in zip(row, REGIMES.items()):
            ratios = {name: f["to_depth"] for name, f in entry["regimes"][regime]["settings"].items()}
            colours = ["tab:orange" if name == AUTO else "tab:blue" for name in ratios]
            bars = axes.barh(list(ratios), list(ratios.values()), color=colours)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.invert_yaxis()
            axes.set_title(f"{entry['workload']}, {title}: ms a step relative to depth", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- all workloads -----------------------------------------------------------------------------------------------

def measure(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own."""
    threads = str(Plan().threads)
    env = {**os.environ, "DYNBATCH_BACKEND": case.backend, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env).stdout
    return dict(json.loads(output.splitlines()[-1]))


def run_cases(cases: Sequence[Case], json_path: Path) -> int:
    """Run, print and store; the exit code."""
    facts, entries, bars = machine.facts(), [], []
    json_path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        entries.append(measure(case))
        bars = bars_of(entries)
        print(table(entries[-1]), flush=True)
        # after every workload: a run that is stopped is not lost
        json_path.write_text(json.dumps({"machine": facts, "jobs": entries, "bars": bars}, indent=1) + "\n")
        plot(entries, json_path.with_suffix(".png"))
    load = facts["load_average"][0]
    print("\n".join(f"- {bar}" for bar in bars))
    print(f"\n{facts['cpu']}, {facts['cores']} cores, commit {facts['commit']}, {facts['date']}; load before the run "
          f"{load:.1f}{': THE MACHINE WAS NOT QUIET, do not trust the ratios' if load > QUIET else ''}\n"
          f"written: {json_path} and {json_path.stem}.png")
    wrong = [f"{entry['workload']}: {name}: {f['absent']}" for entry in entries for name, f in entry["absent"].items()
             if f.get("mismatch")]
    for text in wrong:
        print(f"ERROR: {text}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", action="append", choices=workloads.ALL, help="may be repeated; default: all")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="may be repeated; default: both")
    parser.add_argument("--steps", type=int, help=f"timed steps of each setting; {STEPS}, with --quick {QUICK_STEPS}")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures; the plot is written beside it")
    parser.add_argument("--case", help=argparse.SUPPRESS)       # one, in this process, which then prints its entry
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(run_case(Case(**json.loads(options.case)))))
        return 0
    steps = (QUICK_STEPS if options.quick else STEPS) if options.steps is None else options.steps
    if steps < 1:
        parser.error(f"--steps: expected a positive number, got {steps}")
    folder = data_folder()
    cases = [Case(name, variant, workloads.options_of(name), steps, str(folder) if folder else None, backend)
             for backend in options.backend or BACKENDS for name in options.workload or workloads.ALL
             for variant in (("vertex", "op") if name == "treelstm-sick" else ("vertex",))]
    return run_cases(cases, options.json or RESULTS / f"policies{'-quick' if options.quick else ''}.json")


if __name__ == "__main__":
    sys.exit(main())
