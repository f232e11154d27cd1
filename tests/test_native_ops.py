"""Native bodies: every op against its numpy body. Many ops share a kernel, since compiling is what takes time."""

import pytest
from kernel_check import Case

from cavs_core.backends.native_cpu import codegen
from cavs_core.ops import TABLE, Composite
from cavs_core.program import Spec

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
