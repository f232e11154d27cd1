"""Which instructions run when.

    eager      needs nothing from a child       once, over all rows, before the first launch
    critical   on the way from child to parent  in every launch
    lazy       feeds no parent                  once, over all rows, after the last launch

In a backward program "child" and "parent" change places: gradients of readers come in, gradients for the
children go out, and parameter gradients, which feed nobody, are lazy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .ops import SEGMENTED
from .program import Instr

__all__ = ["Parts", "Step", "partition", "make_steps"]


@dataclass(frozen=True)
class Parts:
    eager: list[Instr]
    critical: list[Instr]
    lazy: list[Instr]


def partition(instrs: Sequence[Instr], recurrent_inputs: Collection[int], recurrent_outputs: Collection[int]) -> Parts:
    """Split the instructions by what they wait for and what waits for them."""
    waits = set(recurrent_inputs)
    for instr in instrs:
        if not waits.isdisjoint(instr.inputs):
            waits.update(instr.outputs)
    feeds = set(recurrent_outputs)
    for instr in reversed(instrs):
        if not feeds.isdisjoint(instr.outputs):
            feeds.update(instr.inputs)
    parts = Parts([], [], [])
    for instr in instrs:
        if waits.isdisjoint(instr.outputs):
            parts.eager.append(instr)
        elif feeds.isdisjoint(instr.outputs):
            parts.lazy.append(instr)
        else:
            parts.critical.append(instr)
    return parts


@dataclass(frozen=True)
class Step:
    """Instructions that a backend runs as one: a region, or a single instruction that needs the launch's structure."""

    instrs: tuple[Instr, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]        # values that are needed after the step

    @property
    def segmented(self) -> bool:
        return self.instrs[0].op in SEGMENTED

    @property
    def scatters(self) -> bool:
        """Whether it does nothing but add up rows (its second input) by their numbers (its first) in a table."""
        return self.instrs[0].op == "scatter_rows" and len(self.instrs) == 2


def make_steps(instrs: Sequence[Instr], kept: Iterable[int]) -> list[Step]:
    """Group instructions into few steps; `kept` values are needed after the last one."""
    groups = _group(instrs)
    needed, steps = set(kept), []
    for group in reversed(groups):
        made = [v for instr in group for v in instr.outputs]
        read = dict.fromkeys(v for instr in group for v in instr.inputs)
        outputs = tuple(v for v in made if v in needed)
        inputs = tuple(v for v in read if v not in set(made))
        steps.append(Step(tuple(group), inputs, outputs))
        needed.update(inputs)
    return steps[::-1]


def _group(instrs: Sequence[Instr]) -> list[list[Instr]]:
    """Alternate between all segmented and all other instructions that are ready."""
    waiting, groups = list(instrs), []
    pending = {v for instr in waiting for v in instr.outputs}
    while waiting:
        later, region = [], []
        # Segmented instructions first: each one that runs now may let a larger region run next.
        for instr in waiting:
            if instr.op in SEGMENTED and pending.isdisjoint(instr.inputs):
                groups.append([instr])
                pending.difference_update(instr.outputs)
            else:
                later.append(instr)
        waiting, later = later, []
        for instr in waiting:
            if instr.op not in SEGMENTED and pending.isdisjoint(instr.inputs):
                region.append(instr)
                pending.difference_update(instr.outputs)
            else:
                later.append(instr)
        groups += _tables_apart(region)
        waiting = later
    return groups


def _tables_apart(region: list[Instr]) -> list[list[Instr]]:
    """A region, and behind it the gradient of each table: somebody may want its rows, and never make the table."""
    reads = Counter(v for instr in region for v in instr.inputs)
    makers = {instr.outputs[0]: instr for instr in region if instr.op == "scatter_rows"}
    pairs = [[makers[instr.inputs[0]], instr] for instr in region if instr.op == "sum_rows"
             and instr.inputs[0] in makers and reads[instr.inputs[0]] == 1 and not reads[instr.outputs[0]]]
    apart = {id(instr) for pair in pairs for instr in pair}
    rest = [instr for instr in region if id(instr) not in apart]
    return [part for part in [rest, *pairs] if part]
