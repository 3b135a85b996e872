"""How a recipe runs on a chip: in which form keys and values are stored, and which units multiply them.

Lowerings
    ``8bit``: low scores are products of 8-bit elements on INT8 or FP8 units, times one factor per query row and one per
    key tile; no factor is spent on a single score. Exact for MXINT8 and MXFP8 with ``shared_scale = "tile"``. MXFP4 is
    exact in E5M2, whatever shares its scales: an E2M1 number times a power of two has one mantissa bit, and E5M2 holds
    block scales up to 28 binades below the tile's (row's) largest; what lies below is lost in fp32 accumulation too.
    ``scaled``: MXFP4, MXFP8 and NVFP4 as they are, elements and block scales, on block-scaled matrix units.
    ``portable``: everything dequantised to 16 bits, which is exact (no format has more than 8 significant bits), and
    multiplied in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from ..numerics.formats import UNQUANTIZED, SharedScale
from ..numerics.recipe import Recipe
from .chip import BLOCK_SCALED_ARCHS, MIN_FP8_ARCH, TENSOR_MEMORY_ARCHS


class Form(StrEnum):
    """How the keys or values of one kind of tile are stored."""

    RAW = "raw"
    """The caller's own 16 bits, any strides, neither transformed nor quantised."""
    DEQUANTIZED = "dequantized"
    """Transformed, quantised, and dequantised to 16 bits: ``[B, Hkv, S, D]``. Keys: :func:`dequantized_dtype`. Values:
    bfloat16."""
    INT8 = "int8"
    """MXINT8 elements: int8 ``[B, Hkv, S, D']`` (``D'``: padded with zeros to a multiple of 32), a factor per tile."""
    E4M3 = "e4m3"
    """Keys: MXFP8 elements, ``[B, Hkv, S, D']``, a factor per tile. Values: ``[B, Hkv, S / 128, Dv, 128]``, the keys
    of a tile in the order of :func:`~dma_kernels.device.arithmetic.permute_keys`, a factor per channel or per tile and
    channel."""
    E5M2 = "e5m2"
    """MXFP4 elements times their block's scale over the tile's largest, times ``2 ** 13``, as ``6 * 2 ** 13`` is below
    E5M2's largest number: ``[B, Hkv, S, D']``, a factor per tile. A block whose scale is NaN is NaN in all its
    elements."""
    PACKED = "packed"
    """Elements and block scales as :class:`~dma_kernels.numerics.quantize.QuantizedTensor` has them,
    ``[B, Hkv, S, ..]``; for NVFP4 the head's fp32 scale is the factor."""


@dataclass(frozen=True)
class Lowering:
    """How a recipe runs on a chip.

    Attributes:
        name: ``8bit``, ``scaled`` or ``portable``.
        key: Form of the keys of high tiles, whose values are always raw.
        low_key: Form of the keys of low tiles; ``None`` for a recipe of one precision.
        low_value: Form of the values of low tiles; ``None`` likewise.
    """

    name: str
    key: Form
    low_key: Form | None
    low_value: Form | None


def select_lowering(recipe: Recipe, arch: int, channels: int = 128) -> Lowering:
    """Return how a chip computes a recipe.

    Args:
        recipe: The recipe.
        arch: Compute capability, major version times ten plus minor (90 is Hopper).
        channels: The larger head dimension of keys and values.
    """
    is_block_scaled = arch in BLOCK_SCALED_ARCHS and (channels <= 128 or arch not in TENSOR_MEMORY_ARCHS)
    low_key = None if recipe.is_uniform else _low_key_form(recipe, arch, is_block_scaled)
    key = Form.DEQUANTIZED
    if recipe.high == UNQUANTIZED:
        key = Form.RAW
    elif is_block_scaled and recipe.high != "mxint8":
        key = Form.PACKED
    low_value = None if recipe.is_uniform else Form.RAW
    if recipe.pv == "fp8":
        low_value = Form.E4M3 if arch >= MIN_FP8_ARCH else Form.DEQUANTIZED
    name = "portable"
    if low_key in (Form.INT8, Form.E4M3, Form.E5M2):
        name = "8bit"
    elif Form.PACKED in (key, low_key):
        name = "scaled"
    return Lowering(name, key, low_key, low_value)


def _low_key_form(recipe: Recipe, arch: int, is_block_scaled: bool) -> Form:
    query, key = recipe.query_low, recipe.key_low
    has_fp8 = arch >= MIN_FP8_ARCH
    if query == key and recipe.shared_scale == SharedScale.TILE:
        if key == "mxint8":
            return Form.INT8
        if key == "mxfp8" and has_fp8:
            return Form.E4M3
    if is_block_scaled and ({query, key} <= {"mxfp4", "mxfp8"} or query == key == "nvfp4"):
        return Form.PACKED
    if query == key == "mxfp4" and has_fp8:
        return Form.E5M2
    return Form.DEQUANTIZED


def dequantized_dtype(dtype: torch.dtype, query_format: str, key_format: str) -> torch.dtype:
    """Return the dtype of dequantised keys, and of the queries they meet, in a model of 16-bit ``dtype``.

    bfloat16 has the range of the scales. Where one side is not quantised the model's own dtype stays: fp16 would lose
    bits of such a side to bfloat16.
    """
    return dtype if UNQUANTIZED in (query_format, key_format) else torch.bfloat16
