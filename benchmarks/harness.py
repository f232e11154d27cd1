"""Runs systems side by side: one process each, the same losses first, then steps timed in turns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .systems import REFERENCE, SYSTEMS

__all__ = ["Job", "Mismatch", "Plan", "Result", "WorkerError", "run"]

ROOT = Path(__file__).resolve().parents[1]
LOSS_TOLERANCE = 1e-4           # relative, float32
MOVE_TOLERANCE = 5e-3           # of an update, relative to its length: a relu that rounding flips was seen to make 3e-3
PAUSE = 0.15                    # seconds between turns, in which nobody runs
WARM_UP = 20                    # mini-batches that are not timed: some systems trace, compile and tune on the first
PATIENCE = 900                  # seconds that an answer may take; then the process is ended


class WorkerError(RuntimeError):
    """A system cannot take part; the text says why."""


class Mismatch(WorkerError):
    """A system computed another loss, or another update, than the reference from the same parameters."""


@dataclass(frozen=True)
class Job:
    """What is run: a workload with its options, by which systems, training or inference."""

    workload: str
    options: dict[str, int]
    systems: list[str]
    training: bool = True
    data: str | None = None         # folder of the real data; None: generated


@dataclass(frozen=True)
class Plan:
    """How long it may take."""

    rounds: int = 8                 # turns of every system
    seconds: float = 8.0            # timed work of one system; a slow one gets fewer steps
    turn_seconds: float = 0.4       # one turn: as many steps as fit in, at least one, at most `turn_steps`
    turn_steps: int = 5
    least_turns: int = 2
    threads: int = 2

    @property
    def num_batches(self) -> int:
        """Different mini-batches: for the check, the warm-up, and none is timed twice, as if in one epoch."""
        return 2 + WARM_UP + self.turn_steps * self.rounds


@dataclass
class Result:
    """What one system did: milliseconds by mini-batch, or why it is absent."""

    ms: dict[int, float] = field(default_factory=dict)
    absent: str | None = None
    mismatch: bool = False          # absent because it computes something else
    real: bool = False              # on real data
    versions: dict[str, str] = field(default_factory=dict)


# ---- workers -----------------------------------------------------------------------------------


def python_of(peer: bool) -> Path:
    """The interpreter of a system: ours, or that of the peers' environment."""
    if not peer:
        return Path(sys.executable)
    folder = Path(os.environ.get("DYNBATCH_BENCH_PEERS", ROOT / ".venv-peers"))
    path = folder / "bin" / "python"
    if not path.exists():
        raise WorkerError(f"no environment {folder.name}: `make peers` makes it")
    return path


class WorkerProcess:
    """One system in its own process. Requests are methods of `worker.Worker`."""

    def __init__(self, name: str, threads: int, command: list[str] | None = None):
        self.name = name
        command = command or [str(python_of(SYSTEMS[name].peer)), "-m", "benchmarks.worker"]
        own = dict(SYSTEMS[name].env) if name in SYSTEMS else {}
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads), **own}
        self._log = tempfile.TemporaryFile("w+")        # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._log, text=True)

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        patience = threading.Timer(PATIENCE, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            raise WorkerError(self._last_words())
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkerError(f"it answered {line.strip()!r}, which is not JSON") from error
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It runs only in here: threads that spin when their work is done would take a core from whoever comes next."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)           # (nothing happens if it has ended)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.receive()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"its process ended with code {code}: {lines[-1] if lines else 'it printed nothing'}"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            try:
                file.close()
            except BrokenPipeError:
                pass


# ---- the same numbers --------------------------------------------------------------------------


def fingerprint(worker: WorkerProcess, training: bool) -> dict[str, Any]:
    """What a system computes on the first two mini-batches; in training with an update in between."""
    start = time.perf_counter()
    first = worker.ask("step" if training else "loss", batch=0)["loss"]
    seconds = time.perf_counter() - start
    moved = worker.ask("moved")["moved"] if training else {}
    return {"losses": [first, worker.ask("loss", batch=1)["loss"]], "moved": moved, "seconds": seconds}


def compare(name: str, found: dict[str, Any], reference_name: str, reference: dict[str, Any]) -> None:
    """Raise Mismatch where two fingerprints differ by more than float32 rounding."""
    for k, (loss, wanted) in enumerate(zip(found["losses"], reference["losses"])):
        if not abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted):
            raise Mismatch(f"{name}: loss {k} of the check is {loss:.7g}, that of {reference_name} is {wanted:.7g}")
    for param, (length, part, rounding) in found["moved"].items():
        wanted_length, wanted_part, _ = reference["moved"][param]
        apart = max(abs(length - wanted_length), abs(part - wanted_part))
        if not apart <= MOVE_TOLERANCE * wanted_length + 4 * rounding:
            raise Mismatch(f"{name}: the first update of {param} has length {length:.6g} and part {part:.6g}, that of "
                           f"{reference_name} has {wanted_length:.6g} and {wanted_part:.6g}")


