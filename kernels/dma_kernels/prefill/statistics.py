"""What quantising one tile needs to know of the others, gathered by Triton kernels in one pass.

* The mean key of the first 128 visible ones, which ``smooth_k`` subtracts.
* The largest magnitude of each channel of the values, for the scales of ``pv = "fp8"``.
* The largest magnitude in a finite block of transformed keys or of transformed queries, for NVFP4's scale of the head.

A maximum over keys comes in up to :data:`CHUNKS` parts, each of every so-many-th tile, and whoever needs it reduces
them: this spares a launch, and the zeroed buffer that atomic maxima would want. Maxima are kept as the int32 bits of
fp32 magnitudes, which order like the numbers, infinity and NaN above all others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.arithmetic import let_next_start, program_block, round_to_bfloat16
from ..device.blocks import finite_block_amax, nvfp4_head_scale
from ..device.tiles import load_transformed, load_visible, visible_rows
from ..numerics.formats import TILE

CHUNKS = 32
"""Parts of a maximum. As many programs for each kv head keep the memory of an H200 busy from 5 heads on; with 64 parts
quantising 128K tokens of 8 kv heads takes a tenth longer."""

_TILE = tl.constexpr(TILE)
_CHUNKS = tl.constexpr(CHUNKS)


@triton.jit
def _largest(bits, factor):
    """Return the bits of the largest of the magnitudes ``[ROWS, BLOCKS]`` times ``factor``, an int32 scalar."""
    # Rounding is monotonic: the largest product is that of the largest number.
    return (tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)


@triton.jit
def _key_statistics(
    k_ptr, mean_ptr, head_ptr, rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd, kv_offset, kv_len, tiles, chunks,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_HEAD: tl.constexpr, ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    i_b = i_head // KV_HEADS
    base = k_ptr + i_b * stride_kb + (i_head % KV_HEADS) * stride_kh
    first, last, start = visible_rows(rows_ptr, i_b, kv_offset, kv_len, HAS_ROWS)
    o_t = tl.arange(0, _TILE)
    o_d = tl.arange(0, BLOCK_D)
    mean = tl.zeros([BLOCK_D], tl.float32)
    if HAS_MEAN:
        # Each program of a head needs it for its maximum, and finds it sooner itself than from another.
        total = tl.sum(load_visible(base, first + o_t, first, last, stride_kt, stride_kd, D, BLOCK_D), 0)
        count = tl.minimum(tl.maximum(last - first, 1), _TILE).to(tl.float32)
        mean = round_to_bfloat16(tl.math.div_rn(total, tl.zeros([BLOCK_D], tl.float32) + count))
        if i_chunk == 0:
            tl.store(mean_ptr + i_head * D + o_d, mean, mask=o_d < D)
    if HAS_HEAD:
        o_r = tl.arange(0, ROWS)
        largest = tl.zeros([ROWS, BLOCK_D // 16], tl.int32)
        for i_block in tl.range(i_chunk, tiles * (_TILE // ROWS), chunks, num_stages=STAGES):
            x = load_transformed(
                base, start + i_block * ROWS + o_r, first, last, stride_kt, stride_kd, mean,
                D, BLOCK_D, HAS_MEAN, ROTATE, HADAMARD_SIZE, 1.0,
            )  # fmt: skip
            largest = tl.maximum(largest, finite_block_amax(x))
        tl.store(head_ptr + i_head * _CHUNKS + i_chunk, _largest(largest, NORM if ROTATE else 1.0))


@triton.jit
def _value_statistics(
    v_ptr, channels_ptr, rows_ptr, stride_vb, stride_vh, stride_vt, stride_vd, kv_offset, kv_len, tiles, chunks,
    KV_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_ROWS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i_head = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    i_b = i_head // KV_HEADS
    base = v_ptr + i_b * stride_vb + (i_head % KV_HEADS) * stride_vh
    first, last, start = visible_rows(rows_ptr, i_b, kv_offset, kv_len, HAS_ROWS)
    # Small blocks, several of them in flight, and one reduction over rows in the end.
    o_r = tl.arange(0, ROWS)
    largest = tl.zeros([ROWS, BLOCK_DV], tl.int32)
    for i_block in tl.range(i_chunk, tiles * (_TILE // ROWS), chunks, num_stages=STAGES):
        x = load_visible(base, start + i_block * ROWS + o_r, first, last, stride_vt, stride_vd, DV, BLOCK_DV)
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    i_part = i_head * _CHUNKS + i_chunk
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(channels_ptr + i_part * DV + o_d, tl.max(largest, 0), mask=o_d < DV)


@triton.jit(do_not_specialize=["kv_offset", "kv_len", "tiles", "chunks"])
def statistics_kernel(
    k_ptr, v_ptr, mean_ptr, key_head_ptr, channels_ptr, rows_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    kv_offset, kv_len, tiles, chunks,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_KEY_HEAD: tl.constexpr, HAS_CHANNELS: tl.constexpr,
    ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Gather a chunk of the statistics of a kv head: of values in the first layer of programs, of keys in the last."""
    let_next_start(USE_PDL)
    if HAS_CHANNELS:  # noqa: SIM102 (a constexpr branch)
        if tl.program_id(2) == 0:
            _value_statistics(
                v_ptr, channels_ptr, rows_ptr, stride_vb, stride_vh, stride_vt, stride_vd,
                kv_offset, kv_len, tiles, chunks, KV_HEADS, DV, BLOCK_DV, HAS_ROWS, ROWS, STAGES,
            )  # fmt: skip
    if HAS_MEAN or HAS_KEY_HEAD:
        # The mean alone is the work of one program.
        key_chunks = chunks if HAS_KEY_HEAD else 1
        if (tl.program_id(2) == tl.num_programs(2) - 1) & (tl.program_id(1) < key_chunks):
            _key_statistics(
                k_ptr, mean_ptr, key_head_ptr, rows_ptr, stride_kb, stride_kh, stride_kt, stride_kd,
                kv_offset, kv_len, tiles, chunks, KV_HEADS, D, BLOCK_D, HAS_ROWS, HAS_MEAN, HAS_KEY_HEAD,
                ROTATE, HADAMARD_SIZE, NORM, ROWS, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["q_len"])
