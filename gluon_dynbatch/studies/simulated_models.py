"""The models of `simulate.py`: the cells that run at the vertices of samples, and the calls they make at each grain.

A cell is written down once, as the operators that Gluon code calls; they expand to the instructions of `cavs_core`. A
grain says where this list is cut into calls:

    kernel          every array operation by itself: also slices, and the bias of a layer
    operator        FullyConnected, split, sigmoid, ..
    subgraph-any    a vertex; those with one child or more are one class, as in vertices that take a list
    subgraph        a vertex; vertices with different numbers of children are different classes
    graph           as subgraph-any, but only samples of the same structure share launches

The work of a class is counted on its plan, made by the same code as in a real run. Nothing here needs a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cavs_core import (
    SHARED,
    Arg,
    Builder,
    Gather,
    GatherAll,
    Leaf,
    Param,
    Program,
    Spec,
    VertexProgram,
    offsets_of,
    own_outputs,
    plan_class,
    respecified,
    roll,
)

from ..costs.work import Work, work_of
from .simulated_samples import Sample

__all__ = ["GRAINS", "MODELS", "Calls", "Cell", "Grain", "Model"]

GRAINS = ("kernel", "operator", "subgraph-any", "subgraph", "graph")      # from fine to coarse
CLASSES, SIMILAR, WORDS = 5, 50, 10_000         # as in the benchmarks; the gradient of the words' table is sparse


# ---- cells -------------------------------------------------------------------------------------------------------

class _Table:
    """Stands for the parameter of an Embedding with sparse_grad=True."""

    _grad_stype = "row_sparse"


_TABLE = _Table()


class _Step(NamedTuple):
    op: str
    attrs: tuple[tuple[str, Any], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Piece(NamedTuple):
    """A call: what it does, what it gives, and the operator that it is, if it is one."""

    steps: list[_Step]
    outputs: Sequence[int]
    operator: str = ""


class Cell:
    """A vertex as it is written down: words for the operators that cells use."""

    def __init__(self, hidden: int, embed: int, arity: int):
        self.hidden, self.embed_size, self.arity = hidden, embed, arity
        self.builder = Builder(Program())
        self.operators: list[_Piece] = []
        self.args: list[int] = []                       # the inputs that are no parameters
        self.reads: dict[int, tuple[int, int]] = {}     # value -> the child and the number of its state
        self.states: Sequence[int] = ()                 # what the vertex gives
        self._params: dict[str, int] = {}

    # ---- inputs ----

    def outside(self, *shape: int) -> int:
        self.args.append(self.builder.input(Spec(shape, "float32"), Arg(len(self.args))))
        return self.args[-1]

    def child(self, slot: int, state: int, *shape: int) -> int:
        value = self.outside(*shape)
        self.reads[value] = (slot, state)
        return value

    def children(self) -> list[tuple[int, int]]:
        """(h, c) of each child."""
        return [(self.child(k, 0, 1, self.hidden), self.child(k, 1, 1, self.hidden)) for k in range(self.arity)]

    def param(self, name: str, *shape: int) -> int:
        if name not in self._params:
            parameter = _TABLE if name == "embed" else None
            self._params[name] = self.builder.input(Spec(shape, "float32", SHARED), Param(parameter, name))
        return self._params[name]

    # ---- operators ----

    def call(self, op: str, *xs: int, **attrs: Any) -> list[int]:
        instrs = self.builder.program.instrs
        start = len(instrs)
        made = [self.builder.emit("_copy", v) if v in xs else v for v in self.builder.call(op, xs, attrs)]
        self.operators.append(_Piece([_Step(i.op, i.attrs, i.inputs, i.outputs) for i in instrs[start:]], made, op))
        return made

    def op(self, op: str, *xs: int, **attrs: Any) -> int:
        return self.call(op, *xs, **attrs)[0]

    def add(self, x: int, y: int) -> int:
        return self.op("broadcast_add", x, y)

    def mul(self, x: int, y: int) -> int:
        return self.op("broadcast_mul", x, y)

    def word(self) -> int:
        """The vector of the vertex's word. (1, embed)"""
        table = self.param("embed", WORDS, self.embed_size)
        return self.op("Embedding", self.outside(1), table, input_dim=WORDS, output_dim=self.embed_size)

    def dense(self, name: str, x: int, units: int, bias: bool = True) -> int:
        params = [self.param(f"{name}_weight", units, self.builder.shape(x)[1])]
        params += [self.param(f"{name}_bias", units)] if bias else []
        return self.op("FullyConnected", x, *params, num_hidden=units, no_bias=not bias)

    def split(self, x: int, parts: int) -> list[int]:
        return self.call("SliceChannel", x, num_outputs=parts, axis=1)

    def state(self, o: int, c: int) -> int:
        return self.mul(self.op("sigmoid", o), self.op("tanh", c))

    def cross_entropy(self, h: int) -> int:
        scores = self.op("log_softmax", self.dense("out", h, CLASSES), axis=-1)
        picked = self.op("pick", scores, self.outside(1), axis=-1, keepdims=True)
        return self.op("mean", self.op("_mul_scalar", picked, scalar=-1.0), axis=0, exclude=True)

    # ---- what follows from them ----

    @cached_property
    def active(self) -> set[int]:
        """The values that a gradient flows into: parameters, states of children, and what is made of them."""
        found = {*self._params.values(), *self.reads}
        for instr in self.builder.program.instrs:
            if not found.isdisjoint(instr.inputs):
                found.update(instr.outputs)
        return found

    def pieces(self, grain: str) -> list[_Piece]:
        """The calls that this vertex makes, in order."""
        if grain == "operator":
            return self.operators
        if grain == "kernel":
            return [kernel for operator in self.operators for kernel in self._kernels(operator)]
        return [_Piece([step for operator in self.operators for step in operator.steps], self.states)]

    def _kernels(self, operator: _Piece) -> Iterator[_Piece]:
        if operator.operator == "add_n":                # MXNet has one for any number of terms
            yield operator
            return
        views: list[_Step] = []                         # a view is no kernel: it goes with the next, or the last one
        last = max(k for k, step in enumerate(operator.steps) if step.op != "Reshape")
        for k, step in enumerate(operator.steps[:last + 1]):
            if step.op == "Reshape":
                views.append(step)
            elif step.op == "SliceChannel":             # by itself a slice for each part
                width = self.builder.shape(step.outputs[0])[1]
                for part, value in enumerate(step.outputs):
                    attrs = (("begin", (0, part * width)), ("end", (1, (part + 1) * width)))
                    yield _Piece([_Step("slice", attrs, step.inputs, (value,))], (value,))
            else:
                steps = [*views, step, *(operator.steps[last + 1:] if k == last else [])]
                views = []
                yield _Piece(steps, steps[-1].outputs)


