"""What a recorded run pushed: values that stay in the run, passes that begin at them, arrays for whoever computes."""

import gc
import threading
import weakref

import numpy as np
import pytest
from test_roles import BACKENDS, TREES, assert_same, gradients, make, sample_inputs

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx
from cavs_core.recorded_run import RecordedRun


def recorded(cell, backend="mxnet", inputs=None):
    with autograd.record():
        return cavs.run(cell, TREES, inputs or sample_inputs(), backend=backend)


@BACKENDS
def test_a_pass_from_pushed_values_puts_nothing_on_the_tape(backend, monkeypatch):
    cell = make()
    with autograd.record():
        total = recorded(cell, backend).pushed.sum()
    total.backward()
    want = gradients(cell)
    monkeypatch.setattr(RecordedRun, "_put_on_tape", lambda self: pytest.fail("it did"))
    out = recorded(cell, backend)
    before = out.pushed.asnumpy()
    autograd.backward(out.pushed)
    assert_same(gradients(cell), want)
    np.testing.assert_array_equal(out.pushed.asnumpy(), before)         # also when the run is gone
    assert out.stats.backward_ops > 0


@BACKENDS
def test_a_pass_ends_the_run_unless_it_is_retained(backend):
    cell = make()
    out = recorded(cell, backend)
    out.pushed.backward(retain_graph=True)
    once = gradients(cell)
    out.pushed.backward()
    assert_same(gradients(cell), once)
    with pytest.raises(cavs.RunError, match="retain_graph=True"):
        out.pushed.backward()
    with pytest.raises(cavs.RunError, match="retain_graph=True"):
        with autograd.record():
            total = out.pushed.sum()
        total.backward()


def test_memory_of_the_run_goes_with_the_pass(monkeypatch):
    runs = []
    original = cavs.Run.__init__

    def noted(self, *args):
        runs.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(cavs.Run, "__init__", noted)
    out = recorded(make())
    out.pushed.backward()
    gc.collect()
    assert runs[0]() is None and out.pushed.shape == (5,)


@BACKENDS
def test_shape_dtype_and_context_ask_for_no_array(backend, monkeypatch):
    out = recorded(make(), backend)
    monkeypatch.setattr(RecordedRun, "value_of", lambda self, array: pytest.fail("it did"))
    assert (out.pushed.shape, out.pushed.dtype, len(out.pushed)) == ((5,), np.float32, 5)
    assert out.pushed.context == mx.current_context()


def test_values_become_arrays_on_the_tape_for_whoever_computes():
    cell = make()
    out = recorded(cell)
    with autograd.record():
        loss = (out.pushed * mx.nd.array([1.0, 0, 0, 0, 0])).sum()
    assert type(out.pushed) is mx.nd.NDArray
    loss.backward()
    first = gradients(cell)
    with autograd.record():
        alone = cavs.run(cell, TREES[:1], {k: x[:5] for k, x in sample_inputs().items()})
    alone.pushed.backward()
    assert_same(first, gradients(cell))


def test_several_pushed_values_and_a_pass_from_one_of_them():
    class Two(cavs.VertexFunction):
        def __init__(self):
            super().__init__(state_shapes=[(2,)])
            with self.name_scope():
                self.own = gluon.nn.Dense(2, in_units=2)

        def vertex(self, F, v):
            h = F.tanh(self.own(v.gather_sum()[0]) + v.pull("x"))
            v.scatter(h)
            v.push(h, h * 2)

    cell = Two()
    cell.initialize()
    x = np.random.RandomState(0).normal(size=(5, 2)).astype("float32")
    found = []
    for begin in (lambda a, b: b, lambda a, b: b.sum(), lambda a, b: (b * 1).sum()):
        with autograd.record():
            head = begin(*cavs.run(cell, [TREES[0]], {"x": x}).pushed)
        head.backward()
        found.append(gradients(cell))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_inputs_that_want_a_gradient_get_one_from_pushed_values():
    def vertex(self, F, v):
        h = v.gather_sum()[0] + v.pull("x") * 2
        v.scatter(h)
        v.push(h)

    from small_cells import function

    x = mx.nd.ones((5, 2))
    x.attach_grad()
    with autograd.record():
        out = cavs.run(function(vertex), [TREES[0]], {"x": x})
    out.pushed.backward()
    assert x.grad.asnumpy()[:, 0].tolist() == [6, 6, 4, 4, 2]           # vertices that read it, twice


def test_trainer_sees_fresh_gradients():
    cell = make()
    trainer = gluon.Trainer(cell.collect_params(), "sgd", {"learning_rate": 0.5})
    losses = []
    for _ in range(15):
        out = recorded(cell)
        autograd.backward(out.pushed)
        trainer.step(len(TREES))                    # (warns, and fails a test here, if a gradient is stale)
        losses.append(out.pushed.asnumpy().mean())
    assert losses[-1] < losses[0] / 2


def test_pushed_values_travel_to_other_threads_and_into_a_scope():
    cell = make()
    out, seen = recorded(cell), []
    thread = threading.Thread(target=lambda: seen.append(out.pushed.sum().asscalar()))
    thread.start()
    thread.join()
    again = recorded(cell)
    with autograd.record(), gdb.batching():
        doubled = again.pushed * 2
    np.testing.assert_allclose(doubled.sum().asscalar(), 2 * seen[0], rtol=1e-6)
    with autograd.record(), gdb.batching():
        total = (recorded(cell).pushed * 2).sum()
    total.backward()
    assert np.abs(gradients(cell)[cell.out.weight.name]).sum() > 0
