"""What tracing takes, what it refuses, and that it leaves nothing behind. Gluon's blocks: test_trace_blocks.py."""

import threading

import numpy as np
import pytest
from block_check import check_block
from op_check import ROWS, check_op

from cavs_core.autodiff import differentiate
from cavs_core.errors import ProgramError, TraceError, UnsupportedOpError
from cavs_core.lazy import LazyArray, listening
from cavs_core.mxnet_compat import autograd, gluon, mx
from cavs_core.program import ROW, SHARED, Arg, Const, OutputGrad, Param, Spec
from cavs_core.trace import trace

nn = gluon.nn
X = Spec((2, 3), "float32")


def ops(program):
    return [i.op for i in program.instrs]


# ---- what goes in and comes out --------------------------------------------------------------


def test_a_function_becomes_a_program():
    program = trace(lambda F, x, y: [F.tanh(x) + y, x], X, Spec((2, 3), "float32", SHARED), name="two")
    assert program.name == "two" and ops(program) == ["tanh", "broadcast_add"]
    assert list(program.inputs.values()) == [Arg(0), Arg(1)]
    assert [program.specs[v].kind for v in program.inputs] == [ROW, SHARED]
    assert program.outputs == [3, 0]
    assert "%3 = broadcast_add(%2, %1): row float32[2, 3]" in str(program)


def test_lists_and_none_are_passed_on():
    def fn(F, x, pair, nothing, deep):
        assert nothing is None and isinstance(pair, list) and isinstance(deep, tuple) and deep[1] is None
        return [x + pair[0], (pair[1] * deep[0][0],), None]
    program = trace(fn, X, [X, X], None, ([X], None))
    assert list(program.inputs.values()) == [Arg(0), Arg(1), Arg(2), Arg(3)]
    assert [i.inputs for i in program.instrs] == [(0, 1), (2, 3)] and len(program.outputs) == 2


def test_of_arrays_only_shape_and_dtype_are_read():
    with mx.cpu(1):
        x = mx.nd.ones((2, 3), dtype="float64")
    seen = []
    program = trace(lambda F, x: seen.append((x.shape, x.dtype, x.context)) or x * 2, x)
    assert seen == [((2, 3), np.float64, mx.cpu(1))]
    assert program.specs[0] == Spec((2, 3), "float64")


def test_an_argument_that_is_not_an_array():
    with pytest.raises(TraceError, match="argument 3 is neither an array nor a Spec"):
        trace(lambda F, x, n: x * n, X, 3, name="scaled")


@pytest.mark.parametrize("fn", [lambda F, x: None, lambda F, x: 3.0, lambda F, x: [x, "y"], lambda F, x: []])
def test_a_result_that_is_not_an_array(fn):
    with pytest.raises(TraceError, match="returns arrays"):
        trace(fn, X)


def test_outside_arrays_are_constants_held_by_reference():
    outside = mx.nd.array([1.0, 2.0, 3.0])
    program = trace(lambda F, x: x * outside.reshape((1, 3)) + F.zeros((2, 3)) + outside.expand_dims(0), X)
    constants = [program.inputs[v].array for v in program.inputs_of(Const)]
    assert len(constants) == 3 and not any(isinstance(c, LazyArray) for c in constants)
    check_op(lambda F, x: F.broadcast_add(x, outside.reshape((1, 3))), np.random.randn(ROWS, 2, 3).astype("float32"))
    assert trace(lambda F, x: [x, outside], X).outputs == [0, 1]


def test_an_array_that_the_code_makes_may_be_written_before_it_is_read():
    def fn(F, x):
        with autograd.pause():
            mask = F.ones((2, 3))
            mask[0] = 2
            mask += 1
        return x * mask
    check_op(fn, np.random.randn(ROWS, 2, 3).astype("float32"))


def test_parameters_are_fetched_again_at_every_run():
    dense = nn.Dense(2, in_units=3)
    dense.initialize()
    program = trace(dense, X)
    sources = [program.inputs[v] for v in program.inputs_of(Param)]
    dense.weight.set_data(mx.nd.ones((2, 3)))
    assert [s.name for s in sources] == [dense.weight.name, dense.bias.name]
    assert sources[0].parameter.data().asnumpy().sum() == 6
    dense.cast("float64")
    assert sources[0].parameter.data().dtype == np.float64


