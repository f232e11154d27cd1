"""What generated kernels read and write through: typed pointers, scratch, and operations that may be reordered.

A `Rows` is a bare pointer with the name of the buffer that it points into. Kernels promise that buffers of different
names never overlap within a row; the stores say so to LLVM, whose loops would otherwise compare the ends of all pairs
of pointers, or give up where there are many.
"""

from __future__ import annotations

import operator

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

__all__ = ["HELPER", "OPTIONS", "STACK_BYTES", "pointer", "plain", "scratch", "release", "plus", "times", "larger",
           "smaller", "copy_row", "add_up", "add_up_edges", "max_edges"]

#: of kernels; inf and nan are kept, and nothing is reordered but what `plus` and `times` add up
OPTIONS = dict(error_model="numpy", fastmath={"contract", "nsz"}, boundscheck=False)
#: of the functions that they call
HELPER = dict(OPTIONS, forceinline=True)
#: a larger piece of scratch does not go on the stack, which in a thread may be small
STACK_BYTES = 64 * 1024


class Rows(types.Type):
    """A pointer to elements of `dtype` in the buffer called `name`; `p[i]`, `p[i] = v` and `p + i` count elements.

    Of a pointer without a name nothing is known.
    """

    def __init__(self, dtype: types.Type, name: str, others: tuple[str, ...]):
        self.dtype, self.buffer, self.others = dtype, name, others
        super().__init__(name=f"Rows({dtype}, {name}, {others})")


@register_model(Rows)
class _RowsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.dtype).get_data_type().as_pointer())


def _literals(*args) -> tuple:
    if not all(isinstance(a, types.Literal) for a in args):
        raise TypingError(f"expected literals, got {args}")
    return tuple(a.literal_value for a in args)


def _rows(dtype, name, buffers) -> Rows:
    dtype, name, buffers = _literals(dtype, name, buffers)
    return Rows(getattr(types, dtype), name, tuple(other for other in buffers.split() if other != name))


@intrinsic(prefer_literal=True)
def pointer(typingctx, table, slot, dtype, name, buffers):
    """The pointer in word `slot` of the table at address `table`; `buffers` names all that the kernel has."""
    rows = _rows(dtype, name, buffers)

    def codegen(context, builder, sig, args):
        words = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.inttoptr(builder.load(builder.gep(words, [args[1]])), context.get_value_type(rows))

    return rows(table, types.int64, dtype, name, buffers), codegen


@intrinsic
def plain(typingctx, rows):
    """The pointer without its name: helpers that take it are compiled once, not for every buffer."""
    def codegen(context, builder, sig, args):
        return args[0]

    return Rows(rows.dtype, "", ())(rows), codegen


@intrinsic(prefer_literal=True)
def scratch(typingctx, size, dtype, name, buffers):
    """Memory for `size` (a literal) elements: on the stack, or, beyond STACK_BYTES, to be given back by `release`."""
    rows, (count,) = _rows(dtype, name, buffers), _literals(size)
    nbytes = count * rows.dtype.bitwidth // 8

    def codegen(context, builder, sig, args):
        if nbytes > STACK_BYTES:
            kind = ir.FunctionType(cgutils.voidptr_t, [ir.IntType(64)])
            malloc = cgutils.get_or_insert_function(builder.module, kind, "malloc")
            space = builder.call(malloc, [ir.IntType(64)(nbytes)])
        else:
            space = cgutils.alloca_once(builder, ir.ArrayType(context.get_data_type(rows.dtype), count))
            space.align = 64
        return builder.bitcast(space, context.get_value_type(rows))

    return rows(size, dtype, name, buffers), codegen


