"""Which tiles a call may read in low precision, against the rule for every query-key pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dma_kernels import Recipe
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import AttentionGeometry
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("is_causal", "first_query", "window", "expected"),
    [
        (True, 0, 2**31 - 1, None),
        (True, 0, 2**20, 2**20),
        (True, 2**30, 2**30 + 9, 2**30 + 9),
        (True, 2**30, 2**30 + 10, None),
        (False, 0, 2**31 - 1, None),
        (False, 2**30, 2**30 + 8, 2**30 + 8),
        (False, 2**30, 2**30 + 9, None),
    ],
)
def test_a_huge_window_is_kept_only_if_it_hides_a_key(
    is_causal: bool, first_query: int, window: int, expected: int | None
) -> None:
    """Ten queries start at ``first_query`` and keys at 0, so the largest distance is ``first_query + 9``."""
    query, key = torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 20, 4)
    call = AttentionCall(
        query, key, key, Recipe(), is_causal=is_causal, scale=None, q_offset=first_query, kv_offset=0, kv_range=None,
        window=window, softcap=None, sinks=None, mask=None, tile_counts=None, backend="auto",
    )  # fmt: skip
    assert AttentionGeometry.of(call).window == expected


POSITIONS = st.integers(-300, 700)


def low_tiles(
    geometry: AttentionGeometry,
    queries: range,
    diagonal_tiles: int,
    sink_tiles: int,
    exact_until: int,
    window: int | None,
) -> set[int]:
    """Return the tiles, counted from key 0's, with a key that some query reads in low precision."""
    query = torch.tensor(queries)[:, None]
    key = torch.arange(geometry.kv_offset, geometry.kv_offset + geometry.kv_len)
    distance, tiles = query - key, query // TILE - key // TILE
    if geometry.is_causal:
        is_visible, is_high = distance >= 0, (tiles >= 0) & ((tiles <= diagonal_tiles) | (query < exact_until))
    else:
        is_visible, is_high = distance.abs() >= 0, tiles.abs() <= diagonal_tiles
    if window is not None:
        is_visible &= distance < window if geometry.is_causal else distance.abs() <= window
    is_low = is_visible & ~(is_high | (key // TILE < sink_tiles))
    return set((key[is_low.any(0)] // TILE - geometry.kv_offset // TILE).tolist())


@given(
    q_len=st.integers(1, 500), kv_len=st.integers(1, 900), q_offset=POSITIONS, kv_offset=POSITIONS,
    is_causal=st.booleans(), window=st.none() | st.integers(1, 600),
    diagonal_tiles=st.integers(0, 3), sink_tiles=st.integers(0, 2), exact_tiles=st.integers(0, 6),
)  # fmt: skip
@example(1024, 1024, 0, 0, True, None, 1, 1, 0)
@example(1024, 1024, 0, 0, True, None, 1, 1, 8)
@example(1025, 1025, 0, 0, True, None, 1, 1, 8)
@example(150, 900, 750, 0, True, 333, 1, 1, 0)
def test_low_tiles_follow_the_rule(
    q_len: int, kv_len: int, q_offset: int, kv_offset: int, is_causal: bool, window: int | None,
    diagonal_tiles: int, sink_tiles: int, exact_tiles: int,
) -> None:  # fmt: skip
    geometry = AttentionGeometry(kv_len, q_offset, kv_offset, None, is_causal=is_causal, window=window, mask=None)
    band = diagonal_tiles, sink_tiles, exact_tiles * TILE
    recipe = Recipe(diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles, exact_until=exact_tiles * TILE)
    found = geometry.low_tiles(q_len, recipe)
    assert found is not None
    # A kernel's query blocks are padded to whole tiles.
    queries = range(q_offset // TILE * TILE, -(-(q_offset + q_len) // TILE) * TILE)
    expected = low_tiles(geometry, queries, *band, window)
    assert expected >= low_tiles(geometry, range(q_offset, q_offset + q_len), *band, window)
    assert expected <= set(found) <= set(range(-(-(kv_len + kv_offset % TILE) // TILE)))
    if window is None:
        assert list(found) == list(range(min(expected), max(expected) + 1) if expected else range(0))
        assert not is_causal or set(found) == expected
    # At most the tiles that would be visible if all key tiles were full.
    start, end = kv_offset // TILE * TILE, -(-(kv_offset + kv_len) // TILE) * TILE
    full = replace(geometry, kv_offset=start, kv_len=end - start)
    assert set(found) <= low_tiles(full, queries, -1, sink_tiles, 0, window)


def test_any_tile_may_be_low_if_positions_are_on_the_device() -> None:
    rows = torch.tensor([[0, 0, 0, 200]], dtype=torch.int32)
    geometry = AttentionGeometry(200, 0, 0, rows, is_causal=True, window=None, mask=None)
    assert geometry.low_tiles(200, Recipe()) is None
