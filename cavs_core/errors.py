"""Every error that the project raises on purpose; they share one root."""

from .mxnet_compat import MXNetError

__all__ = [
    "DynBatchError", "GraphError", "CycleError", "DanglingEdgeError", "ArityError",
    "ProgramError", "UnsupportedOpError", "TraceError", "KindError", "RunError",
]


class DynBatchError(MXNetError):
    """Root of every error this project raises on purpose."""


class GraphError(DynBatchError):
    """An input graph cannot be scheduled. The message names the sample and the vertex."""


class CycleError(GraphError):
    """A vertex is its own ancestor."""


class DanglingEdgeError(GraphError):
    """An edge names a vertex that its graph does not have."""


class ArityError(GraphError):
    """A vertex has a number of children that its vertex function does not gather."""


class ProgramError(DynBatchError):
    """An instruction's operands do not fit: shapes, dtypes or attributes."""


class UnsupportedOpError(ProgramError):
    """The op table has no entry for an operator that a traced function calls."""


class TraceError(DynBatchError):
    """A function did something during tracing that a static program cannot express."""


class KindError(TraceError):
    """Values of vertices and values of children were mixed without `spread` or a reduction."""


class RunError(DynBatchError):
    """The inputs of a run do not fit its program or its graphs."""
