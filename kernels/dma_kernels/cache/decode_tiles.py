"""Triton functions that the decode kernel is made of: queries as the narrow operand, keys and values as the wide one.

A product has as many rows as there are keys in a step (values: channels) and one column for each query of a kv head, so
that few columns are padding: scores are ``S^T = K Q^T``, outputs ``O^T = V^T P^T``. Column ``n`` of a program is query
``n // group`` of head ``n % group``.

How a body is stored, ``KEY_FORM`` and ``VALUE_FORM``:
    ``int8``, ``e4m3``: keys of :class:`~dma_kernels.cache.codecs.TileScaled`; ``e4m3`` also values of
    :class:`~dma_kernels.cache.codecs.Fp8Values`. Multiplied as they are where the chip has the units.
    ``fp4``: :class:`~dma_kernels.cache.codecs.Fp4Keys` and :class:`~dma_kernels.cache.codecs.Fp4Values`.
    ``block_int8``, ``block_e4m3``: :class:`~dma_kernels.cache.codecs.BlockScaled`, dequantised to 16 bits.
    ``16bit``: :class:`~dma_kernels.cache.codecs.Unquantized`.
What low queries are, ``QUERY_FORM``:
    ``codes``: 8-bit elements with a factor for each query.
    ``split``: two INT8 numbers for 16 bits, ``256 high + low`` units of a factor, to meet INT8 keys.
    ``halves``: fp16 with a factor for each query, the channels of low and of high codes apart, to meet 4-bit keys.
    ``16bit``: 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import dot, e8m0_decode, round_to_e4m3, to_e4m3
from ..device.blocks import dequantize_blocks, finite_block_amax, nvfp4_head_scale, quantize_blocks
from ..device.fp4 import split_channels, unpack_keys, unpack_values
from ..numerics.formats import FP32_MANTISSA_BITS, MXINT8_UNIT, TILE

_TILE = tl.constexpr(TILE)
_INT8_UNIT = tl.constexpr(MXINT8_UNIT)
_MANTISSA_BITS = tl.constexpr(FP32_MANTISSA_BITS)
_HALF_BITS = tl.constexpr(7)  # of a query's largest magnitude in fp16
_SPLIT_BITS = tl.constexpr(13)  # of a query's largest magnitude, whose high part then fits INT8 after rounding


@triton.jit
def quantize_rows(x, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Quantise fp32 rows; returns elements, scales and NVFP4's second scale, one for each row (1 in other formats)."""
    head_scale = tl.full([x.shape[0], 1], 1.0, tl.float32)
    if FORMAT == "nvfp4":
        # Where the rule has one for the head: a smaller power of two moves no codes but those of tiny blocks.
        head_scale = nvfp4_head_scale(tl.max(finite_block_amax(x), 1, keep_dims=True), ROUNDING)
    elements, scale = quantize_blocks(x, head_scale, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
    return elements, scale, head_scale


@triton.jit
def rounded_rows(x, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return fp32 rows as they are after quantising; unchanged for ``bf16``."""
    if FORMAT != "bf16":
        elements, scale, head_scale = quantize_rows(x, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        x = dequantize_blocks(elements, scale, head_scale, FORMAT)
    return x


@triton.jit
def prepare_queries(
    x, QUERY_FORM: tl.constexpr, KEY_FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr,
    ROUNDING: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Bring transformed queries, fp32 ``[COLUMNS, CHANNELS]``, into ``QUERY_FORM``.

    Returns:
        Two operands ``[CHANNELS, COLUMNS]`` (the second is the first where there is only one) and what one of their
        units is worth, fp32 ``[COLUMNS]``.
    """
    COLUMNS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    factor = tl.full([COLUMNS], 1.0, tl.float32)
    if QUERY_FORM == "codes":
        elements, scale, _ = quantize_rows(x, FORMAT, "row", ROUNDING, IS_INTERPRETED)
        elements = tl.reshape(elements, [COLUMNS, CHANNELS])
        is_zero = tl.max(tl.abs(elements), 1) == 0.0
        factor = tl.where(is_zero, 1.0, e8m0_decode(tl.max(scale, 1)))
        if KEY_FORM == "int8":
            first = elements.to(tl.int8)
            factor *= _INT8_UNIT
        else:
            first = to_e4m3(elements, IS_INTERPRETED)
        second = first
    else:
        x = rounded_rows(x, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        if QUERY_FORM == "split":
            exponent = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1) >> _MANTISSA_BITS
            factor = e8m0_decode(tl.maximum(exponent - _SPLIT_BITS, 1))
            factor = tl.where(exponent == 255, float("nan"), factor)
            # Adding and subtracting 1.5 * 2^23 rounds at the unit.
            whole = ((tl.where(x == x, x, 0.0) * (1.0 / factor)[:, None] + 12582912.0) - 12582912.0).to(tl.int32)
            high = (whole + 128) >> 8
            first = high.to(tl.int8)
            second = (whole - (high << 8)).to(tl.int8)
        elif QUERY_FORM == "halves":
            # fp16 has a bit more than it needs where the largest channel is just below 2^8.
            exponent = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1) >> _MANTISSA_BITS
            factor = e8m0_decode(tl.maximum(exponent - _HALF_BITS, 1))
            first, second = split_channels(x * (1.0 / factor)[:, None], WIDTH)
            first = first.to(tl.float16)
            second = second.to(tl.float16)
        else:
            first = x.to(DTYPE)
            second = first
    return tl.trans(first), tl.trans(second), factor


@triton.jit
def load_rows(base, rows, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Load ``[ROWS, BLOCK]`` of a contiguous matrix with ``STORED`` columns; zeros beyond them."""
    o = tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * STORED + o[None, :]
    if STORED == BLOCK:  # noqa: SIM108 (a constexpr branch)
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(o < STORED)[None, :], other=0.0)
    return x


@triton.jit
def load_channels(base, columns, STORED: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr):
    """Load columns of ``[BLOCK, LENGTH]``; zeros in the rows from ``STORED`` on."""
    o = tl.arange(0, BLOCK)
    pointers = base + o[:, None] * LENGTH + columns[None, :]
    if STORED == BLOCK:  # noqa: SIM108 (a constexpr branch)
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(o < STORED)[:, None], other=0.0)
    return x


@triton.jit
def load_fp4_values(data_ptr, scale_ptr, slot, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of 4-bit values ``[BLOCK, 64]``, and the scale bytes of its first 64 keys and of its last."""
    HALF: tl.constexpr = _TILE // 2
    o_t = tl.arange(0, HALF)
    data = load_channels(data_ptr + slot * (STORED * HALF), o_t, STORED, BLOCK, HALF)
    scale_base = scale_ptr + slot * (STORED * _TILE // 16)
    scale_low = load_channels(scale_base, o_t, STORED // 16, BLOCK // 16, _TILE)
    scale_high = load_channels(scale_base, o_t + HALF, STORED // 16, BLOCK // 16, _TILE)
    return data, scale_low, scale_high


@triton.jit
def from_e4m3(x, DTYPE: tl.constexpr):
    """Return E4M3 numbers, given as bytes, in 16 bits or fp32, for chips without the cast; NaN becomes a number."""
    bits = x.to(tl.int16)
    if tl.bfloat16 == DTYPE:
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
        number = (number.to(tl.float32) * 1.329227995784916e36).to(DTYPE)  # 2 ** 120
    else:
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = (number.to(tl.float32) * 256.0).to(DTYPE)
    return number


@triton.jit
def dequantize_rows(
    data_ptr, scale_ptr, slot, rows,
    FORM: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load rows of a tile of a ``block_int8``, ``block_e4m3`` or ``16bit`` body as ``[ROWS, BLOCK]`` in 16 bits."""
    x = load_rows(data_ptr + slot * (_TILE * STORED), rows, STORED, BLOCK)
    if FORM != "16bit":
        scale_base = scale_ptr + slot * (_TILE * STORED // 32)
        scale = load_rows(scale_base, rows, STORED // 32, BLOCK // 32).to(tl.int32)
        if FORM == "block_int8":  # noqa: SIM108 (a constexpr branch)
            elements = x.to(tl.float32) * _INT8_UNIT
        else:
            elements = from_e4m3(x, tl.float32)
        blocks = tl.reshape(elements, [rows.shape[0], BLOCK // 32, 32]) * e8m0_decode(scale)[:, :, None]
        x = tl.reshape(blocks, [rows.shape[0], BLOCK])
    return x.to(DTYPE)


@triton.jit
def low_scores(
    first, second, key_ptr, scale_ptr, factor_ptr, slot, rows,
    KEY_FORM: tl.constexpr, QUERY_FORM: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Score keys of the tile in ``slot``: fp32 ``[ROWS, COLUMNS]``, and what a unit of that is worth.

    Args:
        first: Queries, as :func:`prepare_queries` returns them.
        second: Likewise.
        key_ptr: Body of the keys.
        scale_ptr: Its block scales, where it has any.
        factor_ptr: Its factors, where it has any.
        slot: Tile of the body, int64.
        rows: Keys in the tile.
        KEY_FORM: See the module, as for ``QUERY_FORM``.
        QUERY_FORM: Form of the queries.
        STORED: Stored elements of a key (of 4-bit keys: bytes).
        BLOCK: The same, padded to a power of two.
        WIDTH: Of :func:`~dma_kernels.device.fp4.unpack_keys`.
        DTYPE: Of products in 16 bits, but for 4-bit keys and values, which are fp16.
        IS_INTERPRETED: Whether Triton's interpreter runs the kernel.
    """
    base = key_ptr + slot * (_TILE * STORED)
    worth = 1.0
    if KEY_FORM == "fp4":
        scale_base = scale_ptr + slot * (_TILE * STORED // 8)
        data = load_rows(base, rows, STORED, BLOCK)
        scale = load_rows(scale_base, rows, STORED // 8, BLOCK // 8)
        low, high = unpack_keys(data, scale, WIDTH, IS_INTERPRETED)
        if IS_INTERPRETED:
            s = dot(low, first, True) + dot(high, second, True)
        else:
            s = tl.dot(high, second, tl.dot(low, first))
    elif QUERY_FORM == "split":
        keys = load_rows(base, rows, STORED, BLOCK)
        s = (tl.dot(keys, first, out_dtype=tl.int32) << 8) + tl.dot(keys, second, out_dtype=tl.int32)
        s = s.to(tl.float32)
    elif QUERY_FORM == "codes":
        s = dot(load_rows(base, rows, STORED, BLOCK), first, IS_INTERPRETED)
    elif KEY_FORM == "e4m3":
        s = dot(from_e4m3(load_rows(base, rows, STORED, BLOCK), DTYPE), first, IS_INTERPRETED)
    else:
        keys = dequantize_rows(key_ptr, scale_ptr, slot, rows, KEY_FORM, STORED, BLOCK, DTYPE)
        s = dot(keys, first, IS_INTERPRETED)
    if KEY_FORM == "int8" or KEY_FORM == "e4m3" or KEY_FORM == "fp4":
        worth = tl.load(factor_ptr + slot)
    if KEY_FORM == "fp4":
        worth = worth * 128.0  # blocks.FP4_UNIT
    return s, worth


@triton.jit
def logits(
    s, factor, shift, softcap, tile, k_pos, q_pos, low_end, window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Scale, cap and mask scores ``[ROWS, COLUMNS]`` of a low tile, to base-2 logits.

    Args:
        s: Scores.
        factor: What one is worth, ``[COLUMNS]``.
        shift: What the logits lack, ``[COLUMNS]``.
        softcap: The cap times log2(e).
        tile: The tile.
        k_pos: Positions ``[ROWS]``.
        q_pos: Positions ``[COLUMNS]``.
        low_end: The tile past a query's last low one, ``[COLUMNS]``.
        window: Sliding window.
        HAS_SOFTCAP: Whether there is a cap.
        HAS_WINDOW: Whether there is a window.
        HAS_ROWS: Whether the program's queries differ in what is low.
        HAS_SHIFT: Whether the logits lack a shift.
    """
    s = s * factor[None, :]
    if HAS_SHIFT:
        s += shift[None, :]
    if HAS_SOFTCAP:
        s = cap(s, softcap)
    if HAS_ROWS:
        s = tl.where((tile < low_end)[None, :], s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where(k_pos[:, None] > (q_pos - window)[None, :], s, float("-inf"))
    return s


@triton.jit
def cap(s, softcap):
    """Cap base-2 logits; ``softcap`` carries the log2(e)."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap.
    return softcap * (1.0 - 2.0 / (tl.math.exp2(s * (2.8853900817779268 / softcap)) + 1.0))


@triton.jit
def add_low_values(
    acc, p, p_rest, alpha, value_ptr, scale_ptr, factor_ptr, slot, rows,
    VALUE_FORM: tl.constexpr, PV: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rescale the sum ``[BLOCK, COLUMNS]`` and add the values of keys of the tile in ``slot``, weighted.

    Args:
        acc: fp32 sums.
        p: Weights ``[ROWS, COLUMNS]``; for ``fp4`` of the first half of the tile's keys.
        p_rest: For ``fp4`` of the second half.
        alpha: What the sum is multiplied by, ``[COLUMNS]``.
        value_ptr: Body of the values.
        scale_ptr: Its block scales, where it has any.
        factor_ptr: Its factors, where it has any.
        slot: Tile of the body, int64.
        rows: Keys in the tile.
        VALUE_FORM: See the module.
        PV: ``16bit``, ``fp8`` (E4M3 units) or ``fp8_emulated``.
        STORED: Stored channels of a value.
        BLOCK: The same, padded to a power of two.
        DTYPE: Of products in 16 bits, but for 4-bit keys and values, which are fp16.
        IS_INTERPRETED: Whether Triton's interpreter runs the kernel.
    """
    o_v = tl.arange(0, BLOCK)
    if VALUE_FORM == "fp4":
        data, scale_low, scale_high = load_fp4_values(value_ptr, scale_ptr, slot, STORED, BLOCK)
        low, high = unpack_values(data, scale_low, scale_high, IS_INTERPRETED)
        if IS_INTERPRETED:
            added = dot(low, p.to(tl.float16), True) + dot(high, p_rest.to(tl.float16), True)
        else:
            added = tl.dot(high, p_rest.to(tl.float16), tl.dot(low, p.to(tl.float16)))
        acc = acc * alpha[None, :] + added * (tl.load(factor_ptr + slot) * 128.0)  # blocks.FP4_UNIT
    elif VALUE_FORM == "e4m3":
        ROWS: tl.constexpr = p.shape[0]
        COLUMNS: tl.constexpr = p.shape[1]
        # As device.permute_keys, of rows: the order in which the keys of 16 are stored.
        p = tl.permute(tl.reshape(p, [ROWS // 16, 2, 4, 2, COLUMNS]), [0, 2, 1, 3, 4])
        p = tl.reshape(p, [ROWS, COLUMNS])
        v = load_channels(value_ptr + slot * (STORED * _TILE), rows, STORED, BLOCK, _TILE)
        if PV == "fp8":
            added = dot(v, to_e4m3(p, IS_INTERPRETED), IS_INTERPRETED)
        else:
            added = dot(from_e4m3(v, DTYPE), round_to_e4m3(p).to(DTYPE), IS_INTERPRETED)
        factor = tl.load(factor_ptr + slot * STORED + o_v, mask=o_v < STORED, other=0.0)
        acc = acc * alpha[None, :] + added * factor[:, None]
    else:
        v = dequantize_rows(value_ptr, scale_ptr, slot, rows, VALUE_FORM, STORED, BLOCK, DTYPE)
        acc = acc * alpha[None, :] + dot(tl.trans(v), p.to(DTYPE), IS_INTERPRETED)
    return acc
