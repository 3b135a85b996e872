"""The second launch of a decode step: combines the splits of each head, and stores and counts the new KV.

It follows :mod:`.decode_kernel`, and its CTAs may start while the last CTAs of that launch run (programmatic dependent
launch). They wait for the launch to end before they read its splits, their locations and the lengths of rows.

The queries of all heads form one sequence that the CTAs split. One CTA per head would take several waves for a large
batch, and each wave would wait for memory three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..device.arithmetic import narrow
from ..device.softmax import LOG2_E, Splits, combined_log_sum_exp
from ..device.tiles import TILE, TILE_SHIFT
from ..runtime.launch import ASSERTS, launch_kernel
from .append import MAX_REGISTERS, PIECES, append_head, append_warps
from .decode_mma import QUERIES
from .formats import VALUE_GROUP
from .kernel_args import CacheInputs, CacheSizes, PageConfig, Strided
from .page_layout import PageLayout

BLOCK_Q = 8
"""Queries of a CTA if there are many; 16 would spill registers."""
SPLIT_ELEMENTS = {1: 8192, BLOCK_Q: 2048}
"""Elements of splits that a CTA holds in registers, by its number of queries. Several queries also need registers for
pointers."""

_QUERIES = tl.constexpr(QUERIES)
_PIECES = tl.constexpr(PIECES)


@dataclass(frozen=True)
class CombineConfig(PageConfig):
    """Compile-time configuration of the combine kernel."""

    GROUP: int  # query heads per kv head
    BLOCK_Q: int  # queries of a CTA
    BLOCK_E: int  # pieces of tiles that a CTA may quantize
    USE_PDL: bool  # whether the launch may start before the previous one ends

    @property
    def BLOCK_OUT(self) -> int:
        """Channels of an output, padded."""
        return max(VALUE_GROUP, self.BLOCK_DV)

    @property
    def BLOCK_S(self) -> int:
        """Splits that are combined at once."""
        return SPLIT_ELEMENTS[self.BLOCK_Q] // (self.BLOCK_Q * self.BLOCK_OUT)


@triton.jit
def _store_tokens(x, unquantized, row, i_kv, position, mask, sizes, D: tl.constexpr, BLOCK: tl.constexpr):
    """Store tokens ``[N, D]`` in the residual KV and, at sink positions, in the sink KV."""
    o_d = tl.arange(0, BLOCK)[None, :]
    tile = position >> TILE_SHIFT
    residual = ((i_kv * sizes.residual_tiles + tile % sizes.residual_tiles) * TILE + (position & (TILE - 1))) * D
    sink = (i_kv * sizes.sink_tiles * TILE + position) * D
    residual = (row * unquantized.stride_residual + residual)[:, None] + o_d
    tl.store(unquantized.residual + residual, x, mask=mask[:, None] & (o_d < D))
    mask = mask & (tile < sizes.sink_tiles)
    tl.store(
        unquantized.sink + ((row * unquantized.stride_sink + sink)[:, None] + o_d), x, mask=mask[:, None] & (o_d < D)
    )


@triton.jit
def _load_tokens(x, i_b, i_kv, i_t, mask, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load new keys or values ``[N, D]``."""
    o_d = tl.arange(0, BLOCK)[None, :]
    offset = (i_b * x.stride_b + i_kv * x.stride_h + i_t * x.stride_t)[:, None] + o_d.to(tl.int64) * x.stride_d
    return tl.load(x.ptr + offset, mask=mask[:, None] & (o_d < D), other=0.0)


