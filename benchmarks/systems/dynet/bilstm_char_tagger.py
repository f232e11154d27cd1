"""The tagger of bilstm-char-tagger in DyNet."""

import dynet as dy

from .lstm import LSTM


class Tagger:
    def __init__(self, workload, params):
        self.params = params
        self.chars_left, self.chars_right, self.words_left, self.words_right = self.lstms = [
            LSTM(params, name) for name in ("chars_l0", "chars_r0", "words_l0", "words_r0")]

    def word(self, word, chars):
        embed = self.params["char_embed_weight"]
        x = [embed[char] for char in chars]
        return dy.concatenate([self.params["embed_weight"][word], self.chars_left.states(x)[-1],
                               self.chars_right.states(x[::-1])[-1]])

    def loss(self, batch):
        out, out_bias = self.params["out_weight"], self.params["out_bias"]
        for lstm in self.lstms:
            lstm.begin()
        losses = []
        for sentence in batch:
            x = list(map(self.word, sentence.words, sentence.chars))
            states = zip(self.words_left.states(x), self.words_right.states(x[::-1])[::-1])
            scores = [dy.affine_transform([out_bias, out, dy.concatenate([left, right])]) for left, right in states]
            losses += map(dy.pickneglogsoftmax, scores, sentence.tags)
        return dy.esum(losses)


make_model = Tagger
