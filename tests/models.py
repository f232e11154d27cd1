"""Models in the Cavs face, each with the plain per-vertex code that it must agree with.

A model is a VertexFunction with one more method: ``node(F, x, children)`` computes a vertex from its inputs and the
list of its children's states, the way one writes it without the engine. `run_loop` is the plain loop over vertices.
"""

import numpy as np

import cavs_core as cavs
from cavs_core.mxnet_compat import gluon, mx

nn, rnn = gluon.nn, gluon.rnn


def run_loop(cell, graph, inputs):
    """Vertex after vertex, children first: pushed values, one (vertices, ...) array per pushed value."""
    states, pushed = {}, {}
    waiting = [v for v in range(graph.num_vertices)][::-1]
    while waiting:                      # iterative: a vertex comes back after its children
        v = waiting.pop()
        children = [int(c) for c in graph.children_of(v)]
        missing = [c for c in children if c not in states]
        if v in states:
            continue
        if missing:
            waiting += [v, *missing]
            continue
        x = {k: a[v:v + 1] for k, a in inputs.items()}
        states[v], pushed[v] = cell.node(mx.nd, x, [states[c] for c in children])
    columns = zip(*[pushed[v] for v in range(graph.num_vertices)])
    return [mx.nd.concat(*column, dim=0) for column in columns]


class Model(cavs.VertexFunction):
    def begin_states(self, like):
        """What a leaf gathers."""
        if self.initial_states:
            return [p.data() for p in self.initial_states]
        return [mx.nd.zeros((1, *s), ctx=like.context, dtype=like.dtype) for s in self.state_shapes]


class TreeFC(Model):
    """h = relu(W [left; right] + U x)."""

    def __init__(self, hidden=5, embed=4, **kwargs):
        super().__init__(state_shapes=[(hidden,)], **kwargs)
        with self.name_scope():
            self.fc = nn.Dense(hidden, in_units=2 * hidden)
            self.inp = nn.Dense(hidden, in_units=embed, use_bias=False)

    def vertex(self, F, v):
        (left,), (right,) = v.gather(0), v.gather(1)
        h = F.relu(self.fc(F.concat(left, right, dim=1)) + self.inp(v.pull("x")))
        v.scatter(h)
        v.push(h)

    def node(self, F, x, children):
        start = self.begin_states(x["x"])
        (left,), (right,) = (children + [start, start])[:2]
        h = F.relu(self.fc(F.concat(left, right, dim=1)) + self.inp(x["x"]))
        return (h,), (h,)


class BinaryTreeLSTM(Model):
    """Two forget gates; pushes class scores and h: a lazy part."""

    def __init__(self, hidden=6, embed=4, classes=3, **kwargs):
        super().__init__(state_shapes=[(hidden,), (hidden,)], **kwargs)
        with self.name_scope():
            self.i2h = nn.Dense(5 * hidden, in_units=embed)
            self.h2h = nn.Dense(5 * hidden, in_units=2 * hidden, use_bias=False)
            self.out = nn.Dense(classes, in_units=hidden)

    def cell(self, F, x, left, right):
        (hl, cl), (hr, cr) = left, right
        gates = self.i2h(x) + self.h2h(F.concat(hl, hr, dim=1))
        i, fl, fr, o, u = F.split(gates, num_outputs=5, axis=1)
        c = F.sigmoid(i) * F.tanh(u) + F.sigmoid(fl) * cl + F.sigmoid(fr) * cr
        return F.sigmoid(o) * F.tanh(c), c

    def vertex(self, F, v):
        h, c = self.cell(F, v.pull("x"), v.gather(0), v.gather(1))
        v.scatter(h, c)
        v.push(F.log_softmax(self.out(h)), h)

    def node(self, F, x, children):
        start = self.begin_states(x["x"])
        h, c = self.cell(F, x["x"], *(children + [start, start])[:2])
        return (h, c), (F.log_softmax(self.out(h)), h)


