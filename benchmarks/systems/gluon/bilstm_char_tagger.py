"""The tagger of bilstm-char-tagger in Gluon."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from .layers import ChainFunction, dense, embedding, lstm_cell

nd = mx.nd


class Tagger(gluon.Block):
    """Plain Gluon: one sentence at a time; characters and words are looked up at once, and so are losses made."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed, self.char_embed = embedding(workload), embedding(workload, "char_embed")
        self.chars, self.words = ([lstm_cell(workload, f"{name}_{side}") for side in ("l0", "r0")]
                                  for name in ("chars", "words"))
        for cell in self.chars + self.words:
            self.register_child(cell)
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def prepare(self, sentence):
        return nd.array(sentence.words), [nd.array(chars) for chars in sentence.chars], nd.array(sentence.tags)

    def walk(self, cells, rows):
        """The states of both LSTMs behind each of the rows."""
        both = []
        for cell, order in zip(cells, (rows, rows[::-1])):
            states, made = cell.begin_state(1), []
            for x in order:
                h, states = cell(x, states)
                made.append(h)
            both.append(made)
        forward, backward = both
        return forward, backward[::-1]

    def forward(self, words, chars, tags):
        vectors, rows = self.embed(words), []
        for k, of_word in enumerate(chars):
            x = self.char_embed(of_word)
            forward, backward = self.walk(self.chars, [x[j:j + 1] for j in range(len(of_word))])
            rows.append(nd.concat(vectors[k:k + 1], forward[-1], backward[0], dim=1))
        forward, backward = self.walk(self.words, rows)
        h = nd.concat(nd.concat(*forward, dim=0), nd.concat(*backward, dim=0), dim=1)
        return self.cross_entropy(self.out(h), tags).sum()

    def losses(self, batch):
        return [self(*sentence) for sentence in batch]


@gdb.vertex
class CharVertex(gluon.HybridBlock):
    """A character as a number and a state -> the next state."""

    def __init__(self, embed, cell):
        super().__init__(prefix="")
        self.embed, self.cell = embed, cell

    def hybrid_forward(self, F, char, h, c):
        return self.cell(self.embed(char), [h, c])[1]


@gdb.vertex
class WordVertex(gluon.HybridBlock):
    """A word as a number and the states of its characters -> the word's vector."""

    def __init__(self, embed):
        super().__init__(prefix="")
        self.embed = embed

    def hybrid_forward(self, F, word, forward, backward):
        return F.concat(self.embed(word), forward, backward, dim=1)


@gdb.vertex
class TagVertex(gluon.HybridBlock):
    """A step from left to right that also makes the loss of its word.

    The tag as a number, the word's vector, the state from right to left, and the state so far.
    """

    def __init__(self, workload):
        super().__init__(prefix="")
        self.cell = lstm_cell(workload, "words_l0")
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F, tag, x, backward, h, c):
        _, (h, c) = self.cell(x, [h, c])
        return h, c, self.cross_entropy(self.out(F.concat(h, backward, dim=1)), tag)


class VertexTagger(gluon.Block):
    """Marked cells; characters, words and tags are numbers, and the loss of a sentence is the sum of its words'."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.char_embed = embedding(workload, "char_embed")
        self.char_left, self.char_right = (CharVertex(self.char_embed, lstm_cell(workload, f"chars_{side}"))
                                           for side in ("l0", "r0"))
        self.word = WordVertex(embedding(workload))
        self.word_right, self.tag = gdb.vertex(lstm_cell(workload, "words_r0")), TagVertex(workload)
        self.char_zeros, self.word_zeros = (nd.zeros((1, workload.options[name])) for name in ("chars", "hidden"))

    def prepare(self, sentence):
        return sentence

    def last_state(self, step, chars):
        h = c = self.char_zeros
        for char in chars:
            h, c = step(char, h, c)
        return h

    def forward(self, sentence):
        rows = [self.word(word, self.last_state(self.char_left, chars), self.last_state(self.char_right, chars[::-1]))
                for word, chars in zip(sentence.words, sentence.chars)]
        backward, states = [], [self.word_zeros, self.word_zeros]
        for x in reversed(rows):
            h, states = self.word_right(x, states)
            backward.append(h)
        h = c = self.word_zeros
        losses = []
        for tag, x, from_right in zip(sentence.tags, rows, reversed(backward)):
            h, c, loss = self.tag(tag, x, from_right, h, c)
            losses.append(loss)
        return nd.add_n(*losses)

    def losses(self, batch):
        return [self(sentence) for sentence in batch]


class CavsTagger(gluon.Block):
    """Four runs over chains: characters and words, from left to right and from right to left."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.embed, self.char_embed = embedding(workload), embedding(workload, "char_embed")
        self.chars_l0, self.chars_r0 = (ChainFunction(workload, name, self.char_embed, only_last=True)
                                        for name in ("chars_l0", "chars_r0"))
        self.words_l0, self.words_r0 = (ChainFunction(workload, name) for name in ("words_l0", "words_r0"))
        self.out, self.cross_entropy = dense(workload, "out"), gluon.loss.SoftmaxCrossEntropyLoss()

    def prepare(self, sentence):
        chains = [cavs.InputGraph.chain(len(chars)) for chars in sentence.chars]
        return (chains, cavs.InputGraph.chain(len(chains)), np.concatenate(sentence.chars),
                np.concatenate([chars[::-1] for chars in sentence.chars]), sentence.words, sentence.tags)

    def losses(self, batch):
        char_chains, word_chains, chars, chars_back, words, tags = zip(*batch)
        words, tags = np.concatenate(words), np.concatenate(tags)
        char_chains = cavs.InputGraph.batch([chain for chains in char_chains for chain in chains])
        word_chains = cavs.InputGraph.batch(list(word_chains))
        starts = word_chains.sample_offsets
        back = nd.array(np.repeat(starts[:-1] + starts[1:] - 1, np.diff(starts)) - np.arange(len(words)))

        left = self.chars_l0([char_chains], {"x": np.concatenate(chars)}).pushed
        right = self.chars_r0([char_chains], {"x": np.concatenate(chars_back)}).pushed
        x = nd.concat(self.embed(nd.array(words)), left, right, dim=1)
        forward = self.words_l0([word_chains], {"x": x}).pushed
        backward = nd.take(self.words_r0([word_chains], {"x": nd.take(x, back)}).pushed, back)
        return self.cross_entropy(self.out(nd.concat(forward, backward, dim=1)), nd.array(tags))


def make_model(workload, variant):
    return {"vertex": VertexTagger, "cavs": CavsTagger}.get(variant, Tagger)(workload)
