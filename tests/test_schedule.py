"""Frontier scheduling: which vertices share a launch, how a launch is ordered, and what its errors say."""

import doctest
import importlib
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_dag

from cavs_core.errors import ArityError, CycleError
from cavs_core.graph import InputGraph
from cavs_core.schedule import IS_LEAF, IS_ROOT, check_arity, roles_of, schedule

# `cavs_core.schedule` names the function, once the package exports it, and no longer the file.
schedule_file = importlib.import_module("cavs_core.schedule")

# The first example compiles, or loads the compiled walks from disk.
unhurried = settings(deadline=None)


@st.composite
def dags(draw, max_vertices=14):
    """One sample whose numbering says nothing of its order: duplicates, components and single vertices included."""
    n = draw(st.integers(0, max_vertices))
    rank = draw(st.permutations(range(n)))
    if n < 2:
        return InputGraph.from_edges(n, [])
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n))
    return InputGraph.from_edges(n, [(rank[min(a, b)], rank[max(a, b)]) for a, b in pairs if a != b])


batches = st.lists(dags(), max_size=4).map(InputGraph.batch)


# ---- oracles ---------------------------------------------------------------------------------------------------


def naive_depth(graph):
    """Raise each vertex above its children until nothing changes."""
    depth = [0] * graph.num_vertices
    changed = True
    while changed:
        changed = False
        for v in range(graph.num_vertices):
            wanted = 1 + max((depth[c] for c in graph.children_of(v)), default=-1)
            changed |= wanted != depth[v]
            depth[v] = wanted
    return depth


def naive_order(graph, by_slot):
    """The keys of the docstring of `schedule`, sorted launch by launch."""
    depth = naive_depth(graph)
    readers = [[] for _ in range(graph.num_vertices)]
    for parent in range(graph.num_vertices):
        for slot, child in enumerate(graph.children_of(parent)):
            readers[child].append((parent, slot))
    place, launches = {}, []

    def key(v):
        if not readers[v]:
            return (1, v)
        return (0, min((depth[p], s, place[p]) if by_slot else (depth[p], place[p], s) for p, s in readers[v]))

    for k in reversed(range(max(depth, default=-1) + 1)):
        launch = sorted((v for v in range(graph.num_vertices) if depth[v] == k), key=key)
        place.update((v, i) for i, v in enumerate(launch))
        launches.insert(0, launch)
    return [v for launch in launches for v in launch]


def launches_of(plan):
    return [plan.order[a:b].tolist() for a, b in zip(plan.offsets[:-1], plan.offsets[1:])]


def slot_rows(graph, plan, k, slot):
    """Positions that the vertices of launch k read in one slot, those without such a child left out."""
    vertices = plan.order[plan.offsets[k]:plan.offsets[k + 1]]
    return [int(plan.position[graph.children_of(v)[slot]]) for v in vertices if graph.arity[v] > slot]


def is_range(rows):
    return rows == list(range(rows[0], rows[0] + len(rows))) if rows else True


# ---- what every schedule keeps ---------------------------------------------------------------------------------


@unhurried
@given(batches, st.booleans())
def test_every_vertex_runs_once_and_after_its_children(graph, by_slot):
    plan = schedule(graph, by_slot=by_slot)
    assert sorted(plan.order.tolist()) == list(range(graph.num_vertices))
    np.testing.assert_array_equal(plan.order[plan.position], np.arange(graph.num_vertices))
    for k, launch in enumerate(launches_of(plan)):
        assert launch, "a launch without vertices"
        for v in launch:
            assert plan.depth[v] == k
            assert all(plan.position[c] < plan.offsets[k] for c in graph.children_of(v))
    np.testing.assert_array_equal(plan.sizes, [len(launch) for launch in launches_of(plan)])


@unhurried
@given(batches)
def test_launch_0_is_exactly_the_leaves(graph):
    plan = schedule(graph)
    leaves = [v for v in range(graph.num_vertices) if not graph.children_of(v).size]
    assert sorted(plan.order[:plan.sizes[0]].tolist() if plan.num_launches else []) == leaves


