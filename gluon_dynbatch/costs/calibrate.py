"""Measures the constants of this machine for `cost_model.py`, and keeps them beside the compiled kernels.

Small classes run as launch tables of the native backend, or by MXNet's operators, and small models through `batching`.
The constants are those with which the cost model explains all of these times best.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from cavs_core import (
    SHARED,
    Builder,
    ClassLayout,
    Gather,
    Layout,
    Param,
    Place,
    Program,
    Read,
    RowIndex,
    Spec,
    VertexProgram,
    frames_of,
    make_run,
    own_outputs,
    plan_class,
)
from cavs_core.mxnet_compat import autograd, gluon, mx

from ..scope import batching
from ..vertex import vertex
from .cost_model import Device
from .devices import MXNET, NATIVE, built_in, device_path, fingerprint, load, place_of, store
from .work import started_work_of, work_of

__all__ = ["calibrate", "load_or_calibrate", "run_calibrate"]

_ROUNDS = 16            # every case is timed in each of them
_QUIET = 0.25           # this quantile of its times counts: a machine is disturbed now and then, and always upwards

#: What times are made of. Each part has a price; that of a pass on its own, or of a head, is no constant of a device.
_PARTS = ("pass", "forward", "backward", "head", "class", "launch", "op", "flop", "matrix", "sum", "element",
          "transcendental", "byte")


def calibrate(place: str = NATIVE, progress: bool = True) -> Device:
    """Measure this machine: a few seconds, and some more for compiling kernels the first time.

    Parameters
    ----------
    place : the native backend, or MXNet on a kind of device, see `place_of`
    progress : show a line on stderr; compiling shows its own
    """
    # In a thread of its own: scopes and autograd belong to threads, and the caller may be inside of one.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_calibrate if place == NATIVE else _calibrate_mxnet, place, progress).result()


def _calibrate(place: str, progress: bool) -> Device:
    seconds = min(_seconds_to_compile() for _ in range(2))      # the first starts the compiler
    tables = _tables()
    _compile(tables)
    flushes = [_Flush(1, 2, 2), _Flush(1, 2, 128), _Flush(1, 1024, 2), _Flush(12, 2, 2)]
    times = _measure([*tables, *flushes], place, progress)
    by_flush = np.array(times[len(tables):])                # (flushes, 4): forward, backward, analysis, recording
    price = _prices_of_parts([*(table.counts for table in tables), *(c for flush in flushes for c in flush.counts)],
                             np.concatenate([times[:len(tables)], by_flush[:, :2].ravel()]))
    calls = np.array([[1, flush.calls] for flush in flushes if len(flush.cells) == 1])
    analysis, recording = (_prices(calls, by_flush[:len(calls), k]) for k in (2, 3))
    return Device(
        "this machine", launch_us=price["launch"], op_us=price["op"], gflops=1e-3 / price["flop"],
        rows_half=price["matrix"] / price["flop"], depth_half=price["sum"] / price["flop"],
        element_ns=1e3 * price["element"], transcendental_ns=1e3 * price["transcendental"],
        gather_ns_per_byte=1e3 * price["byte"], flush_us=(price["forward"] + price["backward"]) / 2,
        class_us=price["class"], analysis_us=analysis[0], analysis_us_per_call=analysis[1],
        record_us_per_call=recording[1], compile_s_per_kernel=seconds, fingerprint=fingerprint())


def _calibrate_mxnet(place: str, progress: bool) -> Device:
    ctx = mx.cpu() if place == place_of("mxnet", mx.cpu()) else mx.gpu()
    tables = _started_tables(ctx)
    price = _prices_of_parts([table.counts for table in tables], np.array(_measure(tables, place, progress)))
    return replace(MXNET, name=f"{place}, started by this machine", launch_us=price["launch"], op_us=price["op"],
                   flush_us=price["pass"], fingerprint=fingerprint())


def _measure(cases: Sequence[Any], place: str, progress: bool) -> list[Any]:
    """What each case takes in a quiet moment, in microseconds."""
    for case in cases:
        case.measure()
    times: list[list[Any]] = [[] for _ in cases]
    with tqdm(total=_ROUNDS * len(cases), desc=f"measuring this machine ({place})", file=sys.stderr,
              disable=not progress) as bar:
        for _ in range(_ROUNDS):            # round after round, so that a disturbance spoils one time of each case
            for case, found in zip(cases, times):
                found.append(case.measure())
                bar.update()
    return [np.quantile(np.array(found), _QUIET, axis=0) for found in times]


def _prices_of_parts(counts: Sequence[dict[str, float]], times: Any) -> dict[str, float]:
    """Of those parts that are there, in microseconds."""
    parts = [part for part in _PARTS if any(c.get(part) for c in counts)]
    return dict(zip(parts, _prices(np.array([[c.get(part, 0) for part in parts] for c in counts]), times)))


def _prices(counts: Any, times: Any) -> list[float]:
    """The prices above 0 with which counts @ prices is nearest to the times, by their ratio.

    Parameters
    ----------
    counts : array, shape (cases, parts)
    times : array, shape (cases,)
    """
    shares = counts / times[:, None]
    scale = shares.max(axis=0)
    shares = shares / scale
    squares, wanted, price = shares.T @ shares, shares.sum(axis=0), np.full(len(scale), 1e-6)
    for _ in range(2000):               # one price after the other: so few need no better method
        for j in range(len(price)):
            price[j] = max(1e-6, price[j] + (wanted[j] - squares[j] @ price) / squares[j, j])
    return [float(p) for p in price / scale]


# ---- launch tables -----------------------------------------------------------------------------------------------

class _Table:
    """A class that reads rows of (1, width) through an index, `rows` of them in each of its launches.

    Parameters
    ----------
    build : (builder, value of shape (1, width), function that makes an (n, k) matrix) -> result
    ctx : None for the native backend; else MXNet runs it there
    """

    def __init__(self, build: Callable[[Any, int, Any], int], width: int, rows: int, launches: int, ctx: Any = None):
        self.native, self.ctx = ctx is None, ctx or mx.cpu()
        b = Builder(Program(name="calibration"))
        self.arrays: dict[Any, Any] = {}

        def matrix(n: int, k: int) -> int:
            param = Param(None, f"w{len(self.arrays)}")
            self.arrays[param] = mx.nd.random.uniform(-1 / k, 1 / k, (n, k), ctx=self.ctx)
            return b.input(Spec((n, k), "float32", SHARED), param)

        out = build(b, b.input(Spec((1, width), "float32"), Gather(0, 0)), matrix)
        b.program.outputs = own_outputs(b, [out])
        self.plan = plan_class(VertexProgram(b.program, 1), (), recording=False, in_one_launch=False)
        every, draw = rows * launches, np.random.default_rng(0)
        index = np.tile(draw.permutation(rows), launches)
        self.part = ClassLayout(frames_of(np.arange(0, every + 1, rows)), {Gather(0, 0): Read(0, RowIndex(index))},
                                [Place(1, 0)], {}, RowIndex(index[:0]))
        self.layout = Layout([self.part], np.array([(0, k) for k in range(launches)]), [rows, every], [],
                             [Spec((width,), "float32"), Spec(b.specs[out].shape[1:], "float32")])
        start = draw.random((rows, width), np.float32)
        self.fills = [(0, 0, start if self.native else mx.nd.array(start, ctx=self.ctx))]
        work, _ = work_of(self.plan) if self.native else started_work_of(self.plan)
        self.counts = {
            "pass": 1, "launch": launches * work.starts + work.once_starts, "op": launches * work.ops + work.once_ops,
            "flop": every * sum(2 * m * n * k for m, n, k in work.products),
            "matrix": launches * sum(2 * n * k for _, n, k in work.products),
            "sum": every * sum(2 * m * n for m, n, _ in work.products),
            "element": every * (work.elements - work.transcendental), "transcendental": every * work.transcendental,
            "byte": every * work.gathered}

    def measure(self) -> float:
        """Microseconds of a forward pass; until all is started, where MXNet runs it."""
        mx.nd.waitall()
        run = make_run(self.native, self.layout, [self.plan], self.ctx, self.arrays, self.fills)
        start = time.perf_counter()
        run.forward()
        return (time.perf_counter() - start) * 1e6


def _copy(b: Any, x: int, matrix: Any) -> int:
    return b.emit("_copy", x)


def _small_ops(count: int) -> Callable[[Any, int, Any], int]:
    def build(b: Any, x: int, matrix: Any) -> int:
        for _ in range(count):
            x = b.emit("tanh", b.emit("matmul", x, matrix(16, 16), transpose_b=True))
        return x

    return build


def _started_tables(ctx: Any) -> list[_Table]:
    """Cases that differ in how much they start."""
    return [_Table(build, 16, 8, launches, ctx) for build in (_copy, _small_ops(1), _small_ops(8))
            for launches in (1, 16, 64)]


def _tables() -> list[_Table]:
    """Cases that differ in what most of their time goes into."""
    def plain(b: Any, x: int, matrix: Any) -> int:
        p, q, r, s = b.call("SliceChannel", [x], {"num_outputs": 4, "axis": 1})
        first, second = b.add(b.mul(p, q), b.mul(r, s)), b.add(b.mul(p, r), b.mul(q, s))
        return b.add(b.mul(first, second), b.mul(b.emit("_rminus_scalar", first, scalar=1.0), p))

    def gates(b: Any, x: int, matrix: Any) -> int:
        p, q, r, s = b.call("SliceChannel", [x], {"num_outputs": 4, "axis": 1})
        inner = b.add(b.mul(b.emit("sigmoid", p), b.emit("tanh", q)), b.emit("sigmoid", r))
        return b.mul(b.emit("sigmoid", s), b.emit("tanh", inner))

    def product(n: int, k: int, transposed: bool) -> Any:
        return lambda b, x, matrix: b.emit("matmul", x, matrix(n, k) if transposed else matrix(k, n),
                                           transpose_b=transposed)

    found = [_Table(_copy, 64, 1, 1), _Table(_copy, 64, 2, 1000), _Table(_small_ops(3), 16, 1, 1000)]
    for rows, launches in ((16, 128), (256, 8)):
        found += [_Table(build, 600, rows, launches) for build in (_copy, plain, gates)]
    for rows, launches in ((2, 64), (8, 32), (32, 16), (256, 4)):
        found += [_Table(product(n, k, transposed), k, rows, launches) for n, k, transposed in (
            (768, 256, True), (256, 768, False), (128, 48, True), (48, 128, False))]
    return found


def _compile(tables: list[_Table]) -> None:
    """Compile all that is missing at once; nothing runs."""
    layout = Layout([t.part for t in tables], np.zeros((0, 2), np.int64), [], [])
    make_run(True, layout, [t.plan for t in tables], mx.cpu(), {}, [])


def _seconds_to_compile() -> float:
    """Of a kernel that no process has seen, because it has a number of its own. It is kept nowhere."""
    number = random.SystemRandom().random()
    table = _Table(lambda b, x, matrix: b.scale(b.emit("sigmoid", b.shift(x, number)), number), 32, 1, 1)
    before = os.environ.get("DYNBATCH_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYNBATCH_CACHE"] = folder
        try:
            start = time.perf_counter()
            _compile([table])
            return time.perf_counter() - start
        finally:
            del os.environ["DYNBATCH_CACHE"]
            if before is not None:
                os.environ["DYNBATCH_CACHE"] = before


# ---- flushes -----------------------------------------------------------------------------------------------------

class _Flush:
    """LSTMs side by side, so many chains for each cell. Every cell is a class; all have the same kernels."""

    def __init__(self, cells: int, chains: int, length: int):
        self.cells = [vertex(gluon.rnn.LSTMCell(16, input_size=16)) for _ in range(cells)]
        for cell in self.cells:
            cell.initialize(ctx=mx.cpu())
        self.chains, self.length, self.calls = chains, length, cells * chains * length
        self.start = mx.nd.ones((1, 16), ctx=mx.cpu())
        self.counts: list[dict[str, int]] = []      # of the forward and of the backward pass, once it ran

    def measure(self) -> list[float]:
        """Microseconds: forward pass, backward pass, analysis, recording."""
        with autograd.record(), batching(policy="depth", backend="native") as scope:
            ends = []
            for cell in self.cells:
                for _ in range(self.chains):
                    h, states = self.start, [self.start, self.start]
                    for _ in range(self.length):
                        h, states = cell(h, states)
                    ends.append(h)
        autograd.backward(ends)
        mx.nd.waitall()
        s = scope.stats
        both = {"class": len(self.cells), "launch": s.launches}
        self.counts = [{**both, "forward": 1, "op": s.ops},
                       {**both, "backward": 1, "op": s.backward_ops, "head": len(ends)}]
        return [1e3 * ms for ms in (s.execute_ms, s.backward_ms, s.analyze_ms, s.record_ms)]


# ---- use ---------------------------------------------------------------------------------------------------------

def load_or_calibrate(place: str = NATIVE) -> Device:
    """The constants of a place, from disk; measured and put there if there are none yet."""
    device = load(place)
    if device is None:
        device = calibrate(place)
        store(device, place)
    return device


def run_calibrate(options: Any) -> int:
    """`dynbatch calibrate`: measure this machine, keep the constants and print them; with --show print what is kept."""
    contexts = [mx.cpu()] + ([mx.gpu()] if mx.context.num_gpus() else [])
    for place in (NATIVE, *(place_of("mxnet", ctx) for ctx in contexts)):
        device = load(place) if options.show else calibrate(place)
        if device is None:
            device = built_in(place)
            print(f"{place}: this machine was not measured yet (`dynbatch calibrate` does it); built in are:")
        elif options.show:
            print(f"{place}: kept in {device_path(place)}:")
        else:
            store(device, place)
            print(f"{place}: measured, and kept in {device_path(place)}:")
        for name, value in device.to_dict().items():
            if value:
                print(f"  {name:<22}{value if isinstance(value, str) else format(value, '.4g')}")
    return 0
