"""The native backend behind the Gluon face: values, gradients and parameters as the loop gives them."""

import gc

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.backends.native_cpu.memory import ARENA
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd
BACKENDS = ["native", "mxnet"]


@gdb.vertex
class Cell(gluon.HybridBlock):
    """A word and two children; the loss of the node comes with its state."""

    def __init__(self, hidden=6, sparse=False, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = gluon.nn.Embedding(9, hidden, sparse_grad=sparse)
            self.gates = gluon.nn.Dense(5 * hidden, in_units=3 * hidden)
            self.classes = gluon.nn.Dense(3, in_units=hidden)

    def hybrid_forward(self, F, word, label, left, right):
        gates = self.gates(F.concat(self.embed(word), left[0], right[0], dim=1))
        i, fl, fr, o, u = F.split(gates, num_outputs=5, axis=1)
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * left[1] + F.sigmoid(fr) * right[1]
        h = F.sigmoid(o) * F.tanh(c)
        return h, c, -F.pick(F.log_softmax(self.classes(h)), label)


def losses_of(cell, zero, leaves):
    losses = []

    def call(word, left, right):
        h, c, loss = cell(word, word % 3, left, right)
        losses.append(loss)
        return h, c

    level = [call(k % 9, zero, zero) for k in range(leaves)]
    while len(level) > 1:
        level = [call(0, *pair) for pair in zip(level[::2], level[1::2])] + level[len(level) // 2 * 2:]
    return losses


def train(backend, dtype="float32", grad_req="write", sparse=False, steps=2, one_by_one=False):
    mx.random.seed(3)
    cell = Cell(sparse=sparse, prefix="cell_")
    cell.initialize(mx.init.Xavier())
    cell.cast(dtype)
    for name in ("gates", "classes"):
        getattr(cell, name).collect_params().setattr("grad_req", grad_req)
    zero = (nd.zeros((1, 6), dtype=dtype), nd.zeros((1, 6), dtype=dtype))
    trainer = gluon.Trainer(cell.collect_params(), "sgd", {"learning_rate": 0.1})
    found = []
    for step in range(steps):
        with autograd.record():
            if backend is None:
                losses = losses_of(cell, zero, 5 + step)
            else:
                with gdb.batching(backend=backend) as scope:
                    losses = losses_of(cell, zero, 5 + step)
                assert not scope.stats.fallbacks
        for part in ([[x] for x in losses] if one_by_one else [losses]):
            autograd.backward(part, retain_graph=one_by_one)
        found += [p.grad().asnumpy() for p in cell.collect_params().values() if p.grad_req != "null"]
        found.append(np.concatenate([x.asnumpy() for x in losses]))
        trainer.step(len(losses))
    return found + [p.data().asnumpy() for p in cell.collect_params().values()]


def same(got, want, dtype="float32"):
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-4 if dtype == "float32" else 1e-9, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad_req", ["write", "add", "null"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_same_as_loop(backend, grad_req, dtype):
    same(train(backend, dtype, grad_req), train(None, dtype, grad_req), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_embedding_inside_a_vertex(backend):
    same(train(backend, sparse=True), train(None, sparse=True))


def test_a_pass_for_each_sample():
    same(train("native", grad_req="add", one_by_one=True), train(None, grad_req="add", one_by_one=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_operands_on_the_tape_get_their_gradient(backend):
    """A leaf that was computed on the tape, a variable, and a parameter that is used inside and outside."""
    def work(batch):
        mx.random.seed(5)
        net = gluon.nn.Dense(3, in_units=3, prefix="net_")
        net.initialize(mx.init.Xavier())
        free = nd.array([[1.0, -2.0, 3.0]])
        free.attach_grad("add")
        with autograd.record():
            outside = [net(nd.array([[float(k), 1.0, 2.0]])) for k in range(4)]

            def loss(x):
                return (nd.tanh(net(x)) * free).sum()

            if batch:
                with gdb.batching(backend=backend):
                    losses = [loss(x) for x in outside]
            else:
                losses = [loss(x) for x in outside]
        autograd.backward(losses)
        return [net.weight.grad().asnumpy(), net.bias.grad().asnumpy(), free.grad.asnumpy()]

    same(work(True), work(False))


def test_head_gradients_and_retained_graphs():
    def work(batch):
        x = nd.array([[1.0, 2.0]])
        x.attach_grad("add")
        with autograd.record():
            if batch:
                with gdb.batching(backend="native"):
                    a, b = nd.exp(x), x * x
            else:
                a, b = nd.exp(x), x * x
        for _ in range(2):
            autograd.backward([a, b], [nd.array([[1.0, 3.0]]), None], retain_graph=True)
        a.backward(nd.array([[2.0, 2.0]]), retain_graph=True)
        return [x.grad.asnumpy()]

    same(work(True), work(False))


def test_results_that_become_arrays_go_over_the_tape():
    def work(batch):
        mx.random.seed(5)
        cell = Cell(prefix="cell_")
        cell.initialize(mx.init.Xavier())
        zero = (nd.zeros((1, 6)), nd.zeros((1, 6)))
        with autograd.record():
            if batch:
                with gdb.batching(backend="native"):
                    losses = losses_of(cell, zero, 6)
            else:
                losses = losses_of(cell, zero, 6)
            total = nd.add_n(*losses) * 2           # outside of the scope: MXNet's own operators
        total.backward()
        return [total.asnumpy()] + [p.grad().asnumpy() for p in cell.collect_params().values()]

    same(work(True), work(False))


def test_dropout_draws_anew_for_every_sample():
    with autograd.train_mode(), gdb.batching(backend="native"):
        out = [nd.Dropout(nd.ones((1, 50)), p=0.5) for _ in range(4)]
    values = np.stack([x.asnumpy() for x in out])
    assert set(np.unique(values)) == {0.0, 2.0}
    assert len(np.unique(values, axis=0)) == 4


def test_what_has_no_native_body_is_counted_with_its_reason():
    x = [nd.array([[1.0, 2.0]], dtype="float16") for _ in range(3)]
    with gdb.batching(backend="native") as scope:
        y = [nd.tanh(v) for v in x]
    assert any("float16" in reason for reason in scope.stats.fallbacks)
    np.testing.assert_allclose(y[0].asnumpy(), np.tanh(x[0].asnumpy()), rtol=1e-2)


def test_explain_prints_the_generated_kernels():
    with gdb.batching(backend="native") as scope:
        out = [nd.tanh(nd.array([[float(k), 1.0]])) for k in range(3)]
    text = scope.explain(kernels=True)
    assert "backend native" in text and "1 generated kernels" in text and "tanh_float32(" in text
    assert "kernels" not in scope.explain()
    assert len(out) == 3


def test_memory_is_reused_from_step_to_step_without_the_collector():
    cell = Cell(prefix="cell_")
    cell.initialize()
    zero = (nd.zeros((1, 6)), nd.zeros((1, 6)))
    gc.disable()
    try:
        made = []
        for _ in range(6):
            with autograd.record(), gdb.batching(backend="native"):
                losses = losses_of(cell, zero, 8)
            autograd.backward(losses)
            del losses
            made.append(ARENA.stats()["made"])
    finally:
        gc.enable()
    assert made[-1] == made[2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_that_is_looked_up_by_a_vertex_and_by_an_operator(backend, sparse):
    """Two ways to one gradient: the second adds to what the first has written."""
    def work(batch):
        mx.random.seed(5)
        embed = gluon.nn.Embedding(7, 3, sparse_grad=sparse, prefix="e_")
        embed.initialize(mx.init.Xavier())
        marked = gdb.vertex(Lookup(embed))
        with autograd.record():
            if batch:
                with gdb.batching(backend=backend) as scope:
                    losses = [(embed(nd.array([k])) * marked(k + 1)).sum() for k in (1, 3, 1, 5)]
                assert not scope.stats.fallbacks
            else:
                losses = [(embed(nd.array([k])) * marked(nd.array([k + 1]))).sum() for k in (1, 3, 1, 5)]
        autograd.backward(losses)
        assert embed.weight.grad().stype == ("row_sparse" if sparse else "default")
        return [embed.weight.grad().asnumpy()]

    same(work(True), work(False))


class Lookup(gluon.HybridBlock):
    def __init__(self, embed):
        super().__init__(prefix="lookup_")
        self.embed = embed

    def hybrid_forward(self, F, word):
        return F.square(self.embed(word))


def test_a_sparse_table_that_is_not_only_looked_up_runs_alone():
    def work():
        embed = gluon.nn.Embedding(6, 2, sparse_grad=True, prefix="e_")
        embed.initialize(mx.init.One())
        with autograd.record():
            losses = [(embed(nd.array([k])) * nd.sum(embed.weight.data(), axis=0, keepdims=True)).sum() for k in (1, 3)]
        autograd.backward(losses)
        return embed.weight.grad().asnumpy()

    want = work()
    with gdb.batching() as scope:
        got = work()
    np.testing.assert_allclose(got, want)
    assert any("sparse gradient" in reason for reason in scope.stats.fallbacks)
