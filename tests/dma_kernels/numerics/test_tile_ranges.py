"""The tiles that kernels visit, against the rule for every query-key pair: all small sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton.language as tl
from dma_kernels.cache import decode_kernel
from dma_kernels.numerics.tile_ranges import attended_start, attended_stop, first_band_tile, high_ranges, low_ranges
from dma_kernels.prefill import key_ranges

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
        before_start, before_stop, after_start, after_stop = low_ranges(
            q_tiles[0], bands[1], *rest, TILE_SHIFT, block.is_causal
        )
        low = {k >> TILE_SHIFT for k in union} - set(range(sink_tiles))
        before = {tile for tile in low if any(tile < start for start in starts.values())}
        after = {tile for tile in low if any(tile > q + diagonal_tiles for q in q_tiles)}
        assert set(range(before_start, before_stop)) == before, block
        assert set(range(after_start, after_stop)) == (set() if block.is_causal else after), block


def as_python(function: Any, name: str) -> Callable[..., Any]:
    """Return a Triton or Gluon function of scalars as plain Python; its module calls the language ``name``."""
    language = SimpleNamespace(maximum=max, minimum=min, where=lambda condition, a, b: a if condition else b)
    scope: dict[str, Any] = {}
    for key, value in function.fn.__globals__.items():
        inner = getattr(value, "fn", None)
        if isinstance(inner, FunctionType) and inner.__module__ == function.fn.__module__:
            value = FunctionType(inner.__code__, scope)
        scope[key] = value.value if isinstance(value, tl.constexpr) else value
    scope[name] = language
    return FunctionType(function.fn.__code__, scope)


@pytest.mark.parametrize(("diagonal_tiles", "sink_tiles"), [*product((0, 1), (0, 2))])
def test_the_portable_kernel_visits_each_key_once_and_masks_what_some_query_does_not_see(
    diagonal_tiles: int, sink_tiles: int
) -> None:
    find_high, find_low = as_python(key_ranges.high_ranges, "tl"), as_python(key_ranges.low_ranges, "tl")
    tile = 1 << TILE_SHIFT
    for block in blocks(range(1, 5)):
        if block.first >> TILE_SHIFT != block.last >> TILE_SHIFT:
            continue  # a block of queries lies in one tile
        union, full = range(*block.union_range()), range(*block.unmasked_range())
        q_tile = block.first >> TILE_SHIFT
        band = range((q_tile - diagonal_tiles) * tile, (q_tile + diagonal_tiles + 1) * tile)
        positions = SimpleNamespace(
            start=union.start, end=union.stop, full_start=full.start, full_end=full.stop,
            sink_end=sink_tiles * tile, band_start=band.start, band_end=band.stop,
        )  # fmt: skip
        high = {k for k in union if k in band or k < sink_tiles * tile}
        for shift in (1, 2):
            found = find_high(positions, True, shift)
            assert [*range(*found[:2]), *range(*found[2:])] == sorted({k >> shift for k in high}), block
            low = find_low(positions, block.is_causal, shift)
            visited = [i for part in low for i in range(part.first, part.last)]
            assert visited == sorted({k >> shift for k in set(union) - high}), block
            for part in low:
                unmasked = range(part.full_first, part.full_last)
                assert part.first <= unmasked.start <= unmasked.stop <= part.last
                inside = [
                    i for i in range(part.first, part.last) if set(range(i << shift, (i + 1) << shift)) <= {*full}
                ]
                assert list(unmasked) == inside, block


@pytest.mark.parametrize("has_new", [True, False])
@pytest.mark.parametrize("window", [None, 1, 200])
def test_a_decode_step_visits_each_tile_in_the_precisions_that_some_query_needs(
    window: int | None, has_new: bool
) -> None:
    find = as_python(decode_kernel._head_work, "gl")
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
