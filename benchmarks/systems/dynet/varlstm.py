"""The language model of varlstm in DyNet."""

import dynet as dy

from .lstm import LSTM


class LanguageModel:
    def __init__(self, workload, params):
        self.params = params
        self.lstm = LSTM(params, "lstm_l0")

    def loss(self, batch):
        embed, out, out_bias = (self.params[name] for name in ("embed_weight", "out_weight", "out_bias"))
        self.lstm.begin()
        losses = []
        for sentence in batch:
            states = self.lstm.states([embed[word] for word in sentence[:-1]])
            losses += [dy.pickneglogsoftmax(dy.affine_transform([out_bias, out, h]), word)
                       for h, word in zip(states, sentence[1:])]
        return dy.esum(losses)


make_model = LanguageModel
