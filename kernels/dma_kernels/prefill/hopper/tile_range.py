"""Which tiles of keys a CTA and a warpgroup visit, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...numerics.formats import TILE
from ..kernel import _schedule as _schedule_triton
from .select import ROWS as ROWS

_TILE = gl.constexpr(TILE)
_HIGH = gl.constexpr(TILE // 2)  # keys of a block of a high tile: in 16 bits as many bytes as a low tile in 8
_TILE_SHIFT = gl.constexpr(TILE.bit_length() - 1)
_HIGH_SHIFT = gl.constexpr(TILE.bit_length() - 2)
schedule = gluon.jit(_schedule_triton.fn)


@gluon.jit
def high_blocks(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL: gl.constexpr):
    """Return the blocks of high tiles that a program visits: ``a_0..a_1`` of sinks and ``b_0..b_1`` of the band."""
    last = (end + _HIGH - 1) >> _HIGH_SHIFT
    reach = 0 if IS_CAUSAL else diagonal_tiles
    a_0 = begin >> _HIGH_SHIFT
    a_1 = gl.maximum(gl.minimum(2 * sink_tiles, last), a_0)
    b_0 = gl.maximum(gl.maximum(2 * (t_0 - diagonal_tiles), 2 * sink_tiles), a_0)
    b_1 = gl.maximum(gl.minimum(2 * (t_1 + reach + 1), last), b_0)
    return a_0, a_1, b_0, b_1


@gluon.jit
def low_tiles(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL: gl.constexpr):
    """Return the low tiles that a program visits: ``c_0..c_1`` before the band and ``d_0..d_1`` behind it."""
    last = (end + _TILE - 1) >> _TILE_SHIFT
    c_0 = gl.maximum(begin >> _TILE_SHIFT, sink_tiles)
    c_1 = gl.maximum(gl.minimum(t_1 - diagonal_tiles, last), c_0)
    if IS_CAUSAL:
        d_0, d_1 = c_1, c_1
    else:
        d_0 = gl.maximum(t_0 + diagonal_tiles + 1, c_0)
        d_1 = gl.maximum(last, d_0)
    return c_0, c_1, d_0, d_1


@gluon.jit
def visited(i, n_a, a_0, b_0):
    """Return which block or tile is the ``i``-th, where ``n_a`` of them begin at ``a_0`` and the others at ``b_0``."""
    return gl.where(i < n_a, a_0 + i, b_0 + i - n_a)


@gluon.jit
def positions_of(positions_ptr, i_b, q_offset, kv_offset, kv_len):
    """Return the positions of a batch row: of query 0, key 0, its first visible key and the one past the last."""
    visible_start = kv_offset
    visible_end = kv_offset + kv_len
    if positions_ptr is not None:
        q_offset = gl.load(positions_ptr + i_b * 4)
        kv_offset = gl.load(positions_ptr + i_b * 4 + 1)
        visible_start = kv_offset + gl.maximum(gl.load(positions_ptr + i_b * 4 + 2), 0)
        visible_end = kv_offset + gl.minimum(gl.load(positions_ptr + i_b * 4 + 3), kv_len)
    return q_offset, kv_offset, visible_start, visible_end


@gluon.jit
def seen_by_one(start, end, first, last, window, IS_CAUSAL: gl.constexpr):
    """Return which positions of ``start..end`` one of the queries ``first..last`` sees."""
    if IS_CAUSAL:
        end = gl.minimum(end, last)
    if window is not None:
        start = gl.maximum(start, first - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, last + window)
    return start, end


@gluon.jit
def seen_by_all(start, end, first, last, window, IS_CAUSAL: gl.constexpr):
    """Return which positions of ``start..end`` all of the queries ``first..last`` see."""
    if IS_CAUSAL:
        end = gl.minimum(end, first + 1)
    if window is not None:
        start = gl.maximum(start, last - 1 - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, first + window + 1)
    return start, end


@gluon.jit
def clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def shown_by_mask(begin, end, bounds_ptr, block, blocks, first, tiles, COUNT: gl.constexpr):
    """Return which positions of ``begin..end`` a mask shows to one of ``COUNT`` blocks of queries, in whole tiles.

    ``bounds_ptr`` points to one plane of :class:`~dma_kernels.prefill.hopper.bitmask.PackedMask`, whose tiles begin
    with tile ``first``.
    """
    from_first, to_last = 0, 0
    for i in gl.static_range(COUNT):
        is_there = block + i < blocks
        from_first = gl.maximum(from_first, gl.load(bounds_ptr + 2 * (block + i), mask=is_there, other=0))
        to_last = gl.maximum(to_last, gl.load(bounds_ptr + 2 * (block + i) + 1, mask=is_there, other=0))
    return gl.maximum(begin, (first + tiles - from_first) * _TILE), gl.minimum(end, (first + to_last) * _TILE)
