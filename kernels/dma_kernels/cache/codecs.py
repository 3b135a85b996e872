"""How a cache holds the keys and values of a whole tile in low precision: one codec for keys and one for values.

A codec turns ``[..., 128, D]`` into a few named tensors, its *parts*. Every part has the leading dimensions of the
input, ``[B, H, tiles]`` in a cache, so that growing, reordering and saving a cache need not know what is in them. A
tile is encoded once, when its last key arrives; its codes are those that a forward pass over the sequence would make.

The layouts of 8-bit parts are those that the prefill kernel reads (:mod:`dma_kernels.prefill.operands`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics.formats import E2M1, E8M0_NAN, MXINT8_UNIT, TILE, UNQUANTIZED, BlockFormat, SharedScale, block_format
from ..numerics.quantize import QuantizedTensor, e2m1_decode, e8m0_to_float, quantize, to_e4m3, unpack_e2m1, value_scale
from ..numerics.recipe import Recipe

Parts = Mapping[str, Tensor]

FP4_BLOCK = 16
"""Channels that a scale byte of 4-bit tiles is for."""
FP4_UNIT = 128.0
"""What the kernels' numbers of 4-bit tiles are in units of (:mod:`dma_kernels.device.fp4`)."""
_FP4_SCALE_BIAS = 22
_FP4_TOP_EXPONENT = 8  # of the largest scale that E4M3 has, which is the byte's largest too
_ELEMENT_DTYPES = {"E4M3": torch.float8_e4m3fn, "INT8": torch.int8}


@dataclass(frozen=True)
class Part:
    """Shape and dtype of a part, for one tile."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Codec(ABC):
    """Tiles of keys, or of values, in one low-precision layout.

    Args:
        dim: Channels.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim

    @property
    @abstractmethod
    def parts(self) -> dict[str, Part]:
        """What a tile is made of."""

    @abstractmethod
    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Encode ``[..., 128, D]``; transformed keys in fp32, values in the model's dtype."""

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """Return what the parts stand for, fp32 ``[..., 128, D]`` (the dtype of the values where none is quantised)."""

    @property
    def bytes_per_tile(self) -> int:
        """Storage of one tile and head."""
        return sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in self.parts.values())

    def allocate(self, *leading: int, device: torch.device) -> dict[str, Tensor]:
        """Return zeroed parts with the leading dimensions ``[B, H, tiles]``."""
        return {
            name: torch.zeros((*leading, *part.shape), dtype=part.dtype, device=device)
            for name, part in self.parts.items()
        }


class Unquantized(Codec):
    """Tiles as they are.

    Args:
        dim: Channels.
        dtype: Of the tiles.
    """

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__(dim)
        self.dtype = dtype

    @property
    def parts(self) -> dict[str, Part]:
        return {"data": Part((TILE, self.dim), self.dtype)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"data": x.to(self.dtype)}

    def decode(self, parts: Parts) -> Tensor:
        return parts["data"].to(torch.promote_types(self.dtype, torch.float32))


