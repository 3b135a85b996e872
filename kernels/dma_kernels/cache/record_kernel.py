"""Triton functions that write and read records as :mod:`dma_kernels.cache.codes` does, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import round_to_bfloat16
from ..numerics.formats import TILE
from .codes import ROWS, VALUE_GROUP

_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)
_GROUP = tl.constexpr(VALUE_GROUP)
_BLOCK_WORDS = tl.constexpr(128)
_NAN = tl.constexpr(0x7FC0)  # bfloat16
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds to integers, ties to even


@triton.jit
def _scale_and_low(lowest, largest, poison, LEVELS: tl.constexpr):
    """Return scale and low of groups, fp32 numbers that bfloat16 has, and a word of both: scale in the low half.

    Args:
        lowest: Smallest numbers, fp32.
        largest: Largest numbers.
        poison: NaN for a group with a NaN or an infinity, else 0.
        LEVELS: The largest code.
    """
    bits = lowest.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF
    low = bits.to(tl.float32, bitcast=True)
    span = largest - low + poison
    is_whole = span - span == 0.0
    low = tl.where(is_whole & (low != 0.0), low, 0.0)
    scale = round_to_bfloat16(tl.where(is_whole, span, 0.0) * (1.0 / LEVELS))
    scale_bits = tl.where(is_whole, scale.to(tl.uint32, bitcast=True) >> 16, _NAN)
    return scale, low, scale_bits, low.to(tl.uint32, bitcast=True) >> 16


@triton.jit
def _codes(x, scale, low, LEVELS: tl.constexpr):
    """Return the codes of fp32 numbers, uint32; a group without a scale has zeros."""
    has_scale = scale > 0.0
    code = tl.math.div_rn(tl.where(has_scale, x - low, 0.0), tl.where(has_scale, scale, 1.0) + tl.zeros_like(x))
    return ((tl.minimum(code, LEVELS) + _ROUNDER) - _ROUNDER).to(tl.uint32)


@triton.jit
def _signs(BITS: tl.constexpr):
    """Return what turns a word of codes into two's complements of codes less their middle, and back."""
    return 0x80808080 if BITS == 8 else 0x88888888


