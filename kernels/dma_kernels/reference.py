"""Reference attention in torch: the specification that every kernel is held against, and the CPU backend.

It follows the rule word for word and favours clarity over speed, but works in blocks of query rows, so that memory
grows linearly with the sequence length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import P_SCALE, TILE
from .geometry import AttentionGeometry
from .preparation import PreparedOperands, prepare_operands
from .quantize import to_e4m3
from .recipe import Recipe

SCORE_BYTES = 64 << 20
"""Target size of one block of fp32 scores; it sets the number of query rows in a block."""


@dataclass(frozen=True)
class _Call:
    """What the blocks of query rows share.

    Attributes:
        operands: Queries, keys and values.
        p_dtype: What probabilities are rounded to.
        visible: The keys of ``kv_range``, boolean ``[B, Tk]``; ``None`` for all.
        offsets: Positions of query 0 and key 0 in each batch row, on the host, so that no block waits for the device.
    """

    operands: PreparedOperands
    p_dtype: torch.dtype
    visible: Tensor | None
    offsets: frozenset[tuple[int, int]]


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
        the softmax denominator, fp32 (fp64 for fp64) ``[B, Hq, Tq]``. Sinks count in it: a row that sees no key has
        its sink logit there, and ``-inf`` without sinks.
    """
    keys, geometry = geometry.trimmed(key.shape[2])
    key, value = key[:, :, keys], value[:, :, keys]
    batch, q_heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty((batch, q_len, q_heads, value.shape[-1])).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=compute_dtype)
    if lse.numel() == 0:
        return out, lse
    visible = geometry.visible_keys(kv_len)
    call = _Call(
        operands=prepare_operands(query, key, value, recipe, kv_position=geometry.kv_position, visible=visible),
        p_dtype=value.dtype if recipe.pv == "bf16" else torch.float8_e4m3fn,
        visible=visible,
        offsets=frozenset(zip(geometry.q_position.tolist(), geometry.kv_position.tolist(), strict=True)),
    )
    if sinks is not None:
        sinks = sinks.to(compute_dtype).view(1, kv_heads, q_heads // kv_heads, 1, 1)
    rows = max(16, SCORE_BYTES // max(1, batch * q_heads * kv_len * 4))
    for start in range(0, q_len, rows):
        block = slice(start, min(start + rows, q_len))
        columns = _visible_columns(call, block, geometry, kv_len)
        q_pos = geometry.q_position[:, None] + torch.arange(block.start, block.stop, device=query.device)  # [B, R]
        k_pos = geometry.kv_position[:, None] + torch.arange(columns.start, columns.stop, device=query.device)  # [B, C]
        scores = _scores(call, block, columns, q_pos, k_pos, geometry.is_causal, recipe).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        hidden = _hidden(call, block, columns, q_pos, k_pos, geometry, kv_heads)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        block_out, block_lse = _softmax_times_value(scores, call, columns, sinks)
        out[:, :, block] = block_out.flatten(1, 2).to(out.dtype)
        lse[:, :, block] = block_lse.flatten(1, 2)
    return out, lse


def _visible_columns(call: _Call, block: slice, geometry: AttentionGeometry, kv_len: int) -> slice:
    """Return the smallest slice of key indices that holds every key visible to these queries by position alone."""
    low, high = 0, kv_len
    leads = [q - k for q, k in call.offsets]  # index of the key at the position of query 0
    first, last = min(leads) + block.start, max(leads) + block.stop - 1
    if geometry.is_causal:
        high = min(high, last + 1)
    elif geometry.window is not None:
        high = min(high, last + geometry.window + 1)
    if geometry.window is not None:
        low = first - (geometry.window - 1 if geometry.is_causal else geometry.window)
    low = min(max(low, 0), kv_len)
    return slice(low, max(high, low))


def _scores(
    call: _Call,
    block: slice,
    columns: slice,
    q_pos: Tensor,
    k_pos: Tensor,
    is_causal: bool,
    recipe: Recipe,
) -> Tensor:
    """Return unscaled scores ``[B, Hkv, G, R, C]``: low everywhere, then high in the columns that can be high."""
    operands = call.operands
    scores = _product(operands.q_low[:, :, block], operands.k_low[:, :, columns])
    if recipe.is_uniform:
        return scores
    q_tile = q_pos.div(TILE, rounding_mode="floor")[:, :, None]  # [B, R, 1]
    k_tile = k_pos.div(TILE, rounding_mode="floor")[:, None]  # [B, 1, C]
    newest = q_tile if is_causal else q_tile + recipe.diagonal_tiles
    for part in _high_columns(call, block, columns, is_causal, recipe):
        local = slice(part.start - columns.start, part.stop - columns.start)
        tile = k_tile[..., local]
        is_high = ((tile >= q_tile - recipe.diagonal_tiles) & (tile <= newest)) | (tile < recipe.sink_tiles)
        high = _product(operands.q_high[:, :, block], operands.k_high[:, :, part])
        scores[..., local] = torch.where(is_high[:, None, None], high, scores[..., local])
    return scores


def _high_columns(call: _Call, block: slice, columns: slice, is_causal: bool, recipe: Recipe) -> Iterator[slice]:
    """Yield disjoint slices of ``columns`` that hold every key that is high for some of these queries."""
    ahead = 0 if is_causal else recipe.diagonal_tiles
    sinks_end = max(recipe.sink_tiles * TILE - k for _, k in call.offsets)
    band_start = min(((q + block.start) // TILE - recipe.diagonal_tiles) * TILE - k for q, k in call.offsets)
    band_end = max(((q + block.stop - 1) // TILE + ahead + 1) * TILE - k for q, k in call.offsets)
    done = columns.start
    for start, end in ((0, sinks_end), (band_start, band_end)):
        part = slice(max(start, done), min(end, columns.stop))
        if part.start < part.stop:
            yield part
            done = part.stop


def _product(q: Tensor, k: Tensor) -> Tensor:
    """Return ``q k^T`` for grouped heads, ``[B, Hq, R, D] x [B, Hkv, C, D] -> [B, Hkv, G, R, C]``."""
    batch, q_heads, rows, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, (q_heads // kv_heads) * rows, head_dim)
    return (grouped @ k.transpose(-1, -2)).view(batch, kv_heads, q_heads // kv_heads, rows, k.shape[2])


def _hidden(
    call: _Call,
    block: slice,
    columns: slice,
    q_pos: Tensor,
    k_pos: Tensor,
    geometry: AttentionGeometry,
    kv_heads: int,
) -> Tensor | None:
    """Return what these queries may not see, broadcastable to ``[B, Hkv, G, R, C]``; ``None`` if they see it all."""
    q, k = q_pos[:, :, None], k_pos[:, None]
    parts = []  # [B, R, C]
    if geometry.is_causal:
        parts.append(k > q)
    elif geometry.window is not None:
        parts.append(k > q + geometry.window)
    if geometry.window is not None:
        parts.append(k <= q - geometry.window if geometry.is_causal else k < q - geometry.window)
    if call.visible is not None:
        parts.append(~call.visible[:, None, columns])
    parts = [part[:, None, None] for part in parts]
    if geometry.mask is not None:
        mask = geometry.mask
        rows = mask if mask.shape[2] == 1 else mask[:, :, block]
        cells = rows if mask.shape[3] == 1 else rows[..., columns]
        # [B, 1 or Hq, R, C] to [B, 1 or Hkv, 1 or G, R, C]
        split = (1, 1) if mask.shape[1] == 1 else (kv_heads, mask.shape[1] // kv_heads)
        parts.append(~cells.view(cells.shape[0], *split, *cells.shape[2:]))
    return functools.reduce(torch.logical_or, parts) if parts else None


def _softmax_times_value(scores: Tensor, call: _Call, columns: slice, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Hkv, G, R, Dv]`` and the log of the denominator ``[B, Hkv, G, R]``; spends ``scores``."""
    batch, kv_heads, group, rows, width = scores.shape
    operands = call.operands
    value = operands.value[:, :, columns]
    row_max = scores.amax(-1, keepdim=True) if width else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = scores.sub_(shift).exp_()
    denominator = weights.sum(-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks - shift)
    lse = (denominator.log() + shift).squeeze(-1)
    if operands.value_scale is None:
        weights = weights.to(call.p_dtype).to(value.dtype)
    else:
        weights = to_e4m3(weights.mul_(P_SCALE)).to(value.dtype)
    out = (weights.view(batch, kv_heads, group * rows, width) @ value).view(*scores.shape[:-1], value.shape[-1])
    if operands.value_scale is not None:
        out = out * (operands.value_scale[:, :, None] / P_SCALE)
    return out / denominator.masked_fill(denominator == 0, 1.0), lse
