"""Arrays that are data and index at once, and indices out of range."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scope_check import check_scope

import gluon_dynbatch as gdb
from cavs_core.mxnet_compat import autograd, gluon, mx

nd = mx.nd
x = np.array([0, 2, 1], "float32")
table = np.arange(12, dtype="float32").reshape((3, 4))

# Each reads one array as data, and looks something up by it.
AS_INDEX = {
    "one_hot": lambda x, t: nd.one_hot(x, depth=3).sum(),
    "pick": lambda x, t: nd.pick(t, x).sum(),
    "take": lambda x, t: (nd.take(t, x) * 2).sum(),
    "label": lambda x, t: nd.SoftmaxOutput(t, x),
    "its own index": lambda x, t: nd.take(x, x).sum(),
    "gather_nd": lambda x, t: nd.gather_nd(t, x.reshape((1, -1))).sum(),
}
AS_DATA = {
    "sum": lambda x: (x * x).sum(), "rows": lambda x: x.reshape((3, 1)) * 2, "part": lambda x: x[1:] * 3,
    "as it is": lambda x: x.reshape((3,)),
}


@pytest.mark.parametrize("order", ["data first", "index first", "data on both sides"])
@pytest.mark.parametrize("name", AS_INDEX)
def test_the_gradient_of_an_array_that_is_data_and_index(name, order):
    def program(x, t, data):
        looked_up = AS_INDEX[name](x, t) if order != "data first" else None
        found = [data(x)]
        found.append(AS_INDEX[name](x, t) if looked_up is None else looked_up)
        return found + [data(x) * 2] * (order == "data on both sides")

    for grad_req in ("write", "add")[:1 if name == "label" else 2]:         # MXNet's output layer never adds
        for data in AS_DATA.values():
            check_scope(lambda x, t, data=data: program(x, t, data), x, table, grad_req=grad_req, backends=["mxnet"],
                        uninitialised=[0] * (name == "label"))
    check_scope(lambda x, t: program(x, t, AS_DATA["sum"]), x, table, backends=["native"],
                uninitialised=[0] * (name == "label"))


def test_the_label_of_an_output_layer_keeps_its_other_gradient():
    """MXNet leaves what SoftmaxOutput does to it as it finds the memory."""
    label = nd.array(x)
    label.attach_grad()
    with autograd.record(), gdb.batching():
        losses = [nd.SoftmaxOutput(nd.array(table), label), (label * label).sum()]
    autograd.backward(losses)
    np.testing.assert_allclose(label.grad.asnumpy(), 2 * x)


@given(st.data())
@settings(max_examples=30)
def test_gradients_of_all_uses_of_an_array_meet(data):
    """Used several times in several ways, by itself or as what was computed on the tape before, then backward without
    the tape or over it."""
    uses = data.draw(st.lists(st.sampled_from([*AS_DATA, *AS_INDEX]), min_size=1, max_size=5))
    taped, over_tape = data.draw(st.booleans()), data.draw(st.booleans())
    uses = [use for use in uses if use != "label"]

    def run(batched):
        array, t = nd.array(x), nd.array(table)
        array.attach_grad(), t.attach_grad()
        with autograd.record():
            read = array * 1 if taped else array
            if batched:
                with gdb.batching(backend="mxnet"):
                    made = [AS_DATA[u](read) if u in AS_DATA else AS_INDEX[u](read, t) for u in uses]
            else:
                made = [AS_DATA[u](read) if u in AS_DATA else AS_INDEX[u](read, t) for u in uses]
            if over_tape:
                made = [y * 2 for y in made]
        if made:
            autograd.backward(made)
        return array.grad.asnumpy(), t.grad.asnumpy()

    for got, want in zip(run(True), run(False)):
        np.testing.assert_allclose(got, want, rtol=1e-5)


# ---- indices out of range --------------------------------------------------------------------------------------------

INDICES = {"in range": [0, 1, -1], "the last from the end": [-3], "beyond": [0, 5, 1], "before": [-1, -4],
           "fractions": [0.5, 1.9, -0.5], "a fraction beyond": [2.1]}
LOOKUPS = {
    "gather_nd": lambda x, i: nd.gather_nd(x, i.reshape((1, -1))),
    "gather_nd of two axes": lambda x, i: nd.gather_nd(x, nd.stack(i, nd.ones_like(i))),
    "array as index": lambda x, i: x[i], "array and array": lambda x, i: x[i, nd.zeros_like(i)],
    "list": lambda x, i: x[[int(k) for k in i.asnumpy()]],
    "take": lambda x, i: nd.take(x, i),
    "take, wrapped": lambda x, i: nd.take(x, i, mode="wrap"), "pick": lambda x, i: nd.pick(x[:1], i[:1]),
    "one_hot": lambda x, i: nd.one_hot(i, depth=2) * x[0, 0],
}


@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_do_what_mxnet_does_with_indices(name, indices):
    index = np.array(INDICES[indices], "float32")
    check_scope(lambda x: LOOKUPS[name](x * 1, nd.array(index)), table, grad=False, backends=["mxnet"])
    check_scope(lambda x: LOOKUPS[name](x, nd.array(index) * 1) * 2, table, grad=False, backends=["mxnet"])


@pytest.mark.parametrize("backend", ["mxnet", "native"])
def test_an_index_out_of_range_is_named(backend):
    with pytest.raises(IndexError, match=r"gather_nd: index 5.* axis 0 with size 3 of an array of shape \(3, 4\)"), \
            gdb.batching(backend=backend):
        made = nd.array(table)[nd.array([0, 5])] * 2
    with pytest.raises(IndexError):
        made.asnumpy()


def test_a_vertex_that_looks_up_what_may_be_out_of_range_is_recorded_by_operators():
    class Look(gluon.HybridBlock):
        def hybrid_forward(self, F, x, i):
            return F.gather_nd(x, i) * 2

    look = Look()
    look.hybridize()
    (scope,) = check_scope(lambda x: look(x, nd.array([[0, 2]])), table, backends=["mxnet"])
    assert "which are known when it runs" in " ".join(scope.stats.fallbacks)
    check_scope(lambda x: look(x, nd.array([[0, 3]])), table, grad=False, backends=["mxnet"])
