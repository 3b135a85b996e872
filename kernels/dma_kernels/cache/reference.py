"""Attention over a layer's cache in torch: the specification of the cache kernels, and the CPU backend.

The cache is gathered twice: unquantized for high tiles and dequantized for low tiles. The reference attention then
selects each query's tiles by the rule, as in prefill. So the result of a query does not depend on the other queries of
its call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from ..numerics.geometry import AttentionGeometry
from ..numerics.recipe import Recipe
from ..reference.attention import attend_prepared
from ..reference.operands import PreparedOperands
from .storage import LayerStorage


class CacheOptions(NamedTuple):
    """The options of :func:`~dma_kernels.cache.api.cached_attention`, checked.

    A tuple, because PyTorch 2.11 does not trace functions that list the fields of a dataclass. The fields are arguments
    of the custom op, in this order.
    """

    scale: float  # scale of the scores
    is_causal: bool = True  # whether a query attends to no key after its own position
    window: int | None = None  # sliding window
    softcap: float | None = None  # softcap of the scores, applied after ``scale``
    sinks: Tensor | None = None  # sink logits, ``[Hq]``
    mask: Tensor | None = None  # boolean, broadcastable to ``[B, Hq, T, K]``, over ``K`` consecutive positions
    mask_position: Tensor | None = None  # position of column 0 of ``mask``, integer ``[B]``


def cached_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, options: CacheOptions
) -> tuple[Tensor, Tensor]:
    """Attend to stored and new keys; the new ones are not stored. There are none if the queries' own are stored.

    Returns:
        Output ``[B, Hq, Tq, Dv]``, and log-sum-exp ``[B, Hq, Tq]`` as of ``attention_reference``.
    """
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    lse_dtype = torch.promote_types(storage.key_residual.dtype, torch.float32)
    lse = query.new_empty((batch, heads, q_len), dtype=lse_dtype)
    # Only the band of this recipe is used: the operands already have their precision.
    recipe = Recipe(low="mxint8", diagonal_tiles=storage.diagonal_tiles, sink_tiles=storage.sink_len // TILE)
    window, is_causal = options.window, options.is_causal
    for rows, length, part in storage.by_length():
        first_query = length + key.shape[2] - q_len
        oldest = 0 if window is None else max(0, first_query - (window - 1 if is_causal else window))
        position = min(oldest // TILE, max(length, 0) // TILE) * TILE
        (k_high, v_high), (k_low, v_low) = part.high_and_low(position, length, key[rows], value[rows])
        kv_len = k_high.shape[2]
        mask = None if options.mask is None else _mask_columns(options, rows, position, kv_len)
        geometry = AttentionGeometry(kv_len, first_query, position, None, is_causal, window, mask)
        exact = query[rows].to(k_high.dtype)
        operands = PreparedOperands(exact, exact, k_low, k_high, v_high, v_low, None, None)
        out[rows], lse[rows] = attend_prepared(
            operands, geometry, recipe, dtype=query.dtype, scale=options.scale, softcap=options.softcap,
            sinks=options.sinks,
        )  # fmt: skip
    return out, lse


def _mask_columns(options: CacheOptions, rows: slice, position: int, kv_len: int) -> Tensor:
    """Return the mask of ``kv_len`` keys starting at ``position``; keys without a column are masked."""
    assert options.mask is not None
    mask = options.mask if options.mask.shape[0] == 1 else options.mask[rows]
    if mask.shape[3] == 1:
        return mask
    assert options.mask_position is not None
    columns = []
    for row, start in enumerate(options.mask_position[rows].tolist()):
        skipped = position - start
        part = mask[min(row, len(mask) - 1)][None, ..., max(skipped, 0) : max(skipped + kv_len, 0)]
        before = min(max(-skipped, 0), kv_len)
        columns.append(F.pad(part, (before, kv_len - before - part.shape[3]), value=False))
    return torch.cat(columns)
