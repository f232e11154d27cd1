"""Frontier scheduling: the vertices of a whole batch of graphs, grouped into as few launches as there are depths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .compiling import compiled
from .errors import ArityError, CycleError
from .graph import InputGraph, IntArray

__all__ = ["IS_LEAF", "IS_ROOT", "Schedule", "depths_of", "schedule", "check_arity", "roles_of"]

IS_LEAF, IS_ROOT = 1, 2     # what the role of a vertex is made of

# An error names at most this many vertices of a cycle.
_SHOWN_OF_CYCLE = 20


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """Which vertices run together, and in which order their rows lie.

    Launch `k` runs the vertices ``order[offsets[k]:offsets[k + 1]]``. Launch 0 is exactly the leaves; every other
    vertex runs one launch after the last of its children. All arrays are int64 and read-only.

    Attributes
    ----------
    depth : shape (num_vertices,)
        The launch of each vertex.
    order : shape (num_vertices,)
        The vertex at each position.
    position : shape (num_vertices,)
        The position of each vertex; ``order[position[v]] == v``.
    offsets : shape (num_launches + 1,)
    """

    depth: IntArray
    order: IntArray
    position: IntArray
    offsets: IntArray

    @property
    def num_launches(self) -> int:
        return self.offsets.size - 1

    @property
    def sizes(self) -> IntArray:
        """The number of vertices of each launch; shape (num_launches,)."""
        return np.diff(self.offsets)

    def __repr__(self) -> str:
        largest = int(self.sizes.max(initial=0))
        return f"Schedule(num_vertices={self.order.size}, num_launches={self.num_launches}, largest={largest})"


def schedule(graph: InputGraph, by_slot: bool = True, depth: IntArray | None = None) -> Schedule:
    """Group the vertices of all samples into launches, and order each launch so that gathers become ranges.

    The depth of a leaf is 0, of another vertex 1 + the largest depth of its children; one launch runs one depth.
    The reader of a launch's rows is the next launch, or a later one, so launches are ordered from the last to the
    first: a vertex stands where its earliest reader wants it. Its key is the smallest, over the edges to its
    parents, of (launch of the parent, slot, position of the parent) if `by_slot`, of (launch of the parent,
    position of the parent, slot) if not. Roots have no reader and come last, in the order of their numbers.

    Parameters
    ----------
    graph : InputGraph
        One sample or a batch.
    by_slot : bool
        True: the first children of a launch's vertices lie side by side, then the second ones, as `gather(k)`
        reads them. False: the children of a vertex lie side by side, as `gather_all` and `gather_sum` read them.
    depth : int64 array
        What `depths_of` says, for whoever knows it.

    Raises
    ------
    CycleError
        Names the sample and the vertices of one cycle.

    Examples
    --------
    >>> plan = schedule(InputGraph.batch([InputGraph.complete_binary_tree(2), InputGraph.chain(2)]))
    >>> plan.num_launches, plan.sizes.tolist()
    (3, [5, 3, 1])
    >>> plan.order.tolist()
    [0, 2, 7, 1, 3, 4, 5, 8, 6]
    """
    depth = depths_of(graph) if depth is None else depth
    depth.setflags(write=False)
    order, position, offsets = _order_launches(graph.child_indptr, graph.child_index, depth, bool(by_slot))
    for array in (order, position, offsets):
        array.setflags(write=False)
    return Schedule(depth, order, position, offsets)


def depths_of(graph: InputGraph) -> IntArray:
    """The depth of each vertex: 0 for a leaf, else 1 + the largest of its children; CycleError if there is none.

    A graph keeps it, so that a batch of graphs that were scheduled before only joins what they know.
    """
    if graph.known_depth is not None:
        return graph.known_depth
    known = [part.known_depth for part in graph.parts if part.known_depth is not None]
    if known and len(known) == len(graph.parts):
        return graph.note_depth(np.concatenate(known))
    depth, waiting = _depths(graph.child_indptr, graph.child_index)
    if waiting.any():
        raise CycleError(_cycle_text(graph, _find_cycle(graph, waiting)))
    return graph.note_depth(depth)


def roles_of(graph: InputGraph) -> tuple[IntArray, list[int], list[int]]:
    """The role of each vertex; and the fewest and the most children of each role's vertices, -1 if it has none."""
    role, fewest, most = _roles(graph.child_indptr, graph.child_index)
    return role, fewest.tolist(), most.tolist()


