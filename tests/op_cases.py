"""What op tests draw: shapes, dtypes, which operands are shared, and rows of numbers."""

import numpy as np
from hypothesis import strategies as st
from op_check import ROWS

dtypes = st.sampled_from(["float32", "float64"])
seeds = st.integers(0, 2**31 - 1)


def shapes(min_axes=1, max_axes=4, max_size=4):
    return st.lists(st.integers(1, max_size), min_size=min_axes, max_size=max_axes).map(tuple)


def subsets(count):
    """Which of `count` operands are shared."""
    return st.sets(st.integers(0, count - 1), max_size=count).map(lambda s: tuple(sorted(s)))


@st.composite
def broadcast_pairs(draw):
    """Two shapes that broadcast; one may have fewer axes."""
    full = draw(shapes())
    pair = []
    for _ in range(2):
        ones = draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
        shape = tuple(1 if one else n for one, n in zip(ones, full))
        pair.append(shape[draw(st.integers(0, len(full) - 1)):])
    return tuple(pair)


def rows(seed, *shapes, dtype="float32", shared=(), low=-2.0, high=2.0, among=None):
    """An array per shape, with a row axis if it is not shared; numbers from [low, high), or some of `among`."""
    rng = np.random.RandomState(seed)
    sizes = [shape if i in shared else (ROWS, *shape) for i, shape in enumerate(shapes)]
    return [(rng.uniform(low, high, size) if among is None else rng.choice(among, size)).astype(dtype)
            for size in sizes]


def operator(F, name):
    """MXNet's function of that name."""
    return getattr(F, name, None) or getattr(F._internal, name)
