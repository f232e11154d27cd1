"""Trees of a mini-batch level by level: what reads what, as index tensors. Made with numpy, once a mini-batch."""

from typing import NamedTuple

import numpy as np
import torch


class TreeArrays(NamedTuple):
    """A tree, children before parents; `level` is 0 at leaves, else one more than that of the deepest child."""

    parents: np.ndarray         # -1 at the root
    level: np.ndarray

    @classmethod
    def from_parents(cls, parents):
        level = [0] * len(parents)
        for v, parent in enumerate(parents):
            if parent >= 0:
                level[parent] = max(level[parent], level[v] + 1)
        return cls(np.array(parents), np.array(level))


class Level(NamedTuple):
    """One level above the leaves.

    Between levels only those states are carried on that a later level reads, so that a level costs in proportion to
    what is still open, not to the whole mini-batch.
    """

    size: int
    below: torch.Tensor         # rows of the children among the carried states, by parent, in their order
    owner: torch.Tensor         # for each child, the row of its parent in this level
    kept: torch.Tensor          # rows of the carried states that are carried on; then come the new ones

    def carry(self, old, new):
        """The states that later levels read."""
        return torch.cat((old.index_select(0, self.kept), new)) if len(self.kept) else new


class Levels:
    """A batch of trees. `order`: all vertices by level, numbered tree after tree; leaves come first."""

    def __init__(self, trees):
        sizes = [len(tree.parents) for tree in trees]
        starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
        parents = np.concatenate([tree.parents for tree in trees])
        self.roots = np.flatnonzero(parents < 0)
        parents = np.where(parents < 0, -1, parents + starts)
        level = np.concatenate([tree.level for tree in trees])
        self.order = np.argsort(level, kind="stable")
        self.sizes = np.bincount(level)
        self.place = np.empty_like(self.order)          # of a vertex in `order`
        self.place[self.order] = np.arange(len(level))
        self.levels = list(self._levels(parents, level))

    def _levels(self, parents, level):
        children = np.flatnonzero(parents >= 0)
        children = children[np.argsort(self.place[parents[children]], kind="stable")]
        owners = self.place[parents[children]]
        last_use = np.where(parents < 0, -1, level[parents])
        firsts = np.cumsum(self.sizes)
        bounds = np.searchsorted(owners, firsts)
        carried, row = self.order[:firsts[0]], np.empty_like(self.order)
        for k in range(1, len(self.sizes)):
            row[carried] = np.arange(len(carried))
            part = slice(bounds[k - 1], bounds[k])
            kept = np.flatnonzero(last_use[carried] > k)
            yield Level(int(self.sizes[k]), *map(torch.from_numpy, (
                row[children[part]], owners[part] - firsts[k - 1], kept)))
            carried = np.concatenate((carried[kept], self.order[firsts[k - 1]:firsts[k]]))
