"""Triton functions that read tiles from the caller's unpadded keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..numerics import formats, tile_ranges
from .arithmetic import IS_INTERPRETED, hadamard, round_to_bfloat16

TILE = tl.constexpr(formats.TILE)
TILE_SHIFT = tl.constexpr(formats.TILE_SHIFT)
# Rows of the first tile loaded at a time; the reduction over rows comes last.
_ROWS = tl.constexpr(32)


def _compiled(function: Any) -> Any:
    """Return a function of integers for kernels; the interpreter runs it as plain Python."""
    if not IS_INTERPRETED:
        return triton.jit(function)
    return lambda *arguments: function(*(x.value if isinstance(x, tl.constexpr) else x for x in arguments))


attended_start = _compiled(tile_ranges.attended_start)
attended_stop = _compiled(tile_ranges.attended_stop)
first_band_tile = _compiled(tile_ranges.first_band_tile)
high_ranges = _compiled(tile_ranges.high_ranges)
low_ranges = _compiled(tile_ranges.low_ranges)
unmasked_range = _compiled(tile_ranges.unmasked_range)


class Rows(NamedTuple):
    """The rows ``[T, D]`` of a head in global memory."""

    ptr: Any  # row 0
    stride_t: Any
    stride_d: Any


@triton.jit
def head_rows(x, i_b, i_h):
    """Return the :class:`Rows` of a head of a tensor, a :class:`~dma_kernels.numerics.layout.Strided`."""
    return Rows(x.ptr + i_b * x.stride_b + i_h * x.stride_h, x.stride_t, x.stride_d)


@triton.jit
def load_positions(seq_info_ptr, i_b, q_offset, kv_offset, kv_len):
    """Return the positions of query 0, of key 0, of the first visible key of a batch row, and after the last.

    Read from int32 ``[B, 4]`` (:class:`~dma_kernels.numerics.geometry.AttentionGeometry`) if a pointer is given.
    """
    visible_start = kv_offset
    visible_end = kv_offset + kv_len
    if seq_info_ptr is not None:
        q_offset = tl.load(seq_info_ptr + i_b * 4)
        kv_offset = tl.load(seq_info_ptr + i_b * 4 + 1)
        visible_start = kv_offset + tl.maximum(tl.load(seq_info_ptr + i_b * 4 + 2), 0)
        visible_end = kv_offset + tl.minimum(tl.load(seq_info_ptr + i_b * 4 + 3), kv_len)
    return q_offset, kv_offset, visible_start, visible_end


@triton.jit
def load_visible_range(seq_info_ptr, i_b, kv_offset, kv_len):
    """Return the visible keys of a batch row, and where tile-padded storage begins.

    Returns:
        Index of the first visible key, index after the last one, and key index of row 0 of tile-padded storage. The
        third is 0 or negative, because key 0 may lie inside its tile.
    """
    if seq_info_ptr is not None:
        k_start = tl.load(seq_info_ptr + i_b * 4 + 1)
        first = tl.maximum(tl.load(seq_info_ptr + i_b * 4 + 2), 0)
        last = tl.minimum(tl.load(seq_info_ptr + i_b * 4 + 3), kv_len)
    else:
        k_start = kv_offset
        first = kv_offset * 0
        last = kv_len
    return first, last, ((k_start >> TILE_SHIFT) << TILE_SHIFT) - k_start


@triton.jit
def load_in_range(x, rows, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load :class:`Rows` by index, ``[ROWS, BLOCK_D]``; zeros outside ``first..last`` and past the ``D`` channels."""
    o_d = tl.arange(0, BLOCK_D)
    m_row = (rows >= first) & (rows < last)
    offset = rows.to(tl.int64)[:, None] * x.stride_t + o_d.to(tl.int64)[None, :] * x.stride_d
    return tl.load(x.ptr + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_visible(x, rows, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys or values as fp32; invisible ones are zero."""
    return load_in_range(x, rows, first, last, D, BLOCK_D).to(tl.float32)


@triton.jit
def transform(x, rows, first, last, mean, HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr):
    """Transform visible keys ``[ROWS, BLOCK_D]``: subtract ``mean`` ``[BLOCK_D]``, if there is one, then rotate."""
    if mean is not None:
        m_row = (rows >= first) & (rows < last)
        x = tl.where(m_row[:, None], x - mean[None, :], 0.0)
    return hadamard(x, HADAMARD_SIZE, NORM)


@triton.jit
def first_tile_mean(x, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mean of the first 128 visible keys, fp32 ``[BLOCK_D]`` whose values are bfloat16 numbers."""
    total = tl.zeros([_ROWS, BLOCK_D], tl.float32)
    for i_block in tl.static_range(TILE // _ROWS):
        rows = first + i_block * _ROWS + tl.arange(0, _ROWS)
        total += load_visible(x, rows, first, last, D, BLOCK_D)
    count = tl.minimum(tl.maximum(last - first, 1), TILE).to(tl.float32)
    return round_to_bfloat16(tl.math.div_rn(tl.sum(total, 0), tl.zeros([BLOCK_D], tl.float32) + count))


@triton.jit
def first_tile_magnitudes(
    x, first, last, mean, D: tl.constexpr, BLOCK_D: tl.constexpr, HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr
):
    """Return the largest finite magnitude of each channel of the first 128 visible tokens, fp32 ``[BLOCK_D]``."""
    largest = tl.zeros([_ROWS, BLOCK_D], tl.float32)
    for i_block in tl.static_range(TILE // _ROWS):
        rows = first + i_block * _ROWS + tl.arange(0, _ROWS)
        block = load_visible(x, rows, first, last, D, BLOCK_D)
        block = tl.abs(transform(block, rows, first, last, mean, HADAMARD_SIZE, NORM))
        largest = tl.maximum(largest, tl.where(block < float("inf"), block, 0.0))
    return tl.max(largest, 0)
