"""Chunked prefill over a cache on the Triton backend: long chunks, masks and bidirectional calls.

Cached KV is restored to dense 16-bit tensors for one call: unquantized for high tiles, dequantized for low tiles. This
takes eight bytes per token and channel (of key and value), for the capacity of the cache or the range of a sliding
window or mask. Example: 1 GiB for 8 kv heads of 128 channels at 128K tokens, one layer at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..numerics.call import narrow_positions
from ..numerics.formats import TILE
from ..numerics.geometry import AttentionGeometry
from ..numerics.recipe import Recipe
from ..prefill.config import ComputePath, portable_config
from ..prefill.operands import DEQUANTIZED, RAW, Operands, TileOperands, new_results
from ..prefill.plan import launch_attention
from ..runtime import chip
from ..runtime.plan import Planned
from ..runtime.reports import report
from .append import append_tokens
from .reference import CacheOptions
from .restore import restore_dense
from .storage import LayerStorage

_HIGH_AND_LOW = ComputePath(RAW, DEQUANTIZED, DEQUANTIZED)
_HIGH_ONLY = ComputePath(RAW)


def chunk_attention(query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions) -> Tensor:
    """Attend to stored and new KV, and store the new; arguments as for ``cached_attention``, checked.

    ``key`` and ``value`` have no tokens if the queries' KV is stored already.
    """
    new_len = key.shape[2]
    if storage.window is None or new_len <= TILE or not options.is_causal:
        return _attend(query, key, value, storage, options)
    # A longer chunk would overwrite pages that its first queries attend to.
    outputs = []
    for start in range(0, new_len, TILE):
        tokens = slice(start, start + TILE)
        mask = options.mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, tokens]
        q, k, v = (x[:, :, tokens] for x in (query, key, value))
        outputs.append(_attend(q, k, v, storage, options._replace(mask=mask)).transpose(1, 2))
    return torch.cat(outputs, 1).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions) -> Tensor:
    new_len = key.shape[2]
    window, mask, sinks = options.window, options.mask, options.sinks
    first_query = storage.lengths - (query.shape[2] - new_len)
    end = (storage.lengths + new_len).clamp(min=0)
    first, kv_len = torch.zeros_like(end), (storage.max_pages + 1) * TILE
    if window is not None:
        reach = window - 1 if options.is_causal else window
        first = (first_query - reach).clamp(min=0) // TILE * TILE
        covered = (-(-(reach + query.shape[2]) // TILE) + 1) * TILE
        kv_len = covered if storage.window is not None else min(kv_len, covered)
    if mask is not None and mask.shape[3] > 1:  # keys without a column are masked
        assert options.mask_position is not None
        first, kv_len = options.mask_position, mask.shape[3]
    # High tiles are restored before the chunk overwrites the oldest residual KV, low tiles after the chunk's tiles were
    # quantized.
    keys, values = restore_dense(storage, first, kv_len, key, value)
    append_tokens(storage, key, value)
    # A ring does not hold all low tiles of a long bidirectional call, which need not equal single-token steps.
    low: tuple[Tensor | None, Tensor | None] = (None, None)
    if storage.window is None or new_len <= TILE:
        start = first.div(TILE, rounding_mode="floor") * TILE
        low = restore_dense(storage, start, (-(-kv_len // TILE) + 1) * TILE, as_low=True)
    visible = (-first).clamp(0, kv_len), (end - first).clamp(0, kv_len)
    seq_info = narrow_positions(torch.stack((first_query, first, *visible), 1))
    recipe = Recipe(low="bf16", high="bf16", diagonal_tiles=storage.diagonal_tiles, sink_tiles=storage.sink_len // TILE)
    report("portable")
    return launch_chunk(
        query, keys, values, *low, None if sinks is None else sinks.contiguous(), mask, seq_info, recipe=recipe,
        is_causal=options.is_causal, window=window, scale=options.scale, softcap=options.softcap,
    )[0]  # fmt: skip


@Planned
def launch_chunk(
    query: Any, keys: Any, values: Any, low_keys: Any, low_values: Any, sinks: Any, mask: Any, seq_info: Any, *,
    recipe: Recipe, is_causal: bool, window: int | None, scale: float, softcap: float | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launch the portable kernel over restored KV, and return the output and the log-sum-exp."""
    has_low = low_keys is not None
    config = portable_config(
        chip.of(query.device).arch,
        _HIGH_AND_LOW if has_low else _HIGH_ONLY,
        query.shape[3],
        values.shape[3],
        has_softcap=softcap is not None,
    )
    low = TileOperands(low_keys, low_values, DEQUANTIZED, DEQUANTIZED) if has_low else None
    operands = Operands(high=TileOperands(keys, values, RAW, RAW), low=low)
    geometry = AttentionGeometry(keys.shape[2], 0, 0, seq_info, is_causal=is_causal, window=window, mask=mask)
    out, lse = new_results(query, values)
    if lse.numel():
        launch_attention(query, operands, geometry, recipe, config, out, lse, scale=scale, softcap=softcap, sinks=sinks)
    return out, lse
