"""Triton functions that quantize and dequantize page blocks, bit for bit as :class:`PageLayout` does."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import round_to_bfloat16
from ..device.tiles import TILE
from .formats import VALUE_GROUP
from .page_layout import ROWS

_ROWS = tl.constexpr(ROWS)
_GROUP = tl.constexpr(VALUE_GROUP)
_BLOCK_WORDS = tl.constexpr(128)
_NAN = tl.constexpr(0x7FC0)  # bfloat16
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to integers, ties to even


@triton.jit
def _scale_and_zero_point(smallest, largest, poison, MAX_CODE: tl.constexpr):
    """Return the scale and zero point of groups, rounded to bfloat16: both in fp32, and the bits of each.

    ``poison`` is NaN for a group with a NaN or an infinity, else 0.
    """
    bits = smallest.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF
    zero_point = bits.to(tl.float32, bitcast=True)
    span = largest - zero_point + poison
    is_finite = span - span == 0.0
    zero_point = tl.where(is_finite & (zero_point != 0.0), zero_point, 0.0)
    scale = round_to_bfloat16(tl.where(is_finite, span, 0.0) * (1.0 / MAX_CODE))
    scale_bits = tl.where(is_finite, scale.to(tl.uint32, bitcast=True) >> 16, _NAN)
    return scale, zero_point, scale_bits, zero_point.to(tl.uint32, bitcast=True) >> 16


@triton.jit
def _quantize(x, scale, zero_point, MAX_CODE: tl.constexpr):
    """Return the codes of fp32 numbers, uint32; 0 where the scale is 0."""
    has_scale = scale > 0.0
    code = tl.math.div_rn(tl.where(has_scale, x - zero_point, 0.0), tl.where(has_scale, scale, 1.0) + tl.zeros_like(x))
    return ((tl.minimum(code, MAX_CODE) + _ROUNDER) - _ROUNDER).to(tl.uint32)


@triton.jit
def _signs(BITS: tl.constexpr):
    """Return the mask that converts a word of unsigned codes to two's complement of the centered codes, and back."""
    return 0x80808080 if BITS == 8 else 0x88888888


