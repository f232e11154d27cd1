"""Sources of inputs: one object for each place."""

import copy
import gc
import pickle
import weakref

import pytest

from cavs_core.mxnet_compat import gluon
from cavs_core.program import Arg, Gather, GatherAll, Leaf, OutputGrad, Param, Pull, Shared


@pytest.mark.parametrize("kind", [Arg, Shared, Leaf, GatherAll, OutputGrad])
def test_the_same_place_is_one_object(kind):
    assert kind(1) is kind(1) and kind(1) is not kind(2)
    assert len({kind(k % 3) for k in range(9)}) == 3


def test_places_of_different_kinds_differ():
    assert len({Arg(0), Shared(0), Leaf(0), GatherAll(0), Gather(0, 0), Gather(0, 1), Pull("x"), Pull("y")}) == 8


@pytest.mark.parametrize("source", [Gather(1, 2), Pull("word")])
def test_copies_are_the_object_itself(source):
    assert copy.deepcopy(source) is source and pickle.loads(pickle.dumps(source)) is source


def test_parameters_are_told_apart_and_not_kept_alive():
    first, second = gluon.Parameter("w", shape=(2,)), gluon.Parameter("w", shape=(2,))
    assert Param(first, "w") is Param(first, "w") and Param(first, "w") is not Param(second, "w")
    source, gone = Param(first, "w"), weakref.ref(first)
    assert source.parameter is first
    del first, source
    gc.collect()
    assert gone() is None
