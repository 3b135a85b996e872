"""The high tiles of a chunk over a cache: its sinks, and everything from the chunk's band on, in one 16-bit tensor.

Raw keys and values lie in three places, among the sinks, in the tail and in the chunk itself, and which of them a
position is read from depends on how much a row holds: the device knows. So one launch gathers them, before the chunk
takes the place of the oldest keys in the tail; it also writes the geometry of the rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..numerics.formats import TILE, padded_channels
from ..runtime import replay
from ..runtime.launch import Launcher, on_device
from .forms import storage_kind
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@dataclass(frozen=True)
class HighTiles:
    """What the high tiles of a chunk are read from.

    Attributes:
        key: Raw keys ``[B, Hkv, N, D]``, ``N = (sink_tiles + diagonal_tiles + 1) * 128 + T``, in the layout ``gapped``
            (:mod:`dma_kernels.prefill.operands`). Zeros where there are none.
        value: Raw values ``[B, Hkv, N, Dv]``.
        gap: int32 ``[B]``.
        rows: int32 ``[B, 4]``, see :class:`~dma_kernels.numerics.geometry.PrefillGeometry`.
    """

    key: Tensor
    value: Tensor
    gap: Tensor
    rows: Tensor


@triton.jit
def _gather(
    out_base, new_base, tail_base, sink_base, position, is_entry, entry, length, new_len, stride_t, stride_d,
    ring, sink_len, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gather the rows of a tile at consecutive positions, and store them at ``entry``."""
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    is_sink = position < sink_len
    is_stored = position < length
    sink = tl.load(
        sink_base + position[:, None] * D + o_d[None, :], mask=(is_stored & is_sink)[:, None] & m_d, other=0.0
    )
    tail_rows = (position % ring)[:, None]
    x = tl.load(tail_base + tail_rows * D + o_d[None, :], mask=(is_stored & ~is_sink)[:, None] & m_d, other=0.0)
    x = tl.where(is_sink[:, None], sink, x)
    new = position - length
    is_new = (new >= 0) & (new < new_len)
    offset = new.to(tl.int64)[:, None] * stride_t + o_d[None, :] * stride_d
    x = tl.where(is_stored[:, None], x, tl.load(new_base + offset, mask=is_new[:, None] & m_d, other=0.0))
    tl.store(out_base + entry.to(tl.int64)[:, None] * D + o_d[None, :], x, mask=is_entry[:, None] & m_d)


@triton.jit(do_not_specialize=["new_len", "entries", "ring", "sink_len", "diagonal_tiles"])
def high_tiles_kernel(
    key_out_ptr, value_out_ptr, gap_ptr, rows_ptr,
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, lengths_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    new_len, entries, ring, sink_len, diagonal_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Gather a tile of a kv head, keys or values; grid ``(tiles of entries, B * Hkv, 2)``."""
    i_head = tl.program_id(1).to(tl.int64)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    length = tl.load(lengths_ptr + i_b)
    # The first tile of the band. A negative length says that padding is still to come: positions begin at 0.
    band = ((tl.maximum(length, 0) >> _TILE_SHIFT) - diagonal_tiles) << _TILE_SHIFT
    gap = tl.maximum(band - sink_len, 0)
    entry = tl.program_id(0) * _TILE + tl.arange(0, _TILE)
    position = tl.where(entry < sink_len, entry, entry + gap)
    is_entry = entry < entries
    if tl.program_id(2) == 0:
        _gather(
            key_out_ptr + i_head * entries * D, key_ptr + i_b * stride_kb + i_kv * stride_kh,
            key_tail_ptr + i_head * ring * D, key_sink_ptr + i_head * sink_len * D,
            position, is_entry, entry, length, new_len, stride_kt, stride_kd, ring, sink_len, D, BLOCK_D,
        )  # fmt: skip
    else:
        _gather(
            value_out_ptr + i_head * entries * DV, value_ptr + i_b * stride_vb + i_kv * stride_vh,
            value_tail_ptr + i_head * ring * DV, value_sink_ptr + i_head * sink_len * DV,
            position, is_entry, entry, length, new_len, stride_vt, stride_vd, ring, sink_len, DV, BLOCK_DV,
        )  # fmt: skip
    if tl.program_id(0) + tl.program_id(2) + i_kv == 0:
        tl.store(gap_ptr + i_b, gap)
        tl.store(rows_ptr + i_b * 4, length)
        tl.store(rows_ptr + i_b * 4 + 1, 0)
        tl.store(rows_ptr + i_b * 4 + 2, 0)
        tl.store(rows_ptr + i_b * 4 + 3, tl.maximum(length + new_len, 0))


def gather_high_tiles(storage: LayerStorage, key: Tensor, value: Tensor) -> HighTiles:
    """Gather what a chunk's high tiles are read from, with no host synchronisation.

    Args:
        storage: What came before the chunk.
        key: The chunk's raw keys ``[B, Hkv, T, D]`` in the dtype of the storage, any strides.
        value: Its raw values ``[B, Hkv, T, Dv]``.
    """
    raw = storage.key_tail, storage.value_tail, storage.key_sink, storage.value_sink, storage.lengths
    call = replay.call_of("high tiles", replay.tensor_kind(key), replay.tensor_kind(value), *storage_kind(storage))
    return HighTiles(*call.run((key, value, *raw), lambda: _launch(storage, key, value)))


def _launch(storage: LayerStorage, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Launch the kernel; returns what :class:`HighTiles` holds."""
    (batch, kv_heads, new_len, head_dim), value_dim = key.shape, value.shape[3]
    recipe, sink_len = storage.recipe, storage.key_sink.shape[2]
    entries = sink_len + (recipe.diagonal_tiles + 1) * TILE + new_len
    made = (
        key.new_empty((batch, kv_heads, entries, head_dim)),
        value.new_empty((batch, kv_heads, entries, value_dim)),
        storage.lengths.new_empty(batch),
        storage.lengths.new_empty((batch, 4)),
    )
    with on_device(key.device):
        _launcher(kv_heads, head_dim, value_dim, key.dtype)(
            (-(-entries // TILE), batch * kv_heads, 2),
            *made,
            key, value, storage.key_tail, storage.value_tail, storage.key_sink, storage.value_sink, storage.lengths,
            *key.stride(), *value.stride(), new_len, entries, storage.ring, sink_len, recipe.diagonal_tiles,
        )  # fmt: skip
    return made


@functools.lru_cache(maxsize=256)
def _launcher(kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Launcher:
    """Return the launcher for a kind of cache."""
    constants = {
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_DV": padded_channels(value_dim),
    }
    settled = ("key_out_ptr", "value_out_ptr", "gap_ptr", "rows_ptr")
    return Launcher(high_tiles_kernel, constants, settled=settled, num_warps=8)
