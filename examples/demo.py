"""Train one Tree-LSTM tree by tree and through the engine; compare speed, launches and losses.  make demo

It takes 40 s to a minute on two cores. Progress goes to stderr, the report to stdout.
"""

import argparse
import textwrap
import time

import numpy as np
from tqdm import tqdm

import cavs_core as cavs
from cavs_core.lazy import Listener, listening
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn
BATCH_SIZE = 32
PLAIN, HYBRIDIZED, BATCHED = "plain loop", "hybridized", "batched"        # the three ways to train

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
    # "auto" would wait until compiling pays; here it is done at once, before the clock runs
    backend = "native" if mx.current_context().device_type == "cpu" else "auto"
    return cavs.run(net, [s.graph for s in batch], {"word": [s.words for s in batch]}, backend=backend)


def batched_loss(net, batch):
    scores = run_batched(net, batch).pushed                                         # (vertices of all trees, classes)
    return cross_entropy(scores, labels_of(batch)).sum()                            # (1,)


def labels_of(batch):
    return mx.nd.array(np.concatenate([s.labels for s in batch]))


# ---- training --------------------------------------------------------------------------------


def train(net, loss_of, samples, epochs, title):
    """Ordinary Gluon training. Returns the mean loss of a vertex at every step, and samples a second."""
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    batches = [samples[k:k + BATCH_SIZE] for k in range(0, len(samples), BATCH_SIZE)]
    with autograd.record():                                 # not timed: the first call compiles
        loss = loss_of(net, batches[0])
    loss.backward()
    mx.nd.waitall()
    losses, start = [], time.perf_counter()
    with tqdm(total=epochs * len(samples), desc=f"{title:10}", unit=" trees", mininterval=0.5) as bar:
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


def say(text):
    """Print a paragraph."""
    print(textwrap.fill(" ".join(text.split()), width=100, break_on_hyphens=False) + "\n", flush=True)


def same_start(net, first):
    """Give `net` the parameters of `first`."""
    net.initialize()
    for mine, other in zip(net.collect_params().values(), first.collect_params().values()):
        mine.set_data(other.data())
    return net


def compare(samples, epochs, hidden):
    """Train three times from the same parameters; the speeds, the losses, and the batched model."""
    plain = PlainTreeLSTM(hidden)
    plain.initialize(mx.init.Xavier())
    hybridized = same_start(PlainTreeLSTM(hidden), plain)
    hybridized.cell.hybridize()
    batched = same_start(BatchedTreeLSTM(hidden), plain)

    first = samples[:BATCH_SIZE]
    forward, backward, levels = count_batched(batched, first)
    launches = {PLAIN: count_plain(plain, first), HYBRIDIZED: count_plain(hybridized, first), BATCHED: forward}
    ways = {PLAIN: (plain, plain_loss), HYBRIDIZED: (hybridized, plain_loss), BATCHED: (batched, batched_loss)}
    losses, speeds = {}, {}
    for title, (net, loss_of) in ways.items():
        losses[title], speeds[title] = train(net, loss_of, samples, epochs, title)

    print("\n  way             trees a second     against the plain loop     forward launches of a mini-batch")
    for title, speed in speeds.items():
        print(f"  {title:14} {speed:15.1f} {speed / speeds[PLAIN]:20.1f} times {launches[title]:30}")
    print()
    say(f"""A launch is an operator, or a compiled group of operators, that is started. The {len(first)} trees of
        the first mini-batch have {levels} levels. The engine runs all vertices of a level at once, whatever tree they
        are in: the number of its launches follows the levels, not the vertices. Its backward pass needs {backward}
        launches. (How many the backward pass of a plain loop needs cannot be seen from Python.)""")
    return batched, losses, speeds


def check_same_losses(losses):
    """Batched equals the loop. Each step builds on the one before, so after many steps rounding adds up."""
    steps, checked = len(losses[PLAIN]), min(len(losses[PLAIN]), 20)
    print("  step      loss, plain loop      loss, batched")
    for k in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
        print(f"  {k + 1:4} {losses[PLAIN][k]:21.7f} {losses[BATCHED][k]:18.7f}")
    print()
    for title in (HYBRIDIZED, BATCHED):
        apart = (np.abs(np.subtract(losses[title], losses[PLAIN])) / losses[PLAIN])[:checked]
        assert apart.max() < 1e-4, (f"the losses of the ways `{PLAIN}` and `{title}` differ by {apart.max():.1e} of "
                                    f"their value at step {apart.argmax() + 1}: that is a bug, please report it")
    where = f"all {steps} steps" if checked == steps else f"the first {checked} steps"
    say(f"""The losses are equal at {where}: they differ by at most {apart.max():.1e} of their value, which is
        float32 rounding.""")


def go_on(net, samples, epochs, unseen, speeds, first_loss):
    """Train the batched model until it has learned something."""
    before, start = root_accuracy(net, unseen), time.perf_counter()
    curve, _ = train(net, batched_loss, samples, epochs, BATCHED)
    seconds, now = time.perf_counter() - start, root_accuracy(net, unseen)
    plain_seconds = epochs * len(samples) / speeds[PLAIN]
    means = " -> ".join(f"{part.mean():.3f}" for part in np.array_split(curve, epochs))
    say(f"""The batched model goes on with {len(samples)} new trees: {epochs} epochs took {seconds:.1f} s. The plain
        loop, at the speed above, would need {plain_seconds:.0f} s. The training loss of a vertex falls: it was
        {first_loss:.3f} at the first step of all, then {means} (means of these epochs). On {len(unseen)} unseen trees
        it told the mood of the whole phrase right in {before:.1%} of the cases before these epochs, and in {now:.1%}
        after them.""")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=128, help="trees of the comparison (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of the comparison (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="size of the states (default %(default)s)")
    args = parser.parse_args()
    rng = np.random.RandomState(0)
    mx.random.seed(0)

    def make(count):
        return [Sample(int(rng.randint(4, 16)), rng) for _ in range(count)]

    samples = make(args.samples)
    vertices = sum(len(s.words) for s in samples)
    say(f"""The task: tell the mood ({", ".join(CLASSES)}) of every part of a phrase. A phrase is a random binary tree
        of words, and its moods follow a hidden rule. There are {len(samples)} trees of all shapes, with {vertices}
        vertices together. The model is a binary Tree-LSTM with
        {args.hidden} hidden units, trained for {args.epochs} epochs in mini-batches of {BATCH_SIZE} trees, three times
        from the same parameters:""")
    print(f"  {PLAIN:14} Python walks over one tree after the other and calls the cell at every vertex")
    print(f"  {HYBRIDIZED:14} the same loop, but the cell was hybridized: one call a vertex")
    print(f"  {BATCHED:14} the same cell through the engine: cavs_core.run(net, graphs, words)\n", flush=True)
    net, losses, speeds = compare(samples, args.epochs, args.hidden)
    check_same_losses(losses)
    go_on(net, make(8 * args.samples), 4, make(500), speeds, losses[PLAIN][0])


if __name__ == "__main__":
    main()
