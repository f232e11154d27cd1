"""gluon_dynbatch: automatic dynamic batching for Gluon. The engine below it is `cavs_core`."""

from cavs_core import DynBatchError

__all__ = ["DynBatchError"]
__version__ = "0.1.0"
