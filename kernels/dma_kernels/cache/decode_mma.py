"""MMA operands of the decode kernel: layouts, unpacking of codes, and 16-bit integers split into two bytes.

Page blocks hold codes in the order of the first operand of m16n8k32, of which a lane has four consecutive bytes of a
row. So 8-bit codes are multiplied as stored. Two masks turn 4-bit codes into bytes of 16 times the code.

The second operand, scaled queries or probabilities, holds 16-bit integers ``256 h + l`` as two signed bytes in adjacent
columns. So one lane holds both partial sums of a number, over ``h`` and over ``l``.

A fragment has 32 rows and 32 columns. Its axes, by which :func:`rearrange` moves numbers, are bits of their indices::

    row                       8 i + g                 in lanes 4 g + t
    column in the operand     16 c + 4 t + 2 e + x    byte 2 e + x of word c
    column in memory          8 j + 2 t + e           j = 2 c + x in 8 bits, 2 x + c in 4 bits

So codes stay in their lane and their word: a sum does not depend on the order of its columns.
"""

from __future__ import annotations

import math

import triton.language as tl

from ..device.arithmetic import IS_INTERPRETED
from ..device.gluon import constexpr_function, gl, jit

QUERIES = 8
"""Queries of a block: the N of an MMA instruction."""
MAX_INT16 = 32500.0
"""Largest magnitude that two signed bytes hold, less the rounding error."""
_ROUNDER = tl.constexpr(1.5 * 2.0**23 + 128.0)
"""Adding it rounds to an integer, plus 128, in the low bits."""
_AXES = {"c": 2, "e": 2, "x": 2, "i": 4, "j": 4, "t": 4, "g": 8}
"""Sizes of the axes of a fragment."""


@constexpr_function
def _rearrangement(spec, sizes):
    """Return the shape before, the order of axes, and the shape after a rearrangement."""
    axes, target = spec.split(" -> ")
    free = iter(sizes)
    size = {axis: _AXES[axis] if axis.islower() else next(free) for axis in axes}
    order = [axes.index(axis) for axis in target.replace(" ", "")]
    merged = [math.prod(size[axis] for axis in group) for group in target.split()]
    return [size[axis] for axis in axes], order, merged


@jit
def rearrange(x, SPEC: tl.constexpr, SIZES: tl.constexpr):
    """Split, permute and merge axes, such as ``WNgi -> W Nig``; only renames registers.

    Lower-case axes are those of a fragment; ``SIZES`` are those of the others, in order.
    """
    RULE: tl.constexpr = _rearrangement(SPEC, SIZES)
    if len(x.shape) != len(RULE[0]):
        x = gl.reshape(x, RULE[0])
    x = gl.permute(x, RULE[1])
    if len(x.shape) != len(RULE[2]):
        x = gl.reshape(x, RULE[2])
    return x


@constexpr_function
def mma_layout(warps):
    """Layout of a product ``[B, M, 8]``: a warp holds whole matrices of the batch."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def operand_layout(warps, index, bits=16):
    """Layout of an operand of a product, with ``bits`` per number."""
    return gl.DotOperandLayout(index, mma_layout(warps), 32 // bits)


@constexpr_function
def scores_layout(warps):
    """Layout of ``[B, N, C]`` after pairs of accumulator columns were combined."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def codes_layout(warps, rank):
    """Layout of ``[..., W, R, 128]`` words: a lane holds four consecutive words, a warp its own matrix."""
    ones = [1] * (rank - 1)
    return gl.BlockedLayout([*ones, 4], [*ones, 32], [*ones[:-2], warps, 1, 1], list(reversed(range(rank))))


@constexpr_function
def key_scales_layout(warps):
    """Layout for copying a tile's scales or zero points of keys, ``[W, blocks, 16]`` words."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def value_scales_layout(warps):
    """Layout for copying a tile's scales and zero points of values, ``[G, W, blocks, 32]`` words."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 4, 8], [1, warps, 1, 1], [3, 2, 1, 0])


