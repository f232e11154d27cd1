"""Gradients of embeddings as the rows that they consist of, without a pass over the vocabulary; on both backends."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import Run
from cavs_core.gradients import on_device, row_sparse
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd
SENTENCES = [[1, 4, 1], [0], [4, 4, 5, 2, 1], [11, 3]]


class Words(gluon.HybridBlock):
    """A score for every word; `tied`: the table is a weight, too."""

    def __init__(self, sparse, tied=False, size=12):
        super().__init__(prefix="")
        self.tied = tied
        self.table = self.params.get("table", shape=(size, 3), grad_stype="row_sparse" if sparse else "default")

    def hybrid_forward(self, F, word, table):
        row = F.tanh(F.Embedding(word, table, input_dim=table.shape[0], output_dim=3))
        return F.sum(F.dot(row, table, transpose_b=True)) if self.tied else F.sum(row * row)


def gradients(sparse, batched, dtype="float32", backend="mxnet", mark=True, **options):
    net = Words(sparse, **options)
    net.initialize(mx.init.Zero())
    net.cast(dtype)
    net.table.set_data(nd.array(np.random.RandomState(0).normal(size=net.table.shape), dtype=dtype))
    vertex = gdb.vertex(net) if mark else net
    with autograd.record():
        if batched:
            with gdb.batching(backend=backend) as scope:
                losses = [sum(vertex(nd.array([w])) for w in words) for words in SENTENCES]
            assert not scope.stats.fallbacks
        else:
            losses = [sum(net(nd.array([w])) for w in words) for words in SENTENCES]
    autograd.backward(losses)
    return net.table.grad()


@pytest.mark.parametrize("mark", [True, False], ids=["vertex", "op"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_same_as_the_loop(backend, dtype, mark):
    want = gradients(False, False, dtype)
    got = gradients(True, True, dtype, backend, mark)
    assert got.stype == "row_sparse" and got.indices.asnumpy().tolist() == [0, 1, 2, 3, 4, 5, 11]
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-5)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_two_tables_that_look_alike(backend):
    """Operators on them have the same program; only one of them has a sparse gradient."""
    tables = [gluon.nn.Embedding(12, 3, sparse_grad=sparse) for sparse in (True, False)]
    for table in tables:
        table.initialize(mx.init.One())
    with autograd.record():
        with gdb.batching(granularity="op", backend=backend):
            losses = [(table(nd.array(words)) * k).sum() for k, words in enumerate(SENTENCES, 1) for table in tables]
    autograd.backward(losses)
    want = np.zeros((12, 3))
    for k, words in enumerate(SENTENCES, 1):
        np.add.at(want, words, k)
    assert [table.weight.grad().stype for table in tables] == ["row_sparse", "default"]
    for table in tables:
        np.testing.assert_allclose(table.weight.grad().asnumpy(), want)


def test_a_table_that_is_a_weight_too_gets_all_its_rows():
    """Its gradient is dense: the rows of the lookups and that of the product are added up."""
    want = gradients(False, False, tied=True)
    got = gradients(False, True, tied=True)
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-4, atol=1e-5)


def test_no_table_is_made(monkeypatch):
    """What the backward pass of MXNet's operators gives are the rows of the words, not one for each of the vocabulary.
    """
    found, backward = [], Run.backward

    def watched(run, *args, **kwargs):
        grads = backward(run, *args, **kwargs)
        found.extend(grads.values())
        return grads

    monkeypatch.setattr(Run, "backward", watched)
    gradients(True, True, size=200_000)
    (parts,) = found
    assert sum(len(rows) for _, rows in parts) == sum(map(len, SENTENCES))


def parts_of(numpy):
    rng = np.random.RandomState(1)
    numbers = [np.array([3.0, 0.0, 3.0, 99.0]), np.array([[2.0], [0.0]])]       # 99 is the last one, as in a lookup
    rows = [rng.normal(size=(4, 2)).astype("float32"), rng.normal(size=(2, 1, 2)).astype("float32")]
    return [(a, b) if numpy else (nd.array(a), nd.array(b)) for a, b in zip(numbers, rows)]


@pytest.mark.parametrize("make", [row_sparse, on_device])
def test_rows_are_added_up_on_every_device(make):
    like = nd.zeros((6, 2)).tostype("row_sparse")
    want = np.zeros((6, 2), "float32")
    for numbers, rows in parts_of(numpy=True):
        np.add.at(want, numbers.ravel().clip(0, 5).astype(int), rows.reshape(-1, 2))
    got = make(parts_of(numpy=False), like)
    assert got.stype == "row_sparse" and got.indices.asnumpy().tolist() == [0, 2, 3, 5]
    np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-6)
    none = make([], like)
    assert none.stype == "row_sparse" and len(none.indices) == 0 and none.shape == (6, 2)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_indices_of_any_dtype(dtype, sparse, backend):
    def looked_up():
        table = gluon.nn.Embedding(5, 3, sparse_grad=sparse)
        table.initialize(mx.init.One())
        words, factors = nd.array([1, 3, 1]).astype(dtype), nd.arange(9).reshape((3, 3))
        with autograd.record():
            loss = (table(words) * factors).sum()
        loss.backward()
        grad = table.weight.grad()
        return loss.asnumpy(), grad.stype, grad.tostype("default").asnumpy(), table.weight.data()._fresh_grad

    loss, stype, grad, fresh = looked_up()
    with gdb.batching(backend=backend):
        found = looked_up()
    assert found[1] == stype and found[3] == fresh
    np.testing.assert_allclose(found[0], loss)
    np.testing.assert_allclose(found[2], grad)
