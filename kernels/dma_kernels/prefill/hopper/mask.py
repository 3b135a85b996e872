"""Masks of scores and of values, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...numerics.formats import TILE
from .tile_range import ROWS, clamp

_ROWS = gl.constexpr(ROWS)
_HIGH = gl.constexpr(TILE // 2)


@gluon.jit
def seen_range(q_pos, visible_start, visible_end, window, IS_CAUSAL: gl.constexpr):
    """Return for each query the position of the first key that it sees and the one past the last."""
    start = gl.zeros_like(q_pos) + visible_start
    end = gl.zeros_like(q_pos) + visible_end
    if IS_CAUSAL:
        end = gl.minimum(end, q_pos + 1)
    if window is not None:
        start = gl.maximum(start, q_pos - (window - 1 if IS_CAUSAL else window))
        if not IS_CAUSAL:
            end = gl.minimum(end, q_pos + window + 1)
    return start, end


@gluon.jit
def seen_keys(q_pos, k_pos, visible_start, visible_end, window, IS_CAUSAL: gl.constexpr):
    """Return which keys the queries see, ``[M, N]``."""
    start, end = seen_range(q_pos, visible_start, visible_end, window, IS_CAUSAL)
    return (k_pos[None, :] >= start[:, None]) & (k_pos[None, :] < end[:, None])


@gluon.jit
def places_of_words(mask_ptr, row, q_len, tiles, LAYOUT: gl.constexpr):
    """Return where the words of tile 0 are for 64 queries from ``row`` on, ``[64, 4]``; a tile has four for a query."""
    rows = clamp(row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT)), 0, q_len - 1)
    words = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return mask_ptr + (rows.to(gl.int64)[:, None] * (4 * tiles) + words[None, :])


@gluon.jit
def hide_masked(s, words):
    """Return scores ``[M, N]``, minus infinity where the bit of a key is 0 in ``[M, 4]`` words.

    Of the columns of a row a thread has ``8 j + 2 t`` and ``8 j + 2 t + 1``, whose bits are ``2 j`` and ``2 j + 1`` of
    word ``t``: see :mod:`dma_kernels.prefill.hopper.bitmask`.
    """
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    x = gl.reshape(s, [M, N // 8, 4, 2])
    OF_J: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout)))
    OF_LAST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout)))
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)), assert_trivial=True)
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, N // 8, layout=OF_J), 0), 2), 3)
    last = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=OF_LAST), 0), 1), 2)
    bits = gl.expand_dims(gl.expand_dims(words, 1), 3) >> (2 * j + last)
    x = gl.where((bits & 1) != 0, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, [M, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def hide_values(values, position, visible_start, visible_end, DV: gl.constexpr):
    """Write zeros where values of 64 keys, ``[64, Dv]`` in shared memory, are hidden.

    They may be anything, and no probability of 0 makes up for a NaN. Every warpgroup that reads the block does this
    first, and all write the same bytes.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    k_pos = position + gl.arange(0, _HIGH, layout=gl.SliceLayout(1, LAYOUT))
    is_shown = ((k_pos >= visible_start) & (k_pos < visible_end))[:, None]
    values.store(gl.where(is_shown, values.load(LAYOUT), 0.0))
    fence_async_shared()
