"""Parameter updates as compiled loops: the bits of MXNet's operators, and MXNet's own way where that is not sure."""

import threading

import numpy as np
import pytest
from update_check import ORIGINALS, arrays_for, drawn, never, ours, same, sparse_like

import gluon_dynbatch as gdb
from cavs_core import updates
from cavs_core.mxnet_compat import MXNetError, autograd, mx

nd = mx.nd
OWN = {"sgd_update": {}, "sgd_mom_update": {"momentum": 0.9}, "multi_sgd_update": {},
       "multi_sgd_mom_update": {"momentum": 0.9}, "adam_update": {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}}
SINGLE = ["sgd_update", "sgd_mom_update", "adam_update"]


# ---- values ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wd", [0.0, 0.013])
@pytest.mark.parametrize("clip", [None, 0.07])
@pytest.mark.parametrize("name", list(OWN))
def test_steps_have_the_bits_of_mxnet(name, clip, wd, dtype):
    operator, shapes = updates._OPERATORS[name], [(37, 11), (5,), (3, 4, 5)]
    attrs = {"rescale_grad": 0.3, **OWN[name], **({} if clip is None else {"clip_gradient": clip})}
    for group in ([shapes] if operator.many else [[shape] for shape in shapes]):
        twins = []
        for function in (never(name), ORIGINALS[name]):
            arrays = [x for k, shape in enumerate(group) for x in arrays_for(name, shape, dtype, seed=k)]
            for step in range(3):
                if operator.many:
                    weights = arrays[::operator.arity]
                    numbers = dict(lrs=[0.1 / (step + k + 1) for k in range(3)], wds=[wd, 0.5 * wd, 0.0])
                    result = function(*arrays, out=weights, num_weights=3, **numbers, **attrs)
                    assert result is weights
                else:
                    result = function(*arrays, out=arrays[0], lr=0.1 / (step + 1), wd=wd, **attrs)
                    assert result is arrays[0]
            twins.append(arrays)
        same(*twins)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("clip", [None, 0.07])
@pytest.mark.parametrize("rows", [[], [0], [1, 4, 30, 36]], ids=len)
@pytest.mark.parametrize("name", SINGLE)
def test_rows_of_a_sparse_gradient(name, rows, clip, dtype):
    attrs = {"wd": 0.01, "rescale_grad": 0.3, **OWN[name], **({} if clip is None else {"clip_gradient": clip})}
    twins = []
    for function in (never(name), ORIGINALS[name]):
        arrays = arrays_for(name, (37, 3, 5), dtype)
        arrays[1] = sparse_like(arrays[1], rows)
        for _ in range(3):
            function(*arrays, out=arrays[0], lr=0.1, lazy_update=True, **attrs)
        twins.append(arrays[:1] + arrays[2:])
    same(*twins)
    touched = (twins[0][0].asnumpy() != drawn((37, 3, 5), dtype).asnumpy()).any(axis=(1, 2))
    assert np.flatnonzero(touched).tolist() == rows


def test_nan_and_infinity_go_where_mxnet_lets_them():
    twins = []
    for function in (never("sgd_update"), ORIGINALS["sgd_update"]):
        for clip in (-1.0, 0.5):
            weight, grad = nd.ones((4,)), nd.array([np.nan, np.inf, -np.inf, 1.0])
            function(weight, grad, out=weight, lr=0.1, clip_gradient=clip)
            twins.append(weight)
    same(twins[:2], twins[2:])


def test_a_learning_rate_with_an_exponent_is_the_same_up_to_rounding():
    for lr in 10 ** np.random.RandomState(0).uniform(-7, 0, 50):
        weights = [nd.zeros((1,)), nd.zeros((1,))]
        for function, weight in zip((never("sgd_update"), ORIGINALS["sgd_update"]), weights):
            function(weight, nd.ones((1,)), out=weight, lr=float(lr))
        np.testing.assert_allclose(*[x.asnumpy() for x in weights], rtol=3e-7)


def test_a_part_of_an_array_is_updated_where_it_stands():
    whole, grad = nd.ones((4, 3)), nd.ones((2, 3))
    part = whole[1:3]
    never("sgd_update")(part, grad, out=part, lr=0.5)
    assert whole.asnumpy()[:, 0].tolist() == [1.0, 0.5, 0.5, 1.0]


# ---- stepping aside --------------------------------------------------------------------------------------------------

def as_float16(arrays):
    return [x.astype("float16") for x in arrays]


def sparse_weight(arrays):
    return [x.tostype("row_sparse") for x in arrays]


def one_memory(arrays):
    whole = nd.concat(arrays[0], arrays[1], dim=0)
    return [whole[:5], whole[5:], *arrays[2:]]


def in_shared_memory(arrays):
    return [x.as_in_context(mx.Context("cpu_shared", 0)) for x in arrays]


@pytest.mark.parametrize("change", [as_float16, sparse_weight, one_memory, in_shared_memory])
@pytest.mark.parametrize("name", SINGLE)
def test_other_arrays_are_handed_to_mxnet(name, change):
    twins, aside = [], []
    for function in (ours(name, aside), ORIGINALS[name]):
        arrays = change(arrays_for(name, (5, 3)))
        function(*arrays, out=arrays[0], lr=0.1, **OWN[name])
        twins.append(arrays)
    same(*twins)
    assert aside == [name]


@pytest.mark.parametrize("attrs", [{"lr": "0.5"}, {"lr": 0.5, "name": "step"}], ids=str)
def test_attributes_that_no_optimizer_writes(attrs):
    aside, weights = [], []
    for function in (ours("sgd_update", aside), ORIGINALS["sgd_update"]):
        weights.append(nd.ones((3,)))
        function(weights[-1], nd.ones((3,)), out=weights[-1], **attrs)
    same(weights[:1], weights[1:])
    assert aside


