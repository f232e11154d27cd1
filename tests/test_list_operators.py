"""add_n and concat: a scope sees their calls before MXNet looks at every argument."""

import threading

import numpy as np
import pytest

import gluon_dynbatch as gdb
from cavs_core import LazyArray
from cavs_core.mxnet_compat import autograd, mx

nd = mx.nd
FUNCTIONS = ("add_n", "ElementWiseSum", "concat", "Concat")
TERMS = (1, 2, 7, 8, 9, 32, 33, 40)


def made_of(function, xs, counts, **attrs):
    return [function(*[nd.tanh(x) for x in xs[:count]], **attrs) for count in counts]


def check(forward, shape=(1, 3)):
    """Values and gradients of what a scope made are those of the loop."""
    found = []
    for scope in (False, True):
        xs = [nd.array(np.random.RandomState(k).normal(size=shape)) for k in range(40)]
        for x in xs:
            x.attach_grad()
        with autograd.record():
            if scope:
                with gdb.batching() as made:
                    results = forward(xs)
            else:
                results = forward(xs)
            loss = sum([(r * r).sum() for r in results])
        loss.backward()
        found.append([r.asnumpy() for r in results] + [x.grad.asnumpy() for x in xs])
    for have, want in zip(*found[::-1]):
        assert have.shape == want.shape and have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
    return made


@pytest.mark.parametrize("shape", [(1, 3), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("name, attrs", [("add_n", {}), ("ElementWiseSum", {}), ("concat", {"dim": 0}),
                                         ("Concat", {"dim": 0}), ("add_n", {"name": "total"}),
                                         ("concat", {"dim": 0, "name": "joined"})], ids=str)
def test_any_number_of_values(name, attrs, shape):
    check(lambda xs: made_of(getattr(nd, name), xs, TERMS, **attrs), shape)


@pytest.mark.parametrize("attrs", [{"dim": 1}, {"dim": "1"}, {}], ids=str)
def test_values_side_by_side(attrs):
    check(lambda xs: made_of(nd.concat, xs, (2, 3, 2, 3, 40), **attrs))


def test_sums_of_all_lengths_share_a_launch():
    scope = check(lambda xs: made_of(nd.add_n, xs, TERMS) + made_of(nd.ElementWiseSum, xs, TERMS))
    assert [launch.calls for launch in scope.flushes[0].launches if launch.title == "add_n"] == [2 * len(TERMS)]


def test_values_and_outside_arrays():
    def forward(xs):
        y = nd.tanh(xs[0])
        return [nd.add_n(y, xs[1], y, xs[2]), nd.add_n(*xs), nd.add_n(y, xs[1], y, xs[2]), nd.concat(xs[3], y, dim=0)]

    check(forward)


def test_values_of_two_kinds():
    def forward(xs):
        rows, sums = [nd.tanh(x) for x in xs[:3]], [nd.sum(x, axis=1) for x in xs[:3]]
        return [nd.add_n(*rows), nd.add_n(*sums), nd.add_n(*rows), nd.add_n(*sums, sums[0])]

    check(forward)


def test_out_is_written():
    out = nd.zeros((1, 3))
    with gdb.batching():
        x = nd.tanh(nd.ones((1, 3)))
        nd.add_n(x, x)
        assert nd.add_n(x, x, out=out) is out
    np.testing.assert_allclose(out.asnumpy(), 2 * np.tanh(1), rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wrong", [3, "x", None, np.ones((1, 3)), [0]], ids=repr)
def test_an_argument_that_is_no_array_is_told_as_ever(name, wrong):
    function = getattr(nd, name)
    with pytest.raises(AssertionError) as outside:
        function(nd.ones((1, 3)), wrong)
    with pytest.raises(AssertionError) as inside, gdb.batching():
        x = nd.tanh(nd.ones((1, 3)))
        function(x, x)
        function(x, wrong)
    assert str(inside.value) == str(outside.value)


def test_arrays_of_numpy_are_refused_as_ever():
    x = mx.np.ones((1, 3))
    with pytest.raises(TypeError), gdb.batching():
        nd.concat(nd.tanh(nd.ones((1, 3))), x, dim=0)


def test_an_unknown_attribute_is_told():
    with pytest.raises(Exception, match="depth"), gdb.batching():
        x = nd.tanh(nd.ones((1, 3)))
        nd.concat(x, x, depth=0).asnumpy()


def test_functions_keep_their_places_and_get_their_code_back():
    functions = [getattr(nd, name) for name in FUNCTIONS]
    codes = [f.__code__ for f in functions]
    taken = nd.add_n
    with gdb.batching():
        assert [getattr(nd, name) for name in FUNCTIONS] == functions
        x = nd.tanh(nd.ones((1, 3)))
        assert type(taken(x, x)) is LazyArray
    assert [f.__code__ for f in functions] == codes
    with pytest.raises(ZeroDivisionError), gdb.batching():
        raise ZeroDivisionError
    assert [f.__code__ for f in functions] == codes
    assert type(taken(nd.ones(2), nd.ones(2))) is nd.NDArray


def test_somebody_else_may_have_put_another_function_there(monkeypatch):
    called, original = [], nd.add_n

    def mine(*args, **kwargs):
        called.append(len(args))
        return original(*args, **kwargs)

    monkeypatch.setattr(nd, "add_n", mine)
    check(lambda xs: made_of(nd.add_n, xs, TERMS))
    assert called == [*TERMS, *TERMS]


def test_other_threads_are_untouched():
    seen = []

    def work():
        y = nd.add_n(nd.ones(2), nd.ones(2), nd.ones(2))
        seen.append((type(y), y.asnumpy().tolist()))

    with gdb.batching():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [(nd.NDArray, [3.0, 3.0])]


def test_a_sum_of_values_that_another_thread_has_asked_for():
    with gdb.batching():
        xs = [nd.tanh(nd.ones((1, 3)) * k) for k in range(3)]
        nd.add_n(*xs)
        thread = threading.Thread(target=xs[1].asnumpy)
        thread.start()
        thread.join()
        total = nd.add_n(*xs)
    np.testing.assert_allclose(total.asnumpy(), np.tanh([[0.0]]) + np.tanh(1) + np.tanh([[2.0] * 3]), rtol=1e-6)
