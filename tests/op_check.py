"""The checker of the op table: an op on many rows at once must give what MXNet gives for each sample."""

import numpy as np

from cavs_core.autodiff import differentiate
from cavs_core.backends.mxnet_ops import MXNetBackend
from cavs_core.backends.numpy_ref import NumpyBackend
from cavs_core.mxnet_compat import autograd, mx
from cavs_core.ops import TABLE
from cavs_core.partition import make_steps
from cavs_core.program import ROW, SHARED, OutputGrad, Spec
from cavs_core.rows import lower
from cavs_core.trace import trace

ROWS = 3
BODIES = ("mxnet", "numpy")
TOLERANCE = {"float32": dict(rtol=2e-4, atol=2e-5), "float64": dict(rtol=1e-9, atol=1e-10)}


def check_op(fn, *args, shared=(), fixed=(), grad=True, train_mode=True, tol=None, bodies=BODIES):
    """Compare ``fn(F, *arrays)`` on stacked rows with MXNet's own result for every sample.

    Parameters
    ----------
    fn : the function of one sample
    args : numpy arrays, shape (ROWS, ...)
        The operands of all samples; for the arguments in `shared`, the one operand of all, without a row axis.
    shared : indices of shared arguments
    fixed : indices of arguments that get no gradient (ids, labels, masks)
    grad : whether to compare gradients (of all floating arguments that are not fixed)
    tol : dict(rtol=, atol=), if the op's own precision asks for another one
    """
    program = trace_rows(fn, *args, shared=shared, train_mode=train_mode)
    heads, want, want_grads = _loop(fn, args, shared, fixed, grad, train_mode)
    inferred = [(program.specs[v].shape, program.specs[v].dtype) for v in program.outputs]
    assert inferred == [(y.shape[1:], y.dtype.name) for y in want], f"the shape rule says {inferred}"
    for body in bodies:
        outputs, grads = run_rows(body, program, args, heads if grad else None, fixed)
        for k, (got, expected) in enumerate(zip(outputs, want)):
            _assert_same(got, expected, tol, f"{body} body, output {k}")
        for i, got in grads.items():
            _assert_same(got, want_grads[i], tol, f"{body} body, gradient of argument {i}")
    return program


def trace_rows(fn, *args, shared=(), train_mode=True):
    """The program of one sample, for the arguments of `check_op`."""
    specs = [Spec(a.shape if i in shared else a.shape[1:], a.dtype.name, SHARED if i in shared else ROW)
             for i, a in enumerate(args)]
    with autograd.train_mode() if train_mode else autograd.predict_mode():
        return trace(fn, *specs, name="op under test")


def run_rows(body, program, args, heads=None, fixed=()):
    """Run a program on all rows at once.

    Parameters
    ----------
    body : "mxnet" or "numpy"
    program, args, fixed : see `check_op`
    heads : gradients of the outputs, shape (ROWS, ...), if those of the arguments are asked for

    Returns
    -------
    outputs, shape (ROWS, ...), and a dict: argument -> its gradient, of the argument's own shape.
    """
    if body == "mxnet":
        backend, put, get = MXNetBackend(mx.current_context()), lambda a: mx.nd.array(a, dtype=a.dtype), _as_numpy
    else:
        backend, put, get = NumpyBackend(), lambda a: a, lambda a: a
    specs, arguments = program.specs, list(program.inputs)[:len(args)]
    values = dict(zip(arguments, [put(a) for a in args]))
    values.update({v: put(s.array.asnumpy()) for v, s in program.inputs.items() if hasattr(s, "array")})
    wanted = [] if heads is None else [v for i, v in enumerate(arguments) if specs[v].is_float and i not in fixed]
    back = differentiate(program, wanted, [OutputGrad(k) for k in range(len(program.outputs))])
    _run(backend, program.instrs, specs, values, [*program.outputs, *back.saved])
    outputs = [np.stack([get(values[v])] * ROWS) if specs[v].kind == SHARED else get(values[v])
               for v in program.outputs]
    for v, source in back.program.inputs.items():
        head = heads[source.index]
        values[v] = put(head.sum(0) if specs[program.outputs[source.index]].kind == SHARED else head)
    _run(backend, back.program.instrs, back.program.specs, values, list(back.grads.values()))
    return outputs, {i: get(values[back.grads[v]]) if v in back.grads else np.zeros_like(args[i])
                     for i, v in enumerate(arguments) if v in wanted}


def _loop(fn, args, shared, fixed, grad, train_mode):
    """MXNet, one sample at a time: head gradients, outputs, and the gradient of every argument."""
    rng = np.random.RandomState(3)
    heads, outputs = [], []
    grads = [[] for _ in args]
    for row in range(ROWS):
        arrays = [mx.nd.array(a if i in shared else a[row], dtype=a.dtype) for i, a in enumerate(args)]
        for i, x in enumerate(arrays):
            if i not in fixed:
                x.attach_grad()
        with autograd.record(train_mode=train_mode):
            out = fn(mx.nd, *arrays)
            out = list(out) if isinstance(out, (list, tuple)) else [out]
        outputs.append([y.asnumpy() for y in out])
        heads.append([rng.uniform(-1, 1, y.shape).astype(y.dtype) for y in out])
        if grad:
            autograd.backward(out, [mx.nd.array(h, dtype=h.dtype) for h in heads[-1]], train_mode=train_mode)
            for i, x in enumerate(arrays):
                if i not in fixed:
                    grads[i].append(x.grad.asnumpy())
    return ([np.stack(rows) for rows in zip(*heads)], [np.stack(rows) for rows in zip(*outputs)],
            [np.sum(g, axis=0) if i in shared else np.array(g) for i, g in enumerate(grads)])


_asked = {}         # op -> what was made of its body


def _assert_compiles_in_front_of_any(step, specs):
    """A region compiles whatever reads an op in it: MXNet makes a gradient graph too, which a body without a gradient
    must not be part of."""
    low = lower(step.instrs, specs, step.inputs, step.outputs)
    for instr in low.instrs:
        if instr.op not in _asked:
            operands = [mx.sym.var(f"x{k}") for k in range(len(instr.inputs))]
            made = TABLE[instr.op].mxnet(mx.sym, instr.attrs, *operands)
            readers = [mx.sym._internal._backward_gather_nd(made[k], mx.sym.var("rows"), shape=(2,))
                       for k in range(len(instr.outputs))]       # its gradient is no zero, even of a zero
            _asked[instr.op] = mx.nd.CachedOp(mx.sym.Group([mx.sym.BlockGrad(x) for x in readers]))


def _run(backend, instrs, specs, values, kept):
    for step in make_steps(instrs, kept):
        if isinstance(backend, MXNetBackend) and not step.segmented:
            _assert_compiles_in_front_of_any(step, specs)
        operands = [values[v] for v in step.inputs]
        if step.segmented:
            assert step.instrs[0].op == "stack_rows", step.instrs[0]
            made = [backend.repeat(operands[0], ROWS)]
        else:
            made = backend.compile_region(step, specs)(operands, None)
        values.update(zip(step.outputs, made))


def _as_numpy(array):
    return array.asnumpy()


def _assert_same(got, want, tol, what):
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype} instead of {want.dtype}"
    tol = tol or TOLERANCE.get(str(want.dtype), dict(rtol=0, atol=0))
    np.testing.assert_allclose(got, want, err_msg=what, **tol)
