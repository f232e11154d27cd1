"""Signature: what is called, as a program. Made once per operator and attributes, or per block and arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs_core import (
    CHILD,
    ROW,
    SHARED,
    Arg,
    Builder,
    ClassPlan,
    Gather,
    GatherAll,
    Leaf,
    Param,
    Program,
    ProgramError,
    Shared,
    Spec,
    VertexProgram,
    flatten,
    flows_of,
    lookup,
    map_nested,
    mxnet_function,
    one_row_program,
    own_outputs,
    plan_class,
    respecified,
    touches_of,
    trace,
)
from cavs_core.mxnet_compat import MXNetError, autograd, mx

from .fastpath import structure_of
from .values import BUFFERS, DEVICES, ROW_SPECS, SPECS, WIDTHS, has_rows, is_by_rows, spec_number

__all__ = ["ANY_NUMBER", "INDEX_OPERANDS", "CallClass", "Signature", "any_number_signature", "mode_of",
           "operator_signature", "takes_any_number", "vertex_signature"]


class Signature:
    """A program over operands that are all rows, and its variants by what the operands turn out to be.

    Attributes
    ----------
    title : what people call it, in reports
    operand_specs : spec numbers of the operands; of one row, for operands that are split
    split : which operands are split over the positions of a call; if any, the calls are ragged
    alias : -1, or the first row of the operand that the result is: such a call runs nowhere
    slots : how many of the operands, the last ones, stand for the parts of each element of a list of any length
    template : nested lists and tuples of None and result numbers: what a call returns
    structure : of what a call returns, see `fastpath.structure_of`
    run_alone : (block, operands) -> the distinct outputs of the call by itself on real arrays, by MXNet
    touches, param_touches : bool arrays, shape (outputs, operands or parameters)
        Which of them a backward pass touches that comes to an output, see `cavs_core.paths`.
    draws : whether the result is random
    has_product : whether it multiplies matrices
    adds_rows : whether it adds up two rows that look alike, and does nothing else
    looks_up : whether it looks up rows of its second operand by the numbers of its first, and does nothing else
    number : never that of another one; for tables that shall not hold signatures, which hold parameters
    """

    _numbers = itertools.count()

    def __init__(self, title: str, program: Program, operand_specs: Sequence[int], context: Any, template: Any,
                 run_alone: Callable[[Any, list[Any]], list[Any]], split: Sequence[bool] = (), alias: int = -1,
                 slots: int = 0):
        values = list(dict.fromkeys(program.outputs))       # an array that is returned twice is one output
        places = [values.index(v) for v in program.outputs]
        builder = Builder(program)
        program.outputs = own_outputs(builder, values)
        sources, touched = list(program.inputs.values()), touches_of(program)
        program.prune()
        self.reads = program.reads
        self.title, self.number = title, next(self._numbers)
        self.vertex = VertexProgram(program, len(values))
        self.operand_specs = tuple(operand_specs)
        self.split = tuple(split) if split else (False,) * len(self.operand_specs)
        self.ragged = any(self.split)
        self.context = context
        self._output_specs: dict[int, list[int]] = {}
        self.alias, self.slots, self.template = alias, slots, template
        self.structure = structure_of(map_nested(lambda k: k if k is None else places[k], template))
        self.params = [s for s in program.inputs.values() if isinstance(s, Param)]
        self.touches = np.zeros((len(values), len(self.operand_specs)), bool)
        for source, column in zip(sources, touched.T):
            if isinstance(source, Arg):
                self.touches[:, source.index] |= column
        self.param_touches = touched[:, [sources.index(p) for p in self.params]]
        self.has_product = any(instr.op in ("matmul", "batch_matmul") for instr in program.instrs)
        self.draws = any(instr.op == "uniform_like" for instr in program.instrs)
        self.adds_rows = (len(program.instrs) == 1 and program.instrs[0].op in ("broadcast_add", "elemwise_add")
                          and len(self.operand_specs) == 2 and _are_summed(self.operand_specs))
        self.looks_up = self.split == (True, False) and [instr.op for instr in program.instrs] == ["clip", "lookup"]
        self.run_alone = lambda block, operands: [
            flat[places.index(k)] for flat in [run_alone(block, operands)] for k in range(len(values))]
        self._plans: dict[Any, ClassPlan] = {}
        self._faces: dict[Any, Face] = {}
        self._current: list[Any] = []           # what the parameters were when they last were what was traced

    def is_current(self) -> bool:
        """Whether the blocks and parameters still are what was traced: a cast, a new shape, another layer or attribute
        asks for another trace."""
        if self.reads is not None and not self.reads.are_current():
            return False
        now = [(p.parameter.dtype, p.parameter._shape) for p in self.params]
        if now != self._current:                # (specs are compared by names, which take numpy long to make)
            specs = {source: self.vertex.program.specs[v] for v, source in self.vertex.program.inputs.items()}
            if not all(np.dtype(dtype).name == specs[p].dtype and tuple(shape) == specs[p].shape
                       for p, (dtype, shape) in zip(self.params, now)):
                return False
            self._current = now
        return True

    def output_specs(self, rows: int = 1) -> list[int]:
        """Spec numbers of the outputs of a call; `rows` is the number of its rows, if calls are ragged."""
        if rows not in self._output_specs:
            specs = [self.vertex.program.specs[v] for v in self.vertex.program.outputs]
            shapes = [(rows, *s.shape[1:]) if self.ragged else s.shape for s in specs]
            by_rows = self.ragged or (self.alias >= 0 and ROW_SPECS[BUFFERS[self.operand_specs[0]]].shape == (1,))
            self._output_specs[rows] = [spec_number(shape, s.dtype, self.context, by_rows)
                                        for shape, s in zip(shapes, specs)]
        return self._output_specs[rows]

    @functools.cached_property
    def flows(self) -> Any:
        """From which results a gradient flows to which operands: bool array, shape (outputs, operands)."""
        program, found = self.vertex.program, np.zeros_like(self.touches)
        for source, column in zip(program.inputs.values(), flows_of(program).T):
            if isinstance(source, Arg):
                found[:, source.index] |= column
        return found

    @functools.cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Of one position: the rows that it reads of each operand and writes of each output; the buffers of these."""
        outputs = self.output_specs()
        return (tuple(WIDTHS[s] for s in self.operand_specs), tuple(WIDTHS[s] for s in outputs),
                tuple(BUFFERS[s] for s in outputs))

    def only_looks_up(self, param: Any) -> bool:
        """Whether rows of a parameter are looked up, and nothing else is done with it: its gradient may be sparse."""
        program = self.vertex.program
        values = {v for v, source in program.inputs.items() if source == param}
        return all(instr.op == "lookup" and instr.inputs[0] in values and instr.inputs[1] not in values
                   for instr in program.instrs if not values.isdisjoint(instr.inputs))

    @property
    def last_plan(self) -> ClassPlan | None:
        """The newest plan; None if there is none yet."""
        return next(reversed(self._plans.values()), None)

    def face(self, kinds: str, wanted: bytes, recurrent: bytes, wanted_params: tuple[bool, ...], active: bool,
             in_one_launch: bool) -> Face:
        """How a class of calls is planned, and what it reads.

        Parameters
        ----------
        kinds : of each operand: "S" shared, "L" a leaf, "P" a value of an earlier round, "G" of the same round, "E"
            part of the elements of a list
        wanted, wanted_params : whether a gradient of each operand and parameter is asked for
        recurrent : of each output, whether launches of the same round read it
        active : whether gradients flow through calls at all
        in_one_launch : see `plan_class`
        """
        key = (kinds, wanted, recurrent, wanted_params, active, in_one_launch)
        face = self._faces.get(key)
        if face is None:
            plan = self._plan(
                kinds, tuple([active and want for want in wanted]),
                tuple([active and want for want in wanted_params]), active and self.alias < 0, in_one_launch,
                tuple([k for k, inner in enumerate(recurrent) if inner]))
            sources = [operand_source(k, kind) for k, kind in enumerate(kinds)]
            face = self._faces[key] = Face(
                plan, [(k, sources[k], BUFFERS[spec], self.rows[0][k], kinds[k] == "E")
                       for k, spec in enumerate(self.operand_specs) if kinds[k] != "S"],
                [(k, sources[k]) for k in range(len(kinds)) if kinds[k] == "S"])
        return face

    def _plan(self, kinds: str, wanted: tuple[bool, ...], wanted_params: tuple[bool, ...], recorded: bool,
              in_one_launch: bool, recurrent: tuple[int, ...]) -> ClassPlan:
        key = (kinds, wanted, wanted_params, recorded, in_one_launch, recurrent)
        if key not in self._plans:
            old = self.vertex.program
            sources: dict[int, Any] = {}
            for value, source in old.inputs.items():
                if isinstance(source, Arg):
                    kind = kinds[source.index]
                    spec = old.specs[value]
                    spec = Spec(spec.shape, spec.dtype, {"S": SHARED, "E": CHILD}.get(kind, ROW))
                    sources[value] = (spec, operand_source(source.index, kind))
            vertex = respecified(self.vertex, sources)
            asked = [operand_source(k, kind) for k, kind in enumerate(kinds) if wanted[k]]
            asked += [p for p, want in zip(self.params, wanted_params) if want]
            self._plans[key] = plan_class(vertex, asked, recorded, in_one_launch, recurrent)
        return self._plans[key]


