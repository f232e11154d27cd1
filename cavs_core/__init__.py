"""cavs_core: a static vertex function, graphs of any shape, and an engine that runs them batched.

The names behind the comment in `__all__` are for those who build another face on the engine, as `gluon_dynbatch` does.
"""

from .backends.mxnet_ops import MXNetBackend
from .errors import (
    ArityError,
    CycleError,
    DanglingEdgeError,
    DynBatchError,
    GraphError,
    KindError,
    ProgramError,
    RunError,
    TraceError,
    UnsupportedOpError,
)
from .executor import Run
from .face import RunOutput, RunStats, run
from .graph import InputGraph
from .layout import ClassLayout, Frame, Layout, Place, Read, RowIndex, offsets_of, plan_messages
from .lazy import LazyArray, Listener, become_array, listening, make_results, owner_of, thread_state, token_of
from .leaf_copy import copy_arrays
from .ops import Builder, lookup, supports
from .plan import ClassPlan, VertexProgram, own_outputs, plan_class, respecified
from .program import ROW, SHARED, Arg, Const, Gather, Leaf, Param, Program, Shared, Spec
from .ragged import one_row_program
from .tape import UNTOUCHED, TapeBridge, needs_gradient
from .trace import flatten, inactive, map_nested, trace
from .vertex import VertexFunction

__all__ = [
    "ArityError", "CycleError", "DanglingEdgeError", "DynBatchError", "GraphError", "InputGraph", "KindError",
    "Program", "ProgramError", "RunError", "RunOutput", "RunStats", "Spec", "TraceError", "UnsupportedOpError",
    "VertexFunction", "run", "trace",
    # for other faces
    "flatten", "inactive", "map_nested", "offsets_of",
    "Arg", "Builder", "ClassLayout", "ClassPlan", "Const", "Frame", "Gather", "Layout", "LazyArray", "Leaf",
    "Listener", "MXNetBackend", "Param", "Place", "ROW", "Read", "RowIndex", "Run", "SHARED", "Shared", "TapeBridge",
    "UNTOUCHED", "VertexProgram", "become_array", "copy_arrays", "listening", "lookup", "make_results",
    "needs_gradient", "one_row_program", "own_outputs", "owner_of", "plan_class", "plan_messages", "respecified",
    "supports", "thread_state", "token_of",
]
__version__ = "0.1.0"
