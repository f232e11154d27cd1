"""The graph convolution of graphconv in PyTorch."""

import numpy as np
import torch
from torch import nn

from ...workloads.graphconv import SCALE
from .layers import embedding, linear


class GraphConv(nn.Module):
    """One molecule at a time, atom by atom."""

    def __init__(self, workload):
        super().__init__()
        self.rounds = workload.options["rounds"]
        self.embed = embedding(workload)
        self.own, self.around, self.out = (linear(workload, name) for name in ("own", "around", "out"))

    def head(self, h, target):
        """h: (molecules, hidden), the sums of their atoms; the sum of the losses."""
        return ((self.out(h * SCALE)[:, 0] - target) ** 2).sum() / 2

    def prepare(self, molecule):
        return torch.tensor(molecule.atoms), molecule.neighbours, torch.tensor([molecule.target])

    def forward(self, atoms, neighbours, target):
        h = list(self.embed(atoms).split(1))
        for _ in range(self.rounds):
            new = []
            for v, around in enumerate(neighbours):
                own = self.own(h[v])
                new.append(torch.relu(own + self.around(sum(h[u] for u in around)) if around else own))
            h = new
        return self.head(torch.cat(h).sum(0, keepdim=True), target)

    def loss(self, batch):
        return torch.stack([self(*molecule) for molecule in batch]).sum()


class BatchedGraphConv(GraphConv):
    """All molecules as one graph; a round gathers along all bonds and adds up."""

    def prepare(self, molecule):
        bonds = np.array([(u, v) for v, around in enumerate(molecule.neighbours) for u in around]).reshape(-1, 2)
        return np.array(molecule.atoms), bonds, molecule.target

    def loss(self, batch):
        atoms, bonds, targets = zip(*batch)
        sizes = np.array([len(part) for part in atoms])
        starts = np.cumsum(sizes) - sizes
        source, target = torch.from_numpy(np.concatenate([part + start for part, start in zip(bonds, starts)]).T)
        molecule = torch.from_numpy(np.repeat(np.arange(len(batch)), sizes))
        h = self.embed(torch.from_numpy(np.concatenate(atoms)))
        for _ in range(self.rounds):
            messages = torch.zeros_like(h).index_add(0, target, h.index_select(0, source))
            h = torch.relu(self.own(h) + self.around(messages))
        total = h.new_zeros(len(batch), h.shape[1]).index_add(0, molecule, h)
        return self.head(total, torch.tensor(targets, dtype=torch.float32))


def make_model(workload, variant):
    return {"loop": GraphConv, "batched": BatchedGraphConv}[variant](workload)
