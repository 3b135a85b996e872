"""What a model's own 4-D mask says, read once for all layers that are given the same tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compact_mask import MASKED_BELOW, has_no_values

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
