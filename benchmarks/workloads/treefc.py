"""Tree-FC, the benchmark of the Fold and Cavs papers: one fully connected layer a node, complete binary trees.

    leaf     h = the vector of its word            node     h = relu(node([hl; hr]))
    root     loss = cross entropy of softmax(out(h)) and the label of the tree

The trees are the same everywhere, so there is no real data: words and labels are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .base import Product, Workload, random_parameters

DEFAULTS = {"batch": 16, "hidden": 256, "leaves": 256}
NUM_WORDS, CLASSES = 1_000, 2


@dataclass
class Sample:
    words: list[int]            # of the leaves; neighbours are joined until one node is left
    label: int


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    hidden, leaves = options["hidden"], options["leaves"]
    if leaves & (leaves - 1):
        raise ValueError(f"treefc: the number of leaves is a power of 2, got {leaves}")
    rng = np.random.RandomState(0)
    samples = [Sample(rng.randint(0, NUM_WORDS, leaves).tolist(), int(rng.randint(CLASSES)))
               for _ in range(num_batches * options["batch"])]
    params = random_parameters({"embed_weight": (NUM_WORDS, hidden), "node_weight": (hidden, 2 * hidden),
                                "node_bias": (hidden,), "out_weight": (CLASSES, hidden), "out_bias": (CLASSES,)})

    def products(batch: list[Sample]) -> list[Product]:
        return [(len(batch) * (leaves - 1), 2 * hidden, hidden), (len(batch), hidden, CLASSES)]

    return Workload(samples, params, products, real=False, learning_rate=0.2)
