"""The loops of the decode kernel: queries against high tiles, read in 16 bits, and against low ones, read from records.

A warp works on tiles of its own, and each of its lanes on what it has copied itself. Scores are ``keys . queries`` and
outputs ``values . probabilities``, so that keys and values fill the 16 rows of an instruction, and up to 8 queries its
columns.

    q . k = [q * scale] . (c + n) - [q * scale] . (c + h) + q . (low + h scale)
    sum p v = sum [p * scale] (c + n) - sum [p * scale] (c + h) + sum p (low + h scale)

``scale`` is one for each channel of a tile of keys and for each token and 64 channels of values, ``h`` the middle of
the codes, ``c`` what is added to turn them into numbers, and what is in brackets is rounded to fp16: the error of a
rounding meets ``n - h`` alone. What does not depend on ``n`` comes from products with rows that are all alike, which
start the sums of the others.
"""

from __future__ import annotations

import triton.language as tl

from ..device.gluon import (
    await_copies,
    begin_copy,
    constexpr_function,
    end_copies,
    gl,
    jit,
    matrix_product,
)
from ..numerics.formats import TILE
from .decode_operands import (
    along,
    constants_operand,
    finite_halves,
    halves,
    key_operand,
    lane_sums,
    mma_layout,
    operand_layout,
    over_groups,
    raw_keys_layout,
    raw_values_layout,
    repeated_rows,
    second_operand,
    two_rows,
    value_operand,
    words_layout,
)

_TILE = tl.constexpr(TILE)
_PER_MANTISSA = tl.constexpr(2.0**-23)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
WEIGHT_EXPONENT = tl.constexpr(140.0)
"""Of the factor of weights: what is taken for a logarithm is 127 too large, and 13 more keep a weight times a scale
below 2^13.1, where fp16 reaches from 2^-24 to 2^16."""


