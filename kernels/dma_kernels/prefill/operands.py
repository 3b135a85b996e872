"""Operands of the prefill kernels: the contract between the quantizers and the attention kernels.

Keys and values come in the operand formats of the compute path (:mod:`dma_kernels.runtime.operand_formats`), from the
quantizer (:mod:`dma_kernels.prefill.quantizer`) or from a cache. Queries are the caller's own; the attention kernel, or
a launch before it, converts them to the format of their keys.

In exact arithmetic ``(q H) . ((k - mean) H) = q . k - q . mean``. So with ``high = "bf16"``, high tiles are scored with
the caller's own queries and keys, and ``q . mean`` is subtracted in fp32. No transformed 16-bit copy is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..numerics.geometry import AttentionGeometry
from ..numerics.recipe import Recipe
from ..runtime.operand_formats import OperandFormat


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
    low: TileOperands  # operands of low tiles; those of high tiles if the recipe has one precision
    geometry: AttentionGeometry  # positions and visibility
    recipe: Recipe  # formats and band
    config: Any  # configuration of the kernel
    out: Tensor  # output, ``[B, Hq, Tq, Dv]``, unit stride of channels
    lse: Tensor  # log of the softmax denominator, fp32 ``[B, Hq, Tq]``, contiguous
    kv_rows: int  # kv heads of all batch rows
    swizzle_group: int  # kv heads per L2 swizzle group
    logit_scale: float  # converts scores to base-2 logits
    softcap: float | None  # softcap of base-2 logits, or ``None``
    # threshold of base-2 logits; ``None`` if nothing can be skipped and nothing is counted
    skip_threshold: float | None
    sinks: Tensor | None  # sink logits ``[Hq]``, contiguous, or ``None``
    tile_counts: Tensor | None  # int64 ``[Hq, 2]``, where skipped and examined tiles are added, or ``None``
