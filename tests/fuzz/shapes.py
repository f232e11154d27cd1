"""How the fuzzer calls operators that change shapes, take parts, look up, multiply matrices and normalise."""

from .operators import DRAWN, call, drawing

__all__ = ["DRAWN"]

# ---- shapes ----------------------------------------------------------------------------------


@drawing("Reshape", "reshape")
def _reshape(g, x, name):
    shape = g.new_shape(x.shape)
    if g.draw.chance(0.3) and name == "reshape" and all(n != -1 for n in shape[1:]):
        return f"{x}.reshape({shape!r})"
    attrs = {"shape": shape}
    if g.draw.chance(0.15):
        attrs["reverse"] = True
    return call(g, name, x, **attrs)


@drawing("expand_dims")
def _expand(g, x, name):
    return call(g, name, x, axis=g.draw.integer(-len(x.shape) - 1, len(x.shape)))


@drawing("squeeze")
def _squeeze(g, x, name):
    ones = [k for k, n in enumerate(x.shape) if n == 1]
    if not ones and not g.draw.chance(0.3):
        return None
    if not ones or (g.allowed("squeeze all") and g.draw.chance(0.4)):
        return call(g, name, x) if g.allowed("squeeze all") else None
    axes = tuple(g.draw.some(ones))
    return call(g, name, x, axis=axes if g.draw.chance(0.5) else axes[0])


@drawing("transpose")
def _transpose(g, x, name):
    axes = list(range(len(x.shape)))
    g.draw.random.shuffle(axes)
    return g.draw.pick(call(g, name, x), call(g, name, x, axes=tuple(axes)))


@drawing("SwapAxis", "swapaxes")
def _swap(g, x, name):
    return call(g, name, x, dim1=g.draw.axis(x.shape) % len(x.shape), dim2=g.draw.axis(x.shape) % len(x.shape))


@drawing("reshape_like")
def _reshape_like(g, x, name):
    y = g.other(lambda v: v.size == x.size)
    return y and call(g, name, x, y)


@drawing("broadcast_to")
def _broadcast_to(g, x, name):
    return call(g, name, x, shape=tuple(g.draw.pick(2, 3, 0) if n == 1 else g.draw.pick(n, 0) for n in x.shape))


@drawing("broadcast_axis", "broadcast_axes")
def _broadcast_axis(g, x, name):
    ones = [k for k, n in enumerate(x.shape) if n == 1]
    axes = tuple(g.draw.some(ones)) if ones else None
    return axes and call(g, name, x, axis=axes, size=tuple(g.draw.pick(2, 3) for _ in axes))


@drawing("broadcast_like")
def _broadcast_like(g, x, name):
    y = g.other(lambda v: len(v.shape) == len(x.shape) and all(n in (1, m) for n, m in zip(x.shape, v.shape)))
    return y and call(g, name, x, y)


@drawing("tile")
def _tile(g, x, name):
    return call(g, name, x, reps=tuple(g.draw.pick(1, 1, 2) for _ in range(g.draw.integer(1, len(x.shape)))))


@drawing("repeat")
def _repeat(g, x, name):
    return call(g, name, x, repeats=g.draw.integer(1, 2), axis=g.draw.pick(None, g.draw.axis(x.shape)))


# ---- parts -----------------------------------------------------------------------------------


@drawing("Concat", "concat", "_rnn_param_concat")
def _concat(g, x, name):
    dim = g.draw.axis(x.shape) % len(x.shape)

    def beside(v):
        return len(v.shape) == len(x.shape) and all(
            n == m for k, (n, m) in enumerate(zip(v.shape, x.shape)) if k != dim
        )

    parts = [g.other(beside) or x for _ in range(g.draw.integer(1, 3))]
    return call(g, name, x, *parts, dim=dim)


@drawing("stack")
def _stack(g, x, name):
    return call(g, name, x, *[g.same(x) for _ in range(g.draw.integer(1, 2))], axis=g.draw.integer(0, len(x.shape)))


