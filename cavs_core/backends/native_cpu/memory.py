"""Memory for compiled code: buffers that are reused from step to step, and the addresses of arrays."""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict

import numpy as np

__all__ = ["Arena", "ARENA", "Block", "address_of"]

_ALIGNMENT = 64
_SMALLEST = 4096        # bytes of the smallest class


class Block:
    """A stretch of memory, aligned to a cache line."""

    __slots__ = ("memory", "address", "nbytes", "given_back")

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        shift = -address_of(raw) % _ALIGNMENT
        self.memory = raw[shift:shift + nbytes]
        self.address = address_of(raw) + shift
        self.nbytes = nbytes
        self.given_back = 0     # the arena's clock then

    def array(self, shape: tuple[int, ...], dtype: str = "float32", offset: int = 0) -> np.ndarray:
        """The memory from a byte on, as an array that keeps it alive."""
        return np.ndarray(shape, dtype, self.memory, offset)


class Arena:
    """Blocks by size: taken, given back, and taken again by the next step. Any thread may do either.

    Mini-batches differ in size, and memory that nobody has touched yet is slow. So a block may be larger than what is
    asked for, up to twice; and a new one has room to grow. What is never touched costs no memory. A block that nobody
    wanted while `patience` others were taken is let go.

    Examples
    --------
    >>> arena = Arena()
    >>> block = arena.take(10_000)
    >>> block.array((50, 50))[:] = 1
    >>> arena.give_back(block)
    >>> arena.take(9_500) is block
    True
    """

    # There is no lock: each change is one operation on a list, and so whole by itself, also in a forked child.

    def __init__(self, patience: int = 1000) -> None:
        self._patience = patience
        self._free: dict[int, list[Block]] = defaultdict(list)      # by size class; the end was used last
        self._clock = self._made = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least so many bytes; what is in it is undefined."""
        self._clock += 1
        smallest = _class_of(nbytes)
        for size in range(smallest, smallest + _PER_DOUBLING + 1):
            if self._free[size]:
                try:
                    return self._free[size].pop()
                except IndexError:      # another thread was faster
                    pass
        self._made += 1
        return Block(_bytes_of(smallest + 1))

    def give_back(self, block: Block) -> None:
        """Nobody reads or writes the block any more."""
        block.given_back = self._clock
        self._free[_class_of(block.nbytes)].append(block)
        if self._clock % 64 == 0:
            self._trim()

    def _trim(self) -> None:
        for blocks in list(self._free.values()):
            try:
                while blocks[0].given_back + self._patience < self._clock:
                    blocks.pop(0)
            except IndexError:      # all are gone
                pass

    def stats(self) -> dict[str, int]:
        """Blocks taken and made so far, and what lies free."""
        free = [block.nbytes for blocks in list(self._free.values()) for block in blocks]
        return {"taken": self._clock, "made": self._made, "free_blocks": len(free), "free_bytes": sum(free)}


_PER_DOUBLING = 4       # size classes


def _class_of(nbytes: int) -> int:
    """The number of the smallest class that holds so many bytes: 4, 5, 6, 7, 8, 10, 12, 14, 16, .. times 1024."""
    units = -(-max(nbytes, _SMALLEST) // 1024)
    shift = units.bit_length() - 3
    return _PER_DOUBLING * shift + -(-units // (1 << shift)) - 4


def _bytes_of(size: int) -> int:
    """The bytes of a class."""
    return (4 + size % _PER_DOUBLING) << (size // _PER_DOUBLING + 10)


def _asked_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


_HEAD = object.__basicsize__        # in CPython the address is what an array has behind the head of all objects
_address_at = ctypes.c_void_p.from_address


def _read_address(array: np.ndarray) -> int:
    return _address_at(id(array) + _HEAD).value or 0


def _is_where_it_should_be() -> bool:
    """Whether addresses are found there; arrays are tried that differ in all that may move them."""
    if sys.implementation.name != "cpython":
        return False
    base = np.arange(24.0).reshape(2, 3, 4)
    return all(_read_address(x) == _asked_address(x) for x in (base, base[1], base[:, 1:, ::2], base.T, base[:0]))


#: where an array's first element stands; read it takes 0.1 us, asked for 1 us, and a step asks for about a hundred
address_of = _read_address if _is_where_it_should_be() else _asked_address


ARENA = Arena()     # what everybody takes from
