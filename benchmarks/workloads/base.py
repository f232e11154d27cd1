"""What all workloads share: the record that describes one, random parameters, and where real data is found."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Product", "Workload", "chosen", "data_folder", "lookup_table", "lstm_shapes", "random_parameters",
           "read_text"]

DATA_VARIABLE = "DYNBATCH_BENCH_DATA"
Product = tuple[int, int, int]              # rows, inputs, outputs of a product (rows, inputs) x (inputs, outputs)


@dataclass
class Workload:
    """A model to train: its samples, its first parameters, and the matrix products of a step.

    The loss of a mini-batch is the sum of the samples' losses divided by their number; the update is plain SGD.
    """

    samples: list[Any]
    params: dict[str, np.ndarray]
    products: Callable[[list[Any]], list[Product]]
    real: bool
    learning_rate: float = 0.05
    name: str = ""
    options: dict[str, int] = field(default_factory=dict)

    @property
    def num_batches(self) -> int:
        return len(self.samples) // self.options["batch"]

    def batch(self, k: int) -> list[Any]:
        """Mini-batch number k; after the last one the first comes again."""
        size = self.options["batch"]
        first = k % self.num_batches * size
        return self.samples[first:first + size]


def data_folder(given: str | None = None) -> Path | None:
    """The folder of the real data: the one given, that of DYNBATCH_BENCH_DATA, or shared/data beside the clone.

    None if no such folder was named and the last does not exist: then data is generated.
    """
    named = given or os.environ.get(DATA_VARIABLE)
    if named is not None:
        if not Path(named).is_dir():
            raise ValueError(f"there is no data folder {named}; without it data is generated")
        return Path(named)
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return beside if beside.is_dir() else None


def read_text(path: Path) -> str:
    """The text of a file, or of the file with .gz behind its name."""
    if path.exists():
        return path.read_text(encoding="utf-8")
    with gzip.open(f"{path}.gz", "rt", encoding="utf-8") as file:
        return file.read()


def chosen(items: Sequence[Any], count: int) -> list[Any]:
    """`count` items in a random order that is always the same; all come before one comes again."""
    order = np.random.RandomState(0).permutation(len(items))
    return [items[order[k % len(order)]] for k in range(count)]


def random_parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """float32 parameters, always the same: vectors (biases) are small, matrices have variance 1 / inputs."""
    rng = np.random.RandomState(1)
    scales = {name: 0.1 if len(shape) == 1 else (3 / shape[-1]) ** 0.5 for name, shape in shapes.items()}
    return {name: rng.uniform(-scales[name], scales[name], shape).astype(np.float32)
            for name, shape in shapes.items()}


def lookup_table(words: Sequence[str]) -> dict[str, int]:
    """A number for every different word, in the order of appearance."""
    return {word: k for k, word in enumerate(dict.fromkeys(words))}


def lstm_shapes(name: str, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of an LSTM's parameters; gates are in the order i, f, g, o."""
    return {f"{name}_i2h_weight": (4 * hidden, inputs), f"{name}_h2h_weight": (4 * hidden, hidden),
            f"{name}_i2h_bias": (4 * hidden,), f"{name}_h2h_bias": (4 * hidden,)}
