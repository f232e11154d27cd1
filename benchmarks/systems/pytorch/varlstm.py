"""The language model of varlstm in PyTorch."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

from .layers import embedding, linear, lstm


class LanguageModel(nn.Module):
    """One sentence at a time, through PyTorch's own LSTM."""

    def __init__(self, workload):
        super().__init__()
        self.embed = embedding(workload)
        self.lstm, self.out = lstm(workload, "lstm"), linear(workload, "out")

    def prepare(self, sentence):
        return torch.tensor(sentence[:-1]), torch.tensor(sentence[1:])

    def forward(self, words, targets):
        h, _ = self.lstm(self.embed(words))
        return functional.cross_entropy(self.out(h), targets, reduction="sum")

    def loss(self, batch):
        return torch.stack([self(words, targets) for words, targets in batch]).sum()


class BatchedLanguageModel(LanguageModel):
    """All sentences packed: step t of all that are long enough is one product."""

    def loss(self, batch):
        words, targets = (pack_sequence(part, enforce_sorted=False) for part in zip(*batch))
        h, _ = self.lstm(words._replace(data=self.embed(words.data)))
        return functional.cross_entropy(self.out(h.data), targets.data, reduction="sum")


def make_model(workload, variant):
    return {"loop": LanguageModel, "batched": BatchedLanguageModel}[variant](workload)
