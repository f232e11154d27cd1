"""Which policy and grain is fastest, and does policy="auto" find it?  make bench-policies

    python benchmarks/bench_policies.py [--workload NAME ..] [--steps N] [--quick] [--json FILE]

Whole training steps (record, analysis, forward, backward, update, wait) of every workload with our library alone, on
the native backend, with every fixed setting and with "auto". All settings of a workload take turns in one process, on
the same mini-batches, so that a machine that changes its speed disturbs all alike. Two regimes:

    new     no mini-batch comes twice, so plans are made anew (unless all mini-batches have the same structure)
    warm    the same few mini-batches again and again: plans come from the cache

Tables go to standard output; they, the figures and a plot also to benchmarks/results. The exit code is 1 if two
settings computed different losses from the same parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gluon_dynbatch as gdb
from benchmarks import machine, workloads
from benchmarks.harness import LOSS_TOLERANCE, ROOT, Plan, Result
from benchmarks.report import figures, ratio, title_of
from benchmarks.run import QUIET, RESULTS
from benchmarks.systems.gluon import System
from benchmarks.workloads.base import data_folder
from cavs_core.mxnet_compat import mx
from gluon_dynbatch import choose, graphs, planning, weigh
from gluon_dynbatch.auto import Auto
from gluon_dynbatch.devices import DEFAULT
from gluon_dynbatch.methods import Method

REGIMES = {"new": "new mini-batches", "warm": "warm plan cache"}
STEPS, QUICK_STEPS = 30, 8      # timed, of each setting in each regime
WARM_UP, MOST_WARM_UP = 25, 60  # steps before: "auto" tries for about 20, more if something is compiled meanwhile
CALM = 8                        # steps at the end of the warm-up with one method, and without anything compiled
CHECKED, REPEATED = 2, 4        # mini-batches of the check, and of the warm regime
MOST_ALONE = 5.0                # policy "none" is timed if its steps take at most so many times depth's
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

    @property
    def name(self) -> str:
        return self.workload if self.variant == "vertex" else f"{self.workload}-{self.variant}"

    @property
    def depth(self) -> str:
        """The setting that others are compared with."""
        return str(Method("depth", self.variant))

    @property
    def alone(self) -> str:
        return str(Method("none", self.variant))

    @property
    def settings(self) -> dict[str, dict[str, str]]:
        """Options of the scope by name; depth is the first."""
        grains = ("vertex", "graph") if self.variant == "vertex" else (self.variant,)
        methods = [Method(policy, grain) for grain in grains for policy in ("depth", "agenda", "cost")]
        options = {str(m): m._asdict() for m in (*methods, Method("none", self.variant))}
        return {**options, AUTO: {"policy": AUTO, "granularity": AUTO if self.variant == "vertex" else self.variant}}


@dataclass(frozen=True)
class Step:
    """What a step took and did."""

    loss: float
    ms: float
    analyze_ms: float
    launches: int
    rows: int
    known: float                    # share of flushes whose plan was in the cache
    method: str
    errors: tuple[float | None, float | None]       # of the predictions for the forward and the backward pass
    compiled: bool                  # whether kernels were met for the first time: no step of a training that goes on


class Watched(System):              # type: ignore[misc]
    """A system that keeps its last scope."""

    def _losses(self, k: int) -> Any:
        batch = self.batches[k % len(self.batches)]
        with gdb.batching(**self.scope) as self.last:
            return self.model.losses(batch), len(batch)


class Memory:
    """What the library remembers from step to step, for one setting alone.

    So a setting runs as if in a process of its own: it finds no plan that another one made, and its cost model and its
    "auto" learn from its own steps. Parameters and kernels are shared: they are the same for all, and a copy for each
    setting would only push those of the others out of the processor's caches.
    """

    def __init__(self) -> None:
        self._own = [(planning, "PLANS", planning.PlanCache()), (graphs, "_known", OrderedDict()),
                     (weigh, "_models", []), (choose, "AUTO", Auto())]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name, own in self._own:
                stack.enter_context(mock.patch.object(module, name, own))
            yield


class Runner:
    """One model that takes steps with any setting."""

    def __init__(self, case: Case):
        num_batches = CHECKED + MOST_WARM_UP + case.steps
        made = workloads.make(case.workload, case.options, num_batches, Path(case.data) if case.data else None)
        self.case, self.real, self.first = case, made.real, made.params
        self.system = Watched(made, case.variant)
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
        stats = scope.stats
        kernels = {source for flush in scope.flushes for _, sources in flush.kernels() for source in sources}
        new = kernels - self._kernels
        self._kernels |= new
        return Step(loss, ms, stats.analyze_ms, stats.launches,
                    sum(launch.rows for flush in scope.flushes for launch in flush.launches),
                    stats.cache_hits / max(1, stats.flushes), " and ".join(stats.methods),
                    (relative_error(stats.predicted_execute_ms, stats.execute_ms),
                     relative_error(stats.predicted_backward_ms, stats.backward_ms)), bool(new))

    def check(self, setting: str) -> dict[int, float]:
        """The losses of the first mini-batch, and of the second after an update, from the first parameters."""
        self.reset()
        memory = Memory()
        losses = {0: self.step(setting, memory, 0).loss}
        with memory.used():
            return {**losses, 1: self.system.loss(1)}

    def warm_up(self, setting: str, memory: Memory, batches: Sequence[int], bar: Any) -> None:
        """Until nothing is compiled any more and "auto" has settled."""
        done: list[Step] = []
        for k in batches:
            last = done[-CALM:]
            if len(done) >= WARM_UP and len({s.method for s in last}) == 1 and not any(s.compiled for s in last):
                break
            done.append(self.step(setting, memory, k))
            bar.update()

    def time(self, settings: Sequence[str], regime: str, bar: Any) -> dict[str, list[Step]]:
        """The timed steps of each setting. Who begins changes from mini-batch to mini-batch."""
        if regime == "new":
            before, timed = range(CHECKED, CHECKED + MOST_WARM_UP), range(CHECKED + MOST_WARM_UP, 10 ** 9)
        else:
            before = timed = [k % REPEATED for k in range(max(MOST_WARM_UP, self.case.steps))]      # type: ignore
        memories = {name: Memory() for name in settings}
        for name, memory in memories.items():
            self.warm_up(name, memory, before, bar)
        steps: dict[str, list[Step]] = {name: [] for name in settings}
        for turn, k in zip(range(self.case.steps), timed):
            gc.collect()
            for place in range(len(settings)):
                name = settings[(turn + place) % len(settings)]
                steps[name].append(self.step(name, memories[name], k))
                bar.update()
        return steps


def run_case(case: Case) -> dict[str, Any]:
    """Check and time all settings of a workload."""
    runner = Runner(case)
    losses = {name: runner.check(name) for name in case.settings}
    absent: dict[str, dict[str, Any]] = {name: {"absent": text, "mismatch": True}
                                         for name, text in mismatches(losses, case.depth).items()}
    runner.reset()
    # Parameters stay what they are from here on, which an update does not notice: all steps on a mini-batch compute
    # the same, whoever is first, and however often a mini-batch comes.
    runner.system.trainer.set_learning_rate(0.0)
    depth_ms, alone_ms = (min(runner.step(name, Memory(), k).ms for k in range(CHECKED))
                          for name in (case.depth, case.alone))
    if alone_ms > MOST_ALONE * depth_ms:
        absent.setdefault(case.alone, {"absent": f"it was not timed: a step takes {alone_ms:.0f} ms, "
                                                 f"{alone_ms / depth_ms:.0f} times as long as with depth"})
    settings = [name for name in case.settings if name not in absent]
    steps: dict[str, dict[str, list[Step]]] = {}
    with tqdm(total=len(REGIMES) * len(settings) * (WARM_UP + case.steps), desc=case.name, unit="step",
              file=sys.stderr) as bar:
        for regime in REGIMES:
            steps[regime] = runner.time(settings, regime, bar)
            losses = {name: {k: s.loss for k, s in enumerate(done)} for name, done in steps[regime].items()}
            for name, text in mismatches(losses, case.depth).items():
                absent[name] = {"absent": text, "mismatch": True}
    device = weigh.cost_model().device
    return {"workload": case.name, "options": case.options, "training": True, "data": "real" if runner.real else
            "generated", "costs": "built in" if device == DEFAULT else "measured on this machine", "depth": case.depth,
            "regimes": {regime: compare({n: s for n, s in done.items() if n not in absent}, case.depth,
                                        case.options["batch"]) for regime, done in steps.items()}, "absent": absent}


# ---- figures -----------------------------------------------------------------------------------------------------

def relative_error(predicted: float, measured: float) -> float | None:
    """None where nothing was predicted: the cost model knows the native backend alone."""
    return abs(predicted - measured) / measured if predicted > 0 and measured > 0 else None


def mismatches(losses: Mapping[str, Mapping[int, float]], reference: str) -> dict[str, str]:
    """Settings whose losses differ from the reference's by more than float32 rounding, and how."""
    found = {}
    for name, mine in losses.items():
        for k, wanted in losses[reference].items():
            if not abs(mine[k] - wanted) <= LOSS_TOLERANCE * abs(wanted):       # also if one is no number
                found[name] = f"{name}: loss {k} is {mine[k]:.7g}, that of {reference} is {wanted:.7g}"
                break
    return found


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare(steps: Mapping[str, Sequence[Step]], depth: str, batch: int) -> dict[str, Any]:
    """The figures of each setting in one regime. Ratios are medians of the ratios on each mini-batch."""
    results = {name: Result({k: s.ms for k, s in enumerate(done) if not s.compiled}) for name, done in steps.items()}
    results = {name: result for name, result in results.items() if result.ms}
    to_depth = {name: ratio(result, results[depth]) if depth in results else None for name, result in results.items()}
    fixed = {name: value for name, value in to_depth.items() if name != AUTO and value is not None}
    best = min(fixed, key=lambda name: fixed[name]) if fixed else None
    found = {}
    for name, result in results.items():
        used = [steps[name][k] for k in result.ms]
        forward, backward = zip(*(s.errors for s in used))
        found[name] = {
            **figures(result, batch), "analyze_ms": median([s.analyze_ms for s in used]),
            "analyze_share": median([s.analyze_ms / s.ms for s in used]),
            "launches": median([s.launches for s in used]), "rows": median([s.rows / s.launches for s in used]),
            "known": statistics.mean(s.known for s in used), "methods": dict(Counter(s.method for s in used)),
            "to_depth": to_depth[name], "to_best": ratio(result, results[best]) if best is not None else None,
            "forward_error": median(forward), "backward_error": median(backward)}
    return {"best": best, "settings": found}