# ---- the run -----------------------------------------------------------------------------------


class _Run:
    """Workers that still take part, and the results of all."""

    def __init__(self, job: Job, plan: Plan):
        self.job, self.plan = job, plan
        self.results = {name: Result() for name in job.systems}
        self.workers: dict[str, WorkerProcess] = {}
        self.seconds: dict[str, float] = {}         # of a step, roughly

    def drop(self, name: str, reason: WorkerError) -> None:
        self.results[name] = Result(absent=str(reason), mismatch=isinstance(reason, Mismatch),
                                    versions=self.results[name].versions)
        if name in self.workers:
            self.workers.pop(name).close()

    def load(self) -> None:
        """Start all processes, and wait until all have made their models."""
        for name in self.job.systems:
            try:
                self.workers[name] = WorkerProcess(name, self.plan.threads)
                self.workers[name].send("load", system=name, workload=self.job.workload, options=self.job.options,
                                        num_batches=self.plan.num_batches, data=self.job.data)
            except WorkerError as error:
                self.drop(name, error)
        for name in tqdm(self.job.systems, desc="  load", leave=False, file=sys.stderr):
            if name in self.workers:
                try:
                    answer = self.workers[name].receive()
                    self.results[name].versions, self.results[name].real = answer["versions"], answer["real"]
                    self.workers[name].stop()
                except WorkerError as error:
                    self.drop(name, error)

    def check(self) -> None:
        """Every system must compute the same; this is also the first warm-up."""
        prints: dict[str, dict[str, Any]] = {}
        checked = [name for name in self.workers if SYSTEMS[name].checked]
        for name in tqdm(checked, desc="  check", leave=False, file=sys.stderr):
            try:
                with self.workers[name].awake():
                    prints[name] = fingerprint(self.workers[name], self.job.training)
            except WorkerError as error:
                self.drop(name, error)
        reference = REFERENCE if REFERENCE in prints else next(iter(prints), "")
        for name, found in prints.items():
            try:
                compare(name, found, reference, prints[reference])
                self.seconds[name] = found["seconds"]
            except Mismatch as error:
                self.drop(name, error)

    def time(self) -> None:
        """Rounds of turns: in each every system does some steps, on the same mini-batches as the others."""
        plan = self.plan
        shares = {name: self._share(name) for name in list(self.workers)}
        for turn in tqdm(range(plan.rounds), desc="  time", leave=False, file=sys.stderr):
            for name, (steps, turns) in shares.items():
                # a slow system takes part in `turns` of the rounds, evenly spread
                if name in self.workers and (turn + 1) * turns // plan.rounds > turn * turns // plan.rounds:
                    first = 2 + WARM_UP + turn * plan.turn_steps
                    self._turn(name, range(first, first + steps))

    def _share(self, name: str) -> tuple[int, int]:
        """How many steps a turn, and how many turns, a system gets: by its speed on a warm-up step."""
        if SYSTEMS[name].learns:                    # the others have been warm since the check
            spent = self._turn(name, range(2, 2 + WARM_UP), timed=False)
            self.seconds[name] = spent[-1] / 1e3 if spent else 1.0
        seconds = max(self.seconds[name], 1e-6)
        steps = min(self.plan.turn_steps, max(1, int(self.plan.turn_seconds / seconds)))
        return steps, min(self.plan.rounds, max(self.plan.least_turns, int(self.plan.seconds / seconds / steps)))

    def _turn(self, name: str, batches: Any, timed: bool = True) -> list[float]:
        time.sleep(PAUSE)
        try:
            with self.workers[name].awake():
                spent = self.workers[name].ask("time", batches=list(batches), training=self.job.training)["ms"]
        except WorkerError as error:
            self.drop(name, error)
            return []
        if timed:
            self.results[name].ms.update(zip(batches, spent))
        return spent

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def run(job: Job, plan: Plan) -> dict[str, Result]:
    """Run a job. A system that fails, or computes something else than the reference, is absent."""
    a_run = _Run(job, plan)
    try:
        a_run.load()
        a_run.check()
        a_run.time()
    finally:
        a_run.close()
    return a_run.results
