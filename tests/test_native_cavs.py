"""The native backend behind the Cavs face: the models of the tests, compared with the loop over their vertices."""

import pytest
from loop_check import check_same_as_loop
from models import MODEL_NAMES
from test_models import make


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_same_as_loop(name, monkeypatch):
    monkeypatch.setenv("DYNBATCH_BACKEND", "native")
    check_same_as_loop(*make(name))
