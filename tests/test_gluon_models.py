"""Gluon models as people write them, inside a scope: the plain loop over the samples is the oracle."""

import gluon_models
import gluon_sequences
import numpy as np
import pytest
from gluon_check import assert_same, check_same_as_loop, count_operators, make_net, train

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

MODELS = {**gluon_models.MODELS, **gluon_sequences.MODELS}
FALLBACKS = {                   # model -> the operator that runs alone, and how often in the first step
    "batch norm": ("BatchNorm", 4), "batch norm, hybridized": ("BatchNorm", 4), "fused layers": ("RNN", 8),
}


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_training_same_as_loop(name, dtype, optimiser):
    """Outputs, losses and gradients of the first step, and all parameters and running statistics after three."""
    stats = check_same_as_loop(MODELS[name], dtype, optimiser)
    operator, count = FALLBACKS.get(name, (None, 0))
    alone = {reason: n for reason, n in stats.fallbacks.items() if f"operator {operator} is" in reason}
    assert sum(alone.values()) == count
    if name not in FALLBACKS and name != "batch norm, predicting":
        assert stats.fallbacks == {}
        assert stats.flushes == 1


@pytest.mark.parametrize("name", MODELS)
def test_inference_same_as_loop(name):
    case = MODELS[name]
    samples = case.samples(np.random.RandomState(2), "float32")
    net = make_net(case)
    want = [case.loss(net, *sample) for sample in samples]
    with gdb.batching() as scope:
        got = [case.loss(net, *sample) for sample in samples]
    for k, ((outputs, loss), (wanted_outputs, wanted_loss)) in enumerate(zip(got, want)):
        for x, y in zip([*outputs, loss], [*wanted_outputs, wanted_loss]):
            assert x.shape == y.shape
            np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), rtol=1e-4, atol=1e-5, err_msg=f"sample {k}")
    assert scope.stats.backward_ops == 0


@pytest.mark.parametrize("name", ["similarity tree", "tagger, hybridized", "vectors"])
def test_a_second_run_and_a_batch_of_one(name):
    """What the first run left behind (plans, signatures, initialised parameters) serves other samples too."""
    case = MODELS[name]
    net, plain = make_net(case), make_net(case)
    for seed, count in ((4, 1), (5, 1), (6, 3), (5, 2)):
        samples = case.samples(np.random.RandomState(seed), "float32")[:count]
        got, _ = train(case, samples, "float32", steps=1, net=net)
        want, _ = train(case, samples, "float32", steps=1, batched=False, net=plain)
        if seed == 4:                   # both have drawn their deferred parameters by now
            for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
                q.set_data(p.data())
        else:
            assert_same(got, want)


# ---- the checker -----------------------------------------------------------------------------


def test_checker_rejects_a_wrong_gradient(monkeypatch):
    from cavs_core.ops import TABLE
    right = TABLE["tanh"].slope
    monkeypatch.setattr(TABLE["tanh"], "slope", lambda b, x, y: b.scale(right(b, x, y), 1.01))
    with pytest.raises(AssertionError, match="grad of"):        # new cells: nothing of theirs was planned before
        check_same_as_loop(MODELS["binary tree, marked cells"])


def test_checker_rejects_a_wrong_value():
    case = MODELS["vectors"]
    calls = []

    def drifting(net, xs, target):
        calls.append(None)
        return case.loss(net, xs, target + len(calls) * 1e-2)

    with pytest.raises(AssertionError, match="loss of sample 0"):
        check_same_as_loop(case._replace(loss=drifting))


# ---- dropout ---------------------------------------------------------------------------------


def test_dropout_draws_a_mask_for_every_sample_and_its_gradient_uses_it():
    for hybridize in (False, True):
        net = gluon.nn.Dropout(0.3)
        net.hybridize(hybridize)
        xs = [mx.nd.ones((1, 400)) for _ in range(5)]
        for x in xs:
            x.attach_grad()
        with autograd.record(), gdb.batching() as scope:
            ys = [net(x * 2) for x in xs]
        autograd.backward(ys)
        masks = np.array([y.asnumpy()[0] for y in ys])
        assert scope.stats.fallbacks == {}
        assert len({mask.tobytes() for mask in masks}) == 5
        assert abs((masks == 0).mean() - 0.3) < 0.05
        np.testing.assert_allclose(masks[masks != 0], 2 / 0.7, rtol=1e-5)
        np.testing.assert_allclose([x.grad.asnumpy()[0] for x in xs], masks, rtol=1e-5)


