"""PyTorch: the same training loop around the model of a workload, one sample at a time or batched by hand.

A module of this folder is named as its workload and defines `make_model(workload, variant)`: a Module with
`loss(batch)`, the sum of the samples' losses, and `prepare(sample)`, done once a sample. Its parameters have the names
that they have in the workload, apart from "." for "_", and those of an LSTM.
"""

import importlib
import os
import re

import numpy as np
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def workload_name(name):
    """words.weight_ih_l0_reverse -> words_r0_i2h_weight; embed.weight -> embed_weight"""
    lstm = re.fullmatch(r"(\w+)\.(weight|bias)_(i|h)h_l0(_reverse)?", name)
    if lstm is None:
        return name.replace(".", "_")
    layer, kind, source, backwards = lstm.groups()
    return f"{layer}_{'r0' if backwards else 'l0'}_{source}2h_{kind}"


class System:
    def __init__(self, workload, variant):
        module = importlib.import_module(f"{__name__}.{workload.name.replace('-', '_')}")
        self.model = module.make_model(workload, variant)
        self.params = {workload_name(name): p for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, value in workload.params.items():
                self.params[name].copy_(torch.from_numpy(value))
        self.optimizer = torch.optim.SGD(self.params.values(), lr=workload.learning_rate)
        self.batches = [[self.model.prepare(s) for s in workload.batch(k)] for k in range(workload.num_batches)]

    def _loss(self, k):
        batch = self.batches[k % len(self.batches)]
        return self.model.loss(batch) / len(batch)

    def loss(self, k):
        with torch.no_grad():
            return self._loss(k).item()

    def step(self, k):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(k)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self):
        return {name: p.detach().numpy() for name, p in self.params.items()}

    def versions(self):
        return {"torch": torch.__version__, "numpy": np.__version__}
