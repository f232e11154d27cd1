"""What tuning found: a report with its table and its plot, and the profile, a file with the best options.

`gdb.batching(profile=path)` reads a profile.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union

from cavs_core import BACKENDS

from ..errors import DynBatchError
from ..methods import GRANULARITIES, POLICY_NAMES

__all__ = ["OPTIONS", "ProfileError", "Row", "Setting", "TuneReport", "load_profile", "pareto_front", "save_profile"]

#: the options that a profile may have, with their values; those without which it says nothing
OPTIONS = {"policy": POLICY_NAMES, "granularity": GRANULARITIES, "backend": BACKENDS}
REQUIRED = ("policy", "granularity")

_KIND = "gluon_dynbatch profile"
_PathLike = Union[str, "os.PathLike[str]"]


class ProfileError(DynBatchError, ValueError):
    """A file is not a profile, or says what no scope can do."""


# ---- the report --------------------------------------------------------------------------------------------------

class Setting(NamedTuple):
    """What is tuned."""

    policy: str
    granularity: str
    batch: int                      # samples a mini-batch

    def __str__(self) -> str:
        return f'policy="{self.policy}", granularity="{self.granularity}", batch {self.batch}'


@dataclass(frozen=True)
class Row:
    """One setting: medians of its steps."""

    policy: str
    granularity: str
    batch: int
    method: str                     # policy and grain that ran: with policy "auto" those that it came to
    backend: str                    # that ran
    launches: float                 # a step
    rows_per_launch: float          # mean
    analyze_ms: float
    record_ms: float                # the user's own code included
    forward_ms: float
    backward_ms: float
    total_ms: float                 # the whole step, until the device has finished
    samples_per_second: float
    predicted_ms: float             # forward and backward, by the cost model; 0 where it says nothing
    measured_ms: float              # the same as it was

    @property
    def setting(self) -> Setting:
        return Setting(self.policy, self.granularity, self.batch)


_HEAD = ("", "policy", "grain", "batch", "launches", "rows/launch", "analysis", "record", "forward", "backward",
         "total", "samples/s", "predicted", "measured", "")
_TEXTS = (0, 1, 2, len(_HEAD) - 1)          # columns that are no numbers


@dataclass(frozen=True)
class TuneReport:
    """What `tune` found; `print(report)` shows its table.

    Parameters
    ----------
    rows : the settings that were measured, at least one
    skipped : those that were not, with reasons
    title : what was measured
    backend : as it was given to `tune`
    """

    rows: list[Row]
    skipped: dict[Setting, str]
    title: str = ""
    backend: str = "auto"

    @property
    def best(self) -> Row:
        """The setting with the most samples a second."""
        return max(self.rows, key=lambda row: row.samples_per_second)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """All settings as text, milliseconds a step; the best has a star."""
        best = self.best
        cells = [_HEAD, *[_cells(row, row is best) for row in self.rows]]
        widths = [max(len(line[k]) for line in cells) for k in range(len(_HEAD))]
        cells += [("", s.policy, s.granularity, str(s.batch), f"skipped: {why}") for s, why in self.skipped.items()]
        lines = []
        for line in cells:                  # a skipped setting has a sentence in place of its numbers
            padded = [cell.ljust(w) if k in _TEXTS else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths))]
            lines.append("  ".join(padded if len(line) == len(_HEAD) else [*padded[:-1], line[-1]]).rstrip())
        lines.append(f"* the fastest: {best.setting}, {best.samples_per_second:,.0f} samples/s")
        return "\n".join([self.title, *lines])

    def plot(self, path: _PathLike) -> list[str]:
        """Draw what analysis costs against what it brings; the ending names the format, without one it is PNG and SVG.

        Returns
        -------
        the files that were written
        """
        from matplotlib.figure import Figure
        name = os.fspath(path)
        names = [name] if Path(name).suffix else [f"{name}.png", f"{name}.svg"]
        figure = Figure(figsize=(12, 5.5))
        left, right = figure.subplots(1, 2)
        self._draw(left, "mean rows a launch", [row.rows_per_launch for row in self.rows])
        self._draw(right, "samples a second", [row.samples_per_second for row in self.rows])
        right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
        figure.suptitle(self.title, fontsize=9, y=0.93)
        for each in names:
            figure.savefig(each, bbox_inches="tight", dpi=120)
        return names

    def _draw(self, axes: Any, what: str, gains: Sequence[float]) -> None:
        """One panel: a colour for each granularity, a marker for each policy; larger for larger mini-batches."""
        points = [(row.analyze_ms / row.batch, gain) for row, gain in zip(self.rows, gains)]
        colours = dict(zip(dict.fromkeys(row.granularity for row in self.rows), itertools.cycle(
            ("tab:blue", "tab:orange", "tab:green", "tab:purple"))))
        markers = dict(zip(dict.fromkeys(row.policy for row in self.rows), itertools.cycle("xosD*")))
        sizes = {batch: 4 + 2 * k for k, batch in enumerate(sorted({row.batch for row in self.rows}))}
        for (x, y), row in zip(points, self.rows):
            axes.plot(x, y, markers[row.policy], color=colours[row.granularity], markersize=sizes[row.batch], alpha=0.8)
        for granularity, colour in colours.items():
            mine = [point for point, row in zip(points, self.rows) if row.granularity == granularity]
            axes.plot(*zip(*[mine[k] for k in pareto_front(mine)]), ":", color=colour)
        front = pareto_front(points)
        axes.plot(*zip(*[points[k] for k in front]), "o-", color="0.2", markersize=15, fillstyle="none", zorder=1)
        for number, k in enumerate(front):  # labels on alternate sides: neighbours can be close
            right = number % 2 == 0
            axes.annotate(f"{self.rows[k].policy}, {self.rows[k].batch}", points[k], (9, -12) if right else (-9, 9),
                          textcoords="offset points", fontsize=7, ha="left" if right else "right")
        axes.set(xscale="log", yscale="log", xlabel="analysis, ms a sample (logarithmic)",
                 ylabel=f"{what} (logarithmic)")
        axes.margins(0.2)
        legend: list[tuple[str, dict[str, Any]]] = [(g, {"marker": "s", "color": c}) for g, c in colours.items()]
        legend += [(p, {"marker": m, "color": "0.3"}) for p, m in markers.items()]
        legend += [(f"batch {b}", {"marker": "o", "color": "0.8", "markersize": s}) for b, s in sizes.items()]
        for label, style in legend:
            axes.plot([], [], linestyle="none", label=label, **style)
        axes.plot([], [], ":", color="0.3", label="front of a granularity")
        axes.plot([], [], "o-", color="0.2", fillstyle="none", label="Pareto front\n(policy, batch)")

    def save(self, path: _PathLike) -> None:
        """Write the best setting as a profile, with the whole table."""
        options = {"policy": self.best.policy, "granularity": self.best.granularity}
        if self.backend != "auto":
            options["backend"] = self.backend
        save_profile(path, options, batch=self.best.batch, title=self.title, table=[asdict(row) for row in self.rows],
                     skipped=[{**setting._asdict(), "reason": why} for setting, why in self.skipped.items()])


def _cells(row: Row, is_best: bool) -> tuple[str, ...]:
    times = (row.analyze_ms, row.record_ms, row.forward_ms, row.backward_ms, row.total_ms)
    return ("*" if is_best else "", row.policy, row.granularity, str(row.batch), f"{row.launches:,.0f}",
            f"{row.rows_per_launch:.1f}", *[f"{ms:.2f}" for ms in times], f"{row.samples_per_second:,.0f}",
            f"{row.predicted_ms:.2f}" if row.predicted_ms else "-", f"{row.measured_ms:.2f}",
            f"ran {row.method}" if row.policy == "auto" else "")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The positions of the points (cost, gain) that no other beats, by rising cost.

    A point beats another if it costs no more and gains no less, and is not equal to it: equal points are all kept.
    """
    front: list[int] = []
    for k in sorted(range(len(points)), key=lambda k: (points[k][0], -points[k][1])):
        if not front or points[k][1] > points[front[-1]][1] or points[k] == points[front[-1]]:
            front.append(k)
    return front


