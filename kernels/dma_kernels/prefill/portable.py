"""Host side of the portable prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics.formats import TILE, TILE_SHIFT, UNQUANTIZED, padded_channels
from ..numerics.layout import Strided, broadcast_strides, head_blocks, is_describable, matrix_blocks
from ..runtime import chip
from ..runtime.launch import launch_kernel
from .config import PortableConfig, ValueConstants
from .kernel import prefill_kernel
from .operands import RAW, AttentionInputs, Scale

ALL_TILES = 1 << (31 - TILE_SHIFT)
"""Sink tiles that hold every position in int32."""


@dataclass(frozen=True, kw_only=True)
class PortableConstants(ValueConstants):
    """Constexprs of the portable kernel."""

    q_heads: int  # query heads
    tuning: PortableConfig  # block sizes and stages
    high_form: str  # form of the keys of high tiles
    high_format: str  # format of keys and queries of high tiles
    low_form: str  # form of the keys of low tiles; ``none`` if there are none
    low_q_format: str  # format of their queries
    low_k_format: str  # format of the keys
    low_shared: str  # ``block`` or ``row``: what shares a scale in low queries
    low_value_form: str  # form of the values of low tiles
    rounding: str  # rounding of the scales of queries
    is_causal: bool  # whether a query attends to no key after its own position
    is_pv_fp8: bool  # whether low tiles have FP8 probabilities
    use_tma: bool  # whether TMA loads quantized operands
    use_raw_tma: bool  # whether TMA loads 16-bit operands

    @property
    def block_d(self) -> int:
        """``head_dim`` padded; block-scaled tensor cores take 64 channels at a time."""
        return max(64 if "packed" in (self.high_form, self.low_form) else 0, padded_channels(self.head_dim))

    @property
    def has_low(self) -> bool:
        """Whether there are low tiles."""
        return self.low_form != "none"

    @property
    def stage_queries(self) -> bool:
        """Whether low queries pass through the rows of the output, if these have room for them."""
        room = {"none": 0, "packed": 0, "dequantized": self.value_dim}.get(self.low_form, 2 * self.value_dim)
        return self.tuning.stage_queries and self.head_dim <= room


def launch(inputs: AttentionInputs) -> None:
    """Launch the portable kernel, which starts after all earlier work."""
    query, geometry, recipe, config = inputs.query, inputs.geometry, inputs.recipe, inputs.config
    high, low, has_low = inputs.operands.high, inputs.low, inputs.operands.low is not None
    assert high.value_format is RAW, "values of high tiles are the caller's own"
    assert low.value_format is not RAW or low.value is high.value, "the caller's values are those of high tiles"
    assert high.value.shape[2] == geometry.kv_len, "the caller's values are all there"
    assert high.key_format is not RAW or high.key.shape[2] == geometry.kv_len, "so are the caller's keys"
    (batch, q_heads, q_len, head_dim), kv_heads, value_dim = query.shape, high.key.shape[1], high.value.shape[3]
    # Rows of a descriptor start at multiples of 16 bytes.
    described = [high.value]
    described += [high.key] if high.key_format is RAW else []
    described += [low.value] if low.value_format.is_16_bit else []
    has_tma = chip.of(query.device).arch >= 90
    use_raw_tma = has_tma and all(map(is_describable, described))
    use_tma = has_tma and low.key.shape[3] * low.key.dtype.itemsize % 16 == 0
    constants = PortableConstants(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        tuning=config,
        high_form=high.key_format.name,
        high_format=recipe.high,
        low_form=low.key_format.name if has_low else "none",
        low_q_format=recipe.query_low,
        low_k_format=recipe.key_low,
        low_shared=recipe.query_shared_scale,
        low_value_form=low.value_format.name,
        rounding=recipe.scale_rounding,
        rotate=recipe.rotate,
        is_causal=geometry.is_causal,
        is_pv_fp8=recipe.pv != UNQUANTIZED,
        use_tma=use_tma,
        use_raw_tma=use_raw_tma,
    )
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    k_desc = v_desc = k_low_desc = v_low_desc = low.key  # unused without TMA
    if use_raw_tma:
        if high.key_format is RAW:
            k_desc = TensorDescriptor(high.key, *head_blocks(high.key, config.high_block_n, constants.block_d))
        v_desc = TensorDescriptor(high.value, *head_blocks(high.value, config.high_block_n, constants.block_dv))
        if has_low and low.value_format.is_16_bit:
            v_low_desc = TensorDescriptor(low.value, *head_blocks(low.value, config.block_n, constants.block_dv))
    if use_tma and has_low:
        if low.key_format.scale is not Scale.BLOCK:
            k_low_desc = TensorDescriptor(low.key, *matrix_blocks(low.key, config.block_n, constants.block_d))
        if not low.value_format.is_16_bit:
            v_low_desc = TensorDescriptor(low.value, *matrix_blocks(low.value, constants.block_dv, config.block_n))
    blocks = geometry.query_blocks(q_len, config.block_m, config.block_m)
    padded = [operand.key.shape[2] for operand in (high, low) if operand.key_format is not RAW]
    storage_len = padded[0] if padded else TILE  # unused without tile-padded storage
    mask = Strided.of(None)
    if geometry.mask is not None:
        mask = Strided(geometry.mask.view(torch.uint8), *broadcast_strides(geometry.mask))
    launch_kernel(
        prefill_kernel, {"CONFIG": constants}, (blocks * q_heads * batch, 1, 1),
        Strided.of(query), Strided.of(high.key), Strided.of(high.value), Strided.of(inputs.out), mask,
        low.key, low.value, high.key_scale, low.key_scale,
        high.key_descale, low.key_descale, low.value_descale,
        inputs.operands.query_global_scale, inputs.operands.key_mean,
        k_desc, v_desc, k_low_desc, v_low_desc, inputs.lse, inputs.sinks, inputs.tile_counts, geometry.seq_info,
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len,
        low.value.shape[2], storage_len, blocks,
        inputs.swizzle_group, inputs.kv_rows,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles if has_low else ALL_TILES,
        recipe.exact_tiles(is_causal=geometry.is_causal),
        inputs.softcap, inputs.logit_scale, inputs.skip_threshold, **options,
    )  # fmt: skip