@constexpr_function
def axis_layout(layout, rank, axis):
    """Layout of one of ``rank`` axes, to be expanded with ``None`` along the others."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@constexpr_function
def _index_bits(size, axis, first=1):
    """Bases of a linear layout of three axes along ``axis``: powers of two from ``first`` up, below ``size``."""
    found = []
    while first < size:
        found.append([first if i == axis else 0 for i in range(3)])
        first *= 2
    return found


@constexpr_function
def unquantized_keys_layout(warps, channels):
    """Layout of ``[W, 16, D]``: a lane holds 8 consecutive channels of two keys."""
    reg = [*_index_bits(8, 2), [0, 8, 0], *_index_bits(channels, 2, 32)]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(reg, lane, _index_bits(warps, 0), [], [warps, 16, channels])


@constexpr_function
def unquantized_values_layout(warps, channels):
    """Layout of ``[W, 16, Dv]``: a lane holds 8 consecutive channels of four keys."""
    reg = [*_index_bits(8, 2), [0, 1, 0], [0, 8, 0], *_index_bits(channels, 2, 64)]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(reg, lane, _index_bits(warps, 0), [], [warps, 16, channels])


@jit
def load_key_scales(buffer):
    """Read ``[W, blocks, 16]`` words, four from ``4 t`` on for lane ``4 g + t``: ``[W, blocks, 128]``."""
    W: tl.constexpr = buffer.shape[0]
    BLOCKS: tl.constexpr = buffer.shape[1]
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [W, 1, 1, 1], [3, 2, 1, 0])
    words = buffer.load(gl.SliceLayout(2, LAYOUT))[:, :, None, :]
    words = words + gl.full([1, 1, 8, 1], 0, gl.int32, LAYOUT)
    return gl.convert_layout(gl.reshape(words, [W, BLOCKS, 128]), codes_layout(W, 3), assert_trivial=True)


@jit
def load_value_scales(buffer):
    """Read ``[G, W, blocks, 32]`` words, four from ``4 g`` on for lane ``4 g + t``: ``[G, W, blocks, 32, 4]``."""
    W: tl.constexpr = buffer.shape[1]
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 1, 1, 4, 1], [1, 1, 1, 8, 4], [1, W, 1, 1, 1], [4, 3, 2, 1, 0])
    words = buffer.load(gl.SliceLayout(4, LAYOUT))[:, :, :, :, None]
    return words + gl.full([1, 1, 1, 1, 4], 0, gl.int32, LAYOUT)


@jit
def _transpose_blocks(x):
    """Transpose every 8 x 8 block of 16-bit numbers of ``[B, N, 8]``, in the layout of a product."""
    if IS_INTERPRETED:
        x = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, 8]), [0, 1, 3, 2]).reshape(x.shape)
    else:
        x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], x.dtype, True, 2)
    return x


@jit
def split_words(x, dtype: tl.constexpr):
    """Return 32-bit words as pairs of 16-bit numbers, ``[..., 2]``."""
    low = x.to(gl.uint16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, high)


@jit
def _bytes(words):
    """Return the bytes of words, ``[..., 2, 2]``: byte ``2 e + x`` at ``[e, x]``."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    return gl.join(even, odd)


@jit
def _upper_nibbles(words):
    """Clear the lower four bits of every byte. In assembly, because LLVM would split the word into bytes."""
    if IS_INTERPRETED:
        out = words & 0xF0F0F0F0
    else:
        out = gl.inline_asm_elementwise("and.b32 $0, $1, 0xf0f0f0f0;", "=r,r", [words], gl.uint32, True, 1)
    return out


@jit
def _unpack_codes(words, BITS: tl.constexpr):
    """Return centered codes times ``2 ** (8 - BITS)``: for 8 bits ``[..., e, x]``, for 4 bits ``[..., c, e, x]``."""
    if BITS == 4:
        words = gl.join(_upper_nibbles(words << 4), _upper_nibbles(words))
    return _bytes(words)


