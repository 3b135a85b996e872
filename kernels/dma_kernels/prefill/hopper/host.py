"""Host side of the prefill kernels for long and for short prompts on Hopper: which calls they take, and launches."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...numerics.formats import TILE, padded_channels
from ...numerics.geometry import LOG2_E, PrefillGeometry
from ...numerics.recipe import Recipe
from ...numerics.transforms import hadamard_size
from ...runtime.descriptors import head_strides, is_describable
from ...runtime.launch import MAX_PROGRAMS, Launcher
from ...runtime.lowering import Form
from ...runtime.tuning import HopperTiles, ShortTiles, select_section
from ..operands import Operands
from .bitmask import pack_mask
from .multi_cta import prefill_short_kernel
from .quantize_q import stage_queries
from .tile_range import ROWS
from .warp_specialized import prefill_hopper_kernel

HEAD_DIMS = (64, 96, 128, 160, 192, 224, 256)
"""Queries are staged in blocks of 32 channels."""
SHORT_HEAD_DIMS = (64, 96, 128)
LOW_FORMS = (Form.INT8, Form.E4M3, Form.E5M2, Form.DEQUANTIZED)
HIGH_FORMS = (Form.RAW, Form.DEQUANTIZED)
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


def takes(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    tiles: HopperTiles,
) -> bool:
    """Whether the kernel computes a call. All others are computed by :mod:`dma_kernels.prefill.kernel`.

    It takes long calls with head dimensions of 64 to 256, multiples of 32, whose low keys lie in aligned storage, 8-bit
    elements with a factor per tile or dequantised ones, and whose low values are E4M3 or 16-bit.

    Args:
        query: ``[B, Hq, Tq, D]``.
        operands: Keys and values.
        geometry: Positions and visibility.
        tiles: What a long call is.
    """
    low = operands.low
    if low is None:
        return False
    batch, heads, q_len, head_dim = query.shape
    seen = geometry.kv_len if geometry.window is None else min(geometry.kv_len, geometry.window)
    is_long = seen >= tiles.min_keys and batch * heads * q_len >= tiles.min_rows
    # Four warpgroups have no registers for both ends of a window: 32K with one of 8K at head_dim 64 take 4,200 us, the
    # kernel for short prompts 3,585. Nor for a mask (compiled, not timed).
    has_room = (geometry.window is None and geometry.mask is None) or tiles.groups < 4
    return (
        is_long
        and has_room
        and head_dim in HEAD_DIMS
        and (low.value_form is Form.E4M3 or is_describable(low.value))
        and _is_usual(query, operands, geometry)
    )


def prefill_hopper(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    recipe: Recipe,
    tiles: HopperTiles,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    skip_threshold: float | None,
    tile_counts: Tensor | None,
    is_early: bool,
) -> None:
    """Launch the kernel for a call that it :func:`takes`.

    Args:
        query: ``[B, Hq, Tq, D]``, 16-bit.
        operands: Keys and values.
        geometry: Positions and visibility.
        recipe: Formats and band.
        tiles: Sizes.
        out: Where the output goes, ``[B, Hq, Tq, Dv]``.
        lse: Where the log of the softmax denominator goes, fp32 ``[B, Hq, Tq]``.
        scale: Factor of the scores.
        softcap: Cap of the scores, or ``None``.
        sinks: ``[Hq]``, contiguous, or ``None``.
        skip_threshold: Of the recipe, in base-2 logits, or ``None``.
        tile_counts: Where skipped and examined tiles are added, int64 ``[Hq, 2]``, or ``None``.
        is_early: Whether queries may be staged before the launches that made ``operands`` have ended.
    """
    batch, q_heads, q_len, head_dim = query.shape
    high, low = operands.high, operands.low
    assert low is not None
    kv_heads = high.key.shape[1]
    is_e4m3 = low.value_form is Form.E4M3
    staged = stage_queries(
        query, operands.key_mean, operands.query_factor, recipe, low.key_form, high.key_form,
        scale=scale, is_early=is_early,
    )  # fmt: skip
    channels = padded_channels(head_dim)
    # Rows behind a tile's channels are the next tile's, and become outputs that are not stored.
    v_low_desc = _matrix(low.value, channels, TILE) if is_e4m3 else _heads(low.value, TILE)
    blocks = _blocks(geometry, q_len, ROWS * tiles.groups)
    mask_blocks = _blocks(geometry, q_len, ROWS)
    storage_tiles = low.key.shape[2] // TILE
    packed = pack_mask(geometry, batch, q_len, mask_blocks, storage_tiles)
    all_heads = batch * kv_heads
    section = select_section(all_heads, low.head_bytes)
    launch = _long_launcher(
        q_heads, kv_heads, head_dim, tiles, high.key_layout, high.value_layout, low.value_layout, geometry.is_causal,
        geometry.mask is not None or not _is_plain(geometry, q_len), operands.key_mean is not None,
        high.key_form is Form.RAW,
    )  # fmt: skip
    launch(
        (blocks * q_heads * batch, 1, 1),
        _heads(staged.high, ROWS), _heads(staged.low, ROWS), _heads(high.key, TILE // 2), _heads(high.value, TILE // 2),
        _matrix(low.key, TILE, channels), v_low_desc,
        out, lse, staged.rows, low.key_factor, low.value_factor,
        sinks, geometry.rows, *out.stride()[:3],
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len, storage_tiles, blocks, section, all_heads,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        packed.words, packed.bounds, packed.planes_per_row, packed.planes_per_head, mask_blocks,
        skip_threshold, tile_counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _long_launcher(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    tiles: HopperTiles,
    key_layout: str,
    value_layout: str,
    low_value_layout: str,
    is_causal: bool,
    has_edges: bool,
    has_mean: bool,
    is_high_raw: bool,
) -> Launcher:
    constants: dict[str, Any] = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "D": padded_channels(head_dim),
        "DV": padded_channels(head_dim),
        "VALUE_DIM": head_dim,
        "GROUPS": tiles.groups,
        "STAGES": tiles.stages,
        "REGISTERS": tiles.registers,
        "KEY_LAYOUT": key_layout,
        "VALUE_LAYOUT": value_layout,
        "LOW_VALUE_LAYOUT": low_value_layout,
        "IS_CAUSAL": is_causal,
        "HAS_EDGES": has_edges,
        "HAS_MEAN": has_mean,
        "IS_HIGH_RAW": is_high_raw,
    }
    # Whatever comes before, its programs may begin early: they wait before they touch memory.
    return Launcher(prefill_hopper_kernel, constants, num_warps=4, launch_pdl=True)


def takes_short(
    query: Tensor, operands: Operands, geometry: PrefillGeometry, tiles: ShortTiles, *, is_long: bool
) -> bool:
    """Whether the kernel for short prompts computes a call.

    It takes calls with head dimensions of 64, 96 or 128, whose low values are E4M3 or the caller's own. Of those that
    are long, too, it takes the ones whose queries see few keys.

    Args:
        query: ``[B, Hq, Tq, D]``.
        operands: Keys and values.
        geometry: Positions and visibility.
        tiles: What few keys are.
        is_long: Whether the kernel for long prompts :func:`takes` the call.
    """
    low = operands.low
    return (
        low is not None
        and not (is_long and _mean_keys(geometry, query.shape[2]) > tiles.max_keys)
        and low.value_form in (Form.E4M3, Form.RAW)
        and _blocks(geometry, query.shape[2], ROWS) <= MAX_PROGRAMS
        and query.shape[3] in SHORT_HEAD_DIMS
        and _is_usual(query, operands, geometry)
    )


def _mean_keys(geometry: PrefillGeometry, q_len: int) -> float:
    """Return how many keys a query sees on average, where the last one sees all."""
    if geometry.window is None:
        seen = geometry.kv_len - q_len / 2 if geometry.is_causal else geometry.kv_len
    else:
        seen = min(geometry.kv_len, geometry.window if geometry.is_causal else 2 * geometry.window)
    return seen


def prefill_short(
    query: Tensor,
    operands: Operands,
    geometry: PrefillGeometry,
    recipe: Recipe,
    tiles: ShortTiles,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    skip_threshold: float | None,
    tile_counts: Tensor | None,
    is_early: bool,
) -> None:
    """Launch the kernel for a call that :func:`takes_short` says yes to; arguments as for :func:`prefill_hopper`."""
    batch, q_heads, q_len, head_dim = query.shape
    high, low = operands.high, operands.low
    assert low is not None
    kv_heads = high.key.shape[1]
    staged = None
    if low.key_form not in (Form.INT8, Form.E4M3) or high.key_form is not Form.RAW:
        staged = stage_queries(
            query, operands.key_mean, operands.query_factor, recipe, low.key_form, high.key_form,
            scale=scale, is_early=is_early,
        )  # fmt: skip
    blocks = _blocks(geometry, q_len, ROWS)
    storage_tiles = low.key.shape[2] // TILE
    packed = pack_mask(geometry, batch, q_len, blocks, storage_tiles)
    channels = padded_channels(head_dim)
    all_heads = batch * kv_heads
    section = select_section(all_heads, low.head_bytes)
    launch = _short_launcher(
        q_heads, kv_heads, head_dim, tiles, high.key_layout, low.key_form, recipe.query_low,
        recipe.scale_rounding == "ceil", recipe.rotate and staged is None, geometry.is_causal,
        not _is_plain(geometry, q_len), high.key_form is Form.RAW,
    )  # fmt: skip
    launch(
        (section * (q_heads // kv_heads), blocks, -(-all_heads // section)),
        _heads(query if staged is None else staged.high, ROWS), None if staged is None else _heads(staged.low, ROWS),
        _heads(high.key, TILE // 2), _heads(high.value, TILE // 2),
        _matrix(low.key, TILE // low.key.element_size(), channels),
        _matrix(low.value, channels, TILE) if low.value_form is Form.E4M3 else None,
        out, lse, None if staged is None else staged.rows, operands.key_mean, low.key_factor, low.value_factor,
        sinks, geometry.rows, *out.stride()[:3],
        geometry.q_offset, geometry.kv_offset, q_len, geometry.kv_len, storage_tiles, blocks, section, all_heads,
        geometry.window, recipe.diagonal_tiles, recipe.sink_tiles,
        None if softcap is None else softcap * LOG2_E, scale * LOG2_E,
        math.pow(hadamard_size(head_dim), -0.5) if recipe.rotate else 1.0,
        packed.words, packed.bounds, packed.planes_per_row, packed.planes_per_head,
        skip_threshold, tile_counts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _short_launcher(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    tiles: ShortTiles,
    key_layout: str,
    form: Form,
    query_format: str,
    is_ceil: bool,
    rotate: bool,
    is_causal: bool,
    has_edges: bool,
    is_high_raw: bool,
) -> Launcher:
    constants: dict[str, Any] = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "D": padded_channels(head_dim),
        "HEAD_DIM": head_dim,
        "K_STAGES": tiles.key_stages,
        "V_STAGES": tiles.value_stages,
        "KEY_LAYOUT": key_layout,
        "FORM": str(form),
        "FORMAT": query_format,
        "IS_CEIL": is_ceil,
        "HADAMARD_SIZE": hadamard_size(head_dim) if rotate else 0,
        "IS_CAUSAL": is_causal,
        "HAS_EDGES": has_edges,
        "IS_HIGH_RAW": is_high_raw,
    }
    return Launcher(prefill_short_kernel, constants, num_warps=4, maxnreg=tiles.registers, launch_pdl=True)


def _blocks(geometry: PrefillGeometry, q_len: int, rows: int) -> int:
    """Return the programs of a head, of so many rows each, which begin with a warpgroup's."""
    # Where batch rows stand only the device knows: a row's first query may be the last of a warpgroup.
    before = geometry.q_offset % ROWS if geometry.rows is None else ROWS - 1
    return -(-(before + q_len) // rows)


def _is_usual(query: Tensor, operands: Operands, geometry: PrefillGeometry) -> bool:
    """Whether a call with low tiles has what both kernels ask of all: see :func:`takes`."""
    high, low = operands.high, operands.low
    assert low is not None
    has_factors = (
        (low.key_factor is None) == (low.key_form is Form.DEQUANTIZED)
        and high.key_factor is None
        and (low.value_factor is None or low.value_factor.ndim == 3)
    )
    return (
        low.key_form in LOW_FORMS
        and high.key_form in HIGH_FORMS
        and has_factors
        and low.key_layout == "aligned"
        and query.shape[3] == high.value.shape[3]
        and all(map(is_describable, (query, high.key, high.value)))
    )


def _is_plain(geometry: PrefillGeometry, q_len: int) -> bool:
    """Whether every query sees all keys before it, and keys begin with a tile."""
    is_covered = geometry.q_offset + q_len <= geometry.kv_offset + geometry.kv_len
    is_aligned = geometry.kv_offset % TILE == 0
    return geometry.is_causal and is_covered and is_aligned and geometry.window is None and geometry.rows is None


def _heads(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describe ``[B, H, T, D]``, copied in blocks of rows of a head: zeros from channel ``D`` on."""
    block = (1, 1, rows, padded_channels(tensor.shape[3]))
    layout = _layout(block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), head_strides(tensor), list(block), layout)


def _matrix(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a contiguous tensor as a matrix of its last dimension, copied in blocks."""
    width = tensor.shape[-1]
    block = (rows, columns)
    return TensorDescriptor(
        tensor, [tensor.numel() // width, width], [width, 1], list(block), _layout(block, tensor.dtype)
    )


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
