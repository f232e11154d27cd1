"""Train one Tree-LSTM tree by tree and through the engine; compare speed, launches and losses.  make demo

It takes under a minute on two cores. Progress goes to stderr, the report to stdout.
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

import cavs_core as cavs
from cavs_core.lazy import Listener, listening
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn

# ---- the data: small phrases whose mood follows a hidden rule --------------------------------

JOINS = ["and", "but", "unlike"]                # words of inner vertices: 0, 1, 2
VOCABULARY = len(JOINS) + 40                    # then 40 words of leaves, each with a hidden mood from -2 to 2
CLASSES = ["sad", "neutral", "happy"]


class Tree:
    """A vertex of a phrase: a word, and two parts unless it is a leaf."""

    def __init__(self, word, left=None, right=None):
        self.word, self.left, self.right = word, left, right


def make_tree(num_leaves, rng):
    """A random binary tree over `num_leaves` words."""
    if num_leaves == 1:
        return Tree(int(rng.randint(len(JOINS), VOCABULARY)))
    split = int(rng.randint(1, num_leaves))
    return Tree(int(rng.randint(len(JOINS))), make_tree(split, rng), make_tree(num_leaves - split, rng))


def vertices_of(tree):
    """All vertices, children before parents; the root is the last one."""
    if tree.left is None:
        return [tree]
    return vertices_of(tree.left) + vertices_of(tree.right) + [tree]


def moods_of(vertices):
    """The hidden rule. `and` adds the moods of both parts; `but` keeps the second; `unlike` subtracts it."""
    mood = {}
    for v in vertices:
        if v.left is None:
            mood[v] = (v.word * 7) % 5 - 2
        else:
            a, b = mood[v.left], mood[v.right]
            mood[v] = (a + b, b, a - b)[v.word]
    return [mood[v] for v in vertices]


class Sample:
    """A tree as the plain loop wants it, and the same tree as the engine wants it: a graph and rows of its words."""

    def __init__(self, num_leaves, rng):
        self.tree = make_tree(num_leaves, rng)
        vertices = vertices_of(self.tree)
        number = {v: i for i, v in enumerate(vertices)}
        edges = [(number[part], number[v]) for v in vertices if v.left for part in (v.left, v.right)]
        self.graph = cavs.InputGraph.from_edges(len(vertices), edges)           # (child, parent) pairs
        self.words = np.array([v.word for v in vertices], "float32")            # (vertices,)
        self.labels = np.sign(moods_of(vertices)).astype("float32") + 1         # (vertices,)


# ---- the model: one cell, used by both -------------------------------------------------------


class TreeLSTMCell(gluon.HybridBlock):
    """One vertex of a binary Tree-LSTM: its word and the states of two children in, its state and its scores out."""

    def __init__(self, hidden, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(VOCABULARY, hidden)
            self.i2h = nn.Dense(5 * hidden, in_units=hidden)
            self.h2h = nn.Dense(5 * hidden, in_units=2 * hidden, use_bias=False)
            self.out = nn.Dense(len(CLASSES), in_units=hidden)

    def hybrid_forward(self, F, word, hl, cl, hr, cr):
        gates = self.i2h(self.embed(word)) + self.h2h(F.concat(hl, hr, dim=1))      # (1, 5 * hidden)
        i, fl, fr, o, u = F.split(gates, num_outputs=5, axis=1)                     # (1, hidden) each
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * cl + F.sigmoid(fr) * cr
        h = F.sigmoid(o) * F.tanh(c)
        return h, c, self.out(h)


class PlainTreeLSTM(gluon.Block):
    """Ordinary Gluon: Python walks over one tree and calls the cell at each vertex."""

    def __init__(self, hidden, **kwargs):
        super().__init__(**kwargs)
        self.hidden = hidden
        with self.name_scope():
            self.cell = TreeLSTMCell(hidden)

    def forward(self, tree):
        zeros = mx.nd.zeros((1, self.hidden))
        scores = []

        def visit(v):
            left = visit(v.left) if v.left else (zeros, zeros)
            right = visit(v.right) if v.right else (zeros, zeros)
            h, c, score = self.cell(mx.nd.array([v.word]), *left, *right)
            scores.append(score)
            return h, c

        visit(tree)
        return mx.nd.concat(*scores, dim=0)                                         # (vertices, classes)


class BatchedTreeLSTM(cavs.VertexFunction):
    """The engine: says what ONE vertex does with the same cell; `cavs.run` does it for many vertices at once."""

    def __init__(self, hidden, **kwargs):
        super().__init__(state_shapes=[(hidden,), (hidden,)], **kwargs)             # h and c go up the tree
        with self.name_scope():
            self.cell = TreeLSTMCell(hidden)

    def vertex(self, F, v):
        h, c, scores = self.cell(v.pull("word"), *v.gather(0), *v.gather(1))
        v.scatter(h, c)
        v.push(scores)


# ---- the two ways to compute the loss of a mini-batch ----------------------------------------

cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def plain_loss(net, batch):
    losses = [cross_entropy(net(sample.tree), mx.nd.array(sample.labels)).sum() for sample in batch]
    return mx.nd.add_n(*losses)                                                     # (1,)


def run_batched(net, batch):
    return cavs.run(net, [s.graph for s in batch], {"word": [s.words for s in batch]})


def batched_loss(net, batch):
    scores = run_batched(net, batch).pushed                                         # (vertices of all trees, classes)
    return cross_entropy(scores, labels_of(batch)).sum()                            # (1,)


def labels_of(batch):
    return mx.nd.array(np.concatenate([s.labels for s in batch]))


# ---- training --------------------------------------------------------------------------------


def train(net, loss_of, samples, epochs, batch_size, title):
    """Ordinary Gluon training. Returns the mean loss of a vertex at every step, and samples a second."""
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    batches = [samples[k:k + batch_size] for k in range(0, len(samples), batch_size)]
    with autograd.record():                                 # not timed: the first call compiles
        loss = loss_of(net, batches[0])
    loss.backward()
    mx.nd.waitall()
    losses, start = [], time.perf_counter()
    with tqdm(total=epochs * len(samples), desc=f"{title:14}", unit=" trees") as bar:
        for _ in range(epochs):
            for batch in batches:
                with autograd.record():
                    loss = loss_of(net, batch)
                loss.backward()
                vertices = sum(len(s.words) for s in batch)
                trainer.step(vertices)
                losses.append(loss.asscalar() / vertices)   # reading the value waits for the device
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update(len(batch))
    mx.nd.waitall()
    return losses, epochs * len(samples) / (time.perf_counter() - start)


def root_accuracy(net, samples):
    guesses = run_batched(net, samples).roots.asnumpy().argmax(axis=1)              # (samples,)
    return float(np.mean(guesses == [s.labels[-1] for s in samples]))


# ---- launches --------------------------------------------------------------------------------


class Count(Listener):
    """Counts the operators, and the hybridized graphs, that Python code starts."""

    def __init__(self):
        self.started = 0

    def on_operator(self, name, arrays, attrs, out, call):
        self.started += 1
        return call()

    def on_hybrid_call(self, block, args, call):
        self.started += 1
        return call()


def count_plain(net, batch):
    with autograd.record(), listening(Count()) as count:
        plain_loss(net, batch)
    return count.started


def count_batched(net, batch):
    """Forward (the loss included) and backward launches of the engine."""
    with autograd.record():
        out = run_batched(net, batch)
        with listening(Count()) as count:
            loss = cross_entropy(out.pushed, labels_of(batch)).sum()
    loss.backward()
    return out.stats.forward_ops + count.started, out.stats.backward_ops, out.stats.launches


# ---- the report ------------------------------------------------------------------------------


def same_start(net, first):
    """Give `net` the parameters of `first`."""
    net.initialize()
    for mine, other in zip(net.collect_params().values(), first.collect_params().values()):
        mine.set_data(other.data())
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=128, help="trees of the comparison (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of the comparison (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="size of the states (default %(default)s)")
    args = parser.parse_args()
    batch_size = 32
    rng = np.random.RandomState(0)
    mx.random.seed(0)

    samples = [Sample(int(rng.randint(4, 16)), rng) for _ in range(args.samples)]
    first = samples[:batch_size]
    vertices = sum(len(s.words) for s in samples)
    print(f"""\
