"""The warp-specialized prefill kernel for Hopper, in Gluon, for long calls.

One producer warp issues TMA loads of keys and values. ``GROUPS`` consumer warpgroups of 64 query rows each compute
attention with them, so a tile is read from L2 once for ``64 * GROUPS`` queries. While one warpgroup waits for its own
MMAs, the others compute exponentials and conversions.

All warpgroups of a CTA iterate over the union range of their rows; each skips the stages of tiles that it does not
need. 64 query positions lie in one tile, those of a CTA in at most two (four warpgroups: three).

With a skip threshold each warpgroup votes on a low tile after the Q·K product (:mod:`.skipping`). A skipped tile costs
that product and the row maxima. Its values are loaded anyway, because other warpgroups may need them.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.gluon import aggregate, reinterpret
from ...device.tiles import TILE, TILE_SHIFT
from .attend import HighTiles, count_tiles, narrow, product_layout, row_indices, store_lse, store_output
from .mask import Mask, bitmask_pointers, zero_out_of_bounds
from .mma import column_chunks, finish_pv, inverse_power_of_two, is_16bit, issue_pv_mma, to_mma_operand, value_chunk
from .pipeline import KVPipeline, KVSource, block_view, copy, first_stage, vote_barrier, wait_for_operands
from .skipping import SkipVote, init_vote, init_votes
from .softmax import finite_or_zero, init_softmax, modify_scores
from .tile_range import (
    BLOCK,
    ROWS,
    ROWS_SHIFT,
    BlockInfo,
    SeqInfo,
    bitmask_range,
    clamp,
    first_band_tile,
    load_seq_info,
    schedule,
)

_PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class _Params:
    """Parameters of the producer and the consumers."""

    q_desc: Any  # queries of high tiles, 16-bit ``[B, Hq, Tq, D]``
    q_low_desc: Any  # queries of low tiles, 8-bit or 16-bit, likewise
    q_smem: Any  # ``[WARPGROUPS, 1, 1, 64, D]``
    q_low_smem: Any  # likewise; if 16-bit, the same memory as ``q_smem``
    q_full: Any  # barrier of the queries
    i_b: Any  # batch row
    i_h: Any  # query head
    start: Any  # position of the first query
    source: KVSource  # keys and values in global memory
    pipe: KVPipeline  # keys and values in shared memory
    seq: SeqInfo  # positions of the batch row
    block: BlockInfo  # queries of the CTA
    mask: Mask  # masks of the batch row; the bitmask begins at the first query of the head
    out_ptr: Any  # output of the head ``[Tq, Dv]``
    stride_ot: Any  # stride between its queries
    lse_ptr: Any  # log of the denominator, fp32 ``[Tq]``
    q_descale_ptr: Any  # converts low scores, before the key descale, to base-2 logits, fp32 ``[Tq]``
    mean_offset: Any  # offset from there to the products of query and mean key; a pointer would cost registers
    k_descale_ptr: Any  # descale of low keys, fp32, indexed by tile; or ``None``
    v_descale_ptr: Any  # descale of low values, fp32 ``[Dv]``; or ``None``
    sinks_ptr: Any  # sink logit, or ``None``
    tile_counts_ptr: Any  # int64 ``[2]``, or ``None``
    storage_tiles: Any  # tiles of low keys of a head
    softcap: Any  # in base 2, or ``None``
    logit_scale: Any  # converts high scores to base-2 logits
    skip_threshold: Any  # in base 2, or ``None``
    CONFIG: Any  # :class:`~.host.WarpSpecializedConstants`
    CHECKS_VALUES: Any  # whether invisible values may be NaN

    @gluon.jit
    def load_mean_logits(self, rows, m_row):
        """Return the smoothing bias of rows, in base-2 logits."""
        return gl.load(self.q_descale_ptr + self.mean_offset + rows, mask=m_row, other=0.0) * self.logit_scale


@gluon.jit
def _issue_queries(params, desc, smem):
    row = params.start - params.seq.q_offset
    for g in gl.static_range(params.pipe.WARPGROUPS):
        copy(desc, [params.i_b, params.i_h, row + g * ROWS, 0], params.q_full, smem.index(g))


@gluon.jit
def _produce(params):
    """Load the CTA's queries, then every tile of keys and values as soon as a stage is free."""
    pipe = params.pipe
    source = params.source
    STAGES: gl.constexpr = pipe.k_smem.shape[0]
    D: gl.constexpr = params.q_smem.shape[4]
    IS_FP8: gl.constexpr = pipe.v_smem.dtype == gl.float8e4nv
    DV: gl.constexpr = pipe.v_smem.shape[1 if IS_FP8 else 4]
    IS_LOW_16BIT: gl.constexpr = is_16bit(pipe.k_smem.dtype)
    Q_ELEMENTS: gl.constexpr = pipe.WARPGROUPS * ROWS * D
    LOW_BYTES: gl.constexpr = TILE * (D * (2 if IS_LOW_16BIT else 1) + DV * (1 if IS_FP8 else 2))
    mbarrier.expect(params.q_full, Q_ELEMENTS * (2 if IS_LOW_16BIT else 3))
    _issue_queries(params, params.q_desc, params.q_smem)
    if not IS_LOW_16BIT:
        _issue_queries(params, params.q_low_desc, params.q_low_smem)
    blocks = params.block.high_precision_range()
    stage = first_stage()
    for t in range(blocks.count()):
        i_block = blocks.at(t)
        full = pipe.full.index(stage.index)
        pipe.acquire(stage.index)
        mbarrier.expect(full, BLOCK * (D + DV) * 2)
        source.issue_block_k(i_block, full, block_view(pipe.k_smem.index(stage.index), source.k_desc))
        source.issue_block_v(i_block, full, block_view(pipe.v_smem.index(stage.index), source.v_desc))
        stage = stage.next(STAGES)
    if IS_LOW_16BIT:
        # Low queries replace the high ones: shared memory has no room for both.
        pipe.acquire(STAGES)
        mbarrier.expect(params.q_full, Q_ELEMENTS * 2)
        _issue_queries(params, params.q_low_desc, params.q_low_smem)
    tiles = params.block.low_precision_range()
    for t in range(tiles.count()):
        i_tile = tiles.at(t)
        full = pipe.full.index(stage.index)
        pipe.acquire(stage.index)
        mbarrier.expect(full, LOW_BYTES)
        source.issue_tile_k(i_tile, 0, full, pipe.k_smem.index(stage.index))
        source.issue_tile_v(i_tile, 0, full, pipe.v_smem.index(stage.index))
        stage = stage.next(STAGES)
    pipe.drain()


