"""One compiled function that runs a table of launches; every worker runs it over the same table.

A worker does its share of a launch's rows, op after op, and then waits for the others. So a launch may read what
earlier launches wrote, and of its own what the same worker wrote for the same rows. Ops that sum over rows are shared
by columns instead: they read rows of earlier launches only. A product of few rows with a large matrix is shared by
columns too, since reading the matrix is what takes the time; the workers wait for each other before and after it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from . import ops as t
from .compiled import Compiled, compile_function
from .intrinsics import atomic_add, atomic_load, atomic_store, call_address, shift, words_at

__all__ = ["run", "lead", "serve", "dismiss", "prepare", "compiled", "MOST_WORKERS", "CONTROL_BYTES"]

_SPINS = 50         # then the core is given away: 2,000 cost 20% more where another process wants it
_LINE = t.LINE
_FEW_ROWS, _LARGE = 2, 65536        # up to so many rows a worker, from so many elements of the matrix on: by columns

# The control block, a line each: the barrier's counter, the number of workers that are done, the job, and a
# semaphore for each worker.
_BARRIER, _DONE, _JOB, _SEMAPHORES = 0, _LINE, 2 * _LINE, 3 * _LINE
_RUN, _WORKERS, _LAUNCHES, _COUNT, _OPS = range(5)  # words of the job; the first is the address of `run`
MOST_WORKERS = 8
CONTROL_BYTES = _SEMAPHORES + MOST_WORKERS * _LINE

_yield_core = types.ExternalFunction("sched_yield", types.int32())
_init = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))
_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))


@njit
def _await(address, value):
    """Wait until the word at an address has a value, or a larger one."""
    spins = 0
    while atomic_load(address) < value:
        spins += 1
        if spins > _SPINS:
            _yield_core()


@njit
def _split(worker, num_workers, count, unit):
    """A worker's share of 0:count, in multiples of a unit."""
    units = -(-count // unit)
    low = -(-units * worker // num_workers) * unit
    high = -(-units * (worker + 1) // num_workers) * unit
    return min(low, count), min(high, count)


@njit
def _step(op, worker, num_workers, first, last, low, high):
    """One op: the launch has the positions first:last, of which low:high are the worker's."""
    kind, routine = op[t.KIND], op[t.ROUTINE]
    a = op[t.A] - (first * op[t.A_STEP] if op[t.A_LOCAL] else 0)
    b = op[t.B] - (first * op[t.B_STEP] if op[t.B_LOCAL] else 0)
    if kind == t.KERNEL:
        if low < high:
            call_address(routine, (op[t.A], first, low, high))
        return
    if kind == t.PRODUCT:
        if low < high:
            c = op[t.C] + (low - (first if op[t.C_LOCAL] else 0)) * op[t.C_STEP]
            call_address(routine, (a + low * op[t.A_STEP], op[t.LDA], b, op[t.LDB], c, op[t.LDC],
                                   (high - low) * op[t.M], op[t.N], op[t.K], op[t.ACCUMULATE], op[t.GEMM],
                                   op[t.MOST_OWN]))
        return
    if kind == t.PACK:
        low, high = _split(worker, num_workers, -(-op[t.N] // op[t.UNIT]), 1)
        if low < high:
            call_address(routine, (op[t.A], op[t.LDA], op[t.C], op[t.N], op[t.K], low, high))
        return
    # What follows is shared by columns of the result: multiples of a cache line, so that no two workers write one.
    rows, item = (last - first) * op[t.M], op[t.ITEM]
    a, b = a + first * op[t.A_STEP], b + first * op[t.B_STEP]
    low, high = _split(worker, num_workers, op[t.N], _LINE // item)
    n = high - low
    if kind == t.SUM_PRODUCT:
        if op[t.N] >= op[t.K]:
            low, high = _split(worker, num_workers, op[t.N], 2)         # (rows of C)
            n = high - low
            if n > 0:
                call_address(routine, (a + low * item, op[t.LDA], b, op[t.LDB], op[t.C] + low * op[t.LDC] * item,
                                       op[t.LDC], rows, n, op[t.K], op[t.ACCUMULATE], op[t.GEMM], op[t.MOST_OWN]))
            return
        low, high = _split(worker, num_workers, op[t.K], _LINE // item)
        if low < high:
            call_address(routine, (a, op[t.LDA], b + low * item, op[t.LDB], op[t.C] + low * item, op[t.LDC], rows,
                                   op[t.N], high - low, op[t.ACCUMULATE], op[t.GEMM], op[t.MOST_OWN]))
    elif n <= 0:
        return
    elif kind == t.COLUMN_SUM:
        call_address(routine, (a + low * item, op[t.LDA], op[t.C] + low * item, rows, n, op[t.ACCUMULATE]))
    elif kind == t.SCATTER_ADD:
        call_address(routine, (a, op[t.LDA], b + low * item, op[t.LDB], op[t.C] + low * item, op[t.LDC], rows, n))
    else:
        call_address(routine, (op[t.C] + low * item, n))


@njit
def _is_wide(op, num_workers, rows):
    """Whether a product is shared by columns."""
    return op[t.KIND] == t.PRODUCT and num_workers > 1 and rows * op[t.M] <= _FEW_ROWS * num_workers \
        and op[t.N] * op[t.K] >= _LARGE


@njit
def _wide_product(op, worker, num_workers, first, rows):
    """A product for all positions of a launch, by columns."""
    low, high = _split(worker, num_workers, op[t.N], op[t.UNIT])
    if low < high:
        a = op[t.A] + (0 if op[t.A_LOCAL] else first * op[t.A_STEP])
        c = op[t.C] + (0 if op[t.C_LOCAL] else first * op[t.C_STEP])
        call_address(op[t.ROUTINE], (a, op[t.LDA], op[t.B] + low * op[t.B_COLUMN], op[t.LDB], c + low * op[t.ITEM],
                                     op[t.LDC], rows * op[t.M], high - low, op[t.K], op[t.ACCUMULATE], op[t.GEMM],
                                     op[t.MOST_OWN]))


@njit
def _meet(control, barriers, num_workers):
    """Wait for the other workers; how often they have met."""
    atomic_add(control + _BARRIER, 1)
    _await(control + _BARRIER, (barriers + 1) * num_workers)
    return barriers + 1


def run(worker, num_workers, launches, num_launches, ops, control):
    """A worker's part of a table of launches; all workers must run the same table at once."""
    barriers, together = 0, True        # whether no worker has done anything since they met
    for number in range(num_launches):
        launch = shift(words_at(launches), number * t.LAUNCH_WIDTH)
        start, stop = launch[t.START], launch[t.STOP]
        low, high = _split(worker, num_workers, stop - start, 2 if stop - start >= 8 * num_workers else 1)
        low, high = start + low, start + high
        edge_start, edge_stop, bounds = launch[t.EDGE_START], launch[t.EDGE_STOP], launch[t.BOUNDS]
        if bounds:
            edge_low, edge_high = words_at(bounds)[low], words_at(bounds)[high]
        else:
            edge_low, edge_high = _split(worker, num_workers, edge_stop - edge_start, 1)
            edge_low, edge_high = edge_start + edge_low, edge_start + edge_high
        for o in range(launch[t.OP_BEGIN], launch[t.OP_END]):
            op = shift(words_at(ops), o * t.OP_WIDTH)
            if op[t.DOMAIN] == t.ROWS:
                first, last, mine, end = start, stop, low, high
            elif op[t.DOMAIN] == t.EDGES:
                first, last, mine, end = edge_start, edge_stop, edge_low, edge_high
            else:
                first, last, mine, end = 0, 1, 0, 1 if worker == 0 else 0
            if op[t.DOMAIN] != t.ONCE and _is_wide(op, num_workers, last - first):
                if not together:
                    barriers = _meet(control, barriers, num_workers)
                _wide_product(op, worker, num_workers, first, last - first)
                barriers = _meet(control, barriers, num_workers)
                together = True
            else:
                _step(op, worker, num_workers, first, last, mine, end)
                together = False
        if num_workers > 1 and not together:
            barriers = _meet(control, barriers, num_workers)
            together = True


@njit
def _cost(launches, num_launches, ops):
    """About how many ns a table takes on one core."""
    total = 0
    for number in range(num_launches):
        launch = shift(words_at(launches), number * t.LAUNCH_WIDTH)
        rows, edges = launch[t.STOP] - launch[t.START], launch[t.EDGE_STOP] - launch[t.EDGE_START]
        for o in range(launch[t.OP_BEGIN], launch[t.OP_END]):
            op = shift(words_at(ops), o * t.OP_WIDTH)
            domain = op[t.DOMAIN]
            total += op[t.COST] * (rows if domain == t.ROWS else edges if domain == t.EDGES else 1)
    return total


def lead(run_address, num_workers, launches, num_launches, ops, control, worth, set_threads, threads):
    """Run a table on all workers, or alone if it takes less than `worth` ns. The caller is worker 0.

    BLAS, which has `threads`, has one meanwhile, unless there is no function at `set_threads`.
    """
    if set_threads:
        call_address(set_threads, (types.int32(1),))
    team = num_workers if _cost(launches, num_launches, ops) >= worth else 1
    atomic_store(control + _BARRIER, 0)
    atomic_store(control + _DONE, 0)
    job = words_at(control + _JOB)
    job[_RUN], job[_WORKERS], job[_LAUNCHES], job[_COUNT], job[_OPS] = run_address, team, launches, num_launches, ops
    for worker in range(1, team):
        _post(control + _SEMAPHORES + worker * _LINE)
    call_address(run_address, (0, team, launches, num_launches, ops, control))
    _await(control + _DONE, team - 1)
    if set_threads:
        call_address(set_threads, (types.int32(threads),))


def serve(worker, control):
    """A worker's life: asleep until there is a job, then its part of it."""
    job = words_at(control + _JOB)
    while True:
        while _wait(control + _SEMAPHORES + worker * _LINE) != 0:       # a signal may end the wait early
            pass
        if job[_WORKERS] == 0:
            return
        call_address(job[_RUN], (worker, job[_WORKERS], job[_LAUNCHES], job[_COUNT], job[_OPS], control))
        atomic_add(control + _DONE, 1)


def dismiss(control):
    """End the life of the workers that serve a control block."""
    words_at(control + _JOB)[_WORKERS] = 0
    for worker in range(1, MOST_WORKERS):
        _post(control + _SEMAPHORES + worker * _LINE)


def prepare(control):
    """Make the semaphores of a control block; not 0 if the system has none."""
    failed = 0
    for worker in range(MOST_WORKERS):
        failed |= _init(control + _SEMAPHORES + worker * _LINE, 0, 0)
    return failed


@cache
def compiled(function: Any) -> Compiled:
    """One of the functions above."""
    result = types.int64 if function is prepare else types.void
    return compile_function(function, result(*(types.int64,) * function.__code__.co_argcount))