The task: tell the mood ({", ".join(CLASSES)}) of every part of a phrase. Phrases are random binary trees of words that
follow a hidden rule: {len(samples)} trees, {vertices} vertices, every tree of another shape. The model: a binary Tree-LSTM with {args.hidden}
hidden units. It is trained for {args.epochs} epochs in mini-batches of {batch_size} trees, three times from the same parameters:

  plain loop     Python walks over one tree after the other and calls the cell at every vertex
  hybridized     the same loop; the cell was hybridized, so that a vertex is one call
  batched        the same cell through the engine: cavs_core.run(net, trees, words)
""", flush=True)

    plain = PlainTreeLSTM(args.hidden)
    plain.initialize(mx.init.Xavier())
    hybridized = same_start(PlainTreeLSTM(args.hidden), plain)
    hybridized.cell.hybridize()
    batched = same_start(BatchedTreeLSTM(args.hidden), plain)

    forward, backward, levels = count_batched(batched, first)
    started = {"plain loop": count_plain(plain, first), "hybridized": count_plain(hybridized, first),
               "batched": forward}
    ways = {"plain loop": (plain, plain_loss), "hybridized": (hybridized, plain_loss),
            "batched": (batched, batched_loss)}
    losses, speed = {}, {}
    for title, (net, loss_of) in ways.items():
        losses[title], speed[title] = train(net, loss_of, samples, args.epochs, batch_size, title)

    print("\n                 trees a second      against the plain loop      launches forward, one mini-batch")
    for title in ways:
        ratio = speed[title] / speed["plain loop"]
        print(f"  {title:14} {speed[title]:12.1f} {ratio:21.1f} times {started[title]:24}")
    print(f"""
