"""The one-warpgroup prefill kernel for Hopper, in Gluon, for short calls, masks and softcaps.

A CTA is one warpgroup with 64 query positions of a head, and three or four CTAs share an SM. While one waits, the
others compute. This also hides prologues and epilogues, which the warp-specialized kernel exposes. A stage is refilled
as soon as its tile has been multiplied.

If low keys are INT8 or E4M3 and high keys unquantized, the CTA rotates and quantizes its own queries. The rotation is
an MMA with a Hadamard matrix of order 64, built in shared memory while the queries are loaded. Otherwise
:mod:`.quantize_q` has quantized them. High tiles come first, because their row maxima decide which low tiles are
skipped. 16-bit low keys are loaded in two halves, and 16-bit low queries reuse the buffer of the high ones.
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

from ...device.arithmetic import to_elements as _to_elements_triton
from ...device.blocks import row_scale as _row_scale_triton
from ...device.gluon import aggregate, reinterpret
from ...device.gluon import barrier as _barrier
from ...device.tiles import TILE, TILE_SHIFT
from .attend import HighTiles, count_tiles, narrow, product_layout, row_indices, store_lse, store_output
from .hadamard import ORDER, hadamard_matrix, rotate_by_mma
from .mask import Mask, bitmask_pointers, zero_out_of_bounds
from .mma import add_pv, inverse_power_of_two, is_16bit, issue_pv_mma, join_columns, split_columns, to_mma_operand
from .pipeline import KVSource, copy, vote_barrier, wait_for_operands
from .skipping import SkipVote, init_vote, init_votes
from .softmax import finite_or_zero, init_softmax, modify_scores
from .tile_range import BLOCK, ROWS, ROWS_SHIFT, BlockInfo, TileRange, bitmask_range, load_seq_info, schedule_grid

_row_scale = gluon.jit(_row_scale_triton.fn)
_to_elements = gluon.jit(_to_elements_triton.fn)


@aggregate
class _Ring:
    """Stages of keys or of values, a power of two of them. Load ``i`` uses stage ``i % STAGES``.

    A stage holds a low tile in 8 bits, or 64 rows in 16 bits.
    """

    smem: Any  # ``[STAGES, ...]``
    full: Any  # barriers of stages that are filled

    @gluon.jit
    def index(self, i):
        return i & (self.smem.shape[0] - 1)

    @gluon.jit
    def stage(self, i):
        return self.smem.index(self.index(i))

    @gluon.jit
    def barrier(self, i):
        return self.full.index(self.index(i))

    @gluon.jit
    def block(self, i, desc):
        """Return the stage of load ``i`` as 64 16-bit rows of a high tile, ``[1, 1, 64, D]``."""
        WIDTH: gl.constexpr = desc.block_shape[3]
        return reinterpret(self.smem, desc.dtype, [self.smem.shape[0], 1, 1, BLOCK, WIDTH], desc.layout).index(
            self.index(i)
        )

    @gluon.jit
    def wait(self, i, pred=True):
        """Wait until load ``i`` is complete. With one or two stages, the shift is 0 or 1."""
        mbarrier.wait(self.barrier(i), (i >> (self.smem.shape[0] - 1)) & 1, pred=pred)


@aggregate
class _Loads:
    """The loads of keys and values that the CTA issues: first the blocks of high tiles, then the low tiles."""

    source: KVSource  # keys and values in global memory
    k: _Ring  # stages of keys; 16-bit low keys take two loads per tile
    v: _Ring  # stages of values; 16-bit low values take two loads per tile
    blocks: TileRange  # high-precision range
    n_high: Any  # its length: loads of high keys, and of high values
    tiles: TileRange  # low-precision range
    n_low: Any  # its length
    D: Any  # channels, padded; a stage has ``128 * D`` bytes

    @gluon.jit
    def issue_k(self, i, MAY_BE_HIGH: gl.constexpr):
        """Issue the ``i``-th load of keys, if there is one."""
        source = self.source
        LOADS: gl.constexpr = 2 if is_16bit(source.k_low_desc.dtype) else 1
        j = i - self.n_high
        barrier = self.k.barrier(i)
        is_valid = j < LOADS * self.n_low
        mbarrier.expect(barrier, TILE * self.D, pred=is_valid)
        if LOADS == 2:
            source.issue_tile_k(self.tiles.at(j >> 1), (j & 1) * BLOCK, barrier, self.k.stage(i), is_valid & (j >= 0))
        else:
            source.issue_tile_k(self.tiles.at(j), 0, barrier, self.k.stage(i), is_valid & (j >= 0))
        if MAY_BE_HIGH:
            source.issue_block_k(self.blocks.at(i), barrier, self.k.block(i, source.k_desc), j < 0)

    @gluon.jit
    def issue_block_v(self, i):
        """Issue the ``i``-th load of values, if it belongs to a high tile."""
        is_valid = i < self.n_high
        barrier = self.v.barrier(i)
        mbarrier.expect(barrier, TILE * self.D, pred=is_valid)
        self.source.issue_block_v(self.blocks.at(i), barrier, self.v.block(i, self.source.v_desc), is_valid)

    @gluon.jit
    def issue_tile_v(self, i, i_tile, half, MAY_BE_IN_FLIGHT: gl.constexpr):
        """Issue the ``i``-th load of values: a low tile in E4M3, or half a tile in 16 bits.

        With tile skipping, a load into the stage may still be in flight: no one waits for a skipped tile's values.
        """
        STAGES: gl.constexpr = self.v.smem.shape[0]
        if MAY_BE_IN_FLIGHT:
            self.v.wait(i - STAGES, i - STAGES >= self.n_high)
        barrier = self.v.barrier(i)
        mbarrier.expect(barrier, TILE * self.D)
        self.source.issue_tile_v(i_tile, half * BLOCK, barrier, self.v.stage(i))


@gluon.jit
def _attend_to_high(loads, high, softmax, acc, CHECKS_VALUES: gl.constexpr, IS_FRESH: gl.constexpr):
    """Attend to the high tiles; ``IS_FRESH``: add to the output outside the MMA."""
    source = loads.source
    D: gl.constexpr = loads.D
    for i in range(loads.n_high):
        k_start = loads.blocks.at(i) * BLOCK
        words = None
        if high.mask.bitmask_ptr is not None:
            words = high.mask.load_bitmask(k_start >> TILE_SHIFT) >> (k_start & BLOCK) // 4
        loads.k.wait(i)
        k = loads.k.block(i, source.k_desc).reshape([BLOCK, D])
        p, alpha, softmax = high.attend(k, k_start, words, softmax, source.v_desc.dtype)
        v = loads.v.block(i, source.v_desc).reshape([BLOCK, D])
        loads.v.wait(i)
        if CHECKS_VALUES:
            zero_out_of_bounds(v, k_start, high.mask, D)
        if IS_FRESH:
            # A fresh accumulator: one that MMAs add to is tied to registers that the other loop has no room for.
            product = warpgroup_mma(p, v, gl.zeros_like(acc), use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            acc = add_pv(acc, product, alpha, True)
        else:
            acc = warpgroup_mma_wait(0, deps=[issue_pv_mma(acc, p, alpha, v)])
        loads.issue_k(i + loads.k.smem.shape[0], True)
        loads.issue_block_v(i + loads.v.smem.shape[0])
    return softmax, acc


@aggregate
class _LowTiles:
    """The queries in the loop over low tiles, and what turns their scores into probabilities."""

    loads: _Loads  # loads of keys and values
    q: Any  # queries ``[64, D]``
    q_start: Any  # position of the first query
    row_scale: Any  # converts scores, before the key descale, to base-2 logits, fp32 ``[64]``
    k_descale_ptr: Any  # descale of keys, fp32, indexed by tile; or ``None``
    qk_bias: Any  # added to logits before a softcap, fp32 ``[64]``
    softcap: Any  # in base 2, or ``None``
    mask: Mask  # masks of the queries
    full_start: Any  # position of the first key that all queries attend to
    full_stop: Any  # position after the last one
    vote: SkipVote  # the predicate of tile skipping
    CHECKS_VALUES: Any  # whether invisible values may be NaN
    MASKS_LOW: Any  # whether a tile may be masked

    @gluon.jit
    def score(self, i, i_tile, i_v, S_LAYOUT: gl.constexpr):
        """Return the scores of the ``i``-th tile; issue the ``i_v``-th load of values, and loads of later keys."""
        loads = self.loads
        K_DTYPE: gl.constexpr = loads.k.smem.dtype
        MAY_BE_IN_FLIGHT: gl.constexpr = self.vote.bound is not None
        if is_16bit(K_DTYPE):
            zero = gl.zeros([ROWS, BLOCK], gl.float32, product_layout(BLOCK, 16))
            i_k = loads.n_high + 2 * i
            loads.k.wait(i_k)
            s_0 = warpgroup_mma(self.q, loads.k.stage(i_k).permute([1, 0]), zero, use_acc=False, is_async=True)
            loads.k.wait(i_k + 1)
            s_1 = warpgroup_mma(self.q, loads.k.stage(i_k + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
            loads.issue_tile_v(i_v, i_tile, 0, MAY_BE_IN_FLIGHT)
            s_0, s_1 = warpgroup_mma_wait(0, deps=[s_0, s_1])
            loads.issue_k(i_k + 2, False)
            loads.issue_k(i_k + 3, False)
            s = join_columns(s_0, s_1, S_LAYOUT)
        else:
            S_DTYPE: gl.constexpr = gl.int32 if gl.int8 == K_DTYPE else gl.float32
            zero = gl.zeros([ROWS, TILE], S_DTYPE, S_LAYOUT)
            i_k = loads.n_high + i
            loads.k.wait(i_k)
            s = warpgroup_mma(self.q, loads.k.stage(i_k).permute([1, 0]), zero, use_acc=False, is_async=True)
            loads.issue_tile_v(i_v, i_tile, 0, MAY_BE_IN_FLIGHT)
            s = warpgroup_mma_wait(0, deps=[s])
            loads.issue_k(i_k + loads.k.smem.shape[0], False)
        return s

    @gluon.jit
    def add_values(self, p, alpha, softmax, acc, i_tile, i_v):
        """Add a tile's probabilities to the row sums, and their products with the values; return the next load."""
        loads = self.loads
        V_DTYPE: gl.constexpr = loads.v.smem.dtype
        IS_FP8: gl.constexpr = V_DTYPE == gl.float8e4nv  # noqa: SIM300 (a constexpr)
        V_STAGES: gl.constexpr = loads.v.smem.shape[0]
        O_LAYOUT: gl.constexpr = acc.type.layout
        if IS_FP8:
            softmax = softmax.update_row_sum(p, alpha)
            operand = to_mma_operand(p, V_DTYPE, O_LAYOUT)
            loads.v.wait(i_v)
            v = loads.v.stage(i_v).permute([1, 0])
            product = warpgroup_mma_wait(0, deps=[issue_pv_mma(acc, operand, alpha, v)])
            acc = add_pv(acc, product, alpha, True)
            i_v = i_v + 1
        else:
            halves = split_columns(p)
            if V_STAGES > 1:
                loads.issue_tile_v(i_v + 1, i_tile, 1, False)
            for half in gl.static_range(2):
                softmax = softmax.update_row_sum(halves[half], alpha)
                operand = to_mma_operand(halves[half], V_DTYPE, O_LAYOUT)
                loads.v.wait(i_v)
                v = loads.v.stage(i_v).reshape([BLOCK, loads.D])
                if self.CHECKS_VALUES:
                    zero_out_of_bounds(v, i_tile * TILE + half * BLOCK, self.mask, loads.D)
                acc = warpgroup_mma_wait(0, deps=[issue_pv_mma(acc, operand, alpha, v)])
                alpha = gl.zeros_like(alpha) + 1.0
                i_v = i_v + 1
                if half == 0 and V_STAGES == 1:
                    loads.issue_tile_v(i_v, i_tile, 1, False)
        return softmax, acc, i_v


