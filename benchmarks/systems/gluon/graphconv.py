"""The graph convolution of graphconv in Gluon, atom by atom."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from ...workloads.graphconv import SCALE
from .layers import dense, embedding

nd = mx.nd


class RoundCell(gluon.HybridBlock):
    """The state of an atom and a list of its neighbours' -> its next state."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.own, self.around = dense(workload, "own"), dense(workload, "around")

    def hybrid_forward(self, F, h, neighbours):
        h = self.own(h)
        return F.relu(h + self.around(F.add_n(*neighbours)) if neighbours else h)


class Head(gluon.HybridBlock):
    """The sum of a molecule's atoms and its target -> the loss."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.out, self.half_square = dense(workload, "out"), gluon.loss.L2Loss()

    def hybrid_forward(self, F, h, target):
        return self.half_square(self.out(h * SCALE), target)


class GraphConv(gluon.Block):
    """Plain Gluon: one molecule at a time; its atoms are looked up at once."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.rounds = workload.options["rounds"]
        self.embed = embedding(workload)
        self.cell, self.head = RoundCell(workload), Head(workload)

    def prepare(self, molecule):
        return nd.array(molecule.atoms), molecule.neighbours, nd.array([molecule.target])

    def start(self, atoms):
        x = self.embed(atoms)
        return [x[k:k + 1] for k in range(len(atoms))]

    def forward(self, atoms, neighbours, target):
        h = self.start(atoms)
        for _ in range(self.rounds):
            h = [self.cell(h[v], [h[u] for u in around]) for v, around in enumerate(neighbours)]
        return self.head(nd.add_n(*h), target)

    def losses(self, batch):
        return [self(*molecule) for molecule in batch]


class VertexGraphConv(GraphConv):
    """The same cells, marked; atoms and targets are numbers."""

    def __init__(self, workload):
        super().__init__(workload)
        self.embed = gdb.vertex(embedding(workload))
        gdb.vertex(self.cell)
        gdb.vertex(self.head)

    def prepare(self, molecule):
        return molecule.atoms, molecule.neighbours, molecule.target

    def start(self, atoms):
        return [self.embed(atom) for atom in atoms]


class CavsGraphConv(cavs.VertexFunction):
    """The Cavs face: the rounds unrolled, and a root that gathers the atoms of the last one and makes the loss."""

    def __init__(self, workload):
        super().__init__(state_shapes=[(workload.options["hidden"],)], prefix="")
        self.rounds = workload.options["rounds"]
        self.embed, self.head = embedding(workload), Head(workload)
        self.own, self.around = dense(workload, "own"), dense(workload, "around")

    def vertex(self, F, v):
        if v.is_root:
            v.push(self.head(v.gather_sum()[0], v.pull("target")))
        elif v.is_leaf:
            v.scatter(self.embed(v.pull("atom")))
        else:                                               # child 0 is the atom itself, one round before
            (before,), (total,) = v.gather(0), v.gather_sum()
            v.scatter(F.relu(self.own(before) + self.around(total - before)))

    def prepare(self, molecule):
        atoms = len(molecule.atoms)
        unrolled = cavs.InputGraph.unroll(atoms, [(u, v) for v, around in enumerate(molecule.neighbours)
                                                  for u in around if u < v], self.rounds)      # go both ways
        total = unrolled.num_vertices
        parents = np.repeat(np.arange(total), unrolled.arity)
        edges = np.stack([np.append(unrolled.child_index, unrolled.roots),
                          np.append(parents, np.full(atoms, total))], axis=1)
        atom, target = np.full(total + 1, -1), np.zeros(total + 1, "float32")
        atom[:atoms], target[total] = molecule.atoms, molecule.target
        return cavs.InputGraph.from_edges(total + 1, edges), atom, target

    def losses(self, batch):
        graphs, atoms, targets = zip(*batch)
        return self(list(graphs), {"atom": np.concatenate(atoms), "target": np.concatenate(targets)}).pushed


def make_model(workload, variant):
    return {"vertex": VertexGraphConv, "cavs": CavsGraphConv}.get(variant, GraphConv)(workload)
