"""Fused prefill attention in Triton: the whole rule in one kernel, nothing of size ``[q, k]`` in memory.

A program owns ``BLOCK_M`` query positions of one head and walks over blocks of ``BLOCK_N`` key positions. Blocks are
aligned to positions, not to the first query, and both sizes divide the rule's tile, so that every block lies in one
tile. Key blocks are visited in three loops: the high ones (sinks and band), the low ones at an edge that needs a mask,
and all other low ones, where the time goes and no mask is computed.

What the kernel reads is described in :mod:`dma_kernels.operands`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import dot, permute_keys, round_to_e4m3, to_e4m3
from .formats import TILE
from .operands import Operands
from .recipe import Recipe
from .tuning import PrefillTiles

LOG2_E = math.log2(math.e)
MAX_BAND_TILES = 1 << 20
"""More tiles than a sequence has. A wider band is clamped to it, so that positions stay in int32."""

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _attend(
    acc,
    l_i,
    m_i,
    s,  # [BM, BN] scores, or base-2 logits where they are scaled already
    factor,  # [BM] turns a score into a base-2 logit
    v,  # [BN, DV]
    IS_SCALED: tl.constexpr,
    PV: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """One step of the online softmax; probabilities carry a factor of 2^8 where they are rounded to E4M3."""
    EXPONENT: tl.constexpr = 0.0 if PV == "16bit" else 8.0
    if IS_SCALED:
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.math.exp2(s + (EXPONENT - m_new)[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        p = tl.math.exp2(s * factor[:, None] + (EXPONENT - m_new)[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    if PV == "fp8":
        # A fresh accumulator for each block: Hopper's FP8 units add up in fewer bits than fp32.
        acc = acc * alpha[:, None] + dot(to_e4m3(permute_keys(p), IS_INTERPRETED), v, IS_INTERPRETED)
    else:
        if PV == "fp8_emulated":
            p = round_to_e4m3(p)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, IS_INTERPRETED)
    return acc, l_i, m_new


@triton.jit
def _logits(
    s,
    factor,
    softcap,
    q_pos,  # [BM]
    k_pos,  # [BN]
    visible_start,
    visible_end,
    window,
    mask_ptr,
    stride_mq,
    stride_mk,
    q_start,
    q_end,
    k_start,
    is_edge,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Scale, cap and mask the scores of one block, to base-2 logits; minus infinity where a key is not seen."""
    s = s * factor[:, None]
    if HAS_SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap * log2(e) and softcap carries the log2(e).
        s = softcap * (1.0 - 2.0 / (tl.math.exp2(s * (2.8853900817779268 / softcap)) + 1.0))
    if is_edge:
        seen = ((k_pos >= visible_start) & (k_pos < visible_end))[None, :]
        distance = q_pos[:, None] - k_pos[None, :]
        if IS_CAUSAL:
            seen = seen & (distance >= 0)
        if HAS_WINDOW:
            if IS_CAUSAL:  # noqa: SIM108 (a constexpr branch)
                seen = seen & (distance < window)
            else:
                seen = seen & (tl.abs(distance) <= window)
        if HAS_MASK:
            is_row = (q_pos >= q_start) & (q_pos < q_end)
            offset_q = (q_pos - q_start).to(tl.int64) * stride_mq
            offset_k = (k_pos - k_start).to(tl.int64) * stride_mk
            allowed = tl.load(mask_ptr + offset_q[:, None] + offset_k[None, :], mask=is_row[:, None] & seen, other=0)
            seen = seen & (allowed != 0)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _load_rows(base, rows, stride_t, stride_d, row_end, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load ``[rows, BLOCK_D]``; zeros for rows outside ``0..row_end`` and for channels from ``D`` on."""
    o_d = tl.arange(0, BLOCK_D)
    m_row = (rows >= 0) & (rows < row_end)
    offset = rows.to(tl.int64)[:, None] * stride_t + o_d[None, :] * stride_d
    return tl.load(base + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _load_transposed(base, column, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load ``[BLOCK_N, BLOCK_D]`` that lies transposed in memory, from ``column`` on."""
    o_d = tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, BLOCK_N)
    offset = o_d.to(tl.int64)[:, None] * stride + (column + o_n)[None, :]
    return tl.trans(tl.load(base + offset, mask=(o_d < D)[:, None], other=0.0))


