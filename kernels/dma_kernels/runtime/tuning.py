"""Configuration of the decode kernel: a pure function of the chip and the shape."""

from __future__ import annotations

from dataclasses import dataclass

from .chip import TENSOR_MEMORY_ARCHS


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel.

    Attributes:
        warps: Of a program.
        programs: Of the grid; they share the tiles of all heads.
        buffers: Places for half a tile's keys or values that a warp has.
    """

    warps: int
    programs: int
    buffers: int


PARTS = 32
"""Programs of a head where it has more are a multiple of these, which divides the rounds of long rows most evenly."""


def _aligned(slots: int, heads: int) -> int:
    """Return how many programs share heads: where rows are of one length, a share ends where a head does.

    At most an eighth of the ``slots`` stays free for that.
    """
    each = slots // heads
    if each > PARTS:
        each -= each % PARTS
    programs = each * heads or -(-heads // -(-heads // slots))
    return programs if 8 * programs >= 7 * slots else slots


def select_decode_tiles(
    arch: int, block_d: int, block_dv: int, bits: int, *, heads: int, tiles: int, processors: int
) -> DecodeTiles:
    """Return the sizes of a decode step: a function of shapes and capacities, not of how much a cache holds.

    Args:
        arch: Compute capability, major version times ten plus minor.
        block_d: Head dimension of keys, padded to a power of two.
        block_dv: That of values, likewise, at least 64.
        bits: Of a code.
        heads: Kv heads of all batch rows.
        tiles: Tiles that the cache can hold, raw ones too.
        processors: Multiprocessors of the device.
    """
    # With two places for halves of a tile, which keys and values take in turn, a multiprocessor has shared memory for
    # eight warps of 8 bits, as many as it has registers for, instead of six (an H200, Triton 3.6, in us: 64 x 4K 147
    # instead of 159), and at head_dim 256 for six instead of three (32 x 8K 290 instead of 321; 4 bits, eight instead
    # of six, 175 instead of 209). Those of 4 bits and head_dim 128 have room for eight with four (1 x 32K 25.3 instead
    # of 26.6).
    buffers = 2 if block_d == block_dv and (bits == 8 or block_d > 128) else 4
    tile = (block_d + block_dv) * 4 * buffers * bits + 4 * block_d + 8 * block_dv
    # Of the shared memory of a multiprocessor CUDA keeps 1 KB for each program.
    has = 167_936 if arch == 80 else 233_472 if arch == 90 or arch in TENSOR_MEMORY_ARCHS else 102_400
    # Few heads have many parts to be combined, fewer with four warps (4 bits, 8 x 32K: 86 us, 90 with two; 8 bits have
    # none of it, 1 x 32K: 33.8, 32.7 with two); of many heads a program has one or two whole ones, and others meanwhile
    # go on (4 bits, 64 x 4K: 104 us, 119 with four).
    warps = 4 if bits == 4 and heads < processors else 2
    if heads >= processors and bits == 8 and block_d > 128:
        warps = 1  # 32 x 8K: 290 us, 299 with two
    while warps > 1 and warps * tile + 1024 > has:
        warps //= 2
    slots = processors * max(1, min(8 // warps, has // (warps * tile + 1024)))
    # Where a program has few tiles, it mostly waits, the more so in steps over raw tiles. With rounds and steps divided
    # each by themselves (an H200, Triton 3.6, after other work on the chip; 4 bits, in us) 1 x 8K takes 15.9 instead of
    # 17.0, but 1 x 32K 27.2 instead of 25.6, 8 x 32K 90.7 instead of 84.1; with raw tiles loaded a step ahead, too,
    # 16.8, 29.8 and 95.6.
    return DecodeTiles(
        warps=warps,
        programs=min(_aligned(slots, heads), heads * tiles),
        buffers=buffers,
    )
