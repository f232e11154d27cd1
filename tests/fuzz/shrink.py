"""Makes a program that differs smaller, as long as it differs in the same way, and prints it so that it can be pasted."""

import ast
import copy
import inspect
import time

from . import notes
from .oracle import differences_of

SIMPLER_OPTIONS = ({"policy": "depth"}, {"granularity": "op"}, {"granularity": "vertex"})


def shrink(source, options, kind, differences=differences_of, seconds=60.0, progress=lambda source: None):
    """The smallest program found in `seconds` whose first difference is of this kind, and its options."""
    end = time.monotonic() + seconds

    def fails(source, options):
        try:
            found = differences(source, options)
        except Exception:       # not a program
            return False
        return any(d[0] == kind for d in found)

    for extra in [key for key in options if key not in ("backend", "policy", "granularity")]:
        smaller = {key: value for key, value in options.items() if key != extra}
        options = smaller if fails(source, smaller) else options
    for change in SIMPLER_OPTIONS:
        if options.get(next(iter(change))) != "op" and fails(source, {**options, **change}):
            options = {**options, **change}
    again = True
    while again and time.monotonic() < end:
        again = False
        size = count_edits(source)
        k = 0
        while k < size and time.monotonic() < end:
            smaller = edited(source, k)
            if smaller is not None and len(smaller) < len(source) and fails(smaller, options):
                source, again = smaller, True
                size = count_edits(source)
                progress(source)
            else:
                k += 1
    return source, options


# ---- edits of a program ----------------------------------------------------------------------

def edits(tree):
    """Every way to make the tree smaller, as functions that change it in place: large ones first."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "handlers"):
            lines = getattr(node, field, None)
            if not isinstance(lines, list):
                continue
            count = len(lines)
            width = count // 2
            while width > 1:
                for start in range(0, count - width + 1, width):
                    yield lambda lines=lines, start=start, width=width: cut(lines, start, width)
                width //= 2
            for k in reversed(range(count)):
                yield lambda lines=lines, k=k: cut(lines, k, 1)
                inner = lines[k]
                if isinstance(inner, (ast.With, ast.For, ast.If, ast.Try)):
                    yield lambda lines=lines, k=k, inner=inner: unwrap(lines, k, inner)
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                    for operand in names_in(inner.value):
                        yield lambda node=node, lines=lines, k=k, operand=operand: rename(tree, lines, k, operand)
    for node in ast.walk(tree):
        for field in ("elts", "args", "keywords", "items", "decorator_list"):
            parts = getattr(node, field, None)
            if isinstance(parts, list):
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
                            node, field, value, k, smaller)
                if isinstance(part, ast.Constant) and isinstance(part.value, float) and part.value not in (0.0, 1.0):
                    yield lambda part=part: setattr(part, "value", float(round(part.value)))


def names_in(expression):
    """Names that an expression reads as operands."""
    return list(dict.fromkeys(n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id not in (
        "nd", "F", "gluon", "nn", "rnn", "mx", "np", "list", "gdb", "self", "cavs")))


def inside(part):
    """Smaller expressions that may stand for one."""
    found = [child for child in ast.iter_child_nodes(part) if isinstance(child, ast.expr)]
    return [x.value if isinstance(x, ast.Starred) else x for x in found if not (isinstance(part, ast.Call) and x is part.func
                                                                               and not isinstance(x, ast.Attribute))]


def cut(parts, start, width):
    del parts[start:start + width]


def unwrap(lines, k, inner):
    lines[k:k + 1] = inner.body


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


def count_edits(source):
    return sum(1 for _ in edits(ast.parse(source)))


def edited(source, k):
    """The program after edit number k; None if it is no program."""
    tree = ast.parse(source)
    for number, edit in enumerate(edits(tree)):
        if number == k:
            edit()
            break
    try:
        text = ast.unparse(tree) + "\n"
        compile(text, "<smaller>", "exec")
    except (SyntaxError, ValueError, AttributeError, RecursionError):
        return None
    return text


# ---- printing --------------------------------------------------------------------------------

HEAD = '''import contextlib
import gluon_dynbatch as gdb
import cavs_core as cavs
from cavs_core.mxnet_compat import autograd, gluon, mx
nd, nn, rnn, F = mx.nd, gluon.nn, gluon.rnn, mx.nd
nan, inf = float("nan"), float("inf")
'''
TAIL = '''
loop = observe(program, contextlib.nullcontext, data)
batched = observe(program, lambda: gdb.batching({options}), data)
for what in dict.fromkeys([*loop, *batched]):
    want, got = (str(found.get(what, "absent")) for found in (loop, batched))
    print(what, "|", want) if want == got else print(what, "| LOOP", want, "| SCOPE", got)
'''


def pasted(source, options):
    """A whole program: imports, data, code, comparison."""
    words = ", ".join(f"{key}={value!r}" for key, value in options.items())
    helper = inspect.getsource(notes).split('"""', 2)[2].replace("from cavs_core.mxnet_compat import mx\n", "")
    make = '\n\ndef data(values, dtype):\n    return mx.nd.array(np.array(values, dtype), dtype=dtype)\n\n\n'
    extra = ""
    if "cavs_run" in source:
        from . import cavs_loop
        extra = inspect.getsource(cavs_loop).split('"""', 2)[2] + "\n\n"
    return HEAD + helper + make + extra + copy.copy(source) + TAIL.format(options=words)
