"""What people do with Gluon around a model, inside a scope: losses, cells, initialisation, requests, passes, modes."""

import numpy as np
import pytest
from gluon_check import check_same_as_loop
from gluon_models import Case
from gluon_sequences import run_cell

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd, nn, rnn, L = mx.nd, gluon.nn, gluon.rnn, gluon.loss


def vectors(count=4, size=3, seed=0, dtype="float32"):
    rng = np.random.RandomState(seed)
    return [nd.array(rng.normal(size=(1, size)), dtype=dtype) for _ in range(count)]


def check(net, loss, samples=None, **options):
    """`loss(net, x)` of some vectors, in a scope and in the loop; the statistics of the scope."""
    made = samples or vectors()
    case = Case(net, lambda rng, dtype: [(x,) for x in made], lambda net, x: ([], loss(net, x)))
    return check_same_as_loop(case, **options)


def linear():
    return nn.Dense(4, in_units=3)


def gradients(run, net, batched):
    """What `run` leaves in the gradients of a net, with the whole of it in a scope or not."""
    net.collect_params().zero_grad()
    if batched:
        with gdb.batching():
            run()
    else:
        run()
    return [p.grad().asnumpy() for p in net.collect_params().values()]


def check_gradients(run, net):
    """`run` leaves the same gradients, in a scope and outside."""
    want, got = gradients(run, net, False), gradients(run, net, True)
    assert any(np.abs(g).max() > 0 for g in want)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# ---- losses ----------------------------------------------------------------------------------

