"""Operands of the prefill kernels, and the formats in which they are stored and multiplied.

A recipe names *number formats* (:mod:`dma_kernels.numerics.formats`); an operand format is what the chip multiplies.
All storage except :data:`RAW` is tile-padded: row 0 is the first position of the tile that holds key 0, and every tile
is complete. So the tiles of the rule are aligned in memory.

Keys and values come in the formats of the compute path, from the quantizer (:mod:`dma_kernels.prefill.quantizer`) or
from a cache. Queries are the caller's own; the attention kernel, or a launch before it, converts them to the format of
their keys.

In exact arithmetic ``(q H) . ((k - mean) H) = q . k - q . mean``. So with ``high = "bf16"``, high tiles are scored with
the caller's own queries and keys, and ``q . mean`` is subtracted in fp32. No transformed 16-bit copy is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import BLOCK_FORMATS, MXFP4, MXFP8, MXINT8, NVFP4, UNQUANTIZED, ScaleFormat
from ..numerics.geometry import AttentionGeometry
from ..numerics.recipe import Recipe


class Scale(StrEnum):
    """Granularity of the scales that the attention kernel applies."""

    NONE = "none"
    """No scale: the elements are the values."""
    TILE = "tile"
    """One fp32 scale per tile of keys, or per row of queries."""
    BLOCK = "block"
    """One scale per block of channels, applied by block-scaled tensor cores."""
    CHANNEL = "channel"
    """One fp32 scale per channel of the values of a head."""


@dataclass(frozen=True)
class OperandFormat:
    """How an operand is stored and multiplied."""

    name: str  # the constexpr by which kernels select the encoding and the MMA
    dtype: torch.dtype | None = None  # of the stored elements; ``None`` for 16 bits, see ``dequantized_dtype``
    scale: Scale = Scale.NONE  # granularity of the scales
    scale_dtype: torch.dtype | None = None  # of block scales
    padding: int = 1  # channels are zero-padded to a multiple of this
    packing: int = 1  # channels per element: 2 for E2M1
    holds: str | None = None  # the block format that it stores without rounding again; ``None`` for any
    min_arch: int = 0  # first compute capability with tensor cores for it

    @property
    def is_16_bit(self) -> bool:
        """Whether MMAs take 16-bit operands."""
        return self.dtype is None

    def stored_channels(self, channels: int) -> int:
        """Return the number of elements that store ``channels``."""
        return -(-channels // self.padding) * self.padding // self.packing


RAW = OperandFormat("raw")
"""The caller's own 16-bit tensor, any strides, neither transformed nor quantized."""
DEQUANTIZED = OperandFormat("dequantized")
"""Transformed, quantized, and dequantized to 16 bits: ``[B, Hkv, S, D]``. Exact: no format has more than 8 significant
bits. Keys and queries: :func:`dequantized_dtype`. Values: bfloat16."""
INT8 = OperandFormat("int8", torch.int8, Scale.TILE, padding=32, holds=MXINT8.name)
"""MXINT8 elements, ``[B, Hkv, S, D']``; every tile has one scale."""
E4M3 = OperandFormat("e4m3", torch.float8_e4m3fn, Scale.TILE, padding=32, holds=MXFP8.name, min_arch=89)
"""MXFP8 elements, likewise."""
E5M2 = OperandFormat("e5m2", torch.float8_e5m2, Scale.TILE, padding=32, holds=MXFP4.name, min_arch=89)
"""MXFP4 with folded block scales: element times scale over the tile's largest scale, times ``2 ** 13``; ``6 * 2 ** 13``
is below E5M2's largest number. Exact for every scale sharing: an E2M1 number times a power of two has one mantissa bit,
and E5M2 holds block scales up to 28 binades below the tile's largest. Smaller ones vanish in fp32 accumulation too. A
block whose scale is NaN is NaN in all its elements."""
TILE_SCALED = (INT8, E4M3)
"""One scale per tile, for ``shared_scale = "tile"``: the first that holds the block format is selected."""
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
"""Elements and block scales in the layout of :class:`~dma_kernels.numerics.quantize.QuantizedTensor`,
``[B, Hkv, S, ..]``, by block format. NVFP4's global scale applies to all tiles of a head."""
E4M3_VALUES = OperandFormat("e4m3", torch.float8_e4m3fn, Scale.CHANNEL, holds="fp8", min_arch=89)
"""Values ``[B, Hkv, S / 128, Dv, 128]``, the keys of a tile in the order of
:func:`~dma_kernels.device.arithmetic.permute_keys`."""


