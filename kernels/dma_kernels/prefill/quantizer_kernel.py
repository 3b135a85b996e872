"""The kernel that writes the key and value operands of every compute path: see :mod:`dma_kernels.prefill.operands`.

A CTA writes tiles of the keys or of the values of one kv head. Results equal
:mod:`dma_kernels.numerics.quantize` bit for bit, given the same mean key.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..device.arithmetic import e8m0_decode, e8m0_encode, e8m0_reciprocal, hadamard, pack_e4m3, program_block
from ..device.blocks import e8m0_scale, finite_block_amax, nvfp4_global_scale, nvfp4_key_scale, round_to_units_e4m3
from ..device.operands import pack_scale, to_operand
from ..device.tiles import (
    TILE,
    Rows,
    first_tile_magnitudes,
    first_tile_mean,
    head_rows,
    load_visible,
    load_visible_range,
    transform,
)
from ..numerics.formats import E4M3_MAX, E8M0_MAX_CODE, E8M0_NAN, FIRST_VALUES, MXINT8_UNIT, SMALLEST_CHANNEL
from .channel_chunks import (
    load_chunks,
    quantize_chunks,
    rotate_chunks,
    row_amax,
    store_chunks,
    subtract_vector,
    to_float,
    zeros_where,
)

# Keys that a CTA holds in registers, in block formats without a tile scale: few enough for four CTAs on an SM.
_ROWS = tl.constexpr(32)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_INT8_UNIT = tl.constexpr(MXINT8_UNIT)
_SMALLEST_CHANNEL = tl.constexpr(SMALLEST_CHANNEL)
_MAX_CODE = tl.constexpr(E8M0_MAX_CODE)
_NAN_CODE = tl.constexpr(E8M0_NAN)
_SMALLEST_DESCALE = tl.constexpr(2.0**-126)


@triton.jit
def _write_tile_scaled(
    chunks, mean_ptr, element_ptr, descale_ptr, start, i_tile_row, first, last, CONFIG: tl.constexpr
):
    """Write a tile of keys, in chunks, as 8-bit elements that share one scale, and its descale."""
    FORM: tl.constexpr = CONFIG.low_form
    FORMAT: tl.constexpr = CONFIG.low_format
    ROUNDING: tl.constexpr = CONFIG.rounding
    STORED_D: tl.constexpr = (CONFIG.head_dim + 31) // 32 * 32
    o_t = tl.arange(0, TILE)
    row = i_tile_row * TILE
    x = to_float(chunks)
    if mean_ptr is not None:
        x = subtract_vector(x, mean_ptr, start, first, last, CONFIG.head_dim)
    x = rotate_chunks(x, CONFIG.hadamard_size, CONFIG.norm)
    bits = tl.max(row_amax(x), 0)
    code = e8m0_scale(bits, FORMAT, ROUNDING == "ceil")
    m_all = o_t < TILE
    if (FORM != "int8") | (code < _MAX_CODE):
        elements = quantize_chunks(x, e8m0_reciprocal(code), FORM, ROUNDING == "ceil")
        store_chunks(element_ptr, (row + o_t) * STORED_D, elements, m_all, STORED_D)
    else:
        # A scale that is rounded up keeps all integers within 127, unless it would have to be 2^128. A broken tile is
        # all zeros.
        x = zeros_where(code == _NAN_CODE, x)
        elements = quantize_chunks(x, e8m0_reciprocal(tl.minimum(code, _MAX_CODE)), FORM, False)
        store_chunks(element_ptr, (row + o_t) * STORED_D, elements, m_all, STORED_D)
    descale = e8m0_decode(code)
    if FORM == "int8":
        descale *= _INT8_UNIT
    # The smallest scales could make a descale underflow; a tile of zeros needs none.
    descale = tl.where(descale < _SMALLEST_DESCALE, _SMALLEST_DESCALE, descale)
    tl.store(descale_ptr + i_tile_row, tl.where(bits == 0, 1.0, descale))


@triton.jit
def _write_blocks(
    x, element_ptr, scale_ptr, descale_ptr, global_scale, row, i_tile_row,
    FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write a tile in a block format: dequantized, packed, or folded into E5M2."""
    SIZE: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    PAIR: tl.constexpr = 2 if FORM == "packed" and FORMAT != "mxfp8" else 1
    STORED_D: tl.constexpr = D if FORM == "dequantized" else (D + SIZE - 1) // SIZE * SIZE
    o_d = tl.arange(0, x.shape[1] // PAIR)
    m_d = (o_d < STORED_D // PAIR)[None, :]
    if FORM == "packed":  # pointers of packed elements come first: the order decides how a tile is scheduled
        pointers = element_ptr + (row[:, None] * (STORED_D // PAIR) + o_d[None, :])
    elements, scale, descale = to_operand(
        x, global_scale, FORM, FORMAT, SHARED, ROUNDING, "tile", element_ptr.dtype.element_ty
    )
    if FORM != "packed":
        pointers = element_ptr + row[:, None] * STORED_D + o_d[None, :]
    tl.store(pointers, elements, mask=m_d)
    if FORM == "e5m2":
        tl.store(descale_ptr + i_tile_row + tl.zeros([1, 1], tl.int32), descale)
    elif FORM == "packed":
        o_s = tl.arange(0, x.shape[1] // SIZE)
        offset = row[:, None] * (STORED_D // SIZE) + o_s[None, :]
        tl.store(scale_ptr + offset, pack_scale(scale, FORMAT), mask=(o_s < STORED_D // SIZE)[None, :])


@triton.constexpr_function
def _first_values():
    return FIRST_VALUES


@triton.jit
def _value_descale(x, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the descales of a head's channels, fp32 ``[BLOCK_D]``: ``value_scale`` of its first tile."""
    channel = first_tile_magnitudes(x, first, last, None, D, BLOCK_D, 0, 1.0)
    head = tl.max(channel, 0)
    channel = tl.where(head == 0.0, 1.0, tl.maximum(channel, head * _SMALLEST_CHANNEL))
    # The smallest scale is fp32's smallest normal number.
    return e8m0_decode(tl.maximum(e8m0_encode(channel, _first_values(), False), 1))


@triton.jit
def _to_value_units(x, reciprocal):
    """Divide values by their scale. An infinity becomes NaN, which a cast to E4M3 keeps."""
    return x * reciprocal + x * 0.0


@triton.jit
def _write_fp8_values(
    x, value_ptr, saturated_ptr, descale, i_tile_row, start, first, last, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write a tile of values in E4M3, transposed, with groups of 16 keys in the order of ``permute_keys``.

    In that order, the keys ``8 j + 2 t + c`` of a group with the same ``t`` are adjacent. So four keys of a channel
    form a 32-bit word, which leaves a quarter of the elements to transpose.
    """
    o_w = tl.arange(0, TILE // 4)
    o_d = tl.arange(0, BLOCK_D)
    rows = start + (o_w // 4) * 16 + (o_w % 4) * 2
    a = load_visible(x, rows, first, last, D, BLOCK_D)
    b = load_visible(x, rows + 1, first, last, D, BLOCK_D)
    c = load_visible(x, rows + 8, first, last, D, BLOCK_D)
    d = load_visible(x, rows + 9, first, last, D, BLOCK_D)
    # descale is a power of two of at least 2^-126, so its reciprocal is exact.
    scale = (1.0 / descale)[None, :]
    word = pack_e4m3(
        _to_value_units(a, scale), _to_value_units(b, scale), _to_value_units(c, scale), _to_value_units(d, scale)
    )
    offset = (i_tile_row * D + o_d)[:, None] * (TILE // 4) + o_w[None, :]
    word_ptr = value_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(word_ptr + offset, tl.trans(word), mask=(o_d < D)[:, None])
    # Find bytes that are 0x7E (448) apart from the sign; bits 7, 15, 23 and 31 of a word mark them.
    difference = (word.to(tl.uint32, bitcast=True) & 0x7F7F7F7F) ^ 0x7E7E7E7E
    largest = ((difference + 0x7F7F7F7F) & 0x80808080) ^ 0x80808080
    count = tl.sum(tl.sum(((largest >> 7) * 0x01010101) >> 24, 0), 0)
    if count > 0:
        tl.atomic_add(saturated_ptr, count.to(tl.int64), sem="relaxed")


@triton.jit
def _quantize_keys(
    key, mean_ptr, high_ptr, high_scale_ptr, low_ptr, low_scale_ptr, k_descale_ptr, k_global_scale_ptr,
    seq_info_ptr, kv_offset, kv_len, tiles, first_tile, end_tile, CONFIG: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = CONFIG.head_dim
    BLOCK_D: tl.constexpr = CONFIG.block_d
    HIGH_FORM: tl.constexpr = CONFIG.high_form
    LOW_FORM: tl.constexpr = CONFIG.low_form
    HIGH_FORMAT: tl.constexpr = CONFIG.high_format
    LOW_FORMAT: tl.constexpr = CONFIG.low_format
    IS_TILE_SCALED: tl.constexpr = CONFIG.is_tile_scaled
    SHARED: tl.constexpr = CONFIG.shared_scale
    ROUNDING: tl.constexpr = CONFIG.rounding
    IS_LOW_IN_BLOCKS: tl.constexpr = LOW_FORM != "none" and not IS_TILE_SCALED
    HAS_TILE_SCALE: tl.constexpr = IS_TILE_SCALED or LOW_FORM == "e5m2" or (LOW_FORM != "none" and SHARED == "tile")
    ROWS: tl.constexpr = TILE if HAS_TILE_SCALE else _ROWS
    i_head = tl.program_id(0).to(tl.int64)
    i_b = i_head // CONFIG.kv_heads
    keys = head_rows(key, i_b, i_head % CONFIG.kv_heads)
    first, last, start = load_visible_range(seq_info_ptr, i_b, kv_offset, kv_len)
    i_cta = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_D)
    BLOCKS_PER_TILE: tl.constexpr = TILE // ROWS
    if IS_TILE_SCALED:
        # Issue the load of this CTA's first tile before reading the head's first tile.
        end = tl.minimum(last, start + end_tile * TILE)
        rows = start + (first_tile + i_cta) * ROWS + tl.arange(0, ROWS)
        chunks = load_chunks(keys, rows, first, end, D)
    mean = None
    if mean_ptr is not None:
        mean_ptr += i_head * D
        mean = first_tile_mean(keys, first, last, D, BLOCK_D)
        # All CTAs of a head store the same mean, and load it when they need it, to save registers.
        tl.store(mean_ptr + o_d, mean, mask=o_d < D)
        tl.debug_barrier()
    global_scale = 1.0
    if k_global_scale_ptr is not None:
        channels = first_tile_magnitudes(keys, first, last, mean, D, BLOCK_D, CONFIG.hadamard_size, CONFIG.norm)
        global_scale = nvfp4_key_scale(tl.max(channels, 0), ROUNDING)
        if i_cta == 0:
            tl.store(k_global_scale_ptr + i_head, global_scale)
    for i_block in tl.range(first_tile * BLOCKS_PER_TILE + i_cta, end_tile * BLOCKS_PER_TILE, tl.num_programs(1)):
        o_t = i_block * ROWS + tl.arange(0, ROWS)
        i_tile_row = i_head * tiles + i_block // BLOCKS_PER_TILE
        row = i_head * tiles * TILE + o_t
        if IS_TILE_SCALED:
            _write_tile_scaled(
                chunks, mean_ptr, low_ptr, k_descale_ptr, start + i_block * ROWS, i_tile_row, first, last, CONFIG
            )
            after = start + (i_block + tl.num_programs(1)) * ROWS
            chunks = load_chunks(keys, after + tl.arange(0, ROWS), first, end, D)
        if HIGH_FORM != "raw" or IS_LOW_IN_BLOCKS:
            x = load_visible(keys, start + o_t, first, last, D, BLOCK_D)
            x = transform(x, start + o_t, first, last, mean, CONFIG.hadamard_size, CONFIG.norm)
            if HIGH_FORM != "raw":
                _write_blocks(
                    x, high_ptr, high_scale_ptr, k_descale_ptr, global_scale, row, i_tile_row,
                    HIGH_FORM, HIGH_FORMAT, "block", ROUNDING, D,
                )  # fmt: skip
            if IS_LOW_IN_BLOCKS:
                _write_blocks(
                    x, low_ptr, low_scale_ptr, k_descale_ptr, global_scale, row, i_tile_row,
                    LOW_FORM, LOW_FORMAT, SHARED, ROUNDING, D,
                )  # fmt: skip


@triton.jit
def _quantize_values(
    value, value_ptr, v_descale_ptr, saturated_ptr, seq_info_ptr, kv_offset, kv_len, tiles, first_tile, end_tile,
    CONFIG: tl.constexpr,
):  # fmt: skip
    DV: tl.constexpr = CONFIG.value_dim
    BLOCK_DV: tl.constexpr = CONFIG.block_dv
    VALUE_FORM: tl.constexpr = CONFIG.value_form
    i_head = tl.program_id(0).to(tl.int64)
    i_b = i_head // CONFIG.kv_heads
    values = head_rows(value, i_b, i_head % CONFIG.kv_heads)
    first, last, start = load_visible_range(seq_info_ptr, i_b, kv_offset, kv_len)
    i_cta = tl.program_id(1)
    o_d = tl.arange(0, BLOCK_DV)
    descale = _value_descale(values, first, last, DV, BLOCK_DV)
    if VALUE_FORM == "e4m3":  # noqa: SIM102 (a constexpr branch)
        if i_cta == 0:
            tl.store(v_descale_ptr + i_head * DV + o_d, descale, mask=o_d < DV)
    for i_tile in tl.range(first_tile + i_cta, end_tile, tl.num_programs(1)):
        i_tile_row = i_head * tiles + i_tile
        if VALUE_FORM == "e4m3":
            _write_fp8_values(
                values, value_ptr, saturated_ptr, descale, i_tile_row, start + i_tile * TILE, first, last, DV, BLOCK_DV
            )
        else:
            tl.static_assert(VALUE_FORM == "dequantized", "forms of values are e4m3 and dequantized")
            o_t = i_tile * TILE + tl.arange(0, TILE)
            x = load_visible(values, start + o_t, first, last, DV, BLOCK_DV)
            x = round_to_units_e4m3(_to_value_units(x, 1.0), descale[None, :])
            count = tl.sum(tl.sum((tl.abs(x) == descale[None, :] * _E4M3_MAX).to(tl.int32), 0), 0)
            if count > 0:
                tl.atomic_add(saturated_ptr, count.to(tl.int64), sem="relaxed")
            offset = (i_head * tiles * TILE + o_t)[:, None] * DV + o_d[None, :]
            tl.store(value_ptr + offset, x.to(value_ptr.dtype.element_ty), mask=(o_d < DV)[None, :])


@triton.jit(do_not_specialize=["kv_offset", "kv_len", "tiles", "first_tile", "end_tile"])
def quantize_kernel(
    key, value, seq_info_ptr,
    mean_ptr, high_ptr, high_scale_ptr, low_ptr, low_scale_ptr, k_descale_ptr, k_global_scale_ptr,
    value_ptr, v_descale_ptr, saturated_ptr,
    kv_offset, kv_len, tiles, first_tile, end_tile, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write values in the first layer of the grid, keys in the last; a CTA loops over tiles of its kv head.

    Valid tiles are ``first_tile..end_tile``, of ``tiles`` in storage. Every CTA reads the head's first tile itself,
    from the L2 cache, so no launch precedes this one.
    Forms name operand formats (:mod:`dma_kernels.prefill.operands`); ``none`` and ``raw`` write nothing.
    ``saturated_ptr`` is a counter of values that are too large for E4M3, in host memory. ``CONFIG`` is
    :class:`~.quantizer.QuantizerConstants`.
    """
    if CONFIG.use_pdl:
        gdc_launch_dependents()
    if CONFIG.value_form != "raw":  # noqa: SIM102 (a constexpr branch)
        if tl.program_id(2) == 0:
            _quantize_values(
                value, value_ptr, v_descale_ptr, saturated_ptr, seq_info_ptr, kv_offset, kv_len, tiles, first_tile,
                end_tile, CONFIG,
            )  # fmt: skip
    if CONFIG.high_form != "raw" or CONFIG.low_form != "none":  # noqa: SIM102
        if tl.program_id(2) == tl.num_programs(2) - 1:
            _quantize_keys(
                key, mean_ptr, high_ptr, high_scale_ptr, low_ptr, low_scale_ptr, k_descale_ptr, k_global_scale_ptr,
                seq_info_ptr, kv_offset, kv_len, tiles, first_tile, end_tile, CONFIG,
            )  # fmt: skip


@triton.jit(do_not_specialize=["q_len"])
def query_global_scale_kernel(
    q_ptr, global_scale_ptr, stride_qb, stride_qh, stride_qt, stride_qd, q_len,
    Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Raise the NVFP4 global scale of a head to what a block of its transformed queries needs."""
    i_head = tl.program_id(0).to(tl.int64)
    rows = program_block() * BLOCK_T + tl.arange(0, BLOCK_T)
    base = q_ptr + (i_head // Q_HEADS) * stride_qb + (i_head % Q_HEADS) * stride_qh
    x = load_visible(Rows(base, stride_qt, stride_qd), rows, 0, q_len, D, BLOCK_D)
    x = hadamard(x, HADAMARD_SIZE, NORM)
    largest = tl.max(tl.max(finite_block_amax(x), 1), 0)
    # The scale grows with the largest magnitude, so the head's scale is the largest one. Positive floats sort like
    # their bits.
    tl.atomic_max(
        global_scale_ptr + i_head, nvfp4_global_scale(largest, ROUNDING).to(tl.int32, bitcast=True), sem="relaxed"
    )
