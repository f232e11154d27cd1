"""DyNet, without and with autobatch: the same training loop around the model of a workload.

A module of this folder is named as its workload and defines `make_model(workload, params)`, where `params` are DyNet's
parameters by the names of the workload: an object with `loss(batch)`, an expression for the sum of the samples' losses.
Tables (`embed_weight` and the like) are lookup parameters with sparse updates, DyNet's default.
"""

import importlib
import importlib.metadata

import dynet_config
import numpy as np


def import_dynet(autobatch, options):
    """DyNet reads its settings when it is imported. Memory is set beforehand: autobatch cannot let its pools grow."""
    megabytes = max(1024, options["batch"] * options["hidden"] // 8)
    dynet_config.set(mem=megabytes, autobatch=int(autobatch), random_seed=1)
    return importlib.import_module("dynet")


class System:
    def __init__(self, workload, variant):
        self.dy = import_dynet(variant == "autobatch", workload.options)
        collection = self.collection = self.dy.ParameterCollection()     # it owns the parameters: keep it alive
        lstm = self.lstm = importlib.import_module(f"{__name__}.lstm")
        self.params = {}
        for name, value in workload.params.items():
            if name.endswith("embed_weight"):
                self.params[name] = collection.lookup_parameters_from_numpy(value)
            else:
                self.params[name] = collection.parameters_from_numpy(lstm.from_workload(name, value))
        module = importlib.import_module(f"{__name__}.{workload.name.replace('-', '_')}")
        self.model = module.make_model(workload, self.params)
        self.learning_rate = workload.learning_rate
        self.trainer = self.dy.SimpleSGDTrainer(collection, self.learning_rate)
        self.trainer.set_clip_threshold(0)
        self.batches = [workload.batch(k) for k in range(workload.num_batches)]

    def _loss(self, k):
        batch = self.batches[k % len(self.batches)]
        self.dy.renew_cg()
        return self.model.loss(batch), len(batch)

    def loss(self, k):
        loss, count = self._loss(k)
        return loss.value() / count

    def step(self, k):
        loss, count = self._loss(k)
        value = loss.value()
        loss.backward()
        self.trainer.learning_rate = self.learning_rate / count
        self.trainer.update()
        return value / count

    def parameters(self):
        return {name: self.lstm.to_workload(name, np.array(p.as_array())) for name, p in self.params.items()}

    def versions(self):
        return {"dynet38": importlib.metadata.version("dynet38"), "numpy": np.__version__}
