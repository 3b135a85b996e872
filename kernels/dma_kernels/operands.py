"""What the prefill kernel reads: queries, keys and values in the precisions of a recipe, ready for one chip.

There are two lowerings.

``8bit``
    For recipes whose low queries and keys are MXINT8 or MXFP8 with ``shared_scale = "tile"`` and whose high tiles are
    unquantised. Low scores are products of the 8-bit elements themselves on INT8 or FP8 matrix units, times one factor
    per query row and one per key tile; no factor is spent on a single score. Values of ``pv = "fp8"`` stay in E4M3 too.
    Prepared by fused Triton kernels (:mod:`dma_kernels.fused_quantize`).
``portable``
    For every other recipe, and for chips without those units: the operands are dequantised to 16 bits, which is exact
    (no format has more than 8 significant bits), and multiplied in 16 bits. Prepared in torch.

Aligned storage
    What the fused kernels write is indexed by position: entry ``s`` of batch row ``b`` holds the key at position
    ``kv_base[b] + s``, where ``kv_base`` is the start of the tile that key 0 lies in. Whatever the padding, every block
    of the rule is then aligned in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import UNQUANTIZED, SharedScale
from .preparation import prepare_operands
from .recipe import Recipe


@dataclass(frozen=True)
class Operands:
    """The tensors of one call.

    Attributes:
        q_high: 16-bit ``[B, Hq, Tq, D]``, any strides.
        k_high: 16-bit ``[B, Hkv, Tk, D]``, any strides, or aligned ``[B, Hkv, S, D]``.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides; or E4M3 ``[B, Hkv, Dv, S]``, aligned, the keys in the order of
            :func:`~dma_kernels.device.permute_keys`.
        q_low: ``[B, Hq, Tq, D']``; ``None`` where there are no low tiles.
        k_low: ``[B, Hkv, Tk, D]``, any strides, or aligned ``[B, Hkv, S, D']``; ``None`` where there are no low tiles.
        q_factor: fp32 ``[B, Hq, Tq]``, the scale of each row of ``q_low``; ``None`` for 1.
        k_factor: fp32 ``[B, Hkv, S / 128]``, the scale of each tile of ``k_low``; ``None`` for 1.
        value_factor: fp32 ``[B, Hkv, Dv]``, the scale of each channel of ``value``; ``None`` for 1.
        pv: ``16bit``, ``fp8`` (E4M3 units), or ``fp8_emulated`` (probabilities rounded to E4M3, 16-bit units).
        is_high_aligned: Whether ``k_high`` is in aligned storage.
        is_low_aligned: Whether ``k_low`` is.
    """

    q_high: Tensor
    k_high: Tensor
    value: Tensor
    q_low: Tensor | None = None
    k_low: Tensor | None = None
    q_factor: Tensor | None = None
    k_factor: Tensor | None = None
    value_factor: Tensor | None = None
    pv: str = "16bit"
    is_high_aligned: bool = False
    is_low_aligned: bool = False


def select_lowering(recipe: Recipe, arch: int) -> str:
    """Return the lowering of a recipe on a chip of compute capability ``arch`` (90 is Hopper): see the module."""
    has_8bit_scores = (
        recipe.query_low == recipe.key_low
        and recipe.key_low in ("mxint8", "mxfp8")
        and recipe.shared_scale == SharedScale.TILE
        and recipe.high == UNQUANTIZED
    )
    return "8bit" if has_8bit_scores and arch >= 89 else "portable"


def prepare_portable(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, kv_position: Tensor, visible: Tensor | None
) -> Operands:
    """Prepare the ``portable`` operands in torch; arguments as for :func:`~dma_kernels.preparation.prepare_operands`.

    Quantised tensors become bfloat16, unquantised ones keep their dtype.
    """
    prepared = prepare_operands(query, key, value, recipe, kv_position=kv_position, visible=visible)
    high = query.dtype if recipe.high == UNQUANTIZED else torch.bfloat16
    is_mixed = not recipe.is_uniform
    # The two sides of a product have one dtype; a model's 16 bits stay where neither side is quantised.
    low = query.dtype if recipe.query_low == recipe.key_low == UNQUANTIZED else torch.bfloat16
    if recipe.pv == "fp8":
        assert prepared.value_scale is not None
        dequantized = (prepared.value * prepared.value_scale).to(torch.bfloat16)
    else:
        dequantized = prepared.value.to(value.dtype)
    return Operands(
        q_high=prepared.q_high.to(high),
        k_high=prepared.k_high.to(high),
        value=dequantized,
        q_low=prepared.q_low.to(low) if is_mixed else None,
        k_low=prepared.k_low.to(low) if is_mixed else None,
        pv="fp8_emulated" if recipe.pv == "fp8" else "16bit",
    )
