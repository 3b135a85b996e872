"""Fused quantisers in Triton for the ``8bit`` lowering of :mod:`dma_kernels.operands`.

Keys and values are read twice and written once: a first pass gathers, tile by tile, what needs the whole sequence (the
mean key that ``smooth_k`` subtracts and the largest value of each channel), a second one writes every operand. Queries
are read and written once.

Inputs may have any strides. Results equal :mod:`dma_kernels.quantize` to the bit, given the same mean key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import (
    e8m0_decode,
    e8m0_encode,
    e8m0_reciprocal,
    hadamard,
    permute_keys,
    round_to_bfloat16,
    round_to_int8,
    to_e4m3,
)
from .formats import E4M3, INT8, MXINT8_UNIT, TILE, ElementFormat, ScaleRounding
from .recipe import Recipe
from .transforms import hadamard_size

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_E4M3_EMAX = tl.constexpr(E4M3.emax)
_E4M3_MAX_MANTISSA = tl.constexpr(E4M3.max_mantissa)


@triton.jit
def _load_tile(
    base, rows_ptr, i_b, i_tile, stride_t, stride_d, kv_offset, kv_len,
    HAS_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the keys or values of a tile in aligned storage as fp32, with which of them exist and are visible.

    Returns:
        ``[TILE, BLOCK_D]``, zeros where nothing is visible, and boolean ``[TILE]``.
    """
    if HAS_ROWS:
        k_start = tl.load(rows_ptr + i_b * 4 + 1)
        first = tl.maximum(tl.load(rows_ptr + i_b * 4 + 2), 0)
        last = tl.minimum(tl.load(rows_ptr + i_b * 4 + 3), kv_len)
    else:
        k_start = kv_offset
        first = 0
        last = kv_len
    aligned_start = (k_start >> _TILE_SHIFT) << _TILE_SHIFT
    rows = i_tile * _TILE + aligned_start - k_start + tl.arange(0, _TILE)
    o_d = tl.arange(0, BLOCK_D)
    m_row = (rows >= first) & (rows < last)
    offset = rows.to(tl.int64)[:, None] * stride_t + o_d[None, :] * stride_d
    x = tl.load(base + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
    return x.to(tl.float32), m_row


@triton.jit(do_not_specialize=["kv_offset", "kv_len", "tiles"])
def _statistics_kernel(
    k_ptr, v_ptr, sum_ptr, amax_ptr, rows_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd, kv_offset, kv_len, tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_SUM: tl.constexpr, HAS_AMAX: tl.constexpr,
):  # fmt: skip
    """Sum the keys, and take the largest magnitude of the values, of one tile and kv head, for each channel."""
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    i_b = (i_head // KV_HEADS).to(tl.int64)
    i_h = i_head % KV_HEADS
    row = i_head.to(tl.int64) * tiles + i_tile
    if HAS_SUM:
        base = k_ptr + i_b * stride_kb + i_h * stride_kh
        x, _ = _load_tile(base, rows_ptr, i_b, i_tile, stride_kt, stride_kd, kv_offset, kv_len, HAS_ROWS, D, BLOCK_D)
        o_d = tl.arange(0, BLOCK_D)
        tl.store(sum_ptr + row * D + o_d, tl.sum(x, 0), mask=o_d < D)
    if HAS_AMAX:
        base = v_ptr + i_b * stride_vb + i_h * stride_vh
        x, _ = _load_tile(base, rows_ptr, i_b, i_tile, stride_vt, stride_vd, kv_offset, kv_len, HAS_ROWS, DV, BLOCK_DV)
        o_d = tl.arange(0, BLOCK_DV)
        # The bits of a magnitude order like the number, with infinity and NaN above all others.
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        tl.store(amax_ptr + row * DV + o_d, tl.max(bits, 0), mask=o_d < DV)


@triton.jit(do_not_specialize=["kv_len", "tiles"])
def _reduce_kernel(
    sum_ptr, amax_ptr, rows_ptr, mean_ptr, factor_ptr, kv_len, tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_SUM: tl.constexpr, HAS_AMAX: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Reduce one kv head over its tiles: the mean key, rounded to bfloat16, and the scales of the values."""
    i_head = tl.program_id(0)
    row = i_head.to(tl.int64) * tiles
    o_t = tl.arange(0, BLOCK_T)
    if HAS_SUM:
        o_d = tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], tl.float32)
        for t in range(0, tiles, BLOCK_T):
            m = (t + o_t < tiles)[:, None] & (o_d < D)[None, :]
            total += tl.sum(tl.load(sum_ptr + (row + t + o_t)[:, None] * D + o_d[None, :], mask=m, other=0.0), 0)
        count = kv_len
        if HAS_ROWS:
            i_b = i_head // KV_HEADS
            first = tl.maximum(tl.load(rows_ptr + i_b * 4 + 2), 0)
            count = tl.minimum(tl.load(rows_ptr + i_b * 4 + 3), kv_len) - first
        mean = tl.math.div_rn(total, tl.maximum(count, 1).to(tl.float32))
        tl.store(mean_ptr + i_head * D + o_d, round_to_bfloat16(mean), mask=o_d < D)
    if HAS_AMAX:
        o_d = tl.arange(0, BLOCK_DV)
        bits = tl.zeros([BLOCK_DV], tl.int32)
        for t in range(0, tiles, BLOCK_T):
            m = (t + o_t < tiles)[:, None] & (o_d < DV)[None, :]
            part = tl.load(amax_ptr + (row + t + o_t)[:, None] * DV + o_d[None, :], mask=m, other=0)
            bits = tl.maximum(bits, tl.max(part, 0))
        code = e8m0_encode(bits.to(tl.float32, bitcast=True), _E4M3_EMAX, _E4M3_MAX_MANTISSA, True)
        # As in value_scale: the smallest scale is fp32's smallest normal number.
        tl.store(factor_ptr + i_head * DV + o_d, e8m0_decode(tl.maximum(code, 1)), mask=o_d < DV)


@triton.jit
def _quantize_tile(x, code, UNIT: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Scale fp32 ``x`` down by ``2 ** (code - 127)``, broadcast, and cast it to int8 or E4M3."""
    x = x * e8m0_reciprocal(code)
    if UNIT == 1.0:
        low = to_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0), IS_INTERPRETED)
    else:
        low = round_to_int8(x * (1.0 / UNIT))
    return low


@triton.jit(do_not_specialize=["kv_offset", "kv_len", "tiles"])
def _quantize_kernel(
    k_ptr, v_ptr, mean_ptr, value_factor_ptr, k_high_ptr, k_low_ptr, k_factor_ptr, v_low_ptr, rows_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    kv_offset, kv_len, tiles, norm,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STORED_D: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_VALUES: tl.constexpr,
    WRITE_HIGH: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    EMAX: tl.constexpr, MAX_MANTISSA: tl.constexpr, UNIT: tl.constexpr, IS_CEIL: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write every operand of one tile and kv head, in aligned storage."""
    i_tile = tl.program_id(0)
    i_head = tl.program_id(1)
    i_b = (i_head // KV_HEADS).to(tl.int64)
    i_h = i_head % KV_HEADS
    storage_len = tiles * _TILE
    o_t = tl.arange(0, _TILE)
    o_d = tl.arange(0, BLOCK_D)
    base = k_ptr + i_b * stride_kb + i_h * stride_kh
    x, m_row = _load_tile(base, rows_ptr, i_b, i_tile, stride_kt, stride_kd, kv_offset, kv_len, HAS_ROWS, D, BLOCK_D)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + i_head * D + o_d, mask=o_d < D, other=0.0)
        x = tl.where(m_row[:, None], x - mean[None, :], 0.0)
    if ROTATE:
        x = hadamard(x, _TILE, HADAMARD_SIZE, BLOCK_D, norm)
    stored = (i_head.to(tl.int64) * storage_len + i_tile * _TILE + o_t)[:, None]
    if WRITE_HIGH:
        high = x.to(k_high_ptr.dtype.element_ty)
        tl.store(k_high_ptr + stored * D + o_d[None, :], high, mask=(o_d < D)[None, :])
    bits = tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1), 0)
    code = e8m0_encode(bits.to(tl.float32, bitcast=True), EMAX, MAX_MANTISSA, IS_CEIL)
    low = _quantize_tile(x, code, UNIT, IS_INTERPRETED)
    tl.store(k_low_ptr + stored * STORED_D + o_d[None, :], low, mask=(o_d < STORED_D)[None, :])
    # A tile of zeros has no use for its scale, and the smallest scale could make a factor underflow.
    factor = tl.where(bits == 0, 1.0, e8m0_decode(code) * UNIT)
    tl.store(k_factor_ptr + i_head * tiles + i_tile, factor)
    if HAS_VALUES:
        o_v = tl.arange(0, BLOCK_DV)
        base = v_ptr + i_b * stride_vb + i_h * stride_vh
        x, _ = _load_tile(base, rows_ptr, i_b, i_tile, stride_vt, stride_vd, kv_offset, kv_len, HAS_ROWS, DV, BLOCK_DV)
        factor = tl.load(value_factor_ptr + i_head * DV + o_v, mask=o_v < DV, other=1.0)
        # The factor is a power of two, so its reciprocal is exact.
        x = x * (1.0 / factor)[None, :]
        x = permute_keys(tl.trans(tl.minimum(tl.maximum(x, -448.0), 448.0)))
        offset = (i_head.to(tl.int64) * DV + o_v)[:, None] * storage_len + (i_tile * _TILE + o_t)[None, :]
        tl.store(v_low_ptr + offset, to_e4m3(x, IS_INTERPRETED), mask=(o_v < DV)[:, None])


@triton.jit(do_not_specialize=["q_len"])
def _quantize_queries_kernel(
    q_ptr, q_high_ptr, q_low_ptr, q_factor_ptr, stride_qb, stride_qh, stride_qt, stride_qd, q_len, norm,
    Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, STORED_D: tl.constexpr,
    ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    EMAX: tl.constexpr, MAX_MANTISSA: tl.constexpr, UNIT: tl.constexpr, IS_CEIL: tl.constexpr,
    IS_INTERPRETED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Write a block of queries of one head quantised, with a scale for each row; rotated, also in 16 bits."""
    i_head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    m_row = rows < q_len
    base = q_ptr + (i_head // Q_HEADS) * stride_qb + (i_head % Q_HEADS) * stride_qh
    offset = rows.to(tl.int64)[:, None] * stride_qt + o_d[None, :] * stride_qd
    x = tl.load(base + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    stored = i_head * q_len + rows
    if ROTATE:
        x = hadamard(x, BLOCK_T, HADAMARD_SIZE, BLOCK_D, norm)
        m_high = m_row[:, None] & (o_d < D)[None, :]
        tl.store(q_high_ptr + stored[:, None] * D + o_d[None, :], x.to(q_high_ptr.dtype.element_ty), mask=m_high)
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)
    code = e8m0_encode(bits.to(tl.float32, bitcast=True), EMAX, MAX_MANTISSA, IS_CEIL)
    low = _quantize_tile(x, code[:, None], UNIT, IS_INTERPRETED)
    m_low = m_row[:, None] & (o_d < STORED_D)[None, :]
    tl.store(q_low_ptr + stored[:, None] * STORED_D + o_d[None, :], low, mask=m_low)
    tl.store(q_factor_ptr + stored, tl.where(bits == 0, 1.0, e8m0_decode(code) * UNIT), mask=m_row)


@dataclass(frozen=True)
class Element:
    """How the kernels see an 8-bit element format.

    Attributes:
        format: The element.
        dtype: Its storage.
        unit: What one of the stored numbers is worth.
    """

    format: ElementFormat
    dtype: torch.dtype
    unit: float


ELEMENTS = {"mxfp8": Element(E4M3, torch.float8_e4m3fn, 1.0), "mxint8": Element(INT8, torch.int8, MXINT8_UNIT)}


def quantize_keys_values(
    key: Tensor, value: Tensor, recipe: Recipe, *, kv_offset: int, rows: Tensor | None, is_interpreted: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Write the key and value operands of the ``8bit`` lowering.

    Args:
        key: 16-bit ``[B, Hkv, Tk, D]``, any strides.
        value: 16-bit ``[B, Hkv, Tk, Dv]``, any strides.
        recipe: With ``shared_scale = "tile"`` and MXINT8 or MXFP8 keys.
        kv_offset: Position of key 0, where ``rows`` is ``None``.
        rows: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        is_interpreted: Whether Triton's interpreter runs the kernel.

    Returns:
        As :class:`~dma_kernels.operands.Operands` has them: ``k_high`` (``None`` if it is the key itself), ``k_low``,
        ``k_factor``, ``value`` and ``value_factor`` (both ``None`` for ``pv = "bf16"``).
    """
    batch, heads, kv_len, head_dim = key.shape
    value_dim = value.shape[-1]
    # Where a row starts inside its first tile is known on the device alone: up to 127 entries stay empty before it.
    first = kv_offset % TILE if rows is None else TILE - 1
    tiles = max(1, triton.cdiv(kv_len + first, TILE))
    stored_dim = triton.cdiv(head_dim, 32) * 32
    element = ELEMENTS[recipe.key_low]
    has_values = recipe.pv == "fp8"
    write_high = recipe.smooth_k or recipe.rotate
    new = key.new_empty
    k_high = new((batch, heads, tiles * TILE, head_dim)) if write_high else None
    k_low = new((batch, heads, tiles * TILE, stored_dim), dtype=element.dtype)
    k_factor = new((batch, heads, tiles), dtype=torch.float32)
    v_low = new((batch, heads, value_dim, tiles * TILE), dtype=torch.float8_e4m3fn) if has_values else None
    value_factor = new((batch, heads, value_dim), dtype=torch.float32) if has_values else None
    mean = new((batch, heads, head_dim), dtype=torch.float32) if recipe.smooth_k else None
    blocks = {
        "BLOCK_D": max(32, triton.next_power_of_2(head_dim)),
        "BLOCK_DV": max(32, triton.next_power_of_2(value_dim)),
    }
    shape = {"KV_HEADS": heads, "D": head_dim, "DV": value_dim, "HAS_ROWS": rows is not None, **blocks}
    if has_values or recipe.smooth_k:
        sums = new((batch, heads, tiles, head_dim), dtype=torch.float32) if recipe.smooth_k else None
        amax = new((batch, heads, tiles, value_dim), dtype=torch.int32) if has_values else None
        statistics = {"HAS_SUM": recipe.smooth_k, "HAS_AMAX": has_values}
        _statistics_kernel[(tiles, batch * heads)](
            key, value, sums, amax, rows, *key.stride(), *value.stride(), kv_offset, kv_len, tiles,
            **shape, **statistics,
        )  # fmt: skip
        _reduce_kernel[(batch * heads,)](
            sums, amax, rows, mean, value_factor, kv_len, tiles, **shape, **statistics, BLOCK_T=32
        )
    _quantize_kernel[(tiles, batch * heads)](
        key, value, mean, value_factor, k_high, k_low, k_factor, v_low, rows, *key.stride(), *value.stride(),
        kv_offset, kv_len, tiles, math.pow(hadamard_size(head_dim), -0.5),
        **shape,
        STORED_D=stored_dim,
        HAS_MEAN=recipe.smooth_k,
        HAS_VALUES=has_values,
        WRITE_HIGH=write_high,
        IS_INTERPRETED=is_interpreted,
        **_element_arguments(recipe, element, head_dim),
        num_warps=8,
    )  # fmt: skip
    return k_high, k_low, k_factor, v_low, value_factor


def quantize_queries(query: Tensor, recipe: Recipe, *, is_interpreted: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Write the query operands of the ``8bit`` lowering, from ``[B, Hq, Tq, D]`` of any strides.

    Returns:
        As :class:`~dma_kernels.operands.Operands` has them: ``q_high`` (``None`` if it is the query itself), ``q_low``
        and ``q_factor``.
    """
    batch, heads, q_len, head_dim = query.shape
    stored_dim = triton.cdiv(head_dim, 32) * 32
    element = ELEMENTS[recipe.query_low]
    q_high = query.new_empty((batch, heads, q_len, head_dim)) if recipe.rotate else None
    q_low = query.new_empty((batch, heads, q_len, stored_dim), dtype=element.dtype)
    q_factor = query.new_empty((batch, heads, q_len), dtype=torch.float32)
    _quantize_queries_kernel[(triton.cdiv(q_len, 64), batch * heads)](
        query, q_high, q_low, q_factor, *query.stride(), q_len, math.pow(hadamard_size(head_dim), -0.5),
        Q_HEADS=heads,
        D=head_dim,
        BLOCK_D=max(32, triton.next_power_of_2(head_dim)),
        STORED_D=stored_dim,
        IS_INTERPRETED=is_interpreted,
        BLOCK_T=64,
        **_element_arguments(recipe, element, head_dim),
    )  # fmt: skip
    return q_high, q_low, q_factor


def _element_arguments(recipe: Recipe, element: Element, head_dim: int) -> dict[str, float | bool]:
    return {
        "ROTATE": recipe.rotate,
        "HADAMARD_SIZE": hadamard_size(head_dim),
        "EMAX": element.format.emax,
        "MAX_MANTISSA": element.format.max_mantissa,
        "UNIT": element.unit,
        "IS_CEIL": recipe.scale_rounding == ScaleRounding.CEIL,
    }
