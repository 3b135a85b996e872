"""What a key-value cache holds of one layer: tiles as codes, and raw 16-bit keys and values of the ends.

Positions
    Everything is indexed by position, counted from the first key that a batch row may see. ``lengths[b]`` keys of row
    ``b`` are stored, at the positions ``0..lengths[b] - 1``; left padding is not. A row whose padding has not ended yet
    has a negative length: what comes next stands at position ``lengths[b]``, and is dropped while that is below 0.

Three stores
    * **body**: every complete tile of 128 positions, quantised once, when its last key comes: a record of bytes for
      each kv head (:mod:`dma_kernels.cache.codes`). Tile ``J`` of row ``b`` is in page ``pages[b, J % slots]``; only
      where the layer has a sliding window are there fewer slots than tiles.
    * **tail**: the raw keys and values of the last ``diagonal_tiles + slack_tiles`` tiles, a ring: position ``p`` at
      entry ``p % ring``. One tile of slack is the query's own, and a second one is there so that up to 129 tokens can
      be stored before their queries are answered, or taken back again.
    * **sink**: the raw keys and values of the first ``sink_tiles`` tiles, position ``p`` at entry ``p``.

What a call reads
    Each query reads raw the tiles of the sinks and those from ``diagonal_tiles`` before its own tile on. Everything
    between it reads from the body. Codes are made of raw keys alone, so they are bit for bit those of one pass over the
    whole sequence, however the keys arrived. So a step of several tokens equals as many steps of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from .codes import Record, stored_format

SLACK_TILES = 2
"""Tiles of the tail beyond the band: the query's own, and one to append into, or to crop, without losing the band."""

GROWTH = 1 + 1 / 128
"""Factor of growth, by a whole tile at least. A step of decoding reads the whole cache; to copy it at every 128th step,
or more rarely, adds at most 1.6 % to what is moved. A larger factor would cost memory: with a quarter, 32K tokens in 4
bits took 0.37 of 16 bits from the first new tile on."""

_FP16_MAX = torch.finfo(torch.float16).max

ENCODED_AT_ONCE = 64
"""Tiles in a step of encoding, which computes in fp32; a bound on the memory of a long prompt."""


