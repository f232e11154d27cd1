"""MXNet Gluon without batching, and ours: the same training loop around the model of a workload.

A module of this folder is named as its workload and defines `make_model(workload, variant)`: a Block with
`losses(batch)`, a list of the samples' losses (or one array with all of them), and `prepare(sample)`, done once a
sample. Its parameters have the names that they have in the workload: blocks have no prefix, layers have one.

    variant     model                                       scope
    loop        plain per-sample code                       none
    op          the same as loop                            gdb.batching(granularity="op")
    vertex      per-sample code with marked cells           gdb.batching()
    cavs        a cavs.VertexFunction over input graphs     none
"""

import contextlib
import importlib

import numpy as np

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

SCOPES = {"op": {"granularity": "op"}, "vertex": {"granularity": "vertex"}}


class System:
    def __init__(self, workload, variant):
        module = importlib.import_module(f"{__name__}.{workload.name.replace('-', '_')}")
        self.model = module.make_model(workload, variant)
        self.model.initialize()
        self.params = self.model.collect_params()
        for name, value in workload.params.items():
            self.params[name].set_data(mx.nd.array(value))
        self.scope = SCOPES.get(variant)
        self.trainer = gluon.Trainer(self.params, "sgd", {"learning_rate": workload.learning_rate},
                                     kvstore=None)
        self.batches = [[self.model.prepare(s) for s in workload.batch(k)] for k in range(workload.num_batches)]

    def _losses(self, k):
        batch = self.batches[k % len(self.batches)]
        with contextlib.nullcontext() if self.scope is None else gdb.batching(**self.scope):
            return self.model.losses(batch), len(batch)

    def loss(self, k):
        losses, count = self._losses(k)
        return total(losses) / count

    def step(self, k):
        with autograd.record():
            losses, count = self._losses(k)
        autograd.backward(losses)
        self.trainer.step(count)
        mx.nd.waitall()
        return total(losses) / count

    def parameters(self):
        return {name: p.data().asnumpy() for name, p in self.params.items()}

    def versions(self):
        return {"mxnet": mx.__version__, "numpy": np.__version__, "gluon_dynbatch": gdb.__version__}


def total(losses):
    """The sum of all losses as a number."""
    return sum(float(loss.asnumpy().sum()) for loss in (losses if isinstance(losses, list) else [losses]))

