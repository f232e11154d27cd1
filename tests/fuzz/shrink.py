"""Makes a program that differs smaller, as long as it differs in the same way; prints it so that it can be pasted."""

import ast
import inspect
import itertools
import time

from . import cavs_loop, notes
from .oracle import differences_of, manner_of

SIMPLER_OPTIONS = ({"policy": "depth"}, {"granularity": "op"}, {"granularity": "vertex"})


def shrink(source, options, difference, differences=differences_of, seconds=60.0, progress=lambda: None):
    """The smallest program found in `seconds` that differs in the same manner, and its options."""
    end, manner = time.monotonic() + seconds, manner_of(difference)

    def fails(source, options):
        progress()
        try:
            found = differences(source, options)
        except Exception:  # not a program
            return False
        return any(manner_of(d) == manner for d in found)

    for extra in [key for key in options if key not in ("backend", "policy", "granularity")]:
        smaller = {key: value for key, value in options.items() if key != extra}
        options = smaller if fails(source, smaller) else options
    for change in SIMPLER_OPTIONS if "policy" in options else ():
        if options["granularity"] != "op" and fails(source, {**options, **change}):
            options = {**options, **change}
    size = None
    while size != len(source) and time.monotonic() < end:
        size = len(source)
        for kind in (large_edits, small_edits):
            k = 0
            while time.monotonic() < end:
                smaller = edited(source, kind, k, difference[1])
                if smaller is None:
                    break
                if smaller and len(smaller) < len(source) and fails(smaller, options):
                    source = smaller
                else:
                    k += 1
    return source, options


# ---- edits of a program ----------------------------------------------------------------------


def large_edits(tree, name):
    """Ways to make the tree smaller, as functions that change it in place: what drops whole lines."""
    wanted = name.rsplit(", ", 1)[-1]
    yield lambda: drop_unread(tree)
    yield lambda: narrow(tree, wanted)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "handlers"):
            lines = getattr(node, field, None)
            if not isinstance(lines, list):
                continue
            width = len(lines)
            while width > 0:
                for start in reversed(range(0, len(lines) - width + 1, width)):
                    yield lambda lines=lines, start=start, width=width: cut(lines, start, width)
                width //= 2
            for k, inner in enumerate(lines):
                if isinstance(inner, (ast.With, ast.For, ast.If, ast.Try)):
                    yield lambda lines=lines, k=k, inner=inner: unwrap(lines, k, inner)
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                    for operand in names_in(inner.value):
                        yield lambda lines=lines, k=k, operand=operand: rename(tree, lines, k, operand)


def small_edits(tree, name):
    """What drops parts of expressions."""
    for node in ast.walk(tree):
        for field in ("elts", "args", "keywords", "items", "decorator_list"):
            parts = getattr(node, field, None)
            if isinstance(parts, list) and not (field == "elts" and constant(node)):
                for k in reversed(range(len(parts))):
                    yield lambda parts=parts, k=k: cut(parts, k, 1)
        if isinstance(node, ast.Dict):
            for k in reversed(range(len(node.keys))):
                yield lambda node=node, k=k: (node.keys.pop(k), node.values.pop(k))
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            for k, part in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(part, (ast.BinOp, ast.Call, ast.Subscript, ast.UnaryOp, ast.Compare)):
                    for smaller in inside(part):
                        yield lambda node=node, field=field, value=value, k=k, smaller=smaller: replace(
                            node, field, value, k, smaller
                        )
                if isinstance(part, ast.Constant) and isinstance(part.value, float) and part.value not in (0.0, 1.0):
                    yield lambda part=part: setattr(part, "value", float(round(part.value)))


def constant(node):
    return all(isinstance(x, (ast.Constant, ast.List, ast.UnaryOp)) for x in node.elts)


def drop_unread(tree):
    """Drop every assignment of a name that nobody reads, and every function that nobody calls."""
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for node in ast.walk(tree):
        lines = getattr(node, "body", None)
        if isinstance(lines, list) and not isinstance(node, (ast.ClassDef, ast.Module)):
            lines[:] = [
                x
                for x in lines
                if not (
                    isinstance(x, ast.Assign)
                    and isinstance(x.targets[0], ast.Name)
                    and x.targets[0].id not in read
                    or isinstance(x, (ast.FunctionDef, ast.ClassDef))
                    and x.name not in read
                )
            ] or [ast.Pass()]


def narrow(tree, wanted):
    """Ask for the gradient that differs alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            kept = [k for k, key in enumerate(node.keys) if isinstance(key, ast.Constant) and key.value == wanted]
            node.keys[:], node.values[:] = [node.keys[k] for k in kept], [node.values[k] for k in kept]


def names_in(expression):
    """Names that an expression reads as operands."""
    return list(
        dict.fromkeys(
            n.id
            for n in ast.walk(expression)
            if isinstance(n, ast.Name)
            and n.id not in ("nd", "F", "gluon", "nn", "rnn", "mx", "np", "list", "gdb", "self", "cavs")
        )
    )


def inside(part):
    """Smaller expressions that may stand for one."""
    found = [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
    if isinstance(part, ast.Call):
        found.remove(part.func)
        if isinstance(part.func, ast.Attribute):
            found.append(part.func.value)
    return [x for x in found if not isinstance(x, (ast.Starred, ast.Constant, ast.Slice, ast.Tuple))]


def cut(parts, start, width):
    del parts[start : start + width]


def unwrap(lines, k, inner):
    lines[k : k + 1] = inner.body


def rename(tree, lines, k, operand):
    """Drop an assignment, and read one of its operands instead."""
    name = lines.pop(k).targets[0].id
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = operand


def replace(node, field, value, k, smaller):
    if isinstance(value, list):
        value[k] = smaller
    else:
        setattr(node, field, smaller)


def edited(source, kind, k, name):
    """The program after edit number k of a kind: "" if that is no program, None if there are not so many."""
    tree = ast.parse(source)
    edit = next(itertools.islice(kind(tree, name), k, None), None)
    if edit is None:
        return None
    try:
        edit()
        text = ast.unparse(tree) + "\n"
        compile(text, "<smaller>", "exec")
    except (SyntaxError, ValueError, AttributeError, RecursionError, TypeError):
        return ""
    return text


# ---- printing --------------------------------------------------------------------------------

HEAD = """import contextlib
import gluon_dynbatch as gdb
import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx
nd, nn, rnn, F = mx.nd, gluon.nn, gluon.rnn, mx.nd
nan, inf = float("nan"), float("inf")
"""
TAIL = """
loop = observe(program, {}, data)
batched = observe(program, {}, data)
for what in dict.fromkeys([*loop, *batched]):
    want, got = (str(found.get(what, "absent")) for found in (loop, batched))
    print(what, "|", want) if want == got else print(what, "| LOOP", want, "| SCOPE", got)
"""


def pasted(source, options):
    """A whole program: imports, data, code, comparison."""
    words = ", ".join(f"{key}={value!r}" for key, value in options.items())
    helper = inspect.getsource(notes).split('"""', 2)[2].replace("from cavs_core.mxnet_compat import mx\n", "")
    make = "\n\ndef data(values, dtype):\n    return mx.nd.array(np.array(values, dtype), dtype=dtype)\n\n\n"
    extra = ""
    ways = ("contextlib.nullcontext", f"lambda: gdb.batching({words})")
    if "cavs.VertexFunction" in source:
        ways = ("loop_run", f"lambda *args: cavs_run(*args, {words})")
        extra = inspect.getsource(cavs_loop).split('"""', 2)[2] + "\n\n"
    return HEAD + helper + make + extra + source + TAIL.format(*ways)
