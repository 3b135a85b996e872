"""The loops of the decode kernel: queries against high tiles, read in 16 bits, and against low ones, read from records.

A warp works on tiles of its own; a lane reads the codes that it has copied itself, and scales and lows that others
have, past the barrier at which copies may overwrite what was read before. Scores are ``keys . queries`` and outputs
``values . probabilities``, so that keys and values fill the 16 rows of an instruction, and queries its columns.

Codes are multiplied as integers of 8 bits, exactly, with numbers of 16 bits in two signed bytes:

    q . k = scale_q sum round(q scale / scale_q) (n - h) + q . (low + h scale)
    sum p v = sum round(p scale) (n - h) + sum p (low + h scale)

``scale`` is one for each channel of a tile of keys and for each token and 64 channels of values, ``h`` the middle of
the codes. ``scale_q`` is one for each query and tile, and a tile has a maximum of its own for ``p scale``, so that the
16 bits are those below the largest number of a tile: what is rounded off is less than a bfloat16 would lose.
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
    view,
)
from ..numerics.formats import TILE
from .decode_operands import (
    LARGEST,
    along,
    channel_words,
    channels_layout,
    halves,
    key_operand,
    lane_sums,
    mma_layout,
    operand_layout,
    over_groups,
    query_operand,
    raw_keys_layout,
    raw_values_layout,
    repeated_rows,
    rotated_queries,
    second_operand,
    sums_layout,
    token_words,
    tokens_layout,
    two_rows,
    value_operand,
    weight_operand,
    whole_sums,
    words_layout,
)

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_STEP = tl.constexpr(TILE // 2)
"""Tokens of a step over the codes of a tile."""
_LARGEST = tl.constexpr(LARGEST)
_PER_MANTISSA = tl.constexpr(2.0**-23)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
_WEIGHT_EXPONENT = tl.constexpr(127.0 + 14.9)
"""Of the factor of weights: what is taken for a logarithm is 127 too large and .09 too small, and a weight times a
scale must be below ``LARGEST``."""


@jit
def _cap(s, softcap):
    """Cap base-2 logits; ``softcap`` carries the log2(e)."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where s is y * softcap.
    return softcap * (1.0 - 2.0 / (gl.exp2(s * (2.8853900817779268 / softcap)) + 1.0))


@jit
def _band_start(q_pos, diagonal_tiles):
    """Return the first tile of each query's band, counted from the start; below 0 where it reaches over that."""
    return (gl.maximum(q_pos, 0) >> _TILE_SHIFT) - diagonal_tiles


@jit
def _load_raw(pointer, token, channel, strides, first, tokens, CHANNELS: tl.constexpr):
    """Load so many tokens of the tail, the sinks or the new ones, from ``first`` on, and zeros around them."""
    mask = (token >= first) & (token < tokens) & (channel < CHANNELS)
    offset = token.to(gl.int64) * strides[0] + channel.to(gl.int64) * strides[1]
    return gl.load(pointer + offset, mask=mask, other=0.0)


