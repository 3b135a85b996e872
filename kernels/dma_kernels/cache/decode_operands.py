"""Numbers of the decode kernel as the matrix instructions take them: layouts, codes, numbers of 16 bits in two bytes.

Records hold their codes in the order of the first operand of m16n8k32, in which a lane has four neighbouring bytes of a
row: codes of 8 bits are multiplied as they are stored, and two masks make 16 times codes of 4 bits.

The second operand, scaled queries or weights, has numbers of 16 bits: ``256 h + l`` of two signed bytes, in columns
next to each other. So the result has two sums of a number, ``h`` and ``l``, in one lane.
"""

from __future__ import annotations

import triton.language as tl

from ..device.arithmetic import IS_INTERPRETED
from ..device.gluon import constexpr_function, gl, jit

COLUMNS = 8
"""Queries of a block, the columns of the matrix instruction."""
LARGEST = 32500.0
"""Magnitude of a number of 16 bits that two signed bytes hold, less what rounding adds."""
_ROUNDER = tl.constexpr(1.5 * 2.0**23 + 128.0)
"""What rounds to an integer when it is added; the low bits are then the number, and a half of 256 more."""


@constexpr_function
def mma_layout(warps):
    """Layout of a product ``[B, M, 8]``: a warp has whole matrices of the batch."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def operand_layout(warps, index, bits=16):
    """Layout of an operand of a product, of numbers of so many bits."""
    return gl.DotOperandLayout(index, mma_layout(warps), 32 // bits)


@constexpr_function
def sums_layout(warps):
    """Layout of ``[B, N, C]`` where pairs of a product's columns have become one."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def words_layout(warps, rank):
    """Layout of ``[..., W, R, 128]`` words: each lane has four next to each other, each warp its own matrix."""
    ones = [1] * (rank - 1)
    return gl.BlockedLayout(
        [*ones, 4], [*ones, 32], [*ones[:-2], warps, 1, 1], list(reversed(range(rank)))
    )  # fmt: skip


@constexpr_function
def channels_layout(warps):
    """Layout in which a tile's scales or lows of keys are copied, ``[W, blocks, 16]`` words."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def tokens_layout(warps):
    """Layout in which a tile's scales and lows of values are copied, ``[G, W, blocks, 32]`` words."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 4, 8], [1, warps, 1, 1], [3, 2, 1, 0])


@constexpr_function
def along(layout, rank, axis):
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
def raw_keys_layout(warps, channels):
    """Layout of ``[W, 16, D]``: a lane has 8 neighbouring channels of two keys."""
    reg = [*_bits(8, 2, 3), [0, 8, 0], *_bits(channels, 2, 3, 32)]
    lane = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(reg, lane, _bits(warps, 0, 3), [], [warps, 16, channels])


@constexpr_function
def raw_values_layout(warps, channels):
    """Layout of ``[W, 16, Dv]``: a lane has 8 neighbouring channels of four keys."""
    reg = [*_bits(8, 2, 3), [0, 1, 0], [0, 8, 0], *_bits(channels, 2, 3, 64)]
    lane = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(reg, lane, _bits(warps, 0, 3), [], [warps, 16, channels])


@jit
def channel_words(buffer):
    """Read ``[W, blocks, 16]`` words, four from ``4 t`` on for lane ``4 g + t``: ``[W, blocks, 128]``."""
    W: tl.constexpr = buffer.shape[0]
    BLOCKS: tl.constexpr = buffer.shape[1]
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 8, 4], [W, 1, 1, 1], [3, 2, 1, 0])
    words = buffer.load(gl.SliceLayout(2, LAYOUT))[:, :, None, :]
    words = words + gl.full([1, 1, 8, 1], 0, gl.int32, LAYOUT)
    return gl.convert_layout(gl.reshape(words, [W, BLOCKS, 128]), words_layout(W, 3), assert_trivial=True)


@jit
def token_words(buffer):
    """Read ``[G, W, blocks, 32]`` words, four from ``4 g`` on for lane ``4 g + t``: ``[G, W, blocks, 32, 4]``."""
    W: tl.constexpr = buffer.shape[1]
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 1, 1, 4, 1], [1, 1, 1, 8, 4], [1, W, 1, 1, 1], [4, 3, 2, 1, 0])
    words = buffer.load(gl.SliceLayout(4, LAYOUT))[:, :, :, :, None]
    return words + gl.full([1, 1, 1, 1, 4], 0, gl.int32, LAYOUT)


