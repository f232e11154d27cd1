"""Parameter updates through gluon.Trainer, and when they are installed."""

import os
import subprocess
import sys

import pytest
from update_check import drawn, same, use_mxnet

from cavs_core import updates
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def trained(optimizer, dtype="float32", grad_req="write", words=((1, 4, 1), (2,), (4, 0))):
    """The parameters of a model behind four steps, a table with a sparse gradient among them."""
    table, net = gluon.nn.Embedding(9, 6, sparse_grad=True), gluon.nn.HybridSequential(prefix="")
    for width in (5, 3, 2):
        net.add(gluon.nn.Dense(width, flatten=False))
    for block in (table, net):
        block.initialize(mx.init.Zero())
        block.cast(dtype)
    net(nd.zeros((1, 6), dtype=dtype))
    parameters = [table.weight, *net.collect_params().values()]
    for k, p in enumerate(parameters):
        p.set_data(drawn(p.shape, dtype, seed=k))
        p.grad_req = grad_req
    trainer = gluon.Trainer(parameters, *optimizer())
    for _ in range(4):
        with autograd.record():
            losses = [net(table(nd.array(w))).sum() for w in words]
        autograd.backward(losses)
        trainer.step(len(words))
        if grad_req == "add":
            for p in parameters:
                p.zero_grad()
    return [p.data() for p in parameters]


OPTIMIZERS = {
    "sgd": lambda: ("sgd", {"learning_rate": 0.1}),
    "all": lambda: ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.05}),
    "schedule": lambda: ("sgd", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.25)}),
    "eager": lambda: ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "lazy_update": False}),
    "adam": lambda: ("adam", {"learning_rate": 0.25, "wd": 0.01}),
}


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_trainer_makes_the_same_steps(optimizer, dtype, grad_req, monkeypatch):
    result = trained(OPTIMIZERS[optimizer], dtype, grad_req)
    use_mxnet(monkeypatch)
    same(result, trained(OPTIMIZERS[optimizer], dtype, grad_req))


@pytest.mark.parametrize("optimizer, options, dtype", [
    ("sgd", {"momentum": 0.9, "multi_precision": True}, "float16"), ("sgd", {}, "float16"), ("rmsprop", {}, "float32")])
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
def test_trainer_with_what_is_left_to_mxnet(optimizer, options, dtype, monkeypatch):
    results = []
    for stock in (False, True):
        if stock:
            use_mxnet(monkeypatch)
        parameter = gluon.Parameter("p", shape=(4, 3), dtype=dtype)
        parameter.initialize(mx.init.One())
        trainer = gluon.Trainer([parameter], optimizer, {"learning_rate": 0.1, **options})
        for step in range(3):
            parameter.grad()[:] = drawn((4, 3), dtype, seed=step)
            parameter.data()._fresh_grad = True
            trainer.step(1)
        results.append(parameter.data())
    same(results[:1], results[1:])


def test_stale_gradients_are_still_told():
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(nd.ones((1, 2))).sum()
    loss.backward()
    trainer.step(1)
    before = net.weight.data().asnumpy()
    with pytest.raises(UserWarning, match="has not been updated"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert (net.weight.data().asnumpy() == before).all()


# ---- installing ------------------------------------------------------------------------------------------------------

def test_it_is_installed_once():
    functions = [getattr(mx.optimizer.optimizer, name) for name in updates._OPERATORS]
    originals = dict(updates._originals)
    updates.install_updates()
    assert functions == [getattr(mx.optimizer.optimizer, name) for name in updates._OPERATORS]
    assert originals == updates._originals
    assert all(f.__name__ == name for f, name in zip(functions, updates._OPERATORS))


PROGRAM = """
import os
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

optimizer, nd = mx.optimizer.optimizer, mx.nd
before = optimizer.sgd_update
for backend, changed in (("mxnet", False), ("native", True)):
    with gdb.batching(backend=backend):
        y = [nd.sigmoid(nd.array([[k]])) for k in range(3)]
    y[0].asnumpy()
    assert (optimizer.sgd_update is not before) == changed, backend

weight, grad = nd.ones((2000, 1000)), nd.ones((2000, 1000))
optimizer.sgd_update(weight, grad, out=weight, lr=0.5)
child = os.fork() if hasattr(os, "fork") else None
optimizer.sgd_update(weight, grad, out=weight, lr=0.5)
right = float(weight.asnumpy().max()) == 0.0
if child == 0:
    os._exit(0 if right else 1)
assert right and (child is None or os.waitpid(child, 0)[1] == 0)
for _ in range(20):
    optimizer.sgd_update(weight, grad, out=weight, lr=0.5)      # the process ends while the engine is at it
"""


def test_it_waits_for_the_native_backend_and_survives_a_fork_and_the_end_of_the_process():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr
