"""The checker of traced blocks: a block on many rows at once must give what it gives when called for each sample."""

import numpy as np
from op_check import BODIES, ROWS, TOLERANCE, run_rows

from cavs_core.mxnet_compat import autograd, mx
from cavs_core.program import Arg, Param, Spec
from cavs_core.trace import trace


def nested_map(fn, nested):
    if isinstance(nested, (list, tuple)):
        return type(nested)(nested_map(fn, part) for part in nested)
    return None if nested is None else fn(nested)


def flatten(nested):
    if isinstance(nested, (list, tuple)):
        return [leaf for part in nested for leaf in flatten(part)]
    return [] if nested is None else [nested]


def check_block(block, *args, fixed=(), grad=True, train_mode=False, bodies=BODIES, call=None, tol=None):
    """Compare a traced block with its plain calls: outputs, gradients of arguments, gradients of parameters.

    Parameters
    ----------
    block : a Block; initialised, unless its parameters wait for their shapes
    args : what one call takes, as numpy arrays of shape (ROWS, ...), in lists if the block wants lists; or None
    fixed : numbers of the (flattened) arguments that get no gradient
    call : how to call the block, if ``block(*args)`` is not meant: a function ``(F, *args)``
    """
    fn = block if call is None else call
    with autograd.train_mode() if train_mode else autograd.predict_mode():
        program = trace(fn, *nested_map(lambda a: Spec(a.shape[1:], a.dtype.name), args))
    inputs = program.inputs
    arguments, parameters = program.inputs_of(Arg), program.inputs_of(Param)
    program.inputs = {v: inputs[v] for v in [*arguments, *parameters, *inputs]}     # the order that run_rows takes
    shared = [inputs[v].parameter for v in parameters]
    plain = fn if call is None else lambda *xs: call(mx.nd, *xs)
    heads, want, want_grads = _loop(plain, args, fixed, shared, train_mode, grad)
    numbers = [*flatten(args), *[p.data().asnumpy() for p in shared]]
    frozen = [len(arguments) + k for k, p in enumerate(shared) if p.grad_req == "null"]
    for body in bodies:
        outputs, grads = run_rows(body, program, numbers, heads if grad else None, [*fixed, *frozen])
        assert len(outputs) == len(want), f"{body} body: {len(outputs)} outputs instead of {len(want)}"
        for k, (got, expected) in enumerate(zip(outputs, want)):
            _assert_same(got, expected, tol, f"{body} body, output {k}")
        for i, got in grads.items():
            what = f"argument {i}" if i < len(arguments) else shared[i - len(arguments)].name
            _assert_same(got, want_grads[i], tol, f"{body} body, gradient of {what}")
    return program


def _loop(plain, args, fixed, parameters, train_mode, grad):
    rng = np.random.RandomState(3)
    heads, outputs, grads = [], [], []
    for row in range(ROWS):
        arrays = nested_map(lambda a, row=row: mx.nd.array(a[row], dtype=a.dtype), args)
        flat = flatten(arrays)
        for i, x in enumerate(flat):
            if i not in fixed:
                x.attach_grad()
        for p in parameters:
            p.zero_grad()
        with autograd.record(train_mode) if grad else autograd.pause(train_mode):
            out = flatten(plain(*arrays))
            heads.append([rng.uniform(-1, 1, y.shape).astype(y.dtype) for y in out])
            # A sum, for a cell returns the same array as output and as state, and of two equal heads MXNet takes one.
            total = mx.nd.add_n(*[(y * mx.nd.array(h, dtype=h.dtype)).sum() for y, h in zip(out, heads[-1])])
        outputs.append([y.asnumpy() for y in out])
        if not grad:
            continue
        total.backward(train_mode=train_mode)
        grads.append([*[None if i in fixed else x.grad.asnumpy() for i, x in enumerate(flat)],
                      *[None if p.grad_req == "null" else p.grad().asnumpy() for p in parameters]])
    rows = [None if g[0] is None else np.stack(g) for g in zip(*grads)]
    return ([np.stack(h) for h in zip(*heads)], [np.stack(y) for y in zip(*outputs)],
            [g if g is None or i < len(flat) else g.sum(0) for i, g in enumerate(rows)])


def _assert_same(got, want, tol, what):
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype} instead of {want.dtype}"
    np.testing.assert_allclose(got, want, err_msg=what, **(tol or TOLERANCE[str(want.dtype)]))
