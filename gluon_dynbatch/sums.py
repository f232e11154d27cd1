"""Sums that were written as chains of additions. Pure: arrays in, arrays out; no device, no MXNet.

``total = total + x`` in a loop is an addition for every term, each of which waits for the one before: samples with
other numbers of terms fall out of step, and a long sum is as many launches. Where nobody wants the sums on the way, the
whole chain is one call that takes a list: the same additions, in the same order.

A sum that has the same few terms in every sample is better left as it is: it runs inside the program of what it is
joined with, which a list does not. So chains are looked at by their *role*, what makes their first two terms. Those of
a role become lists if there are several lengths of it, or long ones: all of them, so that short and long sums stay in
step; and from then on always, so that later flushes, which may have fewer lengths, have the same programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cavs_core import compiled

from .analyzer import Recording, Scan
from .last_used import LastUsed

__all__ = ["SUM_ROLES", "Chains", "SumRoles", "find_chains", "fold_chains"]

SEVERAL = 3         # lengths of one role: that sums vary
LONG = 8            # terms


class Chains(NamedTuple):
    """The chains of additions in a recording; a single addition is one, too.

    Attributes
    ----------
    inner : int64 array, shape (calls,)
        Of each addition, where among all operands its chain goes on; -1 where it does not.
    ends : int64 array, the last addition of each chain
    lengths : int64 array, how many terms each chain has
    roles : int64 array, shape (chains, 3)
        The class of its additions, and the classes that make its first two terms; -1 for a leaf.
    """

    inner: Any
    ends: Any
    lengths: Any
    roles: Any


def find_chains(r: Recording, s: Scan, held: Any, adds: Any) -> Chains | None:
    """The chains of additions; None if there are none.

    Parameters
    ----------
    held : int64 array
        Values that somebody else wants: no chain goes over them.
    adds : bool array, shape (classes,)
        Whether calls of the class add up two rows that look alike.
    """
    # (Where all calls add the same array, it is a weight or the like, which is not copied into lists.)
    shared = s.same & ~s.pending
    ends = r.facts.column_offsets
    adds = adds & ~np.array([shared[a:b].any() for a, b in zip(ends, ends[1:])], bool)
    if not adds[r.call_class].any():
        return None
    inner, ends, lengths, roles = _find(r.call_class, r.call_width, s.operand_offsets, r.operands, s.maker, s.source,
                                        adds, held)
    return Chains(inner, ends, lengths, roles) if len(ends) else None


@compiled
def _find(call_class, call_width, operand_offsets, operands, maker, source, adds, held):  # type: ignore[no-untyped-def]
    num_calls = len(call_class)
    readers = np.zeros(len(maker), np.int64)
    for token in operands:
        if token >= 0:
            readers[token] += 1
    for v in held:
        readers[v] += 2
    inner, is_inner = np.full(num_calls, -1, np.int64), np.zeros(num_calls, np.bool_)
    length, first = np.zeros(num_calls, np.int64), np.arange(num_calls)
    count = 0
    for i in range(num_calls):
        if not adds[call_class[i]] or call_width[i] != 1:
            continue
        length[i] = 2
        count += 1
        for j in range(operand_offsets[i], operand_offsets[i + 1]):
            if operands[j] < 0 or readers[operands[j]] != 1:
                continue
            before = maker[operands[j]]
            if call_class[before] == call_class[i] and length[before]:
                inner[i], is_inner[before] = j, True
                length[i], first[i] = length[before] + 1, first[before]
                count -= 1
                break
    ends, roles = np.empty(count, np.int64), np.full((count, 3), -1, np.int64)
    count = 0
    for i in range(num_calls):
        if length[i] and not is_inner[i]:
            ends[count], roles[count, 0] = i, call_class[i]
            for k in range(2):
                producer = source[operand_offsets[first[i]] + k]
                if producer >= 0:
                    roles[count, 1 + k] = call_class[producer]
            count += 1
    return inner, ends, length[ends], roles


class SumRoles(LastUsed):
    """The roles whose chains are lists."""

    def __init__(self, most: int = 1024):
        super().__init__(most)

    def chosen(self, chains: Chains, names: Sequence[Hashable]) -> Any:
        """Which chains become lists: bool array, shape (chains,).

        Parameters
        ----------
        names : of each class, what it is called in all flushes
        """
        codes = (chains.roles + 1) @ (len(names) + 1) ** np.arange(3)          # roles as numbers
        _, example, of_chain = np.unique(codes, return_index=True, return_inverse=True)
        lists = np.zeros(len(example), bool)
        for k, role in enumerate(chains.roles[example].tolist()):
            name = tuple(None if c < 0 else names[c] for c in role)
            lengths = np.unique(chains.lengths[of_chain == k])
            lists[k] = self.get(name, False) or len(lengths) >= SEVERAL or lengths[-1] > LONG
            if lists[k]:
                self.put(name, True)
        return lists[of_chain]


SUM_ROLES = SumRoles()          # of the whole process


def fold_chains(r: Recording, s: Scan, chains: Chains, chosen: Any, list_of: Any) -> tuple[Recording, Any]:
    """The recording with chains as lists, and what number each value has there; -1 for those on the way.

    Parameters
    ----------
    chosen : bool array, shape (chains,)
    list_of : int64 array, shape (classes,)
        For classes of additions that become lists: the class of these, which may be behind all others.
    """
    folded = np.zeros(len(r.call_class), bool)
    folded[chains.ends[chosen]] = True
    kept, call_class, call_count, operands, value_of = _fold(
        r.call_class, r.call_count, s.operand_offsets, r.operands, s.value_offsets, s.maker, chains.inner, folded,
        list_of)
    infos = {int(list_of[c]): r.classes[c]._replace(operand_widths=(1,), split=(False,), slots=1)
             for c in np.flatnonzero(list_of >= 0)}
    classes = [*r.classes] + [infos[c] for c in sorted(infos) if c >= len(r.classes)]
    return replace(r, classes=classes, call_class=call_class, call_count=call_count, call_width=r.call_width[kept],
                   call_first=r.call_first[kept], operands=operands, heads=value_of[r.heads]), value_of


@compiled
def _fold(call_class, call_count, operand_offsets, operands, value_offsets, maker, inner,  # type: ignore[no-untyped-def]
          folded, list_of):
    num_calls = len(call_class)
    is_part = np.zeros(num_calls, np.bool_)
    for i in range(num_calls - 1, -1, -1):
        if (folded[i] or is_part[i]) and inner[i] >= 0:
            is_part[maker[operands[inner[i]]]] = True
    kept = np.flatnonzero(~is_part)
    new_class, new_count = call_class[kept], call_count[kept]
    tokens, value_of = np.empty(len(operands), np.int64), np.full(value_offsets[-1], -1, np.int64)
    end = values = 0
    for count, i in enumerate(kept):
        begin = end
        if folded[i]:
            at = i                              # from the last term back to the first two
            while at >= 0:
                on = inner[at]
                for j in range(operand_offsets[at + 1] - 1, operand_offsets[at] - 1, -1):
                    if j != on:
                        tokens[end] = operands[j]
                        end += 1
                at = maker[operands[on]] if on >= 0 else -1
            tokens[begin:end] = tokens[begin:end][::-1].copy()
            new_class[count], new_count[count] = list_of[call_class[i]], end - begin
        else:
            for j in range(operand_offsets[i], operand_offsets[i + 1]):
                tokens[end] = operands[j]
                end += 1
        for j in range(begin, end):
            if tokens[j] >= 0:
                tokens[j] = value_of[tokens[j]]
        for v in range(value_offsets[i], value_offsets[i + 1]):
            value_of[v] = values
            values += 1
    return kept, new_class, new_count, tokens[:end], value_of