@dataclass(frozen=True)
class Bar:
    """Something to reach, and what was found."""

    text: str
    found: str = ""
    reached: bool | None = None

    def __str__(self) -> str:
        word = {True: "reached", False: "NOT REACHED", None: "not measured"}[self.reached]
        return f"{self.text}: {self.found + ' ' if self.found else ''}({word})"


def bars_of(entries: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """What "auto" and the cost model are to reach, over all workloads that were measured."""
    def of_auto(regime: str, key: str) -> dict[str, float]:
        autos = {entry["workload"]: entry["regimes"][regime]["settings"].get(AUTO, {}) for entry in entries}
        return {name: auto[key] for name, auto in autos.items() if auto.get(key) is not None}

    def worst(text: str, values: dict[str, float], bound: float, form: str) -> Bar:
        if not values:
            return Bar(text)
        name = max(values, key=lambda name: values[name])
        return Bar(text, f"at most {format(values[name], form)} ({name})", values[name] <= bound)

    bars = []
    for regime, title in REGIMES.items():
        bars.append(worst(f"{title}: auto within 5% of the best fixed setting on every workload",
                          of_auto(regime, "to_best"), 1.05, ".3f"))
        text, values = f"{title}: auto at least 10% better than depth on two workloads", of_auto(regime, "to_depth")
        better = {name: value for name, value in values.items() if value <= 0.9}
        # a workload counts once, also if another variant of its model is measured
        count = len({name[:-len("-op")] if name.endswith("-op") else name for name in better})
        told = ", ".join(f"{name} {value:.3f}" for name, value in sorted(values.items(), key=lambda item: item[1]))
        bars.append(Bar(text, f"on {count} ({told})", count >= 2) if values else Bar(text))
    bars.append(worst("analysis under 5% of a steady step with the cache warm, with auto",
                      of_auto("warm", "analyze_share"), 0.05, ".1%"))
    errors = {entry["workload"]: median([found[key] for regime in entry["regimes"].values() for found in
                                         regime["settings"].values() for key in ("forward_error", "backward_error")])
              for entry in entries}
    known = {name: error for name, error in errors.items() if error is not None}
    text = "median prediction error under 30%"
    told = ", ".join(f"{name} {error:.0%}" for name, error in known.items())
    middle = median(list(known.values()))
    bars.append(Bar(text) if middle is None else Bar(text, f"{middle:.0%} ({told})", middle < 0.3))
    return bars


# ---- what is read ------------------------------------------------------------------------------------------------

HEADS = ("setting", "launches", "rows a launch", "analysis ms", "of the step", "plans known", "ms a step", "quartiles",
         "n", "÷ best fixed", "÷ depth", "error forward", "error backward")


def table(entry: Mapping[str, Any]) -> str:
    """A workload as markdown: a table for each regime, then what was left out."""
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [f"### {title_of(dict(entry))}, costs {entry['costs']}"]
    for regime, part in entry["regimes"].items():
        lines += ["", f"{REGIMES[regime]}; best fixed setting: {part['best']}", "",
                  f"| {' | '.join(HEADS)} |", f"| --- |{' ---: |' * (len(HEADS) - 1)}"]
        for name, f in part["settings"].items():
            low, high = f["ms_quartiles"]
            cells = [name, f"{f['launches']:.0f}", f"{f['rows']:.1f}", f"{f['analyze_ms']:.2f}",
                     f"{f['analyze_share']:.1%}", f"{f['known']:.0%}", f"{f['ms']:.4g}", f"{low:.4g} to {high:.4g}",
                     str(f["steps"]), cell(f["to_best"], ".3f"), cell(f["to_depth"], ".3f"),
                     cell(f["forward_error"], ".0%"), cell(f["backward_error"], ".0%")]
            lines.append(f"| {' | '.join(cells)} |")
        methods = part["settings"].get(AUTO, {}).get("methods", {})
        lines += ["", *(f"- auto ran {method}: {count} steps" for method, count in methods.items())]
    return "\n".join([*lines, *(f"- {name} is absent: {f['absent']}" for name, f in entry["absent"].items())]) + "\n"


def plot(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The time of a step relative to depth's: a group of bars for each workload, a picture for each regime."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 2.2 * len(entries)), 8))
    for axes, (regime, title) in zip(figure.subplots(len(REGIMES), 1), REGIMES.items()):
        parts = [entry["regimes"][regime]["settings"] for entry in entries]
        # names without their grain where it is that of the variant: bars of one colour are one policy everywhere
        names = list(dict.fromkeys(name.replace(" at op ", " at vertex ") for part in parts for name in part))
        for k, name in enumerate(names):
            found = [part.get(name, part.get(name.replace(" at vertex ", " at op "))) for part in parts]
            places = [x + (k - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(parts))]
            heights = [f["to_depth"] or 0.0 if f else 0.0 for f in found]
            axes.bar(places, heights, 0.8 / len(names), label=name.replace(" at vertex grain", ""),
                     color="black" if name == AUTO else None)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(parts)), [entry["workload"] for entry in entries], fontsize=8)
        axes.set_ylabel("ms a step, relative to depth")
        axes.set_title(title, fontsize=9)
        if names:
            axes.legend(fontsize=7, ncols=4)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# ---- all workloads -----------------------------------------------------------------------------------------------

