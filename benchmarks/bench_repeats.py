"""What it is worth that calls which repeat others run once.

    python benchmarks/bench_repeats.py [--steps N] [--json FILE] [--data DIR]

Training steps of every workload at vertex grain on the native backend, as they are and with drop_repeats=False: in one
process, on the same mini-batches, taking turns, and no mini-batch comes twice. A ratio is the median of the ratios on
the mini-batches. Repeats are the share of the recorded calls that did not run: an earlier one had the same operands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine, workloads
from benchmarks.bench_policies import Watched
from benchmarks.workloads.base import data_folder

WARM_UP = 20


def compare(name: str, steps: int, data: Path | None, progress: Any) -> dict[str, Any]:
    """Medians: milliseconds with repeats left out and with every call, their ratio, and the share of repeats."""
    system = Watched(workloads.make(name, workloads.options_of(name), WARM_UP + steps, data), "vertex")
    times: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    for k in range(WARM_UP + steps):
        for drop in (True, False) if k % 2 else (False, True):
            system.scope = {"granularity": "vertex", "backend": "native", "drop_repeats": drop}
            start = time.perf_counter()
            system.step(k)
            times[drop].append((time.perf_counter() - start) * 1e3)
            if drop:
                shares.append(system.last.stats.repeats / system.last.stats.calls)
            system.last = None              # it holds the memory of the run
        progress.update()
    once, every = times[True][WARM_UP:], times[False][WARM_UP:]
    return {"workload": name, "ms": statistics.median(once), "ms_every_call": statistics.median(every),
            "ratio": statistics.median(b / a for a, b in zip(once, every)),
            "repeats": statistics.median(shares[WARM_UP:]), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="timed, of each", metavar="N")
    parser.add_argument("--json", help="where the figures are written", metavar="FILE")
    parser.add_argument("--data", help="folder of the real data", metavar="DIR")
    options = parser.parse_args()
    data, found = data_folder(options.data), []
    with tqdm(total=len(workloads.NAMES) * (WARM_UP + options.steps), leave=False) as progress:
        for name in workloads.NAMES:
            progress.set_description(name)
            found.append(compare(name, options.steps, data, progress))
    print("| workload | repeats | ms a step | ms with every call | every call ÷ ours |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in found:
        print(f"| `{row['workload']}` | {row['repeats']:.0%} | {row['ms']:.1f} | {row['ms_every_call']:.1f} | "
              f"{row['ratio']:.2f} |")
    facts = machine.facts()
    print(f"\n{facts['cpu']}, {facts['cores']} cores, commit {facts['commit']}, {facts['date']}; "
          f"{'real' if data else 'generated'} data")
    if options.json:
        Path(options.json).write_text(json.dumps({**facts, "workloads": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