def test_slices_and_reshapes_of_a_parameter_keep_its_gradient():
    block = gluon.Block()
    block.weight = block.params.get("weight", shape=(4, 3), init="normal")
    block.initialize()
    program = check_block(block, np.random.randn(ROWS, 2, 3).astype("float32"),
                          call=lambda F, x: x * block.weight.data()[1] + block.weight.data().reshape((2, 2, 3))[0])
    assert len(program.inputs_of(Param)) == 1 and not program.inputs_of(Const)


def test_methods_that_mxnet_writes_without_operators():
    x = np.random.randn(ROWS, 2, 3).astype("float32")
    check_op(lambda F, x: x.astype("float64"), x, grad=False)
    for fn in (lambda F, x: x.copy() * 2, lambda F, x: x.as_in_context(x.context) * 2, lambda F, x: -x.detach() * x,
               lambda F, x: x.astype("float32", copy=False) * 2, lambda F, x: abs(x) + x.T.T):
        check_op(fn, x)


def test_the_training_flag_is_seen():
    seen = []
    for mode in (autograd.train_mode, autograd.predict_mode):
        with mode():
            trace(lambda F, x: seen.append(autograd.is_training()) or x * 2, X)
    assert seen == [True, False] and not autograd.is_recording() and not autograd.is_training()


def test_deferred_initialisation_is_no_part_of_the_program():
    dense = nn.Dense(2)
    dense.initialize(mx.init.Xavier())
    assert ops(trace(dense, X)) == ["matmul", "Reshape", "broadcast_add"]
    assert dense.weight.data().shape == (2, 3) and type(dense.weight.data()) is mx.nd.NDArray


def test_a_long_chain():
    """No recursion: a chain is as long as memory allows."""
    def fn(F, x):
        y = x
        for _ in range(3000):
            y = y + x
        return y
    program = trace(fn, X)
    assert len(program.instrs) == 3000
    assert len(differentiate(program, [0], [OutputGrad(0)]).program.instrs) == 3000


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [
    lambda F, x: x.asnumpy(), lambda F, x: x.sum().asscalar(), lambda F, x: x if x.sum() > 0 else -x,
    lambda F, x: float(x.sum()), lambda F, x: int(x.sum()), lambda F, x: np.array(x), lambda F, x: x.wait_to_read(),
    lambda F, x: np.float32(3) * np.asarray(x), lambda F, x: (x + 1).__setitem__(slice(None), 0)])
def test_reading_a_value_tells_the_way_out(fn):
    with pytest.raises(TraceError, match="<lambda>: the code asks for the value.*decision outside, or use F.where"):
        trace(fn, X)


class TopTwo(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.topk(x, k=2)


def test_an_unknown_operator_is_named_with_its_block():
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(3, in_units=3), TopTwo(prefix="best_"))
    net.initialize()
    with pytest.raises(UnsupportedOpError, match="operator `topk` .called by TopTwo best. is not in the op table"):
        trace(net, X)
    convolution = nn.Conv2D(2, 3, in_channels=1, prefix="conv_")
    convolution.initialize()
    with pytest.raises(UnsupportedOpError, match="`Convolution` .called by Conv2D conv."):
        trace(convolution, Spec((1, 1, 5, 5), "float32"))
    with pytest.raises(UnsupportedOpError, match="`sort` .called by my function."):
        trace(lambda F, x: F.sort(x), X, name="my function")


def test_operands_that_do_not_fit_are_shown():
    with pytest.raises(ProgramError, match=r"softmax\(row float32\[2, 3\]; .*: 5.*called by <lambda>.*out of range"):
        trace(lambda F, x: F.softmax(x, axis=5), X)


@pytest.mark.parametrize("use", [
    lambda F, x, w, h: x * w, lambda F, x, w, h: x * h, lambda F, x, w, h: x * w[0], lambda F, x, w, h: x + F.exp(w),
    lambda F, x, w, h: x + w.reshape((1, 2, 3))[0], lambda F, x, w, h: x + F.ones((2, 3)) * h,
    lambda F, x, w, h: [x, h]])
