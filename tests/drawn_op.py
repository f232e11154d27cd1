"""Drawn cases for the tests of ops: shapes, attributes, and operands that are stacked or shared."""

import ctypes

import numpy as np
from hypothesis import strategies as st
from op_check import ROWS, check_op

from cavs_core.lazy import operator_name
from cavs_core.mxnet_compat import mx
from cavs_core.ops import TABLE


class Case:
    """Collects the operands of one call, then compares it with MXNet's for every sample.

    `dtype` is the one of floating operands; each operand is stacked or shared, as drawn.
    """

    def __init__(self, data, dtypes=("float32", "float64")):
        self.draw = data.draw
        self.rng = np.random.RandomState(data.draw(st.integers(0, 999)))
        self.dtype = self.pick(*dtypes)
        self.args, self.shared, self.fixed = [], [], []

    # ---- attributes --------------------------------------------------------------------------

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def shape(self, low=1, high=4, size=4):
        """`low` to `high` axes of 1 to `size`."""
        return tuple(self.draw(st.lists(st.integers(1, size), min_size=low, max_size=high)))

    def axis(self, shape):
        return self.integer(-len(shape), len(shape) - 1)

    def axes(self, shape):
        """What a reduction takes: None, a number, or a tuple of different axes."""
        kind = self.pick("none", "one", "some")
        if kind == "none":
            return None
        if kind == "one":
            return self.axis(shape)
        chosen = self.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
        return tuple(i - self.pick(0, len(shape)) for i in chosen)

    # ---- operands: each takes what one sample sees, and returns that shape ---------------------

    def operand(self, shape, values="normal", shared=None):
        """Floating numbers; "ties" are small whole numbers, "positive" are away from zero."""
        full = (ROWS, *shape)
        numbers = {"normal": lambda: self.rng.normal(size=full), "ties": lambda: self.rng.randint(-2, 3, full),
                   "positive": lambda: self.rng.uniform(0.5, 1.5, full)}[values]()
        return self._add(numbers.astype(self.dtype), shape, shared)

    def index(self, shape, low, high, dtypes=("int32",), shared=None):
        """Whole numbers of low..high; they get no gradient."""
        self.fixed.append(len(self.args))
        return self._add(self.rng.randint(low, high + 1, (ROWS, *shape)).astype(self.pick(*dtypes)), shape, shared)

    def _add(self, rows, shape, shared):
        if self.draw(st.booleans()) if shared is None else shared:
            self.shared.append(len(self.args))
            rows = rows[0]
        self.args.append(rows)
        return tuple(shape)

    def check(self, fn, **options):
        return check_op(fn, *self.args, shared=self.shared, fixed=self.fixed, **options)


def check_aliases(names):
    """Every name that MXNet has for an operator leads to one object of the table."""
    for name in names:
        handle = ctypes.c_void_p()
        if mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)) == 0:
            canonical = operator_name(handle.value)
            assert TABLE[name] is TABLE.get(canonical), f"{name} is {canonical} in MXNet"