@gluon.jit
def _attend_to_low(low, softmax, acc):
    """Attend to the low tiles; return also the number of tiles that were not skipped."""
    loads = low.loads
    mask = low.mask
    SKIPS: gl.constexpr = low.vote.bound is not None
    S_LAYOUT: gl.constexpr = product_layout(TILE, 16 if is_16bit(loads.k.smem.dtype) else 8)
    n_kept = 0
    i_v = loads.n_high
    for i in range(loads.n_low):
        i_tile = loads.tiles.at(i)
        k_start = i_tile * TILE
        scale = low.row_scale
        if low.k_descale_ptr is not None:
            scale = low.row_scale * gl.load(low.k_descale_ptr + i_tile)
        words = None
        if mask.bitmask_ptr is not None:
            words = mask.load_bitmask(i_tile)
        s = low.score(i, i_tile, i_v, S_LAYOUT)
        if low.MASKS_LOW:
            s = s.to(gl.float32)
        s, scale = modify_scores(
            s, scale, low.qk_bias, low.softcap, mask,
            ((k_start < low.full_start) | (k_start + TILE > low.full_stop)) if low.MASKS_LOW else False,
            words, low.q_start, k_start, True,
        )  # fmt: skip
        keep = True
        if SKIPS:
            keep = low.vote.keeps(s, scale, i_tile)
        if keep:
            low.vote.announce(i_tile)
            p, alpha, softmax = softmax.update(s, scale, gl.zeros_like(scale))
            softmax, acc, i_v = low.add_values(p, alpha, softmax, acc, i_tile, i_v)
            n_kept = n_kept + 1
        else:
            i_v = i_v + 1
    if SKIPS:
        # Wait for loads of skipped tiles' values, which must not outlive the CTA.
        for before in gl.static_range(1, loads.v.smem.shape[0] + 1):
            loads.v.wait(i_v - before, i_v - before >= loads.n_high)
    return softmax, acc, n_kept


