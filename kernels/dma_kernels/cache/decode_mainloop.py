"""The main loops of the decode kernel: over high tiles, read in 16 bits, and over low tiles, read from page blocks.

Each warp has its own tiles. A lane reads the codes that it copied itself. It reads scales and zero points that other
lanes copied after a barrier, which also frees earlier stages. Scores are ``K Q^T`` and outputs ``V^T P^T``, so keys and
values fill the 16 rows of an MMA instruction, and queries its columns.

Codes are multiplied as 8-bit integers, exactly, by 16-bit integers split into two signed bytes:

    q . k = descale_q sum round(q scale / descale_q) (code - mid) + q . (zero_point + mid scale)
    sum p v = descale_p sum round(p scale / descale_p) (code - mid) + sum p (zero_point + mid scale)

``scale`` is per channel of a tile of keys, or per token and 64 channels of values. ``mid`` is the middle of the codes.
``descale_q`` is per query and tile, ``descale_p`` per query, tile and 64 channels. So the 16 bits count from the
largest number of a sum, and lose less than bfloat16 would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..device.arithmetic import apply_softcap as _apply_softcap_triton
from ..device.gluon import async_load, commit_group, constexpr_function, gl, jit, mma, view, wait_group
from ..device.tiles import TILE, TILE_SHIFT
from .decode_mma import (
    MAX_INT16,
    axis_layout,
    codes_layout,
    combine_bytes,
    key_scales_layout,
    load_key_scales,
    load_value_scales,
    mma_layout,
    operand_layout,
    read_rotated_queries,
    rearrange,
    reduce_lanes,
    repeat_groups,
    repeat_rows,
    scores_layout,
    split_words,
    to_key_operand,
    to_probability_operand,
    to_query_operand,
    to_scale_operand,
    to_second_operand,
    to_value_operand,
    unquantized_keys_layout,
    unquantized_values_layout,
    value_scales_layout,
)

_MAX_INT16 = tl.constexpr(MAX_INT16)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


apply_softcap = jit(_apply_softcap_triton.fn)


@jit
def band_start(q_pos, diagonal_tiles):
    """Return the first tile of each query's band; negative if the band begins before the sequence."""
    return (gl.maximum(q_pos, 0) >> TILE_SHIFT) - diagonal_tiles


