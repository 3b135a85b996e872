"""The mask function that Transformers calls for ``dma_mxfp``.

Transformers calls :func:`dma_mask` once for each kind of layer in a forward pass. It passes the pattern as a Python
function of indices, the 2-D padding mask and the offsets of the cache. The result describes the mask by a few numbers.

Flags of Transformers tell which patterns are plain. ``allow_is_causal_skip`` means a causal or local mask without
anything else, ``allow_is_bidirectional_skip`` the same for bidirectional attention, and ``local_size`` is the window or
chunk. The documents of packed rows are taken out of a pattern (:mod:`dma_hf.masks.layer_geometry`). Any other pattern
(prefix-LM, chunks, blocks) becomes a dense boolean mask from ``sdpa_mask``.

A padding mask costs one device synchronization, as in ``sdpa_mask``, and a second one if it hides keys. There is none
while tracing, where the padding remains a ``[B, 1, 1, Tk]`` pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from ..integrations.internals import is_causal_window, split_packed
from ..support import ADDS_THE_MASK, refuse_model
from .geometry import PLAIN_STEP, CompactMask, MaskGeometry, documents_starting_at, has_no_values


class _Kind(NamedTuple):
    """A recognized mask: whether it is causal, its window, and whether it also needs a dense pattern."""

    is_causal: bool
    window: int | None = None
    needs_pattern: bool = False


class _Padding(NamedTuple):
    """Summary of a 2-D padding mask.

    Attributes:
        origin: Absolute position of the first visible key of a row: an int if it is the same in all rows, else integer
            ``[B]``.
        kv_range: As in :class:`MaskGeometry`, for the keys that are still in the cache.
        pattern: Boolean ``[B, 1, 1, Tk]`` if there are, or may be, hidden keys within ``kv_range``.
        unpadded: Number of keys at the start that are known to be visible in all rows.
    """

    origin: int | Tensor
    kv_range: Tensor | None
    pattern: Tensor | None
    unpadded: int = 0


def dma_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the mask of a forward pass. The interface is that of Transformers' ``AttentionMaskInterface``.

    Args:
        batch_size: Number of rows.
        q_length: Queries in a row.
        kv_length: Keys in a row.
        q_offset: Absolute position of query 0: an int, or a 0-dimensional tensor (static caches).
        kv_offset: Absolute position of key 0. It is above 0 if a sliding cache has dropped keys.
        mask_function: The pattern, a function of (batch, head, query, key) indices.
        attention_mask: Padding, boolean ``[B, length]``. Keys beyond its length are hidden.
        local_size: Sliding window or chunk of the pattern, if any.
        allow_is_causal_skip: Whether the pattern is causal (and local) without anything else.
        allow_is_bidirectional_skip: Whether the pattern is bidirectional (and local) without anything else.
        use_vmap: Whether ``mask_function`` must be evaluated with ``vmap``.
        device: Device of the mask.
        config: The model's configuration. It distinguishes a window from a chunk.
        kwargs: Arguments of other mask functions. Only ``dtype`` is used, for models that add the mask to their scores.

    Returns:
        A compact mask ``[B, 1, q_length, kv_length]``, also for plain causal and for full attention. ``None`` would
        not do, because some layers do not know whether they are causal (BigBird-Pegasus).

    Raises:
        ValueError: ``attention_mask`` is not 2-D or has another batch size; or the model computes its attention itself
            or needs an additive mask.
    """
    if config is not None and not torch.compiler.is_dynamo_compiling():
        refuse_model(config)
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size):
        raise ValueError(
            f"attention_mask must be [{batch_size}, kv_len] (padding) or 4-D, got {list(attention_mask.shape)}"
        )
    asked = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    if config is not None and config.model_type in ADDS_THE_MASK:
        dtype = kwargs.get("dtype", torch.float32)
        additive: Tensor = eager_mask(*asked, dtype=dtype, use_vmap=use_vmap, device=device)
        return additive
    pattern_function, documents = mask_function, None
    packed = None if torch.compiler.is_dynamo_compiling() else split_packed(mask_function)
    if packed is not None and not has_no_values(packed[1]):
        pattern_function, documents = packed[0], documents_starting_at(packed[1].diff() != 0)
    kind = _recognise(
        pattern_function, local_size, kv_length, kv_offset, config, allow_is_causal_skip, allow_is_bidirectional_skip
    )
    if not torch.compiler.is_dynamo_compiling() and getattr(q_offset, PLAIN_STEP, False):
        if attention_mask is not None or kind.needs_pattern or not kind.is_causal:
            raise RuntimeError("the model's mask is more than a causal one or a sliding window")
        step = MaskGeometry(batch_size, q_length, kv_length, is_causal=True, window=kind.window, q_offset=q_offset)
        return CompactMask.of(step, device)
    padding = _read_padding(attention_mask, kv_length, kv_offset)
    pattern, kv_range = padding.pattern, padding.kv_range
    if kind.needs_pattern:
        pattern = sdpa_mask(*asked, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
    frontier = q_offset + (q_length - kv_offset) if kind.is_causal else kv_length
    if isinstance(frontier, Tensor) or frontier < kv_length:  # slots after it in a static cache are unused
        if kv_range is None:
            kv_range = _first_keys(batch_size, kv_length, device)
        kv_range = kv_range.clamp(max=frontier)
    two_sequences = False
    if not (kind.is_causal or kind.needs_pattern or isinstance(q_offset, Tensor)):
        two_sequences = q_length != kv_length and q_offset == 0 and kv_offset == 0  # and no cache has earlier keys
    # The differences are new tensors, because a static cache changes its counter before the layers read the mask.
    geometry = MaskGeometry(
        batch=batch_size,
        q_len=q_length,
        kv_len=kv_length,
        is_causal=kind.is_causal,
        window=kind.window,
        q_offset=q_offset - padding.origin,
        kv_offset=kv_offset - padding.origin,
        kv_range=kv_range,
        is_unpadded=padding.unpadded >= q_length,
        pattern=pattern,
        two_sequences=two_sequences,
        documents=documents,
    )
    return CompactMask.of(geometry, device)


def _recognise(
    mask_function: Callable[..., Any],
    local_size: int | None,
    kv_length: int,
    kv_offset: int,
    config: PreTrainedConfig | None,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> _Kind:
    """Recognize a pattern. An unknown one needs a dense mask."""
    if mask_function is causal_mask_function:
        return _Kind(is_causal=True)
    if mask_function is bidirectional_mask_function:
        return _Kind(is_causal=False)
    unknown = _Kind(is_causal=False, needs_pattern=True)
    if local_size is None or config is None:
        return unknown
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    is_window, is_chunk = local_size == window, local_size == chunk
    if is_window == is_chunk:
        return unknown
    if allow_is_bidirectional_skip and is_window:
        return _Kind(is_causal=False, window=local_size if local_size < kv_length - 1 else None)
    # In steps over a static cache allow_is_causal_skip is false for every pattern.
    is_traced = torch.compiler.is_compiling()
    if is_window and (allow_is_causal_skip or (not is_traced and is_causal_window(mask_function, local_size))):
        return _Kind(is_causal=True, window=local_size if local_size < kv_length else None)
    if allow_is_causal_skip:  # a chunk with all keys hides nothing
        return _Kind(is_causal=True, needs_pattern=kv_offset + kv_length > local_size)
    return unknown


def _first_keys(batch: int, count: int, device: torch.device | str) -> Tensor:
    """Return the range ``[B, 2]`` of the first ``count`` keys of each row."""
    kv_range = torch.zeros((batch, 2), dtype=torch.int64, device=device)
    kv_range[:, 1] = count
    return kv_range


def _read_padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> _Padding:
    """Summarize a padding mask. Only here are values copied to the host."""
    hides_nothing = _Padding(0, None, None, unpadded=kv_length)
    if attention_mask is None or kv_length == 0 or attention_mask.shape[0] == 0:
        return hides_nothing
    mask = attention_mask.bool()
    is_readable = not has_no_values(mask)
    missing = kv_offset + kv_length - mask.shape[1]
    if is_readable and bool(mask.all()):
        if missing <= 0:
            return hides_nothing
        length = max(kv_length - missing, 0)
        return _Padding(0, _first_keys(len(mask), length, mask.device), None, unpadded=length)
    mask = torch.nn.functional.pad(mask, (0, max(missing, 0)), value=False)
    seen = mask[:, kv_offset : kv_offset + kv_length]
    pattern = seen[:, None, None, :]
    count, first, origin = seen.sum(-1), seen.byte().argmax(-1), mask.byte().argmax(-1)
    end = torch.where(count > 0, kv_length - seen.flip(-1).byte().argmax(-1), 0)
    kv_range = torch.stack((first, end), dim=-1)
    if not is_readable:
        return _Padding(origin, kv_range, pattern)
    origins, firsts, ends, counts = torch.stack((origin, first, end, count)).tolist()
    has_holes = any(n != b - a for a, b, n in zip(firsts, ends, counts, strict=True))
    common = origins[0] if len(set(origins)) == 1 else origin
    return _Padding(common, kv_range, pattern if has_holes else None)
