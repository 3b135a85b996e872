"""The ``triton`` backend: choose a lowering for the device, quantise the keys and values, launch the attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..numerics.geometry import PrefillGeometry
from ..numerics.recipe import Recipe
from ..runtime import chip
from ..runtime.launch import on_device
from ..runtime.lowering import select_lowering
from ..runtime.replay import Call, Results, call_of, tensor_kind
from ..runtime.tuning import select_tiles, starts_early
from .host import prefill_attention
from .operands import Operands
from .quantizer import quantize_keys_values, query_factor


def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    *,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    return_lse: bool = True,
    call: Call | None = None,
) -> Results:
    """Compute attention on the Triton backend; arguments as in the custom op of :mod:`dma_kernels.api`.

    Args:
        query: This and all up to ``softcap`` as the op takes them.
        key: Likewise.
        value: Likewise.
        recipe: The fields that the op takes one by one.
        q_offset: Likewise.
        kv_offset: Likewise.
        q_offset_rows: Likewise.
        kv_offset_rows: Likewise.
        kv_range: Likewise.
        mask: Likewise.
        sinks: Likewise.
        is_causal: Likewise.
        window: Likewise.
        scale: Likewise.
        softcap: Likewise.
        return_lse: Whether the logarithms of the denominators are wanted.
        call: What has been recorded of calls like this; found out where it is ``None``.

    Returns:
        The output and, if they are wanted, the logarithms.
    """
    rows = None
    if q_offset_rows is not None or kv_offset_rows is not None or kv_range is not None:
        rows = _row_geometry(key, q_offset, kv_offset, q_offset_rows, kv_offset_rows, kv_range)
        q_offset = kv_offset = 0  # not read
    inputs = (query, key, value, sinks, mask, rows)
    options = (q_offset, kv_offset, is_causal, window, scale, softcap, return_lse)
    if call is None:
        call = call_of(recipe, *map(tensor_kind, inputs), *options)

    def run() -> Results:
        geometry = PrefillGeometry(key.shape[2], q_offset, kv_offset, rows, is_causal, window, mask)
        results = _attend(query, key, value, recipe, geometry, scale=scale, softcap=softcap, sinks=sinks)
        return results if return_lse else results[:1]

    return call.run(inputs, run)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    geometry: PrefillGeometry,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Quantise and launch."""
    arch = chip.device_arch(query.device)
    lowering = select_lowering(recipe, arch, max(query.shape[3], value.shape[3]))
    with on_device(query.device):
        operands = quantize_operands(query, key, value, recipe, kv_offset=geometry.kv_offset, rows=geometry.rows)
        return prefill_attention(
            query,
            operands,
            geometry,
            recipe,
            select_tiles(arch, lowering, query.shape[3], value.shape[3], has_softcap=softcap is not None),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            use_tma=arch >= 90,
            is_interpreted=chip.is_interpreted(),
        )


def quantize_operands(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, kv_offset: int = 0, rows: Tensor | None = None
) -> Operands:
    """Launch what precedes the attention kernel; arguments as for :func:`quantize_keys_values`."""
    arch, interpreted = chip.device_arch(query.device), chip.is_interpreted()
    operands = quantize_keys_values(
        key,
        value,
        recipe,
        select_lowering(recipe, arch, max(key.shape[3], value.shape[3])),
        kv_offset=kv_offset,
        rows=rows,
        is_interpreted=interpreted,
        use_pdl=not interpreted and starts_early(arch, key.shape[2]),
    )
    head_scale = query_factor(query, recipe, is_interpreted=interpreted)
    return operands if head_scale is None else replace(operands, query_factor=head_scale)


def _row_geometry(
    key: Tensor,
    q_offset: int,
    kv_offset: int,
    q_offset_rows: Tensor | None,
    kv_offset_rows: Tensor | None,
    kv_range: Tensor | None,
) -> Tensor:
    """Return int32 ``[B, 4]``: positions of query 0 and key 0, first visible key, and the one past the last."""
    rows = torch.empty((key.shape[0], 4), dtype=torch.int32, device=key.device)
    rows[:, 0] = q_offset if q_offset_rows is None else q_offset_rows + q_offset
    rows[:, 1] = kv_offset if kv_offset_rows is None else kv_offset_rows + kv_offset
    if kv_range is None:
        rows[:, 2], rows[:, 3] = 0, key.shape[2]
    else:
        rows[:, 2:] = kv_range
    return rows
