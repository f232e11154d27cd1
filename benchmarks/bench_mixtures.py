"""What new mixtures of known samples cost.  python benchmarks/bench_mixtures.py [--workload NAME ..] [--quick]

Training shuffles its samples: no mini-batch comes twice, but every sample does. After each sample has come once, steps
on mini-batches drawn from them are timed, with marked cells and with plain Gluon code. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import workloads
from benchmarks.bench_policies import Watched
from benchmarks.workloads.base import data_folder

BATCHES, WARM_UP, STEPS, QUICK_STEPS = 10, 50, 60, 5     # mini-batches whose samples are known; steps before, and timed
NAMES = ("treelstm-sst", "treelstm-sick")


def measure(workload: str, variant: str, steps: int, warm_up: int, data: Any, bar: Any) -> dict[str, float]:
    """The medians of what steps took, and how many of their samples were known."""
    made = workloads.make(workload, workloads.options_of(workload), BATCHES, data)
    system: Any = Watched(made, variant)
    system.scope = {"policy": "depth", "granularity": variant, "backend": "native"}
    known, size, rng = [s for batch in system.batches for s in batch], len(system.batches[0]), np.random.RandomState(0)
    for k in range(BATCHES):
        system.step(k)
    found = []
    for k in range(warm_up + steps):
        system.batches = [[known[n] for n in rng.permutation(len(known))[:size]]]
        system.step(0)
        bar.update()
        if k >= warm_up:
            found.append(system.last.stats)
    return {**{what: statistics.median([getattr(stats, f"{what}_ms") for stats in found])
               for what in ("record", "analyze", "execute", "backward")},
            "hits": sum(stats.sample_hits for stats in found), "misses": sum(stats.sample_misses for stats in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=workloads.NAMES,
                        help=f"may be repeated; default: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="few steps")
    options = parser.parse_args()
    steps, warm_up = (QUICK_STEPS, QUICK_STEPS) if options.quick else (STEPS, WARM_UP)
    names, data = options.workload or NAMES, data_folder()
    print("workload, cells           record  analyze  execute  backward  samples known")
    with tqdm(total=2 * len(names) * (steps + warm_up), unit="step", file=sys.stderr, disable=None) as bar:
        for name in names:
            for variant in ("vertex", "op"):
                ms = measure(name, variant, steps, warm_up, data, bar)
                asked = int(ms["hits"] + ms["misses"])
                tqdm.write(f"{name + (', marked' if variant == 'vertex' else ', plain'):24} {ms['record']:7.2f} "
                           f"{ms['analyze']:8.2f} {ms['execute']:8.2f} {ms['backward']:9.2f}  "
                           + (f"{ms['hits']:.0f} of {asked}" if asked else "not looked for"))


if __name__ == "__main__":
    main()
