"""Triton functions that write a tile of keys or values as :mod:`dma_kernels.cache.codecs` does, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import e4m3_bytes, e8m0_decode, e8m0_encode, permute_keys, to_e4m3
from ..device.blocks import e2m1_code, finite_block_amax, nvfp4_head_scale, quantize_blocks
from ..device.fp4 import SCALE_BYTE_OFFSET, pack_codes, split_channels
from ..numerics.formats import E4M3, E8M0_NAN, MXINT8_UNIT, TILE

_TILE = tl.constexpr(TILE)
_INT8_UNIT = tl.constexpr(MXINT8_UNIT)
_NAN_CODE = tl.constexpr(E8M0_NAN)
_E4M3_EMAX = tl.constexpr(E4M3.emax)
_E4M3_MAX_MANTISSA = tl.constexpr(E4M3.max_mantissa)
_SCALE_OFFSET = tl.constexpr(SCALE_BYTE_OFFSET)
_TOP_EXPONENT = tl.constexpr(8)  # of the largest scale byte


@triton.jit
def _store_matrix(base, x, STORED: tl.constexpr):
    """Store the first ``STORED`` columns of a matrix, contiguous."""
    rows = tl.arange(0, x.shape[0])
    o = tl.arange(0, x.shape[1])
    tl.store(base + rows[:, None] * STORED + o[None, :], x, mask=(o < STORED)[None, :])


@triton.jit
def _store_channels(base, x, STORED: tl.constexpr):
    """Store the first ``STORED`` rows of a matrix, contiguous."""
    LENGTH: tl.constexpr = x.shape[1]
    o = tl.arange(0, x.shape[0])
    columns = tl.arange(0, LENGTH)
    tl.store(base + o[:, None] * LENGTH + columns[None, :], x, mask=(o < STORED)[:, None])


@triton.jit
def _e4m3(x, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Cast fp32 to E4M3, or to its bytes where a body is stored as such."""
    if tl.uint8 == DTYPE:  # noqa: SIM108 (a constexpr branch)
        codes = e4m3_bytes(x)
    else:
        codes = to_e4m3(x, IS_INTERPRETED)
    return codes


