"""The formats of a key-value cache: what a tile's numbers become, and the record of bytes that holds them.

Numbers
    A *group* of numbers shares a scale and a lowest value: ``x`` is about ``low + scale * code``, a code being an
    integer of 4 or 8 bits. A group of keys is the 128 tokens of a tile in one channel; a group of values is up to 64
    channels of one token. So the outlier channels that keys have cost the others nothing, and rescaling a channel by a
    power of two moves no code. In fp32:

    * ``low`` is the smallest number of the group, rounded down to bfloat16;
    * ``scale`` is ``(largest - low) * (1 / levels)``, rounded to bfloat16, ``levels`` being the largest code;
    * ``code`` is ``(x - low) / scale``, rounded to an integer (ties to even), at most ``levels``; 0 if ``scale`` is.

    Both are rounded before a code is computed, so that each code is the best that there is; ``scale * code`` is exact.
    A group with a NaN or an infinity, or whose range is past the end of fp32, has the scale NaN and zeros for the rest:
    all of it dequantises to NaN, and a broken activation shows in the output as it would in 16 bits.

Rotation
    A format may rotate values, keys or both before they are quantised: it multiplies their channels by the Hadamard
    matrix ``H`` of :func:`~dma_kernels.numerics.transforms.hadamard_transform`, and dequantised numbers by the inverse,
    ``H / order``. ``H`` has entries 1 and -1 and the order is a power of two, so only the additions round. A number
    that is not finite breaks every group of its Hadamard block.

    Rotation spreads an outlier channel over all channels. Values share a scale across channels, so they always gain.
    Keys have a scale per channel already. Rotating them lowers the loss if the channels of queries and keys are
    balanced (:func:`dma_hf.equalize`), and ruins keys with outliers.

Record
    A tile of 128 tokens of one kv head is one contiguous run of bytes, of five parts: codes of keys, scales of keys,
    lows of keys, codes of values, scales and lows of values. Channels are padded with zeros to multiples of 32
    (``D'``, ``Dv'``). The order within a part is that in which a warp's registers hold the operands of ``mma.m16n8k32``
    (lane ``4 g + t``), so that a decode kernel fills them by wide loads, and multiplies codes of 8 bits as they are.

    * **Codes** lie in blocks of 512 bytes, 32 rows x ``128 / bits`` columns; the columns are what a product sums over:
      rows of keys are tokens and columns channels, of values it is the other way round. Row ``8 i + g`` and column
      ``8 j + 2 t + e`` of a block have the bits from ``bits * (j + J e)`` on of its little-endian word
      ``16 g + 4 t + i``, ``J`` being an eighth of the columns; in them stands the code less ``2 ** (bits - 1)``, in
      two's complement. Blocks of both kinds are ordered by tokens, then channels.
    * **Scales of keys**, and their **lows**, are bfloat16 ``[D' / 32][t][j][e]``, of channel ``8 j + 2 t + e`` of 32.
    * **Scales and lows of values** are pairs of bfloat16 ``[4][groups][g][i]``, of token ``8 i + g`` of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from ..numerics.transforms import hadamard_size, hadamard_transform

ROWS = 32
"""Rows of a block of codes, and what channels are padded to a multiple of."""
VALUE_GROUP = 64
"""Channels of a value that share a scale."""


@dataclass(frozen=True)
class CacheFormat:
    """A precision of cached keys and values.

    Attributes:
        name: The name in a storage; users know those of :data:`CACHE_FORMATS`.
        bits: Bits of a code.
        rotate_values: Whether values are rotated before they are quantised.
        rotate_keys: Whether keys are.
    """

    name: str
    bits: int
    rotate_values: bool = False
    rotate_keys: bool = False

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


CACHE_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {format.name: format for format in (CacheFormat("int8", 8), CacheFormat("int4", 4, rotate_values=True))}
)
"""The formats that users choose from, by name."""

EQUALIZED_FORMATS: Mapping[str, CacheFormat] = MappingProxyType(
    {"int4": CacheFormat("int4-equalized", 4, rotate_values=True, rotate_keys=True)}
)
"""What stands in for a format where the model's queries and keys were balanced, by the name that users choose."""

_STORED_FORMATS = {**CACHE_FORMATS, **{format.name: format for format in EQUALIZED_FORMATS.values()}}


def cache_format(name: str, *, is_equalized: bool = False) -> CacheFormat:
    """Return the format that users call ``name``; of an equalised model, the one that stands in for it.

    Raises:
        ValueError: There is none; the message lists those that there are.
    """
    try:
        format = CACHE_FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown cache format {name!r}; expected one of {', '.join(CACHE_FORMATS)}") from None
    return EQUALIZED_FORMATS.get(name, format) if is_equalized else format


