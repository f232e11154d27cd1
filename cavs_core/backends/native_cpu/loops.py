"""Writes the loops of a kernel: where nodes stand, and the text of one loop nest.

A kernel passes over rows one by one, or in blocks (see `codegen`). Within a block every buffer has a row stride, and
each loop nest has an axis of rows before those of its domain; where rows lie one behind the other, that axis merges
with the next one, and short rows become one long loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .fuse import Loop, reads_of, whole
from .nodes import Input, Iota, Node, Pieces, Point, Reduce, Ref, Target, row_major, through

__all__ = ["Places", "LoopWriter", "indented"]

_OPERATION = {"sum": "plus", "prod": "times", "max": "larger", "min": "smaller"}
#: a loop that costs so much runs over a multiple of so many elements, and then over its last ones, some of them again:
#: the rest that vectors leave over, one by one, would cost more
_HEAVY, _STEP = 40, 16

Place = tuple[str, int, tuple[int, ...]]            # buffer, offset, strides


class Places:
    """The buffers of a kernel's nodes. `row_strides`: those of its operands, if rows run in blocks."""

    def __init__(self, row_strides: dict[str, int] | None):
        self.row_strides = row_strides
        self.scratch: dict[str, Node] = {}
        self._buffers: dict[Node, str] = {}

    def of(self, node: Node) -> tuple[str, int]:
        """The buffer where a node's elements stand in order, and where they begin."""
        if isinstance(node, Input):
            return node.name, 0
        for target in node.targets:
            if target.strides == row_major(node.shape):
                return self._resolved(target)[:2]
        if node not in self._buffers:
            name = self._buffers[node] = f"t{len(self._buffers)}"
            self.scratch[name] = node
            if self.row_strides is not None:
                self.row_strides[name] = node.size
        return self._buffers[node], 0

    def _resolved(self, target: Target) -> Place:
        if isinstance(target.buffer, Pieces):
            buffer, offset = self.of(target.buffer)
            return buffer, offset + target.offset, target.strides
        return target.buffer, target.offset, target.strides

    def written(self, node: Point | Reduce) -> list[Place]:
        """Where a node's elements go, with strides over its loop's axes."""
        places, own = [self._resolved(target) for target in node.targets], row_major(node.shape)
        stored = isinstance(node, Reduce) or node.stored
        if stored and not self.in_variable(node) and own not in [strides for *_, strides in places]:
            places.append((*self.of(node), own))
        if isinstance(node, Point):
            return places
        domain = node.arg.shape
        kept = [axis for axis in range(len(domain)) if axis not in node.axes]
        if node.index is not None:                  # which row, the index says
            places = [(buffer, offset, row_major(domain)[len(node.axes):]) for buffer, offset, _ in places]
        return [(buffer, offset, tuple(dict(zip(kept, strides)).get(axis, 0) for axis in range(len(domain))))
                for buffer, offset, strides in places]

    def in_variable(self, node: Point | Reduce) -> bool:
        """A single number, which needs no memory for later loops to read it."""
        return self.row_strides is None and node.size == 1 and (isinstance(node, Point) or node.trailing)

    def flat(self, ref: Ref) -> bool:
        """Whether a block's rows of these elements lie one behind the other."""
        if isinstance(ref.node, Iota):
            return False
        buffer, _ = self.of(ref.node)
        return self.row_strides[buffer] == ref.size and ref.strides == row_major(ref.shape)


