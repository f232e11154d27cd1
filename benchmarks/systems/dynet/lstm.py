"""An LSTM in DyNet with the parameters of a workload, out of DyNet's own fused operators.

Those have the gates in the order i, f, o, g and add 1 to the forget gate, so parameters are stored in that order and
1 lower; `from_workload` and `to_workload` translate.
"""

import dynet as dy
import numpy as np


def is_lstm(name):
    return "_i2h_" in name or "_h2h_" in name


def _swap(value):
    i, f, third, fourth = np.split(value, 4)
    return np.concatenate([i, f, fourth, third])


def _forget(name, value):
    """What DyNet adds to a parameter."""
    added = np.zeros_like(value)
    if name.endswith("_i2h_bias"):
        added[len(value) // 4:len(value) // 2] = 1
    return added


def from_workload(name, value):
    return _swap(value) - _forget(name, value) if is_lstm(name) else value


def to_workload(name, value):
    return _swap(value + _forget(name, value)) if is_lstm(name) else value


class LSTM:
    """One direction. `begin` once a computation graph, then steps from state to state."""

    def __init__(self, params, name):
        self.parts = [params[f"{name}_{part}"] for part in ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias")]
        self.hidden = self.parts[1].shape()[1]

    def begin(self):
        self.i2h, self.h2h, i2h_bias, h2h_bias = self.parts
        # Without reshape, which is never batched, DyNet 2.2 batches the sums of several LSTMs into one node, and their
        # gradients reach the wrong LSTM.
        self.bias = dy.reshape(i2h_bias + h2h_bias, (4 * self.hidden,))
        self.zeros = dy.zeros(self.hidden)

    def states(self, rows):
        """The state h behind each of the rows."""
        h = c = self.zeros
        made = []
        for x in rows:
            gates = dy.vanilla_lstm_gates(x, h, self.i2h, self.h2h, self.bias)
            c = dy.vanilla_lstm_c(c, gates)
            h = dy.vanilla_lstm_h(c, gates)
            made.append(h)
        return made
