"""Generated kernels: every op against its numpy body, every way to read operands, and what is fused."""

import ctypes
import time

import numpy as np
import pytest

from cavs_core.autodiff import differentiate
from cavs_core.backends.native_cpu import codegen, kernel_cache
from cavs_core.backends.native_cpu.ir import LOCAL, MAX_EDGES, ONE, ROW_AT, SUM, SUM_EDGES, TAKE, Access, Kernel
from cavs_core.ops import TABLE, Builder, Composite
from cavs_core.program import ROW, SHARED, Leaf, OutputGrad, Spec

ROWS = 5
TOLERANCE = {"float32": dict(rtol=1e-4, atol=1e-5), "float64": dict(rtol=1e-10, atol=1e-11)}


# ---- running kernels on numpy arrays ---------------------------------------------------------------------------------

def prepared(kernel, operands, outputs):
    """A function of (first, start, stop). `operands`: for each input (array, index, bounds)."""
    address, = kernel_cache.compile_kernels([codegen.source_of(kernel)], quiet=True)
    words = [0 if a is None else a.ctypes.data for operand in [*operands, *((y, None, None) for y in outputs)]
             for a in operand]
    table = np.array(words, np.int64)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)
    return lambda first, start, stop: function(table.ctypes.data, first, start, stop)


def run(kernel, operands, outputs, rows=ROWS, first=0, start=0):
    """Call a kernel for rows start:start + rows."""
    prepared(kernel, operands, outputs)(first, start, start + rows)


def access(spec, how=ROW_AT, **more):
    return Access(how, spec.dtype, spec.shape, int(np.prod(spec.shape)), **more)


def rows_access(spec):
    return access(spec, ONE if spec.kind == SHARED else ROW_AT)


def on_rows(program, arrays, outputs=None):
    """Run a program of one sample on all rows; shared inputs have no row axis."""
    outputs = program.outputs if outputs is None else outputs
    specs = dict(enumerate(program.specs))
    inputs = list(program.inputs)
    kernel = Kernel(tuple(program.instrs), tuple(specs.items()), tuple((v, rows_access(specs[v])) for v in inputs),
                    tuple((v, access(specs[v])) for v in outputs))
    made = [np.full((ROWS, *specs[v].shape), 77, specs[v].dtype) for v in outputs]
    run(kernel, [(np.ascontiguousarray(a), None, None) for a in arrays], made)
    return made


def by_numpy(program, arrays, outputs=None):
    """The numpy bodies, sample by sample."""
    results = []
    for row in range(ROWS):
        values = {v: a if program.specs[v].kind == SHARED else a[row] for v, a in zip(program.inputs, arrays)}
        for instr in program.instrs:
            made = TABLE[instr.op].numpy(dict(instr.attrs), *[values[v] for v in instr.inputs])
            values.update(zip(instr.outputs, made if isinstance(made, list) else [made]))
        results.append([values[v] for v in (program.outputs if outputs is None else outputs)])
    return [np.stack(rows) for rows in zip(*results)]


def check(program, arrays, what="", tol=None):
    names = {v: str(instr) for instr in program.instrs for v in instr.outputs}
    got, want = on_rows(program, arrays), by_numpy(program, arrays)
    for v, g, w in zip(program.outputs, got, want):
        assert g.dtype == w.dtype, names.get(v)
        np.testing.assert_allclose(g, w, err_msg=f"{what} {names.get(v)}", **(tol or TOLERANCE.get(g.dtype.name, {})))


class Case:
    """Builds a program and draws its inputs."""

    def __init__(self, dtype="float32", seed=0):
        self.b, self.arrays, self.dtype = Builder(), [], dtype
        self.rng = np.random.RandomState(seed)

    def input(self, *shape, low=-2.0, high=2.0, among=None, dtype=None, shared=False):
        size = shape if shared else (ROWS, *shape)
        draw = self.rng.uniform(low, high, size) if among is None else self.rng.choice(among, size)
        self.arrays.append(draw.astype(dtype or self.dtype))
        spec = Spec(shape, dtype or self.dtype, SHARED if shared else ROW)
        return self.b.input(spec, Leaf(len(self.arrays) - 1))

    def out(self, op, *xs, **attrs):
        made = self.b.call(op, xs, attrs)
        self.b.program.outputs += made
        return made[0]

    def check(self, what="", tol=None):
        check(self.b.program, self.arrays, what, tol)

# ---- every op --------------------------------------------------------------------------------------------------------

