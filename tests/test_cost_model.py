"""The cost model: exact counts of work, arithmetic of predictions, devices as JSON, and corrections."""

import ast
import json
import math
import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from test_partition import recurrent

from cavs_core.ops import Builder
from cavs_core.plan import VertexProgram, plan_class
from cavs_core.program import CHILD, SHARED, Gather, GatherAll, Leaf, Param, Spec
from gluon_dynbatch.costs import cost_model, work
from gluon_dynbatch.costs.cost_model import GPU, CostModel, Device, gpu
from gluon_dynbatch.costs.work import Work, started_work_of, work_of

# 1 us is 1000 floating point operations, so that everything below can be done in one's head.
SIMPLE = Device("simple", launch_us=10.0, op_us=2.0, gflops=1.0, rows_half=4.0, depth_half=5.0, element_ns=10.0,
                transcendental_ns=100.0, gather_ns_per_byte=1.0, flush_us=100.0, class_us=50.0, analysis_us=20.0,
                analysis_us_per_call=0.5, record_us_per_call=1.0, compile_s_per_kernel=0.5)
WORK = Work(ops=3, once_ops=2, products=((1, 10, 20),), once_products=((2, 5, 10),), elements=30, transcendental=10,
            gathered=100, once_bytes=1000)
NOTHING = Work(0, 0, (), (), 0, 0, 0)

counts = st.integers(0, 1000)
products = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 500), st.integers(1, 500)), max_size=3).map(tuple)
works = st.builds(Work, counts, counts, products, products, counts.map(lambda n: n + 1000), counts, counts, counts)


# ---- work ----------------------------------------------------------------------------------------------------------

def planned(program, recording=True, in_one_launch=False):
    return plan_class(VertexProgram(program, 1), list(program.inputs.values()), recording, in_one_launch)


def test_work_of_a_recurrent_class():
    """h = tanh(W h_child + U x); pushed: V h."""
    forward, backward = work_of(planned(recurrent()))
    # In a launch: h is copied, multiplied, and one kernel does the rest. Once: x is copied, U x, V h.
    # x (12 bytes) and h (8) are read through an index, and written for the products.
    assert forward == Work(ops=3, once_ops=3, products=((1, 2, 2),), once_products=((1, 2, 3), (1, 5, 2)), elements=4,
                           transcendental=2, gathered=2 * 12 + 2 * 8)
    # In a launch: (dh + V' dy) * (1 - h^2), and W' of it. Once: dy is copied, beside the 1 - h^2; V' dy; U' of what the
    # launches made; the sums for V, W and U. dh (8 bytes) is read where it stands, dy (20) is copied.
    assert backward == Work(ops=2, once_ops=6, products=((1, 2, 2),),
                            once_products=((1, 2, 5), (1, 5, 2), (1, 2, 2), (1, 3, 2), (1, 2, 3)), elements=8,
                            transcendental=0, gathered=8 + 2 * 20)


def test_what_is_started_for_a_recurrent_class():
    """h = tanh(W h_child + U x); pushed: V h."""
    forward, backward = started_work_of(planned(recurrent()))
    # A launch: h is gathered, and one region is W h + (U x) and its tanh. Once: x, U x, the index of h, and V h.
    assert forward == Work(ops=3, once_ops=2, products=(), once_products=(), elements=0, transcendental=0, gathered=0,
                           starts=2, once_starts=4)
    # A launch: dh, and one region. Once: dy, the eager region, the index of dh, and the region of sums over all rows,
    # for which all h of the children are gathered again; x is there since the forward pass.
    assert (backward.starts, backward.once_starts) == (2, 5)
    assert backward.ops > 0 and backward.once_ops > 0 and not backward.products and not backward.once_products
    assert started_work_of(planned(recurrent(), recording=False)) == (forward, None)


def test_every_start_has_its_price():
    work = Work(ops=3, once_ops=5, products=(), once_products=(), elements=0, transcendental=0, gathered=0, starts=4,
                once_starts=6)
    assert CostModel(SIMPLE).parts_us(work) == pytest.approx((4 * 10 + 3 * 2, 0.0, 50 + 6 * 10 + 5 * 2))