@pytest.mark.parametrize("recording", [True, False])
def test_an_outside_array_that_needs_a_gradient(use, recording):
    """The array itself, a result on the tape, and whatever is computed from them without the placeholders."""
    w = mx.nd.ones((2, 3))
    w.attach_grad()
    with autograd.record():
        h = w * 2
    with autograd.record() if recording else autograd.pause():
        with pytest.raises(TraceError, match="needs a gradient. Make it a Parameter of the block, or pass it as"):
            trace(lambda F, x: use(F, x, w, h), X)


def test_a_detached_outside_array_is_a_constant():
    w = mx.nd.ones((2, 3))
    w.attach_grad()
    assert len(trace(lambda F, x: x * w.detach(), X).inputs_of(Const)) == 1


def test_a_sparse_outside_array():
    sparse = mx.nd.ones((2, 3)).tostype("row_sparse")
    with pytest.raises(TraceError, match="storage 'row_sparse'; only dense"):
        trace(lambda F, x: F.elemwise_add(x, sparse), X)


@pytest.mark.parametrize("fn", [
    lambda F, x: x + F.random.uniform(shape=(2, 3)), lambda F, x: x + mx.nd.random.normal(0, 1, (2, 3)),
    lambda F, x: x + F.random.shuffle(F.ones((2, 3))), lambda F, x: x * F.Dropout(F.ones((2, 3)))])
def test_drawing_without_an_operand(fn):
    with autograd.train_mode(), pytest.raises(TraceError, match="draws numbers without an operand"):
        trace(fn, X)


def test_a_symbol_block():
    x = mx.sym.var("x", dtype="float32")
    block = gluon.SymbolBlock(x * 2, x)
    with pytest.raises(TraceError, match="SymbolBlock: a stored graph"):
        trace(block, X)


# ---- writing in place ------------------------------------------------------------------------


def test_writing_in_place():
    """A name stands for the new value from then on; another name of the same array too."""
    def fn(F, x, y):
        with autograd.pause():              # MXNet cannot record it
            z = x + 1
            same = z
            z += y
            z *= 2
            z -= F.ones((2, 3))
            z /= 4
            F.tanh(z, out=z)
        return z, same + x
    check_op(fn, *np.random.randn(2, ROWS, 2, 3).astype("float32"), grad=False)


@pytest.mark.parametrize("write", [
    lambda z, x, w: z[0].__iadd__(1), lambda z, x, w: z.reshape((3, 2)).__imul__(2), lambda z, x, w: x.__iadd__(1),
    lambda z, x, w: z.detach().__iadd__(1), lambda z, x, w: (z[1:], z.__iadd__(1)),
    lambda z, x, w: w.data().__imul__(0.9)])
def test_writing_into_shared_memory_is_refused(write):
    """A part of an array, an array with a part in use, an argument, a parameter: others would see it change."""
    weight = gluon.Parameter("weight", shape=(2, 3))
    weight.initialize()
    with pytest.raises(TraceError, match="writes in place into an argument, a parameter, or.*x = x . y instead"):
        trace(lambda F, x: write(x * 2, x, weight), X)


def test_writing_into_an_outside_array_is_refused():
    outside = mx.nd.zeros((2, 3))
    with pytest.raises(TraceError, match="writes into an outside array"):
        trace(lambda F, x: F.tanh(x, out=outside), X)
    with pytest.raises(TraceError, match="writes into an outside array that was read before"):
        trace(lambda F, x: (x + outside, outside.__iadd__(1)), X)
    with pytest.raises(ProgramError, match="cannot write shape"):
        trace(lambda F, x: F.sum(x, axis=0, out=x * 2), X)


# ---- nothing is left behind ------------------------------------------------------------------

HOOKED = [(mx.ndarray.register, "_imperative_invoke"), (gluon.Block, "__call__"), (gluon.Parameter, "data"),
          (gluon.Parameter, "_finish_deferred_init"), (gluon.HybridBlock, "_call_cached_op")]
ORIGINALS = [getattr(owner, name) for owner, name in HOOKED]


def assert_untouched():
    assert [getattr(owner, name) for owner, name in HOOKED] == ORIGINALS
    y = mx.nd.ones((2,)) * 3
    assert type(y) is mx.nd.NDArray and y.asnumpy().tolist() == [3, 3]


