"""The samples of `simulate.py`: trees from SICK, from the Stanford Sentiment Treebank, and generated ones.

Only their structure counts: which cell runs at each vertex, and what it reads.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["SHAPES", "Sample", "Tree", "chain", "complete", "generate", "pair", "random_binary", "random_nary",
           "read_sick", "read_sst", "rooted", "sentence", "tree_of_parents"]

Tree = list[list[int]]              # the children of each vertex; they come before it, the root is last


class Sample(NamedTuple):
    """The vertices of a sample: the cell of each, and the earlier vertices that it reads."""

    kinds: list[str]
    reads: list[list[int]]


def pair(a: Tree, b: Tree) -> Sample:
    """Two sentences, and the vertex that compares their roots."""
    reads = a + [[len(a) + w for w in below] for below in b]
    return Sample(["word"] * len(reads) + ["pair"], [*reads, [len(a) - 1, len(reads) - 1]])


def sentence(tree: Tree) -> Sample:
    """A binary tree with words at its leaves."""
    return Sample(["node" if below else "leaf" for below in tree], tree)


def rooted(tree: Tree) -> Sample:
    """A tree with a word at every vertex, and one that judges its root."""
    return Sample(["word"] * len(tree) + ["root"], [*tree, [len(tree) - 1]])


def tree_of_parents(parents: Sequence[int]) -> Tree:
    """A tree from the parent of each vertex, -1 at the root; vertices are numbered anew, children first."""
    children: Tree = [[] for _ in parents]
    roots: list[int] = []
    for v, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            raise ValueError(f"vertex {v + 1} has parent {parent + 1}, but there are {len(parents)} vertices")
        (children[parent] if parent >= 0 else roots).append(v)
    if len(roots) != 1:
        raise ValueError(f"expected one root, found {len(roots)}")
    order, todo = [], roots
    while todo:
        v = todo.pop()
        order.append(v)
        todo += children[v]
    if len(order) != len(parents):
        raise ValueError(f"{len(parents) - len(order)} vertices are on a cycle, or below one")
    order.reverse()
    number = {v: k for k, v in enumerate(order)}
    return [sorted(number[w] for w in children[v]) for v in order]


def read_sick(data: Path, count: int, seed: int = 0) -> list[Sample]:
    """Pairs of sick/train in a random order; after the last one the first comes again."""
    files = [data / "sick" / "train" / f"{side}.parents" for side in "ab"]
    sides = [_lines(path) for path in files]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{files[0]} has {len(sides[0])} sentences, {files[1]} has {len(sides[1])}; expected pairs")

    def tree(side: int, k: int) -> Tree:
        try:
            return tree_of_parents([int(parent) - 1 for parent in sides[side][k].split()])
        except ValueError as err:
            raise ValueError(f"{files[side]}, line {k + 1}: {err}; expected the parent of each word, counted from 1, "
                             "and 0 at the root") from err

    return [pair(tree(0, k), tree(1, k)) for k in _chosen(len(sides[0]), count, seed)]


def read_sst(data: Path, count: int, seed: int = 0) -> list[Sample]:
    """Trees of sst/train in a random order; after the last one the first comes again."""
    path = data / "sst" / "train.txt"
    lines = _lines(path)
    found = []
    for k in _chosen(len(lines), count, seed):
        try:
            found.append(sentence(_parse(lines[k])))
        except ValueError as err:
            raise ValueError(f"{path}, line {k + 1}: {err}; expected a binary tree such as (3 (2 A) (3 film))") from err
    return found


def _lines(path: Path) -> list[str]:
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not packed.exists():
        raise ValueError(f"there is no {path}; name a folder that has it with --data, or leave --data out for "
                         "generated trees")
    with path.open(encoding="utf-8") if path.exists() else gzip.open(packed, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\r\n") for line in file]
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def _chosen(size: int, count: int, seed: int) -> Any:
    return np.resize(np.random.RandomState(seed).permutation(size), count)


_TOKEN = re.compile(r" *(?:(\()\d+(?= )|([^() ]+)\)|\))")       # words may have other blanks than the space in them


def _parse(line: str) -> Tree:
    tree: Tree = []
    waiting: list[list[int]] = [[]]             # for every open bracket, the vertices inside; first those outside
    at, end = 0, len(line.rstrip(" "))
    while at < end:
        token = _TOKEN.match(line, at)
        if token is None:
            raise ValueError(f"what is {line[at:at + 20]!r}?")
        at = token.end()
        if token[1]:
            waiting.append([])
            continue
        below = waiting.pop()
        if not waiting or len(below) != (0 if token[2] else 2):
            raise ValueError(f"the bracket that ends at character {at} closes nothing" if not waiting else
                             f"the node that ends at character {at} has {len(below)} children")
        waiting[-1].append(len(tree))
        tree.append(below)
    if len(waiting) != 1 or len(waiting[0]) != 1:
        raise ValueError(f"{len(waiting) - 1} brackets are open, and there are {len(waiting[0])} trees")
    return tree


# ---- generated samples -------------------------------------------------------------------------------------------

def random_binary(rng: Any, leaves: int) -> Tree:
    """Every split into a left and a right part is as likely as any other."""
    parents, todo = [-1], [(0, leaves)]
    while todo:
        v, size = todo.pop()
        if size > 1:
            left = int(rng.randint(1, size))
            todo += [(len(parents), left), (len(parents) + 1, size - left)]
            parents += [v, v]
    return tree_of_parents(parents)


def random_nary(rng: Any, size: int, reach: int = 4) -> Tree:
    """The parent of a vertex is one of the `reach` before it."""
    return tree_of_parents([-1] + [int(rng.randint(max(0, v - reach), v)) for v in range(1, size)])


def chain(length: int) -> Tree:
    return [[v - 1] if v else [] for v in range(length)]


def complete(depth: int, arity: int = 2) -> Tree:
    """All leaves are `depth` below the root."""
    size = sum(arity ** k for k in range(depth + 1))
    return tree_of_parents([-1] + [(v - 1) // arity for v in range(1, size)])


SHAPES: dict[str, Callable[[Any], Tree]] = {
    "binary": lambda rng: random_binary(rng, int(rng.randint(2, 30))),
    "nary": lambda rng: random_nary(rng, int(rng.randint(3, 36))),
    "chain": lambda rng: chain(int(rng.randint(3, 36))),
    "complete": lambda rng: complete(int(rng.randint(2, 6))),
}


def generate(model: str, count: int, seed: int = 0, shape: str = "binary") -> list[Sample]:
    """Samples with the sizes of the real ones: SICK has 9.7 words a sentence, the treebank 19. "trees": of a shape."""
    rng = np.random.RandomState(seed)

    def size(mean_shape: float, scale: float, least: int, most: int) -> int:
        return int(np.clip(rng.gamma(mean_shape, scale), least, most))

    if model == "sick":
        return [pair(*[random_nary(rng, size(6.4, 1.6, 3, 36)) for _ in "ab"]) for _ in range(count)]
    if model == "sst":
        return [sentence(random_binary(rng, size(4.2, 4.55, 2, 56))) for _ in range(count)]
    return [rooted(SHAPES[shape](rng)) for _ in range(count)]
