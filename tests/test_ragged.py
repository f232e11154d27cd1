"""Which programs treat their first axis as independent rows; and recorded calls of different lengths, end to end."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import Builder, Program, Spec, one_row_program
from cavs_core.mxnet_compat import autograd, gluon, mx
from cavs_core.program import Arg

nd = mx.nd


def builder(name, *tails, fixed=(), **attrs):
    """rows -> a program of one operator whose operands have shapes (rows, *tail); `fixed` operands follow."""
    def build(rows):
        b = Builder(Program())
        xs = [b.input(Spec((rows, *tail), "float32"), Arg(k)) for k, tail in enumerate(tails)]
        xs += [b.input(Spec(shape, "float32"), Arg(len(tails) + k)) for k, shape in enumerate(fixed)]
        b.program.outputs = b.call(name, xs, attrs)
        return b.program
    return build


INDEPENDENT = {
    "tanh": builder("tanh", (3,)),
    "scalar": builder("_plus_scalar", (3,), scalar=2.0),
    "add": builder("broadcast_add", (3,), (3,)),
    "add a bias": builder("broadcast_add", (3,), fixed=[(3,)]),
    "add a row": builder("broadcast_add", (3,), fixed=[(1, 3)]),
    "FullyConnected": builder("FullyConnected", (3,), fixed=[(4, 3), (4,)], num_hidden=4),
    "FullyConnected, not flat": builder("FullyConnected", (2, 3), fixed=[(4, 3), (4,)], num_hidden=4, flatten=False),
    "Embedding": builder("Embedding", (), fixed=[(9, 2)], input_dim=9, output_dim=2),
    "softmax": builder("softmax", (3,), axis=-1),
    "LayerNorm": builder("LayerNorm", (3,), fixed=[(3,), (3,)], axis=-1),
    "sum": builder("sum", (3,), axis=1),
    "pick": builder("pick", (3,), ()),
    "concat": builder("Concat", (3,), (2,), dim=1),
    "slice": builder("slice_axis", (3,), axis=1, begin=0, end=2),
    "split": builder("SliceChannel", (4,), num_outputs=2, axis=1),
    "reshape": builder("Reshape", (4,), shape=(0, 2, 2)),
    "dot": builder("dot", (3,), fixed=[(3, 4)]),
    "batch_dot": builder("batch_dot", (2, 3), (3, 2)),
    "one_hot": builder("one_hot", (), depth=4),
    "where": builder("where", (3,), (3,), (3,)),
}
DEPENDENT = {
    "softmax over rows": builder("softmax", (3,), axis=0),
    "sum over rows": builder("sum", (3,), axis=0),
    "sum of all": builder("sum", (3,)),
    "mean of all": builder("mean", (3,)),
    "flip": builder("reverse", (3,), axis=0),
    "concat below": builder("Concat", (3,), (3,), dim=0),
    "transpose": builder("transpose", (3,)),
    "product of rows": builder("dot", (3,), (3,), transpose_b=True),
    "first row": builder("slice_axis", (3,), axis=0, begin=0, end=1),
    "normalised by the number of rows": builder("SoftmaxOutput", (3,), (), normalization="batch"),
    "tile": builder("tile", (3,), reps=(2, 1)),
    "argmax over rows": builder("argmax", (3,), axis=0),
    "norm": builder("norm", (3,)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_found(name):
    program = one_row_program(INDEPENDENT[name])
    assert program is not None
    assert all(program.specs[v].shape[0] == 1 for v in program.outputs)


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_refused(name):
    assert one_row_program(DEPENDENT[name]) is None


def sentences(rng, lengths=(5, 1, 3, 7, 3)):
    return [(nd.array(rng.randint(0, 20, n)), nd.array(rng.randint(0, 3, n))) for n in lengths]


@pytest.fixture
def layers():
    embed, dense = gluon.nn.Embedding(20, 4), gluon.nn.Dense(3, in_units=4, flatten=False)
    norm = gluon.nn.LayerNorm(in_channels=4)
    for layer in (embed, dense, norm):
        layer.initialize(mx.init.Normal(0.5))
    return embed, dense, norm


def both(model, data, params):
    """Losses and gradients of the loop and of the scope, and the scope."""
    results, scope = [], None
    for batched in (False, True):
        with autograd.record():
            if batched:
                with gdb.batching(check=True) as scope:
                    losses = [model(*sample) for sample in data]
            else:
                losses = [model(*sample) for sample in data]
        if params:
            autograd.backward(losses)
        results.append([x.asnumpy() for x in losses] + [p.grad().asnumpy() for p in params])
    for want, got in zip(*results):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    return scope


def test_sentences_of_different_lengths_share_launches(layers):
    embed, dense, norm = layers
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def model(words, labels):
        h = nd.tanh(norm(embed(words))) * 2
        return loss(dense(h), labels)               # (words,)

    params = [p for layer in layers for p in layer.collect_params().values()]
    scope = both(model, sentences(np.random.RandomState(0)), params)
    titles = [x.title for x in scope.flushes[0].launches]
    assert len(titles) == len(set(titles)) or scope.stats.launches <= 9
    by_title = {x.title: x for x in scope.flushes[0].launches}
    whole = next(x for title, x in by_title.items() if title.startswith("Embedding + "))
    assert whole.rows == 19 and whole.calls % 5 == 0


def test_parts_of_a_value_are_named_without_a_launch(layers):
    embed, dense, _ = layers

    def model(words, _):
        x = embed(words)                            # (words, 4)
        first, last = x[0], x[-1]                   # (4,)
        middle = x[0:1] + first.expand_dims(0) * last.reshape((1, -1))
        return dense(middle).sum()

    scope = both(model, sentences(np.random.RandomState(1)), [embed.weight, dense.weight])
    assert scope.flushes[0].aliases > 5 * 5
    assert {"slice", "Reshape", "expand_dims"}.isdisjoint(x.title for x in scope.flushes[0].launches)


def test_parts_of_leaves_are_named_too():
    rng = np.random.RandomState(4)
    data = [nd.array(rng.normal(size=(1, 3))) for _ in range(3)]

    def model(x):
        return nd.tile(x.expand_dims(0), (1, 2, 1)) + nd.reshape(x, (1, 1, 3))

    for x in data:
        x.attach_grad()
    want = []
    with autograd.record():
        for x in data:
            want.append(model(x))
    autograd.backward(want)
    want_grads = [x.grad.asnumpy() for x in data]
    with autograd.record(), gdb.batching():
        got = [model(x) for x in data]
    autograd.backward(got)
    for x, w, y, g in zip(data, want, got, want_grads):
        np.testing.assert_allclose(y.asnumpy(), w.asnumpy(), rtol=1e-6)
        np.testing.assert_allclose(x.grad.asnumpy(), g, rtol=1e-6)


def test_whole_values_are_read_again_from_their_rows(layers):
    """After row-wise work, work on the whole: attention over the words of each sentence."""
    embed, dense, _ = layers

    def model(words, _):
        x = nd.tanh(embed(words))                   # (words, 4)
        weights = nd.softmax(nd.dot(x, x[0]), axis=0)           # (words,)
        mixed = nd.dot(weights, x)                  # (4,)
        return dense(mixed.reshape((1, 4))).sum() + nd.max(x, axis=0).sum()

    both(model, sentences(np.random.RandomState(2)), [embed.weight, dense.weight])


def test_vectors_that_hold_a_number_per_row():
    """Losses per word, masked and averaged, for sentences of different lengths."""
    def model(words, labels):
        scores = nd.one_hot(words, depth=3) * 0.5 + nd.one_hot(labels, depth=3)
        losses = -nd.pick(nd.log_softmax(scores), labels)       # (words,)
        mask = labels > 0
        return (losses * mask).sum() / (mask.sum() + 1) + losses[0]

    both(model, sentences(np.random.RandomState(3)), [])


def test_outputs_of_ragged_calls_leave_with_their_own_shape(layers):
    embed, _, _ = layers
    with gdb.batching():
        out = [embed(nd.array(np.arange(n))) for n in (2, 5, 1)]
    assert [y.shape for y in out] == [(2, 4), (5, 4), (1, 4)]
    table = embed.weight.data().asnumpy()
    for y in out:
        np.testing.assert_array_equal(y.asnumpy(), table[:len(y)])


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("shape", [(1, 3), (1,), (1, 2, 3)])
def test_rows_of_any_number_are_joined_in_one_launch(shape, backend):
    """nd.concat(*states, dim=0): one class for all lengths, and rows that are read twice get both gradients."""
    rng = np.random.RandomState(0)
    xs = [mx.nd.array(rng.normal(size=shape)) for _ in range(6)]
    for x in xs:
        x.attach_grad()

    def run():
        ys = [mx.nd.tanh(x) for x in xs]
        return [mx.nd.concat(*ys[:n], ys[0], dim=0) * n for n in (1, 2, 5, 3)]

    with autograd.record():
        want = run()
    autograd.backward(want)
    want_grads = [x.grad.asnumpy() for x in xs]
    with autograd.record(), gdb.batching(backend=backend, check=True) as scope:
        got = run()
    autograd.backward(got)
    titles = [launch.title for launch in scope.flushes[0].launches]
    assert titles.count("Concat") == (1 if len(shape) < 3 else 4) and not scope.stats.fallbacks
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.asnumpy(), w.asnumpy(), rtol=1e-5)
    for x, grad in zip(xs, want_grads):
        np.testing.assert_allclose(x.grad.asnumpy(), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["mxnet", "native"])
@pytest.mark.parametrize("shape", [(1, 3), (1,), (4,)])
def test_sums_of_any_number_of_rows_are_one_class(shape, backend):
    """Also where a launch reads rows that stand right before those that it writes."""
    rng = np.random.RandomState(1)
    for _ in range(12):
        xs = [mx.nd.array(rng.normal(size=shape)) for _ in range(rng.randint(2, 5))]
        reads = [rng.randint(0, len(xs) + k, size=rng.randint(2, 12)) for k in range(rng.randint(1, 8))]
        for x in xs:
            x.attach_grad()

        def run(xs=xs, reads=reads):
            values = [mx.nd.tanh(x) for x in xs]
            for read in reads:
                values.append(mx.nd.add_n(*[values[i] for i in read]))
            return values

        with autograd.record():
            want = run()
        autograd.backward(want)
        want_grads = [x.grad.asnumpy() for x in xs]
        with autograd.record(), gdb.batching(backend=backend, policy="depth") as scope:
            got = run()
        autograd.backward(got)
        assert len({launch.operands for launch in scope.flushes[0].launches if launch.title == "add_n"}) == 1
        for g, w in zip(got, want):
            np.testing.assert_allclose(g.asnumpy(), w.asnumpy(), rtol=1e-4)
        for x, grad in zip(xs, want_grads):
            np.testing.assert_allclose(x.grad.asnumpy(), grad, rtol=1e-4, atol=1e-5)
