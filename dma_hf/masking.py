"""The mask function that Transformers calls for ``dma_mxfp``: what the mask is, compactly.

It is called once for each kind of layer of a forward pass, with the pattern as a Python function of indices, the 2-D
padding mask and the offsets of the cache. Upstream's flags tell which patterns are plain, so that nothing is inferred
from values: ``allow_is_causal_skip`` is true where nothing was laid over a causal or local mask, ``local_size`` is the
window or chunk, and ``allow_is_bidirectional_skip`` is the same for bidirectional attention. What is not recognised
(prefix-LM, packed sequences, chunks, blocks) becomes a dense boolean pattern, built by upstream's own ``sdpa_mask``.

Finding out whether the padding mask hides anything is a device synchronisation, as in upstream's ``sdpa_mask``, and
what it hides a second one. There is none without a padding mask, and none while tracing, where the padding stays a
``[B, 1, 1, Tk]`` pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from .architectures import ADDS_THE_MASK, refuse_model
from .compact_mask import MASKED_BELOW, CompactMask, MaskGeometry, has_no_values


class _Kind(NamedTuple):
    """A recognised mask: causal or not, the window if there is one, and whether only a pattern can say the rest."""

    is_causal: bool
    window: int | None = None
    needs_pattern: bool = False


class _Padding(NamedTuple):
    """What a 2-D padding mask says of a row's keys; integers ``[B]``.

    Attributes:
        origin: Absolute position of the first key that the row may see, an int where it is the same in all rows.
        first: Index of the first visible key that is still in the cache.
        end: Index past the last visible key.
        pattern: Boolean ``[B, 1, 1, Tk]`` where ``first..end`` has holes, or may have.
        unpadded: How many keys from the first on it is known not to hide in any row.
    """

    origin: int | Tensor
    first: Tensor
    end: Tensor
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
    """Return the mask of a forward pass; the interface is Transformers' ``AttentionMaskInterface``.

    Args:
        batch_size: Batch rows.
        q_length: Queries in a row.
        kv_length: Keys in a row.
        q_offset: Position of query 0, absolute: an int, or a 0-dimensional tensor (static caches).
        kv_offset: Position of key 0, absolute: above 0 where a sliding cache has dropped keys.
        mask_function: The pattern, a function of (batch, head, query, key) indices.
        attention_mask: Padding, boolean ``[B, >= kv_offset + kv_length or less]``; what is missing is invisible.
        local_size: Sliding window or chunk, if the pattern has one.
        allow_is_causal_skip: True if the pattern is causal (and local), with nothing else laid over it.
        allow_is_bidirectional_skip: True if it is bidirectional (and local), with nothing else laid over it.
        use_vmap: Whether ``mask_function`` must be evaluated with ``vmap``.
        device: Where the mask is wanted.
        config: The model's configuration, which tells a window from a chunk.
        kwargs: What other mask functions need; ``dtype`` alone is used, for models that add the mask to their scores.

    Returns:
        A :class:`~dma_hf.CompactMask`, ``[B, 1, q_length, kv_length]``; also for plain causal and for full attention.
        ``None`` would leave it to the layers to know whether they are causal, and some do not (BigBird-Pegasus).

    Raises:
        ValueError: ``attention_mask`` is not 2-D or has another batch size; the model computes its attention itself, or
            needs an additive mask.
    """
    if config is not None and not torch.compiler.is_dynamo_compiling():
        refuse_model(config)
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size):
        raise ValueError(
            f"attention_mask must be [{batch_size}, kv_len] (padding) or 4-D, got shape {list(attention_mask.shape)}"
        )
    asked: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    if config is not None and config.model_type in ADDS_THE_MASK:
        additive: Tensor = eager_mask(**asked, dtype=kwargs.get("dtype", torch.float32))
        return additive
    kind = _recognise(
        mask_function, local_size, kv_length, kv_offset, config, allow_is_causal_skip, allow_is_bidirectional_skip
    )
    padding = _read_padding(attention_mask, kv_length, kv_offset)
    pattern = None if padding is None else padding.pattern
    if kind.needs_pattern:
        pattern = sdpa_mask(**asked, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    origin = 0 if padding is None else padding.origin
    kv_range, frontier = None, q_offset + q_length - kv_offset if kind.is_causal else kv_length
    is_clipped = isinstance(frontier, Tensor) or frontier < kv_length  # a static cache has yet to write the rest
    if padding is not None or is_clipped:
        first = torch.zeros(batch_size, dtype=torch.int64, device=device) if padding is None else padding.first
        end = torch.full_like(first, kv_length) if padding is None else padding.end
        if is_clipped:
            end = torch.minimum(end, frontier) if isinstance(frontier, Tensor) else end.clamp(max=frontier)
        kv_range = torch.stack((first, end), dim=-1)
    two_sequences = False
    if not (kind.is_causal or kind.needs_pattern or isinstance(q_offset, Tensor)):
        two_sequences = q_length != kv_length and q_offset == 0 and kv_offset == 0  # and no cache holds some more
    # The differences are new tensors: a static cache counts in its tensor, before the layers look at the mask.
    geometry = MaskGeometry(
        batch=batch_size,
        q_len=q_length,
        kv_len=kv_length,
        is_causal=kind.is_causal,
        window=kind.window,
        q_offset=q_offset - origin,
        kv_offset=kv_offset - origin,
        kv_range=kv_range,
        is_unpadded=padding is None or padding.unpadded >= q_length,
        pattern=pattern,
        two_sequences=two_sequences,
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
    """Tell what a pattern is; when in doubt, that only the pattern itself can say."""
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
    # A step over a static cache comes without leave to skip, whatever its pattern.
    if is_window and (allow_is_causal_skip or _is_window(mask_function, local_size)):
        return _Kind(is_causal=True, window=local_size if local_size < kv_length else None)
    if allow_is_causal_skip:  # a chunk that holds all keys is no limit
        return _Kind(is_causal=True, needs_pattern=kv_offset + kv_length > local_size)
    return unknown


def _is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Return whether a pattern is upstream's causal window, with nothing laid over it."""
    if torch.compiler.is_compiling():
        return False
    return _are_alike(mask_function, sliding_window_causal_mask_function(window))


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two functions are made by the same code of the same values."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = ([cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other))
        return one.__code__ is other.__code__ and _are_alike(*map(tuple, cells))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _read_padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> _Padding | None:
    """Summarise a padding mask, ``None`` if it hides nothing. Values come to the host here alone."""
    if attention_mask is None or kv_length == 0 or attention_mask.shape[0] == 0:
        return None
    mask = attention_mask.bool()
    is_readable = not has_no_values(mask)
    missing = kv_offset + kv_length - mask.shape[1]
    if is_readable and bool(mask.all()):
        if missing <= 0:
            return None
        first = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
        length = max(kv_length - missing, 0)
        return _Padding(0, first, torch.full_like(first, length), None, unpadded=length)
    mask = torch.nn.functional.pad(mask, (0, max(missing, 0)), value=False)
    seen = mask[:, kv_offset : kv_offset + kv_length]
    pattern = seen[:, None, None, :]
    count, first, origin = seen.sum(-1), seen.byte().argmax(-1), mask.byte().argmax(-1)
    end = torch.where(count > 0, kv_length - seen.flip(-1).byte().argmax(-1), 0)
    if not is_readable:
        return _Padding(origin, first, end, pattern)
    origins, firsts, ends, counts = torch.stack((origin, first, end, count)).tolist()
    has_holes = any(n != b - a for a, b, n in zip(firsts, ends, counts, strict=True))
    common = origins[0] if len(set(origins)) == 1 else origin
    return _Padding(common, first, end, pattern if has_holes else None)


