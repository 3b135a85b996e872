"""Steps that both Hopper kernels share, in Gluon: layouts, probabilities of high tiles, and stores of results."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...device.arithmetic import narrow as _narrow_triton
from ...device.gluon import aggregate
from .mask import Mask
from .mma import to_mma_operand
from .softmax import modify_scores
from .tile_range import BLOCK, ROWS

narrow = gluon.jit(_narrow_triton.fn)


@gluon.constexpr_function
def product_layout(columns, operand_bits):
    """Layout of a warpgroup's product ``[64, columns]`` of operands of 8 or 16 bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // operand_bits])


@aggregate
class HighTiles:
    """The 64 queries of a warpgroup, and what turns their scores in high tiles into probabilities."""

    q: Any  # queries ``[64, D]`` in shared memory
    q_start: Any  # position of the first query
    logit_scale: Any  # converts scores to base-2 logits
    bias: Any  # smoothing bias that is subtracted from logits, fp32 ``[64]``
    qk_bias: Any  # added to logits before the softcap, fp32 ``[64]``; ``None`` without
    softcap: Any  # in base 2, or ``None``
    mask: Mask  # masks of the queries
    full_start: Any  # position of the first key that all queries attend to
    full_stop: Any  # position after the last one
    MASKS_LOW: Any  # whether keys before the band may be masked
    O_LAYOUT: Any  # layout of the output

    @gluon.jit
    def attend(self, k, k_start, words, softmax, V_DTYPE: gl.constexpr):
        """Score 64 keys ``[64, D]``, of which the first is at position ``k_start``; ``words`` are their bitmask.

        Returns:
            The probabilities as an operand, the factor ``[64]`` of earlier outputs, and the new softmax.
        """
        LAYOUT: gl.constexpr = product_layout(BLOCK, 16)
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        s = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
        s = warpgroup_mma(self.q, k.permute([1, 0]), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        is_masked = k_start + BLOCK > self.full_stop
        if self.MASKS_LOW:
            is_masked = is_masked | (k_start < self.full_start)
        scale = gl.full([ROWS], 0.0, gl.float32, ROW) + self.logit_scale
        qk_bias = None if self.qk_bias is None else gl.convert_layout(self.qk_bias, ROW, assert_trivial=True)
        s, scale = modify_scores(
            s, scale, qk_bias, self.softcap, self.mask, is_masked, words, self.q_start, k_start, False
        )
        p, alpha, softmax = softmax.update(s, scale, self.bias)
        softmax = softmax.update_row_sum(p, alpha)
        return to_mma_operand(p, V_DTYPE, self.O_LAYOUT), alpha, softmax


@gluon.jit
def row_indices(row, q_len, LAYOUT: gl.constexpr):
    """Return the indices of 64 queries starting at ``row``, int32 ``[64]``, and which of them exist."""
    rows = row + gl.arange(0, 64, layout=LAYOUT)
    return rows, (rows >= 0) & (rows < q_len)


@gluon.jit
def store_output(out_ptr, o, row, q_len, stride_t, channel, HEAD_DIM: gl.constexpr):
    """Store 64 rows of a head's output ``[Tq, HEAD_DIM]``, from channel ``channel`` on; ``row`` may be negative.

    ``o`` has the dtype of the output (:func:`narrow`).
    """
    LAYOUT: gl.constexpr = o.type.layout
    rows, m_row = row_indices(row, q_len, gl.SliceLayout(1, LAYOUT))
    o_d = channel + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    offset = rows.to(gl.int64)[:, None] * stride_t + o_d[None, :]
    mask = m_row[:, None] & (o_d < HEAD_DIM)[None, :]
    gl.store(out_ptr + offset, o, mask=mask)


@gluon.jit
def store_lse(lse_ptr, lse, row, q_len):
    """Store the log of the softmax denominator of 64 rows."""
    LAYOUT: gl.constexpr = lse.type.layout
    rows, m_row = row_indices(row, q_len, LAYOUT)
    gl.store(lse_ptr + rows, lse, mask=m_row)


@gluon.jit
def count_tiles(tile_counts_ptr, vote, n_low, n_kept):
    """Add the numbers of skipped and examined low tiles of a block to int64 ``[2]``, if the block may skip."""
    if tile_counts_ptr is not None:  # noqa: SIM102 (a constexpr branch)
        if vote.is_whole:
            gl.atomic_add(tile_counts_ptr, (n_low - n_kept).to(gl.int64), sem="relaxed")
            gl.atomic_add(tile_counts_ptr + 1, n_low.to(gl.int64), sem="relaxed")
