"""The child-sum Tree-LSTM of treelstm-sick in PyTorch."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .layers import embedding, linear
from .levels import Levels, TreeArrays


class SiameseTreeLSTM(nn.Module):
    """One pair at a time; the words of a sentence are looked up at once."""

    def __init__(self, workload):
        super().__init__()
        self.embed = embedding(workload)
        self.x2h, self.h2h, self.f2h, self.similar, self.out = (
            linear(workload, name) for name in ("x2h", "h2h", "f2h", "similar", "out"))

    def similarity(self, a, b, target):
        """a, b: (pairs, hidden); the sum of the losses."""
        scores = self.out(torch.sigmoid(self.similar(torch.cat((a * b, torch.abs(a - b)), dim=1))))
        return functional.kl_div(functional.log_softmax(scores, dim=1), target, reduction="sum")

    def state(self, uio, forgotten=0.0):
        """The state from the sums before the gates, and from what the children's forget gates let through."""
        u, s = torch.tanh(uio[:, :uio.shape[1] // 3]), torch.sigmoid(uio[:, uio.shape[1] // 3:])
        i, o = s.chunk(2, dim=1)
        c = i * u + forgotten
        return o * torch.tanh(c), c

    def prepare(self, pair):
        return ((pair.a, torch.tensor(pair.a.words)), (pair.b, torch.tensor(pair.b.words)),
                torch.from_numpy(pair.target))

    def root(self, tree, words):
        x, states = self.embed(words), []
        for v, children in enumerate(tree.children):
            gates = self.x2h(x[v:v + 1])
            hidden = gates.shape[1] // 4
            uio, f = gates[:, :3 * hidden], gates[:, 3 * hidden:]
            if children:
                h = torch.cat([states[w][0] for w in children])
                c = torch.cat([states[w][1] for w in children])
                forgotten = (torch.sigmoid(f + self.f2h(h)) * c).sum(0, keepdim=True)
                states.append(self.state(uio + self.h2h(h.sum(0, keepdim=True)), forgotten))
            else:
                states.append(self.state(uio))
        return states[-1][0]

    def loss(self, batch):
        return torch.stack([self.similarity(self.root(*a), self.root(*b), target) for a, b, target in batch]).sum()


class BatchedTreeLSTM(SiameseTreeLSTM):
    """Level by level over all sentences; one product for all words."""

    def prepare(self, pair):
        def arrays(tree):
            return TreeArrays.from_parents(tree.parents), np.array(tree.words)

        return arrays(pair.a), arrays(pair.b), pair.target

    def loss(self, batch):
        a, b, targets = zip(*batch)
        trees, words = zip(*a, *b)
        batch = Levels(trees)
        gates = self.x2h(self.embed(torch.from_numpy(np.concatenate(words)[batch.order])))
        hidden = gates.shape[1] // 4
        parts = gates.split(batch.sizes.tolist())
        h, c = self.state(parts[0][:, :3 * hidden])
        made = [h]
        for level, part in zip(batch.levels, parts[1:]):
            h_below, c_below = h.index_select(0, level.below), c.index_select(0, level.below)
            f = torch.sigmoid(part[:, 3 * hidden:].index_select(0, level.owner) + self.f2h(h_below))
            zeros = h.new_zeros(level.size, hidden)
            h_sum = zeros.index_add(0, level.owner, h_below)
            forgotten = zeros.index_add(0, level.owner, f * c_below)
            h_new, c_new = self.state(part[:, :3 * hidden] + self.h2h(h_sum), forgotten)
            made.append(h_new)
            h, c = level.carry(h, h_new), level.carry(c, c_new)
        roots = torch.cat(made).index_select(0, torch.from_numpy(batch.place[batch.roots]))
        return self.similarity(*roots.chunk(2), torch.from_numpy(np.concatenate(targets)))


def make_model(workload, variant):
    return {"loop": SiameseTreeLSTM, "batched": BatchedTreeLSTM}[variant](workload)
