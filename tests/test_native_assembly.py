"""Tables of native runs: remembered for a layout and for the classes of a model, and never longer than these live."""

import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.backends.native_cpu import assembly, ops
from cavs_core.backends.native_cpu.stages import counts_of, own_offsets
from cavs_core.backends.native_cpu.table import launches_of
from cavs_core.layout import frames_of, offsets_of
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd


class Cell(gluon.HybridBlock):
    def __init__(self, sparse=False, units=4, dtype="float32"):
        super().__init__()
        with self.name_scope():
            self.embed = gluon.nn.Embedding(50, units, sparse_grad=sparse, dtype=dtype)
            self.fc = gluon.nn.Dense(units, in_units=units, flatten=False, dtype=dtype)

    def hybrid_forward(self, F, word, h):
        return F.tanh(self.fc(self.embed(word) + h))


def make_cell(**options):
    mx.random.seed(5)
    cell = Cell(**options)
    cell.initialize(mx.init.Normal(0.5 / math.sqrt(cell.fc.weight.shape[0] / 4)))
    return gdb.vertex(cell)


def losses_of(cell, sentences, batched):
    losses = []
    for sentence in sentences:
        h = nd.zeros((1, cell.fc.weight.shape[0]), dtype=cell.fc.weight.dtype)
        for word in sentence:
            h = cell(word if batched else nd.array([word]), h)
        losses.append(h.sum())
    return losses


def step(cell, sentences, heads=slice(None)):
    """Losses and gradients of a pass that begins at some of the losses; the same as the loop's."""
    found = []
    for batched in (True, False):
        for p in cell.collect_params().values():
            p.zero_grad()
        with autograd.record():
            if batched:
                with gdb.batching(policy="depth", backend="native"):
                    losses = losses_of(cell, sentences, True)
            else:
                losses = losses_of(cell, sentences, False)
        autograd.backward(losses[heads])
        grads = {k: p.grad().asnumpy() for k, p in cell.collect_params().items() if p.grad_req != "null"}
        found.append(([x.asscalar() for x in losses], grads))
    (got, got_grads), (want, want_grads) = found
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert got_grads.keys() == want_grads.keys()
    for name, grad in got_grads.items():
        np.testing.assert_allclose(grad, want_grads[name], rtol=1e-4, atol=1e-5, err_msg=name)


A, B = [[1, 2, 3], [4, 5]], [[6, 7, 8, 9], [1], [2, 2]]


@pytest.fixture
def built(monkeypatch):
    """What was built: Operations and Direction."""
    found = []
    for name in ("Operations", "Direction"):
        whole = getattr(assembly, name)
        monkeypatch.setattr(assembly, name, lambda *given, name=name, whole=whole: found.append(name) or whole(*given))
    return found


def test_a_known_layout_builds_nothing(built):
    cell = make_cell()
    for _ in range(3):
        step(cell, A)
    built.clear()
    step(cell, A)
    assert built == []


def test_a_new_layout_builds_no_operations(built):
    cell = make_cell()
    for _ in range(2):
        step(cell, A)
    built.clear()
    step(cell, B)
    assert built == ["Direction"] * 2           # forward and backward


@pytest.mark.parametrize("sparse", [False, True])
def test_other_gradients_of_a_known_layout(sparse):
    cell = make_cell(sparse=sparse)
    for _ in range(2):
        step(cell, A)
        step(cell, A, slice(0, 1))
        cell.fc.collect_params().setattr("grad_req", "null")
        step(cell, A)
        cell.fc.collect_params().setattr("grad_req", "write")


def test_tables_go_with_the_model():
    gc.collect()
    before = len(assembly._operations), len(assembly._assemblies), len(assembly._watched)
    cell = make_cell()
    for sentences in (A, B, A):
        step(cell, sentences)
    assert len(assembly._operations) > before[0] and len(assembly._assemblies) > before[1]
    weight = cell.fc.weight
    del cell
    gc.collect()
    assert (len(assembly._operations), len(assembly._assemblies), len(assembly._watched)) <= before
    assert not any(type(x) is assembly.Operations for x in gc.get_referrers(weight))


