"""The binary Tree-LSTM of treelstm-sst in PyTorch."""

import numpy as np
import torch
from torch import nn

from .layers import embedding, linear
from .levels import Levels, TreeArrays


class TreeLSTM(nn.Module):
    """One tree at a time; words are looked up, and losses are made, once for all nodes of the tree."""

    def __init__(self, workload):
        super().__init__()
        self.embed = embedding(workload)
        self.leaf, self.node, self.out = (linear(workload, name) for name in ("leaf", "node", "out"))
        self.cross_entropy = nn.CrossEntropyLoss(reduction="sum")

    def leaf_state(self, x):
        u, i, o = self.leaf(x).chunk(3, dim=1)
        c = torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c

    def node_state(self, h, cl, cr):
        """h: the states of both children beside each other."""
        gates = self.node(h)
        hidden = cl.shape[1]
        i, o, fl, fr = torch.sigmoid(gates[:, hidden:]).chunk(4, dim=1)
        c = i * torch.tanh(gates[:, :hidden]) + fl * cl + fr * cr
        return o * torch.tanh(c), c

    def prepare(self, tree):
        return tree, torch.tensor([w for w in tree.words if w >= 0]), torch.tensor(tree.labels)

    def forward(self, tree, words, labels):
        x, states, leaves = self.embed(words), [], 0
        for left, right in zip(tree.left, tree.right):
            if left < 0:
                states.append(self.leaf_state(x[leaves:leaves + 1]))
                leaves += 1
            else:
                (hl, cl), (hr, cr) = states[left], states[right]
                states.append(self.node_state(torch.cat((hl, hr), dim=1), cl, cr))
        h = torch.cat([h for h, _ in states])
        return self.cross_entropy(self.out(h), labels)

    def loss(self, batch):
        return torch.stack([self(*sample) for sample in batch]).sum()


class BatchedTreeLSTM(TreeLSTM):
    """Level by level over the whole mini-batch; all leaves are one product, all losses are made at once."""

    def prepare(self, tree):
        parents = [-1] * len(tree.words)
        for v, children in enumerate(zip(tree.left, tree.right)):
            for child in children:
                if child >= 0:
                    parents[child] = v
        return TreeArrays.from_parents(parents), np.array(tree.words), np.array(tree.labels)

    def loss(self, batch):
        trees, words, labels = zip(*batch)
        batch = Levels(trees)
        leaves = np.concatenate(words)[batch.order[:batch.sizes[0]]]
        h, c = self.leaf_state(self.embed(torch.from_numpy(leaves)))
        made, hidden = [h], h.shape[1]
        for level in batch.levels:
            c_below = c.index_select(0, level.below).view(level.size, 2, hidden)
            h_below = h.index_select(0, level.below).view(level.size, 2 * hidden)
            h_new, c_new = self.node_state(h_below, c_below[:, 0], c_below[:, 1])
            made.append(h_new)
            h, c = level.carry(h, h_new), level.carry(c, c_new)
        return self.cross_entropy(self.out(torch.cat(made)), torch.from_numpy(np.concatenate(labels)[batch.order]))


def make_model(workload, variant):
    return {"loop": TreeLSTM, "batched": BatchedTreeLSTM}[variant](workload)
