"""cavs_core: a static vertex function, graphs of any shape, and an engine that runs them batched."""

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
from .graph import InputGraph
from .program import Program, Spec
from .face import RunOutput, RunStats, run
from .trace import trace
from .vertex import VertexFunction

__all__ = [
    "ArityError", "CycleError", "DanglingEdgeError", "DynBatchError", "GraphError", "InputGraph", "KindError",
    "Program", "ProgramError", "RunError", "RunOutput", "RunStats", "Spec", "TraceError",
    "UnsupportedOpError", "VertexFunction", "run", "trace",
]
__version__ = "0.1.0"
