"""The reference: the op table's numpy bodies, step by step. For tests, and to read what a region means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ops import TABLE
from ..partition import Step
from ..program import Spec
from ..rows import lower

__all__ = ["NumpyBackend"]


def _into(out, values):
    if out is None:
        return values
    out[...] = values
    return out


class NumpyBackend:
    """The same offers as `MXNetBackend`, on numpy arrays."""

    @staticmethod
    def empty(shape: Sequence[int], dtype: str):
        return np.empty(tuple(shape), dtype)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: str):
        return np.zeros(tuple(shape), dtype)

    @staticmethod
    def index(rows: np.ndarray):
        return rows

    @staticmethod
    def rows(array, start: int, stop: int):
        return array[start:stop]

    @staticmethod
    def reshape(array, shape: Sequence[int]):
        return array.reshape(tuple(shape))

    @staticmethod
    def fill_rows(array, row: int, values) -> None:
        array[row:row + (1 if values is None else len(values))] = 0 if values is None else values

    @staticmethod
    def take(array, index, out=None):
        return _into(out, array[index])

    @staticmethod
    def segment_sum(values, segment, num_segments: int, out=None):
        total = np.zeros((num_segments, *values.shape[1:]), values.dtype)
        np.add.at(total, segment, values)
        return _into(out, total)

    @staticmethod
    def segment_max(values, indptr: np.ndarray, out=None):
        return _into(out, np.maximum.reduceat(values, indptr[:-1], axis=0))

    @staticmethod
    def repeat(value, num_rows: int, out=None):
        return _into(out, np.broadcast_to(value, (num_rows, *value.shape)))

    @staticmethod
    def add(x, y):
        return x + y

    @staticmethod
    def compile_region(step: Step, specs: Sequence[Spec]):
        low = lower(step.instrs, specs, step.inputs, step.outputs)

        def run(inputs, outs):
            arrays: list = [None] * low.num_arrays
            for a, x in zip(low.inputs, inputs):
                arrays[a] = x
            for instr in low.instrs:
                made = TABLE[instr.op].numpy(instr.attrs, *[arrays[a] for a in instr.inputs])
                made = made if isinstance(made, (list, tuple)) else [made]
                for a, x in zip(instr.outputs, made):
                    arrays[a] = x
            return [_into(out, arrays[a]) for a, out in zip(low.outputs, outs or [None] * len(low.outputs))]

        return run
