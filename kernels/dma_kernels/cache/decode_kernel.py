"""The decode kernel: split-KV attention of a few queries to a cache, over quantized and unquantized tiles in one
launch.

The work of a kv head is divided into work items:

* one per step over its high tiles, read in 16 bits from sink and residual KV;
* one for the new KV, read from the model's tensors;
* two per step over its low tiles, read from page blocks.

The work items of all heads and rows form one sequence that the CTAs split evenly, however long each row is. So a CTA
may end one head and begin another. For each of its heads a CTA writes a split: a normalized partial output and its
log-sum-exp. The CTA that begins a head also writes where the head's splits are. The next launch
(:mod:`.split_kv_combine`) combines them and stores the new KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton.language as tl

from ..device.gluon import barrier, constexpr_function, gl, jit
from ..device.tiles import TILE, TILE_SHIFT
from .decode_mainloop import attend_high, attend_low, band_start
from .decode_mma import axis_layout, inverse_hadamard, load_queries, load_rotated_queries, mma_layout, scores_layout
from .formats import VALUE_GROUP
from .kernel_args import PageConfig
from .page_kernel import unquantized_row as _unquantized_row_triton

_LOW_ITEMS = tl.constexpr(2)
"""Work items of a step over low tiles (one tile per warp); a step over high tiles (16 keys per warp) has one. With 8
bits a low step reads 4.2 times the bytes of a high one, but high tiles are loaded without pipelining."""
_ROWS = tl.constexpr(32)
"""Batch rows whose work is computed at once."""

_unquantized_row = jit(_unquantized_row_triton.fn)


@dataclass(frozen=True)
class DecodeConfig(PageConfig):
    """Compile-time configuration of the decode kernel."""

    GROUP: int  # query heads per kv head
    LOW_QUERIES: int  # queries of a block in the loop over low tiles: 4 if no more are needed, else 8
    W: int  # warps of a CTA
    STEPS: int  # steps in which a warp loads the keys of a tile, and its values: 2, or 4
    STAGES: int  # steps in shared memory, per warp: ``2 * STEPS``, or a divisor of ``STEPS`` greater than 1
    HAS_WINDOW: bool  # whether there is a sliding window
    HAS_SOFTCAP: bool  # whether scores are capped
    USE_PDL: bool  # whether the next launch may start before this one ends (programmatic dependent launch)

    @property
    def GROUPS(self) -> int:
        """Groups of 64 channels of a padded value."""
        return max(1, self.BLOCK_DV // VALUE_GROUP)


class DecodeSizes(NamedTuple):
    """Runtime sizes of a decode call."""

    batch: int  # batch rows
    q_len: int  # queries of a row
    window: int  # sliding window
    diagonal_tiles: int  # tiles before a query's own tile that are high
    max_pages: int  # columns of the page table
    residual_tiles: int  # tiles of the residual KV
    sink_tiles: int  # tiles of the sink KV


class HeadWork(NamedTuple):
    """Work of a kv head. Tiles that are high for some queries and low for others count as both."""

    first_pos: Any  # position of the first query
    visible_tile: Any  # first visible tile
    band_tile: Any  # first tile of the band
    sinks: Any  # visible sink tiles before the band
    high_steps: Any  # steps over high tiles and the new KV
    low_first: Any  # first low tile
    low_end: Any  # end of the low tiles
    items: Any  # work items, at least 1


@jit
def _head_work(stored, sizes, CONFIG: tl.constexpr, HAS_NEW: tl.constexpr):
    """Return the :class:`HeadWork` of heads whose rows have ``stored`` keys."""
    W: tl.constexpr = CONFIG.W
    first_pos = stored if HAS_NEW else stored - sizes.q_len
    visible_tile = first_pos * 0
    if CONFIG.HAS_WINDOW:
        visible_tile = gl.maximum(first_pos - sizes.window + 1, 0) >> TILE_SHIFT
    last_tile = (stored - 1) >> TILE_SHIFT
    band_tile = gl.maximum(band_start(first_pos, sizes.diagonal_tiles), visible_tile)
    sinks = gl.maximum(gl.minimum(sizes.sink_tiles, band_tile) - visible_tile, 0)
    high_steps = (sinks + gl.maximum(last_tile + 1 - band_tile, 0)) * (TILE // (16 * W)) + (1 if HAS_NEW else 0)
    low_first = gl.maximum(visible_tile, sizes.sink_tiles)
    low_end = gl.maximum(band_start(first_pos + sizes.q_len - 1, sizes.diagonal_tiles), low_first)
    items = gl.maximum(high_steps + (low_end - low_first + W - 1) // W * _LOW_ITEMS, 1)
    return HeadWork(first_pos, visible_tile, band_tile, sinks, high_steps, low_first, low_end, items)


@jit
def _low_steps(item, high_steps):
    """Return the number of steps over low tiles that begin before a work item of a head."""
    return (gl.maximum(item - high_steps, 0) + _LOW_ITEMS - 1) // _LOW_ITEMS


@jit
def _first_item(i_cta, items_per_cta, extra_items):
    """Return the first work item of a CTA; ``extra_items`` CTAs, evenly spread, have one more than the others."""
    return i_cta * items_per_cta + i_cta * extra_items // gl.num_programs(0)


@jit
def _cta_of(item, items_per_cta, extra_items):
    """Return the CTA of a work item."""
    ctas = gl.num_programs(0)
    i_cta = (item.to(gl.float32) * (ctas / (items_per_cta * ctas + extra_items).to(gl.float32))).to(gl.int32)
    i_cta += gl.where(_first_item(i_cta + 1, items_per_cta, extra_items) <= item, 1, 0)
    return i_cta - gl.where(_first_item(i_cta, items_per_cta, extra_items) > item, 1, 0)


@jit
def _launch_dependents():
    """Let CTAs of the next launch start as SMs become free; they wait for this launch to end."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@constexpr_function
