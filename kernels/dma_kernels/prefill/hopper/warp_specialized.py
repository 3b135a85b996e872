"""The warp-specialised prefill kernel for Hopper, in Gluon: it computes long calls.

One producer warp issues TMA loads of keys and values. ``GROUPS`` consumer warpgroups of 64 query rows each compute
attention with them, so a tile is read from L2 once for ``64 * GROUPS`` queries. While one warpgroup waits for its own
MMAs, the others compute exponentials and conversions.

All warpgroups of a CTA walk the same tiles, the union of what their rows need; each releases tiles that are not its
own without computing. 64 query positions lie in one tile, those of a CTA in at most two (four warpgroups: three).

With a skip threshold each warpgroup votes on a low tile after the Q·K product (:mod:`.skipping`). A skipped tile costs
that product and the row maxima. Its values are loaded all the same, because other warpgroups may need them.
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

from ...device.gluon import reinterpret
from ...numerics.formats import TILE
from .mask import hide_masked, hide_values, places_of_words, seen_keys
from .mma import add_values, halves, inverse_power_of_two, is_16bit, operand_of, values_product
from .pipeline import copy, wait_for_operands
from .skipping import announce_keep, any_row_keeps, init_votes
from .softmax import add_sums, capped, finalize_softmax, finite_or_zero, online_softmax, thread_sums
from .tile_range import (
    ROWS,
    clamp,
    high_blocks,
    low_tiles,
    positions_of,
    schedule,
    seen_by_all,
    seen_by_one,
    shown_by_mask,
    visited,
)

_ROWS = gl.constexpr(ROWS)
_PRODUCER_REGISTERS = gl.constexpr(24)
_TILE = gl.constexpr(TILE)
_HIGH = gl.constexpr(TILE // 2)
_ROWS_SHIFT = gl.constexpr(ROWS.bit_length() - 1)
_TILE_SHIFT = gl.constexpr(TILE.bit_length() - 1)


@gluon.jit
def _high_place(slot, dtype: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the place of 64 keys or values of high tiles, 16-bit ``[1, 1, 64, D]``, in that of a low tile's."""
    if is_16bit(slot.dtype):
        place = reinterpret(slot, dtype, [2, 1, 1, _HIGH, D], LAYOUT).index(0)
    else:
        place = reinterpret(slot, dtype, [1, 1, _HIGH, D], LAYOUT)
    return place


