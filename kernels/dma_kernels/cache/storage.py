"""What a key-value cache holds of one layer: low-bit tiles, and raw 16-bit keys and values where the rule needs them.

Positions
    Everything is indexed by position, counted from the first key that a batch row may see. ``lengths[b]`` keys of row
    ``b`` are stored, at the positions ``0..lengths[b] - 1``; left padding is not. A row whose padding has not ended yet
    has a negative length: what comes next stands at position ``lengths[b]``, and is dropped while that is below 0.

Four stores
    * **body**: every complete tile of 128 positions in low form, encoded once, when its last key comes. Its tensors
      have the leading dimensions ``[B, Hkv, slots]``; tile ``J`` is in slot ``J % slots``, and only where the layer has
      a sliding window are there fewer slots than tiles. What follows is up to the codec
      (:mod:`dma_kernels.cache.codecs`).
    * **tail**: the raw keys and values of the last ``diagonal_tiles + 2`` tiles, a ring: position ``p`` at entry
      ``p % ring``. One tile for the query's own, and one so that up to 128 tokens can be appended before their queries
      are answered, or taken back again.
    * **sink**: the raw keys and values of the first ``sink_tiles`` tiles, position ``p`` at entry ``p``.
    * **key_mean**: what ``smooth_k`` subtracts, the mean of the first 128 keys, or of those that there are; it is final
      before the first tile is encoded.

Codes are made of raw keys alone, so they are bit for bit those of one pass over the whole sequence, however the keys
arrived. High tiles are read from the raw stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import TILE
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_rotate, key_mean
from .codecs import Codec, key_codec, value_codec

SLACK_TILES = 2
"""Tiles of the tail beyond the band: the query's own, and one to append into, or to crop, without losing the band."""

MAX_EXACT_CROP = (SLACK_TILES - 1) * TILE + 1
"""Tokens that can be taken back with the whole band still raw, wherever in its tile the end comes to lie."""

GROWTH = 1 + 1 / 128
"""Factor of growth, by a whole tile at least. A step of decoding reads the whole cache; to copy it at every 128th step,
or more rarely, adds at most 1.6 % to what is moved. A larger factor would cost memory: with a quarter, 32K tokens in 4
bits took 0.37 of 16 bits from the first new tile on."""

ENCODED_AT_ONCE = 64
"""Tiles in a step of encoding, which computes in fp32; a bound on the memory of a long prompt."""