SHARES, SIGNS = np.array([[0.1, 0.2, 0.3, 0.4]]), np.array([[1, -1, 1, -1]])
LOSSES = {
    "l2": lambda h: L.L2Loss()(h, nd.array(SHARES)),
    "l2, weights": lambda h: L.L2Loss(weight=0.3)(h, nd.array(SHARES), nd.array([[2.0]])),
    "l1": lambda h: L.L1Loss()(h, nd.array(SHARES)),
    "l1, batch axis 1": lambda h: L.L1Loss(batch_axis=1)(h, nd.array(SHARES)),
    "binary": lambda h: L.SigmoidBCELoss()(h, nd.array(SHARES)),
    "binary, weights": lambda h: L.SigmoidBCELoss()(h, nd.array(SHARES), nd.array(SIGNS + 2), nd.array([[2.0]])),
    "binary from sigmoid": lambda h: L.SigmoidBCELoss(from_sigmoid=True)(nd.sigmoid(h), nd.array(SHARES)),
    "cross entropy": lambda h: L.SoftmaxCELoss()(h, nd.array([2])),
    "cross entropy, int label": lambda h: L.SoftmaxCELoss()(h, nd.array([2], dtype="int32")),
    "cross entropy, dense": lambda h: L.SoftmaxCELoss(sparse_label=False)(h, nd.array(SHARES)),
    "cross entropy from logits": lambda h: L.SoftmaxCELoss(from_logits=True)(nd.log_softmax(h), nd.array([1])),
    "kl": lambda h: L.KLDivLoss(from_logits=False)(h, nd.array(SHARES)),
    "huber": lambda h: L.HuberLoss(rho=0.3)(h, nd.array(SHARES)),
    "hinge": lambda h: L.HingeLoss()(h, nd.array(SIGNS)),
    "squared hinge": lambda h: L.SquaredHingeLoss()(h, nd.array(SIGNS)),
    "logistic": lambda h: L.LogisticLoss()(h, nd.array(SIGNS)),
    "logistic, binary": lambda h: L.LogisticLoss(label_format="binary")(h, nd.array(SIGNS > 0)),
    "triplet": lambda h: L.TripletLoss()(h, nd.array(SHARES), nd.array(SIGNS)),
    "poisson": lambda h: L.PoissonNLLLoss()(h, nd.array(SHARES)),
    "cosine": lambda h: L.CosineEmbeddingLoss()(h, nd.array(SHARES), nd.array([1])),
    "ctc": lambda h: L.CTCLoss()(nd.broadcast_to(h.expand_dims(1), (1, 5, 4)), nd.array([[1, 2]])),
    "sdml": lambda h: L.SDMLLoss()(nd.concat(h, h * 2, dim=0), nd.array(np.concatenate([SHARES, SIGNS]))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_one_sample_same_as_loop(name):
    stats = check(linear, lambda net, x: LOSSES[name](net(x)), steps=1)
    assert (name == "ctc") == bool(stats.fallbacks)     # an operator that the table does not have


def test_hybridized_losses():
    ce, kl = L.SoftmaxCELoss(), L.KLDivLoss(from_logits=False)
    ce.hybridize()
    kl.hybridize()
    stats = check(linear, lambda net, x: ce(net(x), nd.array([1])) + kl(net(x), nd.array(SHARES)))
    assert stats.fallbacks == {}


# ---- cells and layers ------------------------------------------------------------------------


def stack_of_cells():
    net = rnn.SequentialRNNCell()
    for cell in (rnn.ResidualCell(rnn.GRUCell(3)), rnn.DropoutCell(0.0), rnn.RNNCell(3), rnn.LSTMCell(2)):
        net.add(cell)
    return net


def predicting(fn):
    def loss(net, x):
        with autograd.predict_mode():
            return fn(net, x)
    return loss


def unrolled(net, x):
    return net.unroll(3, [x, x + 1, x * 2], merge_outputs=True)[0].sum()


def stepped(net, x):
    net.reset()
    return nd.concat(*run_cell(net, [x, x + 1, x * 2]), dim=1).sum()


CELLS = {
    "zoneout 0": (lambda: rnn.ZoneoutCell(rnn.LSTMCell(3), 0.0, 0.0), unrolled),
    "zoneout 0, stepped": (lambda: rnn.ZoneoutCell(rnn.LSTMCell(3), 0.0, 0.0), stepped),
    "zoneout 0, marked": (lambda: gdb.vertex(rnn.ZoneoutCell(rnn.LSTMCell(3, input_size=3), 0.0, 0.0)), stepped),
    "zoneout, predicting": (lambda: rnn.ZoneoutCell(rnn.LSTMCell(3), 0.5, 0.5), predicting(unrolled)),
    "variational dropout, predicting": (
        lambda: gluon.contrib.rnn.VariationalDropoutCell(rnn.LSTMCell(3), 0.5, 0.5, 0.5), predicting(unrolled)),
    "variational dropout, marked": (
        lambda: gdb.vertex(gluon.contrib.rnn.VariationalDropoutCell(rnn.LSTMCell(3, input_size=3), 0.5, 0.5, 0.5)),
        predicting(stepped)),
    "projected": (lambda: gluon.contrib.rnn.LSTMPCell(4, 2), unrolled),
    "bidirectional": (lambda: rnn.BidirectionalCell(rnn.LSTMCell(3), rnn.GRUCell(3)), unrolled),
    "a stack": (stack_of_cells, unrolled),
    "valid length": (lambda: rnn.LSTMCell(3), lambda net, x: net.unroll(
        3, [x, x + 1, x * 2], merge_outputs=True, valid_length=nd.array([2]))[0].sum()),
    "one array": (lambda: rnn.GRUCell(3), lambda net, x: net.unroll(
        3, nd.tile(x.expand_dims(0), (1, 3, 1)), merge_outputs=True)[0].sum()),
}


@pytest.mark.parametrize("name", CELLS)
def test_cell_same_as_loop(name):
    net, loss = CELLS[name]
    stats = check(net, loss)
    assert any("keeps an array" in reason for reason in stats.fallbacks) == ("marked" in name)


def test_convolutional_cell_runs_its_convolutions_alone():
    images = [nd.random.normal(shape=(1, 2, 4, 4)) for _ in range(3)]
    stats = check(lambda: gluon.contrib.rnn.Conv2DLSTMCell((2, 4, 4), 3, 3, 3, i2h_pad=1),
                  lambda net, x: net.unroll(2, [x, x + 1], merge_outputs=False)[0][-1].sum(), images)
    assert sum(n for reason, n in stats.fallbacks.items() if "Convolution" in reason) == 3 * 2 * 2


def test_zoneout_in_training_keeps_about_half_of_the_old_state():
    net = rnn.ZoneoutCell(rnn.LSTMCell(60, input_size=3), 0.5, 0.5)
    net.initialize()
    with autograd.record(), gdb.batching():
        outputs = [net.unroll(2, [x, x], merge_outputs=False)[0] for x in vectors()]
    autograd.backward([second for _, second in outputs])
    kept = np.mean([(a == b).asnumpy() for a, b in outputs])
    assert 0.35 < kept < 0.65


# ---- parameters ------------------------------------------------------------------------------


def test_deferred_initialisation_inside_a_scope():
    for hybridize in (False, True):
        def net(hybridize=hybridize):
            made = nn.HybridSequential()
            made.add(nn.Dense(5, activation="relu"), nn.LayerNorm(), nn.Dense(2))
            made.hybridize(hybridize)
            return made

        check(net, lambda net, x: net(x).sum())


@pytest.mark.parametrize("hybridize", [False, True])
def test_requests_write_add_and_null_together(hybridize):
    def net():
        made = nn.HybridSequential()
        made.add(nn.Dense(3, in_units=3), nn.Dense(3, in_units=3), nn.Dense(2, in_units=3))
        for layer, req in zip(made, ("null", "add", "write")):
            layer.collect_params().setattr("grad_req", req)
        made.hybridize(hybridize)
        return made

    check(net, lambda net, x: nd.tanh(net(x)).sum())        # three steps: "add" goes on adding


def test_a_request_that_changes_between_scopes():
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=3), nn.Dense(2, in_units=3))
    net.initialize()
    net.hybridize()
    want = None
    for req in ("write", "null", "write"):
        net[0].weight.grad_req = req
        with autograd.record(), gdb.batching():
            losses = [net(x).sum() for x in vectors()]
        autograd.backward(losses)
        if req == "write":
            grad = net[0].weight.grad().asnumpy()
            want = grad if want is None else want
            np.testing.assert_array_equal(grad, want)


