"""Marked blocks, functions and methods in C and in Python: they look and behave as before; and all works without C."""

import copy
import functools
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import Listener, listening
from cavs_core.mxnet_compat import autograd, gluon, mx
from gluon_dynbatch import fastpath

ROOT = Path(__file__).resolve().parent.parent
nd = mx.nd
pytestmark = pytest.mark.usefixtures("variant")


class Plain(gluon.HybridBlock):
    """A cell."""

    def hybrid_forward(self, F, x, y):
        return F.tanh(x) + y


def marked_class():
    return gdb.vertex(type("Marked", (Plain,), {"__doc__": "A cell."}))


MARKED = {"class": lambda: marked_class()(), "instance": lambda: gdb.vertex(Plain()),
          "named": lambda: gdb.vertex(name="cell")(Plain())}


@pytest.fixture(params=MARKED)
def cell(request):
    return MARKED[request.param]()


def calls_of(work):
    """How many calls a scope records, and the values."""
    x = nd.array([1.0])
    with gdb.batching() as scope:
        out = [work(x) for _ in range(4)]
    np.testing.assert_allclose([y.asscalar() for y in out], [np.tanh(1) + 1] * 4, rtol=1e-5)
    return scope.stats.calls, dict(scope.stats.fallbacks)


def test_it_is_compiled_where_it_can_be(cell, variant):
    call = type(cell).__dict__["__call__"]
    assert inspect.isfunction(call) == (variant == "generated")


def test_it_looks_like_the_method_it_replaces(cell):
    call = type(cell).__call__
    assert (call.__name__, call.__doc__) == ("__call__", gluon.Block.__call__.__doc__)
    assert call.__qualname__ == "Block.__call__" and call.__module__ == gluon.Block.__call__.__module__
    assert inspect.unwrap(call) is gluon.Block.__call__ and call.__wrapped__
    assert list(inspect.signature(call).parameters) == ["self", "args"]
    assert (type(cell).__name__ in ("Marked", "Plain")) and type(cell).__doc__ == "A cell."


def test_own_calls_keep_their_name_and_doc():
    class Own(Plain):
        def __call__(self, x, y):
            """Ours."""
            return super().__call__(x, y)

    marked = gdb.vertex(Own)
    assert marked.__call__.__doc__ == "Ours."
    assert list(inspect.signature(marked.__call__).parameters) == ["self", "x", "y"]
    assert calls_of(lambda x: marked()(x, x)) == (4, {})


@pytest.mark.parametrize("way", [
    lambda cell, x: cell(x, x), lambda cell, x: cell.__call__(x, x), lambda cell, x: type(cell).__call__(cell, x, x),
    lambda cell, x: next(map(cell, [x], [x])), lambda cell, x: cell(*[x, x], **{}),
    lambda cell, x: type(cell).__call__.__get__(cell)(x, x), lambda cell, x: super(type(cell), cell).__call__(x, x)],
    ids=["call", "bound", "of the class", "map", "star", "get", "super"])
def test_ways_to_call(cell, way, request):
    calls, fallbacks = calls_of(lambda x: way(cell, x))
    assert not fallbacks and (calls == 4 or "super" in request.node.name)      # super() is not marked: its operators
    assert way(cell, nd.array([1.0])).asscalar() == pytest.approx(np.tanh(1) + 1)


@pytest.mark.parametrize("listening_now", [False, True])
def test_wrong_calls_raise_as_before(cell, listening_now):
    """Positions only, as in `Block.__call__`; the rest is said by whoever takes the arguments."""
    x = nd.array([1.0])

    def check():
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            cell(x, y=x)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'self'"):
            type(cell).__call__()
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
            cell(x)

    if listening_now:
        with gdb.batching():
            check()
            cell(x, x), cell(x, x)
            check()
    check()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_go_the_long_way(cell, kind):
    """A hook sees every call, also where calls had gone the short way before; without it they do again."""
    x, seen = nd.array([1.0]), []
    with gdb.batching() as scope:
        cell(x, x), cell(x, x)
        handle = getattr(cell, kind)(lambda *args: seen.append(len(args)))
        out = [cell(x, x) for _ in range(3)]
        handle.detach()
        out += [cell(x, x) for _ in range(2)]
    assert len(seen) == 3 and scope.stats.calls == 4 + 3 * 2       # the vertex; with a hook its two operators
    assert {y.asscalar() for y in out} == {out[0].asscalar()}