class Face(NamedTuple):
    """What a layout needs to know of a class, whatever its rows.

    Attributes
    ----------
    plan : ClassPlan
    reads : of each operand that is read by rows: its number, source, buffer (by its number in the process), rows of a
        position, and whether it is part of the elements of a list
    shared : of each other one: its number and source
    """

    plan: ClassPlan
    reads: list[tuple[int, Any, int, int, bool]]
    shared: list[tuple[int, Any]]


class CallClass:
    """Calls with one signature, recorded under one state of autograd: they may share launches.

    Those that only name rows are one class, with the signature of the first.
    """

    __slots__ = ("number", "kind", "signature", "recorded", "where", "identity")
    num_parts = num_launches = 1            # how many recorded calls are one of it, and launches one of its

    def __init__(self, number: int, kind: int, signature: Signature, recorded: bool, where: str, identity: Any):
        self.number, self.kind = number, kind   # in the flush, and in all flushes; -1 for what nobody recorded
        self.signature, self.recorded, self.where = signature, recorded, where
        self.identity = identity                # held, so that its id stays its own while the class exists


def operand_source(index: int, kind: str) -> Any:
    return _SOURCES[kind](index) if kind != "G" else Gather(index, 0)


_SOURCES: dict[str, Any] = {"S": Shared, "L": Leaf, "P": Leaf, "E": GatherAll}