def check_arity(graph: InputGraph, exact: int | None = None, at_least: int | None = None,
                allow_leaves: bool = True, among: npt.NDArray[np.bool_] | None = None) -> None:
    """Raise ArityError at the first vertex whose number of children does not fit.

    Parameters
    ----------
    graph : InputGraph
    exact, at_least : int, optional
        What every vertex must have; None asks for nothing.
    allow_leaves : bool
        Whether a vertex without children passes in any case.
    among : bool array, optional
        The vertices that are looked at.
    """
    arity = graph.arity
    wrong = np.zeros(graph.num_vertices, dtype=bool)
    if exact is not None:
        wrong |= arity != exact
    if at_least is not None:
        wrong |= arity < at_least
    if allow_leaves:
        wrong &= arity != 0
    if among is not None:
        wrong &= among
    offenders = np.flatnonzero(wrong)
    if not offenders.size:
        return
    v = int(offenders[0])
    wants = [f"exactly {exact}"] if exact is not None else []
    wants += [f"at least {at_least}"] if at_least is not None else []
    raise ArityError(
        f"{graph.locate(v)} has {_children_text(int(arity[v]))}, but its vertex function gathers "
        f"{' and '.join(wants)}{' (leaves are allowed)' if allow_leaves else ' at every vertex, leaves included'}; "
        f"{offenders.size} of {graph.num_vertices} vertices differ. "
        "Change the graph, or use `gather_sum` or `gather_all`, which take any number of children.")


def _children_text(n: int) -> str:
    return f"{n} child" if n == 1 else f"{n} children"


# ---- compiled walks --------------------------------------------------------------------------------------------
# Graph arrays are always read-only and contiguous, so each function has one signature: it is compiled once, and has one
# entry in numba's disk cache.


@compiled
def _depths(child_indptr, child_index):  # type: ignore[no-untyped-def]
    """Depth of each vertex, and how many of its parents were never reached (all 0 unless there is a cycle)."""
    n = child_indptr.size - 1
    waiting = np.zeros(n, np.int64)
    for c in child_index:
        waiting[c] += 1
    # Kahn's algorithm from the roots down: it needs only the children of a vertex, and its queue, read backwards,
    # visits children before parents.
    queue = np.empty(n, np.int64)
    tail = 0
    for v in range(n):
        if waiting[v] == 0:
            queue[tail] = v
            tail += 1
    head = 0
    while head < tail:
        v = queue[head]
        head += 1
        for e in range(child_indptr[v], child_indptr[v + 1]):
            c = child_index[e]
            waiting[c] -= 1
            if waiting[c] == 0:
                queue[tail] = c
                tail += 1
    depth = np.zeros(n, np.int64)
    for i in range(tail - 1, -1, -1):
        v = queue[i]
        d = 0
        for e in range(child_indptr[v], child_indptr[v + 1]):
            d = max(d, depth[child_index[e]] + 1)
        depth[v] = d
    return depth, waiting