def test_a_block_without_init_is_an_error_as_before():
    broken = marked_class().__new__(marked_class())
    with gdb.batching(), pytest.raises(AttributeError):
        broken(nd.array([1.0]), nd.array([1.0]))


def test_subclasses():
    base, seen = marked_class(), []

    class Other(base):
        def __call__(self, *args):
            seen.append(len(args))
            return super().__call__(*args)

    class Child(base):
        def hybrid_forward(self, F, x, y):
            return super().hybrid_forward(F, x, y) * 1

    other, child = Other(), Child()
    assert calls_of(lambda x: other(x, x)) == calls_of(lambda x: child(x, x)) == (4, {})
    assert seen == [2] * 4


def test_other_listeners_see_the_block(cell):
    class Ears(Listener):
        def on_block(self, block, args, call):
            seen.append(block)
            return call()

    seen, x = [], nd.array([1.0])
    with listening(Ears()):
        cell(x, x)
    assert seen == [cell]


def test_other_threads_and_hybridized_blocks(cell):
    x, out = nd.array([1.0]), []
    cell.hybridize()
    with gdb.batching() as scope:
        mine = cell(x, x)
        thread = threading.Thread(target=lambda: out.append(cell(x, x).asscalar()))
        thread.start()
        thread.join()
    assert out == [mine.asscalar()] and scope.stats.calls == 1


def test_blocks_are_copied():
    cell, x = marked_class()(), nd.array([1.0])
    assert copy.copy(cell)(x, x).asscalar() == cell(x, x).asscalar()


def test_attributes_of_the_call(variant):
    call = marked_class().__call__
    call.note = 5
    assert call.note == 5 and call.__dict__["note"] == 5
    with pytest.raises(AttributeError):
        call.nothing  # noqa: B018


# ---- functions and methods ---------------------------------------------------------------------------


class Walker:
    """No block at all: two marked methods, and a marked function in its class."""

    def __init__(self, scale):
        self.scale = scale

    @gdb.vertex
    def first(self, F, x, y):
        """The first."""
        return F.tanh(x) + y * self.scale

    @gdb.vertex(name="second one")
    def second(self, F, x, y):
        return F.tanh(x) - y * self.scale


def make_walkers():
    """The classes are made anew, so that their methods are of the variant."""
    first, second = Walker.first.__wrapped__, Walker.second.__wrapped__
    made = type("Made", (Walker,), {"first": gdb.vertex(first), "second": gdb.vertex(second, name="second one")})
    return made(1), made(2)


def test_methods_and_objects_are_told_apart(variant):
    one, two = make_walkers()
    x = nd.array([1.0])

    def work():
        return [y.asscalar() for _ in range(3) for y in (
            one.first(nd, x, x), two.first(nd, x, x), one.second(nd, x, x), type(one).first(two, nd, x, x))]

    want = work()
    np.testing.assert_allclose(want[:4], np.tanh(1) + np.array([1, 2, -1, 2]), rtol=1e-5)
    with gdb.batching() as scope:
        made = [f(nd, x, x) for _ in range(3) for f in (one.first, two.first, one.second, two.first)]
    assert [y.asscalar() for y in made] == pytest.approx(want)
    assert scope.stats.calls == 12 and not scope.stats.fallbacks
    assert inspect.isfunction(type(one).__dict__["first"]) is False and ("second one" in scope.explain())


def test_a_function_is_called_without_an_object(variant):
    @gdb.vertex
    def double(F, x):
        return x * 2

    x = nd.array([1.0])
    with gdb.batching() as scope:
        out = [double(nd, x) for _ in range(4)]
    assert [y.asscalar() for y in out] == [2] * 4 and scope.stats.calls == 4
    assert (double.__name__, double(nd, x).asscalar()) == ("double", 2)


def test_a_method_looks_like_itself(variant):
    one, _ = make_walkers()
    assert (type(one).first.__name__, type(one).first.__doc__) == ("first", "The first.")
    assert list(inspect.signature(type(one).first).parameters) == ["self", "F", "x", "y"]


