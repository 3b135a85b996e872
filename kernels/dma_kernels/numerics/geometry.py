"""Positions and visibility of one call, for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .call import AttentionCall, of_four_dimensions
from .formats import MAX_POSITION, TILE, TILE_SHIFT
from .recipe import Recipe
from .tile_ranges import attended_start, attended_stop, first_band_tile, low_ranges

LOG2_E = math.log2(math.e)
SKIP_BLOCK = 64
"""Query positions that share one decision to skip a low tile."""
_HUGE_WINDOW = 1 << 29
"""Windows of at least this size are compared with the range of positions; smaller ones cannot overflow int32."""


@dataclass(frozen=True)
class AttentionGeometry:
    """Positions of a call's queries and keys, and which keys a query attends to; see :func:`dma_kernels.attention`.

    Position 0 is that of the first key that a batch row may see, so left padding does not change a row's result.
    """

    kv_len: int  # number of keys, including invisible ones
    q_offset: int  # position of query 0, if ``seq_info`` is ``None``
    kv_offset: int  # position of key 0, likewise; negative where the row is left-padded
    # int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the index of the first visible key, and
    # the index after the last
    seq_info: Tensor | None
    is_causal: bool  # whether a query attends to no key after its own position
    window: int | None = None  # sliding window
    mask: Tensor | None = None  # boolean, four dimensions that broadcast to ``[B, Hq, Tq, Tk]``

    @classmethod
    def of(cls, call: AttentionCall, seq_info: Any = None) -> AttentionGeometry:
        """Return the geometry of a call; ``seq_info`` is what :meth:`AttentionCall.seq_info` returns, or its layout."""
        q_len, kv_len = call.query.shape[2], call.key.shape[2]
        q_offset, kv_offset = (0, 0) if call.has_seq_info else (call.first_query, call.kv_offset)
        window = call.window
        if window is not None and window >= _HUGE_WINDOW:
            # Kernels compute in int32, so drop a window that hides nothing.
            reach = MAX_POSITION
            if not call.has_seq_info:
                before, after = q_offset + q_len - 1 - kv_offset, kv_offset + kv_len - 1 - q_offset
                reach = before + 1 if call.is_causal else max(before, after)
            window = None if window >= reach else window
        mask = of_four_dimensions(call.mask)
        return cls(kv_len, q_offset, kv_offset, seq_info, call.is_causal, window, mask)

    def batch_info(self, batch: int, device: torch.device) -> Tensor:
        """Return ``seq_info`` as int64 ``[B, 4]``, even if batch rows do not differ."""
        if self.seq_info is not None:
            return self.seq_info.long()
        return torch.tensor([[self.q_offset, self.kv_offset, 0, self.kv_len]], device=device).expand(batch, 4)

    def visible_keys(self) -> Tensor | None:
        """Return which keys lie in the visible range of their row, boolean ``[B, Tk]``; ``None`` if all do."""
        if self.seq_info is None:
            return None
        index = torch.arange(self.kv_len, device=self.seq_info.device)
        visible = (index >= self.seq_info[:, 2:3]) & (index < self.seq_info[:, 3:])
        return None if bool(visible.all()) else visible

    def of_rows(self, rows: list[int]) -> AttentionGeometry:
        """Return the geometry of some batch rows."""
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[rows]
        return replace(self, seq_info=None if self.seq_info is None else self.seq_info[rows], mask=mask)

    def trimmed(self) -> tuple[slice, AttentionGeometry]:
        """Drop the keys at both ends that are invisible to the whole batch, such as the unused end of a cache.

        Return the slice of remaining key indices, and the geometry of these keys.
        """
        keys = slice(0, self.kv_len)
        if self.seq_info is None:
            return keys, self
        bounds = [(start, end) for _, _, start, end in self.seq_info.tolist() if start < end] or [(0, 0)]
        keys = slice(min(start for start, _ in bounds), max(end for _, end in bounds))
        mask = self.mask if self.mask is None or self.mask.shape[3] == 1 else self.mask[..., keys]
        shift = self.seq_info.new_tensor([0, keys.start, -keys.start, -keys.start])
        return keys, replace(self, kv_len=keys.stop - keys.start, seq_info=self.seq_info + shift, mask=mask)

    def query_blocks(self, q_len: int, size: int, alignment: int) -> int:
        """Return the number of blocks of ``size`` queries per head; the first begins at a multiple of ``alignment``."""
        # If offsets are read on the device, query 0 may be the last of an aligned block.
        before = alignment - 1 if self.seq_info is not None else self.q_offset % alignment
        return -(-(before + q_len) // size)

    def low_tiles(self, q_len: int, recipe: Recipe) -> range | None:
        """Return the range of tiles that are low for some query, counted from the tile of key 0.

        ``None`` means all of them, because offsets are read on the device. Queries are rounded out to whole tiles for
        the window: a kernel's block is within one tile, and may extend before the first query and after the last.
        """
        if self.seq_info is not None:
            return None
        first_query, last_query = self.q_offset // TILE, (self.q_offset + q_len - 1) // TILE
        start = attended_start(first_query * TILE, self.kv_offset, self.window, self.is_causal)
        stop = attended_stop((last_query + 1) * TILE - 1, self.kv_offset + self.kv_len, self.window, self.is_causal)
        diagonal_tiles, exact_tiles = recipe.diagonal_tiles, recipe.exact_tiles(is_causal=self.is_causal)
        before_start, before_stop, after_start, after_stop = low_ranges(
            first_query, first_band_tile(last_query, diagonal_tiles, exact_tiles), start, stop, diagonal_tiles,
            recipe.sink_tiles, TILE_SHIFT, TILE_SHIFT, self.is_causal,
        )  # fmt: skip
        before, after = range(before_start, before_stop), range(after_start, after_stop)
        tiles = range(before_start, after_stop) if before and after else before or after
        origin = self.kv_offset // TILE
        return range(tiles.start - origin, tiles.stop - origin)