def _rows_layout(warps):
    """Layout of one number per pair of rows, ``[_ROWS, _ROWS]``."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@jit
def _row_items(lengths_ptr, first_row, sizes, CONFIG: tl.constexpr, HAS_NEW: tl.constexpr):
    """Return the work items of ``_ROWS`` batch rows; 0 past the last row."""
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _rows_layout(CONFIG.W)))
    stored = gl.load(lengths_ptr + row, mask=row < sizes.batch, other=0)
    items = _head_work(stored, sizes, CONFIG, HAS_NEW).items
    return gl.where(row < sizes.batch, items * CONFIG.KV_HEADS, 0)


@constexpr_function
def _outputs_layout(warps):
    """Layout for adding the outputs of all warps, ``[G, W, 64, C]``: a lane holds four consecutive channels."""
    return gl.BlockedLayout([1, warps, 4, 1], [1, 1, 16, 2], [1, 1, 1, warps], [2, 3, 1, 0])


@jit
def _to_shared(x):
    """Copy ``[W, 8]`` or ``[G, W, 64, 8]`` to shared memory, the latter with consecutive channels."""
    LAYOUT: tl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0] if len(x.shape) == 2 else [2, 3, 1, 0])
    return gl.allocate_shared_memory(x.dtype, x.shape, LAYOUT, x)


@jit
def _pad_queries(x, fill: tl.constexpr):
    """Pad the queries of ``[..., C]`` from 4 to 8 with ``fill``."""
    if x.shape[-1] == 4:
        both = gl.join(x, gl.zeros_like(x) + fill)
        if len(x.shape) == 2:
            x = gl.reshape(gl.permute(both, [0, 2, 1]), [x.shape[0], 8])
        else:
            x = gl.reshape(gl.permute(both, [0, 1, 3, 2]), [x.shape[0], x.shape[1], 8])
    return x


@jit
def _store_split(low, high, splits, index, CONFIG: tl.constexpr):
    """Combine the results of all warps and of both loops, and store a split.

    ``low`` and ``high`` are in shared memory: row maxima ``[W, 8]``, row sums ``[W, 8]`` and outputs ``[G, W, 64, 8]``.
    Outputs of low tiles are sums of rotated values; they are rotated back here.
    """
    ALL: tl.constexpr = _outputs_layout(CONFIG.W)
    OUT: tl.constexpr = gl.SliceLayout(1, ALL)
    WARPS: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, ALL))
    QUERY: tl.constexpr = axis_layout(OUT, 3, 2)
    m_low, m_high = low[0].load(WARPS), high[0].load(WARPS)
    m_i = gl.maximum(gl.max(m_low, 0), gl.max(m_high, 0))
    alpha_low = gl.exp2(m_low - m_i[None, :])
    alpha_high = gl.exp2(m_high - m_i[None, :])
    l_i = gl.sum(low[1].load(WARPS) * alpha_low, 0) + gl.sum(high[1].load(WARPS) * alpha_high, 0)
    channel = gl.arange(0, 64, layout=axis_layout(OUT, 3, 1))[None, :, None]
    channel += gl.arange(0, high[2].shape[0], layout=axis_layout(OUT, 3, 0))[:, None, None] * 64
    acc = gl.sum(low[2].load(ALL) * alpha_low[None, :, None, :], 1)
    acc = inverse_hadamard(acc, channel, CONFIG.LAYOUT.value_hadamard, OUT)
    acc += gl.sum(high[2].load(ALL) * alpha_high[None, :, None, :], 1)
    l_i = gl.convert_layout(l_i, QUERY)
    is_empty = l_i == 0.0
    acc = acc / gl.where(is_empty, 1.0, l_i)[None, None, :]
    lse = gl.convert_layout(m_i, QUERY) + gl.log2(gl.where(is_empty, 1.0, l_i))
    lse = gl.where(is_empty, float("-inf"), lse)
    row = index * 8 + gl.arange(0, 8, layout=QUERY)
    mask = (row[None, None, :] >= 0) & (channel < CONFIG.DV)
    gl.store(splits.out + (row[None, None, :] * CONFIG.DV + channel), acc, mask=mask)
    gl.store(splits.lse + row, lse)


@jit(do_not_specialize=["batch", "q_len", "window", "diagonal_tiles", "max_pages", "residual_tiles", "sink_tiles"])
def decode_kernel(
    query, key, value, cache, splits, softcap, logit_scale,
    batch, q_len, window, diagonal_tiles, max_pages, residual_tiles, sink_tiles, CONFIG: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of all rows; any number of CTAs.

    ``query``, ``key`` and ``value`` are ``Strided``. New keys and values are neither stored nor counted in ``lengths``
    yet; without any, their pointers are ``None``. ``softcap`` and ``logit_scale`` are in base 2. The integers are those
    of :class:`DecodeSizes`, ``CONFIG`` is a :class:`DecodeConfig`.
    """
    HAS_NEW: tl.constexpr = key.ptr is not None
    sizes = DecodeSizes(batch, q_len, window, diagonal_tiles, max_pages, residual_tiles, sink_tiles)
    if CONFIG.USE_PDL:
        _launch_dependents()
    GROUP: tl.constexpr = CONFIG.GROUP
    W: tl.constexpr = CONFIG.W
    G: tl.constexpr = CONFIG.GROUPS
    C: tl.constexpr = CONFIG.LOW_QUERIES
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = scores_layout(W)
    blocks = (GROUP * sizes.q_len + 7) // 8
    i_cta = gl.program_id(0)
    # ---- the work items of all heads, and those of this CTA
    total = 0
    for first_row in range(0, sizes.batch, _ROWS):
        row_items = _row_items(cache.lengths, first_row, sizes, CONFIG, HAS_NEW)
        total += gl.sum(row_items, 0)
    # At least one step over low tiles per CTA; some CTAs may get nothing.
    items_per_cta = total // gl.num_programs(0)
    extra_items = gl.where(items_per_cta < _LOW_ITEMS, 0, total - items_per_cta * gl.num_programs(0))
    items_per_cta = gl.maximum(items_per_cta, _LOW_ITEMS)
    start = _first_item(i_cta, items_per_cta, extra_items)
    end = gl.minimum(_first_item(i_cta + 1, items_per_cta, extra_items), total)
    item = start
    seen_rows = 0
    seen_items = 0
    row = 0 * start
    row_start = 0 * start
    row_end = gl.where(sizes.batch > 1, 0, total)
    while item < end:
        # ---- the head of the next work item
        if item >= row_end:
            row_items = _row_items(cache.lengths, seen_rows, sizes, CONFIG, HAS_NEW)
            while seen_items + gl.sum(row_items, 0) <= item:
                seen_items += gl.sum(row_items, 0)
                seen_rows += _ROWS
                row_items = _row_items(cache.lengths, seen_rows, sizes, CONFIG, HAS_NEW)
            o_r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _rows_layout(W)))
            o_c = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _rows_layout(W)))
            row_ends = seen_items + gl.sum(gl.where(o_c[None, :] <= o_r[:, None], row_items[None, :], 0), 1)
            ended = gl.sum((row_ends <= item).to(gl.int32), 0)
            row_start = seen_items + gl.sum(gl.where(o_c < ended, row_items, 0), 0)
            row_end = seen_items + gl.sum(gl.where(o_c <= ended, row_items, 0), 0)
            row = seen_rows + ended
        i_b = row.to(gl.int64)
        stored = gl.load(cache.lengths + i_b)
        work = _head_work(stored, sizes, CONFIG, HAS_NEW)
        i_head = (item - row_start) // work.items
        head_start = row_start + i_head * work.items
        i_kv = i_head.to(gl.int64)
        first = item - head_start
        last = gl.minimum(end - head_start, work.items)
        first_tile = work.low_first + _low_steps(first, work.high_steps) * W
        end_tile = gl.minimum(work.low_first + _low_steps(last, work.high_steps) * W, work.low_end)
        # The next split has the next CTA, the next head, or both. So the sum of their indices numbers the splits.
        split = i_cta + i_b * CONFIG.KV_HEADS + i_kv
        if first == 0:
            head = splits.heads + (i_b * CONFIG.KV_HEADS + i_kv) * 3
            gl.store(head, split)
            gl.store(head + 1, _cta_of(head_start + work.items - 1, items_per_cta, extra_items) - i_cta + 1)
            gl.store(head + 2, stored)
        unquantized_row = _unquantized_row(cache, i_b)
        for i_block in range(blocks):
            column = i_block * 8 + gl.arange(0, 8, layout=axis_layout(MMA, 3, 2))
            high_pos = (work.first_pos + column // GROUP)[None, None, :]
            column = i_block * 8 + gl.arange(0, C, layout=axis_layout(SUMS, 3, 2))
            low_pos = (work.first_pos + column // GROUP)[None, None, :]
            # ---- low tiles; their results wait in shared memory
            m_i = gl.full([W, C], -1.0e30, gl.float32, gl.SliceLayout(1, SUMS))
            l_i = gl.full([W, 8, C], 0.0, gl.float32, SUMS)
            acc = gl.full([G * W, 64, C], 0.0, gl.float32, SUMS)
            if first_tile < end_tile:
                if CONFIG.LAYOUT.key_hadamard > 1:
                    q = load_rotated_queries(query, i_b, i_kv, i_block, sizes.q_len, C, CONFIG)
                else:
                    q = load_queries(query, i_b, i_kv, i_block, sizes.q_len, C, False, CONFIG)
                acc, l_i, m_i = attend_low(
                    q, cache, cache.page_table + i_b * sizes.max_pages, i_kv, first_tile, end_tile, low_pos, sizes,
                    softcap, logit_scale, CONFIG,
                )  # fmt: skip
            low = (
                _to_shared(_pad_queries(m_i, -1.0e30)), _to_shared(_pad_queries(gl.sum(l_i, 1), 0.0)),
                _to_shared(gl.reshape(_pad_queries(acc, 0.0), [G, W, 64, 8])),
            )  # fmt: skip
            # ---- high tiles
            key_base, value_base = key.ptr, value.ptr
            if HAS_NEW:
                key_base += i_b * key.stride_b + i_kv * key.stride_h
                value_base += i_b * value.stride_b + i_kv * value.stride_h
            m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
            l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
            acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
            if first < work.high_steps:
                q = load_queries(query, i_b, i_kv, i_block, sizes.q_len, 8, True, CONFIG)
                acc, l_i, m_i = attend_high(
                    q, key, key_base, value, value_base, cache, unquantized_row, i_kv, work, first,
                    gl.minimum(last, work.high_steps), stored, high_pos, sizes, softcap, logit_scale, CONFIG, HAS_NEW,
                )  # fmt: skip
            # Channel 8 g + i is in row 8 i + g.
            acc = gl.reshape(gl.permute(gl.reshape(acc, [G, W, 8, 8, 8]), [0, 1, 3, 2, 4]), [G, W, 64, 8])
            high = _to_shared(m_i), _to_shared(gl.sum(l_i, 1)), _to_shared(acc)
            _store_split(low, high, splits, split * blocks + i_block, CONFIG)
        barrier()
        item = head_start + last