@gluon.jit
def _parts(x, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the columns of ``x`` in parts of ``WIDTH``: a renaming of registers."""
    N: gl.constexpr = x.shape[1]
    if N == WIDTH:
        found = (gl.convert_layout(x, LAYOUT, assert_trivial=True),)
    else:
        left, right = halves(x)
        found = _parts(left, WIDTH, LAYOUT) + _parts(right, WIDTH, LAYOUT)
    return found


@gluon.jit
def _some_channels(v, part: gl.constexpr, WIDTH: gl.constexpr):
    """Return the ``part``-th ``WIDTH`` channels of values as ``[N, WIDTH]``; E4M3 ones are ``[Dv, N]``."""
    if v.dtype == gl.float8e4nv:
        SHAPE: gl.constexpr = [v.shape[0] // WIDTH, WIDTH, v.shape[1]]
        v = reinterpret(v, v.dtype, SHAPE, v.layout).index(part).permute([1, 0])
    return v


# Named barriers for places that are free again. An arrival on a shared-memory barrier is one thread's, and Triton makes
# its warpgroup meet before each; here every warp arrives for itself and none waits. Triton takes the lowest numbers.
_FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def _release(barrier, THREADS: gl.constexpr):
    """Let the producer have a place; ``THREADS`` are those of all who meet at the barrier."""
    gl.inline_asm_elementwise("bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, THREADS], gl.int32, False, 1)


@gluon.jit
def _acquire(barrier, THREADS: gl.constexpr):
    """Wait until all who had a place have released it."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, THREADS], gl.int32, False, 1)


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    """Return the place behind ``slot`` in the ring, and the phase of its barriers there."""
    is_last = slot == STAGES - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _produce(given, GROUPS: gl.constexpr, VALUE_DIM: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Copy the program's queries, then every block of keys and values as soon as its place is free."""
    (
        q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc, q_smem, q_low_smem, k_smem, v_smem, q_full, full,
        i_b, i_h, i_kv, i_row, row, first, key_base, value_base, low_value_base, begin, end, t_0, t_1,
        storage_tiles, diagonal_tiles, sink_tiles,
    ) = given  # fmt: skip
    STAGES: gl.constexpr = k_smem.shape[0]
    THREADS: gl.constexpr = 128 * GROUPS + 32
    D: gl.constexpr = q_smem.shape[4]
    IS_FP8: gl.constexpr = v_low_desc.dtype == gl.float8e4nv
    DV: gl.constexpr = v_smem.shape[1 if IS_FP8 else 4]
    Q_DTYPE: gl.constexpr = q_smem.dtype
    K_LAYOUT: gl.constexpr = k_desc.layout
    V_LAYOUT: gl.constexpr = v_desc.layout
    ARE_KEYS_WIDE: gl.constexpr = is_16bit(k_low_desc.dtype)
    LOW_BYTES: gl.constexpr = _TILE * (D * (2 if ARE_KEYS_WIDE else 1) + DV * (1 if IS_FP8 else 2))
    mbarrier.expect(q_full, GROUPS * _ROWS * D * (2 if ARE_KEYS_WIDE else 3))
    for g in gl.static_range(GROUPS):
        copy(q_desc, [i_b, i_h, row + g * _ROWS, 0], q_full, q_smem.index(g))
        if not ARE_KEYS_WIDE:
            copy(q_low_desc, [i_b, i_h, row + g * _ROWS, 0], q_full, q_low_smem.index(g))
    a_0, a_1, b_0, b_1 = high_blocks(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    n_a = a_1 - a_0
    slot = 0
    for t in range(n_a + b_1 - b_0):
        position = visited(t, n_a, a_0, b_0) * _HIGH
        _acquire(_FIRST_BARRIER + slot, THREADS)
        mbarrier.expect(full.index(slot), _HIGH * (D + DV) * 2)
        k = _high_place(k_smem.index(slot), Q_DTYPE, D, K_LAYOUT)
        copy(k_desc, [i_b, i_kv, position - key_base, 0], full.index(slot), k)
        v = _high_place(v_smem.index(slot), v_desc.dtype, DV, V_LAYOUT)
        copy(v_desc, [i_b, i_kv, position - value_base, 0], full.index(slot), v)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    if ARE_KEYS_WIDE:
        # There is no room for both: these take the place of those of high tiles.
        _acquire(_FIRST_BARRIER + STAGES, THREADS)
        mbarrier.expect(q_full, GROUPS * _ROWS * D * 2)
        for g in gl.static_range(GROUPS):
            copy(q_low_desc, [i_b, i_h, row + g * _ROWS, 0], q_full, q_low_smem.index(g))
    c_0, c_1, d_0, d_1 = low_tiles(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    n_c = c_1 - c_0
    for j in range(n_c + d_1 - d_0):
        tile = visited(j, n_c, c_0, d_0)
        stored = i_row * storage_tiles + tile - first
        _acquire(_FIRST_BARRIER + slot, THREADS)
        mbarrier.expect(full.index(slot), LOW_BYTES)
        copy(k_low_desc, [stored * _TILE, 0], full.index(slot), k_smem.index(slot))
        if IS_FP8:
            copy(v_low_desc, [stored * VALUE_DIM, 0], full.index(slot), v_smem.index(slot))
        else:
            copy(v_low_desc, [i_b, i_kv, tile * _TILE - low_value_base, 0], full.index(slot), v_smem.index(slot))
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    # Whoever has released a place has been heard: no barrier is left half full.
    for place in gl.static_range(STAGES):
        _acquire(_FIRST_BARRIER + place, THREADS)


@gluon.jit
def _add_all_values(accs, product, p, alpha, v, WIDTH: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return ``accs * alpha`` plus the products of ``p`` and the values, one or two, of which ``product`` is the first.

    While it is added the second is computed.
    """
    IS_FP8: gl.constexpr = v.dtype == gl.float8e4nv
    product = warpgroup_mma_wait(0, deps=[product])
    if len(accs) == 1:
        added = (add_values(accs[0], product, alpha, IS_FP8, O_LAYOUT),)
    else:
        second = values_product(accs[1], p, alpha, _some_channels(v, 1, WIDTH), O_LAYOUT)
        first = add_values(accs[0], product, alpha, IS_FP8, O_LAYOUT)
        # The sum is waited for, too: else the compiler adds after the next products, for which there are no registers.
        second, first = warpgroup_mma_wait(0, deps=[second, first])
        added = (first, add_values(accs[1], second, alpha, IS_FP8, O_LAYOUT))  # type: ignore[assignment]
    return added


@gluon.jit
def _pass_by(full, slot, phase, count, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Let go of the next ``count`` blocks as they come; return the place behind them."""
    for _ in range(count):
        mbarrier.wait(full.index(slot), phase)
        _release(_FIRST_BARRIER + slot, THREADS)
        slot, phase = _next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _consume(
    given, G: gl.constexpr, GROUPS: gl.constexpr, VALUE_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, HAS_EDGES: gl.constexpr, HAS_MEAN: gl.constexpr, IS_HIGH_RAW: gl.constexpr,
):  # fmt: skip
    """Compute the output of 64 query positions from ``position + 64 G`` on."""
    (
        q_smem, q_low_smem, k_smem, v_smem, q_full, full,
        out_ptr, lse_ptr, rows_ptr, k_low_factor_ptr, value_factor_ptr, sinks_ptr, positions_ptr, mask_ptr,
        stride_ot, plane, q_offset, q_len, position, first, begin, end, t_0, t_1, visible_start, visible_end, window,
        storage_tiles, diagonal_tiles, sink_tiles, softcap, logit_scale, skip_threshold, tile_counts_ptr,
    ) = given  # fmt: skip
    STAGES: gl.constexpr = k_smem.shape[0]
    THREADS: gl.constexpr = 128 * GROUPS + 32
    for place in gl.static_range(STAGES):
        _release(_FIRST_BARRIER + place, THREADS)
    slot, phase = 0, 0
    HAS_ROWS: gl.constexpr = positions_ptr is not None
    Q_DTYPE: gl.constexpr = q_smem.dtype
    HIGH_LAYOUT: gl.constexpr = q_smem.layout  # of queries, and so of as many keys and values of high tiles
    V_DTYPE: gl.constexpr = v_smem.dtype
    V_HIGH_DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    IS_FP8: gl.constexpr = gl.float8e4nv == V_DTYPE
    D: gl.constexpr = k_smem.shape[2]
    DV: gl.constexpr = v_smem.shape[1 if IS_FP8 else 4]
    EXPONENT: gl.constexpr = 8.0 if IS_FP8 else 0.0
    S_DTYPE: gl.constexpr = gl.int32 if q_low_smem.dtype == gl.int8 else gl.float32
    ARE_KEYS_WIDE: gl.constexpr = is_16bit(k_smem.dtype)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16 if ARE_KEYS_WIDE else 32])
    H_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HIGH, 16])
    WIDTH: gl.constexpr = min(DV, 128) if IS_FP8 else DV  # of a product, which in FP8 has its own accumulator
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32 if IS_FP8 else 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4 if IS_FP8 else 2)
    O_HIGH_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P_HIGH_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_HIGH_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    H_ROW: gl.constexpr = gl.SliceLayout(1, H_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    start = position + G * _ROWS
    tile_q = start >> _TILE_SHIFT
    q_end = q_offset + q_len
    is_mine = start < q_end
    reach = 0 if IS_CAUSAL else diagonal_tiles
    my_begin, my_end = seen_by_one(begin, end, start, start + _ROWS, window, IS_CAUSAL)
    inner_begin, inner_end = seen_by_all(visible_start, visible_end, start, start + _ROWS, window, IS_CAUSAL)
    if mask_ptr is not None:
        inner_end = inner_begin
    rows = start - q_offset + gl.arange(0, _ROWS, layout=ROW)
    m_row = (rows >= 0) & (rows < q_len)
    row_factor = gl.load(rows_ptr + rows, mask=m_row, other=1.0)
    m_i = gl.full([_ROWS], -1.0e30, gl.float32, ROW)
    sums = thread_sums(gl.zeros([_ROWS, _TILE], gl.float32, S_LAYOUT))
    # A plain softmax does not see what smoothing takes from a row's scores: the log of the denominator gets it back in
    # the end. A cap sees it, so scores of smoothed keys get it back before.
    returned = gl.zeros([_ROWS], gl.float32, ROW)
    if HAS_MEAN and softcap is not None:
        returned = finite_or_zero(gl.load(rows_ptr + plane + rows, mask=m_row, other=0.0) * logit_scale)
    if mask_ptr is not None:
        SUMS: gl.constexpr = sums.type.layout
        words_ptr = places_of_words(mask_ptr, start - q_offset, q_len, storage_tiles, SUMS)
    acc = gl.zeros([_ROWS, DV], gl.float32, O_HIGH_LAYOUT)
    mbarrier.wait(q_full, 0)

    # ---- high tiles
    a_0, a_1, b_0, b_1 = high_blocks(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    n_a = a_1 - a_0
    n_high = n_a + b_1 - b_0
    q = q_smem.index(G).reshape([_ROWS, D])
    q_pos = start + gl.arange(0, _ROWS, layout=H_ROW)
    shift = gl.zeros([_ROWS], gl.float32, H_ROW)
    if HAS_MEAN and IS_HIGH_RAW and softcap is None:
        h_rows = q_pos - q_offset
        shift = gl.load(rows_ptr + plane + h_rows, mask=(h_rows >= 0) & (h_rows < q_len), other=0.0) * logit_scale
    for t in range(n_high):
        block = visited(t, n_a, a_0, b_0)
        tile = block >> 1
        is_band = (tile >= tile_q - diagonal_tiles) & (tile <= tile_q + reach)
        mbarrier.wait(full.index(slot), phase)
        is_near = block * _HIGH < my_end
        if window is not None:
            is_near = is_near & (block * _HIGH + _HIGH > my_begin)
        if is_mine & is_near & ((tile < sink_tiles) | is_band):
            if HAS_ROWS:  # noqa: SIM102 (a constexpr branch)
                if (block * _HIGH < visible_start) | (block * _HIGH + _HIGH > visible_end):
                    hidden = _high_place(v_smem.index(slot), V_HIGH_DTYPE, DV, HIGH_LAYOUT).reshape([_HIGH, DV])
                    hide_values(hidden, block * _HIGH, visible_start, visible_end, DV)
            if mask_ptr is not None:
                words = gl.load(words_ptr + 4 * tile) >> (block & 1) * 16
            k = _high_place(k_smem.index(slot), Q_DTYPE, D, HIGH_LAYOUT).reshape([_HIGH, D])
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
            is_edge = block * _HIGH + _HIGH > inner_end
            if HAS_EDGES:
                is_edge = is_edge | (block * _HIGH < inner_begin)
            if is_edge:
                k_pos = block * _HIGH + gl.arange(0, _HIGH, layout=gl.SliceLayout(0, H_LAYOUT))
                seen = seen_keys(q_pos, k_pos, visible_start, visible_end, window, IS_CAUSAL)
                s = gl.where(seen, s, float("-inf"))
            if mask_ptr is not None:
                s = hide_masked(s, words)
            m_old = gl.convert_layout(m_i, H_ROW, assert_trivial=True)
            p, alpha, m_new = online_softmax(s, gl.zeros_like(m_old) + unit, shift, m_old, EXPONENT)
            sums = add_sums(sums, p, alpha)
            p = operand_of(p, V_HIGH_DTYPE, P_HIGH_LAYOUT)
            v = _high_place(v_smem.index(slot), V_HIGH_DTYPE, DV, HIGH_LAYOUT).reshape([_HIGH, DV])
            product = values_product(acc, p, alpha, v, O_HIGH_LAYOUT)
            acc = warpgroup_mma_wait(0, deps=[product])
            m_i = gl.convert_layout(m_new, ROW, assert_trivial=True)
        _release(_FIRST_BARRIER + slot, THREADS)
        slot, phase = _next_slot(slot, phase, STAGES)

    # ---- low tiles
    if value_factor_ptr is not None:
        # From here on the output counts in units of the E4M3 values: powers of two, so this is exact.
        o_v = gl.arange(0, DV, layout=gl.SliceLayout(0, O_HIGH_LAYOUT))
        units = gl.load(value_factor_ptr + o_v, mask=o_v < VALUE_DIM, other=1.0)
        acc = acc * inverse_power_of_two(units)[None, :]
    # Of 256 channels those behind the values' own are left out from here on.
    accs = _parts(acc, WIDTH, O_LAYOUT)[: (VALUE_DIM + WIDTH - 1) // WIDTH]
    c_0, c_1, d_0, d_1 = low_tiles(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL)
    # Of those the program visits, the warpgroup's own are c_0..c_2 and d_2..d_1; it passes by the others.
    c_2 = gl.where(is_mine, gl.maximum(gl.minimum(c_1, tile_q - diagonal_tiles), c_0), c_0)
    d_2 = gl.where(is_mine, gl.minimum(gl.maximum(d_0, tile_q + reach + 1), d_1), d_1)
    # What all its queries see of those is c_in..c_out and d_in..d_out; the others have a mask.
    c_a, c_in, c_out, d_in, d_out, d_3 = c_0, c_0, c_2, d_2, d_1, d_1
    if HAS_EDGES:
        inner_first, inner_last = (inner_begin + _TILE - 1) >> _TILE_SHIFT, inner_end >> _TILE_SHIFT
        c_a = clamp(my_begin >> _TILE_SHIFT, c_0, c_2)
        c_in = clamp(inner_first, c_a, c_2)
        c_out = clamp(inner_last, c_in, c_2)
        if window is not None:
            d_3 = clamp((my_end + _TILE - 1) >> _TILE_SHIFT, d_2, d_1)
        d_in = clamp(inner_first, d_2, d_3)
        d_out = clamp(inner_last, d_in, d_3)
    if ARE_KEYS_WIDE:
        _release(_FIRST_BARRIER + STAGES, THREADS)
        mbarrier.wait(q_full, 1)
    q = q_low_smem.index(G).reshape([_ROWS, D])
    zero = gl.zeros([_ROWS, _TILE], S_DTYPE, S_LAYOUT)
    one, no_bias = gl.full([_ROWS], 1.0, gl.float32, ROW), gl.zeros([_ROWS], gl.float32, ROW)
    VOTES: gl.constexpr = 16 - GROUPS + G  # the last of the CTA's named barriers
    n_kept = 0
    if skip_threshold is not None:
        # m_i is the largest logit in high tiles. A block of which the call holds only a part keeps every tile.
        is_whole = (start >= q_offset) & (start + _ROWS <= q_end)
        bound = gl.where(is_whole, m_i - skip_threshold, float("-inf"))
    n_between, n_after = c_1 - c_2 + d_2 - d_0, (c_1 - c_2 if IS_CAUSAL else d_1 - d_3)
    slot, phase = _pass_by(full, slot, phase, c_a - c_0, STAGES, THREADS)
    LEGS: gl.constexpr = (2 if IS_CAUSAL else 4) if HAS_EDGES else 1
    for leg in range(LEGS):
        tile, last_tile = c_in, c_out
        if HAS_EDGES:
            # The edge before the band, with what is whole behind it, then the edge at the band; the same behind it.
            edge = c_a
            if leg == 1:
                edge, tile, last_tile = c_out, c_2, c_2
            if not IS_CAUSAL:
                if leg == 2:
                    slot, phase = _pass_by(full, slot, phase, n_between, STAGES, THREADS)
                    edge, tile, last_tile = d_2, d_in, d_out
                if leg == 3:
                    edge, tile, last_tile = d_out, d_3, d_3
            for i in range(edge, tile):
                mbarrier.wait(full.index(slot), phase)
                if HAS_ROWS and not IS_FP8:
                    for half in gl.static_range(2):
                        hidden = v_smem.index(slot).reshape([_TILE, DV]).slice(half * _HIGH, _HIGH)
                        hide_values(hidden, i * _TILE + half * _HIGH, visible_start, visible_end, DV)
                if mask_ptr is not None:
                    words = gl.load(words_ptr + 4 * i)
                s = warpgroup_mma(q, k_smem.index(slot).permute([1, 0]), zero, use_acc=False, is_async=True)
                factor = row_factor
                if k_low_factor_ptr is not None:
                    factor = row_factor * gl.load(k_low_factor_ptr + i - first)
                s = warpgroup_mma_wait(0, deps=[s])
                k_pos = i * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(0, S_LAYOUT))
                pos = start + gl.arange(0, _ROWS, layout=ROW)
                seen = seen_keys(pos, k_pos, visible_start, visible_end, window, IS_CAUSAL)
                logits = s.to(gl.float32) * factor[:, None]
                if softcap is not None:
                    logits = capped(logits + returned[:, None], softcap)
                logits = gl.where(seen, logits, float("-inf"))
                if mask_ptr is not None:
                    logits = hide_masked(logits, words)
                keep = True
                if skip_threshold is not None:
                    keep = any_row_keeps(logits, one, bound, i, G, VOTES)
                if keep:
                    if skip_threshold is not None:
                        announce_keep(i, G, VOTES)
                    p, alpha, m_i = online_softmax(logits, one, no_bias, m_i, EXPONENT)
                    sums = add_sums(sums, p, alpha)
                    operand = operand_of(p, V_DTYPE, P_LAYOUT)
                    v = v_smem.index(slot) if IS_FP8 else v_smem.index(slot).reshape([_TILE, DV])
                    product = values_product(accs[0], operand, alpha, _some_channels(v, 0, WIDTH), O_LAYOUT)
                    accs = _add_all_values(accs, product, operand, alpha, v, WIDTH, O_LAYOUT)
                    n_kept = n_kept + 1
                _release(_FIRST_BARRIER + slot, THREADS)
                slot, phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase, pred=tile < last_tile)
        for i in range(tile, last_tile):
            s = warpgroup_mma(q, k_smem.index(slot).permute([1, 0]), zero, use_acc=False, is_async=True)
            factor = row_factor
            if k_low_factor_ptr is not None:
                factor = row_factor * gl.load(k_low_factor_ptr + i - first)
            x = warpgroup_mma_wait(0, deps=[s])
            if softcap is not None:
                x = capped(x.to(gl.float32) * factor[:, None] + returned[:, None], softcap)
                factor = one
            keep = True
            if skip_threshold is not None:
                keep = any_row_keeps(x, factor, bound, i, G, VOTES)
            if keep:
                if skip_threshold is not None:
                    announce_keep(i, G, VOTES)
                p, alpha, m_i = online_softmax(x, factor, no_bias, m_i, EXPONENT)
                if WIDTH < DV:
                    # There are no registers to keep the probabilities in fp32 while the product is computed.
                    sums = add_sums(sums, p, alpha)
                operand = operand_of(p, V_DTYPE, P_LAYOUT)
                v = v_smem.index(slot) if IS_FP8 else v_smem.index(slot).reshape([_TILE, DV])
                product = values_product(accs[0], operand, alpha, _some_channels(v, 0, WIDTH), O_LAYOUT)
                if WIDTH == DV:
                    sums = add_sums(sums, p, alpha)
                accs = _add_all_values(accs, product, operand, alpha, v, WIDTH, O_LAYOUT)
                n_kept = n_kept + 1
            _release(_FIRST_BARRIER + slot, THREADS)
            slot, phase = _next_slot(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase, pred=i + 1 < last_tile)
    slot, phase = _pass_by(full, slot, phase, n_after, STAGES, THREADS)

    if tile_counts_ptr is not None:  # noqa: SIM102 (a constexpr branch)
        if is_whole:
            n_low = c_2 - c_a + d_3 - d_2
            gl.atomic_add(tile_counts_ptr, (n_low - n_kept).to(gl.int64), sem="relaxed")
            gl.atomic_add(tile_counts_ptr + 1, n_low.to(gl.int64), sem="relaxed")
    l_i = gl.convert_layout(gl.sum(sums, 1), ROW, assert_trivial=True)
    bias = gl.zeros([_ROWS], gl.float32, ROW)
    if HAS_MEAN and softcap is None:
        bias = finite_or_zero(gl.load(rows_ptr + plane + rows, mask=m_row, other=0.0) * logit_scale)
    scale, lse = finalize_softmax(m_i, l_i, bias, sinks_ptr, EXPONENT)
    scale = gl.convert_layout(scale, O_ROW, assert_trivial=True)
    o_rows = start - q_offset + gl.arange(0, _ROWS, layout=O_ROW)
    for part in gl.static_range(len(accs)):
        o_v = part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, O_LAYOUT))
        result = accs[part] * scale[:, None]
        if value_factor_ptr is not None:
            result = result * gl.load(value_factor_ptr + o_v, mask=o_v < VALUE_DIM, other=0.0)[None, :]
        m_out = ((o_rows >= 0) & (o_rows < q_len))[:, None] & (o_v < VALUE_DIM)[None, :]
        offset = o_rows.to(gl.int64)[:, None] * stride_ot + o_v[None, :]
        gl.store(out_ptr + offset, result.to(out_ptr.dtype.element_ty), mask=m_out)
    gl.store(lse_ptr + rows, lse, mask=m_row)


