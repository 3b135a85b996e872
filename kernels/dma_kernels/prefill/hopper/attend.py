"""Steps that both Hopper kernels share: layouts, and probabilities of high tiles, in Gluon."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...device.gluon import aggregate
from .mask import Mask
from .mma import to_mma_operand
from .softmax import modify_scores
from .tile_range import BLOCK, ROWS


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
    P_LAYOUT: Any  # layout of probabilities as an operand

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
        return to_mma_operand(p, V_DTYPE, self.P_LAYOUT), alpha, softmax
