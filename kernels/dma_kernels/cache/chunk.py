"""Attention over a cache by the prefill kernel on the Triton backend: long chunks, masks and bidirectional calls.

Stored keys are dequantised once into 16 bits, for this call alone: four bytes for each channel of a key and value that
the cache has room for, or that a sliding window or a mask covers. For 8 kv heads of 128 channels that is 512 MiB at
128K tokens, one layer at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.formats import TILE
from ..numerics.geometry import AttentionOptions
from ..prefill.backend import attention_triton
from ..reference.attention import EXACT
from .append import append_tokens
from .restore import restore_dense
from .storage import LayerStorage


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
    lengths, new_len = storage.lengths, key.shape[2]
    stored_queries = query.shape[2] - new_len
    first_query, end = lengths - stored_queries, (lengths + new_len).clamp(min=0)
    first, entries = torch.zeros_like(lengths), (storage.slots + 1) * TILE
    if window is not None:
        reach = window - 1 if is_causal else window
        first = (first_query - reach).clamp(min=0) // TILE * TILE
        covered = (-(-(reach + query.shape[2]) // TILE) + 1) * TILE
        entries = covered if storage.window is not None else min(entries, covered)
    if mask is not None and mask.shape[3] > 1:  # what it does not speak of is hidden
        assert mask_position is not None
        first, entries = mask_position, mask.shape[3]
    # Before the chunk takes the place of the oldest keys in the tail.
    keys, values = restore_dense(storage, first, entries, key, value, stored_queries=stored_queries)
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
    out, _ = attention_triton(query, keys, values, EXACT, options)
    append_tokens(storage, key, value)
    return out