def stored_format(name: str) -> CacheFormat:
    """Return the format of a storage, by :attr:`CacheFormat.name`.

    Raises:
        ValueError: As :func:`cache_format`.
    """
    return _STORED_FORMATS[name] if name in _STORED_FORMATS else cache_format(name)


@dataclass(frozen=True)
class Codes:
    """Quantised numbers, ``x`` being about ``low + scale * code``.

    Attributes:
        code: uint8, of the shape of the numbers.
        scale: bfloat16; the dimension of the groups has an entry for each.
        low: bfloat16, likewise.
        dim: The dimension of the groups.
        group: Numbers in a group; the last may have fewer.
    """

    code: Tensor
    scale: Tensor
    low: Tensor
    dim: int
    group: int

    def dequantize(self) -> Tensor:
        """Return the numbers, fp32."""
        length = self.code.shape[self.dim]
        scale, low = (
            part.float().repeat_interleave(self.group, self.dim).narrow(self.dim, 0, length)
            for part in (self.scale, self.low)
        )
        return low + scale * self.code.float()


def quantize_keys(x: Tensor, format: CacheFormat, tokens: int = TILE) -> Codes:
    """Quantise whole tiles of keys ``[..., 128, D]``: a scale for each channel and so many ``tokens``."""
    return _quantize(x, format.levels, -2, tokens)


def quantize_values(x: Tensor, format: CacheFormat, channels: int = VALUE_GROUP) -> Codes:
    """Quantise values ``[..., T, Dv]``: a scale for each token and so many ``channels``."""
    return _quantize(x, format.levels, -1, channels)


def _quantize(x: Tensor, levels: int, dim: int, group: int) -> Codes:
    parts = [
        _quantize_group(part, levels, dim)
        for part in torch.tensor_split(x.float(), list(range(group, x.shape[dim], group)), dim)
    ]
    code, scale, low = (torch.cat(pieces, dim) for pieces in zip(*parts, strict=True))
    return Codes(code, scale, low, dim, group)