def test_a_result_that_is_not_the_weight():
    aside, weight, grad, out = [], nd.ones((3,)), nd.ones((3,)), nd.zeros((3,))
    ours("sgd_update", aside)(weight, grad, out=out, lr=0.5)
    made = ours("sgd_update", aside)(weight, grad, lr=0.5)
    assert weight.asnumpy().tolist() == [1.0] * 3 and len(aside) == 2
    assert out.asnumpy().tolist() == made.asnumpy().tolist() == [0.5] * 3


def test_a_sparse_gradient_for_all_rows():
    """Without lazy updates the decay reaches rows that have no gradient."""
    aside, weights = [], []
    for function in (ours("sgd_update", aside), ORIGINALS["sgd_update"]):
        weight, grad = drawn((6, 2)), sparse_like(drawn((6, 2)), [1, 3])
        function(weight, grad, out=weight, lr=0.1, wd=0.5, lazy_update=False)
        weights.append(weight)
    same(weights[:1], weights[1:])
    assert aside


@pytest.mark.parametrize("shape, dtype", [((4,), "float32"), ((3,), "float64")])
def test_an_error_of_mxnet_passes_through(shape, dtype):
    weight, grad = nd.ones((3,)), nd.ones(shape, dtype=dtype)
    with pytest.raises(MXNetError, match="Incompatible attr"):
        ours("sgd_update")(weight, grad, out=weight, lr=0.1)


def test_what_failed_before_is_raised():
    """An array that was never made is no gradient."""
    grad = nd.random.normal(0, -1, shape=(3,))          # (fails on the engine's thread)
    weight = nd.ones((3,))
    with pytest.raises(MXNetError):
        ours("sgd_update")(weight, grad, out=weight, lr=0.1)
    assert weight.asnumpy().tolist() == [1.0] * 3


def test_recording_is_left_to_mxnet():
    aside, weight = [], nd.ones((3,))
    with autograd.record():
        ours("sgd_update", aside)(weight, nd.ones((3,)), out=weight, lr=0.5)
    assert aside and weight.asnumpy().tolist() == [0.5] * 3


def test_a_step_inside_a_scope_comes_behind_the_calls_before_it():
    """Calls that are only recorded read the weight as it was."""
    weight, grad = nd.ones((1, 3)), nd.ones((1, 3))
    with gdb.batching():
        before = [nd.broadcast_mul(nd.array([[k]]), weight) for k in range(3)]
        mx.optimizer.optimizer.sgd_update(weight, grad, out=weight, lr=0.5)
        after = [nd.broadcast_mul(nd.array([[k]]), weight) for k in range(3)]
    assert [x.asnumpy()[0, 0] for x in before + after] == [0.0, 1.0, 2.0, 0.0, 0.5, 1.0]


# ---- the engine ------------------------------------------------------------------------------------------------------

def slow(x, times=30):
    """The same numbers, much later."""
    unit = nd.eye(x.shape[1])
    for _ in range(times):
        x = nd.dot(x, unit)
    return x


def test_who_reads_the_weight_before_the_update_gets_the_old_one():
    weight, grad, busy = nd.ones((400, 400)), nd.ones((400, 400)), nd.ones((400, 400))
    nd.waitall()
    late = slow(busy)
    read = nd.where(late, weight, late)                 # waits for `late`, and then reads the weight
    never("sgd_update")(weight, grad, out=weight, lr=0.5)
    again = weight * 2
    assert (read.asnumpy() == 1).all() and (weight.asnumpy() == 0.5).all() and (again.asnumpy() == 1).all()


def test_a_gradient_that_is_still_being_made():
    weight, grad = nd.ones((400, 400)), nd.zeros((400, 400))
    nd.waitall()
    slow(nd.ones((400, 400))).copyto(grad)
    never("sgd_update")(weight, grad, out=weight, lr=0.5)
    grad[:] = 7                                         # not before the update has read it
    assert (weight.asnumpy() == 0.5).all() and (grad.asnumpy() == 7).all()


def test_arrays_may_die_before_the_engine_comes_to_them():
    held = nd.ones((300, 300))
    for _ in range(50):
        busy = slow(held, 2)
        weight, grad = nd.ones((300, 300)), sparse_like(nd.ones((300, 300)), [1, 2])
        read = nd.where(busy, weight, busy)
        never("sgd_update")(weight, grad, out=weight, lr=0.5)
        del weight, grad
    nd.waitall()
    assert (read.asnumpy() == 1).all()


def test_a_graph_that_is_kept_reads_what_mxnet_lets_it_read():
    grads = []
    for function in (never("sgd_update"), ORIGINALS["sgd_update"]):
        weight, x = nd.array([2.0, 3.0]), nd.array([5.0, 7.0])
        for a in (weight, x):
            a.attach_grad()
        with autograd.record():
            y = nd.tanh(weight * x * 0.1)
        y.backward(retain_graph=True)
        function(weight, weight.grad, out=weight, lr=0.5)
        y.backward()
        grads.append((weight, weight.grad, x.grad))
    same(*grads)


def test_threads_update_at_once():
    weights, failures = [nd.ones((50, 40)) for _ in range(4)], []

    def work(weight):
        try:
            grad = nd.ones((50, 40))
            for _ in range(200):
                never("sgd_update")(weight, grad, out=weight, lr=0.5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(weights[k % 2],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [float(w.asnumpy().min()) for w in weights] == [-199.0, -199.0, 1.0, 1.0]
    assert [float(w.asnumpy().max()) for w in weights] == [-199.0, -199.0, 1.0, 1.0]
