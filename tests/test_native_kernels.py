"""Generated kernels: every way to read operands, what is fused, and how the result looks."""

import time

import numpy as np
import pytest
from kernel_check import ROWS, TOLERANCE, Case, access, by_numpy, check, prepared, rows_access, run

from cavs_core.autodiff import differentiate
from cavs_core.backends.native_cpu import codegen
from cavs_core.backends.native_cpu.ir import LOCAL, MAX_EDGES, ONE, ROW_AT, SUM, SUM_EDGES, TAKE, Access, Kernel
from cavs_core.ops import Builder
from cavs_core.program import Leaf, OutputGrad, Spec

# ---- ways to read ----------------------------------------------------------------------------------------------------

def copying(spec, how, out=ROW_AT, op=None, **more):
    """A kernel of one input, which is copied or goes through one op."""
    b = Builder()
    v = b.input(spec, Leaf(0))
    y = b.emit(op, v) if op else v
    return Kernel(tuple(b.program.instrs), tuple(enumerate(b.specs)), ((v, access(spec, how, **more)),),
                  ((y, access(spec, out)),))


@pytest.mark.parametrize("op, dtype, size", [(None, "float32", 80), ("square", "float32", 80),
                                             ("square", "float64", 20)])
def test_operands_are_taken_summed_and_shared(op, dtype, size):
    """Short rows run in blocks, long ones one by one; a copy is made where it is needed."""
    rng = np.random.RandomState(1)
    spec = Spec((2, size // 2), dtype)
    rows = rng.uniform(-1, 1, (9, size)).astype(dtype)
    index = rng.randint(0, 9, 3 * ROWS)
    bounds = np.array([0, 0, 1, 3, 6, 12])          # segments of 0, 1, 2, 3 and 6 entries
    f = np.square if op else np.asarray

    def result(how, operand, **more):
        out = np.full((ROWS, size), 77, dtype)
        run(copying(spec, how, op=op, **more), [operand], [out])
        return out

    def sums(entries):
        return np.stack([entries[a:b].sum(0) for a, b in zip(bounds, bounds[1:])])

    tol = TOLERANCE[dtype]
    np.testing.assert_allclose(result(TAKE, (rows, index, None)), f(rows[index[:ROWS]]), **tol)
    np.testing.assert_allclose(result(TAKE, (rows, index, None), step=3), f(rows[index[::3]]), **tol)
    np.testing.assert_allclose(result(SUM, (rows, index, bounds)), f(sums(rows[index])), **tol)
    entries = rows[np.arange(12) % 9]
    np.testing.assert_allclose(result(SUM_EDGES, (entries, None, bounds)), f(sums(entries)), **tol)
    full = np.array([0, 1, 3, 4, 9, 12])
    want = np.stack([entries[a:b].max(0) for a, b in zip(full, full[1:])])
    np.testing.assert_allclose(result(MAX_EDGES, (entries, None, full)), f(want), **tol)
    np.testing.assert_allclose(result(ONE, (rows, None, None)), f(np.stack([rows[0]] * ROWS)), **tol)


def test_sums_of_parts():
    """Each half of a row has a segment of its own, of stretches that lie 12 elements apart."""
    rng = np.random.RandomState(1)
    spec = Spec((2, 10), "float32")
    memory, index = rng.uniform(-1, 1, (9, 12)).astype("float32"), rng.randint(0, 9, 12)
    bounds = np.array([0, 0, 1, 1, 3, 3, 3, 6, 7, 8, 12])
    kernel = Kernel((), ((0, spec),), ((0, Access(SUM, "float32", spec.shape, 12, parts=2)),), ((0, access(spec)),))
    out = np.full((ROWS, 2, 10), 77, "float32")
    run(kernel, [(memory, index, bounds)], [out])
    parts = [memory[index[a:b], :10].sum(0) for a, b in zip(bounds, bounds[1:])]
    np.testing.assert_allclose(out.reshape(-1, 10), parts, rtol=1e-6, atol=1e-6)


def test_rows_of_a_launch_and_ranges_of_rows():
    spec = Spec((3,), "float32")
    x = np.arange(30, dtype="float32").reshape(10, 3)
    out = np.zeros((10, 3), "float32")
    run(copying(spec, LOCAL, op="square"), [(x, None, None)], [out], rows=2, first=4, start=5)
    want = np.zeros_like(out)
    want[5:7] = x[1:3] ** 2
    np.testing.assert_array_equal(out, want)
    out[:] = 0
    run(copying(spec, ROW_AT, LOCAL, op="square"), [(x, None, None)], [out], rows=3, first=4, start=6)
    want[:] = 0
    want[2:5] = x[6:9] ** 2
    np.testing.assert_array_equal(out, want)
    run(copying(spec, ROW_AT), [(x, None, None)], [out], rows=0, start=6)
    np.testing.assert_array_equal(out, want)


def test_wide_strides():
    spec = Spec((3,), "float32")
    memory, out = np.arange(40, dtype="float32").reshape(5, 8), np.zeros((5, 4), "float32")
    kernel = Kernel((), ((0, spec),), ((0, Access(ROW_AT, "float32", (3,), 8)),),
                    ((0, Access(ROW_AT, "float32", (3,), 4)),))
    run(kernel, [(memory, None, None)], [out])
    np.testing.assert_array_equal(out, np.pad(memory[:, :3], ((0, 0), (0, 1))))


# ---- what is generated -----------------------------------------------------------------------------------------------

def tree_lstm(dtype="float32", hidden=21):
    """The pointwise part of a binary Tree-LSTM node: outputs h and c."""
    case = Case(dtype)
    b = case.b
    gates, bias = case.input(1, 5 * hidden), case.input(1, 5 * hidden, shared=True)
    left, right = case.input(1, hidden), case.input(1, hidden)
    i, f, g, o, u = b.call("split", [b.add(gates, bias)], {"num_outputs": 5, "axis": 1})
    i, f, g, o, u = *(b.emit("sigmoid", x) for x in (i, f, g, o)), b.emit("tanh", u)
    c = b.add(b.add(b.mul(i, u), b.mul(f, left)), b.mul(g, right))
    b.program.outputs = [b.mul(o, b.emit("tanh", c)), c]
    return case, [gates, left, right]


def source_on_rows(program):
    specs = program.specs
    inputs = tuple((v, rows_access(specs[v])) for v in program.inputs)
    return codegen.source_of(Kernel(tuple(program.instrs), tuple(enumerate(specs)), inputs,
                                    tuple((v, access(specs[v])) for v in program.outputs)))


@pytest.mark.parametrize("hidden", [21, 7, 80])
def test_tree_lstm_forward_and_backward(hidden):
    """Rows of 80 run one by one, the others in blocks; each direction is one loop, backward writes into the concat."""
    case, wanted = tree_lstm(hidden=hidden)
    back = differentiate(case.b.program, wanted, [OutputGrad(0), OutputGrad(1)])
    case.b.program.outputs += [v for v in back.saved if v not in case.b.program.inputs]
    case.check("forward")
    values = dict(zip(case.b.program.inputs, case.arrays))
    values.update(zip(case.b.program.outputs, by_numpy(case.b.program, case.arrays)))
    backward = back.program
    heads = {v: case.rng.uniform(-1, 1, (ROWS, 1, hidden)).astype("float32") for v in backward.inputs}
    backward.inputs = {**dict.fromkeys(back.saved, Leaf(0)), **backward.inputs}
    arrays = [{**values, **heads}[v] for v in backward.inputs]
    check(backward, arrays, "backward")
    if hidden == 80:
        for source in (source_on_rows(case.b.program), source_on_rows(backward)):
            assert "scratch(" not in source and source.count("in range(") == 2


def test_equal_kernels_have_equal_sources():
    sources = set()
    for skipped in (0, 3):
        case = Case()
        case.b.specs.extend([Spec((9,), "float32")] * skipped)      # other numbers for the same values
        x = case.input(1, 30)
        case.out("tanh", case.b.add(x, case.b.emit("square", x)))
        sources.add(source_on_rows(case.b.program))
    assert len(sources) == 1
    assert "square, broadcast_add, tanh" in sources.pop()


def test_views_have_no_code():
    """Slices, reshapes and transposes of what is computed are computed at their own place only."""
    case = Case()
    b = case.b
    x = b.emit("exp", case.input(6, 40))
    part = b.emit("slice", b.emit("transpose", b.reshape(x, (40, 6)), axes=(1, 0)), begin=(0, 5), end=(6, 35))
    case.out("tanh", part)
    source = source_on_rows(b.program)
    assert "scratch(" not in source and source.count("exp_float32(") == 1
    case.check()


def test_a_heavy_function_is_computed_once():
    case = Case()
    b = case.b
    y = b.emit("exp", case.input(100))
    total = b.emit("reduce_sum", y, axis=(0,))
    case.out("broadcast_div", b.mul(y, y), total)
    assert source_on_rows(b.program).count("exp_float32(") == 1
    case.check()


def test_nan_and_inf():
    case = Case()
    x = case.input(8)
    case.arrays[0][:] = [np.nan, np.inf, -np.inf, 1e30, -1e30, 0, -0.0, 1]
    names = ("exp", "log", "sigmoid", "tanh", "relu", "sqrt", "softrelu", "expm1", "log1p", "sign", "selu", "erf")
    for name in names:
        case.out(name, x)
    case.out("clip", x, a_min=-2.0, a_max=2.0)
    case.out("_maximum_scalar", x, scalar=0.5)
    case.out("broadcast_minimum", x, case.input(8))
    case.out("_mod_scalar", x, scalar=0.0)
    for name in ("reduce_max", "reduce_min", "reduce_sum"):
        case.out(name, x, axis=(0,))
        case.out(name, case.b.emit("slice", x, begin=(1,), end=(2,)), axis=(0,))
    case.out("reduce_argmax", x, axis=0)
    case.out("reduce_argmin", case.b.emit("reverse", x, axis=(0,)), axis=0)
    with np.errstate(all="ignore"):
        case.check(tol=dict(rtol=1e-5, atol=1e-6))


def test_large_scratch_is_not_on_the_stack():
    case = Case()
    x = case.input(40_000)
    case.out("softmax_plain", x, axis=0)
    assert "release(t0)" in source_on_rows(case.b.program)
    case.check()


def test_the_same_value_twice():
    case = Case()
    b = case.b
    x = case.input(3, 2)
    y = b.emit("sigmoid", x)
    total = b.emit("reduce_sum", y, axis=(1,))
    both = b.emit("Concat", y, y, dim=1)
    b.program.outputs = [x, y, y, b.reshape(y, (6,)), total, total, both, both, b.emit("_copy", both)]
    case.check()


def test_kernels_are_vectorised():
    """One by one, a sigmoid costs 30 times as much as a copied number or more; in vectors, 6 times."""
    rows = 400

    def shortest(op):
        spec = Spec((300,), "float32")
        x, out = np.full((rows, 300), 0.5, "float32"), np.zeros((rows, 300), "float32")
        call = prepared(copying(spec, ROW_AT, op=op), [(x, None, None)], [out])
        times = []
        for _ in range(60):
            start = time.perf_counter()
            call(0, 0, rows)
            times.append(time.perf_counter() - start)
        return min(times)

    assert shortest("sigmoid") < 15 * shortest(None)
