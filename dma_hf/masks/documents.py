"""Packed rows: several documents in a row, each of which is computed as if it were alone.

Documents come from Transformers' mask function (:mod:`dma_hf.masks.mask_function`), from ``cu_seq_lens_q``, or from
``position_ids`` that restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Refusal
from .geometry import MaskGeometry, documents_starting_at, has_no_values, read_once


def separate_documents(
    module: nn.Module,
    geometry: MaskGeometry,
    others: Mapping[str, Any],
    *,
    is_cached: bool,
    is_users_mask: bool,
) -> MaskGeometry:
    """Return the geometry with the documents of a call.

    Waits for the device once in a forward pass, in its first layer. It does not in decoding steps, nor while a call is
    traced or captured, where ``position_ids`` are not read.

    Args:
        module: The attention layer.
        geometry: Geometry of the mask.
        others: Keyword arguments of the call. Only ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``position_ids`` are used.
        is_cached: Whether the keys are those of a ``DMACache``.
        is_users_mask: Whether the mask is one that ``dma_mask`` did not make. Its pattern is that of the documents.

    Raises:
        ValueError: The documents cannot be separated.
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
        rows = torch.arange(geometry.batch + 1) * geometry.q_len
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
        visible = (index >= geometry.kv_range[:, :1]) & (index < geometry.kv_range[:, 1:])
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
