"""Positions and visibility of one call, as every backend is told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .formats import TILE

LOG2_E = math.log2(math.e)
SKIP_BLOCK = 64
"""Query positions that decide together whether a low tile is skipped."""
MAX_BAND_TILES = 1 << 20
"""More tiles than a sequence has: the most of a recipe's band and sinks, so that positions stay in int32."""


MAX_POSITION = 1 << 30
"""The largest position of a first query or key, either way, so that positions fit in int32."""
_HUGE_WINDOW = 1 << 29
"""Windows from here on are compared with the range of positions; smaller ones cannot overflow int32."""


@dataclass(frozen=True)
class AttentionOptions:
    """What a call of :func:`dma_kernels.attention` says beside its recipe and tensors, checked.

    Each field is an argument of the custom ops, in this order.

    Attributes:
        q_offset: Position of query 0; ``None`` for that which :func:`dma_kernels.attention` chooses by itself. It is
            found from the tensors of each call, so that a traced call holds for other lengths.
        kv_offset: Position of key 0.
        q_offset_rows: Added to ``q_offset`` for each batch row, integer ``[B]``.
        kv_offset_rows: Added to ``kv_offset``, likewise.
        kv_range: Indices of the first visible key and of the one past the last, integer ``[B, 2]``.
        mask: Boolean, four dimensions that broadcast to ``[B, Hq, Tq, Tk]``.
        sinks: ``[Hq]``.
        is_causal: Whether a query sees no key after its own position.
        window: Sliding window.
        scale: Factor of the scores.
        softcap: Cap of the scores.
    """

    q_offset: int | None
    kv_offset: int
    q_offset_rows: Tensor | None
    kv_offset_rows: Tensor | None
    kv_range: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    is_causal: bool
    window: int | None
    scale: float
    softcap: float | None

    @classmethod
    def of(
        cls,
        query: Any,
        *,
        is_causal: bool,
        scale: float | None,
        q_offset: Any,
        kv_offset: Any,
        kv_range: Any,
        window: int | None,
        softcap: float | None,
        sinks: Any,
        mask: Any,
    ) -> AttentionOptions:
        """Return the options of a call of :func:`dma_kernels.attention`; ``mask`` has four dimensions."""
        q_rows, kv_rows = (None if isinstance(x, (int, torch.SymInt)) else x for x in (q_offset, kv_offset))
        return cls(
            q_offset=q_offset if q_rows is None else 0,
            kv_offset=kv_offset if kv_rows is None else 0,
            q_offset_rows=q_rows,
            kv_offset_rows=kv_rows,
            kv_range=kv_range,
            mask=mask,
            sinks=sinks,
            is_causal=is_causal,
            window=None if window is None else min(window, 4 * MAX_POSITION),  # the operator takes int64
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            softcap=None if softcap is None else float(softcap),
        )

    def first_query(self, q_len: int, kv_len: int) -> tuple[int, Tensor | None]:
        """Return the position of query 0, and what each batch row adds to it."""
        if self.q_offset is not None:
            return self.q_offset, self.q_offset_rows
        return (self.kv_offset + kv_len - q_len, self.kv_offset_rows) if self.is_causal else (0, None)

    @property
    def has_rows(self) -> bool:
        """Whether batch rows differ in what only the device knows."""
        return any(rows is not None for rows in (self.q_offset_rows, self.kv_offset_rows, self.kv_range))

    def rows(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the positions and the range of each batch row, int32 ``[B, 4]``; ``None`` if rows do not differ."""
        if not self.has_rows:
            return None
        kv_len = key.shape[2]
        rows = torch.empty((key.shape[0], 4), dtype=torch.int32, device=key.device)
        first = self.first_query(query.shape[2], kv_len)
        for column, (common, addends) in enumerate((first, (self.kv_offset, self.kv_offset_rows))):
            rows[:, column] = common if addends is None else addends
            if addends is not None and common != 0:
                rows[:, column] += common  # in 32 bits: those of the addends may be too few
        rows[:, 2], rows[:, 3] = 0, kv_len
        if self.kv_range is not None:
            rows[:, 2:] = self.kv_range.long().clamp(0, kv_len)  # before it is cut to 32 bits
        return rows


OPTION_FIELDS = tuple(field.name for field in fields(AttentionOptions))


@dataclass(frozen=True)
class AttentionGeometry:
    """Which key each query may see, and where both stand in the sequence.

    Positions are counted from the first key that a batch row may see, so that a left-padded row is computed as it
    would be alone.

    Attributes:
        q_position: Position of query 0, int64 ``[B]``.
        kv_position: Position of key 0, int64 ``[B]``; negative where the row is left-padded.
        kv_range: First visible key and the one past the last, as indices, int64 ``[B, 2]``.
        is_causal: Whether a query sees no key after its own position.
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

    @classmethod
    def of(cls, options: AttentionOptions, query: Tensor, key: Tensor) -> AttentionGeometry:
        """Return the geometry of a call."""
        batch, kv_len = key.shape[0], key.shape[2]

        def positions(offset: int, rows: Tensor | None) -> Tensor:
            common = torch.full((batch,), offset, dtype=torch.int64, device=key.device)
            return common if rows is None else common + rows.long()

        kv_range = options.kv_range
        if kv_range is None:
            kv_range = torch.tensor([[0, kv_len]], device=key.device).expand(batch, 2)
        return cls(
            q_position=positions(*options.first_query(query.shape[2], kv_len)),
            kv_position=positions(options.kv_offset, options.kv_offset_rows),
            kv_range=kv_range.long(),
            is_causal=options.is_causal,
            window=options.window,
            mask=options.mask,
        )

    def visible_keys(self, kv_len: int) -> Tensor | None:
        """Return which keys of ``kv_range`` are in it, boolean ``[B, Tk]``; ``None`` if that is all of them."""
        start, end = self.kv_range[:, :1], self.kv_range[:, 1:]
        index = torch.arange(kv_len, device=start.device)
        visible = (index >= start) & (index < end)
        return None if bool(visible.all()) else visible

    def of_rows(self, rows: list[int]) -> AttentionGeometry:
        """Return the geometry of some batch rows."""
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[rows]
        return replace(
            self,
            q_position=self.q_position[rows],
            kv_position=self.kv_position[rows],
            kv_range=self.kv_range[rows],
            mask=mask,
        )

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
        is_causal: Whether a query sees no key after its own position.
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

    @classmethod
    def of(cls, options: AttentionOptions, query: Any, key: Any, rows: Any = None) -> PrefillGeometry:
        """Return the geometry of a call; ``rows`` is what :meth:`AttentionOptions.rows` returns."""
        kv_len = key.shape[2]
        first = 0 if rows is not None else options.first_query(query.shape[2], kv_len)[0]
        kv_offset = options.kv_offset if rows is None else 0
        window = _bounded_window(options, None if rows is not None else first, query.shape[2], kv_len)
        return cls(kv_len, first, kv_offset, rows, options.is_causal, window, options.mask)

    def low_tiles(self, q_len: int, diagonal_tiles: int, sink_tiles: int) -> range | None:
        """Return the tiles from the first to the last that a query may see as a low one, counted from that of key 0.

        A window is that of whole tiles of queries: a kernel's blocks lie in one tile, and may hold queries before the
        first and after the last.

        Returns:
            The tiles; ``None``, for all of them, where only the device knows where batch rows stand.
        """
        if self.rows is not None:
            return None
        first_query, last_query = self.q_offset // TILE, (self.q_offset + q_len - 1) // TILE
        start = self.kv_offset // TILE
        first, last = max(start, sink_tiles), (self.kv_offset + self.kv_len - 1) // TILE
        if self.window is not None:
            reach = -(-(self.window - 1 if self.is_causal else self.window) // TILE)
            first, last = max(first, first_query - reach), min(last, last_query + reach)
        tiles = range(first, min(last, last_query - diagonal_tiles - 1) + 1)
        if not self.is_causal:
            after = range(max(first, first_query + diagonal_tiles + 1), last + 1)
            tiles = range(tiles.start, after.stop) if tiles and after else tiles or after
        return range(tiles.start - start, tiles.stop - start)


def _bounded_window(options: AttentionOptions, first_query: int | None, q_len: int, kv_len: int) -> int | None:
    """Return the window for a kernel, whose positions are int32: ``None`` if it hides nothing.

    Args:
        options: The call's.
        first_query: Position of query 0; ``None`` if only the device knows it.
        q_len: Number of queries.
        kv_len: Number of keys.
    """
    window = options.window
    if window is None or window < _HUGE_WINDOW:
        return window
    reach = MAX_POSITION
    if first_query is not None:
        before = first_query + q_len - 1 - options.kv_offset
        after = options.kv_offset + kv_len - 1 - first_query
        reach = before + 1 if options.is_causal else max(before, after)
    return None if window >= reach else window
