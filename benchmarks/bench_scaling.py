"""From 1,000 to 1,000,000 vertices in one flush: does the cost a vertex stay flat, is the memory as estimated?

    python benchmarks/bench_scaling.py [--quick] [--json FILE]

A training step (record or plan, forward, backward) of a child-sum cell on complete binary trees of 512 leaves, through
both faces; each case in a process of its own. Memory is what the process holds at the peak of the step, beyond what it
held before; the estimate is the engine's own, made before the run allocates anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

SIZES = (1_000, 10_000, 100_000, 1_000_000)
FACES = ("cavs", "gluon")
HIDDEN = 16
LEAVES = 512                    # a tree; 1,023 vertices
REPEATS = 3


# ---- one case, in its own process ------------------------------------------------------------


def make_cavs_step(num_trees: int) -> Any:
    """A function that does a step through the Cavs face and returns the estimate of its memory."""
    import numpy as np

    import cavs_core as cavs
    from cavs_core.mxnet_compat import autograd, gluon, mx

    class Cell(cavs.VertexFunction):
        def __init__(self):
            super().__init__(state_shapes=[(HIDDEN,)])
            with self.name_scope():
                self.inp = gluon.nn.Dense(HIDDEN, in_units=HIDDEN)
                self.rec = gluon.nn.Dense(HIDDEN, in_units=HIDDEN, use_bias=False)

        def vertex(self, F, v):
            (below,) = v.gather_sum()
            h = F.tanh(self.inp(v.pull("x")) + self.rec(below))
            v.scatter(h)
            v.push(h)

    cell = Cell()
    cell.initialize()
    graphs = [cavs.InputGraph.complete_binary_tree(LEAVES.bit_length() - 1)] * num_trees
    x = mx.nd.array(np.random.RandomState(0).normal(size=(num_trees * (2 * LEAVES - 1), HIDDEN)))

    def step() -> int:
        with autograd.record():
            out = cavs.run(cell, graphs, {"x": x})
            loss = out.roots.sum()
        loss.backward()
        mx.nd.waitall()
        return out.stats.peak_bytes

    return step


def make_gluon_step(num_trees: int) -> Any:
    """The same through the Gluon face: a call a vertex."""
    import gluon_dynbatch as gdb
    from cavs_core.mxnet_compat import autograd, gluon, mx

    @gdb.vertex
    class Cell(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.embed = gluon.nn.Embedding(50, HIDDEN)
                self.inp = gluon.nn.Dense(HIDDEN, in_units=HIDDEN)
                self.rec = gluon.nn.Dense(HIDDEN, in_units=HIDDEN, use_bias=False)

        def hybrid_forward(self, F, word, left, right):
            return F.tanh(self.inp(self.embed(word)) + self.rec(left + right))

    cell = Cell()
    cell.initialize()
    zeros = mx.nd.zeros((1, HIDDEN))

    def step() -> int:
        roots = []
        with autograd.record(), gdb.batching() as scope:
            for _ in range(num_trees):
                level = [cell(k % 50, zeros, zeros) for k in range(LEAVES)]
                while len(level) > 1:
                    level = [cell(7, left, right) for left, right in zip(level[::2], level[1::2])]
                roots.append(level[0])
        autograd.backward(roots)
        mx.nd.waitall()
        return scope.stats.peak_bytes

    return step


def memory_kb(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak) of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field))


def run_case(face: str, vertices: int) -> dict[str, Any]:
    """Warm up with one tree, then measure the memory of the first step and the time of all."""
    make = {"cavs": make_cavs_step, "gluon": make_gluon_step}[face]
    warm = make(1)
    for _ in range(4):
        warm()
    num_trees = max(1, round(vertices / (2 * LEAVES - 1)))
    step = make(num_trees)
    before = memory_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")           # forget the peak so far
    spent, estimate, peak = [], 0, 0
    for k in range(REPEATS + 1):
        start = time.perf_counter()
        estimate = step()
        spent.append(time.perf_counter() - start)
        if k == 0:
            peak = memory_kb("VmHWM") - before
    vertices = num_trees * (2 * LEAVES - 1)
    return {"face": face, "vertices": vertices, "us_per_vertex": statistics.median(spent[1:]) / vertices * 1e6,
            "peak_mb": peak / 1024, "estimate_mb": estimate / 2 ** 20}


# ---- all cases ---------------------------------------------------------------------------------


def measure(face: str, vertices: int) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--case", face, str(vertices)]
    environment = {"DYNBATCH_BACKEND": "native", **os.environ}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'face':<6} {'vertices':>10} {'µs/vertex':>10} {'peak MB':>10} {'estimate MB':>12} {'peak/estimate':>14}")
    for row in rows:
        print(f"{row['face']:<6} {row['vertices']:>10,} {row['us_per_vertex']:>10.2f} {row['peak_mb']:>10.1f} "
              f"{row['estimate_mb']:12.1f} {row['peak_mb'] / row['estimate_mb']:14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="leave out 1,000,000 vertices")
    parser.add_argument("--case", nargs=2, metavar=("FACE", "VERTICES"), help="one case, in this process")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case[0], int(options.case[1]))))
        return
    cases = [(face, n) for face in FACES for n in (SIZES[:-1] if options.quick else SIZES)]
    rows = [measure(face, n) for face, n in tqdm(cases, desc="scaling", unit="case", file=sys.stderr)]
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
