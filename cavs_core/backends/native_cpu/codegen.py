"""Kernels as Python source for numba.

A kernel is one loop over rows; inside stand the fused loops over a row's elements. Where all rows are short, rows run
in blocks: what is read from here and there is brought together first, and every loop passes over all rows of a block.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...program import Instr, Spec
from . import ir, mathlib, pointers
from .bodies import BODIES, DTYPES, unsupported
from .fuse import fuse
from .ir import Access, Kernel
from .loops import LoopWriter, Places, indented
from .nodes import CHEAP, Graph, Input, Iota, Pieces, Point, Reduce, Ref, Target, row_major

__all__ = ["source_of", "supports"]

#: rows of no more elements run in blocks, of so many elements but no more than so many rows
_SHORT, _BLOCK_ELEMENTS, _BLOCK_ROWS = 64, 1024, 64
_HELPERS = {ir.SUM: "add_up", ir.SUM_EDGES: "add_up_edges", ir.MAX_EDGES: "max_edges"}
_GATHERED = (ir.TAKE, *_HELPERS)


def supports(op_name: str, attrs: dict[str, Any], specs: Sequence[Spec]) -> str | None:
    """Why an op has no native body for these operands (and results); None if it has one."""
    return unsupported(op_name, attrs, [s.dtype for s in specs] + ([attrs["dtype"]] if "dtype" in attrs else []))


def source_of(kernel: Kernel) -> str:
    """The source of a kernel. Equal kernels have equal sources, whatever the numbers of their values."""
    graph, made = _graph_of(kernel)
    block = _block_rows(graph)
    places = Places(_row_strides(kernel) if block > 1 else None)
    scalars, fresh, lines = {}, itertools.count(), []
    for loop in fuse(graph, places.flat if block > 1 else None):
        lines += LoopWriter(loop, places, scalars, fresh).lines()
    scratch = {name: (node.dtype, node.size * block) for name, node in places.scratch.items()}
    return _file(kernel, lines, scratch, made, block)


def _block_rows(graph: Graph) -> int:
    """How many rows run together."""
    longest = max([node.arg.size if isinstance(node, Reduce) else node.size for node in graph.nodes
                   if not isinstance(node, (Input, Iota))], default=_SHORT + 1)
    return max(8, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // longest)) if longest <= _SHORT else 1


def _row_strides(kernel: Kernel) -> dict[str, int]:
    """How far the rows of a block lie apart in every operand; those that are brought together lie close."""
    return {name: math.prod(access.shape) if access.how in _GATHERED else 0 if access.how == ir.ONE else access.stride
            for name, access in _operands(kernel)}


def _operands(kernel: Kernel) -> list[tuple[str, Access]]:
    return [*((f"x{k}", access) for k, (_, access) in enumerate(kernel.inputs)),
            *((f"y{k}", access) for k, (_, access) in enumerate(kernel.outputs))]


# ---- instructions -> graph ------------------------------------------------------------------------------------------

def _graph_of(kernel: Kernel) -> tuple[Graph, dict[str, str]]:
    """The nodes, and inputs that are brought together right in an output: input -> output."""
    graph = Graph()
    refs = {v: graph.input(access, f"x{k}") for k, (v, access) in enumerate(kernel.inputs)}
    uses = Counter(v for instr in kernel.instrs for v in instr.inputs) + Counter(v for v, _ in kernel.outputs)
    for instr in kernel.instrs:
        for v in instr.inputs:
            node = refs[v].node
            if uses[v] > 1 and isinstance(node, Point) and instr.op in ("slice", "SliceChannel", "Reshape", "reverse"):
                node.stored |= node.total_cost > CHEAP      # the part and the whole would compute it twice
        made = BODIES[instr.op](graph, dict(instr.attrs), *(refs[v] for v in instr.inputs))
        refs.update(zip(instr.outputs, made if isinstance(made, list) else [made]))
    made = {}
    reads = Counter(a.node for node in graph.nodes if isinstance(node, (Point, Reduce)) for a in node.args)
    reads += Counter(refs[v].node for v, _ in kernel.outputs)
    for k, (v, _) in enumerate(kernel.outputs):
        node = refs[v].node
        if isinstance(node, Input) and node.access.how in _GATHERED and refs[v].whole and reads[node] == 1:
            made[node.name] = f"y{k}"
        else:
            _put_output(graph, refs[v], f"y{k}")
    return graph, made


def _put_output(graph: Graph, ref: Ref, name: str) -> None:
    node = ref.node
    free = isinstance(node, Point) or isinstance(node, (Reduce, Pieces)) and not node.targets
    if not (free and ref.whole):
        node = graph.copy(ref).node
    node.targets += (Target(name, 0, row_major(node.shape)),)
    if isinstance(node, Point):
        node.stored = True


# ---- the file --------------------------------------------------------------------------------------------------------

_HERE = __name__.rpartition(".")[0]
#: what generated code may call, and where it is
_PROVIDERS = {
    "math": ("acos acosh asin asinh atan atanh cos cosh hypot inf lgamma log2 log10 nan pi sin sinh sqrt tan").split(),
    "numpy": ("cbrt", "ceil", "floor", "trunc", *DTYPES),
    f"{_HERE}.mathlib": mathlib.__all__,
    f"{_HERE}.pointers": pointers.__all__,
}


def _file(kernel: Kernel, lines: list[str], scratch: dict[str, tuple[str, int]], made: dict[str, str],
          block: int) -> str:
    operands, text = dict(_operands(kernel)), "\n".join(lines)
    buffers = [name for name in operands
               if re.search(rf"\b{name}\b", text) or name in made or name in made.values()]
    start, each, together = [], [], []
    for slot, (name, access) in zip(itertools.count(step=ir.SLOTS), operands.items()):
        if name in made:
            start += _pointers(slot, name, access)
            together += _made_rows(name, access, made[name], operands[made[name]].stride, block)
        elif name in buffers:
            begin, row = _opened(slot, name, access, block)
            start += begin
            each += row
    lines, buffers = [*together, *lines], [*buffers, *scratch]
    start += [_scratch(name, name, dtype, size) for name, (dtype, size) in scratch.items()]
    end = [f"release({name})" for name, size, dtype in re.findall(r'(\w+) = scratch\((\d+), "(\w+)"', "\n".join(start))
           if int(size) * np.dtype(dtype).itemsize > pointers.STACK_BYTES]
    if block > 1:
        each.insert(0, f"rows = min({block}, stop - r)")
    functions = sorted(set(re.findall(r"\b(\w+)_(float32|float64)\(", text)))
    code = [
        *(f'{name}_{dtype} = FUNCTIONS["{name}", "{dtype}"]' for name, dtype in functions),
        f'BUFFERS = "{" ".join(buffers)}"', "", "",
        "@cfunc(types.void(types.int64, types.int64, types.int64, types.int64), cache=True, **OPTIONS)",
        "def kernel(table, first, start, stop):",
        *indented(start, 1),
        f"    for r in range(start, stop, {block}):" if block > 1 else "    for r in range(start, stop):",
        *indented([*each, *lines] or ["pass"], 2),
        *indented(end, 1),
        ""]
    words = set(re.findall(r"\w+", "\n".join(code)))
    imports = [f"from {module} import {', '.join(sorted(words.intersection(names)))}"
               for module, names in _PROVIDERS.items() if words.intersection(names)]
    return "\n".join([f'"""{_summary(kernel.instrs)}"""', "from numba import cfunc, types", *imports, "", *code])


def _scratch(variable: str, buffer: str, dtype: str, size: int) -> str:
    return f'{variable} = scratch({size}, "{dtype}", "{buffer}", BUFFERS)'


def _summary(instrs: Sequence[Instr]) -> str:
    return ", ".join(instr.op for instr in instrs) or "copy"


def _pointers(slot: int, name: str, access: Access) -> list[str]:
    """Lines that read the table."""
    base = name if access.how == ir.ONE else name.upper()
    lines = [f'{base} = pointer(table, {slot}, "{access.dtype}", "{name}", BUFFERS)']
    if access.how in (ir.TAKE, ir.SUM):
        lines.append(f'{base}_index = pointer(table, {slot + 1}, "int64", "", "")')
    if access.how in _HELPERS:
        lines.append(f'{base}_bounds = pointer(table, {slot + 2}, "int64", "", "")')
    return lines


def _opened(slot: int, name: str, access: Access, block: int) -> tuple[list[str], list[str]]:
    """Lines before all rows, and for each row or block; `name` then points at it."""
    base, size, start = name.upper(), math.prod(access.shape), _pointers(slot, name, access)
    if access.how == ir.ONE:
        return start, []
    if access.how in (ir.ROW_AT, ir.LOCAL):
        return start, [f"{name} = {base} + {_times('r' if access.how == ir.ROW_AT else '(r - first)', access.stride)}"]
    if block > 1 or access.how != ir.TAKE:
        start.append(_scratch(f"{base}_made", name, access.dtype, size * block))
    if block == 1:
        return start, _one_row(name, access)
    return start, [f"{name} = {base}_made", *_made_rows(name, access, name, size, block)]


def _times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}"


def _one_row(name: str, access: Access) -> list[str]:
    """Point at a row where it stands, or at the sum that is made of several."""
    base, stride = name.upper(), access.stride
    if access.how == ir.TAKE:
        return [f"{name} = {base} + {base}_index[{_times('r', access.step)}] * {stride}"]
    made = [f"{name} = {base}_made", *_made_row(name, access, name, "r")]
    if access.parts > 1:
        return made
    only = f"{base}_index[{base}_bounds[r]]" if access.how == ir.SUM else f"{base}_bounds[r]"
    return [f"if {base}_bounds[r + 1] == {base}_bounds[r] + 1:", f"    {name} = {base} + {only} * {stride}",
            "else:", *indented(made, 1)]


def _made_rows(name: str, access: Access, target: str, stride: int, block: int) -> list[str]:
    """Bring the rows of a block together at `target`."""
    if block == 1:
        return _made_row(name, access, target, "r")
    each = _made_row(name, access, f"{target} + {_times('i', stride)}", "(r + i)")
    return ["for i in range(rows):", *indented(each, 1)]


def _made_row(name: str, access: Access, target: str, row: str) -> list[str]:
    """Bring a row together at `target`."""
    base, parts, part = name.upper(), access.parts, math.prod(access.shape) // access.parts
    if access.how == ir.TAKE:
        source = f"plain({base}) + {base}_index[{_times(row, access.step)}] * {access.stride}"
        return [f"copy_row(plain({target}), {source}, {part})"]

    def call(target: str, segment: str) -> str:
        bounds = f"{base}_bounds[{segment}], {base}_bounds[{segment} + 1]"
        return f"{_HELPERS[access.how]}(plain({target}), plain({base}), {access.stride}, {part}, {index}{bounds})"

    index = f"{base}_index, " if access.how == ir.SUM else ""
    if parts == 1:
        return [call(target, row)]
    return [f"for k in range({parts}):", "    " + call(f"{target} + {part} * k", f"{row} * {parts} + k")]