# ---- profiles ----------------------------------------------------------------------------------------------------

def save_profile(path: _PathLike, options: Mapping[str, str], **facts: Any) -> None:
    """Write a profile, with the fingerprint of this machine and the version of the library.

    Parameters
    ----------
    path : the file; one that exists is written over
    options : policy, granularity and, if it matters, backend
    facts : what else is worth keeping, as JSON takes it: the table that the options were chosen from
    """
    name = os.fspath(path)
    _check_options(name, options)
    machine, version = _here()
    profile = {"kind": _KIND, "version": version, "machine": machine, "options": dict(options), **facts}
    Path(name).write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")


def load_profile(path: _PathLike) -> dict[str, str]:
    """The batching options of a profile: policy, granularity, and backend if it names one.

    It warns of a profile from another version or another machine. A file that has not changed is read once: a scope is
    entered in every step.
    """
    try:
        name = os.fsdecode(path)
        state = os.stat(name)
    except TypeError as error:
        raise ProfileError(f"profile={path!r}: expected the path of a profile, or None") from error
    except (OSError, ValueError) as error:      # (ValueError: a name that no file can have)
        why = getattr(error, "strerror", None) or error
        raise ProfileError(f"the profile {os.fspath(path)!r} cannot be read ({why}); `dynbatch tune .. --profile PATH` "
                           "and TuneReport.save write profiles") from error
    try:
        return dict(_read(name, os.getcwd(), state.st_mtime_ns, state.st_size))
    except OSError as error:
        raise ProfileError(f"the profile {name} cannot be read ({error.strerror}); `dynbatch tune .. --profile {name}` "
                           "and TuneReport.save write profiles") from error


