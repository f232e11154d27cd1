"""Input graphs: which vertex gathers from which, for one sample or for a batch of samples."""

from __future__ import annotations

import operator
import reprlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .compiling import compiled
from .errors import CycleError, DanglingEdgeError, GraphError

__all__ = ["InputGraph"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class InputGraph:
    """The structure of one sample, or of a batch of samples: each vertex and its ordered children.

    A vertex gathers from its children, so an edge goes from child to parent. Vertices may have any number of
    children and of parents (trees, chains, DAGs, forests, single vertices), and one child may fill two slots.
    Vertices of a batch are numbered sample after sample. The arrays are read-only; equal graphs hash alike.
    Graphs are made by the class methods; the constructor is for whoever has the arrays.

    Parameters
    ----------
    num_vertices : int
    child_indptr : int64 array, shape (num_vertices + 1,)
        The children of `v`, in order, are ``child_index[child_indptr[v]:child_indptr[v + 1]]``.
    child_index : int64 array, shape (num_edges,)
    sample_offsets : int64 array, shape (num_samples + 1,)
        Sample `i` owns the vertices ``sample_offsets[i]`` up to ``sample_offsets[i + 1]``; ``[0, num_vertices]``
        for a single sample.

    Examples
    --------
    >>> tree = InputGraph.from_parents([2, 2, -1])
    >>> tree.children_of(2).tolist()
    [0, 1]
    >>> InputGraph.batch([tree, InputGraph.chain(2)]).locate(4)
    'sample 1, vertex 1'
    """

    num_vertices: int
    child_indptr: IntArray
    child_index: IntArray
    sample_offsets: IntArray
    # Of a batch that nobody has scheduled yet: the graphs that it was made of.
    parts: tuple[InputGraph, ...] = field(init=False, default=())
    known_depth: IntArray | None = field(init=False, default=None)
    # What runs have worked out for these very graphs, by who did.
    kept: weakref.WeakKeyDictionary[Any, Any] = field(init=False, default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        call = "InputGraph"
        n = _as_count(self.num_vertices, call, "num_vertices")
        index = _as_ints(self.child_index, call, "child_index", ndim=1)
        indptr = _as_ints(self.child_indptr, call, "child_indptr", ndim=1)
        samples = _as_ints(self.sample_offsets, call, "sample_offsets", ndim=1)
        if indptr.size != n + 1:
            raise GraphError(f"{call}: child_indptr has {indptr.size} entries, but num_vertices={n} needs {n + 1}.")
        _check_offsets(indptr, index.size, call, "child_indptr")
        _check_offsets(samples, n, call, "sample_offsets")
        self._set(indptr, index, samples)
        parent = self._edge_parents
        low, high = (np.repeat(bound, np.diff(samples))[parent] for bound in (samples[:-1], samples[1:]))
        if (e := _first((index < low) | (index >= high))) >= 0:
            raise DanglingEdgeError(
                f"{call}: {self.locate(int(parent[e]))} gathers vertex {index[e]} of the batch, but its sample has "
                f"the vertices {low[e]} to {high[e] - 1} of the batch.")
        _check_self_loops(index, parent, call, self)

    @classmethod
    def trusted(cls, child_indptr: IntArray, child_index: IntArray, sample_offsets: IntArray) -> InputGraph:
        """Take arrays that the caller has made or checked: nothing is checked again."""
        graph = object.__new__(cls)
        graph._set(child_indptr, child_index, sample_offsets)
        return graph

    def _set(self, child_indptr: IntArray, child_index: IntArray, sample_offsets: IntArray) -> None:
        vars(self).update(num_vertices=child_indptr.size - 1, child_indptr=_frozen(child_indptr),
                          child_index=_frozen(child_index), sample_offsets=_frozen(sample_offsets),
                          parts=(), known_depth=None, kept=weakref.WeakKeyDictionary())

    def alias(self) -> InputGraph:
        """The same graph, without what runs keep with it."""
        made = object.__new__(InputGraph)
        vars(made).update(vars(self), parts=(self,) if self.known_depth is None else (),
                          kept=weakref.WeakKeyDictionary())
        return made

    def note_depth(self, depth: IntArray) -> IntArray:
        """Keep what the schedule has found out, also for the graphs of a batch: a sample comes again in every epoch."""
        depth, start = _frozen(depth), 0
        for part in self.parts:
            stop = start + part.num_vertices
            if part.known_depth is None:
                inside = vars(part)
                inside["known_depth"], inside["parts"] = depth[start:stop], ()
            start = stop
        vars(self).update(known_depth=depth, parts=())
        return depth

    # ---- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def from_parents(cls, parents: Any) -> InputGraph:
        """A forest, from the parent of each vertex.

        Parameters
        ----------
        parents : integers, shape (num_vertices,)
            -1 at a root. The children of a vertex are ordered by their number.
        """
        call = "InputGraph.from_parents"
        parent = _as_ints(parents, call, "parents", ndim=1)
        n = parent.size
        if (v := _first((parent < -1) | (parent >= n))) >= 0:
            raise DanglingEdgeError(
                f"{call}: sample 0, vertex {v} has the parent {parent[v]}, but {_range_text(n)}; -1 marks a root.")
        child = np.flatnonzero(parent >= 0)
        return cls._from_pairs(n, child, parent[child], call)

    @classmethod
    def from_edges(cls, num_vertices: int, edges: Any) -> InputGraph:
        """Any graph, from its edges.

        Parameters
        ----------
        num_vertices : int
        edges : pairs of integers (child, parent), shape (num_edges, 2)
            Their order is the order of the children of a vertex. A pair may occur twice: the vertex then gathers
            that child in two slots.
        """
        call = "InputGraph.from_edges"
        n = _as_count(num_vertices, call, "num_vertices")
        return cls._from_pairs(n, *_as_pairs(n, edges, call, "(child, parent)"), call)

    @classmethod
    def _from_pairs(cls, n: int, child: IntArray, parent: IntArray, call: str) -> InputGraph:
        graph = cls.trusted(*_group_by_parent(n, child, parent), np.array([0, n], dtype=np.int64))
        _check_self_loops(child, parent, call, graph)
        return graph

    @classmethod
    def from_networkx(cls, digraph: Any) -> InputGraph:
        """A networkx DiGraph or MultiDiGraph whose edges go from child to parent.

        Vertices are numbered in the order of `digraph.nodes`. An edge attribute "slot" orders the children of a
        vertex (equal slots: as listed). Without it they come as `digraph.edges` lists them, and networkx lists
        edges by their source: children in the order of the nodes, however the edges were added.
        """
        call = "InputGraph.from_networkx"
        if not (hasattr(digraph, "is_directed") and digraph.is_directed()):
            raise GraphError(
                f"{call}: expected a networkx DiGraph or MultiDiGraph with edges child -> parent, got "
                f"{type(digraph).__name__}. For messages along undirected edges use `InputGraph.unroll`.")
        number = {node: v for v, node in enumerate(digraph.nodes)}
        edges = list(digraph.edges(data="slot"))
        pairs = np.array([(number[u], number[v]) for u, v, _ in edges], dtype=np.int64).reshape(-1, 2)
        without = [e for e, (_, _, slot) in enumerate(edges) if slot is None]
        if 0 < len(without) < len(edges):
            u, v, _ = edges[without[0]]
            raise GraphError(
                f"{call}: sample 0, vertex {number[v]}: its edge {u!r} -> {v!r} has no \"slot\", but other edges "
                "have one. Give a slot to every edge or to none.")
        if edges and not without:
            slots = _as_ints([slot for _, _, slot in edges], call, 'edge attribute "slot"', ndim=1)
            pairs = pairs[np.argsort(slots, kind="stable")]
        return cls._from_pairs(len(number), pairs[:, 0], pairs[:, 1], call)

    @classmethod
    def chain(cls, n: int) -> InputGraph:
        """`n` vertices in a row: vertex v gathers vertex v - 1; 0 is the leaf and n - 1 the root."""
        n = _as_count(n, "InputGraph.chain", "n")
        indptr = np.maximum(np.arange(n + 1, dtype=np.int64) - 1, 0)
        return cls.trusted(indptr, np.arange(max(n - 1, 0), dtype=np.int64), np.array([0, n], dtype=np.int64))

    @classmethod
    def complete_binary_tree(cls, depth: int) -> InputGraph:
        """2**depth leaves, numbered first, then level above level; the root is the last vertex."""
        call = "InputGraph.complete_binary_tree"
        if (levels := _as_count(depth, call, "depth")) > 40:
            raise GraphError(f"{call}: depth={levels} asks for 2**{levels + 1} - 1 vertices, more than memory has.")
        leaves = 2 ** levels
        n = 2 * leaves - 1
        indptr = np.maximum(2 * (np.arange(n + 1, dtype=np.int64) - leaves), 0)
        return cls.trusted(indptr, np.arange(n - 1, dtype=np.int64), np.array([0, n], dtype=np.int64))

    @classmethod
    def unroll(cls, num_vertices: int, edges: Any, rounds: int, undirected: bool = True) -> InputGraph:
        """Message passing on any graph, cyclic or not, as the acyclic graph of its rounds.

        Vertex v after t rounds is numbered ``t * num_vertices + v``, for t = 0..rounds. From round 1 on its
        children are v itself one round before, in slot 0, then its neighbours one round before, in the order of
        `edges`. Three atoms in a row, ``unroll(3, [(0, 1), (1, 2)], rounds=2)``::

            t = 2    6     7     8      7 gathers 4 (itself), then 3 and 5
                     |  X  |  X  |
            t = 1    3     4     5
                     |  X  |  X  |
            t = 0    0     1     2      leaves

        Parameters
        ----------
        num_vertices, rounds : int
        edges : pairs of integers (u, w), shape (num_edges, 2)
        undirected : bool
            True: u and w hear each other, so list a pair once. False: w hears u.
        """
        call = "InputGraph.unroll"
        n, rounds = _as_count(num_vertices, call, "num_vertices"), _as_count(rounds, call, "rounds")
        source, target = _as_pairs(n, edges, call, "(u, w)")
        if undirected:
            pairs = np.stack([source, target, target, source], axis=1).reshape(-1, 2)
            once = np.ones(len(pairs), dtype=bool)
            once[1::2] = source != target
            source, target = pairs[once, 0], pairs[once, 1]
        itself = np.arange(n, dtype=np.int64)
        indptr, index = _group_by_parent(n, np.concatenate([itself, source]), np.concatenate([itself, target]))
        arity = np.concatenate([np.zeros(n, dtype=np.int64), np.tile(np.diff(indptr), rounds)])
        shift = np.arange(rounds, dtype=np.int64)[:, None] * n
        return cls.trusted(_offsets(arity), (index + shift).reshape(-1), np.array([0, arity.size], dtype=np.int64))

    @classmethod
    def batch(cls, graphs: Iterable[InputGraph]) -> InputGraph:
        """All samples of `graphs`, one after the other. A batch in the list keeps its samples."""
        if isinstance(graphs, InputGraph) or not isinstance(graphs, Iterable):
            raise GraphError(f"InputGraph.batch: expected a list of InputGraphs, got {reprlib.repr(graphs)}.")
        graphs = list(graphs)
        for i, graph in enumerate(graphs):
            if not isinstance(graph, InputGraph):
                raise GraphError(
                    f"InputGraph.batch: sample {i} of the list is {reprlib.repr(graph)} ({type(graph).__name__}), "
                    "not an InputGraph. Make one with from_parents, from_edges or from_networkx.")
        arrays = list(zip(*[g._arrays() for g in graphs])) or [(), (), ()]
        sizes = np.array([list(map(len, some)) for some in arrays], np.int64)
        made = cls.trusted(*_joined(sizes, *[np.concatenate([_NO_INTS, *some]) for some in arrays]))
        vars(made).update(parts=tuple(graphs))
        return made

    # ---- what a graph knows ------------------------------------------------------------------------------------

    @property
    def num_edges(self) -> int:
        return self.child_index.size

    @property
    def num_bytes(self) -> int:
        """What the arrays take."""
        return sum(array.nbytes for array in self._arrays())

    @property
    def num_samples(self) -> int:
        return self.sample_offsets.size - 1

    @cached_property
    def arity(self) -> IntArray:
        """The number of children of each vertex; int64, shape (num_vertices,)."""
        return _frozen(np.diff(self.child_indptr))

    @cached_property
    def roots(self) -> IntArray:
        """The vertices that nobody gathers, ascending; int64, shape (num_roots,)."""
        is_root = np.ones(self.num_vertices, dtype=bool)
        is_root[self.child_index] = False
        return _frozen(np.flatnonzero(is_root))

    @property
    def _edge_parents(self) -> IntArray:
        """The vertex that gathers along each edge; shape (num_edges,)."""
        return np.repeat(np.arange(self.num_vertices, dtype=np.int64), self.arity)

    def children_of(self, v: int) -> IntArray:
        """The children of vertex `v`, in the order of their slots."""
        self._check_vertex(v)
        return self.child_index[self.child_indptr[v]:self.child_indptr[v + 1]]

    def parents_of(self, v: int) -> IntArray:
        """The vertices that gather `v`, ascending, one entry per edge. Searches all edges."""
        self._check_vertex(v)
        return self._edge_parents[self.child_index == v]

    def sample_of(self, v: int) -> int:
        """The sample that vertex `v` of the batch belongs to."""
        self._check_vertex(v)
        return int(np.searchsorted(self.sample_offsets, v, side="right")) - 1

    def locate(self, v: int) -> str:
        """Where vertex `v` of the batch is, as errors say it: "sample 3, vertex 7" counts inside the sample."""
        sample = self.sample_of(v)
        return f"sample {sample}, vertex {v - int(self.sample_offsets[sample])}"

    def _check_vertex(self, v: int) -> None:
        if not isinstance(v, (int, np.integer)):
            raise GraphError(f"vertex {v!r} was asked for; a vertex is named by its number, an integer.")
        if not 0 <= v < self.num_vertices:
            raise GraphError(f"vertex {v} was asked for, but {_range_text(self.num_vertices, 'the graph')}.")

    def to_networkx(self) -> Any:
        """A networkx graph with edges child -> parent, for drawing and for networkx's algorithms.

        Nodes carry "sample", edges carry "slot", so `from_networkx` gives the graph back (a batch as one sample).
        It is a DiGraph, or a MultiDiGraph if a vertex gathers one child in two slots.
        """
        import networkx as nx

        parents = self._edge_parents
        slots = np.arange(self.num_edges) - self.child_indptr[parents]
        pairs = list(zip(self.child_index.tolist(), parents.tolist()))
        digraph = nx.DiGraph() if len(set(pairs)) == len(pairs) else nx.MultiDiGraph()
        samples = np.repeat(np.arange(self.num_samples), np.diff(self.sample_offsets))
        digraph.add_nodes_from((v, {"sample": sample}) for v, sample in enumerate(samples.tolist()))
        digraph.add_edges_from((u, v, {"slot": slot}) for (u, v), slot in zip(pairs, slots.tolist()))
        return digraph

    def __repr__(self) -> str:
        return (f"InputGraph(num_vertices={self.num_vertices}, num_edges={self.num_edges}, "
                f"num_samples={self.num_samples})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputGraph):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self._arrays(), other._arrays()))

    def __hash__(self) -> int:
        return hash(tuple(array.tobytes() for array in self._arrays()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickled numpy arrays are writeable again; going through the constructor freezes them.
        return InputGraph, (self.num_vertices, *self._arrays())

    def _arrays(self) -> tuple[IntArray, IntArray, IntArray]:
        return self.child_indptr, self.child_index, self.sample_offsets


# ---- arrays ----------------------------------------------------------------------------------------------------


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array


def _offsets(sizes: IntArray) -> IntArray:
    """Where each part starts, and where the last one ends; shape (len(sizes) + 1,)."""
    offsets = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


_NO_INTS = np.zeros(0, np.int64)


@compiled
def _joined(sizes, indptrs, index, samples):  # type: ignore[no-untyped-def]
    """The arrays of a batch, from the arrays of all graphs, one behind the other, and how long those of each are."""
    num_graphs = sizes.shape[1]
    indptr, children = np.zeros(len(indptrs) - num_graphs + 1, np.int64), np.empty(len(index), np.int64)
    offsets = np.zeros(len(samples) - num_graphs + 1, np.int64)
    v = e = s = 0
    for g in range(num_graphs):
        for i in range(1, sizes[0, g]):
            indptr[v + i] = indptrs[v + g + i] + e
        for i in range(sizes[1, g]):
            children[e + i] = index[e + i] + v
        for i in range(1, sizes[2, g]):
            offsets[s + i] = samples[s + g + i] + v
        v, e, s = v + sizes[0, g] - 1, e + sizes[1, g], s + sizes[2, g] - 1
    return indptr, children, offsets


def _group_by_parent(n: int, child: IntArray, parent: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs as child_indptr and child_index; the children of a vertex keep the order of the pairs."""
    # numpy sorts 16-bit keys by radix, in linear time; most samples are that small.
    key = parent.astype(np.uint16) if n <= 1 << 16 else parent
    return _offsets(np.bincount(parent, minlength=n)), child[np.argsort(key, kind="stable")]


def _first(mask: npt.NDArray[np.bool_]) -> int:
    """The first index at which `mask` is True, or -1."""
    return int(np.argmax(mask)) if mask.any() else -1


# ---- checks ----------------------------------------------------------------------------------------------------


def _as_count(value: Any, call: str, name: str) -> int:
    try:
        count = operator.index(value)
    except TypeError as err:
        raise GraphError(f"{call}: {name} must be an integer, got {value!r} ({type(value).__name__}).") from err
    if count < 0:
        raise GraphError(f"{call}: {name} must not be negative, got {count}.")
    return count


def _as_ints(values: Any, call: str, name: str, ndim: int) -> IntArray:
    """A new int64 array of integers; floats are refused, since rounding would change the graph in silence."""
    try:
        if not hasattr(values, "__array__") and not isinstance(values, Sequence):
            values = list(values)
        array = np.asarray(values)
    except (TypeError, ValueError) as err:
        raise GraphError(f"{call}: {name} must be integers, got {reprlib.repr(values)}.") from err
    if array.size and array.dtype.kind not in "iu":
        raise GraphError(f"{call}: {name} must be integers, got {reprlib.repr(values)} (dtype {array.dtype}).")
    if array.size and array.ndim != ndim:
        raise GraphError(f"{call}: {name} must have {ndim} axes, got shape {array.shape}.")
    return array.astype(np.int64)


def _as_pairs(n: int, edges: Any, call: str, form: str) -> tuple[IntArray, IntArray]:
    pairs = _as_ints(edges, call, "edges", ndim=2)
    if pairs.size and pairs.shape[1] != 2:
        raise GraphError(f"{call}: edges must be pairs {form}, shape (num_edges, 2), got shape {pairs.shape}.")
    pairs = pairs.reshape(-1, 2)
    missing = (pairs < 0) | (pairs >= n)
    if (e := _first(missing.any(axis=1))) >= 0:
        u, v = pairs[e]
        here, absent = (v, u) if missing[e, 0] else (u, v)
        raise DanglingEdgeError(
            f"{call}: sample 0, vertex {here}: edge {e} is {form} = ({u}, {v}), but there is no vertex {absent}: "
            f"{_range_text(n)}.")
    return pairs[:, 0], pairs[:, 1]


def _check_offsets(offsets: IntArray, end: int, call: str, name: str) -> None:
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
        raise GraphError(f"{call}: {name} must rise from 0 to {end}, got {reprlib.repr(offsets.tolist())}.")


def _check_self_loops(child: IntArray, parent: IntArray, call: str, graph: InputGraph) -> None:
    if (e := _first(child == parent)) >= 0:
        raise CycleError(
            f"{call}: {graph.locate(int(child[e]))} is its own child. "
            "`InputGraph.unroll` makes rounds of message passing, in which a vertex hears itself.")


def _range_text(n: int, owner: str = "the sample") -> str:
    return f"{owner} has the vertices 0 to {n - 1}" if n else f"{owner} has no vertices"
