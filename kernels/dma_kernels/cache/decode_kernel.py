"""The kernel of a decode step: queries of 16 bits against the tiles of a cache, codes and raw ones, in one launch.

A head's work is counted in units: steps over its high tiles, read in 16 bits from the sinks and the tail, and one over
the new keys, read where the model made them; then rounds over its low tiles, read from their records. The units of all
heads of all rows lie in one line, which the programs share evenly, however long each row is; so a program may end one
head and begin another. For each head that it touches it leaves a normalised output, with the sum over rotated values
rotated back, and the logarithm of its denominator; the program that begins a head also says where its parts are. The
launch after this one (:mod:`.decode_end`) combines them and stores the new keys.
"""

from __future__ import annotations

import triton.language as tl

from ..device.gluon import barrier, constexpr_function, gl, jit
from ..numerics.formats import TILE
from .decode_operands import (
    along,
    inverse_hadamard,
    load_queries,
    load_rotated_queries,
    mma_layout,
    sums_layout,
)
from .decode_tiles import attend_high, attend_low

_TILE = tl.constexpr(TILE)
_TILE_SHIFT = tl.constexpr(TILE.bit_length() - 1)
_ROUND = tl.constexpr(2)
"""A coded tile for each warp, counted in steps over raw ones, of 16 keys for each warp. Codes of 8 bits have 4.2 times
as many bytes, but raw tiles are read without stages (an H200, Triton 3.6; 64 x 4K: 159 us, with 4 instead 163)."""
_ROWS = tl.constexpr(32)
"""Rows of the batch that are looked at together."""


@jit
def _work(
    stored, q_len, window, diagonal_tiles, sink_tiles, W: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_NEW: tl.constexpr
):
    """Return what a head has to read: its first position, first visible tile, first tile of the band, sinks, units of
    high tiles and new keys, first low tile, the one past the last, and units altogether, at least 1.

    Tiles that some queries read raw and others from codes are counted among both kinds.
    """
    first_pos = stored if HAS_NEW else stored - q_len
    visible_tile = first_pos * 0
    if HAS_WINDOW:
        visible_tile = gl.maximum(first_pos - window + 1, 0) >> _TILE_SHIFT
    last_tile = (stored - 1) >> _TILE_SHIFT
    band_first = gl.maximum((gl.maximum(first_pos, 0) >> _TILE_SHIFT) - diagonal_tiles, visible_tile)
    sinks = gl.maximum(gl.minimum(sink_tiles, band_first) - visible_tile, 0)
    steps = (sinks + gl.maximum(last_tile + 1 - band_first, 0)) * (_TILE // (16 * W)) + (1 if HAS_NEW else 0)
    low_first = gl.maximum(visible_tile, sink_tiles)
    last_band = (gl.maximum(first_pos + q_len - 1, 0) >> _TILE_SHIFT) - diagonal_tiles
    low_end = gl.maximum(last_band, low_first)
    units = gl.maximum(steps + (low_end - low_first + W - 1) // W * _ROUND, 1)
    return first_pos, visible_tile, band_first, sinks, steps, low_first, low_end, units


@jit
def _rounds(unit, steps):
    """Return how many rounds begin before a unit of a head."""
    return (gl.maximum(unit - steps, 0) + _ROUND - 1) // _ROUND


@jit
def _first_unit(program, share, rest):
    """Return the first unit of a program's share; ``rest`` programs, evenly between the others, have one more."""
    return program * share + program * rest // gl.num_programs(0)


@jit
def _program_of(unit, share, rest):
    """Return the program that has a unit in its share."""
    programs = gl.num_programs(0)
    program = (unit.to(gl.float32) * (programs / (share * programs + rest).to(gl.float32))).to(gl.int32)
    program += gl.where(_first_unit(program + 1, share, rest) <= unit, 1, 0)
    return program - gl.where(_first_unit(program, share, rest) > unit, 1, 0)


@jit
def _let_next_start():
    """Let the programs of the next launch start where there is room; they wait for the end of this one."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@constexpr_function
def _table_layout(warps):
    """Layout of numbers for pairs of rows, ``[_ROWS, _ROWS]``."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@jit
def _row_units(
    lengths_ptr, first_row, batch, q_len, window, diagonal_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_NEW: tl.constexpr,
):  # fmt: skip
    """Return the units of ``_ROWS`` rows from one on; those past the last have none."""
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _table_layout(W)))
    stored = gl.load(lengths_ptr + row, mask=row < batch, other=0)
    units = _work(stored, q_len, window, diagonal_tiles, sink_tiles, W, HAS_WINDOW, HAS_NEW)[7]
    return gl.where(row < batch, units * KV_HEADS, 0)


