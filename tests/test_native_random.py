"""Random programs: generated kernels, run as plain Python with every access checked, against the numpy bodies.

Nothing is compiled here, so there can be many of them; pointers are objects that know the ends of their buffers.
"""

import math
from types import FunctionType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavs_core.backends.native_cpu import codegen, pointers
from cavs_core.backends.native_cpu.ir import LOCAL, ONE, ROW_AT, SUM, SUM_EDGES, TAKE, Access, Kernel
from cavs_core.ops import TABLE, Builder
from cavs_core.program import ROW, SHARED, Leaf, Spec

ROWS, FIRST = 3, 1          # rows 1:4 of 4 run, with blocks of two
UNARY = ("sigmoid", "tanh", "exp", "square", "negative", "relu", "sign", "ones_like", "_copy")
BINARY = ("broadcast_add", "broadcast_mul", "broadcast_sub", "broadcast_maximum", "broadcast_greater")


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def _checked(self, i):
        assert 0 <= self.at + i < self.memory.size, "outside of the buffer"
        return self.at + i

    def __getitem__(self, i):
        return self.memory[self._checked(i)]

    def __setitem__(self, i, value):
        self.memory[self._checked(i)] = value

    def __add__(self, i):
        return Pointer(self.memory, self.at + i)


def _plain_python(name):
    """One of the helpers that kernels call, not compiled."""
    function = getattr(pointers, name).py_func
    names = {"copy_row": pointers.copy_row.py_func, "range": range}
    return FunctionType(function.__code__, names, name)


NAMES = {
    "BUFFERS": "", "plain": lambda p: p, "inf": math.inf, "sqrt": np.sqrt, "release": lambda p: None,
    "scratch": lambda size, dtype, name, buffers: Pointer(np.full(size, 77, dtype)),
    "plus": np.add, "times": np.multiply, "larger": np.maximum, "smaller": np.minimum,
    **{name: _plain_python(name) for name in ("copy_row", "add_up", "add_up_edges")},
    **{name: getattr(np, name) for name in ("float64", "int64")},
    **{f"{name}_float64": TABLE[name].body for name in ("sigmoid", "tanh", "exp", "log")},
}


def run_as_python(source, words):
    """Run a kernel's source; `words`: for each slot of its table the array that it points at."""
    space = {**NAMES, "pointer": lambda table, slot, dtype, name, buffers: Pointer(words[slot])}
    exec(source[source.index("def kernel"):], space)
    with np.errstate(all="ignore"):
        space["kernel"](None, FIRST, FIRST, FIRST + ROWS)


@st.composite
def programs(draw):
    """A program of a few ops on small float64 rows."""
    b = Builder()
    shapes = [(4,), (2, 3), (1, 5), (3, 1), (2, 2, 3), (1,)]
    kinds = [ROW, ROW, SHARED]
    values = [b.input(Spec(draw(st.sampled_from(shapes)), "float64", draw(st.sampled_from(kinds))), Leaf(k))
              for k in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 9))):
        values += _drawn_op(draw, b, values)
    made = [v for v in values if b.specs[v].kind == ROW]
    outputs = draw(st.lists(st.sampled_from(made or values), min_size=1, max_size=4))
    b.program.outputs = outputs
    return b.program


