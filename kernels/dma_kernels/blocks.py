"""How a cache holds the keys and values of a whole tile in low precision: one codec for keys and one for values.

A codec turns ``[..., 128, D]`` into a few named tensors, its *parts*. Every part has the leading dimensions of the
input, ``[B, H, tiles]`` in a cache, so that growing, reordering and saving a cache need not know what is in them. A
tile is encoded once, when its last key arrives; its codes are those that a forward pass over the sequence would make.

The layouts of 8-bit parts are those that the prefill kernel reads (:mod:`dma_kernels.operands`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import MXINT8_UNIT, TILE, UNQUANTIZED, BlockFormat, ScaleFormat, SharedScale, block_format
from .quantize import QuantizedTensor, e8m0_to_float, quantize, to_e4m3, value_scale
from .recipe import Recipe

Parts = Mapping[str, Tensor]


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
    """Keys or values in a block format, blocks along the channels, laid out as :mod:`dma_kernels.formats` says.

    Parts: ``data`` ``[128, D']`` or, for E2M1, ``[128, D' / 2]``; ``scale`` ``[128, D' / block]``; for NVFP4
    ``global_scale``, fp32 scalar, the power of two of the tile's largest block. (The rule has one for the head; a
    smaller power of two moves no codes but those of blocks 2^14 below the head's largest.)

    Args:
        dim: Channels.
        format: Of the blocks.
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
        width = blocks * self.format.block_size
        dtype = {"E2M1": torch.uint8, "E4M3": torch.float8_e4m3fn, "INT8": torch.int8}[self.format.element.name]
        is_nvfp4 = self.format.scale is ScaleFormat.E4M3
        parts = {
            "data": Part((TILE, width * self.format.element.bits // 8), dtype),
            "scale": Part((TILE, blocks), torch.float8_e4m3fn if is_nvfp4 else torch.uint8),
        }
        return parts | ({"global_scale": Part((), torch.float32)} if is_nvfp4 else {})

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        coded = quantize(x, self.format, scale_rounding=self.scale_rounding, shared_scale=self.shared_scale)
        parts = {"data": coded.data, "scale": coded.scale}
        if coded.global_scale is not None:
            parts["global_scale"] = coded.global_scale[..., 0, 0]
        return parts

    def decode(self, parts: Parts) -> Tensor:
        global_scale = parts["global_scale"][..., None, None] if "global_scale" in parts else None
        return QuantizedTensor(parts["data"], parts["scale"], global_scale, self.format, self.dim).dequantize()


class Fp8Values(Codec):
    """Values in E4M3, transposed: the operand of the prefill kernel.

    Parts: ``data`` ``[Dv, 128]``, the keys of each group of 16 in the order of
    :func:`~dma_kernels.device.permute_keys`; ``factor`` fp32 ``[Dv]``, the scale of a channel in this tile. (The rule
    has one for the whole sequence; both are powers of two, so that only E4M3's subnormals can differ.)
    """

    @property
    def parts(self) -> dict[str, Part]:
        return {"data": Part((self.dim, TILE), torch.float8_e4m3fn), "factor": Part((self.dim,), torch.float32)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        factor = value_scale(x)  # [..., 1, Dv]
        codes = to_e4m3(x.float() / factor).mT
        grouped = codes.reshape(*codes.shape[:-1], -1, 2, 4, 2)  # key 8 j + 2 t + c as [j, t, c]
        return {"data": grouped.transpose(-3, -2).flatten(-4), "factor": factor[..., 0, :]}

    def decode(self, parts: Parts) -> Tensor:
        data = parts["data"].float()
        grouped = data.reshape(*data.shape[:-1], -1, 4, 2, 2).transpose(-3, -2)
        return grouped.flatten(-4).mT * parts["factor"][..., None, :]


def key_codec(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec of low keys of a recipe, for a model of this dtype."""
    if recipe.key_low == UNQUANTIZED:
        return Unquantized(head_dim, dtype)
    format = block_format(recipe.key_low)
    if recipe.shared_scale == SharedScale.TILE and format.element.bits == 8:
        return TileScaled(head_dim, format, recipe.scale_rounding)
    return BlockScaled(head_dim, format, recipe.scale_rounding, recipe.shared_scale)


def value_codec(recipe: Recipe, value_dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec of the values of low tiles of a recipe, for a model of this dtype."""
    if recipe.low_v is not None:
        return BlockScaled(value_dim, block_format(recipe.low_v), recipe.scale_rounding, SharedScale.BLOCK)
    return Fp8Values(value_dim) if recipe.pv == "fp8" else Unquantized(value_dim, dtype)
