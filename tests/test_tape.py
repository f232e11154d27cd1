"""A run on MXNet's tape: every request, every way to ask for gradients, errors, and no waiting for ever."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from models import BinaryTreeLSTM, ChildSumLSTM, TreeFC, features, random_binary_tree, random_tree, run_loop

import cavs_core as cavs
from cavs_core import tape, tape_state
from cavs_core.mxnet_compat import MXNetError, autograd, gluon, mx


@pytest.fixture
def case():
    rng = np.random.RandomState(2)
    cell = ChildSumLSTM()
    cell.initialize(mx.init.Normal(0.5))
    graphs = [random_tree(n, rng) for n in (5, 1, 8)]
    return cell, graphs, features(graphs, rng)


def batched(cell, graphs, inputs):
    return cavs.run(cell, graphs, inputs).pushed


def looped(cell, graphs, inputs):
    return run_loop(cell, cavs.InputGraph.batch(graphs), inputs)[0]


def grads_of(cell):
    return {name: p.grad().asnumpy() for name, p in cell.collect_params().items() if p.grad_req != "null"}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name)


def both(step, cell):
    """What `step(forward)` leaves behind, for the loop and for the engine."""
    results = []
    for forward in (looped, batched):
        for p in cell.collect_params().values():
            p.zero_grad()
        results.append(step(forward))
    return results


@pytest.mark.parametrize("req", ["write", "add", "null"])
def test_grad_req_of_parameters(case, req):
    cell, graphs, inputs = case
    cell.collect_params().setattr("grad_req", req)
    # One differs from the others. (Not a bias: MXNet's own FullyConnected writes rubbish for a bias with "add" beside
    # a weight with "null".)
    cell.f2h.weight.grad_req = "add"

    def step(forward):
        for _ in range(3):
            with autograd.record():
                loss = forward(cell, graphs, inputs).square().sum()
            loss.backward()
        return grads_of(cell)

    want, got = both(step, cell)
    assert_same(got, want)


@pytest.mark.parametrize("req", ["write", "add", "null"])
def test_grad_req_of_inputs(case, req):
    cell, graphs, inputs = case

    def step(forward):
        inputs["x"].attach_grad(req)
        for _ in range(2):
            with autograd.record():
                loss = forward(cell, graphs, inputs).square().sum()
            loss.backward()
        return {**({} if req == "null" else {"x": inputs["x"].grad.asnumpy()}), **grads_of(cell)}

    want, got = both(step, cell)
    assert_same(got, want)


def test_null_in_the_middle_does_not_end_the_write_back(case):
    cell, graphs, inputs = case
    cell.h2h.weight.grad_req = "null"

    def step(forward):
        with autograd.record():
            loss = forward(cell, graphs, inputs).sum()
        loss.backward()
        return grads_of(cell)

    want, got = both(step, cell)
    assert_same(got, want)
    assert all(np.abs(g).max() > 0 for g in got.values())


def test_ops_before_and_after_the_run(case):
    cell, graphs, _ = case
    rows = sum(g.num_vertices for g in graphs)
    embed = gluon.nn.Embedding(7, 4)
    embed.initialize(mx.init.Normal(0.5))
    ids = mx.nd.array(np.random.RandomState(0).randint(0, 7, rows))

    def step(forward):
        with autograd.record():
            x = embed(ids) * 3
            y = forward(cell, graphs, {"x": x})
            loss = (y * mx.nd.sigmoid(y)).sum() + x.sum()
        loss.backward()
        return {"embed": embed.weight.grad().asnumpy(), **grads_of(cell)}

    want, got = both(step, cell)
    assert_same(got, want)


def test_a_parameter_used_by_two_runs_and_outside(case):
    cell, graphs, inputs = case

    def step(forward):
        with autograd.record():
            loss = forward(cell, graphs, inputs).sum()
            loss = loss + forward(cell, graphs, {"x": inputs["x"] * 2}).square().sum()
            loss = loss + cell.h2h.weight.data().square().sum()
        loss.backward()
        return grads_of(cell)

    want, got = both(step, cell)
    assert_same(got, want)


def test_callbacks_of_runs_of_one_cell_do_not_meet_in_its_regions(case):
    """MXNet calls the nodes of a pass from several threads at once; the runs of one cell share compiled regions."""
    cell, graphs, inputs = case
    for _ in range(60):
        with autograd.record():
            runs = [batched(cell, graphs, {"x": inputs["x"] * k}) for k in range(1, 5)]
            loss = mx.nd.add_n(*[y.sum() for y in runs])
        loss.backward()
    assert all(np.isfinite(g).all() for g in grads_of(cell).values())


def test_a_run_that_feeds_a_run():
    rng = np.random.RandomState(4)
    first, second = TreeFC(hidden=4), ChildSumLSTM()
    for cell in (first, second):
        cell.initialize(mx.init.Normal(0.5))
    graphs = [random_binary_tree(n, rng) for n in (3, 5)]
    inputs = features(graphs, rng)

    def step(forward):
        with autograd.record():
            loss = forward(second, graphs, {"x": forward(first, graphs, inputs)}).sum()
        loss.backward()
        return {**grads_of(first), **grads_of(second)}

    want, got = both(step, second)
    assert_same(got, want)


def test_autograd_grad(case):
    cell, graphs, inputs = case
    weights = [p.data() for p in cell.collect_params().values()]

    def step(forward):
        with autograd.record():
            loss = forward(cell, graphs, inputs).square().sum()
        return {str(k): g.asnumpy() for k, g in enumerate(autograd.grad(loss, weights))}

    want, got = both(step, cell)
    assert_same(got, want)
    assert all(np.all(p.grad().asnumpy() == 0) for p in cell.collect_params().values())


def test_autograd_backward_with_head_gradients(case):
    cell, graphs, inputs = case

    def step(forward):
        with autograd.record():
            y = forward(cell, graphs, inputs)
            heads = [y * 2, y.sum()]
        autograd.backward(heads, [mx.nd.ones(y.shape) * 0.5, mx.nd.array([3.0])])
        return grads_of(cell)

    want, got = both(step, cell)
    assert_same(got, want)


def test_retain_graph_allows_a_second_backward(case):
    cell, graphs, inputs = case
    cell.collect_params().setattr("grad_req", "add")
    with autograd.record():
        loss = batched(cell, graphs, inputs).sum()
    loss.backward(retain_graph=True)
    once = grads_of(cell)
    loss.backward()
    for name, g in grads_of(cell).items():
        np.testing.assert_allclose(g, 2 * once[name], rtol=1e-5)


def test_second_backward_without_retain_graph_is_an_error(case):
    cell, graphs, inputs = case
    with autograd.record():
        loss = batched(cell, graphs, inputs).sum()
    loss.backward()
    with pytest.raises(MXNetError):
        loss.backward()


def test_second_order_is_refused_not_wrong(case):
    cell, graphs, inputs = case
    inputs["x"].attach_grad()
    with pytest.raises(cavs.RunError, match=r"gradient of a gradient .* Compute what it goes through outside"):
        with autograd.record():
            loss = batched(cell, graphs, inputs).square().sum()
            (grad,) = autograd.grad(loss, [inputs["x"]], create_graph=True, retain_graph=True)
            penalty = grad.square().sum()
        penalty.backward()
        mx.nd.waitall()


def test_gradients_of_roots_and_of_samples_picked_after_recording(case):
    cell, graphs, inputs = case
    with autograd.record():
        out = cavs.run(cell, graphs, inputs)
    loss = None
    roots, sample = out.roots, out.of(2)        # picked outside: they stay on the tape
    with autograd.record():
        loss = roots.sum() + sample.square().sum()
    loss.backward()
    got = grads_of(cell)
    graph = cavs.InputGraph.batch(graphs)
    with autograd.record():
        y = looped(cell, graphs, inputs)
        loss = y[mx.nd.array(graph.roots)].sum() + y[6:14].square().sum()
    loss.backward()
    assert_same(got, grads_of(cell))


def test_error_in_backward_reaches_the_caller(case, monkeypatch):
    cell, graphs, inputs = case
    with autograd.record():
        loss = batched(cell, graphs, inputs).sum()
    monkeypatch.setattr("cavs_core.executor.Run.backward", _fail)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        loss.backward()
    monkeypatch.undo()
    with autograd.record():                     # and the next step is as good as ever
        loss = batched(cell, graphs, inputs).sum()
    loss.backward()
    got = grads_of(cell)
    with autograd.record():
        loss = looped(cell, graphs, inputs).sum()
    loss.backward()
    assert_same(got, grads_of(cell))


def _fail(*args, **options):
    raise ZeroDivisionError("on purpose")


def test_memory_is_freed_after_backward_while_outputs_live(case, monkeypatch):
    cell, graphs, inputs = case
    runs = []
    original = cavs.Run.__init__

    def noted(self, *args):
        runs.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr("cavs_core.executor.Run.__init__", noted)
    with autograd.record():
        y = batched(cell, graphs, inputs)
        loss = y.sum()
    assert runs[0]() is not None
    loss.backward(retain_graph=True)
    assert runs[0]() is not None
    loss.backward()
    gc.collect()
    assert runs[0]() is None
    assert y.shape[0] == 14


def test_nodes_leave_when_their_outputs_die(case):
    cell, graphs, inputs = case
    mx.nd.waitall()
    gc.collect()
    before = len(tape._nodes)
    for _ in range(5):
        with autograd.record():
            batched(cell, graphs, inputs)
    gc.collect()
    assert len(tape._nodes) <= before


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_trainer_steps_follow_the_loop(optimizer):
    """Three optimiser steps: the parameters go the same way."""
    rng = np.random.RandomState(5)
    graphs = [random_binary_tree(n, rng) for n in (4, 7, 2)]
    inputs = features(graphs, rng)
    trained = []
    for forward in (looped, lambda c, g, x: cavs.run(c, g, x).pushed[0]):
        mx.random.seed(3)
        cell = BinaryTreeLSTM(prefix="net_")
        cell.initialize(mx.init.Normal(0.5), force_reinit=True)
        trainer = gluon.Trainer(cell.collect_params(), optimizer, {"learning_rate": 0.1})
        for _ in range(3):
            with autograd.record():
                loss = -forward(cell, graphs, inputs).mean()
            loss.backward()
            trainer.step(1)
        trained.append({k: p.data().asnumpy() for k, p in cell.collect_params().items()})
    for name, value in trained[0].items():
        np.testing.assert_allclose(trained[1][name], value, rtol=2e-3, atol=2e-4, err_msg=name)


def test_a_thousand_steps_without_a_wait_never_hang_and_never_read_a_changed_input():
    """backward, step, backward, step: the weights of step k must be read before step k changes them."""
    graphs = [cavs.InputGraph.from_parents([2, 2, -1])] * 2
    x = np.random.RandomState(0).normal(size=(6, 3)).astype("float32")

    def train(wait):
        mx.random.seed(3)
        cell = TreeFC(hidden=3, embed=3, prefix="net_")
        cell.initialize(mx.init.Normal(0.5), force_reinit=True)
        trainer = gluon.Trainer(cell.collect_params(), "sgd", {"learning_rate": 0.02})
        buffer = mx.nd.array(x)
        for k in range(1000):
            with autograd.record():
                loss = (cavs.run(cell, graphs, {"x": buffer}).pushed - 0.3).square().sum()
            loss.backward()
            trainer.step(1)
            buffer[:] = x * (1 + 0.001 * (k % 7))       # overwrites the input that backward has read
            if wait:
                mx.nd.waitall()
        return {k: p.data().asnumpy() for k, p in cell.collect_params().items()}

    finished = {}
    worker = threading.Thread(target=lambda: finished.update(train(wait=False)), daemon=True)
    worker.start()
    worker.join(timeout=300)
    assert finished, "the loop hangs"
    for name, value in train(wait=True).items():
        np.testing.assert_array_equal(finished[name], value, err_msg=name)


def test_threads_train_beside_each_other():
    """Each thread has its own cell; errors and gradients stay with their own."""
    rng = np.random.RandomState(6)
    graphs = [random_tree(n, rng) for n in (4, 6)]
    inputs = features(graphs, rng)
    problems = []

    def work(seed):
        try:
            cell = ChildSumLSTM()
            cell.initialize(mx.init.Normal(0.5))
            for _ in range(10):
                with autograd.record():
                    loss = batched(cell, graphs, inputs).square().sum()
                loss.backward()
                got = grads_of(cell)
            with autograd.record():
                loss = looped(cell, graphs, inputs).square().sum()
            loss.backward()
            assert_same(got, grads_of(cell))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.is_alive() for t in threads)
    assert not problems, problems[0]


def test_plain_mxnet_is_untouched_while_no_run_is_alive():
    gc.collect()
    x = mx.nd.ones((3,))
    x.attach_grad()
    with autograd.record():
        y = (x * x).sum()
    y.backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), [2, 2, 2])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_right_after_backward_never_hangs():
    """A node that dies on a thread of MXNet's needs the GIL, which a fork holds while it waits for that thread."""
    program = """
import os
from cavs_core.mxnet_compat import autograd, mx
from cavs_core.tape import TapeBridge

def step():
    x = mx.nd.ones((2,))
    x.attach_grad()
    with autograd.record():
        y = mx.nd.ones((2,))
    TapeBridge([x], [y], lambda grads, wanted, begun: grads, lambda: None, lambda begun: begun)
    with autograd.record():
        total = y.sum()
    total.backward()

for _ in range(20):
    step()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, env={**os.environ, "PYTHONPATH": root})


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_a_handle_that_another_array_inherited_is_not_an_output(shape):
    """An output that dies leaves the address of its handle to the next array. A pass that begins there is no pass from
    that output: it may reach all of them."""
    a, b = mx.nd.array([1.0, 2.0]).reshape(shape), mx.nd.array([3.0, 4.0]).reshape(shape)
    for x in (a, b):
        x.attach_grad()

    def backward(output_grads, wanted, begun):
        return [g * 10 if begin else tape.UNTOUCHED for g, begin in zip(output_grads, begun)]

    outputs = [mx.nd.ones(shape), mx.nd.ones(shape)]
    node = tape.TapeBridge([a, b], outputs, backward, lambda: None, lambda begun: [True, True])
    with autograd.record():
        z = outputs[0] * 2 + outputs[1] * 3
    known = dict(node._outputs)
    node._outputs = dict(zip([z.handle.value, outputs[1].handle.value], known.values()))    # z has outputs[0]'s handle
    z.backward(retain_graph=True)
    assert a.grad.asnumpy().ravel().tolist() == [20.0, 20.0] and b.grad.asnumpy().ravel().tolist() == [30.0, 30.0]
    node._outputs = known
    assert node.begins_at(outputs[:1]) == [True, False] and node.begins_at([z]) is None


@pytest.mark.parametrize("known", [True, False])
def test_which_of_many_values_need_a_gradient(known, monkeypatch):
    if not known:
        monkeypatch.setattr(tape_state, "_entry_offset", lambda: None)
    plain, marked = mx.nd.ones((2,)), mx.nd.ones((2,))
    marked.attach_grad()
    with autograd.record():
        values = [plain, marked, plain * 2, marked * 2, 3.0, np.ones(2), (marked * 2).detach()]
    assert tape_state.need_gradient(values).tolist() == [False, True, False, True, False, False, False]
    assert tape_state.need_gradient([]).tolist() == []
