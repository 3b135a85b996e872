"""What the queries of one attention layer see, from the arguments of its call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import CROSS_ATTENTION_NAMES, NEVER_CAUSAL
from .geometry import GEOMETRY, MaskGeometry, has_no_values, read_once

MASKED_BELOW = -9.9e3
"""Additive masks mark hidden keys by ``-inf``, the dtype's minimum or, in old models, -10000 (-9984 in bf16)."""

_BIAS = "a floating-point attention_mask must hold only zeros and large negative numbers; dma_mxfp supports no bias"


def layer_geometry(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, is_causal: bool | None, sliding_window: int | None
) -> tuple[MaskGeometry, Tensor | None]:
    """Return the geometry of a layer's mask, and the mask itself if it is a bias.

    The arguments are those of :func:`dma_hf.attention.dma_attention_forward`.
    """
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True)) and type(module).__name__ not in NEVER_CAUSAL
    geometry: MaskGeometry | None = getattr(mask, GEOMETRY, None)
    if geometry is not None:
        return _adopt(geometry, module, query, kv_len), None
    two_sequences = _is_cross_attention(module, is_causal) or (not is_causal and q_len != kv_len)
    offset = 0 if two_sequences else kv_len - q_len
    if mask is None:
        is_causal = is_causal and not two_sequences
        window = None
        if sliding_window is not None and not two_sequences:  # bidirectional: exclusive, as in FlashAttention
            window = sliding_window if is_causal else max(1, sliding_window - 1)
        return MaskGeometry(
            batch, q_len, kv_len, is_causal=is_causal, window=window, q_offset=offset, two_sequences=two_sequences
        ), None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}; flex_attention takes a BlockMask")
    full = (batch, query.shape[1], q_len, kv_len)
    if mask.ndim != 4 or any(size not in (1, whole) for size, whole in zip(mask.shape, full, strict=True)):
        raise ValueError(f"attention_mask must be broadcastable to {list(full)}, got {list(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention_mask must be boolean or floating point, got {mask.dtype}")
    pattern, origin, is_mask = read_once(mask, module, lambda: _read_mask(mask))
    geometry = MaskGeometry(
        batch, q_len, kv_len, is_causal=False, q_offset=offset, pattern=pattern, two_sequences=two_sequences
    )
    # A window of a decoding step hides more than the padding does.
    if mask.shape[3] > 1 and (sliding_window is None or q_len == kv_len):
        geometry = replace(geometry, q_offset=geometry.q_offset - origin, kv_offset=-origin)
    return geometry, None if is_mask else mask


def _adopt(geometry: MaskGeometry, module: nn.Module, query: Tensor, kv_len: int) -> MaskGeometry:
    """Return the geometry of a mask, adapted to a layer's tensors."""
    batch, q_len = query.shape[0], query.shape[2]
    if (geometry.q_len, geometry.kv_len) != (q_len, kv_len) and geometry.hides_nothing:  # nor does it for other lengths
        geometry = MaskGeometry(batch, q_len, kv_len, is_causal=False, two_sequences=q_len != kv_len)
    if geometry.q_len == 1 < q_len and geometry.broadcasts_queries:
        geometry = replace(geometry, q_len=q_len, q_offset=0, two_sequences=q_len != kv_len)
    if geometry.batch not in (1, batch) or (geometry.q_len, geometry.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"attention_mask must be broadcastable to {[batch, query.shape[1], q_len, kv_len]}, got "
            f"{list(geometry.shape)}: the model made it for other queries or keys"
        )
    is_cross = not geometry.is_causal and _is_cross_attention(module, is_causal=False)
    return geometry.adapted(query.device, batch, two_sequences=geometry.two_sequences or is_cross)


def select_keys(
    geometry: MaskGeometry, bias: Tensor | None, indices: Tensor, query: Tensor, key: Tensor
) -> tuple[MaskGeometry, Tensor | None]:
    """Return the result of :func:`layer_geometry` without the keys that a sparse-attention indexer left out."""
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, q_len):
        raise ValueError(f"indices must be [{batch}, {q_len}, k], got {list(indices.shape)}")
    if indices.shape[-1] >= kv_len:  # all of them
        return geometry, bias
    chosen = torch.zeros((batch, q_len, kv_len), dtype=torch.bool, device=query.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if geometry.pattern is not None:
        chosen = chosen & geometry.pattern
    if bias is not None:
        bias = bias.masked_fill(~chosen, torch.finfo(bias.dtype).min)
    return replace(geometry, pattern=chosen), bias


def _is_cross_attention(module: nn.Module, is_causal: bool) -> bool:
    """Return whether the name or the attributes of a layer say that its keys are of another sequence."""
    if getattr(module, "is_cross_attention", False):
        return True
    if any(part in type(module).__name__ for part in CROSS_ATTENTION_NAMES):
        return True
    # A module takes microseconds to say that it lacks an attribute, so the causal case asks for none.
    return not is_causal and bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True)


def _read_mask(mask: Tensor) -> tuple[Tensor, int | Tensor, bool]:
    """Read a model's own mask, boolean or floating point, ``[B, H, Tq, Tk]``.

    Returns:
        Which keys are visible, as booleans; the index of the first key that any query of a row sees, where positions
        start: an int if it is the same in all rows, else integer ``[B]``; and whether the mask is no bias, but boolean
        or of zeros and large negative numbers.
    """
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
    return pattern, origin, is_mask
