"""What recording and planning cost a call.  python benchmarks/bench_overhead.py [--json FILE] [--quick]

Four figures, medians over repeats, in microseconds:

    vertex    recording one call of a decorated block with five arrays (two pairs of states and a word id)
    operator  recording one operator, on top of what MXNet's own generated wrapper costs without running anything
    plan      analysis (grouping, rows, layout) of a recorded call, in a batch of binary trees
    leaf      bringing one outside array into its buffer

The bounds are those of the project's plan; a figure above its bound ends with exit code 1.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
from tqdm import tqdm

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

BOUNDS = {"vertex": 2.5, "operator": 5.0, "plan": 1.0, "leaf": 1.5}
nd = mx.nd


@gdb.vertex
class Cell(gluon.HybridBlock):
    """A binary Tree-LSTM cell: a word id and the states of two children."""

    def __init__(self, hidden=8, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = gluon.nn.Embedding(50, hidden)
            self.gates = gluon.nn.Dense(5 * hidden, in_units=3 * hidden)

    def hybrid_forward(self, F, word, left, right):
        gates = self.gates(F.concat(self.embed(word), left[0], right[0], dim=1))
        i, fl, fr, o, u = F.split(gates, num_outputs=5, axis=1)
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * left[1] + F.sigmoid(fr) * right[1]
        return F.sigmoid(o) * F.tanh(c), c


def trees(cell, num_trees, leaves, zero):
    """Record complete binary trees; the roots."""
    roots = []
    for t in range(num_trees):
        level = [cell(k + t, zero, zero) for k in range(leaves)]
        while len(level) > 1:
            level = [cell(0, a, b) for a, b in zip(level[::2], level[1::2])]
        roots.append(level[0])
    return roots


def time_vertex(calls):
    cell = Cell()
    cell.initialize()
    zero = (nd.zeros((1, 8)), nd.zeros((1, 8)))
    with gdb.batching():
        a = cell(0, zero, zero)
        b = cell(0, a, a)
        start = time.perf_counter()
        for _ in range(calls):
            b = cell(1, a, b)
        return (time.perf_counter() - start) / calls * 1e6


def time_operator(calls):
    x = nd.ones((1, 8))
    with gdb.batching():
        y = nd.tanh(x)
        start = time.perf_counter()
        for _ in range(calls):
            nd.broadcast_add(y, x)
        recorded = time.perf_counter() - start
    register = mx.ndarray.register
    invoke = register._imperative_invoke
    register._imperative_invoke = lambda *args: x           # the wrapper alone
    try:
        start = time.perf_counter()
        for _ in range(calls):
            nd.broadcast_add(x, x)
        wrapper = time.perf_counter() - start
    finally:
        register._imperative_invoke = invoke
    return (recorded - wrapper) / calls * 1e6


def time_plan(calls):
    cell = Cell()
    cell.initialize()
    zero = (nd.zeros((1, 8)), nd.zeros((1, 8)))
    with gdb.batching() as scope:
        roots = trees(cell, max(2, calls // 64), 32, zero)
    assert len(roots) == max(2, calls // 64)
    return scope.stats.analyze_ms * 1e3 / scope.stats.calls


def time_leaf(calls):
    rows = [nd.array(np.full((1, 8), k)) for k in range(calls)]
    mx.nd.waitall()
    with gdb.batching() as scope:
        out = [nd.tanh(x) for x in rows]
        scope.flush()
        mx.nd.waitall()
    stack_ms = scope.stats.leaves_ms
    assert out[-1].shape == (1, 8)
    return stack_ms * 1e3 / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer calls and repeats")
    options = parser.parse_args()
    calls, repeats = (1000, 3) if options.quick else (4000, 9)
    figures = {}
    kinds = {"vertex": time_vertex, "operator": time_operator, "plan": time_plan, "leaf": time_leaf}
    for name, run in tqdm(kinds.items(), desc="overhead", file=sys.stderr):
        run(calls)                      # warm up: traces, compiles, fills caches
        figures[name] = statistics.median(run(calls) for _ in range(repeats))
    print(f"{'what':10} {'µs a call':>10} {'bound':>8}")
    for name, value in figures.items():
        print(f"{name:10} {value:10.2f} {BOUNDS[name]:8.1f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)
    over = [name for name, value in figures.items() if value > BOUNDS[name]]
    if over:
        sys.exit(f"above the bound: {', '.join(over)}")


if __name__ == "__main__":
    main()