def test_few_operations_are_remembered(monkeypatch):
    monkeypatch.setattr(assembly, "_MOST", 2)
    monkeypatch.setattr(assembly, "_operations", {})
    for _ in range(3):
        step(make_cell(), A)
        assert len(assembly._operations) <= 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_are_packed_where_there_are_many_rows(dtype, monkeypatch):
    """A class of few rows, of many and of few again: each time the operations that suit it."""
    kinds, whole = [], assembly.Operations
    monkeypatch.setattr(assembly, "Operations", lambda *given: kinds.append(whole(*given)) or kinds[-1])
    cell, few, many = make_cell(units=100, dtype=dtype), A, [list(range(k % 7, 50)) for k in range(4)]
    for sentences in (few, many, few, many):
        step(cell, sentences)
    packs = [(made._ops[:, ops.KIND] == ops.PACK).sum() for made in kinds]
    assert packs == [0, 0, 1, 1]                # forward and backward of both, each built once


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_launches_run_round_after_round(seed, backward):
    """Against the plain loop; order and rounds of classes are mixed, and classes have none, one or several stages."""
    rng = np.random.RandomState(seed)
    num_classes = int(rng.randint(1, 5))
    round_of = np.unique(rng.randint(0, 3, num_classes), return_inverse=True)[1]       # none is empty
    num_rounds = int(round_of.max()) + 1
    frames = [frames_of(np.arange(0, 2 * n + 1, 2), np.arange(2 * n + 1) * 3) for n in rng.randint(0, 4, num_classes)]
    pairs = [(c, k) for c, f in enumerate(frames) for k in range(len(f) - 1)]
    order = np.array(rng.permutation(pairs), np.int64).reshape(-1, 2)
    stages = [[(10 * c + i, 10 * c + i + 1 + i % 2) for i in range(rng.randint(0, 3))] for c in range(num_classes)]
    script, want = [], []
    bounds = 1000 * np.arange(num_classes)

    def launch(c, span, frame):
        want.append(ops.launch(*span, *frame.tolist(), int(bounds[c])))

    for r in range(num_rounds)[::-1] if backward else range(num_rounds):
        for c in np.flatnonzero(round_of == r).tolist():
            script.append((c, 100 + c, 102 + c))
            launch(c, (100 + c, 102 + c), frames[c][0])
        script.append((-1 - r, 0, 0))
        for c, k in order[::-1].tolist() if backward else order.tolist():
            for span in stages[c] if round_of[c] == r else ():
                launch(c, span, frames[c][1 + k])
    made, started = launches_of(
        np.array(script), offsets_of(np.array([len(s) for s in stages])),
        np.array([span for spans in stages for span in spans], np.int64).reshape(-1, 2), order, round_of, backward,
        np.concatenate(frames), offsets_of(np.array([len(f) for f in frames])), bounds)
    assert made.tolist() == want and started == sum(end - begin for begin, end, *_ in want)
    assert made.flags.c_contiguous


def test_classes_of_a_round_come_in_the_order_of_their_first_launch():
    """Several may add to one gradient: the one that runs first must be the one that sets it."""
    layout = SimpleNamespace(classes=[SimpleNamespace(has_rows=rows) for rows in (True, True, False, True)],
                             order=np.array([(1, 0), (0, 0), (1, 1), (3, 0)]), round_of=None)
    assert assembly._rounds(layout) == (((1, 0, 3),), ((3, 1, 0),))
    layout.round_of = np.array([0, 1, 0, 0])
    assert assembly._rounds(layout) == (((0, 3), (1,)), ((1,), (3, 0)))


def test_memory_of_values_by_what_has_rows():
    frames = [frames_of(np.array([0, 3, 5]), np.array([0, 2, 2, 3, 9, 10])), frames_of(np.array([0]))]
    counts = counts_of(np.concatenate(frames), np.array([0, 3, 4]))
    assert counts.tolist() == [[5, 10, 1, 3, 7], [0, 0, 0, 0, 0]]
    assert own_offsets(counts, np.array([0, 4, 2, 9]), np.array([16, 4, 64, 8])).tolist() == [0, 128, 192, 256, 256]
