"""Public functions used wrongly: each error names the call, what was expected, what came, and the way out."""

import re

import numpy as np
import pytest

import cavs_core as cavs
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import mx

Graph = cavs.InputGraph
ROWS = np.ones((3, 2), "float32")


class Cell(cavs.VertexFunction):
    def vertex(self, F, v):
        v.push(v.pull("words") * 2)


class ByRole(cavs.VertexFunction):
    def vertex(self, F, v):
        v.push(v.pull("leaf") if v.is_leaf else v.pull("inner"))


def run(inputs, graphs=None, cell=Cell):
    return cavs.run(cell([]), [Graph.chain(3)] if graphs is None else graphs, inputs)


@pytest.mark.parametrize("call, words", [
    (lambda: run([ROWS]), ["run(Cell)", "inputs is a list", "expected a dict", '{"x": rows}']),
    (lambda: run(ROWS), ["run(Cell)", "inputs is a ndarray", "expected a dict"]),
    (lambda: run(mx.nd.ones((3, 2))), ["inputs is a NDArray", "expected a dict"]),
    (lambda: run({"words": ROWS, "tags": ROWS}), ["no vertex pulls the input 'tags'", "pulls 'words'. Leave the inp"]),
    (lambda: run({"words": ROWS, "word": ROWS}), ["no vertex pulls the input 'word'", "did you mean 'words'?"]),
    (lambda: run({"word": ROWS}), ["pull('words')", "['word']"]),
    (lambda: run({"words": None}), ["run(Cell): input 'words' is None", "one row per vertex"]),
    (lambda: run({"words": [None]}), ["input 'words' of sample 0 is", "one row per vertex"]),
    (lambda: run({"words": [3]}), ["input 'words' of sample 0", "one row per vertex"]),
    (lambda: run({"words": mx.sym.var("x")}), ["input 'words' is", "one row per vertex"]),
    (lambda: run({"words": [np.ones((1, 2)), np.ones((1, 3))]}, [Graph.chain(1)] * 2), ["(2,)", "(3,)", "one shape"]),
    (lambda: run({"words": mx.nd.ones((3, 2)).tostype("csr")}), ["csr", 'tostype("default")']),
    (lambda: run({"words": ROWS}, 3), ["run(Cell): graphs is a int", "expected an InputGraph", "from_parents"]),
    (lambda: run({"words": ROWS}, {"a": 1}), ["graphs is a dict"]),
    (lambda: run({"words": ROWS}, [[1, -1]]), ["sample 0", "from_parents"]),
    (lambda: run({"words": ROWS}).of("a"), ["RunOutput.of('a')", "integer"]),
    (lambda: Graph.chain(3).children_of("a"), ["vertex 'a'", "integer"]),
    (lambda: Graph.complete_binary_tree(70), ["complete_binary_tree", "depth=70"]),
])
def test_the_cavs_face(call, words):
    with pytest.raises(cavs.DynBatchError) as found:
        call()
    assert [word for word in words if word not in str(found.value)] == []


def test_inputs_that_only_some_roles_pull():
    both = {"leaf": ROWS, "inner": ROWS}
    assert run(both, cell=ByRole).pushed.shape == (3, 2)
    assert run({**both, "leaf": ROWS[:1], "inner": ROWS[:1]}, [Graph.chain(1)], ByRole).pushed.shape == (1, 2)
    with pytest.raises(cavs.RunError, match="no vertex pulls the input 'leaves' .did you mean 'leaf'"):
        run({**both, "leaves": ROWS}, cell=ByRole)


@pytest.mark.parametrize("shapes", [None, 3, [3], (3,), "ab", ["ab"], [(1.5,)], [(-1,)], [(0,)]], ids=repr)
def test_state_shapes(shapes):
    with pytest.raises(ValueError, match=re.escape(f"Cell(state_shapes={shapes!r}): e")):
        Cell(shapes)


@pytest.mark.parametrize("option, value", [
    ("max_pending", "a"), ("max_pending", 1.5), ("max_pending", True), ("max_pending", 0), ("analysis_budget", "x"),
    ("analysis_budget", None), ("analysis_budget", float("nan")), ("check", "yes"), ("drop_repeats", "no"),
    ("policy", 1), ("policy", ["auto"]), ("backend", None), ("granularity", {})])
def test_options_of_a_scope(option, value):
    with pytest.raises(ValueError, match=re.escape(f"batching({option}={value!r}): expected ")):
        with gdb.batching(**{option: value}):
            pass


def test_profiles(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000 + "]" * 100_000)
    for path, words in ((deep, "is not a profile .maximum recursion"), (5, "profile=5: expected the path"),
                        ("a\0b", "cannot be read .embedded null byte"), (tmp_path, "cannot be read"),
                        (str(tmp_path / "none"), "cannot be read .No such file.*dynbatch tune")):
        with pytest.raises(gdb.DynBatchError, match=words):
            with gdb.batching(profile=path):
                pass


def test_what_is_tuned():
    for arguments, words in (((1, [2]), "tune: expected a function of one sample, got 1"),
                             ((lambda x: x, 3), "tune: expected a list of samples, got 3"),
                             ((lambda x: x, []), "tune: there are no samples")):
        with pytest.raises((TypeError, ValueError), match=words):
            gdb.tune(*arguments)


def test_what_is_marked():
    for target in (3, "name", [1], mx.nd.ones((1,))):
        with pytest.raises(TypeError, match=r"@gdb.vertex: expected a HybridBlock or a function f\(F, \*arrays\), got"):
            gdb.vertex(target)