@gluon.jit(
    do_not_specialize=[
        "q_offset", "kv_offset", "q_len", "kv_len", "storage_tiles", "blocks", "section", "kv_rows",
        "window", "diagonal_tiles", "sink_tiles", "mask_blocks",
    ],
)  # fmt: skip
def prefill_hopper_kernel(
    q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc,
    out_ptr, lse_ptr, rows_ptr, k_low_factor_ptr, value_factor_ptr, sinks_ptr, positions_ptr,
    stride_ob, stride_oh, stride_ot,
    q_offset, kv_offset, q_len, kv_len, storage_tiles, blocks, section, kv_rows, window, diagonal_tiles, sink_tiles,
    softcap, logit_scale, mask_ptr, bounds_ptr, planes_per_row, planes_per_head, mask_blocks,
    skip_threshold, tile_counts_ptr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, VALUE_DIM: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    KEY_LAYOUT: gl.constexpr, VALUE_LAYOUT: gl.constexpr, LOW_VALUE_LAYOUT: gl.constexpr,
    IS_CAUSAL: gl.constexpr, HAS_EDGES: gl.constexpr, HAS_MEAN: gl.constexpr, IS_HIGH_RAW: gl.constexpr,
):  # fmt: skip
    """Compute attention for a block of ``64 * GROUPS`` query positions of one head.

    Args:
        q_desc: Queries of high tiles, 16-bit ``[B, Hq, Tq, D]``.
        q_low_desc: Queries of low tiles, 8-bit or 16-bit ``[B, Hq, Tq, D]``.
        k_desc: Keys of high tiles, 16-bit ``[B, Hkv, T, D]``.
        v_desc: Values of high tiles, 16-bit ``[B, Hkv, T, Dv]``.
        k_low_desc: Keys of low tiles, a matrix of as many bits.
        v_low_desc: Values of low tiles: E4M3, a matrix of rows of a tile's keys, or as those of high ones.
        out_ptr: ``[B, Hq, Tq, Dv]``.
        lse_ptr: fp32 ``[B, Hq, Tq]``.
        rows_ptr: fp32 ``[2, B, Hq, Tq]``: what turns the scores of low tiles, but for the key factor, into base-2
            logits; and what smoothing takes from every score.
        k_low_factor_ptr: fp32 ``[B, Hkv, tiles]``, or ``None``.
        value_factor_ptr: fp32 ``[B, Hkv, Dv]``, or ``None``.
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
        mask_ptr: Words of a mask, see :class:`dma_kernels.prefill.hopper.bitmask.PackedMask`; or ``None``.
        bounds_ptr: Its bounds; or ``None``.
        planes_per_row: Of the mask.
        planes_per_head: Of the mask.
        mask_blocks: Blocks of 64 query positions that the mask has bounds for.
        skip_threshold: Low tiles this far below a block's high tiles are skipped, in base-2 logits; or ``None``.
        tile_counts_ptr: int64 ``[Hq, 2]``, where skipped and examined tiles are added; or ``None``.
        Q_HEADS: Query heads.
        KV_HEADS: Key heads.
        D: Channels of keys, padded to a power of two, as descriptors copy them.
        DV: Channels of values, likewise.
        VALUE_DIM: Channels of values.
        GROUPS: Warpgroups that compute.
        STAGES: Blocks in flight.
        REGISTERS: Of a thread of those warpgroups but the first, which has what is left.
        KEY_LAYOUT: Of the keys of high tiles, ``caller`` or ``aligned``; see :mod:`dma_kernels.prefill.operands`.
        VALUE_LAYOUT: Of the values of high tiles, likewise.
        LOW_VALUE_LAYOUT: Of the values of low tiles, likewise.
        IS_CAUSAL: Whether a query sees no key behind its own position.
        HAS_EDGES: Whether a low tile may hold keys that not all queries of a warpgroup see, and keys begin inside a
            tile, or there is a mask. Not so where all see every key before the band: then the loop over low tiles is
            all there is.
        HAS_MEAN: Whether smoothing takes something from the scores.
        IS_HIGH_RAW: Whether keys of high tiles are the caller's own, from whose scores it is still to be taken.
    """
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    if skip_threshold is not None:
        init_votes()
    i_row, i_group, i_block = schedule(blocks, kv_rows, section, GROUP, IS_CAUSAL)
    i_b = i_row // KV_HEADS
    i_kv = i_row % KV_HEADS
    i_h = i_kv * GROUP + i_group
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, _ROWS, D], q_desc.layout)
    if is_16bit(q_low_desc.dtype):
        q_low_smem = reinterpret(q_smem, q_low_desc.dtype, [GROUPS, 1, 1, _ROWS, D], q_low_desc.layout)
    else:
        q_low_smem = gl.allocate_shared_memory(q_low_desc.dtype, [GROUPS, 1, 1, _ROWS, D], q_low_desc.layout)
    k_smem = gl.allocate_shared_memory(k_low_desc.dtype, [STAGES, _TILE, D], k_low_desc.layout)
    V_SHAPE: gl.constexpr = [STAGES, DV, _TILE] if v_low_desc.dtype == gl.float8e4nv else [STAGES, 1, 1, _TILE, DV]
    v_smem = gl.allocate_shared_memory(v_low_desc.dtype, V_SHAPE, v_low_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    wait_for_operands()

    q_offset, kv_offset, visible_start, visible_end = positions_of(positions_ptr, i_b, q_offset, kv_offset, kv_len)
    position = ((q_offset >> _ROWS_SHIFT) + i_block * GROUPS) * _ROWS
    last = gl.minimum(position + GROUPS * _ROWS, q_offset + q_len)
    t_0 = position >> _TILE_SHIFT
    t_1 = (last - 1) >> _TILE_SHIFT
    begin, end = seen_by_one(visible_start, visible_end, position, last, window, IS_CAUSAL)
    first = kv_offset >> _TILE_SHIFT
    if mask_ptr is not None:
        mask_plane = (i_b * planes_per_row + i_h * planes_per_head).to(gl.int64)
        mask_ptr += mask_plane * q_len * (4 * storage_tiles) - 4 * first
        bounds_ptr += mask_plane * mask_blocks * 2
        begin, end = shown_by_mask(begin, end, bounds_ptr, i_block * GROUPS, mask_blocks, first, storage_tiles, GROUPS)
    aligned = first * _TILE
    key_base = kv_offset if KEY_LAYOUT == "caller" else aligned
    value_base = kv_offset if VALUE_LAYOUT == "caller" else aligned
    low_value_base = kv_offset if LOW_VALUE_LAYOUT == "caller" else aligned

    head = (i_b * Q_HEADS + i_h).to(gl.int64)
    out_ptr += i_b.to(gl.int64) * stride_ob + i_h.to(gl.int64) * stride_oh
    lse_ptr += head * q_len
    rows_ptr += head * q_len
    plane = (kv_rows * GROUP).to(gl.int64) * q_len
    if k_low_factor_ptr is not None:
        k_low_factor_ptr += i_row.to(gl.int64) * storage_tiles
    if value_factor_ptr is not None:
        value_factor_ptr += i_row.to(gl.int64) * VALUE_DIM
    if sinks_ptr is not None:
        sinks_ptr += i_h
    if tile_counts_ptr is not None:
        tile_counts_ptr += 2 * i_h
    # What they are given, but for the constexprs: a tuple would make tensors of those.
    computing = (
        q_smem, q_low_smem, k_smem, v_smem, q_full, full,
        out_ptr, lse_ptr, rows_ptr, k_low_factor_ptr, value_factor_ptr, sinks_ptr, positions_ptr, mask_ptr,
        stride_ot, plane, q_offset, q_len, position, first, begin, end, t_0, t_1, visible_start, visible_end, window,
        storage_tiles, diagonal_tiles, sink_tiles, softcap, logit_scale, skip_threshold, tile_counts_ptr,
    )  # fmt: skip
    copying = (
        q_desc, q_low_desc, k_desc, v_desc, k_low_desc, v_low_desc, q_smem, q_low_smem, k_smem, v_smem, q_full, full,
        i_b, i_h, i_kv, i_row, position - q_offset, first, key_base, value_base, low_value_base, begin, end, t_0, t_1,
        storage_tiles, diagonal_tiles, sink_tiles,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (computing, 0, 2, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 1, 2, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_produce, (copying, 2, VALUE_DIM, IS_CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, _PRODUCER_REGISTERS],
        )
    elif GROUPS == 4:
        gl.warp_specialize(
            [
                (_consume, (computing, 0, 4, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 1, 4, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 2, 4, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 3, 4, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_produce, (copying, 4, VALUE_DIM, IS_CAUSAL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, _PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(GROUPS == 3, "as many warpgroups as are listed here")
        gl.warp_specialize(
            [
                (_consume, (computing, 0, 3, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 1, 3, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_consume, (computing, 2, 3, VALUE_DIM, IS_CAUSAL, HAS_EDGES, HAS_MEAN, IS_HIGH_RAW)),
                (_produce, (copying, 3, VALUE_DIM, IS_CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, _PRODUCER_REGISTERS],
        )
