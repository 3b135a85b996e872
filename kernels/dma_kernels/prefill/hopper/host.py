"""Host side of Hopper's prefill kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...numerics.formats import TILE, padded_channels
from ...numerics.geometry import LOG2_E, PrefillGeometry
from ...numerics.recipe import Recipe
from ...numerics.transforms import hadamard_size
from ...runtime.descriptors import head_strides
from ...runtime.launch import Launcher
from ...runtime.operand_formats import RAW, TILE_SCALED, OperandFormat
from ..config import MultiCTAConfig, WarpSpecializedConfig, select_swizzle_group
from ..operands import Operands
from .bitmask import pack_mask
from .constants import MultiCTAConstants, WarpSpecializedConstants
from .multi_cta import prefill_multi_cta_kernel
from .quantize_q import quantize_q
from .select import ROWS, is_dense_causal, query_blocks
from .warp_specialized import prefill_warp_specialized_kernel

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


def launch_warp_specialized(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    recipe: Recipe,
    config: WarpSpecializedConfig,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    skip_threshold: float | None,
    tile_counts: Tensor | None,
    use_pdl: bool,
) -> None:
    """Launch the warp-specialized kernel.

    Args:
        query: ``[B, Hq, Tq, D]``, 16-bit.
        operands: Keys and values.
        geometry: Positions and visibility.
        recipe: Formats and band.
        config: Sizes.
        out: Where the output goes, ``[B, Hq, Tq, Dv]``.
        lse: Where the log of the softmax denominator goes, fp32 ``[B, Hq, Tq]``.
        scale: Factor of the scores.
        softcap: Cap of the scores, or ``None``.
        sinks: ``[Hq]``, contiguous, or ``None``.
        skip_threshold: Of the recipe, in base-2 logits, or ``None``.
        tile_counts: Where skipped and examined tiles are added, int64 ``[Hq, 2]``, or ``None``.
        use_pdl: Whether queries may be quantized before the launches that made ``operands`` have ended.
    """
    batch, q_heads, q_len, head_dim = query.shape
    high, low = operands.high, operands.low
    assert low is not None
    kv_heads = high.key.shape[1]
    is_e4m3 = not low.value_format.is_16_bit
    quantized = quantize_q(
        query, operands.key_mean, operands.query_global_scale, recipe, low.key_format, high.key_format,
        scale=scale, use_pdl=use_pdl,
    )  # fmt: skip
    channels = padded_channels(head_dim)
    # Rows after a tile's channels belong to the next tile; their outputs are not stored.
    v_low_desc = _matrix(low.value, channels, TILE) if is_e4m3 else _heads(low.value, TILE)
    blocks = query_blocks(geometry, q_len, ROWS * config.consumer_warpgroups)
    mask_blocks = query_blocks(geometry, q_len, ROWS)
    storage_tiles = low.key.shape[2] // TILE
    packed = pack_mask(geometry, batch, q_len, mask_blocks, storage_tiles)
    all_heads = batch * kv_heads
    swizzle_group = select_swizzle_group(all_heads, low.head_bytes)
    launch = _warp_specialized_launcher(
        q_heads, kv_heads, head_dim, config, high.key_format.layout, high.value_format.layout,
        low.value_format.layout, geometry.is_causal,
        geometry.mask is not None or not is_dense_causal(geometry, q_len), operands.key_mean is not None,
        high.key_format is RAW,
    )  # fmt: skip
    launch(
        (blocks * q_heads * batch, 1, 1),
        _heads(quantized.high, ROWS), _heads(quantized.low, ROWS),
        _heads(high.key, TILE // 2), _heads(high.value, TILE // 2),
        _matrix(low.key, TILE, channels), v_low_desc,
        out, lse, quantized.descale_and_bias, low.key_descale, low.value_descale,
        sinks, geometry.rows, *out.stride()[:3],
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len, storage_tiles, blocks, swizzle_group, all_heads,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        packed.words, packed.bounds, packed.planes_per_row, packed.planes_per_head, mask_blocks,
        skip_threshold, tile_counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _warp_specialized_launcher(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    config: WarpSpecializedConfig,
    key_layout: str,
    value_layout: str,
    low_value_layout: str,
    is_causal: bool,
    masks_low: bool,
    has_mean: bool,
    is_high_unquantized: bool,
) -> Launcher:
    constants = WarpSpecializedConstants(
        q_heads, kv_heads, head_dim, padded_channels(head_dim),
        config.consumer_warpgroups, config.stages, config.registers,
        key_layout, value_layout, low_value_layout, is_causal, masks_low, has_mean, is_high_unquantized,
    )  # fmt: skip
    # CTAs may start before the previous launch has ended: they wait before they access memory.
    return Launcher(prefill_warp_specialized_kernel, {"CONFIG": constants}, num_warps=4, launch_pdl=True)


def launch_multi_cta(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    recipe: Recipe,
    config: MultiCTAConfig,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    skip_threshold: float | None,
    tile_counts: Tensor | None,
    use_pdl: bool,
) -> None:
    """Launch the multi-CTA kernel; arguments as for :func:`launch_warp_specialized`."""
    batch, q_heads, q_len, head_dim = query.shape
    high, low = operands.high, operands.low
    assert low is not None
    kv_heads = high.key.shape[1]
    quantized = None
    if low.key_format not in TILE_SCALED or high.key_format is not RAW:
        quantized = quantize_q(
            query, operands.key_mean, operands.query_global_scale, recipe, low.key_format, high.key_format,
            scale=scale, use_pdl=use_pdl,
        )  # fmt: skip
    blocks = query_blocks(geometry, q_len, ROWS)
    storage_tiles = low.key.shape[2] // TILE
    packed = pack_mask(geometry, batch, q_len, blocks, storage_tiles)
    channels = padded_channels(head_dim)
    all_heads = batch * kv_heads
    swizzle_group = select_swizzle_group(all_heads, low.head_bytes)
    launch = _multi_cta_launcher(
        q_heads, kv_heads, head_dim, config, high.key_format.layout, low.key_format, recipe.query_low,
        recipe.scale_rounding == "ceil", recipe.rotate and quantized is None, geometry.is_causal,
        not is_dense_causal(geometry, q_len), high.key_format is RAW,
    )  # fmt: skip
    launch(
        (swizzle_group * (q_heads // kv_heads), blocks, -(-all_heads // swizzle_group)),
        _heads(query if quantized is None else quantized.high, ROWS),
        None if quantized is None else _heads(quantized.low, ROWS),
        _heads(high.key, TILE // 2), _heads(high.value, TILE // 2),
        _matrix(low.key, TILE // low.key.element_size(), channels),
        _matrix(low.value, channels, TILE) if not low.value_format.is_16_bit else None,
        out, lse, None if quantized is None else quantized.descale_and_bias, operands.key_mean,
        low.key_descale, low.value_descale,
        sinks, geometry.rows, *out.stride()[:3],
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len, storage_tiles, blocks, swizzle_group, all_heads,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        packed.words, packed.bounds, packed.planes_per_row, packed.planes_per_head,
        skip_threshold, tile_counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _multi_cta_launcher(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    config: MultiCTAConfig,
    key_layout: str,
    format: OperandFormat,
    query_format: str,
    is_ceil: bool,
    rotate: bool,
    is_causal: bool,
    masks_low: bool,
    is_high_unquantized: bool,
) -> Launcher:
    constants = MultiCTAConstants(
        q_heads, kv_heads, head_dim, padded_channels(head_dim), config.key_stages, config.value_stages, key_layout,
        format.name, query_format, is_ceil, hadamard_size(head_dim) if rotate else 0, is_causal, masks_low,
        is_high_unquantized,
    )  # fmt: skip
    return Launcher(
        prefill_multi_cta_kernel, {"CONFIG": constants}, num_warps=4, maxnreg=config.registers, launch_pdl=True
    )


def _heads(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describe ``[B, H, T, D]``, copied in blocks of rows of a head: zeros from channel ``D`` on."""
    block = (1, 1, rows, padded_channels(tensor.shape[3]))
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), head_strides(tensor), list(block), layout)


def _matrix(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a contiguous tensor as a matrix of its last dimension, copied in blocks."""
    width = tensor.shape[-1]
    block = (rows, columns)
    return TensorDescriptor(
        tensor, [tensor.numel() // width, width], [width, 1], list(block), _layout(block, tensor.dtype)
    )


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
