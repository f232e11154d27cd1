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


class TreeFunction(cavs.VertexFunction):
    """A vertex of the Cavs face: a leaf has a word, the others have children."""

    def __init__(self, workload):
        super().__init__(state_shapes=[(workload.options["hidden"],)], prefix="")
        self.fc = dense(workload, "node", activation="relu")

    def vertex(self, F, v):
        (left,), (right,) = v.gather(0), v.gather(1)
        h = F.broadcast_mul(self.fc(F.concat(left, right, dim=1)), v.pull("inner")) + v.pull("x")
        v.scatter(h)
        v.push(h)


class CavsTreeFC(gluon.Block):
    """Graphs instead of calls."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.tree, self.head = TreeFunction(workload), Head(workload)
        leaves = workload.options["leaves"]
        self.graph = cavs.InputGraph.complete_binary_tree(leaves.bit_length() - 1)      # leaves are numbered first
        self.inner = (np.arange(2 * leaves - 1) >= leaves).astype("float32")[:, None]

    def prepare(self, sample):
        return sample

    def losses(self, batch):
        x = self.embed(nd.array([sample.words for sample in batch]))                    # (trees, leaves, hidden)
        trees, leaves, hidden = x.shape
        x = nd.concat(x, nd.zeros((trees, leaves - 1, hidden)), dim=1).reshape((-1, hidden))
        inputs = {"x": x, "inner": np.tile(self.inner, (trees, 1))}
        roots = self.tree([self.graph] * trees, inputs).roots
        return self.head(roots, nd.array([sample.label for sample in batch]))


def make_model(workload, variant):
    return {"vertex": VertexTreeFC, "cavs": CavsTreeFC}.get(variant, TreeFC)(workload)
