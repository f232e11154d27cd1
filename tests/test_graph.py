"""InputGraph: every way to make one, what it answers, and what its errors say."""

import doctest
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cavs_core.graph
from cavs_core.errors import CycleError, DanglingEdgeError, DynBatchError, GraphError
from cavs_core.graph import InputGraph


def children(graph):
    return [graph.children_of(v).tolist() for v in range(graph.num_vertices)]


@st.composite
def edge_lists(draw, max_vertices=12):
    """(num_vertices, edges) of a DAG whose numbering says nothing of its order; duplicates are allowed."""
    n = draw(st.integers(0, max_vertices))
    rank = draw(st.permutations(range(n)))
    if n < 2:
        return n, []
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n))
    return n, [(rank[min(a, b)], rank[max(a, b)]) for a, b in pairs if a != b]


def test_examples_in_docstrings_are_true():
    assert doctest.testmod(cavs_core.graph).failed == 0


# ---- from_parents ----------------------------------------------------------------------------------------------


def test_from_parents_orders_children_by_number():
    graph = InputGraph.from_parents([1, 4, 3, 4, -1])
    assert children(graph) == [[], [0], [], [2], [1, 3]]
    assert graph.num_vertices == 5 and graph.num_edges == 4 and graph.num_samples == 1
    assert graph.roots.tolist() == [4]
    assert graph.arity.tolist() == [0, 1, 0, 1, 2]
    assert graph.sample_offsets.tolist() == [0, 5]


@given(st.lists(st.integers(-1, 9), min_size=10, max_size=10))
def test_from_parents_agrees_with_a_loop(parents):
    parents = [-1 if p == v else p for v, p in enumerate(parents)]
    graph = InputGraph.from_parents(parents)
    assert children(graph) == [[v for v, p in enumerate(parents) if p == u] for u in range(10)]
    assert graph.roots.tolist() == [v for v, p in enumerate(parents) if p == -1]


def test_from_parents_root_in_front_and_several_components():
    graph = InputGraph.from_parents([-1, 0, 0, -1, -1, 4])
    assert children(graph) == [[1, 2], [], [], [], [5], []]
    assert graph.roots.tolist() == [0, 3, 4]


def test_from_parents_takes_arrays_of_any_integer_type_and_copies_them():
    source = np.array([2, 2, -1], dtype=np.int16)
    graph = InputGraph.from_parents(source)
    source[:] = 0
    assert graph == InputGraph.from_parents((2, 2, -1)) == InputGraph.from_parents(p for p in [2, 2, -1])


def test_no_vertices_and_one_vertex():
    empty, single = InputGraph.from_parents([]), InputGraph.from_parents([-1])
    assert (empty.num_vertices, empty.num_edges, empty.num_samples) == (0, 0, 1)
    assert empty.roots.size == 0 and empty.arity.size == 0
    assert single.roots.tolist() == [0] and children(single) == [[]]
    assert empty == InputGraph.from_edges(0, []) == InputGraph.chain(0)
    assert single == InputGraph.from_edges(1, np.zeros((0, 2), dtype=int)) == InputGraph.chain(1)


def test_star_of_10000_children():
    graph = InputGraph.from_parents([10_000] * 10_000 + [-1])
    assert graph.children_of(10_000).tolist() == list(range(10_000))
    assert graph.roots.tolist() == [10_000]


@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 70_000])
def test_sizes_around_the_16_bit_sort(n):
    rng = np.random.default_rng(n)
    parents = np.append(rng.integers(np.arange(1, n), n), -1)
    graph = InputGraph.from_parents(parents)
    order = np.lexsort([np.arange(n - 1), parents[:-1]])
    np.testing.assert_array_equal(graph.child_index, order)
    np.testing.assert_array_equal(graph.arity, np.bincount(parents[:-1], minlength=n))


@pytest.mark.parametrize("parents, text", [
    ([1, 5, -1], "sample 0, vertex 1 has the parent 5, but the sample has the vertices 0 to 2; -1 marks a root"),
    ([1, 2, -2], "sample 0, vertex 2 has the parent -2"),
    ([3, 2, -1], "sample 0, vertex 0 has the parent 3"),
])
def test_dangling_parent(parents, text):
    with pytest.raises(DanglingEdgeError, match=text):
        InputGraph.from_parents(parents)


def test_self_loop_is_reported_at_construction():
    with pytest.raises(CycleError, match="from_parents: sample 0, vertex 1 is its own child"):
        InputGraph.from_parents([2, 1, -1])
    with pytest.raises(CycleError, match="from_edges: sample 0, vertex 2 is its own child"):
        InputGraph.from_edges(3, [(0, 1), (2, 2)])


