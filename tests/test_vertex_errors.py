"""The Cavs face when something is wrong: what is said, and that everything stays usable."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
from models import ChainLSTM, ChildSumLSTM, TreeFC, words
from small_cells import SUM_TREE, counter, function

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn
InputGraph = cavs.InputGraph


# ---- what is said when it does not fit -------------------------------------------------------


def gather_pair(self, F, v):
    (left,), (right,) = v.gather(0), v.gather(1)
    v.scatter(left + right)
    v.push(left)


@pytest.mark.parametrize("vertex, states, error, words", [
    (lambda s, F, v: v.push(v.pull("y")), [], cavs.TraceError, "pull('y').*given ['x']"),
    (lambda s, F, v: v.scatter(v.gather(0)[0]), [(2,)], cavs.TraceError, "never called v.push"),
    (lambda s, F, v: v.push(v.pull("x")), [(2,)], cavs.TraceError, "never called v.scatter"),
    (lambda s, F, v: v.scatter(v.pull("x"), v.pull("x")), [(2,)], cavs.TraceError, "got 2 values"),
    (lambda s, F, v: v.scatter(F.concat(v.pull("x"), v.pull("x"))), [(2,)], cavs.ProgramError,
     "state 0.*[1, 4].*[1, 2]"),
    (lambda s, F, v: v.gather(-1), [(2,)], cavs.TraceError, "gather(-1)"),
    (lambda s, F, v: v.push(v.gather_all()[0]), [(2,)], cavs.TraceError, "value of the children.*reduce it"),
    (lambda s, F, v: v.push(v.gather_all()[0] + v.pull("x")), [(2,)], cavs.KindError, "broadcast_add.*spread"),
    (lambda s, F, v: v.spread(v.gather_all()[0]), [(2,)], cavs.KindError, "wants a row value"),
    (lambda s, F, v: v.push(F.topk(v.pull("x"))), [], cavs.UnsupportedOpError, "topk"),
    (lambda s, F, v: v.push(v.pull("x").asnumpy()), [], cavs.TraceError, "asks for the value.*F.where"),
    (lambda s, F, v: v.push(v.pull("x") + F.random.normal(shape=(1, 2))), [], cavs.TraceError, "draws numbers"),
])
def test_mistakes_in_a_vertex_function_are_named(vertex, states, error, words):
    cell = function(vertex, states=states)
    with pytest.raises(error) as raised:
        cavs.run(cell, [SUM_TREE], {"x": np.ones((5, 2), "float32")})
    message = str(raised.value)
    position = 0
    for part in words.split(".*"):
        position = message.find(part, position)
        assert position >= 0, f"{part!r} is not in {message!r}"
    assert "Cell" in message or error in (cavs.KindError,)
    assert (mx.nd.ones((2,)) + 1).asnumpy().tolist() == [2, 2]      # the hooks are gone


def test_unsupported_operator_names_the_block_it_came_from():
    class Sorter(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.sort(x)

    cell = function(lambda s, F, v: v.push(s.sorter(v.pull("x"))), states=[],
                    setup=lambda s: setattr(s, "sorter", Sorter()))
    with pytest.raises(cavs.UnsupportedOpError, match=r"`sort` \(called by Sorter .*sorter0"):
        cavs.run(cell, [SUM_TREE], {"x": np.ones((5, 2), "float32")})


def test_wrong_arity_names_sample_and_vertex():
    cell = function(gather_pair)
    good = InputGraph.from_parents([2, 2, -1])
    with pytest.raises(cavs.ArityError, match="sample 1, vertex 1"):
        cavs.run(cell, [good, InputGraph.chain(2)])
    allowed = function(gather_pair, allow_missing=True)
    assert cavs.run(allowed, [good, InputGraph.chain(2)]).pushed.shape == (5, 2)


def test_a_cycle_names_the_sample():
    cell = function(counter, states=[(1,)])
    with pytest.raises(cavs.CycleError, match="sample 1"):
        cavs.run(cell, [SUM_TREE, InputGraph.from_edges(3, [(0, 1), (1, 2), (2, 1)])])


@pytest.mark.parametrize("inputs, words", [
    ({"x": np.ones((4, 4), "float32")}, "4 rows.*3 vertices"),
    ({"x": [np.ones((3, 4), "float32")] * 2}, "list of 2 arrays.*1 samples"),
    ({"x": [np.ones((2, 4), "float32")]}, "sample 0 has 2 rows.*3 vertices"),
    ({"x": 3.0}, "'x' is 3.0.*one row per vertex"),
    ({"x": np.array(["a", "b", "c"])}, "array of numbers"),
])
def test_wrong_inputs_are_named(inputs, words):
    cell = TreeFC()
    cell.initialize()
    with pytest.raises(cavs.RunError, match=words):
        cavs.run(cell, [InputGraph.from_parents([2, 2, -1])], inputs)


def test_only_vertex_functions_run():
    with pytest.raises(cavs.RunError, match="Dense"):
        cavs.run(nn.Dense(3), [SUM_TREE])


# ---- sturdy ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_chain_of_100_000_vertices_runs_and_differentiates():
    """No walk of ours recurses. 1 + the sum below counts the vertices, and every input reaches the root."""
    def vertex(self, F, v):
        (h,) = v.gather(0)
        h = h + v.pull("x")
        v.scatter(h)
        v.push(h)

    n = 100_000
    x = mx.nd.ones((n, 1))
    x.attach_grad()
    with autograd.record():
        out = cavs.run(function(vertex, states=[(1,)]), [InputGraph.chain(n)], {"x": x})
        loss = out.roots.sum()
    loss.backward()
    assert loss.asscalar() == n
    assert (x.grad.asnumpy() == 1).all()
    assert out.stats.launches == n


def test_an_exception_in_the_vertex_function_leaves_everything_usable():
    def vertex(self, F, v):
        h = v.gather_sum()[0] + v.pull("x")
        if self.broken:
            raise ZeroDivisionError("mine")
        v.scatter(h)
        v.push(h)

    cell = function(vertex)
    cell.broken = True
    x = np.ones((5, 2), "float32")
    with pytest.raises(ZeroDivisionError, match="mine"):
        cavs.run(cell, [SUM_TREE], {"x": x})
    cell.broken = False
    assert cavs.run(cell, [SUM_TREE], {"x": x}).roots.asnumpy().tolist() == [[5, 5]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_during_training_leaves_everything_usable():
    """Python swallows an interrupt that arrives inside a destructor; as a person would, the test presses again."""
    cell = ChainLSTM()
    cell.initialize()
    graphs = [InputGraph.chain(50)] * 2
    inputs = words(graphs, np.random.RandomState(0))

    stopped = threading.Event()

    def interrupt():
        for _ in range(40):
            if stopped.wait(0.5):
                return
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        try:
            presser.start()
            for _ in range(10_000):
                with autograd.record():
                    loss = cavs.run(cell, graphs, inputs).pushed.sum()
                loss.backward()
        finally:
            stopped.set()
    presser.join()
    with autograd.record():
        loss = cavs.run(cell, graphs, inputs).pushed.sum()
    loss.backward()
    assert np.isfinite(cell.out.weight.grad().asnumpy()).all()


def _train_once(queue):
    cell = TreeFC()
    cell.initialize()
    with autograd.record():
        loss = cavs.run(cell, [InputGraph.from_parents([2, 2, -1])], {"x": np.ones((3, 4), "float32")}).pushed.sum()
    loss.backward()
    queue.put(float(loss.asscalar()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_child_trains_too(ctx):
    """As DataLoader workers do: the parent has run before it forks."""
    if ctx.device_type == "gpu":
        pytest.skip("CUDA does not survive a fork")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    _train_once(queue)
    queue.get(timeout=60)
    child = context.Process(target=_train_once, args=(queue,))
    child.start()
    assert np.isfinite(queue.get(timeout=120))
    child.join(timeout=60)
    assert child.exitcode == 0


@pytest.mark.skipif(mx.context.num_gpus() == 0, reason="this machine has no GPU")
def test_runs_on_the_device_of_its_inputs():
    cell = ChildSumLSTM()
    cell.initialize(ctx=mx.gpu(0))
    graphs = [SUM_TREE]
    x = mx.nd.ones((5, 4), ctx=mx.gpu(0))
    with autograd.record():
        out = cavs.run(cell, graphs, {"x": x}).pushed
        loss = out.sum()
    loss.backward()
    assert out.context == mx.gpu(0)
