"""The portable prefill kernel, in Triton: it implements the whole rule, and stores nothing of size ``[q, k]``.

A CTA computes ``BLOCK_M`` query positions of one head and loops over blocks of keys. Blocks are aligned to positions,
not to the first query, and their sizes divide the rule's tile, so every block is in one tile. There are three loops:
high tiles (sinks and band), masked low tiles, and full low tiles, which take most of the time and need no mask.

:mod:`dma_kernels.prefill.operands` describes the operands; :mod:`dma_kernels.prefill.portable` launches the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.arithmetic import hadamard, narrow
from ..device.operands import finite_or_zero, prepare_queries, smoothing_bias
from ..device.schedule import schedule
from ..device.scores import Visibility, attend, load_keys, load_unquantized, load_values, logits, score, storage_row
from ..device.softmax import LN_2, LOG2_E, add_sink, log_sum_exp
from ..device.tiles import (
    TILE,
    TILE_SHIFT,
    Rows,
    attended_start,
    attended_stop,
    first_band_tile,
    head_rows,
    high_ranges,
    load_in_range,
    load_positions,
    low_ranges,
    unmasked_range,
)
from ..numerics.geometry import SKIP_BLOCK
from .channel_chunks import load_chunks, quantize_row_chunks, store_chunks

_SKIP_BLOCK = tl.constexpr(SKIP_BLOCK)


class QueryBlock(NamedTuple):
    """The queries of a CTA, all of one tile, and their keys; ranges are positions."""

    i_b: Any  # batch row
    i_kv: Any  # kv head
    i_h: Any  # query head
    i_head: Any  # kv head, counted over all batch rows
    q_pos: Any  # query positions, int32 ``[BLOCK_M]``
    q_tile: Any  # their tile
    band_tile: Any  # first tile of its band
    start: Any  # union range: keys that some query attends to
    end: Any
    full_start: Any  # unmasked range: keys that all of them attend to
    full_end: Any
    diagonal_tiles: Any  # high tiles before the queries' own
    sink_tiles: Any  # high tiles at the start of the sequence
    k_start: Any  # position of key 0, in row 0 of the caller's keys
    aligned_start: Any  # position of row 0 of tile-padded storage
    visibility: Any  # :class:`~..device.scores.Visibility`


@triton.jit
def _low_ranges(block, CONFIG: tl.constexpr):
    """Return the low blocks of ``BLOCK_N`` keys: start and stop before the band, then after it."""
    return low_ranges(
        block.q_tile, block.band_tile, block.start, block.end, block.diagonal_tiles, block.sink_tiles,
        CONFIG.tuning.block_n.bit_length() - 1, TILE_SHIFT, CONFIG.is_causal,
    )  # fmt: skip


@triton.jit
def _any_of_block(x):
    """Return for each row the maximum of int32 ``[BLOCK_M]`` over its block of 64 query positions."""
    BLOCKS: tl.constexpr = x.shape[0] // _SKIP_BLOCK
    by_block = tl.max(tl.reshape(x, [BLOCKS, _SKIP_BLOCK]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(by_block, [BLOCKS, _SKIP_BLOCK]), x.shape)


@triton.jit
def _hide_invisible(v, k_pos, visibility):
    """Zero the values of invisible keys: they may be NaN, which a probability of 0 does not hide."""
    is_visible = (k_pos >= visibility.start) & (k_pos < visibility.end)
    return tl.where(is_visible[:, None], v, 0.0)


@triton.jit
def _low_queries(q, global_scale, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """Convert queries to the operand format of low keys, see :func:`~..device.operands.prepare_queries`."""
    FORM: tl.constexpr = CONFIG.low_form
    FORMAT: tl.constexpr = CONFIG.low_q_format
    SHARED: tl.constexpr = CONFIG.low_shared
    ROUNDING: tl.constexpr = CONFIG.rounding
    x = hadamard(q.to(tl.float32), CONFIG.hadamard_size, CONFIG.norm)
    return prepare_queries(x, global_scale, FORM, FORMAT, SHARED, ROUNDING, DTYPE)


@triton.jit
def _stage_queries(
    q, q_rows, queries, q_len, global_scale, staged, staged_row, o_d, m_q, m_staged, block, DTYPE: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Write the queries of low tiles to memory, if the block has such tiles; return their descales."""
    D: tl.constexpr = CONFIG.head_dim
    FORM: tl.constexpr = CONFIG.low_form
    FORMAT: tl.constexpr = CONFIG.low_q_format
    IS_CEIL: tl.constexpr = CONFIG.rounding == "ceil"
    IN_CHUNKS: tl.constexpr = FORM != "dequantized" and FORM != "e5m2"
    row_scale = tl.full([CONFIG.tuning.block_m], 1.0, tl.float32)
    # For other forms with 256 channels, values live across the branch would spill in the loop over low tiles.
    has_low_tiles = True
    if IN_CHUNKS or CONFIG.block_d <= 128:
        before_start, before_stop, after_start, after_stop = _low_ranges(block, CONFIG)
        has_low_tiles = (before_start < before_stop) | (after_start < after_stop)
    if has_low_tiles:
        if IN_CHUNKS:
            chunks = load_chunks(q_rows, queries, 0, q_len, D)
            chunks, row_scale = quantize_row_chunks(chunks, FORM, FORMAT, IS_CEIL, CONFIG.hadamard_size, CONFIG.norm)
            store_chunks(staged, staged_row, chunks, m_q, D)
        else:
            q_low, _, row_scale = _low_queries(q, global_scale, DTYPE, CONFIG)
            tl.store(staged + (staged_row[:, None] + o_d[None, :]), q_low, mask=m_staged)
    return row_scale


