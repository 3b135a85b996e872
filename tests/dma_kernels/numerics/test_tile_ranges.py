"""The tiles that kernels visit, against the rule for every query-key pair: all small sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton.language as tl
from dma_kernels.cache import decode_kernel, decode_mainloop
from dma_kernels.numerics.tile_ranges import (
    attended_start,
    attended_stop,
    first_band_tile,
    high_ranges,
    low_ranges,
    unmasked_range,
)

TILE_SHIFT = 2
"""Tiles of 4 positions."""
WINDOWS = (None, 1, 3, 6)


class Block(NamedTuple):
    """Queries ``first..last``, inclusive, and keys ``start..stop``."""

    first: int
    last: int
    start: int
    stop: int
    window: int | None
    is_causal: bool

    def keys_of(self, query: int) -> set[int]:
        """Return the keys that a query attends to."""
        keys = range(self.start, self.stop)
        if self.is_causal:
            return {k for k in keys if k <= query and (self.window is None or query - k < self.window)}
        return {k for k in keys if self.window is None or abs(query - k) <= self.window}

    def union_range(self) -> tuple[int, int]:
        return (
            attended_start(self.first, self.start, self.window, self.is_causal),
            attended_stop(self.last, self.stop, self.window, self.is_causal),
        )

    def unmasked_range(self) -> tuple[int, int]:
        return (
            attended_start(self.last, self.start, self.window, self.is_causal),
            attended_stop(self.first, self.stop, self.window, self.is_causal),
        )


def blocks(lengths: range) -> Iterator[Block]:
    """Yield blocks of queries of some lengths."""
    for first, length, start, stop, window, is_causal in product(
        range(-2, 13), lengths, (0, 1, 5), (1, 4, 9, 14), WINDOWS, (True, False)
    ):
        yield Block(first, first + length - 1, start, stop, window, is_causal)


def test_the_union_range_holds_the_keys_of_any_query_and_the_unmasked_range_those_of_all() -> None:
    for block in blocks(range(1, 5)):
        keys = [block.keys_of(query) for query in range(block.first, block.last + 1)]
        assert set(range(*block.union_range())) == set.union(*keys), block
        assert set(range(*block.unmasked_range())) == set.intersection(*keys), block


@pytest.mark.parametrize(
    ("diagonal_tiles", "sink_tiles", "exact_tiles"), [*product((0, 1, 2), (0, 1, 2), (0,)), (0, 0, 2), (1, 1, 2)]
)
def test_each_tile_is_visited_in_the_precisions_that_some_query_needs(
    diagonal_tiles: int, sink_tiles: int, exact_tiles: int
) -> None:
    for block in blocks(range(1, 11, 3)):
        union = range(*block.union_range())
        if not union:
            continue
        q_tiles = range(block.first >> TILE_SHIFT, (block.last >> TILE_SHIFT) + 1)
        exact = exact_tiles if block.is_causal else 0
        bands = [first_band_tile(q_tile, diagonal_tiles, exact) for q_tile in (q_tiles[0], q_tiles[-1])]
        rest = union.start, union.stop, diagonal_tiles, sink_tiles
        starts = {q: q - diagonal_tiles if q >= exact else min(0, q) for q in q_tiles}
        reach = 0 if block.is_causal else diagonal_tiles

        def is_high(tile: int, starts: dict[int, int] = starts, reach: int = reach) -> bool:
            return tile < sink_tiles or any(start <= tile <= q + reach for q, start in starts.items())

        for shift in (0, 1, 2):
            found = high_ranges(bands[0], q_tiles[-1], *rest, shift, TILE_SHIFT, block.is_causal)
            visited = [*range(*found[:2]), *range(*found[2:])]
            assert visited == sorted({k >> shift for k in union if is_high(k >> TILE_SHIFT)}), (block, shift)
        low = set(union) - {k for k in union if k >> TILE_SHIFT < sink_tiles}
        before = {k for k in low if any(k >> TILE_SHIFT < start for start in starts.values())}
        after = {k for k in low if not block.is_causal and any(k >> TILE_SHIFT > q + diagonal_tiles for q in q_tiles)}
        for shift in (0, 1, 2):
            found = low_ranges(q_tiles[0], bands[1], *rest, shift, TILE_SHIFT, block.is_causal)
            assert set(range(*found[:2])) == {k >> shift for k in before}, (block, shift)
            assert set(range(*found[2:])) == {k >> shift for k in after}, (block, shift)


def test_blocks_are_unmasked_if_every_query_attends_to_all_their_keys() -> None:
    for block in blocks(range(1, 5)):
        union, unmasked = block.union_range(), {*range(*block.unmasked_range())}
        for shift in (0, 1, 2):
            first, last = union[0] >> shift, max(union[0], union[1] - 1 + (1 << shift)) >> shift
            start, stop = unmasked_range(first, last, *block.unmasked_range(), shift)
            assert first <= start <= stop <= last, (block, shift)
            inside = [i for i in range(first, last) if {*range(i << shift, (i + 1) << shift)} <= unmasked]
            assert [*range(start, stop)] == inside, (block, shift)


def as_python(function: Any, **others: Any) -> Callable[..., Any]:
    """Return a device function of decoding as plain Python, given the device functions that it calls."""
    scope = {
        name: value.value if isinstance(value, tl.constexpr) else value
        for name, value in function.fn.__globals__.items()
    }
    scope["gl"] = SimpleNamespace(maximum=max, minimum=min)
    return FunctionType(function.fn.__code__, scope | others)


@pytest.mark.parametrize("has_new", [True, False])
@pytest.mark.parametrize("window", [None, 1, 200])
def test_a_decode_step_visits_each_tile_in_the_precisions_that_some_query_needs(
    window: int | None, has_new: bool
) -> None:
    find = as_python(decode_kernel._head_work, band_start=as_python(decode_mainloop.band_start))
    config = SimpleNamespace(W=4, HAS_WINDOW=window is not None)
    for stored, q_len, diagonal_tiles, sink_tiles in product(
        (1, 2, 127, 128, 129, 255, 256, 300, 512, 700), (1, 2, 16), (0, 1, 2), (0, 1, 3)
    ):
        if not has_new and stored < q_len:
            continue
        sizes = SimpleNamespace(q_len=q_len, window=window, diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles)
        work = find(stored, sizes, config, has_new)
        queries = range(stored, stored + q_len) if has_new else range(stored - q_len, stored)
        high, low = set(), set()
        for query, key in product({queries[0], queries[-1]}, range(stored)):
            if key <= query and (window is None or query - key < window):
                is_high = key // 128 < sink_tiles or key // 128 >= query // 128 - diagonal_tiles
                (high if is_high else low).add(key // 128)
        sinks = range(work.visible_tile, work.visible_tile + work.sinks)
        n_band = (work.high_steps - has_new) // (128 // (16 * 4)) - work.sinks
        band = range(work.band_tile, work.band_tile + n_band)
        case = stored, q_len, diagonal_tiles, sink_tiles
        assert [*sinks, *band] == sorted({*sinks, *band}), case
        assert high <= {*sinks, *band}, case
        assert low <= set(range(work.low_first, work.low_end)), case
        visible = range(work.visible_tile, (stored - 1) // 128 + 1)
        assert {*sinks, *band, *range(work.low_first, work.low_end)} <= {*visible}, case
