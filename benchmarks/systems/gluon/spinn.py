"""Shift and reduce in Gluon."""

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import dense, embedding
from .treelstm_sst import NodeCell

nd = mx.nd


class WordCell(gluon.HybridBlock):
    """A word's vector -> its state."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.word = dense(workload, "word")

    def hybrid_forward(self, F, x):
        h, c = F.split(self.word(x), num_outputs=2, axis=1)
        return F.tanh(h), c


class TrackCell(gluon.HybridBlock):
    """The top of the buffer, the top two of the stack, and the state of the tracker -> its next state."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.track, self.again = dense(workload, "track"), dense(workload, "again")

    def hybrid_forward(self, F, top, first, second, h, c):
        gates = self.track(F.concat(top, first, second, dim=1)) + self.again(h)
        i, f, g, o = F.split(gates, num_outputs=4, axis=1)
        c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
        return F.sigmoid(o) * F.tanh(c), c


class Spinn(gluon.Block):
    """Plain Gluon: one sentence at a time; words are looked up, and losses of steps are made, once a sentence."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.word, self.track, self.node = WordCell(workload), TrackCell(workload), NodeCell(workload)
        self.choice, self.out = dense(workload, "choice"), dense(workload, "out")
        self.cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
        self.nothing = nd.zeros((1, workload.options["hidden"]))
        self.start = nd.zeros((1, workload.options["track"]))

    def prepare(self, tree):
        words = nd.array([w for w in tree.words if w >= 0])
        return tree, words, nd.array([left >= 0 for left in tree.left]), nd.array(tree.labels[-1:])

    def run(self, tree, buffer, step):
        """The state of the root; `step(arrays, reduces) -> (h, c)` of the tracker."""
        buffer, stack, state = buffer[::-1], [], (self.start, self.start)
        for reduces in [left >= 0 for left in tree.left]:
            seen = [part[-k][0] if len(part) >= k else self.nothing
                    for part, k in ((buffer, 1), (stack, 1), (stack, 2))]
            state = step((*seen, *state), reduces)
            if reduces:
                right, left = stack.pop(), stack.pop()
                stack.append(self.node(*left, *right, state[0]))
            else:
                stack.append(buffer.pop())
        return stack[-1]

    def forward(self, tree, words, reduces, label):
        x, tracks = self.embed(words), []

        def step(arrays, _):
            tracks.append(self.track(*arrays))
            return tracks[-1]

        h, _ = self.run(tree, [self.word(x[k:k + 1]) for k in range(tree.num_leaves)], step)
        choices = self.choice(nd.concat(*[h for h, _ in tracks], dim=0))
        return self.cross_entropy(choices, reduces).sum() + self.cross_entropy(self.out(h), label)

    def losses(self, batch):
        return [self(*sample) for sample in batch]


@gdb.vertex
class WordVertex(gluon.HybridBlock):
    """A word as a number -> its state."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.embed, self.cell = model.embed, model.word

    def hybrid_forward(self, F, word):
        return self.cell(self.embed(word))


@gdb.vertex
class TrackVertex(gluon.HybridBlock):
    """What the tracker sees, and whether the step reduces as a number -> its next state and its loss."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.cell, self.choice, self.cross_entropy = model.track, model.choice, model.cross_entropy

    def hybrid_forward(self, F, reduces, top, first, second, h, c):
        h, c = self.cell(top, first, second, h, c)
        return h, c, self.cross_entropy(self.choice(h), reduces)


@gdb.vertex
class Head(gluon.HybridBlock):
    """The state of the root, and the label as a number -> the loss."""

    def __init__(self, model):
        super().__init__(prefix="")
        self.out, self.cross_entropy = model.out, model.cross_entropy

    def hybrid_forward(self, F, h, label):
        return self.cross_entropy(self.out(h), label)


class VertexSpinn(Spinn):
    """The same cells, marked; words, steps and labels are numbers."""

    def __init__(self, workload):
        super().__init__(workload)
        self.at_word, self.at_step, self.head = WordVertex(self), TrackVertex(self), Head(self)
        gdb.vertex(self.node)

    def prepare(self, tree):
        return (tree,)

    def forward(self, tree):
        losses = []

        def step(arrays, reduces):
            h, c, loss = self.at_step(int(reduces), *arrays)
            losses.append(loss)
            return h, c

        h, _ = self.run(tree, [self.at_word(word) for word in tree.words if word >= 0], step)
        return nd.add_n(*losses, self.head(h, tree.labels[-1]))


def make_model(workload, variant):
    return {"vertex": VertexSpinn}.get(variant, Spinn)(workload)
