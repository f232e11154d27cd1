"""Random per-sample code over arrays of any number of rows: values and gradients as in the plain loop."""

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn = mx.nd, gluon.nn
SIZE, WORDS, STEPS = 3, 7, 8


class Parts(gluon.Block):
    """The parameters that random code may use."""

    def __init__(self, hybridize, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, SIZE)
            self.dense = nn.Dense(SIZE, in_units=SIZE)
            self.bent = nn.Dense(SIZE, in_units=SIZE, flatten=False, activation="tanh")
            self.norm = nn.LayerNorm(in_channels=SIZE)
            self.gru = gluon.rnn.GRUCell(SIZE, input_size=SIZE)
            self.marked = gdb.vertex(nn.Dense(SIZE, in_units=SIZE, activation="sigmoid"))
            self.w = self.params.get("w", shape=(SIZE, SIZE))
            self.b = self.params.get("b", shape=(1, SIZE))
        for block in (self.embed, self.dense, self.bent, self.norm, self.gru):
            block.hybridize(hybridize)


# Every step makes an array of `SIZE` columns from two others; n is the number of rows of the first, k a drawn number.
CODE = {
    "tanh": lambda p, x, y, n, k: nd.tanh(x),
    "dense": lambda p, x, y, n, k: p.dense(x),
    "bent": lambda p, x, y, n, k: p.bent(x),
    "marked": lambda p, x, y, n, k: p.marked(x),
    "norm": lambda p, x, y, n, k: p.norm(x),
    "dot": lambda p, x, y, n, k: nd.dot(x, p.w.data()),
    "bias": lambda p, x, y, n, k: nd.broadcast_add(x, p.b.data()),
    "gru": lambda p, x, y, n, k: p.gru(x, [x if k % 2 else nd.zeros((n, SIZE))])[0],
    "row": lambda p, x, y, n, k: x[k % n].expand_dims(0),
    "row by two": lambda p, x, y, n, k: x[k % n, :].reshape((1, SIZE)),
    "rows": lambda p, x, y, n, k: x[k % n:],
    "slice": lambda p, x, y, n, k: nd.slice_axis(x, axis=0, begin=k % n, end=n),
    "concat": lambda p, x, y, n, k: nd.concat(x, y, dim=0),
    "split": lambda p, x, y, n, k: nd.concat(*nd.SliceChannel(x, num_outputs=SIZE, axis=1)[::-1], dim=1),
    "stack": lambda p, x, y, n, k: nd.stack(*list(x)),
    "mean": lambda p, x, y, n, k: x.mean(axis=0, keepdims=True),
    "sum": lambda p, x, y, n, k: nd.sum(x, axis=0).reshape((1, -1)) * 0.3,
    "max": lambda p, x, y, n, k: nd.max(x, axis=0, keepdims=True),
    "softmax 0": lambda p, x, y, n, k: nd.softmax(x, axis=0),
    "softmax 1": lambda p, x, y, n, k: nd.softmax(x),
    "add": lambda p, x, y, n, k: nd.broadcast_add(x, y[0:1]),
    "multiply": lambda p, x, y, n, k: nd.broadcast_mul(x, y.mean(axis=0, keepdims=True)),
    "attend": lambda p, x, y, n, k: nd.dot(nd.softmax(nd.dot(x, y, transpose_b=True)), y),
    "attend 3": lambda p, x, y, n, k: nd.batch_dot(nd.softmax(nd.batch_dot(
        x.expand_dims(0), y.expand_dims(0), transpose_b=True)), y.expand_dims(0)).reshape((-3, 0)),
    "reshape": lambda p, x, y, n, k: x.reshape((-1, 1)).reshape((-1, SIZE)) * 0.9,
    "transpose": lambda p, x, y, n, k: nd.transpose(nd.transpose(x) + 0.1),
    "reverse": lambda p, x, y, n, k: nd.reverse(x, axis=0),
    "tile": lambda p, x, y, n, k: nd.tile(x[0:1], (2, 1)),
    "take": lambda p, x, y, n, k: nd.take(x, nd.array([k % n, 0])),
    "where": lambda p, x, y, n, k: nd.where(x > 0, x, x * 0.1),
    "columns": lambda p, x, y, n, k: nd.square(x[:, 0:2]).sum(axis=1, keepdims=True) * x,
    "pick": lambda p, x, y, n, k: nd.pick(x, nd.zeros((n,)), axis=1).expand_dims(1) * x,
    "detach": lambda p, x, y, n, k: x.detach() + x * 0.5,
    "pause": lambda p, x, y, n, k: x * paused(x),
    "read": lambda p, x, y, n, k: x * (1 if x.sum().asscalar() > 0 else 2),
}


def paused(x):
    with autograd.pause():
        return nd.sigmoid(x) * 2


def sample(parts, code_seed, data_seed, rare):
    """Run one sample: the last arrays, and a loss."""
    code, data = np.random.RandomState(code_seed), np.random.RandomState(data_seed)
    arrays = [parts.embed(nd.array(data.randint(0, WORDS, n))) for n in code.randint(1, 5, 3)]
    arrays += [nd.array(data.normal(size=(n, SIZE))) for n in code.randint(1, 5, 2)]
    names = [name for name in CODE if name != "read" or rare]
    for _ in range(STEPS):
        i, j, k = (int(v) for v in code.randint(0, 100, 3))
        x, y = arrays[i % len(arrays)], arrays[j % len(arrays)]
        made = CODE[names[code.randint(len(names))]](parts, x, y, x.shape[0], k)
        arrays.append(made[:3] if made.shape[0] > 6 else made)
    return arrays[-2:], sum(x.sum() for x in arrays[-4:]) + parts.dense(arrays[0]).sum()


def run(parts, seeds, rare, batched):
    parts.collect_params().zero_grad()
    with autograd.record():
        if batched:
            with gdb.batching():
                out = [sample(parts, *s, rare) for s in seeds]
        else:
            out = [sample(parts, *s, rare) for s in seeds]
    autograd.backward([loss for _, loss in out])
    return ([x.asnumpy() for arrays, loss in out for x in (*arrays, loss)]
            + [p.grad().asnumpy() for p in parts.collect_params().values()])


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_code_same_as_loop(seed, hybridize):
    """Four samples run the same code on other data, or each its own code."""
    parts = Parts(hybridize)
    parts.initialize(mx.init.Normal(0.6))
    for seeds in ([(seed, k) for k in range(4)], [(seed * 10 + k, k) for k in range(4)]):
        want, got = (run(parts, seeds, seed % 4 == 0, batched) for batched in (False, True))
        for k, (x, y) in enumerate(zip(got, want)):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4, err_msg=f"array {k}")
