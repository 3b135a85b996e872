"""The online softmax of a warpgroup, in Gluon: logits of a tile, running row maxima and sums, final division."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.arithmetic import apply_softcap as _apply_softcap_triton
from ...device.gluon import aggregate
from ...device.operands import finite_or_zero as _finite_or_zero_triton
from ...device.softmax import LOG2_E
from ...device.softmax import add_sink as _add_sink_triton
from ...device.softmax import log_sum_exp as _log_sum_exp_triton
from .mask import apply_bitmask

apply_softcap = gluon.jit(_apply_softcap_triton.fn)
finite_or_zero = gluon.jit(_finite_or_zero_triton.fn)
_add_sink = gluon.jit(_add_sink_triton.fn)
_log_sum_exp = gluon.jit(_log_sum_exp_triton.fn)


@gluon.jit
def modify_scores(s, scale, qk_bias, softcap, mask, is_masked, words, q_start, k_start, SCALE_FIRST: gl.constexpr):
    """Apply the softcap and the masks to the scores of a tile; return them, and the scale that they still need.

    Args:
        s: Scores ``[64, N]``, int32 or fp32; fp32 where ``is_masked`` is known at run time only.
        scale: Converts scores to base-2 logits, fp32 ``[64]``.
        qk_bias: Added to logits before the softcap, fp32 ``[64]``; or ``None``.
        softcap: In base 2, or ``None``.
        mask: The :class:`~.mask.Mask`; it masks if ``is_masked``.
        is_masked: Whether some query does not attend to some key of the tile.
        words: Bitmask of the tile, int32 ``[64, 4]``; or ``None``.
        q_start: Position of row 0.
        k_start: Position of column 0.
        SCALE_FIRST: Scale before masking: the scale of a low tile may be NaN, whose product with infinity is NaN.
    """
    one = gl.full(scale.shape, 1.0, gl.float32, scale.type.layout)
    if softcap is not None:
        s = s.to(gl.float32) * scale[:, None]
        if qk_bias is not None:
            s = s + qk_bias[:, None]
        s = apply_softcap(s, softcap)
        scale = one
    if is_masked:
        if SCALE_FIRST:
            s = s.to(gl.float32) * scale[:, None]
            scale = one
        s = mask.apply(s, q_start, k_start)
    if words is not None:
        if SCALE_FIRST:
            s = s.to(gl.float32) * scale[:, None]
            scale = one
        s = apply_bitmask(s, words)
    return s, scale


@gluon.jit
def partial_row_sum(p):
    """Return the partial sums of ``[M, N]`` that the four threads of a row hold, ``[M, 4]``.

    Threads do not communicate in the loop; :meth:`Softmax.finalize` adds the partial sums.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [M, N // 8, 4, 2]), 3), 1)


@aggregate
class Softmax:
    """State of the online softmax of 64 rows, in base 2."""

    row_max: Any  # running row maxima, fp32 ``[64]``, finite
    row_sum: Any  # partial row sums, fp32 ``[64, 4]``, scaled by ``2 ** EXPONENT``
    EXPONENT: Any  # probabilities are scaled by 2 to this power: 8 where low tiles have FP8 probabilities

    @gluon.jit
    def update(self, s, scale, bias):
        """Update the row maxima with a tile of scores ``[64, N]``, int32 or fp32; :meth:`update_row_sum` must follow.

        ``s * scale - bias`` are the base-2 logits; ``scale`` and ``bias`` are fp32 ``[64]``.

        Returns:
            Probabilities ``[64, N]``, the factor ``[64]`` of earlier sums and outputs, and the new state.
        """
        ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        old_max = gl.convert_layout(self.row_max, ROW, assert_trivial=True)
        # Maximum before the conversion: Hopper has a three-input maximum for integers.
        row_max = gl.maximum(old_max, gl.max(s, 1).to(gl.float32) * scale - bias)
        p = gl.exp2(s.to(gl.float32) * scale[:, None] + (self.EXPONENT - row_max - bias)[:, None])
        alpha = gl.exp2(old_max - row_max)
        row_max = gl.convert_layout(row_max, self.row_max.type.layout, assert_trivial=True)
        return p, alpha, Softmax(row_max=row_max, row_sum=self.row_sum, EXPONENT=self.EXPONENT)

    @gluon.jit
    def update_row_sum(self, p, alpha):
        """Return the state with the probabilities ``[64, N]`` added; earlier sums are multiplied by ``alpha``."""
        LAYOUT: gl.constexpr = self.row_sum.type.layout
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        row_sum = self.row_sum * alpha + gl.convert_layout(partial_row_sum(p), LAYOUT, assert_trivial=True)
        return Softmax(row_max=self.row_max, row_sum=row_sum, EXPONENT=self.EXPONENT)

    @gluon.jit
    def finalize(self, bias, sinks_ptr):
        """Return the factor of the output, 0 in rows without a key, and the natural log of the denominator.

        ``bias``, fp32 ``[64]`` in base 2, is what key smoothing subtracted from all logits of a row.
        """
        row_max = self.row_max
        row_sum = gl.convert_layout(gl.sum(self.row_sum, 1), row_max.type.layout, assert_trivial=True)
        alpha = gl.full(row_max.shape, 1.0, gl.float32, row_max.type.layout)
        if sinks_ptr is not None:
            sink_logit = gl.load(sinks_ptr).to(gl.float32) * LOG2_E - bias
            row_max, row_sum, alpha = _add_sink(row_max, row_sum, sink_logit, self.EXPONENT)
        scale = alpha / gl.where(row_sum == 0.0, 1.0, row_sum)
        return scale, _log_sum_exp(row_max, row_sum, bias, self.EXPONENT)


@gluon.jit
def init_softmax(S_LAYOUT: gl.constexpr, EXPONENT: gl.constexpr):
    """Return the state before the first tile; ``S_LAYOUT`` is that of low tiles' scores ``[64, 128]``."""
    return Softmax(
        row_max=gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, S_LAYOUT)),
        row_sum=partial_row_sum(gl.zeros([64, 128], gl.float32, S_LAYOUT)),
        EXPONENT=EXPONENT,
    )
