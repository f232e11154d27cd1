"""The Cavs face: what a user writes, and what comes back."""

import numpy as np
import pytest
from models import ChildSumLSTM, TreeFC, features, random_binary_tree, random_tree
from small_cells import SUM_TREE, counter, function

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn
InputGraph = cavs.InputGraph


# ---- what comes back -------------------------------------------------------------------------


def test_pushed_roots_and_samples():
    cell = function(counter, states=[(1,)])
    out = cavs.run(cell, [SUM_TREE, InputGraph.chain(2)])
    assert out.pushed.asnumpy().ravel().tolist() == [1, 1, 3, 1, 5, 1, 2]
    assert out.roots.asnumpy().ravel().tolist() == [5, 2]
    assert out.of(0).shape == (5, 1)
    assert out.of(1).asnumpy().ravel().tolist() == out.of(-1).asnumpy().ravel().tolist() == [1, 2]
    with pytest.raises(IndexError, match="2 samples"):
        out.of(2)
    assert "2 samples" in repr(out)


def test_a_graph_batch_and_a_call_of_the_cell_work_too():
    cell = function(counter, states=[(1,)])
    batch = InputGraph.batch([SUM_TREE, SUM_TREE])
    np.testing.assert_array_equal(cell(batch).pushed.asnumpy(), cavs.run(cell, [SUM_TREE, SUM_TREE]).pushed.asnumpy())


def test_several_pushed_values_of_different_shapes():
    def vertex(self, F, v):
        (h,) = v.gather_sum()
        h = h + v.pull("x")
        v.scatter(h)
        v.push(h, h.sum(axis=1))
        v.push(F.stack(h, h * 2, axis=1).reshape((2, 2)))

    out = cavs.run(function(vertex), [SUM_TREE], {"x": np.ones((5, 2), "float32")})
    assert [p.shape for p in out.pushed] == [(5, 2), (5,), (5, 2, 2)]
    assert [p.shape for p in out.roots] == [(1, 2), (1,), (1, 2, 2)]
    assert out.pushed[1].asnumpy().tolist() == [2, 2, 6, 2, 10]


def test_inputs_as_array_numpy_and_list():
    cell = TreeFC()
    cell.initialize()
    rng = np.random.RandomState(0)
    graphs = [random_binary_tree(n, rng) for n in (3, 1, 2)]
    x = features(graphs, rng)["x"]
    want = cavs.run(cell, graphs, {"x": x}).pushed.asnumpy()
    offsets = InputGraph.batch(graphs).sample_offsets
    parts = [x[int(a):int(b)] for a, b in zip(offsets, offsets[1:])]
    for form in (x.asnumpy(), parts, [p.asnumpy() for p in parts], x.asnumpy().astype("float64")):
        np.testing.assert_array_equal(cavs.run(cell, graphs, {"x": form}).pushed.asnumpy(), want)


def test_gradients_flow_into_a_list_of_inputs():
    cell = TreeFC()
    cell.initialize()
    rng = np.random.RandomState(0)
    graphs = [random_binary_tree(n, rng) for n in (3, 2)]
    parts = [mx.nd.array(rng.normal(size=(g.num_vertices, 4))) for g in graphs]
    for p in parts:
        p.attach_grad()
    with autograd.record():
        loss = cavs.run(cell, graphs, {"x": parts}).pushed.sum()
    loss.backward()
    assert all(np.abs(p.grad.asnumpy()).max() > 0 for p in parts)


def test_empty_batches_and_empty_samples():
    cell = TreeFC()
    cell.initialize()
    for graphs in ([], [InputGraph.chain(0)], [InputGraph.chain(0)] * 3):
        with autograd.record():
            out = cavs.run(cell, graphs, {"x": np.zeros((0, 4), "float32")})
        assert out.pushed.shape == (0, 5) and out.roots.shape == (0, 5)
        assert out.stats.launches == 0
    graphs = [InputGraph.chain(0), InputGraph.from_parents([2, 2, -1]), InputGraph.chain(0)]
    out = cavs.run(cell, graphs, {"x": np.ones((3, 4), "float32")})
    assert [out.of(i).shape for i in range(3)] == [(0, 5), (3, 5), (0, 5)]


def test_a_vertex_without_inputs_scatters_rows_of_shared_values():
    """Without a pull all leaves are alike; their state is still a row each, with the right gradient."""
    def setup(self):
        self.w = self.params.get("w", shape=(1, 2), init="ones")

    def vertex(self, F, v):
        (below,) = v.gather_sum()
        h = below * 2 + self.w.data()
        v.scatter(h)
        v.push(h)

    cell = function(vertex, setup=setup)
    with autograd.record():
        out = cavs.run(cell, [SUM_TREE, InputGraph.chain(1)])
        loss = out.roots.sum()
    loss.backward()
    assert out.pushed.asnumpy()[:, 0].tolist() == [1, 1, 5, 1, 13, 1]
    assert cell.w.grad().asnumpy().tolist() == [[14, 14]]


def test_no_states_at_all():
    """A function that neither gathers nor scatters is one launch over all vertices."""
    def vertex(self, F, v):
        v.push(v.pull("x") * 2)

    out = cavs.run(function(vertex, states=[]), [SUM_TREE], {"x": np.arange(5, dtype="float32").reshape(5, 1)})
    assert out.pushed.asnumpy().ravel().tolist() == [0, 2, 4, 6, 8]


