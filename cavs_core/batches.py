"""Batches of graphs that come again, as they do where an epoch is not shuffled: what was worked out is kept."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .graph import InputGraph

__all__ = ["Batches"]

_MOST_VERTICES = 100_000    # of the batches that a cell remembers: some 25 MB with what was worked out for them
_lock = threading.Lock()    # of all cells: one of their own could not be copied with them


class Batches:
    """The last batches of graphs that a cell was given. The same graphs in the same order are the same batch."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], tuple[list[InputGraph], InputGraph]] = OrderedDict()
        self.num_vertices = 0

    def batch(self, graphs: list[InputGraph]) -> InputGraph:
        key = tuple(map(id, graphs))            # they are held, so that ids stay theirs
        with _lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key][1]
        made = graphs[0].alias() if len(graphs) == 1 and type(graphs[0]) is InputGraph else InputGraph.batch(graphs)
        with _lock:
            if key not in self._known and made.num_vertices <= _MOST_VERTICES:
                self._known[key] = graphs, made
                self.num_vertices += made.num_vertices
                while self.num_vertices > _MOST_VERTICES:
                    self.num_vertices -= self._known.popitem(last=False)[1][1].num_vertices
        return made
