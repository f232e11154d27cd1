"""Models of trees and graphs as Gluon users write them: for ONE sample, with ordinary Python control flow.

`MODELS` names every model with the functions that make its samples and its loss. The few lines that know of
gluon_dynbatch are decorators.
"""

from typing import Any, Callable, NamedTuple

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

nn = gluon.nn
EMBED, HIDDEN, CLASSES, VOCAB = 4, 5, 3, 20


class Case(NamedTuple):
    net: Callable[[], Any]
    samples: Callable[[Any, str], list]             # (generator, dtype) -> list of samples
    loss: Callable[..., tuple]                      # (net, *sample) -> list of outputs, loss
    options: dict = {}                              # optimiser -> options that differ from those of the others


# ---- trees -----------------------------------------------------------------------------------


class Tree:
    """A vertex of a dependency tree: the number of its word, and its children."""

    def __init__(self, idx, children=()):
        self.idx, self.children = idx, list(children)


def random_tree(words, rng):
    """Every word hangs from an earlier one, in an order that is not that of the words."""
    nodes = [Tree(int(i)) for i in rng.permutation(words)]
    for k in range(1, words):
        nodes[rng.randint(max(0, k - 4), k)].children.append(nodes[k])
    return nodes[0]


def random_pairs(count, rng, dtype="float32", words=(3, 8)):
    """Pairs of sentences as (words, words, tree, tree, distribution of the score)."""
    pairs = []
    for _ in range(count):
        lengths = [int(rng.randint(*words)) for _ in range(2)]
        sentences = [mx.nd.array(rng.randint(0, VOCAB, n)) for n in lengths]
        target = rng.dirichlet([1.0] * CLASSES)
        pairs.append((*sentences, *[random_tree(n, rng) for n in lengths], mx.nd.array([target], dtype=dtype)))
    return pairs


class ChildSumLSTM(gluon.Block):
    """Child-sum Tree-LSTM: recurses over a tree and calls operators at every node."""

    def __init__(self, hidden, embed, **kwargs):
        super().__init__(**kwargs)
        self._hidden = hidden
        with self.name_scope():
            for name, rows, columns in (("i2h", 4 * hidden, embed), ("hs2h", 3 * hidden, hidden),
                                        ("hc2h", hidden, hidden)):
                setattr(self, name + "_weight", self.params.get(name + "_weight", shape=(rows, columns)))
                setattr(self, name + "_bias", self.params.get(name + "_bias", shape=(rows,), init="zeros"))

    def forward(self, F, inputs, tree):
        states = [self.forward(F, inputs, child)[1] for child in tree.children]
        with inputs.context as ctx:
            return self.node_forward(F, F.expand_dims(inputs[tree.idx], axis=0), states, *self.parameters(ctx))

    def parameters(self, ctx):
        return [p.data(ctx) for p in (self.i2h_weight, self.hs2h_weight, self.hc2h_weight,
                                      self.i2h_bias, self.hs2h_bias, self.hc2h_bias)]

    def node_forward(self, F, x, states, i2h_weight, hs2h_weight, hc2h_weight, i2h_bias, hs2h_bias, hc2h_bias):
        i2h = F.FullyConnected(data=x, weight=i2h_weight, bias=i2h_bias, num_hidden=4 * self._hidden)
        parts = F.split(i2h, num_outputs=4)
        iuo = F.concat(*[parts[k] for k in (0, 2, 3)], dim=1)
        if states:
            hs = F.add_n(*[h for h, _ in states])                                           # (1, hidden)
            hc = F.concat(*[F.expand_dims(h, axis=1) for h, _ in states], dim=1)            # (1, children, hidden)
            cs = F.concat(*[F.expand_dims(c, axis=1) for _, c in states], dim=1)
            f = F.FullyConnected(data=hc, weight=hc2h_weight, bias=hc2h_bias, num_hidden=self._hidden, flatten=False)
            f = F.Activation(F.broadcast_add(F.expand_dims(parts[1], axis=1), f), act_type="sigmoid")
            hs2h = F.FullyConnected(data=hs, weight=hs2h_weight, bias=hs2h_bias, num_hidden=3 * self._hidden)
            iuo = F._internal._plus(iuo, hs2h, name="iuo")
        i, u, o = F.SliceChannel(iuo, num_outputs=3)
        c = F._internal._mul(F.Activation(i, act_type="sigmoid"), F.Activation(u, act_type="tanh"))
        if states:
            c = F.sum(F.broadcast_mul(f, cs), axis=1) + c
        h = F._internal._mul(F.Activation(o, act_type="sigmoid"), F.Activation(c, act_type="tanh"), name="out")
        return h, [h, c]


