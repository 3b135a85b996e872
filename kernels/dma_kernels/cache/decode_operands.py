"""Numbers of the decode kernel as the matrix instruction m16n8k16 takes them: layouts, codes, raw keys and values.

Records hold their codes in the order of the instruction's first operand, so a lane copies 16 bytes and makes 16-bit
numbers of them in place, with one instruction for two: ``0x6400 | n`` is 1,024 + n in fp16, and ``0x5400 | n << 4`` is
64 + n.
"""

from __future__ import annotations

import triton.language as tl

from ..device.arithmetic import IS_INTERPRETED
from ..device.gluon import constexpr_function, gl, jit

COLUMNS = 8
"""Queries of a program, which all heads of a group count for: the columns of the matrix instruction."""
ADDED = (0x64006400, 0x54005400)
"""What turns fields of bits 0 to 3 (or 7) and of bits 4 to 7 of two halves into fp16: 1,024 and 64, both twice."""


@constexpr_function
def mma_layout(warps):
    """Layout of a product ``[B, M, 8]``: a warp has whole matrices of the batch."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def operand_layout(warps, index):
    """Layout of an operand of a product."""
    return gl.DotOperandLayout(index, mma_layout(warps), 2)


@constexpr_function
def words_layout(warps, rank):
    """Layout of ``[..., W, R, 128]`` words: each lane has four next to each other, each warp its own matrix."""
    ones = [1] * (rank - 1)
    return gl.BlockedLayout(
        [*ones, 4], [*ones, 32], [*ones[:-2], warps, 1, 1], list(reversed(range(rank)))
    )  # fmt: skip


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
def transposed_blocks(x):
    """Transpose every 8 x 8 numbers of 16 bits of ``[B, N, 8]``, in the layout of results of matrix products."""
    if IS_INTERPRETED:
        x = gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, 8]), [0, 1, 3, 2]).reshape(x.shape)
    else:
        x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], x.dtype, True, 2)
    return x


@jit
def spread_bytes(words, above, FIRST: tl.constexpr):
    """Return bytes ``FIRST`` (0 or 1) and ``FIRST + 2`` of words, those of ``above`` with 0 in their places."""
    if IS_INTERPRETED:
        x = ((words >> (8 * FIRST)) & 0x00FF00FF) | above
    else:
        SELECTED: tl.constexpr = "0x5250" if FIRST == 0 else "0x5351"
        x = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, " + SELECTED + ";", "=r,r,r", [words, above], gl.uint32, True, 1
        )
    return x


@jit
def finite_halves(x):
    """Return fp16 numbers with the largest one for infinities; NaN stays. Two at a time, which Triton does not do."""
    if IS_INTERPRETED:
        x = gl.minimum(gl.maximum(x, -65504.0, tl.PropagateNan.ALL), 65504.0, tl.PropagateNan.ALL).to(gl.float16)
    else:
        x = gl.inline_asm_elementwise(
            "{ .reg .b32 x, y; mov.b32 x, 0xfbfffbff; mov.b32 y, 0x7bff7bff; max.NaN.f16x2 x, $1, x; "
            "min.NaN.f16x2 $0, x, y; }",
            "=r,r", [x], gl.float16, True, 2,
        )  # fmt: skip
    return x


@jit
def halves(x, dtype: tl.constexpr):
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
        x = gl.join(halves(spread_bytes(words, even, 0), gl.float16), halves(spread_bytes(words, even, 1), gl.float16))
    else:
        x = gl.join(
            gl.join(
                halves((words & 0x000F000F) | even, gl.float16),
                halves((rest & 0x000F000F) | even, gl.float16),
            ),
            gl.join(
                halves((words & 0x00F000F0) | odd, gl.float16),
                halves((rest & 0x00F000F0) | odd, gl.float16),
            ),
        )
    return x


@jit
def constants_operand(column, like, BITS: tl.constexpr):
    """Return a first operand: minus the constants that :func:`_numbers` adds, and minus the middle of the codes."""
    if BITS == 4:  # noqa: SIM108 (a constexpr branch)
        like = gl.where((column & 8) == 0, -1032.0, -72.0).to(gl.float16) + like
    else:
        like = like - 1152.0
    return like


@jit
def key_operand(words, magic, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the codes of keys ``[W, STEP, D]`` as a first operand."""
    J: tl.constexpr = 16 // BITS
    x = gl.reshape(_numbers(words, magic, BITS), [W, STEP // 32, BLOCK_D // (8 * J), 8, 4, 4, 2, J])
    x = gl.permute(x, [0, 1, 5, 3, 2, 7, 4, 6])  # W; block, i, g; block, j, t, e
    return gl.convert_layout(gl.reshape(x, [W, STEP, BLOCK_D]), operand_layout(W, 0), assert_trivial=True)


@jit
def value_operand(words, magic, BITS: tl.constexpr, W: tl.constexpr, STEP: tl.constexpr, G: tl.constexpr):
    """Return the codes of values ``[G * W, 64, STEP]`` as a first operand."""
    J: tl.constexpr = 16 // BITS
    x = gl.reshape(_numbers(words, magic, BITS), [G, W, STEP // (8 * J), 2, 8, 4, 4, 2, J])
    x = gl.permute(x, [0, 1, 3, 6, 4, 2, 8, 5, 7])  # G, W; block, i, g; block, j, t, e
    return gl.convert_layout(gl.reshape(x, [G * W, 64, STEP]), operand_layout(W, 0), assert_trivial=True)


@jit
def over_groups(x, G: tl.constexpr, W: tl.constexpr):
    """Return ``[W, N, 8]`` once for each group of 64 channels, ``[G * W, N, 8]``."""
    N: tl.constexpr = x.shape[1]
    if G == 2:
        x = gl.permute(gl.join(x, x), [3, 0, 1, 2])
    if G == 4:
        x = gl.join(x, x)
        x = gl.permute(gl.join(x, x), [3, 4, 0, 1, 2])
    return gl.convert_layout(gl.reshape(x, [G * W, N, 8]), mma_layout(W), assert_trivial=True)


@jit
def repeated_rows(x, ROWS: tl.constexpr, W: tl.constexpr):
    """Return ``[B, N, 8]`` several times below each other, ``[B, ROWS, 8]``."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = gl.reshape(x, [B, 1, N, 8])
    TIMES: tl.constexpr = ROWS // N
    for level in gl.static_range(4):
        if 2 << level <= TIMES:
            x = gl.permute(gl.join(x, x), [0, 4, 1, 2, 3])
            x = gl.reshape(x, [B, 2 << level, N, 8])
    return gl.convert_layout(gl.reshape(x, [B, ROWS, 8]), mma_layout(W), assert_trivial=True)


@jit
def second_operand(x, W: tl.constexpr):
    """Return a result of 16 bits, ``[B, N, 8]``, as a second operand."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = transposed_blocks(x)
    x = gl.permute(gl.reshape(x, [B, N // 8, 8, 8]), [0, 1, 3, 2])
    return gl.convert_layout(gl.reshape(x, [B, N, 8]), operand_layout(W, 1), assert_trivial=True)


@jit
def lane_sums(x, W: tl.constexpr):
    """Return the sums of every eighth row of ``[B, N, 8]``, ``[B, 8, 8]``: what a lane has is added in it."""
    B: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return gl.convert_layout(gl.sum(gl.reshape(x, [B, N // 8, 8, 8]), 1), mma_layout(W))


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
):  # fmt: skip
    """Load 8 columns as a second operand ``[W, D, 8]``; ``AS_RAW`` in the order of channels of raw keys."""
    LAYOUT: tl.constexpr = operand_layout(W, 1)
    o_d = gl.arange(0, BLOCK_D, layout=along(LAYOUT, 3, 1))[None, :, None]
    if AS_RAW:
        o_d = o_d // 32 * 32 + o_d % 8 // 2 * 8 + o_d % 32 // 8 * 2 + o_d % 2
    column = i_block * 8 + gl.arange(0, 8, layout=along(LAYOUT, 3, 2))[None, None, :]
    o_w = gl.arange(0, W, layout=along(LAYOUT, 3, 0))[:, None, None]
    i_t = column // GROUP
    head = i_kv * GROUP + column % GROUP
    offset = i_b * stride_qb + head * stride_qh + i_t.to(gl.int64) * stride_qt + o_d * stride_qd + o_w * 0
    return gl.load(q_ptr + offset, mask=(i_t < q_len) & (o_d < D) & (o_w >= 0), other=0.0)