@jit
def transposed_blocks(x):
    """Transpose every 8 x 8 numbers of 16 bits of ``[B, N, 8]``, in the layout of results of matrix products."""
    if IS_INTERPRETED:
        x = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, 8]), [0, 1, 3, 2]).reshape(x.shape)
    else:
        x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], x.dtype, True, 2)
    return x


@jit
def halves(x, dtype: tl.constexpr):
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
    """Return bytes with their lower four bits cleared; hidden from LLVM, which would not see four bytes any more."""
    if IS_INTERPRETED:
        out = words & 0xF0F0F0F0
    else:
        out = gl.inline_asm_elementwise("and.b32 $0, $1, 0xf0f0f0f0;", "=r,r", [words], gl.uint32, True, 1)
    return out


@jit
def _codes(words, BITS: tl.constexpr):
    """Return codes less their middle, ``2 ** (8 - BITS)`` times: of 8 bits ``[..., e, x]``, of 4 ``[..., c, e, x]``."""
    if BITS == 4:
        words = gl.join(_upper_nibbles(words << 4), _upper_nibbles(words))
    return _bytes(words)


@jit
def key_operand(words, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of keys ``[W, STEP, D]`` as a first operand."""
    x = _codes(words, BITS)
    if BITS == 8:
        x = gl.reshape(x, [W, STEP // 32, BLOCK_D // 32, 2, 8, 4, 4, 2, 2])
        x = gl.permute(x, [0, 1, 6, 4, 2, 3, 5, 7, 8])  # W; block, i, g; block, c, t, e, x
    else:
        x = gl.reshape(x, [W, STEP // 32, BLOCK_D // 32, 8, 4, 4, 2, 2, 2])
        x = gl.permute(x, [0, 1, 5, 3, 2, 6, 4, 7, 8])
    return gl.convert_layout(gl.reshape(x, [W, STEP, BLOCK_D]), operand_layout(W, 0, 8), assert_trivial=True)


@jit
def value_operand(words, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr):
    """Return the codes of values ``[G * W, 64, STEP]`` as a first operand."""
    x = _codes(words, BITS)
    if BITS == 8:
        x = gl.reshape(x, [G, W, STEP // 32, 2, 2, 8, 4, 4, 2, 2])
        x = gl.permute(x, [0, 1, 4, 7, 5, 2, 3, 6, 8, 9])  # G, W; block, i, g; block, c, t, e, x
    else:
        x = gl.reshape(x, [G, W, STEP // 32, 2, 8, 4, 4, 2, 2, 2])
        x = gl.permute(x, [0, 1, 3, 6, 4, 2, 7, 5, 8, 9])
    return gl.convert_layout(gl.reshape(x, [G * W, 64, STEP]), operand_layout(W, 0, 8), assert_trivial=True)


@jit
def _chosen_bytes(x, y, selector):
    """Return words of four bytes of two words each, as PTX's ``prmt`` does."""
    if IS_INTERPRETED:
        both = x.to(gl.uint64) | (y.to(gl.uint64) << 32)
        out = (x ^ x).to(gl.uint64)
        for i in gl.static_range(4):
            out |= ((both >> ((selector >> (4 * i) & 7) * 8).to(gl.uint64)) & 0xFF) << (8 * i)
        out = out.to(gl.uint32)
    else:
        out = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, selector], gl.uint32, True, 1
        )  # fmt: skip
    return out


@jit
def _rounded(x, factor):
    """Return ``x * factor`` rounded and 128 more in the low 16 bits of words."""
    return (x * factor + _ROUNDER).to(gl.uint32, bitcast=True)


