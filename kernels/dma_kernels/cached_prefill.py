"""A chunk of queries over a cache on the Triton backend: the prefill kernel reads the body where it lies.

High tiles are read from one tensor of the sinks and of everything from the chunk's band on, raw; that is as long as the
chunk and the band. 8-bit bodies are the kernel's own operands. Those of other formats are dequantised to 16 bits first.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from . import fused
from .append import append_tokens
from .blocks import Fp8Values, TileScaled, Unquantized
from .dequantize import dequantize_body
from .formats import TILE, UNQUANTIZED
from .fused_quantize import query_factor
from .geometry import PrefillGeometry
from .operands import Form, Lowering, Operands, TileOperands, dequantized_dtype, select_lowering
from .prefill import prefill_attention
from .quantize import to_e4m3, value_scale
from .storage import LayerStorage
from .tuning import select_tiles


def unsupported_reason(query: Tensor, storage: LayerStorage) -> str | None:
    """Return why the prefill kernel cannot answer a causal chunk over a cache; ``None`` if it can."""
    if storage.recipe.high != UNQUANTIZED:
        return f"chunks over a cache need high='bf16', got {storage.recipe.high!r}"
    if storage.window is not None and query.shape[2] > TILE:
        return f"over a sliding window's cache it takes chunks of at most {TILE} queries, got {query.shape[2]}"
    if storage.slots == 0:
        return "the cache has no complete tile yet"
    return None


def prefill_over_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend causally to stored and new keys, and store the new ones; arguments as for ``cached_attention``.

    Returns:
        Output ``[B, Hq, T, Dv]`` and the logarithm of the denominator, fp32 ``[B, Hq, T]``.
    """
    recipe, arch = storage.recipe, fused.device_arch(query.device)
    length = storage.lengths.clone()
    # Before the chunk takes the place of the oldest keys in the tail.
    gap, band_keys, band_values = _band(storage, key, value)
    append_tokens(storage, key, value)
    high_key = torch.cat((storage.key_sink, band_keys), 2)
    high_value = torch.cat((storage.value_sink, band_values), 2)
    if recipe.pv == "fp8":
        factor = value_scale(high_value)
        high_value = (to_e4m3(high_value.float() / factor).float() * factor).to(high_value.dtype)
    rows = torch.zeros((len(length), 4), dtype=torch.int32, device=query.device)
    rows[:, 0], rows[:, 3] = length, (length + key.shape[2]).clamp(min=0)
    lowering = select_lowering(recipe, arch)
    interpreted = fused.is_interpreted()
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with on_device:
        operands = Operands(
            high=TileOperands(high_key, high_value, Form.RAW, Form.RAW, "gapped", "gapped"),
            low=_low_operands(storage, lowering),
            key_mean=storage.key_mean if recipe.smooth_k else None,
            query_factor=query_factor(query, recipe, is_interpreted=interpreted),
            gap=gap,
        )
        return prefill_attention(
            query,
            operands,
            PrefillGeometry((storage.slots + 1) * TILE, 0, 0, rows, is_causal=True, window=window, mask=None),
            recipe,
            select_tiles(arch, lowering, query.shape[3], value.shape[3], has_softcap=softcap is not None),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            use_tma=arch >= 90,
            is_interpreted=interpreted,
        )


def _band(storage: LayerStorage, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gap behind the sinks, and the raw keys and values from the chunk's first high tile on."""
    recipe = storage.recipe
    length = storage.lengths.clamp(min=0)[:, None].long()
    sink_end = recipe.sink_tiles * TILE
    start = ((length // TILE - recipe.diagonal_tiles) * TILE).clamp(min=sink_end)
    position = start + torch.arange((recipe.diagonal_tiles + 1) * TILE + key.shape[2], device=key.device)  # [B, N]
    new = (position - storage.lengths[:, None]).clamp(max=key.shape[2] - 1)
    entry = torch.where(position < length, position % storage.ring, storage.ring + new)
    entry = entry[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    bands = [
        torch.cat((tail, tokens), 2).gather(2, entry.expand(-1, -1, -1, tail.shape[3]))
        for tail, tokens in ((storage.key_tail, key), (storage.value_tail, value))
    ]
    return (start[:, 0] - sink_end).to(torch.int32), bands[0], bands[1]


def _low_operands(storage: LayerStorage, lowering: Lowering) -> TileOperands:
    """Return the body as the kernel takes it: as it is where it can be multiplied so, else in 16 bits."""
    recipe, dtype = storage.recipe, storage.key_tail.dtype
    layout = "aligned" if storage.window is None else "ring"
    key_codec, value_codec = storage.key_codec, storage.value_codec
    key, value = (body["data"].flatten(2, 3) for body in (storage.key_body, storage.value_body))
    key_form = value_form = Form.DEQUANTIZED
    key_factor = value_factor = key_dtype = value_dtype = None
    if isinstance(key_codec, TileScaled) and lowering.low_key in (Form.INT8, Form.E4M3):
        key_form, key_factor = lowering.low_key, storage.key_body["factor"]
    elif not isinstance(key_codec, Unquantized):
        key_dtype = dequantized_dtype(dtype, recipe.query_low, recipe.key_low)
    if isinstance(value_codec, Fp8Values) and lowering.value is Form.E4M3:
        value, value_form, value_factor = storage.value_body["data"], Form.E4M3, storage.value_body["factor"]
    elif not isinstance(value_codec, Unquantized):
        value_dtype = dtype
    keys, values = dequantize_body(storage, key_dtype, value_dtype)
    return TileOperands(
        key=key if keys is None else keys,
        value=value if values is None else values,
        key_form=key_form,
        value_form=value_form,
        key_layout=layout,
        value_layout=layout,
        key_factor=key_factor,
        value_factor=value_factor,
    )
