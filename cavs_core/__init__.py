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
from .run import RunOutput, RunStats, run
from .schedule import Schedule, schedule
from .trace import trace
from .vertex import VertexFunction

__all__ = [
    "ArityError", "CycleError", "DanglingEdgeError", "DynBatchError", "GraphError", "InputGraph", "KindError",
    "Program", "ProgramError", "RunError", "RunOutput", "RunStats", "Schedule", "Spec", "TraceError",
    "UnsupportedOpError", "VertexFunction", "run", "schedule", "trace",
]
__version__ = "0.1.0"
