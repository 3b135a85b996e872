"""The attention function that Transformers calls for ``dma_mxfp``.

It reads the arguments of a layer's call and computes attention over plain tensors, or over a layer of a
:class:`~dma_hf.DMACache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from dma_kernels import Recipe, attention, attention_varlen
from dma_kernels.cache.api import cached_attention
from dma_kernels.numerics.formats import TILE
from torch import Tensor, nn
from transformers import AttentionInterface

from .cache_layers import DECODED_AT_ONCE, DMALayer
from .cached_states import Step, Update, update_of
from .logit_check import check_first_prompt
from .masks.geometry import GEOMETRY, CompactMask, MaskGeometry, keys_in
from .masks.layer_geometry import is_cross_attention, layer_geometry, select_keys, separate_documents
from .repeated_calls import Compute, LayerCall, cached_step, is_repeatable, let_repeat, prompt, repeat
from .stats import count_fallback, counted, tile_counts_of
from .support import Call, Refusal, autocast_dtype, find_unsupported, note_other_cache


def dma_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer. The interface is that of Transformers' ``AttentionInterface``.

    The numerics come from the ``dma_mxfp`` section of ``module.config``. Gradients pass straight through the rounding
    (:func:`dma_kernels.attention`). Keys and values from a ``DMACache`` get no gradients.

    Cross-attention has no diagonal, because queries and keys share no positions. All of its keys are in high precision.
    A layer is cross-attention if it is not causal and one of these holds:

    - Its ``is_cross_attention`` is true (GPT-2).
    - Its class name says so (BERT, DETR).
    - It is a non-causal layer of a decoder (BART, Whisper).
    - The numbers of queries and keys differ.

    Args:
        module: The layer. ``config``, ``is_causal``, ``training`` and the attributes above are read.
        query: ``[B, Hq, Tq, D]`` in bf16, fp16, fp32 or fp64. Autocast applies as it does to SDPA.
        key: ``[B, Hkv, Tk, D]``, where ``Hkv`` divides ``Hq``, or the result of ``DMACache.update``.
        value: ``[B, Hkv, Tk, Dv]``, or the result of ``DMACache.update``.
        attention_mask: ``None``, the result of :func:`dma_hf.masks.dma_mask`, or a 4-D mask broadcastable to
            ``[B, Hq, Tq, Tk]``. It is boolean (true is visible), or additive with zeros and large negative numbers.
        is_causal: Overrides ``module.is_causal``. Both are ignored if there is a mask.
        sliding_window: Window of the layer. It is ignored if there is a mask.
        indices: Keys that a sparse-attention indexer chose for each query (DeepSeek V3.2, GLM-5), integer
            ``[B, Tq, k]``. All other keys are hidden.
        kwargs: Further arguments of the model, see :meth:`dma_hf.support.Call.of`.

    Returns:
        ``[B, Tq, Hq, Dv]``, contiguous, and ``None`` in place of attention weights.

    Raises:
        TypeError: A tensor has an unsupported dtype.
        ValueError: A shape is wrong; the call is unsupported and ``on_unsupported`` is ``error``; or the ``dma_mxfp``
            section is invalid.
    """
    update = update_of(key, value)
    if type(attention_mask) is CompactMask and attention_mask.dma_calls and indices is None:
        asked = LayerCall(module, query, key, value, update, sliding_window, kwargs)
        again = repeat(asked, attention_mask)
        if again is not None:
            return again, None
    call = Call.of(module, **kwargs)
    if update is not None:
        update[0].pending = None  # also if the call fails
        _refuse_second_sequence(module, update[0])
        query = query.to(key.dtype)  # also under autocast: a cache keeps the dtype of its first keys
    elif (dtype := autocast_dtype(query)) is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries of a resampler
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    geometry, bias = layer_geometry(module, query, key, attention_mask, is_causal, sliding_window)
    if indices is not None:
        geometry, bias = select_keys(geometry, bias, indices)
    is_users_mask = attention_mask is not None and not hasattr(attention_mask, GEOMETRY)
    geometry = separate_documents(
        module, geometry, call.others, is_cached=update is not None, is_users_mask=is_users_mask
    )
    states = query, key, value
    refusal = find_unsupported(call, query, value, bias)
    if refusal is not None:
        return _fall_back(module, call, refusal, states, geometry, bias), None
    is_checked = False
    if not geometry.two_sequences and (update is None or update[1].is_first):
        start = key if update is None else update[1].key
        is_checked = check_first_prompt(module, call, query, start, geometry.kv_range)
    if geometry.documents is not None:
        return _attend_documents(module, call, states, geometry), None
    may_repeat = indices is None and not is_checked and is_repeatable(attention_mask)
    if update is not None and geometry.two_sequences:
        states, update = (query, *update[0].dense(update[1])), None
    if update is None:
        out, compute = _attend_plain(module, call, states, geometry, may_repeat)
    else:
        out, compute = _attend_cached(module, call, query, update, geometry, may_repeat)
    if compute is not None:
        asked = LayerCall(module, *states, update, sliding_window, kwargs)
        let_repeat(asked, attention_mask, call.settings.config.high_layers, compute)
    return out, None


