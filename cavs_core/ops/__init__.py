"""The op table. One file a family; importing the package fills the table."""

from . import activation, children, elementwise, index, linear, normalise, parts, random, reduce, shape, unary  # noqa: F401
from .base import TABLE, Builder, Composite, Op, lookup, mxnet_function, register
from .children import SEGMENTED

__all__ = ["TABLE", "Builder", "Composite", "Op", "lookup", "mxnet_function", "register", "supports", "SEGMENTED"]


def supports(name: str) -> bool:
    """Whether the table has an entry for an operator."""
    return name in TABLE
