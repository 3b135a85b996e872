"""What the queries of one attention layer see, from the arguments of its call.

The tokens of packed rows see their own document only. Documents come from Transformers' mask function
(:mod:`dma_hf.masks.mask_function`), from ``cu_seq_lens_q``, or from ``position_ids`` that restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..support import CROSS_ATTENTION_NAMES, NEVER_CAUSAL, Refusal
from .geometry import GEOMETRY, MaskGeometry, documents_starting_at, has_no_values, keys_in, read_once

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
    two_sequences = is_cross_attention(module, is_causal) or (not is_causal and q_len != kv_len)
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
    is_trained = mask.requires_grad and torch.is_grad_enabled()
    return geometry, mask if is_trained or not is_mask else None


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
    is_cross = not geometry.is_causal and is_cross_attention(module, is_causal=False)
    return geometry.adapted(query.device, batch, two_sequences=geometry.two_sequences or is_cross)


def select_keys(geometry: MaskGeometry, bias: Tensor | None, indices: Tensor) -> tuple[MaskGeometry, Tensor | None]:
    """Return the result of :func:`layer_geometry` without the keys that a sparse-attention indexer left out."""
    batch, _, q_len, kv_len = geometry.shape
    if indices.ndim != 3 or indices.shape[:2] != (batch, q_len):
        raise ValueError(f"indices must be [{batch}, {q_len}, k], got {list(indices.shape)}")
    if indices.shape[-1] >= kv_len:  # all of them
        return geometry, bias
    chosen = torch.zeros((batch, q_len, kv_len), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if geometry.pattern is not None:
        chosen = chosen & geometry.pattern
    if bias is not None:
        bias = bias.masked_fill(~chosen, torch.finfo(bias.dtype).min)
    return replace(geometry, pattern=chosen), bias


def is_cross_attention(module: nn.Module, is_causal: bool) -> bool:
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


# ---- packed rows: several documents in a row, each of which is computed as if it were alone


def separate_documents(
    module: nn.Module,
    geometry: MaskGeometry,
    others: Mapping[str, Any],
    *,
    is_cached: bool,
    is_users_mask: bool,
) -> MaskGeometry:
    """Return the geometry with the documents of a call. Refuse documents that cannot be separated.

    Waits for the device once in a forward pass, in its first layer. It does not in decoding steps, nor while a call is
    traced or captured, where ``position_ids`` are not read. ``others`` are the keyword arguments of the call. The
    pattern of a mask that ``dma_mask`` did not make (``is_users_mask``) is that of the documents.
    """
    documents, option = geometry.documents, "packed sequences"
    if documents is None:
        documents, option = _find_documents(module, geometry, others, is_users_mask)
    if documents is None:
        return geometry
    if is_cached:
        raise _refusal(option, "a packed cache holds one document a row", "pass use_cache=False")
    if geometry.two_sequences or geometry.q_len != geometry.kv_len:
        asked = f"the call has {geometry.q_len} queries and {geometry.kv_len} keys"
        raise _refusal(option, asked, "pass all tokens in one call, and use_cache=False")
    if geometry.documents is not None:
        return geometry
    pattern = geometry.pattern
    if pattern is not None and has_no_values(documents):  # it cannot be cut
        return replace(geometry, pattern=pattern & geometry.same_document(documents))
    if pattern is not None and not is_users_mask:
        asked, way_out = "attention_mask hides tokens", "leave attention_mask out"
        if pattern.shape[2] > 1:
            asked = "the model masks rows as a whole"
            way_out = "pass position_ids that restart, no attention_mask, and use_cache=False"
        raise _refusal(option, asked, way_out)
    if option == "cu_seq_lens_q" and geometry.kv_range is not None:
        raise _refusal(option, "attention_mask hides tokens", "leave attention_mask out")
    return replace(geometry, documents=documents, q_offset=0, kv_offset=0, kv_range=None)


def _find_documents(
    module: nn.Module, geometry: MaskGeometry, others: Mapping[str, Any], is_users_mask: bool
) -> tuple[Tensor | None, str]:
    """Return the documents that the arguments of a call describe, and the name of the argument."""
    lengths = others.get("cu_seq_lens_q")
    if isinstance(lengths, Tensor) and lengths.numel() > 2:
        return _documents_of_lengths(module, lengths, geometry, others.get("cu_seq_lens_k")), "cu_seq_lens_q"
    position_ids: Any = others.get("position_ids")
    if is_users_mask or not _may_restart(geometry, position_ids):
        return None, ""
    documents = read_once(position_ids, module, lambda: _documents_of_positions(position_ids, geometry))
    return documents, "position_ids that restart"


def _documents_of_lengths(
    module: nn.Module, lengths: Tensor, geometry: MaskGeometry, key_lengths: Any
) -> Tensor | None:
    """Return ``cu_seq_lens_q`` on the host, or unchanged if the host cannot read it."""

    def read() -> Tensor:
        if has_no_values(lengths):
            return lengths
        ends = lengths.cpu()
        if isinstance(key_lengths, Tensor) and key_lengths is not lengths and not torch.equal(key_lengths.cpu(), ends):
            raise _refusal("cu_seq_lens_k", "it differs from cu_seq_lens_q", "pass the same lengths for both")
        rows = torch.arange(geometry.batch + 1, device="cpu") * geometry.q_len
        if ends[-1] != rows[-1] or not torch.isin(rows, ends).all():
            asked = f"it lacks the end of a row, of which there are {geometry.batch} with {geometry.q_len} tokens"
            raise _refusal("cu_seq_lens_q", asked, "pass where each document begins, and the number of tokens")
        return ends

    return read_once(lengths, module, read)


def _may_restart(geometry: MaskGeometry, position_ids: Any) -> bool:
    """Whether positions may restart within the rows of a call, and the host can read them."""
    if not isinstance(position_ids, Tensor) or has_no_values(position_ids) or position_ids.is_floating_point():
        return False
    if geometry.q_len == 1 or geometry.q_len != geometry.kv_len:  # decoding, or a later chunk of a prompt
        return False
    has_pattern = geometry.pattern is not None and geometry.pattern.shape[2] > 1
    is_of_tokens = position_ids.shape in ((1, geometry.q_len), (geometry.batch, geometry.q_len))
    return is_of_tokens and (geometry.is_causal or has_pattern)


def _documents_of_positions(position_ids: Tensor, geometry: MaskGeometry) -> Tensor | None:
    """Return the documents of rows in which positions restart; ``None`` if they do in no row.

    A document starts where the position falls, or repeats the lowest of the row. (Other positions may repeat, and jump
    ahead, within a document.) Padding is left out, and belongs to no document of real tokens.
    """
    if bool((position_ids.diff() == 1).all()):  # as ``generate`` counts: answered with few launches
        return None
    positions = position_ids.expand(geometry.batch, -1)
    index = torch.arange(geometry.q_len, device=positions.device)
    visible = torch.ones_like(positions, dtype=torch.bool)
    if geometry.kv_range is not None:
        visible = keys_in(geometry.kv_range, geometry.q_len)
    if geometry.pattern is not None:
        visible = visible & geometry.pattern.any(2).any(1)
    latest = torch.where(visible, index, -1).cummax(-1).values[:, :-1]  # visible token before each one but the first
    previous, current = positions.gather(1, latest.clamp(min=0)), positions[:, 1:]
    lowest = positions.masked_fill(~visible, torch.iinfo(positions.dtype).max).amin(-1, keepdim=True)
    restarts = (current < previous) | ((current == previous) & (current == lowest))
    restarts = restarts & visible[:, 1:] & (latest >= 0)
    if not bool(restarts.any()):
        return None
    return documents_starting_at(restarts | (visible[:, 1:] != visible[:, :-1]))


def _refusal(option: str, asked: str, way_out: str) -> ValueError:
    return Refusal(option, asked, way_out).error()