#: operands that hold one number for each row of another: vectors there are stored by rows
INDEX_OPERANDS = {"Embedding": (0,), "take": (1,), "pick": (1,), "one_hot": (0,), "SoftmaxOutput": (1,)}


def operator_signature(name: str, attrs: dict[str, Any], specs: Sequence[int], training: bool) -> Signature:
    """One operator call as a program; raises ProgramError or UnsupportedOpError where it has none."""
    op = lookup(name)
    if "training" in op.attrs:
        attrs = {**attrs, "training": training}

    def build(shapes: Sequence[tuple[int, ...]]) -> Program:
        builder = Builder(Program(name=name))
        inputs = [builder.input(Spec(shape, SPECS[s].dtype), Arg(k)) for k, (shape, s) in enumerate(zip(shapes, specs))]
        builder.program.outputs = builder.call(name, inputs, attrs)
        return builder.program

    program = build([SPECS[s].shape for s in specs])
    _check_rows(program)
    given = {k: v for k, v in attrs.items() if k != "training"}
    if not op.leaves_tape:              # (no operator of MXNet)
        _check_as_mxnet(name, given, [SPECS[s].shape for s in specs], program)

    def run_alone(_: Any, operands: list[Any]) -> list[Any]:
        with mode_of(training):
            return flatten(op.alone(mx.nd, name, given, operands))

    count = len(program.outputs)
    template = list(range(count)) if count > 1 else 0
    context = DEVICES[specs[0]]
    alias = _alias_of(name, program, specs[0])
    if alias >= 0:
        return Signature(name, program, specs, context, template, run_alone, alias=alias)
    for split in _splits(specs):
        row_program = _row_program(build, specs, split, program)
        if row_program is not None:
            row_specs = [spec_number((1, *SPECS[s].shape[1:]), SPECS[s].dtype, context, by_rows=True) if part else s
                         for s, part in zip(specs, split)]
            return Signature(name, row_program, row_specs, context, template, run_alone, split)
    return Signature(name, program, specs, context, template, run_alone)


