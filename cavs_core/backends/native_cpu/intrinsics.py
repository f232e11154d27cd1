"""What numba's Python lacks: calls by address, atomic words, pointers that move."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

__all__ = ["call_address", "shift", "words_at", "atomic_add", "atomic_load", "atomic_store", "as_element",
           "lanes_of", "wide_lanes_of", "scratch", "VECTOR_BYTES", "WIDE_BYTES"]

VECTOR_BYTES = 32
# Vectors of large products. numba compiles for what this processor can do, or for what it is told.
_FEATURES = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
WIDE_BYTES = 64 if "+avx512f" in _FEATURES.split(",") else 32
_WORD = ir.IntType(64)


@intrinsic
def call_address(typingctx, address, args):
    """Call the C function at `address`, which returns nothing, with a tuple of numbers and pointers."""
    def codegen(context, builder, signature, values):
        arguments = cgutils.unpack_tuple(builder, values[1])
        function = ir.FunctionType(ir.VoidType(), [x.type for x in arguments])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, args), codegen


@intrinsic
def shift(typingctx, pointer, count):
    """A pointer `count` elements further."""
    def codegen(context, builder, signature, values):
        return builder.gep(values[0], [values[1]])

    return pointer(pointer, types.int64), codegen


def _word_at(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def words_at(typingctx, address):
    """A pointer to the int64 at an address."""
    def codegen(context, builder, signature, values):
        return _word_at(builder, values[0])

    return types.CPointer(types.int64)(types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to the int64 at an address; all that was written before is seen by who reads the new value."""
    def codegen(context, builder, signature, values):
        return builder.atomic_rmw("add", _word_at(builder, values[0]), values[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at an address, and with it all that its writer wrote before."""
    def codegen(context, builder, signature, values):
        return builder.load_atomic(_word_at(builder, values[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, address, value):
    """Set the int64 at an address, after all that was written before."""
    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _word_at(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def as_element(typingctx, pointer, value):
    """An integer as a number of the pointer's dtype."""
    def codegen(context, builder, signature, values):
        return context.cast(builder, values[1], types.int64, pointer.dtype)

    return pointer.dtype(pointer, types.int64), codegen


@intrinsic
def lanes_of(typingctx, pointer):
    """How many elements a vector of 32 bytes has."""
    def codegen(context, builder, signature, values):
        return _WORD(VECTOR_BYTES * 8 // pointer.dtype.bitwidth)

    return types.int64(pointer), codegen


@intrinsic
def wide_lanes_of(typingctx, pointer):
    """How many elements a vector of WIDE_BYTES has."""
    def codegen(context, builder, signature, values):
        return _WORD(WIDE_BYTES * 8 // pointer.dtype.bitwidth)

    return types.int64(pointer), codegen


@intrinsic(prefer_literal=True)
def scratch(typingctx, pointer, nbytes):
    """So many bytes (a literal) of the stack, as a pointer of the same kind."""
    def codegen(context, builder, signature, values):
        element = context.get_value_type(pointer.dtype)
        space = cgutils.alloca_once(builder, element, size=nbytes.literal_value * 8 // pointer.dtype.bitwidth)
        space.align = 64
        return space

    return pointer(pointer, nbytes), codegen
