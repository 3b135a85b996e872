"""The predicate of tile skipping, in Gluon: a warpgroup votes on each low tile after its Q·K product.

A block of 64 queries skips a low tile if every row's largest logit there is more than the threshold below the row's
largest logit in high tiles.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.gluon import aggregate
from .tile_range import ROWS


@gluon.jit
def init_votes():
    """Declare and clear the variables of the votes. A CTA barrier must follow before the first vote.

    They are PTX variables, because Gluon has neither a vote across warps nor a scalar that differs between them. The
    buffer takes 1 KiB, the alignment of swizzled tiles: dynamic shared memory begins after it.
    """
    gl.inline_asm_elementwise(
        """
        .reg .pred keeps_first, keeps_tile;
        .shared .align 1024 .b32 kept_tiles[256];
        st.shared.v4.b32 [kept_tiles], {-1, -1, -1, -1};
        st.shared.v4.b32 [kept_tiles + 64], {-1, -1, -1, -1};
        st.shared.v4.b32 [kept_tiles + 80], {-1, -1, -1, -1};
        mov.b32 $0, 0;
        """,
        "=r", [], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def last_kept_tile():
    """Return the largest last tile that a warpgroup kept, as far as the calling warp can see; -1 if there is none."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 kept_0, kept_1, kept_2, kept_3;
        ld.volatile.shared.v4.b32 {kept_0, kept_1, kept_2, kept_3}, [kept_tiles];
        max.s32 kept_0, kept_0, kept_1;
        max.s32 kept_2, kept_2, kept_3;
        max.s32 $0, kept_0, kept_2;
        }""",
        "=r", [], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def exchange_flag(index, value):
    """As a warp, set the flag of a stage of values; return what it was: whether they were issued, or -1 at first."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred is_first;
        .reg .b32 flag, lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 is_first, lane, 0;
        mov.u32 flag, kept_tiles;
        mad.lo.u32 flag, $1, 4, flag;
        mov.b32 lane, 0;
        @is_first atom.shared.exch.b32 lane, [flag + 64], $2;
        shfl.sync.idx.b32 $0, lane, 0, 31, 0xffffffff;
        }""",
        "=r,r,r", [index, value], gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def claim_values(index):
    """Whether the calling warp is the one that must issue the values of a stage. Only a warpgroup's first can be."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred is_first;
        .reg .b32 flag, thread;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 is_first, thread, 0;
        mov.u32 flag, kept_tiles;
        mad.lo.u32 flag, $1, 4, flag;
        mov.b32 thread, 1;
        @is_first atom.shared.exch.b32 thread, [flag + 64], 1;
        shfl.sync.idx.b32 $0, thread, 0, 31, 0xffffffff;
        }""",
        "=r,r", [index], gl.int32, False, 1,
    ) == 0  # fmt: skip


@gluon.constexpr_function
def _announce_asm(warpgroup, barrier):
    return (
        f"@keeps_first st.shared.b32 [kept_tiles + {4 * warpgroup}], $1; "
        f"@keeps_first bar.arrive {barrier}, 128; mov.b32 $0, 0;"
    )


@gluon.constexpr_function
def _agree_asm(warpgroup, barrier):
    """Return the PTX; its operands are a maximum, its bound, and the tile."""
    return f"""{{
        .reg .b32 kept;
        setp.geu.f32 keeps_tile, $1, $2;
        vote.sync.any.pred keeps_tile, keeps_tile, 0xffffffff;
        mov.b32 kept, -1;
        @keeps_tile st.shared.b32 [kept_tiles + {4 * warpgroup}], $3;
        @keeps_tile bar.arrive {barrier}, 128;
        @!keeps_tile bar.sync {barrier}, 128;
        @!keeps_tile ld.shared.b32 kept, [kept_tiles + {4 * warpgroup}];
        setp.eq.or.b32 keeps_tile, kept, $3, keeps_tile;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def _voted():
    return gl.inline_asm_elementwise("selp.b32 $0, 1, 0, keeps_tile;", "=r", [], gl.int32, False, 1) != 0


@gluon.jit
def _row_halves(x):
    """Split ``[64, ...]`` into the first and the second row that each thread holds; only renames registers."""
    if len(x.shape) == 1:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8]), [0, 2, 1]))
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8, x.shape[1]]), [0, 2, 3, 1]))
    return halves