@drawing("SliceChannel", "split")
def _split(g, x, name):
    axis = g.draw.axis(x.shape) % len(x.shape)
    counts = [n for n in range(1 if g.allowed("one part") else 2, x.shape[axis] + 1) if x.shape[axis] % n == 0]
    if not counts:
        return None
    parts = g.draw.pick(*counts)
    squeeze = x.shape[axis] == parts and g.draw.chance(0.4)
    text = call(g, name, x, num_outputs=parts, axis=axis, squeeze_axis=squeeze)
    return (
        text
        if parts == 1
        else f"{text}[{g.draw.integer(0, parts - 1)}]"
        if g.draw.chance(0.5)
        else (f"{g.ns}.add_n(*{text})")
    )


@drawing("_split_v2")
def _split_v2(g, x, name):
    axis = g.draw.axis(x.shape) % len(x.shape)
    if x.shape[axis] < 2:
        return None
    cut = g.draw.integer(1, x.shape[axis] - 1)
    return f"{g.ns}.split_v2({x}, ({cut},), axis={axis})[{g.draw.integer(0, 1)}]"


def bounds(g, n):
    """begin, end, step of a slice that is not empty."""
    begin = g.draw.integer(0, n - 1)
    end = g.draw.integer(begin + 1, n)
    return g.draw.pick(
        (begin, end, 1),
        (begin, end, 1),
        (None, end, 1),
        (begin, None, 1),
        (begin - n, None, 1),
        (None, None, g.draw.pick(2, -1, -2)),
    )


@drawing("slice", "crop")
def _slice(g, x, name):
    begin, end, step = zip(*[bounds(g, n) for n in x.shape[: g.draw.integer(1, len(x.shape))]])
    return call(g, name, x, begin=begin, end=end, **({"step": step} if any(s != 1 for s in step) else {}))


@drawing("slice_axis")
def _slice_axis(g, x, name):
    axis = g.draw.axis(x.shape)
    begin, end, _ = bounds(g, x.shape[axis])
    return call(g, name, x, axis=axis, begin=begin or 0, end=end)


@drawing("slice_like")
def _slice_like(g, x, name):
    y = g.other(lambda v: len(v.shape) == len(x.shape) and all(n >= m for n, m in zip(x.shape, v.shape)))
    return y and call(g, name, x, y)


@drawing("reverse", "flip")
def _reverse(g, x, name):
    return call(
        g, name, x, axis=g.draw.pick(g.draw.axis(x.shape) % len(x.shape), tuple(g.draw.some(range(len(x.shape)))))
    )


@drawing("_slice_assign", "_slice_assign_scalar", "_crop_assign", "_crop_assign_scalar")
def _assign(g, x, name):
    begin = tuple(g.draw.integer(0, n - 1) for n in x.shape)
    end = tuple(g.draw.integer(b + 1, n) for b, n in zip(begin, x.shape))
    if name.endswith("scalar"):
        return call(g, name, x, begin=begin, end=end, scalar=g.draw.number())
    part = call(g, "slice", g.same(x), begin=begin, end=end)
    return call(g, name, x, part, begin=begin, end=end)


# ---- lookups ---------------------------------------------------------------------------------


@drawing("take")
def _take(g, x, name):
    axis = g.draw.axis(x.shape) % len(x.shape)
    index = g.indices(g.draw.shape(1, 2), x.shape[axis])
    return index and call(g, name, x, index, axis=axis, mode=g.draw.pick("clip", "wrap"))


@drawing("Embedding", "_contrib_SparseEmbedding", "_sparse_Embedding")
def _embedding(g, x, name):
    rows, width = g.draw.integer(2, 5), g.draw.integer(1, 4)
    table, index = g.weight((rows, width)), g.indices(g.draw.shape(1, 2), rows)
    return table and index and call(g, name, index, table, input_dim=rows, output_dim=width)


@drawing("gather_nd")
def _gather_nd(g, x, name):
    index = g.indices((g.draw.integer(1, len(x.shape)), g.draw.integer(1, 3)), min(x.shape))
    return index and call(g, name, x, index)


@drawing("one_hot")
def _one_hot(g, x, name):
    depth = g.draw.integer(1, 4)
    index = g.indices(g.draw.shape(1, 2), depth)
    return index and call(g, name, index, depth=depth, on_value=g.draw.pick(1.0, 2.0), off_value=g.draw.pick(0.0, 0.5))