@aggregate
class _LowTiles:
    """State of a consumer's loop over low tiles."""

    params: _Params  # parameters of the CTA
    q: Any  # queries ``[64, D]``
    start: Any  # position of the first query
    row_scale: Any  # converts scores, before the key descale, to base-2 logits, fp32 ``[64]``
    qk_bias: Any  # added to logits before a softcap, fp32 ``[64]``
    mask: Mask  # masks of the warpgroup's rows
    vote: SkipVote  # the predicate of tile skipping

    @gluon.jit
    def attend(self, i_tile, stage, softmax, accs, n_kept, IS_MASKED: gl.constexpr):
        """Attend to the tile of a filled stage; return the new softmax, accumulators and count of kept tiles."""
        pipe = self.params.pipe
        k_smem = pipe.k_smem.index(stage.index)
        V_DTYPE: gl.constexpr = pipe.v_smem.dtype
        IS_FP8: gl.constexpr = gl.float8e4nv == V_DTYPE
        DV: gl.constexpr = pipe.v_smem.shape[1 if IS_FP8 else 4]
        WIDTH: gl.constexpr = accs[0].shape[1]
        S_LAYOUT: gl.constexpr = product_layout(TILE, 16 if is_16bit(k_smem.dtype) else 8)
        O_LAYOUT: gl.constexpr = accs[0].type.layout
        S_DTYPE: gl.constexpr = gl.int32 if k_smem.dtype == gl.int8 else gl.float32
        # No registers are left to keep fp32 probabilities during the P·V product.
        SUM_FIRST: gl.constexpr = WIDTH < DV or (is_16bit(k_smem.dtype) and not IS_FP8)
        words = None
        if IS_MASKED:
            if self.params.CHECKS_VALUES and not IS_FP8:
                for half in gl.static_range(2):
                    rows = pipe.v_smem.index(stage.index).reshape([TILE, DV]).slice(half * BLOCK, BLOCK)
                    zero_out_of_bounds(rows, i_tile * TILE + half * BLOCK, self.mask, DV)
            if self.mask.bitmask_ptr is not None:
                words = self.mask.load_bitmask(i_tile)
        zero = gl.zeros([ROWS, TILE], S_DTYPE, S_LAYOUT)
        s = warpgroup_mma(self.q, k_smem.permute([1, 0]), zero, use_acc=False, is_async=True)
        scale = self.row_scale
        if self.params.k_descale_ptr is not None:
            scale = scale * gl.load(self.params.k_descale_ptr + i_tile)
        s = warpgroup_mma_wait(0, deps=[s])
        s, scale = modify_scores(
            s, scale, self.qk_bias, self.params.softcap, self.mask, IS_MASKED, words, self.start, i_tile * TILE, True
        )
        keep = True
        if self.vote.bound is not None:
            keep = self.vote.keeps(s, scale, i_tile)
        if keep:
            self.vote.announce(i_tile)
            p, alpha, softmax = softmax.update(s, scale, gl.zeros_like(scale))
            if SUM_FIRST:
                softmax = softmax.update_row_sum(p, alpha)
            operand = to_mma_operand(p, V_DTYPE, O_LAYOUT)
            v = pipe.v_smem.index(stage.index)
            if not IS_FP8:
                v = v.reshape([TILE, DV])
            product = issue_pv_mma(accs[0], operand, alpha, value_chunk(v, 0, WIDTH))
            if not SUM_FIRST:
                softmax = softmax.update_row_sum(p, alpha)
            accs = finish_pv(accs, product, operand, alpha, v)
            n_kept = n_kept + 1
        return softmax, accs, n_kept