def query_factor_kernel(
    q_ptr, factor_ptr, stride_qb, stride_qh, stride_qt, stride_qd, q_len,
    Q_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    ROTATE: tl.constexpr, HADAMARD_SIZE: tl.constexpr, NORM: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Raise NVFP4's scale of a head to what a block of its transformed queries needs."""
    i_head = tl.program_id(0).to(tl.int64)
    rows = program_block() * BLOCK_T + tl.arange(0, BLOCK_T)
    base = q_ptr + (i_head // Q_HEADS) * stride_qb + (i_head % Q_HEADS) * stride_qh
    mean = tl.zeros([BLOCK_D], tl.float32)
    x = load_transformed(
        base, rows, 0, q_len, stride_qt, stride_qd, mean, D, BLOCK_D, False, ROTATE, HADAMARD_SIZE, 1.0
    )
    # The scale grows with the largest magnitude, so the largest scale is the scale of all; positive floats order like
    # their bits.
    scale = nvfp4_head_scale(_largest(finite_block_amax(x), NORM if ROTATE else 1.0), ROUNDING)
    tl.atomic_max(factor_ptr + i_head, scale.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def reduce_chunks(pointer, chunks):
    """Return the maximum of one head, an int32 scalar, from its parts."""
    o_c = tl.arange(0, _CHUNKS)
    return tl.max(tl.load(pointer + o_c, mask=o_c < chunks, other=0), 0)


@triton.jit
def reduce_channel_chunks(pointer, chunks, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the maxima of the channels of one head, int32 ``[BLOCK_D]``, from their parts ``[CHUNKS, D]``."""
    o_c = tl.arange(0, _CHUNKS)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_c < chunks)[:, None] & (o_d < D)[None, :]
    return tl.max(tl.load(pointer + o_c[:, None] * D + o_d[None, :], mask=mask, other=0), 0)
