"""Products: ours, with W as it stands and packed, against BLAS with one thread, and numpy with all it takes.

    python benchmarks/bench_products.py [--dtype float64] [--rows 1,4,64] [--shapes 300x750,64x64]

Each cell is GFLOP/s, ours / packed / BLAS / numpy, from the fastest of many interleaved calls; a call from Python,
about 1 us, is part of it, packing is not. Shapes are k x n: C[rows, n] = A[rows, k] W, with W as (n, k) ("transposed",
how Gluon keeps it: forward) and as (k, n) (backward). The rows at which ours stops being faster than BLAS are what
`products.own_rows` says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cavs_core.backends.native_cpu import blas, panels, products
from cavs_core.backends.native_cpu.memory import address_of

SHAPES = "300x750,150x750,750x300,750x150,100x250,512x2560,64x64,50x250"
ROWS = "1,2,3,4,6,8,12,16,24,32,48,64,96,128,192,256"
FLOP = 2e9          # of the calls that one cell is measured by


def fastest(calls: list[Callable[[], None]], repeats: int) -> list[float]:
    """Seconds of each call, which take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure(rows: int, k: int, n: int, transposed: bool, dtype: str) -> str:
    a, w, c = (np.random.standard_normal(s).astype(dtype)
               for s in ((rows, k), (n, k) if transposed else (k, n), (rows, n)))
    run = products.routine(products.product_nt if transposed else products.product_nn, dtype).call
    args = (address_of(a), k, address_of(w), w.shape[1], address_of(c), n, rows, n, k, 0, blas.gemm_address(dtype))
    packed_w = np.zeros(panels.packed_elements(n, k, dtype), dtype)
    pack = products.routine(panels.pack_nt if transposed else panels.pack_nn, dtype).call
    pack(address_of(w), w.shape[1], address_of(packed_w), n, k, 0, -(-n // panels.panel_columns(dtype)))
    packed = products.routine(panels.product_packed, dtype).call
    flop = 2 * rows * n * k
    repeats = int(min(max(FLOP / flop, 8), 400))
    with blas.one_thread():
        times = fastest([lambda: run(*args, rows), lambda: packed(*args[:2], address_of(packed_w), *args[3:], 0),
                         lambda: run(*args, 0)], repeats)
    # Not between the others: numpy's second thread stays awake for a while.
    times += fastest([lambda: np.dot(a, w.T if transposed else w, out=c)], repeats)
    return "/".join(f"{flop / seconds / 1e9:.0f}" for seconds in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--shapes", default=SHAPES)
    options = parser.parse_args()
    rows = [int(x) for x in options.rows.split(",")]
    shapes = [tuple(map(int, x.split("x"))) for x in options.shapes.split(",")]
    print(f"GFLOP/s, own / packed / BLAS 1 thread / numpy {blas.num_threads()} threads, {options.dtype}")
    for transposed in (True, False):
        print(f"\n{'transposed' if transposed else 'plain':10}", "".join(f"{m:>17}" for m in rows), "   own up to")
        for k, n in shapes:
            print(f"{k:>4}x{n:<5}", end=" ")
            for m in rows:
                print(f"{measure(m, k, n, transposed, options.dtype):>17}", end="", flush=True)
            print(f"{products.own_rows(n, k, transposed):>13}")


if __name__ == "__main__":
    main()
