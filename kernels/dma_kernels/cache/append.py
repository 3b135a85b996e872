"""Appending to a cache on the Triton backend: one launch stores new KV and quantizes the tiles that it completes.

Whether a tile is complete is decided on the device. So a decode step never synchronizes, and a CUDA graph of a step
quantizes a tile on every 128th replay.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard
from ..device.tiles import head_rows
from ..numerics.formats import TILE
from ..runtime.launch import ASSERTS, launch_kernel
from ..runtime.plan import Planned
from .kernel_args import CacheInputs, CacheSizes, PageConfig, Strided
from .page_kernel import load_page, page_block, quantize_key_tile, quantize_value_tile, unquantized_row
from .page_layout import ROWS, PageLayout
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_PAGE_ROWS = tl.constexpr(ROWS)
_ROWS = tl.constexpr(16)
"""Tokens stored at a time; a decode step has few."""
PIECES = 4
"""CTAs that quantize a tile, so that a decode step waits less: each a quarter of the tokens of values, or of the
channels of keys. Pieces of rotated keys have whole Hadamard blocks, so there are fewer."""
_PIECES = tl.constexpr(PIECES)

MAX_REGISTERS = 128
"""Per thread, so that an SM holds 16 warps. Only whole tiles of rotated keys need as many."""


@triton.jit
def _append_tile(
    new, unquantized, row, i_kv, page_ptr, tile, piece, length, end, sizes, is_complete,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ARE_KEYS: tl.constexpr,
    STORE: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Quantize a piece of a tile of keys or values if the tile is complete, and store its new tokens unquantized."""
    residual_base = unquantized.residual + (row * unquantized.stride_residual + i_kv * sizes.residual_tiles * _TILE * D)
    sink_base = unquantized.sink + (row * unquantized.stride_sink + i_kv * sizes.sink_tiles * _TILE * D)
    first = tile * _TILE
    index = (tile % sizes.residual_tiles) * _TILE
    if QUANTIZE:
        TOKENS: tl.constexpr = _TILE if ARE_KEYS else _TILE // _PIECES
        CHANNELS: tl.constexpr = max(BLOCK // _PIECES, HADAMARD, _PAGE_ROWS) if ARE_KEYS else BLOCK
        first_channel = piece * CHANNELS if ARE_KEYS else 0
        if is_complete & (first_channel < D):
            token = (0 if ARE_KEYS else piece * TOKENS) + tl.arange(0, TOKENS)
            o_d = first_channel + tl.arange(0, CHANNELS)
            m_d = (o_d < D)[None, :]
            m_old = (first + token < length)[:, None] & m_d
            offset = (first + token - length).to(tl.int64)[:, None] * new.stride_t
            offset += o_d[None, :].to(tl.int64) * new.stride_d
            x = tl.load(new.ptr + offset, mask=(first + token >= length)[:, None] & m_d, other=0.0)
            old = tl.load(residual_base + (index + token)[:, None] * D + o_d[None, :], mask=m_old, other=0.0)
            x = hadamard(tl.where(m_old, old, x).to(tl.float32), HADAMARD, 1.0)
            if ARE_KEYS:
                quantize_key_tile(x, page_ptr, first_channel, D, BITS)
            else:
                quantize_value_tile(x, page_ptr, piece * TOKENS, D, BITS)
    if STORE:
        o_d = tl.arange(0, BLOCK)
        m_d = (o_d < D)[None, :]
        is_sink = tile < sizes.sink_tiles
        oldest = end - sizes.residual_tiles * _TILE
        start = tl.maximum(tl.maximum(length, first), tl.where(is_sink, 0, oldest))
        last = tl.where(piece == 0, tl.minimum(end, first + _TILE), start)  # the other pieces store nothing
        for i_row in range(start, last, _ROWS):
            position = i_row + tl.arange(0, _ROWS)
            m_x = (position < last)[:, None] & m_d
            offset = (position - length).to(tl.int64)[:, None] * new.stride_t
            offset += o_d[None, :].to(tl.int64) * new.stride_d
            x = tl.load(new.ptr + offset, mask=m_x, other=0.0)
            residual = residual_base + (index + position - first)[:, None] * D + o_d[None, :]
            tl.store(residual, x, mask=m_x & (position >= oldest)[:, None])
            if is_sink:
                tl.store(sink_base + position[:, None] * D + o_d[None, :], x, mask=m_x)


@triton.jit
def append_head(
    key, value, cache, i_head, i_tile, are_values, piece, length, new_len, sizes, max_tiles,
    CONFIG: tl.constexpr, STORE: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Append keys or values to a piece of a tile of a kv head: the ``i_tile``-th tile that new tokens can be in."""
    i_b = i_head // CONFIG.KV_HEADS
    i_kv = i_head % CONFIG.KV_HEADS
    end = length + new_len
    # A negative length counts upcoming padding; positions start at 0.
    tile = (tl.maximum(length, 0) >> _TILE_SHIFT) + i_tile
    if tile * _TILE < end:
        # A ring holds the last tiles.
        is_complete = ((tile + 1) * _TILE <= end) & (tile >= (end >> _TILE_SHIFT) - sizes.max_pages)
        page = load_page(cache, i_b, tile, is_complete, sizes.max_pages)
        # The host cannot check this for compiled code and CUDA graphs. Never write to the page of another tile.
        has_page = (tile < max_tiles) & (page >= 0)
        tl.device_assert(has_page | (is_complete == 0), "the cache has no page for a complete tile; reserve more tiles")
        is_complete = is_complete & has_page
        page_ptr = page_block(cache, page, i_kv, CONFIG.PAGE_WORDS)
        row = unquantized_row(cache, i_b)
        if are_values:
            _append_tile(
                head_rows(value, i_b, i_kv), cache.value, row, i_kv, page_ptr + CONFIG.KEY_WORDS,
                tile, piece, length, end, sizes, is_complete,
                CONFIG.DV, CONFIG.BLOCK_DV, CONFIG.LAYOUT.format.bits, CONFIG.LAYOUT.value_hadamard, False, STORE,
                QUANTIZE,
            )  # fmt: skip
        else:
            _append_tile(
                head_rows(key, i_b, i_kv), cache.key, row, i_kv, page_ptr, tile, piece, length, end, sizes, is_complete,
                CONFIG.D, CONFIG.BLOCK_D, CONFIG.LAYOUT.format.bits, CONFIG.LAYOUT.key_hadamard, True, STORE, QUANTIZE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["new_len", "max_tiles", "max_pages", "residual_tiles", "sink_tiles"])
def append_kernel(
    key, value, cache, new_len, max_tiles, max_pages, residual_tiles, sink_tiles,
    CONFIG: tl.constexpr, STORE: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Append keys or values to a tile; grid ``(B * Hkv, tiles that new tokens can be in, 2 * pieces)``."""
    i_head = tl.program_id(0).to(tl.int64)
    length = tl.load(cache.lengths + i_head // CONFIG.KV_HEADS)
    sizes = CacheSizes(max_pages, residual_tiles, sink_tiles)
    append_head(
        key, value, cache, i_head, tl.program_id(1), tl.program_id(2) % 2 == 1, tl.program_id(2) // 2, length, new_len,
        sizes, max_tiles, CONFIG, STORE, QUANTIZE,
    )  # fmt: skip


def append_tokens(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Do :meth:`LayerStorage.append` in Triton, without synchronizing.

    A complete tile without a page is not stored, and fails an assertion on the device.
    """
    if key.numel() == 0:
        return
    _launch(key, value, *CacheInputs.of(storage), format=storage.format, max_tiles=storage.max_tiles)
    storage.lengths += key.shape[2]
    storage.count_appended(key.shape[2])


@Planned
def _launch(key: Any, value: Any, *cache: Any, format: str, max_tiles: int) -> tuple[()]:
    """Launch the kernels that store keys and values; they do not update ``lengths``."""
    (batch, kv_heads, new_len, _), inputs = key.shape, CacheInputs(*cache)
    layout, sizes = inputs.page_layout(format), inputs.sizes
    tiles = (new_len + TILE - 2) // TILE + 1
    # New tokens that wrap around the ring would overwrite stored keys that are still to be quantized.
    passes = ((True, True),) if tiles <= sizes.residual_tiles else ((False, True), (True, False))
    for store, quantize in passes:
        constants = {"CONFIG": PageConfig(layout, kv_heads), "STORE": store, "QUANTIZE": quantize}
        launch_kernel(
            append_kernel, constants, (batch * kv_heads, tiles, 2 * PIECES if quantize else 2),
            Strided.of(key), Strided.of(value), inputs.tensors, new_len, max_tiles, *sizes,
            num_warps=append_warps(layout) // 2, maxnreg=MAX_REGISTERS, **ASSERTS,  # a piece is small
        )  # fmt: skip
    return ()


def append_warps(layout: PageLayout) -> int:
    """Return the warps of a CTA that may quantize a tile."""
    return 8 if max(layout.head_dim, layout.value_dim) <= 128 else 16
