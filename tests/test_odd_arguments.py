"""Vertices and hybridized blocks whose arguments are no arrays, have no end, or reach code written for symbols."""

import collections
import os
import warnings

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn = mx.nd, gluon.nn
GRID = nd.arange(6).reshape((2, 3))
BACKENDS = pytest.mark.parametrize("backend", ["mxnet", "native"])
Pair = collections.namedtuple("Pair", "first second")


@gdb.vertex
def count(F, what):
    return F.ones((2,)) * (7 if what is None else len(what))


@gdb.vertex
def nothing(F):
    return F.ones((2,)) * 3


@gdb.vertex
def choose(F, x, flag):
    return x * 2 if flag else x * 3


@gdb.vertex
def depth(F, x, nested):
    levels = 0
    while isinstance(nested, list):
        nested, levels = nested[0], levels + 1
    return x * levels


@gdb.vertex
def pair(F, p):
    return p.first * 2 + p.second


@gdb.vertex
def as_pair(F, x):
    return Pair(x * 2, x)


def nested(value, levels):
    for _ in range(levels):
        value = [value]
    return value


def same_in_scope(call, backend):
    expected = call().asnumpy()
    with gdb.batching(backend=backend) as scope:
        found = call()
    np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-6)
    return scope


@BACKENDS
@pytest.mark.parametrize("call", [
    lambda: nothing(nd), lambda: count(nd, "abc"), lambda: count(nd, None), lambda: count(nd, []),
    lambda: count(nd, [None, [None, ()]]), lambda: count(nd, {"a": 1})])
def test_a_vertex_without_arrays_runs_operator_by_operator(call, backend):
    scope = same_in_scope(call, backend)
    assert any("records operator by operator: " in reason for reason in scope.stats.fallbacks)


@BACKENDS
@pytest.mark.parametrize("flag", ["a", "", None, True, False, np.bool_(False), {}, {"a": GRID}, {1}, int, b"b", 1j, (),
                                  [None], np.float32], ids=repr)
def test_a_vertex_with_an_argument_of_any_type(flag, backend):
    same_in_scope(lambda: choose(nd, GRID, flag), backend)


@BACKENDS
@pytest.mark.parametrize("levels", [1, 40, 300, 3000, 50_000])
def test_lists_in_lists_of_any_depth(levels, backend):
    same_in_scope(lambda: depth(nd, GRID, nested(None, levels)), backend)
    same_in_scope(lambda: depth(nd, GRID, nested(GRID, levels)), backend)


@BACKENDS
def test_a_list_that_contains_itself_is_refused_by_name(backend):
    own, through = [], []
    own.append(own)
    through.append((through, GRID))
    for cyclic in (own, through, [GRID, own]):
        with pytest.raises(RecursionError, match="an argument of a vertex is a list that contains itself"):
            choose(nd, GRID, cyclic)
        with gdb.batching(backend=backend):
            before = GRID * 5
            with pytest.raises(RecursionError, match="an argument of a vertex is a list that contains itself"):
                choose(nd, GRID, cyclic)
        np.testing.assert_array_equal(before.asnumpy(), GRID.asnumpy() * 5)


@BACKENDS
def test_named_tuples(backend):
    same_in_scope(lambda: pair(nd, Pair(GRID, 3)), backend)
    same_in_scope(lambda: pair(nd, Pair(GRID, GRID)) + pair(nd, Pair(GRID * 2, GRID)), backend)
    with gdb.batching(backend=backend):
        made = as_pair(nd, GRID)
    assert type(made) is Pair
    np.testing.assert_array_equal(made.first.asnumpy(), 2 * GRID.asnumpy())