def test_parameters_shared_between_blocks():
    def net():
        made = nn.Sequential()
        first = nn.Dense(3, in_units=3)
        made.add(first, nn.Dense(3, in_units=3, params=first.params, activation="tanh"), first)
        made[1].hybridize()
        return made

    check(net, lambda net, x: net(x).sum())


def test_slices_of_parameters_and_constants():
    class Net(gluon.Block):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            with self.name_scope():
                self.w = self.params.get("w", shape=(4, 3))
                self.c = self.params.get_constant("c", nd.array([[1, 2, 3]]))

        def forward(self, x):
            w = self.w.data()
            return (w[1] * x[0]).sum() + nd.dot(x * self.c.data(), w.T)[0, 2] + w[1:3].sum() * w[0, 1]

    check(Net, lambda net, x: net(x))


# ---- passes ----------------------------------------------------------------------------------


def losses_of(net):
    with autograd.record():
        return [(net(x) ** 2).sum() for x in vectors()]


def pass_twice(net):
    losses = losses_of(net)
    autograd.backward(losses, retain_graph=True)
    autograd.backward(losses)


def pass_some(net):
    autograd.backward(losses_of(net)[1:3])


def pass_from_one_twice(net):
    losses = losses_of(net)
    autograd.backward([losses[2], losses[0], losses[2]], retain_graph=True)
    autograd.backward([losses[2], losses[0], losses[2]], [nd.ones((1,)) * k for k in (2, 3, 4)])


