"""Arrays without elements, and without axes, which MXNet has with NumPy shapes: they run alone, counted."""

import numpy as np
import pytest

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import MXNetError, autograd, mx

nd = mx.nd
with mx.util.np_shape(True):
    EMPTY, NUMBER = nd.zeros((0, 3)), nd.ones(())
TABLE, GRID = nd.ones((4, 3)), nd.arange(6).reshape((2, 3))

CALLS = {
    "unary, empty": lambda: nd.exp(EMPTY),
    "binary, empty": lambda: EMPTY + EMPTY,
    "broadcast, empty": lambda: nd.broadcast_add(EMPTY, nd.ones((1, 3))),
    "product, empty": lambda: nd.dot(EMPTY * 1, nd.ones((3, 2))),
    "sum of nothing": lambda: EMPTY.sum(),
    "joined with rows": lambda: nd.concat(EMPTY, GRID * 1, dim=0),
    "any number, empty": lambda: nd.add_n(EMPTY, EMPTY, EMPTY),
    "sliced to nothing": lambda: (GRID * 1)[0:0],
    "looked up nothing": lambda: nd.Embedding(nd.zeros((0,)), TABLE, input_dim=4, output_dim=3),
    "nothing repeated": lambda: nd.repeat(GRID * 1, repeats=0, axis=0),
    "transposed, empty": lambda: (EMPTY * 2).T,
    "made empty": lambda: nd.zeros((0, 2)) * 2,
    "parts, empty": lambda: nd.split(EMPTY * 1, num_outputs=3, axis=1)[1],
    "unary, number": lambda: nd.exp(NUMBER),
    "binary, number": lambda: 2 - NUMBER + NUMBER,
    "broadcast, number": lambda: nd.broadcast_add(NUMBER, GRID),
    "indexed to a number": lambda: (nd.arange(3) * 1)[1],
    "one element": lambda: (GRID * 1)[1, 2],
    "reshaped to a number": lambda: nd.ones((1,)).reshape(()) * 2,
    "numbers stacked": lambda: nd.stack(NUMBER * 1, NUMBER + 2, axis=0),
    "made a number": lambda: nd.zeros(()) + 1,
    "a whole sum": lambda: (GRID * 1).sum() + 1,
}


def looked(call):
    with mx.util.np_shape(True):
        return call().asnumpy()


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("what", CALLS)
def test_operators_on_arrays_without_rows(what, backend):
    expected = looked(CALLS[what])
    with gdb.batching(backend=backend):
        found = looked(CALLS[what])
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected)


def test_they_are_counted_with_a_reason():
    with gdb.batching() as scope, mx.util.np_shape(True):
        (nd.exp(EMPTY), nd.exp(NUMBER), nd.repeat(GRID * 1, repeats=0, axis=0))
    assert scope.stats.fallbacks["operator exp: an operand has no rows"] == 2
    assert any(reason.startswith("operator repeat: ") for reason in scope.stats.fallbacks)


@pytest.mark.parametrize("call", [lambda: nd.zeros(()), lambda: nd.array([]) * 2, lambda: EMPTY * 1,
                                  lambda: nd.exp(NUMBER), lambda: nd.array(3.0) * 2, lambda: nd.zeros((0, 3)) + 1])
def test_what_the_loop_refuses_without_numpy_shapes_the_scope_refuses(call):
    def refused():
        with pytest.raises(MXNetError):
            call().asnumpy()

    refused()
    with gdb.batching():
        refused()


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("loss, shapes", [
    (lambda x: (x * x).sum(), [(0, 3)]),
    (lambda x: x * x, [()]),
    (lambda x, y: (nd.broadcast_mul(x * x, y)).sum(), [(), (2, 2)]),
    (lambda x, y: (nd.concat(x * 2, y * 3, dim=0) ** 2).sum(), [(0, 2), (2, 2)]),
    (lambda x: (x * 2)[0:0].sum() + (x * 3).sum(), [(2, 3)]),
    (lambda x, y: (x * x).sum() + (y * y).sum(), [(0, 3), (2, 2)]),
], ids=["empty", "number", "number broadcast", "joined", "sliced", "added"])
def test_gradients_through_arrays_without_rows(loss, shapes, backend):
    def gradients(scope):
        with mx.util.np_shape(True):
            xs = [nd.ones(shape) * 0.5 for shape in shapes]
            for x in xs:
                x.attach_grad()
            with autograd.record():
                with scope:
                    head = loss(*xs)
            head.backward()
            return [(x.grad.asnumpy(), x._fresh_grad) for x in xs]

    expected = gradients(mx.util.np_shape(True))
    for (found, fresh), (wanted, was_fresh) in zip(gradients(gdb.batching(backend=backend)), expected):
        assert found.shape == wanted.shape and fresh == was_fresh
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_a_vertex_with_arguments_or_results_without_rows(backend):
    @gdb.vertex
    def node(F, x, y):
        return F.concat(x * 2, y, dim=0)

    @gdb.vertex
    def inside(F, x):
        return F.concat(x[0:0], x * 3, dim=0)

    def values():
        with mx.util.np_shape(True):
            return [node(nd, EMPTY, GRID).asnumpy(), node(nd, GRID, np.zeros((0, 3))).asnumpy(),
                    inside(nd, GRID).asnumpy()]

    expected = values()
    with gdb.batching(backend=backend) as scope:
        found = values()
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)
    assert any("an argument has no rows" in reason for reason in scope.stats.fallbacks)


def test_the_cavs_face_refuses_rows_without_elements():
    cell = type("Cell", (cavs.VertexFunction,), {"vertex": lambda self, F, v: v.push(v.pull("x") * 2)})([])
    with pytest.raises(cavs.RunError, match=r"run\(Cell\): input 'x' has the shape \(3, 0\): its rows have no elem"):
        cavs.run(cell, [cavs.InputGraph.chain(3)], {"x": np.ones((3, 0), "float32")})