def _quantize_group(x: Tensor, levels: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    lowest, largest = torch.aminmax(x, dim=dim, keepdim=True)
    low = _round_down(lowest)
    span = (largest - low).abs()  # zeros without a sign
    is_broken = ~span.isfinite()
    scale = (span * (1.0 / levels)).bfloat16().float()
    scale, low = scale.masked_fill(is_broken, 0.0), low.masked_fill(is_broken, 0.0)
    code = torch.where(scale > 0.0, (x - low) / scale, 0.0).round_().clamp_(max=levels)
    return code.to(torch.uint8), scale.bfloat16().masked_fill(is_broken, torch.nan), low.bfloat16()


def _round_down(x: Tensor) -> Tensor:
    """Round fp32 towards minus infinity to a number that bfloat16 has; a zero has no sign afterwards."""
    bits = x.view(torch.int32)
    bits = torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF  # of a negative number the magnitude goes up
    return bits.view(torch.float32) + 0.0


@dataclass(frozen=True)
class Record:
    """The layout of a tile in bytes, see the module: a multiple of 128 of them.

    Attributes:
        format: Of the codes.
        head_dim: Channels of a key.
        value_dim: Channels of a value.
    """

    format: CacheFormat
    head_dim: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Bytes of each part, in order."""
        keys, values = (-(-dim // ROWS) * ROWS for dim in (self.head_dim, self.value_dim))
        codes = TILE * self.format.bits // 8
        return keys * codes, 2 * keys, 2 * keys, values * codes, 4 * TILE * self.groups

    @property
    def groups(self) -> int:
        """Groups of a value."""
        return -(-self.value_dim // VALUE_GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return sum(self.sizes)

    @property
    def key_hadamard(self) -> int:
        """Order of the Hadamard blocks that keys are rotated by; 1 without rotation."""
        return hadamard_size(self.head_dim) if self.format.rotate_keys else 1

    @property
    def value_hadamard(self) -> int:
        """Order of the Hadamard blocks that values are rotated by; 1 without rotation."""
        return hadamard_size(self.value_dim) if self.format.rotate_values else 1

    def encode(self, key: Tensor, value: Tensor) -> Tensor:
        """Quantise whole tiles, keys ``[..., 128, D]`` and values ``[..., 128, Dv]``, to records ``[..., nbytes]``."""
        leading = key.shape[:-2]
        key, value = key.reshape(-1, TILE, self.head_dim), value.reshape(-1, TILE, self.value_dim)
        keys = quantize_keys(hadamard_transform(key.float()) if self.format.rotate_keys else key, self.format)
        values = quantize_values(hadamard_transform(value.float()) if self.format.rotate_values else value, self.format)
        parts = (
            _pack_codes(keys.code, self.format.bits, are_keys=True),
            _pack_channels(keys.scale),
            _pack_channels(keys.low),
            _pack_codes(values.code, self.format.bits, are_keys=False),
            _pack_tokens(torch.stack((values.scale, values.low), -1)),
        )
        record = torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in parts], 1)
        return record.view(*leading, self.nbytes)

    def codes(self, record: Tensor) -> tuple[Codes, Codes]:
        """Return the codes of keys ``[..., 128, D]`` and of values ``[..., 128, Dv]`` that records hold, rotated."""
        leading = record.shape[:-1]
        key, scale, low, value, pairs = torch.split_with_sizes(record.reshape(-1, self.nbytes), self.sizes, 1)
        keys = (_unpack_codes(key, self.format.bits, are_keys=True), _unpack_channels(scale), _unpack_channels(low))
        values = _unpack_codes(value, self.format.bits, are_keys=False)[..., : self.value_dim]
        value_scale, value_low = _unpack_tokens(pairs, self.groups).unbind(-1)

        def batched(x: Tensor) -> Tensor:
            return x.reshape(*leading, *x.shape[1:])

        code, scale, low = (batched(part[..., : self.head_dim]) for part in keys)
        return (
            Codes(code, scale, low, -2, TILE),
            Codes(batched(values), batched(value_scale), batched(value_low), -1, VALUE_GROUP),
        )

    def decode(self, record: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantise records ``[..., nbytes]``: keys ``[..., 128, D]`` and values ``[..., 128, Dv]``, fp32."""
        key, value = (codes.dequantize() for codes in self.codes(record))
        if self.format.rotate_keys:
            key = hadamard_transform(key) * (1.0 / self.key_hadamard)
        if self.format.rotate_values:
            value = hadamard_transform(value) * (1.0 / self.value_hadamard)
        return key, value


def _fragments(bits: int, are_keys: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how tokens and how channels of ``[N, 128, D']`` are split, and the order of all dimensions then."""
    rows, columns = (-1, 4, 8), (-1, 16 // bits, 4, 2)  # [block, i, g] and [block, j, t, e]
    if are_keys:
        return rows, columns, (0, 1, 4, 3, 6, 2, 7, 5)
    return columns, rows, (0, 1, 5, 7, 3, 6, 4, 2)


def _pack_codes(code: Tensor, bits: int, *, are_keys: bool) -> Tensor:
    """Pack ``[N, 128, D]`` to bytes ``[N, ...]``."""
    tokens, channels, order = _fragments(bits, are_keys)
    padded = F.pad(code, (0, -code.shape[2] % ROWS))
    fields = torch.unflatten(torch.unflatten(padded, 2, channels), 1, tokens).permute(order).flatten(1)
    return _signed(fields if bits == 8 else fields[:, ::2] | fields[:, 1::2] << 4, bits)


def _signed(data: Tensor, bits: int) -> Tensor:
    """Turn codes in bytes into what is stored, two's complements of codes less their middle, or back."""
    return data ^ (0x80 if bits == 8 else 0x88)


def _unpack_codes(data: Tensor, bits: int, *, are_keys: bool) -> Tensor:
    """Return the codes ``[N, 128, D']`` of bytes ``[N, ...]``."""
    tokens, channels, order = _fragments(bits, are_keys)
    data = _signed(data, bits)
    fields = data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(1)
    code = torch.empty((len(data), TILE, fields.shape[1] // TILE), dtype=torch.uint8, device=data.device)
    fragments = torch.unflatten(torch.unflatten(code, 2, channels), 1, tokens).permute(order)
    fragments.copy_(fields.view(fragments.shape))
    return code


def _pack_channels(x: Tensor) -> Tensor:
    """Bring a number for each channel, ``[N, 1, D]``, into the order of keys' columns."""
    return torch.unflatten(F.pad(x, (0, -x.shape[2] % ROWS)), 2, (-1, 4, 4, 2)).transpose(3, 4)


def _unpack_channels(data: Tensor) -> Tensor:
    """Return a number for each channel, ``[N, 1, D']``, of bytes."""
    numbers = data.contiguous().view(torch.bfloat16)
    return torch.unflatten(numbers, 1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)[:, None]


def _pack_tokens(x: Tensor) -> Tensor:
    """Bring numbers for each token, ``[N, 128, groups, 2]``, into the order of values' columns."""
    return torch.unflatten(x, 1, (4, 4, 8)).permute(0, 1, 4, 3, 2, 5)


def _unpack_tokens(data: Tensor, groups: int) -> Tensor:
    """Return numbers for each token, ``[N, 128, groups, 2]``, of bytes."""
    pairs = torch.unflatten(data.contiguous().view(torch.bfloat16), 1, (4, groups, 8, 4, 2))
    return pairs.permute(0, 1, 4, 3, 2, 5).flatten(1, 3)
