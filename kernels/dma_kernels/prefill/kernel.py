"""The portable prefill kernel, in Triton: it implements the whole rule, and stores nothing of size ``[q, k]``.

A CTA computes ``BLOCK_M`` query positions of one head and loops over blocks of keys. Blocks are aligned to positions,
not to the first query, and their sizes divide the rule's tile, so every block is in one tile. There are three loops:
high tiles (sinks and band), masked low tiles, and full low tiles, which take most of the time and need no mask.

:mod:`dma_kernels.prefill.operands` describes the operands; :mod:`dma_kernels.prefill.portable` launches the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import hadamard, narrow
from ..device.operands import finite_or_zero, prepare_queries, smoothing_bias
from ..device.scores import Visibility, attend, load_keys, load_raw, load_values, logits, score, storage_entry
from ..device.tiles import TILE, TILE_SHIFT, Rows, head_rows, load_in_range, load_positions
from ..numerics.geometry import SKIP_BLOCK
from .channel_chunks import load_chunks, quantize_row_chunks, store_chunks

_SKIP_BLOCK = tl.constexpr(SKIP_BLOCK)


@triton.jit
def _block_range(start, end, SHIFT: tl.constexpr):
    """Return the first block of a range of positions and the one past its last; equal for an empty range."""
    first = start >> SHIFT
    return first, tl.where(end > start, (end + (1 << SHIFT) - 1) >> SHIFT, first)


@triton.jit
def _full_range(first, last, start, end, SHIFT: tl.constexpr):
    """Return the blocks in ``first..last`` that lie entirely in the positions ``start..end``."""
    full_first = tl.minimum(tl.maximum(first, (start + (1 << SHIFT) - 1) >> SHIFT), last)
    return full_first, tl.maximum(tl.minimum(last, end >> SHIFT), full_first)


@triton.jit
def schedule(blocks, kv_heads, swizzle_group, GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return the kv head of this CTA (of all batch rows), its query head in the group, and its block of queries.

    CTAs are ordered in L2 swizzle groups: kv heads whose keys and values fit in the L2 cache together. In a group the
    blocks with the most keys go first, so that the tail of the launch is short.
    """
    pid = tl.program_id(0)
    first_head = (pid // (swizzle_group * GROUP * blocks)) * swizzle_group
    heads = tl.minimum(swizzle_group, kv_heads - first_head) * GROUP
    i_inner = pid - first_head * GROUP * blocks
    i_head = i_inner % heads
    i_block = i_inner // heads
    return first_head + i_head // GROUP, i_head % GROUP, blocks - 1 - i_block if IS_CAUSAL else i_block


@triton.jit
def _any_of_block(x, BLOCK_M: tl.constexpr):
    """Return for each row the maximum of int32 ``[BLOCK_M]`` over its block of 64 query positions."""
    BLOCKS: tl.constexpr = BLOCK_M // _SKIP_BLOCK
    by_block = tl.max(tl.reshape(x, [BLOCKS, _SKIP_BLOCK]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(by_block, [BLOCKS, _SKIP_BLOCK]), [BLOCK_M])


@triton.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "k_len", "v_low_len", "storage_len", "blocks", "swizzle_group",
        "kv_rows", "window", "diagonal_tiles", "sink_tiles",
    ],
)  # fmt: skip
def prefill_kernel(
    query, key, value, out, mask, k_low_ptr, v_low_ptr, k_scale_ptr, k_low_scale_ptr,
    k_descale_ptr, k_low_descale_ptr, v_descale_ptr, q_global_scale_ptr, mean_ptr,
    k_desc, v_desc, k_low_desc, v_low_desc, lse_ptr, sinks_ptr, tile_counts_ptr, seq_info_ptr,
    q_offset, kv_offset, q_len, kv_len, k_len, v_low_len, storage_len, blocks, swizzle_group, kv_rows,
    window, diagonal_tiles, sink_tiles, softcap, logit_scale, skip_threshold, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute attention for a block of ``BLOCK_M`` query positions of one head.

    Pointers and descriptors are ``None`` or unused where an operand is missing.

    - ``query``, ``key``, ``value``, ``out``: 16-bit :class:`~dma_kernels.runtime.descriptors.Strided` queries
      ``[B, Hq, Tq, D]``, keys and values of high tiles ``[B, Hkv, T, D]``, and output. The caller's, except quantized
      keys, which are contiguous. ``mask``: uint8 ``[B, Hq, Tq, Tk]``.
    - ``k_low_ptr``, ``v_low_ptr``: keys and values of low tiles, contiguous; the caller's values if unquantized.
    - ``k_scale_ptr``, ``k_low_scale_ptr``: block scales of packed keys of high and of low tiles.
    - ``k_descale_ptr``: descale of the keys of high tiles, fp32 ``[B, Hkv]``; ``k_low_descale_ptr``: of low tiles, fp32
      ``[B, Hkv]`` or ``[B, Hkv, tiles]``; ``v_descale_ptr``: of E4M3 values, fp32 ``[B, Hkv, Dv]``.
    - ``q_global_scale_ptr``: NVFP4 global scale of queries, fp32 ``[B, Hq]``; ``mean_ptr``: mean key that smoothing
      subtracted, fp32 ``[B, Hkv, D]``.
    - ``k_desc``, ``v_desc``: ``key`` and ``value`` in blocks ``[1, 1, BLOCK_H, D]``; ``k_low_desc``: low keys as a
      matrix in blocks ``[BLOCK_N, BLOCK_D]``; ``v_low_desc``: like ``v_desc``, or E4M3 values as a matrix in blocks
      ``[BLOCK_DV, BLOCK_N]``.
    - ``lse_ptr``: fp32 ``[B, Hq, Tq]``; ``sinks_ptr``: sink logits ``[Hq]``; ``tile_counts_ptr``: int64 ``[Hq, 2]``.
    - ``seq_info_ptr``: int32 ``[B, 4]``, which replaces ``q_offset`` and ``kv_offset``, the positions of query 0 and
      key 0 (:class:`~dma_kernels.numerics.geometry.AttentionGeometry`).
    - ``k_len``, ``v_low_len``, ``storage_len``: rows of ``key``, of low values and of tile-padded storage.
    - ``blocks``: CTAs per query head; ``swizzle_group``, ``kv_rows``: kv heads per L2 swizzle group, and of all rows.
    - ``softcap``, ``logit_scale``, ``skip_threshold``: in base 2, or ``None``.
    - ``CONFIG``: :class:`~.constants.PortableConstants`.
    """
    Q_HEADS: tl.constexpr = CONFIG.q_heads
    KV_HEADS: tl.constexpr = CONFIG.kv_heads
    D: tl.constexpr = CONFIG.head_dim
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_M: tl.constexpr = CONFIG.tuning.block_m
    BLOCK_H: tl.constexpr = CONFIG.tuning.high_block_n
    BLOCK_N: tl.constexpr = CONFIG.tuning.block_n
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_DV: tl.constexpr = CONFIG.block_dv
    M_SHIFT: tl.constexpr = BLOCK_M.bit_length() - 1
    H_SHIFT: tl.constexpr = BLOCK_H.bit_length() - 1
    N_SHIFT: tl.constexpr = BLOCK_N.bit_length() - 1
    HIGH_FORM: tl.constexpr = CONFIG.high_form
    HIGH_FORMAT: tl.constexpr = CONFIG.high_format
    LOW_SHARED: tl.constexpr = CONFIG.low_shared
    ROUNDING: tl.constexpr = CONFIG.rounding
    LOW_FORM: tl.constexpr = CONFIG.low_form
    LOW_Q_FORMAT: tl.constexpr = CONFIG.low_q_format
    LOW_K_FORMAT: tl.constexpr = CONFIG.low_k_format
    LOW_VALUE_FORM: tl.constexpr = CONFIG.low_value_form
    HADAMARD_SIZE: tl.constexpr = CONFIG.hadamard_size
    NORM: tl.constexpr = CONFIG.norm
    IS_CAUSAL: tl.constexpr = CONFIG.is_causal
    HAS_SEQ_INFO: tl.constexpr = seq_info_ptr is not None
    HAS_WINDOW: tl.constexpr = window is not None
    HAS_SOFTCAP: tl.constexpr = softcap is not None
    HAS_MASK: tl.constexpr = mask.ptr is not None
    HAS_MEAN: tl.constexpr = mean_ptr is not None
    SKIPS: tl.constexpr = skip_threshold is not None
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    EXPONENT: tl.constexpr = 8.0 if CONFIG.is_pv_fp8 else 0.0
    # Smoothing subtracts the same bias from all logits of a row. A plain softmax is invariant to that, so the bias is
    # added to the log of the denominator alone. A softcap is not, so it is added to the logits of smoothed keys.
    BIAS_IN_LSE: tl.constexpr = HAS_MEAN and not HAS_SOFTCAP
    BIAS_IN_LOGITS: tl.constexpr = HAS_MEAN and HAS_SOFTCAP
    # The model's own 16-bit dtype is kept if a side is unquantized (operand_formats.dequantized_dtype).
    IS_LOW_UNQUANTIZED: tl.constexpr = LOW_Q_FORMAT == "bf16" or LOW_K_FORMAT == "bf16"
    LOW_DTYPE: tl.constexpr = query.ptr.dtype.element_ty if IS_LOW_UNQUANTIZED else tl.bfloat16
    i_row, i_group, i_block = schedule(blocks, kv_rows, swizzle_group, GROUP, IS_CAUSAL)
    i_row = i_row.to(tl.int64)  # the kv head, counted over all batch rows
    i_b = i_row // KV_HEADS
    i_kv = i_row % KV_HEADS
    i_h = i_kv * GROUP + i_group

    q_start, k_start, visible_start, visible_end = load_positions(seq_info_ptr, i_b, q_offset, kv_offset, kv_len)
    q_end = q_start + q_len
    block_start = ((q_start >> M_SHIFT) + i_block) << M_SHIFT

    # The union range of the block's rows, and the unmasked range that all rows attend to.
    first = tl.maximum(block_start, q_start)
    last = tl.minimum(block_start + BLOCK_M, q_end) - 1
    start, end = visible_start, visible_end
    full_start, full_end = visible_start, visible_end
    if IS_CAUSAL:
        end = tl.minimum(end, last + 1)
        full_end = tl.minimum(full_end, first + 1)
    if HAS_WINDOW:
        reach = window - 1 if IS_CAUSAL else window
        start = tl.maximum(start, first - reach)
        full_start = tl.maximum(full_start, last - reach)
        if not IS_CAUSAL:
            end = tl.minimum(end, last + window + 1)
            full_end = tl.minimum(full_end, first + window + 1)
    if HAS_MASK:
        full_end = full_start

    q_pos = block_start + tl.arange(0, BLOCK_M)
    rows = q_pos - q_start
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, BLOCK_H)
    o_n = tl.arange(0, BLOCK_N)
    o_v = tl.arange(0, BLOCK_DV)
    aligned_start = (k_start >> TILE_SHIFT) << TILE_SHIFT
    tile_start = (block_start >> TILE_SHIFT) << TILE_SHIFT
    sink_end = sink_tiles * TILE
    band_start = tile_start - diagonal_tiles * TILE
    band_end = tile_start + (diagonal_tiles + 1) * TILE
    q_rows = head_rows(query, i_b, i_h)
    mask_base = mask.ptr
    if HAS_MASK:
        mask_base += i_b * mask.stride_b + i_h * mask.stride_h
    visibility = Visibility(
        visible_start, visible_end, window, mask_base, mask.stride_t, mask.stride_d, q_start, q_end, k_start
    )

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    q = load_in_range(q_rows, rows, 0, q_len, D, BLOCK_D)
    global_scale = 1.0
    if q_global_scale_ptr is not None:
        global_scale = tl.load(q_global_scale_ptr + i_b * Q_HEADS + i_h)
    m_row = (rows >= 0) & (rows < q_len)
    lse_rows = lse_ptr + (i_b * Q_HEADS + i_h) * q_len + rows
    bias = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MEAN:
        bias = smoothing_bias(q, mean_ptr + i_row * D, D)
    qk_bias = finite_or_zero(bias * logit_scale)
    if BIAS_IN_LSE:
        # Parked in the row's ``lse``: the loops have no register for it.
        tl.store(lse_rows, qk_bias * 0.6931471805599453, mask=m_row)
    if CONFIG.has_low and CONFIG.stage_queries:
        # Hopper's MMAs read loaded operands from shared memory, but computed ones from registers, and none are
        # free. So stage the queries in this CTA's rows of the output, which are not written yet.
        STAGED: tl.constexpr = k_low_ptr.dtype.element_ty
        staged = (out.ptr + i_b * out.stride_b + i_h * out.stride_h).to(tl.pointer_type(STAGED))
        # A row of the output has room for two 8-bit elements per channel, or one of 16 bits.
        PER_CHANNEL: tl.constexpr = 1 if LOW_FORM == "dequantized" else 2
        staged_row = rows.to(tl.int64) * (PER_CHANNEL * out.stride_t)
        m_staged = m_row[:, None] & (o_d < D)[None, :]
        IN_CHUNKS: tl.constexpr = LOW_FORM != "dequantized" and LOW_FORM != "e5m2"
        low_row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
        # For other forms with 256 channels, values live across the branch would spill in the loop over low tiles.
        has_low_tiles = True
        if IN_CHUNKS or BLOCK_D <= 128:
            has_low_tiles = tl.maximum(start, sink_end) < tl.minimum(end, band_start)
            if not IS_CAUSAL:
                has_low_tiles = has_low_tiles | (tl.maximum(tl.maximum(start, band_end), sink_end) < end)
        if has_low_tiles:
            if IN_CHUNKS:
                chunks = load_chunks(q_rows, rows, 0, q_len, D)
                chunks, low_row_scale = quantize_row_chunks(
                    chunks, LOW_FORM, LOW_Q_FORMAT, ROUNDING == "ceil", HADAMARD_SIZE, NORM
                )
                store_chunks(staged, staged_row, chunks, m_row, D)
            else:
                x = hadamard(q.to(tl.float32), HADAMARD_SIZE, NORM)
                q_low, q_low_scale, low_row_scale = prepare_queries(
                    x, global_scale, LOW_FORM, LOW_Q_FORMAT, LOW_SHARED, ROUNDING, LOW_DTYPE
                )
                tl.store(staged + (staged_row[:, None] + o_d[None, :]), q_low, mask=m_staged)

    # ---- high tiles: the sinks, then the band; all tiles if the recipe has one precision
    if HIGH_FORM == "raw":
        q_scale = q
        row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        x = hadamard(q.to(tl.float32), HADAMARD_SIZE, NORM)
        q, q_scale, row_scale = prepare_queries(x, global_scale, HIGH_FORM, HIGH_FORMAT, "block", ROUNDING, tl.bfloat16)
    row_scale *= logit_scale
    k_rows = Rows(key.ptr + (i_b * key.stride_b + i_kv * key.stride_h), key.stride_t, key.stride_d)
    v_rows = head_rows(value, i_b, i_kv)
    tile_row = i_row * (storage_len >> TILE_SHIFT)  # of this head, among all tiles of tile-padded storage
    if k_descale_ptr is not None:
        row_scale *= tl.load(k_descale_ptr + i_row)
    if CONFIG.has_low:
        a_first, a_last = _block_range(start, tl.minimum(end, sink_end), H_SHIFT)
        b_first, b_last = _block_range(
            tl.maximum(tl.maximum(start, band_start), sink_end), tl.minimum(end, band_end), H_SHIFT
        )
    else:
        a_first, a_last = _block_range(start, end, H_SHIFT)
        b_first, b_last = a_last, a_last
    count = a_last - a_first
    for t in tl.range(0, count + b_last - b_first, num_stages=CONFIG.tuning.high_stages):
        position = tl.where(t < count, a_first + t, b_first + t - count) * BLOCK_H
        entry = storage_entry(position, k_start, aligned_start, HIGH_FORM)
        if HIGH_FORM == "raw":
            k = load_raw(k_desc, k_rows, i_b, i_kv, entry, k_len, True, CONFIG.use_raw_tma, D, BLOCK_D, BLOCK_H)
            k_scale = k
        else:
            k, k_scale = load_keys(
                key.ptr, key.ptr, k_scale_ptr, i_row * k_len, entry, k_len, HIGH_FORM, HIGH_FORMAT, False, False,
                D, BLOCK_D, BLOCK_H,
            )  # fmt: skip
        s = score(q, q_scale, k, k_scale, HIGH_FORM, HIGH_FORMAT, HIGH_FORMAT)
        if HIGH_FORM == "raw" and BIAS_IN_LSE:
            s -= bias[:, None]
        s = logits(
            s, row_scale, qk_bias, softcap, q_pos, position + o_h, visibility,
            (position < full_start) | (position + BLOCK_H > full_end), IS_CAUSAL,
            BIAS_IN_LOGITS and HIGH_FORM != "raw",
        )  # fmt: skip
        entry = storage_entry(position, k_start, aligned_start, "raw")
        v = load_raw(v_desc, v_rows, i_b, i_kv, entry, kv_len, True, CONFIG.use_raw_tma, DV, BLOCK_DV, BLOCK_H)
        if HAS_SEQ_INFO:
            # Zero invisible values: they may be NaN, which a probability of 0 does not hide.
            is_visible = (position + o_h >= visible_start) & (position + o_h < visible_end)
            v = tl.where(is_visible[:, None], v, 0.0)
        acc, l_i, m_i = attend(acc, l_i, m_i, s, row_scale, v, True, "raw", CONFIG.is_pv_fp8)

    if CONFIG.has_low:
        if CONFIG.stage_queries:
            tl.debug_barrier()
            q_low = tl.load(staged + (staged_row[:, None] + o_d[None, :]), mask=m_staged, other=0.0)
            q_low_scale = q_low
        else:
            q = load_in_range(q_rows, rows, 0, q_len, D, BLOCK_D)
            x = hadamard(q.to(tl.float32), HADAMARD_SIZE, NORM)
            q_low, q_low_scale, low_row_scale = prepare_queries(
                x, global_scale, LOW_FORM, LOW_Q_FORMAT, LOW_SHARED, ROUNDING, LOW_DTYPE
            )
        low_row_scale *= logit_scale
        v_low_rows = v_rows
        if LOW_VALUE_FORM == "e4m3":
            v_low_rows = Rows(v_low_ptr, TILE, 1)
        elif LOW_VALUE_FORM == "dequantized":
            v_low_rows = Rows(v_low_ptr + i_row * v_low_len * DV, DV, 1)
        if CONFIG.k_low_descale == "head":
            low_row_scale *= tl.load(k_low_descale_ptr + i_row)

        if v_descale_ptr is not None:
            # Rescale the output to units of the E4M3 values; exact, because these are powers of two.
            acc *= (1.0 / tl.load(v_descale_ptr + i_row * DV + o_v, mask=o_v < DV, other=1.0))[None, :]

        # [c_first, c_last) is before the band, [d_first, d_last) after it; c_in..c_out and d_in..d_out are full.
        c_first, c_last = _block_range(tl.maximum(start, sink_end), tl.minimum(end, band_start), N_SHIFT)
        c_in, c_out = _full_range(c_first, c_last, full_start, full_end, N_SHIFT)
        if IS_CAUSAL:
            d_first, d_in, d_out, d_last = c_last, c_last, c_last, c_last
        else:
            d_first, d_last = _block_range(tl.maximum(tl.maximum(start, band_end), sink_end), end, N_SHIFT)
            d_in, d_out = _full_range(d_first, d_last, full_start, full_end, N_SHIFT)
        n_1 = c_in - c_first
        n_2 = n_1 + c_last - c_out
        n_3 = n_2 + d_in - d_first
        n_masked = n_3 + d_last - d_out
        n_full = c_out - c_in
        if SKIPS:
            # m_i is the largest logit in high tiles. Incomplete blocks skip no tile.
            first_of_block = q_pos & -_SKIP_BLOCK
            is_whole = (first_of_block >= q_start) & (first_of_block + _SKIP_BLOCK <= q_end)
            bound = tl.where(is_whole, m_i - skip_threshold, float("-inf"))
            is_kept = tl.full([BLOCK_M], 1, tl.int32)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tiles_examined = tl.zeros([BLOCK_M], tl.int32)
            tiles_kept = tl.zeros([BLOCK_M], tl.int32)

        # ---- low tiles: masked ones, then full ones
        for IS_FULL in tl.static_range(0, 2):
            steps = n_full + d_out - d_in if IS_FULL else n_masked
            tile = -1  # the tile of ``is_kept``
            for t in tl.range(0, steps, num_stages=CONFIG.tuning.num_stages if IS_FULL else 1):
                if IS_FULL:
                    block = tl.where(t < n_full, c_in + t, d_in + t - n_full)
                else:
                    block = tl.where(t < n_1, c_first + t, c_out + t - n_1)
                    block = tl.where(t < n_2, block, tl.where(t < n_3, d_first + t - n_2, d_out + t - n_3))
                position = block * BLOCK_N
                entry = storage_entry(position, k_start, aligned_start, LOW_FORM)
                k, k_scale = load_keys(
                    k_low_desc, k_low_ptr, k_low_scale_ptr, i_row * storage_len, entry, storage_len,
                    LOW_FORM, LOW_K_FORMAT, False, CONFIG.use_tma, D, BLOCK_D, BLOCK_N,
                )  # fmt: skip
                s = score(q_low, q_low_scale, k, k_scale, LOW_FORM, LOW_Q_FORMAT, LOW_K_FORMAT)
                tile_scale = low_row_scale
                if CONFIG.k_low_descale == "tile":
                    tile_scale *= tl.load(k_low_descale_ptr + tile_row + (entry >> TILE_SHIFT))
                # If a CTA has two blocks of 64 queries, each skips tiles independently.
                IS_SCALED: tl.constexpr = HAS_SOFTCAP or not IS_FULL or (SKIPS and BLOCK_M > _SKIP_BLOCK)
                if IS_SCALED:
                    s = logits(
                        s, tile_scale, qk_bias, softcap, q_pos, position + o_n, visibility, not IS_FULL, IS_CAUSAL,
                        BIAS_IN_LOGITS,
                    )  # fmt: skip
                if SKIPS:
                    i_tile = block >> (TILE_SHIFT - N_SHIFT)
                    if BLOCK_N == TILE:
                        row_max = tl.max(s, 1).to(tl.float32)
                        if not IS_SCALED:
                            row_max *= tile_scale
                    elif i_tile != tile:
                        # First block of a tile in this loop: score the whole tile for its row maxima.
                        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                        for i_sub in tl.range(0, TILE // BLOCK_N, num_stages=1):
                            block_position = i_tile * TILE + i_sub * BLOCK_N
                            k_block, k_block_scale = load_keys(
                                k_low_ptr, k_low_ptr, k_low_scale_ptr, i_row * storage_len,
                                storage_entry(block_position, k_start, aligned_start, LOW_FORM), storage_len,
                                LOW_FORM, LOW_K_FORMAT, True, False, D, BLOCK_D, BLOCK_N,
                            )  # fmt: skip
                            s_block = logits(
                                score(q_low, q_low_scale, k_block, k_block_scale, LOW_FORM, LOW_Q_FORMAT, LOW_K_FORMAT),
                                tile_scale, qk_bias, softcap, q_pos, block_position + o_n, visibility, True,
                                IS_CAUSAL, BIAS_IN_LOGITS,
                            )  # fmt: skip
                            row_max = tl.maximum(row_max, tl.max(s_block, 1))
                    if i_tile != tile:
                        # NaN keeps a tile.
                        is_kept = _any_of_block(1 - (row_max < bound).to(tl.int32), BLOCK_M)
                        if tile_counts_ptr is not None:
                            # A partly masked tile is counted in the masked loop.
                            is_examined = _any_of_block(1 - (row_max == float("-inf")).to(tl.int32), BLOCK_M)
                            if IS_FULL:
                                is_whole_tile = (i_tile * TILE >= full_start) & (i_tile * TILE + TILE <= full_end)
                                is_examined = tl.where(is_whole_tile, is_examined, 0)
                            tiles_examined += is_examined
                            tiles_kept += is_examined * is_kept
                        tile = i_tile
                    if BLOCK_M > _SKIP_BLOCK:
                        s = tl.where((is_kept != 0)[:, None], s, float("-inf"))
                entry = storage_entry(position, k_start, aligned_start, LOW_VALUE_FORM)
                v = load_values(
                    v_low_desc, v_low_rows, tile_row * DV, i_b, i_kv, entry, v_low_len, LOW_VALUE_FORM,
                    LOW_VALUE_FORM == "raw" and not IS_FULL, CONFIG.use_tma, CONFIG.use_raw_tma, DV, BLOCK_DV, BLOCK_N,
                )  # fmt: skip
                if HAS_SEQ_INFO and LOW_VALUE_FORM == "raw" and not IS_FULL:
                    is_visible = (position + o_n >= visible_start) & (position + o_n < visible_end)
                    v = tl.where(is_visible[:, None], v, 0.0)
                if not SKIPS or tl.max(is_kept, 0) != 0:
                    acc, l_i, m_i = attend(acc, l_i, m_i, s, tile_scale, v, IS_SCALED, LOW_VALUE_FORM, CONFIG.is_pv_fp8)
        if SKIPS and tile_counts_ptr is not None:
            counts = tile_counts_ptr + 2 * i_h
            is_first = ((q_pos & (_SKIP_BLOCK - 1)) == 0) & is_whole
            tl.atomic_add(
                counts, tl.sum(tl.where(is_first, tiles_examined - tiles_kept, 0), 0).to(tl.int64), sem="relaxed"
            )
            tl.atomic_add(counts + 1, tl.sum(tl.where(is_first, tiles_examined, 0), 0).to(tl.int64), sem="relaxed")

    if sinks_ptr is not None:
        # Sinks come last: a dominant sink logit would scale E4M3 probabilities down.
        sink = 1.4426950408889634 * tl.load(sinks_ptr + i_h).to(tl.float32)
        if BIAS_IN_LSE:
            tl.debug_barrier()
            qk_bias = tl.load(lse_rows, mask=m_row, other=0.0) * 1.4426950408889634
            sink -= qk_bias
        m_new = tl.maximum(m_i, sink)
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.math.exp2(sink - m_new + EXPONENT)
        acc *= alpha[:, None]
        m_i = m_new
    is_empty = l_i == 0.0
    acc *= (1.0 / tl.where(is_empty, 1.0, l_i))[:, None]
    if v_descale_ptr is not None:
        acc *= tl.load(v_descale_ptr + i_row * DV + o_v, mask=o_v < DV, other=0.0)[None, :]
    offset = rows.to(tl.int64)[:, None] * out.stride_t + o_v[None, :]
    result = narrow(acc, out.ptr.dtype.element_ty)
    tl.store(
        out.ptr + i_b * out.stride_b + i_h * out.stride_h + offset, result, mask=m_row[:, None] & (o_v < DV)[None, :]
    )
    lse = (m_i + tl.math.log2(l_i) - EXPONENT) * 0.6931471805599453
    lse = tl.where(is_empty, float("-inf"), lse)
    if BIAS_IN_LSE and sinks_ptr is not None:
        tl.store(lse_rows, lse + qk_bias * 0.6931471805599453, mask=m_row)
    elif BIAS_IN_LSE:
        # Add to the qk_bias there, which another thread may have stored. A load would cost registers in the loops.
        tl.debug_barrier()
        tl.atomic_add(lse_rows, lse, mask=m_row, sem="relaxed", scope="cta")
    else:
        tl.store(lse_rows, lse, mask=m_row)
