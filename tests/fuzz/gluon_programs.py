"""Programs of the Gluon face: functions, samples that call them, scopes, backward passes, steps of a Trainer."""

from .families import INTEGERS
from .functions import function
from .samples import write_sample
from .writer import Writer


def gluon_program(draw, families):
    """The text of `program(scope, data, note)`."""
    g = Writer(draw, families)
    g.special = g.allowed("special values") and draw.chance(0.15)
    others = [d for d in ("float16",) if g.allowed(d)] + INTEGERS * g.allowed("integers")
    g.dtype = draw.pick("float32", "float32", "float32", "float32", "float64", *(others if draw.chance(0.4) else []))
    shape = draw.shape(
        *((5, 6) if g.allowed("many axes") and draw.chance(0.05) else (1, 4) if draw.chance(0.3) else (2, 2))
    )
    if draw.chance(0.4):
        shape = draw.pick((1, 3), (2, 3), (1, 4), (3,), (2, 2))
    recorded = draw.chance(0.8)
    functions = [function(g, shape, g.dtype) for _ in range(draw.integer(1, 3))]
    leaves = [g.leaf(shape, grad=leaf_grad(g)) for _ in range(draw.integer(2, 5))]
    shared = []
    if g.allowed("broadcast over samples") and draw.chance(0.25):
        f = draw.pick(*functions)
        value = g.let(f.call([draw.pick(*leaves)] * f.arity))
        shared, g.lines = ([value], g.lines) if value is not None and value.shape == shape else ([], [])
    g.shared = shared + ([leaves[0]] if draw.chance(0.3) else [])
    samples = [
        write_sample(g, g.fresh("sample"), functions, shape, g.dtype, recorded) for _ in range(draw.integer(1, 3))
    ]
    front, g.lines = list(g.lines), []
    calls = [(draw.pick(*samples), leaves) for _ in range(draw.integer(2, 4))]
    text = ["def program(scope, data, note):"]
    main(g, front, [f"{s.name}({', '.join(str(draw.pick(*found)) for _ in s.specs)})" for s, found in calls], recorded)
    text += ["    " + line for line in g.front + g.lines]
    return "\n".join(text) + "\n"


def leaf_grad(g):
    if not g.allowed("constant losses"):
        return g.draw.pick("write", "write", "add" if g.allowed("grad_req") else "write")
    if g.dtype.startswith("float") or g.allowed("integer gradients"):
        return g.grad_req() if g.allowed("grad_req") else g.draw.pick("write", "write", None)
    return None


def main(g, front, calls, recorded):
    """The steps: record, run the samples in a scope, go backward, update."""
    draw = g.draw
    steps = draw.integer(1, 3)
    names = [(f"l{k}", f"held{k}") for k in range(len(calls))]
    wanted = [name for name, grad in g.leaves.items() if grad not in (None, "null")]
    trainer = recorded and g.blocks and g.allowed("trainer") and draw.chance(0.5)
    if g.allowed("exceptions") and draw.chance(0.1):
        abandoned(g, front, calls[0], recorded)
    g.write("trainer = None")
    g.write(f"for step in range({steps}):")
    g.indent += 1
    within = Passes(g, [loss for loss, _ in names], wanted, recorded)
    opened = 0
    for head in (["with autograd.record():"] if recorded else []) + ["with scope():"]:
        g.write(head)
        g.indent += 1
        opened += 1
    for line in front:
        g.write(line)
    for (loss, held), text in zip(names, calls):
        g.write(f"{loss}, {held} = {text}")
        g.write(f"note.hold('{held}', {loss}, *{held})")
        if g.allowed("held") and draw.chance(0.3):
            g.write(f"del {held}")
        if g.allowed("flushes") and draw.chance(0.1):
            g.write("gdb.flush()")
        if g.allowed("reads") and draw.chance(0.05):
            g.write(f"note.read('{loss}', {loss})")
    within.write("in scope")
    g.indent -= 1
    within.write("in record")
    g.indent -= opened - 1
    within.write("behind")
    g.indent += 0
    arrays = "{" + ", ".join(f"'{name}': {name}" for name in g.leaves) + "}"
    g.write(f"note.grads('step', {arrays}{''.join(', ' + b for b in g.blocks)})")
    if trainer:
        write_step(g)
    g.write(f"note.data('end', {arrays}{''.join(', ' + b for b in g.blocks)})")
    g.indent -= 1