def test_work_without_a_backward_pass():
    forward, backward = work_of(planned(recurrent(), recording=False))
    assert backward is None and forward == work_of(planned(recurrent()))[0]


def test_in_one_launch_sums_still_count_once():
    forward, backward = work_of(planned(recurrent(), in_one_launch=True))
    assert forward.once_ops == 0 and forward.products == ((1, 2, 3), (1, 2, 2), (1, 5, 2))
    assert backward.once_ops == 3 and backward.once_products == ((1, 5, 2), (1, 2, 2), (1, 2, 3))


def test_views_cost_nothing_and_kernels_are_shared():
    b = Builder()
    x = b.input(Spec((1, 8), "float64"), Gather(0, 0))
    p, q = b.call("SliceChannel", [x], {"num_outputs": 2, "axis": 1})
    total = b.emit("reduce_sum", b.mul(b.emit("exp", p), q), axis=(1,))
    b.program.outputs = [b.emit("Reshape", b.scale(total, 2.0), shape=(1,))]
    # exp 4 and product 4; the sum reads 4; twice it is 1
    assert work_of(planned(b.program, recording=False))[0] == Work(1, 0, (), (), 4 + 4 + 4 + 1, 4, 8 * 8)


@pytest.mark.parametrize("stype, ops, written", [("default", 2, 7 * 3 * 4), ("row_sparse", 1, 0)])
def test_gradients_of_tables(stype, ops, written):
    """Words and gradients are copied. A dense gradient is filled and added to, a sparse one is these rows."""
    b = Builder()
    word = b.input(Spec((1,), "float32"), Leaf(0))
    parameter = type("Parameter", (), {"_grad_stype": stype})()
    table = b.input(Spec((7, 3), "float32", SHARED), Param(parameter, "table"))
    b.program.outputs = [b.emit("lookup", table, word)]
    forward, backward = work_of(planned(b.program))
    assert forward.gathered == 4 + 3 * 4 and forward.elements == 0
    assert (backward.once_ops, backward.once_bytes) == (ops, written)


def test_children_count_as_often_as_there_are():
    b = Builder()
    h = b.input(Spec((1, 4), "float32", CHILD), GatherAll(0))
    w = b.input(Spec((4, 4), "float32", SHARED), Param(None, "w"))
    b.program.outputs = [b.emit("child_sum", b.emit("tanh", b.emit("matmul", h, w, transpose_b=True)))]
    plan = planned(b.program, recording=False)
    one, many = work_of(plan)[0], work_of(plan, children=2.5)[0]
    assert one.products == ((1, 4, 4),) and many.products == ((2.5, 4, 4),)
    assert (one.transcendental, many.transcendental) == (4, 10) and one.ops == many.ops


# ---- predictions ---------------------------------------------------------------------------------------------------

def test_cost_of_a_launch_and_of_a_row():
    launch_us, row_us = CostModel(SIMPLE).launch_cost(WORK, None)
    assert launch_us == pytest.approx(10 + 3 * 2 + 4 * 2 * 10 * 20 / 1000)
    in_launch, once = 2 * 10 * (20 + 5) / 1000, 2 * 2 * 5 * (10 + 5) / 1000
    assert row_us == pytest.approx(in_launch + once + 20 * 0.010 + 10 * 0.100 + 100 * 0.001)
    both = CostModel(SIMPLE).launch_cost(WORK, WORK)
    assert both == (pytest.approx(2 * launch_us), pytest.approx(2 * row_us))


def test_prediction_of_a_flush():
    model = CostModel(SIMPLE)
    launch_us, row_us = model.launch_cost(WORK, None)
    once_us = 50 + 2 * 2 + 4 * 2 * 5 * 10 / 1000 + 1000 * 0.001
    assert model.predict_ms([(WORK, 3), (WORK, 4)]) == pytest.approx((100 + once_us + 2 * launch_us + 7 * row_us) / 1e3)
    assert model.predict_ms([(NOTHING, 1)]) == pytest.approx(0.160)
    assert model.predict_ms([]) == 0.0