@dataclass(eq=False)
class LayerStorage:
    """The cache of one layer. The tensors are written in place; growing and batch operations replace them.

    Attributes:
        recipe: The precisions; it says which codecs the body has.
        window: The causal sliding window of the layer, whose body is then a ring; ``None`` without one.
        key_body: Codes of transformed keys, the parts of :attr:`key_codec`: ``[B, Hkv, slots, ...]``.
        value_body: Codes of values, the parts of :attr:`value_codec`: ``[B, Hkv, slots, ...]``.
        key_tail: Raw ``[B, Hkv, ring, D]``, ``ring = (diagonal_tiles + 2) * 128``, in the model's dtype.
        value_tail: Raw ``[B, Hkv, ring, Dv]``.
        key_sink: Raw ``[B, Hkv, sink_tiles * 128, D]``.
        value_sink: Raw ``[B, Hkv, sink_tiles * 128, Dv]``.
        key_mean: fp32 ``[B, Hkv, D]``, bfloat16 numbers; 0 unless the recipe smooths.
        lengths: int32 ``[B]``, on the device: stored keys.
        taken_back: Tokens that :meth:`crop` has taken back and that have not come again, on the host. The tail lacks as
            many of its oldest keys.
    """

    recipe: Recipe
    window: int | None
    key_body: dict[str, Tensor]
    value_body: dict[str, Tensor]
    key_tail: Tensor
    value_tail: Tensor
    key_sink: Tensor
    value_sink: Tensor
    key_mean: Tensor
    lengths: Tensor
    taken_back: int = 0

    @classmethod
    def allocate(
        cls,
        recipe: Recipe,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tiles: int = 0,
        window: int | None = None,
    ) -> LayerStorage:
        """Return an empty storage whose body has room for ``tiles`` tiles, or for the fewer that a window needs."""
        ring = (recipe.diagonal_tiles + SLACK_TILES) * TILE
        sink = recipe.sink_tiles * TILE
        slots = _slots(tiles, window)

        def zeros(length: int, channels: int) -> Tensor:
            return torch.zeros((batch, kv_heads, length, channels), dtype=dtype, device=device)

        return cls(
            recipe=recipe,
            window=window,
            key_body=key_codec(recipe, head_dim, dtype).allocate(batch, kv_heads, slots, device=device),
            value_body=value_codec(recipe, value_dim, dtype).allocate(batch, kv_heads, slots, device=device),
            key_tail=zeros(ring, head_dim),
            value_tail=zeros(ring, value_dim),
            key_sink=zeros(sink, head_dim),
            value_sink=zeros(sink, value_dim),
            key_mean=torch.zeros((batch, kv_heads, head_dim), dtype=torch.float32, device=device),
            lengths=torch.zeros(batch, dtype=torch.int32, device=device),
        )

    @property
    def ring(self) -> int:
        """Entries of the tail."""
        return self.key_tail.shape[2]

    @property
    def slots(self) -> int:
        """Tiles that the body has room for."""
        return next(iter(self.key_body.values())).shape[2]

    def oldest_tile(self, length: int) -> int:
        """Return the first tile of rows of a length that the body still holds; 0 unless it is a ring."""
        return max(0, (length + self.taken_back) // TILE - self.slots)

    @property
    def key_codec(self) -> Codec:
        """The layout of :attr:`key_body`."""
        return key_codec(self.recipe, self.key_tail.shape[3], self.key_tail.dtype)

    @property
    def value_codec(self) -> Codec:
        """The layout of :attr:`value_body`."""
        return value_codec(self.recipe, self.value_tail.shape[3], self.value_tail.dtype)

    @property
    def nbytes(self) -> int:
        """Storage of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name; the parts of a body are called ``key_body.<part>``."""
        named: dict[str, Tensor] = {}
        for name in _TENSORS:
            value = getattr(self, name)
            if isinstance(value, dict):
                named |= {f"{name}.{part}": tensor for part, tensor in value.items()}
            else:
                named[name] = value
        return named

    @classmethod
    def of_tensors(
        cls, recipe: Recipe, window: int | None, tensors: Mapping[str, Tensor], taken_back: int = 0
    ) -> LayerStorage:
        """Return a storage over given tensors, named as by :meth:`tensors`."""
        found: dict[str, Any] = {}
        for name, tensor in tensors.items():
            field, _, part = name.partition(".")
            if part:
                found.setdefault(field, {})[part] = tensor
            else:
                found[field] = tensor
        return cls(recipe=recipe, window=window, taken_back=taken_back, **found)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> LayerStorage:
        """Return a storage with ``function`` applied to every tensor; all have the batch as their first dimension."""
        tensors = {name: function(tensor) for name, tensor in self.tensors().items()}
        return self.of_tensors(self.recipe, self.window, tensors, self.taken_back)

    def groups(self) -> Iterator[tuple[slice, int, LayerStorage]]:
        """Yield runs of batch rows of equal length: the rows, their length and a view of what is stored of them.

        Reads the lengths, so it waits for the device.
        """
        lengths = self.lengths.tolist()
        start = 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[start]:
                rows = slice(start, row)
                yield rows, lengths[start], self.mapped(lambda tensor, rows=rows: tensor[rows])  # type: ignore[misc]
                start = row

    def reserve(self, tiles: int) -> None:
        """Make room for ``tiles`` tiles in the body: exactly so many in an empty one, then growing geometrically."""
        if tiles <= self.slots:
            return
        slots = _slots(max(tiles, math.ceil(self.slots * GROWTH)), self.window)
        # A ring has not gone round before it has its full size, so that its tiles are where they will be.
        for name in ("key_body", "value_body"):
            body: dict[str, Tensor] = getattr(self, name)
            grown = {}
            for part, tensor in body.items():
                grown[part] = tensor.new_zeros((*tensor.shape[:2], slots, *tensor.shape[3:]))
                grown[part][:, :, : tensor.shape[2]] = tensor
            setattr(self, name, grown)

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
        longest = max((length for _, length, _ in groups), default=0) + key.shape[2]
        if _slots(longest // TILE, self.window) > self.slots:
            raise ValueError(
                f"the cache has room for {self.slots} tiles of {TILE} tokens, but {longest} tokens fill "
                f"{longest // TILE}; call reserve({longest // TILE}) first"
            )
        for rows, length, part in groups:
            part._append_to_equals(length, key[rows], value[rows])
        self.lengths += key.shape[2]
        self.replace_taken_back(key.shape[2])

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

    def mean_with(self, length: int, key: Tensor) -> Tensor:
        """Return :attr:`key_mean` as it is when recent keys are stored too; arguments as :meth:`recent` has them."""
        if not self.recipe.smooth_k or length >= TILE:
            return self.key_mean
        return key_mean(key[:, :, :TILE]).squeeze(2).to(torch.float32)

    def transform(self, key: Tensor, mean: Tensor) -> Tensor:
        """Return raw keys ``[B, Hkv, T, D]`` smoothed and rotated, as the recipe says, in fp32 (fp64 for fp64)."""
        transformed = key.to(torch.promote_types(key.dtype, torch.float32))
        if self.recipe.smooth_k:
            transformed = transformed - mean[:, :, None]
        return hadamard_rotate(transformed) if self.recipe.rotate else transformed

    def low_keys(self, first: int, end: int) -> Tensor:
        """Return the transformed keys of complete tiles, ``[B, Hkv, end - first, D]``; multiples of 128."""
        return self.key_codec.decode(self._tiles(self.key_body, first, end)).flatten(2, 3)

    def low_values(self, first: int, end: int) -> Tensor:
        """Return the values of complete tiles, ``[B, Hkv, end - first, Dv]``; multiples of 128."""
        return self.value_codec.decode(self._tiles(self.value_body, first, end)).flatten(2, 3)

    def overlay_raw(self, first: int, length: int, keys: Tensor, values: Tensor) -> None:
        """Write the raw keys and values that there are over those of a sequence, in place, for rows of equal length.

        Args:
            first: Position of the first of them.
            length: Stored keys.
            keys: ``[B, Hkv, N, D]``.
            values: ``[B, Hkv, N, Dv]``.
        """
        end = min(first + keys.shape[2], length)
        sink_end = min(self.key_sink.shape[2], end)
        if first < sink_end:
            keys[:, :, : sink_end - first] = self.key_sink[:, :, first:sink_end]
            values[:, :, : sink_end - first] = self.value_sink[:, :, first:sink_end]
        start = max(first, length + self.taken_back - self.ring)
        if start < end:
            entries = torch.arange(start, end, device=keys.device) % self.ring
            keys[:, :, start - first : end - first] = self.key_tail[:, :, entries].to(keys.dtype)
            values[:, :, start - first : end - first] = self.value_tail[:, :, entries].to(values.dtype)

    def restored(self, first: int, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as the model made them, to the precision of the cache, for rows of equal length.

        Args:
            first: The first position.
            end: The position past the last, at most ``length``.
            length: Stored keys.

        Returns:
            Keys ``[B, Hkv, end - first, D]`` and values ``[B, Hkv, end - first, Dv]`` in the dtype of the tail.
        """
        tile = first // TILE * TILE
        complete = min((length + self.taken_back) // TILE, -(-end // TILE)) * TILE
        complete = max(tile, complete)
        keys, values = self.low_keys(tile, complete), self.low_values(tile, complete)
        keys = hadamard_rotate(keys) if self.recipe.rotate else keys
        keys = (keys + self.key_mean[:, :, None] if self.recipe.smooth_k else keys).to(self.key_tail.dtype)
        missing = (0, 0, 0, max(end - complete, 0))  # of the last tile there are raw keys alone
        keys = torch.nn.functional.pad(keys, missing)
        values = torch.nn.functional.pad(values.to(self.value_tail.dtype), missing)
        self.overlay_raw(tile, length, keys, values)
        return keys[:, :, first - tile : end - tile], values[:, :, first - tile : end - tile]

    def restore(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values at ``length`` positions of every row from ``position``, integer ``[B]``, on.

        Zeros where nothing is stored; otherwise as :meth:`restored`.
        """
        tails = self.key_tail, self.value_tail
        keys, values = (tail.new_zeros((*tail.shape[:2], length, tail.shape[3])) for tail in tails)
        for rows, stored, part in self.groups():
            for row, start in enumerate(position[rows].tolist()):
                first = max(start, part.oldest_tile(stored) * TILE)
                end = min(start + length, stored)
                if first < end:
                    alone = part.mapped(lambda tensor, row=row: tensor[row : row + 1])  # type: ignore[misc]
                    place = (
                        slice(rows.start + row, rows.start + row + 1),
                        slice(None),
                        slice(first - start, end - start),
                    )
                    keys[place], values[place] = alone.restored(first, end, stored)
        return keys, values

    def crop(self, count: int) -> None:
        """Take back the last ``count`` tokens of every row.

        Up to :data:`MAX_EXACT_CROP` of them leave the cache as if they had never come. Of more, the band before the new
        end is no longer there in 16 bits, and is restored from its codes: it keeps their precision.

        Raises:
            RuntimeError: As :meth:`check_crop`; nothing was changed.
        """
        self.check_crop(count)
        back = self.taken_back + count
        tails = []
        for rows, length, part in self.groups():
            if back > MAX_EXACT_CROP:
                first, end = max(0, length - count - self.ring), max(0, length - count)
                tails.append((rows, first, end, *part.restored(first, end, length)))
        for rows, first, end, keys, values in tails:
            entries = torch.arange(first, end, device=keys.device) % self.ring
            self.key_tail[rows, :, entries] = keys
            self.value_tail[rows, :, entries] = values
        self.lengths -= count
        self.taken_back = 0 if back > MAX_EXACT_CROP else back
        if self.recipe.smooth_k:
            for rows, length, part in self.groups():
                if length < TILE:
                    _, key, _ = part.recent(length, self.key_tail[rows, :, :0], self.value_tail[rows, :, :0])
                    self.key_mean[rows] = part.mean_with(length, key)

    def check_crop(self, count: int) -> None:
        """Check that ``count`` tokens can be taken back.

        Raises:
            RuntimeError: The body is a ring that has overwritten keys of the window before the new end.
        """
        back = self.taken_back + count
        if self.window is None or back <= MAX_EXACT_CROP:
            return
        longest = int(self.lengths.max())
        needed = max(0, longest - count - self.window + 1) // TILE
        if needed < self.oldest_tile(longest):
            raise RuntimeError(
                f"crop takes back {back} tokens of a layer with a sliding window of {self.window}, which has dropped "
                f"the keys before them; at most {MAX_EXACT_CROP} can be taken back"
            )

    def _append_to_equals(self, length: int, key: Tensor, value: Tensor) -> None:
        """Append to rows of equal length; ``lengths`` stays as it is."""
        end = length + key.shape[2]
        if end <= 0:
            return
        first, keys, values = self.recent(length, key, value)
        self.key_mean.copy_(self.mean_with(length, keys))
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
        tile += keys.shape[2] // TILE - kept
        keys = _in_tiles(self.transform(keys[:, :, -kept * TILE :], self.key_mean))
        values = _in_tiles(values[:, :, -kept * TILE :])
        slots = torch.arange(tile, tile + kept, device=keys.device) % self.slots
        for body, codes in (
            (self.key_body, self.key_codec.encode(keys)),
            (self.value_body, self.value_codec.encode(values)),
        ):
            for name, part in codes.items():
                body[name][:, :, slots] = part

    def _tiles(self, body: dict[str, Tensor], first: int, end: int) -> dict[str, Tensor]:
        slots = torch.arange(first // TILE, end // TILE, device=self.lengths.device) % max(self.slots, 1)
        return {name: tensor[:, :, slots] for name, tensor in body.items()}


_TENSORS = tuple(field.name for field in fields(LayerStorage) if field.name not in ("recipe", "window", "taken_back"))


def _in_tiles(x: Tensor) -> Tensor:
    """Split ``[B, H, n * 128, D]`` in tiles, ``[B, H, n, 128, D]``."""
    return x.reshape(*x.shape[:2], x.shape[2] // TILE, TILE, x.shape[3])


def _slots(tiles: int, window: int | None) -> int:
    """Return how many tiles a body has room for: no more than a window needs, wherever in its tile it begins."""
    if window is None:
        return tiles
    return min(tiles, -(-(window - 1 + SLACK_TILES * TILE) // TILE) + 1)
