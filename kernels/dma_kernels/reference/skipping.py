"""Tile skipping in torch: the rule that decides which low tiles a block of queries skips."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from ..numerics.geometry import SKIP_BLOCK
from ..numerics.recipe import Recipe
from ..numerics.tile_ranges import first_band_tile


def is_high_tile(q_tile: Tensor, k_tile: Tensor, recipe: Recipe, *, is_causal: bool) -> Tensor:
    """Return where key tiles are high for query tiles; both are integer and broadcast against each other."""
    last = q_tile if is_causal else q_tile + recipe.diagonal_tiles
    exact_tiles = recipe.exact_tiles(is_causal=is_causal)
    first = first_band_tile(q_tile, recipe.diagonal_tiles, exact_tiles)  # type: ignore[arg-type] # each element
    return ((k_tile >= first) & (k_tile <= last)) | (k_tile < recipe.sink_tiles)


def skip_tiles(
    scores: Tensor, q_pos: Tensor, k_pos: Tensor, recipe: Recipe, *, is_causal: bool, tile_counts: Tensor | None
) -> None:
    """Hide the low tiles that the rule skips, in place.

    A row can skip a low tile if its largest visible logit there is more than ``skip_threshold`` below its largest
    visible logit in high tiles. It can also skip a tile of which it sees no key. A block of 64 positions skips the tile
    if all its rows can. Incomplete blocks skip nothing.

    Args:
        scores: Logits ``[B, Hkv, G, R, C]``, ``-inf`` where a query may not see a key. Skipped tiles become ``-inf``.
        q_pos: Positions of the rows, integer ``[B, R]``, consecutive; equal modulo 64 across the batch.
        k_pos: Positions of the columns, integer ``[B, C]``, consecutive; equal modulo 128 across the batch.
        recipe: Its band and ``skip_threshold``.
        is_causal: Whether the band ends at the query's own tile.
        tile_counts: int64 ``[Hkv * G, 2]``, to which the numbers of pairs of block and low tile skipped and examined
            are added. A pair in which no query sees a key does not count.
    """
    assert recipe.skip_threshold is not None
    if scores.numel() == 0:
        return
    first_row = int(-q_pos[0, 0] % SKIP_BLOCK)
    blocks = (scores.shape[3] - first_row) // SKIP_BLOCK
    if blocks <= 0:
        return
    rows = slice(first_row, first_row + blocks * SKIP_BLOCK)
    left = int(k_pos[0, 0] % TILE)
    right = -(left + scores.shape[4]) % TILE
    whole = F.pad(scores[:, :, :, rows], (left, right), value=-math.inf)
    tile_max = whole.view(*whole.shape[:-1], -1, TILE).amax(-1)  # [B, Hkv, G, rows, tiles]
    q_tile = q_pos[:, rows].div(TILE, rounding_mode="floor")[:, :, None]
    first_tile = k_pos[:, :1].div(TILE, rounding_mode="floor")
    k_tile = (first_tile + torch.arange(tile_max.shape[-1], device=scores.device))[:, None]
    is_high = is_high_tile(q_tile, k_tile, recipe, is_causal=is_causal)[:, None, None]  # [B, 1, 1, rows, tiles]
    high_max = tile_max.masked_fill(~is_high, -math.inf).amax(-1, keepdim=True)
    is_unseen = tile_max == -math.inf
    is_small = is_unseen | (tile_max < high_max - recipe.skip_threshold)
    is_skipped = _by_block(is_small).all(-2) & ~_by_block(is_high)[..., 0, :]  # [B, Hkv, G, blocks, tiles]
    if tile_counts is not None:
        is_examined = ~_by_block(is_unseen).all(-2) & ~_by_block(is_high)[..., 0, :]
        for column, pairs in enumerate((is_skipped & is_examined, is_examined)):
            tile_counts[:, column] += pairs.sum((0, 3, 4)).flatten()
    cells = is_skipped.repeat_interleave(SKIP_BLOCK, -2).repeat_interleave(TILE, -1)
    scores[:, :, :, rows].masked_fill_(cells[..., left : left + scores.shape[4]], -math.inf)


def _by_block(rows: Tensor) -> Tensor:
    """Split rows into blocks: ``[..., rows, tiles]`` to ``[..., blocks, 64, tiles]``."""
    return rows.reshape(*rows.shape[:-2], -1, SKIP_BLOCK, rows.shape[-1])
