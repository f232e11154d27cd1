"""The language model of varlstm in Gluon."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import dense, embedding, lstm_cell

nd = mx.nd


class LanguageModel(gluon.Block):
    """Plain Gluon: one sentence at a time; words are looked up, and losses are made, once a sentence."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed = embedding(workload)
        self.cell = lstm_cell(workload, "lstm_l0")
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()
        self.zeros = [nd.zeros((1, workload.options["hidden"]))] * 2

    def prepare(self, sentence):
        return nd.array(sentence[:-1]), nd.array(sentence[1:])

    def forward(self, words, targets):
        x, states, made = self.embed(words), self.zeros, []
        for t in range(len(words)):
            h, states = self.cell(x[t:t + 1], states)
            made.append(h)
        return self.cross_entropy(self.out(nd.concat(*made, dim=0)), targets).sum()

    def losses(self, batch):
        return [self(words, targets) for words, targets in batch]


@gdb.vertex
class StepVertex(gluon.HybridBlock):
    """A word and the next one as numbers, and a state -> the next state, and the loss of this step."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed, self.cell = embedding(workload), lstm_cell(workload, "lstm_l0")
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F, word, following, h, c):
        _, (h, c) = self.cell(self.embed(word), [h, c])
        return h, c, self.cross_entropy(self.out(h), following)


class VertexLanguageModel(gluon.Block):
    """A marked step; words are numbers, and the loss of a sentence is the sum of its steps'."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.step = StepVertex(workload)
        hidden = workload.options["hidden"]
        self.zeros = nd.zeros((1, hidden))

    def prepare(self, sentence):
        return sentence

    def forward(self, sentence):
        h = c = self.zeros
        losses = []
        for word, following in zip(sentence, sentence[1:]):
            h, c, loss = self.step(word, following, h, c)
            losses.append(loss)
        return nd.add_n(*losses)

    def losses(self, batch):
        return [self(sentence) for sentence in batch]


class CavsLanguageModel(cavs.VertexFunction):
    """The Cavs face: chains instead of calls."""

    def __init__(self, workload):
        hidden = workload.options["hidden"]
        super().__init__(state_shapes=[(hidden,), (hidden,)], prefix="")
        self.embed, self.cell = embedding(workload), lstm_cell(workload, "lstm_l0")
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def vertex(self, F, v):
        h, states = self.cell(self.embed(v.pull("word")), list(v.gather(0)))
        v.scatter(*states)
        v.push(self.cross_entropy(self.out(h), v.pull("following")))

    def prepare(self, sentence):
        return cavs.InputGraph.chain(len(sentence) - 1), np.array(sentence)

    def losses(self, batch):
        graphs, sentences = zip(*batch)
        return self(list(graphs), {"word": np.concatenate([words[:-1] for words in sentences]),
                                   "following": np.concatenate([words[1:] for words in sentences])}).pushed


def make_model(workload, variant):
    return {"vertex": VertexLanguageModel, "cavs": CavsLanguageModel}.get(variant, LanguageModel)(workload)
