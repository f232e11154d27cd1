"""Gluon's own blocks, traced: values and gradients, those of parameters too, against the plain calls."""

import numpy as np
import pytest
from block_check import check_block
from op_check import ROWS

from cavs_core.errors import TraceError, UnsupportedOpError
from cavs_core.mxnet_compat import gluon, mx
from cavs_core.ops import TABLE
from cavs_core.program import Param, Spec
from cavs_core.trace import trace

nn, rnn, loss = gluon.nn, gluon.rnn, gluon.loss
contrib = mx.gluon.contrib


def rows(*shape, dtype="float32", values=None):
    """An argument of every sample; `values` = n draws whole numbers below n."""
    numbers = np.random.normal(size=(ROWS, *shape)) if values is None else np.random.randint(0, values, (ROWS, *shape))
    return numbers.astype(dtype)


def ready(block, dtype="float32"):
    block.initialize(mx.init.Normal(0.5))
    block.cast(dtype)
    return block


@pytest.mark.parametrize("wrong, what", [(0, "gradient of argument 0"), (1, "gradient of dense.*_weight")])
def test_the_checker_sees_a_wrong_gradient(monkeypatch, wrong, what):
    matmul = TABLE["matmul"]
    right = matmul.grad

    def grad(b, a, xs, ys, dys):
        made = right(b, a, xs, ys, dys)
        made[wrong] = b.scale(made[wrong], 1.1)
        return made
    monkeypatch.setattr(matmul, "grad", grad)
    with pytest.raises(AssertionError, match=what):
        check_block(ready(nn.Dense(3, in_units=4)), rows(2, 4))


# ---- layers ----------------------------------------------------------------------------------

