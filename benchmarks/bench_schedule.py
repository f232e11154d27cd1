"""Cost of scheduling, in nanoseconds a vertex, by shape and size of the graphs.

    python benchmarks/bench_schedule.py [--json FILE] [--quick]

Prints one table to stdout and its progress to stderr. `--quick` leaves out 1,000,000 vertices. Exit code 1 if a
graph of 1,000,000 vertices costs more than 1,000 ns a vertex. Building the graphs is not timed; the copy of an
array with one number a vertex is the control: it tells a slow machine from slow code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cavs_core.graph import InputGraph
from cavs_core.schedule import schedule

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LIMIT_NS = 1_000.0
SECONDS_A_CASE = 1.0


def one_chain(n: int, rng: np.random.Generator) -> InputGraph:
    return InputGraph.chain(n)


def mixed_chains(n: int, rng: np.random.Generator) -> InputGraph:
    cuts = np.sort(rng.integers(0, n + 1, size=63))
    return InputGraph.batch([InputGraph.chain(length) for length in np.diff(cuts, prepend=0, append=n)])


def complete_trees(n: int, rng: np.random.Generator) -> InputGraph:
    tree = InputGraph.complete_binary_tree(8)
    return InputGraph.batch([tree] * max(1, round(n / tree.num_vertices)))


def wide_trees(n: int, rng: np.random.Generator) -> InputGraph:
    """Roots with 100 children each."""
    star = InputGraph.from_parents([100] * 100 + [-1])
    return InputGraph.batch([star] * max(1, round(n / star.num_vertices)))


def random_binary_tree(words: int, rng: np.random.Generator) -> InputGraph:
    """A binary tree over a sentence, like a parse: neighbours are joined at random until one is left."""
    parents = np.full(2 * words - 1, -1)
    heads = list(range(words))
    for joined in range(words, 2 * words - 1):
        i = int(rng.integers(0, len(heads) - 1))
        parents[heads[i:i + 2]] = joined
        heads[i:i + 2] = [joined]
    return InputGraph.from_parents(parents)


def random_binary_trees(n: int, rng: np.random.Generator) -> InputGraph:
    """Sentences of 2 to 50 words; 1,000 different ones at most, so that making them stays short."""
    pool = [random_binary_tree(int(words), rng) for words in rng.integers(2, 51, size=min(1_000, n // 20))]
    chosen, left = [], n
    while left > 0:
        chosen.append(pool[int(rng.integers(0, len(pool)))])
        left -= chosen[-1].num_vertices
    return InputGraph.batch(chosen)


def random_dag(n: int, rng: np.random.Generator) -> InputGraph:
    """0 to 4 children a vertex, anywhere among the earlier vertices: the hardest case for the memory caches."""
    parent = np.repeat(np.arange(1, n), rng.integers(0, 5, size=n - 1))
    child = (rng.random(parent.size) * parent).astype(np.int64)
    return InputGraph.from_edges(n, np.stack([child, parent], axis=1))


SHAPES: dict[str, Callable[[int, np.random.Generator], InputGraph]] = {
    "one chain": one_chain, "64 chains of mixed length": mixed_chains, "complete binary trees": complete_trees,
    "wide trees (100 children)": wide_trees, "random binary trees": random_binary_trees, "random DAG": random_dag,
}


def median_seconds(run: Callable[[], Any]) -> float:
    """Median of 5 to 200 runs after one that warms up, within about SECONDS_A_CASE."""
    run()
    times: list[float] = []
    while len(times) < 5 or (len(times) < 200 and sum(times) < SECONDS_A_CASE):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(shape: str, n: int) -> dict[str, Any]:
    graph = SHAPES[shape](n, np.random.default_rng(0))
    seconds = median_seconds(lambda: schedule(graph))
    control = median_seconds(lambda: graph.child_indptr.copy())
    return {"shape": shape, "vertices": graph.num_vertices, "edges": graph.num_edges,
            "launches": schedule(graph).num_launches, "ms": seconds * 1e3,
            "ns_per_vertex": seconds * 1e9 / graph.num_vertices,
            "control_copy_ns_per_vertex": control * 1e9 / graph.num_vertices}


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'graphs':<26} {'vertices':>10} {'launches':>10} {'ms':>10} {'ns/vertex':>10} {'copy ns':>8}")
    for row in rows:
        print(f"{row['shape']:<26} {row['vertices']:>10,} {row['launches']:>10,} {row['ms']:>10.3f} "
              f"{row['ns_per_vertex']:>10.1f} {row['control_copy_ns_per_vertex']:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="leave out 1,000,000 vertices")
    args = parser.parse_args()
    sizes = SIZES[:-1] if args.quick else SIZES

    cases = [(shape, n) for shape in SHAPES for n in sizes]
    rows = [measure(shape, n) for shape, n in tqdm(cases, desc="schedule", unit="case", file=sys.stderr)]
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")

    slow = [row for (_, n), row in zip(cases, rows) if n == SIZES[-1] and row["ns_per_vertex"] > LIMIT_NS]
    for row in slow:
        print(f"TOO SLOW: {row['shape']}, {row['vertices']:,} vertices: {row['ns_per_vertex']:.0f} ns a vertex, "
              f"the limit is {LIMIT_NS:.0f} ns")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
