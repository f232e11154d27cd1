"""Writes a program line by line, and runs each line as it is written, to know shapes and to drop what MXNet refuses."""

import numpy as np

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

from .families import FLOATS, INTEGERS
from .operators import WEIGHTS
from .shapes import DRAWN
from .values import literal

LARGEST, LONGEST = 1e3, 200  # of numbers and of arrays; larger ones are not written


class Val:
    """A name of the program with the array that it stood for when it was written."""

    def __init__(self, name, array, own=True):
        self.name, self.array, self.own = name, array, own  # own: made by this function, so it may be written in place

    shape = property(lambda self: self.array.shape)
    size = property(lambda self: self.array.size)
    dtype = property(lambda self: np.dtype(self.array.dtype).name)

    def __str__(self):
        return self.name


def make_data(values, dtype):
    """What `data` means in a program."""
    return mx.nd.array(np.array(values, dtype), dtype=dtype)


def namespace():
    """What every program may name."""
    return {
        "np": np,
        "gdb": gdb,
        "autograd": autograd,
        "gluon": gluon,
        "mx": mx,
        "nd": mx.nd,
        "F": mx.nd,
        "nn": gluon.nn,
        "rnn": gluon.rnn,
        "cavs": cavs,
        "nan": np.nan,
        "inf": np.inf,
        "data": make_data,
    }


