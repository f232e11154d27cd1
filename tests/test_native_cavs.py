"""The native backend behind the Cavs face: the models of the tests, compared with the loop over their vertices."""

import numpy as np
import pytest
from loop_check import check_same_as_loop
from models import MODEL_NAMES
from test_models import make

from cavs_core.backends.native_cpu.memory import ARENA, Arena


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_same_as_loop(name, monkeypatch):
    monkeypatch.setenv("DYNBATCH_BACKEND", "native")
    check_same_as_loop(*make(name))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_memory_may_hold_anything(name, monkeypatch):
    """Whatever a run reads it has written: the row of zeros of messages, which MXNet's operators read, is not made."""
    def take(nbytes):
        block = Arena.take(ARENA, nbytes)
        block.memory[:] = 255                               # NaN in every dtype
        return block

    monkeypatch.setenv("DYNBATCH_BACKEND", "native")
    monkeypatch.setattr(ARENA, "take", take)
    assert np.isnan(take(64).array((8,)).max())
    check_same_as_loop(*make(name))