@pytest.mark.parametrize("parents, text", [
    ([1.0, -1.0], r"from_parents: parents must be integers, got \[1.0, -1.0\] \(dtype float64\)"),
    ([True, False], "dtype bool"),
    (["a", "b"], "must be integers, got \\['a', 'b'\\]"),
    ([None, 1], "must be integers, got \\[None, 1\\]"),
    (3.5, "must be integers, got 3.5"),
    (None, "must be integers, got None"),
    ([[1, -1]], r"must have 1 axes, got shape \(1, 2\)"),
])
def test_parents_that_are_not_integers(parents, text):
    with pytest.raises(GraphError, match=text):
        InputGraph.from_parents(parents)


def test_graph_errors_share_the_project_root():
    with pytest.raises(DynBatchError):
        InputGraph.from_parents([9])


# ---- from_edges ------------------------------------------------------------------------------------------------


def test_from_edges_keeps_the_order_of_the_edges_and_duplicates():
    graph = InputGraph.from_edges(4, [(2, 3), (0, 3), (2, 3), (1, 2), (0, 2)])
    assert children(graph) == [[], [], [1, 0], [2, 0, 2]]
    assert graph.parents_of(2).tolist() == [3, 3]
    assert graph.parents_of(0).tolist() == [2, 3]
    assert graph.parents_of(3).tolist() == []
    assert graph.roots.tolist() == [3]


@given(edge_lists())
def test_from_edges_agrees_with_a_loop(case):
    n, edges = case
    graph = InputGraph.from_edges(n, edges)
    assert children(graph) == [[c for c, p in edges if p == v] for v in range(n)]
    assert [graph.parents_of(v).tolist() for v in range(n)] == [sorted(p for c, p in edges if c == v) for v in range(n)]
    assert graph.roots.tolist() == [v for v in range(n) if all(c != v for c, _ in edges)]
    assert graph == InputGraph.from_edges(n, np.array(edges, dtype=np.int32).reshape(-1, 2))
    assert graph == InputGraph.from_edges(n, iter(edges))


@pytest.mark.parametrize("edge, text", [
    ((1, 3), r"sample 0, vertex 1: edge 1 is \(child, parent\) = \(1, 3\), but there is no vertex 3"),
    ((7, 2), r"sample 0, vertex 2: edge 1 is \(child, parent\) = \(7, 2\), but there is no vertex 7"),
    ((-1, 2), "there is no vertex -1: the sample has the vertices 0 to 2"),
])
def test_dangling_edge(edge, text):
    with pytest.raises(DanglingEdgeError, match=text):
        InputGraph.from_edges(3, [(0, 2), edge])


@pytest.mark.parametrize("num_vertices, edges, text", [
    (2, [(0, 0.5)], "from_edges: edges must be integers, got"),
    (2, [0, 1], r"must have 2 axes, got shape \(2,\)"),
    (2, [(0, 1, 1)], r"must be pairs \(child, parent\), shape \(num_edges, 2\), got shape \(1, 3\)"),
    (2.0, [(0, 1)], r"num_vertices must be an integer, got 2.0 \(float\)"),
    (-1, [], "num_vertices must not be negative, got -1"),
])
def test_malformed_edges(num_vertices, edges, text):
    with pytest.raises(GraphError, match=text):
        InputGraph.from_edges(num_vertices, edges)


@pytest.mark.filterwarnings("ignore::Warning")
def test_ragged_edges_are_an_error_in_every_numpy():
    with pytest.raises(GraphError, match="edges must be integers"):
        InputGraph.from_edges(3, [(0, 1), (2,)])


def test_edge_into_an_empty_sample():
    with pytest.raises(DanglingEdgeError, match="the sample has no vertices"):
        InputGraph.from_edges(0, [(0, 1)])


# ---- networkx --------------------------------------------------------------------------------------------------


def test_from_networkx_numbers_vertices_by_node_order():
    digraph = nx.DiGraph()
    digraph.add_nodes_from(["root", "a", "b"])
    digraph.add_edges_from([("b", "root"), ("a", "root")])
    graph = InputGraph.from_networkx(digraph)
    assert children(graph) == [[1, 2], [], []]     # networkx lists edges by source, in node order


def test_from_networkx_slot_orders_the_children():
    digraph = nx.DiGraph()
    digraph.add_nodes_from(["root", "a", "b"])
    digraph.add_edge("a", "root", slot=5)
    digraph.add_edge("b", "root", slot=0)
    assert InputGraph.from_networkx(digraph).children_of(0).tolist() == [2, 1]


def test_from_networkx_multidigraph_keeps_parallel_edges():
    digraph = nx.MultiDiGraph()
    digraph.add_nodes_from(range(3))
    digraph.add_edge(0, 2, slot=0)
    digraph.add_edge(0, 2, slot=2)
    digraph.add_edge(1, 2, slot=1)
    assert InputGraph.from_networkx(digraph).children_of(2).tolist() == [0, 1, 0]