def dequantized_dtype(dtype: torch.dtype, query_format: str, key_format: str) -> torch.dtype:
    """Return the dtype of dequantized keys and of their queries, in a model of 16-bit ``dtype``.

    bfloat16, which has the range of the scales; but the model's own dtype if one side is unquantized, because casting
    fp16 to bfloat16 would lose bits.
    """
    return dtype if UNQUANTIZED in (query_format, key_format) else torch.bfloat16


@dataclass(frozen=True)
class TileOperands:
    """Operands of high or of low tiles. Shapes of ``key`` and ``value`` are those of their formats."""

    key: Tensor  # keys
    value: Tensor  # values
    key_format: OperandFormat  # format of ``key``
    value_format: OperandFormat  # format of ``value``: 16 bits or E4M3; the caller's own for high tiles
    # block scales of packed keys, ``[B, Hkv, S, D' / block]``: E8M0 codes (uint8) or E4M3
    key_scale: Tensor | None = None
    # descale of the keys of each tile, fp32 ``[B, Hkv, S / 128]``, contiguous; for packed NVFP4 keys, the global scale,
    # expanded from ``[B, Hkv]``. ``None`` for 1. At least fp32's smallest normal number; 1 for a tile of zeros.
    key_descale: Tensor | None = None
    value_descale: Tensor | None = None  # descale of each channel of the values, fp32 ``[B, Hkv, Dv]``; ``None`` for 1


@dataclass(frozen=True)
class Operands:
    """The tensors of one call. All their tile-padded storage has the same number of tiles.

    Tiles that are low for no query may be uninitialized. They must not be read, not even with a probability of 0.
    """

    high: TileOperands  # operands of high tiles
    # operands of low tiles; ``None`` if the recipe has one precision. The caller's ``value`` is that of ``high``.
    low: TileOperands | None
    key_mean: Tensor | None = None  # mean key, fp32 ``[B, Hkv, D]``; given iff the recipe has ``smooth_k``
    # NVFP4's global scale of the transformed queries, fp32 ``[B, Hq]``; given iff the recipe has NVFP4 queries
    query_global_scale: Tensor | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of an attention kernel's launch."""

    query: Tensor  # ``[B, Hq, Tq, D]``, 16-bit, any strides
    operands: Operands  # keys and values
    low: TileOperands  # operands of low tiles; those of high tiles if the recipe has one precision
    geometry: AttentionGeometry  # positions and visibility
    recipe: Recipe  # formats and band
    config: Any  # configuration of the kernel
    out: Tensor  # output, ``[B, Hq, Tq, Dv]``, unit stride of channels
    lse: Tensor  # log of the softmax denominator, fp32 ``[B, Hq, Tq]``, contiguous
    kv_rows: int  # kv heads of all batch rows
    swizzle_group: int  # kv heads per L2 swizzle group
    logit_scale: float  # converts scores to base-2 logits
    softcap: float | None  # softcap of base-2 logits, or ``None``
    # threshold of base-2 logits; ``None`` if nothing can be skipped and nothing is counted
    skip_threshold: float | None
    sinks: Tensor | None  # sink logits ``[Hq]``, contiguous, or ``None``
    tile_counts: Tensor | None  # int64 ``[Hq, 2]``, where skipped and examined tiles are added, or ``None``


def new_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output ``[B, Hq, Tq, Dv]`` and the log-sum-exp, fp32 ``[B, Hq, Tq]``."""
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32)
