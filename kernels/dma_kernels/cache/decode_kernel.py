"""The Triton kernels of a decode step: partial results of raw and of coded tiles, and their combination.

Every (batch row, kv head) is split over several programs, which share one list of tiles: first those that are read raw,
from the sinks and the tail, then those of the body. A raw tile counts as several coded ones, as it has more bytes, so
that all programs end together; what a program leaves behind is a normalised output and the logarithm of its
denominator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import dot
from ..numerics.formats import TILE
from .record_kernel import load_coded

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)


@triton.jit
def _softmax_step(s, l_i, m_i):
    """Take base-2 logits ``[ROWS, COLUMNS]`` into the softmax.

    Returns:
        Weights; the factor of what was summed before; the sums, of each row apart, so that
        they are reduced once at the end; and the maximum.
    """
    m_new = tl.maximum(m_i, tl.max(s, 0))
    p = tl.math.exp2(s - m_new[None, :])
    alpha = tl.math.exp2(m_i - m_new)
    return p, alpha, l_i * alpha[None, :] + p, m_new


@triton.jit
def _attend(
    acc, l_i, m_i, q, k, v, k_pos, q_pos, window, softcap, logit_scale,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to keys ``[ROWS, BLOCK_D]`` and values ``[ROWS, BLOCK_DV]``; returns the sums and the maximum."""
    s = dot(k, tl.trans(q), IS_INTERPRETED) * logit_scale
    if HAS_SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap; softcap carries the log2(e).
        s = softcap * (1.0 - 2.0 / (tl.math.exp2(s * (2.8853900817779268 / softcap)) + 1.0))
    if IS_CAUSAL:
        s = tl.where(k_pos[:, None] <= q_pos[None, :], s, float("-inf"))
    if HAS_WINDOW:
        s = tl.where(k_pos[:, None] > (q_pos - window)[None, :], s, float("-inf"))
    p, alpha, l_i, m_i = _softmax_step(s, l_i, m_i)
    return acc * alpha[None, :] + dot(tl.trans(v), p.to(q.dtype), IS_INTERPRETED), l_i, m_i


@triton.jit
def _store_partial(out_ptr, lse_ptr, acc, total, m_i, rows, i_split, splits, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store a program's normalised output ``[rows, splits, DV]`` and base-2 logarithms ``[rows, splits]``."""
    o_v = tl.arange(0, BLOCK_DV)
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[None, :]
    entry = rows * splits + i_split
    tl.store(out_ptr + entry[None, :] * DV + o_v[:, None], acc, mask=(o_v < DV)[:, None])
    tl.store(lse_ptr + entry, tl.where(is_empty, float("-inf"), m_i + tl.math.log2(total)))


@triton.jit(
    do_not_specialize=[
        "q_len", "new_len", "slots", "ring_tiles", "window", "diagonal_tiles", "sink_tiles", "high_weight"
    ]
)  # fmt: skip
def decode_kernel(
    q_ptr, body_ptr, pages_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, lengths_ptr,
    out_ptr, lse_ptr, stride_qb, stride_qh, stride_qt, stride_qd,
    q_len, new_len, slots, ring_tiles, window, softcap, logit_scale, diagonal_tiles, sink_tiles, high_weight,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, RECORD_WORDS: tl.constexpr, KEY_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Answer ``BLOCK_N`` columns of a kv head over a share of its tiles; grid ``(B * Hkv, splits, column blocks)``.

    The last ``new_len`` keys are stored, but not counted in ``lengths`` yet.
    """
    STEPS: tl.constexpr = _TILE // STEP
    i_split = tl.program_id(1)
    i_head = tl.program_id(0).to(tl.int64)
    splits = tl.num_programs(1)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_DV)
    o_t = tl.arange(0, STEP)
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
    band_first = tl.maximum((tl.maximum(first_pos, 0) >> _TILE_SHIFT) - diagonal_tiles, visible_tile)
    last_tile = (length - 1) >> _TILE_SHIFT
    sinks = tl.maximum(tl.minimum(sink_tiles, band_first) - visible_tile, 0)
    high_count = sinks + tl.maximum(last_tile + 1 - band_first, 0)
    low_first = tl.maximum(visible_tile, sink_tiles)
    low_count = tl.maximum(band_first - low_first, 0)
    share = tl.cdiv(high_count * high_weight + low_count, splits)
    start = i_split * share
    high_start = tl.minimum(tl.cdiv(start, high_weight), high_count)
    high_end = tl.minimum(tl.cdiv(start + share, high_weight), high_count)
    start -= high_count * high_weight
    low_start = low_first + tl.minimum(tl.maximum(start, 0), low_count)
    low_end = low_first + tl.minimum(tl.maximum(start + share, 0), low_count)

    m_i = tl.full([BLOCK_N], -1.0e30, tl.float32)
    l_i = tl.zeros([STEP, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_N], tl.float32)
    for step in tl.range(high_start * STEPS, high_end * STEPS, num_stages=NUM_STAGES):
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
        v = tl.load(v_base + (entry + o_t)[:, None] * DV + o_v[None, :], mask=m_t & (o_v < DV)[None, :], other=0.0)
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k, v, k_pos, q_pos, window, softcap, logit_scale,
            True, HAS_WINDOW, HAS_SOFTCAP, IS_INTERPRETED,
        )  # fmt: skip
    for step in tl.range(low_start * STEPS, low_end * STEPS, num_stages=NUM_STAGES):
        tile = step // STEPS
        rows_in_tile = (step - tile * STEPS) * STEP + o_t
        page = tl.load(pages_ptr + i_b * slots + tile % slots).to(tl.int64)
        record_ptr = body_ptr + (page * KV_HEADS + i_kv) * RECORD_WORDS
        pointers = record_ptr + tl.zeros([STEP], tl.int32)
        k = load_coded(pointers, rows_in_tile, o_t >= 0, D, BLOCK_D, BITS, True).to(q.dtype)
        v = load_coded(pointers + KEY_WORDS, rows_in_tile, o_t >= 0, DV, BLOCK_DV, BITS, False).to(q.dtype)
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k, v, tile * _TILE + rows_in_tile, q_pos, window, softcap, logit_scale,
            False, HAS_WINDOW, HAS_SOFTCAP, IS_INTERPRETED,
        )  # fmt: skip
    _store_partial(out_ptr, lse_ptr, acc, tl.sum(l_i, 0), m_i, rows, i_split, splits, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["splits", "q_len", "new_len", "rows"])
def combine_kernel(
    partial_ptr, partial_lse_ptr, sinks_ptr, lengths_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_ot,
    splits, q_len, new_len, rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one query of one head; its sink logit takes part here.

    It counts the ``new_len`` keys in ``lengths``, which nothing of the step reads any more.
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
    if HAS_SINKS:
        m_i = 1.4426950408889634 * tl.load(sinks_ptr + i_h).to(tl.float32)
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
    lse = tl.where(is_empty, float("-inf"), (m_i + tl.math.log2(l_i)) * 0.6931471805599453)
    tl.store(lse_ptr + (i_b * KV_HEADS * GROUP + i_h) * q_len + i_t, lse)
