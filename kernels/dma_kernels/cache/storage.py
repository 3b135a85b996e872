"""The KV cache of one layer: quantized pages, and unquantized KV of the first and the last tiles.

Positions
    A position counts from the first key that a batch row may see. Row ``b`` holds ``lengths[b]`` keys, at positions
    ``0..lengths[b] - 1``. Left padding is not stored: a row that still has ``n`` tokens of padding to come has length
    ``-n``, and tokens at negative positions are dropped.

Three regions
    * **Quantized KV**: every complete tile of 128 positions, quantized once, when its last key arrives. Each kv head of
      a tile is one page block (:mod:`dma_kernels.cache.page_layout`). Tile ``J`` of row ``b`` is in page
      ``page_table[b, J % max_pages]``. A layer with a sliding window has fewer pages than tiles.
    * **Residual KV**: the last ``diagonal_tiles + slack_tiles`` tiles in 16 bits, a ring buffer: position ``p`` is at
      index ``p % residual_len``. One slack tile is the query's own. A second one holds up to 129 tokens that are
      stored before their queries attend, or that are rolled back.
    * **Sink KV**: the first ``sink_tiles`` tiles in 16 bits, position ``p`` at index ``p``.

What a query reads
    Sink tiles, its own tile and the ``diagonal_tiles`` before it are read unquantized (*high* tiles), all others
    dequantized (*low* tiles). Tiles are quantized from the original keys, so codes do not depend on how tokens are
    split into calls. A step of several tokens equals the same number of single-token steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.call import check_count, check_window
from ..numerics.formats import MAX_POSITION, TILE
from .formats import stored_format
from .page_layout import PageLayout

SLACK_TILES = 2
"""Residual tiles beyond the band: the query's own, and one for appending or rolling back without losing the band."""

GROWTH = 1 + 1 / 128
"""Growth factor of the page table, at least one tile. A copy every 128 decode steps adds at most 1.6 % of traffic."""

_FP16_MAX = torch.finfo(torch.float16).max

UNKNOWN = MAX_POSITION
"""More tokens than a row may have: what the host assumes where only the device knows their number."""

TILES_PER_PASS = 64
"""Tiles that :meth:`LayerStorage.append` quantizes at once, in fp32; bounds the memory for a long prompt."""


