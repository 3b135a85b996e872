"""The multi-CTA prefill kernel for Hopper, in Gluon: it computes short calls, masks and softcaps.

A CTA is one warpgroup with 64 query positions of a head, and three or four CTAs share an SM. While one waits, the
others compute; that also hides prologues and epilogues, which the warp-specialised kernel exposes. A stage is refilled
as soon as its tile has been multiplied.

Where low keys are INT8 or E4M3 and high keys unquantised, the CTA rotates and quantises its own queries. The rotation
is an MMA with a Hadamard matrix of order 64, which is built in shared memory while the queries are loaded. Otherwise
:mod:`.quantize_q` has quantised them. High tiles come first, because their row maxima decide which low tiles are
skipped. 16-bit low keys come in two halves, and 16-bit low queries reuse the stage of the high ones.
"""

from __future__ import annotations

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
from ...device.gluon import barrier as _barrier
from ...device.gluon import reinterpret
from ...numerics.formats import TILE
from .mask import hide_masked, hide_values, places_of_words, seen_range
from .mma import add_values, halves, inverse_power_of_two, is_16bit, operand_of, values_product
from .pipeline import copy, wait_for_operands
from .skipping import announce_keep, any_row_keeps, init_votes
from .softmax import add_sums, capped, finalize_softmax, finite_or_zero, online_softmax, thread_sums
from .tile_range import ROWS, high_blocks, low_tiles, positions_of, seen_by_all, seen_by_one, shown_by_mask, visited