@triton.jit
def _load_values(
    v_desc, v_base, v_row, aligned, index, stride_t, stride_d, kv_len,
    PV: tl.constexpr, USE_TMA: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load the values of a key block, ``[BLOCK_N, BLOCK_DV]``: FP8 from aligned storage, else the caller's own."""
    if PV == "fp8":
        if USE_TMA:
            v = tl.trans(v_desc.load([v_row, aligned]))
        else:
            v = _load_transposed(v_base, aligned, stride_t, DV, BLOCK_DV, BLOCK_N)
    else:
        v = _load_rows(v_base, index + tl.arange(0, BLOCK_N), stride_t, stride_d, kv_len, DV, BLOCK_DV)
    return v


@triton.jit
def _block_range(start, end, SHIFT: tl.constexpr):
    """Return the first block of a range of positions and the one past its last; equal for an empty range."""
    first = start >> SHIFT
    return first, tl.where(end > start, (end + (1 << SHIFT) - 1) >> SHIFT, first)


@triton.jit
def _inner_range(first, last, start, end, SHIFT: tl.constexpr):
    """Return the part of the blocks ``first..last`` that lies in the positions ``start..end`` whole."""
    inner_first = tl.minimum(tl.maximum(first, (start + (1 << SHIFT) - 1) >> SHIFT), last)
    return inner_first, tl.maximum(tl.minimum(last, end >> SHIFT), inner_first)


@triton.jit(
    do_not_specialize=["q_offset", "kv_offset", "q_len", "kv_len", "storage_len", "window", "diagonal_tiles"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, q_low_ptr, k_low_ptr, q_factor_ptr, k_factor_ptr, value_factor_ptr,
    k_high_desc, k_low_desc, v_desc,
    out_ptr, lse_ptr, sinks_ptr, mask_ptr, rows_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_lb, stride_lh, stride_lt, stride_ld,  # q_low
    stride_nb, stride_nh, stride_nt, stride_nd,  # k_low
    stride_ob, stride_oh, stride_ot,
    stride_mb, stride_mh, stride_mq, stride_mk,
    q_offset, kv_offset, q_len, kv_len, storage_len, window, softcap, logit_scale, diagonal_tiles, sink_tiles,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M_SHIFT: tl.constexpr, N_SHIFT: tl.constexpr, NUM_STAGES: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_LOW: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_Q_FACTOR: tl.constexpr, HAS_K_FACTOR: tl.constexpr, HAS_VALUE_FACTOR: tl.constexpr,
    IS_HIGH_ALIGNED: tl.constexpr, IS_LOW_ALIGNED: tl.constexpr, PV: tl.constexpr,
    USE_TMA: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    EXPONENT: tl.constexpr = 0.0 if PV == "16bit" else 8.0
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    # Programs of one kv head are neighbours, so that its keys stay in the L2 cache; the longest rows go first.
    pid = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0) // Q_HEADS
    i_kv = pid // (blocks * GROUP)
    inner = pid % (blocks * GROUP)
    i_h = i_kv * GROUP + inner % GROUP
    i_block = blocks - 1 - inner // GROUP if IS_CAUSAL else inner // GROUP

    if HAS_ROWS:
        q_start = tl.load(rows_ptr + i_b * 4)
        k_start = tl.load(rows_ptr + i_b * 4 + 1)
        visible_start = k_start + tl.maximum(tl.load(rows_ptr + i_b * 4 + 2), 0)
        visible_end = k_start + tl.minimum(tl.load(rows_ptr + i_b * 4 + 3), kv_len)
    else:
        q_start = q_offset
        k_start = kv_offset
        visible_start = k_start
        visible_end = k_start + kv_len
    q_end = q_start + q_len
    block_start = ((q_start >> M_SHIFT) + i_block) << M_SHIFT

    # Positions that some row of the block sees, and those that every row sees.
    first = tl.maximum(block_start, q_start)
    last = tl.minimum(block_start + BLOCK_M, q_end) - 1
    start, end = visible_start, visible_end
    inner_start, inner_end = visible_start, visible_end
    if IS_CAUSAL:
        end = tl.minimum(end, last + 1)
        inner_end = tl.minimum(inner_end, first + 1)
    if HAS_WINDOW:
        reach = window - 1 if IS_CAUSAL else window
        start = tl.maximum(start, first - reach)
        inner_start = tl.maximum(inner_start, last - reach)
        if not IS_CAUSAL:
            end = tl.minimum(end, last + window + 1)
            inner_end = tl.minimum(inner_end, first + window + 1)
    if HAS_MASK:
        inner_end = inner_start

    q_pos = block_start + tl.arange(0, BLOCK_M)
    rows = q_pos - q_start
    o_n = tl.arange(0, BLOCK_N)
    q_base = q_ptr + i_b * stride_qb + i_h * stride_qh
    k_base = k_ptr + i_b * stride_kb + i_kv * stride_kh
    v_base = v_ptr + i_b * stride_vb + i_kv * stride_vh
    mask_base = mask_ptr
    if HAS_MASK:
        mask_base += i_b * stride_mb + i_h * stride_mh
    # Position of entry 0 of aligned storage, and of the keys and values as the caller has them.
    aligned_start = (k_start >> _TILE_SHIFT) << _TILE_SHIFT
    high_start = aligned_start if IS_HIGH_ALIGNED else k_start
    high_len = storage_len if IS_HIGH_ALIGNED else kv_len
    k_row = ((i_b * KV_HEADS + i_kv) * storage_len).to(tl.int32)
    v_row = ((i_b * KV_HEADS + i_kv) * DV).to(tl.int32)

    q = _load_rows(q_base, rows, stride_qt, stride_qd, q_len, D, BLOCK_D)
    factor = tl.full([BLOCK_M], 1.0, tl.float32) * logit_scale
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_SINKS:
        m_i = tl.full([BLOCK_M], 1.4426950408889634, tl.float32) * tl.load(sinks_ptr + i_h).to(tl.float32)
        l_i = tl.full([BLOCK_M], 1.0 if PV == "16bit" else 256.0, tl.float32)
    else:
        m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)

    # ---- high tiles: the sinks, then the band; everything, where the recipe has one precision
    tile_start = (block_start >> _TILE_SHIFT) << _TILE_SHIFT
    sink_end = sink_tiles * _TILE
    band_start = tile_start - diagonal_tiles * _TILE
    band_end = tile_start + (diagonal_tiles + 1) * _TILE
    if HAS_LOW:
        a_first, a_last = _block_range(start, tl.minimum(end, sink_end), N_SHIFT)
        b_first, b_last = _block_range(
            tl.maximum(tl.maximum(start, band_start), sink_end), tl.minimum(end, band_end), N_SHIFT
        )
    else:
        a_first, a_last = _block_range(start, end, N_SHIFT)
        b_first, b_last = a_last, a_last
    count = a_last - a_first
    for t in tl.range(0, count + b_last - b_first, num_stages=1):
        block = tl.where(t < count, a_first + t, b_first + t - count)
        position = block * BLOCK_N
        if USE_TMA and IS_HIGH_ALIGNED:
            k = k_high_desc.load([k_row + position - aligned_start, 0])
        else:
            k = _load_rows(k_base, position - high_start + o_n, stride_kt, stride_kd, high_len, D, BLOCK_D)
        s = _logits(
            dot(q, tl.trans(k), IS_INTERPRETED), factor, softcap, q_pos, position + o_n,
            visible_start, visible_end, window, mask_base, stride_mq, stride_mk, q_start, q_end, k_start,
            (position < inner_start) | (position + BLOCK_N > inner_end), IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK,
        )  # fmt: skip
        v = _load_values(
            v_desc, v_base, v_row, position - aligned_start, position - k_start, stride_vt, stride_vd, kv_len,
            PV, USE_TMA, DV, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
        acc, l_i, m_i = _attend(acc, l_i, m_i, s, factor, v, True, PV, IS_INTERPRETED)

    if HAS_LOW:
        k_low_base = k_low_ptr + i_b * stride_nb + i_kv * stride_nh
        low_start = aligned_start if IS_LOW_ALIGNED else k_start
        low_len = storage_len if IS_LOW_ALIGNED else kv_len
        k_factor_base = k_factor_ptr
        if HAS_K_FACTOR:
            k_factor_base += (i_b * KV_HEADS + i_kv) * (storage_len >> _TILE_SHIFT)
        q_low_base = q_low_ptr + i_b * stride_lb + i_h * stride_lh
        q_low = _load_rows(q_low_base, rows, stride_lt, stride_ld, q_len, D, BLOCK_D)
        low_factor = factor
        if HAS_Q_FACTOR:
            q_factor_base = q_factor_ptr + (i_b * Q_HEADS + i_h) * q_len
            low_factor *= tl.load(q_factor_base + rows, mask=(rows >= 0) & (rows < q_len), other=1.0)

        c_first, c_last = _block_range(tl.maximum(start, sink_end), tl.minimum(end, band_start), N_SHIFT)
        c_in, c_out = _inner_range(c_first, c_last, inner_start, inner_end, N_SHIFT)
        if IS_CAUSAL:
            d_first, d_in, d_out, d_last = c_last, c_last, c_last, c_last
        else:
            d_first, d_last = _block_range(tl.maximum(tl.maximum(start, band_end), sink_end), end, N_SHIFT)
            d_in, d_out = _inner_range(d_first, d_last, inner_start, inner_end, N_SHIFT)

        # ---- low tiles at an edge: [c_first, c_in), [c_out, c_last), [d_first, d_in), [d_out, d_last)
        n_1 = c_in - c_first
        n_2 = n_1 + c_last - c_out
        n_3 = n_2 + d_in - d_first
        for t in tl.range(0, n_3 + d_last - d_out, num_stages=1):
            block = tl.where(t < n_1, c_first + t, c_out + t - n_1)
            block = tl.where(t < n_2, block, tl.where(t < n_3, d_first + t - n_2, d_out + t - n_3))
            position = block * BLOCK_N
            k = _load_rows(k_low_base, position - low_start + o_n, stride_nt, stride_nd, low_len, D, BLOCK_D)
            edge_factor = low_factor
            if HAS_K_FACTOR:
                edge_factor *= tl.load(k_factor_base + ((position - aligned_start) >> _TILE_SHIFT))
            s = _logits(
                dot(q_low, tl.trans(k), IS_INTERPRETED), edge_factor, softcap, q_pos,
                position + o_n, visible_start, visible_end, window, mask_base, stride_mq, stride_mk, q_start, q_end,
                k_start, True, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK,
            )  # fmt: skip
            v = _load_values(
                v_desc, v_base, v_row, position - aligned_start, position - k_start, stride_vt, stride_vd, kv_len,
                PV, USE_TMA, DV, BLOCK_DV, BLOCK_N,
            )  # fmt: skip
            acc, l_i, m_i = _attend(acc, l_i, m_i, s, factor, v, True, PV, IS_INTERPRETED)

        # ---- low tiles that every row sees whole: [c_in, c_out), [d_in, d_out)
        n_inner = c_out - c_in
        for t in tl.range(0, n_inner + d_out - d_in, num_stages=NUM_STAGES):
            block = tl.where(t < n_inner, c_in + t, d_in + t - n_inner)
            position = block * BLOCK_N
            if USE_TMA and IS_LOW_ALIGNED:
                k = k_low_desc.load([k_row + position - aligned_start, 0])
            else:
                k = _load_rows(k_low_base, position - low_start + o_n, stride_nt, stride_nd, low_len, D, BLOCK_D)
            s = dot(q_low, tl.trans(k), IS_INTERPRETED)
            block_factor = low_factor
            if HAS_K_FACTOR:
                block_factor *= tl.load(k_factor_base + ((position - aligned_start) >> _TILE_SHIFT))
            if HAS_SOFTCAP:
                s = _logits(
                    s, block_factor, softcap, q_pos, position + o_n, visible_start, visible_end, window,
                    mask_base, stride_mq, stride_mk, q_start, q_end, k_start,
                    False, IS_CAUSAL, HAS_WINDOW, True, False,
                )  # fmt: skip
            v = _load_values(
                v_desc, v_base, v_row, position - aligned_start, position - k_start, stride_vt, stride_vd, kv_len,
                PV, USE_TMA, DV, BLOCK_DV, BLOCK_N,
            )  # fmt: skip
            acc, l_i, m_i = _attend(acc, l_i, m_i, s, block_factor, v, HAS_SOFTCAP, PV, IS_INTERPRETED)

    o_d = tl.arange(0, BLOCK_DV)
    is_empty = l_i == 0.0
    acc = acc / tl.where(is_empty, 1.0, l_i)[:, None]
    if HAS_VALUE_FACTOR:
        acc *= tl.load(value_factor_ptr + v_row + o_d, mask=o_d < DV, other=0.0)[None, :]
    m_row = (rows >= 0) & (rows < q_len)
    offset = rows.to(tl.int64)[:, None] * stride_ot + o_d[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_b * stride_ob + i_h * stride_oh + offset, out, mask=m_row[:, None] & (o_d < DV)[None, :])
    lse = (m_i + tl.math.log2(l_i) - EXPONENT) * 0.6931471805599453
    tl.store(lse_ptr + (i_b * Q_HEADS + i_h) * q_len + rows, tl.where(is_empty, float("-inf"), lse), mask=m_row)


def prefill_attention(
    query: Tensor,
    operands: Operands,
    *,
    kv_len: int,
    kv_heads: int,
    value_dim: int,
    q_offset: int,
    kv_offset: int,
    rows: Tensor | None,
    recipe: Recipe,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    scale: float,
    tiles: PrefillTiles,
    use_tma: bool,
    is_interpreted: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; for the arguments see :func:`dma_kernels.attention`.

    Args:
        query: ``[B, Hq, Tq, D]``, for its shape, dtype and device.
        operands: What the kernel reads.
        kv_len: Keys as the caller has them.
        kv_heads: Heads of keys and values.
        value_dim: Channels of a value.
        q_offset: Position of query 0, where ``rows`` is ``None``.
        kv_offset: Position of key 0, likewise.
        rows: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key and the
            one past the last.
        recipe: For its band.
        is_causal: See :func:`dma_kernels.attention`, as for the arguments up to ``scale``.
        window: Sliding window.
        softcap: Cap of the scores.
        sinks: ``[Hq]``.
        mask: Boolean, broadcastable to ``[B, Hq, Tq, Tk]``.
        scale: Factor of the scores.
        tiles: Block sizes.
        use_tma: Whether the device copies tiles by descriptor (Hopper and later).
        is_interpreted: Whether Triton's interpreter runs the kernel.

    Returns:
        Output ``[B, Hq, Tq, Dv]`` and the log of the softmax denominator, fp32 ``[B, Hq, Tq]``.
    """
    batch, q_heads, q_len, head_dim = query.shape
    out = query.new_empty((batch, q_len, q_heads, value_dim)).transpose(1, 2)
    lse = query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    block_d, block_dv = (max(32, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    has_low = operands.k_low is not None
    k_low = operands.k_low if operands.k_low is not None else operands.k_high
    q_low = operands.q_low if operands.q_low is not None else operands.q_high
    storage_len = k_low.shape[2] if operands.is_low_aligned else TILE
    k_high_desc = k_low_desc = v_desc = k_low  # unused without TMA
    if use_tma and operands.is_high_aligned:
        k_high_desc = _descriptor(operands.k_high, tiles.block_n, block_d)
    if use_tma and operands.is_low_aligned:
        k_low_desc = _descriptor(k_low, tiles.block_n, block_d)
    if use_tma and operands.pv == "fp8":
        v_desc = _descriptor(operands.value, block_dv, tiles.block_n)
    if rows is None:
        # Aligned blocks of positions that hold queries.
        blocks = (q_offset + q_len - 1) // tiles.block_m - q_offset // tiles.block_m + 1
    else:
        blocks = (q_len + tiles.block_m - 2) // tiles.block_m + 1
    _prefill_kernel[(blocks * q_heads, batch)](
        operands.q_high, operands.k_high, operands.value, q_low, k_low,
        operands.q_factor, operands.k_factor, operands.value_factor, k_high_desc, k_low_desc, v_desc,
        out, lse, sinks, None if mask is None else mask.view(torch.uint8), rows,
        *operands.q_high.stride(), *operands.k_high.stride(), *operands.value.stride(), *q_low.stride(),
        *k_low.stride(), *out.stride()[:3], *_mask_strides(mask),
        q_offset, kv_offset, q_len, kv_len, storage_len, window or 0, (softcap or 0.0) * LOG2_E, scale * LOG2_E,
        min(recipe.diagonal_tiles, MAX_BAND_TILES), min(recipe.sink_tiles, MAX_BAND_TILES),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        DV=value_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        M_SHIFT=tiles.block_m.bit_length() - 1,
        N_SHIFT=tiles.block_n.bit_length() - 1,
        NUM_STAGES=tiles.num_stages,
        IS_CAUSAL=is_causal,
        HAS_LOW=has_low,
        HAS_ROWS=rows is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_MASK=mask is not None,
        HAS_Q_FACTOR=operands.q_factor is not None,
        HAS_K_FACTOR=operands.k_factor is not None,
        HAS_VALUE_FACTOR=operands.value_factor is not None,
        IS_HIGH_ALIGNED=operands.is_high_aligned,
        IS_LOW_ALIGNED=operands.is_low_aligned,
        PV=operands.pv,
        USE_TMA=use_tma,
        IS_INTERPRETED=is_interpreted,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
    )  # fmt: skip
    return out, lse


def _descriptor(tensor: Tensor, block_rows: int, block_columns: int) -> Any:
    """Describe a contiguous tensor as a matrix of its last dimension, copied in blocks."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [block_rows, block_columns])


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    """Return strides that broadcast the mask's dimensions of size 1."""
    if mask is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