class ChildSumLSTM(Model):
    """A forget gate per child, any number of children."""

    def __init__(self, hidden=6, embed=4, **kwargs):
        super().__init__(state_shapes=[(hidden,), (hidden,)], **kwargs)
        with self.name_scope():
            self.i2h = nn.Dense(4 * hidden, in_units=embed)
            self.h2h = nn.Dense(3 * hidden, in_units=hidden, use_bias=False)
            self.f2h = nn.Dense(hidden, in_units=hidden, use_bias=False)

    def vertex(self, F, v):
        xi, xo, xu, xf = F.split(self.i2h(v.pull("x")), num_outputs=4, axis=-1)
        h_sum, _ = v.gather_sum()
        h_all, c_all = v.gather_all()
        i, o, u = F.split(self.h2h(h_sum), num_outputs=3, axis=-1)
        f = F.sigmoid(v.spread(xf) + self.f2h(h_all))
        c = F.sigmoid(i + xi) * F.tanh(u + xu) + (f * c_all).sum()
        h = F.sigmoid(o + xo) * F.tanh(c)
        v.scatter(h, c)
        v.push(h)

    def node(self, F, x, children):
        xi, xo, xu, xf = F.split(self.i2h(x["x"]), num_outputs=4, axis=-1)
        if self.initial_states and not children:
            children = [self.begin_states(x["x"])]
        h_sum = F.add_n(*[h for h, _ in children]) if children else self.begin_states(x["x"])[0]
        i, o, u = F.split(self.h2h(h_sum), num_outputs=3, axis=-1)
        c = F.sigmoid(i + xi) * F.tanh(u + xu)
        for h_child, c_child in children:
            c = c + F.sigmoid(xf + self.f2h(h_child)) * c_child
        h = F.sigmoid(o + xo) * F.tanh(c)
        return (h, c), (h,)