@jit
def to_key_operand(words, BITS: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of keys ``[W, STEP, D]`` as a first operand."""
    W: tl.constexpr = words.shape[0]
    SPEC: tl.constexpr = "WNKcgtiex -> W Nig Kctex" if BITS == 8 else "WNKgticex -> W Nig Kctex"
    x = rearrange(_unpack_codes(words, BITS), SPEC, [W, STEP // 32, BLOCK_D // 32])
    return gl.convert_layout(x, operand_layout(W, 0, 8), assert_trivial=True)


@jit
def to_value_operand(words, BITS: tl.constexpr, STEP: tl.constexpr):
    """Return the codes of values ``[G * W, 64, STEP]`` as a first operand."""
    G: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    SPEC: tl.constexpr = "GWKcNgtiex -> GW Nig Kctex" if BITS == 8 else "GWKNgticex -> GW Nig Kctex"
    x = rearrange(_unpack_codes(words, BITS), SPEC, [G, W, STEP // 32, 2])
    return gl.convert_layout(x, operand_layout(W, 0, 8), assert_trivial=True)


@jit
def _permute_bytes(x, y, selector):
    """Select four bytes from two words (PTX ``prmt``)."""
    if IS_INTERPRETED:
        both = x.to(gl.uint64) | (y.to(gl.uint64) << 32)
        out = (x ^ x).to(gl.uint64)
        for i in gl.static_range(4):
            out |= ((both >> ((selector >> (4 * i) & 7) * 8).to(gl.uint64)) & 0xFF) << (8 * i)
        out = out.to(gl.uint32)
    else:
        out = gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], gl.uint32, True, 1)
    return out


@jit
def _round_to_int16(x, scale):
    """Return ``x * scale`` rounded to an integer, plus 128, in the low 16 bits of words."""
    return (x * scale + _ROUNDER).to(gl.uint32, bitcast=True)


@jit
def _byte_order(x, BITS: tl.constexpr):
    """Return bytes 0 to 3 of words ``[W, K, c, t, N]``, from one number per channel ``[W, D, N]``."""
    SPEC: tl.constexpr = "WKcxteN -> W K c t N e x" if BITS == 8 else "WKxcteN -> W K c t N e x"
    first, second = gl.split(rearrange(x, SPEC, [x.shape[0], x.shape[1] // 32, x.shape[2]]))
    byte_0, byte_2 = gl.split(first)
    byte_1, byte_3 = gl.split(second)
    return byte_0, byte_1, byte_2, byte_3


@jit
def to_query_operand(x, scale, BITS: tl.constexpr):
    """Quantize queries, fp32 ``[W, D, N]`` times ``scale`` ``[W, N]``, to 16-bit integers: a second operand of bytes.

    Each query is in two columns of ``x``, which is in the layout of a 16-bit second operand.
    """
    W: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    N: tl.constexpr = x.shape[2]
    # Even columns hold the upper byte, odd columns the lower one.
    column = gl.arange(0, N, layout=axis_layout(operand_layout(W, 1), 3, 2))[None, None, :]
    x = _round_to_int16(x, scale[:, None, :])
    is_low = (x & 0) + column % 2
    byte_0, byte_1, byte_2, byte_3 = _byte_order(x, BITS)
    is_low = _byte_order(is_low, BITS)[0] == 1
    selector = gl.where(is_low, 0x40, 0x51).to(gl.uint32)
    words = _permute_bytes(
        _permute_bytes(byte_0, byte_1, selector), _permute_bytes(byte_2, byte_3, selector), (byte_0 & 0) + 0x5410
    )
    words ^= gl.where(is_low, 0x80808080, 0).to(gl.uint32)
    x = rearrange(_bytes(words), "WKctNex -> W Kctex N", [W, BLOCK_D // 32, N])
    return gl.convert_layout(x, operand_layout(W, 1, 8), assert_trivial=True)


@jit
def _transpose_words(x):
    """Transpose 8 x 8 blocks of 16-bit numbers; a word holds two neighbours of a row, ``[..., 8, 4]``."""
    if IS_INTERPRETED:
        both = gl.join(x & 0xFFFF, x >> 16)  # [..., row, t, half]
        LEADING: tl.constexpr = x.numel // 32
        both = gl.permute(gl.reshape(both, [LEADING, 8, 8]), [0, 2, 1])
        low, high = gl.split(gl.reshape(both, [LEADING, 8, 4, 2]))
        out = gl.reshape(low | (high << 16), x.shape)
    else:
        out = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], gl.uint32, True, 1
        )  # fmt: skip
    return out


@jit
def to_probability_operand(p, scale, BITS: tl.constexpr, W: tl.constexpr):
    """Quantize ``p * scale``, fp32 ``[B, N, C]`` in :func:`scores_layout`, to 16-bit integers: a second operand."""
    B: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    C: tl.constexpr = p.shape[2]
    SPEC: tl.constexpr = "BKcxgCt -> B K c C g t x" if BITS == 8 else "BKxcgCt -> B K c C g t x"
    x = rearrange(_round_to_int16(p, scale), SPEC, [B, N // 32, C // 4])
    first, second = gl.split(x)
    # The upper bytes of two tokens, then the lower ones: two columns per 16-bit integer.
    words = _permute_bytes(first, second, (first & 0) + 0x4051) ^ 0x80800000
    words = _transpose_words(words)  # now g is a column
    x = rearrange(_bytes(words), "BKcCgtex -> B Kctex Cg", [B, N // 32, C // 4])
    return gl.convert_layout(x, operand_layout(W, 1, 8), assert_trivial=True)


@jit
def combine_bytes(x, W: tl.constexpr):
    """Return ``256 h + l`` as fp32 ``[B, N, C]`` from products with both bytes, ``[B, N, 2 C]``."""
    upper, lower = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    x = (upper * 256 + lower).to(gl.float32)
    return gl.convert_layout(x, scores_layout(W), assert_trivial=True)


@jit
def repeat_groups(x, G: tl.constexpr, LAYOUT: tl.constexpr):
    """Repeat ``[W, N, C]`` for every group of 64 channels, ``[G * W, N, C]``."""
    W: tl.constexpr = x.shape[0]
    if G == 2:
        x = gl.permute(gl.join(x, x), [3, 0, 1, 2])
    if G == 4:
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [3, 4, 0, 1, 2])
    return gl.convert_layout(gl.reshape(x, [G * W, x.shape[-2], x.shape[-1]]), LAYOUT, assert_trivial=True)


@jit
def repeat_rows(x, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """Repeat the rows of ``[B, N, C]`` to ``[B, ROWS, C]``."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    x = gl.reshape(x, [B, 1, N, C])
    TIMES: tl.constexpr = ROWS // N
    for level in gl.static_range(4):
        if 2 << level <= TIMES:
            x = gl.permute(gl.join(x, x), [0, 4, 1, 2, 3])
            x = gl.reshape(x, [B, 2 << level, N, C])
    return gl.convert_layout(gl.reshape(x, [B, ROWS, C]), LAYOUT, assert_trivial=True)


@jit
def to_second_operand(x, W: tl.constexpr):
    """Return a 16-bit result ``[B, N, 8]`` as a second operand."""
    x = rearrange(_transpose_blocks(x), "BNgC -> B NC g", [x.shape[0], x.shape[1] // 8, 8])
    return gl.convert_layout(x, operand_layout(W, 1), assert_trivial=True)


@jit
def reduce_lanes(x, LAYOUT: tl.constexpr):
    """Sum every eighth row of ``[B, N, C]`` to ``[B, 8, C]``, without exchange between lanes."""
    return gl.convert_layout(gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, x.shape[2]]), 1), LAYOUT)


