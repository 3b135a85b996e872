"""Quantize the keys and values of a call, for every compute path, in one launch; and find NVFP4's scale of queries.

The mean key, the scales of E4M3 values and NVFP4's global scale depend on the first tile only, which every CTA reads
itself. Inputs may have any strides; nothing is copied beforehand.

Results equal :mod:`dma_kernels.numerics.quantize` bit for bit, given the same mean key. The mean sums up to 128 numbers
in another order, and is rounded to bfloat16. Design: ``benchmarks/quantizer.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import NVFP4, TILE, padded_channels
from ..numerics.layout import Strided
from ..numerics.recipe import Recipe
from ..numerics.saturation import saturation_counter
from ..numerics.transforms import hadamard_size
from ..runtime import chip
from ..runtime.launch import blocks_of_heads, launch_kernel
from .config import ComputePath, ValueConstants
from .operands import (
    DEQUANTIZED,
    E5M2,
    RAW,
    TILE_SCALED,
    OperandFormat,
    Operands,
    Scale,
    TileOperands,
    dequantized_dtype,
)
from .quantizer_kernel import quantize_kernel, query_global_scale_kernel

QUERY_BLOCK = 64
"""Queries of a CTA that finds their global scale."""
CTAS_PER_SM = 3
"""As many as fit with 80 registers per thread; they loop over tiles."""


@dataclass(frozen=True, kw_only=True)
class QuantizerConstants(ValueConstants):
    """Constexprs of the quantizer of keys and values."""

    high_form: str  # form of the keys of high tiles; ``raw`` writes nothing
    high_format: str  # format of the keys of high tiles
    low_form: str  # form of the keys of low tiles; ``none`` writes nothing
    low_format: str  # format of the keys of low tiles
    shared_scale: str  # ``block``, ``row`` or ``tile``: what shares a scale in low tiles
    value_form: str  # form of the values of low tiles; ``raw`` writes nothing
    rounding: str  # rounding of scales
    use_pdl: bool  # let CTAs of the next launch start once all CTAs of this one have started

    @property
    def is_tile_scaled(self) -> bool:
        """Whether keys of low tiles are 8-bit elements with one scale per tile."""
        return any(self.low_form == form.name for form in TILE_SCALED)


def quantize_keys_values(
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    path: ComputePath,
    *,
    kv_offset: int,
    seq_info: Tensor | None,
    low_tiles: range | None = None,
) -> Operands:
    """Write the key and value operands of a call; zeros in place of keys and values that no query can attend to.

    Args:
        key: 16-bit ``[B, Hkv, Tk, D]``, any strides.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides.
        recipe: The precisions.
        path: The operand formats.
        kv_offset: As in :class:`~dma_kernels.numerics.geometry.AttentionGeometry`, like ``seq_info``.
        seq_info: See ``kv_offset``.
        low_tiles: Tiles of tile-padded storage that are low for some query; ``None`` for all. If high tiles read the
            caller's own keys, only these are written.

    Returns:
        The operands, without ``query_global_scale``.
    """
    batch, heads, kv_len, head_dim = key.shape
    # Per-row offsets are read on the device, so up to 127 rows may stay empty before key 0.
    first = kv_offset % TILE if seq_info is None else TILE - 1
    tiles = max(1, -(-(kv_len + first) // TILE))
    valid = low_tiles if low_tiles is not None and path.key is RAW else range(tiles)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return key.new_empty((batch, heads, *shape), dtype=dtype)

    writes_high, writes_low = path.key is not RAW, path.low_key is not None
    mean = new(head_dim) if recipe.smooth_k and (writes_high or writes_low) else None
    has_nvfp4_keys = NVFP4.name in (recipe.high if writes_high else "", recipe.key_low if writes_low else "")
    global_scale = new() if has_nvfp4_keys else None

    def tile_operands(key_format: OperandFormat, value_format: OperandFormat, *formats: str) -> TileOperands:
        elements, scale, descale, values, value_descale = key, None, None, value, None
        if key_format is not RAW:
            dtype = key_format.dtype or dequantized_dtype(key.dtype, *formats)
            elements = new(tiles * TILE, key_format.stored_channels(head_dim), dtype=dtype)
        if key_format.scale is Scale.TILE:
            descale = new(tiles)
        elif key_format.scale_dtype is not None:
            blocks = -(-head_dim // key_format.padding)
            scale = new(tiles * TILE, blocks, dtype=key_format.scale_dtype)
        if key_format.holds == NVFP4.name:
            assert global_scale is not None
            descale = global_scale.as_strided((batch, heads, tiles), (heads, 1, 0))
        if value_format is DEQUANTIZED:
            values = new(tiles * TILE, value.shape[3], dtype=torch.bfloat16)
        elif value_format.dtype is not None:
            values, value_descale = new(tiles, value.shape[3], TILE, dtype=value_format.dtype), new(value.shape[3])
        return TileOperands(elements, values, key_format, value_format, scale, descale, value_descale)

    high, low = tile_operands(path.key, RAW, recipe.high, recipe.high), None
    if path.low_key is not None and path.low_value is not None:
        low = tile_operands(path.low_key, path.low_value, recipe.query_low, recipe.key_low)
    writes_values = path.low_value not in (None, RAW)
    layers = int(writes_values) + int(writes_high or writes_low)
    if layers:
        share = CTAS_PER_SM * chip.of(key.device).sms // max(1, batch * heads * layers)
        constants, options = _constants_and_options(key, value, recipe, path)
        launch_kernel(
            quantize_kernel, {"CONFIG": constants}, (batch * heads, max(1, min(len(valid), share)), layers),
            Strided.of(key), Strided.of(value), seq_info,
            mean, high.key if writes_high else None, high.key_scale,
            low.key if low else None, low.key_scale if low else None,
            low.key_descale if low and low.key_format.scale is Scale.TILE else None, global_scale,
            low.value if low and writes_values else None, low.value_descale if low else None,
            saturation_counter() if writes_values else None,
            kv_offset, kv_len, tiles, valid.start, valid.stop, **options,
        )  # fmt: skip
    return Operands(high=high, low=low, key_mean=mean)


def _constants_and_options(
    key: Tensor, value: Tensor, recipe: Recipe, path: ComputePath
) -> tuple[QuantizerConstants, dict[str, Any]]:
    constants = QuantizerConstants(
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        rotate=recipe.rotate,
        high_form=path.key.name,
        high_format=recipe.high,
        low_form="none" if path.low_key is None else path.low_key.name,
        low_format=recipe.key_low,
        shared_scale=recipe.shared_scale,
        value_form=(path.low_value or RAW).name,
        rounding=recipe.scale_rounding,
        use_pdl=chip.of(key.device).supports_pdl,
    )
    is_wide = max(key.shape[3], value.shape[3]) > 128
    options: dict[str, Any] = {"num_warps": 8}
    if path.low_key in TILE_SCALED:
        # A thread holds 64 numbers of a tile. The register limit makes room for CTAS_PER_SM.
        options = {"num_warps": 16} if is_wide else {"num_warps": 8, "maxnreg": 80}
    elif path.low_key is E5M2 and not recipe.rotate and not is_wide:
        # Faster than 8 warps for 8 x 4K tokens (H200).
        options = {"num_warps": 16}
    return constants, options


def query_global_scale(query: Tensor, recipe: Recipe) -> Tensor | None:
    """Return NVFP4's global scale of each head's transformed queries, fp32 ``[B, Hq]``; ``None`` for other formats."""
    if NVFP4.name not in (recipe.query_low, recipe.high):
        return None
    batch, heads, q_len, head_dim = query.shape
    global_scale = query.new_zeros((batch, heads), dtype=torch.int32)
    size = hadamard_size(head_dim) if recipe.rotate else 0
    constants = {
        "Q_HEADS": heads,
        "D": head_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_T": QUERY_BLOCK,
        "HADAMARD_SIZE": size,
        "NORM": math.pow(size, -0.5) if recipe.rotate else 1.0,
        "ROUNDING": recipe.scale_rounding,
    }
    grid = blocks_of_heads(batch * heads, -(-q_len // QUERY_BLOCK))
    launch_kernel(query_global_scale_kernel, constants, grid, query, global_scale, *query.stride(), q_len, num_warps=4)
    return global_scale.view(torch.float32)
