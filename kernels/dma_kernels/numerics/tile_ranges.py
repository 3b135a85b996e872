"""The tiles that a block of queries visits. All ranges are half-open.

The reference calls these functions, and Triton and Gluon compile the same source. So they use only arithmetic, ``min``
and ``max``, sizes are arguments, and types are comments. A block has ``2 ** shift`` keys, of one tile.
"""

from __future__ import annotations


def attended_start(query, start, window, is_causal):
    # type: (int, int, int | None, bool) -> int
    """Return the first of the positions from ``start`` on that a query attends to.

    A block of queries has two ranges. The union range, to whose keys at least one attends, is from the start of the
    first query to the stop of the last. The unmasked range, to which all attend, is the other way round.
    """
    if window is not None:
        start = max(start, query - (window - 1 if is_causal else window))
    return start


def attended_stop(query, stop, window, is_causal):
    # type: (int, int, int | None, bool) -> int
    """Return the position after the last one before ``stop`` that a query attends to."""
    if is_causal:
        stop = min(stop, query + 1)
    elif window is not None:
        stop = min(stop, query + window + 1)
    return stop


def first_band_tile(q_tile, diagonal_tiles, exact_tiles):
    # type: (int, int, int) -> int
    """Return the first tile of a query tile's band: 0 for the ``exact_tiles`` at the start, which have no low tiles.

    Tiles before 0 are sinks.
    """
    return (q_tile - diagonal_tiles) * (q_tile >= exact_tiles)


def high_ranges(band_tile, last_q_tile, start, stop, diagonal_tiles, sink_tiles, shift, tile_shift, is_causal):
    # type: (int, int, int, int, int, int, int, int, bool) -> tuple[int, int, int, int]
    """Return the blocks in tiles that are high for some query: the sinks, then the band.

    Args:
        band_tile: First tile of the first query's band.
        last_q_tile: Tile of the last query.
        start: First position of the union range of the queries.
        stop: Position after its last one.
        diagonal_tiles: High tiles after the query's own in bidirectional calls.
        sink_tiles: High tiles at the start of the sequence.
        shift: Binary logarithm of the keys of a block.
        tile_shift: Binary logarithm of the keys of a tile.
        is_causal: Whether the band ends at the query's own tile.

    Returns:
        Start and stop of the sinks, start and stop of the band.
    """
    last = (stop + (1 << shift) - 1) >> shift
    reach = 0 if is_causal else diagonal_tiles
    blocks = 1 << (tile_shift - shift)
    sinks_start = start >> shift
    sinks_stop = max(min(blocks * sink_tiles, last), sinks_start)
    band_start = max(max(blocks * band_tile, blocks * sink_tiles), sinks_start)
    band_stop = max(min(blocks * (last_q_tile + reach + 1), last), band_start)
    return sinks_start, sinks_stop, band_start, band_stop


def low_ranges(q_tile, last_band_tile, start, stop, diagonal_tiles, sink_tiles, shift, tile_shift, is_causal):
    # type: (int, int, int, int, int, int, int, int, bool) -> tuple[int, int, int, int]
    """Return the blocks in tiles that are low for some query: start and stop before the band, then after it.

    ``q_tile`` is the tile of the first query, ``last_band_tile`` the first tile of the last query's band. Others are
    those of :func:`high_ranges`.
    """
    last = (stop + (1 << shift) - 1) >> shift
    blocks = 1 << (tile_shift - shift)
    before_start = max(start >> shift, blocks * sink_tiles)
    before_stop = max(min(blocks * last_band_tile, last), before_start)
    after_start, after_stop = before_stop, before_stop
    if not is_causal:
        after_start = max(blocks * (q_tile + diagonal_tiles + 1), before_start)
        after_stop = max(last, after_start)
    return before_start, before_stop, after_start, after_stop


def unmasked_range(first, last, start, stop, shift):
    # type: (int, int, int, int, int) -> tuple[int, int]
    """Return the blocks of ``first..last`` whose keys are all in the unmasked range ``start..stop`` of positions."""
    first = min(max(first, (start + (1 << shift) - 1) >> shift), last)
    return first, max(min(last, stop >> shift), first)