@triton.jit
def quantize_key_tile(x, page_ptr, first_channel, D: tl.constexpr, BITS: tl.constexpr):
    """Quantize channels of a tile of keys, fp32 ``[TILE, BLOCK]`` with zeros in padded channels, into its page block.

    ``page_ptr`` points to the sections of keys, in 32-bit words; ``first_channel`` is a multiple of ``ROWS``.
    """
    BLOCK: tl.constexpr = x.shape[1]
    MAX_CODE: tl.constexpr = (1 << BITS) - 1
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    scale, zero_point, scale_bits, zero_bits = _scale_and_zero_point(
        tl.min(x, 0), tl.max(x, 0), tl.sum(x - x, 0), MAX_CODE
    )
    codes = _quantize(x, scale[None, :], zero_point[None, :], MAX_CODE)

    fields = tl.reshape(codes, [TILE, BLOCK // COLUMNS, EIGHTH, 4, 2])  # [token, block, j, t, e]
    o_j = tl.arange(0, EIGHTH)[None, None, :, None, None]
    o_e = tl.arange(0, 2)[None, None, None, None, :]
    words = tl.sum(tl.sum(fields << (BITS * (o_j + EIGHTH * o_e)).to(tl.uint32), 4), 2)  # [token, block, t]
    words ^= _signs(BITS)
    o_n = tl.arange(0, TILE)[:, None, None]
    o_c = first_channel // COLUMNS + tl.arange(0, BLOCK // COLUMNS)[None, :, None]
    o_t = tl.arange(0, 4)[None, None, :]
    block = o_n // _ROWS * (STORED // COLUMNS) + o_c
    word = block * _BLOCK_WORDS + o_n % 8 * 16 + o_t * 4 + o_n // 8 % 4
    m_c = (o_c < STORED // COLUMNS) & (o_n >= 0) & (o_t >= 0)
    tl.store(page_ptr + word, words.to(tl.int32, bitcast=True), mask=m_c)

    _store_channels(page_ptr + TILE * STORED * BITS // 32, scale_bits, first_channel, STORED)
    _store_channels(page_ptr + TILE * STORED * BITS // 32 + STORED // 2, zero_bits, first_channel, STORED)


@triton.jit
def _store_channels(base, bits, first_channel, STORED: tl.constexpr):
    """Store the bits of one bfloat16 number per channel."""
    BLOCK: tl.constexpr = bits.shape[0]
    fields = tl.reshape(bits, [BLOCK // _ROWS, 4, 4, 2])  # [block, j, t, e]
    words = tl.sum(fields << (16 * tl.arange(0, 2)[None, None, None, :]).to(tl.uint32), 3)
    o_c = first_channel // _ROWS + tl.arange(0, BLOCK // _ROWS)[:, None, None]
    o_j = tl.arange(0, 4)[None, :, None]
    o_t = tl.arange(0, 4)[None, None, :]
    mask = (o_c < STORED // _ROWS) & (o_j >= 0) & (o_t >= 0)
    tl.store(base + o_c * 16 + o_t * 4 + o_j, words.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def quantize_value_tile(x, page_ptr, first_token, D: tl.constexpr, BITS: tl.constexpr):
    """Quantize tokens of a tile of values, fp32 ``[TOKENS, BLOCK]``, into its page block.

    Other arguments are as for :func:`quantize_key_tile`; ``first_token`` is a multiple of ``ROWS``.
    """
    TOKENS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    MAX_CODE: tl.constexpr = (1 << BITS) - 1
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    WIDTH: tl.constexpr = min(_GROUP, BLOCK)
    GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
    grouped = tl.reshape(x, [TOKENS, BLOCK // WIDTH, WIDTH])
    o_d = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_d = (o_d < D)[None, :, :]
    smallest = tl.min(tl.where(m_d, grouped, float("inf")), 2)
    largest = tl.max(tl.where(m_d, grouped, float("-inf")), 2)
    scale, zero_point, scale_bits, zero_bits = _scale_and_zero_point(
        smallest, largest, tl.sum(grouped - grouped, 2), MAX_CODE
    )
    codes = tl.where(m_d, _quantize(grouped, scale[:, :, None], zero_point[:, :, None], MAX_CODE), 0)

    fields = tl.reshape(codes, [TOKENS // COLUMNS, EIGHTH, 4, 2, BLOCK])  # [block, j, t, e, channel]
    o_j = tl.arange(0, EIGHTH)[None, :, None, None, None]
    o_e = tl.arange(0, 2)[None, None, None, :, None]
    words = tl.sum(tl.sum(fields << (BITS * (o_j + EIGHTH * o_e)).to(tl.uint32), 3), 1)  # [block, t, channel]
    words ^= _signs(BITS)
    o_n = first_token // COLUMNS + tl.arange(0, TOKENS // COLUMNS)[:, None, None]
    o_t = tl.arange(0, 4)[None, :, None]
    o_c = tl.arange(0, BLOCK)[None, None, :]
    block = o_n * (STORED // _ROWS) + o_c // _ROWS
    word = block * _BLOCK_WORDS + o_c % 8 * 16 + o_t * 4 + o_c // 8 % 4
    mask = (o_c < STORED) & (o_n >= 0) & (o_t >= 0)
    tl.store(page_ptr + word, words.to(tl.int32, bitcast=True), mask=mask)

    o_n = first_token + tl.arange(0, TOKENS)[:, None]
    o_g = tl.arange(0, BLOCK // WIDTH)[None, :]
    pair = ((o_n // _ROWS * GROUPS + o_g) * 8 + o_n % 8) * 4 + o_n // 8 % 4
    pairs = (scale_bits.to(tl.uint32) | (zero_bits << 16)).to(tl.int32, bitcast=True)
    tl.store(page_ptr + TILE * STORED * BITS // 32 + pair, pairs, mask=(o_g < GROUPS) & (o_n >= 0))


@triton.jit
def unquantized_row(cache, i_b):
    """Return the index of a batch row in the residual and sink tensors."""
    row = i_b
    if cache.unquantized_rows is not None:
        row = tl.load(cache.unquantized_rows + i_b).to(tl.int64)
    return row


@triton.jit
def load_page(cache, i_b, tile, mask, max_pages):
    """Return the pages of a batch row's tiles, int64; negative where there is none."""
    column = tile % tl.maximum(max_pages, 1)
    return tl.load(cache.page_table + i_b * max_pages + column, mask=mask, other=0).to(tl.int64)


@triton.jit
def page_block(cache, page, i_kv, PAGE_WORDS: tl.constexpr):
    """Return pointers to a kv head's page blocks."""
    return cache.kv_pages + page * cache.stride_page + i_kv * PAGE_WORDS


@triton.jit
def _row_word(row):
    """Return the first word of a row's codes in its block."""
    return row % 8 * 16 + row // 8 % 4


@triton.jit
def _halves(word):
    """Return the two bfloat16 numbers of words, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def dequantize_rows(
    page_ptr, token, m_token, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ARE_KEYS: tl.constexpr
):
    """Dequantize keys or values of tokens, fp32 ``[ROWS, BLOCK]``; still rotated.

    ``page_ptr`` points, for each token, to the key or value sections of its page block, in 32-bit words. ``token`` is
    its index in its tile.
    """
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    o_d = tl.arange(0, BLOCK)
    row = token if ARE_KEYS else o_d
    column = o_d if ARE_KEYS else token
    column_word = column // 2 % 4 * 4
    column_bit = BITS * (column % COLUMNS // 8 + EIGHTH * (column % 2))
    if ARE_KEYS:
        block = (row // _ROWS * (STORED // COLUMNS))[:, None] + (column // COLUMNS)[None, :]
        word = _row_word(row)[:, None] + column_word[None, :]
        bit = column_bit[None, :]
    else:
        block = (column // COLUMNS * (STORED // _ROWS))[:, None] + (row // _ROWS)[None, :]
        word = column_word[:, None] + _row_word(row)[None, :]
        bit = column_bit[:, None]
    mask = m_token[:, None] & (o_d < D)[None, :]
    codes = tl.load(page_ptr[:, None] + block * _BLOCK_WORDS + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    codes = (((codes ^ _signs(BITS)) >> bit.to(tl.uint32)) & ((1 << BITS) - 1)).to(tl.float32)
    scales_ptr = page_ptr + TILE * STORED * BITS // 32
    if ARE_KEYS:
        offset = (o_d // _ROWS * 16 + o_d // 2 % 4 * 4 + o_d // 8 % 4)[None, :]
        is_odd = (o_d % 2 == 1)[None, :]
        scale = tl.load(scales_ptr[:, None] + offset, mask=mask, other=0).to(tl.uint32, bitcast=True)
        zero_point = tl.load(scales_ptr[:, None] + offset + STORED // 2, mask=mask, other=0)
        zero_point = zero_point.to(tl.uint32, bitcast=True)
        even, odd = _halves(scale)
        scale = tl.where(is_odd, odd, even)
        even, odd = _halves(zero_point)
        zero_point = tl.where(is_odd, odd, even)
    else:
        GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
        offset = ((token // _ROWS * GROUPS)[:, None] + (o_d // _GROUP)[None, :]) * 32
        offset += (token % 8 * 4 + token // 8 % 4)[:, None]
        pair = tl.load(scales_ptr[:, None] + offset, mask=mask, other=0).to(tl.uint32, bitcast=True)
        scale, zero_point = _halves(pair)
    return zero_point + scale * codes
