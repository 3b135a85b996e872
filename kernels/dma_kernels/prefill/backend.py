"""The ``triton`` backend: choose a lowering for the device, quantise the keys and values, launch the attention."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..numerics.geometry import AttentionOptions, PrefillGeometry
from ..numerics.recipe import Recipe
from ..runtime import chip
from ..runtime.launch import on_device
from ..runtime.lowering import select_lowering
from ..runtime.replay import Call, call_of, tensor_kind
from ..runtime.tuning import select_tiles
from .host import prefill_attention
from .operands import Operands
from .quantizer import quantize_keys_values
from .query_factor import query_factor


def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    options: AttentionOptions,
    tile_counts: Tensor | None = None,
    call: Call | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention on the Triton backend.

    Args:
        query: ``[B, Hq, Tq, D]``.
        key: ``[B, Hkv, Tk, D]``.
        value: ``[B, Hkv, Tk, Dv]``.
        recipe: The precisions.
        options: Everything else.
        tile_counts: Where to add the counts of skipped tiles.
        call: What has been recorded of calls like this; found out where it is ``None``.

    Returns:
        The output, and the logarithms of the denominators.
    """
    geometry = PrefillGeometry.of(options, query, key)
    if geometry.low_tiles(query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles) == range(0):
        recipe = recipe.of_high_tiles
    inputs = (query, key, value, options.sinks, options.mask, geometry.rows, tile_counts)
    if call is None:
        asked = (geometry.q_offset, geometry.kv_offset, options.is_causal, options.window, options.scale)
        call = call_of(recipe, *map(tensor_kind, inputs), *asked, options.softcap)

    def run() -> tuple[Tensor, Tensor]:
        """Quantise and launch."""
        arch, has_softcap = chip.device_arch(query.device), options.softcap is not None
        lowering = select_lowering(recipe, arch, max(query.shape[3], value.shape[3]))
        with on_device(query.device):
            operands = quantize_operands(query, key, value, recipe, geometry)
            return prefill_attention(
                query,
                operands,
                geometry,
                recipe,
                select_tiles(arch, lowering, query.shape[3], value.shape[3], has_softcap=has_softcap),
                scale=options.scale,
                softcap=options.softcap,
                sinks=options.sinks,
                tile_counts=tile_counts,
                use_tma=arch >= 90,
                # Keys of low tiles are the quantiser's, which lets the next launch start early. Itself it started after
                # the end of all that came before, so what the caller gave is there. Where NVFP4's scale of queries is
                # made, another launch comes between.
                is_early=chip.starts_early(query.device) and operands.low is not None and operands.query_factor is None,
            )

    out, lse = call.run(inputs, run)
    return out, lse


def quantize_operands(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, geometry: PrefillGeometry) -> Operands:
    """Launch what precedes the attention kernel; arguments as for it and for :func:`quantize_keys_values`."""
    arch = chip.device_arch(query.device)
    operands = quantize_keys_values(
        key,
        value,
        recipe,
        select_lowering(recipe, arch, max(key.shape[3], value.shape[3])),
        kv_offset=geometry.kv_offset,
        rows=geometry.rows,
        low_tiles=geometry.low_tiles(query.shape[2], recipe.diagonal_tiles, recipe.sink_tiles),
    )
    head_scale = query_factor(query, recipe)
    return operands if head_scale is None else replace(operands, query_factor=head_scale)
