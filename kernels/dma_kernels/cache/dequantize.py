"""The body of a cache in 16 bits, for the prefill kernel: all complete tiles of a layer, keys and values in one launch.

Bit for bit what the codecs (:mod:`dma_kernels.cache.codecs`) decode, rounded to the dtype that is wanted. The kernel
moves little else than the codes and the results, so that it runs at about the memory's speed: of 4-bit tiles 0.56 bytes
are read and 2 are written for each element.

How much a row holds is known on the device alone. So the results have the capacity of the body, and of them the tiles
that a row has completed are written; what lies behind is left as it was allocated.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device.fp4 import scale_numbers, unpack_codes
from ..numerics.formats import TILE
from ..numerics.recipe import Recipe
from ..runtime import chip
from ..runtime.launch import Launcher, on_device
from .decode_tiles import dequantize_rows, from_e4m3, load_channels, load_fp4_values, load_rows
from .forms import body_constants, e4m3_as_bytes, select_forms
from .storage import LayerStorage

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _store_rows(base, x, first, D: tl.constexpr):
    """Store the first ``D`` columns of ``[ROWS, BLOCK]`` from row ``first`` of a contiguous matrix on."""
    o_t = first + tl.arange(0, x.shape[0])
    o_d = tl.arange(0, x.shape[1])
    pointers = base + o_t[:, None] * D + o_d[None, :]
    if x.shape[1] == D:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=(o_d < D)[None, :])


@triton.jit
def _fp4_keys(
    data_ptr, scale_ptr, factor, slot,
    STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load a tile of 4-bit keys as ``[TILE, BLOCK]``; ``STORED`` bytes a key, ``WIDTH`` blocks interleaved."""
    BLOCKS: tl.constexpr = BLOCK // 16
    o_t = tl.arange(0, _TILE)
    # Bytes in the order (block, i, u) of their channels, from where they lie: (block // w, i, block % w, u).
    o = tl.arange(0, BLOCK // 2)
    block = o // 8
    byte = ((block // WIDTH) * 2 + (o // 4) % 2) * (4 * WIDTH) + (block % WIDTH) * 4 + o % 4
    pointers = data_ptr + slot * (_TILE * STORED) + o_t[:, None] * STORED + byte[None, :]
    if STORED == BLOCK // 2:  # noqa: SIM108 (a constexpr branch)
        data = tl.load(pointers)
    else:
        data = tl.load(pointers, mask=(o < STORED)[None, :], other=0)
    scale = load_rows(scale_ptr + slot * (_TILE * STORED // 8), o_t, STORED // 8, BLOCKS)
    low, high = unpack_codes(data, IS_INTERPRETED)
    codes = tl.reshape(tl.join(low, high), [_TILE, BLOCKS, 8, 2])
    codes = tl.reshape(tl.permute(codes, [0, 1, 3, 2]), [_TILE, BLOCKS, 16])
    x = codes.to(tl.float32) * (scale_numbers(scale) * factor)[:, :, None]
    return tl.reshape(x.to(DTYPE), [_TILE, BLOCK])


@triton.jit
def _fp4_values(codes, scale, factor, DTYPE: tl.constexpr):
    """Return half a tile of 4-bit values from codes ``[BLOCK, KEYS]`` and scale bytes, as ``[KEYS, BLOCK]``."""
    BLOCK: tl.constexpr = codes.shape[0]
    KEYS: tl.constexpr = codes.shape[1]
    blocks = tl.reshape(codes, [BLOCK // 16, 16, KEYS]).to(tl.float32)
    x = blocks * (scale_numbers(scale) * factor)[:, None, :]
    return tl.trans(tl.reshape(x.to(DTYPE), [BLOCK, KEYS]))


@triton.jit
def _write_keys(
    out_ptr, data_ptr, scale_ptr, factor_ptr, slot,
    FORM: tl.constexpr, D: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantise the keys of a tile; constexprs as for :func:`dma_kernels.cache.append_kernel.encode_keys`."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    o_t = tl.arange(0, _TILE)
    if FORM == "fp4":
        x = _fp4_keys(
            data_ptr, scale_ptr, tl.load(factor_ptr + slot), slot, STORED, BLOCK, WIDTH, DTYPE, IS_INTERPRETED
        )
    elif FORM == "int8" or FORM == "e4m3":
        codes = load_rows(data_ptr + slot * (_TILE * STORED), o_t, STORED, BLOCK)
        # An INT8 element's unit is in the factor.
        numbers = codes.to(tl.float32) if FORM == "int8" else from_e4m3(codes, tl.float32)
        x = (numbers * tl.load(factor_ptr + slot)).to(DTYPE)
    else:
        x = dequantize_rows(data_ptr, scale_ptr, slot, o_t, FORM, STORED, BLOCK, DTYPE)
    _store_rows(out_ptr + slot * (_TILE * D), x, 0, D)


@triton.jit
def _write_values(
    out_ptr, data_ptr, scale_ptr, factor_ptr, slot,
    FORM: tl.constexpr, DV: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantise the values of a tile; constexprs as for :func:`dma_kernels.cache.append_kernel.encode_values`."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    base = out_ptr + slot * (_TILE * DV)
    if FORM == "fp4":
        data, scale_low, scale_high = load_fp4_values(data_ptr, scale_ptr, slot, STORED, BLOCK)
        factor = tl.load(factor_ptr + slot)
        low, high = unpack_codes(data, IS_INTERPRETED)
        _store_rows(base, _fp4_values(low, scale_low, factor, DTYPE), 0, DV)
        _store_rows(base, _fp4_values(high, scale_high, factor, DTYPE), _TILE // 2, DV)
    elif FORM == "e4m3":
        o_v = tl.arange(0, BLOCK)
        # Keys of a group of 16 in their own order, from where device.permute_keys has them.
        o_t = tl.arange(0, _TILE)
        column = o_t // 16 * 16 + (o_t // 2) % 4 * 4 + (o_t // 8) % 2 * 2 + o_t % 2
        codes = load_channels(data_ptr + slot * (STORED * _TILE), column, STORED, BLOCK, _TILE)
        factor = tl.load(factor_ptr + slot * STORED + o_v, mask=o_v < STORED, other=0.0)
        x = (from_e4m3(codes, tl.float32) * factor[:, None]).to(DTYPE)
        _store_rows(base, tl.trans(x), 0, DV)
    else:
        x = dequantize_rows(data_ptr, scale_ptr, slot, tl.arange(0, _TILE), FORM, STORED, BLOCK, DTYPE)
        _store_rows(base, x, 0, DV)


@triton.jit(do_not_specialize=["slots"])
def dequantize_kernel(
    key_ptr, value_ptr, key_data_ptr, key_scale_ptr, key_factor_ptr, value_data_ptr, value_scale_ptr, value_factor_ptr,
    lengths_ptr, slots,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr, KEY_STORED: tl.constexpr, VALUE_STORED: tl.constexpr,
    WIDTH: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_VALUES: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantise the keys or the values of a tile of a kv head; grid ``(slots, B * Hkv, how many of the two)``."""
    i_slot = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    # A body that is a ring is full once it has gone round.
    if i_slot < (tl.load(lengths_ptr + i_head // KV_HEADS) >> _TILE_SHIFT):
        slot = i_head * slots + i_slot
        if HAS_KEYS:  # noqa: SIM102 (a constexpr branch)
            if tl.program_id(2) == 0:
                _write_keys(
                    key_ptr, key_data_ptr, key_scale_ptr, key_factor_ptr, slot,
                    KEY_FORM, D, KEY_STORED, BLOCK_D, WIDTH, IS_INTERPRETED,
                )  # fmt: skip
        if HAS_VALUES:  # noqa: SIM102 (a constexpr branch)
            if tl.program_id(2) == (1 if HAS_KEYS else 0):
                _write_values(
                    value_ptr, value_data_ptr, value_scale_ptr, value_factor_ptr, slot,
                    VALUE_FORM, DV, VALUE_STORED, BLOCK_DV, IS_INTERPRETED,
                )  # fmt: skip


def dequantize_body(
    storage: LayerStorage, key_dtype: torch.dtype | None, value_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Dequantise the complete tiles of a layer, with no host synchronisation.

    Args:
        storage: The cache; its body must be contiguous.
        key_dtype: bf16 or fp16, or ``None`` where keys are not wanted.
        value_dtype: Likewise of values.

    Returns:
        Keys ``[B, Hkv, slots * 128, D]`` and values ``[B, Hkv, slots * 128, Dv]``, contiguous, as the body has them:
        tile ``J`` at slot ``J % slots``. What is not wanted is ``None``; what holds no complete tile is not written.
    """
    (batch, kv_heads, _, head_dim), value_dim = storage.key_tail.shape, storage.value_tail.shape[3]
    device, slots = storage.lengths.device, storage.slots
    outputs = [
        None if dtype is None else torch.empty((batch, kv_heads, slots * TILE, dim), dtype=dtype, device=device)
        for dim, dtype in ((head_dim, key_dtype), (value_dim, value_dtype))
    ]
    wanted = sum(output is not None for output in outputs)
    launcher = _launcher(
        storage.recipe, kv_heads, head_dim, value_dim, storage.key_tail.dtype, key_dtype, value_dtype,
        chip.is_interpreted(),
    )  # fmt: skip
    parts = [
        part
        for body in (storage.key_body, storage.value_body)
        for part in (e4m3_as_bytes(body["data"]), body.get("scale"), body.get("factor"))
    ]
    with on_device(device):
        launcher((slots, batch * kv_heads, wanted), *outputs, *parts, storage.lengths, slots)
    return outputs[0], outputs[1]


@functools.lru_cache(maxsize=256)
def _launcher(
    recipe: Recipe,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    key_dtype: torch.dtype | None,
    value_dtype: torch.dtype | None,
    is_interpreted: bool,
) -> Launcher:
    """Return the launcher for a kind of cache and the dtypes of the results."""
    forms = select_forms(recipe, chip.INTERPRETED_ARCH)  # how a body is stored is the same on every chip
    constants = {
        **body_constants(recipe, forms, kv_heads, head_dim, value_dim, dtype),
        "HAS_KEYS": key_dtype is not None,
        "HAS_VALUES": value_dtype is not None,
        "IS_INTERPRETED": is_interpreted,
    }
    # 32 elements for a thread, 64 of head dimensions over 128; with twice as many some masked shapes spill.
    num_warps = 16 if max(head_dim, value_dim) > 64 else 8
    return Launcher(dequantize_kernel, constants, settled=("key_ptr", "value_ptr"), num_warps=num_warps)
