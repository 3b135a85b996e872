"""Host side of the portable prefill kernel."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics.formats import TILE, UNQUANTIZED, SharedScale, padded_channels
from ..numerics.geometry import LOG2_E, PrefillGeometry
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime.descriptors import head_strides, is_describable
from ..runtime.launch import Launcher, matrix_descriptor
from ..runtime.operand_formats import DEQUANTIZED, RAW, OperandFormat, Scale
from .config import PortableConfig, select_swizzle_group
from .kernel import prefill_kernel
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
    is_early: bool,
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
        is_early: Not used: this kernel starts after all earlier work.
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
    constants = _constants(
        query.shape[1], kv_heads, head_dim, value_dim, recipe, config, use_tma, use_raw_tma,
        high.key_format, high.value_format, low.key_format, low.value_format,
        geometry.is_causal, operands.low is not None, rows is not None, geometry.window is not None,
        softcap is not None, sinks is not None, mask is not None, skip_threshold is not None, tile_counts is not None,
        operands.key_mean is not None,
        operands.query_factor is not None, high.key_factor is not None, low.key_factor is not None,
        low.value_factor is not None,
    )  # fmt: skip
    values = constants.values
    k_desc = v_desc = k_low_desc = v_low_desc = low.key  # unused without tensor copies
    if use_raw_tma:
        if high.key_format is RAW:
            k_desc = _head_descriptor(high.key, config.high_block_n, values["BLOCK_D"])
        v_desc = _head_descriptor(high.value, config.high_block_n, values["BLOCK_DV"])
        if operands.low is not None and low.value_format.is_16_bit:
            v_low_desc = _head_descriptor(low.value, config.block_n, values["BLOCK_DV"])
    if use_tma and operands.low is not None:
        if low.key_format.scale is not Scale.BLOCK:
            k_low_desc = matrix_descriptor(low.key, config.block_n, values["BLOCK_D"])
        if not low.value_format.is_16_bit:
            v_low_desc = matrix_descriptor(low.value, values["BLOCK_DV"], config.block_n)
    if rows is None:
        # Aligned blocks of positions that hold queries.
        start = geometry.q_offset
        blocks = (start + q_len - 1) // config.block_m - start // config.block_m + 1
    else:
        blocks = (q_len + config.block_m - 2) // config.block_m + 1
    all_heads = batch * kv_heads
    swizzle_group = select_swizzle_group(all_heads, low.head_bytes)
    constants.launcher(
        (blocks * q_heads * batch, 1, 1),
        query, high.key, high.value, low.key, low.value, high.key_scale, low.key_scale,
        high.key_factor, low.key_factor, low.value_factor, operands.query_factor, operands.key_mean,
        k_desc, v_desc, k_low_desc, v_low_desc,
        out, lse, sinks, tile_counts,
        None if mask is None else mask.view(torch.uint8), rows,
        *query.stride(), *high.key.stride(), *high.value.stride(), *out.stride()[:3], *_mask_strides(mask),
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len,
        high.key.shape[2], high.value.shape[2], low.value.shape[2], _storage_len(operands), blocks, swizzle_group,
        all_heads, geometry.window or 0,
        recipe.diagonal_tiles, recipe.sink_tiles,
        (softcap or 0.0) * LOG2_E, scale * LOG2_E, skip_threshold or 0.0, math.pow(hadamard_size(head_dim), -0.5),
    )  # fmt: skip


@dataclass(frozen=True)
class _Constants:
    """The kernel with its constexprs.

    Attributes:
        values: The constexprs by name.
        launcher: The kernel.
    """

    values: dict[str, Any]
    launcher: Launcher


@functools.lru_cache(maxsize=1024)
def _constants(
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
    has_rows: bool,
    has_window: bool,
    has_softcap: bool,
    has_sinks: bool,
    has_mask: bool,
    skips: bool,
    counts: bool,
    has_mean: bool,
    has_query_factor: bool,
    has_k_factor: bool,
    has_k_low_factor: bool,
    has_value_factor: bool,
) -> _Constants:
    is_packed = Scale.BLOCK in (high_key.scale, low_key.scale)
    # Block-scaled units take 64 channels at a time.
    smallest = 64 if is_packed else 0
    values: dict[str, Any] = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_H": config.high_block_n,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(smallest, padded_channels(head_dim)),
        "BLOCK_DV": padded_channels(value_dim),
        "M_SHIFT": config.block_m.bit_length() - 1,
        "H_SHIFT": config.high_block_n.bit_length() - 1,
        "N_SHIFT": config.block_n.bit_length() - 1,
        "HIGH_STAGES": config.high_stages,
        "LOW_STAGES": config.num_stages,
        "HIGH_FORM": high_key.name,
        "HIGH_FORMAT": recipe.high,
        "HIGH_LAYOUT": high_key.layout,
        "HIGH_VALUE_LAYOUT": high_value.layout,
        "LOW_FORM": low_key.name,
        "LOW_Q_FORMAT": recipe.query_low,
        "LOW_K_FORMAT": recipe.key_low,
        "LOW_LAYOUT": low_key.layout,
        # A tile's queries have a scale each.
        "LOW_SHARED": str(SharedScale.BLOCK if recipe.shared_scale == SharedScale.BLOCK else SharedScale.ROW),
        "LOW_VALUE_FORM": low_value.name,
        "LOW_VALUE_LAYOUT": low_value.layout,
        "ROUNDING": recipe.scale_rounding,
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": hadamard_size(head_dim),
        "IS_CAUSAL": is_causal,
        "HAS_LOW": has_low,
        "HAS_ROWS": has_rows,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "HAS_MASK": has_mask,
        "SKIPS": skips,
        "COUNTS": counts,
        "HAS_MEAN": has_mean,
        "HAS_QUERY_FACTOR": has_query_factor,
        "HAS_K_FACTOR": has_k_factor,
        "K_LOW_FACTOR": ("head" if low_key.scale is Scale.BLOCK else "tile") if has_k_low_factor else "none",
        "HAS_VALUE_FACTOR": has_value_factor,
        "IS_PV_FP8": recipe.pv != UNQUANTIZED,
        "STAGE_QUERIES": config.stage_queries and has_low and head_dim <= _staged_dim(low_key, value_dim),
        "USE_TMA": use_tma,
        "USE_RAW_TMA": use_raw_tma,
    }
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return _Constants(values, Launcher(prefill_kernel, values, **options))


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


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Return strides that broadcast the mask's dimensions of size 1."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
