"""gluon_dynbatch: automatic dynamic batching for Gluon. The engine below it is `cavs_core`."""

from . import policies
from .errors import BatchingMismatchError, DiscardedError, DynBatchError
from .scope import batching, flush
from .studies.tuning import tune
from .vertex import vertex

__all__ = ["BatchingMismatchError", "DiscardedError", "DynBatchError", "batching", "flush", "policies", "tune",
           "vertex"]
__version__ = "0.1.0"
