"""The graph convolution of graphconv in DyNet."""

import dynet as dy

from ...workloads.graphconv import SCALE


class GraphConv:
    def __init__(self, workload, params):
        self.params = params
        self.rounds = workload.options["rounds"]

    def loss(self, batch):
        embed, own, own_bias, around, out, out_bias = (self.params[name] for name in (
            "embed_weight", "own_weight", "own_bias", "around_weight", "out_weight", "out_bias"))
        losses = []
        for molecule in batch:
            h = [embed[atom] for atom in molecule.atoms]
            for _ in range(self.rounds):
                h = [dy.rectify(dy.affine_transform([own_bias, own, h[v], around, dy.esum([h[u] for u in near])] if near
                                                    else [own_bias, own, h[v]]))
                     for v, near in enumerate(molecule.neighbours)]
            guess = dy.affine_transform([out_bias, out, dy.esum(h) * SCALE])
            losses.append(dy.squared_distance(guess, dy.inputVector([molecule.target])))
        return dy.esum(losses) * 0.5


make_model = GraphConv
