"""Shift and reduce (SPINN): a tracking LSTM reads buffer and stack before every step, a Tree-LSTM joins two states.

    word     h, c = tanh(a), b                      of a, b = word(x)
    track    i, f, g, o = track([top of the buffer; top two of the stack]) + again(t)       t: state of an LSTM
             loss = cross entropy of softmax(choice(t)) and what comes next: shift or reduce
    reduce   u, i, o, fl, fr = node([hl; hr; t])    c = s(i) tanh(u) + s(fl) cl + s(fr) cr,  h = s(o) tanh(c)
    end      loss = cross entropy of softmax(out(h)) and the label of the tree

Trees are those of treelstm-sst, whose nodes stand in the order of the steps: a leaf is a shift, an inner node a reduce.
By depth a sample that reduces falls behind those that shift, and never meets them again: a good schedule shows here.
"""

from __future__ import annotations

from pathlib import Path

from . import treelstm_sst
from .base import Product, Workload, random_parameters
from .treelstm_sst import CLASSES, Tree

DEFAULTS = {"batch": 32, "hidden": 100, "embed": 300, "track": 64}


def make(options: dict[str, int], num_batches: int, data: Path | None) -> Workload:
    count = num_batches * options["batch"]
    trees, num_words = treelstm_sst.generate(count) if data is None else treelstm_sst.read(data, count)
    hidden, embed, track = options["hidden"], options["embed"], options["track"]
    params = random_parameters({
        "embed_weight": (num_words, embed), "word_weight": (2 * hidden, embed), "word_bias": (2 * hidden,),
        "track_weight": (4 * track, 3 * hidden), "track_bias": (4 * track,), "again_weight": (4 * track, track),
        "choice_weight": (2, track), "choice_bias": (2,),
        "node_weight": (5 * hidden, 2 * hidden + track), "node_bias": (5 * hidden,),
        "out_weight": (CLASSES, hidden), "out_bias": (CLASSES,)})

    def products(batch: list[Tree]) -> list[Product]:
        leaves = sum(tree.num_leaves for tree in batch)
        nodes = leaves - len(batch)
        steps = leaves + nodes
        return [(leaves, embed, 2 * hidden), (steps, 3 * hidden, 4 * track), (steps, track, 4 * track),
                (steps, track, 2), (nodes, 2 * hidden + track, 5 * hidden), (len(batch), hidden, CLASSES)]

    return Workload(trees, params, products, real=data is not None)
