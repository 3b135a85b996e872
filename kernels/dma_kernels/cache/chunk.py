"""A chunk of queries over a cache on the Triton backend: the prefill kernel reads the body where it lies.

High tiles are read from one tensor of the sinks and of everything from the chunk's band on, raw; that is as long as the
chunk and the band (:mod:`dma_kernels.cache.high_tiles`). 8-bit bodies are the kernel's own operands. Those of other
formats are dequantised to 16 bits first, for this call alone (:mod:`dma_kernels.cache.dequantize`): every block of
queries reads all keys, and would have to unpack them again.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..numerics.formats import TILE, UNQUANTIZED
from ..numerics.geometry import PrefillGeometry
from ..prefill.host import prefill_attention
from ..prefill.operands import Operands, TileOperands
from ..prefill.quantizer import query_factor
from ..runtime import chip, replay
from ..runtime.launch import on_device
from ..runtime.lowering import Form, Lowering, dequantized_dtype, select_lowering
from ..runtime.tuning import select_tiles
from .append import append_tokens
from .codecs import Fp8Values, TileScaled, Unquantized
from .dequantize import dequantize_body
from .forms import storage_kind, storage_tensors
from .high_tiles import HighTiles, gather_high_tiles
from .storage import LayerStorage


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
    # Before the chunk takes the place of the oldest keys in the tail.
    high = gather_high_tiles(storage, key, value)
    append_tokens(storage, key, value)
    inputs = (query, sinks, high.key, high.value, high.gap, high.rows, *storage_tensors(storage))
    options = (scale, window, softcap, storage.window)
    kinds = (replay.tensor_kind(query), replay.tensor_kind(sinks), high.key.shape)
    call = replay.call_of("chunk", *kinds, *storage_kind(storage), *options)

    def run() -> tuple[Tensor, Tensor]:
        return _attend(query, high, storage, window=window, scale=scale, softcap=softcap, sinks=sinks)

    out, lse = call.run(inputs, run)
    return out, lse


def _attend(
    query: Tensor,
    high: HighTiles,
    storage: LayerStorage,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend to a cache that holds the chunk; arguments and results as for :func:`prefill_over_cache`."""
    recipe, arch = storage.recipe, chip.device_arch(query.device)
    lowering = select_lowering(recipe, arch, max(query.shape[3], storage.value_tail.shape[3]))
    interpreted = chip.is_interpreted()
    tiles = select_tiles(arch, lowering, query.shape[3], storage.value_tail.shape[3], has_softcap=softcap is not None)
    if lowering.low_value is Form.E4M3:
        # Where every tile of values has factors of its own, they take registers that a cap would not leave: under that
        # of Hopper the loop over low tiles spills (an H200, kv8, 2,048 queries after 32K keys: 2.6 ms against 2.25).
        tiles = replace(tiles, max_registers=None)
    with on_device(query.device):
        operands = Operands(
            high=TileOperands(high.key, high.value, Form.RAW, Form.RAW, "gapped", "gapped"),
            low=_low_operands(storage, lowering),
            key_mean=storage.key_mean if recipe.smooth_k else None,
            query_factor=query_factor(query, recipe, is_interpreted=interpreted),
            gap=high.gap,
        )
        return prefill_attention(
            query,
            operands,
            PrefillGeometry((storage.slots + 1) * TILE, 0, 0, high.rows, is_causal=True, window=window, mask=None),
            recipe,
            tiles,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            use_tma=arch >= 90,
            is_interpreted=interpreted,
        )


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
    if isinstance(value_codec, Fp8Values) and lowering.low_value is Form.E4M3:
        value, value_form, value_factor = storage.value_body["data"], Form.E4M3, storage.value_body["factor"]
    elif not isinstance(value_codec, Unquantized):
        value_dtype = dtype
    if key_dtype is not None or value_dtype is not None:
        keys, values = dequantize_body(storage, key_dtype, value_dtype)
        key, value = key if keys is None else keys, value if values is None else values
    return TileOperands(
        key=key,
        value=value,
        key_form=key_form,
        value_form=value_form,
        key_layout=layout,
        value_layout=layout,
        key_factor=key_factor,
        value_factor=value_factor,
    )