@jit
def _step_tokens(W: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the indices of the tokens of a step over high tiles, 16 per warp, ``[W, 16, 1]``."""
    o_w = gl.arange(0, W, layout=axis_layout(LAYOUT, 3, 0))[:, None, None]
    return o_w * 16 + gl.arange(0, 16, layout=axis_layout(LAYOUT, 3, 1))[None, :, None]


@jit
def _load_tokens(pointer, token, channel, strides, first, tokens, CHANNELS: tl.constexpr):
    """Load residual, sink or new tokens with indices in ``first..tokens - 1``; zeros elsewhere."""
    mask = (token >= first) & (token < tokens) & (channel < CHANNELS)
    offset = token.to(gl.int64) * strides[0] + channel.to(gl.int64) * strides[1]
    return gl.load(pointer + offset, mask=mask, other=0.0)


@jit
def attend_high(
    q, key, key_base, value, value_base, cache, row, i_kv, work, first, last, stored, q_pos, sizes, softcap,
    logit_scale, CONFIG: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Attend to steps ``first..last - 1`` of the high tiles, 16 keys per warp: sinks first, then the band.

    With ``HAS_NEW`` the last step, ``work.high_steps - 1``, reads the new keys, which start at position ``stored``.

    Returns:
        The unnormalized output ``[G * W, 64, 8]``, channel ``8 g + i`` of 64 at row ``8 i + g``; partial row sums per
        lane ``[W, 8, 8]``; and row maxima ``[W, 8]``.
    """
    D: tl.constexpr = CONFIG.D
    DV: tl.constexpr = CONFIG.DV
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    G: tl.constexpr = CONFIG.GROUPS
    W: tl.constexpr = CONFIG.W
    MMA: tl.constexpr = mma_layout(W)
    KEYS: tl.constexpr = unquantized_keys_layout(W, BLOCK_D)
    VALUES: tl.constexpr = unquantized_values_layout(W, 64 * G)
    STEPS: tl.constexpr = TILE // (16 * W)
    k_token = _step_tokens(W, KEYS)
    v_token = _step_tokens(W, VALUES)
    token = _step_tokens(W, MMA)
    o_d = gl.arange(0, BLOCK_D, layout=axis_layout(KEYS, 3, 2))[None, None, :]
    o_v = gl.arange(0, 64 * G, layout=axis_layout(VALUES, 3, 2))[None, None, :]
    m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
    l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
    acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
    zero = gl.full([W, 16, 8], 0.0, gl.float32, MMA)
    residual = i_kv * sizes.residual_tiles * TILE
    sink = i_kv * sizes.sink_tiles * TILE
    key_residual = cache.key.residual + (row * cache.key.stride_residual + residual * D)
    value_residual = cache.value.residual + (row * cache.value.stride_residual + residual * DV)
    key_sink = cache.key.sink + (row * cache.key.stride_sink + sink * D)
    value_sink = cache.value.sink + (row * cache.value.stride_sink + sink * DV)
    q_band = band_start(q_pos, sizes.diagonal_tiles) * TILE
    for step in range(first, last):
        index = step // STEPS
        inside = (step - index * STEPS) * (16 * W)
        tile = gl.where(index < work.sinks, work.visible_tile + index, work.band_tile + index - work.sinks)
        slot = (tile % sizes.residual_tiles) * TILE + inside
        here = tile * TILE + inside
        end = stored
        k_base = key_residual + slot * D
        v_base = value_residual + slot * DV
        if tile < sizes.sink_tiles:
            k_base = key_sink + here * D
            v_base = value_sink + here * DV
        k_strides = D, 1
        v_strides = DV, 1
        if HAS_NEW:
            is_new = step == work.high_steps - 1
            here = gl.where(is_new, stored, here)
            end = gl.where(is_new, stored + sizes.q_len, stored)
            k_base = gl.where(is_new, key_base, k_base)
            v_base = gl.where(is_new, value_base, v_base)
            k_strides = gl.where(is_new, key.stride_t, D), gl.where(is_new, key.stride_d, 1)
            v_strides = gl.where(is_new, value.stride_t, DV), gl.where(is_new, value.stride_d, 1)
        k = _load_tokens(k_base, k_token, o_d, k_strides, -here, end - here, D)
        v = _load_tokens(v_base, v_token, o_v, v_strides, -here, end - here, DV)
        k = rearrange(k, "WNKtje -> W N Kjte", [W, 16, BLOCK_D // 32])
        k = gl.convert_layout(k, operand_layout(W, 0), assert_trivial=True)
        s = mma(k, q, zero) * logit_scale
        if CONFIG.HAS_SOFTCAP:
            s = apply_softcap(s, softcap)
        k_pos = here + token
        visible = (k_pos <= q_pos) & (k_pos >= 0) & (k_pos < end)
        visible = visible & ((k_pos >= q_band) | (k_pos < sizes.sink_tiles * TILE))
        if CONFIG.HAS_WINDOW:
            visible = visible & (k_pos > q_pos - sizes.window)
        s = gl.where(visible, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None, :])
        alpha = gl.exp2(m_i - m_new)[:, None, :]
        m_i = m_new
        l_i = l_i * alpha + reduce_lanes(p, MMA)
        p = to_second_operand(repeat_groups(p.to(q.dtype), G, MMA), W)
        v = rearrange(v, "WNGgI -> GW Ig N", [W, 16, G, 8])
        v = gl.convert_layout(v, operand_layout(W, 0), assert_trivial=True)
        acc = mma(v, p, acc * repeat_groups(alpha, G, MMA))
    return acc, l_i, m_i


@jit
def _page_blocks(pages, page_table, tile, cache, sizes):
    """Return pointers to the page blocks of tiles; ``pages`` points to the kv head's block of page 0."""
    return pages + gl.load(page_table + tile % sizes.max_pages).to(gl.int64) * cache.stride_page


@jit
def _quantize_queries(scale_words, zero_point_words, q, logit_scale, BITS: tl.constexpr):
    """Quantize queries for one tile of keys per warp. Rotated ones are in shared memory.

    One bf16 MMA multiplies the queries by the scales in 8 of its rows, and by the zero points in the others. fp16 lacks
    the range for scales, and bf16 the precision for fp16 and rotated queries. Those are split into two bf16 terms,
    which is exact for fp16.

    Returns:
        The queries as an operand of bytes, and the descale and offset of the scores, ``[W, C]`` each.
    """
    W: tl.constexpr = scale_words.shape[0]
    BLOCK_D: tl.constexpr = 32 * scale_words.shape[1]
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = scores_layout(W)
    N: tl.constexpr = q.shape[-1]
    zero = gl.full([W, 16, N], 0.0, gl.float32, MMA)
    scale = split_words(scale_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    scale = gl.reshape(scale, [W, BLOCK_D // 32, 8, 4, 4, 2])
    zero_point = split_words(zero_point_words.to(gl.uint32, bitcast=True), gl.bfloat16)
    zero_point = gl.reshape(zero_point, [W, BLOCK_D // 32, 8, 4, 4, 2])
    if len(q.shape) == 2:
        q = read_rotated_queries(q, W)
    coefficients = to_scale_operand(scale, zero_point)
    if q.dtype == gl.bfloat16:
        offset = mma(coefficients, q, zero)
    else:
        upper = q.to(gl.bfloat16)
        rest = (q.to(gl.float32) - upper.to(gl.float32)).to(gl.bfloat16)
        offset = mma(coefficients, rest, mma(coefficients, upper, zero))
    offset, _ = gl.split(gl.reshape(offset, [W, 16, N // 2, 2]))
    row = gl.arange(0, 16, layout=axis_layout(SUMS, 3, 1))[None, :, None]
    multiplier = gl.where(row < 8, logit_scale * (1 << (BITS - 1)), logit_scale)
    offset = reduce_lanes(gl.convert_layout(offset, SUMS, assert_trivial=True) * multiplier, SUMS)
    scale = rearrange(scale, "WKgtje -> W Kjte g", [W, BLOCK_D // 32])
    if N == 16:
        scale = gl.reshape(gl.permute(gl.join(scale, scale), [0, 1, 3, 2]), [W, BLOCK_D, 16])
    scale = gl.convert_layout(scale, operand_layout(W, 1), assert_trivial=True)
    scaled = q.to(gl.float32) * scale.to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(scaled), 1), _SMALLEST_SCALE)
    operand = to_query_operand(scaled, 1.0 / largest * _MAX_INT16, BITS)
    descale = gl.convert_layout(largest, gl.SliceLayout(1, MMA))
    descale, _ = gl.split(gl.reshape(descale, [W, N // 2, 2]))
    descale = gl.convert_layout(descale, gl.SliceLayout(1, SUMS), assert_trivial=True) * (
        logit_scale / (_MAX_INT16 * (1 << (8 - BITS)))
    )
    return operand, descale, offset


@jit
def _value_scales(words, C: tl.constexpr):
    """Unpack words into scales and zero points of values, fp32 ``[G * W, 128, C]``."""
    G: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    words = words.to(gl.uint32, bitcast=True)
    words = rearrange(words, "GWNgiC -> GW Nig C", [G, W, TILE // 32, 4])
    if C == 8:
        words = gl.reshape(gl.permute(gl.join(words, words), [0, 1, 3, 2]), [G * W, TILE, 8])
    words = gl.convert_layout(words, scores_layout(W), assert_trivial=True)
    return (words << 16).to(gl.float32, bitcast=True), (words & 0xFFFF0000).to(gl.float32, bitcast=True)


@constexpr_function
def _shared_layout(rank):
    """Layout of a buffer in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@jit
def _buffers(count: tl.constexpr, shape: tl.constexpr):
    """Return ``count`` shared memory buffers of words. Separate allocations, so that the compiler sees no aliasing."""
    found = ()
    for _ in gl.static_range(count):
        found += (gl.allocate_shared_memory(gl.int32, shape, _shared_layout(len(shape))),)  # type: ignore[assignment]
    return found


@jit
def _view_buffers(buffers, shape: tl.constexpr):
    """Return views of buffers with another shape."""
    LAYOUT: tl.constexpr = _shared_layout(len(shape))
    views = ()
    for i in gl.static_range(len(buffers)):
        views += (view(buffers[i], gl.int32, shape, LAYOUT),)  # type: ignore[assignment]
    return views


class AsyncCopies(NamedTuple):
    """Copies of keys, or of values, from page blocks to shared memory."""

    codes: Any  # buffers, used by one step after the other
    scales: Any  # buffers of scales and zero points: two of keys, one of values
    code_offsets: Any  # words from the start of a page block, in the first step
    scale_offsets: Any
    step_words: Any  # words of the codes of a step
    scale_words: Any  # words between the scales of keys and their zero points


@jit
def _along_warps(block, KEYS_LAYOUT: tl.constexpr, VALUES_LAYOUT: tl.constexpr, ARE_KEYS: tl.constexpr):
    """Expand pointers to page blocks, one per warp, to the dimensions of keys or of values."""
    if ARE_KEYS:
        expanded = gl.convert_layout(block, axis_layout(KEYS_LAYOUT, 3, 0))[:, None, None]
    else:
        expanded = gl.convert_layout(block, axis_layout(VALUES_LAYOUT, 4, 1))[None, :, None, None]
    return expanded


@jit
def _load_async(has_tile, block, copies, i_step: tl.constexpr):
    """Copy one step of a tile's codes asynchronously, with the first step also scales and zero points."""
    W: tl.constexpr = block.shape[0]
    ARE_KEYS: tl.constexpr = len(copies.scales) == 2
    if has_tile:
        if i_step == 0:
            scales = _along_warps(block, key_scales_layout(W), value_scales_layout(W), ARE_KEYS) + copies.scale_offsets
            for i in gl.static_range(len(copies.scales)):
                async_load(copies.scales[i], scales + i * copies.scale_words)
        blocks = _along_warps(block, codes_layout(W, 3), codes_layout(W, 4), ARE_KEYS)
        codes = copies.codes[i_step % len(copies.codes)]
        async_load(codes, blocks + (copies.code_offsets + i_step * copies.step_words))
    commit_group()


@jit
def _concat_steps(x, W: tl.constexpr):
    """Concatenate the rows of two or four tensors."""
    if len(x) == 2:
        whole = _concat_rows(x[0], x[1], W)
    else:
        whole = _concat_rows(_concat_rows(x[0], x[1], W), _concat_rows(x[2], x[3], W), W)
    return whole


@jit
def _split_steps(x, STEPS: tl.constexpr, W: tl.constexpr):
    """Split rows into two or four tensors."""
    first, last = _split_rows(x, W)
    return (first, last) if STEPS == 2 else _split_rows(first, W) + _split_rows(last, W)


@jit
def _load_ahead(i_load: tl.constexpr, block, has_next, next_block, keys, values, STEPS: tl.constexpr):
    """Start a load: those of a tile's ``STEPS`` steps of keys, then of values, then those of the next tile."""
    copies = keys if i_load // STEPS % 2 == 0 else values
    if i_load < 2 * STEPS:
        _load_async(True, block, copies, i_load % STEPS)
    else:
        _load_async(has_next, next_block, copies, i_load % STEPS)


@jit
def _concat_rows(x, y, W: tl.constexpr):
    """Concatenate two tensors with equally many rows."""
    x = gl.permute(gl.join(x, y), [0, 3, 1, 2])
    x = gl.reshape(x, [x.shape[0], 2 * x.shape[2], x.shape[3]])
    return gl.convert_layout(x, scores_layout(W), assert_trivial=True)


@jit
def _split_rows(x, W: tl.constexpr):
    """Return the upper and the lower half of the rows."""
    x = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
    x, y = gl.split(gl.permute(x, [0, 2, 3, 1]))
    LAYOUT: tl.constexpr = scores_layout(W)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True), gl.convert_layout(y, LAYOUT, assert_trivial=True)


@jit
def attend_low(q, cache, page_table, i_kv, first, last, q_pos, sizes, softcap, logit_scale, CONFIG: tl.constexpr):
    """Attend with ``C`` queries at ``q_pos`` to the low tiles ``first..last - 1``, one tile per warp.

    ``q`` is ``[W, D, 2 C]``, each query in two columns; in shared memory, ``[D, 2 C]``, if keys are rotated.
    ``page_table`` is that of the row; ``softcap`` and ``logit_scale`` are in base 2.

    Returns:
        As :func:`attend_high`, for ``C`` queries, with channels in order.
    """
    DV: tl.constexpr = CONFIG.DV
    BLOCK_D: tl.constexpr = CONFIG.BLOCK_D
    G: tl.constexpr = CONFIG.GROUPS
    W: tl.constexpr = CONFIG.W
    BITS: tl.constexpr = CONFIG.LAYOUT.format.bits
    STAGES: tl.constexpr = CONFIG.STAGES
    STEPS: tl.constexpr = CONFIG.STEPS
    STEP: tl.constexpr = TILE // STEPS
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = scores_layout(W)
    KEYS: tl.constexpr = codes_layout(W, 3)
    VALUES: tl.constexpr = codes_layout(W, 4)
    CO: tl.constexpr = 128 // BITS  # columns of a block of codes
    MIDDLE: tl.constexpr = float(1 << (BITS - 1))
    N: tl.constexpr = q.shape[-1]
    C: tl.constexpr = N // 2
    # ---- sizes and offsets in a page block, in words
    STORED: tl.constexpr = (CONFIG.D + 31) // 32 * 32
    VALUE_STORED: tl.constexpr = (DV + 31) // 32 * 32
    GROUPS: tl.constexpr = (DV + 63) // 64
    KEY_SCALES: tl.constexpr = TILE * STORED * BITS // 32
    VALUE_CODES: tl.constexpr = CONFIG.KEY_WORDS
    VALUE_SCALES: tl.constexpr = VALUE_CODES + TILE * VALUE_STORED * BITS // 32
    pages = cache.kv_pages + i_kv * CONFIG.PAGE_WORDS
    # Padded channels are read from the last stored block: their queries are 0 and their outputs are not stored.
    o_k = gl.arange(0, 128, layout=axis_layout(KEYS, 3, 2))[None, None, :]
    i_r = gl.arange(0, STEP * BLOCK_D // (32 * CO), layout=axis_layout(KEYS, 3, 1))[None, :, None]
    k_offsets = (
        i_r // (BLOCK_D // CO) * (STORED // CO) + gl.minimum(i_r % (BLOCK_D // CO), STORED // CO - 1)
    ) * 128 + o_k
    CHANNELS: tl.constexpr = key_scales_layout(W)
    i_r = gl.arange(0, BLOCK_D // 32, layout=axis_layout(CHANNELS, 3, 1))[None, :, None]
    o_w = gl.arange(0, 16, layout=axis_layout(CHANNELS, 3, 2))[None, None, :]
    scale_offsets = KEY_SCALES + gl.minimum(i_r, STORED // 32 - 1) * 16 + o_w
    o_v = gl.arange(0, 128, layout=axis_layout(VALUES, 4, 3))[None, None, None, :]
    i_g = gl.arange(0, G, layout=axis_layout(VALUES, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, 2 * STEP // CO, layout=axis_layout(VALUES, 4, 2))[None, None, :, None]
    v_offsets = i_r // 2 * (VALUE_STORED // 32) + gl.minimum(2 * i_g + i_r % 2, VALUE_STORED // 32 - 1)
    v_offsets = VALUE_CODES + v_offsets * 128 + o_v
    TOKENS: tl.constexpr = value_scales_layout(W)
    i_g = gl.arange(0, G, layout=axis_layout(TOKENS, 4, 0))[:, None, None, None]
    i_r = gl.arange(0, TILE // 32, layout=axis_layout(TOKENS, 4, 2))[None, None, :, None]
    o_w = gl.arange(0, 32, layout=axis_layout(TOKENS, 4, 3))[None, None, None, :]
    pair_offsets = VALUE_SCALES + (i_r * GROUPS + gl.minimum(i_g, GROUPS - 1)) * 32 + o_w
    m_i = gl.full([W, C], -1.0e30, gl.float32, gl.SliceLayout(1, SUMS))
    l_i = gl.full([W, 8, C], 0.0, gl.float32, SUMS)
    offsets = gl.full([G * W, 8, C], 0.0, gl.float32, SUMS)
    acc = gl.full([G * W, 64, C], 0.0, gl.float32, SUMS)
    o_w = gl.arange(0, W, layout=axis_layout(KEYS, 3, 0))
    s_warp = gl.arange(0, W, layout=axis_layout(SUMS, 3, 0))[:, None, None]
    s_row = gl.arange(0, STEP, layout=axis_layout(SUMS, 3, 1))[None, :, None]
    q_end = gl.minimum(band_start(q_pos, sizes.diagonal_tiles), last)  # end of each query's low tiles

    # ---- async copies: keys, then values, in steps. A stage is reused ``STAGES`` steps later, by the next tile or, if
    # there are fewer stages than steps, alternately for keys and values.
    if STAGES == 2 * STEPS:
        k_buffers = _buffers(STEPS, [W, STEP * BLOCK_D // (32 * CO), 128])
        v_buffers = _buffers(STEPS, [G, W, 2 * STEP // CO, 128])
    else:
        k_buffers = _buffers(STAGES, [W, STEP * BLOCK_D // (32 * CO), 128])
        v_buffers = _view_buffers(k_buffers, [G, W, 2 * STEP // CO, 128])
    scale_buffers = _buffers(2, [W, BLOCK_D // 32, 16])
    pair_buffers = _buffers(1, [G, W, TILE // 32, 32])
    key_copies = AsyncCopies(
        k_buffers, scale_buffers, k_offsets, scale_offsets, STEP * STORED * BITS // 32, STORED // 2
    )
    value_copies = AsyncCopies(v_buffers, pair_buffers, v_offsets, pair_offsets, STEP * VALUE_STORED * BITS // 32, 0)
    block = _page_blocks(pages, page_table, gl.minimum(first + o_w, last - 1), cache, sizes)
    for i_load in gl.static_range(STAGES):
        _load_ahead(i_load, block, True, block, key_copies, value_copies, STEPS)
    for start in range(first, last, W):
        has_next = start + W < last
        next_tile = gl.minimum(start + W + o_w, last - 1)
        next_block = _page_blocks(pages, page_table, next_tile, cache, sizes)
        is_tile = start + s_warp < q_end
        # ---- scores
        scores = ()
        for i_step in gl.static_range(STEPS):
            wait_group(STAGES - 1)
            if i_step == 0:
                operand, descale, offset = _quantize_queries(
                    load_key_scales(scale_buffers[0]), load_key_scales(scale_buffers[1]), q, logit_scale, BITS
                )
                if not CONFIG.HAS_SOFTCAP:
                    offset = gl.where(is_tile, offset, float("-inf"))
                offset = repeat_rows(offset, STEP, SUMS)
            words = k_buffers[i_step % len(k_buffers)].load(KEYS)
            keys = to_key_operand(words.to(gl.uint32, bitcast=True), BITS, STEP, BLOCK_D)
            s = mma(keys, operand, gl.full([W, STEP, N], 0, gl.int32, MMA))
            _load_ahead(i_step + STAGES, block, has_next, next_block, key_copies, value_copies, STEPS)
            s = combine_bytes(s, W) * descale[:, None, :] + offset
            if CONFIG.HAS_SOFTCAP:
                s = gl.where(is_tile, apply_softcap(s, softcap), float("-inf"))
            if CONFIG.HAS_WINDOW:
                k_pos = (start + s_warp) * TILE + i_step * STEP + s_row
                s = gl.where(k_pos > q_pos - sizes.window, s, float("-inf"))
            scores += (s,)  # type: ignore[assignment]
        # ---- probabilities, relative to the maximum of the tile
        wait_group(STAGES - 1)
        scale, zero_point = _value_scales(load_value_scales(pair_buffers[0]), C)
        s = _concat_steps(scores, W)
        m_tile = gl.maximum(gl.max(s, 1), -1.0e30)
        p = gl.exp2(s - m_tile[:, None, :])
        m_new = gl.maximum(m_i, m_tile)
        alpha = gl.exp2(m_i - m_new)[:, None, :]
        beta = gl.exp2(m_tile - m_new)[:, None, :]
        m_i = m_new
        l_i = l_i * alpha + reduce_lanes(p, SUMS) * beta
        alpha = repeat_groups(alpha, G, SUMS)
        beta = repeat_groups(beta, G, SUMS)
        p = repeat_groups(p, G, SUMS)
        offsets = offsets * alpha + reduce_lanes(p * (zero_point + MIDDLE * scale), SUMS) * beta
        scaled = p * scale
        largest = gl.maximum(gl.max(scaled, 1), _SMALLEST_SCALE)[:, None, :]
        # ---- values
        rescale = _MAX_INT16 / largest
        steps = _split_steps(scaled, STEPS, W)
        sums = gl.full([G * W, 64, N], 0, gl.int32, MMA)
        for i_step in gl.static_range(STEPS):
            if i_step > 0:
                wait_group(STAGES - 1)
            words = v_buffers[i_step % len(v_buffers)].load(VALUES)
            values = to_value_operand(words.to(gl.uint32, bitcast=True), BITS, STEP)
            sums = mma(values, to_probability_operand(steps[i_step], rescale, BITS, W), sums)
            _load_ahead(STEPS + i_step + STAGES, block, has_next, next_block, key_copies, value_copies, STEPS)
        acc = acc * alpha + combine_bytes(sums, W) * (beta * largest * (1.0 / (_MAX_INT16 * (1 << (8 - BITS)))))
        block = next_block
    wait_group(0)
    offsets = gl.convert_layout(gl.sum(offsets, 1), gl.SliceLayout(1, SUMS))
    return acc + offsets[:, None, :], l_i, m_i