@jit
def _by_byte(x, BITS: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return what becomes bytes 0 to 3 of words ``[W, block, c, t, N]``, of numbers for each channel ``[W, D, N]``."""
    N: tl.constexpr = x.shape[2]
    x = gl.reshape(x, [W, BLOCK_D // 32, 2, 2, 4, 2, N])  # block, j, t, e
    # Of 8 bits j = 2 c + x, of 4 bits j = 2 x + c.
    x = gl.permute(x, [0, 1, 2, 4, 6, 5, 3] if BITS == 8 else [0, 1, 3, 4, 6, 5, 2])
    first, second = gl.split(x)
    byte_0, byte_2 = gl.split(first)
    byte_1, byte_3 = gl.split(second)
    return byte_0, byte_1, byte_2, byte_3


@jit
def query_operand(x, factor, BITS: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return queries times factors as a second operand of bytes.

    Queries are fp32 ``[W, D, N]``, each in two columns, laid out as a second operand of 16 bits; factors ``[W, N]``.
    """
    N: tl.constexpr = x.shape[2]
    # Even columns have the upper byte, odd ones the lower.
    column = gl.arange(0, N, layout=along(operand_layout(W, 1), 3, 2))[None, None, :]
    x = _rounded(x, factor[:, None, :])
    is_low = (x & 0) + column % 2
    byte_0, byte_1, byte_2, byte_3 = _by_byte(x, BITS, W, BLOCK_D)
    is_low = _by_byte(is_low, BITS, W, BLOCK_D)[0] == 1
    selector = gl.where(is_low, 0x40, 0x51).to(gl.uint32)
    words = _chosen_bytes(
        _chosen_bytes(byte_0, byte_1, selector), _chosen_bytes(byte_2, byte_3, selector), (byte_0 & 0) + 0x5410
    )
    words ^= gl.where(is_low, 0x80808080, 0).to(gl.uint32)
    x = gl.permute(_bytes(words), [0, 1, 2, 3, 5, 6, 4])  # W; block, c, t, e, x; column
    return gl.convert_layout(gl.reshape(x, [W, BLOCK_D, N]), operand_layout(W, 1, 8), assert_trivial=True)


@jit
def _transposed_words(x):
    """Transpose 8 x 8 numbers of 16 bits: a word has two neighbours of a row, ``[..., 8, 4]``."""
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
def weight_operand(p, scale, BITS: tl.constexpr, W: tl.constexpr):
    """Return weights times scales, both fp32 ``[B, N, C]`` as sums are laid out, as a second operand of bytes."""
    B: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    C: tl.constexpr = p.shape[2]
    # A token's block, i and g; of 8 bits i = 2 c + x, of 4 bits i = 2 x + c.
    x = gl.reshape(_rounded(p, scale), [B, N // 32, 2, 2, 8, C // 4, 4])
    x = gl.permute(x, [0, 1, 2, 5, 4, 6, 3] if BITS == 8 else [0, 1, 3, 5, 4, 6, 2])
    first, second = gl.split(x)
    # The upper bytes of two tokens, then the lower: a number of 16 bits in each of two columns.
    words = _chosen_bytes(first, second, (first & 0) + 0x4051) ^ 0x80800000
    x = _bytes(_transposed_words(words))  # [B, block, c, C / 4, column, t, e, x]
    x = gl.reshape(gl.permute(x, [0, 1, 2, 5, 6, 7, 3, 4]), [B, N, 2 * C])
    return gl.convert_layout(x, operand_layout(W, 1, 8), assert_trivial=True)


@jit
def whole_sums(x, W: tl.constexpr):
    """Return sums ``[B, N, C]`` of ``256 h + l`` from those of both bytes, ``[B, N, 2 C]``, fp32."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2] // 2
    upper, lower = gl.split(gl.reshape(x, [B, N, C, 2]))
    x = (upper * 256 + lower).to(gl.float32)
    return gl.convert_layout(x, sums_layout(W), assert_trivial=True)


@jit
def over_groups(x, G: tl.constexpr, LAYOUT: tl.constexpr):
    """Return ``[W, N, C]`` once for each group of 64 channels, ``[G * W, N, C]``."""
    W: tl.constexpr = x.shape[0]
    if G == 2:
        x = gl.permute(gl.join(x, x), [3, 0, 1, 2])
    if G == 4:
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [3, 4, 0, 1, 2])
    return gl.convert_layout(gl.reshape(x, [G * W, x.shape[-2], x.shape[-1]]), LAYOUT, assert_trivial=True)


@jit
def repeated_rows(x, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return ``[B, N, C]`` several times below each other, ``[B, ROWS, C]``."""
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
def second_operand(x, W: tl.constexpr):
    """Return a result of 16 bits, ``[B, N, 8]``, as a second operand."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = transposed_blocks(x)
    x = gl.permute(gl.reshape(x, [B, N // 8, 8, 8]), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(x, [B, N, 8]), operand_layout(W, 1), assert_trivial=True)


@jit
def lane_sums(x, LAYOUT: tl.constexpr):
    """Return the sums of every eighth row of ``[B, N, C]``, ``[B, 8, C]``: what a lane has is added in it."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    return gl.convert_layout(gl.sum(gl.reshape(x, [B, N // 8, 8, C]), 1), LAYOUT)


@jit
def two_rows(x, y, W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return two numbers for each channel, ``[W, block, g, t, j, e]`` of any ``g``, as a first operand.

    Of its 16 rows 8 are ``x`` and 8 are ``y``.
    """
    x = gl.reshape(gl.permute(gl.join(x, y), [0, 6, 2, 1, 4, 3, 5]), [W, 16, BLOCK_D])
    return gl.convert_layout(x, operand_layout(W, 0), assert_trivial=True)


@jit
def load_queries(
    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, AS_RAW: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load queries of a block as a second operand ``[W, D, N]``.

    ``AS_RAW`` one in each of 8 columns and in the order of channels of raw keys; else ``COLUMNS`` of them in two each.
    """
    LAYOUT: tl.constexpr = operand_layout(W, 1)
    N: tl.constexpr = 8 if AS_RAW else 2 * COLUMNS
    o_d = gl.arange(0, BLOCK_D, layout=along(LAYOUT, 3, 1))[None, :, None]
    column = gl.arange(0, N, layout=along(LAYOUT, 3, 2))[None, None, :]
    if AS_RAW:
        o_d = o_d // 32 * 32 + o_d % 8 // 2 * 8 + o_d % 32 // 8 * 2 + o_d % 2
    else:
        column = column // 2
    column += i_block * 8
    o_w = gl.arange(0, W, layout=along(LAYOUT, 3, 0))[:, None, None]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * stride_qb + head * stride_qh + i_t.to(gl.int64) * stride_qt + o_d.to(gl.int64) * stride_qd + o_w * 0
    return gl.load(q_ptr + offset, mask=(i_t < q_len) & (o_d < D) & (o_w >= 0), other=0.0)


@jit
def load_rotated_queries(
    q_ptr, i_b, i_kv, i_block, q_len, stride_qb, stride_qh, stride_qt, stride_qd,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    HADAMARD: tl.constexpr,
):  # fmt: skip
    """Load ``COLUMNS`` queries of a block, rotate them, and put each in two columns of shared memory, fp32 ``[D, N]``.

    They are multiplied by the inverse of the matrix that keys were multiplied by, so that scores stay the same.
    """
    LAYOUT: tl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, W], [0, 1])
    o_d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = i_block * 8 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * stride_qb + head * stride_qh + i_t.to(gl.int64) * stride_qt + o_d.to(gl.int64) * stride_qd
    x = gl.load(q_ptr + offset, mask=(i_t < q_len) & (o_d < D), other=0.0).to(gl.float32)
    x = inverse_hadamard(x, o_d, HADAMARD, LAYOUT)
    x = gl.reshape(gl.join(x, x), [BLOCK_D, 2 * COLUMNS])
    return gl.allocate_shared_memory(gl.float32, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0, 1]), x)


