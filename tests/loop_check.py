"""The checker of whole models: a batched run must give the plain loop's values and gradients."""

import numpy as np
from models import run_loop

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, mx

TOLERANCE = {"float32": dict(rtol=1e-4, atol=1e-5), "float64": dict(rtol=1e-9, atol=1e-11)}


def check_same_as_loop(cell, graphs, inputs, dtype="float32", run=cavs.run):
    """Compare values, parameter gradients and input gradients of `run` with those of the plain loop."""
    graph = cavs.InputGraph.batch(graphs)
    floats = [k for k in inputs if k == "x"]
    for k in floats:
        inputs[k].attach_grad()
    want = _grads(cell, inputs, floats, lambda: run_loop(cell, graph, inputs))
    got = _grads(cell, inputs, floats, lambda: _pushed(run(cell, graphs, inputs)))
    assert got.keys() == want.keys()
    for what, value in want.items():
        assert got[what].shape == value.shape, f"{what}: shape {got[what].shape} instead of {value.shape}"
        assert got[what].dtype == value.dtype == np.dtype(dtype), f"{what}: dtype {got[what].dtype}"
        np.testing.assert_allclose(got[what], value, err_msg=what, **TOLERANCE[dtype])


def _pushed(out):
    return out.pushed if isinstance(out.pushed, list) else [out.pushed]


def _grads(cell, inputs, floats, forward):
    """Everything there is to compare, by name."""
    with autograd.record():
        pushed = forward()
        heads = []
        for p in pushed:
            weight = np.random.RandomState(5).normal(size=p.shape)
            heads.append((p * mx.nd.array(weight, dtype=p.dtype)).sum())
        loss = mx.nd.add_n(*heads)
    loss.backward()
    found = {f"pushed {k}": p.asnumpy() for k, p in enumerate(pushed)}
    found.update({f"grad of {name[len(cell.prefix):]}": p.grad().asnumpy()
                  for name, p in cell.collect_params().items() if p.grad_req != "null"})
    found.update({f"grad of input {k}": inputs[k].grad.asnumpy() for k in floats})
    return found
