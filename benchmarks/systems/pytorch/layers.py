"""Layers with the sizes of a workload's parameters."""

from torch import nn


def linear(workload, name):
    """The layer with the parameters `name`_weight and, if there is one, `name`_bias."""
    outputs, inputs = workload.params[f"{name}_weight"].shape
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=f"{name}_bias" in workload.params)


def embedding(workload, name="embed"):
    """The table `name`_weight, with a sparse gradient."""
    return nn.utils.skip_init(nn.Embedding, *workload.params[f"{name}_weight"].shape, sparse=True)


def lstm(workload, name, bidirectional=False):
    """The layer with the parameters `name`_l0_i2h_weight and so on."""
    gates, inputs = workload.params[f"{name}_l0_i2h_weight"].shape
    return nn.LSTM(inputs, gates // 4, bidirectional=bidirectional)
