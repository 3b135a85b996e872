"""Tile sizes of the kernels: a pure function of the chip and the shape, with the measured reason beside each number.

Measured on an H200 (torch 2.11, Triton 3.6, batch 1, 32 query and 8 kv heads, causal, MXINT8 low tiles and
FP8 values, TFLOP/s).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillTiles:
    """Sizes of the prefill kernel.

    Attributes:
        block_m: Query positions of a program; divides 128.
        block_n: Keys of a step; divides 128.
        num_warps: Warps of a program.
        num_stages: Key blocks in flight in the loop over low tiles.
        max_registers: Of a thread; ``None`` for as many as the compiler likes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def select_tiles(arch: int, head_dim: int, value_dim: int, low_bits: int, value_bits: int) -> PrefillTiles:
    """Return the sizes for a chip of compute capability ``arch`` (90 is Hopper).

    Args:
        arch: Major version times ten plus minor.
        head_dim: Of queries and keys, padded to a power of two.
        value_dim: Of values, padded to a power of two.
        low_bits: Storage bits of an operand of the low scores.
        value_bits: Storage bits of a value.
    """
    widest = max(head_dim, value_dim)
    if arch >= 90 and low_bits == value_bits == 8 and widest <= 128:
        # 64 x 128 with 4 warps against 128 x 128 with 8: 806 to 549 at head_dim 128 and 32K (attention alone). Several
        # programs then share a multiprocessor, and one computes its softmax while another keeps the matrix units busy.
        # On Hopper a cap on registers admits a third (fourth) program: 806 against 728 at head_dim 128 and 32K, 558
        # against 419 at head_dim 64 and 16K; what it spills lies outside the loop over low tiles. On sm_100 and sm_120
        # it would lie inside (compiled, not run).
        if widest == 128:
            # A third stage would push the third program out: 768 against 806.
            return PrefillTiles(64, 128, num_warps=4, num_stages=2, max_registers=168 if arch == 90 else None)
        return PrefillTiles(64, 128, num_warps=4, num_stages=3, max_registers=128 if arch == 90 else None)
    if widest <= 64:
        return PrefillTiles(block_m=64, block_n=128, num_warps=4, num_stages=2)
    if widest <= 128:
        # 16-bit operands fill twice the shared memory.
        return PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if arch in (80, 90, 100):
        # One program of 8 warps: 4 of them would spill registers at 256 channels of output.
        return PrefillTiles(block_m=128, block_n=64, num_warps=8, num_stages=2 if arch >= 90 else 1)
    # The consumer chips have 99 KB of shared memory.
    return PrefillTiles(block_m=64, block_n=32, num_warps=4, num_stages=1)
