"""One system in one process: requests as JSON lines on standard input, answers as JSON lines on standard output.

    python -m benchmarks.worker

The first request is {"do": "load", ...}; an answer is an object, {"error": ...} if the request failed. Between requests
the process waits and uses no processor time. What frameworks print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from . import systems, workloads


class Worker:
    """Answers requests; each public method is one."""

    def load(self, system: str, workload: str, options: dict[str, int], num_batches: int, data: str | None) -> Any:
        """Make the workload and the system; both are the same in every process for the same arguments."""
        # Ours compiles at once, not when it pays: steps are timed, not trainings. Op grain would compile for minutes,
        # so it does only where a bar asks for it.
        native = system != "ours-op" or workload == "treelstm-sick"
        os.environ.setdefault("DYNBATCH_BACKEND", "native" if native else "mxnet")
        made = workloads.make(workload, options, num_batches, Path(data) if data else None)
        self.first = made.params
        self.system = systems.load(system)(made, systems.SYSTEMS[system].variant)
        return {"real": made.real, "num_batches": made.num_batches, "versions": self.system.versions()}

    def loss(self, batch: int) -> Any:
        return {"loss": self.system.loss(batch)}

    def step(self, batch: int) -> Any:
        return {"loss": self.system.step(batch)}

    def moved(self) -> Any:
        """How far each parameter has moved from its first value.

        The distance, its part in a random direction, and how large the error of float32 rounding may be.
        """
        rng = np.random.RandomState(2)
        answer = {}
        now = self.system.parameters()
        for name, first in self.first.items():
            way = now[name].astype(np.float64) - first
            answer[name] = [float(np.linalg.norm(way)), float((way * rng.normal(size=way.shape)).sum()),
                            float(np.linalg.norm(first[way != 0]) * np.finfo(np.float32).eps)]
        return {"moved": answer}

    def time(self, batches: list[int], training: bool) -> Any:
        """Milliseconds of a step (or of the forward pass alone) on each of the mini-batches."""
        run = self.system.step if training else self.system.loss
        gc.collect()
        spent = []
        for k in batches:
            start = time.perf_counter()
            run(k)
            spent.append((time.perf_counter() - start) * 1e3)
        return {"ms": spent}


def serve(requests: Any, answers: Any, worker: Any) -> None:
    """Answer requests until they end."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:          # the parent reports it, and goes on without this system
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own_output, Worker())
