"""The kernel of a decode step: queries of 16 bits against the tiles of a cache, codes and raw ones, in one launch.

Every (batch row, kv head) is split over programs: the first ``high_splits`` share its high tiles, read in 16 bits from
the sinks and the tail, the others its low tiles, read from their records. Each leaves a normalised output and the
logarithm of its denominator; the program of a head that is done last combines them.

A warp works by itself, on tiles of its own: there is no barrier in the loop and no shared memory. Records hold their
codes in the order in which the matrix instruction m16n8k16 takes its first operand, so a lane loads 16 bytes and makes
16-bit numbers of them in place, with one AND and OR for two: ``0x6400 | n`` is 1,024 + n in fp16, ``0x5400 | n << 4``
is 64 + n. Scores are ``keys . queries`` and outputs ``values . probabilities``, so that keys and values fill the 16
rows of an instruction and up to 8 queries its columns.

    q . k = [q * scale] . (c + n) - [q * scale] . (c + h) + q . (low + h scale)
    sum p v = sum [p * scale] (c + n) - sum [p * scale] (c + h) + sum p (low + h scale)

``scale`` is one for each channel of a tile of keys and for each token and 64 channels of values, ``h`` the middle of
the codes, and what is in brackets is rounded to fp16: the error of a rounding meets ``n - h`` alone. What does not
depend on ``n`` comes from products with rows that are all alike, which start the sums of the others.
"""

from __future__ import annotations

import triton.language as tl

from ..device.gluon import (
    await_copies,
    barrier,
    begin_copy,
    constexpr_function,
    end_copies,
    gl,
    jit,
    matrix_product,
)
from ..numerics.formats import TILE

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
COLUMNS = 8
"""Queries of a program, which all heads of a group count for: the columns of the matrix instruction."""
ADDED = (0x64006400, 0x54005400)
"""What turns fields of bits 0 to 3 (or 7) and of bits 4 to 7 of two halves into fp16: 1,024 and 64, both twice."""

_EXPONENT = tl.constexpr(13.0)
"""Of the factor of weights: times a scale they are at most 2, and fp16 reaches from 2^-24 to 2^16."""
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


@constexpr_function
def _mma(warps):
    """Layout of a product ``[B, M, 8]``: a warp has whole matrices of the batch."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def _operand(warps, index):
    """Layout of an operand of a product."""
    return gl.DotOperandLayout(index, _mma(warps), 2)


@constexpr_function
def _words(warps, rank):
    """Layout of ``[..., W, R, 128]`` words: each lane has four next to each other, each warp its own matrix."""
    ones = [1] * (rank - 1)
    return gl.BlockedLayout(
        [*ones, 4], [*ones, 32], [*ones[:-2], warps, 1, 1], list(reversed(range(rank)))
    )  # fmt: skip


@constexpr_function
def _along(layout, rank, axis):
    """Layout of one dimension of ``rank``, to be indexed with ``None`` for the others."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@constexpr_function
def _bits(size, axis, rank, first=1):
    """Bases of a linear layout: the bits of an index from ``first`` on, below ``size``."""
    found = []
    while first < size:
        found.append([first if i == axis else 0 for i in range(rank)])
        first *= 2
    return found


@constexpr_function
def _raw_keys(warps, channels):
    """Layout of ``[W, 16, D]``: a lane has 8 neighbouring channels of two keys."""
    reg = [*_bits(8, 2, 3), [0, 8, 0], *_bits(channels, 2, 3, 32)]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(reg, lane, _bits(warps, 0, 3), [], [warps, 16, channels])


@constexpr_function
def _raw_values(warps, channels):
    """Layout of ``[W, 16, Dv]``: a lane has 8 neighbouring channels of four keys."""
    reg = [*_bits(8, 2, 3), [0, 1, 0], [0, 8, 0], *_bits(channels, 2, 3, 64)]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(reg, lane, _bits(warps, 0, 3), [], [warps, 16, channels])


@jit
def _halves(x, dtype: tl.constexpr):
    """Return 32-bit words as pairs of 16-bit numbers, ``[..., 2]``."""
    low = x.to(gl.uint16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, high)


@jit
def _numbers(words, magic, BITS: tl.constexpr):
    """Return the codes of words with a constant added, fp16 ``[..., 2, 16 / BITS]`` by (parity, octet) of columns."""
    rest = words >> 8
    even, odd = magic
    if BITS == 8:
        x = gl.join(
            _halves((words & 0x00FF00FF) | even, gl.float16),
            _halves((rest & 0x00FF00FF) | even, gl.float16),
        )
    else:
        x = gl.join(
            gl.join(
                _halves((words & 0x000F000F) | even, gl.float16),
                _halves((rest & 0x000F000F) | even, gl.float16),
            ),
            gl.join(
                _halves((words & 0x00F000F0) | odd, gl.float16),
                _halves((rest & 0x00F000F0) | odd, gl.float16),
            ),
        )
    return x


