"""The end of an online softmax in base 2: the sink logit and the log of the denominator, elementwise; and splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Splits(NamedTuple):
    """What CTAs that share the keys of a head write. A split has the rows of a block of its queries."""

    # per head: its first split and its number of splits, int32 ``[heads, 2]``. In decoding also ``lengths`` of its row,
    # int32 ``[B, Hkv, 3]``.
    heads: Any
    out: Any  # partial outputs, fp32 ``[splits * rows, Dv]``
    lse: Any  # base-2 log-sum-exp of the partial outputs, fp32 ``[splits * rows]``


@triton.jit
def add_sink(row_max, row_sum, sink_logit, EXPONENT: tl.constexpr):
    """Add a sink logit, in base 2, to row sums that are scaled by ``2 ** EXPONENT``.

    It comes last: earlier, a dominant sink logit would scale E4M3 probabilities down.

    Returns:
        The new row maxima and row sums, and the factor of the output.
    """
    new_max = tl.maximum(row_max, sink_logit)
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.exp2(sink_logit - new_max + EXPONENT)
    return new_max, row_sum, alpha


@triton.jit
def combined_log_sum_exp(row_max, row_sum):
    """Return the row sums of combined splits, 1 in rows without a key, and the natural log of the denominator."""
    is_empty = row_sum == 0.0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    return row_sum, tl.where(is_empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)


@triton.jit
def log_sum_exp(row_max, row_sum, bias, EXPONENT: tl.constexpr):
    """Return the natural log of the denominator; ``bias``, in base 2 or ``None``, was subtracted from all logits."""
    lse = row_max + tl.log2(row_sum) - EXPONENT
    if bias is not None:
        lse += bias
    return tl.where(row_sum == 0.0, float("-inf"), lse * LN_2)
