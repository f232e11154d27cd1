"""Programs of the Cavs face: a random vertex function over random graphs."""

from types import SimpleNamespace

import numpy as np

from cavs_core.mxnet_compat import mx

from .functions import Self, layer_text
from .values import literal
from .writer import Val, Writer

#: What depends on more than rows, runs differently in a vertex function, or is refused there by name.
NOT_IN_VERTICES = {
    "BatchNorm",
    "Embedding",
    "_contrib_SparseEmbedding",
    "_sparse_Embedding",
    "Dropout",
    "MakeLoss",
    "make_loss",
    "softmax_loss",
    "SoftmaxOutput",
    "Softmax",
}


def cavs_program(draw, families):
    """The text of `program(run, data, note)`."""
    g = Writer(draw, families)
    g.dtype = draw.pick("float32", "float32", "float64")
    g.symbolic, g.ns, g.parameters = True, "F", []
    g.left_out = NOT_IN_VERTICES if g.allowed("likes") else NOT_IN_VERTICES | {"reshape_like"}
    states = [(draw.integer(1, 4),) for _ in range(draw.pick(1, 1, 2))]
    width = draw.integer(1, 4)
    children = [
        (f"child{k}", layer_text(g, (1, width), f"cell_child{k}_").replace("nn.Dropout(0)", "nn.SELU()"))
        for k in range(draw.integer(1, 2))
    ]
    children = [(name, text if "BatchNorm" not in text else "nn.GELU()") for name, text in children]
    g.env["self"] = Self(g, children, g.dtype)
    arity = draw.pick(None, None, 1, 2)
    options = {
        "state_shapes": states,
        "initial_state": draw.pick("zeros", "zeros", "learned") if g.allowed("learned states") else "zeros",
        "allow_missing": draw.chance(0.6),
    }
    lines = vertex_lines(g, states, width, arity, [f"self.{name}({{}})" for name, _ in children], options)
    graphs = [graph_text(draw, arity if not options["allow_missing"] else None) for _ in range(draw.integer(1, 4))]
    count = sum(n for n, _ in graphs)
    if count == 0:
        graphs.append((1, "cavs.InputGraph.chain(1)"))
        count = 1
    x = draw.data((count, width), g.dtype)
    text = [
        "def program(run, data, note):",
        "    class Cell(cavs.VertexFunction):",
        "        def __init__(self, **kwargs):",
        f"            super().__init__({', '.join(f'{k}={v!r}' for k, v in options.items())}, **kwargs)",
        "            with self.name_scope():",
        *[f"                self.{name} = {layer}" for name, layer in children],
        *[
            f"                self.{p} = self.params.get({p!r}, shape={tuple(s)!r}, dtype={d!r})"
            for p, s, d in g.parameters
        ],
        "                self.scale = self.params.get('scale', shape=(1, 1))",
        "        def vertex(self, F, v):",
        *[f"            {p} = self.{p}.data()" for p, _, _ in g.parameters],
        *["            " + line for line in lines],
        "    cell = Cell(prefix='cell_')",
        "    cell.initialize(mx.init.Normal(0.5))",
    ]
    text += [f"    cell.cast({g.dtype!r})"] if g.dtype != "float32" else []
    grad = draw.pick("write", "write", "add", None if g.allowed("constant losses") else "write")
    text += [f"    x = data({literal(x)}, {g.dtype!r})"] + (
        [f"    x.attach_grad({grad!r})", "    x.grad[:] = 7"] if grad else []
    )
    if draw.chance(0.15):
        text.append("    cell.collect_params().setattr('grad_req', 'add')")
    text += [
        f"    graphs = [{', '.join(t for _, t in graphs)}]",
        f"    for step in range({draw.integer(1, 2)}):",
        "        with autograd.record():",
        "            pushed = run(cell, graphs, {'x': x})",
    ]
    heads = draw.pick(
        "autograd.backward(pushed)",
        "sum((p * p).sum() for p in pushed).backward()",
        "pushed[0].sum().backward()",
        "autograd.backward([p[:1] for p in pushed])",
    )
    if heads.startswith("autograd.backward(pushed"):
        text.append(f"        {heads}")
    else:
        text.append(
            f"            total = {heads.replace('.backward()', '')}"
            if "autograd" not in heads
            else "            total = sum(p[:1].sum() for p in pushed)"
        )
        text.append("        total.backward()")
    text += ["        note.hold('pushed', *pushed)", "        note.grads('step', {'x': x}, cell)"]
    return "\n".join(text) + "\n"


