"""What some values depend on. Pure: arrays in, arrays out; no device, no MXNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cavs_core import compiled, offsets_of

from .analyzer import Recording, Scan

__all__ = ["reached"]


def reached(r: Recording, s: Scan, values: Any, depends: Sequence[Any]) -> tuple[Any, Any]:
    """The leaves and the classes that some values depend on.

    Parameters
    ----------
    depends : of each class: whether its outputs depend on its operands, bool array, shape (outputs, operands); None if
        every one does on all of them
    """
    some = [part.ravel() for part in depends if part is not None]
    offsets, flat = np.full(len(depends), -1), np.zeros(0, bool)
    if some:
        offsets[[part is not None for part in depends]] = offsets_of(np.array([len(part) for part in some]))[:-1]
        flat = np.concatenate(some)
    return _reached(r.call_class, s.operand_offsets, r.operands, s.value_offsets, values, len(r.leaf_buffers),
                    len(r.classes), offsets, flat)


@compiled
def _reached(call_class, operand_offsets, operands, value_offsets, values, num_leaves,  # type: ignore[no-untyped-def]
             num_classes, depend_offsets, depends):
    found = np.zeros(value_offsets[-1], np.bool_)
    leaves = np.zeros(num_leaves, np.bool_)
    classes = np.zeros(num_classes, np.bool_)
    for v in values:
        found[v] = True
    for i in range(len(call_class) - 1, -1, -1):        # readers come behind what they read
        c, begin, count = call_class[i], operand_offsets[i], operand_offsets[i + 1] - operand_offsets[i]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            if not found[v]:
                continue
            classes[c] = True
            for k in range(count):
                if depend_offsets[c] >= 0 and not depends[depend_offsets[c] + (v - value_offsets[i]) * count + k]:
                    continue
                if operands[begin + k] >= 0:
                    found[operands[begin + k]] = True
                else:
                    leaves[-1 - operands[begin + k]] = True
            if depend_offsets[c] < 0:
                break
    return leaves, classes
