"""Positions of a batch row, and the key tiles of a CTA or a warpgroup, in Gluon.

All ranges are half-open. :mod:`dma_kernels.numerics.geometry` defines high and low tiles.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gluon import aggregate
from ...device.schedule import schedule as _schedule_triton
from ...device.schedule import schedule_grid as _schedule_grid_triton
from ...device.tiles import TILE, TILE_SHIFT
from ...device.tiles import load_positions as _load_positions_triton
from ...numerics import tile_ranges
from .. import config

ROWS = gl.constexpr(config.ROWS)
ROWS_SHIFT = gl.constexpr(config.ROWS.bit_length() - 1)
BLOCK = gl.constexpr(TILE // 2)  # keys of a high-precision block: as many bytes in 16 bits as a tile in 8
_BLOCK_SHIFT = gl.constexpr(TILE_SHIFT - 1)
schedule = gluon.jit(_schedule_triton.fn)
schedule_grid = gluon.jit(_schedule_grid_triton.fn)
attended_start = gluon.jit(tile_ranges.attended_start)
attended_stop = gluon.jit(tile_ranges.attended_stop)
first_band_tile = gluon.jit(tile_ranges.first_band_tile)
_high_ranges = gluon.jit(tile_ranges.high_ranges)
_low_ranges = gluon.jit(tile_ranges.low_ranges)
_load_positions = gluon.jit(_load_positions_triton.fn)


@aggregate
class SeqInfo:
    """Positions of one batch row, int32."""

    q_offset: Any  # position of query 0
    q_len: Any  # queries
    kv_offset: Any  # position of key 0
    visible_start: Any  # position of the first key that a query may attend to
    visible_end: Any  # position after the last one


@gluon.jit
def load_seq_info(seq_info_ptr, i_b, q_offset, q_len, kv_offset, kv_len):
    """Return the :class:`SeqInfo` of batch row ``i_b``, read from int32 ``[B, 4]`` if a pointer is given."""
    q_offset, kv_offset, start, end = _load_positions(seq_info_ptr, i_b, q_offset, kv_offset, kv_len)
    return SeqInfo(q_offset=q_offset, q_len=q_len, kv_offset=kv_offset, visible_start=start, visible_end=end)


@aggregate
class TileRange:
    """Indices of a loop: ``[start, stop)``, then ``[start_2, stop_2)`` if ``HAS_SECOND``."""

    start: gl.tensor
    stop: gl.tensor
    start_2: gl.tensor
    stop_2: gl.tensor
    HAS_SECOND: gl.constexpr

    @gluon.jit
    def count(self):
        n = self.stop - self.start
        if self.HAS_SECOND:
            n = n + self.stop_2 - self.start_2
        return n

    @gluon.jit
    def at(self, i):
        """Map a loop index to a tile or block index."""
        index = self.start + i
        if self.HAS_SECOND:
            n = self.stop - self.start
            index = gl.where(i < n, index, self.start_2 + i - n)
        return index


@aggregate
class BlockInfo:
    """The queries of a CTA and the keys they attend to."""

    q_tile: Any  # tile of the first query
    last_q_tile: Any  # tile of the last one
    kv_start: Any  # position of the first key that any of the queries attends to
    kv_stop: Any  # position after the last one
    diagonal_tiles: Any  # high tiles before the query's own
    sink_tiles: Any  # high tiles at the start of the sequence
    exact_tiles: Any  # query tiles at the start of the sequence that have no low tiles
    IS_CAUSAL: Any  # whether a query attends to no key after its own position

    @gluon.jit
    def high_precision_range(self):
        """Return the blocks of 64 keys in high tiles: those of the sinks, then those of the band."""
        band_tile = first_band_tile(self.q_tile, self.diagonal_tiles, self.exact_tiles)
        start, stop, start_2, stop_2 = _high_ranges(
            band_tile, self.last_q_tile, self.kv_start, self.kv_stop, self.diagonal_tiles, self.sink_tiles,
            _BLOCK_SHIFT, TILE_SHIFT, self.IS_CAUSAL,
        )  # fmt: skip
        return TileRange(start=start, stop=stop, start_2=start_2, stop_2=stop_2, HAS_SECOND=True)

    @gluon.jit
    def low_precision_range(self):
        """Return the low tiles: those before the band, then those after it."""
        last_band_tile = first_band_tile(self.last_q_tile, self.diagonal_tiles, self.exact_tiles)
        start, stop, start_2, stop_2 = _low_ranges(
            self.q_tile, last_band_tile, self.kv_start, self.kv_stop, self.diagonal_tiles, self.sink_tiles,
            TILE_SHIFT, TILE_SHIFT, self.IS_CAUSAL,
        )  # fmt: skip
        return TileRange(start=start, stop=stop, start_2=start_2, stop_2=stop_2, HAS_SECOND=not self.IS_CAUSAL)


@gluon.jit
def clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def bitmask_range(start, stop, bounds_ptr, block, blocks, first_tile, storage_tiles, COUNT: gl.constexpr):
    """Return the part of the positions ``start..stop`` with keys that a bitmask shows to some query, in whole tiles.

    The queries are ``COUNT`` blocks of 64 from ``block`` on, of the ``blocks`` of a plane of a
    :class:`~dma_kernels.prefill.hopper.bitmask.PackedMask`. ``first_tile`` is the tile of key 0.
    """
    from_first, to_last = 0, 0
    for i in gl.static_range(COUNT):
        is_valid = block + i < blocks
        from_first = gl.maximum(from_first, gl.load(bounds_ptr + 2 * (block + i), mask=is_valid, other=0))
        to_last = gl.maximum(to_last, gl.load(bounds_ptr + 2 * (block + i) + 1, mask=is_valid, other=0))
    start = gl.maximum(start, (first_tile + storage_tiles - from_first) * TILE)
    return start, gl.minimum(stop, (first_tile + to_last) * TILE)