def vertex_lines(g, states, width, arity, layers, options):
    """The code of `vertex(self, F, v)`: what comes in, operators on it, what goes out."""
    draw, ones = g.draw, [mx.nd.array(g.draw.data((1, *s), g.dtype), dtype=g.dtype) for s in states]
    g.env["v"] = SimpleNamespace(
        pull=lambda name: mx.nd.array(draw.data((1, width), g.dtype), dtype=g.dtype),
        gather=lambda k: ones,
        gather_sum=lambda: ones,
        gather_all=lambda: ones,
        spread=lambda y: y,
        is_leaf=False,
        is_root=False,
    )
    bring(g, "v.pull('x')", 1)
    for slot in range(arity or 0):
        bring(g, f"v.gather({slot})", len(states))
    if arity is None or options["allow_missing"] and draw.chance(0.3):
        if draw.chance(0.5):
            bring(g, "v.gather_sum()", len(states))
        else:
            over_children(g, states, layers)
    for _ in range(draw.integer(1, 5)):
        x = g.recent()
        (draw.chance(0.3) and g.let(draw.pick(*layers).format(x))) or g.operator(x)
    if not g.allowed("unused children"):
        for v in [v for v in g.pool if any(f"{v}" in line and "gather(" in line for line in g.lines)]:
            g.let(f"{g.recent()} + F.mean({v}, axis=1, keepdims=True)")
    found = list(g.pool)
    top = found[-1]
    outs = [g.coerced(v, (1, *s), g.dtype) for s, v in zip(states, (top, *[draw.pick(*found) for _ in states]))]
    scattered = [str(v) if v is not None else f"F.zeros({(1, *s)!r}, dtype={g.dtype!r})" for v, s in zip(outs, states)]
    if not g.allowed("unused children"):
        outs = [g.let(f"{v} + F.mean({top})") or v if v is not None else v for v in outs]
        scattered = [
            str(v) if v is not None else f"F.zeros({(1, *s)!r}, dtype={g.dtype!r})" for v, s in zip(outs, states)
        ]
    pushes = [v for v in draw.some(found)[:3] if len(v.shape) > 1 and v.shape[0] == 1 and v.dtype == g.dtype] or [
        found[0]
    ]
    kind = draw.pick("all", "all", "all", "roots", "leaves differ")
    scatter, push = f"v.scatter({', '.join(scattered)})", f"v.push({', '.join(map(str, pushes))})"
    if kind == "roots":
        g.lines += ["if v.is_root:", f"    {push}", "else:", f"    {scatter}"]
    elif kind == "leaves differ":
        g.lines += [
            "if v.is_leaf:",
            f"    {scatter.replace(scattered[0], scattered[0] + ' * 2', 1)}",
            "else:",
            f"    {scatter}",
            push,
        ]
    else:
        g.lines += [scatter, push]
    return g.lines


def bring(g, text, count):
    """Give what comes in names."""
    names = [g.fresh("v") for _ in range(count)]
    line = f"{', '.join(names)}{',' if count == 1 and 'pull' not in text else ''} = {text}"
    exec(line, g.env)
    g.write(line)
    g.pool += [Val(name, g.env[name], own=False) for name in names]


def over_children(g, states, layers):
    """Values of children: operators on each, then a reduction."""
    kept = g.pool
    g.pool = []
    bring(g, "v.gather_all()", len(states))
    first = g.pool[0]
    if g.draw.chance(0.6):
        g.let(f"v.spread({g.draw.pick(*kept)})")
    for _ in range(g.draw.integer(0, 3)):
        g.operator(g.recent())
    x, name = g.recent(), g.fresh("v")
    if not g.allowed("spread alone"):
        x = g.let(f"{x} + F.mean({first}, axis=1, keepdims=True)") or first
    g.write(f"{name} = {x}.{g.draw.pick('sum', 'sum', 'max', 'mean')}()")
    g.env[name] = x.array
    g.pool = [*kept, Val(name, x.array, own=False)]


def graph_text(draw, arity):
    """(number of vertices, text): a chain, a tree, a forest, a DAG; of `arity` children or any number."""
    n = draw.pick(0, 1, 2, 3, 4, 6)
    if arity == 2:
        depth = draw.integer(0, 2)
        return 2 ** (depth + 1) - 1, f"cavs.InputGraph.complete_binary_tree({depth})"
    if arity == 1 or n and draw.chance(0.2):
        return max(n, 1), f"cavs.InputGraph.chain({max(n, 1)})"
    if draw.chance(0.4):
        edges = [(c, p) for p in range(n) for c in range(p) if draw.chance(0.4)]
        return n, f"cavs.InputGraph.from_edges({n}, {edges})"
    parents = [draw.integer(k + 1, n - 1) if k < n - 1 and not draw.chance(0.15) else -1 for k in range(n)]
    order = list(np.array(draw.random.sample(range(n), n)))
    if draw.chance(0.5):  # children need not come first
        mixed = [-1] * n
        for k, p in enumerate(parents):
            mixed[order[k]] = int(order[p]) if p >= 0 else -1
        parents = mixed
    return n, f"cavs.InputGraph.from_parents({parents})"