class ChainLSTM(Model):
    """Gluon's own LSTMCell over a chain, as a language model would use it."""

    def __init__(self, hidden=6, embed=4, vocabulary=9, **kwargs):
        super().__init__(state_shapes=[(hidden,), (hidden,)], **kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(vocabulary, embed)
            self.lstm = rnn.LSTMCell(hidden, input_size=embed)
            self.out = nn.Dense(vocabulary, in_units=hidden)

    def step(self, F, word, label, state):
        h, states = self.lstm(self.embed(word), list(state))
        return states, -F.pick(F.log_softmax(self.out(h)), label)

    def vertex(self, F, v):
        states, loss = self.step(F, v.pull("word"), v.pull("label"), v.gather(0))
        v.scatter(*states)
        v.push(loss)

    def node(self, F, x, children):
        like = self.out.bias.data()
        states, loss = self.step(F, x["word"], x["label"], (children or [self.begin_states(like)])[0])
        return states, (loss,)


class DagNet(Model):
    """Any DAG: max and mean over the children, and their sum through a shared matrix."""

    def __init__(self, hidden=5, embed=4, **kwargs):
        super().__init__(state_shapes=[(hidden,)], **kwargs)
        with self.name_scope():
            self.inp = nn.Dense(hidden, in_units=embed)
            self.merge = nn.Dense(hidden, in_units=hidden, flatten=False)
            self.each = nn.Dense(hidden, in_units=hidden, activation="tanh")

    def vertex(self, F, v):
        (h_all,), (h_sum,) = v.gather_all(), v.gather_sum()
        each = self.each(h_all)
        h = F.tanh(self.inp(v.pull("x")) + self.merge(h_sum) + each.max() * each.mean())
        v.scatter(h)
        v.push(h * 2)

    def node(self, F, x, children):
        if not children and not self.initial_states:
            (zeros,) = self.begin_states(x["x"])
            h = F.tanh(self.inp(x["x"]) + self.merge(zeros))
            return (h,), (h * 2,)
        rows = F.concat(*[h for (h,) in children or [self.begin_states(x["x"])]], dim=0)     # (children, hidden)
        each = self.each(rows)
        pooled = each.max(axis=0, keepdims=True) * each.mean(axis=0, keepdims=True)
        h = F.tanh(self.inp(x["x"]) + self.merge(rows.sum(axis=0, keepdims=True)) + pooled)
        return (h,), (h * 2,)


class MessagePassing(Model):
    """Rounds over a molecule: a GRU on the sum of the neighbours' messages. Slot 0 is the vertex itself."""

    def __init__(self, hidden=5, embed=4, **kwargs):
        super().__init__(state_shapes=[(hidden,)], **kwargs)
        with self.name_scope():
            self.inp = nn.Dense(hidden, in_units=embed)
            self.message = nn.Dense(hidden, in_units=hidden, activation="relu")
            self.gru = rnn.GRUCell(hidden, input_size=hidden)
            self.out = nn.Dense(1, in_units=hidden)

    def vertex(self, F, v):
        (own,), (h_all,) = v.gather(0), v.gather_all()
        incoming = self.message(h_all).sum() + self.inp(v.pull("x"))
        h, _ = self.gru(incoming, [own])
        v.scatter(h)
        v.push(self.out(h))

    def node(self, F, x, children):
        own = children[0][0] if children else self.begin_states(x["x"])[0]
        incoming = self.inp(x["x"])
        for (h,) in children:
            incoming = incoming + self.message(h)
        h, _ = self.gru(incoming, [own])
        return (h,), (self.out(h),)


# ---- graphs ----------------------------------------------------------------------------------


def random_tree(num_vertices, rng, max_children=None):
    """Parents come behind their children; each vertex hangs itself under a random one."""
    parents, counts = [-1] * num_vertices, [0] * num_vertices
    for v in reversed(range(num_vertices - 1)):
        free = [u for u in range(v + 1, num_vertices) if max_children is None or counts[u] < max_children]
        parents[v] = int(rng.choice(free))
        counts[parents[v]] += 1
    return cavs.InputGraph.from_parents(parents)


def random_binary_tree(leaves, rng):
    """Every vertex has no or two children; children are numbered before their parent."""
    edges, free = [], list(range(leaves))
    for v in range(leaves, 2 * leaves - 1):
        k = int(rng.randint(len(free) - 1))
        edges += [(free[k], v), (free[k + 1], v)]
        free[k:k + 2] = [v]
    return cavs.InputGraph.from_edges(2 * leaves - 1, edges)


def random_dag(num_vertices, rng):
    """Vertices with up to three children among the earlier ones; many are shared, some gathered twice."""
    edges = []
    for v in range(1, num_vertices):
        for _ in range(rng.randint(0, 4)):
            edges.append((int(rng.randint(v)), v))
    return cavs.InputGraph.from_edges(num_vertices, edges)


def random_molecule(num_atoms, rng, rounds=3):
    bonds = [(int(rng.randint(v)), v) for v in range(1, num_atoms)]
    if num_atoms > 4:
        bonds.append((0, num_atoms - 1))
    return cavs.InputGraph.unroll(num_atoms, bonds, rounds)


def features(graphs, rng, dtype="float32", size=4):
    rows = sum(g.num_vertices for g in graphs)
    return {"x": mx.nd.array(rng.normal(size=(rows, size)), dtype=dtype)}


def words(graphs, rng, vocabulary=9):
    rows = sum(g.num_vertices for g in graphs)
    return {k: mx.nd.array(rng.randint(0, vocabulary, rows), dtype="float32") for k in ("word", "label")}


def model_cases(rng):
    """name -> (cell, graphs, inputs maker) for all models."""
    binary = [random_binary_tree(n, rng) for n in (1, 5, 3, 8)]
    trees = [random_tree(n, rng) for n in (1, 7, 4, 12)]
    chains = [cavs.InputGraph.chain(n) for n in (3, 1, 6)]
    dags = [random_dag(n, rng) for n in (1, 9, 14)]
    molecules = [random_molecule(n, rng) for n in (3, 1, 6)]
    return {
        "treefc": (TreeFC(), binary, features),
        "binary_treelstm": (BinaryTreeLSTM(), binary, features),
        "childsum_treelstm": (ChildSumLSTM(), trees, features),
        "chain_lstm": (ChainLSTM(), chains, words),
        "dag": (DagNet(), dags, features),
        "message_passing": (MessagePassing(), molecules, features),
        "treefc_learned": (TreeFC(initial_state="learned"), binary, features),
        "childsum_learned": (ChildSumLSTM(initial_state="learned"), trees, features),
        "dag_learned": (DagNet(initial_state="learned"), dags, features),
        "chain_learned": (ChainLSTM(initial_state="learned"), chains, words),
        "treefc_missing": (TreeFC(allow_missing=True), [random_tree(n, rng, 2) for n in (1, 7, 9)], features),
        "treefc_missing_learned": (TreeFC(allow_missing=True, initial_state="learned"),
                                   [random_tree(n, rng, 2) for n in (6, 9)], features),
    }


MODEL_NAMES = list(model_cases(np.random.RandomState(0)))