POSITIVE = dict(low=0.1, high=3.0)
UNIT = dict(low=-0.95, high=0.95)
DOMAINS = {"log": POSITIVE, "log2": POSITIVE, "log10": POSITIVE, "log1p": POSITIVE, "sqrt": POSITIVE, "rsqrt": POSITIVE,
           "rcbrt": POSITIVE, "reciprocal": POSITIVE, "arcsin": UNIT, "arccos": UNIT, "arctanh": UNIT, "erfinv": UNIT,
           "arccosh": dict(low=1.1, high=3.0), "gamma": POSITIVE, "gammaln": POSITIVE, "digamma": POSITIVE,
           "broadcast_power": POSITIVE, "_power_scalar": POSITIVE, "_rpower_scalar": POSITIVE}
HALVES = dict(among=[-2.5, -1.5, -0.5, 0.0, 0.3, 0.5, 1.0, 1.5])
ROUNDING = ("round", "rint", "floor", "ceil", "fix", "trunc", "sign", "logical_not", "relu", "abs")
FLOATS = ("float32", "float64")


def names_of(kind):
    return sorted({op.name for op in TABLE.values() if type(op).__name__ in kind})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("part", range(3))
def test_unary_ops(dtype, part):
    case = Case(dtype)
    for name in names_of(("Unary", "_Linear", "_Softrelu", "_Selu", "_Digamma", "MakeLoss"))[part::3]:
        case.out(name, case.input(2, 3, **(HALVES if name in ROUNDING else DOMAINS.get(name, {}))))
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_scalar_ops(dtype):
    case = Case(dtype)
    for name in names_of(("Scalar",)):
        x = case.input(7, **DOMAINS.get(name, HALVES if "equal" in name or "logical" in name else {}))
        case.out(name, x, scalar=1.5 if "equal" in name else 0.7)
    for scalar in (1.0, 2.0, 3.0, -1.0):
        case.out("_power_scalar", x, scalar=scalar)
    case.out("_logical_xor_scalar", x, scalar=0.0)
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_ops_broadcast(dtype):
    case = Case(dtype)
    for k, name in enumerate(names_of(("Binary",))):
        draw = DOMAINS.get(name, HALVES if "equal" in name or "logical" in name else {})
        left, right = [((2, 3), (2, 3)), ((2, 1), (1, 3)), ((3,), (2, 3)), ((2, 3), (1,))][k % 4]
        case.out(name, case.input(*left, **draw), case.input(*right, shared=k % 3 == 0, **draw))
    case.check()


def test_integers():
    case = Case("int32")
    x, y = case.input(4, low=-9, high=9), case.input(4, low=-3, high=9)
    for name in ("broadcast_add", "broadcast_mul", "broadcast_maximum", "broadcast_mod", "broadcast_lesser",
                 "broadcast_logical_and"):
        case.out(name, x, y)
    case.out("_mod_scalar", x, scalar=4.0)
    case.out("_mul_scalar", x, scalar=3.0)
    case.out("_div_scalar", x, scalar=2.0)
    case.out("clip", x, a_min=0.0, a_max=3.0)
    case.out("negative", x)
    case.out("sign", x)
    case.out("reduce_sum", x, axis=(0,))
    case.out("reduce_max", x, axis=(0,))
    for dtype in ("float32", "float64", "int64", "int8", "uint8"):
        case.out("Cast", case.b.emit("abs", x), dtype=dtype)
    big = case.input(3, among=[2**31 - 1, -2**31, 7])
    case.out("_mul_scalar", big, scalar=3.0)            # wraps as numpy's does
    case.out("Cast", case.input(3, low=-50.0, high=50.0, dtype="float64"), dtype="int32")
    case.out("select", x, y, case.b.emit("negative", y))
    case.check()


def test_views_and_parts():
    case = Case()
    x, y = case.input(4, 6), case.input(2, 6, shared=True)
    half = case.out("slice", x, begin=(1, None), end=(3, None))
    case.out("slice", x, begin=(None, 5), end=(None, 0), step=(2, -2))
    case.out("SliceChannel", x, num_outputs=3, axis=1)
    case.out("SliceChannel", case.b.emit("exp", x), num_outputs=2, axis=0)
    case.out("transpose", x, axes=(1, 0))
    case.out("transpose", case.b.emit("tanh", x), axes=(1, 0))
    case.out("Reshape", case.b.emit("transpose", x, axes=(1, 0)), shape=(3, 8))
    case.out("Reshape", case.b.emit("broadcast_to", case.input(4, 1), shape=(4, 6)), shape=(24,))
    case.out("reverse", case.b.emit("square", x), axis=(0, 1))
    case.out("Concat", half, y, half, dim=0)
    case.out("Concat", half, case.b.emit("sigmoid", y), dim=1)
    case.out("Concat", case.b.emit("Concat", half, y, dim=1), case.b.emit("Concat", y, half, dim=1), dim=0)
    case.out("slice_assign", x, case.b.emit("negative", half), begin=(1, None), end=(3, None))
    case.out("slice_assign", case.b.emit("zeros_like", x), case.b.emit("slice", x, begin=(0, 0), end=(2, 3)),
             begin=(3, 4), end=(None, None), step=(-2, -2))
    case.out("broadcast_to", case.input(1, 6), shape=(4, 6))
    case.out("_copy", x)
    case.check()


