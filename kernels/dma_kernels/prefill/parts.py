"""Triton functions that quantise rows to 8-bit elements in parts of 32 channels: a tuple of ``[ROWS, 32]``.

Triton gives two threads 16 channels each of every part: as many bytes of codes as one store takes. So of the seven
levels of a rotation of 128 channels only one is between threads, and what there is to know of a row, of its scale first
of all, is worked out twice. Of ``[ROWS, 128]`` eight threads would have a row. From 129 channels on parts have 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import hadamard, to_elements
from ..device.blocks import row_scale

_THREAD = tl.constexpr(16)  # channels of a part that a thread has


@triton.constexpr_function
def part_width(D):
    """Return the channels of a part: so many that there are at most four."""
    return 32 if D <= 128 else 64


@triton.jit
def load_parts(base, rows, first, last, stride_t, stride_d, D: tl.constexpr):
    """Load rows as they are; zeros outside ``first..last`` and from channel ``D`` on."""
    m_row = (rows >= first) & (rows < last)
    row = base + rows.to(tl.int64)[:, None] * stride_t
    WIDTH: tl.constexpr = part_width(D)
    parts = ()
    for p in tl.static_range((D + WIDTH - 1) // WIDTH):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        offset = o_d.to(tl.int64)[None, :] * stride_d
        x = tl.load(row + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
        parts += (x,)  # type: ignore[assignment]
    return parts


@triton.jit
def store_parts(base, row, parts, m_row, D: tl.constexpr):
    """Store ``D`` channels of parts; ``row`` is where each row begins."""
    WIDTH: tl.constexpr = parts[0].shape[1]
    for p in tl.static_range(len(parts)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        tl.store(base + (row[:, None] + o_d[None, :]), parts[p], mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def rotate_parts(parts, SIZE: tl.constexpr, norm):
    """Rotate as :func:`~dma_kernels.device.arithmetic.hadamard` does; fp32."""
    WIDTH: tl.constexpr = parts[0].shape[1]
    rotated = ()
    for p in tl.static_range(len(parts)):
        x = hadamard(parts[p], parts[p].shape[0], min(SIZE, WIDTH), WIDTH, norm if SIZE <= WIDTH else 1.0)
        rotated += (x,)  # type: ignore[assignment]
    for level in tl.static_range(2):
        if (WIDTH << level) < SIZE:
            added = ()
            for p in tl.static_range(len(parts)):
                a, b = rotated[p & ~(1 << level)], rotated[p | (1 << level)]  # type: ignore[var-annotated]
                x = a - b if p & (1 << level) else a + b
                added += (x * norm if (2 * WIDTH << level) == SIZE else x,)  # type: ignore[assignment]
            rotated = added
    return rotated


@triton.jit
def row_bits(parts):
    """Return the bits of the largest magnitude of each row, int32 ``[ROWS]``; infinity and NaN are above all others."""
    largest = tl.abs(parts[0])
    for p in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, tl.abs(parts[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(largest.to(tl.int32, bitcast=True), 1)


@triton.jit
def quantize_parts(parts, reciprocal, FORM: tl.constexpr, IS_CEIL: tl.constexpr):
    """Return the :func:`~dma_kernels.device.arithmetic.to_elements` of parts."""
    elements = ()
    for p in tl.static_range(len(parts)):
        elements += (to_elements(parts[p], reciprocal, FORM, IS_CEIL),)  # type: ignore[assignment]
    return elements


@triton.jit
def quantize_row_parts(
    parts, FORM: tl.constexpr, FORMAT: tl.constexpr, IS_CEIL: tl.constexpr, ROTATE: tl.constexpr, SIZE: tl.constexpr,
    norm,
):  # fmt: skip
    """Quantise rows with one scale each; return elements, and what one of their units is worth, fp32 ``[ROWS]``."""
    x = to_float(parts)
    if ROTATE:
        x = rotate_parts(x, SIZE, norm)
    reciprocal, factor = row_scale(row_bits(x), FORM, FORMAT, IS_CEIL)
    return quantize_parts(x, reciprocal[:, None], FORM, IS_CEIL), factor


@triton.jit
def to_float(parts):
    """Return parts as fp32."""
    x = ()
    for p in tl.static_range(len(parts)):
        x += (parts[p].to(tl.float32),)
    return x


@triton.jit
def zeros_where(condition, parts):
    """Return parts, or zeros if a condition holds."""
    chosen = ()
    for p in tl.static_range(len(parts)):
        chosen += (tl.where(condition, 0.0, parts[p]),)
    return chosen


@triton.jit
def subtract_vector(parts, vector_ptr, start, first, last, D: tl.constexpr):
    """Subtract a vector of ``D`` fp32 numbers from the rows from ``start`` on, of which only ``first..last`` are there.

    If one is there, a number that is not finite makes NaN of the others too: a scale that they share is broken anyway.
    """
    ROWS: tl.constexpr = parts[0].shape[0]
    WIDTH: tl.constexpr = parts[0].shape[1]
    rows = start + tl.arange(0, ROWS)
    share = tl.where((rows >= first) & (rows < last), 1.0, 0.0)[:, None]
    channels = tl.where(tl.minimum(last - start, start + ROWS - first) > 0, D, 0)
    left = ()
    for p in tl.static_range(len(parts)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        vector = tl.load(vector_ptr + o_d, mask=o_d < channels, other=0.0)
        left += (parts[p] - share * vector[None, :],)  # type: ignore[assignment]
    return left


@triton.jit
def dot_parts(parts, vector_ptr, D: tl.constexpr):
    """Return the products of rows and a vector of ``D`` fp32 numbers, ``[ROWS]``.

    Sums of 16 channels first, then of halves of them: in the same order for parts and for whole rows.
    """
    ROWS: tl.constexpr = parts[0].shape[0]
    WIDTH: tl.constexpr = parts[0].shape[1]
    tl.static_assert(len(parts) & (len(parts) - 1) == 0, "halves of the parts are added")
    sums = ()
    for p in tl.static_range(len(parts)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        products = parts[p].to(tl.float32) * tl.load(vector_ptr + o_d, mask=o_d < D, other=0.0)[None, :]
        sums += (tl.sum(tl.reshape(products, [ROWS, WIDTH // _THREAD, _THREAD]), 2),)  # type: ignore[assignment]
    for level in tl.static_range(1, 3):
        if len(parts) >> level > 0:
            halves = ()
            for p in tl.static_range(len(parts) >> level):
                halves += (sums[p] + sums[p + (len(parts) >> level)],)  # type: ignore[assignment]
            sums = halves
    return tl.sum(sums[0], 1)  # type: ignore[misc]
