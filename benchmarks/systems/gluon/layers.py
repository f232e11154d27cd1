"""Layers with the sizes and names of a workload's parameters."""

import cavs_core as cavs
from cavs_core.mxnet_compat import gluon


def dense(workload, name, **options):
    """The layer with the parameters `name`_weight and, if there is one, `name`_bias."""
    outputs, inputs = workload.params[f"{name}_weight"].shape
    return gluon.nn.Dense(outputs, in_units=inputs, use_bias=f"{name}_bias" in workload.params, prefix=f"{name}_",
                          **options)


def embedding(workload, name="embed"):
    """The table `name`_weight, with a row_sparse gradient: a step does not touch the words that it does not read."""
    return gluon.nn.Embedding(*workload.params[f"{name}_weight"].shape, sparse_grad=True, prefix=f"{name}_")


def lstm_cell(workload, name):
    """The cell with the parameters `name`_i2h_weight and so on."""
    gates, inputs = workload.params[f"{name}_i2h_weight"].shape
    return gluon.rnn.LSTMCell(gates // 4, input_size=inputs, prefix=f"{name}_")


class ChainFunction(cavs.VertexFunction):
    """An LSTM over chains, for the Cavs face: pulls x, a row or a number that is looked up in `embed`, and pushes h.

    With `only_last`, of the last vertex of each chain.
    """

    def __init__(self, workload, name, embed=None, only_last=False):
        hidden = workload.params[f"{name}_h2h_weight"].shape[1]
        super().__init__(state_shapes=[(hidden,), (hidden,)], prefix="")
        self.cell, self.embed, self.only_last = lstm_cell(workload, name), embed, only_last

    def vertex(self, F, v):
        x = v.pull("x") if self.embed is None else self.embed(v.pull("x"))
        h, states = self.cell(x, list(v.gather(0)))
        v.scatter(*states)
        if not self.only_last or v.is_root:
            v.push(h)
