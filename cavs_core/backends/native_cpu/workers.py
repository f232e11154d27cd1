"""The workers: threads of our own that share the rows of every launch.

They sleep in compiled code, without the GIL, until there is a table to run; the thread that asks is worker 0. Once
the others are woken nothing runs in Python until all are done, so an interrupt cannot leave them waiting for it.
"""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np

from . import blas
from .interpreter import CONTROL_BYTES, MOST_WORKERS, compiled, dismiss, lead, prepare, run, serve
from .memory import Block, address_of
from .ops import LAUNCH_WIDTH, OP_WIDTH

__all__ = ["Workers", "WORKERS", "default_count"]

WORTH_SHARING = 40_000      # ns of work; below it waking the others costs more than they help


def default_count() -> int:
    """DYNBATCH_THREADS, or the number of cores that this process may use; 8 at most."""
    wanted = os.environ.get("DYNBATCH_THREADS", "")
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"DYNBATCH_THREADS is {wanted!r}, but should be a number of threads, such as 2")
        return min(int(wanted), MOST_WORKERS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class Workers:
    """A crew of threads, started when first needed. It runs one table at a time.

    Parameters
    ----------
    count : int, optional
        Threads, the caller's included; default: `default_count()`.
    worth_sharing : int
        ns of work (by the costs of the ops) that a table needs to be shared.
    """

    def __init__(self, count: int | None = None, worth_sharing: int = WORTH_SHARING) -> None:
        self._wanted = count
        self._worth = worth_sharing
        self._reset()
        _crews.add(self)

    def _reset(self) -> None:
        """No threads: at first, and in a forked child, which has none of its parent's."""
        self._lock = threading.Lock()
        self._control: Block | None = None
        self.count = 0

    def _start(self) -> Block:
        control = Block(CONTROL_BYTES)
        control.memory[:] = 0
        count = self._wanted or default_count()
        self.count = 1 if compiled(prepare).call(control.address) else count
        work = compiled(serve).call
        for worker in range(1, self.count):
            # The thread holds the control block, which must outlive it.
            threading.Thread(target=lambda number, block: work(number, block.address), args=(worker, control),
                             name=f"dynbatch-{worker}", daemon=True).start()
        self._control = control
        return control

    def execute(self, launches: np.ndarray, ops: np.ndarray) -> None:
        """Run a table of launches; returns when all of it is done. May be called from any thread.

        Parameters
        ----------
        launches : int64 array, shape (launches, LAUNCH_WIDTH), rows of `ops.launch`
        ops : int64 array, shape (ops, OP_WIDTH), rows of `ops.kernel_op` and its like
        """
        for table, width in ((launches, LAUNCH_WIDTH), (ops, OP_WIDTH)):
            assert table.dtype == np.int64 and table.flags.c_contiguous and table.shape[1:] == (width,)
        start = compiled(lead).call
        with self._lock:
            control, threads = self._control or self._start(), blas.num_threads()
            start(compiled(run).address, self.count, address_of(launches), len(launches), address_of(ops),
                  control.address, self._worth, blas.thread_setter() if threads > 1 else 0, threads)

    def close(self) -> None:
        """End the threads; the next table starts others."""
        with self._lock:
            if self._control is not None:
                compiled(dismiss).call(self._control.address)
            self._control = None


_crews: weakref.WeakSet[Workers] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [crew._reset() for crew in _crews])

WORKERS = Workers()     # the crew that everybody uses
