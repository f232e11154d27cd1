"""Where a backward pass over MXNet's tape goes: which outputs of a node gradients come to.

MXNet hands a node zeros for the outputs that a pass does not come to. Zeros would not do for what lies behind (see
`subset`), so the graph itself is asked. MXNet gives it as a symbol, whose stored form names every node and its inputs.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .mxnet_compat import MXNetError, mx

__all__ = ["begun_outputs", "is_computed", "name_of_node"]

_LIB, check_call = mx.base._LIB, mx.base.check_call


def _symbol_of(array: Any) -> Any:
    handle = mx.base.SymbolHandle()
    check_call(_LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)))
    return mx.sym.Symbol(handle)


def name_of_node(array: Any) -> str:
    """The name of the node that made an array, or of a variable; no other one of the process has it."""
    return _symbol_of(array).name


def is_computed(array: Any) -> bool:
    """Whether an operator on the tape made an array. (One that an operator has read is a variable there from then on.)
    """
    try:
        return _symbol_of(array).get_children() is not None
    except MXNetError:
        return False


def begun_outputs(heads: Sequence[Any], touches: Mapping[str, Callable[[set[int]], Sequence[bool]]]) -> (
        tuple[dict[str, set[int]], set[str]] | None):
    """The outputs of some nodes that a pass comes to, and the variables.

    Parameters
    ----------
    heads : what it begins at
    touches : name of a node -> a function that says for some of its outputs which of its inputs lie behind them

    Returns
    -------
    name -> numbers of outputs, of all nodes that MXNet runs in the pass, whether or not it comes to them; and names of
    variables that it comes to. None if MXNet does not tell
    """
    found: dict[str, set[int]] = {}
    variables: set[str] = set()
    for head in heads:
        try:
            graph = json.loads(_symbol_of(head).tojson())
        except MXNetError:
            return None
        nodes = graph["nodes"]
        reached: list[set[int]] = [set() for _ in nodes]
        for node, output, *_ in graph["heads"]:
            reached[node].add(output)
        for node, outputs in zip(reversed(nodes), reversed(reached)):      # inputs stand before their readers
            if node["name"] in touches:
                found.setdefault(node["name"], set()).update(outputs)
            if not outputs:
                continue
            if not node["inputs"]:
                variables.add(node["name"])
            taken = [True] * len(node["inputs"])
            if node["name"] in touches:
                taken = list(touches[node["name"]](found[node["name"]]))
            for (maker, output, *_), is_taken in zip(node["inputs"], taken):
                if is_taken:
                    reached[maker].add(output)
    return found, variables