_ROWS = gl.constexpr(ROWS)
_ROWS_SHIFT = gl.constexpr(ROWS.bit_length() - 1)
_TILE = gl.constexpr(TILE)
_TILE_SHIFT = gl.constexpr(TILE.bit_length() - 1)
_HIGH = gl.constexpr(TILE // 2)
_VOTES = gl.constexpr(15)  # a named barrier that the compiler does not take
_MATRIX = gl.constexpr(64)
"""Order of the Hadamard matrix: the channels that a row of shared memory holds in 16 bits."""
_row_scale = gluon.jit(_row_scale_triton.fn)
_to_elements = gluon.jit(_to_elements_triton.fn)


@gluon.jit
def _hadamard_matrix(dtype: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a matrix of order 64 with Hadamard matrices of order ``SIZE``, 32 or 64, on its diagonal, zeros elsewhere.

    They have -1 where row and column have an odd number of bits in common.
    """
    row = gl.arange(0, _MATRIX, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _MATRIX, layout=gl.SliceLayout(0, LAYOUT))
    # Of a row the signs of 32 columns are the bits of one number, and those of the others equal them or none.
    signs = gl.where((row & 1) != 0, 0xAAAAAAAA - (1 << 32), 0)
    signs ^= gl.where((row & 2) != 0, 0xCCCCCCCC - (1 << 32), 0)
    signs ^= gl.where((row & 4) != 0, 0xF0F0F0F0 - (1 << 32), 0)
    signs ^= gl.where((row & 8) != 0, 0xFF00FF00 - (1 << 32), 0)
    signs ^= gl.where((row & 16) != 0, 0xFFFF0000 - (1 << 32), 0)
    signs = signs[:, None]
    if SIZE == _MATRIX:
        signs = signs ^ gl.where(((row & 32) != 0)[:, None] & ((column & 32) != 0)[None, :], -1, 0)
    one: gl.constexpr = 0x3F80 if dtype == gl.bfloat16 else 0x3C00
    bits = (((signs >> (column & 31)[None, :]) & 1) << 15) | one
    if SIZE < _MATRIX:
        bits = gl.where((row[:, None] ^ column[None, :]) < SIZE, bits, 0)
    return bits.to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def _joined(left, right, LAYOUT: gl.constexpr):
    """Return the columns of two as those of one: a renaming of registers."""
    both = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _rotated(q, matrix, HADAMARD_SIZE: gl.constexpr, H_LAYOUT: gl.constexpr, X_LAYOUT: gl.constexpr):
    """Return queries ``[64, D]`` in shared memory times Hadamard matrices, not normed; as they are for a size of 0."""
    if HADAMARD_SIZE == 0:
        x = q.load(X_LAYOUT).to(gl.float32)
    else:
        D: gl.constexpr = q.shape[1]
        zero = gl.zeros([_ROWS, _MATRIX], gl.float32, H_LAYOUT)
        x = warpgroup_mma(q.slice(0, _MATRIX, 1), matrix, zero, use_acc=False, is_async=True)
        if D == _MATRIX:
            x = gl.convert_layout(warpgroup_mma_wait(0, deps=[x]), X_LAYOUT, assert_trivial=True)
        else:
            x_1 = warpgroup_mma(q.slice(_MATRIX, _MATRIX, 1), matrix, zero, use_acc=False, is_async=True)
            x_0, x_1 = warpgroup_mma_wait(0, deps=[x, x_1])
            if HADAMARD_SIZE == 128:
                x_0, x_1 = x_0 + x_1, x_0 - x_1
            x = _joined(x_0, x_1, X_LAYOUT)
    return x


@gluon.jit
def _low_tile(i, c_0, c_1, d_0, IS_CAUSAL: gl.constexpr):
    """Return which low tile is visited as the ``i``-th."""
    return c_0 + i if IS_CAUSAL else gl.where(i < c_1 - c_0, c_0 + i, d_0 - c_1 + c_0 + i)


@gluon.jit
def _hide_unseen(s, q_pos, k_pos, visible_start, visible_end, window, IS_CAUSAL: gl.constexpr):
    """Return scores ``[M, N]``, minus infinity where a query does not see the key.

    By the signs of distances: behind a branch the compiler packs the predicates of so many scores into bits, which
    takes four instructions for each.
    """
    start, end = seen_range(q_pos, visible_start, visible_end, window, IS_CAUSAL)
    distance = (k_pos[None, :] - start[:, None]) | ((end - 1)[:, None] - k_pos[None, :])
    infinity = (distance & -(2**31)) | 0x7F800000  # with the sign of the distance
    return gl.minimum(s, infinity.to(gl.float32, bitcast=True))


@gluon.jit
def _high_place(smem, slot, desc, D: gl.constexpr):
    """Return the place of 64 keys or values of high tiles, ``[1, 1, 64, D]``."""
    return reinterpret(smem, desc.dtype, [smem.shape[0], 1, 1, _HIGH, D], desc.layout).index(slot)


@gluon.jit
def _issue_key_load(i, keys, head, high, low, D: gl.constexpr, IS_CAUSAL: gl.constexpr, IS_LOW: gl.constexpr):
    """Issue the TMA load of the ``i``-th keys: a block of high ones, a low tile, or half of one in 16 bits."""
    desc, low_desc, smem, full, base, n_keys = keys
    i_b, i_kv, stored = head
    n_high, n_a, a_0, b_0 = high
    c_0, c_1, d_0 = low
    IS_WIDE: gl.constexpr = is_16bit(low_desc.dtype)
    slot = i & (smem.shape[0] - 1)
    is_asked = i < n_high + n_keys
    mbarrier.expect(full.index(slot), _TILE * D, pred=is_asked)
    j = i - n_high
    if IS_WIDE:
        row = (stored + _low_tile(j >> 1, c_0, c_1, d_0, IS_CAUSAL)) * _TILE + (j & 1) * _HIGH
    else:
        row = (stored + _low_tile(j, c_0, c_1, d_0, IS_CAUSAL)) * _TILE
    copy(low_desc, [row, 0], full.index(slot), smem.index(slot), pred=is_asked & (j >= 0))
    if not IS_LOW:
        entry = visited(i, n_a, a_0, b_0) * _HIGH - base
        copy(desc, [i_b, i_kv, entry, 0], full.index(slot), _high_place(smem, slot, desc, D), pred=j < 0)


@gluon.jit
def _issue_high_value_load(i, values, head, high, D: gl.constexpr):
    """Issue the TMA load of the values of the ``i``-th block of high tiles."""
    desc, _, smem, full, base, _ = values
    i_b, i_kv, _ = head
    n_high, n_a, a_0, b_0 = high
    slot = i & (smem.shape[0] - 1)
    mbarrier.expect(full.index(slot), _TILE * D, pred=i < n_high)
    entry = visited(i, n_a, a_0, b_0) * _HIGH - base
    copy(desc, [i_b, i_kv, entry, 0], full.index(slot), _high_place(smem, slot, desc, D), pred=i < n_high)


@gluon.jit
def _issue_low_value_load(i, tile, half, values, head, D: gl.constexpr, n_high, MAY_BE_IN_FLIGHT: gl.constexpr):
    """Issue the TMA load of the values of a low tile in E4M3, or of half a tile in 16 bits, as the ``i``-th load.

    Where tiles are skipped, a load into the stage may still be in flight: nobody waits for a skipped tile's values.
    """
    desc, low_desc, smem, full, base, low_rows = values
    i_b, i_kv, stored = head
    STAGES: gl.constexpr = smem.shape[0]
    slot = i & (STAGES - 1)
    if MAY_BE_IN_FLIGHT:
        mbarrier.wait(full.index(slot), ((i - STAGES) >> (STAGES - 1)) & 1, pred=i - STAGES >= n_high)
    mbarrier.expect(full.index(slot), _TILE * D)
    if low_desc is not None:
        copy(low_desc, [(stored + tile) * low_rows, 0], full.index(slot), smem.index(slot))
    else:
        entry = tile * _TILE + half * _HIGH - base
        copy(desc, [i_b, i_kv, entry, 0], full.index(slot), _high_place(smem, slot, desc, D))


@gluon.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "storage_tiles", "blocks", "section", "kv_rows",
        "window", "diagonal_tiles", "sink_tiles",
    ],
)  # fmt: skip
def prefill_short_kernel(
    q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc,
    out_ptr, lse_ptr, rows_ptr, mean_ptr, k_low_factor_ptr, value_factor_ptr, sinks_ptr, positions_ptr,
    stride_ob, stride_oh, stride_ot,
    q_offset, kv_offset, q_len, kv_len, storage_tiles, blocks, section, kv_rows, window, diagonal_tiles, sink_tiles,
    softcap, logit_scale, norm, mask_ptr, bounds_ptr, planes_per_row, planes_per_head,
    skip_threshold, tile_counts_ptr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    KEY_LAYOUT: gl.constexpr, FORM: gl.constexpr, FORMAT: gl.constexpr, IS_CEIL: gl.constexpr,
    HADAMARD_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_EDGES: gl.constexpr, IS_HIGH_RAW: gl.constexpr,
):  # fmt: skip
    """Compute attention for 64 query positions of one head.

    Args:
        q_desc: Queries of high tiles, 16-bit ``[B, Hq, Tq, D]``.
        q_low_desc: Queries of low tiles, likewise with elements as these keys have, if they are staged; else ``None``.
        k_desc: Keys of high tiles, 16-bit ``[B, Hkv, T, D]``.
        v_desc: Values of high tiles, the caller's own, likewise.
        k_low_desc: Keys of low tiles, a matrix: of 8 bits in blocks of a tile, of 16 in blocks of half a tile.
        v_low_desc: Values of low tiles in E4M3, a matrix of rows of a tile's keys; or ``None`` for the caller's own.
        out_ptr: ``[B, Hq, Tq, D]``.
        lse_ptr: fp32 ``[B, Hq, Tq]``.
        rows_ptr: Of staged queries, see :class:`dma_kernels.prefill.hopper.quantize_q.StagedQueries`; else ``None``.
        mean_ptr: What smoothing took from keys, fp32 ``[B, Hkv, D]``, or ``None``.
        k_low_factor_ptr: fp32 ``[B, Hkv, tiles]``, or ``None``.
        value_factor_ptr: fp32 ``[B, Hkv, D]``, or ``None``.
        sinks_ptr: Sink logits ``[Hq]``, or ``None``.
        positions_ptr: int32 ``[B, 4]``: for each batch row the positions of query 0 and key 0, the first visible key
            and the one past the last; or ``None``.
        stride_ob: Of the output.
        stride_oh: Of the output.
        stride_ot: Of the output.
        q_offset: Position of query 0, where ``positions_ptr`` is ``None``.
        kv_offset: Position of key 0, likewise.
        q_len: Queries.
        kv_len: Keys.
        storage_tiles: Tiles of low keys of a head.
        blocks: Programs of a query head.
        section: kv heads worked on at a time.
        kv_rows: kv heads of all batch rows.
        window: Sliding window, or ``None``.
        diagonal_tiles: Of the rule.
        sink_tiles: Of the rule.
        softcap: Cap of the base-2 logits, or ``None``.
        logit_scale: Turns scores of high tiles into base-2 logits.
        norm: What the rotation multiplies by.
        mask_ptr: Words of a mask, see :class:`dma_kernels.prefill.hopper.bitmask.PackedMask`; or ``None``.
        bounds_ptr: Its bounds; or ``None``.
        planes_per_row: Of the mask.
        planes_per_head: Of the mask.
        skip_threshold: Low tiles this far below a block's high tiles are skipped, in base-2 logits; or ``None``.
        tile_counts_ptr: int64 ``[Hq, 2]``, where skipped and examined tiles are added; or ``None``.
        Q_HEADS: Query heads.
        KV_HEADS: Key heads.
        D: Channels, padded to 64 or 128, as descriptors copy them.
        HEAD_DIM: Channels.
        K_STAGES: Places for keys, 1 or 2; 2 for low ones of 16 bits.
        V_STAGES: Places for values, 1 or 2.
        KEY_LAYOUT: Of the keys of high tiles, ``caller`` or ``aligned``; see :mod:`dma_kernels.prefill.operands`.
        FORM: Of the keys of low tiles, which queries that are not staged get, ``int8`` or ``e4m3``.
        FORMAT: Of these queries.
        IS_CEIL: How their scales are rounded.
        HADAMARD_SIZE: Order of the rotation's blocks: 32, 64 or 128; 0 where queries are not rotated.
        IS_CAUSAL: Whether a query sees no key behind its own position.
        HAS_EDGES: Whether a low tile may hold keys that not all queries see, and keys begin inside a tile. Not so where
            all see every key before the band.
        IS_HIGH_RAW: Whether keys of high tiles are the caller's own, from whose scores what smoothing takes is still to
            be taken.
    """
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    Q_DTYPE: gl.constexpr = q_desc.dtype
    V_DTYPE: gl.constexpr = v_desc.dtype
    IS_STAGED: gl.constexpr = q_low_desc is not None
    IS_WIDE: gl.constexpr = is_16bit(k_low_desc.dtype)
    IS_FP8: gl.constexpr = v_low_desc is not None
    EXPONENT: gl.constexpr = 8.0 if IS_FP8 else 0.0
    S_DTYPE: gl.constexpr = gl.int32 if k_low_desc.dtype == gl.int8 else gl.float32
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HIGH, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16 if IS_WIDE else 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 if IS_FP8 else 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4 if IS_FP8 else 2)
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # of all channels, the output's too
    P_HIGH_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, X_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    H_ROW: gl.constexpr = gl.SliceLayout(1, H_LAYOUT)
    X_ROW: gl.constexpr = gl.SliceLayout(1, X_LAYOUT)

    # The order of the other kernels' ``schedule``, without its divisions: queries are asked for that much earlier.
    i_row = gl.program_id(2) * section + gl.program_id(0) // GROUP
    i_group = gl.program_id(0) % GROUP
    i_block = blocks - 1 - gl.program_id(1) if IS_CAUSAL else gl.program_id(1)
    if i_row >= kv_rows:
        return
    if skip_threshold is not None:
        init_votes()
    i_b = i_row // KV_HEADS
    i_kv = i_row % KV_HEADS
    i_h = i_kv * GROUP + i_group
    q_smem = gl.allocate_shared_memory(Q_DTYPE, [1, 1, _ROWS, D], q_desc.layout)
    if IS_WIDE:
        q_low_smem = reinterpret(q_smem, q_low_desc.dtype, [1, 1, _ROWS, D], q_low_desc.layout)
    elif IS_STAGED:
        q_low_smem = gl.allocate_shared_memory(q_low_desc.dtype, [1, 1, _ROWS, D], q_low_desc.layout)
    else:
        # First the Hadamard matrix, then the queries of low tiles.
        matrix = gl.allocate_shared_memory(Q_DTYPE, [_MATRIX, _MATRIX], gl.NVMMASharedLayout(128, 16, 2))
    k_smem = gl.allocate_shared_memory(k_low_desc.dtype, [K_STAGES, _HIGH if IS_WIDE else _TILE, D], k_low_desc.layout)
    if IS_FP8:
        v_smem = gl.allocate_shared_memory(v_low_desc.dtype, [V_STAGES, D, _TILE], v_low_desc.layout)
        unit_smem = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        v_smem = gl.allocate_shared_memory(V_DTYPE, [V_STAGES, 1, 1, _HIGH, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for place in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(place), count=1)
    for place in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(place), count=1)
    fence_async_shared()
    _barrier()

    HAS_ROWS: gl.constexpr = positions_ptr is not None
    q_offset, kv_offset, visible_start, visible_end = positions_of(positions_ptr, i_b, q_offset, kv_offset, kv_len)
    start = ((q_offset >> _ROWS_SHIFT) + i_block) * _ROWS
    last = gl.minimum(start + _ROWS, q_offset + q_len)
    t_0 = start >> _TILE_SHIFT
    t_1 = (last - 1) >> _TILE_SHIFT
    begin, end = seen_by_one(visible_start, visible_end, start, last, window, IS_CAUSAL)
    inner_begin, inner_end = seen_by_all(visible_start, visible_end, start, last, window, IS_CAUSAL)
    if HAS_ROWS:
        end = gl.where(start < q_offset + q_len, end, begin)
    if mask_ptr is not None:
        wait_for_operands()
        plane = (i_b * planes_per_row + i_h * planes_per_head).to(gl.int64)
        begin, end = shown_by_mask(
            begin, end, bounds_ptr + plane * blocks * 2, i_block, blocks, kv_offset >> _TILE_SHIFT, storage_tiles, 1
        )
    a_0, a_1, b_0, b_1 = high_blocks(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    c_0, c_1, d_0, d_1 = low_tiles(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    n_a = a_1 - a_0
    n_low = c_1 - c_0 + d_1 - d_0
    n_high = n_a + b_1 - b_0
    first = kv_offset >> _TILE_SHIFT
    stored = i_row * storage_tiles - first

    # The quantiser reads what the caller gave, so that is there; what it writes is waited for.
    q_block = [i_b, i_h, start - q_offset, 0]
    if not IS_STAGED:
        mbarrier.expect(q_full, _ROWS * D * 2)
        copy(q_desc, q_block, q_full, q_smem)
    if HADAMARD_SIZE > 0:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            FILL: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])
            matrix.store(_hadamard_matrix(Q_DTYPE, min(HADAMARD_SIZE, 64), FILL))
            fence_async_shared()
    if mask_ptr is None:
        wait_for_operands()
    if IS_WIDE:
        mbarrier.expect(q_full, _ROWS * D * 2)
        copy(q_desc, q_block, q_full, q_smem)
    elif IS_STAGED:
        mbarrier.expect(q_full, _ROWS * D * 3)
        copy(q_low_desc, q_block, q_full, q_low_smem)
        copy(q_desc, q_block, q_full, q_smem)
    n_keys = 2 * n_low if IS_WIDE else n_low
    keys = (k_desc, k_low_desc, k_smem, k_full, kv_offset if KEY_LAYOUT == "caller" else first * _TILE, n_keys)
    values = (v_desc, v_low_desc, v_smem, v_full, kv_offset, HEAD_DIM)
    head = (i_b, i_kv, stored)
    high = (n_high, n_a, a_0, b_0)
    low = (c_0, c_1, d_0)
    for place in gl.static_range(K_STAGES):
        _issue_key_load(place, keys, head, high, low, D, IS_CAUSAL, False)
    for place in gl.static_range(V_STAGES):
        _issue_high_value_load(place, values, head, high, D)

    if mean_ptr is not None:
        mean_ptr += i_row.to(gl.int64) * HEAD_DIM
    if k_low_factor_ptr is not None:
        k_low_factor_ptr += i_row.to(gl.int64) * storage_tiles - first
    if IS_FP8:
        EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        channel = gl.arange(0, D, layout=EACH)
        value_units = gl.load(
            value_factor_ptr + i_row.to(gl.int64) * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=1.0
        )
    m_i = gl.full([_ROWS], -1.0e30, gl.float32, ROW)
    sums = thread_sums(gl.zeros([_ROWS, _TILE], gl.float32, S_LAYOUT))
    row_factor = gl.full([_ROWS], 1.0, gl.float32, X_ROW)
    shift = gl.zeros([_ROWS], gl.float32, X_ROW)
    mean = gl.zeros([D], gl.float32, gl.SliceLayout(0, X_LAYOUT))
    if IS_STAGED:
        x_rows = start - q_offset + gl.arange(0, _ROWS, layout=X_ROW)
        m_row = (x_rows >= 0) & (x_rows < q_len)
        rows_ptr += (i_b * Q_HEADS + i_h).to(gl.int64) * q_len
        # A unit of what is dequantised is worth 1; to load that would cost registers in the loop over low tiles.
        row_factor = row_factor * logit_scale if IS_WIDE else gl.load(rows_ptr + x_rows, mask=m_row, other=1.0)
        if mean_ptr is not None:
            rows_ptr += (kv_rows * GROUP).to(gl.int64) * q_len
            shift = gl.load(rows_ptr + x_rows, mask=m_row, other=0.0) * logit_scale
    elif mean_ptr is not None:
        channels = gl.arange(0, D, layout=gl.SliceLayout(0, X_LAYOUT))
        mean = gl.load(mean_ptr + channels, mask=channels < HEAD_DIM, other=0.0)
    mbarrier.wait(q_full, 0)
    q = q_smem.reshape([_ROWS, D])

    # ---- the queries of low tiles
    if IS_STAGED:
        q_low = q_low_smem.reshape([_ROWS, D])
        if IS_FP8:
            unit_smem.store(value_units)
    else:
        q_low = reinterpret(matrix, k_low_desc.dtype, [_MATRIX * 128 // D, D], k_low_desc.layout)
        if D < 128:
            q_low = q_low.slice(0, _ROWS)
        if n_low > 0:
            x = _rotated(q, matrix, HADAMARD_SIZE, H_LAYOUT, X_LAYOUT)
            # Of bits, which order like magnitudes, with NaN above all.
            largest = gl.max(gl.abs(x).to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True) * norm
            reciprocal, unit = _row_scale(largest.to(gl.int32, bitcast=True), FORM, FORMAT, IS_CEIL)
            q_low.store(_to_elements(x, (reciprocal * norm)[:, None], FORM, IS_CEIL))
            row_factor = unit * logit_scale
            if IS_FP8:
                unit_smem.store(value_units)
            fence_async_shared()
            _barrier()
    row_factor = gl.convert_layout(row_factor, ROW, assert_trivial=True)

    # ---- what smoothing took from the scores of low tiles; the mean key has come in the meantime
    if mean_ptr is not None and not IS_STAGED:
        shift = gl.sum(q.load(X_LAYOUT).to(gl.float32) * mean[None, :], 1) * logit_scale
    # A plain softmax does not see what smoothing takes from a row's scores: the log of the denominator gets it back in
    # the end. A cap sees it, so scores of low tiles get it back before.
    returned = gl.zeros([_ROWS], gl.float32, ROW)
    if softcap is not None:
        returned = finite_or_zero(gl.convert_layout(shift, ROW, assert_trivial=True))
        shift = gl.zeros_like(shift)

    if mask_ptr is not None:
        mask_ptr += plane * q_len * (4 * storage_tiles) - 4 * first
        SUMS: gl.constexpr = sums.type.layout
        words_ptr = places_of_words(mask_ptr, start - q_offset, q_len, storage_tiles, SUMS)

    # ---- high tiles
    shift = gl.convert_layout(shift, H_ROW, assert_trivial=True)
    high_shift = shift if IS_HIGH_RAW else gl.zeros_like(shift)
    q_pos = start + gl.arange(0, _ROWS, layout=H_ROW)
    acc = gl.zeros([_ROWS, D], gl.float32, X_LAYOUT)
    for i in range(n_high):
        k_slot = i & (K_STAGES - 1)
        v_slot = i & (V_STAGES - 1)
        position = visited(i, n_a, a_0, b_0) * _HIGH
        if mask_ptr is not None:
            words = gl.load(words_ptr + 4 * (position >> _TILE_SHIFT)) >> (position & _HIGH) // 4
        mbarrier.wait(k_full.index(k_slot), (i >> (K_STAGES - 1)) & 1)
        k = _high_place(k_smem, k_slot, k_desc, D).reshape([_HIGH, D])
        s = gl.zeros([_ROWS, _HIGH], gl.float32, H_LAYOUT)
        s = warpgroup_mma(q, k.permute([1, 0]), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        unit = logit_scale
        if softcap is not None:
            s = s * logit_scale
            if not IS_HIGH_RAW:
                s += gl.convert_layout(returned, H_ROW, assert_trivial=True)[:, None]
            s = capped(s, softcap)
            unit = 1.0
        is_edge = position + _HIGH > inner_end
        if HAS_EDGES:
            is_edge = is_edge | (position < inner_begin)
        if is_edge:
            k_pos = position + gl.arange(0, _HIGH, layout=gl.SliceLayout(0, H_LAYOUT))
            if HAS_EDGES:
                s = _hide_unseen(s, q_pos, k_pos, visible_start, visible_end, window, IS_CAUSAL)
            else:
                s = gl.where(k_pos[None, :] <= q_pos[:, None], s, float("-inf"))
        if mask_ptr is not None:
            s = hide_masked(s, words)
        m_old = gl.convert_layout(m_i, H_ROW, assert_trivial=True)
        p, alpha, m_new = online_softmax(s, gl.zeros_like(m_old) + unit, high_shift, m_old, EXPONENT)
        sums = add_sums(sums, p, alpha)
        m_i = gl.convert_layout(m_new, ROW, assert_trivial=True)
        operand = operand_of(p, V_DTYPE, P_HIGH_LAYOUT)
        v = _high_place(v_smem, v_slot, v_desc, D).reshape([_HIGH, D])
        mbarrier.wait(v_full.index(v_slot), (i >> (V_STAGES - 1)) & 1)
        if HAS_ROWS:  # noqa: SIM102 (a constexpr branch)
            if (position < visible_start) | (position + _HIGH > visible_end):
                hide_values(v, position, visible_start, visible_end, D)
        if IS_FP8 and skip_threshold is not None:
            # A fresh accumulator: one that products add to is tied to registers that the other loop has no room for.
            fresh = gl.zeros([_ROWS, D], gl.float32, X_LAYOUT)
            product = warpgroup_mma_wait(0, deps=[warpgroup_mma(operand, v, fresh, use_acc=False, is_async=True)])
            acc = add_values(acc, product, alpha, True, X_LAYOUT)
        else:
            acc = warpgroup_mma_wait(0, deps=[values_product(acc, operand, alpha, v, X_LAYOUT)])
        _issue_key_load(i + K_STAGES, keys, head, high, low, D, IS_CAUSAL, False)
        _issue_high_value_load(i + V_STAGES, values, head, high, D)

    # ---- low tiles
    if IS_WIDE:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            mbarrier.expect(q_full, _ROWS * D * 2)
            copy(q_low_desc, q_block, q_full, q_low_smem)
            mbarrier.wait(q_full, 1)
    if IS_FP8:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            acc *= inverse_power_of_two(unit_smem.load(gl.SliceLayout(0, X_LAYOUT)))[None, :]
    acc = gl.convert_layout(acc, O_LAYOUT, assert_trivial=True)
    one, no_bias = gl.full([_ROWS], 1.0, gl.float32, ROW), gl.zeros([_ROWS], gl.float32, ROW)
    n_kept = 0
    if skip_threshold is not None:
        # m_i is the largest logit in high tiles. A block of which the call holds only a part keeps every tile.
        is_whole = (start >= q_offset) & (start + _ROWS <= q_offset + q_len)
        bound = gl.where(is_whole, m_i - skip_threshold, float("-inf"))
    zero = gl.zeros([_ROWS, _TILE], S_DTYPE, S_LAYOUT)
    zero_h = gl.zeros([_ROWS, _HIGH], gl.float32, H_LAYOUT)
    i_value = n_high
    for j in range(n_low):
        i = n_high + j
        tile = _low_tile(j, c_0, c_1, d_0, IS_CAUSAL)
        factor = row_factor
        if k_low_factor_ptr is not None:
            factor = row_factor * gl.load(k_low_factor_ptr + tile)
        if mask_ptr is not None:
            words = gl.load(words_ptr + 4 * tile)
        if IS_WIDE:
            i_key = i + j
            slot_0, slot_1 = i_key & 1, (i_key + 1) & 1
            mbarrier.wait(k_full.index(slot_0), (i_key >> 1) & 1)
            s_0 = warpgroup_mma(q_low, k_smem.index(slot_0).permute([1, 0]), zero_h, use_acc=False, is_async=True)
            mbarrier.wait(k_full.index(slot_1), ((i_key + 1) >> 1) & 1)
            s_1 = warpgroup_mma(q_low, k_smem.index(slot_1).permute([1, 0]), zero_h, use_acc=False, is_async=True)
            _issue_low_value_load(i_value, tile, 0, values, head, D, n_high, skip_threshold is not None)
            s_0, s_1 = warpgroup_mma_wait(0, deps=[s_0, s_1])
            _issue_key_load(i_key + 2, keys, head, high, low, D, IS_CAUSAL, True)
            _issue_key_load(i_key + 3, keys, head, high, low, D, IS_CAUSAL, True)
            s = _joined(s_0, s_1, S_LAYOUT)
        else:
            k_slot = i & (K_STAGES - 1)
            mbarrier.wait(k_full.index(k_slot), (i >> (K_STAGES - 1)) & 1)
            s = warpgroup_mma(q_low, k_smem.index(k_slot).permute([1, 0]), zero, use_acc=False, is_async=True)
            _issue_low_value_load(i_value, tile, 0, values, head, D, n_high, skip_threshold is not None)
            s = warpgroup_mma_wait(0, deps=[s])
            _issue_key_load(i + K_STAGES, keys, head, high, low, D, IS_CAUSAL, True)
        x = s
        if softcap is not None:
            x = capped(x.to(gl.float32) * factor[:, None] + returned[:, None], softcap)
            factor = one
        if HAS_EDGES:
            x = x.to(gl.float32)
            if (tile * _TILE < inner_begin) | (tile * _TILE + _TILE > inner_end):
                k_pos = tile * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(0, S_LAYOUT))
                pos = start + gl.arange(0, _ROWS, layout=ROW)
                # Scaled before: the factor of a broken tile is NaN, and so would be its product with infinity.
                x = _hide_unseen(x * factor[:, None], pos, k_pos, visible_start, visible_end, window, IS_CAUSAL)
                factor = one
        if mask_ptr is not None:
            x = hide_masked(x * factor[:, None], words)
            factor = one
        keep = True
        if skip_threshold is not None:
            keep = any_row_keeps(x, factor, bound, tile, 0, _VOTES)
        if keep:
            if skip_threshold is not None:
                announce_keep(tile, 0, _VOTES)
            p, alpha, m_i = online_softmax(x, factor, no_bias, m_i, EXPONENT)
            if IS_FP8:
                sums = add_sums(sums, p, alpha)
                operand = operand_of(p, v_smem.dtype, P_LAYOUT)
                v_slot = i_value & (V_STAGES - 1)
                mbarrier.wait(v_full.index(v_slot), (i_value >> (V_STAGES - 1)) & 1)
                v = v_smem.index(v_slot).permute([1, 0])
                product = warpgroup_mma_wait(0, deps=[values_product(acc, operand, alpha, v, O_LAYOUT)])
                acc = add_values(acc, product, alpha, True, O_LAYOUT)
                i_value = i_value + 1
            else:
                parts = halves(p)
                if V_STAGES > 1:
                    _issue_low_value_load(i_value + 1, tile, 1, values, head, D, n_high, False)
                for half in gl.static_range(2):
                    sums = add_sums(sums, parts[half], alpha)
                    operand = operand_of(parts[half], V_DTYPE, P_LAYOUT)
                    v_slot = i_value & (V_STAGES - 1)
                    mbarrier.wait(v_full.index(v_slot), (i_value >> (V_STAGES - 1)) & 1)
                    v = v_smem.index(v_slot).reshape([_HIGH, D])
                    if HAS_ROWS:  # noqa: SIM102 (a constexpr branch)
                        if (tile * _TILE < visible_start) | (tile * _TILE + _TILE > visible_end):
                            hide_values(v, tile * _TILE + half * _HIGH, visible_start, visible_end, D)
                    acc = warpgroup_mma_wait(0, deps=[values_product(acc, operand, alpha, v, O_LAYOUT)])
                    alpha = gl.zeros_like(alpha) + 1.0
                    i_value = i_value + 1
                    if half == 0 and V_STAGES == 1:
                        _issue_low_value_load(i_value, tile, 1, values, head, D, n_high, False)
            n_kept = n_kept + 1
        else:
            i_value = i_value + 1
    if skip_threshold is not None:
        # No copy of a skipped tile's values may outlive the CTA.
        for before in gl.static_range(1, V_STAGES + 1):
            i_last = i_value - before
            place = v_full.index(i_last & (V_STAGES - 1))
            mbarrier.wait(place, (i_last >> (V_STAGES - 1)) & 1, pred=i_last >= n_high)
    if tile_counts_ptr is not None:  # noqa: SIM102 (a constexpr branch)
        if is_whole:
            gl.atomic_add(tile_counts_ptr + 2 * i_h, (n_low - n_kept).to(gl.int64), sem="relaxed")
            gl.atomic_add(tile_counts_ptr + 2 * i_h + 1, n_low.to(gl.int64), sem="relaxed")
    acc = gl.convert_layout(acc, X_LAYOUT, assert_trivial=True)
    if IS_FP8:  # noqa: SIM102 (a constexpr branch)
        if n_low > 0:
            acc *= unit_smem.load(gl.SliceLayout(0, X_LAYOUT))[None, :]

    l_i = gl.convert_layout(gl.sum(sums, 1), ROW, assert_trivial=True)
    bias = finite_or_zero(gl.convert_layout(shift, ROW, assert_trivial=True))
    if sinks_ptr is not None:
        sinks_ptr += i_h
    scale, lse = finalize_softmax(m_i, l_i, bias, sinks_ptr, EXPONENT)
    scale = gl.convert_layout(scale, X_ROW, assert_trivial=True)
    # By way of where the queries were, so that threads store what lies side by side.
    o = reinterpret(q_smem, V_DTYPE, [1, 1, _ROWS, D], v_desc.layout).reshape([_ROWS, D])
    o.store((acc * scale[:, None]).to(V_DTYPE))
    _barrier()
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_rows = start - q_offset + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, OUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    out_ptr += i_b.to(gl.int64) * stride_ob + i_h.to(gl.int64) * stride_oh
    m_out = ((o_rows >= 0) & (o_rows < q_len))[:, None] & (o_d < HEAD_DIM)[None, :]
    gl.store(out_ptr + (o_rows.to(gl.int64)[:, None] * stride_ot + o_d[None, :]), o.load(OUT), mask=m_out)
    rows = start - q_offset + gl.arange(0, _ROWS, layout=ROW)
    lse_ptr += (i_b * Q_HEADS + i_h).to(gl.int64) * q_len
    gl.store(lse_ptr + rows, lse, mask=(rows >= 0) & (rows < q_len))