@unhurried
@given(batches)
def test_depth_is_the_naive_one_and_launches_are_as_few_as_possible(graph):
    plan = schedule(graph)
    assert plan.depth.tolist() == naive_depth(graph)
    longest_path = nx.dag_longest_path_length(nx.DiGraph(graph.to_networkx()), weight=None, default_weight=1)
    assert plan.num_launches == (longest_path + 1 if graph.num_vertices else 0)


@unhurried
@given(batches, st.booleans())
def test_order_inside_a_launch_is_that_of_the_keys(graph, by_slot):
    assert schedule(graph, by_slot=by_slot).order.tolist() == naive_order(graph, by_slot)


@unhurried
@given(batches, st.booleans())
def test_schedules_are_deterministic_and_read_only(graph, by_slot):
    one, two = schedule(graph, by_slot=by_slot), schedule(graph, by_slot=by_slot)
    for name in ("depth", "order", "position", "offsets"):
        array = getattr(one, name)
        assert array.dtype == np.int64 and not array.flags.writeable
        np.testing.assert_array_equal(array, getattr(two, name))


@unhurried
@given(st.lists(dags(), min_size=1, max_size=4))
def test_schedule_of_a_batch_is_the_union_of_the_schedules(graphs):
    batch = InputGraph.batch(graphs)
    plan, parts = schedule(batch), [schedule(graph) for graph in graphs]
    assert plan.num_launches == max(part.num_launches for part in parts)
    assert plan.depth.tolist() == [d for part in parts for d in part.depth.tolist()]
    for k, launch in enumerate(launches_of(plan)):
        union = [first + v for first, part in zip(batch.sample_offsets.tolist(), parts)
                 if k < part.num_launches for v in launches_of(part)[k]]
        assert sorted(launch) == sorted(union)


# ---- contiguous gathers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, trees", [(0, 3), (1, 1), (2, 1), (4, 3), (7, 10)])
def test_complete_trees_by_slot_read_one_range_a_slot(depth, trees):
    graph = InputGraph.batch([InputGraph.complete_binary_tree(depth)] * trees)
    plan = schedule(graph, by_slot=True)
    assert plan.num_launches == depth + 1
    for k in range(1, plan.num_launches):
        both = slot_rows(graph, plan, k, 0) + slot_rows(graph, plan, k, 1)
        assert both == list(range(plan.offsets[k - 1], plan.offsets[k]))     # left ones, then right ones


@pytest.mark.parametrize("depth, trees", [(1, 1), (4, 3), (7, 10)])
def test_complete_trees_by_vertex_keep_siblings_side_by_side(depth, trees):
    graph = InputGraph.batch([InputGraph.complete_binary_tree(depth)] * trees)
    plan = schedule(graph, by_slot=False)
    for k in range(1, plan.num_launches):
        vertices = plan.order[plan.offsets[k]:plan.offsets[k + 1]]
        rows = np.concatenate([plan.position[graph.children_of(v)] for v in vertices])
        assert rows.tolist() == list(range(plan.offsets[k - 1], plan.offsets[k]))


@unhurried
@given(st.lists(st.integers(0, 12), max_size=8), st.booleans())
def test_chains_of_mixed_lengths_read_the_front_of_the_launch_before(lengths, by_slot):
    graph = InputGraph.batch([InputGraph.chain(n) for n in lengths])
    plan = schedule(graph, by_slot=by_slot)
    assert plan.num_launches == max(lengths, default=0)
    assert plan.sizes.tolist() == [sum(n > k for n in lengths) for k in range(plan.num_launches)]
    for k in range(1, plan.num_launches):
        first = int(plan.offsets[k - 1])
        assert slot_rows(graph, plan, k, 0) == list(range(first, first + int(plan.sizes[k])))


