"""Where calls, leaves and values stand, and the rows that calls read: compiled loops. Pure: arrays in, arrays out."""

from __future__ import annotations

import numpy as np

from cavs_core import compiled

__all__ = ["place"]


@compiled
def place(calls, launch, depth, same, pending, leaves, num_buffers, columns, outputs):  # type: ignore[no-untyped-def]
    """All that `group` gives, as arrays. One call: to enter compiled code costs as much as a hundred calls do there.

    Parameters
    ----------
    calls : class, width, length of the list and first named row of each; operands, and where operands and values begin
    launch, depth : of each call
    same, pending : of each column, see `Scan`
    leaves : buffers and widths
    columns, outputs : what `Classes` has of them

    Returns
    -------
    (by_class, class_offsets, launch_class, launch_rank, launch_offsets, row_offsets, call_offsets, launch_depth)
        See `_arrange`.
    shared : of each column, whether all calls read one leaf there
    rows_read, starts : of the columns that are read by rows, these rows, and where each column begins
    bases : of each output
    chunks, chunk_offsets : of each buffer, where leaves end and launches of each class; where its part begins
    buffer_rows, leaf_rows, value_rows, value_buffers : see `Grouping`
    """
    call_class, call_width, call_count, call_first, operands, operand_offsets, value_offsets = calls
    column_offsets, slots, alias, widths, split, may_share = columns
    output_offsets, output_widths, output_buffers = outputs
    leaf_buffers, leaf_widths = leaves
    position, arranged = _arrange(call_class, call_width, launch, depth, len(alias))
    by_class, class_offsets, _, _, launch_offsets, row_offsets, _, _ = arranged
    shared = same & ~pending & may_share
    leaf_rows, buffer_rows = _place_leaves(call_class, operand_offsets, column_offsets, slots, operands, ~shared,
                                           leaf_buffers, leaf_widths, num_buffers)
    bases, chunks, chunk_offsets = _place_launches(alias, launch_offsets, row_offsets, output_offsets, output_widths,
                                                   output_buffers, buffer_rows)
    value_rows, value_buffers, operand_rows = _place_values(
        call_class, value_offsets, operand_offsets, operands, output_offsets, bases, output_widths, output_buffers,
        position, alias, call_first, leaf_rows, leaf_buffers)
    read = ~shared
    for c in range(len(alias)):
        if alias[c]:
            read[column_offsets[c]:column_offsets[c + 1]] = False
    rows_read, starts = _read_rows(by_class, class_offsets, call_width, call_count, operand_offsets, operand_rows,
                                   column_offsets, slots, widths, split, read)
    return (arranged, shared, rows_read, starts, bases, chunks, chunk_offsets, buffer_rows, leaf_rows, value_rows,
            value_buffers)


@compiled
def _arrange(call_class, call_width, launch, depth, num_classes):  # type: ignore[no-untyped-def]
    """Calls by class, in each by launch, in each as recorded; all by counting.

    Returns
    -------
    position : of each call, its first row among those of its class
    by_class, class_offsets : the calls, and where those of each class begin
    launch_class, launch_rank : of each launch, its class and its number among the class's launches
    launch_offsets : how many launches all classes before each have
    row_offsets, call_offsets : for each class where its launches begin and the last one ends, as rows and as calls
    launch_depth : for each class that of its launches' first calls
    """
    num_calls, num_launches = len(call_class), 0
    for i in range(num_calls):
        num_launches = max(num_launches, launch[i] + 1)
    class_offsets, launch_offsets = np.zeros(num_classes + 1, np.int64), np.zeros(num_classes + 1, np.int64)
    launch_class, size = np.zeros(num_launches, np.int64), np.zeros(num_launches, np.int64)
    for i in range(num_calls):
        class_offsets[call_class[i] + 1] += 1
        if launch[i] >= 0:
            launch_class[launch[i]] = call_class[i]
            size[launch[i]] += 1
    launch_rank = np.zeros(num_launches, np.int64)
    for k in range(num_launches):
        launch_rank[k] = launch_offsets[launch_class[k] + 1]
        launch_offsets[launch_class[k] + 1] += 1
    for c in range(num_classes):
        class_offsets[c + 1] += class_offsets[c]
        launch_offsets[c + 1] += launch_offsets[c]
    row_offsets = np.zeros(num_launches + num_classes, np.int64)
    call_offsets = np.zeros(num_launches + num_classes, np.int64)
    free = class_offsets[:-1].copy()            # of each class: where its next launch begins
    at = np.zeros(num_launches, np.int64)
    for k in range(num_launches):
        c = launch_class[k]
        at[k] = free[c]
        free[c] += size[k]
        call_offsets[launch_offsets[c] + c + launch_rank[k] + 1] = free[c] - class_offsets[c]
    by_class, position = np.empty(num_calls, np.int64), np.empty(num_calls, np.int64)
    for i in range(num_calls):
        if launch[i] >= 0:
            by_class[at[launch[i]]] = i
            at[launch[i]] += 1
        else:
            by_class[free[call_class[i]]] = i
            free[call_class[i]] += 1
    launch_depth = np.empty(num_launches, np.int64)
    for c in range(num_classes):
        row, last = 0, -1
        for j in range(class_offsets[c], class_offsets[c + 1]):
            i = by_class[j]
            position[i] = row
            row += call_width[i]
            if launch[i] >= 0:
                k = launch_offsets[c] + launch_rank[launch[i]]
                row_offsets[k + c + 1] = row
                if launch[i] != last:
                    launch_depth[k], last = depth[i], launch[i]
    return position, (by_class, class_offsets, launch_class, launch_rank, launch_offsets, row_offsets, call_offsets,
                      launch_depth)


