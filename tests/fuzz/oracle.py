"""A case, its two runs, and what differs between them."""

import contextlib
import re
import sys

import numpy as np

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import mx

from .cavs_loop import cavs_run, loop_run
from .families import FAMILIES
from .notes import observe
from .values import Draw
from .writer import make_data, namespace

TOLERANCE = {"float16": (2e-2, 2e-3), "float32": (1e-3, 1e-4), "float64": (1e-6, 1e-8)}
LOOP_ONLY = 3  # how often a program is drawn anew that ends with an error in the loop


class Case:
    """(seed, face, backend, families): a program and the options of its scope."""

    def __init__(self, seed, face="gluon", backend="mxnet", families=None):
        self.seed, self.face, self.backend = seed, face, backend
        self.families = frozenset(FAMILIES if families is None else families)
        for attempt in range(LOOP_ONLY):
            draw = Draw((seed, face, attempt))
            self.options = draw_options(draw, face, backend, self.families)
            self.source = write_program(face, draw, self.families)
            self.loop = observe(compiled(self.source), ways_of(self.source, self.options)[0], make_data)
            if "error" not in self.loop or ("errors" in self.families and draw.chance(0.3)):
                break

    def run(self):
        """What differs: a list of (kind, name, in the loop, in the scope)."""
        if "error" in self.loop and "errors" not in self.families:
            return []
        return self.differences(self.source, self.options, self.loop)

    def differences(self, source, options, loop=None):
        return differences_of(source, options, loop, freshness="freshness" in self.families)


def write_program(face, draw, families):
    if face == "cavs":
        from .cavs_programs import cavs_program

        return cavs_program(draw, families)
    from .gluon_programs import gluon_program

    return gluon_program(draw, families)


def draw_options(draw, face, backend, families):
    if face == "cavs":
        return {"backend": backend}
    options = {
        "backend": backend,
        "policy": draw.pick("depth", "depth", "agenda", "cost", "auto", "none"),
        "granularity": draw.pick("auto", "op", "vertex", "graph"),
    }
    if draw.chance(0.15):
        options["drop_repeats"] = False
    if "check" in families and draw.chance(0.07):
        options["check"] = True
    if "flushes" in families and draw.chance(0.1):
        options["max_pending"] = draw.integer(1, 9)
    return options


def ways_of(source, options):
    """What a program is given to run as the loop, and batched."""
    if "cavs.VertexFunction" in source:
        return loop_run, lambda *args: cavs_run(*args, backend=options["backend"])
    return contextlib.nullcontext, lambda: gdb.batching(**options)


def compiled(source):
    names = namespace()
    exec(compile(source, "<program>", "exec"), names)
    return names["program"]


def forget():
    """What the library remembers of earlier programs, so that a case is the same alone."""
    for module, names in (
        ("choose", ("IDLE", "REPEATS", "SEEN")),
        ("joining", ("HABITS",)),
        ("sums", ("SUM_ROLES",)),
        ("merging", ("FORMS",)),
        ("logs", ("RECORDINGS",)),
    ):
        for name in names:
            getattr(sys.modules[f"gluon_dynbatch.{module}"], name).clear()
    sys.modules["gluon_dynbatch.choose"].AUTO.forget()


def differences_of(source, options, loop=None, freshness=True):
    """Run a program both ways; nothing that the loop itself does not decide counts.

    Without `freshness` nothing is asked of gradients that the loop leaves alone.
    """
    program, (as_loop, as_batch) = compiled(source), ways_of(source, options)
    if loop is None:
        loop = observe(program, as_loop, make_data)
    forget()
    batched = observe(program, as_batch, make_data)
    found = compare(loop, batched)
    if not freshness:
        found = [d for d in found if not left_alone(d, loop)]
    if not found or found[0][0] == "error":
        return found
    doubts = []
    for other in (make_data, perturbed(1), perturbed(2), in_float64):
        doubts.append(observe(program, as_loop, other))
    found = [d for d in found if not doubtful(d, doubts)]
    if found and ".grad[:] = 7" in source:
        shifted = observe(compiled(source.replace(".grad[:] = 7", ".grad[:] = 7.5")), as_loop, make_data)
        found = [d for d in found if d[0] != "grad" or adds(d[2], shifted.get(d[1]))]
    return found