@unhurried
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12), st.integers(0, 4))
def test_unrolled_rounds_read_themselves_as_one_range(n, edges, rounds):
    graph = InputGraph.unroll(n, [(u % n, w % n) for u, w in edges], rounds)
    plan = schedule(InputGraph.batch([graph, graph]))
    assert plan.num_launches == rounds + 1
    for k in range(1, plan.num_launches):
        rows = slot_rows(InputGraph.batch([graph, graph]), plan, k, 0)
        assert rows == list(range(plan.offsets[k - 1], plan.offsets[k]))


def test_leaves_lie_as_their_first_reader_wants_them():
    #        7          launch 3: 7 = (4, 6)      6 is read first by launch 3, the leaf 4 too
    #      4   6        launch 2: 6 = (5, 3)
    #         5  3      launch 1: 5 = (1, 0)      children in the order 1, 0
    #        1 0        2 is alone
    graph = InputGraph.from_edges(8, [(4, 7), (6, 7), (5, 6), (3, 6), (1, 5), (0, 5)])
    assert launches_of(schedule(graph)) == [[1, 0, 3, 4, 2], [5], [6], [7]]


@pytest.mark.parametrize("by_slot, leaves", [(True, [0, 2, 4, 1, 3]), (False, [0, 1, 2, 3, 4])])
def test_by_slot_and_by_vertex_differ_as_documented(by_slot, leaves):
    graph = InputGraph.from_parents([5, 5, 6, 6, 7, 8, 8, 8, -1])
    assert launches_of(schedule(graph, by_slot=by_slot)) == [leaves, [5, 6, 7], [8]]


def test_a_shared_child_stands_where_its_earliest_launch_reads_it():
    # Leaf 0 is child 1 of vertex 4 (launch 2) and the only child of vertex 3 (launch 1): launch 1 decides.
    graph = InputGraph.from_edges(5, [(0, 3), (3, 4), (0, 4), (1, 4), (2, 3)])
    assert launches_of(schedule(graph)) == [[0, 2, 1], [3], [4]]


def test_slot_0_is_a_range_when_a_child_is_also_in_another_slot():
    # y is slot 1 of a and slot 0 of b; slot 0 comes first in the key, so slot 0 of (a, b, c) reads x, y, w.
    x, y, z, w, a, b, c = range(7)
    graph = InputGraph.from_edges(7, [(x, a), (y, a), (y, b), (z, b), (w, c), (z, c)])
    assert launches_of(schedule(graph)) == [[x, y, w, z], [a, b, c]]


# ---- sizes -----------------------------------------------------------------------------------------------------


def test_no_vertices():
    for graph in (InputGraph.batch([]), InputGraph.from_parents([]), InputGraph.batch([InputGraph.chain(0)] * 3)):
        plan = schedule(graph)
        assert plan.num_launches == 0 and plan.offsets.tolist() == [0] and plan.sizes.size == plan.order.size == 0
        assert repr(plan) == "Schedule(num_vertices=0, num_launches=0, largest=0)"


def test_single_vertices_share_one_launch_in_their_order():
    plan = schedule(InputGraph.batch([InputGraph.from_parents([-1])] * 5))
    assert launches_of(plan) == [[0, 1, 2, 3, 4]]


def test_chain_of_100000():
    plan = schedule(InputGraph.chain(100_000))
    np.testing.assert_array_equal(plan.order, np.arange(100_000))
    assert plan.num_launches == 100_000 and plan.sizes.max() == 1


@pytest.mark.parametrize("by_slot", [True, False])
def test_star_of_10000_children(by_slot):
    plan = schedule(InputGraph.from_parents([10_000] * 10_000 + [-1]), by_slot=by_slot)
    assert plan.sizes.tolist() == [10_000, 1]
    np.testing.assert_array_equal(plan.order, np.arange(10_001))


def test_a_star_beside_many_small_vertices_stays_linear():
    """200,000 vertices with one child share a launch with one of 200,000: slots times vertices would never end."""
    n = 200_000
    star = InputGraph.from_parents([n] * n + [-1])
    pair = InputGraph.from_parents([1, -1])
    plan = schedule(InputGraph.batch([pair] * n + [star]))
    assert plan.sizes.tolist() == [2 * n, n + 1]


