"""Vertex functions that ask what their vertex is: v.is_leaf and v.is_root. The loop over vertices is the oracle."""

import numpy as np
import pytest
from small_cells import SUM_TREE, function

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn
InputGraph = cavs.InputGraph
WORDS, HIDDEN = 6, 3


class Sentiment(cavs.VertexFunction):
    """A leaf looks its word up, an inner vertex joins its children, the root makes the loss."""

    def __init__(self, sparse=False, **options):
        super().__init__(state_shapes=[(HIDDEN,)], prefix="sentiment_", **options)
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, HIDDEN, sparse_grad=sparse)
            self.join = nn.Dense(HIDDEN, in_units=2 * HIDDEN)
            self.out = nn.Dense(2, in_units=HIDDEN)
            self.loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def leaf(self, word):
        return self.embed(word)

    def node(self, F, left, right):
        return F.tanh(self.join(F.concat(left, right, dim=1)))

    def vertex(self, F, v):
        h = self.leaf(v.pull("word")) if v.is_leaf else self.node(F, *v.gather(0), *v.gather(1))
        if v.is_root:
            v.push(self.loss(self.out(h), v.pull("label")))
        else:
            v.scatter(h)


TREES = [SUM_TREE, InputGraph.from_parents([2, 2, -1]), InputGraph.from_parents([-1]), SUM_TREE,
         InputGraph.from_parents([4, 4, 5, 5, 6, 6, -1])]


def sample_inputs(graphs=TREES, words=(1, 2, 1, 3)):
    count = sum(g.num_vertices for g in graphs)
    return {"word": np.resize(np.array(words), count), "label": np.arange(count) % 2}


def looped(cell, graphs, inputs, dtype="float32"):
    """One sample, one vertex after the other; the losses of the roots."""
    losses, start = [], 0
    for graph in graphs:
        word, label = (mx.nd.array(inputs[k][start:start + graph.num_vertices], dtype=dtype) for k in ("word", "label"))
        states = {}
        for v in np.argsort(cavs.schedule.depths_of(graph), kind="stable").tolist():
            below = [states[c] for c in graph.children_of(v).tolist()]
            states[v] = cell.node(mx.nd, *below) if below else cell.leaf(word[v:v + 1])
            if v in graph.roots:
                losses.append(cell.loss(cell.out(states[v]), label[v:v + 1]))
        start += graph.num_vertices
    return losses


def gradients(cell):
    return {name: p.grad().asnumpy() for name, p in cell.collect_params().items() if p.grad_req != "null"}


def assert_same(got, want, dtype="float32"):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], err_msg=name, **(
            dict(rtol=1e-4, atol=1e-6) if dtype == "float32" else dict(rtol=1e-9, atol=1e-12)))


def make(sparse=False, dtype="float32"):
    cell = Sentiment(sparse)
    cell.initialize(mx.init.Uniform(0.5))
    if dtype != "float32":
        cell.cast(dtype)
    return cell


BACKENDS = pytest.mark.parametrize("backend", ["mxnet", "native"])


@BACKENDS
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("begin", ["pushed", "sum", "roots"])
def test_values_and_gradients_are_those_of_the_loop(backend, sparse, dtype, begin):
    cell, inputs = make(sparse, dtype), sample_inputs()
    with autograd.record():
        want = looped(cell, TREES, inputs, dtype)
    autograd.backward(want)
    want_grads = gradients(cell)
    for p in cell.collect_params().values():
        p.zero_grad()
    with autograd.record():
        out = cavs.run(cell, TREES, inputs, backend=backend)
        heads = {"pushed": lambda: out.pushed, "sum": lambda: out.pushed.sum(), "roots": lambda: out.roots}[begin]()
    autograd.backward(heads)
    np.testing.assert_allclose(out.pushed.asnumpy(), np.concatenate([x.asnumpy() for x in want]), rtol=1e-5)
    assert_same(gradients(cell), want_grads, dtype)
    assert out.pushed.shape == (5,) and out.pushed.dtype == np.dtype(dtype)