def _refuse_second_sequence(module: nn.Module, layer: DMALayer) -> None:
    """Raise if a layer of a cache that holds keys of self-attention gets those of cross-attention, too."""
    if layer.is_settled and not getattr(module, "is_causal", True) and is_cross_attention(module, is_causal=False):
        raise ValueError(
            "an encoder-decoder needs a cache for each of its two kinds of attention; pass "
            "EncoderDecoderCache(DMACache(model.config), DynamicCache(config=model.config))"
        )


States = tuple[Tensor, Tensor, Tensor]
"""Queries ``[B, Hq, Tq, D]``, keys ``[B, Hkv, Tk, D]`` and values ``[B, Hkv, Tk, Dv]``."""


def _fall_back(
    module: nn.Module, call: Call, refusal: Refusal, states: States, geometry: MaskGeometry, bias: Tensor | None
) -> Tensor:
    """Run Transformers' SDPA attention for an unsupported call if the settings allow it, or else raise the error."""
    if call.settings.config.on_unsupported != "sdpa" or not refusal.sdpa_can:
        raise refusal.error()
    count_fallback(module, refusal.option, refusal.asked)
    sdpa: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]
    mask = geometry.dense(states[0].device) if bias is None or geometry.documents is not None else bias
    options = {"dropout": call.dropout, "scaling": call.scaling, "position_bias": call.position_bias}
    return sdpa(module, *states, mask, is_causal=False, **options)[0]


def _attend_plain(
    module: nn.Module, call: Call, states: States, geometry: MaskGeometry, may_repeat: bool
) -> tuple[Tensor, Compute | None]:
    """Compute a call over plain keys and values. Returns ``[B, T, Hq, Dv]``, and what repeats the call, if anything."""
    settings = call.settings
    if settings.config.cache is not None and geometry.is_causal and geometry.q_len == 1 < geometry.kv_len:
        positions = call.others.get("position_ids")  # of all new tokens, also where only the last is a query (Gemma 4)
        if positions is None or positions.shape[-1] == 1:
            note_other_cache(module, settings.config.cache)
    recipe = settings.cross_recipe if geometry.two_sequences else settings.recipe
    counts = tile_counts_of(module, states[0], recipe)
    if may_repeat and counts is None:
        compute = prompt(call, *states, geometry)
        if compute is not None:
            return compute(module, None, None, *states, call.sinks), compute
    options = geometry.arguments | call.options
    out, _ = counted(module, settings.name, "none", attention, *states, recipe, tile_counts=counts, **options)
    return out.transpose(1, 2).contiguous(), None