@jit
def rotated_queries(buffer, W: tl.constexpr):
    """Return rotated queries from shared memory as a second operand ``[W, D, N]``, fp32."""
    LAYOUT: tl.constexpr = operand_layout(W, 1)
    return buffer.load(gl.SliceLayout(0, LAYOUT))[None, :, :] + gl.full([W, 1, 1], 0.0, gl.float32, LAYOUT)


@jit
def _butterfly(x, channel, STRIDE: tl.constexpr, LAYOUT: tl.constexpr):
    """Add and subtract channels that lie ``STRIDE`` apart."""
    C: tl.constexpr = x.shape[-1]
    bits = gl.reshape(x.to(gl.int32, bitcast=True), [x.numel // (2 * STRIDE * C), 2, STRIDE * C])
    # The other one of a pair is what is left of the sum of their bits, which may wrap.
    other = gl.reshape(gl.expand_dims(gl.sum(bits, 1), 1) - bits, x.shape).to(gl.float32, bitcast=True)
    other = gl.convert_layout(other, LAYOUT, assert_trivial=True)
    return other + gl.where((channel & STRIDE) == 0, x, -x)


@jit
def inverse_hadamard(x, channel, ORDER: tl.constexpr, LAYOUT: tl.constexpr):
    """Multiply by the inverse of the Hadamard matrices of an order.

    Args:
        x: fp32 ``[..., C]`` in ``LAYOUT``; all dimensions but the last are channels.
        channel: The channel of each, ``[..., 1]``.
        ORDER: A power of two, at most 256; 1 does nothing.
        LAYOUT: Of ``x``, and of the result.
    """
    for level in gl.static_range(8):
        if (1 << level) < ORDER:
            x = _butterfly(x, channel, 1 << level, LAYOUT)
    return x * (1.0 / ORDER)
