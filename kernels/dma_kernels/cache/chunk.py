"""A chunk of queries over a cache on the Triton backend: all keys in 16 bits, and the ordinary prefill kernel.

Every block of queries reads all keys, so they are dequantised once, for this call alone: four bytes for each channel of
a key and value that the cache has room for, or that a sliding window and the chunk cover. For 8 kv heads of 128
channels that is 512 MiB at 128K tokens, one layer at a time.
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
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend causally to stored and new keys, and store the new ones; arguments as for ``cached_attention``."""
    lengths = storage.lengths
    end = (lengths + key.shape[2]).clamp(min=0)
    first, entries = torch.zeros_like(lengths), (storage.slots + 1) * TILE
    if window is not None:
        first = (lengths - window + 1).clamp(min=0) // TILE * TILE
        covered = (-(-(window - 1 + key.shape[2]) // TILE) + 1) * TILE
        entries = covered if storage.window is not None else min(entries, covered)
    # Before the chunk takes the place of the oldest keys in the tail.
    keys, values = restore_dense(storage, first, entries, key, value)
    options = AttentionOptions(
        q_offset=0,
        kv_offset=0,
        q_offset_rows=lengths,
        kv_offset_rows=first,
        kv_range=torch.stack((torch.zeros_like(end), end - first), 1),
        mask=None,
        sinks=sinks,
        is_causal=True,
        window=window,
        scale=scale,
        softcap=softcap,
    )
    out, _ = attention_triton(query, keys, values, EXACT, options)
    append_tokens(storage, key, value)
    return out
