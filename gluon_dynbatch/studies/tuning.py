"""Tuning: policies, granularities and sizes of mini-batches, timed side by side on the user's own model and samples.

Settings take turns, step by step, so that a disturbed machine disturbs all of them alike; what is reported are medians.
A step that launches or compiles something for the first time does not count.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, gluon, mx

from ..auto import KNOWN, MOST, TRIALS
from ..config import Config
from ..errors import DynBatchError
from ..scope import batching
from ..vertex import vertex
from .profiles import Row, Setting, TuneReport, pareto_front

__all__ = ["Row", "Setting", "TuneError", "TuneReport", "add_arguments", "pareto_front", "run", "tune"]

POLICIES = ("none", "depth", "agenda", "cost", "auto")
GRANULARITIES = ("op", "vertex", "graph")

_WARM_STEPS = (2, 10)               # at least, and at most
_AUTO_STEPS = KNOWN + TRIALS * (1 + MOST) + 1       # after so many steps policy "auto" has tried all that it tries
_MOST_MS = 1000.0                   # policy "none" is skipped where a step takes longer
_ATTEMPTS = 3                       # at a step that counts
_serial = itertools.count(1)        # of settings, in the whole process


class TuneError(DynBatchError):
    """What is tuned has failed, or cannot be tuned; the message names the sample and the setting."""


def tune(fn: Callable[[Any], Any], samples: Sequence[Any], policies: Sequence[str] = POLICIES,
         granularities: Sequence[str] = GRANULARITIES, batch_sizes: Sequence[int] | None = None, steps: int = 5,
         train: bool = True, backend: str = "auto", progress: bool = True) -> TuneReport:
    """Time every policy, granularity and size of mini-batch on a model, to find the fastest.

    Parameters and their gradients are afterwards what they were. Policy "none" is skipped where a step would take more
    than a second; the report says so.

    Parameters
    ----------
    fn : the model for one sample: sample -> loss; with train=False any array, or a list of arrays
    samples : mini-batches are drawn from them
    policies, granularities : as for `gdb.batching`
    batch_sizes : samples a mini-batch; by default 1, 4, 16, .. up to the number of samples
    steps : mini-batches that every setting is timed with
    train : whether the backward pass is run, too
    backend : as for `gdb.batching`; "auto" is measured as what it comes to in a long run, on the CPU the native one
    progress : show a bar on stderr

    Examples
    --------
    >>> report = tune(lambda sample: loss(net(sample.tree), sample.label), samples)     # doctest: +SKIP
    >>> print(report)                                                                   # doctest: +SKIP
    >>> report.save("tree.json")                                                        # doctest: +SKIP
    """
    if not callable(fn):
        raise TypeError(f"tune: expected a function of one sample, got {fn!r}")
    if not isinstance(samples, Iterable):
        raise TypeError(f"tune: expected a list of samples, got {samples!r}")
    samples = list(samples)
    powers = (4 ** k for k in itertools.count())
    sizes = sorted(set(itertools.takewhile(len(samples).__ge__, powers) if batch_sizes is None else batch_sizes))
    _check_arguments(samples, policies, granularities, sizes, steps, backend)
    settings = [Setting(p, g, b) for b in sizes for g in dict.fromkeys(granularities) for p in dict.fromkeys(policies)]
    timer = _Timer(fn, samples, train, backend, first_spare=steps)
    found: dict[Setting, list[_Step]] = {}
    skipped: dict[Setting, str] = {}
    with _kept_gradients(), tqdm(total=len(settings) * (1 + steps), desc="tuning", file=sys.stderr,
                                 disable=not progress) as bar:
        for setting in settings:
            reason = timer.warm_up(setting)
            if reason:
                skipped[setting] = reason
            else:
                found[setting] = []
            bar.update(1 + steps if reason else 1)
        for number in range(steps):
            for setting, measured in found.items():
                measured.append(timer.measure(setting, number))
                bar.update()
    if not found:
        raise TuneError(f"tune: all settings were skipped, {settings[0]} because {skipped[settings[0]]}; name smaller "
                        "batch_sizes, or other policies than none")
    title = (f"{len(samples)} samples, {'training' if train else 'inference'}; medians of {steps} steps, times in ms a "
             "step; predicted and measured: forward and backward")
    return TuneReport([_row(*both) for both in found.items()], skipped, title, backend)


def _check_arguments(samples: list[Any], policies: Sequence[str], granularities: Sequence[str], sizes: list[int],
                     steps: int, backend: str) -> None:
    if not samples:
        raise ValueError("tune: there are no samples")
    if not (policies and granularities and sizes):
        raise ValueError("tune: expected at least one policy, one granularity and one batch size")
    for policy, granularity in itertools.product(policies, granularities):
        Config(policy, granularity, backend)
    wrong = [size for size in sizes if not 1 <= size <= len(samples)]
    if wrong:
        raise ValueError(f"tune: batch size {wrong[0]}; expected 1 to {len(samples)}, the number of samples")
    if steps < 1:
        raise ValueError(f"tune: {steps} steps; expected at least 1")
    budget = _own_budget(next(_serial))
    with batching(analysis_budget=budget) as scope:
        if scope.config.analysis_budget != budget:
            raise TuneError("tune was called inside a batching scope, which its own scopes would join; call it outside")


def _own_budget(serial: int) -> float:
    """Practically the default, and yet another one for every serial number."""
    return Config.analysis_budget + 1e-9 * serial


# ---- steps -------------------------------------------------------------------------------------------------------

class _Step(NamedTuple):
    """One mini-batch; its numbers have the names that they have in a Row."""

    numbers: dict[str, Any]
    method: str
    backend: str
    is_new: bool                    # something was launched or compiled that never was before


class _Timer:
    """Runs steps. Mini-batches have numbers; those from `first_spare` on are for steps that do not count."""

    def __init__(self, fn: Callable[[Any], Any], samples: list[Any], train: bool, backend: str, first_spare: int):
        self.fn, self.samples, self.train = fn, samples, train
        self.spare = itertools.count(first_spare)
        self.serial: dict[Setting, int] = {}
        self.seen: set[Any] = set()                 # launches and kernels
        self.ms_alone: dict[str, float] = {}        # granularity -> ms a sample with policy "none"
        self.backend = self._long_run(backend)

    def _long_run(self, backend: str) -> str:
        """What a backend comes to; "auto" would go from one to another amidst the steps, once compiling pays."""
        with autograd.pause(), self._named("outside of a scope") as at:     # here parameters get deferred shapes
            device = self._results(0, at)[0].context.device_type
        if backend == "auto":
            backend = os.environ.get("DYNBATCH_BACKEND", "auto")
        return "native" if backend == "auto" and device == "cpu" else backend

    def warm_up(self, setting: Setting) -> str:
        """Trace, compile, and let policy "auto" choose; the reason if the setting is too slow to be timed."""
        if setting.policy != "none":
            self._warm(setting)
            return ""
        grain = setting.granularity
        if grain not in self.ms_alone:
            self.ms_alone[grain] = self._warm(setting._replace(batch=1))
        ms = self.ms_alone[grain] * setting.batch
        if ms > _MOST_MS:
            return f"a step would take about {ms / 1e3:.2g} s, more than {_MOST_MS / 1e3:g} s"
        self.ms_alone[grain] = self._warm(setting) / setting.batch
        return ""

    def _warm(self, setting: Setting) -> float:
        """Run steps until one has nothing new; its milliseconds."""
        least, most = _WARM_STEPS
        for count in itertools.count(1):
            step = self._step(setting, next(self.spare))
            if setting.policy == "auto" and step.backend == "native":       # on others "auto" does not learn
                least, most = _AUTO_STEPS, _AUTO_STEPS + _WARM_STEPS[1]
            if count >= most or (count >= least and not step.is_new):
                break
        return step.numbers["total_ms"]

    def measure(self, setting: Setting, number: int) -> _Step:
        """A step that counts. After one that had something new comes another, a few times; then the last one counts."""
        step = self._step(setting, number)
        for _ in range(_ATTEMPTS - 1):
            if not step.is_new:
                break
            step = self._step(setting, next(self.spare))
        return step

    def _step(self, setting: Setting, number: int) -> _Step:
        """Run a mini-batch: the same samples for all settings of its size, in an order of the setting's own.

        In the same order, a setting would find the plans that the one before it has made.
        """
        if setting not in self.serial:
            self.serial[setting] = next(_serial)
        serial = self.serial[setting]
        # Policy "auto" remembers what it learns by budget: with one of its own, a setting learns from its own steps.
        budget = _own_budget(serial)
        members = np.random.default_rng(number).permutation(len(self.samples))[:setting.batch]
        order = np.random.default_rng((number, serial)).permutation(members).tolist()
        results: list[Any] = []
        gc.collect(1)                               # what the setting before has left is not this one's time
        start = time.perf_counter()
        with self._named(f"with {setting}") as at:
            with autograd.record() if self.train else autograd.pause(), batching(
                    setting.policy, setting.granularity, self.backend, analysis_budget=budget) as scope:
                for k in order:
                    results += self._results(k, at)
                at.clear()                          # from here on it is the mini-batch that fails
            if self.train:
                autograd.backward(results)
            mx.nd.waitall()
        return self._seen_through(scope, (time.perf_counter() - start) * 1e3)

    def _results(self, k: int, at: list[int]) -> list[Any]:
        """What `fn` makes of sample k, as a list; `at` knows which sample it is."""
        at[:] = [k]
        result = self.fn(self.samples[k])
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if not results or not all(isinstance(x, mx.nd.NDArray) for x in results):
            raise TypeError(f"it returned {type(result).__name__}; expected an array, or a list of arrays")
        return results

    @contextlib.contextmanager
    def _named(self, where: str) -> Iterator[list[int]]:
        """Errors inside name the sample (the number in the list, if there is one) and where it was run."""
        at: list[int] = []
        try:
            yield at
        except Exception as error:
            what = f"fn(samples[{at[0]}])" if at else "the mini-batch"
            message = str(error).partition("\n")[0]
            raise TuneError(f"tune: {what} failed {where}: {type(error).__name__}: {message}") from error

    def _seen_through(self, scope: Any, total_ms: float) -> _Step:
        stats, flushes = scope.stats, scope.flushes
        rows = [launch.rows for flush in flushes for launch in flush.launches]
        things = {(flush.backend, launch.title, launch.where, launch.operands)
                  for flush in flushes for launch in flush.launches}
        things |= {source for flush in flushes for _, sources in flush.kernels() for source in sources}
        is_new = not things <= self.seen
        self.seen |= things
        numbers = {"launches": stats.launches, "rows_per_launch": sum(rows) / max(1, len(rows)),
                   "analyze_ms": stats.analyze_ms, "record_ms": stats.record_ms, "forward_ms": stats.execute_ms,
                   "backward_ms": stats.backward_ms, "total_ms": total_ms,
                   "predicted_ms": stats.predicted_execute_ms + stats.predicted_backward_ms,
                   "measured_ms": stats.execute_ms + stats.backward_ms}
        method = max(stats.methods, key=stats.methods.__getitem__, default="nothing")
        return _Step(numbers, method, flushes[-1].backend if flushes else "none", is_new)


def _row(setting: Setting, steps: Sequence[_Step]) -> Row:
    middle = {name: statistics.median(step.numbers[name] for step in steps) for name in steps[0].numbers}
    return Row(*setting, method=statistics.mode(step.method for step in steps), backend=steps[-1].backend,
               samples_per_second=setting.batch / middle["total_ms"] * 1e3, **middle)


# ---- what tuning must not change ---------------------------------------------------------------------------------

@contextlib.contextmanager
def _kept_gradients() -> Iterator[None]:
    """Give every array its gradient back, and to parameters without gradient (running means) their values.

    `fn` does not say which arrays it uses, so that all of the process are kept.
    """
    arrays = _arrays_with_gradients()
    kept = [(x, x.grad.copy(), x._fresh_grad) for x in arrays.values()]
    values = [(x, x.copy()) for p in _objects(gluon.Parameter) if p.grad_req == "null" and p._data is not None
              for x in p.list_data()]
    try:
        yield
    finally:
        mx.nd.waitall()
        for x, grad, fresh in kept:
            grad.copyto(x.grad)
            x._fresh_grad = fresh
        for x, value in values:
            value.copyto(x)
        for key, x in _arrays_with_gradients().items():
            if key not in arrays:                   # its parameter had no shape before
                mx.nd.zeros_like(x.grad).copyto(x.grad)
                x._fresh_grad = False
        mx.nd.waitall()


def _arrays_with_gradients() -> dict[int, Any]:
    """By id."""
    found = [x for x in _objects(mx.nd.NDArray) if not issubclass(type(x), LazyArray) and x.handle]
    return {id(x): x for x in found if x.grad is not None}


def _objects(kind: type) -> list[Any]:
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]       # isinstance would run code of proxies


# ---- the command -------------------------------------------------------------------------------------------------

def add_arguments(parser: Any) -> None:
    """The arguments of `dynbatch tune`."""
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("target", nargs="?", metavar="MODULE_OR_FILE:FUNCTION",
                        help="a function without arguments that returns (fn, samples): fn(sample) is a loss")
    parser.add_argument("--demo", action="store_true", help="tune a small built-in tree model instead")
    parser.add_argument("--samples", type=int, metavar="N", help="take only the first N samples")
    parser.add_argument("--policies", type=names, default=POLICIES, metavar="A,B", help=f"of {','.join(POLICIES)}")
    parser.add_argument("--granularities", type=names, default=GRANULARITIES, metavar="A,B",
                        help=f"of {','.join(GRANULARITIES)}")
    parser.add_argument("--batch-sizes", type=numbers, metavar="M,N", help="default: 1,4,16,.. up to all samples")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps of each setting (default: 5)")
    parser.add_argument("--plot", metavar="PATH", help="draw analysis against rows a launch; .png, .svg, or both")
    parser.add_argument("--profile", metavar="PATH", help="write the best setting, for gdb.batching(profile=PATH)")


def run(options: Any) -> int:
    """`dynbatch tune`: print the table, and write what was asked for."""
    if options.demo == (options.target is not None):
        raise ValueError("expected a target, MODULE_OR_FILE:FUNCTION, or --demo")
    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples {options.samples}: expected at least 1")
    fn, samples = _demo(options.samples or 64) if options.demo else _load(options.target)
    report = tune(fn, list(samples)[:options.samples], options.policies, options.granularities, options.batch_sizes,
                  options.steps)
    print(report)
    if options.plot:
        print(f"plot: {', '.join(report.plot(options.plot))}")
    if options.profile:
        report.save(options.profile)
        print(f"profile: {options.profile}; use it with gdb.batching(profile={options.profile!r})")
    return 0


def _load(target: str) -> tuple[Callable[[Any], Any], Any]:
    """What the function that a target names returns."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"the target {target!r}: expected MODULE_OR_FILE:FUNCTION, such as model.py:make")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ValueError(f"there is no file {place}")
    sys.path.insert(0, str(Path(place).resolve().parent) if is_file else os.getcwd())      # as `python` itself does
    if is_file:
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None         # a file that ends with .py has both
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"the module {place} cannot be imported: {error}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{place} has no function {name}")
    made = getattr(module, name)()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise ValueError(f"{target} returned {type(made).__name__}; expected a tuple (fn, samples)")
    return made


