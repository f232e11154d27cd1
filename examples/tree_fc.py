"""Tree-FC: h = relu(W [left; right] + b) on complete binary trees, a benchmark of the Fold and Cavs papers.

    python examples/tree_fc.py --cpu-small

takes about 5 s. On two cores that were shared with other work it printed:

    Tree-FC, 32 leaves a tree, 64 hidden units; forward and backward, best of 5
                          trees/s    ratio   levels   launches forward   backward
    plain Gluon loop         65.2      1.0
    batched,  1 a run       128.0      2.0        6                 10         17
    batched,  4 a run       550.7      8.4        6                 10         18
    batched, 16 a run      2001.1     30.7        6                 10         18
    batched, 64 a run      4322.0     66.3        6                 10         18
    values and gradients of all runs equal those of the plain loop

Without --cpu-small (the size of the papers: 256 leaves, 512 hidden units) it takes about 25 s; a tree is then so large
that the products decide, and the ratio is 23.4 with 64 trees.
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx

nn = gluon.nn


class TreeFC(cavs.VertexFunction):
    """One fully connected layer a vertex. A leaf gathers zeros and pulls its vector; the others pull zeros."""

    def __init__(self, hidden, **kwargs):
        super().__init__(state_shapes=[(hidden,)], **kwargs)
        with self.name_scope():
            self.fc = nn.Dense(hidden, in_units=2 * hidden)

    def vertex(self, F, v):
        (left,), (right,) = v.gather(0), v.gather(1)                                # (1, hidden) each
        h = F.relu(self.fc(F.concat(left, right, dim=1)) + v.pull("x"))             # (1, hidden)
        v.scatter(h)
        v.push(h)


def plain_tree(net, x):
    """The same tree as ordinary Gluon code, vertex by vertex. x: (vertices, hidden). The state of the root."""
    leaves = (x.shape[0] + 1) // 2
    bias = net.fc.bias.data()
    level = [mx.nd.relu(x[v:v + 1] + bias) for v in range(leaves)]                  # W [0; 0] is left out
    while len(level) > 1:
        level = [mx.nd.relu(net.fc(mx.nd.concat(left, right, dim=1))) for left, right in zip(level[::2], level[1::2])]
    return level[0]                                                                 # (1, hidden)


def make_input(graph, hidden, rng):
    """Vectors for the leaves, zeros for all others."""
    x = np.zeros((graph.num_vertices, hidden), "float32")
    leaves = graph.arity == 0
    x[leaves] = rng.normal(size=(leaves.sum(), hidden)) / 4
    return mx.nd.array(x)                                                           # (vertices, hidden)


def step(net, loss_of):
    """Forward and backward once, to the end; the loss, and what `loss_of` returns beside it."""
    with autograd.record():
        loss, extra = loss_of()
    loss.backward()
    mx.nd.waitall()
    return float(loss.asscalar()), extra


def timed(net, loss_of, repeats, title):
    """Seconds of one step, the best of `repeats`, and the loss of the last one."""
    step(net, loss_of)                                                              # the first call compiles
    best = np.inf
    for _ in tqdm(range(repeats), desc=title, leave=False, mininterval=0.5):
        start = time.perf_counter()
        loss, extra = step(net, loss_of)
        best = min(best, time.perf_counter() - start)
    return best, loss, extra


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512, help="size of the states (default %(default)s)")
    parser.add_argument("--depth", type=int, default=8, help="levels above the leaves (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="the best time of so many (default %(default)s)")
    parser.add_argument("--cpu-small", action="store_true", help="hidden 64, depth 5")
    args = parser.parse_args()
    hidden, depth = (64, 5) if args.cpu_small else (args.hidden, args.depth)
    rng = np.random.RandomState(0)
    mx.random.seed(0)
    tree = cavs.InputGraph.complete_binary_tree(depth)
    net = TreeFC(hidden)
    net.initialize(mx.init.Xavier())
    print(f"Tree-FC, {2 ** depth} leaves a tree, {hidden} hidden units; forward and backward, best of {args.repeats}")

    x = make_input(tree, hidden, rng)
    seconds, plain_loss, _ = timed(net, lambda: (plain_tree(net, x).sum(), None), args.repeats, "plain loop")
    plain_grad = net.fc.weight.grad().asnumpy()
    plain_speed = 1 / seconds
    print(f"{'':21} trees/s    ratio   levels   launches forward   backward")
    print(f"plain Gluon loop {plain_speed:12.1f}      1.0")

    for batch in (1, 4, 16, 64):
        graphs = [tree] * batch
        rows = mx.nd.concat(*[x] * batch, dim=0)

        def loss_of(graphs=graphs, rows=rows):
            out = cavs.run(net, graphs, {"x": rows})                                # out.roots: (batch, hidden)
            return out.roots.sum() / len(graphs), out.stats

        seconds, loss, stats = timed(net, loss_of, args.repeats, f"batch {batch}")
        speed = batch / seconds
        print(f"batched, {batch:2} a run {speed:11.1f} {speed / plain_speed:8.1f} {stats.launches:8} "
              f"{stats.forward_ops:18} {stats.backward_ops:10}")
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-4, err_msg="loss of the batched run")
        np.testing.assert_allclose(net.fc.weight.grad().asnumpy(), plain_grad, rtol=1e-3, atol=1e-4 * np.abs(
            plain_grad).max(), err_msg="weight gradient of the batched run")
    print("values and gradients of all runs equal those of the plain loop")


if __name__ == "__main__":
    main()
