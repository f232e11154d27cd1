"""Every system computes the same losses and updates from the same parameters; the plain MXNet loop is the oracle."""

import copy

import pytest
from bench_check import LocalWorker, load_request

from benchmarks import workloads
from benchmarks.harness import Mismatch, WorkerError, WorkerProcess, compare, fingerprint, python_of
from benchmarks.systems import SYSTEMS

PEERS = [name for name, info in SYSTEMS.items() if info.peer]


@pytest.fixture(scope="module")
def oracle():
    return {name: fingerprint(LocalWorker("mxnet-loop", name), training=True) for name in workloads.ALL}


@pytest.mark.parametrize("name, system", [(name, system) for name in workloads.ALL for system in (
    "ours-op", "ours-vertex", "ours-cavs") if name in workloads.NAMES or system != "ours-cavs"])
def test_our_systems_compute_what_the_loop_computes(name, system, oracle):
    compare(system, fingerprint(LocalWorker(system, name), training=True), "mxnet-loop", oracle[name])


@pytest.mark.parametrize("system", PEERS)
def test_peers_compute_what_the_loop_computes(system, oracle):
    try:
        python_of(peer=True)
    except WorkerError as error:
        pytest.skip(str(error))
    worker = WorkerProcess(system, threads=1)
    try:
        for name in workloads.NAMES:
            worker.ask("load", **load_request(system, name))
            compare(system, fingerprint(worker, training=True), "mxnet-loop", oracle[name])
    finally:
        worker.close()


def test_the_limit_runs_the_products_of_every_workload():
    for name in workloads.NAMES:
        worker = LocalWorker("limit", name)
        assert len(worker.ask("time", batches=[0, 1, 2], training=True)["ms"]) == 3


def test_the_comparison_finds_a_wrong_loss_and_a_wrong_update(oracle):
    good = oracle["treelstm-sst"]
    wrong_loss, wrong_update = copy.deepcopy(good), copy.deepcopy(good)
    wrong_loss["losses"][1] *= 1.001
    wrong_update["moved"]["node_weight"][1] *= -1
    compare("same", good, "loop", good)
    with pytest.raises(Mismatch, match="loss 1 of the check"):
        compare("other", wrong_loss, "loop", good)
    with pytest.raises(Mismatch, match="first update of node_weight"):
        compare("other", wrong_update, "loop", good)
    wrong_loss["losses"][1] = float("nan")
    with pytest.raises(Mismatch):
        compare("nan", wrong_loss, "loop", good)
