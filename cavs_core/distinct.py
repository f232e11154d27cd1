"""Vertices that repeat others: the same program on the same children and the same integers. Pure: no device, no MXNet.

A word that stands in two sentences, a phrase that stands in two trees, an atom whose surroundings are those of another
one: the first of them runs, and whoever gathers a later one gathers the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .compiling import compiled
from .graph import InputGraph, IntArray
from .schedule import depths_of

__all__ = ["Distinct", "find_distinct"]


class Distinct(NamedTuple):
    """A graph without repeats.

    Attributes
    ----------
    graph : InputGraph, all of it one sample: vertices of several samples may gather the same ones
    vertices : int64 array, the vertices of the whole graph that are left
    number : int64 array, for each vertex of the whole graph its number there, that of the first one for a repeat
    depth : int64 array, of the vertices that are left
    """

    graph: InputGraph
    vertices: IntArray
    number: IntArray
    depth: IntArray


def find_distinct(graph: InputGraph, class_of: IntArray, may_repeat: Any, keys: IntArray, asks: Any) -> Distinct:
    """Leave out the vertices that repeat others.

    Parameters
    ----------
    graph : InputGraph
    class_of : int64 array, shape (vertices,)
    may_repeat : bool array, shape (classes,): whether equal children and keys have equal results
    keys : int64 array, shape (vertices, columns)
    asks : bool array, shape (classes, columns): whether vertices of a class differ where their keys do
    """
    depth = depths_of(graph)
    first = _first_of_its_kind(graph.child_indptr, graph.child_index, depth, class_of, may_repeat, keys, asks)
    indptr, children, vertices, number, left_depth = _without(graph.child_indptr, graph.child_index, depth, first)
    left = InputGraph.trusted(indptr, children, np.array([0, len(vertices)], np.int64))
    return Distinct(left, vertices, number, left_depth)


@compiled
def _without(child_indptr, child_index, depth, first):  # type: ignore[no-untyped-def]
    """Children of the vertices that are their own first ones; these vertices, the number of all, and their depths."""
    number = np.empty(len(first), np.int64)
    count = edges = 0
    for v in range(len(first)):
        if first[v] == v:
            number[v] = count
            count += 1
            edges += child_indptr[v + 1] - child_indptr[v]
    for v in range(len(first)):
        number[v] = number[first[v]]
    indptr, children = np.zeros(count + 1, np.int64), np.empty(edges, np.int64)
    vertices, left_depth = np.empty(count, np.int64), np.empty(count, np.int64)
    count = edges = 0
    for v in range(len(first)):
        if first[v] == v:
            vertices[count], left_depth[count] = v, depth[v]
            for e in range(child_indptr[v], child_indptr[v + 1]):
                children[edges] = number[child_index[e]]
                edges += 1
            count += 1
            indptr[count] = edges
    return indptr, children, vertices, number, left_depth


@compiled
def _first_of_its_kind(child_indptr, child_index, depth, class_of, may_repeat, keys, asks):  # type: ignore[no-untyped-def]
    """For each vertex the first one, by rising depth, that does the same."""
    begins = np.zeros(len(depth) + 1, np.int64)
    for d in depth:
        begins[d + 1] += 1
    for d in range(len(depth)):
        begins[d + 1] += begins[d]
    order = np.empty(len(depth), np.int64)
    for v in range(len(depth)):
        order[begins[depth[v]]] = v
        begins[depth[v]] += 1
    first, codes = np.arange(len(order)), np.empty(len(order), np.uint64)
    size = 16
    while size < 2 * len(order):
        size *= 2
    table, mask = np.full(size, -1, np.int64), np.uint64(size - 1)
    for v in order:
        if not may_repeat[class_of[v]]:
            continue
        begin, end = child_indptr[v], child_indptr[v + 1]
        code = np.uint64(class_of[v]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(end - begin)
        for e in range(begin, end):
            code = (code ^ np.uint64(first[child_index[e]])) * np.uint64(0xFF51AFD7ED558CCD)
            code ^= code >> np.uint64(32)
        for j in range(keys.shape[1]):
            key = keys[v, j] if asks[class_of[v], j] else 0
            code = (code ^ np.uint64(key)) * np.uint64(0xC4CEB9FE1A85EC53)
            code ^= code >> np.uint64(32)
        codes[v] = code
        at = code & mask
        while table[at] >= 0:
            w = table[at]
            same = codes[w] == code and class_of[w] == class_of[v]
            same &= child_indptr[w + 1] - child_indptr[w] == end - begin
            for j in range(end - begin if same else 0):
                same &= first[child_index[child_indptr[w] + j]] == first[child_index[begin + j]]
            for j in range(keys.shape[1] if same else 0):
                same &= keys[w, j] == keys[v, j] or not asks[class_of[v], j]
            if same:
                break
            at = (at + np.uint64(1)) & mask
        if table[at] >= 0:
            first[v] = table[at]
        else:
            table[at] = v
    return first