@triton.jit
def encode_keys(x, record_ptr, D: tl.constexpr, BITS: tl.constexpr):
    """Write a tile of keys.

    Args:
        x: Raw, fp32 ``[TILE, BLOCK]``, zeros in padded channels.
        record_ptr: The keys' part of the record, in words.
        D: Channels.
        BITS: Of a code.
    """
    BLOCK: tl.constexpr = x.shape[1]
    LEVELS: tl.constexpr = (1 << BITS) - 1
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    scale, low, scale_bits, low_bits = _scale_and_low(tl.min(x, 0), tl.max(x, 0), tl.sum(x - x, 0), LEVELS)
    codes = _codes(x, scale[None, :], low[None, :], LEVELS)

    fields = tl.reshape(codes, [_TILE, BLOCK // COLUMNS, EIGHTH, 4, 2])  # [token, block, j, t, e]
    o_j = tl.arange(0, EIGHTH)[None, None, :, None, None]
    o_e = tl.arange(0, 2)[None, None, None, None, :]
    words = tl.sum(tl.sum(fields << (BITS * (o_j + EIGHTH * o_e)).to(tl.uint32), 4), 2) ^ _signs(
        BITS
    )  # [token, block, t]
    o_n = tl.arange(0, _TILE)[:, None, None]
    o_c = tl.arange(0, BLOCK // COLUMNS)[None, :, None]
    o_t = tl.arange(0, 4)[None, None, :]
    block = o_n // _ROWS * (STORED // COLUMNS) + o_c
    word = block * _BLOCK_WORDS + o_n % 8 * 16 + o_t * 4 + o_n // 8 % 4
    m_c = (o_c < STORED // COLUMNS) & (o_n >= 0) & (o_t >= 0)
    tl.store(record_ptr + word, words.to(tl.int32, bitcast=True), mask=m_c)

    _store_channels(record_ptr + _TILE * STORED * BITS // 32, scale_bits, STORED)
    _store_channels(record_ptr + _TILE * STORED * BITS // 32 + STORED // 2, low_bits, STORED)


@triton.jit
def _store_channels(base, bits, STORED: tl.constexpr):
    """Store a bfloat16 number for each channel, given by its bits."""
    BLOCK: tl.constexpr = bits.shape[0]
    fields = tl.reshape(bits, [BLOCK // _ROWS, 4, 4, 2])  # [block, j, t, e]
    words = tl.sum(fields << (16 * tl.arange(0, 2)[None, None, None, :]).to(tl.uint32), 3)
    o_c = tl.arange(0, BLOCK // _ROWS)[:, None, None]
    o_j = tl.arange(0, 4)[None, :, None]
    o_t = tl.arange(0, 4)[None, None, :]
    mask = (o_c < STORED // _ROWS) & (o_j >= 0) & (o_t >= 0)
    tl.store(base + o_c * 16 + o_t * 4 + o_j, words.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def encode_values(x, record_ptr, D: tl.constexpr, BITS: tl.constexpr):
    """Write a tile of values; arguments as for :func:`encode_keys`."""
    BLOCK: tl.constexpr = x.shape[1]
    LEVELS: tl.constexpr = (1 << BITS) - 1
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    WIDTH: tl.constexpr = min(_GROUP, BLOCK)
    GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
    grouped = tl.reshape(x, [_TILE, BLOCK // WIDTH, WIDTH])
    o_d = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m_d = (o_d < D)[None, :, :]
    lowest = tl.min(tl.where(m_d, grouped, float("inf")), 2)
    largest = tl.max(tl.where(m_d, grouped, float("-inf")), 2)
    scale, low, scale_bits, low_bits = _scale_and_low(lowest, largest, tl.sum(grouped - grouped, 2), LEVELS)
    codes = tl.where(m_d, _codes(grouped, scale[:, :, None], low[:, :, None], LEVELS), 0)

    fields = tl.reshape(codes, [_TILE // COLUMNS, EIGHTH, 4, 2, BLOCK])  # [block, j, t, e, channel]
    o_j = tl.arange(0, EIGHTH)[None, :, None, None, None]
    o_e = tl.arange(0, 2)[None, None, None, :, None]
    words = tl.sum(tl.sum(fields << (BITS * (o_j + EIGHTH * o_e)).to(tl.uint32), 3), 1) ^ _signs(
        BITS
    )  # [block, t, channel]
    o_n = tl.arange(0, _TILE // COLUMNS)[:, None, None]
    o_t = tl.arange(0, 4)[None, :, None]
    o_c = tl.arange(0, BLOCK)[None, None, :]
    block = o_n * (STORED // _ROWS) + o_c // _ROWS
    word = block * _BLOCK_WORDS + o_c % 8 * 16 + o_t * 4 + o_c // 8 % 4
    mask = (o_c < STORED) & (o_n >= 0) & (o_t >= 0)
    tl.store(record_ptr + word, words.to(tl.int32, bitcast=True), mask=mask)

    o_n = tl.arange(0, _TILE)[:, None]
    o_g = tl.arange(0, BLOCK // WIDTH)[None, :]
    pair = ((o_n // _ROWS * GROUPS + o_g) * 8 + o_n % 8) * 4 + o_n // 8 % 4
    pairs = (scale_bits.to(tl.uint32) | (low_bits << 16)).to(tl.int32, bitcast=True)
    tl.store(record_ptr + _TILE * STORED * BITS // 32 + pair, pairs, mask=(o_g < GROUPS) & (o_n >= 0))


@triton.jit
def _row_word(row):
    """Return the word of a block that a row has its codes from on, and of a channel its scale."""
    return row % 8 * 16 + row // 8 % 4


@triton.jit
def _halves(word):
    """Return the two bfloat16 numbers of words, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def load_coded(
    part_ptr, token, m_token, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ARE_KEYS: tl.constexpr
):
    """Dequantise keys or values, fp32 ``[ROWS, BLOCK]``.

    Args:
        part_ptr: Their part of a record, in words of 32 bits, for each row.
        token: The row's place in its tile.
        m_token: Whether the row is wanted.
        D: Channels.
        BLOCK: The same, padded.
        BITS: Of a code.
        ARE_KEYS: Whether they are keys.
    """
    STORED: tl.constexpr = (D + _ROWS - 1) // _ROWS * _ROWS
    EIGHTH: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = 8 * EIGHTH
    o_d = tl.arange(0, BLOCK)
    row = token if ARE_KEYS else o_d
    column = o_d if ARE_KEYS else token
    # A column's word and bits.
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
    codes = tl.load(part_ptr[:, None] + block * _BLOCK_WORDS + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    codes = (((codes ^ _signs(BITS)) >> bit.to(tl.uint32)) & ((1 << BITS) - 1)).to(tl.float32)
    scales_ptr = part_ptr + _TILE * STORED * BITS // 32
    if ARE_KEYS:
        place = (o_d // _ROWS * 16 + o_d // 2 % 4 * 4 + o_d // 8 % 4)[None, :]
        is_odd = (o_d % 2 == 1)[None, :]
        scale = tl.load(scales_ptr[:, None] + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
        low = tl.load(scales_ptr[:, None] + place + STORED // 2, mask=mask, other=0).to(tl.uint32, bitcast=True)
        even, odd = _halves(scale)
        scale = tl.where(is_odd, odd, even)
        even, odd = _halves(low)
        low = tl.where(is_odd, odd, even)
    else:
        GROUPS: tl.constexpr = (D + _GROUP - 1) // _GROUP
        place = ((token // _ROWS * GROUPS)[:, None] + (o_d // _GROUP)[None, :]) * 32
        place += (token % 8 * 4 + token // 8 % 4)[:, None]
        pair = tl.load(scales_ptr[:, None] + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
        scale, low = _halves(pair)
    return low + scale * codes
