"""Operands and accumulators of the products with values, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ...device.arithmetic import permute_keys as _permute_keys_triton

_permute_keys = gluon.jit(_permute_keys_triton.fn)


@gluon.constexpr_function
def is_16bit(dtype):
    return dtype.primitive_bitwidth == 16


@gluon.jit
def halves(x):
    """Return the columns of ``[M, N]`` in two parts: a renaming of registers."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def inverse_power_of_two(x):
    """Return ``1 / x`` for fp32 powers of two, which values' scales are, in one instruction."""
    return (0x7F000000 - x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def operand_of(p, dtype: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Return probabilities ``[64, N]`` as what multiplies values of ``dtype``."""
    if dtype == gl.float8e4nv:
        p = _permute_keys(p)
    return gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)


@gluon.jit
def values_product(acc, p, alpha, v, O_LAYOUT: gl.constexpr):
    """Begin the product of an :func:`operand_of` and values, which :func:`add_values` waits for."""
    if v.dtype == gl.float8e4nv:
        # A fresh accumulator for each block: Hopper's FP8 units add up in fewer bits than fp32.
        zero = gl.zeros(acc.shape, gl.float32, O_LAYOUT)
        product = warpgroup_mma(p, v, zero, use_acc=False, is_async=True)
    else:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
        product = warpgroup_mma(p, v, acc * alpha, is_async=True)
    return product


@gluon.jit
def add_values(acc, product, alpha, IS_FP8: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return ``acc * alpha`` plus the product, which is there."""
    if IS_FP8:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
        product = acc * alpha + product
    return product
