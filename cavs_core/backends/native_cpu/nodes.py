"""The graph that a kernel's instructions become: what is computed, and views of it.

A node's elements are numbered row by row over its shape, which has no axes of size one. A `Ref` sees some of them:
element (i, j, ..) of the view is number offset + i * strides[0] + j * strides[1] + .. of the node. So slices, splits,
transposes, reshapes and broadcasting are arithmetic on refs, and no code.

    Input    an operand of the kernel
    Iota     element k is the number k
    Point    one expression for every element
    Reduce   sums, extremes and the like along axes; also additions to rows that an index names
    Pieces   memory that other nodes fill: concat, assignment to slices

Points are computed where they are read, unless they are `stored`. Invariant: a ref to a point that is not stored only
permutes and repeats its axes; other views are moved on to the point's operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .ir import Access

__all__ = ["CHEAP", "Node", "Input", "Iota", "Point", "Reduce", "Pieces", "Ref", "Target", "Graph", "row_major",
           "through"]


#: a point that costs more is not computed twice
CHEAP = 8


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of contiguous elements; 0 for axes of size one."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step if n > 1 else 0)
        step *= n
    return tuple(strides[::-1])


@dataclass(frozen=True)
class Ref:
    node: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]        # 0 for axes of size one
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        return self.node.dtype

    @property
    def whole(self) -> bool:
        """Whether this is the node itself, up to axes of size one."""
        return self.offset == 0 and squeezed(self).strides == row_major(self.node.shape) and self.size == self.node.size

    def broadcast(self, shape: Sequence[int]) -> Ref:
        return Ref(self.node, tuple(shape), self.strides, self.offset)

    def transpose(self, axes: Sequence[int]) -> Ref:
        return Ref(self.node, tuple(self.shape[i] for i in axes), tuple(self.strides[i] for i in axes), self.offset)

    def insert(self, axis: int, size: int = 1) -> Ref:
        """A new axis along which nothing changes."""
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(axis, size)
        strides.insert(axis, 0)
        return Ref(self.node, tuple(shape), tuple(strides), self.offset)

    def drop(self, axis: int) -> Ref:
        """Without an axis: its first element."""
        return Ref(self.node, self.shape[:axis] + self.shape[axis + 1:], self.strides[:axis] + self.strides[axis + 1:],
                   self.offset)


def squeezed(ref: Ref) -> Ref:
    kept = [i for i, n in enumerate(ref.shape) if n > 1]
    return ref.transpose(kept)


def through(outer: Ref, inner: Ref) -> Ref:
    """`inner`, an operand of the point that `outer` permutes and repeats, as seen by the axes of `outer`."""
    axis_of = {step: axis for axis, step in enumerate(row_major(outer.node.shape))}
    strides = tuple(inner.strides[axis_of[step]] if step else 0 for step in outer.strides)
    return Ref(inner.node, outer.shape, strides, inner.offset)


@dataclass(frozen=True)
class Target:
    """Where a node's elements go: strides over its shape."""

    buffer: str | Pieces
    offset: int
    strides: tuple[int, ...]


@dataclass(eq=False)
class Node:
    number: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False)
class Input(Node):
    name: str
    access: Access


@dataclass(eq=False)
class Iota(Node):
    pass


@dataclass(eq=False)
class Point(Node):
    expression: str                     # "({0} + {1})"
    cost: int                           # about, in additions
    args: tuple[Ref, ...]               # each of the node's shape
    stride: int | None = None           # if given, args[1] is an index into args[0], each step so many elements further
    stored: bool = False
    targets: tuple[Target, ...] = ()

    @property
    def total_cost(self) -> int:
        """With the points that are computed on the way."""
        return self.cost + sum(a.node.total_cost for a in self.args if isinstance(a.node, Point) and not a.node.stored)


@dataclass(eq=False)
class Reduce(Node):
    kind: str                           # "sum", "max", "min", "prod", "argmax", "argmin"
    arg: Ref
    axes: tuple[int, ...]               # of arg
    index: Ref | None = None            # of arg's shape: the row of the result to which an element is added
    stride: int = 0
    targets: tuple[Target, ...] = ()

    @property
    def total_cost(self) -> int:
        return self.arg.node.total_cost if isinstance(self.arg.node, Point) and not self.arg.node.stored else 0

    @property
    def args(self) -> tuple[Ref, ...]:
        return (self.arg,) if self.index is None else (self.arg, self.index)

    @property
    def trailing(self) -> bool:
        """The last axes are added up: one number at a time is made."""
        rank = len(self.arg.shape)
        return self.index is None and self.axes == tuple(range(rank - len(self.axes), rank))


@dataclass(eq=False)
class Pieces(Node):
    parts: tuple[Node, ...] = ()
    targets: tuple[Target, ...] = ()