@gluon.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "storage_tiles", "blocks", "swizzle_group", "kv_rows",
        "window", "diagonal_tiles", "sink_tiles", "exact_tiles",
    ],
)  # fmt: skip
def prefill_one_warpgroup_kernel(
    q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc,
    out_ptr, lse_ptr, q_descale_ptr, mean_ptr, k_descale_ptr, v_descale_ptr, sinks_ptr, seq_info_ptr,
    stride_ob, stride_oh, stride_ot,
    q_offset, kv_offset, q_len, kv_len, storage_tiles, blocks, swizzle_group, kv_rows,
    window, diagonal_tiles, sink_tiles, exact_tiles, softcap, logit_scale,
    bitmask_ptr, bounds_ptr, planes_per_row, planes_per_head, skip_threshold, tile_counts_ptr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute attention for 64 query positions of one head.

    The arguments are those of :func:`~.warp_specialized.prefill_warp_specialized_kernel`, except:

    - ``q_low_desc``, ``q_descale_ptr``: ``None`` if the CTA quantizes its own queries.
    - ``k_low_desc``: 16-bit keys are loaded by half tiles.
    - ``v_low_desc``: ``None`` if low values are the caller's own, which ``v_desc`` describes.
    - ``mean_ptr``: mean key that smoothing subtracted, fp32 ``[B, Hkv, D]``, or ``None``.
    - ``CONFIG``: :class:`~.host.OneWarpgroupConstants`.
    """
    D: gl.constexpr = CONFIG.block_d
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    K_STAGES: gl.constexpr = 2
    V_STAGES: gl.constexpr = CONFIG.tuning.value_stages
    IS_CAUSAL: gl.constexpr = CONFIG.is_causal
    MASKS_LOW: gl.constexpr = CONFIG.masks_low
    Q_FORM: gl.constexpr = CONFIG.q_form
    Q_FORMAT: gl.constexpr = CONFIG.q_format
    GROUP: gl.constexpr = CONFIG.q_heads // CONFIG.kv_heads
    Q_DTYPE: gl.constexpr = q_desc.dtype
    V_DTYPE: gl.constexpr = v_desc.dtype
    IS_Q_QUANTIZED: gl.constexpr = q_low_desc is not None
    IS_LOW_16BIT: gl.constexpr = is_16bit(k_low_desc.dtype)
    IS_FP8: gl.constexpr = v_low_desc is not None
    S_LAYOUT: gl.constexpr = product_layout(TILE, 16 if IS_LOW_16BIT else 8)
    O_LAYOUT: gl.constexpr = product_layout(D, 8 if IS_FP8 else 16)
    X_LAYOUT: gl.constexpr = product_layout(D, 16)  # all channels; also the output of high tiles
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    H_ROW: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK, 16))
    X_ROW: gl.constexpr = gl.SliceLayout(1, X_LAYOUT)

    i_row, i_group, i_block = schedule_grid(blocks, swizzle_group, GROUP, IS_CAUSAL)
    if i_row >= kv_rows:
        return
    if skip_threshold is not None:
        init_votes()
    i_b = i_row // CONFIG.kv_heads
    i_kv = i_row % CONFIG.kv_heads
    i_h = i_kv * GROUP + i_group
    q_smem = gl.allocate_shared_memory(Q_DTYPE, [1, 1, ROWS, D], q_desc.layout)
    if IS_LOW_16BIT:
        q_low_smem = reinterpret(q_smem, q_low_desc.dtype, [1, 1, ROWS, D], q_low_desc.layout)
    elif IS_Q_QUANTIZED:
        q_low_smem = gl.allocate_shared_memory(q_low_desc.dtype, [1, 1, ROWS, D], q_low_desc.layout)
    else:
        # First the Hadamard matrix, then the queries of low tiles.
        matrix = gl.allocate_shared_memory(Q_DTYPE, [ORDER, ORDER], gl.NVMMASharedLayout(128, 16, 2))
    K_ROWS: gl.constexpr = BLOCK if IS_LOW_16BIT else TILE
    k_smem = gl.allocate_shared_memory(k_low_desc.dtype, [K_STAGES, K_ROWS, D], k_low_desc.layout)
    if IS_FP8:
        v_smem = gl.allocate_shared_memory(v_low_desc.dtype, [V_STAGES, D, TILE], v_low_desc.layout)
        descale_smem = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        v_smem = gl.allocate_shared_memory(V_DTYPE, [V_STAGES, 1, 1, BLOCK, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    fence_async_shared()
    _barrier()

    CHECKS_VALUES: gl.constexpr = seq_info_ptr is not None
    seq = load_seq_info(seq_info_ptr, i_b, q_offset, q_len, kv_offset, kv_len)
    start = ((seq.q_offset >> ROWS_SHIFT) + i_block) * ROWS
    last = gl.minimum(start + ROWS, seq.q_offset + q_len)
    row = start - seq.q_offset
    first_tile = seq.kv_offset >> TILE_SHIFT
    mask = Mask(
        visible_start=seq.visible_start, visible_end=seq.visible_end, window=window, bitmask_ptr=None,
        IS_CAUSAL=IS_CAUSAL, IS_PLAIN=not MASKS_LOW,
    )  # fmt: skip
    kv_start, kv_stop = mask.union_range(seq.visible_start, seq.visible_end, start, last)
    full_start, full_stop = mask.unmasked_range(start, last)
    if CHECKS_VALUES:
        kv_stop = gl.where(start < seq.q_offset + q_len, kv_stop, kv_start)
    if bitmask_ptr is not None:
        wait_for_operands()
        plane = (i_b * planes_per_row + i_h * planes_per_head).to(gl.int64)
        bounds_ptr += plane * blocks * 2
        kv_start, kv_stop = bitmask_range(kv_start, kv_stop, bounds_ptr, i_block, blocks, first_tile, storage_tiles, 1)
    block = BlockInfo(
        q_tile=start >> TILE_SHIFT, last_q_tile=(last - 1) >> TILE_SHIFT, kv_start=kv_start, kv_stop=kv_stop,
        diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles, exact_tiles=exact_tiles, IS_CAUSAL=IS_CAUSAL,
    )  # fmt: skip
    high_blocks = block.high_precision_range()
    low_tiles = block.low_precision_range()
    n_high = high_blocks.count()
    n_low = low_tiles.count()

    # The caller's queries are ready before the quantizer ends. Wait only for what it writes.
    q_rows = [i_b, i_h, row, 0]
    if not IS_Q_QUANTIZED:
        mbarrier.expect(q_full, ROWS * D * 2)
        copy(q_desc, q_rows, q_full, q_smem)
    if CONFIG.hadamard_size > 0:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            FILL: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])
            matrix.store(hadamard_matrix(Q_DTYPE, min(CONFIG.hadamard_size, 64), FILL))
            fence_async_shared()
    if bitmask_ptr is None:
        wait_for_operands()
    if IS_LOW_16BIT:
        mbarrier.expect(q_full, ROWS * D * 2)
        copy(q_desc, q_rows, q_full, q_smem)
    elif IS_Q_QUANTIZED:
        mbarrier.expect(q_full, ROWS * D * 3)
        copy(q_low_desc, q_rows, q_full, q_low_smem)
        copy(q_desc, q_rows, q_full, q_smem)
    loads = _Loads(
        source=KVSource(
            k_desc=k_desc, v_desc=v_desc, k_low_desc=k_low_desc, v_low_desc=v_low_desc if IS_FP8 else v_desc,
            i_b=i_b, i_kv=i_kv, k_start=seq.kv_offset if CONFIG.is_high_unquantized else first_tile * TILE,
            v_start=seq.kv_offset, v_low_start=seq.kv_offset, tile_row=i_row * storage_tiles - first_tile,
            HEAD_DIM=HEAD_DIM,
        ),
        k=_Ring(smem=k_smem, full=k_full), v=_Ring(smem=v_smem, full=v_full),
        blocks=high_blocks, n_high=n_high, tiles=low_tiles, n_low=n_low, D=D,
    )  # fmt: skip
    for i in gl.static_range(K_STAGES):
        loads.issue_k(i, True)
    for i in gl.static_range(V_STAGES):
        loads.issue_block_v(i)

    if mean_ptr is not None:
        mean_ptr += i_row.to(gl.int64) * HEAD_DIM
    if k_descale_ptr is not None:
        k_descale_ptr += i_row.to(gl.int64) * storage_tiles - first_tile
    if IS_FP8:
        CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        channel = gl.arange(0, D, layout=CHANNELS)
        v_descale_ptr += i_row.to(gl.int64) * HEAD_DIM
        v_descale = gl.load(v_descale_ptr + channel, mask=channel < HEAD_DIM, other=1.0)
    softmax = init_softmax(S_LAYOUT, 8.0 if IS_FP8 else 0.0)
    row_scale = gl.full([ROWS], 1.0, gl.float32, X_ROW)
    bias = gl.zeros([ROWS], gl.float32, X_ROW)
    mean = gl.zeros([D], gl.float32, gl.SliceLayout(0, X_LAYOUT))
    if IS_Q_QUANTIZED:
        x_rows, m_row = row_indices(row, q_len, X_ROW)
        q_descale_ptr += (i_b * CONFIG.q_heads + i_h).to(gl.int64) * q_len
        # Dequantized queries have a descale of 1; loading it would cost registers in the loop over low tiles.
        row_scale = row_scale * logit_scale if IS_LOW_16BIT else gl.load(q_descale_ptr + x_rows, mask=m_row, other=1.0)
        if mean_ptr is not None:
            q_descale_ptr += (kv_rows * GROUP).to(gl.int64) * q_len
            bias = gl.load(q_descale_ptr + x_rows, mask=m_row, other=0.0) * logit_scale
    elif mean_ptr is not None:
        channels = gl.arange(0, D, layout=gl.SliceLayout(0, X_LAYOUT))
        mean = gl.load(mean_ptr + channels, mask=channels < HEAD_DIM, other=0.0)
    mbarrier.wait(q_full, 0)
    q = q_smem.reshape([ROWS, D])

    # ---- the queries of low tiles
    if IS_Q_QUANTIZED:
        q_low = q_low_smem.reshape([ROWS, D])
        if IS_FP8:
            descale_smem.store(v_descale)
    else:
        q_low = reinterpret(matrix, k_low_desc.dtype, [ORDER * 128 // D, D], k_low_desc.layout)
        if D < 128:
            q_low = q_low.slice(0, ROWS)
        if n_low > 0:
            x = rotate_by_mma(q, matrix, CONFIG.hadamard_size)
            # Maximum of bits, which sort like magnitudes, with NaN above all.
            amax = gl.max(gl.abs(x).to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True) * CONFIG.norm
            reciprocal, descale = _row_scale(amax.to(gl.int32, bitcast=True), Q_FORM, Q_FORMAT, CONFIG.is_ceil)
            q_low.store(_to_elements(x, (reciprocal * CONFIG.norm)[:, None], Q_FORM, CONFIG.is_ceil))
            row_scale = descale * logit_scale
            if IS_FP8:
                descale_smem.store(v_descale)
            fence_async_shared()
            _barrier()
    row_scale = gl.convert_layout(row_scale, ROW, assert_trivial=True)

    # ---- smoothing bias of low tiles; the mean key has arrived by now
    if mean_ptr is not None and not IS_Q_QUANTIZED:
        bias = gl.sum(q.load(X_LAYOUT).to(gl.float32) * mean[None, :], 1) * logit_scale
    # Smoothing subtracts a constant from a row's logits. A plain softmax is invariant to it, so it is only added back
    # to the log of the denominator. A softcap is not, so it is added back to the logits of smoothed keys first.
    qk_bias = gl.zeros([ROWS], gl.float32, ROW)
    if softcap is not None:
        qk_bias = finite_or_zero(gl.convert_layout(bias, ROW, assert_trivial=True))
        bias = gl.zeros_like(bias)

    if bitmask_ptr is not None:
        bitmask_ptr += plane * q_len * (4 * storage_tiles) - 4 * first_tile
        WORDS: gl.constexpr = softmax.row_sum.type.layout
        mask = mask.with_bitmask(bitmask_pointers(bitmask_ptr, row, q_len, storage_tiles, WORDS))

    # ---- high tiles
    bias = gl.convert_layout(bias, H_ROW, assert_trivial=True)
    high = HighTiles(
        q=q, q_start=start, logit_scale=logit_scale,
        bias=bias if CONFIG.is_high_unquantized else gl.zeros_like(bias),
        qk_bias=None if CONFIG.is_high_unquantized else qk_bias, softcap=softcap, mask=mask,
        full_start=full_start, full_stop=full_stop, MASKS_LOW=MASKS_LOW, O_LAYOUT=X_LAYOUT,
    )  # fmt: skip
    acc = gl.zeros([ROWS, D], gl.float32, X_LAYOUT)
    softmax, acc = _attend_to_high(loads, high, softmax, acc, CHECKS_VALUES, IS_FP8 and skip_threshold is not None)

    # ---- low tiles
    if IS_LOW_16BIT:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            mbarrier.expect(q_full, ROWS * D * 2)
            copy(q_low_desc, q_rows, q_full, q_low_smem)
            mbarrier.wait(q_full, 1)
    if IS_FP8:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            # Rescale the output to units of the E4M3 values; exact, because these are powers of two.
            acc *= inverse_power_of_two(descale_smem.load(gl.SliceLayout(0, X_LAYOUT)))[None, :]
    acc = gl.convert_layout(acc, O_LAYOUT, assert_trivial=True)
    low = _LowTiles(
        loads=loads, q=q_low, q_start=start, row_scale=row_scale, k_descale_ptr=k_descale_ptr, qk_bias=qk_bias,
        softcap=softcap, mask=mask, full_start=full_start, full_stop=full_stop,
        vote=init_vote(start, seq, softmax.row_max, skip_threshold, 0, vote_barrier(0, 1)),
        CHECKS_VALUES=CHECKS_VALUES, MASKS_LOW=MASKS_LOW,
    )  # fmt: skip
    softmax, acc, n_kept = _attend_to_low(low, softmax, acc)
    if tile_counts_ptr is not None:
        count_tiles(tile_counts_ptr + 2 * i_h, low.vote, n_low, n_kept)
    acc = gl.convert_layout(acc, X_LAYOUT, assert_trivial=True)
    if IS_FP8:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            acc *= descale_smem.load(gl.SliceLayout(0, X_LAYOUT))[None, :]
    if sinks_ptr is not None:
        sinks_ptr += i_h
    scale, lse = softmax.finalize(finite_or_zero(gl.convert_layout(bias, ROW, assert_trivial=True)), sinks_ptr)
    scale = gl.convert_layout(scale, X_ROW, assert_trivial=True)
    # Stage the output in the queries' shared memory, so that stores are coalesced.
    o = reinterpret(q_smem, V_DTYPE, [1, 1, ROWS, D], v_desc.layout).reshape([ROWS, D])
    o.store(narrow(acc * scale[:, None], V_DTYPE))
    _barrier()
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    out_ptr += i_b.to(gl.int64) * stride_ob + i_h.to(gl.int64) * stride_oh
    store_output(out_ptr, o.load(OUT), row, q_len, stride_ot, 0, HEAD_DIM)
    store_lse(lse_ptr + (i_b * CONFIG.q_heads + i_h).to(gl.int64) * q_len, lse, row, q_len)
