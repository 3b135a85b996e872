"""The Triton kernels of a decode step: partial results of high and of low tiles, and their combination.

Every (batch row, kv head) is split over several programs, which share one list of tiles: first the high ones, read from
the raw keys of the sinks and the tail, then the low ones, read from the codes of the body. A high tile counts as
several low ones, as it has more bytes, so that all programs end together; what a program leaves behind is a normalised
output and the logarithm of its denominator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import dot, hadamard
from ..device.queries import finite_or_zero, rotate_queries, smoothing_shift
from ..numerics.formats import TILE
from .decode_tiles import (
    add_low_values,
    cap,
    logits,
    low_scores,
    prepare_queries,
    rounded_rows,
)

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _softmax_step(s, l_i, m_i, EXPONENT: tl.constexpr):
    """Take base-2 logits ``[ROWS, COLUMNS]`` into the softmax.

    Returns:
        Weights, times ``2 ** EXPONENT``; the factor of what was summed before; the sums, of each row apart, so that
        they are reduced once at the end; and the maximum.
    """
    m_new = tl.maximum(m_i, tl.max(s, 0))
    p = tl.math.exp2(s + (EXPONENT - m_new)[None, :])
    alpha = tl.math.exp2(m_i - m_new)
    return p, alpha, l_i * alpha[None, :] + p, m_new


@triton.jit
def _high_tiles(
    q, mean_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr,
    i_head, first, last, length, q_pos, sinks, band_first, visible_tile, window, softcap, logit_scale, norm,
    diagonal_tiles, sink_tiles, ring_tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, FORMAT: tl.constexpr, ROUNDING: tl.constexpr,
    EXPONENT: tl.constexpr, HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr,
    HADAMARD_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    STEP: tl.constexpr, NUM_STAGES: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the high tiles ``first..last`` of a list: ``sinks`` sinks from ``visible_tile`` on, then the band.

    Returns:
        The weighted sum of values ``[BLOCK_DV, COLUMNS]``, the sum of the weights and the maximum ``[COLUMNS]``.
    """
    COLUMNS: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    STEPS: tl.constexpr = _TILE // STEP
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_DV)
    o_t = tl.arange(0, STEP)
    # Logits are as those of low tiles: without q . mean, but for those of a cap, which sees it.
    IS_RAW: tl.constexpr = FORMAT == "bf16"
    ADDS_SHIFT: tl.constexpr = HAS_MEAN and HAS_SOFTCAP and not IS_RAW
    TAKES_SHIFT: tl.constexpr = HAS_MEAN and not HAS_SOFTCAP and IS_RAW
    if ADDS_SHIFT or TAKES_SHIFT:
        shift = smoothing_shift(q, mean_ptr, D)
    if IS_RAW:
        # In exact arithmetic (q H) . ((k - mean) H) is q . k - q . mean.
        queries = tl.trans(q)
    else:
        if HAS_MEAN:
            mean = tl.load(mean_ptr + o_d, mask=o_d < D, other=0.0)
        x = q.to(tl.float32)
        if ROTATE:
            x = rotate_queries(q, norm, HADAMARD_SIZE, IS_INTERPRETED)
        queries = tl.trans(rounded_rows(x, FORMAT, "block", ROUNDING, IS_INTERPRETED).to(DTYPE))
    q_tile = q_pos >> _TILE_SHIFT
    m_i = tl.full([COLUMNS], -1.0e30, tl.float32)
    l_i = tl.zeros([STEP, COLUMNS], tl.float32)
    acc = tl.zeros([BLOCK_DV, COLUMNS], tl.float32)
    for step in tl.range(first * STEPS, last * STEPS, num_stages=NUM_STAGES):
        index = step // STEPS
        inside = (step - index * STEPS) * STEP
        tile = tl.where(index < sinks, visible_tile + index, band_first + index - sinks)
        entry = i_head * (ring_tiles * _TILE) + (tile % ring_tiles) * _TILE + inside
        k_base = key_tail_ptr
        v_base = value_tail_ptr
        if tile < sink_tiles:
            entry = i_head * (sink_tiles * _TILE) + tile * _TILE + inside
            k_base = key_sink_ptr
            v_base = value_sink_ptr
        k_pos = tile * _TILE + inside + o_t
        m_t = (k_pos < length)[:, None]
        k = tl.load(k_base + (entry + o_t)[:, None] * D + o_d[None, :], mask=m_t & (o_d < D)[None, :], other=0.0)
        if IS_RAW:
            s = dot(k, queries, IS_INTERPRETED)
        else:
            y = k.to(tl.float32)
            if HAS_MEAN:
                y = tl.where(m_t, y - mean[None, :], 0.0)
            if ROTATE:
                y = hadamard(y, STEP, HADAMARD_SIZE, BLOCK_D, norm)
            s = dot(rounded_rows(y, FORMAT, "block", ROUNDING, IS_INTERPRETED).to(DTYPE), queries, IS_INTERPRETED)
        if TAKES_SHIFT:
            s -= shift[None, :]
        if ADDS_SHIFT:
            s += shift[None, :]
        s = s * logit_scale
        if HAS_SOFTCAP:
            s = cap(s, softcap)
        is_high = (tile >= q_tile - diagonal_tiles) | (tile < sink_tiles)
        seen = is_high[None, :] & (k_pos[:, None] <= q_pos[None, :])
        if HAS_WINDOW:
            seen = seen & (k_pos[:, None] > (q_pos - window)[None, :])
        p, alpha, l_i, m_i = _softmax_step(tl.where(seen, s, float("-inf")), l_i, m_i, EXPONENT)
        v = tl.load(v_base + (entry + o_t)[:, None] * DV + o_v[None, :], mask=m_t & (o_v < DV)[None, :], other=0.0)
        acc = acc * alpha[None, :] + dot(tl.trans(v), p.to(q.dtype), IS_INTERPRETED)
    return acc, tl.sum(l_i, 0), m_i