def test_large_random_dag_against_its_rules():
    rng = np.random.default_rng(0)
    n = 50_000
    parent = np.repeat(np.arange(1, n), rng.integers(0, 5, size=n - 1))
    child = (rng.random(parent.size) * parent).astype(np.int64)
    shuffled = rng.permutation(n)
    graph = InputGraph.from_edges(n, np.stack([shuffled[child], shuffled[parent]], axis=1))
    plan = schedule(graph)
    below = plan.depth[graph.child_index]
    above = np.repeat(plan.depth, graph.arity)
    assert (below < above).all()
    inner = np.flatnonzero(graph.arity)
    highest_child = np.maximum.reduceat(below, graph.child_indptr[inner])
    np.testing.assert_array_equal(plan.depth[inner], highest_child + 1)
    assert not plan.depth[graph.arity == 0].any()
    np.testing.assert_array_equal(np.diff(plan.depth[plan.order]) >= 0, True)


def test_graphs_from_every_constructor_share_one_compiled_function():
    arrays = np.array([[0, 0, 0, 2, 9], [0, 0, 1, 1, 9]]).T      # columns are not contiguous
    graphs = [
        InputGraph.chain(3), InputGraph.complete_binary_tree(2), InputGraph.from_parents([1, -1]), InputGraph.batch([]),
        InputGraph.from_edges(3, np.array([[0, 1], [2, 2]]).T), InputGraph.unroll(2, [(0, 1)], 2),
        InputGraph(3, arrays[:4, 0], arrays[1:3, 1], [0, 3]), pickle.loads(pickle.dumps(InputGraph.chain(3))),
        InputGraph.batch([InputGraph.chain(3), InputGraph.chain(2)]), InputGraph.from_networkx(nx.DiGraph([(0, 1)])),
    ]
    for graph in graphs:
        schedule(graph, by_slot=np.bool_(True))
    for walk in (schedule_file._depths, schedule_file._order_launches):
        assert len(getattr(walk, "signatures", [None])) == 1     # no attribute under NUMBA_DISABLE_JIT


def test_repr_and_examples():
    assert repr(schedule(InputGraph.chain(3))) == "Schedule(num_vertices=3, num_launches=3, largest=1)"
    assert doctest.testmod(schedule_file).failed == 0


# ---- cycles ----------------------------------------------------------------------------------------------------


def test_cycle_names_the_sample_and_the_vertices_in_order():
    looped = InputGraph.from_edges(6, [(5, 1), (1, 4), (4, 2), (2, 1), (2, 3), (0, 5)])
    batch = InputGraph.batch([InputGraph.chain(3), InputGraph.chain(0), looped, InputGraph.chain(2)])
    with pytest.raises(CycleError, match=r"sample 2, vertex 1 is its own ancestor: 1 -> 4 -> 2 -> 1 \(child -> parent"):
        schedule(batch)


def test_cycle_below_and_above_other_vertices():
    # 0 and 1 hang under the cycle 2 -> 3 -> 2, 4 sits on top of it.
    graph = InputGraph.from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 2), (3, 4)])
    with pytest.raises(CycleError, match="sample 0, vertex 2 is its own ancestor: 2 -> 3 -> 2 "):
        schedule(graph)


def test_cycle_of_parents():
    with pytest.raises(CycleError, match="sample 0, vertex 0 is its own ancestor: 0 -> 1 -> 2 -> 0"):
        schedule(InputGraph.from_parents([1, 2, 0]))


def test_long_cycle_is_found_without_recursion_and_shortened():
    n = 100_000
    with pytest.raises(CycleError, match=r"8 -> 9 -> \(99980 more\) -> 99990 -> .* -> 99999 -> 0 \(child") as caught:
        schedule(InputGraph.from_parents((np.arange(n) + 1) % n))
    assert len(str(caught.value)) < 500


