"""Attention over a cache by the prefill kernel on the Triton backend: long chunks, masks and bidirectional calls.

Stored keys are laid out once in 16 bits, for this call alone: raw for the high tiles of the rule, dequantised for its
low ones. That takes eight bytes for each channel of a key and value that the cache has room for, or that a sliding
window or a mask covers. For 8 kv heads of 128 channels it is 1 GiB at 128K tokens, one layer at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import TILE
from ..numerics.geometry import AttentionOptions, PrefillGeometry
from ..numerics.layout import TensorLayout, layout_of
from ..numerics.recipe import Recipe
from ..prefill import portable
from ..prefill.config import portable_config
from ..prefill.operands import Operands, TileOperands
from ..prefill.plan import new_results
from ..runtime import chip
from ..runtime.compute_path import ComputePath
from ..runtime.operand_formats import DEQUANTIZED, RAW
from ..runtime.plan import LaunchPlan, make_plan
from ..runtime.reports import report
from .append import append_tokens
from .restore import restore_dense
from .storage import LayerStorage

_TWO_KINDS = ComputePath(RAW, DEQUANTIZED, DEQUANTIZED)
_ONE_KIND = ComputePath(RAW)


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    is_causal: bool = True,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None = None,
    mask_position: Tensor | None = None,
) -> Tensor:
    """Attend to stored and new keys, and store the new ones; arguments as for ``cached_attention``, checked.

    ``key`` and ``value`` have no tokens if those of the queries are stored already.
    """
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
    }
    new_len = key.shape[2]
    if storage.window is None or new_len <= TILE or not is_causal:
        return _attend(query, key, value, storage, **options, mask=mask, mask_position=mask_position)
    # A longer chunk overwrites codes that its first queries still see.
    parts = []
    for start in range(0, new_len, TILE):
        new = slice(start, start + TILE)
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, new]
        q, k, v = (x[:, :, new] for x in (query, key, value))
        out = _attend(q, k, v, storage, **options, mask=part, mask_position=mask_position)
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, 1).transpose(1, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    mask_position: Tensor | None,
) -> Tensor:
    new_len = key.shape[2]
    first_query = storage.lengths - (query.shape[2] - new_len)
    end = (storage.lengths + new_len).clamp(min=0)
    first, entries = torch.zeros_like(end), (storage.slots + 1) * TILE
    if window is not None:
        reach = window - 1 if is_causal else window
        first = (first_query - reach).clamp(min=0) // TILE * TILE
        covered = (-(-(reach + query.shape[2]) // TILE) + 1) * TILE
        entries = covered if storage.window is not None else min(entries, covered)
    if mask is not None and mask.shape[3] > 1:  # what it does not speak of is hidden
        assert mask_position is not None
        first, entries = mask_position, mask.shape[3]
    # Raw keys before the chunk takes the place of the oldest in the tail, codes after its tiles have been encoded.
    keys, values = restore_dense(storage, first, entries, key, value)
    append_tokens(storage, key, value)
    # A ring has not all codes that a long bidirectional call would read. That equals no steps of one token anyway.
    has_low = storage.window is None or new_len <= TILE
    low = _low_operands(storage, first, entries) if has_low else None
    options = AttentionOptions(
        q_offset=0,
        kv_offset=0,
        q_offset_rows=first_query,
        kv_offset_rows=first,
        kv_range=torch.stack(((-first).clamp(min=0), end - first), 1),
        mask=mask,
        sinks=sinks,
        is_causal=is_causal,
        window=window,
        scale=scale,
        softcap=softcap,
    )
    rows = options.rows(query, keys)
    low_tensors = (None, None) if low is None else low
    tensors = (query, keys, values, *low_tensors, None if sinks is None else sinks.contiguous(), mask, rows)
    plan = _plan(
        *map(layout_of, tensors),
        diagonal_tiles=storage.diagonal_tiles,
        sink_tiles=storage.key_sink.shape[2] // TILE,
        is_causal=is_causal,
        window=PrefillGeometry.of(options, query, keys, rows).window,
        scale=scale,
        softcap=softcap,
    )
    report("portable")
    return plan.run(tensors)[0]


@functools.lru_cache(maxsize=256)
def _plan(
    query: TensorLayout,
    keys: TensorLayout,
    values: TensorLayout,
    low_keys: TensorLayout | None,
    low_values: TensorLayout | None,
    sinks: TensorLayout | None,
    mask: TensorLayout | None,
    rows: TensorLayout,
    *,
    diagonal_tiles: int,
    sink_tiles: int,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> LaunchPlan:
    """Plan the launch of the portable kernel over restored keys and values."""
    recipe = Recipe(low="bf16", high="bf16", diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles)
    path = _ONE_KIND if low_keys is None else _TWO_KINDS
    has_softcap = softcap is not None
    config = portable_config(
        chip.device_arch(query.device), path, query.shape[3], values.shape[3], has_softcap=has_softcap
    )

    def launch(
        query: Any, keys: Any, values: Any, low_keys: Any, low_values: Any, sinks: Any, mask: Any, rows: Any
    ) -> tuple[Any, Any]:
        high = TileOperands(keys, values, RAW, RAW)
        low = None
        if low_keys is not None:
            low = TileOperands(low_keys, low_values, DEQUANTIZED, DEQUANTIZED)
        geometry = PrefillGeometry(keys.shape[2], 0, 0, rows, is_causal=is_causal, window=window, mask=mask)
        out, lse = new_results(query, values)
        if lse.numel():
            portable.launch(
                *(query, Operands(high=high, low=low), geometry, recipe, config, out, lse),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                skip_threshold=None,
                tile_counts=None,
                is_early=False,
            )
        return out, lse

    return make_plan(launch, (query, keys, values, low_keys, low_values, sinks, mask, rows), query.device)


def _low_operands(storage: LayerStorage, first: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Return what low tiles read, from the start of the tile that entry 0 lies in on."""
    start = first.div(TILE, rounding_mode="floor") * TILE
    return restore_dense(storage, start, (-(-entries // TILE) + 1) * TILE, are_low=True)
