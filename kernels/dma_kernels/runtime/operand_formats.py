"""Operand formats: how the keys, queries and values of one kind of tile are stored and multiplied, in one table.

A recipe names *number formats* (:mod:`dma_kernels.numerics.formats`); an operand format is what a chip multiplies in
their place. Storage is tile-padded except for :data:`RAW`: entry ``s`` of a batch row holds the position ``s`` after
the start of the tile that key 0 lies in, and every tile is whole, so that each tile of the rule is aligned in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ..numerics.formats import BLOCK_FORMATS, MXFP4, MXFP8, MXINT8, NVFP4, UNQUANTIZED, ScaleFormat


class Scale(StrEnum):
    """What shares a scale that the attention kernel multiplies by."""

    NONE = "none"
    """Nothing: the elements are the numbers."""
    TILE = "tile"
    """A tile of keys; of queries, each row. fp32, one factor for a whole tile of scores."""
    BLOCK = "block"
    """A block of channels; block-scaled tensor cores apply it."""
    CHANNEL = "channel"
    """A channel of the values of a head, fp32."""


@dataclass(frozen=True)
class OperandFormat:
    """How an operand is stored, and what multiplies it."""

    name: str  # the constexpr that kernels select their encoding and their product by
    dtype: torch.dtype | None = None  # of the stored elements; ``None`` for 16 bits, see ``dequantized_dtype``
    scale: Scale = Scale.NONE  # what shares a scale
    scale_dtype: torch.dtype | None = None  # of the scales of blocks
    padding: int = 1  # channels are padded with zeros to a multiple of this
    packing: int = 1  # channels in an element: 2 for E2M1
    holds: str | None = None  # the block format that it stores without rounding anew; ``None`` for any
    min_arch: int = 0  # the first compute capability with tensor cores for it

    @property
    def is_16_bit(self) -> bool:
        """Whether products are of 16-bit operands."""
        return self.dtype is None

    def stored_channels(self, channels: int) -> int:
        """Return the elements that store so many channels."""
        return self.padded(channels) // self.packing

    def padded(self, channels: int) -> int:
        """Return the channels with padding."""
        return -(-channels // self.padding) * self.padding


RAW = OperandFormat("raw")
"""The caller's own 16 bits, any strides, neither transformed nor quantized."""
DEQUANTIZED = OperandFormat("dequantized")
"""Transformed, quantized, and dequantized to 16 bits: ``[B, Hkv, S, D]``. Exact: no format has more than 8 significant
bits. Keys and queries: :func:`dequantized_dtype`. Values: bfloat16."""
INT8 = OperandFormat("int8", torch.int8, Scale.TILE, padding=32, holds=MXINT8.name)
"""MXINT8 elements, ``[B, Hkv, S, D']``; every tile has one scale."""
E4M3 = OperandFormat("e4m3", torch.float8_e4m3fn, Scale.TILE, padding=32, holds=MXFP8.name, min_arch=89)
"""MXFP8 elements, likewise."""
E5M2 = OperandFormat("e5m2", torch.float8_e5m2, Scale.TILE, padding=32, holds=MXFP4.name, min_arch=89)
"""MXFP4 elements times their block's scale over the tile's largest, times ``2 ** 13``, as ``6 * 2 ** 13`` is below
E5M2's largest number. Exact, whatever shares the scales: an E2M1 number times a power of two has one mantissa bit, and
E5M2 holds block scales up to 28 binades below the tile's largest; smaller ones are lost in fp32 accumulation too. A
block whose scale is NaN is NaN in all its elements."""
TILE_SCALED = (INT8, E4M3)
"""Elements of a block format, one scale for each tile: what ``shared_scale = "tile"`` selects, the first that fits."""
PACKED = {
    block.name: OperandFormat(
        "packed",
        torch.uint8 if block.element.bits == 4 else torch.float8_e4m3fn,
        Scale.BLOCK,
        scale_dtype=torch.uint8 if block.scale is ScaleFormat.E8M0 else torch.float8_e4m3fn,
        padding=block.block_size,
        packing=8 // block.element.bits,
        holds=block.name,
    )
    for block in BLOCK_FORMATS.values()
    if block in (MXFP4, MXFP8, NVFP4)
}
"""Elements and block scales as :class:`~dma_kernels.numerics.quantize.QuantizedTensor` has them, ``[B, Hkv, S, ..]``,
by block format. NVFP4's scale of the head is a factor of all its tiles."""
E4M3_VALUES = OperandFormat("e4m3", torch.float8_e4m3fn, Scale.CHANNEL, holds="fp8", min_arch=89)
"""Values ``[B, Hkv, S / 128, Dv, 128]``, the keys of a tile in the order of
:func:`~dma_kernels.device.arithmetic.permute_keys`."""


def dequantized_dtype(dtype: torch.dtype, query_format: str, key_format: str) -> torch.dtype:
    """Return the dtype of dequantized keys, and of the queries they meet, in a model of 16-bit ``dtype``.

    bfloat16 has the range of the scales. Where one side is not quantized the model's own dtype stays: fp16 would lose
    bits of such a side to bfloat16.
    """
    return dtype if UNQUANTIZED in (query_format, key_format) else torch.bfloat16