@pytest.mark.parametrize("fn, error", [
    (lambda F, x: F.topk(x), UnsupportedOpError), (lambda F, x: 1 / 0, ZeroDivisionError), (lambda F: F, TypeError),
    (lambda F, x: x.asnumpy(), TraceError)])
def test_hooks_are_gone_after_an_exception(fn, error):
    with pytest.raises(error):
        trace(fn, X)
    assert_untouched()
    assert not autograd.is_recording() and not autograd.is_training()


class Keeper(nn.HybridBlock):
    """Keeps what it computes in all sorts of places."""

    def __init__(self, then=None, **kwargs):
        super().__init__(**kwargs)
        self.last, self.past, self.named, self.then = "nothing", [1], {"a": 2}, then

    def hybrid_forward(self, F, x):
        self.last, self.fresh = x * 2, (x, [x])
        self.past.append(x)
        self.named["x"] = x
        return self.then(x) if self.then else x


@pytest.mark.parametrize("then, error", [(None, "of Keeper kept keeps an array"), (lambda x: x.asnumpy(), "the value")])
def test_a_block_gets_back_what_it_held(then, error):
    """Also one that is not a child of anything, and when its code raises."""
    keeper = Keeper(then, prefix="kept_")
    past, named = keeper.past, keeper.named
    with pytest.raises(TraceError, match=error):
        trace(lambda F, x: keeper(x), X)
    assert (keeper.last, keeper.past, keeper.named) == ("nothing", [1], {"a": 2}) and not hasattr(keeper, "fresh")
    assert keeper.past is past and keeper.named is named


def test_a_hybridized_block_stays_so():
    net = nn.HybridSequential()
    net.add(nn.Dense(3), TopTwo())
    net.initialize()
    net.hybridize()
    with pytest.raises(UnsupportedOpError):
        trace(net, X)
    assert net._active and net[0]._active and net[1]._active
    assert net(mx.nd.ones((2, 3))).shape == (2, 2)


def test_other_threads_are_untouched():
    """While a trace runs here, another thread computes, initialises, hybridizes and trains as ever."""
    found = {}

    def work():
        net = nn.HybridSequential()
        net.add(nn.Dense(4, activation="tanh"), nn.BatchNorm(), nn.Dense(1))
        net.initialize(mx.init.One())
        net.hybridize()
        with autograd.record():
            out = net(mx.nd.ones((2, 3)))
        out.backward()
        arrays = out, net[0].weight.data(), mx.nd.topk(out), mx.nd.random.uniform(shape=(2,))
        found["types"] = {type(a) for a in arrays}
        found["value"] = mx.nd.arange(4).asnumpy().sum()

    def fn(F, x):
        y = F.tanh(x)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return y * 2
    assert ops(trace(fn, X)) == ["tanh", "_mul_scalar"]
    assert found == {"types": {mx.nd.NDArray}, "value": 6}
    assert_untouched()


def test_two_threads_trace_at_once():
    """Each hears its own code, and the hooks go with the last one."""
    meet, programs = threading.Barrier(2, timeout=30), {}

    def run(name, op):
        def fn(F, x):
            meet.wait()
            y = getattr(F, op)(x)
            meet.wait()
            return y + 1
        programs[name] = trace(fn, X)
    threads = [threading.Thread(target=run, args=pair) for pair in (("a", "tanh"), ("b", "sigmoid"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {k: ops(p) for k, p in programs.items()} == {"a": ["tanh", "_plus_scalar"], "b": ["sigmoid", "_plus_scalar"]}
    assert_untouched()


def test_traces_nest():
    inner = []

    def fn(F, x):
        y = F.tanh(x)
        inner.append(trace(lambda F, z: F.sigmoid(z), X))
        with listening(None):
            assert (mx.nd.ones((1,)) + 1).asscalar() == 2
        return y + 1
    assert ops(trace(fn, X)) == ["tanh", "_plus_scalar"] and ops(inner[0]) == ["sigmoid"]
    with pytest.raises(TraceError, match="belongs to another recording"):
        trace(lambda F, x: trace(lambda F, z: z + x, X), X)
    assert_untouched()