@pytest.mark.parametrize("listening_now", [False, True])
def test_wrong_calls_of_methods_say_what_is_wrong(variant, listening_now):
    one, _ = make_walkers()
    x = nd.array([1.0])

    @gdb.vertex
    def double(F, x):
        return x * 2

    def check():
        with pytest.raises(TypeError, match=r"takes its arguments by position, got \['y'\]"):
            one.first(nd, x, y=x)
        with pytest.raises(TypeError, match=r"first: the first argument of a vertex function is F = mx.nd, got \n\[1"):
            one.first(x, x)
        with pytest.raises(TypeError, match="first argument of a vertex function is F = mx.nd, got 'nothing'"):
            one.first()
        with pytest.raises(TypeError, match="double: the first argument"):
            double(x)
        with pytest.raises(TypeError, match="double: the first argument"):
            double(x, x)
        with pytest.raises(TypeError, match="got 'nothing'"):
            double()

    if listening_now:
        with gdb.batching():
            one.first(nd, x, x), one.first(nd, x, x), double(nd, x), double(nd, x)
            check()
    check()


# ---- without the extension -------------------------------------------------------------------------

TRAINING = """
import sys, types
if sys.argv[1] != "compiled":
    sys.modules["gluon_dynbatch._fastpath"] = types.ModuleType("older") if sys.argv[1] == "stale" else None
import numpy as np
import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

assert (gdb.fastpath.compiled is None) == (sys.argv[1] != "compiled")

@gdb.vertex
class Cell(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="cell_")
        self.dense = gluon.nn.Dense(3, in_units=3, prefix="dense_")

    def hybrid_forward(self, F, x, children):
        return F.tanh(self.dense(x) + F.add_n(*children)), x * 2

cell, rng = Cell(), np.random.RandomState(0)
cell.initialize()
for p in cell.collect_params().values():
    p.set_data(mx.nd.array(rng.normal(size=p.shape)))
trainer = gluon.Trainer(cell.collect_params(), "sgd", {"learning_rate": 0.1})
for step in range(3):
    with autograd.record(), gdb.batching() as scope:
        losses = []
        for sample in range(4):
            states = [mx.nd.ones((1, 3)) * sample]
            for k in range(6):
                h, wide = cell(mx.nd.ones((1, 3)) * k, states[-1 - sample % 3:])
                states.append(h)
            losses.append((mx.nd.concat(*states, dim=0) ** 2).sum() + wide.sum() * 1.5)
    autograd.backward(losses)
    trainer.step(4)
print([float(x.asscalar()) for x in losses], [p.data().asnumpy().tolist() for p in cell.collect_params().values()],
      scope.stats.calls, scope.stats.launches, scope.stats.fallbacks)
print("recorded by Python code" in scope.explain())
"""


@functools.cache
def train(variant):
    """What a process prints that trains with the extension or without it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DYNBATCH_BACKEND": "mxnet"}
    done = subprocess.run([sys.executable, "-c", TRAINING, variant], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_training_without_the_extension(variant):
    trained, says_so = train(variant)
    assert says_so == str(variant == "generated") and trained == train("generated")[0]


def test_an_extension_of_an_older_source_is_not_used():
    assert train("stale") == train("generated")


def test_explain_says_who_records(variant):
    with gdb.batching() as scope:
        nd.ones((1,)) * 2
    lines = scope.explain().splitlines()
    said = ("calls are recorded by Python code, which is slower: the package was installed without a C compiler, or is "
            "newer than what was compiled; install it again")
    assert lines[1:2] == ([said] if variant == "generated" else [""])
    assert scope.explain().split("\n\n")[1].startswith("flush 0")


def test_explain_says_when_openmp_may_spin(monkeypatch):
    monkeypatch.setattr("gluon_dynbatch.report.openmp_spins", True)
    for backend in ("mxnet", "native"):
        with gdb.batching(backend=backend) as scope:
            nd.ones((1,)) * 2
        assert ("import gluon_dynbatch before it" in scope.explain()) == (backend == "native")


def test_compiled_is_a_module_or_none():
    assert fastpath.compiled is None or fastpath.compiled.__name__ == "gluon_dynbatch._fastpath"


def test_gradients_are_those_of_the_loop(cell):
    x = nd.array([0.5])
    x.attach_grad()

    def grad(batched):
        with autograd.record():
            if batched:
                with gdb.batching():
                    y = cell(cell(x, x), x)
            else:
                y = cell(cell(x, x), x)
        y.backward()
        return x.grad.asscalar()

    assert grad(True) == pytest.approx(grad(False), rel=1e-5)
