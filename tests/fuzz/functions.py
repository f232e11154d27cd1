"""What the samples of a program share: functions from states to a state, plain or marked, blocks, layers and cells."""

from .writer import Val


class Function:
    """How a sample calls it: `text` has a place for every operand, which have `shape`; it gives a state."""

    def __init__(self, text, arity):
        self.text, self.arity = text, arity

    def call(self, args):
        return self.text.format(*args)


def body(g, arity, shape, dtype, symbolic=False, parameters=None, layers=()):
    """Lines of a function's code, its arguments, and the name of its result."""
    kept = g.lines, g.indent, g.pool, g.ns, g.symbolic, g.parameters
    args = [
        Val(g.fresh("a"), g.env["data"](g.draw.data(shape, dtype).tolist(), dtype), own=False) for _ in range(arity)
    ]
    for v in args:
        g.env[v.name] = v.array
    g.lines, g.indent, g.pool, g.ns, g.symbolic, g.parameters = [], 0, list(args), "F", symbolic, parameters
    try:
        x = args[0]
        if arity == 2:
            x = (
                g.let(
                    g.draw.pick("F.broadcast_add({}, {})", "F.broadcast_mul({}, {})", "F.concat({}, {}, dim=0)").format(
                        *args
                    )
                )
                or x
            )
        for _ in range(g.draw.integer(1, 4)):
            if layers and g.draw.chance(0.5):
                x = g.let(g.draw.pick(*layers).format(x)) or x
            x = g.operator(x if g.draw.chance(0.8) else g.recent())
        x = g.coerced(x, shape, dtype)
        return None if x is None else (g.lines, args, x)
    finally:
        g.lines, g.indent, g.pool, g.ns, g.symbolic, g.parameters = kept


def define(g, lines):
    """Run a definition; it stands in front of the program. False if MXNet refuses it."""
    try:
        exec("\n".join(lines), g.env)
    except Exception:
        return False
    g.front += lines
    return True


def function(g, shape, dtype):
    """A function of one or two states."""
    kinds = {"plain": 2.0}
    kinds.update(
        {
            kind: weight
            for family, kind, weight in (
                ("vertices", "marked", 3.0),
                ("vertices", "method", 1.5),
                ("blocks", "block", 4.0),
                ("layers", "layer", 3.0),
                ("cells", "cell", 2.0),
            )
            if g.allowed(family)
        }
    )
    made = MAKERS[g.draw.weighted(kinds)](g, shape, dtype)
    return made or plain(g, shape, dtype)


def plain(g, shape, dtype, mark=()):
    arity = g.draw.integer(1, 2)
    made = body(g, arity, shape, dtype)
    if made is None:
        return Function("nd.tanh({})", 1)
    lines, args, result = made
    name = g.fresh("f")
    head = f"def {name}(F, {', '.join(map(str, args))}):"
    define(g, [*mark, head, *["    " + line for line in lines], f"    return {result}"])
    return Function(f"{name}(nd, {', '.join(['{}'] * arity)})", arity)


def marked(g, shape, dtype):
    return plain(g, shape, dtype, mark=[g.draw.pick("@gdb.vertex", "@gdb.vertex(name='marked')")])


def method(g, shape, dtype):
    """A marked method of a plain Block with layers."""
    return block(g, shape, dtype, kind="method")


def block(g, shape, dtype, kind=None):
    """A HybridBlock with parameters and children; or a Block with a marked method."""
    kind = kind or g.draw.pick("plain", "hybridized", "hybridized", "class", "instance", "static")
    symbolic, arity, parameters, name = kind in ("hybridized", "static"), g.draw.integer(1, 2), [], g.fresh("net")
    layers, children = [], []
    if g.allowed("layers"):
        for k in range(g.draw.integer(0, 2)):
            children.append((f"child{k}", layer_text(g, shape, f"{name}_child{k}_")))
            layers.append(f"self.child{k}({{}})")
    g.env["self"] = Self(g, children, dtype)
    made = body(
        g, arity, shape, dtype, symbolic=symbolic, parameters=None if kind == "method" else parameters, layers=layers
    )
    if made is None:
        return None
    lines, args, result = made
    words = ", ".join([*map(str, args), *[p[0] for p in parameters]])
    marks = ["    @gdb.vertex"] if kind == "method" else []
    code = [
        f"class {name.title()}(gluon.{'Block' if kind == 'method' else 'HybridBlock'}):",
        "    def __init__(self, **kwargs):",
        "        super().__init__(**kwargs)",
        "        with self.name_scope():",
        *[f"            self.{child} = {text}" for child, text in children],
        *[f"            self.{p} = self.params.get({p!r}, shape={tuple(s)!r}, dtype={d!r})" for p, s, d in parameters],
        "            pass",
        *marks,
        f"    def {'step' if kind == 'method' else 'hybrid_forward'}(self, F, {words}):",
        *["        " + line for line in lines],
        f"        return {result}",
    ]
    code = (["@gdb.vertex"] if kind == "class" else []) + code
    code += made_block(g, name, f"{name.title()}(prefix='{name}_')", dtype)
    code += {
        "hybridized": [f"{name}.hybridize()"],
        "static": [f"{name}.hybridize(static_alloc=True)"],
        "instance": [f"gdb.vertex({name})"],
    }.get(kind, [])
    call = (
        f"{name}.step(nd, {', '.join(['{}'] * arity)})" if kind == "method" else f"{name}({', '.join(['{}'] * arity)})"
    )
    return finished(g, code, Function(call, arity), shape, dtype, name)


