"""The documentation is true: its Python blocks run and print what the page says, and its links lead somewhere.

Blocks of one page share a namespace, in order. What a block prints is checked where the page says it: by a ``text``
block right behind it, or by the comments behind `print(...)` lines, one line of output each.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

from cavs_core.mxnet_compat import mx
from cavs_core.ops import TABLE
from gluon_dynbatch import auto

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
_PRINT = re.compile(r"^ *print\(.*\) +# (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_FILE = re.compile(r"`((?:cavs_core|gluon_dynbatch|tests|examples|docs|benchmarks)/[\w/]*\.?\w*)`")
_TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def blocks(text):
    """(line, source, expected lines or None) of each Python block."""
    for found in _BLOCK.finditer(text):
        source, printed = found.groups()
        expected = printed.splitlines() if printed is not None else _PRINT.findall(source) or None
        yield text[:found.start(1)].count("\n"), source, expected


def run_page(text, name):
    """Run the blocks of a page; a sentence for each block that prints something else than the page says."""
    namespace, wrong = {"__name__": "page"}, []
    for line, source, expected in blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), mx.cpu():     # a GPU draws other random numbers
            exec(compile("\n" * line + source, name, "exec"), namespace)
        lines = [x.rstrip() for x in printed.getvalue().splitlines()]
        if expected is not None and lines != [x.rstrip() for x in expected]:
            wrong.append(f"{name}, block at line {line + 1}, printed\n" + "\n".join(lines))
    return wrong


@pytest.fixture
def same_op_table():
    """A page may register an op; it is gone afterwards."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run_and_print_what_the_page_says(page, same_op_table, monkeypatch):
    monkeypatch.setattr(auto, "KNOWN", 1000)        # which methods it tries then depends on the clock
    mx.random.seed(0)
    assert run_page(page.read_text(encoding="utf-8"), page.name) == []


def slugs(text):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(text, folder):
    wrong = []
    for target, anchor in _LINK.findall(text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = folder / target if target else None
        if path is not None and not path.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in slugs(path.read_text(encoding="utf-8") if path else text):
            wrong.append(f"{target}#{anchor}: no such heading")
    wrong += [f"`{name}`: no such file" for name in _FILE.findall(text) if not (ROOT / name).exists()]
    for name, test in _TEST.findall(text):
        if not (ROOT / name).exists() or f"def {test}(" not in (ROOT / name).read_text(encoding="utf-8"):
            wrong.append(f"`{name}::{test}`: no such test")
    return wrong


@pytest.mark.parametrize("page", LINKING, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    assert broken_links(page.read_text(encoding="utf-8"), page.parent) == []


# ---- the checkers themselves -----------------------------------------------------------------


@pytest.mark.parametrize("page, wrong", [
    ("```python\nx = 1\n```\n\n```python\nprint(x + 1)    # 2\n```\n", 0),
    ("```python\nprint(1 + 1)    # 3\n```\n", 1),
    ("```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```\n", 0),
    ("```python\nprint(1)\n```\n\n```text\n1\n2\n```\n", 1),
    ("```python\nprint('nobody says what')\n```\n\nwords\n\n```text\nsomething else\n```\n", 0),
])
def test_checker_compares_what_is_printed(page, wrong):
    assert len(run_page(page, "page")) == wrong


def test_checker_raises_what_a_block_raises():
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", "page")


@pytest.mark.parametrize("text, wrong", [
    ("[a](README.md) [b](docs/glossary.md#glossary) [c](https://example.org/x)", 0),
    ("[a](missing.md)", 1), ("[a](README.md#no-such-heading)", 1), ("`cavs_core/missing.py`", 1),
    ("`tests/test_docs.py::test_links_lead_somewhere`", 0), ("`tests/test_docs.py::test_missing`", 1),
])
def test_checker_finds_broken_links(text, wrong):
    assert len(broken_links(text, ROOT)) == wrong
