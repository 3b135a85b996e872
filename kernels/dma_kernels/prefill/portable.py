"""Host side of the portable prefill kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics.formats import TILE, UNQUANTIZED, SharedScale, padded_channels
from ..numerics.geometry import LOG2_E, PrefillGeometry
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.descriptors import Strided, head_strides, is_describable
from ..runtime.launch import Launcher, matrix_descriptor
from ..runtime.operand_formats import DEQUANTIZED, RAW, OperandFormat, Scale
from .config import PortableConfig, select_swizzle_group
from .kernel import PortableConstants, prefill_kernel
from .operands import Operands


def launch(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    recipe: Recipe,
    config: PortableConfig,
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
    """Launch the portable kernel.

    Args:
        query: ``[B, Hq, Tq, D]``, 16-bit, any strides.
        operands: Keys and values.
        geometry: Positions and visibility.
        recipe: Formats and band.
        config: Block sizes.
        out: Where the output goes, ``[B, Hq, Tq, Dv]``.
        lse: Where the log of the softmax denominator goes, fp32 ``[B, Hq, Tq]``.
        scale: Factor of the scores.
        softcap: Cap of the scores, or ``None``.
        sinks: ``[Hq]``, contiguous, or ``None``.
        skip_threshold: Of the recipe, in base-2 logits, or ``None``.
        tile_counts: Where skipped and examined tiles are added, int64 ``[Hq, 2]``, or ``None``.
        use_pdl: Not used: this kernel starts after all earlier work.
    """
    batch, q_heads, q_len, head_dim = query.shape
    high, low = operands.high, operands.low or operands.high
    assert high.value_format is RAW, "values of high tiles are the caller's own"
    assert low.value_format is not RAW or low.value is high.value, "the caller's values are those of high tiles"
    kv_heads = high.key.shape[1]
    value_dim = high.value.shape[3]
    rows, mask = geometry.rows, geometry.mask
    # A descriptor's rows start at multiples of 16 bytes.
    described = [high.value]
    described += [high.key] if high.key_format is RAW else []
    described += [low.value] if low.value_format.is_16_bit else []
    use_raw_tma = config.use_tma and all(map(is_describable, described))
    use_tma = config.use_tma and low.key.shape[3] * low.key.element_size() % 16 == 0
    constants, launcher = _launcher(
        query.shape[1], kv_heads, head_dim, value_dim, recipe, config, use_tma, use_raw_tma,
        high.key_format, high.value_format, low.key_format, low.value_format,
        geometry.is_causal, operands.low is not None, low.key_descale is not None,
    )  # fmt: skip
    k_desc = v_desc = k_low_desc = v_low_desc = low.key  # unused without tensor copies
    if use_raw_tma:
        if high.key_format is RAW:
            k_desc = _head_descriptor(high.key, config.high_block_n, constants.block_d)
        v_desc = _head_descriptor(high.value, config.high_block_n, constants.block_dv)
        if operands.low is not None and low.value_format.is_16_bit:
            v_low_desc = _head_descriptor(low.value, config.block_n, constants.block_dv)
    if use_tma and operands.low is not None:
        if low.key_format.scale is not Scale.BLOCK:
            k_low_desc = matrix_descriptor(low.key, config.block_n, constants.block_d)
        if not low.value_format.is_16_bit:
            v_low_desc = matrix_descriptor(low.value, constants.block_dv, config.block_n)
    if rows is None:
        # Aligned blocks of positions that hold queries.
        start = geometry.q_offset
        blocks = (start + q_len - 1) // config.block_m - start // config.block_m + 1
    else:
        blocks = (q_len + config.block_m - 2) // config.block_m + 1
    all_heads = batch * kv_heads
    swizzle_group = select_swizzle_group(all_heads, low.head_bytes)
    assert high.value.shape[2] == geometry.kv_len, "the caller's values are all there"
    mask_strides = () if mask is None else (0 if n == 1 else s for n, s in zip(mask.shape, mask.stride(), strict=True))
    launcher(
        (blocks * q_heads * batch, 1, 1),
        Strided.of(query), Strided.of(high.key), Strided.of(high.value), Strided.of(out),
        Strided.of(None) if mask is None else Strided(mask.view(torch.uint8), *mask_strides),
        low.key, low.value, high.key_scale, low.key_scale,
        high.key_descale, low.key_descale, low.value_descale, operands.query_global_scale, operands.key_mean,
        k_desc, v_desc, k_low_desc, v_low_desc, lse, sinks, tile_counts, rows,
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len,
        high.key.shape[2], low.value.shape[2], _storage_len(operands), blocks, swizzle_group, all_heads,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E, skip_threshold,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _launcher(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    recipe: Recipe,
    config: PortableConfig,
    use_tma: bool,
    use_raw_tma: bool,
    high_key: OperandFormat,
    high_value: OperandFormat,
    low_key: OperandFormat,
    low_value: OperandFormat,
    is_causal: bool,
    has_low: bool,
    has_low_descale: bool,
) -> tuple[PortableConstants, Launcher]:
    is_packed = Scale.BLOCK in (high_key.scale, low_key.scale)
    constants = PortableConstants(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        block_m=config.block_m,
        block_h=config.high_block_n,
        block_n=config.block_n,
        # Block-scaled units take 64 channels at a time.
        block_d=max(64 if is_packed else 0, padded_channels(head_dim)),
        block_dv=padded_channels(value_dim),
        high_stages=config.high_stages,
        low_stages=config.num_stages,
        high_form=high_key.name,
        high_format=recipe.high,
        high_layout=high_key.layout,
        high_value_layout=high_value.layout,
        low_form=low_key.name,
        low_q_format=recipe.query_low,
        low_k_format=recipe.key_low,
        low_layout=low_key.layout,
        # A tile's queries have a scale each.
        low_shared=str(SharedScale.BLOCK if recipe.shared_scale == SharedScale.BLOCK else SharedScale.ROW),
        low_value_form=low_value.name,
        low_value_layout=low_value.layout,
        rounding=recipe.scale_rounding,
        rotate=recipe.rotate,
        hadamard_size=hadamard_size(head_dim),
        is_causal=is_causal,
        has_low=has_low,
        k_low_descale=("head" if low_key.scale is Scale.BLOCK else "tile") if has_low_descale else "none",
        is_pv_fp8=recipe.pv != UNQUANTIZED,
        stage_queries=config.stage_queries and has_low and head_dim <= _staged_dim(low_key, value_dim),
        use_tma=use_tma,
        use_raw_tma=use_raw_tma,
    )
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return constants, Launcher(prefill_kernel, {"CONFIG": constants}, **options)


def _staged_dim(key: OperandFormat, value_dim: int) -> int:
    """Return how many channels of a query in the format of low keys fit in its row of the output."""
    if key.scale is Scale.TILE:
        return 2 * value_dim
    return value_dim if key is DEQUANTIZED else 0


def _head_descriptor(tensor: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Describe ``[B, H, T, D]`` of any strides that :func:`is_describable`, copied in blocks of rows of a head."""
    return TensorDescriptor(tensor, list(tensor.shape), head_strides(tensor), [1, 1, block_rows, block_columns])


def _storage_len(operands: Operands) -> int:
    """Return the entries of tile-padded storage; one tile if there is none."""
    for tile_operands in (operands.low, operands.high):
        if tile_operands is not None:
            if not tile_operands.value_format.is_16_bit:
                return tile_operands.value.shape[2] * TILE
            if tile_operands.key_format.is_tile_padded:
                return tile_operands.key.shape[2]
    return TILE
