"""What both prefill kernels for Hopper do, in Gluon: the blocks of keys that a program visits, steps of its softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from ..device.arithmetic import permute_keys as _permute_keys_triton
from ..device.queries import finite_or_zero as _finite_or_zero_triton
from ..numerics.formats import TILE
from .kernel import _schedule as _schedule_triton

ROWS = 64
"""Query positions of a warpgroup: the rows of its matrix instructions. They lie in one tile."""

_ROWS = gl.constexpr(ROWS)
_TILE = gl.constexpr(TILE)
_HIGH = gl.constexpr(TILE // 2)  # keys of a block of a high tile: in 16 bits as many bytes as a low tile in 8
_TILE_SHIFT = gl.constexpr(TILE.bit_length() - 1)
_HIGH_SHIFT = gl.constexpr(TILE.bit_length() - 2)
schedule = gluon.jit(_schedule_triton.fn)
finite_or_zero = gluon.jit(_finite_or_zero_triton.fn)
_permute_keys = gluon.jit(_permute_keys_triton.fn)
# Triton 3.9 gave this its present name.
copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.constexpr_function
def is_16bit(dtype):
    return dtype.primitive_bitwidth == 16


@gluon.jit
def high_blocks(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL: gl.constexpr):
    """Return the blocks of high tiles that a program visits: ``a_0..a_1`` of sinks and ``b_0..b_1`` of the band."""
    last = (end + _HIGH - 1) >> _HIGH_SHIFT
    reach = 0 if IS_CAUSAL else diagonal_tiles
    a_0 = begin >> _HIGH_SHIFT
    a_1 = gl.maximum(gl.minimum(2 * sink_tiles, last), a_0)
    b_0 = gl.maximum(gl.maximum(2 * (t_0 - diagonal_tiles), 2 * sink_tiles), a_0)
    b_1 = gl.maximum(gl.minimum(2 * (t_1 + reach + 1), last), b_0)
    return a_0, a_1, b_0, b_1


@gluon.jit
def low_tiles(begin, t_0, t_1, end, diagonal_tiles, sink_tiles, IS_CAUSAL: gl.constexpr):
    """Return the low tiles that a program visits: ``c_0..c_1`` before the band and ``d_0..d_1`` behind it."""
    last = (end + _TILE - 1) >> _TILE_SHIFT
    c_0 = gl.maximum(begin >> _TILE_SHIFT, sink_tiles)
    c_1 = gl.maximum(gl.minimum(t_1 - diagonal_tiles, last), c_0)
    if IS_CAUSAL:
        d_0, d_1 = c_1, c_1
    else:
        d_0 = gl.maximum(t_0 + diagonal_tiles + 1, c_0)
        d_1 = gl.maximum(last, d_0)
    return c_0, c_1, d_0, d_1


@gluon.jit
def visited(i, n_a, a_0, b_0):
    """Return which block or tile is the ``i``-th, where ``n_a`` of them begin at ``a_0`` and the others at ``b_0``."""
    return gl.where(i < n_a, a_0 + i, b_0 + i - n_a)


@gluon.jit
def halves(x):
    """Return the columns of ``[M, N]`` in two parts: a renaming of registers."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def positions_of(positions_ptr, i_b, q_offset, kv_offset, kv_len):
    """Return the positions of a batch row: of query 0, key 0, its first visible key and the one past the last."""
    visible_start = kv_offset
    visible_end = kv_offset + kv_len
    if positions_ptr is not None:
        q_offset = gl.load(positions_ptr + i_b * 4)
        kv_offset = gl.load(positions_ptr + i_b * 4 + 1)
        visible_start = kv_offset + gl.maximum(gl.load(positions_ptr + i_b * 4 + 2), 0)
        visible_end = kv_offset + gl.minimum(gl.load(positions_ptr + i_b * 4 + 3), kv_len)
    return q_offset, kv_offset, visible_start, visible_end


@gluon.jit
def seen_by_one(start, end, first, last, window, IS_CAUSAL: gl.constexpr):
    """Return which positions of ``start..end`` one of the queries ``first..last`` sees."""
    if IS_CAUSAL:
        end = gl.minimum(end, last)
    if window is not None:
        start = gl.maximum(start, first - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, last + window)
    return start, end


@gluon.jit
def seen_by_all(start, end, first, last, window, IS_CAUSAL: gl.constexpr):
    """Return which positions of ``start..end`` all of the queries ``first..last`` see."""
    if IS_CAUSAL:
        end = gl.minimum(end, first + 1)
    if window is not None:
        start = gl.maximum(start, last - 1 - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, first + window + 1)
    return start, end