@unhurried
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_cycles_are_found_exactly_when_there_are_some(n, pairs):
    edges = [(a % n, b % n) for a, b in pairs if a % n != b % n]
    graph = InputGraph.batch([InputGraph.chain(2), InputGraph.from_edges(n, edges)])
    if nx.is_directed_acyclic_graph(nx.DiGraph(edges)):
        assert schedule(graph).order.size == n + 2
        return
    with pytest.raises(CycleError, match="sample 1, vertex") as caught:
        schedule(graph)
    path = str(caught.value).split("ancestor: ")[1].split(" (child")[0].split(" -> ")
    cycle = [int(v) for v in path]
    assert cycle[0] == cycle[-1] == min(cycle)
    assert len(set(cycle)) == len(cycle) - 1
    assert set(zip(cycle, cycle[1:])) <= set(edges)


# ---- arity -----------------------------------------------------------------------------------------------------


def test_arity_that_fits():
    trees = InputGraph.batch([InputGraph.complete_binary_tree(2), InputGraph.complete_binary_tree(0)])
    check_arity(trees, exact=2)
    check_arity(trees, at_least=1)
    check_arity(trees, exact=2, at_least=2)
    check_arity(trees)
    check_arity(InputGraph.batch([]), exact=3, allow_leaves=False)
    check_arity(InputGraph.from_parents([-1]), exact=0, allow_leaves=False)


def test_arity_names_the_first_vertex_that_differs():
    batch = InputGraph.batch([InputGraph.complete_binary_tree(1), InputGraph.chain(3)])
    with pytest.raises(ArityError, match=r"sample 1, vertex 1 has 1 child, but its vertex function gathers exactly 2 "
                                         r"\(leaves are allowed\); 2 of 6 vertices differ.*gather_all"):
        check_arity(batch, exact=2)
    with pytest.raises(ArityError, match="sample 1, vertex 1 has 1 child, .* gathers at least 2"):
        check_arity(batch, at_least=2)
    with pytest.raises(ArityError, match="sample 0, vertex 2 has 2 children, .* exactly 1 and at least 1"):
        check_arity(batch, exact=1, at_least=1)


def test_leaves_can_be_refused():
    with pytest.raises(ArityError, match="sample 0, vertex 0 has 0 children, .* at least 1 at every vertex, leaves"):
        check_arity(InputGraph.chain(2), at_least=1, allow_leaves=False)


def test_a_batch_of_known_graphs_joins_what_they_know(monkeypatch):
    rng = np.random.RandomState(0)
    graphs = [random_dag(int(n), rng) for n in rng.randint(1, 20, 10)]
    want = schedule(InputGraph.batch(graphs)).depth
    assert all(graph.known_depth is not None for graph in graphs)
    monkeypatch.setattr("cavs_core.schedule._depths", lambda *args: pytest.fail("looked at again"))
    np.testing.assert_array_equal(schedule(InputGraph.batch(graphs)).depth, want)
    mixture = InputGraph.batch([InputGraph.batch(graphs[3:]), *graphs[:3]])
    monkeypatch.undo()
    np.testing.assert_array_equal(schedule(mixture).depth, schedule(InputGraph.batch(graphs[3:] + graphs[:3])).depth)


@given(st.integers(0, 10_000))
def test_roles_and_their_children(seed):
    rng = np.random.RandomState(seed)
    graph = InputGraph.batch([random_dag(int(n), rng) for n in rng.randint(1, 9, 3)])
    role, fewest, most = roles_of(graph)
    roots = set(graph.roots.tolist())
    want = [IS_LEAF * (graph.arity[v] == 0) + IS_ROOT * (v in roots) for v in range(graph.num_vertices)]
    assert role.tolist() == want
    for r in range(4):
        arity = [int(a) for a, mine in zip(graph.arity, want) if mine == r]
        assert (fewest[r], most[r]) == ((min(arity), max(arity)) if arity else (-1, -1))