@jit
def attend_high(
    q, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, key_ptr, value_ptr,
    stride_kt, stride_kd, stride_vt, stride_vd,
    first, last, steps, stored, q_len, q_pos, sinks, band_first, visible_tile, window, softcap, logit_scale,
    diagonal_tiles, sink_tiles, ring_tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Attend to steps ``first..last``, ``16 W`` keys each, of the high tiles: ``sinks`` sinks, then the band.

    With ``HAS_NEW`` the last of all ``steps`` is over the new keys, at the positions from ``stored`` on.

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
    q_band = _band_start(q_pos, diagonal_tiles) * _TILE
    for step in range(first, last):
        index = step // STEPS
        inside = (step - index * STEPS) * (16 * W)
        tile = gl.where(index < sinks, visible_tile + index, band_first + index - sinks)
        entry = (tile % ring_tiles) * _TILE + inside
        here = tile * _TILE + inside
        end = stored
        k_base = key_tail_ptr + entry * D
        v_base = value_tail_ptr + entry * DV
        if tile < sink_tiles:
            k_base = key_sink_ptr + here * D
            v_base = value_sink_ptr + here * DV
        k_strides = D, 1
        v_strides = DV, 1
        if HAS_NEW:
            is_new = step == steps - 1
            here = gl.where(is_new, stored, here)
            end = gl.where(is_new, stored + q_len, stored)
            k_base = gl.where(is_new, key_ptr, k_base)
            v_base = gl.where(is_new, value_ptr, v_base)
            k_strides = gl.where(is_new, stride_kt, D), gl.where(is_new, stride_kd, 1)
            v_strides = gl.where(is_new, stride_vt, DV), gl.where(is_new, stride_vd, 1)
        k = _load_raw(k_base, k_token, o_d, k_strides, -here, end - here, D)
        v = _load_raw(v_base, v_token, o_v, v_strides, -here, end - here, DV)
        k = gl.permute(gl.reshape(k, [W, 16, CB, 4, 4, 2]), [0, 1, 2, 4, 3, 5])
        k = gl.convert_layout(gl.reshape(k, [W, 16, BLOCK_D]), operand_layout(W, 0), assert_trivial=True)
        s = matrix_product(k, q, zero) * logit_scale
        if HAS_SOFTCAP:
            s = _cap(s, softcap)
        k_pos = here + token
        seen = (k_pos <= q_pos) & (k_pos >= 0) & (k_pos < end)
        seen = seen & ((k_pos >= q_band) | (k_pos < sink_tiles * _TILE))
        if HAS_WINDOW:
            seen = seen & (k_pos > q_pos - window)
        s = gl.where(seen, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None, :])
        alpha = gl.exp2(m_i - m_new)[:, None, :]
        m_i = m_new
        l_i = l_i * alpha + lane_sums(p, MMA)
        p = second_operand(over_groups(p.to(q.dtype), G, MMA), W)
        v = gl.permute(gl.reshape(v, [W, 16, G, 8, 8]), [2, 0, 4, 3, 1])
        v = gl.convert_layout(gl.reshape(v, [G * W, 64, 16]), operand_layout(W, 0), assert_trivial=True)
        acc = matrix_product(v, p, acc * over_groups(alpha, G, MMA))
    return acc, l_i, m_i


@jit
def _record_words(body_ptr, pages_ptr, tile, slots, stride_page):
    """Return where the records of tiles of a kv head are, in words; ``body_ptr`` is that of page 0."""
    return body_ptr + gl.load(pages_ptr + tile % slots).to(gl.int64) * stride_page


