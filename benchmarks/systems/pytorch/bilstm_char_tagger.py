"""The tagger of bilstm-char-tagger in PyTorch."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

from .layers import embedding, linear, lstm


class Tagger(nn.Module):
    """One sentence at a time, its words one after the other, through PyTorch's own LSTMs."""

    def __init__(self, workload):
        super().__init__()
        self.embed, self.char_embed = embedding(workload), embedding(workload, "char_embed")
        self.chars, self.words = (lstm(workload, name, bidirectional=True) for name in ("chars", "words"))
        self.out = linear(workload, "out")

    def prepare(self, sentence):
        return (torch.tensor(sentence.words), [torch.tensor(chars) for chars in sentence.chars],
                torch.tensor(sentence.tags))

    def forward(self, words, chars, tags):
        last = [self.chars(self.char_embed(of_word))[1][0].view(1, -1) for of_word in chars]
        h, _ = self.words(torch.cat((self.embed(words), torch.cat(last)), dim=1))
        return functional.cross_entropy(self.out(h), tags, reduction="sum")

    def loss(self, batch):
        return torch.stack([self(*sentence) for sentence in batch]).sum()


class BatchedTagger(Tagger):
    """The characters of all words packed, then all sentences packed."""

    def loss(self, batch):
        words, chars, tags = zip(*batch)
        packed = pack_sequence([of_word for sentence in chars for of_word in sentence], enforce_sorted=False)
        _, (last, _) = self.chars(packed._replace(data=self.char_embed(packed.data)))       # (2, words, chars)
        x = torch.cat((self.embed(torch.cat(words)), last[0], last[1]), dim=1)
        packed = pack_sequence(x.split([len(sentence) for sentence in words]), enforce_sorted=False)
        h, _ = self.words(packed)
        targets = pack_sequence(tags, enforce_sorted=False)
        return functional.cross_entropy(self.out(h.data), targets.data, reduction="sum")


def make_model(workload, variant):
    return {"loop": Tagger, "batched": BatchedTagger}[variant](workload)
