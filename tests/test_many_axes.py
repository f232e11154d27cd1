"""Arrays of any number of axes: what MXNet has no operator for, with the axis of the rows, runs alone, counted."""

import numpy as np
import pytest
from scope_check import check_scope

import cavs_core as cavs
from cavs_core.mxnet_compat import mx
from cavs_core.ops import TABLE

nd = mx.nd


def alternating(shape):
    return tuple(n if k % 2 else 1 for k, n in enumerate(shape))


def middle(x):
    return len(x.shape) // 2


def ones_like(x, *axes):
    """Ones of the shape of x, with 1 at these axes."""
    return nd.ones(tuple(1 if k in axes else n for k, n in enumerate(x.shape)))


ONE = {name: (lambda x, name=name: getattr(nd, name)(x)) for name in (
    "abs", "negative", "exp", "sigmoid", "tanh", "relu", "square", "softsign", "erf", "floor", "zeros_like",
    "ones_like", "identity", "BlockGrad", "make_loss", "Flatten", "smooth_l1", "squeeze", "transpose")}
MANY = {
    **ONE,
    "scalar": lambda x: (x + 1) * 2 - 3 / (x * x + 1),
    "clip": lambda x: nd.clip(x, 0.2, 0.8), "Cast": lambda x: nd.cast(nd.cast(x, "float64"), "float32"),
    "Activation": lambda x: nd.Activation(x, act_type="softrelu"),
    "LeakyReLU": lambda x: nd.LeakyReLU(x, act_type="elu"),
    "elemwise_add": lambda x: nd.elemwise_add(x, x * x), "add_n": lambda x: nd.add_n(x, x * 2, x * x),
    "broadcast of wholes": lambda x: nd.broadcast_mul(x, x + 1),
    "broadcast of one axis": lambda x: nd.broadcast_add(x, ones_like(x, middle(x))),
    "broadcast of alternating axes": lambda x: nd.broadcast_mul(x, nd.ones(alternating(x.shape))),
    "broadcast to wholes": lambda x: nd.broadcast_to(nd.slice(x, (0,), (1,)), shape=x.shape),
    "broadcast of a number": lambda x: nd.broadcast_add(x, nd.ones((1,))),
    "where": lambda x: nd.where(x > 0.5, x, x * 2),
    "sum": lambda x: nd.sum(x, axis=middle(x)), "mean of all": lambda x: nd.mean(x),
    "sum of alternating axes": lambda x: nd.sum(x, axis=tuple(range(0, x.ndim, 2))),
    "max of alternating axes": lambda x: nd.max(x, axis=tuple(range(1, x.ndim, 2)) or 0, keepdims=True),
    "argmax": lambda x: nd.argmax(x, axis=middle(x)), "norm": lambda x: nd.norm(x, axis=middle(x)),
    "softmax": lambda x: nd.softmax(x, axis=middle(x)), "log_softmax": lambda x: nd.log_softmax(x),
    "L2Normalization": lambda x: nd.L2Normalization(x),
    "LayerNorm": lambda x: nd.LayerNorm(x, nd.ones(x.shape[-1:]), nd.ones(x.shape[-1:])),
    "slice": lambda x: nd.slice(x, (None,) * x.ndim, (1,) * x.ndim),
    "slice with steps": lambda x: nd.slice(x, (None,), (None,), (-1,)),
    "slice_axis": lambda x: nd.slice_axis(x, axis=-1, begin=0, end=1),
    "split": lambda x: nd.split(x, num_outputs=x.shape[-1], axis=-1)[0] if x.shape[-1] > 1 else x,
    "Concat": lambda x: nd.concat(x, x * 2, dim=-1), "Concat of rows": lambda x: nd.concat(x, x * 2, dim=0),
    "stack": lambda x: nd.stack(x, x * 2, axis=-1), "flip": lambda x: nd.flip(x, axis=middle(x)),
    "expand_dims": lambda x: x.expand_dims(0).expand_dims(-1) * 2,
    "reshape": lambda x: (x * 2).reshape((1, *x.shape)) * 2, "vector": lambda x: x.reshape((-1,)) * 2,
    "swapaxes": lambda x: x.swapaxes(0, -1), "tile": lambda x: nd.tile(x, (2,)), "repeat": lambda x: nd.repeat(x, 2, 0),
    "tile of all axes": lambda x: nd.tile(x, (2,) * x.ndim),
    "take": lambda x: nd.take(x, nd.array([0, 1, 0])), "take behind": lambda x: nd.take(x, nd.array([0, 1]), axis=-1),
    "take of many": lambda x: nd.take(nd.array([[1, 2], [3, 4]]), nd.BlockGrad(x)) + x.sum(),
    "pick": lambda x: nd.pick(x, ones_like(x, x.ndim - 1), keepdims=True),
    "pick along the first": lambda x: nd.pick(x, ones_like(x, 0), axis=0, keepdims=True),
    "one_hot": lambda x: nd.one_hot(x * 3, depth=3) * x.expand_dims(-1),
    "gather_nd": lambda x: nd.gather_nd(x, nd.zeros((1, 2))),
    "gather_nd of all axes": lambda x: nd.gather_nd(x, nd.zeros((x.ndim, 2))),
    "FullyConnected": lambda x: nd.FullyConnected(x, nd.ones((2, x.shape[-1])), no_bias=True, num_hidden=2,
                                                  flatten=False),
    "dot": lambda x: nd.dot(x, nd.ones((x.shape[-1], 2))),
    "batch_dot": lambda x: nd.batch_dot(x, x, transpose_b=True),
}