@given(edge_lists())
def test_networkx_round_trip(case):
    graph = InputGraph.from_edges(*case)
    digraph = graph.to_networkx()
    assert digraph.is_multigraph() == (len(set(case[1])) < len(case[1]))
    assert InputGraph.from_networkx(digraph) == graph


def test_to_networkx_marks_the_samples():
    digraph = InputGraph.batch([InputGraph.chain(2), InputGraph.chain(1)]).to_networkx()
    assert dict(digraph.nodes(data="sample")) == {0: 0, 1: 0, 2: 1}
    assert list(digraph.edges(data="slot")) == [(0, 1, 0)]


def test_from_networkx_refuses_what_it_cannot_read():
    with pytest.raises(GraphError, match="expected a networkx DiGraph .* got Graph.*unroll"):
        InputGraph.from_networkx(nx.path_graph(3))
    with pytest.raises(GraphError, match="got list"):
        InputGraph.from_networkx([(0, 1)])
    mixed = nx.DiGraph([("a", "b"), ("b", "c")])
    mixed.edges["a", "b"]["slot"] = 0
    with pytest.raises(GraphError, match="sample 0, vertex 2: its edge 'b' -> 'c' has no \"slot\""):
        InputGraph.from_networkx(mixed)
    with pytest.raises(GraphError, match='edge attribute "slot" must be integers'):
        InputGraph.from_networkx(nx.DiGraph([("a", "b", {"slot": "left"})]))
    with pytest.raises(CycleError, match="sample 0, vertex 0 is its own child"):
        InputGraph.from_networkx(nx.DiGraph([("a", "a")]))
    assert InputGraph.from_networkx(nx.DiGraph()).num_vertices == 0


# ---- ready-made shapes -----------------------------------------------------------------------------------------


def test_chain():
    assert children(InputGraph.chain(4)) == [[], [0], [1], [2]]
    assert InputGraph.chain(4) == InputGraph.from_parents([1, 2, 3, -1])
    with pytest.raises(GraphError, match="chain: n must not be negative"):
        InputGraph.chain(-1)