@compiled
def _order_launches(child_indptr, child_index, depth, by_slot):  # type: ignore[no-untyped-def]
    """Order, position and offsets, without sorting: each launch lists its edges in the order of their keys, and the
    children of these edges are chained up launch by launch.

    A launch pushes its edges, last key first, on the stacks of their children's launches. Launches come from the
    last to the first, so a stack read from its top gives edges by rising key, and the edge of a child that was
    pushed last is the child's smallest.
    """
    n = child_indptr.size - 1
    num_launches = 0
    for v in range(n):
        num_launches = max(num_launches, depth[v] + 1)
    offsets = np.zeros(num_launches + 1, np.int64)
    for v in range(n):
        offsets[depth[v] + 1] += 1
    for k in range(num_launches):
        offsets[k + 1] += offsets[k]

    top = np.full(num_launches, -1)                  # the edge on top of each launch's stack
    below = np.empty(child_index.size, np.int64)     # the edge under each edge
    deciding = np.full(n, -1)                        # the edge of each child that was pushed last
    for c in child_index:
        deciding[c] = 0                              # any edge will do: not a root
    order = np.empty(n, np.int64)
    roots_from = offsets[1:].copy()
    for v in range(n - 1, -1, -1):
        if deciding[v] < 0:
            roots_from[depth[v]] -= 1
            order[roots_from[depth[v]]] = v

    reading = np.empty(n, np.int64)                  # vertices of this launch that have a child in this slot
    edges = np.empty(child_index.size, np.int64)     # edges of this launch by rising key
    for k in range(num_launches - 1, -1, -1):
        filled = offsets[k]
        e = top[k]
        while e >= 0:
            c = child_index[e]
            if deciding[c] == e:
                order[filled] = c
                filled += 1
            e = below[e]

        num_edges = 0
        if by_slot:
            num_reading = offsets[k + 1] - offsets[k]
            for i in range(num_reading):
                reading[i] = order[offsets[k] + i]
            slot = 0
            while num_reading > 0:
                kept = 0
                for i in range(num_reading):
                    v = reading[i]
                    e = child_indptr[v] + slot
                    if e < child_indptr[v + 1]:
                        edges[num_edges] = e
                        num_edges += 1
                        reading[kept] = v
                        kept += 1
                num_reading = kept
                slot += 1
        else:
            for i in range(offsets[k], offsets[k + 1]):
                v = order[i]
                for e in range(child_indptr[v], child_indptr[v + 1]):
                    edges[num_edges] = e
                    num_edges += 1

        for i in range(num_edges - 1, -1, -1):
            e = edges[i]
            c = child_index[e]
            deciding[c] = e
            below[e] = top[depth[c]]
            top[depth[c]] = e

    position = np.empty(n, np.int64)
    for i in range(n):
        position[order[i]] = i
    return order, position, offsets


@compiled
def _roles(child_indptr, child_index):  # type: ignore[no-untyped-def]
    role = np.full(child_indptr.size - 1, IS_ROOT)
    fewest, most = np.full(4, -1), np.full(4, -1)
    for c in child_index:
        role[c] = 0
    for v in range(len(role)):
        arity = child_indptr[v + 1] - child_indptr[v]
        if arity == 0:
            role[v] += IS_LEAF
        if most[role[v]] < 0 or arity < fewest[role[v]]:
            fewest[role[v]] = arity
        most[role[v]] = max(most[role[v]], arity)
    return role, fewest, most


# ---- cycles ----------------------------------------------------------------------------------------------------


def _find_cycle(graph: InputGraph, waiting: IntArray) -> list[int]:
    """The vertices of one cycle, each a child of the next, the smallest number first."""
    # A vertex that still waits has a parent that still waits, so going up from parent to parent never ends, and a
    # vertex met twice closes a cycle.
    edges = np.flatnonzero(waiting[graph._edge_parents] > 0)[::-1]
    up = np.full(graph.num_vertices, -1)
    up[graph.child_index[edges]] = graph._edge_parents[edges]
    v = int(np.flatnonzero(waiting)[0])
    step_of: dict[int, int] = {}
    while v not in step_of:
        step_of[v] = len(step_of)
        v = int(up[v])
    cycle = list(step_of)[step_of[v]:]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def _cycle_text(graph: InputGraph, cycle: list[int]) -> str:
    start = int(graph.sample_offsets[graph.sample_of(cycle[0])])
    names = [str(v - start) for v in cycle]
    if len(names) > _SHOWN_OF_CYCLE:
        half = _SHOWN_OF_CYCLE // 2
        names[half:-half] = [f"({len(names) - 2 * half} more)"]
    path = " -> ".join([*names, names[0]])
    return (f"{graph.locate(cycle[0])} is its own ancestor: {path} (child -> parent), so no vertex of this cycle can "
            "run first. Remove an edge, or use `InputGraph.unroll` for rounds of messages on a graph with cycles.")