def _attend_cached(
    module: nn.Module, call: Call, query: Tensor, update: Update, geometry: MaskGeometry, may_repeat: bool
) -> tuple[Tensor, Compute | None]:
    """Compute a call over a cache layer. Returns ``[B, T, Hq, Dv]``, and what repeats the call, if anything."""
    (layer, step), recipe = update, call.settings.recipe
    counts = tile_counts_of(module, query, recipe)
    may_repeat = may_repeat and counts is None
    if may_repeat and step.is_first and not step.is_stored and layer.owner.prompt_length is None:
        states = query, step.key, step.value
        compute = prompt(call, *states, _of_prompt(geometry, step))
        if compute is not None:
            return compute(module, layer, step, *states, call.sinks), compute
    stored = (layer, step, query, geometry, recipe, counts)
    out, kernel = counted(module, call.settings.name, layer.cache, attend, *stored, **call.options)
    repeated = None
    # A later chunk of a prompt may wait for the device.
    if may_repeat and not step.is_first and step.key.shape[2] <= DECODED_AT_ONCE:
        repeated = cached_step(call, kernel, query, geometry.window or layer.window)
    return out.transpose(1, 2).contiguous(), repeated


def _attend_documents(module: nn.Module, call: Call, states: States, geometry: MaskGeometry) -> Tensor:
    """Compute the attention of packed rows, ``[B, T, Hq, Dv]``."""
    recipe = call.settings.recipe
    options = {"is_causal": geometry.is_causal, "window": geometry.window, **call.options}
    options["tile_counts"] = tile_counts_of(module, states[0], recipe)
    return counted(module, call.settings.name, "none", _documents_apart, states, geometry, recipe, **options)[0]