@triton.jit
def _quantize_4bit(x, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Quantise a tile: int32 codes ``[TILE, CHANNELS]``, scale bytes ``[TILE, CHANNELS / 16]``, and the factor."""
    CHANNELS: tl.constexpr = x.shape[1]
    if FORMAT == "nvfp4":
        factor = nvfp4_head_scale(tl.max(tl.max(finite_block_amax(x), 1), 0), ROUNDING)
        elements, scale = quantize_blocks(x, factor, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        byte = (scale.to(tl.int32, bitcast=True) >> 20) - (_SCALE_OFFSET << 3)
        byte = tl.where(scale == scale, byte, 255)
    else:
        elements, scale = quantize_blocks(x, 1.0, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        finite = tl.where(scale == _NAN_CODE, 0, scale)
        unit = tl.maximum(tl.max(tl.max(finite, 1), 0) - _TOP_EXPONENT, 1)
        factor = e8m0_decode(unit)
        # 22 is the bias of scale bytes; an exponent of 0 would not be a normal number in fp16.
        byte = tl.where(scale == _NAN_CODE, 255, tl.maximum(finite - unit + 22, 1) << 3)
        byte = tl.broadcast_to(byte[:, :, None], [_TILE, CHANNELS // 32, 2])
        byte = tl.reshape(byte, [_TILE, CHANNELS // 16])
    return tl.reshape(e2m1_code(elements), [_TILE, CHANNELS]), byte, factor


@triton.jit
def _store_blocks(
    x, data_ptr, scale_ptr, slot, FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr,
    ROUNDING: tl.constexpr, STORED: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Encode a tile in an 8-bit block format, or as it is."""
    base = data_ptr + slot * (_TILE * STORED)
    if FORM == "16bit":
        _store_matrix(base, x.to(data_ptr.dtype.element_ty), STORED)
    else:
        elements, scale = quantize_blocks(x, 1.0, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        elements = tl.reshape(elements, [_TILE, x.shape[1]])
        if FORM == "block_int8":
            _store_matrix(base, elements.to(tl.int8), STORED)
        else:
            _store_matrix(base, _e4m3(elements, data_ptr.dtype.element_ty, IS_INTERPRETED), STORED)
        _store_matrix(scale_ptr + slot * (_TILE * STORED // 32), scale.to(tl.uint8), STORED // 32)


@triton.jit
def encode_keys(
    x, data_ptr, scale_ptr, factor_ptr, slot, FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr,
    ROUNDING: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write transformed keys.

    Args:
        x: fp32 ``[TILE, CHANNELS]``, zeros in padded channels.
        data_ptr: Parts of the body. E4M3 elements may be bytes, for chips without the cast.
        scale_ptr: Likewise.
        factor_ptr: Likewise.
        slot: Where in the body, int64.
        FORM: See :mod:`dma_kernels.cache.decode_tiles`.
        FORMAT: Format of the keys.
        SHARED: What has a scale: ``block``, ``row`` or ``tile``.
        ROUNDING: ``floor``, ``ceil`` or ``search``.
        STORED: Stored elements of a key (of 4-bit keys: bytes).
        WIDTH: Blocks of 4-bit keys that lie interleaved.
        IS_INTERPRETED: Whether Triton's interpreter runs the kernel.
    """
    if FORM == "fp4":
        codes, byte, factor = _quantize_4bit(x, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        low, high = split_channels(codes, WIDTH)
        _store_matrix(data_ptr + slot * (_TILE * STORED), pack_codes(low, high).to(tl.uint8), STORED)
        _store_matrix(scale_ptr + slot * (_TILE * STORED // 8), byte.to(tl.uint8), STORED // 8)
        tl.store(factor_ptr + slot, factor)
    elif FORM == "int8" or FORM == "e4m3":
        elements, scale = quantize_blocks(x, 1.0, FORMAT, SHARED, ROUNDING, IS_INTERPRETED)
        elements = tl.reshape(elements, [_TILE, x.shape[1]])
        factor = e8m0_decode(tl.max(tl.max(scale, 1), 0))
        if FORM == "int8":
            _store_matrix(data_ptr + slot * (_TILE * STORED), elements.to(tl.int8), STORED)
            factor *= _INT8_UNIT
        else:
            codes = _e4m3(elements, data_ptr.dtype.element_ty, IS_INTERPRETED)
            _store_matrix(data_ptr + slot * (_TILE * STORED), codes, STORED)
        # A tile of zeros has no use for its scale, and the smallest scale could make a factor underflow.
        is_zero = tl.max(tl.max((x != 0.0).to(tl.int32), 1), 0) == 0
        tl.store(factor_ptr + slot, tl.where(is_zero, 1.0, factor))
    else:
        _store_blocks(x, data_ptr, scale_ptr, slot, FORM, FORMAT, SHARED, ROUNDING, STORED, IS_INTERPRETED)


@triton.jit
def encode_values(
    x, data_ptr, scale_ptr, factor_ptr, slot, FORM: tl.constexpr, FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr, STORED: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write values; arguments as for :func:`encode_keys`."""
    CHANNELS: tl.constexpr = x.shape[1]
    if FORM == "fp4":
        codes, byte, factor = _quantize_4bit(x, FORMAT, "block", ROUNDING, IS_INTERPRETED)
        halves = tl.reshape(tl.trans(codes), [CHANNELS, 2, _TILE // 2])
        is_low = (tl.arange(0, 2) == 0)[None, :, None]
        low = tl.sum(tl.where(is_low, halves, 0), 1)
        high = tl.sum(tl.where(is_low, 0, halves), 1)
        _store_channels(data_ptr + slot * (STORED * _TILE // 2), pack_codes(low, high).to(tl.uint8), STORED)
        _store_channels(scale_ptr + slot * (STORED * _TILE // 16), tl.trans(byte).to(tl.uint8), STORED // 16)
        tl.store(factor_ptr + slot, factor)
    elif FORM == "e4m3":
        # The bits of a magnitude order like the number, with infinity and NaN above all others.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
        code = e8m0_encode(bits.to(tl.float32, bitcast=True), _E4M3_EMAX, _E4M3_MAX_MANTISSA, True)
        factor = e8m0_decode(tl.maximum(code, 1))
        # The factor is a power of two, so its reciprocal is exact.
        x = tl.minimum(tl.maximum(x * (1.0 / factor)[None, :], -448.0), 448.0)
        codes = _e4m3(permute_keys(tl.trans(x)), data_ptr.dtype.element_ty, IS_INTERPRETED)
        _store_channels(data_ptr + slot * (STORED * _TILE), codes, STORED)
        o = tl.arange(0, CHANNELS)
        tl.store(factor_ptr + slot * STORED + o, factor, mask=o < STORED)
    else:
        _store_blocks(x, data_ptr, scale_ptr, slot, FORM, FORMAT, "block", ROUNDING, STORED, IS_INTERPRETED)
