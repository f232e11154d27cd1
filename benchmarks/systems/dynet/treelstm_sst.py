"""The binary Tree-LSTM of treelstm-sst in DyNet."""

import dynet as dy


class TreeLSTM:
    def __init__(self, workload, params):
        self.params = params
        self.hidden = workload.options["hidden"]

    def loss(self, batch):
        p, H = self.params, self.hidden
        embed, leaf, leaf_bias, node, node_bias, out, out_bias = (
            p[name] for name in ("embed_weight", "leaf_weight", "leaf_bias", "node_weight", "node_bias", "out_weight",
                                 "out_bias"))
        losses = []
        for tree in batch:
            states = []
            for word, left, right, label in zip(tree.words, tree.left, tree.right, tree.labels):
                if left < 0:
                    gates = dy.affine_transform([leaf_bias, leaf, embed[word]])
                    s = dy.logistic(dy.pick_range(gates, H, 3 * H))
                    c = dy.cmult(dy.pick_range(s, 0, H), dy.tanh(dy.pick_range(gates, 0, H)))
                else:
                    (hl, cl), (hr, cr) = states[left], states[right]
                    gates = dy.affine_transform([node_bias, node, dy.concatenate([hl, hr])])
                    s = dy.logistic(dy.pick_range(gates, H, 5 * H))
                    c = dy.esum([dy.cmult(dy.pick_range(s, 0, H), dy.tanh(dy.pick_range(gates, 0, H))),
                                 dy.cmult(dy.pick_range(s, 2 * H, 3 * H), cl),
                                 dy.cmult(dy.pick_range(s, 3 * H, 4 * H), cr)])
                h = dy.cmult(dy.pick_range(s, H, 2 * H), dy.tanh(c))
                states.append((h, c))
                losses.append(dy.pickneglogsoftmax(dy.affine_transform([out_bias, out, h]), label))
        return dy.esum(losses)


make_model = TreeLSTM
