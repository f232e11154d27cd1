"""Samples: trees, chains and DAGs of calls of shared functions, with operators, views, writes and reads among them."""

from .writer import Val


class Sample:
    """A function of the program that runs one sample; `calls` of it, with data of their own, share launches."""

    def __init__(self, name, specs):
        self.name, self.specs = name, specs  # what its arguments are: (shape, dtype)


def write_sample(g, name, functions, shape, dtype, recorded):
    """Define a function of one sample: it returns its loss, and what somebody holds."""
    args = [
        Val(g.fresh("s"), g.env["data"](g.draw.data(shape, dtype).tolist(), dtype), own=False)
        for _ in range(g.draw.integer(1, 3))
    ]
    kept = g.lines, g.indent, g.pool, g.ns
    g.lines, g.indent, g.pool, g.ns = [], 1, [*g.shared, *args], "nd"
    for v in args:
        g.env[v.name] = v.array
    held = []
    top = structure(g, functions, args, shape, dtype)
    for _ in range(g.draw.integer(0, 4)):
        statement(g, functions, shape, dtype, recorded, held)
        top = g.coerced(g.recent(), shape, dtype) or top
    loss = write_loss(g, top)
    if g.draw.chance(0.3):
        loss = g.let(f"{loss} + {write_loss(g, g.recent())}.sum()") or loss
    if not g.allowed("constant losses"):
        loss = g.let(f"{loss} + ({args[0]} * 0.5).sum()") or loss
    if g.allowed("held"):
        held += [v for v in g.pool[len(g.shared) + len(args) :] if g.draw.chance(0.2)]
    g.write(f"return {loss}, [{', '.join(dict.fromkeys(map(str, held)))}]")
    lines = [f"def {name}({', '.join(map(str, args))}):", *g.lines]
    g.lines, g.indent, g.pool, g.ns = kept
    exec("\n".join(lines), g.env)
    g.front += lines
    return Sample(name, [(shape, dtype)] * len(args))


def structure(g, functions, args, shape, dtype):
    """Calls of the functions as a chain, a tree or a DAG; the last value."""
    kind, values = g.draw.pick("chain", "tree", "dag"), list(args)
    for _ in range(g.draw.integer(1, 5)):
        f = g.draw.pick(*functions)
        if kind == "chain":
            operands = [values[-1], g.draw.pick(*args)]
        elif kind == "tree":
            operands = [values[0], values[1 % len(values)]]
            values = values[1:] or values
        else:
            operands = [g.draw.pick(*values), g.draw.pick(*values)]
        made = g.let(f.call(operands[: f.arity]))
        if made is not None and made.shape == tuple(shape) and made.dtype == dtype:
            values.append(made)
    return values[-1]


def statement(g, functions, shape, dtype, recorded, held):
    """One more line, or a few: what a drawn family says."""
    kinds = {"operator": 6.0, "call": 1.0}
    kinds.update(
        {
            name: weight
            for name, weight in (
                ("views", 2.0),
                ("writes", 0.25 if recorded else 2.0),
                ("reads", 0.5),
                ("flushes", 0.5),
                ("nested scopes", 0.4),
                ("pause", 0.7),
                ("detach", 0.7),
                ("held", 0.5),
            )
            if g.allowed(name)
        }
    )
    kind = g.draw.weighted(kinds)
    x = g.recent(lambda v: v.dtype == g.dtype) or g.pool[-1]
    STATEMENTS[kind](g, x, functions, shape, dtype, recorded, held)


def _operator(g, x, *_):
    g.operator(x)


def _call(g, x, functions, shape, dtype, *_):
    f = g.draw.pick(*functions)
    operand = g.coerced(x, shape, dtype)
    if operand is not None:
        g.let(f.call([operand] * f.arity))


def part_of(g, x):
    """Text of a part of x by basic indexing."""

    def one(n):
        k = g.draw.integer(0, n - 1)
        return g.draw.pick(str(k), str(k - n), f"{k}:{k + 1}", f"{k}:", f":{k + 1}", ":", "::2", "::-1")

    keys = [one(n) for n in x.shape[: g.draw.integer(1, len(x.shape))]]
    if len(keys) == len(x.shape) and not any(":" in key for key in keys):
        keys[-1] = ":"  # one number is an array of one: kept, but seldom of use
    if g.draw.chance(0.1):
        keys.insert(g.draw.integer(0, len(keys)), "None")
    if g.draw.chance(0.1):
        keys.append("...")
    return f"{x}[{', '.join(keys)}]"


