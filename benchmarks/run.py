"""Run workloads with all systems side by side.  python -m benchmarks.run [--quick] [--workload NAME ..]

See docs/benchmarks.md. Tables go to standard output, progress to standard error; a results file and plots are written
to benchmarks/results. The exit code is 1 if a system computed something else than the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import machine, report, workloads
from .harness import Job, Plan, run
from .systems import SYSTEMS
from .workloads.base import DATA_VARIABLE, data_folder

__all__ = ["add_arguments", "main", "run_jobs", "run_one"]

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = Plan(rounds=3, seconds=1.0, turn_steps=3, least_turns=1)
VARIANTS: dict[str, list[dict[str, int]]] = {          # besides the defaults
    "treelstm-sst": [{"batch": 1}, {"batch": 16}, {"batch": 256}, {"hidden": 50}, {"hidden": 512}],
    "treefc": [{"hidden": 64}, {"hidden": 128}, {"hidden": 512}],
}
QUIET = 0.5                                            # load average before the run
WITH_INFERENCE = WITH_LOOPS = ("treelstm-sst", "treelstm-sick")     # loops: in a quick run only here


def all_jobs(names: Sequence[str], systems: list[str] | None, quick: bool, data: str | None) -> list[Job]:
    """The jobs of `make bench`; or of `make bench-quick`, only the first of every workload, and few loops."""
    jobs = []
    for name in names:
        chosen = systems or [s for s, info in SYSTEMS.items() if not (quick and info.slow and name not in WITH_LOOPS)]
        changes: list[dict[str, int]] = [{}] if quick else [{}, *VARIANTS.get(name, [])]
        jobs += [Job(name, workloads.options_of(name, **change), chosen, data=data) for change in changes]
        if name in WITH_INFERENCE and not quick:
            jobs.append(Job(name, workloads.options_of(name), chosen, training=False, data=data))
    return jobs


def run_jobs(jobs: list[Job], plan: Plan, json_path: Path, plots: Path | None = None) -> int:
    """Run, print and store the jobs; the exit code."""
    facts, entries = machine.facts(), []
    tables_path = json_path.with_suffix(".md")
    load = facts["load_average"][0]
    footer = (f"{facts['cpu']}, {facts['cores']} cores, commit {facts['commit']}, {facts['date']}; load before the run "
              f"{load:.1f}{': THE MACHINE WAS NOT QUIET, do not trust the ratios' if load > QUIET else ''}")
    for number, job in enumerate(jobs, 1):
        print(f"{number} of {len(jobs)}: {job.workload} {job.options}", file=sys.stderr)
        entries.append(report.entry_of(job, run(job, plan)))
        print(report.table(entries[-1]), flush=True)
        report.write_json(json_path, entries, facts)            # after every job: a run that is stopped is not lost
        tables_path.write_text("\n".join([*map(report.table, entries), footer]) + "\n", encoding="utf-8")
        if plots is not None:
            report.plot(entries[-1], plots / f"{_file_name(job)}.png")
    print(f"{footer}\nwritten: {json_path} and {tables_path.name}")
    wrong = [f"{entry['workload']}: {system['absent']}" for entry in entries for system in entry["systems"].values()
             if system.get("mismatch")]
    for text in wrong:
        print(f"ERROR: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _file_name(job: Job) -> str:
    options = "-".join(f"{name}{value}" for name, value in job.options.items())
    return f"{job.workload}-{options}-{'training' if job.training else 'inference'}"


def _systems(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"there is no system {', '.join(unknown) or text}; there are "
                                         f"{', '.join(SYSTEMS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What one run and a run of all have in common."""
    parser.add_argument("--systems", type=_systems, metavar="A,B", help=f"default: all of {', '.join(SYSTEMS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    parser.add_argument("--data", metavar="DIR", help=f"folder of the real data (or {DATA_VARIABLE}; else shared/data "
                                                      "beside the clone; else data is generated)")
    parser.add_argument("--generated", action="store_true", help="generated data, also where there is real data")
    parser.add_argument("--quick", action="store_true", help="few steps")


def _plan_and_data(options: Any) -> tuple[Plan, str | None]:
    folder = None if options.generated else data_folder(options.data)
    return QUICK if options.quick else Plan(), None if folder is None else str(folder)


def run_one(options: Any) -> int:
    """`dynbatch bench`: one workload with the options of the command line."""
    plan, data = _plan_and_data(options)
    settings = workloads.options_of(options.workload, batch=options.batch, hidden=options.hidden)
    job = Job(options.workload, settings, options.systems or list(SYSTEMS), not options.inference, data)
    return run_jobs([job], plan, options.json or RESULTS / f"{_file_name(job)}.json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", action="append", choices=workloads.NAMES, help="may be repeated; default: all")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    plan, data = _plan_and_data(options)
    jobs = all_jobs(options.workload or workloads.NAMES, options.systems, options.quick, data)
    return run_jobs(jobs, plan, options.json or RESULTS / ("quick.json" if options.quick else "full.json"),
                    plots=RESULTS)


if __name__ == "__main__":
    sys.exit(main())
