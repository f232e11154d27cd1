"""Ops between the three kinds of value: vertices, their children, and what all share.

All but `sum_rows` need the structure of the launch (whose child is whose): a backend runs them between regions.
"""

from __future__ import annotations

from ..errors import KindError
from ..program import CHILD, ROW, SHARED
from .base import Composite, Op, register


class FromKind(Op):
    """An op that takes values of one kind and gives another."""

    takes: str
    gives: str
    advice: str

    def infer(self, a, x, *index):
        return [(x.shape, x.dtype)]

    def kind(self, specs):
        if specs[0].kind != self.takes:
            raise KindError(f"`{self.name}` wants a {self.takes} value, got a {specs[0].kind} one. {self.advice}")
        return self.gives


class Spread(FromKind):
    """A vertex's value, seen by each of its children."""

    takes, gives = ROW, CHILD
    advice = "spread shows a value of the vertex to its children; a shared value needs no spread."

    def grad(self, b, a, xs, ys, dys):
        return [b.emit("child_sum", dys[0])]


class ChildReduction(FromKind):
    takes, gives = CHILD, ROW
    advice = "Only values from gather_all have one row per child."


class ChildSum(ChildReduction):
    def grad(self, b, a, xs, ys, dys):
        return [b.emit("spread", dys[0])]


class ChildMax(ChildReduction):
    """Every child that equals the maximum gets the gradient, as in MXNet's max."""

    def grad(self, b, a, xs, ys, dys):
        return [b.mul(b.emit("broadcast_equal", xs[0], b.emit("spread", ys[0])), b.emit("spread", dys[0]))]


class ChildMean(Composite):
    def expand(self, b, a, x):
        count = b.emit("child_sum", b.emit("ones_like", x))
        return b.div(b.emit("child_sum", x), b.emit("_maximum_scalar", count, scalar=1.0))      # 0 at a leaf


class StackRows(FromKind):
    """A shared value as a row of every vertex; its gradient is the sum over rows, as for every shared value."""

    takes, gives = SHARED, ROW
    advice = "It is already a value of its own for every vertex."

    def grad(self, b, a, xs, ys, dys):
        return [dys[0]]


class SumRows(Op):
    """The sum over all rows: how the gradient of a shared value is made of those of its uses."""

    def infer(self, a, x):
        return [(x.shape, x.dtype)]

    def kind(self, specs):
        return SHARED

    def rows(self, e, a, x):
        return e.emit("Reshape", e.emit("reduce_sum", x.array, axis=(0,)), shape=x.shape)


for _op in (Spread("spread"), ChildSum("child_sum"), ChildMax("child_max"), ChildMean("child_mean"),
            StackRows("stack_rows"), SumRows("sum_rows")):
    register(_op)

#: ops that need the structure of the launch: run by the backend between regions
SEGMENTED = frozenset({"spread", "child_sum", "child_max", "stack_rows"})
