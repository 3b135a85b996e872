"""Masks of scores and values, in Gluon."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...device.gluon import aggregate
from .tile_range import BLOCK, ROWS, attended_start, attended_stop, clamp


@aggregate
class Mask:
    """Which keys the queries of a batch row attend to."""

    visible_start: Any  # position of the first visible key
    visible_end: Any  # position after the last one
    window: Any  # sliding window, or ``None``
    bitmask_ptr: Any  # pointers ``[64, 4]`` to the int32 words of tile 0 for a warpgroup's queries; or ``None``
    IS_CAUSAL: Any  # whether a query attends to no key after its own position
    IS_PLAIN: Any  # whether only causality hides keys

    @gluon.jit
    def union_range(self, start, stop, first, last):
        """Return the part of the positions ``start..stop`` that any query at ``first..last`` attends to."""
        stop = attended_stop(last - 1, stop, self.window, self.IS_CAUSAL)
        return attended_start(first, start, self.window, self.IS_CAUSAL), stop

    @gluon.jit
    def unmasked_range(self, first, last):
        """Return the positions of keys that all queries at ``first..last`` attend to."""
        last_query = last - 1
        stop = attended_stop(first, self.visible_end, self.window, self.IS_CAUSAL)
        return attended_start(last_query, self.visible_start, self.window, self.IS_CAUSAL), stop

    @gluon.jit
    def apply(self, s, q_start, k_start):
        """Return fp32 scores ``[64, N]``, minus infinity where a query does not attend to a key."""
        LAYOUT: gl.constexpr = s.type.layout
        q_pos = q_start + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        k_pos = (k_start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT)))[None, :]
        if self.IS_PLAIN:
            s = gl.where(k_pos <= q_pos[:, None], s, float("-inf"))
        else:
            start = gl.zeros_like(q_pos) + self.visible_start
            stop = gl.zeros_like(q_pos) + self.visible_end
            if self.IS_CAUSAL:
                stop = gl.minimum(stop, q_pos + 1)
            if self.window is not None:
                start = gl.maximum(start, q_pos - (self.window - 1 if self.IS_CAUSAL else self.window))
                if not self.IS_CAUSAL:
                    stop = gl.minimum(stop, q_pos + self.window + 1)
            s = gl.where((k_pos >= start[:, None]) & (k_pos < stop[:, None]), s, float("-inf"))
        return s

    @gluon.jit
    def with_bitmask(self, bitmask_ptr):
        return Mask(
            visible_start=self.visible_start, visible_end=self.visible_end, window=self.window,
            bitmask_ptr=bitmask_ptr, IS_CAUSAL=self.IS_CAUSAL, IS_PLAIN=self.IS_PLAIN,
        )  # fmt: skip

    @gluon.jit
    def load_bitmask(self, tile):
        """Return the words of a tile, int32 ``[64, 4]``; ``None`` without a bitmask."""
        return gl.load(self.bitmask_ptr + 4 * tile)


@gluon.jit
def bitmask_pointers(mask_ptr, row, q_len, tiles, LAYOUT: gl.constexpr):
    """Return pointers to the words of tile 0, ``[64, 4]``, for 64 queries starting at ``row``."""
    rows = clamp(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 0, q_len - 1)
    words = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))
    return mask_ptr + (rows.to(gl.int64)[:, None] * (4 * tiles) + words[None, :])


@gluon.jit
def apply_bitmask(s, words):
    """Return scores ``[M, N]``, minus infinity where the bit of a key is 0 in ``words``, int32 ``[M, 4]``.

    The thread that holds word ``t`` of a row holds its columns ``8 j + 2 t`` and ``8 j + 2 t + 1``, which are bits
    ``2 j`` and ``2 j + 1``: see :mod:`dma_kernels.prefill.hopper.bitmask`.
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
def zero_out_of_bounds(values, position, mask, DV: gl.constexpr):
    """Zero the values of invisible keys, ``[64, Dv]`` in shared memory, whose first key is at ``position``.

    They may be NaN, which a probability of 0 does not hide. Every warpgroup that reads the stage does this first; all
    write the same bytes.
    """
    if (position < mask.visible_start) | (position + BLOCK > mask.visible_end):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
        k_pos = position + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
        is_visible = ((k_pos >= mask.visible_start) & (k_pos < mask.visible_end))[:, None]
        values.store(gl.where(is_visible, values.load(LAYOUT), 0.0))
        fence_async_shared()
