"""Rolling: programs traced with lists of several lengths become one over any number of elements."""

import pytest

from cavs_core import Spec, agrees, roll, trace
from cavs_core.mxnet_compat import gluon

nn = gluon.nn
ROW = Spec((1, 4), "float32")


def dense(units, **options):
    layer = nn.Dense(units, in_units=4, **options)
    layer.initialize()
    return layer


def traced(fn, count, slots=1, outside=1):
    """The program of fn(F, x, elements) for a list of so many elements of so many arrays each."""
    def call(F, *arrays):
        parts = arrays[outside:]
        elements = [parts[k:k + slots] if slots > 1 else parts[k] for k in range(0, len(parts), slots)]
        return fn(F, *arrays[:outside], elements)

    return trace(call, *[ROW] * (outside + count * slots))


def places(count, slots=1, outside=1):
    return [[outside + e * slots + k for k in range(slots)] for e in range(count)]


def rolled(fn, count=2, slots=1, outside=1):
    return roll(traced(fn, count, slots, outside), places(count, slots, outside), outside + count * slots)


def fits(program, fn, count, slots=1, outside=1):
    return agrees(program, traced(fn, count, slots, outside), places(count, slots, outside), outside + count * slots)


W, U = dense(4), dense(4, use_bias=False)


def child_sum(F, x, children):
    """A child-sum cell: the sum of all h, and a gate for each c."""
    total = U(F.add_n(*[h for h, _ in children]))
    c = F.tanh(W(x) + total)
    for h, below in children:
        c = c + F.sigmoid(x + U(h)) * below
    return F.tanh(c), c


def test_a_child_sum_cell_is_one_program_for_all_lengths():
    program = rolled(child_sum, slots=2)
    ops = [instr.op for instr in program.instrs]
    assert ops.count("matmul") == 3 and ops.count("child_sum") == 2 and ops.count("spread") == 1
    assert all(fits(program, child_sum, count, slots=2) for count in (1, 2, 3, 7))
    assert str(rolled(child_sum, 5, slots=2)) == str(program)


@pytest.mark.parametrize("order", [reversed, lambda children: children[1:] + children[:1]])
def test_the_order_of_a_sum_does_not_matter(order):
    def other(F, x, children):
        return child_sum(F, x, list(order(children)))

    assert fits(rolled(child_sum, slots=2), other, 3, slots=2)


def test_a_pool_over_the_list_alone():
    def pool(F, x, children):
        return F.relu(F.add_n(*children)) + x

    program = rolled(pool)
    assert all(fits(program, pool, count) for count in (1, 2, 4))


@pytest.mark.parametrize("fn", [
    pytest.param(lambda F, x, hs: hs[0] * hs[1], id="a product of two elements"),
    pytest.param(lambda F, x, hs: x + hs[0] + hs[0] + hs[1], id="one element twice"),
    pytest.param(lambda F, x, hs: x + F.tanh(hs[0]) + hs[1], id="elements treated differently"),
    pytest.param(lambda F, x, hs: x + hs[0], id="an element unused"),
    pytest.param(lambda F, x, hs: F.concat(*hs, dim=1), id="joined"),
    pytest.param(lambda F, x, hs: hs[0] - hs[1], id="a difference"),
    pytest.param(lambda F, x, hs: F.tanh(hs[0] + x), id="a result of one element"),
    pytest.param(lambda F, x, hs: x + F.add_n(*[F.Dropout(h, p=0.5, mode="always") for h in hs]), id="random"),
])
def test_what_is_no_sum_over_equals_is_not_rolled(fn):
    assert rolled(fn) is None


@pytest.mark.parametrize("other", [
    pytest.param(lambda F, x, hs: x + F.add_n(*hs) / len(hs), id="the length is a number in the program"),
    pytest.param(lambda F, x, hs: x * len(hs) + F.add_n(*hs), id="the length beside the sum"),
    pytest.param(lambda F, x, hs: sum((x + h for h in hs[1:]), x + hs[0]), id="x once an element"),
    pytest.param(lambda F, x, hs: x + x + F.add_n(*hs), id="x twice"),
    pytest.param(lambda F, x, hs: x + F.add_n(*hs) + hs[0], id="more of the first"),
    pytest.param(lambda F, x, hs: x + F.add_n(*[F.relu(h) for h in hs]), id="another function"),
    pytest.param(lambda F, x, hs: F.add_n(*hs), id="without x"),
])
def test_lengths_that_do_something_else_are_told_apart(other):
    program = rolled(lambda F, x, hs: x + F.add_n(*hs))
    assert not fits(program, other, 3)
    made = rolled(other)            # if length 2 has a program of its own, length 3 may still differ from it
    assert made is None or fits(made, other, 2)


def test_what_is_added_once_an_element():
    """x, and the bias of a layer, as often as there are elements."""
    def fn(F, x, hs):
        total = x
        for h in hs:
            total = total + (x + W(h))
        return F.tanh(total)

    program = rolled(fn)
    assert all(fits(program, fn, count) for count in (1, 2, 3, 5))
    assert [instr.op for instr in program.instrs].count("child_sum") == 1
    assert not fits(program, lambda F, x, hs: F.tanh(x + x + F.add_n(*[W(h) for h in hs])), 3)


def test_another_weight_is_another_program():
    V = dense(4, use_bias=False)
    program = rolled(lambda F, x, hs: x + U(F.add_n(*hs)))
    assert fits(program, lambda F, x, hs: x + U(F.add_n(*hs)), 3)
    assert not fits(program, lambda F, x, hs: x + V(F.add_n(*hs)), 3)
