"""The online softmax, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.queries import finite_or_zero as _finite_or_zero_triton

finite_or_zero = gluon.jit(_finite_or_zero_triton.fn)


@gluon.jit
def _reciprocal(x):
    """Return ``1 / x`` to a unit in the last place, 0 from 2^126 on: a third of a division's instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def capped(logits, softcap):
    """Return base-2 logits, capped; ``softcap`` is in their unit."""
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), where a logit is y * softcap.
    return softcap - 2.0 * softcap * _reciprocal(gl.exp2(logits * (2.8853900817779268 / softcap)) + 1.0)


@gluon.jit
def online_softmax(x, factor, bias, m_i, EXPONENT: gl.constexpr):
    """One step of the online softmax, in base 2.

    Args:
        x: Scores ``[M, N]``, int32 or fp32; ``x * factor - bias`` are the logits.
        factor: fp32 ``[M]``.
        bias: fp32 ``[M]``.
        m_i: Running row maxima, fp32 ``[M]``, finite.
        EXPONENT: Probabilities are scaled by 2 to this power.

    Returns:
        Probabilities ``[M, N]``, what the sums and outputs before are multiplied by, ``[M]``, and the new maxima.
    """
    # Hopper takes the maximum of three integers at a time.
    m_new = gl.maximum(m_i, gl.max(x, 1).to(gl.float32) * factor - bias)
    p = gl.exp2(x.to(gl.float32) * factor[:, None] + (EXPONENT - m_new - bias)[:, None])
    return p, gl.exp2(m_i - m_new), m_new


@gluon.jit
def finalize_softmax(m_i, l_i, bias, sinks_ptr, EXPONENT: gl.constexpr):
    """End the online softmax. The sink logit comes last: earlier it would scale E4M3 probabilities down.

    Args:
        m_i: Row maxima in base 2, ``[M]``.
        l_i: Row sums, scaled by 2 to the power ``EXPONENT``.
        bias: What smoothing subtracts from a row's logits, base 2.
        sinks_ptr: The head's sink logit, or ``None``.
        EXPONENT: See :func:`online_softmax`.

    Returns:
        What outputs are multiplied by, 0 in rows without a key, and the natural log of the denominator.
    """
    alpha = gl.full(m_i.shape, 1.0, gl.float32, m_i.type.layout)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr).to(gl.float32) * 1.4426950408889634 - bias
        m_new = gl.maximum(m_i, sink)
        alpha = gl.exp2(m_i - m_new)
        l_i = l_i * alpha + gl.exp2(sink - m_new + EXPONENT)
        m_i = m_new
    is_empty = l_i == 0.0
    scale = alpha / gl.where(is_empty, 1.0, l_i)
    lse = (m_i + gl.log2(l_i) - EXPONENT + bias) * 0.6931471805599453
    return scale, gl.where(is_empty, float("-inf"), lse)


@gluon.jit
def thread_sums(p):
    """Return what each of the four threads of a row has of the sum over the columns of ``[M, N]``: ``[M, 4]``.

    No thread waits for another: only the end of all blocks adds them up.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def add_sums(sums, p, alpha):
    """Return ``sums * alpha`` plus those of ``p``."""
    LAYOUT: gl.constexpr = sums.type.layout
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    return sums * alpha + gl.convert_layout(thread_sums(p), LAYOUT, assert_trivial=True)