@jit
def to_scale_operand(x, y):
    """Return two numbers per channel, ``[W, K, g, t, j, e]``, as a first operand: 8 rows of ``x``, 8 of ``y``."""
    W: tl.constexpr = x.shape[0]
    x = rearrange(gl.join(x, y), "WKgtjeR -> W Rg Kjte", [W, x.shape[1], 2])
    return gl.convert_layout(x, operand_layout(W, 0), assert_trivial=True)


@jit
def load_queries(
    query, i_b, i_kv, i_block, q_len, QUERIES: tl.constexpr, UNQUANTIZED: tl.constexpr, CONFIG: tl.constexpr
):
    """Load a block of queries as a second operand ``[W, D, N]``.

    ``UNQUANTIZED``: one query in each of 8 columns, channels in the order of unquantized keys. Otherwise ``QUERIES`` of
    them in two columns each.
    """
    GROUP: tl.constexpr = CONFIG.GROUP
    LAYOUT: tl.constexpr = operand_layout(CONFIG.W, 1)
    N: tl.constexpr = 8 if UNQUANTIZED else 2 * QUERIES
    o_d = gl.arange(0, CONFIG.BLOCK_D, layout=axis_layout(LAYOUT, 3, 1))[None, :, None]
    column = gl.arange(0, N, layout=axis_layout(LAYOUT, 3, 2))[None, None, :]
    if UNQUANTIZED:
        o_d = o_d // 32 * 32 + o_d % 8 // 2 * 8 + o_d % 32 // 8 * 2 + o_d % 2
    else:
        column = column // 2
    column += i_block * 8
    o_w = gl.arange(0, CONFIG.W, layout=axis_layout(LAYOUT, 3, 0))[:, None, None]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * query.stride_b + head * query.stride_h + i_t.to(gl.int64) * query.stride_t
    offset = offset + o_d.to(gl.int64) * query.stride_d + o_w * 0
    return gl.load(query.ptr + offset, mask=(i_t < q_len) & (o_d < CONFIG.D) & (o_w >= 0), other=0.0)