def _word(cell: Cell) -> list[int]:
    """A word and any number of children, as in the benchmark treelstm-sick."""
    u, i, o, f = cell.split(cell.dense("x2h", cell.word(), 4 * cell.hidden), 4)
    children = cell.children()
    if children:
        below = cell.dense("h2h", cell.op("add_n", *[h for h, _ in children]), 3 * cell.hidden, bias=False)
        u, i, o = (cell.add(x, y) for x, y in zip((u, i, o), cell.split(below, 3)))
    c = cell.mul(cell.op("sigmoid", i), cell.op("tanh", u))
    for h_child, c_child in children:
        gate = cell.op("sigmoid", cell.add(f, cell.dense("f2h", h_child, cell.hidden, bias=False)))
        c = cell.add(c, cell.mul(gate, c_child))
    return [cell.state(o, c), c]


def _pair(cell: Cell) -> list[int]:
    """How related are two sentences?"""
    a, b = (cell.child(slot, 0, 1, cell.hidden) for slot in (0, 1))
    both = cell.op("Concat", cell.mul(a, b), cell.op("abs", cell.op("broadcast_sub", a, b)), dim=1)
    similar = cell.op("Activation", cell.dense("similar", both, SIMILAR), act_type="sigmoid")
    scores = cell.op("log_softmax", cell.dense("out", similar, CLASSES), axis=-1)
    target = cell.outside(1, CLASSES)
    known = cell.op("log", cell.op("_plus_scalar", target, scalar=1e-12))
    return [cell.op("sum", cell.mul(target, cell.op("broadcast_sub", known, scores)), axis=0, exclude=True)]


def _root(cell: Cell) -> list[int]:
    """The loss of a tree."""
    return [cell.cross_entropy(cell.child(0, 0, 1, cell.hidden))]


