"""gluon_dynbatch: automatic dynamic batching for Gluon. The engine below it is `cavs_core`."""

from cavs_core import DynBatchError

from .scope import batching, flush
from .vertex import vertex

__all__ = ["DynBatchError", "batching", "flush", "vertex"]
__version__ = "0.1.0"
