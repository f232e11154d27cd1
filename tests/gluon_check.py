"""The checker of Gluon models: a batched training run must do what the plain loop over the samples does."""

import re
from dataclasses import replace

import numpy as np

import gluon_dynbatch as gdb
from cavs_core import Listener, listening
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import choose
from gluon_dynbatch.costs import weigh
from gluon_dynbatch.costs.devices import NATIVE

TOLERANCE = {"float32": dict(rtol=2e-4, atol=2e-5), "float64": dict(rtol=1e-8, atol=1e-10)}
# adam divides by the size of the gradient; a large epsilon keeps it from making rounding errors large
OPTIMISERS = {"sgd": {"learning_rate": 0.2}, "adam": {"learning_rate": 0.05, "epsilon": 1e-2}}


def repeats_always_pay(monkeypatch):
    """Planning is free, so that calls that repeat others are left out wherever there are any."""
    weigh.cost_model(NATIVE)
    model = weigh.CostModel(replace(weigh.built_in(NATIVE), analysis_us=0.0, analysis_us_per_call=0.0))
    monkeypatch.setitem(weigh._models, NATIVE, model)
    monkeypatch.setattr(choose, "NEW_PLAN_US", 0.0)
    monkeypatch.setattr(choose, "NEW_PLAN_US_PER_CALL", 0.0)


class OperatorCounter(Listener):
    """Counts the operators that start."""

    def __init__(self):
        self.count = 0

    def on_operator(self, name, arrays, attrs, out, call):
        self.count += 1
        return call()


def count_operators(fn):
    """How many operators the plain code starts."""
    counter = OperatorCounter()
    with listening(counter):
        fn()
    return counter.count


def make_net(case, dtype="float32", seed=3):
    """A net with drawn parameters: the same ones for the same seed."""
    mx.random.seed(seed)
    np.random.seed(seed)
    net = case.net()
    net.initialize(mx.init.Normal(0.4))
    net.cast(dtype)
    return net


def train(case, samples, dtype, optimiser="sgd", steps=3, batched=True, net=None):
    """Train some steps; everything there is to compare, by name, and the statistics of the first scope."""
    net = net or make_net(case, dtype)
    found, stats, trainer = {}, None, None
    for step in range(steps):
        with autograd.record():
            if batched:
                with gdb.batching() as scope:
                    results = [case.loss(net, *sample) for sample in samples]
                stats = stats or scope.stats
            else:
                results = [case.loss(net, *sample) for sample in samples]
            losses = [loss for _, loss in results]
            total = sum(losses) if optimiser == "adam" else None
        autograd.backward(losses) if total is None else total.backward()
        trainer = trainer or gluon.Trainer(net.collect_params(), optimiser, {
            **OPTIMISERS[optimiser], **case.options.get(optimiser, {})})
        if step == 0:
            found.update(compared(net, results))
        trainer.step(len(samples))
    found.update({f"{name} after {steps} steps": p.data().asnumpy() for name, p in named_params(net)})
    return found, stats


def named_params(net):
    """Parameters by their place and a name without the numbers that Gluon gives to blocks."""
    return [(f"{re.sub('[0-9]+_', '_', name)}, parameter {k}", p)
            for k, (name, p) in enumerate(net.collect_params().items())]


def compared(net, results):
    found = {}
    for k, (outputs, loss) in enumerate(results):
        found[f"loss of sample {k}"] = loss.asnumpy()
        found.update({f"output {i} of sample {k}": out.asnumpy() for i, out in enumerate(outputs)})
    found.update({f"grad of {name}": p.grad().asnumpy() for name, p in named_params(net) if p.grad_req != "null"})
    return found


def assert_same(got, want, dtype="float32"):
    assert got.keys() == want.keys()
    for what, value in want.items():
        assert got[what].shape == value.shape, f"{what}: shape {got[what].shape} instead of {value.shape}"
        assert got[what].dtype == value.dtype, f"{what}: dtype {got[what].dtype} instead of {value.dtype}"
        np.testing.assert_allclose(got[what], value, err_msg=what, **TOLERANCE[dtype])


def check_same_as_loop(case, dtype="float32", optimiser="sgd", steps=3):
    """Outputs, losses, gradients and trained parameters, in a scope and in the loop; the statistics of the scope."""
    samples = case.samples(np.random.RandomState(11), dtype)
    want, _ = train(case, samples, dtype, optimiser, steps, batched=False)
    got, stats = train(case, samples, dtype, optimiser, steps)
    assert any(np.abs(value).max() > 0 for what, value in want.items() if what.startswith("grad"))
    assert_same(got, want, dtype)
    return stats
