"""The arrows between our files: who may import whom, no cycles, public names exist, no file outgrows its idea."""

import ast
import graphlib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cavs_core", "gluon_dynbatch")
COMPAT = "cavs_core.mxnet_compat"
PURE = {f"cavs_core.{name}" for name in (
    "graph", "schedule", "layout", "graph_layout", "distinct", "batches", "program", "partition", "autodiff")}
MAX_LINES = 450


# ---- reading sources ----------------------------------------------------------------------------------------------

class Import(NamedTuple):
    line: int
    module: str            # absolute
    name: str              # "" for `import module`
    alias: str             # what it is called here
    at_load: bool          # runs when the module is loaded, so it can close a cycle


def parse(sources):
    """{module: source text} -> {module: tree}. A package is named with its `__init__`: "cavs_core.ops.__init__"."""
    return {module: ast.parse(text, module) for module, text in sources.items()}


def imports_of(module, tree):
    found, todo = [], [(tree, True)]
    while todo:
        node, at_load = todo.pop()
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, a.name, "", a.asname or a.name.partition(".")[0], at_load)
                      for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[:-node.level]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            found += [Import(node.lineno, origin, a.name, a.asname or a.name, at_load) for a in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += [(child, False) for child in node.body] + [(child, at_load) for child in node.orelse]
        else:
            inside = at_load and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            todo += [(child, inside) for child in ast.iter_child_nodes(node)]
    return sorted(found)


def public_names(tree):
    """The names in a module's `__all__`; None when it has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def defined_names(tree):
    names, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names}
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            todo += ast.iter_child_nodes(node)
    return names


def full(an_import, modules):
    """The module an import loads: `from .a import b` loads a.b when that is a module, else a."""
    longer = f"{an_import.module}.{an_import.name}"
    return longer if longer in modules or f"{longer}.__init__" in modules else an_import.module


def inside(module, package):
    return module == package or module.startswith(package + ".")


# ---- the rules: each gives a list of sentences, empty when all is well ----------------------------------------------

def wrong_arrows(trees):
    public = public_names(trees["cavs_core.__init__"]) or [] if "cavs_core.__init__" in trees else []
    wrong = []
    for module, tree in trees.items():
        for i in imports_of(module, tree):
            at, target = f"{module}:{i.line}", full(i, trees)
            if inside(module, "cavs_core") and inside(target, "gluon_dynbatch"):
                wrong.append(f"{at} imports {target}: the engine knows nothing of the Gluon face")
            if inside(target, "mxnet") and module != COMPAT:
                wrong.append(f"{at} imports {target}: take mx from {COMPAT}")
            if module in PURE and inside(target, COMPAT):
                wrong.append(f"{at} imports {COMPAT}: this file is pure")
            if inside(module, "gluon_dynbatch") and inside(target, "cavs_core") and target != COMPAT:
                named = i.module == "cavs_core" and i.name in public        # also where a file has the same name
                if not named and (target != "cavs_core" or i.name):
                    wrong.append(f"{at} imports {i.name or target} of {i.module}: it is not public in cavs_core")
                elif not i.name:
                    wrong += [f"{module}:{line} uses {i.alias}.{attr}: it is not public in cavs_core"
                              for line, attr in attributes_of(i.alias, tree) if attr not in [*public, "mxnet_compat"]]
    return wrong


def attributes_of(alias, tree):
    return sorted((node.lineno, node.attr) for node in ast.walk(tree)
                  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == alias)


def import_cycles(trees):
    """Cycles of imports that run when modules are loaded; loading a.b.c also loads a and a.b, unless we are in them."""
    arrows = {module: set() for module in trees}
    for module, tree in trees.items():
        for i in imports_of(module, tree):
            if not i.at_load:
                continue
            parts = full(i, trees).split(".")
            loaded = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            own = {target for target in loaded if inside(module, target)} - {full(i, trees)}
            targets = {t if t in trees else f"{t}.__init__" for t in loaded - own}
            arrows[module] |= (targets & set(trees)) - {module}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as err:
        return [" <- ".join(err.args[1])]
    return []


def missing_public_names(trees):
    wrong = []
    for module, tree in trees.items():
        package = module[:-len("__init__")] if module.endswith(".__init__") else module + "."
        submodules = {name[len(package):].partition(".")[0] for name in trees if name.startswith(package)}
        wrong += [f"{module}: __all__ has {name}, which it does not define"
                  for name in public_names(tree) or [] if name not in defined_names(tree) | submodules]
    return wrong


def long_files(sources):
    return [f"{module} has {text.count(chr(10))} lines; above {MAX_LINES} it is two ideas"
            for module, text in sources.items() if text.count("\n") > MAX_LINES]


# ---- our files ----------------------------------------------------------------------------------------------------

def read(*folders):
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
            for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


@pytest.fixture(scope="module")
def packages():
    return read(*PACKAGES)


def test_arrows():
    assert wrong_arrows(parse(read(*PACKAGES, "tests", "examples", "benchmarks"))) == []


def test_no_import_cycles(packages):
    assert import_cycles(parse(packages)) == []


def test_public_names_exist(packages):
    assert missing_public_names(parse(packages)) == []


def test_no_file_is_too_long(packages):
    assert long_files(packages) == []


def test_something_was_read(packages):
    assert COMPAT in packages and "cavs_core.__init__" in packages


# ---- the checker itself, on small bad sources -----------------------------------------------------------------------

GOOD = {
    "cavs_core.__init__": "from .graph import Graph\n__all__ = ['Graph', 'ops']\n",
    "cavs_core.mxnet_compat": "def f():\n    import mxnet\n",
    "cavs_core.errors": "from .mxnet_compat import MXNetError\n",
    "cavs_core.graph": "from .errors import GraphError\nclass Graph: pass\n",
    "cavs_core.ops.__init__": "from . import table\nfrom .linear import dense\n__all__ = ['dense']\n",
    "cavs_core.ops.table": "import numpy\n",
    "cavs_core.ops.linear": "from . import table\nfrom ..graph import Graph\ndense = 1\n",
    "gluon_dynbatch.__init__": "import cavs_core as cavs\nfrom cavs_core import Graph\nG = cavs.Graph\n",
    "gluon_dynbatch.recorder": "from cavs_core.mxnet_compat import mx\nfrom cavs_core import mxnet_compat\n",
    "tests.test_x": "from cavs_core.graph import Graph\nfrom cavs_core.mxnet_compat import mx\n",
}


def test_checker_accepts_good_sources():
    trees = parse(GOOD)
    assert wrong_arrows(trees) == import_cycles(trees) == missing_public_names(trees) == long_files(GOOD) == []


@pytest.mark.parametrize("module, text, said", [
    ("cavs_core.graph", "import gluon_dynbatch.policies", "cavs_core.graph:1 imports gluon_dynbatch.policies"),
    ("cavs_core.graph", "def f():\n    from gluon_dynbatch import vertex", "cavs_core.graph:2 imports gluon_dynbatch"),
    ("cavs_core.tape", "from mxnet import autograd", "take mx from"),
    ("cavs_core.tape", "import numpy, mxnet.ndarray as nd", "take mx from"),
    ("gluon_dynbatch.recorder", "try:\n    import mxnet as mx\nexcept ImportError: pass", "take mx from"),
    ("tests.test_x", "import mxnet", "take mx from"),
    ("examples.demo", "from mxnet.gluon import nn", "take mx from"),
    ("cavs_core.schedule", "from .mxnet_compat import mx", "this file is pure"),
    ("cavs_core.layout", "from . import mxnet_compat", "this file is pure"),
    ("cavs_core.autodiff", "import cavs_core.mxnet_compat", "this file is pure"),
    ("gluon_dynbatch.vertex", "from cavs_core import Secret", "imports Secret of cavs_core: it is not public"),
    ("gluon_dynbatch.vertex", "from cavs_core.graph import Graph", "imports Graph of cavs_core.graph"),
    ("gluon_dynbatch.vertex", "from cavs_core import graph", "imports graph of cavs_core"),
    ("gluon_dynbatch.vertex", "import cavs_core.graph", "imports cavs_core.graph of cavs_core.graph"),
    ("gluon_dynbatch.vertex", "import cavs_core as cavs\ncavs.Graph\ncavs.lazy.hook()", ":3 uses cavs.lazy"),
])
def test_checker_finds_a_wrong_arrow(module, text, said):
    wrong = wrong_arrows(parse({**GOOD, module: text}))
    assert len(wrong) == 1 and said in wrong[0]


@pytest.mark.parametrize("changes, members", [
    ({"cavs_core.errors": "from .graph import Graph"}, {"cavs_core.errors", "cavs_core.graph"}),
    ({"cavs_core.graph": "from cavs_core import ops"}, {"cavs_core.graph", "cavs_core.ops.linear"}),
    ({"cavs_core.graph": "from .ops.table import x"}, {"cavs_core.graph", "cavs_core.ops.__init__"}),
    ({"cavs_core.graph": "from . import Graph"}, {"cavs_core.graph", "cavs_core.__init__"}),
    ({"cavs_core.errors": "try:\n    import cavs_core.graph\nfinally: pass"}, {"cavs_core.errors", "cavs_core.graph"}),
])
def test_checker_finds_a_cycle(changes, members):
    cycle, = import_cycles(parse({**GOOD, **changes}))
    assert members <= set(cycle.split(" <- "))


@pytest.mark.parametrize("text", [
    "def f():\n    from .graph import Graph",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .graph import Graph",
])
def test_a_late_import_closes_no_cycle(text):
    assert import_cycles(parse({**GOOD, "cavs_core.errors": text})) == []


def test_checker_finds_missing_names_and_long_files():
    bad = {"cavs_core.a": "from x import y as z\n__all__ = ['z', 'y']\n" + "#\n" * MAX_LINES}
    assert missing_public_names(parse(bad)) == ["cavs_core.a: __all__ has y, which it does not define"]
    assert long_files(bad) == ["cavs_core.a has 452 lines; above 450 it is two ideas"]
