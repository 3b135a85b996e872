"""The kernel of a decode step: queries of 16 bits against the tiles of a cache, codes and raw ones, in one launch.

A head's work is counted in units: steps over its high tiles, read in 16 bits from the sinks and the tail, then rounds
over its low tiles, read from their records. The units of all heads of all rows lie in one line, which the programs
share evenly, however long each row is; so a program may end one head and begin another. For each head that it touches
it leaves a normalised output and the logarithm of its denominator; the program that is done last with a head combines
them.
"""

from __future__ import annotations

import triton.language as tl

from ..device.gluon import barrier, constexpr_function, gl, jit
from ..numerics.formats import TILE
from .decode_operands import along, load_queries, mma_layout, over_groups
from .decode_tiles import WEIGHT_EXPONENT, attend_high, attend_low

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_ROWS = tl.constexpr(32)
"""Rows of the batch that are looked at together."""
PLACES = tl.constexpr(4)
"""Partial results that a program has room for: of high and of low tiles, of the head it begins with and of another."""


@jit
def _work(
    length, q_len, window, diagonal_tiles, sink_tiles, COST: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Return what a head has to read: its first position, first visible tile, first tile of the band, sinks, units of
    high tiles, first low tile, the one past the last, and units altogether, at least 1.
    """
    first_pos = length - q_len
    visible_tile = first_pos * 0
    if HAS_WINDOW:
        visible_tile = gl.maximum(first_pos - window + 1, 0) >> _TILE_SHIFT
    last_tile = (length - 1) >> _TILE_SHIFT
    band_first = gl.maximum((gl.maximum(first_pos, 0) >> _TILE_SHIFT) - diagonal_tiles, visible_tile)
    sinks = gl.maximum(gl.minimum(sink_tiles, band_first) - visible_tile, 0)
    steps = (sinks + gl.maximum(last_tile + 1 - band_first, 0)) * (_TILE // (16 * W))
    low_first = gl.maximum(visible_tile, sink_tiles)
    low_end = gl.maximum(band_first, low_first)
    units = gl.maximum(steps + (low_end - low_first + W - 1) // W * COST, 1)
    return first_pos, visible_tile, band_first, sinks, steps, low_first, low_end, units


@jit
def _rounds(unit, steps, COST: tl.constexpr):
    """Return how many rounds begin before a unit of a head."""
    return (gl.maximum(unit - steps, 0) + COST - 1) // COST


@constexpr_function
def _table_layout(warps):
    """Layout of numbers for pairs of rows, ``[_ROWS, _ROWS]``."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@jit
def _row_units(
    lengths_ptr, first_row, batch, new_len, q_len, window, diagonal_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, COST: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the units of ``_ROWS`` rows from one on; those past the last have none."""
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _table_layout(W)))
    length = gl.load(lengths_ptr + row, mask=row < batch, other=0) + new_len
    units = _work(length, q_len, window, diagonal_tiles, sink_tiles, COST, W, HAS_WINDOW)[7]
    return gl.where(row < batch, units * KV_HEADS, 0)


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
    partial_ptr, partial_lse_ptr, acc, l_i, m_i, entry,
    DV: tl.constexpr, G: tl.constexpr, W: tl.constexpr, IS_HIGH: tl.constexpr,
):  # fmt: skip
    """Put the warps of a program together; store its output ``[entries, 8, Dv]`` and base-2 logarithm."""
    MMA: tl.constexpr = mma_layout(W)
    OUT: tl.constexpr = _outputs(W)
    COLUMN: tl.constexpr = along(OUT, 3, 2)
    m_all = gl.max(m_i, 0)
    weight = gl.exp2(m_i - gl.convert_layout(m_all, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, :])
    total = gl.sum(l_i, 1)
    total = gl.sum(gl.convert_layout(total, gl.SliceLayout(1, MMA)) * weight, 0)
    total = gl.convert_layout(total, COLUMN)
    acc = acc * over_groups(weight[:, None, :], G, W)
    acc = gl.convert_layout(gl.sum(gl.reshape(acc, [G, W, 64, 8]), 1), OUT)
    is_empty = total == 0.0
    acc = acc / gl.where(is_empty, 1.0, total)[None, None, :]
    lse = gl.convert_layout(m_all, COLUMN) + gl.log2(gl.where(is_empty, 1.0, total))
    if not IS_HIGH:
        lse -= WEIGHT_EXPONENT
    lse = gl.where(is_empty, float("-inf"), lse)
    column = gl.arange(0, 8, layout=COLUMN)
    place = entry * 8 + column
    channel = gl.arange(0, 64, layout=along(OUT, 3, 1))[None, :, None]
    if IS_HIGH:
        channel = channel % 8 * 8 + channel // 8
    channel += gl.arange(0, G, layout=along(OUT, 3, 0))[:, None, None] * 64
    gl.store(
        partial_ptr + (place[None, None, :] * DV + channel), acc, mask=(place[None, None, :] >= 0) & (channel < DV)
    )
    gl.store(partial_lse_ptr + place, lse)


@jit
def _combine(
    partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_b, i_kv, head_start, units, share, steps,
    has_low, blocks, q_len, stride_ob, stride_oh, stride_ot,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, W: tl.constexpr, HAS_SINKS: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of a head, ``BLOCK_C`` queries at a time; sink logits take part here."""
    LAYOUT: tl.constexpr = _partials(W, BLOCK_DV)
    COLUMN: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    SPLIT: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    o_v = gl.arange(0, BLOCK_DV, layout=along(LAYOUT, 3, 2))[None, None, :]
    o_s = gl.arange(0, BLOCK_S, layout=SPLIT)
    # Programs that have read high tiles of the head, then those that have read low ones: all that have units of them,
    # but that in the last one's share no round may begin.
    program = head_start // share
    high = gl.where(steps > 0, (head_start + steps - 1) // share - program + 1, 0)
    low_program = (head_start + steps) // share
    last_program = (head_start + units - 1) // share
    is_last_empty = _rounds(last_program * share - head_start, steps, COST) == _rounds(units, steps, COST)
    used = high + gl.where(has_low, last_program - low_program + gl.where(is_last_empty, 0, 1), 0)
    first_place = gl.where(program * share < head_start, 2, 0)
    columns = GROUP * q_len
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
        for i_s in range(0, used, BLOCK_S):
            place = i_s + o_s
            entry = place * PLACES + gl.where(place < high, program * PLACES, (low_program - high) * PLACES + 1)
            is_first = (place == 0) | ((place == high) & (low_program == program))
            entry += gl.where(is_first, first_place, 0)
            entry = entry[None, :] * (blocks * 8) + column[:, None]
            m_s = m_c[:, None] & (place < used)[None, :]
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
        "batch", "q_len", "new_len", "slots", "ring_tiles", "window", "diagonal_tiles", "sink_tiles",
        "even", "odd",
    ]
)  # fmt: skip
def decode_kernel(
    q_ptr, body_ptr, pages_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr, sinks_ptr, lengths_ptr,
    raw_rows_ptr, arrivals_ptr, partial_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_ob, stride_oh, stride_ot,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    batch, q_len, new_len, slots, ring_tiles, window, softcap, logit_scale, diagonal_tiles, sink_tiles, even, odd,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    """Answer the queries of all rows; any number of programs.

    The last ``new_len`` keys are stored, but not counted in ``lengths`` yet; afterwards they are. ``even`` and ``odd``
    are the constants that codes are combined with: as arguments they are in registers, where one instruction takes a
    second mask; as literals they would take one more.
    """
    G: tl.constexpr = BLOCK_DV // 64
    blocks = (GROUP * q_len + 7) // 8
    i_program = gl.program_id(0)
    # ---- the line of all units, and the program's share
    total = 0
    for first_row in range(0, batch, _ROWS):
        row_units = _row_units(
            lengths_ptr, first_row, batch, new_len, q_len, window, diagonal_tiles, sink_tiles,
            KV_HEADS, COST, W, HAS_WINDOW,
        )  # fmt: skip
        total += gl.sum(row_units, 0)
    share = gl.maximum((total + gl.num_programs(0) - 1) // gl.num_programs(0), COST)
    start = i_program * share
    end = gl.minimum(start + share, total)
    at = start
    seen_rows = 0
    seen_units = 0
    while at < end:
        # ---- a head, or what of it is in the share
        row_units = _row_units(
            lengths_ptr, seen_rows, batch, new_len, q_len, window, diagonal_tiles, sink_tiles,
            KV_HEADS, COST, W, HAS_WINDOW,
        )  # fmt: skip
        while seen_units + gl.sum(row_units, 0) <= at:
            seen_units += gl.sum(row_units, 0)
            seen_rows += _ROWS
            row_units = _row_units(
                lengths_ptr, seen_rows, batch, new_len, q_len, window, diagonal_tiles, sink_tiles,
                KV_HEADS, COST, W, HAS_WINDOW,
            )  # fmt: skip
        o_r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _table_layout(W)))
        o_c = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _table_layout(W)))
        row_ends = seen_units + gl.sum(gl.where(o_c[None, :] <= o_r[:, None], row_units[None, :], 0), 1)
        ended = gl.sum((row_ends <= at).to(gl.int32), 0)
        row_start = seen_units + gl.sum(gl.where(o_c < ended, row_units, 0), 0)
        row = seen_rows + ended
        i_b = row.to(gl.int64)
        length = gl.load(lengths_ptr + i_b) + new_len
        first_pos, visible_tile, band_first, sinks, steps, low_first, low_end, units = _work(
            length, q_len, window, diagonal_tiles, sink_tiles, COST, W, HAS_WINDOW
        )
        i_head = (at - row_start) // units
        head_start = row_start + i_head * units
        i_kv = i_head.to(gl.int64)
        first = at - head_start
        last = gl.minimum(end - head_start, units)
        first_tile = low_first + _rounds(first, steps, COST) * W
        end_tile = gl.minimum(low_first + _rounds(last, steps, COST) * W, low_end)
        entry = i_program * PLACES + gl.where(at > start, 2, 0)
        raw_row = i_b
        if raw_rows_ptr is not None:
            raw_row = gl.load(raw_rows_ptr + i_b).to(gl.int64)
        ring = i_kv * ring_tiles * _TILE
        sink = i_kv * sink_tiles * _TILE
        for i_block in range(blocks):
            column = i_block * 8 + gl.arange(0, 8, layout=along(mma_layout(W), 3, 2))
            q_pos = (first_pos + column // GROUP)[None, None, :]
            if first < steps:
                q = load_queries(
                    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                    GROUP, D, BLOCK_D, W, True,
                )  # fmt: skip
                acc, l_i, m_i = attend_high(
                    q, key_tail_ptr + (raw_row * stride_key_tail + ring * D),
                    value_tail_ptr + (raw_row * stride_value_tail + ring * DV),
                    key_sink_ptr + (raw_row * stride_key_sink + sink * D),
                    value_sink_ptr + (raw_row * stride_value_sink + sink * DV),
                    first, gl.minimum(last, steps), length, q_pos, sinks, band_first, visible_tile, window,
                    softcap, logit_scale, sink_tiles, ring_tiles,
                    D, DV, BLOCK_D, G, W, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
                _store_partial(partial_ptr, partial_lse_ptr, acc, l_i, m_i, entry * blocks + i_block, DV, G, W, True)
            if first_tile < end_tile:
                q = load_queries(
                    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                    GROUP, D, BLOCK_D, W, False,
                )  # fmt: skip
                acc, l_i, m_i = attend_low(
                    q, body_ptr, pages_ptr + i_b * slots, i_kv, first_tile, end_tile, q_pos, window, softcap,
                    logit_scale, slots, stride_page,
                    (even.to(gl.uint32, bitcast=True), odd.to(gl.uint32, bitcast=True)),
                    D, DV, BLOCK_D, G, W, BITS, STEP, STAGES, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
                _store_partial(
                    partial_ptr, partial_lse_ptr, acc, l_i, m_i, (entry + 1) * blocks + i_block, DV, G, W, False
                )
        # ---- whoever reads the last units of a kv head combines its parts
        barrier()
        arrived = arrivals_ptr + (i_b * (KV_HEADS + 1) + i_kv)
        if gl.atomic_add(arrived, last - first, sem="acq_rel") + last - first == units:
            gl.store(arrived, 0)
            _combine(
                partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr, i_b, i_kv, head_start, units, share, steps,
                low_end > low_first, blocks, q_len, stride_ob, stride_oh, stride_ot,
                KV_HEADS, GROUP, DV, BLOCK_DV, BLOCK_C, BLOCK_S, W, HAS_SINKS, COST,
            )  # fmt: skip
        barrier()
        at = head_start + last
    # ---- the last program: all have read the lengths
    if new_len > 0:
        barrier()
        if gl.atomic_add(arrivals_ptr + KV_HEADS, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            gl.store(arrivals_ptr + KV_HEADS, 0)
            for first_row in range(0, batch, _ROWS):
                row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _table_layout(W)))
                length = gl.load(lengths_ptr + row, mask=row < batch, other=0)
                gl.store(lengths_ptr + row, length + new_len, mask=row < batch)
