"""The checker of generated kernels: a kernel on many rows must give what the numpy bodies give for each sample."""

import ctypes

import numpy as np

from cavs_core.backends.native_cpu import codegen, kernel_cache
from cavs_core.backends.native_cpu.ir import ONE, ROW_AT, Access, Kernel
from cavs_core.ops import TABLE, Builder
from cavs_core.program import ROW, SHARED, Leaf, Spec

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