class Graph:
    """Makes nodes; equal points are made once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._points: dict[tuple, Point] = {}

    def _add(self, kind, *args, **more):
        node = kind(len(self.nodes), *args, **more)
        self.nodes.append(node)
        return node

    def input(self, access: Access, name: str) -> Ref:
        shape = tuple(n for n in access.shape if n > 1)
        return Ref(self._add(Input, shape, access.dtype, name, access), access.shape, row_major(access.shape))

    def iota(self, count: int) -> Ref:
        return Ref(self._add(Iota, (count,), "int64"), (count,), (1 if count > 1 else 0,))

    def point(self, expression: str, dtype: str, args: Sequence[Ref], cost: int = 1, shape: Sequence[int] | None = None,
              stride: int | None = None) -> Ref:
        """An expression over operands of one shape, or without operands."""
        shape = tuple(args[0].shape) if args else tuple(shape or ())
        args = tuple(squeezed(a) for a in args)
        if stride is not None:
            args = (self.memory(args[0]), args[1])
        inner = tuple(n for n in shape if n > 1) if args else ()
        key = (expression, dtype, args, stride)
        node = self._points.get(key)
        if node is None:
            node = self._points[key] = self._add(Point, inner, dtype, expression, cost, args, stride)
        return Ref(node, shape, row_major(shape) if args else (0,) * len(shape))

    def reduce(self, kind: str, ref: Ref, axes: Sequence[int], dtype: str | None = None) -> Ref:
        """Along axes, which stay with size one."""
        kept = tuple(1 if i in axes else n for i, n in enumerate(ref.shape))
        inner = tuple(n for n in kept if n > 1)
        wide = [i for i, n in enumerate(ref.shape) if n > 1]
        if not any(i in axes for i in wide):
            return ref if not kind.startswith("arg") else self.point(f"{ref.dtype}(0)", ref.dtype, (), 0, kept)
        node = self._add(Reduce, inner, dtype or ref.dtype, kind, squeezed(ref),
                         tuple(k for k, i in enumerate(wide) if i in axes))
        return Ref(node, kept, row_major(kept))

    def scatter(self, values: Ref, index: Ref, size: int) -> Ref:
        """Rows of values added to the rows of zeros that the index names; both refs are (entries, *rest)."""
        shape = (size, *values.shape[1:])
        node = self._add(Reduce, tuple(n for n in shape if n > 1), values.dtype, "sum", squeezed(values),
                         (0,) if values.shape[0] > 1 else (), squeezed(index), math.prod(values.shape[1:]))
        return Ref(node, shape, row_major(shape))

    def pieces(self, shape: Sequence[int], dtype: str, parts: Sequence[tuple[Ref, int, tuple[int, ...]]]) -> Ref:
        """Memory filled by refs, each with the offset and the strides of its place."""
        made = self._add(Pieces, tuple(n for n in shape if n > 1), dtype)
        for ref, offset, strides in parts:
            kept = [i for i, n in enumerate(ref.shape) if n > 1]
            ref = ref if isinstance(ref.node, Point) and ref.whole else self.copy(ref)
            ref.node.targets += (Target(made, offset, tuple(strides[i] for i in kept)),)
            made.parts += (ref.node,)
        # readers come later than all parts, copies included
        self.nodes.remove(made)
        made.number = len(self.nodes)
        self.nodes.append(made)
        return Ref(made, tuple(shape), row_major(shape))

    def copy(self, ref: Ref) -> Ref:
        return self.point("{0}", ref.dtype, [ref])

    # ---- views -------------------------------------------------------------------------------------------------------

    def memory(self, ref: Ref) -> Ref:
        """The ref, of elements that stand in memory."""
        if isinstance(ref.node, Iota):
            return self.memory(self.copy(ref))
        if isinstance(ref.node, Point):
            ref.node.stored = True
        return ref

    def slice(self, ref: Ref, begin: Sequence[int], step: Sequence[int], shape: Sequence[int]) -> Ref:
        """Elements begin, begin + step, .. of every axis; `shape` of them."""
        node = ref.node
        if not isinstance(node, Point) or node.stored:
            offset = ref.offset + sum(b * s for b, s in zip(begin, ref.strides))
            strides = tuple(s * k if n > 1 else 0 for s, k, n in zip(ref.strides, step, shape))
            return Ref(node, tuple(shape), strides, offset)
        # the operands of the point, sliced; its axes are those of the ref that have a stride
        axis_of = {s: axis for axis, s in enumerate(ref.strides) if s}
        axes = [axis_of[s] for s in row_major(node.shape)]
        cut = tuple(tuple(v[i] for i in axes) for v in (begin, step, shape))
        if not node.args:
            return ref.broadcast(shape)
        made = self.point(node.expression, node.dtype, [self.slice(a, *cut) for a in node.args], node.cost,
                          stride=node.stride)
        strides = dict(zip(axes, made.strides))
        return Ref(made.node, tuple(shape), tuple(strides.get(i, 0) for i in range(len(shape))))

    def reshape(self, ref: Ref, shape: Sequence[int]) -> Ref:
        shape = tuple(shape)
        strides = _reshaped(ref, shape)
        node = ref.node
        if isinstance(node, Point) and not node.stored and strides is not None:
            old, new = squeezed(ref), [(n, s) for n, s in zip(shape, strides) if n > 1]
            if [*zip(old.shape, old.strides)] != new:       # more than axes of size one
                if ref.whole and all(_reshaped(a, shape) is not None for a in node.args):
                    return self.point(node.expression, node.dtype, [self.reshape(a, shape) for a in node.args],
                                      node.cost, stride=node.stride)
                node.stored = True
        if strides is None:
            ref = self.memory(self.copy(ref))
            strides = row_major(shape)
        return Ref(ref.node, shape, strides, ref.offset)


def _reshaped(ref: Ref, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of the same elements in another shape, or None if they have none."""
    old = [(n, s) for n, s in zip(ref.shape, ref.strides) if n > 1]
    strides, k = [0] * len(shape), 0
    wide = [i for i, n in enumerate(shape) if n > 1]
    while wide:
        have, group = old[k][0], [old[k]]
        take, want = [wide.pop(0)], 0
        want = shape[take[0]]
        while have != want:
            if want < have:
                take.append(wide.pop(0))
                want *= shape[take[-1]]
            else:
                k += 1
                group.append(old[k])
                have *= old[k][0]
        if any(s != s_next * n_next for (_, s), (n_next, s_next) in zip(group, group[1:])):
            return None
        step = group[-1][1]
        for i in reversed(take):
            strides[i] = step
            step *= shape[i]
        k += 1
    return tuple(strides)