@triton.jit
def _combine(
    first_column, splits, sinks_ptr, out, lse_ptr, key, value, cache, heads, q_len, sizes, CONFIG: tl.constexpr
):
    """Combine the splits of ``BLOCK_Q`` queries; the first query of a group stores its new key and value."""
    KV_HEADS: tl.constexpr = CONFIG.KV_HEADS
    GROUP: tl.constexpr = CONFIG.GROUP
    DV: tl.constexpr = CONFIG.DV
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_S: tl.constexpr = CONFIG.BLOCK_S
    BLOCK_OUT: tl.constexpr = CONFIG.BLOCK_OUT
    columns = GROUP * q_len
    column = first_column + tl.arange(0, BLOCK_Q)
    i_head = column // columns
    column = column % columns
    is_query = i_head < heads
    i_b = (i_head // KV_HEADS).to(tl.int64)
    i_kv = i_head % KV_HEADS
    i_t = (column // GROUP).to(tl.int64)
    q_head = i_kv * GROUP + column % GROUP
    o_v = tl.arange(0, BLOCK_OUT)
    o_s = tl.arange(0, BLOCK_S)
    if key.ptr is not None:
        is_token = is_query & (column % GROUP == 0)
        row = i_b
        if cache.unquantized_rows is not None:
            row = tl.load(cache.unquantized_rows + i_b, mask=is_token, other=0).to(tl.int64)
        new_key = _load_tokens(key, i_b, i_kv, i_t, is_token, CONFIG.D, CONFIG.BLOCK_D)
        new_value = _load_tokens(value, i_b, i_kv, i_t, is_token, DV, CONFIG.BLOCK_DV)
    # With PDL, a first pass without queries warms the instruction cache before the wait.
    for attempt in range(0 if CONFIG.USE_PDL else 1, 2):
        if CONFIG.USE_PDL:  # noqa: SIM102 (a constexpr branch)
            if attempt == 1:
                gdc_wait()
        m_q = is_query & (attempt == 1)
        first = tl.load(splits.heads + i_head * 3, mask=m_q, other=0)
        count = tl.load(splits.heads + i_head * 3 + 1, mask=m_q, other=0)
        if key.ptr is not None:
            position = tl.load(splits.heads + i_head * 3 + 2, mask=m_q, other=0) + i_t
            is_stored = is_token & (attempt == 1) & (position >= 0)
            _store_tokens(new_key, cache.key, row, i_kv, position, is_stored, sizes, CONFIG.D, CONFIG.BLOCK_D)
            _store_tokens(new_value, cache.value, row, i_kv, position, is_stored, sizes, DV, CONFIG.BLOCK_DV)
        m_i = tl.full([BLOCK_Q], -1.0e30, tl.float32)
        l_i = tl.zeros([BLOCK_Q], tl.float32)
        if sinks_ptr is not None:
            sink = LOG2_E * tl.load(sinks_ptr + q_head, mask=m_q, other=0.0).to(tl.float32)
            m_i = tl.maximum(sink, -1.0e30)
            l_i = tl.exp2(sink - m_i)
        acc = tl.zeros([BLOCK_Q, BLOCK_OUT], tl.float32)
        for i_s in range(0, tl.maximum(tl.max(count, 0), 1), BLOCK_S):
            split = i_s + o_s
            blocks = (columns + _QUERIES - 1) // _QUERIES
            index = (first[:, None] + split[None, :]).to(tl.int64) * (blocks * _QUERIES) + column[:, None]
            m_s = m_q[:, None] & (split[None, :] < count[:, None])
            lse = tl.load(splits.lse + index, mask=m_s, other=float("-inf"))
            x = tl.load(
                splits.out + (index[:, :, None] * DV + o_v[None, None, :]),
                mask=m_s[:, :, None] & (o_v < DV)[None, None, :], other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m_i, tl.max(lse, 1))
            p = tl.exp2(lse - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None] + tl.sum(x * p[:, :, None], 1)
            m_i = m_new
        l_i, lse = combined_log_sum_exp(m_i, l_i)
        tl.store(lse_ptr + (i_b * KV_HEADS * GROUP + q_head) * q_len + i_t, lse, mask=m_q)
        offset = i_b * out.stride_b + q_head.to(tl.int64) * out.stride_h + i_t * out.stride_t
        acc = narrow(acc / l_i[:, None], out.ptr.dtype.element_ty)
        tl.store(out.ptr + (offset[:, None] + o_v[None, :]), acc, mask=m_q[:, None] & (o_v < DV)[None, :])


@triton.jit(noinline=True)  # if inlined in a loop, its constants would take registers
def _quantize_head(heads_ptr, key, value, cache, i_head, i_piece, new_len, sizes, max_tiles, CONFIG: tl.constexpr):
    """Quantize a piece of a kv head's tile if new tokens complete it: of its keys, then of its values."""
    stored = tl.load(heads_ptr + i_head * 3 + 2)
    append_head(
        key, value, cache, i_head.to(tl.int64), 0, i_piece >= _PIECES, i_piece % _PIECES, stored, new_len,
        sizes, max_tiles, CONFIG, False, True,
    )  # fmt: skip


@triton.jit
def _quantize_tiles(ctas, i_cta, splits, key, value, cache, heads, new_len, sizes, max_tiles, CONFIG: tl.constexpr):
    """Quantize this CTA's parts of completed tiles, of ``ctas`` CTAs, and count the new tokens in ``lengths``."""
    task = i_cta + tl.arange(0, CONFIG.BLOCK_E) * ctas
    is_task = task < heads * (2 * _PIECES)  # the same part of every head comes before the next part
    stored = tl.load(splits.heads + task % heads * 3 + 2, mask=is_task, other=0)
    is_first = (task < heads) & (task % CONFIG.KV_HEADS == 0)
    tl.store(cache.lengths + task // CONFIG.KV_HEADS, stored + new_len, mask=is_first)
    is_complete = is_task & (((tl.maximum(stored, 0) >> TILE_SHIFT) + 1) * TILE <= stored + new_len)
    if tl.max(is_complete.to(tl.int32), 0) > 0:
        for i in range(CONFIG.BLOCK_E):
            i_task = i_cta + i * ctas
            if i_task < heads * (2 * _PIECES):
                _quantize_head(
                    splits.heads, key, value, cache, i_task % heads, i_task // heads, new_len, sizes, max_tiles, CONFIG
                )


@triton.jit(
    do_not_specialize=["combine_ctas", "heads", "q_len", "max_tiles", "max_pages", "residual_tiles", "sink_tiles"]
)
def combine_kernel(
    splits, sinks_ptr, out, lse_ptr, key, value, cache, combine_ctas, heads, q_len,
    max_tiles, max_pages, residual_tiles, sink_tiles, CONFIG: tl.constexpr,
):  # fmt: skip
    """Combine splits in the first ``combine_ctas`` CTAs, and quantize completed tiles in the others.

    Each of the others handles up to ``BLOCK_E`` pieces of tiles (:data:`.append.PIECES`), and updates ``lengths``;
    ``heads`` counts the kv heads of all rows. A row has room for ``max_tiles`` tiles.
    """
    sizes = CacheSizes(max_pages, residual_tiles, sink_tiles)
    i_cta = tl.program_id(0)
    if i_cta < combine_ctas:
        _combine(
            i_cta * CONFIG.BLOCK_Q, splits, sinks_ptr, out, lse_ptr, key, value, cache, heads, q_len, sizes, CONFIG
        )
    elif key.ptr is not None:
        if CONFIG.USE_PDL:
            gdc_wait()
        _quantize_tiles(
            tl.num_programs(0) - combine_ctas, i_cta - combine_ctas, splits, key, value, cache, heads, q_len, sizes,
            max_tiles, CONFIG,
        )  # fmt: skip


def launch_combine(
    layout: PageLayout, out: Tensor, lse: Tensor, splits: Splits, sinks: Tensor | None, key: Strided, value: Strided,
    cache: CacheInputs, *, max_tiles: int, sms: int, use_pdl: bool,
) -> None:  # fmt: skip
    """Launch the kernel, on ``sms`` SMs; ``key`` and ``value`` are the new KV to store, at most a tile of tokens."""
    batch, q_heads, q_len, _ = out.shape
    kv_heads = splits.heads.shape[1]
    heads = batch * kv_heads
    queries = batch * q_heads * q_len
    block_q = 1 if queries <= 2 * sms else BLOCK_Q
    combine_ctas = triton.cdiv(queries, block_q)
    quantize_ctas = 0 if key.ptr is None else min(2 * PIECES * heads, sms)
    config = CombineConfig(
        layout,
        kv_heads,
        GROUP=q_heads // kv_heads,
        BLOCK_Q=block_q,
        BLOCK_E=triton.next_power_of_2(triton.cdiv(2 * PIECES * heads, max(quantize_ctas, 1))),
        USE_PDL=use_pdl,
    )
    launch_kernel(
        combine_kernel, {"CONFIG": config}, (combine_ctas + quantize_ctas, 1, 1),
        splits, sinks, Strided.of(out), lse, key, value, cache.tensors, combine_ctas, heads, q_len, max_tiles,
        *cache.sizes, num_warps=append_warps(layout), maxnreg=MAX_REGISTERS, launch_pdl=use_pdl, **ASSERTS,
    )  # fmt: skip
