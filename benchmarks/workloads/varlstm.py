"""An LSTM language model on the sentences of UD English EWT, one sentence a sample, of any length.

    step     h, c = LSTM(the vector of word t, h, c)     loss = cross entropy of softmax(out(h)) and word t + 1

The LSTM has the parameters of Gluon's and PyTorch's: i2h and h2h, both with a bias; gates i, f, g, o.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from .base import Product, Workload, chosen, lstm_shapes, random_parameters, read_text

DEFAULTS = {"batch": 64, "hidden": 200, "embed": 200, "words": 5000}
UNKNOWN, BORDER = 0, 1          # a rare word; the begin and the end of a sentence

Sentence = list[int]            # begins and ends with BORDER


def read(data: Path, count: int, num_words: int) -> list[Sentence]:
    """Sentences of the training part. Word numbers are by frequency; the rare ones are UNKNOWN."""
    sentences = []
    for block in read_text(data / "ud_ewt" / "en_ewt-ud-train.conllu").strip().split("\n\n"):
        rows = [line.split("\t") for line in block.split("\n") if not line.startswith("#")]
        sentences.append([row[1].lower() for row in rows if row[0].isdigit()])
    frequent = Counter(word for sentence in sentences for word in sentence).most_common(num_words - 2)
    number = {word: k + 2 for k, (word, _) in enumerate(frequent)}
    return [[BORDER, *(number.get(word, UNKNOWN) for word in sentence), BORDER]
            for sentence in chosen(sentences, count)]


def generate(count: int, num_words: int) -> list[Sentence]:
    """Sentences with the lengths of the real ones: 16 words on average, very different."""
    rng = np.random.RandomState(0)
    lengths = np.clip(rng.gamma(1.6, 10.5, count), 1, 159).astype(int)
    return [[BORDER, *(rng.zipf(1.2, length) % num_words).tolist(), BORDER] for length in lengths]


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    hidden, embed, num_words = options["hidden"], options["embed"], options["words"]
    count = num_batches * options["batch"]
    sentences = generate(count, num_words) if data is None else read(data, count, num_words)
    params = random_parameters({"embed_weight": (num_words, embed), **lstm_shapes("lstm_l0", embed, hidden),
                                "out_weight": (num_words, hidden), "out_bias": (num_words,)})

    def products(batch: list[Sentence]) -> list[Product]:
        steps = sum(len(sentence) - 1 for sentence in batch)
        return [(steps, embed, 4 * hidden), (steps - len(batch), hidden, 4 * hidden), (steps, hidden, num_words)]

    return Workload(sentences, params, products, real=data is not None)