@pytest.mark.parametrize("device", [SIMPLE, GPU], ids=lambda d: d.name)
@hypothesis.given(work=works, other=works, rows=st.integers(1, 500), calls=st.integers(2, 50))
def test_more_rows_cost_more_and_one_launch_is_no_slower_than_many(device, work, other, rows, calls):
    model = CostModel(device)
    assert model.predict_ms([(work, rows)]) <= model.predict_ms([(work, rows + 1)]) * (1 + 1e-12)
    assert model.predict_ms([(work, rows)]) <= model.predict_ms([(work, rows), (other, 1)])
    assert model.predict_ms([(work, calls * rows)]) <= model.predict_ms([(work, rows)] * calls) * (1 + 1e-12)


# ---- devices -------------------------------------------------------------------------------------------------------

def test_devices_survive_json():
    for device in (SIMPLE, GPU, gpu(5.0)):
        assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device
    assert gpu(5.0).op_us < GPU.op_us < gpu(10.0).op_us


@pytest.mark.parametrize("change", [{"launch_us": -1.0}, {"op_us": math.nan}, {"gflops": 0.0}, {"gflops": math.inf},
                                    {"flush_us": "3"}, {"class_us": True}, {"name": 3}, {"unknown": 1.0}])
def test_impossible_constants_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Device.from_dict({**SIMPLE.to_dict(), **change})


@pytest.mark.parametrize("values", [{}, [], None, "a device", {"name": "x"}])
def test_what_is_no_device_is_refused(values):
    with pytest.raises(ValueError, match="launch_us.* missing or unknown"):
        Device.from_dict(values)


# ---- corrections ---------------------------------------------------------------------------------------------------

def test_corrections_converge():
    model, draw = CostModel(SIMPLE), random.Random(1)
    for _ in range(40):
        predicted = draw.uniform(5, 50)
        model.observe("forward", predicted, 1.7 * predicted * draw.uniform(0.95, 1.05))
    assert model.corrected("forward", 10.0) == pytest.approx(17.0, rel=0.05)
    assert model.corrected("backward", 10.0) == 10.0            # each key has its own
    assert model.errors["forward"] < 0.05


@pytest.mark.parametrize("at", [0, 1, 7, 19])
def test_one_slow_step_does_not_count(at):
    """A step with page faults takes ten times as long."""
    model = CostModel(SIMPLE)
    for k in range(20):
        before = model.corrected("forward", 10.0)
        model.observe("forward", 10.0, 200.0 if k == at else 20.0)
        if k == at > 1:
            assert model.corrected("forward", 10.0) == pytest.approx(before, rel=0.25)
    assert model.corrected("forward", 10.0) == pytest.approx(20.0, rel=0.1)


def test_corrections_are_bounded_and_nonsense_is_left_out():
    model = CostModel(SIMPLE)
    for measured in (math.nan, math.inf, 0.0, -1.0):
        model.observe("forward", 10.0, measured)
    model.observe("forward", 0.0, 10.0)
    assert model.errors == {} and model.corrected("forward", 10.0) == 10.0
    for _ in range(100):
        model.observe("up", 1.0, 1e9)
        model.observe("down", 1e9, 1.0)
    assert model.corrected("up", 1.0) <= 16.0 and model.corrected("down", 1.0) >= 1 / 16


def test_errors_are_medians_of_what_was_known_before():
    model = CostModel(SIMPLE)
    model.observe("forward", 10.0, 20.0)
    assert model.errors == {"forward": 0.5}
    for _ in range(30):
        model.observe("forward", 10.0, 20.0)
    assert model.errors["forward"] < 0.05


def test_the_model_is_pure():
    """It needs nothing but the standard library, and the counts of work."""
    for module in (cost_model, work):
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert names <= {"__future__", "collections", "collections.abc", "dataclasses", "math", "statistics",
                         "threading", "typing", "work"}
