"""Tree-FC in DyNet."""

import dynet as dy


class TreeFC:
    def __init__(self, workload, params):
        self.params = params

    def loss(self, batch):
        embed, node, node_bias, out, out_bias = (self.params[name] for name in (
            "embed_weight", "node_weight", "node_bias", "out_weight", "out_bias"))
        losses = []
        for sample in batch:
            level = [embed[word] for word in sample.words]
            while len(level) > 1:
                level = [dy.rectify(dy.affine_transform([node_bias, node, dy.concatenate([left, right])]))
                         for left, right in zip(level[::2], level[1::2])]
            losses.append(dy.pickneglogsoftmax(dy.affine_transform([out_bias, out, level[0]]), sample.label))
        return dy.esum(losses)


make_model = TreeFC