@compiled
def _place_leaves(call_class, operand_offsets, column_offsets, slots, operands, own,  # type: ignore[no-untyped-def]
                  leaf_buffers, leaf_widths, num_buffers):
    """Rows for the leaves that some call reads as rows of its own, -1 for the others; how many rows each buffer has."""
    rows, counts = np.full(len(leaf_buffers), -1, np.int64), np.zeros(num_buffers, np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        column, last_column = column_offsets[c], column_offsets[c + 1]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if column == last_column:                       # the next element of a list
                column -= slots[c]
            if operands[j] < 0 and own[column]:
                rows[-1 - operands[j]] = 0
            column += 1
    for leaf in range(len(rows)):
        if rows[leaf] == 0:
            rows[leaf] = counts[leaf_buffers[leaf]]
            counts[leaf_buffers[leaf]] += leaf_widths[leaf]
    return rows, counts


@compiled
def _place_launches(alias, launch_offsets, row_offsets, output_offsets, widths, buffers, rows):  # type: ignore[no-untyped-def]
    """The first row of each output; of each buffer, where leaves end and launches. Counts on in `rows`."""
    sizes, bases = np.ones(len(rows), np.int64), np.zeros(len(widths), np.int64)
    for b in range(len(rows)):
        sizes[b] += rows[b] > 0
    for c in range(len(alias)):
        for k in range(output_offsets[c], output_offsets[c + 1]):
            if not alias[c]:
                sizes[buffers[k]] += launch_offsets[c + 1] - launch_offsets[c]
    offsets = np.zeros(len(rows) + 1, np.int64)
    for b in range(len(rows)):
        offsets[b + 1] = offsets[b] + sizes[b]
    chunks, free = np.zeros(offsets[-1], np.int64), offsets[:-1] + 1
    for b in range(len(rows)):
        if rows[b]:
            chunks[free[b]] = rows[b]
            free[b] += 1
    for c in range(len(alias)):
        if alias[c]:
            continue
        first = launch_offsets[c] + c                   # a class has one offset more than launches
        last = launch_offsets[c + 1] + c
        for k in range(output_offsets[c], output_offsets[c + 1]):
            b = buffers[k]
            bases[k] = rows[b]
            for n in range(first + 1, last + 1):
                chunks[free[b]] = rows[b] + row_offsets[n] * widths[k]
                free[b] += 1
            rows[b] += row_offsets[last] * widths[k]
    return bases, chunks, offsets


@compiled
def _place_values(call_class, value_offsets, operand_offsets, operands, output_offsets, base, widths,  # type: ignore[no-untyped-def]
           buffers, position, alias, call_first, leaf_rows, leaf_buffers):
    rows = np.empty(value_offsets[-1], np.int64)
    where = np.empty(value_offsets[-1], np.int64)
    operand_rows = np.empty(len(operands), np.int64)
    for i in range(len(call_class)):
        c = call_class[i]
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            token = operands[j]
            operand_rows[j] = rows[token] if token >= 0 else leaf_rows[-1 - token]
        if alias[c]:
            whole = operands[operand_offsets[i]]
            for v in range(value_offsets[i], value_offsets[i + 1]):
                rows[v] = operand_rows[operand_offsets[i]] + call_first[i]
                where[v] = where[whole] if whole >= 0 else leaf_buffers[-1 - whole]
        else:
            output, at = output_offsets[c], position[i]
            for v in range(value_offsets[i], value_offsets[i + 1]):
                rows[v], where[v] = base[output] + at * widths[output], buffers[output]
                output += 1
    return rows, where, operand_rows


@compiled
def _read_rows(by_class, class_offsets, call_width, call_count, operand_offsets, operand_rows,  # type: ignore[no-untyped-def]
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
            at, width, mine = starts[col], widths[col], by_class[class_offsets[c]:class_offsets[c + 1]]
            if col - first < fixed and not ragged[c] and width == 1:        # most columns: a row each
                for n in range(len(mine)):
                    rows[at + n] = operand_rows[operand_offsets[mine[n]] + col - first]
                continue
            for i in mine:
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
