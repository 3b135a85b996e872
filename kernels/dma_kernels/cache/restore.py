"""What a cache holds as two 16-bit tensors, on the device: for chunks of queries, and for whoever asks for keys.

One launch reads sinks, tail, body and, for a chunk, its own new keys and values, each position from where it is; which
that is depends on how much a row holds, and the device knows. Bit for bit what :meth:`LayerStorage.held` says, rounded.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard, narrow
from ..numerics.formats import TILE
from ..numerics.geometry import MAX_BAND_TILES
from ..runtime.launch import Launcher, on_device
from .append import record_constants
from .codes import Record
from .record_kernel import load_coded
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _restore_tile(
    out_base, new_base, tail_base, sink_base, part_ptr, position, entry, entries, length, new_len, band, is_held,
    is_coded, stride_t, stride_d, ring, sink_len,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the keys or values of rows at consecutive positions."""
    o_d = tl.arange(0, BLOCK)
    m_d = (o_d < D)[None, :]
    is_sink = is_held & (position < sink_len)
    is_tail = is_held & ~is_sink & (position >= band)
    is_new = (position >= tl.maximum(length, 0)) & (position < length + new_len)
    x = tl.load(sink_base + position[:, None] * D + o_d[None, :], mask=is_sink[:, None] & m_d, other=0.0)
    rows = (position % ring)[:, None]
    tail = tl.load(tail_base + rows * D + o_d[None, :], mask=is_tail[:, None] & m_d, other=0.0)
    offset = (position - length).to(tl.int64)[:, None] * stride_t + o_d[None, :].to(tl.int64) * stride_d
    new = tl.load(new_base + offset, mask=is_new[:, None] & m_d, other=0.0)
    x = tl.where(is_sink[:, None], x, tl.where(is_tail[:, None], tail, new))
    is_coded &= ~is_sink & ~is_tail
    if tl.max(is_coded.to(tl.int32), 0) > 0:
        coded = load_coded(part_ptr, position % _TILE, is_coded, D, BLOCK, BITS, ARE_KEYS)
        coded = hadamard(coded, coded.shape[0], HADAMARD, BLOCK, 1.0 / HADAMARD)
        x = tl.where(is_coded[:, None], narrow(coded, x.dtype), x)
    tl.store(out_base + entry.to(tl.int64)[:, None] * D + o_d[None, :], x, mask=(entry < entries)[:, None] & m_d)


@triton.jit(do_not_specialize=["new_len", "entries", "slots", "ring", "sink_len", "band_tiles", "taken_back"])
def restore_kernel(
    key_out_ptr, value_out_ptr, first_ptr, key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr,
    value_sink_ptr, body_ptr, pages_ptr, lengths_ptr, raw_rows_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    new_len, entries, slots, ring, sink_len, band_tiles, taken_back,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr, RECORD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write keys or values at ``BLOCK_T`` positions of a kv head; grid ``(B * Hkv, blocks, 2)``.

    Entry 0 of row ``b`` is at position ``first_ptr[b]``. The tile that is not complete and the ``band_tiles`` before it
    are read raw if the tail holds them.
    """
    i_head = tl.program_id(0).to(tl.int64)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    length = tl.load(lengths_ptr + i_b)
    entry = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    position = tl.load(first_ptr + i_b) + entry
    band = ((tl.maximum(length, 0) >> _TILE_SHIFT) - band_tiles) << _TILE_SHIFT
    band = tl.maximum(band, length + taken_back - ring)
    tile = position >> _TILE_SHIFT
    complete = (length + taken_back) >> _TILE_SHIFT
    is_held = (tile >= tl.maximum(complete - slots, 0)) & (position < length)
    is_coded = is_held & (tile < complete)
    page = tl.load(pages_ptr + i_b * slots + tile % tl.maximum(slots, 1), mask=is_coded, other=0).to(tl.int64)
    record_ptr = body_ptr + page * stride_page + i_kv * RECORD_WORDS
    row = i_b
    if raw_rows_ptr is not None:
        row = tl.load(raw_rows_ptr + i_b).to(tl.int64)
    if tl.program_id(2) == 0:
        _restore_tile(
            key_out_ptr + i_head * entries * D, key_ptr + i_b * stride_kb + i_kv * stride_kh,
            key_tail_ptr + (row * stride_key_tail + i_kv * ring * D),
            key_sink_ptr + (row * stride_key_sink + i_kv * sink_len * D), record_ptr,
            position, entry, entries, length, new_len, band, is_held, is_coded, stride_kt, stride_kd, ring, sink_len,
            D, BLOCK_D, BITS, KEY_HADAMARD, True,
        )  # fmt: skip
    else:
        _restore_tile(
            value_out_ptr + i_head * entries * DV, value_ptr + i_b * stride_vb + i_kv * stride_vh,
            value_tail_ptr + (row * stride_value_tail + i_kv * ring * DV),
            value_sink_ptr + (row * stride_value_sink + i_kv * sink_len * DV), record_ptr + KEY_WORDS,
            position, entry, entries, length, new_len, band, is_held, is_coded, stride_vt, stride_vd, ring, sink_len,
            DV, BLOCK_DV, BITS, VALUE_HADAMARD, False,
        )  # fmt: skip


def restore_dense(
    storage: LayerStorage,
    first: Tensor,
    entries: int,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    are_low: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return keys and values from a position of each row on, with no host synchronisation; zeros where nothing is.

    Args:
        storage: The cache; its tensors must be contiguous.
        first: The position of entry 0, integer ``[B]``.
        entries: How many.
        key: New keys, not stored yet, ``[B, Hkv, T, D]``, any strides; ``None`` for none.
        value: New values ``[B, Hkv, T, Dv]``.
        are_low: Whether to read what low tiles read: every complete tile from its codes, except for the sinks. By
            default everything that is stored raw is read raw.

    Returns:
        Keys ``[B, Hkv, entries, D]`` and values ``[B, Hkv, entries, Dv]`` in the dtype of the tail, contiguous.
    """
    tail = storage.key_tail
    band_tiles = 0 if are_low else MAX_BAND_TILES
    if key is None or value is None:
        key, value = storage.no_keys()
    (batch, kv_heads, new_len, head_dim), value_dim = key.shape, value.shape[3]
    keys, values = (tail.new_empty((batch, kv_heads, entries, dim)) for dim in (head_dim, value_dim))
    launcher = _restore_launcher(storage.record, kv_heads)
    with on_device(tail.device):
        launcher(
            (batch * kv_heads, triton.cdiv(entries, _BLOCK_T), 2),
            keys, values, first.to(torch.int32).contiguous(), key, value, tail, storage.value_tail, storage.key_sink,
            storage.value_sink, storage.body.view(torch.int32), storage.pages, storage.lengths, storage.raw_rows,
            *key.stride(), *value.stride(), *storage.strides, new_len, entries, storage.slots, storage.ring,
            storage.key_sink.shape[2], band_tiles, storage.taken_back,
        )  # fmt: skip
    return keys, values


_BLOCK_T = 64


@functools.lru_cache(maxsize=256)
def _restore_launcher(record: Record, kv_heads: int) -> Launcher:
    """Return the launcher for a kind of cache."""
    constants = {**record_constants(record, kv_heads), "BLOCK_T": _BLOCK_T}
    num_warps = 8 if max(record.head_dim, record.value_dim) <= 128 else 16
    return Launcher(restore_kernel, constants, settled=("key_out_ptr", "value_out_ptr"), num_warps=num_warps)
