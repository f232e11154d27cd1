"""Seeded draws: numbers, shapes, attributes, data."""

import random

import numpy as np

SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e30, -1.0)


class Draw:
    """A stream of random decisions: the same seed gives the same program."""

    def __init__(self, seed):
        self.random = random.Random(f"fuzz {seed}")
        self.numbers = np.random.RandomState(self.random.getrandbits(31))

    def chance(self, p):
        return self.random.random() < p

    def integer(self, low, high):
        return self.random.randint(low, high)

    def pick(self, *options):
        return self.random.choice(options)

    def weighted(self, weights):
        """A key of {key: weight}."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    def some(self, options, low=1):
        """`low` or more different ones of `options`, in their order."""
        options = list(options)
        chosen = set(self.random.sample(range(len(options)), self.integer(low, len(options))))
        return [x for k, x in enumerate(options) if k in chosen]

    def number(self):
        return self.pick(0.5, 2.0, -1.5, 3.0, -0.5, 1.0, 0.25)

    def shape(self, low=1, high=3):
        rank = self.integer(low, high)
        return (
            tuple(self.pick(1, 2, 2, 3, 3, 4) for _ in range(rank))
            if rank <= 3
            else tuple(self.pick(1, 2, 2) for _ in range(rank))
        )

    def axis(self, shape):
        return self.integer(-len(shape), len(shape) - 1)

    def axes(self, shape):
        """What a reduction takes: None, a number, or a tuple of different axes."""
        kind = self.pick("none", "one", "one", "some")
        if kind == "none":
            return None
        if kind == "one":
            return self.axis(shape)
        return tuple(i - self.pick(0, len(shape)) for i in self.some(range(len(shape))))

    def data(self, shape, dtype, special=False):
        """Numbers of a few digits, away from where operators are singular unless `special`."""
        if dtype.startswith("uint"):
            return self.numbers.randint(0, 4, shape).astype(dtype)
        if dtype.startswith("int"):
            return self.numbers.randint(-3, 4, shape).astype(dtype)
        values = np.round(self.numbers.uniform(-1.5, 1.5, shape), 2)
        values = np.where(np.abs(values) < 0.05, 0.37, values)
        if special and values.size:
            for _ in range(self.integer(1, 2)):
                values.flat[self.integer(0, values.size - 1)] = self.pick(*SPECIAL)
        return values.astype(dtype)


def literal(values):
    """Python text of an array's values."""
    if isinstance(values, np.ndarray) and values.ndim == 0:
        values = values.item()
    if isinstance(values, np.ndarray):
        return "[" + ", ".join(literal(v) for v in values) + "]"
    if isinstance(values, (int, np.integer)):
        return str(int(values))
    return repr(round(float(values), 6))  # nan and inf are names of the program