def _leaf(cell: Cell) -> list[int]:
    """A leaf with its loss, as in the benchmark treelstm-sst."""
    u, i, o = cell.split(cell.dense("leaf", cell.word(), 3 * cell.hidden), 3)
    c = cell.mul(cell.op("sigmoid", i), cell.op("tanh", u))
    h = cell.state(o, c)
    return [h, c, cell.cross_entropy(h)]


def _node(cell: Cell) -> list[int]:
    """An inner node, with the loss of all nodes from it on downwards."""
    (hl, cl), (hr, cr) = cell.children()
    losses = [cell.child(slot, 2, 1) for slot in (0, 1)]
    gates = cell.dense("node", cell.op("Concat", hl, hr, dim=1), 5 * cell.hidden)
    u, i, o, fl, fr = cell.split(gates, 5)
    c = cell.mul(cell.op("sigmoid", i), cell.op("tanh", u))
    for f, c_child in ((fl, cl), (fr, cr)):
        c = cell.add(c, cell.mul(cell.op("sigmoid", f), c_child))
    h = cell.state(o, c)
    loss = cell.cross_entropy(h)
    for below in losses:
        loss = cell.add(loss, below)
    return [h, c, loss]


MODELS: dict[str, dict[str, Callable[[Cell], list[int]]]] = {
    "sick": {"word": _word, "pair": _pair},
    "sst": {"leaf": _leaf, "node": _node},
    "trees": {"word": _word, "root": _root},
}


@dataclass(frozen=True)
class Model:
    """The cells of "sick" (child-sum Tree-LSTM, pairs), "sst" (binary Tree-LSTM) or "trees" (child-sum, one tree)."""

    name: str
    hidden: int = 150
    embed: int = 300

    def __post_init__(self) -> None:
        if self.name not in MODELS:
            raise ValueError(f"model {self.name!r}: expected one of {', '.join(MODELS)}")
        if min(self.hidden, self.embed) < 1:
            raise ValueError(f"hidden {self.hidden} and embedding {self.embed}: expected positive numbers")

    @property
    def grains(self) -> tuple[str, ...]:
        """Those that differ from each other: without vertices that take lists there is nothing to join."""
        return tuple(grain for grain in GRAINS if grain != "subgraph-any" or "word" in MODELS[self.name])

    def cell(self, kind: str, arity: int) -> Cell:
        """The cell of a vertex that reads so many others."""
        if kind not in MODELS[self.name]:
            raise ValueError(f"a sample has a vertex {kind!r}, but model {self.name} has the cells "
                             f"{', '.join(MODELS[self.name])}; were the samples made for another model?")
        cell = Cell(self.hidden, self.embed, arity)
        cell.states = MODELS[self.name][kind](cell)
        return cell


# ---- grains ------------------------------------------------------------------------------------------------------

class _Template(NamedTuple):
    """The calls of a vertex."""

    classes: list[int]
    counts: list[int]               # of each call, how many values it reads that calls make
    reads: list[int]                # the calls that make them: k is the k-th of this vertex, -1 - k entry k of `below`
    below: list[tuple[int, int]]    # (child, number of its state)
    states: list[int]               # the call that makes each state


class Calls(NamedTuple):
    """The calls of a mini-batch, as in `policies.Problem`."""

    call_class: Any
    indptr: Any
    producers: Any