@dataclass(eq=False)
class LayerStorage:
    """The KV cache of one layer. Tensors are written in place; growth and batch operations replace them."""

    format: str  # stored name of the cache format
    window: int | None  # causal sliding window of the layer, whose page table is then a ring; ``None`` without one
    kv_pages: Tensor  # page blocks of the quantized tiles, uint8 ``[pages, Hkv, nbytes]``
    page_table: Tensor  # page of each tile, int32 ``[B, max_pages]``; negative where a row has none
    key_residual: Tensor  # ``[B, Hkv, residual_len, D]`` in the model's dtype
    value_residual: Tensor  # ``[B, Hkv, residual_len, Dv]``
    key_sink: Tensor  # ``[B, Hkv, sink_tiles * 128, D]``
    value_sink: Tensor  # ``[B, Hkv, sink_tiles * 128, Dv]``
    lengths: Tensor  # stored keys of each row, int32 ``[B]``
    # tokens removed by ``crop`` and not replaced yet (on the host); the residual KV lacks as many of its oldest keys
    rolled_back: int = 0
    # index of each batch row in the residual and sink tensors, int32 ``[B]``, for a batch that changes from step to
    # step; ``None`` if it is the batch index. Such a storage cannot be cropped, grown or mapped.
    unquantized_rows: Tensor | None = None
    slack_tiles: int = SLACK_TILES  # residual tiles beyond the band; one suffices with ``unquantized_rows``
    appended: int = 0  # upper bound on ``lengths``, on the host; ``UNKNOWN`` after compiled code and graph capture
    # The last decode step, for one with the same layouts (:class:`.decode.RepeatedStep`); copies do not have it
    repeated_step: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for strides that the kernels do not support."""
        for name in ("page_table", "lengths", "unquantized_rows"):
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; use {name}.contiguous()")
        for name in ("kv_pages", *UNQUANTIZED):
            tensor = getattr(self, name)
            if not tensor[:1].is_contiguous():  # rows may have any stride
                raise ValueError(f"each row of {name} must be contiguous, got strides {tensor.stride()}")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"repeated_step": None}

    @classmethod
    def allocate(
        cls,
        format: str,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        diagonal_tiles: int = 1,
        sink_tiles: int = 1,
        tiles: int = 0,
        window: int | None = None,
    ) -> LayerStorage:
        """Return an empty cache with pages for ``tiles`` tiles per row, or for the fewer that the window needs.

        Raises:
            ValueError: The format is unknown, a number of tiles is negative, or the window is below 1.
        """
        for name, count in (("diagonal_tiles", diagonal_tiles), ("sink_tiles", sink_tiles), ("tiles", tiles)):
            check_count(name, count)
        check_window(window)
        residual, sink = (diagonal_tiles + SLACK_TILES) * TILE, sink_tiles * TILE
        layout = PageLayout(stored_format(format), head_dim, value_dim)
        max_pages = _pages_needed(tiles, window)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            format=format,
            window=window,
            kv_pages=zeros(batch * max_pages, kv_heads, layout.nbytes, dtype=torch.uint8),
            page_table=_consecutive_pages(batch, max_pages, device),
            key_residual=zeros(batch, kv_heads, residual, head_dim),
            value_residual=zeros(batch, kv_heads, residual, value_dim),
            key_sink=zeros(batch, kv_heads, sink, head_dim),
            value_sink=zeros(batch, kv_heads, sink, value_dim),
            lengths=zeros(batch, dtype=torch.int32),
        )

    @property
    def page_layout(self) -> PageLayout:
        """Byte layout of a page block."""
        return PageLayout(stored_format(self.format), self.key_residual.shape[3], self.value_residual.shape[3])

    @property
    def residual(self) -> tuple[Tensor, Tensor]:
        """The residual keys and values."""
        return self.key_residual, self.value_residual

    @property
    def sink(self) -> tuple[Tensor, Tensor]:
        """The sink keys and values."""
        return self.key_sink, self.value_sink

    @property
    def residual_len(self) -> int:
        """Tokens in the ring buffer of residual KV."""
        return self.key_residual.shape[2]

    @property
    def sink_len(self) -> int:
        """Tokens in the sink KV."""
        return self.key_sink.shape[2]

    @property
    def diagonal_tiles(self) -> int:
        """Tiles before a query's own tile that it reads unquantized."""
        return self.residual_len // TILE - self.slack_tiles

    @property
    def spare_tokens(self) -> int:
        """Tokens that can be stored before their queries attend, or be rolled back, wherever a tile ends."""
        return (self.slack_tiles - 1) * TILE + 1

    @property
    def max_pages(self) -> int:
        """Quantized tiles that a row has room for."""
        return self.page_table.shape[1]

    @property
    def max_tiles(self) -> int:
        """Tiles that a row may have: as many as it has pages for, or any number in the full-size ring of a window."""
        return UNKNOWN if _pages_needed(UNKNOWN, self.window) <= self.max_pages else self.max_pages

    @property
    def room(self) -> int:
        """Tokens that a row has room for. The last tile needs no page before it is complete."""
        return min((self.max_tiles + 1) * TILE - 1, UNKNOWN)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def empty_kv(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of zero tokens."""
        key, value = (x.new_empty((len(self.lengths), x.shape[1], 0, x.shape[3])) for x in self.residual)
        return key, value

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {name: getattr(self, name) for name in TENSORS}

    @classmethod
    def from_tensors(
        cls, format: str, window: int | None, tensors: Mapping[str, Tensor], rolled_back: int = 0
    ) -> LayerStorage:
        """Return a cache over tensors with the names of :meth:`tensors`."""
        appended = max(tensors["lengths"].tolist(), default=0)
        return cls(format=format, window=window, rolled_back=rolled_back, appended=appended, **tensors)  # type: ignore[arg-type]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> LayerStorage:
        """Apply ``function`` to every tensor, each with the batch as its first dimension.

        The pages of a row must be consecutive, which holds unless the page table was replaced.
        """
        tensors = self.tensors()
        batch, max_pages = self.page_table.shape
        tensors["kv_pages"] = self.kv_pages.view(batch, max_pages, *self.kv_pages.shape[1:])
        tensors = {name: function(tensor) for name, tensor in tensors.items()}
        tensors["page_table"] = _consecutive_pages(len(tensors["lengths"]), max_pages, tensors["lengths"].device)
        tensors["kv_pages"] = tensors["kv_pages"].flatten(0, 1)
        return replace(self, **tensors)  # type: ignore[arg-type]

    def rows(self, rows: slice) -> LayerStorage:
        """Return a view of some batch rows; residual and sink KV are copied with :attr:`unquantized_rows`."""
        index: slice | Tensor = rows if self.unquantized_rows is None else self.unquantized_rows[rows].long()
        tensors = {
            name: tensor[index if name in UNQUANTIZED else rows]
            for name, tensor in self.tensors().items()
            if name != "kv_pages"
        }
        return replace(self, unquantized_rows=None, **tensors)  # type: ignore[arg-type]

    def by_length(self) -> Iterator[tuple[slice, int, LayerStorage]]:
        """Yield runs of batch rows with equal lengths: the rows, their length and a view of them.

        Synchronizes with the device.
        """
        lengths = self.lengths.tolist()
        start = 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[start]:
                rows = slice(start, row)
                yield rows, lengths[start], self.rows(rows)
                start = row

    def reserve(self, tiles: int) -> None:
        """Make room for ``tiles`` tiles per row: exactly that in an empty cache, with geometric growth later.

        The full-size ring of a sliding window has room for any number.
        """
        check_count("tiles", tiles)
        if _pages_needed(tiles, self.window) <= self.max_pages:
            return
        batch, before = self.page_table.shape
        max_pages = _pages_needed(max(tiles, math.ceil(before * GROWTH)), self.window)
        # A ring does not wrap before it has its full size, so tiles keep their indices.
        grown = self.kv_pages.new_zeros((batch, max_pages, *self.kv_pages.shape[1:]))
        grown[:, :before] = self.kv_pages.view(batch, before, *self.kv_pages.shape[1:])
        self.kv_pages = grown.flatten(0, 1)
        self.page_table = _consecutive_pages(batch, max_pages, self.page_table.device)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new keys and values, quantize the tiles that they complete, and add ``T`` to :attr:`lengths`.

        Args:
            key: ``[B, Hkv, T, D]`` in the model's dtype; any ``T``, any strides.
            value: ``[B, Hkv, T, Dv]``.

        Raises:
            ValueError: A complete tile has no page (:meth:`reserve`); nothing was stored.
        """
        runs = list(self.by_length())
        self.appended = max((length for _, length, _ in runs), default=0)
        self.check_room(key.shape[2])
        for _, length, part in runs:
            tiles = max(length, 0) // TILE, max(length + key.shape[2], 0) // TILE
            if bool((part._pages_of(*tiles) < 0).any()):
                raise ValueError(f"page_table must have a page for each of the tiles {tiles[0]} to {tiles[1] - 1}")
        for rows, length, part in runs:
            part._append_at(length, key[rows], value[rows])
            if self.unquantized_rows is not None:
                for name in UNQUANTIZED:
                    getattr(self, name)[self.unquantized_rows[rows].long()] = getattr(part, name)
        self.lengths += key.shape[2]
        self.count_appended(key.shape[2])

    def check_room(self, count: int) -> None:
        """Raise ``ValueError`` if there are too few pages for ``count`` more tokens.

        Synchronizes with the device only if :attr:`appended` does not decide it, and never in CUDA graph capture. In
        compiled code and graph replays, the kernels check it.
        """
        is_full = (self.appended + count) // TILE > self.max_tiles
        if not is_full or (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self.appended = max(self.lengths.tolist(), default=0)
        longest = self.appended + count
        if longest // TILE > self.max_tiles:
            raise ValueError(
                f"the cache has room for {self.max_pages} tiles of {TILE} tokens, but {longest} tokens fill "
                f"{longest // TILE}; call reserve({longest // TILE}) first"
            )

    def count_appended(self, count: int) -> None:
        """Update the host's counters after ``count`` tokens were stored in every row."""
        # In compiled code, without a counter that would change in each step.
        is_unknown = torch.compiler.is_compiling() or (
            self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        self.appended = UNKNOWN if is_unknown else self.appended + count
        self.rolled_back = max(0, self.rolled_back - count)

    def incomplete_tile(self, length: int, key: Tensor, value: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return unquantized KV from the start of the incomplete tile to the last new token; rows of equal length.

        ``length`` keys are stored, the new ones are not; there may be none.

        Returns:
            The first position, a multiple of 128; keys ``[B, Hkv, N, D]`` and values ``[B, Hkv, N, Dv]``.
        """
        first = max(length, 0) // TILE * TILE
        index = self._residual_index(first, max(length, 0))
        new = (x[:, :, max(-length, 0) :] for x in (key, value))  # skips padding
        keys, values = (torch.cat((x[:, :, index], y), 2) for x, y in zip(self.residual, new, strict=True))
        return first, keys, values

    def dequantize(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Dequantize the complete tiles at the positions ``first..end - 1`` of rows of equal length, fp32."""
        blocks = self.kv_pages[self._pages_of(first // TILE, end // TILE)].transpose(1, 2)
        keys, values = self.page_layout.decode(blocks)
        return keys.flatten(2, 3), values.flatten(2, 3)

    def gather(self, first: int, end: int, length: int, band: int) -> tuple[Tensor, Tensor]:
        """Return KV at the positions ``first..end - 1``, fp32 (fp64 for fp64), of rows of ``length`` stored keys.

        Unquantized in the sinks and from ``band`` on, if the residual KV holds it, else dequantized. ``first`` is a
        multiple of 128.
        """
        band = max(first, band, length + self.rolled_back - self.residual_len)
        complete = -(-min(band, end) // TILE) * TILE  # tiles that begin before the residual KV have been quantized
        sink = slice(first, min(end, self.sink_len))
        index = self._residual_index(band, max(end, band))
        gathered = []
        for quantized, residual, sinks in zip(self.dequantize(first, complete), self.residual, self.sink, strict=True):
            dtype = torch.promote_types(residual.dtype, torch.float32)
            x = F.pad(quantized.to(dtype), (0, 0, 0, end - complete))
            if residual.dtype == torch.float16:  # a zero point is rounded down, possibly below the lowest fp16 number
                x.clamp_(-_FP16_MAX, _FP16_MAX)
            if sink.start < sink.stop:
                x[:, :, : sink.stop - first] = sinks[:, :, sink].to(x.dtype)
            x[:, :, band - first :] = residual[:, :, index].to(x.dtype)
            gathered.append(x)
        return gathered[0], gathered[1]

    def high_and_low(
        self, first: int, length: int, key: Tensor, value: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return stored and new KV as high tiles and as low tiles read it, of rows of ``length`` stored keys.

        Returns:
            Keys and values from ``first``, a multiple of 128, to the last new token, fp32 (fp64 for fp64). High:
            unquantized wherever it is stored so. Low: dequantized in all complete tiles.
        """
        start, *recent = self.incomplete_tile(length, key, value)
        complete = recent[0].shape[2] // TILE * TILE
        blocks = self.page_layout.encode(*(_to_tiles(x[:, :, :complete]) for x in recent))
        residual_start = min(start, max(first, length + self.rolled_back - self.residual_len))
        index = self._residual_index(residual_start, start)
        high, low = [], []
        gathered, decoded = self.gather(first, start, length, start), self.page_layout.decode(blocks)
        for stored, residual, new, dequantized in zip(gathered, self.residual, recent, decoded, strict=True):
            new = new.to(stored.dtype)
            older = stored[:, :, : residual_start - first]
            high.append(torch.cat((older, residual[:, :, index].to(stored.dtype), new), 2))
            low.append(torch.cat((stored, dequantized.flatten(2, 3).to(stored.dtype), new[:, :, complete:]), 2))
        return (high[0], high[1]), (low[0], low[1])

    def restore(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the KV at ``length`` positions of every row, starting at ``position`` (integer ``[B]``).

        In the model's dtype; unquantized wherever it is stored so, zeros where nothing is stored.
        """
        keys, values = (F.pad(x, (0, 0, 0, length)) for x in self.empty_kv())
        for rows, stored, part in self.by_length():
            oldest = (stored + self.rolled_back) // TILE - self.max_pages  # above 0 in a ring
            for row, start in enumerate(position[rows].tolist()):
                first = max(start, oldest * TILE, 0)
                end = min(start + length, stored)
                if first >= end:
                    continue
                tile = first // TILE * TILE
                gathered = part.rows(slice(row, row + 1)).gather(tile, end, stored, 0)
                for x, source in zip((keys, values), gathered, strict=True):
                    x[rows.start + row, :, first - start : end - start] = source[0, :, first - tile :].to(x.dtype)
        return keys, values

    def crop(self, count: int) -> None:
        """Roll back the last ``count`` tokens of every row, as if never stored; raises as :meth:`check_crop` does."""
        self.check_crop(count)
        rolled_back = self.rolled_back + count
        if rolled_back > self.spare_tokens:
            for rows, length, part in self.by_length():
                # The sinks hold what the residual KV has lost.
                lost = max(0, length + self.rolled_back - self.residual_len)
                first, end = max(0, length - count - self.residual_len), min(max(0, length - count), lost)
                index = self._residual_index(first, end)
                for residual, sink in zip(self.residual, part.sink, strict=True):
                    residual[rows, :, index] = sink[:, :, first:end]
            rolled_back = 0
        self.lengths -= count
        self.appended -= count
        self.rolled_back = rolled_back

    def check_crop(self, count: int) -> None:
        """Check that ``count`` tokens can be rolled back as if they had never been stored.

        Up to :attr:`spare_tokens` always can. More can if everything before the new end is still stored unquantized:
        rows then end in the sinks, or have never been longer than residual and sink KV together.

        Raises:
            RuntimeError: Keys just before the new end are stored as codes only, or were overwritten in a ring.
            ValueError: ``count`` is not an integer of at least 0.
        """
        check_count("count", count)
        rolled_back = self.rolled_back + count
        if rolled_back <= self.spare_tokens:
            return
        for length in self.lengths.tolist():
            residual_start = length + self.rolled_back - self.residual_len
            if length - count > self.sink_len and residual_start > self.sink_len:
                raise RuntimeError(
                    f"crop removes {rolled_back} tokens, but the 16-bit keys before the new end have been replaced "
                    f"by codes; at most {self.spare_tokens} of {length} can be removed: read the prompt again "
                    "instead"
                )

    def _append_at(self, length: int, key: Tensor, value: Tensor) -> None:
        """Append to rows of ``length`` stored keys, without updating ``lengths``."""
        end = length + key.shape[2]
        if end <= 0:
            return
        first, keys, values = self.incomplete_tile(length, key, value)
        for tile in range(first // TILE, end // TILE, TILES_PER_PASS):
            tokens = slice(tile * TILE - first, min(tile + TILES_PER_PASS, end // TILE) * TILE - first)
            self._quantize(tile, keys[:, :, tokens], values[:, :, tokens])
        sink_end = min(end, self.sink_len)
        start = max(first, end - self.residual_len)
        index = self._residual_index(start, end)
        for x, residual, sink in zip((keys, values), self.residual, self.sink, strict=True):
            if first < sink_end:
                sink[:, :, first:sink_end] = x[:, :, : sink_end - first]
            residual[:, :, index] = x[:, :, start - first :]

    def _quantize(self, tile: int, keys: Tensor, values: Tensor) -> None:
        """Quantize complete tiles, starting with tile ``tile``."""
        end = tile + keys.shape[2] // TILE
        kept = min(end - tile, self.max_pages)  # a ring holds only the last ones
        blocks = self.page_layout.encode(_to_tiles(keys[:, :, -kept * TILE :]), _to_tiles(values[:, :, -kept * TILE :]))
        self.kv_pages[self._pages_of(end - kept, end)] = blocks.transpose(1, 2)

    def _pages_of(self, first: int, end: int) -> Tensor:
        """Return the pages of the tiles ``first..end - 1``, ``[B, end - first]``."""
        columns = torch.arange(first, end, device=self.page_table.device) % max(self.max_pages, 1)
        return self.page_table[:, columns].long()

    def _residual_index(self, first: int, end: int) -> Tensor:
        """Return the ring buffer indices of the positions ``first..end - 1``."""
        return torch.arange(first, end, device=self.lengths.device) % self.residual_len


TENSORS = tuple(field.name for field in fields(LayerStorage) if field.type == "Tensor")
"""Names of a storage's tensors, in order."""

UNQUANTIZED = ("key_residual", "value_residual", "key_sink", "value_sink")
"""Names of the unquantized tensors. Their row strides, and that of pages, may be larger than a row."""


def _consecutive_pages(batch: int, max_pages: int, device: torch.device) -> Tensor:
    """Return a page table in which the tiles of a row are consecutive pages."""
    return torch.arange(batch * max_pages, dtype=torch.int32, device=device).view(batch, max_pages)


def _to_tiles(x: Tensor) -> Tensor:
    """Split ``[B, H, n * 128, D]`` into tiles, ``[B, H, n, 128, D]``."""
    return x.reshape(*x.shape[:2], x.shape[2] // TILE, TILE, x.shape[3])


def _pages_needed(tiles: int, window: int | None) -> int:
    """Return the pages per row for ``tiles`` tiles: at most what a window covers, wherever in a tile it begins."""
    if window is None:
        return tiles
    return min(tiles, -(-(window - 1 + SLACK_TILES * TILE) // TILE) + 1)