_READ = "dma_read"
"""Attribute under which a mask carries what was read of it, with the version of its contents."""


_BIAS = "dma_mxfp attention takes masks, not biases, as a floating-point attention_mask"


@dataclass(frozen=True, eq=False)
class DenseMask:
    """A mask that was read.

    Attributes:
        pattern: Boolean, true where a key is seen.
        origin: Index of the first key that any query of a row sees, where its positions begin: an int if it is the same
            in all rows, else integer ``[B]``.
        is_mask: Whether a floating-point mask holds only zeros and large negative numbers.
    """

    pattern: Tensor
    origin: int | Tensor
    is_mask: bool


def read_mask(mask: Tensor) -> DenseMask:
    """Read a boolean or floating-point mask ``[B, H, Tq, Tk]``. Waits for the device, once for each tensor."""
    is_kept = not (has_no_values(mask) or mask.is_inference())
    version = mask._version if is_kept else 0
    known: tuple[int, DenseMask] | None = getattr(mask, _READ, None) if is_kept else None
    if known is not None and known[0] == version:
        return known[1]
    pattern, is_mask = mask, True
    if mask.is_floating_point():
        pattern = mask >= MASKED_BELOW
        is_additive = ((mask == 0) | (mask < MASKED_BELOW)).all()
        if has_no_values(mask):
            torch._assert_async(is_additive, _BIAS)
        else:
            is_mask = bool(is_additive)
    seen = pattern.any(2).any(1)  # [B, Tk]
    origin: int | Tensor = seen.byte().argmax(-1) if seen.shape[1] else 0
    if isinstance(origin, Tensor) and not has_no_values(mask):
        origins = set(origin.tolist())
        origin = origins.pop() if len(origins) == 1 else origin
    read = DenseMask(pattern, origin, is_mask)
    if is_kept:
        setattr(mask, _READ, (version, read))
    return read