@pytest.mark.parametrize("axes", range(1, 8))
def test_operators_on_arrays_of_many_axes(axes):
    """On MXNet's operators, of shared and of different operands; loops that fail fail alike."""
    shape = ((2, 1, 2, 3, 2, 1, 2))[:axes]
    rng = np.random.RandomState(axes)
    data = [rng.uniform(0.1, 0.9, shape).astype("float32") for _ in range(2)]
    for name, fn in MANY.items():
        try:
            check_scope(lambda *xs, fn=fn: [fn(x) for x in xs], *data, backends=["mxnet"])
        except AssertionError as error:
            raise AssertionError(f"{name} of {axes} axes") from error


@pytest.mark.parametrize("axes", [1, 4, 6])
def test_native_code_on_arrays_of_many_axes(axes):
    shape = ((2, 1, 2, 3, 2, 1, 2))[:axes]
    x = np.random.RandomState(axes).uniform(0.1, 0.9, shape).astype("float32")
    for names in (("exp", "sum", "softmax"), ("transpose", "slice", "Concat"), ("stack", "broadcast of one axis")):
        check_scope(lambda x, names=names: [MANY[name](x) for name in names], x, backends=["native"])


@pytest.mark.parametrize("fn", [
    lambda x: nd.ones((1, 2, 2, 2, 2, 2)).transpose((0, 1, 4, 2, 5, 3)) * x,
    lambda x: nd.slice(nd.ones((2,) * 5), (0, 0, 1), (2, 1, 2)) * x,
    lambda x: nd.stack(x.reshape((1, 1, 1, 1)) * 1, x.reshape((1, 1, 1, 1)) * 2)])
def test_what_has_too_many_axes_is_counted(fn):
    for scope in check_scope(fn, np.ones((1,), "float32")):
        assert any("axes, with that of the rows; MXNet takes" in reason for reason in scope.stats.fallbacks)


def test_parts_of_arrays_of_many_axes_are_batched():
    """Indexing sees as few axes as it needs."""
    for key in ((slice(None), 1), (Ellipsis, 0), (0, 1, slice(0, 1)), (1, Ellipsis, slice(None, None, -1))):
        for scope in check_scope(lambda x, key=key: (x * 1)[key] * 2, np.random.rand(*(2,) * 5).astype("float32")):
            assert not scope.stats.fallbacks


