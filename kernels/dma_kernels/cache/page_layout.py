"""The bytes of a page block: one quantized tile of 128 tokens of one kv head.

A page block is one contiguous run of bytes with five sections: codes, scales and zero points of keys, then codes of
values, and scales with zero points of values. Channels are zero-padded to multiples of 32 (``D'``, ``Dv'``). Sections
are in the register order of the first operand of ``mma.m16n8k32`` (lane ``4 g + t``). So the decode kernel fills
operands by wide loads, and multiplies 8-bit codes without unpacking.

* **Codes** are in blocks of 512 bytes, 32 rows x ``128 / bits`` columns. Columns are the reduction dimension of the
  product: rows of keys are tokens and columns are channels; for values it is the other way round. Row ``8 i + g`` and
  column ``8 j + 2 t + e`` of a block are in the little-endian word ``16 g + 4 t + i``, from bit ``bits * (j + J e)``
  up, with ``J`` an eighth of the columns. The stored number is the code minus ``2 ** (bits - 1)``, in two's complement.
  Blocks of both sections are ordered by token, then by channel.
* **Scales** and **zero points of keys** are each bfloat16 ``[D' / 32][t][j][e]``, of channel ``8 j + 2 t + e`` of 32.
* **Scales and zero points of values** are pairs of bfloat16 ``[4][groups][g][i]``, of token ``8 i + g`` of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE
from ..numerics.transforms import hadamard_size, hadamard_transform
from .formats import VALUE_GROUP, AffineQuantizedTensor, CacheFormat, quantize_keys, quantize_values

ROWS = 32
"""Rows of a block of codes; channels are padded to a multiple of it."""


@dataclass(frozen=True)
class PageLayout:
    """Byte layout of page blocks; see the module. Blocks are a multiple of 128 bytes."""

    format: CacheFormat
    head_dim: int  # channels of a key
    value_dim: int  # channels of a value

    @property
    def section_bytes(self) -> tuple[int, int, int, int, int]:
        """Bytes of each section, in order."""
        keys, values = (-(-dim // ROWS) * ROWS for dim in (self.head_dim, self.value_dim))
        codes = TILE * self.format.bits // 8
        return keys * codes, 2 * keys, 2 * keys, values * codes, 4 * TILE * self.value_groups

    @property
    def value_groups(self) -> int:
        """Quantization groups of a value."""
        return -(-self.value_dim // VALUE_GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes of a page block."""
        return sum(self.section_bytes)

    @property
    def key_hadamard(self) -> int:
        """Order of the Hadamard blocks that rotate keys; 1 without rotation."""
        return hadamard_size(self.head_dim) if self.format.rotate_keys else 1

    @property
    def value_hadamard(self) -> int:
        """Order of the Hadamard blocks that rotate values; 1 without rotation."""
        return hadamard_size(self.value_dim) if self.format.rotate_values else 1

    def encode(self, key: Tensor, value: Tensor) -> Tensor:
        """Quantize keys ``[..., 128, D]`` and values ``[..., 128, Dv]`` to page blocks, uint8 ``[..., nbytes]``."""
        leading = key.shape[:-2]
        key, value = key.reshape(-1, TILE, self.head_dim), value.reshape(-1, TILE, self.value_dim)
        keys = quantize_keys(hadamard_transform(key.float()) if self.format.rotate_keys else key, self.format)
        values = quantize_values(hadamard_transform(value.float()) if self.format.rotate_values else value, self.format)
        sections = (
            _pack_codes(keys.code, self.format.bits, are_keys=True),
            _pack_channels(keys.scale),
            _pack_channels(keys.zero_point),
            _pack_codes(values.code, self.format.bits, are_keys=False),
            _pack_tokens(torch.stack((values.scale, values.zero_point), -1)),
        )
        block = torch.cat([section.contiguous().view(torch.uint8).flatten(1) for section in sections], 1)
        return block.view(*leading, self.nbytes)

    def unpack(self, block: Tensor) -> tuple[AffineQuantizedTensor, AffineQuantizedTensor]:
        """Return the keys ``[..., 128, D]`` and values ``[..., 128, Dv]`` of page blocks, still rotated."""
        leading = block.shape[:-1]
        sections = torch.split_with_sizes(block.reshape(-1, self.nbytes), self.section_bytes, 1)

        def batched(x: Tensor) -> Tensor:
            return x.reshape(*leading, *x.shape[1:])

        keys = _unpack_codes(sections[0], self.format.bits, are_keys=True), *map(_unpack_channels, sections[1:3])
        code, scale, zero_point = (batched(x[..., : self.head_dim]) for x in keys)
        key = AffineQuantizedTensor(code, scale, zero_point, -2, TILE)
        code = _unpack_codes(sections[3], self.format.bits, are_keys=False)[..., : self.value_dim]
        code, scale, zero_point = map(batched, (code, *_unpack_tokens(sections[4], self.value_groups)))
        return key, AffineQuantizedTensor(code, scale, zero_point, -1, VALUE_GROUP)

    def decode(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantize page blocks ``[..., nbytes]`` to keys ``[..., 128, D]`` and values ``[..., 128, Dv]``, fp32."""
        key, value = (x.dequantize() for x in self.unpack(block))
        if self.format.rotate_keys:
            key = hadamard_transform(key) * (1.0 / self.key_hadamard)
        if self.format.rotate_values:
            value = hadamard_transform(value) * (1.0 / self.value_hadamard)
        return key, value


def _fragments(bits: int, are_keys: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how to split the tokens and channels of ``[N, 128, D']``, and the order of the split dimensions."""
    rows, columns = (-1, 4, 8), (-1, 16 // bits, 4, 2)  # [block, i, g] and [block, j, t, e]
    if are_keys:
        return rows, columns, (0, 1, 4, 3, 6, 2, 7, 5)
    return columns, rows, (0, 1, 5, 7, 3, 6, 4, 2)


def _pack_codes(code: Tensor, bits: int, *, are_keys: bool) -> Tensor:
    """Pack ``[N, 128, D]`` into bytes ``[N, ...]``."""
    tokens, channels, order = _fragments(bits, are_keys)
    padded = F.pad(code, (0, -code.shape[2] % ROWS))
    fields = torch.unflatten(torch.unflatten(padded, 2, channels), 1, tokens).permute(order).flatten(1)
    return _toggle_signs(fields if bits == 8 else fields[:, ::2] | fields[:, 1::2] << 4, bits)


def _toggle_signs(data: Tensor, bits: int) -> Tensor:
    """Convert bytes of unsigned codes to two's complement of the centered codes, or back."""
    return data ^ (0x80 if bits == 8 else 0x88)


def _unpack_codes(data: Tensor, bits: int, *, are_keys: bool) -> Tensor:
    """Return the codes ``[N, 128, D']`` of bytes ``[N, ...]``."""
    tokens, channels, order = _fragments(bits, are_keys)
    data = _toggle_signs(data, bits)
    fields = data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(1)
    code = torch.empty((len(data), TILE, fields.shape[1] // TILE), dtype=torch.uint8, device=data.device)
    fragments = torch.unflatten(torch.unflatten(code, 2, channels), 1, tokens).permute(order)
    fragments.copy_(fields.view(fragments.shape))
    return code


def _pack_channels(x: Tensor) -> Tensor:
    """Reorder one number per channel, ``[N, 1, D]``, as the columns of keys."""
    return torch.unflatten(F.pad(x, (0, -x.shape[2] % ROWS)), 2, (-1, 4, 4, 2)).transpose(3, 4)


def _unpack_channels(data: Tensor) -> Tensor:
    """Return one number per channel, ``[N, 1, D']``, from bytes."""
    numbers = data.contiguous().view(torch.bfloat16)
    return torch.unflatten(numbers, 1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)[:, None]


def _pack_tokens(x: Tensor) -> Tensor:
    """Reorder pairs of numbers per token, ``[N, 128, groups, 2]``, as the columns of values."""
    return torch.unflatten(x, 1, (4, 4, 8)).permute(0, 1, 4, 3, 2, 5)


def _unpack_tokens(data: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Return two numbers per token, each ``[N, 128, groups]``, from bytes."""
    pairs = torch.unflatten(data.contiguous().view(torch.bfloat16), 1, (4, groups, 8, 4, 2))
    return pairs.permute(0, 1, 4, 3, 2, 5).flatten(1, 3).unbind(-1)
