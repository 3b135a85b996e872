"""Reference attention in torch: the specification that every kernel is tested against, and the CPU backend.

It favors clarity over speed, but works in blocks of query rows, so that memory grows linearly with the sequence length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics.call import AttentionCall
from ..numerics.formats import P_SCALE, TILE, TILE_SHIFT, UNQUANTIZED
from ..numerics.geometry import SKIP_BLOCK, AttentionGeometry
from ..numerics.quantize import to_e4m3
from ..numerics.recipe import Recipe
from ..numerics.tile_ranges import attended_start, attended_stop, first_band_tile, high_ranges
from .operands import PreparedOperands, prepare_operands
from .skipping import is_high_tile, skip_tiles

SCORE_BYTES = 64 << 20
"""Target size of one block of fp32 scores; it sets the number of query rows in a block."""

EXACT = Recipe(low=UNQUANTIZED, high=UNQUANTIZED)
"""Recipe without rounding, for the gradient."""

_HighPart = tuple[slice, Tensor]
"""Columns, and which pairs of query and key in them are high, boolean ``[B, 1, 1, R, C]``."""


@dataclass(frozen=True)
class _Problem:
    """The state of a call that all blocks of query rows share."""

    operands: PreparedOperands  # queries, keys and values
    geometry: AttentionGeometry  # positions and visibility
    recipe: Recipe  # for its band
    dtype: torch.dtype  # dtype of probabilities, except those of E4M3 values

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Positions of query 0 and key 0 in each batch row, int64 ``[B, 2]``."""
        query = self.operands.q_high
        return self.geometry.batch_info(len(query), query.device)[:, :2]

    @functools.cached_property
    def host_offsets(self) -> list[tuple[int, int]]:
        """:attr:`offsets` on the host, so that no block waits for the device."""
        return [(q, k) for q, k in self.offsets.tolist()]

    @functools.cached_property
    def visible(self) -> Tensor | None:
        """The visible keys, boolean ``[B, Tk]``; ``None`` for all."""
        return self.geometry.visible_keys()

    @functools.cached_property
    def has_broken_values(self) -> bool:
        """Whether a value is an infinity or a NaN, in either precision."""
        values = {id(x): x for x in (self.operands.v_high, self.operands.v_low)}
        return not all(bool(x.isfinite().all()) for x in values.values())

    def aligned_rows(self) -> list[list[int]]:
        """Group the batch rows whose query blocks and key tiles start at the same indices."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (q, k) in enumerate(self.host_offsets):
            groups.setdefault((q % SKIP_BLOCK, k % TILE), []).append(row)
        return list(groups.values())


def attention_reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Compute diagonal-tiled mixed-precision attention.

    Returns:
        Output ``[B, Hq, Tq, Dv]`` in the dtype of the query, 0 in rows that see no key; and the natural logarithm of
        the softmax denominator, fp32 (fp64 for fp64) ``[B, Hq, Tq]``. Sinks count in it: a row that sees no key has
        its sink logit there, and ``-inf`` without sinks.
    """
    recipe = call.recipe.of_high_tiles if call.is_short else call.recipe
    operands, geometry, _ = _prepare(call, recipe)
    return attend_prepared(
        operands, geometry, recipe, dtype=call.query.dtype, scale=call.score_scale, softcap=call.softcap,
        sinks=call.sinks, tile_counts=call.tile_counts,
    )  # fmt: skip


def _prepare(call: AttentionCall, recipe: Recipe) -> tuple[PreparedOperands, AttentionGeometry, slice]:
    """Return the operands and the geometry of the keys that some batch row sees, and the slice of these keys."""
    keys, geometry = AttentionGeometry.of(call, call.seq_info()).trimmed()
    operands = prepare_operands(
        call.query,
        call.key[:, :, keys],
        call.value[:, :, keys],
        recipe,
        kv_position=geometry.batch_info(len(call.key), call.key.device)[:, 1],
        visible=geometry.visible_keys(),
    )
    return operands, geometry, keys


