"""Conversion of keys and queries to operand formats, and the bias of key smoothing.

Each query belongs to one CTA of the attention kernel, so converting it there costs no launch and no memory traffic.
Results equal :func:`dma_kernels.numerics.quantize.quantize` bit for bit; a rotation before it is exact up to fp32
rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import to_e4m3, to_e5m2, to_elements
from .blocks import dequantize_blocks, mxfp4_to_e5m2, pack_e2m1, quantize_blocks, row_scale


@triton.jit
def smoothing_bias(q, mean_ptr, D: tl.constexpr):
    """Return what key smoothing subtracts from all scores of a query, ``q . mean``: fp32 ``[ROWS]``."""
    o_d = tl.arange(0, q.shape[1])
    mean = tl.load(mean_ptr + o_d, mask=o_d < D, other=0.0)
    return tl.sum(q.to(tl.float32) * mean[None, :], 1)


@triton.jit
def finite_or_zero(x):
    """Return fp32 ``x`` with 0 for infinities and NaN, which a row without visible keys may hold."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def to_operand(
    x, global_scale, FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr,
    AXIS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Convert fp32 ``[ROWS, BLOCK_D]`` to the operand format ``FORM``: ``dequantized``, ``e5m2`` or ``packed``.

    ``FORMAT`` is the number format, and ``SHARED`` what shares a scale. ``global_scale`` is NVFP4's. ``AXIS`` is what
    shares a descale in E5M2, ``tile`` or ``row``. ``DTYPE`` is that of dequantized numbers.

    Returns:
        The elements; their block scales, for :func:`pack_scale`; and their descale (unused except for ``e5m2``).
    """
    descale = 1.0
    if FORMAT == "bf16":
        tl.static_assert(FORM == "dequantized", "unquantized queries meet dequantized keys, and the reverse")
        elements = x.to(DTYPE)
        scale = elements
    else:
        elements, scale = quantize_blocks(x, global_scale, FORMAT, SHARED, ROUNDING)
        if FORM == "dequantized":
            elements = dequantize_blocks(elements, scale, global_scale, FORMAT).to(DTYPE)
        elif FORM == "e5m2":
            values, descale = mxfp4_to_e5m2(elements, scale, AXIS)
            elements = to_e5m2(values)
        else:
            tl.static_assert(FORM == "packed", "FORM must be dequantized, int8, e4m3, e5m2 or packed")
            if FORMAT == "mxfp8":  # noqa: SIM108 (a constexpr branch)
                elements = to_e4m3(tl.reshape(elements, x.shape))
            else:
                elements = pack_e2m1(elements)
    return elements, scale, descale


@triton.jit
def pack_scale(scale, FORMAT: tl.constexpr):
    """Return block scales in their stored form: E8M0 codes, or E4M3 for NVFP4."""
    return to_e4m3(scale) if FORMAT == "nvfp4" else scale.to(tl.uint8)


@triton.jit
def prepare_queries(
    x, global_scale, FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Convert transformed queries, fp32 ``[ROWS, BLOCK_D]``, to the operand format of their keys, any but ``raw``.

    Arguments are those of :func:`to_operand`; ``SHARED`` is ``block`` or ``row``, and ``global_scale`` is 1 for formats
    other than NVFP4.

    Returns:
        The queries; their block scales (unused except for ``packed``); and their descales, fp32 ``[ROWS]``.
    """
    ROWS: tl.constexpr = x.shape[0]
    descale = tl.full([ROWS], 1.0, tl.float32)
    if FORM != "dequantized" and FORM != "e5m2" and FORM != "packed":
        # One scale per row, for 8-bit tensor cores.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)
        reciprocal, descale = row_scale(bits, FORM, FORMAT, ROUNDING == "ceil")
        q = to_elements(x, reciprocal[:, None], FORM, ROUNDING == "ceil")
        scale = q
    else:
        q, scale, row_descale = to_operand(x, global_scale, FORM, FORMAT, SHARED, ROUNDING, "row", DTYPE)
        if FORM == "e5m2":
            descale = tl.reshape(row_descale, [ROWS])
        elif FORM == "packed":
            scale = pack_scale(scale, FORMAT)
            if FORMAT == "nvfp4":
                descale *= global_scale
    return q, scale, descale