LAYERS = {
    "dense": (lambda: nn.Dense(3, in_units=4), (1, 4)),
    "dense without bias": (lambda: nn.Dense(3, in_units=4, use_bias=False), (2, 4)),
    "dense over the last axis": (lambda: nn.Dense(3, in_units=4, flatten=False, activation="tanh"), (2, 3, 4)),
    "dense over all axes": (lambda: nn.Dense(3, activation="relu"), (2, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm(), (2, 4)),
    "layer norm without scale": (lambda: nn.LayerNorm(scale=False, axis=1), (2, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm(scale=True), (2, 3, 5)),
    "group norm": (lambda: nn.GroupNorm(num_groups=2), (2, 4, 3)),
    "leaky": (lambda: nn.LeakyReLU(0.1), (2, 4)),
    "prelu": (lambda: nn.PReLU(), (2, 4)),
    "prelu of every channel": (lambda: nn.PReLU(in_channels=4), (2, 4, 3)),
    "elu": (lambda: nn.ELU(0.7), (2, 4)),
    "selu": (lambda: nn.SELU(), (2, 4)),
    "gelu": (lambda: nn.GELU(), (2, 4)),
    "swish": (lambda: nn.Swish(1.5), (2, 4)),
    "flatten": (lambda: nn.Flatten(), (2, 3, 4)),
    "lambda": (lambda: nn.Lambda("tanh"), (2, 4)),
    "hybrid lambda": (lambda: nn.HybridLambda(lambda F, x: F.tanh(x) * 2), (2, 4)),
    "identity": (lambda: contrib.nn.Identity(), (2, 4)),
    "concurrent": (lambda: chained(contrib.nn.HybridConcurrent(axis=1), nn.Dense(2), nn.Dense(3)), (2, 4)),
    **{f"activation {name}": (lambda name=name: nn.Activation(name), (2, 4))
       for name in ("relu", "sigmoid", "tanh", "softrelu", "softsign")},
}


def chained(block, *children):
    for child in children:
        block.add(child)
    return block


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, shape = LAYERS[name]
    check_block(ready(make()), rows(*shape), tol=dict(rtol=1e-3, atol=1e-4))


@pytest.mark.parametrize("name", ["dense", "layer norm", "prelu", "gelu"])
def test_layer_in_double_precision(name):
    make, shape = LAYERS[name]
    check_block(ready(make(), "float64"), rows(*shape, dtype="float64"), tol=dict(rtol=1e-6, atol=1e-7))


def test_embedding():
    check_block(ready(nn.Embedding(7, 3)), rows(4, values=7), fixed=(0,))
    check_block(ready(nn.Embedding(7, 3)), rows(2, 4, values=7, dtype="int32"), fixed=(0,))


def test_embedding_with_a_sparse_gradient_has_the_same_program():
    dense, sparse = (trace(ready(nn.Embedding(7, 3, sparse_grad=sparse)), Spec((4,), "int32")) for sparse in (0, 1))
    assert [i.op for i in dense.instrs] == [i.op for i in sparse.instrs]


@pytest.mark.parametrize("hybridize", [False, True])
def test_chain_of_layers(hybridize):
    net = ready(chained(nn.HybridSequential(), nn.Embedding(9, 5), nn.Dense(4, activation="tanh", flatten=False),
                        nn.LayerNorm(), nn.Dropout(0.5), nn.HybridLambda("softmax")))
    if hybridize:
        net.hybridize()
    check_block(net, rows(3, values=9), fixed=(0,), tol=dict(rtol=1e-3, atol=1e-4))


def test_a_plain_chain_with_a_hybridized_child():
    inner = chained(nn.HybridSequential(), nn.Dense(4), nn.LeakyReLU(0.2))
    inner.hybridize(static_alloc=True)
    net = ready(chained(nn.Sequential(), nn.Dense(5), inner))
    program = check_block(net, rows(2, 3))
    assert inner._active and not net[0]._active
    assert len(program.inputs_of(Param)) == 4


def test_dropout_follows_the_training_flag():
    net = nn.Dropout(0.5)
    with mx.autograd.train_mode():
        training = [i.op for i in trace(net, Spec((2, 3), "float32")).instrs]
    with mx.autograd.predict_mode():
        predicting = [i.op for i in trace(net, Spec((2, 3), "float32")).instrs]
    assert "uniform_like" in training and "uniform_like" not in predicting
    check_block(net, rows(2, 3))


# ---- recurrent cells -------------------------------------------------------------------------

CELLS = {
    "rnn": lambda: rnn.RNNCell(4, input_size=3), "rnn with relu": lambda: rnn.RNNCell(4, activation="relu"),
    "lstm": lambda: rnn.LSTMCell(4, input_size=3), "gru": lambda: rnn.GRUCell(4, input_size=3),
    "residual": lambda: rnn.ResidualCell(rnn.GRUCell(3, input_size=3)),
    "dropout": lambda: chained(rnn.SequentialRNNCell(), rnn.LSTMCell(4), rnn.DropoutCell(0.3)),
    "sequential": lambda: chained(rnn.SequentialRNNCell(), rnn.LSTMCell(4), rnn.GRUCell(2)),
    "hybrid sequential": lambda: chained(rnn.HybridSequentialRNNCell(), rnn.RNNCell(4), rnn.LSTMCell(2)),
    "projected lstm": lambda: contrib.rnn.LSTMPCell(5, 4, input_size=3),
}


@pytest.mark.parametrize("name", CELLS)
def test_cell(name):
    cell = ready(CELLS[name]())
    states = [rows(*info["shape"]) for info in cell.state_info(batch_size=1)]
    check_block(cell, rows(1, 3), states)


@pytest.mark.parametrize("name", ["lstm", "sequential", "residual"])
def test_unrolled_cell(name):
    """From its own begin_state: zeros, which are constants of the program."""
    cell = ready(CELLS[name]())

    def unroll(F, x):
        outputs, states = cell.unroll(3, x, layout="NTC", merge_outputs=True)
        return [outputs, *states]
    check_block(cell, rows(1, 3, 3), call=unroll)


def test_unrolled_cell_in_both_directions():
    cell = ready(rnn.BidirectionalCell(rnn.LSTMCell(4, input_size=3), rnn.GRUCell(2, input_size=3)))
    check_block(cell, rows(1, 4, 3), call=lambda F, x: cell.unroll(4, x, layout="NTC", merge_outputs=True)[0])


@pytest.mark.parametrize("make, lost", [
    (lambda: contrib.rnn.VariationalDropoutCell(rnn.LSTMCell(4, input_size=3), 0.3, 0.3), "drop_inputs_mask"),
    (lambda: rnn.ZoneoutCell(rnn.RNNCell(4, input_size=3), 0.3, 0.3), "_prev_output"),
], ids=["variational dropout", "zoneout"])
def test_a_cell_that_keeps_an_array_is_refused_and_stays_usable(make, lost):
    cell = ready(make())
    states = [Spec(info["shape"], "float32") for info in cell.state_info(batch_size=1)]
    with mx.autograd.train_mode(), pytest.raises(TraceError, match="keeps an array for the next call"):
        trace(cell, Spec((1, 3), "float32"), states)
    assert getattr(cell, lost) is None
    with mx.autograd.train_mode():
        out, _ = cell(mx.nd.ones((1, 3)), [mx.nd.zeros(s.shape) for s in states])
    assert out.asnumpy().shape == (1, 4)


# ---- losses ----------------------------------------------------------------------------------

PAIR = lambda: (rows(2, 4), rows(2, 4))                                         # noqa: E731
SIGNS = lambda: (rows(2, 4), np.sign(rows(2, 4)))                               # noqa: E731
UNIT = lambda: (rows(2, 4), np.random.uniform(size=(ROWS, 2, 4)).astype("float32"))     # noqa: E731
CHANCES = lambda: (rows(2, 4), np.random.dirichlet(np.ones(4), (ROWS, 2)).astype("float32"))    # noqa: E731

LOSSES = {
    "l1": (loss.L1Loss, PAIR), "l2": (loss.L2Loss, PAIR), "huber": (lambda: loss.HuberLoss(0.5), PAIR),
    "sigmoid bce": (loss.SigmoidBinaryCrossEntropyLoss, UNIT),
    "sigmoid bce of probabilities": (lambda: loss.SigmoidBCELoss(from_sigmoid=True), lambda: (UNIT()[1], UNIT()[1])),
    "softmax ce": (loss.SoftmaxCrossEntropyLoss, lambda: (rows(2, 4), rows(2, values=4))),
    "softmax ce of one": (loss.SoftmaxCELoss, lambda: (rows(1, 4), rows(1, values=4, dtype="int32"))),
    "softmax ce along axis 1": (lambda: loss.SoftmaxCELoss(axis=1), lambda: (rows(2, 4, 3), rows(2, 3, values=4))),
    "softmax ce of dense labels": (lambda: loss.SoftmaxCELoss(sparse_label=False), CHANCES),
    "softmax ce from log chances": (lambda: loss.SoftmaxCELoss(from_logits=True, weight=0.5),
                                    lambda: (rows(2, 4), rows(2, values=4))),
    "kl": (loss.KLDivLoss, CHANCES), "kl of logits": (lambda: loss.KLDivLoss(from_logits=False), CHANCES),
    "hinge": (loss.HingeLoss, SIGNS), "squared hinge": (loss.SquaredHingeLoss, SIGNS),
    "logistic": (loss.LogisticLoss, SIGNS), "binary logistic": (lambda: loss.LogisticLoss(label_format="binary"), UNIT),
    "triplet": (loss.TripletLoss, lambda: (rows(2, 4), rows(2, 4), rows(2, 4))),
    "poisson": (loss.PoissonNLLLoss, UNIT),
    "cosine": (loss.CosineEmbeddingLoss, lambda: (rows(2, 4), rows(2, 4), np.sign(rows(2)))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    make, arguments = LOSSES[name]
    args = arguments()
    fixed = range(1, len(args)) if "triplet" not in name and "cosine" not in name else range(2, len(args))
    check_block(make(), *args, fixed=fixed, tol=dict(rtol=1e-3, atol=1e-5))


@pytest.mark.parametrize("name", ["l2", "softmax ce", "sigmoid bce", "kl"])
def test_loss_with_a_weight_for_every_sample(name):
    make, arguments = LOSSES[name]
    weight = np.random.uniform(size=(ROWS, 2, 1)).astype("float32")
    check_block(make(), *arguments(), weight, fixed=(1, 2), tol=dict(rtol=1e-3, atol=1e-5))


def test_sigmoid_loss_with_a_weight_for_positives():
    args = (*UNIT(), np.random.uniform(size=(ROWS, 2, 1)).astype("float32"),
            np.random.uniform(1, 2, (ROWS, 1, 4)).astype("float32"))
    check_block(loss.SigmoidBCELoss(), *args, fixed=(1, 2, 3))


def test_a_loss_that_writes_in_place():
    """MXNet cannot record it, so there are no gradients to compare."""
    args = UNIT()[1] + 0.5, rows(2, 4, values=6)
    check_block(loss.PoissonNLLLoss(from_logits=False, compute_full=True), *args, grad=False)


def test_a_loss_that_is_not_in_the_table():
    with pytest.raises(UnsupportedOpError, match="called by CTCLoss"):
        trace(loss.CTCLoss(), Spec((1, 5, 4), "float32"), Spec((1, 2), "float32"))


# ---- models ----------------------------------------------------------------------------------


class Scorer(gluon.HybridBlock):
    """Parameters of its own, cut and bent without operators; children; lists in, None in, lists out."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.table = self.params.get("table", shape=(4, 3), init="normal")
            self.frozen = self.params.get("frozen", shape=(3,), init="normal", grad_req="null")
            self.mix = nn.Dense(3, flatten=False)
            self.cell = rnn.LSTMCell(3)

    def hybrid_forward(self, F, x, states, mask, table, frozen):
        h = self.mix(x) + table[1:3].reshape((2, 3)) * table[0] + frozen
        if mask is not None:
            h = F.broadcast_mul(h, mask)
        out, states = self.cell(h, states)
        return out, [states, h.sum(axis=1)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
def test_model(masked, hybridize):
    net = Scorer()
    net.initialize(mx.init.Normal(0.5))
    if hybridize:
        net.mix.hybridize()
        net.cell.hybridize()
    states = [rows(2, 3), rows(2, 3)]
    program = check_block(net, rows(2, 5), states, rows(2, 1) if masked else None)
    names = [program.inputs[v].name for v in program.inputs_of(Param)]
    assert len(names) == len(set(names)) == 8
    assert len(program.outputs) == 4


def test_parameters_that_wait_for_their_shape():
    net = chained(nn.HybridSequential(), nn.Dense(4), nn.LayerNorm(), nn.Dense(2))
    net.initialize()
    assert any(0 in p.shape for p in net.collect_params().values())
    check_block(net, rows(2, 3), tol=dict(rtol=1e-3, atol=1e-4))
    assert [p.shape for p in net.collect_params().values()] == [(4, 3), (4,), (4,), (4,), (2, 4), (2,)]


def test_one_layer_used_twice_is_one_parameter():
    layer = ready(nn.Dense(3, in_units=3))
    program = check_block(layer, rows(2, 3), call=lambda F, x: layer(F.tanh(layer(x))))
    assert len(program.inputs_of(Param)) == 2