@jit
def _cap(s, softcap):
    """Cap base-2 logits; ``softcap`` carries the log2(e)."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap.
    return softcap * (1.0 - 2.0 / (gl.exp2(s * (2.8853900817779268 / softcap)) + 1.0))


@jit
def attend_high(
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
    MMA: tl.constexpr = mma_layout(W)
    KEYS: tl.constexpr = raw_keys_layout(W, BLOCK_D)
    VALUES: tl.constexpr = raw_values_layout(W, 64 * G)
    STEPS: tl.constexpr = _TILE // (16 * W)
    CB: tl.constexpr = BLOCK_D // 32
    k_token = (
        gl.arange(0, W, layout=along(KEYS, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=along(KEYS, 3, 1))[None, :, None]
    )
    v_token = (
        gl.arange(0, W, layout=along(VALUES, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=along(VALUES, 3, 1))[None, :, None]
    )
    token = (
        gl.arange(0, W, layout=along(MMA, 3, 0))[:, None, None] * 16
        + gl.arange(0, 16, layout=along(MMA, 3, 1))[None, :, None]
    )
    o_d = gl.arange(0, BLOCK_D, layout=along(KEYS, 3, 2))[None, None, :]
    o_v = gl.arange(0, 64 * G, layout=along(VALUES, 3, 2))[None, None, :]
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
        k = gl.convert_layout(gl.reshape(k, [W, 16, BLOCK_D]), operand_layout(W, 0), assert_trivial=True)
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
        l_i = l_i * alpha + lane_sums(p, W)
        p = second_operand(over_groups(p.to(q.dtype), G, W), W)
        v = gl.permute(gl.reshape(v, [W, 16, G, 8, 8]), [2, 0, 4, 3, 1])
        v = gl.convert_layout(gl.reshape(v, [G * W, 64, 16]), operand_layout(W, 0), assert_trivial=True)
        acc = matrix_product(v, p, acc * over_groups(alpha, G, W))
    return acc, l_i, m_i


@jit
def _record_words(body_ptr, pages_ptr, tile, slots, stride_page):
    """Return where the records of tiles of a kv head are, in words; ``body_ptr`` is that of page 0."""
    return body_ptr + gl.load(pages_ptr + tile % slots).to(gl.int64) * stride_page


@jit
def _tile_queries(
    scale_words, low_words, q, logit_scale, shift_factors, k_constants,
    BLOCK_D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Return the queries times the scales of tiles, fp16 ``[W, D, 8]``, and what scores start from, ``[W, 16, 8]``.

    One product gives those with scales in 8 of its rows, those with lows in the others; ``shift_factors`` are theirs.
    """
    SECOND: tl.constexpr = operand_layout(W, 1)
    zero = gl.full([W, 16, 8], 0.0, gl.float32, mma_layout(W))
    scale = halves(scale_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    scale = gl.reshape(scale, [W, BLOCK_D // 32, 8, 4, 4, 2])
    low = halves(low_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    low = gl.reshape(low, [W, BLOCK_D // 32, 8, 4, 4, 2])
    shift = matrix_product(two_rows(scale, low, W, BLOCK_D).to(q.dtype), q, zero) * shift_factors
    shift = repeated_rows(lane_sums(shift, W), 16, W)
    scale = gl.reshape(gl.permute(scale, [0, 1, 4, 3, 5, 2]), [W, BLOCK_D, 8])
    scale = gl.convert_layout(scale, SECOND, assert_trivial=True)
    scaled = (q.to(gl.float32) * logit_scale) * scale.to(gl.float32)
    # Where a step of one channel is worth 2^16 in the exponent, larger ones need not be told apart; NaN shows.
    scaled = finite_halves(scaled.to(gl.float16))
    shift = matrix_product(k_constants, scaled, shift)
    return scaled, shift


@jit
def _low_step(
    scaled, shift, k_words, v_words, token_words, v_constants, acc, l_i, lows, m_i, is_tile, first_key, q_pos, window,
    softcap, magic,
    BLOCK_D: tl.constexpr, G: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to ``STEP`` keys of each warp's tile; return the four sums."""
    MMA: tl.constexpr = mma_layout(W)
    MIDDLE: tl.constexpr = float(1 << (BITS - 1))
    zeros = gl.full([G * W, 16, 8], 0.0, gl.float32, MMA)
    keys = key_operand(k_words.to(gl.uint32, bitcast=True), magic, BITS, W, STEP, BLOCK_D)
    s = matrix_product(keys, scaled, shift)
    if HAS_SOFTCAP:
        s = gl.where(is_tile, _cap(s, softcap), float("-inf"))
    if HAS_WINDOW:
        k_pos = first_key + gl.arange(0, STEP, layout=along(MMA, 3, 1))[None, :, None]
        s = gl.where(k_pos > q_pos - window, s, float("-inf"))
    # ---- weights, from the largest of weight times scale on
    words = gl.reshape(token_words.to(gl.uint32, bitcast=True), [G, W, STEP // 32, 8, 4, 4])
    words = gl.permute(gl.join(words, words), [0, 1, 2, 5, 3, 4, 6])
    words = gl.convert_layout(gl.reshape(words, [G * W, STEP, 8]), MMA, assert_trivial=True)
    scale = (words << 16).to(gl.float32, bitcast=True)
    low = (words & 0xFFFF0000).to(gl.float32, bitcast=True) + MIDDLE * scale
    largest = gl.max(gl.reshape(scale, [G, W, STEP, 8]), 0)
    largest = gl.convert_layout(largest, MMA, assert_trivial=True)
    # The bits of a number as an integer are about its logarithm: here at most .09 below it, and 127 above.
    exponent = gl.maximum(largest, _SMALLEST_SCALE).to(gl.int32, bitcast=True).to(gl.float32)
    m_new = gl.maximum(m_i, gl.max(s + exponent * _PER_MANTISSA, 1))
    p = gl.exp2(s - (m_new - WEIGHT_EXPONENT)[:, None, :])
    alpha = gl.exp2(m_i - m_new)[:, None, :]
    m_i = m_new
    l_i = l_i * alpha + lane_sums(p, W)
    alpha = over_groups(alpha, G, W)
    p = over_groups(p, G, W)
    lows = lows * alpha + lane_sums(p * low, W)
    p = second_operand((p * scale).to(gl.float16), W)
    shift_v = repeated_rows(matrix_product(v_constants, p, zeros), 64, W)
    values = value_operand(v_words.to(gl.uint32, bitcast=True), magic, BITS, W, STEP, G)
    acc = matrix_product(values, p, acc * alpha + shift_v)
    return acc, l_i, lows, m_i


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
    v_record = gl.convert_layout(record, along(words_layout(record.shape[0], 4), 4, 1))[None, :, None, None]
    begin_copy(buffers[0][i_stage], record[:, None, None] + (places[0] + i_step * K_STEP))
    begin_copy(buffers[1][i_stage], v_record + (places[1] + i_step * V_STEP))
    begin_copy(buffers[2][i_stage], v_record + (places[2] + i_step * TOKEN_STEP))


@jit
def attend_low(
    q, body_ptr, pages_ptr, i_kv, first, last, q_pos, window, softcap, logit_scale, slots, stride_page, magic,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to the low tiles ``first..last``, one for each warp at a time.

    Returns:
        As :func:`attend_high`, but channels in order; weights are times ``2 ** WEIGHT_EXPONENT``.
    """
    MMA: tl.constexpr = mma_layout(W)
    FIRST: tl.constexpr = operand_layout(W, 0)
    KEYS: tl.constexpr = words_layout(W, 3)
    VALUES: tl.constexpr = words_layout(W, 4)
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
    o_k = gl.arange(0, 128, layout=along(KEYS, 3, 2))[None, None, :]
    i_r = gl.arange(0, STEP * BLOCK_D // (32 * C), layout=along(KEYS, 3, 1))[None, :, None]
    k_offsets = (i_r // (BLOCK_D // C) * (STORED // C) + gl.minimum(i_r % (BLOCK_D // C), STORED // C - 1)) * 128 + o_k
    i_r = gl.arange(0, BLOCK_D // 32, layout=along(KEYS, 3, 1))[None, :, None]
    channel_offsets = gl.minimum(i_r, STORED // 32 - 1) * 16 + o_k % 16
    o_v = gl.arange(0, 128, layout=along(VALUES, 4, 3))[None, None, None, :]
    i_g = gl.arange(0, G, layout=along(VALUES, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, 2 * STEP // C, layout=along(VALUES, 4, 2))[None, None, :, None]
    v_offsets = (i_r // 2 * (VALUE_STORED // 32) + gl.minimum(2 * i_g + i_r % 2, VALUE_STORED // 32 - 1)) * 128 + o_v
    i_r = gl.arange(0, STEP // 32, layout=along(VALUES, 4, 2))[None, None, :, None]
    token_offsets = (i_r * GROUPS + gl.minimum(i_g, GROUPS - 1)) * 32 + o_v // 16 * 4 + o_v % 4
    # ---- constant operands
    k_constants = constants_operand(
        gl.arange(0, BLOCK_D, layout=along(FIRST, 3, 2))[None, None, :],
        gl.full([W, 16, BLOCK_D], 0.0, gl.float16, FIRST), BITS,
    )  # fmt: skip
    v_constants = constants_operand(
        gl.arange(0, STEP, layout=along(FIRST, 3, 2))[None, None, :],
        gl.full([G * W, 16, STEP], 0.0, gl.float16, FIRST), BITS,
    )  # fmt: skip
    s_row = gl.arange(0, 16, layout=along(MMA, 3, 1))[None, :, None]
    shift_factors = gl.where(s_row < 8, MIDDLE * logit_scale, logit_scale)
    m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
    l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
    lows = gl.full([G * W, 8, 8], 0.0, gl.float32, MMA)
    acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
    o_w = gl.arange(0, W, layout=along(KEYS, 3, 0))
    s_warp = gl.arange(0, W, layout=along(MMA, 3, 0))[:, None, None]

    K_STEP: tl.constexpr = STEP * STORED * BITS // 32
    V_STEP: tl.constexpr = STEP * VALUE_STORED * BITS // 32
    TOKEN_STEP: tl.constexpr = STEP * GROUPS
    record = _record_words(body_ptr, pages_ptr, gl.minimum(first + o_w, last - 1), slots, stride_page)
    next_record = _record_words(body_ptr, pages_ptr, gl.minimum(first + W + o_w, last - 1), slots, stride_page)
    places = k_offsets, VALUE_CODES + v_offsets, VALUE_SCALES + token_offsets
    channel_places = KEY_SCALES + channel_offsets, KEY_LOWS + channel_offsets
    k_buffers = _buffers(STAGES, [W, STEP * BLOCK_D // (32 * C), 128])
    v_buffers = _buffers(STAGES, [G, W, 2 * STEP // C, 128])
    token_buffers = _buffers(STAGES, [G, W, STEP // 32, 128])
    channel_buffers = _buffers(2, [W, BLOCK_D // 32, 128])
    buffers = k_buffers, v_buffers, token_buffers
    _copy_channels(record, channel_buffers, channel_places)
    for i_stage in gl.static_range(STAGES - 1):
        _copy_step(record, buffers, places, i_stage, i_stage, K_STEP, V_STEP, TOKEN_STEP)
        end_copies()
    for start in range(first, last, W):
        later_tile = gl.minimum(start + 2 * W + o_w, last - 1)
        later_record = _record_words(body_ptr, pages_ptr, later_tile, slots, stride_page)
        await_copies(STAGES - 2)
        scaled, shift = _tile_queries(
            channel_buffers[0].load(KEYS), channel_buffers[1].load(KEYS), q, logit_scale, shift_factors, k_constants,
            BLOCK_D, W,
        )  # fmt: skip
        is_tile = start + s_warp < last
        if not HAS_SOFTCAP:
            shift = gl.where(is_tile, shift, float("-inf"))
        shift = repeated_rows(shift, STEP, W)
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
            acc, l_i, lows, m_i = _low_step(
                scaled, shift, k_words, v_words, token_words, v_constants, acc, l_i, lows, m_i, is_tile,
                (start + s_warp) * _TILE + i_step * STEP, q_pos, window, softcap, magic,
                BLOCK_D, G, W, BITS, STEP, HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
        record = next_record
        next_record = later_record
    await_copies(0)
    lows = gl.convert_layout(gl.sum(lows, 1), gl.SliceLayout(1, MMA))
    return acc + lows[:, None, :], l_i, m_i
