"""Operands and accumulators of the P·V product, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...device.arithmetic import permute_keys as _permute_keys_triton
from ...device.gluon import reinterpret

_permute_keys = gluon.jit(_permute_keys_triton.fn)


@gluon.constexpr_function
def is_16bit(dtype):
    return dtype.primitive_bitwidth == 16


@gluon.jit
def split_columns(x):
    """Return the left and the right half of the columns of ``[M, N]``; only renames registers."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def join_columns(left, right, LAYOUT: gl.constexpr):
    """Return the columns of two tensors side by side; only renames registers."""
    both = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def inverse_power_of_two(x):
    """Return ``1 / x`` of fp32 powers of two, such as value scales, in one instruction."""
    return (0x7F000000 - x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def to_mma_operand(p, dtype: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return probabilities ``[64, N]`` as the left operand of a product with values of ``dtype``.

    ``O_LAYOUT`` is the layout of the product.
    """
    if dtype == gl.float8e4nv:
        p = _permute_keys(p)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4 if dtype == gl.float8e4nv else 2)
    return gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)


@gluon.jit
def issue_pv_mma(acc, p, alpha, v):
    """Issue ``p @ v``, added to ``acc * alpha`` unless ``v`` is FP8; after the wait, :func:`add_pv` finishes it."""
    if v.dtype == gl.float8e4nv:
        # A fresh accumulator per tile: Hopper's FP8 MMAs accumulate in fewer bits than fp32.
        zero = gl.zeros_like(acc)
        product = warpgroup_mma(p, v, zero, use_acc=False, is_async=True)
    else:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
        product = warpgroup_mma(p, v, acc * alpha, is_async=True)
    return product


@gluon.jit
def add_pv(acc, product, alpha, IS_FP8: gl.constexpr):
    """Return ``acc * alpha`` plus the finished product."""
    if IS_FP8:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
        product = acc * alpha + product
    return product


@gluon.jit
def column_chunks(x, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the columns of ``x`` in chunks of ``WIDTH``; only renames registers."""
    N: gl.constexpr = x.shape[1]
    if N == WIDTH:
        chunks = (gl.convert_layout(x, LAYOUT, assert_trivial=True),)
    else:
        left, right = split_columns(x)
        chunks = column_chunks(left, WIDTH, LAYOUT) + column_chunks(right, WIDTH, LAYOUT)
    return chunks


@gluon.jit
def value_chunk(v, chunk: gl.constexpr, WIDTH: gl.constexpr):
    """Return a chunk of ``WIDTH`` channels of values as ``[N, WIDTH]``; E4M3 ones are stored as ``[Dv, N]``."""
    if v.dtype == gl.float8e4nv:
        SHAPE: gl.constexpr = [v.shape[0] // WIDTH, WIDTH, v.shape[1]]
        v = reinterpret(v, v.dtype, SHAPE, v.layout).index(chunk).permute([1, 0])
    return v


@gluon.jit
def finish_pv(accs, product, p, alpha, v):
    """Wait for the product with the first chunk of values, issue the one with the second, and add both.

    The second runs while the first is added.
    """
    IS_FP8: gl.constexpr = v.dtype == gl.float8e4nv
    product = warpgroup_mma_wait(0, deps=[product])
    if len(accs) == 1:
        added = (add_pv(accs[0], product, alpha, IS_FP8),)
    else:
        second = issue_pv_mma(accs[1], p, alpha, value_chunk(v, 1, accs[1].shape[1]))
        first = add_pv(accs[0], product, alpha, IS_FP8)
        # Depending on the sum keeps the compiler from adding after the next products, when registers are short.
        second, first = warpgroup_mma_wait(0, deps=[second, first])
        added = (first, add_pv(accs[1], second, alpha, IS_FP8))
    return added
