"""Partition and steps on hand-made instructions."""

from cavs_core.autodiff import differentiate
from cavs_core.ops import Builder
from cavs_core.partition import make_steps, partition
from cavs_core.program import CHILD, ROW, SHARED, Gather, GatherAll, OutputGrad, Param, Pull, Spec, StateGrad


def recurrent():
    """h = tanh(W h_child + U x); pushed: V h."""
    b = Builder()
    x = b.input(Spec((1, 3), "float32", ROW), Pull("x"))
    h = b.input(Spec((1, 2), "float32", ROW), Gather(0, 0))
    u, w, v = (b.input(Spec(shape, "float32", SHARED), Param(None, name))
               for shape, name in (((2, 3), "u"), ((2, 2), "w"), ((5, 2), "v")))
    projected = b.emit("matmul", x, u, transpose_b=True)
    state = b.emit("tanh", b.add(projected, b.emit("matmul", h, w, transpose_b=True)))
    b.program.outputs = [state, b.emit("matmul", state, v, transpose_b=True)]
    return b.program


def names(instrs):
    return [i.op for i in instrs]


def test_forward_parts():
    program = recurrent()
    parts = partition(program.instrs, program.inputs_of(Gather), program.outputs[:1])
    assert names(parts.eager) == ["matmul"]
    assert names(parts.critical) == ["matmul", "broadcast_add", "tanh"]
    assert names(parts.lazy) == ["matmul"]


def test_backward_parts():
    """Only what leads from the readers' gradient to the child's is critical; parameter gradients wait."""
    program = recurrent()
    wanted = list(program.inputs)
    back = differentiate(program, wanted, [StateGrad(0), OutputGrad(0)])
    readers = back.program.inputs_of(StateGrad)
    parts = partition(back.program.instrs, readers, [back.grads[program.inputs_of(Gather)[0]]])
    assert names(parts.critical) == ["broadcast_add", "broadcast_mul", "matmul"]
    assert names(parts.eager).count("matmul") == 2              # through V, and the gradient of V itself
    assert names(parts.lazy).count("sum_rows") == 2             # of U and W
    assert back.saved == sorted(back.saved)


def test_unwanted_gradients_are_not_computed():
    program = recurrent()
    back = differentiate(program, program.inputs_of(Pull), [StateGrad(0), OutputGrad(0)])
    assert "sum_rows" not in names(back.program.instrs)
    nothing = differentiate(program, [], [StateGrad(0), OutputGrad(0)])
    assert nothing.program.instrs == [] and nothing.grads == {}


def test_each_gradient_has_a_value_of_its_own():
    b = Builder()
    x, y = (b.input(Spec((2,), "float32"), Pull(name)) for name in "xy")
    b.program.outputs = [b.add(x, y)]
    back = differentiate(b.program, [x, y], [OutputGrad(0)])
    made = {v for i in back.program.instrs for v in i.outputs}
    assert len(set(back.grads.values())) == 2 and set(back.grads.values()) <= made


def test_steps_break_only_at_segmented_instructions():
    b = Builder()
    x = b.input(Spec((2,), "float32", ROW), Pull("x"))
    h = b.input(Spec((2,), "float32", CHILD), GatherAll(0))
    doubled = b.scale(x, 2.0)
    mixed = b.mul(b.emit("spread", doubled), b.emit("tanh", h))
    total = b.emit("child_sum", mixed)
    b.program.outputs = [b.add(total, b.shift(x, 1.0))]
    steps = make_steps(b.program.instrs, b.program.outputs)
    assert [names(s.instrs) for s in steps] == [
        ["_mul_scalar", "tanh", "_plus_scalar"], ["spread"], ["broadcast_mul"], ["child_sum"], ["broadcast_add"]]
    assert [s.segmented for s in steps] == [False, True, False, True, False]
    made = {v: k for k, s in enumerate(steps) for v in s.outputs}
    for k, step in enumerate(steps):
        assert all(made.get(v, -1) < k for v in step.inputs)
