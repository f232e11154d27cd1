"""Which nodes share a loop.

Every node that is kept somewhere is computed in a loop over its domain: the elements of a point, the operand's elements
of a reduction. Nodes of one domain share a loop where none needs what another one has not finished.

Heavy functions pay only in loops that run long and evenly: not in one that also adds up, since its last elements run
one by one; and not over short rows, unless the rows of a block lie one behind the other (`flat`) and make one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .nodes import CHEAP, Graph, Node, Pieces, Point, Reduce, Ref, row_major, through

__all__ = ["Loop", "fuse", "whole", "reads_of"]

#: a point of its own that costs so much is heavy; over so many elements it may share a loop with a reduction
HEAVY, LONG = 20, 1024


@dataclass
class Loop:
    domain: tuple[int, ...]
    level: int
    flat: bool                          # rows of a block lie one behind the other
    outer: int | None = None            # axes outside of the loops that add up, if any do
    nodes: list[Point | Reduce] = field(default_factory=list)


def domain_of(node: Point | Reduce) -> tuple[int, ...]:
    return node.arg.shape if isinstance(node, Reduce) else node.shape


def whole(node: Node) -> Ref:
    return Ref(node, node.shape, row_major(node.shape))


def reads_of(node: Point | Reduce) -> Iterator[tuple[Ref, bool, bool]]:
    """What a node reads, seen from its domain: (ref, computed on the way, at an index that is computed)."""
    seen, todo = set(), _operands(node, node.args)
    while todo:
        ref, indexed = todo.pop()
        if (ref, indexed) in seen:
            continue
        seen.add((ref, indexed))
        inlined = isinstance(ref.node, Point) and not ref.node.stored
        yield ref, inlined, indexed
        if inlined:
            todo += _operands(ref.node, [through(ref, a) for a in ref.node.args])


def _operands(node: Point | Reduce, args) -> list[tuple[Ref, bool]]:
    looked_up = isinstance(node, Point) and node.stride is not None
    return [(a, looked_up and k == 0) for k, a in enumerate(args)]


def fuse(graph: Graph, flat: Callable[[Ref], bool] | None = None) -> list[Loop]:
    """Loops in an order in which they can run.

    Points that several loops would compute again become stored. `flat` is given where rows run in blocks: whether a
    block's rows of a ref lie one behind the other.
    """
    while True:
        loops, again = _attempt(graph, flat)
        if not again:
            return loops
        for node in again:
            node.stored = True


def _attempt(graph: Graph, flat: Callable[[Ref], bool] | None) -> tuple[list[Loop], list[Point]]:
    loop_of: dict[Node, Loop] = {}
    loops: dict[tuple, Loop] = {}
    inlined_in: dict[Point, set[int]] = {}
    again: list[Point] = []
    for node in graph.nodes:
        if not (isinstance(node, Reduce) or isinstance(node, Point) and (node.stored or node.targets)):
            continue
        reads = list(reads_of(node))
        again += _to_store(node, reads, flat)
        even = flat is None or _is_flat(node, reads, flat)
        loop = _loop_for(node, reads, even, loops, loop_of)
        loop.nodes.append(node)
        loop_of[node] = loop
        for ref, inlined, _ in reads:
            if inlined and ref.node.total_cost > CHEAP:
                inlined_in.setdefault(ref.node, set()).add(id(loop))
    again += [point for point, places in inlined_in.items() if len(places) > 1]
    return sorted(loops.values(), key=lambda loop: (loop.level, loop.nodes[0].number)), again


def _to_store(node: Point | Reduce, reads, flat) -> list[Point]:
    """Points that should not be computed on the way to this node."""
    inlined = [ref for ref, computed, _ in reads if computed]
    repeated = [ref.node for ref in inlined if ref.node.total_cost > CHEAP and 0 in ref.strides]
    if flat is None:
        short = isinstance(node, Reduce) and node.arg.size < LONG
        return repeated + [ref.node for ref in inlined if short and ref.node.cost >= HEAVY]
    if _is_flat(node, reads, flat):
        return repeated
    heavy = [ref.node for ref in inlined if ref.node.cost >= HEAVY]
    if isinstance(node, Point) and node.cost >= HEAVY:      # all but the function itself in a loop before
        heavy += [a.node for a in node.args if isinstance(a.node, Point) and not a.node.stored and a.node.args]
    return repeated + heavy


def _is_flat(node: Point | Reduce, reads, flat: Callable[[Ref], bool]) -> bool:
    return isinstance(node, Point) and not any(target.offset or target.strides != row_major(node.shape)
                                               for target in node.targets) and flat(whole(node)) and all(
        inlined or flat(ref) for ref, inlined, _ in reads)


def _loop_for(node: Point | Reduce, reads, even: bool, loops: dict[tuple, Loop], loop_of: dict[Node, Loop]) -> Loop:
    """The first loop that can take the node."""
    domain, level = domain_of(node), 0
    for ref, inlined, indexed in reads:
        read = ref.node
        if isinstance(read, Pieces):
            level = max([level, *(loop_of[part].level + 1 for part in read.parts)])
        elif read in loop_of and not inlined:
            together = (isinstance(read, Point) and not indexed and ref == whole(read) and ref.shape == domain
                        and loop_of[read].flat == even
                        and not (isinstance(node, Reduce) and node.arg.size < LONG and read.total_cost >= HEAVY))
            level = max(level, loop_of[read].level + (0 if together else 1))
    outer = len(domain) - len(node.axes) if isinstance(node, Reduce) and node.trailing else None
    while True:
        loop = loops.setdefault((level, domain, even), Loop(domain, level, even))
        crowded = outer is not None and any(n.total_cost >= HEAVY for n in loop.nodes) and node.arg.size < LONG
        if not crowded and (outer is None or loop.outer in (None, outer)):
            loop.outer = loop.outer if outer is None else outer
            return loop
        level += 1