@gluon.jit
def clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def seen_range(q_pos, visible_start, visible_end, window, IS_CAUSAL: gl.constexpr):
    """Return for each query the position of the first key that it sees and the one past the last."""
    start = gl.zeros_like(q_pos) + visible_start
    end = gl.zeros_like(q_pos) + visible_end
    if IS_CAUSAL:
        end = gl.minimum(end, q_pos + 1)
    if window is not None:
        start = gl.maximum(start, q_pos - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, q_pos + window + 1)
    return start, end


@gluon.jit
def seen_keys(q_pos, k_pos, visible_start, visible_end, window, IS_CAUSAL: gl.constexpr):
    """Return which keys the queries see, ``[M, N]``."""
    start, end = seen_range(q_pos, visible_start, visible_end, window, IS_CAUSAL)
    return (k_pos[None, :] >= start[:, None]) & (k_pos[None, :] < end[:, None])


@gluon.jit
def shown_by_mask(begin, end, bounds_ptr, block, blocks, first, tiles, COUNT: gl.constexpr):
    """Return which positions of ``begin..end`` a mask shows to one of ``COUNT`` blocks of queries, in whole tiles.

    ``bounds_ptr`` is that of a plane of a :class:`~dma_kernels.prefill.hopper_mask.PackedMask`, whose tiles begin with
    tile ``first``.
    """
    from_first, to_last = 0, 0
    for i in gl.static_range(COUNT):
        is_there = block + i < blocks
        from_first = gl.maximum(from_first, gl.load(bounds_ptr + 2 * (block + i), mask=is_there, other=0))
        to_last = gl.maximum(to_last, gl.load(bounds_ptr + 2 * (block + i) + 1, mask=is_there, other=0))
    return gl.maximum(begin, (first + tiles - from_first) * _TILE), gl.minimum(end, (first + to_last) * _TILE)


@gluon.jit
def places_of_words(mask_ptr, row, q_len, tiles, LAYOUT: gl.constexpr):
    """Return where the words of tile 0 are for 64 queries from ``row`` on, ``[64, 4]``; a tile has four for a query."""
    rows = clamp(row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT)), 0, q_len - 1)
    words = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return mask_ptr + (rows.to(gl.int64)[:, None] * (4 * tiles) + words[None, :])