@jit
def load_rotated_queries(query, i_b, i_kv, i_block, q_len, QUERIES: tl.constexpr, CONFIG: tl.constexpr):
    """Load a block of queries, rotate them, and store each in two columns of shared memory, fp32 ``[D, N]``.

    Queries are multiplied by the inverse of the matrix that rotated the keys, so that scores are unchanged.
    """
    GROUP: tl.constexpr = CONFIG.GROUP
    LAYOUT: tl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, CONFIG.W], [0, 1])
    o_d = gl.arange(0, CONFIG.BLOCK_D, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = i_block * 8 + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * query.stride_b + head * query.stride_h + i_t.to(gl.int64) * query.stride_t
    offset = offset + o_d.to(gl.int64) * query.stride_d
    x = gl.load(query.ptr + offset, mask=(i_t < q_len) & (o_d < CONFIG.D), other=0.0).to(gl.float32)
    x = inverse_hadamard(x, o_d, CONFIG.LAYOUT.key_hadamard, LAYOUT)
    x = gl.reshape(gl.join(x, x), [CONFIG.BLOCK_D, 2 * QUERIES])
    return gl.allocate_shared_memory(gl.float32, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0, 1]), x)


@jit
def read_rotated_queries(buffer, W: tl.constexpr):
    """Read rotated queries from shared memory as a second operand ``[W, D, N]``, fp32."""
    LAYOUT: tl.constexpr = operand_layout(W, 1)
    return buffer.load(gl.SliceLayout(0, LAYOUT))[None, :, :] + gl.full([W, 1, 1], 0.0, gl.float32, LAYOUT)


@jit
def _butterfly(x, channel, STRIDE: tl.constexpr, LAYOUT: tl.constexpr):
    """Add and subtract channels that are ``STRIDE`` apart."""
    C: tl.constexpr = x.shape[-1]
    bits = gl.reshape(x.to(gl.int32, bitcast=True), [x.numel // (2 * STRIDE * C), 2, STRIDE * C])
    # The other number of a pair is the sum of their bits (mod 2^32) minus the bits of this one.
    other = gl.reshape(gl.expand_dims(gl.sum(bits, 1), 1) - bits, x.shape).to(gl.float32, bitcast=True)
    other = gl.convert_layout(other, LAYOUT, assert_trivial=True)
    return other + gl.where((channel & STRIDE) == 0, x, -x)


@jit
def inverse_hadamard(x, channel, ORDER: tl.constexpr, LAYOUT: tl.constexpr):
    """Multiply fp32 ``x`` by the inverse of block-diagonal Hadamard matrices of order ``ORDER``; 1 does nothing.

    All axes of ``x`` except the last are channels; ``channel`` is the channel of each entry, ``[..., 1]``. ``LAYOUT``
    is the layout of ``x`` and of the result.
    """
    for level in gl.static_range(8):
        if (1 << level) < ORDER:
            x = _butterfly(x, channel, 1 << level, LAYOUT)
    return x * (1.0 / ORDER)
