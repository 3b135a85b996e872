"""Queries, keys and values in the precisions of a recipe, in torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import NVFP4, UNQUANTIZED, SharedScale
from ..numerics.quantize import nvfp4_key_scale, quantize, value_scale, values_to_e4m3
from ..numerics.recipe import Recipe
from ..numerics.saturation import count_saturated
from ..numerics.transforms import hadamard_rotate, key_mean


@dataclass(frozen=True)
class PreparedOperands:
    """Dequantized operands of one call, ``[B, H, T, D]``, fp32 (fp64 for fp64)."""

    q_low: Tensor  # queries of low tiles; those of high tiles if the recipe is uniform
    q_high: Tensor  # queries of high tiles
    k_low: Tensor  # keys of low tiles; those of high tiles if the recipe is uniform
    k_high: Tensor  # keys of high tiles
    v_high: Tensor  # values of high tiles, unchanged
    # values of low tiles: the same tensor for ``pv = "bf16"``; for ``pv = "fp8"`` E4M3 numbers, without their scale
    v_low: Tensor
    value_scale: Tensor | None  # scale of E4M3 values, ``[B, Hkv, 1, Dv]``; ``None`` for ``pv = "bf16"``
    # what smoothing subtracted from every score of a query, ``[B, Hq, Tq]``; ``None`` without smoothing. It cancels in
    # a plain softmax, but not against sink logits, in a softcap or in the log of the denominator.
    qk_bias: Tensor | None

    def of_rows(self, rows: list[int]) -> PreparedOperands:
        """Return the operands of some batch rows; fields that share a tensor still share one."""
        named: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[int, Any] = {id(x): None if x is None else x[rows] for x in named.values()}
        return PreparedOperands(**{name: taken[id(x)] for name, x in named.items()})


def prepare_operands(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, kv_position: Tensor, visible: Tensor | None
) -> PreparedOperands:
    """Transform and quantize. Invisible keys and values become zeros.

    ``kv_position`` is the position of key 0, integer ``[B]``; ``visible`` are the visible keys, boolean ``[B, Tk]``, or
    ``None`` for all.
    """
    if visible is not None:
        key = key.masked_fill(~visible[:, None, :, None], 0.0)
        value = value.masked_fill(~visible[:, None, :, None], 0.0)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    k = key.to(compute_dtype)
    qk_bias = None
    if recipe.smooth_k:
        mean = key_mean(key, visible)
        qk_bias = smoothing_bias(query, mean)
        k = k - mean
        if visible is not None:
            k = k.masked_fill(~visible[:, None, :, None], 0.0)
    q = query.to(compute_dtype)
    if recipe.rotate:
        k, q = hadamard_rotate(k), hadamard_rotate(q)
    q_high = q_low = cast(q, recipe.high, recipe, SharedScale.BLOCK, query.dtype)
    k_scale = nvfp4_key_scale(k, recipe.scale_rounding, visible)
    k_high = cast(k, recipe.high, recipe, SharedScale.BLOCK, query.dtype, head_scale=k_scale)
    v_high = v_low = value.to(compute_dtype)
    v_scale = None
    if recipe.pv == "fp8":
        v_scale = value_scale(value, visible)
        coded = values_to_e4m3(value, v_scale)
        count_saturated(coded)
        v_low = coded.to(compute_dtype)
        v_scale = v_scale.to(compute_dtype)
    k_low = k_high
    if not recipe.is_uniform:
        q_low = cast(q, recipe.query_low, recipe, SharedScale(recipe.query_shared_scale), query.dtype)
        shared = SharedScale(recipe.shared_scale)
        k_low = cast(k, recipe.key_low, recipe, shared, query.dtype, kv_position, head_scale=k_scale)
    return PreparedOperands(q_low, q_high, k_low, k_high, v_high, v_low, v_scale, qk_bias)


def logit_error(query: Tensor, key: Tensor, recipe: Recipe, scale: float) -> Tensor:
    """Return the error of the logits of low tiles, in nats: its RMS over all pairs of a query and a key.

    The mean error of a query is left out, because the softmax ignores it. ``query`` is ``[B, Hq, Tq, D]``, ``key`` is
    ``[B, Hkv, Tk, D]``, and the result is fp32 (fp64 for fp64) ``[B, Hq]``.
    """
    position = torch.zeros(len(key), dtype=torch.int64, device=key.device)
    operands = prepare_operands(
        query, key, key, replace(recipe, pv=UNQUANTIZED), kv_position=position, visible=None
    )  # the values do not matter
    group = query.shape[1] // key.shape[1]

    def logits(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.repeat_interleave(group, 1).mT * scale

    dtype = operands.k_low.dtype
    error = logits(operands.q_low, operands.k_low) - logits(query.to(dtype), key.to(dtype))
    return (error - error.mean(-1, keepdim=True)).square().mean((-2, -1)).sqrt()


def smoothing_bias(query: Tensor, mean: Tensor) -> Tensor:
    """Return ``q . mean`` of queries ``[B, Hq, Tq, D]`` and means ``[B, Hkv, 1, D]``: ``[B, Hq, Tq]``."""
    group = query.shape[1] // mean.shape[1]
    return (query.to(mean.dtype) * mean.repeat_interleave(group, 1)).sum(-1)


def cast(
    x: Tensor,
    format: str,
    recipe: Recipe,
    shared: SharedScale,
    dtype: torch.dtype,
    position: int | Tensor = 0,
    head_scale: Tensor | None = None,
) -> Tensor:
    """Round ``[B, H, T, D]`` to a format; return fp32 (fp64 for a ``dtype`` of fp64).

    Args:
        x: Tensor to round.
        format: Name of the format; ``bf16`` rounds to ``dtype``, the model's.
        recipe: Gives the rounding of scales.
        shared: Which blocks share a scale.
        dtype: The model's dtype.
        position: Position of row 0, an int or integer ``[B]``; used if a tile shares a scale.
        head_scale: NVFP4's global scale of each head, ``[B, H, 1, 1]``; by default that of all rows.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    if format == UNQUANTIZED:
        return x.to(dtype).to(compute_dtype)
    quantized = quantize(
        x, format, scale_rounding=recipe.scale_rounding, shared_scale=shared, tile_offset=position,
        global_scale=head_scale if format == NVFP4.name else None,
    )  # fmt: skip
    return quantized.dequantize().to(compute_dtype)
