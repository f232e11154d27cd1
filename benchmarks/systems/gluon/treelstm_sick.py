"""The child-sum Tree-LSTM of treelstm-sick in Gluon."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import dense, embedding

nd = mx.nd


class ChildSumCell(gluon.HybridBlock):
    """A word's vector and a list of the children's states (h, c) -> the state of a vertex."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.x2h, self.h2h, self.f2h = (dense(workload, name) for name in ("x2h", "h2h", "f2h"))

    def hybrid_forward(self, F, x, children):
        u, i, o, f = F.split(self.x2h(x), num_outputs=4, axis=1)
        if children:
            below = self.h2h(F.add_n(*[h for h, _ in children]))
            u_below, i_below, o_below = F.split(below, num_outputs=3, axis=1)
            u, i, o = u + u_below, i + i_below, o + o_below
        c = F.sigmoid(i) * F.tanh(u)
        for h_child, c_child in children:
            c = c + F.sigmoid(f + self.f2h(h_child)) * c_child
        return F.sigmoid(o) * F.tanh(c), c


class Similarity(gluon.HybridBlock):
    """The states of two roots and a distribution -> the loss."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.similar, self.out = dense(workload, "similar", activation="sigmoid"), dense(workload, "out")
        self.divergence = gluon.loss.KLDivLoss(from_logits=False)

    def hybrid_forward(self, F, a, b, target):
        return self.divergence(self.out(self.similar(F.concat(a * b, F.abs(a - b), dim=1))), target)


class SiameseTreeLSTM(gluon.Block):
    """Plain Gluon: one pair at a time; the words of a sentence are looked up at once."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.cell, self.similarity = ChildSumCell(workload), Similarity(workload)

    def prepare(self, pair):
        return (pair.a, nd.array(pair.a.words)), (pair.b, nd.array(pair.b.words)), nd.array(pair.target)

    def root(self, tree, words):
        x, states = self.embed(words), []
        for v, children in enumerate(tree.children):
            states.append(self.cell(x[v:v + 1], [states[w] for w in children]))
        return states[-1][0]

    def forward(self, a, b, target):
        return self.similarity(self.root(*a), self.root(*b), target)

    def losses(self, batch):
        return [self(*pair) for pair in batch]


@gdb.vertex
class WordVertex(gluon.HybridBlock):
    """A word as a number, and a list of the children's states -> the state of a vertex."""

    def __init__(self, embed, cell):
        super().__init__(prefix="")
        self.embed, self.cell = embed, cell

    def hybrid_forward(self, F, word, children):
        return self.cell(self.embed(word), children)


class VertexTreeLSTM(gluon.Block):
    """The same cells, marked."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.at_word = WordVertex(embedding(workload), ChildSumCell(workload))
        self.similarity = gdb.vertex(Similarity(workload))

    def prepare(self, pair):
        return pair

    def root(self, tree):
        states = []
        for word, children in zip(tree.words, tree.children):
            states.append(self.at_word(word, [states[w] for w in children]))
        return states[-1][0]

    def losses(self, batch):
        return [self.similarity(self.root(pair.a), self.root(pair.b), pair.target) for pair in batch]


class CavsTreeLSTM(cavs.VertexFunction):
    """The Cavs face: a graph is a pair; its root gathers the roots of both sentences and makes the loss."""

    def __init__(self, workload):
        hidden = workload.options["hidden"]
        super().__init__(state_shapes=[(hidden,), (hidden,)], prefix="")
        self.embed, self.similarity = embedding(workload), Similarity(workload)
        self.x2h, self.h2h, self.f2h = (dense(workload, name) for name in ("x2h", "h2h", "f2h"))

    def vertex(self, F, v):
        if v.is_root:
            (a, _), (b, _) = v.gather(0), v.gather(1)
            v.push(self.similarity(a, b, v.pull("target")))
            return
        u, i, o, f = F.split(self.x2h(self.embed(v.pull("word"))), num_outputs=4, axis=1)
        c_below = 0
        if not v.is_leaf:
            h_sum, _ = v.gather_sum()
            h_all, c_all = v.gather_all()
            u_below, i_below, o_below = F.split(self.h2h(h_sum), num_outputs=3, axis=1)
            u, i, o = u + u_below, i + i_below, o + o_below
            c_below = (F.sigmoid(v.spread(f) + self.f2h(h_all)) * c_all).sum()
        c = F.sigmoid(i) * F.tanh(u) + c_below
        v.scatter(F.sigmoid(o) * F.tanh(c), c)

    def prepare(self, pair):
        a, b = pair.a.parents, pair.b.parents
        top = len(a) + len(b)
        parents = [top if p < 0 else p for p in a] + [top if p < 0 else p + len(a) for p in b] + [-1]
        target = np.zeros((top + 1, pair.target.shape[1]), "float32")
        target[top] = pair.target
        return cavs.InputGraph.from_parents(parents), np.array([*pair.a.words, *pair.b.words, -1]), target

    def losses(self, batch):
        graphs, words, targets = zip(*batch)
        return self(list(graphs), {"word": np.concatenate(words), "target": np.concatenate(targets)}).pushed


def make_model(workload, variant):
    return {"vertex": VertexTreeLSTM, "cavs": CavsTreeLSTM}.get(variant, SiameseTreeLSTM)(workload)
