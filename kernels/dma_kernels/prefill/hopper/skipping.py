"""The vote of a warpgroup on whether a low tile is skipped, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def init_votes():
    """Declare and clear what :func:`any_row_keeps` needs. A barrier of the CTA must follow before the first vote.

    PTX variables, because Gluon has neither a vote across warps nor a scalar that differs between them. The buffer
    takes a whole KiB, as dynamic shared memory begins after it and swizzled tiles are aligned to that.
    """
    gl.inline_asm_elementwise(
        """
        .reg .pred keeps_first, keeps_tile;
        .shared .align 1024 .b32 kept_tiles[256];
        st.shared.v4.b32 [kept_tiles], {-1, -1, -1, -1};
        mov.b32 $0, 0;
        """,
        "=r", [], gl.int32, False, 1,
    )  # fmt: skip


@gluon.constexpr_function
def _announce_asm(warpgroup, barrier):
    return (
        f"@keeps_first st.shared.b32 [kept_tiles + {4 * warpgroup}], $1; "
        f"@keeps_first bar.arrive {barrier}, 128; mov.b32 $0, 0;"
    )


@gluon.constexpr_function
def _agree_asm(warpgroup, barrier):
    """Return PTX of operands: a maximum, its bound, the tile."""
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
    """Split ``[64, ...]`` into the first and the second row that each thread holds: a renaming of registers."""
    if len(x.shape) == 1:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8]), [0, 2, 1]))
    else:
        halves = gl.split(gl.permute(gl.reshape(x, [4, 2, 8, x.shape[1]]), [0, 2, 3, 1]))
    return halves


@gluon.jit
def _partial_max(s, factor):
    """Return the maxima of ``[4, 8, N]`` over the columns that each of a row's four threads holds, times ``[4, 8]``."""
    N: gl.constexpr = s.shape[2]
    largest = gl.max(gl.max(gl.reshape(s, [4, 8, N // 8, 4, 2]), 4), 2).to(gl.float32)
    return largest * gl.expand_dims(
        gl.convert_layout(factor, gl.SliceLayout(2, largest.type.layout), assert_trivial=True), 2
    )


@gluon.jit
def any_row_keeps(s, factor, bound, tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Whether a row of the warpgroup's 64 has a logit at or above its bound in a tile. NaN counts as above.

    A warp that finds one goes on at once; only the others wait for the warpgroup. So a tile that all warps keep costs
    no wait.

    Args:
        s: Scores ``[64, N]``, int32 or fp32.
        factor: Turns them into logits, fp32 ``[64]``.
        bound: fp32 ``[64]``.
        tile: Index of the tile, which differs from that of the vote before.
        WARPGROUP: Index of the warpgroup.
        BARRIER: Named barrier of its votes.
    """
    s_0, s_1 = _row_halves(s)
    factor_0, factor_1 = _row_halves(factor)
    bound_0, bound_1 = _row_halves(bound)
    max_0 = _partial_max(s_0, factor_0)
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
        max_1 = _partial_max(copy_1, factor_1)
        AGREE: gl.constexpr = _agree_asm(WARPGROUP, BARRIER)
        gl.inline_asm_elementwise(AGREE, "=r,f,f,r", [max_1, bound_1, tile], gl.int32, False, 1)
    return _voted()


@gluon.jit
def announce_keep(tile, WARPGROUP: gl.constexpr, BARRIER: gl.constexpr):
    """Tell the warps that wait in :func:`any_row_keeps` that the tile is kept; where it is, each warp calls this."""
    ASM: gl.constexpr = _announce_asm(WARPGROUP, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r", [tile], gl.int32, False, 1)