@gluon.jit
def hide_masked(s, words):
    """Return scores ``[M, N]``, minus infinity where the bit of a key is 0 in ``[M, 4]`` words.

    Of the columns of a row a thread has ``8 j + 2 t`` and ``8 j + 2 t + 1``, whose bits are ``2 j`` and ``2 j + 1`` of
    word ``t``: see :mod:`dma_kernels.prefill.hopper_mask`.
    """
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    x = gl.reshape(s, [M, N // 8, 4, 2])
    OF_J: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout)))
    OF_LAST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout)))
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)), assert_trivial=True)
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, N // 8, layout=OF_J), 0), 2), 3)
    last = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=OF_LAST), 0), 1), 2)
    bits = gl.expand_dims(gl.expand_dims(words, 1), 3) >> (2 * j + last)
    x = gl.where((bits & 1) != 0, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, [M, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def _reciprocal(x):
    """Return ``1 / x`` to a unit in the last place, 0 from 2^126 on: a third of a division's instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def capped(logits, softcap):
    """Return base-2 logits, capped; ``softcap`` is in their unit."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where a logit is y * softcap.
    return softcap - 2.0 * softcap * _reciprocal(gl.exp2(logits * (2.8853900817779268 / softcap)) + 1.0)


@gluon.jit
def hide_values(values, position, visible_start, visible_end, DV: gl.constexpr):
    """Write zeros where values of 64 keys, ``[64, Dv]`` in shared memory, are hidden.

    They may be anything, and no probability of 0 makes up for a NaN. Every warpgroup that reads the block does this
    first, and all write the same bytes.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    k_pos = position + gl.arange(0, _HIGH, layout=gl.SliceLayout(1, LAYOUT))
    is_shown = ((k_pos >= visible_start) & (k_pos < visible_end))[:, None]
    values.store(gl.where(is_shown, values.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def inverse_power_of_two(x):
    """Return ``1 / x`` for fp32 powers of two, which values' scales are, in one instruction."""
    return (0x7F000000 - x.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def online_softmax(x, factor, bias, m_i, EXPONENT: gl.constexpr):
    """One step of the online softmax, in base 2.

    Args:
        x: Scores ``[M, N]``, int32 or fp32; ``x * factor - bias`` are the logits.
        factor: fp32 ``[M]``.
        bias: fp32 ``[M]``.
        m_i: Running row maxima, fp32 ``[M]``, finite.
        EXPONENT: Probabilities are scaled by 2 to this power.

    Returns:
        Probabilities ``[M, N]``, what the sums and outputs before are multiplied by, ``[M]``, and the new maxima.
    """
    # Hopper takes the maximum of three integers at a time.
    m_new = gl.maximum(m_i, gl.max(x, 1).to(gl.float32) * factor - bias)
    p = gl.exp2(x.to(gl.float32) * factor[:, None] + (EXPONENT - m_new - bias)[:, None])
    return p, gl.exp2(m_i - m_new), m_new


@gluon.jit
def finalize_softmax(m_i, l_i, bias, sinks_ptr, EXPONENT: gl.constexpr):
    """End the online softmax. The sink logit comes last: earlier it would scale E4M3 probabilities down.

    Args:
        m_i: Row maxima in base 2, ``[M]``.
        l_i: Row sums, scaled by 2 to the power ``EXPONENT``.
        bias: What smoothing subtracts from a row's logits, base 2.
        sinks_ptr: The head's sink logit, or ``None``.
        EXPONENT: See :func:`online_softmax`.

    Returns:
        What outputs are multiplied by, 0 in rows without a key, and the natural log of the denominator.
    """
    alpha = gl.full(m_i.shape, 1.0, gl.float32, m_i.type.layout)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr).to(gl.float32) * 1.4426950408889634 - bias
        m_new = gl.maximum(m_i, sink)
        alpha = gl.exp2(m_i - m_new)
        l_i = l_i * alpha + gl.exp2(sink - m_new + EXPONENT)
        m_i = m_new
    is_empty = l_i == 0.0
    scale = alpha / gl.where(is_empty, 1.0, l_i)
    lse = (m_i + gl.log2(l_i) - EXPONENT + bias) * 0.6931471805599453
    return scale, gl.where(is_empty, float("-inf"), lse)


@gluon.jit
def operand_of(p, dtype: gl.constexpr, P_LAYOUT: gl.constexpr):
    """Return probabilities ``[64, N]`` as what multiplies values of ``dtype``."""
    if dtype == gl.float8e4nv:
        p = _permute_keys(p)
    return gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)


@gluon.jit
def values_product(acc, p, alpha, v, O_LAYOUT: gl.constexpr):
    """Begin the product of an :func:`operand_of` and values, which :func:`add_values` waits for."""
    if v.dtype == gl.float8e4nv:
        # A fresh accumulator for each block: Hopper's FP8 units add up in fewer bits than fp32.
        zero = gl.zeros(acc.shape, gl.float32, O_LAYOUT)
        product = warpgroup_mma(p, v, zero, use_acc=False, is_async=True)
    else:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
        product = warpgroup_mma(p, v, acc * alpha, is_async=True)
    return product


@gluon.jit
def add_values(acc, product, alpha, IS_FP8: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return ``acc * alpha`` plus the product, which is there."""
    if IS_FP8:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
        product = acc * alpha + product
    return product


@gluon.jit
def thread_sums(p):
    """Return what each of the four threads of a row has of the sum over the columns of ``[M, N]``: ``[M, 4]``.

    No thread waits for another: only the end of all blocks adds them up.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def add_sums(sums, p, alpha):
    """Return ``sums * alpha`` plus those of ``p``."""
    LAYOUT: gl.constexpr = sums.type.layout
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    return sums * alpha + gl.convert_layout(thread_sums(p), LAYOUT, assert_trivial=True)


@gluon.jit
def wait_for_operands():
    """Wait for the end of the launch before this one, beside whose last programs this one may have started."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def init_votes():
    """Declare and clear what :func:`any_row_keeps` needs. A barrier of the CTA must follow before the first vote.

    PTX variables, because Gluon has neither a vote across warps nor a scalar that differs between them. The buffer
    takes a whole KiB, as dynamic shared memory begins after it and swizzled tiles are aligned to that.
    """
    gl.inline_asm_elementwise(
        """
        .reg .pred keeps_first, keeps_tile;
        .shared .align 1024 .b32 kept_tiles[256];
        st.shared.v4.b32 [kept_tiles], {-1, -1, -1, -1};
        mov.b32 $0, 0;
        """,
        "=r", [], gl.int32, False, 1,
    )  # fmt: skip


@gluon.constexpr_function
def _announce_asm(warpgroup, barrier):
    return (
        f"@keeps_first st.shared.b32 [kept_tiles + {4 * warpgroup}], $1; "
        f"@keeps_first bar.arrive {barrier}, 128; mov.b32 $0, 0;"
    )


@gluon.constexpr_function
def _agree_asm(warpgroup, barrier):
    """Return PTX of operands: a maximum, its bound, the tile."""
    return f"""{{
        .reg .b32 kept;
        setp.geu.f32 keeps_tile, $1, $2;
        vote.sync.any.pred keeps_tile, keeps_tile, 0xffffffff;
        mov.b32 kept, -1;
        @keeps_tile st.shared.b32 [kept_tiles + {4 * warpgroup}], $3;
        @keeps_tile bar.arrive {barrier}, 128;
        @!keeps_tile bar.sync {barrier}, 128;
        @!keeps_tile ld.shared.b32 kept, [kept_tiles + {4 * warpgroup}];
        setp.eq.or.b32 keeps_tile, kept, $3, keeps_tile;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def _voted():
    return gl.inline_asm_elementwise("selp.b32 $0, 1, 0, keeps_tile;", "=r", [], gl.int32, False, 1) != 0


@gluon.jit
def _row_halves(x):
    """Split ``[64, ...]`` into the first and the second row that each thread holds: a renaming of registers."""
    if len(x.shape) == 1:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8]), [0, 2, 1]))
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8, x.shape[1]]), [0, 2, 3, 1]))
    return halves