def abandoned(g, front, call, recorded):
    """A scope that an exception leaves: what was recorded is gone, and nothing of it shows later."""
    g.write("try:")
    g.write(f"    with {'autograd.record(), ' if recorded else ''}scope():")
    for line in [*front, f"lost = {call}"]:
        g.write(f"        {line}")
    g.write("        raise KeyError('mine')")
    g.write("except KeyError:")
    g.write("    lost = None")


class Passes:
    """A form of backward pass, and where it stands."""

    def __init__(self, g, losses, wanted, recorded):
        self.g, self.losses, self.wanted = g, losses, wanted
        inside = g.allowed("passes inside")
        self.place = (
            g.draw.pick("behind", "behind", *(["in record", "in scope"] if inside else [])) if recorded else "nowhere"
        )
        kinds = {"list": 4.0, "sum": 3.0}
        kinds.update(
            {
                kind: weight
                for family, kind, weight in (
                    ("passes one by one", "each", 1.5),
                    ("passes one by one", "some", 1.0),
                    ("grad", "grad", 1.0),
                    ("unused samples", "first", 1.0),
                )
                if g.allowed(family)
            }
        )
        kinds.update({"heads": 1.0, "twice": 0.7, "total": 1.0})
        self.kind = g.draw.weighted(kinds)
        if self.kind == "total" and self.place == "behind":
            self.place = "in record"

    def write(self, place):
        if place != self.place:
            if place == "in scope" and self.kind == "sum" and self.place != "nowhere":
                self.g.write(f"total = {self.added()}")
            return
        for line in getattr(self, self.kind)():
            self.g.write(line)

    def added(self):
        return "sum(x.sum() for x in [" + ", ".join(self.losses) + "])"

    def all(self):
        return ", ".join(self.losses)

    def list(self):
        return [f"autograd.backward([{self.all()}])"]

    def sum(self):
        return ([f"total = {self.added()}"] if self.place == "in scope" else []) + ["total.backward()"]

    def total_of(self, losses):
        return " + ".join(f"{x}.sum() * {self.g.draw.number()}" for x in losses)

    def each(self):
        return [f"{x}.backward({'retain_graph=True' if self.g.draw.chance(0.5) else ''})" for x in self.losses]

    def some(self):
        """Arithmetic behind the scope over some of the losses."""
        chosen = self.g.draw.some(self.losses)
        return ["with autograd.record():", f"    part = {self.total_of(chosen)}", "part.backward()"]

    def first(self):
        return [f"{self.losses[0]}.backward()"]

    def total(self):
        """Arithmetic over all losses, on the tape."""
        return [f"total = {self.total_of(self.losses)}", "total.backward()"]

    def heads(self):
        gradients = ", ".join(f"nd.ones_like({x}) * {self.g.draw.number()}" for x in self.losses)
        return [f"autograd.backward([{self.all()}], [{gradients}])"]

    def twice(self):
        return [f"autograd.backward([{self.all()}], retain_graph=True)", f"autograd.backward([{self.all()}])"]

    def grad(self):
        if not self.wanted:
            return self.list()
        chosen = self.g.draw.some(self.wanted)
        return [f"note.hold('autograd.grad', *autograd.grad([{self.all()}], [{', '.join(chosen)}]))"]


def write_step(g):
    draw = g.draw
    kind, options = draw.pick(
        ("sgd", {"learning_rate": 0.1}),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}),
        ("adam", {"learning_rate": 0.1, "epsilon": 0.01}),
    )
    g.write("if trainer is None:")
    params = " + ".join(f"list({b}.collect_params().values())" for b in g.blocks)
    g.write(f"    trainer = gluon.Trainer({params}, {kind!r}, {options!r})")
    ignore = ", ignore_stale_grad=True" if draw.chance(0.5) else ""
    g.write(f"note.stale('step', lambda: trainer.step(2{ignore}))")
    if draw.chance(0.2):
        g.write(f"{draw.pick(*g.blocks)}.collect_params().zero_grad()")