@triton.jit
def _attend_to_high(
    acc, m_i, l_i, q, q_scale, row_scale, bias, qk_bias, softcap, block, o_h,
    key, k_rows, v_rows, k_scale_ptr, k_desc, v_desc, k_len, kv_len, HAS_SEQ_INFO: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend to the high tiles: the sinks, then the band; all tiles if the recipe has one precision.

    ``bias`` is subtracted from scores, and ``qk_bias`` added to logits before the softcap; either may be ``None``.
    """
    D: tl.constexpr = CONFIG.head_dim
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_H: tl.constexpr = CONFIG.tuning.high_block_n
    FORM: tl.constexpr = CONFIG.high_form
    FORMAT: tl.constexpr = CONFIG.high_format
    i_b, i_kv = block.i_b, block.i_kv
    sinks_start, sinks_stop, band_start, band_stop = high_ranges(
        block.band_tile, block.q_tile, block.start, block.end, block.diagonal_tiles, block.sink_tiles,
        BLOCK_H.bit_length() - 1, TILE_SHIFT, CONFIG.is_causal,
    )  # fmt: skip
    count = sinks_stop - sinks_start
    for t in tl.range(0, count + band_stop - band_start, num_stages=CONFIG.tuning.high_stages):
        position = tl.where(t < count, sinks_start + t, band_start + t - count) * BLOCK_H
        k_row = storage_row(position, block.k_start, block.aligned_start, FORM)
        if FORM == "raw":
            k = load_unquantized(k_desc, k_rows, i_b, i_kv, k_row, k_len, True, CONFIG.use_raw_tma, D, BLOCK_D, BLOCK_H)
            k_scale = k
        else:
            k, k_scale = load_keys(
                key.ptr, key.ptr, k_scale_ptr, block.i_head * k_len, k_row, k_len, FORM, FORMAT, False, False,
                D, BLOCK_D, BLOCK_H,
            )  # fmt: skip
        s = score(q, q_scale, k, k_scale, FORM, FORMAT, FORMAT)
        if bias is not None:
            s -= bias[:, None]
        s = logits(
            s, row_scale, qk_bias, softcap, block.q_pos, position + o_h, block.visibility,
            (position < block.full_start) | (position + BLOCK_H > block.full_end), CONFIG.is_causal,
        )  # fmt: skip
        v_row = storage_row(position, block.k_start, block.aligned_start, "raw")
        v = load_unquantized(
            v_desc, v_rows, i_b, i_kv, v_row, kv_len, True, CONFIG.use_raw_tma, CONFIG.value_dim, CONFIG.block_dv,
            BLOCK_H,
        )  # fmt: skip
        if HAS_SEQ_INFO:
            v = _hide_invisible(v, position + o_h, block.visibility)
        acc, m_i, l_i = attend(acc, m_i, l_i, s, row_scale, v, True, "raw", CONFIG.is_pv_fp8)
    return acc, m_i, l_i


@triton.jit
def _attend_to_low(
    acc, m_i, l_i, q, q_scale, row_scale, qk_bias, softcap, skip_threshold, tile_counts_ptr, block, o_n,
    k_low_ptr, k_low_scale_ptr, k_low_descale_ptr, v_rows, k_low_desc, v_low_desc, v_low_len, storage_len, head_tile,
    HAS_SEQ_INFO: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend to the low tiles: masked ones, then full ones."""
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_M: tl.constexpr = CONFIG.tuning.block_m
    BLOCK_N: tl.constexpr = CONFIG.tuning.block_n
    N_SHIFT: tl.constexpr = BLOCK_N.bit_length() - 1
    FORM: tl.constexpr = CONFIG.low_form
    Q_FORMAT: tl.constexpr = CONFIG.low_q_format
    K_FORMAT: tl.constexpr = CONFIG.low_k_format
    VALUE_FORM: tl.constexpr = CONFIG.low_value_form
    IS_CAUSAL: tl.constexpr = CONFIG.is_causal
    SKIPS: tl.constexpr = skip_threshold is not None
    i_head, q_pos, visibility = block.i_head, block.q_pos, block.visibility
    before_start, before_stop, after_start, after_stop = _low_ranges(block, CONFIG)
    full_1, stop_1 = unmasked_range(before_start, before_stop, block.full_start, block.full_end, N_SHIFT)
    full_2, stop_2 = unmasked_range(after_start, after_stop, block.full_start, block.full_end, N_SHIFT)
    # The masked blocks: two ranges before the band, then two after it. ``n_...`` counts those up to a range's end.
    n_1 = full_1 - before_start
    n_2 = n_1 + before_stop - stop_1
    n_3 = n_2 + full_2 - after_start
    n_masked = n_3 + after_stop - stop_2
    n_full = stop_1 - full_1
    if SKIPS:
        # m_i is the largest logit in high tiles. Incomplete blocks skip no tile.
        first_of_block = q_pos & -_SKIP_BLOCK
        is_whole = (first_of_block >= visibility.q_start) & (first_of_block + _SKIP_BLOCK <= visibility.q_end)
        bound = tl.where(is_whole, m_i - skip_threshold, float("-inf"))
        is_kept = tl.full([BLOCK_M], 1, tl.int32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        tiles_examined = tl.zeros([BLOCK_M], tl.int32)
        tiles_kept = tl.zeros([BLOCK_M], tl.int32)

    for IS_FULL in tl.static_range(0, 2):
        steps = n_full + stop_2 - full_2 if IS_FULL else n_masked
        tile = -1  # the tile of ``is_kept``
        for t in tl.range(0, steps, num_stages=CONFIG.tuning.num_stages if IS_FULL else 1):
            if IS_FULL:
                i_block = tl.where(t < n_full, full_1 + t, full_2 + t - n_full)
            else:
                i_block = tl.where(t < n_1, before_start + t, stop_1 + t - n_1)
                i_block = tl.where(t < n_2, i_block, tl.where(t < n_3, after_start + t - n_2, stop_2 + t - n_3))
            position = i_block * BLOCK_N
            k_row = storage_row(position, block.k_start, block.aligned_start, FORM)
            k, k_scale = load_keys(
                k_low_desc, k_low_ptr, k_low_scale_ptr, i_head * storage_len, k_row, storage_len,
                FORM, K_FORMAT, False, CONFIG.use_tma, CONFIG.head_dim, CONFIG.block_d, BLOCK_N,
            )  # fmt: skip
            s = score(q, q_scale, k, k_scale, FORM, Q_FORMAT, K_FORMAT)
            tile_scale = row_scale
            if k_low_descale_ptr is not None and FORM != "packed":
                tile_scale *= tl.load(k_low_descale_ptr + head_tile + (k_row >> TILE_SHIFT))
            # If a CTA has two blocks of 64 queries, each skips tiles independently.
            IS_SCALED: tl.constexpr = softcap is not None or not IS_FULL or (SKIPS and BLOCK_M > _SKIP_BLOCK)
            if IS_SCALED:
                s = logits(s, tile_scale, qk_bias, softcap, q_pos, position + o_n, visibility, not IS_FULL, IS_CAUSAL)
            if SKIPS:
                i_tile = i_block >> (TILE_SHIFT - N_SHIFT)
                if BLOCK_N == TILE:
                    row_max = tl.max(s, 1).to(tl.float32)
                    if not IS_SCALED:
                        row_max *= tile_scale
                elif i_tile != tile:
                    # First block of a tile in this loop: score the whole tile for its row maxima.
                    row_max = _tile_maximum(
                        q, q_scale, tile_scale, qk_bias, softcap, i_tile, block, o_n, k_low_ptr, k_low_scale_ptr,
                        storage_len, CONFIG,
                    )  # fmt: skip
                if i_tile != tile:
                    # NaN keeps a tile.
                    is_kept = _any_of_block(1 - (row_max < bound).to(tl.int32))
                    if tile_counts_ptr is not None:
                        # A partly masked tile is counted in the masked loop.
                        is_examined = _any_of_block(1 - (row_max == float("-inf")).to(tl.int32))
                        if IS_FULL:
                            is_whole_tile = (i_tile * TILE >= block.full_start) & (
                                i_tile * TILE + TILE <= block.full_end
                            )
                            is_examined = tl.where(is_whole_tile, is_examined, 0)
                        tiles_examined += is_examined
                        tiles_kept += is_examined * is_kept
                    tile = i_tile
                if BLOCK_M > _SKIP_BLOCK:
                    s = tl.where((is_kept != 0)[:, None], s, float("-inf"))
            v_row = storage_row(position, block.k_start, block.aligned_start, VALUE_FORM)
            MAY_BE_INVISIBLE: tl.constexpr = VALUE_FORM == "raw" and not IS_FULL
            v = load_values(
                v_low_desc, v_rows, head_tile * DV, block.i_b, block.i_kv, v_row, v_low_len, VALUE_FORM,
                MAY_BE_INVISIBLE, CONFIG.use_tma, CONFIG.use_raw_tma, DV, CONFIG.block_dv, BLOCK_N,
            )  # fmt: skip
            if HAS_SEQ_INFO and MAY_BE_INVISIBLE:
                v = _hide_invisible(v, position + o_n, visibility)
            if not SKIPS or tl.max(is_kept, 0) != 0:
                acc, m_i, l_i = attend(acc, m_i, l_i, s, tile_scale, v, IS_SCALED, VALUE_FORM, CONFIG.is_pv_fp8)
    if SKIPS and tile_counts_ptr is not None:
        tile_counts_ptr += 2 * block.i_h
        is_first = ((q_pos & (_SKIP_BLOCK - 1)) == 0) & is_whole
        tl.atomic_add(
            tile_counts_ptr, tl.sum(tl.where(is_first, tiles_examined - tiles_kept, 0), 0).to(tl.int64), sem="relaxed"
        )
        tl.atomic_add(tile_counts_ptr + 1, tl.sum(tl.where(is_first, tiles_examined, 0), 0).to(tl.int64), sem="relaxed")
    return acc, m_i, l_i


@triton.jit
def _tile_maximum(
    q, q_scale, tile_scale, qk_bias, softcap, i_tile, block, o_n, k_low_ptr, k_low_scale_ptr, storage_len,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Return the largest logit of each query in a low tile, fp32 ``[BLOCK_M]``."""
    BLOCK_N: tl.constexpr = CONFIG.tuning.block_n
    FORM: tl.constexpr = CONFIG.low_form
    Q_FORMAT: tl.constexpr = CONFIG.low_q_format
    K_FORMAT: tl.constexpr = CONFIG.low_k_format
    row_max = tl.full([CONFIG.tuning.block_m], float("-inf"), tl.float32)
    for i_block in tl.range(0, TILE // BLOCK_N, num_stages=1):
        position = i_tile * TILE + i_block * BLOCK_N
        k, k_scale = load_keys(
            k_low_ptr, k_low_ptr, k_low_scale_ptr, block.i_head * storage_len,
            storage_row(position, block.k_start, block.aligned_start, FORM), storage_len,
            FORM, K_FORMAT, True, False, CONFIG.head_dim, CONFIG.block_d, BLOCK_N,
        )  # fmt: skip
        s = logits(
            score(q, q_scale, k, k_scale, FORM, Q_FORMAT, K_FORMAT), tile_scale, qk_bias, softcap, block.q_pos,
            position + o_n, block.visibility, True, CONFIG.is_causal,
        )  # fmt: skip
        row_max = tl.maximum(row_max, tl.max(s, 1))
    return row_max


@triton.jit
def _store(
    acc, m_i, l_i, qk_bias, out, lse_rows, sinks_ptr, v_descale_ptr, queries, o_v, m_q, i_b, i_h, i_head,
    BIAS_IN_LSE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Finish the softmax with the sink logit, and store the output and the log-sum-exp."""
    DV: tl.constexpr = CONFIG.value_dim
    EXPONENT: tl.constexpr = 8.0 if CONFIG.is_pv_fp8 else 0.0
    if sinks_ptr is not None:
        sink_logit = LOG2_E * tl.load(sinks_ptr + i_h).to(tl.float32)
        if BIAS_IN_LSE:
            tl.debug_barrier()
            qk_bias = tl.load(lse_rows, mask=m_q, other=0.0) * LOG2_E
            sink_logit -= qk_bias
        m_i, l_i, alpha = add_sink(m_i, l_i, sink_logit, EXPONENT)
        acc *= alpha[:, None]
    acc *= (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    if v_descale_ptr is not None:
        acc *= tl.load(v_descale_ptr + i_head * DV + o_v, mask=o_v < DV, other=0.0)[None, :]
    offset = queries.to(tl.int64)[:, None] * out.stride_t + o_v[None, :]
    result = narrow(acc, out.ptr.dtype.element_ty)
    tl.store(
        out.ptr + i_b * out.stride_b + i_h * out.stride_h + offset, result, mask=m_q[:, None] & (o_v < DV)[None, :]
    )
    lse = log_sum_exp(m_i, l_i, None, EXPONENT)
    if BIAS_IN_LSE and sinks_ptr is not None:
        tl.store(lse_rows, lse + qk_bias * LN_2, mask=m_q)
    elif BIAS_IN_LSE:
        # Add to the qk_bias there, which another thread may have stored. A load would cost registers in the loops.
        tl.debug_barrier()
        tl.atomic_add(lse_rows, lse, mask=m_q, sem="relaxed", scope="cta")
    else:
        tl.store(lse_rows, lse, mask=m_q)


@triton.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "v_low_len", "storage_len", "blocks", "swizzle_group",
        "kv_rows", "window", "diagonal_tiles", "sink_tiles", "exact_tiles",
    ],
)  # fmt: skip
def prefill_kernel(
    query, key, value, out, mask, k_low_ptr, v_low_ptr, k_scale_ptr, k_low_scale_ptr,
    k_descale_ptr, k_low_descale_ptr, v_descale_ptr, q_global_scale_ptr, mean_ptr,
    k_desc, v_desc, k_low_desc, v_low_desc, lse_ptr, sinks_ptr, tile_counts_ptr, seq_info_ptr,
    q_offset, kv_offset, q_len, kv_len, v_low_len, storage_len, blocks, swizzle_group, kv_rows,
    window, diagonal_tiles, sink_tiles, exact_tiles, softcap, logit_scale, skip_threshold, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute attention for a block of ``BLOCK_M`` query positions of one head.

    Pointers and descriptors are ``None`` or unused where an operand is missing. :class:`~.operands.TileOperands` and
    :class:`~.operands.Operands` describe the operands, :class:`~.operands.AttentionInputs` other arguments.

    - ``query``, ``key``, ``value``, ``out``: 16-bit :class:`~dma_kernels.numerics.layout.Strided` queries, keys and
      values of high tiles, and output. ``mask``: uint8 ``[B, Hq, Tq, Tk]``.
    - ``k_low_ptr``, ``v_low_ptr``: keys and values of low tiles, contiguous; the caller's values if unquantized.
    - ``k_scale_ptr``, ``k_low_scale_ptr``, ``k_descale_ptr``, ``k_low_descale_ptr``: scales and descales of the keys of
      high and of low tiles. ``v_descale_ptr``, ``q_global_scale_ptr``, ``mean_ptr``: as in the operands.
    - ``k_desc``, ``v_desc``: ``key`` and ``value`` in blocks ``[1, 1, BLOCK_H, D]``; ``k_low_desc``: low keys as a
      matrix in blocks ``[BLOCK_N, BLOCK_D]``; ``v_low_desc``: like ``v_desc``, or E4M3 values as a matrix in blocks
      ``[BLOCK_DV, BLOCK_N]``.
    - ``seq_info_ptr``: int32 ``[B, 4]``, which replaces ``q_offset`` and ``kv_offset``, the positions of query 0 and
      key 0 (:class:`~dma_kernels.numerics.geometry.AttentionGeometry`).
    - ``v_low_len``, ``storage_len``: rows of low values, and of tile-padded storage.
    - ``sink_tiles``: high tiles at the start of the sequence; all tiles if the recipe has one precision.
    - ``exact_tiles``: query tiles at the start of the sequence that have no low tiles.
    - ``blocks``: CTAs per query head.
    - ``CONFIG``: :class:`~.portable.PortableConstants`.
    """
    D: tl.constexpr = CONFIG.head_dim
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_M: tl.constexpr = CONFIG.tuning.block_m
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_DV: tl.constexpr = CONFIG.block_dv
    M_SHIFT: tl.constexpr = BLOCK_M.bit_length() - 1
    HIGH_FORM: tl.constexpr = CONFIG.high_form
    HIGH_FORMAT: tl.constexpr = CONFIG.high_format
    ROUNDING: tl.constexpr = CONFIG.rounding
    LOW_FORM: tl.constexpr = CONFIG.low_form
    LOW_VALUE_FORM: tl.constexpr = CONFIG.low_value_form
    IS_CAUSAL: tl.constexpr = CONFIG.is_causal
    HAS_SEQ_INFO: tl.constexpr = seq_info_ptr is not None
    HAS_SOFTCAP: tl.constexpr = softcap is not None
    HAS_MASK: tl.constexpr = mask.ptr is not None
    HAS_MEAN: tl.constexpr = mean_ptr is not None
    GROUP: tl.constexpr = CONFIG.q_heads // CONFIG.kv_heads
    # Smoothing subtracts the same bias from all logits of a row. A plain softmax is invariant to that, so the bias is
    # added to the log of the denominator alone. A softcap is not, so it is added to the logits of smoothed keys.
    BIAS_IN_LSE: tl.constexpr = HAS_MEAN and not HAS_SOFTCAP
    BIAS_IN_LOGITS: tl.constexpr = HAS_MEAN and HAS_SOFTCAP
    # The model's own 16-bit dtype is kept if a side is unquantized (operands.dequantized_dtype).
    IS_LOW_UNQUANTIZED: tl.constexpr = CONFIG.low_q_format == "bf16" or CONFIG.low_k_format == "bf16"
    LOW_DTYPE: tl.constexpr = query.ptr.dtype.element_ty if IS_LOW_UNQUANTIZED else tl.bfloat16
    k_len = kv_len if HIGH_FORM == "raw" else storage_len  # rows of ``key``
    i_head, i_group, i_block = schedule(blocks, kv_rows, swizzle_group, GROUP, IS_CAUSAL)
    i_head = i_head.to(tl.int64)  # the kv head, counted over all batch rows
    i_b = i_head // CONFIG.kv_heads
    i_kv = i_head % CONFIG.kv_heads
    i_h = i_kv * GROUP + i_group

    # ---- the queries and the keys they attend to
    q_start, k_start, visible_start, visible_end = load_positions(seq_info_ptr, i_b, q_offset, kv_offset, kv_len)
    q_end = q_start + q_len
    block_start = ((q_start >> M_SHIFT) + i_block) << M_SHIFT
    first = tl.maximum(block_start, q_start)
    last = tl.minimum(block_start + BLOCK_M, q_end) - 1
    end = attended_stop(last, visible_end, window, IS_CAUSAL)
    full_end = attended_stop(first, visible_end, window, IS_CAUSAL)
    start = attended_start(first, visible_start, window, IS_CAUSAL)
    full_start = attended_start(last, visible_start, window, IS_CAUSAL)
    if HAS_MASK:
        full_end = full_start
    q_pos = block_start + tl.arange(0, BLOCK_M)
    queries = q_pos - q_start
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, CONFIG.tuning.high_block_n)
    o_n = tl.arange(0, CONFIG.tuning.block_n)
    o_v = tl.arange(0, BLOCK_DV)
    aligned_start = (k_start >> TILE_SHIFT) << TILE_SHIFT
    q_tile = first >> TILE_SHIFT
    band_tile = first_band_tile(q_tile, diagonal_tiles, exact_tiles)
    q_rows = head_rows(query, i_b, i_h)
    mask_base = mask.ptr
    if HAS_MASK:
        mask_base += i_b * mask.stride_b + i_h * mask.stride_h
    visibility = Visibility(
        visible_start, visible_end, window, mask_base, mask.stride_t, mask.stride_d, q_start, q_end, k_start
    )
    block = QueryBlock(
        i_b, i_kv, i_h, i_head, q_pos, q_tile, band_tile, start, end, full_start, full_end, diagonal_tiles, sink_tiles,
        k_start, aligned_start, visibility,
    )  # fmt: skip

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    q = load_in_range(q_rows, queries, 0, q_len, D, BLOCK_D)
    global_scale = 1.0
    if q_global_scale_ptr is not None:
        global_scale = tl.load(q_global_scale_ptr + i_b * CONFIG.q_heads + i_h)
    m_q = (queries >= 0) & (queries < q_len)
    lse_rows = lse_ptr + (i_b * CONFIG.q_heads + i_h) * q_len + queries
    bias = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MEAN:
        bias = smoothing_bias(q, mean_ptr + i_head * D, D)
    qk_bias = finite_or_zero(bias * logit_scale)
    if BIAS_IN_LSE:
        # Parked in the row's ``lse``: the loops have no register for it.
        tl.store(lse_rows, qk_bias * LN_2, mask=m_q)
    if CONFIG.stage_queries:
        # Hopper's MMAs read loaded operands from shared memory, but computed ones from registers, and none are
        # free. So stage the queries in this CTA's rows of the output, which are not written yet.
        STAGED: tl.constexpr = k_low_ptr.dtype.element_ty
        staged = (out.ptr + i_b * out.stride_b + i_h * out.stride_h).to(tl.pointer_type(STAGED))
        # A row of the output has room for two 8-bit elements per channel, or one of 16 bits.
        PER_CHANNEL: tl.constexpr = 1 if LOW_FORM == "dequantized" else 2
        staged_row = queries.to(tl.int64) * (PER_CHANNEL * out.stride_t)
        m_staged = m_q[:, None] & (o_d < D)[None, :]
        low_row_scale = _stage_queries(
            q, q_rows, queries, q_len, global_scale, staged, staged_row, o_d, m_q, m_staged, block, LOW_DTYPE, CONFIG
        )

    # ---- high tiles
    if HIGH_FORM == "raw":
        q_scale = q
        row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        x = hadamard(q.to(tl.float32), CONFIG.hadamard_size, CONFIG.norm)
        q, q_scale, row_scale = prepare_queries(x, global_scale, HIGH_FORM, HIGH_FORMAT, "block", ROUNDING, tl.bfloat16)
    row_scale *= logit_scale
    k_rows = head_rows(key, i_b, i_kv)
    v_rows = head_rows(value, i_b, i_kv)
    head_tile = i_head * (storage_len >> TILE_SHIFT)  # tile 0 of the head, among all tiles of tile-padded storage
    if k_descale_ptr is not None:
        row_scale *= tl.load(k_descale_ptr + i_head)
    logits_bias = qk_bias if BIAS_IN_LOGITS else None
    acc, m_i, l_i = _attend_to_high(
        acc, m_i, l_i, q, q_scale, row_scale, bias if HIGH_FORM == "raw" and BIAS_IN_LSE else None,
        None if HIGH_FORM == "raw" else logits_bias, softcap, block, o_h,
        key, k_rows, v_rows, k_scale_ptr, k_desc, v_desc, k_len, kv_len, HAS_SEQ_INFO, CONFIG,
    )  # fmt: skip

    # ---- low tiles
    if CONFIG.has_low:
        if CONFIG.stage_queries:
            tl.debug_barrier()
            q_low = tl.load(staged + (staged_row[:, None] + o_d[None, :]), mask=m_staged, other=0.0)
            q_low_scale = q_low
        else:
            q = load_in_range(q_rows, queries, 0, q_len, D, BLOCK_D)
            q_low, q_low_scale, low_row_scale = _low_queries(q, global_scale, LOW_DTYPE, CONFIG)
        low_row_scale *= logit_scale
        v_low_rows = v_rows
        if LOW_VALUE_FORM == "e4m3":
            v_low_rows = Rows(v_low_ptr, TILE, 1)
        elif LOW_VALUE_FORM == "dequantized":
            v_low_rows = Rows(v_low_ptr + i_head * v_low_len * DV, DV, 1)
        if k_low_descale_ptr is not None and LOW_FORM == "packed":
            low_row_scale *= tl.load(k_low_descale_ptr + i_head)
        if v_descale_ptr is not None:
            # Rescale the output to units of the E4M3 values; exact, because these are powers of two.
            acc *= (1.0 / tl.load(v_descale_ptr + i_head * DV + o_v, mask=o_v < DV, other=1.0))[None, :]
        acc, m_i, l_i = _attend_to_low(
            acc, m_i, l_i, q_low, q_low_scale, low_row_scale, logits_bias, softcap, skip_threshold, tile_counts_ptr,
            block, o_n, k_low_ptr, k_low_scale_ptr, k_low_descale_ptr, v_low_rows, k_low_desc, v_low_desc, v_low_len,
            storage_len, head_tile, HAS_SEQ_INFO, CONFIG,
        )  # fmt: skip

    _store(
        acc, m_i, l_i, qk_bias, out, lse_rows, sinks_ptr, v_descale_ptr, queries, o_v, m_q, i_b, i_h, i_head,
        BIAS_IN_LSE, CONFIG,
    )  # fmt: skip