class TileScaled(Codec):
    """8-bit keys with one scale for a tile: the operands of the prefill kernel.

    Parts: ``data`` int8 or E4M3 ``[128, D']``, ``D`` padded to 32; ``factor`` fp32 scalar, the worth of a stored unit.

    Args:
        dim: Channels.
        format: MXINT8 or MXFP8.
        scale_rounding: Of the scale.
    """

    def __init__(self, dim: int, format: BlockFormat, scale_rounding: str) -> None:
        super().__init__(dim)
        self.format = format
        self.scale_rounding = scale_rounding
        self.unit = MXINT8_UNIT if format.name == "mxint8" else 1.0

    @property
    def parts(self) -> dict[str, Part]:
        dtype = torch.int8 if self.format.name == "mxint8" else torch.float8_e4m3fn
        return {"data": Part((TILE, -(-self.dim // 32) * 32), dtype), "factor": Part((), torch.float32)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        coded = quantize(x, self.format, scale_rounding=self.scale_rounding, shared_scale=SharedScale.TILE)
        factor = e8m0_to_float(coded.scale[..., 0, 0]) * self.unit
        # A tile of zeros has no use for its scale, and the smallest scale could make a factor underflow.
        return {"data": coded.data, "factor": torch.where((x == 0).flatten(-2).all(-1), 1.0, factor)}

    def decode(self, parts: Parts) -> Tensor:
        return (parts["data"].float() * parts["factor"][..., None, None])[..., : self.dim]


class BlockScaled(Codec):
    """Keys or values in an 8-bit block format, blocks along the channels, as :mod:`dma_kernels.numerics.formats` says.

    Parts: ``data`` int8 or E4M3 ``[128, D']``; ``scale`` uint8 ``[128, D' / 32]``.

    Args:
        dim: Channels.
        format: MXINT8 or MXFP8.
        scale_rounding: Of E8M0 scales.
        shared_scale: ``block``, ``row`` or ``tile``.
    """

    def __init__(self, dim: int, format: BlockFormat, scale_rounding: str, shared_scale: str) -> None:
        super().__init__(dim)
        self.format = format
        self.scale_rounding = scale_rounding
        self.shared_scale = shared_scale

    @property
    def parts(self) -> dict[str, Part]:
        blocks = -(-self.dim // self.format.block_size)
        return {
            "data": Part((TILE, blocks * self.format.block_size), _ELEMENT_DTYPES[self.format.element.name]),
            "scale": Part((TILE, blocks), torch.uint8),
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        coded = quantize(x, self.format, scale_rounding=self.scale_rounding, shared_scale=self.shared_scale)
        return {"data": coded.data, "scale": coded.scale}

    def decode(self, parts: Parts) -> Tensor:
        return QuantizedTensor(parts["data"], parts["scale"], None, self.format, self.dim).dequantize()


class _Fp4(Codec):
    """What 4-bit keys and values have in common: two E2M1 codes to a byte, and scales of 16 channels in a byte.

    A **scale byte** is a number with five bits of exponent and three of mantissa, ``2 ** (e - 22) * (1 + m / 8)``, in
    units of the tile's ``factor``: an E4M3 scale without its sign and its subnormals, which becomes a 16-bit float by a
    shift. It holds what NVFP4 has; of MXFP4, two of whose bytes are then alike, scales up to 29 binades below the
    tile's largest (what lies below is lost in fp32 accumulation). All ones are NaN.

    A **byte** has the low code's sign in bit 7 and its exponent and mantissa in bits 3 to 1; the high code's exponent
    and mantissa in bits 6 to 4 and its sign in bit 0. One mask leaves the low code as fp16's upper byte has it.

    Args:
        dim: Channels.
        format: NVFP4 or MXFP4.
        scale_rounding: Of E8M0 scales.
        shared_scale: ``block``, ``row`` or ``tile``.
    """

    def __init__(self, dim: int, format: BlockFormat, scale_rounding: str, shared_scale: str) -> None:
        super().__init__(dim)
        self.format = format
        self.scale_rounding = scale_rounding
        self.shared_scale = shared_scale

    @property
    def width(self) -> int:
        """Channels with the padding."""
        return -(-self.dim // self.format.block_size) * self.format.block_size

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes ``[..., 128, D']``, the scale bytes ``[..., 128, D' / 16]`` and the factor ``[...]``."""
        coded = quantize(x, self.format, scale_rounding=self.scale_rounding, shared_scale=self.shared_scale)
        if coded.global_scale is not None:
            factor, scale = coded.global_scale[..., 0, 0], coded.scale.float()
        else:
            finite = coded.scale.int().masked_fill(coded.scale == E8M0_NAN, 0)
            unit = (finite.amax((-2, -1)) - _FP4_TOP_EXPONENT).clamp(min=1)
            factor = e8m0_to_float(unit)
            exponent = (finite - unit[..., None, None]).clamp(min=1 - _FP4_SCALE_BIAS).float()
            scale = torch.exp2(exponent).masked_fill(coded.scale == E8M0_NAN, torch.nan)
        repeats = self.format.block_size // FP4_BLOCK
        return unpack_e2m1(coded.data), _scale_bytes(scale).repeat_interleave(repeats, -1), factor


class Fp4Keys(_Fp4):
    """4-bit keys, for a decode kernel that multiplies them as they come.

    Parts: ``data`` uint8 ``[128, D' / 2]``; ``scale`` uint8 ``[128, D' / 16]``; ``factor`` fp32 scalar. Channel ``16 k
    + 8 h + 4 i + u`` is a low (``h = 0``) or high code; the bytes are ordered by ``(k // w, i, k % w, u)``,
    :func:`interleaved_blocks` being ``w``: a thread that has every fourth group of four bytes then meets each block's
    scale once.
    """

    @property
    def parts(self) -> dict[str, Part]:
        return {
            "data": Part((TILE, self.width // 2), torch.uint8),
            "scale": Part((TILE, self.width // FP4_BLOCK), torch.uint8),
            "factor": Part((), torch.float32),
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        codes, scale, factor = self._quantize(x)
        interleaved = interleaved_blocks(self.width)
        # [..., 128, k // w, k % w, h, i, u]
        blocks = codes.reshape(*codes.shape[:-1], self.width // (16 * interleaved), interleaved, 2, 2, 4)
        low, high = blocks.movedim(-3, 0).transpose(-2, -3).flatten(-4)
        return {"data": _pack(low, high), "scale": scale, "factor": factor}

    def decode(self, parts: Parts) -> Tensor:
        low, high = _unpack(parts["data"])
        interleaved = interleaved_blocks(self.width)
        both = torch.stack((low, high))  # [h, ..., k // w, i, k % w, u]
        blocks = both.reshape(*both.shape[:-1], self.width // (16 * interleaved), 2, interleaved, 4)
        blocks = blocks.transpose(-2, -3).movedim(0, -3)
        values = e2m1_decode(blocks.flatten(-5)) * _scale_numbers(parts["scale"]).repeat_interleave(FP4_BLOCK, -1)
        return (values * parts["factor"][..., None, None])[..., : self.dim]


class Fp4Values(_Fp4):
    """4-bit values, transposed, for a decode kernel that multiplies them as they come.

    Parts: ``data`` uint8 ``[Dv', 64]``; ``scale`` uint8 ``[Dv' / 16, 128]``; ``factor`` fp32 scalar. The keys 0..63 of
    the tile are the low codes, the keys 64..127 the high ones, both in order.
    """

    @property
    def parts(self) -> dict[str, Part]:
        return {
            "data": Part((self.width, TILE // 2), torch.uint8),
            "scale": Part((self.width // FP4_BLOCK, TILE), torch.uint8),
            "factor": Part((), torch.float32),
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        codes, scale, factor = self._quantize(x)
        codes = codes.mT
        data = _pack(codes[..., : TILE // 2], codes[..., TILE // 2 :])
        return {"data": data, "scale": scale.mT.contiguous(), "factor": factor}

    def decode(self, parts: Parts) -> Tensor:
        codes = torch.cat(_unpack(parts["data"]), -1)
        values = e2m1_decode(codes) * _scale_numbers(parts["scale"]).repeat_interleave(FP4_BLOCK, -2)
        return (values * parts["factor"][..., None, None]).mT[..., : self.dim]


class Fp8Values(Codec):
    """Values in E4M3, transposed: the operand of the prefill kernel.

    Parts: ``data`` ``[Dv, 128]``, the keys of each group of 16 in the order of
    :func:`~dma_kernels.device.arithmetic.permute_keys`; ``factor`` fp32 ``[Dv]``, the scale of a channel in this tile.
    (The rule has one for the whole sequence; both are powers of two, so that only E4M3's subnormals can differ.)
    """

    @property
    def parts(self) -> dict[str, Part]:
        return {"data": Part((self.dim, TILE), torch.float8_e4m3fn), "factor": Part((self.dim,), torch.float32)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        factor = value_scale(x)  # [..., 1, Dv]
        codes = to_e4m3(x.float() / factor).mT
        grouped = codes.reshape(*codes.shape[:-1], TILE // 16, 2, 4, 2)  # key 8 j + 2 t + c as [j, t, c]
        return {"data": grouped.transpose(-3, -2).flatten(-4), "factor": factor[..., 0, :]}

    def decode(self, parts: Parts) -> Tensor:
        data = parts["data"].float()
        grouped = data.reshape(*data.shape[:-1], TILE // 16, 4, 2, 2).transpose(-3, -2)
        return grouped.flatten(-4).mT * parts["factor"][..., None, :]


def key_codec(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec of low keys of a recipe, for a model of this dtype."""
    if recipe.key_low == UNQUANTIZED:
        return Unquantized(head_dim, dtype)
    format = block_format(recipe.key_low)
    if format.element is E2M1:
        return Fp4Keys(head_dim, format, recipe.scale_rounding, recipe.shared_scale)
    if recipe.shared_scale == SharedScale.TILE and format.element.bits == 8:
        return TileScaled(head_dim, format, recipe.scale_rounding)
    return BlockScaled(head_dim, format, recipe.scale_rounding, recipe.shared_scale)


def value_codec(recipe: Recipe, value_dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec of the values of low tiles of a recipe, for a model of this dtype."""
    if recipe.low_v is not None:
        format = block_format(recipe.low_v)
        codec = Fp4Values if format.element is E2M1 else BlockScaled
        return codec(value_dim, format, recipe.scale_rounding, SharedScale.BLOCK)
    return Fp8Values(value_dim) if recipe.pv == "fp8" else Unquantized(value_dim, dtype)


def interleaved_blocks(width: int) -> int:
    """Return how many blocks of 16 of the ``width`` channels of 4-bit keys lie interleaved: 4, 2 or 1."""
    return math.gcd(width // FP4_BLOCK, 4)


def _scale_bytes(scale: Tensor) -> Tensor:
    """Return the bytes of fp32 scales, which E4M3's three bits of mantissa hold."""
    bits = scale.view(torch.int32) >> 20
    return torch.where(scale.isnan(), 255, bits - ((127 - _FP4_SCALE_BIAS) << 3)).to(torch.uint8)


def _scale_numbers(byte: Tensor) -> Tensor:
    """Undo :func:`_scale_bytes`."""
    bits = (byte.int() + ((127 - _FP4_SCALE_BIAS) << 3)) << 20
    return torch.where(byte == 255, torch.nan, bits.view(torch.float32))


def _pack(low: Tensor, high: Tensor) -> Tensor:
    """Pack codes of one shape in bytes."""
    return (low & 7) << 1 | (low & 8) << 4 | (high & 7) << 4 | high >> 3


def _unpack(data: Tensor) -> tuple[Tensor, Tensor]:
    """Undo :func:`_pack`."""
    return (data >> 1) & 7 | (data >> 4) & 8, (data >> 4) & 7 | (data & 1) << 3