def test_dropout_keeps_the_mean_of_a_model():
    """Averaged over many masks, a layer under dropout gives what it gives without."""
    case = gluon_sequences.MODELS["batch norm"]._replace(net=lambda: gluon_sequences.NormNet(0.5))
    net = make_net(case)
    words = mx.nd.ones((2, 4))
    with autograd.predict_mode():
        net(words)
    with autograd.train_mode(), gdb.batching():
        dropped = [net.drop(net.enter(words)) for _ in range(600)]
        kept = net.enter(words)
    mean = np.mean([y.asnumpy() for y in dropped], axis=0)
    np.testing.assert_allclose(mean, kept.asnumpy(), atol=0.15 * np.abs(kept.asnumpy()).max())


def test_dropout_repeats_with_the_seed_and_is_off_in_predict_mode():
    net, x = gluon.nn.Dropout(0.5), mx.nd.ones((1, 30))

    def draw():
        mx.random.seed(5)
        with autograd.record(), gdb.batching():
            dropped = [net(x) for _ in range(3)]
            with autograd.predict_mode():
                kept = net(x)
        assert (kept.asnumpy() == 1).all()
        return np.array([y.asnumpy() for y in dropped])

    np.testing.assert_array_equal(draw(), draw())


# ---- launches --------------------------------------------------------------------------------


def pairs_loss(net, pairs):
    with autograd.record():
        return [gluon_models.similarity_loss(net, *pair)[1] for pair in pairs]


@pytest.mark.parametrize("cell, times", [(gluon_models.ChildSumLSTM, 20), (gluon_models.VertexChildSumLSTM, 40)])
def test_25_pairs_of_trees_need_far_fewer_operators(cell, times):
    """An unmodified Tree-LSTM on 25 pairs of sentences of about ten words; and with its node marked."""
    net = gluon_models.SimilarityTreeLSTM(cell)
    net.initialize()
    pairs = gluon_models.random_pairs(25, np.random.RandomState(0), words=(8, 13))
    pairs_loss(net, pairs[:1])                      # deferred initialisation
    started = count_operators(lambda: pairs_loss(net, pairs))
    with gdb.batching() as scope:
        losses = pairs_loss(net, pairs)
    autograd.backward(losses)
    assert started > 10_000
    assert scope.stats.ops * times <= started, f"{scope.stats.ops} operators instead of {started}"
    assert 0 < scope.stats.backward_ops < started / times * 1.5


def test_more_samples_of_the_same_shape_need_no_more_operators():
    net = gluon_models.SimilarityTreeLSTM()
    net.initialize()
    pair = gluon_models.random_pairs(1, np.random.RandomState(0), words=(6, 7))
    counts = set()
    for samples in (2, 8, 16):
        with gdb.batching(drop_repeats=False) as scope:         # (the samples are all the same)
            losses = pairs_loss(net, pair * samples)
        autograd.backward(losses)
        counts.add((scope.stats.launches, scope.stats.ops, scope.stats.backward_ops))
    assert len(counts) == 1


def test_a_marked_cell_is_one_call_a_node_and_one_launch_a_level():
    net = gluon_models.BinaryTreeLSTM()
    net.initialize()

    def balanced(depth):
        return (0, 1) if depth == 0 else (0, balanced(depth - 1), balanced(depth - 1))

    launches = {}
    for depth in (2, 3, 4):
        with autograd.record(), gdb.batching() as scope:
            losses = [gluon_models.node_losses(net, balanced(depth))[1] for _ in range(4)]
        autograd.backward(losses)
        launches[depth] = scope.stats.launches
    # A level more is one more launch of the cell, one more of every operator of the scores and losses of its nodes, and
    # now and then one of the sum of all losses, which is made of sums of eight.
    assert launches[3] - launches[2] <= 8 and launches[4] - launches[3] <= 8
