"""What flushes remember by the arrays that it was worked out from: found by a checksum, compared exactly."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cavs_core import compiled

__all__ = ["PlanCache", "checksum"]

PATIENCE = 32       # plans in a row that are put before one is asked for again
MOST = 4096         # keys that are remembered without a plan


class PlanCache:
    """What was worked out from arrays, such as plans from structures: the last used, as many as fit into `max_bytes`.

    Mini-batches of shuffled samples never come again. To keep their plans would only mean that every flush works in
    memory that is in no cache of the processor, and not in that of the flush before. So when nothing was asked for
    again for long, only what comes for the second time is kept. What holds the parameters of blocks goes when one of
    them dies.
    """

    def __init__(self, max_bytes: int = 64 << 20):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._plans: OrderedDict[Any, tuple[list[Any], Any, int, list[int]]] = OrderedDict()    # .., ids of blocks
        self._of_block: dict[int, set[Any]] = {}        # id of a block -> keys of its plans
        self._lock = threading.RLock()                  # a block may die while a plan is put
        self._idle = 0                                  # plans that were put since one was asked for again
        self._met: OrderedDict[int, None] = OrderedDict()       # hashes of keys whose plan was not kept

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any] | None:
        """What was put for equal arrays, with those very arrays: who brings them next time is compared at once."""
        with self._lock:
            known = self._plans.get(key)
            if known is None or not all(map(_equal, known[0], arrays)):
                return None
            self._plans.move_to_end(key)
            self._idle = 0
            return known[:2]

    def put(self, key: Any, arrays: Sequence[Any], plan: Any, blocks: Sequence[Any] = (),
            num_bytes: int | None = None) -> None:
        """Remember a plan; `num_bytes` is what it takes with its arrays, about four times these if it is not said."""
        size = 4 * sum(a.nbytes for a in arrays) if num_bytes is None else num_bytes
        if size > self.max_bytes:
            return
        with self._lock:
            if not self._is_kept(key):
                return
            self._drop([key])
            self._plans[key] = list(arrays), plan, size, [id(block) for block in blocks]
            self.num_bytes += size
            for block in blocks:
                if id(block) not in self._of_block:
                    self._of_block[id(block)] = set()
                    weakref.finalize(block, self._forget, id(block))
                self._of_block[id(block)].add(key)
            while self.num_bytes > self.max_bytes:
                self._drop([next(iter(self._plans))])

    def _is_kept(self, key: Any) -> bool:
        self._idle += 1
        if self._idle <= PATIENCE or key in self._plans:
            return True
        name = hash(key)
        if name in self._met:
            del self._met[name]
            return True
        self._met[name] = None
        if len(self._met) > MOST:
            self._met.popitem(last=False)
        return False

    def _forget(self, block: int) -> None:
        with self._lock:
            self._drop(self._of_block.pop(block, ()))

    def _drop(self, keys: Iterable[Any]) -> None:
        for key in keys:
            _, _, size, blocks = self._plans.pop(key, ((), None, 0, ()))
            self.num_bytes -= size
            for block in blocks:
                self._of_block.get(block, set()).discard(key)

    def clear(self) -> None:
        with self._lock:
            self._drop(list(self._plans))
            self._idle = 0
            self._met.clear()


def _equal(a: Any, b: Any) -> bool:
    """numpy's array_equal, which asks more questions than it takes to compare small arrays."""
    return a is b or (a.shape == b.shape and bool((a == b).all()))


@compiled
def checksum(*parts):  # type: ignore[no-untyped-def]
    """A number that is the same for the same arrays, and seldom for others; in a form that vectorises."""
    total = np.int64(0)
    for part in parts:
        for k in range(len(part)):
            total += part[k] ^ (k * np.int64(0x2545F4914F6CDD1D))
    return total