class Self:
    """Stands for the block while its code is written."""

    def __init__(self, g, children, dtype):
        for name, text in children:
            exec(f"made = {text}", g.env)
            child = g.env.pop("made")
            child.initialize()
            child.cast(dtype)
            setattr(self, name, child)


def made_block(g, name, text, dtype):
    lines = [f"{name} = {text}", f"{name}.initialize(mx.init.Normal(0.5))"]
    if dtype != "float32":
        lines.append(f"{name}.cast({dtype!r})")
    req = g.draw.pick("add", "null", "frozen") if g.allowed("grad_req") and g.draw.chance(0.25) else None
    if req == "frozen":
        lines.append(f"list({name}.collect_params().values())[0].grad_req = 'null'") if "Dense" in text else None
    elif req:
        lines.append(f"{name}.collect_params().setattr('grad_req', {req!r})")
    return lines


def finished(g, code, function, shape, dtype, name):
    """Try the definition with one call of it; None if it cannot be run, or gives no state."""
    if not define(g, code):
        return None
    g.env["probe"] = g.env["data"](g.draw.data(shape, dtype).tolist(), dtype)
    try:
        exec(f"probed = {function.call(['probe'] * function.arity)}", g.env)
        probed = g.env["probed"]
        good = probed.shape == tuple(shape) and probed.asnumpy().dtype == dtype
    except Exception:
        good = False
    if not good:
        del g.front[-len(code) :]
        return None
    # the probe may have initialised parameters: make the block anew, as the program will
    g.blocks.append(name)
    return function


def layer_text(g, shape, prefix, keep=False):
    """A layer for values of `shape`; with `keep` one that keeps the shape."""
    activation = g.draw.pick(None, None, "tanh", "sigmoid", "relu", "softrelu")
    dense = (
        f"nn.Dense({shape[-1] if keep else g.draw.integer(1, 4)}, activation={activation!r}, "
        f"flatten={len(shape) == 2 if keep else g.draw.chance(0.5)}, use_bias={g.draw.chance(0.7)}, prefix={prefix!r})"
    )
    deferred = (
        dense if g.draw.chance(0.5) or not keep else dense.replace("activation", f"in_units={shape[-1]}, activation")
    )
    activations = ["'relu'", "'tanh'", "'sigmoid'", "'softrelu'", "'softsign'"]
    return g.draw.pick(
        deferred,
        deferred,
        f"nn.LayerNorm(epsilon=0.1, prefix={prefix!r})",
        f"nn.Activation({g.draw.pick(*activations)})",
        "nn.Dropout(0)",
        "nn.LeakyReLU(0.1)",
        "nn.ELU()",
        "nn.SELU()",
        "nn.GELU()",
        "nn.Swish()",
        f"nn.PReLU(prefix={prefix!r})",
        *[f"nn.BatchNorm(epsilon=0.1, prefix={prefix!r})"] * g.allowed("batch norm"),
        f"nn.InstanceNorm(epsilon=0.1, prefix={prefix!r})",
        "nn.HybridLambda('tanh')",
    )


def layer(g, shape, dtype):
    """One or two of Gluon's layers."""
    name, count = g.fresh("net"), g.draw.integer(1, 2)
    texts = [layer_text(g, shape, f"{name}_{k}_", keep=True) for k in range(count)]
    code = made_block(g, name, texts[0] if count == 1 else f"nn.HybridSequential(prefix='{name}_')", dtype)
    if count > 1:
        code[1:1] = [f"{name}.add({', '.join(texts)})"]
    code += g.draw.pick([], [f"{name}.hybridize()"], [f"gdb.vertex({name})"])
    return finished(g, code, Function(f"{name}({{}})", 1), shape, dtype, name)


def cell(g, shape, dtype):
    """A recurrent cell: a step, or a short sequence unrolled."""
    if len(shape) != 2:
        return None
    kind, name, size = g.draw.pick("RNNCell", "LSTMCell", "GRUCell"), g.fresh("net"), shape[1]
    states = 2 if kind == "LSTMCell" else 1
    code = made_block(g, name, f"rnn.{kind}({size}, prefix='{name}_'{g.draw.pick('', f', input_size={size}')})", dtype)
    code += g.draw.pick([], [f"{name}.hybridize()"], [f"gdb.vertex({name})"])
    if g.draw.chance(0.3):
        text = f"{name}.unroll(2, [{{}}, {{}}], merge_outputs=False)[0][-1]"
    else:
        text = f"{name}({{}}, [{', '.join(['{}'] * states)}])[{g.draw.pick('0', '1][-1')}]"
    # a cell of two states takes the second operand twice
    call = text if states == 1 or "unroll" in text else text.replace("[{}, {}]", "[{1}, {1}]").replace("({},", "({0},")
    return finished(g, code, Function(call, 2), shape, dtype, name)


MAKERS = {"plain": plain, "marked": marked, "method": method, "block": block, "layer": layer, "cell": cell}
