"""Attention over a layer's cache in torch: the specification of the cached kernels, and the CPU backend.

What the cache holds is laid out densely twice: raw for high tiles and dequantised for low ones. The reference attention
then reads each query's tiles by the rule, as it does for a prompt. So the result of a query does not depend on how many
others came with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from ..numerics.geometry import AttentionGeometry
from ..numerics.recipe import Recipe
from ..reference.attention import attend_prepared
from ..reference.operands import PreparedOperands
from .storage import LayerStorage


def band_recipe(storage: LayerStorage) -> Recipe:
    """Return a recipe with the band of a cache, whose low tiles are not those of its high ones.

    Only the band is used: operands of a cache have their precision already.
    """
    sink_tiles = storage.key_sink.shape[2] // TILE
    return Recipe(low="mxint8", diagonal_tiles=storage.diagonal_tiles, sink_tiles=sink_tiles)


def cached_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to stored and new keys. Nothing is stored: that is :meth:`LayerStorage.append`'s work, afterwards.

    Args:
        query: ``[B, Hq, Tq, D]``; the last one stands at the position of the last key.
        key: New keys, raw, ``[B, Hkv, Tk, D]``; ``Tk`` is ``Tq``, or 0 if they are stored already.
        value: New values, raw, ``[B, Hkv, Tk, Dv]``.
        storage: What came before.
        is_causal: Whether a query sees no key after its own position.
        window: Sliding window, as for :func:`dma_kernels.attention`.
        scale: Factor of the scores.
        softcap: Cap of the scores.
        sinks: Sink logits, ``[Hq]``.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, K]``, over ``K`` consecutive positions.
        mask_position: Position that column 0 of ``mask`` stands for, integer ``[B]``.

    Returns:
        Output ``[B, Hq, Tq, Dv]`` and logarithm of the denominator ``[B, Hq, Tq]``, as ``attention_reference``.
    """
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    lse_dtype = torch.promote_types(storage.key_tail.dtype, torch.float32)
    lse = query.new_empty((batch, heads, q_len), dtype=lse_dtype)
    for rows, length, part in storage.groups():
        end = length + key.shape[2]
        first_query = end - query.shape[2]
        oldest = 0 if window is None else max(0, first_query - (window - 1 if is_causal else window))
        position = min(oldest // TILE, max(length, 0) // TILE) * TILE
        (k_high, v_high), (k_low, v_low) = part.both_kinds(position, length, key[rows], value[rows])
        count, kv_len = k_high.shape[0], k_high.shape[2]
        ones = torch.ones(count, dtype=torch.int64, device=query.device)
        geometry = AttentionGeometry(
            q_position=ones * first_query,
            kv_position=ones * position,
            kv_range=torch.tensor([[0, kv_len]], device=query.device).expand(count, 2),
            is_causal=is_causal,
            window=window,
            mask=None if mask is None else _columns(mask, mask_position, rows, position, kv_len),
        )
        exact = query[rows].to(k_high.dtype)
        operands = PreparedOperands(exact, exact, k_low, k_high, v_high, v_low, None, None)
        out[rows], lse[rows] = attend_prepared(
            operands, geometry, band_recipe(part), dtype=query.dtype, scale=scale, softcap=softcap, sinks=sinks
        )
    return out, lse


def _columns(mask: Tensor, mask_position: Tensor | None, rows: slice, position: int, kv_len: int) -> Tensor:
    """Return the part of a mask that speaks of the keys from ``position`` on; what it does not speak of is hidden."""
    cells = mask if mask.shape[0] == 1 else mask[rows]
    if mask.shape[3] == 1:
        return cells
    assert mask_position is not None
    columns = []
    for row, start in enumerate(mask_position[rows].tolist()):
        own = cells[min(row, len(cells) - 1)][None]
        skipped = position - start
        part = own[..., max(skipped, 0) : max(skipped + kv_len, 0)]
        before = min(max(-skipped, 0), kv_len)
        columns.append(F.pad(part, (before, kv_len - before - part.shape[3]), value=False))
    return torch.cat(columns)