class Shifted(nn.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.w = self.params.get("w", shape=(2, 3), init="ones")

    def hybrid_forward(self, F, x, w):
        return w * 2 if x is None else F.broadcast_add(x, w)


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_block_called_with_only_none_raises_what_mxnet_raises(hybridize, mark):
    block = Shifted()
    block.initialize()
    if hybridize:
        block.hybridize()
    block = gdb.vertex(block) if mark else block
    for arguments in ((None,), ()):
        try:
            block(*arguments)
        except (TypeError, ValueError) as error:
            expected = error
        with gdb.batching():
            with pytest.raises(type(expected)) as found:
                block(*arguments)
        assert str(found.value) == str(expected)


@pytest.mark.parametrize("other", ["text", 2, {}, np.ones((2, 3)), 1.5], ids=["text", "int", "dict", "numpy", "float"])
def test_what_a_hybridized_block_does_not_take_it_does_not_take_in_a_scope(other):
    class Two(nn.HybridBlock):
        def hybrid_forward(self, F, x, y):
            return x * 2

    block = Two()
    block.hybridize()
    for scope in (autograd.predict_mode(), gdb.batching()):
        with scope, pytest.raises(ValueError, match="must be .nested. list of Symbol or NDArray"):
            block(GRID, other)


# ---- code that is written for symbols --------------------------------------------------------------------------------

class Controlled(nn.HybridBlock):
    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what

    def hybrid_forward(self, F, x):
        if self.what == "cond":
            return F.contrib.cond(x.sum() > 3, lambda: x * 2, lambda: x * 3, name="c")
        if self.what == "foreach":
            return F.contrib.foreach(lambda a, s: (a + s, a * 2), x, F.zeros((3,)), name="f")[0]
        if self.what == "while_loop":
            return F.contrib.while_loop(lambda i, a: i < 3, lambda i, a: ([a], [i + 1, a * 2]), [F.zeros((1,)), x],
                                        max_iterations=3, name="w")[1][1]
        if self.what == "arange":
            return F.broadcast_add(x, F.arange(3, name="a"))
        raise KeyError("the block's own")


@BACKENDS
@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("what", ["cond", "foreach", "while_loop", "arange"])
def test_control_flow_with_a_name_in_a_hybridized_block(what, mark, backend):
    block = Controlled(what)
    block.hybridize()
    block = gdb.vertex(block) if mark else block

    def values():
        found = []
        for x in (GRID * 1, -GRID):
            x = x.copy()
            x.attach_grad()
            with autograd.record():
                y = block(x * 1)
                loss = (y * y).sum()
            if what != "foreach":               # MXNet has no gradient of this one, hybridized
                loss.backward()
            found += [y.asnumpy(), x.grad.asnumpy()]
        return found

    expected = values()
    with gdb.batching(backend=backend) as scope:
        found = values()
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert any("has code for symbols alone" in reason for reason in scope.stats.fallbacks)


def test_an_error_of_the_code_is_the_blocks_own():
    for hybridize in (False, True):
        block = Controlled("raise")
        if hybridize:
            block.hybridize()
        with gdb.batching(), pytest.raises(KeyError, match="the block's own"):
            block(GRID)


# ---- export ----------------------------------------------------------------------------------------------------------

class Two(nn.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=3)

    def hybrid_forward(self, F, x, y):
        return self.dense(x) if y is None else self.dense(x) + y


class Convolved(nn.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.conv, self.norm = nn.Conv2D(2, 3), nn.BatchNorm()

    def hybrid_forward(self, F, x):
        return self.norm(self.conv(x))


@BACKENDS
@pytest.mark.parametrize("make, arguments", [
    (Two, (GRID, None)), (Two, (GRID, GRID)), (Convolved, (nd.ones((1, 1, 4, 4)),)),
    (lambda: Controlled("cond"), (GRID,)),
], ids=["one", "two", "operator by operator", "symbols alone"])
def test_export_behind_a_scope(make, arguments, backend, tmp_path):
    block = make()
    block.initialize(mx.init.Normal(0.5))
    block.hybridize()
    with gdb.batching(backend=backend):
        inside = block(*arguments)
    path = os.path.join(tmp_path, "model")
    block.export(path)
    arrays = [x for x in arguments if x is not None]
    names = ["data"] if len(arrays) == 1 else [f"data{k}" for k in range(len(arrays))]
    with warnings.catch_warnings():             # MXNet's own, about the types of its arguments
        warnings.simplefilter("ignore")
        imported = gluon.SymbolBlock.imports(f"{path}-symbol.json", names, f"{path}-0000.params")
    for other in (imported(*arrays), block(*arguments)):
        np.testing.assert_allclose(inside.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)
    block.save_parameters(f"{path}.params")
    block.load_parameters(f"{path}.params")
    with gdb.batching(backend=backend):
        again = block(*arguments)
    np.testing.assert_allclose(inside.asnumpy(), again.asnumpy(), rtol=1e-5, atol=1e-6)


def called(block):
    block(GRID, None)


@pytest.mark.parametrize("before", [
    lambda block: None, lambda block: (block.hybridize(), called(block), block.hybridize()),
    lambda block: called(block), lambda block: (block.hybridize(), called(block), block.cast("float64"))],
    ids=["not called", "hybridized again", "not hybridized", "cast"])
def test_export_refuses_what_the_loop_refuses(before, tmp_path):
    for scope in (autograd.predict_mode(), gdb.batching()):
        block = Two()
        block.initialize()
        with scope:
            before(block)
        with pytest.raises(RuntimeError, match="run forward with this block at least once"):
            block.export(os.path.join(tmp_path, "model"))


def test_shapes_and_summary_behind_a_scope(capsys):
    net = nn.HybridSequential()
    net.add(nn.Dense(4), nn.Dense(2))
    net.initialize()
    net.hybridize()
    with gdb.batching():
        inside = net(GRID)
        net.infer_shape(GRID)
    net.hybridize(False)
    net.summary(GRID)
    assert "Total params: 26" in capsys.readouterr().out
    np.testing.assert_allclose(inside.asnumpy(), net(GRID).asnumpy(), rtol=1e-5)
