"""The graph convolution of graphconv in Gluon, atom by atom."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import gluon, mx

from ...workloads.graphconv import SCALE
from .layers import dense, embedding, rows_or_zeros

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


class RoundFunction(cavs.VertexFunction):
    """A vertex of the Cavs face: an atom in one round. Its child 0 is itself one round before."""

    def __init__(self, workload):
        super().__init__(state_shapes=[(workload.options["hidden"],)], prefix="")
        self.own, self.around = dense(workload, "own"), dense(workload, "around")

    def vertex(self, F, v):
        (before,), (total,) = v.gather(0), v.gather_sum()
        later = F.relu(self.own(before) + self.around(total - before))
        h = F.broadcast_mul(later, v.pull("inner")) + v.pull("x")
        v.scatter(h)
        v.push(h)


class CavsGraphConv(gluon.Block):
    """Unrolled graphs instead of calls."""

    def __init__(self, workload):
        super().__init__(prefix="")
        self.rounds = workload.options["rounds"]
        self.embed = embedding(workload)
        self.function, self.head = RoundFunction(workload), Head(workload)

    def prepare(self, molecule):
        atoms = len(molecule.atoms)
        edges = [(u, v) for v, around in enumerate(molecule.neighbours) for u in around if u < v]    # go both ways
        row = np.concatenate([molecule.atoms, np.full(self.rounds * atoms, -1)])        # -1: not in the first round
        return cavs.InputGraph.unroll(atoms, edges, self.rounds), row, atoms, molecule.target

    def losses(self, batch):
        graphs, rows, sizes, targets = zip(*batch)
        rows = np.concatenate(rows)
        inner = rows < 0
        x = rows_or_zeros(self.embed(nd.array(rows[~inner])), ~inner)
        h = self.function(list(graphs), {"x": x, "inner": inner[:, None].astype("float32")}).roots
        members = np.repeat(np.eye(len(sizes), dtype="float32"), sizes, axis=1)         # (molecules, atoms)
        return self.head(nd.dot(nd.array(members), h), nd.array(targets))


def make_model(workload, variant):
    return {"vertex": VertexGraphConv, "cavs": CavsGraphConv}.get(variant, GraphConv)(workload)
