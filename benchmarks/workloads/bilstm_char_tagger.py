"""A tagger for the named entities of WikiNER: characters and words through bidirectional LSTMs.

    word     x = [its vector; last state of an LSTM over its characters; the same over its characters backwards]
    tag      [forward; backward state of LSTMs over the sentence's x]
             loss = cross entropy of softmax(out(..)) and the tag of the word
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import Product, Workload, chosen, lookup_table, lstm_shapes, random_parameters, read_text

DEFAULTS = {"batch": 16, "hidden": 100, "embed": 100, "chars": 25, "char_embed": 20}
RARE = 5                        # words that are less frequent share one vector
GENERATED_WORDS, GENERATED_CHARS, GENERATED_TAGS = 5_500, 260, 8


@dataclass
class Sentence:
    words: list[int]            # 0 for a rare word
    chars: list[list[int]]      # of each word
    tags: list[int]


@dataclass
class Sizes:
    words: int
    chars: int
    tags: int


def read(data: Path, count: int) -> tuple[list[Sentence], Sizes]:
    """Sentences of the training part, and how many words, characters and tags it has."""
    lines = [[token.rsplit("|", 1) for token in line.split(" ")]
             for line in read_text(data / "wikiner" / "train.txt").strip().split("\n")]
    counts = Counter(word for line in lines for word, _ in line)
    words = {word: k + 1 for k, word in enumerate(w for w, n in counts.items() if n >= RARE)}
    chars = lookup_table("".join(counts))
    tags = lookup_table([tag for line in lines for _, tag in line])
    sentences = [Sentence([words.get(word, 0) for word, _ in line], [[chars[c] for c in word] for word, _ in line],
                          [tags[tag] for _, tag in line]) for line in chosen(lines, count)]
    return sentences, Sizes(len(words) + 1, len(chars), len(tags))


def generate(count: int) -> tuple[list[Sentence], Sizes]:
    """Sentences with the lengths of the real ones: 25 words on average, of 4.6 characters."""
    rng = np.random.RandomState(0)
    sentences = []
    for length in np.clip(rng.gamma(4.5, 5.6, count), 1, 144).astype(int):
        sizes = np.clip(rng.gamma(3.0, 1.7, length), 1, 25).astype(int)
        sentences.append(Sentence((rng.zipf(1.3, length) % GENERATED_WORDS).tolist(),
                                  [(rng.zipf(1.4, size) % GENERATED_CHARS).tolist() for size in sizes],
                                  rng.randint(0, GENERATED_TAGS, length).tolist()))
    return sentences, Sizes(GENERATED_WORDS, GENERATED_CHARS, GENERATED_TAGS)


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    count = num_batches * options["batch"]
    sentences, sizes = generate(count) if data is None else read(data, count)
    hidden, embed, chars, char_embed = (options[name] for name in ("hidden", "embed", "chars", "char_embed"))
    word_size = embed + 2 * chars
    shapes: dict[str, tuple[int, ...]] = {"embed_weight": (sizes.words, embed),
                                          "char_embed_weight": (sizes.chars, char_embed)}
    for side in ("l0", "r0"):                       # from left to right, and from right to left
        shapes.update(lstm_shapes(f"chars_{side}", char_embed, chars))
        shapes.update(lstm_shapes(f"words_{side}", word_size, hidden))
    params = random_parameters({**shapes, "out_weight": (sizes.tags, 2 * hidden), "out_bias": (sizes.tags,)})

    def products(batch: list[Sentence]) -> list[Product]:
        words = sum(len(s.words) for s in batch)
        letters = sum(len(word) for s in batch for word in s.chars)
        one_way = [(letters, char_embed, 4 * chars), (letters - words, chars, 4 * chars),
                   (words, word_size, 4 * hidden), (words - len(batch), hidden, 4 * hidden)]
        return one_way * 2 + [(words, 2 * hidden, sizes.tags)]

    return Workload(sentences, params, products, real=data is not None)
