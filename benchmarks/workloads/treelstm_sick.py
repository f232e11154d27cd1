"""Child-sum Tree-LSTM on the dependency trees of SICK's sentence pairs: how related are two sentences, from 1 to 5?

    vertex      u, i, o, f = x2h(x)       u, i, o += h2h(sum of the children's h)       f_k = s(f + f2h(h_k))
                c = s(i) tanh(u) + sum of f_k c_k                                       h = s(o) tanh(c)
    pair        a, b = h of both roots    p = log_softmax(out(s(similar([a b; |a - b|]))))
                loss = sum over the classes of target (log target - p), a Kullback-Leibler divergence
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import Product, Workload, chosen, lookup_table, random_parameters

DEFAULTS = {"batch": 25, "hidden": 150, "embed": 300, "similar": 50}
CLASSES = 5
GENERATED_WORDS = 2_200


@dataclass
class Tree:
    """Vertices with children before parents; the last one is the root."""

    words: list[int]
    parents: list[int]              # -1 at the root
    children: list[list[int]]


@dataclass
class Pair:
    a: Tree
    b: Tree
    target: np.ndarray              # (1, 5): a distribution over the classes

    @property
    def offset(self) -> float:
        """The part of the loss that does not depend on the model: the sum of target log target."""
        some = self.target[self.target > 0]
        return float((some * np.log(some)).sum())


def make_tree(words: list[int], parents: list[int]) -> Tree:
    """A tree from words in any order; vertices are numbered anew, children first."""
    children: list[list[int]] = [[] for _ in words]
    for v, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(v)
    order, todo = [], [parents.index(-1)]
    while todo:
        v = todo.pop()
        order.append(v)
        todo += children[v]
    order.reverse()
    number = {v: k for k, v in enumerate(order)}
    return Tree([words[v] for v in order], [number.get(parents[v], -1) for v in order],
                [sorted(number[w] for w in children[v]) for v in order])


def distribution(score: float) -> np.ndarray:
    """3.4 -> 0.6 on class 3 and 0.4 on class 4. (1, 5)"""
    target = np.zeros((1, CLASSES), np.float32)
    low = min(int(score), CLASSES - 1)
    target[0, low - 1], target[0, low] = low + 1 - score, score - low
    return target


def read(data: Path, count: int) -> tuple[list[Pair], int]:
    """Pairs of the training part, and the number of its words."""
    def lines(name: str) -> list[list[str]]:
        return [line.split() for line in (data / "sick" / "train" / name).read_text(encoding="utf-8").splitlines()]

    tokens = [lines(f"{side}.toks") for side in "ab"]
    parents = [lines(f"{side}.parents") for side in "ab"]
    table = lookup_table([word.lower() for side in tokens for line in side for word in line])
    scores = lines("sim.txt")

    def tree(side: int, k: int) -> Tree:
        return make_tree([table[word.lower()] for word in tokens[side][k]], [int(p) - 1 for p in parents[side][k]])

    return [Pair(tree(0, k), tree(1, k), distribution(float(scores[k][0])))
            for k in chosen(range(len(scores)), count)], len(table)


def generate(count: int) -> tuple[list[Pair], int]:
    """Pairs with the sizes and depths of SICK: 9.7 words on average, depth 4.4, up to 8 children."""
    rng = np.random.RandomState(0)

    def tree() -> Tree:
        size = int(np.clip(rng.gamma(6.4, 1.6), 3, 36))
        parents = [-1] + [int(rng.randint(max(0, v - 4), v)) for v in range(1, size)]
        return make_tree((rng.zipf(1.3, size) % GENERATED_WORDS).tolist(), parents)

    return [Pair(tree(), tree(), distribution(rng.uniform(1, 5))) for _ in range(count)], GENERATED_WORDS


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    count = num_batches * options["batch"]
    pairs, num_words = generate(count) if data is None else read(data, count)
    hidden, embed, similar = options["hidden"], options["embed"], options["similar"]
    params = random_parameters({
        "embed_weight": (num_words, embed), "x2h_weight": (4 * hidden, embed), "x2h_bias": (4 * hidden,),
        "h2h_weight": (3 * hidden, hidden), "f2h_weight": (hidden, hidden),
        "similar_weight": (similar, 2 * hidden), "similar_bias": (similar,),
        "out_weight": (CLASSES, similar), "out_bias": (CLASSES,)})

    def products(batch: list[Pair]) -> list[Product]:
        trees = [tree for pair in batch for tree in (pair.a, pair.b)]
        vertices = sum(len(tree.words) for tree in trees)
        inner = sum(bool(below) for tree in trees for below in tree.children)
        return [(vertices, embed, 4 * hidden), (inner, hidden, 3 * hidden), (vertices - len(trees), hidden, hidden),
                (len(batch), 2 * hidden, similar), (len(batch), similar, CLASSES)]

    return Workload(pairs, params, products, real=data is not None, learning_rate=0.2)
