"""Rotation of queries by MMAs with a Hadamard matrix in shared memory, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .attend import product_layout
from .mma import join_columns
from .tile_range import ROWS

ORDER = gl.constexpr(64)
"""Order of the matrix: the channels that a row of shared memory holds in 16 bits."""


@gluon.jit
def hadamard_matrix(dtype: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a matrix of order 64 with Hadamard matrices of order ``SIZE``, 32 or 64, on its diagonal, zeros elsewhere.

    Entries are -1 where row and column have an odd number of common bits.
    """
    row = gl.arange(0, ORDER, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, ORDER, layout=gl.SliceLayout(0, LAYOUT))
    # One word holds the signs of a row's first 32 columns; the other columns have the same signs or the opposite ones.
    signs = gl.where((row & 1) != 0, 0xAAAAAAAA - (1 << 32), 0)
    signs ^= gl.where((row & 2) != 0, 0xCCCCCCCC - (1 << 32), 0)
    signs ^= gl.where((row & 4) != 0, 0xF0F0F0F0 - (1 << 32), 0)
    signs ^= gl.where((row & 8) != 0, 0xFF00FF00 - (1 << 32), 0)
    signs ^= gl.where((row & 16) != 0, 0xFFFF0000 - (1 << 32), 0)
    signs = signs[:, None]
    if SIZE == ORDER:
        signs = signs ^ gl.where(((row & 32) != 0)[:, None] & ((column & 32) != 0)[None, :], -1, 0)
    one: gl.constexpr = 0x3F80 if dtype == gl.bfloat16 else 0x3C00
    bits = (((signs >> (column & 31)[None, :]) & 1) << 15) | one
    if SIZE < ORDER:
        bits = gl.where((row[:, None] ^ column[None, :]) < SIZE, bits, 0)
    return bits.to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def rotate_by_mma(q, matrix, HADAMARD_SIZE: gl.constexpr):
    """Return queries ``[64, D]`` in shared memory times unnormalized Hadamard matrices; unchanged for a size of 0."""
    D: gl.constexpr = q.shape[1]
    X_LAYOUT: gl.constexpr = product_layout(D, 16)
    if HADAMARD_SIZE == 0:
        x = q.load(X_LAYOUT).to(gl.float32)
    else:
        zero = gl.zeros([ROWS, ORDER], gl.float32, product_layout(ORDER, 16))
        x = warpgroup_mma(q.slice(0, ORDER, 1), matrix, zero, use_acc=False, is_async=True)
        if D == ORDER:
            x = gl.convert_layout(warpgroup_mma_wait(0, deps=[x]), X_LAYOUT, assert_trivial=True)
        else:
            x_1 = warpgroup_mma(q.slice(ORDER, ORDER, 1), matrix, zero, use_acc=False, is_async=True)
            x_0, x_1 = warpgroup_mma_wait(0, deps=[x, x_1])
            if HADAMARD_SIZE == 128:
                x_0, x_1 = x_0 + x_1, x_0 - x_1
            x = join_columns(x_0, x_1, X_LAYOUT)
    return x
