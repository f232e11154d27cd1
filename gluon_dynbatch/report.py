"""Seeing it: what a scope did, as numbers, as a table, as a graph and as a drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cavs_core.mxnet_compat import openmp_spins

from . import fastpath

__all__ = ["Stats", "FlushReport", "Launch", "explain", "draw_launches", "launch_graph"]


@dataclass
class Stats:
    """What a scope did. Times are milliseconds until the work was handed to the device."""

    calls: int = 0                      # recorded calls
    repeats: int = 0                    # of these, calls that did not run: an earlier one had the same operands
    launches: int = 0                   # groups of equal calls that ran together
    joined: int = 0                     # further ones that became part of others: one program for several operators
    flushes: int = 0
    ops: int = 0                        # operators and compiled regions that the forward passes started
    backward_ops: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)     # reason -> number of calls that ran alone
    record_ms: float = 0.0              # from the start of recording to a flush; the user's own code included
    analyze_ms: float = 0.0
    leaves_ms: float = 0.0              # bringing outside arrays into buffers; part of execute_ms
    execute_ms: float = 0.0
    backward_ms: float = 0.0
    cache_hits: int = 0                 # flushes whose plan was known
    cache_misses: int = 0
    sample_hits: int = 0                # samples of new flushes whose joined operators were known
    sample_misses: int = 0
    predicted_execute_ms: float = 0.0   # by the cost model, before they ran
    predicted_backward_ms: float = 0.0  # of the flushes whose backward pass has run
    methods: dict[str, int] = field(default_factory=dict)       # policy and grain -> flushes
    estimates: list[Callable[[], int]] = field(default_factory=list, repr=False)        # bytes of each flush

    @property
    def peak_bytes(self) -> int:
        """An estimate of the memory of the largest flush: recording, plan and run. Worked out when somebody asks."""
        return max((estimate() for estimate in self.estimates), default=0)

    def __str__(self) -> str:
        joined = f", {self.joined} joined" if self.joined else ""
        repeats = f", {self.repeats} of them repeats," if self.repeats else ""
        samples = self.sample_hits + self.sample_misses
        merged = f", {self.sample_hits} of {samples} samples known" if samples else ""
        return (f"{self.calls} calls{repeats} in {self.launches} launches{joined} ({self.ops} operators forward, "
                f"{self.backward_ops} backward), {self.flushes} flushes; record {self.record_ms:.1f} ms, "
                f"analyze {self.analyze_ms:.1f} ms ({self.cache_hits} of {self.cache_hits + self.cache_misses} plans "
                f"known{merged}), execute {self.execute_ms:.1f} ms ({self.predicted_execute_ms:.1f} predicted), "
                f"backward {self.backward_ms:.1f} ms ({self.predicted_backward_ms:.1f} predicted); "
                f"ran alone: {sum(self.fallbacks.values())}")


@dataclass(frozen=True)
class Launch:
    """Calls that ran together."""

    title: str                          # operator or block
    where: str                          # the block whose code called it
    depth: int
    calls: int
    rows: int                           # positions: a call on (L, ..) that is split into rows has L
    operands: str                       # of each: shared, leaf (outside array of each call), value, or a list's part


class FlushReport:
    """One flush: why it happened and what it launched. Launches and edges are worked out when somebody asks."""

    def __init__(self, reason: str, classes: Sequence[Any], recording: Any, scanned: Any, grouping: Any,
                 kinds: list[str], backend: str = "mxnet", kernels: Any = None, method: str = ""):
        self.reason, self.backend, self.method = reason, backend, method
        self._kernels = kernels             # () -> [(title, sources)]
        self._titles = [(cls.signature.title, cls.where, cls.num_parts) for cls in classes]
        self._kinds = kinds
        self._arrays = (recording, scanned, grouping)

    @cached_property
    def launches(self) -> list[Launch]:
        """In the order of the run."""
        words = {"S": "shared", "L": "leaf", "P": "value", "G": "value", "E": "list"}
        grouping, found = self._arrays[2], []
        for c, k in grouping.order:
            rows = grouping.classes[c]
            num_calls, num_rows = (int(part[k + 1] - part[k]) for part in (rows.call_offsets, rows.offsets))
            title, where, num_parts = self._titles[c]
            found.append(Launch(title, where, int(rows.depths[k]), num_calls * num_parts, num_rows,
                                " ".join(words[kind] for kind in self._kinds[c])))
        return found

    @property
    def aliases(self) -> int:
        """Calls that only name rows."""
        return len(self._arrays[0].call_class) - sum(len(rows.calls) for rows in self._arrays[2].classes
                                                     if len(rows.offsets) > 1)

    def kernels(self) -> list[tuple[str, list[str]]]:
        """The generated kernels: (operator or block, their sources)."""
        return self._kernels() if self._kernels is not None else []

    def edges(self) -> list[tuple[int, int]]:
        """Pairs (launch, launch that reads it), as positions in `launches`."""
        r, s, g = self._arrays
        launch_of = np.zeros(len(r.call_class), np.int64)
        for number, (c, k) in enumerate(g.order):
            rows = g.classes[c]
            launch_of[rows.calls[rows.call_offsets[k]:rows.call_offsets[k + 1]]] = number
        for call in np.flatnonzero(r.facts.alias[r.call_class]):     # in recorded order
            whole = r.operands[s.operand_offsets[call]]
            launch_of[call] = launch_of[s.maker[whole]] if whole >= 0 else -1
        reader = np.repeat(np.arange(len(r.call_class)), np.diff(s.operand_offsets))
        recorded = r.operands >= 0
        pairs = np.stack([launch_of[s.maker[r.operands[recorded]]], launch_of[reader[recorded]]], axis=1)
        pairs = pairs[(pairs[:, 0] != pairs[:, 1]) & (pairs[:, 0] >= 0)]
        return [(int(a), int(b)) for a, b in np.unique(pairs, axis=0)] if len(pairs) else []


def explain(stats: Stats, flushes: list[FlushReport], kernels: bool = False) -> str:
    """A readable plan: every launch, everything that was not batched, and on demand the generated kernels."""
    lines = [str(stats)]
    if fastpath.compiled is None:
        lines += ["calls are recorded by Python code, which is slower: the package was installed without a C compiler, "
                  "or is newer than what was compiled; install it again"]
    if openmp_spins and any(flush.backend == "native" for flush in flushes):
        lines += ["OpenMP's threads may spin on the cores that launches need, because mxnet was imported first: import "
                  "gluon_dynbatch before it, or set OMP_WAIT_POLICY=PASSIVE"]
    for number, flush in enumerate(flushes):
        total = sum(launch.calls for launch in flush.launches)
        lines += ["", f"flush {number} ({flush.reason}): {total} calls in {len(flush.launches)} launches, "
                      f"{flush.aliases} that only name rows; {flush.method}, backend {flush.backend}"]
        lines += _table([("depth", "calls", "rows", "what", "operands", "called by")] + [
            (str(x.depth), str(x.calls), str(x.rows), x.title, x.operands, x.where) for x in flush.launches])
    lines += ["", "ran alone (not batched):" if stats.fallbacks else "nothing ran alone"]
    lines += _table([("calls", "why")] + [(str(n), reason) for reason, n in stats.fallbacks.items()]) \
        if stats.fallbacks else []
    if kernels:
        sources = {source: title for flush in flushes for title, part in flush.kernels() for source in part}
        lines += ["", f"{len(sources)} generated kernels"]
        lines += [f"\n---- {title} ----\n{source.rstrip()}" for source, title in sources.items()]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    numeric = [all(row[k].isdigit() for row in rows[1:]) for k in range(len(widths))]
    return ["  " + "  ".join(cell.rjust(w) if n else cell.ljust(w)
                             for cell, w, n in zip(row, widths, numeric)).rstrip() for row in rows]


def launch_graph(flushes: list[FlushReport]) -> Any:
    """A networkx DiGraph: a node per launch (flush, number) with its facts, an edge where one reads another."""
    import networkx
    graph = networkx.DiGraph()
    for f, flush in enumerate(flushes):
        for k, launch in enumerate(flush.launches):
            graph.add_node((f, k), flush=f, title=launch.title, where=launch.where, depth=launch.depth,
                           calls=launch.calls, rows=launch.rows)
        graph.add_edges_from(((f, a), (f, b)) for a, b in flush.edges())
    return graph


def draw_launches(flushes: list[FlushReport], path: str) -> None:
    """Draw the launches, one column per depth, circles as large as their number of rows; SVG, PNG or PDF by name."""
    import matplotlib
    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure
    graph = launch_graph(flushes)
    columns: dict[tuple[int, int], list[Any]] = {}
    for node, facts in graph.nodes(data=True):
        columns.setdefault((facts["flush"], facts["depth"]), []).append(node)
    place = {node: (x, -y) for x, column in enumerate(sorted(columns)) for y, node in enumerate(columns[column])}
    height = max((len(c) for c in columns.values()), default=1)
    figure = Figure(figsize=(max(4.0, 1.6 * len(columns)), max(3.0, 0.8 * height)))
    axes = figure.add_subplot()
    arrow = {"arrowstyle": "->", "color": "0.7", "shrinkA": 9, "shrinkB": 9}
    for a, b in graph.edges:
        axes.annotate("", place[b], place[a], arrowprops=arrow)
    for node, facts in graph.nodes(data=True):
        x, y = place[node]
        axes.scatter([x], [y], s=60 + 40 * np.sqrt(facts["rows"]), zorder=2)
        axes.annotate(f"{facts['title']} x{facts['rows']}", (x, y), (0, 11), textcoords="offset points", ha="center",
                      fontsize=7)
    axes.set_xlabel("depth (flush after flush)")
    axes.set_yticks([])
    axes.set_title(f"{graph.number_of_nodes()} launches for {sum(d['calls'] for _, d in graph.nodes(data=True))} calls")
    axes.margins(0.15)
    figure.savefig(path, bbox_inches="tight")
