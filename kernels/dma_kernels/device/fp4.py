"""Triton functions for the 4-bit tiles of a cache: E2M1 codes to fp16 numbers in few instructions, and back.

The layout is that of :class:`~dma_kernels.cache.codecs.Fp4Keys`. A byte holds two codes. Masked, and moved to the upper
byte of 16 bits, the bits of one stand where fp16 keeps its sign, the lowest bits of its exponent and the highest of its
mantissa. Read like that a code is its value times ``2 ** -14``; one multiplication takes that back and applies the
block's scale, exactly: the product has six significant bits. Its unit is :data:`~dma_kernels.cache.codecs.FP4_UNIT`.

fp16 serves models of either dtype: what it lacks in range the factors of tiles and queries make up for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.formats import E2M1_MAX

SCALE_BYTE_OFFSET = 127 - 22
"""Between the exponent biases of fp32 and of scale bytes (:class:`~dma_kernels.cache.codecs.Fp4Keys`)."""

_MAX = tl.constexpr(E2M1_MAX)
_SCALE_OFFSET = tl.constexpr(SCALE_BYTE_OFFSET)

# Four bytes at a time, each element from its own byte whatever the compiler puts side by side: the low codes in two
# registers, the high codes in two, times the pairs of factors in operands 5 to 8.
_UNPACK = tl.constexpr("""
{
.reg .b32 low, high, y, zero;
mov.b32 zero, 0;
and.b32 low, $4, 0x8E8E8E8E;
shr.b32 high, $4, 3;
and.b32 high, high, 0x0E0E0E0E;
shl.b32 y, $4, 7;
lop3.b32 high, y, 0x80808080, high, 0xEA;
prmt.b32 y, low, zero, 0x1404;
mul.rn.f16x2 $0, y, $5;
prmt.b32 y, low, zero, 0x3424;
mul.rn.f16x2 $1, y, $6;
prmt.b32 y, high, zero, 0x1404;
mul.rn.f16x2 $2, y, $7;
prmt.b32 y, high, zero, 0x3424;
mul.rn.f16x2 $3, y, $8;
}
""")
# Four scale bytes to four fp16 numbers.
_SCALES = tl.constexpr("""
{
.reg .b32 y, zero;
mov.b32 zero, 0;
prmt.b32 y, $2, zero, 0x4140;
shl.b32 $0, y, 7;
prmt.b32 y, $2, zero, 0x4342;
shl.b32 $1, y, 7;
}
""")
_UNPACK_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")


@triton.jit
def _code_value(magnitude, sign):
    """Return the fp32 number of an E2M1 code given in two parts."""
    number = tl.where(magnitude < 4, 0.5 * magnitude.to(tl.float32), (magnitude - 2).to(tl.float32))
    number = tl.where(magnitude == 7, _MAX, number)
    return tl.where(sign == 1, -number, number)


@triton.jit
def _unpack(data, factor_low, factor_high, IS_INTERPRETED: tl.constexpr):
    """Return the low and the high codes of bytes as fp16 numbers, times their factors (fp16, the shape of ``data``)."""
    if IS_INTERPRETED:
        byte = data.to(tl.int32)
        low = _code_value((byte >> 1) & 7, byte >> 7).to(tl.float32) * factor_low.to(tl.float32)
        high = _code_value((byte >> 4) & 7, byte & 1).to(tl.float32) * factor_high.to(tl.float32)
        low = (low * 0.00006103515625).to(tl.float16)  # 2 ** -14
        high = (high * 0.00006103515625).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK,
            _UNPACK_CONSTRAINTS,
            [data, factor_low, factor_high],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _factor(scale, IS_INTERPRETED: tl.constexpr):
    """Return scale bytes as fp16 factors."""
    if IS_INTERPRETED:
        factor = (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True)
    else:
        factor = tl.inline_asm_elementwise(_SCALES, "=r,=r,r", [scale], dtype=tl.float16, is_pure=True, pack=4)
    return factor


@triton.jit
def unpack_codes(data, IS_INTERPRETED: tl.constexpr):
    """Return the low and the high codes of bytes as the E2M1 numbers that they are, fp16, the shape of ``data``."""
    factor = tl.full(data.shape, 16384.0, tl.float16)
    return _unpack(data, factor, factor, IS_INTERPRETED)


@triton.jit
def scale_numbers(byte):
    """Return scale bytes as fp32 numbers, in units of the tile's factor."""
    bits = (byte.to(tl.int32) + (_SCALE_OFFSET << 3)) << 20
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def unpack_keys(data, scale, WIDTH: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Unpack 4-bit keys.

    Args:
        data: uint8 ``[ROWS, BYTES]``.
        scale: uint8 ``[ROWS, BYTES / 8]``, one for each block of channels.
        WIDTH: Blocks that lie interleaved (:func:`~dma_kernels.cache.codecs.interleaved_blocks`).
        IS_INTERPRETED: Whether Triton's interpreter runs the kernel.

    Returns:
        The channels of the low and of the high codes, fp16 ``[ROWS, BYTES]`` each, in units of ``1 / FP4_UNIT``.
    """
    ROWS: tl.constexpr = data.shape[0]
    BYTES: tl.constexpr = data.shape[1]
    factor = tl.reshape(_factor(scale, IS_INTERPRETED), [ROWS, BYTES // (8 * WIDTH), 1, WIDTH, 1])
    factor = tl.reshape(tl.broadcast_to(factor, [ROWS, BYTES // (8 * WIDTH), 2, WIDTH, 4]), [ROWS, BYTES])
    return _unpack(data, factor, factor, IS_INTERPRETED)


@triton.jit
def _channel_factors(scale, IS_INTERPRETED: tl.constexpr):
    """Return scale bytes ``[BLOCKS, KEYS]`` as factors of the channels, fp16 ``[16 BLOCKS, KEYS]``."""
    BLOCKS: tl.constexpr = scale.shape[0]
    KEYS: tl.constexpr = scale.shape[1]
    factor = _factor(scale, IS_INTERPRETED)[:, None, :]
    return tl.reshape(tl.broadcast_to(factor, [BLOCKS, 16, KEYS]), [16 * BLOCKS, KEYS])


@triton.jit
def unpack_values(data, scale_low, scale_high, IS_INTERPRETED: tl.constexpr):
    """Unpack 4-bit values, which lie transposed.

    Args:
        data: uint8 ``[CHANNELS, KEYS]``: in the low codes the first half of the tile's keys, in the high ones the rest.
        scale_low: uint8 ``[CHANNELS / 16, KEYS]``, of the low codes.
        scale_high: Likewise of the high codes.
        IS_INTERPRETED: Whether Triton's interpreter runs the kernel.

    Returns:
        Both halves, fp16 ``[CHANNELS, KEYS]`` each, in units of ``1 / FP4_UNIT``.
    """
    factor_low = _channel_factors(scale_low, IS_INTERPRETED)
    factor_high = _channel_factors(scale_high, IS_INTERPRETED)
    return _unpack(data, factor_low, factor_high, IS_INTERPRETED)


@triton.jit
def pack_codes(low, high):
    """Pack int32 E2M1 codes, of one shape, in bytes; still int32."""
    return ((low & 7) << 1) | ((low & 8) << 4) | ((high & 7) << 4) | (high >> 3)


@triton.jit
def split_channels(x, WIDTH: tl.constexpr):
    """Split ``[ROWS, CHANNELS]`` in the channels of low and of high codes of packed keys, half as wide, in their order.

    By sums with zeros: behind a rotation ``tl.split`` gave other numbers on a GPU than in the interpreter (Triton 3.6).
    """
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    # A channel is 16 * block + 8 * is_high + 4 * i + u, a byte (block // WIDTH, i, block % WIDTH, u).
    blocks = tl.reshape(x, [ROWS, CHANNELS // (16 * WIDTH), WIDTH, 2, 8])
    is_low = (tl.arange(0, 2) == 0)[None, None, None, :, None]
    low = tl.sum(tl.where(is_low, blocks, 0), 3)
    high = tl.sum(tl.where(is_low, 0, blocks), 3)
    return _interleave(low), _interleave(high)


@triton.jit
def _interleave(x):
    """Reorder ``[ROWS, N, WIDTH, 8]`` as bytes are, ``[ROWS, 8 N WIDTH]``."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    parts = tl.permute(tl.reshape(x, [ROWS, N, WIDTH, 2, 4]), [0, 1, 3, 2, 4])
    return tl.reshape(parts, [ROWS, 8 * N * WIDTH])
