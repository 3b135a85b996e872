"""Restoring cached KV to dense 16-bit tensors on the device: for chunked prefill, and for other attention functions.

One launch reads sink, residual and quantized KV, and a chunk's own new KV. Which of them holds a position depends on
the row's length, which is read on the device. Equals :meth:`LayerStorage.gather`, rounded to 16 bits, bit for bit.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard, narrow
from ..device.tiles import TILE, TILE_SHIFT, head_rows
from ..numerics.call import narrow_positions
from ..numerics.formats import MAX_BAND_TILES
from ..runtime.launch import launch_kernel
from ..runtime.plan import Planned
from .append import append_warps
from .kernel_args import CacheInputs, CacheSizes, PageConfig, Strided
from .page_kernel import dequantize_rows, load_page, page_block, unquantized_row
from .storage import LayerStorage

BLOCK_T = 64
"""Positions of a CTA."""
_BLOCK_T = tl.constexpr(BLOCK_T)


@triton.jit
def _restore_block(
    out_base, new, unquantized, row, i_kv, page_ptr, position, index, out_len, length, new_len, band, is_held,
    is_quantized, sizes,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the keys or values at consecutive positions."""
    residual_len = sizes.residual_tiles * TILE
    sink_len = sizes.sink_tiles * TILE
    residual_base = unquantized.residual + (row * unquantized.stride_residual + i_kv * residual_len * D)
    sink_base = unquantized.sink + (row * unquantized.stride_sink + i_kv * sink_len * D)
    o_d = tl.arange(0, BLOCK)
    m_d = (o_d < D)[None, :]
    is_sink = is_held & (position < sink_len)
    is_residual = is_held & ~is_sink & (position >= band)
    is_new = (position >= tl.maximum(length, 0)) & (position < length + new_len)
    x = tl.load(sink_base + position[:, None] * D + o_d[None, :], mask=is_sink[:, None] & m_d, other=0.0)
    slot = (position % residual_len)[:, None]
    residual = tl.load(residual_base + slot * D + o_d[None, :], mask=is_residual[:, None] & m_d, other=0.0)
    offset = (position - length).to(tl.int64)[:, None] * new.stride_t + o_d[None, :].to(tl.int64) * new.stride_d
    added = tl.load(new.ptr + offset, mask=is_new[:, None] & m_d, other=0.0)
    x = tl.where(is_sink[:, None], x, tl.where(is_residual[:, None], residual, added))
    is_quantized &= ~is_sink & ~is_residual
    if tl.max(is_quantized.to(tl.int32), 0) > 0:
        dequantized = dequantize_rows(page_ptr, position % TILE, is_quantized, D, BLOCK, BITS, ARE_KEYS)
        dequantized = hadamard(dequantized, HADAMARD, 1.0 / HADAMARD)
        x = tl.where(is_quantized[:, None], narrow(dequantized, x.dtype), x)
    tl.store(out_base + index.to(tl.int64)[:, None] * D + o_d[None, :], x, mask=(index < out_len)[:, None] & m_d)


