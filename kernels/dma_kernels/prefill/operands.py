"""Operands of the prefill kernels: the contract between the quantizers and the attention kernels.

Keys and values come in the operand formats of the compute path (:mod:`dma_kernels.runtime.operand_formats`), from the
quantizer (:mod:`dma_kernels.prefill.quantizer`) or from a cache. Queries are the caller's own; the attention kernel, or
a launch before it, converts them to the format of their keys.

In exact arithmetic ``(q H) . ((k - mean) H) = q . k - q . mean``. So with ``high = "bf16"``, high tiles are scored with
the caller's own queries and keys, and ``q . mean`` is subtracted in fp32. No transformed 16-bit copy is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..numerics.geometry import LOG2_E, AttentionGeometry
from ..numerics.recipe import Recipe
from ..runtime import chip
from ..runtime.operand_formats import OperandFormat
from .config import select_swizzle_group


@dataclass(frozen=True)
class TileOperands:
    """Operands of high or of low tiles. Shapes of ``key`` and ``value`` are those of their formats."""

    key: Tensor  # keys
    value: Tensor  # values
    key_format: OperandFormat  # format of ``key``
    value_format: OperandFormat  # format of ``value``: 16 bits or E4M3; the caller's own for high tiles
    # block scales of packed keys, ``[B, Hkv, S, D' / block]``: E8M0 codes (uint8) or E4M3
    key_scale: Tensor | None = None
    # descale of the keys of each tile, fp32 ``[B, Hkv, S / 128]``, contiguous; for packed NVFP4 keys, the global scale,
    # expanded from ``[B, Hkv]``. ``None`` for 1. At least fp32's smallest normal number; 1 for a tile of zeros.
    key_descale: Tensor | None = None
    value_descale: Tensor | None = None  # descale of each channel of the values, fp32 ``[B, Hkv, Dv]``; ``None`` for 1


@dataclass(frozen=True)
class Operands:
    """The tensors of one call. All their tile-padded storage has the same number of tiles.

    Tiles that are low for no query may be uninitialized. They must not be read, not even with a probability of 0.
    """

    high: TileOperands  # operands of high tiles
    # operands of low tiles; ``None`` if the recipe has one precision. The caller's ``value`` is that of ``high``.
    low: TileOperands | None
    key_mean: Tensor | None = None  # mean key, fp32 ``[B, Hkv, D]``; given iff the recipe has ``smooth_k``
    # NVFP4's global scale of the transformed queries, fp32 ``[B, Hq]``; given iff the recipe has NVFP4 queries
    query_global_scale: Tensor | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of an attention kernel's launch."""

    query: Tensor  # ``[B, Hq, Tq, D]``, 16-bit, any strides
    operands: Operands  # keys and values
    geometry: AttentionGeometry  # positions and visibility
    recipe: Recipe  # formats and band
    config: Any  # configuration of the kernel
    out: Tensor  # output, ``[B, Hq, Tq, Dv]``, unit stride of channels
    lse: Tensor  # log of the softmax denominator, fp32 ``[B, Hq, Tq]``, contiguous
    scale: float  # scale of the scores
    softcap: float | None  # softcap of the scores, or ``None``
    sinks: Tensor | None  # sink logits ``[Hq]``, contiguous, or ``None``
    tile_counts: Tensor | None = None  # int64 ``[Hq, 2]``, where skipped and examined tiles are added, or ``None``

    @property
    def low(self) -> TileOperands:
        """Operands of low tiles; those of high tiles if the recipe has one precision."""
        return self.operands.low or self.operands.high

    @property
    def kv_rows(self) -> int:
        """Kv heads of all batch rows."""
        return self.low.key.shape[0] * self.low.key.shape[1]

    @property
    def swizzle_group(self) -> int:
        """Kv heads per L2 swizzle group."""
        low, kv_rows = self.low, self.kv_rows
        return select_swizzle_group(kv_rows, (low.key.nbytes + low.value.nbytes) // kv_rows)

    @property
    def base2_softcap(self) -> float | None:
        """The softcap for logits in base 2."""
        return None if self.softcap is None else self.softcap * LOG2_E

    @property
    def base2_skip_threshold(self) -> float | None:
        """The recipe's threshold for logits in base 2; ``None`` if nothing can be skipped and nothing is counted."""
        threshold = self.recipe.skip_threshold if self.operands.low else None
        if threshold is None or (threshold == math.inf and self.tile_counts is None):
            return None
        return threshold * LOG2_E

    @property
    def use_pdl(self) -> bool:
        """Whether launches that read only ``query`` may start before those that made ``operands`` have ended.

        The quantizer writes the keys of low tiles and lets the next launch start early. It starts after all earlier
        work itself, so the caller's tensors are ready. NVFP4's query scale is a launch in between.
        """
        is_next = self.operands.low is not None and self.operands.query_global_scale is None
        return is_next and chip.supports_pdl(self.query.device)