def test_limits_are_known_for_every_operator_of_mxnet_that_has_one():
    """Bodies on rows, at the limit and beyond it: MXNet runs them, or refuses."""
    for name, attrs, operands in (("transpose", {"axes": None}, 1), ("slice", {"begin": (0,), "end": (1,)}, 1),
                                  ("broadcast_add", {}, 2)):
        op = TABLE[name]
        most = op.max_axes or op.max_merged_axes
        for axes, runs in ((most, True), (most + 1, False)):
            shapes = [(2,) * axes, alternating((2,) * axes)][:operands]
            a = {"axes": tuple(range(axes))[::-1]} if name == "transpose" else attrs
            try:
                nd_op = getattr(nd, name)
                nd_op(*map(nd.ones, shapes), **a).wait_to_read()
                assert runs, name
            except mx.base.MXNetError:
                assert not runs, name


def test_a_vertex_function_that_has_too_many_axes_is_named():
    class Cell(cavs.VertexFunction):
        def vertex(self, F, v):
            v.push(F.transpose(v.pull("x"), axes=(0, 5, 4, 3, 2, 1)))

    with pytest.raises(cavs.DynBatchError, match="transpose: 7 axes, with that of the rows; MXNet takes 6 at most"):
        cavs.run(Cell(state_shapes=[]), [cavs.InputGraph.chain(2)], {"x": np.ones((2, *(2,) * 5), "float32")})


# ---- operators that MXNet has no gradient of -------------------------------------------------------------------------

PARTS = {
    "elu": lambda x: nd.LeakyReLU(x, act_type="elu")[:, 1:], "take": lambda x: nd.take(x, nd.array([0, 1]))[:, 1:],
    "where": lambda x: nd.where(x > 2, x, x * 2)[:, 1:], "clip": lambda x: nd.clip(x, 2, 5)[:, 1:],
    "split": lambda x: nd.split(x, num_outputs=4, axis=0, squeeze_axis=True)[1][2],
    "pick": lambda x: nd.pick(x[:, 1:], nd.array([0, 1, 0, 1])), "softmax": lambda x: nd.softmax(x[:, 1:])[:, :1],
    "lookup per row": lambda x: nd.take(x[:, 1:], nd.argmax(x, axis=1))[1:],
    "scattered": lambda x: nd.take(nd.take(x * 2, nd.array([0, 2]))[:, 1:], nd.array([1, 1]))[:, :1],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_what_operators_make_go_backward(name):
    data = [np.arange(k, 12 + k, dtype="float32").reshape((4, 3)) for k in range(2)]
    for read in (lambda x: x, lambda x: x * 1):
        check_scope(lambda *xs, read=read: [PARTS[name](read(x)).sum() for x in xs], *data, backends=["mxnet"])


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_what_operators_make_go_backward_in_a_vertex_function(name):
    class Cell(cavs.VertexFunction):
        def vertex(self, F, v):
            v.push(PARTS[name](v.pull("x").reshape((4, 3)) * 1).sum().reshape((1, 1)))

    data = np.random.RandomState(0).uniform(1, 5, (3, 12)).astype("float32")
    x = nd.array(data)
    x.attach_grad()
    with mx.autograd.record():
        out = cavs.run(Cell(state_shapes=[]), [cavs.InputGraph.chain(3)], {"x": x}, backend="mxnet").pushed
    out.backward()
    want = nd.array(data)
    want.attach_grad()
    with mx.autograd.record():
        rows = [PARTS[name](row.reshape((4, 3)) * 1).sum() for row in want]
    mx.autograd.backward(rows)
    np.testing.assert_allclose(out.asnumpy().ravel(), [y.asscalar() for y in rows], rtol=1e-5)
    np.testing.assert_allclose(x.grad.asnumpy(), want.grad.asnumpy(), rtol=1e-4, atol=1e-5)


