"""Any MXNet device, any dtype, any op of the table: regions run as one CachedOp, gathers as MXNet operators."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import byref, c_int64

import numpy as np

from ..array_memory import view_of_data
from ..mxnet_compat import mx
from ..ops import TABLE
from ..partition import Step
from ..program import Spec
from ..rows import lower

__all__ = ["MXNetBackend"]

nd, sym = mx.nd, mx.sym
NDArray, NDArrayHandle = nd.NDArray, mx.base.NDArrayHandle
_BYTES = (np.int8, np.uint8)
_LIB, check_call, mx_uint = mx.base._LIB, mx.base.check_call, mx.base.mx_uint


class MXNetBackend:
    """Runs steps on the device of the arrays it is given.

    A backend offers: arrays (`empty`, `zeros`, `rows`, `index`), gathers (`take`, `segment_sum`, `segment_max`,
    `repeat`, `add`), and `compile_region`, which turns a run of instructions into a function of arrays.
    """

    def __init__(self, ctx):
        self.ctx = ctx

    # ---- arrays ------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: str):
        return nd.empty(tuple(shape), ctx=self.ctx, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: str):
        return nd.zeros(tuple(shape), ctx=self.ctx, dtype=dtype)

    def index(self, rows: np.ndarray):
        """Row numbers as an array that `take` and the segment functions read."""
        if self.ctx.device_type != "cpu":
            return nd.array(rows.astype(np.int32), ctx=self.ctx, dtype=np.int32)
        made = nd.empty(rows.shape, ctx=self.ctx, dtype=np.int32)
        view_of_data(made)[...] = rows              # nobody else has it: no need to go through MXNet's queue
        return made

    # Views are made thousands of times a step. MXNet's own methods ask for the shape first, which takes longer.

    @staticmethod
    def rows(array, start: int, stop: int):
        """A view of rows start:stop."""
        handle = NDArrayHandle()
        check_call(_LIB.MXNDArraySlice(array.handle, mx_uint(start), mx_uint(stop), byref(handle)))
        return NDArray(handle)

    @staticmethod
    def reshape(array, shape: Sequence[int]):
        """A view with another shape."""
        handle = NDArrayHandle()
        check_call(_LIB.MXNDArrayReshape64(array.handle, len(shape), (c_int64 * len(shape))(*shape), False,
                                           byref(handle)))
        return NDArray(handle)

    @staticmethod
    def fill_rows(array, row: int, values) -> None:
        """Write rows from `row` on; None: one row of zeros."""
        if values is None:
            array._slice(row, row + 1)[:] = 0
        else:
            array._slice(row, row + values.shape[0])[:] = values

    # ---- gathers -----------------------------------------------------------------------------

    @staticmethod
    def take(array, index, out=None):
        return nd.take(array, index, mode="clip", out=out)

    @staticmethod
    def segment_sum(values, segment, num_segments: int, out=None):
        """Add up the values of each segment; `segment` holds the segment number of each value."""
        # The gradient of gather_nd adds where an index comes twice (scatter_nd overwrites). It forgets to clear an
        # `out` that is part of the array that it reads, so it gets none.
        dtype = values.dtype
        if dtype in _BYTES:             # which MXNet cannot add up
            return MXNetBackend._into(out, MXNetBackend.segment_sum(values.astype("int32"), segment, num_segments)
                                      .astype(dtype))
        made = nd._internal._backward_gather_nd(values, segment.reshape((1, -1)),
                                                shape=(num_segments, *values.shape[1:]))
        return MXNetBackend._into(out, made)

    @staticmethod
    def _into(out, made):
        if out is None:
            return made
        out[:] = made
        return out

    def segment_max(self, values, indptr: np.ndarray, out=None):
        """The maximum of each segment, none of them empty, as a tournament: log2(longest segment) rounds."""
        counts = np.diff(indptr)
        while len(values) > len(counts):
            starts = np.concatenate([[0], np.cumsum(counts)])
            halves = (counts + 1) // 2
            rank = np.arange(halves.sum()) - np.repeat(np.cumsum(halves) - halves, halves)
            left = np.repeat(starts[:-1], halves) + 2 * rank
            right = np.minimum(left + 1, np.repeat(starts[1:], halves) - 1)
            values = nd.maximum(self.take(values, self.index(left)), self.take(values, self.index(right)))
            counts = halves
        if out is None:
            return values
        out[:] = values
        return out

    @staticmethod
    def repeat(value, num_rows: int, out=None):
        """A shared value as `num_rows` rows."""
        return nd.broadcast_to(value.reshape((1, *value.shape)), shape=(num_rows, *value.shape), out=out)

    @staticmethod
    def add(x, y):
        return x + y

    # ---- regions -----------------------------------------------------------------------------

    @staticmethod
    def compile_region(step: Step, specs: Sequence[Spec]):
        """A function (inputs, outs) -> outputs; `outs` are the arrays to write, or None for new ones."""
        low = lower(step.instrs, specs, step.inputs, step.outputs)
        symbols: list = [None] * low.num_arrays
        names = {a: f"x{a}" for a in low.inputs}
        for a, name in names.items():
            symbols[a] = sym.var(name)
        for instr in low.instrs:
            made = TABLE[instr.op].mxnet(sym, instr.attrs, *[symbols[a] for a in instr.inputs])
            for k, a in enumerate(instr.outputs):
                symbols[a] = made[k]
        # Blocked outputs: CachedOp makes a gradient graph too, and all its gradients are zeros then. (MXNet loses sight
        # of the zeros behind some operators, so the body of an op without a gradient in MXNet blocks its own result.)
        graph = sym.Group([sym.BlockGrad(symbols[a]) for a in low.outputs])
        cached = nd.CachedOp(graph)
        arrays = {name: k for k, name in enumerate(names.values())}
        arguments = [arrays[name] for name in graph.list_inputs()]

        one_at_a_time = threading.Lock()        # two callers inside one CachedOp (callbacks of two nodes) crash MXNet

        def run(inputs, outs):
            with one_at_a_time:
                made = cached(*[inputs[k] for k in arguments], out=outs)
            return made if isinstance(made, list) else [made]

        return run
