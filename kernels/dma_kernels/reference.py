"""Reference attention in torch: the specification that every kernel is held against, and the CPU backend.

It follows the rule word for word and favours clarity over speed, but works in blocks of query rows, so that memory
grows linearly with the sequence length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import P_SCALE, TILE, UNQUANTIZED, SharedScale
from .quantize import quantize, to_e4m3, value_scale
from .recipe import Recipe
from .transforms import hadamard_rotate, key_mean

SCORE_BYTES = 64 << 20
"""Target size of one block of fp32 scores; it sets the number of query rows in a block."""


@dataclass(frozen=True)
class AttentionGeometry:
    """Which key each query may see, and where both stand in the sequence.

    Positions are counted from the first key that a batch row may see, so that a left-padded row is computed as it
    would be alone.

    Attributes:
        q_position: Position of query 0, int64 ``[B]``.
        kv_position: Position of key 0, int64 ``[B]``; negative where the row is left-padded.
        kv_range: First visible key and the one past the last, as indices, int64 ``[B, 2]``.
        is_causal: Whether a query sees no key behind its own position.
        window: Sliding window, the model's own: causal, a query sees its own position and the ``window - 1`` before
            it; bidirectional, those at a distance of at most ``window``.
        mask: Boolean, broadcastable to ``[B, H, Tq, Tk]``; true where a query may see a key. It adds to the rest.
    """

    q_position: Tensor
    kv_position: Tensor
    kv_range: Tensor
    is_causal: bool
    window: int | None = None
    mask: Tensor | None = None

    def visible_keys(self, kv_len: int) -> Tensor | None:
        """Return which keys of ``kv_range`` are in it, boolean ``[B, Tk]``; ``None`` if that is all of them."""
        start, end = self.kv_range[:, :1], self.kv_range[:, 1:]
        index = torch.arange(kv_len, device=start.device)
        visible = (index >= start) & (index < end)
        return None if bool(visible.all()) else visible


@dataclass(frozen=True)
class _Operands:
    """Queries and keys in both precisions, values, and what scales the product of probabilities and values."""

    q_low: Tensor
    q_high: Tensor
    k_low: Tensor
    k_high: Tensor
    value: Tensor
    value_scale: Tensor | None


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: AttentionGeometry,
    recipe: Recipe,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute diagonal-tiled mixed-precision attention.

    Args:
        query: ``[B, Hq, Tq, D]``, floating point.
        key: ``[B, Hkv, Tk, D]``, the same dtype; ``Hkv`` divides ``Hq``.
        value: ``[B, Hkv, Tk, Dv]``, the same dtype.
        geometry: Visibility and positions.
        recipe: The precision of every tile.
        scale: Factor of the scores.
        softcap: Caps scores smoothly: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``, that takes part in the softmax and has no value.

    Returns:
        Output ``[B, Hq, Tq, Dv]`` in the dtype of ``query``, 0 in rows that see no key; and the natural logarithm of
        the softmax denominator, sinks included, fp32 (fp64 for fp64) ``[B, Hq, Tq]``, ``-inf`` in such rows.
    """
    batch, q_heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group = q_heads // kv_heads
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    operands = _prepare(query, key, value, geometry, recipe)
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    lse = torch.empty((batch, q_heads, q_len), dtype=compute_dtype, device=query.device)
    rows = max(16, SCORE_BYTES // max(1, batch * q_heads * kv_len * 4))
    for start in range(0, q_len, rows):
        block = slice(start, min(start + rows, q_len))
        q_pos = geometry.q_position[:, None] + torch.arange(block.start, block.stop, device=query.device)  # [B, R]
        columns = _visible_columns(q_pos, geometry, kv_len)
        scores = _scores(operands, block, columns, q_pos, geometry, recipe) * scale  # [B, Hkv, G, R, C]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mask = _mask(block, columns, q_pos, geometry, kv_heads)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        block_sinks = None if sinks is None else sinks.to(compute_dtype).view(1, kv_heads, group, 1, 1)
        block_out, block_lse = _softmax_times_value(scores, operands, columns, block_sinks, recipe.pv)
        out[:, :, block] = block_out.flatten(1, 2).to(out.dtype)
        lse[:, :, block] = block_lse.flatten(1, 2)
    return out, lse


def _prepare(query: Tensor, key: Tensor, value: Tensor, geometry: AttentionGeometry, recipe: Recipe) -> _Operands:
    """Transform and quantise. Keys and values that no query may see count as zeros."""
    visible = geometry.visible_keys(key.shape[-2])
    if visible is not None:
        key = key.masked_fill(~visible[:, None, :, None], 0.0)
        value = value.masked_fill(~visible[:, None, :, None], 0.0)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    q, k = query.to(compute_dtype), key.to(compute_dtype)
    if recipe.smooth_k:
        k = k - key_mean(key, visible)
        if visible is not None:
            k = k.masked_fill(~visible[:, None, :, None], 0.0)
    if recipe.rotate:
        q, k = hadamard_rotate(q), hadamard_rotate(k)

    def cast(x: Tensor, format: str, is_low: bool, is_key: bool) -> Tensor:
        if format == UNQUANTIZED:
            return x.to(query.dtype).to(compute_dtype)
        shared = SharedScale(recipe.shared_scale) if is_low else SharedScale.BLOCK
        if shared is SharedScale.TILE and not is_key:
            shared = SharedScale.ROW
        quantized = quantize(
            x, format, scale_rounding=recipe.scale_rounding, shared_scale=shared, tile_offset=geometry.kv_position
        )
        return quantized.dequantize().to(compute_dtype)

    scale = None
    if recipe.pv == "fp8":
        scale = value_scale(value)
        value = to_e4m3(value.float() / scale)
    return _Operands(
        q_low=cast(q, recipe.query_low, is_low=True, is_key=False),
        q_high=cast(q, recipe.high, is_low=False, is_key=False),
        k_low=cast(k, recipe.key_low, is_low=True, is_key=True),
        k_high=cast(k, recipe.high, is_low=False, is_key=True),
        value=value,
        value_scale=None if scale is None else scale.to(compute_dtype),
    )


def _visible_columns(q_pos: Tensor, geometry: AttentionGeometry, kv_len: int) -> slice:
    """Return the smallest slice of key indices that holds every key visible to these queries by position alone."""
    low, high = 0, kv_len
    if q_pos.numel() and kv_len:
        last = (q_pos[:, -1] - geometry.kv_position).amax()
        first = (q_pos[:, 0] - geometry.kv_position).amin()
        if geometry.is_causal:
            high = min(high, int(last) + 1)
        elif geometry.window is not None:
            high = min(high, int(last) + geometry.window + 1)
        if geometry.window is not None:
            reach = geometry.window - 1 if geometry.is_causal else geometry.window
            low = max(low, int(first) - reach)
    return slice(min(low, kv_len), max(high, min(low, kv_len)))


def _scores(
    operands: _Operands, block: slice, columns: slice, q_pos: Tensor, geometry: AttentionGeometry, recipe: Recipe
) -> Tensor:
    """Return unscaled scores ``[B, Hkv, G, R, C]``: low everywhere, then high in the columns that can be high."""
    scores = _product(operands.q_low[:, :, block], operands.k_low[:, :, columns])
    if recipe.is_uniform or scores.numel() == 0:
        return scores
    q_tile = q_pos.div(TILE, rounding_mode="floor")[:, :, None]  # [B, R, 1]
    k_index = torch.arange(columns.start, columns.stop, device=q_pos.device)
    k_tile = (geometry.kv_position[:, None] + k_index).div(TILE, rounding_mode="floor")[:, None]  # [B, 1, C]
    behind = q_tile if geometry.is_causal else q_tile + recipe.diagonal_tiles
    is_high = ((k_tile >= q_tile - recipe.diagonal_tiles) & (k_tile <= behind)) | (k_tile < recipe.sink_tiles)
    candidates = is_high.flatten(0, 1).any(0).nonzero().flatten()  # columns that are high for some row
    if candidates.numel() == 0:
        return scores
    k_high = operands.k_high[:, :, columns].index_select(2, candidates)
    high = _product(operands.q_high[:, :, block], k_high)
    chosen = torch.where(is_high[:, None, None, :, candidates], high, scores[..., candidates])
    return scores.index_copy(-1, candidates, chosen)


def _product(q: Tensor, k: Tensor) -> Tensor:
    """Return ``q k^T`` for grouped heads, ``[B, Hq, R, D] x [B, Hkv, C, D] -> [B, Hkv, G, R, C]``."""
    batch, q_heads, rows, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, (q_heads // kv_heads) * rows, head_dim)
    return (grouped @ k.transpose(-1, -2)).view(batch, kv_heads, q_heads // kv_heads, rows, k.shape[2])


def _mask(block: slice, columns: slice, q_pos: Tensor, geometry: AttentionGeometry, kv_heads: int) -> Tensor | None:
    """Return what these queries may see, broadcastable to ``[B, Hkv, G, R, C]``; ``None`` for everything."""
    index = torch.arange(columns.start, columns.stop, device=q_pos.device)
    start, end = geometry.kv_range[:, :1], geometry.kv_range[:, 1:]
    distance = q_pos[:, :, None] - (geometry.kv_position[:, None] + index)[:, None]  # [B, R, C]
    visible = ((index >= start) & (index < end))[:, None].expand_as(distance)
    if geometry.is_causal:
        visible = visible & (distance >= 0)
        if geometry.window is not None:
            visible = visible & (distance < geometry.window)
    elif geometry.window is not None:
        visible = visible & (distance.abs() <= geometry.window)
    result = visible[:, None, None]
    if geometry.mask is not None:
        mask = geometry.mask
        rows = mask if mask.shape[2] == 1 else mask[:, :, block]
        cells = (rows if mask.shape[3] == 1 else rows[..., columns]).contiguous()
        # [B, 1 or Hq, R, C] to [B, 1 or Hkv, 1 or G, R, C]
        split = (1, 1) if mask.shape[1] == 1 else (kv_heads, mask.shape[1] // kv_heads)
        result = result & cells.view(cells.shape[0], *split, *cells.shape[2:])
    return None if bool(result.all()) else result


def _softmax_times_value(
    scores: Tensor, operands: _Operands, columns: slice, sinks: Tensor | None, pv: str
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Hkv, G, R, Dv]`` and the log of the denominator ``[B, Hkv, G, R]`` of these rows."""
    batch, kv_heads, group, rows, width = scores.shape
    value = operands.value[:, :, columns]
    row_max = scores.amax(-1, keepdim=True) if width else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(scores - shift)
    denominator = weights.sum(-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - shift)
    lse = (denominator.log() + shift).squeeze(-1)
    weights = to_e4m3(weights * P_SCALE) if pv == "fp8" else weights.to(value.dtype)
    flat = weights.to(scores.dtype).view(batch, kv_heads, group * rows, width)
    out = (flat @ value.to(scores.dtype)).view(batch, kv_heads, group, rows, value.shape[-1])
    if operands.value_scale is not None:
        out = out * (operands.value_scale[:, :, None] / P_SCALE)
    return out / denominator.masked_fill(denominator == 0, 1.0), lse
