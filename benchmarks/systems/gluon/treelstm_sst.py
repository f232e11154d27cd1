"""The binary Tree-LSTM of treelstm-sst in Gluon."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import dense, embedding

nd = mx.nd


class LeafCell(gluon.HybridBlock):
    def __init__(self, workload):
        super().__init__(prefix="")
        self.gates = dense(workload, "leaf")

    def hybrid_forward(self, F, x):
        u, i, o = F.split(self.gates(x), num_outputs=3, axis=1)
        c = F.sigmoid(i) * F.tanh(u)
        return F.sigmoid(o) * F.tanh(c), c


class NodeCell(gluon.HybridBlock):
    """The states of two children, and what else the gates see -> the state of the node."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.gates = dense(workload, "node")

    def hybrid_forward(self, F, hl, cl, hr, cr, *seen):
        u, i, o, fl, fr = F.split(self.gates(F.concat(hl, hr, *seen, dim=1)), num_outputs=5, axis=1)
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * cl + F.sigmoid(fr) * cr
        return F.sigmoid(o) * F.tanh(c), c


class TreeLSTM(gluon.Block):
    """Plain Gluon: one tree at a time; words are looked up, and losses are made, once for all nodes of the tree."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.leaf, self.node = LeafCell(workload), NodeCell(workload)
        self.out = dense(workload, "out")
        self.cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

    def prepare(self, tree):
        return tree, nd.array([w for w in tree.words if w >= 0]), nd.array(tree.labels)

    def forward(self, tree, words, labels):
        x, states, leaves = self.embed(words), [], 0
        for left, right in zip(tree.left, tree.right):
            if left < 0:
                states.append(self.leaf(x[leaves:leaves + 1]))
                leaves += 1
            else:
                states.append(self.node(*states[left], *states[right]))
        h = nd.concat(*[h for h, _ in states], dim=0)
        return self.cross_entropy(self.out(h), labels).sum()

    def losses(self, batch):
        return [self(*sample) for sample in batch]


@gdb.vertex
class LeafVertex(gluon.HybridBlock):
    """A leaf: its word and label as numbers -> its state and its loss."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.embed, self.cell, self.out, self.cross_entropy = model.embed, model.leaf, model.out, model.cross_entropy

    def hybrid_forward(self, F, word, label):
        h, c = self.cell(self.embed(word))
        return h, c, self.cross_entropy(self.out(h), label)


@gdb.vertex
class NodeVertex(gluon.HybridBlock):
    """An inner node: its label as a number and the states of its children -> its state and its loss."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.cell, self.out, self.cross_entropy = model.node, model.out, model.cross_entropy

    def hybrid_forward(self, F, label, hl, cl, hr, cr):
        h, c = self.cell(hl, cl, hr, cr)
        return h, c, self.cross_entropy(self.out(h), label)


class VertexTreeLSTM(TreeLSTM):
    """The same cells, marked; a word or a label is a number, and the loss of a tree is the sum of its nodes'."""

    def __init__(self, workload):
        super().__init__(workload)
        self.at_leaf, self.at_node = LeafVertex(self), NodeVertex(self)

    def prepare(self, tree):
        return tree

    def forward(self, tree):
        states, losses = [], []
        for word, left, right, label in zip(tree.words, tree.left, tree.right, tree.labels):
            if left < 0:
                h, c, loss = self.at_leaf(word, label)
            else:
                h, c, loss = self.at_node(label, *states[left], *states[right])
            states.append((h, c))
            losses.append(loss)
        return nd.add_n(*losses)

    def losses(self, batch):
        return [self(tree) for tree in batch]


class CavsTreeLSTM(cavs.VertexFunction):
    """The Cavs face: the same cells over graphs; words and labels are integers of the vertices."""

    def __init__(self, workload):
        hidden = workload.options["hidden"]
        super().__init__(state_shapes=[(hidden,), (hidden,)], prefix="")
        self.embed, self.at_leaf, self.at_node = embedding(workload), LeafCell(workload), NodeCell(workload)
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def vertex(self, F, v):
        if v.is_leaf:
            h, c = self.at_leaf(self.embed(v.pull("word")))
        else:
            h, c = self.at_node(*v.gather(0), *v.gather(1))
        v.scatter(h, c)
        v.push(self.cross_entropy(self.out(h), v.pull("label")))

    def prepare(self, tree):
        inner = [v for v, left in enumerate(tree.left) if left >= 0]
        edges = [(child, v) for v in inner for child in (tree.left[v], tree.right[v])]
        return cavs.InputGraph.from_edges(len(tree.words), edges), np.array(tree.words), np.array(tree.labels)

    def losses(self, batch):
        graphs, words, labels = zip(*batch)
        return self(list(graphs), {"word": np.concatenate(words), "label": np.concatenate(labels)}).pushed


def make_model(workload, variant):
    return {"vertex": VertexTreeLSTM, "cavs": CavsTreeLSTM}.get(variant, TreeLSTM)(workload)
