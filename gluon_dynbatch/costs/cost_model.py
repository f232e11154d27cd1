"""What launches cost: the constants of a device, and the milliseconds that they predict for the work of classes.

Pure: records in, numbers out. `calibrate.py` measures the constants of this machine. A launch of r rows takes

    starts * launch_us + ops * op_us + products + r * (elements, transcendentals and bytes of a row, each at its price)

and a product of (r, k) with a shared (k, n) as long as 2 n (r (k + depth_half) + rows_half k) floating point operations
of large products: reading the matrix takes as long as `rows_half` rows, and beginning and storing a sum as long as
`depth_half` steps of it. A flush adds flush_us, and for each of its classes class_us and what is done once.

All of it is linear in the rows. So a class has one cost of a launch and one of a row, and fewer launches of the same
rows are never predicted to be slower.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

from .work import Product, Work

__all__ = ["CostModel", "Device", "GPU", "gpu"]


# ---- devices -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Device:
    """The constants of a device, all of its cores together.

    Parameters
    ----------
    launch_us : of one launch in one direction, whatever it does; of each of its starts, if it has several
    op_us : of one operation of a launch
    gflops : floating point operations of large products, 1e9 a second
    rows_half : rows that take as long as reading the matrix; a product of so many reaches half of the rate
    depth_half : steps of a sum that take as long as beginning and storing it
    element_ns, transcendental_ns : of a number made by + or *, and of one made by exp, tanh, ..
    gather_ns_per_byte : of what is read through an index or copied
    flush_us, class_us : of a flush in one direction, and of each class in it
    analysis_us, analysis_us_per_call : of grouping the calls of a flush
    record_us_per_call : of recording a call; what the user's own code does comes on top
    compile_s_per_kernel : of generating and compiling a kernel that is not on disk
    fingerprint : of the machine that was measured
    """

    name: str
    launch_us: float
    op_us: float
    gflops: float
    rows_half: float
    depth_half: float
    element_ns: float
    transcendental_ns: float
    gather_ns_per_byte: float
    flush_us: float
    class_us: float
    analysis_us: float
    analysis_us_per_call: float
    record_us_per_call: float
    compile_s_per_kernel: float
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name in ("name", "fingerprint"):
                good, wanted = isinstance(value, str), "a text"
            else:
                good = type(value) in (int, float) and isfinite(value) and value >= 0
                good, wanted = good and (value > 0 or name != "gflops"), "a finite number that is not negative"
            if not good:
                raise ValueError(f"Device({name}={value!r}): expected {wanted}")

    def __hash__(self) -> int:          # (of some: plans are found by it in every flush)
        return hash((self.name, self.fingerprint))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        """The opposite of `to_dict`; ValueError if a constant is missing, unknown or no number."""
        known = {field.name for field in fields(cls)}
        wrong = known.symmetric_difference(values) if isinstance(values, Mapping) else known
        if wrong:
            raise ValueError(f"not the constants of a device: {', '.join(sorted(map(str, wrong)))} missing or unknown")
        return cls(**values)


def gpu(start_us: float = 7.5) -> Device:
    """A GPU as it is described, not measured: a mid-range card behind MXNet's operators.

    Starting a kernel takes 5 to 10 us, whatever it computes. A launch starts one for each operation and one more that
    gathers its operands. Grouping and recording run on the CPU, at about the speed of the machine this was written on.
    """
    return Device("described GPU", launch_us=start_us, op_us=start_us, gflops=8000.0, rows_half=64.0, depth_half=32.0,
                  element_ns=0.012, transcendental_ns=0.015, gather_ns_per_byte=0.003, flush_us=430.0, class_us=90.0,
                  analysis_us=200.0, analysis_us_per_call=0.1, record_us_per_call=0.6, compile_s_per_kernel=0.0)


GPU = gpu()


# ---- predictions -------------------------------------------------------------------------------------------------

_MOST = 16.0                # a prediction is corrected by no more than this factor
_RECENT, _REMEMBERED = 5, 100       # ratios whose median counts; errors that are kept


class CostModel:
    """Predictions for one device, corrected by what was measured.

    Examples
    --------
    >>> model = CostModel(GPU)
    >>> work = Work(ops=2, once_ops=0, products=((1, 100, 100),), once_products=(), elements=300, transcendental=100,
    ...             gathered=400)
    >>> launch_us, row_us = model.launch_cost(work, None)
    >>> model.predict_ms([(work, 64)]) < model.predict_ms([(work, 32), (work, 32)])
    True
    """

    def __init__(self, device: Device):
        self.device = device
        self._lock = threading.Lock()       # passes end in several threads
        self._ratios: dict[Hashable, deque[float]] = {}
        self._factors: dict[Hashable, float] = {}
        self._counts: Counter[Hashable] = Counter()
        self._errors: dict[Hashable, deque[float]] = {}

    def parts_us(self, work: Work) -> tuple[float, float, float]:
        """Microseconds of one direction of a class: of a launch, of a row, and of what is done once a flush."""
        return self._launch_us(work), self._row_us(work), self._once_us(work)

    def launch_cost(self, forward: Work, backward: Work | None) -> tuple[float, float]:
        """Microseconds of one more launch and of one more row, both directions together."""
        works = [forward] if backward is None else [forward, backward]
        return sum(map(self._launch_us, works)), sum(map(self._row_us, works))

    def predict_ms(self, launches: Sequence[tuple[Work, int]]) -> float:
        """Milliseconds of one direction of a flush.

        Parameters
        ----------
        launches : (work of its class, rows) of each launch; classes of equal work count as one
        """
        if not launches:
            return 0.0
        total = self.device.flush_us
        for work, launch_count in Counter(work for work, _ in launches).items():
            total += launch_count * self._launch_us(work) + self._once_us(work)
        total += sum(rows * self._row_us(work) for work, rows in launches)
        return total / 1e3

    def _launch_us(self, work: Work) -> float:
        return work.starts * self.device.launch_us + work.ops * self.device.op_us + self._matrices_us(work.products)

    def _once_us(self, work: Work) -> float:
        d = self.device
        return (d.class_us + work.once_starts * d.launch_us + work.once_ops * d.op_us
                + self._matrices_us(work.once_products) + work.once_bytes * d.gather_ns_per_byte / 1e3)

    def _matrices_us(self, products: Iterable[Product]) -> float:
        """What products cost whatever the rows."""
        return sum(2 * n * k for _, n, k in products) * self.device.rows_half / (self.device.gflops * 1e3)

    def _row_us(self, work: Work) -> float:
        d = self.device
        flops = sum(2 * m * n * (k + d.depth_half) for m, n, k in (*work.products, *work.once_products))
        plain = work.elements - work.transcendental
        return flops / (d.gflops * 1e3) + (plain * d.element_ns + work.transcendental * d.transcendental_ns
                                           + work.gathered * d.gather_ns_per_byte) / 1e3

    # ---- correction --------------------------------------------------------------------------

    def observe(self, key: Hashable, predicted_ms: float, measured_ms: float) -> None:
        """Learn from a measurement; `predicted_ms` is what `predict_ms` said.

        The factor of a key moves towards the median of its last ratios, so that a single slow step (page faults,
        another process) does not count; of two in the middle it is the lower: disturbances only make steps slower.
        """
        if not (isfinite(predicted_ms) and isfinite(measured_ms) and predicted_ms > 0 and measured_ms > 0):
            return
        ratio = min(max(measured_ms / predicted_ms, 1 / _MOST), _MOST)
        with self._lock:
            factor = self._factors.get(key, 1.0)
            error = abs(factor * predicted_ms - measured_ms) / measured_ms
            self._errors.setdefault(key, deque(maxlen=_REMEMBERED)).append(error)
            ratios = self._ratios.setdefault(key, deque(maxlen=_RECENT))
            ratios.append(ratio)
            self._counts[key] += 1
            weight = max(1 / (self._counts[key] + 1), 0.2)          # the model itself counts as one measurement
            median = sorted(ratios)[(len(ratios) - 1) // 2]
            self._factors[key] = factor ** (1 - weight) * median ** weight

    def corrected(self, key: Hashable, predicted_ms: float) -> float:
        """A prediction times what was learned for its key, such as "forward" or the title of a class."""
        return predicted_ms * self._factors.get(key, 1.0)

    @property
    def errors(self) -> dict[Hashable, float]:
        """For each key the median of |corrected - measured| / measured, each corrected by what was known before it."""
        with self._lock:
            return {key: statistics.median(errors) for key, errors in self._errors.items()}
