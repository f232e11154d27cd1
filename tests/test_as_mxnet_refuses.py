"""Calls that MXNet refuses, or understands in another way than the op table, run alone: the error is MXNet's own."""

import contextlib

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import mx

nd = mx.nd


def x():
    return nd.arange(24).reshape((2, 3, 4)) * 2


CALLS = {
    "transpose": lambda: nd.transpose(x(), axes=(0, 1, -1)),
    "flip": lambda: nd.flip(x(), axis=-1),
    "sum": lambda: nd.sum(x(), axis=(0, 0)),
    "keepdims": lambda: nd.sum(x(), keepdims="maybe"),
    "slice_axis": lambda: nd.slice_axis(x(), axis=0, begin=0, end=9),
    "broadcast_axis": lambda: nd.broadcast_axis(nd.ones((1, 3)) * 2, axis=(0, 0), size=(2, 2)),
    "dot": lambda: nd.dot(nd.ones((2, 2)) * 2, nd.ones((2, 2)), transpose_b="maybe"),
    "FullyConnected": lambda: nd.FullyConnected(nd.ones((2, 2)) * 2, nd.ones((5, 2)), num_hidden=5.0, no_bias=True),
    "tile": lambda: nd.tile(x(), reps=(1, -3)),
    "repeat": lambda: nd.repeat(x(), repeats=-1),
    "one_hot": lambda: nd.one_hot(nd.ones((2,)) * 1, depth=2.5),
    "split": lambda: nd.split(x(), num_outputs=0),
    "smooth_l1": lambda: nd.smooth_l1(x(), scalar="a"),
    "softmax": lambda: nd.softmax(x(), temperature=0),
    "concat": lambda: nd.concat(x(), nd.ones((2, 3)) * 1, dim=1),
    "batch_dot": lambda: nd.batch_dot(x(), x()),
    "right": lambda: nd.softmax(x(), axis=1),
}


def outcome(name, scope):
    try:
        with scope:
            y = CALLS[name]()
        return y.asnumpy()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_as_in_the_loop(name, backend, capfd):
    want = outcome(name, contextlib.nullcontext())
    got = outcome(name, gdb.batching(backend=backend))
    if isinstance(want, type):
        assert got is want
        assert "infer_shape error" not in capfd.readouterr().err
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5)
