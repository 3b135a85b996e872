"""Appending to a cache on the Triton backend: raw keys and values stored, completed tiles encoded, in one launch.

Whether a tile is complete is known on the device alone, so a step of decoding never waits for it, and a CUDA graph that
holds the step encodes a tile on every 128th replay. The codes are bit for bit those of the codecs
(:mod:`dma_kernels.cache.codecs`), given the same mean key.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.arithmetic import hadamard, round_to_bfloat16
from ..numerics.formats import TILE, SharedScale
from ..numerics.geometry import MAX_BAND_TILES
from ..numerics.recipe import Recipe
from ..numerics.transforms import hadamard_size
from ..runtime import chip, replay
from ..runtime.chip import MIN_FP8_ARCH
from ..runtime.launch import Launcher, on_device
from .append_kernel import encode_keys, encode_values
from .forms import body_constants, e4m3_as_bytes, select_forms, storage_kind, storage_tensors
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _load_tile(
    new_base, tail_base, tile, length, end, stride_t, stride_d, ring_tiles, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the raw keys or values of a tile, as far as there are any, new ones and stored ones; fp32, zeros beyond."""
    o_d = tl.arange(0, BLOCK_D)
    pos = tile * _TILE + tl.arange(0, _TILE)
    m_d = (o_d < D)[None, :]
    entry = (tile % ring_tiles) * _TILE + tl.arange(0, _TILE)
    old = tl.load(tail_base + entry[:, None] * D + o_d[None, :], mask=(pos < length)[:, None] & m_d, other=0.0)
    m_new = ((pos >= length) & (pos < end))[:, None] & m_d
    offset = (pos - length).to(tl.int64)[:, None] * stride_t + o_d[None, :] * stride_d
    new = tl.load(new_base + offset, mask=m_new, other=0.0)
    return tl.where((pos < length)[:, None], old, new).to(tl.float32)


