"""Rows of leaves and values, and the rows that calls read: compiled loops. Pure: arrays in, arrays out."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["column_of", "place_leaves", "place_values", "read_rows"]


@njit(cache=True, nogil=True)
def column_of(number, num_columns, slots):  # type: ignore[no-untyped-def]
    """The column of an operand of a call, by its number among them."""
    return number if number < num_columns else num_columns - slots + (number - num_columns) % slots


@njit(cache=True, nogil=True)
def place_leaves(call_class, operand_offsets, column_offsets, slots, operands, own,  # type: ignore[no-untyped-def]
                  leaf_buffers, leaf_widths, num_buffers):
    """Rows for the leaves that some call reads as rows of its own, -1 for the others; how many rows each buffer has."""
    rows, counts = np.full(len(leaf_buffers), -1, np.int64), np.zeros(num_buffers, np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        num_columns = column_offsets[c + 1] - column_offsets[c]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if operands[j] < 0 and own[column_offsets[c] + column_of(j - operand_offsets[i], num_columns, slots[c])]:
                rows[-1 - operands[j]] = 0
    for leaf in range(len(rows)):
        if rows[leaf] == 0:
            rows[leaf] = counts[leaf_buffers[leaf]]
            counts[leaf_buffers[leaf]] += leaf_widths[leaf]
    return rows, counts


@njit(cache=True, nogil=True)
def place_values(call_class, value_offsets, operand_offsets, operands, output_offsets, base, widths,  # type: ignore[no-untyped-def]
           buffers, position, alias, call_first, leaf_rows, leaf_buffers):
    rows = np.empty(value_offsets[-1], np.int64)
    where = np.empty(value_offsets[-1], np.int64)
    operand_rows = np.empty(len(operands), np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            operand_rows[j] = rows[operands[j]] if operands[j] >= 0 else leaf_rows[-1 - operands[j]]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            if alias[c]:
                whole = operands[operand_offsets[i]]
                rows[v] = operand_rows[operand_offsets[i]] + call_first[i]
                where[v] = where[whole] if whole >= 0 else leaf_buffers[-1 - whole]
            else:
                output = output_offsets[c] + v - value_offsets[i]
                rows[v], where[v] = base[output] + position[i] * widths[output], buffers[output]
    return rows, where, operand_rows


@njit(cache=True, nogil=True)
def read_rows(by_class, class_offsets, call_width, call_count, operand_offsets, operand_rows,  # type: ignore[no-untyped-def]
             column_offsets, slots, widths, split, read):
    """The rows of all columns that are read by rows, one behind the other, position after position; where each begins.
    """
    num_classes = len(class_offsets) - 1
    starts, ragged = np.zeros(len(widths) + 1, np.int64), np.zeros(num_classes, np.bool_)
    for c in range(num_classes):
        positions = elements = 0
        fixed = column_offsets[c + 1] - column_offsets[c] - slots[c]
        for col in range(column_offsets[c], column_offsets[c + 1]):
            ragged[c] |= split[col]
        for i in by_class[class_offsets[c]:class_offsets[c + 1]]:
            positions += call_width[i] if ragged[c] else 1
            elements += call_count[i]
        for col in range(column_offsets[c], column_offsets[c + 1]):
            size = positions * widths[col] if col - column_offsets[c] < fixed else elements
            starts[col + 1] = starts[col] + (size if read[col] else 0)
    rows = np.empty(starts[-1], np.int64)
    for c in range(num_classes):
        first, fixed = column_offsets[c], column_offsets[c + 1] - column_offsets[c] - slots[c]
        for col in range(first, column_offsets[c + 1]):
            if not read[col]:
                continue
            at, width = starts[col], widths[col]
            for i in by_class[class_offsets[c]:class_offsets[c + 1]]:
                operand = operand_offsets[i] + col - first
                if col - first >= fixed:                    # the elements of a list, a row each
                    for n in range(call_count[i]):
                        rows[at] = operand_rows[operand + n * slots[c]]
                        at += 1
                elif split[col]:                            # a call's rows, shared out among its positions
                    for n in range(call_width[i] * width):
                        rows[at] = operand_rows[operand] + n
                        at += 1
                else:                                       # every position of a call reads the same rows
                    for _ in range(call_width[i] if ragged[c] else 1):
                        for n in range(width):
                            rows[at] = operand_rows[operand] + n
                            at += 1
    return rows, starts
