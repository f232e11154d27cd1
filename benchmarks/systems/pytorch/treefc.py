"""Tree-FC in PyTorch."""

import torch
from torch import nn
from torch.nn import functional

from .layers import embedding, linear


class TreeFC(nn.Module):
    """One tree at a time; its words are looked up at once."""

    def __init__(self, workload):
        super().__init__()
        self.embed = embedding(workload)
        self.node, self.out = linear(workload, "node"), linear(workload, "out")

    def prepare(self, sample):
        return torch.tensor(sample.words), torch.tensor([sample.label])

    def forward(self, words, label):
        level = list(self.embed(words).split(1))
        while len(level) > 1:
            level = [torch.relu(self.node(torch.cat(pair, dim=1))) for pair in zip(level[::2], level[1::2])]
        return functional.cross_entropy(self.out(level[0]), label, reduction="sum")

    def loss(self, batch):
        return torch.stack([self(words, label) for words, label in batch]).sum()


class BatchedTreeFC(TreeFC):
    """All trees have one shape: neighbours of a level lie beside each other, so a level is a view and a product."""

    def loss(self, batch):
        words, labels = zip(*batch)
        h = self.embed(torch.cat(words))
        while len(h) > len(batch):
            h = torch.relu(self.node(h.view(len(h) // 2, -1)))
        return functional.cross_entropy(self.out(h), torch.cat(labels), reduction="sum")


def make_model(workload, variant):
    return {"loop": TreeFC, "batched": BatchedTreeFC}[variant](workload)
