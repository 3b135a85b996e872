"""Appending to a cache on the Triton backend: raw keys and values stored, completed tiles encoded, in one launch.

Whether a tile is complete is known on the device alone, so a step of decoding never waits for it, and a CUDA graph that
holds the step encodes a tile on every 128th replay.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard
from ..numerics.formats import TILE, padded_channels
from ..runtime import replay
from ..runtime.launch import Launcher, on_device
from .codes import Record
from .record_kernel import encode_keys, encode_values
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_ROWS = tl.constexpr(16)
"""That are stored raw at a time: a step of decoding has few."""

REGISTERS = 128
"""Of a thread, at most. The encoder would take 200 and more, and a multiprocessor then has one program at a time, which
mostly encodes nothing; with these it has two. Triton 3.9 spills none, Triton 3.6 some 40 where a tile is encoded."""


@triton.jit
def _append_tile(
    new_base, tail_base, sink_base, record_ptr, tile, length, end, stride_t, stride_d, ring_tiles, sink_tiles, is_coded,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, HADAMARD: tl.constexpr, ARE_KEYS: tl.constexpr,
    STORE_RAW: tl.constexpr, ENCODE: tl.constexpr,
):  # fmt: skip
    """Encode a tile if it is complete, and store what is new of it."""
    o_d = tl.arange(0, BLOCK)
    m_d = (o_d < D)[None, :]
    first = tile * _TILE
    entry = (tile % ring_tiles) * _TILE
    if ENCODE:  # noqa: SIM102 (a constexpr branch)
        if is_coded:
            o_t = tl.arange(0, _TILE)
            m_old = (first + o_t < length)[:, None] & m_d
            offset = (first + o_t - length).to(tl.int64)[:, None] * stride_t + o_d[None, :].to(tl.int64) * stride_d
            x = tl.load(new_base + offset, mask=(first + o_t >= length)[:, None] & m_d, other=0.0)
            old = tl.load(tail_base + (entry + o_t)[:, None] * D + o_d[None, :], mask=m_old, other=0.0)
            whole = hadamard(tl.where(m_old, old, x).to(tl.float32), _TILE, HADAMARD, BLOCK, 1.0)
            if ARE_KEYS:
                encode_keys(whole, record_ptr, D, BITS)
            else:
                encode_values(whole, record_ptr, D, BITS)
    if STORE_RAW:
        is_sink = tile < sink_tiles
        oldest = end - ring_tiles * _TILE
        start = tl.maximum(tl.maximum(length, first), tl.where(is_sink, 0, oldest))
        last = tl.minimum(end, first + _TILE)
        for row in range(start, last, _ROWS):
            position = row + tl.arange(0, _ROWS)
            m_x = (position < last)[:, None] & m_d
            offset = (position - length).to(tl.int64)[:, None] * stride_t + o_d[None, :].to(tl.int64) * stride_d
            x = tl.load(new_base + offset, mask=m_x, other=0.0)
            tail = tail_base + (entry + position - first)[:, None] * D + o_d[None, :]
            tl.store(tail, x, mask=m_x & (position >= oldest)[:, None])
            if is_sink:
                tl.store(sink_base + position[:, None] * D + o_d[None, :], x, mask=m_x)


@triton.jit
def append_to_head(
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr, raw_rows_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    i_head, i_tile, are_values, length, new_len, slots, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr, RECORD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr, STORE_RAW: tl.constexpr, ENCODE: tl.constexpr,
):  # fmt: skip
    """Append keys or values to one tile of a kv head, the ``i_tile``-th that new ones may lie in."""
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    end = length + new_len
    # What a negative length says is padding is skipped: positions begin at 0.
    tile = (tl.maximum(length, 0) >> _TILE_SHIFT) + i_tile
    if tile * _TILE < end:
        # A ring holds the last tiles.
        is_coded = ((tile + 1) * _TILE <= end) & (tile >= (end >> _TILE_SHIFT) - slots)
        page = tl.load(pages_ptr + i_b * slots + tile % tl.maximum(slots, 1), mask=is_coded, other=0).to(tl.int64)
        record_ptr = body_ptr + page * stride_page + i_kv * RECORD_WORDS
        row = i_b
        if raw_rows_ptr is not None:
            row = tl.load(raw_rows_ptr + i_b).to(tl.int64)
        ring = i_kv * ring_tiles * _TILE
        sink = i_kv * sink_tiles * _TILE
        if are_values:
            _append_tile(
                value_ptr + i_b * stride_vb + i_kv * stride_vh, value_tail_ptr + (row * stride_value_tail + ring * DV),
                value_sink_ptr + (row * stride_value_sink + sink * DV), record_ptr + KEY_WORDS,
                tile, length, end, stride_vt, stride_vd, ring_tiles, sink_tiles, is_coded,
                DV, BLOCK_DV, BITS, VALUE_HADAMARD, False, STORE_RAW, ENCODE,
            )  # fmt: skip
        else:
            _append_tile(
                key_ptr + i_b * stride_kb + i_kv * stride_kh, key_tail_ptr + (row * stride_key_tail + ring * D),
                key_sink_ptr + (row * stride_key_sink + sink * D), record_ptr,
                tile, length, end, stride_kt, stride_kd, ring_tiles, sink_tiles, is_coded,
                D, BLOCK_D, BITS, KEY_HADAMARD, True, STORE_RAW, ENCODE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["new_len", "slots", "ring_tiles", "sink_tiles"])
def append_kernel(
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr, raw_rows_ptr,
    lengths_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    new_len, slots, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr, RECORD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr, STORE_RAW: tl.constexpr, ENCODE: tl.constexpr,
):  # fmt: skip
    """Append keys or values to one tile of a kv head; grid ``(B * Hkv, tiles that new ones can lie in, 2)``."""
    i_head = tl.program_id(0).to(tl.int64)
    append_to_head(
        key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr,
        raw_rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
        stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
        i_head, tl.program_id(1), tl.program_id(2) == 1, tl.load(lengths_ptr + i_head // KV_HEADS), new_len, slots,
        ring_tiles, sink_tiles,
        KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, BITS, KEY_HADAMARD, VALUE_HADAMARD, RECORD_WORDS, KEY_WORDS, STORE_RAW,
        ENCODE,
    )  # fmt: skip


def append_tokens(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Do :meth:`LayerStorage.append` in Triton, with no host synchronisation.

    Args:
        storage: The cache; its body must have room for the tiles that are completed.
        key: Raw ``[B, Hkv, T, D]`` in the dtype of the tail, any strides.
        value: Raw ``[B, Hkv, T, Dv]``.
    """
    if key.numel() == 0:
        return
    call = replay.call_of("append", replay.tensor_kind(key), replay.tensor_kind(value), *storage_kind(storage))
    inputs = (key, value, storage.raw_rows, *storage.tensors().values())
    call.run(inputs, lambda: launch_append(storage, key, value))
    storage.lengths += key.shape[2]
    storage.count_appended(key.shape[2])


