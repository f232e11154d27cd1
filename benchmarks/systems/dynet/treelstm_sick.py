"""The child-sum Tree-LSTM of treelstm-sick in DyNet."""

import dynet as dy
import numpy as np


class SiameseTreeLSTM:
    def __init__(self, workload, params):
        self.params = params
        self.hidden = workload.options["hidden"]

    def root(self, tree):
        p, H = self.params, self.hidden
        embed, x2h, x2h_bias, h2h, f2h = (p[name] for name in ("embed_weight", "x2h_weight", "x2h_bias", "h2h_weight",
                                                               "f2h_weight"))
        states = []
        for word, children in zip(tree.words, tree.children):
            gates = dy.affine_transform([x2h_bias, x2h, embed[word]])
            uio = dy.pick_range(gates, 0, 3 * H)
            if children:
                h_sum = dy.esum([states[w][0] for w in children]) if len(children) > 1 else states[children[0]][0]
                uio = uio + h2h * h_sum
            s = dy.logistic(dy.pick_range(uio, H, 3 * H))
            c = dy.cmult(dy.pick_range(s, 0, H), dy.tanh(dy.pick_range(uio, 0, H)))
            if children:
                f = dy.pick_range(gates, 3 * H, 4 * H)
                c = dy.esum([c] + [dy.cmult(dy.logistic(f + f2h * states[w][0]), states[w][1]) for w in children])
            states.append((dy.cmult(dy.pick_range(s, H, 2 * H), dy.tanh(c)), c))
        return states[-1][0]

    def loss(self, batch):
        p = self.params
        losses, offset = [], 0.0
        for pair in batch:
            a, b = self.root(pair.a), self.root(pair.b)
            both = dy.concatenate([dy.cmult(a, b), dy.abs(a - b)])
            similar = dy.logistic(dy.affine_transform([p["similar_bias"], p["similar_weight"], both]))
            scores = dy.affine_transform([p["out_bias"], p["out_weight"], similar])
            target = pair.target[0]
            for k in np.flatnonzero(target):                # one or two classes
                losses.append(dy.pickneglogsoftmax(scores, int(k)) * float(target[k]))
            offset += pair.offset
        return dy.esum(losses) + offset


make_model = SiameseTreeLSTM