@triton.jit
def _store_raw(
    new_base, tail_base, sink_base, tile, length, end, stride_t, stride_d, ring_tiles, sink_tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store what is new of a tile in the tail, unless newer keys take its place, and among the sinks."""
    o_d = tl.arange(0, BLOCK_D)
    o_t = tl.arange(0, _TILE)
    pos = tile * _TILE + o_t
    m_new = ((pos >= length) & (pos < end))[:, None] & (o_d < D)[None, :]
    offset = (pos - length).to(tl.int64)[:, None] * stride_t + o_d[None, :] * stride_d
    x = tl.load(new_base + offset, mask=m_new, other=0.0)
    oldest = end - ring_tiles * _TILE
    if (tile + 1) * _TILE > oldest:
        entry = (tile % ring_tiles) * _TILE + o_t
        tl.store(tail_base + entry[:, None] * D + o_d[None, :], x, mask=m_new & (pos >= oldest)[:, None])
    if tile < sink_tiles:
        tl.store(sink_base + pos[:, None] * D + o_d[None, :], x, mask=m_new)


@triton.jit(do_not_specialize=["new_len", "slots", "ring_tiles", "sink_tiles"])
def _append_kernel(
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, mean_ptr, lengths_ptr,
    key_data_ptr, key_scale_ptr, key_factor_ptr, value_data_ptr, value_scale_ptr, value_factor_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    new_len, slots, ring_tiles, sink_tiles, norm,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    KEY_STORED: tl.constexpr, VALUE_STORED: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr,
    ROUNDING: tl.constexpr, HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    STORE_RAW: tl.constexpr, ENCODE: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Append to one tile of a kv head; grid ``(tiles that new keys can lie in, B * Hkv)``."""
    i_head = tl.program_id(1).to(tl.int64)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    length = tl.load(lengths_ptr + i_b)
    end = length + new_len
    # What a negative length says is padding is skipped: positions begin at 0.
    tile = (tl.maximum(length, 0) >> _TILE_SHIFT) + tl.program_id(0)
    k_base = key_ptr + i_b * stride_kb + i_kv * stride_kh
    v_base = value_ptr + i_b * stride_vb + i_kv * stride_vh
    k_tail = key_tail_ptr + i_head * ring_tiles * (_TILE * D)
    v_tail = value_tail_ptr + i_head * ring_tiles * (_TILE * DV)
    if tile * _TILE < end:
        o_d = tl.arange(0, BLOCK_D)
        if STORE_RAW:
            k_sink = key_sink_ptr + i_head * sink_tiles * (_TILE * D)
            v_sink = value_sink_ptr + i_head * sink_tiles * (_TILE * DV)
            _store_raw(
                k_base, k_tail, k_sink, tile, length, end, stride_kt, stride_kd, ring_tiles, sink_tiles, D, BLOCK_D
            )
            _store_raw(
                v_base, v_tail, v_sink, tile, length, end, stride_vt, stride_vd, ring_tiles, sink_tiles, DV, BLOCK_DV
            )
        is_complete = (tile + 1) * _TILE <= end
        is_kept = tile >= (end >> _TILE_SHIFT) - slots  # a ring holds the last tiles
        if ENCODE:
            mean = tl.zeros([BLOCK_D], tl.float32)
            if HAS_MEAN:
                if length >= _TILE:
                    mean = tl.load(mean_ptr + i_head * D + o_d, mask=o_d < D, other=0.0)
                else:
                    # Every program that needs the mean of the first tile makes it, for none waits for another.
                    x = _load_tile(k_base, k_tail, 0, length, end, stride_kt, stride_kd, ring_tiles, D, BLOCK_D)
                    count = tl.minimum(end, _TILE).to(tl.float32)
                    mean = round_to_bfloat16(tl.math.div_rn(tl.sum(x, 0), tl.zeros([BLOCK_D], tl.float32) + count))
                    if tile == 0:
                        tl.store(mean_ptr + i_head * D + o_d, mean, mask=o_d < D)
            if is_complete & is_kept:
                slot = i_head * slots + tile % slots
                x = _load_tile(k_base, k_tail, tile, length, end, stride_kt, stride_kd, ring_tiles, D, BLOCK_D)
                if HAS_MEAN:
                    x = x - mean[None, :]
                if ROTATE:
                    x = hadamard(x, _TILE, HADAMARD_SIZE, BLOCK_D, norm)
                encode_keys(
                    x, key_data_ptr, key_scale_ptr, key_factor_ptr, slot,
                    KEY_FORM, KEY_FORMAT, SHARED, ROUNDING, KEY_STORED, WIDTH, IS_INTERPRETED,
                )  # fmt: skip
                v = _load_tile(v_base, v_tail, tile, length, end, stride_vt, stride_vd, ring_tiles, DV, BLOCK_DV)
                encode_values(
                    v, value_data_ptr, value_scale_ptr, value_factor_ptr, slot,
                    VALUE_FORM, VALUE_FORMAT, ROUNDING, VALUE_STORED, IS_INTERPRETED,
                )  # fmt: skip


def append_tokens(storage: LayerStorage, key: Tensor, value: Tensor) -> None:
    """Do :meth:`LayerStorage.append` in Triton, with no host synchronisation.

    Args:
        storage: The cache; its body must be contiguous and have room for the tiles that are completed.
        key: Raw ``[B, Hkv, T, D]`` in the dtype of the tail, any strides.
        value: Raw ``[B, Hkv, T, Dv]``.
    """
    if key.numel() == 0:
        return
    call = replay.call_of("append", replay.tensor_kind(key), replay.tensor_kind(value), *storage_kind(storage))
    call.run((key, value, *storage_tensors(storage)), lambda: launch_append(storage, key, value))
    storage.lengths += key.shape[2]
    storage.replace_taken_back(key.shape[2])


def launch_append(storage: LayerStorage, key: Tensor, value: Tensor) -> tuple[()]:
    """Launch the kernel, which stores keys without counting them in ``lengths``; arguments as of `append_tokens`."""
    batch, kv_heads, new_len, head_dim = key.shape
    recipe, ring_tiles = storage.recipe, storage.ring // TILE
    key_body, value_body = storage.key_body, storage.value_body
    arch, is_interpreted = chip.device_arch(key.device), chip.is_interpreted()
    key_data, value_data = key_body["data"], value_body["data"]
    if arch < MIN_FP8_ARCH:
        key_data, value_data = e4m3_as_bytes(key_data), e4m3_as_bytes(value_data)
    tiles = (new_len + TILE - 2) // TILE + 1
    # A tile that comes round the ring would overwrite stored keys that are still to be encoded.
    phases = ((True, True),) if tiles <= ring_tiles else ((False, True), (True, False))
    with on_device(key.device):
        for phase in phases:
            _launcher(recipe, arch, kv_heads, head_dim, value.shape[3], key.dtype, phase, is_interpreted)(
                (tiles, batch * kv_heads, 1),
                key, value, storage.key_tail, storage.value_tail, storage.key_sink, storage.value_sink,
                storage.key_mean, storage.lengths,
                key_data, key_body.get("scale"), key_body.get("factor"),
                value_data, value_body.get("scale"), value_body.get("factor"),
                *key.stride(), *value.stride(), new_len, storage.slots, ring_tiles,
                min(recipe.sink_tiles, MAX_BAND_TILES), math.pow(hadamard_size(head_dim), -0.5),
            )  # fmt: skip
    return ()


@functools.lru_cache(maxsize=256)
def _launcher(
    recipe: Recipe,
    arch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    phase: tuple[bool, bool],
    is_interpreted: bool,
) -> Launcher:
    """Return the launcher for a kind of cache; ``phase`` says whether raw keys are stored and whether tiles encoded."""
    forms = select_forms(recipe, arch)
    constants = {
        **body_constants(recipe, forms, kv_heads, head_dim, value_dim, dtype),
        "KEY_FORMAT": recipe.key_low,
        "VALUE_FORMAT": recipe.low_v,
        "SHARED": str(SharedScale(recipe.shared_scale)),
        "ROUNDING": recipe.scale_rounding,
        "HAS_MEAN": recipe.smooth_k,
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": hadamard_size(head_dim),
        "STORE_RAW": phase[0],
        "ENCODE": phase[1],
        "IS_INTERPRETED": is_interpreted,
    }
    return Launcher(_append_kernel, constants, num_warps=8)
