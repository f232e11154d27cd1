"""Tree-FC in Gluon."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import dense, embedding

nd = mx.nd


class NodeCell(gluon.HybridBlock):
    def __init__(self, workload):
        super().__init__(prefix="")
        self.fc = dense(workload, "node", activation="relu")

    def hybrid_forward(self, F, left, right):
        return self.fc(F.concat(left, right, dim=1))


class Head(gluon.HybridBlock):
    def __init__(self, workload):
        super().__init__(prefix="")
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F, h, label):
        return self.cross_entropy(self.out(h), label)


class TreeFC(gluon.Block):
    """Plain Gluon: one tree at a time; its words are looked up at once."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.node, self.head = NodeCell(workload), Head(workload)

    def prepare(self, sample):
        return nd.array(sample.words), nd.array([sample.label])

    def leaves(self, words):
        x = self.embed(words)
        return [x[k:k + 1] for k in range(len(words))]

    def forward(self, words, label):
        level = self.leaves(words)
        while len(level) > 1:
            level = [self.node(left, right) for left, right in zip(level[::2], level[1::2])]
        return self.head(level[0], label)

    def losses(self, batch):
        return [self(words, label) for words, label in batch]


class VertexTreeFC(TreeFC):
    """The same cells, marked; words and labels are numbers."""

    def __init__(self, workload):
        super().__init__(workload)
        self.embed = gdb.vertex(embedding(workload))
        gdb.vertex(self.node)
        gdb.vertex(self.head)

    def prepare(self, sample):
        return sample.words, sample.label

    def leaves(self, words):
        return [self.embed(word) for word in words]


class CavsTreeFC(cavs.VertexFunction):
    """The Cavs face: graphs instead of calls; the root makes the loss."""

    def __init__(self, workload):
        super().__init__(state_shapes=[(workload.options["hidden"],)], prefix="")
        self.embed, self.node, self.head = embedding(workload), NodeCell(workload), Head(workload)
        self.graph = cavs.InputGraph.complete_binary_tree(workload.options["leaves"].bit_length() - 1)

    def vertex(self, F, v):
        h = self.embed(v.pull("word")) if v.is_leaf else self.node(*v.gather(0), *v.gather(1))
        if v.is_root:
            v.push(self.head(h, v.pull("label")))
        else:
            v.scatter(h)

    def prepare(self, sample):
        words, labels = np.full((2, self.graph.num_vertices), -1)
        words[:len(sample.words)] = sample.words            # leaves are numbered first, and the root is the last one
        labels[-1] = sample.label
        return words, labels

    def losses(self, batch):
        words, labels = zip(*batch)
        return self([self.graph] * len(batch), {"word": np.concatenate(words), "label": np.concatenate(labels)}).pushed


def make_model(workload, variant):
    return {"vertex": VertexTreeFC, "cavs": CavsTreeFC}.get(variant, TreeFC)(workload)