@triton.jit
def _low_tiles(
    acc, total, m_i, q, mean_ptr, key_ptr, key_scale_ptr, key_factor_ptr,
    value_ptr, value_scale_ptr, value_factor_ptr,
    i_head, first, last, q_pos, window, softcap, logit_scale, norm, diagonal_tiles, slots,
    D: tl.constexpr, BLOCK_DV: tl.constexpr, KEY_FORM: tl.constexpr, QUERY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr,
    FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr, PV: tl.constexpr, EXPONENT: tl.constexpr,
    KEY_STORED: tl.constexpr, KEY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_STORED: tl.constexpr,
    HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    STEP: tl.constexpr, NUM_STAGES: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the low tiles ``first..last``, behind what :func:`_high_tiles` returned; returns the same."""
    COLUMNS: tl.constexpr = q.shape[0]
    STEPS: tl.constexpr = _TILE // STEP
    IN_HALVES: tl.constexpr = VALUE_FORM == "fp4"
    ROWS: tl.constexpr = STEP // 2 if IN_HALVES else STEP
    o_t = tl.arange(0, ROWS)
    x = q.to(tl.float32)
    if ROTATE:
        x = rotate_queries(q, norm, HADAMARD_SIZE, IS_INTERPRETED)
    queries, more_queries, factor = prepare_queries(
        x, QUERY_FORM, KEY_FORM, FORMAT, SHARED, ROUNDING, WIDTH, DTYPE, IS_INTERPRETED
    )
    factor *= logit_scale
    ADDS_SHIFT: tl.constexpr = HAS_MEAN and HAS_SOFTCAP
    shift = factor
    if ADDS_SHIFT:
        shift = smoothing_shift(q, mean_ptr, D) * logit_scale
    low_end = (q_pos >> _TILE_SHIFT) - diagonal_tiles
    body = i_head * slots
    m_before = m_i
    l_i = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(first * STEPS, last * STEPS, num_stages=NUM_STAGES):
        tile = step // STEPS
        slot = body + tile
        if HAS_WINDOW:
            slot = body + tile % slots
        rows = (step - tile * STEPS) * STEP + o_t
        s, worth = low_scores(
            queries, more_queries, key_ptr, key_scale_ptr, key_factor_ptr, slot, rows,
            KEY_FORM, QUERY_FORM, KEY_STORED, KEY_BLOCK, WIDTH, DTYPE, IS_INTERPRETED,
        )  # fmt: skip
        s = logits(
            s, factor * worth, shift, softcap, tile, tile * _TILE + rows, q_pos, low_end, window,
            HAS_SOFTCAP, HAS_WINDOW, HAS_ROWS, ADDS_SHIFT,
        )  # fmt: skip
        if IN_HALVES:
            rest = rows + ROWS
            s_rest, _ = low_scores(
                queries, more_queries, key_ptr, key_scale_ptr, key_factor_ptr, slot, rest,
                KEY_FORM, QUERY_FORM, KEY_STORED, KEY_BLOCK, WIDTH, DTYPE, IS_INTERPRETED,
            )  # fmt: skip
            s_rest = logits(
                s_rest, factor * worth, shift, softcap, tile, tile * _TILE + rest, q_pos, low_end, window,
                HAS_SOFTCAP, HAS_WINDOW, HAS_ROWS, ADDS_SHIFT,
            )  # fmt: skip
            m_new = tl.maximum(m_i, tl.max(tl.maximum(s, s_rest), 0))
            p = tl.math.exp2(s + (EXPONENT - m_new)[None, :])
            p_rest = tl.math.exp2(s_rest + (EXPONENT - m_new)[None, :])
            alpha = tl.math.exp2(m_i - m_new)
            l_i = l_i * alpha[None, :] + (p + p_rest)
            m_i = m_new
        else:
            p, alpha, l_i, m_i = _softmax_step(s, l_i, m_i, EXPONENT)
            p_rest = p
        acc = add_low_values(
            acc, p, p_rest, alpha, value_ptr, value_scale_ptr, value_factor_ptr, slot, rows,
            VALUE_FORM, PV, VALUE_STORED, BLOCK_DV, q.dtype, IS_INTERPRETED,
        )  # fmt: skip
    return acc, total * tl.math.exp2(m_before - m_i) + tl.sum(l_i, 0), m_i


@triton.jit
def _store_partial(
    out_ptr, lse_ptr, acc, total, m_i, rows, i_split, splits,
    EXPONENT: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store a program's normalised output ``[rows, splits, DV]`` and base-2 logarithms ``[rows, splits]``."""
    o_v = tl.arange(0, BLOCK_DV)
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[None, :]
    entry = rows * splits + i_split
    tl.store(out_ptr + entry[None, :] * DV + o_v[:, None], acc, mask=(o_v < DV)[:, None])
    tl.store(lse_ptr + entry, tl.where(is_empty, float("-inf"), m_i + tl.math.log2(total) - EXPONENT))


@triton.jit(
    do_not_specialize=[
        "q_len", "new_len", "slots", "ring_tiles", "window", "diagonal_tiles", "sink_tiles", "high_weight"
    ]
)  # fmt: skip
def decode_kernel(
    q_ptr, key_ptr, key_scale_ptr, key_factor_ptr, value_ptr, value_scale_ptr, value_factor_ptr,
    key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, mean_ptr, lengths_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    q_len, new_len, slots, ring_tiles, window, softcap, logit_scale, norm, diagonal_tiles, sink_tiles, high_weight,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    KEY_FORM: tl.constexpr, QUERY_FORM: tl.constexpr, VALUE_FORM: tl.constexpr, PV: tl.constexpr,
    KEY_STORED: tl.constexpr, KEY_BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_STORED: tl.constexpr,
    LOW_FORMAT: tl.constexpr, HIGH_FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr,
    HAS_MEAN: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    LOW_DTYPE: tl.constexpr, HIGH_DTYPE: tl.constexpr,
    STEP: tl.constexpr, HIGH_STEP: tl.constexpr, NUM_STAGES: tl.constexpr, HIGH_STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Answer ``BLOCK_N`` columns of a kv head over a share of its tiles; grid ``(splits, B * Hkv, column blocks)``.

    The last ``new_len`` keys are stored, but not counted in ``lengths`` yet.
    """
    # Of the factor of the weights: E4M3 and fp16 have not the range of fp32.
    EXPONENT: tl.constexpr = 8.0 if PV != "16bit" else 14.0 if VALUE_FORM == "fp4" else 0.0
    i_split = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    splits = tl.num_programs(0)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    o_d = tl.arange(0, BLOCK_D)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = i_head * (tl.num_programs(2) * BLOCK_N) + column
    i_t = column // GROUP
    offset = i_b * stride_qb + (i_kv * GROUP + column % GROUP) * stride_qh + i_t.to(tl.int64) * stride_qt
    m_q = (i_t < q_len)[:, None] & (o_d < D)[None, :]
    q = tl.load(q_ptr + offset[:, None] + o_d[None, :] * stride_qd, mask=m_q, other=0.0)
    length = tl.load(lengths_ptr + i_b) + new_len
    first_pos = length - q_len
    q_pos = first_pos + i_t
    visible_tile = 0
    if HAS_WINDOW:
        visible_tile = tl.maximum(first_pos - window + 1, 0) >> _TILE_SHIFT
    # ---- the program's share of the tiles
    band_first = tl.maximum((first_pos >> _TILE_SHIFT) - diagonal_tiles, visible_tile)
    last_tile = (length - 1) >> _TILE_SHIFT
    sinks = tl.maximum(tl.minimum(sink_tiles, band_first) - visible_tile, 0)
    high_count = sinks + tl.maximum(last_tile + 1 - band_first, 0)
    low_first = tl.maximum(visible_tile, sink_tiles)
    low_count = tl.maximum(last_tile - diagonal_tiles - low_first, 0)
    share = tl.cdiv(high_count * high_weight + low_count, splits)
    start = i_split * share
    high_start = tl.minimum(tl.cdiv(start, high_weight), high_count)
    high_end = tl.minimum(tl.cdiv(start + share, high_weight), high_count)
    start -= high_count * high_weight
    low_start = tl.minimum(tl.maximum(start, 0), low_count)
    low_end = tl.minimum(tl.maximum(start + share, 0), low_count)

    m_i = tl.full([BLOCK_N], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_N], tl.float32)
    if high_start < high_end:
        acc, total, m_i = _high_tiles(
            q, mean_ptr + i_head * D, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr,
            i_head, high_start, high_end, length, q_pos, sinks, band_first, visible_tile, window, softcap, logit_scale,
            norm, diagonal_tiles, sink_tiles, ring_tiles,
            D, DV, BLOCK_DV, HIGH_FORMAT, ROUNDING, EXPONENT, HAS_MEAN, ROTATE, HADAMARD_SIZE, HAS_WINDOW,
            HAS_SOFTCAP, HIGH_DTYPE, HIGH_STEP, HIGH_STAGES, IS_INTERPRETED,
        )  # fmt: skip
    if low_start < low_end:
        acc, total, m_i = _low_tiles(
            acc, total, m_i, q, mean_ptr + i_head * D, key_ptr, key_scale_ptr, key_factor_ptr,
            value_ptr, value_scale_ptr, value_factor_ptr,
            i_head, low_first + low_start, low_first + low_end, q_pos, window, softcap, logit_scale, norm,
            diagonal_tiles, slots,
            D, BLOCK_DV, KEY_FORM, QUERY_FORM, VALUE_FORM, LOW_FORMAT, SHARED, ROUNDING, PV, EXPONENT, KEY_STORED,
            KEY_BLOCK, WIDTH, VALUE_STORED, HAS_MEAN, ROTATE, HADAMARD_SIZE, HAS_ROWS, HAS_WINDOW, HAS_SOFTCAP,
            LOW_DTYPE, STEP, NUM_STAGES, IS_INTERPRETED,
        )  # fmt: skip
    _store_partial(out_ptr, lse_ptr, acc, total, m_i, rows, i_split, splits, EXPONENT, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["splits", "q_len", "new_len", "rows"])
def combine_kernel(
    partial_ptr, partial_lse_ptr, q_ptr, mean_ptr, sinks_ptr, lengths_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_ob, stride_oh, stride_ot,
    splits, q_len, new_len, rows, logit_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SHIFTED: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one query of one head; its sink logit takes part here.

    It counts the ``new_len`` keys in ``lengths``, which nothing of the step reads any more.
    Where ``IS_SHIFTED``, partial results are of logits that lack what smoothing took, ``q . mean``.
    """
    i_head = tl.program_id(0).to(tl.int64)  # batch row and kv head
    i_n = tl.program_id(1)
    i_h = (i_head % KV_HEADS) * GROUP + i_n % GROUP
    i_b = i_head // KV_HEADS
    i_t = i_n // GROUP
    o_s = tl.arange(0, BLOCK_S)
    o_v = tl.arange(0, BLOCK_DV)
    m_v = o_v < DV
    base = (i_head * rows + i_n) * splits
    if new_len > 0 and i_n == 0 and i_head % KV_HEADS == 0:
        tl.store(lengths_ptr + i_b, tl.load(lengths_ptr + i_b) + new_len)
    shift = 0.0
    if IS_SHIFTED:
        o_d = tl.arange(0, BLOCK_D)
        query = q_ptr + i_b * stride_qb + i_h * stride_qh + i_t * stride_qt + o_d * stride_qd
        q = tl.load(query, mask=o_d < D, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + i_head * D + o_d, mask=o_d < D, other=0.0)
        shift = finite_or_zero(tl.sum(q * mean, 0) * logit_scale)
    if HAS_SINKS:
        m_i = 1.4426950408889634 * tl.load(sinks_ptr + i_h).to(tl.float32) - shift
        l_i = 1.0
    else:
        m_i = -1.0e30
        l_i = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, splits, BLOCK_S):
        entry = base + start + o_s
        m_s = start + o_s < splits
        lse = tl.load(partial_lse_ptr + entry, mask=m_s, other=float("-inf"))
        part = tl.load(partial_ptr + entry[:, None] * DV + o_v[None, :], mask=m_s[:, None] & m_v[None, :], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        weight = tl.math.exp2(lse - m_new)
        alpha = tl.math.exp2(m_i - m_new)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    is_empty = l_i == 0.0
    out = acc / tl.where(is_empty, 1.0, l_i)
    offset = i_b * stride_ob + i_h * stride_oh + i_t * stride_ot
    tl.store(out_ptr + offset + o_v, out.to(out_ptr.dtype.element_ty), mask=m_v)
    lse = tl.where(is_empty, float("-inf"), (m_i + shift + tl.math.log2(l_i)) * 0.6931471805599453)
    tl.store(lse_ptr + (i_b * KV_HEADS * GROUP + i_h) * q_len + i_t, lse)