class VertexChildSumLSTM(ChildSumLSTM):
    """The same; only the function of one node is marked."""

    def forward(self, F, inputs, tree):
        states = [self.forward(F, inputs, child)[1] for child in tree.children]
        h, c = self.node(F, inputs[tree.idx], [h for h, _ in states], [c for _, c in states])
        return h, [h, c]

    @gdb.vertex
    def node(self, F, x, children_h, children_c):
        states = list(zip(children_h, children_c))
        return self.node_forward(F, F.expand_dims(x, axis=0), states, *self.parameters(x.context))[1]


class Similarity(gluon.Block):
    """Distance and angle of two sentence vectors -> log probabilities of the score."""

    def __init__(self, hidden, classes, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.wh = nn.Dense(4)
            self.wp = nn.Dense(classes)

    def forward(self, F, left, right):
        angle = F.broadcast_mul(left, right)
        distance = F.abs(F.add(left, -right))
        return F.log_softmax(self.wp(F.sigmoid(self.wh(F.concat(angle, distance, dim=1)))))


class SimilarityTreeLSTM(gluon.Block):
    def __init__(self, cell=ChildSumLSTM, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(VOCAB, EMBED)
            self.lstm = cell(HIDDEN, EMBED)
            self.similarity = Similarity(HIDDEN, CLASSES)

    def forward(self, left, right, left_tree, right_tree):
        _, (_, left) = self.lstm(mx.nd, self.embed(left), left_tree)
        _, (_, right) = self.lstm(mx.nd, self.embed(right), right_tree)
        return self.similarity(mx.nd, left, right)


def similarity_loss(net, left, right, left_tree, right_tree, target):
    out = net(left, right, left_tree, right_tree)
    return [out], gluon.loss.KLDivLoss()(out, target)


# ---- binary trees with marked cells ----------------------------------------------------------


@gdb.vertex
class LeafCell(gluon.HybridBlock):
    """A word -> (h, c)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(VOCAB, EMBED)
            self.gates = nn.Dense(3 * HIDDEN, in_units=EMBED)

    def hybrid_forward(self, F, word):
        i, o, u = F.split(self.gates(self.embed(word)), num_outputs=3, axis=1)
        c = F.sigmoid(i) * F.tanh(u)
        return F.sigmoid(o) * F.tanh(c), c


@gdb.vertex
class InnerCell(gluon.HybridBlock):
    """Two (h, c) -> (h, c)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.gates = nn.Dense(5 * HIDDEN, in_units=2 * HIDDEN)

    def hybrid_forward(self, F, left, right):
        (hl, cl), (hr, cr) = left, right
        i, fl, fr, o, u = F.split(self.gates(F.concat(hl, hr, dim=1)), num_outputs=5, axis=1)
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * cl + F.sigmoid(fr) * cr
        return F.sigmoid(o) * F.tanh(c), c


class BinaryTreeLSTM(gluon.Block):
    """Scores of every node. A tree is (label, word) or (label, left, right)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.leaf, self.inner = LeafCell(), InnerCell()
            self.out = nn.Dense(CLASSES, in_units=HIDDEN)

    def forward(self, tree):
        scores = []

        def state(node):
            made = self.leaf(node[1]) if len(node) == 2 else self.inner(state(node[1]), state(node[2]))
            scores.append((self.out(made[0]), node[0]))
            return made

        state(tree)
        return scores


def random_binary_trees(rng, dtype):
    def tree(leaves):
        label = int(rng.randint(CLASSES))
        if leaves == 1:
            return label, int(rng.randint(VOCAB))
        left = int(rng.randint(1, leaves))
        return label, tree(left), tree(leaves - left)

    return [(tree(n),) for n in (1, 4, 6, 3)]


def node_losses(net, tree):
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    scores = net(tree)
    losses = [cross_entropy(score, mx.nd.array([label])) for score, label in scores]
    return [score for score, _ in scores], mx.nd.add_n(*losses)


# ---- one hybridized block for each number of children ----------------------------------------


class ArityCell(gluon.HybridBlock):
    """A block of `arity` children; all arities use the same parameters."""

    def __init__(self, arity, **kwargs):
        super().__init__(**kwargs)
        self._arity = arity
        self.weight = self.params.get("weight", shape=(HIDDEN, HIDDEN))
        self.bias = self.params.get("bias", shape=(HIDDEN,), init="zeros")
        self.table = self.params.get("table", shape=(VOCAB, HIDDEN))

    def hybrid_forward(self, F, word, *children, weight, bias, table):
        x = F.Embedding(word, table, input_dim=VOCAB, output_dim=HIDDEN)
        below = F.add_n(*children) / self._arity if children else x
        return F.tanh(x + F.FullyConnected(below, weight, bias, num_hidden=HIDDEN))


class ArityTree(gluon.Block):
    def __init__(self, arities=6, **kwargs):
        super().__init__(**kwargs)
        self._by_arity = {}
        with self.name_scope():
            for arity in range(arities):
                shared = self._by_arity[0].params if arity else None
                cell = self._by_arity[arity] = ArityCell(arity, params=shared)
                cell.hybridize()
                self.register_child(cell, f"arity{arity}")
            self.out = nn.Dense(1, in_units=HIDDEN)

    def forward(self, words, tree):
        def state(node):
            children = [state(child) for child in node.children]
            return self._by_arity[len(children)](words[node.idx], *children)

        return self.out(state(tree))


def arity_samples(rng, dtype):
    samples = []
    for n in (1, 5, 7, 6):
        words = [mx.nd.array([w]) for w in rng.randint(0, VOCAB, n)]
        samples.append((words, random_tree(n, rng), mx.nd.array([[rng.normal()]], dtype=dtype)))
    return samples


def arity_loss(net, words, tree, target):
    out = net(words, tree)
    return [out], gluon.loss.L2Loss()(out, target)


# ---- graphs ----------------------------------------------------------------------------------


class GraphNet(gluon.Block):
    """Rounds of messages along the edges of an undirected graph; the sum of all vertices is read out."""

    def __init__(self, rounds=3, **kwargs):
        super().__init__(**kwargs)
        self._rounds = rounds
        with self.name_scope():
            self.enter = nn.Dense(HIDDEN, activation="tanh")
            self.message = nn.Dense(HIDDEN, use_bias=False)
            self.update = nn.Dense(HIDDEN)
            self.out = nn.Dense(1)

    def forward(self, features, neighbours):
        states = [self.enter(x) for x in features]
        for _ in range(self._rounds):
            messages = [self.message(h) for h in states]
            heard = [mx.nd.add_n(*[messages[u] for u in near]) if near else mx.nd.zeros_like(h)
                     for near, h in zip(neighbours, states)]
            states = [h + mx.nd.relu(self.update(mx.nd.concat(h, m, dim=1))) for h, m in zip(states, heard)]
        return self.out(mx.nd.add_n(*states) / len(states))


def random_graphs(rng, dtype):
    samples = []
    for n in (1, 4, 6):
        neighbours = [[] for _ in range(n)]
        for v in range(1, n):
            for u in {int(rng.randint(v)) for _ in range(2)}:
                neighbours[u].append(v)
                neighbours[v].append(u)
        features = [mx.nd.array(rng.normal(size=(1, EMBED)), dtype=dtype) for _ in range(n)]
        samples.append((features, neighbours, mx.nd.array([[rng.normal()]], dtype=dtype)))
    return samples


MODELS = {
    "similarity tree": Case(SimilarityTreeLSTM, lambda rng, dtype: random_pairs(4, rng, dtype), similarity_loss),
    "similarity tree, marked node": Case(lambda: SimilarityTreeLSTM(VertexChildSumLSTM),
                                         lambda rng, dtype: random_pairs(4, rng, dtype), similarity_loss),
    "binary tree, marked cells": Case(BinaryTreeLSTM, random_binary_trees, node_losses),
    "a block for each arity": Case(ArityTree, arity_samples, arity_loss),
    # With the rate of the others it diverges to 1e34 in three steps: rounding is all that is left to compare.
    "graph network": Case(GraphNet, random_graphs, arity_loss, {"sgd": {"learning_rate": 0.05}}),
}