@jit
def _tile_queries(
    scale_words, low_words, q, logit_scale, BITS: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):  # fmt: skip
    """Return the queries of tiles as an operand of bytes, and factor and summand of the scores, ``[W, C]`` each.

    One bf16 product gives the queries times the scales in 8 of its rows, times the lows in the others. fp16 lacks the
    range for scales, and bf16 the bits for fp16 queries and for rotated ones: these are split into two bf16 summands,
    which is exact for fp16.
    """
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = sums_layout(W)
    N: tl.constexpr = q.shape[-1]
    zero = gl.full([W, 16, N], 0.0, gl.float32, MMA)
    scale = halves(scale_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    scale = gl.reshape(scale, [W, BLOCK_D // 32, 8, 4, 4, 2])
    low = halves(low_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    low = gl.reshape(low, [W, BLOCK_D // 32, 8, 4, 4, 2])
    if IS_ROTATED:
        q = rotated_queries(q, W)
    coefficients = two_rows(scale, low, W, BLOCK_D)
    if q.dtype == gl.bfloat16:
        summand = matrix_product(coefficients, q, zero)
    else:
        upper = q.to(gl.bfloat16)
        rest = (q.to(gl.float32) - upper.to(gl.float32)).to(gl.bfloat16)
        summand = matrix_product(coefficients, rest, matrix_product(coefficients, upper, zero))
    summand, _ = gl.split(gl.reshape(summand, [W, 16, N // 2, 2]))
    row = gl.arange(0, 16, layout=along(SUMS, 3, 1))[None, :, None]
    factor = gl.where(row < 8, logit_scale * (1 << (BITS - 1)), logit_scale)
    summand = lane_sums(gl.convert_layout(summand, SUMS, assert_trivial=True) * factor, SUMS)
    scale = gl.reshape(gl.permute(scale, [0, 1, 4, 3, 5, 2]), [W, BLOCK_D, 8])
    if N == 16:
        scale = gl.reshape(gl.permute(gl.join(scale, scale), [0, 1, 3, 2]), [W, BLOCK_D, 16])
    scale = gl.convert_layout(scale, operand_layout(W, 1), assert_trivial=True)
    scaled = q.to(gl.float32) * scale.to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(scaled), 1), _SMALLEST_SCALE)
    operand = query_operand(scaled, 1.0 / largest * _LARGEST, BITS, W, BLOCK_D)
    factor = gl.convert_layout(largest, gl.SliceLayout(1, MMA))
    factor, _ = gl.split(gl.reshape(factor, [W, N // 2, 2]))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS), assert_trivial=True) * (
        logit_scale / (_LARGEST * (1 << (8 - BITS)))
    )
    return operand, factor, summand


@jit
def _token_scales(words, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Return scales and lows of the values of tiles, fp32 ``[G * W, 128, C]``, of words that have both."""
    words = gl.reshape(words.to(gl.uint32, bitcast=True), [G, W, _TILE // 32, 8, 4, 4])  # tokens as g, i; a column
    words = gl.reshape(gl.permute(words, [0, 1, 2, 4, 3, 5]), [G * W, _TILE, 4])
    if C == 8:
        words = gl.reshape(gl.permute(gl.join(words, words), [0, 1, 3, 2]), [G * W, _TILE, 8])
    words = gl.convert_layout(words, sums_layout(W), assert_trivial=True)
    return (words << 16).to(gl.float32, bitcast=True), (words & 0xFFFF0000).to(gl.float32, bitcast=True)


@jit
def _raised(s, scale, G: tl.constexpr, W: tl.constexpr):
    """Return for each query the largest of score and logarithm of the values' scale, which may be .09 too small."""
    largest = gl.max(gl.reshape(scale, [G, W, scale.shape[1], scale.shape[2]]), 0)
    largest = gl.convert_layout(largest, sums_layout(W), assert_trivial=True)
    # The bits of a number as an integer are about its logarithm: at most .09 below it, and 127 above.
    exponent = gl.maximum(largest, _SMALLEST_SCALE).to(gl.int32, bitcast=True).to(gl.float32)
    return gl.max(s + exponent * _PER_MANTISSA, 1)


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
def _same_buffers(buffers, shape: tl.constexpr):
    """Return the two buffers as such of another shape."""
    LAYOUT: tl.constexpr = _plain(len(shape))
    return view(buffers[0], gl.int32, shape, LAYOUT), view(buffers[1], gl.int32, shape, LAYOUT)


@jit
def _copy_keys(
    is_wanted, record, buffers, channel_buffers, places, channel_places, i_step: tl.constexpr, STEP_WORDS: tl.constexpr,
    CHANNEL_WORDS: tl.constexpr,
):  # fmt: skip
    """Begin to copy the codes of a step of keys if they are wanted, with the first also scales and lows of the tile."""
    if is_wanted:
        if i_step == 0:
            CHANNELS: tl.constexpr = channels_layout(record.shape[0])
            scales = gl.convert_layout(record, along(CHANNELS, 3, 0))[:, None, None] + channel_places
            for i in gl.static_range(2):
                begin_copy(channel_buffers[i], scales + i * CHANNEL_WORDS)
        begin_copy(buffers[i_step], record[:, None, None] + (places + i_step * STEP_WORDS))
    end_copies()


@jit
def _copy_values(
    is_wanted, record, buffers, token_buffers, places, token_places, i_step: tl.constexpr, STEP_WORDS: tl.constexpr
):  # fmt: skip
    """Begin to copy the codes of a step of values, likewise."""
    W: tl.constexpr = record.shape[0]
    if is_wanted:
        if i_step == 0:
            tokens = gl.convert_layout(record, along(tokens_layout(W), 4, 1))[None, :, None, None]
            begin_copy(token_buffers[0], tokens + token_places)
        rows = gl.convert_layout(record, along(words_layout(W, 4), 4, 1))[None, :, None, None]
        begin_copy(buffers[i_step], rows + (places + i_step * STEP_WORDS))
    end_copies()


@jit
def _below(x, y, W: tl.constexpr):
    """Put two parts of as many rows below each other."""
    x = gl.permute(gl.join(x, y), [0, 3, 1, 2])
    x = gl.reshape(x, [x.shape[0], 2 * x.shape[2], x.shape[3]])
    return gl.convert_layout(x, sums_layout(W), assert_trivial=True)


@jit
def _parts(x, W: tl.constexpr):
    """Return the upper half of the rows, and the lower."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
    x, y = gl.split(gl.permute(x, [0, 2, 3, 1]))
    LAYOUT: tl.constexpr = sums_layout(W)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True), gl.convert_layout(y, LAYOUT, assert_trivial=True)


@jit
def attend_low(
    q, body_ptr, pages_ptr, i_kv, first, last, q_pos, diagonal_tiles, window, softcap, logit_scale, slots, stride_page,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr, BITS: tl.constexpr, IS_ROTATED: tl.constexpr, BUFFERS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend with ``C`` queries ``[W, D, 2 C]``, each in two columns, to low tiles ``first..last``, one for each warp.

    Where keys are rotated, queries are in shared memory, ``[D, 2 C]``.

    Returns:
        As :func:`attend_high`, for ``C`` queries, but channels in order.
    """
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = sums_layout(W)
    KEYS: tl.constexpr = words_layout(W, 3)
    VALUES: tl.constexpr = words_layout(W, 4)
    CO: tl.constexpr = 128 // BITS  # columns of a block of codes
    MIDDLE: tl.constexpr = float(1 << (BITS - 1))
    N: tl.constexpr = q.shape[-1]
    C: tl.constexpr = N // 2
    # ---- sizes and places in a record, in words
    STORED: tl.constexpr = (D + 31) // 32 * 32
    VALUE_STORED: tl.constexpr = (DV + 31) // 32 * 32
    GROUPS: tl.constexpr = (DV + 63) // 64
    KEY_SCALES: tl.constexpr = _TILE * STORED * BITS // 32
    KEY_LOWS: tl.constexpr = KEY_SCALES + STORED // 2
    VALUE_CODES: tl.constexpr = KEY_LOWS + STORED // 2
    VALUE_SCALES: tl.constexpr = VALUE_CODES + _TILE * VALUE_STORED * BITS // 32
    K_STEP: tl.constexpr = _STEP * STORED * BITS // 32
    V_STEP: tl.constexpr = _STEP * VALUE_STORED * BITS // 32
    body_ptr += i_kv * (VALUE_SCALES + _TILE * GROUPS)
    # Blocks beyond the stored channels are read from the last one: their queries are 0, their outputs not stored.
    o_k = gl.arange(0, 128, layout=along(KEYS, 3, 2))[None, None, :]
    i_r = gl.arange(0, _STEP * BLOCK_D // (32 * CO), layout=along(KEYS, 3, 1))[None, :, None]
    k_places = (
        i_r // (BLOCK_D // CO) * (STORED // CO) + gl.minimum(i_r % (BLOCK_D // CO), STORED // CO - 1)
    ) * 128 + o_k
    CHANNELS: tl.constexpr = channels_layout(W)
    i_r = gl.arange(0, BLOCK_D // 32, layout=along(CHANNELS, 3, 1))[None, :, None]
    o_w = gl.arange(0, 16, layout=along(CHANNELS, 3, 2))[None, None, :]
    channel_places = KEY_SCALES + gl.minimum(i_r, STORED // 32 - 1) * 16 + o_w
    o_v = gl.arange(0, 128, layout=along(VALUES, 4, 3))[None, None, None, :]
    i_g = gl.arange(0, G, layout=along(VALUES, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, 2 * _STEP // CO, layout=along(VALUES, 4, 2))[None, None, :, None]
    v_places = i_r // 2 * (VALUE_STORED // 32) + gl.minimum(2 * i_g + i_r % 2, VALUE_STORED // 32 - 1)
    v_places = VALUE_CODES + v_places * 128 + o_v
    TOKENS: tl.constexpr = tokens_layout(W)
    i_g = gl.arange(0, G, layout=along(TOKENS, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, _TILE // 32, layout=along(TOKENS, 4, 2))[None, None, :, None]
    o_w = gl.arange(0, 32, layout=along(TOKENS, 4, 3))[None, None, None, :]
    token_places = VALUE_SCALES + (i_r * GROUPS + gl.minimum(i_g, GROUPS - 1)) * 32 + o_w
    m_i = gl.full([W, C], -1.0e30, gl.float32, gl.SliceLayout(1, SUMS))
    l_i = gl.full([W, 8, C], 0.0, gl.float32, SUMS)
    lows = gl.full([G * W, 8, C], 0.0, gl.float32, SUMS)
    acc = gl.full([G * W, 64, C], 0.0, gl.float32, SUMS)
    o_w = gl.arange(0, W, layout=along(KEYS, 3, 0))
    s_warp = gl.arange(0, W, layout=along(SUMS, 3, 0))[:, None, None]
    s_row = gl.arange(0, _STEP, layout=along(SUMS, 3, 1))[None, :, None]
    q_last = gl.minimum(_band_start(q_pos, diagonal_tiles), last)  # the tile past the last low one of each query

    # ---- copies: a tile's keys and values in two steps each. When a step has been multiplied, its place is that of
    # the step of the next tile, or, of two places, keys and values take turns.
    k_buffers = _buffers(2, [W, _STEP * BLOCK_D // (32 * CO), 128])
    if BUFFERS == 2:
        v_buffers = _same_buffers(k_buffers, [G, W, 2 * _STEP // CO, 128])
    else:
        v_buffers = _buffers(2, [G, W, 2 * _STEP // CO, 128])
    channel_buffers = _buffers(2, [W, BLOCK_D // 32, 16])
    token_buffers = _buffers(1, [G, W, _TILE // 32, 32])
    record = _record_words(body_ptr, pages_ptr, gl.minimum(first + o_w, last - 1), slots, stride_page)
    for i_step in gl.static_range(2):
        _copy_keys(True, record, k_buffers, channel_buffers, k_places, channel_places, i_step, K_STEP, STORED // 2)
    if BUFFERS == 4:
        for i_step in gl.static_range(2):
            _copy_values(True, record, v_buffers, token_buffers, v_places, token_places, i_step, V_STEP)
    for start in range(first, last, W):
        has_next = start + W < last
        next_tile = gl.minimum(start + W + o_w, last - 1)
        next_record = _record_words(body_ptr, pages_ptr, next_tile, slots, stride_page)
        is_tile = start + s_warp < q_last
        # ---- scores
        scores = ()
        for i_step in gl.static_range(2):
            await_copies(BUFFERS - 1)
            if i_step == 0:
                operand, factor, summand = _tile_queries(
                    channel_words(channel_buffers[0]),
                    channel_words(channel_buffers[1]),
                    q,
                    logit_scale,
                    BITS,
                    W,
                    BLOCK_D,
                    IS_ROTATED,
                )
                if not HAS_SOFTCAP:
                    summand = gl.where(is_tile, summand, float("-inf"))
                summand = repeated_rows(summand, _STEP, SUMS)
            words = k_buffers[i_step].load(KEYS)
            keys = key_operand(words.to(gl.uint32, bitcast=True), BITS, W, _STEP, BLOCK_D)
            s = matrix_product(keys, operand, gl.full([W, _STEP, N], 0, gl.int32, MMA))
            if BUFFERS == 2:
                _copy_values(True, record, v_buffers, token_buffers, v_places, token_places, i_step, V_STEP)
            else:
                _copy_keys(
                    has_next, next_record, k_buffers, channel_buffers, k_places, channel_places, i_step, K_STEP,
                    STORED // 2,
                )  # fmt: skip
            s = whole_sums(s, W) * factor[:, None, :] + summand
            if HAS_SOFTCAP:
                s = gl.where(is_tile, _cap(s, softcap), float("-inf"))
            if HAS_WINDOW:
                k_pos = (start + s_warp) * _TILE + i_step * _STEP + s_row
                s = gl.where(k_pos > q_pos - window, s, float("-inf"))
            scores += (s,)  # type: ignore[assignment]
        # ---- weights, of all of the tile from its largest on
        await_copies(BUFFERS - 1)
        scale, low = _token_scales(token_words(token_buffers[0]), G, W, C)
        s = _below(scores[0], scores[1], W)  # type: ignore[misc]
        m_tile = gl.maximum(_raised(s, scale, G, W), -1.0e30)
        p = gl.exp2(s - (m_tile - _WEIGHT_EXPONENT)[:, None, :])
        m_new = gl.maximum(m_i, m_tile)
        alpha = gl.exp2(m_i - m_new)[:, None, :]
        beta = gl.exp2(m_tile - m_new)[:, None, :]
        m_i = m_new
        l_i = l_i * alpha + lane_sums(p, SUMS) * beta
        alpha = over_groups(alpha, G, SUMS)
        beta = over_groups(beta, G, SUMS)
        p = over_groups(p, G, SUMS)
        lows = lows * alpha + lane_sums(p * (low + MIDDLE * scale), SUMS) * beta
        # ---- values
        weights = _parts(p, W)
        scales = _parts(scale, W)
        sums = gl.full([G * W, 64, N], 0, gl.int32, MMA)
        for i_step in gl.static_range(2):
            if i_step == 1:
                await_copies(BUFFERS - 1)
            words = v_buffers[i_step].load(VALUES)
            values = value_operand(words.to(gl.uint32, bitcast=True), BITS, W, _STEP, G)
            sums = matrix_product(values, weight_operand(weights[i_step], scales[i_step], BITS, W), sums)
            if BUFFERS == 2:
                _copy_keys(
                    has_next, next_record, k_buffers, channel_buffers, k_places, channel_places, i_step, K_STEP,
                    STORED // 2,
                )  # fmt: skip
            else:
                _copy_values(has_next, next_record, v_buffers, token_buffers, v_places, token_places, i_step, V_STEP)
        acc = acc * alpha + whole_sums(sums, W) * (beta * (1.0 / (1 << (8 - BITS))))
        record = next_record
    await_copies(0)
    lows = gl.convert_layout(gl.sum(lows, 1), gl.SliceLayout(1, SUMS))
    return acc + lows[:, None, :], l_i, m_i - _WEIGHT_EXPONENT
