"""The checker of short programs: what they give in a scope must be what they give without one."""

import contextlib

import numpy as np

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, mx

BACKENDS = ("mxnet", "native")


def check_scope(fn, *data, backends=BACKENDS, grad_req="write", grad=True, uninitialised=(), **options):
    """Compare ``fn(*arrays)``, values and gradients or the class of the error, with the same code without a scope.

    Parameters
    ----------
    fn : returns an array or a list of arrays
    data : numpy arrays; those of floating numbers ask for a gradient
    backends : of the scopes
    grad_req : of the arrays; "add" adds to ones
    grad : whether a pass begins at the results
    uninitialised : numbers of the arrays whose gradient MXNet leaves as it finds the memory
    options : of the scopes

    Returns
    -------
    The scopes; empty if `fn` raises as it does without one.
    """
    want, scopes = _results(fn, data, grad_req, grad, contextlib.nullcontext())[0], []
    for backend in backends:
        got, scope = _results(fn, data, grad_req, grad, gdb.batching(backend=backend, **options))
        if isinstance(want, Exception):
            assert type(got) is type(want), f"{backend}: not the loop's {want!r} but {got!r}"[:600]
            continue
        if isinstance(got, Exception):
            raise AssertionError(f"{backend}: raises where the loop does not") from got
        scopes.append(scope)
        assert len(got) == len(want), f"{backend}: {len(got)} results instead of {len(want)}"
        for (what, value), (_, expected) in zip(got, want):
            if what not in {f"gradient {k}" for k in uninitialised}:
                assert value.shape == expected.shape, f"{backend}, {what}: shape {value.shape}, not {expected.shape}"
                assert value.dtype == expected.dtype, f"{backend}, {what}: dtype {value.dtype}, not {expected.dtype}"
                np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-5, err_msg=f"{backend}, {what}")
    return scopes


def _results(fn, data, grad_req, grad, batching):
    """What there is to compare, with names, or the error; and the scope."""
    scope = None
    arrays = [mx.nd.array(a, dtype=a.dtype) for a in data]
    variables = [x for x in arrays if np.issubdtype(x.dtype, np.floating)]
    for x in variables:
        x.attach_grad(grad_req)
        x.grad[:] = 1
    try:
        with autograd.record():
            with batching as scope:
                made = fn(*arrays)
            made = list(made) if isinstance(made, (list, tuple)) else [made]
        if grad:
            autograd.backward(made, [mx.nd.array(_head(k, y.shape), dtype=y.dtype) for k, y in enumerate(made)])
        found = [(f"value {k}", y.asnumpy()) for k, y in enumerate(made)]
        found += [(f"gradient {k}", x.grad.asnumpy()) for k, x in enumerate(arrays) if x.grad is not None]
        return [*found, ("freshness", np.array([x._fresh_grad for x in variables]))], scope
    except Exception as error:
        with contextlib.suppress(Exception):
            mx.nd.waitall()                 # what else failed on the way is not the next one's error
        return error, scope


def _head(number, shape):
    """A gradient whose entries all differ."""
    return np.random.RandomState(number).uniform(0.5, 1.5, shape)
