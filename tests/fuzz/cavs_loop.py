"""The plain loop over vertices: the oracle of the Cavs face, written in MXNet.

It is pasted above a shrunk program that needs it.
"""

import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx


class Kids:
    """A value of every child; `probe` stands for one where there is none."""

    def __init__(self, items, probe):
        self.items, self.probe = items, probe

    def each(self, fn, others=(), options=None):
        """Apply to every child; the other operands are values of children as well, or shared."""

        def at(k):
            picked = [(x.probe if k is None else x.items[k]) if isinstance(x, Kids) else x for x in (self, *others)]
            return fn(*picked, **(options or {}))

        with autograd.pause():
            probe = at(None)
        return Kids([at(k) for k in range(len(self.items))], probe)

    def reduce(self, name, args, options):
        if args or options:
            return self.each(lambda x: getattr(x, name)(*args, **options))
        if not self.items:
            return mx.nd.zeros(self.probe.shape, dtype=self.probe.dtype)
        return getattr(mx.nd.stack(*self.items, axis=0), name)(axis=0)

    def sum(self, *args, **options):
        return self.reduce("sum", args, options)

    def max(self, *args, **options):
        return self.reduce("max", args, options)

    def mean(self, *args, **options):
        return self.reduce("mean", args, options)

    def __getattr__(self, name):
        return lambda *args, **options: self.each(lambda x: getattr(x, name)(*args, **options))


def operator_of(name):
    return lambda self, *others: self.each(lambda x, *ys: getattr(x, name)(*ys), others)


for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "gt", "le", "eq", "neg", "getitem"):
    setattr(Kids, f"__{name}__", operator_of(f"__{name}__"))


def apply(fn, args, options):
    """Call on arrays, or for every child."""
    kids = [k for k, x in enumerate(args) if isinstance(x, Kids)]
    if not kids:
        return fn(*args, **options)
    first, others = args[kids[0]], [x for k, x in enumerate(args) if k != kids[0]]
    return first.each(lambda x, *ys: fn(*ys[: kids[0]], x, *ys[kids[0] :], **options), others)


class Each:
    """A module of operators, or a cell with its layers, whose calls apply to every child."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        found = getattr(self.module, name)
        if isinstance(found, (gluon.Block, type(mx.nd.tanh))):
            return lambda *args, **options: apply(found, args, options)
        return Each(found) if type(found).__name__ == "module" else found


class LoopVertex:
    """What `vertex(F, v)` sees of its vertex."""

    def __init__(self, cell, row, children, is_root, dtype):
        self.cell, self.row, self.children, self.is_root, self.dtype = cell, row, children, is_root, dtype
        self.is_leaf, self.scattered, self.pushed, self.slots, self.any_number = not children, None, [], -1, False

    def initial(self):
        learned = [p.data() for p in self.cell.initial_states]
        return tuple(learned or [mx.nd.zeros((1, *s), dtype=self.dtype) for s in self.cell.state_shapes])

    def pull(self, name):
        return self.row[name]

    def gather(self, slot):
        self.slots = max(self.slots, slot)
        return self.children[slot] if slot < len(self.children) else self.initial()

    def gather_sum(self):
        self.any_number = True
        return tuple(mx.nd.add_n(*xs) for xs in zip(*self.children)) if self.children else self.initial()

    def gather_all(self):
        self.any_number = True
        learned = [self.initial()] if self.cell.initial_states and not self.children else []
        return tuple(
            Kids([c[k] for c in self.children or learned], mx.nd.ones((1, *s), dtype=self.dtype))
            for k, s in enumerate(self.cell.state_shapes)
        )

    def spread(self, value):
        count = max(len(self.children), int(bool(self.cell.initial_states)))
        return Kids([value] * count, value)

    def scatter(self, *states):
        self.scattered = states

    def push(self, *values):
        self.pushed += values

    def check(self):
        """A vertex that is no leaf has the children that the function gathers by number."""
        few, many = len(self.children) <= self.slots, len(self.children) > self.slots + 1 and not self.any_number
        if self.children and self.slots >= 0 and not self.cell.allow_missing and (few or many):
            raise cavs.ArityError(f"{len(self.children)} children, {self.slots + 1} gathered")


def loop_run(cell, graphs, inputs):
    """Vertex after vertex, children first: a (vertices that push, ...) array for every pushed value."""
    graph, dtype = cavs.InputGraph.batch(graphs), next(iter(cell.collect_params().values())).dtype
    roots, states, pushed = set(graph.roots.tolist()), {}, {}
    waiting = list(range(graph.num_vertices))[::-1]
    while waiting:
        at = waiting.pop()
        children = [int(c) for c in graph.children_of(at)]
        missing = [c for c in children if c not in states]
        if missing:
            waiting += [at, *missing]
        elif at not in states:
            row = {
                key: rows[at : at + 1]
                if isinstance(rows, mx.nd.NDArray)
                else mx.nd.array(rows[at : at + 1], dtype=rows.dtype)
                for key, rows in inputs.items()
            }
            v = LoopVertex(cell, row, [states[c] for c in children], at in roots, dtype)
            type(cell).vertex(Each(cell), Each(mx.nd), v)
            v.check()
            states[at] = v.scattered
            if v.pushed:
                pushed[at] = v.pushed
    return [mx.nd.concat(*column, dim=0) for column in zip(*[pushed[at] for at in sorted(pushed)])]


def cavs_run(cell, graphs, inputs, backend):
    """The same by the engine."""
    out = cavs.run(cell, graphs, inputs, backend=backend)
    return out.pushed if isinstance(out.pushed, list) else [out.pushed]
