"""Programs that differ only in the number of children -> one program over any number of them.

A function that takes a list is traced with a list of some length, and its loop over the list is then unrolled. If all
elements are treated alike and meet only in sums, the program is that of a vertex with children: what is made of one
element is a CHILD value, and a sum over all elements is a `child_sum`. `roll` finds it, and `agrees` says for each
length whether the rolled program is what was traced.

Both compare values by number: equal computations have one number (`_Numbers`), and a sum is the bag of its terms, so
that the order in which a loop adds them up does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .ops import Builder
from .program import CHILD, SHARED, Arg, Program, Spec

__all__ = ["agrees", "roll"]


class _Term(NamedTuple):
    """A value by number, and the element of the list that it was made of; None: of no one of them."""

    number: int
    element: int | None


_Sum = list[_Term]              # every value: one term, or what is added up


class _Unlike(Exception):
    """The elements of the list are not treated alike."""


class _Numbers:
    """Numbers of values; equal ones have one number."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self.specs: list[Spec] = []             # of one element, where the value is made of one
        self._known: dict[tuple[Any, ...], int] = {}

    def number(self, node: tuple[Any, ...], spec: Spec) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
            self.specs.append(spec)
        return self._known[node]

    def add_up(self, terms: _Sum, count: int) -> _Term:
        """The value of a sum. Terms of several elements must be there once for each of the `count` elements."""
        elements = {t.element for t in terms if t.element is not None}
        if len(elements) <= 1:
            return _Term(self._sum([t.number for t in terms]), next(iter(elements), None))
        # What is there as often as there are elements was added once for each of them: the bias of a layer, say.
        plain: list[int] = []
        for number, times in Counter(t.number for t in terms if t.element is None).items():
            plain += [number] * (times % count)
            plain += [self.number(("child_sum", number), self.specs[number])] * (times // count)
        seen = Counter(t for t in terms if t.element is not None)
        children = dict.fromkeys(t.number for t in terms if t.element is not None)
        for number in children:
            if any(seen[_Term(number, e)] != seen[_Term(number, 0)] or not seen[_Term(number, e)]
                   for e in range(count)):
                raise _Unlike
            plain += [self.number(("child_sum", number), self.specs[number])] * seen[_Term(number, 0)]
        return _Term(self._sum(plain), None)

    def _sum(self, numbers: Sequence[int]) -> int:
        if len(numbers) == 1:
            return numbers[0]
        return self.number(("sum", *sorted(numbers)), self.specs[numbers[0]])


def _outputs(numbers: _Numbers, program: Program, count: int, places: dict[int, _Term]) -> list[int]:
    """The numbers of a program's outputs.

    Parameters
    ----------
    count : the length of the list. If it is 1 there is nothing to tell the list by: its element is then an argument
        like any other, and in a rolled program a child is its vertex.
    places : argument -> its number in the rolled program, and the element that it belongs to
    """
    values: dict[int, _Sum] = {}
    for v, source in program.inputs.items():
        node: tuple[Any, ...] = ("outer", source)
        element = None
        if isinstance(source, Arg):
            index, element = places.get(source.index, _Term(source.index, None))
            node = ("arg", index)
        values[v] = [_Term(numbers.number(node, program.specs[v]), element if count > 1 else None)]
    for instr in program.instrs:
        made = instr.outputs[0]
        spec = program.specs[made]
        if instr.op == "_copy" or instr.op == "spread" or (instr.op == "child_sum" and count == 1):
            values[made] = values[instr.inputs[0]]
        elif instr.op == "child_sum":
            values[made] = [_Term(numbers.number(("child_sum", t.number), spec), None)
                            for t in values[instr.inputs[0]]]
        elif instr.op == "broadcast_add" and all(program.specs[v].shape == spec.shape for v in instr.inputs):
            values[made] = [t for v in instr.inputs for t in values[v]]
        else:
            terms = [numbers.add_up(values[v], count) for v in instr.inputs]
            elements = {t.element for t in terms} - {None}
            if len(elements) > 1:
                raise _Unlike
            element = next(iter(elements), None)
            call = numbers.number((instr.op, instr.attrs, *[t.number for t in terms]), spec)
            for k, v in enumerate(instr.outputs):
                values[v] = [_Term(numbers.number(("output", call, k), program.specs[v]), element)]
    found = [numbers.add_up(values[v], count) for v in program.outputs]
    if any(t.element is not None for t in found):
        raise _Unlike
    return [t.number for t in found]


def _places(elements: Sequence[Sequence[int]], num_args: int) -> dict[int, _Term]:
    """What each argument becomes: first those outside the list, in their order, then the parts of an element."""
    inside = {index for element in elements for index in element}
    outside = [index for index in range(num_args) if index not in inside]
    places = {index: _Term(k, None) for k, index in enumerate(outside)}
    places.update({index: _Term(len(outside) + k, e) for e, element in enumerate(elements)
                   for k, index in enumerate(element)})
    return places


def roll(program: Program, elements: Sequence[Sequence[int]], num_args: int) -> Program | None:
    """The program over any number of elements, or None if there is none.

    Parameters
    ----------
    program : traced with a list of two or more elements
    elements : of each element, the numbers of its arguments
    num_args : arguments of the program in all

    Returns
    -------
    A program whose first arguments are those outside the list; the parts of an element follow, as CHILD values.
    """
    if any(instr.op == "uniform_like" for instr in program.instrs):     # equal draws are not the same draw
        return None
    numbers, first = _Numbers(), num_args - sum(map(len, elements))
    try:
        outputs = _outputs(numbers, program, len(elements), _places(elements, num_args))
    except _Unlike:
        return None
    builder = Builder(Program(name=program.name, reads=program.reads))
    made: dict[int, Any] = {}
    spread: dict[int, int] = {}

    def seen_by_children(v: int) -> int:
        if v not in spread:
            spread[v] = builder.emit("spread", v)
        return spread[v]

    def alike(operands: Sequence[int]) -> list[int]:
        """Operands of one kind: what belongs to the vertex is shown to each of its children."""
        kinds = {builder.specs[v].kind for v in operands}
        if CHILD not in kinds:
            return list(operands)
        return [v if builder.specs[v].kind in (CHILD, SHARED) else seen_by_children(v) for v in operands]

    def total(operands: Sequence[int]) -> int:
        own = [v for v in operands if builder.specs[v].kind != CHILD]
        children = [v for v in operands if builder.specs[v].kind == CHILD]
        terms = own[:1]
        for v in own[1:]:
            terms = [builder.add(terms[0], v)]
        result, *rest = alike([*terms, *children])
        for v in rest:
            result = builder.add(result, v)
        return result

    for number in _needed(numbers, outputs):
        node, spec = numbers.nodes[number], numbers.specs[number]
        if node[0] == "arg":
            kind = CHILD if node[1] >= first else spec.kind
            made[number] = builder.input(Spec(spec.shape, spec.dtype, kind), Arg(node[1]))
        elif node[0] == "outer":
            made[number] = builder.input(spec, node[1])
        elif node[0] == "sum":
            below = [numbers.nodes[k][1] for k in node[1:] if numbers.nodes[k][0] == "child_sum"]
            terms = [made[k] for k in node[1:] if numbers.nodes[k][0] != "child_sum"]
            if below:
                terms.append(builder.emit("child_sum", total([made[k] for k in below])))
            made[number] = total(terms)
        elif node[0] == "child_sum":
            if builder.specs[made[node[1]]].kind == CHILD:      # else it is part of a sum, see above
                made[number] = builder.emit("child_sum", made[node[1]])
        elif node[0] == "output":
            made[number] = made[node[1]][node[2]]
        else:
            made[number] = builder.call(node[0], alike([made[k] for k in node[2:]]), dict(node[1]))
    builder.program.outputs = [made[k] for k in outputs]
    builder.program.prune()
    return builder.program


def agrees(rolled: Program, program: Program, elements: Sequence[Sequence[int]], num_args: int) -> bool:
    """Whether a rolled program computes what was traced with a list of so many elements, one or more."""
    numbers = _Numbers()
    try:
        traced = _outputs(numbers, program, len(elements), _places(elements, num_args))
        return traced == _outputs(numbers, rolled, len(elements), {})
    except _Unlike:
        return False


def _needed(numbers: _Numbers, outputs: Sequence[int]) -> list[int]:
    """The numbers that the outputs depend on; what a value is made of comes before it."""
    needed, waiting = set(outputs), list(outputs)
    while waiting:
        node = numbers.nodes[waiting.pop()]
        parts = {"arg": (), "outer": (), "sum": node[1:], "child_sum": node[1:], "output": node[1:2]}.get(
            node[0], node[2:])
        for k in parts:
            if k not in needed:
                needed.add(k)
                waiting.append(k)
    return sorted(needed)