def attend_prepared(
    operands: PreparedOperands,
    geometry: AttentionGeometry,
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile_counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of operands that already have their precisions.

    Invisible operands must be finite. ``recipe`` gives the band, ``pv`` and ``skip_threshold``; ``dtype`` is that of
    the output and of probabilities that are not in E4M3. Other arguments and results are those of
    :func:`attention_reference`.
    """
    batch, q_heads, q_len, _ = operands.q_high.shape
    kv_heads = operands.k_high.shape[1]
    compute_dtype = operands.q_high.dtype
    query = operands.q_high
    shape = batch, q_heads, q_len, operands.v_high.shape[-1]
    # Not a transposed view, which autograd would not let the caller change in place.
    out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=dtype, device=query.device)
    lse = query.new_empty((batch, q_heads, q_len))
    if lse.numel() == 0:
        return out, lse
    problem = _Problem(operands, geometry, recipe, dtype)
    skips = recipe.skip_threshold is not None and (recipe.skip_threshold < math.inf or tile_counts is not None)
    groups = problem.aligned_rows() if skips else []
    if len(groups) > 1:
        for rows in groups:
            out[rows], lse[rows] = attend_prepared(
                operands.of_rows(rows), geometry.of_rows(rows), recipe, dtype=dtype, scale=scale, softcap=softcap,
                sinks=sinks, tile_counts=tile_counts,
            )  # fmt: skip
        return out, lse
    if sinks is not None:
        sinks = sinks.to(compute_dtype).view(1, kv_heads, q_heads // kv_heads, 1, 1)
    for block, columns, high, masked in _blocks(problem, skips=skips):
        scores = _scores(problem, block, columns, high).mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if masked is not None:
            scores.masked_fill_(masked, -math.inf)
        if skips:
            q_pos, k_pos = _positions(problem, block, columns)
            skip_tiles(scores, q_pos, k_pos, recipe, is_causal=geometry.is_causal, tile_counts=tile_counts)
        block_out, block_lse = _softmax_times_value(scores, problem, columns, high, sinks)
        out[:, :, block] = _narrow(block_out.flatten(1, 2), out.dtype)
        lse[:, :, block] = block_lse.flatten(1, 2)
    return out, lse


def attention_gradient(grad_out: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradient of attention with a straight-through estimator (arXiv 1308.3432).

    Rounding has a gradient of 0 almost everywhere. So this differentiates the exact attention that a recipe
    approximates, in fp32 (fp64 for fp64), at the unquantized inputs. It is exact if nothing is quantized or skipped.

    Returns:
        The gradients of ``query``, ``key``, ``value`` and ``sinks`` in their dtypes, contiguous; 0 for keys that no
        query sees.
    """
    scale, softcap, sinks = call.score_scale, call.softcap, call.sinks
    operands, geometry, keys = _prepare(call, EXACT)
    q, k, v = operands.q_high, operands.k_high, operands.v_high
    batch, q_heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    logit = None if sinks is None else sinks.to(q.dtype).view(1, kv_heads, group, 1, 1)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    grad_sinks = None if logit is None else torch.zeros_like(logit)
    problem = _Problem(operands, geometry, EXACT, q.dtype)
    for block, columns, _, masked in _blocks(problem) if grad_out.numel() else ():
        scores = _product(q[:, :, block], k[:, :, columns]).mul_(scale)
        slope = None
        if softcap is not None:
            scores = scores.div_(softcap).tanh_()
            slope = 1.0 - scores.square()
            scores = scores.mul_(softcap)
        if masked is not None:
            scores.masked_fill_(masked, -math.inf)
        weights, shift = _exponentials(scores, logit)
        denominator = weights.sum(-1, keepdim=True)
        sink_weight = None if logit is None else torch.exp(logit - shift)
        if sink_weight is not None:
            denominator = denominator + sink_weight
        denominator = denominator.masked_fill(denominator == 0, 1.0)
        p = weights.div_(denominator)  # [B, Hkv, G, R, C]
        grad = grad_out[:, :, block].to(q.dtype)  # [B, Hq, R, Dv]
        grad_p = _product(grad, v[:, :, columns])
        mean = (grad_p * p).sum(-1, keepdim=True)
        if grad_sinks is not None and sink_weight is not None:
            grad_sinks -= (sink_weight / denominator * mean).sum((0, 3), keepdim=True)
        grad_v[:, :, columns] += _transposed_sum(p, grad)
        grad_s = grad_p.sub_(mean).mul_(p).mul_(scale)
        if slope is not None:
            grad_s.mul_(slope)
        grad_q[:, :, block] = _weighted_sum(grad_s, k[:, :, columns]).reshape(batch, q_heads, -1, head_dim)
        grad_k[:, :, columns] += _transposed_sum(grad_s, q[:, :, block])
    whole_k, whole_v = (x.new_zeros(x.shape) for x in (call.key, call.value))
    whole_k[:, :, keys], whole_v[:, :, keys] = grad_k, grad_v
    if sinks is not None and grad_sinks is not None:
        grad_sinks = grad_sinks.view(sinks.shape).to(sinks.dtype)
    return grad_q.to(call.query.dtype), whole_k, whole_v, grad_sinks


def _blocks(problem: _Problem, *, skips: bool = False) -> Iterator[tuple[slice, slice, list[_HighPart], Tensor | None]]:
    """Yield blocks of query rows: the rows, the columns that they see, which of these are high, and the mask.

    If tiles may be skipped, blocks end at multiples of 64 positions; batch rows are aligned.
    """
    batch, q_heads, q_len, _ = problem.operands.q_high.shape
    rows = max(16, SCORE_BYTES // max(1, batch * q_heads * problem.geometry.kv_len * 4))
    before = 0  # rows of the first block of 64 before query 0
    if skips:
        rows, before = max(rows // SKIP_BLOCK, 1) * SKIP_BLOCK, problem.host_offsets[0][0] % SKIP_BLOCK
    for start in range(-before, q_len, rows):
        block = slice(max(start, 0), min(start + rows, q_len))
        columns = _visible_columns(problem, block)
        q_pos, k_pos = _positions(problem, block, columns)
        high = [] if problem.recipe.is_uniform else list(_high_parts(problem, block, columns, q_pos, k_pos))
        yield block, columns, high, _masked(problem, block, columns, q_pos, k_pos)


def _positions(problem: _Problem, block: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the positions of rows ``[B, R]`` and of columns ``[B, C]``."""
    offsets = problem.offsets
    q_pos = offsets[:, :1] + torch.arange(block.start, block.stop, device=offsets.device)
    return q_pos, offsets[:, 1:] + torch.arange(columns.start, columns.stop, device=offsets.device)


def _visible_columns(problem: _Problem, block: slice) -> slice:
    """Return the smallest slice of key indices that holds every key visible to these queries by position alone."""
    geometry = problem.geometry
    leads = [q - k for q, k in problem.host_offsets]  # index of the key at the position of query 0
    first, last = min(leads) + block.start, max(leads) + block.stop - 1
    low = min(attended_start(first, 0, geometry.window, geometry.is_causal), geometry.kv_len)
    return slice(low, max(attended_stop(last, geometry.kv_len, geometry.window, geometry.is_causal), low))


def _scores(problem: _Problem, block: slice, columns: slice, high: list[_HighPart]) -> Tensor:
    """Return unscaled scores ``[B, Hkv, G, R, C]``: low everywhere, replaced by high ones where the rule says so."""
    operands = problem.operands
    scores = _product(operands.q_low[:, :, block], operands.k_low[:, :, columns])
    for part, is_high in high:
        local = slice(part.start - columns.start, part.stop - columns.start)
        scores_high = _product(operands.q_high[:, :, block], operands.k_high[:, :, part])
        scores[..., local] = torch.where(is_high, scores_high, scores[..., local])
    if operands.qk_bias is not None:
        kv_heads, group = scores.shape[1:3]
        qk_bias = operands.qk_bias[:, :, block]
        scores += qk_bias.reshape(len(qk_bias), kv_heads, group, -1, 1)
    return scores


def _high_parts(problem: _Problem, block: slice, columns: slice, q_pos: Tensor, k_pos: Tensor) -> Iterator[_HighPart]:
    """Yield disjoint slices of ``columns`` with every high key of these queries, and which pairs are high."""
    q_tile = q_pos.div(TILE, rounding_mode="floor")[:, :, None]  # [B, R, 1]
    k_tile = k_pos.div(TILE, rounding_mode="floor")[:, None]  # [B, 1, C]
    for part in _high_columns(problem, block, columns):
        tile = k_tile[..., part.start - columns.start : part.stop - columns.start]
        yield part, is_high_tile(q_tile, tile, problem.recipe, is_causal=problem.geometry.is_causal)[:, None, None]


def _high_columns(problem: _Problem, block: slice, columns: slice) -> Iterator[slice]:
    """Yield disjoint slices of ``columns`` that hold every key that is high for some of these queries."""
    recipe, is_causal = problem.recipe, problem.geometry.is_causal
    exact_tiles = recipe.exact_tiles(is_causal=is_causal)
    ranges = []
    for q, k in problem.host_offsets:
        found = high_ranges(
            first_band_tile((q + block.start) // TILE, recipe.diagonal_tiles, exact_tiles),
            (q + block.stop - 1) // TILE, columns.start + k, columns.stop + k,
            recipe.diagonal_tiles, recipe.sink_tiles, 0, TILE_SHIFT, is_causal,
        )  # fmt: skip
        ranges.append([position - k for position in found])
    sinks_start, _, band_start, _ = map(min, zip(*ranges, strict=True))
    _, sinks_stop, _, band_stop = map(max, zip(*ranges, strict=True))
    done = columns.start
    for start, end in ((sinks_start, sinks_stop), (band_start, band_stop)):
        part = slice(max(start, done), min(end, columns.stop))
        if part.start < part.stop:
            yield part
            done = part.stop


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the dtype of both, also under autocast, which would round them to 16 bits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype; finite numbers stay finite, also those that FP8 values round up beyond fp16."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        x = torch.where(x.isfinite(), x.clamp(-limit, limit), x)
    return x.to(dtype)


def _product(q: Tensor, k: Tensor) -> Tensor:
    """Return ``q k^T`` for grouped heads, ``[B, Hq, R, D] x [B, Hkv, C, D] -> [B, Hkv, G, R, C]``."""
    return _weighted_sum(torch.unflatten(q, 1, (k.shape[1], q.shape[1] // k.shape[1])), k.mT)


def _masked(problem: _Problem, block: slice, columns: slice, q_pos: Tensor, k_pos: Tensor) -> Tensor | None:
    """Return which keys these queries do not attend to, broadcastable to ``[B, Hkv, G, R, C]``; ``None`` for none."""
    geometry, kv_heads = problem.geometry, problem.operands.k_high.shape[1]
    q, k = q_pos[:, :, None], k_pos[:, None]
    parts = []  # [B, R, C]
    if geometry.is_causal:
        parts.append(k > q)
    elif geometry.window is not None:
        parts.append(k > q + geometry.window)
    if geometry.window is not None:
        parts.append(k <= q - geometry.window if geometry.is_causal else k < q - geometry.window)
    if problem.visible is not None:
        parts.append(~problem.visible[:, None, columns])
    parts = [part[:, None, None] for part in parts]
    if geometry.mask is not None:
        mask = geometry.mask
        rows = mask if mask.shape[2] == 1 else mask[:, :, block]
        cells = rows if mask.shape[3] == 1 else rows[..., columns]
        # [B, 1 or Hq, R, C] to [B, 1 or Hkv, 1 or G, R, C]
        split = (1, 1) if mask.shape[1] == 1 else (kv_heads, mask.shape[1] // kv_heads)
        parts.append(~cells.view(cells.shape[0], *split, *cells.shape[2:]))
    return functools.reduce(torch.logical_or, parts) if parts else None


def _softmax_times_value(
    scores: Tensor, problem: _Problem, columns: slice, high: list[_HighPart], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, Hkv, G, R, Dv]`` and the log of the denominator ``[B, Hkv, G, R]``; reuses ``scores``."""
    operands = problem.operands
    weights, shift = _exponentials(scores, None)
    denominator = weights.sum(-1, keepdim=True)
    numerator: float | Tensor = 1.0
    if sinks is not None:
        # Sinks come last: relative to a dominant sink logit, probabilities would underflow in E4M3.
        # In a row that sees no key, the sink logit may be so low that its exponential underflows.
        row_max = torch.where(denominator == 0, sinks.clamp(min=torch.finfo(sinks.dtype).min), shift)
        shift = torch.maximum(row_max, sinks)
        numerator = torch.exp(row_max - shift)
        denominator = denominator * numerator + torch.exp(sinks - shift)
    lse = (denominator.log() + shift).squeeze(-1)
    rounded = weights.to(problem.dtype).to(weights.dtype)
    v_low, v_high = operands.v_low, operands.v_high
    if problem.has_broken_values:
        v_low, v_high = (x.masked_fill(~x.isfinite(), 0.0) for x in (v_low, v_high))
    v_low = v_low[:, :, columns]
    if operands.v_low is operands.v_high:
        out = _weighted_sum(rounded, v_low)
    else:
        descale: float | Tensor = 1.0
        low = rounded.clone()
        if operands.value_scale is not None:
            descale = operands.value_scale[:, :, None] / P_SCALE
            low = to_e4m3(weights * P_SCALE).to(rounded.dtype)
        for part, is_high in high:
            low[..., part.start - columns.start : part.stop - columns.start].masked_fill_(is_high, 0.0)
        out = _weighted_sum(low, v_low) * descale
        for part, is_high in high:
            own = rounded[..., part.start - columns.start : part.stop - columns.start].masked_fill(~is_high, 0.0)
            out = out + _weighted_sum(own, v_high[:, :, part])
    if problem.has_broken_values:
        out = out + _broken_values(weights > 0, problem, columns, high)
    return out * numerator / denominator.masked_fill(denominator == 0, 1.0), lse


def _broken_values(seen: Tensor, problem: _Problem, columns: slice, high: list[_HighPart]) -> Tensor:
    """Return the infinities and NaNs that the queries attend to, and zeros elsewhere.

    They are kept out of the products, where a weight of 0 would not hide them. So masked keys stay hidden, and a query
    for which a tile is high does not get the NaN of its low precision.

    ``seen`` says which keys have a weight, ``[B, Hkv, G, R, C]``.
    """
    operands = problem.operands
    is_low = seen.clone()
    parts = [(columns, is_low, operands.v_low)]
    if operands.v_low is not operands.v_high:
        for part, is_high in high:
            local = slice(part.start - columns.start, part.stop - columns.start)
            is_low[..., local].masked_fill_(is_high, False)
            parts.append((part, seen[..., local] & is_high, operands.v_high))
    total = operands.v_high.new_zeros(())
    for part, reaches, value in parts:
        value = value[:, :, part]
        for number, is_there in (
            (math.inf, value == math.inf),
            (-math.inf, value == -math.inf),
            (math.nan, value != value),
        ):
            count = _weighted_sum(reaches.to(value.dtype), is_there.to(value.dtype))
            total = total + torch.where(count > 0, number, 0.0)
    return total


def _exponentials(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``exp(scores - shift)`` and the finite shift of each row, ``[B, Hkv, G, R, 1]``; reuses ``scores``."""
    empty = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    row_max = scores.amax(-1, keepdim=True) if scores.shape[-1] else empty
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks)
    shift = row_max.masked_fill(row_max == -math.inf, 0.0)
    return scores.sub_(shift).exp_(), shift


def _transposed_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Sum over the queries of a group, ``[B, Hkv, G, R, C] x [B, Hq, R, N] -> [B, Hkv, C, N]``."""
    grouped = torch.unflatten(x, 1, weights.shape[1:3])
    return _matmul(weights.flatten(2, 3).mT, grouped.flatten(2, 3))


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Return ``weights @ value`` for grouped heads, ``[B, Hkv, G, R, C] x [B, Hkv, C, Dv] -> [B, Hkv, G, R, Dv]``."""
    return torch.unflatten(_matmul(weights.flatten(2, 3), value), 2, weights.shape[2:4])