@gluon.jit
def _partial_max(s, factor):
    """Return the maxima of ``[4, 8, N]`` over the columns that each of a row's four threads holds, times ``[4, 8]``."""
    N: gl.constexpr = s.shape[2]
    largest = gl.max(gl.max(gl.reshape(s, [4, 8, N // 8, 4, 2]), 4), 2).to(gl.float32)
    return largest * gl.expand_dims(
        gl.convert_layout(factor, gl.SliceLayout(2, largest.type.layout), assert_trivial=True), 2
    )


@gluon.jit
def any_row_keeps(s, factor, bound, tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Whether a row of the warpgroup's 64 has a logit at or above its bound in a tile. NaN counts as above.

    A warp that finds one goes on at once; only the others wait for the warpgroup. So a tile that all warps keep costs
    no wait.

    Args:
        s: Scores ``[64, N]``, int32 or fp32.
        factor: Turns them into logits, fp32 ``[64]``.
        bound: fp32 ``[64]``.
        tile: Index of the tile, which differs from that of the vote before.
        WARPGROUP: Index of the warpgroup.
        BARRIER: Named barrier of its votes.
    """
    s_0, s_1 = _row_halves(s)
    factor_0, factor_1 = _row_halves(factor)
    bound_0, bound_1 = _row_halves(bound)
    max_0 = _partial_max(s_0, factor_0)
    BOUND: gl.constexpr = gl.SliceLayout(2, max_0.type.layout)
    bound_0 = gl.expand_dims(gl.convert_layout(bound_0, BOUND, assert_trivial=True), 2)
    bound_1 = gl.expand_dims(gl.convert_layout(bound_1, BOUND, assert_trivial=True), 2)
    gl.inline_asm_elementwise(
        "setp.geu.f32 keeps_first, $1, $2; vote.sync.any.pred keeps_first, keeps_first, 0xffffffff; "
        "mov.pred keeps_tile, keeps_first; mov.b32 $0, 0;",
        "=r,f,f", [max_0, bound_0], gl.int32, False, 1,
    )  # fmt: skip
    if not _voted():
        # Copied, so that the compiler does not compute it for both branches.
        copy_1 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [s_1], s_1.dtype, False, 1)
        max_1 = _partial_max(copy_1, factor_1)
        AGREE: gl.constexpr = _agree_asm(WARPGROUP, BARRIER)
        gl.inline_asm_elementwise(AGREE, "=r,f,f,r", [max_1, bound_1, tile], gl.int32, False, 1)
    return _voted()


@gluon.jit
def announce_keep(tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Tell the warps that wait in :func:`any_row_keeps` that the tile is kept; where it is, each warp calls this."""
    ASM: gl.constexpr = _announce_asm(WARPGROUP, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r", [tile], gl.int32, False, 1)