@triton.jit(
    do_not_specialize=["new_len", "out_len", "band_tiles", "rolled_back", "max_pages", "residual_tiles", "sink_tiles"]
)
def restore_kernel(
    key_out_ptr, value_out_ptr, first_ptr, key, value, cache, new_len, out_len, band_tiles, rolled_back,
    max_pages, residual_tiles, sink_tiles, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write keys or values at ``BLOCK_T`` positions of a kv head; grid ``(B * Hkv, blocks, 2)``.

    Output index 0 of row ``b`` is position ``first_ptr[b]``. The incomplete tile and the ``band_tiles`` before it are
    read from the residual KV if it holds them.
    """
    sizes = CacheSizes(max_pages, residual_tiles, sink_tiles)
    i_head = tl.program_id(0).to(tl.int64)
    i_b = i_head // CONFIG.KV_HEADS
    i_kv = i_head % CONFIG.KV_HEADS
    length = tl.load(cache.lengths + i_b)
    index = tl.program_id(1) * _BLOCK_T + tl.arange(0, _BLOCK_T)
    position = tl.load(first_ptr + i_b) + index
    band = ((tl.maximum(length, 0) >> TILE_SHIFT) - band_tiles) << TILE_SHIFT
    band = tl.maximum(band, length + rolled_back - sizes.residual_tiles * TILE)
    tile = position >> TILE_SHIFT
    complete = (length + rolled_back) >> TILE_SHIFT
    is_held = (tile >= tl.maximum(complete - sizes.max_pages, 0)) & (position < length)
    is_quantized = is_held & (tile < complete)
    page = load_page(cache, i_b, tile, is_quantized, sizes.max_pages)
    page_ptr = page_block(cache, page, i_kv, CONFIG.PAGE_WORDS)
    row = unquantized_row(cache, i_b)
    if tl.program_id(2) == 0:
        _restore_block(
            key_out_ptr + i_head * out_len * CONFIG.D, head_rows(key, i_b, i_kv), cache.key, row, i_kv, page_ptr,
            position, index, out_len, length, new_len, band, is_held, is_quantized, sizes,
            CONFIG.D, CONFIG.BLOCK_D, CONFIG.LAYOUT.format.bits, CONFIG.LAYOUT.key_hadamard, True,
        )  # fmt: skip
    else:
        _restore_block(
            value_out_ptr + i_head * out_len * CONFIG.DV, head_rows(value, i_b, i_kv), cache.value, row, i_kv,
            page_ptr + CONFIG.KEY_WORDS, position, index, out_len, length, new_len, band, is_held,
            is_quantized, sizes,
            CONFIG.DV, CONFIG.BLOCK_DV, CONFIG.LAYOUT.format.bits, CONFIG.LAYOUT.value_hadamard, False,
        )  # fmt: skip


def restore_dense(
    storage: LayerStorage,
    first: Tensor,
    out_len: int,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    as_low: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dense KV starting at a position per row, without synchronizing; zeros where nothing is stored.

    Output index 0 is at position ``first``, integer ``[B]``. ``key`` and ``value``, if given, are new and not stored
    yet. With ``as_low``, every complete tile is read dequantized, as for low tiles, except the sinks. By default,
    everything that is stored unquantized is read unquantized.

    Returns:
        Keys ``[B, Hkv, out_len, D]`` and values ``[B, Hkv, out_len, Dv]`` in the model's dtype, contiguous.
    """
    if key is None or value is None:
        key, value = storage.empty_kv()
    keys, values = launch_restore(
        narrow_positions(first).contiguous(), key, value, *CacheInputs.of(storage), format=storage.format,
        out_len=out_len, band_tiles=0 if as_low else MAX_BAND_TILES, rolled_back=storage.rolled_back,
    )  # fmt: skip
    return keys, values


@Planned
def launch_restore(
    first: Any, key: Any, value: Any, *cache: Any, format: str, out_len: int, band_tiles: int, rolled_back: int
) -> list[Any]:
    """Launch the kernel, and return keys and values."""
    (batch, kv_heads, new_len, _), inputs = key.shape, CacheInputs(*cache)
    layout = inputs.page_layout(format)
    keys, values = (inputs.key_residual.new_empty((batch, kv_heads, out_len, x.shape[3])) for x in (key, value))
    launch_kernel(
        restore_kernel, {"CONFIG": PageConfig(layout, kv_heads)},
        (batch * kv_heads, triton.cdiv(out_len, BLOCK_T), 2),
        keys, values, first, Strided.of(key), Strided.of(value), inputs.tensors, new_len, out_len, band_tiles,
        rolled_back, *inputs.sizes, num_warps=append_warps(layout),
    )  # fmt: skip
    return [keys, values]
