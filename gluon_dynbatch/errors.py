"""Errors of the Gluon face; their root is cavs_core's."""

from cavs_core import DynBatchError

__all__ = ["DynBatchError", "BatchingMismatchError", "DiscardedError"]


class BatchingMismatchError(DynBatchError):
    """check=True: a call gave another value batched than by itself."""


class DiscardedError(DynBatchError):
    """A value is asked for that was never computed, because an exception left its scope."""
