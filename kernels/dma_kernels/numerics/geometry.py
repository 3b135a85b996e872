"""Positions and visibility of one call, as every backend is told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
MAX_BAND_TILES = 1 << 20
"""More tiles than a sequence has. A wider band is clamped to it, so that positions stay in int32."""


@dataclass(frozen=True)
class AttentionGeometry:
    """Which key each query may see, and where both stand in the sequence.

    Positions are counted from the first key that a batch row may see, so that a left-padded row is computed as it
    would be alone.

    Attributes:
        q_position: Position of query 0, int64 ``[B]``.
        kv_position: Position of key 0, int64 ``[B]``; negative where the row is left-padded.
        kv_range: First visible key and the one past the last, as indices, int64 ``[B, 2]``.
        is_causal: Whether a query sees no key behind its own position.
        window: Sliding window, the model's own: causal, a query sees its own position and the ``window - 1`` before
            it; bidirectional, those at a distance of at most ``window``.
        mask: Boolean, broadcastable to ``[B, H, Tq, Tk]``; true where a query may see a key. It adds to the rest.
    """

    q_position: Tensor
    kv_position: Tensor
    kv_range: Tensor
    is_causal: bool
    window: int | None = None
    mask: Tensor | None = None

    def visible_keys(self, kv_len: int) -> Tensor | None:
        """Return which keys of ``kv_range`` are in it, boolean ``[B, Tk]``; ``None`` if that is all of them."""
        start, end = self.kv_range[:, :1], self.kv_range[:, 1:]
        index = torch.arange(kv_len, device=start.device)
        visible = (index >= start) & (index < end)
        return None if bool(visible.all()) else visible

    def trimmed(self, kv_len: int) -> tuple[slice, AttentionGeometry]:
        """Drop the keys at both ends that ``kv_range`` hides from the whole batch, such as a cache's free tail.

        Returns:
            The slice of key indices that stay, and the geometry of the keys in it.
        """
        bounds = [(max(start, 0), min(end, kv_len)) for start, end in self.kv_range.tolist()]
        bounds = [(start, end) for start, end in bounds if start < end] or [(0, 0)]
        keys = slice(min(start for start, _ in bounds), max(end for _, end in bounds))
        if keys == slice(0, kv_len):
            return keys, self
        mask = self.mask if self.mask is None or self.mask.shape[3] == 1 else self.mask[..., keys]
        shifted = replace(
            self, kv_position=self.kv_position + keys.start, kv_range=self.kv_range - keys.start, mask=mask
        )
        return keys, shifted


@dataclass(frozen=True)
class PrefillGeometry:
    """Where the queries and keys of a call stand; see :func:`dma_kernels.attention`.

    Attributes:
        kv_len: Keys as the caller counts them.
        q_offset: Position of query 0, where ``rows`` is ``None``.
        kv_offset: Position of key 0, likewise.
        rows: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        is_causal: Whether a query sees no key behind its own position.
        window: Sliding window.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``.
    """

    kv_len: int
    q_offset: int
    kv_offset: int
    rows: Tensor | None
    is_causal: bool
    window: int | None
    mask: Tensor | None
