"""The launch that ends a decode step: parts of heads become outputs, new keys and values are stored and counted.

It follows the launch of :mod:`.decode_kernel`, beside whose last programs its own may start. They wait for those to
end: where the parts of a head are, and how many keys were stored, they read from what that launch left.

The queries of all heads lie in one line, which the programs share: a step of many heads would otherwise be several
waves of programs, each of which waits for memory three times.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..device.arithmetic import narrow
from ..numerics.formats import TILE
from ..runtime.chip import processors, starts_early
from ..runtime.launch import Launcher
from .append import REGISTERS, append_to_head, append_warps, record_constants, where_stored
from .codes import VALUE_GROUP, Record
from .decode_operands import COLUMNS
from .storage import LayerStorage

QUERIES = 8
"""Of a program where there are many; with 16 it spills registers."""
ELEMENTS = {1: 8192, QUERIES: 2048}
"""Of parts that a program has in registers, by its queries: where each finds its parts takes registers too."""

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _store_raw(
    x, tail_ptr, sink_ptr, row, i_kv, position, mask, stride_tail, stride_sink, ring_tiles, sink_tiles,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store tokens ``[N, D]`` at their positions in the tail and, where these are sinks, there."""
    o_d = tl.arange(0, BLOCK)[None, :]
    tile = position >> _TILE_SHIFT
    entry = ((i_kv * ring_tiles + tile % ring_tiles) * _TILE + (position & (_TILE - 1))) * D
    sink = (i_kv * sink_tiles * _TILE + position) * D
    tl.store(tail_ptr + ((row * stride_tail + entry)[:, None] + o_d), x, mask=mask[:, None] & (o_d < D))
    mask = mask & (tile < sink_tiles)
    tl.store(sink_ptr + ((row * stride_sink + sink)[:, None] + o_d), x, mask=mask[:, None] & (o_d < D))


