"""A step of gluon.Trainer as one update: MXNet's weights, states and counts; MXNet's own way where it is not plain."""

import numpy as np
import pytest
from update_check import drawn, same, sparse_like, use_mxnet

import gluon_dynbatch as gdb
from cavs_core import trainer_steps
from cavs_core.backends.native_cpu import update_push
from cavs_core.mxnet_compat import MXNetError, autograd, gluon, mx

nd = mx.nd
SHAPES = [(9, 4), (5, 3), (5,), (2, 3, 4), (7,), (1, 1)]


def parameters(shapes=SHAPES, dtypes=("float32",), sparse=(0,), **options):
    made = []
    for k, shape in enumerate(shapes):
        p = gluon.Parameter(f"p{k}_{'weight' if k % 2 else 'bias'}", shape=shape, dtype=dtypes[k % len(dtypes)],
                            grad_stype="row_sparse" if k in sparse else "default", **options)
        p.initialize()
        p.set_data(drawn(shape, p.dtype, seed=k))
        made.append(p)
    return made


def bring_gradients(params, step, without=()):
    """What a backward pass leaves behind."""
    for k, p in enumerate(params):
        if p.grad_req == "null" or k in without:
            continue
        grad = drawn(p.shape, p.dtype, seed=100 * step + k)
        if p._grad_stype == "default":
            p.grad()[:] = grad
        else:
            sparse_like(grad, sorted({step % p.shape[0], 1})).copyto(p.grad())
        p.data()._fresh_grad = True


@pytest.fixture
def pushes(monkeypatch):
    """How many parameters each step updated at once."""
    found, push = [], update_push.Updates.push

    def spy(self, rules, numbers, name):
        if name is trainer_steps._LABEL:
            found.append(len(self))
        return push(self, rules, numbers, name)

    monkeypatch.setattr(update_push.Updates, "push", spy)
    return found


def both_ways(monkeypatch, train):
    """What `train()` gives, a trainer and its parameters, here and with MXNet alone: they must not differ."""
    trainer, params = train()
    use_mxnet(monkeypatch)
    stock_trainer, stock_params = train()
    same([p.data() for p in params], [p.data() for p in stock_params])
    for ours, stock in zip(trainer._updaters, stock_trainer._updaters):
        a, b = ours.optimizer, stock.optimizer
        assert (a.num_update, a._all_index_update_counts) == (b.num_update, b._all_index_update_counts)
        assert ours.states.keys() == stock.states.keys() and ours.states_synced == stock.states_synced
        for key, state in ours.states.items():
            same(_flat(state), _flat(stock.states[key]))
    fresh = [[p.data()._fresh_grad for p in ps if p.grad_req != "null"] for ps in (params, stock_params)]
    assert fresh[0] == fresh[1]
    return trainer


def _flat(state):
    return [] if state is None else [state] if isinstance(state, nd.NDArray) else list(state)


OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "clip": ("sgd", {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.3}),
    "counted": ("sgd", {"learning_rate": 0.1, "begin_num_update": 7, "rescale_grad": 0.5}),
    "adam": ("adam", {"learning_rate": 0.25, "wd": 0.01, "clip_gradient": 0.3}),
    "mixed": ("sgd", {"learning_rate": 0.1, "multi_precision": True}),
}


@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("float32", "float64", "float64")], ids=len)
@pytest.mark.parametrize("sparse", [(), (0,), (0, 3)], ids=len)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_all_parameters_are_one_update(name, sparse, dtypes, monkeypatch, pushes):
    def train():
        params = parameters(dtypes=dtypes, sparse=sparse)
        params[1].lr_mult, params[2].wd_mult, params[4].lr_mult = 0.5, 2.0, 0.0
        kind, options = OPTIMIZERS[name]
        trainer = gluon.Trainer(params, kind, dict(options))
        for step in range(4):
            bring_gradients(params, step)
            trainer.step(3)
        return trainer, params

    both_ways(monkeypatch, train)
    assert pushes == [len(SHAPES)] * 3          # (the first step makes the states)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_schedules_see_the_same_counts(kind, monkeypatch, pushes):
    """Parameters that some steps leave out have lower counts; a schedule is asked in between."""
    asked = []

    class Schedule(mx.lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            asked[-1].append(num_update)
            return 0.1 / num_update

    def train():
        asked.append([])
        params = parameters()
        trainer = gluon.Trainer(params, kind, {"lr_scheduler": Schedule()})
        for step, without in enumerate([(), (0, 1, 2, 3), (0, 1, 2, 3, 4), (5,), (), tuple(range(6))]):
            bring_gradients(params, step, without)
            trainer.step(1, ignore_stale_grad=True)
        return trainer, params

    both_ways(monkeypatch, train)
    assert asked[0] == asked[1] and pushes == [2, 1, 5, 6]


def test_more_parameters_than_one_push_takes(monkeypatch, pushes):
    def train():
        params = parameters([(3, 2), (4,)] * 20, sparse=(0, 17))
        trainer = gluon.Trainer(params, "adam")
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(1)
        return trainer, params

    both_ways(monkeypatch, train)
    assert pushes == [40, 40]


def test_large_parameters_are_left_to_a_thread_of_the_engine():
    assert update_push._FEW_ELEMENTS < 700 * 900
    params = parameters([(700, 900), (3,)], sparse=())
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1.0})
    for step in range(3):
        before = [p.data().copy() for p in params]
        bring_gradients(params, step)
        trainer.step(1)
        for p, old in zip(params, before):
            np.testing.assert_allclose(p.data().asnumpy(), (old - p.grad()).asnumpy(), rtol=1e-6)