def test_pushing_and_scattering_inputs_unchanged():
    def vertex(self, F, v):
        (h,) = v.gather(0)
        v.scatter(v.pull("x"))
        v.push(h, v.pull("x"))

    x = mx.nd.array(np.arange(6).reshape(3, 2))
    x.attach_grad()
    with autograd.record():
        before, same = cavs.run(function(vertex), [InputGraph.chain(3)], {"x": x}).pushed
        loss = (before * 10 + same).sum()
    loss.backward()
    assert before.asnumpy().tolist() == [[0, 0], [0, 1], [2, 3]]
    assert same.asnumpy().tolist() == x.asnumpy().tolist()
    assert x.grad.asnumpy().tolist() == [[11, 11], [11, 11], [1, 1]]


def test_blocked_gathers_send_nothing_back():
    def vertex(self, F, v):
        (h,) = v.gather_sum()
        out = F.BlockGrad(h) + v.pull("x")
        v.scatter(out)
        v.push(out)

    x = mx.nd.ones((5, 2))
    x.attach_grad()
    with autograd.record():
        loss = cavs.run(function(vertex), [SUM_TREE], {"x": x}).roots.sum()
    loss.backward()
    assert x.grad.asnumpy()[:, 0].tolist() == [0, 0, 0, 0, 1]


def test_dropout_draws_a_mask_per_vertex_in_every_run():
    def vertex(self, F, v):
        v.push(F.Dropout(v.pull("x"), p=0.5))

    cell = function(vertex, states=[])
    x = mx.nd.ones((200, 8))
    x.attach_grad()
    graph = [InputGraph.from_parents([-1] * 200)]
    with autograd.record():
        first = cavs.run(cell, graph, {"x": x}).pushed
        loss = first.sum()
    loss.backward()
    np.testing.assert_array_equal(first.asnumpy(), x.grad.asnumpy())
    assert len(np.unique(first.asnumpy(), axis=0)) > 100
    assert set(np.unique(first.asnumpy())) == {0.0, 2.0}
    with autograd.record():
        second = cavs.run(cell, graph, {"x": x}).pushed
    assert (first.asnumpy() != second.asnumpy()).any()
    np.testing.assert_array_equal(cavs.run(cell, graph, {"x": x}).pushed.asnumpy(), x.asnumpy())
    mx.random.seed(11)
    with autograd.train_mode():
        a = cavs.run(cell, graph, {"x": x}).pushed.asnumpy()
    mx.random.seed(11)
    with autograd.train_mode():
        b = cavs.run(cell, graph, {"x": x}).pushed.asnumpy()
    np.testing.assert_array_equal(a, b)


def test_parameters_are_fetched_again_at_every_run():
    cell = TreeFC()
    cell.initialize(mx.init.One())
    graphs = [InputGraph.from_parents([2, 2, -1])]
    x = np.ones((3, 4), "float32")
    first = cavs.run(cell, graphs, {"x": x}).pushed.asnumpy()
    cell.initialize(mx.init.Zero(), force_reinit=True)
    assert (cavs.run(cell, graphs, {"x": x}).pushed.asnumpy() == 0).all() and (first > 0).all()
    cell.initialize(mx.init.One(), force_reinit=True)
    cell.cast("float64")
    out = cavs.run(cell, graphs, {"x": x.astype("float64")}).pushed
    assert out.dtype == np.float64
    np.testing.assert_allclose(out.asnumpy(), first)


def test_saving_loading_hybridizing_and_deferred_shapes(tmp_path):
    def setup(self):
        self.fc = nn.Dense(2)                   # in_units is found by the first run
        self.inp = nn.HybridSequential()
        self.inp.add(nn.Dense(2, activation="tanh"))

    def vertex(self, F, v):
        (h,) = v.gather_sum()
        h = self.fc(h) + self.inp(v.pull("x"))
        v.scatter(h)
        v.push(h)

    cell = function(vertex, setup=setup)
    x = np.random.RandomState(0).normal(size=(5, 3)).astype("float32")
    want = cavs.run(cell, [SUM_TREE], {"x": x}).pushed.asnumpy()
    assert cell.fc.weight.shape == (2, 2) and cell.inp[0].weight.shape == (2, 3)
    cell.save_parameters(str(tmp_path / "cell.params"))
    other = function(vertex, setup=setup)
    other.load_parameters(str(tmp_path / "cell.params"))
    other.hybridize()
    np.testing.assert_array_equal(cavs.run(other, [SUM_TREE], {"x": x}).pushed.asnumpy(), want)


def test_a_traced_program_is_used_again():
    cell = ChildSumLSTM()
    cell.initialize()
    rng = np.random.RandomState(0)
    for n in (3, 5, 9):
        graphs = [random_tree(n, rng)]
        cavs.run(cell, graphs, features(graphs, rng))
    assert len(cell._plans) == 1


def test_memory_estimate_grows_with_the_rows_and_counts_backward():
    cell = ChildSumLSTM(hidden=64, embed=4)
    cell.initialize()
    sizes = {}
    for n in (100, 200):
        graphs = [InputGraph.chain(n)] * 4
        inputs = features(graphs, np.random.RandomState(0))
        sizes[n] = cavs.run(cell, graphs, inputs).stats.peak_bytes
        with autograd.record():
            training = cavs.run(cell, graphs, inputs).stats.peak_bytes
        assert training > 1.5 * sizes[n]
    assert 1.9 < sizes[200] / sizes[100] < 2.1
    assert sizes[100] > 4 * 100 * 64 * 4 * 2            # at least the two states