@dataclass(eq=False)
class LayerStorage:
    """The cache of one layer. The tensors are written in place; growing and batch operations replace them.

    Attributes:
        format: The name of the body's format.
        window: The causal sliding window of the layer, whose body is then a ring; ``None`` without one.
        body: Records, uint8 ``[pages, Hkv, nbytes]``.
        pages: Page of each tile, int32 ``[B, slots]``.
        key_tail: Raw ``[B, Hkv, ring, D]``, ``ring = (diagonal_tiles + slack_tiles) * 128``, in the model's dtype.
        value_tail: Raw ``[B, Hkv, ring, Dv]``.
        key_sink: Raw ``[B, Hkv, sink_tiles * 128, D]``.
        value_sink: Raw ``[B, Hkv, sink_tiles * 128, Dv]``.
        lengths: int32 ``[B]``, on the device: stored keys.
        appended: At least as many tokens as any row has, on the host: what was appended since the storage was made or
            last compared with ``lengths``. Replays of CUDA graphs and compiled code do not count.
        taken_back: Tokens that :meth:`crop` has taken back and that have not come again, on the host. The tail lacks as
            many of its oldest keys.
        raw_rows: For a storage whose batch changes from step to step, int32 ``[B]``: which row of tails and sinks, that
            then have any number of rows, batch row ``b`` has; ``None`` for its own. Such a storage is not cropped,
            grown or mapped.
        slack_tiles: Tiles of the tail beyond the band; one is enough for a storage with ``raw_rows``.
    """

    format: str
    window: int | None
    body: Tensor
    pages: Tensor
    key_tail: Tensor
    value_tail: Tensor
    key_sink: Tensor
    value_sink: Tensor
    lengths: Tensor
    taken_back: int = 0
    raw_rows: Tensor | None = None
    slack_tiles: int = SLACK_TILES
    appended: int = 0

    def __post_init__(self) -> None:
        """Check the strides that kernels take for granted.

        Raises:
            ValueError: A tensor has other strides.
        """
        for name in ("pages", "lengths", "raw_rows"):
            tensor = getattr(self, name)
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; use {name}.contiguous()")
        for name in ("body", *RAW):
            tensor = getattr(self, name)
            if not tensor[:1].is_contiguous():  # rows may be apart
                raise ValueError(f"each row of {name} must be contiguous, got strides {tensor.stride()}")

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
        """Return an empty storage whose body has room for ``tiles`` tiles, or for the fewer that a window needs."""
        ring, sink = (diagonal_tiles + SLACK_TILES) * TILE, sink_tiles * TILE
        record = Record(stored_format(format), head_dim, value_dim)
        slots = _slots(tiles, window)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            format=format,
            window=window,
            body=zeros(batch * slots, kv_heads, record.nbytes, dtype=torch.uint8),
            pages=_own_pages(batch, slots, device),
            key_tail=zeros(batch, kv_heads, ring, head_dim),
            value_tail=zeros(batch, kv_heads, ring, value_dim),
            key_sink=zeros(batch, kv_heads, sink, head_dim),
            value_sink=zeros(batch, kv_heads, sink, value_dim),
            lengths=zeros(batch, dtype=torch.int32),
        )

    @property
    def record(self) -> Record:
        """The layout of a tile in the body."""
        return Record(stored_format(self.format), self.key_tail.shape[3], self.value_tail.shape[3])

    def no_keys(self) -> tuple[Tensor, Tensor]:
        """Return new keys and values of no token."""
        batch = len(self.lengths)
        key, value = (x.new_empty((batch, x.shape[1], 0, x.shape[3])) for x in (self.key_tail, self.value_tail))
        return key, value

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Elements from a row of tails and sinks to the next, and words of 32 bits from a page to the next."""
        key, value, key_sink, value_sink = (getattr(self, name).stride(0) for name in RAW)
        return key, value, key_sink, value_sink, self.body.stride(0) // 4

    @property
    def ring(self) -> int:
        """Entries of the tail."""
        return self.key_tail.shape[2]

    @property
    def diagonal_tiles(self) -> int:
        """Tiles before that of a query that are read raw."""
        return self.ring // TILE - self.slack_tiles

    @property
    def spare_tokens(self) -> int:
        """Tokens that can be stored before their queries are answered, or taken back, with the whole band still raw.

        Wherever in its tile the end comes to lie.
        """
        return (self.slack_tiles - 1) * TILE + 1

    @property
    def slots(self) -> int:
        """Tiles of a row that the body has room for."""
        return self.pages.shape[1]

    def oldest_tile(self, length: int) -> int:
        """Return the first tile of rows of a length that the body still holds; 0 unless it is a ring."""
        return max(0, (length + self.taken_back) // TILE - self.slots)

    @property
    def nbytes(self) -> int:
        """Storage of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name."""
        return {name: getattr(self, name) for name in TENSORS}

    @classmethod
    def of_tensors(
        cls, format: str, window: int | None, tensors: Mapping[str, Tensor], taken_back: int = 0
    ) -> LayerStorage:
        """Return a storage over given tensors, named as by :meth:`tensors`."""
        appended = max(tensors["lengths"].tolist(), default=0)
        return cls(format=format, window=window, taken_back=taken_back, appended=appended, **tensors)  # type: ignore[arg-type]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> LayerStorage:
        """Return a storage that ``function`` made of every tensor, each with the batch as its first dimension.

        The pages of a row must lie one after the other, as they do unless others made :attr:`pages`.
        """
        tensors = self.tensors()
        batch, slots = self.pages.shape
        tensors["body"] = self.body.view(batch, slots, *self.body.shape[1:])
        tensors = {name: function(tensor) for name, tensor in tensors.items()}
        tensors["pages"] = _own_pages(len(tensors["lengths"]), slots, tensors["lengths"].device)
        tensors["body"] = tensors["body"].flatten(0, 1)
        return replace(self, **tensors)  # type: ignore[arg-type]

    def rows(self, rows: slice) -> LayerStorage:
        """Return a view of some batch rows; a copy of tails and sinks where :attr:`raw_rows` chooses them."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if name != "body"}
        if self.raw_rows is None:
            return replace(self, **{name: tensor[rows] for name, tensor in tensors.items()})  # type: ignore[arg-type]
        chosen = self.raw_rows[rows].long()
        parts = {name: tensor[chosen if name in RAW else rows] for name, tensor in tensors.items()}
        return replace(self, raw_rows=None, **parts)  # type: ignore[arg-type]

    def groups(self) -> Iterator[tuple[slice, int, LayerStorage]]:
        """Yield runs of batch rows of equal length: the rows, their length and a view of what is stored of them.

        Reads the lengths, so it waits for the device.
        """
        lengths = self.lengths.tolist()
        start = 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[start]:
                rows = slice(start, row)
                yield rows, lengths[start], self.rows(rows)
                start = row

    def reserve(self, tiles: int) -> None:
        """Make room for ``tiles`` tiles in the body: exactly so many in an empty one, then growing geometrically.

        A ring of its full size has room for any number.
        """
        if _slots(tiles, self.window) <= self.slots:
            return
        batch, before = self.pages.shape
        slots = _slots(max(tiles, math.ceil(before * GROWTH)), self.window)
        # A ring has not gone round before it has its full size, so that its tiles are where they will be.
        grown = self.body.new_zeros((batch, slots, *self.body.shape[1:]))
        grown[:, :before] = self.body.view(batch, before, *self.body.shape[1:])
        self.body = grown.flatten(0, 1)
        self.pages = _own_pages(batch, slots, self.pages.device)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store new keys and values behind the stored ones, and encode the tiles that they complete.

        The body must have room (:meth:`reserve`). Afterwards every length is larger by ``T``.

        Args:
            key: Raw ``[B, Hkv, T, D]`` in the dtype of the tail; any ``T``, any strides.
            value: Raw ``[B, Hkv, T, Dv]``.

        Raises:
            ValueError: There is no room; nothing was stored.
        """
        groups = list(self.groups())
        self.appended = max((length for _, length, _ in groups), default=0)
        self.check_room(key.shape[2])
        for rows, length, part in groups:
            part._append_to_equals(length, key[rows], value[rows])
            if self.raw_rows is not None:
                for name in RAW:
                    getattr(self, name)[self.raw_rows[rows].long()] = getattr(part, name)
        self.lengths += key.shape[2]
        self.count_appended(key.shape[2])

    def check_room(self, count: int) -> None:
        """Check that the body has room for ``count`` more tokens.

        Waits for the device only if :attr:`appended` leaves that open; while a CUDA graph is captured it does not.

        Raises:
            ValueError: There is no room; nothing was changed.
        """
        if self._has_room(self.appended + count) or (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self.appended = max(self.lengths.tolist(), default=0)
        longest = self.appended + count
        if not self._has_room(longest):
            raise ValueError(
                f"the cache has room for {self.slots} tiles of {TILE} tokens, but {longest} tokens fill "
                f"{longest // TILE}; call reserve({longest // TILE}) first"
            )

    def _has_room(self, tokens: int) -> bool:
        return _slots(tokens // TILE, self.window) <= self.slots

    def count_appended(self, count: int) -> None:
        """Take note on the host that ``count`` tokens have been stored in every row."""
        self.appended += count
        self.replace_taken_back(count)

    def replace_taken_back(self, count: int) -> None:
        """Take note that ``count`` tokens have been stored where tokens may have been taken back."""
        self.taken_back = max(0, self.taken_back - count)

    def recent(self, length: int, key: Tensor, value: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return raw keys and values from the first tile that is not complete to the last of ``key``.

        For rows of equal length.

        Args:
            length: Stored keys.
            key: New keys, not stored yet, ``[B, Hkv, T, D]``; ``T`` may be 0.
            value: New values ``[B, Hkv, T, Dv]``.

        Returns:
            The position of the first one, a multiple of 128; keys ``[B, Hkv, N, D]`` and values ``[B, Hkv, N, Dv]``.
        """
        first = max(length, 0) // TILE * TILE
        entries = torch.arange(first, max(length, 0), device=key.device) % self.ring
        new = slice(max(-length, 0), None)  # what comes before is padding
        return (
            first,
            torch.cat((self.key_tail[:, :, entries], key[:, :, new]), 2),
            torch.cat((self.value_tail[:, :, entries], value[:, :, new]), 2),
        )

    def coded(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return complete tiles dequantised, for rows of equal length.

        Args:
            first: Position of the first key, a multiple of 128.
            end: The position past the last, likewise.

        Returns:
            Keys ``[B, Hkv, end - first, D]`` and values ``[B, Hkv, end - first, Dv]``, fp32.
        """
        records = self.body[self._pages_of(first // TILE, end // TILE)].transpose(1, 2)
        keys, values = self.record.decode(records)
        return keys.flatten(2, 3), values.flatten(2, 3)

    def held(self, first: int, end: int, length: int, band: int) -> tuple[Tensor, Tensor]:
        """Return what is stored, for rows of equal length: raw in the sinks and from ``band`` on, else dequantised.

        Args:
            first: The first position, a multiple of 128.
            end: The position past the last, at most ``length``.
            length: Stored keys.
            band: The first position that is raw for being recent; the tail has fewer where tokens were taken back.

        Returns:
            Keys ``[B, Hkv, end - first, D]`` and values ``[B, Hkv, end - first, Dv]``, fp32 (fp64 for fp64).
        """
        band = max(first, band, length + self.taken_back - self.ring)
        complete = max(first, min((length + self.taken_back) // TILE, -(-min(band, end) // TILE)) * TILE)
        sink = slice(first, min(end, self.key_sink.shape[2]))
        entries = torch.arange(band, max(end, band), device=self.lengths.device) % self.ring
        parts = []
        for coded, tail, raw in zip(
            self.coded(first, complete), (self.key_tail, self.value_tail), (self.key_sink, self.value_sink), strict=True
        ):
            x = F.pad(coded.to(torch.promote_types(tail.dtype, torch.float32)), (0, 0, 0, end - complete))
            if tail.dtype == torch.float16:  # a zero point is rounded down in bf16, maybe below the lowest fp16 number
                x.clamp_(-_FP16_MAX, _FP16_MAX)
            if sink.start < sink.stop:
                x[:, :, : sink.stop - first] = raw[:, :, sink].to(x.dtype)
            x[:, :, band - first :] = tail[:, :, entries].to(x.dtype)
            parts.append(x)
        return parts[0], parts[1]

    def both_kinds(
        self, first: int, length: int, key: Tensor, value: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return stored and new keys and values as high tiles read them, and as low tiles do, for rows of equal length.

        Args:
            first: The first position, a multiple of 128 and at most ``length``.
            length: Stored keys.
            key: New keys, not stored yet, ``[B, Hkv, T, D]``; ``T`` may be 0.
            value: New values ``[B, Hkv, T, Dv]``.

        Returns:
            Keys and values from ``first`` to the last new one, fp32 (fp64 for fp64). High: raw wherever they still are.
            Low: dequantised in all complete tiles.
        """
        start, *recent = self.recent(length, key, value)
        complete = recent[0].shape[2] // TILE * TILE
        coded = self.record.decode(self.record.encode(*(_in_tiles(x[:, :, :complete]) for x in recent)))
        raw_from = min(start, max(first, length + self.taken_back - self.ring))
        entries = torch.arange(raw_from, start, device=key.device) % self.ring
        high, low = [], []
        for held, tail, raw, dequantized in zip(
            self.held(first, start, length, start), (self.key_tail, self.value_tail), recent, coded, strict=True
        ):
            raw = raw.to(held.dtype)
            high.append(torch.cat((held[:, :, : raw_from - first], tail[:, :, entries].to(held.dtype), raw), 2))
            low.append(torch.cat((held, dequantized.flatten(2, 3).to(held.dtype), raw[:, :, complete:]), 2))
        return (high[0], high[1]), (low[0], low[1])

    def restored(self, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values in the model's dtype, raw wherever they are stored so, for rows of equal length.

        Args:
            first: The first position.
            end: The position past the last, at most ``length``.
            length: Stored keys.
        """
        tile = first // TILE * TILE
        keys, values = (x[:, :, first - tile :].to(self.key_tail.dtype) for x in self.held(tile, end, length, 0))
        return keys, values

    def restore(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values at ``length`` positions of every row from ``position``, integer ``[B]``, on.

        Zeros where nothing is stored; otherwise as :meth:`restored`.
        """
        keys, values = (F.pad(x, (0, 0, 0, length)) for x in self.no_keys())
        for rows, stored, part in self.groups():
            for row, start in enumerate(position[rows].tolist()):
                first = max(start, part.oldest_tile(stored) * TILE)
                end = min(start + length, stored)
                if first < end:
                    found = part.rows(slice(row, row + 1)).restored(first, end, stored)
                    for x, restored in zip((keys, values), found, strict=True):
                        x[rows.start + row, :, first - start : end - start] = restored[0]
        return keys, values

    def crop(self, count: int) -> None:
        """Take back the last ``count`` tokens of every row, as if they had never come.

        Raises:
            RuntimeError: As :meth:`check_crop`; nothing was changed.
        """
        self.check_crop(count)
        back = self.taken_back + count
        if back > self.spare_tokens:
            for rows, length, part in self.groups():
                # What the tail has lost is in the sinks.
                lost = max(0, length + self.taken_back - self.ring)
                first, end = max(0, length - count - self.ring), min(max(0, length - count), lost)
                entries = torch.arange(first, end, device=self.lengths.device) % self.ring
                for tail, sink in ((self.key_tail, part.key_sink), (self.value_tail, part.value_sink)):
                    tail[rows, :, entries] = sink[:, :, first:end]
            back = 0
        self.lengths -= count
        self.appended -= count
        self.taken_back = back

    def check_crop(self, count: int) -> None:
        """Check that ``count`` tokens can be taken back without a trace.

        :attr:`spare_tokens` always can be. More can be where everything before the new end is still stored raw: the
        rows then end in the sinks, or have never been longer than tail and sinks together.

        Raises:
            RuntimeError: The keys just before the new end are only stored as codes, or a ring has overwritten them.
        """
        back = self.taken_back + count
        if back <= self.spare_tokens:
            return
        sinks = self.key_sink.shape[2]
        for length in self.lengths.tolist():
            lost = length + self.taken_back - self.ring  # where the tail begins
            if length - count > sinks and lost > sinks:
                raise RuntimeError(
                    f"crop takes back {back} tokens, but the 16-bit keys before the new end have been replaced by "
                    f"codes; at most {self.spare_tokens} can be taken back of {length}: read the prompt again instead"
                )

    def _append_to_equals(self, length: int, key: Tensor, value: Tensor) -> None:
        """Append to rows of equal length; ``lengths`` stays as it is."""
        end = length + key.shape[2]
        if end <= 0:
            return
        first, keys, values = self.recent(length, key, value)
        for start in range(0, end // TILE - first // TILE, ENCODED_AT_ONCE):
            stop = min(start + ENCODED_AT_ONCE, end // TILE - first // TILE)
            self._encode(
                first // TILE + start, keys[:, :, start * TILE : stop * TILE], values[:, :, start * TILE : stop * TILE]
            )
        sink = slice(first, min(end, self.key_sink.shape[2]))
        if sink.start < sink.stop:
            self.key_sink[:, :, sink] = keys[:, :, : sink.stop - first]
            self.value_sink[:, :, sink] = values[:, :, : sink.stop - first]
        start = max(first, end - self.ring)
        entries = torch.arange(start, end, device=key.device) % self.ring
        self.key_tail[:, :, entries] = keys[:, :, start - first :]
        self.value_tail[:, :, entries] = values[:, :, start - first :]

    def _encode(self, tile: int, keys: Tensor, values: Tensor) -> None:
        """Encode whole tiles of raw keys and values, the first of which is ``tile``."""
        kept = min(keys.shape[2] // TILE, self.slots)  # a ring holds the last ones
        end = tile + keys.shape[2] // TILE
        records = self.record.encode(_in_tiles(keys[:, :, -kept * TILE :]), _in_tiles(values[:, :, -kept * TILE :]))
        self.body[self._pages_of(end - kept, end)] = records.transpose(1, 2)

    def _pages_of(self, first: int, end: int) -> Tensor:
        """Return the pages of the tiles from ``first`` to before ``end``, ``[B, end - first]``."""
        slots = torch.arange(first, end, device=self.pages.device) % max(self.slots, 1)
        return self.pages[:, slots].long()


TENSORS = tuple(field.name for field in fields(LayerStorage) if field.type == "Tensor")
"""Names of the tensors of a storage, in order."""

RAW = ("key_tail", "value_tail", "key_sink", "value_sink")
"""Names of those that hold raw keys and values. Their rows, and the pages of the body, may lie apart in memory."""


def _own_pages(batch: int, slots: int, device: torch.device) -> Tensor:
    """Return the pages of rows whose tiles lie one after the other."""
    return torch.arange(batch * slots, dtype=torch.int32, device=device).view(batch, slots)


def _in_tiles(x: Tensor) -> Tensor:
    """Split ``[B, H, n * 128, D]`` in tiles, ``[B, H, n, 128, D]``."""
    return x.reshape(*x.shape[:2], x.shape[2] // TILE, TILE, x.shape[3])


def _slots(tiles: int, window: int | None) -> int:
    """Return how many tiles a body has room for: no more than a window needs, wherever in its tile it begins."""
    if window is None:
        return tiles
    return min(tiles, -(-(window - 1 + SLACK_TILES * TILE) // TILE) + 1)
