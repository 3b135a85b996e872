"""Attention over a layer's cache in torch: the specification of the cached kernels, and the CPU backend.

What the cache holds is laid out densely, in the precisions of the rule, and given to the reference of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.formats import TILE, SharedScale
from ..numerics.geometry import AttentionGeometry
from ..reference.attention import attend
from ..reference.operands import PreparedOperands, cast, prepare_queries, smoothing_shift
from .codecs import Codec
from .storage import LayerStorage


def cached_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to stored and new keys. Nothing is stored: that is :meth:`LayerStorage.append`'s work, afterwards.

    Args:
        query: ``[B, Hq, Tq, D]``; the last one stands at the position of the last key.
        key: New keys, raw, ``[B, Hkv, Tk, D]``; ``Tk`` is ``Tq``, or 0 if they are stored already.
        value: New values, raw, ``[B, Hkv, Tk, Dv]``.
        storage: What came before.
        is_causal: Whether a query sees no key behind its own position.
        window: Sliding window, as for :func:`dma_kernels.attention`.
        scale: Factor of the scores.
        softcap: Cap of the scores.
        sinks: Sink logits, ``[Hq]``.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, K]``, over ``K`` consecutive positions.
        mask_position: Position that column 0 of ``mask`` stands for, integer ``[B]``.

    Returns:
        Output ``[B, Hq, Tq, Dv]`` and logarithm of the denominator ``[B, Hq, Tq]``, as ``attention_reference``.
    """
    results = []
    for rows, length, part in storage.groups():
        end = length + key.shape[2]
        oldest = 0 if window is None else max(0, end - query.shape[2] - window + 1)
        position, operands = _dense_operands(query[rows], key[rows], value[rows], part, length, oldest)
        batch, kv_len = len(query[rows]), operands.k_high.shape[2]
        ones = torch.ones(batch, dtype=torch.int64, device=query.device)
        geometry = AttentionGeometry(
            q_position=ones * (end - query.shape[2]),
            kv_position=ones * position,
            kv_range=torch.tensor([[0, max(end - position, 0)]], device=query.device).expand(batch, 2),
            is_causal=is_causal,
            window=window,
            mask=None if mask is None else _columns(mask, mask_position, rows, position, kv_len),
        )
        results.append(
            attend(operands, geometry, part.recipe, dtype=query.dtype, scale=scale, softcap=softcap, sinks=sinks)
        )
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def _dense_operands(
    query: Tensor, key: Tensor, value: Tensor, storage: LayerStorage, length: int, oldest: int
) -> tuple[int, PreparedOperands]:
    """Return the operands of rows of equal length, and the position of their first key.

    Args:
        query: ``[B, Hq, Tq, D]``.
        key: New keys ``[B, Hkv, T, D]``.
        value: New values ``[B, Hkv, T, Dv]``.
        storage: What is stored of these rows.
        length: How many keys that is.
        oldest: The first position that a query sees.
    """
    recipe, dtype = storage.recipe, query.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32)
    recent, new_keys, new_values = storage.recent(length, key, value)
    mean = storage.mean_with(length, new_keys)
    first = min(oldest // TILE * TILE, recent)
    past = recent - first

    # Raw where there are raw keys, which is in every tile that is high for some query; elsewhere zeros.
    keys, values = F.pad(new_keys, (0, 0, past, 0)), F.pad(new_values, (0, 0, past, 0))
    storage.overlay_raw(first, length, keys, values)
    k_high = cast(storage.transform(keys, mean), recipe.high, recipe, SharedScale.BLOCK, dtype)

    new_low = _through(storage.key_codec, storage.transform(new_keys, mean))
    k_low = torch.cat((storage.low_keys(first, recent), new_low), 2).to(compute_dtype)
    v_low = torch.cat((storage.low_values(first, recent), _through(storage.value_codec, new_values)), 2)
    v_low = v_low.to(compute_dtype)
    q_low, q_high = prepare_queries(query, recipe)
    is_fp8 = recipe.pv == "fp8"
    return first, PreparedOperands(
        q_low=q_low,
        q_high=q_high,
        k_low=k_low,
        k_high=k_high,
        v_high=values.to(compute_dtype),
        v_low=v_low,
        # The factors of E4M3 values are powers of two, multiplied into the values already.
        value_scale=v_low.new_ones((len(query), v_low.shape[1], 1, v_low.shape[3])) if is_fp8 else None,
        shift=smoothing_shift(query, mean[:, :, None].to(compute_dtype)) if recipe.smooth_k else None,
    )


def _through(codec: Codec, x: Tensor) -> Tensor:
    """Return ``[B, H, T, D]``, whose first row begins a tile, as a codec would hold it."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % TILE))
    tiles = padded.reshape(*x.shape[:2], padded.shape[2] // TILE, TILE, x.shape[3])
    return codec.decode(codec.encode(tiles)).flatten(2, 3)[:, :, : x.shape[2]]


def _columns(mask: Tensor, mask_position: Tensor | None, rows: slice, position: int, kv_len: int) -> Tensor:
    """Return the part of a mask that speaks of the keys from ``position`` on; what it does not speak of is hidden."""
    cells = mask if mask.shape[0] == 1 else mask[rows]
    if mask.shape[3] == 1:
        return cells
    assert mask_position is not None
    columns = []
    for row, start in enumerate(mask_position[rows].tolist()):
        own = cells[min(row, len(cells) - 1)][None]
        skipped = position - start
        part = own[..., max(skipped, 0) : max(skipped + kv_len, 0)]
        before = min(max(-skipped, 0), kv_len)
        columns.append(F.pad(part, (before, kv_len - before - part.shape[3]), value=False))
    return torch.cat(columns)