def measure(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own."""
    threads = str(Plan().threads)
    env = {**os.environ, "DYNBATCH_BACKEND": "native", "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env).stdout
    return json.loads(output.splitlines()[-1])          # type: ignore[no-any-return]


def all_cases(names: Sequence[str], steps: int) -> list[Case]:
    folder = data_folder()
    variants = [(name, variant) for name in names for variant in ("vertex", "op")
                if variant == "vertex" or name == "treelstm-sick"]
    return [Case(name, variant, workloads.options_of(name), steps, str(folder) if folder else None)
            for name, variant in variants]


def run_cases(cases: Sequence[Case], json_path: Path) -> int:
    """Run, print and store; the exit code."""
    facts, entries = machine.facts(), []
    load = facts["load_average"][0]
    footer = (f"{facts['cpu']}, {facts['cores']} cores, commit {facts['commit']}, {facts['date']}; load before the run "
              f"{load:.1f}{': THE MACHINE WAS NOT QUIET, do not trust the ratios' if load > QUIET else ''}")
    json_path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        entries.append(measure(case))
        bars = bars_of(entries)
        print(table(entries[-1]), flush=True)
        # after every workload: a run that is stopped is not lost
        json_path.write_text(json.dumps({"machine": facts, "jobs": entries, "bars": [asdict(bar) for bar in bars]},
                                        indent=1) + "\n")
        ending = "\n".join([*(f"- {bar}" for bar in bars), "", footer])
        json_path.with_suffix(".md").write_text("\n".join([*map(table, entries), ending]) + "\n", encoding="utf-8")
        plot(entries, json_path.with_suffix(".png"))
    print(f"{ending}\nwritten: {json_path}, {json_path.stem}.md and {json_path.stem}.png")
    wrong = [f"{entry['workload']}: {facts['absent']}" for entry in entries for facts in entry["absent"].values()
             if facts.get("mismatch")]
    for text in wrong:
        print(f"ERROR: {text}", file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", action="append", choices=workloads.NAMES, help="may be repeated; default: all")
    parser.add_argument("--steps", type=int, help=f"timed steps of each setting; {STEPS}, with --quick {QUICK_STEPS}")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written; tables and the plot "
                                                                  "go beside it")
    parser.add_argument("--case", help=argparse.SUPPRESS)       # one, in this process, which then prints its entry
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(run_case(Case(**json.loads(options.case)))))
        return 0
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    path = options.json or RESULTS / f"policies{'-quick' if options.quick else ''}.json"
    return run_cases(all_cases(options.workload or workloads.NAMES, steps), path)


if __name__ == "__main__":
    sys.exit(main())