def test_learning_rates_and_multipliers_may_change(monkeypatch, pushes):
    def train():
        params = parameters()
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.5, "momentum": 0.5})
        for step in range(5):
            bring_gradients(params, step)
            trainer.set_learning_rate(0.5 / (step + 1))
            params[step].lr_mult = 0.25
            trainer.optimizer.wd = 0.125 * step
            trainer.step(step + 1)
        return trainer, params

    both_ways(monkeypatch, train)
    assert len(pushes) == 4


@pytest.mark.parametrize("kind, options", [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_states_are_saved_and_loaded(kind, options, monkeypatch, pushes, tmp_path):
    def train():
        params = parameters()
        for step in range(4):
            if step % 2 == 0:
                trainer = gluon.Trainer(params, kind, dict(options))
                if step:
                    trainer.load_states(str(tmp_path / "states"))
            bring_gradients(params, step)
            trainer.step(1)
            trainer.save_states(str(tmp_path / "states"))
        return trainer, params

    both_ways(monkeypatch, train)
    assert len(pushes) == 2


def test_frozen_parameters_and_those_that_are_made_anew(monkeypatch, pushes):
    def train():
        params = parameters()
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for step in range(6):
            params[1].grad_req = "null" if step in (1, 2) else "write"
            params[2].grad_req = "add" if step == 4 else "write"
            if step == 3:
                params[3].initialize(mx.init.One(), force_reinit=True)
            bring_gradients(params, step)
            trainer.step(1)
        return trainer, params

    both_ways(monkeypatch, train)
    assert pushes == [5, 5, 6, 6, 6]


def test_two_trainers(monkeypatch, pushes):
    def train():
        params = parameters()
        trainers = [gluon.Trainer(params[:3], "adam"), gluon.Trainer(params[3:], "sgd")]
        for step in range(3):
            bring_gradients(params, step)
            for trainer in trainers:
                trainer.step(1)
        return trainers[step % 2], params

    both_ways(monkeypatch, train)
    assert pushes == [3, 3] * 2


def test_update_behind_allreduce_grads(monkeypatch, pushes):
    def train():
        params = parameters()
        trainer = gluon.Trainer(params, "sgd")
        for step in range(3):
            bring_gradients(params, step)
            trainer.allreduce_grads()
            trainer.update(2)
        return trainer, params

    both_ways(monkeypatch, train)
    assert len(pushes) == 2


def test_stale_gradients_are_told_as_by_mxnet(monkeypatch):
    def train():
        params = parameters()
        trainer = gluon.Trainer(params, "sgd")
        for step in range(2):
            bring_gradients(params, step)
            trainer.step(1)
        bring_gradients(params, 2, without=(3,))
        with pytest.raises(UserWarning, match="Gradient of Parameter `p3_weight` on context cpu"):
            trainer.step(1)
        return trainer, params

    both_ways(monkeypatch, train)


def test_a_gradient_that_failed_is_raised(pushes):
    params = parameters([(3,), (3,)], sparse=())
    trainer = gluon.Trainer(params, "sgd")
    bring_gradients(params, 0)
    trainer.step(1)
    before = params[0].data().asnumpy()
    bring_gradients(params, 1)
    nd.random.normal(0, -1, shape=(3,), out=params[1].grad())      # (fails on the engine's thread)
    with pytest.raises(MXNetError):
        trainer.step(1)
    assert (params[0].data().asnumpy() == before).all()


# ---- what is left to MXNet -------------------------------------------------------------------------------------------

class Halved(mx.optimizer.SGD):
    def update_multi_precision(self, index, weight, grad, state):
        super().update_multi_precision(index, weight, [0.5 * g for g in grad], state)


def with_its_own_method():
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    get = optimizer._get_lrs
    optimizer._get_lrs = lambda indices: [0.5 * lr for lr in get(indices)]
    return optimizer


def with_a_text():
    return mx.optimizer.Adam(epsilon="0.125")


def without_groups():
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    optimizer.aggregate_num = 0
    return optimizer


ASIDE = {
    "child": (lambda: Halved(learning_rate=0.1), {}), "method": (with_its_own_method, {}),
    "text": (with_a_text, {}), "other": (lambda: mx.optimizer.RMSProp(), {}),
    "all rows": (lambda: mx.optimizer.SGD(wd=0.1, lazy_update=False), {}),
    "negative momentum": (lambda: mx.optimizer.SGD(momentum=-0.5), {"sparse": ()}),
    "float16": (lambda: mx.optimizer.SGD(multi_precision=True), {"dtypes": ("float16", "float32"), "sparse": ()}),
}


@pytest.mark.parametrize("name", list(ASIDE))
def test_other_optimizers(name, monkeypatch, pushes):
    make, options = ASIDE[name]

    def train():
        params = parameters(**options)
        trainer = gluon.Trainer(params, make())
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(2)
        return trainer, params

    if name == "float16":
        trainer, params = train()               # (its states are nested)
        ours = [p.data() for p in params]
        use_mxnet(monkeypatch)
        same(ours, [p.data() for p in train()[1]])
    else:
        both_ways(monkeypatch, train)
    assert not pushes


def test_an_optimizer_that_makes_no_groups(monkeypatch, pushes):
    def train():
        params = parameters()
        trainer = gluon.Trainer(params, without_groups())
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(2)
        return trainer, params

    both_ways(monkeypatch, train)
    assert len(pushes) == 2


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_a_kvstore(update_on_kvstore, monkeypatch, pushes):
    def train():
        params = parameters(sparse=())
        trainer = gluon.Trainer(params, "sgd", kvstore=mx.kv.create("local"), update_on_kvstore=update_on_kvstore)
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(2)
        return trainer, params

    weights = [p.data().asnumpy() for p in train()[1]]
    use_mxnet(monkeypatch)
    for got, want in zip(weights, train()[1]):
        np.testing.assert_array_equal(got, want.data().asnumpy())
    assert not pushes


def test_a_trainer_of_ones_own(pushes):
    """Somebody's own `_update` is called; one that only reduces gradients in another way is updated at once."""
    called = []

    class Own(gluon.Trainer):
        def _update(self, ignore_stale_grad=False):
            called.append("update")
            super()._update(ignore_stale_grad)

    class Reducing(gluon.Trainer):
        def _allreduce_grads(self):
            called.append("reduce")

    for kind in (Own, Reducing):
        params = parameters()
        trainer = kind(params, "sgd")
        for step in range(2):
            bring_gradients(params, step)
            trainer.step(1)
    assert called == ["update"] * 2 + ["reduce"] * 2 and len(pushes) == 2


def test_one_parameter_twice(monkeypatch, pushes):
    def train():
        params = parameters()
        trainer = gluon.Trainer([*params, params[1]], "sgd")
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(1, ignore_stale_grad=True)
        return trainer, params

    both_ways(monkeypatch, train)


def test_operators_that_somebody_replaced(monkeypatch, pushes):
    module, called = mx.optimizer.optimizer, []
    original = module.multi_sgd_update
    monkeypatch.setattr(module, "multi_sgd_update", lambda *args, **attrs: called.append(1) or original(*args, **attrs))
    params = parameters(sparse=())
    trainer = gluon.Trainer(params, "sgd")
    for step in range(2):
        bring_gradients(params, step)
        trainer.step(1)
    assert len(called) == 4 and not pushes


def test_steps_while_recording_and_inside_a_scope(pushes):
    params = parameters([(1, 3)], sparse=())
    params[0].set_data(nd.ones((1, 3)))
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1.0})
    for _ in range(2):                          # the first makes the state
        params[0].grad()[:] = 0
        params[0].data()._fresh_grad = True
        trainer.step(1)
    del pushes[:]
    params[0].grad()[:] = 0.25
    with gdb.batching():
        before = [nd.broadcast_mul(nd.array([[k]]), params[0].data()) for k in range(3)]
        params[0].data()._fresh_grad = True
        trainer.step(1)
        after = [nd.broadcast_mul(nd.array([[k]]), params[0].data()) for k in range(3)]
    with autograd.record(), pytest.raises(MXNetError, match="already in a computational graph"):
        params[0].data()._fresh_grad = True
        trainer.step(1)
    assert [x.asnumpy()[0, 0] for x in before + after] == [0.0, 1.0, 2.0, 0.0, 0.75, 1.5]
    assert not pushes


def test_the_memory_of_sparse_gradients_may_be_unknown(monkeypatch):
    """Where MXNet keeps the numbers of rows is looked for; without it they are copied by MXNet."""
    functions = update_push._functions()
    monkeypatch.setattr(update_push, "_functions", lambda: (*functions[:-1], False))

    def train():
        params = parameters(sparse=(0, 3))
        trainer = gluon.Trainer(params, "adam")
        for step in range(3):
            bring_gradients(params, step)
            trainer.step(2)
        return trainer, params

    both_ways(monkeypatch, train)
