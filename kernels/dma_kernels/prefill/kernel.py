"""The prefill kernel in Triton: the whole rule in one kernel, nothing of size ``[q, k]`` in memory.

A program owns ``BLOCK_M`` query positions of one head and walks over blocks of key positions. Blocks are aligned to
positions, not to the first query, and their sizes divide the rule's tile, so that every block lies in one tile. Key
blocks are visited in three loops: the high ones (sinks and band), the low ones at an edge that needs a mask, and all
other low ones, where the time goes and no mask is computed.

What the kernel reads is described in :mod:`dma_kernels.prefill.operands`; :mod:`dma_kernels.prefill.host` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.queries import finite_or_zero, load_queries, prepare_queries, rotate_queries, smoothing_shift
from ..device.scores import (
    attend,
    load_keys,
    load_raw,
    load_values,
    logits,
    score,
    storage_entry,
)
from ..numerics.formats import TILE
from ..numerics.geometry import SKIP_BLOCK
from .parts import load_parts, quantize_row_parts, store_parts

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_SKIP_BLOCK = tl.constexpr(SKIP_BLOCK)


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


@triton.jit
def _schedule(blocks, kv_heads, section, GROUP: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return this program's kv head (of all batch rows), its query head in the group, and its block of queries.

    Programs come in sections of kv heads whose keys and values fit in the L2 cache together. In a section the rows
    with the most keys go first, so that the chip does not wait for them at the end.
    """
    pid = tl.program_id(0)
    first_head = (pid // (section * GROUP * blocks)) * section
    heads = tl.minimum(section, kv_heads - first_head) * GROUP
    inner = pid - first_head * GROUP * blocks
    i_head = inner % heads
    i_block = inner // heads
    return first_head + i_head // GROUP, i_head % GROUP, blocks - 1 - i_block if IS_CAUSAL else i_block


@triton.jit
def _any_of_block(x, BLOCK_M: tl.constexpr):
    """Return for each row the maximum of int32 ``[BLOCK_M]`` over its block of 64 query positions."""
    BLOCKS: tl.constexpr = BLOCK_M // _SKIP_BLOCK
    by_block = tl.max(tl.reshape(x, [BLOCKS, _SKIP_BLOCK]), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(by_block, [BLOCKS, _SKIP_BLOCK]), [BLOCK_M])


@triton.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "k_len", "v_len", "v_low_len", "storage_len", "blocks", "section",
        "kv_rows", "window", "diagonal_tiles", "sink_tiles",
    ],
)  # fmt: skip
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_low_ptr, v_low_ptr, k_scale_ptr, k_low_scale_ptr,
    k_factor_ptr, k_low_factor_ptr, value_factor_ptr, query_factor_ptr, mean_ptr,
    k_desc, v_desc, k_low_desc, v_low_desc,
    out_ptr, lse_ptr, sinks_ptr, tile_counts_ptr, mask_ptr, rows_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_ob, stride_oh, stride_ot,
    stride_mb, stride_mh, stride_mq, stride_mk,
    q_offset, kv_offset, q_len, kv_len, k_len, v_len, v_low_len, storage_len, blocks, section, kv_rows,
    window, diagonal_tiles, sink_tiles, softcap, logit_scale, skip_threshold, norm,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M_SHIFT: tl.constexpr, H_SHIFT: tl.constexpr, N_SHIFT: tl.constexpr,
    HIGH_STAGES: tl.constexpr, LOW_STAGES: tl.constexpr,
    HIGH_FORM: tl.constexpr, HIGH_FORMAT: tl.constexpr, HIGH_LAYOUT: tl.constexpr,
    HIGH_VALUE_LAYOUT: tl.constexpr,
    LOW_FORM: tl.constexpr, LOW_Q_FORMAT: tl.constexpr, LOW_K_FORMAT: tl.constexpr, LOW_LAYOUT: tl.constexpr,
    LOW_SHARED: tl.constexpr, LOW_VALUE_FORM: tl.constexpr, LOW_VALUE_LAYOUT: tl.constexpr,
    ROUNDING: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_LOW: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_MASK: tl.constexpr, SKIPS: tl.constexpr,
    COUNTS: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_QUERY_FACTOR: tl.constexpr, HAS_K_FACTOR: tl.constexpr, K_LOW_FACTOR: tl.constexpr,
    HAS_VALUE_FACTOR: tl.constexpr, IS_PV_FP8: tl.constexpr, STAGE_QUERIES: tl.constexpr,
    USE_TMA: tl.constexpr, USE_RAW_TMA: tl.constexpr,
):  # fmt: skip
    """Compute attention for a block of queries of a head; arguments as :mod:`dma_kernels.prefill.operands` names them.

    Constexprs beside those: ``BLOCK_H`` and ``BLOCK_N`` are the keys in a block of a high and of a low tile.
    ``K_LOW_FACTOR`` is ``none``, ``head`` or ``tile``.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    EXPONENT: tl.constexpr = 8.0 if IS_PV_FP8 else 0.0
    # A plain softmax does not see what smoothing takes from a row's scores: the log of the denominator gets it back. A
    # cap sees it: scores of raw keys have it, and all others get it back.
    IS_SHIFTED: tl.constexpr = HAS_MEAN and not HAS_SOFTCAP
    RESTORES_SHIFT: tl.constexpr = HAS_MEAN and HAS_SOFTCAP
    MASK_HIGH: tl.constexpr = HIGH_LAYOUT == "caller"
    MASK_LOW_VALUES: tl.constexpr = LOW_VALUE_LAYOUT == "caller"
    # A model's own 16 bits stay where a side is not quantised (operands.dequantized_dtype).
    IS_LOW_UNQUANTIZED: tl.constexpr = LOW_Q_FORMAT == "bf16" or LOW_K_FORMAT == "bf16"
    LOW_DTYPE: tl.constexpr = q_ptr.dtype.element_ty if IS_LOW_UNQUANTIZED else tl.bfloat16
    i_row, i_group, i_block = _schedule(blocks, kv_rows, section, GROUP, IS_CAUSAL)
    i_row = i_row.to(tl.int64)  # the kv head, counted over all batch rows
    i_b = i_row // KV_HEADS
    i_kv = i_row % KV_HEADS
    i_h = i_kv * GROUP + i_group

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
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, BLOCK_H)
    o_n = tl.arange(0, BLOCK_N)
    o_v = tl.arange(0, BLOCK_DV)
    aligned_start = (k_start >> _TILE_SHIFT) << _TILE_SHIFT
    tile_start = (block_start >> _TILE_SHIFT) << _TILE_SHIFT
    sink_end = sink_tiles * _TILE
    band_start = tile_start - diagonal_tiles * _TILE
    band_end = tile_start + (diagonal_tiles + 1) * _TILE
    q_base = q_ptr + i_b * stride_qb + i_h * stride_qh
    mask_base = mask_ptr
    if HAS_MASK:
        mask_base += i_b * stride_mb + i_h * stride_mh

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    q = load_queries(q_base, rows, stride_qt, stride_qd, q_len, D, BLOCK_D)
    head_scale = 1.0
    if HAS_QUERY_FACTOR:
        head_scale = tl.load(query_factor_ptr + i_b * Q_HEADS + i_h)
    m_row = (rows >= 0) & (rows < q_len)
    lse_rows = lse_ptr + (i_b * Q_HEADS + i_h) * q_len + rows
    shift = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MEAN:
        shift = smoothing_shift(q, mean_ptr + i_row * D, D)
    logit_shift = finite_or_zero(shift * logit_scale)
    if IS_SHIFTED:
        # It waits where the result will be: there is no register for it in the loops.
        tl.store(lse_rows, logit_shift * 0.6931471805599453, mask=m_row)
    if HAS_LOW and STAGE_QUERIES:
        # Hopper's matrix units take what was loaded from shared memory, and what was computed from registers, of which
        # there are none to spare. The output's rows are this program's own and hold nothing yet.
        STAGED: tl.constexpr = k_low_ptr.dtype.element_ty
        staged = (out_ptr + i_b * stride_ob + i_h * stride_oh).to(tl.pointer_type(STAGED))
        # A row of the output has room for two 8-bit elements a channel, or for one of 16 bits.
        PER_CHANNEL: tl.constexpr = 1 if LOW_FORM == "dequantized" else 2
        staged_row = rows.to(tl.int64) * (PER_CHANNEL * stride_ot)
        m_staged = m_row[:, None] & (o_d < D)[None, :]
        IN_PARTS: tl.constexpr = LOW_FORM != "dequantized" and LOW_FORM != "e5m2"
        low_factor = tl.full([BLOCK_M], 1.0, tl.float32)
        # Of 256 channels and other forms what is carried past the branch would be spilled in the loop over low tiles.
        has_low_tiles = True
        if IN_PARTS or BLOCK_D <= 128:
            has_low_tiles = tl.maximum(start, sink_end) < tl.minimum(end, band_start)
            if not IS_CAUSAL:
                has_low_tiles = has_low_tiles | (tl.maximum(tl.maximum(start, band_end), sink_end) < end)
        if has_low_tiles:
            if IN_PARTS:
                parts = load_parts(q_base, rows, 0, q_len, stride_qt, stride_qd, D)
                parts, low_factor = quantize_row_parts(
                    parts, LOW_FORM, LOW_Q_FORMAT, ROUNDING == "ceil", ROTATE, HADAMARD_SIZE, norm
                )
                store_parts(staged, staged_row, parts, m_row, D)
            else:
                x = rotate_queries(q, norm, HADAMARD_SIZE) if ROTATE else q.to(tl.float32)
                q_low, q_low_scale, low_factor = prepare_queries(
                    x, head_scale, LOW_FORM, LOW_Q_FORMAT, LOW_SHARED, ROUNDING, LOW_DTYPE
                )
                tl.store(staged + (staged_row[:, None] + o_d[None, :]), q_low, mask=m_staged)

    # ---- high tiles: the sinks, then the band; everything, where the recipe has one precision
    if HIGH_FORM == "raw":
        q_scale = q
        factor = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        x = rotate_queries(q, norm, HADAMARD_SIZE) if ROTATE else q.to(tl.float32)
        q, q_scale, factor = prepare_queries(x, head_scale, HIGH_FORM, HIGH_FORMAT, "block", ROUNDING, tl.bfloat16)
    factor *= logit_scale
    k_base = k_ptr
    if HIGH_FORM == "raw":
        k_base += i_b * stride_kb + i_kv * stride_kh
    v_base = v_ptr + i_b * stride_vb + i_kv * stride_vh
    tile_row = i_row * (storage_len >> _TILE_SHIFT)  # of this head, counted over all tiles of aligned storage
    if HAS_K_FACTOR:
        factor *= tl.load(k_factor_ptr + i_row)
    if HAS_LOW:
        a_first, a_last = _block_range(start, tl.minimum(end, sink_end), H_SHIFT)
        b_first, b_last = _block_range(
            tl.maximum(tl.maximum(start, band_start), sink_end), tl.minimum(end, band_end), H_SHIFT
        )
    else:
        a_first, a_last = _block_range(start, end, H_SHIFT)
        b_first, b_last = a_last, a_last
    count = a_last - a_first
    for t in tl.range(0, count + b_last - b_first, num_stages=HIGH_STAGES):
        position = tl.where(t < count, a_first + t, b_first + t - count) * BLOCK_H
        entry = storage_entry(position, k_start, aligned_start, HIGH_LAYOUT)
        if HIGH_FORM == "raw":
            k = load_raw(
                k_desc, k_base, i_b, i_kv, entry, stride_kt, stride_kd, k_len, MASK_HIGH, USE_RAW_TMA,
                D, BLOCK_D, BLOCK_H,
            )  # fmt: skip
            k_scale = k
        else:
            k, k_scale = load_keys(
                k_base, k_base, k_scale_ptr, i_row * k_len, entry, k_len, HIGH_FORM, HIGH_FORMAT, MASK_HIGH, False,
                D, BLOCK_D, BLOCK_H,
            )  # fmt: skip
        s = score(q, q_scale, k, k_scale, HIGH_FORM, HIGH_FORMAT, HIGH_FORMAT)
        if HIGH_FORM == "raw" and IS_SHIFTED:
            s -= shift[:, None]
        s = logits(
            s, factor, logit_shift, softcap, q_pos, position + o_h, visible_start, visible_end, window,
            mask_base, stride_mq, stride_mk, q_start, q_end, k_start,
            (position < inner_start) | (position + BLOCK_H > inner_end), IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK,
            RESTORES_SHIFT and HIGH_FORM != "raw",
        )  # fmt: skip
        entry = storage_entry(position, k_start, aligned_start, HIGH_VALUE_LAYOUT)
        v = load_raw(
            v_desc, v_base, i_b, i_kv, entry, stride_vt, stride_vd, v_len, True, USE_RAW_TMA, DV, BLOCK_DV, BLOCK_H
        )
        if HAS_ROWS:
            # What is hidden may be anything, and no probability of 0 makes up for a NaN.
            is_shown = (position + o_h >= visible_start) & (position + o_h < visible_end)
            v = tl.where(is_shown[:, None], v, 0.0)
        acc, l_i, m_i = attend(acc, l_i, m_i, s, factor, v, True, "raw", IS_PV_FP8)

    if HAS_LOW:
        if STAGE_QUERIES:
            tl.debug_barrier()
            q_low = tl.load(staged + (staged_row[:, None] + o_d[None, :]), mask=m_staged, other=0.0)
            q_low_scale = q_low
        else:
            q = load_queries(q_base, rows, stride_qt, stride_qd, q_len, D, BLOCK_D)
            x = rotate_queries(q, norm, HADAMARD_SIZE) if ROTATE else q.to(tl.float32)
            q_low, q_low_scale, low_factor = prepare_queries(
                x, head_scale, LOW_FORM, LOW_Q_FORMAT, LOW_SHARED, ROUNDING, LOW_DTYPE
            )
        low_factor *= logit_scale
        v_low_base = v_low_ptr
        if LOW_VALUE_FORM == "raw":
            v_low_base = v_base
        elif LOW_VALUE_FORM == "dequantized":
            v_low_base += i_row * v_low_len * DV
        if K_LOW_FACTOR == "head":
            low_factor *= tl.load(k_low_factor_ptr + i_row)

        if HAS_VALUE_FACTOR:
            # From here on the output counts in units of the E4M3 values: powers of two, so this is exact.
            acc *= (1.0 / tl.load(value_factor_ptr + i_row * DV + o_v, mask=o_v < DV, other=1.0))[None, :]

        # [c_first, c_last) before the band and [d_first, d_last) behind it; what every row sees whole is c_in..c_out
        # and d_in..d_out.
        c_first, c_last = _block_range(tl.maximum(start, sink_end), tl.minimum(end, band_start), N_SHIFT)
        c_in, c_out = _inner_range(c_first, c_last, inner_start, inner_end, N_SHIFT)
        if IS_CAUSAL:
            d_first, d_in, d_out, d_last = c_last, c_last, c_last, c_last
        else:
            d_first, d_last = _block_range(tl.maximum(tl.maximum(start, band_end), sink_end), end, N_SHIFT)
            d_in, d_out = _inner_range(d_first, d_last, inner_start, inner_end, N_SHIFT)
        n_1 = c_in - c_first
        n_2 = n_1 + c_last - c_out
        n_3 = n_2 + d_in - d_first
        n_edge = n_3 + d_last - d_out
        n_inner = c_out - c_in
        if SKIPS:
            # m_i is the largest logit in high tiles. Blocks of which the call holds only a part keep every tile.
            first_of_block = q_pos & -_SKIP_BLOCK
            is_whole = (first_of_block >= q_start) & (first_of_block + _SKIP_BLOCK <= q_end)
            bound = tl.where(is_whole, m_i - skip_threshold, float("-inf"))
            is_kept = tl.full([BLOCK_M], 1, tl.int32)
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tiles_seen = tl.zeros([BLOCK_M], tl.int32)
            tiles_kept = tl.zeros([BLOCK_M], tl.int32)

        # ---- low tiles: those at an edge, then the others
        for IS_INNER in tl.static_range(0, 2):
            steps = n_inner + d_out - d_in if IS_INNER else n_edge
            tile = -1  # the tile that ``is_kept`` is about
            for t in tl.range(0, steps, num_stages=LOW_STAGES if IS_INNER else 1):
                if IS_INNER:
                    block = tl.where(t < n_inner, c_in + t, d_in + t - n_inner)
                else:
                    block = tl.where(t < n_1, c_first + t, c_out + t - n_1)
                    block = tl.where(t < n_2, block, tl.where(t < n_3, d_first + t - n_2, d_out + t - n_3))
                position = block * BLOCK_N
                entry = storage_entry(position, k_start, aligned_start, LOW_LAYOUT)
                k, k_scale = load_keys(
                    k_low_desc, k_low_ptr, k_low_scale_ptr, i_row * storage_len, entry, storage_len,
                    LOW_FORM, LOW_K_FORMAT, False, USE_TMA, D, BLOCK_D, BLOCK_N,
                )  # fmt: skip
                s = score(q_low, q_low_scale, k, k_scale, LOW_FORM, LOW_Q_FORMAT, LOW_K_FORMAT)
                block_factor = low_factor
                if K_LOW_FACTOR == "tile":
                    block_factor *= tl.load(k_low_factor_ptr + tile_row + (entry >> _TILE_SHIFT))
                # Where one program has two blocks of 64 queries, these skip tiles each by itself.
                IS_SCALED: tl.constexpr = HAS_SOFTCAP or not IS_INNER or (SKIPS and BLOCK_M > _SKIP_BLOCK)
                if IS_SCALED:
                    s = logits(
                        s, block_factor, logit_shift, softcap, q_pos, position + o_n, visible_start, visible_end,
                        window, mask_base, stride_mq, stride_mk, q_start, q_end, k_start,
                        not IS_INNER, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK, RESTORES_SHIFT,
                    )  # fmt: skip
                if SKIPS:
                    i_tile = block >> (_TILE_SHIFT - N_SHIFT)
                    if BLOCK_N == _TILE:
                        row_max = tl.max(s, 1).to(tl.float32)
                        if not IS_SCALED:
                            row_max *= block_factor
                    elif i_tile != tile:
                        # The first block of its tile in this loop: all of the tile is scored, for its row maxima.
                        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                        for part in tl.range(0, _TILE // BLOCK_N, num_stages=1):
                            part_position = i_tile * _TILE + part * BLOCK_N
                            k_part, k_part_scale = load_keys(
                                k_low_ptr, k_low_ptr, k_low_scale_ptr, i_row * storage_len,
                                storage_entry(part_position, k_start, aligned_start, LOW_LAYOUT), storage_len,
                                LOW_FORM, LOW_K_FORMAT, True, False, D, BLOCK_D, BLOCK_N,
                            )  # fmt: skip
                            part_s = logits(
                                score(q_low, q_low_scale, k_part, k_part_scale, LOW_FORM, LOW_Q_FORMAT, LOW_K_FORMAT),
                                block_factor, logit_shift, softcap, q_pos, part_position + o_n, visible_start,
                                visible_end, window, mask_base, stride_mq, stride_mk, q_start, q_end, k_start,
                                True, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP, HAS_MASK, RESTORES_SHIFT,
                            )  # fmt: skip
                            row_max = tl.maximum(row_max, tl.max(part_s, 1))
                    if i_tile != tile:
                        # NaN keeps a tile.
                        is_kept = _any_of_block(1 - (row_max < bound).to(tl.int32), BLOCK_M)
                        if COUNTS:
                            # A tile that only in part is at an edge is counted there.
                            is_seen = _any_of_block(1 - (row_max == float("-inf")).to(tl.int32), BLOCK_M)
                            if IS_INNER:
                                is_whole_tile = (i_tile * _TILE >= inner_start) & (i_tile * _TILE + _TILE <= inner_end)
                                is_seen = tl.where(is_whole_tile, is_seen, 0)
                            tiles_seen += is_seen
                            tiles_kept += is_seen * is_kept
                        tile = i_tile
                    if BLOCK_M > _SKIP_BLOCK:
                        s = tl.where((is_kept != 0)[:, None], s, float("-inf"))
                entry = storage_entry(position, k_start, aligned_start, LOW_VALUE_LAYOUT)
                v = load_values(
                    v_low_desc, v_low_base, tile_row * DV, i_b, i_kv, entry, v_low_len, stride_vt, stride_vd,
                    LOW_VALUE_FORM, MASK_LOW_VALUES and not IS_INNER, USE_TMA, USE_RAW_TMA, DV, BLOCK_DV, BLOCK_N,
                )  # fmt: skip
                if HAS_ROWS and LOW_VALUE_FORM == "raw" and not IS_INNER:
                    is_shown = (position + o_n >= visible_start) & (position + o_n < visible_end)
                    v = tl.where(is_shown[:, None], v, 0.0)
                if not SKIPS or tl.max(is_kept, 0) != 0:
                    acc, l_i, m_i = attend(acc, l_i, m_i, s, block_factor, v, IS_SCALED, LOW_VALUE_FORM, IS_PV_FP8)
        if SKIPS and COUNTS:
            counts = tile_counts_ptr + 2 * i_h
            is_first = ((q_pos & (_SKIP_BLOCK - 1)) == 0) & is_whole
            tl.atomic_add(counts, tl.sum(tl.where(is_first, tiles_seen - tiles_kept, 0), 0).to(tl.int64), sem="relaxed")
            tl.atomic_add(counts + 1, tl.sum(tl.where(is_first, tiles_seen, 0), 0).to(tl.int64), sem="relaxed")

    if HAS_SINKS:
        # Last: a sink logit that dominates would scale E4M3 probabilities down.
        sink = 1.4426950408889634 * tl.load(sinks_ptr + i_h).to(tl.float32)
        if IS_SHIFTED:
            tl.debug_barrier()
            logit_shift = tl.load(lse_rows, mask=m_row, other=0.0) * 1.4426950408889634
            sink -= logit_shift
        m_new = tl.maximum(m_i, sink)
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.math.exp2(sink - m_new + EXPONENT)
        acc *= alpha[:, None]
        m_i = m_new
    is_empty = l_i == 0.0
    acc *= (1.0 / tl.where(is_empty, 1.0, l_i))[:, None]
    if HAS_VALUE_FACTOR:
        acc *= tl.load(value_factor_ptr + i_row * DV + o_v, mask=o_v < DV, other=0.0)[None, :]
    offset = rows.to(tl.int64)[:, None] * stride_ot + o_v[None, :]
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_b * stride_ob + i_h * stride_oh + offset, out, mask=m_row[:, None] & (o_v < DV)[None, :])
    lse = (m_i + tl.math.log2(l_i) - EXPONENT) * 0.6931471805599453
    lse = tl.where(is_empty, float("-inf"), lse)
    if IS_SHIFTED and HAS_SINKS:
        tl.store(lse_rows, lse + logit_shift * 0.6931471805599453, mask=m_row)
    elif IS_SHIFTED:
        # To what waits there, stored by any thread of the program. A load would cost registers in the loops.
        tl.debug_barrier()
        tl.atomic_add(lse_rows, lse, mask=m_row, sem="relaxed", scope="cta")
    else:
        tl.store(lse_rows, lse, mask=m_row)
