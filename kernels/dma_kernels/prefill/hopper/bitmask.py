"""Bitmasks for Hopper's kernels: one word masks a thread's scores of 128 keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device.tiles import load_visible_range
from ...numerics.formats import TILE
from ...numerics.geometry import AttentionGeometry
from ...numerics.layout import broadcast_strides
from ...runtime.launch import launch_kernel
from ..config import ROWS

_TILE = tl.constexpr(TILE)


class PackedMask(NamedTuple):
    """A bitmask of planes, one per head of each batch row; kernels take the fields in this order."""

    # int32 ``[planes, Tq, tiles, 4]``, contiguous: one bit per key of each tile of tile-padded storage. ``None``
    # without a mask.
    words: Tensor | None
    # int32 ``[planes, blocks, 2]``, contiguous: for each block of 64 queries ``tiles`` minus the first tile that one of
    # them attends to, and the tile after the last one; both 0 if there is none
    bounds: Tensor | None
    planes_per_row: int  # planes per batch row; 0 if all batch rows share them
    planes_per_head: int  # planes per head, 1; 0 if all heads share one
    blocks: int  # blocks of 64 query positions per batch row


@triton.jit(do_not_specialize=["q_offset", "q_len", "tiles"])
def pack_mask_kernel(
    mask_ptr, seq_info_ptr, words_ptr, bounds_ptr, stride_b, stride_h, stride_q, stride_k,
    q_offset, first, q_len, kv_len, tiles, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the bitmask of a block of queries and one tile.

    ``first`` is the key in row 0 of tile-padded storage, 0 or negative, if it is the same in all batch rows. Triton
    specializes on it and on ``kv_len``, because they determine the width of loads.
    """
    i_plane = tl.program_id(0).to(tl.int64)
    i_b = i_plane // HEADS
    i_tile = tl.program_id(2)
    if seq_info_ptr is not None:
        q_offset = tl.load(seq_info_ptr + i_b * 4)
        first = load_visible_range(seq_info_ptr, i_b, 0, kv_len)[2]
    # Blocks begin at multiples of their size.
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS) - (q_offset & (ROWS - 1))).to(tl.int64)
    columns = tl.arange(0, _TILE)
    keys = first + i_tile * _TILE + columns
    m_row = (rows >= 0) & (rows < q_len)
    offset = rows[:, None] * stride_q + keys.to(tl.int64)[None, :] * stride_k
    m_mask = m_row[:, None] & ((keys >= 0) & (keys < kv_len))[None, :]
    mask = tl.load(mask_ptr + i_b * stride_b + (i_plane % HEADS) * stride_h + offset, mask=m_mask, other=0)
    # Columns 8 j + 2 t and 8 j + 2 t + 1, which one thread holds, are bits 2 j and 2 j + 1 of word t.
    bits = (mask != 0).to(tl.int32) << (columns // 8 * 2 + columns % 2)[None, :]
    words = tl.sum(tl.sum(tl.reshape(bits, [ROWS, _TILE // 8, 4, 2]), 3), 1)
    offset = ((i_plane * q_len + rows) * tiles + i_tile)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(words_ptr + offset, words, mask=m_row[:, None])
    if tl.max(tl.max((words != 0).to(tl.int32), 1), 0) > 0:
        bounds_ptr += (i_plane * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.atomic_max(bounds_ptr, tiles - i_tile, sem="relaxed")
        tl.atomic_max(bounds_ptr + 1, i_tile + 1, sem="relaxed")


def pack_mask(geometry: AttentionGeometry, batch: int, q_len: int, tiles: int) -> PackedMask:
    """Pack the mask of a call for ``tiles`` tiles of tile-padded storage."""
    mask, blocks = geometry.mask, geometry.query_blocks(q_len, ROWS, ROWS)
    if mask is None:
        return PackedMask(None, None, 0, 0, blocks)
    # With seq_info, batch rows may begin at different places in a tile.
    rows, heads = (mask.shape[0] if geometry.seq_info is None else batch), mask.shape[1]
    words = mask.new_empty((rows * heads, q_len, tiles, 4), dtype=torch.int32)
    bounds = mask.new_zeros((rows * heads, blocks, 2), dtype=torch.int32)
    # Mask rows at odd addresses are slow with more warps (H200).
    launch_kernel(
        pack_mask_kernel, {"HEADS": heads, "ROWS": ROWS}, (rows * heads, blocks, tiles),
        mask.view(torch.uint8), geometry.seq_info, words, bounds, *broadcast_strides(mask),
        geometry.q_offset, -(geometry.kv_offset % TILE), q_len, geometry.kv_len, tiles, num_warps=1,
    )  # fmt: skip
    return PackedMask(words, bounds, 0 if rows == 1 else heads, 0 if heads == 1 else 1, blocks)