@constexpr_function
def _outputs(warps):
    """Layout in which outputs of all warps, ``[G, W, 64, C]``, are added: four neighbouring channels to a lane."""
    return gl.BlockedLayout([1, warps, 4, 1], [1, 1, 16, 2], [1, 1, 1, warps], [2, 3, 1, 0])


@constexpr_function
def _columns_apart(rank):
    """Layout in shared memory of ``[W, 8]``, and of ``[G, W, 64, 8]`` with the channels next to each other."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0] if rank == 2 else [2, 3, 1, 0])


@jit
def _shared(x):
    """Put numbers into shared memory."""
    LAYOUT: tl.constexpr = _columns_apart(len(x.shape))
    return gl.allocate_shared_memory(x.dtype, x.shape, LAYOUT, x)


@jit
def _eight_columns(x, fill: tl.constexpr):
    """Return ``[..., C]`` with columns of ``fill`` behind, if there are four."""
    if x.shape[-1] == 4:
        both = gl.join(x, gl.zeros_like(x) + fill)
        if len(x.shape) == 2:
            x = gl.reshape(gl.permute(both, [0, 2, 1]), [x.shape[0], 8])
        else:
            x = gl.reshape(gl.permute(both, [0, 1, 3, 2]), [x.shape[0], x.shape[1], 8])
    return x


@jit
def _store_partial(
    low, high, partial_ptr, partial_lse_ptr, entry, DV: tl.constexpr, W: tl.constexpr, HADAMARD: tl.constexpr
):
    """Combine the warps; store their output ``[entries, 8, Dv]`` and its base-2 logarithm.

    ``low`` and ``high`` are the results of the two kinds of tiles, in shared memory: maxima ``[W, 8]``, sums of
    weights ``[W, 8]`` and of values ``[G, W, 64, 8]``. The values of low tiles are rotated by Hadamard matrices of the
    order ``HADAMARD``; their sum is rotated back here.
    """
    ALL: tl.constexpr = _outputs(W)
    OUT: tl.constexpr = gl.SliceLayout(1, ALL)
    WARPS: tl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, ALL))
    COLUMN: tl.constexpr = along(OUT, 3, 2)
    m_low, m_high = low[0].load(WARPS), high[0].load(WARPS)
    m_i = gl.maximum(gl.max(m_low, 0), gl.max(m_high, 0))
    of_low = gl.exp2(m_low - m_i[None, :])
    of_high = gl.exp2(m_high - m_i[None, :])
    total = gl.sum(low[1].load(WARPS) * of_low, 0) + gl.sum(high[1].load(WARPS) * of_high, 0)
    channel = gl.arange(0, 64, layout=along(OUT, 3, 1))[None, :, None]
    channel += gl.arange(0, high[2].shape[0], layout=along(OUT, 3, 0))[:, None, None] * 64
    acc = gl.sum(low[2].load(ALL) * of_low[None, :, None, :], 1)
    acc = inverse_hadamard(acc, channel, HADAMARD, OUT)
    acc += gl.sum(high[2].load(ALL) * of_high[None, :, None, :], 1)
    total = gl.convert_layout(total, COLUMN)
    is_empty = total == 0.0
    acc = acc / gl.where(is_empty, 1.0, total)[None, None, :]
    lse = gl.convert_layout(m_i, COLUMN) + gl.log2(gl.where(is_empty, 1.0, total))
    lse = gl.where(is_empty, float("-inf"), lse)
    place = entry * 8 + gl.arange(0, 8, layout=COLUMN)
    gl.store(
        partial_ptr + (place[None, None, :] * DV + channel), acc, mask=(place[None, None, :] >= 0) & (channel < DV)
    )
    gl.store(partial_lse_ptr + place, lse)


@jit(do_not_specialize=["batch", "q_len", "slots", "ring_tiles", "window", "diagonal_tiles", "sink_tiles"])
def decode_kernel(
    q_ptr, key_ptr, value_ptr, body_ptr, pages_ptr, key_tail_ptr, value_tail_ptr, key_sink_ptr, value_sink_ptr,
    lengths_ptr, raw_rows_ptr, heads_ptr, partial_ptr, partial_lse_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_key_tail, stride_value_tail, stride_key_sink, stride_value_sink, stride_page,
    batch, q_len, slots, ring_tiles, window, softcap, logit_scale, diagonal_tiles, sink_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BITS: tl.constexpr, KEY_HADAMARD: tl.constexpr, VALUE_HADAMARD: tl.constexpr,
    LOW_COLUMNS: tl.constexpr, W: tl.constexpr, BUFFERS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, LETS_START: tl.constexpr,
):  # fmt: skip
    """Answer the queries of all rows; any number of programs.

    If there are new keys and values, those of the queries, they are not stored yet, nor counted in ``lengths``.
    ``heads`` receives of every kv head ``[B, Hkv, 3]``: its first part, how many follow each other, and ``lengths`` of
    its row.
    """
    HAS_NEW: tl.constexpr = key_ptr is not None
    if LETS_START:
        _let_next_start()
    G: tl.constexpr = BLOCK_DV // 64
    MMA: tl.constexpr = mma_layout(W)
    SUMS: tl.constexpr = sums_layout(W)
    blocks = (GROUP * q_len + 7) // 8
    i_program = gl.program_id(0)
    # ---- the line of all units, and the program's share
    total = 0
    for first_row in range(0, batch, _ROWS):
        row_units = _row_units(
            lengths_ptr, first_row, batch, q_len, window, diagonal_tiles, sink_tiles,
            KV_HEADS, W, HAS_WINDOW, HAS_NEW,
        )  # fmt: skip
        total += gl.sum(row_units, 0)
    # At least a round each, so that fewer programs may have any.
    share = total // gl.num_programs(0)
    rest = gl.where(share < _ROUND, 0, total - share * gl.num_programs(0))
    share = gl.maximum(share, _ROUND)
    start = _first_unit(i_program, share, rest)
    end = gl.minimum(_first_unit(i_program + 1, share, rest), total)
    at = start
    seen_rows = 0
    seen_units = 0
    row = 0 * start
    row_start = 0 * start
    row_end = gl.where(batch > 1, 0, total)
    while at < end:
        # ---- a head, or what of it is in the share
        if at >= row_end:
            row_units = _row_units(
                lengths_ptr, seen_rows, batch, q_len, window, diagonal_tiles, sink_tiles,
                KV_HEADS, W, HAS_WINDOW, HAS_NEW,
            )  # fmt: skip
            while seen_units + gl.sum(row_units, 0) <= at:
                seen_units += gl.sum(row_units, 0)
                seen_rows += _ROWS
                row_units = _row_units(
                    lengths_ptr, seen_rows, batch, q_len, window, diagonal_tiles, sink_tiles,
                    KV_HEADS, W, HAS_WINDOW, HAS_NEW,
                )  # fmt: skip
            o_r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _table_layout(W)))
            o_c = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _table_layout(W)))
            row_ends = seen_units + gl.sum(gl.where(o_c[None, :] <= o_r[:, None], row_units[None, :], 0), 1)
            ended = gl.sum((row_ends <= at).to(gl.int32), 0)
            row_start = seen_units + gl.sum(gl.where(o_c < ended, row_units, 0), 0)
            row_end = seen_units + gl.sum(gl.where(o_c <= ended, row_units, 0), 0)
            row = seen_rows + ended
        i_b = row.to(gl.int64)
        stored = gl.load(lengths_ptr + i_b)
        first_pos, visible_tile, band_first, sinks, steps, low_first, low_end, units = _work(
            stored, q_len, window, diagonal_tiles, sink_tiles, W, HAS_WINDOW, HAS_NEW
        )
        i_head = (at - row_start) // units
        head_start = row_start + i_head * units
        i_kv = i_head.to(gl.int64)
        first = at - head_start
        last = gl.minimum(end - head_start, units)
        first_tile = low_first + _rounds(first, steps) * W
        end_tile = gl.minimum(low_first + _rounds(last, steps) * W, low_end)
        # Along the line a part is of the next program, the next head or both: the sum of their numbers is its own.
        entry = i_program + i_b * KV_HEADS + i_kv
        if first == 0:
            heads = heads_ptr + (i_b * KV_HEADS + i_kv) * 3
            gl.store(heads, entry)
            gl.store(heads + 1, _program_of(head_start + units - 1, share, rest) - i_program + 1)
            gl.store(heads + 2, stored)
        raw_row = i_b
        if raw_rows_ptr is not None:
            raw_row = gl.load(raw_rows_ptr + i_b).to(gl.int64)
        ring = i_kv * ring_tiles * _TILE
        sink = i_kv * sink_tiles * _TILE
        for i_block in range(blocks):
            column = i_block * 8 + gl.arange(0, 8, layout=along(MMA, 3, 2))
            q_pos = (first_pos + column // GROUP)[None, None, :]
            column = i_block * 8 + gl.arange(0, LOW_COLUMNS, layout=along(SUMS, 3, 2))
            low_pos = (first_pos + column // GROUP)[None, None, :]
            # ---- low tiles, whose results wait in shared memory
            m_i = gl.full([W, LOW_COLUMNS], -1.0e30, gl.float32, gl.SliceLayout(1, SUMS))
            l_i = gl.full([W, 8, LOW_COLUMNS], 0.0, gl.float32, SUMS)
            acc = gl.full([G * W, 64, LOW_COLUMNS], 0.0, gl.float32, SUMS)
            if first_tile < end_tile:
                if KEY_HADAMARD > 1:
                    q = load_rotated_queries(
                        q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                        GROUP, D, BLOCK_D, W, LOW_COLUMNS, KEY_HADAMARD,
                    )  # fmt: skip
                else:
                    q = load_queries(
                        q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                        GROUP, D, BLOCK_D, W, False, LOW_COLUMNS,
                    )  # fmt: skip
                acc, l_i, m_i = attend_low(
                    q, body_ptr, pages_ptr + i_b * slots, i_kv, first_tile, end_tile, low_pos, diagonal_tiles,
                    window, softcap, logit_scale, slots, stride_page,
                    D, DV, BLOCK_D, G, W, BITS, KEY_HADAMARD > 1, BUFFERS, HAS_WINDOW, HAS_SOFTCAP,
                )  # fmt: skip
            low = (
                _shared(_eight_columns(m_i, -1.0e30)), _shared(_eight_columns(gl.sum(l_i, 1), 0.0)),
                _shared(gl.reshape(_eight_columns(acc, 0.0), [G, W, 64, 8])),
            )  # fmt: skip
            # ---- high tiles
            key, value = key_ptr, value_ptr
            if HAS_NEW:
                key += i_b * stride_kb + i_kv * stride_kh
                value += i_b * stride_vb + i_kv * stride_vh
            m_i = gl.full([W, 8], -1.0e30, gl.float32, gl.SliceLayout(1, MMA))
            l_i = gl.full([W, 8, 8], 0.0, gl.float32, MMA)
            acc = gl.full([G * W, 64, 8], 0.0, gl.float32, MMA)
            if first < steps:
                q = load_queries(
                    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
                    GROUP, D, BLOCK_D, W, True, 8,
                )  # fmt: skip
                acc, l_i, m_i = attend_high(
                    q, key_tail_ptr + (raw_row * stride_key_tail + ring * D),
                    value_tail_ptr + (raw_row * stride_value_tail + ring * DV),
                    key_sink_ptr + (raw_row * stride_key_sink + sink * D),
                    value_sink_ptr + (raw_row * stride_value_sink + sink * DV),
                    key, value,
                    stride_kt, stride_kd, stride_vt, stride_vd,
                    first, gl.minimum(last, steps), steps, stored, q_len, q_pos, sinks, band_first, visible_tile,
                    window, softcap, logit_scale, diagonal_tiles, sink_tiles, ring_tiles,
                    D, DV, BLOCK_D, G, W, HAS_WINDOW, HAS_SOFTCAP, HAS_NEW,
                )  # fmt: skip
            # Channel 8 g + i is in row 8 i + g.
            acc = gl.reshape(gl.permute(gl.reshape(acc, [G, W, 8, 8, 8]), [0, 1, 3, 2, 4]), [G, W, 64, 8])
            high = _shared(m_i), _shared(gl.sum(l_i, 1)), _shared(acc)
            _store_partial(
                low, high, partial_ptr, partial_lse_ptr, entry * blocks + i_block, DV, W, VALUE_HADAMARD
            )  # fmt: skip
        barrier()
        at = head_start + last