@drawing("pick", "choose_element_0index")
def _pick(g, x, name):
    axis = g.draw.axis(x.shape) % len(x.shape) if name == "pick" else len(x.shape) - 1
    keep = name == "pick" and g.draw.chance(0.5)
    shape = tuple(n for k, n in enumerate(x.shape) if k != axis)
    index = g.indices(shape, x.shape[axis]) if shape else None
    return index and (call(g, name, x, index, axis=axis, keepdims=keep) if name == "pick" else call(g, name, x, index))


@drawing("batch_take")
def _batch_take(g, x, name):
    index = g.indices(x.shape[:1], x.shape[1], "int32") if len(x.shape) == 2 else None
    return index and call(g, name, x, index)


# ---- products --------------------------------------------------------------------------------


@drawing("FullyConnected")
def _dense(g, x, name):
    flatten, units = g.draw.chance(0.6), g.draw.integer(1, 4)
    width = x.size // x.shape[0] if flatten else x.shape[-1]
    weight, bias = g.weight((units, width)), g.draw.chance(0.6) and g.weight((units,))
    attrs = {"num_hidden": units, "flatten": flatten}
    if weight is None:
        return None
    return call(g, name, x, weight, bias, **attrs) if bias else call(g, name, x, weight, no_bias=True, **attrs)


@drawing("dot")
def _dot(g, x, name):
    ta, tb = g.draw.chance(0.2), g.draw.chance(0.2)
    inner = x.shape[0] if ta else x.shape[-1]
    y = g.other(lambda v: v.shape[-1 if tb else 0] == inner) if g.draw.chance(0.5) else None
    if y is None:
        n = g.draw.integer(1, 3)
        y = g.weight((n, inner) if tb else (inner, n))
    attrs = {key: True for key, on in (("transpose_a", ta), ("transpose_b", tb)) if on}
    return y and call(g, name, x, y, **attrs)


@drawing("batch_dot", "_linalg_gemm2", "_linalg_gemm")
def _batch_dot(g, x, name):
    if len(x.shape) != 3 and (len(x.shape) < 2 or name == "batch_dot"):
        return None
    ta, tb = g.draw.chance(0.3), g.draw.chance(0.3)
    *front, n, k = x.shape
    n, k = (k, n) if ta else (n, k)
    m = g.draw.integer(1, 3)
    y = g.weight((*front, m, k) if tb else (*front, k, m))
    attrs = {"transpose_a": ta, "transpose_b": tb}
    if name == "batch_dot":
        return y and call(g, name, x, y, **attrs)
    attrs["alpha"] = g.draw.pick(1.0, 0.5)
    if name == "_linalg_gemm2":
        return y and call(g, name, x, y, **attrs)
    z = g.weight((*front, n, m))
    return y and z and call(g, name, x, y, z, beta=g.draw.pick(1.0, 0.5), **attrs)


# ---- normalisation ---------------------------------------------------------------------------


@drawing("LayerNorm")
def _layer_norm(g, x, name):
    axis = g.draw.axis(x.shape)
    gamma, beta = g.weight((x.shape[axis],)), g.weight((x.shape[axis],))
    return x.shape[axis] > 1 and gamma and beta and call(g, name, x, gamma, beta, axis=axis, eps=0.1)


@drawing("InstanceNorm", "GroupNorm")
def _group_norm(g, x, name):
    if len(x.shape) < 3:
        return None
    groups = g.draw.pick(1, x.shape[1])
    gamma, beta = g.weight((x.shape[1],)), g.weight((x.shape[1],))
    attrs = {"num_groups": groups} if name == "GroupNorm" else {}
    return gamma and beta and call(g, name, x, gamma, beta, eps=0.1, **attrs)


@drawing("BatchNorm")
def _batch_norm(g, x, name):
    if len(x.shape) < 2 or g.ns == "F":
        return None
    shape = (x.shape[1],)
    gamma, beta, mean, var = g.weight(shape), g.weight(shape), g.constant(shape), g.constant(shape, positive=True)
    return call(
        g, name, x, gamma, beta, mean, var, eps=0.1, fix_gamma=g.draw.chance(0.5), use_global_stats=g.draw.chance(0.5)
    )


@drawing("L2Normalization")
def _l2_normalise(g, x, name):
    return call(
        g, name, x, mode=g.draw.pick("instance", "channel", "spatial") if len(x.shape) > 2 else "instance", eps=0.1
    )
