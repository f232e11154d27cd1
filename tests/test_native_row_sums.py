"""Rows of equal numbers, added up: the gradient of a table whose rows were looked up."""

import numpy as np
import pytest

from cavs_core import add_equal_rows


def added_up(parts, size, dtype):
    made = []

    def rows(count):
        made.append(np.full((count, 3), np.nan, dtype))         # what is not written shows
        return made[0]

    return add_equal_rows(parts, size, rows), made[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("numbers_dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("counts", [[1], [40], [7, 0, 13], [0, 5]])
def test_same_as_numpy(dtype, numbers_dtype, counts):
    rng = np.random.RandomState(len(counts))
    parts = [(rng.randint(0, 11, n).astype(numbers_dtype), rng.normal(size=(n, 3)).astype(dtype)) for n in counts]
    numbers, rows = added_up(parts, 11, dtype)
    want = np.zeros((11, 3), dtype)
    for part, values in parts:
        np.add.at(want, part.astype(int), values)
    assert numbers.tolist() == sorted({int(n) for part, _ in parts for n in part}) and numbers.dtype == np.int64
    np.testing.assert_allclose(rows, want[numbers], rtol=1e-5, atol=1e-6)


def test_rows_of_several_axes():
    numbers, rows = np.array([2, 0, 2]), np.arange(12.0).reshape(3, 2, 2)
    target = np.empty((2, 2, 2))
    assert add_equal_rows([(numbers, rows)], 5, lambda count: target[:count]).tolist() == [0, 2]
    np.testing.assert_array_equal(target, [rows[1], rows[0] + rows[2]])


def test_numbers_outside_the_table_are_its_ends():
    numbers, rows = added_up([(np.array([-4, 9, 0]), np.eye(3))], 5, "float64")
    assert numbers.tolist() == [0, 4]
    np.testing.assert_array_equal(rows, [[1, 0, 1], [0, 1, 0]])
