"""What the tests of the benchmarks share: tiny workloads, and a worker in this process."""

from benchmarks import workloads
from benchmarks.worker import Worker

TINY = {"treelstm-sst": {"batch": 3, "hidden": 4, "embed": 5},
        "treelstm-sick": {"batch": 3, "hidden": 4, "embed": 5, "similar": 3},
        "treefc": {"batch": 3, "hidden": 4, "leaves": 8},
        "varlstm": {"batch": 3, "hidden": 4, "embed": 4, "words": 20},
        "bilstm-char-tagger": {"batch": 2, "hidden": 4, "embed": 5, "chars": 3, "char_embed": 2},
        "graphconv": {"batch": 2, "hidden": 4, "rounds": 2},
        "spinn": {"batch": 3, "hidden": 4, "embed": 5, "track": 3}}


def tiny(name, num_batches=2, data=None):
    return workloads.make(name, workloads.options_of(name, **TINY[name]), num_batches, data)


def load_request(system, name):
    return {"system": system, "workload": name, "options": workloads.options_of(name, **TINY[name]), "num_batches": 2,
            "data": None}


class LocalWorker:
    """Asks a worker in this process, as `WorkerProcess` asks another one."""

    def __init__(self, system, name):
        self.worker = Worker()
        self.worker.load(**load_request(system, name))

    def ask(self, do, **arguments):
        return getattr(self.worker, do)(**arguments)
