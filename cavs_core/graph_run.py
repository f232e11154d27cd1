"""One run over graphs: which of its vertices run, and where their rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .array_memory import view_of_data
from .backends.native_cpu.products import segment_sum
from .cell_plan import CellPlan, Vertices
from .distinct import Distinct, find_distinct
from .graph import InputGraph, IntArray
from .graph_layout import lay_out_graphs
from .layout import Layout, Messages, plan_messages
from .mxnet_compat import mx
from .program import Spec
from .schedule import schedule

__all__ = ["GraphRows", "lay_out"]

_WORTH = 1 / 20             # of the vertices that multiply; if fewer repeat others, all run, side by side
_PATIENCE, _AGAIN = 4, 16   # runs in a row without enough repeats; then only every so many look for them
_MOST_COLUMNS = 8           # of integers that vertices are compared by


@dataclass
class GraphRows:
    """Where the vertices of a run are.

    Attributes
    ----------
    layout : Layout
    graph_bytes : what the batch of graphs takes
    position : int64 array, the row of each vertex in the gradients of pulled inputs
    pushing : int64 array, the vertices that push, ascending
    pushed : (buffer, rows) of each pushed value: of those vertices, in that order
    readers : which rows of an output's gradient belong to each vertex that runs and pushes; None: one row each
    num_launches, num_repeats : levels, and vertices that do not run
    """

    layout: Layout
    graph_bytes: int
    position: IntArray
    pushing: IntArray
    pushed: list[tuple[int, IntArray]]
    readers: Messages | None
    num_launches: int
    num_repeats: int

    @cached_property
    def reads_initial(self) -> bool:
        """Whether a vertex gathers a child that it does not have."""
        return any((read.rows.rows == 0).any() for part in self.layout.classes for read in part.reads.values()
                   if not read.per_edge)

    def outside_bytes(self, specs: Sequence[Spec], recording: bool) -> int:
        """What a run takes outside the engine: the batch of graphs, its schedule, pushed values, their gradients."""
        row = sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in specs)
        # arity, class and depth of each vertex (twice: the batch's and its sample's), order, position, its place among
        # those of its class and among those that push, and what is made on the way to them
        numbers = 15 * self.position.nbytes
        return self.graph_bytes + numbers + (2 if recording else 1) * row * len(self.pushing)

    def answers(self, grad: Any, shape: tuple[int, ...]) -> Any:
        """The gradient of a pushed value, a row for each vertex that runs; those of repeats are added up."""
        if self.readers is None:
            return grad.reshape((-1, *shape))
        bounds = self.readers.segments.indptr
        grad = view_of_data(grad) if isinstance(grad, mx.nd.NDArray) else grad
        total = np.empty((len(bounds) - 1, *shape), grad.dtype)
        segment_sum(grad.reshape(-1, *shape), self.readers.pull.rows, bounds, total)
        return total


def lay_out(plan: CellPlan, vertices: Vertices, graph: InputGraph, arrays: dict[str, Any], repeats: bool) -> GraphRows:
    """Schedule the vertices and lay out their rows; with `repeats`, without those that repeat others, if it pays."""
    left = _without_repeats(plan, vertices, graph, arrays) if repeats else None
    if left is None and vertices.rows is not None:
        return vertices.rows
    runs, class_of, sources, depth = graph, vertices.of_vertex, None, None
    if left is not None:
        runs, class_of, sources, depth = left.graph, vertices.of_vertex[left.vertices], left.vertices, left.depth
    classes = vertices.classes
    scheduled = schedule(runs, classes.by_slot, depth)
    laid = lay_out_graphs(runs, scheduled, class_of, classes.interfaces, classes.row_specs, sources)
    if left is None:
        vertices.rows = GraphRows(laid.layout, graph.num_bytes, laid.position, laid.pushing, laid.pushed, None,
                                  scheduled.num_launches, 0)
        return vertices.rows
    pushing = np.flatnonzero(classes.interfaces.pushes[vertices.of_vertex])
    rank = np.cumsum(classes.interfaces.pushes[class_of]) - 1
    row = rank[left.number[pushing]]                # of each in what the vertices that run push
    readers = plan_messages(len(laid.pushing), [row], [np.arange(len(row))], len(row), np.zeros(1, np.int64))
    return GraphRows(laid.layout, graph.num_bytes, laid.position[left.number], pushing,
                     [(buffer, rows[row]) for buffer, rows in laid.pushed], readers,
                     scheduled.num_launches, graph.num_vertices - runs.num_vertices)


def _without_repeats(plan: CellPlan, vertices: Vertices, graph: InputGraph, arrays: dict[str, Any]) -> Distinct | None:
    """The graph without vertices that repeat others; None if there are too few of them."""
    if plan.idle >= _PATIENCE and plan.idle % _AGAIN:
        plan.idle += 1
        return None
    found = _find(vertices, graph, arrays)
    if found is not None:
        multiplies = vertices.classes.multiplies[vertices.of_vertex]
        before, after = int(multiplies.sum()), int(multiplies[found.vertices].sum())
        if before - after < _WORTH * before or before == after:
            found = None
    plan.idle = plan.idle + 1 if found is None else 0
    return found


def _find(vertices: Vertices, graph: InputGraph, arrays: dict[str, Any]) -> Distinct | None:
    may_repeat, names, asks = vertices.classes.compared_by(
        frozenset([name for name, x in arrays.items() if isinstance(x, np.ndarray)]))
    columns = [arrays[name].reshape(graph.num_vertices, -1) for name in names]
    if not may_repeat.any() or sum(column.shape[1] for column in columns) > _MOST_COLUMNS:
        return None
    keys = np.concatenate([*columns, np.zeros((graph.num_vertices, 0), np.int64)], axis=1, dtype=np.int64)
    asks = np.repeat(asks, [column.shape[1] for column in columns], axis=1)
    return find_distinct(graph, vertices.of_vertex, may_repeat, keys, asks)