@pytest.mark.parametrize("depth", range(6))
def test_complete_binary_tree(depth):
    graph = InputGraph.complete_binary_tree(depth)
    leaves = 2 ** depth
    assert graph.num_vertices == 2 * leaves - 1
    assert graph.arity.tolist() == [0] * leaves + [2] * (leaves - 1)
    assert graph.roots.tolist() == [graph.num_vertices - 1]
    assert graph == InputGraph.from_parents([leaves + v // 2 for v in range(2 * leaves - 2)] + [-1])


def test_unroll_hears_itself_first_then_the_neighbours_in_edge_order():
    graph = InputGraph.unroll(3, [(1, 2), (0, 1)], rounds=2)
    assert children(graph) == [[], [], [], [0, 1], [1, 2, 0], [2, 1], [3, 4], [4, 5, 3], [5, 4]]
    assert graph.num_samples == 1 and graph.roots.tolist() == [6, 7, 8]


def test_unroll_directed_and_self_loops():
    directed = InputGraph.unroll(2, [(0, 1)], rounds=1, undirected=False)
    assert children(directed) == [[], [], [0], [1, 0]]
    for undirected in (True, False):
        looped = InputGraph.unroll(2, [(0, 0)], rounds=1, undirected=undirected)
        assert children(looped) == [[], [], [0, 0], [1]]


def test_unroll_of_nothing():
    assert InputGraph.unroll(3, [(0, 1)], rounds=0) == InputGraph.from_parents([-1, -1, -1])
    assert InputGraph.unroll(0, [], rounds=4) == InputGraph.from_parents([])
    assert children(InputGraph.unroll(1, [], rounds=2)) == [[], [0], [1]]
    with pytest.raises(DanglingEdgeError, match=r"unroll: sample 0, vertex 0: edge 0 is \(u, w\) = \(0, 2\)"):
        InputGraph.unroll(2, [(0, 2)], rounds=1)
    with pytest.raises(GraphError, match="rounds must be an integer"):
        InputGraph.unroll(2, [(0, 1)], rounds=1.5)


# ---- batches ---------------------------------------------------------------------------------------------------


@given(st.lists(edge_lists(max_vertices=5), max_size=6))
def test_batch_is_the_union_of_its_samples(cases):
    graphs = [InputGraph.from_edges(*case) for case in cases]
    batch = InputGraph.batch(graphs)
    assert batch.num_samples == len(graphs)
    assert batch.num_vertices == sum(g.num_vertices for g in graphs)
    assert batch.num_edges == sum(g.num_edges for g in graphs)
    for i, graph in enumerate(graphs):
        first = int(batch.sample_offsets[i])
        for v in range(graph.num_vertices):
            assert (batch.children_of(first + v) - first).tolist() == graph.children_of(v).tolist()
            assert batch.sample_of(first + v) == i
            assert batch.locate(first + v) == f"sample {i}, vertex {v}"
    # The parts of a batch may be batches; the constructor accepts what we made.
    assert InputGraph.batch([InputGraph.batch(graphs[:2]), InputGraph.batch(graphs[2:])]) == batch
    assert pickle.loads(pickle.dumps(batch)) == batch


def test_batch_of_nothing_and_of_empty_samples():
    empty = InputGraph.batch([])
    assert (empty.num_vertices, empty.num_edges, empty.num_samples) == (0, 0, 0)
    assert InputGraph.batch([empty, empty]) == empty
    batch = InputGraph.batch([InputGraph.chain(0), InputGraph.chain(2), InputGraph.chain(0), InputGraph.chain(1)])
    assert batch.sample_offsets.tolist() == [0, 0, 2, 2, 3]
    assert [batch.locate(v) for v in range(3)] == ["sample 1, vertex 0", "sample 1, vertex 1", "sample 3, vertex 0"]


def test_batch_names_the_item_that_is_no_graph():
    good = InputGraph.chain(2)
    with pytest.raises(GraphError, match=r"sample 2 of the list is \[1, -1\] \(list\), not an InputGraph"):
        InputGraph.batch([good, good, [1, -1]])
    with pytest.raises(GraphError, match="expected a list of InputGraphs, got InputGraph"):
        InputGraph.batch(good)
    with pytest.raises(GraphError, match="expected a list of InputGraphs, got 3"):
        InputGraph.batch(3)
    assert InputGraph.batch(g for g in (good, good)).num_samples == 2


# ---- the object ------------------------------------------------------------------------------------------------


def test_graphs_are_immutable_also_after_pickling():
    graph = InputGraph.from_parents([2, 2, -1])
    for g in (graph, pickle.loads(pickle.dumps(graph))):
        for name in ("child_indptr", "child_index", "sample_offsets", "roots", "arity"):
            assert getattr(g, name).dtype == np.int64
            with pytest.raises(ValueError, match="read-only"):
                getattr(g, name)[0] = 1
        with pytest.raises(AttributeError):
            g.num_vertices = 7


def test_equality_hash_and_repr():
    graph = InputGraph.from_parents([2, 2, -1])
    same = InputGraph(3, [0, 0, 0, 2], [0, 1], [0, 3])
    assert graph == same and hash(graph) == hash(same)
    assert graph != InputGraph.from_edges(3, [(1, 2), (0, 2)])      # other order of the children
    assert InputGraph.chain(2) != InputGraph.batch([InputGraph.chain(2), InputGraph.chain(0)])
    assert graph != "graph"
    assert repr(graph) == "InputGraph(num_vertices=3, num_edges=2, num_samples=1)"


@pytest.mark.parametrize("v", [-1, 3])
def test_asking_for_a_vertex_that_does_not_exist(v):
    graph = InputGraph.chain(3)
    for ask in (graph.children_of, graph.parents_of, graph.sample_of, graph.locate):
        with pytest.raises(GraphError, match=f"vertex {v} was asked for, but the graph has the vertices 0 to 2"):
            ask(v)


@pytest.mark.parametrize("arrays, error, text", [
    ((2, [0, 0], [0], [0, 2]), GraphError, "child_indptr has 2 entries, but num_vertices=2 needs 3"),
    ((2, [0, 0, 2], [0], [0, 2]), GraphError, r"child_indptr must rise from 0 to 1, got \[0, 0, 2\]"),
    ((3, [0, 1, 0, 1], [1], [0, 3]), GraphError, "child_indptr must rise"),
    ((2, [0, 0, 1], [0], [0, 1]), GraphError, "sample_offsets must rise from 0 to 2"),
    ((2, [0, 0, 1], [0], []), GraphError, "sample_offsets must rise"),
    ((2, [0, 0, 1], [0.5], [0, 2]), GraphError, "child_index must be integers"),
    ((3, [0, 0, 1, 2], [0, 1], [0, 2, 3]), DanglingEdgeError, "sample 1, vertex 0 gathers vertex 1 of the batch"),
    ((3, [0, 0, 1, 2], [0, 9], [0, 2, 3]), DanglingEdgeError, "sample 1, vertex 0 gathers vertex 9 of the batch"),
    ((3, [0, 0, 1, 2], [0, 2], [0, 2, 3]), CycleError, "sample 1, vertex 0 is its own child"),
])
def test_constructor_checks_the_arrays(arrays, error, text):
    with pytest.raises(error, match=text):
        InputGraph(*arrays)
