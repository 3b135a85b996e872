"""The blocks of keys that a CTA of the portable kernel visits, in Triton. All ranges are half-open."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class QueryBlock(NamedTuple):
    """The queries of a CTA and their keys; all ranges are positions."""

    i_b: Any  # batch row
    i_kv: Any  # kv head
    i_h: Any  # query head
    i_head: Any  # kv head, counted over all batch rows
    q_pos: Any  # query positions, int32 ``[BLOCK_M]``
    start: Any  # union range: keys that some query attends to
    end: Any
    full_start: Any  # unmasked range: keys that all of them attend to
    full_end: Any
    sink_end: Any  # end of the sink tiles
    band_start: Any  # the band
    band_end: Any
    k_start: Any  # position of key 0, in row 0 of the caller's keys
    aligned_start: Any  # position of row 0 of tile-padded storage
    visibility: Any  # :class:`~..device.scores.Visibility`


class _LowRange(NamedTuple):
    """Blocks of low tiles ``first..last``, of which ``full_first..full_last`` are not masked."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


@triton.jit
def _block_range(start, end, SHIFT: tl.constexpr):
    """Return the first block of a range of positions and the one past its last; equal for an empty range."""
    first = start >> SHIFT
    return first, tl.where(end > start, (end + (1 << SHIFT) - 1) >> SHIFT, first)


@triton.jit
def _low_range(start, end, block, SHIFT: tl.constexpr):
    """Return the :class:`_LowRange` of a range of positions."""
    first, last = _block_range(start, end, SHIFT)
    full_first = tl.minimum(tl.maximum(first, (block.full_start + (1 << SHIFT) - 1) >> SHIFT), last)
    return _LowRange(first, full_first, tl.maximum(tl.minimum(last, block.full_end >> SHIFT), full_first), last)


@triton.jit
def high_ranges(block, HAS_LOW: tl.constexpr, SHIFT: tl.constexpr):
    """Return the first and last blocks of the sinks and of the band; all blocks if there are no low tiles."""
    if HAS_LOW:
        sinks_first, sinks_last = _block_range(block.start, tl.minimum(block.end, block.sink_end), SHIFT)
        band_first, band_last = _block_range(
            tl.maximum(tl.maximum(block.start, block.band_start), block.sink_end),
            tl.minimum(block.end, block.band_end), SHIFT,
        )  # fmt: skip
    else:
        sinks_first, sinks_last = _block_range(block.start, block.end, SHIFT)
        band_first, band_last = sinks_last, sinks_last
    return sinks_first, sinks_last, band_first, band_last


@triton.jit
def low_ranges(block, IS_CAUSAL: tl.constexpr, SHIFT: tl.constexpr):
    """Return the low blocks before the band and those after it."""
    before = _low_range(tl.maximum(block.start, block.sink_end), tl.minimum(block.end, block.band_start), block, SHIFT)
    if IS_CAUSAL:
        after = _LowRange(before.last, before.last, before.last, before.last)
    else:
        start = tl.maximum(tl.maximum(block.start, block.band_end), block.sink_end)
        after = _low_range(start, block.end, block, SHIFT)
    return before, after
