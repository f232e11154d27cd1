"""What a program under test reports: values that it holds, gradients, their freshness.

It is pasted above every shrunk program.
"""

import numpy as np

from cavs_core.mxnet_compat import mx


class Notes:
    """Collects everything there is to compare, by name."""

    def __init__(self):
        self.found, self.held = {}, []

    def hold(self, name, *arrays):
        """Keep arrays alive; their values are read at the end."""
        self.held += [(f"{name}[{k}]", x) for k, x in enumerate(arrays)]

    def read(self, name, array):
        """The value now."""
        self.put(name, array.asnumpy())

    def grads(self, name, arrays, *blocks):
        """Gradients as they are now, and whether they are fresh: of arrays by name, and of the blocks' parameters."""
        for key, x in arrays.items():
            self._grad(f"{name}, {key}", x)
        for k, block in enumerate(blocks):
            for i, p in enumerate(block.collect_params().values()):
                if p.grad_req != "null" and p._data is not None:
                    self._grad(f"{name}, parameter {i} of block {k}", p.data())

    def _grad(self, name, x):
        if x.grad is None:
            return
        self.put(f"fresh, {name}", x._fresh_grad)
        dense = x.grad.tostype("default") if x.grad.stype != "default" else x.grad
        self.put(f"grad, {name}", dense.asnumpy())

    def data(self, name, arrays, *blocks):
        """Values of arrays from outside and of parameters, behind everything that may have written them."""
        for key, x in arrays.items():
            self.put(f"{name}, {key}", x.asnumpy())
        for k, block in enumerate(blocks):
            for i, p in enumerate(block.collect_params().values()):
                if p._data is not None:
                    self.put(f"{name}, parameter {i} of block {k}", p.data().asnumpy())

    def stale(self, name, step):
        """Run a step of a Trainer; whether it warns of stale gradients."""
        try:
            step()
            self.put(f"stale, {name}", False)
        except UserWarning:
            self.put(f"stale, {name}", True)

    def put(self, name, value):
        while name in self.found:
            name += "'"
        self.found[name] = np.array(value)

    def finish(self):
        for name, x in self.held:
            self.put(f"value, {name}", x.asnumpy())
        return self.found


def observe(program, scope, data):
    """Run a program; what it reported, with the error that ended it under "error"."""
    notes = Notes()
    mx.random.seed(0)
    np.random.seed(0)
    try:
        program(scope, data, notes)
        notes.finish()
        mx.nd.waitall()
    except Exception as error:
        notes.found["error"] = error
    return notes.found
