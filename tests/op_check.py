"""The checker of the op table: an op on many rows at once must give what MXNet gives for each sample."""

import numpy as np

from cavs_core.autodiff import differentiate
from cavs_core.backends.mxnet_ops import MXNetBackend
from cavs_core.backends.numpy_ref import NumpyBackend
from cavs_core.mxnet_compat import autograd, mx
from cavs_core.partition import make_steps
from cavs_core.program import ROW, SHARED, OutputGrad, Spec
from cavs_core.trace import trace

ROWS = 3
TOLERANCE = {"float32": dict(rtol=2e-4, atol=2e-5), "float64": dict(rtol=1e-9, atol=1e-10)}


def check_op(fn, *args, shared=(), fixed=(), grad=True, train_mode=True, tol=None, bodies=("mxnet", "numpy")):
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
    specs = [Spec(a.shape if i in shared else a.shape[1:], a.dtype.name, SHARED if i in shared else ROW)
             for i, a in enumerate(args)]
    with autograd.train_mode() if train_mode else autograd.predict_mode():
        program = trace(fn, *specs, name="op under test")
    heads, want, want_grads = _loop(fn, args, shared, fixed, grad, train_mode)
    for name in bodies:
        _check_body(name, program, args, shared, fixed, heads, want, want_grads, grad, tol)
    return program


def _loop(fn, args, shared, fixed, grad, train_mode):
    """MXNet, one sample at a time: outputs per sample, head gradients, and gradients of every argument."""
    rng = np.random.RandomState(3)
    heads, outputs = [], []
    grads = [[None] * ROWS for _ in args]
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
                    grads[i][row] = x.grad.asnumpy()
    return heads, outputs, grads


def _check_body(name, program, args, shared, fixed, heads, want, want_grads, grad, tol):
    if name == "mxnet":
        backend, put, get = MXNetBackend(mx.current_context()), lambda a: mx.nd.array(a, dtype=a.dtype), _as_numpy
    else:
        backend, put, get = NumpyBackend(), lambda a: a, lambda a: a
    values = dict(zip(program.inputs, [put(a) for a in args]))
    values.update({v: put(s.array.asnumpy()) for v, s in program.inputs.items() if hasattr(s, "array")})
    arguments = {v: i for i, v in enumerate(list(program.inputs)[:len(args)])}
    wanted = [v for v, i in arguments.items() if program.specs[v].is_float and i not in fixed] if grad else []
    back = differentiate(program, wanted, [OutputGrad(i) for i in range(len(program.outputs))])
    _run(backend, program.instrs, program.specs, values, [*program.outputs, *back.saved])
    for k, v in enumerate(program.outputs):
        rows = get(values[v])
        rows = np.stack([rows] * ROWS) if program.specs[v].kind == SHARED else rows
        for row in range(ROWS):
            _assert_same(rows[row], want[row][k], tol, f"{name} body, output {k}, row {row}")
    if not grad:
        return
    for v, source in back.program.inputs.items():
        stacked = np.stack([h[source.index] for h in heads])
        if program.specs[program.outputs[source.index]].kind == SHARED:
            stacked = stacked.sum(0)
        values[v] = put(stacked)
    _run(backend, back.program.instrs, back.program.specs, values, list(back.grads.values()))
    for v in wanted:
        expected = np.stack(want_grads[arguments[v]])
        if arguments[v] in shared:
            expected = expected.sum(0)
        got = get(values[back.grads[v]]) if v in back.grads else np.zeros_like(expected)
        _assert_same(got, expected, tol, f"{name} body, gradient of argument {arguments[v]}")


def _run(backend, instrs, specs, values, kept):
    for step in make_steps(instrs, kept):
        made = backend.compile_region(step, specs)([values[v] for v in step.inputs], None)
        values.update(zip(step.outputs, made))


def _as_numpy(array):
    return array.asnumpy()


def _assert_same(got, want, tol, what):
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype} instead of {want.dtype}"
    tol = tol or TOLERANCE.get(str(want.dtype), dict(rtol=0, atol=0))
    np.testing.assert_allclose(got, want, err_msg=what, **tol)