def _check_as_mxnet(name: str, attrs: dict[str, Any], shapes: Sequence[tuple[int, ...]], program: Program) -> None:
    """Refuse a call that MXNet refuses, or understands in another way: it then runs alone, and MXNet says what it says.
    """
    operands = [mx.sym.var(f"x{k}") for k in range(len(shapes))]
    try:
        made = mxnet_function(mx.sym, name)(*operands, **attrs)
        found = made._infer_shape_impl(False, **{f"x{k}": shape for k, shape in enumerate(shapes)})[1]
    except (MXNetError, TypeError, ValueError) as error:
        raise ProgramError("MXNet refuses the call") from error
    if found is None or [tuple(shape) for shape in found[:len(program.outputs)]] != [
            program.specs[v].shape for v in program.outputs]:
        raise ProgramError(f"MXNet makes results of other shapes ({found})")


ANY_NUMBER = ("add_n", "Concat")


def takes_any_number(name: str, attrs: dict[str, Any], specs: Sequence[int]) -> bool:
    """Whether an operator adds up single rows, or joins them along the first axis: any number of them is one class.

    (The sum of one row, too: it would be there without a launch, but a step before the sums that it belongs to.)
    """
    return (name == "add_n" and _are_summed(specs)) or (
        name == "Concat" and str(attrs.get("dim", 1)) == "0" and len(specs) > 1 and len(set(specs)) == 1
        and WIDTHS[specs[0]] == 1 and SPECS[specs[0]].shape[0] == 1)


def _are_summed(specs: Sequence[int]) -> bool:
    """Whether rows may be added up as a list: they look alike, and MXNet has the operator for their dtype."""
    return len(set(specs)) == 1 and WIDTHS[specs[0]] == 1 and SPECS[specs[0]].dtype not in ("int8", "uint8")


@functools.cache
def any_number_signature(name: str, spec: int) -> Signature:
    """Single rows as a list: each is a position that is copied to its place (Concat), or all are added up (add_n)."""
    joins = name == "Concat"
    builder = Builder(Program(name=name))
    row = builder.input(Spec(SPECS[spec].shape, SPECS[spec].dtype, ROW if joins else CHILD), Arg(0))
    builder.program.outputs = [builder.emit("_copy" if joins else "child_sum", row)]

    def run_alone(_: Any, operands: list[Any]) -> list[Any]:
        return [mx.nd.concat(*operands, dim=0) if joins else mx.nd.add_n(*operands)]

    return Signature(name, builder.program, [spec], DEVICES[spec], 0, run_alone, split=[joins], slots=1)


def _splits(specs: Sequence[int]) -> list[tuple[bool, ...]]:
    """Which operands may have the rows: all whose first axis is as long as the first operand's, or that one alone."""
    rows = SPECS[specs[0]].shape[0]
    every = tuple(SPECS[s].shape[0] == rows and is_by_rows(s) for s in specs)
    alone = (every[0],) + (False,) * (len(specs) - 1)
    return list(dict.fromkeys(split for split in (every, alone) if split[0]))