@aggregate
class _Queries:
    """The 64 queries of a consumer warpgroup, and their keys as positions."""

    first: Any  # index of the first query; may be negative
    tile: Any  # its tile
    are_present: Any  # whether the call holds one of the queries
    reach: Any  # high tiles after a query's own
    mask: Mask  # masks of the queries
    kv_start: Any  # union range: keys that some query attends to
    kv_stop: Any
    full_start: Any  # unmasked range: keys that all of them attend to
    full_stop: Any


@aggregate
class _LowRange:
    """Low tiles ``start..stop`` of a warpgroup, of which ``full_start..full_stop`` are not masked."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


@gluon.jit
def _low_ranges(params, queries, tiles):
    """Return the low tiles of a warpgroup before the band and after it, of the ``tiles`` that the CTA loads."""
    block = params.block
    band_tile = first_band_tile(queries.tile, block.diagonal_tiles, block.exact_tiles)
    stop = gl.where(queries.are_present, gl.maximum(gl.minimum(tiles.stop, band_tile), tiles.start), tiles.start)
    start_2 = gl.where(
        queries.are_present,
        gl.minimum(gl.maximum(tiles.start_2, queries.tile + queries.reach + 1), tiles.stop_2), tiles.stop_2,
    )  # fmt: skip
    before = _LowRange(start=tiles.start, full_start=tiles.start, full_stop=stop, stop=stop)
    after = _LowRange(start=start_2, full_start=start_2, full_stop=tiles.stop_2, stop=tiles.stop_2)
    if params.CONFIG.masks_low:
        full_start, full_stop = (queries.full_start + TILE - 1) >> TILE_SHIFT, queries.full_stop >> TILE_SHIFT
        before = _clamp_range(clamp(queries.kv_start >> TILE_SHIFT, tiles.start, stop), full_start, full_stop, stop)
        stop_2 = tiles.stop_2
        if queries.mask.window is not None:
            stop_2 = clamp((queries.kv_stop + TILE - 1) >> TILE_SHIFT, start_2, tiles.stop_2)
        after = _clamp_range(start_2, full_start, full_stop, stop_2)
    return before, after


@gluon.jit
def _clamp_range(start, full_start, full_stop, stop):
    full_start = clamp(full_start, start, stop)
    return _LowRange(start=start, full_start=full_start, full_stop=clamp(full_stop, full_start, stop), stop=stop)


@gluon.jit
def _attend_to_high(params, queries, high, softmax, acc):
    """Attend to the high tiles; return also the stage after them. Skip tiles that are high for other warpgroups."""
    pipe = params.pipe
    block = params.block
    mask = queries.mask
    D: gl.constexpr = pipe.k_smem.shape[2]
    DV: gl.constexpr = acc.shape[1]
    V_DTYPE: gl.constexpr = params.out_ptr.dtype.element_ty
    blocks = block.high_precision_range()
    stage = first_stage()
    for t in range(blocks.count()):
        i_block = blocks.at(t)
        i_tile = i_block >> 1
        k_start = i_block * BLOCK
        # Computed here: a value that lives across the loop is spilled.
        band_tile = first_band_tile(queries.tile, block.diagonal_tiles, block.exact_tiles)
        is_band = (i_tile >= band_tile) & (i_tile <= queries.tile + queries.reach)
        pipe.wait(stage)
        is_near = k_start < queries.kv_stop
        if mask.window is not None:
            is_near = is_near & (k_start + BLOCK > queries.kv_start)
        if queries.are_present & is_near & ((i_tile < block.sink_tiles) | is_band):
            v = block_view(pipe.v_smem.index(stage.index), params.source.v_desc).reshape([BLOCK, DV])
            if params.CHECKS_VALUES:
                zero_out_of_bounds(v, k_start, mask, DV)
            words = None
            if mask.bitmask_ptr is not None:
                words = mask.load_bitmask(i_tile) >> (i_block & 1) * 16
            k = block_view(pipe.k_smem.index(stage.index), params.source.k_desc).reshape([BLOCK, D])
            p, alpha, softmax = high.attend(k, k_start, words, softmax, V_DTYPE)
            acc = warpgroup_mma_wait(0, deps=[issue_pv_mma(acc, p, alpha, v)])
        stage = pipe.release_and_advance(stage)
    return softmax, acc, stage


@gluon.jit
def _attend_to_low(low, before, after, tiles, softmax, stage, accs):
    """Attend to the low tiles; return also the number of tiles that were not skipped."""
    pipe = low.params.pipe
    IS_CAUSAL: gl.constexpr = low.params.block.IS_CAUSAL
    MASKS_LOW: gl.constexpr = low.params.CONFIG.masks_low
    n_kept = gl.to_tensor(0)
    n_between = tiles.stop - before.stop + after.start - tiles.start_2
    n_after = tiles.stop - before.stop if IS_CAUSAL else tiles.stop_2 - after.stop
    stage = pipe.skip(stage, before.start - tiles.start)
    # A range is two runs: masked tiles and the full ones after them, then the masked tiles at its end.
    RUNS: gl.constexpr = (2 if IS_CAUSAL else 4) if MASKS_LOW else 1
    for run in range(RUNS):
        full_start, stop = before.full_start, before.full_stop
        if MASKS_LOW:
            start = before.start
            if run == 1:
                start, full_start, stop = before.full_stop, before.stop, before.stop
            if not IS_CAUSAL:
                if run == 2:
                    stage = pipe.skip(stage, n_between)
                    start, full_start, stop = after.start, after.full_start, after.full_stop
                if run == 3:
                    start, full_start, stop = after.full_stop, after.stop, after.stop
            for i_tile in range(start, full_start):
                pipe.wait(stage)
                softmax, accs, n_kept = low.attend(i_tile, stage, softmax, accs, n_kept, True)
                stage = pipe.release_and_advance(stage)
        pipe.wait(stage, full_start < stop)
        for i_tile in range(full_start, stop):
            softmax, accs, n_kept = low.attend(i_tile, stage, softmax, accs, n_kept, False)
            stage = pipe.release_and_advance(stage)
            pipe.wait(stage, i_tile + 1 < stop)
    pipe.skip(stage, n_after)
    return softmax, accs, n_kept


@gluon.jit
def _store(params, queries, accs, scale, lse):
    """Store the output, ``accs`` times ``scale``, and the log of the denominator."""
    WIDTH: gl.constexpr = accs[0].shape[1]
    O_LAYOUT: gl.constexpr = accs[0].type.layout
    HEAD_DIM: gl.constexpr = params.CONFIG.head_dim
    scale = gl.convert_layout(scale, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    for chunk in gl.static_range(len(accs)):
        result = accs[chunk] * scale[:, None]
        if params.v_descale_ptr is not None:
            o_d = chunk * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, O_LAYOUT))
            result = result * gl.load(params.v_descale_ptr + o_d, mask=o_d < HEAD_DIM, other=0.0)[None, :]
        result = narrow(result, params.out_ptr.dtype.element_ty)
        store_output(params.out_ptr, result, queries.first, params.seq.q_len, params.stride_ot, chunk * WIDTH, HEAD_DIM)
    store_lse(params.lse_ptr, lse, queries.first, params.seq.q_len)


@gluon.jit
def _consume(params, G: gl.constexpr):
    """Compute the output of the ``G``-th 64 query positions of the CTA."""
    pipe = params.pipe
    block = params.block
    seq = params.seq
    pipe.release_all()
    softcap = params.softcap
    IS_FP8: gl.constexpr = pipe.v_smem.dtype == gl.float8e4nv
    D: gl.constexpr = pipe.k_smem.shape[2]
    DV: gl.constexpr = pipe.v_smem.shape[1 if IS_FP8 else 4]
    IS_LOW_16BIT: gl.constexpr = is_16bit(pipe.k_smem.dtype)
    S_LAYOUT: gl.constexpr = product_layout(TILE, 16 if IS_LOW_16BIT else 8)
    WIDTH: gl.constexpr = min(DV, 128) if IS_FP8 else DV  # of a product, with its own accumulator in FP8
    O_LAYOUT: gl.constexpr = product_layout(WIDTH, 8 if IS_FP8 else 16)
    O_HIGH_LAYOUT: gl.constexpr = product_layout(DV, 16)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    H_ROW: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK, 16))

    # ---- the queries and their keys
    start = params.start + G * ROWS
    q_tile = start >> TILE_SHIFT
    are_present = start < seq.q_offset + seq.q_len
    first = start - seq.q_offset
    mask = params.mask
    kv_start, kv_stop = mask.union_range(block.kv_start, block.kv_stop, start, start + ROWS)
    full_start, full_stop = mask.unmasked_range(start, start + ROWS)
    if mask.bitmask_ptr is not None:
        full_stop = full_start
    rows, m_row = row_indices(first, seq.q_len, ROW)
    row_scale = gl.load(params.q_descale_ptr + rows, mask=m_row, other=1.0)
    softmax = init_softmax(S_LAYOUT, 8.0 if IS_FP8 else 0.0)
    # Smoothing subtracts a constant from a row's logits. A plain softmax is invariant to it, so it is only added back
    # to the log of the denominator. A softcap is not, so it is added back to the logits of smoothed keys first.
    qk_bias = gl.zeros([ROWS], gl.float32, ROW)
    if params.CONFIG.has_mean and softcap is not None:
        qk_bias = finite_or_zero(params.load_mean_logits(rows, m_row))
    if mask.bitmask_ptr is not None:
        WORDS: gl.constexpr = softmax.row_sum.type.layout
        mask = mask.with_bitmask(bitmask_pointers(mask.bitmask_ptr, first, seq.q_len, params.storage_tiles, WORDS))
    queries = _Queries(
        first=first, tile=q_tile, are_present=are_present,
        reach=0 if block.IS_CAUSAL else block.diagonal_tiles, mask=mask, kv_start=kv_start, kv_stop=kv_stop,
        full_start=full_start, full_stop=full_stop,
    )  # fmt: skip
    acc = gl.zeros([ROWS, DV], gl.float32, O_HIGH_LAYOUT)
    mbarrier.wait(params.q_full, 0)

    # ---- high tiles
    q = params.q_smem.index(G).reshape([ROWS, D])
    high_bias = gl.zeros([ROWS], gl.float32, H_ROW)
    if params.CONFIG.has_mean and params.CONFIG.is_high_unquantized and softcap is None:
        h_rows, m_h_row = row_indices(first, seq.q_len, H_ROW)
        high_bias = params.load_mean_logits(h_rows, m_h_row)
    high = HighTiles(
        q=q, q_start=start, logit_scale=params.logit_scale, bias=high_bias,
        qk_bias=None if params.CONFIG.is_high_unquantized else qk_bias, softcap=softcap, mask=mask,
        full_start=full_start, full_stop=full_stop, MASKS_LOW=params.CONFIG.masks_low, O_LAYOUT=O_HIGH_LAYOUT,
    )  # fmt: skip
    softmax, acc, stage = _attend_to_high(params, queries, high, softmax, acc)

    # ---- low tiles
    if params.v_descale_ptr is not None:
        # Rescale the output to units of the E4M3 values; exact, because these are powers of two.
        o_d = gl.arange(0, DV, layout=gl.SliceLayout(0, O_HIGH_LAYOUT))
        descale = gl.load(params.v_descale_ptr + o_d, mask=o_d < params.CONFIG.head_dim, other=1.0)
        acc = acc * inverse_power_of_two(descale)[None, :]
    # With 256 padded channels, drop chunks past the head dimension from here on.
    accs = column_chunks(acc, WIDTH, O_LAYOUT)[: (params.CONFIG.head_dim + WIDTH - 1) // WIDTH]
    tiles = block.low_precision_range()
    before, after = _low_ranges(params, queries, tiles)
    if IS_LOW_16BIT:
        pipe.release(pipe.k_smem.shape[0])
        mbarrier.wait(params.q_full, 1)
    vote = init_vote(start, seq, softmax.row_max, params.skip_threshold, G, vote_barrier(G, pipe.WARPGROUPS))
    low = _LowTiles(
        params=params, q=params.q_low_smem.index(G).reshape([ROWS, D]), start=start, row_scale=row_scale,
        qk_bias=qk_bias, mask=mask, vote=vote,
    )  # fmt: skip
    softmax, accs, n_kept = _attend_to_low(low, before, after, tiles, softmax, stage, accs)

    count_tiles(params.tile_counts_ptr, vote, before.stop - before.start + after.stop - after.start, n_kept)
    bias = gl.zeros([ROWS], gl.float32, ROW)
    if params.CONFIG.has_mean and softcap is None:
        bias = finite_or_zero(params.load_mean_logits(rows, m_row))
    scale, lse = softmax.finalize(bias, params.sinks_ptr)
    _store(params, queries, accs, scale, lse)


@gluon.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "storage_tiles", "blocks", "swizzle_group", "kv_rows",
        "window", "diagonal_tiles", "sink_tiles", "exact_tiles", "mask_blocks",
    ],
)  # fmt: skip
def prefill_warp_specialized_kernel(
    q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc,
    out_ptr, lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, sinks_ptr, seq_info_ptr,
    stride_ob, stride_oh, stride_ot,
    q_offset, kv_offset, q_len, kv_len, storage_tiles, blocks, swizzle_group, kv_rows,
    window, diagonal_tiles, sink_tiles, exact_tiles, softcap, logit_scale,
    bitmask_ptr, bounds_ptr, planes_per_row, planes_per_head, mask_blocks, skip_threshold, tile_counts_ptr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute attention for a block of ``64 * GROUPS`` query positions of one head.

    The arguments are those of :func:`~dma_kernels.prefill.kernel.prefill_kernel`, except:

    - ``q_desc``: queries of high tiles, 16-bit ``[B, Hq, Tq, D]``.
    - ``q_low_desc``: queries of low tiles, 8-bit or 16-bit ``[B, Hq, Tq, D]``.
    - ``k_desc``, ``v_desc``, ``k_low_desc``, ``v_low_desc``: :class:`~.pipeline.KVSource`. Low keys have 8 or 16 bits.
    - ``out_ptr``: ``[B, Hq, Tq, D]``, with the strides ``stride_ob``, ``stride_oh`` and ``stride_ot``.
    - ``q_descale_ptr``: fp32 ``[2, B, Hq, Tq]``: what converts the scores of low tiles, before the key descale, to
      base-2 logits; and the products of query and mean key (:class:`~.quantize_q.QuantizedQueries`).
    - ``k_descale_ptr``: descale of low keys, fp32 ``[B, Hkv, storage_tiles]``, or ``None``.
    - ``storage_tiles``: tiles of low keys of a head.
    - ``bitmask_ptr``, ``bounds_ptr``, ``planes_per_row``, ``planes_per_head``: a :class:`~.bitmask.PackedMask`.
    - ``mask_blocks``: blocks of 64 query positions that the mask has bounds for.
    - ``CONFIG``: :class:`~.host.WarpSpecializedConstants`.
    """
    GROUPS: gl.constexpr = CONFIG.tuning.consumer_warpgroups
    STAGES: gl.constexpr = CONFIG.tuning.stages
    D: gl.constexpr = CONFIG.block_d
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    IS_CAUSAL: gl.constexpr = CONFIG.is_causal
    GROUP: gl.constexpr = CONFIG.q_heads // CONFIG.kv_heads
    if skip_threshold is not None:
        init_votes()
    i_row, i_group, i_block = schedule(blocks, kv_rows, swizzle_group, GROUP, IS_CAUSAL)
    i_b = i_row // CONFIG.kv_heads
    i_kv = i_row % CONFIG.kv_heads
    i_h = i_kv * GROUP + i_group
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, D], q_desc.layout)
    if is_16bit(q_low_desc.dtype):
        q_low_smem = reinterpret(q_smem, q_low_desc.dtype, [GROUPS, 1, 1, ROWS, D], q_low_desc.layout)
    else:
        q_low_smem = gl.allocate_shared_memory(q_low_desc.dtype, [GROUPS, 1, 1, ROWS, D], q_low_desc.layout)
    k_smem = gl.allocate_shared_memory(k_low_desc.dtype, [STAGES, TILE, D], k_low_desc.layout)
    V_SHAPE: gl.constexpr = [STAGES, D, TILE] if v_low_desc.dtype == gl.float8e4nv else [STAGES, 1, 1, TILE, D]
    v_smem = gl.allocate_shared_memory(v_low_desc.dtype, V_SHAPE, v_low_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    wait_for_operands()

    seq = load_seq_info(seq_info_ptr, i_b, q_offset, q_len, kv_offset, kv_len)
    start = ((seq.q_offset >> ROWS_SHIFT) + i_block * GROUPS) * ROWS
    last = gl.minimum(start + GROUPS * ROWS, seq.q_offset + q_len)
    first_tile = seq.kv_offset >> TILE_SHIFT
    head_row = (i_b * CONFIG.q_heads + i_h).to(gl.int64) * q_len
    if bitmask_ptr is not None:
        mask_plane = (i_b * planes_per_row + i_h * planes_per_head).to(gl.int64)
        bitmask_ptr += mask_plane * q_len * (4 * storage_tiles) - 4 * first_tile
    mask = Mask(
        visible_start=seq.visible_start, visible_end=seq.visible_end, window=window, bitmask_ptr=bitmask_ptr,
        IS_CAUSAL=IS_CAUSAL, IS_PLAIN=not CONFIG.masks_low,
    )  # fmt: skip
    kv_start, kv_stop = mask.union_range(seq.visible_start, seq.visible_end, start, last)
    if bitmask_ptr is not None:
        bounds_ptr += mask_plane * mask_blocks * 2
        kv_start, kv_stop = bitmask_range(
            kv_start, kv_stop, bounds_ptr, i_block * GROUPS, mask_blocks, first_tile, storage_tiles, GROUPS
        )
    aligned_start = first_tile * TILE
    if k_descale_ptr is not None:
        k_descale_ptr += i_row.to(gl.int64) * storage_tiles - first_tile
    if v_descale_ptr is not None:
        v_descale_ptr += i_row.to(gl.int64) * HEAD_DIM
    if sinks_ptr is not None:
        sinks_ptr += i_h
    if tile_counts_ptr is not None:
        tile_counts_ptr += 2 * i_h
    params = _Params(
        q_desc=q_desc, q_low_desc=q_low_desc, q_smem=q_smem, q_low_smem=q_low_smem, q_full=q_full,
        i_b=i_b, i_h=i_h, start=start,
        source=KVSource(
            k_desc=k_desc, v_desc=v_desc, k_low_desc=k_low_desc, v_low_desc=v_low_desc, i_b=i_b, i_kv=i_kv,
            k_start=seq.kv_offset if CONFIG.is_high_unquantized else aligned_start,
            v_start=seq.kv_offset,
            v_low_start=seq.kv_offset if CONFIG.is_low_value_unquantized else aligned_start,
            tile_row=i_row * storage_tiles - first_tile, HEAD_DIM=HEAD_DIM,
        ),
        pipe=KVPipeline(k_smem=k_smem, v_smem=v_smem, full=full, WARPGROUPS=GROUPS),
        seq=seq,
        block=BlockInfo(
            q_tile=start >> TILE_SHIFT, last_q_tile=(last - 1) >> TILE_SHIFT, kv_start=kv_start, kv_stop=kv_stop,
            diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles, exact_tiles=exact_tiles, IS_CAUSAL=IS_CAUSAL,
        ),
        mask=mask,
        out_ptr=out_ptr + (i_b.to(gl.int64) * stride_ob + i_h.to(gl.int64) * stride_oh), stride_ot=stride_ot,
        lse_ptr=lse_ptr + head_row,
        q_descale_ptr=q_descale_ptr + head_row, mean_offset=(kv_rows * GROUP).to(gl.int64) * q_len,
        k_descale_ptr=k_descale_ptr, v_descale_ptr=v_descale_ptr, sinks_ptr=sinks_ptr,
        tile_counts_ptr=tile_counts_ptr, storage_tiles=storage_tiles, softcap=softcap, logit_scale=logit_scale,
        skip_threshold=skip_threshold, CONFIG=CONFIG, CHECKS_VALUES=seq_info_ptr is not None,
    )  # fmt: skip
    WORKERS: gl.constexpr = GROUPS - 1
    WARPS: gl.constexpr = [4] * WORKERS + [1]
    LIMITS: gl.constexpr = [CONFIG.tuning.registers] * WORKERS + [_PRODUCER_REGISTERS]
    gl.static_assert(GROUPS >= 2 and GROUPS <= 4, f"{GROUPS=} must be 2, 3 or 4")
    gl.warp_specialize(
        [(_consume, (params, 0)), (_consume, (params, 1)), (_consume, (params, 2)), (_consume, (params, 3))][:GROUPS]  # noqa: RUF005
        + [(_produce, (params,))],
        WARPS, LIMITS,
    )  # fmt: skip
