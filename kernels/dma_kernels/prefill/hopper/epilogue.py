"""The epilogue of a warpgroup, in Gluon: stores of the output, the log-sum-exp and tile counts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.arithmetic import narrow as _narrow_triton

narrow = gluon.jit(_narrow_triton.fn)


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
