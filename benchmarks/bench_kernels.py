"""Speed of generated kernels, in nanoseconds an element, beside a copy in the same run.

    python benchmarks/bench_kernels.py [--json FILE] [--rows N] [--only TEXT] [--show]

An element is one transcendental function where a kernel has any, else one number written. Minima over repeats, on one
thread; the copy tells a slow machine from slow code. `--show` prints the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cavs_core.autodiff import differentiate
from cavs_core.backends.native_cpu import codegen, kernel_cache
from cavs_core.backends.native_cpu.ir import ONE, ROW_AT, SUM, TAKE, Access, Kernel
from cavs_core.ops import Builder
from cavs_core.program import ROW, SHARED, Leaf, OutputGrad, Program, Spec

SECONDS_A_CASE = 0.6
HIDDEN = 150


class Bench:
    """A kernel with operands: `ways` says how values are read, if not row by row."""

    def __init__(self, program: Program, inputs: Sequence[int], outputs: Sequence[int], ways: dict[int, str],
                 elements: int, labels: Sequence[int] = ()):
        self.program, self.inputs, self.outputs, self.ways = program, list(inputs), list(outputs), ways
        self.elements, self.labels = elements, labels
        accesses = [(v, self._access(v, ways.get(v, ROW_AT))) for v in self.inputs]
        self.kernel = Kernel(tuple(program.instrs), tuple(enumerate(program.specs)), tuple(accesses),
                             tuple((v, self._access(v, ROW_AT)) for v in self.outputs))
        self.source = codegen.source_of(self.kernel)

    def _access(self, value: int, how: str) -> Access:
        spec = self.program.specs[value]
        return Access(ONE if spec.kind == SHARED else how, spec.dtype, spec.shape, int(np.prod(spec.shape)))

    def time_ns(self, address: int, rows: int) -> float:
        rng = np.random.RandomState(0)
        kept, words = [], []
        for value in self.inputs:
            spec, how = self.program.specs[value], self.ways.get(value)
            count = 1 if spec.kind == SHARED else 2 * rows
            array = rng.uniform(-2, 2, (count, *spec.shape)).astype(spec.dtype)
            if value in self.labels:
                array = rng.randint(0, 2, (count, *spec.shape)).astype(spec.dtype)
            index = rng.randint(0, count, 2 * rows)
            bounds = np.concatenate([[0], np.cumsum(rng.randint(0, 3, rows))])
            kept += [array, index, bounds]
            words += [array.ctypes.data, index.ctypes.data if how in (TAKE, SUM) else 0,
                      bounds.ctypes.data if how == SUM else 0]
        for value in self.outputs:
            kept.append(np.zeros((rows, *self.program.specs[value].shape), self.program.specs[value].dtype))
            words += [kept[-1].ctypes.data, 0, 0]
        table = np.array(words, np.int64)
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)

        def shortest(count: int, seconds: float) -> float:
            best, until, at = float("inf"), time.perf_counter() + seconds, table.ctypes.data
            while time.perf_counter() < until:
                start = time.perf_counter()
                call(at, 0, 0, count)
                best = min(best, time.perf_counter() - start)
            return best

        spent = shortest(rows, SECONDS_A_CASE) - shortest(0, SECONDS_A_CASE / 10)       # without the call itself
        return spent / (rows * self.elements) * 1e9


# ---- cases -----------------------------------------------------------------------------------------------------------

def tree_lstm(dtype: str, hidden: int) -> tuple[Program, dict[str, int]]:
    """The pointwise part of a binary Tree-LSTM node."""
    b = Builder()
    gates = b.input(Spec((1, 5 * hidden), dtype), Leaf(0))
    bias = b.input(Spec((1, 5 * hidden), dtype, SHARED), Leaf(1))
    left, right = (b.input(Spec((1, hidden), dtype), Leaf(k)) for k in (2, 3))
    parts = b.call("SliceChannel", [b.add(gates, bias)], {"num_outputs": 5, "axis": 1})
    i, f, g, o = (b.emit("sigmoid", part) for part in parts[:4])
    u = b.emit("tanh", parts[4])
    c = b.add(b.add(b.mul(i, u), b.mul(f, left)), b.mul(g, right))
    h = b.mul(o, b.emit("tanh", c))
    b.program.outputs = [h, c]
    return b.program, {"gates": gates, "left": left, "right": right}


def tree_lstm_forward(dtype: str = "float32") -> Bench:
    program, names = tree_lstm(dtype, HIDDEN)
    back = differentiate(program, list(names.values()), [OutputGrad(0), OutputGrad(1)])
    saved = [v for v in back.saved if v not in program.inputs]
    ways = {names["left"]: TAKE, names["right"]: TAKE}
    return Bench(program, list(program.inputs), [*program.outputs, *saved], ways, 6 * HIDDEN)


def tree_lstm_backward(dtype: str = "float32") -> Bench:
    program, names = tree_lstm(dtype, HIDDEN)
    back = differentiate(program, list(names.values()), [OutputGrad(0), OutputGrad(1)])
    ways = {names["left"]: TAKE, names["right"]: TAKE, **dict.fromkeys(back.program.inputs, SUM)}
    return Bench(back.program, [*back.saved, *back.program.inputs], list(back.grads.values()), ways, 7 * HIDDEN)


def pointwise(op: str, dtype: str = "float32", size: int = 300) -> Bench:
    b = Builder()
    x = b.input(Spec((size,), dtype), Leaf(0))
    y = b.emit(op, x)
    return Bench(b.program, [x], [y], {}, size)


def moving(how: str, size: int = HIDDEN) -> Bench:
    b = Builder()
    x = b.input(Spec((size,), "float32"), Leaf(0))
    return Bench(b.program, [x], [x], {x: how}, size)


def loss(classes: int, backward: bool) -> Bench:
    """log_softmax and pick of one label."""
    b = Builder()
    x, label = b.input(Spec((1, classes), "float32"), Leaf(0)), b.input(Spec((1,), "float32"), Leaf(1))
    y = b.emit("log_softmax", x)
    b.program.outputs = [b.emit("negative", b.emit("pick", y, label))]
    back = differentiate(b.program, [x], [OutputGrad(0)])
    if backward:
        inputs = [*back.saved, *back.program.inputs]
        return Bench(back.program, inputs, list(back.grads.values()), {}, classes, [label])
    saved = [v for v in back.saved if v not in b.program.inputs]
    return Bench(b.program, [x, label], [*b.program.outputs, *saved], {}, classes, [label])


def layer_norm(size: int = 300) -> Bench:
    b = Builder()
    x = b.input(Spec((1, size), "float32"), Leaf(0))
    gamma, beta = (b.input(Spec((size,), "float32", SHARED), Leaf(k)) for k in (1, 2))
    return Bench(b.program, [x, gamma, beta], [b.emit("LayerNorm", x, gamma, beta)], {}, size)


def attention(words: int = 20, size: int = 64) -> Bench:
    """Scores of one query, their softmax, and the mean that they weigh."""
    b = Builder()
    keys, query = b.input(Spec((words, size), "float32", ROW), Leaf(0)), b.input(Spec((1, size), "float32"), Leaf(1))
    weights = b.emit("softmax", b.emit("dot", query, keys, transpose_b=True))
    return Bench(b.program, [keys, query], [b.emit("dot", weights, keys)], {}, words * size)


CASES: dict[str, Callable[[], Bench]] = {
    "copy 150": lambda: moving(ROW_AT),
    "gather 150": lambda: moving(TAKE),
    "segment sum 150": lambda: moving(SUM),
    "Tree-LSTM forward, 150": tree_lstm_forward,
    "Tree-LSTM backward, 150": tree_lstm_backward,
    "Tree-LSTM forward, 150, float64": lambda: tree_lstm_forward("float64"),
    **{f"{op} 300": (lambda op=op: pointwise(op)) for op in ("tanh", "sigmoid", "exp", "log", "softrelu", "erf")},
    "sigmoid 300, float64": lambda: pointwise("sigmoid", "float64"),
    "sigmoid 1": lambda: pointwise("sigmoid", size=1),
    "sigmoid 8": lambda: pointwise("sigmoid", size=8),
    **{f"loss {n} {'backward' if k else 'forward'}": (lambda n=n, k=k: loss(n, k))
       for n in (2, 5, 20, 300, 3000) for k in (False, True)},
    "layer norm 300": layer_norm,
    "attention 20 x 64": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the kernels")
    args = parser.parse_args()
    benches = {name: make() for name, make in CASES.items() if args.only in name}
    addresses = kernel_cache.compile_kernels([bench.source for bench in benches.values()])
    results = {}
    for (name, bench), address in zip(benches.items(), addresses):
        if args.show:
            print(bench.source)
        results[name] = bench.time_ns(address, args.rows)
        print(f"{name:34} {results[name]:8.2f} ns an element", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