@intrinsic
def release(typingctx, rows):
    """Give back what `scratch` took beyond the stack."""
    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        free = cgutils.get_or_insert_function(builder.module, kind, "free")
        builder.call(free, [builder.bitcast(args[0], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(rows), codegen


# ---- p[i], p[i] = v, p + i -------------------------------------------------------------------------------------------

@infer_global(operator.getitem)
class _Get(AbstractTemplate):
    def generic(self, args, kws):
        return signature(args[0].dtype, args[0], types.int64) if isinstance(args[0], Rows) else None


@infer_global(operator.setitem)
class _Set(AbstractTemplate):
    def generic(self, args, kws):
        rows = args[0]
        return signature(types.none, rows, types.int64, rows.dtype) if isinstance(rows, Rows) else None


@infer_global(operator.add)
class _Shift(AbstractTemplate):
    def generic(self, args, kws):
        return signature(args[0], args[0], types.int64) if isinstance(args[0], Rows) else None


def _mark(builder, access, rows: Rows) -> None:
    """Say which buffer an access belongs to, and which ones not."""
    module = builder.module
    domain = module.add_metadata(["kernel"])

    def scopes(names):
        return module.add_metadata([module.add_metadata([name, domain]) for name in names])

    access.align = rows.dtype.bitwidth // 8
    if not rows.buffer:
        return
    access.set_metadata("alias.scope", scopes([rows.buffer]))
    if rows.others:
        access.set_metadata("noalias", scopes(rows.others))


@lower_builtin(operator.getitem, Rows, types.Integer)
def _get(context, builder, sig, args):
    value = builder.load(builder.gep(args[0], [args[1]], inbounds=True))
    _mark(builder, value, sig.args[0])
    return value


@lower_builtin(operator.setitem, Rows, types.Integer, types.Any)
def _set(context, builder, sig, args):
    _mark(builder, builder.store(args[2], builder.gep(args[0], [args[1]], inbounds=True)), sig.args[0])
    return context.get_dummy_value()


@lower_builtin(operator.add, Rows, types.Integer)
def _shift(context, builder, sig, args):
    return builder.gep(args[0], [args[1]], inbounds=True)


# ---- reductions ------------------------------------------------------------------------------------------------------

def _operation(name: str, on_floats, on_ints):
    """A function of two numbers of one dtype; the second is cast to that of the first."""
    def op(typingctx, x, y):
        def codegen(context, builder, sig, args):
            made = on_floats if isinstance(x, types.Float) else on_ints
            return made(builder, x, *args)

        return x(x, x), codegen

    op.__name__ = name
    return intrinsic(op)


def _extreme(intrinsic_name: str, than: str):
    """The larger or the smaller of two; nan if one is nan."""
    def on_floats(builder, dtype, a, b):
        if llvmlite.binding.llvm_version_info >= (18,):     # older ones cannot compile it on x86
            kind = ir.FunctionType(a.type, [a.type, a.type])
            return builder.call(builder.module.declare_intrinsic(intrinsic_name, [a.type], kind), [a, b])
        first = builder.or_(builder.fcmp_ordered(than, a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(first, a, b)

    def on_ints(builder, dtype, a, b):
        compare = builder.icmp_signed if dtype.signed else builder.icmp_unsigned
        return builder.select(compare(than, a, b), a, b)

    return on_floats, on_ints


_REORDERED = ("reassoc", "nsz", "contract")

plus = _operation("plus", lambda b, t, x, y: b.fadd(x, y, flags=_REORDERED), lambda b, t, x, y: b.add(x, y))
times = _operation("times", lambda b, t, x, y: b.fmul(x, y, flags=_REORDERED), lambda b, t, x, y: b.mul(x, y))
larger = _operation("larger", *_extreme("llvm.maximum", ">"))
smaller = _operation("smaller", *_extreme("llvm.minimum", "<"))


# ---- operands that are made of several rows --------------------------------------------------------------------------

@njit(**HELPER)
def copy_row(target, source, size):
    for j in range(size):
        target[j] = source[j]


@njit(**OPTIONS)
def add_up(target, base, stride, size, index, begin, end):
    """target[:size] = the sum of the stretches at base + index[begin:end] * stride."""
    if begin == end:
        for j in range(size):
            target[j] = 0
    elif end == begin + 1:
        copy_row(target, base + index[begin] * stride, size)
    else:
        one, two = base + index[begin] * stride, base + index[begin + 1] * stride
        for j in range(size):
            target[j] = one[j] + two[j]
        for e in range(begin + 2, end):
            more = base + index[e] * stride
            for j in range(size):
                target[j] += more[j]


@njit(**OPTIONS)
def add_up_edges(target, base, stride, size, begin, end):
    """target[:size] = the sum of the stretches at base + e * stride, e in begin:end."""
    if begin == end:
        for j in range(size):
            target[j] = 0
    else:
        copy_row(target, base + begin * stride, size)
        for e in range(begin + 1, end):
            more = base + e * stride
            for j in range(size):
                target[j] += more[j]


@njit(**OPTIONS)
def max_edges(target, base, stride, size, begin, end):
    """target[:size] = the maximum of the stretches at base + e * stride, e in begin:end, which is not empty."""
    copy_row(target, base + begin * stride, size)
    for e in range(begin + 1, end):
        more = base + e * stride
        for j in range(size):
            target[j] = larger(target[j], more[j])