def left_alone(difference, loop):
    """Whether it is about a gradient that no pass of the loop has written."""
    kind, name, _, _ = difference
    return kind in ("fresh", "stale") or kind == "grad" and not loop.get(name.replace("grad,", "fresh,", 1), 1)


def manner_of(difference):
    """In which way something differs: its kind, and of an error what it says, without numbers."""
    kind, name, want, got = difference
    if kind != "error":
        return kind
    error = want if got is None else got
    text = str(error).strip().splitlines()[-1] if str(error).strip() else ""
    who, words = "the loop" if got is None else "the scope", re.sub("[0-9]+", "#", text)[:60]
    return f"{who} raises {type(error).__name__}: {words}"


def compare(loop, batched):
    if ("error" in loop) != ("error" in batched):
        return [("error", "error", loop.get("error"), batched.get("error"))]
    if "error" in loop:
        return []
    found = []
    for name in [*loop, *(n for n in batched if n not in loop)]:
        if name not in loop and "parameter" in name:  # that a hybridized block does not use, and MXNet did not make
            continue
        if name not in loop or name not in batched:
            found.append(("names", name, loop.get(name), batched.get(name)))
            continue
        want, got = loop[name], batched[name]
        kind = name.split(",")[0].split(" ")[0].rstrip("'")
        if want.shape != got.shape or want.dtype != got.dtype:
            found.append((f"{kind} shape or dtype", name, want, got))
        elif not close(want, got):
            found.append((kind, name, want, got))
    return found


def close(want, got, slack=1.0):
    """Rounding apart, relative to the largest number of the array."""
    if want.dtype.kind != "f":
        return np.array_equal(want, got)
    rtol, atol = TOLERANCE[want.dtype.name]
    want, got = want.astype("float64"), got.astype("float64")
    finite = np.abs(want[np.isfinite(want)])
    scale = min(finite.max(), 100.0) if finite.size else 1.0
    with np.errstate(all="ignore"):
        return bool(np.allclose(got, want, rtol=rtol * slack, atol=atol * slack * max(scale, 1.0), equal_nan=True))


def adds(want, shifted):
    """Whether a gradient that begins 0.5 higher ends so, or the same: MXNet's mean divides what it adds to as well."""
    return shifted is None or close(want, shifted) or close((want + 0.5).astype(want.dtype), shifted)


def doubtful(difference, doubts):
    """Whether the loop's own result moves as much with rounding, the precision, or from run to run."""
    kind, name, want, got = difference
    if kind in ("names",) or not isinstance(want, np.ndarray) or want.dtype.kind not in "fiu":
        return False
    for found in doubts:
        other = found.get(name)
        if other is None or other.shape != want.shape:
            continue
        other, mine, theirs = (x.astype("float64") for x in (other, want, got if got.shape == want.shape else want))
        with np.errstate(all="ignore"):
            wrong = ~np.isclose(theirs, mine, rtol=1e-7, atol=1e-9, equal_nan=True)
            moved = np.abs(other - mine)
            off = np.abs(theirs - mine)
            unsure = (
                (np.isfinite(mine) != np.isfinite(other)) | (np.isnan(mine) != np.isnan(other)) | (moved > 0.05 * off)
            )
            worst = wrong & ~unsure
            if not worst.any() or close(
                np.where(unsure, mine, mine).astype(want.dtype), np.where(unsure, mine, theirs).astype(want.dtype)
            ):
                return True
    return False


def perturbed(seed):
    """Data that is off by rounding."""

    def data(values, dtype):
        values = np.array(values, dtype)
        if values.dtype.kind == "f":
            size = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-12}[values.dtype.name]
            values = (values * (1 + size * np.random.RandomState(seed).uniform(-1, 1, values.shape))).astype(dtype)
        return mx.nd.array(values, dtype=dtype)

    return data


def in_float64(values, dtype):
    values = np.array(values, dtype)
    return mx.nd.array(values, dtype="float64" if values.dtype == "float32" else values.dtype)
