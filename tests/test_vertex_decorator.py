"""@gdb.vertex on classes, instances, methods and functions; check=True; explain, graph and drawing."""

import copy
import gc
import inspect
import weakref

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn = mx.nd, gluon.nn


class Cell(gluon.HybridBlock):
    """A cell."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.inp, self.rec = nn.Dense(units), nn.Dense(units, use_bias=False)

    def hybrid_forward(self, F, x, h):
        return F.tanh(self.inp(x) + self.rec(h))


def chain(cell, xs):
    h = nd.zeros((1, 3))
    for x in xs:
        h = cell(x, h)
    return h.sum()


def sentences(rng=None):
    rng = rng or np.random.RandomState(0)
    return [[nd.array(rng.normal(size=(1, 4))) for _ in range(n)] for n in (3, 1, 4)]


def train(cell, scope=None, **options):
    """Losses and gradients, looped or batched."""
    batch = sentences()
    with autograd.record():
        if scope is None:
            losses = [chain(cell, xs) for xs in batch]
        else:
            with gdb.batching(**options) as made:
                losses = [chain(cell, xs) for xs in batch]
            scope.append(made)
    autograd.backward(losses)
    return [x.asscalar() for x in losses] + [p.grad().asnumpy() for p in cell.collect_params().values()]


def assert_same(got, want):
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


DECORATED = {
    "class": lambda: gdb.vertex(type("Marked", (Cell,), {})),
    "class with arguments": lambda: gdb.vertex(name="my cell")(type("Marked", (Cell,), {})),
    "class without arguments": lambda: gdb.vertex()(type("Marked", (Cell,), {})),
    "instance": lambda: lambda **k: gdb.vertex(Cell(**k)),
    "hybridized": lambda: lambda **k: _hybridized(Cell(**k)),
}


def _hybridized(cell):
    cell.hybridize()
    return cell


@pytest.mark.parametrize("how", DECORATED)
def test_a_decorated_cell_is_one_call_a_vertex(how):
    cell = DECORATED[how]()(prefix="cell_")
    cell.initialize(mx.init.Normal(0.5))        # shapes are found by the first call
    scopes = []
    got = train(cell, scopes)
    want = train(cell)
    assert_same(got, want)
    stats = scopes[0].stats
    assert stats.calls == 8 + 3 and not stats.fallbacks      # eight cells, three sums
    if how == "class with arguments":
        assert "my cell" in scopes[0].explain()


def test_granularity_op_records_operators():
    cell = gdb.vertex(Cell())
    cell.initialize(mx.init.Normal(0.5))
    want, scopes = train(cell), []
    assert_same(train(cell, scopes, granularity="op"), want)
    assert scopes[0].stats.calls > 30


def test_policy_none_gives_every_call_its_own_launch():
    cell = gdb.vertex(Cell())
    cell.initialize(mx.init.Normal(0.5))
    want, scopes = train(cell), []
    assert_same(train(cell, scopes, policy="none"), want)
    assert scopes[0].stats.launches == scopes[0].stats.calls


def test_max_pending_bounds_a_flush():
    cell = gdb.vertex(Cell())
    cell.initialize(mx.init.Normal(0.5))
    want, scopes = train(cell), []
    assert_same(train(cell, scopes, max_pending=4), want)
    assert scopes[0].stats.flushes == 3


@pytest.mark.parametrize("options, words", [
    ({"policy": "magic"}, "policy='magic'.*depth"), ({"granularity": "fine"}, "granularity='fine'"),
    ({"backend": "tpu"}, "backend='tpu'"), ({"max_pending": 0}, "max_pending=0")])
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words), gdb.batching(**options):
        pass


def test_a_method_of_a_plain_block():
    class Tree(gluon.Block):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.fc = nn.Dense(3, in_units=3)

        @gdb.vertex
        def node(self, F, x, children):
            """One node."""
            total = F.add_n(*children) if children else F.zeros_like(x)
            return self.fc(x + total), x

        def forward(self, tree):
            x, below = tree
            return self.node(nd, x, [self(t)[0] for t in below])

    net = Tree()
    net.initialize(mx.init.Normal(0.5))
    leaf = (nd.ones((1, 3)), [])
    trees = [leaf, (nd.ones((1, 3)) * 2, [leaf, leaf]), (nd.ones((1, 3)), [leaf, (nd.ones((1, 3)), [leaf])])]

    def work():
        with autograd.record():
            losses = [net(t)[0].sum() for t in trees]
        autograd.backward(losses)
        return [x.asscalar() for x in losses] + [p.grad().asnumpy() for p in net.collect_params().values()]

    want = work()
    with gdb.batching() as scope:
        got = work()
    assert_same(got, want)
    assert scope.stats.calls == 8 + 3
    assert Tree.node.__doc__ == "One node." and net.node.__name__ == "node"
    assert list(inspect.signature(Tree.node).parameters) == ["self", "F", "x", "children"]


def test_a_plain_function_with_numbers_and_numpy_arrays():
    @gdb.vertex
    def scale(F, x, factor, shift):
        return F.broadcast_mul(x, factor) + shift

    x = nd.array([1.0, 2.0])
    outside = scale(nd, x, 3, np.array([1.0, 1.0]))
    with gdb.batching() as scope:
        inside = [scale(nd, x, k, np.array([1.0, float(k)])) for k in range(5)]
    assert scope.stats.launches == 1
    assert outside.asnumpy().tolist() == [4, 7]
    assert [y.asnumpy().tolist() for y in inside] == [[k + 1, 3 * k] for k in range(5)]
    with pytest.raises(TypeError, match="F = mx.nd"):
        scale(x, 1, 2)


def test_forms_of_arguments_are_told_apart():
    """The same arrays as two arguments, as a list, as a tuple, in another order, or with a number between."""
    @gdb.vertex
    def mix(F, *args):
        flat = [y for x in args for y in (x if isinstance(x, (list, tuple)) else [x])]
        total = 0
        for k, y in enumerate(flat):
            total = total + y * (k + 1)
        return total + (100 if isinstance(args[0], list) else 200 if isinstance(args[0], tuple) else 0)

    @gdb.vertex
    def other(F, *args):
        return args[0] * 1000

    def work():
        a, b = nd.array([1.0]) * 1, nd.array([2.0]) * 1
        return [f(nd, *args) for _ in range(3) for f, args in (
            (mix, (a, b)), (mix, ([a, b],)), (mix, ((a, b),)), (mix, (b, a)), (mix, (a, 5, b)), (mix, (5, a, b)),
            (other, (a, b)), (mix, (a, b, a)), (mix, (a, nd.array([7.0]))), (mix, (a, 2.5)), (mix, ([a], b)))]

    want = [y.asscalar() for y in work()]
    with gdb.batching():
        got = work()
    assert [y.asscalar() for y in got] == want


def test_constants_and_fallbacks_take_the_same_arguments_as_outside():
    embed = gluon.nn.Embedding(5, 2)
    embed.initialize()

    @gdb.vertex
    def look(F, word, double, how):
        return embed(word) * (2 if double else 1) + (1 if how == "more" else 0)

    @gdb.vertex
    def peek(F, x, n):
        return x + n if x.sum().asscalar() > 0 else x

    def work():
        return [look(nd, 3, True, "more"), look(nd, 3, False, "less"), look(nd, 2, True, "more"),
                peek(nd, nd.ones((2,)), np.array([1.0, 2.0]))]

    want = [y.asnumpy() for y in work()]
    with gdb.batching() as scope:
        got = work()
    for w, g in zip(want, got):
        np.testing.assert_allclose(g.asnumpy(), w, rtol=1e-6)
    (reason,) = scope.stats.fallbacks
    assert "peek" in reason
    with pytest.raises(TypeError, match="look.*by position.*how"):
        look(nd, 3, True, how="more")


def test_nested_results_keep_their_structure_and_identity():
    class Twice(gluon.HybridBlock):
        def hybrid_forward(self, F, x, states):
            h = x + states[0]
            return h, [h, (states[1] * 2, x)]

    cell = gdb.vertex(Twice())
    x = nd.ones((1, 2))
    with gdb.batching():
        h, (again, (doubled, same)) = cell(x, [x, x])
        assert h is again
    assert h.asnumpy().tolist() == [[2, 2]] and doubled.asnumpy().tolist() == [[2, 2]]
    assert same.asnumpy().tolist() == [[1, 1]]


def test_it_stays_the_block_that_it_was(tmp_path):
    cell = gdb.vertex(Cell(prefix="c_"))
    cell.initialize()
    x, h = nd.ones((1, 4)), nd.ones((1, 3))
    want = cell(x, h).asnumpy()
    assert type(cell).__name__ == "Cell" and type(cell).__doc__ == "A cell." and isinstance(cell, Cell)
    assert repr(cell).startswith("Cell(")
    cell.save_parameters(str(tmp_path / "cell"))
    other = Cell()
    other.load_parameters(str(tmp_path / "cell"))
    np.testing.assert_array_equal(other(x, h).asnumpy(), want)
    cell.hybridize()
    np.testing.assert_allclose(cell(x, h).asnumpy(), want, rtol=1e-6)
    cell.export(str(tmp_path / "exported"))
    copied = copy.deepcopy(other)
    np.testing.assert_array_equal(copied(x, h).asnumpy(), want)
    out = cell(mx.sym.var("x"), mx.sym.var("h"))
    assert isinstance(out, mx.sym.Symbol)


def test_forward_hooks_are_called():
    cell = gdb.vertex(Cell())
    cell.initialize()
    seen = []
    cell.register_forward_hook(lambda block, args, out: seen.append(out.shape))
    with gdb.batching():
        cell(nd.ones((1, 4)), nd.ones((1, 3)))
    assert seen == [(1, 3)]


def test_a_cell_that_cannot_be_traced_records_operators_with_a_reason():
    class Peeking(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return x * (2 if x.sum().asscalar() > 0 else 3)

    cell = gdb.vertex(Peeking())
    with gdb.batching() as scope:
        y = [cell(nd.array([v])) for v in (1.0, -1.0)]
    assert [v.asscalar() for v in y] == [2, -3]
    (reason,) = scope.stats.fallbacks
    assert "Peeking" in reason and "operator by operator" in reason and scope.stats.fallbacks[reason] == 2


def test_decorating_a_plain_block_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="plain Block.*def node"):
        gdb.vertex(type("Net", (gluon.Block,), {}))
    with pytest.raises(TypeError, match="got 3"):
        gdb.vertex(3)


def test_blocks_are_forgotten_when_they_die():
    cell = gdb.vertex(Cell())
    cell.initialize()
    with gdb.batching():
        cell(nd.ones((1, 4)), nd.ones((1, 3)))
    alive = weakref.ref(cell)
    del cell
    gc.collect()
    assert alive() is None


def test_training_mode_is_part_of_the_signature():
    cell = gdb.vertex(nn.HybridSequential())
    cell.add(nn.Dropout(0.5))
    x = nd.ones((1, 50))
    with gdb.batching():
        plain = cell(x)
        with autograd.train_mode():
            dropped = cell(x)
    assert (plain.asnumpy() == 1).all() and set(np.unique(dropped.asnumpy())) == {0.0, 2.0}


# ---- check, explain, draw --------------------------------------------------------------------


def test_check_accepts_what_is_right_and_names_what_is_wrong(monkeypatch):
    cell = gdb.vertex(Cell())
    cell.initialize(mx.init.Normal(0.5))
    want = train(cell)
    assert_same(train(cell, [], check=True), want)
    assert_same(train(cell, [], check=True, granularity="op"), want)
    from cavs_core.ops import TABLE
    monkeypatch.setattr(TABLE["tanh"], "mxnet", lambda F, a, x: F.tanh(x) * 1.1, raising=False)
    fresh = gdb.vertex(Cell())
    fresh.initialize(mx.init.Normal(0.5))
    with pytest.raises(gdb.BatchingMismatchError, match="Cell cell.*differs"):
        train(fresh, [], check=True)


def test_explain_names_launches_rows_and_reasons():
    cell = gdb.vertex(Cell())
    cell.initialize()
    with gdb.batching() as scope:
        out = [chain(cell, xs) for xs in sentences()]
        nd.sort(out[0])
    text = scope.explain()
    assert "11 calls in" in text and "Cell cell" in text and "the scope ended" not in text.splitlines()[0]
    assert "ran alone" in text and "operator sort is not in the op table" in text
    assert str(scope.stats) in text


def test_graph_and_drawing(tmp_path):
    cell = gdb.vertex(Cell())
    cell.initialize()
    with gdb.batching() as scope:
        [chain(cell, xs) for xs in sentences()]
    graph = scope.to_networkx()
    assert sum(d["rows"] for _, d in graph.nodes(data=True)) == scope.stats.calls
    assert graph.number_of_nodes() == scope.stats.launches
    import networkx
    assert networkx.is_directed_acyclic_graph(graph) and graph.number_of_edges() >= 4
    for name in ("plan.svg", "plan.png"):
        scope.draw(str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000
    with gdb.batching() as empty:
        pass
    empty.draw(str(tmp_path / "empty.svg"))
    assert "0 calls" in empty.explain()


# ---- what is known of a vertex from one flush to the next ----------------------------------------


@gdb.vertex
class Scaled(gluon.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 3), init="ones")

    def hybrid_forward(self, F, x, number, weight):
        return F.broadcast_mul(F.broadcast_mul(x, weight), number)


@pytest.mark.parametrize("numbers", [[2, 2.0, np.float32(2), np.array([2.0]), np.int64(2), 1 << 40],
                                     [2.0, 2, 2.0], [np.array([3.0]), 3, 3.5]], ids=str)
def test_numbers_of_every_kind_in_several_flushes(numbers):
    """They have one signature; in the log only small integers stand as they are."""
    net, x = Scaled(), mx.nd.array([[1.0, 2.0, 3.0]])
    net.initialize()
    for flush in range(2):
        with gdb.batching(check=True) as scope:
            made = [(net(x, number), number) for number in numbers[flush:] * 3]
        assert scope.stats.calls == len(made) and not scope.stats.fallbacks
        for y, number in made:
            np.testing.assert_allclose(y.asnumpy(), x.asnumpy() * np.float32(number), rtol=1e-6)


def test_a_vertex_whose_parameters_were_cast_is_traced_anew():
    net = Scaled()
    net.initialize()
    for dtype in ("float32", "float64", "float32"):
        net.cast(dtype)
        x = mx.nd.array([[1.0, 2.0, 3.0]], dtype=dtype)
        for _ in range(2):
            with gdb.batching():
                made = [net(x, y) for y in [mx.nd.array([2.0], dtype=dtype)] * 3]
            assert [y.dtype for y in made] == [np.dtype(dtype).type] * 3
            np.testing.assert_allclose(made[2].asnumpy(), 2 * x.asnumpy())


def test_word_ids_are_no_leaves():
    net, x = Scaled(), mx.nd.ones((1, 3))
    net.initialize()
    with gdb.batching() as scope:
        net(x, 3)
        assert len(scope.recorder.calls.leaves) == 1 and len(scope.recorder.calls.entries) == 1