A launch is an operator, or a compiled group of operators, that Python starts. The engine needs so few because the
first {len(first)} trees together have {levels} levels, and all vertices of a level run at once, whatever tree they are in. Its
backward pass needs {backward} launches. (MXNet does not tell how many the backward pass of a plain loop needs.)

Batched equals the loop. The loss of a vertex at every step:

  step      plain loop         batched""")
    steps = len(losses["batched"])
    for k in sorted({0, 1, steps // 2, steps - 1} & set(range(steps))):
        print(f"  {k + 1:4} {losses['plain loop'][k]:15.7f} {losses['batched'][k]:15.7f}")
    for title in ("hybridized", "batched"):
        apart = np.abs(np.subtract(losses[title], losses["plain loop"])) / losses["plain loop"]
        if not apart.max() < 1e-4:
            raise AssertionError(f"the losses of the {title} way and of the plain loop differ: at step "
                                 f"{apart.argmax() + 1} by {apart.max():.2e} of their value. That is a bug.")
        if title == "batched":
            print(f"\nThey differ by at most {apart.max():.0e} of their value at all {steps} steps: float32 rounding.\n",
                  flush=True)

    more = [Sample(int(rng.randint(4, 16)), rng) for _ in range(8 * args.samples)]
    unseen = [Sample(int(rng.randint(4, 16)), rng) for _ in range(500)]
    before = root_accuracy(batched, unseen)
    start = time.perf_counter()
    curve, _ = train(batched, batched_loss, more, 4, batch_size, "batched, goes on")
    seconds = time.perf_counter() - start
    by_epoch = np.array_split(curve, 4)
    print(f"""
The batched model goes on: {len(more)} new trees, 4 epochs in {seconds:.1f} s. The plain loop would take about {4 * len(more) / speed["plain loop"]:.0f} s.
The training loss falls: {losses["batched"][0]:.3f} at the start, {" -> ".join(f"{e.mean():.3f}" for e in by_epoch)} (mean of each epoch).
The mood of whole phrases, on {len(unseen)} unseen trees: {before:.1%} right before, {root_accuracy(batched, unseen):.1%} after.""")


if __name__ == "__main__":
    main()
