"""The executor on the reference backend: numpy bodies, same plans, same layouts."""

import numpy as np
import pytest
from models import MODEL_NAMES, features
from test_models import make

import cavs_core as cavs
from cavs_core.backends import choose
from cavs_core.backends.numpy_ref import NumpyBackend
from cavs_core.executor import Run
from cavs_core.mxnet_compat import autograd, mx
from cavs_core.program import Pull


class PoisonedBackend(NumpyBackend):
    """Fresh memory is full of NaN: a row that is read before it is written shows."""

    @staticmethod
    def empty(shape, dtype):
        return np.full(tuple(shape), np.nan, dtype)


@pytest.fixture
def runs(monkeypatch):
    """The arguments of every run."""
    noted = []

    class NotedRun(Run):
        def __init__(self, *args):
            noted.append(args)
            super().__init__(*args)

    monkeypatch.setattr(choose, "Run", NotedRun)
    return noted


def _numpy(fills):
    return [(k, row, None if a is None else a.asnumpy()) for k, row, a in fills]


def pushed_rows(run):
    """Run forward; the pushed values, a row per vertex in the order of the vertices."""
    run.forward()
    classes = run.layout.classes
    order = np.concatenate([c.external.rows for c in classes])
    position = np.argsort(order)
    states = run._all[0].plan.vertex.num_states
    return [run.buffers[place.buffer][place.base:][:len(order)][position] for place in classes[0].writes[states:]]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_reference_backend_agrees(name, runs):
    cell, graphs, inputs = make(name)
    if "x" in inputs:
        inputs["x"].attach_grad()
    with autograd.record():
        out = cavs.run(cell, graphs, inputs)
        pushed = out.pushed if isinstance(out.pushed, list) else [out.pushed]
    heads = [np.random.RandomState(k).normal(size=p.shape).astype("float32") for k, p in enumerate(pushed)]
    autograd.backward(pushed, [mx.nd.array(h) for h in heads])
    layout, plans, _, arrays, fills = runs[0]
    arrays = {source: a.asnumpy() for source, a in arrays.items()}
    run = Run(layout, plans, PoisonedBackend(), arrays, _numpy(fills))
    rows = pushed_rows(run)
    for got, want in zip(rows, pushed):
        np.testing.assert_allclose(got.reshape(want.shape), want.asnumpy(), rtol=1e-4, atol=1e-5)
    wanted = [s for s in arrays if not isinstance(s, Pull)] + ([Pull("x")] if "x" in inputs else [])
    for _ in range(2):                          # a second backward finds what the first one found
        grads = run.backward([h.reshape(r.shape) for h, r in zip(heads, rows)], wanted)
        for (k, row, _), source in zip(fills, cell.initial_states):
            source = next(s for s in arrays if getattr(s, "parameter", None) is source)
            grads[source] = run.total(grads.get(source), run.pulled(k, row, row + 1).reshape(arrays[source].shape))
        for source in wanted:
            want = inputs["x"].grad if isinstance(source, Pull) else source.parameter.grad()
            if isinstance(source, Pull):        # class after class, in the order of the run
                order = np.concatenate([c.external.rows for c in layout.classes])
                grads[source] = grads[source][np.argsort(order)]
            np.testing.assert_allclose(grads[source].reshape(want.shape), want.asnumpy(), rtol=1e-4, atol=1e-5,
                                       err_msg=str(source))


def test_both_backends_start_the_same_number_of_operations(runs):
    cell, graphs, inputs = make("childsum_treelstm")
    with autograd.record():
        stats = cavs.run(cell, graphs, inputs).stats
    layout, plans, _, arrays, fills = runs[0]
    run = Run(layout, plans, NumpyBackend(), {s: a.asnumpy() for s, a in arrays.items()},
              _numpy(fills))
    pushed_rows(run)
    assert run.launched == stats.forward_ops


def test_a_run_can_be_repeated_on_other_inputs(runs):
    """Plans hold no values of a run."""
    cell, graphs, _ = make("binary_treelstm")
    first = features(graphs, np.random.RandomState(1))
    second = features(graphs, np.random.RandomState(2))
    want = cavs.run(cell, graphs, first).pushed[1].asnumpy()
    cavs.run(cell, graphs, second)
    np.testing.assert_array_equal(cavs.run(cell, graphs, first).pushed[1].asnumpy(), want)