class Grain:
    """A model cut into calls.

    Parameters
    ----------
    model : Model
    name : one of its grains
    children : children of a vertex that has some, on average: what a row of a joined class is worth

    Attributes
    ----------
    works : of each class: forward and backward; the second is None where no gradient flows
    """

    def __init__(self, model: Model, name: str, children: float = 1.0):
        if name not in model.grains:
            raise ValueError(f"grain {name!r}: expected one of {', '.join(model.grains)} for model {model.name}")
        self.model, self.name, self.mean_children = model, name, children
        self.works: list[tuple[Work, Work | None]] = []
        self._classes: dict[Any, int] = {}
        self._templates: dict[tuple[str, int], _Template] = {}

    def calls(self, samples: Sequence[Sample]) -> Calls:
        """What these samples call, one after the other."""
        classes: list[int] = []
        counts: list[int] = []
        producers: list[int] = []
        for sample in samples:
            made: list[list[int]] = []                  # of each vertex: the calls that make its states
            for kind, reads in zip(*sample):
                template = self._template(kind, len(reads))
                first, below = len(classes), [made[reads[slot]][state] for slot, state in template.below]
                classes += template.classes
                counts += template.counts
                producers += [first + k if k >= 0 else below[-1 - k] for k in template.reads]
                made.append([first + k for k in template.states])
        return Calls(np.array(classes, np.int64), offsets_of(np.array(counts, np.int64)), np.array(producers, np.int64))

    def _template(self, kind: str, arity: int) -> _Template:
        if (kind, arity) not in self._templates:
            cell = self.model.cell(kind, arity)
            maker = {value: -1 - k for k, value in enumerate(cell.reads)}
            template = _Template([], [], [], list(cell.reads.values()), [])
            for number, piece in enumerate(cell.pieces(self.name)):
                inside = {v for step in piece.steps for v in step.outputs}
                read = [v for v in dict.fromkeys(v for step in piece.steps for v in step.inputs) if v not in inside]
                template.classes.append(self._class(kind, cell, piece, read))
                template.reads.extend(maker[v] for v in read if v in maker)
                template.counts.append(sum(v in maker for v in read))
                maker.update(dict.fromkeys(inside, number))
            template.states.extend(maker[v] for v in cell.states)
            self._templates[kind, arity] = template
        return self._templates[kind, arity]

    def _class(self, kind: str, cell: Cell, piece: _Piece, read: list[int]) -> int:
        joined = self.name in ("subgraph-any", "graph") and kind == "word" and cell.arity > 0
        local = {v: k for k, v in enumerate(read)}
        sources = [cell.builder.program.inputs.get(v) for v in read]
        sums = piece.operator == "add_n"                            # of any number of rows: one operator
        key: Any = kind if joined else (piece.operator, cell.builder.specs[read[0]]) if sums else (
            piece.operator,             # operators that come to the same steps are still different ones
            tuple((s.op, s.attrs, tuple(local.setdefault(v, len(local)) for v in s.inputs + s.outputs))
                  for s in piece.steps),
            tuple((cell.builder.specs[v], source if isinstance(source, Param) else None)
                  for v, source in zip(read, sources)))
        if key not in self._classes:
            self._classes[key] = len(self.works)
            plan = _plan_any(self.model) if joined else _plan_piece(cell, piece, read)
            self.works.append(work_of(plan, self.mean_children))
        return self._classes[key]


def _plan_piece(cell: Cell, piece: _Piece, read: list[int]) -> Any:
    """The plan of a call by itself: what other calls make comes through an index, as does what is outside."""
    builder, values, wanted = Builder(Program()), {}, []
    for k, v in enumerate(read):
        source = cell.builder.program.inputs.get(v)
        if not isinstance(source, Param):
            source = Leaf(k) if source is not None and v not in cell.reads else Gather(k, 0)
        values[v] = builder.input(cell.builder.specs[v], source)
        wanted += [source] if v in cell.active else []
    for step in piece.steps:
        values.update(zip(step.outputs, builder.call(step.op, [values[v] for v in step.inputs], dict(step.attrs))))
    builder.program.outputs = own_outputs(builder, [values[v] for v in piece.outputs])
    return plan_class(VertexProgram(builder.program, len(piece.outputs)), wanted, bool(wanted), False)


def _plan_any(model: Model) -> Any:
    """The plan of a word with any number of children, found from one with two."""
    cell = model.cell("word", 2)
    program = cell.builder.program
    program.outputs = list(cell.states)
    number = {v: k for k, v in enumerate(cell.args)}
    elements = [[number[v] for v, (slot, _) in cell.reads.items() if slot == k] for k in range(2)]
    rolled = roll(program, elements, len(number))
    assert rolled is not None, "the children of a word are treated alike"
    sources: dict[int, Any] = {}
    for v in rolled.inputs_of(Arg):
        k = rolled.inputs[v].index
        sources[v] = GatherAll(k) if k >= len(number) - sum(map(len, elements)) else Leaf(k)
    vertex = respecified(VertexProgram(rolled, len(cell.states)), {v: (rolled.specs[v], s) for v, s in sources.items()})
    wanted = [s for s in vertex.program.inputs.values() if isinstance(s, (Param, GatherAll))]
    return plan_class(vertex, wanted, True, False)