@jit
def _constants(column, like, BITS: tl.constexpr):
    """Return a first operand: minus the constants that :func:`_numbers` adds, and minus the middle of the codes."""
    if BITS == 4:  # noqa: SIM108 (a constexpr branch)
        like = gl.where((column & 8) == 0, -1032.0, -72.0).to(gl.float16) + like
    else:
        like = like - 1152.0
    return like


@jit
def _key_operand(words, magic, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of keys ``[W, STEP, D]`` as a first operand."""
    J: tl.constexpr = 16 // BITS
    x = gl.reshape(_numbers(words, magic, BITS), [W, STEP // 32, BLOCK_D // (8 * J), 8, 4, 4, 2, J])
    x = gl.permute(x, [0, 1, 5, 3, 2, 7, 4, 6])  # W; block, i, g; block, j, t, e
    return gl.convert_layout(gl.reshape(x, [W, STEP, BLOCK_D]), _operand(W, 0), assert_trivial=True)


@jit
def _value_operand(words, magic, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr):
    """Return the codes of values ``[G * W, 64, STEP]`` as a first operand."""
    J: tl.constexpr = 16 // BITS
    x = gl.reshape(_numbers(words, magic, BITS), [G, W, STEP // (8 * J), 2, 8, 4, 4, 2, J])
    x = gl.permute(x, [0, 1, 3, 6, 4, 2, 8, 5, 7])  # G, W; block, i, g; block, j, t, e
    return gl.convert_layout(gl.reshape(x, [G * W, 64, STEP]), _operand(W, 0), assert_trivial=True)


@jit
def _over_groups(x, G: tl.constexpr, W: tl.constexpr):
    """Return ``[W, N, 8]`` once for each group of 64 channels, ``[G * W, N, 8]``."""
    N: tl.constexpr = x.shape[1]
    if G == 2:
        x = gl.permute(gl.join(x, x), [3, 0, 1, 2])
    if G == 4:
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [3, 4, 0, 1, 2])
    return gl.convert_layout(gl.reshape(x, [G * W, N, 8]), _mma(W), assert_trivial=True)


@jit
def _repeated_rows(x, ROWS: tl.constexpr, W: tl.constexpr):
    """Return ``[B, 16, 8]`` several times below each other, ``[B, ROWS, 8]``."""
    B: tl.constexpr = x.shape[0]
    if ROWS == 32:
        x = gl.permute(gl.join(x, x), [0, 3, 1, 2])
    if ROWS == 64:
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [0, 3, 4, 1, 2])
    if ROWS == 128:
        x = gl.join(x, x)
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [0, 3, 4, 5, 1, 2])
    return gl.convert_layout(gl.reshape(x, [B, ROWS, 8]), _mma(W), assert_trivial=True)


@jit
def _lane_sums(x, W: tl.constexpr):
    """Return the sums of every eighth row of ``[B, N, 8]``, ``[B, 8, 8]``: what a lane has is added in it."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return gl.convert_layout(gl.sum(gl.reshape(x, [B, N // 8, 8, 8]), 1), _mma(W))


@jit
def _load_queries(
    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, AS_RAW: tl.constexpr,
):  # fmt: skip
    """Load 8 columns as a second operand ``[W, D, 8]``; ``AS_RAW`` in the order of channels of raw keys."""
    LAYOUT: tl.constexpr = _operand(W, 1)
    o_d = gl.arange(0, BLOCK_D, layout=_along(LAYOUT, 3, 1))[None, :, None]
    if AS_RAW:
        o_d = o_d // 32 * 32 + o_d % 8 // 2 * 8 + o_d % 32 // 8 * 2 + o_d % 2
    column = i_block * 8 + gl.arange(0, 8, layout=_along(LAYOUT, 3, 2))[None, None, :]
    o_w = gl.arange(0, W, layout=_along(LAYOUT, 3, 0))[:, None, None]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * stride_qb + head * stride_qh + i_t.to(gl.int64) * stride_qt + o_d * stride_qd + o_w * 0
    return gl.load(q_ptr + offset, mask=(i_t < q_len) & (o_d < D) & (o_w >= 0), other=0.0)


@jit
def _cap(s, softcap):
    """Cap base-2 logits; ``softcap`` carries the log2(e)."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap.
    return softcap * (1.0 - 2.0 / (gl.exp2(s * (2.8853900817779268 / softcap)) + 1.0))


@jit
def _high_tiles(
    q, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr,
    first, last, length, q_pos, sinks, band_first, visible_tile, window, softcap, logit_scale, sink_tiles,
    ring_tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to steps ``first..last``, ``16 W`` keys each, of the high tiles: ``sinks`` sinks, then the band.

    Returns:
        The weighted sum of values ``[G * W, 64, 8]``, channel ``8 g + i`` of 64 at row ``8 i + g``; the sums of the
        weights, of each lane's keys ``[W, 8, 8]``; and the maximum ``[W, 8]``.
    """
    MMA: tl.constexpr = _mma(W)
    KEYS: tl.constexpr = _raw_keys(W, BLOCK_D)
    VALUES: tl.constexpr = _raw_values(W, 64 * G)
    STEPS: tl.constexpr = _TILE // (16 * W)
    CB: tl.constexpr = BLOCK_D // 32
    k_token = (
        gl.arange(0, W, layout=_along(KEYS, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=_along(KEYS, 3, 1))[None, :, None]
    )
    v_token = (
        gl.arange(0, W, layout=_along(VALUES, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=_along(VALUES, 3, 1))[None, :, None]
    )
    token = (
        gl.arange(0, W, layout=_along(MMA, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=_along(MMA, 3, 1))[None, :, None]
    )
    o_d = gl.arange(0, BLOCK_D, layout=_along(KEYS, 3, 2))[None, None, :]
    o_v = gl.arange(0, 64 * G, layout=_along(VALUES, 3, 2))[None, None, :]
    m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
    l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
    acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
    zero = gl.full([W, 16, 8], 0.0, gl.float32, MMA)
    for step in range(first, last):
        index = step // STEPS
        inside = (step - index * STEPS) * (16 * W)
        tile = gl.where(index < sinks, visible_tile + index, band_first + index - sinks)
        entry = (tile % ring_tiles) * _TILE + inside
        k_base = key_tail_ptr
        v_base = value_tail_ptr
        if tile < sink_tiles:
            entry = tile * _TILE + inside
            k_base = key_sink_ptr
            v_base = value_sink_ptr
        here = tile * _TILE + inside
        k = gl.load(
            k_base + entry * D + (k_token * D + o_d), mask=(here + k_token < length) & (o_d < D), other=0.0
        )  # fmt: skip
        v = gl.load(
            v_base + entry * DV + (v_token * DV + o_v), mask=(here + v_token < length) & (o_v < DV), other=0.0
        )  # fmt: skip
        k = gl.permute(gl.reshape(k, [W, 16, CB, 4, 4, 2]), [0, 1, 2, 4, 3, 5])
        k = gl.convert_layout(gl.reshape(k, [W, 16, BLOCK_D]), _operand(W, 0), assert_trivial=True)
        s = matrix_product(k, q, zero) * logit_scale
        if HAS_SOFTCAP:
            s = _cap(s, softcap)
        k_pos = here + token
        seen = k_pos <= q_pos
        if HAS_WINDOW:
            seen = seen & (k_pos > q_pos - window)
        s = gl.where(seen, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None, :])
        alpha = gl.exp2(m_i - m_new)[:, None, :]
        m_i = m_new
        l_i = l_i * alpha + _lane_sums(p, W)
        p = gl.convert_layout(_over_groups(p.to(q.dtype), G, W), _operand(W, 1))
        v = gl.permute(gl.reshape(v, [W, 16, G, 8, 8]), [2, 0, 4, 3, 1])
        v = gl.convert_layout(gl.reshape(v, [G * W, 64, 16]), _operand(W, 0), assert_trivial=True)
        acc = matrix_product(v, p, acc * _over_groups(alpha, G, W))
    return acc, l_i, m_i


@constexpr_function
def _plain(rank):
    """Layout of a buffer in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@jit
def _buffers(count: tl.constexpr, shape: tl.constexpr):
    """Return ``count`` buffers of words in shared memory, apart so that the compiler does not take one for another."""
    found = ()
    for _ in gl.static_range(count):
        found += (gl.allocate_shared_memory(gl.int32, shape, _plain(len(shape))),)  # type: ignore[assignment]
    return found


@jit
def _record_words(body_ptr, pages_ptr, tile, slots, stride_page):
    """Return where the records of tiles of a kv head are, in words; ``body_ptr`` is that of page 0."""
    return body_ptr + gl.load(pages_ptr + tile % slots).to(gl.int64) * stride_page


@jit
def _equal_rows(x, W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return a number for each channel, ``[W, block, g, t, j, e]`` of any ``g``, as a first operand ``[W, 16, D]``."""
    x = gl.reshape(gl.permute(gl.join(x, x), [0, 6, 2, 1, 4, 3, 5]), [W, 16, BLOCK_D])
    return gl.convert_layout(x, _operand(W, 0), assert_trivial=True)


@jit
def _copy_channels(record, buffers, places):
    """Begin to copy scales and lows of the keys of tiles."""
    for i in gl.static_range(2):
        begin_copy(buffers[i], record[:, None, None] + places[i])


@jit
def _copy_step(
    record, buffers, places, i_stage: tl.constexpr, i_step: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
):  # fmt: skip
    """Begin to copy the codes of a step, and the scales and lows of its values."""
    v_record = gl.convert_layout(record, _along(_words(record.shape[0], 4), 4, 1))[None, :, None, None]
    begin_copy(buffers[0][i_stage], record[:, None, None] + (places[0] + i_step * K_STEP))
    begin_copy(buffers[1][i_stage], v_record + (places[1] + i_step * V_STEP))
    begin_copy(buffers[2][i_stage], v_record + (places[2] + i_step * TOKEN_STEP))


@jit
def _low_tiles(
    q, body_ptr, pages_ptr, i_kv, first, last, q_pos, window, softcap, logit_scale, slots, stride_page, magic,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to the low tiles ``first..last``, one for each warp at a time.

    Returns:
        As :func:`_high_tiles`, but channels in order; weights are times ``2 ** _EXPONENT``.
    """
    MMA: tl.constexpr = _mma(W)
    FIRST: tl.constexpr = _operand(W, 0)
    SECOND: tl.constexpr = _operand(W, 1)
    KEYS: tl.constexpr = _words(W, 3)
    VALUES: tl.constexpr = _words(W, 4)
    STEPS: tl.constexpr = _TILE // STEP
    C: tl.constexpr = 128 // BITS  # columns of a block of codes
    MIDDLE: tl.constexpr = float(1 << (BITS - 1))
    # ---- sizes and places in a record, in words
    STORED: tl.constexpr = (D + 31) // 32 * 32
    VALUE_STORED: tl.constexpr = (DV + 31) // 32 * 32
    GROUPS: tl.constexpr = (DV + 63) // 64
    KEY_SCALES: tl.constexpr = _TILE * STORED * BITS // 32
    KEY_LOWS: tl.constexpr = KEY_SCALES + STORED // 2
    VALUE_CODES: tl.constexpr = KEY_LOWS + STORED // 2
    VALUE_SCALES: tl.constexpr = VALUE_CODES + _TILE * VALUE_STORED * BITS // 32
    body_ptr += i_kv * (VALUE_SCALES + _TILE * GROUPS)
    # Blocks beyond the stored channels are read from the last one: their queries are 0, their outputs not stored.
    o_k = gl.arange(0, 128, layout=_along(KEYS, 3, 2))[None, None, :]
    i_r = gl.arange(0, STEP * BLOCK_D // (32 * C), layout=_along(KEYS, 3, 1))[None, :, None]
    k_offsets = (i_r // (BLOCK_D // C) * (STORED // C) + gl.minimum(i_r % (BLOCK_D // C), STORED // C - 1)) * 128 + o_k
    i_r = gl.arange(0, BLOCK_D // 32, layout=_along(KEYS, 3, 1))[None, :, None]
    channel_offsets = gl.minimum(i_r, STORED // 32 - 1) * 16 + o_k % 16
    o_v = gl.arange(0, 128, layout=_along(VALUES, 4, 3))[None, None, None, :]
    i_g = gl.arange(0, G, layout=_along(VALUES, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, 2 * STEP // C, layout=_along(VALUES, 4, 2))[None, None, :, None]
    v_offsets = (i_r // 2 * (VALUE_STORED // 32) + gl.minimum(2 * i_g + i_r % 2, VALUE_STORED // 32 - 1)) * 128 + o_v
    i_r = gl.arange(0, STEP // 32, layout=_along(VALUES, 4, 2))[None, None, :, None]
    token_offsets = (i_r * GROUPS + gl.minimum(i_g, GROUPS - 1)) * 32 + o_v // 16 * 4 + o_v % 4
    # ---- constant operands
    k_constants = _constants(
        gl.arange(0, BLOCK_D, layout=_along(FIRST, 3, 2))[None, None, :],
        gl.full([W, 16, BLOCK_D], 0.0, gl.float16, FIRST), BITS,
    )  # fmt: skip
    v_constants = _constants(
        gl.arange(0, STEP, layout=_along(FIRST, 3, 2))[None, None, :],
        gl.full([G * W, 16, STEP], 0.0, gl.float16, FIRST), BITS,
    )  # fmt: skip
    zero = gl.full([W, 16, 8], 0.0, gl.float32, MMA)
    zeros = gl.full([G * W, 16, 8], 0.0, gl.float32, MMA)
    m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
    l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
    lows = gl.full([G * W, 8, 8], 0.0, gl.float32, MMA)
    acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
    o_w = gl.arange(0, W, layout=_along(KEYS, 3, 0))
    s_warp = gl.arange(0, W, layout=_along(MMA, 3, 0))[:, None, None]
    s_token = gl.arange(0, STEP, layout=_along(MMA, 3, 1))[None, :, None]

    k_buffers = _buffers(STAGES, [W, STEP * BLOCK_D // (32 * C), 128])
    v_buffers = _buffers(STAGES, [G, W, 2 * STEP // C, 128])
    token_buffers = _buffers(STAGES, [G, W, STEP // 32, 128])
    channel_buffers = _buffers(2, [W, BLOCK_D // 32, 128])
    K_STEP: tl.constexpr = STEP * STORED * BITS // 32
    V_STEP: tl.constexpr = STEP * VALUE_STORED * BITS // 32
    TOKEN_STEP: tl.constexpr = STEP * GROUPS
    record = _record_words(body_ptr, pages_ptr, gl.minimum(first + o_w, last - 1), slots, stride_page)
    next_record = _record_words(body_ptr, pages_ptr, gl.minimum(first + W + o_w, last - 1), slots, stride_page)
    buffers = k_buffers, v_buffers, token_buffers
    places = k_offsets, VALUE_CODES + v_offsets, VALUE_SCALES + token_offsets
    channel_places = KEY_SCALES + channel_offsets, KEY_LOWS + channel_offsets
    _copy_channels(record, channel_buffers, channel_places)
    for i_stage in gl.static_range(STAGES - 1):
        _copy_step(record, buffers, places, i_stage, i_stage, K_STEP, V_STEP, TOKEN_STEP)
        end_copies()
    for start in range(first, last, W):
        later_tile = gl.minimum(start + 2 * W + o_w, last - 1)
        later_record = _record_words(body_ptr, pages_ptr, later_tile, slots, stride_page)
        await_copies(STAGES - 2)
        # ---- queries of the tile, and what its scores start from
        scale_words = channel_buffers[0].load(KEYS)
        low_words = channel_buffers[1].load(KEYS)
        scale = _halves(scale_words.to(gl.uint32, bitcast=True), gl.bfloat16)
        scale = gl.reshape(scale, [W, BLOCK_D // 32, 8, 4, 4, 2])
        low = _halves(low_words.to(gl.uint32, bitcast=True), gl.bfloat16)
        low = gl.reshape(low, [W, BLOCK_D // 32, 8, 4, 4, 2])
        shift = matrix_product(_equal_rows(scale, W, BLOCK_D).to(q.dtype), q, zero) * MIDDLE
        shift = matrix_product(_equal_rows(low, W, BLOCK_D).to(q.dtype), q, shift) * logit_scale
        scale = gl.reshape(gl.permute(scale, [0, 1, 4, 3, 5, 2]), [W, BLOCK_D, 8])
        scale = gl.convert_layout(scale, SECOND, assert_trivial=True)
        scaled = (q.to(gl.float32) * logit_scale) * scale.to(gl.float32)
        # Where a step of one channel is worth 2^16 in the exponent, larger ones need not be told apart; NaN shows.
        scaled = gl.maximum(scaled, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        scaled = gl.minimum(scaled, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(gl.float16)
        shift = matrix_product(k_constants, scaled, shift)
        is_tile = start + s_warp < last
        if not HAS_SOFTCAP:
            shift = gl.where(is_tile, shift, float("-inf"))
        shift = _repeated_rows(shift, STEP, W)
        for i_step in gl.static_range(STEPS):
            if i_step > 0:
                await_copies(STAGES - 2)
            k_words = k_buffers[i_step % STAGES].load(KEYS)
            v_words = v_buffers[i_step % STAGES].load(VALUES)
            token_words = token_buffers[i_step % STAGES].load(VALUES)
            # All warps have read the stage before this one.
            if i_step + STAGES - 1 < STEPS:
                _copy_step(
                    record, buffers, places, (i_step + STAGES - 1) % STAGES, i_step + STAGES - 1,
                    K_STEP, V_STEP, TOKEN_STEP,
                )  # fmt: skip
            else:
                _copy_step(
                    next_record, buffers, places, (i_step + STAGES - 1) % STAGES, i_step + STAGES - 1 - STEPS,
                    K_STEP, V_STEP, TOKEN_STEP,
                )  # fmt: skip
            if i_step == 1:
                _copy_channels(next_record, channel_buffers, channel_places)
            end_copies()
            keys = _key_operand(k_words.to(gl.uint32, bitcast=True), magic, BITS, W, STEP, BLOCK_D)
            s = matrix_product(keys, scaled, shift)
            if HAS_SOFTCAP:
                s = gl.where(is_tile, _cap(s, softcap), float("-inf"))
            if HAS_WINDOW:
                k_pos = (start + s_warp) * _TILE + (i_step * STEP + s_token)
                s = gl.where(k_pos > q_pos - window, s, float("-inf"))
            # ---- weights, from the largest of weight times scale on
            words = gl.reshape(token_words.to(gl.uint32, bitcast=True), [G, W, STEP // 32, 8, 4, 4])
            words = gl.permute(gl.join(words, words), [0, 1, 2, 5, 3, 4, 6])
            words = gl.convert_layout(gl.reshape(words, [G * W, STEP, 8]), MMA, assert_trivial=True)
            scale = (words << 16).to(gl.float32, bitcast=True)
            low = (words & 0xFFFF0000).to(gl.float32, bitcast=True) + MIDDLE * scale
            largest = gl.max(gl.reshape(scale, [G, W, STEP, 8]), 0)
            largest = gl.convert_layout(largest, MMA, assert_trivial=True)
            m_new = gl.maximum(m_i, gl.max(s + gl.log2(gl.maximum(largest, _SMALLEST_SCALE)), 1))
            p = gl.exp2(s - (m_new - _EXPONENT)[:, None, :])
            alpha = gl.exp2(m_i - m_new)[:, None, :]
            m_i = m_new
            l_i = l_i * alpha + _lane_sums(p, W)
            alpha = _over_groups(alpha, G, W)
            p = _over_groups(p, G, W)
            lows = lows * alpha + _lane_sums(p * low, W)
            p = gl.convert_layout((p * scale).to(gl.float16), SECOND)
            shift_v = _repeated_rows(matrix_product(v_constants, p, zeros), 64, W)
            values = _value_operand(v_words.to(gl.uint32, bitcast=True), magic, BITS, W, STEP, G)
            acc = matrix_product(values, p, acc * alpha + shift_v)
        record = next_record
        next_record = later_record
    await_copies(0)
    lows = gl.convert_layout(gl.sum(lows, 1), gl.SliceLayout(1, MMA))
    return acc + lows[:, None, :], l_i, m_i


@constexpr_function
def _outputs(warps):
    """Layout in which outputs ``[G, 64, 8]`` are stored: four neighbouring channels to a lane."""
    return gl.BlockedLayout([1, 4, 1], [1, 16, 2], [1, 1, warps], [1, 2, 0])


@constexpr_function
def _partials(warps, channels):
    """Layout in which partial results ``[BLOCK_C, S, Dv]`` are loaded."""
    lanes = min(32, channels // 4)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [warps, 1, 1], [2, 1, 0])


@jit
def _store_partial(
    partial_ptr, partial_lse_ptr, acc, l_i, m_i, first_row, columns, entry, entries,
    DV: tl.constexpr, G: tl.constexpr, W: tl.constexpr, IS_HIGH: tl.constexpr,
):  # fmt: skip
    """Put the warps of a program together; store its output ``[rows, entries, Dv]`` and base-2 logarithm."""
    MMA: tl.constexpr = _mma(W)
    OUT: tl.constexpr = _outputs(W)
    COLUMN: tl.constexpr = _along(OUT, 3, 2)
    m_all = gl.max(m_i, 0)
    weight = gl.exp2(m_i - gl.convert_layout(m_all, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, :])
    total = gl.sum(l_i, 1)
    total = gl.sum(gl.convert_layout(total, gl.SliceLayout(1, MMA)) * weight, 0)
    total = gl.convert_layout(total, COLUMN)
    acc = acc * _over_groups(weight[:, None, :], G, W)
    acc = gl.convert_layout(gl.sum(gl.reshape(acc, [G, W, 64, 8]), 1), OUT)
    is_empty = total == 0.0
    acc = acc / gl.where(is_empty, 1.0, total)[None, None, :]
    lse = gl.convert_layout(m_all, COLUMN) + gl.log2(gl.where(is_empty, 1.0, total))
    if not IS_HIGH:
        lse -= _EXPONENT
    lse = gl.where(is_empty, float("-inf"), lse)
    column = gl.arange(0, 8, layout=COLUMN)
    place = (first_row + column) * entries + entry
    m_c = column < columns
    channel = gl.arange(0, 64, layout=_along(OUT, 3, 1))[None, :, None]
    if IS_HIGH:
        channel = channel % 8 * 8 + channel // 8
    channel += gl.arange(0, G, layout=_along(OUT, 3, 0))[:, None, None] * 64
    gl.store(
        partial_ptr + (place[None, None, :] * DV + channel), acc, mask=m_c[None, None, :] & (channel < DV)
    )  # fmt: skip
    gl.store(partial_lse_ptr + place, lse, mask=m_c)


@jit
def _store_nothing(
    partial_ptr, partial_lse_ptr, first_row, columns, entry, entries, DV: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Store the result of a program without tiles, as :func:`_store_partial` would."""
    MMA: tl.constexpr = _mma(W)
    _store_partial(
        partial_ptr, partial_lse_ptr, gl.full([G * W, 64, 8], 0.0, gl.float32, MMA),
        gl.full([W, 8, 8], 0.0, gl.float32, MMA), gl.full([W, 8], 0.0, gl.float32, gl.SliceLayout(1, MMA)),
        first_row, columns, entry, entries, DV, G, W, True,
    )  # fmt: skip


@jit
def _combine(
    partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_head, i_b, i_kv, columns, entries, used, q_len,
    stride_ob, stride_oh, stride_ot,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, W: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of the queries of a head, ``BLOCK_C`` at a time; sink logits take part here."""
    LAYOUT: tl.constexpr = _partials(W, BLOCK_DV)
    COLUMN: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    SPLIT: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    o_v = gl.arange(0, BLOCK_DV, layout=_along(LAYOUT, 3, 2))[None, None, :]
    o_s = gl.arange(0, BLOCK_S, layout=SPLIT)[None, :]
    for start in range(0, columns, BLOCK_C):
        column = start + gl.arange(0, BLOCK_C, layout=COLUMN)
        m_c = column < columns
        head = i_kv * GROUP + column % GROUP
        i_t = column // GROUP
        m_i = gl.full([BLOCK_C], -1.0e30, gl.float32, COLUMN)
        l_i = gl.full([BLOCK_C], 0.0, gl.float32, COLUMN)
        if HAS_SINKS:
            m_i = 1.4426950408889634 * gl.load(sinks_ptr + head, mask=m_c, other=0.0).to(gl.float32)
            l_i += 1.0
        acc = gl.full([BLOCK_C, BLOCK_DV], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
        for first in range(0, used, BLOCK_S):
            entry = (i_head * columns + column)[:, None] * entries + first + o_s
            m_s = m_c[:, None] & (first + o_s < used)
            # Past the L1 cache, which need not know what other programs have stored.
            lse = gl.load(partial_lse_ptr + entry, mask=m_s, other=float("-inf"), cache_modifier=".cg")
            part = gl.load(
                partial_ptr + (entry[:, :, None] * DV + o_v), mask=m_s[:, :, None] & (o_v < DV), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            m_new = gl.maximum(m_i, gl.max(lse, 1))
            weight = gl.exp2(lse - m_new[:, None])
            alpha = gl.exp2(m_i - m_new)
            l_i = l_i * alpha + gl.sum(weight, 1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))[:, None] + gl.sum(
                part * weight[:, :, None], 1
            )
            m_i = m_new
        is_empty = l_i == 0.0
        total = gl.where(is_empty, 1.0, l_i)
        lse = gl.where(is_empty, float("-inf"), (m_i + gl.log2(total)) * 0.6931471805599453)
        gl.store(lse_ptr + (i_b * KV_HEADS * GROUP + head) * q_len + i_t, lse, mask=m_c)
        OUT: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))
        acc = acc / gl.convert_layout(total, OUT)[:, None]
        o_c = gl.convert_layout(i_b * stride_ob + head * stride_oh + i_t * stride_ot, OUT)
        o_v2 = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :]
        mask = gl.convert_layout(column, OUT)[:, None] < columns
        gl.store(
            out_ptr + (o_c[:, None] + o_v2), acc.to(out_ptr.dtype.element_ty), mask=mask & (o_v2 < DV)
        )  # fmt: skip


@jit(
    do_not_specialize=[
        "q_len", "new_len", "slots", "ring_tiles", "window", "diagonal_tiles", "sink_tiles", "round_cost",
        "even", "odd",
    ]
)  # fmt: skip
def decode_kernel(
    q_ptr, body_ptr, pages_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, sinks_ptr, lengths_ptr,
    raw_rows_ptr, arrivals_ptr, partial_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_ob, stride_oh, stride_ot,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    q_len, new_len, slots, ring_tiles, window, softcap, logit_scale, diagonal_tiles, sink_tiles, round_cost, even, odd,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Answer 8 queries of a kv head over a share of its tiles; grid ``(B * Hkv * column blocks, splits)``.

    The last ``new_len`` keys are stored, but not counted in ``lengths`` yet; afterwards they are. ``even`` and ``odd``
    are the constants that :func:`_numbers` ORs: as arguments they are in registers, where one instruction takes a
    second mask; as literals they would take one more.
    """
    G: tl.constexpr = BLOCK_DV // 64
    blocks = (GROUP * q_len + 7) // 8
    i_block = gl.program_id(0) % blocks
    i_head = (gl.program_id(0) // blocks).to(gl.int64)
    i_split = gl.program_id(1)
    splits = gl.num_programs(1)
    i_b = i_head // KV_HEADS
    i_kv = i_head % KV_HEADS
    length = gl.load(lengths_ptr + i_b) + new_len
    first_pos = length - q_len
    column = i_block * 8 + gl.arange(0, 8, layout=_along(_mma(W), 3, 2))
    q_pos = (first_pos + column // GROUP)[None, None, :]
    visible_tile = 0
    if HAS_WINDOW:
        visible_tile = gl.maximum(first_pos - window + 1, 0) >> _TILE_SHIFT
    # ---- the program's share of a list: steps over the high tiles, then rounds of a low tile for each warp
    last_tile = (length - 1) >> _TILE_SHIFT
    band_first = gl.maximum((gl.maximum(first_pos, 0) >> _TILE_SHIFT) - diagonal_tiles, visible_tile)
    sinks = gl.maximum(gl.minimum(sink_tiles, band_first) - visible_tile, 0)
    steps = (sinks + gl.maximum(last_tile + 1 - band_first, 0)) * (_TILE // (16 * W))
    low_first = gl.maximum(visible_tile, sink_tiles)
    low_end = gl.maximum(band_first, low_first)
    total = steps + (low_end - low_first + W - 1) // W * round_cost
    share = gl.maximum((total + splits - 1) // splits, round_cost)
    start = i_split * share
    end = start + share
    # A program with both kinds has two results; those after it have theirs one place further.
    extra = gl.where(steps % share == 0, 0, 1)
    used = gl.maximum((total + share - 1) // share, 1)
    columns = GROUP * q_len
    first_row = i_head * columns + i_block * 8
    if start < steps:
        row = i_b
        if raw_rows_ptr is not None:
            row = gl.load(raw_rows_ptr + i_b).to(gl.int64)
        ring = i_kv * ring_tiles * _TILE
        sink = i_kv * sink_tiles * _TILE
        q = _load_queries(
            q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd, GROUP, D, BLOCK_D, W, True
        )
        acc, l_i, m_i = _high_tiles(
            q, key_tail_ptr + (row * stride_key_tail + ring * D),
            value_tail_ptr + (row * stride_value_tail + ring * DV), key_sink_ptr + (row * stride_key_sink + sink * D),
            value_sink_ptr + (row * stride_value_sink + sink * DV),
            start, gl.minimum(end, steps), length, q_pos, sinks, band_first, visible_tile, window,
            softcap, logit_scale, sink_tiles, ring_tiles,
            D, DV, BLOCK_D, G, W, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        _store_partial(
            partial_ptr, partial_lse_ptr, acc, l_i, m_i, first_row, columns - i_block * 8, i_split, splits + 1,
            DV, G, W, True,
        )  # fmt: skip
    if (end > steps) & (i_split < used):
        low_start = low_first + (gl.maximum(start - steps, 0) + round_cost - 1) // round_cost * W
        low_last = gl.minimum(low_first + (end - steps + round_cost - 1) // round_cost * W, low_end)
        if low_start < low_last:
            q = _load_queries(
                q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                GROUP, D, BLOCK_D, W, False,
            )  # fmt: skip
            acc, l_i, m_i = _low_tiles(
                q, body_ptr, pages_ptr + i_b * slots, i_kv, low_start, low_last, q_pos, window, softcap, logit_scale,
                slots, stride_page,
                (even.to(gl.uint32, bitcast=True), odd.to(gl.uint32, bitcast=True)),
                D, DV, BLOCK_D, G, W, BITS, STEP, STAGES, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            _store_partial(
                partial_ptr, partial_lse_ptr, acc, l_i, m_i, first_row, columns - i_block * 8, i_split + extra,
                splits + 1, DV, G, W, False,
            )  # fmt: skip
        else:
            _store_nothing(
                partial_ptr, partial_lse_ptr, first_row, columns - i_block * 8, i_split + extra, splits + 1, DV, G, W
            )
    # ---- the last program of the head; it was the last to read the length, too
    barrier()
    arrivals = arrivals_ptr + i_b * (KV_HEADS + 1)
    if gl.atomic_add(arrivals + i_kv, 1, sem="acq_rel") == blocks * splits - 1:
        gl.store(arrivals + i_kv, 0)
        heads = gl.atomic_add(arrivals + KV_HEADS, 1, sem="relaxed")
        _combine(
            partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_head, i_b, i_kv, columns, splits + 1,
            used + extra, q_len, stride_ob, stride_oh, stride_ot,
            KV_HEADS, GROUP, DV, BLOCK_DV, BLOCK_C, BLOCK_S, W, HAS_SINKS,
        )  # fmt: skip
        if heads == KV_HEADS - 1:
            gl.store(arrivals + KV_HEADS, 0)
            gl.store(lengths_ptr + i_b, length)