@triton.jit
def _combine(
    first_column, heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, raw_rows_ptr,
    stride_ob, stride_oh, stride_ot, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, heads, q_len, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_OUT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of ``BLOCK_C`` queries; the first of a group stores its key and value if they are new."""
    columns = GROUP * q_len
    column = first_column + tl.arange(0, BLOCK_C)
    i_head = column // columns
    column = column % columns
    is_query = i_head < heads
    i_b = (i_head // KV_HEADS).to(tl.int64)
    i_kv = i_head % KV_HEADS
    i_t = (column // GROUP).to(tl.int64)
    q_head = i_kv * GROUP + column % GROUP
    o_v = tl.arange(0, BLOCK_OUT)
    o_s = tl.arange(0, BLOCK_S)
    if key_ptr is not None:
        is_token = is_query & (column % GROUP == 0)
        row = i_b
        if raw_rows_ptr is not None:
            row = tl.load(raw_rows_ptr + i_b, mask=is_token, other=0).to(tl.int64)
        o_d = tl.arange(0, BLOCK_D)[None, :]
        offset = (i_b * stride_kb + i_kv * stride_kh + i_t * stride_kt)[:, None] + o_d.to(tl.int64) * stride_kd
        key = tl.load(key_ptr + offset, mask=is_token[:, None] & (o_d < D), other=0.0)
        o_d = tl.arange(0, BLOCK_DV)[None, :]
        offset = (i_b * stride_vb + i_kv * stride_vh + i_t * stride_vt)[:, None] + o_d.to(tl.int64) * stride_vd
        value = tl.load(value_ptr + offset, mask=is_token[:, None] & (o_d < DV), other=0.0)
    # Who has to wait goes through all once before, of no head, so that the instructions are in the cache then.
    for attempt in range(0 if WAITS else 1, 2):
        if WAITS:  # noqa: SIM102 (a constexpr branch)
            if attempt == 1:
                gdc_wait()
        m_c = is_query & (attempt == 1)
        first = tl.load(heads_ptr + i_head * 3, mask=m_c, other=0)
        parts = tl.load(heads_ptr + i_head * 3 + 1, mask=m_c, other=0)
        if key_ptr is not None:
            position = tl.load(heads_ptr + i_head * 3 + 2, mask=m_c, other=0) + i_t
            is_stored = is_token & (attempt == 1) & (position >= 0)
            _store_raw(
                key, key_tail_ptr, key_sink_ptr, row, i_kv, position, is_stored, stride_key_tail, stride_key_sink,
                ring_tiles, sink_tiles, D, BLOCK_D,
            )  # fmt: skip
            _store_raw(
                value, value_tail_ptr, value_sink_ptr, row, i_kv, position, is_stored, stride_value_tail,
                stride_value_sink, ring_tiles, sink_tiles, DV, BLOCK_DV,
            )  # fmt: skip
        m_i = tl.full([BLOCK_C], -1.0e30, tl.float32)
        l_i = tl.zeros([BLOCK_C], tl.float32)
        if sinks_ptr is not None:
            sink = 1.4426950408889634 * tl.load(sinks_ptr + q_head, mask=m_c, other=0.0).to(tl.float32)
            m_i = tl.maximum(sink, -1.0e30)
            l_i = tl.where(sink > float("-inf"), 1.0, 0.0)
        acc = tl.zeros([BLOCK_C, BLOCK_OUT], tl.float32)
        for i_s in range(0, tl.maximum(tl.max(parts, 0), 1), BLOCK_S):
            part = i_s + o_s
            blocks = (columns + _COLUMNS - 1) // _COLUMNS
            entry = (first[:, None] + part[None, :]).to(tl.int64) * (blocks * _COLUMNS) + column[:, None]
            m_s = m_c[:, None] & (part[None, :] < parts[:, None])
            lse = tl.load(partial_lse_ptr + entry, mask=m_s, other=float("-inf"))
            x = tl.load(
                partial_ptr + (entry[:, :, None] * DV + o_v[None, None, :]),
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
        tl.store(lse_ptr + (i_b * KV_HEADS * GROUP + q_head) * q_len + i_t, lse, mask=m_c)
        place = i_b * stride_ob + q_head.to(tl.int64) * stride_oh + i_t * stride_ot
        out = narrow(acc / total[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + (place[:, None] + o_v[None, :]), out, mask=m_c[:, None] & (o_v < DV)[None, :])


@triton.jit(noinline=True)  # a loop around it keeps its constants in registers that it has not got
def _encode(
    heads_ptr, key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr,
    raw_rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    i_task, new_len, slots, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr, RECORD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
):  # fmt: skip
    """Encode a kv head's keys, or values, of the tile that new ones complete, if they do."""
    append_to_head(
        key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr,
        raw_rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
        stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
        (i_task // 2).to(tl.int64), 0, i_task % 2 == 1, tl.load(heads_ptr + i_task // 2 * 3 + 2), new_len,
        slots, ring_tiles, sink_tiles,
        KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, BITS, KEY_HADAMARD, VALUE_HADAMARD, RECORD_WORDS, KEY_WORDS, False, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["combining", "heads", "q_len", "slots", "ring_tiles", "sink_tiles"])
def decode_end_kernel(
    heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, lengths_ptr,
    key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, body_ptr, pages_ptr, raw_rows_ptr,
    stride_ob, stride_oh, stride_ot, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    combining, heads, q_len, slots, ring_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr, RECORD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr, GROUP: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_E: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """End a step: the first ``combining`` programs have queries; the others, if there are new keys, tiles.

    Of the tiles that new keys complete, keys and values of the kv heads of all batch rows, ``heads``, each of the
    others encodes up to ``BLOCK_E``; and they count the new keys of rows.
    """
    i_program = tl.program_id(0)
    if i_program < combining:
        _combine(
            i_program * BLOCK_C, heads_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
            key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, raw_rows_ptr,
            stride_ob, stride_oh, stride_ot, stride_kb, stride_kh, stride_kt, stride_kd,
            stride_vb, stride_vh, stride_vt, stride_vd,
            stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, heads, q_len, ring_tiles,
            sink_tiles, KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, GROUP, BLOCK_C, BLOCK_S, BLOCK_OUT, WAITS,
        )  # fmt: skip
    elif key_ptr is not None:
        if WAITS:
            gdc_wait()
        encoding = tl.num_programs(0) - combining
        task = i_program - combining + tl.arange(0, BLOCK_E) * encoding
        is_task = task < 2 * heads
        stored = tl.load(heads_ptr + task // 2 * 3 + 2, mask=is_task, other=0)
        tl.store(lengths_ptr + task // (2 * KV_HEADS), stored + q_len, mask=is_task & (task % (2 * KV_HEADS) == 0))
        is_complete = is_task & (((tl.maximum(stored, 0) >> _TILE_SHIFT) + 1) * _TILE <= stored + q_len)
        if tl.max(is_complete.to(tl.int32), 0) > 0:
            for i_e in range(BLOCK_E):
                i_task = i_program - combining + i_e * encoding
                if i_task < 2 * heads:
                    _encode(
                        heads_ptr, key_ptr, value_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr,
                        body_ptr, pages_ptr, raw_rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, stride_vb,
                        stride_vh, stride_vt, stride_vd, stride_key_tail, stride_value_tail, stride_key_sink,
                        stride_value_sink, stride_page, i_task, q_len, slots, ring_tiles, sink_tiles,
                        KV_HEADS, D, DV, BLOCK_D, BLOCK_DV, BITS, KEY_HADAMARD, VALUE_HADAMARD, RECORD_WORDS,
                        KEY_WORDS,
                    )  # fmt: skip


def launch_end(
    storage: LayerStorage,
    key: Tensor | None,
    value: Tensor | None,
    strides: tuple[int, ...],
    parts: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch the kernel.

    Args:
        storage: The cache.
        key: New ones, to be stored, if there are any; at most a tile.
        value: Likewise.
        strides: Of both.
        parts: What the launch before left: of each kv head where its parts are; outputs; their logarithms.
        sinks: One logit per query head.
        out: ``[B, Hq, T, Dv]``, channels next to each other.
        lse: Contiguous, ``[B, Hq, T]``.
    """
    batch, q_heads, q_len, _ = out.shape
    kv_heads = storage.key_tail.shape[1]
    heads = batch * kv_heads
    columns = batch * q_heads * q_len
    block_c = 1 if columns <= 2 * processors(out.device) else QUERIES
    combining = triton.cdiv(columns, block_c)
    encoding = 0 if key is None else min(2 * heads, processors(out.device))
    block_e = triton.next_power_of_2(triton.cdiv(2 * heads, max(encoding, 1)))
    _end_launcher(storage.record, kv_heads, q_heads // kv_heads, block_c, block_e, starts_early(out.device))(
        (combining + encoding, 1, 1),
        *parts, None if sinks is None else sinks.contiguous(), out, lse, storage.lengths,
        key, value, *where_stored(storage),
        *out.stride()[:3], *strides, *storage.strides,
        combining, heads, q_len, storage.slots, storage.ring // TILE, storage.key_sink.shape[2] // TILE,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _end_launcher(record: Record, kv_heads: int, group: int, block_c: int, block_e: int, is_early: bool) -> Launcher:
    block_out = max(VALUE_GROUP, triton.next_power_of_2(record.value_dim))
    constants = {
        **record_constants(record, kv_heads),
        "GROUP": group,
        "BLOCK_C": block_c,
        "BLOCK_S": ELEMENTS[block_c] // (block_c * block_out),
        "BLOCK_OUT": block_out,
        "BLOCK_E": block_e,
        "WAITS": is_early,
    }
    return Launcher(
        decode_end_kernel, constants, num_warps=append_warps(record), maxnreg=REGISTERS, launch_pdl=is_early
    )