def pass_with_some_gradients(net):
    with autograd.record():
        outs = [net(x) ** 2 for x in vectors()]
    autograd.backward(outs, [None, nd.ones((1, 4)) * 3, None, nd.ones((1, 4))])


def pass_twice_anew(net):
    for _ in range(2):
        sum_of(losses_of(net)).backward()


def sum_of(losses):
    with autograd.record():
        return sum(losses)


def pass_with_gradients(net):
    with autograd.record():
        outs = [net(x) ** 2 for x in vectors()]
    autograd.backward(outs, [nd.ones((1, 4)) * k for k in range(4)])


def pass_with_gradients_of_the_scope(net):
    with autograd.record():
        outs = [net(x) ** 2 for x in vectors()]
    autograd.backward(outs, [out * 2 for out in outs])


def pass_each(net):
    for loss in losses_of(net):
        loss.backward()


def pass_grad(net):
    found = autograd.grad(losses_of(net), [p.data() for p in net.collect_params().values()])
    for p, grad in zip(net.collect_params().values(), found):
        p.grad()[:] += grad


def pass_and_clip(net):
    autograd.backward(losses_of(net))
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 0.1)


PASSES = [pass_twice, pass_some, pass_from_one_twice, pass_with_some_gradients, pass_each, pass_twice_anew,
          pass_with_gradients, pass_with_gradients_of_the_scope, pass_grad, pass_and_clip]


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_backward_passes_inside_a_scope(run):
    net = linear()
    net.initialize()
    net.collect_params().setattr("grad_req", "add")
    check_gradients(lambda: run(net), net)


def test_training_steps_inside_one_scope():
    found = []
    for batched in (False, True):
        mx.random.seed(2)
        net = linear()
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})

        def steps(net=net, trainer=trainer):
            for _ in range(3):
                autograd.backward(losses_of(net))
                trainer.step(4)

        gradients(steps, net, batched)
        found.append(net.weight.data().asnumpy())
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_gradients_into_arrays_from_before_the_scope():
    """A leaf is a variable, or an array that was computed on the tape."""
    net = nn.Dense(3, in_units=3)
    net.initialize()
    found = []
    for batched in (False, True):
        xs = vectors()
        for x in xs:
            x.attach_grad()

        def run(table, xs=xs):
            return [net(nd.tanh(table[k]) + x).sum() for k, x in enumerate(xs)]

        with autograd.record():
            table = net(nd.concat(*xs, dim=0)).reshape((4, 1, 3))
            if batched:
                with gdb.batching():
                    losses = run(table)
            else:
                losses = run(table)
            total = sum(losses) * 2
        total.backward()
        found.append([net.weight.grad().asnumpy(), *[x.grad.asnumpy() for x in xs]])
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=1e-5)


# ---- modes -----------------------------------------------------------------------------------


def test_pause_inside_a_scope_stops_gradients():
    def loss(net, x):
        with autograd.pause():
            fixed = nd.softmax(net(x))
        return (net(x) * fixed + fixed + net(x).detach()).sum()

    assert check(linear, loss).flushes == 1


def test_train_and_predict_mode_inside_a_scope():
    net = nn.HybridSequential()
    net.add(nn.Dense(40, in_units=3), nn.Dropout(0.5))
    net.initialize(mx.init.Normal(1.0))
    for hybridize in (False, True):
        net.hybridize(hybridize)
        with gdb.batching() as scope:
            with autograd.train_mode():
                trained = [net(x) for x in vectors()]
            predicted = [net(x) for x in vectors()]
            with autograd.record(train_mode=False):
                recorded = [net(x) for x in vectors()]
            with autograd.record():
                with autograd.predict_mode():
                    predicted += [net(x) for x in vectors()]
        assert scope.stats.flushes == 1
        zeros = [np.mean([(y.asnumpy() == 0).mean() for y in ys]) for ys in (trained, predicted, recorded)]
        assert 0.3 < zeros[0] < 0.7 and zeros[1:] == [0, 0]