class Writer:
    def __init__(self, draw, families):
        self.draw, self.families = draw, families
        self.special, self.env = False, namespace()
        self.front, self.lines, self.indent = [], [], 0  # arrays and functions; then what runs
        self.pool, self.leaves, self.weights = [], {}, []  # leaves: name -> grad_req, or None
        self.ns, self.dtype, self.count = "nd", "float32", 0
        self.left_out = set()  # operators that this program does not call
        self.shared, self.blocks = [], []  # values that all samples may read; names of blocks
        self.symbolic, self.parameters = False, None  # inside a block's code

    # ---- names and lines ---------------------------------------------------------------------

    def fresh(self, stem):
        self.count += 1
        return f"{stem}{self.count}"

    def allowed(self, family):
        return family in self.families

    def wild(self):
        """Whether an operator may be called where it is singular."""
        return self.allowed("singular points") and self.draw.chance(0.15)

    def floating(self, x):
        return x.dtype.startswith("float")

    def dtypes(self):
        found = ["float32", "float64"] + ["float16"] * self.allowed("float16")
        return found + INTEGERS[:1] * self.allowed("integers")

    def write(self, line):
        self.lines.append("    " * self.indent + line)

    def run(self, line):
        """Run a line and write it down; False if MXNet refuses it."""
        try:
            exec(line, self.env)
            mx.nd.waitall()
        except Exception:
            return False
        self.write(line)
        return True

    def let(self, text):
        """Give the array that `text` makes a name; None if there is none, or if it is no use."""
        if not text:
            return None
        name = self.fresh("v")
        try:
            exec(f"{name} = {text}", self.env)
            array = self.env[name]
            numbers = array.asnumpy()
        except Exception:
            return None
        if (
            not numbers.size
            or numbers.size > LONGEST
            or len(numbers.shape) > 6
            or (len(numbers.shape) > 4 and not self.allowed("many axes"))
        ):
            return None
        if not self.special and numbers.dtype.kind == "f" and not np.all(np.abs(numbers) < LARGEST):
            return None
        self.write(f"{name} = {text}")
        self.pool.append(Val(name, array))
        return self.pool[-1]

    # ---- operands ----------------------------------------------------------------------------

    def recent(self, fits=lambda v: True):
        """A value, more likely one of the last; None if none fits."""
        fitting = [v for v in self.pool if fits(v)]
        if not fitting:
            return None
        return fitting[-1 - min(int(self.draw.random.expovariate(0.5)), len(fitting) - 1)]

    def other(self, fits):
        return self.recent(lambda v: v.dtype == self.dtype and fits(v))

    def same(self, x):
        """An operand of the shape and dtype of x."""
        y = self.recent(lambda v: v.shape == x.shape and v.dtype == x.dtype)
        return y if y is not None and self.draw.chance(0.8) else f"({x} * 2)"

    def broad(self, x):
        """An operand that broadcasts with x."""

        def fits(v):
            return (
                v.dtype == x.dtype
                and len(v.shape) == len(x.shape)
                and all(n == m or 1 in (n, m) for n, m in zip(v.shape, x.shape))
            )

        if self.draw.chance(0.25):
            return self.weight(tuple(n if self.draw.chance(0.5) else 1 for n in x.shape), x.dtype)
        if self.draw.chance(0.25):
            return f"{self.ns}.mean({x}, axis={self.draw.axis(x.shape)}, keepdims=True)"
        return self.recent(fits)

    def leaf(self, shape, dtype=None, grad=None, values=None):
        """An array from outside the scope; `grad`: its grad_req, or None."""
        dtype, name = dtype or self.dtype, self.fresh("x")
        values = self.draw.data(shape, dtype, self.special and self.draw.chance(0.7)) if values is None else values
        self.front.append(f"{name} = data({literal(values)}, {dtype!r})")
        exec(self.front[-1], self.env)
        if grad is not None:
            self.front.append(f"{name}.attach_grad({grad!r})")
            if grad != "null":
                self.front.append(f"{name}.grad[:] = 7")
            for line in self.front[-2 if grad != "null" else -1 :]:
                exec(line, self.env)
        self.leaves[name] = grad
        return Val(name, self.env[name], own=False)

    def grad_req(self):
        return self.draw.pick("write", "write", "write", "add", "null" if self.allowed("null") else None, None)

    def weight(self, shape, dtype=None):
        """An array that many calls share: one from outside, or a parameter of the block."""
        dtype = dtype or self.dtype
        if not dtype.startswith("float"):
            return self.constant(shape, dtype=dtype)
        if self.parameters is not None:
            name = self.fresh("w")
            self.parameters.append((name, shape, dtype))
            self.env[name] = mx.nd.array(self.draw.data(shape, dtype), dtype=dtype)
            return Val(name, self.env[name], own=False)
        for w in self.weights:
            if w.shape == tuple(shape) and w.dtype == dtype and self.draw.chance(0.7):
                return w
        self.weights.append(self.leaf(shape, dtype, self.grad_req()))
        return self.weights[-1]

    def constant(self, shape, dtype=None, positive=False):
        if self.symbolic:
            return None
        values = self.draw.data(shape, dtype or self.dtype)
        return self.leaf(shape, dtype, values=np.abs(values) + 0.5 if positive else values)

    def indices(self, shape, size, dtype=None):
        """Whole numbers of 0..size-1: an array from outside, or, as an index that is data as well, a value."""
        if self.symbolic:
            return None
        if self.allowed("data as index") and self.draw.chance(0.3):
            value = self.recent(lambda v: v.shape == tuple(shape) and self.floating(v))
            if value is not None:
                return f"{self.ns}.clip({value}, 0, {size - 1})" if self.draw.chance(0.5) else value
        values = self.draw.numbers.randint(0, size, shape)
        return self.leaf(
            shape,
            dtype or self.draw.pick("float32", "int32", self.dtype if self.floating_dtype() else "int32"),
            values=values,
        )

    def floating_dtype(self):
        return self.dtype in FLOATS

    def new_shape(self, shape):
        """A shape of as many entries, with MXNet's codes."""
        size = int(np.prod(shape))
        kind = self.draw.pick("flat", "two", "front", "merge", "keep", "split")
        if kind == "flat":
            return self.draw.pick((-1,), (-1, 1), (1, -1), (size,))
        if kind == "two":
            divisor = self.draw.pick(*[n for n in range(1, size + 1) if size % n == 0])
            return self.draw.pick((divisor, -1), (divisor, size // divisor), (-1, divisor))
        if kind == "front":
            return (1, *shape) if self.draw.chance(0.5) else (*shape, 1)
        if kind == "merge" and len(shape) > 1:
            return self.draw.pick((-3, *[0] * (len(shape) - 2)), (0, -1), (0, -2))
        if kind == "split":
            return (-4, 1, -1, -2)
        return (0,) * len(shape)

    # ---- operators ---------------------------------------------------------------------------

    def operator(self, x, tries=6):
        """A new value: some operator of the table on x."""
        for _ in range(tries):
            name = self.draw.weighted(self.operators())
            made = self.let(DRAWN[name](self, x))
            if made is not None:
                return made
        return x

    def operators(self):
        """The drawings that this run may make, with their weights."""
        if not hasattr(self, "_operators"):
            left_out = self.left_out | {
                name for family, names in OPERATORS_OF.items() if not self.allowed(family) for name in names
            }
            self._operators = {name: WEIGHTS.get(name, 1.0) for name in DRAWN if name not in left_out}
        return self._operators

    def coerced(self, x, shape, dtype):
        """A value of `shape` and `dtype` that depends on x."""
        text = str(x)
        if x.dtype != dtype:
            text = f"{self.ns}.cast({text}, dtype={dtype!r})"
        if x.shape != tuple(shape):
            if x.size == int(np.prod(shape)):
                text = f"{self.ns}.reshape({text}, shape={tuple(shape)!r})"
            else:
                mean = f"{self.ns}.reshape({self.ns}.mean({text}), shape={(1,) * len(shape)!r})"
                text = f"{self.ns}.broadcast_to({mean}, shape={tuple(shape)!r})"
        return x if text == str(x) else self.let(text)


#: Operators that belong to a family which a run may leave out.
OPERATORS_OF = {
    "detach": ["BlockGrad"],
    "loss heads": ["MakeLoss", "make_loss", "softmax_loss", "SoftmaxOutput", "Softmax"],
    "batch norm": ["BatchNorm"],
    "gemm": ["_linalg_gemm", "_linalg_gemm2"],
    "slice assign": ["_slice_assign", "_slice_assign_scalar", "_crop_assign", "_crop_assign_scalar"],
}