@gluon.jit
def _partial_max(s, factor):
    """Return each thread's maxima over its columns of ``[4, 8, N]``, four threads per row, times ``[4, 8]``."""
    N: gl.constexpr = s.shape[2]
    largest = gl.max(gl.max(gl.reshape(s, [4, 8, N // 8, 4, 2]), 4), 2).to(gl.float32)
    return largest * gl.expand_dims(
        gl.convert_layout(factor, gl.SliceLayout(2, largest.type.layout), assert_trivial=True), 2
    )


@gluon.jit
def _any_row_keeps(s, scale, bound, tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Whether one of the warpgroup's 64 rows has a logit at or above its bound. NaN counts as above.

    A warp that finds one continues at once; only the others wait. So a tile that all warps keep costs no wait.

    The warps share one word. A warp must not write it for the next tile before the others have read it for this one:
    between two votes, all four must meet. In the warp-specialized kernel they meet only because Triton puts a
    ``bar.sync`` of the warpgroup before each wait for a stage; a test looks for it in the PTX.
    """
    s_0, s_1 = _row_halves(s)
    scale_0, scale_1 = _row_halves(scale)
    bound_0, bound_1 = _row_halves(bound)
    max_0 = _partial_max(s_0, scale_0)
    BOUND: gl.constexpr = gl.SliceLayout(2, max_0.type.layout)
    bound_0 = gl.expand_dims(gl.convert_layout(bound_0, BOUND, assert_trivial=True), 2)
    bound_1 = gl.expand_dims(gl.convert_layout(bound_1, BOUND, assert_trivial=True), 2)
    gl.inline_asm_elementwise(
        "setp.geu.f32 keeps_first, $1, $2; vote.sync.any.pred keeps_first, keeps_first, 0xffffffff; "
        "mov.pred keeps_tile, keeps_first; mov.b32 $0, 0;",
        "=r,f,f", [max_0, bound_0], gl.int32, False, 1,
    )  # fmt: skip
    if not _voted():
        # Copied, so that the compiler does not compute it for both branches.
        copy_1 = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [s_1], s_1.dtype, False, 1)
        max_1 = _partial_max(copy_1, scale_1)
        AGREE: gl.constexpr = _agree_asm(WARPGROUP, BARRIER)
        gl.inline_asm_elementwise(AGREE, "=r,f,f,r", [max_1, bound_1, tile], gl.int32, False, 1)
    return _voted()


@gluon.jit
def _announce_keep(tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    ASM: gl.constexpr = _announce_asm(WARPGROUP, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r", [tile], gl.int32, False, 1)


@aggregate
class SkipVote:
    """The votes of a warpgroup."""

    bound: Any  # smallest logit that keeps a tile, per row, fp32 ``[64]``; ``None`` if no tile is skipped
    is_whole: Any  # whether the call holds all 64 queries of the block; otherwise no tile is skipped
    WARPGROUP: Any  # index of the warpgroup
    BARRIER: Any  # named barrier of its votes

    @gluon.jit
    def keeps(self, s, scale, tile):
        """Whether the tile is kept; if so, every warp must call :meth:`announce` next.

        ``scale``, fp32 ``[64]``, converts the scores ``s`` to base-2 logits. ``tile`` differs from the previous vote's.
        """
        return _any_row_keeps(s, scale, self.bound, tile, self.WARPGROUP, self.BARRIER)

    @gluon.jit
    def announce(self, tile):
        """Release the warps that wait in :meth:`keeps`."""
        if self.bound is not None:
            _announce_keep(tile, self.WARPGROUP, self.BARRIER)


@gluon.jit
def init_vote(start, seq, high_max, skip_threshold, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Return the :class:`SkipVote` of the block of 64 queries at position ``start``.

    ``high_max`` are the largest logits in high tiles, fp32 ``[64]``. They and ``skip_threshold`` are in base 2.
    """
    is_whole = (start >= seq.q_offset) & (start + ROWS <= seq.q_offset + seq.q_len)
    bound = None
    if skip_threshold is not None:
        bound = gl.where(is_whole, high_max - skip_threshold, float("-inf"))
    return SkipVote(bound=bound, is_whole=is_whole, WARPGROUP=WARPGROUP, BARRIER=BARRIER)