class _Tree(gluon.Block):
    """The model of --demo. A tree is a list: a word is put on a stack, None joins the two states on top."""

    def __init__(self, words: int, hidden: int):
        super().__init__()
        with self.name_scope():
            self.word = vertex(gluon.nn.Embedding(words, hidden))
            self.dense = gluon.nn.Dense(hidden, in_units=2 * hidden, activation="tanh")
            self.out = gluon.nn.Dense(2, in_units=hidden)
            self.cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

    @vertex
    def join(self, F: Any, left: Any, right: Any) -> Any:
        return self.dense(F.concat(left, right, dim=1))

    @vertex
    def loss(self, F: Any, h: Any, label: Any) -> Any:
        return self.cross_entropy(self.out(h), label)

    def forward(self, tree: list[int | None], label: int) -> Any:
        stack: list[Any] = []
        for word in tree:
            stack.append(self.word(word) if word is not None else self.join(mx.nd, stack.pop(), stack.pop()))
        return self.loss(mx.nd, stack.pop(), label)


def _demo(count: int) -> tuple[Callable[[Any], Any], list[Any]]:
    draw, words, samples = np.random.default_rng(0), 50, []
    for _ in range(count):
        tree: list[int | None] = []
        height = 0
        for word in draw.integers(0, words, draw.integers(3, 20)).tolist():
            tree.append(word)
            joins = int(draw.integers(0, height + 1))
            tree += [None] * joins
            height += 1 - joins
        samples.append((tree + [None] * (height - 1), int(draw.integers(2))))
    net = _Tree(words, hidden=32)
    net.initialize(mx.init.Xavier())
    return lambda sample: net(*sample), samples
