"""The split-KV kernels, in Triton: a few queries over unquantized keys and values, in two launches.

The queries of a kv head, ``GROUP`` query heads at up to 63 positions, are the rows of one matrix. A *head* is a kv head
of a batch row and one block of these rows. Its keys, as far as its queries see them, are divided into blocks. The
blocks of all heads form one sequence that the CTAs split evenly, however long each batch row is. So a CTA may end one
head and begin another. For each of its heads a CTA writes a split: a normalized partial output and its log-sum-exp. The
second launch combines the splits of each query.

Lengths are read on the device. :mod:`dma_kernels.prefill.split_kv` launches the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device.arithmetic import dot, narrow
from ..device.scores import Visibility, attend, logits
from ..device.softmax import LOG2_E, combined_log_sum_exp
from ..device.tiles import head_rows, load_in_range
from ..numerics.formats import MAX_POSITION

_MAX_POSITION = tl.constexpr(MAX_POSITION)
_ROWS = tl.constexpr(32)
"""Batch rows whose work is computed at once."""


class PerRow(NamedTuple):
    """Integers of each batch row on the device; ``ptr`` is ``None`` for missing ones."""

    ptr: Any
    stride: int  # between rows; 0 if they share one
    stride_pair: int = 1  # between the two numbers of a row

    @classmethod
    def of(cls, tensor: Any) -> PerRow:
        """Return the argument for a tensor ``[B]``, ``[1]``, ``[]`` or ``[B, 2]``, or for ``None``."""
        if tensor is None:
            return cls(None, 0)
        stride = tensor.stride(0) if tensor.ndim and tensor.shape[0] > 1 else 0
        return cls(tensor, stride, tensor.stride(1) if tensor.ndim == 2 else 1)


class Sequence(NamedTuple):
    """Positions and lengths of a call; see :func:`dma_kernels.attention`."""

    q_offset: Any  # :class:`PerRow`
    kv_offset: Any  # :class:`PerRow`
    kv_range: Any  # :class:`PerRow`
    lead: Any  # ``q_offset - kv_offset``, as far as the host knows them
    q_len: Any
    kv_len: Any
    window: Any
    batch: Any  # batch rows


@triton.jit
def _load_per_row(x, row, m_row, INDEX: tl.constexpr):
    """Return the integers of batch rows as int64; ``INDEX`` is that in a pair."""
    return tl.load(x.ptr + (row.to(tl.int64) * x.stride + INDEX * x.stride_pair), mask=m_row, other=0).to(tl.int64)


@triton.jit
def _clamp(x, low, high):
    """Clamp int64 to a range of int32."""
    return tl.minimum(tl.maximum(x, low), high).to(tl.int32)


@triton.jit
def _visible_keys(sequence, row, m_row):
    """Return which keys the queries of batch rows see.

    Returns:
        The index of the key at the position of query 0, of the first visible key, and after the last.
    """
    lead = sequence.lead + 0 * row.to(tl.int64)
    first = 0 * row
    end = sequence.kv_len
    if sequence.q_offset.ptr is not None:
        lead += _load_per_row(sequence.q_offset, row, m_row, 0)
    if sequence.kv_offset.ptr is not None:
        lead -= _load_per_row(sequence.kv_offset, row, m_row, 0)
    if sequence.kv_range.ptr is not None:
        first = _clamp(_load_per_row(sequence.kv_range, row, m_row, 0), 0, end)
        end = _clamp(_load_per_row(sequence.kv_range, row, m_row, 1), 0, end)
    lead = _clamp(lead, -_MAX_POSITION, _MAX_POSITION)
    end = tl.minimum(end, lead + sequence.q_len)
    if sequence.window is not None:
        first = tl.maximum(first, lead - sequence.window + 1)
    return lead, first, end


@triton.jit
def _blocks(first, end, BLOCK_N: tl.constexpr):
    """Return the blocks of a range of keys. An empty range has one, which writes the result of no keys."""
    return (tl.maximum(end - first, 1) + BLOCK_N - 1) // BLOCK_N


@triton.jit
def _blocks_of_rows(sequence, first_row, BLOCK_N: tl.constexpr):
    """Return the blocks of keys of ``_ROWS`` batch rows; 0 past the last row."""
    row = first_row + tl.arange(0, _ROWS)
    _, first, end = _visible_keys(sequence, row, row < sequence.batch)
    return tl.where(row < sequence.batch, _blocks(first, end, BLOCK_N), 0)


@triton.jit
def _find_row(item, sequence, heads, BLOCK_N: tl.constexpr):
    """Return the batch row of an item, and its first item; ``heads`` are those of a row."""
    row = 0
    row_start = 0
    before = 0
    for first_row in range(0, sequence.batch, _ROWS):
        items = _blocks_of_rows(sequence, first_row, BLOCK_N) * heads
        has_ended = (before + tl.cumsum(items, 0) <= item) & (items > 0)
        row += tl.sum(has_ended.to(tl.int32), 0)
        row_start += tl.sum(tl.where(has_ended, items, 0), 0)
        before += tl.sum(items, 0)
    return row, row_start


@triton.jit
def _first_item(i_cta, ctas, items):
    """Return the first item of a CTA."""
    return (i_cta.to(tl.int64) * items // ctas).to(tl.int32)


@triton.jit
def _cta_of(item, ctas, items):
    """Return the CTA of an item: the last one that begins at or before it."""
    return (((item.to(tl.int64) + 1) * ctas - 1) // items).to(tl.int32)


@triton.jit(do_not_specialize=["lead", "q_len", "kv_len", "window", "batch", "m_blocks"])
def split_kv_kernel(
    query, key, value, mask, splits, q_offset, kv_offset, kv_range, lead, q_len, kv_len, window, batch, m_blocks,
    softcap, logit_scale, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend causally with the queries of all heads, and write a split for each head of a CTA. Any number of CTAs.

    - ``query``, ``key``, ``value``: 16-bit :class:`~dma_kernels.numerics.layout.Strided` ``[B, H, T, D]``;
      ``mask``: uint8 ``[B, Hq, Tq, Tk]``, or without a pointer.
    - ``splits``: :class:`~..device.softmax.Splits` of ``BLOCK_M`` rows. ``q_offset`` to ``batch``: see
      :class:`Sequence`.
    - ``m_blocks``: blocks of ``BLOCK_M`` rows of a kv head.
    - ``softcap``, ``logit_scale``: in base 2; ``softcap`` may be ``None``.
    - ``CONFIG``: :class:`~.split_kv.SplitKVConstants`.
    """
    GROUP: tl.constexpr = CONFIG.q_heads // CONFIG.kv_heads
    D: tl.constexpr = CONFIG.head_dim
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_M: tl.constexpr = CONFIG.tuning.block_m
    BLOCK_N: tl.constexpr = CONFIG.tuning.block_n
    BLOCK_D: tl.constexpr = CONFIG.block_d
    BLOCK_DV: tl.constexpr = CONFIG.block_dv
    if CONFIG.use_pdl:
        gdc_launch_dependents()
    sequence = Sequence(q_offset, kv_offset, kv_range, lead, q_len, kv_len, window, batch)
    heads = CONFIG.kv_heads * m_blocks
    items = 0
    for first_row in range(0, batch, _ROWS):
        items += tl.sum(_blocks_of_rows(sequence, first_row, BLOCK_N), 0) * heads
    i_cta = tl.program_id(0)
    ctas = tl.minimum(tl.num_programs(0), items)  # every one of them has an item, so that no split is missing
    item = _first_item(i_cta, ctas, items)
    end_item = tl.where(i_cta < ctas, _first_item(i_cta + 1, ctas, items), item)
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_DV)
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * logit_scale
    while item < end_item:
        row, row_start = _find_row(item, sequence, heads, BLOCK_N)
        q_start, first, end = _visible_keys(sequence, row, row < batch)
        blocks = _blocks(first, end, BLOCK_N)
        i_head = (item - row_start) // blocks
        head_start = row_start + i_head * blocks
        head_end = head_start + blocks
        # Either the CTA or the head of the next split is the next one. So the sum of their indices numbers the splits.
        i_split = i_cta + row * heads + i_head
        if item == head_start:
            head = splits.heads + (row * heads + i_head) * 2
            tl.store(head, i_split)
            tl.store(head + 1, _cta_of(head_end - 1, ctas, items) - i_cta + 1)
        i_b = row.to(tl.int64)
        i_kv = (i_head // m_blocks).to(tl.int64)
        i_row = (i_head % m_blocks) * BLOCK_M + o_m
        i_t = i_row // GROUP
        i_h = i_kv * GROUP + i_row % GROUP
        m_row = i_t < q_len
        q_row = i_b * query.stride_b + i_h * query.stride_h + i_t.to(tl.int64) * query.stride_t
        q = tl.load(
            query.ptr + (q_row[:, None] + o_d.to(tl.int64)[None, :] * query.stride_d),
            mask=m_row[:, None] & (o_d < D)[None, :], other=0.0,
        )  # fmt: skip
        mask_rows = mask.ptr
        if mask.ptr is not None:
            mask_rows += (i_b * mask.stride_b + i_h * mask.stride_h)[:, None]
        start = first + (item - head_start) * BLOCK_N
        stop = tl.minimum(first + (tl.minimum(end_item, head_end) - head_start) * BLOCK_N, end)
        visibility = Visibility(
            start, stop, window, mask_rows, mask.stride_t, mask.stride_d, q_start, q_start + q_len, 0
        )
        k_rows = head_rows(key, i_b, i_kv)
        v_rows = head_rows(value, i_b, i_kv)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        m_i = tl.full([BLOCK_M], -1.0e30, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        for i_key in tl.range(start, stop, BLOCK_N, num_stages=CONFIG.tuning.num_stages):
            k_pos = i_key + o_n
            k = load_in_range(k_rows, k_pos, start, stop, D, BLOCK_D)
            s = logits(dot(q, tl.trans(k)), scale, None, softcap, q_start + i_t, k_pos, visibility, True, True)
            v = load_in_range(v_rows, k_pos, start, stop, DV, BLOCK_DV)
            acc, m_i, l_i = attend(acc, m_i, l_i, s, scale, v, True, "raw", False)
        is_empty = l_i == 0.0
        l_i = tl.where(is_empty, 1.0, l_i)
        acc *= (1.0 / l_i)[:, None]
        split_row = i_split.to(tl.int64) * BLOCK_M + o_m
        tl.store(splits.out + (split_row[:, None] * DV + o_v[None, :]), acc, mask=m_row[:, None] & (o_v < DV)[None, :])
        tl.store(splits.lse + split_row, tl.where(is_empty, float("-inf"), m_i + tl.math.log2(l_i)), mask=m_row)
        item = tl.minimum(end_item, head_end)


@triton.jit(do_not_specialize=["q_len", "m_blocks"])
def combine_splits_kernel(splits, sinks_ptr, out, lse_ptr, q_len, m_blocks, CONFIG: tl.constexpr):
    """Combine the splits of a query of one query head; a CTA for each of them.

    ``out`` is ``Strided``, ``sinks_ptr`` points to the sink logits ``[Hq]`` or is ``None``, and ``lse_ptr`` to fp32
    ``[B, Hq, Tq]``. Other arguments are as for :func:`split_kv_kernel`.
    """
    GROUP: tl.constexpr = CONFIG.q_heads // CONFIG.kv_heads
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_M: tl.constexpr = CONFIG.tuning.block_m
    BLOCK_S: tl.constexpr = CONFIG.block_s
    BLOCK_DV: tl.constexpr = CONFIG.block_dv
    i_cta = tl.program_id(0)
    i_row = i_cta % (GROUP * q_len)
    i_head = i_cta // (GROUP * q_len)  # the kv head, counted over all batch rows
    i_b = (i_head // CONFIG.kv_heads).to(tl.int64)
    i_h = (i_head % CONFIG.kv_heads) * GROUP + i_row % GROUP
    i_t = i_row // GROUP
    o_s = tl.arange(0, BLOCK_S)
    o_v = tl.arange(0, BLOCK_DV)
    m_v = o_v < DV
    m_i = tl.full([1], -1.0e30, tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    if sinks_ptr is not None:
        sink = LOG2_E * tl.load(sinks_ptr + i_h).to(tl.float32)
        m_i = tl.maximum(m_i, sink)
        l_i = tl.math.exp2(sink - m_i)
    if CONFIG.use_pdl:
        gdc_wait()
    head = splits.heads + (i_head * m_blocks + i_row // BLOCK_M) * 2
    first = tl.load(head).to(tl.int64)
    count = tl.load(head + 1)
    for start in range(0, count, BLOCK_S):
        m_s = start + o_s < count
        split_row = (first + start + o_s) * BLOCK_M + i_row % BLOCK_M
        lse = tl.load(splits.lse + split_row, mask=m_s, other=float("-inf"))
        x = tl.load(splits.out + (split_row[:, None] * DV + o_v[None, :]), mask=m_s[:, None] & m_v[None, :], other=0.0)
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        p = tl.math.exp2(lse - m_new)
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(x * p[:, None], 0)
        m_i = m_new
    l_i, lse = combined_log_sum_exp(m_i, l_i)
    tl.store(lse_ptr + ((i_b * CONFIG.q_heads + i_h) * q_len + i_t) + tl.arange(0, 1), lse)
    offset = i_b * out.stride_b + i_h.to(tl.int64) * out.stride_h + i_t.to(tl.int64) * out.stride_t
    tl.store(out.ptr + (offset + o_v), narrow(acc / l_i, out.ptr.dtype.element_ty), mask=m_v)