def _documents_apart(states: States, geometry: MaskGeometry, recipe: Recipe, **options: Any) -> Tensor:
    """Attend within each document."""
    documents = geometry.documents
    assert documents is not None
    batch, _, length, _ = states[0].shape
    if geometry.pattern is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in states)
        tokens = batch * length
        out: Tensor = attention_varlen(q, k, v, documents, documents, tokens, tokens, recipe, **options)
        return out.view(batch, length, *out.shape[1:])
    # The model has a pattern of its own, such as chunks.
    pattern = geometry.pattern.expand(batch, -1, length, length)
    parts = []
    for start, stop in pairwise(sorted(set(documents.tolist()))):  # without empty documents
        row = slice(start // length, start // length + 1)
        own = slice(start % length, start % length + stop - start)
        q, k, v = (x[row, :, own] for x in states)
        part = attention(q, k, v, recipe, mask=pattern[row, :, own, own], **options)
        parts.append(part.transpose(1, 2)[0])
    return torch.cat(parts).view(batch, length, *parts[0].shape[1:])


_CHANGED = (
    "attention_mask hides keys that were visible, or shows padding that was hidden; a static cache needs the same mask "
    "in every decoding step. Keep the mask, or use DMACache(config) without max_cache_len"
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
    """Compute attention over a cache layer, ``[B, Hq, T, Dv]``, and store the new keys and values.

    Raises:
        ValueError: The call is invalid. The new keys are dropped, and the cache does not change.
    """
    prompt = layer.owner.prompt_length
    if new.is_first and prompt is not None and prompt < query.shape[2]:
        return _attend_with_candidates(layer, new, prompt, query, geometry, recipe, tile_counts, **options)
    if new.is_first:
        options |= _of_prompt(geometry, new).arguments
        out: Tensor = attention(query, new.key, new.value, recipe, tile_counts=tile_counts, **options)
        if not new.is_stored:
            layer.settle(new, geometry)
            (layer.store_later if prompt is None else layer.store)(new)  # candidates follow in the same call
        return out
    if new.is_stored and query.shape[2] > TILE:
        raise ValueError(
            f"got {query.shape[2]} queries for keys that another layer has stored; in models that share keys between "
            f"layers, pass the prompt in one call or in chunks of at most {TILE} tokens"
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


def _of_prompt(geometry: MaskGeometry, new: Step) -> MaskGeometry:
    """Return the geometry of a prompt without the unused slots of a static cache, which its mask covers."""
    pattern, length = geometry.pattern, new.key.shape[2]
    if pattern is not None and pattern.shape[3] > 1:
        pattern = pattern[..., :length]
    is_seen = geometry.is_unpadded and length <= geometry.q_len
    kv_range = None if is_seen else geometry.kv_range
    q_offset = geometry.kv_offset + (length - geometry.q_len)
    return replace(geometry, kv_len=length, q_offset=q_offset, kv_range=kv_range, pattern=pattern)


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
    """Compute a first call with candidates of speculative decoding as a prompt and one decoding step."""
    is_offloading, layer.is_offloading = layer.is_offloading, False
    outputs = []
    for part in (slice(0, prompt), slice(prompt, query.shape[2])):
        step = replace(new, key=new.key[:, :, part], value=new.value[:, :, part], is_first=part.start == 0)
        seen = geometry.of_queries(part.start, part.stop)
        layer.is_offloading = is_offloading and part.start > 0
        outputs.append(attend(layer, step, query[:, :, part], seen, recipe, tile_counts, **options))
    new.is_stored = True
    return torch.cat([out.transpose(1, 2) for out in outputs], 1).transpose(1, 2)


def _mask(layer: DMALayer, new: Step, geometry: MaskGeometry) -> Tensor | None:
    """Return the part of the mask that positions do not imply, boolean ``[B, H, T, kv_len]``, usually ``None``."""
    pattern, visible = geometry.pattern, geometry.kv_range
    if pattern is None and visible is None:
        if layer.is_padded and layer.owner.capture is None and not torch.compiler.is_compiling():
            _refuse_shown_padding(layer, new, None)
            layer.is_padded = False  # no row has any, or it has left the window
        return None
    return None if _is_plain(layer, new, pattern, visible) else _joined(pattern, visible, new.kv_len)


def _joined(pattern: Tensor | None, visible: Tensor | None, kv_len: int) -> Tensor | None:
    """Return a pattern without the keys outside the rows' ranges, as :class:`MaskGeometry` has both."""
    if visible is None:
        return pattern
    seen = keys_in(visible, kv_len)[:, None, None]
    return seen if pattern is None else seen & pattern


def _is_plain(layer: DMALayer, new: Step, pattern: Tensor | None, visible: Tensor | None) -> bool:
    """Return whether a mask is a range of visible keys, integer ``[B, 2]``, that has all keys of the row.

    The check waits for the device, so the layers of a step share its result. In decoding steps of a static cache it
    does not wait: the first layer asserts on the device.
    """
    is_static, length = isinstance(layer.tokens, Tensor), new.key.shape[2]
    if torch.compiler.is_compiling() or (is_static and new.key.is_cuda and length <= DECODED_AT_ONCE):
        if pattern is None and visible is not None and layer.checks_steps:
            torch._assert_async(_has_all_keys(layer, new, visible), _CHANGED)
        return pattern is None
    known = None if is_static else layer.owner.plain
    mask = pattern if visible is None else visible
    if known is None or known[0] is not mask:
        is_plain = pattern is None and visible is not None and bool(_has_all_keys(layer, new, visible))
        if layer.is_padded and not is_plain:
            _refuse_shown_padding(layer, new, _joined(pattern, visible, new.kv_len))
        known = layer.owner.plain = mask, is_plain
    return known[1] and pattern is None


def _has_all_keys(layer: DMALayer, new: Step, visible: Tensor) -> Tensor:
    """Return whether each range of visible keys has all keys of its row, boolean ``[]``."""
    start = layer.position_of(new)
    end = layer.tokens + (0 if new.is_stored else new.key.shape[2]) - new.kv_offset
    has_all: Tensor = (visible[:, 0] == (-start).clamp(min=0)) & (visible[:, 1] == end) | (start + end <= 0)
    return has_all.all()


def _refuse_shown_padding(layer: DMALayer, new: Step, mask: Tensor | None) -> None:
    """Raise if a mask, boolean ``[B, H, T, kv_len]``, or ``None``, shows padding, which is not stored."""
    start = layer.position_of(new)[:, None]
    padding = start + torch.arange(new.kv_len, device=start.device) < 0
    if bool((padding if mask is None else padding & mask.any(2).any(1)).any()):
        raise ValueError(
            "attention_mask shows padding that it hid before, which the cache does not hold; keep the mask of the "
            "first call, or begin with a new cache"
        )
