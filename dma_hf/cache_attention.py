"""Attention to a cache layer: to a first prompt as it came, and to what the layer holds from then on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dma_kernels import Recipe, attention
from dma_kernels.cache.api import cached_attention
from dma_kernels.numerics.formats import TILE
from torch import Tensor

from .cache_layers import DECODED_AT_ONCE, DMALayer
from .cache_step import Step
from .compact_mask import MaskGeometry

_CHANGED = (
    "the attention mask hides keys that it showed before, or shows padding that it hid, which a static cache cannot "
    "follow in a step of decoding; use DMACache(config) without max_cache_len, or keep the mask"
)


def attend(
    layer: DMALayer,
    new: Step,
    query: Tensor,
    geometry: MaskGeometry,
    recipe: Recipe,
    tile_counts: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the attention of ``[B, Hq, T, D]`` queries to a layer, and store what came with them.

    Args:
        layer: The layer.
        new: Its update.
        query: The queries.
        geometry: What the mask says.
        recipe: The precisions of a first prompt.
        tile_counts: Where a first prompt adds its counts of skipped tiles.
        options: Further arguments of :func:`dma_kernels.attention`.

    Raises:
        ValueError: Something of the call is not valid; the new keys are dropped then, and the cache is as it was.
    """
    layer.pending = None  # whatever happens now, it is not pending any more
    prompt = layer.owner.prompt_length
    if new.is_first and prompt is not None and prompt < query.shape[2]:
        return _attend_with_candidates(layer, new, prompt, query, geometry, recipe, tile_counts, **options)
    if new.is_first and (not new.is_stored or query.shape[2] > TILE or prompt is not None):
        pattern = geometry.pattern
        length = new.key.shape[2]
        if pattern is not None and pattern.shape[3] > 1:
            pattern = pattern[..., :length]
        # What else the mask of a static cache hides is not there yet.
        is_seen = geometry.is_unpadded and length <= geometry.q_len
        out: Tensor = attention(
            query,
            new.key,
            new.value,
            recipe,
            is_causal=geometry.is_causal,
            window=geometry.window,
            q_offset=geometry.kv_offset,
            kv_offset=geometry.kv_offset,
            kv_range=None if is_seen else geometry.kv_range,
            mask=pattern,
            tile_counts=tile_counts,
            **options,
        )
        if not new.is_stored:
            layer.settle(new, geometry)
            layer.store(new)
        return out
    if new.is_stored and query.shape[2] > TILE:
        raise ValueError(
            f"{query.shape[2]} queries came to keys that another layer has stored already; where layers share keys "
            f"give a prompt as a whole, or in chunks of at most {TILE} tokens"
        )
    if not new.is_stored:
        layer.settle(new, geometry)
        layer.make_room(new.key.shape[2])
    mask = _mask(layer, new, geometry)
    out = cached_attention(
        query,
        None if new.is_stored else new.key,
        None if new.is_stored else new.value,
        layer.storage,
        is_causal=geometry.is_causal,
        window=geometry.window or layer.window,
        mask=mask,
        mask_position=None if mask is None else layer.position_of(new),
        **options,
    )
    if not new.is_stored:
        layer.count(new)
    return out


def _attend_with_candidates(
    layer: DMALayer,
    new: Step,
    prompt: int,
    query: Tensor,
    geometry: MaskGeometry,
    recipe: Recipe,
    tile_counts: Tensor | None,
    **options: Any,
) -> Tensor:
    """Attend to a first call whose tokens after the prompt are candidates, as to the prompt and a step of decoding."""
    is_offloading, layer.is_offloading = layer.is_offloading, False
    outputs = []
    for part in (slice(0, prompt), slice(prompt, query.shape[2])):
        step = replace(new, key=new.key[:, :, part], value=new.value[:, :, part], is_first=part.start == 0)
        if not isinstance(layer.tokens, Tensor):
            step.kv_len = part.stop
        pattern = geometry.pattern
        if pattern is not None:
            pattern = pattern if pattern.shape[2] == 1 else pattern[:, :, part]
            pattern = pattern if pattern.shape[3] == 1 else pattern[..., : step.kv_len]
        seen = replace(geometry, q_len=part.stop - part.start, q_offset=geometry.q_offset + part.start, pattern=pattern)
        layer.is_offloading = is_offloading and part.start > 0
        outputs.append(attend(layer, step, query[:, :, part], seen, recipe, tile_counts, **options))
    new.is_stored = True
    return torch.cat([out.transpose(1, 2) for out in outputs], 1).transpose(1, 2)


def _mask(layer: DMALayer, new: Step, geometry: MaskGeometry) -> Tensor | None:
    """Return what the mask hides beyond what positions say, boolean ``[B, H, T, kv_len]``; mostly ``None``."""
    hidden, visible = geometry.pattern, geometry.kv_range
    if visible is None or (hidden is None and _is_plain(layer, new, visible)):
        return hidden
    index = torch.arange(new.kv_len, device=visible.device)
    seen = ((index >= visible[:, :1]) & (index < visible[:, 1:]))[:, None, None]
    return seen if hidden is None else seen & hidden


def _is_plain(layer: DMALayer, new: Step, visible: Tensor) -> bool:
    """Return whether a range of visible keys, integer ``[B, 2]``, is all of the row's keys.

    That waits for the device, so all layers of a step share one answer: the mask of the step was made a moment
    before the first of them, and waited too. A static cache does not wait in a step of decoding: the device raises, in
    the first layer.
    """
    is_static = isinstance(layer.tokens, Tensor)
    length = new.key.shape[2]
    is_awaited = not (torch.compiler.is_compiling() or (is_static and visible.is_cuda and length <= DECODED_AT_ONCE))
    known = None if is_static else layer.owner.plain
    if known is not None and known[0] is visible:
        return known[1]
    if not is_awaited and not layer.checks_steps:
        return True
    start = layer.position_of(new)
    end = layer.tokens + (0 if new.is_stored else length) - new.kv_offset
    is_whole = (visible[:, 0] == (-start).clamp(min=0)) & (visible[:, 1] == end)
    is_whole = (is_whole | (start + end <= 0)).all()
    if not is_awaited:
        torch._assert_async(is_whole, _CHANGED)
        return True
    is_plain = bool(is_whole)
    layer.owner.plain = visible, is_plain
    return is_plain
