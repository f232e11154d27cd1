"""policy="auto": which method a model is run with. Pure: it is told what steps took, and says what to try next.

A model starts with depth. Once a few of its steps are known, other methods take turns with it, but for those that
cannot pay: the cost model predicts their plan to be slower, or planning takes more than the budget allows. Steps of
different size are compared by what they take a call. The best method stays; it is measured on, and when its steps
have become slower or faster for long enough, all methods are tried anew.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from .methods import Method

__all__ = ["Auto", "Sample"]

KNOWN = 3               # steps with depth before others are tried
TRIALS = 4              # steps that a method is tried for, the first of which does not count: it may have compiled
MOST = 3                # methods that are tried besides depth
GAIN = 0.02             # what a method must be better by to take the place of depth
DRIFT = 0.25            # how much slower or faster steps have to become to try again
RECENT = 10             # steps that drift is seen by
MODELS = 1000           # that are remembered


@dataclass
class Sample:
    """One flush, from its analysis to the end of its backward pass; filled in as it goes on."""

    method: Method
    calls: int = 0
    analyze_ms: float = 0.0
    ms: float = 0.0                 # all of it
    known: bool = False             # whether the plan was in the cache
    counts: bool = True             # whether it tells anything: not if something was compiled


@dataclass
class _Model:
    """What is known of one model."""

    first: Method                                   # what it starts with
    method: Method                                  # what is run now
    trying: list[Method] = field(default_factory=list)          # take turns; empty: not yet, or not any more
    us_a_call: dict[Method, list[float]] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    settled: float = 0.0                            # us a call when the method was chosen
    sample: Sample | None = None                    # the flush before


class Auto:
    """Chooses a method for every flush of every model."""

    def __init__(self) -> None:
        self._models: dict[Hashable, _Model] = {}
        self._lock = threading.Lock()

    def choose(self, model: Hashable, first: Method, worth_trying: Callable[[float], Sequence[Method]]) -> Sample:
        """The method of the next flush, in a sample that the flush fills in.

        Parameters
        ----------
        model : names the model
        first : what it starts with
        worth_trying : (us a call, with the first) -> other methods that may pay, the best first; asked once
        """
        with self._lock:
            if model not in self._models and len(self._models) >= MODELS:
                del self._models[next(iter(self._models))]
            state = self._models.setdefault(model, _Model(first, first))
            if state.sample is not None:
                self._learn(state, state.sample)
            if not state.settled and not state.trying and len(state.us_a_call.get(first, ())) >= KNOWN:
                state.trying = [first, *worth_trying(_typical(state.us_a_call[first]))[:MOST]]
                state.us_a_call = {first: []}       # the first steps may have been slower
            if state.trying:
                self._take_turns(state)
            state.sample = Sample(state.method)
            return state.sample

    def method_of(self, model: Hashable) -> Method:
        """What a model is run with now."""
        return self._models[model].method

    @property
    def models(self) -> list[Hashable]:
        return list(self._models)

    def forget(self) -> None:
        """Let all models begin anew."""
        with self._lock:
            self._models.clear()

    def is_settled(self, model: Hashable) -> bool:
        return model in self._models and self._models[model].settled > 0

    def _learn(self, state: _Model, sample: Sample) -> None:
        if not sample.calls or not sample.counts or sample.method != state.method:
            return
        us = sample.ms * 1e3 / sample.calls
        if not state.settled:
            state.us_a_call.setdefault(state.method, []).append(us)
            return
        state.recent.append(us)
        if len(state.recent) == RECENT and _drifted(sorted(state.recent), state.settled):
            state.method, state.settled, state.us_a_call = state.first, 0.0, {}

    def _take_turns(self, state: _Model) -> None:
        """Go on with the method that was tried least; or settle, if all were tried often enough."""
        tried = {m: state.us_a_call.get(m, []) for m in state.trying}
        best = min((_typical(us) for us in tried.values() if len(us) > 1), default=0.0)
        # One that is so much slower that more steps with it would be wasted is out.
        open_ones = [m for m, us in tried.items() if len(us) < TRIALS and not (len(us) > 1 and min(us) > 1.15 * best)]
        if open_ones:
            state.method = min(open_ones, key=lambda m: len(tried[m]))
            return
        state.method = min(tried, key=lambda m: _typical(tried[m]) * (1 - GAIN if m == state.first else 1))
        state.settled, state.trying = _typical(tried[state.method]), []
        state.recent.clear()


def _drifted(recent: Sequence[float], before: float) -> bool:
    """Whether three quarters of the steps, from the fastest to the slowest, are all slower than before, or all faster.

    (Steps on a shared machine may differ by half, and what they are compared with is the middle one of three.)
    """
    few = len(recent) // 4
    return recent[few] > before * (1 + DRIFT) or recent[-1 - few] < before * (1 - DRIFT)


def _typical(tried: Sequence[float]) -> float:
    """The first step may have been slower: it met its plans and kernels for the first time."""
    return statistics.median_low(tried[1:] or tried)
