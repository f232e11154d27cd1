"""The limit: the matrix products of a step alone, over the whole mini-batch, in numpy's BLAS.

A product (rows, inputs) x (inputs, outputs) of the forward pass has two in the backward pass, for the gradients of its
input and of its weight. All of them write into arrays that exist before.
"""

import numpy as np


class System:
    def __init__(self, workload, variant):
        self.products = [workload.products(workload.batch(k)) for k in range(workload.num_batches)]
        rng = np.random.RandomState(0)
        self.arrays = []
        for sizes in zip(*self.products):
            rows, (_, inputs, outputs) = max(size[0] for size in sizes), sizes[0]
            shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
            operands = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
            self.arrays.append((*operands, *map(np.empty_like, operands)))

    def run(self, k, training):
        for (rows, _, _), (x, w, dy, dx, dw, y) in zip(self.products[k % len(self.products)], self.arrays):
            np.dot(x[:rows], w.T, out=y[:rows])
            if training:
                np.dot(dy[:rows], w, out=dx[:rows])
                np.dot(dy[:rows].T, x[:rows], out=dw)

    def loss(self, k):
        self.run(k, training=False)

    def step(self, k):
        self.run(k, training=True)

    def versions(self):
        return {"numpy": np.__version__}