def _row_program(build: Any, specs: Sequence[int], split: Sequence[bool], call: Program) -> Program | None:
    def with_rows(rows: int) -> Program:
        return build([(rows, *SPECS[s].shape[1:]) if part else SPECS[s].shape for s, part in zip(specs, split)])

    try:
        return one_row_program(with_rows, call)
    except ProgramError:                # an attribute names the number of rows
        return None


_NAMING = ("slice", "slice_axis", "Reshape", "expand_dims", "squeeze", "Flatten", "_copy", "Dropout")


def _alias_of(name: str, program: Program, spec: int) -> int:
    """The first row of the operand that a slice, a reshape or a copy only names; -1 if it makes something new."""
    if name not in _NAMING:
        return -1
    row, shape, start = ROW_SPECS[BUFFERS[spec]].shape[0], SPECS[spec].shape, 0
    for instr in program.instrs:
        if instr.op == "slice":
            begins = _stretch_of(shape, dict(instr.attrs))
            if begins < 0:
                return -1
            start += begins
        elif instr.op not in ("Reshape", "_copy"):
            return -1
        shape = program.specs[instr.outputs[0]].shape
    if shape[-1] != row and not (row == 1 and len(shape) == 1):
        return -1
    return start // row if start % row == 0 else -1


def _stretch_of(shape: tuple[int, ...], a: dict[str, Any]) -> int:
    """Where in memory a slice begins, if it is one stretch in the order of the array; else -1."""
    start, stretches = 0, False
    for n, *part in itertools.zip_longest(shape, a["begin"], a["end"], a["step"]):
        taken = range(n)[slice(*part)]
        if stretches and taken != range(n):
            return -1                       # the axes behind one that has several entries must be whole
        if len(taken) > 1:
            if taken.step != 1:
                return -1
            stretches = True
        start = start * n + taken[0]
    return start


def mode_of(training: bool) -> Any:
    """The state of autograd that the code of a call runs in; on the tape or not, as it is."""
    return autograd.train_mode() if training else autograd.predict_mode()


def _check_results(out: Any) -> None:
    """Raise ProgramError if something is returned in lists of another kind, such as a named tuple."""
    if isinstance(out, (list, tuple)):
        if type(out) not in (list, tuple):
            raise ProgramError(f"it returns a {type(out).__name__}; results are arrays in plain lists and tuples")
        for part in out:
            _check_results(part)


def _check_rows(program: Program) -> None:
    """Raise ProgramError if a value has no elements, or no axes: nothing of it could be a row of a buffer."""
    odd = next((spec.shape for spec in program.specs if not has_rows(spec.shape)), None)
    if odd is not None:
        raise ProgramError(f"a value of shape {odd} has no rows")


def vertex_signature(fn: Any, block: Any, title: str, nested: Any, specs: Sequence[int], training: bool) -> Signature:
    """Trace ``fn(block, *args)`` on placeholders; `nested` is the structure of the arguments, with operand numbers.

    The signature does not hold the block: it lives in a table that forgets blocks that die.
    """
    structure: list[Any] = []

    def traced(F, *arrays):             # constants (None, bool, str) are passed on as they are
        out = fn(block, *map_nested(lambda k: arrays[k] if type(k) is int else k, nested))
        _check_results(out)
        structure.append(out)
        return out

    with DEVICES[specs[0]]:
        program = trace(traced, *[SPECS[s] for s in specs], name=title)
    if program.checks:
        raise ProgramError("gather_nd raises for indices out of range, which are known when it runs")
    _check_rows(program)
    count = iter(range(len(program.outputs)))
    template = map_nested(lambda x: None if x is None else next(count), structure[0])

    def run_alone(block: Any, operands: list[Any]) -> list[Any]:
        with mode_of(training):
            return flatten(fn(block, *map_nested(lambda k: operands[k] if type(k) is int else k, nested)))

    return Signature(title, program, specs, DEVICES[specs[0]], template, run_alone)
