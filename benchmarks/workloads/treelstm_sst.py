"""Binary Tree-LSTM on the Stanford Sentiment Treebank: a loss on every node of every tree.

    leaf     u, i, o = leaf(x)                      c = s(i) tanh(u)
    node     u, i, o, fl, fr = node([hl; hr])       c = s(i) tanh(u) + s(fl) cl + s(fr) cr
    both     h = s(o) tanh(c)                       loss = cross entropy of softmax(out(h)) and the node's label
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import Product, Workload, chosen, lookup_table, random_parameters, read_text

DEFAULTS = {"batch": 64, "hidden": 150, "embed": 300}
CLASSES = 5
GENERATED_WORDS = 18_000


@dataclass
class Tree:
    """Nodes with children before parents; the last one is the root. A leaf has a word, and children -1."""

    words: list[int]        # -1 at inner nodes
    left: list[int]
    right: list[int]
    labels: list[int]

    @property
    def num_leaves(self) -> int:
        return (len(self.words) + 1) // 2


def parse(line: str, table: dict[str, int]) -> Tree:
    """A tree from its brackets: (3 (2 A) (3 (4 fine) (2 film)))."""
    tree = Tree([], [], [], [])
    labels: list[int] = []          # of nodes whose bracket is open
    done: list[int] = []            # nodes that wait for their parent
    for opened, word in re.findall(r"\((\d) |([^() ]+)\)|\)", line):
        if opened:
            labels.append(int(opened))
            continue
        right, left = (-1, -1) if word else (done.pop(), done.pop())
        done.append(len(tree.words))
        tree.words.append(table[word] if word else -1)
        tree.left.append(left)
        tree.right.append(right)
        tree.labels.append(labels.pop())
    return tree


def read(data: Path, count: int) -> tuple[list[Tree], int]:
    """Trees of the training part, and the number of its words."""
    lines = read_text(data / "sst" / "train.txt").strip().split("\n")
    table = lookup_table(re.findall(r"([^() ]+)\)", "\n".join(lines)))
    return [parse(line, table) for line in chosen(lines, count)], len(table)


def generate(count: int) -> tuple[list[Tree], int]:
    """Trees with the sizes of the treebank, 19 words on average; neighbours are joined until one node is left."""
    rng = np.random.RandomState(0)
    trees = []
    for words in np.clip(rng.gamma(4.2, 4.55, count), 2, 56).astype(int):
        heads = [str(word) for word in rng.zipf(1.3, words) % GENERATED_WORDS]
        heads = [f"({label} {word})" for label, word in zip(rng.randint(0, CLASSES, words), heads)]
        while len(heads) > 1:
            k = int(rng.triangular(0, len(heads) - 2, len(heads) - 1.999))     # parses of English branch to the right
            heads[k:k + 2] = [f"({rng.randint(0, CLASSES)} {heads[k]} {heads[k + 1]})"]
        trees.append(parse(heads[0], _Numbers()))
    return trees, GENERATED_WORDS


class _Numbers(dict[str, int]):
    """A table for words that are numbers."""

    def __missing__(self, word: str) -> int:
        return int(word)


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    count = num_batches * options["batch"]
    trees, num_words = generate(count) if data is None else read(data, count)
    hidden, embed = options["hidden"], options["embed"]
    params = random_parameters({
        "embed_weight": (num_words, embed), "leaf_weight": (3 * hidden, embed), "leaf_bias": (3 * hidden,),
        "node_weight": (5 * hidden, 2 * hidden), "node_bias": (5 * hidden,),
        "out_weight": (CLASSES, hidden), "out_bias": (CLASSES,)})

    def products(batch: list[Tree]) -> list[Product]:
        leaves = sum(tree.num_leaves for tree in batch)
        nodes = leaves - len(batch)
        return [(leaves, embed, 3 * hidden), (nodes, 2 * hidden, 5 * hidden), (leaves + nodes, hidden, CLASSES)]

    return Workload(trees, params, products, real=data is not None)