def _view(g, x, *_):
    kind = g.draw.pick("part", "part", "part", "reshape", "expand", "transpose", "iterate")
    made = g.let(
        {
            "part": lambda: part_of(g, x),
            "reshape": lambda: f"{x}.reshape({g.new_shape(x.shape)!r})",
            "expand": lambda: f"{x}.expand_dims({g.draw.integer(0, len(x.shape))})",
            "transpose": lambda: f"{x}.T",
            "iterate": lambda: f"nd.stack(*list({x}), axis=0)",
        }[kind]()
    )
    if made is not None and g.draw.chance(0.7):
        g.operator(made)


def _write(g, x, functions, shape, dtype, recorded, held):
    kind = g.draw.pick("add", "scale", "outside", *(["all", "number", "part"] if g.allowed("writes of parts") else []))
    if kind == "outside":
        names = [name for name, grad in g.leaves.items() if grad is None and g.env[name].dtype == x.array.dtype]
        if names:
            g.run(f"{g.draw.pick(*names)}[:] = {g.draw.number()}")
        return
    if not x.own:
        return
    before = g.let(f"{x} * 1") if g.draw.chance(0.3) else None
    y = g.same(x)
    number = g.draw.number() if g.floating(x) else 2
    g.run(
        {
            "add": f"{x} += {y}",
            "scale": f"{x} *= {number}",
            "all": f"{x}[:] = {y}",
            "number": f"{x}[:] = {number}",
            "part": f"{part_of(g, x)} = {number}",
        }[kind]
    )
    x.array = g.env[x.name]
    if before is not None:
        held.append(before)


def _read(g, x, functions, shape, dtype, recorded, held):
    number = g.fresh("n")
    text = g.draw.pick(
        f"{number} = 2.0 if {x}.sum().asscalar() > 0.3 else 0.5",
        f"{number} = float({x}.asnumpy().mean())" if not g.special else f"{number} = 0.5",
    )
    if g.run(text):
        g.let(f"{x} * {number}")


def _flush(g, x, *_):
    g.run("gdb.flush()")


def inside(g, head, rest):
    """Lines below `head`."""
    g.write(head)
    g.indent += 1
    count = len(g.lines)
    rest()
    if len(g.lines) == count:
        g.write("pass")
    g.indent -= 1


def _nested(g, x, *rest):
    def lines():
        for _ in range(g.draw.integer(1, 2)):
            g.operator(x)

    inside(g, "with scope():", lines)


def _pause(g, x, functions, shape, dtype, recorded, held):
    def lines():
        y = g.operator(x)
        if g.allowed("writes") and y.own and y is not x and g.draw.chance(0.4):
            g.run(f"{y} += {g.same(y)}")

    inside(g, f"with autograd.{g.draw.pick('pause()', 'pause()', 'predict_mode()', 'train_mode()')}:", lines)
    if g.draw.chance(0.5):
        g.let(f"{x} + {g.same(x)}")


def _detach(g, x, *_):
    g.let(g.draw.pick(f"{x}.detach()", f"nd.BlockGrad({x})", f"{x} * {x}.detach()"))


def _hold(g, x, functions, shape, dtype, recorded, held):
    held.append(x)


STATEMENTS = {
    "operator": _operator,
    "call": _call,
    "views": _view,
    "writes": _write,
    "reads": _read,
    "flushes": _flush,
    "nested scopes": _nested,
    "pause": _pause,
    "detach": _detach,
    "held": _hold,
}


def write_loss(g, x):
    """Text of a loss of x."""
    texts = [
        f"({x} * {x}).sum()",
        f"nd.sum({x})",
        f"{x}.mean()",
        f"nd.square({x}).mean()",
        f"({x} * {g.draw.number()})",
    ]
    if g.allowed("losses") and g.floating(x):
        target = g.leaf(x.shape, x.dtype)
        texts += [
            f"gluon.loss.{kind}()({x}, {target})"
            for kind in ("L2Loss", "L1Loss", "HuberLoss", "SigmoidBCELoss", "LogisticLoss", "HingeLoss")
        ]
        if len(x.shape) == 2:
            label = g.leaf((x.shape[0],), "float32", values=g.draw.numbers.randint(0, x.shape[1], (x.shape[0],)))
            texts += [
                f"gluon.loss.SoftmaxCELoss()({x}, {label})",
                f"gluon.loss.KLDivLoss()(nd.log_softmax({x}), nd.softmax({target}))",
                f"nd.pick(nd.log_softmax({x}), {label})",
            ] * 2
    return g.draw.pick(*texts)