class LoopWriter:
    """Writes one loop nest."""

    def __init__(self, loop: Loop, places: Places, scalars: dict[Node, str], fresh: Iterator[int]):
        self.loop, self.places, self.scalars, self.fresh = loop, places, scalars, fresh
        self.blocked = places.row_strides is not None
        self.texts: dict[Ref, str] = {}             # what is computed already
        self.uses: Counter[Ref] = Counter()
        self.body: list[str] = []
        self.before: list[str] = []                 # of all loops
        self.starts: list[str] = []                 # of the loops that add up
        self.ends: list[str] = []
        self._merge_axes(self._survey())

    def lines(self) -> list[str]:
        for node in self.loop.nodes:
            (self._point if isinstance(node, Point) else self._reduce)(node)
        lines = list(self.before)
        depth = 0
        for k, (name, size) in enumerate(zip(self.names, self.sizes)):
            if k == self.outer:
                lines += indented(self.starts, depth)
            loops = self._last_again(name, size) if k == len(self.sizes) - 1 else [f"for {name} in range({size}):"]
            for line in loops:
                lines += indented([line], depth)
                depth += line.startswith("for")
        lines += indented(self.body, depth)
        return lines + indented(self.ends, self.outer or 0)

    def _last_again(self, name: str, size: str) -> list[str]:
        """The head of the innermost loop."""
        light = self.cost < _HEAVY or self.outer is not None
        if light or not size.isdigit() or int(size) < _STEP or int(size) % _STEP == 0:
            return [f"for {name} in range({size}):"]
        even, rest = int(size) // _STEP * _STEP, int(size) - _STEP
        return [f"for at, count in ((0, {even}), ({rest}, {_STEP})):", "for k in range(count):", f"{name} = at + k"]

    # ---- axes --------------------------------------------------------------------------------------------------------

    def _survey(self) -> set[tuple[int, ...]]:
        """Count the cost, and the uses of every ref; all strides that occur."""
        strides, points = set(), {node for node in self.loop.nodes if isinstance(node, Point)}
        for node in self.loop.nodes:
            strides |= {self._with_rows(buffer, s) for buffer, _, s in self.places.written(node)}
            self._count(node, node.args)
            for ref, inlined, _ in reads_of(node):
                if inlined:
                    points.add(ref.node)
                else:
                    strides.add(self._strides_of(ref))
        self.cost = sum(point.cost for point in points)
        return strides

    def _count(self, node: Point | Reduce, args: Sequence[Ref]) -> None:
        for k, ref in enumerate(args):
            seen = ref in self.uses
            self.uses[ref] += max(1, node.expression.count(f"{{{k}}}")) if isinstance(node, Point) else 1
            if not seen and isinstance(ref.node, Point) and not ref.node.stored:
                self._count(ref.node, [through(ref, a) for a in ref.node.args])

    def _strides_of(self, ref: Ref) -> tuple[int, ...]:
        return self._with_rows("" if isinstance(ref.node, Iota) else self._buffer(ref.node)[0], ref.strides)

    def _buffer(self, node: Node) -> tuple[str, int]:
        return ("", 0) if node in self.scalars else self.places.of(node)

    def _with_rows(self, buffer: str, strides: tuple[int, ...]) -> tuple[int, ...]:
        return (self.places.row_strides.get(buffer, 0), *strides) if self.blocked else strides

    def _merge_axes(self, strides: set[tuple[int, ...]]) -> None:
        """Neighbouring axes that every ref passes in one step become one loop."""
        domain: tuple = (("rows",) if self.blocked else ()) + self.loop.domain
        outer = None if self.loop.outer is None else self.loop.outer + self.blocked
        self.axes = []                              # the last axis of each loop
        for axis in range(len(domain)):
            last = axis == len(domain) - 1
            if last or axis + 1 == outer or any(s[axis] != s[axis + 1] * domain[axis + 1] for s in strides):
                self.axes.append(axis)
        bounds = [0, *(axis + 1 for axis in self.axes)]
        self.sizes = []
        for a, b in zip(bounds, bounds[1:]):
            inner = math.prod(n for n in domain[a:b] if n != "rows")
            rows = domain[a] == "rows"
            self.sizes.append(str(inner) if not rows else "rows" if inner == 1 else f"rows * {inner}")
        count = len(self.axes)
        self.names = list("ghij"[4 - count:]) if count <= 4 else [f"i{k}" for k in range(count)]
        self.outer = None if outer is None else sum(axis < outer for axis in self.axes)

    def _index(self, offset: int, strides: Sequence[int], more: str = "") -> str:
        terms = [name if strides[axis] == 1 else f"{strides[axis]} * {name}"
                 for axis, name in zip(self.axes, self.names) if strides[axis]]
        return " + ".join([str(offset)] * (offset != 0) + terms + [more] * (more != "")) or "0"

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _elements(self, node: Point | Reduce, more: str = "") -> list[str]:
        """The places of a node's element at the loop's position, as text."""
        return [f"{buffer}[{self._index(offset, self._with_rows(buffer, strides), more)}]"
                for buffer, offset, strides in self.places.written(node)]

    def _point(self, node: Point) -> None:
        ref, targets = whole(node), self._elements(node)
        text = self._expression(node, node.args)
        if self.uses[ref] or len(targets) != 1:
            text = self.texts[ref] = self._variable(text)
        if self.places.in_variable(node):
            text = self.scalars[node] = self._variable(text)
        self.body += [f"{target} = {_bare(text)}" for target in targets]

    def _reduce(self, node: Reduce) -> None:
        value = self._text(node.arg)
        if not node.trailing:
            more = "" if node.index is None else self._step(node.stride, node.index)
            target, = self._elements(node, more)
            self.before += self._fill(node)
            self.body.append(f"{target} = {_OPERATION[node.kind]}({target}, {_bare(value)})")
            return
        result = f"a{next(self.fresh)}"
        self.starts.append(f"{result} = {_first(node)}")
        if node.kind in _OPERATION:
            self.body.append(f"{result} = {_OPERATION[node.kind]}({result}, {_bare(value)})")
        else:
            best, value, than = result, self._variable(value), ">" if node.kind == "argmax" else "<"
            self.starts.append(f"{best}_at = 0")
            self.body += [f"if {value} {than} {best} or ({value} != {value} and {best} == {best}):",
                          f"    {best}, {best}_at = {value}, {self.names[-1]}"]
            result = f"{best}_found"
            self.ends.append(f"{result} = {node.dtype}({best}_at)")
        if self.places.in_variable(node):
            self.scalars[node] = result
        self.ends += [f"{target} = {result}" for target in self._elements(node)]

    def _fill(self, node: Reduce) -> list[str]:
        """Loops that set the elements to which others are added."""
        (buffer, offset, _), = self.places.written(node)
        row, = self._with_rows(buffer, ()) or (0,)
        terms = [str(offset)] * (offset != 0) + [f"{row} * i"] * (row != 0) + ["j"]
        lines = [f"for j in range({node.size}):", f"    {buffer}[{' + '.join(terms)}] = {_first(node)}"]
        return ["for i in range(rows):", *indented(lines, 1)] if row else lines

    def _text(self, ref: Ref) -> str:
        """An element as an expression, at the loop's position."""
        node = ref.node
        if ref in self.texts:
            return self.texts[ref]
        if isinstance(node, Iota):
            text = self._index(ref.offset, self._strides_of(ref))
            return text if text.isidentifier() else f"({text})"
        if node in self.scalars:
            return self.scalars[node]
        if not isinstance(node, Point) or node.stored:
            return self._loaded(ref)
        text = self._expression(node, [through(ref, a) for a in node.args])
        if self.uses[ref] > 1 and node.args:
            text = self.texts[ref] = self._variable(text)
        return text

    def _expression(self, node: Point, args: Sequence[Ref]) -> str:
        if node.stride is None:
            return node.expression.format(*[self._text(a) for a in args])
        source, index = args
        return self._loaded(source, self._step(node.stride, index))

    def _step(self, stride: int, index: Ref) -> str:
        """How far an index that is computed leads."""
        return f"{stride} * int64({_bare(self._text(index))})".removeprefix("1 * ")

    def _loaded(self, ref: Ref, more: str = "") -> str:
        buffer, offset = self.places.of(ref.node)
        return f"{buffer}[{self._index(offset + ref.offset, self._strides_of(ref), more)}]"

    def _variable(self, text: str) -> str:
        if text.isidentifier():
            return text
        name = f"v{next(self.fresh)}"
        self.body.append(f"{name} = {_bare(text)}")
        return name


def _first(node: Reduce) -> str:
    """What a reduction begins with."""
    if node.kind in ("sum", "prod"):
        return f"{node.dtype}({int(node.kind == 'prod')})"
    low = node.kind in ("max", "argmax")
    if node.dtype.startswith("float"):
        return f"{node.dtype}({'-inf' if low else 'inf'})"
    limits = np.iinfo(node.dtype)
    return f"{node.dtype}({limits.min if low else limits.max})"


def _bare(text: str) -> str:
    """Without parentheses around all of it."""
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[1:-1] if k == len(text) - 1 and c == ")" and text[0] == "(" else text
    return text


def indented(lines: Iterable[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
