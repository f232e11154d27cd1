"""Signature: what is called, as a program. Made once per operator and attributes, or per block and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cavs_core import (
    ROW,
    SHARED,
    Arg,
    Builder,
    ClassPlan,
    Gather,
    Leaf,
    Param,
    Program,
    Shared,
    Spec,
    TraceError,
    VertexProgram,
    lookup,
    own_outputs,
    plan_class,
    respecified,
    trace,
)
from cavs_core.mxnet_compat import autograd, mx

from .values import DEVICES, SPECS, spec_number

__all__ = ["Signature", "operator_signature", "vertex_signature"]


class Signature:
    """A program over operands that are all rows, and its variants by what the operands turn out to be.

    Attributes
    ----------
    title : what people call it, in reports
    operand_specs, output_specs : spec numbers
    regroup : the call's result from the list of its distinct outputs
    run_alone : (block, operands) -> the distinct outputs of the call by itself on real arrays, by MXNet
    draws : whether the result is random
    """

    def __init__(self, title: str, program: Program, operand_specs: Sequence[int], context: Any, template: Any,
                 run_alone: Callable[[Any, list[Any]], list[Any]]):
        values = list(dict.fromkeys(program.outputs))       # an array that is returned twice is one output
        places = [values.index(v) for v in program.outputs]
        builder = Builder(program)
        program.outputs = own_outputs(builder, values)
        program.prune()
        self.title = title
        self.vertex = VertexProgram(program, len(values))
        self.operand_specs = tuple(operand_specs)
        self.output_specs = [spec_number(program.specs[v].shape, program.specs[v].dtype, context)
                             for v in program.outputs]
        self.distinct = range(len(values))
        self.single = len(values) == 1 and template == 0
        self.regroup = _make_regroup(_map_nested(lambda k: k if k is None else places[k], template))
        self.params = [s for s in program.inputs.values() if isinstance(s, Param)]
        self.draws = any(instr.op == "uniform_like" for instr in program.instrs)
        self.run_alone = lambda block, operands: [
            flat[places.index(k)] for flat in [run_alone(block, operands)] for k in range(len(values))]
        self._plans: dict[Any, ClassPlan] = {}

    def plan(self, kinds: Sequence[str], wanted: Sequence[bool], wanted_params: tuple[bool, ...], recorded: bool,
             in_one_launch: bool) -> ClassPlan:
        """The plan of a class whose operand k is shared, a leaf or a recorded value: kinds[k] in "S", "L", "G"."""
        key = (tuple(kinds), tuple(wanted), wanted_params, recorded, in_one_launch)
        if key not in self._plans:
            old = self.vertex.program
            sources: dict[int, Any] = {}
            for value, source in old.inputs.items():
                if isinstance(source, Arg):
                    kind = kinds[source.index]
                    spec = old.specs[value]
                    spec = Spec(spec.shape, spec.dtype, SHARED if kind == "S" else ROW)
                    sources[value] = (spec, operand_source(source.index, kind))
            vertex = respecified(self.vertex, sources)
            asked = [operand_source(k, kind) for k, kind in enumerate(kinds) if wanted[k]]
            asked += [p for p, want in zip(self.params, wanted_params) if want]
            self._plans[key] = plan_class(vertex, asked, recorded, in_one_launch)
        return self._plans[key]


def operand_source(index: int, kind: str) -> Any:
    return Shared(index) if kind == "S" else Leaf(index) if kind == "L" else Gather(index, 0)


def operator_signature(name: str, attrs: dict[str, Any], specs: Sequence[int], training: bool,
                       output_is_list: bool) -> Signature:
    """One operator call as a program; raises ProgramError or UnsupportedOpError where it has none."""
    op = lookup(name)
    if "training" in op.attrs:
        attrs = {**attrs, "training": training}
    builder = Builder(Program(name=name))
    inputs = [builder.input(SPECS[s], Arg(k)) for k, s in enumerate(specs)]
    builder.program.outputs = builder.call(name, inputs, attrs)
    count = len(builder.program.outputs)
    given = {k: v for k, v in attrs.items() if k != "training"}

    def run_alone(_: Any, operands: list[Any]) -> list[Any]:
        function = getattr(mx.nd, name, None) or getattr(mx.nd._internal, name)
        with autograd.pause(train_mode=training):
            return _flat(function(*operands, **given))

    return Signature(name, builder.program, specs, DEVICES[specs[0]],
                     list(range(count)) if output_is_list or count > 1 else 0, run_alone)


def vertex_signature(fn: Any, block: Any, title: str, nested: Any, specs: Sequence[int], training: bool) -> Signature:
    """Trace ``fn(block, *args)`` on placeholders; `nested` is the structure of the arguments, with operand numbers.

    The signature does not hold the block: it lives in a table that forgets blocks that die.
    """
    structure: list[Any] = []

    def traced(F, *args):
        out = fn(block, *args)
        structure.append(out)
        return out

    arguments = _map_nested(lambda k: SPECS[specs[k]] if type(k) is int else k, nested)
    with DEVICES[specs[0]]:
        program = trace(traced, *arguments, name=title)
    count = iter(range(len(program.outputs)))
    template = _map_nested(lambda x: None if x is None else next(count), structure[0])
    if not _all_arrays(structure[0]):
        raise TraceError(f"{title}: returns {structure[0]!r}; a vertex returns arrays, or lists of arrays")
    def run_alone(block: Any, operands: list[Any]) -> list[Any]:
        with autograd.pause(train_mode=training):
            return _flat(fn(block, *_map_nested(lambda k: operands[k] if type(k) is int else k, nested)))

    return Signature(title, program, specs, DEVICES[specs[0]], template, run_alone)


def _flat(nested: Any) -> list[Any]:
    if isinstance(nested, (list, tuple)):
        return [x for part in nested for x in _flat(part)]
    return [] if nested is None else [nested]


def _map_nested(fn: Any, nested: Any) -> Any:
    if isinstance(nested, (list, tuple)):
        return type(nested)(_map_nested(fn, part) for part in nested)
    return fn(nested)


def _all_arrays(nested: Any) -> bool:
    if isinstance(nested, (list, tuple)):
        return all(_all_arrays(part) for part in nested)
    return nested is None or isinstance(nested, mx.nd.NDArray)


def _make_regroup(template: Any) -> Callable[[list[Any]], Any]:
    """A function that puts outputs into the structure that the block returned."""
    def code(part: Any) -> str:
        if isinstance(part, tuple):
            return f"({''.join(code(p) + ', ' for p in part)})"
        if isinstance(part, list):
            return f"[{', '.join(code(p) for p in part)}]"
        return "None" if part is None else f"o[{part}]"

    return eval(f"lambda o: {code(template)}")      # one expression: every call of the vertex goes through it
