"""A child-sum Tree-LSTM in plain Gluon, one tree after the other.  python examples/gluon_tree_before.py

Its twin, gluon_tree_after.py, is the same file with two lines changed. Compare the speeds they print.
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

from cavs_core.mxnet_compat import autograd, gluon, mx


class TreeLSTM(gluon.Block):
    """The score of a dependency tree: every word's state is made of its own vector and its children's states."""

    def __init__(self, words, hidden, classes=2):
        super().__init__()
        with self.name_scope():
            self.embed = gluon.nn.Embedding(words, hidden)
            self.gates = gluon.nn.Dense(3 * hidden, in_units=2 * hidden)
            self.forget = gluon.nn.Dense(hidden, in_units=2 * hidden)
            self.out = gluon.nn.Dense(classes, in_units=hidden)

    def node(self, F, word, children):
        x = self.embed(word)                                                        # (1, hidden)
        h_sum = F.add_n(*[h for h, _ in children]) if children else F.zeros_like(x)
        i, o, u = F.split(self.gates(F.concat(x, h_sum, dim=1)), num_outputs=3, axis=1)
        c = F.sigmoid(i) * F.tanh(u)
        for h_child, c_child in children:
            c = c + F.sigmoid(self.forget(F.concat(x, h_child, dim=1))) * c_child
        return F.sigmoid(o) * F.tanh(c), c

    def forward(self, tree):
        word, below = tree
        return self.node(mx.nd, word, [self(t) for t in below])

    def score(self, tree):
        return self.out(self(tree)[0])                                              # (1, classes)


def random_tree(size, rng, words):
    """A tree of `size` words; (word, list of trees)."""
    left = size - 1
    below = []
    while left > 0:
        part = int(rng.randint(1, left + 1))
        below.append(random_tree(part, rng, words))
        left -= part
    return mx.nd.array([rng.randint(words)]), below


def label_of(tree):
    """Whether more words of the tree are even than odd."""
    def balance(t):
        return (1 if t[0].asscalar() % 2 == 0 else -1) + sum(balance(b) for b in t[1])

    return mx.nd.array([1.0 if balance(tree) > 0 else 0.0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.RandomState(0)
    mx.random.seed(0)
    trees = [random_tree(int(rng.randint(3, 20)), rng, 20) for _ in range(options.trees)]
    data = [(tree, label_of(tree)) for tree in trees]
    net = TreeLSTM(words=20, hidden=options.hidden)
    net.initialize(mx.init.Xavier())
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    for epoch in range(options.epochs):
        start, total = time.perf_counter(), 0.0
        for first in tqdm(range(0, len(data), 32), desc=f"epoch {epoch}", unit="batch"):
            batch = data[first:first + 32]
            with autograd.record():
                losses = [loss_of(net.score(tree), label) for tree, label in batch]
            autograd.backward(losses)
            trainer.step(len(batch))
            total += sum(float(x.asscalar()) for x in losses)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch}: loss {total / len(data):.4f}, {len(data) / seconds:.1f} trees a second")


if __name__ == "__main__":
    main()