def test_reductions():
    case = Case()
    x, v = case.input(3, 4, 5), case.input(19)
    for axis in ((2,), (0,), (1,), (0, 2), (0, 1, 2)):
        case.out("reduce_sum", x, axis=axis)
    for name in ("reduce_max", "reduce_min", "reduce_prod", "l2_norm"):
        case.out(name, x, axis=(1,))
        case.out(name, case.b.emit("square", v), axis=(0,))
    for axis in range(2):
        case.out("reduce_argmax", x, axis=axis)
    case.out("reduce_argmin", v, axis=0)
    case.out("reduce_sum", case.input(1, 3), axis=(0,))
    case.out("reduce_argmax", case.input(1, 3), axis=0)
    case.check()


@pytest.mark.parametrize("dtype, classes", [("float32", 5), ("float64", 70), ("float32", 1)])
def test_softmax(dtype, classes):
    case = Case(dtype)
    x = case.input(1, classes, high=30.0)
    case.out("softmax_plain", x, axis=1)
    y = case.out("log_softmax_plain", x, axis=1)
    case.out("softmax_loss", x, x, x)
    label = case.input(1, 1, among=range(classes))
    case.out("negative", case.b.emit("pick_plain", y, label, axis=1))
    case.out("broadcast_sub", x, case.b.mul(case.b.emit("exp", y), case.b.emit("reduce_sum", x, axis=(1,))))
    case.check()


def test_softmax_along_any_axis():
    case = Case("float64")
    deep = case.input(2, 3, 4)
    case.out("softmax_plain", deep, axis=1)
    case.out("log_softmax_plain", deep, axis=0)
    case.check()


def test_looking_up():
    case, dtype = Case(), "float32"
    table, own = case.input(7, 3, shared=True), case.input(7, 3)
    by_float, by_int = case.input(2, 2, among=range(7)), case.input(4, among=range(7), dtype="int32")
    one = case.input(1, among=range(7), dtype="uint8")
    found = case.out("lookup", table, by_float)
    case.out("lookup", own, by_int)
    case.out("tanh", case.b.emit("lookup", table, one))
    case.out("slice", found, begin=(0, 1, None), end=(2, 2, None))
    case.out("one_hot", by_float, depth=7, on_value=0.9, off_value=0.1, dtype=dtype)
    case.out("pick_plain", own, case.input(7, 1, among=range(3), dtype="int64"), axis=1)
    case.out("pick_plain", case.b.emit("square", own), case.input(1, 3, among=range(7)), axis=0)
    case.out("scatter_rows", by_int, case.input(4, 3), size=7)
    case.out("scatter_rows", by_float, case.input(2, 2), size=7)
    case.check()


def test_products():
    case = Case("float64")
    for ta in (False, True):
        for tb in (False, True):
            x = case.input(*((4, 3) if ta else (3, 4)))
            y = case.input(*((5, 4) if tb else (4, 5)), shared=ta != tb)
            case.out("matmul", x, y, transpose_a=ta, transpose_b=tb)
    x, y = case.input(2, 3, 4), case.input(2, 4, 5)
    case.out("batch_matmul", x, y)
    case.out("batch_matmul", y, x, transpose_a=True, transpose_b=True)
    case.out("matmul", case.input(1, 9), case.input(9, 1))
    case.out("matmul", case.input(1, 9), case.input(9, 6))
    case.out("matmul", case.b.emit("exp", case.input(6, 9)), case.input(9, 1))
    case.out("matmul", case.input(6, 1), case.input(1, 7))
    case.check()


def test_every_plain_op_has_a_body_or_a_reason():
    array_level = {"uniform_like", "rows_like", "lookup_per_row"}       # drawn, or never in a program
    segmented = {"spread", "child_sum", "child_max", "stack_rows", "sum_rows"}      # ways to read operands
    plain = {op.name for op in TABLE.values() if not isinstance(op, Composite)}
    spec = Spec((2,), "float32")
    missing = {name for name in plain if codegen.supports(name, {}, [spec])}
    assert missing == array_level | segmented
    assert "float16" in codegen.supports("exp", {}, [Spec((2,), "float16")])
    assert "float16" in codegen.supports("Cast", {"dtype": "float16"}, [spec])
    assert "power" in codegen.supports("_power_scalar", {"scalar": 2.0}, [Spec((2,), "int32")])


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