@BACKENDS
@pytest.mark.parametrize("begin", ["pushed", "sum"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_written_added_or_left_alone(backend, begin, dtype):
    cell, inputs = make(dtype=dtype), sample_inputs()
    cell.join.weight.grad_req, cell.embed.weight.grad_req = "add", "null"
    with autograd.record():
        losses = looped(cell, TREES, inputs, dtype)
    autograd.backward(losses)
    once = gradients(cell)
    for _ in range(2):
        with autograd.record():
            out = cavs.run(cell, TREES, inputs, backend=backend)
            heads = out.pushed if begin == "pushed" else out.pushed.sum()
        autograd.backward(heads)
    once[cell.join.weight.name] *= 3
    assert_same(gradients(cell), once, dtype)


def test_only_vertices_that_push_have_rows():
    cell, inputs = make(), sample_inputs()
    out = cavs.run(cell, TREES, inputs)
    assert out.pushed.shape == out.roots.shape == (5,)
    assert [out.of(i).shape for i in range(5)] == [(1,)] * 5
    np.testing.assert_array_equal(out.of(3).asnumpy(), out.pushed.asnumpy()[3:4])


def test_a_sample_without_pushing_vertices_has_no_rows():
    def vertex(self, F, v):
        v.scatter(v.gather_sum()[0] + 1)
        if v.is_leaf:
            v.push(v.pull("x"))

    cell = function(vertex, states=[(1,)])
    out = cavs.run(cell, [InputGraph.chain(3), InputGraph.from_parents([2, 2, -1])], {"x": np.arange(6.0)[:, None]})
    assert out.pushed.asnumpy().ravel().tolist() == [0, 3, 4]
    assert out.roots.shape == (0, 1)
    assert out.of(1).asnumpy().ravel().tolist() == [3, 4]


@BACKENDS
def test_roots_gather_any_number_and_run_once(backend):
    """A root that adds up what all others made: one launch for the roots of all samples, after the last level."""
    def setup(self):
        self.own = nn.Dense(2, in_units=2, use_bias=False)

    def vertex(self, F, v):
        if v.is_root:
            (total,) = v.gather_sum()
            (every,) = v.gather_all()
            v.push(total, every.max())
        elif v.is_leaf:
            v.scatter(self.own(v.pull("x")))
        else:
            v.scatter(F.tanh(v.gather(0)[0]))

    cell = function(vertex, setup=setup)
    star = InputGraph.from_edges(5, [(0, 2), (1, 4), (2, 3), (3, 4), (0, 4)])
    x = mx.nd.array(np.random.RandomState(0).normal(size=(10, 2)))
    x.attach_grad()

    def loop():
        totals, largest = [], []
        for s in (0, 5):
            h0, h1 = cell.own(x[s:s + 1]), cell.own(x[s + 1:s + 2])
            h3 = mx.nd.tanh(mx.nd.tanh(h0))
            totals.append(h0 + h1 + h3)
            largest.append(mx.nd.maximum(mx.nd.maximum(h1, h3), h0))
        return mx.nd.concat(*totals, dim=0), mx.nd.concat(*largest, dim=0)

    found = []
    for run in (loop, lambda: cavs.run(cell, [star, star], {"x": x}, backend=backend).pushed):
        with autograd.record():
            total, largest = run()
            loss = (total * total).sum() + (largest * 2).sum()
        loss.backward()
        found.append([total.asnumpy(), largest.asnumpy(), x.grad.asnumpy(), cell.own.weight.grad().asnumpy()])
    for got, want in zip(*found):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_function_is_traced_once_for_each_set_of_answers():
    asked = []

    def vertex(self, F, v):
        if v.is_leaf:
            asked.append("leaf")
        else:
            asked.append("inner")
        v.scatter(v.gather_sum()[0] + 1)
        v.push(v.gather_sum()[0])

    cell = function(vertex, states=[(1,)])
    for _ in range(2):
        cavs.run(cell, TREES)
    assert sorted(asked) == ["inner", "leaf"]


def test_only_roles_that_occur_are_traced():
    def vertex(self, F, v):
        assert not v.is_leaf or not v.is_root, "no sample is a single vertex"
        v.scatter(v.gather_sum()[0] + 1)
        v.push(v.gather_sum()[0])

    cell = function(vertex, states=[(1,)])
    assert cavs.run(cell, [SUM_TREE]).pushed.shape == (5, 1)
    with pytest.raises(AssertionError, match="single vertex"):
        cavs.run(cell, [InputGraph.from_parents([-1])])


def test_what_is_pushed_must_be_alike():
    def vertex(self, F, v):
        h = v.gather_sum()[0] + 1
        v.scatter(h)
        v.push(F.concat(h, h, dim=1) if v.is_leaf else h)

    with pytest.raises(cavs.TraceError, match=r"float32\[1, 2\].*is_leaf is True|is_leaf is True.*float32\[1, 2\]"):
        cavs.run(function(vertex, states=[(1,)]), [SUM_TREE])


def test_somebody_must_push():
    def vertex(self, F, v):
        v.scatter(v.gather_sum()[0] + 1)
        if v.is_leaf and v.is_root:
            v.push(v.gather_sum()[0])

    with pytest.raises(cavs.TraceError, match="v.push for no vertex of these graphs"):
        cavs.run(function(vertex, states=[(1,)]), [SUM_TREE])


def test_only_a_root_that_was_asked_for_need_not_scatter():
    def vertex(self, F, v):
        v.push(v.gather_sum()[0])
        if v.is_leaf:
            v.scatter(v.gather_sum()[0])

    with pytest.raises(cavs.TraceError, match="never called v.scatter"):
        cavs.run(function(vertex, states=[(1,)]), [SUM_TREE])


def test_arity_is_checked_for_each_role():
    cell, bad = make(), InputGraph.from_parents([2, 2, 3, -1])          # the root has one child
    with pytest.raises(cavs.ArityError, match="sample 0, vertex 3 has 1 child"):
        cavs.run(cell, [bad], sample_inputs([bad]))


@BACKENDS
def test_a_missing_child_reads_the_initial_state_of_its_role(backend):
    def vertex(self, F, v):
        (left,), (right,) = v.gather(0), v.gather(1)
        h = 1 + left + 10 * right + (100 if v.is_root else 0)
        v.scatter(h)
        v.push(h)

    cell = function(vertex, states=[(1,)], allow_missing=True)
    out = cavs.run(cell, [InputGraph.chain(3), InputGraph.from_parents([-1])], backend=backend)
    assert out.pushed.asnumpy().ravel().tolist() == [1, 2, 103, 101]


@BACKENDS
def test_learned_initial_states_get_gradients_from_every_role(backend):
    class Cell(cavs.VertexFunction):
        def __init__(self):
            super().__init__(state_shapes=[(2,)], initial_state="learned", allow_missing=True)

        def vertex(self, F, v):
            (left,), (right,) = v.gather(0), v.gather(1)
            h = left + (3 * right if v.is_root else 2 * right)
            v.scatter(h)
            v.push(h)

    cell = Cell()
    cell.initialize()
    cell.initial_state0.set_data(mx.nd.array([[1.0, 2.0]]))
    for begin in (lambda p: p, lambda p: p.sum()):
        with autograd.record():
            out = cavs.run(cell, [InputGraph.chain(3)], backend=backend)
            head = begin(out.pushed)
        head.backward()
        # leaf: s + 2 s; then (3 s) + 2 s; at the root (5 s) + 3 s
        np.testing.assert_allclose(out.pushed.asnumpy()[:, 0], [3, 5, 8])
        np.testing.assert_allclose(cell.initial_state0.grad().asnumpy(), [[16, 16]])


def test_an_empty_batch_of_a_function_with_roles():
    cell = make()
    out = cavs.run(cell, [], {"word": np.zeros(0, int), "label": np.zeros(0, int)})
    assert out.pushed.shape[0] == 0
