"""The launch that ends a decode step: parts of heads become outputs, new keys and values are stored and counted.

It follows the launch of :mod:`.decode_kernel`, beside whose last programs its own may start. They wait for those to
end: where the parts of a head are, and how many keys were stored, they read from what that launch left.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..numerics.formats import TILE
from ..runtime.launch import Launcher
from .append import REGISTERS, append_to_head, append_warps, record_constants, tiles_of, where_stored
from .codes import VALUE_GROUP, Record
from .storage import LayerStorage

ELEMENTS = 8192
"""Of parts that a program has in registers."""


@triton.jit
def _combine(
    is_there, heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_head, first_column, blocks, q_len,
    stride_ob, stride_oh, stride_ot,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Combine the parts of ``BLOCK_C`` queries of a kv head, if it ``is_there``; sink logits take part here."""
    o_v = tl.arange(0, BLOCK_DV)
    o_s = tl.arange(0, BLOCK_S)
    column = first_column + tl.arange(0, BLOCK_C)
    m_c = (column < GROUP * q_len) & is_there
    head = i_head % KV_HEADS * GROUP + column % GROUP
    i_t = column // GROUP
    first = tl.load(heads_ptr + i_head * 3, mask=is_there, other=0)
    parts = tl.load(heads_ptr + i_head * 3 + 1, mask=is_there, other=0)
    m_i = tl.full([BLOCK_C], -1.0e30, tl.float32)
    l_i = tl.zeros([BLOCK_C], tl.float32)
    if sinks_ptr is not None:
        m_i = 1.4426950408889634 * tl.load(sinks_ptr + head, mask=m_c, other=0.0).to(tl.float32)
        l_i += 1.0
    acc = tl.zeros([BLOCK_C, BLOCK_DV], tl.float32)
    for i_s in range(0, tl.maximum(parts, 1), BLOCK_S):
        part = i_s + o_s
        entry = (first + part)[None, :] * (blocks * 8) + column[:, None]
        m_s = m_c[:, None] & (part < parts)[None, :]
        lse = tl.load(partial_lse_ptr + entry, mask=m_s, other=float("-inf"))
        x = tl.load(
            partial_ptr + (entry[:, :, None].to(tl.int64) * DV + o_v[None, None, :]),
            mask=m_s[:, :, None] & (o_v < DV)[None, None, :], other=0.0,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(lse, 1))
        weight = tl.exp2(lse - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(weight, 1)
        acc = acc * alpha[:, None] + tl.sum(x * weight[:, :, None], 1)
        m_i = m_new
    is_empty = l_i == 0.0
    total = tl.where(is_empty, 1.0, l_i)
    lse = tl.where(is_empty, float("-inf"), (m_i + tl.log2(total)) * 0.6931471805599453)
    i_b = i_head // KV_HEADS
    tl.store(lse_ptr + (i_b * KV_HEADS * GROUP + head) * q_len + i_t, lse, mask=m_c)
    offset = i_b * stride_ob + head.to(tl.int64) * stride_oh + i_t.to(tl.int64) * stride_ot
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (offset[:, None] + o_v[None, :]), out, mask=m_c[:, None] & (o_v < DV)[None, :])


@triton.jit(do_not_specialize=["blocks", "q_len", "slots", "ring_tiles", "sink_tiles"])
def decode_end_kernel(
    heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, lengths_ptr,
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr, raw_rows_ptr,
    stride_ob, stride_oh, stride_ot, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    blocks, q_len, slots, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, RECORD_WORDS: tl.constexpr, KEY_WORDS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_OUT: tl.constexpr, HAS_NEW: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """End the step of a kv head; grid ``(B * Hkv, blocks of queries, then keys and values of each tile)``.

    With ``HAS_NEW`` keys and values of the queries are stored, and counted in ``lengths``.
    """
    i_head = tl.program_id(0).to(tl.int64)
    role = tl.program_id(1)
    combining = (GROUP * q_len + BLOCK_C - 1) // BLOCK_C
    if role < combining:
        # Who has to wait goes through all once before, of no head, so that the instructions are in the cache then.
        for attempt in range(0 if WAITS else 1, 2):
            if WAITS:  # noqa: SIM102 (a constexpr branch)
                if attempt == 1:
                    gdc_wait()
            _combine(
                attempt == 1, heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_head,
                role * BLOCK_C, blocks, q_len, stride_ob, stride_oh, stride_ot,
                KV_HEADS, GROUP, DV, BLOCK_OUT, BLOCK_C, BLOCK_S,
            )  # fmt: skip
    elif HAS_NEW:
        if WAITS:
            gdc_wait()
        stored = tl.load(heads_ptr + i_head * 3 + 2)
        if (role == combining) & (i_head % KV_HEADS == 0):
            tl.store(lengths_ptr + i_head // KV_HEADS, stored + q_len)
        append_to_head(
            key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr,
            raw_rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
            stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
            i_head, (role - combining) // 2, (role - combining) % 2 == 1, stored, q_len, slots, ring_tiles, sink_tiles,
            KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, BITS, RECORD_WORDS, KEY_WORDS, True, True,
        )  # fmt: skip


def launch_end(
    storage: LayerStorage,
    new: tuple[Tensor, Tensor] | None,
    parts: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    blocks: int,
    is_early: bool,
    processors: int,
) -> None:
    """Launch the kernel.

    Args:
        storage: The cache.
        new: Keys and values to be stored, if there are any; at most a tile.
        parts: What the launch before left: of each kv head where its parts are; outputs; their logarithms.
        sinks: One logit per query head.
        out: ``[B, Hq, T, Dv]``, channels next to each other.
        lse: Contiguous, ``[B, Hq, T]``.
        blocks: Of 8 queries of a kv head.
        is_early: Whether the launch before lets this one start before it has ended.
        processors: Multiprocessors of the device.
    """
    batch, q_heads, q_len, _ = out.shape
    kv_heads = storage.key_tail.shape[1]
    columns = q_heads // kv_heads * q_len
    # Of few heads every query has a program of its own.
    block_c = 1 if batch * kv_heads < processors else min(8, triton.next_power_of_2(columns))
    key, value = new or (None, None)
    strides = (*key.stride(), *value.stride()) if key is not None and value is not None else (0,) * 8
    _end_launcher(storage.record, kv_heads, q_heads // kv_heads, block_c, new is not None, is_early)(
        (batch * kv_heads, triton.cdiv(columns, block_c) + (0 if new is None else 2 * tiles_of(q_len)), 1),
        *parts, sinks, out, lse, storage.lengths, key, value, *where_stored(storage),
        *out.stride()[:3], *strides, *storage.strides,
        blocks, q_len, storage.slots, storage.ring // TILE, storage.key_sink.shape[2] // TILE,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _end_launcher(record: Record, kv_heads: int, group: int, block_c: int, has_new: bool, is_early: bool) -> Launcher:
    block_out = max(VALUE_GROUP, triton.next_power_of_2(record.value_dim))
    constants = {
        **record_constants(record, kv_heads),
        "GROUP": group,
        "BLOCK_C": block_c,
        "BLOCK_S": ELEMENTS // (block_c * block_out),
        "BLOCK_OUT": block_out,
        "HAS_NEW": has_new,
        "WAITS": is_early,
    }
    return Launcher(
        decode_end_kernel, constants, num_warps=append_warps(record), maxnreg=REGISTERS, launch_pdl=is_early
    )