def storage_kind(storage: LayerStorage) -> tuple[Hashable, ...]:
    """Return what a storage's tensors follow from, but for their addresses."""
    tails = storage.key_tail, storage.value_tail
    sizes = storage.key_sink.shape[2], storage.diagonal_tiles, storage.slots, storage.strides, storage.raw_rows is None
    return storage.format, *(tail.shape for tail in tails), *sizes, tails[0].dtype, tails[0].device


def tiles_of(new_len: int) -> int:
    """Return how many tiles so many new tokens may lie in."""
    return (new_len + TILE - 2) // TILE + 1


def where_stored(storage: LayerStorage) -> tuple[Tensor | None, ...]:
    """Return the tensors that a launch which appends writes, or finds its places in, in the kernels' order."""
    raw = storage.key_tail, storage.value_tail, storage.key_sink, storage.value_sink
    return *raw, storage.body.view(torch.int32), storage.pages, storage.raw_rows


def launch_append(storage: LayerStorage, key: Tensor, value: Tensor) -> tuple[()]:
    """Launch the kernel, which stores keys without counting them in ``lengths``; arguments as of `append_tokens`."""
    batch, kv_heads, new_len, _ = key.shape
    ring_tiles = storage.ring // TILE
    # A tile that comes round the ring would overwrite stored keys that are still to be encoded.
    phases = ((True, True),) if tiles_of(new_len) <= ring_tiles else ((False, True), (True, False))
    with on_device(key.device):
        for phase in phases:
            _append_launcher(storage.record, kv_heads, key.dtype, phase)(
                (batch * kv_heads, tiles_of(new_len), 2),
                key, value, *where_stored(storage), storage.lengths, *key.stride(), *value.stride(), *storage.strides,
                new_len, storage.slots, ring_tiles, storage.key_sink.shape[2] // TILE,
            )  # fmt: skip
    return ()


def record_constants(record: Record, kv_heads: int) -> dict[str, int]:
    """Return the constexprs of kernels that read or write records; offsets in words of 32 bits."""
    return {
        "KV_HEADS": kv_heads,
        "D": record.head_dim,
        "DV": record.value_dim,
        "BLOCK_D": padded_channels(record.head_dim),
        "BLOCK_DV": padded_channels(record.value_dim),
        "BITS": record.format.bits,
        "KEY_HADAMARD": record.key_hadamard,
        "VALUE_HADAMARD": record.value_hadamard,
        "RECORD_WORDS": record.nbytes // 4,
        "KEY_WORDS": sum(record.sizes[:3]) // 4,
    }


def append_warps(record: Record) -> int:
    """Return how many warps a program has that may encode a tile."""
    return 8 if max(record.head_dim, record.value_dim) <= 128 else 16


@functools.lru_cache(maxsize=256)
def _append_launcher(record: Record, kv_heads: int, dtype: torch.dtype, phase: tuple[bool, bool]) -> Launcher:
    """Return the launcher for a kind of cache; ``phase`` says whether raw keys are stored and whether tiles encoded."""
    constants = {**record_constants(record, kv_heads), "STORE_RAW": phase[0], "ENCODE": phase[1]}
    return Launcher(append_kernel, constants, num_warps=append_warps(record), maxnreg=REGISTERS)