def _drawn_op(draw, b, values):
    x = draw(st.sampled_from(values))
    shape = b.shape(x)
    rank = len(shape)
    axis = draw(st.integers(0, rank - 1))
    kind = draw(st.sampled_from(["unary"] * 3 + ["binary"] * 4 + ["reduce", "softmax", "slice", "split", "reshape",
                                 "transpose", "concat", "assign", "reverse", "broadcast", "hot", "pick", "dot"]))
    if kind == "unary":
        return [b.emit(draw(st.sampled_from(UNARY)), x)]
    if kind == "binary":
        fits = [y for y in values if _broadcasts(shape, b.shape(y))]
        return [b.emit(draw(st.sampled_from(BINARY)), x, draw(st.sampled_from(fits)))]
    if kind == "reduce":
        axes = tuple(sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1))))
        name = draw(st.sampled_from(["reduce_sum", "reduce_max", "reduce_prod", "l2_norm"]))
        return [b.emit(name, x, axis=axes)] + [b.emit("reduce_argmax", x, axis=axis)]
    if kind == "softmax":
        return [b.emit(draw(st.sampled_from(["softmax_plain", "log_softmax_plain"])), x, axis=axis)]
    if kind in ("slice", "assign"):
        begin = tuple(draw(st.integers(0, n - 1)) for n in shape)
        end = tuple(draw(st.integers(i + 1, n)) for i, n in zip(begin, shape))
        step = tuple(draw(st.integers(1, 2)) for _ in shape)
        part = b.emit("slice", x, begin=begin, end=end, step=step)
        if kind == "slice":
            return [part]
        return [b.emit("slice_assign", x, b.emit("negative", part), begin=begin, end=end, step=step)]
    if kind == "split":
        return b.call("SliceChannel", [x], {"num_outputs": shape[axis], "axis": axis})
    if kind == "reshape":
        size = int(np.prod(shape))
        first = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        return [b.reshape(x, draw(st.sampled_from([(first, size // first), (size,), (1, first, size // first)])))]
    if kind == "transpose":
        return [b.emit("transpose", x, axes=tuple(draw(st.permutations(range(rank)))))]
    if kind == "concat":
        others = [y for y in values if b.shape(y)[:axis] + b.shape(y)[axis + 1:] == shape[:axis] + shape[axis + 1:]
                  and len(b.shape(y)) == rank]
        return [b.emit("Concat", x, draw(st.sampled_from(others)), draw(st.sampled_from(others)), dim=axis)]
    if kind == "reverse":
        return [b.emit("reverse", x, axis=(axis,))]
    if kind == "broadcast":
        return [b.emit("broadcast_to", x, shape=tuple(2 if n == 1 else n for n in shape))]
    index = b.emit("_greater_scalar", x, scalar=0.0)
    if kind == "hot":
        return [b.emit("one_hot", index, depth=2, dtype="float64"), b.emit("scatter_rows", index, x, size=2)]
    if kind == "pick":
        wide = b.emit("Concat", x, b.emit("exp", x), dim=axis)
        part = b.emit("slice_axis", index, axis=axis, begin=0, end=1)
        return [b.emit("pick_plain", wide, part, axis=axis), b.emit("lookup", wide, b.emit("zeros_like", x))]
    flat = b.reshape(x, (shape[0], int(np.prod(shape[1:]))))
    left = draw(st.booleans())
    return [b.emit("matmul", flat, flat, transpose_a=left, transpose_b=not left)]


def _broadcasts(x, y):
    return len(x) == len(y) and all(n == m or 1 in (n, m) for n, m in zip(x, y))


def row_of(access, memory, index, bounds, r):
    """What a kernel reads as row r."""
    rows = {ONE: 0, ROW_AT: r, LOCAL: r - FIRST, TAKE: index[r], SUM: index[bounds[r]:bounds[r + 1]],
            SUM_EDGES: range(bounds[r], bounds[r + 1])}[access.how]
    row = memory[rows] if np.isscalar(rows) else memory[list(rows)].sum(0)
    return row[:math.prod(access.shape)].reshape(access.shape)


@pytest.mark.parametrize("block", [1, 2])
@settings(max_examples=150)
@given(program=programs(), data=st.data())
def test_kernels_compute_what_the_ops_say(block, program, data):
    rng = np.random.RandomState(0)
    words, inputs, arrays, total = {}, [], [], FIRST + ROWS
    for v in program.inputs:
        spec = program.specs[v]
        how = ONE if spec.kind == SHARED else data.draw(st.sampled_from([ROW_AT, LOCAL, TAKE, SUM, SUM_EDGES]))
        access = Access(how, "float64", spec.shape, math.prod(spec.shape) + data.draw(st.sampled_from([0, 2])))
        memory, index = rng.uniform(-1, 1, (8, access.stride)), rng.randint(0, 8, 8)
        bounds = np.sort(rng.randint(0, 8, total + 1))
        arrays.append([row_of(access, memory, index, bounds, r) for r in range(FIRST, total)])
        words.update(zip(range(3 * len(inputs), 3 * len(inputs) + 3), (memory.reshape(-1), index, bounds)))
        inputs.append((v, access))
    outputs, made = [], []
    for v in program.outputs:
        shape, how = program.specs[v].shape, data.draw(st.sampled_from([ROW_AT, LOCAL]))
        outputs.append((v, Access(how, "float64", shape, math.prod(shape) + data.draw(st.sampled_from([0, 0, 1])))))
        made.append(np.full((total, outputs[-1][1].stride), 55.0))
        words[3 * (len(inputs) + len(made) - 1)] = made[-1].reshape(-1)
    kernel = Kernel(tuple(program.instrs), tuple(enumerate(program.specs)), tuple(inputs), tuple(outputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "_block_rows", lambda graph: block)
        source = codegen.source_of(kernel)
    run_as_python(source, words)
    for r in range(ROWS):
        values = by_numpy(program, [rows[r] for rows in arrays])
        for (v, access), rows in zip(outputs, made):
            want, got = values[v].reshape(-1), rows[r if access.how == LOCAL else r + FIRST]
            np.testing.assert_allclose(got[:want.size], want, rtol=1e-9, atol=1e-12, err_msg=source)
            assert (got[want.size:] == 55).all(), source


def by_numpy(program, sample):
    values = dict(zip(program.inputs, sample))
    with np.errstate(all="ignore"):
        for instr in program.instrs:
            results = TABLE[instr.op].numpy(dict(instr.attrs), *[values[v] for v in instr.inputs])
            values.update(zip(instr.outputs, results if isinstance(results, list) else [results]))
    return values
