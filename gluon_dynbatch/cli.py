"""The command `dynbatch`, also `python -m gluon_dynbatch.cli`: one function a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import DynBatchError

__all__ = ["main"]


def add_bench(commands: Any) -> None:
    """`dynbatch bench`: time a workload with several systems side by side. Needs a clone of the repository."""
    clone = Path(__file__).resolve().parents[1]
    what = "time a workload with several systems side by side"
    if not (clone / "benchmarks" / "run.py").exists():
        parser = commands.add_parser("bench", help=what, prefix_chars="+")      # so that --anything is no option
        parser.add_argument("anything", nargs=argparse.REMAINDER)
        parser.set_defaults(run=_no_benchmarks)
        return
    parser = commands.add_parser("bench", help=what)
    sys.path.insert(0, str(clone))
    from benchmarks import run, workloads

    parser.add_argument("--workload", required=True, choices=workloads.NAMES)
    parser.add_argument("--batch", type=int, metavar="N", help="samples a mini-batch")
    parser.add_argument("--hidden", type=int, metavar="N", help="size of the states")
    parser.add_argument("--inference", action="store_true", help="the forward pass alone")
    run.add_arguments(parser)
    parser.set_defaults(run=run.run_one)


def _no_benchmarks(options: Any) -> int:
    raise ValueError("the benchmarks are not part of the installed package: clone the repository, install it with "
                     "`pip install -e .`, and run `dynbatch bench` there")


def add_calibrate(commands: Any) -> None:
    """`dynbatch calibrate`: measure what launches cost on this machine."""
    parser = commands.add_parser("calibrate", help="measure the constants of the cost model on this machine")
    parser.add_argument("--show", action="store_true", help="print what is known, measure nothing")

    def run(options: Any) -> int:
        from .costs.calibrate import run_calibrate

        return run_calibrate(options)

    parser.set_defaults(run=run)


def add_tune(commands: Any) -> None:
    """`dynbatch tune`: run a model with every policy, granularity and batch size."""
    from .studies import tuning

    parser = commands.add_parser("tune", help="find the fastest policy, granularity and batch size for a model")
    tuning.add_arguments(parser)
    parser.set_defaults(run=tuning.run)


def add_simulate(commands: Any) -> None:
    """`dynbatch simulate`: what the grain of batching gains and what it costs, without running a network."""
    from .studies import simulate

    parser = commands.add_parser("simulate", help="study the grain of batching on trees, without running a network")
    simulate.add_arguments(parser)
    parser.set_defaults(run=simulate.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code is 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(prog="dynbatch", description="Tools of gluon_dynbatch.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_bench(commands)
    add_calibrate(commands)
    add_tune(commands)
    add_simulate(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, DynBatchError) as error:
        parser.exit(2, f"dynbatch {options.command}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