@functools.lru_cache(maxsize=16)
def _read(name: str, folder: str, changed_ns: int, size: int) -> dict[str, str]:
    """The options in a file. Where its name begins, when it was changed, and its size tell one content from another."""
    wanted = "make one with `dynbatch tune .. --profile PATH` or TuneReport.save"
    try:
        profile = json.loads(Path(name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:           # no text, or no JSON, or lists in lists without an end
        raise ProfileError(f"{name} is not a profile ({error}); {wanted}") from error
    if not isinstance(profile, dict) or profile.get("kind") != _KIND or not isinstance(profile.get("options"), dict):
        raise ProfileError(f"{name} is not a profile: expected \"kind\": \"{_KIND}\" and \"options\" in it; {wanted}")
    _check_options(name, profile["options"])
    machine, version = _here()
    # The machine's fingerprint names the version too: two warnings would say the same.
    for what, mine, its in (("with gluon_dynbatch", version, profile.get("version")),
                            ("on", machine, profile.get("machine"))):
        if mine != its:
            warnings.warn(f"the profile {name} was made {what} {its}, this is {mine}. What was fastest there may be "
                          "slow here: tune again with `dynbatch tune`, or name the options themselves", stacklevel=3)
            break
    return profile["options"]


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option not in OPTIONS:
            raise ProfileError(f"the profile {name} has an option {option!r}; expected {', '.join(OPTIONS)}")
        if value not in OPTIONS[option]:
            raise ProfileError(f"the profile {name} says {option}={value!r}; expected one of "
                               f"{', '.join(OPTIONS[option])}")
    missing = [option for option in REQUIRED if option not in options]
    if missing:
        raise ProfileError(f"the profile {name} does not say {' and '.join(missing)}; tune again with `dynbatch tune`")


def _here() -> tuple[str, str]:
    """The fingerprint of this machine, and the version of the library."""
    # Not when this file is loaded: calibrate imports the scope, and the scope imports this file.
    from .. import __version__
    from ..costs.calibrate import fingerprint
    return fingerprint(), __version__
