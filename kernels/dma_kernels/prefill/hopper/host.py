"""Host side of Hopper's prefill kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...numerics.formats import TILE, padded_channels
from ...numerics.layout import head_blocks, matrix_blocks
from ...runtime import chip
from ...runtime.launch import launch_kernel
from ..config import ROWS, Constants, OneWarpgroupConfig, WarpSpecializedConfig, is_dense_causal
from ..operands import RAW, TILE_SCALED, AttentionInputs
from .bitmask import pack_mask
from .one_warpgroup import prefill_one_warpgroup_kernel
from .quantize_q import QuantizedQueries, quantize_q
from .warp_specialized import prefill_warp_specialized_kernel

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@dataclass(frozen=True, kw_only=True)
class _HopperConstants(Constants):
    """Constexprs of both Hopper kernels."""

    q_heads: int  # query heads
    is_high_unquantized: bool  # whether the keys of high tiles are the caller's own: unpadded and not smoothed
    is_causal: bool  # whether a query attends to no key after its own position
    # whether a low tile may be masked, or keys begin inside a tile; otherwise every query attends to all keys before
    # the band
    masks_low: bool


@dataclass(frozen=True, kw_only=True)
class WarpSpecializedConstants(_HopperConstants):
    """Constexprs of the warp-specialized kernel."""

    tuning: WarpSpecializedConfig  # warpgroups, stages and registers
    is_low_value_unquantized: bool  # whether the values of low tiles are the caller's own, unpadded
    has_mean: bool  # whether keys are smoothed


@dataclass(frozen=True, kw_only=True)
class OneWarpgroupConstants(_HopperConstants):
    """Constexprs of the one-warpgroup kernel."""

    tuning: OneWarpgroupConfig  # stages
    q_form: str  # form of the queries that the CTA quantizes: ``int8`` or ``e4m3``
    q_format: str  # format of these queries
    is_ceil: bool  # whether their scales are rounded up


def launch_warp_specialized(inputs: AttentionInputs) -> None:
    """Launch the warp-specialized kernel."""
    query, geometry, config = inputs.query, inputs.geometry, inputs.config
    high, low = inputs.operands.high, inputs.low
    batch, q_heads, q_len, head_dim = query.shape
    queries = _quantize_q(inputs)
    channels = padded_channels(head_dim)
    # Rows past a tile's channels belong to the next tile; their outputs are not stored.
    is_fp8 = not low.value_format.is_16_bit
    v_low_desc = _matrix(low.value, channels, TILE) if is_fp8 else _heads(low.value, TILE)
    blocks = geometry.query_blocks(q_len, ROWS * config.consumer_warpgroups, ROWS)
    bitmask = pack_mask(geometry, batch, q_len, low.key.shape[2] // TILE)
    constants = WarpSpecializedConstants(
        q_heads=q_heads,
        kv_heads=high.key.shape[1],
        head_dim=head_dim,
        tuning=config,
        is_high_unquantized=high.key_format is RAW,
        is_low_value_unquantized=low.value_format is RAW,
        is_causal=geometry.is_causal,
        masks_low=geometry.mask is not None or not is_dense_causal(geometry, q_len),
        has_mean=inputs.operands.key_mean is not None,
    )
    # CTAs may start before the previous launch has ended, and wait for it before they access memory.
    launch_kernel(
        prefill_warp_specialized_kernel, {"CONFIG": constants}, (blocks * q_heads * batch, 1, 1),
        _heads(queries.high, ROWS), _heads(queries.low, ROWS),
        _heads(high.key, TILE // 2), _heads(high.value, TILE // 2), _matrix(low.key, TILE, channels), v_low_desc,
        inputs.out, inputs.lse, queries.descale_and_bias, low.key_descale, low.value_descale,
        *_common_arguments(inputs, blocks), *bitmask, inputs.skip_threshold, inputs.tile_counts,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip


def launch_one_warpgroup(inputs: AttentionInputs) -> None:
    """Launch the one-warpgroup kernel."""
    query, geometry, config = inputs.query, inputs.geometry, inputs.config
    high, low = inputs.operands.high, inputs.low
    recipe = inputs.recipe
    batch, q_heads, q_len, head_dim = query.shape
    queries = None
    if low.key_format not in TILE_SCALED or high.key_format is not RAW:
        queries = _quantize_q(inputs)
    channels = padded_channels(head_dim)
    *bitmask, blocks = pack_mask(geometry, batch, q_len, low.key.shape[2] // TILE)
    kv_heads, swizzle_group = high.key.shape[1], inputs.swizzle_group
    constants = OneWarpgroupConstants(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tuning=config,
        q_form=low.key_format.name,
        q_format=recipe.query_low,
        is_ceil=recipe.scale_rounding == "ceil",
        rotate=recipe.rotate and queries is None,
        is_high_unquantized=high.key_format is RAW,
        is_causal=geometry.is_causal,
        masks_low=not is_dense_causal(geometry, q_len),
    )
    launch_kernel(
        prefill_one_warpgroup_kernel, {"CONFIG": constants},
        (swizzle_group * (q_heads // kv_heads), blocks, -(-inputs.kv_rows // swizzle_group)),
        _heads(query if queries is None else queries.high, ROWS),
        None if queries is None else _heads(queries.low, ROWS),
        _heads(high.key, TILE // 2), _heads(high.value, TILE // 2),
        _matrix(low.key, TILE // low.key.dtype.itemsize, channels),
        None if low.value_format.is_16_bit else _matrix(low.value, channels, TILE),
        inputs.out, inputs.lse, None if queries is None else queries.descale_and_bias, inputs.operands.key_mean,
        low.key_descale, low.value_descale,
        *_common_arguments(inputs, blocks), *bitmask, inputs.skip_threshold, inputs.tile_counts,
        num_warps=4, maxnreg=config.registers, launch_pdl=True,
    )  # fmt: skip


def _quantize_q(inputs: AttentionInputs) -> QuantizedQueries:
    operands = inputs.operands
    # The quantizer of keys lets the next launch start early, and starts after all earlier work itself. So the caller's
    # tensors are ready. NVFP4's query scale is a launch in between.
    use_pdl = operands.query_global_scale is None and chip.of(inputs.query.device).supports_pdl
    return quantize_q(
        inputs.query, operands.key_mean, operands.query_global_scale, inputs.recipe, inputs.low.key_format,
        operands.high.key_format, logit_scale=inputs.logit_scale, use_pdl=use_pdl,
    )  # fmt: skip


def _common_arguments(inputs: AttentionInputs, blocks: int) -> tuple[Any, ...]:
    """Return the kernels' arguments from ``sinks_ptr`` to ``logit_scale``."""
    geometry, recipe = inputs.geometry, inputs.recipe
    return (
        inputs.sinks, geometry.seq_info, *inputs.out.stride()[:3],
        geometry.q_offset, geometry.kv_offset, inputs.query.shape[2], geometry.kv_len,
        inputs.low.key.shape[2] // TILE, blocks, inputs.swizzle_group, inputs.kv_rows,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles, recipe.exact_tiles(is_causal=geometry.is_causal),
        inputs.softcap, inputs.logit_scale,
    )  # fmt: skip


def _heads(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describe ``[B, H, T, D]``, loaded in blocks of a head's rows; zeros past the ``D`` channels."""
    return _describe(tensor, *head_blocks(tensor, rows, padded_channels(tensor.shape[3])))


def _matrix(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return _describe(tensor, *matrix_blocks(tensor, rows, columns))


def _describe(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, shape, strides, block, layout)
