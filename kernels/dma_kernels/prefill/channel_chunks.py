"""Triton functions that quantize rows to 8-bit elements in chunks of 32 channels: a tuple of ``[ROWS, 32]``.

Above 128 channels, chunks have 64. In a chunk of 32, each of two threads holds 16 channels of a row, which fill one
16-byte store. Of the seven levels of a 128-channel rotation, one crosses threads, and a row's scale is computed twice.
In ``[ROWS, 128]``, eight threads would share a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import hadamard, to_elements
from ..device.blocks import row_scale

_THREAD = tl.constexpr(16)  # channels of a chunk that a thread holds


@triton.constexpr_function
def chunk_width(D):
    """Return the channels of a chunk. A row has at most four chunks."""
    return 32 if D <= 128 else 64


@triton.jit
def load_chunks(x, rows, first, last, D: tl.constexpr):
    """Load rows of a head unchanged; zeros outside ``first..last`` and past the ``D`` channels."""
    m_row = (rows >= first) & (rows < last)
    row = x.ptr + rows.to(tl.int64)[:, None] * x.stride_t
    WIDTH: tl.constexpr = chunk_width(D)
    chunks = ()
    for p in tl.static_range((D + WIDTH - 1) // WIDTH):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        offset = o_d.to(tl.int64)[None, :] * x.stride_d
        chunk = tl.load(row + offset, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
        chunks += (chunk,)  # type: ignore[assignment]
    return chunks


@triton.jit
def store_chunks(base, row, chunks, m_row, D: tl.constexpr):
    """Store ``D`` channels of chunks; ``row`` is where each row begins."""
    WIDTH: tl.constexpr = chunks[0].shape[1]
    for p in tl.static_range(len(chunks)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        tl.store(base + (row[:, None] + o_d[None, :]), chunks[p], mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def rotate_chunks(chunks, SIZE: tl.constexpr, norm):
    """Rotate as :func:`~dma_kernels.device.arithmetic.hadamard` does; fp32."""
    WIDTH: tl.constexpr = chunks[0].shape[1]
    rotated = ()
    for p in tl.static_range(len(chunks)):
        x = hadamard(chunks[p], min(SIZE, WIDTH), norm if SIZE <= WIDTH else 1.0)
        rotated += (x,)  # type: ignore[assignment]
    for level in tl.static_range(2):
        if (WIDTH << level) < SIZE:
            added = ()
            for p in tl.static_range(len(chunks)):
                a, b = rotated[p & ~(1 << level)], rotated[p | (1 << level)]  # type: ignore[var-annotated]
                x = a - b if p & (1 << level) else a + b
                added += (x * norm if (2 * WIDTH << level) == SIZE else x,)  # type: ignore[assignment]
            rotated = added
    return rotated


@triton.jit
def row_amax(chunks):
    """Return the bits of each row's largest magnitude, int32 ``[ROWS]``; infinity and NaN sort above all others."""
    largest = tl.abs(chunks[0])
    for p in tl.static_range(1, len(chunks)):
        largest = tl.maximum(largest, tl.abs(chunks[p]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(largest.to(tl.int32, bitcast=True), 1)


@triton.jit
def quantize_chunks(chunks, reciprocal, FORM: tl.constexpr, IS_CEIL: tl.constexpr):
    """Apply :func:`~dma_kernels.device.arithmetic.to_elements` to each chunk."""
    elements = ()
    for p in tl.static_range(len(chunks)):
        elements += (to_elements(chunks[p], reciprocal, FORM, IS_CEIL),)  # type: ignore[assignment]
    return elements


@triton.jit
def quantize_row_chunks(
    chunks, FORM: tl.constexpr, FORMAT: tl.constexpr, IS_CEIL: tl.constexpr, SIZE: tl.constexpr, norm
):
    """Rotate and quantize rows with one scale each; return elements, and their descales, fp32 ``[ROWS]``."""
    x = rotate_chunks(to_float(chunks), SIZE, norm)
    reciprocal, descale = row_scale(row_amax(x), FORM, FORMAT, IS_CEIL)
    return quantize_chunks(x, reciprocal[:, None], FORM, IS_CEIL), descale


@triton.jit
def to_float(chunks):
    """Return chunks as fp32."""
    x = ()
    for p in tl.static_range(len(chunks)):
        x += (chunks[p].to(tl.float32),)
    return x


@triton.jit
def zeros_where(condition, chunks):
    """Return chunks with zeros where a condition holds."""
    chosen = ()
    for p in tl.static_range(len(chunks)):
        chosen += (tl.where(condition, 0.0, chunks[p]),)
    return chosen


@triton.jit
def subtract_vector(chunks, vector_ptr, start, first, last, D: tl.constexpr):
    """Subtract a vector, fp32 ``[D]``, from rows that lie in ``first..last``; row 0 of a chunk has the index ``start``.

    A non-finite number in the vector also turns the other rows into NaN: the scale that they share is broken anyway.
    """
    ROWS: tl.constexpr = chunks[0].shape[0]
    WIDTH: tl.constexpr = chunks[0].shape[1]
    rows = start + tl.arange(0, ROWS)
    share = tl.where((rows >= first) & (rows < last), 1.0, 0.0)[:, None]
    channels = tl.where(tl.minimum(last - start, start + ROWS - first) > 0, D, 0)
    left = ()
    for p in tl.static_range(len(chunks)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        vector = tl.load(vector_ptr + o_d, mask=o_d < channels, other=0.0)
        left += (chunks[p] - share * vector[None, :],)  # type: ignore[assignment]
    return left


@triton.jit
def dot_chunks(chunks, vector_ptr, D: tl.constexpr):
    """Return the dot products of rows and a vector, fp32 ``[D]``: fp32 ``[ROWS]``.

    Sums 16 channels first, then halves of chunks, in the order of a reduction over the whole row.
    """
    ROWS: tl.constexpr = chunks[0].shape[0]
    WIDTH: tl.constexpr = chunks[0].shape[1]
    tl.static_assert(len(chunks) & (len(chunks) - 1) == 0, "halves of the chunks are added")
    sums = ()
    for p in tl.static_range(len(chunks)):
        o_d = p * WIDTH + tl.arange(0, WIDTH)
        products = chunks[p].to(tl.float32) * tl.load(vector_ptr + o_d, mask=o_d < D, other=0.0)[None, :]
        sums += (tl.sum(tl.reshape(products, [ROWS, WIDTH // _THREAD, _THREAD]), 2),)  # type: ignore[assignment]
    for level in tl.static_range(1, 3):
        if len(chunks) >> level > 0:
            halves = ()
            for p in tl.static_range(len(chunks) >> level):
                halves += (sums[p] + sums[p + (len(chunks) >> level)],)  # type: ignore[assignment]
            sums = halves
    return tl.sum(sums[0], 1)  # type: ignore[misc]
